//! `foretrain run`: a plan on threads of this machine, or on its GPUs.

mod check;
mod found;
mod kept;
mod live;
mod machine;
mod routed;

use super::config::Config;
use super::flags::{Output, PlanFile};
use super::{Answer, trace, will_hold};
use crate::checkpoint::Loader;
use crate::error::{Error, Result};
use crate::exec::cuda::joined;
use crate::exec::cuda::process::Process;
use crate::exec::source::Source;
use crate::exec::{Job, Options, Run, routing, weights};
use crate::plan::{Adam, Plan};
use crate::report::human::notes;
use check::Check;
use clap::Args;
use found::{Found, Planned, Step};
use kept::{Checkpoints, Kept};
use live::Live;
use routed::Router;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use machine::{Machine, On, one_process};

#[derive(Args)]
#[command(
    after_help = "Example: foretrain run --model tiny --seq-len 128 --ulysses 2 --ring 2 --global-batch 2 --check\n         \
                        foretrain run --steps 20 --dp 2 --zero 3 --lr 1e-3 --out rows.csv\n         \
                        foretrain run --weights DIR --tokens ids.json --seq-len 64 --tp 2 --dump step.safetensors\n         \
                        foretrain run --steps 10 --dp 4 --zero 3 --save ckpt --save-every 5\n         \
                        foretrain run --steps 10 --tp 2 --ring 2 --load ckpt\n         \
                        foretrain run --plan plan.json --on cpu --trace trace.json\n         \
                        foretrain run --ring 4 --seq-len 512 --throttle 0.1,200\n         \
                        foretrain run --on cuda --devices 0,0,0,0 --ulysses 2 --ring 2 --check\n         \
                        torchrun --no-python --nproc-per-node 8 foretrain run --on cuda --ring 8 --seq-len 65536\n\n\
    With --throttle a message takes latency + bytes / bandwidth from the moment that both its ends are there, and a\n\
    rank's link takes one message at a time, each way.\n\n\
    With --tokens, a sequence has seq_len + 1 ids: the first seq_len are its tokens, the last seq_len what they are\n\
    to predict; steps and sequences take them in the file's order. With --weights, --model is the folder's own and\n\
    nothing is dropped; which experts the tokens of a mixture visit, its routers say, anew in every step. A --dump\n\
    holds loss, logits [global batch, seq_len, vocabulary], grad.NAME and new.NAME as f32; its metadata has the\n\
    conventions and the optimizer's constants.\n\n\
    With --save a step's weights, as the optimizer has them, and its moments are copied while the run stands still and\n\
    written while it goes on; every rank writes a part. With --load any layout goes on from there, on the sequences that\n\
    come next; in another layout the tokens of a mixture visit other experts, which are drawn anew for it.\n\
    `foretrain checkpoint DIR` says what a checkpoint holds and whether it is whole.\n\n\
    Started by torchrun, srun or mpirun on cuda, a process is a rank with the GPU of its local rank, and messages go by\n\
    NCCL; ranks meet at MASTER_ADDR, port MASTER_PORT + 1 or FORETRAIN_PORT, and whoever has not come or said anything\n\
    for FORETRAIN_TIMEOUT seconds [300] ends them all.\n\n\
    On cuda ranks may share a GPU: their kernels take turns there, and their messages are copies inside its memory,\n\
    which say nothing of a link. Kernels are compiled once and kept in FORETRAIN_CACHE [~/.cache/foretrain].\n\n\
    A step is forward, backward and AdamW on new tokens. The loss is the mean cross-entropy, in nats, over all\n\
    tokens of the global batch, each against the token that follows it. MFU is the model's FLOPs against the best\n\
    matrix product that the cores do, timed before the run. Interrupted, a run leaves the rows of the steps it did."
)]
pub struct Flags {
    #[command(flatten)]
    config: Config,
    #[command(flatten)]
    plan: PlanFile,
    #[command(flatten)]
    machine: Machine,
    /// Steps of training, each on new tokens
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Token ids, a JSON list: a flat one is cut into sequences of seq_len + 1, a list of lists has one in each
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// A Hugging Face folder: config.json, and weights in safetensors; without it they are seeded
    #[arg(long, value_name = "DIR")]
    weights: Option<PathBuf>,
    /// Write loss, logits, gradients and new weights of the last step, under their Hugging Face names
    #[arg(long, value_name = "FILE.safetensors")]
    dump: Option<PathBuf>,
    #[command(flatten)]
    checkpoints: Checkpoints,
    #[command(flatten)]
    optimizer: Optimizer,
    /// Hold losses and gradients against one dense rank in f64 (small models)
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    output: Output,
    /// Write a line a step to this file if it is a .csv, as the steps end; else the JSON, too
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// AdamW's constants.
#[derive(Args)]
struct Optimizer {
    /// Learning rate [default: 0.0003]
    #[arg(long, value_name = "X", value_parser = above_zero)]
    lr: Option<f64>,
    /// Share of a gradient's running mean that stays [default: 0.9]
    #[arg(long, value_name = "X", value_parser = share)]
    beta1: Option<f64>,
    /// Share of its square's running mean that stays [default: 0.95]
    #[arg(long, value_name = "X", value_parser = share)]
    beta2: Option<f64>,
    /// Added to the root of the mean square [default: 1e-8]
    #[arg(long, value_name = "X", value_parser = above_zero)]
    eps: Option<f64>,
    /// A step takes lr times this share off every weight, norms and biases too [default: 0]
    #[arg(long, value_name = "X", value_parser = share)]
    weight_decay: Option<f64>,
}

impl Optimizer {
    /// With what a checkpoint says where nothing is asked for.
    fn or(&self, saved: Option<Adam>) -> Optimizer {
        let of = |asked: Option<f64>, saved: fn(&Adam) -> f64, all: &Option<Adam>| asked.or(all.as_ref().map(saved));
        Optimizer {
            lr: of(self.lr, |adam| adam.lr, &saved),
            beta1: of(self.beta1, |adam| adam.beta1, &saved),
            beta2: of(self.beta2, |adam| adam.beta2, &saved),
            eps: of(self.eps, |adam| adam.eps, &saved),
            weight_decay: of(self.weight_decay, |adam| adam.weight_decay, &saved),
        }
    }

