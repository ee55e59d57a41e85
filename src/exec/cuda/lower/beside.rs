//! What stands for communication where only one rank is there: see `beside.cu`.

use super::super::source;
use super::{Arg, Launch};

const THREADS: u32 = 512;

/// A wait of so many seconds.
pub fn wait(seconds: f64) -> Launch {
    let args = vec![Arg::Int((seconds * 1e9).round() as i64)];
    launch("wait", 1, args)
}

/// A copy of `bytes`, a multiple of 128, by `blocks` of threads: of read 0 to write 0.
pub fn few_copy(blocks: u32, bytes: u64) -> Launch {
    launch("few_copy", blocks, vec![Arg::Read(0), Arg::Write(0), Arg::Int(bytes as i64)])
}

fn launch(kernel: &'static str, blocks: u32, args: Vec<Arg>) -> Launch {
    Launch { source: source::beside, kernel, defines: vec![], grid: [blocks, 1, 1], threads: THREADS, shared: 0, args }
}
