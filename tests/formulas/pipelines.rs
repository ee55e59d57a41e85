//! Pipelines: how long their stages idle, and how many microbatches they keep.

use crate::activations::activations;
use crate::notation::{A, D, F, H, S, live};
use crate::plans::{self, COPY, Host, SM, model, work};
use foretrain::cost::{Effort, cost};
use foretrain::plan::*;
use foretrain::spec::*;
use foretrain::timeline::Timeline;
use foretrain::units::Seconds;

/// Links so fast that they count for nothing, and a CPU that is never late.
fn free(plan: &Plan) -> Host {
    let mut host = Host::of(plan, 1e-6);
    host.stack.p2p_latency.value = Seconds::new(0.0);
    host.cluster.spec.scale_up.latency.value = Seconds::new(0.0);
    host.issuing(0.0)
}

/// A step of stages that are alike but for embedding and head, on links that count for nothing.
fn alike(plan: &Plan) -> Timeline {
    cost(plan, free(plan).machine(), Effort { fold: true, stride: false, spans: true }).unwrap()
}

/// Seconds in which the second stage, whose class stands behind the first's, computes below a path.
fn busy(found: &Timeline, path: &str) -> f64 {
    let inside = found.classes[1].spans.iter().filter(|span| span.path.starts_with(path) && span.what != "transfer");
    inside.map(|span| span.duration().value()).sum()
}

/// A pipeline on links so fast that they count for nothing, its stages so alike that embedding and head do not
/// either: shares of the step in which its ranks wait for one another, on average, and compute.
fn bubbles(pp: u32, vp: u32, m: u64) -> (f64, f64) {
    let wide = LlmSpec { vocab: 16, ..model(24 * u64::from(pp * vp), 4, false) };
    let par = Parallelism { pp, vp, ..Parallelism::default() };
    let plan = plans::plan(&wide, &par, &work(&par, 4096, 4, m), COPY);
    let found = cost(&plan, free(&plan).machine(), Effort::SUMS).unwrap();
    let usage = found.mean();
    let step = found.step.value();
    assert!(usage.exposed_total() < 1e-3 * step, "{:?} of {step} are no communication", usage.exposed);
    (usage.bubble / step, usage.compute / step)
}

/// 1F1B: bubble (p-1)/(m+p-1) of the step. Interleaved: (p-1)/(v m) of the ideal time (arXiv:2104.04473,
/// section 2.2). Embedding and head are on one stage each, which the forms leave out: half a part in a thousand here.
#[test]
fn bubbles_are_those_of_the_papers() {
    for (p, v, m) in [(2, 1, 4), (4, 1, 4), (4, 1, 16), (8, 1, 8), (4, 2, 8), (4, 2, 16), (8, 3, 16)] {
        let (bubble, compute) = bubbles(p, v, m);
        let ideal = f64::from(p - 1) / (f64::from(v) * m as f64);
        let want = ideal / (1.0 + ideal);
        assert!((bubble - want).abs() < 1e-3, "p {p} v {v} m {m}: bubble {bubble} of the step, {want} expected");
        assert!((bubble + compute - 1.0).abs() < 1e-3);
    }
}

/// Under tensor parallelism a stage begins by gathering what the stage before has sent: to wait for that is the bubble,
/// and not the gather's. Nor is a gather exposed for longer than it takes.
#[test]
fn a_bubble_is_nobodys_communication() {
    for (pp, vp, m, words) in [(4, 1, 4, "default"), (4, 2, 8, "default"), (2, 1, 4, "no-sp"), (4, 1, 8, "zb-h1")] {
        let wide = LlmSpec { vocab: 16, ..model(6 * u64::from(pp * vp), 4, false) };
        let options = words.parse().unwrap();
        let par = Parallelism { pp, vp, tp: 2, options, ..Parallelism::default() };
        let plan = plans::plan(&wide, &par, &work(&par, 4096, 4, m), SM);
        let host = Host::of(&plan, 20e-6);
        let found = cost(&plan, host.machine(), Effort::SUMS).unwrap();
        let (usage, step) = (found.mean(), found.step.value());
        for axis in [Axis::Tp, Axis::Pp] {
            let [exposed, busy] = [&usage.exposed, &usage.comm].map(|of| of.get(&axis).copied().unwrap_or(0.0));
            assert!(busy > 0.0 && exposed <= busy * (1.0 + 1e-9), "{words}: {} {exposed} of {busy}", axis.name());
        }
        // What ranks of a stage do and wait for among themselves takes the place of compute in the forms; it, embedding and
        // head make up to 0.006 of the step.
        if words != "zb-h1" {
            let ideal = f64::from(pp - 1) / (f64::from(vp) * m as f64);
            let (bubble, want) = (usage.bubble / step, ideal / (1.0 + ideal));
            assert!(
                (bubble - want).abs() < 0.01,
                "pp {pp} vp {vp} m {m}: bubble {bubble} of the step, {want} expected"
            );
        }
    }
}