    /// The plan with what is asked for in place of what it has.
    fn of(&self, plan: Plan) -> Plan {
        let Some(has) = plan.optimizer() else { return plan };
        plan.with_optimizer(Adam {
            lr: self.lr.unwrap_or(has.lr),
            beta1: self.beta1.unwrap_or(has.beta1),
            beta2: self.beta2.unwrap_or(has.beta2),
            eps: self.eps.unwrap_or(has.eps),
            weight_decay: self.weight_decay.unwrap_or(has.weight_decay),
        })
    }
}

fn above_zero(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0);
    number.ok_or_else(|| "write a number above zero, as in 3e-4".into())
}

fn share(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse().ok().filter(|x| (0.0..1.0).contains(x));
    number.ok_or_else(|| "write a number from 0 to below 1, as in 0.95".into())
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let process = flags.machine.joined()?;
    // What may go wrong on this machine alone the others hear of, who would wait for this process.
    let told = |error: Error| {
        process.iter().for_each(|process| joined::excuse(process, &error));
        error
    };
    let loader = flags.checkpoints.loader()?;
    let (config, other_dropout) = flags.configured(loader.as_ref()).map_err(told)?;
    let optimizer = flags.optimizer.or(loader.as_ref().map(|loader| loader.index.optimizer));
    let (plan, repeated) = config.plan(flags.plan.path(), flags.machine.defaults())?;
    let plan = optimizer.of(plan);
    if flags.check {
        check::small_enough(&plan, flags.steps)?;
    }
    plan.model()?;
    if flags.weights.is_some() && !plan.routes.is_empty() {
        flags.checkpoints.of_routers()?;
    }
    flags.machine.options(&plan, flags.check)?;
    if flags.checkpoints.any() && process.is_some() {
        let why = "are of ranks of one process, so far; give --devices, or --dump for the last step's weights";
        return Err(Error::spec("the command line", "--save and --load", why));
    }
    let kept = flags.checkpoints.open(loader, &plan, flags.machine.seed(), flags.steps)?;
    let source = flags.source(&plan, &kept).map_err(told)?;
    let router = match flags.weights {
        Some(_) => {
            let of = (&config, flags.machine.defaults());
            Router::new(of, flags.plan.path(), flags.steps, &plan, &source).map_err(told)?
        }
        None => None,
    };
    let plan = match &router {
        Some(router) => optimizer.of(router.plan(&plan, 1, &source.weights(&plan))?),
        None => plan,
    };
    let options = flags.machine.options_by(&plan, flags.check, config.profile()).map_err(told)?;
    let router = router.filter(|_| flags.steps > 1);
    if router.is_some() {
        flags.machine.chooses_anew()?;
    }
    if let Some(process) = process.as_ref().filter(|process| process.rank > 0) {
        return flags.take_part(process, &plan, &options, &source);
    }
    for path in [flags.machine.trace.path(), flags.dump.as_deref()].into_iter().flatten() {
        will_hold(path).map_err(told)?;
    }
    let rows = flags.out.as_deref().filter(|path| is_csv(path));
    let mut training = Training::new(flags, &plan, &options, &kept, rows).map_err(told)?;
    training.beside = source.beside(&plan);
    // Routers of weights from elsewhere choose by themselves.
    training
        .notes
        .extend(repeated.filter(|_| flags.weights.is_none()).into_iter().chain(other_dropout).chain(kept.note()));
    let job = Job { keep_last: flags.dump.is_some(), watch: Some(&kept), ..Job::new(&source, flags.steps) };
    // Processes end together: the others of a run of several would wait for one that stops.
    let alone = process.is_none();
    let ended = match router {
        None => flags.machine.train(&plan, &options, &job, &mut |number, run| {
            training.step(number, &plan, run)?;
            if alone { training.goes_on() } else { Ok(()) }
        }),
        Some(router) => flags.machine.train_anew(plan.clone(), &options, &job, &mut |number, plan, run| {
            let next = number < flags.steps && run.loss.is_finite();
            let next = next.then(|| router.plan(plan, number + 1, &run.weights).map(|plan| optimizer.of(plan)));
            training.step(number, plan, run)?;
            training.goes_on()?;
            next.transpose()
        }),
    };
    // What was done before a run diverged is told, too.
    if training.goes_on().is_ok() {
        ended.map_err(|why| kept.after(why))?;
    }
    training.answer(&source, rows)
}

