//! What a plan needs of GPUs: memory, streams, events, kernels, products. Everything above it is tested against a double
//! that obeys commands on the CPU, in any order that streams and events allow.

use super::calls::{Call, Communicator};
use super::fused::{Attention, Fused, Sdpa};
use super::lower::{Factors, Gemm, Launch};
use crate::error::{Error, Result};
use std::rc::Rc;

pub type StreamId = u32;
pub type EventId = u32;
pub type FunctionId = u32;
pub type GraphId = u32;

/// Addresses of A, B, C, the bias, and the scales of FP8 operands; and the factors of a product onto its result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Operands {
    pub factors: Factors,
    pub a: u64,
    pub b: u64,
    pub c: u64,
    pub bias: Option<u64>,
    /// Addresses of the scales of A and of B, in f32; `None` without FP8: see [`Gemm`].
    pub scales: Option<[u64; 2]>,
}

/// How many threads a kernel is launched with, and with how many bytes of shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub grid: [u32; 3],
    pub threads: u32,
    pub shared: u32,
}

/// The GPUs of one process, by numbers from 0. Commands to a stream are done in order; what different streams do is in
/// order only where one waits for an event that another has recorded. Addresses are those of one address space.
pub trait Device {
    fn name(&self, gpu: u32) -> String;

    /// Bytes of shared memory that a block of threads may have.
    fn shared(&self, gpu: u32) -> u64;

    /// Bytes of the cache that all of a GPU's multiprocessors share.
    fn cache(&self, gpu: u32) -> u64;

    /// Clocks, temperature, power, in words; `None` where nobody says them.
    fn conditions(&mut self, _gpu: u32) -> Option<String> {
        None
    }

    /// Joules that a GPU has taken, from some moment in the past on; `None` where nobody says them.
    fn energy(&mut self, _gpu: u32) -> Option<f64> {
        None
    }

    /// Watts that a GPU may draw in the long run; `None` where nobody says them.
    fn power_limit(&mut self, _gpu: u32) -> Option<f64> {
        None
    }

    /// Bytes of memory that are free, and bytes that there are.
    fn memory(&mut self, gpu: u32) -> Result<[u64; 2]>;

    /// Memory with every bit set: NaN, to whoever reads it before it is written. Given back by [`clear`](Device::clear), or
    /// with the device.
    fn allocate(&mut self, gpu: u32, bytes: u64) -> Result<u64>;

    /// Waits until everything is done, and gives back all memory, streams and events; kernels stay loaded.
    fn clear(&mut self) -> Result<()>;

    /// Copies from the host; no stream may be using the memory.
    fn write(&mut self, gpu: u32, at: u64, data: &[u8]) -> Result<()>;

    /// Copies to the host; no stream may be writing the memory.
    fn read(&mut self, gpu: u32, at: u64, bytes: u64) -> Result<Vec<u8>>;

    fn stream(&mut self, gpu: u32) -> Result<StreamId>;

    fn event(&mut self, gpu: u32) -> Result<EventId>;

    /// Has commands that are handed over from now on wait for the event as it was recorded last.
    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()>;

    fn record(&mut self, stream: StreamId, event: EventId) -> Result<()>;

    fn copy(&mut self, stream: StreamId, to: u64, from: u64, bytes: u64) -> Result<()>;

    /// Compiles what these launches need, side by side, so that [`load`](Device::load) finds it done. What does not compile is
    /// said there.
    fn compile(&mut self, _gpu: u32, _launches: &[&Launch]) {}

    /// Compiles and loads the kernel of a launch, the first time.
    fn load(&mut self, gpu: u32, launch: &Launch) -> Result<FunctionId>;

    /// Launches a kernel whose one parameter is a struct of these words.
    fn launch(&mut self, stream: StreamId, function: FunctionId, size: Size, words: &[u64]) -> Result<()>;

    /// Has what is handed over to this stream from now on wait for so long, from when the stream comes there: it takes none of
    /// the GPU's multiprocessors. Not while a graph is being captured.
    fn rest(&mut self, stream: StreamId, seconds: f64) -> Result<()>;

    /// Gets ready for products, before the first command that something may wait for: it takes memory.
    fn multiplies(&mut self, _gpu: u32) -> Result<()> {
        Ok(())
    }

    /// Gets ready for products in FP8 with a scale for every 128 numbers. Errors: why this GPU, or its library of
    /// products, has none.
    fn multiplies_fp8(&mut self, gpu: u32) -> Result<()> {
        self.multiplies(gpu)
    }

    /// Hands over a product. Products of one GPU must not run at once: they share a workspace.
    fn gemm(&mut self, stream: StreamId, gemm: &Gemm, at: Operands) -> Result<()>;

    /// Says whose kernels do attention from now on. Errors: a library is asked for, and there is none.
    fn leave_attention(&mut self, to: Attention) -> Result<()> {
        match to {
            Attention::Own | Attention::Best => Ok(()),
            Attention::Cudnn => Err(Error::device("attention", "this device has no library for it")),
        }
    }

    /// The library that does attention on these GPUs; `None`: the project's own kernels do.
    fn fused(&self) -> Option<Rc<dyn Fused>> {
        None
    }

    /// A pass of attention that [`fused`](Device::fused) takes: its operands in the order of [`Pass`](super::fused::Pass),
    /// and where it works.
    fn attend(&mut self, _stream: StreamId, _sdpa: &Sdpa, _at: &[u64], _workspace: u64) -> Result<()> {
        Err(Error::device("attention", "this device has no library for it"))
    }

    /// Makes the communicator of a lane, on GPU 0, with the same ranks of other processes: all of them make theirs in the
    /// same order. Of no members: this process has no part in it, and the others make theirs.
    fn communicator(&mut self, lane: Communicator, _rank: u32, _members: &[u32]) -> Result<()> {
        Err(Error::device("nccl", format!("this device has no communicator for lane {lane}")))
    }

    /// One group of calls of a communicator, done in the stream's order.
    fn call(&mut self, _stream: StreamId, lane: Communicator, _calls: &[Call]) -> Result<()> {
        Err(Error::device("nccl", format!("this device has no communicator for lane {lane}")))
    }

    /// From now on what is handed over to this stream, and to streams that wait for it, is noted and not done.
    fn capture(&mut self, stream: StreamId) -> Result<()>;

    /// The graph of the commands that were noted, all streams having been waited for by this one.
    fn captured(&mut self, stream: StreamId) -> Result<GraphId>;

    /// Does the commands of a graph, as one command of the stream.
    fn replay(&mut self, stream: StreamId, graph: GraphId) -> Result<()>;

    /// Waits until everything is done.
    fn synchronize(&mut self) -> Result<()>;

    /// Seconds between two events of one GPU that have passed.
    fn seconds(&mut self, from: EventId, to: EventId) -> Result<f64>;
}
