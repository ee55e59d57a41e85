//! A link made slow: messages take the time that it says, in a run and in its prediction, and a ring hides them behind
//! its attention where the plan says that it does. How long anything else takes is the machine's affair, so only
//! what must hold on a busy one is asserted: predictions are those of a profile measured before, and of a run, which others
//! on the machine may hold up, that it does so in one of many tries.

use foretrain::cluster::Cluster;
use foretrain::compare::overlap::Overlap;
use foretrain::cost::{self, Machine, cost};
use foretrain::device::Profile;
use foretrain::exec::{Options, Run, execute};
use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::{Direction, Dtype, Engine, OpKind, Plan};
use foretrain::spec::*;
use foretrain::strategy::{Engines, attention_pass, build};
use foretrain::timeline::{Span, Timeline};
use foretrain::units::{BytesPerSec, Seconds};
use std::path::Path;
use std::sync::OnceLock;

const SM: Engines = Engines { p2p: Engine::Sm { ctas: 1 }, collective: Engine::Sm { ctas: 1 } };

fn profile() -> &'static Profile {
    static PROFILE: OnceLock<Profile> = OnceLock::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/measured/cpu/profile.json");
    PROFILE.get_or_init(|| Profile::load(&path).unwrap())
}

/// What is found when it is looked for again and again, until it is good enough.
fn tries<T>(find: impl Fn() -> T, good: impl Fn(&T) -> bool) -> Result<T, Vec<T>> {
    let mut found = vec![];
    for _ in 0..100 {
        let it = find();
        if good(&it) {
            return Ok(it);
        }
        found.push(it);
    }
    Err(found)
}

fn ring(ring: u32, seq_len: u64) -> Plan {
    let mask = Mask::new(true);
    let spec = AttentionSpec { batch: 1, seq_len, heads: 4, kv_heads: 4, head_dim: 32, mask, dtype: Dtype::F32 };
    attention_pass::build(&spec, Pass::Forward, &Parallelism { ring, ..Parallelism::default() }, SM).unwrap()
}

fn run(plan: &Plan, throttle: Option<Throttle>) -> Run {
    let options = Options::new(1, (0..plan.ranks()).map(|r| r % 2).collect(), true);
    execute(plan, &Options { throttle, ..options }).expect("the plan runs")
}

fn predict(plan: &Plan, throttle: Option<Throttle>) -> Timeline {
    let (gpu, stack) = (GpuSpec::find("cpu-core").unwrap(), StackSpec::find("cpu").unwrap());
    let cluster = Cluster::new(&ClusterSpec::find("local-cpu").unwrap(), &gpu, plan.ranks()).unwrap();
    let mut profile = profile().clone();
    profile.threads.as_mut().unwrap().throttle = throttle;
    let devices: Vec<u32> = (0..plan.ranks()).map(|r| r % 2).collect();
    let machine = Machine { cluster: &cluster, stack: &stack, kernels: &profile, devices: Some(&devices) };
    cost(plan, machine, cost::Effort::ALL_SPANS).unwrap()
}

fn line(plan: &Plan) -> Line<'_> {
    Line::program(plan, &AtomTable::new(plan).unwrap(), 0).unwrap()
}

/// Bytes that each transfer of a rank sends.
fn hops(plan: &Plan) -> Vec<(usize, u64)> {
    let line = line(plan);
    let sent = |node: usize| {
        let OpKind::Transfer { legs, .. } = &line.nodes[node].op.kind else { return None };
        let buf = legs.iter().find(|l| l.dir == Direction::Send)?.buf;
        let place = line.reads(node).iter().find(|p| p.named == buf)?;
        let tensor = &plan.tensors[place.tensor as usize];
        Some((node, (place.rows[1] - place.rows[0]) * tensor.row_len() * tensor.dtype.size()))
    };
    (0..line.nodes.len()).filter_map(sent).collect()
}

fn is_kernel(plan: &Plan) -> Vec<bool> {
    line(plan).nodes.iter().map(|n| matches!(n.op.kind, OpKind::Compute { .. })).collect()
}

fn overlap(plan: &Plan, timeline: &Timeline) -> Overlap {
    let kernels = is_kernel(plan);
    Overlap::of(timeline, &|_, node| kernels[node])
}

