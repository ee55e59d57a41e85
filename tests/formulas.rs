//! Closed forms of the papers, in the papers' arithmetic, against what plans come to.
//!
//! Notation: s sequence, b batch, a heads, k KV heads, d head dim, h hidden, f feed-forward width, v
//! vocabulary, P ranks that share a sequence, W ranks that share weights, n = b*s/P tokens of a rank, and
//! e = 2 bytes an element. Qb = n*a*d*e, KVb = 2*n*k*d*e.

mod plans;

use foretrain::collective::count::sent_by;
use foretrain::cost::{Effort, cost};
use foretrain::plan::link::{AtomTable, Line, Place};
use foretrain::plan::memory::Layout;
use foretrain::plan::*;
use foretrain::spec::options::WORDS;
use foretrain::spec::*;
use foretrain::strategy::attention_pass;
use plans::{FLAT, Host, SM, close, model, way, work};

const A: u64 = 8;
const D: u64 = 8;
const H: u64 = 64;
const F: u64 = 128;
const V: u64 = 256;
const S: u64 = 3840;
const E: u64 = 2;

/// Plain data of the ops of rank 0's step: path, bytes of what it reads and writes.
struct Steps<'a> {
    plan: &'a Plan,
    line: Line<'a>,
}

impl<'a> Steps<'a> {
    fn of(plan: &'a Plan) -> Steps<'a> {
        let line = Line::program(plan, &AtomTable::new(plan).unwrap(), 0).unwrap();
        Steps { plan, line }
    }

    fn bytes(&self, place: &Place) -> u64 {
        let tensor = &self.plan.tensors[place.tensor as usize];
        (place.rows[1] - place.rows[0]) * tensor.row_len() * tensor.dtype.size()
    }

    /// Bytes that ops under `path` send: what a transfer reads; all of an all-to-all or a reduce-scatter but
    /// a rank's own part; what a rank gives to an all-gather, once for each other rank. Not gradients' sums.
    fn sent(&self, path: &str) -> u64 {
        let asked = |path_of: &str| path_of.starts_with(path) && !path_of.contains("grad_sum");
        let own = (0..self.line.nodes.len()).filter(|&i| asked(&self.line.path(i)));
        own.map(|i| {
            let payload: u64 = self.line.reads(i).iter().map(|p| self.bytes(p)).sum();
            match &self.line.nodes[i].op.kind {
                OpKind::Transfer { .. } => payload,
                OpKind::Collective { kind, .. } => {
                    let Lane::Comm(group, _) = &self.plan.lanes[self.line.nodes[i].lane as usize] else { panic!() };
                    let p = u64::from(group.size(&self.plan.views));
                    match kind {
                        CollectiveKind::AllToAll | CollectiveKind::ReduceScatter => payload / p * (p - 1),
                        CollectiveKind::AllGather => payload * (p - 1),
                        CollectiveKind::AllReduce => 2 * (payload / p * (p - 1)),
                    }
                }
                _ => 0,
            }
        })
        .sum()
    }

    fn count(&self, path: &str, label: &str) -> usize {
        let paths = (0..self.line.nodes.len()).map(|i| self.line.path(i));
        paths.filter(|p| p.starts_with(path) && p.rsplit('/').next().unwrap().starts_with(label)).count()
    }
}

fn built(k: u64, dp: u32, ring: u32, ulysses: u32) -> Plan {
    let par = way(dp, ring, ulysses);
    plans::plan(&model(2, k, false), &par, &work(&par, S, 1, 1), SM)
}

const FORWARD: &str = "last[0]/fwd[1]/";
const BACKWARD: &str = "last[0]/bwd[1]/";

#[test]
fn ulysses_sends_q_k_v_and_o_both_ways() {
    for (k, p) in [(8, 2), (8, 4), (8, 8), (4, 2), (4, 4), (2, 4), (4, 8), (1, 8), (2, 8)] {
        let plan = built(k, 1, 1, p as u32);
        let n = S / p;
        let (qb, kvb) = (n * A * D * E, 2 * n * k * D * E);
        // With fewer KV heads than ranks each is sent to p/k of them.
        let copies = if k < p { p / k } else { 1 };
        let once = (2 * qb + kvb * copies) / p * (p - 1);
        let steps = Steps::of(&plan);
        assert_eq!([steps.sent(FORWARD), steps.sent(BACKWARD)], [once, once], "k {k} P {p}");
        assert_eq!((steps.count(FORWARD, "attention"), steps.count(BACKWARD, "attention_bwd")), (1, 1));
    }
}

#[test]
fn a_ring_sends_kv_and_brings_dkv_home_in_fp32() {
    for (k, p) in [(8, 2), (4, 3), (4, 4), (2, 5), (1, 8)] {
        let plan = built(k, 1, p as u32, 1);
        let n = S / p;
        let kvb = 2 * n * k * D * E;
        let steps = Steps::of(&plan);
        assert_eq!(steps.sent(FORWARD), (p - 1) * kvb, "k {k} P {p}");
        assert_eq!(steps.sent(BACKWARD), (p - 1) * kvb + p * 2 * n * k * D * 4, "k {k} P {p}");
        let counts = ["attention.", "kv_hop"].map(|label| steps.count(FORWARD, label) as u64);
        assert_eq!(counts, [p, p - 1]);
        let counts = ["attention_bwd.", "kv_hop", "dkv_hop"].map(|label| steps.count(BACKWARD, label) as u64);
        assert_eq!(counts, [p, p - 1, p]);
    }
}

fn built_as(words: &str, k: u64, ring: u32) -> Plan {
    let par = Parallelism { options: words.parse().unwrap(), ..way(1, ring, 1) };
    plans::plan(&model(2, k, false), &par, &work(&par, S, 1, 1), SM)
}

#[test]
fn a_reverse_walk_brings_dkv_home_in_the_models_dtype() {
    for (k, p) in [(8, 2), (4, 3), (4, 4), (2, 5), (1, 8)] {
        let plan = built_as("dkv-model", k, p as u32);
        let kvb = 2 * S / p * k * D * E;
        let steps = Steps::of(&plan);
        assert_eq!(steps.sent(FORWARD), (p - 1) * kvb, "k {k} P {p}");
        assert_eq!(steps.sent(BACKWARD), (p - 1) * kvb + (p - 1) * kvb, "k {k} P {p}");
        // One message of both between the first, KV alone, and the last, dKV alone.
        let counts = ["kv_hop", "kv_dkv_hop", "dkv_hop"].map(|label| steps.count(BACKWARD, label) as u64);
        assert_eq!(counts, [1, p - 2, 1]);
    }
}

/// Ranks of consecutive parts see keys of ceil((w - 1) / (s / P)) ranks before theirs: so many hops, and one home.
#[test]
fn a_ring_goes_no_further_than_its_window() {
    for (p, w, hops) in [(4, 960, 1), (4, 961, 1), (4, 962, 2), (8, 1, 0), (8, 480, 1), (8, 1000, 3), (8, S, 7)] {
        assert_eq!(hops, (w - 1_u64).div_ceil(S / p).min(p - 1));
        let plan = |words: &str| {
            let par = Parallelism { options: words.parse().unwrap(), ..way(1, p as u32, 1) };
            let windowed = LlmSpec { window: Some(w), ..model(2, 4, false) };
            plans::plan(&windowed, &par, &work(&par, S, 1, 1), SM)
        };
        let (n, sum) = (S / p, 4);
        let (qb, lseb) = (n * A * D * E, n * A * 4);
        let (row, kvb) = (2 * n * 4 * D, 2 * n * 4 * D * E);
        // What went out comes home in one hop, unless the last hop of a whole ring is that.
        let home = hops.min(1);
        for (words, backward) in [
            ("contiguous", hops * kvb + (hops + home) * row * sum),
            ("contiguous+dkv-model", 2 * hops * kvb),
            ("contiguous+burst", hops * (2 * qb + 2 * lseb) + (hops + home) * qb),
        ] {
            let plan = plan(words);
            let steps = Steps::of(&plan);
            assert_eq!(steps.sent(FORWARD), hops * kvb, "P {p} w {w} {words}");
            assert_eq!(steps.sent(BACKWARD), backward, "P {p} w {w} {words}");
        }
        // Both halves of a zigzag have neighbours on different sides.
        let zigzag = plan("default");
        assert_eq!(Steps::of(&zigzag).sent(FORWARD), (p - 1) * kvb);
    }
}

#[test]
fn burst_sends_what_belongs_to_queries() {
    for (k, p) in [(8, 2), (4, 3), (1, 8)] {
        let plan = built_as("burst", k, p as u32);
        let n = S / p;
        let (qb, kvb, lseb) = (n * A * D * E, 2 * n * k * D * E, n * A * 4);
        let steps = Steps::of(&plan);
        assert_eq!(steps.sent(FORWARD), (p - 1) * kvb, "k {k} P {p}");
        // q, the gradient of the output, log-sum-exp and delta; and dQ, one hop more.
        assert_eq!(steps.sent(BACKWARD), (p - 1) * (2 * qb + 2 * lseb) + p * qb, "k {k} P {p}");
    }
    // Of MHA it sends fewer bytes than circulating KV does, of GQA more.
    let sent = |words, k| Steps::of(&built_as(words, k, 8)).sent(BACKWARD);
    assert!(sent("burst", 8) < sent("default", 8) && sent("burst", 1) > sent("default", 1));
}

#[test]
fn a_double_ring_leaves_a_window_once_in_so_many_steps() {
    for (k, p, w) in [(8, 4, 2), (4, 8, 2), (4, 8, 4), (1, 16, 8), (2, 6, 2)] {
        let plan = built_as(&format!("double-ring-{w}"), k, p as u32);
        let (kvb, dkvb) = (2 * S / p * k * D * E, 2 * S / p * k * D * 4);
        let steps = Steps::of(&plan);
        assert_eq!(steps.sent(FORWARD), (p - 1) * kvb, "k {k} P {p} w {w}");
        // dKV goes round every window, and on from each.
        assert_eq!(steps.sent(BACKWARD), (p - 1) * kvb + (p + p / w) * dkvb, "k {k} P {p} w {w}");
        let counts = ["kv_window_hop", "kv_hop", "dkv_hop", "dkv_window_hop"];
        let counts = counts.map(|label| steps.count(BACKWARD, label) as u64);
        assert_eq!(counts, [p / w - 1, p / w * (w - 1), p, p / w]);
    }
}

#[test]
fn kv_in_two_is_twice_the_messages_and_the_same_bytes() {
    let [one, two] = ["default", "kv-in-two"].map(|words| built_as(words, 4, 4));
    let [a, b] = [&one, &two].map(Steps::of);
    for pass in [FORWARD, BACKWARD] {
        assert_eq!(a.sent(pass), b.sent(pass));
    }
    let legs = |steps: &Steps| {
        let transfers = steps.line.nodes.iter().filter_map(|node| match &node.op.kind {
            OpKind::Transfer { legs, .. } => Some(legs.len()),
            _ => None,
        });
        transfers.sum::<usize>()
    };
    assert_eq!(legs(&b), 2 * legs(&a));
}

/// Bytes that ops under `path` keep in the tensor of a name: slots that are written.
fn slots_used(steps: &Steps, path: &str, tensor: &str) -> usize {
    let own = (0..steps.line.nodes.len()).filter(|&i| steps.line.path(i).starts_with(path));
    let written =
        own.flat_map(|i| steps.line.writes(i)).filter(|w| steps.plan.tensors[w.tensor as usize].name == tensor);
    written.map(|w| w.slot).collect::<std::collections::BTreeSet<_>>().len()
}

#[test]
fn merging_at_the_end_keeps_every_block() {
    let p = 12;
    // Of a forward pass alone, whose peak nothing else hides.
    let peak = |words: &str| {
        let par = Parallelism { options: words.parse().unwrap(), ..way(1, p as u32, 1) };
        let (seq_len, dtype) = (S, Dtype::Bf16);
        let spec =
            AttentionSpec { batch: 1, seq_len, heads: A, kv_heads: 4, head_dim: D, mask: Mask::new(true), dtype };
        let plan = attention_pass::build(&spec, Pass::Forward, &par, SM).unwrap();
        Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap().bytes
    };
    let (n, blocks) = (S / p as u64, p as u64);
    let qb = n * A * D * E;
    // KV that has been used makes room for later outputs. TransformerEngine holds it, which the word's help says.
    let kvb = n * 2 * 4 * D * E;
    assert!(peak("merge-at-end") > (blocks + 2) * qb);
    assert!(peak("merge-at-end") < blocks * (kvb + qb), "what TransformerEngine holds beside q, kv and o");
    let word = WORDS.iter().find(|word| word.name == "merge-at-end").unwrap();
    assert!(word.about.contains("needs more memory than here"), "{}", word.about);
    assert!(peak("default") < blocks * qb);
    assert!(peak("merge-in-kernel") < peak("default"));
    let plan = built_as("merge-at-end", 4, p as u32);
    let steps = Steps::of(&plan);
    assert_eq!(slots_used(&steps, FORWARD, "kv_ring"), p - 1, "all KV but the own");
    assert_eq!(slots_used(&steps, FORWARD, "o_block"), p, "every output");
    assert_eq!(steps.count(FORWARD, "merge"), p);
    let plan = built_as("merge-in-kernel", 4, p as u32);
    let steps = Steps::of(&plan);
    assert_eq!((steps.count(FORWARD, "merge"), steps.count(BACKWARD, "dq_add")), (0, 0));
}

#[test]
fn the_hybrid_rings_the_same_kv_with_fewer_hops() {
    for (k, u, r) in [(8, 2, 2), (4, 4, 3), (4, 2, 4), (2, 4, 2)] {
        let plan = built(k, 1, r as u32, u as u32);
        let n = S / (u * r);
        let (qb, kvb) = (n * A * D * E, 2 * n * k * D * E * if k < u { u / k } else { 1 });
        let a2a = (2 * qb + kvb) / u * (u - 1);
        let steps = Steps::of(&plan);
        assert_eq!(steps.sent(FORWARD), a2a + (r - 1) * kvb, "k {k} U {u} R {r}");
        assert_eq!(steps.sent(BACKWARD), a2a + (r - 1) * kvb + r * 2 * kvb, "k {k} U {u} R {r}");
    }
}

/// The plan of two layers with `k` KV heads and some words.
fn said(words: &str, k: u64, ring: u32, ulysses: u32) -> Plan {
    let par = Parallelism { options: words.parse().unwrap(), ..way(1, ring, ulysses) };
    plans::plan(&model(2, k, false), &par, &work(&par, S, 1, 1), SM)
}

#[test]
fn gathering_kv_sends_as_much_as_a_ring_and_scatters_dkv_in_the_models_dtype() {
    for (k, p) in [(8, 2), (4, 3), (4, 4), (2, 5), (2, 8)] {
        let kvb = 2 * (S / p) * k * D * E;
        for layout in ["", "+contiguous"] {
            for (word, parts) in [("gather-kv", 1), ("gather-kv-prefetch", k as usize)] {
                let plan = said(&format!("{word}{layout}"), k, p as u32, 1);
                assert_eq!(plan.about.strategy, "allgather-kv");
                let steps = Steps::of(&plan);
                assert_eq!(steps.sent(FORWARD), (p - 1) * kvb, "k {k} P {p}");
                assert_eq!(steps.sent(BACKWARD), 2 * (p - 1) * kvb, "k {k} P {p}");
                assert_eq!([FORWARD, BACKWARD].map(|pass| steps.count(pass, "attention")), [parts; 2]);
                assert_eq!([FORWARD, BACKWARD].map(|pass| steps.count(pass, "kv_gather")), [parts; 2]);
                // In the order of the sequence already.
                let copies = if layout.is_empty() { parts } else { 0 };
                assert_eq!(steps.count(FORWARD, "kv_reorder"), copies);
                assert_eq!(steps.count(BACKWARD, "dkv_reorder"), copies);
            }
        }
    }
}

#[test]
fn one_all_to_all_or_three_send_the_same() {
    for (k, p) in [(8, 4), (2, 8)] {
        let [packed, apart] = ["default", "a2a-separate"].map(|words| said(words, k, 1, p));
        let (one, three) = (Steps::of(&packed), Steps::of(&apart));
        for (pass, d) in [(FORWARD, ""), (BACKWARD, "d")] {
            assert_eq!(one.sent(pass), three.sent(pass));
            let count = |steps: &Steps, what: &str| steps.count(pass, &format!("{d}{what}_a2a"));
            assert_eq!(["qkv", "q", "k", "v", "o"].map(|what| count(&one, what)), [1, 0, 0, 0, 1]);
            assert_eq!(["qkv", "q", "k", "v", "o"].map(|what| count(&three, what)), [0, 1, 1, 1, 1]);
        }
    }
}

#[test]
fn replicated_after_the_exchange_a_kv_head_travels_once_and_copies_gather_it() {
    for (k, p) in [(1, 2), (2, 4), (4, 8), (2, 8), (1, 8)] {
        let plan = said("replicate-after", k, 1, p as u32);
        let (n, c) = (S / p, p / k);
        let (qb, kvb) = (n * A * D * E, 2 * n * k * D * E);
        let sent = (2 * qb + kvb) / p * (p - 1) + (c - 1) * kvb;
        let steps = Steps::of(&plan);
        assert_eq!([steps.sent(FORWARD), steps.sent(BACKWARD)], [sent, sent], "k {k} P {p}");
        // With the copies of a head on one node, only one of them is sent across.
        let across = |words: &str| {
            let of = |s| {
                let par = Parallelism { options: words.parse().unwrap(), zero: 0, ..way(1, 1, p as u32) };
                let plan = plans::plan(&model(2, k, false), &par, &work(&par, s, 1, 1), SM);
                cost(&plan, Host::new(p as u32, c as u32, 1.0).machine(), FLAT).unwrap().mean().bytes_scale_out
            };
            of(2 * S) - of(S)
        };
        // Both passes of both layers.
        let sent = |copies: u64| (4 * (2 * qb + copies * kvb) / p * (p - c)) as f64;
        assert!(close(across("default"), sent(c)) && close(across("replicate-after"), sent(1)), "k {k} P {p}");
    }
}

#[test]
fn padded_heads_travel_and_are_computed() {
    // (heads, KV heads, ranks) -> (heads, KV heads) with zeros, copies of a KV head
    for (a, k, p, to_a, to_k, copies) in
        [(6, 6, 4, 8, 8, 1), (6, 2, 4, 8, 2, 2), (10, 2, 8, 16, 2, 4), (5, 5, 2, 6, 6, 1)]
    {
        let par = Parallelism { options: "pad-heads".parse().unwrap(), ..way(1, 1, p as u32) };
        let llm = LlmSpec { heads: a, ..model(2, k, false) };
        let plan = plans::plan(&llm, &par, &work(&par, S, 1, 1), SM);
        let (qb, kvb) = (S / p * to_a * D * E, 2 * (S / p) * to_k * D * E);
        let steps = Steps::of(&plan);
        let once = (2 * qb + copies * kvb) / p * (p - 1);
        assert_eq!([steps.sent(FORWARD), steps.sent(BACKWARD)], [once, once], "{a} heads, {k} KV heads on {p}");
        let attention = plan.kernels().find(|k| matches!(k, Kernel::Attention(_))).unwrap();
        let work = attention.work(&plan.views, 0, &[1, 1], &[1, 1]).unwrap();
        // The work of the fullest rank over the mean: as with ceil and floor of the heads.
        assert_eq!(work.flops, 4 * pairs(S) * to_a / p * D);
        let imbalance = work.flops as f64 / (4 * pairs(S) * a * D) as f64 * p as f64;
        assert!(close(imbalance, a.div_ceil(p) as f64 / (a as f64 / p as f64)));
    }
}

/// Seconds that the compute lane waits for the ring axis, and the memory of communication buffers.
fn waits_and_buffers(words: &str) -> (f64, u64) {
    let par = Parallelism { options: words.parse().unwrap(), ..way(1, 8, 1) };
    let llama = LlmSpec { layers: 2, ..LlmSpec::find("llama-3-8b").unwrap() };
    let plan = plans::plan(&llama, &par, &work(&par, 262_144, 1, 1), SM);
    let usage = cost(&plan, Host::new(8, 8, 1.0).machine(), FLAT).unwrap().mean();
    (usage.exposed[&Axis::Cp], kind_bytes(&plan, TensorKind::CommBuffer))
}

#[test]
fn gathered_ahead_all_kv_heads_but_the_first_are_hidden() {
    let (whole, whole_buffers) = waits_and_buffers("gather-kv");
    let (ahead, ahead_buffers) = waits_and_buffers("gather-kv-prefetch");
    // Of each pass's eight gathers one shows; in the backward pass each reduce-scatter still does, in part.
    assert!(ahead < 0.4 * whole, "{ahead} of {whole}");
    assert!(ahead_buffers < whole_buffers / 2, "two of eight KV heads at a time");
}

#[test]
fn the_axis_inside_keeps_its_bytes_in_the_node() {
    let (k, u, r) = (4, 2, 4);
    let bytes = |words: &str, per_node: u64| {
        // The difference of two lengths has nothing of the gradients, which go across all ranks.
        let of = |s| {
            let par = Parallelism { options: words.parse().unwrap(), zero: 0, ..way(1, r as u32, u as u32) };
            let plan = plans::plan(&model(2, k, false), &par, &work(&par, s, 1, 1), SM);
            let usage = cost(&plan, Host::new(plan.ranks(), per_node as u32, 1.0).machine(), FLAT).unwrap().mean();
            [usage.bytes_scale_up, usage.bytes_scale_out]
        };
        let (short, long) = (of(S), of(2 * S));
        [0, 1].map(|i| long[i] - short[i])
    };
    let n = S / (u * r);
    let (qb, kvb) = (n * A * D * E, 2 * n * k * D * E);
    // Forward and backward of both layers.
    let a2a = (4 * (2 * qb + kvb) / u * (u - 1)) as f64;
    let ring = (2 * (2 * (r - 1) * kvb + r * 2 * kvb)) as f64;
    assert_eq!(bytes("default", u), [a2a, ring]);
    assert_eq!(bytes("ring-inside", r), [ring, a2a]);
}

/// Korthikanti et al. (arXiv:2205.05198), section 4.2.2: an all-gather and a reduce-scatter move what an
/// all-reduce did; the input of a product is gathered once more for its weights' gradient.
#[test]
fn tensor_parallelism_moves_rows_eight_times_or_ten() {
    for (t, words, forward, backward) in
        [(2, "default", 4, 6), (4, "default", 4, 6), (2, "no-sp", 4, 4), (8, "no-sp", 4, 4)]
    {
        let par = Parallelism { tp: t, options: words.parse().unwrap(), ..way(1, 1, 1) };
        let plan = plans::plan(&model(2, 8, false), &par, &work(&par, S, 1, 1), SM);
        let t = u64::from(t);
        let once = S * H * E / t * (t - 1);
        let steps = Steps::of(&plan);
        assert_eq!([steps.sent(FORWARD), steps.sent(BACKWARD)], [forward * once, backward * once], "tp {t} {words}");
    }
}

/// Section 4.1 of arXiv:2104.04473: without sequence parallelism every rank sends all rows to the next stage, or its own
/// alone, which that stage's ranks gather; with it they have no others.
#[test]
fn scattered_between_stages_rows_leave_a_node_once() {
    for (t, words, parts) in
        [(4, "no-sp", 1), (4, "no-sp+scatter-p2p", 4), (2, "no-sp+scatter-p2p", 2), (2, "default", 2)]
    {
        let par = Parallelism { tp: t, pp: 2, options: words.parse().unwrap(), ..way(1, 1, 1) };
        let plan = plans::plan(&model(2, 8, false), &par, &work(&par, S, 1, 3), SM);
        let (steps, all) = (Steps::of(&plan), S * H * E);
        assert_eq!(steps.sent("send_x."), 3 * all / parts, "{words}");
        let last = Steps { plan: &plan, line: Line::program(&plan, &AtomTable::new(&plan).unwrap(), 1).unwrap() };
        let joins = if words.contains("scatter") { 3 * all / u64::from(t) * u64::from(t - 1) } else { 0 };
        assert_eq!([last.sent("send_dx."), last.sent("join_x.")], [3 * all / parts, joins], "{words}");
    }
}

/// What a layer keeps: its input, two norms' outputs and the middle of the residual stream, h elements a token
/// each; q, k, v and o; 3 f of the network; the log-sum-exps in fp32. With sequence parallelism all of it is
/// divided by t, without it the first four are not (arXiv:2205.05198, table 2).
#[test]
fn tensor_parallelism_divides_activations() {
    for (t, words) in [(1, "default"), (4, "default"), (4, "no-sp")] {
        let par = Parallelism { tp: t, options: words.parse().unwrap(), ..way(1, 1, 1) };
        let plan = plans::plan(&model(2, 8, false), &par, &work(&par, S, 1, 1), SM);
        let kept = plan.tensors.iter().filter(|t| t.kind == TensorKind::Activation && t.dtype != Dtype::U32);
        // The last slot of x is the final norm's input.
        let bytes: u64 = kept.map(|t| t.bytes() * u64::from(t.slots.min(2))).sum();
        let (t, stream) = (u64::from(t), if words == "no-sp" { 1 } else { u64::from(t) });
        let layer = 4 * S * H * E / stream + (4 * S * H * E + 3 * S * F * E + 4 * S * A) / t;
        assert_eq!(bytes, 2 * layer, "tp {t} {words}");
    }
}

/// 34 sbh a layer of a GPT (Korthikanti et al., arXiv:2205.05198, equation 1): 11 of attention, 19 of the network,
/// 4 of the norms; in place of its 5 a s^2 b flash attention keeps the log-sum-exps, four bytes a head. All of it
/// is divided by t with sequence parallelism (equation 4), 24 of the 34 without (equation 2).
#[test]
fn a_gpt_layer_keeps_34_sbh() {
    let gpt = LlmSpec { norm: Norm::Layer, mlp: Mlp::Gelu, bias: true, dropout: 0.1, ffn: 4 * H, ..model(2, A, false) };
    for (t, words, sbh) in [(1, "default", 34.0), (4, "default", 34.0 / 4.0), (4, "no-sp", 10.0 + 24.0 / 4.0)] {
        let par = Parallelism { tp: t, options: words.parse().unwrap(), ..way(1, 1, 1) };
        let plan = plans::plan(&gpt, &par, &work(&par, S, 1, 1), SM);
        let kept = plan.tensors.iter().filter(|t| t.kind == TensorKind::Activation && t.dtype != Dtype::U32);
        // The last slot of x is the final norm's input.
        let bytes: u64 = kept.map(|t| t.bytes() * u64::from(t.slots.min(2))).sum();
        let lse = (4 * A * S / u64::from(t)) as f64;
        assert_eq!(bytes as f64, 2.0 * (sbh * (S * H) as f64 + lse), "tp {t} {words}");
    }
}

/// What a layer of Megatron's keeps, in sbh (Korthikanti et al., table 2): 34 + 5 a s / h with the scores of attention,
/// 34 where those are computed again, 2 where everything is; divided by t, with sequence parallelism.
#[test]
fn recomputing_attention_saves_5_as_over_h() {
    let gpt = LlmSpec { norm: Norm::Layer, mlp: Mlp::Gelu, bias: true, dropout: 0.1, ffn: 4 * H, ..model(2, A, false) };
    let scores = 5.0 * (A * S) as f64 / H as f64;
    for t in [1, 2, 4] {
        let kept = |layers, recompute| {
            let par = Parallelism { tp: t, recompute, options: "unfused".parse().unwrap(), ..way(1, 1, 1) };
            let gpt = LlmSpec { layers, ..gpt.clone() };
            let plan = plans::plan(&gpt, &par, &work(&par, S, 1, 2), SM);
            let layout = Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
            layout.live_by_kind.iter().find(|(kind, _)| *kind == TensorKind::Activation).unwrap().1 as f64
        };
        let layer = |recompute| (kept(7, recompute) - kept(6, recompute)) / (S * H) as f64 * f64::from(t);
        assert_eq!(layer(Recompute::None), 34.0 + scores, "tp {t}");
        assert_eq!(layer(Recompute::Selective), 34.0, "tp {t}");
        assert_eq!(layer(Recompute::Full), 2.0, "tp {t}");
    }
}

/// Selective recomputation adds 4 b s^2 h a layer: the two products with the scores, which are 12 b s^2 h with their
/// backward pass (Korthikanti et al., section 5 and appendix A).
#[test]
fn recomputing_attention_costs_its_forward_pass_again() {
    let flops = |recompute| {
        let par = Parallelism { recompute, options: "unfused".parse().unwrap(), ..way(1, 1, 1) };
        let plan = plans::plan(&model(3, A, false), &par, &work(&par, S, 1, 1), SM);
        cost(&plan, Host::of(&plan, 1.0).machine(), Effort::SUMS).unwrap().mean().flops
    };
    let again = flops(Recompute::Selective) - flops(Recompute::None);
    // No mask saves any of it.
    assert!(close(again, (3 * 4 * S * S * A * D) as f64), "{again}");
}

/// Visible pairs of a causal mask.
fn pairs(s: u64) -> u64 {
    s * (s + 1) / 2
}

#[test]
fn zigzag_gives_every_rank_the_same_attention() {
    for p in [1, 2, 3, 4, 5, 8] {
        let plan = built(4, 1, p, 1);
        let all = cost(&plan, Host::of(&plan, 1.0).machine(), FLAT).unwrap();
        let (tokens, layers) = (S / u64::from(p), 2);
        let matmul = 6 * tokens * (layers * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F) + V * H);
        // Forward 4*b*s^2*a*d / 2, made exact by the diagonal; backward five products for two.
        let attention = layers * 4 * pairs(S) * A * D / u64::from(p) * 7 / 2;
        for class in &all.classes {
            assert_eq!(class.usage.flops, (matmul + attention) as f64, "P {p} rank {}", class.rank);
        }
    }
}

