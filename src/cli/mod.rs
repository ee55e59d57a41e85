//! The command line. A subcommand a file, flags that several have in `flags`; nothing below this module sees a flag.
//!
//! Every command gives an `Answer`: text for people, JSON for scripts. What goes wrong is said on stderr
//! (with `--json` on stdout, as `{"error": ..}`), and the exit code is 2.

mod attention;
mod calibrate;
mod checkpoint;
mod chosen;
mod cluster;
mod collective;
mod compare;
mod config;
mod crossover;
mod dispatch;
mod estimate;
mod fitting;
mod flags;
mod goodput;
mod grouped;
mod interrupt;
mod issued;
mod longest;
mod options;
mod plan;
mod plot;
mod progress;
mod published;
mod run;
mod search;
mod selftest;
mod simulate;
mod software;
mod sweep;
mod validate;

use crate::error::{Error, Result};
use crate::export::chrome;
use crate::timeline::{Arrow, Timeline};
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use serde::Serialize;
use serde_json::json;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Parser)]
#[command(
    name = "foretrain",
    version,
    about = "Predicts how fast a large-model training run will go, and runs the same plan."
)]
#[command(after_help = "Example: foretrain sweep\n         foretrain help estimate")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Costs a grid of configurations into a folder: rows.csv and the picture drawn from it.
    Sweep(sweep::Flags),
    /// Which parallelism is fastest? Searches all ways to split a model over a cluster, and says what other choices cost.
    Search(search::Flags),
    /// Ulysses or ring? Costs attention both ways over ranks, lengths, KV heads and links, and draws the map.
    Crossover(crossover::Flags),
    /// How long may a sequence be? Finds the longest that fits, by way and by what saves memory.
    Longest(longest::Flags),
    /// Costs one configuration and shows where time and memory go.
    Estimate(estimate::Flags),
    /// Plays one configuration event by event: who waits for whom, and what shares a link.
    Simulate(simulate::Flags),
    /// Costs one attention operation over the ranks that share it, and says where the time goes.
    Attention(attention::Flags),
    /// Costs one exchange of a mixture-of-experts layer, there and back: bytes by link, times, what limits it.
    Dispatch(dispatch::Flags),
    /// Builds the plan of one configuration, checks it and writes it.
    Plan(plan::Flags),
    /// Runs a plan on threads or GPUs and holds what it counts against what the plan says.
    Run(run::Flags),
    /// Costs a plan and runs it, and joins the two op by op.
    Compare(compare::Flags),
    /// Measures the machine at hand for those that predict; or makes logs of nccl-tests into link curves.
    Calibrate(calibrate::Flags),
    /// Predicts a plan by a profile, runs it, and says op by op where the prediction is wrong.
    Validate(validate::Flags),
    /// Holds the kernels of this machine's GPU against the CPU's, and times them.
    Selftest(selftest::Flags),
    /// Lists the choices of the implementation that `--options` takes.
    Options(options::Flags),
    /// Predicts published measurements and says how far off it is.
    Published(published::Flags),
    /// Prints a table of a collective as nccl-tests would, analytic beside simulated.
    Collective(collective::Flags),
    /// Draws a cluster, or makes one of what NCCL or nvidia-smi say of a machine.
    Cluster(cluster::Flags),
    /// Says what a checkpoint of `run --save` holds, and whether it is whole.
    Checkpoint(checkpoint::Flags),
    /// What failures and checkpoints leave of a training run, and how often to save.
    Goodput(goodput::Flags),
    /// Draws the pictures of a study again from its rows.csv.
    Plot(plot::Flags),
}

/// What a command found.
struct Answer {
    text: String,
    json: String,
    /// Found, but not well: the answer is printed, then the error.
    error: Option<Error>,
}

/// Notes beside an answer that has none of its own.
#[derive(Serialize)]
struct WithNotes<'a, T> {
    #[serde(flatten)]
    answer: &'a T,
    notes: &'a [String],
}

/// An error beside whatever else there is to say.
#[derive(Serialize)]
struct WithError<'a, T> {
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(flatten)]
    answer: &'a T,
}

impl Answer {
    fn new(text: String, json: &impl Serialize) -> Answer {
        Answer::with_error(text, json, None)
    }

    fn with_error(text: String, json: &impl Serialize, error: Option<Error>) -> Answer {
        let json = pretty(&WithError { error: error.as_ref().map(Error::to_string), answer: json });
        Answer { text, json, error }
    }

    /// Writes the JSON into a file, too. Where that fails the answer is printed all the same: it may have taken hours.
    fn also_to(mut self, file: Option<&Path>) -> Result<Answer> {
        let Some(path) = file else { return Ok(self) };
        match write_file(path, self.json.as_bytes()) {
            Ok(()) => self.text.push_str(&format!("\nwrote {}\n", path.display())),
            Err(error) => {
                if self.error.is_none() {
                    let said = json!(error.to_string());
                    self.json = self.json.replacen("{\n", &format!("{{\n  \"error\": {said},\n"), 1);
                }
                self.error = Some(error);
            }
        }
        Ok(self)
    }
}