/// What a process says whose rank is not 0.
#[derive(Serialize)]
struct TookPart {
    rank: u32,
    ranks: u32,
}

impl Flags {
    /// What is to be computed; and, of a run that goes on, what of it is not as the model's file says.
    fn configured(&self, loader: Option<&Loader>) -> Result<(Config, Option<String>)> {
        let config = self.config.clone();
        match (&self.weights, loader.and_then(|loader| loader.index.model_spec.as_ref())) {
            (Some(dir), _) => Ok((config.of_checkpoint(dir)?, None)),
            // A plan has its own.
            (None, Some(saved)) if self.plan.path().is_none() => config.going_on(saved, self.machine.defaults()),
            _ => Ok((config, None)),
        }
    }

    /// The steps as a rank that is not 0.
    fn take_part(&self, process: &Process, plan: &Plan, options: &Options, source: &Source) -> Result<Answer> {
        let job = Job { keep_last: self.dump.is_some(), ..Job::new(source, self.steps) };
        self.machine.train(plan, options, &job, &mut |_, _| Ok(()))?;
        let took_part = TookPart { rank: process.rank, ranks: process.world };
        let text = format!("rank {} of {} has taken part; rank 0 says what came of it\n", process.rank, process.world);
        Ok(Answer::new(text, &took_part))
    }

    fn source(&self, plan: &Plan, kept: &Kept) -> Result<Source> {
        let weights = self.weights.as_deref().map(|dir| weights::load(dir, plan)).transpose()?;
        let read = |file| weights::read_tokens(file, plan, kept.before.sequences, self.steps);
        let tokens = self.tokens.as_deref().map(read).transpose()?;
        Ok(Source { seed: self.machine.seed(), weights, tokens, before: kept.before })
    }
}

fn is_csv(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "csv")
}

