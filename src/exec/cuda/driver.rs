//! CUDA's driver, as far as plans need it: memory, streams, events, modules, launches.
//!
//! **Unverified: nothing here has run on a GPU yet.** Handles are freed when they are dropped; errors name the call.

#![allow(unsafe_code)]

use super::nvrtc;
use super::source::Source;
use crate::error::{Error, Result};
use cudarc::driver::{result, sys};
use rustc_hash::FxHashMap;
use std::ffi::{CString, c_void};

/// A GPU with its context, and every kernel that was compiled for it.
pub struct Gpu {
    device: sys::CUdevice,
    pub name: String,
    /// `"90a"`.
    pub arch: String,
    modules: FxHashMap<String, sys::CUmodule>,
    functions: FxHashMap<(String, &'static str), sys::CUfunction>,
}

fn fail(what: &str) -> impl Fn(result::DriverError) -> Error + '_ {
    move |e| Error::device(what, format!("CUDA: {e}"))
}

/// How many GPUs there are; an error, with the remedy, where the driver is not on this machine.
pub fn count() -> Result<usize> {
    // SAFETY: looks the library up by its names and does nothing else.
    if !unsafe { sys::is_culib_present() } {
        let why = "no NVIDIA driver (libcuda.so) on this machine; use --on cpu, or run this where a GPU is";
        return Err(Error::device("cuda", why));
    }
    result::init().map_err(fail("init"))?;
    Ok(result::device::get_count().map_err(fail("count devices"))? as usize)
}

impl Gpu {
    /// The GPU of that number, its primary context made current for this thread.
    pub fn new(ordinal: usize) -> Result<Gpu> {
        let there = count()?;
        if ordinal >= there {
            return Err(Error::device("cuda", format!("device {ordinal} is not one of the {there} GPUs here")));
        }
        let device = result::device::get(ordinal as i32).map_err(fail("get device"))?;
        // SAFETY: the device exists; the context is released when this is dropped.
        unsafe {
            let context = result::primary_ctx::retain(device).map_err(fail("make a context"))?;
            result::ctx::set_current(context).map_err(fail("use a context"))?;
        }
        let name = result::device::get_name(device).map_err(fail("name of the device"))?;
        let mut gpu =
            Gpu { device, name, arch: String::new(), modules: FxHashMap::default(), functions: FxHashMap::default() };
        let [major, minor] = [
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        ]
        .map(|a| gpu.attribute(a));
        // What an `a` adds is there on that very generation alone.
        let only = if major? >= 9 { "a" } else { "" };
        gpu.arch = format!(
            "{}{}{only}",
            gpu.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor?
        );
        Ok(gpu)
    }

    fn attribute(&self, which: sys::CUdevice_attribute) -> Result<i32> {
        // SAFETY: the device exists.
        unsafe { result::device::get_attribute(self.device, which) }.map_err(fail("attribute of the device"))
    }

