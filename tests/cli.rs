//! The command line as its users meet it: the binary is run, and what it prints is held against golden files.
//! `UPDATE_GOLDEN=1 cargo test --test cli` rewrites them; a difference is a change of what others script against.

use foretrain::spec::Dispatch;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const COMMANDS: [&str; 20] = [
    "checkpoint",
    "goodput",
    "sweep",
    "search",
    "crossover",
    "longest",
    "estimate",
    "simulate",
    "attention",
    "dispatch",
    "plan",
    "run",
    "compare",
    "calibrate",
    "validate",
    "selftest",
    "published",
    "plot",
    "collective",
    "cluster",
];

fn foretrain(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_foretrain")).args(args).current_dir(dir).output().expect("the binary runs")
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// (exit code, stdout, stderr) of a command line.
fn said(dir: &Path, line: &str) -> (i32, String, String) {
    let output = foretrain(dir, &words(line));
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    (output.status.code().expect("not killed"), text(&output.stdout), text(&output.stderr))
}

fn succeeds(dir: &Path, line: &str) -> String {
    let (code, out, err) = said(dir, line);
    assert_eq!((code, err.as_str()), (0, ""), "{line}: {out}");
    out
}

fn json(dir: &Path, line: &str) -> Value {
    let (_, out, err) = said(dir, line);
    assert_eq!(err, "", "{line}");
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{line}: {e}\n{out}"))
}

/// Holds a text against tests/golden/`name`, or writes it there.
#[track_caller]
fn golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
    }
    let want = fs::read_to_string(&path).unwrap_or_default();
    assert!(text == want, "{} differs; UPDATE_GOLDEN=1 rewrites it\n--- is\n{text}\n--- was\n{want}", path.display());
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// Days of a training follow from its tokens, in `estimate` and in `goodput` alike.
#[test]
fn tokens_of_a_training_make_its_days() {
    let (dir, run) = (folder(), "--gpus 64 --tp 2 --global-batch 64 --seq-len 8K --tokens 1T --json");
    let (costed, played) =
        (json(dir.path(), &format!("estimate {run}")), json(dir.path(), &format!("goodput {run} --runs 2")));
    let number = |found: &Value, path: &str| found.pointer(path).and_then(Value::as_f64).unwrap();
    let (step, steps) = (number(&costed, "/step_time_s"), number(&costed, "/training/steps"));
    assert_eq!(steps, (1e12f64 / (64.0 * 8192.0)).ceil());
    assert_eq!(number(&costed, "/training/time_s"), steps * step);
    assert_eq!(number(&costed, "/training/gpu_hours"), steps * step / 3600.0 * 64.0);
    assert!((number(&played, "/work_s") / number(&costed, "/training/time_s") - 1.0).abs() < 1e-9);
    assert!(number(&played, "/wall_s") > number(&played, "/work_s"));
    for (words, part) in [
        ("goodput --gpus 64 --step-time 5s --state 1TB --tokens 1T", "say --work in its place"),
        ("goodput --tokens 1T --work 3d", "cannot be used with"),
        ("estimate --tokens 15Q", "write 300B or 15.6T"),
    ] {
        let (code, _, err) = said(dir.path(), words);
        assert!(code == 2 && err.contains(part), "{words}: {err}");
    }
}

#[test]
fn every_help_has_an_example_and_is_as_it_was() {
    let dir = folder();
    let mut all = succeeds(dir.path(), "--help");
    for command in COMMANDS {
        let help = succeeds(dir.path(), &format!("{command} --help"));
        assert!(help.contains(&format!("Example: foretrain {command}")), "{help}");
        all.push_str(&format!("\n==== foretrain {command} --help\n\n{help}"));
    }
    golden("help.txt", &all);
    assert!(succeeds(dir.path(), "--version").starts_with("foretrain "));
}

/// A first command gives an answer; whoever says how to split the model gets that and nothing else.
#[test]
fn what_is_not_said_is_chosen_in_the_open() {
    let dir = folder();
    for command in ["estimate", "simulate", "plan", "run", "goodput", "collective --bytes 1m", "attention", "dispatch"]
    {
        succeeds(dir.path(), command);
    }
    let bare = json(dir.path(), "estimate --json");
    assert_eq!((&bare["feasible"], &bare["model"], &bare["gpus"]), (&true.into(), &"llama-3-8b".into(), &64.into()));
    let note = bare["notes"][0].as_str().expect("a note");
    let split = format!("zero {}, recompute {}", bare["zero"], bare["recompute"].as_str().unwrap());
    assert!(note.contains("needs 86.5 GiB") && note.contains(&split), "{note}");
    assert!(succeeds(dir.path(), "estimate").contains(&format!("  note: {note}\n")));
    // The same, said, needs no note, and is the same plan.
    let line = format!("--zero {} --recompute {}", bare["zero"], bare["recompute"].as_str().unwrap());
    let asked = json(dir.path(), &format!("estimate {line} --json"));
    assert_eq!((&asked["plan"], &asked["notes"]), (&bare["plan"], &serde_json::json!([])));
    // The default is no choice where it fits, and no other is made where something is said.
    assert_eq!(json(dir.path(), "estimate --gpus 64 --seq-len 4096 --json")["notes"], serde_json::json!([]));
    for said in ["--recompute none", "--zero 1", "--dp 64", "--options default"] {
        let asked = json(dir.path(), &format!("estimate {said} --json"));
        assert_eq!(asked["feasible"], false, "{said}");
    }
    let large = json(dir.path(), "estimate --model llama-3-70b --json");
    assert_eq!(large["feasible"], true, "{}", large["why"]);
}

/// What a search calls the fastest is what estimate says of that way, and nothing fits is an answer.
#[test]
fn a_search_is_of_ways_that_estimate_costs() {
    let dir = folder();
    let found = json(
        dir.path(),
        "search --gpus 16 --global-batch 64 --tp 1,2 --pp 1,2 --ring 1 --ulysses 1,2 --json --out found",
    );
    let best = &found["found"][0]["best"][0];
    let flag = |name: &str| format!("--{} {} ", name.replace('_', "-"), best[name].to_string().trim_matches('"'));
    let names = ["gpus", "tp", "pp", "vp", "ulysses", "ring", "zero", "micro_batch", "recompute", "options", "seq_len"];
    let line: String = names.map(flag).concat();
    let again = json(dir.path(), &format!("estimate {line} --global-batch 64 --json"));
    assert_eq!(again["step_time_s"], best["step_time_s"], "{line}");
    for file in ["study.json", "rows.csv", "refined.csv", "numerics.csv", "choices.svg", "choices.png"] {
        assert!(dir.path().join("found").join(file).metadata().unwrap().len() > 0, "{file}");
    }
    // The picture has the rows of the table.
    let picture = fs::read_to_string(dir.path().join("found/choices.svg")).unwrap();
    let values = found["found"][0]["values"].as_array().unwrap();
    let costed = values.iter().filter(|value| value["choice"] == "schedule" && !value["row"].is_null());
    let schedules: Vec<&str> = costed.map(|value| value["value"].as_str().unwrap()).collect();
    assert!(schedules.contains(&"no pipeline") && schedules.len() > 1, "{schedules:?}");
    schedules.iter().for_each(|name| assert!(picture.contains(name), "{name}"));
    let rows = fs::read_to_string(dir.path().join("found/rows.csv")).unwrap();
    fs::write(dir.path().join("found/rows.csv"), rows.replace(",default,", ",defalt,")).unwrap();
    let (code, _, err) = said(dir.path(), "plot found");
    assert!(code == 2 && err.contains("options: line") && err.contains("defalt"), "{code}, {err}");
    let (code, text, why) = said(dir.path(), "search --gpus 1 --model llama-3-70b");
    assert!(code == 2 && text.contains("nothing fits: more GPUs") && why.contains("nothing fits"), "{text}{why}");
    // What is said to help was not given, and helps.
    let near = "search --gpus 8 --model llama-3-70b --global-batch 8 --tp 1 --pp 1 --ulysses 8";
    let (code, text, why) = said(dir.path(), near);
    assert!(code == 2 && why.contains("; it fits with --options offload-optimizer ("), "{text}{why}");
    succeeds(dir.path(), &format!("{near} --options offload-optimizer"));
    let (_, _, why) = said(dir.path(), &format!("{near} --options offload-optimizer --seq-len 1M"));
    assert!(why.contains("nothing fits") && !why.contains("--options offload-optimizer"), "{why}");
}

/// Writes a model config with some keys changed.
fn model(dir: &Path, name: &str, changes: &[(&str, Value)]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/llm/tiny.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    for (key, value) in changes {
        config[key] = value.clone();
    }
    fs::write(dir.join(name), config.to_string()).unwrap();
}

/// A plan file changed as text.
fn changed_plan(dir: &Path, name: &str, change: impl Fn(String) -> String) {
    let text = fs::read_to_string(dir.join("plan.json")).unwrap();
    fs::write(dir.join(name), change(text)).unwrap();
}

