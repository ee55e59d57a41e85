//! Predicts one training run: model, machine, software and split by rule, then a plan and its cost.

use super::case::Training;
use super::convention::Convention;
use super::family::family;
use super::known::filled_in;
use super::machine::{Chosen, Stated};
use super::measured::{Measured, Quantity, Step};
use super::memory::Counted;
use super::pair::pair;
use super::precision::{by_row, narrowest, whole};
use super::recipe;
use super::recompute::{recompute, recomputed_part, unread};
use super::reports;
use super::savings;
use super::software::{self, Habits, indexes_rows, is_eager};
use super::split::{ROWS, Split, gpus, split, without_assumed, without_spare};
use super::standin::stand_in;
use super::tuning::Tuning;
use super::verdict::Prediction;
use super::wider::wider;
use super::words::is_narrow;
use super::{Shipped, era, mixture, sharding, sizes};
use crate::cost::{Effort, Machine, cost};
use crate::device::Roofline;
use crate::error::Error;
use crate::plan::Plan;
use crate::plan::link::AtomTable;
use crate::plan::memory::{Layout, with_kept};
use crate::plan::unfused::AT_A_TIME;
use crate::report::made_of;
use crate::report::record::{Generation, Kind, Like};
use crate::spec::{Dtype, LlmSpec, Recompute, StackSpec, Workload};
use crate::strategy::expert::Routing;
use crate::strategy::lengths::{bisect, grain};
use crate::strategy::{Engines, build_routed, guard};
use crate::units::Seconds;

/// A plan keeps in bf16 what FP8 systems keep in eight bits, its logits whole and its gradients in fp32: what it is
/// over by as much may still have fitted. With 1.2 or 1.05 more runs would be taken to compute again than did: in the shared
/// table of runs errors below which 90 % are would go up, and runs of NeMo and Megatron-Bridge become 5 to 13 % too slow.
const SPARE: f64 = 1.4;

/// The part of a run that trains, where tokens are told by the GPU-hours of all of it: evaluation, checkpoints, failures
/// and what is done twice after them take the rest. About the median of 18 dense models' cards, from LLaMA and BLOOM to
/// Llama 3.1 and SmolLM3, which lie between 0.3 and 1.03; Llama 3 reports more than 0.9 (arXiv:2407.21783, section 3.3.4).
const EFFECTIVE: f64 = 0.8;

/// Picoseconds of longer steps are no longer told apart (2^53 of them are two and a half hours), so that microbatches repeat no
/// more and each is walked: seconds at the GPUs' own rate, and microbatches, of which no run has both.
const LONGEST_STEP: f64 = 1800.0;
const MOST_OF_LONG: f64 = 64.0;

/// Ops of a rank, beyond which a plan takes longer to link than a table of cases is waited for.
const MOST_OPS: f64 = 4e6;

/// A run with everything chosen.
struct Setup {
    model: LlmSpec,
    split: Split,
    machine: Chosen,
    stack: StackSpec,
    /// So much of what full recomputation computes again is computed again, where that is stated or the system's habit.
    again: Option<f64>,
    /// Weights stay as they are.
    tuning: Option<Tuning>,
    routing: Routing,
    /// Of weights and products.
    dtype: Dtype,
}

/// What the run would report, or why that cannot be said. What was chosen is said in both cases.
pub fn predict(run: &Training, shipped: &Shipped) -> Prediction {
    let mut found = Prediction::default();
    if let Err(why) = try_predict(run, shipped, &mut found) {
        found.why.push(why);
    }
    found.why.extend(run.left_out.iter().cloned());
    found
}

