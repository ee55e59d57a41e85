//! A transformer layer, Llama's or GPT's, forward and backward, op by op. How attention talks to other ranks
//! is [`ulysses`]'s and [`attention`]'s affair, how the ranks share a product [`tensor`](super::tensor)'s.
//!
//! Legend: n tokens of a microbatch on this rank, h hidden, a heads, k KV heads, d head dim, f feed-forward
//! width; a, k and f are this tensor-parallel rank's share. Between the products a rank has r of the n tokens.

use super::attention::{self, Core, Way};
use super::expert::{self, Experts};
use super::norm::Norms;
use super::step::Engines;
use super::tensor::{Chunk, TensorParallel};
use super::ulysses::{self, Ulysses};
use super::unfused::Probs;
use super::weights::{Rows, Weight, Weights};
use crate::plan::{Arg, Buf, Builder, Dropout, Dtype, Kernel, Route, Segs, TensorKind};
use crate::spec::{AttentionSpec, LlmSpec, Mlp, Parallelism, Positions, Workload};

/// Everything a layer's ops need to know.
pub struct Layer {
    pub hidden: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    ffn: u64,
    /// Columns of the product before the activation: gate and up, or one of them.
    wide: u64,
    mlp: Mlp,
    norms: Norms,
    theta: f64,
    rotary: Option<u64>,
    parallel: bool,
    dropout: f64,
    batch: u64,
    /// Tokens of one sequence on this rank.
    seq: u64,
    /// Where those tokens stand in the sequence.
    pub segs: Segs,
    pub core: Core,
    /// `None` when the Ulysses degree is 1.
    ulysses: Option<Ulysses>,
    dtype: Dtype,
    pub tp: TensorParallel,
    fp8: bool,
    rows: WeightRows,
    weights: Weights,
    /// Beside the network, which is then the experts that every token visits.
    pub experts: Option<Experts>,
    overlap_shared: bool,
}

/// The flat tensors of a layer: what every rank of the sequence has, and its own experts.
#[derive(Clone, Copy)]
pub struct Flats {
    pub dense: Buf,
    pub experts: Option<Buf>,
}

impl Flats {
    /// The same as formals of the block being written.
    pub fn formals(self, b: &mut Builder, name: &str) -> Flats {
        let dense = b.formal(name);
        Flats { dense, experts: self.experts.map(|_| b.formal(&format!("{name}_experts"))) }
    }

    pub fn bufs(self) -> impl Iterator<Item = Buf> {
        std::iter::once(self.dense).chain(self.experts)
    }

    /// What a call binds to the formals.
    pub fn args(self, arg: impl Fn(Buf) -> Arg) -> Vec<Arg> {
        self.bufs().map(arg).collect()
    }

    pub fn slot(self, slot: u32) -> Flats {
        Flats { dense: self.dense.slot(slot), experts: self.experts.map(|buf| buf.slot(slot)) }
    }

    fn rows(&self, from: u64, to: u64) -> Buf {
        self.dense.rows(from, to)
    }
}

/// Rows of the flat weight tensor of a layer.
struct WeightRows {
    norm1: Rows,
    /// `None`: attention's serves, in a parallel block.
    norm2: Option<Rows>,
    o_bias: Option<Rows>,
    down_bias: Option<Rows>,
    qkv: Rows,
    qkv_bias: Option<Rows>,
    o: Rows,
    gate_up: Rows,
    up_bias: Option<Rows>,
    down: Rows,
    router: Option<Rows>,
}

/// Activations kept for the backward pass, as buffers or as formals of a block.
#[derive(Clone, Copy)]
pub struct Saved {
    /// As attention sees them: after the Ulysses exchange where there is one.
    attn: attention::Saved,
    normed1: Buf,
    /// Between the halves of a layer, unless they stand beside each other.
    mid: Option<Buf>,
    /// Where the second half has a norm of its own.
    normed2: Option<Buf>,
    /// Where there is a network that every token visits.
    gate_up: Option<Buf>,
    act: Option<Buf>,
    experts: Option<expert::Saved>,
    /// What dropout left of each branch; in a parallel block of both together.
    stays: [Option<Buf>; 2],
    /// The output of attention for my tokens, all heads; `None`: it is `attn.o`, without Ulysses.
    o: Option<Buf>,
}

impl Saved {
    /// Every buffer with its name, always in the same order.
    fn bufs_mut(&mut self) -> Vec<(&'static str, &mut Buf)> {
        let mut all = vec![
            ("q", &mut self.attn.q),
            ("kv", &mut self.attn.kv),
            ("attn_o", &mut self.attn.o),
            ("normed1", &mut self.normed1),
        ];
        all.extend(self.attn.lse.as_mut().map(|lse| ("lse", lse)));
        all.extend(self.attn.kv_last.as_mut().map(|kv| ("kv_last", kv)));
        if let Some(Probs { probs, dropped }) = &mut self.attn.probs {
            all.push(("probs", probs));
            let names = ["probs_left", "probs_stay"].into_iter();
            all.extend(names.zip(dropped.iter_mut().flatten()));
        }
        let [stays1, stays2] = &mut self.stays;
        let some = [
            ("gate_up", &mut self.gate_up),
            ("act", &mut self.act),
            ("o", &mut self.o),
            ("mid", &mut self.mid),
            ("normed2", &mut self.normed2),
            ("stays1", stays1),
            ("stays2", stays2),
        ];
        all.extend(some.into_iter().filter_map(|(name, buf)| Some((name, buf.as_mut()?))));
        all.extend(self.experts.iter_mut().flat_map(|saved| saved.bufs_mut()));
        all
    }