/// Command lines that are refused, each for one reason.
const REFUSED: &[&str] = &[
    // A search.
    "search --tp 0",
    "search --schedules 2f2b",
    "search --gpus 8 --out there --model nowhere",
    "search --global-batch 8 --tokens-per-step 4M",
    // Failures and checkpoints.
    "goodput --step-time 5s --state 1TB",
    "goodput --gpus 8 --step-time 0s --state 1TB",
    "goodput --gpus 8 --step-time 5s --state 1TB --every 1s",
    "goodput --gpus 8 --step-time 5s --state 1TB --fleet nowhere",
    "goodput --gpus 8 --step-time 5s --state 1TB --fleet slow_repair.json",
    "goodput --gpus 1024 --step-time 5s --state 1TB --spares 2 --mtbf 1ms",
    "goodput --gpus 1024 --step-time 5s --state 1TB --spares 2 --mtbf 1ns",
    "estimate --gpus 8 --documents 0x10",
    "goodput --gpus 8192 --step-time 5s --state 1TB --fleet meta-rsc-1 --spares 2 --work 1d",
    "goodput --gpus 1048576 --step-time 5s --state 100TB --fleet opt-175b",
    "goodput --gpus 8 --step-time 1e300s --state 1TB",
    "goodput --gpus 8 --step-time -5s --state 1TB",
    // Degrees.
    "estimate --tp 0",
    "estimate --gpus -8",
    "estimate --dispatch nccl",
    "dispatch --ep 1",
    "estimate --options zb-h1",
    "run --devices 0",
    "run --devices 0,1",
    "simulate --slow-gpu 5:1e300",
    "estimate --ulysses 3 --gpus 6 --cluster local-cpu",
    "estimate --ulysses 3",
    "estimate --gpus 64 --ulysses 64 --seq-len 64K",
    "estimate --gpus 8 --ring 8 --seq-len 1000",
    "estimate --gpus 8 --dp 3 --ring 2",
    "estimate --dp 4 --ring 2 --global-batch 6",
    "estimate --global-batch 4 --gpus 8 --dp 8",
    "estimate --gpus 12",
    "estimate --tp 3",
    "estimate --pp 3 --gpus 24",
    "estimate --pp 4 --vp 2 --global-batch 96 --gpus 128",
    "estimate --vp 2",
    "estimate --ep 8",
    "estimate --zero 2 --options no-sync",
    "estimate --zero 1 --options copy-shards",
    "estimate --zero 2 --options all-reduce-grads",
    "estimate --dtype f32 --options bf16-grads",
    "estimate --options recompute-moe",
    "estimate --zero 1 --options shard-3",
    "estimate --zero 0 --options shard-2",
    "estimate --zero 4",
    // Attention alone.
    "attention --ring 3",
    "attention --ulysses 3",
    "attention --heads 32 --kv-heads 5",
    "attention --heads 0",
    "attention --pass both",
    "attention --ring 2048 --seq-len 1M",
    "attention --seq-len 4294967296 --heads 4096",
    "attention --cluster local-cpu --dtype bf16",
    // Names and files.
    "estimate --model llama-3-8B",
    "estimate --bogus -1",
    "estimate --cluster nameless.json",
    "estimate --model llama-9",
    "estimate --cluster dgx-x",
    "estimate --stack vllm",
    "estimate --cluster dgx-a100 --stack nccl-fa3",
    "estimate --cluster local-cpu --dtype bf16",
    "estimate --model missing.json",
    "estimate --model torn.json",
    "estimate --model kv.json",
    "estimate --model mixtral.json",
    "estimate --recompute some",
    "estimate --seq-len many",
    "estimate --sequence 8192",
    "",
    // Absurd sizes.
    "estimate --seq-len 1000000000000",
    "estimate --gpus 1000000000",
    "estimate --gpus 16384 --ring 16384 --seq-len 1M",
    "estimate --ring 1000000",
    "estimate --micro-batch 18446744073709551615",
    "estimate --global-batch 4294967296 --seq-len 4294967296",
    "estimate --model deep.json",
    "estimate --model wide.json",
    "run --seq-len 1M --devices 1",
    "run --ring 1000 --seq-len 16000",
    "run --on gpu",
    "run --model tiny --steps 9 --dump .",
    "run --model tiny --steps 9 --trace .",
    "run --check --seq-len 16K --devices 1",
    "selftest --on cuda --speed --speed-of nosuch",
    // Plans.
    "estimate --plan missing.json",
    "estimate --plan torn.json",
    "run --plan not-a-plan.json",
    "run --plan old.json",
    "run --plan edited.json",
    "run --plan plan.json --ring 4",
    "compare --plan plan.json --model llama-3-8b",
    // Studies.
    "plot missing",
    "sweep --seq-len 0 --out zero",
    "sweep --ring 0 --out zero",
    "sweep --tokens-per-step 1M --global-batch 4 --out both",
    "run --model tiny-hybrid --gpus 4 --ep 4 --seq-len 64 --global-batch 4 --routing round-robin",
];

#[test]
fn what_cannot_be_is_refused_with_value_and_remedy() {
    let dir = folder();
    let d = dir.path();
    model(d, "kv.json", &[("num_key_value_heads", 3.into())]);
    model(d, "mixtral.json", &[("model_type", "mixtral".into())]);
    model(d, "deep.json", &[("num_hidden_layers", 1_000_000.into())]);
    model(d, "wide.json", &[("hidden_size", (1u64 << 32).into())]);
    model(d, "not-a-plan.json", &[]);
    let nameless = r#"{"gpu": "h100-sxm5", "gpus_per_node": 8, "nodes": 1, "host": {"memory": {"value": "1 TB", "source": "", "provenance": "assumed"}}}"#;
    fs::write(d.join("nameless.json"), nameless).unwrap();
    let fleet = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/fleet/llama-3-405b.json");
    let mut fleet: Value = serde_json::from_str(&fs::read_to_string(fleet).unwrap()).unwrap();
    fleet["repair"]["value"] = "1e30 d".into();
    fs::write(d.join("slow_repair.json"), fleet.to_string()).unwrap();
    fs::write(d.join("torn.json"), "{\"model_type\": \"llama\", \"hidden_si").unwrap();
    succeeds(d, "plan --model tiny --cluster local-cpu --ulysses 2 --ring 2 --out plan.json");
    changed_plan(d, "old.json", |t| {
        let version = format!("\"foretrain_plan\":{}", foretrain::plan::program::VERSION);
        t.replacen(&version, "\"foretrain_plan\":0", 1)
    });
    changed_plan(d, "edited.json", |t| t.replacen("\"seq_len\":128", "\"seq_len\":256", 1));
    let mut all = String::new();
    for line in REFUSED {
        let (code, out, err) = said(d, line);
        assert_eq!((code, out.as_str()), (2, ""), "{line}: {err}");
        assert!(err.starts_with("Error: "), "{line}: {err}");
        assert!(!err.contains("panicked"), "{line}: {err}");
        let object = json(d, &format!("{line} --json"));
        assert!(object["error"].as_str().is_some_and(|e| !e.is_empty()), "{line}: {object}");
        all.push_str(&format!("$ foretrain {line}\n{}\n\n", err.trim_end()));
    }
    // The hash depends on every detail of the plan.
    let hash = plan_hash(d);
    golden("errors.txt", &without_hashes(&all.replace(&hash, "HASH")));
}

/// Fewer replicas share a batch that all GPUs do not, where nobody says how to split the rest.
#[test]
fn a_batch_for_few_replicas_is_no_refusal() {
    let dir = folder();
    let found = json(dir.path(), "estimate --global-batch 4 --gpus 8 --json");
    let degree = |name: &str| found[name].as_u64().unwrap();
    assert_eq!(degree("dp") * degree("tp") * degree("pp") * degree("ulysses") * degree("ring"), 8, "{found}");
    assert!(degree("dp") <= 4 && found["feasible"] == true, "{found}");
    assert!(found["notes"].to_string().contains("global_batch 4 is less than dp 8"), "{found}");
}

/// Whoever states a field twice is told so, whichever file it is in.
#[test]
fn a_field_that_is_stated_twice_is_refused() {
    let dir = folder();
    let d = dir.path();
    model(d, "model.json", &[]);
    let text = fs::read_to_string(d.join("model.json")).unwrap();
    fs::write(d.join("model.json"), text.replacen('{', "{\n\"vocab_size\": 7,\n", 1)).unwrap();
    fs::write(d.join("faults.json"), r#"{"faults": [], "faults": []}"#).unwrap();
    fs::write(d.join("rows.json"), "[{\"gpus\": 8,\n\"gpus\": 16}]").unwrap();
    succeeds(d, "plan --model tiny --cluster local-cpu --out plan.json");
    changed_plan(d, "plan2.json", |t| t.replacen("\"seq_len\":128", "\"seq_len\":128,\"seq_len\":128", 1));
    for (line, field, lines) in [
        ("estimate --model model.json --gpus 8", "model.json: vocab_size: ", "in line 2 and again in line "),
        ("simulate --faults faults.json", "faults.json: faults: ", "twice in line 1"),
        ("published --cases rows.json", "rows.json: [0].gpus: ", "in line 1 and again in line 2"),
        ("estimate --plan plan2.json", "plan2.json: plan.about.seq_len: ", "twice in line 1"),
    ] {
        let (code, out, err) = said(d, line);
        assert_eq!((code, out.as_str()), (2, ""), "{line}: {err}");
        assert!(err.contains(field) && err.contains(lines) && err.contains("leave one of them"), "{line}: {err}");
    }
}

/// What was found is printed although the file that it should be in, too, cannot be written.
#[test]
fn a_file_that_cannot_be_written_costs_no_answer() {
    let dir = folder();
    let line = "estimate --gpus 8 --ulysses 8 --recompute full --out .";
    let (code, out, err) = said(dir.path(), line);
    assert!(code == 2 && out.contains("MFU") && err.contains("give a file"), "{out}{err}");
    let found = json(dir.path(), &format!("{line} --json"));
    assert!(found["error"].as_str().is_some_and(|e| e.contains("give a file")), "{found}");
    assert!(found["step_time_s"].as_f64() > Some(0.0), "{found}");
}

fn plan_hash(dir: &Path) -> String {
    let file: Value = serde_json::from_str(&fs::read_to_string(dir.join("plan.json")).unwrap()).unwrap();
    file["hash"].as_str().unwrap().to_string()
}

/// Words of 32 hexadecimal digits are hashes.
fn without_hashes(text: &str) -> String {
    let is_hash = |w: &str| w.len() == 32 && w.chars().all(|c| c.is_ascii_hexdigit());
    let mut clean = text.to_string();
    for word in text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| is_hash(w)) {
        clean = clean.replace(word, "HASH");
    }
    clean
}

