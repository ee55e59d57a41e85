//! Helps, and the README's table, are what the program takes.

use crate::program::{SECOND_OF_TWO, folder, golden, said_among, shipped, succeeds};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const COMMANDS: [&str; 21] = [
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
    "options",
];

#[test]
fn every_help_has_an_example_and_is_as_it_was() {
    let dir = folder();
    let mut all = succeeds(dir.path(), "--help");
    let list = all.split("Commands:\n").nth(1).and_then(|text| text.split("\n\n").next()).expect("a list");
    let listed = list.lines().filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help");
    assert_eq!(listed.collect::<BTreeSet<_>>(), BTreeSet::from(COMMANDS));
    for command in COMMANDS {
        let help = succeeds(dir.path(), &format!("{command} --help"));
        assert!(help.contains(&format!("Example: foretrain {command}")), "{help}");
        all.push_str(&format!("\n==== foretrain {command} --help\n\n{help}"));
    }
    golden("help.txt", &all);
    assert!(succeeds(dir.path(), "--version").starts_with("foretrain "));
}

/// The commands of the README's table are what the program takes, each as it stands there.
#[test]
fn every_command_of_the_readme_does_what_it_says() {
    let (dir, home) = (folder(), Path::new(env!("CARGO_MANIFEST_DIR")));
    let readme = fs::read_to_string(home.join("README.md")).unwrap();
    let rows = readme.lines().filter(|line| line.starts_with("| `")).map(|line| line.split('`').collect::<Vec<_>>());
    let rows: Vec<Vec<&str>> = rows.filter(|row| COMMANDS.contains(&row[1])).collect();
    assert_eq!(rows.iter().map(|row| row[1]).collect::<BTreeSet<_>>(), BTreeSet::from(COMMANDS));
    // The sweep goes on where the committed one ended, and of published runs a few will do.
    for (folder, files) in [("results/default", &["study.json", "rows.csv"][..]), ("traces/published", &[])] {
        fs::create_dir_all(dir.path().join(folder)).unwrap();
        for file in files.iter().map(|file| Path::new(folder).join(file)) {
            fs::copy(home.join(&file), dir.path().join(&file)).unwrap();
        }
    }
    let cases = "traces/published/training.json";
    let mut few = shipped(cases);
    few.as_array_mut().unwrap().truncate(3);
    fs::write(dir.path().join(cases), few.to_string()).unwrap();
    let mut ran = 0;
    for line in rows.iter().filter_map(|row| row[row.len() - 2].strip_prefix("foretrain ")) {
        if line.starts_with("calibrate") {
            // Takes a minute, and is another test's: of several processes it refuses what it has read, and a profile is there.
            let (code, _, err) = said_among(dir.path(), line, &SECOND_OF_TWO);
            assert!(code == 2 && err.contains("process 1 of the 2"), "{line}: {err}");
            fs::copy(home.join("traces/measured/cpu/profile.json"), dir.path().join("profile.json")).unwrap();
        } else {
            succeeds(dir.path(), line);
        }
        ran += 1;
    }
    // All but `selftest`, which needs a GPU.
    assert_eq!(ran, COMMANDS.len() - 1);
}
