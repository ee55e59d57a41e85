//! # foretrain
//!
//! How fast will this training run go, what limits it, which parallelism should I use? And then: run the
//! very same plan on the hardware at hand, and see op by op where the answer was wrong.
//!
//! ```text
//! model + cluster + parallelism --strategy--> Plan --cost | sim | exec--> Timeline --> Report, plot, comparison
//! ```
//!
//! ## What a plan is
//!
//! A [`Plan`](plan::Plan) is data: one straight line of ops, a *program*, for each *role* a rank can play. Ranks stand
//! in a [`Mesh`](plan::Mesh) of named *axes*, and an op names its peers relative to the rank, so that a plan for
//! 16,384 ranks is as long as one for 64. Every op stands on a *lane*, a CUDA stream or a communicator: first in,
//! first out. It names the [`Buf`](plan::Buf)s it reads and writes, slots of tensors, and what has to wait for what
//! follows from them. A [`Call`](plan::OpKind::Call) splices a block of ops, a layer say, into its caller's lanes.
//! [`plan::link`] says what all that means, once, for whoever interprets it.
//!
//! A tensor is in the device's memory or in the host's: a [`Copy`](plan::OpKind::Copy) goes from one to the other on a
//! lane of its own, and the CPU's own kernels have another.
//!
//! A plan says everything that changes bytes, memory or overlap. Interpreters see the plan and the machine and
//! nothing else: no name of a strategy, no closed form, no overlap factor.
//!
//! * [`cost`] predicts: the critical path over the linked ops, kernels by roofline, transfers by NCCL's regimes.
//! * [`sim`] plays the same event by event: stragglers, faults, who waits for whom.
//! * [`exec`] runs: threads as ranks, private memory, real kernels, real messages.
//!
//! All three return a [`Timeline`](timeline::Timeline) whose spans carry the op's path (`mb[0]/fwd[3]/attention.1`), so
//! that a comparison is a join on (rank, path). Ranks that do the same at the same time are one *class*, and
//! [`fold`] finds the classes.
//!
//! ## The layers
//!
//! Imports go down only: `cli -> sweep, published, goodput, plot -> calibrate -> report, compare, import, export, checkpoint
//! -> strategy | cost | sim | exec -> act -> fold -> collective, routing -> cluster, timeline, device -> plan -> spec ->
//! units, error`. Strategies and interpreters never see each other. To read the code, follow one op: [`plan::op`], [`plan::link`], [`strategy::ring`], [`cost`], [`exec`].
//!
//! ## Words of the house
//!
//! Words of papers mean here what they mean there. These are ours, each with the file that defines it:
//!
//! * *role*, *program*: what some ranks do, and its ops in one straight line (`plan/op.rs`, `plan/program.rs`).
//! * *lane*: a stream, communicator, copy engine or the CPU; its ops run one behind the other (`plan/op.rs`).
//! * *block*, *formal*: a body of ops that calls repeat, and a tensor that each call binds for it (`plan/op.rs`).
//! * *slot*: one of a tensor's equal copies, as for a layer or a microbatch; a *buf* is rows of one (`plan/op.rs`).
//! * *line*, *node*: the ops of a program with all calls spliced, and one op of them (`plan/link.rs`).
//! * *atom*: a run of rows of a slot that no op cuts; ops wait for each other atom by atom (`plan/link.rs`).
//! * *segment*: a run of ops between two calls of a body (`plan/segment.rs`).
//! * *class*: ranks that do the same at the same time; one of them stands for all (`fold.rs`).
//! * *crew*: all ranks of one program (`plan/crew.rs`).
//! * *crossing*: an op whose group reaches into other crews; it is *posted*, *starts* and *ends* (`plan/crew.rs`).
//! * *round*: every crew goes on as far as it can (`plan/crew/period.rs`); of a collective, hops that go at once.
//! * *leg*, *hop*: a send or receive of an op (`plan/op.rs`); a message between members (`collective/mod.rs`).
//! * *gang*: the members of a communicator around a rank, and their classes (`act/meetings.rs`).
//! * *act*, *sheet*: what an op does on a class; the acts and meetings of a whole line, for `cost` (`act/sheet.rs`).
//! * *form*: the sheet of a structure, to be filled in for other sizes (`act/form.rs`).
//! * *deed*: what a distinct op does on a class, whomever it meets: what sheets are made of, and `sim` goes by (`act/deeds.rs`).
//! * *meeting*, *end*: a send with its receive, or a collective; a class that takes part in one (`act/sheet.rs`).
//! * *stamp*: a moment in ps, and the lane whose op brought it about (`act/stamp.rs`).
//! * *port*: a rank's way in or out, inside its node or out of it: four in all (`act/ports.rs`).
//! * *spell*, *owed*: a time in which bytes hold a port; what its lane has lost to later bytes (`act/charges.rs`).
//! * *held*: SMs, or a share of a port, that something has for a while (`act/stretch.rs`).
//! * *frame*, *scene*: what of a cost hangs on structure alone; a body with its formals bound (`cost/frame.rs`).
//! * *track*: what the ops of a line wait for, and what they leave behind (`cost/track.rs`).
//! * *telling*: of a tensor, that an op of one lane has to wait for an op of another because of it (`cost/telling.rs`).
//! * *stride*, *floor*: iterations taken at once; their earliest start, before which all is settled (`cost/repeat.rs`).
//! * *mark*: where everyone stood, to see later whether a period has passed (`cost/steady.rs`, `plan/crew/period.rs`).
//! * *guess*: the time before which nobody is likely to ask for anything any more (`cost/guess.rs`).
//! * *past*: what led to each op that is over (`cost/past.rs`; in the order of time, `sim/recent.rs`).
//! * *kind*, *stretch*: layers that are made alike; some of them in a row (`strategy/kind.rs`, `strategy/layers.rs`).
//! * *chunk*, *unit*: a stage's run of layers; a microbatch through one, forward or backward (`strategy/pipeline.rs`).
//! * *route*: which rows of a mixture-of-experts layer go to which experts' slots (`plan/route.rs`).
//!
//! ## A prediction
//!
//! ```
//! use foretrain::{cluster::Cluster, cost, device::Roofline, plan::{Dtype, Engine}, spec::*, strategy};
//!
//! # fn main() -> foretrain::error::Result<()> {
//! let model = LlmSpec::find("llama-3-8b")?;
//! let work = Workload { seq_len: 131_072, global_batch: 32, micro_batch: 1, dtype: Dtype::Bf16, documents: Default::default() };
//! let split = Parallelism { dp: 8, ulysses: 8, zero: 1, recompute: Recompute::Full, ..Parallelism::default() };
//! let engines = strategy::Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 24 } };
//! let plan = strategy::build(&model, &work, &split, engines)?;
//!
//! let (gpu, stack) = (GpuSpec::find("h100-sxm5")?, StackSpec::find("nccl-fa3")?);
//! let cluster = Cluster::new(&ClusterSpec::find("dgx-h100")?, &gpu, plan.ranks())?;
//! let kernels = Roofline::new(&gpu, &stack)?;
//! let machine = cost::Machine { cluster: &cluster, stack: &stack, kernels: &kernels, devices: None };
//! let timeline = cost::cost(&plan, machine, cost::Effort::SUMS)?;
//!
//! let mfu = plan.about.model_flops / 64.0 / timeline.step.value() / 989e12;
//! assert!(mfu > 0.3 && mfu < 0.6, "{mfu}");
//! # Ok(()) }
//! ```

pub mod act;
pub mod calibrate;
pub mod checkpoint;
pub mod cli;
pub mod cluster;
pub mod collective;
pub mod compare;
pub mod cost;
pub mod device;
pub mod error;
pub mod exec;
pub mod export;
pub mod fold;
pub mod goodput;
pub mod import;
pub mod plan;
pub mod plot;
pub mod published;
pub mod report;
pub mod routing;
pub mod sim;
pub mod spec;
pub mod strategy;
pub mod sweep;
pub mod timeline;
pub mod units;