#[test]
fn the_last_of_consecutive_parts_has_nearly_twice_the_mean() {
    for p in [2, 3, 4, 8] {
        let par = Parallelism { options: "contiguous".parse().unwrap(), ..way(1, p, 1) };
        let plan = plans::plan(&model(2, 4, false), &par, &work(&par, S, 1, 1), SM);
        let area = |rank| {
            let masks = plan.kernels().filter(|k| matches!(k, Kernel::Attention(_))).filter_map(|k| k.mask());
            masks.map(|m| m.shape(&plan.views, rank).area).sum::<u64>()
        };
        let (n, p) = (S / u64::from(p), u64::from(p));
        assert_eq!((0..p as u32).map(area).sum::<u64>(), pairs(S));
        assert_eq!(area(p as u32 - 1), pairs(S) - pairs(S - n));
        // 2 - 1/P of the mean, but for the diagonal.
        let most = area(p as u32 - 1) as f64 * p as f64 / pairs(S) as f64;
        assert!((most - (2.0 - 1.0 / p as f64)).abs() < 1e-3, "{most}");
    }
}

#[test]
fn tokens_in_turn_are_even_but_for_the_diagonal() {
    for p in [2, 3, 4, 8] {
        let par = Parallelism { options: "stripe".parse().unwrap(), ..way(1, p, 1) };
        let plan = plans::plan(&model(2, 4, false), &par, &work(&par, S, 1, 1), SM);
        let area = |rank| {
            let masks = plan.kernels().filter(|k| matches!(k, Kernel::Attention(_))).filter_map(|k| k.mask());
            masks.map(|m| m.shape(&plan.views, rank).area).collect::<Vec<_>>()
        };
        let n = S / u64::from(p);
        for rank in 0..p {
            // With KV of ranks up to r the diagonal is seen, with those behind it is not.
            let want = (0..p).map(|step| if step <= rank { n * (n + 1) / 2 } else { n * (n - 1) / 2 });
            assert_eq!(area(rank), want.collect::<Vec<_>>(), "P {p} rank {rank}");
        }
    }
}

