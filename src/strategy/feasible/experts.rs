//! Checks of mixtures: how experts are spread over ranks, what carries their rows, and what neither goes with.

use super::list;
use crate::error::{Cause, Error, Reason, Result};
use crate::plan::Route;
use crate::spec::{Capacity, Dispatch, Fold, LlmSpec, Mlp, MoeSpec, Parallelism, Recompute, Workload};
use crate::strategy::expert;

/// Checks that experts can be spread over consecutive ranks of a stage, each rank having some whole.
pub(super) fn experts(model: &LlmSpec, par: &Parallelism) -> Result<()> {
    let (ep, o) = (par.ep, par.options);
    let Some(moe) = model.moe else { return dense(model, par) };
    divided(&moe, par)?;
    let refused = [
        (model.parallel_block, "a parallel block"),
        (model.bias, "biases"),
        (model.mlp == Mlp::Gelu, "GELU"),
        (
            par.zero > 1 && o.replicas > 0,
            "zero above 1 and replicas, whose gradients are summed once a step; use zero 1",
        ),
        (
            par.zero > 1 && o.overlap_exchange,
            "zero above 1 and overlap-exchange, whose pairs keep weights whole; use zero 1",
        ),
        (par.tp > 1 && o.whole_activations, "no-sp, where every rank would send the same tokens; leave it out"),
        (
            o.overlap_shared && moe.shared_ffn == 0,
            "overlap-shared, but no expert that every token visits; leave it out",
        ),
        (
            o.capacity.pads() && ep > 1 && !matches!(o.dispatch, Dispatch::Nccl | Dispatch::Hierarchical),
            "a capacity that is filled up where a token goes to a rank once, or all go everywhere; use dispatch nccl or \
             hierarchical, or a capacity without pad",
        ),
        (
            o.capacity.pads() && o.replicas > 0,
            "replicas and a capacity that is filled up; leave one out, or drop without pad",
        ),
        (
            o.capacity.pads() && o.shadow > 0,
            "shadow and a capacity that is filled up; leave one out, or drop without pad",
        ),
        (
            o.mask_rows && !o.capacity.pads(),
            "mask-rows without a capacity that is filled up, whose rows have masks; add capacity-pad:1.25 or so",
        ),
        (o.replicas > 0 && o.shadow > 0, "replicas and shadow, which both give hot experts more slots; leave one out"),
        (o.shadow > 0 && ep == 1, "shadow, but every rank has all experts with ep 1; leave it out"),
        (o.overlap_exchange && o.shadow > 0, "overlap-exchange and shadow; leave one out"),
        (par.zero > 1 && o.shadow > 0, "zero above 1 and shadow, whose weights come from whole ones; use zero 1"),
        (o.zb_h1 && o.shadow > 0, "zb-h1 and shadow, whose gradients go home with those of inputs; leave one out"),
        (
            o.fold != Fold::None && o.shadow > 0,
            "a folded pipeline and shadow, whose gradients go home with those of inputs; leave one out",
        ),
        (u64::from(o.shadow) > moe.experts, "shadow of more experts than the model has; use fewer"),
        (o.dispatch_fp8 && ep == 1, "dispatch-fp8, but nothing travels with ep 1; leave it out"),
        (
            o.overlap_exchange && o.no_overlap_p2p && par.vp == 1,
            "overlap-exchange and no-overlap-p2p without interleaving, which would wait between the two of a pair; use vp \
             above 1, or leave no-overlap-p2p out",
        ),
        (
            o.deepep_hook && o.dispatch != Dispatch::DeepepLowLatency,
            "deepep-hook, which only the low-latency kernels have; use dispatch-deepep-v1-ll",
        ),
        (
            o.deepep_hook && !o.overlap_exchange && !o.overlap_shared,
            "deepep-hook where nothing computes while rows travel; add overlap-shared or overlap-exchange",
        ),
        (o.overlap_exchange && ep == 1, "overlap-exchange, but nothing travels with ep 1; leave it out"),
        (
            o.overlap_exchange && par.recompute == Recompute::Full,
            "overlap-exchange where layers are computed again, their exchanges within the backward pass; use recompute none",
        ),
    ];
    if let Some((_, what)) = refused.iter().find(|(has, _)| *has) {
        return Err(Cause::Experts.infeasible(format!("not together with {what}")));
    }
    if o.overlap_exchange && o.recompute_moe {
        let why = "not together with overlap-exchange where experts are computed again, their exchanges within the backward \
                   pass; leave recompute-moe out";
        return Err(Error::Infeasible(Reason { word: Some("recompute-moe"), ..Reason::new(Cause::Experts, why) }));
    }
    Ok(())
}