/// The shortest kernel that a hop of the ring could hide behind: those of attention that have something to do.
fn shortest_attention(timeline: &Timeline) -> f64 {
    let of = |spans: &[Span]| -> Vec<f64> {
        spans.iter().filter(|s| s.what == "attention").map(|s| s.duration().value()).filter(|t| *t > 2e-5).collect()
    };
    timeline.classes.iter().flat_map(|c| of(&c.spans)).fold(f64::INFINITY, f64::min)
}

#[test]
fn every_hop_takes_latency_and_bytes_in_the_run_and_in_the_prediction() {
    let (plan, throttle) = (ring(3, 96), "20 MB/s,3 ms".parse::<Throttle>().unwrap());
    let (free, slow, predicted) = (run(&plan, None), run(&plan, Some(throttle)), predict(&plan, Some(throttle)));
    let hops = hops(&plan);
    assert_eq!(hops.len(), 2, "{hops:?}");
    for timeline in [&slow.timeline, &predicted] {
        for (class, (node, bytes)) in timeline.classes.iter().flat_map(|c| hops.iter().map(move |h| (c, *h))) {
            let took = class.spans[node].duration().value();
            assert!(took >= throttle.takes(bytes) * (1.0 - 1e-9), "rank {}: {took} for {bytes} bytes", class.rank);
        }
    }
    // The prediction knows of nothing that would make it longer than by a few wake-ups and copies.
    let least: f64 = hops.iter().map(|(_, bytes)| throttle.takes(*bytes)).sum();
    assert!(predicted.step.value() < 2.0 * least, "{} for {least}", predicted.step.value());
    // What is computed and sent is the same.
    assert_eq!((&free.tensors, &free.sent_bytes), (&slow.tensors, &slow.sent_bytes));
    assert!(predict(&plan, None).step.value() < least);
}

/// A rank's link carries one message at a time, so a step is no shorter than all bytes that come in.
#[test]
fn collectives_and_exchanges_of_heads_cross_the_link_too() {
    let model = LlmSpec::find("tiny").unwrap();
    let throttle: Throttle = "30 MB/s,100 us".parse().unwrap();
    for par in [
        Parallelism { tp: 2, ..Parallelism::default() },
        Parallelism { ulysses: 2, ..Parallelism::default() },
        Parallelism { dp: 2, zero: 3, ..Parallelism::default() },
    ] {
        let global_batch = u64::from(par.dp);
        let documents = Documents::default();
        let work = Workload { seq_len: 32, global_batch, micro_batch: 1, dtype: Dtype::F32, documents };
        let plan = build(&model, &work, &par, SM).unwrap();
        let (measured, predicted) = (run(&plan, Some(throttle)), predict(&plan, Some(throttle)));
        // Of two ranks, each receives what the other sends.
        let least = measured.sent_bytes.iter().map(|bytes| throttle.holds(*bytes)).fold(0.0, f64::max);
        assert!(least > 1e-3, "{par:?}: {least}");
        for step in [measured.timeline.step, predicted.step] {
            assert!(step.value() >= least * (1.0 - 1e-9), "{par:?}: {step} for {least} s of bytes");
        }
    }
}

#[test]
fn a_ring_hides_the_hops_that_its_plan_says_it_hides() {
    // So long that waking a thread, which the plan's prediction counts too, is little beside a hop.
    let plan = ring(2, 4096);
    let bytes = hops(&plan)[0].1;
    // A hop of a fourth of the attention beside it, as the one and the other have it.
    let throttle = |free: &Timeline| {
        let bandwidth = BytesPerSec::new(bytes as f64 / (shortest_attention(free) / 4.0));
        Throttle { bandwidth, latency: Seconds::ZERO }
    };
    let (in_plan, in_run) = (throttle(&predict(&plan, None)), throttle(&run(&plan, None).timeline));
    let says = overlap(&plan, &predict(&plan, Some(in_plan)));
    assert!(says.hidden() > 0.4, "the plan hides the hop: {says:?}");
    let looked = || {
        let overlap = overlap(&plan, &run(&plan, Some(in_run)).timeline);
        assert!(overlap.exposed_s <= overlap.under_way_s && overlap.exposed_s >= 0.0);
        overlap
    };
    tries(looked, |overlap| overlap.hidden() > 0.5).expect("half of the hop is hidden");
}

