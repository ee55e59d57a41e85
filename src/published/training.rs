//! Predicts one training run: model, machine, software and split by rule, then a plan and its cost.

use super::case::Training;
use super::convention::Convention;
use super::machine::{Chosen, Stated};
use super::measured::{Measured, Step};
use super::software::Habits;
use super::split::{Split, gpus, recompute, split};
use super::standin::stand_in;
use super::verdict::Prediction;
use super::{Shipped, sizes};
use crate::cost::{Effort, Machine, cost};
use crate::device::Roofline;
use crate::error::Error;
use crate::plan::link::AtomTable;
use crate::plan::memory::Layout;
use crate::plan::{Engine, Plan};
use crate::spec::{Dtype, LlmSpec, Recompute, StackSpec, Workload};
use crate::strategy::expert::Routing;
use crate::strategy::{Engines, build_routed};

/// A plan keeps in bf16 what FP8 systems keep in eight bits, its logits whole and its gradients in fp32: what it is
/// over by as much may still have fitted.
const SPARE: f64 = 1.4;

/// What sends reach of a NIC where NCCL's settings are tuned: 35.8 of 50 GB/s (B200 Vultr POC cluster test summary of
/// 2026-05-18, section 10, `v2`); 33 of 50 by default on H20 with PXN (github issue NVIDIA/nccl-tests#321).
const TUNED_SENDS: f64 = 0.716;

/// A run with everything chosen.
struct Setup<'a> {
    model: LlmSpec,
    split: Split,
    machine: Chosen,
    stack: &'a StackSpec,
}

/// What the run would report, or why that cannot be said. What was chosen is said in both cases.
pub fn predict(run: &Training, shipped: &Shipped) -> Prediction {
    let mut found = Prediction::default();
    if let Err(why) = try_predict(run, shipped, &mut found) {
        found.why.push(why);
    }
    found
}

fn try_predict(run: &Training, shipped: &Shipped, found: &mut Prediction) -> Result<(), String> {
    let measured = Measured::of(run, recompute(run) == Some(Recompute::Full));
    if let Some(measured) = measured {
        (found.measured, found.unit) = (Some(measured.value), measured.quantity.unit().into());
    }
    let stated =
        Stated { gpu: &run.gpu, gpus: gpus(run)?, gpus_per_node: run.gpus_per_node, interconnect: &run.interconnect };
    let mut machine = shipped.fleet.choose(&stated)?;
    let habits = Habits::of(&run.system);
    if let Some(out) = machine.cluster.spec.scale_out.as_mut().filter(|_| habits.tuned_sends) {
        out.p2p.value = out.p2p.value.max(out.raw.value * TUNED_SENDS);
    }
    found.cluster = machine.said.clone();
    let stack = shipped.stacks.with_kernel(habits.kernels, &machine.cluster.gpu)?;
    found.stack = stack.name.clone();
    let (model, _) = sizes::model(run, habits)?;
    let split = split(run, &model, habits, machine.cluster.spec.gpus_per_node)?;
    let setup = Setup { model, split, machine, stack };
    let without = |word: &&str| format!("taken without {word}, which this version has not");
    found.why.extend(setup.split.unknown.iter().map(without));
    let measured = measured.ok_or("measured: no time, rate or utilization is stated")?;
    let (plan, fitted) = setup.plan(recompute(run), found)?;
    found.split = setup.words(&fitted);
    let seconds = setup.seconds(&plan)?;
    let peak = &setup.machine.cluster.gpu.peak;
    let model = &setup.model;
    let step = Step {
        seconds,
        tokens: (fitted.global_batch * fitted.seq) as f64,
        gpus: f64::from(stated.gpus),
        peak: peak.get("bf16").map_or(f64::NAN, |p| p.value.value()),
        flops_per_token: &|convention: Convention| convention.flops_per_token(model, fitted.seq),
    };
    found.predicted = Some(measured.quantity.of(&step)).filter(|v| v.is_finite());
    Ok(())
}

