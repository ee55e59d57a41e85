//! cuDNN without a GPU: the true library is told of GPUs that are not there, finds engines for our graphs, compiles their
//! kernels and says what memory they work in. So that it takes them is known; what they compute is not.
//!
//! Wants libcudnn.so.9 and NVRTC (NVIDIA's wheels nvidia-cudnn-cu13, of 350 MB, and nvidia-cuda-nvrtc) where the program
//! finds them, a C compiler, and FORETRAIN_CUDNN=1: with it, what is missing is a failure and no reason to skip.

use foretrain::exec::cuda::cudnn::Cudnn;
use foretrain::exec::cuda::fused::{Fused, Pass, Sdpa};
use foretrain::exec::cuda::lower::{Action, MOST_SHARED, Where, lower};
use foretrain::exec::cuda::selftest::cases;
use foretrain::spec::Factor;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Properties as cuDNN writes them of a GPU (CUDA C++ Programming Guide, "Compute Capabilities"; NVIDIA's data sheets).
fn properties(name: &str, version: u64, sms: u64, shared: u64, l2_mib: u64, threads: u64) -> Value {
    json!({
        "maxGridSize": [2147483647u64, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
        "multiProcessorCount": sms, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": shared << 10, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
        "maxCtasPerSM": threads / 64, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": threads, "pciDeviceId": 0,
        "isTccDriver": 0, "supportCoopLaunch": 1, "totalGlobalMem": 80u64 << 30, "smClockRateKHz": 1980000,
        "memClockRateKHz": 2619000, "l2CacheSize": l2_mib << 20, "cudaDeviceId": 0, "deviceVer": version,
        "driverVer": 13000, "deviceName": name
    })
}

const HOPPER: u64 = 900;

fn gpus() -> [Value; 4] {
    [
        properties("NVIDIA H100 80GB HBM3", HOPPER, 132, 227, 50, 2048),
        properties("NVIDIA A100-SXM4-80GB", 800, 108, 163, 40, 2048),
        properties("NVIDIA L40S", 890, 142, 99, 96, 1536),
        properties("NVIDIA B200", 1000, 148, 227, 126, 2048),
    ]
}

fn sdpa(heads: [u64; 2], rows: [u64; 2], [head_dim, v_dim]: [u64; 2], diagonal: Option<u64>) -> Sdpa {
    let scale = Factor(1.0 / (head_dim as f64).sqrt());
    Sdpa { pass: Pass::Forward, batch: 2, heads, rows, pitch: rows.map(|r| r + 64), head_dim, v_dim, scale, diagonal }
}

/// What plans ask for: causal, full, behind a diagonal as in a zigzag ring, rectangular, odd; groups of heads; narrow values.
fn asked() -> Vec<Sdpa> {
    let (d128, d64) = ([128, 128], [64, 64]);
    vec![
        sdpa([32, 8], [16384, 16384], d128, Some(0)),
        sdpa([32, 8], [16384, 16384], d128, None),
        sdpa([8, 8], [4096, 8192], d128, Some(4096)),
        sdpa([8, 2], [2048, 4096], d128, None),
        sdpa([8, 2], [4095, 4096], d128, Some(1)),
        sdpa([16, 16], [1000, 777], d64, Some(0)),
        sdpa([64, 64], [4096, 4096], d64, Some(0)),
        sdpa([4, 2], [150, 150], [32, 32], Some(0)),
        sdpa([4, 2], [150, 150], [96, 96], Some(0)),
        sdpa([128, 128], [4096, 4096], [192, 128], Some(0)),
    ]
}

/// What `selftest --on cuda --attention cudnn` asks for, the oddest shapes of all.
fn lowers_every_case(cudnn: &Cudnn) {
    let (mut fused, mut all) = (0, 0);
    for case in cases::groups().filter(|group| group.starts_with("attention")).flat_map(cases::of_group) {
        let reads: Vec<_> = case.reads.iter().map(|read| read.0).collect();
        for rank in 0..case.views[0].size() {
            let (views, route) = (&case.views[..], case.route.as_ref());
            let on = Where { views, route, rank, shared: MOST_SHARED, fused: Some(cudnn) };
            let lowered = lower(&case.kernel, on, &reads, &case.writes, 1).unwrap();
            fused += usize::from(lowered.actions.iter().any(|action| matches!(action, Action::Fused { .. })));
            all += 1;
        }
    }
    println!("{}: {fused} of {all} cases", cudnn.name());
    assert!(fused > 40, "{fused} of {all} cases");
}

#[test]
#[ignore = "run by the other test, where the libraries that stand for the driver are"]
fn there() {
    for gpu in gpus() {
        let (name, hopper) = (gpu["deviceName"].as_str().unwrap(), gpu["deviceVer"] == HOPPER);
        let cudnn = Cudnn::without_gpu(&gpu.to_string(), false).unwrap();
        for forward in asked() {
            let backward = Sdpa { pass: Pass::Backward, ..forward.clone() };
            for sdpa in [forward, backward] {
                let workspace = cudnn.workspace(&sdpa).unwrap();
                println!("{name}: {sdpa:?}: {workspace:?}");
                // Heads wider than 128 have a backward pass on Hopper, and on Blackwell where values have 128.
                let narrow = sdpa.head_dim <= 128 || sdpa.pass == Pass::Forward;
                assert!(workspace.is_some() || !(narrow || hopper), "{name} has no plan for {sdpa:?}");
            }
        }
        // What no engine takes is none, and no failure.
        assert_eq!(cudnn.workspace(&sdpa([4, 4], [64, 64], [20, 20], None)).unwrap(), None);
        let strict = Cudnn::without_gpu(&gpu.to_string(), true).unwrap();
        let why = strict.workspace(&sdpa([4, 4], [64, 64], [20, 20], None)).unwrap_err().to_string();
        assert!(why.contains("head_dim: 20") && why.contains("--attention own"), "{why}");
        if hopper {
            lowers_every_case(&strict);
        }
    }
}

fn stand_in(folder: &Path, name: &str) {
    let source: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "cuda_fake", "no_gpu.c"].iter().collect();
    let (soname, to) = (format!("-Wl,-soname,{name}"), folder.join(name));
    let done = Command::new("cc").args(["-w", "-shared", "-fPIC", &soname, "-o"]).arg(to).arg(source).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn every_graph_has_a_plan_on_every_gpu() {
    if std::env::var_os("FORETRAIN_CUDNN").is_none() {
        eprintln!("skipped: FORETRAIN_CUDNN=1 has cuDNN plan for GPUs that are not here");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["libcuda.so.1", "libcublasLt.so.13"] {
        stand_in(folder.path(), name);
    }
    let mut path = folder.path().as_os_str().to_owned();
    if let Some(more) = std::env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(more);
    }
    let done = Command::new(std::env::current_exe().unwrap())
        .args(["there", "--exact", "--ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", path)
        .output()
        .unwrap();
    let said = [done.stdout, done.stderr].map(|out| String::from_utf8_lossy(&out).into_owned()).concat();
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
    println!("{said}");
}