fn try_predict(run: &Training, shipped: &Shipped, found: &mut Prediction) -> Result<(), String> {
    let measured = Measured::of(run, recompute(run) == Some(Recompute::Full));
    if let Some(measured) = measured {
        (found.measured, found.unit) = (Some(measured.value), measured.quantity.unit().into());
    }
    found.mem_measured_gib = run.mem_gib;
    let reported = reports::filled_in(run);
    let known = reported.as_ref().map_or(run, |(reported, _)| reported);
    let stated = without_spare(without_assumed(recipe::filled_in(sizes::with_experts(filled_in(known)))));
    let setup = Setup::of(&stated, shipped, found)?;
    found.why.extend(reported.map(|(_, said)| said));
    if measured.is_none() && run.mem_gib.is_none() {
        return Err("measured: no time, rate, utilization or memory is stated".into());
    }
    let (setup, made) = fitting(&stated, shipped, setup, found)?;
    found.split = setup.words(&made.split);
    found.mem_predicted_gib = run.mem_gib.and(setup.memory(run, &made)?);
    let Some(measured) = measured else { return Ok(()) };
    if measured.quantity == Quantity::Longest {
        found.memory = None;
        found.predicted = Some(setup.longest(&made.split)?);
        return Ok(());
    }
    let fitted = &made.split;
    let mut seconds = match measured.quantity {
        Quantity::Pair => pair(&made.plan, setup.machine(&setup.kernels()?))?,
        _ => setup.seconds(&made, &mut found.parts)?,
    };
    if is_whole_run(run, measured) {
        seconds /= EFFECTIVE;
        found.why.push(format!("tokens over GPU-hours of a whole run: {EFFECTIVE} of its time is taken to train"));
    }
    let peak = &setup.machine.cluster.gpu.peak;
    let model = &setup.model;
    let step = Step {
        seconds,
        tokens: (fitted.global_batch * fitted.seq) as f64,
        gpus: f64::from(setup.machine.cluster.gpus()),
        peak: peak.get(setup.dtype.name()).map_or(f64::NAN, |p| p.value.value()),
        flops_per_token: &|convention: Convention| convention.flops_per_token(model, fitted.seq),
    };
    found.predicted = Some(measured.quantity.of(&step)).filter(|v| v.is_finite());
    let products = if is_narrow(&run.precision) { "fp8" } else { setup.dtype.name() };
    let peak = peak.get(products).map_or(f64::NAN, |peak| peak.value.value());
    // Of frozen weights a third of the FLOPs is not there.
    let above = measured.quantity.above_peak(measured.value, &step, peak).filter(|_| setup.tuning.is_none());
    found.why.extend(above);
    // Nobody prints more than the peak: whoever does not say how attention is counted has counted half of it.
    let unsaid = run.flops_convention.is_empty() && fitted.seq >= 1 << 15;
    if let (true, Some(halved)) = (unsaid, measured.quantity.halved())
        && measured.quantity.share(&step).is_some_and(|share| share > 1.0)
    {
        found.predicted = Some(halved.of(&step)).filter(|v| v.is_finite());
        found.why.push("attention: counted half, as with all of it the GPUs would be above their peak".into());
    }
    Ok(())
}

/// A rate of which neither system nor sequence nor batch is known was not measured on steps: tokens and GPU-hours of the
/// run are known, as reports of models have them.
fn is_whole_run(run: &Training, measured: Measured) -> bool {
    let steps = [run.seq, run.global_batch, run.micro_batch];
    measured.quantity == Quantity::TokensPerGpu && run.system.is_empty() && steps.iter().all(Option::is_none)
}

/// A plan with its choices.
struct Made {
    plan: Plan,
    split: Split,
    /// Bytes of the fullest rank.
    needs: f64,
    /// A plan that recomputes nothing, and the part of the layers that there is room for to be as they are in it.
    beside: Option<(Plan, f64)>,
}

