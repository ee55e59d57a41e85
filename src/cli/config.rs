//! Flags that say what to compute, named like the columns of rows.csv.

use super::chosen::Chosen;
use super::fitting::fitting;
use crate::cluster::Cluster;
use crate::device::Profile;
use crate::error::{Cause, Error, Result};
use crate::plan::{About, Plan, Route};
use crate::report::human::tokens;
use crate::spec::{
    Architecture, Capacity, ClusterSpec, Dispatch, Documents, Dtype, GpuSpec, LlmSpec, Options, Parallelism, Recompute,
};
use crate::strategy::expert::Routing;
use crate::sweep::{Case, Point, trained, usual_batch};
use clap::Args;
use std::path::{Path, PathBuf};

/// One configuration.
#[derive(Args, Debug, Clone, Default, PartialEq)]
pub struct Config {
    /// A shipped model, or the path of a Hugging Face config.json [default: llama-3-8b; to run, tiny; on cuda, small]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// A shipped cluster, or the path of its JSON file [default: dgx-h100; to run, local-cpu]
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,
    /// A shipped software stack, or the path of its JSON file [default: what fits the GPU]
    #[arg(long, value_name = "NAME")]
    stack: Option<String>,
    /// GPUs [default: the cluster's; with --dp, on CPUs and to run, the product of all degrees]
    #[arg(long, value_name = "N", value_parser = degree)]
    gpus: Option<u32>,
    /// Tokens of a sequence, e.g. 131072 or 128K [default: 8192; for tiny, 128, for small, 512]
    #[arg(long, value_name = "N", value_parser = count)]
    seq_len: Option<u64>,
    /// Sequences of a step [default: dp x micro_batch]
    #[arg(long, value_name = "N", value_parser = count)]
    global_batch: Option<u64>,
    /// Sequences that a replica computes at a time [default: 1]
    #[arg(long, value_name = "N", value_parser = count)]
    micro_batch: Option<u64>,
    /// Tensor parallelism [default: 1]
    #[arg(long, value_name = "N", value_parser = degree)]
    tp: Option<u32>,
    /// Pipeline stages [default: 1]
    #[arg(long, value_name = "N", value_parser = degree)]
    pp: Option<u32>,
    /// Virtual stages of each pipeline stage [default: 1]
    #[arg(long, value_name = "N", value_parser = degree)]
    vp: Option<u32>,
    /// Data parallelism [default: gpus / (ulysses x ring x tp x pp)]
    #[arg(long, value_name = "N", value_parser = degree)]
    dp: Option<u32>,
    /// Ulysses: ranks that share the heads [default: 1]
    #[arg(long, value_name = "N", value_parser = degree)]
    ulysses: Option<u32>,
    /// Ring attention: ranks that share the sequence [default: 1]
    #[arg(long, value_name = "N", value_parser = degree)]
    ring: Option<u32>,
    /// Expert parallelism: ranks, of dp x ring x ulysses x tp, that share the experts [default: 1]
    #[arg(long, value_name = "N", value_parser = degree)]
    ep: Option<u32>,
    /// Who carries rows to experts: nccl, allgather, deepep-v1-normal, deepep-v1-ll, deepep-v2, deepep-v2-direct, hybrid-ep or hierarchical
    #[arg(long, value_name = "HOW", value_parser = dispatch)]
    dispatch: Option<Dispatch>,
    /// What rows travel to experts in: bf16 (as they are) or fp8 [default: bf16]
    #[arg(long, value_name = "DTYPE", value_parser = ["bf16", "fp8"])]
    dispatch_dtype: Option<String>,
    /// How tokens choose experts: balanced, uniform by lot, a word of `foretrain help dispatch`, or a file [default:
    /// balanced; to run, uniform]
    #[arg(long, value_name = "HOW", value_parser = routing)]
    routing: Option<Routing>,
    /// Copies of experts: slots beyond one for each, which EPLB places by the rows of each expert [default: 0]
    #[arg(long, value_name = "N", value_parser = degree)]
    replicas: Option<u32>,
    /// What an expert takes of a rank's tokens: none (all), 1.25 times the even share, pad:1.25, tutel:1.25 or tutel:0 [default: none]
    #[arg(long, value_name = "HOW", value_parser = capacity)]
    capacity: Option<Capacity>,
    /// Hot experts that every rank computes for itself, their weights being broadcast: so many, or auto by FasterMoE's rule [default: 0]
    #[arg(long, value_name = "N|auto", value_parser = shadow)]
    shadow: Option<Shadow>,
    /// ZeRO stage, 0 to 3; among N neighbours only with --options shard-N [default: 1]
    #[arg(long, value_name = "STAGE", value_parser = clap::value_parser!(u32).range(0..=3))]
    zero: Option<u32>,
    /// What the backward pass computes again: none, selective or full [default: none]
    #[arg(long, value_name = "HOW", value_parser = recompute)]
    recompute: Option<Recompute>,
    /// Choices of the implementation, words joined by +, see `foretrain options` [default: default]
    #[arg(long, value_name = "WORDS", value_parser = options)]
    options: Option<Options>,
    /// Lengths of documents packed into each sequence until it is full, e.g. 2K,6K or 8x1K, or a file of them [default: one]
    #[arg(long, value_name = "N,..", value_parser = documents)]
    documents: Option<Documents>,
    /// Train without the modules of multi-token prediction that the model has
    #[arg(long)]
    no_mtp: bool,
    /// What is dropped, whatever the model says.
    #[arg(skip)]
    dropout: Option<f64>,
    /// Of weights and activations: bf16, f32 or f64 [default: bf16 where the GPU has it]
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    dtype: Option<Dtype>,
    /// Take kernel times from this machine's profile, see `foretrain calibrate`
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
}

