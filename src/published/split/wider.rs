//! More ranks to share what one has, where a plan cannot be, or does not fit, as a source states it.

use super::{degree, gpus};
use crate::published::row::case::Training;
use crate::published::row::words::tokens;
use crate::published::software::system::{NEMO, System};
use crate::published::software::table::Fact::{self, ByHeads, ByHeadsInNode, InRing, LongByHeads, LongInRing};

/// A run with twice as many ranks sharing what one has now, by the first way that its source (`stated`) leaves open:
/// the sequence where its system is known for that, then tensors within a node, then stages. Of a system that is said to
/// split the sequence along with tensors ("TP-sp", the baseline of DeepSpeed-Ulysses), tensors alone, over nodes too. Of experts,
/// stages before tensors: small products get no smaller, and rows of experts keep their nodes (arXiv:2603.07685, section 9, as Megatron
/// Core's guide of mixtures has it; all recipes of mixtures in `recipe` cut tensors over two ranks at most).
pub fn wider(run: &Training, stated: &Training, node: u32) -> Option<Training> {
    let mut next = run.clone();
    let whole = |n: u64, of: Option<u64>| of.is_none_or(|of| of.is_multiple_of(n));
    let sequence = [stated.cp, stated.ulysses, stated.ring].iter().all(Option::is_none);
    let system = System::of(&run.system);
    let is = |fact: Fact| system.is(fact);
    // Of long sequences, what shards weights shares the sequence: by heads with DeepSpeed, in a ring with PyTorch and JAX.
    let long = run.seq.is_some_and(|seq| seq >= LONG) && !is(Fact::Cuts) && !system.has(NEMO);
    let heads = 2 * degree(run.ulysses);
    let inside = is(ByHeadsInNode) && heads <= u64::from(node);
    let by_ulysses = is(ByHeads) || inside || long && (is(LongByHeads) || system.has("zero"));
    let by_ulysses = by_ulysses && whole(heads, run.heads);
    let by_ring = has_ring(&run.system) || is(InRing) || long && is(LongInRing);
    let tensors = more_tensors(run);
    let stages = more_stages(run, node).filter(|_| stated.pp.is_none());
    let first = stages.filter(|_| run.experts.is_some() && !with_tensors(&run.system));
    let shared = |heads: Option<u64>| whole(tensors, heads) || heads.is_some_and(|heads| tensors.is_multiple_of(heads));
    let by_tensors = whole(tensors, run.heads) && shared(run.kv_heads);
    let by_tensors = by_tensors && (with_tensors(&run.system) || tensors <= u64::from(node));
    if sequence && by_ulysses {
        next.ulysses = Some(2 * run.ulysses.unwrap_or(1));
    } else if sequence && by_ring {
        next.ring = Some(2 * run.ring.unwrap_or(1));
    } else if let Some(stages) = first {
        next.pp = Some(stages);
    } else if stated.tp.is_none() && by_tensors {
        next.tp = Some(tensors as u32);
    } else if let Some(stages) = stages {
        next.pp = Some(stages);
    }
    let replica = [next.tp, next.pp, next.ulysses, next.ring].iter().map(|d| degree(*d)).product::<u64>();
    let fits = gpus(&next).is_ok_and(|gpus| u64::from(gpus).is_multiple_of(replica));
    // Where all but one degree is stated, so is that one.
    let open = stated.dp.is_none() || stated.gpus.is_none();
    (open && next != *run && fits).then_some(next)
}

/// Tokens from which on a sequence is shared by whoever can.
const LONG: u64 = 64 << 10;

/// Whether a system is one that is known for sharing sequences.
pub fn shares_sequences(system: &str) -> bool {
    let named = System::of(system);
    has_ring(system) || named.is(ByHeads) || named.is(InRing)
}

/// Whether the sequence is split along with tensors.
fn with_tensors(system: &str) -> bool {
    tokens(system).windows(2).any(|at| at == ["tp", "sp"])
}

fn has_ring(system: &str) -> bool {
    tokens(system).iter().any(|word| word == "ring")
}

/// Twice as many ranks that share tensors or, where the batch is known and does not come out even over what is left, the least
/// number above that with which it does: of 6,144 chips that have 2,048 sequences and 48 heads, 3.
fn more_tensors(run: &Training) -> u64 {
    let twice = 2 * degree(run.tp);
    let others = degree(run.pp) * degree(run.ulysses) * degree(run.ring);
    let (Some(gpus), Some(batch), Some(heads)) = (run.gpus, run.global_batch, run.heads) else { return twice };
    let even = |tensors: &u64| {
        let dp = u64::from(gpus) / (others * tensors);
        u64::from(gpus).is_multiple_of(others * tensors) && heads.is_multiple_of(*tensors) && batch.is_multiple_of(dp)
    };
    (twice..2 * twice).find(even).unwrap_or(twice)
}

