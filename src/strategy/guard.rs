//! Refuses sizes that no machine has at once, before they become an allocation, an overflow or a wait.

use crate::error::{Cause, Result};
use crate::plan::{Op, OpKind, Plan};
use crate::spec::{AttentionSpec, KvPath, LlmSpec, Options, Parallelism, Workload};
use crate::strategy::feasible;

/// The most elements of one tensor, and tokens of a step.
const MOST_ELEMS: f64 = (1u64 << 48) as f64;
const MOST_LAYERS: u64 = 2048;
/// The most ranks: folding the ranks of long rings into classes takes seconds here, and minutes beyond.
const MOST_RANKS: u64 = 1 << 17;
/// The most ranks of a ring: they all do different work, and its hops are written out one by one.
const MOST_RING: u32 = 1024;
/// The most experts of a layer: a route counts the rows of every one by every rank.
const MOST_EXPERTS: u64 = 1 << 14;
/// The most slots of all tensors: every pair of slots may be looked at to place them in memory.
const MOST_SLOTS: u64 = 40_000;
/// The most ops of one rank after splicing, the microbatches but three left out: what a plan is linked over.
const MOST_OPS: f64 = 1e6;

/// The most FLOPs of one kernel: they are counted in 64 bits.
const MOST_FLOPS: f64 = (1u64 << 63) as f64;

fn too_much(what: String) -> Result<()> {
    Err(Cause::Size.infeasible(what))
}

/// Checks what can be told before the plan is built. Errors: what [`feasible::check`] refuses, a size beyond the limits
/// here.
pub fn before(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    feasible::check(model, work, par)?;
    let ranks = u64::from(par.ranks());
    if ranks > MOST_RANKS {
        return too_much(format!("{ranks} GPUs are more than the {MOST_RANKS} that this version predicts"));
    }
    if par.ring > MOST_RING {
        return too_much(format!("ring {} is more than {MOST_RING}; raise dp or ulysses instead", par.ring));
    }
    if model.layers > MOST_LAYERS {
        return too_much(format!("{} layers are more than {MOST_LAYERS}; check for extra digits", model.layers));
    }
    if let Some(experts) = model.moe.as_ref().map(|moe| moe.experts).filter(|experts| *experts > MOST_EXPERTS) {
        return too_much(format!("{experts} experts are more than {MOST_EXPERTS}; check for extra digits"));
    }
    let (h, f, v) = (model.hidden as f64, model.ffn as f64, model.vocab as f64);
    let q_and_kv = (model.heads as f64 + 2.0 * model.kv_heads as f64) * model.head_dim as f64;
    let tokens = work.micro_batch as f64 * work.seq_len as f64;
    let row = v.max(2.0 * f).max(q_and_kv).max(h);
    let sizes = [
        ("weights of a layer", h * (2.0 * q_and_kv + 3.0 * f + 2.0)),
        ("weights of the embedding", v * h),
        ("activations of a microbatch", tokens / (f64::from(par.ring) * f64::from(par.ulysses)) * row),
        (
            "scores of a microbatch",
            if par.options.unfused { tokens * (work.seq_len * model.heads) as f64 } else { 0.0 },
        ),
        ("tokens of a step", work.global_batch as f64 * work.seq_len as f64),
    ];
    if let Some((what, size)) = sizes.iter().find(|(_, size)| *size > MOST_ELEMS) {
        return too_much(format!("{size:.1e} {what} are beyond any machine; check for extra digits"));
    }
    let heads = model.heads as f64 / f64::from(par.tp * par.ulysses);
    let mask = model.mask(&work.documents);
    // Pairs of a block of a ring, which may be off the diagonal, or of all keys and values that are gathered.
    let ring = f64::from(par.ring);
    let part = if par.options.kv == KvPath::Ring { (2.0 / ring).min(1.0) / ring } else { 1.0 / ring };
    let pairs = mask.pairs(work.seq_len) * part;
    kernel_of(work.micro_batch as f64 * pairs * heads * model.qk_dim() as f64)
}

