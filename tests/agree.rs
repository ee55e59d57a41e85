//! Strides and folding spare work, not truth: `cost` with both equals a walk over every op of every rank,
//! to the picosecond, and what it counts adds up.

mod plans;

use foretrain::cost::{Effort, Frame, cost, series_on};
use foretrain::plan::link::AtomTable;
use foretrain::plan::*;
use foretrain::spec::*;
use foretrain::strategy::Engines;
use foretrain::timeline::Timeline;
use plans::{COPY, FLAT, Host, SM, by_hand, close, model, same, way, work};
use proptest::prelude::*;

/// What holds of any timeline.
fn adds_up(t: &Timeline) {
    for class in &t.classes {
        let (u, step) = (&class.usage, t.step.value());
        assert!(close(u.compute + u.exposed_total() + u.bubble + u.host, step), "rank {}: {u:?} in {step}", class.rank);
        assert!(u.by_kernel.values().sum::<f64>() <= u.compute * (1.0 + 1e-9), "kernels fit in the time they took");
        assert!(u.exposed.values().all(|t| *t >= 0.0));
    }
}

fn agree(plan: &Plan, host: &Host) {
    let all = cost(plan, host.machine(), FLAT).unwrap();
    adds_up(&all);
    for (fold, stride) in [(true, true), (false, true), (true, false)] {
        same(&cost(plan, host.machine(), Effort { fold, stride, spans: false }).unwrap(), &all);
    }
}

/// Costs steps with more microbatches by the one of `few`, op by op as well. Whether the one knew of the others.
fn goes_on(few: &Plan, host: &Host, more: impl Fn(u64) -> Plan) -> bool {
    let machine = host.machine();
    assert!(Frame::fits(few, machine));
    let fold = foretrain::fold::refine(few, &host.cluster);
    let frame = Frame::new(few, &AtomTable::new(few).unwrap(), machine, fold).unwrap();
    let series = series_on(&frame, few, machine).unwrap().expect("names of one plan meet as they do");
    let known: &[u64] = if series.goes_on() { &[0, 1, 2, 7] } else { &[0] };
    for &n in known {
        same(&series.timeline(&frame, few, n), &cost(&more(n), machine, FLAT).unwrap());
    }
    series.goes_on()
}

/// Rings over several nodes, whose classes of ranks are held up by different links and drift apart for many layers.
#[test]
fn classes_that_drift_apart_are_exact() {
    for (dp, ring, ulysses, words, batches) in [
        (1, 16, 1, "default", 5),
        (1, 16, 1, "stripe", 2),
        (1, 16, 1, "dkv-model+merge-at-end", 1),
        (2, 4, 2, "default", 6),
    ] {
        for (slower, launch, seq_len) in [(1.0, 0.0, 16384), (2.0, 1e-6, 8192), (4.0, 0.0, 65536)] {
            let par = Parallelism { options: words.parse().unwrap(), ..way(dp, ring, ulysses) };
            let model = LlmSpec { head_dim: 128, ..model(24, 4, false) };
            let plan = plans::plan(&model, &par, &work(&par, seq_len, 1, batches), SM);
            let host = Host::of(&plan, slower).issuing(launch);
            let all = cost(&plan, host.machine(), FLAT).unwrap();
            same(&cost(&plan, host.machine(), Effort::SUMS).unwrap(), &all);
        }
    }
}

#[test]
fn more_microbatches_are_exact_on_a_grid() {
    let mut known = 0;
    for (dp, ring, ulysses, words) in [
        (8, 1, 1, "default"),
        (4, 2, 1, "all-reduce-grads"),
        (1, 6, 1, "default"),
        (2, 4, 1, "merge-at-end"),
        (2, 2, 2, "no-overlap-grad"),
        (2, 1, 4, "wait-passes"),
        (4, 1, 1, "wait-passes+no-overlap-grad"),
        (2, 4, 1, "gather-kv-prefetch"),
        (4, 2, 1, "shard-4"),
    ] {
        for (zero, slower, launch) in
            [(0, 1.0, 0.0), (1, 30.0, 1e-6), (2, 300.0, 20e-6), (3, 30.0, 60e-6), (1, 1.0, 1e-3), (1, 1.0, 5e-6)]
        {
            // Who waits, or overlaps no sums, shares out no gradients.
            if zero > 1 && (words.contains("wait-passes") || words.contains("no-overlap-grad")) {
                continue;
            }
            if zero != 1 && words.contains("all-reduce") {
                continue;
            }
            // And who shares nothing out, nothing in groups.
            if zero == 0 && words.contains("shard") {
                continue;
            }
            let par = Parallelism { zero, options: words.parse().unwrap(), ..way(dp, ring, ulysses) };
            let plan = |n| plans::plan(&model(5, 4, false), &par, &work(&par, 480, 1, n), SM);
            let host = Host::of(&plan(1), slower).issuing(launch);
            let later = [4, 7].iter().filter(|&&few| goes_on(&plan(few), &host, |more| plan(few + more))).count();
            known += later;
        }
    }
    assert!(known > 36, "{known} of 72");
}

