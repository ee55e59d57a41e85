//! What is said of a mixture's experts.

use crate::cli::flags::value::{capacity, degree, dispatch};
use crate::cli::flags::{agree, of_experts};
use crate::error::{Error, Result};
use crate::spec::{Capacity, Dispatch, LlmSpec, Options};
use crate::strategy::expert::Routing;
use clap::Args;

#[derive(Args, Debug, Clone, Default, PartialEq)]
pub struct Mixture {
    /// Who carries rows to experts: nccl, allgather, deepep-v1-normal, deepep-v1-ll, deepep-v2, deepep-v2-direct, hybrid-ep or hierarchical
    #[arg(long, value_name = "HOW", value_parser = dispatch)]
    dispatch: Option<Dispatch>,
    /// What rows travel to experts in: bf16 (as they are) or fp8 [default: bf16]
    #[arg(long, value_name = "DTYPE", value_parser = ["bf16", "fp8"])]
    dispatch_dtype: Option<String>,
    /// How tokens choose experts: balanced, uniform by lot, a word of `foretrain help dispatch`, or a file [default:
    /// balanced; to run, uniform]
    #[arg(long, value_name = "HOW", value_parser = routing)]
    pub routing: Option<Routing>,
    /// Copies of experts: slots beyond one for each, which EPLB places by the rows of each expert [default: 0]
    #[arg(long, value_name = "N", value_parser = degree)]
    replicas: Option<u32>,
    /// What an expert takes of a rank's tokens: none (all), 1.25 times the even share, pad:1.25, tutel:1.25 or tutel:0 [default: none]
    #[arg(long, value_name = "HOW", value_parser = capacity)]
    capacity: Option<Capacity>,
    /// Hot experts that every rank computes for itself, their weights being broadcast: so many, or auto by FasterMoE's rule [default: 0]
    #[arg(long, value_name = "N|auto", value_parser = shadow)]
    shadow: Option<Shadow>,
}

impl Mixture {
    /// Errors: the model has no experts, and something is said of them; or `words` of `--options` say another thing.
    pub fn check(&self, model: &LlmSpec, words: &Options) -> Result<()> {
        let usual = self.beside(&Options::default());
        let each = self.beside(words).into_iter().zip(usual);
        let each: Vec<_> =
            each.map(|((flag, asked, word), (.., usual))| (flag, asked.into_iter().collect(), word, usual)).collect();
        agree(&each)?;
        let said = [
            ("--dispatch", self.dispatch.is_some()),
            ("--dispatch-dtype", self.dispatch_dtype.is_some()),
            ("--routing", self.routing.is_some()),
        ];
        of_experts(model, &said)
    }

    /// Words of `--options` with what is said here in their place.
    pub fn over(&self, said: Options) -> Options {
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

    /// Whether a rule says how many hot experts every rank computes for itself.
    pub fn shadows_by_rule(&self) -> bool {
        self.shadow == Some(Shadow::Auto)
    }

    /// Flags with what is said by each, and what `has` says of the same.
    pub fn beside(&self, has: &Options) -> [(&'static str, Option<String>, String); 5] {
        let number = |n: Option<u32>| n.map(|n| n.to_string());
        let dtype = if has.dispatch_fp8 { "fp8" } else { "bf16" };
        let shadow = match self.shadow {
            Some(Shadow::Experts(n)) => Some(n),
            _ => None,
        };
        [
            ("dispatch", self.dispatch.map(|d| d.name().into()), has.dispatch.name().into()),
            ("dispatch-dtype", self.dispatch_dtype.clone(), dtype.into()),
            ("replicas", number(self.replicas), has.replicas.to_string()),
            ("shadow", number(shadow), has.shadow.to_string()),
            ("capacity", self.capacity.map(|c| c.to_string()), has.capacity.to_string()),
        ]
    }
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

fn routing(text: &str) -> std::result::Result<Routing, String> {
    text.parse().map_err(|e: Error| e.to_string())
}
