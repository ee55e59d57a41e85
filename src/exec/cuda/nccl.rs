//! NCCL, by the name that it is installed under: `libnccl.so.2`, which cudarc does not look for.
//!
//! Types and values are those of nccl.h (2.18 and newer: ncclCommSplit). On an H100 and an H200 every call has run in a world of one process;
//! **with more than one it is unverified.**

#![allow(unsafe_code)]

use super::calls::{Call, Communicator};
use super::libraries::{self, Wanted};
use crate::error::{Error, Result};
use crate::plan::Dtype;
use libloading::{Library, Symbol};
use rustc_hash::FxHashMap;
use std::ffi::{CStr, c_char, c_int, c_void};

/// ncclUniqueId.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Id([u8; 128]);

type Comm = *mut c_void;
type Stream = *mut c_void;
type Status = c_int;

const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;
/// NCCL_SPLIT_NOCOLOR.
const NO_COLOR: c_int = -1;
/// ncclSum.
const SUM: c_int = 0;

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// What of the library is called, and the library.
        struct Functions {
            $($field: unsafe extern "C" fn($($arg),*) -> $ret,)*
            _library: Library,
        }

        impl Functions {
            /// Errors: the first function that the library does not have.
            fn of(library: Library) -> std::result::Result<Functions, libloading::Error> {
                $(
                    // SAFETY: the signature is that of nccl.h.
                    let $field = unsafe {
                        let found: Symbol<unsafe extern "C" fn($($arg),*) -> $ret> = library.get($name)?;
                        *found
                    };
                )*
                Ok(Functions { $($field,)* _library: library })
            }
        }
    };
}

functions! {
    version = b"ncclGetVersion\0": fn(*mut c_int) -> Status;
    unique_id = b"ncclGetUniqueId\0": fn(*mut Id) -> Status;
    init = b"ncclCommInitRank\0": fn(*mut Comm, c_int, Id, c_int) -> Status;
    split = b"ncclCommSplit\0": fn(Comm, c_int, c_int, *mut Comm, *mut c_void) -> Status;
    abort = b"ncclCommAbort\0": fn(Comm) -> Status;
    destroy = b"ncclCommDestroy\0": fn(Comm) -> Status;
    async_error = b"ncclCommGetAsyncError\0": fn(Comm, *mut Status) -> Status;
    last_error = b"ncclGetLastError\0": fn(Comm) -> *const c_char;
    error_string = b"ncclGetErrorString\0": fn(Status) -> *const c_char;
    group_start = b"ncclGroupStart\0": fn() -> Status;
    group_end = b"ncclGroupEnd\0": fn() -> Status;
    send = b"ncclSend\0": fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> Status;
    receive = b"ncclRecv\0": fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> Status;
    all_gather = b"ncclAllGather\0": fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> Status;
    all_reduce = b"ncclAllReduce\0": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Status;
    reduce_scatter = b"ncclReduceScatter\0": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> Status;
}

/// ncclDataType_t.
fn kind(dtype: Dtype) -> c_int {
    match dtype {
        Dtype::U8 => 1,
        Dtype::U32 => 3,
        Dtype::F32 => 7,
        Dtype::F64 => 8,
        Dtype::Bf16 => 9,
    }
}

const BYTES: c_int = 1;

/// The library, and the communicators of this process.
pub struct Nccl {
    functions: Functions,
    world: Option<Comm>,
    lanes: FxHashMap<Communicator, Comm>,
}

impl Nccl {
    /// NCCL of this machine. Errors: it is not here, or is older than 2.18.
    pub fn load() -> Result<Nccl> {
        libraries::find(Wanted::Nccl);
        let mut why = String::new();
        for name in ["libnccl.so.2", "libnccl.so"] {
            // SAFETY: NCCL's constructors have no conditions.
            let found = unsafe { Library::new(name) }.and_then(Functions::of);
            match found {
                Ok(functions) => return Ok(Nccl { functions, world: None, lanes: FxHashMap::default() }),
                Err(e) => why = e.to_string(),
            }
        }
        let why = format!(
            "NCCL 2.18 or newer (libnccl.so.2) is not on this machine ({why}); install it or NVIDIA's nccl wheel and put \
             its folder on LD_LIBRARY_PATH, or start one process and name its GPUs by --devices"
        );
        Err(Error::device("nccl", why))
    }

    fn done(&self, what: &str, status: Status) -> Result<()> {
        if status == SUCCESS || status == IN_PROGRESS {
            return Ok(());
        }
        let comm = self.world.unwrap_or(std::ptr::null_mut());
        // SAFETY: NCCL gives static or thread-local text, or null.
        let text = |at: *const c_char| {
            if at.is_null() { String::new() } else { unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned() }
        };
        let (said, last) =
            unsafe { (text((self.functions.error_string)(status)), text((self.functions.last_error)(comm))) };
        Err(Error::device(what, format!("NCCL: {said}{}{last}", if last.is_empty() { "" } else { ": " })))
    }