#[test]
fn a_row_that_does_not_fit_still_has_its_numbers() {
    let dir = folder();
    let line = "estimate --gpus 8 --seq-len 128K --ulysses 8";
    let (code, out, err) = said(dir.path(), line);
    assert_eq!(code, 2);
    assert!(
        out.contains("does not fit: memory: needs") && err.starts_with("Error: infeasible: memory: needs"),
        "{err}"
    );
    let report = json(dir.path(), &format!("{line} --json"));
    assert_eq!(report["feasible"], false);
    assert!(report["why"].as_str().unwrap().starts_with("memory: needs"));
    assert!(report["mfu"].as_f64().unwrap() > 0.0 && report["peak_mem_bytes"].as_u64().unwrap() > 80 << 30);
}

#[test]
fn estimates_have_the_columns_of_rows_csv() {
    let dir = folder();
    let report = json(dir.path(), "estimate --gpus 64 --seq-len 64K --ulysses 4 --ring 2 --recompute full --json");
    for column in columns(dir.path()) {
        assert!(report.get(&column).is_some(), "{column} is missing");
    }
    let number = |key: &str| report[key].as_f64().unwrap();
    let parts = number("compute_s") + number("exposed_comm_s") + number("bubble_s") + number("host_s");
    assert!((parts / number("step_time_s") - 1.0).abs() < 1e-9);
    assert_eq!((number("dp"), number("global_batch")), (8.0, 8.0));
    assert_eq!(report["strategy"], "usp");
    let [low, high] = [0, 1].map(|i| report["interval_95_s"][i].as_f64().unwrap());
    assert!(low < number("step_time_s") && number("step_time_s") < high);
    let record = report["record"].as_array().unwrap();
    assert_eq!(record.last().unwrap()["software"], "all of them");
    let rests_on = report["interval_rests_on"].as_str().unwrap();
    assert!(rests_on.contains("kernels and of exposed communication"), "{rests_on}");
    for line in [
        "estimate --gpus 64 --seq-len 64K --ulysses 4 --ring 2 --recompute full",
        "attention --seq-len 64K --ring 8 --causal",
    ] {
        let text = succeeds(dir.path(), line);
        assert!(text.contains(rests_on), "{line}: {text}");
    }
    // The same through a plan file.
    succeeds(dir.path(), "plan --gpus 64 --seq-len 64K --ulysses 4 --ring 2 --recompute full --out sub/plan.json");
    let by_plan = "estimate --plan sub/plan.json --cluster dgx-h100";
    assert_eq!(json(dir.path(), &format!("{by_plan} --json")), report);
    assert_eq!(json(dir.path(), &format!("{by_plan} --ring 2 --seq-len 64K --json")), report);
    succeeds(dir.path(), &format!("{by_plan} --out report.json"));
    let written: Value = serde_json::from_str(&fs::read_to_string(dir.path().join("report.json")).unwrap()).unwrap();
    assert_eq!(written, report);
}

/// A plan names no cluster: what it is costed on is said where nobody says it.
#[test]
fn a_plan_is_costed_on_a_cluster_that_is_said() {
    let dir = folder();
    succeeds(dir.path(), "plan --cluster dgx-a100 --gpus 8 --seq-len 4096 --zero 3 --recompute full --out pa.json");
    let note = "cluster: a plan names none, and no --cluster is given: taken is dgx-h100";
    for command in ["estimate", "simulate"] {
        let found = json(dir.path(), &format!("{command} --plan pa.json --json"));
        assert!(found["cluster"] == "dgx-h100" && found["notes"][0] == note, "{}", found["notes"]);
        let found = json(dir.path(), &format!("{command} --plan pa.json --cluster dgx-a100 --json"));
        assert!(found["cluster"] == "dgx-a100" && !found["notes"].to_string().contains("taken"), "{}", found["notes"]);
    }
    assert!(succeeds(dir.path(), "estimate --plan pa.json").contains(&format!("  note: {note}\n")));
}

/// How many weights are trained, and of a mixture how many a token meets.
#[test]
fn headings_and_json_have_the_weights_of_the_model() {
    let dir = folder();
    let dense = "--model llama-3-70b --gpus 64 --tp 8 --zero 3 --recompute full";
    let heading = "llama-3-70b (70.6 B weights) on 64 GPUs of dgx-h100 ";
    for command in ["estimate", "simulate"] {
        let text = succeeds(dir.path(), &format!("{command} {dense}"));
        assert!(text.starts_with(heading), "{text}");
    }
    let mixture = "--model qwen3-30b-a3b --gpus 64 --ep 8 --seq-len 4096 --recompute full";
    let named = "qwen3-30b-a3b (30.5 B weights, 3.35 B of them active)";
    for command in ["estimate", "plan"] {
        let text = succeeds(dir.path(), &format!("{command} {mixture}"));
        assert!(text.contains(named), "{text}");
        let found = json(dir.path(), &format!("{command} {mixture} --json"));
        assert_eq!([&found["weights"], &found["active_weights"]], [30_532_122_624u64, 3_353_032_704], "{command}");
    }
    let tiny = succeeds(dir.path(), "search --model tiny --cluster local-cpu --gpus 2 --seq-len 128 --global-batch 4");
    assert!(tiny.contains("tiny (107 K weights) on 2 GPUs of local-cpu"), "{tiny}");
}

#[test]
fn an_attention_alone_is_held_against_one_gpu_with_equal_work() {
    let dir = folder();
    let line = "attention --heads 32 --kv-heads 8 --head-dim 128 --seq-len 64K --causal --json";
    let number = |found: &Value, key: &str| found[key].as_f64().unwrap();
    let alone = json(dir.path(), line);
    assert_eq!(number(&alone, "efficiency"), 1.0);
    for pass in ["fwd", "bwd", "fwd+bwd"] {
        let ring = json(dir.path(), &format!("{line} --ring 8 --pass {pass}"));
        let rate = number(&ring, "flops") / 8.0 / number(&ring, "time_s");
        assert!((rate / number(&ring, "flops_per_s_per_gpu") - 1.0).abs() < 1e-12);
        assert!((0.5..1.0).contains(&number(&ring, "efficiency")), "{ring}");
        // The question of every other user: a GPU with an eighth of the sequence has an eighth of the work.
        assert!(number(&ring, "own_tokens_s") < 0.25 * number(&ring, "time_s"));
    }
    let forward = 4.0 * 65536f64.powi(2) * 32.0 * 128.0 / 2.0;
    assert_eq!(number(&alone, "flops"), forward);
    assert_eq!(number(&json(dir.path(), &format!("{line} --pass fwd+bwd")), "flops"), 3.5 * forward);
    let text = succeeds(dir.path(), "attention --seq-len 64K --ring 8 --causal");
    assert!(text.contains("efficiency") && text.contains("cp (ring)"), "{text}");
}

const SMALL: &str = "sweep --model tiny --gpus 8 --seq-len 1K,2K,3K --tokens-per-step 16K --ulysses 1,4,16 --ring 1,2";

fn columns(dir: &Path) -> Vec<String> {
    succeeds(dir, &format!("{SMALL} --out small"));
    let text = fs::read_to_string(dir.join("small/rows.csv")).unwrap();
    text.lines().next().unwrap().split(',').map(String::from).collect()
}

#[test]
fn a_sweep_writes_its_study_and_draws_it() {
    let dir = folder();
    let columns = columns(dir.path());
    golden("columns.txt", &(columns.join("\n") + "\n"));
    let file = |name: &str| dir.path().join("small").join(name);
    for name in ["study.json", "rows.csv", "mfu_vs_seqlen.svg", "mfu_vs_seqlen.png", "exposed_comm.png", "memory.svg"] {
        assert!(fs::metadata(file(name)).unwrap().len() > 0, "{name}");
    }
    let study = json(dir.path(), &format!("{SMALL} --out small --json"));
    let rows = study["rows"].as_array().unwrap();
    assert_eq!((rows.len(), study["kept_rows"].as_u64()), (36, Some(36)));
    let whys: Vec<&str> = rows.iter().filter(|r| r["feasible"] == false).map(|r| r["why"].as_str().unwrap()).collect();
    let has = |part: &str| assert!(whys.iter().any(|w| w.contains(part)), "{part}: {whys:?}");
    has("degrees: gpus 8 is not a multiple of ulysses 16");
    has("batch: 16384 tokens a step are no whole number of sequences of 3072");
    assert!(rows.iter().all(|r| columns.iter().all(|c| r.get(c).is_some())));
    let text =
        succeeds(dir.path(), "sweep --model tiny --gpus 8 --seq-len 1K --ulysses 1 --global-batch 8,16 --out two");
    assert!(text.contains(", 8 or 16 sequences a step\n"), "{text}");
    // The picture comes from the rows alone.
    let picture = fs::read(file("mfu_vs_seqlen.svg")).unwrap();
    fs::remove_file(file("mfu_vs_seqlen.svg")).unwrap();
    succeeds(dir.path(), "plot small");
    assert!(fs::read(file("mfu_vs_seqlen.svg")).unwrap() == picture);
    let drawn = json(dir.path(), "plot small --out elsewhere --json");
    assert_eq!(drawn["files"].as_array().unwrap().len(), 6);
    assert!(dir.path().join("elsewhere/mfu_vs_seqlen.png").exists());
}

