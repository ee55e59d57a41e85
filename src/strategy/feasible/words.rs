//! Checks of options that say nothing where they stand, or contradict each other.

use super::list;
use crate::error::{Cause, Error, Result};
use crate::spec::{
    Dtype, Fold, KvPath, LlmSpec, Mixer, Options, Parallelism, Positions, Recompute, RingBackward, RingLayout,
    RingMerge, Workload,
};

/// Refuses to keep in the host's memory what is not there at all.
pub(super) fn offload(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    if par.options.offload_activations && model.layers < 2 {
        let why = "offload-activations keeps the top layer's input on the device, and there is one layer; leave it out";
        return Err(Cause::Options.infeasible(why));
    }
    if par.options.chunks == 0 {
        return Ok(());
    }
    chunks(model, work, par)
        .map_or(Ok(()), |why| Err(Cause::Options.infeasible(format!("fpdt-{} {why}", par.options.chunks))))
}

/// Refuses to keep or send in fewer bits what has no more of them without the option.
pub(super) fn fewer_bits(work: &Workload, par: &Parallelism) -> Result<()> {
    let o = &par.options;
    let asked = [
        (o.bf16_grads, "bf16-grads", "whose gradients are no wider"),
        (o.bf16_moments, "bf16-moments", "whose moments are no wider"),
        (o.no_master, "no-master", "of which there is no wider copy"),
    ];
    for (_, word, what) in asked.into_iter().filter(|(is, ..)| *is) {
        if work.dtype != Dtype::Bf16 {
            let name = work.dtype.name();
            return Err(Cause::Options.infeasible(format!("{word}, of weights in {name}, {what}; leave it out")));
        }
        if o.offload_optimizer && word != "bf16-grads" {
            let why = format!("{word} does not go with offload-optimizer, whose CPU has all in fp32; leave one out");
            return Err(Cause::Options.infeasible(why));
        }
    }
    Ok(())
}

/// Refuses Muon where the optimizer is not on the device, with the weights.
pub(super) fn muon(par: &Parallelism) -> Result<()> {
    if par.options.muon && par.options.offload_optimizer {
        let why = "muon does not go with offload-optimizer, whose CPU has no products of matrices; leave one out";
        return Err(Cause::Options.infeasible(why));
    }
    Ok(())
}

/// Refuses to compute experts again where there are none, or where all else is computed again as well.
pub(super) fn experts_again(model: &LlmSpec, par: &Parallelism) -> Result<()> {
    let o = &par.options;
    let halves = model.pattern.is_empty();
    let some = if halves { model.moe.is_some() } else { model.pattern.contains(&Mixer::Experts) };
    let why = match () {
        _ if !o.recompute_moe => return Ok(()),
        _ if !some => format!("{}, which has no experts; leave it out", model.name),
        _ if par.recompute == Recompute::Full => "recompute full, which runs all layers again; leave it out".into(),
        // Their backward passes go by halves, and each half would make all of it again.
        _ if halves && (o.zb_h1 || o.fold != Fold::None) => {
            "schedules that put gradients of weights off; leave one out".into()
        }
        _ if halves && o.shadow > 0 => "shadow, whose weights would come twice; leave one out".into(),
        _ => return Ok(()),
    };
    Err(Error::option("recompute-moe", format!("does not go with {why}")))
}

/// The reason why layers cannot go through the sequence chunk by chunk; `None` if they can.
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

/// Any of the words for a pipeline whose stages go back through a row of chunks.
pub const IN_A_V: &str = "a pipeline in a V (zb-v, v-half, v-min)";

/// What an option needs: the option, whether it is given, whether its need is met, and what that is.
type Need = (&'static str, bool, bool, &'static str);

/// The needs of all options, of degrees and of one another.
fn needs(par: &Parallelism) -> impl Iterator<Item = Need> {
    of_sequences(par).into_iter().chain(of_layers(par)).chain(of_steps(par))
}

/// The options that the plan of an attention alone reads: how its ranks share it.
fn of_attention(o: &Options) -> Options {
    Options {
        layout: o.layout,
        per_document: o.per_document,
        kv: o.kv,
        merge: o.merge,
        ring_backward: o.ring_backward,
        kv_in_two: o.kv_in_two,
        one_comm: o.one_comm,
        double_ring: o.double_ring,
        ring_inside: o.ring_inside,
        a2a_separate: o.a2a_separate,
        replicate_after: o.replicate_after,
        pad_heads: o.pad_heads,
        unfused: o.unfused,
        ..Options::default()
    }
}

