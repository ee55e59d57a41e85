//! What a study's folder may lose and may not, and what is said where nothing of a sweep runs.

use std::fs;
use std::path::Path;
use std::process::Command;

/// (exit code, stdout, stderr) of a command line.
fn said(dir: &Path, line: &str) -> (i32, String, String) {
    let done = Command::new(env!("CARGO_BIN_EXE_foretrain"))
        .args(line.split_whitespace())
        .current_dir(dir)
        .output()
        .expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (done.status.code().expect("not killed"), text(done.stdout), text(done.stderr))
}

/// A mixture whose experts nobody has shared out ran nowhere; now its ranks share them as those of `longest` do.
#[test]
fn a_mixture_runs_where_nothing_is_said_of_its_experts() {
    let dir = tempfile::tempdir().unwrap();
    let line = "sweep --model qwen3-30b-a3b --gpus 64 --seq-len 8K --ulysses 1,8 --recompute full --out found";
    let (code, out, err) = said(dir.path(), line);
    assert!(code == 0 && err.is_empty() && out.contains(", 2 that run"), "{out}{err}");
    let study = fs::read_to_string(dir.path().join("found/study.json")).unwrap();
    assert!(study.contains("\"ep\": [8],"), "{study}");
}

/// That is the exit code, after rows and pictures, and something is named that would run.
#[test]
fn a_sweep_of_which_nothing_runs_says_what_would() {
    let dir = tempfile::tempdir().unwrap();
    let line = "sweep --model qwen3-30b-a3b --gpus 64 --seq-len 8K --ulysses 1,64 --ep 1 --recompute full --out none";
    let (code, out, err) = said(dir.path(), line);
    assert!(code == 2 && out.contains("2 rows, 0 that run") && out.contains("wrote none/rows.csv"), "{out}{err}");
    let near = "what comes nearest: 8 K, no split, recompute full: memory: needs ";
    assert!(err.starts_with("Error: infeasible: sweep: nothing runs; ") && err.contains(near), "{err}");
    assert!(err.contains("; fits with zero 2 (") && out.contains("; fits with zero 2 ("), "{out}{err}");
    let rows = || fs::read_to_string(dir.path().join("none/rows.csv")).unwrap();
    assert!(rows().lines().count() == 3 && !rows().contains("fits with"), "{}", rows());
    // The picture says so, too, and the rows are good for another time.
    let picture = fs::read_to_string(dir.path().join("none/mfu_vs_seqlen.svg")).unwrap();
    assert!(picture.contains("nothing of the family runs") && picture.contains("more than a GPU holds"));
    let (code, out, err) = said(dir.path(), &format!("{line} --json"));
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(code == 2 && err.is_empty() && found["kept_rows"] == 2, "{out}");
    assert!(found["error"].as_str().unwrap().contains("; fits with zero 2 ("), "{}", found["error"]);
}

/// A log of a training that stood in the folder was gone.
#[test]
fn rows_of_something_else_are_not_written_over() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    let log = "step,loss\n1,5.9\n2,5.7\n";
    fs::write(file("rows.csv"), log).unwrap();
    for line in [
        "sweep --model tiny --gpus 8 --seq-len 1K --ulysses 1 --global-batch 8 --out .",
        "longest --model tiny --cluster local-cpu --gpus 1 --options default --out .",
        "search --model tiny --gpus 2 --seq-len 1K --global-batch 8 --out .",
    ] {
        let (code, out, err) = said(dir.path(), line);
        assert_eq!((code, out.as_str()), (2, ""), "{line}: {err}");
        let parts = ["rows.csv: ", "no study.json stands beside it", "another --out", "move the file", "--fresh"];
        assert!(parts.iter().all(|part| err.contains(part)), "{line}: {err}");
        assert!(fs::read_to_string(file("rows.csv")).unwrap() == log && !file("study.json").exists(), "{line}");
    }
    let sweep = "sweep --model tiny --gpus 8 --seq-len 1K --ulysses 1 --global-batch 8 --out .";
    assert_eq!(said(dir.path(), &format!("{sweep} --fresh")).0, 0);
    // The folder is the sweep's now; a log that takes the place of its rows is not.
    assert_eq!(said(dir.path(), sweep).0, 0);
    fs::write(file("rows.csv"), log).unwrap();
    let (code, _, err) = said(dir.path(), sweep);
    assert!(code == 2 && err.contains("its columns are other ones: step,loss;"), "{err}");
    assert!(fs::read_to_string(file("rows.csv")).unwrap() == log);
}

/// What its state-space heads do not share among 64 ranks, a hybrid shares among 32, and its sequences are longer by as much.
#[test]
fn hybrids_have_sequences_over_many_ranks() {
    let dir = tempfile::tempdir().unwrap();
    let line = "longest --model qwen3-next-80b-a3b --gpus 64 --options loss-chunks-16 --json --out long";
    let (code, out, err) = said(dir.path(), line);
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(code == 0 && err.is_empty(), "{err}");
    let length =
        |one: &serde_json::Value| (one["row"]["ring"].as_u64().unwrap(), one["row"]["seq_len"].as_u64().unwrap());
    let found: Vec<(u64, u64)> = found["longest"].as_array().unwrap().iter().map(length).collect();
    assert!(found.len() == 4 && found[0].0 == 1 && found[1].0 == 32, "{found:?}");
    assert!(found[1..].iter().all(|(_, length)| *length > 16 * found[0].1), "{found:?}");
}
