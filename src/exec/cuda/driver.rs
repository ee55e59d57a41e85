//! CUDA's driver, as far as plans need it: memory, streams, events, modules, launches.
//!
//! It runs on an H100 and an H200, and without one against a library that stands for the driver (`tests/cuda_ffi.rs`);
//! **peers, of which there are none where there is one GPU, are unverified.** It decides nothing: it hands over what it is
//! told, and errors name the call. What was made is freed when it is dropped.

#![allow(unsafe_code)]

mod gpu;
mod rests;

use super::blas::Blas;
use super::calls::{Call, Communicator};
use super::cudnn::Cudnn;
use super::device::{Device, EventId, FunctionId, GraphId, Operands, Size, StreamId};
use super::fused::{Attention, Fused, Sdpa};
use super::libraries::{self, Wanted};
use super::lower::{Gemm, Launch};
use super::meeting::Meeting;
use super::nccl::Nccl;
use super::nvml::Nvml;
use super::nvrtc;
use crate::error::{Error, Result};
use cudarc::driver::{result, sys};
use gpu::{Gpu, module_of};
use rayon::prelude::*;
use rests::Rests;
use rustc_hash::FxHashMap;
use std::ffi::{CString, c_void};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// GPUs of this machine, their primary contexts, and everything that was made on them.
pub struct Cuda {
    gpus: Vec<Gpu>,
    /// The GPU whose context is this thread's.
    current: u32,
    streams: Vec<(u32, sys::CUstream)>,
    events: Vec<(u32, sys::CUevent)>,
    /// Loaded kernels, with the bytes of dynamic shared memory that each may have.
    functions: Vec<(sys::CUfunction, u32)>,
    graphs: Vec<sys::CUgraphExec>,
    memories: Vec<(u32, sys::CUdeviceptr)>,
    nvml: Option<Nvml>,
    /// Waits of a given length; `None` until there is one.
    rests: Option<Rests>,
    /// The library that does attention; `None`: the project's own kernels do.
    cudnn: Option<Rc<Cudnn>>,
    /// NCCL, and the other processes; `None` where this process is alone.
    joined: Option<(Nccl, Arc<Meeting>)>,
}

/// Bytes of dynamic shared memory that every kernel may have (CUDA C++ Programming Guide, "Shared Memory").
const PLAIN_SHARED: u32 = 48 << 10;

type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

fn fail(what: &str) -> impl Fn(result::DriverError) -> Error + '_ {
    move |e| Error::device(what, format!("CUDA: {e}"))
}

/// How many GPUs there are; an error, with the remedy, where the driver is not on this machine.
pub fn count() -> Result<u32> {
    libraries::find(Wanted::Driver);
    // SAFETY: looks the library up by its names and does nothing else.
    if !unsafe { sys::is_culib_present() } {
        let why = "no NVIDIA driver (libcuda.so) on this machine; use --on cpu, or run this where a GPU is";
        return Err(Error::device("cuda", why));
    }
    queues();
    result::init().map_err(fail("init"))?;
    Ok(result::device::get_count().map_err(fail("count devices"))? as u32)
}

/// Streams that the GPU itself keeps apart (CUDA C++ Programming Guide, "CUDA Environment Variables"): of more than that
/// some share a queue, in which one that waits holds up another. By itself the driver keeps eight apart, fewer than four
/// ranks of a ring have, and 32 at most.
const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// Asks for as many queues as there are, unless the user has said how many.
fn queues() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        if std::env::var_os(QUEUES).is_none() {
            // SAFETY: once, before the driver begins, which is before this program has started any thread that reads the
            // environment by other means than Rust's, whose lock this takes.
            unsafe { std::env::set_var(QUEUES, "32") };
        }
    });
}