    /// The version of the library: 23007 is 2.30.7.
    pub fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: written before the call returns.
        let status = unsafe { (self.functions.version)(&mut version) };
        self.done("version", status).map(|()| version)
    }

    /// The id of a new communicator, which rank 0 makes and gives to everyone.
    pub fn id(&self) -> Result<Vec<u8>> {
        let mut id = Id([0; 128]);
        // SAFETY: as above.
        let status = unsafe { (self.functions.unique_id)(&mut id) };
        self.done("unique id", status).map(|()| id.0.to_vec())
    }

    /// Joins the communicator of all processes, on the device whose context is this thread's. Waits for all of them.
    pub fn join(&mut self, rank: u32, world: u32, id: &[u8]) -> Result<()> {
        let id =
            Id(id.try_into().map_err(|_| Error::device("nccl", format!("an id of {} bytes, not 128", id.len())))?);
        let mut comm = std::ptr::null_mut();
        // SAFETY: the communicator is written before the call returns, and freed when `self` is dropped.
        let status = unsafe { (self.functions.init)(&mut comm, world as c_int, id, rank as c_int) };
        self.done("join", status)?;
        self.world = Some(comm);
        Ok(())
    }

    /// Makes the communicator of a lane: all processes call this for equal lanes in equal order, one that has no use
    /// for it with no members. That one gets no communicator, which would take memory.
    pub fn split(&mut self, lane: Communicator, rank: u32, members: &[u32]) -> Result<()> {
        let world = self.world.ok_or_else(|| Error::device("nccl", "no process has been joined"))?;
        let key = members.iter().position(|m| *m == rank).unwrap_or(0);
        let color = members.first().map_or(NO_COLOR, |first| *first as c_int);
        let mut comm = std::ptr::null_mut();
        // SAFETY: as above; no configuration is given.
        let status = unsafe { (self.functions.split)(world, color, key as c_int, &mut comm, std::ptr::null_mut()) };
        self.done("split", status)?;
        if color != NO_COLOR {
            self.lanes.insert(lane, comm);
        }
        Ok(())
    }

    /// Hands over one group of calls to a stream.
    ///
    /// # Safety
    /// Addresses lie in live allocations of the communicator's device, of the sizes that calls say.
    pub unsafe fn hand_over(&self, lane: Communicator, calls: &[Call], stream: Stream) -> Result<()> {
        let comm = *self.lanes.get(&lane).ok_or_else(|| Error::device("nccl", format!("lane {lane} is not joined")))?;
        let f = &self.functions;
        let at = |address: u64| address as *mut c_void;
        // SAFETY: the caller's promise.
        unsafe {
            self.done("begin a group", (f.group_start)())?;
            let one = |call: &Call| {
                let status = match *call {
                    Call::Send { to, at: from, bytes } => {
                        (f.send)(at(from), bytes as usize, BYTES, to as c_int, comm, stream)
                    }
                    Call::Receive { from, at: to, bytes } => {
                        (f.receive)(at(to), bytes as usize, BYTES, from as c_int, comm, stream)
                    }
                    Call::AllGather { from, to, bytes } => {
                        (f.all_gather)(at(from), at(to), bytes as usize, BYTES, comm, stream)
                    }
                    Call::AllReduce { from, to, elems, dtype } => {
                        (f.all_reduce)(at(from), at(to), elems as usize, kind(dtype), SUM, comm, stream)
                    }
                    Call::ReduceScatter { from, to, elems, dtype } => {
                        (f.reduce_scatter)(at(from), at(to), elems as usize, kind(dtype), SUM, comm, stream)
                    }
                };
                self.done("call", status)
            };
            let all = calls.iter().try_for_each(one);
            // The group ends in any case: later calls would else be of this group.
            let ended = self.done("end a group", (f.group_end)());
            all.and(ended)
        }
    }

    /// Whether all is well. Errors: what went wrong on another thread, or on another rank, as far as NCCL knows.
    pub fn state(&self) -> Result<()> {
        for &comm in self.lanes.values().chain(&self.world) {
            let mut state = SUCCESS;
            // SAFETY: the communicator is live.
            let status = unsafe { (self.functions.async_error)(comm, &mut state) };
            self.done("state", status)?;
            self.done("a communicator", state)?;
        }
        Ok(())
    }

    /// Gives up: what is under way on a GPU ends, where else it would wait for a rank that is gone.
    pub fn abort(&mut self) {
        for comm in self.lanes.drain().map(|(_, comm)| comm).chain(self.world.take()) {
            // SAFETY: made here and freed once. There is nobody to tell that it could not be.
            let _ = unsafe { (self.functions.abort)(comm) };
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        for comm in self.lanes.drain().map(|(_, comm)| comm).chain(self.world.take()) {
            // SAFETY: as above.
            let _ = unsafe { (self.functions.destroy)(comm) };
        }
    }
}