#[test]
fn a_crossover_is_costed_written_and_drawn() {
    let dir = folder();
    let small = "crossover --ranks 2,8 --seq-len 8K,64K --kv-heads 32,2 --links cluster,net:20 --out map";
    let text = succeeds(dir.path(), small);
    assert!(text.contains("net:20") && text.contains("ring wins: it sends") && text.contains("16 points"), "{text}");
    let rows = fs::read_to_string(dir.path().join("map/rows.csv")).unwrap();
    assert_eq!(rows.lines().count(), 17);
    golden("crossover_columns.txt", &(rows.lines().next().unwrap().replace(',', "\n") + "\n"));
    let picture = fs::read(dir.path().join("map/crossover.svg")).unwrap();
    fs::remove_file(dir.path().join("map/crossover.svg")).unwrap();
    succeeds(dir.path(), "plot map");
    assert!(fs::read(dir.path().join("map/crossover.svg")).unwrap() == picture);
    let (code, _, err) = said(dir.path(), "crossover --links wire:3");
    assert!(code == 2 && err.contains("node:365"), "{err}");
    let (code, _, err) = said(dir.path(), "crossover --kv-heads 5");
    assert!(code == 2 && err.contains("5 does not divide the 32 heads"), "{err}");
}

#[test]
fn the_longest_sequences_are_found_written_and_drawn() {
    let dir = folder();
    let small = "longest --gpus 8,16 --ulysses 1,8 --options default,loss-chunks-16+mlp-chunks-16 --out long";
    let text = succeeds(dir.path(), small);
    assert!(text.contains("8 lengths") && text.contains("the GPU's memory: "), "{text}");
    let rows = || fs::read_to_string(dir.path().join("long/rows.csv")).unwrap();
    let whole = rows();
    assert_eq!(whole.lines().count(), 9);
    let picture = fs::read(dir.path().join("long/longest.svg")).unwrap();
    fs::remove_file(dir.path().join("long/longest.svg")).unwrap();
    succeeds(dir.path(), "plot long");
    assert!(fs::read(dir.path().join("long/longest.svg")).unwrap() == picture);
    // Stopped half way it goes on, and what is known is not looked for again.
    fs::write(dir.path().join("long/rows.csv"), &whole[..whole.len() / 2]).unwrap();
    let found = json(dir.path(), &format!("{small} --json"));
    assert!(rows() == whole, "{}", rows());
    let lengths: Vec<u64> =
        found["longest"].as_array().unwrap().iter().map(|one| one["row"]["seq_len"].as_u64().unwrap()).collect();
    // Pieces of logits and networks help, more ranks to a sequence help more.
    assert!(lengths.chunks(2).all(|pair| pair[1] > pair[0]) && lengths[2] > 4 * lengths[1], "{lengths:?}");
    let (code, _, err) = said(dir.path(), "longest --gpus 8 --ulysses 3");
    assert!(code == 2 && err.contains("divides --gpus"), "{err}");
    let (code, _, err) = said(dir.path(), "longest --model llama-3.1-405b --gpus 8 --zero 0 --out none");
    assert!(code == 2 && err.contains("no way fits") && err.contains("memory: needs"), "{err}");
    let (code, _, err) = said(dir.path(), &small.replace("default", "fp8,stripe"));
    assert!(code == 2 && err.contains("another study"), "{err}");
}

#[test]
fn a_sweep_killed_half_way_ends_up_with_the_same_bytes() {
    let dir = folder();
    succeeds(dir.path(), &format!("{SMALL} --out whole"));
    succeeds(dir.path(), &format!("{SMALL} --out torn"));
    let rows = |study: &str| dir.path().join(study).join("rows.csv");
    let whole = fs::read(rows("whole")).unwrap();
    assert!(fs::read(rows("torn")).unwrap() == whole);
    for cut in [whole.len() / 2, whole.len() / 3, 20, 0] {
        fs::write(rows("torn"), &whole[..cut]).unwrap();
        succeeds(dir.path(), &format!("{SMALL} --out torn"));
        assert!(fs::read(rows("torn")).unwrap() == whole, "cut at {cut}");
    }
    // A line that is damaged in the middle is not what a kill leaves behind.
    let text = String::from_utf8(whole).unwrap().replacen(",true,", ",maybe,", 1);
    fs::write(rows("torn"), text).unwrap();
    let (code, _, err) = said(dir.path(), &format!("{SMALL} --out torn"));
    assert!(code == 2 && err.contains("rows.csv") && err.contains("--fresh"), "{err}");
    succeeds(dir.path(), &format!("{SMALL} --out torn --fresh"));
    assert!(fs::read(rows("torn")).unwrap() == fs::read(rows("whole")).unwrap());
}

#[test]
fn another_grid_in_the_same_folder_is_refused() {
    let dir = folder();
    succeeds(dir.path(), &format!("{SMALL} --out study"));
    let (code, out, err) = said(dir.path(), &format!("{SMALL} --out study --zero 0,1"));
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.contains("zero is [1] there, [0,1] was asked for") && err.contains("another --out"), "{err}");
}

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
    let trace: Value = serde_json::from_str(&fs::read_to_string(dir.path().join("trace.json")).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 4 * plan["ops_linked"].as_u64().unwrap() as usize);
    // The same seed, the same loss; the same flags, the same plan.
    let again = json(dir.path(), "run --ulysses 2 --ring 2 --devices 1 --json");
    assert_eq!((&again["loss"], &again["plan"]), (&run["loss"], &run["plan"]));
    assert_ne!(json(dir.path(), "run --ulysses 2 --ring 2 --seed 2 --json")["loss"], run["loss"]);
}

/// Numbers of a file are read to the last bit that was written: the FLOPs of these models in a step are such that a reader that
/// is off by one would find another plan.
/// Before a GPU is asked for.
#[test]
fn plans_that_a_gpu_cannot_be_calibrated_with_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let mixture = "--model mixtral-8x7b --gpus 8 --dp 8 --ep 8 --seq-len 4096 --cluster dgx-h100";
    succeeds(dir.path(), &format!("plan {mixture} --out plan.json"));
    for (line, why) in [
        ("calibrate --on cuda --plan plan.json", "plan.json: routes: says how many rows"),
        ("calibrate --on cuda --plan none.json", "none.json"),
        ("calibrate --on cpu --plan plan.json", "--plan: is for GPUs"),
    ] {
        let (code, _, err) = said(dir.path(), line);
        assert!(code == 2 && err.contains(why), "{line}: {code}, {err}");
    }
}

#[test]
fn a_saved_plan_is_what_its_flags_say() {
    let dir = folder();
    for flags in [
        "--model llama-3-70b --gpus 64 --tp 4 --pp 4 --global-batch 256 --recompute full",
        "--model llama-3-70b --gpus 64 --tp 8 --zero 3 --recompute full",
        "--model qwen3-30b-a3b --gpus 64 --ep 8 --zero 1",
        "--model qwen3-30b-a3b --gpus 64 --ep 8 --zero 1 --dispatch deepep-v2-direct",
        "--model llama-3-8b --gpus 16 --ulysses 4 --ring 2 --seq-len 24K",
    ] {
        succeeds(dir.path(), &format!("plan {flags} --out plan.json"));
        let [saved, built] = ["--plan plan.json", flags].map(|of| json(dir.path(), &format!("estimate {of} --json")));
        assert_eq!((&saved["plan"], &saved["step_time_s"]), (&built["plan"], &built["step_time_s"]), "{flags}");
    }
}

#[test]
fn a_loss_that_is_no_number_is_an_error_behind_its_results() {
    let dir = folder();
    let line = "run --model tiny --seq-len 32 --global-batch 2 --steps 3 --lr 1e38";
    let (code, out, err) = said(dir.path(), line);
    assert!(code == 2 && out.contains("mean over the tokens"), "{code}, {out}");
    assert!(err.starts_with("Error: step 2: the loss is NaN") && err.contains("lower --lr"), "{err}");
    let found = json(dir.path(), &format!("{line} --json"));
    assert!(found["error"].as_str().unwrap().starts_with("step 2: the loss is NaN"), "{found}");
    assert_eq!(found["steps"].as_array().unwrap().len(), 2, "a run stops where it diverges");
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
    let trace: Value = serde_json::from_str(&fs::read_to_string(dir.path().join("both.json")).unwrap()).unwrap();
    let names: Vec<&str> =
        trace["traceEvents"].as_array().unwrap().iter().filter_map(|e| e["args"]["name"].as_str()).collect();
    assert!(names.contains(&"predicted rank 1") && names.contains(&"measured rank 1"));
    assert!(dir.path().join("found.json").exists());
    assert!(succeeds(dir.path(), "compare --seq-len 64").contains("largest differences"));
}

/// The commands of the README's table are what the program takes.
#[test]
fn the_readme_tells_the_truth() {
    let dir = folder();
    let readme = fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let examples: Vec<&str> = readme
        .lines()
        .filter(|l| l.starts_with("| `"))
        .filter_map(|l| l.rsplit('`').nth(1))
        .filter_map(|l| l.strip_prefix("foretrain "))
        .collect();
    // All but `selftest`, which needs a GPU.
    assert!(examples.len() >= COMMANDS.len() - 1, "{examples:?}");
    // `plan` writes what `run` and `compare` read; the default sweep is another test's and the CI's affair, and so
    // is measuring a machine.
    let elsewhere = ["sweep", "published", "plot", "calibrate", "validate"];
    for line in examples.iter().filter(|l| !elsewhere.iter().any(|command| l.starts_with(command))) {
        succeeds(dir.path(), line);
    }
}