    pub fn bufs(mut self) -> Vec<Buf> {
        self.bufs_mut().into_iter().map(|(_, buf)| *buf).collect()
    }

    /// The same as formals of the block being written, in the order of [`bufs`](Saved::bufs).
    pub fn formals(mut self, b: &mut Builder) -> Saved {
        self.bufs_mut().into_iter().for_each(|(name, buf)| *buf = b.formal(name));
        self
    }

    /// Before and behind the activation of the network that every token visits.
    fn network(&self) -> (Buf, Buf) {
        (self.gate_up.expect("there is a network"), self.act.expect("there is a network"))
    }

    fn output(&self) -> Buf {
        self.o.unwrap_or(self.attn.o)
    }
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    attn: attention::Scratch,
    ulysses: Option<ulysses::Scratch>,
    qkv: Buf,
    q_local: Buf,
    kv_local: Buf,
    branch: Buf,
    d_act: Option<Buf>,
    d_gate_up: Option<Buf>,
    experts: Option<expert::Scratch>,
    /// What the experts that every token visits add, beside the others.
    shared: Option<Buf>,
    d_normed: Buf,
    d_mid: Buf,
    /// The gradient of a branch, where dropout makes it another than that of the sum.
    d_branch: Option<Buf>,
    d_o: Buf,
    d_qkv: Buf,
    /// Rooms for all tokens' rows, where a rank has a share of them: of a product's input, of the gradient of
    /// its output, and of partial sums.
    input: Option<Buf>,
    d_output: Option<Buf>,
    partial: Option<Buf>,
}

impl Scratch {
    /// The gradients behind and before the activation.
    fn network(&self) -> (Buf, Buf) {
        (self.d_act.expect("there is a network"), self.d_gate_up.expect("there is a network"))
    }
}

/// y[n, out] = x[n, in] W^T, W stored [out, in] as checkpoints have it.
pub fn linear(m: u64, n: u64, k: u64, fp8: bool) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: false, b_t: true, accumulate: false, fp8, bias: false }
}

/// dx[n, in] = dy[n, out] W.
pub fn linear_dx(m: u64, n: u64, k: u64, fp8: bool) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: false, b_t: false, accumulate: false, fp8, bias: false }
}

/// dW[out, in] += dy^T x.
pub fn linear_dw(m: u64, n: u64, k: u64, fp8: bool) -> Kernel {
    Kernel::MatMul { m, n, k, a_t: true, b_t: false, accumulate: true, fp8, bias: false }
}

/// The weights of a layer, in the order of its flat tensor.
fn weights(model: &LlmSpec, tp: &TensorParallel, norms: &Norms) -> (WeightRows, Weights) {
    let (h, f, q, kv) = (model.hidden, width(model), model.q_cols(), model.kv_cols());
    let swiglu = model.mlp == Mlp::SwiGlu;
    let (up, wide) = match (swiglu, model.moe) {
        (_, Some(_)) => ("mlp.shared_experts.gate_up_proj.weight", vec![f, f]),
        (true, None) => ("mlp.gate_up_proj.weight", vec![f, f]),
        (false, None) => ("mlp.up_proj.weight", vec![f]),
    };
    let down = if model.moe.is_some() { "mlp.shared_experts.down_proj.weight" } else { "mlp.down_proj.weight" };
    let up_bias = if swiglu { "mlp.gate_up_proj.bias" } else { "mlp.up_proj.bias" };
    let wide_cols: u64 = wide.iter().sum();
    let mut w = Weights::new(tp);
    let one_norm = model.parallel_block && !model.own_norms;
    let rows = WeightRows {
        norm1: norms.weights(&mut w, "input_layernorm.weight", "input_layernorm.bias"),
        norm2: (!one_norm)
            .then(|| norms.weights(&mut w, "post_attention_layernorm.weight", "post_attention_layernorm.bias")),
        router: model.moe.map(|moe| w.whole("mlp.gate.weight", &[moe.experts, h])),
        o_bias: model.bias.then(|| w.whole("self_attn.o_proj.bias", &[h])),
        down_bias: model.bias.then(|| w.whole("mlp.down_proj.bias", &[h])),
        qkv: w.cut("self_attn.qkv_proj.weight", &[q + 2 * kv, h], 0, &[q, kv, kv]),
        qkv_bias: model.biased_qkv().then(|| w.cut("self_attn.qkv_proj.bias", &[q + 2 * kv], 0, &[q, kv, kv])),
        o: w.cut("self_attn.o_proj.weight", &[h, q], 1, &[q]),
        gate_up: if f > 0 { w.cut(up, &[wide_cols, h], 0, &wide) } else { [0, 0] },
        up_bias: model.bias.then(|| w.cut(up_bias, &[wide_cols], 0, &wide)),
        down: if f > 0 { w.cut(down, &[h, f], 1, &[f]) } else { [0, 0] },
    };
    (rows, w)
}

