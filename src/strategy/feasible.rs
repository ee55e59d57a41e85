//! What cannot be built, said before anything is built: the values and the remedy.

use super::kind::kinds_of;
use super::tensor::CHUNKS;
use super::ulysses::padded;
use crate::error::{Error, Result};
use crate::plan::Route;
use crate::spec::{
    AttentionSpec, Capacity, Dispatch, KvPath, LlmSpec, Mask, Mixer, Mlp, Parallelism, Pass, Positions, Recompute,
    RingBackward, RingLayout, RingMerge, Workload,
};

/// Every reason but memory, which needs the plan. The word before the colon is the kind of reason.
pub fn check(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    blocks(model)?;
    experts(model, par)?;
    positions(model, work)?;
    degrees(par)?;
    options(par)?;
    offload(model, work, par)?;
    latent(model, par)?;
    slopes(model, par)?;
    hybrid(model, work, par)?;
    tensor(model, work, par)?;
    let t = u64::from(par.tp);
    heads(model.heads / t, (model.attended_kv_heads() / t).max(1), model.qk_dim(), par)?;
    sequence(work.seq_len, par)?;
    masked(&model.mask(&work.documents), work.seq_len)?;
    if !work.documents.is_empty() && matches!(model.positions, Positions::Learned { .. }) {
        let why = "documents: learned positions go on through documents in this version; use a model with rotary ones";
        return Err(Error::infeasible(why));
    }
    batch(work, par)?;
    pipeline(model, work, par)
}

/// What a layer may be made of, until plans have the rest.
fn blocks(model: &LlmSpec) -> Result<()> {
    if model.lfa {
        let why = "which no plan of this version has; use a model without";
        return Err(Error::infeasible(format!("model: {} has localized filtering, {why}", model.name)));
    }
    Ok(())
}

/// Where heads are known by their numbers, a rank's stand one behind the other, as they are.
fn slopes(model: &LlmSpec, par: &Parallelism) -> Result<()> {
    let o = par.options;
    let refused = [(o.pad_heads, "pad-heads"), (o.kv == KvPath::GatherByHead, "gather-kv-prefetch")];
    match refused.iter().find(|(has, _)| *has && model.positions == Positions::Alibi) {
        Some((_, word)) => {
            let why =
                format!("options: {word} moves heads, and {} has a slope for each (ALiBi); leave it out", model.name);
            Err(Error::infeasible(why))
        }
        None => Ok(()),
    }
}

/// What multi-head latent attention does not go with.
fn latent(model: &LlmSpec, par: &Parallelism) -> Result<()> {
    let Some(mla) = model.mla else { return Ok(()) };
    if mla.rope_dim % 2 == 1 {
        let why = format!("mla: qk_rope_head_dim {} is odd, but rotary embedding turns pairs", mla.rope_dim);
        return Err(Error::infeasible(why + "; use an even one"));
    }
    let refused = [
        (par.options.unfused, "the option unfused; use a fused kernel"),
        (par.options.add_grads, "the option add-grads; leave it out"),
        (model.parallel_block, "a parallel block"),
        (model.biased_qkv(), "biases of its projections"),
        (model.qk_norm, "norms of its heads"),
        (model.positions != Positions::Rope, "positions that are not rotary"),
    ];
    match refused.iter().find(|(has, _)| *has) {
        Some((_, what)) => Err(Error::infeasible(format!("mla: latent attention does not go with {what}"))),
        None => Ok(()),
    }
}