#[test]
fn model_flops_are_six_a_weight_and_attention() {
    for name in ["llama-3-8b", "llama-3-70b"] {
        let m = LlmSpec::find(name).unwrap();
        let (l, h, s) = (m.layers as f64, m.hidden as f64, 8192.0);
        let (q, kv) = ((m.heads * m.head_dim) as f64, (m.kv_heads * m.head_dim) as f64);
        let weights = l * (2.0 * h * q + 2.0 * h * kv + 3.0 * h * m.ffn as f64) + h * m.vocab as f64;
        let forward_attention = 4.0 * l * q * s * (s + 1.0) / 2.0;
        for (dp, ring, ulysses) in [(2, 2, 2), (8, 1, 1), (1, 1, 8)] {
            let par = way(dp, ring, ulysses);
            let work = work(&par, s as u64, 1, 2);
            let plan = plans::plan(&m, &par, &work, SM);
            let sequences = work.global_batch as f64;
            let model = sequences * (6.0 * weights * s + 3.0 * forward_attention);
            assert!(close(plan.about.model_flops, model), "{} {model}", plan.about.model_flops);
            // What runs computes S once more in the backward pass.
            let host = Host::of(&plan, 1.0);
            let flops = |plan: &Plan| 8.0 * cost(plan, host.machine(), Effort::SUMS).unwrap().mean().flops;
            assert!(close(flops(&plan), model + 0.5 * sequences * forward_attention));
            // Recomputation runs the layers' forward pass, not the head's, once more.
            let par = Parallelism { recompute: Recompute::Full, ..par };
            let again = 2.0 * (weights - h * m.vocab as f64) * s + forward_attention;
            let plan = plans::plan(&m, &par, &work, SM);
            assert!(close(plan.about.model_flops, model));
            assert!(close(flops(&plan), model + sequences * (0.5 * forward_attention + again)));
        }
    }
}