/// Columns of the network that every token visits; 0: there is none.
pub fn width(model: &LlmSpec) -> u64 {
    model.moe.map_or(model.ffn, |moe| moe.shared_ffn)
}

/// A product with one more operand: a bias, or sums that it adds to.
fn with(kernel: Kernel, adds: bool, biased: bool) -> Kernel {
    match kernel {
        Kernel::MatMul { m, n, k, a_t, b_t, accumulate, fp8, .. } => {
            Kernel::MatMul { m, n, k, a_t, b_t, accumulate: accumulate || adds, fp8, bias: biased }
        }
        other => other,
    }
}

impl Layer {
    pub fn new(model: &LlmSpec, work: &Workload, par: &Parallelism, engines: Engines, route: Option<&Route>) -> Layer {
        let tokens = work.micro_batch * work.seq_len / (u64::from(par.ring) * u64::from(par.ulysses));
        let tp = TensorParallel::new(par, tokens, work.dtype, engines.collective);
        let (heads, kv_heads) = (model.heads / tp.ranks, model.kv_heads / tp.ranks);
        let attention = AttentionSpec {
            batch: work.micro_batch,
            seq_len: work.seq_len,
            heads,
            kv_heads,
            head_dim: model.head_dim,
            mask: model.mask(&work.documents),
            dtype: work.dtype,
        };
        let Way { segs, seq, core, ulysses } = Way::new(&attention, model.dropout, par, engines);
        let norms = Norms::new(model, tp.share(work.micro_batch * seq));
        let (rows, weights) = weights(model, &tp, &norms);
        let ffn = width(model) / tp.ranks;
        let dtypes = [work.dtype, core.shape().acc];
        let experts = Experts::new(model, par, engines, route, dtypes, norms.rows);
        Layer {
            hidden: model.hidden,
            heads,
            kv_heads,
            head_dim: model.head_dim,
            ffn,
            wide: if model.mlp == Mlp::SwiGlu { 2 * ffn } else { ffn },
            mlp: model.mlp,
            norms,
            theta: model.rope_theta,
            rotary: if model.positions == Positions::Rope { model.rotary_dim } else { Some(0) },
            parallel: model.parallel_block,
            dropout: model.dropout,
            batch: work.micro_batch,
            seq,
            segs,
            core,
            ulysses,
            dtype: work.dtype,
            tp,
            fp8: par.options.fp8,
            rows,
            weights,
            experts,
            overlap_shared: par.options.overlap_shared,
        }
    }

    /// Tokens of a microbatch that this rank and its tensor-parallel peers work on.
    pub fn tokens(&self) -> u64 {
        self.batch * self.seq
    }

    /// Of those, the ones that this rank has between the products.
    pub fn residual_rows(&self) -> u64 {
        self.tp.share(self.tokens())
    }

    fn q_row(&self) -> u64 {
        self.heads * self.head_dim
    }

    fn kv_row(&self) -> u64 {
        2 * self.kv_heads * self.head_dim
    }

    fn qkv_row(&self) -> u64 {
        self.q_row() + self.kv_row()
    }

    /// Elements of a layer's weights on one rank.
    pub fn elems(&self) -> u64 {
        self.weights.elems()
    }

    pub fn weights(&self) -> &[Weight] {
        &self.weights.all
    }