#[test]
fn a_model_of_experts_is_estimated_in_whatever_way_its_rows_travel() {
    let dir = folder();
    let at = |way: &str| {
        let line =
            format!("estimate --model mixtral-8x7b --gpus 64 --ep 8 --seq-len 4096 --recompute full {way} --json");
        json(dir.path(), &line)["step_time_s"].as_f64().unwrap()
    };
    let ways = ["nccl", "allgather", "deepep-v1-normal", "deepep-v2", "hierarchical"];
    let times: Vec<f64> = ways.iter().map(|way| at(&format!("--dispatch {way}"))).collect();
    assert!(times.iter().all(|t| t / times[0] > 0.8 && t / times[0] < 1.25), "{times:?}");
    assert!(
        times[1] > times[0],
        "inside a node, with two experts a token, all rows to everyone are too many: {times:?}"
    );
    let rows =
        succeeds(dir.path(), "sweep --model mixtral-8x7b --gpus 64 --ep 8 --seq-len 4K --recompute full --out moe");
    assert!(rows.contains("that run") && !rows.contains(", 0 that run"), "{rows}");
}

/// DeepSeek's module of multi-token prediction is one layer more, and a head; without it weights may be sharded further.
#[test]
fn modules_of_multi_token_prediction_can_be_left_out() {
    let dir = folder();
    let line = "--model deepseek-v3 --gpus 512 --ep 64 --pp 8 --options uneven --seq-len 4096 --global-batch 512 --recompute full";
    let [with, without] = ["", " --no-mtp"].map(|flag| json(dir.path(), &format!("estimate {line}{flag} --json")));
    let flops = |found: &Value| found["model_flops_per_gpu"].as_f64().unwrap();
    assert!(flops(&without) < 0.97 * flops(&with) && flops(&without) > 0.95 * flops(&with));
    let note = without["notes"].to_string();
    assert!(note.contains("multi-token prediction are left out") && note.contains("--no-mtp"), "{note}");
    // With them they are told of, too, and are among the weights.
    let told = "multi-token prediction: 1 module is trained with the model, 4 % of the FLOPs of products and 1.7 % of the weights; \
                --no-mtp leaves it out";
    assert!(with["notes"].as_array().unwrap().iter().any(|note| note == told), "{}", with["notes"]);
    assert!(!note.contains("module is trained"), "{note}");
    let weights = |found: &Value| (found["weights"].as_f64().unwrap() / 1e9).round();
    assert_eq!([weights(&with), weights(&without)], [683.0, 671.0]);
    let sharded = format!("estimate {line} --zero 2");
    let (_, _, err) = said(dir.path(), &sharded);
    assert!(err.contains("use zero 1, or train without them (--no-mtp)"), "{err}");
    let (_, _, err) = said(dir.path(), &format!("{sharded} --no-mtp"));
    assert!(!err.contains("mtp: "), "{err}");
    let (code, _, err) = said(dir.path(), "estimate --model llama-3-8b --no-mtp");
    assert!(code == 2 && err.contains("llama-3-8b has no modules of multi-token prediction; leave it out"), "{err}");
    // A plan has them or not.
    let planned = succeeds(dir.path(), &format!("plan {line} --out with.json"));
    assert!(planned.contains(told), "{planned}");
    let (code, _, err) = said(dir.path(), "estimate --plan with.json --no-mtp");
    assert!(code == 2 && err.contains("has modules of multi-token prediction"), "{err}");
}

/// A way that drops rows is not credited with them, and says so wherever it is compared.
#[test]
fn rows_that_experts_drop_are_told_of() {
    let dir = folder();
    let line = "--model qwen3-30b-a3b --gpus 64 --ep 32 --seq-len 4096 --global-batch 256 --routing hot-rank:1";
    let found = json(dir.path(), &format!("estimate {line} --capacity 0.1 --json"));
    assert!(found["mfu"].as_f64().unwrap() < found["hfu"].as_f64().unwrap(), "{}, {}", found["mfu"], found["hfu"]);
    let note = found["notes"][0].as_str().unwrap();
    assert!(note.starts_with("rows: 99.7 % of the experts' are dropped"), "{note}");
    assert!(succeeds(dir.path(), &format!("estimate {line} --capacity 0.1")).contains(&format!("  note: {note}\n")));
    let table = succeeds(dir.path(), &format!("sweep {line} --zero 1 --recompute none --capacity 0.1 --out dropping"));
    assert!(table.contains("of experts' rows dropped"), "{table}");
    // All eight choices of a token cannot be among the four experts of a rank.
    let half = json(dir.path(), &format!("estimate {line} --json"))["notes"][0].to_string();
    assert!(half.contains("rows: 50.0 % of the experts' are dropped"), "{half}");
}

/// What a library of exchanges sets aside and refuses, it does of a configuration as of an exchange alone.
#[test]
fn libraries_ask_the_same_of_an_exchange_and_of_a_configuration() {
    let dir = folder();
    let alone = json(
        dir.path(),
        "dispatch --ep 32 --dispatch deepep-v1-ll --hidden 2048 --experts 128 --tokens 4K --dispatch-dtype bf16 --json",
    );
    let aside = &alone["buffers"];
    let aside = aside["links_bytes"].as_u64().unwrap() + aside["network_bytes"].as_u64().unwrap();
    let line = "estimate --model qwen3-30b-a3b --gpus 64 --ep 32 --recompute full --dispatch deepep-v1-ll --seq-len";
    let found = json(dir.path(), &format!("{line} 4K --json"));
    let of = |name: &str| found["memory"][name].as_u64().unwrap();
    assert_eq!((of("buffers"), found["memory"]["buffers_of"].as_str()), (aside, Some("DeepEP low latency")));
    assert_eq!(found["mem_room_bytes"].as_u64().unwrap() + aside + of("reserved"), of("capacity"));
    let text = succeeds(dir.path(), &format!("{line} 4K"));
    let of_library = text.lines().find(|line| line.starts_with("  buffers of DeepEP low latency "));
    assert!(of_library.is_some_and(|line| line.ends_with(" 8.1 GiB")), "{text}");
    let (code, _, err) = said(dir.path(), &format!("{line} 32K"));
    assert!(code == 2 && err.contains("plan + 65.0 GiB buffers of DeepEP low latency + 4.0 GiB reserved)"), "{err}");
    let many = "infeasible: DeepEP V1 has queues for up to 160 ranks, not 256; use deepep-v2";
    let wide = "--model deepseek-v3 --cluster dgx-h200 --gpus 2048 --ep 256 --pp 2 --seq-len 4096 --global-batch 4096 \
                --dispatch deepep-v1-normal --recompute full --options uneven";
    for line in ["dispatch --ep 256", &format!("estimate {wide}")] {
        let (_, _, err) = said(dir.path(), line);
        assert!(err.contains(many), "{line}: {err}");
    }
}

/// Rows take as long in a step as `dispatch` says of one exchange, whoever carries them and whatever the GPU.
#[test]
fn rows_take_as_long_in_a_step_as_alone() {
    const LAYERS: f64 = 48.0;
    let dir = folder();
    for (cluster, ep) in [("dgx-h100", 32), ("dgx-b200", 8)] {
        for way in Dispatch::ALL.map(Dispatch::name) {
            let on = format!("--cluster {cluster} --ep {ep} --dispatch {way}");
            let step =
                json(dir.path(), &format!("estimate --model qwen3-30b-a3b --gpus {ep} --seq-len 1K {on} --json"));
            let busy = step["communication_busy"].as_array().unwrap().iter().find(|busy| busy["name"] == "ep");
            let busy = busy.unwrap()["seconds"].as_f64().unwrap();
            let shape = "--hidden 2048 --experts 128 --topk 8 --tokens 1K --dispatch-dtype bf16";
            let alone = json(dir.path(), &format!("dispatch {shape} {on} --json"));
            // Forward there and back; backward along the way of the combine, and back.
            let passes = ["dispatch", "combine", "cached_dispatch", "combine"];
            let sum: f64 = passes.iter().map(|pass| alone[pass]["mean_s"].as_f64().unwrap()).sum();
            assert!((busy / (LAYERS * sum) - 1.0).abs() < 1e-9, "{on}: {busy} is not {LAYERS} x {sum}");
        }
    }
}

/// Rates are those of the pass that they stand beside, in text and in JSON.
#[test]
fn rates_of_an_exchange_are_those_of_their_pass() {
    let dir = folder();
    let line = "dispatch --ep 16 --tokens 128";
    let (found, text) = (json(dir.path(), &format!("{line} --json")), succeeds(dir.path(), line));
    for (name, label) in [("dispatch", "dispatch "), ("cached_dispatch", "cached dispatch "), ("combine", "combine ")] {
        let pass = &found[name];
        for over in ["network", "links"] {
            let of = |field: &str| pass[over][field].as_f64().unwrap();
            let rates =
                ["logical", "real"].map(|bytes| of(&format!("{bytes}_bytes")) / pass["total_s"].as_f64().unwrap());
            assert_eq!(rates, ["logical", "real"].map(|bytes| of(&format!("{bytes}_bytes_per_s"))), "{name} {over}");
            let row = text.lines().find(|line| line.starts_with(label) && words(line).contains(&over)).unwrap();
            let shown: Vec<String> = rates.iter().map(|rate| format!("{:.1}", rate / 1e9)).collect();
            assert!(words(row).ends_with(&[&shown[0], &shown[1]]), "{row}: {shown:?}");
        }
    }
}