/// Six a weight of a product, attention, and the scan by chunks of Q tokens (arXiv:2405.21060, listing 1): C Bᵀ of every
/// group, that times X of every head, what goes into the states and what is read of them. What runs has S of attention,
/// and of the scan C Bᵀ, dY Xᵀ and the states, once more in the backward pass.
#[test]
fn a_hybrids_flops_are_those_of_its_layers() {
    let (h, f, v, s, q) = (4096.0, 21504.0, 131072.0, 8192.0, 128.0);
    let (heads, p, groups, n) = (128.0, 64.0, 8.0, 128.0);
    // Nemotron-H 8B (arXiv:2504.03624, table 2): 24 Mamba-2 layers, 24 networks, 4 of attention.
    let inner = heads * p;
    let mamba = h * (2.0 * inner + 2.0 * groups * n + heads) + inner * h;
    let weights = 24.0 * mamba + 24.0 * 2.0 * h * f + 4.0 * (2.0 * h * 4096.0 + 2.0 * h * 1024.0) + h * v;
    let attention = 4.0 * 4.0 * 4096.0 * s * (s + 1.0) / 2.0;
    let half = (q + 1.0) / 2.0;
    let [scores, values, states] = [2.0 * groups * n * half, 2.0 * inner * half, 2.0 * inner * n].map(|x| 24.0 * s * x);
    let scan = scores + values + 2.0 * states;
    let again = 0.5 * attention + scores + values + states;
    let m = LlmSpec::find("nemotron-h-8b").unwrap();
    for par in [Parallelism { dp: 2, ..way(1, 1, 1) }, Parallelism { tp: 2, ..way(1, 1, 1) }] {
        let work = work(&par, s as u64, 1, 2);
        let plan = plans::plan(&m, &par, &work, SM);
        let sequences = work.global_batch as f64;
        let model = sequences * (6.0 * weights * s + 3.0 * (attention + scan));
        assert!(close(plan.about.model_flops, model), "{} {model}", plan.about.model_flops);
        let host = Host::of(&plan, 1.0);
        let flops = 2.0 * cost(&plan, host.machine(), Effort::SUMS).unwrap().mean().flops;
        assert!(close(flops, model + sequences * again), "{flops} {}", model + sequences * again);
    }
}