    /// Bytes free and in all.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let (free, all) = result::mem_get_info().map_err(fail("free memory"))?;
        Ok((free as u64, all as u64))
    }

    /// Waits until everything is done.
    pub fn synchronize(&self) -> Result<()> {
        result::ctx::synchronize().map_err(fail("wait for the device"))
    }

    /// The kernel of a source with its macros, compiled and loaded the first time. `shared` bytes are allowed it.
    pub fn function(
        &mut self,
        source: Source,
        kernel: &'static str,
        defines: &[(String, String)],
        shared: u32,
    ) -> Result<Function> {
        let key = format!("{} {defines:?}", source.name);
        if !self.modules.contains_key(&key) {
            let compiled = nvrtc::compile(source, defines, &self.arch)?;
            // SAFETY: the code is a whole cubin for this architecture.
            let module = unsafe { result::module::load_data(compiled.code.as_ptr().cast()) };
            self.modules.insert(key.clone(), module.map_err(fail(source.name))?);
        }
        let module = self.modules[&key];
        let at = (key, kernel);
        if !self.functions.contains_key(&at) {
            let name = CString::new(kernel).expect("kernels have plain names");
            // SAFETY: the module stays loaded as long as this GPU.
            let function = unsafe { result::module::get_function(module, name) }.map_err(fail(kernel))?;
            if shared > 48 * 1024 {
                let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                // SAFETY: the function was just loaded.
                unsafe { result::function::set_function_attribute(function, most, shared as i32) }
                    .map_err(fail(kernel))?;
            }
            self.functions.insert(at.clone(), function);
        }
        Ok(Function(self.functions[&at]))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: modules and context were made here; nobody uses them any more. A failure has nobody to be told to.
        unsafe {
            for &module in self.modules.values() {
                let _ = result::module::unload(module);
            }
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// A loaded kernel; good as long as its [`Gpu`].
#[derive(Debug, Clone, Copy)]
pub struct Function(sys::CUfunction);

/// Memory of the GPU.
pub struct Memory {
    at: sys::CUdeviceptr,
    pub bytes: u64,
}

impl Memory {
    /// Filled with ones: NaN, to whoever reads it before it is written.
    pub fn poisoned(bytes: u64) -> Result<Memory> {
        // SAFETY: a fresh allocation, filled within its size.
        unsafe {
            let at = result::malloc_sync(bytes.max(1) as usize).map_err(fail("allocate memory"))?;
            let memory = Memory { at, bytes };
            result::memset_d8_sync(at, 0xff, bytes as usize).map_err(fail("fill memory"))?;
            Ok(memory)
        }
    }

    pub fn of(data: &[u8]) -> Result<Memory> {
        let memory = Memory::poisoned(data.len() as u64)?;
        memory.write(0, data)?;
        Ok(memory)
    }

    /// The address of a byte.
    pub fn address(&self, offset: u64) -> u64 {
        assert!(offset <= self.bytes, "byte {offset} of {}", self.bytes);
        self.at + offset
    }

    /// Waits for nothing: whoever calls knows that no stream uses the memory.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        assert!(offset + data.len() as u64 <= self.bytes, "{} bytes at {offset} of {}", data.len(), self.bytes);
        // SAFETY: within the allocation.
        unsafe { result::memcpy_htod_sync(self.at + offset, data) }.map_err(fail("copy to the device"))
    }

    pub fn read(&self, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        assert!(offset + bytes <= self.bytes, "{bytes} bytes at {offset} of {}", self.bytes);
        let mut data = vec![0u8; bytes as usize];
        // SAFETY: within the allocation.
        unsafe { result::memcpy_dtoh_sync(&mut data, self.at + offset) }.map_err(fail("copy from the device"))?;
        Ok(data)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated here and freed once.
        let _ = unsafe { result::free_sync(self.at) };
    }
}

/// A stream of its own, which does not wait for the default stream.
pub struct Stream(sys::CUstream);

impl Stream {
    pub fn new() -> Result<Stream> {
        result::stream::create(result::stream::StreamKind::NonBlocking).map(Stream).map_err(fail("make a stream"))
    }

    /// For cuBLASLt.
    pub fn raw(&self) -> *mut c_void {
        self.0.cast()
    }

    pub fn wait(&self, event: &Event) -> Result<()> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are live.
        unsafe { result::stream::wait_event(self.0, event.0, flags) }.map_err(fail("wait for an event"))
    }

    pub fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both handles are live.
        unsafe { result::event::record(event.0, self.0) }.map_err(fail("record an event"))
    }

    pub fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<()> {
        // SAFETY: the caller's regions lie in live allocations: they come from a checked layout.
        unsafe { result::memcpy_dtod_async(to, from, bytes as usize, self.0) }.map_err(fail("copy on the device"))
    }

    /// Launches a kernel whose one parameter is a struct of these words.
    pub fn launch(&self, function: Function, grid: [u32; 3], threads: u32, shared: u32, words: &[u64]) -> Result<()> {
        let mut params = [words.as_ptr() as *mut c_void];
        let grid = (grid[0], grid[1], grid[2]);
        // SAFETY: the words are as many as the kernel's struct has, and CUDA copies them before the call returns.
        unsafe { result::launch_kernel(function.0, grid, (threads, 1, 1), shared, self.0, &mut params) }
            .map_err(fail("launch a kernel"))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made here and destroyed once.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

/// An event with a time.
pub struct Event(sys::CUevent);

impl Event {
    pub fn new() -> Result<Event> {
        result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).map(Event).map_err(fail("make an event"))
    }

    /// Seconds since `earlier`, both having passed. CUDA resolves about half a microsecond.
    pub fn since(&self, earlier: &Event) -> Result<f64> {
        // SAFETY: both handles are live.
        let ms = unsafe { result::event::elapsed(earlier.0, self.0) }.map_err(fail("time between events"))?;
        Ok(f64::from(ms) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made here and destroyed once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
