//! One GPU: its primary context, what it is, and what was compiled and loaded for it.

#![allow(unsafe_code)]

use super::super::blas::Blas;
use super::super::cudnn::Seat;
use super::super::device::FunctionId;
use super::super::lower::Launch;
use super::fail;
use crate::error::{Error, Result};
use cudarc::driver::{result, sys};
use rustc_hash::FxHashMap;
use std::ffi::CStr;

pub struct Gpu {
    pub device: sys::CUdevice,
    pub context: sys::CUcontext,
    pub name: String,
    /// The architecture, `"90a"`.
    pub arch: String,
    /// Bytes of shared memory that a block may have, once a kernel asks for more than 48 KB.
    pub shared: u64,
    /// Bytes of the second cache.
    pub cache: u64,
    /// The address on the PCI bus.
    pub bus: String,
    pub modules: FxHashMap<String, sys::CUmodule>,
    /// Machine code that is compiled and not loaded yet.
    pub compiled: FxHashMap<String, Vec<u8>>,
    pub loaded: FxHashMap<(String, &'static str), FunctionId>,
    pub blas: Option<Blas>,
    pub seat: Option<Seat>,
}

/// The name of a launch's module: launches of one source with equal macros are of one module.
pub fn module_of(launch: &Launch) -> String {
    format!("{} {:?}", launch.source.name, launch.defines)
}

impl Gpu {
    pub fn open(ordinal: u32) -> Result<Gpu> {
        let device = result::device::get(ordinal as i32).map_err(fail("get device"))?;
        // SAFETY: the device exists; the context is released when the GPU is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(fail("make a context"))?;
        let name = result::device::get_name(device).map_err(fail("name of the device"))?;
        // SAFETY: the device exists.
        let attribute = |which| unsafe { result::device::get_attribute(device, which) }.map_err(fail("attribute"));
        let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let shared = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u64;
        let cache = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64;
        if major < 8 {
            // SAFETY: retained above, and nothing was made in it.
            let _ = unsafe { result::primary_ctx::release(device) };
            let why = format!(
                "GPU {ordinal} ({name}) is of compute capability {major}.{minor}; kernels here want 8.0 or newer"
            );
            return Err(Error::device("cuda", why));
        }
        // Features that an `a` adds are there on that very generation alone.
        let arch = format!("{major}{minor}{}", if major >= 9 { "a" } else { "" });
        let (modules, compiled, loaded) = (FxHashMap::default(), FxHashMap::default(), FxHashMap::default());
        let mut bus = [0u8; 32];
        // SAFETY: the device exists, and the text is written within the length that is given.
        unsafe { sys::cuDeviceGetPCIBusId(bus.as_mut_ptr().cast(), bus.len() as i32, device) }
            .result()
            .map_err(fail("address on the bus"))?;
        let bus = CStr::from_bytes_until_nul(&bus).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(Gpu { device, context, name, arch, shared, cache, bus, modules, compiled, loaded, blas: None, seat: None })
    }
}