/// The plan of a run, with more ranks to share what they have where its source leaves that open and the plan cannot
/// be, or does not fit, otherwise: a run that really happened did fit.
fn fitting(
    stated: &Training,
    shipped: &Shipped,
    setup: Setup,
    found: &mut Prediction,
) -> Result<(Setup, Made), String> {
    for sequences in at_a_time(&setup, stated) {
        let run = Training { micro_batch: Some(sequences), ..stated.clone() };
        let mut tried = found.clone();
        let fits = attempt(&run, stated, shipped, &mut tried);
        // Nobody computes again for more sequences at a time, unless fewer cost the network.
        let whole = |made: &Made| recompute(stated).is_some() || made.split.par.recompute == Recompute::None;
        let plain = |made: &Made| made.beside.is_none() && whole(made);
        if let Some(fits) = fits.filter(|(setup, made)| setup.split.par.zero == 3 || plain(made)) {
            *found = tried;
            return Ok(fits);
        }
    }
    let first = setup.plan(recompute(stated), found);
    if first.is_ok() && found.memory.is_none() {
        return first.map(|made| (setup, made));
    }
    let why = first.as_ref().err().cloned();
    for zero in sharding::to_try(stated) {
        let run = Training { zero: (*zero).into(), ..stated.clone() };
        if let Some(fits) = attempt(&run, stated, shipped, found) {
            found.why.push(format!("zero: not stated; {zero} taken, which fits"));
            return Ok(fits);
        }
    }
    // ZeRO 3 goes on being tried where more ranks share the sequence.
    let zeros: Vec<&str> = std::iter::once("").chain(sharding::to_try(stated).iter().copied()).collect();
    let (node, mut run) = (setup.machine.cluster.spec.gpus_per_node, stated.clone());
    // A plan that needs the least over what there is, where none fits.
    let mut nearest = first.ok().map(|made| (made.needs / setup.room(), setup, made, found.clone()));
    while let Some(next) = wider(&run, stated, node) {
        run = next;
        for zero in &zeros {
            let zero = if zero.is_empty() { stated.zero.clone() } else { (*zero).into() };
            let run = Training { zero, ..run.clone() };
            let mut tried = Prediction::default();
            let Some((setup, made)) = built(&run, stated, shipped, &mut tried) else { continue };
            let par = &setup.split.par;
            let [tp, pp, ulysses, ring] = [par.tp, par.pp, par.ulysses, par.ring];
            let fits = tried.memory.is_none();
            let said = if fits { "which fit" } else { "none that fit being known, which come nearest to it" };
            let taken =
                format!("degrees: not all stated; tp {tp}, pp {pp}, ulysses {ulysses}, ring {ring} taken, {said}");
            tried.why.push(taken);
            if fits {
                note(found, tried);
                return Ok((setup, made));
            }
            let over = made.needs / setup.room();
            if nearest.as_ref().is_none_or(|(least, ..)| over < *least) {
                nearest = Some((over, setup, made, tried));
            }
        }
    }
    // What can be built says more than why what was stated cannot.
    let (_, setup, made, tried) = nearest.ok_or_else(|| why.unwrap_or_default())?;
    note(found, tried);
    Ok((setup, made))
}

/// What was chosen in place of what was noted before.
fn note(found: &mut Prediction, tried: Prediction) {
    (found.memory, found.why, found.cluster) = (tried.memory, tried.why, tried.cluster);
}

/// The plan of `run`, whether or not it fits.
fn built(run: &Training, stated: &Training, shipped: &Shipped, tried: &mut Prediction) -> Option<(Setup, Made)> {
    let setup = Setup::of(run, shipped, tried).ok()?;
    let made = setup.plan(recompute(stated), tried).ok()?;
    Some((setup, made))
}

/// Sequences at a time where nobody says, the most first.
///
/// Where weights are gathered anew for each microbatch (ZeRO 3), whoever gathers for one at a time waits for the network:
/// all that a rank has, or half as many until they fit. Where tensors are cut and no pipeline asks for many microbatches, a
/// rank's part of a product needs as many times the rows to be as large as it was. Where scores are in memory, whoever
/// chose found out that some numbers of heads and sequences go around the fused softmax: as few as do not.
fn at_a_time(setup: &Setup, stated: &Training) -> Vec<u64> {
    let (split, par) = (&setup.split, &setup.split.par);
    let share = stated.global_batch.map_or(1, |batch| batch / u64::from(par.dp));
    let most = match par.zero {
        _ if stated.micro_batch.is_some() || par.pp > 1 => 1,
        3 => share,
        _ => share.min(u64::from(par.tp) * (ROWS * u64::from(par.ulysses * par.ring) / split.seq).max(1)),
    };
    let halved = std::iter::successors(Some(most), |n| Some(n / 2)).take_while(|n| *n > 1);
    let heads = setup.model.heads / u64::from(par.tp * par.ulysses).max(1);
    let scores = stated.micro_batch.is_none() && !setup.stack.fuses_attention();
    let fused = (1..=AT_A_TIME).find(|n| (n * heads).is_multiple_of(AT_A_TIME)).filter(|n| scores && *n > 1);
    halved.chain(fused).filter(|n| share.is_multiple_of(*n)).collect()
}

