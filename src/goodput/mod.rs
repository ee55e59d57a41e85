//! Goodput: what is left of a training run once failures, checkpoints and repairs have had their share.
//!
//! A run alternates between training and recovering. Training stands still while a checkpoint is taken; a failure
//! throws away what was trained since the last one that is safe; then the failure has to be noticed, a node may have
//! to be replaced, processes start again and load. The share of time that is left is the *ETTR*, effective training
//! time ratio. [`expected`] has it in closed form for a run without end, [`play`] plays runs failure by failure, and
//! each is held against the other.
//!
//! * [`checkpoint`]: bytes of a checkpoint, and how long it stops the GPUs, is on its way, and takes to load.
//! * [`study`]: ETTR over the interval between checkpoints and over the size of the cluster, as rows for a picture.

pub mod checkpoint;
pub mod expected;
pub mod play;
pub mod study;

use crate::error::{Error, Result};
use crate::spec::{FleetSpec, InterruptionKind};
use crate::units::Seconds;
use checkpoint::Checkpoint;
use serde::Serialize;
use statrs::distribution::{ContinuousCDF, DiscreteCDF, Normal, Poisson};

const DAY: f64 = 86_400.0;

/// A run, and what interrupts it. Times in seconds, rates per second of all of the run's nodes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    pub nodes: u32,
    /// Of training between two checkpoints.
    pub interval_s: f64,
    /// Of a step: checkpoints are saved between steps. 0: at any time.
    pub step_s: f64,
    pub checkpoint: Checkpoint,
    /// Failures that take a node, and those that do not.
    pub failures_with_node: f64,
    pub failures_without: f64,
    /// Interruptions before which a checkpoint is saved.
    pub planned: f64,
    pub detect_s: f64,
    pub restart_s: f64,
    /// Until a node that failed can be used again.
    pub repair_s: f64,
    /// Nodes that stand by; `None` for as many as it takes.
    pub spares: Option<u32>,
}

impl Run {
    /// Of `gpus` GPUs in the fleet, at the interval that wastes least.
    pub fn new(fleet: &FleetSpec, gpus: u32, checkpoint: Checkpoint) -> Result<Run> {
        let nodes = gpus.div_ceil(fleet.gpus_per_node);
        if nodes == 0 {
            return Err(Error::spec("--gpus", "gpus", "0 GPUs train nothing; give at least 1"));
        }
        let per_s = |counts: &dyn Fn(&InterruptionKind) -> bool| {
            let count: f64 = fleet.causes.iter().filter(|c| counts(c)).map(|c| c.count).sum();
            count / fleet.node_days.value * f64::from(nodes) / DAY
        };
        let run = Run {
            nodes,
            interval_s: 0.0,
            step_s: 0.0,
            checkpoint,
            failures_with_node: per_s(&|c| !c.planned && c.takes_node),
            failures_without: per_s(&|c| !c.planned && !c.takes_node),
            planned: per_s(&|c| c.planned),
            detect_s: fleet.detect.value.value(),
            restart_s: fleet.restart.value.value(),
            repair_s: fleet.repair.value.value(),
            spares: None,
        };
        Ok(Run { interval_s: expected::best_interval(&run), ..run })
    }

    /// The same, saved between steps that take so long, at the interval that wastes least.
    pub fn in_steps(self, step: Seconds) -> Run {
        let run = Run { step_s: step.value(), ..self };
        Run { interval_s: expected::best_interval(&run), ..run }
    }

    /// Failures a second, planned stops not counted.
    pub fn failures(&self) -> f64 {
        self.failures_with_node + self.failures_without
    }

    /// From a failure until training goes on, where a node stands by.
    pub fn recover_s(&self) -> f64 {
        self.detect_s + self.restart_s + self.checkpoint.load_s
    }

    /// Nodes in repair at a time, on average.
    pub fn in_repair(&self) -> f64 {
        self.failures_with_node * self.repair_s
    }

    /// Spares of which one stands by for a failed node so often as `share` (below 1): the nodes in repair that it finds
    /// are a Poisson number, whatever the time of a single repair is (the M/G/infinity queue), and must be fewer. As many as
    /// a `u32` has where they are more.
    pub fn spares_for(&self, share: f64) -> u32 {
        let mean = self.in_repair();
        if mean <= 0.0 {
            return 0;
        }
        // Hardly ever is one in repair: the search below begins above none.
        if (-mean).exp() >= share {
            return 1;
        }
        // So many that a normal number tells them as well, without a search.
        if mean > 1e6 {
            let normal = Normal::new(mean, mean.sqrt()).expect("the mean is above zero");
            return normal.inverse_cdf(share).ceil() as u32;
        }
        let poisson = Poisson::new(mean).expect("the mean is above zero");
        poisson.inverse_cdf(share) as u32 + 1
    }

    /// At another interval, or the next that is a whole number of steps. Errors: one that is no time, or shorter than a
    /// save, which has to be over before the next.
    pub fn every(self, interval: Seconds) -> Result<Run> {
        let shortest = self.checkpoint.shortest_interval_s();
        let asked = interval.value();
        if !(asked > 0.0 && asked.is_finite()) {
            return Err(Error::spec("--every", "interval", format!("{interval} is not a time above 0 s")));
        }
        if asked < shortest {
            let why = format!(
                "{asked} s of training between checkpoints is too short: a save takes {:.0} s, standing still included, and \
                 must be over before the next begins; give at least {:.0} s, or a faster --storage",
                self.checkpoint.save_s,
                shortest.ceil()
            );
            return Err(Error::spec("--every", "interval", why));
        }
        let whole = if self.step_s > 0.0 { (asked / self.step_s).ceil().max(1.0) * self.step_s } else { asked };
        Ok(Run { interval_s: whole, ..self })
    }
}
