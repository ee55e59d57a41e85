//! Sizes that no machine has are answered at once, before they become an allocation or an overflow.

use crate::error::{Error, Result};
use crate::plan::{Op, OpKind, Plan};
use crate::spec::{LlmSpec, Parallelism, Workload};
use crate::strategy::feasible;

/// Elements of one tensor, and tokens of a step.
const MOST_ELEMS: f64 = (1u64 << 48) as f64;
/// Ops of one rank after splicing, the microbatches but three left out: what a plan is linked over.
const MOST_OPS: f64 = 4e6;
/// Hops of a ring are written out one by one.
const MOST_RING: u32 = 4096;

/// What can be told before the plan is built.
pub fn before(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    feasible::check(model, work, par)?;
    if par.ring > MOST_RING {
        let why = format!(
            "degrees: ring {} is beyond the {MOST_RING} hops a plan is written with; raise dp or ulysses",
            par.ring
        );
        return Err(Error::infeasible(why));
    }
    let (h, f, v) = (model.hidden as f64, model.ffn as f64, model.vocab as f64);
    let q_and_kv = (model.heads as f64 + 2.0 * model.kv_heads as f64) * model.head_dim as f64;
    let layer = h * (2.0 * q_and_kv + 3.0 * f + 2.0);
    let tokens = work.micro_batch as f64 * work.seq_len as f64;
    let row = v.max(2.0 * f).max(q_and_kv).max(h);
    let sizes = [
        ("weights of a layer", layer),
        ("embedding", v * h),
        ("activations of a microbatch", tokens / (f64::from(par.ring) * f64::from(par.ulysses)) * row),
        ("tokens of a step", work.global_batch as f64 * work.seq_len as f64),
    ];
    match sizes.iter().find(|(_, size)| *size > MOST_ELEMS) {
        Some((what, size)) => Err(Error::infeasible(format!(
            "size: {size:.1e} {what} are beyond any machine (at most {MOST_ELEMS:.1e}); check for extra digits"
        ))),
        None => Ok(()),
    }
}

/// What the plan itself tells.
pub fn after(plan: &Plan) -> Result<()> {
    let most = plan.programs.iter().map(|p| spliced(plan, &p.ops, 3)).fold(0.0, f64::max);
    if most > MOST_OPS {
        let layers = plan.about.model_spec.layers;
        return Err(Error::infeasible(format!(
            "size: {layers} layers and ring {} make {most:.1e} ops a rank, more than {MOST_OPS:.0e}; check for extra digits",
            plan.about.ring
        )));
    }
    Ok(())
}

/// Ops of a body with every call spliced; calls of the body itself at most `top` times.
fn spliced(plan: &Plan, ops: &[Op], top: u32) -> f64 {
    // A block calls only blocks before it, so the sizes of callees are known when they are needed.
    let mut blocks: Vec<f64> = Vec::with_capacity(plan.blocks.len());
    for block in &plan.blocks {
        let size = block.ops.iter().map(|op| size_of(op, &blocks, u32::MAX)).sum();
        blocks.push(size);
    }
    ops.iter().map(|op| size_of(op, &blocks, top)).sum()
}

fn size_of(op: &Op, blocks: &[f64], most: u32) -> f64 {
    match &op.kind {
        OpKind::Call { block, repeat, .. } => {
            f64::from((*repeat).min(most)) * blocks.get(*block as usize).copied().unwrap_or(0.0)
        }
        _ => 1.0,
    }
}