fn kind_bytes(plan: &Plan, kind: TensorKind) -> u64 {
    plan.tensors.iter().filter(|t| t.kind == kind).map(|t| t.bytes() * u64::from(t.slots)).sum()
}

#[test]
fn zero_shares_twelve_bytes_a_weight_and_sends_each_gradient_and_weight_once() {
    // Every slot divides by the ranks, so that nothing is padded.
    let m = model(3, 4, false);
    let weights = 3 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H) + H + 2 * V * H;
    for (w, zero) in [(1, 0), (1, 1), (4, 0), (4, 1), (8, 1)] {
        let par = Parallelism { zero, ..way(w, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, 3), SM);
        let share = if zero == 1 { u64::from(w) } else { 1 };
        assert_eq!(kind_bytes(&plan, TensorKind::Param), 2 * weights);
        assert_eq!(kind_bytes(&plan, TensorKind::Grad), 4 * weights + 4, "and the loss");
        // fp32 weight, first and second moment.
        assert_eq!(kind_bytes(&plan, TensorKind::OptState), 12 * weights / share, "W {w} ZeRO {zero}");
        let usage = cost(&plan, Host::of(&plan, 1.0).machine(), Effort::SUMS).unwrap().mean();
        // Reduce-scatter of 4 bytes and all-gather of 2, or all-reduce of 4; all-reduce of the loss.
        let once = (f64::from(w) - 1.0) / f64::from(w);
        let each = if zero == 1 { 4 + 2 } else { 2 * 4 };
        assert!(close(usage.bytes_scale_up, once * (each * weights + 2 * 4) as f64), "W {w} ZeRO {zero}");
    }
}

/// Activations of one layer that the backward pass needs, bytes.
fn activations(n: u64, k: u64, ulysses: u64) -> u64 {
    let copies = if k < ulysses { ulysses / k } else { 1 };
    // The input of the layer and of the feed-forward network, each with its normalised form.
    let hidden = 4 * n * H * E;
    let attention = 2 * n * A * D * E + 2 * n * k * D * E * copies + n * A * 4;
    // After an exchange the output is kept twice: as attention wrote it, and as the projection read it.
    let exchanged = if ulysses > 1 { n * A * D * E } else { 0 };
    let ffn = 3 * n * F * E;
    hidden + attention + exchanged + ffn
}

#[test]
fn a_layer_more_keeps_its_activations() {
    for (k, dp, ring, ulysses) in [(4, 1, 1, 1), (8, 2, 1, 1), (4, 1, 3, 1), (4, 1, 1, 4), (2, 1, 1, 8), (4, 1, 2, 2)] {
        let kept = |layers, recompute, words: &str| {
            let par = Parallelism { recompute, options: words.parse().unwrap(), ..way(dp, ring, ulysses) };
            let plan = plans::plan(&model(layers, k, false), &par, &work(&par, S, 1, 2), SM);
            let layout = Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
            layout.live_by_kind.iter().find(|(kind, _)| *kind == TensorKind::Activation).unwrap().1
        };
        let alive = |layers, recompute| kept(layers, recompute, "default");
        let n = S / u64::from(ring * ulysses);
        assert_eq!(alive(7, Recompute::None) - alive(6, Recompute::None), activations(n, k, u64::from(ulysses)));
        assert_eq!(alive(7, Recompute::Full) - alive(6, Recompute::Full), n * H * E, "its input");
        // What attention leaves has the size of the input, and a number for each head.
        let [seven, six] = [7, 6].map(|layers| kept(layers, Recompute::Full, "keep-attention"));
        assert_eq!(seven - six, n * H * E + n * A * D * E + n * A * 4);
        for (words, less) in [("recompute-norm", 2 * n * H * E), ("recompute-act", n * F * E)] {
            let all = activations(n, k, u64::from(ulysses));
            let [seven, six] = [7, 6].map(|layers| kept(layers, Recompute::None, words));
            assert_eq!(seven - six, all - less, "{words}");
        }
    }
}

/// Experts that are made again leave a layer what it has without a network, those that every token visits among them.
#[test]
fn experts_that_are_made_again_keep_their_input() {
    for (ep, dp, ring) in [(1, 1, 1), (2, 2, 1), (4, 2, 2)] {
        let kept = |layers, words: &str| {
            let moe = MoeSpec { experts: 4, top_k: 2, ffn: 96, shared_ffn: 64, ..MoeSpec::default() };
            let model = LlmSpec { moe: Some(moe), ..model(layers, 4, false) };
            let par = Parallelism { ep, options: words.parse().unwrap(), ..way(dp, ring, 1) };
            let plan = plans::plan(&model, &par, &work(&par, S, 1, 2), SM);
            let layout = Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
            layout.live_by_kind.iter().find(|(kind, _)| *kind == TensorKind::Activation).unwrap().1
        };
        let each = |words: &str| kept(7, words) - kept(6, words);
        let n = S / u64::from(ring);
        assert_eq!(each("recompute-moe"), activations(n, 4, 1) - 3 * n * F * E);
        assert_eq!(each("recompute-moe+recompute-norm"), activations(n, 4, 1) - 3 * n * F * E - 2 * n * H * E);
        // Two of four experts have a row of each token each; logits, and what a row weighs, are in fp32.
        let experts = n * 2 * (H + 3 * 96) * E + n * 3 * 64 * E + n * 4 * 4 + n * 2 * 4;
        assert_eq!(each("default") - each("recompute-moe"), experts, "ep {ep}");
    }
}

/// Full recomputation attends twice, and with its output kept once.
#[test]
fn attention_that_is_kept_runs_once() {
    for (ring, ulysses) in [(1, 1), (1, 2), (4, 1)] {
        let forward = |words: &str| {
            let par =
                Parallelism { recompute: Recompute::Full, options: words.parse().unwrap(), ..way(1, ring, ulysses) };
            let plan = plans::plan(&model(4, 4, false), &par, &work(&par, S, 1, 1), SM);
            let found = cost(&plan, Host::of(&plan, 1.0).machine(), Effort::SUMS).unwrap();
            found.mean().by_kernel["attention"]
        };
        let (twice, once) = (forward("default"), forward("keep-attention"));
        assert!((twice / once - 2.0).abs() < 1e-9, "{twice} s and {once} s");
    }
}

