//! A whole training step: embedding, layers, head and loss, backward, gradient sums, Adam.
//!
//! ```text
//! Fill gradients
//! microbatch x (M-1)        embed | layer_fwd x L | head | layer_bwd x L | embed_bwd
//! last microbatch           the same, with each layer's gradient sum sent off behind its backward
//! Adam, weights gathered
//! ```

use super::attention::{Saved as AttnSaved, Way};
use super::data::{Adam, DataParallel, FlatWeights};
use super::feasible;
use super::transformer::{Layer, Saved, Scratch, linear, linear_dw, linear_dx};
use crate::error::Result;
use crate::plan::program::VERSION;
use crate::plan::*;
use crate::spec::{AttentionSpec, LlmSpec, Parallelism, Recompute, StackSpec, Workload};

/// Who moves the bytes of point-to-point transfers and of collectives.
#[derive(Debug, Clone, Copy)]
pub struct Engines {
    pub p2p: Engine,
    pub collective: Engine,
}

impl Engines {
    /// As the stack has it: communication kernels on so many thread blocks.
    pub fn of(stack: &StackSpec) -> Engines {
        let sm = |n: u32| Engine::Sm { ctas: n.min(u32::from(u16::MAX)) as u16 };
        Engines { p2p: sm(stack.p2p_ctas.value), collective: sm(stack.collective_ctas.value) }
    }
}

/// Builds the plan of one training step, or says why it cannot be.
pub fn build(model: &LlmSpec, work: &Workload, par: &Parallelism, engines: Engines) -> Result<Plan> {
    feasible::check(model, work, par)?;
    let mut step = Step::new(model, work, par, engines);
    step.blocks();
    step.program();
    Ok(step.finish())
}

/// The tensors that the blocks and the program share.
struct Step<'a> {
    model: &'a LlmSpec,
    work: &'a Workload,
    par: &'a Parallelism,
    b: Builder,
    mesh: Mesh,
    layer: Layer,
    scratch: Scratch,
    saved: Saved,
    dp: DataParallel,
    acc: Dtype,
    layers: FlatWeights,
    embed: FlatWeights,
    /// The final norm, then the output matrix unless it is tied to the embedding.
    head: FlatWeights,
    tokens: Buf,
    targets: Buf,
    loss: Buf,
    /// Slot l is the input of layer l, the last the output of all.
    x: Buf,
    /// Gradients of the layers' inputs, alternating.
    dx: Buf,
    normed: Buf,
    logits: Buf,
    d_normed: Buf,
    microbatches: u32,
    layer_fwd: BlockId,
    layer_bwd: BlockId,
    layer_bwd_last: BlockId,
    microbatch: BlockId,
    last_microbatch: BlockId,
}

/// All ranks of a step, the axes that need the best links last.
pub fn mesh(par: &Parallelism) -> Mesh {
    let (cp, up) = ((Axis::Cp, par.ring), (Axis::Up, par.ulysses));
    let [outer, inner] = if par.options.ring_inside { [up, cp] } else { [cp, up] };
    Mesh::new(&[(Axis::Dp, par.dp), outer, inner])
}

fn layer_of(model: &LlmSpec, work: &Workload, par: &Parallelism, engines: Engines) -> Layer {
    let attention = AttentionSpec {
        batch: work.micro_batch,
        seq_len: work.seq_len,
        heads: model.heads,
        kv_heads: model.kv_heads,
        head_dim: model.head_dim,
        causal: true,
        dtype: work.dtype,
    };
    let Way { segs, seq, core, ulysses } = Way::new(&attention, par, engines);
    Layer::new(model, work.micro_batch, seq, segs, core, ulysses)
}

