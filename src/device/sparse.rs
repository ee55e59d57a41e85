//! Attention to chosen keys, and the scores that choose them (DeepSeek Sparse Attention): shares of a GPU's peak. What one query
//! chooses is no tile of anything, so that no curve of other kernels says anything of them.

use super::{Part, Roofline};
use crate::plan::Dtype;
use crate::spec::Provenance;
use crate::spec::gpu::Architecture;
use crate::units::Bytes;

/// Forward: "up to 640 TFlops" on an H800 of 989, and 1450 on a B200 of 2250 (FlashMLA's README on its sparse prefill, github:
/// deepseek-ai/FlashMLA): 0.647 and 0.644. At best, with 128 heads and 2048 keys.
const FORWARD: f64 = 0.645;

/// Backward. Nobody has published any. Assumed: two thirds of the forward pass's, as dense latent attention has on a B200 (1000 of
/// 1460, the same README), and three quarters of that for gradients of keys that are added up one by one.
const BACKWARD: f64 = FORWARD * 2.0 / 3.0 * 0.75;

/// Scores, of the peak of the dtype that they are computed in. Assumed: what is left of a product of 128 columns whose result goes
/// through a ReLU and a sum over heads on its way.
const SCORES: f64 = 0.5;

/// Relative standard deviations of what is published of GPUs of the kind, and of what is assumed.
const STATED_SD: f64 = 0.15;
const ASSUMED_SD: f64 = 0.4;

impl Roofline {
    /// Latent attention of so many FLOPs to keys that were chosen, or the gradients of their scores.
    pub(super) fn to_chosen_keys(&self, flops: u64, dtype: Dtype, backward: bool) -> Part {
        let stated = matches!(self.gpu.architecture, Architecture::Hopper | Architecture::Blackwell) && !backward;
        let share = if backward { BACKWARD } else { FORWARD };
        Part {
            seconds: self.at_rate(flops as f64, dtype, share),
            provenance: if stated { Provenance::Extrapolated } else { Provenance::Assumed },
            rel_sd: if stated { STATED_SD } else { ASSUMED_SD },
        }
    }

    /// Scores of all visible keys, and behind them the choice, which passes over `moved` bytes of scores.
    pub(super) fn scores_of_keys(&self, flops: u64, dtype: Dtype, fp8: bool, moved: u64) -> Part {
        let faster = if fp8 { self.fp8(dtype).expect("whoever asks for fp8 checks it") } else { 1.0 };
        let curve = &self.gpu.memory_bound;
        let choice = Bytes::new(moved as f64) / (self.gpu.memory_bandwidth.value * curve.fraction.value);
        Part {
            seconds: self.at_rate(flops as f64, dtype, SCORES * faster) + choice,
            provenance: Provenance::Assumed,
            rel_sd: ASSUMED_SD,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::device::{KernelTime, Roofline};
    use crate::plan::{Dtype, Pairs, Work, WorkClass};
    use crate::spec::{GpuSpec, StackSpec};

    fn work(flops: u64, pairs: Pairs, backward: bool) -> Work {
        let (q_rows, kv_rows, area, batch_heads, dims) = (32768, 32768, 32768 * 2048, 128, [576, 512]);
        let class = WorkClass::Attention { q_rows, kv_rows, area, batch_heads, dims, backward, pairs };
        Work { flops, bytes: 1 << 20, class }
    }

    /// The rates that FlashMLA states, and that scores in FP8 take half as long.
    #[test]
    fn rates_are_those_that_are_published() {
        let (gpu, stack) = (GpuSpec::find("h800-sxm5").unwrap(), StackSpec::find("nccl-fa3").unwrap());
        let machine = Roofline::new(&gpu, &stack).unwrap();
        let seconds =
            |pairs, backward| machine.time(&work(10u64.pow(15), pairs, backward), Dtype::Bf16).seconds.value();
        let forward = seconds(Pairs::Chosen, false);
        assert!((1e15 / forward / 640e12 - 1.0).abs() < 0.02, "{}", 1e15 / forward);
        assert!(seconds(Pairs::Chosen, true) > forward);
        let scored = |fp8, moved| seconds(Pairs::Scored { fp8, moved }, false);
        assert!((scored(false, 0) / scored(true, 0) - 2.0).abs() < 0.02);
        assert!(scored(true, 1 << 40) > scored(true, 0) + 0.2);
    }
}