impl Cuda {
    /// The GPUs of these numbers; what is called GPU i here is the i-th of them. Errors: there is none of that number, or no
    /// cuDNN where it is to do attention.
    pub fn open(ordinals: &[u32], attention: Attention) -> Result<Cuda> {
        let there = count()?;
        if let Some(wrong) = ordinals.iter().find(|o| **o >= there) {
            let why = format!("GPU {wrong} is not one of the {there} here; give --devices numbers below {there}");
            return Err(Error::device("cuda", why));
        }
        let mut cuda = Cuda {
            gpus: vec![],
            current: u32::MAX,
            streams: vec![],
            events: vec![],
            functions: vec![],
            graphs: vec![],
            nvml: Nvml::load(),
            rests: None,
            cudnn: None,
            memories: vec![],
            joined: None,
        };
        for &ordinal in ordinals {
            let gpu = Gpu::open(ordinal)?;
            cuda.gpus.push(gpu);
        }
        cuda.reach_peers()?;
        cuda.leave_attention(attention)?;
        Ok(cuda)
    }

    /// cuDNN for the GPUs, and a place in it for each. Plans are for one kind.
    fn seated(&mut self, strict: bool) -> Result<Cudnn> {
        if let Some(other) = self.gpus.iter().find(|gpu| gpu.name != self.gpus[0].name) {
            let why = format!("GPUs are of two kinds, {} and {}; give --attention own", self.gpus[0].name, other.name);
            return Err(Error::device("cudnn", why));
        }
        self.enter(0)?;
        let cudnn = Cudnn::new(strict)?;
        for gpu in 0..self.gpus.len() as u32 {
            self.enter(gpu)?;
            self.gpus[gpu as usize].seat = Some(cudnn.seat()?);
        }
        Ok(cudnn)
    }

