//! Libraries that stand for NVIDIA's by their names, and the program run with them: the calls themselves, which a double of
//! the device is above.

#[path = "../compiler/mod.rs"]
mod compiler;

use compiler::cxx;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// The folder of the libraries, made once.
static MADE: LazyLock<PathBuf> = LazyLock::new(|| {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_fake");
    std::fs::create_dir_all(&folder).unwrap();
    for (source, name) in [
        ("cuda.cpp", "libcuda.so.1"),
        ("nvrtc.cpp", "libnvrtc.so.13"),
        ("cublaslt.cpp", "libcublasLt.so.13"),
        ("cudnn.cpp", "libcudnn.so.9"),
        ("nccl.cpp", "libnccl.so.2"),
    ] {
        let mut command = Command::new(cxx());
        command.args(["-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"]);
        command.arg(here().join(source)).arg(format!("-Wl,-soname,{name}"));
        if name.starts_with("libcublas") || name.starts_with("libcudnn") {
            command.arg(folder.join("libcuda.so.1"));
        }
        let part = folder.join(format!("{name}.part{}", std::process::id()));
        let done = command.arg("-ldl").arg("-o").arg(&part).output().unwrap();
        assert!(done.status.success(), "{source}: {}", String::from_utf8_lossy(&done.stderr));
        std::fs::rename(part, folder.join(name)).unwrap();
    }
    folder
});

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda_fake")
}

/// How a run of the program ended.
pub struct Ended {
    pub code: Option<i32>,
    pub said: String,
    /// What the libraries saw that CUDA leaves undefined, or that was not given back.
    pub faults: Vec<String>,
}

/// Runs the program where the fake libraries are NVIDIA's.
pub fn foretrain(words: &str, variables: &[(&str, &str)]) -> Ended {
    // Before the folder, so that every test says what is missing.
    let (compiler, folder) = (cxx(), &*MADE);
    let own = tempfile::tempdir().unwrap();
    let faults = own.path().join("faults");
    let done = Command::new(env!("CARGO_BIN_EXE_foretrain"))
        .args(words.split_whitespace())
        .env("LD_LIBRARY_PATH", folder)
        .env("FAKE_CUDA_HERE", here())
        .env("FAKE_CUDA_CACHE", folder)
        .env("FAKE_CUDA_CXX", compiler)
        .env("FAKE_CUDA_FAULTS", &faults)
        .env("FORETRAIN_CACHE", own.path().join("kernels"))
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let said = [done.stdout, done.stderr].map(|out| String::from_utf8_lossy(&out).into_owned()).concat();
    let faults = std::fs::read_to_string(faults).unwrap_or_default().lines().map(String::from).collect();
    Ended { code: done.status.code(), said, faults }
}
