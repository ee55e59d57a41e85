//! Refuses what cannot be built, before anything is built: with the values and the remedy.

mod experts;
mod sizes;
mod sparse;
mod stages;
mod words;

pub use experts::{chosen_by_layer, route};
pub use stages::layers_of_stages;
pub use words::{IN_A_V, that_apply};

use super::lengths::lcm;
use crate::error::{Cause, Error, Result};
use crate::spec::{AttentionSpec, LlmSpec, MambaSpec, Mixer, Parallelism, Pass, Positions, Workload};
use experts::experts;
use sizes::{batch, documents, heads, sequence, tensor};
use sparse::sparse;
use stages::pipeline;
use words::{experts_again, fewer_bits, muon, offload, options, options_of_attention, slopes};

/// Checks for every reason but memory, which needs the plan. Errors: the first reason; the word before the colon is its
/// kind.
pub fn check(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    blocks(model)?;
    experts(model, par)?;
    positions(model, work)?;
    degrees(par)?;
    options(par)?;
    offload(model, work, par)?;
    fewer_bits(work, par)?;
    muon(par)?;
    experts_again(model, par)?;
    latent(model, par)?;
    sparse(model, work, par)?;
    slopes(model, par)?;
    hybrid(model, work, par)?;
    mtp(model, par)?;
    network_in_pieces(model, par)?;
    tensor(model, work, par)?;
    let t = u64::from(par.tp);
    heads(model.heads / t, (model.attended_kv_heads() / t).max(1), model.qk_dim(), par)?;
    sequence(work.seq_len, par)?;
    model.mask(&work.documents).check(work.seq_len)?;
    if !work.documents.is_empty() && matches!(model.positions, Positions::Learned { .. }) {
        let why = "learned positions go on through documents in this version; use a model with rotary ones";
        return Err(Cause::Documents.infeasible(why));
    }
    documents(&work.documents, par)?;
    batch(work, par)?;
    pieces(work, par)?;
    pipeline(model, work, par)
}

/// Refuses layers made of what plans do not have yet.
fn blocks(model: &LlmSpec) -> Result<()> {
    if model.lfa {
        let why = "which no plan of this version has; use a model without";
        return Err(Cause::Model.infeasible(format!("{} has localized filtering, {why}", model.name)));
    }
    Ok(())
}

/// Refuses options that multi-head latent attention does not go with.
fn latent(model: &LlmSpec, par: &Parallelism) -> Result<()> {
    let Some(mla) = model.mla else {
        let why = "needs latent attention, which the model has not; leave it out";
        return if par.options.recompute_mla_up { Err(Error::option("recompute-mla-up", why)) } else { Ok(()) };
    };
    if mla.rope_dim % 2 == 1 {
        let why = format!("qk_rope_head_dim {} is odd, but rotary embedding turns pairs", mla.rope_dim);
        return Err(Cause::Mla.infeasible(why + "; use an even one"));
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
        Some((_, what)) => Err(Cause::Mla.infeasible(format!("latent attention does not go with {what}"))),
        None => Ok(()),
    }
}

/// Refuses options that modules of multi-token prediction do not go with.
fn mtp(model: &LlmSpec, par: &Parallelism) -> Result<()> {
    if model.mtp.is_none() {
        return Ok(());
    }
    let refused = [
        (par.zero > 1, "not together with zero above 1; use zero 1"),
        (par.options.chunks > 0, "not together with fpdt; more ranks go to dp, tp or pp"),
        (
            par.cuts_all(),
            "not together with zb-h1, zb-v, v-half or v-min, which would leave their gradients of weights undone; leave it out",
        ),
        (
            matches!(model.positions, Positions::Learned { .. }),
            "not with learned positions; use a model with rotary ones",
        ),
    ];
    match refused.iter().find(|(has, _)| *has) {
        Some((_, what)) => {
            let why = format!("modules of multi-token prediction are {what}, or train without them (--no-mtp)");
            Err(Cause::Mtp.infeasible(why))
        }
        None => Ok(()),
    }
}

/// Refuses to run a network piece by piece, or again by itself, unless it is the second half of a layer.
fn network_in_pieces(model: &LlmSpec, par: &Parallelism) -> Result<()> {
    let refused = [
        (model.moe.is_some(), "experts, whose rows are a piece as they are"),
        (!model.pattern.is_empty(), "layers of one mixer each"),
        (model.parallel_block, "networks beside attention"),
    ];
    let of = format!("is for networks behind attention; {} has", model.name);
    match refused.iter().find(|(has, _)| *has) {
        Some((_, what)) if par.options.mlp_chunks > 0 => {
            Err(Cause::Options.infeasible(format!("mlp-chunks {of} {what}; leave it out")))
        }
        Some((_, what)) if par.options.recompute_mlp => {
            Err(Error::option("recompute-mlp", format!("{of} {what}; leave it out")))
        }
        _ => Ok(()),
    }
}

/// Refuses more pieces of a network or a loss than a rank has tokens.
fn pieces(work: &Workload, par: &Parallelism) -> Result<()> {
    let tokens = work.micro_batch * work.seq_len / (u64::from(par.ring) * u64::from(par.ulysses));
    let of = [("loss-chunks", par.options.loss_chunks), ("mlp-chunks", par.options.mlp_chunks)];
    match of.into_iter().find(|(_, pieces)| u64::from(*pieces) > tokens) {
        Some((word, pieces)) => {
            let tokens_of = if tokens == 1 { "token" } else { "tokens" };
            let why = format!("cuts the {tokens} {tokens_of} of a rank in {pieces} pieces; use {tokens} or fewer");
            Err(Error::option(word, why))
        }
        None => Ok(()),
    }
}