    /// Declares what the backward pass keeps, `slots` of each: one a layer, or one in all when it is
    /// computed again.
    pub fn saved(&self, b: &mut Builder, kind: TensorKind, slots: u32) -> Saved {
        let (n, r) = (self.tokens(), self.residual_rows());
        let mut keep = |name: &str, rows, row, dtype| b.tensor(name, &[rows, row], dtype, kind, slots);
        let (core, dtype) = (self.core.shape(), self.dtype);
        let (lse, probs) = self.core.keeps(&mut keep);
        let attn = attention::Saved {
            q: keep("q", core.rows(), core.q_row(), dtype),
            kv: keep("kv", core.rows(), core.kv_row(), dtype),
            kv_last: self.core.keeps_last().then(|| keep("kv_last", core.rows(), core.kv_row(), dtype)),
            o: keep("attn_o", core.rows(), core.q_row(), dtype),
            lse,
            probs,
        };
        Saved {
            normed1: keep("normed1", r, self.hidden, dtype),
            attn,
            o: self.ulysses.is_some().then(|| keep("o", n, self.q_row(), dtype)),
            mid: (!self.parallel).then(|| keep("mid", r, self.hidden, dtype)),
            stays: [(1, "stays1"), (2, "stays2")].map(|(branch, name)| {
                let there = self.dropout > 0.0 && (branch == 1 || !self.parallel);
                there.then(|| keep(name, r, self.hidden, Dtype::U8))
            }),
            normed2: self.rows.norm2.map(|_| keep("normed2", r, self.hidden, dtype)),
            gate_up: (self.ffn > 0).then(|| keep("gate_up", n, self.wide, dtype)),
            act: (self.ffn > 0).then(|| keep("act", n, self.ffn, dtype)),
            experts: self.experts.as_ref().map(|experts| experts.saved(&mut keep)),
        }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let (n, r, h) = (self.tokens(), self.residual_rows(), self.hidden);
        let attn = self.core.scratch(b);
        let ulysses = self.ulysses.as_ref().map(|u| u.scratch(b));
        let experts = self.experts.as_ref().map(|experts| experts.scratch(b));
        let mut work = |name, rows, row| b.tensor(name, &[rows, row], self.dtype, TensorKind::Workspace, 1);
        Scratch {
            qkv: work("qkv", n, self.qkv_row()),
            q_local: work("q_local", n, self.q_row()),
            kv_local: work("kv_local", n, self.kv_row()),
            branch: work("branch", r, h),
            d_act: (self.ffn > 0).then(|| work("d_act", n, self.ffn)),
            d_gate_up: (self.ffn > 0).then(|| work("d_gate_up", n, self.wide)),
            shared: (self.ffn > 0 && experts.is_some()).then(|| work("shared", r, h)),
            experts,
            d_normed: work("d_normed", r, h),
            d_mid: work("d_mid", r, h),
            d_branch: (self.dropout > 0.0).then(|| work("d_branch", r, h)),
            d_o: work("d_o", n, self.q_row()),
            d_qkv: work("d_qkv", n, self.qkv_row()),
            input: self.tp.room(b, "tp_input", n, h),
            d_output: self.tp.room(b, "tp_d_output", n, h),
            partial: self.tp.room(b, "tp_partial", n, h),
            attn,
            ulysses,
        }
    }

    fn rope(&self, backward: bool) -> Kernel {
        let (batch, heads, kv_heads, head_dim) = (self.batch, self.heads, self.kv_heads, self.head_dim);
        let (segs, theta, rotary) = (self.segs.clone(), self.theta, self.rotary);
        let documents = self.core.shape().block.mask.documents.clone();
        Kernel::Rope { segs, documents, batch, heads, kv_heads, head_dim, theta, backward, rotary }
    }

    /// x_out = layer(x), keeping what `keep` names.
    pub fn forward(&self, b: &mut Builder, s: &Scratch, w: Flats, x: Buf, x_out: Buf, keep: &Saved) {
        // Sums over a rank's share of the columns, before they are summed over the ranks.
        let sums = s.partial.unwrap_or(s.branch);
        let at = |r: Rows| w.rows(r[0], r[1]);
        let rows = &self.rows;
        self.norms.forward(b, "norm1", x, at(rows.norm1), keep.normed1);
        let (qkv, bias) = (at(rows.qkv), rows.qkv_bias.map(at));
        let input = self.tp.gathered(b, "qkv_gather", keep.normed1, s.input, |b, input, chunk| {
            self.linear_in(b, "qkv", [input, qkv], bias, self.qkv_row(), s.qkv, chunk);
        });
        self.attention_forward(b, s, keep);
        let Some(mid) = keep.mid else {
            self.mlp_in(b, s, w, x, keep, input);
            self.linear_out(b, "o_proj", [keep.output(), at(rows.o)], self.q_row(), false, sums, self.tp.all());
            self.tp.scattered(b, "block_reduce", sums, s.branch, |b, chunk| {
                self.linear_out(b, "down", [keep.network().1, at(rows.down)], self.ffn, true, sums, chunk);
            });
            let biases = [rows.o_bias, rows.down_bias].map(|r| r.map(at));
            return self.residual(b, "residual", x, s.branch, biases, [Some(x_out), keep.stays[0]]);
        };
        self.tp.scattered(b, "o_reduce", sums, s.branch, |b, chunk| {
            self.linear_out(b, "o_proj", [keep.output(), at(rows.o)], self.q_row(), false, sums, chunk);
        });
        self.residual(b, "residual1", x, s.branch, [rows.o_bias.map(at), None], [Some(mid), keep.stays[0]]);
        match &self.experts {
            Some(experts) => self.experts_forward(b, s, w, mid, keep, experts),
            None => {
                self.mlp_in(b, s, w, mid, keep, input);
                self.tp.scattered(b, "down_reduce", sums, s.branch, |b, chunk| {
                    self.linear_out(b, "down", [keep.network().1, at(rows.down)], self.ffn, false, sums, chunk);
                });
            }
        }
        self.residual(b, "residual2", mid, s.branch, [rows.down_bias.map(at), None], [Some(x_out), keep.stays[1]]);
    }

