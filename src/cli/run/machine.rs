//! What a plan is run on: threads of this machine, or its GPUs.

use crate::cli::chosen::Chosen;
use crate::cli::config::{Defaults, GPUS, LOCAL};
use crate::cli::flags::TraceFile;
use crate::device::Profile;
use crate::device::measured::GpuSide;
use crate::error::{Cause, Error, Result};
use crate::exec::cuda::fused::{Attention, OWN};
use crate::exec::cuda::process::{self, Process, environment};
use crate::exec::cuda::{driver, joined, run as cuda};
use crate::exec::inject::Injection;
use crate::exec::{Anew, Job, Options, Run, rate, train, train_anew};
use crate::plan::Plan;
use crate::spec::Throttle;
use crate::strategy::guard;
use clap::{Args, ValueEnum};
use std::path::Path;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum On {
    Cpu,
    Cuda,
}

/// How to run, for `run`, `compare` and `validate`.
#[derive(Args)]
pub struct Machine {
    /// What to run on
    #[arg(long, value_enum, default_value = "cpu")]
    on: On,
    /// Cores that the ranks share, taking turns [default: all there are]; on cuda the GPU of each rank, as in 0,0,1,1 or
    /// 0..7 [default: in turn over all there are]
    #[arg(long, value_name = "N|LIST", value_parser = devices)]
    devices: Option<Devices>,
    /// Seeds weights and tokens
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Whose kernels do attention on cuda: own, the project's everywhere; cudnn, cuDNN's wherever it has a form of the mask;
    /// best, cuDNN's where it is there and takes the shape, but own if the profile was measured so [default: best]
    #[arg(long, value_name = "WHOSE")]
    attention: Option<Attention>,
    /// Make every rank's link slow: bandwidth and latency, as 1,50 (GB/s and us) or 25 MB/s,2 ms
    #[arg(long, value_name = "GB/s,us")]
    throttle: Option<Throttle>,
    /// Let something go wrong: lost-message, dead-rank, panic, other-plan or deadlock, of rank 0 or, as panic:1, another
    #[arg(long, value_name = "FAULT[:RANK]")]
    inject: Option<Injection>,
    #[command(flatten)]
    pub trace: TraceFile,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Devices {
    Number(u32),
    List(Vec<u32>),
}

fn devices(text: &str) -> std::result::Result<Devices, String> {
    let number = |word: &str| word.trim().parse::<u32>().map_err(|_| format!("{word:?} is no number"));
    if let Some((first, last)) = text.split_once("..") {
        let (first, last) = (number(first)?, number(last)?);
        return if first <= last && last - first < 1024 {
            Ok(Devices::List((first..=last).collect()))
        } else {
            Err("write a range from the first to the last, as in 0..7".into())
        };
    }
    if text.contains(',') {
        return Ok(Devices::List(text.split(',').map(number).collect::<std::result::Result<_, _>>()?));
    }
    number(text).map(Devices::Number)
}

/// How many different devices a list names.
pub fn count(devices: &[u32]) -> u32 {
    let mut all = devices.to_vec();
    all.sort_unstable();
    all.dedup();
    all.len() as u32
}

impl Machine {
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// What is computed where nothing is said.
    pub fn defaults(&self) -> Defaults {
        if self.on == On::Cuda { GPUS } else { LOCAL }
    }

    pub fn on(&self) -> On {
        self.on
    }

    /// Errors: this is one of several processes, or GPUs are asked for, and there is no driver for them.
    pub fn is_there(&self) -> Result<()> {
        match self.on {
            On::Cpu => one_process(),
            On::Cuda => process::alone().and_then(|()| driver::count()).map(drop),
        }
    }

    /// Which of several processes this is, a rank each; none where one process has all ranks. Errors: GPUs are asked for
    /// and are not there, of which one of several tells the others first, or each of several processes would have all ranks.
    pub fn joined(&self) -> Result<Option<Process>> {
        if self.on == On::Cpu {
            return one_process().map(|()| None);
        }
        let found = process::of(&environment)?.filter(|process| process.world > 1);
        if self.devices.is_some() && found.is_some() {
            process::alone()?;
        }
        if found.is_none() {
            driver::count()?;
        }
        Ok(found)
    }

