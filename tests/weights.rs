//! Hugging Face weights in, and what a step brought out again under the same names: whatever the layout, the file is
//! the dense reference's.

use foretrain::exec::reference::{self, DenseConfig, StepResult};
use foretrain::exec::source::Source;
use foretrain::exec::weights::{load, read_tokens};
use foretrain::plan::{Adam, Dtype, Engine, Kernel, OpKind, Plan};
use foretrain::spec::{LlmSpec, Parallelism, Workload};
use foretrain::strategy::{Engines, build};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 12, "vocab_size": 29, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
    "hidden_act": "silu", "tie_word_embeddings": false}"#;
const GPT2: &str = r#"{"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "vocab_size": 29, "resid_pdrop": 0.1}"#;

const QWEN3: &str = r#"{"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 12, "vocab_size": 29, "rms_norm_eps": 1e-5,
    "rope_theta": 100.0, "hidden_act": "silu", "tie_word_embeddings": false}"#;
const MIXTRAL: &str = r#"{"model_type": "mixtral", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 12, "vocab_size": 29, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
    "hidden_act": "silu", "tie_word_embeddings": false, "num_local_experts": 4, "num_experts_per_tok": 2}"#;
const QWEN3_MOE: &str = r#"{"model_type": "qwen3_moe", "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 99, "vocab_size": 29,
    "rms_norm_eps": 1e-5, "rope_theta": 100.0, "hidden_act": "silu", "tie_word_embeddings": false, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": true, "decoder_sparse_step": 1,
    "mlp_only_layers": []}"#;

/// A dense layer and two with experts, of which those of two groups of four may be chosen.
const DEEPSEEK: &str = r#"{"model_type": "deepseek_v3", "hidden_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 6, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 5, "intermediate_size": 12, "moe_intermediate_size": 10,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": true, "routed_scaling_factor": 2.5, "vocab_size": 29, "rms_norm_eps": 1e-6,
    "rope_theta": 100.0, "hidden_act": "silu", "tie_word_embeddings": false}"#;

/// The same whose attention sees the five keys that an indexer chooses.
fn deepseek_32() -> String {
    let config = DEEPSEEK.replace("deepseek_v3", "deepseek_v32");
    config.replace("\"vocab_size\"", "\"index_n_heads\": 2, \"index_head_dim\": 6, \"index_topk\": 5, \"vocab_size\"")
}

/// The tensors of a checkpoint: shape and values.
type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

fn plan(config: &str) -> Plan {
    let mut model = LlmSpec::parse("config.json", "m", config).expect("a sound config");
    model.dropout = 0.0;
    let work =
        Workload { seq_len: 16, global_batch: 4, micro_batch: 1, dtype: Dtype::F32, documents: Default::default() };
    let engine = Engine::Sm { ctas: 1 };
    build(&model, &work, &Parallelism::default(), Engines { p2p: engine, collective: engine }).expect("feasible")
}

fn transposed(values: &[f32], cols: usize) -> Vec<f32> {
    (0..values.len()).map(|i| values[i % (values.len() / cols) * cols + i / (values.len() / cols)]).collect()
}