/// What no machine has is refused where its file is read, or where a stack meets a GPU.
#[test]
fn machines_that_cannot_be_are_refused() {
    let dir = folder();
    let edited = |kind: &str, name: &str, field: &str, value: Value| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("models/{kind}/{name}.json"));
        let mut file: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        let (parts, last) = field.rsplit_once('/').unwrap();
        file.pointer_mut(parts).unwrap()[last] = value;
        fs::write(dir.path().join("mine.json"), file.to_string()).unwrap();
    };
    let measured = |rel_sd: f64| {
        let lines = serde_json::json!([{"latency": "9 us", "bandwidth": "100 GB/s"}]);
        serde_json::json!([{"op": "all_reduce", "gpus": 8, "nodes": 1, "lines": lines, "rel_sd": rel_sd, "source": "a test"}])
    };
    for (field, value, why) in [
        ("/measured", measured(-5.0), "measured.rel_sd: -5 is no relative standard deviation"),
        ("/measured", measured(1.0), "write one from 0 to below 1"),
        ("/host/latency/value", "1000 s".into(), "host.latency: 1e3 s is not between 0 and 1000 s"),
        ("/host/memory/value", "0 TB".into(), "host.memory: 0 is not above zero"),
        ("/scale_out/p2p/value", "400 GB/s".into(), "scale_out.p2p: 400 GB/s is more than the 50 GB/s of the wire"),
        ("/scale_out/several/value", "50.1 GB/s".into(), "scale_out.several: 50.1 GB/s is more than the 50 GB/s"),
        ("/scale_out/achieved/value", "51 GB/s".into(), "scale_out.achieved: 51 GB/s is more than the 50 GB/s"),
    ] {
        edited("cluster", "dgx-h100", field, value);
        let (code, _, err) = said(dir.path(), "collective --cluster ./mine.json --bytes 1m");
        assert!(code == 2 && err.contains("mine.json: ") && err.contains(why), "{field}: {code}, {err}");
    }
    // Sends of a GPU that has four NICs go over all of them.
    edited("cluster", "h100-8x400-efa", "/scale_out/several/value", "50.1 GB/s".into());
    let (_, _, err) = said(dir.path(), "collective --cluster ./mine.json --bytes 1m");
    assert!(
        err.contains("scale_out.several: 50.1 GB/s is more than the 50 GB/s of the wires of a GPU together"),
        "{err}"
    );
    for field in ["collective_ctas", "p2p_ctas"] {
        edited("stack", "nccl-fa3", &format!("/{field}/value"), 133.into());
        let why = format!("mine.json: {field}: 133: h100-sxm5 has 132 SMs; use 1 to 132");
        for command in
            ["estimate --gpus 8 --tp 8", "dispatch --ep 8", "collective", "attention", "crossover --out found"]
        {
            let (code, _, err) = said(dir.path(), &format!("{command} --stack ./mine.json"));
            assert!(code == 2 && err.contains(&why), "{command}: {code}, {err}");
        }
        edited("stack", "nccl-fa3", &format!("/{field}/value"), 132.into());
        succeeds(dir.path(), "collective --stack ./mine.json --bytes 1m");
    }
}

/// No file of a cluster is written that would not be read.
#[test]
fn logs_of_times_that_scatter_are_no_lines() {
    let dir = folder();
    // They grow with the bytes, but every second size takes 400 times as long as the others.
    let time = |i: u32| 10.0 + f64::from(1 << i) / 1e5 * [1.0, 400.0][i as usize % 2];
    let row = |i: u32| format!(" {} {} float sum -1 {} 0.1 0.1 0\n", 1 << i, 1 << (i - 2), time(i));
    fs::write(dir.path().join("all_reduce.log"), (14..30).map(row).collect::<String>()).unwrap();
    let line = "calibrate --from-nccl-tests all_reduce.log --gpus 8 --nodes 1";
    succeeds(dir.path(), line);
    let (code, _, err) = said(dir.path(), &format!("{line} --out mine.json"));
    assert!(code == 2 && err.contains("mine.json: measured.rel_sd") && err.contains("measure again"), "{code}, {err}");
    assert!(!dir.path().join("mine.json").exists());
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

/// Each of several processes would have all ranks, and write the same files.
#[test]
fn cores_are_for_one_process() {
    let dir = folder();
    let joined = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")];
    for line in ["run --out rows.csv", "validate --profile p.json", "compare --profile p.json", "calibrate --quick"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foretrain"));
        let out = command.args(words(line)).envs(joined).current_dir(dir.path()).output().unwrap();
        let err = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && err.contains("process 1 of the 2 that torchrun started"), "{err}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is written");
}

/// What one flag says and another, or a file, leaves nothing of is refused, and so are rows that are none.
#[test]
fn an_exchange_that_makes_no_sense_is_refused() {
    let dir = folder();
    fs::write(dir.path().join("two.csv"), "source,experts\n0,1 2\n0,3 -1\n1,0 7\n").unwrap();
    fs::write(dir.path().join("twice.csv"), "source,experts\n0,3 3\n").unwrap();
    for (flags, why) in [
        ("--hidden 0", "rows without columns"),
        ("--hook", "use --dispatch deepep-v1-ll"),
        ("--dispatch nccl --sms 24", "takes no number of SMs"),
        ("--dispatch deepep-v1-ll --sms 24 --tokens 128", "takes no number of SMs"),
        ("--routing khot:0", "no number of experts"),
        ("--routing khot:300:0.5", "300 hot experts of 256"),
        ("--ep 2 --experts 8 --routing two.csv --tokens 8", "tokens of its own"),
        ("--ep 2 --experts 8 --routing two.csv --topk 8", "the tokens of the file have 2"),
        ("--ep 2 --experts 8 --routing twice.csv", "line 2: expert 3 twice"),
        ("--ep 8 --experts 8 --topk 9", "9 of 8"),
        ("--ep 16 --replicas 3", "259 slots do not divide"),
        ("--ep 32 --routing zipf:1.0 --replicas 16", "272 slots do not divide over 32 ranks; use 0 or 32 replicas"),
        ("--ep 32 --experts 64 --node-limit 0", "choose 1 to 4"),
        ("--node-limit 2 --routing spread", "2 of 4 nodes, which the choices of --routing spread know nothing of"),
        ("--node-limit 2 --routing round-robin", "know nothing of; leave it out"),
        ("--node-limit 2 --routing ratio:1.5", "--routing ratio:1.5 know nothing of"),
        ("--ep 16 --experts 16 --node-limit 1 --routing two.csv", "--routing two.csv know nothing of"),
    ] {
        let (code, _, err) = said(dir.path(), &format!("dispatch {flags}"));
        assert!(code == 2 && err.contains(why), "{flags}: {code}, {err}");
    }
    let found = json(dir.path(), "dispatch --ep 2 --experts 8 --routing two.csv --json");
    assert_eq!((found["topk"].as_u64(), found["tokens"].as_u64()), (Some(2), Some(2)));
    for (way, sms) in [("deepep-v1-normal", 20), ("hybrid-ep", 32)] {
        let line = format!("dispatch --dispatch {way}");
        assert_eq!(json(dir.path(), &format!("{line} --json"))["dispatch"]["sms"], sms);
        let (_, text, _) = said(dir.path(), &line);
        assert!(text.contains(&format!("stack nccl-fa3, {sms} SMs\n")), "{text}");
    }
}

#[test]
fn no_link_of_a_simulated_step_is_more_than_busy() {
    let dir = folder();
    for line in [
        "--model llama-3-8b --seq-len 131072 --ulysses 8 --recompute full --slow-gpu 5:1.1",
        "--model mixtral-8x7b --seq-len 4096 --ep 8 --recompute full --global-batch 64",
    ] {
        let found = json(dir.path(), &format!("simulate --gpus 64 {line} --json"));
        let links = found["utilisation"].as_array().unwrap();
        assert_eq!(links.len(), 2);
        for busy in links.iter().flat_map(|link| link["over_time"].as_array().unwrap()) {
            assert!((0.0..=1.0 + 1e-9).contains(&busy.as_f64().unwrap()), "{found}");
        }
    }
}

/// Doubles what is written as so much a second, wherever it stands.
fn double_rates(value: &mut Value) {
    match value {
        Value::Object(map) => map.values_mut().for_each(double_rates),
        Value::String(text) => {
            let Some((number, unit)) = text.split_once(' ').filter(|(_, unit)| unit.ends_with("/s")) else { return };
            *text = format!("{} {unit}", 2.0 * number.parse::<f64>().unwrap());
        }
        _ => {}
    }
}

#[test]
fn what_faster_links_would_save_is_what_they_save() {
    let dir = folder();
    for (cluster, part, change, way) in [
        ("dgx-h100", "scale_out", "doubling NIC bandwidth", "qwen3-30b-a3b --gpus 64 --ep 32 --seq-len 4K"),
        (
            "l20-sockets-pcie",
            "scale_up",
            "doubling the bandwidth inside nodes",
            "llama-3-8b --gpus 8 --ulysses 8 --seq-len 32K --zero 3 --recompute full",
        ),
    ] {
        let file = format!("{}/models/cluster/{cluster}.json", env!("CARGO_MANIFEST_DIR"));
        let mut faster: Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        double_rates(&mut faster[part]);
        fs::write(dir.path().join("faster.json"), faster.to_string()).unwrap();
        let line = |cluster: &str| format!("simulate --model {way} --cluster {cluster} --json");
        let told = json(dir.path(), &format!("{} --explain", line(cluster)));
        let found = told["what_if"].as_array().unwrap().iter().find(|other| other["change"] == change);
        let really = json(dir.path(), &line("faster.json"))["step_time_s"].as_f64().unwrap();
        let said = found.unwrap()["step_s"].as_f64().unwrap();
        assert!((said / really - 1.0).abs() < 1e-9, "{cluster}: {said}, {really}");
        assert!(really < 0.9 * told["step_time_s"].as_f64().unwrap(), "{cluster}");
    }
}

/// Whoever plans by a step is told what `estimate` tells of it, whichever command has it.
#[test]
fn other_software_and_published_runs_are_told_of_wherever_a_step_is() {
    let dir = folder();
    let way = "--model qwen3-30b-a3b --gpus 16 --seq-len 4K --global-batch 32";
    let alone = "--tp 1 --pp 1 --ulysses 1 --ring 1 --zero 1 --micro-batch 1 --dispatch nccl --within 5";
    for line in [
        format!("estimate {way} --ep 8 --recompute full"),
        format!("simulate {way} --ep 8 --recompute full"),
        format!("goodput {way} --ep 8 --recompute full --tokens 1T --runs 1"),
        format!("search {way} --ep 8 {alone}"),
    ] {
        let text = succeeds(dir.path(), &line);
        assert!(text.contains("note: ") && text.contains("experts: stack nccl-fa3"), "{line}: {text}");
        assert!(text.contains("published runs"), "{line}: {text}");
    }
    // Nobody publishes runs on such CPUs.
    let tiny = json(dir.path(), "estimate --model tiny --cluster local-cpu --json");
    assert!(tiny["record"].as_array().unwrap().is_empty());
}

/// Of NCCL's all-to-all the NICs are what takes longest; links inside nodes have room to spare beside them.
#[test]
fn a_slow_link_inside_a_node_costs_less_than_a_slow_nic() {
    let dir = folder();
    let line = "simulate --model qwen3-30b-a3b --gpus 16 --ep 16 --seq-len 4096 --dispatch nccl --zero 3 --json";
    let step = |fault: &str| json(dir.path(), &format!("{line} {fault}"))["step_time_s"].as_f64().unwrap();
    let [well, nic, inside, hardly] =
        ["", "--slow-link 3:0.5", "--slow-link 3:nvlink:0.5", "--slow-link 3:nvlink:0.95"].map(step);
    assert!(nic > 1.25 * well && inside - well < 0.75 * (nic - well), "{well}, {nic}, {inside}");
    assert!(hardly < 1.02 * well, "{well}, {hardly}");
}

/// The two channels of a send fill less than half of a NIC, and a tenth of NVLink: whichever is slower by less than that
/// costs next to nothing (the gathers of weights fill a NIC), as on a cluster whose links are all so.
#[test]
fn a_send_has_room_on_its_link() {
    let dir = folder();
    let line = "simulate --model llama-3-8b --gpus 16 --seq-len 128K --ring 16 --zero 3 --recompute full --json";
    let step = |fault: &str| json(dir.path(), &format!("{line} {fault}"))["step_time_s"].as_f64().unwrap();
    let [well, room, slow] = ["", "--slow-link 7:0.5", "--slow-link 7:0.1"].map(step);
    assert!(room < 1.05 * well && slow > 1.5 * well, "{well}, {room}, {slow}");
}

/// Times are told to 20 hours: what is later is refused, and not wrapped around.
#[test]
fn a_step_of_more_than_twenty_hours_is_refused() {
    let dir = folder();
    let way = "--model llama-3-70b --cluster dgx-h200 --gpus 16 --seq-len 1M --ulysses 8 --ring 2 --zero 3 --recompute full \
               --options offload-activations";
    for command in ["estimate", "simulate"] {
        let (code, _, err) = said(dir.path(), &format!("{command} {way} --global-batch 128"));
        assert!(
            code == 2 && err.contains("more than 20 hours; use a smaller global_batch"),
            "{command}: {code}, {err}"
        );
    }
    succeeds(dir.path(), &format!("estimate {way} --global-batch 64"));
}

/// Nothing that is shipped lacks a figure that the default asks for: what does not fit, or has no fused kernel, says what
/// to do.
#[test]
fn every_shipped_cluster_is_estimated_or_says_what_it_lacks() {
    let dir = folder();
    let clusters = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("models/cluster")).unwrap();
    let names = clusters.map(|file| file.unwrap().path().file_stem().unwrap().display().to_string());
    let mut costed = 0;
    for name in names {
        let (code, _, err) = said(dir.path(), &format!("estimate --cluster {name} --gpus 8"));
        let refused = err.contains("infeasible: memory") || err.contains("add the option unfused");
        assert!(code == 0 || code == 2 && refused, "{name}: {err}");
        costed += usize::from(code == 0);
    }
    assert!(costed > 50, "{costed} clusters");
}

