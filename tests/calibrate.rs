//! A machine is measured in seconds, its profile read by those that predict, and a prediction held against a run. What
//! is tested is that all of it is there and fits together: how long anything takes is the machine's affair.

use foretrain::calibrate::{self, Effort};
use foretrain::cluster::Cluster;
use foretrain::cost::{self, Machine, cost};
use foretrain::device::Profile;
use foretrain::device::speed::{Anchor, Slower};
use foretrain::plan::{Dtype, Engine, Plan};
use foretrain::spec::{ClusterSpec, GpuSpec, LlmSpec, Parallelism, StackSpec, Workload};
use foretrain::strategy::{Engines, build};
use foretrain::timeline::Timeline;
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

/// One calibration serves all tests.
fn profile() -> &'static Profile {
    static PROFILE: OnceLock<Profile> = OnceLock::new();
    PROFILE.get_or_init(|| calibrate::cpu(Effort::TINY, "a test", &|_, _| ()).expect("this machine has a CPU"))
}

/// (exit code, what it says)
fn foretrain(dir: &Path, line: &str) -> (i32, String) {
    let words: Vec<&str> = line.split_whitespace().collect();
    let output = Command::new(env!("CARGO_BIN_EXE_foretrain")).args(words).current_dir(dir).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), text)
}

/// A folder with a profile in it.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("profile.json"), serde_json::to_string(profile()).unwrap()).unwrap();
    dir
}

fn tiny(par: Parallelism) -> Plan {
    let model = LlmSpec::find("tiny").unwrap();
    let (global_batch, dtype) = (u64::from(par.dp), Dtype::F32);
    let work = Workload { seq_len: 64, global_batch, micro_batch: 1, dtype, documents: Default::default() };
    let engine = Engine::Sm { ctas: 1 };
    build(&model, &work, &par, Engines { p2p: engine, collective: engine }).unwrap()
}

/// What `profile` predicts of a plan on `devices`.
fn predict(profile: &Profile, plan: &Plan, devices: &[u32]) -> Timeline {
    let (gpu, stack) = (GpuSpec::find("cpu-core").unwrap(), StackSpec::find("cpu").unwrap());
    let cluster = Cluster::new(&ClusterSpec::find("local-cpu").unwrap(), &gpu, plan.ranks()).unwrap();
    let machine = Machine { cluster: &cluster, stack: &stack, kernels: profile, devices: Some(devices) };
    cost(plan, machine, cost::Effort::ALL_SPANS).unwrap()
}

#[test]
fn a_quick_calibration_has_every_part_and_survives_a_file() {
    let profile = profile();
    for name in ["matmul_nt/f32", "attention/f32", "attention_bwd/f32", "norm/f32", "adam/f32", "merge_lse/f32"] {
        assert!(profile.kernels.contains_key(name), "{name} is not among {:?}", profile.kernels.keys());
    }
    for (name, curve) in &profile.kernels {
        assert!(curve.points.iter().all(|p| p.seconds > 0.0 && p.runs > 0), "{name}");
        assert!(curve.residual_sd.is_finite() && curve.interval_95 >= 1.0, "{name}");
    }
    let (post, add) = {
        let threads = profile.threads.as_ref().unwrap();
        (&threads.alone.post, &threads.alone.add)
    };
    assert!(post.at(&[16384.0]).0 > 0.0 && add.at(&[16384.0]).0 > 0.0);
    // Of steps, and of messages by themselves.
    assert!(post.points.len() > 4 && add.points.len() > 4, "{post:?} {add:?}");
    assert!(profile.threads.as_ref().unwrap().exchanges.keys().any(|k| k == "dispatch/f32"));
    let speed = profile.speed().expect("calibrate looks at the machine's speed");
    assert!(speed.parts().iter().all(|(_, a)| a.seconds > 0.0) && speed.samples > 3, "{speed:?}");
    let dir = folder();
    let read = Profile::load(&dir.path().join("profile.json")).unwrap();
    assert_eq!(read.threads.unwrap().cores, profile.threads.as_ref().unwrap().cores);
    assert_eq!(read.kernels.len(), profile.kernels.len());
}

