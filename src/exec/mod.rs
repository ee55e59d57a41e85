//! Runs a plan for real, on CPU threads: one thread a device, which looks after the ranks of that device; each rank has
//! private memory, lanes and slots.
//!
//! A rank starts an op when the plan's edges hold, the same edges that the predictors walk. Messages are
//! handed over, never shared; bytes are counted where they are delivered and the peak where memory is
//! touched, so that both can be held against what the plan says. A slot is NaN until something is written
//! and, where results are kept, again after its last use. Kernels compute in f32, or in f64 for a plan whose dtype is f64; bf16
//! buffers hold two bytes and are rounded as they are written.

mod anew;
mod arena;
pub mod attention_io;
pub mod copied;
pub mod cuda;
mod exchange;
mod gather;
pub mod inject;
pub mod inputs;
pub mod kernels;
mod memory;
mod operands;
mod outputs;
mod packed;
pub mod probe;
mod rank;
pub mod rate;
pub mod reference;
pub mod routing;
mod shared;
pub mod source;
mod spares;
pub mod state;
mod train;
pub mod transport;
mod turns;
pub mod weights;
mod worker;

use crate::error::{Error, Result};
use crate::plan::{Dtype, Plan, check};
use crate::spec::Throttle;
use crate::timeline::Timeline;
pub(crate) use arena::Data;
use copied::Copied;
use cuda::fused::Attention;
use inject::Injection;
use source::Source;
use state::Watch;
use std::collections::BTreeMap;
use std::sync::{Arc, Barrier};

/// How to run a plan on CPU threads.
#[derive(Debug, Clone)]
pub struct Options {
    /// Seeds weights and tokens.
    pub seed: u64,
    /// Device of each rank: ranks of one device take turns to compute.
    pub devices: Vec<u32>,
    /// Keep gradients, new weights and hidden states of every step (they are large), and fill every slot with NaN
    /// after its last use: for a run whose numbers are looked at. Otherwise it is the times that count.
    pub keep: bool,
    /// How slow the links between ranks are made; `None`: as fast as threads hand over.
    pub throttle: Option<Throttle>,
    /// The fault that happens on purpose in the last step; `None`: nothing goes wrong.
    pub inject: Option<Injection>,
    /// Where other runs that begin each step at the same moment are waited for, to see what they do to each other; each
    /// has one device. `None`: this run is alone.
    pub beside: Option<Arc<Barrier>>,
    /// Whose kernels do attention on GPUs.
    pub attention: Attention,
}

impl Options {
    /// Links as fast as they are, and nothing goes wrong.
    pub fn new(seed: u64, devices: Vec<u32>, keep: bool) -> Options {
        Options { seed, devices, keep, throttle: None, inject: None, beside: None, attention: Attention::Best }
    }
}

/// How long to train, and on what.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    pub source: &'a Source,
    pub steps: u64,
    /// Keep of the last step what [`Options::keep`] keeps of every one, and the logits.
    pub keep_last: bool,
    /// Whom to show the ranks' memories before the first step and after each, if all ranks are in this process, as
    /// threads or on GPUs; `None`: nobody.
    pub watch: Option<&'a dyn Watch>,
}

