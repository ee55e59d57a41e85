//! `foretrain calibrate`: measures the machine at hand and writes its profile; or reads what others have measured.

mod links;

use super::flags::Output;
use super::interrupt::Interrupt;
use super::progress::bar;
use super::run::{On, one_process};
use super::{Answer, pretty, write_file};
use crate::calibrate::{self, Effort, gpu};
use crate::compare::stats::quantile;
use crate::device::curve::Curve;
use crate::device::measured::{GpuSide, slower};
use crate::device::{Profile, Threads};
use crate::error::{Error, Result};
use crate::exec::cuda::driver::{self, Cuda};
use crate::exec::cuda::fused::Attention;
use crate::exec::cuda::process;
use crate::plan::Plan;
use crate::report::human::{Table, decimal, seconds};
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};

#[derive(Args)]
#[command(after_help = "Example: foretrain calibrate --on cpu --quick --out profile.json\n         \
                        foretrain validate --on cpu --profile profile.json\n         \
                        foretrain calibrate --on cuda --out h200.json\n         \
                        foretrain calibrate --on cuda --plan mine.plan.json --out h200.json\n         \
                        foretrain calibrate --from-nccl-tests all_gather.log reduce_scatter.json --cluster dgx-h100 --out mine.json\n         \
                        foretrain estimate --cluster mine.json --gpus 64 --tp 8\n\n\
    The profile has every time that was measured, what was fitted to them and what the fit leaves over. Commands that\n\
    predict read it by `--profile profile.json`. Let the machine be idle: what others do on it is measured, too.\n\n\
    Every plan's times are kept beside the profile as it ends (profile.rows.jsonl): a calibration that was stopped goes\n\
    on from there, and on a CPU Ctrl-C leaves the profile of what was measured until then, if every shape was.\n\n\
    On cuda times are those of kernels inside of training steps, between CUDA events, one after the other on a GPU that\n\
    rests for as long as it works. How much slower they are without rest is noted, and what is predicted by the profile but\n\
    by validate is slower by it. With --plan, as `foretrain plan --out` writes them, kernels of a rank of each are timed at\n\
    their own shapes, first of all: others are interpolated between those of small models, and some are 5 to 10 % off by it.\n\n\
    Of nccl-tests every log becomes one to three lines, latency + bytes / bandwidth, of its operation among its GPUs; the\n\
    written cluster is the given one with them. Operation, GPUs and nodes are those that the log names, and what was measured\n\
    counts for groups of just as many GPUs on just as many nodes, for no others: logs of the 8 GPUs of a node count for --tp 8,\n\
    as above, and not for its gradients, among 8 GPUs on 8 nodes. `foretrain cluster --show mine.json` lists what counts.")]
pub struct Flags {
    /// What to measure
    #[arg(long, value_enum, default_value = "cpu")]
    on: On,
    /// Which of the machine's GPUs, on cuda
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Whose kernels do attention, on cuda: own, the project's; cudnn; best, cuDNN's if it is there, right and faster
    #[arg(long, value_name = "WHOSE")]
    attention: Option<Attention>,
    /// Time the kernels of these plans, too, on cuda: of a rank alone, at its true shapes
    #[arg(long, value_name = "FILE", num_args = 1..)]
    plan: Vec<PathBuf>,
    /// Fewer shapes and runs, in less than 20 s instead of 3 min; on cuda all take some 3 min, too
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
        let on = if self.on == On::Cuda { "cuda" } else { "cpu" };
        format!("foretrain calibrate --on {on}{how}")
    }
}

pub fn run(flags: &Flags) -> Result<Answer> {
    if !flags.links.from_nccl_tests.is_empty() {
        return links::run(&flags.links, flags.out.as_deref());
    }
    if flags.on == On::Cuda {
        process::alone()?;
    }
    let out = flags.out.clone().unwrap_or_else(|| "profile.json".into());
    let bar = bar(1000, "{percent:>3} % {elapsed} {msg}");
    let progress = |done: f64, what: &'static str| {
        bar.set_position((done * 1000.0) as u64);
        bar.set_message(what);
    };
    let interrupt = Interrupt::watch()?;
    let found = match flags.on {
        On::Cpu if flags.attention.is_some() => {
            let why = "is for GPUs; give --on cuda, or leave it out";
            return Err(Error::spec("the command line", "--attention", why));
        }
        On::Cpu if !flags.plan.is_empty() => {
            let why = "is for GPUs; give --on cuda, or leave it out";
            return Err(Error::spec("the command line", "--plan", why));
        }
        On::Cpu => {
            one_process()?;
            let rows = out.with_extension("rows.jsonl");
            let stop = || interrupt.asked();
            let found = calibrate::cpu_until(flags.effort(), &flags.command(), &progress, &stop, Some(&rows));
            if found.as_ref().is_ok_and(|(_, stopped)| !stopped) {
                // What was kept to go on from has gone into the profile.
                let _ = std::fs::remove_file(rows);
            }
            found
        }
        On::Cuda => {
            let plans = flags.plan.iter().map(|file| planned(file)).collect::<Result<_>>()?;
            driver::count()?;
            let mut cuda = Cuda::open(&[flags.device], Attention::Own)?;
            let arch = format!("sm_{}", cuda.arch(0));
            let rows = out.with_extension("rows.jsonl");
            let attention = flags.attention.unwrap_or_default();
            let job = gpu::Job { effort: flags.effort(), command: flags.command(), arch, rows, attention, plans };
            let profile = gpu::measure(&mut cuda, &job, &progress)?;
            // What was kept to go on from has gone into the profile.
            let _ = std::fs::remove_file(job.rows);
            Ok((profile, false))
        }
    };
    bar.finish_and_clear();
    let (profile, stopped) = found?;
    write_file(&out, pretty(&profile).as_bytes())?;
    let text = format!("{}\nwrote {}\n", render(&profile), out.display());
    let why =
        "interrupted: the profile is that of the runs that were made; start it again, and it goes on with the others";
    let error = stopped.then(|| Error::device("calibrate", why));
    Ok(Answer::with_error(text, &Found::new(&profile, out.display().to_string()), error))
}

