//! Rows of experts: alone in `dispatch`, and in a step.

use crate::program::{folder, json, json_of, said, succeeds, words};
use foretrain::spec::Dispatch;
use std::fs;

/// Whichever way rows travel, what is not the exchange is the same but for the SMs that it takes: a hundredth of the step.
#[test]
fn a_model_of_experts_is_estimated_in_whatever_way_its_rows_travel() {
    let dir = folder();
    let at = |way: &str| {
        let line = "estimate --model mixtral-8x7b --gpus 64 --ep 8 --seq-len 4096 --recompute full --json --dispatch";
        let found = json(dir.path(), &format!("{line} {way}"));
        let exposed = found["exposed"].as_array().unwrap().iter().find(|waited| waited["name"] == "ep");
        let exchange = exposed.unwrap()["seconds"].as_f64().unwrap();
        (exchange, found["step_time_s"].as_f64().unwrap() - exchange)
    };
    let ways = ["nccl", "allgather", "deepep-v1-normal", "deepep-v2", "hierarchical"].map(at);
    assert!(ways.iter().all(|(_, rest)| (rest / ways[0].1 - 1.0).abs() < 0.015), "{ways:?}");
    // Inside a node there is no hierarchy, and with two experts a token all rows to everyone are too many.
    assert_eq!(ways[4], ways[0]);
    assert!(ways.iter().all(|(exchange, _)| *exchange == ways[1].0 || *exchange < 0.5 * ways[1].0), "{ways:?}");
    let rows =
        succeeds(dir.path(), "sweep --model mixtral-8x7b --gpus 64 --ep 8 --seq-len 4K --recompute full --out moe");
    assert!(rows.contains("that run") && !rows.contains(", 0 that run"), "{rows}");
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

/// Tokens that go to one node each are 1.03 rows of the fullest rank, which the table says: on the mean there is one.
#[test]
fn bytes_of_an_exchange_are_those_of_the_fullest_rank() {
    let dir = folder();
    let line = "dispatch --ep 64 --tokens 4K --node-limit 1";
    let network = &json(dir.path(), &format!("{line} --json"))["dispatch"];
    let rows = network["network"]["logical_bytes"].as_f64().unwrap() / network["row_bytes"].as_f64().unwrap() / 4096.0;
    assert!(rows > 1.0 && rows < 1.1, "{rows}");
    let text = succeeds(dir.path(), line);
    assert!(text.contains("most logical") && text.contains("most real"), "{text}");
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
    let many = "infeasible: dispatch: DeepEP V1 has kernels for 2, 4 or 8 ranks of a node or 2, 3, 4, 6, 8, 12, 16, 18, 20 nodes \
                of 8, not for 256 on 32 nodes of 8; use deepep-v2, hybrid-ep or nccl";
    let wide = "--model deepseek-v3 --cluster dgx-h200 --gpus 2048 --ep 256 --pp 2 --seq-len 4096 --global-batch 4096 \
                --dispatch deepep-v1-normal --recompute full --options uneven";
    for line in ["dispatch --ep 256", &format!("estimate {wide}")] {
        let (_, _, err) = said(dir.path(), line);
        assert!(err.contains(many), "{line}: {err}");
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

/// Two exchanges that were asked of differently are told apart by what they say; bytes that cross have headers.
#[test]
fn an_exchange_says_what_it_was_asked() {
    let dir = folder();
    let line = "dispatch --ep 32 --tokens 512 --dispatch deepep-v1-ll --hook --routing zipf:1.2 --replicas 32 --node-limit 2 \
                --seed 7 --step 3";
    let (found, text) = (json(dir.path(), &format!("{line} --json")), succeeds(dir.path(), line));
    let numbers =
        ["experts", "slots", "replicas", "node_limit", "seed", "step"].map(|name| found[name].as_u64().unwrap());
    assert_eq!(numbers, [256, 288, 32, 2, 7, 3]);
    assert_eq!((found["hook"].as_bool(), found["routing"].as_str()), (Some(true), Some("zipf:1.2")));
    let routed = "\nrouting zipf:1.2, seed 7, step 3, 32 replicas: 288 slots, at most 2 nodes a token\n";
    assert!(text.contains("deepep-v1-ll with the hook of 512 tokens a rank, 8 of 256 experts"), "{text}");
    assert!(text.contains(routed), "{text}");
    let note = found["notes"][0].as_str().unwrap();
    assert!(note.starts_with("dispatch: 512 tokens a rank, where DeepEP's README recommends fewer than 256"), "{note}");
    assert!(note.contains("NVSHMEM_QP_DEPTH is 1026 or more") && text.contains(note), "{note}");
    let pass = &found["dispatch"];
    let rows = ["logical_bytes", "real_bytes"].map(|bytes| pass["network"][bytes].as_f64().unwrap());
    assert_eq!((pass["row_bytes"].as_u64(), pass["wire_row_bytes"].as_u64()), (Some(7392), Some(7408)));
    assert!((rows[0] / 7392.0 / (rows[1] / 7408.0) - 1.0).abs() < 1e-12, "{rows:?}");
    let normal = json(dir.path(), "dispatch --json");
    assert_eq!((normal["dispatch"]["wire_row_bytes"].as_u64(), normal["slots"].as_u64()), (Some(7472), Some(256)));
    assert!(normal["notes"].as_array().unwrap().is_empty() && normal["node_limit"].is_null());
}

/// What DeepEP is not made for, and what carries nothing, is noted of a step, too.
#[test]
fn what_a_dispatch_is_not_made_for_is_noted() {
    let dir = folder();
    let notes = |line: &str| {
        let line = format!("estimate --model qwen3-30b-a3b --gpus 64 --zero 3 --recompute full {line} --json");
        json(dir.path(), &line)["notes"].to_string()
    };
    let many = notes("--ep 32 --dispatch deepep-v1-ll --seq-len 1K");
    assert!(many.contains("dispatch: 1024 tokens a rank, where DeepEP's README recommends fewer than 256"), "{many}");
    assert!(!notes("--ep 32 --dispatch deepep-v1-ll --seq-len 128").contains("README recommends"));
    let idle = notes("--ep 1 --dispatch deepep-v1-normal --routing zipf:1 --seq-len 1K");
    assert!(idle.contains("dispatch: deepep-v1-normal has nothing to carry with ep 1"), "{idle}");
    assert!(idle.contains("With ep 1 no row travels: it changes nothing but how many rows each expert has"), "{idle}");
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
    let half = json_of(dir.path(), &format!("estimate {line} --json"), 2)["notes"][0].to_string();
    assert!(half.contains("rows: 50.0 % of the experts' are dropped"), "{half}");
}

/// Where the CPU posts to its NICs, rows go by what was measured over such; without NVLink they do not go at all.
#[test]
fn deepep_goes_by_the_network_that_there_is() {
    let dir = folder();
    let line = |cluster: &str| format!("dispatch --cluster {cluster} --ep 16 --dispatch deepep-v1-ll --tokens 128");
    let took = |cluster: &str| json(dir.path(), &format!("{} --json", line(cluster)))["dispatch"]["total_s"].as_f64();
    let [verbs, efa] = ["dgx-h100", "h100-8x400-efa"].map(|cluster| took(cluster).unwrap());
    // 5.4 times: a proxy posts the 512 messages that leave the node one after another, each for 1.13 us.
    assert!((5.0..6.0).contains(&(efa / verbs)), "{efa} s over EFA, {verbs} s over InfiniBand");
    let (code, _, err) = said(dir.path(), &line("h100-pcie").replace("--ep 16", "--ep 8"));
    assert!(code == 2 && err.contains("by NVLink"), "{code}, {err}");
}

/// What one flag says and another, or a file, leaves nothing of is refused, and so are rows that are none.
#[test]
fn an_exchange_that_makes_no_sense_is_refused() {
    let dir = folder();
    fs::write(dir.path().join("two.csv"), "source,experts\n0,1 2\n0,3 -1\n1,0 7\n").unwrap();
    fs::write(dir.path().join("twice.csv"), "source,experts\n0,3 3\n").unwrap();
    for (flags, why) in [
        ("--hidden 0", "rows without columns"),
        ("--hidden 18446744073709551615", "--hidden: 18446744073709551615 is wider than any model"),
        ("--hidden 9223372036854775808", "use 1048576 or fewer"),
        ("--tokens 0", "--tokens: 0 a rank are not exchanged; use 1 to 4294967295"),
        ("--tokens 18446744073709551615", "--tokens: 18446744073709551615 a rank are not exchanged"),
        ("--tokens 4294967295 --hidden 1048576 --dispatch deepep-v2", "for a rank to make room for; use fewer tokens"),
        ("--node-limit 4294967295", "--node-limit: 4294967295 of 4 nodes; use 1 to 4"),
        ("--ep 8 --node-limit 2", "--node-limit: 2 of 1 nodes"),
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
        ("--ep 64 --cluster gb200-nvl72", "not for 64 on one; use deepep-v2, hybrid-ep or nccl"),
        ("--ep 16 --cluster alps-gh200", "not for 16 on 4 nodes of 4"),
        ("--ep 5 --experts 255", "has kernels for 2, 4 or 8 ranks of a node or 2, 3, 4,"),
        ("--topk 33", "at most 32 choices of a token, not 33; use nccl"),
        ("--hidden 7100", "hidden 7100 is no multiple of 16"),
        ("--ep 8 --dispatch deepep-v1-ll --tokens 128 --hook", "leave the hook out"),
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
