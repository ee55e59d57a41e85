//! Models of every family, and the reference's weights as their checkpoints have them, by hand.

use std::collections::BTreeMap;

pub const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 12, "vocab_size": 29, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
    "hidden_act": "silu", "tie_word_embeddings": false}"#;
pub const GPT2: &str = r#"{"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "vocab_size": 29, "resid_pdrop": 0.1}"#;

pub const QWEN3: &str = r#"{"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 12, "vocab_size": 29, "rms_norm_eps": 1e-5,
    "rope_theta": 100.0, "hidden_act": "silu", "tie_word_embeddings": false}"#;
pub const MIXTRAL: &str = r#"{"model_type": "mixtral", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 12, "vocab_size": 29, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
    "hidden_act": "silu", "tie_word_embeddings": false, "num_local_experts": 4, "num_experts_per_tok": 2}"#;
pub const QWEN3_MOE: &str = r#"{"model_type": "qwen3_moe", "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 99, "vocab_size": 29,
    "rms_norm_eps": 1e-5, "rope_theta": 100.0, "hidden_act": "silu", "tie_word_embeddings": false, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": true, "decoder_sparse_step": 1,
    "mlp_only_layers": []}"#;

/// A dense layer and two with experts, of which those of two groups of four may be chosen.
pub const DEEPSEEK: &str = r#"{"model_type": "deepseek_v3", "hidden_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 6, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 5, "intermediate_size": 12, "moe_intermediate_size": 10,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": true, "routed_scaling_factor": 2.5, "vocab_size": 29, "rms_norm_eps": 1e-6,
    "rope_theta": 100.0, "hidden_act": "silu", "tie_word_embeddings": false}"#;

/// The same whose attention sees the five keys that an indexer chooses.
pub fn deepseek_32() -> String {
    let config = DEEPSEEK.replace("deepseek_v3", "deepseek_v32");
    config.replace("\"vocab_size\"", "\"index_n_heads\": 2, \"index_head_dim\": 6, \"index_topk\": 5, \"vocab_size\"")
}

/// The tensors of a checkpoint: shape and values.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// The reference's weights as a family's checkpoints have them.
pub type Theirs = fn(&BTreeMap<String, Vec<f64>>) -> Tensors;

fn transposed(values: &[f32], cols: usize) -> Vec<f32> {
    (0..values.len()).map(|i| values[i % (values.len() / cols) * cols + i / (values.len() / cols)]).collect()
}

/// The reference's weights as Llama's checkpoints have them, by hand: 4 heads and 2 KV heads of 4, 12 wide.
pub fn as_llama(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
    let mut all = Tensors::new();
    for (name, values) in ours {
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        let mut rows = |theirs: &str, from: usize, to: usize| {
            all.insert(theirs.into(), (vec![to - from, 16], values[from * 16..to * 16].to_vec()));
        };
        if name.contains("qkv_proj") {
            for (part, from, to) in [("q_proj", 0, 16), ("k_proj", 16, 24), ("v_proj", 24, 32)] {
                rows(&name.replace("qkv_proj", part), from, to);
            }
        } else if name.contains("gate_up_proj") {
            rows(&name.replace("gate_up_proj", "gate_proj"), 0, 12);
            rows(&name.replace("gate_up_proj", "up_proj"), 12, 24);
        } else {
            let shape = if name.contains("norm") {
                vec![16]
            } else if name.contains("down_proj") {
                vec![16, 12]
            } else {
                vec![values.len() / 16, 16]
            };
            all.insert(name.clone(), (shape, values));
        }
    }
    all
}

/// The same with heads of 6 and norms of theirs.
pub fn as_qwen3(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
    let mut all = Tensors::new();
    for (name, values) in ours {
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        if name.contains("qkv_proj") {
            for (part, from, to) in [("q_proj", 0, 24), ("k_proj", 24, 36), ("v_proj", 36, 48)] {
                let rows = values[from * 16..to * 16].to_vec();
                all.insert(name.replace("qkv_proj", part), (vec![to - from, 16], rows));
            }
        } else if name.contains("q_norm") || name.contains("k_norm") {
            all.insert(name.clone(), (vec![6], values));
        } else if name.contains("o_proj") {
            all.insert(name.clone(), (vec![16, 24], values));
        } else {
            let given = BTreeMap::from([(name.clone(), values.iter().map(|&x| f64::from(x)).collect())]);
            all.extend(as_llama(&given));
        }
    }
    all
}

