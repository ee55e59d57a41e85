//! The last things a token meets: the final norm, the output projection, the loss.
//!
//! Tensor-parallel ranks share out the vocabulary. Each has the logits of its own columns, and what they
//! tell each other is two numbers a token: the log-sum-exp of those, and the target's logit where it is
//! among them (Megatron-LM, arXiv:1909.08053, section 3, fuses the loss likewise).

use super::norm::Norms;
use super::tensor::TensorParallel;
use super::transformer::{Layer, linear, linear_dw, linear_dx, weight_grad};
use super::weights::{Rows, Weight, Weights};
use crate::plan::{Axis, Buf, Builder, CollectiveKind, Dtype, Group, Kernel, TensorKind, Via};
use crate::spec::{LlmSpec, WideLoss};

pub struct Head {
    /// Tokens of a microbatch, or of a chunk of it where it goes chunk by chunk.
    tokens: u64,
    chunks: u64,
    /// Rows of logits that exist at a time.
    rows: u64,
    hidden: u64,
    /// Ids of the whole vocabulary, and this rank's columns of it.
    vocab: u64,
    cols: u64,
    /// 1 / tokens of a step, over which the loss is a mean.
    scale: f64,
    acc: Dtype,
    /// Dtype of gradients.
    grads: Dtype,
    tp: TensorParallel,
    weights: Weights,
    norms: Norms,
    norm: Rows,
    /// The output matrix in the head's weights; `None`: the embedding's table serves.
    table: Option<Rows>,
    normed: Buf,
    logits: Buf,
    /// `None` where the loss is made of the logits as they are.
    wide: Option<Wide>,
    d_normed: Buf,
    /// The gradient of the table; `None` where it is added to the sum at once.
    dw: Option<Buf>,
    parallel: Option<Parallel>,
}

/// What a loss in the dtype of sums works on besides the logits, `[rows, cols]` each.
#[derive(Clone, Copy)]
struct Wide {
    logits: Buf,
    /// The gradient of the logits, which may lie in their place.
    d_logits: Buf,
    /// Log-probabilities and their gradient; `None` where one kernel makes the loss.
    log_probs: Option<[Buf; 2]>,
    /// The gradient of the logits in the model's dtype, which may lie where they were.
    narrow: Buf,
}

impl Wide {
    /// `parts`: the vocabulary is shared out. `room` declares a tensor for a name, wide or as narrow as the logits that
    /// are there.
    fn new(loss: WideLoss, parts: bool, there: Buf, mut room: impl FnMut(&str, bool) -> Buf) -> Option<Wide> {
        if loss == WideLoss::Never {
            return None;
        }
        let logits = room("wide_logits", true);
        let fused = Wide { logits, d_logits: logits, log_probs: None, narrow: there };
        Some(match loss {
            WideLoss::InPlace | WideLoss::Never => fused,
            // A framework's log-softmax does not overwrite what it reads.
            WideLoss::Copied if parts => Wide { d_logits: room("wide_d_logits", true), ..fused },
            // PyTorch frees what it has read: the wide logits, whose memory their gradient then has, and the others.
            WideLoss::Copied => {
                let log_probs = Some(["log_probs", "d_log_probs"].map(|name| room(name, true)));
                Wide { log_probs, narrow: room("d_logits", false), ..fused }
            }
        })
    }

    fn map(self, rows: impl Fn(Buf) -> Buf) -> Wide {
        let [logits, d_logits, narrow] = [self.logits, self.d_logits, self.narrow].map(&rows);
        Wide { logits, d_logits, log_probs: self.log_probs.map(|both| both.map(rows)), narrow }
    }
}

/// The buffers that tensor parallelism needs besides.
struct Parallel {
    input: Option<Buf>,
    partial: Option<Buf>,
    /// Statistics of this rank's columns, [n, 2], and those of all ranks.
    stats: Buf,
    all_stats: Buf,
}

/// The weights and gradients that the head works on: its own flat tensors, and the output matrix.
#[derive(Clone, Copy)]
pub struct HeadWeights {
    pub own: [Buf; 2],
    pub table: [Buf; 2],
    /// The weight of this loss among those of a model that has several.
    pub part: f64,
}

