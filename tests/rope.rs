//! Scaled rotary frequencies, held to what Hugging Face's transformers computes of them: its frequencies and factors, and the loss
//! and gradients of small models whose weights are by a formula. Its figures stand in tests/rope/, written there by
//! `transformers_figures.py`.

use foretrain::exec::weights::load;
use foretrain::plan;
use foretrain::spec::{LlmSpec, Parallelism, Turning, Workload};
use foretrain::strategy::{Engines, build};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::process::Command;

fn figures(file: &str, of: &str) -> (Value, Vec<Value>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rope").join(file);
    let whole: Value = serde_json::from_str(&std::fs::read_to_string(path).expect("figures")).expect("JSON");
    let all = whole[of].as_array().expect("a list").clone();
    (whole, all)
}

fn model(config: &Value) -> LlmSpec {
    LlmSpec::parse("config.json", "m", &config.to_string()).expect("a sound config")
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

/// transformers computes in fp32.
#[test]
fn frequencies_are_those_of_transformers() {
    let (_, all) = figures("frequencies.json", "configs");
    for case in &all {
        let (name, m) = (&case["name"], model(&case["config"]));
        let longest = case["longest"].as_u64().expect("tokens");
        let scaling = m.rope_scaling.as_ref();
        assert!(m.uncomputed.is_empty() && scaling.is_some(), "{name}: {:?}", m.uncomputed);
        let found = Turning::new(m.rope_theta, scaling, m.turned_dims(), longest);
        let want = numbers(&case["inverse_frequencies"]);
        assert_eq!(found.speeds.len(), want.len(), "{name}");
        for (i, (found, want)) in found.speeds.iter().zip(&want).enumerate() {
            assert!((found / want - 1.0).abs() < 2e-6, "{name}: pair {i} turns by {found}, not {want}");
        }
        for (found, want) in [(found.factor, "attention_factor"), (m.score_factor().0, "score_factor")] {
            assert!((found / case[want].as_f64().expect("a factor") - 1.0).abs() < 1e-12, "{name}: {want} is {found}");
        }
        let plain = Turning::new(m.rope_theta, None, m.turned_dims(), longest);
        assert_eq!(found != plain, name != "dynamic, as long", "{name}");
    }
    assert_eq!(all.len(), 14);
}

/// n numbers from -0.5 up to 0.5, as the script has them.
fn weight(name: &str, n: usize) -> Vec<f64> {
    let seed = crc32fast::hash(name.as_bytes());
    let number = |i: u32| {
        let mut x = i.wrapping_mul(0x85EB_CA6B).wrapping_add(seed);
        for (shift, times) in [(16, 0x7FEB_352D_u32), (15, 0x846C_A68B)] {
            x = (x ^ (x >> shift)).wrapping_mul(times);
        }
        f64::from(x ^ (x >> 16)) / 4_294_967_296.0 - 0.5
    };
    (0..n as u32).map(number).collect()
}

fn checkpoint(dir: &Path, step: &Value) {
    let shapes = step["shapes"].as_object().expect("shapes");
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .iter()
        .map(|(name, shape)| {
            let shape: Vec<usize> = numbers(shape).into_iter().map(|n| n as usize).collect();
            let value = |x: f64| match name {
                _ if name.contains("norm") => 1.0 + 0.2 * x,
                _ if name.contains("bias") => 0.1 * x,
                _ => x,
            };
            let bytes = weight(name, shape.iter().product()).into_iter().flat_map(|x| (value(x) as f32).to_le_bytes());
            (name.clone(), shape, bytes.collect())
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).expect("as many bytes"))
    });
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).expect("written");
    let ids: Vec<u32> = (0..2 * 33).map(|i| (i * i * 5 + i) % 29).collect();
    std::fs::write(dir.join("ids.json"), json!(ids).to_string()).expect("written");
}

fn run(dir: &Path, args: &str) -> Value {
    let out = Command::new(env!("CARGO_BIN_EXE_foretrain")).args(args.split_whitespace()).current_dir(dir).output();
    serde_json::from_slice(&out.expect("the binary runs").stdout).expect("JSON")
}