#[test]
fn shortcuts_are_exact_on_a_grid() {
    for (dp, ring, ulysses, micro, batches) in
        [(8, 1, 1, 2, 1), (1, 8, 1, 1, 1), (1, 1, 8, 1, 9), (2, 4, 1, 1, 5), (2, 2, 4, 1, 2), (3, 5, 1, 1, 6)]
    {
        for recompute in [Recompute::None, Recompute::Full] {
            let par = Parallelism { recompute, ..way(dp, ring, ulysses) };
            for (engines, slower) in [(SM, 1.0), (SM, 300.0), (COPY, 3000.0)] {
                let plan = plans::plan(&model(9, 4, false), &par, &work(&par, 480, micro, batches), engines);
                agree(&plan, &Host::of(&plan, slower));
                agree(&plan, &Host::of(&plan, slower).issuing(60e-6));
            }
        }
    }
}

#[test]
fn shortcuts_are_exact_for_every_way_to_bring_kv() {
    let ways = [
        "contiguous",
        "ring-inside",
        "gather-kv",
        "gather-kv-prefetch+contiguous+ring-inside",
        "a2a-separate",
        "replicate-after",
        "pad-heads+a2a-separate+replicate-after",
    ];
    for words in ways {
        for (ring, ulysses, per_node, slower) in [(3, 2, 6, 1.0), (4, 2, 4, 30.0), (2, 4, 2, 1000.0)] {
            let par = Parallelism { options: words.parse().unwrap(), ..way(2, ring, ulysses) };
            let kv_heads = if words.contains("replicate") { 1 } else { 8 };
            let heads = if words.contains("pad") { 7 } else { 8 };
            let llm = LlmSpec { heads, ..model(9, kv_heads, false) };
            let plan = plans::plan(&llm, &par, &work(&par, 480, 2, 3), SM);
            agree(&plan, &Host::new(plan.ranks(), per_node, slower));
        }
    }
}

#[test]
fn shortcuts_are_exact_for_every_ring() {
    for words in ["stripe", "dkv-model", "burst+kv-in-two", "merge-at-end", "merge-in-kernel+one-comm", "double-ring-2"]
    {
        for (ring, ulysses, per_node, slower) in [(4, 1, 8, 1.0), (4, 2, 4, 30.0), (6, 1, 3, 1000.0)] {
            let par = Parallelism { options: words.parse().unwrap(), ..way(2, ring, ulysses) };
            let plan = plans::plan(&model(9, 4, false), &par, &work(&par, 480, 2, 3), SM);
            agree(&plan, &Host::new(plan.ranks(), per_node, slower));
        }
    }
}

