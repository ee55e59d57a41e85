//! Fine-tuning that leaves the weights of a model as they are, by what its source says: LoRA (arXiv:2106.09685) and its
//! kin, and QLoRA (arXiv:2305.14314), which keeps them in four bits.

use crate::plan::{Plan, TensorKind};
use crate::published::row::case::Training;
use crate::published::row::words::{affirmed, squeezed, tokens};
use crate::spec::{GpuSpec, Recompute};
use crate::units::Seconds;

/// Bytes that a weight in four bits has to be moved for it to be whole again, by the kernels that unpack, look up and
/// scale: what rates of LoRA and QLoRA differ by over three passes is 12 of an RTX 4090 (Llama-3.1 8B, 4096 tokens:
/// github:pytorch/torchtune README.md) and 18 of an A100 (Qwen-7B, 2048 tokens: github:QwenLM/Qwen README.md).
const UNPACKED: f64 = 15.0;

/// Of a weight of two bytes, what four bits and their scales leave.
const PACKED: f64 = 0.28;

/// How a model is tuned without its weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tuning {
    Adapters,
    /// Of weights in four bits.
    Packed,
}

impl Tuning {
    pub fn of(run: &Training) -> Option<Tuning> {
        let said = affirmed(&format!("{}; {}; {}; {}", run.system, run.model, run.precision, run.notes));
        let words = tokens(&said);
        let is = |names: &[&str]| words.iter().any(|word| names.contains(&word.as_str()));
        let packed = is(&["qlora", "qdora"]) || squeezed(&said).contains("qlora");
        let adapts = packed || is(&["lora", "dora", "rslora", "lora+"]);
        adapts.then_some(if packed { Tuning::Packed } else { Tuning::Adapters })
    }