    /// The feed-forward network up to its activation, from a norm of `x`, or where there is none from `first`,
    /// attention's input.
    fn mlp_in(&self, b: &mut Builder, s: &Scratch, w: Flats, x: Buf, keep: &Saved, first: Buf) {
        match (self.rows.norm2, keep.normed2) {
            (Some(norm), Some(normed)) => {
                self.norms.forward(b, "norm2", x, w.rows(norm[0], norm[1]), normed);
                self.gathered_mlp_in(b, s, w, keep, normed);
            }
            _ => {
                self.gate_up(b, w, keep, first, self.tp.all());
                self.activation(b, keep);
            }
        }
    }

    /// The same from a rank's share of its input.
    fn gathered_mlp_in(&self, b: &mut Builder, s: &Scratch, w: Flats, keep: &Saved, normed: Buf) {
        let up = |b: &mut Builder, input, chunk| self.gate_up(b, w, keep, input, chunk);
        self.tp.gathered(b, "gate_up_gather", normed, s.input, up);
        self.activation(b, keep);
    }

    fn gate_up(&self, b: &mut Builder, w: Flats, keep: &Saved, input: Buf, chunk: Chunk) {
        let at = |r: Rows| w.rows(r[0], r[1]);
        let (weight, bias) = (at(self.rows.gate_up), self.rows.up_bias.map(at));
        self.linear_in(b, "gate_up", [input, weight], bias, self.wide, keep.network().0, chunk);
    }

    fn activation(&self, b: &mut Builder, keep: &Saved) {
        let (n, (gate_up, act)) = (self.tokens(), keep.network());
        let (label, kernel) = match self.mlp {
            Mlp::SwiGlu => ("swiglu", Kernel::SwiGlu { rows: n, cols: self.ffn }),
            Mlp::Gelu => ("gelu", Kernel::Gelu { elems: n * self.ffn }),
        };
        b.compute(label, kernel, &[gate_up], &[act]);
    }

    /// The experts' half of a layer, in `s.branch`: those that every token visits before, or beside the others' rows
    /// on their way (Megatron-LM's `--moe-shared-expert-overlap`).
    fn experts_forward(&self, b: &mut Builder, s: &Scratch, w: Flats, mid: Buf, keep: &Saved, experts: &Experts) {
        let (saved, scratch) = (keep.experts.as_ref().expect("kept"), s.experts.as_ref().expect("declared"));
        let (norm, normed) = (self.rows.norm2.expect("a norm before each half"), keep.normed2.expect("likewise"));
        self.norms.forward(b, "norm2", mid, w.rows(norm[0], norm[1]), normed);
        let mut first = |b: &mut Builder| {
            if self.ffn > 0 {
                self.gathered_mlp_in(b, s, w, keep, normed);
            }
        };
        let mut second = |b: &mut Builder| {
            let Some(shared) = s.shared else { return };
            let (sums, down) = (s.partial.unwrap_or(shared), w.rows(self.rows.down[0], self.rows.down[1]));
            self.tp.scattered(b, "down_reduce", sums, shared, |b, chunk| {
                self.linear_out(b, "down", [keep.network().1, down], self.ffn, false, sums, chunk);
            });
        };
        let parts = self.parts(w);
        if self.overlap_shared {
            experts.forward(b, scratch, parts, normed, s.branch, saved, [&mut first, &mut second]);
        } else {
            first(b);
            second(b);
            experts.forward(b, scratch, parts, normed, s.branch, saved, [&mut |_| {}, &mut |_| {}]);
        }
        self.add_shared(b, "shared_add", s, s.branch);
    }

    fn parts(&self, flats: Flats) -> expert::Parts {
        let router = self.rows.router.expect("experts have a router");
        expert::Parts {
            router: flats.rows(router[0], router[1]),
            experts: flats.experts.expect("experts have weights"),
        }
    }

    fn add_shared(&self, b: &mut Builder, label: &str, s: &Scratch, to: Buf) {
        let Some(shared) = s.shared else { return };
        b.compute(label, Kernel::Add { elems: self.residual_rows() * self.hidden, trim: None }, &[to, shared], &[to]);
    }

    /// Rows of the residual stream to `cols` columns.
    #[allow(clippy::too_many_arguments)]
    fn linear_in(
        &self,
        b: &mut Builder,
        label: &str,
        [x, w]: [Buf; 2],
        bias: Option<Buf>,
        cols: u64,
        y: Buf,
        rows: Chunk,
    ) {
        let kernel = with(linear(rows.count(), cols, self.hidden, self.fp8), false, bias.is_some());
        let reads: Vec<Buf> = [rows.of(x), w].into_iter().chain(bias).collect();
        b.compute(&rows.label(label), kernel, &reads, &[rows.of(y)]);
    }

