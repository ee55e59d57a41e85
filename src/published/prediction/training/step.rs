//! What a plan takes: seconds of a step, bytes of a GPU, tokens that fit.

use super::plan::{Made, SPARE, needs, needs_of};
use super::setup::Setup;
use crate::cost::{Effort, Machine, cost};
use crate::device::Roofline;
use crate::plan::Plan;
use crate::plan::memory::with_kept;
use crate::published::measured::memory::Counted;
use crate::published::prediction::said;
use crate::published::row::case::Training;
use crate::published::split::Split;
use crate::report::made_of;
use crate::strategy::lengths::{bisect, grain};

impl Setup {
    /// Tokens of the longest sequence that fits as a run is split: of what the GPU has, and not a little more.
    pub fn longest(&self, split: &Split) -> Result<f64, String> {
        let mut refused = None;
        let longest =
            bisect(grain(&split.par), |seq| match self.build(&self.model, &Split { seq, ..split.clone() }) {
                Ok(plan) => Ok::<bool, String>(self.takes(&plan, None)? <= self.room() / SPARE),
                Err(why) => {
                    refused = Some(said(why));
                    Ok(false)
                }
            })?;
        let none = || refused.unwrap_or_else(|| "memory: no sequence fits, however short".into());
        longest.map(|n| n as f64).ok_or_else(none)
    }

    /// GiB of the fullest GPU, as the source of a run counts them; none where as much was recomputed as made it fit.
    pub fn memory(&self, run: &Training, made: &Made) -> Result<Option<f64>, String> {
        let takes = |plan: &Plan| self.takes(plan, run.mem_stage);
        let bytes = match &made.beside {
            None => takes(&made.plan)?,
            Some((whole, share)) if self.again.is_some() => share * takes(whole)? + (1.0 - share) * takes(&made.plan)?,
            Some(_) => return Ok(None),
        };
        let spared = self.tuning.map_or(0.0, |tuning| tuning.spared(&made.plan));
        // Frameworks print what their allocators were asked for.
        let counted = run.mem_kind.unwrap_or(Counted::Allocated);
        Ok(Some(counted.gib(bytes - spared, &self.stack)))
    }

    /// Bytes of the fullest rank, or of one of a stage, counted from 1, with what the framework keeps beside the plan.
    fn takes(&self, plan: &Plan, stage: Option<u32>) -> Result<f64, String> {
        let kept = self.stack.kept.as_ref().map(|kept| with_kept(plan, &kept.value)).transpose().map_err(said)?;
        let plan = kept.as_ref().unwrap_or(plan);
        match stage {
            Some(stage) if stage as usize <= plan.programs.len() => needs_of(plan, stage - 1),
            _ => needs(plan),
        }
    }

    pub fn kernels(&self) -> Result<Roofline, String> {
        Roofline::new(&self.machine.cluster.gpu, &self.stack).map_err(said)
    }

    pub fn machine<'m>(&'m self, kernels: &'m Roofline) -> Machine<'m> {
        Machine { cluster: &self.machine.cluster, stack: &self.stack, kernels, devices: None }
    }

    /// Of a step; layers that recompute take as long as in a plan where all do. What that plan's step is made of goes
    /// to `parts`.
    pub fn seconds(&self, made: &Made, parts: &mut String) -> Result<f64, String> {
        let kernels = self.kernels()?;
        let more = self.unpacking(&made.split);
        let step = |plan: &Plan| cost(plan, self.machine(&kernels), Effort::SUMS).map_err(said);
        let of = |plan: &Plan| step(plan).map(|timeline| timeline.step.value() + more);
        let timeline = step(&made.plan)?;
        *parts = made_of(&timeline.mean(), timeline.step.value());
        let all = timeline.step.value() + more;
        let Some((whole, share)) = &made.beside else { return Ok(all) };
        Ok(share * of(whole)? + (1.0 - share) * all)
    }

    /// Seconds of a step in which packed weights are made whole.
    fn unpacking(&self, split: &Split) -> f64 {
        let par = &split.par;
        let weights = self.model.params() as f64 / f64::from(par.tp * par.pp);
        let microbatches = split.global_batch as f64 / (f64::from(par.dp) * split.micro_batch as f64);
        let gpu = &self.machine.cluster.gpu;
        self.tuning.map_or(0.0, |tuning| tuning.unpacking(weights, microbatches, par.recompute, gpu).value())
    }

    pub fn words(&self, split: &Split) -> String {
        let par = &split.par;
        format!(
            "dp {} x tp {} x pp {} (vp {}) x ulysses {} x ring {}, ep {}, zero {}, recompute {}, {}, {} sequences of {}, {} at a time",
            par.dp,
            par.tp,
            par.pp,
            par.vp,
            par.ulysses,
            par.ring,
            par.ep,
            par.zero,
            par.recompute.name(),
            par.options,
            split.global_batch,
            split.seq,
            split.micro_batch
        )
    }
}