    /// Lets every GPU read the memory of every other: kernels that add what peers have do so.
    fn reach_peers(&mut self) -> Result<()> {
        for here in 0..self.gpus.len() as u32 {
            for there in (0..self.gpus.len() as u32).filter(|&there| there != here) {
                self.enter(here)?;
                let mut can = 0;
                let [own, peer] = [here, there].map(|gpu| self.gpus[gpu as usize].device);
                // SAFETY: both devices exist, and `can` is written before the call returns.
                unsafe { sys::cuDeviceCanAccessPeer(&mut can, own, peer) }.result().map_err(fail("peer access"))?;
                if can == 0 {
                    let why = format!("GPU {here} cannot read the memory of GPU {there}; put all ranks on one GPU");
                    return Err(Error::device("cuda", why));
                }
                // SAFETY: the peer's context is retained until `self` is dropped.
                let enabled = unsafe { sys::cuCtxEnablePeerAccess(self.gpus[there as usize].context, 0) };
                if enabled != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
                    enabled.result().map_err(fail("enable peer access"))?;
                }
            }
        }
        Ok(())
    }

    /// Makes a GPU's context this thread's.
    fn enter(&mut self, gpu: u32) -> Result<()> {
        if self.current != gpu {
            // SAFETY: the context is retained until `self` is dropped.
            unsafe { result::ctx::set_current(self.gpus[gpu as usize].context) }.map_err(fail("use a context"))?;
            self.current = gpu;
        }
        Ok(())
    }

    /// Makes a GPU's context this thread's, for a library that takes it as it finds it.
    pub fn here(&mut self, gpu: u32) -> Result<()> {
        self.enter(gpu)
    }

    /// Makes this process one of several from now on.
    pub fn join(&mut self, nccl: Nccl, meeting: Arc<Meeting>) {
        self.joined = Some((nccl, meeting));
    }

    /// Gives up the commands that wait for other processes.
    pub fn abort(&mut self) {
        if let Some((nccl, _)) = &mut self.joined {
            nccl.abort();
        }
    }

    /// Waits for this process's streams while all others are well. What waits on a GPU for a rank that is gone would never
    /// end by itself.
    fn wait_watching(&self) -> Result<()> {
        let Some((nccl, meeting)) = &self.joined else { return Ok(()) };
        for &(_, stream) in &self.streams {
            loop {
                // SAFETY: the stream is live.
                match unsafe { sys::cuStreamQuery(stream) } {
                    sys::CUresult::CUDA_ERROR_NOT_READY => {}
                    other => {
                        other.result().map_err(fail("wait for the device"))?;
                        break;
                    }
                }
                if let Some(why) = meeting.gone() {
                    return Err(Error::device("another rank", why));
                }
                nccl.state()?;
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        Ok(())
    }

    /// Waits for what the default stream does for the host: fills, and the end of copies out of pageable memory. Our own
    /// streams would not wait for it.
    fn settled(&self) -> Result<()> {
        result::ctx::synchronize().map_err(fail("wait for the device"))
    }

    fn on_stream(&mut self, stream: StreamId) -> Result<sys::CUstream> {
        let (gpu, handle) = self.streams[stream as usize];
        self.enter(gpu)?;
        Ok(handle)
    }

    /// Lets a function have the dynamic shared memory of a launch.
    fn allow(&mut self, gpu: u32, function: FunctionId, launch: &Launch) -> Result<()> {
        let Gpu { shared, name, .. } = &self.gpus[gpu as usize];
        let (function, allowed) = &mut self.functions[function as usize];
        if launch.shared <= *allowed {
            return Ok(());
        }
        if u64::from(launch.shared) > *shared {
            let why = format!("takes {} bytes of shared memory of the {shared} that {name} has", launch.shared);
            return Err(Error::device(launch.kernel, why));
        }
        let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is of a loaded module, whose context is this thread's.
        unsafe { result::function::set_function_attribute(*function, most, launch.shared as i32) }
            .map_err(fail(launch.kernel))?;
        *allowed = launch.shared;
        Ok(())
    }

    /// The architecture that kernels are compiled for, `"90a"`.
    pub fn arch(&self, gpu: u32) -> &str {
        &self.gpus[gpu as usize].arch
    }
}

impl Device for Cuda {
    fn name(&self, gpu: u32) -> String {
        self.gpus[gpu as usize].name.clone()
    }

    fn shared(&self, gpu: u32) -> u64 {
        self.gpus[gpu as usize].shared
    }

    fn cache(&self, gpu: u32) -> u64 {
        self.gpus[gpu as usize].cache
    }

    fn conditions(&mut self, gpu: u32) -> Option<String> {
        self.nvml.as_ref()?.conditions(&self.gpus[gpu as usize].bus).map(|found| found.to_string())
    }

    fn energy(&mut self, gpu: u32) -> Option<f64> {
        self.nvml.as_ref()?.energy(&self.gpus[gpu as usize].bus)
    }

    fn power_limit(&mut self, gpu: u32) -> Option<f64> {
        self.nvml.as_ref()?.power_limit(&self.gpus[gpu as usize].bus)
    }

    fn memory(&mut self, gpu: u32) -> Result<[u64; 2]> {
        self.enter(gpu)?;
        let (free, all) = result::mem_get_info().map_err(fail("free memory"))?;
        Ok([free as u64, all as u64])
    }

    fn allocate(&mut self, gpu: u32, bytes: u64) -> Result<u64> {
        self.enter(gpu)?;
        // SAFETY: a fresh allocation, filled within its size and freed when `self` is dropped.
        unsafe {
            let at = result::malloc_sync(bytes.max(1) as usize).map_err(fail("allocate memory"))?;
            self.memories.push((gpu, at));
            if bytes > 0 {
                result::memset_d8_sync(at, 0xff, bytes as usize).map_err(fail("fill memory"))?;
            }
            self.settled().map(|()| at)
        }
    }

    fn clear(&mut self) -> Result<()> {
        self.synchronize()?;
        for graph in std::mem::take(&mut self.graphs) {
            // SAFETY: made here, destroyed once, and no stream is busy.
            unsafe { sys::cuGraphExecDestroy(graph) }.result().map_err(fail("destroy a graph"))?;
        }
        for (_, event) in std::mem::take(&mut self.events) {
            // SAFETY: made here, destroyed once, and no stream is busy.
            unsafe { result::event::destroy(event) }.map_err(fail("destroy an event"))?;
        }
        for (_, stream) in std::mem::take(&mut self.streams) {
            // SAFETY: as above.
            unsafe { result::stream::destroy(stream) }.map_err(fail("destroy a stream"))?;
        }
        for (gpu, at) in std::mem::take(&mut self.memories) {
            self.enter(gpu)?;
            // The library keeps its workspace.
            if self.gpus[gpu as usize].blas.as_ref().is_some_and(|blas| blas.workspace() == at) {
                self.memories.push((gpu, at));
                continue;
            }
            // SAFETY: allocated here, freed once, and nothing that could use it is under way.
            unsafe { result::free_sync(at) }.map_err(fail("free memory"))?;
        }
        Ok(())
    }

    fn write(&mut self, gpu: u32, at: u64, data: &[u8]) -> Result<()> {
        self.enter(gpu)?;
        // SAFETY: callers write within what they have allocated.
        unsafe { result::memcpy_htod_sync(at, data) }.map_err(fail("copy to the device"))?;
        self.settled()
    }

    fn read(&mut self, gpu: u32, at: u64, bytes: u64) -> Result<Vec<u8>> {
        self.enter(gpu)?;
        let mut data = vec![0u8; bytes as usize];
        // SAFETY: callers read within what they have allocated.
        unsafe { result::memcpy_dtoh_sync(&mut data, at) }.map_err(fail("copy from the device"))?;
        Ok(data)
    }

    /// A stream that does not wait for the default stream.
    fn stream(&mut self, gpu: u32) -> Result<StreamId> {
        self.enter(gpu)?;
        let made = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(fail("make a stream"))?;
        self.streams.push((gpu, made));
        Ok(self.streams.len() as StreamId - 1)
    }

    /// An event with a time: CUDA resolves about half a microsecond.
    fn event(&mut self, gpu: u32) -> Result<EventId> {
        self.enter(gpu)?;
        let made = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map_err(fail("make an event"))?;
        self.events.push((gpu, made));
        Ok(self.events.len() as EventId - 1)
    }

    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        let stream = self.on_stream(stream)?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are live.
        unsafe { result::stream::wait_event(stream, self.events[event as usize].1, flags) }
            .map_err(fail("wait for an event"))
    }

    fn record(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        let stream = self.on_stream(stream)?;
        // SAFETY: both handles are live.
        unsafe { result::event::record(self.events[event as usize].1, stream) }.map_err(fail("record an event"))
    }

    fn copy(&mut self, stream: StreamId, to: u64, from: u64, bytes: u64) -> Result<()> {
        let stream = self.on_stream(stream)?;
        // SAFETY: the caller's regions lie in live allocations: they come from a checked layout. Addresses say which GPU
        // they are of.
        unsafe { sys::cuMemcpyAsync(to, from, bytes as usize, stream) }.result().map_err(fail("copy on the device"))
    }

    /// NVRTC compiles programs of different threads at once (NVRTC documentation, "Thread Safety").
    fn compile(&mut self, gpu: u32, launches: &[&Launch]) {
        let here = &mut self.gpus[gpu as usize];
        let of = |launch: &&Launch| (module_of(launch), (launch.source, launch.defines.clone()));
        let mut wanted: FxHashMap<_, _> = launches.iter().map(of).collect();
        wanted.retain(|key, _| !here.modules.contains_key(key) && !here.compiled.contains_key(key));
        let arch = &here.arch;
        let done: Vec<_> = wanted
            .into_iter()
            .collect::<Vec<_>>()
            .into_par_iter()
            .filter_map(|(key, (source, defines))| Some((key, nvrtc::cached(source, &defines, arch).ok()?)))
            .collect();
        here.compiled.extend(done);
    }

    fn load(&mut self, gpu: u32, launch: &Launch) -> Result<FunctionId> {
        self.enter(gpu)?;
        let (source, next) = (launch.source, self.functions.len() as FunctionId);
        let here = &mut self.gpus[gpu as usize];
        let key = module_of(launch);
        let at = (key.clone(), launch.kernel);
        if let Some(&known) = here.loaded.get(&at) {
            return self.allow(gpu, known, launch).map(|()| known);
        }
        if !here.modules.contains_key(&key) {
            // SAFETY: the code is a whole cubin for this architecture.
            let module = |code: Vec<u8>| unsafe { result::module::load_data(code.as_ptr().cast()) };
            let kept = module(match here.compiled.remove(&key) {
                Some(code) => code,
                None => nvrtc::cached(source, &launch.defines, &here.arch)?,
            });
            // What is kept may have been compiled by something that this driver does not know yet.
            let module = match kept {
                Ok(module) => Ok(module),
                Err(_) => module(nvrtc::anew(source, &launch.defines, &here.arch)?),
            };
            here.modules.insert(key.clone(), module.map_err(fail(source.name))?);
        }
        let name = CString::new(launch.kernel).expect("kernels have plain names");
        // SAFETY: the module stays loaded as long as its GPU.
        let function =
            unsafe { result::module::get_function(here.modules[&key], name) }.map_err(fail(launch.kernel))?;
        self.functions.push((function, PLAIN_SHARED));
        self.gpus[gpu as usize].loaded.insert(at, next);
        self.allow(gpu, next, launch).map(|()| next)
    }

    fn launch(&mut self, stream: StreamId, function: FunctionId, size: Size, words: &[u64]) -> Result<()> {
        let stream = self.on_stream(stream)?;
        let mut params = [words.as_ptr() as *mut c_void];
        let Size { grid: [x, y, z], threads, shared } = size;
        let (function, _) = self.functions[function as usize];
        // SAFETY: the words are as many as the kernel's struct has, and CUDA copies them before the call returns.
        unsafe { result::launch_kernel(function, (x, y, z), (threads, 1, 1), shared, stream, &mut params) }
            .map_err(fail("launch a kernel"))
    }

    fn rest(&mut self, stream: StreamId, seconds: f64) -> Result<()> {
        let stream = self.on_stream(stream)?;
        if self.rests.is_none() {
            self.rests = Some(Rests::new()?);
        }
        // SAFETY: the stream is live; graphs have no waits (see `Device::rest`).
        unsafe { self.rests.as_ref().expect("made above").hand_over(stream, seconds) }
    }

    fn multiplies(&mut self, gpu: u32) -> Result<()> {
        if self.gpus[gpu as usize].blas.is_none() {
            let workspace = self.allocate(gpu, super::blas::WORKSPACE)?;
            self.gpus[gpu as usize].blas = Some(Blas::new(workspace)?);
        }
        Ok(())
    }

    fn multiplies_fp8(&mut self, gpu: u32) -> Result<()> {
        self.multiplies(gpu)?;
        let Gpu { name, arch, blas, .. } = &self.gpus[gpu as usize];
        blas.as_ref().expect("made above").has_fp8(name, arch)
    }

    fn gemm(&mut self, stream: StreamId, gemm: &Gemm, at: Operands) -> Result<()> {
        let (gpu, handle) = self.streams[stream as usize];
        self.multiplies(gpu)?;
        self.enter(gpu)?;
        let blas = self.gpus[gpu as usize].blas.as_mut().expect("made above");
        blas.run(gemm, at, handle.cast())
    }

    fn leave_attention(&mut self, to: Attention) -> Result<()> {
        self.cudnn = None;
        if to == Attention::Own || !Cudnn::is_here(to)? {
            return Ok(());
        }
        match self.seated(to == Attention::Cudnn) {
            Ok(cudnn) => self.cudnn = Some(Rc::new(cudnn)),
            Err(e) if to == Attention::Best => eprintln!("attention by the project's own kernels: {e}"),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    fn fused(&self) -> Option<Rc<dyn Fused>> {
        self.cudnn.clone().map(|cudnn| cudnn as Rc<dyn Fused>)
    }

    fn attend(&mut self, stream: StreamId, sdpa: &Sdpa, at: &[u64], workspace: u64) -> Result<()> {
        let handle = self.on_stream(stream)?;
        let (gpu, _) = self.streams[stream as usize];
        let nobody = || Error::device("attention", "cuDNN has no place on this GPU");
        let seat = self.gpus[gpu as usize].seat.as_ref().ok_or_else(nobody)?;
        let cudnn = self.cudnn.as_ref().ok_or_else(nobody)?;
        // SAFETY: the stream is live; operands and workspace lie in live allocations, of the sizes that the plan was held to.
        unsafe { seat.run(cudnn, sdpa, at, workspace, handle.cast()) }
    }

    fn capture(&mut self, stream: StreamId) -> Result<()> {
        let stream = self.on_stream(stream)?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live.
        unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }.result().map_err(fail("begin a capture"))
    }

    fn captured(&mut self, stream: StreamId) -> Result<GraphId> {
        let stream = self.on_stream(stream)?;
        let (mut graph, mut ready) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is being captured; what is made is destroyed once, the graph here and its other form with
        // `self`.
        unsafe {
            sys::cuStreamEndCapture(stream, &mut graph).result().map_err(fail("end a capture"))?;
            let made = sys::cuGraphInstantiateWithFlags(&mut ready, graph, 0);
            let _ = sys::cuGraphDestroy(graph);
            made.result().map_err(fail("make a graph"))?;
        }
        self.graphs.push(ready);
        Ok(self.graphs.len() as GraphId - 1)
    }

    fn replay(&mut self, stream: StreamId, graph: GraphId) -> Result<()> {
        let stream = self.on_stream(stream)?;
        // SAFETY: both are live.
        unsafe { sys::cuGraphLaunch(self.graphs[graph as usize], stream) }.result().map_err(fail("launch a graph"))
    }

    fn communicator(&mut self, lane: Communicator, rank: u32, members: &[u32]) -> Result<()> {
        self.enter(0)?;
        let unjoined = || Error::device("nccl", "this process is not joined with others");
        let (nccl, _) = self.joined.as_mut().ok_or_else(unjoined)?;
        nccl.split(lane, rank, members)
    }

    fn call(&mut self, stream: StreamId, lane: Communicator, calls: &[Call]) -> Result<()> {
        let stream = self.on_stream(stream)?;
        let unjoined = || Error::device("nccl", "this process is not joined with others");
        let (nccl, _) = self.joined.as_ref().ok_or_else(unjoined)?;
        // SAFETY: the caller's regions lie in live allocations: they come from a checked layout.
        unsafe { nccl.hand_over(lane, calls, stream.cast()) }
    }

    fn synchronize(&mut self) -> Result<()> {
        self.wait_watching()?;
        (0..self.gpus.len() as u32).try_for_each(|gpu| {
            self.enter(gpu)?;
            result::ctx::synchronize().map_err(fail("wait for the device"))
        })?;
        self.rests.iter().for_each(Rests::all_over);
        Ok(())
    }

    fn seconds(&mut self, from: EventId, to: EventId) -> Result<f64> {
        let [(gpu, from), (_, to)] = [from, to].map(|event| self.events[event as usize]);
        self.enter(gpu)?;
        let mut ms = 0f32;
        // SAFETY: the signature is that of cuda.h, both handles are live, and the time is written before the call returns.
        // Drivers before 570 have no second version of it, which cudarc would call.
        unsafe {
            let named = sys::culib().get::<Elapsed>(b"cuEventElapsedTime\0");
            let elapsed = named.map_err(|e| Error::device("time between events", e))?;
            elapsed(&mut ms, from, to).result().map_err(fail("time between events"))?;
        }
        Ok(f64::from(ms) * 1e-3)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Streams that wait for a rank that is gone end when their communicators do. A panic ends this one in the middle of
        // what the others are in.
        if self.joined.as_ref().is_some_and(|(_, meeting)| meeting.lost()) {
            self.abort();
        }
        let _ = self.synchronize();
        self.joined = None;
        self.rests = None;
        // SAFETY: everything was made here and is freed once, while its context is retained; nobody uses it any more. A
        // failure has nobody to be told to.
        unsafe {
            for &graph in &self.graphs {
                let _ = sys::cuGraphExecDestroy(graph);
            }
            for &(_, event) in &self.events {
                let _ = result::event::destroy(event);
            }
            for &(_, stream) in &self.streams {
                let _ = result::stream::destroy(stream);
            }
            for i in 0..self.memories.len() {
                let (gpu, at) = self.memories[i];
                let _ = self.enter(gpu).map(|()| result::free_sync(at));
            }
            for i in 0..self.gpus.len() as u32 {
                let _ = self.enter(i);
                self.gpus[i as usize].seat = None;
            }
            self.cudnn = None;
            for gpu in &mut self.gpus {
                gpu.blas = None;
                for &module in gpu.modules.values() {
                    let _ = result::module::unload(module);
                }
                let _ = result::primary_ctx::release(gpu.device);
            }
        }
    }
}