/// Windows in some layers or all, dense layers where a list puts them: with shortcuts, op by op, and event by event.
#[test]
fn windows_are_the_same_for_every_interpreter() {
    let turns = |n: u64| (0..n).map(|layer| layer % 3 != 2).collect::<Vec<bool>>();
    let near = |window, windowed| LlmSpec { window: Some(window), windowed, ..model(6, 4, false) };
    let moe = MoeSpec { experts: 8, top_k: 2, ffn: 64, ..MoeSpec::default() };
    let oss = LlmSpec { moe: Some(moe), clamped_experts: true, dense_at: vec![0, 3], ..near(40, turns(6)) };
    let par = |par: Parallelism, words: &str| Parallelism { zero: 1, options: words.parse().unwrap(), ..par };
    let one = Parallelism::default();
    for (llm, par) in [
        (near(40, turns(6)), par(Parallelism { ring: 4, ulysses: 2, ..one }, "default")),
        (near(200, turns(6)), par(Parallelism { ring: 8, ..one }, "stripe")),
        (near(7, vec![]), par(Parallelism { ring: 4, dp: 2, recompute: Recompute::Full, ..one }, "contiguous")),
        (near(40, turns(6)), par(Parallelism { ring: 4, ..one }, "gather-kv-prefetch")),
        (near(40, turns(6)), par(Parallelism { ring: 4, ..one }, "burst")),
        (near(40, turns(6)), par(Parallelism { tp: 2, pp: 2, vp: 1, ..one }, "default")),
        (oss.clone(), par(Parallelism { dp: 2, ulysses: 2, ep: 4, ..one }, "default")),
        (oss, par(Parallelism { dp: 4, ep: 2, recompute: Recompute::Full, ..one }, "default")),
    ] {
        let plan = plans::plan(&llm, &par, &work(&par, 480, 1, 3), SM);
        let host = Host::of(&plan, 1.0);
        agree(&plan, &host);
        let all = cost(&plan, host.machine(), FLAT).unwrap();
        for fold in [true, false] {
            let effort = foretrain::sim::Effort { fold, ..foretrain::sim::Effort::SUMS };
            same(&foretrain::sim::simulate(&plan, host.machine(), &[], effort).unwrap().timeline, &all);
        }
    }
}

/// KV gathered head by head: attention that reads a buffer for each of more heads than most ops have operands.
#[test]
fn shortcuts_are_exact_for_many_kv_heads() {
    for kv_heads in [8, 16, 32] {
        let par = Parallelism { options: "gather-kv-prefetch".parse().unwrap(), ..way(2, 4, 1) };
        let llm = LlmSpec { heads: 32, window: Some(100), ..model(3, kv_heads, false) };
        let plan = plans::plan(&llm, &par, &work(&par, 480, 1, 3), SM);
        agree(&plan, &Host::of(&plan, 1.0));
        goes_on(&plan, &Host::of(&plan, 1.0), |more| plans::plan(&llm, &par, &work(&par, 480, 1, 3 + more), SM));
    }
}

/// Norms of heads and latent attention, and dense layers before those with experts.
#[test]
fn shortcuts_are_exact_for_other_layers() {
    let mla = MlaSpec { q_lora: Some(24), kv_lora: 16, rope_dim: 8, nope_dim: 16, v_dim: 12 };
    let groups = Some(Groups { count: 4, kept: 2, score: GroupScore::TwoBest });
    let moe = MoeSpec { experts: 8, top_k: 2, ffn: 64, shared_ffn: 32, dense_layers: 3, groups, ..MoeSpec::default() };
    let latent = LlmSpec { mla: Some(mla), ..model(9, 8, false) };
    let norms = LlmSpec { qk_norm: true, ..model(9, 4, false) };
    let mixed = LlmSpec { moe: Some(moe), ..latent.clone() };
    let one = Parallelism { zero: 1, ..Parallelism::default() };
    for (llm, par) in [
        (&latent, Parallelism { ring: 4, ulysses: 2, ..one }),
        (&latent, Parallelism { tp: 2, ring: 2, recompute: Recompute::Full, ..one }),
        (&norms, Parallelism { tp: 2, dp: 2, zero: 3, ..one }),
        (&norms, Parallelism { pp: 3, dp: 2, ..one }),
        (&mixed, Parallelism { dp: 4, ep: 4, ..one }),
        (&mixed, Parallelism { dp: 2, ep: 2, pp: 2, ..one }),
        (&norms, Parallelism { pp: 3, dp: 2, zero: 3, ..one }),
        (&norms, Parallelism { tp: 8, dp: 2, zero: 2, ..one }),
        (&mixed, Parallelism { dp: 4, ep: 2, pp: 2, zero: 3, ..one }),
        (&mixed, Parallelism { dp: 8, ep: 2, zero: 2, options: "shard-4".parse().unwrap(), ..one }),
    ] {
        let plan = plans::plan(llm, &par, &work(&par, 480, 1, 4), SM);
        agree(&plan, &Host::of(&plan, 1.0));
    }
}