impl Head {
    /// The head of a model. `tokens_of_step`: the tokens over which the loss is a mean.
    pub fn new(b: &mut Builder, model: &LlmSpec, layer: &Layer, tokens_of_step: u64) -> Head {
        let (tp, shape) = (layer.tp, layer.core.shape());
        let chunks = layer.chunk_count();
        let (tokens, shared) = (layer.tokens() / chunks, layer.residual_rows() / chunks);
        let rows = tokens.div_ceil(layer.loss_chunks.max(1));
        let (h, v) = (model.hidden, model.vocab);
        let cols = v.div_ceil(tp.ranks);
        let mut weights = Weights::new(&tp);
        let norms = Norms::new(model, shared);
        let norm = norms.weights(&mut weights, "model.norm.weight", "model.norm.bias");
        let table = (!model.tie_embeddings).then(|| weights.cut("lm_head.weight", &[v, h], 0, &[v]));
        let mut temp = |name, rows, row| b.tensor(name, &[rows, row], shape.dtype, TensorKind::Workspace, 1);
        let (normed, logits, d_normed) =
            (temp("normed", shared, h), temp("logits", rows, cols), temp("d_head", shared, h));
        let dw =
            layer.add_grads.then(|| b.tensor("lm_head_product", &[cols * h], shape.dtype, TensorKind::Workspace, 1));
        let wide = Wide::new(layer.wide_loss, tp.ranks > 1, logits, |name, wide| {
            b.tensor(name, &[rows, cols], if wide { shape.acc } else { shape.dtype }, TensorKind::Workspace, 1)
        });
        let parallel = (tp.ranks > 1).then(|| {
            let stats =
                |b: &mut Builder, name, ranks| b.tensor(name, &[ranks * rows, 2], shape.acc, TensorKind::CommBuffer, 1);
            Parallel {
                input: tp.room(b, "tp_head_input", tokens, h),
                partial: tp.room(b, "tp_head_partial", tokens, h),
                stats: stats(b, "loss_stats", 1),
                all_stats: stats(b, "all_loss_stats", tp.ranks),
            }
        });
        let (hidden, vocab, acc, grads) = (h, v, shape.acc, layer.grads);
        let scale = 1.0 / tokens_of_step as f64;
        #[rustfmt::skip]
        let head = Head {
            tokens, chunks, rows, hidden, vocab, cols, scale, acc, grads, tp, weights, norms, norm, table, normed, logits, wide,
            d_normed, dw, parallel,
        };
        head
    }

    /// Elements of the weights on one rank.
    pub fn elems(&self) -> u64 {
        self.weights.elems()
    }

    pub fn weights(&self) -> &[Weight] {
        &self.weights.all
    }

    /// The output matrix within a flat tensor of the head's weights, or of their gradients; `None` where the embedding
    /// has it.
    pub fn table(&self, flat: Buf) -> Option<Buf> {
        self.table.map(|r| flat.at(r))
    }

    /// Makes the loss, and the gradient of `x` in `dx[0]`; `dx[1]` is overwritten.
    pub fn run(&self, b: &mut Builder, at: HeadWeights, targets: Buf, x: Buf, loss: Buf, dx: [Buf; 2]) {
        if self.chunks == 1 {
            return self.run_chunk(b, at, targets, x, loss, dx);
        }
        // There are as many logits as a chunk has; tensor parallelism, under which rows are shared out, has no chunks.
        let elems = self.chunks * self.tokens * self.hidden;
        b.compute("dx_begin", Kernel::Fill { elems }, &[], &[dx[0]]);
        b.compute("no_residual", Kernel::Fill { elems }, &[], &[dx[1]]);
        for chunk in 0..self.chunks {
            let of = |all: Buf| all.rows(chunk * self.tokens, (chunk + 1) * self.tokens);
            b.labelled(format!(".{chunk}"), |b| self.run_chunk(b, at, of(targets), of(x), loss, dx.map(of)));
        }
    }

    fn run_chunk(&self, b: &mut Builder, at: HeadWeights, targets: Buf, x: Buf, loss: Buf, dx: [Buf; 2]) {
        let (n, h, tp) = (self.tokens, self.hidden, &self.tp);
        let [norm_w, norm_g] = at.own.map(|flat| flat.at(self.norm));
        let (input_room, partial) = self.parallel.as_ref().map_or((None, None), |p| (p.input, p.partial));
        let sums = partial.unwrap_or(self.d_normed);
        self.norms.forward(b, "final_norm", x, norm_w, self.normed);
        let input = tp.gather(b, "lm_head_gather", self.normed, input_room);
        match self.rows == n {
            true => self.piece(b, at, [0, n], [input, targets, loss, sums]),
            false => {
                for piece in 0..n.div_ceil(self.rows) {
                    let rows = [piece * self.rows, n.min((piece + 1) * self.rows)];
                    b.labelled(format!(".{piece}"), |b| self.piece(b, at, rows, [input, targets, loss, sums]));
                }
            }
        }
        // Everywhere else a norm's gradient is added to a residual; here there is none.
        if self.chunks == 1 {
            b.compute("no_residual", Kernel::Fill { elems: self.norms.rows * h }, &[], &[dx[1]]);
        }
        self.norms.backward(b, "final_norm_bwd", x, [norm_w, norm_g], [self.d_normed, dx[1]], dx[0]);
    }