impl Setup<'_> {
    /// The plan, with the least recomputation that fits where none is stated. A run that really happened did fit:
    /// if ours does not even with all recomputed, its weights were kept by means that the source does not state
    /// (offload, sharding), which tells nothing of its activations; it is predicted without, and that is noted.
    fn plan(&self, stated: Option<Recompute>, found: &mut Prediction) -> Result<(Plan, Split), String> {
        if let Some(recompute) = stated {
            return self.with(recompute, found);
        }
        let first = self.with(Recompute::None, found);
        if first.is_ok() && found.memory.is_none() {
            return first;
        }
        let lacks = found.memory.take();
        for recompute in [Recompute::Selective, Recompute::Full] {
            let said = found.why.len();
            let tried = self.with(recompute, found);
            if tried.is_ok() && found.memory.is_none() {
                return tried;
            }
            found.why.truncate(said);
        }
        found.memory = lacks;
        first
    }

    /// The plan with this recomputation, and whether it fits.
    fn with(&self, recompute: Recompute, found: &mut Prediction) -> Result<(Plan, Split), String> {
        let (mut model, mut split) = (self.model.clone(), self.split.clone());
        split.par.recompute = recompute;
        let mut taken = Vec::new();
        loop {
            match self.build(&model, &split) {
                Ok(plan) => {
                    found.memory = self.over(&plan)?;
                    found.why.extend((!taken.is_empty()).then(|| format!("taken: {}", taken.join(", "))));
                    return Ok((plan, split));
                }
                Err(refusal) => taken.push(stand_in(&refusal, &mut model, &mut split).ok_or(refusal)?),
            }
        }
    }

    fn build(&self, model: &LlmSpec, split: &Split) -> Result<Plan, String> {
        let work = Workload {
            seq_len: split.seq,
            global_batch: split.global_batch,
            micro_batch: split.micro_batch,
            dtype: Dtype::Bf16,
            documents: Default::default(),
        };
        let ctas = |n: u32| Engine::Sm { ctas: n.min(u32::from(u16::MAX)) as u16 };
        let engines =
            Engines { p2p: ctas(self.stack.p2p_ctas.value), collective: ctas(self.stack.collective_ctas.value) };
        // Published runs of mixtures are routed evenly, or near to it: their sources force it.
        let node = self.machine.cluster.spec.gpus_per_node;
        let route = Routing::Balanced.route(model, &work, &split.par, node).map_err(said)?;
        build_routed(model, &work, &split.par, engines, route).map_err(said)
    }

    /// By how much the fullest rank is over the memory of its GPU, in words; `None`: it fits.
    fn over(&self, plan: &Plan) -> Result<Option<String>, String> {
        let atoms = AtomTable::new(plan).map_err(said)?;
        // The first stage has the most micro-batches under way, the last has the logits.
        let last = plan.programs.len() as u32 - 1;
        let mut most = Layout::new(plan, &atoms, 0).map_err(said)?.bytes;
        if last > 0 {
            most = most.max(Layout::new(plan, &atoms, last).map_err(said)?.bytes);
        }
        let gpu = &self.machine.cluster.gpu;
        let has = gpu.memory.value.value() - self.stack.reserved_memory.value.value();
        let over = most as f64 > has * SPARE;
        Ok(over
            .then(|| format!("memory: the plan needs {:.1} GB of the {:.1} GB left", most as f64 * 1e-9, has * 1e-9)))
    }

    fn seconds(&self, plan: &Plan) -> Result<f64, String> {
        let kernels = Roofline::new(&self.machine.cluster.gpu, self.stack).map_err(said)?;
        let machine = Machine { cluster: &self.machine.cluster, stack: self.stack, kernels: &kernels, devices: None };
        Ok(cost(plan, machine, Effort::SUMS).map_err(said)?.step.value())
    }

    fn words(&self, split: &Split) -> String {
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

/// An error, as the reason why there is no prediction.
pub fn said(error: Error) -> String {
    match error {
        Error::Infeasible(why) => why,
        other => other.to_string(),
    }
}
