//! `foretrain selftest`: are the kernels of this machine's GPU right, and how fast are they?

mod apart;

use super::Answer;
use super::flags::{JsonFile, Output};
use super::run::On;
use crate::error::{Error, Result};
use crate::exec::cuda::device::Device;
use crate::exec::cuda::driver::{self, Cuda};
use crate::exec::cuda::fused::{Attention, said};
use crate::exec::cuda::joined;
use crate::exec::cuda::process::{self, Process, environment};
use crate::exec::cuda::selftest::nccl::{self, Joined};
use crate::exec::cuda::selftest::speed::{self, Speed, Timed};
use crate::exec::cuda::selftest::{NCCL, Verdict, cases, check, compile, lacks, unknown};
use crate::report::human::{Table, decimal, seconds};
use apart::{Asked, Left};
use cases::Case;
use clap::Args;
use serde::Serialize;

#[derive(Args)]
#[command(after_help = "Example: foretrain selftest --on cuda --json --out selftest.json\n         \
                        foretrain selftest --on cuda --group attention_forward --seed 5 --attention cudnn\n         \
                        foretrain selftest --on cuda --speed --repeat 50\n         \
                        foretrain selftest --on cuda --group nccl\n\n\
    Every kernel runs on random numbers, what it writes being NaN before, and is held to the CPU's in f64: an error is the\n\
    largest difference as a part of the largest number. A kernel that fails ends neither the others nor, but for the exit\n\
    code, the command. The group nccl is of calls between the processes that torchrun, srun or mpirun have started, or of\n\
    one that is alone, and is not among the others. Kernels are compiled by NVRTC and kept in FORETRAIN_CACHE [~/.cache/foretrain].")]
pub struct Flags {
    /// What to test
    #[arg(long, value_enum, default_value = "cuda")]
    on: On,
    /// Which of the machine's GPUs
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// Whose kernels do attention: own, cudnn wherever it has a form of the mask, or best, cuDNN's where it is there
    #[arg(long, value_name = "WHOSE", default_value = "own")]
    attention: Attention,
    /// Only this group of kernels
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Draws the numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Also time the kernels that decide a step, at shapes of real layers
    #[arg(long)]
    speed: bool,
    /// Time only those whose names have this in them, as "product" or "causal 16384"
    #[arg(long, value_name = "TEXT", requires = "speed")]
    speed_of: Option<String>,
    /// Launches of each that is timed
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(3..=1000))]
    repeat: u32,
    /// Go on behind so many cases of the group: how a process goes on for one whose GPU is lost to it
    #[arg(long, value_name = "N", hide = true, requires = "group")]
    skip: Option<usize>,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    file: JsonFile,
}

#[derive(Serialize)]
struct Found {
    gpu: String,
    arch: String,
    /// Whose kernels did attention.
    attention: String,
    seed: u64,
    wrong: usize,
    verdicts: Vec<Verdict>,
    /// Kernels that this GPU or its libraries do not have, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_here: Vec<String>,
    speeds: Vec<Speed>,
    /// What could not be timed, and why.
    not_timed: Vec<String>,
    /// Cases of the group that were done when one of them broke the GPU's context, which another process goes on behind.
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped_after: Option<usize>,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    if flags.on == On::Cpu {
        let why = "the CPU's kernels are what others are held to; give --on cuda on a machine with an NVIDIA GPU";
        return Err(Error::spec("selftest", "--on", why));
    }
    if flags.group.as_deref() == Some(NCCL) {
        return between_processes(flags);
    }
    process::alone()?;
    let groups: Vec<&str> = match flags.group.as_deref() {
        Some(name) if cases::of_group(name).is_empty() => return Err(unknown(name)),
        Some(name) => vec![name],
        None => cases::groups().collect(),
    };
    let wanted = Wanted::new(flags.speed_of.as_deref().unwrap_or_default())?;
    driver::count().map_err(without_cpu)?;
    let mut cuda = Cuda::open(&[flags.device], flags.attention)?;
    let mut found = Found {
        gpu: cuda.name(0),
        arch: format!("sm_{}", cuda.arch(0)),
        attention: said(cuda.fused().as_deref()),
        seed: flags.seed,
        wrong: 0,
        verdicts: vec![],
        not_here: vec![],
        speeds: vec![],
        not_timed: vec![],
        stopped_after: None,
    };
    let left = all_cases(&mut cuda, &groups, flags, &mut found);
    if flags.speed && left.is_none() {
        time(&mut cuda, wanted, flags.repeat as usize, &mut found)?;
    }
    drop(cuda);
    if let Some(left) = left {
        go_on(left, flags, &mut found);
    }
    found.wrong = found.verdicts.iter().filter(|v| v.wrong.is_some()).count();
    let error = (found.wrong > 0).then(|| {
        let why = format!("{} of {} kernels are wrong", found.wrong, found.verdicts.len());
        Error::device("selftest", why)
    });
    Answer::with_error(render(&found), &found, error).also_to(flags.file.path())
}

