//! Which runs add up and send their gradients in 16 bits, by what their sources and their systems' defaults say.

use super::case::Training;
use super::software::precedes_flash;
use super::words::{squeezed, tokens};

/// Systems that do, unless told otherwise; NeMo as it is since it has FlashAttention (`grad_sync_dtype`), until then it added up
/// in fp32 (`fp32_grad_accum`, as remembered, not looked up).
const HALVED: &[&str] = &[
    // Recipes of Megatron-Bridge and NeMo for figures of performance (`grad_reduce_in_fp32` false:
    // github:NVIDIA-NeMo/Megatron-Bridge@13d58bb scripts/performance/configs/nemotronh/nemotron_3_llm_pretrain.py, and in those of every
    // other family).
    "megatronbridge",
    // `reduce_dtype` is bf16 (github:foundation-model-stack/fms-fsdp@8ec8256 fms_fsdp/policies/mixed_precision.py), as in the
    // post that tells of it.
    "fmsfsdp",
    "fsdp,sdpa",
    // The benchmark's `fsdp_config_mixed_precision` is PURE (github:mosaicml/llm-foundry@12a6319
    // scripts/train/benchmarking/submit_benchmarks.py).
    "llmfoundry",
    "mosaic",
];

/// DeepSpeed's `communication_data_type` is that of the weights (github:microsoft/DeepSpeed deepspeed/runtime/engine.py), and
/// what has it beneath; its engine of pipelines adds up in fp32 where weights are bf16 (BF16_Optimizer).
const ON_DEEPSPEED: &[&str] = &["deepspeed", "alst", "xtuner", "llamafactory", "openrlhf"];

/// Whether gradients of a run take 16 bits; `zero` is its stage of sharding.
pub fn are_halved(run: &Training, zero: u32) -> bool {
    let [system, precision, notes] = [&run.system, &run.precision, &run.notes].map(|text| squeezed(text));
    let says = |words: &[&str]| words.iter().any(|word| system.contains(word));
    let said = |words: &[&str]| words.iter().any(|word| [&system, &precision, &notes].iter().any(|t| t.contains(word)));
    if said(&["fp32grad", "gradreduceinfp32", "gradsinfp32"]) {
        return false;
    }
    if said(&["gradreduceinbf16", "reducedtype=bf16", "bf16gradreduce"]) {
        return true;
    }
    let is_nemo = tokens(&run.system).iter().any(|word| word == "nemo");
    let pipelines = run.pp.is_some_and(|pp| pp > 1);
    match () {
        // It shards by PyTorch's FSDP2.
        _ if system.contains("automodel") => false,
        _ if says(HALVED) || (is_nemo && !system.contains("megatronlm") && !precedes_flash(&run.system)) => true,
        _ => says(ON_DEEPSPEED) && zero > 0 && !pipelines,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    }
}
