//! Weights from elsewhere bring routers that have learned: before a step of such a mixture runs, a dense pass in f64
//! finds which experts every token chooses in every layer, and the plan is built for those routes. After the step the
//! routers are others, and the next one gets a plan of its own.

use crate::cli::config::{Config, Defaults};
use crate::error::{Cause, Result};
use crate::exec::reference::{self, DenseConfig};
use crate::exec::routing;
use crate::exec::source::Source;
use crate::plan::Plan;
use std::collections::BTreeMap;
use std::path::Path;

/// FLOPs of a forward and a backward pass above which nobody waits for the dense pass.
const MOST_FLOPS: f64 = 1e12;

/// Finds the routes of a mixture's next step.
pub struct Router<'a> {
    config: &'a Config,
    source: &'a Source,
    dense: DenseConfig,
    defaults: Defaults,
}

impl<'a> Router<'a> {
    /// None for a plan without experts. `plan` is laid out as the ones to come.
    pub fn new(
        (config, defaults): (&'a Config, Defaults),
        file: Option<&Path>,
        steps: u64,
        plan: &Plan,
        source: &'a Source,
    ) -> Result<Option<Router<'a>>> {
        if plan.routes.is_empty() {
            return Ok(None);
        }
        let refused = |why: String| Err(Cause::Routing.infeasible(why));
        if file.is_some() {
            return refused(
                "a plan has its own routes, which the routers of --weights did not choose; leave --plan out".into(),
            );
        }
        let (model, about) = (plan.model()?, &plan.about);
        let tokens = (about.global_batch * about.seq_len) as f64;
        let work = model.flops_per_token(about.seq_len) * tokens * steps as f64;
        if work > MOST_FLOPS {
            let why =
                format!("{} chooses its experts in a dense pass on one thread, {work:.0e} FLOPs of it", model.name);
            return refused(why + "; use a smaller model, seq_len or global_batch, or fewer steps");
        }
        let documents = about.documents.lengths().into_iter().map(|n| n as usize).collect();
        let mut dense = DenseConfig { documents, ..DenseConfig::from(model) };
        dense.experts.iter_mut().for_each(|experts| experts.fp8_rows = about.par.options.dispatch_fp8);
        Ok(Some(Router { config, source, dense, defaults }))
    }

    /// The plan of a step, counted from 1, whose tokens meet these weights; laid out as `like`.
    pub fn plan(&self, like: &Plan, step: u64, weights: &BTreeMap<String, Vec<f64>>) -> Result<Plan> {
        let mut params = weights.clone();
        params.extend(self.source.beside(like));
        let choices = reference::route(&self.dense, &params, &self.source.batch(like, step).0);
        self.config.plan_by_layer(routing::routes(like, &choices)?, self.defaults)
    }
}