/// What a command takes where nothing is said.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    pub model: &'static str,
    pub cluster: &'static str,
    pub routing: fn() -> Routing,
    /// Whether plans are run on the machine at hand: then nobody means all GPUs of the cluster.
    pub at_hand: bool,
}

/// For what is predicted.
pub const CLUSTER: Defaults =
    Defaults { model: "llama-3-8b", cluster: "dgx-h100", routing: Routing::default, at_hand: false };
/// For what is run here.
pub const LOCAL: Defaults = Defaults { model: "tiny", cluster: "local-cpu", routing: listed_routing, at_hand: true };
/// For what is run on GPUs here: kernels of attention take heads that are a multiple of 32 wide.
pub const GPUS: Defaults = Defaults { model: "small", cluster: "dgx-h200", routing: listed_routing, at_hand: true };

fn listed_routing() -> Routing {
    Routing::Uniform { seed: 1 }
}

impl Config {
    pub fn profile(&self) -> Option<&Path> {
        self.profile.as_deref()
    }

    /// As the flag says.
    pub fn gpus(&self) -> Option<u32> {
        self.gpus
    }

    /// Whether no flag says what to compute.
    pub fn says_nothing(&self) -> bool {
        *self == Config { profile: self.profile.clone(), ..Config::default() }
    }

    /// Whether a flag says something else than how many GPUs there are.
    pub fn says_more_than_gpus(&self) -> bool {
        *self != Config { gpus: self.gpus, ..Config::default() }
    }

    /// For weights that were trained elsewhere: their model, as it is in evaluation. Errors: another that is asked for, of the
    /// same shapes of weights, say, but with other heads.
    pub fn of_checkpoint(mut self, dir: &Path) -> Result<Config> {
        let own = dir.join("config.json");
        if let Some(asked) = self.model.as_ref().filter(|_| own.is_file()) {
            let shape = |spec: LlmSpec| LlmSpec { name: String::new(), notes: vec![], dropout: 0.0, mtp: None, ..spec };
            let [asked_for, its] =
                [asked.clone(), own.display().to_string()].map(|name| LlmSpec::find(&name).map(shape));
            if asked_for? != its? {
                let why = format!("{asked} is another model than that of {}; leave it out", own.display());
                return Err(Error::spec("the command line", "--model", why));
            }
        }
        self.model.get_or_insert_with(|| own.display().to_string());
        self.dropout = Some(0.0);
        Ok(self)
    }

