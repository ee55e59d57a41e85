//! Whose Adam goes operation by operation through all weights (`foreach`): PyTorch's on GPUs, where nobody asks it for its fused
//! kernel. That has been its default since PyTorch 2.0 (github pulls pytorch/pytorch#92306, #95241 and #95862).
//!
//! DeepSpeed's and Megatron's optimizers are kernels of their own (`FusedAdam`), as is what nanoGPT asks PyTorch for.

use super::release::{Release, release};
use super::system::System;
use crate::published::row::case::Training;
use crate::published::row::words::squeezed;
use std::ops::Range;

/// torchtitan passes `foreach = not fused`, and `fused` is its default since March 2025 (github pull pytorch/torchtitan#881 of
/// 2025-02-24; torchtitan/optimizer.py@04a22a0).
const FUSED_IN_TITAN: Release = (25, 3);

/// Hugging Face's trainer: `adamw_torch` from transformers 4.32 on (github pull huggingface/transformers#25109 of July 2023),
/// `adamw_torch_fused` under PyTorch 2.8, which came in August 2025 (#37358 of July 2025).
const IN_TRANSFORMERS: Range<Release> = (23, 8)..(25, 8);

/// Those who run that trainer: ms-swift has its default written out (`optim` of swift/llm/utils/argument.py), fms-hf-tuning takes it.
const ON_TRANSFORMERS: &[&str] = &["hftrainer", "huggingfacetrainer", "msswift", "trlsft"];

/// Those who call PyTorch's AdamW, or Adam, and say nothing of how: fms-fsdp (main_training_llama.py@05030cc), PithTrain
/// (pithtrain/modules/training.py@0206014), and NeMo AutoModel's recipes (examples/llm_finetune/llama3_2/llama3_2_1b_squad.yaml@080dca5,
/// examples/benchmark/configs/qwen3_moe_30b_te_deepep.yaml@092af93).
const PLAIN: &[&str] = &["fmsfsdp", "pithtrain", "automodel"];

/// Whether a run's optimizer goes operation by operation.
pub fn is_foreach(run: &Training) -> bool {
    let system = System::of(&run.system);
    let said = squeezed(&[&run.system, " ", &run.notes].concat()).replace("unfused", "");
    let other = ["fusedadam", "fusedoptim", "foreachoff", "8bit", "optimizerinbackward", "adafactor"];
    let own = other.iter().any(|word| said.contains(word));
    let on_deepspeed = system.says(&["deepspeed", "zero2", "zero3"]);
    if own || on_deepspeed {
        return false;
    }
    let at = release(&run.system);
    match () {
        () if system.has("torchtitan") => system.has("torchtitan0.0") || at.is_some_and(|at| at < FUSED_IN_TITAN),
        () if system.says(ON_TRANSFORMERS) => at.is_some_and(|at| IN_TRANSFORMERS.contains(&at)),
        // LitGPT's fine-tuning and its script for Thunder (litgpt/finetune/full.py@0077627, extensions/thunder/pretrain.py@03f8ddd).
        () if system.text.starts_with("litgpt") => true,
        // Who names a version of PyTorch and nothing else has its default.
        () => system.says(PLAIN) || system.text.starts_with("pytorch2."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_adam_is_plain_pytorch() {
        let of = |system: &str, notes: &str| {
            is_foreach(&Training { system: system.into(), notes: notes.into(), ..Training::default() })
        };
        for system in [
            "torchtitan of December 2024 (FSDP)",
            "torchtitan 0.0.2 (FSDP2 + torch.compile, bf16)",
            "ms-swift 2024 (Hugging Face, FlashAttention 2.3), sft_type full",
            "HF Trainer of fms-hf-tuning/fms-acceleration, 2024 (transformers, accelerate FSDP for 2 GPUs)",
            "litgpt finetune full",
            "litgpt, Eager PyTorch DDP",
            "PithTrain (DualPipeV, FSDP2, expert parallelism, torch.compile)",
            "NeMo AutoModel (PyTorch FSDP2, TE + DeepEP)",
            "PyTorch 2.3 ddp, no torch.compile",
        ] {
            assert!(of(system, ""), "{system}");
        }
        for system in [
            "torchtitan (FSDP2 + torch.compile)",
            "torchtitan (FSDP2) of 2025-03-20",
            "ms-swift 3.8 (August 2025), DeepSpeed ZeRO-3",
            "ms-swift (Hugging Face + DeepSpeed)",
            "Hugging Face Trainer + DeepSpeed, FlashAttention 2, full-parameter",
            "TRL SFTTrainer, transformers 5.6, FSDP2, attention sdpa",
            "TinyLlama (lit-gpt, FSDP, FlashAttention 2, fused layernorm, swiglu, cross entropy and rotary)",
            "nanoGPT (torch.compile, SDPA)",
            "Megatron-LM of 2023, 1F1B",
            "PyTorch 2.3 ds-zero3, no torch.compile",
        ] {
            assert!(!of(system, ""), "{system}");
        }
        let titan = "torchtitan (FSDP2) of 2024-07-11";
        assert!(of(titan, "unfused AdamW") && !of(titan, "torch.compile per block, fused AdamW"));
    }
}
