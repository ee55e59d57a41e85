//! From step to step, and from checkpoint to checkpoint.

use crate::checkpoint_states::{from_to, states};
use crate::cuda_double::Double;
use crate::dense::SEED;
use crate::step::{OF_A_LOSS, experts, none, options, plan, steps};
use foretrain::exec::cuda::run::train_on;
use foretrain::exec::source::Source;
use foretrain::exec::{Job, Run, train};
use foretrain::plan::{Adam, Plan};
use foretrain::spec::Parallelism;
use std::path::Path;

/// Three steps of two replicas have the losses that the CPU's kernels have.
fn goes_on(zero: u32, words: &str) {
    let plan = plan(Parallelism { dp: 2, zero, options: words.parse().unwrap(), ..none() }, 1);
    let losses: Vec<f64> = steps(&plan, &[0], 3, 1).iter().map(|run| run.loss).collect();
    let mut want = vec![];
    let job = Job { source: &Source::seeded(7), steps: 3, keep_last: false, watch: None };
    train(&plan, &options(&plan, &[0]), &job, &mut |_, run| {
        want.push(run.loss);
        Ok(())
    })
    .unwrap();
    for (got, want) in losses.iter().zip(&want) {
        assert!((got - want).abs() < OF_A_LOSS * want, "{losses:?} are not {want:?}");
    }
    // Another order of what streams leave open brings the same bits.
    let again: Vec<f64> = steps(&plan, &[0], 3, 2).iter().map(|run| run.loss).collect();
    assert_eq!(again, losses);
}

#[test]
fn training_goes_on_from_the_weights_that_a_step_left() {
    goes_on(1, "default");
}

/// Operation by operation, and out of shares that are made of the copy in fp32 ahead of a step.
#[test]
fn training_goes_on_where_adam_has_two_kernels() {
    for (zero, words) in [(0, "foreach"), (1, "foreach+overlap-gather"), (3, "foreach+bf16-moments")] {
        goes_on(zero, words);
    }
}

/// Without a copy in fp32 it is the weights that are updated: whole, and a share of them.
#[test]
fn training_goes_on_from_weights_without_a_master_copy() {
    for (zero, words) in [(0, "no-master"), (1, "bf16-moments"), (3, "bf16-moments+no-master")] {
        goes_on(zero, words);
    }
}

/// Matrices move by their orthogonal factors: where every rank has all of them, of slices that two ranks exchange, of
/// experts. Five steps of Newton and Schulz carry every rounding of bf16 on: one element is off by 0.03 to 0.1 of the largest
/// movement, all of them by 0.03 to 0.08 of what they move by.
#[test]
fn matrices_move_by_muon_as_on_threads() {
    let ways = [(0, "muon"), (1, "muon"), (3, "muon"), (1, "muon+bf16-moments+no-master")];
    let of =
        |(zero, words): (u32, &str)| plan(Parallelism { dp: 2, zero, options: words.parse().unwrap(), ..none() }, 1);
    for plan in ways.into_iter().map(of).chain([experts("muon", 2)]) {
        let words = plan.about.par.options.to_string();
        let plan = plan.with_optimizer(Adam { lr: 0.1, weight_decay: 0.1, ..Adam::default() });
        let source = Source::seeded(SEED);
        let job = Job { source: &source, steps: 1, keep_last: true, watch: None };
        let mut want = None;
        train(&plan, &options(&plan, &[0]), &job, &mut |_, run| {
            want = Some(run);
            Ok(())
        })
        .unwrap();
        let (got, want, before) = (steps(&plan, &[0], 1, 1).remove(0), want.unwrap(), source.weights(&plan));
        let by_muon: Vec<&str> = plan.params.iter().filter(|p| !p.matrices.is_empty()).map(|p| &*p.name).collect();
        assert!(by_muon.len() >= 3, "{by_muon:?}");
        // What Adam moves goes by the signs of gradients in its first step, those of next to nothing among them.
        for (name, want) in want.weights.iter().filter(|(name, _)| by_muon.contains(&&***name)) {
            let moved = |of: &[f64]| of.iter().zip(&before[name]).map(|(new, old)| new - old).collect::<Vec<f64>>();
            let (got, want) = (moved(&got.weights[name]), moved(want));
            let most = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let off = got.iter().zip(&want).fold(0.0f64, |most, (g, w)| most.max((g - w).abs()));
            let square = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>().sqrt();
            let all_off = square(&mut got.iter().zip(&want).map(|(g, w)| g - w)) / square(&mut want.iter().copied());
            // A router's gradient is small and noisy in bf16, and made orthogonal its noise is as large as all else.
            let [of_one, of_all] = if name.ends_with("mlp.gate.weight") { [0.4, 0.6] } else { [0.15, 0.12] };
            assert!(most > 0.0, "{words}: {name} stays");
            assert!(off < of_one * most && all_off < of_all, "{words}: {name}: {} and {all_off}", off / most);
        }
    }
}

/// Losses of steps on a double of a GPU, or on threads, from a checkpoint and to one.
fn losses(plan: &Plan, on_gpu: bool, steps: u64, load: Option<&Path>, save: Option<(&Path, u64)>) -> Vec<f64> {
    let mut losses = vec![];
    let mut each = |_, run: Run| {
        losses.push(run.loss);
        Ok(())
    };
    from_to((7, steps), load, save, |job| match on_gpu {
        true => train_on(&mut Double::new(1, 8 << 30, 1), plan, &options(plan, &[0]), job, &mut each),
        false => train(plan, &options(plan, &[0]), job, &mut each),
    });
    losses
}

/// What ranks on GPUs save they go on from to the bit; threads do, and other layouts; and what those save has every bit that it had.
#[test]
fn checkpoints_go_from_gpus_to_gpus_and_threads() {
    let dir = tempfile::tempdir().unwrap();
    let sharded = plan(Parallelism { dp: 2, zero: 3, ..none() }, 1);
    let tensor = plan(Parallelism { tp: 2, ..none() }, 2);
    let at = |name: &str| dir.path().join(name);
    let whole = losses(&sharded, true, 4, None, Some((&at("gpu"), 2)));
    assert_eq!(losses(&sharded, true, 2, Some(&at("gpu")), None), whole[2..]);
    let saved = states(&at("gpu"));
    assert!(saved.values().all(|bytes| bytes.iter().any(|b| *b != 0)), "two steps move every state");
    for (i, (plan, on_gpu)) in [(&sharded, false), (&tensor, true), (&tensor, false)].into_iter().enumerate() {
        let to = at(&format!("{i}"));
        let found = losses(plan, on_gpu, 2, Some(&at("gpu")), Some((&to, 2)));
        assert!(states(&to) == saved, "{i}");
        for (loss, want) in found.iter().zip(&whole[2..]) {
            assert!((loss - want).abs() < OF_A_LOSS * want, "{i}: {found:?} are not {:?}", &whole[2..]);
        }
    }
    // From threads to a GPU.
    losses(&tensor, false, 2, None, Some((&at("threads"), 2)));
    losses(&sharded, true, 1, Some(&at("threads")), Some((&at("back"), 2)));
    assert!(states(&at("back")) == states(&at("threads")));
}