    /// How to run a plan: what is asked for, unless nobody would wait for it.
    pub fn options(&self, plan: &Plan, keep: bool) -> Result<Options> {
        let devices = match self.on {
            On::Cpu => self.cores(plan)?,
            // A GPU each, on whatever node it is.
            On::Cuda if self.joined()?.is_some() => (0..plan.ranks()).collect(),
            On::Cuda => gpus(self.devices.as_ref(), plan.ranks(), driver::count()?)?,
        };
        if self.on == On::Cuda && (self.throttle.is_some() || self.inject.is_some()) {
            let flag = if self.throttle.is_some() { "--throttle" } else { "--inject" };
            return Err(Error::spec(
                "the command line",
                flag,
                "is for ranks that are threads; give --on cpu, or leave it out",
            ));
        }
        if self.on == On::Cpu && self.attention.is_some() {
            let why = "is for GPUs; give --on cuda, or leave it out";
            return Err(Error::spec("the command line", "--attention", why));
        }
        let attention = self.attention(None);
        let (throttle, inject) = (self.throttle, self.inject);
        Ok(Options { throttle, inject, attention, ..Options::new(self.seed, devices, keep) })
    }

    /// Whose kernels do attention: as it is asked for, or as a profile was measured.
    pub fn attention(&self, measured: Option<&GpuSide>) -> Attention {
        let by = measured.and_then(|gpu| gpu.attention.as_ref()).map(|attention| attention.by.as_str());
        match self.attention {
            Some(asked) => asked,
            None if by == Some(OWN) => Attention::Own,
            None => Attention::Best,
        }
    }

    /// The same, attention as the profile that is given was measured, unless something else is asked for.
    pub fn options_by(&self, plan: &Plan, keep: bool, profile: Option<&Path>) -> Result<Options> {
        let options = self.options(plan, keep)?;
        let Some(file) = profile.filter(|_| self.on == On::Cuda) else { return Ok(options) };
        let attention = self.attention(Profile::load(file)?.gpu.as_ref());
        Ok(Options { attention, ..options })
    }

    /// Slow links are slow in the prediction, too.
    pub fn slow_down(&self, chosen: &mut Chosen) -> Result<()> {
        let threads = chosen.case.profile.as_mut().and_then(|profile| profile.threads.as_mut());
        match (threads, self.throttle) {
            (_, None) => Ok(()),
            (Some(threads), throttle) => {
                threads.throttle = throttle;
                Ok(())
            }
            (None, Some(_)) => {
                let why = "is predicted for the threads that a profile has measured; write one with \
                           `foretrain calibrate --on cpu --out profile.json` and give it as --profile";
                Err(Error::spec("the command line", "--throttle", why))
            }
        }
    }

    fn cores(&self, plan: &Plan) -> Result<Vec<u32>> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        let devices = match &self.devices {
            None => cores,
            Some(Devices::Number(n)) if *n > cores => {
                let why = format!("{n} is more than the {cores} cores of this machine; give as many at most");
                return Err(Error::spec("run", "--devices", why));
            }
            Some(Devices::Number(n)) if *n > 0 => *n,
            Some(Devices::Number(n)) => {
                return Err(Error::spec("run", "--devices", format!("{n} is no number of cores; give 1 or more")));
            }
            Some(Devices::List(all)) => {
                let why = format!("a list of {} is for GPUs, --on cuda; give the number of cores", all.len());
                return Err(Error::spec("run", "--devices", why));
            }
        };
        let devices = devices.clamp(1, plan.ranks());
        let wait = rough_seconds(plan, cores.min(devices));
        if wait > LONGEST_S {
            let why = format!(
                "the run would take about {:.0} minutes on this machine, more than {:.0}; use a smaller model, \
                 seq_len or global_batch, or fewer ranks",
                wait / 60.0,
                LONGEST_S / 60.0
            );
            return Err(Cause::Size.infeasible(why));
        }
        Ok((0..plan.ranks()).map(|rank| rank % devices).collect())
    }

    /// Trains where it was asked for.
    pub fn train(
        &self,
        plan: &Plan,
        options: &Options,
        job: &Job,
        each: &mut dyn FnMut(u64, Run) -> Result<()>,
    ) -> Result<()> {
        match self.on {
            On::Cpu => train(plan, options, job, each),
            On::Cuda => match self.joined()? {
                Some(process) => joined::train(plan, options, &process, job, each),
                None => cuda::train(plan, options, job, each),
            },
        }
    }