/// The plan of `run`, if it fits; then what was chosen is noted in place of what was noted before.
fn attempt(run: &Training, stated: &Training, shipped: &Shipped, found: &mut Prediction) -> Option<(Setup, Made)> {
    let mut tried = Prediction::default();
    let both = built(run, stated, shipped, &mut tried).filter(|_| tried.memory.is_none())?;
    note(found, tried);
    Some(both)
}

impl Setup {
    /// What is stated, and what follows from it by rule; noted in `found`, even where it does not come to the end.
    fn of(run: &Training, shipped: &Shipped, found: &mut Prediction) -> Result<Setup, String> {
        let interconnect = &run.interconnect;
        let (gpu, gpus_per_node) = (&run.gpu[..], run.gpus_per_node);
        let stated = Stated { gpu, gpus: gpus(run)?, gpus_per_node, whole_nodes: true, interconnect };
        let mut machine = shipped.fleet.choose(&stated)?;
        found.cluster = machine.said.clone();
        found.why.append(&mut machine.why);
        let habits = Habits::of_run(run);
        narrowest(run, &mut machine.cluster.gpu, found);
        let dtype = whole(run, &mut machine.cluster.gpu, found);
        era::older_kernels(run, &mut machine.cluster.gpu);
        let own = if mixture::is_deepseeks(run) { shipped.stacks.own("hai-llm", &machine.cluster.gpu) } else { None };
        let stack = own.map_or_else(|| shipped.stacks.with_kernel(habits.kernels, &machine.cluster.gpu), Ok)?;
        found.stack = stack.name.clone();
        // On a GPU from before fused attention, scores are in memory whatever the system does elsewhere.
        let habits = if stack.fuses_attention() { habits } else { habits.unfused() };
        if !habits.overlap.kernels {
            // What the CPU takes for an op comes before its kernels, not beside those of others.
            let launch = &mut machine.cluster.gpu.launch.value;
            *launch += Seconds::new(recipe::EAGER_BF16 / stack.kernels_of_op());
        }
        let (mut model, said) = sizes::model(run, habits)?;
        found.why.extend(said);
        let (software, kind) = (family(&run.system), Kind::of(&model));
        let generation = Generation::of(machine.cluster.gpu.architecture);
        found.like = generation.map(|generation| Like { software, generation, kind });
        found.why.extend(sizes::assumed_window(&model, habits));
        found.why.extend(sizes::unknown_mamba(run, &model));
        if let (Some(_), Some(layers)) = (run.pair_s, run.layers) {
            (model.layers, model.mtp) = (layers, None);
            model.moe.iter_mut().for_each(|moe| moe.dense_layers = 0);
        }
        let split = split(run, &model, habits, machine.cluster.spec.gpus_per_node)?;
        if model.indexer.is_some() && !sizes::has_sparse_attention(&split.par) {
            model.indexer = None;
            found.why.push("attention: taken to see all tokens, as sparse attention has no plan of this split".into());
        }
        found.why.extend(mixture::parted(run, &model, &split.par));
        found.why.extend(mixture::assumed_ep(run, &model, &split.par));
        if split.par.zero > 1 && model.mtp.take().is_some() {
            found
                .why
                .push("taken without the module of multi-token prediction, which no plan of ZeRO 2 or 3 has".into());
        }
        let tp = u64::from(split.par.tp);
        // To where products of the output matrix are as fast as others; ranks that share it have as many rows each.
        if software::fills_vocabulary(&run.system) || model.vocab % tp > 0 {
            model.vocab = model.vocab.next_multiple_of(128 * tp);
        }
        let stack = era::older_library(run, machine.cluster.gpu.architecture, stack);
        let stack = if habits.tuned_sends { shipped.stacks.tuned(stack) } else { stack };
        let stack = recipe::stack(run, &stack, split.par.options.tp_overlap, mixture::local(&model, split.par.ep));
        let stack = if is_eager(&run.system) { shipped.stacks.eager(stack) } else { stack };
        let indexed = model.moe.is_some() && indexes_rows(&run.system);
        let stack = if indexed { shipped.stacks.indexed(stack) } else { stack };
        let stack = by_row(run, &mut machine.cluster.gpu, stack, found);
        let (name, otherwise) = shipped.stacks.named(&stack);
        found.stack = name;
        found.why.extend(otherwise);
        let without = |word: &&str| format!("taken without {word}, which this version has not");
        found.why.extend(split.unknown.iter().map(without));
        found.why.extend(run.gpus.is_none().then(|| format!("gpus: not stated; {} taken", stated.gpus)));
        found.why.extend(run.seq.is_none().then(|| format!("seq: not stated; {} taken", split.seq)));
        let batch =
            run.global_batch.is_none().then(|| format!("global_batch: not stated; {} taken", split.global_batch));
        found.why.extend(batch);
        let tuning = Tuning::of(run);
        found.why.extend(tuning.map(|tuning| tuning.said().to_string()));
        let routing = mixture::routing(run);
        found.why.extend(unread(run));
        found.why.extend(savings::part_away(run).map(|part| {
            format!("optimizer: {:.0} % of it on the host is stated; plans have all of it there", 100.0 * part)
        }));
        found.why.extend(savings::weights_are_away(run).then(|| {
            "parameters on the host: not modelled; weights are taken to be on the GPUs, whatever else is away"
                .to_string()
        }));
        let again = recomputed_part(run, model.layers, split.par.pp, split.par.vp);
        Ok(Setup { model, split, machine, stack, again, tuning, routing, dtype })
    }

