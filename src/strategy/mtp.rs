//! Multi-token prediction: modules behind the last layer, of which the k-th predicts the token k + 1 further on
//! (DeepSeek-V3, arXiv:2412.19437, section 2.2).
//!
//! ```text
//! y_k = E norm(embedding of token i+k) + H norm(h_(k-1))     h_0: output of the last layer
//! h_k = layers(y_k)                                           loss: of token i+k+1, by the head of the model
//! ```
//! They stand on the last stage with the head, forward and backward in one, and look tokens up in the model's embedding:
//! the first and the last stage of a pipeline both have it, and add up its gradients (as in Megatron Core). E and H, the
//! halves of what checkpoints call `eh_proj`, are whole on every tensor-parallel rank, which has its own rows of tokens.

use super::data::{DataParallel, FlatWeights};
use super::head::HeadWeights;
use super::kind::{Kind, kinds_of};
use super::norm::Norms;
use super::step::Step;
use super::tensor::TensorParallel;
use super::transformer::{Flats, Layer, Saved, linear, linear_dw, linear_dx, weight_grad};
use super::weights::{Rows, Weight, Weights};
use crate::plan::{Buf, Builder, Dtype, Kernel, Param, TensorKind};
use crate::spec::{LlmSpec, Mixer, Parallelism, Recompute, Workload};

/// The modules, and what they have in common.
pub struct Modules {
    all: Vec<Module>,
    /// Targets of tokens further on, a slot for each microbatch: one buffer for each module.
    pub targets: Vec<Buf>,
    weights: Weights,
    rows: Owned,
    norms: Norms,
    tp: TensorParallel,
    hidden: u64,
    fp8: bool,
    acc: Dtype,
    /// The weight of each module's loss beside the model's own.
    part: f64,
    /// Room for a product that is not added to a gradient at once; `None` where all are.
    dw: Option<Buf>,
}

/// The places of a module's own weights. The norm before the head stands where the head has its own.
struct Owned {
    token_norm: Rows,
    hidden_norm: Rows,
    token: Rows,
    hidden: Rows,
}

struct Module {
    flat: FlatWeights,
    layers: Vec<Inner>,
    /// Embedded tokens; these and the hidden states behind their norms; their gradients.
    embedded: Buf,
    normed: [Buf; 2],
    d_normed: [Buf; 2],
    /// Inputs of the layers, and the output of the last one.
    x: Buf,
    /// Gradients of `x`, two slots in turns.
    dx: Buf,
}

/// What a module is given: the tokens that it looks up, the hidden states before it, and the microbatch that both are of.
#[derive(Clone, Copy)]
struct Given {
    ids: Buf,
    x: Buf,
    microbatch: u32,
}

/// A layer of a module.
struct Inner {
    kind: usize,
    flat: FlatWeights,
    experts: Option<FlatWeights>,
    saved: Saved,
}

impl Inner {
    fn weights(&self) -> Flats {
        Flats { dense: self.flat.weight, experts: self.experts.map(|e| e.weight) }
    }

    fn gradients(&self) -> Flats {
        Flats { dense: self.flat.grad, experts: self.experts.map(|e| e.grad) }
    }
}

/// The kinds of a module's layers, among the kinds of layers that a model has.
fn kinds_of_layers(model: &LlmSpec) -> Vec<usize> {
    let kinds = kinds_of(model, false);
    let pattern = model.mtp.as_ref().map_or(&[][..], |mtp| &mtp.pattern);
    let of = |mixer: &Mixer| kinds.iter().position(|(_, of, _)| of.pattern.first() == Some(mixer));
    let missing = "a reader of models takes mixers that the model has";
    match pattern {
        [] => vec![kinds.len() - 1],
        all => all.iter().map(|mixer| of(mixer).expect(missing)).collect(),
    }
}

