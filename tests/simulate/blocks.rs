//! Steps block by block, as predicted and as measured.

use crate::plans::{self, COPY, Host, SM, model, way, work};
use crate::played::{step, two_nodes};
use foretrain::plan::*;
use foretrain::sim::{BlockTimes, Effort, Fault, simulate, simulate_measured};
use foretrain::spec::*;

/// Block by block a step takes as long as op by op, but for SMs that come and go inside a block.
#[test]
fn blocks_take_as_long_as_their_ops() {
    let run = |plan: &Plan, host: &Host, blocks| {
        simulate(plan, host.machine(), &[], Effort { blocks, why: false, ..Effort::SPANS }).unwrap()
    };
    for (dp, ring, ulysses, pp) in [(8, 1, 1, 1), (2, 4, 1, 1), (2, 2, 2, 1), (2, 1, 1, 4)] {
        // What SMs come and go for inside a block is up to 0.0045 of a step.
        for (engines, bound) in [(COPY, 0.0), (SM, 0.01)] {
            let par = Parallelism { pp, ..way(dp, ring, ulysses) };
            let plan = plans::plan(&model(8, 4, false), &par, &work(&par, 960, 1, 3), engines);
            // A late CPU is another thing that blocks do not know inside themselves.
            let host = Host::of(&plan, 1.0).issuing(0.0);
            let (ops, blocks) = (run(&plan, &host, false), run(&plan, &host, true));
            assert!(blocks.events < ops.events, "{} events, {} op by op", blocks.events, ops.events);
            let off = (step(&blocks) / step(&ops) - 1.0).abs();
            assert!(off <= bound, "{dp} {ring} {ulysses} {pp}: {} in blocks, {} op by op", step(&blocks), step(&ops));
            // Work is the same, and so is what is on every lane.
            let (a, b) = (ops.timeline.mean(), blocks.timeline.mean());
            assert_eq!((a.flops, a.by_kernel, a.comm), (b.flops, b.by_kernel, b.comm));
        }
    }
    let (plan, host) = two_nodes();
    let jitter = [Fault::jitter("normal:0.1").unwrap()];
    let why = simulate(&plan, host.machine(), &jitter, Effort { blocks: true, ..Effort::SUMS }).unwrap_err();
    assert!(why.to_string().contains("op by op"), "{why}");
}

/// What was measured of blocks goes in place of what their kernels add up to: the predicted times change nothing, longer
/// ones do, and names that no block has are refused.
#[test]
fn measured_blocks_take_what_was_measured() {
    for par in [way(2, 2, 2), Parallelism { pp: 2, tp: 2, zero: 0, ..Parallelism::default() }] {
        let plan = plans::plan(&model(4, 4, false), &par, &work(&par, 4096, 1, 2), COPY);
        let host = Host::of(&plan, 1.0);
        let effort = Effort { blocks: true, ..Effort::SUMS };
        let run = |times: &BlockTimes| simulate_measured(&plan, host.machine(), &[], effort, times);
        let of = |times: &BlockTimes| run(times).unwrap().timeline.step;
        let predicted = BlockTimes::predicted(&plan, host.machine()).unwrap();
        assert!(predicted.blocks.len() > 10, "{predicted:?}");
        let alone = of(&BlockTimes::default());
        assert_eq!(of(&predicted), alone);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("blocks.json");
        let mut doubled = predicted.clone();
        doubled.blocks.iter_mut().for_each(|block| block.time_s *= 2.0);
        std::fs::write(&path, serde_json::to_string(&doubled).unwrap()).unwrap();
        let read = BlockTimes::load(&path).unwrap();
        let told = |times: &BlockTimes| times.blocks.iter().map(|b| b.block.clone()).collect::<Vec<_>>();
        assert_eq!(told(&read), told(&doubled));
        assert!(read.blocks.iter().zip(&doubled.blocks).all(|(a, b)| plans::close(a.time_s, b.time_s)));
        assert!(of(&read) > alone);
        // Kernels in a step of twice the GPU's are twice as long, whatever waits in between.
        let compute = |times: &BlockTimes| run(times).unwrap().timeline.mean().compute;
        assert!(plans::close((compute(&read) / compute(&predicted) * 1e6).round(), 2e6));
        let refused = |change: &dyn Fn(&mut BlockTimes)| {
            let mut times = predicted.clone();
            change(&mut times);
            std::fs::write(&path, serde_json::to_string(&times).unwrap()).unwrap();
            BlockTimes::load(&path).and_then(|times| run(&times)).unwrap_err().to_string()
        };
        let why = refused(&|times| times.blocks[0].block = "nowhere".into());
        assert!(why.contains("no block of this plan is called \"nowhere\""), "{why}");
        let why = refused(&|times| times.blocks[1].time_s = -1.0);
        assert!(why.contains("blocks.json") && why.contains("blocks[1].time_s: -1 is not"), "{why}");
        let why = refused(&|times| times.blocks[1].block = times.blocks[0].block.clone());
        assert!(why.contains("blocks[1].block") && why.contains("twice"), "{why}");
        let by_op = simulate_measured(&plan, host.machine(), &[], Effort::SUMS, &predicted).unwrap_err();
        assert!(by_op.to_string().contains("add --fidelity block"), "{by_op}");
    }
}