/// What layers of one mixer each do not go with, and what a scan does not.
fn hybrid(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    if model.pattern.is_empty() {
        return Ok(());
    }
    let has = |mixer| model.count(mixer) > 0;
    let states = has(Mixer::Mamba);
    let refused = [
        (par.options.chunks > 0, "fpdt; more ranks go to dp, tp or pp"),
        (model.parallel_block || model.mla.is_some() || model.bias || model.biased_qkv(), "parts of other families"),
        (
            states && par.ring > 1,
            "a ring: a scan goes through a sequence from its first token to its last; use ring 1, and tp, which cuts its heads",
        ),
        (
            states && par.ulysses > 1,
            "ulysses, which no scan of this version exchanges its heads for; use ulysses 1, and tp",
        ),
        (
            states && !work.documents.is_empty(),
            "documents: a state goes on through them in this version; leave them out",
        ),
        (has(Mixer::Mamba) != model.mamba.is_some(), "a pattern whose mixers it does not state"),
        (has(Mixer::Experts) != model.moe.is_some(), "a pattern whose experts it does not state"),
    ];
    if let Some((_, what)) = refused.iter().find(|(has, _)| *has) {
        return Err(Error::infeasible(format!("hybrid: layers of a pattern do not go with {what}")));
    }
    let (t, Some(mamba)) = (u64::from(par.tp), model.mamba) else { return Ok(()) };
    if !mamba.groups.is_multiple_of(t) || !mamba.heads.is_multiple_of(t) {
        let good =
            list((2..=mamba.groups).filter(|t| mamba.groups.is_multiple_of(*t) && mamba.heads.is_multiple_of(*t)));
        let why =
            format!("tp: {} groups of {} state-space heads are not divisible by tp {t}", mamba.groups, mamba.heads);
        return Err(Error::infeasible(format!("{why}; use {good}")));
    }
    Ok(())
}

/// Experts are spread over consecutive ranks of a stage, each rank having some whole.
fn experts(model: &LlmSpec, par: &Parallelism) -> Result<()> {
    let (ep, o) = (par.ep, par.options);
    let Some(moe) = model.moe else {
        if o.replicas > 0 || o.capacity != Capacity::Unlimited {
            let what = if o.replicas > 0 { "replicas" } else { "capacity" };
            return Err(Error::infeasible(format!("{what}: of experts; {} has none, leave it out", model.name)));
        }
        return match (ep, o.words().into_iter().find(|word| of_experts(word))) {
            (1, None) => Ok(()),
            (1, Some(word)) => {
                Err(Error::infeasible(format!("options: {word} needs experts; {} has none", model.name)))
            }
            _ => Err(Error::infeasible(format!("ep: {ep}, but {} has no experts; use ep 1", model.name))),
        };
    };
    let stage = par.ranks() / par.pp.max(1);
    if o.replicas > 0 && ep > 0 && stage.is_multiple_of(ep) {
        let slots = moe.experts + u64::from(o.replicas);
        let most = moe.experts * u64::from(ep - 1);
        if ep == 1 {
            return Err(Error::infeasible("replicas: on one rank, where nothing is to be evened out; use ep above 1"));
        }
        if !slots.is_multiple_of(u64::from(ep)) || u64::from(o.replicas) > most {
            let good = (slots.next_multiple_of(u64::from(ep)) - moe.experts).min(most / u64::from(ep) * u64::from(ep));
            let why = format!("replicas: {} slots of experts and copies do not divide over ep {ep}", slots);
            return Err(Error::infeasible(format!("{why}, or are too many; use {good}")));
        }
    } else if ep == 0 || !stage.is_multiple_of(ep) || !moe.experts.is_multiple_of(u64::from(ep)) {
        let fits = |n: &u32| stage.is_multiple_of(*n) && moe.experts.is_multiple_of(u64::from(*n));
        let good = list((1..=stage.min(4096)).filter(fits).map(u64::from));
        let why =
            format!("ep: {ep} does not divide both {} experts and dp x ring x ulysses x tp = {stage}", moe.experts);
        return Err(Error::infeasible(format!("{why}; use {good}")));
    }
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
    match refused.iter().find(|(has, _)| *has) {
        Some((_, what)) => Err(Error::infeasible(format!("experts: not together with {what}"))),
        None => Ok(()),
    }
}

fn of_experts(word: &str) -> bool {
    word.starts_with("dispatch-") || ["overlap-shared", "overlap-exchange", "deepep-hook"].contains(&word)
}

/// What needs the choices before a plan is built does not go with those that routers make step by step.
pub fn chosen_by_layer(par: &Parallelism) -> Result<()> {
    let what = match (par.options.replicas, par.options.capacity) {
        (0, Capacity::Unlimited) => return Ok(()),
        (0, _) => "capacity",
        _ => "replicas",
    };
    let why = format!("{what}: where every layer's router chooses for itself, as with weights of a file; leave it out");
    Err(Error::infeasible(why))
}