/// What a hop and the attention that is started beside it take, on every rank.
fn beside(plan: &Plan, timeline: &Timeline) -> Vec<(f64, f64)> {
    let hop = hops(plan)[0].0;
    let of = |spans: &[Span]| {
        let at = &spans[hop];
        let starts = |s: &&Span| s.what == "attention" && s.start.value() < at.end.value();
        let attention = spans.iter().filter(starts).map(|s| s.duration().value()).sum();
        (at.duration().value(), attention)
    };
    timeline.classes.iter().map(|c| of(&c.spans)).collect()
}

/// Of a hop and the attention beside it the shorter one costs no time: what is hidden of that, 1 being all.
fn overlapped(plan: &Plan, timeline: &Timeline) -> f64 {
    let found = overlap(plan, timeline);
    let most: f64 = beside(plan, timeline).iter().map(|(hop, attention)| hop.min(*attention)).sum();
    (found.under_way_s - found.exposed_s) / most
}

/// Short hops, hops as long as the attention beside them, and long ones: the prediction says that both go on at once, and
/// so they do. Ratios are of times of one and the same run.
#[test]
fn hops_and_attention_go_on_at_once_in_the_run_as_in_the_prediction() {
    let plan = ring(2, 1024);
    let bytes = hops(&plan)[0].1;
    let attention = shortest_attention(&predict(&plan, None)).min(shortest_attention(&run(&plan, None).timeline));
    for factor in [0.25, 1.0, 4.0] {
        let bandwidth = BytesPerSec::new(bytes as f64 / (attention * factor));
        let throttle = Throttle { bandwidth, latency: Seconds::ZERO };
        let says = overlapped(&plan, &predict(&plan, Some(throttle)));
        assert!(says > 0.9, "{factor}: {says} of what could be hidden is predicted to be");
        let found = || overlapped(&plan, &run(&plan, Some(throttle)).timeline);
        tries(found, |share| *share > 0.8).expect("what can be hidden is");
    }
}

/// A hop of ten times the attention beside it: the hop is what the throttle says, here and there, so attention that
/// takes half or twice of what was predicted moves the exposed time by a twentieth or a tenth; and wake-ups by little.
#[test]
fn the_exposed_time_is_the_predicted_one() {
    let plan = ring(2, 1024);
    let bytes = hops(&plan)[0].1;
    let attention = shortest_attention(&predict(&plan, None)).max(shortest_attention(&run(&plan, None).timeline));
    let throttle = Throttle { bandwidth: BytesPerSec::new(bytes as f64 / (10.0 * attention)), latency: Seconds::ZERO };
    let predicted = overlap(&plan, &predict(&plan, Some(throttle)));
    let off = |found: Overlap| (found.exposed_s / predicted.exposed_s - 1.0).abs();
    let found = || off(overlap(&plan, &run(&plan, Some(throttle)).timeline));
    tries(found, |off| *off < 0.15).expect("the exposed time is the predicted one");
}

/// A hop of ten times the whole step's attention cannot be hidden, and nobody says so.
#[test]
fn a_ring_exposes_what_it_cannot_hide() {
    let plan = ring(2, 256);
    let (bytes, kernels) = (hops(&plan)[0].1, is_kernel(&plan));
    let busy = |t: &Timeline| -> f64 {
        let of = |spans: &[Span]| -> f64 {
            spans.iter().zip(&kernels).filter(|(_, k)| **k).map(|(s, _)| s.duration().value()).sum()
        };
        t.classes.iter().map(|c| of(&c.spans)).fold(0.0, f64::max)
    };
    let hop = 10.0 * busy(&predict(&plan, None)).max(busy(&run(&plan, None).timeline));
    let throttle = Throttle { bandwidth: BytesPerSec::new(bytes as f64 / hop), latency: Seconds::ZERO };
    for timeline in [predict(&plan, Some(throttle)), run(&plan, Some(throttle)).timeline] {
        let (found, most) = (overlap(&plan, &timeline), busy(&timeline));
        assert!(found.exposed_s >= 2.0 * (hop - most) * (1.0 - 1e-9), "{found:?} for {hop} s");
    }
}
