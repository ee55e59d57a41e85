//! cuDNN's backend: functions by their names, and descriptors, which are made, told of attributes, and finalized.

#![allow(unsafe_code)]

use super::super::libraries::{self, Wanted};
use super::names::{self, of};
use crate::error::{Error, Result};
use libloading::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::rc::Rc;

type Status = c_int;
type Raw = *mut c_void;

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// What of the library is called, and the library.
        pub struct Api {
            $($field: unsafe extern "C" fn($($arg),*) -> $ret,)*
            _library: Library,
        }

        impl Api {
            /// Errors: the first function that the library does not have.
            fn of(library: Library) -> std::result::Result<Api, libloading::Error> {
                $(
                    // SAFETY: the signature is that of cudnn_graph.h.
                    let $field = unsafe {
                        let found: Symbol<unsafe extern "C" fn($($arg),*) -> $ret> = library.get($name)?;
                        *found
                    };
                )*
                Ok(Api { $($field,)* _library: library })
            }
        }
    };
}

functions! {
    version = b"cudnnGetVersion\0": fn() -> usize;
    error_string = b"cudnnGetErrorString\0": fn(Status) -> *const c_char;
    last_error = b"cudnnGetLastErrorString\0": fn(*mut c_char, usize) -> ();
    create_handle = b"cudnnCreate\0": fn(*mut Raw) -> Status;
    destroy_handle = b"cudnnDestroy\0": fn(Raw) -> Status;
    set_stream = b"cudnnSetStream\0": fn(Raw, Raw) -> Status;
    create = b"cudnnBackendCreateDescriptor\0": fn(c_int, *mut Raw) -> Status;
    destroy = b"cudnnBackendDestroyDescriptor\0": fn(Raw) -> Status;
    set = b"cudnnBackendSetAttribute\0": fn(Raw, c_int, c_int, i64, *const c_void) -> Status;
    get = b"cudnnBackendGetAttribute\0": fn(Raw, c_int, c_int, i64, *mut i64, *mut c_void) -> Status;
    finalize = b"cudnnBackendFinalize\0": fn(Raw) -> Status;
    execute = b"cudnnBackendExecute\0": fn(Raw, Raw, Raw) -> Status;
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "cuDNN {}", self.version_name())
    }
}

/// A call that did not succeed, and what it came to.
#[derive(Debug)]
pub struct Failed {
    status: Status,
    why: String,
}

impl Failed {
    pub fn unsupported(why: String) -> Failed {
        Failed { status: names::NOT_SUPPORTED, why }
    }

    /// Whether the library says that it has nothing that takes what was asked for.
    pub fn is_unsupported(&self) -> bool {
        self.status / 1000 == names::NOT_SUPPORTED / 1000
    }

    pub fn error(self) -> Error {
        Error::device("cudnn", self.why)
    }
}

type Called<T> = std::result::Result<T, Failed>;

impl Api {
    /// Errors: cuDNN 9 is not on this machine.
    pub fn load() -> Result<Rc<Api>> {
        // It looks both up by name.
        libraries::find(Wanted::Nvrtc);
        libraries::find(Wanted::CublasLt);
        libraries::find(Wanted::Cudnn);
        // SAFETY: cuDNN's constructors have no conditions.
        let found = unsafe { Library::new("libcudnn.so.9") }.and_then(Api::of);
        found.map(Rc::new).map_err(|e| {
            let why = format!(
                "cuDNN 9 (libcudnn.so.9) is not on this machine ({e}); install it or NVIDIA's cudnn wheel and put its folder \
                 on LD_LIBRARY_PATH, or give --attention own"
            );
            Error::device("cudnn", why)
        })
    }

    /// 91900 for 9.19.0.
    pub fn version(&self) -> usize {
        // SAFETY: has no conditions.
        unsafe { (self.version)() }
    }

    fn version_name(&self) -> String {
        let version = self.version();
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }

    fn done(&self, what: &str, status: Status) -> Called<()> {
        if status == names::SUCCESS {
            return Ok(());
        }
        let mut last = [0u8; 1024];
        // SAFETY: the first brings static text; the second writes text with its zero into as many bytes as are said.
        let says = unsafe {
            (self.last_error)(last.as_mut_ptr().cast(), last.len());
            CStr::from_ptr((self.error_string)(status))
        };
        let last = CStr::from_bytes_until_nul(&last).map(CStr::to_string_lossy).unwrap_or_default();
        Err(Failed { status, why: format!("{what}: {} {last}", says.to_string_lossy()) })
    }
}

/// A handle of cuDNN: executes plans on the GPU whose context this thread had as the handle was made.
#[derive(Debug)]
pub struct Handle {
    api: Rc<Api>,
    raw: Raw,
}