/// Refuses options about layers, steps and pipelines for an attention alone.
pub(super) fn options_of_attention(par: &Parallelism) -> Result<()> {
    let (all, read) = (par.options.to_string(), of_attention(&par.options).to_string());
    match all.split('+').find(|word| all != read && !read.split('+').any(|one| one == *word)) {
        None => Ok(()),
        Some(word) => {
            let why =
                "says nothing of an attention alone, which is costed without layers, weights and chunks; leave it out";
            Err(Cause::Options.infeasible(format!("{word} {why}")))
        }
    }
}

/// The options about how these ranks share an attention, without those whose needs are not met.
pub fn that_apply(par: &Parallelism) -> Options {
    let mut par = Parallelism { options: of_attention(&par.options), ..*par };
    loop {
        let lacking: Vec<_> =
            needs(&par).filter(|(_, said, fits, _)| *said && !fits).map(|(word, ..)| format!("{word}-")).collect();
        let all = par.options.to_string();
        let is_left = |word: &&str| !lacking.iter().any(|lacking| format!("{word}-").starts_with(lacking));
        let left: Vec<&str> = all.split('+').filter(is_left).collect();
        match left.join("+").parse() {
            Ok(options) if options != par.options => par.options = options,
            _ => return par.options,
        }
    }
}

/// Needs of options about how ranks share sequences and rows.
fn of_sequences(par: &Parallelism) -> Vec<Need> {
    let (o, ring, up) = (par.options, par.ring, par.ulysses);
    let laid = |layout| o.layout == layout;
    let circulates = ring > 1 && o.kv == KvPath::Ring;
    vec![
        ("no-sp", o.whole_activations, par.tp > 1, "tp above 1"),
        ("tp-overlap", o.tp_overlap, par.tp > 1 && !o.whole_activations, "tp above 1 with sequence parallelism"),
        ("contiguous", laid(RingLayout::Contiguous), ring > 1, "a ring above 1"),
        ("stripe", laid(RingLayout::Stripe), ring > 1, "a ring above 1"),
        ("per-document", o.per_document, ring > 1, "a ring above 1"),
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
    ]
}

/// Needs of options about what layers keep, make again, and go through in pieces.
fn of_layers(par: &Parallelism) -> Vec<Need> {
    let (o, up) = (par.options, par.ulysses);
    let in_parts = par.recompute != Recompute::Full && o.chunks == 0;
    let beside_parts = "recompute none or selective, as full makes all again, and no fpdt, which does so too";
    vec![
        ("recompute-act", o.recompute_act, in_parts, beside_parts),
        (
            "recompute-mlp",
            o.recompute_mlp,
            in_parts && o.mlp_chunks == 0,
            "recompute none or selective, as full makes all again, and no fpdt or mlp-chunks, which do so too",
        ),
        (
            "recompute-mlp",
            o.recompute_mlp,
            !par.cuts_all() && o.fold != Fold::DualPipe && !o.overlap_exchange,
            "gradients of weights with those of inputs, not put off by zb-h1, zb-v, v-half, v-min or dualpipe-v, and no overlap-exchange",
        ),
        ("recompute-norm", o.recompute_norm, in_parts, beside_parts),
        (
            "keep-attention",
            o.keep_attention,
            par.recompute == Recompute::Full && o.chunks == 0 && !o.unfused,
            "recompute full, a fused kernel, and no fpdt, whose chunks attend by themselves",
        ),
        (
            "keep-attention",
            o.keep_attention,
            !par.cuts_all(),
            "backward passes in one piece, not those of zb-h1, zb-v, v-half or v-min",
        ),
        (
            "keep-attention",
            o.keep_attention,
            o.ring_backward != RingBackward::Reverse,
            "no dkv-model, whose backward ring begins with what the forward one ended with",
        ),
        (
            "keep-fp8",
            o.keep_fp8,
            o.fp8 && in_parts,
            "fp8, recompute none or selective, as full keeps neither, and no fpdt",
        ),
        (
            "keep-fp8-rows",
            o.keep_fp8_rows,
            o.dispatch_fp8 && par.ep > 1 && par.recompute != Recompute::Full,
            "dispatch-fp8, ep above 1, and recompute none or selective",
        ),
        (
            "keep-fp8-gate-up",
            o.keep_fp8_gate_up,
            o.fp8 && par.recompute != Recompute::Full,
            "fp8, and recompute none or selective",
        ),
        ("loss-chunks", o.loss_chunks > 0, o.chunks == 0, "no fpdt, which goes through the loss in chunks as it is"),
        (
            "mlp-chunks",
            o.mlp_chunks > 0,
            o.chunks == 0 && !o.tp_overlap,
            "no fpdt, whose chunks go through the network by themselves, and no tp-overlap",
        ),
        (
            "mlp-chunks",
            o.mlp_chunks > 0,
            !par.cuts_all() && o.fold != Fold::DualPipe,
            "gradients of weights with those of inputs, not put off by zb-h1, zb-v, v-half, v-min or dualpipe-v",
        ),
        (
            "recompute-mla-up",
            o.recompute_mla_up,
            par.recompute != Recompute::Full && up == 1,
            "recompute none or selective, as full makes all again, and ulysses 1, whose heads are exchanged; more ranks go to a ring, tp or dp",
        ),
    ]
}

