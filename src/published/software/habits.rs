//! Attention kernel and habits by the name of the system: what a source leaves unsaid is what its system, as the table of
//! systems has it, did by default at its time.

use super::era::{follows_flash_2, is_later_gpu, is_later_model, precedes_flash};
use super::loss::{self, ALONE};
use super::sdpa;
use super::system::System;
use super::table::Fact;
use crate::published::row::case::Training;
use crate::published::row::words::{squeezed, tokens};
use crate::spec::{Recompute, WideLoss};

/// What a system does unless told otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Habits {
    /// Attention kernels, the first that the GPU has a curve for.
    pub kernels: &'static [&'static str],
    /// Probability to drop an element in training.
    pub dropout: f64,
    /// Attention and feed-forward network beside each other.
    pub parallel_block: bool,
    /// A token sees half of the sequence at most.
    pub half_window: bool,
    /// Stage of ZeRO where none is stated.
    pub zero: u32,
    /// Tensor parallelism comes with sequence parallelism where neither is stated.
    pub sequence_parallel: bool,
    /// Chunks of rows are gathered and scattered beside the products, where there is sequence parallelism.
    pub tp_overlap: bool,
    /// The recipes come with NCCL's settings for sends.
    pub tuned_sends: bool,
    /// Products add to the gradients of weights themselves, in place of a kernel behind each.
    pub fused_grads: bool,
    pub wide_loss: WideLoss,
    /// What is recomputed where nothing is said.
    pub recompute: Option<Recompute>,
    /// Selective recomputation is that of every second product (torchtitan's `selective` of operators), which is half
    /// of a layer's; else of attention alone (Megatron-LM's).
    pub halves: bool,
    /// Layers that do not come out even fill the stages of a pipeline from the first one on, and the last has what is left.
    pub fills_stages: bool,
    /// Without sequence parallelism, ranks of tensor parallelism pass on a part each between stages.
    pub scattered_p2p: bool,
    /// From before FlashAttention, or from its first months: whoever has later GPUs, or models, has what came later.
    pub early: bool,
    pub overlap: Overlap,
}

/// Which communication runs beside compute.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Overlap {
    /// The sum of gradients over replicas.
    pub grad: bool,
    /// The gathering of what the optimizer has updated in shares, with the next step (`overlap_param_gather`).
    pub gather: bool,
    /// What passes between the stages of a pipeline, and of one that is interleaved.
    pub p2p: bool,
    pub interleaved_p2p: bool,
    /// The CPU issues on while the GPU computes, and does not wait for every pass of a microbatch.
    pub passes: bool,
    /// Nor for every kernel (`CUDA_LAUNCH_BLOCKING`).
    pub kernels: bool,
}

/// Everything that depends on nothing within a step.
pub(super) const ALL: Overlap =
    Overlap { grad: true, gather: false, p2p: true, interleaved_p2p: true, passes: true, kernels: true };
/// Megatron Core: 1F1B waits for every send and receive (`batch_p2p_sync`), its interleaved form need not. Gradients are summed
/// beside the backward pass and new weights gathered beside the next forward pass (`overlap_grad_reduce` and `overlap_param_gather` of
/// recipes: github:NVIDIA-NeMo/Megatron-Bridge@107a0ec src/megatron/bridge/recipes/qwen/qwen3_8b.py).
pub(super) const CORE: Overlap = Overlap { gather: true, p2p: false, ..ALL };
/// Megatron-LM by default, until flags for overlap came in 2023 and as long as nobody sets them.
pub(super) const NOTHING: Overlap = Overlap { grad: false, gather: false, interleaved_p2p: false, ..CORE };
/// Its timers waited for the device at both ends of what they timed, until they had levels late in 2022.
pub(super) const TIMED: Overlap = Overlap { passes: false, ..NOTHING };

pub(super) const fn habits(kernels: &'static [&'static str], dropout: f64) -> Habits {
    Habits {
        kernels,
        dropout,
        parallel_block: false,
        half_window: false,
        zero: 0,
        sequence_parallel: false,
        tp_overlap: false,
        tuned_sends: false,
        fused_grads: false,
        wide_loss: WideLoss::Copied,
        recompute: None,
        halves: false,
        fills_stages: false,
        scattered_p2p: false,
        early: false,
        overlap: ALL,
    }
}

