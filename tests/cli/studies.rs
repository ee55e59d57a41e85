//! Studies of many points: written, drawn, gone on with where they stopped, and not mixed with others.

use crate::program::{folder, golden, json, said, shipped, succeeds};
use std::fs;
use std::path::Path;

const SMALL: &str = "sweep --model tiny --gpus 8 --seq-len 1K,2K,3K --tokens-per-step 16K --ulysses 1,4,16 --ring 1,2";

pub fn columns(dir: &Path) -> Vec<String> {
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

/// What a search says that ranks take which share a NIC is what simulate says, and a note tells that it is another answer.
#[test]
fn a_search_simulates_its_best_at_last() {
    let dir = folder();
    let mut cluster = shipped("models/cluster/dgx-h100.json");
    let out = cluster["scale_out"].as_object_mut().unwrap();
    out.remove("several");
    out.insert("nics_per_node".into(), 1.into());
    for (rate, value) in [("raw", "8 GB/s"), ("achieved", "7.52 GB/s"), ("p2p", "7.2 GB/s")] {
        out[rate]["value"] = value.into();
    }
    fs::write(dir.path().join("one-nic.json"), cluster.to_string()).unwrap();
    let flags =
        "--cluster one-nic.json --gpus 32 --global-batch 64 --tp 2 --pp 4 --vp 2 --micro-batch 1 --recompute full";
    let line = format!("search {flags} --ulysses 1 --ring 1 --zero 1 --schedules interleaved");
    let found = json(dir.path(), &format!("{line} --json"));
    let best = &found["found"][0]["best"][0];
    let [walked, simulated] = ["step_time_s", "simulated_s"].map(|key| best[key].as_f64().unwrap());
    assert!(simulated > 1.05 * walked, "{best}");
    let way = format!("{flags} --options {}", best["options"].as_str().unwrap());
    let alone = json(dir.path(), &format!("simulate {way} --json"))["step_time_s"].as_f64().unwrap();
    assert!((alone / simulated - 1.0).abs() < 1e-9, "{alone} {simulated}");
    let text = succeeds(dir.path(), &line);
    for part in ["simulated", "of the fastest at 8 K x 64: simulated, the best takes ", "most on NIC 0 "] {
        assert!(text.contains(part), "{text}");
    }
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
    for file in ["study.json", "rows.csv", "refined.csv", "numerics.csv", "simulated.csv", "choices.svg", "choices.png"]
    {
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