impl Modules {
    /// Declares weights and buffers of the modules; `None` where the model has none.
    pub fn new(
        b: &mut Builder,
        model: &LlmSpec,
        (work, par): (&Workload, &Parallelism),
        kinds: &[Kind],
        [dp, edp]: [&DataParallel; 2],
        microbatches: u32,
    ) -> Option<Modules> {
        let mtp = model.mtp.as_ref()?;
        let layer: &Layer = &kinds.last().expect("a model has layers").layer;
        let (n, r, h) = (layer.tokens(), layer.residual_rows(), model.hidden);
        let norms = Norms::new(model, r);
        let mut weights = Weights::new(&layer.tp);
        norms.weights(&mut weights, "shared_head.norm.weight", "shared_head.norm.bias");
        let rows = Owned {
            token_norm: norms.weights(&mut weights, "enorm.weight", "enorm.bias"),
            hidden_norm: norms.weights(&mut weights, "hnorm.weight", "hnorm.bias"),
            token: weights.whole("eh_proj_e.weight", &[h, h]),
            hidden: weights.whole("eh_proj_h.weight", &[h, h]),
        };
        let inner = kinds_of_layers(model);
        let module = |b: &mut Builder, k: u64| {
            let flat = dp.weights_of(b, &format!("mtp{k}"), weights.elems(), [1, 1], None, &weights.in_fp8());
            let layers = inner.iter().enumerate().map(|(i, &number)| {
                let kind = &kinds[number];
                let (flat, experts) =
                    Kind::weights_of(b, &format!("mtp{k}.{i}."), &kind.layer, [dp, edp], [1, 1], false);
                let saved = match kind.recompute {
                    Recompute::Full if !kind.layer.keeps_attention => kind.saved,
                    _ => kind.layer.saved(b, TensorKind::Workspace, 1, None),
                };
                Inner { kind: number, flat, experts, saved }
            });
            let layers: Vec<Inner> = layers.collect();
            let slots = layers.len() as u32 + 1;
            let mut room = |name: &str, slots| b.tensor(name, &[r, h], work.dtype, TensorKind::Workspace, slots);
            Module {
                flat,
                layers,
                embedded: room("mtp_embedded", 1),
                normed: [room("mtp_token", 1), room("mtp_hidden", 1)],
                d_normed: [room("mtp_d_token", 1), room("mtp_d_hidden", 1)],
                x: room("mtp_x", slots),
                dx: room("mtp_dx", 2),
            }
        };
        let all = (1..=mtp.depth).map(|k| module(b, k)).collect();
        let targets = (1..=mtp.depth)
            .map(|k| b.tensor(&format!("targets.{k}"), &[n], Dtype::U32, TensorKind::Activation, microbatches));
        let targets = targets.collect();
        let dw = layer.add_grads.then(|| b.tensor("mtp_product", &[h * h], work.dtype, TensorKind::Workspace, 1));
        Some(Modules {
            all,
            targets,
            weights,
            rows,
            norms,
            tp: layer.tp,
            hidden: h,
            fp8: par.options.fp8,
            acc: layer.grads,
            part: mtp.part(),
            dw,
        })
    }

    /// Every flat tensor of a module by name, with the ranks that hold it.
    pub fn flats<'m>(
        &'m self,
        [dp, edp]: [&'m DataParallel; 2],
    ) -> impl Iterator<Item = (&'m DataParallel, String, &'m FlatWeights)> {
        (1..).zip(&self.all).flat_map(move |(k, module)| {
            let inner = (0..).zip(&module.layers).flat_map(move |(i, inner)| {
                let experts = inner.experts.iter().map(move |e| (edp, format!("mtp{k}.experts.{i}"), e));
                std::iter::once((dp, format!("mtp{k}.layer.{i}"), &inner.flat)).chain(experts)
            });
            std::iter::once((dp, format!("mtp{k}"), &module.flat)).chain(inner)
        })
    }

    /// Sums the modules' gradients over the replicas.
    pub fn sync(&self, b: &mut Builder, kinds: &[Kind], [dp, edp]: [&DataParallel; 2]) {
        for (k, module) in (1..).zip(&self.all) {
            let [from, to] = self.weights.shared();
            b.labelled(format!(".mtp{k}"), |b| {
                let flat = &module.flat;
                self.tp.sum_shared(b, "shared_grad_sum", flat.grad.rows(from, to), self.acc);
                dp.sync(b, "grad_sum", flat.grad, dp.share_of(flat));
            });
            for (i, inner) in module.layers.iter().enumerate() {
                let experts = inner.experts.as_ref().map(|e| edp.share_of(e));
                let share = Flats { dense: dp.share_of(&inner.flat), experts };
                b.labelled(format!(".mtp{k}.{i}"), |b| kinds[inner.kind].sum(b, [dp, edp], inner.gradients(), share));
            }
        }
    }

    /// The weights as a checkpoint would have them: modules go on counting layers.
    pub fn params(
        &self,
        first: u64,
        kinds: &[Kind],
        param: impl Fn(&str, &Weight, &FlatWeights) -> Param,
    ) -> Vec<Param> {
        let mut all = vec![];
        let mut at = first;
        for module in &self.all {
            let own = format!("model.layers.{at}.");
            all.extend(self.weights.all.iter().map(|w| param(&own, w, &module.flat)));
            for inner in &module.layers {
                let (prefix, layer) = (format!("model.layers.{at}."), &kinds[inner.kind].layer);
                all.extend(layer.weights().iter().map(|w| param(&prefix, w, &inner.flat)));
                if let (Some(experts), Some(flat)) = (&layer.experts, &inner.experts) {
                    all.extend(experts.weights().iter().map(|w| param(&prefix, w, flat)));
                }
                at += 1;
            }
        }
        all
    }
}