/// A network in p pieces has rooms for n/p rows of gate, up, activation and their gradients in place of n, and makes gate
/// and up once more (TiledMLP of arXiv:2506.13996).
#[test]
fn a_network_in_pieces_has_room_for_one() {
    for (recompute, pieces) in [(Recompute::None, 4), (Recompute::Full, 8), (Recompute::Full, 5)] {
        let plan = |words: &str| {
            let par = Parallelism { recompute, options: words.parse().unwrap(), ..way(1, 1, 2) };
            plans::plan(&model(6, 4, false), &par, &work(&par, S, 1, 1), SM)
        };
        let (whole, pieced) = (plan("default"), plan(&format!("mlp-chunks-{pieces}")));
        let rooms = |plan: &Plan| {
            let names = ["gate_up", "act", "d_gate_up", "d_act"];
            let of = plan.tensors.iter().filter(|t| names.contains(&t.name.as_str()));
            of.map(|t| t.bytes() * u64::from(t.slots)).sum::<u64>()
        };
        let (n, row) = (S / 2, 3 * F * E);
        // Of each layer what is kept, or of one.
        let kept = if recompute == Recompute::Full { 1 } else { 6 };
        assert_eq!(rooms(&whole), (kept + 1) * n * row);
        assert_eq!(rooms(&pieced), 2 * n.div_ceil(pieces) * row);
        let flops = |plan: &Plan| cost(plan, Host::of(plan, 1.0).machine(), Effort::SUMS).unwrap().mean().flops;
        let again = 6.0 * (2 * n * H * 2 * F) as f64;
        assert!(close(flops(&pieced) - flops(&whole), again), "{} {again}", flops(&pieced) - flops(&whole));
    }
}

/// A pipeline on links so fast that they count for nothing, its stages so alike that embedding and head do not
/// either: shares of the step in which its ranks wait for one another, on average, and compute.
fn bubbles(pp: u32, vp: u32, m: u64) -> (f64, f64) {
    let wide = LlmSpec { vocab: 16, ..model(24 * u64::from(pp * vp), 4, false) };
    let par = Parallelism { pp, vp, ..Parallelism::default() };
    let plan = plans::plan(&wide, &par, &work(&par, 4096, 4, m), plans::COPY);
    let mut host = Host::of(&plan, 1e-6);
    host.stack.p2p_latency.value = foretrain::units::Seconds::new(0.0);
    host.cluster.spec.scale_up.latency.value = foretrain::units::Seconds::new(0.0);
    let host = host.issuing(0.0);
    let found = cost(&plan, host.machine(), Effort::SUMS).unwrap();
    let usage = found.mean();
    let step = found.step.value();
    assert!(usage.exposed_total() < 1e-3 * step, "{:?} of {step} are no communication", usage.exposed);
    (usage.bubble / step, usage.compute / step)
}

/// 1F1B: bubble (p-1)/(m+p-1) of the step. Interleaved: (p-1)/(v m) of the ideal time (arXiv:2104.04473,
/// section 2.2). The head is on one stage alone, which the forms leave out: two parts in a hundred here.
#[test]
fn bubbles_are_those_of_the_papers() {
    for (p, v, m) in [(2, 1, 4), (4, 1, 4), (4, 1, 16), (8, 1, 8), (4, 2, 8), (4, 2, 16), (8, 3, 16)] {
        let (bubble, compute) = bubbles(p, v, m);
        let ideal = f64::from(p - 1) / (f64::from(v) * m as f64);
        let want = ideal / (1.0 + ideal);
        assert!((bubble - want).abs() < 0.02, "p {p} v {v} m {m}: bubble {bubble} of the step, {want} expected");
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
        // What ranks of a stage do and wait for among themselves takes the place of compute in the forms.
        if words != "zb-h1" {
            let ideal = f64::from(pp - 1) / (f64::from(vp) * m as f64);
            let (bubble, want) = (usage.bubble / step, ideal / (1.0 + ideal));
            assert!(
                (bubble - want).abs() < 0.03,
                "pp {pp} vp {vp} m {m}: bubble {bubble} of the step, {want} expected"
            );
        }
    }
}

/// Forward, backward and its part that makes gradients of weights, of one microbatch of one stage, the bubble of a step,
/// and its time, all in s, of stages that are alike but for embedding and head.
fn split(p: u32, m: u64, words: &str) -> ([f64; 3], f64, f64) {
    let wide = LlmSpec { vocab: 16, ..model(24 * u64::from(p), 4, false) };
    let par = Parallelism { pp: p, options: words.parse().unwrap(), ..Parallelism::default() };
    let plan = plans::plan(&wide, &par, &work(&par, 4096, 4, m), plans::COPY);
    let mut host = Host::of(&plan, 1e-6);
    host.stack.p2p_latency.value = foretrain::units::Seconds::new(0.0);
    host.cluster.spec.scale_up.latency.value = foretrain::units::Seconds::new(0.0);
    let host = host.issuing(0.0);
    let found = cost(&plan, host.machine(), Effort { fold: true, stride: false, spans: true }).unwrap();
    let usage = found.mean();
    let of = |part: &str| {
        let inside = |span: &&foretrain::timeline::Span| span.path.starts_with(part) && span.what != "transfer";
        let spans = found.classes[1].spans.iter().filter(inside);
        spans.map(|span| span.duration().value()).sum::<f64>()
    };
    let parts = [of("fwd.0.0["), of("bwd.0.0[") + of("weights.0.0["), of("weights.0.0[")];
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
        // Embedding and head, which are whole and on one stage alone, are left out of the forms.
        let near = |bubble: f64, want: f64, step: f64| (bubble - want).abs() < 0.02 * step;
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
            let found = alike(&plans::plan(&wide, &par, &work(&par, 4096, 4, m), plans::COPY));
            (found.mean().exposed_total() + found.mean().bubble, found)
        };
        let (bubble, found) = of("dualpipe-v+overlap-exchange", 2);
        // Of the second stage, whose class stands behind the first's.
        let spans = &found.classes[1].spans;
        let busy = |part: &str| {
            let inside = spans.iter().filter(|span| span.path.starts_with(part) && span.what != "transfer");
            inside.map(|span| span.duration().value()).sum::<f64>()
        };
        let pair = spans.iter().find(|span| span.path.contains("+bwd.")).expect("a pair");
        let pair = busy(pair.path.split_inclusive('[').next().unwrap());
        let [inputs, weights] = ["bwd.1.0[", "weights.1.0["].map(busy);
        assert!(pair > inputs && inputs > weights && weights > 0.0, "{pair} {inputs} {weights}");
        let want = f64::from(p - 1) * (pair + (inputs + weights) - 3.0 * weights);
        let step = found.step.value();
        assert!((bubble - want).abs() < 0.02 * step, "p {p} m {m}: {bubble} of {step}, {want} expected");
        let (plain, _) = of("default", 1);
        assert!(bubble < 0.7 * plain, "p {p} m {m}: {bubble}, and 1F1B's {plain}");
    }
}

/// A step of stages that are alike but for embedding and head, on links that count for nothing.
fn alike(plan: &Plan) -> foretrain::timeline::Timeline {
    let mut host = Host::of(plan, 1e-6);
    host.stack.p2p_latency.value = foretrain::units::Seconds::new(0.0);
    host.cluster.spec.scale_up.latency.value = foretrain::units::Seconds::new(0.0);
    let host = host.issuing(0.0);
    cost(plan, host.machine(), Effort { fold: true, stride: false, spans: true }).unwrap()
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
            let layout = Layout::new(&plan, &AtomTable::new(&plan).unwrap(), stage).unwrap();
            layout.live_by_kind.iter().find(|(kind, _)| *kind == TensorKind::Activation).unwrap().1
        };
        for stage in 0..p {
            let (whole, halved) = (u64::from(p - stage), u64::from(stage));
            let want = whole * activations(S, k, 1) + halved * (read + written);
            assert_eq!(alive(6, stage) - alive(5, stage), want, "p {p} m {m} stage {stage}");
        }
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
        alike(&plans::plan(&even, &par, &work(&par, 256, 32, m), plans::COPY))
    };
    for (p, m) in [(4, 8), (4, 12), (5, 15), (8, 16)] {
        let times = f64::from(p - 1);
        for (words, units, least) in [("zb-v", 1.0, 0.95), ("v-half", 3.0, 0.5), ("v-min", 4.0, 0.6)] {
            let found = of(p, m, words, 2);
            let spans = &found.classes[1].spans;
            let busy = |part: &str| {
                let inside = spans.iter().filter(|span| span.path.starts_with(part) && span.what != "transfer");
                inside.map(|span| span.duration().value()).sum::<f64>()
            };
            let passes = ["fwd.0.0[", "bwd.0.0[", "weights.0.0["].map(busy);
            let unit = passes.iter().sum::<f64>() / 3.0;
            assert!(passes.iter().all(|pass| (pass / unit - 1.0).abs() < 0.1), "{passes:?}");
            let bubble = found.mean().exposed_total() + found.mean().bubble;
            let want = units * times * unit;
            // Halves are not quite equal, which V-Min has no slack for: a little more idles with every microbatch.
            let near = bubble > least * want && bubble < 1.3 * want;
            assert!(near, "{words} p {p} m {m}: {bubble}, {want} expected");
        }
        let plain = of(p, m, "default", 1);
        let (bubble, want) = (plain.mean().exposed_total() + plain.mean().bubble, 6.0 * times);
        let unit = plain.mean().compute / (6 * m) as f64;
        assert!((bubble / unit / want - 1.0).abs() < 0.05, "1F1B p {p} m {m}: {bubble}, {want} times {unit} expected");
    }
}