impl Handle {
    pub fn new(api: &Rc<Api>) -> Result<Handle> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the handle is written before the call returns, and destroyed once.
        api.done("make a handle", unsafe { (api.create_handle)(&mut raw) }).map_err(Failed::error)?;
        Ok(Handle { api: api.clone(), raw })
    }

    /// Executes a plan on a stream of the handle's GPU.
    ///
    /// # Safety
    /// The stream is live, and so are the addresses in the pack, for as many bytes as the plan's tensors have.
    pub unsafe fn execute(&self, plan: &Descriptor, pack: &Descriptor, stream: *mut c_void) -> Result<()> {
        // SAFETY: as the caller says; the handle is live.
        let done = unsafe {
            let set = self.api.done("use a stream", (self.api.set_stream)(self.raw, stream));
            set.and_then(|()| self.api.done("execute a plan", (self.api.execute)(self.raw, plan.raw, pack.raw)))
        };
        done.map_err(Failed::error)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made here and destroyed once. There is nobody to tell that it could not be.
        let _ = unsafe { (self.api.destroy_handle)(self.raw) };
    }
}

/// The value of an attribute.
pub enum Value<'a> {
    DataType(i32),
    /// A value of the enumeration that the first number names.
    Mode(i32, i32),
    Flag(bool),
    Ints(&'a [i64]),
    Of(&'a Descriptor),
    OfAll(&'a [Descriptor]),
    Addresses(&'a [u64]),
    Text(&'a [u8]),
    Handle(&'a Handle),
}

/// A descriptor of the backend, owned. Descriptors that it was told of may be dropped before it, since the library
/// holds on to them.
#[derive(Debug)]
pub struct Descriptor {
    api: Rc<Api>,
    raw: Raw,
}

impl Descriptor {
    pub fn new(api: &Rc<Api>, kind: i32) -> Called<Descriptor> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the descriptor is written before the call returns, and destroyed once.
        api.done("make a descriptor", unsafe { (api.create)(kind, &mut raw) })?;
        Ok(Descriptor { api: api.clone(), raw })
    }

    pub fn set(&self, attribute: i32, value: Value) -> Called<()> {
        let all: Vec<Raw>;
        let (of, count, at): (i32, usize, *const c_void) = match &value {
            Value::DataType(one) => (of::DATA_TYPE, 1, (&raw const *one).cast()),
            Value::Mode(of, one) => (*of, 1, (&raw const *one).cast()),
            Value::Flag(one) => (of::BOOLEAN, 1, (&raw const *one).cast()),
            Value::Ints(many) => (of::INT64, many.len(), many.as_ptr().cast()),
            Value::Of(one) => (of::DESCRIPTOR, 1, (&raw const one.raw).cast()),
            Value::OfAll(many) => {
                all = many.iter().map(|d| d.raw).collect();
                (of::DESCRIPTOR, all.len(), all.as_ptr().cast())
            }
            Value::Addresses(many) => (of::POINTER, many.len(), many.as_ptr().cast()),
            Value::Text(text) => (of::CHAR, text.len(), text.as_ptr().cast()),
            Value::Handle(handle) => (of::HANDLE, 1, (&raw const handle.raw).cast()),
        };
        let name = || format!("set attribute {attribute}");
        // SAFETY: there are so many values of that type, which are copied; what is named by handle is live.
        self.api.done(&name(), unsafe { (self.api.set)(self.raw, attribute, of, count as i64, at) })
    }

    pub fn finish(self, what: &str) -> Called<Descriptor> {
        // SAFETY: it is live.
        self.api.done(what, unsafe { (self.api.finalize)(self.raw) })?;
        Ok(self)
    }

    pub fn int(&self, attribute: i32) -> Called<i64> {
        let (mut count, mut value) = (0i64, 0i64);
        // SAFETY: one number is asked for, and there is room for one.
        let status = unsafe { (self.api.get)(self.raw, attribute, of::INT64, 1, &mut count, (&raw mut value).cast()) };
        self.api.done(&format!("get attribute {attribute}"), status)?;
        Ok(value)
    }

    /// Descriptors of a kind that an attribute holds, up to `most`.
    pub fn descriptors(&self, attribute: i32, kind: i32, most: usize) -> Called<Vec<Descriptor>> {
        let mut all = (0..most).map(|_| Descriptor::new(&self.api, kind)).collect::<Called<Vec<_>>>()?;
        let mut raws: Vec<Raw> = all.iter().map(|d| d.raw).collect();
        let mut count = 0i64;
        let room = raws.as_mut_ptr().cast();
        // SAFETY: descriptors of that kind are filled in, as many as there are here.
        let status = unsafe { (self.api.get)(self.raw, attribute, of::DESCRIPTOR, most as i64, &mut count, room) };
        self.api.done(&format!("get attribute {attribute}"), status)?;
        all.truncate(count.max(0) as usize);
        Ok(all)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made here and destroyed once. There is nobody to tell that it could not be.
        let _ = unsafe { (self.api.destroy)(self.raw) };
    }
}