/// Where the CPU posts to its NICs, rows go by what was measured over such; without NVLink they do not go at all.
#[test]
fn deepep_goes_by_the_network_that_there_is() {
    let dir = folder();
    let line = |cluster: &str| format!("dispatch --cluster {cluster} --ep 16 --dispatch deepep-v1-ll --tokens 128");
    let took = |cluster: &str| json(dir.path(), &format!("{} --json", line(cluster)))["dispatch"]["total_s"].as_f64();
    let [verbs, efa] = ["dgx-h100", "h100-8x400-efa"].map(|cluster| took(cluster).unwrap());
    assert!(efa > 3.0 * verbs, "{efa} s over EFA, {verbs} s over InfiniBand");
    let (code, _, err) = said(dir.path(), &line("h100-pcie").replace("--ep 16", "--ep 8"));
    assert!(code == 2 && err.contains("by NVLink"), "{code}, {err}");
}

/// One sequence of 1024 tokens at a time of Qwen3-4B took 3.37 s a step of 32 on an H200 under Megatron-Bridge (h200c-mb1
/// of traces/published/blind_training_9.json): the GPU would do it in less than two.
#[test]
fn a_cpu_that_issues_op_by_op_is_told_of() {
    let dir = folder();
    let config = r#"{"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "tie_word_embeddings": true, "hidden_act": "silu", "max_position_embeddings": 40960}"#;
    fs::write(dir.path().join("qwen3-4b.json"), config).unwrap();
    let line = "estimate --model qwen3-4b.json --cluster dgx-h200 --gpus 1 --global-batch 32 --json";
    let of = |more: &str| {
        let found = json(dir.path(), &format!("{line} {more}"));
        let told = found["notes"].as_array().unwrap().iter().any(|note| note.as_str().unwrap().starts_with("host:"));
        (found["step_time_s"].as_f64().unwrap(), told)
    };
    let (graphs, told) = of("--seq-len 1K");
    assert!(told && graphs < 2.0, "{graphs} s");
    let (eager, told) = of("--seq-len 1K --stack megatron-eager");
    assert!(!told && (eager / 3.37 - 1.0).abs() < 0.1, "{eager} s");
    assert!(!of("--seq-len 16K").1);
    // Layers of experts are more calls, and the CPUs of GB200 slower at them.
    let of = |cluster: &str, more: &str| {
        let line = "estimate --model qwen3-30b-a3b --gpus 8 --ep 8 --global-batch 64 --seq-len 1K --json";
        json(dir.path(), &format!("{line} --cluster {cluster} {more}"))
    };
    let eager = |cluster: &str, stack: &str| of(cluster, &format!("--stack {stack}"))["step_time_s"].as_f64().unwrap();
    let [dense, experts] = ["megatron-eager", "megatron-eager-experts"].map(|stack| eager("dgx-b200", stack));
    assert!((experts / dense - 1.67).abs() < 0.05, "{experts} {dense}");
    let grace = eager("gb200-nvl72", "megatron-eager-experts");
    assert!((grace / experts - 1.5).abs() < 0.05, "{grace} {experts}");
    let notes = of("gb200-nvl72", "")["notes"].to_string();
    assert!(notes.contains("takes 250 us an op") && notes.contains("stack megatron-eager-experts"), "{notes}");
}

/// Blocks of another plan have the names of these, and other sizes.
#[test]
fn block_times_are_of_the_plan_that_they_were_written_for() {
    let dir = folder();
    let line = "simulate --gpus 64 --tp 8 --global-batch 64 --seq-len";
    succeeds(dir.path(), &format!("{line} 8K --write-blocks blocks.json"));
    let played = |line: &str| said(dir.path(), &format!("{line} --fidelity block --block-times blocks.json"));
    assert_eq!(played(&format!("{line} 8K")).0, 0);
    for other in [format!("{line} 32K"), format!("{line} 8K --cluster dgx-b200")] {
        let (code, _, err) = played(&other);
        assert!(code == 2 && err.contains("of another plan") && err.contains("--write-blocks"), "{other}: {err}");
    }
    // Who measured them says nothing of their size, and is believed.
    let text = fs::read_to_string(dir.path().join("blocks.json")).unwrap();
    let mut blocks: Value = serde_json::from_str(&text).unwrap();
    for block in blocks["blocks"].as_array_mut().unwrap() {
        block.as_object_mut().unwrap().remove("predicted_s").unwrap();
    }
    fs::write(dir.path().join("blocks.json"), blocks.to_string()).unwrap();
    assert_eq!(played(&format!("{line} 32K")).0, 0);
}

/// What a plan settles no flag may say again, and what is not even is told of.
#[test]
fn a_plan_has_its_routes() {
    let dir = folder();
    let way = "--model qwen3-30b-a3b --gpus 16 --ep 8 --recompute full --global-batch 16";
    succeeds(dir.path(), &format!("plan {way} --routing zipf:1.0 --out plan.json"));
    let (code, _, err) = said(dir.path(), "estimate --plan plan.json --routing balanced");
    assert!(code == 2 && err.contains("contradicts the plan, which has routes of its own"), "{err}");
    let note = "routing: as --routing or the plan has it";
    assert!(succeeds(dir.path(), "estimate --plan plan.json").contains(note));
    assert!(!succeeds(dir.path(), &format!("estimate {way}")).contains(note));
    // Of one length, too, which is packed again and again.
    for (lengths, said) in [("4K", "documents of 4 K tokens"), ("32K,32K", "2 documents of 64 K tokens in all")] {
        let found = succeeds(dir.path(), &format!("estimate --gpus 8 --tp 8 --seq-len 64K --documents {lengths}"));
        assert!(found.contains(&format!("packed: a sequence is {said}")), "{found}");
    }
}

