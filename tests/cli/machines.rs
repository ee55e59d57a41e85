//! Files of clusters and stacks: those that are shipped, and those that no machine can have.

use crate::program::{folder, json, said, shipped, succeeds};
use serde_json::Value;
use std::fs;
use std::path::Path;

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

/// What no machine has is refused where its file is read, or where a stack meets a GPU.
#[test]
fn machines_that_cannot_be_are_refused() {
    let dir = folder();
    let edited = |kind: &str, name: &str, field: &str, value: Value| {
        let mut file = shipped(&format!("models/{kind}/{name}.json"));
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
        edited("stack", "nccl-fa3", &format!("/{field}/value"), 0.into());
        let (code, _, err) = said(dir.path(), "estimate --gpus 8 --tp 8 --stack ./mine.json");
        assert!(code == 2 && err.contains(&format!("mine.json: {field}: 0")), "{code}, {err}");
        edited("stack", "nccl-fa3", &format!("/{field}/value"), 132.into());
        succeeds(dir.path(), "collective --stack ./mine.json --bytes 1m");
    }
}

/// Rings of NCCL were timed on AMD's GPUs, and what no framework fuses was misspelt without a word.
#[test]
fn stacks_are_for_their_maker_and_of_kernels_that_are() {
    let dir = folder();
    for (line, cluster, stack, gpu) in [
        ("collective", "mi355x-8x400", "nccl-fa2", "mi355x, which is of maker amd"),
        ("dispatch --ep 8", "mi300x-8x400", "nccl-fa2", "mi300x, which is of maker amd"),
        ("collective", "dgx-h100", "rccl-fa2", "h100-sxm5, which is of maker nvidia"),
        ("estimate --gpus 8", "mi300x-8x400", "nccl-fa2", "mi300x, which is of maker amd"),
    ] {
        let (code, _, err) = said(dir.path(), &format!("{line} --cluster {cluster} --stack {stack}"));
        let why = format!("its libraries are not for {gpu}; leave --stack out for what fits");
        assert!(code == 2 && err.contains(&format!("stack/{stack}: maker: ")) && err.contains(&why), "{line}: {err}");
    }
    let mut stack = shipped("models/stack/torch-eager.json");
    stack["unfused"]["value"]["norm_bdw"] = 3.0.into();
    fs::write(dir.path().join("mine.json"), stack.to_string()).unwrap();
    let (code, _, err) = said(dir.path(), "estimate --gpus 8 --tp 8 --stack ./mine.json");
    let why = "mine.json: unfused: norm_bdw: no kernel has a curve of this name (did you mean norm_bwd?)";
    assert!(code == 2 && err.contains(why), "{code}, {err}");
}

/// 4,096 GPUs of a cluster of 2,048 were costed without a word.
#[test]
fn more_gpus_than_the_file_has_are_told_of() {
    let dir = folder();
    let way = "--cluster dgx-h100 --seq-len 2K";
    let one = "--tp 1 --pp 1 --ulysses 1 --ring 1 --zero 3 --recompute full";
    let note = "cluster: dgx-h100 has 64 GPUs by its file; for 128 its network is taken to go on as it is\n";
    for command in [
        format!("estimate {one}"),
        format!("plan {one}"),
        format!("simulate {one}"),
        format!("goodput {one}"),
        format!("sweep {one} --fresh --out swept"),
        format!("search {one} --micro-batch 1 --best 1"),
        "longest --ring 1 --ulysses 1 --zero 3 --options default --fresh --out longest".into(),
    ] {
        let way = if command.starts_with("longest") { "--cluster dgx-h100" } else { way };
        let said = |gpus: &str| succeeds(dir.path(), &format!("{command} {way} --gpus {gpus}"));
        assert!(said("128").contains(note), "{command}: {}", said("128"));
        assert!(!said("64").contains("by its file"), "{command}");
    }
}

