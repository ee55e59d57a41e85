//! Every way of sharing a step out.

use crate::step::{ENGINES, experts, hold, model, none, plan};
use foretrain::plan::Dtype;
use foretrain::spec::Workload;
use foretrain::spec::{Parallelism, Recompute};
use foretrain::strategy::build;

#[test]
fn one_rank_is_the_reference() {
    hold(&plan(none(), 2), &[0]);
}

#[test]
fn a_ring_on_one_gpu_and_on_two() {
    for devices in [&[0][..], &[0, 1]] {
        hold(&plan(Parallelism { ring: 4, ..none() }, 1), devices);
    }
}

#[test]
fn replicas_of_usp_are_the_reference() {
    hold(&plan(Parallelism { ulysses: 2, ring: 2, dp: 2, zero: 1, ..none() }, 1), &[0]);
}

#[test]
fn tensor_parallel_with_recomputation() {
    hold(&plan(Parallelism { tp: 2, dp: 2, recompute: Recompute::Full, ..none() }, 1), &[0]);
}

#[test]
fn two_ranks_have_the_same_kv_head() {
    let work =
        Workload { seq_len: 128, global_batch: 1, micro_batch: 1, dtype: Dtype::Bf16, documents: Default::default() };
    hold(&build(&model(1, 1), &work, &Parallelism { tp: 2, ..none() }, ENGINES).unwrap(), &[0, 1]);
}

#[test]
fn stages_are_the_reference_in_several_schedules() {
    hold(&plan(Parallelism { pp: 2, dp: 2, ..none() }, 2), &[0]);
    let options = "zb-h1".parse().unwrap();
    hold(&plan(Parallelism { pp: 2, dp: 2, options, ..none() }, 2), &[0]);
    for (words, recompute) in [("dualpipe-v", Recompute::None), ("v-min", Recompute::Full)] {
        let par = Parallelism { pp: 2, vp: 2, recompute, options: words.parse().unwrap(), ..none() };
        let documents = Default::default();
        let work = Workload { seq_len: 128, global_batch: 4, micro_batch: 1, dtype: Dtype::Bf16, documents };
        hold(&build(&model(4, 4), &work, &par, ENGINES).unwrap(), &[0]);
    }
}

#[test]
fn nobody_has_the_weights_whole() {
    hold(&plan(Parallelism { dp: 4, zero: 3, ..none() }, 1), &[0, 0, 1, 1]);
}

#[test]
fn nobody_of_a_group_has_the_weights_whole() {
    let options = "shard-2".parse().unwrap();
    hold(&plan(Parallelism { dp: 4, zero: 3, options, ..none() }, 1), &[0, 0, 1, 1]);
    hold(&plan(Parallelism { pp: 2, dp: 2, zero: 3, ..none() }, 2), &[0, 1]);
}

/// Shares of the sums are taken where each rank stands among those with the same weights.
#[test]
fn everyone_has_the_sums_whole() {
    let options = "all-reduce-grads".parse().unwrap();
    hold(&plan(Parallelism { dp: 2, ring: 2, zero: 1, options, ..none() }, 2), &[0, 0, 0, 0]);
}

/// Rows of networks and logits in pieces, where they are not all of a buffer.
#[test]
fn networks_and_logits_in_pieces() {
    let options = "mlp-chunks-3+loss-chunks-3".parse().unwrap();
    let par = Parallelism { tp: 2, recompute: Recompute::Full, options, ..none() };
    hold(&plan(par, 2), &[0, 0]);
}

#[test]
fn experts_are_the_reference_by_every_way() {
    for words in ["default", "dispatch-deepep-v1-normal", "dispatch-deepep-v1-ll", "dispatch-allgather"] {
        hold(&experts(words, 2), &[0]);
        hold(&experts(&format!("{words}+recompute-moe"), 2), &[0]);
    }
}
