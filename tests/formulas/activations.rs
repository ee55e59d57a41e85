//! What a layer keeps for its backward pass, and what it costs to make that again.

use crate::notation::{A, D, E, F, H, S, live};
use crate::plans::{self, Host, SM, close, model, way, work};
use foretrain::cost::{Effort, cost};
use foretrain::plan::*;
use foretrain::spec::*;

/// Activations of one layer that the backward pass needs, bytes.
pub fn activations(n: u64, k: u64, ulysses: u64) -> u64 {
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
            live(&plan, 0)
        };
        let alive = |layers, recompute| kept(layers, recompute, "default");
        let n = S / u64::from(ring * ulysses);
        assert_eq!(alive(7, Recompute::None) - alive(6, Recompute::None), activations(n, k, u64::from(ulysses)));
        assert_eq!(alive(7, Recompute::Full) - alive(6, Recompute::Full), n * H * E, "its input");
        // What attention leaves has the size of the input, and a number for each head.
        let [seven, six] = [7, 6].map(|layers| kept(layers, Recompute::Full, "keep-attention"));
        assert_eq!(seven - six, n * H * E + n * A * D * E + n * A * 4);
        // A code in place of two bytes, and four for each scale, which begin where memory is aligned.
        let coded = |cols: u64| n * cols * (E - 1) - (4 * n * cols.div_ceil(128)).next_multiple_of(256);
        for (words, less) in [
            ("recompute-norm", 2 * n * H * E),
            ("recompute-act", n * F * E),
            ("recompute-mlp", 3 * n * F * E),
            ("fp8+keep-fp8", 2 * coded(H) + coded(F)),
            ("fp8+keep-fp8+recompute-norm", 2 * n * H * E + coded(F)),
            ("fp8+keep-fp8+recompute-mlp", 2 * coded(H) + 3 * n * F * E),
        ] {
            let all = activations(n, k, u64::from(ulysses));
            let [seven, six] = [7, 6].map(|layers| kept(layers, Recompute::None, words));
            assert_eq!(seven - six, all - less, "{words}");
        }
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
            live(&plan, 0) as f64
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

/// Experts that are made again leave a layer what it has without a network, those that every token visits among them.
#[test]
fn experts_that_are_made_again_keep_their_input() {
    for (ep, dp, ring) in [(1, 1, 1), (2, 2, 1), (4, 2, 2)] {
        let kept = |layers, words: &str| {
            let moe = MoeSpec { experts: 4, top_k: 2, ffn: 96, shared_ffn: 64, ..MoeSpec::default() };
            let model = LlmSpec { moe: Some(moe), ..model(layers, 4, false) };
            let par = Parallelism { ep, options: words.parse().unwrap(), ..way(dp, ring, 1) };
            let plan = plans::plan(&model, &par, &work(&par, S, 1, 2), SM);
            live(&plan, 0)
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

/// A network that runs again multiplies by the matrices before its activation once more, and by the one behind it twice as ever.
#[test]
fn a_network_that_runs_again_makes_gate_and_up_once_more() {
    let flops = |words: &str| {
        let par = Parallelism { options: words.parse().unwrap(), ..way(1, 1, 1) };
        let plan = plans::plan(&model(3, 4, false), &par, &work(&par, S, 1, 1), SM);
        cost(&plan, Host::of(&plan, 1.0).machine(), Effort::SUMS).unwrap().mean().flops
    };
    let again = flops("recompute-mlp") - flops("default");
    assert!(close(again, (3 * 2 * S * H * 2 * F) as f64), "{again}");
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
