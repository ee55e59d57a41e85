//! The plan of a run with everything chosen: with the least recomputation that fits, where none is stated.

use super::setup::{Again, Setup};
use super::standin::stand_in;
use crate::error::{self, Cause};
use crate::plan::Plan;
use crate::plan::link::AtomTable;
use crate::plan::memory::Layout;
use crate::published::outcome::verdict::Prediction;
use crate::published::prediction::said;
use crate::published::split::Split;
use crate::spec::{LlmSpec, Recompute, Workload};
use crate::strategy::{Engines, build_routed, guard};

/// A plan keeps in bf16 what FP8 systems keep in eight bits, its logits whole and its gradients in fp32: what it is
/// over by as much may still have fitted. With 1.2 or 1.05 more runs would be taken to compute again than did: in the shared
/// table of runs errors below which 90 % are would go up, and runs of NeMo and Megatron-Bridge become 5 to 13 % too slow.
pub const SPARE: f64 = 1.4;

/// Picoseconds of longer steps are no longer told apart (2^53 of them are two and a half hours), so that microbatches repeat no
/// more and each is walked: seconds at the GPUs' own rate, and microbatches, of which no run has both.
const LONGEST_STEP: f64 = 1800.0;
const MOST_OF_LONG: f64 = 64.0;

/// Ops of a rank, beyond which a plan takes longer to link than a table of cases is waited for.
const MOST_OPS: f64 = 4e6;

/// A plan with its choices.
pub struct Made {
    pub plan: Plan,
    pub split: Split,
    /// Bytes of the fullest rank.
    pub needs: f64,
    /// A plan that recomputes nothing, and the part of the layers that there is room for to be as they are in it.
    pub beside: Option<(Plan, f64)>,
}

/// What is computed again where all does not fit, the least first.
const LESS: [Recompute; 2] = [Recompute::Selective, Recompute::Full];

impl Setup {
    /// The plan, with the least recomputation that fits where none is stated: of no layer, else of attention alone,
    /// else of as many layers as there is no room for. A run that really happened did fit: if ours does not even with
    /// all recomputed, its weights were kept by means that the source does not state (offload, sharding), which tells
    /// nothing of its activations; it is predicted without, and that is noted.
    pub fn plan(&self, stated: Option<Recompute>, found: &mut Prediction) -> Result<Made, String> {
        if let Some(again) = self.again {
            let whole = self.with(Recompute::None, found)?;
            found.memory = None;
            let percent = 100.0 * again.part();
            let (all, said) = match again {
                Again::Layers(_) => (self.with(Recompute::Full, found)?, "what is in the layers"),
                Again::Networks => {
                    (self.networks_again(found)?, "what is before activations, and all of norms and these")
                }
            };
            found.why.push(format!("recomputed: {percent:.0} % of {said}"));
            return Ok(Made { beside: Some((whole.plan, 1.0 - again.part())), ..all });
        }
        if let Some(recompute) = stated {
            return self.with(recompute, found);
        }
        let first = self.with(Recompute::None, found);
        if first.is_ok() && found.memory.is_none() {
            return first;
        }
        let lacks = found.memory.take();
        // Of a fused kernel selective recomputation saves nothing.
        let less = if self.stack.fuses_attention() { &LESS[1..] } else { &LESS };
        for &recompute in less {
            let said = found.why.len();
            if let Ok(mut made) = self.with(recompute, found)
                && found.memory.is_none()
            {
                if let (Recompute::Full, Ok(whole)) = (recompute, first) {
                    let share = ((self.room() - made.needs) / (whole.needs - made.needs)).clamp(0.0, 1.0);
                    found.why.push(format!("recomputed: {:.0} % of the layers", 100.0 * (1.0 - share)));
                    made.beside = Some((whole.plan, share));
                }
                return Ok(made);
            }
            found.why.truncate(said);
        }
        found.memory = lacks;
        first
    }

    /// The plan with this recomputation, and whether it fits.
    fn with(&self, recompute: Recompute, found: &mut Prediction) -> Result<Made, String> {
        let mut split = self.split.clone();
        split.par.recompute = recompute;
        self.split_so(split, found)
    }