    /// Rows of `cols` columns to the residual stream, as sums that other ranks' may be added to.
    #[allow(clippy::too_many_arguments)]
    fn linear_out(
        &self,
        b: &mut Builder,
        label: &str,
        [x, w]: [Buf; 2],
        cols: u64,
        adds: bool,
        sums: Buf,
        rows: Chunk,
    ) {
        let kernel = with(linear(rows.count(), self.hidden, cols, self.fp8), adds, false);
        let reads: Vec<Buf> = [rows.of(x), w].into_iter().chain(adds.then_some(rows.of(sums))).collect();
        b.compute(&rows.label(label), kernel, &reads, &[rows.of(sums)]);
    }

    /// y = x + branch + biases, and what dropout left of the branch.
    #[allow(clippy::too_many_arguments)]
    fn residual(
        &self,
        b: &mut Builder,
        label: &str,
        x: Buf,
        branch: Buf,
        biases: [Option<Buf>; 2],
        writes: [Option<Buf>; 2],
    ) {
        let (rows, cols) = (self.residual_rows(), self.hidden);
        let reads: Vec<Buf> = [x, branch].into_iter().chain(biases.into_iter().flatten()).collect();
        let writes: Vec<Buf> = writes.into_iter().flatten().collect();
        let kernel = match (reads.len() as u64 - 2, writes.len()) {
            (0, 1) => Kernel::Add { elems: rows * cols, trim: None },
            (biases, 1) => Kernel::Residual { rows, cols, biases, dropout: None },
            (biases, _) => Kernel::Residual { rows, cols, biases, dropout: Some(self.dropout_of(label)) },
        };
        b.compute(label, kernel, &reads, &writes);
    }

    fn dropout_of(&self, label: &str) -> Dropout {
        let share = self.tp.rows();
        let salt = u64::from(label == "residual2");
        Dropout { probability: self.dropout, salt, segs: self.segs.clone(), share }
    }

    fn attention_forward(&self, b: &mut Builder, s: &Scratch, keep: &Saved) {
        let attn = keep.attn;
        let (Some(ulysses), Some(us), Some(o)) = (&self.ulysses, &s.ulysses, keep.o) else {
            b.compute("rope", self.rope(false), &[s.qkv], &[attn.q, attn.kv]);
            return self.core.forward(b, &s.attn, attn);
        };
        b.compute("rope", self.rope(false), &[s.qkv], &[s.q_local, s.kv_local]);
        ulysses.scatter_qkv(b, us, [s.q_local, s.kv_local], [attn.q, attn.kv]);
        self.core.forward(b, &s.attn, attn);
        ulysses.gather_o(b, us, attn.o, o);
    }

    /// dx from dy, and the gradients of the layer's weights added to `g`.
    #[allow(clippy::too_many_arguments)]
    pub fn backward(&self, b: &mut Builder, s: &Scratch, [w, g]: [Flats; 2], x: Buf, keep: &Saved, dy: Buf, dx: Buf) {
        let back = Backward { layer: self, s, w, g, keep, sums: s.partial.unwrap_or(s.d_normed) };
        let d_branch = back.dropout(b, "dropout2_bwd", keep.stays[usize::from(!self.parallel)], dy);
        let mid = match (&self.experts, keep.mid) {
            (Some(experts), Some(mid)) => {
                back.experts(b, experts, d_branch);
                mid
            }
            (_, mid) => {
                let d_output = back.down_dx(b, d_branch);
                back.bias(b, "down_bias_bwd", self.rows.down_bias, self.norms.rows, d_branch);
                let last = back.mlp(b, d_output);
                let Some(mid) = mid else { return back.beside(b, x, [dy, d_branch, d_output], dx) };
                back.mlp_input(b, last, s.d_normed);
                mid
            }
        };
        back.norm(b, "norm2_bwd", mid, self.rows.norm2.expect("a norm before each half"), dy, s.d_mid);
        let d_branch = back.dropout(b, "dropout1_bwd", keep.stays[0], s.d_mid);
        let d_output = self.tp.gathered(b, "o_bwd_gather", d_branch, s.d_output, |b, d, rows| {
            back.out_dx(b, "o_proj_dx", [d, back.at(self.rows.o), s.d_o], self.q_row(), rows);
        });
        back.bias(b, "o_bias_bwd", self.rows.o_bias, self.norms.rows, d_branch);
        let last = back.attention(b, d_output);
        let input = self.tp.gather_beside(b, "qkv_regather", keep.normed1, s.input, last);
        back.qkv_dx(b, false);
        self.tp.reduce(b, "qkv_bwd_reduce", back.sums, s.d_normed);
        back.dw(b, "qkv_dw", self.qkv_row(), self.hidden, s.d_qkv, input, self.rows.qkv);
        back.norm(b, "norm1_bwd", x, self.rows.norm1, s.d_mid, dx);
    }