/// Refuses an attention kernel whose FLOPs cannot be counted: its backward pass has five products of so many pairs
/// times elements of heads.
fn kernel_of(products: f64) -> Result<()> {
    match 10.0 * products > MOST_FLOPS {
        true => too_much(format!(
            "an attention kernel of {:.0e} FLOPs is more than is counted; use shorter sequences, or more ranks to share them \
             (ulysses, ring)",
            10.0 * products
        )),
        false => Ok(()),
    }
}

/// Checks what can be told of one attention operation before its plan is built. Errors: what [`feasible::attention`]
/// refuses, a size beyond the limits here.
pub fn attention(spec: &AttentionSpec, par: &Parallelism) -> Result<()> {
    feasible::attention(spec, par)?;
    if par.ring > MOST_RING || u64::from(par.ring) * u64::from(par.ulysses) > MOST_RANKS {
        let most = format!("ring {MOST_RING} and {MOST_RANKS} GPUs");
        return too_much(format!("ring {} x ulysses {} is more than {most}", par.ring, par.ulysses));
    }
    let row = spec.heads as f64 + 2.0 * spec.kv_heads as f64;
    let keys = if par.options.unfused { spec.seq_len.max(spec.head_dim) } else { spec.head_dim } as f64;
    let size = spec.batch as f64 * spec.seq_len as f64 * keys * row;
    if size > MOST_ELEMS {
        return too_much(format!(
            "{size:.1e} queries, keys, values or scores are beyond any machine; check for extra digits"
        ));
    }
    // The reference is one GPU that does all of it.
    kernel_of(spec.batch as f64 * spec.mask.pairs(spec.seq_len) * (spec.heads * spec.head_dim) as f64)
}

/// Slots of all tensors together.
fn slots(plan: &Plan) -> u64 {
    plan.tensors.iter().map(|t| u64::from(t.slots)).sum()
}

/// Whether a plan with more microbatches than one that passed [`after`] passes too.
pub fn has_room_for_more(plan: &Plan) -> bool {
    slots(plan) <= MOST_SLOTS
}

/// Checks what only the plan itself tells. Errors: too many slots, or too many ops of a rank.
pub fn after(plan: &Plan) -> Result<()> {
    let slots = slots(plan);
    if slots > MOST_SLOTS {
        return too_much(format!("{} make {slots} buffers, more than {MOST_SLOTS}; {}", parts(plan)?, levers(plan)?));
    }
    length(plan, MOST_OPS)
}

/// Checks how long a plan takes to link, whatever room it needs. Errors: more than `at_most` ops of a rank after
/// splicing, the microbatches but three left out.
pub fn length(plan: &Plan, at_most: f64) -> Result<()> {
    let most = plan.programs.iter().map(|p| spliced(plan, &p.ops, 3)).fold(0.0, f64::max);
    if most > at_most {
        return too_much(format!(
            "{} make {most} ops of a rank that are laid out one by one, more than {at_most}; {}",
            parts(plan)?,
            levers(plan)?
        ));
    }
    Ok(())
}

/// The options that say in how many pieces something is gone through, each with the number it has here.
fn pieces(par: &Parallelism) -> impl Iterator<Item = (&'static str, u32)> {
    let Options { chunks, loss_chunks, mlp_chunks, .. } = par.options;
    [("fpdt", chunks), ("loss-chunks", loss_chunks), ("mlp-chunks", mlp_chunks)].into_iter().filter(|(_, n)| *n > 1)
}

/// What makes a plan long, in words: `80 layers, ring 8, fpdt-64 and 2 microbatches`.
fn parts(plan: &Plan) -> Result<String> {
    let (par, microbatches) = (&plan.about.par, plan.inputs()?.microbatches);
    let mut all = vec![format!("{} layers", plan.model()?.layers)];
    all.extend((par.ring > 1).then(|| format!("ring {}", par.ring)));
    all.extend(pieces(par).map(|(word, n)| format!("{word}-{n}")));
    Ok(format!("{} and {microbatches} microbatch{}", all.join(", "), if microbatches == 1 { "" } else { "es" }))
}