/// Refuses options about experts for a model without them.
fn dense(model: &LlmSpec, par: &Parallelism) -> Result<()> {
    let (ep, o) = (par.ep, par.options);
    if o.replicas > 0 || o.shadow > 0 || o.capacity != Capacity::Unlimited {
        let cause = match (o.replicas, o.shadow) {
            (0, 0) => Cause::Capacity,
            (0, _) => Cause::Shadow,
            _ => Cause::Replicas,
        };
        return Err(cause.infeasible(format!("of experts; {} has none, leave it out", model.name)));
    }
    match (ep, o.words().into_iter().find(|word| of_experts(word))) {
        (1, None) => Ok(()),
        (1, Some(word)) => Err(Cause::Options.infeasible(format!("{word} needs experts; {} has none", model.name))),
        _ => Err(Cause::Ep.infeasible(format!("{ep}, but {} has no experts; use ep 1", model.name))),
    }
}

/// Checks that every rank that shares experts has as many of them, and of their copies, as any other.
fn divided(moe: &MoeSpec, par: &Parallelism) -> Result<()> {
    let (ep, o) = (par.ep, par.options);
    let stage = par.ranks() / par.pp.max(1);
    if o.replicas > 0 && ep > 0 && stage.is_multiple_of(ep) {
        let slots = moe.experts + u64::from(o.replicas);
        let most = moe.experts * u64::from(ep - 1);
        if ep == 1 {
            return Err(Cause::Replicas.infeasible("on one rank, where nothing is to be evened out; use ep above 1"));
        }
        if !slots.is_multiple_of(u64::from(ep)) || u64::from(o.replicas) > most {
            let good = (slots.next_multiple_of(u64::from(ep)) - moe.experts).min(most / u64::from(ep) * u64::from(ep));
            let why = format!("{} slots of experts and copies do not divide over ep {ep}", slots);
            return Err(Cause::Replicas.infeasible(format!("{why}, or are too many; use {good}")));
        }
    } else if ep == 0 || !stage.is_multiple_of(ep) || !moe.experts.is_multiple_of(u64::from(ep)) {
        let fits = |n: &u32| stage.is_multiple_of(*n) && moe.experts.is_multiple_of(u64::from(*n));
        let good = list((1..=stage.min(4096)).filter(fits).map(u64::from));
        let why = format!("{ep} does not divide both {} experts and dp x ring x ulysses x tp = {stage}", moe.experts);
        return Err(Cause::Ep.infeasible(format!("{why}; use {good}")));
    }
    // The ranks of a stage are not consecutive, but those that share its sequences are; Megatron Core asks for the same
    // (`decoder_rank_generator.get_ranks('pp')` and that of experts have to agree).
    let beside = par.ring * par.ulysses * par.tp;
    if o.pp_inside && ep != beside {
        let why = format!(
            "{ep}, but with pp-inside the ring x ulysses x tp = {beside} ranks of a replica's stage share its experts; \
             use ep {beside} or leave pp-inside out"
        );
        return Err(Cause::Ep.infeasible(why));
    }
    Ok(())
}

fn of_experts(word: &str) -> bool {
    let others =
        ["overlap-shared", "overlap-exchange", "deepep-hook", "keep-fp8-rows", "keep-fp8-gate-up", "mask-rows"];
    word.starts_with("dispatch-") || others.contains(&word)
}

/// Refuses options that need the choices before a plan is built, where routers choose step by step. Errors: the option.
pub fn chosen_by_layer(par: &Parallelism) -> Result<()> {
    let cause = match (par.options.replicas, par.options.shadow, par.options.capacity) {
        (0, 0, Capacity::Unlimited) => return Ok(()),
        (0, 0, _) => Cause::Capacity,
        (0, ..) => Cause::Shadow,
        _ => Cause::Replicas,
    };
    Err(cause.infeasible("where every layer's router chooses for itself, as with weights of a file; leave it out"))
}

/// Checks that a route is for the experts and the ranks of the step, and for no more tokens than a rank has. Errors:
/// what differs.
pub fn route(model: &LlmSpec, work: &Workload, par: &Parallelism, route: &Route) -> Result<()> {
    let (moe, tokens) = (model.moe.unwrap_or_default(), expert::tokens(work, par));
    let slots = moe.experts + u64::from(par.options.replicas) + u64::from(par.options.shadow) * u64::from(par.ep);
    let pairs = [
        ("ranks, ep", u64::from(route.ranks), u64::from(par.ep)),
        ("experts and replicas, the model's", u64::from(route.experts), slots),
        ("shadowed experts, those asked for", u64::from(route.shadows), u64::from(par.options.shadow)),
        ("experts, the model's", u64::from(route.distinct_experts()), moe.experts),
        ("choices of a token, the model's", u64::from(route.topk), moe.top_k),
    ];
    if let Some((what, has, wants)) = pairs.iter().find(|(_, has, wants)| has != wants) {
        return Err(Cause::Routing.infeasible(format!("it is for {has} {what} are {wants}; route again")));
    }
    let most = route.most_tokens();
    if most > tokens {
        return Err(Cause::Routing.infeasible(format!("a source has {most} tokens, a rank {tokens}; route again")));
    }
    Ok(())
}
