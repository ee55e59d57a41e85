//! What cannot be is refused: exit code 2, with the value and the remedy, as text and as JSON.

use crate::program::{folder, golden, json_of, model, read, said, shipped, succeeds};
use std::fs;
use std::path::Path;

/// A plan file changed as text.
fn changed_plan(dir: &Path, name: &str, change: impl Fn(String) -> String) {
    let text = fs::read_to_string(dir.join("plan.json")).unwrap();
    fs::write(dir.join(name), change(text)).unwrap();
}

fn plan_hash(dir: &Path) -> String {
    read(&dir.join("plan.json"))["hash"].as_str().unwrap().to_string()
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
    "estimate --options gather-fp8",
    "estimate --gpus 1 --options fp8+gather-fp8",
    "crossover --model deepseek-v3.2",
    "estimate --zero 2 --options all-reduce-grads",
    "estimate --dtype f32 --options bf16-grads",
    "estimate --options recompute-moe",
    "estimate --model mixtral-8x7b --gpus 64 --dispatch nccl --options dispatch-deepep-v2",
    "estimate --model mixtral-8x7b --gpus 64 --dispatch-dtype bf16 --options dispatch-fp8",
    "sweep --model mixtral-8x7b --gpus 64 --replicas 8,16 --options replicas-8 --out both",
    "estimate --zero 1 --options shard-3",
    "estimate --zero 0 --options shard-2",
    "estimate --zero 4",
    // Attention alone.
    "attention --ring 3",
    "attention --ring 8 --seq-len 8",
    "attention --cluster v100-dgx1 --ring 8",
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
    "published --cases facts.json",
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
    fs::write(d.join("facts.json"), r#"{"cases": [{"id": "a", "system": 3}]}"#).unwrap();
    let mut fleet = shipped("models/fleet/llama-3-405b.json");
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
        let object = json_of(d, &format!("{line} --json"), 2);
        assert!(object["error"].as_str().is_some_and(|e| !e.is_empty()), "{line}: {object}");
        all.push_str(&format!("$ foretrain {line}\n{}\n\n", err.trim_end()));
    }
    // The hash depends on every detail of the plan.
    let hash = plan_hash(d);
    golden("errors.txt", &without_hashes(&all.replace(&hash, "HASH")));
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

/// A piece of a network or a loss has a token at least, of those that a rank has.
#[test]
fn more_pieces_than_tokens_are_refused() {
    let dir = folder();
    let line =
        "estimate --model tiny --cluster local-cpu --seq-len 64 --micro-batch 2 --ulysses 2 --global-batch 2 --options";
    for word in ["loss-chunks", "mlp-chunks"] {
        succeeds(dir.path(), &format!("{line} {word}-64"));
        for pieces in [65, u32::MAX] {
            let (code, out, err) = said(dir.path(), &format!("{line} {word}-{pieces}"));
            let why = format!("{word} cuts the 64 tokens of a rank in {pieces} pieces; use 64 or fewer");
            assert!(code == 2 && format!("{out}{err}").contains(&why), "{code}: {out}{err}");
        }
    }
}
