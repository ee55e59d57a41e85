//! What is read of a checkpoint and of token ids, and what of them is refused.

use crate::families::*;
use crate::folder::{checkpoint, ids, plan, run, write};
use foretrain::exec::source::Source;
use foretrain::exec::weights::{load, read_tokens};
use foretrain::plan::{Kernel, OpKind};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::Command;

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