/// How far loss and gradients of a run are off: the loss from its own, and the furthest number that is kept of a gradient from
/// the gradient's norm.
fn off(dir: &Path, step: &Value, split: &str) -> [f64; 2] {
    let words = "run --weights . --tokens ids.json --seq-len 32 --global-batch 2 --dump out.safetensors --json";
    let said = run(dir, &format!("{words} {split}"));
    assert_eq!(said["error"].as_str(), None, "{} {split}", step["name"]);
    let bytes = std::fs::read(dir.join("out.safetensors")).expect("a dump");
    let dump = SafeTensors::deserialize(&bytes).expect("safetensors");
    let values = |name: &str| -> Vec<f64> {
        let tensor = dump.tensor(name).unwrap_or_else(|_| panic!("no {name} in the dump"));
        tensor.data().chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect()
    };
    let loss = (values("loss")[0] / step["loss"].as_f64().expect("a loss") - 1.0).abs();
    let mut worst: f64 = 0.0;
    for (name, want) in step["gradients"].as_object().expect("gradients") {
        let grad = values(&format!("grad.{name}"));
        let norm = want["norm"].as_f64().expect("a norm");
        let found = grad.iter().map(|x| x * x).sum::<f64>().sqrt();
        let along = |way: &str| -> f64 {
            weight(&format!("{way} {name}"), grad.len()).iter().zip(&grad).map(|(a, b)| a * b).sum()
        };
        let [a, b] = [numbers(&want["along"])[0], numbers(&want["along"])[1]];
        for (found, want) in [(found, norm), (along("a"), a), (along("b"), b)] {
            worst = worst.max((found - want).abs() / norm);
        }
    }
    [loss, worst]
}

/// Of fp32 beside fp64.
const MOST: f64 = 1e-5;

#[test]
fn steps_are_those_of_transformers() {
    let dense = ["", "--ulysses 2 --ring 2", "--tp 2 --ring 2", "--pp 2 --dp 2", "--options unfused"];
    let chunks = ["--options fpdt-2 --recompute full"];
    let latent =
        ["", "--dp 2 --ep 2", "--tp 2 --ring 2 --ep 4", "--ulysses 2 --dp 2 --ep 2", "--pp 2 --recompute full"];
    let (whole, steps) = figures("steps.json", "steps");
    assert_eq!((&whole["seq_len"], &whole["batch"], steps.len()), (&json!(32), &json!(2), 7));
    for step in &steps {
        let (dir, name) = (tempfile::tempdir().expect("a folder"), step["name"].as_str().expect("a name"));
        checkpoint(dir.path(), step);
        let write = |config: &Value| std::fs::write(dir.path().join("config.json"), config.to_string());
        write(&step["config"]).expect("written");
        let more = if name == "dynamic" { &chunks[..] } else { &[] };
        for split in if name == "deepseek" { &latent[..] } else { &dense }.iter().chain(more) {
            let [loss, gradients] = off(dir.path(), step, split);
            assert!(loss < MOST && gradients < MOST, "{name} {split}: off by {loss:.1e} and {gradients:.1e}");
        }
        // The same weights by plain frequencies are far off, or nothing would be shown.
        let mut plain = step["config"].clone();
        plain.as_object_mut().expect("a config").retain(|field, _| field != "rope_scaling");
        if let Some(rope) = plain.get_mut("rope_parameters") {
            *rope = json!({"rope_theta": rope["rope_theta"]});
        }
        write(&plain).expect("written");
        let [_, gradients] = off(dir.path(), step, "");
        assert!(gradients > 1e-2, "{name}: plain frequencies are off by {gradients:.1e} alone");
    }
}

/// Plans of scaled models are written and read, and go by what is written in them; plans of others have no word of it.
#[test]
fn plans_keep_their_scaling() {
    let (_, steps) = figures("steps.json", "steps");
    let written = |config: &Value| {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("config.json"), config.to_string()).expect("written");
        let routing = if config["n_routed_experts"].is_null() { "" } else { "--routing uniform" };
        let words = format!(
            "plan --model ./config.json --cluster local-cpu --dtype f32 --seq-len 32 --out plan.json --json {routing}"
        );
        assert_eq!(run(dir.path(), &words)["error"].as_str(), None);
        let text = std::fs::read_to_string(dir.path().join("plan.json")).expect("a plan");
        (dir, text)
    };
    for step in &steps {
        let (dir, text) = written(&step["config"]);
        let kind = model(&step["config"]).rope_scaling.map(|scaling| json!(scaling)["type"].to_string());
        assert!(text.contains("\"scaling\"") && text.contains(&kind.expect("one")), "{}", step["name"]);
        assert_eq!(text.contains("\"factor\":1.2"), step["name"] == "deepseek", "what scores are multiplied with");
        let said = run(dir.path(), "run --plan plan.json --check --json");
        assert!(said["error"].is_null() && said["loss"].is_number(), "{}: {said}", step["name"]);
    }
    old_plans_take_no_weights(model(&steps[0]["config"]));
    let mut config = steps[0]["config"].clone();
    config["rope_scaling"] = Value::Null;
    let (_, text) = written(&config);
    assert!(!text.contains("scaling") && text.contains("\"rope_scaled\":false"));
}