pub(super) const fn with(overlap: Overlap, habits: Habits) -> Habits {
    Habits { overlap, ..habits }
}

/// Megatron of 2019 to 2022 and what was built on it. Whoever is as early and does not say so recomputes whole layers, as
/// selective recomputation came in May of 2022 (arXiv:2205.05198), the month of FlashAttention.
/// What passes between stages is scattered (arXiv:2104.04473, section 4.1; DeepSpeed's engine of pipelines does it, too:
/// `pipe_partitioned` and `grad_partitioned`, github:microsoft/DeepSpeed@0050fda deepspeed/runtime/pipe/engine.py).
pub(super) const EARLY: Habits =
    in_place(Habits { early: true, scattered_p2p: true, ..with(TIMED, habits(UNFUSED, 0.1)) });

/// Scores are written to memory: Megatron's fused softmax, before FlashAttention (arXiv:2205.14135).
pub(super) const UNFUSED: &[&str] = &["unfused", "fa2"];
/// FlashAttention as it was until July 2023.
pub(super) const FLASH_1: &[&str] = &["fa1", "fa2"];
/// FlashAttention 2 or, on what came after it, what PyTorch had there.
pub(super) const FLASH: &[&str] = &["fa2", "fa3", "cudnn", "fa4"];
/// Transformer Engine takes cuDNN where it is the faster.
pub(super) const TRANSFORMER_ENGINE: &[&str] = &["cudnn", "fa4", "fa3", "fa2"];
/// The newest FlashAttention of each generation.
pub(super) const NEWEST: &[&str] = &["fa4", "fa3", "fa2", "cudnn"];

/// Megatron's loss makes logits fp32 and goes on in their place, as is or fused (`VocabParallelCrossEntropy`,
/// github:NVIDIA/Megatron-LM megatron/core/tensor_parallel/cross_entropy.py, megatron/core/fusions/fused_cross_entropy.py).
pub(super) const fn in_place(habits: Habits) -> Habits {
    Habits { wide_loss: WideLoss::InPlace, ..habits }
}

/// Its products add to the gradients of weights since 2022 (`gradient_accumulation_fusion`, with APEX).
pub(super) const fn fused(habits: Habits) -> Habits {
    in_place(Habits { fused_grads: true, ..habits })
}

/// A system that the table does not name.
pub(super) const OTHERWISE: Habits = habits(NEWEST, 0.0);

/// Kernels of attention that the name of a system gives with it.
const NAMED: &[(&[&str], &[&str])] = &[
    (&["withoutflash", "w/oflash", "noflash", "unfusedattention"], UNFUSED),
    (&["cudnn"], TRANSFORMER_ENGINE),
    (&["flashattention4", "flashattn4", "fa4"], &["fa4", "cudnn", "fa3", "fa2"]),
    (&["flashattention3", "flashattn3", "fa3"], &["fa3", "cudnn", "fa4", "fa2"]),
    (&["flashattention2", "flashattn2", "fa2", "flashv2"], &["fa2", "fa3", "cudnn", "fa4"]),
];

fn named(system: &System) -> Option<&'static [&'static str]> {
    let engine =
        (is_on_engine(system) && !system.says(&["sdpa", "flexattn", "flexattention"])).then_some(TRANSFORMER_ENGINE);
    NAMED.iter().find(|(words, _)| system.says(words)).map(|(_, kernels)| *kernels).or(engine)
}

/// Whether a system is said to have the layers of Transformer Engine, or TE for short.
fn is_on_engine(system: &System) -> bool {
    system.has("transformerengine") || system.has_word("te")
}

impl Habits {
    /// The same with scores in memory.
    pub fn unfused(self) -> Habits {
        Habits { kernels: UNFUSED, ..self }
    }

    /// Those of a system, whatever it runs on.
    pub fn of(system: &str) -> Habits {
        Habits::by_name(&System::of(system), system, false).settled()
    }

