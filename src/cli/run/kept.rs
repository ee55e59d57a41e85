//! Checkpoints of a run: the one that it goes on from, and those that it leaves.

use crate::checkpoint::{Loaded, Loader, Saved, Saver};
use crate::error::{Error, Result};
use crate::exec::source::Before;
use crate::exec::state::{Memory, Watch};
use crate::plan::{Adam, Plan};
use crate::report::human::{Table, bytes, seconds};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args)]
pub struct Checkpoints {
    /// Save weights and optimizer states into folders step-N of this one, while training goes on
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Save after every N steps [default: after the last step alone]
    #[arg(long, value_name = "N", requires = "save", value_parser = clap::value_parser!(u64).range(1..))]
    save_every: Option<u64>,
    /// Go on from a checkpoint, or from the newest in a folder, whatever its layout was
    #[arg(long, value_name = "DIR", conflicts_with_all = ["weights", "check"])]
    load: Option<PathBuf>,
}

impl Checkpoints {
    pub fn any(&self) -> bool {
        self.save.is_some() || self.load.is_some()
    }

    /// Errors: steps to be saved of a mixture whose routers came with its weights. Nothing could go on from them: routes of a run
    /// that loads are drawn, and would train another model.
    pub fn of_routers(&self) -> Result<()> {
        if self.save.is_none() {
            return Ok(());
        }
        let why =
            "is for mixtures whose routes are drawn, and routers of --weights choose; give --dump for the new weights";
        Err(Error::spec("the command line", "--save", why))
    }

    /// Opens what is to be loaded.
    pub fn loader(&self) -> Result<Option<Loader>> {
        self.load.as_deref().map(Loader::open).transpose()
    }

    /// Checks what is to be loaded, and makes the folder of what is to be saved.
    pub fn open(&self, loader: Option<Loader>, plan: &Plan, seed: u64, steps: u64) -> Result<Kept> {
        loader.iter().try_for_each(|loader| loader.fits(plan))?;
        let before = loader
            .as_ref()
            .map_or(Before::default(), |loader| Before { steps: loader.index.step, sequences: loader.index.sequences });
        let last = before.steps.checked_add(steps).ok_or_else(|| {
            let why = format!("{steps} behind step {} are more than can be counted; use fewer", before.steps);
            Error::spec("the command line", "--steps", why)
        })?;
        let kept = Kept { saver: None, loader, every: self.save_every.unwrap_or(last), last, before };
        let Some(dir) = &self.save else { return Ok(kept) };
        let saver = Saver::new(dir, seed, before)?;
        saver.free((before.steps + 1..=last).filter(|step| kept.is_saved(*step)))?;
        saver.is_newest(last)?;
        Ok(Kept { saver: Some(saver), ..kept })
    }
}

/// Checkpoints of a run under way.
pub struct Kept {
    loader: Option<Loader>,
    saver: Option<Saver>,
    every: u64,
    /// The number of the run's last step.
    last: u64,
    pub before: Before,
}

/// What is told of them.
#[derive(Debug, Serialize)]
pub struct Told {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loaded: Option<From>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub saved: Vec<Saved>,
}

/// Where a run went on from.
#[derive(Debug, Serialize)]
pub struct From {
    pub dir: PathBuf,
    pub strategy: String,
    pub ranks: u32,
    pub seed: u64,
    /// Tokens of a mixture visit other experts than they did there: routes are drawn for a layout.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub other_routes: bool,
    /// The plan of the run that saved did not say its model: names and shapes fit, and of heads and positions nobody knows.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub model_unknown: bool,
    /// The optimizer's constants of the run that saved, where flags say others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_optimizer: Option<Adam>,
    #[serde(flatten)]
    pub loaded: Loaded,
}

impl Told {
    /// A line for what was loaded and one for what was saved.
    pub fn rows(&self, table: &mut Table) {
        if let Some(from) = &self.loaded {
            let note = format!(
                "step {} of {} on {} ranks, {} read in {} requests; checksums of {} took {} of it",
                from.loaded.step,
                from.strategy,
                from.ranks,
                bytes(from.loaded.read_bytes as f64),
                from.loaded.requests,
                bytes(from.loaded.checked_bytes as f64),
                seconds(from.loaded.check_s)
            );
            table.row(["loaded", &seconds(from.loaded.load_s), &note]);
            if from.other_routes {
                let note = "drawn for this layout: tokens visit other experts than in the run that saved, and losses go on otherwise";
                table.row(["routes", "others", note]);
            }
            if from.model_unknown {
                let note = "the checkpoint does not say its model: names and shapes fit, heads and positions are taken for the same";
                table.row(["model", "unknown", note]);
            }
            if let Some(saved) = from.saved_optimizer {
                table.row(["optimizer", "others", &format!("the run that saved had {saved}")]);
            }
        }
        for saved in &self.saved {
            let note = format!(
                "of standing still for step {}, {} to the disk: {} in {} files, {} the largest",
                saved.step,
                seconds(saved.write_s),
                bytes(saved.bytes as f64),
                saved.files,
                bytes(saved.most_bytes as f64)
            );
            table.row(["saved", &seconds(saved.stall_s), &note]);
        }
    }
}

impl Kept {
    fn is_saved(&self, step: u64) -> bool {
        step == self.last || step.is_multiple_of(self.every)
    }

    /// What was not loaded, though it is newer.
    pub fn note(&self) -> Option<String> {
        self.loader.as_ref().and_then(|loader| loader.note.clone())
    }

    /// Steps that a table of the run that is gone on with has; none of a run that begins.
    pub fn rows_before(&self) -> Option<u64> {
        self.loader.as_ref().map(|loader| loader.index.step)
    }

    /// What was loaded and saved, once all of it is on the disk.
    pub fn told(&self, plan: &Plan) -> Result<Told> {
        let from = |loader: &Loader| {
            let index = &loader.index;
            let (strategy, ranks, seed) = (index.strategy.clone(), index.ranks, index.seed);
            let other_routes = !plan.routes.is_empty() && index.plan != plan.hash();
            let saved_optimizer = Some(index.optimizer).filter(|saved| Some(*saved) != plan.optimizer());
            let (dir, loaded, model_unknown) = (loader.dir.clone(), loader.loaded()?, index.model_spec.is_none());
            Some(From { dir, strategy, ranks, seed, other_routes, model_unknown, saved_optimizer, loaded })
        };
        let saved = self.saver.as_ref().map_or(Ok(vec![]), Saver::finish)?;
        Ok(Told { loaded: self.loader.as_ref().and_then(from), saved })
    }
}

impl Kept {
    /// Why a run ended, and what it leaves to go on from.
    pub fn after(&self, why: Error) -> Error {
        match self.saver.as_ref().map(Saver::finish) {
            Some(Ok(saved)) => match saved.last() {
                Some(last) => why.and(format_args!(
                    "step {} is saved, go on from it with --load {}",
                    last.step,
                    last.dir.display()
                )),
                None => why,
            },
            Some(Err(other)) => why.and(format_args!("and the checkpoint under way was not written: {other}")),
            None => why,
        }
    }
}

impl Watch for Kept {
    fn begin(&self, memory: &mut Memory) -> Result<()> {
        self.loader.as_ref().map_or(Ok(()), |loader| loader.load(memory))
    }

    fn after(&self, step: u64, memory: &Memory) -> Result<()> {
        match &self.saver {
            Some(saver) if self.is_saved(step) => saver.save(step, memory),
            _ => Ok(()),
        }
    }
}