/// Needs of options about a step's pipeline, its sums, and what waits in the host's memory.
fn of_steps(par: &Parallelism) -> Vec<Need> {
    let o = par.options;
    let dualpipe = o.fold == Fold::DualPipe;
    vec![
        ("no-overlap-grad", o.no_overlap_grad, par.zero < 2, "zero 0 or 1"),
        (
            "overlap-gather",
            o.overlap_gather,
            par.zero == 1 && par.dp * par.ring * par.ulysses > 1,
            "zero 1 over more than one rank; with zero 2 and 3 weights come layer by layer as it is",
        ),
        (
            "foreach",
            o.foreach,
            !o.offload_optimizer && !o.muon,
            "Adam on the device for all weights: no offload-optimizer and no muon",
        ),
        ("no-overlap-p2p", o.no_overlap_p2p, par.pp > 1, "pp above 1"),
        ("pp-inside", o.pp_inside, par.pp > 1 && par.dp > 1, "pp and dp above 1"),
        (
            "pp-inside",
            o.pp_inside,
            o.shard == 0 || par.ring * par.ulysses == 1,
            "ring and ulysses 1 where shard-N shares weights among neighbours",
        ),
        (
            "scatter-p2p",
            o.scatter_p2p,
            par.pp > 1 && par.tp > 1 && o.whole_activations,
            "pp and tp above 1 and no-sp: with sequence parallelism each rank has its own rows alone as it is",
        ),
        ("zb-h1", o.zb_h1, par.pp > 1 && par.vp == 1 && par.zero < 2, "pp above 1, vp 1, and zero 0 or 1"),
        ("zb-h1", o.zb_h1, !o.overlap_exchange, "no overlap-exchange"),
        (
            "dualpipe-v",
            dualpipe,
            par.pp > 1 && par.vp == 2 && par.zero < 2,
            "pp above 1, vp 2 for the two chunks of a stage, and zero 0 or 1",
        ),
        ("dualpipe-v", dualpipe, !o.zb_h1 && !o.no_overlap_p2p, "no zb-h1 or no-overlap-p2p"),
        (
            IN_A_V,
            o.fold.halves(),
            par.pp > 1 && par.vp == 2 && par.zero < 2,
            "pp above 1, vp 2 for the two chunks of a stage, and zero 0 or 1",
        ),
        (
            IN_A_V,
            o.fold.halves(),
            !o.zb_h1 && !o.no_overlap_p2p && !o.overlap_exchange,
            "no zb-h1, no-overlap-p2p or overlap-exchange",
        ),
        (
            "wait-passes",
            o.wait_passes,
            par.pp == 1 && par.zero < 2 && !o.overlap_exchange,
            "pp 1, zero 0 or 1, and no overlap-exchange",
        ),
        (
            "all-reduce-grads",
            o.all_reduce_grads,
            par.zero == 1 && par.dp * par.ring * par.ulysses > 1 && o.shard == 0 && !o.offload_optimizer,
            "zero 1 over more than one rank, and neither shard nor offload-optimizer",
        ),
        ("offload-activations", o.offload_activations, par.recompute == Recompute::Full, "recompute full"),
        (
            "offload-activations",
            o.offload_activations,
            par.pp == 1 && !o.overlap_exchange,
            "pp 1, and no overlap-exchange",
        ),
    ]
}