/// Layers of several kinds in turns, each a block of its own.
#[test]
fn shortcuts_are_exact_for_hybrids() {
    let hybrid = LlmSpec::find("tiny-hybrid").unwrap();
    let one = Parallelism { zero: 1, ..Parallelism::default() };
    for par in [
        Parallelism { dp: 4, ep: 4, ..one },
        Parallelism { tp: 2, dp: 2, ep: 4, recompute: Recompute::Full, ..one },
        Parallelism { pp: 2, dp: 2, ep: 2, ..one },
        Parallelism { pp: 2, dp: 4, ep: 2, zero: 3, ..one },
    ] {
        let plan = plans::plan(&hybrid, &par, &work(&par, 480, 1, 4), SM);
        agree(&plan, &Host::of(&plan, 1.0));
    }
}

/// What takes turns takes more time, and what sends less takes less.
#[test]
fn the_ring_that_overlaps_more_is_faster() {
    let step = |words: &str| {
        let par = Parallelism { options: words.parse().unwrap(), ..way(1, 8, 1) };
        let plan = plans::plan(&model(2, 8, false), &par, &work(&par, 32768, 1, 1), COPY);
        cost(&plan, Host::of(&plan, 30.0).machine(), FLAT).unwrap().step.value()
    };
    assert!(step("default") < step("one-comm"));
    // Half the bytes of dKV, and none of them exposed at the end.
    assert!(step("dkv-model") < step("default"));
    assert!(step("merge-in-kernel") <= step("default"));
}

fn staged(pp: u32, vp: u32, batches: u64, par: Parallelism, slower: f64) {
    let par = Parallelism { pp, vp, ..par };
    for (engines, tie) in [(SM, true), (COPY, false)] {
        let plan = plans::plan(&model(4 * u64::from(pp * vp), 4, tie), &par, &work(&par, 240, 1, batches), engines);
        agree(&plan, &Host::of(&plan, slower));
    }
}

#[test]
fn shortcuts_are_exact_on_pipelines() {
    for (pp, vp, batches, dp, ring, ulysses) in [
        (2, 1, 1, 1, 1, 1),
        (4, 1, 7, 2, 1, 1),
        (3, 1, 5, 1, 3, 1),
        (2, 3, 4, 1, 1, 2),
        (4, 2, 8, 2, 1, 1),
        (3, 2, 3, 1, 2, 2),
    ] {
        for recompute in [Recompute::None, Recompute::Full] {
            for slower in [1.0, 300.0, 10_000.0] {
                staged(pp, vp, batches, Parallelism { recompute, ..way(dp, ring, ulysses) }, slower);
            }
        }
        if dp > 1 {
            let options = "pp-inside".parse().unwrap();
            staged(pp, vp, batches, Parallelism { options, ..way(dp, ring, ulysses) }, 300.0);
        }
    }
}

/// More transfers than ports keep in mind.
#[test]
fn shortcuts_are_exact_on_long_pipelines_of_rings() {
    for (pp, vp, batches, ring, ulysses, words) in
        [(2, 1, 24, 4, 1, "default"), (3, 1, 18, 4, 1, "no-overlap-p2p"), (2, 2, 16, 3, 2, "default")]
    {
        for slower in [1.0, 300.0, 10_000.0] {
            let par = Parallelism { options: words.parse().unwrap(), ..way(1, ring, ulysses) };
            staged(pp, vp, batches, par, slower);
        }
    }
}

/// Backward passes in two halves, the second of which waits.
#[test]
fn shortcuts_are_exact_where_gradients_of_weights_wait() {
    for (pp, batches, dp, ring, words) in [
        (2, 1, 1, 1, "zb-h1"),
        (4, 7, 2, 1, "zb-h1"),
        (3, 5, 1, 3, "zb-h1+no-overlap-grad"),
        (4, 6, 2, 1, "zb-h1+no-overlap-p2p"),
    ] {
        for slower in [1.0, 300.0, 10_000.0] {
            let par = Parallelism { options: words.parse().unwrap(), ..way(dp, ring, 1) };
            staged(pp, 1, batches, par, slower);
            staged(pp, 1, batches, Parallelism { recompute: Recompute::Full, ..par }, slower);
        }
    }
}