/// The driver's remedy is for commands that run on the CPU as well, which has nothing to be tested here.
fn without_cpu(error: Error) -> Error {
    match error {
        Error::Device { op, why } if op == "cuda" && why.contains("--on cpu") => {
            let what = why.split(';').next().unwrap_or_default();
            Error::device(op, format!("{what}; run this where a GPU is, whose kernels are held to the CPU's"))
        }
        other => other,
    }
}

/// Runs all groups; where a kernel leaves the GPU good for nothing more, what is left.
fn all_cases(cuda: &mut Cuda, groups: &[&str], flags: &Flags, found: &mut Found) -> Option<Vec<Left>> {
    let all: Vec<(&str, Vec<Case>)> = groups.iter().map(|&group| (group, cases::of_group(group))).collect();
    compile(cuda, &all.iter().flat_map(|(_, cases)| cases.clone()).collect::<Vec<_>>());
    for (i, (group, cases)) in all.iter().enumerate() {
        for (c, case) in cases.iter().enumerate().skip(flags.skip.unwrap_or(0)) {
            let verdicts = match lacks(cuda, case) {
                Some(why) => {
                    let said = format!("{group}, {}: {why}", case.kernel.name());
                    if !found.not_here.contains(&said) {
                        found.not_here.push(said);
                    }
                    vec![]
                }
                None => check(cuda, case, flags.seed),
            };
            let failed = verdicts.iter().any(|v| v.error.is_none() && v.seconds == 0.0);
            found.verdicts.extend(verdicts);
            // What failed may be one kernel's own; where nothing can be waited for any more, it is everyone's.
            if (failed || c + 1 == cases.len()) && cuda.clear().is_err() {
                let behind = (c + 1 < cases.len()).then(|| Left { group: group.to_string(), skip: c + 1 });
                let others = all[i + 1..].iter().map(|(group, _)| Left { group: group.to_string(), skip: 0 });
                return Some(behind.into_iter().chain(others).collect());
            }
        }
    }
    None
}

/// What is left goes to processes of their own; one of those leaves it to whoever has started it.
fn go_on(left: Vec<Left>, flags: &Flags, found: &mut Found) {
    if flags.skip.is_some() {
        found.stopped_after = left.first().map(|left| left.skip);
        return;
    }
    if flags.speed {
        let why = "nothing: a kernel has broken the GPU's context; again with --speed and a --group that is well";
        found.not_timed.push(why.into());
    }
    let Flags { device, attention, seed, .. } = *flags;
    let said = apart::go_on(left, &Asked { device, attention, seed });
    found.verdicts.extend(said.verdicts);
    found.not_here.extend(said.not_here);
}

/// Numbers that each rank puts into a call.
const ELEMS: u64 = 4 << 20;

#[derive(Serialize)]
struct Between {
    gpu: String,
    rank: u32,
    ranks: u32,
    calls: Vec<Joined>,
}