/// In nodes of twelve no other number of GPUs helps, and of the best way of a search nothing was said.
#[test]
fn groups_that_lie_across_nodes_are_told_of() {
    let dir = folder();
    let mut file = shipped("models/cluster/dgx-h100.json");
    file["gpus_per_node"] = 12.into();
    file["scale_out"]["nics_per_node"] = 12.into();
    file["name"] = "twelve".into();
    fs::write(dir.path().join("twelve.json"), file.to_string()).unwrap();
    let way = "--model qwen3-30b-a3b --seq-len 4K --zero 1 --recompute full --tp 1 --pp 1 --ulysses 1 --ring 1";
    let across = |gpus: u32, ranks: u32| {
        format!("ep: of {gpus} GPUs used of each node some groups of {ranks} ranks lie across two, and all wait")
    };
    for (cluster, ranks, note, remedy) in [
        ("./twelve.json --gpus 96", 8, across(12, 8), "; with ep a divisor of 12 none does"),
        ("gb200-nvl72 --gpus 144", 16, across(72, 16), "; with --gpus 128 none does"),
    ] {
        let line = format!("{way} --cluster {cluster} --ep {ranks}");
        let estimate = succeeds(dir.path(), &format!("estimate {line}"));
        assert!(estimate.contains(&format!("note: {note}")) && estimate.contains(remedy), "{estimate}");
        let search = succeeds(dir.path(), &format!("search {line} --global-batch 288 --micro-batch 1 --best 1"));
        let note = format!("of the fastest at 4 K x 288: {note}");
        assert!(search.contains(&note) && search.contains(remedy), "{search}");
    }
    let inside = succeeds(
        dir.path(),
        &format!("search {way} --cluster ./twelve.json --gpus 96 --ep 4 --global-batch 288 --best 1"),
    );
    assert!(!inside.contains("lie across"), "{inside}");
}

/// Four A100 with four links to each other one became a switch of twelve: two of them sent each other all that a GPU has.
#[test]
fn links_of_pairs_are_no_switch() {
    let dir = folder();
    let matrix =
        "GPU0 GPU1 GPU2 GPU3\nGPU0 X NV4 NV4 NV4\nGPU1 NV4 X NV4 NV4\nGPU2 NV4 NV4 X NV4\nGPU3 NV4 NV4 NV4 X\n";
    fs::write(dir.path().join("topo.txt"), matrix).unwrap();
    let xml = |at: u32| {
        let link = |to: u32| format!("<nvlink target=\"{to}\" count=\"4\" tclass=\"0x030200\"/>");
        let links = (0..4).filter(|to| *to != at).map(link).collect::<String>();
        format!("<pci busid=\"{at}\"><gpu dev=\"{at}\" sm=\"80\">{links}</gpu></pci>")
    };
    let gpus = (0..4).map(xml).collect::<String>();
    fs::write(dir.path().join("topo.xml"), format!("<system><cpu>{gpus}</cpu></system>")).unwrap();
    for from in ["--from-nvidia-smi topo.txt --like dgx-a100", "--from-nccl-topo topo.xml"] {
        let said = succeeds(dir.path(), &format!("cluster {from} --out four.json"));
        let note =
            "note: no switch: links lead from GPU to GPU, 4 to each other one, and a GPU is taken to send 65 GB/s";
        assert!(said.contains(note) && said.contains("; 65 GB/s to each peer"), "{said}");
        let rate = |op: &str, gpus: u32| {
            let line = format!("collective --op {op} --gpus {gpus} --bytes 1g --cluster four.json --json");
            json(dir.path(), &line)["rows"][0]["busbw"].as_f64().unwrap()
        };
        let [send, two, four] = [rate("sendrecv", 2), rate("all_reduce", 2), rate("all_reduce", 4)];
        assert!((60.0..66.0).contains(&send) && (60.0..74.0).contains(&two) && four > 200.0, "{send} {two} {four}");
    }
}
