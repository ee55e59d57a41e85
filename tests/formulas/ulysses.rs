//! Exchanges of heads (Ulysses), alone and around rings.

use crate::notation::{A, BACKWARD, D, E, FORWARD, S, Steps, built, pairs, said};
use crate::plans::{self, FLAT, Host, SM, close, model, way, work};
use foretrain::cost::cost;
use foretrain::plan::*;
use foretrain::spec::*;

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