impl<'a> Job<'a> {
    pub fn new(source: &'a Source, steps: u64) -> Job<'a> {
        Job { source, steps, keep_last: false, watch: None }
    }

    /// The numbers of the job's steps: they go on from those of the run that it continues.
    pub fn numbers(&self) -> std::ops::RangeInclusive<u64> {
        self.source.before.steps + 1..=self.source.before.steps + self.steps
    }
}

/// What a run brought.
#[derive(Debug, Clone)]
pub struct Run {
    /// The measured times: a class for each rank, with every op's span.
    pub timeline: Timeline,
    /// Seconds that each op of each rank had a core, by rank and op: of a kernel less than its span where somebody else
    /// had the core; of an exchange of rows what the rank did for it, without its waits; of other ops 0.
    pub on_core: Vec<Vec<f64>>,
    /// What each rank copied for messages, transfers and collectives alike; nothing on GPUs.
    pub copied: Vec<Vec<Copied>>,
    /// The loss, a mean over the tokens of the global batch; NaN for a plan that has none.
    pub loss: f64,
    /// Bytes that each rank sent, counted in the transport.
    pub sent_bytes: Vec<u64>,
    /// Most bytes that each rank had in use, counted at its allocator.
    pub peak_bytes: Vec<u64>,
    /// Most bytes of its part of the host's memory that each rank had in use, counted at its allocator.
    pub host_peak_bytes: Vec<u64>,
    /// Gradients by weight name, summed over ranks as the plan does it.
    pub grads: BTreeMap<String, Vec<f64>>,
    /// Weights after the optimizer step, by name, from rank 0.
    pub weights: BTreeMap<String, Vec<f64>>,
    /// Final hidden states [seq * hidden] of every sequence of the global batch.
    pub hidden: Vec<Vec<f64>>,
    /// Logits [seq * vocab] of every sequence of the global batch, where they were asked for.
    pub logits: Vec<Vec<f64>>,
    /// What an attention-only plan was run for, by operand, in the order of the sequence; empty for other plans.
    pub tensors: BTreeMap<String, Vec<f64>>,
    /// Whose kernels did attention, on GPUs; `None` on threads.
    pub attention: Option<String>,
}

/// Runs one training step of `plan` on seeded weights and tokens, a thread a device. Errors name the rank and the op.
pub fn execute(plan: &Plan, options: &Options) -> Result<Run> {
    one_step(options.seed, |job, each| train(plan, options, job, &mut |_, done| each(done)))
}

/// One step of whatever trains, on seeded weights and tokens.
fn one_step<T>(seed: u64, train: impl FnOnce(&Job, &mut dyn FnMut(T) -> Result<()>) -> Result<()>) -> Result<T> {
    let mut run = None;
    let source = Source::seeded(seed);
    let job = Job::new(&source, 1);
    train(&job, &mut |done| {
        run = Some(done);
        Ok(())
    })?;
    run.ok_or_else(|| Error::device("run", "no step was run"))
}

/// Trains for the steps of `job`, each on new tokens and on the weights that the one before has left. `each` is
/// given every step as it ends, with its number in [`Job::numbers`]. Errors: an unsound plan, one that this machine's
/// memory cannot hold; a rank that stops, with its op; those of `each`.
pub fn train(plan: &Plan, options: &Options, job: &Job, each: &mut dyn FnMut(u64, Run) -> Result<()>) -> Result<()> {
    check::check(plan)?;
    unchecked(plan, options, job, each)
}

/// Trains where the plan changes from step to step, as that of a mixture does whose routers choose anew: `each` is given
/// the plan that a step ran and what it brought, and returns the next step's; `None`: the same again. All plans have
/// the same weights and optimizer states, which go from one to the next by name. Weights are in every [`Run`]. Errors:
/// those of [`train`].
pub fn train_anew(plan: Plan, options: &Options, job: &Job, each: Anew) -> Result<()> {
    if computes_in_f64(&plan) {
        anew::run::<f64>(plan, options, job, each)
    } else {
        anew::run::<f32>(plan, options, job, each)
    }
}

/// Is given a step's number, plan and results, and returns the plan of the next step; `None`: the same plan again.
pub type Anew<'a> = &'a mut dyn FnMut(u64, &Plan, Run) -> Result<Option<Plan>>;

/// Kernels compute in f32, or in f64 where a tensor has it.
fn computes_in_f64(plan: &Plan) -> bool {
    plan.tensors.iter().any(|t| t.dtype == Dtype::F64)
}

fn unchecked(plan: &Plan, options: &Options, job: &Job, each: &mut dyn FnMut(u64, Run) -> Result<()>) -> Result<()> {
    if computes_in_f64(plan) {
        train::run::<f64>(plan, options, job, each)
    } else {
        train::run::<f32>(plan, options, job, each)
    }
}

#[cfg(test)]
mod tests {
    use super::memory;
    use super::*;
    use crate::plan::link::AtomTable;
    use crate::plan::memory::Layout;
    use crate::plan::{Direction, Engine, Feed, Lane, OpKind};
    use crate::spec::{LlmSpec, Parallelism, Workload};
    use crate::strategy::{Engines, build};

    fn ring_plan() -> Plan {
        let model = LlmSpec::find("tiny").unwrap();
        let work =
            Workload { seq_len: 32, global_batch: 1, micro_batch: 1, dtype: Dtype::F32, documents: Default::default() };
        let par = Parallelism { ring: 4, ..Parallelism::default() };
        let engine = Engine::Sm { ctas: 1 };
        build(&model, &work, &par, Engines { p2p: engine, collective: engine }).unwrap()
    }