/// What could be less of it, in words.
fn levers(plan: &Plan) -> Result<String> {
    let par = &plan.about.par;
    let mut all: Vec<String> = pieces(par).map(|(word, n)| format!("fewer chunks than {word}-{n}")).collect();
    all.extend((par.ring > 1).then(|| "a smaller ring".to_string()));
    all.extend((plan.inputs()?.microbatches > 1).then(|| "a larger micro_batch or dp".to_string()));
    Ok(match all.is_empty() {
        true => "use more pipeline stages (pp)".into(),
        false => format!("use {}", all.join(", or ")),
    })
}

/// The most ops that any rank runs.
pub fn ops_of_a_rank(plan: &Plan) -> f64 {
    plan.programs.iter().map(|p| spliced(plan, &p.ops, u32::MAX)).fold(0.0, f64::max)
}

/// Ops of a program with every call spliced, the program's own calls repeated at most `top` times.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Engine;
    use crate::spec::{Dtype, Recompute};
    use crate::strategy::{Engines, build};

    #[test]
    fn what_no_machine_has_is_named() {
        let model = LlmSpec::find("tiny").unwrap();
        let work = Workload {
            seq_len: 1 << 20,
            global_batch: 1 << 18,
            micro_batch: 1,
            dtype: Dtype::Bf16,
            documents: Default::default(),
        };
        let par = Parallelism { dp: 4, ..Parallelism::default() };
        before(&model, &work, &par).unwrap();
        let said =
            |model: &LlmSpec, work: &Workload, par: &Parallelism| before(model, work, par).unwrap_err().to_string();
        let deep = LlmSpec { layers: 1_000_000, ..model.clone() };
        assert!(said(&deep, &work, &par).contains("1000000 layers"));
        let mut many = LlmSpec::find("mixtral-8x7b").unwrap();
        many.moe.iter_mut().for_each(|moe| moe.experts = 1_000_000_000);
        assert!(said(&many, &work, &par).contains("1000000000 experts"));
        assert!(said(&model, &work, &Parallelism { dp: 1 << 18, ..par }).contains("262144 GPUs"));
        assert!(said(&model, &work, &Parallelism { ring: 2048, ..par }).contains("ring 2048"));
        let wide = LlmSpec { vocab: 1 << 30, hidden: 1 << 20, ..model.clone() };
        assert!(said(&wide, &work, &par).contains("weights of"));
        let (long, wordy) = (Workload { seq_len: 1 << 32, ..work }, LlmSpec { vocab: 1 << 20, ..model.clone() });
        assert!(said(&wordy, &long, &par).contains("activations of a microbatch"));
    }

    /// A remedy is of what the plan has: of one ring and one microbatch there is nothing to lessen.
    #[test]
    fn a_plan_that_is_too_long_names_what_it_could_have_less_of() {
        let model = LlmSpec::find("tiny").unwrap();
        let engines = Engines { p2p: Engine::CopyEngine, collective: Engine::CopyEngine };
        let said = |par: Parallelism, words: &str, global_batch: u64| {
            let work = Workload {
                seq_len: 4096,
                global_batch,
                micro_batch: 1,
                dtype: Dtype::Bf16,
                documents: Default::default(),
            };
            let par = Parallelism { options: words.parse().unwrap(), ..par };
            let plan = build(&model, &work, &par, engines).unwrap();
            length(&plan, 1.0).unwrap_err().to_string()
        };
        let one = Parallelism { recompute: Recompute::Full, ..Parallelism::default() };
        let chunked = said(Parallelism { ulysses: 2, ..one }, "fpdt-4+offload-activations", 1);
        assert!(chunked.contains("layers, fpdt-4 and 1 microbatch make"), "{chunked}");
        assert!(chunked.ends_with("; use fewer chunks than fpdt-4"), "{chunked}");
        let ring = said(Parallelism { ring: 4, ..one }, "loss-chunks-8", 2);
        let want = "; use fewer chunks than loss-chunks-8, or a smaller ring, or a larger micro_batch or dp";
        assert!(ring.contains("ring 4, loss-chunks-8 and 2 microbatches") && ring.ends_with(want), "{ring}");
        assert!(said(one, "default", 1).ends_with("; use more pipeline stages (pp)"));
    }
}