    /// For a run that goes on: with the dropout of the one that saved. And, where the model's own is another, a sentence that
    /// says so.
    pub fn going_on(self, saved: &LlmSpec, defaults: Defaults) -> Result<(Config, Option<String>)> {
        let own = self.named(self.model.as_deref().unwrap_or(defaults.model))?.dropout;
        let note = format!("dropout: {} as in the run that saved; the model's file has {own}", saved.dropout);
        Ok((Config { dropout: Some(saved.dropout), ..self }, (own != saved.dropout).then_some(note)))
    }

    /// From the flags, or from a plan file that no flag may contradict.
    pub fn choose(&self, file: Option<&Path>, defaults: Defaults) -> Result<Chosen> {
        match file {
            Some(file) => self.by_plan(file, defaults),
            None => self.by_flags(defaults),
        }
    }

    /// Only the plan, whatever machine it is for; and, if a router's log is read more than once, a sentence that says so.
    pub fn plan(&self, file: Option<&Path>, defaults: Defaults) -> Result<(Plan, Option<String>)> {
        let Some(file) = file else {
            let chosen = self.by_flags(defaults)?;
            return Ok((chosen.plan()?, chosen.repeated()));
        };
        Ok((self.load(file)?, None))
    }

    /// The plan of the flags with routes for every layer.
    pub fn plan_by_layer(&self, routes: Vec<Route>, defaults: Defaults) -> Result<Plan> {
        let chosen = self.by_flags(defaults)?;
        chosen.case.plan_by_layer(&chosen.point, routes)
    }

    fn load(&self, file: &Path) -> Result<Plan> {
        let plan = Plan::load(file)?;
        self.agrees(&plan, file)?;
        Ok(plan)
    }

    fn by_flags(&self, defaults: Defaults) -> Result<Chosen> {
        let model_name = self.model.as_deref().unwrap_or(defaults.model);
        let mut model = self.named(model_name)?;
        if let Some(dropout) = self.dropout {
            model.dropout = dropout;
        }
        let cluster_name = self.cluster.as_deref().unwrap_or(defaults.cluster);
        let cluster = ClusterSpec::find(cluster_name)?;
        let gpu = GpuSpec::find(&cluster.gpu)?;
        let [ulysses, ring, tp, pp] = [self.ulysses, self.ring, self.tp, self.pp].map(|d| d.unwrap_or(1));
        let gpus = self.gpus_of(&cluster, &gpu, defaults)?;
        let split = [ulysses, ring, tp, pp].iter().fold(1u64, |n, &d| n.saturating_mul(u64::from(d)));
        let dp = self.dp.unwrap_or((u64::from(gpus) / split.max(1)).max(1) as u32);
        let micro_batch = self.micro_batch.unwrap_or(1);
        let point = Point {
            seq_len: self.seq_len.unwrap_or(match &model.name[..] {
                "tiny" => 128,
                "small" => 512,
                _ => 8192,
            }),
            global_batch: self.global_batch.unwrap_or_else(|| usual_batch(dp, micro_batch)),
            micro_batch,
            par: Parallelism {
                dp,
                pp,
                vp: self.vp.unwrap_or(1),
                ring,
                ulysses,
                tp,
                ep: self.ep.unwrap_or(1),
                zero: self.zero.unwrap_or(1),
                recompute: self.recompute.unwrap_or(Recompute::None),
                options: self.all_options(),
            },
        };
        self.of_experts(&model)?;
        let stack = self.stack.as_deref().unwrap_or(stack_of(&gpu));
        let mut case = Case::new(model, cluster_name, stack, gpus, self.dtype)?;
        case.documents = self.documents.clone().unwrap_or_default();
        self.measured(&mut case, defaults)?;
        case.routing = self.routing.clone().unwrap_or_else(|| (defaults.routing)());
        let mut point = point;
        if self.shadow == Some(Shadow::Auto) {
            point.par.options.shadow = case.shadows(&point)?;
        }
        let fits = !defaults.at_hand && !self.says_split() && gpu.architecture != Architecture::Cpu;
        let taken = if fits { fitting(&case, &point, self.global_batch)? } else { None };
        let (point, taken) = taken.map_or((point, None), |taken| (taken.point, Some(taken.note)));
        Ok(Chosen { case, point, loaded: None, taken, batch_said: self.global_batch.is_some() })
    }

