//! `foretrain selftest`: are the kernels of this machine's GPU right, and how fast are they?

use super::run::On;
use super::{Answer, Output};
use crate::error::{Error, Result};
use crate::exec::cuda::device::Device;
use crate::exec::cuda::driver::{self, Cuda};
use crate::exec::cuda::selftest::speed::{self, Speed};
use crate::exec::cuda::selftest::{Verdict, cases, check, unknown};
use crate::report::human::{Table, decimal, seconds};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args)]
#[command(after_help = "Example: foretrain selftest --on cuda --json --out selftest.json\n         \
                        foretrain selftest --on cuda --group attention_forward --seed 5\n         \
                        foretrain selftest --on cuda --speed --repeat 50\n\n\
    Every kernel runs on random numbers, what it writes being NaN before, and is held to the CPU's in f64: an error is the\n\
    largest difference as a part of the largest number. A kernel that fails ends neither the others nor, but for the exit\n\
    code, the command. Kernels are compiled by NVRTC and kept in FORETRAIN_CACHE [~/.cache/foretrain].")]
pub struct Flags {
    /// What to test
    #[arg(long, value_enum, default_value = "cuda")]
    on: On,
    /// Which of the machine's GPUs
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Only this group of kernels
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Draws the numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Also time the kernels that decide a step, at shapes of real layers
    #[arg(long)]
    speed: bool,
    /// Launches of each that is timed
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(3..=1000))]
    repeat: u32,
    #[command(flatten)]
    output: Output,
    /// Write the JSON to this file, too
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Serialize)]
struct Found {
    gpu: String,
    arch: String,
    seed: u64,
    wrong: usize,
    verdicts: Vec<Verdict>,
    speeds: Vec<Speed>,
    /// What could not be timed, and why.
    not_timed: Vec<String>,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    if flags.on == On::Cpu {
        let why = "the CPU's kernels are what others are held to; give --on cuda";
        return Err(Error::spec("selftest", "--on", why));
    }
    let groups: Vec<&str> = match flags.group.as_deref() {
        Some(name) if cases::of_group(name).is_empty() => return Err(unknown(name)),
        Some(name) => vec![name],
        None => cases::groups().collect(),
    };
    driver::count()?;
    let mut cuda = Cuda::open(&[flags.device])?;
    let mut found = Found {
        gpu: cuda.name(0),
        arch: format!("sm_{}", cuda.arch(0)),
        seed: flags.seed,
        wrong: 0,
        verdicts: vec![],
        speeds: vec![],
        not_timed: vec![],
    };
    for group in groups {
        for case in cases::of_group(group) {
            let verdicts = check(&mut cuda, &case, flags.seed);
            let broken = verdicts.iter().any(|v| v.error.is_none() && v.seconds == 0.0);
            found.verdicts.extend(verdicts);
            // After an illegal access a context is good for nothing more.
            if broken {
                drop(cuda);
                cuda = Cuda::open(&[flags.device])?;
            }
        }
        cuda.clear()?;
    }
    if flags.speed {
        time(&mut cuda, flags.repeat as usize, &mut found)?;
    }
    found.wrong = found.verdicts.iter().filter(|v| v.wrong.is_some()).count();
    let error = (found.wrong > 0).then(|| {
        let why = format!("{} of {} kernels are wrong", found.wrong, found.verdicts.len());
        Error::device("selftest", why)
    });
    Answer::with_error(render(&found), &found, error).also_to(flags.out.as_deref())
}

fn time(cuda: &mut Cuda, repeat: usize, found: &mut Found) -> Result<()> {
    for timed in speed::all() {
        match speed::time(cuda, &timed, repeat) {
            Ok(speed) => found.speeds.push(speed),
            Err(error) => found.not_timed.push(format!("{}: {error}", timed.name)),
        }
        cuda.clear()?;
    }
    for bytes in [1 << 16, 1 << 20, 1 << 24, 1 << 30] {
        found.speeds.push(speed::copy(cuda, bytes, repeat)?);
        cuda.clear()?;
    }
    Ok(())
}

fn render(found: &Found) -> String {
    let mut table = Table::new("<<>>><");
    table.row(["group", "kernel", "rank", "error", "allowed", ""]);
    for v in &found.verdicts {
        table.row([
            v.group.to_string(),
            v.kernel.into(),
            v.rank.to_string(),
            v.error.map_or("-".into(), |e| format!("{e:.1e}")),
            format!("{:.1e}", v.tolerance),
            v.wrong.clone().unwrap_or_default(),
        ]);
    }
    let mut text = format!("{}, {}, seed {}\n\n{}", found.gpu, found.arch, found.seed, table.render("  "));
    if !found.speeds.is_empty() {
        let mut table = Table::new("<>>>>");
        table.row(["kernel", "median", "spread", "FLOP/s", "bytes read and written"]);
        for s in &found.speeds {
            let spread = format!("{:.1} %", 100.0 * s.spread / s.seconds);
            let [flops, bytes] = [decimal(s.flops_per_s, "FLOP/s"), decimal(s.bytes_per_s, "B/s")];
            table.row([s.name.clone(), seconds(s.seconds), spread, flops, bytes]);
        }
        text.push_str(&format!("\n{}", table.render("  ")));
    }
    found.not_timed.iter().for_each(|why| text.push_str(&format!("not timed: {why}\n")));
    format!("{text}\n{} of {} are wrong\n", found.wrong, found.verdicts.len())
}