/// The first microbatch of a stage forward, backward to its inputs and to its weights.
const PASSES: [&str; 3] = ["fwd.0.0[", "bwd.0.0[", "weights.0.0["];

/// Forward, backward and its part that makes gradients of weights, of one microbatch of one stage, the bubble of a step,
/// and its time, all in s, of stages that are alike but for embedding and head.
fn split(p: u32, m: u64, words: &str) -> ([f64; 3], f64, f64) {
    let wide = LlmSpec { vocab: 16, ..model(24 * u64::from(p), 4, false) };
    let par = Parallelism { pp: p, options: words.parse().unwrap(), ..Parallelism::default() };
    let plan = plans::plan(&wide, &par, &work(&par, 4096, 4, m), COPY);
    let found = alike(&plan);
    let usage = found.mean();
    let [forward, inputs, weights] = PASSES.map(|path| busy(&found, path));
    let parts = [forward, inputs + weights, weights];
    (parts, usage.exposed_total() + usage.bubble, found.step.value())
}

/// Zero Bubble Pipeline Parallelism, arXiv:2401.10241, table 1: the bubble of ZB-H1 is (p-1)(F + B - W), where B makes
/// gradients of inputs and W those of weights, and that of 1F1B (p-1)(F + B + W).
#[test]
fn gradients_of_weights_fill_the_bubble() {
    for (p, m) in [(2, 4), (4, 4), (4, 12), (8, 16)] {
        let ([f, both, w], bubble, step) = split(p, m, "zb-h1");
        assert!(w > 0.0 && w < both, "{w} of {both}");
        let times = f64::from(p - 1);
        // Embedding and head, which are whole and on one stage alone, are left out of the forms: 0.0013 of the step.
        let near = |bubble: f64, want: f64, step: f64| (bubble - want).abs() < 0.003 * step;
        let want = times * (f + both - 2.0 * w);
        assert!(near(bubble, want, step), "p {p} m {m}: {bubble} of {step}, {want} expected");
        let ([f, both, none], whole, step) = split(p, m, "default");
        assert!(none == 0.0 && near(whole, times * (f + both), step), "p {p} m {m}: {whole} of {step} in 1F1B");
    }
}

/// The table of DualPipe's README (github:deepseek-ai/DualPipe@3da1bbe), with PP chunks on PP/2 devices: DualPipeV's bubble is
/// (PP/2 - 1)(F&B + B - 3W), where B is whole, and F&B ends as one. It is smaller than 1F1B's of as many stages.
#[test]
fn the_bubble_of_a_folded_pipeline() {
    for (p, m) in [(4, 8), (4, 16), (6, 20)] {
        let moe = MoeSpec { experts: 2, top_k: 1, ffn: 4096, ..MoeSpec::default() };
        let wide = LlmSpec { vocab: 16, moe: Some(moe), ..model(8 * u64::from(2 * p), 4, false) };
        let of = |words: &str, vp: u32| {
            let options = words.parse().unwrap();
            let par = Parallelism { pp: p, vp, dp: 2, ep: 2, options, ..Parallelism::default() };
            let found = alike(&plans::plan(&wide, &par, &work(&par, 4096, 4, m), COPY));
            (found.mean().exposed_total() + found.mean().bubble, found)
        };
        let (bubble, found) = of("dualpipe-v+overlap-exchange", 2);
        let pair = found.classes[1].spans.iter().find(|span| span.path.contains("+bwd.")).expect("a pair");
        let pair = busy(&found, pair.path.split_inclusive('[').next().unwrap());
        let [inputs, weights] = ["bwd.1.0[", "weights.1.0["].map(|path| busy(&found, path));
        assert!(pair > inputs && inputs > weights && weights > 0.0, "{pair} {inputs} {weights}");
        let want = f64::from(p - 1) * (pair + (inputs + weights) - 3.0 * weights);
        let step = found.step.value();
        // As above, and the fewer microbatches, the more: 0.008 of a step of eight.
        assert!((bubble - want).abs() < 0.01 * step, "p {p} m {m}: {bubble} of {step}, {want} expected");
        // Were all passes alike and none hidden, (3 + 2 - 3) of (1 + 2).
        let (plain, _) = of("default", 1);
        assert!(bubble < 2.0 / 3.0 * plain, "p {p} m {m}: {bubble}, and 1F1B's {plain}");
    }
}

/// Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, and ZB-V: where forward passes and both halves of backward
/// ones take one time each, of 1F1B's bubble 6(p-1) of them, V-Half leaves a half, V-Min two thirds, and ZB-V the (p-1) that
/// the last stage waits for its first input. Squeezed as their authors' program does, the first two leave less: what it
/// leaves is held in src/strategy/pipeline/in_v.rs.
#[test]
fn pipelines_in_a_v_idle_as_the_papers_say() {
    // Products alone, as good as: each has as many FLOPs forward, for its input and for its weights.
    let of = |p: u32, m: u64, words: &str, vp: u32| {
        let layers = 2 * u64::from(p);
        let even = LlmSpec {
            hidden: 4096,
            heads: 32,
            kv_heads: 32,
            head_dim: 128,
            ffn: 65536,
            vocab: 16,
            layers,
            ..model(1, 4, false)
        };
        let par = Parallelism { pp: p, vp, options: words.parse().unwrap(), ..Parallelism::default() };
        alike(&plans::plan(&even, &par, &work(&par, 256, 32, m), COPY))
    };
    for (p, m) in [(4, 8), (4, 12), (5, 15), (8, 16)] {
        let times = f64::from(p - 1);
        // Passes are 6 % apart, and ZB-V waits for the longest; squeezed, V-Half leaves 0.65 to 1 of its half. V-Min has no
        // slack for halves that are unlike: 1.15 to 1.27, for a little more idles with every microbatch.
        for (words, units, within) in [("zb-v", 1.0, 1.0..1.1), ("v-half", 3.0, 0.6..1.05), ("v-min", 4.0, 1.0..1.3)] {
            let found = of(p, m, words, 2);
            let passes = PASSES.map(|path| busy(&found, path));
            let unit = passes.iter().sum::<f64>() / 3.0;
            assert!(passes.iter().all(|pass| (pass / unit - 1.0).abs() < 0.1), "{passes:?}");
            let bubble = found.mean().exposed_total() + found.mean().bubble;
            let want = units * times * unit;
            assert!(within.contains(&(bubble / want)), "{words} p {p} m {m}: {bubble}, {want} expected");
        }
        let plain = of(p, m, "default", 1);
        let (bubble, want) = (plain.mean().exposed_total() + plain.mean().bubble, 6.0 * times);
        let unit = plain.mean().compute / (6 * m) as f64;
        // Compute has embedding and head, which are no pass, in it: 0.017 where microbatches are few.
        assert!((bubble / unit / want - 1.0).abs() < 0.02, "1F1B p {p} m {m}: {bubble}, {want} times {unit} expected");
    }
}

/// Activations of the microbatches in flight: p - s of 1F1B on stage s, never more than m, and the input that
/// comes in ahead.
#[test]
fn a_stage_keeps_the_microbatches_in_flight() {
    for (p, m) in [(2, 1), (2, 6), (4, 3), (4, 9)] {
        let par = Parallelism { pp: p, ..Parallelism::default() };
        let alive = |layers: u64, stage: u32| {
            let plan = plans::plan(&model(layers * u64::from(p), 4, false), &par, &work(&par, S, 1, m), SM);
            live(&plan, stage)
        };
        for stage in 0..p {
            let flight = u64::from(p - stage).min(m);
            assert_eq!(alive(6, stage) - alive(5, stage), flight * activations(S, 4, 1), "p {p} m {m} stage {stage}");
        }
    }
}