    /// d_qkv from d_o; returns the last op.
    fn attention_backward(&self, b: &mut Builder, s: &Scratch, keep: &Saved) -> u32 {
        let (dq, dkv) = match (&self.ulysses, &s.ulysses) {
            (Some(ulysses), Some(us)) => {
                let d_o = ulysses.scatter_do(b, us, s.d_o);
                let grads = self.core.backward(b, &s.attn, keep.attn, d_o);
                ulysses.gather_dqkv(b, us, grads)
            }
            _ => self.core.backward(b, &s.attn, keep.attn, s.d_o),
        };
        b.compute("rope_bwd", self.rope(true), &[dq, dkv], &[s.d_qkv])
    }

    /// What tensor-parallel ranks have to add up of a layer's gradient before it is whole.
    pub fn sum_shared(&self, b: &mut Builder, g: Buf) {
        let [from, to] = self.weights.shared();
        self.tp.sum_shared(b, "shared_grad_sum", g.rows(from, to), self.core.shape().acc);
    }
}

/// One layer's backward pass under way.
struct Backward<'a> {
    layer: &'a Layer,
    s: &'a Scratch,
    w: Flats,
    g: Flats,
    keep: &'a Saved,
    /// Where gradients of a product's input are summed up.
    sums: Buf,
}

