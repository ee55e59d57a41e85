//! Checks of sizes that ranks have to share evenly: heads, networks, the sequence, the batch.

use super::{lcm, list};
use crate::error::{Cause, Result};
use crate::spec::{Documents, KvPath, LlmSpec, Parallelism, RingLayout, Workload};
use crate::strategy::tensor::CHUNKS;
use crate::strategy::transformer;
use crate::strategy::ulysses::padded;

/// Checks that tensor-parallel ranks have whole heads, equal parts of the feed-forward network, and equal shares of the
/// tokens. The vocabulary is filled up where it does not come out even.
pub(super) fn tensor(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    let t = u64::from(par.tp);
    let dense = if model.dense_layers() > 0 { model.ffn } else { 0 };
    let sizes = [
        ("heads", model.heads),
        ("kv_heads", model.attended_kv_heads()),
        ("ffn", transformer::width(model)),
        ("ffn of dense layers", dense),
    ];
    // A KV head may be on several ranks.
    let fits = |name: &str, size: u64, t: u64| {
        size.is_multiple_of(t) || (name == "kv_heads" && model.mla.is_none() && t.is_multiple_of(size))
    };
    if let Some((name, size)) = sizes.iter().find(|(name, size)| !fits(name, *size, t)) {
        let good = list((2..=512).filter(|t| sizes.iter().all(|(name, size)| fits(name, *size, *t))));
        return Err(Cause::Tp.infeasible(format!("{name} {size} is not divisible by tp {t}; use {good}")));
    }
    let tokens = (work.micro_batch.saturating_mul(work.seq_len)) / (u64::from(par.ring) * u64::from(par.ulysses));
    if par.options.scatter_p2p && !tokens.is_multiple_of(t) {
        return Err(Cause::Options.infeasible(format!(
            "scatter-p2p, with {tokens} tokens of a microbatch, no multiple of tp {t}; change seq_len, or leave it out"
        )));
    }
    if !par.options.whole_activations && !tokens.is_multiple_of(t) {
        return Err(Cause::Tp.infeasible(format!(
            "{tokens} tokens of a microbatch are no multiple of tp {t}; change seq_len, or use the option no-sp"
        )));
    }
    let unit = t * CHUNKS;
    if par.options.tp_overlap && !tokens.is_multiple_of(unit) {
        return Err(Cause::Tp.infeasible(format!(
            "{tokens} tokens of a microbatch are no multiple of {unit}, tp {t} shares of {CHUNKS} chunks that tp-overlap \
             makes; change seq_len, or leave tp-overlap out"
        )));
    }
    Ok(())
}

/// Checks that Ulysses can deal out `a` heads and `k` KV heads of `head_dim` elements.
pub(super) fn heads(a: u64, k: u64, head_dim: u64, par: &Parallelism) -> Result<()> {
    let u = u64::from(par.ulysses);
    let fits = |u: u64| a.is_multiple_of(u) && (k.is_multiple_of(u) || u.is_multiple_of(k));
    match (fits(u), par.options.pad_heads) {
        (true, false) => kv_copies(k, head_dim, par),
        (false, true) => kv_copies(padded(a, k, u)[1], head_dim, par),
        (true, true) => {
            let why = format!("pad-heads adds nothing to heads {a} and kv_heads {k} on ulysses {u}");
            Err(Cause::Options.infeasible(why + "; leave it out"))
        }
        (false, false) => {
            let good = list((2..=a).filter(|&u| fits(u)));
            let why = match a.is_multiple_of(u) {
                true => format!("kv_heads {k} neither divides nor is divided by"),
                false => format!("heads {a} is not divisible by"),
            };
            Err(Cause::Heads.infeasible(format!("{why} ulysses {u}; use {good}, or --options pad-heads")))
        }
    }
}

/// Checks options about the KV heads that a rank has after the exchange.
fn kv_copies(k: u64, head_dim: u64, par: &Parallelism) -> Result<()> {
    let (u, o) = (u64::from(par.ulysses), par.options);
    if o.kv == KvPath::GatherByHead && k / u < 2 {
        let why = format!("gather-kv-prefetch needs 2 KV heads a rank, not {k} over ulysses {u}; use gather-kv");
        return Err(Cause::Heads.infeasible(why));
    }
    if o.replicate_after && u <= k {
        let why = format!("replicate-after needs ulysses above kv_heads {k}, not {u}; leave it out");
        return Err(Cause::Options.infeasible(why));
    }
    if o.replicate_after && !head_dim.is_multiple_of(u / k) {
        let why = format!("replicate-after cuts head_dim {head_dim} in ulysses {u} / kv_heads {k} slices");
        return Err(Cause::Heads.infeasible(why + ", which do not come out even; leave it out"));
    }
    Ok(())
}