    /// Errors: routers cannot choose anew in each step there.
    pub fn chooses_anew(&self) -> Result<()> {
        if self.on == On::Cpu {
            return Ok(());
        }
        let why = "the weights of a mixture train for one step on cuda: its routers choose anew in each step, and a plan \
                   is for one; use --steps 1, or --on cpu";
        Err(Cause::Routing.infeasible(why))
    }

    /// Trains where routers choose anew in each step.
    pub fn train_anew(&self, plan: Plan, options: &Options, job: &Job, each: Anew) -> Result<()> {
        self.chooses_anew()?;
        train_anew(plan, options, job, each)
    }

    /// One step.
    pub fn execute(&self, plan: &Plan, options: &Options) -> Result<Run> {
        match self.on {
            On::Cpu => crate::exec::execute(plan, options),
            On::Cuda => cuda::execute(plan, options),
        }
    }

    /// FLOP/s of the best matrix product on one core, or on one GPU.
    pub fn best_gemm(&self, plan: &Plan, options: &Options) -> Result<f64> {
        match self.on {
            On::Cpu => Ok(rate::best_gemm(plan).value()),
            On::Cuda => cuda::best_gemm(match self.joined()? {
                Some(process) => process.gpu(driver::count()?)?,
                None => options.devices[0],
            }),
        }
    }
}

/// Refuses cores to one of several processes: each would do the whole of it, and write the same files.
pub fn one_process() -> Result<()> {
    match process::of(&environment)? {
        Some(Process { rank, world, by, .. }) if world > 1 => {
            let why = format!(
                "this is process {rank} of the {world} that {by} started, and ranks on cores are threads of one; start it by \
                 itself, without the variables of {by}, or give --on cuda, a GPU a process"
            );
            Err(Error::device("cpu", why))
        }
        _ => Ok(()),
    }
}

/// The GPU of each rank: one for all, one for each, or in turn over those that are there.
fn gpus(asked: Option<&Devices>, ranks: u32, there: u32) -> Result<Vec<u32>> {
    let wrong = |why: String| Err(Error::spec("run", "--devices", why));
    if there == 0 {
        return Err(Error::device("cuda", "the driver finds no GPU here; use --on cpu"));
    }
    let all = match asked {
        None => (0..ranks).map(|rank| rank % there).collect(),
        Some(Devices::Number(one)) => vec![*one; ranks as usize],
        Some(Devices::List(all)) => all.clone(),
    };
    if all.len() != ranks as usize {
        return wrong(format!("{} GPUs for {ranks} ranks; give one number, or {ranks} of them", all.len()));
    }
    match all.iter().find(|gpu| **gpu >= there) {
        Some(gpu) => wrong(format!("GPU {gpu} is not one of the {there} here; give numbers below {there}")),
        None => Ok(all),
    }
}

/// A longer run is taken for a mistake.
const LONGEST_S: f64 = 300.0;

/// Within a factor of a few: arithmetic at some 10 GFLOP/s a core, and the hand-over between threads, in
/// which every op of a rank wakes the others up.
fn rough_seconds(plan: &Plan, cores: u32) -> f64 {
    let (ranks, ops) = (f64::from(plan.ranks()), guard::ops_of_a_rank(plan));
    plan.about.model_flops / (1e10 * f64::from(cores)) + ops * ranks * (8e-6 + 1e-6 * ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_map_is_a_number_a_list_or_a_range() {
        let map = |text: &str, ranks, there| gpus(Some(&devices(text).unwrap()), ranks, there).unwrap();
        assert_eq!(map("0,0,1,1", 4, 2), [0, 0, 1, 1]);
        assert_eq!(map("0..3", 4, 8), [0, 1, 2, 3]);
        assert_eq!(map("1", 3, 2), [1, 1, 1]);
        assert_eq!(gpus(None, 4, 2).unwrap(), [0, 1, 0, 1]);
        assert_eq!(count(&[3, 0, 3]), 2);
    }

    #[test]
    fn a_wrong_map_says_what_to_give() {
        let says =
            |text: &str, ranks, there| gpus(Some(&devices(text).unwrap()), ranks, there).unwrap_err().to_string();
        assert!(says("0,0,0", 4, 1).contains("3 GPUs for 4 ranks"));
        assert!(says("0,1", 2, 1).contains("GPU 1 is not one of the 1 here"));
        assert!(gpus(None, 2, 0).unwrap_err().to_string().contains("no GPU"));
        assert!(devices("7..0").is_err() && devices("0,x").is_err());
    }
}