    /// How a plan ends that nobody has checked.
    fn fails(plan: &Plan) -> String {
        let source = Source::seeded(1);
        let job = Job::new(&source, 1);
        unchecked(plan, &options(plan), &job, &mut |_, _| Ok(())).unwrap_err().to_string()
    }

    fn options(plan: &Plan) -> Options {
        Options::new(1, (0..plan.ranks()).collect(), false)
    }

    /// `check` refuses such a plan; the executor alone has to find out too, and not hang.
    #[test]
    fn a_lost_message_ends_with_the_waiting_ranks_named() {
        let mut plan = ring_plan();
        let lost = plan.blocks.iter_mut().flat_map(|b| &mut b.ops).find(|op| op.label == "kv_hop.1").unwrap();
        let OpKind::Transfer { legs, .. } = &mut lost.kind else { panic!("a hop is a transfer") };
        legs.iter_mut().filter(|l| l.dir == Direction::Send).for_each(|l| l.by = 2);
        assert!(check::check(&plan).unwrap_err().to_string().contains("kv_hop"));
        let error = fails(&plan);
        assert!(error.contains("never sends it") || error.contains("deadlock"), "{error}");
        assert!(error.contains("rank") && error.contains("kv_hop.1"), "{error}");
    }

    #[test]
    fn ranks_that_wait_for_each_other_are_named() {
        let mut plan = ring_plan();
        for op in plan.blocks.iter_mut().flat_map(|b| &mut b.ops).filter(|op| op.label.starts_with("kv_hop")) {
            // Every rank now waits for its own receive to be over before it sends.
            let OpKind::Transfer { legs, .. } = &mut op.kind else { continue };
            legs.retain(|l| l.dir == Direction::Recv);
        }
        let error = fails(&plan);
        assert!(error.contains("rank 0") && error.contains("kv_hop"), "{error}");
    }

    /// One lane for both ways of a pipeline's link: 1F1B sends the next microbatch on before it has the gradient of
    /// the last, and the other end the reverse. `check` sees the circle; threads that run into it end with its names.
    #[test]
    fn a_circle_of_ranks_ends_with_every_rank_its_op_and_its_peer() {
        let model = LlmSpec::find("tiny").unwrap();
        let documents = Default::default();
        let work = Workload { seq_len: 16, global_batch: 4, micro_batch: 1, dtype: Dtype::F32, documents };
        let par = Parallelism { pp: 2, ..Parallelism::default() };
        let engine = Engine::Sm { ctas: 1 };
        let mut plan = build(&model, &work, &par, Engines { p2p: engine, collective: engine }).unwrap();
        let comm = |(_, lane): &(u16, &Lane)| matches!(lane, Lane::Comm(..));
        let links: Vec<u16> = (0..).zip(&plan.lanes).filter(comm).map(|(i, _)| i).collect();
        assert_eq!(links.len(), 2, "a lane each way");
        for op in plan.programs.iter_mut().flat_map(|p| &mut p.ops).filter(|op| op.lane == Some(links[1])) {
            op.lane = Some(links[0]);
        }
        let said = check::check(&plan).unwrap_err().to_string();
        for words in ["rank 0 waits in recv_dx.0.0 for rank 1", "rank 1 waits in recv_x.0.1 for rank 0", "In a circle"]
        {
            assert!(said.contains(words), "{words}: {said}");
        }
        let error = fails(&plan);
        for words in
            ["deadlock", "rank 0 waits in recv_dx.0.0 for rank 1 to send", "rank 1 waits in recv_x.0.1 for rank 0"]
        {
            assert!(error.contains(words), "{words}: {error}");
        }
    }

    #[test]
    fn a_rank_that_panics_stops_the_others_and_is_named() {
        let mut plan = ring_plan();
        let Feed::Tokens(inputs) = &mut plan.feed else { panic!("a step is fed tokens") };
        inputs.vocab = 100_000;
        let error = fails(&plan);
        assert!(error.contains("panicked in") && error.contains("embed"), "{error}");
    }

    #[test]
    fn a_plan_larger_than_the_machine_is_refused_before_it_is_tried() {
        let mut plan = ring_plan();
        let big = plan.tensors.iter_mut().find(|t| t.name == "logits").unwrap();
        big.shape[0] *= 1 << 32;
        let layout = Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0);
        let error = layout.and_then(|l| memory::fits(&plan, &[l])).unwrap_err().to_string();
        assert!(error.contains("memory"), "{error}");
    }
}
