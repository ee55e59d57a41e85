//! What was measured, and what a predicted step is in the same unit.
//!
//! Of the numbers of a row the one is taken that is believed first; FLOPs are counted as its source does ([`convention`]), bytes
//! likewise ([`memory`]), so that a predicted step is held against what was really measured.

pub mod convention;
pub mod memory;

use crate::published::row::case::Training;
use convention::Convention;

/// What a training run's source reports, in the order in which it is believed: time first, since all else was computed from it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Quantity {
    /// Seconds of one step.
    Step,
    /// Seconds of a forward and a backward chunk side by side.
    Pair,
    /// Tokens of the longest sequence that fits.
    Longest,
    TokensPerGpu,
    Tflops(Convention),
    /// Share of the peak.
    Utilization(Convention),
}

/// A published number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    pub value: f64,
    pub quantity: Quantity,
}

impl Measured {
    /// `recomputes`: the run computes every layer's forward pass twice.
    pub fn of(run: &Training, recomputes: bool) -> Option<Measured> {
        let stated = Convention::of_run(run, recomputes);
        let all = [
            (run.iteration_s, Quantity::Step),
            (run.pair_s, Quantity::Pair),
            (run.max_tokens, Quantity::Longest),
            (run.tokens_per_s_per_gpu, Quantity::TokensPerGpu),
            (run.tflops_per_gpu, Quantity::Tflops(stated)),
            (run.mfu, Quantity::Utilization(Convention { recompute: false, ..stated })),
            (run.hfu, Quantity::Utilization(Convention { recompute: recomputes, ..stated })),
        ];
        all.into_iter().find_map(|(value, quantity)| Some(Measured { value: value?, quantity }))
    }
}

/// A predicted step, and what turns its seconds into other units.
pub struct Step<'a> {
    /// Or of a pair of chunks in it.
    pub seconds: f64,
    /// Of a step.
    pub tokens: f64,
    pub gpus: f64,
    /// FLOP/s of one GPU.
    pub peak: f64,
    pub flops_per_token: &'a dyn Fn(Convention) -> f64,
}

impl Quantity {
    pub fn unit(self) -> &'static str {
        match self {
            Quantity::Step | Quantity::Pair => "s",
            Quantity::Longest => "tokens",
            Quantity::TokensPerGpu => "tokens/s/GPU",
            Quantity::Tflops(_) => "TFLOP/s/GPU",
            Quantity::Utilization(_) => "of peak",
        }
    }

    /// The same with half of attention, where what is counted of it decides.
    pub fn halved(self) -> Option<Quantity> {
        let half = |convention: Convention| Convention { causal: true, ..convention };
        match self {
            Quantity::Tflops(convention) => Some(Quantity::Tflops(half(convention))),
            Quantity::Utilization(convention) => Some(Quantity::Utilization(half(convention))),
            _ => None,
        }
    }

    /// The share of the peak that a rate of FLOPs is.
    pub fn share(self, step: &Step) -> Option<f64> {
        match self {
            Quantity::Tflops(_) => Some(self.of(step) * 1e12 / step.peak),
            Quantity::Utilization(_) => Some(self.of(step)),
            _ => None,
        }
    }

    /// What is to be said of a measured `value` of the same tokens, GPUs and FLOPs that no GPU can have reached, attention being counted
    /// half; none of most. `peak`: FLOP/s of a GPU at the type of the products.
    pub fn above_peak(self, value: f64, step: &Step, peak: f64) -> Option<String> {
        let model = (step.flops_per_token)(Convention { causal: true, recompute: false });
        let reached = match self {
            Quantity::Step => step.tokens / value / step.gpus * model,
            Quantity::TokensPerGpu => value * model,
            Quantity::Tflops(_) => value * 1e12,
            Quantity::Utilization(_) => value * step.peak,
            Quantity::Pair | Quantity::Longest => return None,
        } / peak;
        let said = "of the GPU's peak: packed documents, or sizes other than these, are likely and not stated";
        (reached > 1.0).then(|| format!("measured: {:.0} % {said}", 100.0 * reached))
    }

    /// The predicted step in this unit.
    pub fn of(self, step: &Step) -> f64 {
        let tokens = step.tokens / step.seconds / step.gpus;
        match self {
            Quantity::Step | Quantity::Pair => step.seconds,
            Quantity::TokensPerGpu => tokens,
            Quantity::Tflops(convention) => tokens * (step.flops_per_token)(convention) / 1e12,
            Quantity::Utilization(convention) => tokens * (step.flops_per_token)(convention) / step.peak,
            // No step says it.
            Quantity::Longest => f64::NAN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_believed_before_what_was_computed_from_it() {
        let mut run = Training { mfu: Some(0.4), tflops_per_gpu: Some(120.0), ..Training::default() };
        assert_eq!(Measured::of(&run, true).unwrap().quantity.unit(), "TFLOP/s/GPU");
        run.iteration_s = Some(2.0);
        assert_eq!(Measured::of(&run, true), Some(Measured { value: 2.0, quantity: Quantity::Step }));
        assert_eq!(Measured::of(&Training::default(), true), None);
    }

    #[test]
    fn a_step_in_every_unit() {
        let flops = |c: Convention| if c.recompute { 4e9 } else { 3e9 };
        let step = Step { seconds: 2.0, tokens: 4000.0, gpus: 2.0, peak: 1e14, flops_per_token: &flops };
        let plain = Convention { causal: false, recompute: false };
        assert_eq!(Quantity::Step.of(&step), 2.0);
        assert_eq!(Quantity::TokensPerGpu.of(&step), 1000.0);
        assert_eq!(Quantity::Tflops(plain).of(&step), 3.0);
        assert!((Quantity::Utilization(Convention { recompute: true, ..plain }).of(&step) - 0.04).abs() < 1e-15);
        assert!((Quantity::Tflops(plain).share(&step).unwrap() - 0.03).abs() < 1e-15);
        assert_eq!(Quantity::Tflops(plain).halved(), Some(Quantity::Tflops(Convention { causal: true, ..plain })));
        // 4000 tokens of 3 GFLOP on two GPUs of 0.1 PFLOP/s take 0.06 s at least.
        let above = |quantity: Quantity, value: f64| quantity.above_peak(value, &step, step.peak).is_some();
        assert!(above(Quantity::Step, 0.05) && !above(Quantity::Step, 0.07) && !above(Quantity::Pair, 0.05));
        assert!(above(Quantity::TokensPerGpu, 4e4) && !above(Quantity::TokensPerGpu, 3e4));
        assert!(above(Quantity::Tflops(plain), 101.0) && above(Quantity::Utilization(plain), 1.01));
        assert_eq!((Quantity::Step.halved(), Quantity::Step.share(&step)), (None, None));
    }
}