    /// The model of a name, without its modules of multi-token prediction where a flag leaves them out.
    fn named(&self, name: &str) -> Result<LlmSpec> {
        trained(name, self.no_mtp)
    }

    /// Whether a flag says how ranks share the work, or what they keep of it.
    fn says_split(&self) -> bool {
        let nothing = Config {
            model: self.model.clone(),
            cluster: self.cluster.clone(),
            stack: self.stack.clone(),
            gpus: self.gpus,
            seq_len: self.seq_len,
            global_batch: self.global_batch,
            micro_batch: self.micro_batch,
            documents: self.documents.clone(),
            no_mtp: self.no_mtp,
            dropout: self.dropout,
            dtype: self.dtype,
            ..Config::default()
        };
        *self != nothing
    }

    fn of_experts(&self, model: &LlmSpec) -> Result<()> {
        let said = [
            ("--dispatch", self.dispatch.is_some()),
            ("--dispatch-dtype", self.dispatch_dtype.is_some()),
            ("--routing", self.routing.is_some()),
        ];
        of_experts(model, &said)
    }

    /// The words, and those that flags of their own say.
    fn all_options(&self) -> Options {
        let said = self.options.unwrap_or_default();
        let fp8 = self.dispatch_dtype.as_deref().map(|dtype| dtype == "fp8");
        Options {
            dispatch: self.dispatch.unwrap_or(said.dispatch),
            dispatch_fp8: fp8.unwrap_or(said.dispatch_fp8),
            replicas: self.replicas.unwrap_or(said.replicas),
            capacity: self.capacity.unwrap_or(said.capacity),
            shadow: match self.shadow {
                Some(Shadow::Experts(n)) => n,
                _ => said.shadow,
            },
            ..said
        }
    }

    /// Nobody means all cores of a machine by default; a cluster is used whole.
    fn gpus_of(&self, cluster: &ClusterSpec, gpu: &GpuSpec, defaults: Defaults) -> Result<u32> {
        if let Some(gpus) = self.gpus {
            return Ok(gpus);
        }
        if self.dp.is_none() && gpu.architecture != Architecture::Cpu && !defaults.at_hand {
            return Ok(cluster.nodes.saturating_mul(cluster.gpus_per_node));
        }
        let degrees = [self.dp, self.ulysses, self.ring, self.tp, self.pp].map(|d| d.unwrap_or(1));
        let gpus = degrees.iter().try_fold(1u32, |n, &d| n.checked_mul(d));
        gpus.ok_or_else(|| {
            Cause::Degrees
                .infeasible(format!("dp x ulysses x ring x tp x pp = {degrees:?} is more than any cluster has"))
        })
    }

    fn by_plan(&self, file: &Path, defaults: Defaults) -> Result<Chosen> {
        let chosen = self.of_plan(self.load(file)?, defaults, &file.display().to_string())?;
        let unsaid = self.cluster.is_none() && !defaults.at_hand;
        let of = &chosen.case.cluster.spec.name;
        let taken = unsaid.then(|| format!("cluster: a plan names none, and no --cluster is given: taken is {of}"));
        Ok(Chosen { taken, ..chosen })
    }

