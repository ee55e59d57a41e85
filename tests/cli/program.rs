//! The program, run as its users run it, and files for it to read.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

pub fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

/// (exit code, stdout, stderr) of a command line.
pub fn said(dir: &Path, line: &str) -> (i32, String, String) {
    said_among(dir, line, &[])
}

/// What torchrun tells the second of two processes.
pub const SECOND_OF_TWO: [(&str, &str); 3] = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")];

/// The same with variables of the environment.
pub fn said_among(dir: &Path, line: &str, variables: &[(&str, &str)]) -> (i32, String, String) {
    let command = &mut Command::new(env!("CARGO_BIN_EXE_foretrain"));
    let output = command.args(words(line)).envs(variables.iter().copied()).current_dir(dir).output();
    let output = output.expect("the binary runs");
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    (output.status.code().expect("not killed"), text(&output.stdout), text(&output.stderr))
}

pub fn succeeds(dir: &Path, line: &str) -> String {
    let (code, out, err) = said(dir, line);
    assert_eq!((code, err.as_str()), (0, ""), "{line}: {out}");
    out
}

/// What `--json` prints of an answer.
#[track_caller]
pub fn json(dir: &Path, line: &str) -> Value {
    json_of(dir, line, 0)
}

/// What `--json` prints where the program ends with a code: 2 of a refusal, and of an answer that is not the one wished for.
#[track_caller]
pub fn json_of(dir: &Path, line: &str, code: i32) -> Value {
    let (ended, out, err) = said(dir, line);
    assert_eq!((ended, err.as_str()), (code, ""), "{line}: {out}");
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{line}: {e}\n{out}"))
}

/// Holds a text against tests/golden/`name`, or writes it there.
#[track_caller]
pub fn golden(name: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
    }
    let want = fs::read_to_string(&path).unwrap_or_default();
    assert!(text == want, "{} differs; UPDATE_GOLDEN=1 rewrites it\n--- is\n{text}\n--- was\n{want}", path.display());
}

pub fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// What a JSON file holds.
#[track_caller]
pub fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// The same of a file of the repository.
#[track_caller]
pub fn shipped(path: &str) -> Value {
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
}

/// Writes tiny's config with some keys changed.
pub fn model(dir: &Path, name: &str, changes: &[(&str, Value)]) {
    let mut config = shipped("models/llm/tiny.json");
    for (key, value) in changes {
        config[key] = value.clone();
    }
    fs::write(dir.join(name), config.to_string()).unwrap();
}
