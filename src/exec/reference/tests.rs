//! Gradients by finite differences, and what a step must do whatever the numbers.

use super::config::*;
use super::*;
use crate::spec::{Gate, IndexerSpec, MambaSpec, Mixer, Score};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

const ADAM: Adam = Adam { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 };

fn tiny(kv_heads: usize, tie: bool) -> DenseConfig {
    let (eps, theta) = (1e-5, 100.0);
    DenseConfig {
        layers: 2,
        hidden: 6,
        heads: 4,
        kv_heads,
        head_dim: 4,
        ffn: 5,
        vocab: 7,
        eps,
        theta,
        scaling: None,
        score_factor: 1.0,
        tie,
        blocks: Blocks::LLAMA,
        window: None,
        documents: vec![],
        mla: None,
        indexer: None,
        experts: None,
        dense_layers: 0,
        every: 0,
        dense_at: Vec::new(),
        windowed: vec![],
        pattern: vec![],
        mamba: None,
        muon: BTreeMap::new(),
        mtp: Mtp::default(),
    }
}

fn random_params(cfg: &DenseConfig) -> BTreeMap<String, Vec<f64>> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut draw = |n: usize| (0..n).map(|_| rng.random_range(-1.0..1.0)).collect();
    cfg.shapes().into_iter().map(|(name, (rows, cols))| (name, draw(rows * cols))).collect()
}

fn batch() -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    (vec![vec![1, 5, 0, 5, 2], vec![6, 1, 3]], vec![vec![5, 0, 5, 2, 4], vec![1, 3, 3]])
}

fn run(cfg: &DenseConfig, params: &BTreeMap<String, Vec<f64>>) -> StepResult {
    let (tokens, targets) = batch();
    step(cfg, params, &tokens, &targets, &ADAM)
}

fn check_gradients(cfg: &DenseConfig) {
    check_gradients_by(cfg, 1e-5);
}

/// `by` steps of so much: smaller ones where slopes change fast.
fn check_gradients_by(cfg: &DenseConfig, by: f64) {
    let params = random_params(cfg);
    let result = run(cfg, &params);
    for (name, i) in params.iter().flat_map(|(name, p)| (0..p.len()).map(move |i| (name, i))) {
        let loss = |by: f64| {
            let mut moved = params.clone();
            moved.get_mut(name).unwrap()[i] += by;
            let moved = run(cfg, &moved);
            // An indexer learns by the divergence of its scores, and nothing else does.
            if name.contains(".indexer.") { moved.divergence } else { moved.loss }
        };
        let slope = (loss(by) - loss(-by)) / (2.0 * by);
        let grad = result.grads[name][i];
        assert!((grad - slope).abs() < 1e-8 * (1.0 + slope.abs()), "{name}[{i}]: {grad}, slope {slope}");
    }
}

#[test]
fn gradients_equal_finite_differences_with_grouped_queries() {
    check_gradients(&tiny(2, false));
}

#[test]
fn gradients_equal_finite_differences_with_norms_of_heads() {
    check_gradients(&DenseConfig { blocks: Blocks { qk_norm: true, ..Blocks::LLAMA }, ..tiny(2, false) });
}

#[test]
fn gradients_equal_finite_differences_with_experts() {
    let none = u32::MAX;
    let choices = vec![vec![vec![0, 2, 2, 1, 1, 0, none, 2, none, none], vec![2, 0, 2, 1, 0, 2]]];
    for (score, normalise, scale, shared) in
        [(Score::Softmax, true, 1.0, 0), (Score::Softmax, false, 1.0, 3), (Score::Sigmoid, true, 2.5, 2)]
    {
        let gate = Gate { score, normalise, scale };
        let experts = Experts {
            count: 3,
            top_k: 2,
            ffn: 4,
            shared,
            latent: 0,
            gate,
            groups: None,
            fp8_rows: false,
            choices: choices.clone(),
        };
        check_gradients(&DenseConfig { experts: Some(experts), ..tiny(2, false) });
    }
}

/// Heads of 3 + 4 elements and values of 2, queries compressed and not.
#[test]
fn gradients_equal_finite_differences_with_latent_attention() {
    for q_lora in [Some(5), None] {
        let mla = Some(Mla { q_lora, kv_lora: 3, rope: 4, nope: 3, v: 2 });
        check_gradients(&DenseConfig { mla, head_dim: 7, documents: vec![2, 3], ..tiny(4, false) });
    }
}

/// Three keys of a query at most, in both orders of what turns.
#[test]
fn gradients_equal_finite_differences_with_chosen_keys() {
    for interleaved in [false, true] {
        let mla = Some(Mla { q_lora: Some(5), kv_lora: 3, rope: 4, nope: 3, v: 2 });
        let indexer = Some(IndexerSpec { heads: 2, head_dim: 6, top_k: 3, interleaved });
        let cfg = DenseConfig { mla, indexer, head_dim: 7, ..tiny(4, false) };
        check_gradients_by(&cfg, 1e-6);
        let (all, few) = (DenseConfig { indexer: None, ..cfg.clone() }, run(&cfg, &random_params(&cfg)));
        assert!(few.divergence > 0.0 && few.loss != run(&all, &random_params(&cfg)).loss);
    }
}

/// A dense layer before one with experts.
#[test]
fn gradients_equal_finite_differences_with_layers_of_two_kinds() {
    let choices = vec![vec![vec![0, 2, 1, 0, 2], vec![2, 1, 0]]];
    let experts = Experts {
        count: 3,
        top_k: 1,
        ffn: 4,
        shared: 2,
        latent: 0,
        gate: Gate::default(),
        groups: None,
        fp8_rows: false,
        choices,
    };
    check_gradients(&DenseConfig { experts: Some(experts), dense_layers: 1, ..tiny(2, false) });
}

