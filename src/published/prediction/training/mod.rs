//! Predicts one training run.
//!
//! `setup` chooses model, machine, software and split by rule; `fitting` looks for a plan that fits where the source leaves
//! that open; `plan` builds each that is tried, with what stands in for parts that plans have not (`standin`); `step` says
//! how long its step takes and what it keeps, which is here put into the unit of the source.

mod fitting;
mod pair;
mod plan;
mod setup;
mod standin;
mod step;

use crate::published::Shipped;
use crate::published::measured::convention::Convention;
use crate::published::measured::{Measured, Quantity, Step};
use crate::published::model::known::filled_in;
use crate::published::model::sizes;
use crate::published::outcome::verdict::Prediction;
use crate::published::rank::recompute::recompute;
use crate::published::row::case::Training;
use crate::published::row::words::is_narrow;
use crate::published::software::{recipe, reports};
use crate::published::split::{without_assumed, without_spare};
use crate::spec::Recompute;
use fitting::fitting;
use pair::pair;
use setup::Setup;

/// The part of a run that trains, where tokens are told by the GPU-hours of all of it: evaluation, checkpoints, failures
/// and what is done twice after them take the rest. About the median of 18 dense models' cards, from LLaMA and BLOOM to
/// Llama 3.1 and SmolLM3, which lie between 0.3 and 1.03; Llama 3 reports more than 0.9 (arXiv:2407.21783, section 3.3.4).
const EFFECTIVE: f64 = 0.8;

/// What the run would report, or why that cannot be said. What was chosen is said in both cases.
pub fn predict(run: &Training, shipped: &Shipped) -> Prediction {
    let mut found = Prediction::default();
    if let Err(why) = try_predict(run, shipped, &mut found) {
        found.why.push(why);
    }
    found.why.extend(run.left_out.iter().cloned());
    found
}

fn try_predict(run: &Training, shipped: &Shipped, found: &mut Prediction) -> Result<(), String> {
    let measured = Measured::of(run, recompute(run) == Some(Recompute::Full));
    if let Some(measured) = measured {
        (found.measured, found.unit) = (Some(measured.value), measured.quantity.unit().into());
    }
    found.mem_measured_gib = run.mem_gib;
    let reported = reports::filled_in(run);
    let known = reported.as_ref().map_or(run, |(reported, _)| reported);
    let stated = without_spare(without_assumed(recipe::filled_in(sizes::with_experts(filled_in(known)))));
    let setup = Setup::of(&stated, shipped, found)?;
    found.why.extend(reported.map(|(_, said)| said));
    if measured.is_none() && run.mem_gib.is_none() {
        return Err("measured: no time, rate, utilization or memory is stated".into());
    }
    let (setup, made) = fitting(&stated, shipped, setup, found)?;
    found.split = setup.words(&made.split);
    found.mem_predicted_gib = run.mem_gib.and(setup.memory(run, &made)?);
    let Some(measured) = measured else { return Ok(()) };
    if measured.quantity == Quantity::Longest {
        found.memory = None;
        found.predicted = Some(setup.longest(&made.split)?);
        return Ok(());
    }
    let fitted = &made.split;
    let mut seconds = match measured.quantity {
        Quantity::Pair => pair(&made.plan, setup.machine(&setup.kernels()?))?,
        _ => setup.seconds(&made, &mut found.parts)?,
    };
    if is_whole_run(run, measured) {
        seconds /= EFFECTIVE;
        found.why.push(format!("tokens over GPU-hours of a whole run: {EFFECTIVE} of its time is taken to train"));
    }
    let peak = &setup.machine.cluster.gpu.peak;
    let model = &setup.model;
    let step = Step {
        seconds,
        tokens: (fitted.global_batch * fitted.seq) as f64,
        gpus: f64::from(setup.machine.cluster.gpus()),
        peak: peak.get(setup.dtype.name()).map_or(f64::NAN, |p| p.value.value()),
        flops_per_token: &|convention: Convention| convention.flops_per_token(model, fitted.seq),
    };
    found.predicted = Some(measured.quantity.of(&step)).filter(|v| v.is_finite());
    let products = if is_narrow(&run.precision) { "fp8" } else { setup.dtype.name() };
    let peak = peak.get(products).map_or(f64::NAN, |peak| peak.value.value());
    // Of frozen weights a third of the FLOPs is not there.
    let above = measured.quantity.above_peak(measured.value, &step, peak).filter(|_| setup.tuning.is_none());
    found.why.extend(above);
    // Nobody prints more than the peak: whoever does not say how attention is counted has counted half of it.
    let unsaid = run.flops_convention.is_empty() && fitted.seq >= 1 << 15;
    if let (true, Some(halved)) = (unsaid, measured.quantity.halved())
        && measured.quantity.share(&step).is_some_and(|share| share > 1.0)
    {
        found.predicted = Some(halved.of(&step)).filter(|v| v.is_finite());
        found.why.push("attention: counted half, as with all of it the GPUs would be above their peak".into());
    }
    Ok(())
}

/// A rate of which neither system nor sequence nor batch is known was not measured on steps: tokens and GPU-hours of the
/// run are known, as reports of models have them.
fn is_whole_run(run: &Training, measured: Measured) -> bool {
    let steps = [run.seq, run.global_batch, run.micro_batch];
    measured.quantity == Quantity::TokensPerGpu && run.system.is_empty() && steps.iter().all(Option::is_none)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::split::sharding;

    /// A model's card: so many tokens in so many GPU-hours.
    fn card() -> Training {
        let (model, gpu) = ("LLaMA-13B".into(), "A100-SXM-80GB".into());
        Training { model, gpu, tokens_per_s_per_gpu: Some(2000.0), ..Training::default() }
    }

    #[test]
    fn replicas_share_what_they_hold_where_nothing_is_told() {
        assert_eq!(sharding::to_try(&card()), ["ZeRO-1", "ZeRO-3"]);
        for told in [
            Training { system: "Megatron-LM".into(), ..card() },
            Training { zero: "none".into(), ..card() },
            Training { tp: Some(2), ..card() },
        ] {
            assert!(sharding::to_try(&told).is_empty(), "{told:?}");
        }
        let found = predict(&card(), &Shipped::new().unwrap());
        assert!(found.split.starts_with("dp 8 x tp 1 x pp 1 ") && found.split.contains("zero 1"), "{}", found.split);
        assert!(found.why.iter().any(|why| why.contains("0.8 of its time")), "{:?}", found.why);
        assert!(found.predicted.is_some() && found.parts.contains("compute: gemm"), "{}", found.parts);
    }
}
