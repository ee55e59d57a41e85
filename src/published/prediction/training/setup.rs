//! A run with everything chosen, in the order of the decisions: machine, precision, attention kernel, model, split, software.

use crate::published::Shipped;
use crate::published::machine::{Chosen, Stated};
use crate::published::model::{mixture, sizes};
use crate::published::outcome::verdict::Prediction;
use crate::published::rank::precision::{by_row, narrowest, whole};
use crate::published::rank::recompute::{HALF, keeps_half_of_products, recomputed_part, unread};
use crate::published::rank::savings;
use crate::published::rank::tuning::Tuning;
use crate::published::row::case::Training;
use crate::published::software::habits::{Habits, indexes_rows, is_eager};
use crate::published::software::system::System;
use crate::published::software::table::{Fact, family};
use crate::published::software::{era, recipe};
use crate::published::split::{Split, gpus, split};
use crate::report::record::{Generation, Kind, Like};
use crate::spec::{Architecture, Dtype, GpuSpec, LlmSpec, Parallelism, StackSpec};
use crate::strategy::expert::Routing;
use crate::units::Seconds;

/// A run with everything chosen.
pub struct Setup {
    pub model: LlmSpec,
    pub split: Split,
    pub machine: Chosen,
    pub stack: StackSpec,
    /// What is computed again, where that is a part by its source or the system's habit.
    pub again: Option<Again>,
    /// Weights stay as they are.
    pub tuning: Option<Tuning>,
    pub routing: Routing,
    /// Of weights and products.
    pub dtype: Dtype,
}

/// A part that is computed again: a plan that has all of it so stands beside one that has none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Again {
    /// So much of what is in the layers.
    Layers(f64),
    /// What is before the activations of half of the networks, or half of it in all.
    Networks,
}

impl Again {
    pub fn part(self) -> f64 {
        match self {
            Again::Layers(part) => part,
            Again::Networks => HALF,
        }
    }
}

impl Setup {
    /// What is stated, and what follows from it by rule; noted in `found`, even where it does not come to the end.
    pub fn of(run: &Training, shipped: &Shipped, found: &mut Prediction) -> Result<Setup, String> {
        let gpus = gpus(run)?;
        let mut choose = Choose { run, shipped, found };
        let mut machine = choose.machine(gpus)?;
        let gpu = &mut machine.cluster.gpu;
        let dtype = choose.precision(gpu);
        let (stack, habits) = choose.attention_kernel(gpu)?;
        issue_by_itself(habits, stack, gpu);
        let mut model = choose.model(habits, gpu.architecture)?;
        let split = split(run, &model, habits, machine.cluster.spec.gpus_per_node)?;
        choose.parts_of_model(&mut model, &split.par);
        pad_vocabulary(run, &mut model, split.par.tp);
        let stack = choose.software(habits, stack, &model, &split.par, &mut machine.cluster.gpu);
        choose.note_unstated(&split, gpus);
        let tuning = Tuning::of(run);
        choose.say(tuning.map(|tuning| tuning.said().to_string()));
        let routing = mixture::routing(run);
        choose.note_unmodelled();
        let layers = recomputed_part(run, model.layers, split.par.pp, split.par.vp).map(Again::Layers);
        let again = layers.or(keeps_half_of_products(run).then_some(Again::Networks));
        Ok(Setup { model, split, machine, stack, again, tuning, routing, dtype })
    }
}

/// What the CPU takes for an op comes before its kernels, where it waits for every one of them, not beside those of others.
fn issue_by_itself(habits: Habits, stack: &StackSpec, gpu: &mut GpuSpec) {
    if !habits.overlap.kernels {
        let launch = &mut gpu.launch.value;
        *launch += Seconds::new(recipe::EAGER_BF16 / stack.kernels_of_op());
    }
}

/// To where products of the output matrix are as fast as others; ranks that share it have as many rows each.
fn pad_vocabulary(run: &Training, model: &mut LlmSpec, tp: u32) {
    let tp = u64::from(tp);
    if !System::of(&run.system).is(Fact::PublishedVocabulary) || !model.vocab.is_multiple_of(tp) {
        model.vocab = model.vocab.next_multiple_of(128 * tp);
    }
}

/// The decisions about one run, each noted as it is made.
struct Choose<'a> {
    run: &'a Training,
    shipped: &'a Shipped,
    found: &'a mut Prediction,
}

impl<'a> Choose<'a> {
    fn say(&mut self, said: impl IntoIterator<Item = String>) {
        self.found.why.extend(said);
    }

    fn machine(&mut self, gpus: u32) -> Result<Chosen, String> {
        let (gpu, interconnect, gpus_per_node) =
            (&self.run.gpu[..], &self.run.interconnect[..], self.run.gpus_per_node);
        let stated = Stated { gpu, gpus, gpus_per_node, whole_nodes: true, interconnect };
        let mut machine = self.shipped.fleet.choose(&stated)?;
        self.found.cluster = machine.said.clone();
        self.say(std::mem::take(&mut machine.why));
        Ok(machine)
    }