impl<'a> Step<'a> {
    fn new(model: &'a LlmSpec, work: &'a Workload, par: &'a Parallelism, engines: Engines) -> Step<'a> {
        let mut b = Builder::new();
        let mesh = mesh(par);
        let layer = layer_of(model, work, par, engines);
        let acc = layer.core.shape().acc;
        let ranks = u64::from(par.ranks());
        let dp = DataParallel { ranks, zero: par.zero, dtype: work.dtype, acc, engine: engines.collective };
        let (n, h, v, l) = (layer.tokens(), model.hidden, model.vocab, model.layers as u32);
        let microbatches = (work.global_batch / (u64::from(par.dp) * work.micro_batch)) as u32;

        let layers = dp.weights(&mut b, "layers", layer.weight_rows().down[1], l);
        let embed = dp.weights(&mut b, "embed", v * h, 1);
        let head = dp.weights(&mut b, "head", if model.tie_embeddings { h } else { h + v * h }, 1);
        let mut act = |name, shape: &[u64], dtype, slots| b.tensor(name, shape, dtype, TensorKind::Activation, slots);
        let tokens = act("tokens", &[n], Dtype::U32, microbatches);
        let targets = act("targets", &[n], Dtype::U32, microbatches);
        let x = act("x", &[n, h], work.dtype, l + 1);
        let loss = b.tensor("loss", &[1], acc, TensorKind::Grad, 1);
        let mut temp = |name, row, slots| b.tensor(name, &[n, row], work.dtype, TensorKind::Workspace, slots);
        let (dx, normed, logits, d_normed) =
            (temp("dx", h, 2), temp("normed", h, 1), temp("logits", v, 1), temp("d_head", h, 1));
        let saved = match par.recompute {
            Recompute::Full => layer.saved(&mut b, TensorKind::Workspace, 1),
            _ => layer.saved(&mut b, TensorKind::Activation, l),
        };
        let scratch = layer.scratch(&mut b);
        Step {
            model,
            work,
            par,
            b,
            mesh,
            layer,
            scratch,
            saved,
            dp,
            acc,
            layers,
            embed,
            head,
            tokens,
            targets,
            loss,
            x,
            dx,
            normed,
            logits,
            d_normed,
            microbatches,
            layer_fwd: 0,
            layer_bwd: 0,
            layer_bwd_last: 0,
            microbatch: 0,
            last_microbatch: 0,
        }
    }

    fn layer_count(&self) -> u32 {
        self.model.layers as u32
    }

    fn blocks(&mut self) {
        self.layer_fwd = self.layer_fwd_block();
        self.layer_bwd = self.layer_bwd_block();
        self.layer_bwd_last = self.layer_bwd_last_block();
        if self.microbatches > 1 {
            self.microbatch = self.microbatch_block("microbatch", false);
        }
        self.last_microbatch = self.microbatch_block("last_microbatch", true);
    }

    fn layer_fwd_block(&mut self) -> BlockId {
        self.b.open("layer_fwd");
        let [w, x, x_out] = ["w", "x", "x_out"].map(|name| self.b.formal(name));
        let keep = self.saved_formals();
        self.layer.forward(&mut self.b, &self.scratch, w, x, x_out, &keep);
        self.b.close()
    }

    fn layer_bwd_block(&mut self) -> BlockId {
        self.b.open("layer_bwd");
        let [w, g, x, dy, dx] = ["w", "g", "x", "dy", "dx"].map(|name| self.b.formal(name));
        let keep = self.saved_formals();
        if self.par.recompute == Recompute::Full {
            // The output is not needed again; it goes where the next layer's gradient will be written.
            let mut args: Vec<Arg> = vec![w.into(), x.into(), dx.into()];
            args.extend(saved_args(&keep, self.layer.ulysses.is_some(), Arg::from));
            self.b.call("again", self.layer_fwd, 1, &args);
        }
        self.layer.backward(&mut self.b, &self.scratch, w, g, x, &keep, dy, dx);
        self.b.close()
    }

    /// A layer's backward pass and, behind it, the sum of its gradient over the ranks.
    fn layer_bwd_last_block(&mut self) -> BlockId {
        self.b.open("layer_bwd_last");
        let [w, g, x, dy, dx] = ["w", "g", "x", "dy", "dx"].map(|name| self.b.formal(name));
        let keep = self.saved_formals();
        let share = self.b.formal("g_share");
        let mut args: Vec<Arg> = [w, g, x, dy, dx].map(Arg::from).to_vec();
        args.extend(saved_args(&keep, self.layer.ulysses.is_some(), Arg::from));
        self.b.call("bwd", self.layer_bwd, 1, &args);
        self.dp.sync(&mut self.b, "grad_sum", g, share);
        self.b.close()
    }

    fn saved_formals(&mut self) -> Saved {
        let mut formal = |name| self.b.formal(name);
        let attn = AttnSaved { q: formal("q"), kv: formal("kv"), o: formal("attn_o"), lse: formal("lse") };
        Saved {
            attn,
            normed1: formal("normed1"),
            mid: formal("mid"),
            normed2: formal("normed2"),
            gate_up: formal("gate_up"),
            act: formal("act"),
            o: if self.layer.ulysses.is_some() { formal("o") } else { attn.o },
        }
    }

    fn microbatch_block(&mut self, name: &str, last: bool) -> BlockId {
        self.b.open(name);
        let [tokens, targets] = ["tokens", "targets"].map(|name| self.b.formal(name));
        let (n, h, l) = (self.layer.tokens(), self.model.hidden, self.layer_count());
        let embed = Kernel::Embed { rows: n, cols: h, vocab: self.model.vocab };
        self.b.compute("embed", embed, &[tokens, self.embed_rows(self.embed.weight)], &[self.x]);
        self.call_forward();
        self.head(targets, self.x.slot(l), last);
        self.call_backward(last);
        let embed_bwd = Kernel::EmbedBwd { rows: n, cols: h, vocab: self.model.vocab };
        let grad = self.embed_rows(self.embed.grad);
        self.b.compute("embed_bwd", embed_bwd, &[tokens, self.dx.slot(l % 2), grad], &[grad]);
        if last {
            self.dp.sync(&mut self.b, "grad_sum.embed", self.embed.grad, self.dp.share_of(&self.embed));
        }
        self.b.close()
    }

    fn embed_rows(&self, flat: Buf) -> Buf {
        flat.rows(0, self.model.vocab * self.model.hidden)
    }

    /// One slot a layer where activations are kept, the same one where they are computed again.
    fn saved_each(&self, first: i32, step: i32) -> Vec<Arg> {
        let of = self.layer_count();
        let kept = self.par.recompute == Recompute::None;
        saved_args(&self.saved, self.layer.ulysses.is_some(), |buf| {
            if kept { each(buf, first, step, of) } else { buf.into() }
        })
    }

    fn call_forward(&mut self) {
        let l = self.layer_count();
        let mut args = vec![each(self.layers.weight, 0, 1, l), each(self.x, 0, 1, l + 1), each(self.x, 1, 1, l + 1)];
        args.extend(self.saved_each(0, 1));
        self.b.call("fwd", self.layer_fwd, l, &args);
    }

    fn call_backward(&mut self, last: bool) {
        let (l, top) = (self.layer_count(), self.layer_count() as i32 - 1);
        let mut args = vec![
            each(self.layers.weight, top, -1, l),
            each(self.layers.grad, top, -1, l),
            each(self.x, top, -1, l + 1),
            each(self.dx, 0, 1, 2),
            each(self.dx, 1, 1, 2),
        ];
        args.extend(self.saved_each(top, -1));
        if last {
            args.push(each(self.dp.share_of(&self.layers), top, -1, l));
        }
        let block = if last { self.layer_bwd_last } else { self.layer_bwd };
        self.b.call("bwd", block, l, &args);
    }

    /// Final norm, logits, loss, and the gradient of the last layer's output in `dx` slot 0.
    fn head(&mut self, targets: Buf, x: Buf, last: bool) {
        let (n, h, v) = (self.layer.tokens(), self.model.hidden, self.model.vocab);
        let (norm_w, norm_g) = (self.head.weight.rows(0, h), self.head.grad.rows(0, h));
        let (w, g) = match self.model.tie_embeddings {
            true => (self.embed_rows(self.embed.weight), self.embed_rows(self.embed.grad)),
            false => (self.head.weight.rows(h, h + v * h), self.head.grad.rows(h, h + v * h)),
        };
        let b = &mut self.b;
        let eps = self.model.rms_eps;
        b.compute("final_norm", Kernel::Norm { rows: n, cols: h, eps }, &[x, norm_w], &[self.normed]);
        b.compute("lm_head", linear(n, v, h), &[self.normed, w], &[self.logits]);
        let scale = 1.0 / (self.work.global_batch * self.work.seq_len) as f64;
        let loss = Kernel::CrossEntropy { rows: n, vocab: v, scale };
        b.compute("cross_entropy", loss, &[self.logits, targets, self.loss], &[self.logits, self.loss]);
        b.compute("lm_head_dx", linear_dx(n, h, v), &[self.logits, w], &[self.d_normed]);
        b.compute("lm_head_dw", linear_dw(v, h, n), &[self.logits, self.normed, g], &[g]);
        // The norm's gradient is added to a residual everywhere but here, where there is none.
        let zero = self.dx.slot(1);
        b.compute("no_residual", Kernel::Fill { elems: n * h }, &[], &[zero]);
        let reads = [x, norm_w, self.d_normed, zero, norm_g];
        b.compute("final_norm_bwd", Kernel::NormBwd { rows: n, cols: h, eps }, &reads, &[self.dx.slot(0), norm_g]);
        if last {
            self.dp.sync(b, "grad_sum.head", self.head.grad, self.dp.share_of(&self.head));
        }
    }

    fn program(&mut self) {
        let (l, m) = (self.layer_count(), self.microbatches);
        self.b.open("zero_grad");
        let g = self.b.formal("g");
        self.b.compute("fill", Kernel::Fill { elems: self.layers.elems }, &[], &[g]);
        let fill = self.b.close();
        self.b.call("zero_grad", fill, l, &[each(self.layers.grad, 0, 1, l)]);
        for (label, w) in [("embed", self.embed), ("head", self.head)] {
            self.b.compute(&format!("zero_grad.{label}"), Kernel::Fill { elems: w.elems }, &[], &[w.grad]);
        }
        self.b.compute("zero_loss", Kernel::Fill { elems: 1 }, &[], &[self.loss]);
        if m > 1 {
            let args = [each(self.tokens, 0, 1, m), each(self.targets, 0, 1, m)];
            self.b.call("mb", self.microbatch, m - 1, &args);
        }
        let last = [self.tokens.slot(m - 1).into(), self.targets.slot(m - 1).into()];
        self.b.call("last", self.last_microbatch, 1, &last);
        self.dp.sum_scalar(&mut self.b, "loss_sum", self.loss, self.acc);
        self.optimizer();
    }

    fn optimizer(&mut self) {
        let adam = Adam::default();
        self.dp.update(&mut self.b, "head", &self.head, 0, adam);
        for l in (0..self.layer_count()).rev() {
            self.dp.update(&mut self.b, &format!("layer.{l}"), &self.layers, l, adam);
        }
        self.dp.update(&mut self.b, "embed", &self.embed, 0, adam);
    }

    fn params(&self) -> Vec<Param> {
        let (h, v) = (self.model.hidden, self.model.vocab);
        let param = |name: String, w: &FlatWeights, slot, rows, shape: Vec<u64>| Param {
            name,
            weight: w.weight.tensor(),
            grad: w.grad.tensor(),
            slot,
            rows,
            shape,
            shard: None,
            stages: vec![],
        };
        let mut all = vec![
            param("model.embed_tokens.weight".into(), &self.embed, 0, [0, v * h], vec![v, h]),
            param("model.norm.weight".into(), &self.head, 0, [0, h], vec![h]),
        ];
        if !self.model.tie_embeddings {
            all.push(param("lm_head.weight".into(), &self.head, 0, [h, h + v * h], vec![v, h]));
        }
        for l in 0..self.layer_count() {
            for (name, rows, shape) in self.layer.params() {
                all.push(param(format!("model.layers.{l}.{name}"), &self.layers, l, rows, shape));
            }
        }
        all
    }

    fn about(&self) -> About {
        let (work, par) = (self.work, self.par);
        let tokens = (work.global_batch * work.seq_len) as f64;
        About {
            model: self.model.name.clone(),
            strategy: par.strategy().into(),
            seq_len: work.seq_len,
            global_batch: work.global_batch,
            micro_batch: work.micro_batch,
            par: *par,
            dtype: format!("{:?}", work.dtype).to_lowercase(),
            model_flops: self.model.flops_per_token(work.seq_len) * tokens,
            model_spec: Some(self.model.clone()),
        }
    }

    fn finish(mut self) -> Plan {
        let params = self.params();
        let masters = self.dp.masters(&[self.layers, self.embed, self.head]);
        let about = self.about();
        let inputs = Inputs {
            tokens: self.tokens.tensor(),
            targets: self.targets.tensor(),
            segs: self.layer.segs.clone(),
            batch: self.work.micro_batch,
            vocab: self.model.vocab,
            microbatches: self.microbatches,
            loss: self.loss.tensor(),
            hidden: self.x.tensor(),
            hidden_slot: self.layer_count(),
        };
        let ops = self.b.finish();
        Plan {
            version: VERSION,
            about,
            views: vec![self.mesh],
            lanes: self.b.lanes,
            tensors: self.b.tensors,
            blocks: self.b.blocks,
            programs: vec![Program { name: "rank".into(), ops }],
            role_of: RoleMap { view: 0, axes: vec![], table: vec![0] },
            params,
            masters,
            feed: Feed::Tokens(inputs),
        }
    }
}

/// The kept buffers in the order of [`Step::saved_formals`].
fn saved_args(s: &Saved, ulysses: bool, arg: impl Fn(Buf) -> Arg) -> Vec<Arg> {
    let mut bufs = vec![s.attn.q, s.attn.kv, s.attn.o, s.attn.lse, s.normed1, s.mid, s.normed2, s.gate_up, s.act];
    if ulysses {
        bufs.push(s.o);
    }
    bufs.into_iter().map(arg).collect()
}
