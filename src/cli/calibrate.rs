//! `foretrain calibrate`: measures the machine at hand and writes its profile; or reads what others have measured.

mod links;

use super::interrupt::Interrupt;
use super::run::On;
use super::{Answer, Output, pretty, write_file};
use crate::calibrate::{self, Effort};
use crate::device::Profile;
use crate::device::curve::Curve;
use crate::error::{Error, Result};
use crate::report::human::{Table, decimal, seconds};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args)]
#[command(after_help = "Example: foretrain calibrate --on cpu --quick --out profile.json\n         \
                        foretrain validate --on cpu --profile profile.json\n         \
                        foretrain calibrate --from-nccl-tests all_reduce.log all_gather.json --cluster dgx-h100 --out mine.json\n         \
                        foretrain estimate --cluster mine.json --gpus 64\n\n\
    The profile has every time that was measured, what was fitted to them and what the fit leaves over. Commands that\n\
    predict read it by `--profile profile.json`. Ctrl-C leaves the profile of what was measured until then. Let the machine be idle: what others do on it is measured, too.\n\n\
    Of nccl-tests every log becomes one to three lines, latency + bytes / bandwidth, of its operation among its GPUs; the\n\
    written cluster is the given one with them. Operation, GPUs and nodes are those that the log names.")]
pub struct Flags {
    /// What to measure
    #[arg(long, value_enum, default_value = "cpu")]
    on: On,
    /// Fewer shapes and runs, in less than 20 s instead of 3 min
    #[arg(long)]
    quick: bool,
    /// Least of all, in some seconds: to try the command out
    #[arg(long, hide = true, conflicts_with = "quick")]
    tiny: bool,
    #[command(flatten)]
    links: links::Flags,
    /// Write the profile, or the cluster with what was measured, to this file [default: profile.json; no cluster]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

impl Flags {
    fn effort(&self) -> Effort {
        match (self.tiny, self.quick) {
            (true, _) => Effort::TINY,
            (_, true) => Effort::QUICK,
            _ => Effort::FULL,
        }
    }

    /// What the profile says it came from: no paths, which are nobody's business.
    fn command(&self) -> String {
        let how = match (self.tiny, self.quick) {
            (true, _) => " --tiny",
            (_, true) => " --quick",
            _ => "",
        };
        format!("foretrain calibrate --on cpu{how}")
    }
}

pub fn run(flags: &Flags) -> Result<Answer> {
    if !flags.links.from_nccl_tests.is_empty() {
        return links::run(&flags.links, flags.out.as_deref());
    }
    let On::Cpu = flags.on;
    let out = flags.out.clone().unwrap_or_else(|| "profile.json".into());
    let bar = bar();
    let progress = |done: f64, what: &'static str| {
        bar.set_position((done * 1000.0) as u64);
        bar.set_message(what);
    };
    let interrupt = Interrupt::watch()?;
    let found = calibrate::cpu_until(flags.effort(), &flags.command(), &progress, &|| interrupt.asked());
    bar.finish_and_clear();
    let (profile, stopped) = found?;
    write_file(&out, pretty(&profile).as_bytes())?;
    let text = format!("{}\nwrote {}\n", render(&profile), out.display());
    let why = "interrupted: the profile is that of the runs that were made; calibrate again for a better one";
    let error = stopped.then(|| Error::device("calibrate", why));
    Ok(Answer::with_error(text, &Found::new(&profile, out.display().to_string()), error))
}

/// Shown on a terminal only.
fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {percent:>3} % {elapsed} {msg}").expect("a fixed template");
    ProgressBar::new(1000).with_style(style)
}

#[derive(Serialize)]
struct Found<'a> {
    profile: String,
    machine: &'a crate::device::measured::MachineName,
    kernels: usize,
    points: usize,
    best_gemm_flops_per_s: f64,
    worst_residual_sd: f64,
}

impl<'a> Found<'a> {
    fn new(profile: &'a Profile, path: String) -> Found<'a> {
        let curves = || profile.kernels.values();
        Found {
            profile: path,
            machine: &profile.machine,
            kernels: profile.kernels.len(),
            points: curves().map(|c| c.points.len()).sum(),
            best_gemm_flops_per_s: best_gemm(profile),
            worst_residual_sd: curves().map(|c| c.residual_sd).fold(0.0, f64::max),
        }
    }
}

/// Of products that were timed, 2 m n k in a second.
fn best_gemm(profile: &Profile) -> f64 {
    let products = profile.kernels.iter().filter(|(name, _)| name.starts_with("matmul")).flat_map(|(_, c)| &c.points);
    products.map(|p| 2.0 * p.size.iter().product::<f64>() / p.seconds).fold(0.0, f64::max)
}

fn render(profile: &Profile) -> String {
    let (machine, threads) = (&profile.machine, &profile.threads);
    let mut table = Table::new("<>");
    table.row(["fastest product", &decimal(best_gemm(profile), "FLOP/s")]);
    let message = 1 << 20;
    let copied = |curve: &Curve| decimal(message as f64 / curve.at(&[f64::from(message)]).0, "B/s");
    table.row(["a message of 1 MiB: copied out", &copied(&threads.post)]);
    table.row(["copied in", &copied(&threads.take)]);
    table.row(["added to what is there", &copied(&threads.add)]);
    table.row(["a thread that waits wakes up in", &seconds(threads.wake_s)]);
    table.row(["from an op to the next", &seconds(threads.op_s)]);
    let crowded = [threads.crowded.gemm, threads.crowded.attention, threads.crowded.memory];
    for (what, factor) in ["products", "attention", "memory-bound"].iter().zip(crowded) {
        table.row([&format!("{what} while all cores are busy"), &format!("{factor:.2} x")]);
    }
    format!(
        "{}, {} cores, {}\n\n{}\n{}",
        machine.cpu,
        machine.cores,
        profile.date,
        table.render("  "),
        curves(profile).render("  ")
    )
}

/// What was timed, and how far off each time is when it is predicted from the others.
fn curves(profile: &Profile) -> Table {
    let mut table = Table::new("<>>>>");
    table.row(["kernel", "sizes", "runs spread by", "residual", "95 % within"]);
    for (name, curve) in &profile.kernels {
        let spread = curve.points.iter().map(|p| p.spread).sum::<f64>() / curve.points.len() as f64;
        table.row([
            name.clone(),
            curve.points.len().to_string(),
            format!("{:.1} %", 100.0 * spread),
            format!("{:.1} %", 100.0 * curve.residual_sd),
            format!("x {:.2}", curve.interval_95),
        ]);
    }
    table
}