    /// The machine by the flags, for a plan that was found in `file`.
    pub fn of_plan(&self, plan: Plan, defaults: Defaults, file: &str) -> Result<Chosen> {
        let cluster = self.cluster.as_deref().unwrap_or(defaults.cluster);
        let gpu = GpuSpec::find(&ClusterSpec::find(cluster)?.gpu)?;
        let stack = self.stack.as_deref().unwrap_or(stack_of(&gpu));
        let dtype = dtype(&plan.about.dtype).map_err(|why| Error::spec(file, "about.dtype", why))?;
        let mut case = Case::new(plan.model()?.clone(), cluster, stack, plan.ranks(), Some(dtype))?;
        case.documents = plan.about.documents.clone();
        case.can_run(&plan.about.par)?;
        case.aside(&plan)?;
        self.measured(&mut case, defaults)?;
        Ok(Chosen { case, point: Point::of_plan(&plan.about), loaded: Some(plan), taken: None, batch_said: false })
    }

    /// Puts the profile's kernel times into a case, if they are those of its machine.
    fn measured(&self, case: &mut Case, defaults: Defaults) -> Result<()> {
        let Some(file) = &self.profile else { return Ok(()) };
        let profile = Profile::load(file)?;
        if (case.cluster.gpu.architecture != Architecture::Cpu) != profile.gpu.is_some() {
            let why = format!(
                "was measured on {}, but cluster {} has {}; leave the profile out, or choose {}",
                profile.machine.cpu,
                case.cluster.spec.name,
                case.cluster.gpu.name,
                if profile.gpu.is_some() { "a cluster of such GPUs" } else { "--cluster local-cpu" }
            );
            return Err(Error::spec(file.display(), "machine.cpu", why));
        }
        if !profile.dtypes().contains(&case.dtype.name()) {
            let why = format!(
                "have no {}, but {}; choose --dtype {}",
                case.dtype.name(),
                profile.dtypes().join(", "),
                profile.dtypes().first().unwrap_or(&"f32")
            );
            return Err(Error::spec(file.display(), "kernels", why));
        }
        // Who asks for a step of training means one of many; who runs a few here does not wait until a GPU is hot.
        case.profile = Some(if defaults.at_hand { profile.at_rest() } else { profile.under_load() });
        Ok(())
    }

    /// No flag says something else than the plan.
    fn agrees(&self, plan: &Plan, file: &Path) -> Result<()> {
        let a: &About = &plan.about;
        let number = |n: Option<u32>| n.map(|n| n.to_string());
        let long = |n: Option<u64>| n.map(|n| n.to_string());
        let flags = [
            ("gpus", number(self.gpus), plan.ranks().to_string()),
            ("seq-len", long(self.seq_len), a.seq_len.to_string()),
            ("global-batch", long(self.global_batch), a.global_batch.to_string()),
            ("micro-batch", long(self.micro_batch), a.micro_batch.to_string()),
            ("tp", number(self.tp), a.par.tp.to_string()),
            ("pp", number(self.pp), a.par.pp.to_string()),
            ("vp", number(self.vp), a.par.vp.to_string()),
            ("dp", number(self.dp), a.par.dp.to_string()),
            ("ulysses", number(self.ulysses), a.par.ulysses.to_string()),
            ("ring", number(self.ring), a.par.ring.to_string()),
            ("ep", number(self.ep), a.par.ep.to_string()),
            ("zero", number(self.zero), a.par.zero.to_string()),
            ("recompute", self.recompute.map(|r| r.name().into()), a.par.recompute.name().into()),
            ("options", self.options.map(|_| self.all_options().to_string()), a.par.options.to_string()),
            ("dispatch", self.dispatch.map(|d| d.name().into()), a.par.options.dispatch.name().into()),
            (
                "dispatch-dtype",
                self.dispatch_dtype.clone(),
                if a.par.options.dispatch_fp8 { "fp8" } else { "bf16" }.into(),
            ),
            ("replicas", number(self.replicas), a.par.options.replicas.to_string()),
            (
                "shadow",
                match self.shadow {
                    Some(Shadow::Experts(n)) => Some(n.to_string()),
                    _ => None,
                },
                a.par.options.shadow.to_string(),
            ),
            ("capacity", self.capacity.map(|c| c.to_string()), a.par.options.capacity.to_string()),
            ("documents", self.documents.as_ref().map(listed), listed(&a.documents)),
            ("dtype", self.dtype.map(|d| d.name().into()), a.dtype.clone()),
        ];
        let contradicts = |flag: &str, asked: &str, has: &str| {
            let why = format!(
                "--{flag} {asked} contradicts the plan, which has {has}; leave the flag out, or write another plan with `foretrain plan`"
            );
            Err(Error::spec(file.display(), flag, why))
        };
        for (flag, asked, has) in &flags {
            if let Some(asked) = asked.as_ref().filter(|asked| *asked != has) {
                return contradicts(flag, asked, has);
            }
        }
        if self.routing.is_some() {
            return contradicts("routing", "of the command line", "routes of its own");
        }
        let modules = a.model_spec.as_ref().is_some_and(|model| model.mtp.is_some());
        if self.no_mtp && modules {
            return contradicts("no-mtp", "of the command line", "modules of multi-token prediction");
        }
        // What is said of a model is none of it.
        let bare = |spec: &LlmSpec| LlmSpec { notes: vec![], ..spec.clone() };
        match &self.model {
            Some(name) if Some(bare(&self.named(name)?)) != a.model_spec.as_ref().map(bare) => {
                contradicts("model", name, &a.model)
            }
            _ => Ok(()),
        }
    }
}