/// The same papers: activations of p microbatches at most in ZB-V, as 1F1B has on its first stage, of p/2 + 1 in V-Half and
/// (p+2)/3 in V-Min, whichever the stage. While a unit goes backward, gradients that its weights' will be made of come beside
/// them.
#[test]
fn pipelines_in_a_v_keep_what_the_papers_say() {
    let k = 4;
    for (p, m) in [(4, 9), (6, 12), (8, 16)] {
        for (words, most) in [("zb-v", p), ("v-half", p / 2 + 1), ("v-min", (p + 2u32).div_ceil(3))] {
            let par = Parallelism { pp: p, vp: 2, options: words.parse().unwrap(), ..Parallelism::default() };
            let alive = |layers: u64, stage: u32| {
                let plan = plans::plan(&model(2 * layers * u64::from(p), k, false), &par, &work(&par, S, 1, m), SM);
                let layout = Layout::new(&plan, &AtomTable::new(&plan).unwrap(), stage).unwrap();
                layout.live_by_kind.iter().find(|(kind, _)| *kind == TensorKind::Activation).unwrap().1
            };
            // A layer more in both chunks is what a layer more twice is in a stage of 1F1B.
            let grown: Vec<u64> = (0..p).map(|stage| (alive(4, stage) - alive(3, stage)) / 2).collect();
            let (top, one) = (*grown.iter().max().unwrap(), activations(S, k, 1));
            assert!(top <= u64::from(most) * one * 21 / 20, "{words} p {p}: {grown:?} of {most} times {one}");
            assert!(top > (u64::from(most) - 1) * one, "{words} p {p}: {grown:?} of {most} times {one}");
        }
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
            let layout = Layout::new(&plan, &AtomTable::new(&plan).unwrap(), stage).unwrap();
            layout.live_by_kind.iter().find(|(kind, _)| *kind == TensorKind::Activation).unwrap().1
        };
        for stage in 0..p {
            let flight = u64::from(p - stage).min(m);
            assert_eq!(alive(6, stage) - alive(5, stage), flight * activations(S, 4, 1), "p {p} m {m} stage {stage}");
        }
    }
}

/// arXiv:1910.02054, section 5 and 7: stage 2 keeps 1/W of the gradients, stage 3 of the weights too; what a
/// rank sends a microbatch is each gradient once, and with stage 3 each layer's weights twice.
#[test]
fn zero_two_and_three_share_gradients_and_weights() {
    let m = model(3, 4, false);
    let layers = 3 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H);
    let ends = H + 2 * V * H;
    for (w, zero, batches) in [(4, 2, 1), (4, 2, 3), (8, 3, 1), (8, 3, 3)] {
        let par = Parallelism { zero, ..way(w, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, batches), SM);
        let (all, share) = (layers + ends, u64::from(w));
        assert_eq!(kind_bytes(&plan, TensorKind::Param), 2 * all / if zero == 3 { share } else { 1 });
        assert_eq!(kind_bytes(&plan, TensorKind::Grad), 4 * all / share + 4, "and the loss");
        assert_eq!(kind_bytes(&plan, TensorKind::OptState), 12 * all / share);
        let usage = cost(&plan, Host::of(&plan, 1.0).machine(), Effort::SUMS).unwrap().mean();
        let once = (f64::from(w) - 1.0) / f64::from(w);
        // Weights of 2 bytes: once a step, or in every microbatch twice a layer, once embedding and head.
        let weights = if zero == 3 { batches * (2 * 2 * layers + 2 * ends) } else { 2 * all };
        assert!(close(usage.bytes_scale_up, once * (batches * 4 * all + weights + 2 * 4) as f64), "W {w} ZeRO {zero}");
    }
}

/// Of every microbatch each gradient is copied once and, with stage 3, the weights of layers twice, those of the ends once.
/// In memory one layer is in use, and two are on their way in and out; without copies two are in use.
#[test]
fn what_comes_and_goes_is_copied_once() {
    let m = model(3, 4, false);
    let layer = H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H;
    let (layers, ends) = (3 * layer, H + 2 * V * H);
    for (w, zero, batches) in [(4, 2, 1), (4, 2, 3), (8, 3, 1), (8, 3, 3)] {
        let [plain, copied] = ["default", "copy-shards"].map(|words| {
            let par = Parallelism { zero, options: words.parse().unwrap(), ..way(w, 1, 1) };
            plans::plan(&m, &par, &work(&par, 64, 1, batches), SM)
        });
        let line = Line::program(&copied, &AtomTable::new(&copied).unwrap(), 0).unwrap();
        let elems = line.nodes.iter().filter_map(|node| match node.op.kind {
            OpKind::Compute { kernel: Kernel::Cast { elems }, .. } => Some(elems),
            _ => None,
        });
        let weights = if zero == 3 { 2 * layers + ends } else { 0 };
        assert_eq!(elems.sum::<u64>(), batches * (layers + ends + weights), "W {w} ZeRO {zero}");
        assert!(plain.kernels().all(|kernel| !matches!(kernel, Kernel::Cast { .. })));
        let held = |plan: &Plan| {
            let shared = plan.tensors.iter().filter(|t| t.name.starts_with("w") || t.name.starts_with("g"));
            shared.map(|t| t.bytes() * u64::from(t.slots)).sum::<u64>()
        };
        let of_each = if zero == 3 { 2 + 4 } else { 4 };
        assert_eq!(held(&copied) - held(&plain), of_each * (layer + ends), "W {w} ZeRO {zero}");
        let sent = |plan: &Plan| cost(plan, Host::of(plan, 1.0).machine(), Effort::SUMS).unwrap().mean().bytes_scale_up;
        assert_eq!(sent(&copied), sent(&plain));
    }
}

/// arXiv:1910.02054, section 5: whoever has the sums whole has sent what all-reduces send, and the new weights on top.
#[test]
fn sums_that_are_whole_everywhere_are_sent_twice() {
    let m = model(3, 4, false);
    let all = 3 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H) + H + 2 * V * H;
    for (w, words, wire, batches) in [
        (4u64, "all-reduce-grads", 4, 3),
        (8, "all-reduce-grads+bf16-grads", 2, 1),
        (8, "all-reduce-grads+no-overlap-grad", 4, 2),
    ] {
        let par = Parallelism { zero: 1, options: words.parse().unwrap(), ..way(w as u32, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, batches), SM);
        assert_eq!(kind_bytes(&plan, TensorKind::Grad), wire * all + 4, "and the loss");
        assert_eq!(kind_bytes(&plan, TensorKind::OptState), 12 * all / w);
        let line = Line::program(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
        let loss = sent_by(&plan, &line, 0) - (2 * wire + 2) * all * (w - 1) / w;
        assert!(loss <= 2 * 4, "{words} over {w}: {loss} bytes besides, of which the loss takes 8 at most");
    }
}

