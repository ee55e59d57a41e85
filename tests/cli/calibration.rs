//! `calibrate`: from logs of nccl-tests, and from plans.

use crate::program::{folder, json, said, succeeds, words};
use std::fs;

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
        (&[(mib, "20.0"), (2 * mib, "20.2")], ["fitted at 9175 GB/s of bus bandwidth", "measure larger sizes"]),
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
    // 470 GB/s of bus bandwidth are more than links of an A100 carry both ways together, and 1042 than those of an H100.
    let (code, _, err) = fitted(&good, "--gpus 8 --cluster dgx-a100");
    assert!(code == 2 && err.contains("470 GB/s of bus bandwidth, which links of dgx-a100"), "{err}");
    let (code, _, err) = fitted(&[(mib, "32.0"), (gib, "1803")], "--gpus 8");
    assert!(code == 2 && err.contains("line 2: ") && err.contains("name another --cluster"), "{err}");
}

/// A log of H100 was taken for what A100 have.
#[test]
fn logs_of_other_gpus_are_refused() {
    let dir = folder();
    let listed = |device: &str| {
        let rank = |n: u32| format!("#  Rank {n:2} Group  0 Pid 9 on node-a device {n:2} [0x1b] {device}\n");
        let rows = "1048576 262144 float sum -1 40.0 0.1 0.1 0\n67108864 16777216 float sum -1 700 0.1 0.1 0\n";
        fs::write(dir.path().join("all_reduce.log"), (0..8).map(rank).collect::<String>() + rows).unwrap();
        said(dir.path(), "calibrate --from-nccl-tests all_reduce.log --cluster dgx-a100")
    };
    let (code, _, err) = listed("NVIDIA H100 80GB HBM3");
    let parts = ["all_reduce.log: devices", "lists NVIDIA H100 80GB HBM3", "dgx-a100 has a100-sxm4-80gb", "--cluster"];
    assert!(code == 2 && parts.iter().all(|part| err.contains(part)), "{err}");
    assert_eq!([listed("NVIDIA A100-SXM4-40GB").0, listed("some GPU of tomorrow").0, listed("").0], [0; 3]);
}

/// Of what was measured both columns are, as `simulate` plays it.
#[test]
fn measured_collectives_are_played_as_they_are() {
    let dir = folder();
    // By switches that add up: more than a ring on the links would have.
    let rows: String = [("8388608", "73"), ("67108864", "300"), ("1073741824", "4167")]
        .map(|(bytes, us)| format!("{bytes} 1 float sum -1 {us} 0.1 0.1 0\n"))
        .concat();
    fs::write(dir.path().join("all_reduce.log"), rows).unwrap();
    succeeds(dir.path(), "calibrate --from-nccl-tests all_reduce.log --gpus 8 --nodes 1 --out mine.json");
    let row = |op: &str, cluster: &str| {
        let table = json(dir.path(), &format!("collective --op {op} --gpus 8 --bytes 8m --cluster {cluster} --json"));
        ["time_us", "simulated_us"].map(|field| table["rows"][0][field].as_f64().unwrap())
    };
    let [time, simulated] = row("all_reduce", "mine.json");
    assert!((simulated / time - 1.0).abs() < 1e-9 && (time / 73.0 - 1.0).abs() < 0.2, "{time} {simulated}");
    assert_eq!(row("all_gather", "mine.json"), row("all_gather", "dgx-h100"));
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

/// Before a GPU is asked for.
#[test]
fn plans_that_a_gpu_cannot_be_calibrated_with_are_named() {
    let dir = folder();
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