/// The same where stages are folded, and some wait.
#[test]
fn shortcuts_are_exact_where_stages_are_folded() {
    for (pp, batches, dp, ring, recompute, words) in [
        (2, 4, 1, 1, Recompute::None, "dualpipe-v"),
        (3, 8, 2, 1, Recompute::None, "dualpipe-v"),
        (4, 13, 1, 2, Recompute::None, "dualpipe-v+no-overlap-grad"),
        (3, 7, 2, 1, Recompute::Full, "dualpipe-v"),
        (2, 3, 1, 1, Recompute::None, "zb-v"),
        (4, 9, 2, 1, Recompute::Full, "zb-v"),
        (3, 8, 2, 1, Recompute::None, "v-half+no-overlap-grad"),
        (4, 13, 1, 2, Recompute::None, "v-half"),
        (4, 11, 2, 1, Recompute::None, "v-min"),
    ] {
        for slower in [1.0, 300.0, 10_000.0] {
            let par = Parallelism { recompute, options: words.parse().unwrap(), ..way(dp, ring, 1) };
            staged(pp, 2, batches, par, slower);
        }
    }
}

/// Nor do they lose sight of a CPU that waits, or of sums that nobody overlaps.
#[test]
fn shortcuts_are_exact_where_the_cpu_waits() {
    for (pp, vp, dp, batches, words) in [
        (4, 1, 2, 7, "no-sp+scatter-p2p+no-overlap-p2p"),
        (4, 2, 1, 8, "no-sp+scatter-p2p"),
        (1, 1, 4, 5, "wait-passes"),
        (1, 1, 4, 4, "wait-passes+no-overlap-grad"),
        (4, 1, 2, 7, "no-overlap-p2p"),
        (3, 1, 2, 5, "no-overlap-p2p+no-overlap-grad"),
        (4, 2, 1, 8, "no-overlap-p2p+no-overlap-grad"),
    ] {
        let tp = if words.contains("scatter") { 2 } else { 1 };
        let par = Parallelism { pp, vp, tp, options: words.parse().unwrap(), zero: 1, ..way(dp, 1, 1) };
        let plan = plans::plan(&model(4 * u64::from(pp * vp), 4, true), &par, &work(&par, 240, 1, batches), COPY);
        for launch in [0.0, 1e-6, 60e-6] {
            agree(&plan, &Host::of(&plan, 300.0).issuing(launch));
        }
    }
}

/// What waits takes longer, by the more the slower the CPU issues: it cannot run ahead of the device.
#[test]
fn who_waits_is_slower() {
    let step = |pp: u32, dp: u32, words: &str, launch: f64| {
        let par = Parallelism { pp, options: words.parse().unwrap(), zero: 0, ..way(dp, 1, 1) };
        let plan = plans::plan(&model(8, 4, false), &par, &work(&par, 4096, 1, 6), COPY);
        cost(&plan, Host::of(&plan, 30.0).issuing(launch).machine(), Effort::SUMS).unwrap().step.value()
    };
    for (pp, dp, words) in [(4, 1, "no-overlap-p2p"), (1, 4, "no-overlap-grad"), (1, 4, "wait-passes")] {
        let lost = |launch: f64| step(pp, dp, words, launch) - step(pp, dp, "default", launch);
        assert!(lost(1e-6) > 0.0, "{words}");
        assert!(words == "no-overlap-grad" || lost(20e-6) > lost(1e-6), "{words}: {} {}", lost(20e-6), lost(1e-6));
    }
}

/// Crews that take turns find what one order of all ops of all ranks finds, where nothing is shared: spans are
/// taken from such an order.
#[test]
fn crews_find_what_one_order_of_all_ops_finds() {
    let grids = [(2, 1, 3), (4, 1, 9), (4, 2, 8), (3, 3, 6)];
    for ((pp, vp, batches), words) in grids.iter().flat_map(|grid| ["", "no-overlap-p2p"].map(|words| (*grid, words))) {
        let par = Parallelism { pp, vp, zero: 0, options: words.parse().unwrap(), ..Parallelism::default() };
        let plan = plans::plan(&model(2 * u64::from(pp * vp), 4, false), &par, &work(&par, 240, 1, batches), COPY);
        for late in [0.0, 1e-5, 1e-2] {
            // No time on the ports, which crews and one order would come to in turns of their own.
            let mut host = Host::of(&plan, 1e-9).issuing(if words.is_empty() { 0.0 } else { 5e-6 });
            host.stack.p2p_latency.value = foretrain::units::Seconds::new(late);
            let crews = cost(&plan, host.machine(), Effort::SUMS).unwrap();
            let order = cost(&plan, host.machine(), Effort::ALL_SPANS).unwrap();
            same(&crews, &order);
        }
    }
}

