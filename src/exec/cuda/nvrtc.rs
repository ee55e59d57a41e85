//! Sources to machine code, by NVRTC: at run time for the GPU that was found, and in tests for GPUs that are not there.

#![allow(unsafe_code)]

use super::libraries::{self, Wanted};
use super::source::{HEADERS, Source};
use crate::error::{Error, Result};
use cudarc::nvrtc::{result as nvrtc, sys};
use rustc_hash::FxHasher;
use std::ffi::{CStr, CString, c_char};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};

/// Machine code of one source, and the registers and memory that the compiler said it takes.
#[derive(Debug, Clone, PartialEq)]
pub struct Compiled {
    /// A cubin, for the architecture asked for alone.
    pub code: Vec<u8>,
    pub kernels: Vec<Resources>,
}

/// What a kernel takes of a multiprocessor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resources {
    pub kernel: String,
    pub registers: u32,
    /// Bytes of registers that did not fit, written to memory and read again.
    pub spilled: [u32; 2],
}

/// Whether NVRTC is on this machine. Every other call here would panic without it.
pub fn is_present() -> bool {
    libraries::find(Wanted::Nvrtc);
    // SAFETY: looks the library up by its names and does nothing else.
    unsafe { sys::is_culib_present() }
}

fn text(of: &str) -> CString {
    CString::new(of).expect("sources and options have no zero bytes")
}

/// The options that every source is compiled with.
const OPTIONS: [&str; 3] = ["--std=c++17", "--ptxas-options=-v", "-default-device"];

