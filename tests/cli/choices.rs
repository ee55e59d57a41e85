//! What is not said is chosen in the open, and what is said is kept to.

use crate::program::{folder, json, json_of, said, succeeds};
use serde_json::Value;

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
        let asked = json_of(dir.path(), &format!("estimate {said} --json"), 2);
        assert_eq!(asked["feasible"], false, "{said}");
    }
    let large = json(dir.path(), "estimate --model llama-3-70b --json");
    assert_eq!(large["feasible"], true, "{}", large["why"]);
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

/// Room that is asked for is left, by ways that may be slower for it; and how sure peaks are is said.
#[test]
fn a_search_leaves_the_room_that_it_is_asked_for() {
    let dir = folder();
    let best = |flags: &str| {
        let line = format!("search --model llama-3-70b --gpus 64 --tp 8 --best 1 --json {flags}");
        let found = json(dir.path(), &line);
        assert!(!found["memory_record"].as_array().unwrap().is_empty());
        let row = &found["found"][0]["best"][0];
        ["peak_mem_bytes", "mem_room_bytes", "step_time_s"].map(|key| row[key].as_f64().unwrap())
    };
    let [_, all, fastest] = best("");
    let [peak, room, step] = best("--headroom 30");
    let gpu = all + 4.0 * (1u64 << 30) as f64;
    assert!((all - room - 0.3 * gpu).abs() < 0.01 * gpu, "{all} {room}");
    assert!(peak <= room && step >= fastest, "{peak} {room} {step} {fastest}");
}

/// The words that are tried on the best way leave the stage of ZeRO as it is.
#[test]
fn a_search_keeps_to_the_stage_of_zero_that_is_said() {
    let dir = folder();
    let line = "search --gpus 8 --seq-len 8K --global-batch 8 --zero 1 --tp 2 --micro-batch 2 --best 1 --json";
    let found = json(dir.path(), line);
    let rows = ["best", "refined"].map(|rows| found["found"][0][rows].as_array().unwrap());
    let rows: Vec<&Value> = rows.into_iter().flatten().collect();
    assert!(!rows.is_empty() && rows.iter().all(|row| row["zero"] == 1), "{found}");
}

#[test]
fn numbers_that_do_not_come_out_or_no_gpu_has_are_refused() {
    let dir = folder();
    for (line, parts) in [
        ("search --gpus 8 --tokens-per-step 12K --seq-len 8K", ["12288", "e.g. 16384"]),
        ("dispatch --ep 64 --dispatch deepep-v2 --sms 1000", ["--sms: 1000", "132"]),
        ("dispatch --ep 64 --dispatch hybrid-ep --sms 0", ["--sms: 0", "132"]),
    ] {
        let (code, _, err) = said(dir.path(), line);
        assert!(code == 2 && parts.iter().all(|part| err.contains(part)), "{line}: {err}");
    }
}

#[test]
fn failures_that_leave_no_end_in_sight_are_not_waited_for() {
    let dir = folder();
    let out = said(dir.path(), "goodput --gpus 1024 --step-time 5s --state 1TB --mtbf 1ms");
    assert!(format!("{}{}", out.1, out.2).contains("no end"), "{out:?}");
    // Who saves as often as the store lets him cannot save more often.
    let slow = "goodput --gpus 1024 --step-time 5s --state 1TB --mtbf 7.9h --recover 10min --store-rate 1MB/s";
    let (code, _, err) = said(dir.path(), slow);
    assert!(code == 2 && err.contains("--store-rate (") && !err.contains("more often"), "{code}: {err}");
    assert!(!err.contains("recover faster"), "{err}");
}