    /// The plan in which networks run again by themselves.
    fn networks_again(&self, found: &mut Prediction) -> Result<Made, String> {
        let mut split = self.split.clone();
        (split.par.recompute, split.par.options.recompute_mlp) = (Recompute::None, true);
        self.split_so(split, found)
    }

    /// The plan of a split, or of what stands in for it where it is refused.
    fn split_so(&self, mut split: Split, found: &mut Prediction) -> Result<Made, String> {
        let mut model = self.model.clone();
        let mut taken = Vec::new();
        loop {
            match self.build(&model, &split) {
                Ok(plan) => {
                    let spared = self.tuning.map_or(0.0, |tuning| tuning.spared(&plan));
                    let (needs, room) = (needs(&plan)? - spared, self.room());
                    found.memory = (needs > room).then(|| {
                        let has = room / SPARE;
                        format!("memory: the plan needs {:.1} GB of the {:.1} GB left", needs * 1e-9, has * 1e-9)
                    });
                    found.why.extend((!taken.is_empty()).then(|| format!("taken: {}", taken.join(", "))));
                    return Ok(Made { plan, split, needs, beside: None });
                }
                Err(refusal) => taken.push(stand_in(&refusal, &mut model, &mut split).ok_or_else(|| said(refusal))?),
            }
        }
    }

    pub fn build(&self, model: &LlmSpec, split: &Split) -> error::Result<Plan> {
        let work = Workload {
            seq_len: split.seq,
            global_batch: split.global_batch,
            micro_batch: split.micro_batch,
            dtype: self.dtype,
            documents: Default::default(),
        };
        guard::before(model, &work, &split.par)?;
        self.ends(model, split)?;
        let engines = Engines::of(&self.stack, &self.machine.cluster.spec);
        let node = self.machine.cluster.together(split.par.ep);
        let route = self.routing.route(model, &work, &split.par, node)?;
        let plan = build_routed(model, &work, &split.par, engines, route)?;
        guard::length(&plan, MOST_OPS)?;
        Ok(if self.tuning.is_some() { plan.frozen() } else { plan })
    }

    /// Refuses a step that no machine comes to the end of.
    fn ends(&self, model: &LlmSpec, split: &Split) -> error::Result<()> {
        let cluster = &self.machine.cluster;
        let rate = cluster.gpu.peak.get("bf16").map_or(f64::INFINITY, |peak| peak.value.value());
        let flops = model.flops_per_token(split.seq) * (split.global_batch * split.seq) as f64;
        let least = flops / (rate * f64::from(cluster.gpus()));
        let microbatches = split.global_batch as f64 / (f64::from(split.par.dp) * split.micro_batch as f64);
        if least <= LONGEST_STEP || microbatches <= MOST_OF_LONG {
            return Ok(());
        }
        let (batch, seq, gpus) = (split.global_batch, split.seq, cluster.gpus());
        Err(Cause::Size.infeasible(format!(
            "{batch} sequences of {seq} tokens take {gpus} GPUs {least:.0} s at their peak; check for extra digits"
        )))
    }

    /// Bytes that a plan may need.
    pub fn room(&self) -> f64 {
        let gpu = &self.machine.cluster.gpu;
        SPARE * (gpu.memory.value.value() - self.stack.reserved_memory.value.value())
    }
}

/// Bytes of the fullest rank: the first stage has the most micro-batches under way, the last has the logits.
pub fn needs(plan: &Plan) -> Result<f64, String> {
    let last = plan.programs.len() as u32 - 1;
    let first = needs_of(plan, 0)?;
    Ok(if last > 0 { first.max(needs_of(plan, last)?) } else { first })
}

/// Bytes of a rank of a stage.
pub fn needs_of(plan: &Plan, stage: u32) -> Result<f64, String> {
    let atoms = AtomTable::new(plan).map_err(said)?;
    Layout::new(plan, &atoms, stage).map(|layout| layout.bytes as f64).map_err(said)
}