/// A step that GPUs can do. Errors: what is no plan, or says not which rows go where.
fn planned(file: &Path) -> Result<Plan> {
    let plan = Plan::load(file)?;
    plan.model()?;
    if plan.routes.iter().any(|route| !route.is_listed()) {
        let why = "says how many rows go to each expert and not which; write it with --routing uniform";
        return Err(Error::spec(file.display(), "routes", why));
    }
    Ok(plan)
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
    let machine = &profile.machine;
    let mut table = Table::new("<>");
    table.row(["fastest product", &decimal(best_gemm(profile), "FLOP/s")]);
    match (&profile.threads, &profile.gpu) {
        (Some(threads), _) => of_threads(threads, &mut table),
        (None, Some(gpu)) => of_gpu(gpu, &mut table),
        _ => {}
    }
    format!(
        "{}, {}, {}\n\n{}\n{}",
        machine.cpu,
        if profile.gpu.is_some() { machine.system.clone() } else { format!("{} cores", machine.cores) },
        profile.date,
        table.render("  "),
        curves(profile).render("  ")
    )
}

fn of_gpu(side: &GpuSide, table: &mut Table) {
    for bytes in [1u64 << 20, 1 << 28] {
        let rate = bytes as f64 / side.copy.at(&[bytes as f64]).0;
        table.row([&format!("a copy of {} MiB inside its memory", bytes >> 20), &decimal(rate, "B/s")]);
    }
    if let Some(attention) = &side.attention {
        table.row(["attention by", &attention.by]);
        let rates =
            [(crate::exec::cuda::fused::OWN, attention.own_flops_per_s), ("a library", attention.library_flops_per_s)];
        for (who, [forward, backward]) in rates.into_iter().filter_map(|(who, rates)| Some((who, rates?))) {
            let both = [forward, backward].map(|rate| decimal(rate, "FLOP/s"));
            table.row([&format!("attention by {who}, forward and backward"), &both.join(", ")]);
        }
    }
    table.row(["from an empty kernel to the next", &seconds(side.launch_s)]);
    table.row(["the host hands one over in", &seconds(side.host_launch_s)]);
    if let Some(sustained) = side.sustained {
        table.row(["products and attention without rest", &format!("{sustained:.2} x")]);
    }
    if let Some(power) = &side.power {
        table.row(["nothing draws", &format!("{:.0} W", power.idle_w)]);
        for pressed in &power.pressed {
            let draws = format!("{:.0} W, then {:.2} x", pressed.watts, pressed.slower());
            table.row([&format!("{} without rest", pressed.kernel), &draws]);
        }
    }
    for condition in side.conditions.iter().filter(|condition| condition.when.ends_with(gpu::LEFT_OUT)) {
        table.row([&condition.when, &condition.says]);
    }
    let c = &side.beside_copies;
    for (what, factor) in [("products", c.gemm), ("attention", c.attention), ("memory-bound", c.memory)] {
        table.row([&format!("{what} beside copies"), &format!("{factor:.2} x")]);
    }
}

fn of_threads(threads: &Threads, table: &mut Table) {
    let message = 1 << 20;
    let copied = |curve: &Curve| decimal(message as f64 / curve.at(&[f64::from(message)]).0, "B/s");
    table.row(["a message of 1 MiB: copied out", &copied(&threads.alone.post)]);
    table.row(["copied in", &copied(&threads.alone.take)]);
    table.row(["added to what is there", &copied(&threads.alone.add)]);
    table.row(["a thread that waits sees a message in", &seconds(threads.notice_s)]);
    table.row(["one that sleeps wakes up in", &seconds(threads.wake_s)]);
    table.row(["from an op to the next", &seconds(threads.op_s)]);
}

/// How many times longer a kernel takes while all cores run the same: the median of its sizes.
fn beside(profile: &Profile, name: &str) -> Option<f64> {
    let (alone, beside) = (profile.kernels.get(name)?, profile.threads.as_ref()?.beside.kernels.get(name)?);
    let all: Vec<f64> = alone.points.iter().map(|p| slower(beside, alone, &p.size)).collect();
    Some(quantile(&all, 0.5))
}

/// What was timed, and how far off each time is when it is predicted from the others.
fn curves(profile: &Profile) -> Table {
    let mut table = Table::new("<>>>>>");
    table.row(["kernel", "sizes", "runs spread by", "residual", "95 % within", "all cores at it"]);
    for (name, curve) in &profile.kernels {
        let spread = curve.points.iter().map(|p| p.spread).sum::<f64>() / curve.points.len() as f64;
        table.row([
            name.clone(),
            curve.points.len().to_string(),
            format!("{:.1} %", 100.0 * spread),
            format!("{:.1} %", 100.0 * curve.residual_sd),
            format!("x {:.2}", curve.interval_95),
            beside(profile, name).map_or(String::new(), |times| format!("x {times:.2}")),
        ]);
    }
    table
}