/// Parses the words of the command line, runs the command, prints.
pub fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let json = words.iter().any(|w| w == "--json");
    let cli = match Cli::try_parse_from(&words) {
        Ok(cli) => cli,
        Err(e) => return usage(&e, &words, json),
    };
    let answer = command(cli.command);
    let answer = answer.unwrap_or_else(|error| Answer::with_error(String::new(), &json!({}), Some(error)));
    let printed = to_stdout(if json { &answer.json } else { &answer.text });
    if let Some(error) = answer.error.as_ref().filter(|_| !json) {
        eprintln!("Error: {error}");
    }
    ended(answer.error.is_none(), printed)
}

/// The exit code, with a word on stderr of an answer that nobody could be given.
fn ended(well: bool, printed: Result<()>) -> ExitCode {
    if let Err(error) = &printed {
        eprintln!("Error: {error}");
    }
    if well && printed.is_ok() { ExitCode::SUCCESS } else { ExitCode::from(2) }
}

fn command(command: Command) -> Result<Answer> {
    match command {
        Command::Sweep(flags) => sweep::run(&flags),
        Command::Search(flags) => search::run(&flags),
        Command::Crossover(flags) => crossover::run(&flags),
        Command::Longest(flags) => longest::run(&flags),
        Command::Estimate(flags) => estimate::run(&flags),
        Command::Simulate(flags) => simulate::run(&flags),
        Command::Attention(flags) => attention::run(&flags),
        Command::Dispatch(flags) => dispatch::run(&flags),
        Command::Plan(flags) => plan::run(&flags),
        Command::Run(flags) => run::run(&flags),
        Command::Compare(flags) => compare::run(&flags),
        Command::Calibrate(flags) => calibrate::run(&flags),
        Command::Validate(flags) => validate::run(&flags),
        Command::Selftest(flags) => selftest::run(&flags),
        Command::Options(flags) => options::run(&flags),
        Command::Published(flags) => published::run(&flags),
        Command::Collective(flags) => collective::run(&flags),
        Command::Cluster(flags) => cluster::run(&flags),
        Command::Checkpoint(flags) => checkpoint::run(&flags),
        Command::Goodput(flags) => goodput::run(&flags),
        Command::Plot(flags) => plot::run(&flags),
    }
}

/// Help and version are no errors; what clap refuses is said as any other error.
fn usage(e: &clap::Error, words: &[OsString], json: bool) -> ExitCode {
    if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        return ended(true, to_stdout(&e.to_string()));
    }
    let text = e.to_string();
    let text = match e.kind() {
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => format!("a command is missing\n\n{text}"),
        ErrorKind::UnknownArgument => below_zero(&text, words).unwrap_or_else(|| refused(&text)),
        _ => refused(&text),
    };
    if json {
        return ended(false, to_stdout(&pretty(&json!({"error": text.trim_end()}))));
    }
    eprint!("Error: {text}");
    ExitCode::from(2)
}

fn refused(text: &str) -> String {
    text.strip_prefix("error: ").unwrap_or(text).to_string()
}

/// What clap takes for an unknown flag is a number below zero, of which no flag has any.
fn below_zero(text: &str, words: &[OsString]) -> Option<String> {
    let is_number = |word: &str| {
        word.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit() || c == '.'))
    };
    if !text.split('\'').nth(1).is_some_and(is_number) {
        return None;
    }
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    let at = words.iter().position(|word| is_number(word)).filter(|at| *at > 0)?;
    let (flag, value) = (&words[at - 1], &words[at]);
    Some(format!("invalid value '{value}' for '{flag}': it is below zero; leave out the minus\n"))
}

/// Whoever reads may stop early (`| head`): that is no failure of ours.
fn to_stdout(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(why) if why.kind() != std::io::ErrorKind::BrokenPipe => {
            let why = format!("could not be written: {why}; make room there, or send it elsewhere");
            Err(Error::device("standard output", why))
        }
        _ => Ok(()),
    }
}

fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("JSON from plain data") + "\n"
}

/// Writes a file, making its folder if need be.
fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    if let Some(dir) = path.parent().filter(|d| !d.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    }
    std::fs::write(path, bytes).map_err(Error::io(path))
}

/// Errors: a file that long work is to write last cannot be written there. What it has stays.
fn will_hold(path: &Path) -> Result<()> {
    if let Some(dir) = path.parent().filter(|d| !d.as_os_str().is_empty()) {
        std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    }
    let new = !path.exists();
    std::fs::OpenOptions::new().append(true).create(true).open(path).map_err(Error::io(path))?;
    // A link that leads to what is not there yet stays.
    let remove = || path.canonicalize().and_then(std::fs::remove_file).map_err(Error::io(path));
    if new { remove() } else { Ok(()) }
}

/// Timelines as one Chrome trace.
fn trace(path: &Path, timelines: &[(&str, &Timeline)]) -> Result<()> {
    trace_with(path, timelines, &[])
}

/// With messages between ranks of the first as arrows.
fn trace_with(path: &Path, timelines: &[(&str, &Timeline)], arrows: &[Arrow]) -> Result<()> {
    write_file(path, b"")?;
    let file = std::fs::File::create(path).map_err(Error::io(path))?;
    let mut out = std::io::BufWriter::new(file);
    chrome::write_with(&mut out, timelines, arrows).and_then(|()| out.flush()).map_err(Error::io(path))
}

fn list_of(paths: &[PathBuf]) -> Vec<String> {
    paths.iter().map(|p| p.display().to_string()).collect()
}