/// `--plan`, where a command takes it.
#[derive(Args, Debug, Clone)]
pub struct PlanFile {
    /// Take the plan of this file; flags may not contradict it
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
}

/// The stack that has an attention kernel for the GPU.
pub fn stack_of(gpu: &GpuSpec) -> &'static str {
    match gpu.architecture {
        Architecture::Hopper => "nccl-fa3",
        Architecture::Ampere | Architecture::Ada => "nccl-fa2",
        // FlashAttention 2 needs Ampere.
        Architecture::Volta | Architecture::Turing => "nccl-unfused",
        // GeForce and DGX Spark have been measured with FlashAttention 2 alone.
        // A kernel for all experts of a rank, as on Hopper.
        Architecture::Blackwell if gpu.attention.contains_key("cudnn") => "nccl-cudnn-grouped",
        Architecture::Blackwell => "nccl-fa2",
        Architecture::Cdna2 | Architecture::Cdna3 | Architecture::Cdna4 => "rccl-fa2",
        Architecture::Tpu => "tpu",
        Architecture::Npu => "hccl-fa2",
        Architecture::Cpu => "cpu",
    }
}

/// GPUs that a study takes of a cluster unless told: a few nodes, or what its only node has.
pub fn gpus_of_a_study(cluster: &ClusterSpec, gpu: &GpuSpec) -> u32 {
    let usual = if gpu.architecture == Architecture::Cpu { 8 } else { 64 };
    let most = if cluster.scale_out.is_none() { usual.min(cluster.gpus_per_node) } else { usual };
    (1..=most).rev().find(|&gpus| Cluster::new(cluster, gpu, gpus).is_ok()).unwrap_or(most)
}

/// How many ranks or stages; lists and powers of two are none.
pub fn degree(text: &str) -> std::result::Result<u32, String> {
    text.parse().map_err(|_| format!("write a whole number up to {}, as in 8", u32::MAX))
}

/// A whole number; K and M are powers of two, as for tokens.
pub fn count(text: &str) -> std::result::Result<u64, String> {
    let (digits, scale) = match text.strip_suffix(['K', 'k']) {
        Some(digits) => (digits, 1 << 10),
        None => text.strip_suffix('M').map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    let number: Option<u64> = digits.parse().ok();
    number.and_then(|n| n.checked_mul(scale)).ok_or_else(|| "write a whole number, as in 131072 or 128K".to_string())
}

/// Tokens of a training run: K, M, B and T are powers of ten, as in what is said of data sets.
pub fn trained_tokens(text: &str) -> std::result::Result<f64, String> {
    let scales = [("K", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12)];
    let scaled = scales.into_iter().find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale)));
    let (number, scale) = scaled.unwrap_or((text, 1.0));
    let tokens = number.parse::<f64>().ok().map(|n| n * scale).filter(|n| (1.0..=1e18).contains(n));
    tokens.ok_or_else(|| format!("{text:?} is no number of tokens from 1 to 1e18; write 300B or 15.6T"))
}