/// Compiles `source` with its macros for an architecture, `"90a"`. Errors: no NVRTC here; what the compiler says.
pub fn compile(source: Source, defines: &[(String, String)], arch: &str) -> Result<Compiled> {
    if !is_present() {
        let why = "NVRTC (libnvrtc.so) is not on this machine; install the CUDA toolkit or NVIDIA's nvrtc wheel";
        return Err(Error::device(source.name, why));
    }
    let program = Program::new(source)?;
    let mut options = vec![format!("--gpu-architecture=sm_{arch}")];
    options.extend(OPTIONS.map(String::from));
    options.extend(defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
    // SAFETY: the program was just made and is destroyed only when it is dropped.
    let done = unsafe { nvrtc::compile_program(program.0, &options) };
    let log = program.log();
    done.map_err(|_| Error::device(source.name, format!("it does not compile for sm_{arch}: {log}")))?;
    Ok(Compiled { code: program.code(source)?, kernels: resources(&log) })
}

/// Compiles, or takes what was compiled before from the folder of [`cache`]. A cache that cannot be written is done
/// without. Errors: those of [`compile`].
pub fn cached(source: Source, defines: &[(String, String)], arch: &str) -> Result<Vec<u8>> {
    cached_in(cache(), source, defines, arch)
}

/// Compiles or takes as [`cached`] does, from a folder of one's own; `None`: nothing is kept. Errors: those of
/// [`compile`].
pub fn cached_in(dir: Option<PathBuf>, source: Source, defines: &[(String, String)], arch: &str) -> Result<Vec<u8>> {
    let Some(dir) = dir else { return Ok(compile(source, defines, arch)?.code) };
    if let Ok(code) = std::fs::read(file(&dir, source, defines, arch)) {
        // Whole: it was put in place by its name.
        if code.starts_with(b"\x7fELF") {
            return Ok(code);
        }
    }
    compiled_to(&dir, source, defines, arch)
}

/// Compiles in any case, and keeps the code: in place of code that did not load. Errors: those of [`compile`].
pub fn anew(source: Source, defines: &[(String, String)], arch: &str) -> Result<Vec<u8>> {
    match cache() {
        Some(dir) => compiled_to(&dir, source, defines, arch),
        None => Ok(compile(source, defines, arch)?.code),
    }
}

fn file(dir: &Path, source: Source, defines: &[(String, String)], arch: &str) -> PathBuf {
    dir.join(format!("{}-sm_{arch}-{:016x}.cubin", source.name, hash(source, defines)))
}

fn compiled_to(dir: &Path, source: Source, defines: &[(String, String)], arch: &str) -> Result<Vec<u8>> {
    let file = file(dir, source, defines, arch);
    let code = compile(source, defines, arch)?.code;
    let part = file.with_extension(format!("{}.part", std::process::id()));
    let written = std::fs::create_dir_all(dir).and_then(|()| std::fs::write(&part, &code));
    let _ = written.and_then(|()| std::fs::rename(&part, &file));
    Ok(code)
}

/// Where compiled kernels are kept: FORETRAIN_CACHE, or `foretrain` in the user's cache folder.
pub fn cache() -> Option<PathBuf> {
    let of = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let users = || of("XDG_CACHE_HOME").or_else(|| of("HOME").map(|home| home.join(".cache")));
    of("FORETRAIN_CACHE").or_else(|| users().map(|dir| dir.join("foretrain")))
}

/// A hash of everything that the machine code follows from, but the compiler's version: what runs on a GPU runs whoever
/// compiled it.
fn hash(source: Source, defines: &[(String, String)]) -> u64 {
    let mut hasher = FxHasher::default();
    (source.text, defines, OPTIONS).hash(&mut hasher);
    HEADERS.iter().for_each(|header| header.text.hash(&mut hasher));
    hasher.finish()
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: Source) -> Result<Program> {
        let (code, name) = (text(source.text), text(source.name));
        let headers: Vec<(CString, CString)> = HEADERS.iter().map(|h| (text(h.text), text(h.name))).collect();
        let bodies: Vec<*const c_char> = headers.iter().map(|h| h.0.as_ptr()).collect();
        let names: Vec<*const c_char> = headers.iter().map(|h| h.1.as_ptr()).collect();
        let mut program = std::ptr::null_mut();
        // SAFETY: all strings live until the call returns, and NVRTC copies them.
        let made = unsafe {
            let (count, name) = (headers.len() as i32, name.as_ptr());
            sys::nvrtcCreateProgram(&mut program, code.as_ptr(), name, count, bodies.as_ptr(), names.as_ptr())
        };
        made.result().map_err(|e| Error::device(source.name, format!("NVRTC: {e:?}")))?;
        Ok(Program(program))
    }

    fn log(&self) -> String {
        // SAFETY: the program is there until it is dropped.
        let log = unsafe { nvrtc::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = log.iter().map(|&c| c as u8).collect();
        CStr::from_bytes_until_nul(&bytes).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
    }

    fn code(&self, source: Source) -> Result<Vec<u8>> {
        let fail = |e| Error::device(source.name, format!("NVRTC gave no machine code: {e:?}"));
        let mut size = 0;
        // SAFETY: the program has been compiled; the buffer has the size that NVRTC asks for.
        unsafe {
            sys::nvrtcGetCUBINSize(self.0, &mut size).result().map_err(fail)?;
            let mut code = vec![0u8; size];
            sys::nvrtcGetCUBIN(self.0, code.as_mut_ptr().cast()).result().map_err(fail)?;
            Ok(code)
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: made by NVRTC and destroyed once. There is nobody to tell that it could not be.
        let _ = unsafe { nvrtc::destroy_program(self.0) };
    }
}

/// The resources of kernels, from what ptxas says with `-v`: a kernel's name, then its spills, then its registers.
fn resources(log: &str) -> Vec<Resources> {
    let mut found: Vec<Resources> = vec![];
    for line in log.lines() {
        let number_before =
            |word: &str| -> Option<u32> { line.split(word).next()?.rsplit([' ', ',']).next()?.parse().ok() };
        if let Some(name) = line.split("Compiling entry function '").nth(1).and_then(|rest| rest.split('\'').next()) {
            found.push(Resources { kernel: name.into(), registers: 0, spilled: [0, 0] });
        }
        let Some(last) = found.last_mut() else { continue };
        if let (Some(stores), Some(loads)) = (number_before(" bytes spill stores"), number_before(" bytes spill loads"))
        {
            last.spilled = [stores, loads];
        }
        if let Some(registers) = number_before(" registers") {
            last.registers = registers;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compilers_words_are_read() {
        let log = "ptxas info    : Compiling entry function 'fill' for 'sm_90a'\n\
                   ptxas info    : Function properties for fill\n    \
                   0 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads\n\
                   ptxas info    : Used 22 registers, used 0 barriers, 376 bytes cmem[0]\n";
        assert_eq!(resources(log), [Resources { kernel: "fill".into(), registers: 22, spilled: [24, 20] }]);
    }
}