    fn by_name(system: &System, name: &str, on_later_gpu: bool) -> Habits {
        let tabled = system.first(|fact| if let Fact::Habit(habits) = fact { Some(habits) } else { None });
        let found = tabled.unwrap_or(OTHERWISE);
        let found = if precedes_flash(name) { before_flash(found) } else { found };
        let wide_loss = loss::of(system, name, found.wide_loss);
        let found = Habits { wide_loss, ..found };
        match named(system) {
            Some(kernels) if kernels == UNFUSED => found.unfused(),
            Some(kernels) => Habits { kernels, ..found.with_flash(false) },
            None if system.has_flash() && (found.early || found.kernels == UNFUSED) => found.with_flash(on_later_gpu),
            None => found,
        }
    }

    /// The same of whoever has FlashAttention: in its first version on the GPUs of its time, with timers that do not wait,
    /// and with nothing recomputed for no reason but habit.
    fn with_flash(self, on_later_gpu: bool) -> Habits {
        let kernels = match self.kernels {
            _ if on_later_gpu => FLASH,
            given if given == UNFUSED => FLASH_1,
            given => given,
        };
        Habits { kernels, early: false, overlap: Overlap { passes: true, ..self.overlap }, ..self }
    }

    /// Early systems recompute whole layers where they do not say otherwise.
    fn settled(self) -> Habits {
        let habit = self.early.then_some(Recompute::Full);
        Habits { recompute: self.recompute.or(habit), ..self }
    }

    /// Those of a run: early habits end with GPUs and models that are later than FlashAttention. Megatron-LM's GPT on A100 is
    /// from before Transformer Engine's layers and flags for overlap, and collectives wait. In fp16 it is from before
    /// FlashAttention, too, which came to it with bf16's default, early in 2023 (github:NVIDIA/Megatron-LM,
    /// `--use-flash-attn` of January 2023), unless it is named: scores are in memory.
    pub fn of_run(run: &Training) -> Habits {
        let system = System::of(&run.system);
        let found = Habits::by_name(&system, &run.system, is_later_gpu(&run.gpu));
        let kernels = named(&system);
        let found = found.at_its_time(run, kernels).with_second(run, kernels);
        let sdpa = kernels.is_none().then(|| sdpa::of(&system, &run.gpu)).flatten();
        let found = Habits { kernels: sdpa.unwrap_or(found.kernels), ..found }.settled();
        let a100 = tokens(&run.gpu).iter().any(|word| word == "a100");
        let plain = system.has("megatronlm") && found.kernels == TRANSFORMER_ENGINE;
        if !(a100 && plain) || run.gated_ffn == Some(true) {
            return found;
        }
        let found = Habits { overlap: NOTHING, scattered_p2p: true, ..found };
        match squeezed(&run.precision).starts_with("fp16") && !system.has_flash() {
            true => Habits { kernels: UNFUSED, dropout: EARLY.dropout, ..found },
            false => Habits { kernels: FLASH_1, ..found }.with_second(run, kernels),
        }
    }

    /// FlashAttention in its second version, for whoever has the first one by habit and is later than that, unless
    /// kernels are `named`.
    fn with_second(self, run: &Training, named: Option<&[&str]>) -> Habits {
        let later = named.is_none() && self.kernels == FLASH_1 && follows_flash_2(run);
        Habits { kernels: if later { FLASH } else { self.kernels }, ..self }
    }

    /// Early habits on what is later than FlashAttention: its kernels, unless others are `named`, and no dropout in models
    /// that have none.
    fn at_its_time(self, run: &Training, named: Option<&[&str]>) -> Habits {
        let (gpu, model) = (is_later_gpu(&run.gpu), is_later_model(run));
        if !self.early || named.is_some() || !(gpu || model) {
            return self;
        }
        let found = self.with_flash(gpu);
        if model { Habits { dropout: 0.0, ..found } } else { found }
    }
}

/// Whether norms, rotations and gates are several kernels each.
pub fn is_eager(name: &str) -> bool {
    let system = System::of(name);
    let text = system.text.replace("unfused", "").replace(ALONE, "");
    let fused = ["compile", "liger", "fused", "transformerengine"].iter().any(|word| text.contains(word));
    // Who tells of what shards alone has PyTorch's blocks, or Hugging Face's.
    let sharder = ["fsdp", "torchfsdp", "deepspeedzero", "deepspeed"]
        .iter()
        .any(|word| system.text.strip_prefix(word).is_some_and(|rest| rest.chars().all(|c| c.is_ascii_digit())));
    let own = system.first(|fact| if let Fact::Operators(own) = fact { Some(own) } else { None });
    own.unwrap_or(sharder) && !fused && !is_on_engine(&system)
}