/// Twice as many stages or, where that many do not make the GPUs of the run, the least number above that does: of 252, 6
/// and not 8. Where experts are spread over the ranks of a stage, the least number of stages above that leaves each as many
/// ranks as they are spread over, or a multiple, if there is one.
fn more_stages(run: &Training, node: u32) -> Option<u32> {
    let (now, others) = (degree(run.pp), degree(run.tp) * degree(run.ulysses) * degree(run.ring));
    let most = run.layers.unwrap_or(u64::MAX);
    let made = match run.gpus.map(u64::from) {
        Some(gpus) => {
            let even = |n: &u64| gpus.is_multiple_of(others * n);
            let most = most.min(gpus / others);
            let ranks = u64::from(run.ep.unwrap_or(node)).max(1);
            let keeps = |n: &u64| run.experts.is_some() && (gpus / n).is_multiple_of(ranks);
            (now + 1..=most).filter(even).find(keeps).or_else(|| (2 * now..=most).find(even))
        }
        None => Some(2 * now).filter(|n| *n <= most),
    };
    u32::try_from(made?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::row::case::Experts;

    #[test]
    fn what_is_cut_where_it_does_not_fit_follows_the_system() {
        let widest = |system: &str| {
            let stated = Training { system: system.into(), gpus: Some(64), ..Training::default() };
            let next = |run: &Training| wider(run, &stated, 8);
            let last = std::iter::successors(Some(stated.clone()), next).last().unwrap();
            [last.ulysses, last.ring, last.tp, last.pp].map(|degree| degree.unwrap_or(1))
        };
        assert_eq!(widest("DeepSpeed-Ulysses"), [64, 1, 1, 1]);
        assert_eq!(widest("Ring attention"), [1, 64, 1, 1]);
        assert_eq!(widest("Megatron-LM"), [1, 1, 8, 8]);
        assert_eq!(widest("Megatron-LM SP (TP-sp)"), [1, 1, 64, 1]);
        assert_eq!(widest("LoongTrain"), [8, 8, 1, 1]);
        assert_eq!(widest("DistFlashAttn"), [1, 64, 1, 1]);
    }

    #[test]
    fn long_sequences_are_shared_by_who_shards_weights() {
        let next = |system: &str, seq: u64| {
            let stated = Training { system: system.into(), gpus: Some(64), seq: Some(seq), ..Training::default() };
            let next = wider(&stated, &stated, 8).unwrap();
            [next.ulysses, next.ring, next.tp].map(|degree| degree.unwrap_or(1))
        };
        assert_eq!([next("FSDP", 8192), next("FSDP", LONG)], [[1, 1, 2], [1, 2, 1]]);
        assert_eq!(next("FSDP, Nemotron", LONG), [1, 2, 1]);
        assert_eq!([next("DeepSpeed ZeRO-3", LONG), next("Megatron-LM", LONG)], [[2, 1, 1], [1, 1, 2]]);
    }

    /// PaLM's chips, heads and sequences; and one KV head that all ranks have.
    #[test]
    fn ranks_share_tensors_so_that_the_batch_comes_out_even() {
        let palm = Training {
            gpus: Some(6144),
            global_batch: Some(2048),
            heads: Some(48),
            kv_heads: Some(1),
            ..Training::default()
        };
        assert_eq!(wider(&palm, &palm, 8).unwrap().tp, Some(3));
        let even = Training { gpus: Some(64), ..palm };
        assert_eq!(wider(&even, &even, 8).unwrap().tp, Some(2));
    }

    #[test]
    fn stages_make_the_gpus_of_a_run() {
        let run = Training { gpus: Some(2016), tp: Some(8), layers: Some(54), ..Training::default() };
        let more = |pp| more_stages(&Training { pp: Some(pp), ..run.clone() }, 8);
        assert_eq!([1, 2, 4, 6, 36, 42].map(more), [Some(2), Some(4), Some(9), Some(12), None, None]);
        let open = Training { gpus: None, pp: Some(4), ..run };
        assert_eq!(more_stages(&open, 8), Some(8));
    }

    /// Of 2016 GPUs, 8 and 16 stages leave no multiple of 8 ranks each; 14 and 18 do.
    #[test]
    fn stages_before_tensors_and_none_that_part_experts() {
        let experts = Some(Experts::default());
        let run = Training { gpus: Some(2016), layers: Some(54), experts, ..Training::default() };
        let steps = std::iter::successors(Some(run.clone()), |at| wider(at, &run, 8));
        let found: Vec<_> = steps.skip(1).take(8).map(|at| (at.tp, at.pp.unwrap())).collect();
        assert_eq!(found, [2, 3, 4, 6, 7, 9, 12, 14].map(|pp| (None, pp)));
        let wide = Training { ep: Some(32), gpus: Some(256), tp: Some(2), ..run.clone() };
        let last = std::iter::successors(Some(wide.clone()), |at| wider(at, &wide, 8)).map(|at| at.pp).take(4);
        assert_eq!(last.collect::<Vec<_>>(), [None, Some(2), Some(4), Some(8)]);
        let dense = Training { experts: None, ..run };
        assert_eq!(wider(&dense, &dense, 8).map(|at| (at.tp, at.pp)), Some((Some(2), None)));
    }
}
