//! What the user knows of failures, of recovery, of the store and of the work, in place of what files and defaults say.

use super::Flags;
use super::step::Step;
use crate::error::{Error, Result};
use crate::report::human::{decimal, long};
use crate::spec::{FleetSpec, Origin, Sourced, StorageSpec};
use crate::units::{Bytes, BytesPerSec, Seconds};

impl Flags {
    /// Errors: numbers that nobody means.
    pub fn check(&self) -> Result<()> {
        if let Some(spares) = self.spares.filter(|spares| *spares > MOST_SPARES) {
            let why = format!("{spares} is more than {MOST_SPARES}; leave it out for as many as it takes");
            return Err(Error::spec("--spares", "nodes", why));
        }
        sensible("--mtbf", self.mtbf.map(Seconds::value), LONGEST)?;
        sensible("--recover", self.recover.map(Seconds::value), LONGEST)?;
        sensible("--store-rate", self.store_rate.map(BytesPerSec::value), LARGEST)?;
        sensible("--step-time", self.step_time.map(Seconds::value), LONGEST)?;
        sensible("--state", self.state.map(Bytes::value), LARGEST)
    }

    /// What a picture says of the numbers that were told in place of the fleet's and the store's.
    pub fn in_place(&self) -> String {
        let mtbf = self.mtbf.map(|s| format!(", a failure every {}", long(s.value())));
        let recover = self.recover.map(|s| format!(", {} to recover", long(s.value())));
        let rate = self.store_rate.map(|rate| format!(", {rate} to the store"));
        mtbf.into_iter().chain(recover).chain(rate).collect()
    }

    /// How long the training takes if nothing fails, s.
    pub fn work(&self, step: &Step) -> Result<f64> {
        let work = match (self.tokens, step.tokens) {
            (None, _) => self.work.value(),
            (Some(tokens), Some(of_a_step)) => (tokens / of_a_step).ceil() * step.time_s,
            (Some(_), None) => {
                let why =
                    "with --step-time and --state alone nothing is known of a step's tokens; say --work in its place";
                return Err(Error::spec("the command line", "--tokens", why));
            }
        };
        sensible(if self.tokens.is_some() { "--tokens" } else { "--work" }, Some(work), LONGEST)?;
        Ok(work)
    }

    /// What the user knows of failures, of recovery and of the store, in place of what the files say. Errors: a time
    /// between failures for a fleet whose file counts none.
    pub fn told(&self, gpus: u32, fleet: &mut FleetSpec, storage: &mut StorageSpec) -> Result<()> {
        if let Some(mtbf) = self.mtbf {
            let failures: f64 = fleet.causes.iter().filter(|c| !c.planned).map(|c| c.count).sum();
            if failures <= 0.0 {
                let why =
                    format!("{} counts no failures that it could be shared among; give another --fleet", fleet.name);
                return Err(Error::spec("--mtbf", "value", why));
            }
            let nodes = f64::from(gpus.div_ceil(fleet.gpus_per_node));
            // Planned stops are as frequent as they were: those of the file, over the new days.
            let node_days = failures * nodes * mtbf.value() / 86_400.0;
            let share = node_days / fleet.node_days.value;
            fleet.causes.iter_mut().filter(|c| c.planned).for_each(|c| c.count *= share);
            fleet.node_days = told("--mtbf", node_days);
        }
        if let Some(recover) = self.recover {
            fleet.detect = told("--recover", Seconds::new(0.0));
            fleet.restart = told("--recover", recover);
        }
        if let Some(rate) = self.store_rate {
            for field in
                [&mut storage.write, &mut storage.read, &mut storage.write_per_node, &mut storage.read_per_node]
            {
                *field = told("--store-rate", rate);
            }
        }
        Ok(())
    }

    /// Lets a node write and read no faster than its NICs carry, and says so where that is less than the store's file has. Whoever
    /// told the store's rate knows it.
    pub fn network(&self, step: &Step, fleet: &FleetSpec, storage: &mut StorageSpec) -> Option<String> {
        let cluster = step.cluster.as_ref().filter(|_| self.store_rate.is_none())?;
        let out = cluster.scale_out.as_ref()?;
        // What the fleet calls a node may be several of the cluster's, or a part of one.
        let nics = f64::from(out.nics_per_node) * f64::from(fleet.gpus_per_node) / f64::from(cluster.gpus_per_node);
        let rate = out.achieved.value * nics;
        let said = |rate: BytesPerSec| decimal(rate.value(), "B/s");
        let (source, provenance) = (format!("NICs of {}", cluster.name), out.achieved.provenance);
        let capped: Vec<String> = [("write", &mut storage.write_per_node), ("read", &mut storage.read_per_node)]
            .into_iter()
            .filter(|(_, of)| of.value > rate)
            .map(|(what, of)| {
                let was = std::mem::replace(of, Sourced { value: rate, source: source.clone(), provenance }).value;
                format!("{what} {}", said(was))
            })
            .collect();
        (!capped.is_empty()).then(|| {
            format!(
                "storage: a node of {} GPUs would {} by {}, and its NICs carry {} by {}, which is taken; where checkpoints go \
                 over other NICs, tell --store-rate",
                fleet.gpus_per_node,
                capped.join(" and "),
                storage.name,
                said(rate),
                cluster.name
            )
        })
    }
}

/// A number of the command line: whoever typed it knows it of the run, so that nothing of it is assumed here.
fn told<T>(flag: &str, value: T) -> Sourced<T> {
    Sourced { value, source: flag.into(), provenance: Origin::Measured }
}

/// More nodes stand by nowhere.
pub const MOST_SPARES: u32 = 1 << 20;

/// Seconds and bytes beyond which somebody has mistaken a unit: three hundred years, a thousand exabytes.
const LONGEST: f64 = 1e10;
const LARGEST: f64 = 1e21;

fn sensible(flag: &str, value: Option<f64>, most: f64) -> Result<()> {
    match value {
        Some(v) if v <= 0.0 => Err(Error::spec(flag, "value", format!("{v} is not above zero"))),
        Some(v) if v > most => Err(Error::spec(
            flag,
            "value",
            format!("{v:e} is more than {most:e} of its unit (s or B); correct the unit"),
        )),
        _ => Ok(()),
    }
}
