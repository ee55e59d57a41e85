//! To which family of software a system belongs, for the record.

use super::system::{NEMO, System};
use crate::report::record::Software;

/// The first line of which a word is in the name of a system.
#[rustfmt::skip]
const FAMILIES: &[(Software, &[&str])] = &[
    (
        Software::Jax,
        &["maxtext", "jax", "paxml", "pax(", "levanter", "axlearn", "torchprime", "pytorch/xla", "meshtransformer"],
    ),
    (Software::Others, &["mindspore"]),
    // On PyTorch's FSDP, whatever stands before it.
    (Software::Torch, &["automodel", "torchtitan", "fmsfsdp", "primerl", "kempnerforge", "ezpz", "openlm"]),
    // Before Megatron and DeepSpeed, which some of them use.
    (
        Software::Trainers,
        &[
            "huggingface", "transformers", "hftrainer", "hf+", "hfaccelerate", "trlsft", "peft", "axolotl", "llamafactory",
            "msswift", "xtuner", "easycontext", "openrlhf", "unsloth", "lightning(", "pytorchlightning", "alpaca",
            "torchtune", "distflashattn",
        ],
    ),
    (
        Software::Deepspeed,
        &["deepspeed", "gptneox", "bigscience", "1f1b,fullactivationcheckpointing,fp16", "ulysses", "alst"],
    ),
    (
        Software::Megatron,
        &[
            "megatron", NEMO, "megascale", "mlperf", "primus", "yuan", "flagscale", "mindspeed", "ptdp", "usp", "yunchang",
            "haillm",
        ],
    ),
    (
        Software::Torch,
        &["fsdp", "pytorch", "torch", "ddp", "olmo", "nanogpt", "nanochat", "llmfoundry", "mosaic", "picotron", "nanotron",
          "litgpt", "tinyllama", "internevo", "metaseq", "scaletorch"],
    ),
];

pub fn family(system: &str) -> Software {
    let system = System::of(system);
    let found = FAMILIES.iter().find(|(_, words)| system.says(words));
    found.map_or(Software::Others, |(family, _)| *family)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_belongs_to_whom() {
        for (system, expected) in [
            ("NeMo/Megatron-Bridge 26.06", Software::Megatron),
            ("Megatron-LM of 2023, 1F1B", Software::Megatron),
            ("Megatron-LM (Nemotron-4)", Software::Megatron),
            ("MegaScale", Software::Megatron),
            ("NeMo AutoModel (PyTorch FSDP2, TE + DeepEP)", Software::Torch),
            ("torchtitan (FSDP + TP, torch.compile)", Software::Torch),
            ("fms-fsdp (PyTorch FSDP, SDPA flash v2)", Software::Torch),
            ("MaxText (JAX 0.4.30)", Software::Jax),
            ("JAX MaxText + Primus-Turbo (DeepEP)", Software::Jax),
            ("torchprime (PyTorch/XLA)", Software::Jax),
            ("Megatron-DeepSpeed (MT-NLG 530B)", Software::Deepspeed),
            ("GPT-NeoX (Megatron-LM + DeepSpeed ZeRO-1)", Software::Deepspeed),
            ("Hugging Face transformers + DeepSpeed", Software::Trainers),
            ("TRL SFTTrainer (Hugging Face Accelerate, PyTorch FSDP2)", Software::Trainers),
            ("llm.c (C/CUDA, cuDNN attention, ZeRO-1)", Software::Others),
            ("", Software::Others),
        ] {
            assert_eq!(family(system), expected, "{system}");
        }
    }
}
