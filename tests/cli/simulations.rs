//! `simulate`: links that are slow or shared, blocks that were measured, and faults.

use crate::program::{folder, json, read, said, shipped, succeeds};
use serde_json::Value;
use std::fs;

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
        let mut faster = shipped(&format!("models/cluster/{cluster}.json"));
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

/// Of NCCL's all-to-all the NICs are what takes longest: half as fast they make the step 1.29 times as long, and links inside
/// nodes, which have room to spare beside them, a fortieth of that longer.
#[test]
fn a_slow_link_inside_a_node_costs_less_than_a_slow_nic() {
    let dir = folder();
    let line = "simulate --model qwen3-30b-a3b --gpus 16 --ep 16 --seq-len 4096 --dispatch nccl --zero 3 --json";
    let step = |fault: &str| json(dir.path(), &format!("{line} {fault}"))["step_time_s"].as_f64().unwrap();
    let [well, nic, inside, hardly] =
        ["", "--slow-link 3:0.5", "--slow-link 3:nvlink:0.5", "--slow-link 3:nvlink:0.95"].map(step);
    assert!(nic > 1.25 * well && inside - well < 0.05 * (nic - well), "{well}, {nic}, {inside}");
    assert!(hardly < 1.001 * well, "{well}, {hardly}");
}

/// The two channels of a send fill less than half of a NIC, and a tenth of NVLink: whichever is slower by less than that
/// costs next to nothing (the gathers of weights fill a NIC: 0.013), as on a cluster whose links are all so. A NIC with a tenth
/// of its rate sends four times as long or more, which is most of this step.
#[test]
fn a_send_has_room_on_its_link() {
    let dir = folder();
    let line = "simulate --model llama-3-8b --gpus 16 --seq-len 128K --ring 16 --zero 3 --recompute full --json";
    let step = |fault: &str| json(dir.path(), &format!("{line} {fault}"))["step_time_s"].as_f64().unwrap();
    let [well, room, slow] = ["", "--slow-link 7:0.5", "--slow-link 7:0.1"].map(step);
    assert!(room < 1.02 * well && slow > 3.0 * well, "{well}, {room}, {slow}");
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
    let mut blocks = read(&dir.path().join("blocks.json"));
    for block in blocks["blocks"].as_array_mut().unwrap() {
        block.as_object_mut().unwrap().remove("predicted_s").unwrap();
    }
    fs::write(dir.path().join("blocks.json"), blocks.to_string()).unwrap();
    assert_eq!(played(&format!("{line} 32K")).0, 0);
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

/// The NIC is up for longer than a step takes: the step feels nothing, and the run is a tenth and more slower.
#[test]
fn a_run_feels_a_flapping_nic_that_its_first_step_does_not() {
    let dir = folder();
    let of = |flags: &str| json(dir.path(), &format!("simulate --gpus 64 --json {flags}"));
    let (well, flaps) = (of(""), of("--flap 0:10:3"));
    let number = |found: &Value, key: &str| found[key].as_f64().unwrap();
    assert!((number(&flaps, "step_time_s") / number(&well, "step_time_s") - 1.0).abs() < 1e-9);
    let slower = number(&flaps, "run_step_s") / number(&well, "step_time_s");
    // All that it can lose are three seconds of every thirteen.
    assert!((1.1..1.31).contains(&slower), "{slower}");
    assert!(flaps["notes"].to_string().contains("over a run, a step takes"), "{}", flaps["notes"]);
    assert!(well.get("run_step_s").is_none());
    // A step that begins with the NIC down waits for it.
    let faults =
        r#"{"faults": [{"kind": "flapping", "rank": 0, "port": "nic", "up_s": 10, "down_s": 3, "over_s": 10}]}"#;
    fs::write(dir.path().join("down.json"), faults).unwrap();
    assert!(number(&of("--faults down.json"), "step_time_s") > 3.0);
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