/// arXiv:1910.02054, section 3.1: 16 bytes of a weight in mixed precision with gradients of 2 bytes; moments of 2 bytes
/// take 4 of them away, a copy in fp32 that is not there 4 more.
#[test]
fn an_optimizer_in_bf16_takes_eight_bytes_a_weight() {
    let m = model(3, 4, false);
    let all = 3 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H) + H + 2 * V * H;
    for (w, zero, words, weights, state) in [
        (1u64, 0, "bf16-grads", 2 * all, 12 * all),
        (1, 0, "bf16-grads+bf16-moments", 2 * all, 8 * all),
        (1, 0, "bf16-grads+bf16-moments+no-master", 2 * all, 4 * all),
        // A rank's share of the weights is kept where it is updated.
        (8, 1, "bf16-grads+bf16-moments+no-master", 2 * all + 2 * all / 8, 4 * all / 8),
        (8, 3, "bf16-grads+bf16-moments", 2 * all / 8, 8 * all / 8),
        (8, 3, "bf16-grads+bf16-moments+no-master", 2 * all / 8, 4 * all / 8),
    ] {
        let par = Parallelism { zero, options: words.parse().unwrap(), ..way(w as u32, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, 1), SM);
        assert_eq!(kind_bytes(&plan, TensorKind::Param), weights, "{words}, ZeRO {zero}");
        assert_eq!(kind_bytes(&plan, TensorKind::OptState), state, "{words}, ZeRO {zero}");
    }
}

/// The same in a pipeline, of what a rank's stage has: every microbatch scatters each gradient and, with stage 3, gathers
/// each layer's weights twice. Gradients that wait whole are scattered once a step.
#[test]
fn stages_scatter_and_gather_for_every_microbatch() {
    let (w, p, batches) = (4u64, 2u64, 6u64);
    let m = model(2 * p, 4, false);
    let layer = H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H;
    for (zero, words, scattered, gathered) in [
        (1, "default", 1, 1),
        (1, "bf16-grads", 1, 1),
        (3, "bf16-grads", batches, 2 * batches),
        (2, "default", batches, 1),
        (3, "default", batches, 2 * batches),
        (3, "no-sync", 1, 2 * batches),
    ] {
        let options = words.parse().unwrap();
        let par = Parallelism { pp: p as u32, zero, options, ..way(w as u32, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, batches), SM);
        // One microbatch of one stage, forward and backward: what a boundary carries.
        let boundary = 2 * 64 * H;
        for rank in [0, w as u32] {
            let line = Line::program(&plan, &AtomTable::new(&plan).unwrap(), plan.program_of(rank)).unwrap();
            let sent = sent_by(&plan, &line, rank);
            let ends = if rank == 0 { V * H } else { H + V * H };
            // Embedding and head are gathered once a microbatch.
            let weights = 2 * (gathered * 2 * layer + (gathered / 2).max(1) * ends);
            let wire = if words == "bf16-grads" { 2 } else { 4 };
            let once = (wire * scattered * (2 * layer + ends) + weights) * (w - 1) / w;
            let loss = if rank == 0 { 0 } else { sent - once - batches * boundary };
            assert_eq!(sent, once + batches * boundary + loss, "ZeRO {zero} {words}, rank {rank}");
            assert!(loss <= 2 * 4, "{loss} bytes of the loss");
        }
    }
}

/// MiCS, arXiv:2205.00119: in groups of N of W ranks weights and gradients travel within a group, and a share of
/// each gradient once a step over the W/N groups.
#[test]
fn groups_that_share_sum_over_each_other_once_a_step() {
    let m = model(3, 4, false);
    let layers = 3 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H);
    let (all, ends) = (layers + H + 2 * V * H, H + 2 * V * H);
    for (w, n, zero, batches) in [(8u64, 4u64, 1, 3), (8, 2, 2, 3), (8, 4, 3, 1), (4, 2, 3, 3)] {
        let options = format!("shard-{n}").parse().unwrap();
        let par = Parallelism { zero, options, ..way(w as u32, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, batches), SM);
        assert_eq!(kind_bytes(&plan, TensorKind::OptState), 12 * all / n, "W {w} N {n} ZeRO {zero}");
        let line = Line::program(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
        let scattered = if zero == 1 { 1 } else { batches };
        let gathered = if zero == 3 { batches * (2 * 2 * layers + 2 * ends) } else { 2 * all };
        let within = (4 * scattered * all + gathered) * (n - 1) / n;
        let groups = w / n;
        let across = 2 * 4 * (all / n) * (groups - 1) / groups;
        let loss = sent_by(&plan, &line, 0) - within - across;
        assert!(loss <= 2 * 4, "W {w} N {n} ZeRO {zero}: {loss} bytes besides, of which the loss takes 8 at most");
    }
}

/// With k KV heads on T > k tensor-parallel ranks each has the weights of one, and T/k neighbours sum what they found for
/// it: 2 d h elements a layer.
#[test]
fn kv_heads_on_several_ranks_sum_their_gradients() {
    for (t, k) in [(8u64, 2u64), (4, 1), (8, 4)] {
        let m = model(3, k, false);
        let par = Parallelism { tp: t as u32, ..way(1, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, 2), SM);
        let layer = H * (A / t * D + 2 * D) + A / t * D * H + 3 * H * F / t + 2 * H;
        assert_eq!(kind_bytes(&plan, TensorKind::Param), 2 * (3 * layer + H + 2 * V / t * H), "T {t} k {k}");
        let steps = Steps::of(&plan);
        let sums = (0..steps.line.nodes.len()).filter(|&i| steps.line.nodes[i].op.label == "kv_grad_sum");
        let bytes: Vec<u64> = sums.map(|i| steps.bytes(&steps.line.reads(i)[0])).collect();
        assert_eq!(bytes, [4 * 2 * D * H; 3], "once a step, T {t} k {k}");
        let groups: Vec<&Group> = plan
            .lanes
            .iter()
            .filter_map(|lane| match lane {
                Lane::Comm(group @ Group::Subset { axis: Axis::Tp, .. }, _) => Some(group),
                _ => None,
            })
            .collect();
        assert_eq!(groups.iter().map(|group| u64::from(group.size(&plan.views))).collect::<Vec<_>>(), [t / k]);
    }
}

/// Keys of 24 elements and values of 12 travel for every head, not compressed (DeepSeek-V2, arXiv:2405.04434, section
/// 2.1, as it is trained): n a (dqk + dv) elements a ring hop, and q, k, v and o once through a Ulysses exchange.
#[test]
fn latent_attention_sends_the_keys_and_values_of_every_head() {
    let mla = MlaSpec { q_lora: Some(24), kv_lora: 16, rope_dim: 8, nope_dim: 16, v_dim: 12 };
    let llm = LlmSpec { mla: Some(mla), ..model(2, A, false) };
    let (n, qk, v) = (S / 4, 24, 12);
    for (ring, ulysses, bytes) in [(4, 1, 3 * n * A * (qk + v) * E), (1, 4, n * A * (qk + (qk + v) + v) * E / 4 * 3)] {
        let par = way(1, ring, ulysses);
        let plan = plans::plan(&llm, &par, &work(&par, S, 1, 1), SM);
        assert_eq!(Steps::of(&plan).sent(FORWARD), bytes, "ring {ring} ulysses {ulysses}");
    }
}

/// Attention of heads whose queries and keys are d wide and values v: 2 (d + v) FLOPs a visible pair forward, and
/// 2 (3 d + 2 v) backward.
#[test]
fn flops_of_latent_attention() {
    let mla = MlaSpec { q_lora: None, kv_lora: 16, rope_dim: 8, nope_dim: 16, v_dim: 12 };
    let llm = LlmSpec { mla: Some(mla), ..model(1, A, false) };
    let par = way(1, 1, 1);
    let plan = plans::plan(&llm, &par, &work(&par, S, 1, 1), SM);
    let pairs = S * (S + 1) / 2;
    for (name, flops) in
        [("attention", 2 * pairs * A * (24 + 12)), ("attention_bwd", 2 * pairs * A * (3 * 24 + 2 * 12))]
    {
        let kernel = plan.kernels().find(|k| k.name() == name).unwrap();
        let sizes = kernel.operands(&plan.views);
        let [reads, writes] = [sizes.reads, sizes.writes].map(|all| all.iter().map(|n| n * E).collect::<Vec<_>>());
        assert_eq!(kernel.work(&plan.views, 0, &reads, &writes).unwrap().flops, flops, "{name}");
    }
}

/// What plans have of a model is all that its config counts.
#[test]
fn plans_have_all_weights_of_a_model() {
    for (name, ep) in
        [("deepseek-v3", 8), ("qwen3-235b-a22b", 8), ("qwen3-30b-a3b", 8), ("mixtral-8x7b", 4), ("llama-3-8b", 1)]
    {
        let llm = LlmSpec::find(name).unwrap();
        let par = Parallelism { dp: ep, ep, zero: 1, ..Parallelism::default() };
        let plan = plans::plan(&llm, &par, &work(&par, 4096, 1, 1), SM);
        let all: u64 = plan.params.iter().map(|p| p.shape.iter().product::<u64>()).sum();
        assert_eq!(all, llm.params() + llm.mtp_params(), "{name}");
    }
}