/// A plan from before scaling was computed says that there is some, and not which.
fn old_plans_take_no_weights(model: LlmSpec) {
    let model = LlmSpec { rope_scaling: None, ..model };
    let documents = Default::default();
    let work = Workload { seq_len: 32, global_batch: 2, micro_batch: 1, dtype: plan::Dtype::F32, documents };
    let engine = plan::Engine::Sm { ctas: 1 };
    let engines = Engines { p2p: engine, collective: engine };
    let plan = build(&model, &work, &Parallelism::default(), engines).expect("feasible");
    let why = load(Path::new("nowhere"), &plan).expect_err("it is refused").to_string();
    assert!(why.contains("scaled rotary frequencies that its plan has no word of"), "{why}");
}

/// What cannot be computed is refused where weights are read, by field and value; and tells of nothing else.
#[test]
fn other_scaling_is_refused_by_field() {
    let (_, steps) = figures("steps.json", "steps");
    let cases = [
        (json!({"rope_type": "su", "factor": 2.0}), "rope_scaling of type su in its config.json"),
        (json!({"factor": 8.0}), "rope_scaling with a factor and no rope_type"),
        (json!({"type": "linear", "factor": 2.0, "beta_fast": 3}), "rope_scaling.beta_fast 3 beside its type linear"),
    ];
    let dir = tempfile::tempdir().expect("a folder");
    checkpoint(dir.path(), &steps[0]);
    for (scaling, why) in cases {
        let config = with(&steps[0]["config"], scaling);
        let m = model(&config);
        assert!(m.rope_scaled && m.rope_scaling.is_none(), "{config}");
        std::fs::write(dir.path().join("config.json"), config.to_string()).expect("written");
        let said = run(dir.path(), "run --weights . --seq-len 32 --json");
        let said = said["error"].as_str().unwrap_or_default();
        assert!(said.contains(why) && said.contains("is not computed; read and written are"), "{said}");
    }
    for nothing in [json!({"rope_type": "default"}), json!({}), Value::Object(Map::new())] {
        let m = model(&with(&steps[0]["config"], nothing));
        assert!(!m.rope_scaled && m.rope_scaling.is_none() && m.uncomputed.is_empty());
    }
}

fn with(config: &Value, scaling: Value) -> Value {
    let mut config = config.clone();
    config["rope_scaling"] = scaling;
    config
}

/// Numbers of a known kind that no model can have are refused wherever the model is read: frequencies would be left as they are, or
/// none.
#[test]
fn scaling_that_cannot_be_is_refused() {
    let (_, steps) = figures("steps.json", "steps");
    let refused = |scaling: Value, why: &str| {
        let config = with(&steps[0]["config"], scaling).to_string();
        let said = LlmSpec::parse("c.json", "m", &config).expect_err(&config).to_string();
        assert!(said.starts_with(&format!("c.json: {why}")), "{config}: {said}");
    };
    for kind in ["linear", "dynamic", "yarn", "llama3", "longrope"] {
        for (factor, what) in [
            (json!(-1.0), "-1.0"),
            (json!(0), "0"),
            (json!(0.5), "0.5"),
            (json!(1e-300), "1e-300"),
            (json!(1e300), "1e+300"),
            (json!("x"), "\"x\""),
            (json!("NaN"), "\"NaN\""),
            (json!([2.0]), "[2.0]"),
        ] {
            let mut scaling = json!({"rope_type": kind, "factor": factor});
            if kind == "llama3" {
                (scaling["low_freq_factor"], scaling["high_freq_factor"]) = (1.into(), 4.into());
            }
            refused(scaling, &format!("rope_scaling.factor: {what} is not a number from 1 to 1000000"));
        }
    }
    for (scaling, why) in [
        (json!("linear"), "rope_scaling: \"linear\" is no object"),
        (json!({"type": "linear"}), "rope_scaling.factor: missing"),
        (json!({"rope_type": "llama3", "factor": 8.0}), "rope_scaling.low_freq_factor: missing"),
        (
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
            "rope_scaling.high_freq_factor: 1 is not above low_freq_factor 4",
        ),
        (json!({"type": "yarn", "factor": 4.0, "truncate": 1}), "rope_scaling.truncate: 1 is not true or false"),
        (
            json!({"type": "yarn", "factor": 4.0, "attention_factor": 1e30}),
            "rope_scaling.attention_factor: 1e+30 is not",
        ),
        (json!({"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}), "rope_scaling.beta_fast: 1 is below"),
        (
            json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": -8}),
            "original_max_position_embeddings: -8 is not a number of tokens",
        ),
        (
            json!({"type": "yarn", "original_max_position_embeddings": 100_000_000}),
            "rope_scaling.original_max_position_embeddings: 100000000, and max_position_embeddings",
        ),
        (
            json!({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 1.0, 1.0, 1.0]}),
            "rope_scaling.short_factor: not a number from 1e-6 to 1000000 for each of 4 pairs",
        ),
    ] {
        refused(scaling, why);
    }
}