/// Every kind of layer, the states by their recurrence; experts on fewer columns than the hidden states have.
#[test]
fn gradients_equal_finite_differences_with_layers_of_one_mixer_each() {
    let mamba = Some(MambaSpec { heads: 4, head_dim: 3, groups: 2, state: 3, conv: 3, chunk: 2 });
    let choices = vec![vec![vec![0, 2, 2, 1, 1, 0, 0, 2, 1, 2], vec![2, 0, 2, 1, 0, 2]]];
    let gate = Gate { score: Score::Sigmoid, normalise: true, scale: 2.5 };
    let all = vec![Mixer::Mamba, Mixer::Experts, Mixer::Attention, Mixer::Mamba, Mixer::Mlp];
    for (latent, pattern) in [(0, vec![Mixer::Experts, Mixer::Mamba]), (4, all)] {
        let choices = choices.clone();
        let experts = Some(Experts {
            count: 3,
            top_k: 2,
            ffn: 4,
            shared: 2,
            latent,
            gate,
            groups: None,
            fp8_rows: false,
            choices,
        });
        let blocks = Blocks { relu2: true, rotary: 0, ..Blocks::LLAMA };
        let cfg = DenseConfig { layers: pattern.len(), pattern, mamba, blocks, experts, ..tiny(2, false) };
        // Norms of small numbers bend much.
        check_gradients_by(&cfg, 1e-6);
    }
}

#[test]
fn gradients_equal_finite_differences_in_a_window_of_documents() {
    check_gradients(&DenseConfig { window: Some(2), documents: vec![2, 3], ..tiny(2, false) });
}

/// A packed sequence is its documents, one by one.
#[test]
fn documents_do_not_know_of_each_other() {
    let cfg = DenseConfig { documents: vec![2, 3], ..tiny(2, false) };
    let params = random_params(&cfg);
    let hidden =
        |cfg: &DenseConfig, tokens: &[u32]| step(cfg, &params, &[tokens.to_vec()], &[tokens.to_vec()], &ADAM).hidden;
    let packed = hidden(&cfg, &[1, 5, 0, 5, 2]).concat();
    let apart = [hidden(&tiny(2, false), &[1, 5]), hidden(&tiny(2, false), &[0, 5, 2])].concat().concat();
    assert!(packed.iter().zip(&apart).all(|(a, b)| (a - b).abs() < 1e-12));
}

#[test]
fn gradients_equal_finite_differences_with_a_tied_head() {
    let cfg = tiny(4, true);
    assert!(!cfg.shapes().contains_key(LM_HEAD));
    check_gradients(&cfg);
}

#[test]
fn a_model_that_knows_nothing_loses_the_logarithm_of_the_vocabulary() {
    let cfg = tiny(1, false);
    let mut params = random_params(&cfg);
    params.get_mut(LM_HEAD).unwrap().fill(0.0);
    assert!((run(&cfg, &params).loss - 7f64.ln()).abs() < 1e-12);
}

#[test]
fn the_future_does_not_change_the_past() {
    let cfg = tiny(2, false);
    let params = random_params(&cfg);
    let (tokens, targets) = batch();
    let mut other = tokens.clone();
    other[0][3] = 6;
    let [a, b] = [tokens, other].map(|tokens| step(&cfg, &params, &tokens, &targets, &ADAM).hidden);
    assert_eq!(a[0][..3 * 6], b[0][..3 * 6]);
    assert_ne!(a[0][3 * 6..], b[0][3 * 6..]);
    assert_eq!(a[1], b[1]);
}

#[test]
fn the_first_step_of_adam_moves_by_the_learning_rate_against_the_gradient() {
    let cfg = tiny(2, false);
    let params = random_params(&cfg);
    let result = run(&cfg, &params);
    for (name, old) in &params {
        for ((old, new), grad) in old.iter().zip(&result.new_params[name]).zip(&result.grads[name]) {
            let expected = 0.01 * grad / (grad.abs() + 1e-8);
            assert!((old - new - expected).abs() < 1e-12, "{name}: {old} {new} {grad}");
        }
    }
}

/// Six experts in three groups, two of which may be chosen from: those with the highest sums of two.
#[test]
fn routers_choose_by_groups_and_by_their_bias() {
    let gate = Gate { score: Score::Sigmoid, ..Gate::default() };
    let cfg = |summed: usize| {
        let groups = Some([3, 2, summed]);
        let experts = Experts {
            count: 6,
            top_k: 2,
            ffn: 4,
            shared: 0,
            latent: 0,
            gate,
            groups,
            fp8_rows: false,
            choices: vec![],
        };
        DenseConfig { layers: 1, experts: Some(experts), ..tiny(2, false) }
    };
    let mut params = random_params(&cfg(2));
    // Logits are nearly those of a bias: weights of the router are 0.
    params.get_mut("model.layers.0.mlp.gate.weight").unwrap().fill(0.0);
    let mut chosen = |summed: usize, bias: [f64; 6]| {
        params.insert("model.layers.0.mlp.gate.e_score_correction_bias".into(), bias.to_vec());
        route(&cfg(summed), &params, &[vec![1]])[0][0].clone()
    };
    assert_eq!(chosen(2, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]), [5, 4]);
    // The highest of all stands in a group whose two are less than those of others.
    assert_eq!(chosen(2, [1.0, -1.0, 0.2, 0.3, 0.4, 0.5]), [5, 4]);
    assert_eq!(chosen(2, [1.0, -0.1, 0.2, 0.3, 0.4, 0.5]), [0, 5]);
    // But not less than theirs by the highest alone.
    assert_eq!(chosen(1, [1.0, -1.0, 0.2, 0.3, 0.4, 0.5]), [0, 5]);
}
