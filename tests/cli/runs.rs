//! `run` and `compare` on the threads of this machine.

use crate::program::{SECOND_OF_TWO, folder, json, json_of, model, read, said, said_among, succeeds};
use std::fs;

#[test]
fn a_plan_runs_as_it_says() {
    let dir = folder();
    let plan = json(dir.path(), "plan --model tiny --cluster local-cpu --ulysses 2 --ring 2 --out plan.json --json");
    assert_eq!((plan["ranks"].as_u64(), plan["fits"].as_bool()), (Some(4), Some(true)));
    let run = json(dir.path(), "run --plan plan.json --check --trace trace.json --json");
    assert_eq!((run["error"].as_str(), &run["plan"]), (None, &plan["plan"]));
    assert_eq!(run["sent_bytes"], run["planned_sent_bytes"]);
    assert_eq!(run["peak_bytes"], run["planned_peak_bytes"]);
    assert!(run["check"]["gradient_error"].as_f64().unwrap() < 1e-4);
    assert!(run["loss"].as_f64().unwrap() > 0.0);
    let trace = read(&dir.path().join("trace.json"));
    assert!(trace["traceEvents"].as_array().unwrap().len() > 4 * plan["ops_linked"].as_u64().unwrap() as usize);
    // The same seed, the same loss; the same flags, the same plan.
    let again = json(dir.path(), "run --ulysses 2 --ring 2 --devices 1 --json");
    assert_eq!((&again["loss"], &again["plan"]), (&run["loss"], &run["plan"]));
    assert_ne!(json(dir.path(), "run --ulysses 2 --ring 2 --seed 2 --json")["loss"], run["loss"]);
}

#[test]
fn cores_that_are_not_there_are_refused() {
    let dir = folder();
    for command in ["run", "compare"] {
        let (code, _, err) = said(dir.path(), &format!("{command} --devices 100000"));
        assert_eq!(code, 2, "{err}");
        assert!(err.contains("--devices") && err.contains("cores of this machine"), "{command}: {err}");
    }
}

/// Rows in FP8 are rounded in the reference, too, and gradients of weights that come later are off by nothing.
#[test]
fn a_mixture_is_run_and_checked() {
    let dir = folder();
    let model = r#"{"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu", "tie_word_embeddings": false,
        "torch_dtype": "float32", "max_position_embeddings": 4096, "sliding_window": null}"#;
    fs::write(dir.path().join("mixture.json"), model).unwrap();
    let error = |flags: &str| {
        let line = format!(
            "run --model ./mixture.json --cluster local-cpu --on cpu --check --seq-len 64 --micro-batch 1 --gpus 4 --pp 2 \
             --ep 2 --global-batch 8 --routing zipf:1.0 --json {flags}"
        );
        let check = &json(dir.path(), &line)["check"];
        (check["gradient_error"].as_f64().unwrap(), check["allowed"].as_f64().unwrap())
    };
    let (plain, allowed) = error("--options zb-h1 --replicas 2");
    assert!(plain < 1e-4 && allowed == 1e-3, "{plain}");
    for way in ["--options zb-h1 --dispatch deepep-v1-normal", "--dispatch deepep-v2", "--dispatch nccl"] {
        let (rounded, allowed) = error(&format!("{way} --dispatch-dtype fp8 --dtype f64"));
        assert!(rounded < 1e-9 && allowed == 1e-9, "{way}: {rounded}");
    }
    let (rounded, allowed) = error("--dispatch deepep-v2 --dispatch-dtype fp8");
    assert!(rounded < allowed, "{rounded}");
}

/// Scores of one key have no gradient, and what is left of it in f32 is rounding.
#[test]
fn a_gradient_of_nothing_is_held_against_the_others() {
    let dir = folder();
    model(dir.path(), "qwen3.json", &[("model_type", "qwen3".into()), ("head_dim", 8.into())]);
    for line in ["--seq-len 8 --documents 8x1", "--seq-len 1", "--seq-len 8 --documents 8x1 --dtype f64"] {
        let check = &json(dir.path(), &format!("run --model ./qwen3.json {line} --check --json"))["check"];
        assert!(check["gradient_error"].as_f64().unwrap() < check["allowed"].as_f64().unwrap(), "{line}: {check}");
    }
}

#[test]
fn a_loss_that_is_no_number_is_an_error_behind_its_results() {
    let dir = folder();
    let line = "run --model tiny --seq-len 32 --global-batch 2 --steps 3 --lr 1e38";
    let (code, out, err) = said(dir.path(), line);
    assert!(code == 2 && out.contains("mean over the tokens"), "{code}, {out}");
    assert!(err.starts_with("Error: step 2: the loss is NaN") && err.contains("lower --lr"), "{err}");
    let found = json_of(dir.path(), &format!("{line} --json"), 2);
    assert!(found["error"].as_str().unwrap().starts_with("step 2: the loss is NaN"), "{found}");
    assert_eq!(found["steps"].as_array().unwrap().len(), 2, "a run stops where it diverges");
}

/// A newer checkpoint of another run would be taken for this one's.
#[test]
fn a_folder_of_a_later_step_is_not_saved_into() {
    let dir = folder();
    succeeds(dir.path(), "run --model tiny --seq-len 16 --steps 4 --save ckpt");
    let (code, _, err) = said(dir.path(), "run --model tiny --seq-len 16 --steps 2 --save ckpt");
    assert!(code == 2 && err.contains("step-00000004") && err.contains("another folder"), "{err}");
    succeeds(dir.path(), "run --model tiny --seq-len 16 --steps 2 --load ckpt --save ckpt");
}

#[test]
fn a_comparison_joins_every_op() {
    let dir = folder();
    let found = json(dir.path(), "compare --seq-len 64 --ring 2 --trace both.json --out found.json --json");
    assert_eq!(
        (found["only_predicted"].as_array().unwrap().len(), found["only_measured"].as_array().unwrap().len()),
        (0, 0)
    );
    let kernels: Vec<&str> = found["by_what"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
    assert!(kernels.contains(&"matmul") && kernels.contains(&"attention_bwd") && kernels.contains(&"transfer"));
    let trace = read(&dir.path().join("both.json"));
    let names: Vec<&str> =
        trace["traceEvents"].as_array().unwrap().iter().filter_map(|e| e["args"]["name"].as_str()).collect();
    assert!(names.contains(&"predicted rank 1") && names.contains(&"measured rank 1"));
    assert!(dir.path().join("found.json").exists());
    assert!(succeeds(dir.path(), "compare --seq-len 64").contains("largest differences"));
}

/// Each of several processes would have all ranks, and write the same files.
#[test]
fn cores_are_for_one_process() {
    let dir = folder();
    for line in ["run --out rows.csv", "validate --profile p.json", "compare --profile p.json", "calibrate --quick"] {
        let (code, _, err) = said_among(dir.path(), line, &SECOND_OF_TWO);
        assert!(code == 2 && err.contains("process 1 of the 2 that torchrun started"), "{err}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is written");
}
