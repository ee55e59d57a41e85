//! Waits of a given length that take none of a GPU's multiprocessors: a stream says in the host's memory that it has come to
//! one, and goes on when a thread of the host says there that it is over.
//!
//! A kernel that waits would hold a multiprocessor. Products whose blocks take all the shared memory of theirs, a block on
//! each, ran up to half as long again beside one on an H200.

#![allow(unsafe_code)]

use super::fail;
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most waits that may be handed over before the GPU has done all of them.
const MOST: usize = 1 << 15;

/// Memory of the host that the GPU reads and writes: of each wait whether it was come to, and whether it is over.
struct Flags {
    host: *const [AtomicU32; 2],
    /// The address of the flags for the GPU.
    at: sys::CUdeviceptr,
}

// SAFETY: the memory is there as long as `Rests`, and is read and written by atomic operations alone.
unsafe impl Send for Flags {}
// SAFETY: as above.
unsafe impl Sync for Flags {}

impl Flags {
    fn new() -> Result<Flags> {
        let (mut host, mut at, bytes) = (std::ptr::null_mut(), 0, MOST * size_of::<[AtomicU32; 2]>());
        let what = fail("memory of the host");
        let kind = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a fresh allocation, zeroed within its size before anyone reads it, and freed once by `Rests`.
        unsafe {
            sys::cuMemHostAlloc(&mut host, bytes, kind).result().map_err(&what)?;
            host.cast::<u8>().write_bytes(0, bytes);
            sys::cuMemHostGetDevicePointer_v2(&mut at, host, 0).result().map_err(&what)?;
        }
        Ok(Flags { host: host.cast_const().cast(), at })
    }

    fn of(&self, wait: usize) -> &[AtomicU32; 2] {
        assert!(wait < MOST);
        // SAFETY: within the allocation, which was zeroed.
        unsafe { &*self.host.add(wait) }
    }
}

struct Shared {
    flags: Flags,
    nanoseconds: Vec<AtomicU64>,
    /// The number of waits that the GPU may come to.
    handed_over: AtomicUsize,
    end: AtomicBool,
}

impl Shared {
    /// Ends waits when their time has come.
    fn keep(&self) {
        let mut under_way: Vec<(Instant, usize)> = vec![];
        while !self.end.load(Relaxed) {
            let there = self.handed_over.load(Acquire);
            for wait in 0..there {
                let begun = &self.flags.of(wait)[0];
                if begun.load(Acquire) == 1 {
                    begun.store(0, Relaxed);
                    let length = Duration::from_nanos(self.nanoseconds[wait].load(Relaxed));
                    under_way.push((Instant::now() + length, wait));
                }
            }
            let now = Instant::now();
            under_way.retain(|&(end, wait)| {
                let goes_on = now < end;
                if !goes_on {
                    self.flags.of(wait)[1].store(1, Release);
                }
                goes_on
            });
            match there {
                0 => std::thread::sleep(Duration::from_micros(50)),
                _ => std::hint::spin_loop(),
            }
        }
    }
}

/// The waits of a process, and the thread that ends them.
pub struct Rests {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

impl Rests {
    pub fn new() -> Result<Rests> {
        let nanoseconds = (0..MOST).map(|_| AtomicU64::new(0)).collect();
        let (handed_over, end) = (AtomicUsize::new(0), AtomicBool::new(false));
        let shared = Arc::new(Shared { flags: Flags::new()?, nanoseconds, handed_over, end });
        let keeper = std::thread::spawn({
            let shared = shared.clone();
            move || shared.keep()
        });
        Ok(Rests { shared, keeper: Some(keeper) })
    }

    /// Notes that all streams are done: no wait is under way.
    pub fn all_over(&self) {
        self.shared.handed_over.store(0, Release);
    }

    /// Has `stream` wait for so long from when it comes there. Errors: too many before [`Rests::all_over`], and the driver's.
    ///
    /// # Safety
    /// The stream is live, and is not being captured.
    pub unsafe fn hand_over(&self, stream: sys::CUstream, seconds: f64) -> Result<()> {
        let Shared { flags, nanoseconds, handed_over, .. } = &*self.shared;
        let wait = handed_over.load(Relaxed);
        if wait == MOST {
            return Err(Error::device("wait", format!("more than {MOST} waits in one step; take a shorter plan")));
        }
        flags.of(wait).iter().for_each(|flag| flag.store(0, Relaxed));
        nanoseconds[wait].store((seconds * 1e9).round() as u64, Relaxed);
        handed_over.store(wait + 1, Release);
        let begun = flags.at + (wait * size_of::<[AtomicU32; 2]>()) as u64;
        let over = begun + size_of::<AtomicU32>() as u64;
        let equal = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32;
        // SAFETY: the caller's stream; the addresses are of memory that outlives what is handed over.
        unsafe {
            sys::cuStreamWriteValue32_v2(stream, begun, 1, 0).result().map_err(fail("begin a wait"))?;
            sys::cuStreamWaitValue32_v2(stream, over, 1, equal).result().map_err(fail("wait"))
        }
    }
}

impl Drop for Rests {
    /// No stream is busy any more.
    fn drop(&mut self) {
        self.shared.end.store(true, Relaxed);
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
        // SAFETY: allocated once in `Flags::new`, and the thread that used it is gone.
        let _ = unsafe { sys::cuMemFreeHost(self.shared.flags.host.cast_mut().cast()) };
    }
}