#[derive(Debug, Clone)]
struct Case {
    par: Parallelism,
    model: LlmSpec,
    work: Workload,
    engines: Engines,
    /// GPUs of a node: all, or a part that divides them.
    per_node: u32,
    slower: f64,
    /// Seconds in which the CPU issues an op.
    launch: f64,
}

fn cases() -> impl Strategy<Value = Case> {
    let ranks = (1..=3u32, 1..=5u32, prop::sample::select(vec![1u32, 2, 4, 8]), 0..4u32, any::<bool>());
    let shape = (1..=14u64, prop::sample::select(vec![1u64, 2, 4, 8]), any::<bool>());
    let load = (1..=6u64, 1..=2u64, 1..=9u64);
    let machine = (any::<bool>(), any::<prop::sample::Index>(), 0.0..4.0f64, -7.0..-3.0f64);
    (ranks, shape, load, machine).prop_map(|((dp, ring, ulysses, zero, again), shape, load, machine)| {
        let recompute = if again { Recompute::Full } else { Recompute::None };
        let par = Parallelism { dp, ring, ulysses, zero, recompute, ..Parallelism::default() };
        let seq = 2 * u64::from(ring * ulysses) * load.0.pow(3);
        let whole = par.ranks();
        let widths: Vec<u32> = (1..=whole).filter(|w| whole.is_multiple_of(*w)).collect();
        Case {
            par,
            model: model(shape.0, shape.1, shape.2),
            work: work(&par, seq, load.1, load.2),
            engines: if machine.0 { SM } else { COPY },
            per_node: *machine.1.get(&widths),
            slower: 10f64.powf(machine.2),
            launch: 10f64.powf(machine.3),
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn shortcuts_are_exact_on_any_mesh(case in cases()) {
        let plan = plans::plan(&case.model, &case.par, &case.work, case.engines);
        let host = Host::new(plan.ranks(), case.per_node, case.slower).issuing(case.launch).in_python(1 + case.par.dp % 4);
        agree(&plan, &host);
        if Frame::fits(&plan, host.machine()) {
            let batches = case.work.global_batch / (u64::from(case.par.dp) * case.work.micro_batch);
            let with = |more| work(&case.par, case.work.seq_len, case.work.micro_batch, batches + more);
            goes_on(&plan, &host, |more| plans::plan(&case.model, &case.par, &with(more), case.engines));
        }
    }
}

/// Bytes that ranks send over a step by the ops of their lines, and those that they receive.
fn sent_and_received(plan: &Plan) -> (u64, u64) {
    let atoms = link::AtomTable::new(plan).unwrap();
    let line = link::Line::program(plan, &atoms, 0).unwrap();
    let bytes = |p: &link::Place| {
        let tensor = &plan.tensors[p.tensor as usize];
        (p.rows[1] - p.rows[0]) * tensor.row_len() * tensor.dtype.size()
    };
    let all = |i: usize, transfers: &[link::Place]| match line.nodes[i].op.kind {
        OpKind::Transfer { .. } => transfers.iter().map(bytes).sum(),
        _ => 0,
    };
    let nodes = 0..line.nodes.len();
    let sums: Vec<(u64, u64)> = nodes.map(|i| (all(i, line.reads(i)), all(i, line.writes(i)))).collect();
    sums.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

#[test]
fn what_is_sent_is_received_and_counted() {
    let par = way(2, 5, 1);
    let plan = plans::plan(&model(3, 4, false), &par, &work(&par, 480, 1, 3), SM);
    let (sent, received) = sent_and_received(&plan);
    assert_eq!(sent, received);
    let usage = cost(&plan, Host::new(10, 5, 1.0).machine(), Effort::SUMS).unwrap().mean();
    let elems = |kind| plan.tensors.iter().filter(move |t| t.kind == kind).map(|t| t.elems() * u64::from(t.slots));
    let (grads, params): (u64, u64) = (elems(TensorKind::Grad).sum::<u64>() - 1, elems(TensorKind::Param).sum());
    // Reduce-scatter of fp32 gradients, all-gather of bf16 weights, all-reduce of the loss.
    let collectives = 0.9 * (4 * grads + 2 * params + 2 * 4) as f64;
    assert!(close(usage.bytes_scale_up + usage.bytes_scale_out, sent as f64 + collectives));
}

#[test]
fn ranks_on_one_device_take_turns() {
    let par = way(2, 2, 1);
    let plan = plans::plan(&model(5, 4, false), &par, &work(&par, 96, 1, 4), COPY);
    let host = Host::of(&plan, 1.0);
    let devices = [0, 1, 0, 1];
    let machine = foretrain::cost::Machine { devices: Some(&devices), ..host.machine() };
    let (all, few) = (cost(&plan, machine, FLAT).unwrap(), cost(&plan, machine, Effort::SUMS).unwrap());
    same(&few, &all);
    let alone = cost(&plan, host.machine(), FLAT).unwrap();
    let busy = |t: &Timeline| t.classes.iter().map(|c| c.usage.compute).fold(0.0, f64::max);
    assert!(all.step.value() >= 2.0 * busy(&alone), "two ranks' kernels, one after the other");
}

#[test]
fn a_slow_cpu_sets_the_pace() {
    let par = way(1, 2, 2);
    let plan = plans::plan(&model(5, 4, false), &par, &work(&par, 96, 1, 4), SM);
    let step = |launch: f64| cost(&plan, Host::of(&plan, 1.0).issuing(launch).machine(), Effort::SUMS).unwrap();
    let ops = link::Line::program(&plan, &link::AtomTable::new(&plan).unwrap(), 0).unwrap().nodes.len() as f64;
    let (free, slow) = (step(0.0), step(1e-3));
    assert_eq!(free.mean().host, 0.0);
    // Every op of tiny kernels waits for the CPU. The hops that a mask skips are issued by nobody.
    let pace = slow.step.value() / 1e-3;
    assert!(pace > 0.9 * ops && pace < ops + 10.0, "{pace} ops of {ops}");
    assert!(slow.mean().host > 0.8 * slow.step.value());
}

/// Elements of the tensors of plans by hand.
const MANY: u64 = 1 << 20;

/// Declares a tensor and fills every slot of it.
fn filled(b: &mut Builder, name: &str, slots: u32) -> Buf {
    let t = b.tensor(name, &[MANY], Dtype::F32, TensorKind::CommBuffer, slots);
    for slot in 0..slots {
        b.compute(&format!("fill.{name}.{slot}"), Kernel::Fill { elems: MANY }, &[], &[t.slot(slot)]);
    }
    t
}

/// Iterations that look alike until one of them meets a slot that something slow is still writing.
#[test]
fn a_stride_stops_short_of_what_is_still_under_way() {
    let plan = by_hand(|b, via| {
        let (src, walked, out) = (filled(b, "src", 1), filled(b, "walked", 12), filled(b, "out", 1));
        b.open("read");
        let x = b.formal("x");
        b.compute("read", Kernel::Cast { elems: MANY }, &[x], &[out]);
        let block = b.close();
        b.hop("slow", via, 1, src, walked.slot(8), 0);
        b.call("reads", block, 12, &[each(walked, 0, 1, 12)]);
    });
    agree(&plan, &Host::of(&plan, 30.0));
}

/// Iterations that look alike until they meet what an iteration some way back sent off slowly.
#[test]
fn a_stride_waits_for_what_iterations_further_back_began() {
    for (slots, behind) in [(3, 1), (5, 1), (5, 3), (7, 2)] {
        let plan = by_hand(|b, via| {
            let (src, ring, out) = (filled(b, "src", 1), filled(b, "ring", slots), filled(b, "out", 1));
            b.open("pass");
            let [from, to] = ["from", "to"].map(|name| b.formal(name));
            b.hop("hop", via, 1, src, to, 0);
            b.compute("read", Kernel::Cast { elems: MANY }, &[from], &[out]);
            let block = b.close();
            b.call("passes", block, 24, &[each(ring, behind, 1, slots), each(ring, 0, 1, slots)]);
        });
        agree(&plan, &Host::of(&plan, 30.0));
    }
}
