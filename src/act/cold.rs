//! Bytes of an op's operands that a core's caches no longer have, by the plan alone: they follow from how many other
//! bytes the rank has touched since it touched the same bytes of its arena last (the reuse distance of Mattson et al.,
//! "Evaluation techniques for storage hierarchies", 1970, counted in bytes).
//!
//! A pass over memory takes two to three times as long for what comes from far away as for what the op before left in the
//! cache (fills of 1 to 4 MiB: 11 ps a byte, and 25 to 40), so passes of equal bytes are no equal passes.

use crate::error::Result;
use crate::plan::Plan;
use crate::plan::link::{AtomTable, Line, Place};
use crate::plan::memory::{Layout, SlotId};

/// Bytes touched since the last touch: up to `NEAR` everything is in a core's own cache, from `FAR` on nothing is near,
/// and between them the logarithm decides. The values are for today's server CPUs, with 1 to 2 MiB for a core and 2 to
/// 4 MiB of the common cache. Of five pairs that were tried on the kernels of 59 steps (AMD EPYC, two cores) this one
/// and 4 and 32 MiB left over least: 16 % in place of 20 of fills, 10 of 11.5 of norms backward, 8 of 14 to 18 of
/// embeddings and attention_delta.
const NEAR: f64 = 2.097152e6;
const FAR: f64 = 1.6777216e7;

/// Bytes that are cold or warm together, at least; and how many such pieces an arena has, at most.
const PAGE: u64 = 4096;
const PAGES: u64 = 1 << 16;

/// The bytes of the operands of each op of each program that are far away, in steps that follow each other; `lines` are
/// those of the programs. `sharing` ranks take turns on a core, and each touches as much as the others. Errors: those
/// of the memory's layout.
pub fn cold_bytes(plan: &Plan, atoms: &AtomTable, lines: &[Line], sharing: u32) -> Result<Vec<Vec<u64>>> {
    (0..).zip(lines).map(|(program, line)| of_program(plan, atoms, line, program, sharing)).collect()
}

/// Ranks that take turns on a core, at most, where the core is that of a rank's device.
pub fn sharing(devices: &[u32]) -> u32 {
    devices.iter().map(|d| devices.iter().filter(|e| *e == d).count() as u32).max().unwrap_or(1)
}

fn of_program(plan: &Plan, atoms: &AtomTable, line: &Line, program: u32, sharing: u32) -> Result<Vec<u64>> {
    let layout = Layout::new(plan, atoms, program)?;
    let page = layout.footprint.bytes.div_ceil(PAGES).max(PAGE);
    let mut last = vec![0u64; layout.footprint.bytes.div_ceil(page) as usize];
    let (mut now, mut touched) = (0, vec![]);
    let mut found = vec![0; line.nodes.len()];
    // The first step, which is not looked at, touches everything once.
    for _ in 0..2 {
        for (node, cold) in found.iter_mut().enumerate() {
            let (begun, mut far) = (now, 0.0);
            for place in line.reads(node).iter().chain(line.writes(node)) {
                now += place.bytes(plan) * u64::from(sharing);
                for (at, bytes) in pages(plan, &layout, place, page) {
                    far += bytes as f64 * share((begun - last[at]) as f64);
                    touched.push(at);
                }
            }
            touched.drain(..).for_each(|at| last[at] = now);
            *cold = far.round() as u64;
        }
    }
    Ok(found)
}

/// The share of bytes touched `ago` bytes ago that is far away.
fn share(ago: f64) -> f64 {
    ((ago / NEAR).ln() / (FAR / NEAR).ln()).clamp(0.0, 1.0)
}

/// The pieces of the arena that a place lies in, each with its bytes there; none of a place in the host's memory.
fn pages(plan: &Plan, layout: &Layout, place: &Place, page: u64) -> impl Iterator<Item = (usize, u64)> {
    let tensor = &plan.tensors[place.tensor as usize];
    let row = tensor.row_len() * tensor.dtype.size();
    let at = layout.offset(SlotId { tensor: place.tensor, slot: place.slot }).filter(|_| !tensor.host);
    let [from, to] = at.map_or([0, 0], |at| place.rows.map(|r| at + r * row));
    let pieces = if to > from { from / page..to.div_ceil(page) } else { 0..0 };
    pieces.map(move |i| (i as usize, to.min((i + 1) * page) - from.max(i * page)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Dtype, Engine};
    use crate::spec::{LlmSpec, Parallelism, Workload};
    use crate::strategy::{Engines, build};

    /// Of the ops of a step on one rank whose path has `name`: the least and the largest share of their bytes that is cold.
    fn cold(model: &str, name: &str, sharing: u32) -> (f64, f64) {
        let model = LlmSpec::find(model).unwrap();
        let documents = Default::default();
        let work = Workload { seq_len: 64, global_batch: 1, micro_batch: 1, dtype: Dtype::F32, documents };
        let engine = Engine::Sm { ctas: 1 };
        let engines = Engines { p2p: engine, collective: engine };
        let plan = build(&model, &work, &Parallelism::default(), engines).unwrap();
        let atoms = AtomTable::new(&plan).unwrap();
        let line = Line::program(&plan, &atoms, 0).unwrap();
        let cold = of_program(&plan, &atoms, &line, 0, sharing).unwrap();
        let bytes = |node| line.reads(node).iter().chain(line.writes(node)).map(|p| p.bytes(&plan)).sum::<u64>();
        let shares = (0..cold.len()).filter(|&node| line.path(node).contains(name));
        let shares: Vec<f64> = shares.map(|node| cold[node] as f64 / bytes(node) as f64).collect();
        assert!(!shares.is_empty(), "no {name}");
        (shares.iter().copied().fold(1.0, f64::min), shares.iter().copied().fold(0.0, f64::max))
    }

    /// A step of the tiny model touches no more than caches hold; of the small one, a hundred megabytes.
    #[test]
    fn a_small_step_is_warm_and_a_large_ones_moments_are_cold() {
        assert!(cold("tiny", "/swiglu", 1).1 < 0.25, "{:?}", cold("tiny", "/swiglu", 1));
        let (least, most) = cold("small", "/adam", 1);
        assert!(least > 0.7 && most <= 1.0, "{least} {most}");
        let (_, most) = cold("small", "/swiglu", 1);
        assert!(most < least, "gate and up come from the product before: {most}");
    }

    #[test]
    fn ranks_that_take_turns_leave_each_other_less() {
        let (alone, shared) = (cold("tiny", "/adam", 1), cold("tiny", "/adam", 64));
        assert!(alone.1 < 0.5 && shared.0 > 0.9, "{alone:?} {shared:?}");
    }
}
