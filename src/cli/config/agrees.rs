//! Flags beside a plan: none may contradict it.

use super::Config;
use crate::error::{Error, Result};
use crate::plan::{About, Plan};
use crate::spec::{Documents, LlmSpec};
use std::path::Path;

impl Config {
    /// No flag says something else than the plan.
    pub(super) fn agrees(&self, plan: &Plan, file: &Path) -> Result<()> {
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
            ("options", self.implementation.options.map(|_| self.all_options().to_string()), a.par.options.to_string()),
        ];
        let of_experts = self.mixture.beside(&a.par.options);
        let of_data = [
            ("documents", self.packing.documents.as_ref().map(listed), listed(&a.documents)),
            ("dtype", self.precision.dtype.map(|d| d.name().into()), a.dtype.clone()),
        ];
        let contradicts = |flag: &str, asked: &str, has: &str| {
            let why = format!(
                "--{flag} {asked} contradicts the plan, which has {has}; leave the flag out, or write another plan with `foretrain plan`"
            );
            Err(Error::spec(file.display(), flag, why))
        };
        for (flag, asked, has) in flags.iter().chain(&of_experts).chain(&of_data) {
            if let Some(asked) = asked.as_ref().filter(|asked| *asked != has) {
                return contradicts(flag, asked, has);
            }
        }
        if self.mixture.routing.is_some() {
            return contradicts("routing", "of the command line", "routes of its own");
        }
        let modules = a.model_spec.as_ref().is_some_and(|model| model.mtp.is_some());
        if self.mtp.no_mtp && modules {
            return contradicts("no-mtp", "of the command line", "modules of multi-token prediction");
        }
        // What is said of a model is none of it.
        let bare = |spec: &LlmSpec| LlmSpec { notes: vec![], ..spec.clone() };
        match &self.model {
            Some(name) if Some(bare(&self.mtp.trained(name)?)) != a.model_spec.as_ref().map(bare) => {
                contradicts("model", name, &a.model)
            }
            _ => Ok(()),
        }
    }
}

/// Documents as the flag has them.
fn listed(documents: &Documents) -> String {
    let lengths = documents.lengths();
    if lengths.is_empty() { "none".into() } else { lengths.iter().map(u64::to_string).collect::<Vec<_>>().join(",") }
}
