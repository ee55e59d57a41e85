//! The work of a model, and how masks share it out.

use crate::notation::{A, D, E, F, H, S, V, built, pairs};
use crate::plans::{self, FLAT, Host, SM, close, model, way, work};
use foretrain::cost::{Effort, cost};
use foretrain::plan::*;
use foretrain::spec::*;

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
