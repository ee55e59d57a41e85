//! Rings, and keys and values that are gathered in place of one.

use crate::notation::{A, BACKWARD, D, E, FORWARD, S, Steps, built, kind_bytes, said};
use crate::plans::{self, FLAT, Host, SM, model, way, work};
use foretrain::cost::cost;
use foretrain::plan::link::AtomTable;
use foretrain::plan::memory::Layout;
use foretrain::plan::*;
use foretrain::spec::options::WORDS;
use foretrain::spec::*;
use foretrain::strategy::attention_pass;

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

#[test]
fn a_reverse_walk_brings_dkv_home_in_the_models_dtype() {
    for (k, p) in [(8, 2), (4, 3), (4, 4), (2, 5), (1, 8)] {
        let plan = said("dkv-model", k, p as u32, 1);
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
        let plan = said("burst", k, p as u32, 1);
        let n = S / p;
        let (qb, kvb, lseb) = (n * A * D * E, 2 * n * k * D * E, n * A * 4);
        let steps = Steps::of(&plan);
        assert_eq!(steps.sent(FORWARD), (p - 1) * kvb, "k {k} P {p}");
        // q, the gradient of the output, log-sum-exp and delta; and dQ, one hop more.
        assert_eq!(steps.sent(BACKWARD), (p - 1) * (2 * qb + 2 * lseb) + p * qb, "k {k} P {p}");
    }
    // Of MHA it sends fewer bytes than circulating KV does, of GQA more.
    let sent = |words, k| Steps::of(&said(words, k, 8, 1)).sent(BACKWARD);
    assert!(sent("burst", 8) < sent("default", 8) && sent("burst", 1) > sent("default", 1));
}

#[test]
fn a_double_ring_leaves_a_window_once_in_so_many_steps() {
    for (k, p, w) in [(8, 4, 2), (4, 8, 2), (4, 8, 4), (1, 16, 8), (2, 6, 2)] {
        let plan = said(&format!("double-ring-{w}"), k, p as u32, 1);
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
    let [one, two] = ["default", "kv-in-two"].map(|words| said(words, 4, 4, 1));
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
    let plan = said("merge-at-end", 4, p as u32, 1);
    let steps = Steps::of(&plan);
    assert_eq!(slots_used(&steps, FORWARD, "kv_ring"), p - 1, "all KV but the own");
    assert_eq!(slots_used(&steps, FORWARD, "o_block"), p, "every output");
    assert_eq!(steps.count(FORWARD, "merge"), p);
    let plan = said("merge-in-kernel", 4, p as u32, 1);
    let steps = Steps::of(&plan);
    assert_eq!((steps.count(FORWARD, "merge"), steps.count(BACKWARD, "dq_add")), (0, 0));
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
    // Of eight gathers, and of the scatters behind them, one shows.
    assert!(ahead < whole / 8.0, "{ahead} of {whole}");
    assert!(ahead_buffers < whole_buffers / 2, "two of eight KV heads at a time");
}