/// Every process says what it found.
fn between_processes(flags: &Flags) -> Result<Answer> {
    let alone = Process { rank: 0, world: 1, local: flags.device, by: "nobody" };
    let process = process::of(&environment)?.unwrap_or(alone);
    let (mut cuda, meeting) = joined::open(&process, "selftest").map_err(without_cpu)?;
    let all = || meeting.gather(vec![]).and_then(|_| meeting.together());
    let done =
        nccl::check(&mut cuda, [process.rank, process.world], ELEMS, &all).and_then(|calls| all().map(|()| calls));
    let calls = done.inspect_err(|error| {
        meeting.fail(&error.to_string());
        cuda.abort();
    })?;
    let wrong = calls.iter().filter(|call| call.wrong.is_some()).count();
    let why = || Error::device("selftest", format!("{wrong} of {} calls are wrong", calls.len()));
    let error = (wrong > 0).then(why);
    let found = Between { gpu: cuda.name(0), rank: process.rank, ranks: process.world, calls };
    let mut table = Table::new("<>><");
    table.row(["call", "bytes a rank", "median", ""]);
    for call in &found.calls {
        let wrong = call.wrong.clone().unwrap_or_default();
        table.row([call.call.into(), call.bytes.to_string(), seconds(call.seconds), wrong]);
    }
    let note = if found.ranks == 1 { "one rank: copies inside its memory, and no link's time\n" } else { "" };
    let text = format!("{}, rank {} of {}\n{note}\n{}", found.gpu, found.rank, found.ranks, table.render("  "));
    Answer::with_error(text, &found, error).also_to(flags.file.path())
}

/// What is to be timed.
struct Wanted {
    kernels: Vec<Timed>,
    /// Bytes of each.
    copies: Vec<u64>,
}

impl Wanted {
    /// Everything that has `text` in its name. Errors: nothing has.
    fn new(text: &str) -> Result<Wanted> {
        let (kernels, copies) = (speed::all(), vec![1 << 16, 1 << 20, 1 << 24, 1 << 30]);
        let names =
            || kernels.iter().map(|timed| timed.name.clone()).chain(copies.iter().map(|&b| speed::copy_name(b)));
        if !names().any(|name| name.contains(text)) {
            let why = format!("{text:?} is in no name; known: {}", names().collect::<Vec<_>>().join(", "));
            return Err(Error::spec("selftest", "--speed-of", why));
        }
        Ok(Wanted {
            kernels: kernels.into_iter().filter(|timed| timed.name.contains(text)).collect(),
            copies: copies.into_iter().filter(|&bytes| speed::copy_name(bytes).contains(text)).collect(),
        })
    }
}

fn time(cuda: &mut Cuda, wanted: Wanted, repeat: usize, found: &mut Found) -> Result<()> {
    for timed in wanted.kernels {
        match speed::time(cuda, &timed, repeat) {
            Ok(speed) => found.speeds.push(speed),
            Err(error) => found.not_timed.push(format!("{}: {error}", timed.name)),
        }
        cuda.clear()?;
    }
    for bytes in wanted.copies {
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
            v.group.clone(),
            v.kernel.clone(),
            v.rank.to_string(),
            v.error.map_or("-".into(), |e| format!("{e:.1e}")),
            format!("{:.1e}", v.tolerance),
            v.wrong.clone().unwrap_or_default(),
        ]);
    }
    let mut text = format!("{}, {}, seed {}\n\n{}", found.gpu, found.arch, found.seed, table.render("  "));
    if !found.speeds.is_empty() {
        let mut table = Table::new("<>>>>>");
        table.row(["kernel", "median", "spread", "cold", "FLOP/s", "bytes read and written"]);
        for s in &found.speeds {
            let spread = format!("{:.1} %", 100.0 * s.spread / s.seconds);
            let [flops, bytes] = [decimal(s.flops_per_s, "FLOP/s"), decimal(s.bytes_per_s, "B/s")];
            table.row([s.name.clone(), seconds(s.seconds), spread, seconds(s.cold_seconds), flops, bytes]);
        }
        text.push_str(&format!("\n{}", table.render("  ")));
    }
    found.not_here.iter().for_each(|why| text.push_str(&format!("not tested: {why}\n")));
    found.not_timed.iter().for_each(|why| text.push_str(&format!("not timed: {why}\n")));
    format!("{text}\n{} of {} are wrong\n", found.wrong, found.verdicts.len())
}