/// Stopped after some shapes, then started again: what was timed is not timed again, and the profile has all of it.
#[test]
fn a_calibration_goes_on_where_it_was_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let rows = dir.path().join("profile.rows.jsonl");
    let left = std::cell::Cell::new(4);
    let stop = || {
        left.set(left.get() - 1);
        left.get() < 0
    };
    let said = calibrate::cpu_until(Effort::TINY, "a test", &|_, _| (), &stop, Some(&rows)).unwrap_err().to_string();
    assert!(said.contains("interrupted when 4 of ") && said.contains("profile.rows.jsonl"), "{said}");
    let runs = || -> Vec<String> {
        let text = std::fs::read_to_string(&rows).unwrap();
        let name = |line: &str| serde_json::from_str::<Value>(line).unwrap()["plan"].as_str().unwrap().to_string();
        let mut all: Vec<String> = text.lines().map(name).collect();
        // Lines of one run stand together: a run that was made again would be there twice.
        all.dedup();
        all
    };
    let before = runs();
    assert_eq!(before.len(), 4);
    let (found, stopped) = calibrate::cpu_until(Effort::TINY, "a test", &|_, _| (), &|| false, Some(&rows)).unwrap();
    let after = runs();
    assert!(!stopped && after.starts_with(&before) && after.len() > before.len());
    let mut names = after.clone();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), after.len(), "{after:?}");
    assert_eq!(found.kernels.keys().collect::<Vec<_>>(), profile().kernels.keys().collect::<Vec<_>>());
}

#[test]
fn one_thread_takes_as_long_as_its_ops() {
    let profile = profile();
    let plan = tiny(Parallelism::default());
    let found = predict(profile, &plan, &[0]);
    let class = &found.classes[0];
    let ops: f64 = class.spans.iter().map(|s| s.duration().value()).sum();
    let between = profile.threads.as_ref().unwrap().op_s * class.spans.len() as f64;
    assert!((found.step.value() / (ops + between) - 1.0).abs() < 1e-6, "{} for {ops}", found.step.value());
}

#[test]
fn cores_are_shared_by_whoever_is_busy() {
    let mut profile = profile().clone();
    // Kernels that leave each other alone: what is left is the cores themselves.
    let kernels = profile.kernels.clone();
    let threads = profile.threads.as_mut().unwrap();
    (threads.cores, threads.beside.kernels) = (2, kernels);
    let step =
        |dp: u32, devices: &[u32]| predict(&profile, &tiny(Parallelism { dp, ..Parallelism::default() }), devices);
    let alone = step(1, &[0]).step.value();
    let (two, four) = (step(2, &[0, 1]).step.value(), step(4, &[0, 1, 2, 3]).step.value());
    assert!(two >= alone * 0.99, "two ranks do as much each, and talk besides: {two} for {alone}");
    assert!(four >= 1.9 * alone, "four ranks have half a core each: {four} for {alone}");
    // In turns on one core the ranks wait for each other instead.
    let turns = step(2, &[0, 0]);
    assert!(turns.step.value() >= 1.9 * alone);
    assert!(turns.classes.iter().any(|c| c.usage.bubble > 0.0));
}

#[test]
fn messages_meet_in_every_way_to_split() {
    let profile = profile();
    let one = Parallelism::default();
    for par in [
        Parallelism { ring: 4, ..one },
        Parallelism { ulysses: 2, ring: 2, ..one },
        Parallelism { tp: 4, ..one },
        Parallelism { pp: 2, dp: 2, zero: 1, ..one },
    ] {
        let plan = tiny(par);
        let found = predict(profile, &plan, &[0, 1, 0, 1]);
        assert_eq!(found.classes.len(), 4);
        for class in &found.classes {
            assert!(class.spans.iter().all(|s| s.start.value() >= 0.0 && s.end >= s.start), "{par:?}");
            let busy = class.usage.compute + class.usage.exposed_total() + class.usage.bubble;
            assert!((busy / found.step.value() - 1.0).abs() < 1e-6, "{par:?}: {busy} of {}", found.step.value());
        }
    }
}