/// The same paper, section 2.1: ZB-H1 has no more microbatches in flight than 1F1B has on its first stage, and every stage
/// as many. Where it goes backward, stage s has p - s of them as they were, and s keep what products read and the
/// gradients of what they wrote (M_W, which is less than M_B): all other activations are over by then.
#[test]
fn split_stages_keep_as_many_as_the_first() {
    let k = 4;
    let read = 2 * S * (2 * H + A * D + F);
    let written = 2 * S * (H + (A + 2 * k) * D + 2 * F);
    for (p, m) in [(2, 6), (4, 9)] {
        let par = Parallelism { pp: p, options: "zb-h1".parse().unwrap(), ..Parallelism::default() };
        let alive = |layers: u64, stage: u32| {
            let plan = plans::plan(&model(layers * u64::from(p), k, false), &par, &work(&par, S, 1, m), SM);
            live(&plan, stage)
        };
        for stage in 0..p {
            let (whole, halved) = (u64::from(p - stage), u64::from(stage));
            let want = whole * activations(S, k, 1) + halved * (read + written);
            assert_eq!(alive(6, stage) - alive(5, stage), want, "p {p} m {m} stage {stage}");
        }
    }
}

/// The same papers: activations of p microbatches at most in ZB-V, as 1F1B has on its first stage, of p/2 + 1 in V-Half and
/// (p+2)/3 in V-Min, on the stage that has most.
#[test]
fn pipelines_in_a_v_keep_what_the_papers_say() {
    let k = 4;
    for (p, m) in [(4, 9), (6, 12), (8, 16)] {
        for (words, most) in [("zb-v", p), ("v-half", p / 2 + 1), ("v-min", (p + 2u32).div_ceil(3))] {
            let par = Parallelism { pp: p, vp: 2, options: words.parse().unwrap(), ..Parallelism::default() };
            let alive = |layers: u64, stage: u32| {
                let plan = plans::plan(&model(2 * layers * u64::from(p), k, false), &par, &work(&par, S, 1, m), SM);
                live(&plan, stage)
            };
            // A layer more in both chunks is what a layer more twice is in a stage of 1F1B.
            let grown: Vec<u64> = (0..p).map(|stage| (alive(4, stage) - alive(3, stage)) / 2).collect();
            let (top, one) = (*grown.iter().max().unwrap(), activations(S, k, 1));
            assert_eq!(top, u64::from(most) * one, "{words} p {p}: {grown:?} of {most} times {one}");
        }
    }
}

/// On nodes of as many ranks as stages, what passes between stages leaves the node and sums of gradients stay there, or the
/// other way round where stages are neighbours.
#[test]
fn stages_inside_leave_nodes_to_replicas() {
    let (pp, dp) = (2, 2);
    let bytes = |words: &str| {
        let of = |microbatches| {
            let par = Parallelism { pp, dp, zero: 1, options: words.parse().unwrap(), ..Parallelism::default() };
            let plan = plans::plan(&model(4, 4, false), &par, &work(&par, S, 1, microbatches), SM);
            let usage = cost(&plan, Host::new(pp * dp, pp, 1.0).machine(), Effort::SUMS).unwrap().mean();
            [usage.bytes_scale_up, usage.bytes_scale_out]
        };
        // Sends go with every microbatch, sums once.
        let (few, many) = (of(4), of(8));
        let sent = [0, 1].map(|tier| many[tier] - few[tier]);
        (sent, [0, 1].map(|tier| few[tier] - sent[tier]))
    };
    let (([up, out], [sums_up, sums_out]), inside) = (bytes("default"), bytes("pp-inside"));
    assert!(up == 0.0 && out > 0.0 && sums_up > 0.0 && sums_out == 0.0, "{up} {out} {sums_up} {sums_out}");
    assert_eq!(inside, ([out, up], [sums_out, sums_up]));
}