impl Step<'_> {
    /// Runs the head, and the modules behind it: their losses, and the gradient of the last layer's output in the first
    /// of the pair `dx`. `targets`: those of the head, then those of each module.
    pub(super) fn ends(&mut self, targets: &[Buf], x: Buf, dx: Buf, microbatch: u32) {
        let pair = [dx, dx.slot(dx.slot + 1)];
        if self.modules.is_none() {
            return self.head(targets[0], x, dx);
        }
        let turned = [pair[1], pair[0]];
        self.head_to(targets[0], x, turned);
        self.module(0, targets, x, turned, microbatch);
    }

    /// Runs module `k`: adds the gradient of its input x to `residual`, and writes the sum to `out`.
    fn module(&mut self, k: usize, targets: &[Buf], x: Buf, [residual, out]: [Buf; 2], microbatch: u32) {
        let suffix = format!(".mtp{}", k + 1);
        let modules = self.modules.take().expect("asked for where there are some");
        let (module, depth) = (&modules.all[k], modules.all.len());
        let mut b = std::mem::take(&mut self.b);
        let given = Given { ids: targets[k], x, microbatch };
        b.labelled(suffix.clone(), |b| self.module_forward(b, &modules, module, given));
        let layers = module.layers.len() as u32;
        let (own, table) = ([module.flat.weight, module.flat.grad], self.head_table());
        let last = k + 1 == depth;
        let dx = [module.dx, module.dx.slot(1)];
        // With another module behind it, the gradient that the head leaves is the residual of that module.
        let to = if last { dx } else { [dx[1], dx[0]] };
        let at = HeadWeights { own, table, part: modules.part };
        b.labelled(suffix.clone(), |b| self.end.run(b, at, targets[k + 1], module.x.slot(layers), self.loss, to));
        (self.b, self.modules) = (b, Some(modules));
        if !last {
            let modules = self.modules.as_ref().expect("just put back");
            let x = modules.all[k].x.slot(layers);
            self.module(k + 1, targets, x, to, microbatch);
        }
        let modules = self.modules.take().expect("just put back");
        let mut b = std::mem::take(&mut self.b);
        b.labelled(suffix, |b| self.module_backward(b, &modules, &modules.all[k], given, [residual, out]));
        (self.b, self.modules) = (b, Some(modules));
    }

    fn module_forward(&self, b: &mut Builder, all: &Modules, module: &Module, given: Given) {
        let Given { ids, x, microbatch } = given;
        let (r, h, rows) = (all.norms.rows, all.hidden, &all.rows);
        let w = module.flat.weight;
        let ([token, hidden], y) = (module.normed, module.x);
        self.embedding.forward(b, self.embed.weight, ids, module.embedded);
        all.norms.forward(b, "token_norm", module.embedded, w.at(rows.token_norm), token);
        all.norms.forward(b, "hidden_norm", x, w.at(rows.hidden_norm), hidden);
        b.compute("token_proj", linear(r, h, h, all.fp8), &[token, w.at(rows.token)], &[y]);
        let adds = accumulated(linear(r, h, h, all.fp8));
        b.compute("hidden_proj", adds, &[hidden, w.at(rows.hidden), y], &[y]);
        for (i, inner) in (0..).zip(&module.layers) {
            let xs = [y.slot(i), y.slot(i + 1)];
            self.kinds[inner.kind].call_one_forward(b, microbatch, inner.weights(), xs, &inner.saved);
        }
    }

    fn module_backward(&self, b: &mut Builder, all: &Modules, module: &Module, given: Given, to: [Buf; 2]) {
        let (Given { ids, x, microbatch }, [residual, out]) = (given, to);
        let (r, h, rows) = (all.norms.rows, all.hidden, &all.rows);
        for (i, inner) in module.layers.iter().enumerate().rev() {
            let i = i as u32;
            let turn = (module.layers.len() as u32 - 1 - i) % 2;
            let xs = [module.x.slot(i), module.dx.slot(turn), module.dx.slot(1 - turn)];
            let flats = [inner.weights(), inner.gradients()];
            self.kinds[inner.kind].call_one_backward(b, microbatch, flats, xs, &inner.saved);
        }
        let turn = module.layers.len() as u32 % 2;
        let (dy, free) = (module.dx.slot(turn), module.dx.slot(1 - turn));
        let [w, g] = [module.flat.weight, module.flat.grad];
        let sides = [("token", rows.token), ("hidden", rows.hidden)];
        for (i, (side, at)) in sides.into_iter().enumerate() {
            let reads = [dy, w.at(at)];
            b.compute(&format!("{side}_proj_dx"), linear_dx(r, h, h, all.fp8), &reads, &[module.d_normed[i]]);
            let product = linear_dw(h, h, r, all.fp8);
            weight_grad(b, &format!("{side}_proj_dw"), product, [dy, module.normed[i]], g.at(at), all.dw);
        }
        // The gradient of looked-up rows has no residual to be added to: a buffer that is free is set to zero for it.
        b.compute("no_residual", Kernel::Fill { elems: r * h }, &[], &[free]);
        let norm = |at: Rows| [w.at(at), g.at(at)];
        let [d_token, d_hidden] = module.d_normed;
        all.norms.backward(b, "token_norm_bwd", module.embedded, norm(rows.token_norm), [d_token, free], dy);
        self.embedding.backward(b, self.embed.grad, ids, dy);
        all.norms.backward(b, "hidden_norm_bwd", x, norm(rows.hidden_norm), [d_hidden, residual], out);
    }
}

/// A product that adds to its output.
fn accumulated(kernel: Kernel) -> Kernel {
    match kernel {
        Kernel::MatMul { m, n, k, a_t, b_t, fp8, bias, .. } => {
            Kernel::MatMul { m, n, k, a_t, b_t, accumulate: true, fp8, bias }
        }
        other => other,
    }
}
