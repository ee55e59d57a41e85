//! What stands for communication's kernels where only one rank is there: see `beside.cu`.

use super::super::source;
use super::{Arg, Launch};

const THREADS: u32 = 512;

/// A copy of `bytes`, a multiple of 128, from read 0 to write 0, by as many blocks of threads as `blocks`.
pub fn few_copy(blocks: u32, bytes: u64) -> Launch {
    let args = vec![Arg::Read(0), Arg::Write(0), Arg::Int(bytes as i64)];
    let (grid, defines) = ([blocks, 1, 1], vec![]);
    Launch { source: source::beside, kernel: "few_copy", defines, grid, threads: THREADS, shared: 0, args }
}
