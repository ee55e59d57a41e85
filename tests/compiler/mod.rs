//! The compiler of what stands for GPUs and for NVIDIA's libraries.

use std::process::Command;
use std::sync::LazyLock;

static FOUND: LazyLock<Option<&str>> = LazyLock::new(|| {
    let works = |name: &&str| Command::new(name).arg("--version").output().is_ok_and(|done| done.status.success());
    ["c++", "g++", "clang++"].into_iter().find(works)
});

/// The C++ compiler of this machine. Without one nothing of CUDA is tested, which must not look like a pass.
pub fn cxx() -> &'static str {
    FOUND.expect("no C++ compiler is here, and what stands for a GPU is made with one; install g++ or clang++")
}