/// What is said of experts would else go by without a word where there are none. `said`: flags, and whether they were given.
pub fn of_experts(model: &LlmSpec, said: &[(&str, bool)]) -> Result<()> {
    match said.iter().find(|(_, said)| *said && model.moe.is_none()) {
        Some((flag, _)) => {
            Err(Error::spec("the command line", flag, format!("{} has no experts; leave it out", model.name)))
        }
        None => Ok(()),
    }
}

/// Lengths joined by commas, as `8x4K` eight of them, or a file with lengths between commas, blanks or lines.
pub fn documents(text: &str) -> std::result::Result<Documents, String> {
    let wrong = |why: String| format!("{why}; write lengths as in 4096,8K or 8x4K, or the path of a file of them");
    let is_list = text.starts_with(|c: char| c.is_ascii_digit());
    let read = || std::fs::read_to_string(text).map_err(|e| wrong(format!("{text}: {e}")));
    let text = if is_list { text.to_string() } else { read()? };
    let mut lengths: Vec<u64> = vec![];
    for word in text.split([',', ' ', '\n', '\t', '\r']).filter(|word| !word.is_empty()) {
        let (times, length) = word.split_once('x').unwrap_or(("1", word));
        let times = times.parse().ok().filter(|times| (1..=MOST_DOCUMENTS).contains(times));
        let (Some(times), Ok(length)) = (times, count(length)) else {
            return Err(wrong(format!("{word:?} is no length")));
        };
        lengths.extend(std::iter::repeat_n(length, times));
    }
    Ok(lengths.into())
}

/// More are not said to be alike.
const MOST_DOCUMENTS: usize = 1 << 20;

/// What a heading says of them.
pub fn packed(documents: &Documents) -> String {
    match documents.lengths()[..] {
        [] => String::new(),
        [one] => format!(", documents of {} tokens", tokens(one)),
        ref all => format!(", {} documents of {} tokens in all until it is full", all.len(), tokens(all.iter().sum())),
    }
}

/// As flags have them.
fn listed(documents: &Documents) -> String {
    let lengths = documents.lengths();
    if lengths.is_empty() { "none".into() } else { lengths.iter().map(u64::to_string).collect::<Vec<_>>().join(",") }
}

pub fn recompute(text: &str) -> std::result::Result<Recompute, String> {
    Recompute::named(text).ok_or_else(|| "write none, selective or full".to_string())
}

pub fn options(text: &str) -> std::result::Result<Options, String> {
    text.parse()
}

pub fn dispatch(text: &str) -> std::result::Result<Dispatch, String> {
    let known: Vec<_> = Dispatch::ALL.iter().map(|d| d.name()).collect();
    let found = Dispatch::ALL.into_iter().find(|d| d.name() == text);
    found.ok_or_else(|| format!("{text:?} is none of {}", known.join(", ")))
}

pub fn capacity(text: &str) -> std::result::Result<Capacity, String> {
    text.parse()
}

/// How many hot experts every rank computes for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shadow {
    /// As many as the rule finds worth it.
    Auto,
    Experts(u32),
}

fn shadow(text: &str) -> std::result::Result<Shadow, String> {
    match text {
        "auto" => Ok(Shadow::Auto),
        _ => text.parse().map(Shadow::Experts).map_err(|_| format!("{text:?} is no number; write 2, or auto")),
    }
}

pub fn routing(text: &str) -> std::result::Result<Routing, String> {
    text.parse().map_err(|e: Error| e.to_string())
}

pub fn dtype(text: &str) -> std::result::Result<Dtype, String> {
    let known = [Dtype::Bf16, Dtype::F32, Dtype::F64].into_iter().find(|d| d.name() == text);
    known.ok_or_else(|| format!("{text:?} is not bf16, f32 or f64"))
}
