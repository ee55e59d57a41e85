//! Threads of a CPU as ranks.

use foretrain::calibrate::shapes;
use foretrain::cluster::Cluster;
use foretrain::device::Profile;
use foretrain::sim::{Effort, Fault, Machine, plays_threads, simulate};
use foretrain::spec::*;

/// What is asked of threads that threads do not have they are asked of as devices, where there is a core for each; and
/// nothing is refused there that any other machine can.
#[test]
fn threads_with_a_core_each_have_slack_and_blocks_and_hang() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/measured/cpu/profile.json");
    let profile = Profile::load(&file).unwrap();
    let (gpu, stack) = (GpuSpec::find("cpu-core").unwrap(), StackSpec::find("cpu").unwrap());
    let dead = [Fault::dead("1@0").unwrap()];
    let slow = [Fault::slow_gpu("1:2").unwrap()];
    let spans = Effort::SPANS;
    for (seed, ranks) in [(1, 2), (2, 2), (11, 4)] {
        let plan = shapes::fresh(seed, ranks).plan().unwrap();
        let cluster = Cluster::new(&ClusterSpec::find("local-cpu").unwrap(), &gpu, plan.ranks()).unwrap();
        let machine = Machine { cluster: &cluster, stack: &stack, kernels: &profile, devices: None };
        let run = |faults: &[Fault], effort| simulate(&plan, machine, faults, effort);
        assert!(plays_threads(&plan, machine, &slow, spans), "threads may be slow");
        let beyond =
            [(&dead[..], spans), (&[], Effort { apart: true, ..spans }), (&[], Effort { blocks: true, ..spans })];
        if ranks > 2 {
            for (faults, effort) in beyond {
                let why = run(faults, effort).unwrap_err().to_string();
                assert!(why.contains("4 ranks on 2 cores") && why.contains("cores as ranks"), "{why}");
            }
            continue;
        }
        let [hung, apart, blocks] = beyond.map(|(faults, effort)| run(faults, effort).unwrap());
        let hang = hung.hang.expect("nobody comes past a dead rank");
        assert_eq!(hang.dead, [1]);
        assert!(hang.waiting.iter().any(|w| w.rank == 0 && w.waits_for == [1]), "{:?}", hang.waiting);
        // As of any other machine: some op has none, and none has less.
        let why = apart.why.unwrap();
        let all: Vec<f64> = why.slack.iter().flatten().copied().collect();
        assert_eq!(all.len(), apart.timeline.classes.iter().map(|c| c.spans.len()).sum::<usize>());
        assert!(all.iter().all(|s| *s >= 0.0) && all.contains(&0.0));
        // Blocks are the same kernels one after the other; a rank that is half as fast makes the step longer.
        let step = apart.timeline.step.value();
        assert!((blocks.timeline.step.value() / step - 1.0).abs() < 1e-6);
        let slower = run(&slow, Effort { apart: true, ..spans }).unwrap();
        assert!(slower.timeline.step.value() > step);
    }
}