/// A route is for the experts and the ranks of the step, and for no more tokens than a rank has.
pub fn route(model: &LlmSpec, work: &Workload, par: &Parallelism, route: &Route) -> Result<()> {
    let (moe, tokens) = (model.moe.unwrap_or_default(), super::expert::tokens(work, par));
    let pairs = [
        ("ranks, ep", u64::from(route.ranks), u64::from(par.ep)),
        ("experts and replicas, the model's", u64::from(route.experts), moe.experts + u64::from(par.options.replicas)),
        ("experts, the model's", u64::from(route.distinct_experts()), moe.experts),
        ("choices of a token, the model's", u64::from(route.topk), moe.top_k),
    ];
    if let Some((what, has, wants)) = pairs.iter().find(|(_, has, wants)| has != wants) {
        return Err(Error::infeasible(format!("routing: it is for {has} {what} are {wants}; route again")));
    }
    let most = route.most_tokens();
    if most > tokens {
        return Err(Error::infeasible(format!("routing: a source has {most} tokens, a rank {tokens}; route again")));
    }
    Ok(())
}

/// Every position has its row in the table, where positions are learned.
fn positions(model: &LlmSpec, work: &Workload) -> Result<()> {
    match model.positions {
        Positions::Learned { max } if work.seq_len > max => Err(Error::infeasible(format!(
            "positions: seq_len {} is more than the {max} positions that {} has learned; use at most {max}",
            work.seq_len, model.name
        ))),
        _ => Ok(()),
    }
}

/// The same of one attention operation alone.
pub fn attention(spec: &AttentionSpec, par: &Parallelism) -> Result<()> {
    degrees(par)?;
    options(par)?;
    let others = [("dp", par.dp), ("tp", par.tp), ("pp", par.pp), ("vp", par.vp), ("ep", par.ep)];
    if let Some((name, degree)) = others.into_iter().find(|(_, degree)| *degree != 1) {
        let why = format!("degrees: {name} {degree} does not split an attention alone; use {name} 1");
        return Err(Error::infeasible(why));
    }
    let sizes = [
        ("batch", spec.batch, 1 << 20),
        ("heads", spec.heads, 1 << 16),
        ("kv_heads", spec.kv_heads, 1 << 16),
        ("head_dim", spec.head_dim, 1 << 16),
    ];
    if let Some((name, size, most)) = sizes.into_iter().find(|(_, size, most)| *size == 0 || size > most) {
        return Err(Error::infeasible(format!("sizes: {name} {size} is outside 1..={most}")));
    }
    if !spec.heads.is_multiple_of(spec.kv_heads) {
        let why = format!("heads: heads {} is not a multiple of kv_heads {}", spec.heads, spec.kv_heads);
        return Err(Error::infeasible(why));
    }
    heads(spec.heads, spec.kv_heads, spec.head_dim, par)?;
    sequence(spec.seq_len, par)?;
    masked(&spec.mask, spec.seq_len)
}

/// What a backward pass alone would need of a forward pass is log-sum-exps.
pub fn pass(pass: Pass, par: &Parallelism) -> Result<()> {
    let alone = pass.has_backward() && !pass.has_forward();
    if alone && par.options.unfused {
        let why = "options: unfused scores are those of the forward pass, which is left out; use both passes";
        return Err(Error::infeasible(why));
    }
    Ok(())
}

fn masked(mask: &Mask, seq_len: u64) -> Result<()> {
    mask.refuse(seq_len).map_or(Ok(()), |why| Err(Error::infeasible(why)))
}

fn degrees(par: &Parallelism) -> Result<()> {
    let all = [
        ("dp", par.dp),
        ("pp", par.pp),
        ("vp", par.vp),
        ("ring", par.ring),
        ("ulysses", par.ulysses),
        ("tp", par.tp),
        ("ep", par.ep),
    ];
    if let Some((name, _)) = all.iter().find(|(_, degree)| *degree == 0) {
        return Err(Error::infeasible(format!("degrees: {name} is 0; the least is 1")));
    }
    let ranks = [par.dp, par.pp, par.ring, par.ulysses, par.tp].iter().fold(1u64, |n, &d| n.saturating_mul(d.into()));
    if ranks > 1 << 20 {
        let why = format!("degrees: dp x pp x ring x ulysses x tp is {ranks} ranks; the most is 1048576");
        return Err(Error::infeasible(why));
    }
    if par.recompute == Recompute::Selective && !par.options.unfused {
        let why = "recompute: selective computes again what attention keeps of its scores, and a fused kernel keeps \
                   none of them; use none or full, or the option unfused";
        return Err(Error::infeasible(why));
    }
    if par.zero > 3 {
        return Err(Error::infeasible(format!("zero: there is no stage {}; use 0, 1, 2 or 3", par.zero)));
    }
    Ok(())
}

