//! Pipelines: how layers come in stages, and microbatches through them.

use super::list;
use crate::error::{Error, Result};
use crate::spec::{LlmSpec, Parallelism, Workload};
use crate::strategy::kind::kinds_of;

/// Layers of each virtual stage, the first of every stage before the second of any.
pub fn layers_of_stages(model: &LlmSpec, par: &Parallelism) -> Result<Vec<u32>> {
    let (l, parts) = (model.layers, u64::from(par.pp) * u64::from(par.vp));
    let short = if par.options.short_ends { 2 } else { 0 };
    if par.pp > 1 && par.vp <= 64 && (l + short).is_multiple_of(parts) && l >= 1 {
        let mut all = vec![((l + short) / parts) as u32; parts as usize];
        if par.options.short_ends {
            all[0] -= 1;
            *all.last_mut().expect("a stage at least") -= 1;
        }
        return Ok(all);
    }
    if par.pp == 1 && par.vp == 1 && short == 0 {
        return Ok(vec![l as u32]);
    }
    if par.pp == 1 {
        let what = if short > 0 { "short-ends".into() } else { format!("vp {}", par.vp) };
        return Err(Error::infeasible(format!("pp: {what} needs a pipeline; use vp 1 or pp above 1")));
    }
    if kinds_of(model, false).len() > 1 && short == 0 && l >= parts {
        return Ok(uneven(l, parts));
    }
    let good = list((2..=(l + short).min(4096)).filter(|n| (l + short).is_multiple_of(*n)));
    Err(Error::infeasible(format!(
        "pp: {l} layers{} do not split evenly over pp {} x vp {} = {parts} parts; use {good} parts, or option {}",
        if short > 0 { " and 2 for the short ends" } else { "" },
        par.pp,
        par.vp,
        if short > 0 { "default" } else { "short-ends" },
    )))
}

/// Layers of two kinds are no equal work, however they are dealt out: stages have as many as any other, or one fewer,
/// the last and then the first ones, where head and embedding are.
fn uneven(layers: u64, parts: u64) -> Vec<u32> {
    let fewer = (parts - layers % parts) % parts;
    let least = (layers / parts) as u32;
    (0..parts).map(|part| if fewer == 0 || part + 1 < fewer || part + 1 == parts { least } else { least + 1 }).collect()
}

/// Interleaved microbatches go through a stage's chunks in groups of as many as there are stages.
pub(super) fn pipeline(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    layers_of_stages(model, par)?;
    let (m, pp) = (work.global_batch / (u64::from(par.dp) * work.micro_batch), u64::from(par.pp));
    if par.options.overlap_exchange && m < 2 {
        let why = format!(
            "options: overlap-exchange puts the rows of one microbatch beside the compute of another, and there is {m}; \
             use global_batch {} or leave it out",
            2 * u64::from(par.dp) * work.micro_batch
        );
        return Err(Error::infeasible(why));
    }
    if par.vp > 1 && !m.is_multiple_of(pp) {
        let why = format!(
            "vp: {m} microbatches are not a multiple of pp {pp}, which vp {} needs; use global_batch {} or vp 1",
            par.vp,
            m.div_ceil(pp) * pp * u64::from(par.dp) * work.micro_batch
        );
        return Err(Error::infeasible(why));
    }
    Ok(())
}