    /// The type of weights and products; the GPU at their rate, with attention as it was when the run was made.
    fn precision(&mut self, gpu: &mut GpuSpec) -> Dtype {
        narrowest(self.run, gpu, self.found);
        let dtype = whole(self.run, gpu, self.found);
        era::older_kernels(self.run, gpu);
        dtype
    }

    /// The stack with the attention kernel of the system, and what the system does by habit.
    fn attention_kernel(&mut self, gpu: &GpuSpec) -> Result<(&'a StackSpec, Habits), String> {
        let (habits, stacks) = (Habits::of_run(self.run), &self.shipped.stacks);
        let own = if mixture::is_deepseeks(self.run) { stacks.own("hai-llm", gpu) } else { None };
        let stack = own.map_or_else(|| stacks.with_kernel(habits.kernels, gpu), Ok)?;
        self.found.stack = stack.name.clone();
        // On a GPU from before fused attention, scores are in memory whatever the system does elsewhere.
        Ok((stack, if stack.fuses_attention() { habits } else { habits.unfused() }))
    }

    fn model(&mut self, habits: Habits, architecture: Architecture) -> Result<LlmSpec, String> {
        let run = self.run;
        let (mut model, said) = sizes::model(run, habits)?;
        self.say(said);
        let (software, kind) = (family(&run.system), Kind::of(&model));
        let generation = Generation::of(architecture);
        self.found.like = generation.map(|generation| Like { software, generation, kind });
        self.say(sizes::assumed_window(&model, habits));
        self.say(sizes::unknown_mamba(run, &model));
        // A pair of chunks is of the layers that are stated, all of which have experts.
        if let (Some(_), Some(layers)) = (run.pair_s, run.layers) {
            (model.layers, model.mtp) = (layers, None);
            model.moe.iter_mut().for_each(|moe| moe.dense_layers = 0);
        }
        Ok(model)
    }

    /// The model without the parts that no plan of such degrees has; and where its experts are.
    fn parts_of_model(&mut self, model: &mut LlmSpec, par: &Parallelism) {
        if model.indexer.is_some() && !sizes::has_sparse_attention(par) {
            model.indexer = None;
            self.say(["attention: taken to see all tokens, as sparse attention has no plan of this split".to_string()]);
        }
        self.say(mixture::parted(self.run, model, par));
        self.say(mixture::assumed_ep(self.run, model, par));
        if par.zero > 1 && model.mtp.take().is_some() {
            self.say([
                "taken without the module of multi-token prediction, which no plan of ZeRO 2 or 3 has".to_string()
            ]);
        }
    }

    /// The stack as the run has it: its library's release, its recipe, what it fuses, and how it scales products.
    fn software(
        &mut self,
        habits: Habits,
        stack: &StackSpec,
        model: &LlmSpec,
        par: &Parallelism,
        gpu: &mut GpuSpec,
    ) -> StackSpec {
        let (run, stacks) = (self.run, &self.shipped.stacks);
        let stack = era::older_library(run, gpu.architecture, stack);
        let stack = if habits.tuned_sends { stacks.tuned(stack) } else { stack };
        let stack = recipe::stack(run, &stack, par.options.tp_overlap, mixture::local(model, par.ep));
        let stack = if is_eager(&run.system) { stacks.eager(stack) } else { stack };
        let indexed = model.moe.is_some() && indexes_rows(&run.system);
        let stack = if indexed { stacks.indexed(stack) } else { stack };
        let stack = by_row(run, gpu, stack, self.found);
        let (name, otherwise) = stacks.named(&stack);
        self.found.stack = name;
        self.say(otherwise);
        stack
    }

    fn note_unstated(&mut self, split: &Split, gpus: u32) {
        let run = self.run;
        let dp = split.par.dp;
        let other = run.dp.filter(|stated| *stated != dp);
        self.say(
            other.map(|stated| format!("dp: {stated} as stated is not what the GPUs and other degrees leave, {dp}")),
        );
        self.say(split.unknown.iter().map(|word| format!("taken without {word}, which this version has not")));
        self.say(run.gpus.is_none().then(|| format!("gpus: not stated; {gpus} taken")));
        self.say(run.seq.is_none().then(|| format!("seq: not stated; {} taken", split.seq)));
        let batch = split.global_batch;
        self.say(run.global_batch.is_none().then(|| format!("global_batch: not stated; {batch} taken")));
    }

    /// What is stated and not understood, or in no plan.
    fn note_unmodelled(&mut self) {
        self.say(unread(self.run));
        self.say(savings::part_away(self.run).map(|part| {
            format!("optimizer: {:.0} % of it on the host is stated; plans have all of it there", 100.0 * part)
        }));
        self.say(savings::weights_are_away(self.run).then(|| {
            "parameters on the host: not modelled; weights are taken to be on the GPUs, whatever else is away"
                .to_string()
        }));
    }
}