/// Whether rows of experts are put in order by PyTorch's operators of indices, whatever is compiled, but where the whole step is a
/// CUDA graph, which has no sizes that the CPU learns on the way.
pub fn indexes_rows(name: &str) -> bool {
    let system = System::of(name);
    system.is(Fact::IndexedExperts) && !system.has("cudagraph")
}

fn before_flash(found: Habits) -> Habits {
    Habits { kernels: UNFUSED, dropout: EARLY.dropout, tp_overlap: false, tuned_sends: false, ..found }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_of_pytorch_are_kernels_unless_something_fuses_them() {
        assert!(
            indexes_rows("torchtitan (FSDP2 + EP, torch.compile)") && !indexes_rows("NeMo AutoModel (PyTorch FSDP2)")
        );
        assert!(!indexes_rows("torchtitan (FSDP + EP, CUDA graph of the step)"));
        assert!(is_eager("torchtitan (FSDP)") && is_eager("fms-fsdp (PyTorch FSDP, SDPA flash v2)"));
        assert!(!is_eager("torchtitan (FSDP + torch.compile)") && !is_eager("HF+DeepSpeed ZeRO-3 + Liger"));
        assert!(!is_eager("NeMo AutoModel (PyTorch FSDP2, TE + DeepEP)") && is_eager("PyTorch, tested"));
        assert!(is_eager("torchtitan (FSDP2, not compiled)") && is_eager("torchtitan (FSDP2, unfused optimizer)"));
        assert!(is_eager("Megatron-LM + USP (YunChang)") && !is_eager("Megatron-LM core_v0.6.0 + Transformer Engine"));
        assert!(!is_eager("Megatron-LM") && !is_eager("MosaicML llm-foundry (FSDP, FlashAttention)"));
        assert!(is_eager("torchtitan of November 2025, compile of the loss only"));
        assert!(Habits::of("torchtitan (FSDP + TP + AsyncTP)").tp_overlap && !Habits::of("torchtitan").tp_overlap);
    }

    #[test]
    fn kernels_that_a_name_gives_and_software_of_its_time() {
        assert_eq!(Habits::of("Megatron-LM PTD-P").kernels, UNFUSED);
        assert_eq!(Habits::of("Megatron-LM + USP (YunChang)").kernels, FLASH);
        assert_eq!(Habits::of("Primus-pipeline zbb").zero, 1);
        assert_eq!(Habits::of("NeMo/Megatron-Bridge 26.04").kernels, TRANSFORMER_ENGINE);
        assert_eq!(Habits::of("a script, without FlashAttention (Megatron-LM)").kernels, UNFUSED);
        assert_eq!(Habits::of("torchtitan (torch.compile, FA4)").kernels[0], "fa4");
        assert_eq!(Habits::of("a script, FlashAttention-2").kernels[0], "fa2");
        assert_eq!(Habits::of("MosaicML examples (FSDP)").kernels, FLASH_1);
        let run = |precision: &str, gpu: &str| {
            let [system, precision, gpu] = ["Megatron-LM", precision, gpu].map(String::from);
            Habits::of_run(&Training { system, precision, gpu, ..Training::default() }).kernels
        };
        assert_eq!([run("fp16", "A100-SXM-80GB"), run("bf16", "A100-SXM-80GB")], [UNFUSED, FLASH_1]);
        assert_eq!(run("fp16", "H100-SXM-80GB"), TRANSFORMER_ENGINE);
    }

    #[test]
    fn nemo_before_it_had_flash_attention() {
        let kernels = |system: &str| Habits::of(system).kernels;
        assert_eq!([kernels("NeMo 23.05"), kernels("NeMo Framework of 2023")], [UNFUSED; 2]);
        assert_eq!([kernels("NeMo 23.08"), kernels("NeMo 24.07"), kernels("NeMo")], [TRANSFORMER_ENGINE; 3]);
        assert_eq!(
            ["Megatron-LM (Nemotron-4)", "Megatron", "Megatron v3"].map(Habits::of),
            [Habits::of("Megatron-LM"); 3]
        );
        assert_eq!(kernels("FSDP2, ring attention over SDPA of cuDNN"), TRANSFORMER_ENGINE);
    }

    /// Where a model, a GPU or the name of a system is later than FlashAttention, habits from before it do not hold.
    #[test]
    fn early_habits_end_with_flash_attention() {
        let of = |system: &str, gpu: &str, model: &str| {
            let [system, gpu, model] = [system, gpu, model].map(String::from);
            let found = Habits::of_run(&Training { system, gpu, model, ..Training::default() });
            (found.kernels, found.recompute, found.dropout)
        };
        let full = Some(Recompute::Full);
        assert_eq!(of("Megatron-DeepSpeed", "A100", "GPT 22B"), (UNFUSED, full, 0.1));
        assert_eq!(of("Megatron-LM PTD-P", "A100", "GPT 22B"), (UNFUSED, full, 0.1));
        assert_eq!(of("Megatron-LM PTD-P", "H100", "GPT 22B"), (FLASH, None, 0.1));
        assert_eq!(of("Megatron-LM PTD-P", "A100", "Llama-2 7B"), (FLASH_1, None, 0.0));
        assert_eq!(of("Megatron-LM PTD-P", "A100", "Llama-3 8B"), (FLASH, None, 0.0));
        assert_eq!(of("Megatron-DeepSpeed, without FlashAttention", "H100", "GPT 22B"), (UNFUSED, full, 0.1));
        assert_eq!(of("Megatron-DeepSpeed (FlashAttention-2)", "A100", "GPT 22B").0[0], "fa2");
        assert_eq!(of("Megatron-LM PTD-P + flash attention", "A100", "GPT 22B"), (FLASH_1, None, 0.1));
        // Recipes of DeepSpeed's Megatron, GPT-NeoX and Ulysses recompute whatever the attention is.
        assert_eq!(of("Megatron-DeepSpeed (flash-attn)", "A100", "GPT 22B"), (FLASH_1, full, 0.1));
        assert_eq!(of("Megatron-DeepSpeed", "B200", "Llama-3 8B"), (FLASH, full, 0.0));
        assert_eq!(of("GPT-NeoX + FlashAttention", "A100", "GPT 20B"), (FLASH_1, full, 0.0));
        assert_eq!(of("DeepSpeed-Ulysses", "A100", "GPT 7B"), (FLASH_1, full, 0.0));
        assert_eq!(of("a comparison of 2024, ds-ulysses", "A800", "GPT 7B"), (FLASH, full, 0.0));
        assert_eq!(of("DeepSpeed-Ulysses", "A100", "Qwen2.5-7B"), (FLASH, full, 0.0));
        let later = ["DeepSpeed-Ulysses", "DeepSpeed-Ulysses (FlashAttention)"].map(|name| of(name, "H100", "GPT 7B"));
        assert_eq!(later, [(FLASH, full, 0.0); 2]);
        // What is no habit of a time but how a ring is written, or who was measured, stays.
        assert_eq!(of("Colossal-AI SP", "H100", "GPT 7B").0, UNFUSED);
        assert_eq!(of("MosaicML llm-foundry (FSDP, FlashAttention)", "H100", "MPT-7B").0, FLASH_1);
    }

    #[test]
    fn megascale_itself_has_its_block_and_its_window() {
        let of = |system: &str| {
            let found = Habits::of(system);
            (found.parallel_block, found.half_window, found.tp_overlap)
        };
        assert_eq!([of("MegaScale"), of("MegaScale ablation +TP overlap")], [(true, true, true); 2]);
        assert_eq!(of("MegaScale ablation +sliding window"), (true, true, false));
        assert_eq!(of("MegaScale ablation baseline Megatron-LM"), (false, false, false));
        assert_eq!(of("MegaScale-MoE (on Megatron-LM)"), (false, false, true));
        let other = Habits::of("Megatron-LM@f1f03922 with MegaScale's overlap of data and pipeline parallelism");
        assert_eq!(other, Habits::of("Megatron-LM"));
        assert_eq!(Habits::of("another system, ablation +TP overlap"), OTHERWISE);
    }
}