#[test]
fn faults_that_were_played_are_told_of() {
    let dir = folder();
    let told = |fault: &str| succeeds(dir.path(), &format!("simulate --gpus 8 --tp 8 {fault}"));
    assert!(told("--slow-gpu 5:1.1").contains("fault: kernels of rank 5 take 1.1 times as long\n"));
    // The link is down, whatever else is said of it.
    let (_, out, err) = said(dir.path(), "simulate --gpus 16 --tp 2 --slow-link 0:0 --flap 0:0.001:0.001");
    assert!((out + &err).contains("between nodes of rank 0 is down"));
    let late = told("--dead 3@500");
    assert!(late.contains("rank 3 does nothing any more from 500 s on; the step is over before"), "{late}");
}

#[test]
fn what_flags_say_is_kept_to() {
    let dir = folder();
    // The words that are tried on the best way leave the stage of ZeRO as it is.
    let line = "search --gpus 8 --seq-len 8K --global-batch 8 --zero 1 --tp 2 --micro-batch 2 --best 1 --json";
    let found = json(dir.path(), line);
    let rows = ["best", "refined"].map(|rows| found["found"][0][rows].as_array().unwrap());
    let rows: Vec<&Value> = rows.into_iter().flatten().collect();
    assert!(!rows.is_empty() && rows.iter().all(|row| row["zero"] == 1), "{found}");
    for (line, parts) in [
        ("search --gpus 8 --tokens-per-step 12K --seq-len 8K", ["12288", "e.g. 16384"]),
        ("dispatch --ep 64 --dispatch deepep-v2 --sms 1000", ["--sms: 1000", "132"]),
        ("dispatch --ep 64 --dispatch hybrid-ep --sms 0", ["--sms: 0", "132"]),
    ] {
        let (code, _, err) = said(dir.path(), line);
        assert!(code == 2 && parts.iter().all(|part| err.contains(part)), "{line}: {err}");
    }
    // Failures a millisecond apart leave no end in sight, and are not waited for.
    let out = said(dir.path(), "goodput --gpus 1024 --step-time 5s --state 1TB --mtbf 1ms");
    assert!(format!("{}{}", out.1, out.2).contains("no end"), "{out:?}");
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

/// Links are fitted to what links can have measured, and to nothing else.
#[test]
fn logs_that_no_links_can_have_made_are_refused() {
    let dir = folder();
    let fitted = |rows: &[(u64, &str)], flags: &str| {
        let row = |(bytes, time): &(u64, &str)| format!("{bytes} {} float sum -1 {time} 0.1 0.1 0\n", bytes / 4);
        fs::write(dir.path().join("all_reduce.log"), rows.iter().map(row).collect::<String>()).unwrap();
        said(dir.path(), &format!("calibrate --from-nccl-tests all_reduce.log {flags} --nodes 1 --out mine.json"))
    };
    let (mib, gib) = (1 << 20, 1 << 30);
    for (rows, parts) in [
        (&[(gib, "4100"), (gib, "4090"), (gib, "4110")][..], ["fewer than two sizes", "-b 8 -e 8G"]),
        (&[(mib, "20.5"), (2 * mib, "18.5")], ["no longer than smaller ones", "measure larger ones"]),
        (&[(mib, "20.0"), (2 * mib, "20.2")], ["fitted at 5243 GB/s", "measure larger sizes"]),
        (&[(8, "0.001"), (mib, "20.0"), (gib, "4100")], ["line 1: 1e-3 us", "measure again"]),
        (&[(8, "10.0"), (mib, "1e-300"), (gib, "4100")], ["line 2: 1e-300 us", "measure again"]),
        (&[(8, "10.0"), (mib, "20.0"), (gib, "41")], ["line 3: 1073741824 B", "--cluster"]),
    ] {
        let (code, _, err) = fitted(rows, "--gpus 8");
        assert!(code == 2 && parts.iter().all(|part| err.contains(part)), "{rows:?}: {err}");
        assert!(err.contains("all_reduce.log: ") && !dir.path().join("mine.json").exists(), "{rows:?}: {err}");
    }
    // As a node of eight has them; and PCIe does not.
    let good = [(8, "21.0"), (mib, "32.0"), (64 * mib, "270"), (gib, "4000")];
    let (code, _, err) = fitted(&good, "--gpus 8 --cluster h100-pcie");
    assert!(code == 2 && err.contains("links of h100-pcie are not for"), "{err}");
    assert_eq!(fitted(&good, "--gpus 8").0, 0);
}

/// A group of other GPUs or nodes is predicted as if nothing had been measured.
#[test]
fn what_measured_collectives_count_for_is_said() {
    let dir = folder();
    // At 20 GB/s, a tenth of what the cluster's links have.
    let time = |i: u32| 400.0 + f64::from(1 << i) / 2e4;
    let row = |i: u32| format!("{} {} float sum -1 {} 0.1 0.1 0\n", 1 << i, 1 << (i - 2), time(i));
    for op in ["all_gather", "reduce_scatter"] {
        fs::write(dir.path().join(format!("{op}.log")), (10..30).map(row).collect::<String>()).unwrap();
    }
    let line = "calibrate --from-nccl-tests all_gather.log reduce_scatter.log --gpus 8 --nodes 1 --out mine.json";
    let (out, groups) =
        (succeeds(dir.path(), line), "all_gather among 8 GPUs on 1 node, reduce_scatter among 8 GPUs on 1 node");
    assert!(out.lines().last().unwrap().contains(&format!("counts for {groups} alone")), "{out}");
    let shown = succeeds(dir.path(), "cluster --show mine.json");
    let listed = |op: &str| shown.lines().any(|line| words(line) == [op, "8", "1", &format!("{op}.log")]);
    assert!(listed("all_gather") && listed("reduce_scatter") && !listed("all_reduce"), "{shown}");
    assert!(!succeeds(dir.path(), "cluster --show dgx-h100").contains("measured"));
    // The example of the command's help counts them, and one without a group of 8 does not.
    let step = |cluster: &str, how: &str| {
        json(dir.path(), &format!("estimate --cluster {cluster} {how} --json"))["step_time_s"].as_f64().unwrap()
    };
    let slower = |how: &str| step("mine.json", how) / step("dgx-h100", how);
    assert!(slower("--gpus 64 --tp 8") > 2.0 && slower("--gpus 64") == 1.0);
}

/// Ten minutes of the one and five of the other, both of a source.
#[test]
fn times_until_a_failure_is_noticed_point_at_each_other() {
    let dir = folder();
    let dead = said(dir.path(), "simulate --model tiny --gpus 8 --dead 3@0.00001").1;
    assert!(dead.contains("the watchdog ends the job 600 s") && dead.contains("--watchdog"), "{dead}");
    assert!(dead.contains("`goodput`") && dead.contains("`detect`") && dead.contains("--fleet"), "{dead}");
    let run = "goodput --gpus 1024 --step-time 5s --state 1TB --runs 2";
    let assumed = succeeds(dir.path(), run);
    let all = ["llama-3-405b.detect (5.0 min; --recover", "--fleet", "`simulate --dead`", "--watchdog instead, 600 s)"];
    assert!(all.iter().all(|part| assumed.contains(part)), "{assumed}");
    // Where it was published, or was told, it is not assumed.
    for flags in ["--fleet meta-rsc-1", "--recover 10min"] {
        assert!(!succeeds(dir.path(), &format!("{run} {flags}")).contains(".detect"), "{flags}");
    }
}

/// The file, which of its faults, and what to do.
#[test]
fn faults_of_a_file_that_cannot_be_are_named() {
    let dir = folder();
    let faults = r#"{"faults": [{"kind": "slow_gpu", "rank": 1, "factor": 2}, {"kind": "dead_plane", "plane": 0}]}"#;
    fs::write(dir.path().join("plane.json"), faults).unwrap();
    fs::write(dir.path().join("rank.json"), faults.replace("\"rank\": 1", "\"rank\": 8")).unwrap();
    let simulated = |flags: &str| said(dir.path(), &format!("simulate --model tiny --gpus 8 {flags}"));
    for (flags, parts) in [
        ("--faults plane.json", ["plane.json: faults[1].plane: plane 0; dgx-h100 is one network", "alibaba-hpn-15k"]),
        ("--faults rank.json", ["rank.json: faults[0].rank: rank 8", "there are ranks 0 to 7"]),
        ("--dead-plane 0", ["faults: plane: plane 0", "leave the fault out"]),
        ("--dead-plane 2 --cluster alibaba-hpn-15k", ["has planes 0 to 1", "take one of them"]),
    ] {
        let (code, _, err) = simulated(flags);
        assert!(code == 2 && parts.iter().all(|part| err.contains(part)), "{flags}: {err}");
    }
    assert_eq!(simulated("--faults plane.json --cluster alibaba-hpn-15k").0, 0);
}

/// Before memory is asked for: each of these ended without an error of the program.
#[test]
fn routes_that_are_too_long_to_draw_are_refused() {
    let dir = folder();
    let mixtral = "estimate --model mixtral-8x7b --gpus 8 --ep 8 --zero 3 --recompute full --seq-len 4096 \
                   --micro-batch 100000 --global-batch 800000 --routing zipf:1.0";
    for line in [
        "dispatch --tokens 100M --routing uniform",
        "dispatch --ep 1000000000 --routing uniform",
        "dispatch --ep 2000000 --experts 2000000 --routing zipf:1",
        "dispatch --experts 2147483648 --routing ragged",
        "dispatch --ep 7 --tokens 2147483648 --routing dirichlet:1e-9",
        "dispatch --tokens 10M --routing ratio:1e9",
        mixtral,
    ] {
        let (code, out, err) = said(dir.path(), line);
        let named = ["routing: ", "do not divide"].iter().any(|word| format!("{out}{err}").contains(word));
        assert!(code == 2 && named, "{line}: {out}{err}");
    }
}
