//! Helps, and the README's table, are what the program takes.

use crate::program::{folder, golden, succeeds};
use std::fs;
use std::path::Path;

const COMMANDS: [&str; 20] = [
    "checkpoint",
    "goodput",
    "sweep",
    "search",
    "crossover",
    "longest",
    "estimate",
    "simulate",
    "attention",
    "dispatch",
    "plan",
    "run",
    "compare",
    "calibrate",
    "validate",
    "selftest",
    "published",
    "plot",
    "collective",
    "cluster",
];

#[test]
fn every_help_has_an_example_and_is_as_it_was() {
    let dir = folder();
    let mut all = succeeds(dir.path(), "--help");
    for command in COMMANDS {
        let help = succeeds(dir.path(), &format!("{command} --help"));
        assert!(help.contains(&format!("Example: foretrain {command}")), "{help}");
        all.push_str(&format!("\n==== foretrain {command} --help\n\n{help}"));
    }
    golden("help.txt", &all);
    assert!(succeeds(dir.path(), "--version").starts_with("foretrain "));
}

/// The commands of the README's table are what the program takes.
#[test]
fn the_readme_tells_the_truth() {
    let dir = folder();
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let examples: Vec<&str> = readme
        .lines()
        .filter(|l| l.starts_with("| `"))
        .filter_map(|l| l.rsplit('`').nth(1))
        .filter_map(|l| l.strip_prefix("foretrain "))
        .collect();
    // All but `selftest`, which needs a GPU.
    assert!(examples.len() >= COMMANDS.len() - 1, "{examples:?}");
    // `plan` writes what `run` and `compare` read; the default sweep is another test's and the CI's affair, and so
    // is measuring a machine.
    let elsewhere = ["sweep", "published", "plot", "calibrate", "validate"];
    for line in examples.iter().filter(|l| !elsewhere.iter().any(|command| l.starts_with(command))) {
        succeeds(dir.path(), line);
    }
}