/// The reference's weights as Llama's checkpoints have them, by hand: 4 heads and 2 KV heads of 4, 12 wide.
fn as_llama(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
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
fn as_qwen3(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
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
fn with_experts(
    ours: &BTreeMap<String, Vec<f64>>,
    others: fn(&BTreeMap<String, Vec<f64>>) -> Tensors,
    layer: &str,
    parts: [&str; 3],
) -> Tensors {
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

fn as_mixtral(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
    with_experts(ours, as_llama, "block_sparse_moe", ["w1", "w3", "w2"])
}

fn as_qwen3_moe(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
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
fn as_deepseek(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
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
fn router_bias() -> BTreeMap<String, Vec<f32>> {
    let name = |layer| format!("model.layers.{layer}.mlp.gate.e_score_correction_bias");
    [1, 2].map(|layer| (name(layer), (0..8).map(|e| 0.05 * ((e * layer) % 5) as f32).collect())).into()
}

/// And as GPT-2's: what its Conv1D layers hold is `[in, out]`.
fn as_gpt2(ours: &BTreeMap<String, Vec<f64>>) -> Tensors {
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

fn write(path: &Path, tensors: &Tensors) {
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(n, (shape, v))| (n.clone(), shape.clone(), v.iter().flat_map(|x| x.to_le_bytes()).collect()))
        .collect();
    let view = |(n, shape, b): &'_ (String, Vec<usize>, Vec<u8>)| (n.clone(), shape.clone(), b.len());
    assert!(bytes.iter().map(view).all(|(_, shape, len)| shape.iter().product::<usize>() * 4 == len));
    let views: Vec<(String, TensorView)> = bytes
        .iter()
        .map(|(n, shape, b)| (n.clone(), TensorView::new(safetensors::Dtype::F32, shape.clone(), b).expect("sound")))
        .collect();
    safetensors::serialize_to_file(views, None, path).expect("written");
}

fn checkpoint(dir: &Path, config: &str, tensors: &Tensors) {
    std::fs::write(dir.join("config.json"), config).expect("written");
    write(&dir.join("model.safetensors"), tensors);
}

fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).expect("a dump");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let f32s = |b: &[u8]| b.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    file.iter().map(|(n, v)| (n.to_string(), (v.shape().to_vec(), f32s(v.data())))).collect()
}

fn run(dir: &Path, args: &str) -> Value {
    let out = Command::new(env!("CARGO_BIN_EXE_foretrain")).args(args.split(' ')).current_dir(dir).output();
    serde_json::from_slice(&out.expect("the binary runs").stdout).expect("JSON")
}

fn ids() -> Vec<u32> {
    (0..4 * 17).map(|i| (i * i * 5 + i) % 29).collect()
}

fn reference(plan: &Plan, source: &Source) -> StepResult {
    let mut cfg = DenseConfig::from(plan.model().expect("a model"));
    let (tokens, targets) = source.batch(plan, 1);
    let mut params = source.weights(plan);
    params.extend(source.beside(plan));
    let choices = cfg.experts.is_some().then(|| reference::route(&cfg, &params, &tokens));
    if let (Some(experts), Some(choices)) = (&mut cfg.experts, choices) {
        // What routers choose is no constant of a layer, or there would be nothing to record.
        assert!(choices[0] != choices[1] && choices[0][0] != choices[0][1]);
        experts.choices = choices;
    }
    let adam = Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    reference::step(&cfg, &source.weights(plan), &tokens, &targets, &adam)
}

/// Rounding to 24 bits, relative to the largest value. The gradient of a key's bias is nothing but rounding, since
/// softmax does not see it: Adam makes a step of either sign of it, which is left out.
fn assert_close(name: &str, got: &[f32], want: &[f32]) {
    let scale = want.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
    let keys = if name == "new.transformer.h.0.attn.c_attn.bias" || name == "new.transformer.h.1.attn.c_attn.bias" {
        16..32
    } else {
        0..0
    };
    let off = |(i, (g, w)): (usize, (&f32, &f32))| if keys.contains(&i) { 0.0 } else { (g - w).abs() / scale };
    let off = got.iter().zip(want).enumerate().map(off).fold(0.0, f32::max);
    assert!(got.len() == want.len() && off < 2e-4, "{name}: {off}");
}

fn every_layout_dumps_the_reference(config: &str, theirs: fn(&BTreeMap<String, Vec<f64>>) -> Tensors) {
    let dir = tempfile::tempdir().expect("a folder");
    let plan = plan(config);
    let seeded = Source::seeded(3);
    let mut file = theirs(&seeded.weights(&plan));
    let bias = if config.contains("deepseek") { router_bias() } else { BTreeMap::new() };
    file.extend(bias.clone().into_iter().map(|(name, values)| (name, (vec![8], values))));
    checkpoint(dir.path(), config, &file);
    std::fs::write(dir.path().join("ids.json"), json!(ids()).to_string()).expect("written");
    let tokens = read_tokens(&dir.path().join("ids.json"), &plan, 0, 1).expect("enough ids");
    let ours = seeded.weights(&plan).into_iter().map(|(name, v)| (name, v.into_iter().map(|x| x as f32).collect()));
    let weights = Some(ours.chain(bias).collect());
    let source = Source { tokens: Some(tokens), weights, ..seeded };
    let want = reference(&plan, &source);
    let dense =
        ["", " --dp 4 --zero 3", " --tp 2 --ring 2 --zero 1", " --pp 2 --tp 2", " --ulysses 2 --dp 2 --recompute full"];
    let experts = [
        "",
        " --dp 4 --zero 1",
        " --dp 2 --ep 2 --micro-batch 2",
        " --tp 2 --ring 2 --ep 4 --dispatch deepep-v1-normal",
        " --pp 2 --dp 2 --ep 2",
        " --ulysses 2 --dp 2 --ep 2 --recompute full",
    ];
    for split in if plan.routes.is_empty() { &dense[..] } else { &experts } {
        let args = format!(
            "run --weights . --tokens ids.json --seq-len 16 --global-batch 4 --dump out.safetensors --json --lr 1e-3 \
             --beta2 0.999 --weight-decay 0.01{split}"
        );
        let json = run(dir.path(), &args);
        assert_eq!(json["error"].as_str(), None, "{split}");
        let got = read(&dir.path().join("out.safetensors"));
        assert_close("loss", &got["loss"].1, &[want.loss as f32]);
        let (shape, logits) = &got["logits"];
        assert_eq!(shape, &[4, 16, 29]);
        assert!(logits.iter().all(|x| x.is_finite()));
        assert_close("the loss of the logits", &[loss(logits, &source.batch(&plan, 1).1.concat())], &got["loss"].1);
        for (what, values) in [("grad", &want.grads), ("new", &want.new_params)] {
            for (name, (shape, values)) in theirs(values) {
                let name = format!("{what}.{name}");
                assert_eq!(got[&name].0, shape, "{name}");
                assert_close(&name, &got[&name].1, &values);
            }
        }
        for (name, values) in source.beside(&plan) {
            let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
            assert_eq!(got[&format!("new.{name}")], (vec![8], values));
        }
        let beside = source.beside(&plan).len();
        assert_eq!(got.len(), 2 + 2 * theirs(&want.grads).len() + beside, "{:?}", got.keys());
    }
    // Weights of one model are none of another's, whatever their shapes.
    let json = run(dir.path(), "run --weights . --tokens ids.json --seq-len 16 --model tiny --json");
    let why = json["error"].as_str().expect("it is refused");
    assert!(why.contains("tiny is another model than that of") && why.contains("leave it out"), "{why}");
}

/// Mean cross-entropy of logits `[tokens, 29]`.
fn loss(logits: &[f32], targets: &[u32]) -> f32 {
    let token = |(row, &target): (&[f32], &u32)| {
        row.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln() - f64::from(row[target as usize])
    };
    (logits.chunks(29).zip(targets).map(token).sum::<f64>() / targets.len() as f64) as f32
}

#[test]
fn llama_in_every_layout() {
    every_layout_dumps_the_reference(LLAMA, as_llama);
}

#[test]
fn gpt2_in_every_layout() {
    every_layout_dumps_the_reference(GPT2, as_gpt2);
}

#[test]
fn qwen3_in_every_layout() {
    every_layout_dumps_the_reference(QWEN3, as_qwen3);
}

#[test]
fn mixtures_in_every_layout() {
    every_layout_dumps_the_reference(MIXTRAL, as_mixtral);
    every_layout_dumps_the_reference(QWEN3_MOE, as_qwen3_moe);
    every_layout_dumps_the_reference(DEEPSEEK, as_deepseek);
}

/// A checkpoint without the modules of multi-token prediction that its config names, as transformers saves DeepSeek-V3: trained
/// where the user says that they are left out, else refused with what to say.
#[test]
fn modules_that_a_checkpoint_lacks_are_left_out_where_that_is_said() {
    let dir = tempfile::tempdir().expect("a folder");
    let plan = plan(DEEPSEEK);
    let mut file = as_deepseek(&Source::seeded(3).weights(&plan));
    file.extend(router_bias().into_iter().map(|(name, values)| (name, (vec![8], values))));
    let config = DEEPSEEK.replace("\"vocab_size\"", "\"num_nextn_predict_layers\": 1, \"vocab_size\"");
    checkpoint(dir.path(), &config, &file);
    std::fs::write(dir.path().join("ids.json"), json!(ids()).to_string()).expect("written");
    let words = "run --weights . --tokens ids.json --seq-len 16 --global-batch 4 --json";
    let [with, without] = ["", " --no-mtp"].map(|more| run(dir.path(), &format!("{words}{more}")));
    let why = with["error"].as_str().expect("it is refused");
    assert!(why.contains("multi-token prediction, whose weights are not read (--no-mtp trains without them)"), "{why}");
    std::fs::write(dir.path().join("config.json"), DEEPSEEK).expect("written");
    let never = run(dir.path(), words);
    assert!(never["loss"].is_number() && without["loss"] == never["loss"], "{without:#}");
}

/// Three steps on new tokens, the routers choosing anew before each: as dense training does it, whose routers look at
/// their own weights. What the last step dumps, optimizer states and all that went from plan to plan, is the same.
fn trains_as_the_reference(config: &str, theirs: fn(&BTreeMap<String, Vec<f64>>) -> Tensors, splits: &[&str]) {
    const STEPS: u64 = 3;
    let dir = tempfile::tempdir().expect("a folder");
    let plan = plan(config);
    let seeded = Source::seeded(3);
    let mut file = theirs(&seeded.weights(&plan));
    let bias = if config.contains("deepseek") { router_bias() } else { BTreeMap::new() };
    file.extend(bias.clone().into_iter().map(|(name, values)| (name, (vec![8], values))));
    checkpoint(dir.path(), config, &file);
    let ids: Vec<u32> = (0..STEPS as u32 * 4 * 17).map(|i| (i * i * 5 + i / 3) % 29).collect();
    std::fs::write(dir.path().join("ids.json"), json!(ids).to_string()).expect("written");
    let tokens = read_tokens(&dir.path().join("ids.json"), &plan, 0, STEPS).expect("enough ids");
    let ours = seeded.weights(&plan).into_iter().map(|(name, v)| (name, v.into_iter().map(|x| x as f32).collect()));
    let source = Source { tokens: Some(tokens), weights: Some(ours.chain(bias).collect()), ..seeded };

    let (mut params, mut steps, mut routes) = (source.weights(&plan), vec![], vec![]);
    let adam = Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };
    for step in 1..=STEPS {
        let mut cfg = DenseConfig::from(plan.model().expect("a model"));
        let batch = source.batch(&plan, step);
        let mut all = params.clone();
        all.extend(source.beside(&plan));
        let choices = reference::route(&cfg, &all, &batch.0);
        routes.push(choices.clone());
        cfg.experts.as_mut().expect("a mixture").choices = choices;
        steps.push((cfg, batch));
        let done = reference::train_anew(&source.weights(&plan), steps.clone(), &adam);
        params = done.last().expect("a step").new_params.clone();
        if step == STEPS {
            assert!(routes[0] != routes[1] && routes[1] != routes[2], "every step has tokens and routes of its own");
            for split in splits {
                let args = format!(
                    "run --weights . --tokens ids.json --seq-len 16 --global-batch 4 --dump out.safetensors --json \
                     --lr 1e-3 --beta2 0.999 --weight-decay 0.01 --steps {STEPS} --check{split}"
                );
                let json = run(dir.path(), &args);
                assert_eq!(json["error"].as_str(), None, "{split}");
                let losses =
                    json["steps"].as_array().expect("steps").iter().map(|s| s["loss"].as_f64().expect("a loss"));
                for (got, want) in losses.zip(&done) {
                    assert!((got / want.loss - 1.0).abs() < 1e-5, "{split}: {got} for {}", want.loss);
                }
                let got = read(&dir.path().join("out.safetensors"));
                for (name, (_, values)) in theirs(&params) {
                    assert_near(&format!("new.{name}{split}"), &got[&format!("new.{name}")].1, &values);
                }
            }
        }
    }
}

/// After steps of Adam, which divides by the root of what may be next to nothing: rounding moves a weight whose gradient
/// is nothing but rounding by a whole step, lr = 1e-3 of three; all others stay where they belong.
fn assert_near(name: &str, got: &[f32], want: &[f32]) {
    let off: Vec<f32> = got.iter().zip(want).map(|(g, w)| (g - w).abs()).collect();
    let far = off.iter().filter(|off| **off > 2e-5).count();
    assert!(got.len() == want.len() && far * 100 <= got.len(), "{name}: {far} of {} are off", got.len());
    assert!(off.iter().all(|off| *off < 6e-3), "{name}: {off:?}");
}

#[test]
fn mixtures_train_on_routes_of_every_step() {
    trains_as_the_reference(MIXTRAL, as_mixtral, &["", " --dp 2 --ep 2", " --pp 2 --dp 2 --ep 2 --zero 1"]);
    trains_as_the_reference(QWEN3_MOE, as_qwen3_moe, &[" --tp 2 --ring 2 --ep 4 --dispatch deepep-v1-normal"]);
    trains_as_the_reference(DEEPSEEK, as_deepseek, &["", " --dp 4 --ep 2 --zero 1"]);
    trains_as_the_reference(&deepseek_32(), as_deepseek, &["", " --ring 2 --options gather-kv"]);
}

/// A plan of a file is made for one routing, and that is not the weights'.
#[test]
fn what_routers_did_not_choose_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let ours = Source::seeded(3).weights(&plan(MIXTRAL));
    checkpoint(dir.path(), MIXTRAL, &as_mixtral(&ours));
    let refused = |args: &str| run(dir.path(), &format!("run --weights . --json {args}"))["error"].to_string();
    run(
        dir.path(),
        "plan --model config.json --cluster local-cpu --seq-len 16 --routing uniform --out plan.json --json",
    );
    let said = refused("--plan plan.json");
    assert!(said.contains("leave --plan out"), "{said}");
    let said = refused("--seq-len 16 --save ckpt");
    assert!(said.contains("--save") && said.contains("routers of --weights choose; give --dump"), "{said}");
    assert!(!dir.path().join("ckpt").exists());
}

/// Fields that cost nothing make another model all the same.
#[test]
fn what_is_computed_otherwise_is_refused_by_field() {
    let refused = |config: &str, change: (&str, &str), word: &str| {
        let dir = tempfile::tempdir().expect("a folder");
        let theirs = if config == GPT2 { as_gpt2 } else { as_llama };
        checkpoint(dir.path(), &config.replace(change.0, change.1), &theirs(&Source::seeded(3).weights(&plan(config))));
        for more in ["--dump d.safetensors", "--weights ."] {
            let said = run(dir.path(), &format!("run --model ./config.json --seq-len 16 --json {more}"));
            let said = said["error"].as_str().unwrap_or_default();
            assert!(said.contains(word) && said.contains("is not computed; read and written"), "{change:?}: {said}");
        }
    };
    let kind = "\"model_type\": \"llama\"";
    refused(LLAMA, (kind, "\"model_type\": \"granite\", \"residual_multiplier\": 0.22"), "model_type granite");
    refused(LLAMA, (kind, "\"model_type\": \"ernie4_5\""), "model_type ernie4_5");
    refused(LLAMA, (kind, &format!("{kind}, \"logits_scaling\": 16.0")), "logits_scaling 16.0");
    let act = "\"model_type\": \"gpt2\", \"activation_function\": \"gelu\"";
    refused(GPT2, ("\"model_type\": \"gpt2\"", act), "activation_function \"gelu\"");
    let scale = "\"model_type\": \"gpt2\", \"scale_attn_weights\": false";
    refused(GPT2, ("\"model_type\": \"gpt2\"", scale), "scale_attn_weights false");
}

/// The config says what is dropped in training, and weights from elsewhere are trained without: a run that goes on from them, too.
#[test]
fn what_began_without_dropout_goes_on_without() {
    let dir = tempfile::tempdir().expect("a folder");
    checkpoint(dir.path(), GPT2, &as_gpt2(&Source::seeded(3).weights(&plan(GPT2))));
    let words = "run --seq-len 16 --global-batch 2 --json";
    let whole = run(dir.path(), &format!("{words} --weights . --steps 2"));
    run(dir.path(), &format!("{words} --weights . --save ckpt"));
    let rest = run(dir.path(), &format!("{words} --model ./config.json --load ckpt"));
    assert!(rest["loss"].is_number() && rest["loss"] == whole["loss"], "{} is not {}", rest["loss"], whole["loss"]);
    let note = "dropout: 0 as in the run that saved; the model's file has 0.1";
    assert_eq!(rest["notes"], json!([note]));
}

/// The norms of what is compressed have an eps of their own, whatever the config says of the others.
#[test]
fn latents_are_normed_as_transformers_does() {
    let plan = plan(&DEEPSEEK.replace("\"rms_norm_eps\": 1e-6", "\"rms_norm_eps\": 0.01"));
    let eps = |op: &OpKind| match op {
        OpKind::Compute { kernel: Kernel::LatentNorm { eps, .. } | Kernel::LatentNormBwd { eps, .. }, .. } => {
            Some(*eps)
        }
        _ => None,
    };
    let found: Vec<f64> = plan.ops().filter_map(|(_, op)| eps(&op.kind)).collect();
    assert!(!found.is_empty() && found.iter().all(|eps| *eps == 1e-6), "{found:?}");
}

#[test]
fn shards_with_an_index_are_the_one_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let plan = plan(LLAMA);
    let all = as_llama(&Source::seeded(3).weights(&plan));
    let odd = |i: usize| all.iter().skip(i).step_by(2).map(|(n, t)| (n.clone(), t.clone())).collect::<Tensors>();
    let mut map = BTreeMap::new();
    for (i, file) in ["a.safetensors", "b.safetensors"].into_iter().enumerate() {
        write(&dir.path().join(file), &odd(i));
        map.extend(odd(i).into_keys().map(|name| (name, file)));
    }
    let index = dir.path().join("model.safetensors.index.json");
    std::fs::write(index, json!({ "weight_map": map }).to_string()).expect("written");
    let got = load(dir.path(), &plan).expect("a sound checkpoint");
    for (name, want) in Source::seeded(3).weights(&plan) {
        assert!(got[&name].iter().zip(want).all(|(got, want)| *got == want as f32), "{name}");
    }
}