    /// The plan, with the least recomputation that fits where none is stated: of no layer, else of attention alone,
    /// else of as many layers as there is no room for. A run that really happened did fit: if ours does not even with
    /// all recomputed, its weights were kept by means that the source does not state (offload, sharding), which tells
    /// nothing of its activations; it is predicted without, and that is noted.
    fn plan(&self, stated: Option<Recompute>, found: &mut Prediction) -> Result<Made, String> {
        if let Some(part) = self.again {
            let whole = self.with(Recompute::None, found)?;
            found.memory = None;
            let again = self.with(Recompute::Full, found)?;
            found.why.push(format!("recomputed: {:.0} % of what is in the layers", 100.0 * part));
            return Ok(Made { beside: Some((whole.plan, 1.0 - part)), ..again });
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
        let (mut model, mut split) = (self.model.clone(), self.split.clone());
        split.par.recompute = recompute;
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
                Err(refusal) => taken.push(stand_in(&refusal, &mut model, &mut split).ok_or(refusal)?),
            }
        }
    }

    fn build(&self, model: &LlmSpec, split: &Split) -> Result<Plan, String> {
        let work = Workload {
            seq_len: split.seq,
            global_batch: split.global_batch,
            micro_batch: split.micro_batch,
            dtype: self.dtype,
            documents: Default::default(),
        };
        guard::before(model, &work, &split.par).map_err(said)?;
        self.ends(model, split)?;
        let engines = Engines::of(&self.stack, &self.machine.cluster.spec);
        let node = self.machine.cluster.spec.gpus_per_node;
        let route = self.routing.route(model, &work, &split.par, node).map_err(said)?;
        let plan = build_routed(model, &work, &split.par, engines, route).map_err(said)?;
        guard::length(&plan, MOST_OPS).map_err(said)?;
        Ok(if self.tuning.is_some() { plan.frozen() } else { plan })
    }

    /// Refuses a step that no machine comes to the end of.
    fn ends(&self, model: &LlmSpec, split: &Split) -> Result<(), String> {
        let cluster = &self.machine.cluster;
        let rate = cluster.gpu.peak.get("bf16").map_or(f64::INFINITY, |peak| peak.value.value());
        let flops = model.flops_per_token(split.seq) * (split.global_batch * split.seq) as f64;
        let least = flops / (rate * f64::from(cluster.gpus()));
        let microbatches = split.global_batch as f64 / (f64::from(split.par.dp) * split.micro_batch as f64);
        if least <= LONGEST_STEP || microbatches <= MOST_OF_LONG {
            return Ok(());
        }
        let (batch, seq, gpus) = (split.global_batch, split.seq, cluster.gpus());
        Err(format!(
            "size: {batch} sequences of {seq} tokens take {gpus} GPUs {least:.0} s at their peak; check for extra digits"
        ))
    }

    /// Bytes that a plan may need.
    fn room(&self) -> f64 {
        let gpu = &self.machine.cluster.gpu;
        SPARE * (gpu.memory.value.value() - self.stack.reserved_memory.value.value())
    }

    /// Tokens of the longest sequence that fits as a run is split: of what the GPU has, and not a little more.
    fn longest(&self, split: &Split) -> Result<f64, String> {
        let mut refused = None;
        let longest =
            bisect(grain(&split.par), |seq| match self.build(&self.model, &Split { seq, ..split.clone() }) {
                Ok(plan) => Ok::<bool, String>(self.takes(&plan, None)? <= self.room() / SPARE),
                Err(why) => {
                    refused = Some(why);
                    Ok(false)
                }
            })?;
        let none = || refused.unwrap_or_else(|| "memory: no sequence fits, however short".into());
        longest.map(|n| n as f64).ok_or_else(none)
    }

    /// GiB of the fullest GPU, as the source of a run counts them; none where as much was recomputed as made it fit.
    fn memory(&self, run: &Training, made: &Made) -> Result<Option<f64>, String> {
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

    fn kernels(&self) -> Result<Roofline, String> {
        Roofline::new(&self.machine.cluster.gpu, &self.stack).map_err(said)
    }

    fn machine<'m>(&'m self, kernels: &'m Roofline) -> Machine<'m> {
        Machine { cluster: &self.machine.cluster, stack: &self.stack, kernels, devices: None }
    }

    /// Of a step; layers that recompute take as long as in a plan where all do. What that plan's step is made of goes
    /// to `parts`.
    fn seconds(&self, made: &Made, parts: &mut String) -> Result<f64, String> {
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

/// What is computed again where all does not fit, the least first.
const LESS: [Recompute; 2] = [Recompute::Selective, Recompute::Full];

/// Bytes of the fullest rank: the first stage has the most micro-batches under way, the last has the logits.
fn needs(plan: &Plan) -> Result<f64, String> {
    let last = plan.programs.len() as u32 - 1;
    let first = needs_of(plan, 0)?;
    Ok(if last > 0 { first.max(needs_of(plan, last)?) } else { first })
}

/// Bytes of a rank of a stage.
fn needs_of(plan: &Plan, stage: u32) -> Result<f64, String> {
    let atoms = AtomTable::new(plan).map_err(said)?;
    Layout::new(plan, &atoms, stage).map(|layout| layout.bytes as f64).map_err(said)
}

/// An error, as the reason why there is no prediction.
pub fn said(error: Error) -> String {
    match error {
        Error::Infeasible(why) => why.to_string(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model's card: so many tokens in so many GPU-hours.
    fn card() -> Training {
        let (model, gpu) = ("LLaMA-13B".into(), "A100-SXM-80GB".into());
        Training { model, gpu, tokens_per_s_per_gpu: Some(2000.0), ..Training::default() }
    }

    #[test]
    fn replicas_share_what_they_hold_where_nothing_is_told() {
        assert_eq!(sharding::to_try(&card()), ["ZeRO-1", "ZeRO-3"]);
        for told in [
            Training { system: "Megatron-LM".into(), ..card() },
            Training { zero: "none".into(), ..card() },
            Training { tp: Some(2), ..card() },
        ] {
            assert!(sharding::to_try(&told).is_empty(), "{told:?}");
        }
        let found = predict(&card(), &Shipped::new().unwrap());
        assert!(found.split.starts_with("dp 8 x tp 1 x pp 1 ") && found.split.contains("zero 1"), "{}", found.split);
        assert!(found.why.iter().any(|why| why.contains("0.8 of its time")), "{:?}", found.why);
        assert!(found.predicted.is_some() && found.parts.contains("compute: gemm"), "{}", found.parts);
    }
}