    pub fn said(self) -> &'static str {
        match self {
            Tuning::Adapters => {
                "weights frozen: no gradients, sums or optimizer of theirs; adapters themselves left out"
            }
            Tuning::Packed => "weights frozen and in four bits: unpacked in every pass; adapters themselves left out",
        }
    }

    /// Bytes of the fullest rank that are not there, as its weights are packed.
    pub fn spared(self, plan: &Plan) -> f64 {
        let weights = |t: &&crate::plan::Tensor| t.kind == TensorKind::Param && !t.host;
        let bytes: u64 = plan.tensors.iter().filter(weights).map(|t| t.bytes() * u64::from(t.slots)).sum();
        if self == Tuning::Packed { (1.0 - PACKED) * bytes as f64 } else { 0.0 }
    }

    /// Of a step, to make weights whole: `weights` on each rank, in every pass of every microbatch.
    pub fn unpacking(self, weights: f64, microbatches: f64, recompute: Recompute, gpu: &GpuSpec) -> Seconds {
        let passes = if recompute == Recompute::Full { 3.0 } else { 2.0 };
        let moved = if self == Tuning::Packed { UNPACKED * weights * passes * microbatches } else { 0.0 };
        Seconds::new(moved / (gpu.memory_bandwidth.value.value() * gpu.memory_bound.fraction.value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::link::{AtomTable, Line};
    use crate::plan::{CollectiveKind, Kernel, Op, OpKind, Tensor};
    use crate::spec::{ClusterSpec, Dtype, LlmSpec, Parallelism, StackSpec, Workload};
    use crate::strategy::{Engines, build};

    #[test]
    fn what_is_frozen_by_the_words_of_sources() {
        let of = |system: &str, notes: &str| {
            Tuning::of(&Training { system: system.into(), notes: notes.into(), ..Training::default() })
        };
        assert_eq!(of("NeMo AutoModel, LoRA", ""), Some(Tuning::Adapters));
        assert_eq!(of("NeMo 24.07", "LoRA; LoRA skips wgrad"), Some(Tuning::Adapters));
        assert_eq!(of("transformers + PEFT, Q-LoRA", ""), Some(Tuning::Packed));
        assert_eq!(of("torchtune, QLoRA (torch.compile)", ""), Some(Tuning::Packed));
        assert_eq!((of("Megatron-LM", "full, no LoRA"), of("explorable", "SFT")), (None, None));
    }

    fn plan(par: Parallelism) -> Plan {
        of(LlmSpec::find("small").unwrap(), par)
    }

    fn of(model: LlmSpec, par: Parallelism) -> Plan {
        let documents = Default::default();
        let work = Workload { seq_len: 512, global_batch: 8, micro_batch: 1, dtype: Dtype::Bf16, documents };
        let (stack, cluster) = (StackSpec::find("nccl-fa2").unwrap(), ClusterSpec::find("dgx-a100").unwrap());
        build(&model, &work, &par, Engines::of(&stack, &cluster)).unwrap()
    }

    fn count(plan: &Plan, named: fn(&Kernel) -> bool) -> usize {
        let lines = plan.blocks.iter().map(|b| &b.ops).chain(plan.programs.iter().map(|p| &p.ops));
        let is = |op: &&Op| matches!(&op.kind, OpKind::Compute { kernel, .. } if named(kernel));
        lines.flatten().filter(is).count()
    }

    /// Of products forward, backward and of weights the last third goes, with the optimizer; the others stay.
    #[test]
    fn nothing_of_a_frozen_weight_is_made() {
        for par in [
            Parallelism { dp: 2, tp: 2, zero: 1, ..Parallelism::default() },
            Parallelism { dp: 4, zero: 3, ..Parallelism::default() },
            Parallelism { dp: 1, pp: 2, ..Parallelism::default() },
        ] {
            let whole = plan(par);
            let frozen = whole.clone().frozen();
            let adam: fn(&Kernel) -> bool = |k| matches!(k, Kernel::Adam { .. });
            let weights: fn(&Kernel) -> bool = |k| matches!(k, Kernel::MatMul { a_t: true, .. });
            let others: fn(&Kernel) -> bool = |k| matches!(k, Kernel::MatMul { a_t: false, .. });
            assert!(count(&whole, adam) > 0 && count(&whole, weights) > 0);
            assert_eq!((count(&frozen, adam), count(&frozen, weights)), (0, 0), "{par:?}");
            assert_eq!(count(&whole, others), count(&frozen, others), "{par:?}");
        }
    }

    /// Weights that nobody updates are whole from step to step, and are gathered neither behind a step nor ahead of one.
    #[test]
    fn frozen_weights_are_not_gathered_where_they_are_whole() {
        let gathers = |zero: u32, words: &str| {
            let options = words.parse().unwrap();
            let frozen = plan(Parallelism { dp: 4, zero, options, ..Parallelism::default() }).frozen();
            let lines = frozen.blocks.iter().map(|b| &b.ops).chain(frozen.programs.iter().map(|p| &p.ops));
            let gather = |op: &&Op| matches!(&op.kind, OpKind::Collective { kind: CollectiveKind::AllGather, .. });
            lines.flatten().filter(gather).count()
        };
        assert_eq!([gathers(1, ""), gathers(1, "overlap-gather"), gathers(2, "foreach")], [0; 3]);
        assert!(gathers(3, "") > 0);
    }

    /// Norms of queries and keys are there for their inputs alone, and have work to do.
    #[test]
    fn frozen_norms_of_heads_pass_gradients_on() {
        let frozen = of(
            LlmSpec { qk_norm: true, ..LlmSpec::find("small").unwrap() },
            Parallelism { dp: 2, ..Parallelism::default() },
        )
        .frozen();
        let ops: Vec<&Op> =
            frozen.blocks.iter().flat_map(|b| &b.ops).chain(frozen.programs.iter().flat_map(|p| &p.ops)).collect();
        let mut found = 0;
        for op in ops {
            if let OpKind::Compute { kernel: kernel @ Kernel::HeadNormBwd { .. }, reads, writes, .. } = &op.kind {
                assert_eq!((reads.len(), writes.len()), (3, 1));
                let work = kernel.work(&[], 0, &[48, 32, 2], &[48]).unwrap();
                assert_eq!(work.bytes, 2 + 3 * 32);
                found += 1;
            }
        }
        assert!(found > 0);
    }

    /// Under every way to sum and to keep gradients, nothing touches what the builder calls one, whose names are not asked.
    #[test]
    fn gradients_are_found_by_what_is_done_with_them() {
        let par = |words: &str, zero: u32| Parallelism {
            dp: 4,
            zero,
            options: words.parse().unwrap(),
            ..Parallelism::default()
        };
        for par in [
            par("default", 0),
            par("default", 1),
            par("no-overlap-grad", 1),
            par("add-grads", 1),
            par("default", 2),
            par("no-prefetch", 3),
            par("no-sync", 3),
            par("shard-2", 3),
            par("offload-optimizer", 2),
            Parallelism { tp: 4, ..par("tp-overlap", 3) },
            Parallelism { pp: 2, ..par("zb-h1", 1) },
            par("shard-2", 1),
            Parallelism { dp: 2, pp: 2, ring: 2, ulysses: 2, ..par("default", 3) },
        ] {
            let (whole, frozen) = (plan(par), plan(par).frozen());
            let named =
                |t: &Tensor| ["g.", "g_part.", "g_share.", "g_host."].iter().any(|start| t.name.starts_with(start));
            let touched = |plan: &Plan, program: usize| {
                let line = Line::program(plan, &AtomTable::new(plan).unwrap(), program as u32).unwrap();
                let places = |i: usize| line.reads(i).iter().chain(line.writes(i)).map(|place| place.tensor);
                let all: Vec<u32> = (0..line.nodes.len()).flat_map(places).collect();
                all.into_iter().filter(|id| named(&plan.tensors[*id as usize])).count()
            };
            for program in 0..whole.programs.len() {
                assert!(touched(&whole, program) > 0, "{par:?}");
                assert_eq!(touched(&frozen, program), 0, "{par:?}");
            }
            let others: fn(&Kernel) -> bool = |k| matches!(k, Kernel::MatMul { a_t: false, .. });
            assert_eq!(count(&whole, others), count(&frozen, others), "{par:?}");
        }
    }
}