/// Refuses options that layers of one mixer each do not go with, or a state-space scan.
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
            states && !work.documents.is_empty(),
            "documents: a state goes on through them in this version; leave them out",
        ),
        (has(Mixer::Mamba) != model.mamba.is_some(), "a pattern whose mixers it does not state"),
        (has(Mixer::Experts) != model.moe.is_some(), "a pattern whose experts it does not state"),
    ];
    if let Some((_, what)) = refused.iter().find(|(has, _)| *has) {
        return Err(Cause::Hybrid.infeasible(format!("layers of a pattern do not go with {what}")));
    }
    model.mamba.map_or(Ok(()), |mamba| states_shared(&mamba, par))
}

/// Checks that ranks can share the heads and groups of state-space layers: whole groups in tensor parallelism, and of
/// those the ranks that share a sequence.
fn states_shared(mamba: &MambaSpec, par: &Parallelism) -> Result<()> {
    let (t, both) = (u64::from(par.tp), u64::from(par.ring) * u64::from(par.ulysses));
    let MambaSpec { groups, heads, .. } = *mamba;
    if !groups.is_multiple_of(t) || !heads.is_multiple_of(t) {
        let good = list((2..=groups).filter(|t| groups.is_multiple_of(*t) && heads.is_multiple_of(*t)));
        let why = format!("{groups} groups of {heads} state-space heads are not divisible by tp {t}");
        return Err(Cause::Tp.infeasible(format!("{why}; use {good}")));
    }
    let here = mamba.part(t);
    if !here.shares(both) {
        let good = list((2..=here.heads).filter(|ranks| here.shares(*ranks)));
        let why = format!(
            "the {} state-space heads in {} groups of a rank are not shared by ring {} x ulysses {}",
            here.heads, here.groups, par.ring, par.ulysses
        );
        return Err(Cause::Heads.infeasible(format!("{why}; use a product of {good}")));
    }
    Ok(())
}

/// Checks that every position has its row in the table, where positions are learned.
fn positions(model: &LlmSpec, work: &Workload) -> Result<()> {
    match model.positions {
        Positions::Learned { max } if work.seq_len > max => Err(Cause::Positions.infeasible(format!(
            "seq_len {} is more than the {max} positions that {} has learned; use at most {max}",
            work.seq_len, model.name
        ))),
        _ => Ok(()),
    }
}

/// [`check`] for one attention operation alone. Errors: the first reason why it cannot be built.
pub fn attention(spec: &AttentionSpec, par: &Parallelism) -> Result<()> {
    degrees(par)?;
    options_of_attention(par)?;
    options(par)?;
    let others = [("dp", par.dp), ("tp", par.tp), ("pp", par.pp), ("vp", par.vp), ("ep", par.ep)];
    if let Some((name, degree)) = others.into_iter().find(|(_, degree)| *degree != 1) {
        let why = format!("{name} {degree} does not split an attention alone; use {name} 1");
        return Err(Cause::Degrees.infeasible(why));
    }
    let sizes = [
        ("batch", spec.batch, 1 << 20),
        ("heads", spec.heads, 1 << 16),
        ("kv_heads", spec.kv_heads, 1 << 16),
        ("head_dim", spec.head_dim, 1 << 16),
    ];
    if let Some((name, size, most)) = sizes.into_iter().find(|(_, size, most)| *size == 0 || size > most) {
        let nearest = size.clamp(1, most);
        return Err(Cause::Sizes.infeasible(format!("{name} {size} is outside 1..={most}; the nearest is {nearest}")));
    }
    if !spec.heads.is_multiple_of(spec.kv_heads) {
        let good = list((1..=spec.heads).filter(|kv| spec.heads.is_multiple_of(*kv)));
        let why = format!("heads {} is not a multiple of kv_heads {}; use {good}", spec.heads, spec.kv_heads);
        return Err(Cause::Heads.infeasible(why));
    }
    heads(spec.heads, spec.kv_heads, spec.head_dim, par)?;
    sequence(spec.seq_len, par)?;
    spec.mask.check(spec.seq_len)?;
    documents(&spec.mask.documents, par)
}

/// Refuses a backward pass alone where it would need more of a forward pass than log-sum-exps. Errors: the option that
/// asks for it.
pub fn pass(pass: Pass, par: &Parallelism) -> Result<()> {
    let alone = pass.has_backward() && !pass.has_forward();
    if alone && par.options.unfused {
        let why = "unfused scores are those of the forward pass, which is left out; use both passes";
        return Err(Cause::Options.infeasible(why));
    }
    Ok(())
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
        return Err(Cause::Degrees.infeasible(format!("{name} is 0; the least is 1")));
    }
    let ranks = [par.dp, par.pp, par.ring, par.ulysses, par.tp].iter().fold(1u64, |n, &d| n.saturating_mul(d.into()));
    if ranks > 1 << 20 {
        let why = format!("dp x pp x ring x ulysses x tp is {ranks} ranks; the most is 1048576");
        return Err(Cause::Degrees.infeasible(why));
    }
    if par.zero > 3 {
        return Err(Cause::Zero.infeasible(format!("there is no stage {}; use 0, 1, 2 or 3", par.zero)));
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
