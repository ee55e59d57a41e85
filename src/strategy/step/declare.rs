//! Everything that a step declares before its first op: weights with what the optimizer keeps of them, activations, and
//! how the layers of each kind share them.

use super::super::data::{DataParallel, Hybrid};
use super::super::embedding::Embedding;
use super::super::head::Head;
use super::super::kind::{Kind, kinds_of};
use super::super::mtp::Modules;
use super::super::muon;
use super::super::pipeline::Pipeline;
use super::super::residual::Residual;
use super::super::sharded;
use super::super::transformer::Layer;
use super::{Engines, Step, groups_of, mesh};
use crate::error::Result;
use crate::plan::*;
use crate::spec::{LlmSpec, Parallelism, Workload};

/// The ranks that hold the same weights outside of experts, and those that hold the same experts. `acc`: dtype of sums
/// and of optimizer state.
fn replicas(
    work: &Workload,
    par: &Parallelism,
    engine: Engine,
    acc: Dtype,
    accumulate: bool,
    has_experts: bool,
) -> [DataParallel; 2] {
    let of = |group, ranks, zero, views| DataParallel {
        group,
        ranks,
        // These views stand behind the view of all ranks, and that of experts.
        hybrid: groups_of(par)
            .map(|groups| Hybrid::of_view(views + u8::from(has_experts), (ranks / u64::from(groups)) as u32)),
        zero,
        accumulate,
        no_sync: par.options.no_sync,
        copies: par.options.copy_shards,
        gather_fp8: par.options.gather_fp8,
        all_reduce: par.options.all_reduce_grads,
        gathers_ahead: par.options.overlap_gather,
        offload: par.options.offload_optimizer,
        foreach: par.options.foreach,
        dtype: work.dtype,
        acc,
        grads: if par.options.bf16_grads { work.dtype } else { acc },
        moments: if par.options.bf16_moments { work.dtype } else { acc },
        no_master: par.options.no_master,
        engine,
    };
    // Tensor-parallel ranks and stages hold different weights.
    let same = u64::from(par.ranks() / (par.tp * par.pp));
    let same_experts = u64::from(par.ranks() / (par.ep * par.pp));
    let zero = if has_experts { par.zero } else { 0 };
    [of(DataParallel::replicas(), same, par.zero, 1), of(DataParallel::expert_replicas(), same_experts, zero, 2)]
}

/// The buffers that Muon works in, large enough for every layer.
fn room_for_muon(b: &mut Builder, kinds: &[Kind], ranks: [&DataParallel; 2], dtype: Dtype) -> muon::Room {
    let all: Vec<_> = kinds.iter().flat_map(|kind| kind.flats_by_part(ranks)).collect();
    let all: Vec<_> = all.iter().map(|(dp, w, part)| (*dp, *w, part)).collect();
    muon::Room::new(b, &all, dtype)
}

impl<'a> Step<'a> {
    pub(super) fn new(
        mut b: Builder,
        model: &'a LlmSpec,
        work: &'a Workload,
        par: &'a Parallelism,
        engines: Engines,
        (routes, apart): (Vec<Route>, bool),
    ) -> Result<Step<'a>> {
        let mesh = mesh(par);
        let kinds = kinds_of(model, apart);
        let layers: Vec<Layer> =
            kinds.iter().map(|(_, model, _)| Layer::new(model, work, par, engines, &routes)).collect();
        let layer = layers.last().expect("a model has layers");
        let acc = layer.core.shape().acc;
        let microbatches = (work.global_batch / (u64::from(par.dp) * work.micro_batch)) as u32;
        let [dp, edp] = replicas(work, par, engines.collective, acc, microbatches > 1, !routes.is_empty());
        let (n, rows, h, l) = (layer.tokens(), layer.residual_rows(), model.hidden, model.layers as u32);

        let embedding = Embedding::new(&mut b, model, layer);
        let end = Head::new(&mut b, model, layer, work.global_batch * work.seq_len);
        let pipe = Pipeline::new(model, par, microbatches)?;
        // One layer is in use and, with prefetch, one is on its way.
        let whole = if par.options.no_prefetch { 1 } else { 2 };
        let weights: Vec<_> = (kinds.iter().zip(&layers))
            .map(|((prefix, _, of), layer)| {
                let held = (0..pipe.stages).map(|stage| pipe.held(stage, of)).max().unwrap_or(l);
                Kind::weights_of(&mut b, prefix, layer, [&dp, &edp], [held, whole], par.options.muon)
            })
            .collect();
        let embed = dp.weights(&mut b, "embed", embedding.elems(), 1, 1);
        let head = dp.weights(&mut b, "head", end.elems(), 1, 1);
        let mut act = |name, shape: &[u64], dtype, slots| b.tensor(name, shape, dtype, TensorKind::Activation, slots);
        let tokens = act("tokens", &[n], Dtype::U32, microbatches);
        let targets = act("targets", &[n], Dtype::U32, microbatches);
        // Stages keep their activations by microbatch in flight: `stages` declares them.
        let staged = pipe.is_staged();
        let x = match staged {
            true => Residual::of_last_stage(tokens),
            false => Residual::new(&mut b, &[rows, h], work.dtype, l, par.options.offload_activations),
        };
        let loss = b.tensor("loss", &[1], acc, TensorKind::Grad, 1);
        let dx = if staged { tokens } else { b.tensor("dx", &[rows, h], work.dtype, TensorKind::Workspace, 2) };
        let kinds: Vec<Kind> = (kinds.into_iter().zip(layers).zip(weights))
            .map(|((kind, layer), weights)| Kind::new(&mut b, &pipe, par, kind, layer, weights))
            .collect();
        let muon = par.options.muon.then(|| room_for_muon(&mut b, &kinds, [&dp, &edp], work.dtype));
        let modules = Modules::new(&mut b, model, (work, par), &kinds, [&dp, &edp], microbatches);
        Ok(Step {
            model,
            work,
            par,
            b,
            mesh,
            kinds,
            embedding,
            end,
            modules,
            muon,
            dp,
            edp,
            acc,
            routes,
            apart,
            embed,
            head,
            tokens,
            targets,
            loss,
            x,
            dx,
            pipe,
            microbatches,
            whole,
            shared_blocks: sharded::Blocks::new(),
            microbatch: vec![],
            last_microbatch: 0,
        })
    }
}
