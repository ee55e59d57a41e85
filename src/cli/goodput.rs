//! `foretrain goodput`: what failures and checkpoints leave of a run.

mod found;
mod render;
mod step;
mod told;

use super::config::Config;
use super::flags::value::trained_tokens;
use super::flags::{Output, PlanFile, Seed};
use super::progress::Clock;
use super::{Answer, list_of};
use crate::error::Result;
use crate::goodput::Run;
use crate::goodput::checkpoint::Checkpoint;
use crate::goodput::study::{Play, Question, study};
use crate::plot;
use crate::spec::{FleetSpec, StorageSpec};
use crate::units::{Bytes, BytesPerSec, Seconds};
use clap::Args;
use found::Found;
use render::render;
use std::path::PathBuf;

#[derive(Args)]
#[command(
    after_help = "Example: foretrain goodput --model llama-3.1-405b --cluster h100-24k-roce --gpus 16384 --tp 8 --pp 16 --vp 8 --options short-ends+recompute-norm --global-batch 2048\n         \
                        foretrain goodput --model llama-3-70b --gpus 512 --tp 8 --pp 4 --global-batch 1024 --tokens 15T\n         \
                        foretrain goodput --gpus 12288 --step-time 6.34s --state 2.45TB --fleet meta-rsc-1 --spares 32\n         \
                        foretrain goodput --gpus 1024 --step-time 5s --state 1TB --mtbf 7.9h --recover 10min --store-rate 20GB/s\n         \
                        foretrain goodput --gpus 16384 --step-time 5s --state 5.67TB --out results/goodput"
)]
pub struct Flags {
    #[command(flatten)]
    config: Config,
    #[command(flatten)]
    plan: PlanFile,
    /// Of one step, e.g. 6.34s [default: what `estimate` says of the flags above]
    #[arg(long, value_name = "TIME")]
    step_time: Option<Seconds>,
    /// Bytes of a checkpoint, e.g. 5.67TB [default: the model's weights and Adam's state]
    #[arg(long, value_name = "BYTES")]
    state: Option<Bytes>,
    /// A shipped fleet, or the path of its JSON file: how often what fails, how soon it is seen. Hot standby is a short
    /// `restart` of a file of your own, as in "restart": {"value": "20 s", "source": "ours", "provenance": "measured"}
    #[arg(long, value_name = "NAME", default_value = "llama-3-405b")]
    fleet: String,
    /// A shipped store, or the path of its JSON file: how fast checkpoints are saved and loaded. Training stands still for a
    /// whole save where the file has "in_background": false, as gpfs-jean-zay's
    #[arg(long, value_name = "NAME", default_value = "tectonic")]
    storage: String,
    /// Mean time between failures of this run, e.g. 7.9h [default: the fleet's rate a node, times the nodes]
    #[arg(long, value_name = "TIME")]
    mtbf: Option<Seconds>,
    /// From a failure until processes stand again and load, e.g. 10min [default: the fleet's]
    #[arg(long, value_name = "TIME")]
    recover: Option<Seconds>,
    /// What the store takes and gives to all nodes together, e.g. 100MB/s [default: the store's, and its limit of a node]
    #[arg(long, value_name = "RATE")]
    store_rate: Option<BytesPerSec>,
    /// Training between two checkpoints, e.g. 30min [default: what wastes least]
    #[arg(long, value_name = "TIME")]
    every: Option<Seconds>,
    /// Nodes that stand by [default: as many as it takes, even where the cluster's file has fewer: a note says what those leave]
    #[arg(long, value_name = "N")]
    spares: Option<u32>,
    /// How long the training takes if nothing ever fails, e.g. 54d
    #[arg(long, value_name = "TIME", default_value = "30d")]
    work: Seconds,
    /// Tokens of the whole training in place of --work, e.g. 300B or 15.6T
    #[arg(long, value_name = "N", value_parser = trained_tokens, conflicts_with = "work")]
    tokens: Option<f64>,
    /// Runs that are played, for what luck does
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    runs: u32,
    #[command(flatten)]
    seed: Seed,
    /// Write rows.csv and a picture into this folder: over the interval, and over the number of GPUs
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let (mut fleet, mut storage) = (FleetSpec::find(&flags.fleet)?, StorageSpec::find(&flags.storage)?);
    flags.check()?;
    let clock = Clock::start("costing a step");
    let mut step = flags.step(&fleet)?;
    drop(clock);
    let work = flags.work(&step)?;
    flags.told(step.gpus, &mut fleet, &mut storage)?;
    step.notes.extend(flags.network(&step, &fleet, &mut storage));
    let run = Run::new(&fleet, step.gpus, Checkpoint::new(step.state_bytes, step.gpus, &fleet, &storage))?;
    let mut run = Run { spares: flags.spares, ..run.in_steps(Seconds::new(step.time_s)) };
    if let Some(every) = flags.every {
        run = run.every(every)?;
    }
    let mut found = Found::new(flags, &step, work, run, (&fleet, &storage))?;
    let mut text = render(&step, &found);
    if let Some(dir) = &flags.out {
        let question = Question {
            run: step.what + &flags.in_place(),
            fleet: &fleet,
            storage: &storage,
            state_bytes: step.state_bytes,
            step: Seconds::new(step.time_s),
            gpus: step.gpus,
            answer: &found.run,
            asked: flags.every.is_some(),
            play: Play { work_s: work, runs: flags.runs as usize, seed: flags.seed.number, ettr: found.played.ettr },
        };
        let rows = study(&question, dir)?;
        let files: Vec<PathBuf> = std::iter::once(rows.clone()).chain(plot::draw(&rows, dir)?).collect();
        text.push('\n');
        files.iter().for_each(|f| text.push_str(&format!("wrote {}\n", f.display())));
        found.files = list_of(&files);
    }
    Ok(Answer::new(text, &found))
}