impl Backward<'_> {
    fn at(&self, r: Rows) -> Buf {
        self.w.rows(r[0], r[1])
    }

    #[allow(clippy::too_many_arguments)]
    fn dw(&self, b: &mut Builder, label: &str, out: u64, inp: u64, d: Buf, x: Buf, r: Rows) {
        let grad = self.g.rows(r[0], r[1]);
        b.compute(label, linear_dw(out, inp, self.layer.tokens(), self.layer.fp8), &[d, x, grad], &[grad]);
    }

    /// The gradient of a bias, where there is one, from the `rows` rows of that of what it was added to.
    fn bias(&self, b: &mut Builder, label: &str, at: Option<Rows>, rows: u64, d: Buf) {
        let Some(r) = at else { return };
        let grad = self.g.rows(r[0], r[1]);
        b.compute(label, Kernel::BiasBwd { rows, cols: r[1] - r[0] }, &[d, grad], &[grad]);
    }

    /// The gradient of a branch from that of the sum it was added to.
    fn dropout(&self, b: &mut Builder, label: &str, stays: Option<Buf>, dy: Buf) -> Buf {
        let (Some(stays), Some(d_branch)) = (stays, self.s.d_branch) else { return dy };
        let (elems, probability) = (self.layer.norms.rows * self.layer.hidden, self.layer.dropout);
        b.compute(label, Kernel::DropoutBwd { elems, probability }, &[dy, stays], &[d_branch]);
        d_branch
    }

    /// Rows of the gradient of a projection's input, of `cols` columns, from that of its output.
    fn out_dx(&self, b: &mut Builder, label: &str, [d, w, to]: [Buf; 3], cols: u64, rows: Chunk) {
        let kernel = linear_dx(rows.count(), cols, self.layer.hidden, self.layer.fp8);
        b.compute(&rows.label(label), kernel, &[rows.of(d), w], &[rows.of(to)]);
    }

    /// The gradient of the network's activation, from a rank's share of that of its output, which is returned whole.
    fn down_dx(&self, b: &mut Builder, d_branch: Buf) -> Buf {
        let (l, s) = (self.layer, self.s);
        let (down, d_act) = (self.at(l.rows.down), s.network().0);
        l.tp.gathered(b, "down_bwd_gather", d_branch, s.d_output, |b, d, rows| {
            self.out_dx(b, "down_dx", [d, down, d_act], l.ffn, rows);
        })
    }

    /// From the gradients of the network's output and of its activation to that of the activation's input; returns
    /// the last op.
    fn mlp(&self, b: &mut Builder, d_output: Buf) -> u32 {
        let (l, s, keep) = (self.layer, self.s, self.keep);
        let (n, h, f) = (l.tokens(), l.hidden, l.ffn);
        let ((gate_up, act), (d_act, d_gate_up)) = (keep.network(), s.network());
        self.dw(b, "down_dw", h, f, d_output, act, l.rows.down);
        let (label, kernel) = match l.mlp {
            Mlp::SwiGlu => ("swiglu_bwd", Kernel::SwiGluBwd { rows: n, cols: f }),
            Mlp::Gelu => ("gelu_bwd", Kernel::GeluBwd { elems: n * f }),
        };
        let last = b.compute(label, kernel, &[gate_up, d_act], &[d_gate_up]);
        self.bias(b, "up_bias_bwd", l.rows.up_bias, n, d_gate_up);
        last
    }

    /// From the gradient of the activation's input to that of the network's, in `to`; `last` is the op before.
    fn mlp_input(&self, b: &mut Builder, last: u32, to: Buf) {
        let (l, s) = (self.layer, self.s);
        let input = self.keep.normed2.expect("a norm before each half");
        let input = l.tp.gather_beside(b, "gate_up_regather", input, s.input, last);
        self.gate_up_dx(b);
        l.tp.reduce(b, "gate_up_bwd_reduce", self.sums, to);
        self.dw(b, "gate_up_dw", l.wide, l.hidden, s.network().1, input, l.rows.gate_up);
    }

    /// From the gradient of the experts' output to that of their input, in `d_normed`.
    fn experts(&self, b: &mut Builder, experts: &Experts, d_branch: Buf) {
        let (l, s, keep) = (self.layer, self.s, self.keep);
        let (saved, scratch) = (keep.experts.as_ref().expect("kept"), s.experts.as_ref().expect("declared"));
        let sums = s.partial.or(s.shared).unwrap_or(self.sums);
        let shared = Backward { layer: l, s, w: self.w, g: self.g, keep, sums };
        let last = std::cell::Cell::new(0);
        let mut first = |b: &mut Builder| {
            if l.ffn > 0 {
                let d_output = shared.down_dx(b, d_branch);
                last.set(shared.mlp(b, d_output));
            }
        };
        let mut second = |b: &mut Builder| {
            if let Some(to) = s.shared {
                shared.mlp_input(b, last.get(), to);
            }
        };
        let (parts, bufs) = ([self.w, self.g].map(|f| l.parts(f)), [keep.normed2.expect("kept"), d_branch, s.d_normed]);
        if l.overlap_shared {
            experts.backward(b, scratch, parts, bufs, saved, [&mut first, &mut second]);
        } else {
            first(b);
            second(b);
            experts.backward(b, scratch, parts, bufs, saved, [&mut |_| {}, &mut |_| {}]);
        }
        l.add_shared(b, "shared_bwd_add", s, s.d_normed);
    }

    fn gate_up_dx(&self, b: &mut Builder) {
        let l = self.layer;
        let kernel = linear_dx(l.tokens(), l.hidden, l.wide, l.fp8);
        b.compute("gate_up_dx", kernel, &[self.s.network().1, self.at(l.rows.gate_up)], &[self.sums]);
    }

    /// From the gradients of attention's output, projected and not, to that of q, k and v; returns the last op.
    fn attention(&self, b: &mut Builder, d_output: Buf) -> u32 {
        let (l, s, keep) = (self.layer, self.s, self.keep);
        let (n, h, q) = (l.tokens(), l.hidden, l.q_row());
        self.dw(b, "o_proj_dw", h, q, d_output, keep.output(), l.rows.o);
        let last = l.attention_backward(b, s, keep);
        self.bias(b, "qkv_bias_bwd", l.rows.qkv_bias, n, s.d_qkv);
        last
    }

    /// Adds to what the network's gradient has left, where both have the same input.
    fn qkv_dx(&self, b: &mut Builder, adds: bool) {
        let l = self.layer;
        let kernel = with(linear_dx(l.tokens(), l.hidden, l.qkv_row(), l.fp8), adds, false);
        let reads = [self.s.d_qkv, self.at(l.rows.qkv)].into_iter().chain(adds.then_some(self.sums));
        b.compute("qkv_dx", kernel, &reads.collect::<Vec<_>>(), &[self.sums]);
    }

    /// The rest of a parallel block, where both halves have the gradient of its output.
    fn beside(&self, b: &mut Builder, x: Buf, [dy, d_branch, d_output]: [Buf; 3], dx: Buf) {
        let (l, s, keep, tp) = (self.layer, self.s, self.keep, &self.layer.tp);
        self.bias(b, "o_bias_bwd", l.rows.o_bias, l.norms.rows, d_branch);
        self.out_dx(b, "o_proj_dx", [d_output, self.at(l.rows.o), s.d_o], l.q_row(), tp.all());
        let last = self.attention(b, d_output);
        self.gate_up_dx(b);
        let mut residual = dy;
        if let (Some(norm2), Some(normed2)) = (l.rows.norm2, keep.normed2) {
            let input = tp.gather_beside(b, "gate_up_regather", normed2, s.input, last);
            tp.reduce(b, "gate_up_bwd_reduce", self.sums, s.d_normed);
            self.dw(b, "gate_up_dw", l.wide, l.hidden, s.network().1, input, l.rows.gate_up);
            self.norm(b, "norm2_bwd", x, norm2, dy, s.d_mid);
            residual = s.d_mid;
        }
        let input = tp.gather_beside(b, "qkv_regather", keep.normed1, s.input, last);
        self.qkv_dx(b, keep.normed2.is_none());
        tp.reduce(b, "qkv_bwd_reduce", self.sums, s.d_normed);
        self.dw(b, "qkv_dw", l.qkv_row(), l.hidden, s.d_qkv, input, l.rows.qkv);
        if keep.normed2.is_none() {
            self.dw(b, "gate_up_dw", l.wide, l.hidden, s.network().1, input, l.rows.gate_up);
        }
        self.norm(b, "norm1_bwd", x, l.rows.norm1, residual, dx);
    }

    fn norm(&self, b: &mut Builder, label: &str, x: Buf, r: Rows, residual: Buf, dx: Buf) {
        let weights = [self.at(r), self.g.rows(r[0], r[1])];
        self.layer.norms.backward(b, label, x, weights, self.s.d_normed, residual, dx);
    }
}