    /// Makes the logits, the loss and the gradients of some rows of the head's input, which go to `sums`; behind the
    /// last rows `sums` are summed over the ranks.
    fn piece(&self, b: &mut Builder, at: HeadWeights, rows: [u64; 2], [input, targets, loss, sums]: [Buf; 4]) {
        let (n, h, v) = (rows[1] - rows[0], self.hidden, self.cols);
        let [w, g] = at.table;
        let of = |all: Buf| if n == self.tokens { all } else { all.at(rows) };
        let first = |room: Buf| if n == self.rows { room } else { room.rows(0, n) };
        let ([input, targets, d_input], logits) = ([input, targets, sums].map(of), first(self.logits));
        b.compute("lm_head", linear(n, v, h, false), &[input, w], &[logits]);
        let d_logits = match self.wide.map(|wide| wide.map(first)) {
            Some(wide) => {
                let cast = Kernel::Cast { elems: n * v };
                b.compute("logits_widen", cast.clone(), &[logits], &[wide.logits]);
                match wide.log_probs {
                    Some(log_probs) => self.loss_in_steps(b, n, wide, log_probs, [targets, loss], at.part),
                    None => self.loss(b, n, [wide.logits, wide.d_logits], targets, loss, at.part),
                }
                b.compute("logits_narrow", cast, &[wide.d_logits], &[wide.narrow]);
                wide.narrow
            }
            None => {
                self.loss(b, n, [logits; 2], targets, loss, at.part);
                logits
            }
        };
        b.compute("lm_head_dx", linear_dx(n, h, v, false), &[d_logits, w], &[d_input]);
        if rows[1] == self.tokens {
            self.tp.reduce(b, "lm_head_bwd_reduce", sums, self.d_normed);
        }
        weight_grad(b, "lm_head_dw", linear_dw(v, h, n, false), [d_logits, input], g, self.dw);
    }

    /// Makes the loss, and the gradient of the logits of `rows` tokens, which may lie in their place.
    fn loss(&self, b: &mut Builder, rows: u64, [logits, d_logits]: [Buf; 2], targets: Buf, loss: Buf, part: f64) {
        let (cols, vocab, scale) = (self.cols, self.vocab, self.scale * part);
        let Some(p) = &self.parallel else {
            let kernel = Kernel::CrossEntropy { rows, vocab, scale };
            b.compute("cross_entropy", kernel, &[logits, targets, loss], &[d_logits, loss]);
            return;
        };
        let part = crate::plan::VocabPart { rows, cols, vocab, axis: Axis::Tp };
        let first = |room: Buf, ranks: u64| if rows == self.rows { room } else { room.rows(0, ranks * rows) };
        let (stats, all_stats) = (first(p.stats, 1), first(p.all_stats, self.tp.ranks));
        b.compute("loss_stats", Kernel::VocabStats(part), &[logits, targets], &[stats]);
        let group = Group::axes(&[Axis::Tp]);
        let via = Via { group: &group, index: 0, engine: self.tp.engine };
        b.collective("loss_stats_gather", via, CollectiveKind::AllGather, stats, all_stats, self.acc);
        let kernel = Kernel::VocabCrossEntropy { part, ranks: self.tp.ranks, scale };
        b.compute("cross_entropy", kernel, &[logits, targets, all_stats, loss], &[d_logits, loss]);
    }

    /// The same by a kernel for each step, as PyTorch makes it without a compiler
    /// (github:pytorch/pytorch aten/src/ATen/native/LossNLL.cpp, `cross_entropy_loss`).
    fn loss_in_steps(
        &self,
        b: &mut Builder,
        rows: u64,
        wide: Wide,
        [log_probs, d_log_probs]: [Buf; 2],
        [targets, loss]: [Buf; 2],
        part: f64,
    ) {
        let (vocab, scale) = (self.vocab, self.scale * part);
        b.compute("log_softmax", Kernel::LogSoftmax { rows, vocab }, &[wide.logits], &[log_probs]);
        let nll = Kernel::Nll { rows, vocab, scale };
        b.compute("nll_loss", nll, &[log_probs, targets, loss], &[d_log_probs, loss]);
        let backward = Kernel::LogSoftmaxBwd { rows, vocab };
        b.compute("log_softmax_bwd", backward, &[log_probs, d_log_probs], &[wide.d_logits]);
    }

    /// Sums the part of the head's gradient that tensor-parallel ranks have to add up before it is whole.
    pub fn sum_shared(&self, b: &mut Builder, g: Buf) {
        let [from, to] = self.weights.shared();
        self.tp.sum_shared(b, "shared_grad_sum.head", g.rows(from, to), self.grads);
    }
}
