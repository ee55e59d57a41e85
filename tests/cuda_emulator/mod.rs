//! Kernels in a memory that stands for a GPU's, run by an emulator of CUDA's execution model: warps, barriers, matrix
//! fragments, asynchronous copies, shared memory that begins as NaN.
#![allow(dead_code)]

#[path = "../compiler/mod.rs"]
mod compiler;

use compiler::cxx;
use foretrain::exec::cuda::lower::Launch;
use foretrain::exec::cuda::source::{ALL, HEADERS};
use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::fs::File;
use std::hash::{Hash, Hasher};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use tempfile::TempDir;

/// Whether programs look for races of a block's threads, by ThreadSanitizer.
pub static RACES: AtomicBool = AtomicBool::new(false);

/// What a program is built with besides.
fn flags() -> &'static [&'static str] {
    if RACES.load(Ordering::Relaxed) { &["-DRACES", "-fsanitize=thread", "-g"] } else { &[] }
}

/// Whether ThreadSanitizer is here and runs; says so if not.
pub fn finds_races() -> bool {
    let dir = TempDir::new().unwrap();
    let (source, program) = (dir.path().join("none.cpp"), dir.path().join("none"));
    std::fs::write(&source, "int main() {}").unwrap();
    let mut command = Command::new(cxx());
    let made = command.arg("-fsanitize=thread").arg(&source).arg("-o").arg(&program).output().unwrap().status.success();
    let runs = made && Command::new(&program).output().is_ok_and(|done| done.status.success());
    if !runs {
        eprintln!("skipped: no ThreadSanitizer that runs here, so races cannot be looked for");
    }
    runs
}

/// One compiler at a time for each program.
static COMPILING: LazyLock<Mutex<HashMap<PathBuf, Arc<Mutex<()>>>>> = LazyLock::new(Mutex::default);

/// The program of a source with its macros, made if it is not there from an earlier run.
fn program(launch: &Launch) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda_emulator");
    let own = ["emulator.h", "main.cpp"].map(|name| std::fs::read_to_string(here.join(name)).unwrap());
    // The launch's own may be a test's.
    let files = || ALL.iter().chain(HEADERS).chain([&launch.source]);
    let texts: Vec<&str> = files().map(|source| source.text).collect();
    let mut hasher = DefaultHasher::new();
    (own, texts, launch.source.name, &launch.defines, flags()).hash(&mut hasher);
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_emulator").join(format!("{:016x}", hasher.finish()));
    let own = COMPILING.lock().unwrap_or_else(|p| p.into_inner()).entry(dir.clone()).or_default().clone();
    let _one = own.lock().unwrap_or_else(|p| p.into_inner());
    let program = dir.join("program");
    if program.exists() {
        return program;
    }
    std::fs::create_dir_all(&dir).unwrap();
    for file in files() {
        std::fs::write(dir.join(file.name), file.text).unwrap();
    }
    let part = dir.join(format!("part{}", std::process::id()));
    let done = Command::new(cxx())
        .args(["-std=c++17", "-O1", "-w"])
        .args(flags())
        .args(launch.defines.iter().map(|(name, value)| format!("-D{name}={value}")))
        .arg(format!("-DKERNEL_FILE=\"{}\"", launch.source.name))
        .args([format!("-I{}", here.display()), format!("-I{}", dir.display())])
        .arg(here.join("main.cpp"))
        .arg("-o")
        .arg(&part)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{} {:?}\n{said}", launch.source.name, launch.defines);
    std::fs::rename(&part, &program).unwrap();
    program
}

/// A running program.
struct Server {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Server {
    fn new(program: &Path, memory: &Path) -> Server {
        let mut child = Command::new(program)
            .env("TSAN_OPTIONS", "halt_on_error=1 history_size=4")
            .arg(memory)
            .args([BASE.to_string(), ROOM.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Server { child, input, output }
    }

    fn say(&mut self, line: &str) -> Result<(), String> {
        let mut answer = String::new();
        let told = self.input.write_all(line.as_bytes()).and_then(|()| self.output.read_line(&mut answer));
        if told.is_ok() && answer == "done\n" {
            return Ok(());
        }
        let mut why = String::new();
        let _ = self.child.stderr.take().map(|mut e| e.read_to_string(&mut why));
        Err(format!("{} ({:?})", why.trim(), self.child.wait()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where the memory is in every program.
/// Among the addresses that ThreadSanitizer looks at.
const BASE: u64 = 0x10_0000_0000;
const ROOM: u64 = 4 << 30;

/// A memory, and the kernels that run in it.
pub struct Emulator {
    folder: TempDir,
    memory: File,
    used: u64,
    servers: HashMap<PathBuf, Server>,
}

impl Emulator {
    pub fn new() -> Emulator {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        let memory = File::options().create(true).truncate(true).read(true).write(true).open(path).unwrap();
        // A file with holes: only what is written takes room.
        memory.set_len(ROOM).unwrap();
        Emulator { folder, memory, used: 0, servers: HashMap::new() }
    }

    /// A piece of memory with every bit set.
    pub fn allocate(&mut self, bytes: u64) -> u64 {
        let at = BASE + self.used;
        // What lies between pieces is poison, too.
        self.used += bytes.next_multiple_of(256) + 256;
        assert!(self.used <= ROOM, "the tests' memory is full");
        self.write(at, &vec![0xff; (self.used + BASE - at) as usize]);
        at
    }

    pub fn write(&self, at: u64, data: &[u8]) {
        assert!(at >= BASE && at + data.len() as u64 <= BASE + self.used, "no memory is there");
        self.memory.write_all_at(data, at - BASE).unwrap();
    }

    pub fn read(&self, at: u64, bytes: u64) -> Vec<u8> {
        assert!(at >= BASE && at + bytes <= BASE + self.used, "no memory is there");
        let mut data = vec![0; bytes as usize];
        self.memory.read_exact_at(&mut data, at - BASE).unwrap();
        data
    }

    /// Compiles what has to be.
    pub fn load(&mut self, launch: &Launch) -> PathBuf {
        program(launch)
    }

    pub fn launch(
        &mut self,
        program: &Path,
        kernel: &str,
        (grid, shared): ([u32; 3], u32),
        words: &[u64],
    ) -> Result<(), String> {
        let memory = self.folder.path().join("memory");
        let server = self.servers.entry(program.into()).or_insert_with(|| Server::new(program, &memory));
        let words: Vec<String> = words.iter().map(u64::to_string).collect();
        let [x, y, z] = grid;
        server
            .say(&format!("{kernel} {x} {y} {z} {shared} {}\n", words.join(" ")))
            .map_err(|e| format!("{kernel}: {e}"))
    }
}
