//! Which runs add up and send their gradients in 16 bits, or train in nothing wider, and which sum them whole on every rank,
//! by what their sources and their systems' defaults say.

use crate::published::row::case::Training;
use crate::published::row::words::{affirmed, squeezed, tokens};
use crate::published::software::era::precedes_flash;
use crate::published::software::system::System;
use crate::published::software::table::{Fact, Grads};

/// Whether weights, gradients and the optimizer's moments are all of 16 bits, with no copy of the weights in fp32: said of a
/// run, as fine-tuning on one GPU has it.
pub fn is_pure_bf16(run: &Training) -> bool {
    let text = squeezed(&affirmed(&format!("{}; {}; {}", run.system, run.precision, run.notes)));
    let says = ["statesinbf16", "bothmomentsinbf16", "purebf16", "bf16true", "adamwbf16"];
    let listed = ["weights;gradientsandmomentsinbf16", "parametersandsogradientsandmomentsinbf16"];
    says.iter().chain(&listed).any(|word| text.contains(word))
}

/// Whether matrices are stated to be updated by Muon.
pub fn is_muon(run: &Training) -> bool {
    [&run.system, &run.notes].iter().any(|text| tokens(&affirmed(text)).iter().any(|word| word.contains("muon")))
}

/// Whether gradients of a run take 16 bits; `zero` is its stage of sharding.
pub fn are_halved(run: &Training, zero: u32) -> bool {
    let [system, precision] = [&run.system, &run.precision].map(|text| squeezed(text));
    let notes = squeezed(&affirmed(&run.notes));
    let said = |words: &[&str]| words.iter().any(|word| [&system, &precision, &notes].iter().any(|t| t.contains(word)));
    if said(&["fp32grad", "gradreduceinfp32", "gradsinfp32"]) {
        return false;
    }
    if is_pure_bf16(run) || said(&["gradreduceinbf16", "reducedtype=bf16", "bf16gradreduce"]) {
        return true;
    }
    let as_weights = precision.contains("fp16") && !precision.contains("bf16");
    let pipelines = run.pp.is_some_and(|pp| pp > 1);
    // The library's own recipes add up in fp32 (`bf16_mixed`, nemo/collections/llm/recipes/precision/mixed_precision.py).
    let by_recipe = system.contains("megatronbridge") && tokens(&run.system).iter().any(|word| word == "recipe");
    match System::of(&run.system).first(|fact| if let Fact::Gradients(of) = fact { Some(of) } else { None }) {
        _ if by_recipe => false,
        None | Some(Grads::Wide) => false,
        Some(Grads::Halved) => !precedes_flash(&run.system),
        Some(Grads::AsFp16) => as_weights,
        Some(Grads::AsWeights) => as_weights || zero > 0 && !pipelines,
    }
}

/// Whether every rank has the sums whole, the optimizer's states alone being shared out: DeepSpeed's engine of pipelines does
/// so with bf16 weights (`_bf16_reduce_grads`, deepspeed/runtime/pipe/engine.py), and with fp16 as long as `contiguous_gradients` was
/// off by default (github:microsoft/DeepSpeed@02a63e4 deepspeed/runtime/zero/constants.py). GPT-NeoX's recipes set it
/// (configs/20B.yml).
pub fn are_summed_whole(run: &Training, pp: u32, zero: u32) -> bool {
    let [system, precision] = [&run.system, &run.precision].map(|text| squeezed(text));
    let sets = system.contains("neox") && !precision.contains("bf16");
    pp > 1 && zero == 1 && system.contains("deepspeed") && !sets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_in_pipelines_of_deepspeed() {
        let of = |system: &str, pp, zero| {
            are_summed_whole(&Training { system: system.into(), ..Training::default() }, pp, zero)
        };
        assert!(of("Megatron-DeepSpeed (BigScience)", 12, 1) && !of("Megatron-DeepSpeed", 12, 0));
        assert!(!of("Megatron-DeepSpeed", 1, 1) && !of("Megatron-LM", 12, 1) && !of("GPT-NeoX (DeepSpeed)", 4, 1));
    }

    #[test]
    fn nothing_wider_where_it_is_said() {
        let of = |precision: &str| is_pure_bf16(&Training { precision: precision.into(), ..Training::default() });
        assert!(of("bf16 (weights, gradients and moments in bf16)") && of("pure bf16"));
        assert!(of("bf16 (parameters and so gradients and moments in bf16 too: training.dtype)"));
        // A copy of the weights in fp32 beside these.
        assert!(!of("bf16 (gradients and moments in bf16)") && !of("bf16"));
    }

    #[test]
    fn muon_where_it_is_said() {
        let of = |system: &str, notes: &str| {
            is_muon(&Training { system: system.into(), notes: notes.into(), ..Training::default() })
        };
        assert!(of("Levanter (JAX), FSDP, MuonH optimizer", "") && of("Megatron-LM", "trained with Muon (Moonlight)"));
        assert!(!of("Megatron-LM", "AdamW, no Muon") && !of("Megatron-LM", "optimizer not stated"));
    }

    #[test]
    fn by_system_and_precision() {
        let of = |system: &str, precision: &str, pp: u32, zero: u32| {
            let (system, precision) = (system.into(), precision.into());
            are_halved(&Training { system, precision, pp: Some(pp), ..Training::default() }, zero)
        };
        assert!(of("NeMo/Megatron-Bridge 26.02", "MXFP8", 4, 1) && of("NeMo 24.12", "BF16", 1, 1));
        assert!(!of("NeMo AutoModel (PyTorch FSDP2)", "BF16", 1, 3) && !of("torchtitan (FSDP)", "bf16", 1, 3));
        assert!(of("HF+DeepSpeed ZeRO-3", "bf16", 1, 3) && !of("Megatron-DeepSpeed", "bf16", 8, 1));
        assert!(!of("Megatron-LM (Nemotron-4)", "bf16", 8, 1) && !of("Megatron-LM / NeMo", "bf16", 8, 1));
        assert!(!of("NeMo 23.05", "BF16", 1, 1) && !of("Megatron-LM", "bf16 (fp32 grad accum)", 8, 1));
        assert!(of("Megatron-LM, --grad-reduce-in-bf16", "bf16", 8, 1));
        // Of fp16 weights, but not where autocast leaves these in fp32.
        assert!(of("Megatron-DeepSpeed (BigScience)", "fp16", 12, 1) && of("Megatron-LM PTD-P", "fp16 mixed", 8, 0));
        assert!(!of("OneFlow GPT (Megatron's blocks)", "fp16", 1, 0));
        assert!(!of("Hugging Face Trainer", "fp16", 1, 0) && !of("Megatron-LM SP", "bf16/fp16", 1, 0));
        assert!(!of("Megatron-LM", "fp16 (fp32 grad accum)", 8, 0));
    }
}
