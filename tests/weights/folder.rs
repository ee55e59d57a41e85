//! A folder with a checkpoint and token ids, and the program run in it.

use crate::families::{Tensors, Theirs, router_bias};
use foretrain::exec::source::Source;
use foretrain::exec::weights::read_tokens;
use foretrain::plan::{Adam, Dtype, Engine, Plan};
use foretrain::spec::{LlmSpec, Parallelism, Workload};
use foretrain::strategy::{Engines, build};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

pub fn plan(config: &str) -> Plan {
    let mut model = LlmSpec::parse("config.json", "m", config).expect("a sound config");
    model.dropout = 0.0;
    let work =
        Workload { seq_len: 16, global_batch: 4, micro_batch: 1, dtype: Dtype::F32, documents: Default::default() };
    let engine = Engine::Sm { ctas: 1 };
    build(&model, &work, &Parallelism::default(), Engines { p2p: engine, collective: engine }).expect("feasible")
}

pub fn write(path: &Path, tensors: &Tensors) {
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

pub fn checkpoint(dir: &Path, config: &str, tensors: &Tensors) {
    std::fs::write(dir.join("config.json"), config).expect("written");
    write(&dir.join("model.safetensors"), tensors);
}

pub fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).expect("a dump");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let f32s = |b: &[u8]| b.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    file.iter().map(|(n, v)| (n.to_string(), (v.shape().to_vec(), f32s(v.data())))).collect()
}

/// What the program prints as JSON: an error where its exit code is 2, and nowhere else.
#[track_caller]
pub fn run(dir: &Path, args: &str) -> Value {
    let command = &mut Command::new(env!("CARGO_BIN_EXE_foretrain"));
    let out = command.args(args.split(' ')).current_dir(dir).output().expect("the binary runs");
    let json: Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(out.status.code(), Some(if json["error"].is_null() { 0 } else { 2 }), "{args}: {json:#}");
    json
}

pub fn ids() -> Vec<u32> {
    (0..4 * 17).map(|i| (i * i * 5 + i) % 29).collect()
}

/// As the flags of the runs say.
pub const ADAM: Adam = Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 };

/// Writes a checkpoint of seeded weights and `ids.json` of so many steps, and says what a run reads of both.
pub fn given(dir: &Path, config: &str, theirs: Theirs, ids: &[u32], steps: u64) -> (Plan, Source) {
    let (plan, seeded) = (plan(config), Source::seeded(3));
    let mut file = theirs(&seeded.weights(&plan));
    let bias = if config.contains("deepseek") { router_bias() } else { BTreeMap::new() };
    file.extend(bias.clone().into_iter().map(|(name, values)| (name, (vec![8], values))));
    checkpoint(dir, config, &file);
    std::fs::write(dir.join("ids.json"), json!(ids).to_string()).expect("written");
    let tokens = read_tokens(&dir.join("ids.json"), &plan, 0, steps).expect("enough ids");
    let ours = seeded.weights(&plan).into_iter().map(|(name, v)| (name, v.into_iter().map(|x| x as f32).collect()));
    let source = Source { tokens: Some(tokens), weights: Some(ours.chain(bias).collect()), ..seeded };
    (plan, source)
}