/// Refuses an option that says nothing here: it would make two names for one plan.
pub(super) fn options(par: &Parallelism) -> Result<()> {
    let (o, ring, up) = (par.options, par.ring, par.ulysses);
    hybrid_sharding(par)?;
    if o.no_sync && par.zero < 3 {
        let why = format!(
            "no-sync needs zero 3, not {}: with gradients that stay whole, 2 is what 1 is; leave it out",
            par.zero
        );
        return Err(Cause::Options.infeasible(why));
    }
    if o.gather_fp8 {
        let shared = par.dp * ring * up;
        let why = match () {
            () if !o.fp8 => "fp8: without it no weights are in FP8; give both words",
            () if par.zero == 0 => "zero 1, 2 or 3: with 0 nothing is gathered; leave it out",
            () if shared == 1 => "more than one rank with the same weights: of one nothing is gathered; leave it out",
            () => "",
        };
        if !why.is_empty() {
            return Err(Cause::Options.infeasible(format!("gather-fp8 needs {why}")));
        }
    }
    let of_layers = [(o.no_prefetch, "no-prefetch"), (o.copy_shards, "copy-shards")];
    if let Some((_, word)) = of_layers.iter().find(|(said, _)| *said && par.zero < 2) {
        let why = format!("{word} needs zero 2 or 3, not {}; leave it out", par.zero);
        return Err(Cause::Options.infeasible(why));
    }
    match needs(par).find(|(_, said, fits, _)| *said && !fits) {
        None => ring_options(par),
        Some((word, _, _, what)) => {
            // Mostly only the two chunks are lacking, which are one flag.
            let two = Parallelism { vp: 2, ..*par };
            let chunks = o.fold != Fold::None && par.pp > 1 && needs(&two).all(|(_, said, fits, _)| !said || fits);
            let remedy = if chunks { "use vp 2" } else { "leave it out" };
            let why = format!("needs {what}, which ring {ring} x ulysses {up} with {o} does not have; {remedy}");
            Err(Error::option(word, why))
        }
    }
}

/// Checks that the groups of ranks that share weights out among themselves are equal parts of the ranks that hold the
/// same weights.
fn hybrid_sharding(par: &Parallelism) -> Result<()> {
    let (n, same) = (par.options.shard, par.dp * par.ring * par.ulysses);
    if n == 0 {
        return Ok(());
    }
    if par.zero == 0 {
        return Err(Cause::Options.infeasible(format!("shard-{n} shares nothing out with zero 0; use zero 1, 2 or 3")));
    }
    let good = list((2..same.min(4096)).filter(|n| same.is_multiple_of(*n)).map(u64::from));
    if n >= same || !same.is_multiple_of(n) {
        let why = format!("shard-{n} is no part of the dp x ring x ulysses = {same} ranks that hold the same weights");
        return Err(Cause::Options.infeasible(format!("{why}; use shard-{good}, or leave it out")));
    }
    let (groups, experts) = (same / n, par.ranks() / (par.pp.max(1) * par.ep.max(1)));
    if !experts.is_multiple_of(groups) {
        let why =
            format!("shard-{n} makes {groups} groups, in which {experts} ranks with the same experts do not divide");
        return Err(Cause::Options.infeasible(format!("{why}; use a shard that makes fewer, or another ep")));
    }
    Ok(())
}

/// Refuses options of a ring that exclude each other.
fn ring_options(par: &Parallelism) -> Result<()> {
    let (o, ring) = (par.options, par.ring);
    let reverse = o.ring_backward == RingBackward::Reverse;
    let uneven = |w: u32| !ring.is_multiple_of(w) || ring < 2 * w;
    let why = match o.window() {
        Some(w) if uneven(w) => {
            format!("double-ring-{w} needs two windows of {w} ranks or more, which ring {ring} does not have")
        }
        Some(_) if o.ring_backward != RingBackward::Follow => {
            format!("a double ring has a backward pass of its own, which {o} contradicts; leave one of them out")
        }
        _ if o.kv_in_two && reverse => {
            "dkv-model sends KV and dKV as one message, kv-in-two as two; leave one of them out".into()
        }
        _ if o.one_comm && reverse => "dkv-model needs one communicator as it is; leave one-comm out".into(),
        _ => return Ok(()),
    };
    Err(Cause::Options.infeasible(why))
}

/// Checks that a rank's heads stand one behind the other, as they are, where they are known by their numbers.
pub(super) fn slopes(model: &LlmSpec, par: &Parallelism) -> Result<()> {
    let o = par.options;
    let refused = [(o.pad_heads, "pad-heads"), (o.kv == KvPath::GatherByHead, "gather-kv-prefetch")];
    match refused.iter().find(|(has, _)| *has && model.positions == Positions::Alibi) {
        Some((_, word)) => {
            let why = format!("{word} moves heads, and {} has a slope for each (ALiBi); leave it out", model.name);
            Err(Cause::Options.infeasible(why))
        }
        None => Ok(()),
    }
}