/// Four experts of 12, whose matrices lie below each other in ours, apart.
fn with_experts(ours: &BTreeMap<String, Vec<f64>>, others: Theirs, layer: &str, parts: [&str; 3]) -> Tensors {
    let (experts, rest): (BTreeMap<_, _>, BTreeMap<_, _>) =
        ours.clone().into_iter().partition(|(name, _)| name.contains("mlp.experts"));
    let renamed = others(&rest).into_iter().map(|(name, t)| (name.replace("mlp.gate.", &format!("{layer}.gate.")), t));
    let mut all: Tensors = renamed.collect();
    for (name, values) in experts {
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        let prefix = name.split("mlp.experts").next().expect("a layer");
        let (theirs, shape) = match name.contains("gate_up_proj") {
            true => (&parts[..2], vec![12, 16]),
            false => (&parts[2..], vec![16, 12]),
        };
        let names =
            (0..4).flat_map(|e| theirs.iter().map(move |part| format!("{prefix}{layer}.experts.{e}.{part}.weight")));
        all.extend(names.zip(values.chunks(12 * 16)).map(|(name, part)| (name, (shape.clone(), part.to_vec()))));
    }
    all
}

pub fn as_mixtral(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
    with_experts(ours, as_llama, "block_sparse_moe", ["w1", "w3", "w2"])
}

pub fn as_qwen3_moe(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
    with_experts(ours, as_qwen3, "mlp", ["gate_proj", "up_proj", "down_proj"])
}

/// Columns of DeepSeek's matrices, by parts of names; what else there is has 16.
const DEEPSEEK_COLS: &[(&str, usize)] = &[
    ("q_b_proj", 8),
    ("wq_b", 8),
    ("kv_b_proj", 6),
    ("o_proj", 20),
    ("shared_experts.down_proj", 10),
    ("experts.down_proj", 10),
    ("mlp.down_proj", 12),
];

/// Eight experts of 10, one that every token visits, and a dense network of 12.
pub fn as_deepseek(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
    let mut all = Tensors::new();
    for (name, values) in ours {
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        let cols = DEEPSEEK_COLS.iter().find(|(part, _)| name.contains(part)).map_or(16, |(_, cols)| *cols);
        let mut matrix = |name: String, part: &[f32]| all.insert(name, (vec![part.len() / cols, cols], part.to_vec()));
        let halves = ["gate_proj", "up_proj"];
        if let Some((prefix, _)) = name.split_once("mlp.experts.gate_up_proj") {
            for (i, part) in values.chunks(10 * 16).enumerate() {
                matrix(format!("{prefix}mlp.experts.{}.{}.weight", i / 2, halves[i % 2]), part);
            }
        } else if let Some((prefix, _)) = name.split_once("mlp.experts.down_proj") {
            for (i, part) in values.chunks(10 * 16).enumerate() {
                matrix(format!("{prefix}mlp.experts.{i}.down_proj.weight"), part);
            }
        } else if name.contains("gate_up_proj") {
            for (half, part) in halves.into_iter().zip(values.chunks(values.len() / 2)) {
                matrix(name.replace("gate_up_proj", half), part);
            }
        } else if name.contains("norm") {
            all.insert(name.clone(), (vec![values.len()], values));
        } else {
            matrix(name.clone(), &values);
        }
    }
    all
}

/// What the routers of both layers add to their scores, enough to change what they choose.
pub fn router_bias() -> BTreeMap<String, Vec<f32>> {
    let name = |layer| format!("model.layers.{layer}.mlp.gate.e_score_correction_bias");
    [1, 2].map(|layer| (name(layer), (0..8).map(|e| 0.05 * ((e * layer) % 5) as f32).collect())).into()
}

/// And as GPT-2's: what its Conv1D layers hold is `[in, out]`.
pub fn as_gpt2(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
    let rename = [
        ("model.layers.", "transformer.h."),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
        ("self_attn.qkv_proj", "attn.c_attn"),
        ("self_attn.o_proj", "attn.c_proj"),
        ("mlp.up_proj", "mlp.c_fc"),
        ("mlp.down_proj", "mlp.c_proj"),
        ("model.norm", "transformer.ln_f"),
        ("model.embed_tokens", "transformer.wte"),
        ("model.embed_positions", "transformer.wpe"),
    ];
    let theirs = |name: &String| rename.iter().fold(name.clone(), |name, (a, b)| name.replace(a, b));
    let tensor = |(name, values): (&String, &Vec<f64>)| {
        let (name, values) = (theirs(name), values.iter().map(|&x| x as f32).collect::<Vec<f32>>());
        let vector = name.ends_with(".bias") || name.contains("ln_");
        let cols = if name.contains("mlp.c_proj") { 64 } else { 16 };
        let tensor = match (vector, name.contains(".c_")) {
            (true, _) => (vec![values.len()], values),
            (_, true) => (vec![cols, values.len() / cols], transposed(&values, cols)),
            _ => (vec![values.len() / cols, cols], values),
        };
        (name, tensor)
    };
    ours.iter().map(tensor).collect()
}
