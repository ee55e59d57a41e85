//! Checks of attention to chosen keys: what it does not go with.

use crate::error::{Cause, Result};
use crate::spec::{KvPath, LlmSpec, Parallelism, RingLayout, Workload};

/// Checks attention to chosen keys: a query may choose any key that it sees, so that a rank needs the keys of all ranks
/// before it attends to one of them.
pub(super) fn sparse(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    let Some(indexer) = model.indexer else { return Ok(()) };
    let o = par.options;
    if model.mla.is_none_or(|mla| mla.q_lora.is_none()) || !model.pattern.is_empty() || model.window.is_some() {
        let why = "an indexer chooses keys of latent attention with compressed queries, in all layers and \
                   without a window; use such a model";
        return Err(Cause::SparseAttention.infeasible(why));
    }
    let refused = [
        (
            par.tp > 1,
            "tp above 1: its one key is of all heads, and probabilities of all heads teach the indexer; more ranks go to dp, ep \
             or pp, or to a ring with gather-kv",
        ),
        (
            par.ulysses > 1,
            "ulysses above 1: ranks with some of the heads would all score for the whole sequence, and one key has no heads to \
             share out; use a ring with gather-kv",
        ),
        (
            o.chunks > 0,
            "fpdt: a chunk's queries choose among the keys of all chunks before it; leave it out, and use a ring with gather-kv",
        ),
        (
            par.ring > 1 && o.window().is_some(),
            "double-ring: which keys are chosen is known when all are scored, not block by block; use gather-kv",
        ),
        (
            par.ring > 1 && o.kv == KvPath::Ring,
            "a ring whose KV circulate: which keys are chosen is known when all are scored, not block by block; use gather-kv, \
             which brings what is compressed of all keys to every rank",
        ),
        (
            o.kv == KvPath::GatherByHead,
            "gather-kv-prefetch: one key is of all heads, and there are no groups of them to go ahead; use gather-kv",
        ),
        (o.per_document && par.ring > 1, "per-document: keys are gathered in the order of the sequence; leave it out"),
        (
            par.ring > 1 && o.layout == RingLayout::Stripe,
            "stripe: queries of every rank are spread over the sequence, which balances blocks of a ring; use zigzag",
        ),
        (
            o.keep_attention,
            "keep-attention: a layer that runs again would choose keys for an outcome that was kept; leave it out",
        ),
    ];
    if let Some((_, why)) = refused.iter().find(|(has, _)| *has) {
        return Err(Cause::SparseAttention.infeasible(format!("{} does not go with {why}", model.name)));
    }
    if work.seq_len >= u64::from(u32::MAX) || indexer.top_k > work.seq_len.max(1 << 20) {
        let why = format!("index_topk {} of {} tokens; places are u32", indexer.top_k, work.seq_len);
        return Err(Cause::SparseAttention.infeasible(why + ", and rows of so many are not kept; use fewer"));
    }
    Ok(())
}
