//! Files that are read and written as others are: wherever a path leads, up to a size, and with the mark of an editor before them.

use crate::program::{folder, json, said, succeeds};
use std::fs;
use std::path::Path;
#[cfg(target_os = "linux")]
use std::process::{Command, Stdio};

const RUN: &str = "run --model tiny --seq-len 32 --global-batch 2";

#[cfg(target_os = "linux")]
#[test]
fn a_dump_is_written_through_links_and_devices() {
    use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
    let dir = folder();
    let at = |name: &str| dir.path().join(name);
    let kept = |name: &str| fs::symlink_metadata(at(name)).unwrap().is_symlink();
    fs::write(at("target"), "before").unwrap();
    symlink("target", at("link")).unwrap();
    symlink("later", at("ahead")).unwrap();
    symlink("/dev/null", at("null")).unwrap();
    symlink("/dev/full", at("full")).unwrap();
    for (path, target) in [("link", "target"), ("ahead", "later"), ("plain", "plain")] {
        succeeds(dir.path(), &format!("{RUN} --dump {path}"));
        assert!(path == target || kept(path), "{path}");
        assert!(fs::read(at(target)).unwrap().windows(8).any(|bytes| bytes == b"\"logits\""), "{path}");
    }
    succeeds(dir.path(), &format!("{RUN} --dump null"));
    let (code, _, err) = said(dir.path(), &format!("{RUN} --dump full"));
    assert!(code == 2 && err.contains("full: No space left on device") && err.contains("make room there"), "{err}");
    assert!(kept("null") && kept("full"));
    assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    // As any file of this process.
    fs::write(at("other"), "").unwrap();
    let mode = |name: &str| fs::metadata(at(name)).unwrap().permissions().mode();
    assert_eq!(mode("plain"), mode("other"));
}

/// Whoever reads may stop early; an answer that is lost is an error.
#[cfg(target_os = "linux")]
#[test]
fn an_answer_that_cannot_be_printed_is_an_error() {
    for line in ["options --json", "options", "--help", "nonsense --json"] {
        let run = |out: Stdio| {
            let words = line.split_whitespace();
            let output = Command::new(env!("CARGO_BIN_EXE_foretrain")).args(words).stdout(out).output().unwrap();
            (output.status.code(), String::from_utf8(output.stderr).unwrap())
        };
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let (code, err) = run(full.into());
        assert_eq!(code, Some(2), "{line}: {err}");
        assert!(err.contains("Error: standard output: could not be written: No space left on device"), "{line}: {err}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let well = if line.starts_with("nonsense") { 2 } else { 0 };
        assert_eq!(run(writer.into()), (Some(well), String::new()), "{line}");
    }
}

/// No end of a device is waited for, and no memory filled with it.
#[cfg(target_os = "linux")]
#[test]
fn files_without_an_end_are_refused() {
    let dir = folder();
    for (line, most) in [
        ("estimate --model /dev/zero", 256),
        ("estimate --gpus 8 --documents /dev/zero", 256),
        ("dispatch --routing /dev/zero", 1024),
    ] {
        let (code, _, err) = said(dir.path(), line);
        assert!(code == 2 && err.contains(&format!("more than the {most} MiB that are read")), "{line}: {code}, {err}");
    }
}

/// Puts the mark of an editor before a file.
fn mark(path: &Path) {
    let text = fs::read_to_string(path).unwrap();
    fs::write(path, format!("\u{feff}{text}")).unwrap();
}

#[test]
fn any_file_may_begin_with_the_mark_of_an_editor() {
    let dir = folder();
    let write = |name: &str, text: &str| {
        fs::write(dir.path().join(name), text).unwrap();
        mark(&dir.path().join(name));
    };
    write("routing.csv", "source,experts\n0,1 2\n0,3 -1\n1,0 7\n");
    let found = json(dir.path(), "dispatch --ep 2 --experts 8 --routing routing.csv --json");
    assert_eq!((found["topk"].as_u64(), found["tokens"].as_u64()), (Some(2), Some(2)));
    write("ids.json", &serde_json::json!((0..33).collect::<Vec<u32>>()).to_string());
    succeeds(dir.path(), "run --model tiny --seq-len 32 --tokens ids.json");
    write("lengths", "16\n16\n");
    succeeds(dir.path(), "estimate --model tiny --cluster local-cpu --seq-len 32 --documents ./lengths");
    succeeds(dir.path(), "plan --model tiny --cluster local-cpu --seq-len 32 --out plan.json");
    mark(&dir.path().join("plan.json"));
    succeeds(dir.path(), "run --plan plan.json");
    write("faults.json", r#"{"faults": []}"#);
    succeeds(dir.path(), "simulate --plan plan.json --cluster local-cpu --faults faults.json");
}
