//! Weights from elsewhere bring routers that have learned: before such a mixture runs, a dense pass in f64 finds which
//! experts every token chooses in every layer, and the plan is built for those routes.

use crate::cli::config::{Config, LOCAL};
use crate::error::{Error, Result};
use crate::exec::reference::{self, DenseConfig};
use crate::exec::routing;
use crate::exec::source::Source;
use crate::plan::Plan;
use std::path::Path;

/// FLOPs of a forward and a backward pass above which nobody waits for the dense pass.
const MOST_FLOPS: f64 = 1e12;

/// `plan` as it is where it has no experts, else with the routes that the routers of `source` choose.
pub fn routed(config: &Config, file: Option<&Path>, steps: u64, plan: Plan, source: &Source) -> Result<Plan> {
    if plan.routes.is_empty() {
        return Ok(plan);
    }
    let refused = |why: String| Err(Error::infeasible(format!("routing: {why}")));
    if file.is_some() {
        return refused(
            "a plan has its own routes, which the routers of --weights did not choose; leave --plan out".into(),
        );
    }
    if steps > 1 {
        let why = format!("routers choose anew in each step, and a plan is for one; use --steps 1, not {steps}");
        return refused(why + ", with the weights of a mixture");
    }
    let (model, about) = (plan.model()?, &plan.about);
    let tokens = (about.global_batch * about.seq_len) as f64;
    let work = model.flops_per_token(about.seq_len) * tokens;
    if work > MOST_FLOPS {
        let why = format!("{} chooses its experts in a dense pass on one thread, {work:.0e} FLOPs of it", model.name);
        return refused(why + "; use a smaller model, seq_len or global_batch");
    }
    let documents = about.documents.lengths().into_iter().map(|n| n as usize).collect();
    let dense = DenseConfig { documents, ..DenseConfig::from(model) };
    let mut params = source.weights(&plan);
    params.extend(source.beside(&plan));
    let choices = reference::route(&dense, &params, &source.batch(&plan, 1).0);
    config.plan_by_layer(routing::routes(&plan, &choices)?, LOCAL)
}