/// What is kept in the host's memory has to be there.
fn offload(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    if par.options.offload_activations && model.layers < 2 {
        let why = "options: offload-activations keeps the top layer's input on the device, and there is one layer; leave it out";
        return Err(Error::infeasible(why));
    }
    if par.options.chunks == 0 {
        return Ok(());
    }
    chunks(model, work, par)
        .map_or(Ok(()), |why| Err(Error::infeasible(format!("options: fpdt-{} {why}", par.options.chunks))))
}

/// Why layers do not go through the sequence chunk by chunk.
fn chunks(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Option<String> {
    let needs = [
        (par.recompute == Recompute::Full, "recompute full"),
        (par.ring == 1, "ring 1; more ranks go to ulysses"),
        (par.tp == 1, "tp 1; more ranks go to ulysses"),
        (par.pp == 1, "pp 1"),
        (work.micro_batch == 1, "micro_batch 1"),
        (!par.options.unfused, "a fused attention; leave unfused out"),
        (model.moe.is_none(), "a dense model"),
        (model.mla.is_none(), "a model without latent attention"),
        (!model.parallel_block, "a model without parallel blocks"),
        (!model.qk_norm, "a model without norms of its heads"),
    ];
    if let Some((_, what)) = needs.iter().find(|(has, _)| !has) {
        return Some(format!("needs {what}"));
    }
    let unit = u64::from(par.options.chunks) * u64::from(par.ulysses);
    (!work.seq_len.is_multiple_of(unit)).then(|| {
        let near = work.seq_len.div_ceil(unit) * unit;
        format!("cuts the sequence in {unit} parts, chunks x ulysses; use a multiple, e.g. seq_len {near}")
    })
}

/// A word that says nothing here would make two names of one plan.
fn options(par: &Parallelism) -> Result<()> {
    let (o, ring, up) = (par.options, par.ring, par.ulysses);
    let laid = |layout| o.layout == layout;
    let circulates = ring > 1 && o.kv == KvPath::Ring;
    let needs = [
        ("no-sp", o.whole_activations, par.tp > 1, "tp above 1"),
        ("tp-overlap", o.tp_overlap, par.tp > 1 && !o.whole_activations, "tp above 1 with sequence parallelism"),
        ("contiguous", laid(RingLayout::Contiguous), ring > 1, "a ring above 1"),
        ("stripe", laid(RingLayout::Stripe), ring > 1, "a ring above 1"),
        ("gather-kv", o.kv == KvPath::Gather, ring > 1, "a ring above 1"),
        ("gather-kv-prefetch", o.kv == KvPath::GatherByHead, ring > 1, "a ring above 1"),
        ("dkv-model", o.ring_backward == RingBackward::Reverse, circulates, "a ring above 1 whose KV circulate"),
        ("burst", o.ring_backward == RingBackward::Burst, circulates, "a ring above 1 whose KV circulate"),
        ("kv-in-two", o.kv_in_two, circulates, "a ring above 1 whose KV circulate"),
        ("one-comm", o.one_comm, circulates, "a ring above 1 whose KV circulate"),
        ("merge-at-end", o.merge == RingMerge::AtEnd, circulates, "a ring above 1 whose KV circulate"),
        ("merge-in-kernel", o.merge == RingMerge::InKernel, circulates, "a ring above 1 whose KV circulate"),
        ("double-ring", o.window().is_some(), circulates, "a ring above 1 whose KV circulate"),
        ("unfused", o.unfused, ring == 1, "a ring of 1"),
        ("a2a-separate", o.a2a_separate, up > 1, "ulysses above 1"),
        ("replicate-after", o.replicate_after, up > 1, "ulysses above 1"),
        ("pad-heads", o.pad_heads, up > 1, "ulysses above 1"),
        ("ring-inside", o.ring_inside, ring > 1 && up > 1, "ring and ulysses above 1"),
        ("no-overlap-grad", o.no_overlap_grad, par.zero < 2, "zero 0 or 1"),
        ("no-overlap-p2p", o.no_overlap_p2p, par.pp > 1, "pp above 1"),
        (
            "wait-passes",
            o.wait_passes,
            par.pp == 1 && par.zero < 2 && !o.overlap_exchange,
            "pp 1, zero 0 or 1, and no overlap-exchange",
        ),
        ("offload-activations", o.offload_activations, par.recompute == Recompute::Full, "recompute full"),
        (
            "offload-activations",
            o.offload_activations,
            par.pp == 1 && !o.overlap_exchange,
            "pp 1, and no overlap-exchange",
        ),
    ];
    hybrid_sharding(par)?;
    if o.no_sync && par.zero < 3 {
        let why = format!(
            "options: no-sync needs zero 3, not {}: with gradients that stay whole, 2 is what 1 is; leave it out",
            par.zero
        );
        return Err(Error::infeasible(why));
    }
    if o.no_prefetch && par.zero < 2 {
        let why = format!("options: no-prefetch needs zero 2 or 3, not {}; leave it out", par.zero);
        return Err(Error::infeasible(why));
    }
    match needs.iter().find(|(_, said, fits, _)| *said && !fits) {
        None => ring_options(par),
        Some((word, _, _, what)) => {
            let why =
                format!("options: {word} needs {what}; ring {ring} x ulysses {up} with {o} has not; leave it out");
            Err(Error::infeasible(why))
        }
    }
}

/// Groups of ranks that share out among themselves are equal parts of those that hold the same weights.
fn hybrid_sharding(par: &Parallelism) -> Result<()> {
    let (n, same) = (par.options.shard, par.dp * par.ring * par.ulysses);
    if n == 0 {
        return Ok(());
    }
    if par.zero == 0 {
        return Err(Error::infeasible(format!(
            "options: shard-{n} shares nothing out with zero 0; use zero 1, 2 or 3"
        )));
    }
    let good = list((2..same.min(4096)).filter(|n| same.is_multiple_of(*n)).map(u64::from));
    if n >= same || !same.is_multiple_of(n) {
        let why = format!(
            "options: shard-{n} is no part of the dp x ring x ulysses = {same} ranks that hold the same weights"
        );
        return Err(Error::infeasible(format!("{why}; use shard-{good}, or leave it out")));
    }
    let (groups, experts) = (same / n, par.ranks() / (par.pp.max(1) * par.ep.max(1)));
    if !experts.is_multiple_of(groups) {
        let why = format!(
            "options: shard-{n} makes {groups} groups, in which {experts} ranks with the same experts do not divide"
        );
        return Err(Error::infeasible(format!("{why}; use a shard that makes fewer, or another ep")));
    }
    Ok(())
}

/// Choices of a ring that exclude each other.
fn ring_options(par: &Parallelism) -> Result<()> {
    let (o, ring) = (par.options, par.ring);
    let reverse = o.ring_backward == RingBackward::Reverse;
    let uneven = |w: u32| !ring.is_multiple_of(w) || ring < 2 * w;
    let why = match o.window() {
        Some(w) if uneven(w) => format!("double-ring-{w} needs two windows of {w} ranks or more; ring {ring} has not"),
        Some(_) if o.ring_backward != RingBackward::Follow => {
            format!("a double ring has a backward pass of its own, which {o} contradicts; leave one of them out")
        }
        _ if o.kv_in_two && reverse => {
            "dkv-model sends KV and dKV as one message, kv-in-two as two; leave one of them out".into()
        }
        _ if o.one_comm && reverse => "dkv-model needs one communicator as it is; leave one-comm out".into(),
        _ => return Ok(()),
    };
    Err(Error::infeasible(format!("options: {why}")))
}

/// Tensor-parallel ranks have whole heads, equal parts of the feed-forward network, and equal shares of the
/// tokens. The vocabulary is filled up where it does not come out even.
fn tensor(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    let t = u64::from(par.tp);
    let dense = if model.dense_layers() > 0 { model.ffn } else { 0 };
    let sizes = [
        ("heads", model.heads),
        ("kv_heads", model.attended_kv_heads()),
        ("ffn", super::transformer::width(model)),
        ("ffn of dense layers", dense),
    ];
    // A KV head may be on several ranks.
    let fits = |name: &str, size: u64, t: u64| {
        size.is_multiple_of(t) || (name == "kv_heads" && model.mla.is_none() && t.is_multiple_of(size))
    };
    if let Some((name, size)) = sizes.iter().find(|(name, size)| !fits(name, *size, t)) {
        let good = list((2..=512).filter(|t| sizes.iter().all(|(name, size)| fits(name, *size, *t))));
        return Err(Error::infeasible(format!("tp: {name} {size} is not divisible by tp {t}; use {good}")));
    }
    let tokens = (work.micro_batch.saturating_mul(work.seq_len)) / (u64::from(par.ring) * u64::from(par.ulysses));
    if !par.options.whole_activations && !tokens.is_multiple_of(t) {
        return Err(Error::infeasible(format!(
            "tp: {tokens} tokens of a microbatch are no multiple of tp {t}; change seq_len, or use the option no-sp"
        )));
    }
    let unit = t * CHUNKS;
    if par.options.tp_overlap && !tokens.is_multiple_of(unit) {
        return Err(Error::infeasible(format!(
            "tp: {tokens} tokens of a microbatch are no multiple of {unit}, tp {t} shares of {CHUNKS} chunks that tp-overlap \
             makes; change seq_len, or leave tp-overlap out"
        )));
    }
    Ok(())
}

/// Layers of each virtual stage, the first of every stage before the second of any.
pub fn layers_of_stages(model: &LlmSpec, par: &Parallelism) -> Result<Vec<u32>> {
    let (l, parts) = (model.layers, u64::from(par.pp) * u64::from(par.vp));
    let short = if par.options.short_ends { 2 } else { 0 };
    if par.pp > 1 && par.vp <= 64 && (l + short).is_multiple_of(parts) && l >= 1 {
        let mut all = vec![((l + short) / parts) as u32; parts as usize];
        if par.options.short_ends {
            all[0] -= 1;
            *all.last_mut().expect("a stage at least") -= 1;
        }
        return Ok(all);
    }
    if par.pp == 1 && par.vp == 1 && short == 0 {
        return Ok(vec![l as u32]);
    }
    if par.pp == 1 {
        let what = if short > 0 { "short-ends".into() } else { format!("vp {}", par.vp) };
        return Err(Error::infeasible(format!("pp: {what} needs a pipeline; use vp 1 or pp above 1")));
    }
    if kinds_of(model, false).len() > 1 && short == 0 && l >= parts {
        return Ok(uneven(l, parts));
    }
    let good = list((2..=(l + short).min(4096)).filter(|n| (l + short).is_multiple_of(*n)));
    Err(Error::infeasible(format!(
        "pp: {l} layers{} do not split evenly over pp {} x vp {} = {parts} parts; use {good} parts, or option {}",
        if short > 0 { " and 2 for the short ends" } else { "" },
        par.pp,
        par.vp,
        if short > 0 { "default" } else { "short-ends" },
    )))
}

/// Layers of two kinds are no equal work, however they are dealt out: stages have as many as any other, or one fewer,
/// the last and then the first ones, where head and embedding are.
fn uneven(layers: u64, parts: u64) -> Vec<u32> {
    let fewer = (parts - layers % parts) % parts;
    let least = (layers / parts) as u32;
    (0..parts).map(|part| if fewer == 0 || part + 1 < fewer || part + 1 == parts { least } else { least + 1 }).collect()
}

/// Interleaved microbatches go through a stage's chunks in groups of as many as there are stages.
fn pipeline(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    layers_of_stages(model, par)?;
    let (m, pp) = (work.global_batch / (u64::from(par.dp) * work.micro_batch), u64::from(par.pp));
    if par.options.overlap_exchange && m < 2 {
        let why = format!(
            "options: overlap-exchange puts the rows of one microbatch beside the compute of another, and there is {m}; \
             use global_batch {} or leave it out",
            2 * u64::from(par.dp) * work.micro_batch
        );
        return Err(Error::infeasible(why));
    }
    if par.vp > 1 && !m.is_multiple_of(pp) {
        let why = format!(
            "vp: {m} microbatches are not a multiple of pp {pp}, which vp {} needs; use global_batch {} or vp 1",
            par.vp,
            m.div_ceil(pp) * pp * u64::from(par.dp) * work.micro_batch
        );
        return Err(Error::infeasible(why));
    }
    Ok(())
}

/// Ulysses deals out `a` heads, `k` KV heads, of `head_dim` elements.
fn heads(a: u64, k: u64, head_dim: u64, par: &Parallelism) -> Result<()> {
    let u = u64::from(par.ulysses);
    let fits = |u: u64| a.is_multiple_of(u) && (k.is_multiple_of(u) || u.is_multiple_of(k));
    match (fits(u), par.options.pad_heads) {
        (true, false) => kv_copies(k, head_dim, par),
        (false, true) => kv_copies(padded(a, k, u)[1], head_dim, par),
        (true, true) => {
            let why = format!("options: pad-heads adds nothing to heads {a} and kv_heads {k} on ulysses {u}");
            Err(Error::infeasible(why + "; leave it out"))
        }
        (false, false) => {
            let good = list((2..=a).filter(|&u| fits(u)));
            let why = match a.is_multiple_of(u) {
                true => format!("kv_heads {k} neither divides nor is divided by"),
                false => format!("heads {a} is not divisible by"),
            };
            Err(Error::infeasible(format!("heads: {why} ulysses {u}; use {good}, or --options pad-heads")))
        }
    }
}

/// What words ask of the KV heads that a rank has after the exchange.
fn kv_copies(k: u64, head_dim: u64, par: &Parallelism) -> Result<()> {
    let (u, o) = (u64::from(par.ulysses), par.options);
    if o.kv == KvPath::GatherByHead && k / u < 2 {
        let why = format!("heads: gather-kv-prefetch needs 2 KV heads a rank, not {k} over ulysses {u}; use gather-kv");
        return Err(Error::infeasible(why));
    }
    if o.replicate_after && u <= k {
        let why = format!("options: replicate-after needs ulysses above kv_heads {k}, not {u}; leave it out");
        return Err(Error::infeasible(why));
    }
    if o.replicate_after && !head_dim.is_multiple_of(u / k) {
        let why = format!("heads: replicate-after cuts head_dim {head_dim} in ulysses {u} / kv_heads {k} slices");
        return Err(Error::infeasible(why + ", which do not come out even; leave it out"));
    }
    Ok(())
}

fn sequence(s: u64, par: &Parallelism) -> Result<()> {
    let (r, u) = (u64::from(par.ring), u64::from(par.ulysses));
    if s == 0 || s > 1 << 32 {
        return Err(Error::infeasible(format!("sequence: seq_len {s} is outside 1..=4294967296")));
    }
    if par.options.kv_in_two && s == r {
        let why = format!("sequence: kv-in-two halves the tokens of a rank, of which seq_len {s} over ring {r} is one");
        return Err(Error::infeasible(why));
    }
    // A zigzag ring cuts the sequence in 2R chunks, and Ulysses each rank's share in U.
    let zigzag = par.options.layout == RingLayout::Zigzag;
    let ring_parts = if r > 1 && zigzag { 2 * r } else { r };
    if !s.is_multiple_of(ring_parts) || !s.is_multiple_of(r * u) {
        let unit = lcm(ring_parts, r * u);
        let near = s.div_ceil(unit) * unit;
        return Err(Error::infeasible(format!(
            "sequence: seq_len {s} does not split over ring {r} x ulysses {u}; use a multiple of {unit}, e.g. {near}"
        )));
    }
    Ok(())
}

fn batch(work: &Workload, par: &Parallelism) -> Result<()> {
    let (g, m, dp) = (work.global_batch, work.micro_batch, u64::from(par.dp));
    if g == 0 || m == 0 {
        return Err(Error::infeasible(format!("batch: global_batch {g} and micro_batch {m} must be at least 1")));
    }
    if g > 1 << 32 || m > 1 << 20 {
        return Err(Error::infeasible(format!("batch: global_batch {g} or micro_batch {m} is absurdly large")));
    }
    if g < dp * m {
        return Err(Error::infeasible(format!(
            "batch: global_batch {g} is less than dp {dp} x micro_batch {m}; raise ring or ulysses, or use dp {} or less",
            (g / m).max(1)
        )));
    }
    if g % (dp * m) != 0 {
        let near = g.div_ceil(dp * m) * dp * m;
        return Err(Error::infeasible(format!(
            "batch: global_batch {g} is not a multiple of dp {dp} x micro_batch {m}; e.g. {near} is"
        )));
    }
    if g / (dp * m) > 1 << 16 {
        return Err(Error::infeasible(format!(
            "batch: {} microbatches a step are more than 65536; raise micro_batch or dp",
            g / (dp * m)
        )));
    }
    Ok(())
}

fn list(values: impl Iterator<Item = u64>) -> String {
    let all: Vec<String> = values.map(|v| v.to_string()).collect();
    match all.split_last() {
        None => "1".into(),
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
    }
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