/// A run under way.
struct Training<'a> {
    flags: &'a Flags,
    /// Of the last step.
    plan: Plan,
    options: &'a Options,
    kept: &'a Kept,
    planned: Planned,
    gemm_flops_per_s: f64,
    live: Live,
    steps: Vec<Step>,
    first: Option<Run>,
    /// The experts that tokens visited, step by step, where they are to be held against the reference.
    chosen: Vec<Vec<routing::Choices>>,
    /// What the checkpoint of --weights has beside the plan's weights.
    beside: BTreeMap<String, Vec<f64>>,
    notes: Vec<String>,
}

impl<'a> Training<'a> {
    fn new(
        flags: &'a Flags,
        plan: &'a Plan,
        options: &'a Options,
        kept: &'a Kept,
        rows: Option<&Path>,
    ) -> Result<Training<'a>> {
        Ok(Training {
            planned: Planned::new(plan, flags.machine.on())?,
            gemm_flops_per_s: flags.machine.best_gemm(plan, options)?,
            live: Live::new(flags.steps, flags.output.json, rows.map(|path| (path, kept.rows_before())))?,
            steps: vec![],
            first: None,
            chosen: vec![],
            beside: BTreeMap::new(),
            notes: vec![],
            flags,
            plan: plan.clone(),
            options,
            kept,
        })
    }

    /// The number of the last step.
    fn last(&self) -> u64 {
        self.kept.before.steps + self.flags.steps
    }

    /// Notes a step that has ended. The trace is the last one's.
    fn step(&mut self, number: u64, plan: &Plan, run: Run) -> Result<()> {
        if plan.routes != self.plan.routes {
            (self.plan, self.planned) = (plan.clone(), Planned::new(plan, self.flags.machine.on())?);
        }
        if self.flags.check {
            self.chosen.push(routing::choices(plan));
        }
        let devices = machine::count(&self.options.devices);
        let step = found::step(&self.plan, number, &run, self.gemm_flops_per_s * f64::from(devices));
        self.live.step(&step)?;
        let wrong = self.planned.wrong(&step);
        self.steps.push(step);
        if let Some(path) = self.flags.machine.trace.path().filter(|_| number == self.last()) {
            trace(path, &[("measured", &run.timeline)])?;
        }
        if let Some(path) = self.flags.dump.as_ref().filter(|_| number == self.last()) {
            weights::dump(path, &weights::Dump { plan: &self.plan, run: &run, beside: &self.beside, step: number })?;
        }
        self.first.get_or_insert(run);
        wrong.map_or(Ok(()), Err)
    }

    /// Errors: the last step's loss is no number, so that nothing is to be trained or saved on it.
    fn goes_on(&self) -> Result<()> {
        self.steps.last().and_then(found::diverged).map_or(Ok(()), Err)
    }

    fn answer(self, source: &Source, rows: Option<&Path>) -> Result<Answer> {
        self.live.end();
        let mut found = Found::new(&self.plan, self.options, self.planned, self.steps, self.gemm_flops_per_s);
        found.notes.extend(self.notes);
        let whole = found.steps.last().is_some_and(|step| step.step == self.kept.before.steps + self.flags.steps);
        found.attention = self.first.as_ref().and_then(|run| run.attention.clone());
        if let Some(first) = self.first.filter(|_| self.flags.check) {
            let losses: Vec<f64> = found.steps.iter().map(|s| s.loss).collect();
            found.check = Some(Check::new(&self.plan, source, &first, &losses, self.chosen)?);
        }
        let not_saved = match self.kept.told(&self.plan) {
            Ok(told) => {
                found.checkpoints = told;
                None
            }
            Err(why) => Some(why),
        };
        let about = &self.plan.about;
        let mut text = format!(
            "{}{}, {} on {}: seq_len {}, global_batch {}, {}\n\n{}{}",
            if found.steps.len() > 1 { "\n" } else { "" },
            about.model,
            about.strategy,
            found.where_to(),
            about.seq_len,
            about.global_batch,
            about.dtype,
            notes(&found.notes),
            found.render()
        );
        let of_last = [self.flags.machine.trace.path(), self.flags.dump.as_deref()];
        let written = of_last.map(|path| path.filter(|_| whole)).into_iter().chain([rows]);
        for path in written.flatten() {
            text.push_str(&format!("\nwrote {}\n", path.display()));
        }
        let json = self.flags.out.as_deref().filter(|path| !is_csv(path));
        Answer::with_error(text, &found, found.wrong().or(not_saved)).also_to(json)
    }
}
