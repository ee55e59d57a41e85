//! Races between the threads of a block: each kernel once, by an emulator whose threads ThreadSanitizer takes for threads.
//! What two of them do to one address in shared or global memory without a barrier between is found in whatever order
//! they came; what two blocks do is not. Skipped with a word where ThreadSanitizer does not run; all kernels, which take
//! three minutes, are searched where `FORETRAIN_RACES` is set, after a kernel was changed, and there it has to run.

mod cuda_double;
mod cuda_emulator;

use cuda_double::Double;
use foretrain::exec::cuda::device::{Device, Size};
use foretrain::exec::cuda::lower::{Launch, MOST_SHARED};
use foretrain::exec::cuda::selftest::{cases, check};
use foretrain::exec::cuda::source::Source;
use std::sync::atomic::Ordering;

/// Every thread gives another its number by shared memory.
const PLANTED: Source = Source {
    name: "planted.cu",
    text: "#include \"common.cuh\"
struct Planted { float* to; i64 guarded; };
KERNEL(planted, Planted, 64) {
    SHARED(memory);
    float* own = reinterpret_cast<float*>(memory);
    own[threadIdx.x] = float(threadIdx.x);
    if (p.guarded || blockIdx.x == 0) __syncthreads();
    p.to[64 * blockIdx.x + threadIdx.x] = own[63 - threadIdx.x];
}",
};

#[test]
fn a_planted_race_is_found_in_any_block() {
    if !cuda_emulator::finds_races() {
        return;
    }
    cuda_emulator::RACES.store(true, Ordering::Relaxed);
    for guarded in [1, 0] {
        let mut double = Double::new(1, 1 << 30, 1);
        let (source, grid, shared) = (PLANTED, [2, 1, 1], 256);
        let launch = Launch { source, kernel: "planted", defines: vec![], grid, threads: 64, shared, args: vec![] };
        let function = double.load(0, &launch).unwrap();
        let (at, stream) = (double.allocate(0, 512).unwrap(), double.stream(0).unwrap());
        double.launch(stream, function, Size { grid, threads: 64, shared }, &[at, guarded]).unwrap();
        match double.synchronize() {
            Ok(()) => assert_eq!(guarded, 1, "the race is not found"),
            Err(error) => assert!(guarded == 0 && error.to_string().contains("data race"), "{error}"),
        }
    }
}

/// One case of each kernel: the rest differ in numbers, not in what a kernel does when.
#[test]
fn no_kernel_has_a_race() {
    if std::env::var_os("FORETRAIN_RACES").is_none() {
        eprintln!("skipped: set FORETRAIN_RACES=1 to search all kernels for races");
        return;
    }
    assert!(cuda_emulator::finds_races(), "FORETRAIN_RACES is set and ThreadSanitizer does not run here");
    cuda_emulator::RACES.store(true, Ordering::Relaxed);
    let mut double = Double::new(1, 8 << 30, 1);
    double.shared = MOST_SHARED;
    let mut seen = vec![];
    for group in cases::groups() {
        for case in cases::of_group(group) {
            let name = case.kernel.name();
            if seen.contains(&name) {
                continue;
            }
            seen.push(name);
            let verdict = check(&mut double, &case, 1).remove(0);
            assert!(verdict.wrong.is_none(), "{verdict:?}");
        }
    }
}