#[test]
fn validate_says_all_of_it_on_a_fresh_shape_and_on_a_given_one() {
    let dir = folder();
    let line = "validate --profile profile.json --model tiny --seq-len 64 --ring 2 --repeat 2 --trace t.json --plot p";
    let (code, text) = foretrain(dir.path(), line);
    assert_eq!(code, 0, "{text}");
    for words in ["end-to-end error", "most seconds off", "attention_bwd", "wrote t.json"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    assert!(dir.path().join("p/validation.png").exists() && dir.path().join("p/validation.svg").exists());
    let trace: Value = serde_json::from_slice(&std::fs::read(dir.path().join("t.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let names: Vec<&str> = events.iter().filter_map(|e| e["args"]["name"].as_str()).collect();
    assert!(names.contains(&"predicted rank 1") && names.contains(&"measured rank 1"));

    let (code, text) = foretrain(dir.path(), "validate --profile profile.json --seed 5 --repeat 1 --json");
    assert_eq!(code, 0, "{text}");
    let found: Value = serde_json::from_str(&text).unwrap();
    for field in [
        "end_to_end_error",
        "median_op_error",
        "p90_op_error",
        "noise",
        "lost_to_others",
        "end_to_end_error_raw",
        "median_op_error_raw",
        "p90_op_error_raw",
    ] {
        assert!(found[field].as_f64().is_some_and(|x| x >= 0.0), "{field}");
    }
    // As it is, and at the speed of now: what lies between is the machine's.
    let error =
        |predicted: &str| (found[predicted].as_f64().unwrap() / found["measured_step_s"].as_f64().unwrap() - 1.0).abs();
    assert!((error("predicted_step_s") - found["end_to_end_error"].as_f64().unwrap()).abs() < 1e-9);
    assert!((error("predicted_step_raw_s") - found["end_to_end_error_raw"].as_f64().unwrap()).abs() < 1e-9);
    for part in ["clock", "memory"] {
        assert!(found["speed"][part].as_f64().is_some_and(|x| x > 0.0), "{part}: {}", found["speed"]);
    }
    assert_eq!((found["only_predicted"].as_u64(), found["only_measured"].as_u64()), (Some(0), Some(0)));
    assert!(found["ops"].as_array().unwrap().len() > 20);
}

/// A profile of a machine that was eight times as fast as it is now: the prediction at the speed of now is the one of the
/// profile slowed down by what both looks say together, and the one of the profile as it is stands beside it.
#[test]
fn an_hour_of_another_speed_is_told_from_an_error() {
    const EIGHTH: Slower = Slower { clock: 0.125, memory: 0.125 };
    let dir = folder();
    let mut fast = profile().at(&EIGHTH);
    let then = fast.threads.as_mut().unwrap().speed.as_mut().unwrap();
    for anchor in [&mut then.product, &mut then.pass, &mut then.stream] {
        *anchor = Anchor { seconds: anchor.seconds / 8.0, spread: 0.01 };
    }
    std::fs::write(dir.path().join("fast.json"), serde_json::to_string(&fast).unwrap()).unwrap();
    let line = "validate --profile fast.json --model tiny --seq-len 64 --ring 2 --repeat 1 --json";
    let (code, text) = foretrain(dir.path(), line);
    assert_eq!(code, 0, "{text}");
    let found: Value = serde_json::from_str(&text).unwrap();

    let [then, now] = ["speed_then", "speed_now"].map(|at| serde_json::from_value(found[at].clone()).unwrap());
    let slower = Slower::between(&then, &now);
    for (part, want) in [("clock", slower.clock), ("memory", slower.memory)] {
        let said = found["speed"][part].as_f64().unwrap();
        assert!((said / want - 1.0).abs() < 1e-9, "{part}: {said}, not {want}");
    }
    assert!(slower.clock > 1.0, "{slower:?}: no machine is eight times as fast a test later");
    std::fs::write(dir.path().join("slowed.json"), serde_json::to_string(&fast.at(&slower)).unwrap()).unwrap();
    for (key, file) in [("predicted_step_s", "slowed.json"), ("predicted_step_raw_s", "fast.json")] {
        let flags = "--cluster local-cpu --model tiny --seq-len 64 --gpus 2 --ring 2 --json";
        let (code, text) = foretrain(dir.path(), &format!("estimate {flags} --profile {file}"));
        assert_eq!(code, 0, "{text}");
        let estimate: Value = serde_json::from_str(&text).unwrap();
        let (said, want) = (found[key].as_f64().unwrap(), estimate["step_time_s"].as_f64().unwrap());
        assert!((said / want - 1.0).abs() < 1e-6, "{key}: {said}, not {want}");
    }
}

/// Mixtures are joined and judged as any plan is: rows that a route lists, exchanged by threads.
#[test]
fn mixtures_are_validated() {
    let dir = folder();
    let config = r#"{"model_type": "mixtral", "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 512, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
        "hidden_act": "silu", "tie_word_embeddings": false, "num_local_experts": 4, "num_experts_per_tok": 2}"#;
    std::fs::write(dir.path().join("mixture.json"), config).unwrap();
    for way in ["--dispatch nccl", "--dispatch deepep-v1-normal", "--dispatch deepep-v1-ll", "--dispatch allgather"] {
        let line = "validate --profile profile.json --model mixture.json --seq-len 64 --dp 2 --ep 2 --repeat 2 --json";
        let (code, text) = foretrain(dir.path(), &format!("{line} {way}"));
        assert_eq!(code, 0, "{text}");
        let found: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((found["only_predicted"].as_u64(), found["only_measured"].as_u64()), (Some(0), Some(0)));
        let ops = found["ops"].as_array().unwrap();
        for what in ["dispatch", "combine", "grouped_matmul", "router_bwd"] {
            let of: Vec<&Value> = ops.iter().filter(|op| op["what"] == what).collect();
            assert!(!of.is_empty(), "{way}: no {what}");
            assert!(of.iter().all(|op| op["predicted_s"].as_f64() > Some(0.0)), "{way}: {what}");
        }
    }
    // A profile of an earlier version has timed no exchange, and says what to do.
    let mut old = profile().clone();
    old.threads.as_mut().unwrap().exchanges.clear();
    std::fs::write(dir.path().join("old.json"), serde_json::to_string(&old).unwrap()).unwrap();
    let line = "validate --profile old.json --model mixture.json --seq-len 64 --dp 2 --ep 2";
    let (code, text) = foretrain(dir.path(), line);
    assert!(code == 2 && text.contains("dispatch/f32") && text.contains("foretrain calibrate --on cpu"), "{text}");
}

#[test]
fn estimate_reads_the_profile_and_says_so() {
    let dir = folder();
    let line = "estimate --cluster local-cpu --model tiny --seq-len 64 --gpus 2 --ring 2 --profile profile.json --json";
    let (code, text) = foretrain(dir.path(), line);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("measured") && text.contains("interpolated"), "{text}");
}

/// Threads that share cores are the same to both predictors; what is wrong with a rank, and why the step takes as long as
/// it does, `simulate` alone says.
#[test]
fn simulate_and_estimate_share_the_cores_alike() {
    let dir = folder();
    let mut two = profile().clone();
    two.threads.as_mut().unwrap().cores = 2;
    std::fs::write(dir.path().join("two.json"), serde_json::to_string(&two).unwrap()).unwrap();
    let flags = "--cluster local-cpu --model tiny --seq-len 64 --profile two.json --json";
    let found = |line: String| -> Value {
        let (code, text) = foretrain(dir.path(), &line);
        assert_eq!(code, 0, "{line}: {text}");
        serde_json::from_str(&text).unwrap()
    };
    for way in
        ["--gpus 2 --ring 2", "--gpus 4 --ring 4", "--gpus 4 --ulysses 2 --dp 2 --global-batch 2", "--gpus 8 --ring 8"]
    {
        let [costed, simulated] = ["estimate", "simulate"].map(|command| found(format!("{command} {flags} {way}")));
        let step = |v: &Value| v["step_time_s"].as_f64().unwrap();
        assert!(step(&costed) > 0.0 && step(&costed) == step(&simulated), "{way}: {costed} {simulated}");
        let chain = simulated["critical_path"].as_array().unwrap().iter().map(|s| s["seconds"].as_f64().unwrap());
        let chain = chain.sum::<f64>() / step(&simulated);
        assert!((chain - 1.0).abs() < 1e-6, "{way}: the chain has {chain} of the step");
    }
    let step =
        |more: &str| found(format!("simulate {flags} --gpus 4 --ring 4 {more}"))["step_time_s"].as_f64().unwrap();
    assert!(step("--slow-gpu 1:3") > 1.2 * step(""), "a slow rank holds up the others");
    assert!(step("--jitter exponential:0.3 --seed 1") > step(""));
    for (more, word) in [("--dead 1@0.1", "Dead"), ("--slack slack.csv", "--slack"), ("--fidelity block", "--fidelity")]
    {
        let (code, text) = foretrain(dir.path(), &format!("simulate {flags} --gpus 4 --ring 4 {more}"));
        assert!(code == 2 && text.contains(word) && text.contains("use as many cores as ranks"), "{more}: {text}");
    }
    let words = format!("simulate {} --gpus 4 --ring 4 --explain", flags.replace(" --json", ""));
    let (code, text) = foretrain(dir.path(), &words);
    assert!(code == 0 && text.contains("% of the critical path is "), "{text}");
}

#[test]
fn what_is_wrong_with_a_profile_is_named() {
    let dir = folder();
    let good = serde_json::to_value(profile()).unwrap();
    let broken = |name: &str, change: &dyn Fn(&mut Value)| {
        let mut bad = good.clone();
        change(&mut bad);
        std::fs::write(dir.path().join(name), bad.to_string()).unwrap();
    };
    broken("field.json", &|p| drop(p["threads"].as_object_mut().unwrap().remove("op_s")));
    broken("nan.json", &|p| p["threads"]["wake_s"] = Value::Null);
    broken("negative.json", &|p| p["kernels"]["adam/f32"]["points"][0]["seconds"] = Value::from(-1.0));
    broken("other.json", &|p| p["foretrain_profile"] = Value::from(99));
    let cases = [
        ("missing.json", "", "missing.json"),
        ("field.json", "", "op_s"),
        ("nan.json", "", "null"),
        ("negative.json", "", "kernels.adam/f32.points[0]"),
        ("other.json", "", "foretrain_profile: 99"),
        ("profile.json", "--cluster dgx-h100", "leave the profile out"),
        ("profile.json", "--dtype f64", "choose --dtype f32"),
    ];
    for (file, flags, want) in cases {
        let line = format!("estimate --cluster local-cpu --model tiny --seq-len 64 --gpus 1 --profile {file} {flags}");
        let line = if flags.contains("--cluster") {
            line.replacen("--cluster local-cpu ", "", 1).replace("--gpus 1 ", "")
        } else {
            line
        };
        let (code, text) = foretrain(dir.path(), &line);
        assert_eq!(code, 2, "{line}: {text}");
        assert!(text.contains(want) && text.contains(file), "{line}: {text}");
    }
    let (code, text) = foretrain(dir.path(), "validate --seed 3");
    assert!(code == 2 && text.contains("foretrain calibrate"), "{text}");
}
