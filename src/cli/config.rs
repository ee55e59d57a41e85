//! Flags that say what to compute, named like the columns of rows.csv.

mod agrees;
mod choose;
mod defaults;
mod mixture;

use super::flags::value::{count, degree, recompute};
use super::flags::{Implementation, Mtp, Packing, Precision, Stack};
use crate::error::{Error, Result};
use crate::spec::{LlmSpec, Options, Recompute};
use clap::Args;
use mixture::Mixture;
use std::path::{Path, PathBuf};

pub use defaults::{CLUSTER, Defaults, GPUS, LOCAL};

/// One configuration.
#[derive(Args, Debug, Clone, Default, PartialEq)]
pub struct Config {
    /// A shipped model, or the path of a Hugging Face config.json [default: llama-3-8b; to run, tiny; on cuda, small]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// A shipped cluster, or the path of its JSON file [default: dgx-h100; to run, local-cpu]
    #[arg(long, value_name = "NAME")]
    cluster: Option<String>,
    #[command(flatten)]
    stack: Stack,
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
    #[arg(long, visible_alias = "cp", value_name = "N", value_parser = degree)]
    ring: Option<u32>,
    /// Expert parallelism: ranks, of dp x ring x ulysses x tp, that share the experts [default: 1]
    #[arg(long, value_name = "N", value_parser = degree)]
    ep: Option<u32>,
    #[command(flatten)]
    mixture: Mixture,
    /// ZeRO stage, 0 to 3; among N neighbours only with --options shard-N [default: 1]
    #[arg(long, value_name = "STAGE", value_parser = clap::value_parser!(u32).range(0..=3))]
    zero: Option<u32>,
    /// What the backward pass computes again: none, selective or full [default: none]
    #[arg(long, value_name = "HOW", value_parser = recompute)]
    recompute: Option<Recompute>,
    #[command(flatten)]
    implementation: Implementation,
    #[command(flatten)]
    packing: Packing,
    #[command(flatten)]
    mtp: Mtp,
    /// What is dropped, whatever the model says.
    #[arg(skip)]
    dropout: Option<f64>,
    #[command(flatten)]
    precision: Precision,
    /// Take kernel times from this machine's profile, see `foretrain calibrate`
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
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
        let own = self.mtp.trained(self.model.as_deref().unwrap_or(defaults.model))?.dropout;
        let note = format!("dropout: {} as in the run that saved; the model's file has {own}", saved.dropout);
        Ok((Config { dropout: Some(saved.dropout), ..self }, (own != saved.dropout).then_some(note)))
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
            packing: self.packing.clone(),
            mtp: self.mtp.clone(),
            dropout: self.dropout,
            precision: self.precision.clone(),
            ..Config::default()
        };
        *self != nothing
    }

    /// The words, and those that flags of their own say.
    fn all_options(&self) -> Options {
        self.mixture.over(self.implementation.options.unwrap_or_default())
    }
}
