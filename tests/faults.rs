//! Runs that go wrong: each ends within seconds, with a failure that names who waits for whom; and what an interrupted
//! command has done stays.

use foretrain::plan::{Dtype, Engine};
use foretrain::spec::{Documents, LlmSpec, Parallelism, Workload};
use foretrain::strategy::{Engines, build};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn command(dir: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_foretrain"));
    command.args(line.split_whitespace()).current_dir(dir).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Far beyond what any of these takes, and far below a hang.
const PATIENCE: Duration = Duration::from_secs(90);

/// Waits for the end of a process; one that hangs fails the test.
fn ended(mut child: Child, line: &str) -> Output {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("{line} hangs");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

/// (exit code, what it says on stderr)
fn fails(line: &str) -> (i32, String) {
    let dir = tempfile::tempdir().unwrap();
    let output = ended(command(dir.path(), line).spawn().unwrap(), line);
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

const SMALL: &str = "run --model tiny";

/// Every way to share a step that has another kind of communication.
const WAYS: [(&str, u32); 5] =
    [("--ring 4", 4), ("--ulysses 2", 2), ("--tp 2", 2), ("--dp 3 --zero 3", 3), ("--pp 2 --global-batch 2", 2)];

#[test]
fn a_lost_message_is_missed_by_name() {
    for (way, ranks) in WAYS {
        let (code, said) = fails(&format!("{SMALL} {way} --inject lost-message:1"));
        assert_eq!(code, 2, "{way}: {said}");
        assert!(said.contains("deadlock: "), "{way}: {said}");
        for rank in 0..ranks {
            assert!(said.contains(&format!("rank {rank} waits in ")), "{way}: {said}");
        }
        assert!(said.contains("from rank 1") || said.contains("for rank 1 to send"), "{way}: {said}");
    }
}

#[test]
fn a_dead_rank_is_found_and_those_that_wait_for_it_are_named() {
    let begun = Instant::now();
    let (code, said) = fails(&format!("{SMALL} --ring 3 --seq-len 36 --inject dead-rank:2"));
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("rank 2 is dead"), "{said}");
    assert!(
        said.contains("rank 0 waits in ") && said.contains("rank 1 waits in ") && said.contains("rank 2"),
        "{said}"
    );
    assert!(!said.contains("rank 2 waits"), "the dead do not wait: {said}");
    assert!(begun.elapsed() < PATIENCE);
}

#[test]
fn a_panicking_rank_is_named_with_its_op_and_those_that_wait() {
    for (way, ranks) in WAYS {
        let (code, said) = fails(&format!("{SMALL} {way} --inject panic:1"));
        assert_eq!(code, 2, "{way}: {said}");
        assert!(said.contains("Error: run: rank 1 panicked in "), "{way}: {said}");
        for rank in (0..ranks).filter(|r| *r != 1) {
            assert!(said.contains(&format!("rank {rank} waits in ")), "{way}: {said}");
        }
    }
}

#[test]
fn another_plan_is_refused_at_the_start() {
    let (code, said) = fails(&format!("{SMALL} --dp 3 --inject other-plan:1"));
    assert_eq!(code, 2, "{said}");
    assert!(said.contains("has plan ") && said.contains("rank 1") && said.contains("the same file"), "{said}");
}

#[test]
fn a_deadlock_names_every_rank_its_op_and_its_peer() {
    for (way, ranks) in WAYS {
        let (code, said) = fails(&format!("{SMALL} {way} --inject deadlock:1"));
        assert_eq!(code, 2, "{way}: {said}");
        assert!(said.contains("deadlock: ") && said.contains("after its peers have ended theirs"), "{way}: {said}");
        for rank in 0..ranks {
            assert!(said.contains(&format!("rank {rank} waits in ")), "{way}: {said}");
        }
        assert!(said.contains("ranks [1]") || said.contains("for rank 1 to "), "{way}: {said}");
    }
}

/// A plan in a file whose ranks wait in a circle is refused before it runs, with the circle. (What the executor does
/// with one that nobody checked is tested beside it.)
#[test]
fn a_plan_file_that_waits_in_a_circle_is_refused_with_the_circle() {
    let dir = tempfile::tempdir().unwrap();
    let model = LlmSpec::find("tiny").unwrap();
    let documents = Documents::default();
    let work = Workload { seq_len: 32, global_batch: 4, micro_batch: 1, dtype: Dtype::F32, documents };
    let engine = Engine::Sm { ctas: 1 };
    let par = Parallelism { pp: 2, ..Parallelism::default() };
    let mut plan = build(&model, &work, &par, Engines { p2p: engine, collective: engine }).unwrap();
    plan.save(&dir.path().join("sound.json")).unwrap();
    // 1F1B over one lane for both ways of a link.
    for op in plan.programs.iter_mut().flat_map(|p| &mut p.ops).filter(|op| op.lane == Some(2)) {
        op.lane = Some(1);
    }
    plan.save(&dir.path().join("circle.json")).unwrap();
    let run = |file: &str| {
        let line = format!("run --plan {file} --on cpu");
        let output = ended(command(dir.path(), &line).spawn().unwrap(), &line);
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(run("sound.json").0, 0);
    let (code, said) = run("circle.json");
    assert_eq!(code, 2, "{said}");
    for words in [
        "deadlock: rank 0 waits in recv_dx.0.0 for rank 1; rank 1 waits in recv_x.0.1 for rank 0",
        "In a circle, each waits for the next: rank 0's ",
        "rank 0's send_x.0.1",
        "rank 1's send_dx.0.0",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

/// A slow link is no dead rank, and a message that it lost is missed all the same.
#[test]
fn faults_are_found_on_slow_links_too() {
    let (code, said) = fails(&format!("{SMALL} --ring 2 --throttle 0.1,100 --inject lost-message"));
    assert!(code == 2 && said.contains("deadlock: ") && said.contains("for rank 0 to send"), "{said}");
}

#[test]
fn faults_that_cannot_be_are_refused() {
    for (flags, why) in [
        ("--inject dead-rank", "no peers"),
        ("--ring 2 --inject panic:7", "ranks 0 to 1"),
        ("--inject flood", "lost-message, dead-rank"),
        ("--throttle 0,1", "lets nothing through"),
        ("--throttle fast", "bandwidth,latency"),
    ] {
        let (code, said) = fails(&format!("{SMALL} {flags}"));
        assert!(code == 2 && said.contains(why), "{flags}: {said}");
    }
    let (code, said) = fails("compare --model tiny --seq-len 32 --ring 2 --throttle 1,1");
    assert!(code == 2 && said.contains("--throttle") && said.contains("--profile"), "{said}");
}

#[test]
fn steps_before_the_fault_stay() {
    let dir = tempfile::tempdir().unwrap();
    let line = format!("{SMALL} --ring 2 --steps 3 --out rows.csv --inject panic");
    let output = ended(command(dir.path(), &line).spawn().unwrap(), &line);
    assert_eq!(output.status.code(), Some(2));
    let rows = fs::read_to_string(dir.path().join("rows.csv")).unwrap();
    assert_eq!(rows.lines().count(), 3, "a header and two steps: {rows}");
}

/// A vocabulary that no machine holds: refused with both numbers, before any of it is asked for.
#[test]
fn memory_is_counted_before_it_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/llm/tiny.json");
    let mut config: serde_json::Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    config["vocab_size"] = 1_000_000_000u64.into();
    fs::write(dir.path().join("wide.json"), config.to_string()).unwrap();
    let line = "run --model wide.json --seq-len 2";
    let output = ended(command(dir.path(), line).spawn().unwrap(), line);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("memory: 1 ranks need ") && said.contains("this machine has "), "{said}");
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

fn lines(path: &Path) -> usize {
    fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

/// Starts a command, and ends it from outside when a file has so many lines; whether it had more to do. Not by SIGINT,
/// which a process that a shell put into the background does not hear.
fn interrupted(dir: &Path, line: &str, file: &str, at_least: usize) -> bool {
    let child = command(dir, line).spawn().unwrap();
    let begun = Instant::now();
    while lines(&dir.join(file)) < at_least {
        assert!(begun.elapsed() < PATIENCE, "{line} writes nothing");
        std::thread::sleep(Duration::from_millis(2));
    }
    signal(&child, "-TERM");
    !ended(child, line).status.success()
}

#[test]
fn an_interrupted_run_leaves_the_steps_it_did() {
    let dir = tempfile::tempdir().unwrap();
    assert!(interrupted(dir.path(), &format!("{SMALL} --ring 2 --steps 100000 --out rows.csv"), "rows.csv", 4));
    let text = fs::read_to_string(dir.path().join("rows.csv")).unwrap();
    let columns = text.lines().next().unwrap().split(',').count();
    let rows: Vec<&str> = text.lines().skip(1).collect();
    assert!(rows.len() >= 3 && text.ends_with('\n'));
    for (i, row) in rows.iter().enumerate() {
        assert!(row.split(',').count() == columns && row.starts_with(&format!("{},", i + 1)), "row {i}: {row}");
    }
}

#[test]
fn an_interrupted_sweep_goes_on_where_it_was() {
    const SWEEP: &str =
        "sweep --gpus 64 --seq-len 8K,16K,32K,64K,128K --tokens-per-step 1M --ulysses 1,2,4,8 --ring 1,2,4,8";
    let dir = tempfile::tempdir().unwrap();
    let whole = format!("{SWEEP} --out whole");
    assert!(ended(command(dir.path(), &whole).spawn().unwrap(), &whole).status.success());
    let file = |study: &str| dir.path().join(study).join("rows.csv");
    let torn = format!("{SWEEP} --out torn");
    // On a busy machine it may be done before it is asked to stop.
    let stopped = (0..50).any(|_| {
        fs::remove_dir_all(dir.path().join("torn")).unwrap_or_default();
        interrupted(dir.path(), &torn, "torn/rows.csv", 5)
    });
    assert!(stopped, "{torn} was not interrupted");
    let (left, all) = (lines(&file("torn")), lines(&file("whole")));
    assert!(left >= 5, "{left} of {all} lines");
    assert!(ended(command(dir.path(), &torn).spawn().unwrap(), &torn).status.success());
    assert!(fs::read(file("torn")).unwrap() == fs::read(file("whole")).unwrap());
}

/// What was measured is a profile if every shape was timed once; otherwise it is kept to go on from, and that is said.
#[test]
fn an_interrupted_calibration_leaves_a_profile_or_says_that_it_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let line = "calibrate --quick --out profile.json";
    let child = command(dir.path(), line).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    signal(&child, "-INT");
    let output = ended(child, line);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("interrupted"), "{said}");
    let written = dir.path().join("profile.json").exists();
    assert_eq!(written, !said.contains("no profile is written"), "{said}");
    assert!(written || said.contains("profile.rows.jsonl"), "{said}");
    if written {
        let (code, said) = (0, "validate --profile profile.json --model tiny --seq-len 32 --ring 2 --repeat 1");
        assert_eq!(ended(command(dir.path(), said).spawn().unwrap(), said).status.code(), Some(code));
    }
}

#[test]
fn an_interrupted_validation_has_the_figures_of_the_runs_it_made() {
    let dir = tempfile::tempdir().unwrap();
    let line = "calibrate --tiny --out profile.json";
    assert!(ended(command(dir.path(), line).spawn().unwrap(), line).status.success());
    let line = "validate --profile profile.json --model tiny --seq-len 1024 --ring 2 --repeat 1000 --out found.json";
    // Until it has made a run, which takes longer on a busy machine.
    let found = (1..6).find_map(|wait| {
        let child = command(dir.path(), line).spawn().unwrap();
        std::thread::sleep(Duration::from_secs(1 << wait));
        signal(&child, "-INT");
        let output = ended(child, line);
        assert_eq!(output.status.code(), Some(2));
        fs::read_to_string(dir.path().join("found.json")).ok()
    });
    let found: serde_json::Value = serde_json::from_str(&found.expect("a run in half a minute")).unwrap();
    assert!(found["error"].as_str().unwrap().contains("interrupted"), "{found}");
    assert!(found["repeats"].as_u64().is_some_and(|n| (1..1000).contains(&n)), "{found}");
}