pub(super) fn sequence(s: u64, par: &Parallelism) -> Result<()> {
    let (r, u) = (u64::from(par.ring), u64::from(par.ulysses));
    if s == 0 || s > 1 << 32 {
        let nearest = s.clamp(1, 1 << 32);
        return Err(
            Cause::Sequence.infeasible(format!("seq_len {s} is outside 1..=4294967296; the nearest is {nearest}"))
        );
    }
    if par.options.kv_in_two && s == r {
        let why = format!("kv-in-two halves the tokens of a rank, of which seq_len {s} over ring {r} is one");
        return Err(Cause::Sequence.infeasible(why));
    }
    // A zigzag ring cuts the sequence in 2R chunks, and Ulysses each rank's share in U.
    let zigzag = par.options.layout == RingLayout::Zigzag;
    let ring_parts = if r > 1 && zigzag { 2 * r } else { r };
    if !s.is_multiple_of(ring_parts) || !s.is_multiple_of(r * u) {
        let unit = lcm(ring_parts, r * u);
        let near = s.div_ceil(unit) * unit;
        // Other layouts cut it once for each rank.
        let halved = ring_parts > r && s.is_multiple_of(r * u);
        let or = if halved { ", or --options contiguous or stripe" } else { "" };
        return Err(Cause::Sequence.infeasible(format!(
            "seq_len {s} does not split over ring {r} x ulysses {u}; use a multiple of {unit}, e.g. {near}{or}"
        )));
    }
    Ok(())
}

/// Checks that ranks which share each document have equal parts of it.
pub(super) fn documents(documents: &Documents, par: &Parallelism) -> Result<()> {
    if !par.options.per_document {
        return Ok(());
    }
    if documents.is_empty() {
        let why = "per-document shares documents, and the sequence is one; give --documents, or leave it out";
        return Err(Cause::Options.infeasible(why));
    }
    let ring = u64::from(par.ring);
    let parts = if par.options.layout == RingLayout::Zigzag { 2 * ring } else { ring };
    match documents.lengths().iter().find(|length| !length.is_multiple_of(parts)) {
        Some(length) => {
            let near = length.div_ceil(parts) * parts;
            let why = format!("one of {length} tokens is no multiple of {parts}, to be shared by ring {ring}");
            Err(Cause::Documents.infeasible(format!("{why}; pad it to {near}, or leave per-document out")))
        }
        None => Ok(()),
    }
}

pub(super) fn batch(work: &Workload, par: &Parallelism) -> Result<()> {
    let (g, m, dp) = (work.global_batch, work.micro_batch, u64::from(par.dp));
    for (name, sequences, most) in [("micro_batch", m, 1 << 20), ("global_batch", g, 1 << 32)] {
        if sequences == 0 || sequences > most {
            let nearest = sequences.clamp(1, most);
            let why = format!("{name} {sequences} is outside 1..={most} sequences; the nearest is {nearest}");
            return Err(Cause::Batch.infeasible(why));
        }
    }
    if g < dp * m {
        // What is left of dp has to divide it: what is taken from it goes to another degree as a whole factor.
        let fewer = (1..=(g / m).max(1)).rev().find(|n| dp.is_multiple_of(*n)).unwrap_or(1);
        return Err(Cause::Batch.infeasible(format!(
            "global_batch {g} is less than dp {dp} x micro_batch {m}; raise ring, ulysses or tp until dp is {fewer}, \
             or use global_batch {} or more",
            dp * m
        )));
    }
    if g % (dp * m) != 0 {
        let near = g.div_ceil(dp * m) * dp * m;
        return Err(Cause::Batch
            .infeasible(format!("global_batch {g} is not a multiple of dp {dp} x micro_batch {m}; e.g. {near} is")));
    }
    if g / (dp * m) > 1 << 16 {
        return Err(Cause::Batch
            .infeasible(format!("{} microbatches a step are more than 65536; raise micro_batch or dp", g / (dp * m))));
    }
    Ok(())
}