#[test]
fn a_checkpoint_that_does_not_fit_is_refused_by_name() {
    let dir = tempfile::tempdir().expect("a folder");
    let plan = plan(LLAMA);
    let error = || load(dir.path(), &plan).expect_err("unsound").to_string();
    assert!(error().contains("model.safetensors"), "{}", error());
    let mut all = as_llama(&Source::seeded(3).weights(&plan));
    let head = all.remove("lm_head.weight").expect("a head");
    checkpoint(dir.path(), LLAMA, &all);
    assert!(error().contains("lm_head.weight") && error().contains("tie_word_embeddings"), "{}", error());
    all.insert("lm_head.weight".into(), (vec![16, 29], head.1));
    checkpoint(dir.path(), LLAMA, &all);
    assert!(error().contains("lm_head.weight: [16, 29]") && error().contains("[29, 16]"), "{}", error());
}

#[test]
fn token_ids_that_cannot_be_are_refused_by_index() {
    let dir = tempfile::tempdir().expect("a folder");
    let (plan, file) = (plan(LLAMA), dir.path().join("ids.json"));
    let error = |ids: Value| {
        std::fs::write(&file, ids.to_string()).expect("written");
        read_tokens(&file, &plan, 0, 1).expect_err("unsound").to_string()
    };
    let mut wrong = ids();
    wrong[41] = 29;
    let said = error(json!(wrong));
    assert!(said.contains("ids.json: [41]") && said.contains("29 is outside the vocabulary of 29"), "{said}");
    let said = error(json!(ids()[..67]));
    assert!(said.contains("67 token ids") && said.contains("--global-batch"), "{said}");
    let rows: Vec<&[u32]> = ids().chunks(17).map(|r| &*r.to_vec().leak()).collect();
    let said = error(json!([rows[0], rows[1], [1, 2], rows[3]]));
    assert!(said.contains("sequence [2]"), "{said}");
    assert!(error(json!({})).contains("not a JSON list"));
    std::fs::write(&file, json!(rows).to_string()).expect("written");
    assert_eq!(read_tokens(&file, &plan, 0, 1).expect("sound"), rows);
}

/// What routers that choose anew cannot do on GPUs every process of several says: rank 0 alone would leave the others waiting.
#[test]
fn every_process_refuses_what_rank_0_does() {
    let dir = tempfile::tempdir().expect("a folder");
    checkpoint(dir.path(), MIXTRAL, &as_mixtral(&Source::seeded(3).weights(&plan(MIXTRAL))));
    std::fs::write(dir.path().join("ids.json"), json!([ids(), ids()].concat()).to_string()).expect("written");
    for rank in ["0", "1"] {
        let args = "run --on cuda --weights . --tokens ids.json --seq-len 16 --global-batch 4 --dp 2 --steps 2";
        let variables = [("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank), ("FORETRAIN_TIMEOUT", "1")];
        let mut command = Command::new(env!("CARGO_BIN_EXE_foretrain"));
        let out = command.args(args.split(' ')).envs(variables).current_dir(dir.path()).output().expect("it runs");
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && said.contains("use --steps 1"), "rank {rank}: {said}");
    }
}
