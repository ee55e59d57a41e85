//! What is left of a selftest when a kernel has broken the GPU's context, done by processes of their own: by the CUDA Driver
//! API (CUDA_ERROR_ILLEGAL_ADDRESS) a process has to be started again before it can do anything with a GPU.

use crate::exec::cuda::fused::Attention;
use crate::exec::cuda::selftest::Verdict;
use serde::Deserialize;
use std::process::Command;

/// Cases that were not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    pub group: String,
    /// Cases of the group that were.
    pub skip: usize,
}

/// How this process was asked to test.
pub struct Asked {
    pub device: u32,
    pub attention: Attention,
    pub seed: u64,
}

/// What other processes found.
#[derive(Default, Deserialize)]
pub struct Said {
    #[serde(default)]
    pub verdicts: Vec<Verdict>,
    /// Kernels that the GPU does not have, and why.
    #[serde(default)]
    pub not_here: Vec<String>,
    /// Cases of the group that were done before one broke that process's context, too.
    stopped_after: Option<usize>,
    error: Option<String>,
}

/// Runs what is left, one group a process, and as many more as break.
pub fn go_on(left: Vec<Left>, asked: &Asked) -> Said {
    let mut all = Said::default();
    for Left { group, mut skip } in left {
        loop {
            let said = process(&group, skip, asked);
            let nothing = said.verdicts.is_empty() && said.not_here.is_empty();
            all.verdicts.extend(said.verdicts);
            all.not_here.extend(said.not_here);
            match said.stopped_after {
                Some(done) if done > skip => skip = done,
                _ if nothing => {
                    let why = said.error.unwrap_or_else(|| "it said nothing".into());
                    all.verdicts.push(unknown(&group, format!("a process of its own: {why}")));
                    break;
                }
                _ => break,
            }
        }
    }
    all
}

/// A group of which nothing is known but that it was not well.
fn unknown(group: &str, why: String) -> Verdict {
    let (group, kernel) = (group.into(), "?".into());
    Verdict { group, kernel, rank: 0, error: None, tolerance: 0.0, seconds: 0.0, wrong: Some(why) }
}

fn process(group: &str, skip: usize, asked: &Asked) -> Said {
    let failed = |why: String| Said { error: Some(why), ..Said::default() };
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(e) => return failed(format!("the program does not know where it is: {e}")),
    };
    let mut command = Command::new(program);
    command.args(["selftest", "--on", "cuda", "--json", "--group", group, "--attention", asked.attention.word()]);
    command.args(["--device", &asked.device.to_string(), "--seed", &asked.seed.to_string()]);
    let done = match command.args(["--skip", &skip.to_string()]).output() {
        Ok(done) => done,
        Err(e) => return failed(e.to_string()),
    };
    serde_json::from_slice(&done.stdout).unwrap_or_else(|_| {
        let last = String::from_utf8_lossy(&done.stderr).lines().last().unwrap_or_default().to_string();
        failed(format!("{}, {last}", done.status))
    })
}
