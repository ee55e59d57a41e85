//! What products of a run are in, by the words of its source.

use crate::published::outcome::verdict::Prediction;
use crate::published::row::case::Training;
use crate::published::row::words::{affirmed, is_fp4, is_narrow, squeezed};
use crate::published::software::release::{Release, release};
use crate::published::software::system::System;
use crate::published::software::table::{Fact, family};
use crate::report::record::Software;
use crate::spec::{Architecture, Dtype, GpuSpec, Origin, Sourced, StackSpec};

/// Precisions that are no whole 32 bits, whatever is beside them in as many: "bf16 (fp32 gradients)".
const HALVES: &[&str] =
    &["bf16", "bfloat16", "fp16", "float16", "half", "fp8", "float8", "mixed", "amp", "autocast", "int8"];

/// What products of 32-bit numbers run in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whole {
    F32,
    /// On tensor cores, which see 19 of the bits.
    Tf32,
}

/// Whether a precision is one of 32 bits, and which.
pub fn is_whole(precision: &str) -> Option<Whole> {
    let text = squeezed(precision).replace("noamp", "").replace("withoutamp", "");
    let denied = ["notf32", "withouttf32", "tf32off", "tf32disabled"].iter().any(|word| text.contains(word));
    let says = |words: &[&str]| words.iter().any(|word| text.contains(word));
    match () {
        () if says(HALVES) || is_narrow(precision) => None,
        () if says(&["tf32", "tensorfloat32"]) && !denied => Some(Whole::Tf32),
        () => (says(&["fp32", "float32", "singleprecision", "fullprecision"]) || text == "f32" || denied)
            .then_some(Whole::F32),
    }
}

/// Whether weights of products in FP8 are gathered as such: where a source says so, and in NVIDIA's recipes, whose scales
/// are of whole tensors (`fp8_params`, github:NVIDIA/NeMo@1dd5fa1
/// nemo/collections/llm/recipes/precision/mixed_precision.py; `fp8_param_gather`, github:NVIDIA-NeMo/Megatron-Bridge@0509780
/// src/megatron/bridge/training/mixed_precision.py), which its files for MLPerf set since v5 (`FP8_PARAM_GATHER`,
/// github:Richardyu114/training_results_v6.0@eabf23a, a fork of mlcommons',
/// ASUSTeK/benchmarks/llama31_8b/implementations/nemo/config_common.sh). With scales of blocks they gather in bf16: MXFP8 is
/// made of what was gathered, there, as rows and columns have other blocks (`reuse_grad_buf_for_mxfp8_param_ag`), and the
/// blocks of 128 have it off. In FP4 no weights are gathered.
pub fn gathers_fp8(run: &Training) -> bool {
    let precision = squeezed(&affirmed(&run.precision));
    let words = [&run.system, &run.precision, &run.notes].map(|text| squeezed(&affirmed(text)));
    let system = System::of(&run.system);
    let fp8 = ["fp8", "float8"].iter().any(|word| precision.contains(word)) && !is_fp4(&run.precision);
    let said = ["fp8paramgather", "fp8params", "float8allgather", "fp8allgather", "fsdpfloat8"];
    let blocks = ["mx", "block", "subchannel", "rowwise"].iter().any(|word| precision.contains(word));
    let since = match system.has("mlperf") {
        true => system.says(&["mlperftrainingv5", "mlperftrainingv6"]),
        false => release(&run.system).is_none_or(|release| release >= RECIPES_WITH_FP8),
    };
    let recipes = system.first(|fact| if let Fact::GathersFp8(recipes) = fact { Some(recipes && since) } else { None });
    fp8 && !blocks && (recipes == Some(true) || said.iter().any(|word| words.iter().any(|text| text.contains(word))))
}

/// Whether codes are kept of what norms and activations leave for products: Transformer Engine's modules save what they read as
/// they multiply it, in all of their releases and by all of their recipes (the doc of `strategy/transformer/codes.rs` has where),
/// and Megatron has FP8 by them alone. Torchao's save it as they get it (`Float8Linear`, `matmul_with_hp_or_float8_args`'s
/// `ctx.save_for_backward(input_hp, weight_hp_t, ..)`, github:pytorch/ao torchao/float8/float8_linear.py).
pub fn keeps_codes(run: &Training) -> bool {
    let system = System::of(&run.system);
    let by_modules = family(&run.system) == Software::Megatron || system.has("transformerengine");
    // Lumen puts linear layers of its own in their place.
    is_narrow(&run.precision) && by_modules && !system.has("lumen")
}

/// NeMo 2.0's first container, the first with those recipes; what configurations before it said is not known here.
const RECIPES_WITH_FP8: Release = (24, 7);

/// Products that a source has in FP4 run at the rate of FP4, where the GPU has one; else, in its place, at that of FP8.
pub fn narrowest(run: &Training, gpu: &mut GpuSpec, found: &mut Prediction) {
    if is_narrow(&run.precision) && !gpu.peak.contains_key("fp8") {
        let half = gpu.peak.get("bf16").cloned();
        half.into_iter().for_each(|peak| drop(gpu.peak.insert("fp8".into(), peak)));
        found.why.push(format!("products in {}: at the rate of bf16, as the GPU has no such peak", run.precision));
        return;
    }
    if !is_fp4(&run.precision) {
        return;
    }
    let taken = match gpu.peak.get("fp4").cloned() {
        Some(peak) => {
            gpu.peak.insert("fp8".into(), peak);
            "products in FP4: those of FP8, at the rate of FP4"
        }
        None => "products in FP4: those of FP8, as the GPU has none",
    };
    found.why.push(taken.into());
}

/// What products of FP8 whose scales are of rows reach, over those whose scale is of a whole tensor: the middle of the "90-100 %" of most
/// shapes (github issue pytorch/pytorch#147971, CUTLASS's kernel beside cuBLAS's).
const OF_TENSORWISE: f64 = 0.95;

/// What their casts move, over one that reads two bytes of an element and writes one, counted of torchao@0.11
/// (torchao/float8/float8_ops.py and float8_linear.py): two bytes are read for the largest of a row or a column, two again and one
/// written; and as cuBLAS knows no scales of rows, the results of the backward pass, about as many as what was cast, are read and written
/// once more, in two bytes (github issue pytorch/ao#2184). A scale of a whole tensor is made where the tensor is written.
const ROWS_CAST: f64 = (2.0 + 2.0 + 1.0 + 2.0 + 2.0) / 3.0;

/// Whether operands of products have a scale for each row, as torchao's recipe `rowwise` has them.
fn is_by_row(run: &Training) -> bool {
    let says = |text: &str| ["rowwise", "axiswise"].iter().any(|word| squeezed(text).contains(word));
    is_narrow(&run.precision) && (says(&run.precision) || says(&run.system))
}

/// The stack with the casts, and the GPU with the products, of operands that have a scale for each row. Nothing was fitted.
pub fn by_row(run: &Training, gpu: &mut GpuSpec, stack: StackSpec, found: &mut Prediction) -> StackSpec {
    if !is_by_row(run) {
        return stack;
    }
    let mut ceiling = gpu.gemm.ceiling_of("fp8").clone();
    ceiling.value *= OF_TENSORWISE;
    gpu.gemm.ceiling.insert("fp8".into(), ceiling);
    let mut slower = stack.slower.as_ref().map(|slower| slower.value.clone()).unwrap_or_default();
    slower.insert("cast".into(), ROWS_CAST);
    found.why.push("float8 with scales of rows: casts in passes of their own".into());
    let source = "scales of rows, counted of torchao".into();
    StackSpec { slower: Some(Sourced { value: slower, source, provenance: Origin::Derived }), ..stack }
}

/// The type of weights and products: of 32 bits where the source says so and the GPU has a rate of them. The type of tensor
/// cores that sees 19 of them has half the rate of bf16 since Ampere, and on AMD's MI300 (makers' data sheets: 156 and 312
/// TFLOP/s of an A100, 495 and 989 of an H100); older ones have none, and take 32.
pub fn whole(run: &Training, gpu: &mut GpuSpec, found: &mut Prediction) -> Dtype {
    use Architecture::{Ada, Ampere, Blackwell, Cdna3, Hopper};
    let Some(kind) = is_whole(&run.precision) else { return Dtype::Bf16 };
    let has = matches!(gpu.architecture, Ampere | Ada | Hopper | Blackwell | Cdna3);
    if let (Whole::Tf32, true, Some(mut half)) = (kind, has, gpu.peak.get("bf16").cloned()) {
        half.value = half.value * 0.5;
        gpu.peak.insert("f32".into(), half);
        found.why.push("products in TF32: at half the rate of bf16; what is in memory is in fp32".into());
        return Dtype::F32;
    }
    if !gpu.peak.contains_key("f32") {
        found.why.push(format!("products in {}: at the rate of bf16, as the GPU has no such peak", run.precision));
        return Dtype::Bf16;
    }
    found.why.push("products and attention in fp32: at that rate, what is reached of it as of bf16".into());
    Dtype::F32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::Shipped;
    use crate::published::prediction::training::predict;

    #[test]
    fn whole_precisions_by_their_words() {
        for (words, whole) in [
            ("FP32", Some(Whole::F32)),
            ("single precision", Some(Whole::F32)),
            ("fp32 (no TF32)", Some(Whole::F32)),
            ("TF32 (A100 default)", Some(Whole::Tf32)),
            ("fp32 via TF32", Some(Whole::Tf32)),
            ("fp32, no AMP", Some(Whole::F32)),
            ("bf16 (fp32 grad accumulation)", None),
            ("bf16-mixed, fp32 weights", None),
            ("", None),
        ] {
            assert_eq!(is_whole(words), whole, "{words}");
        }
    }

    #[test]
    fn who_gathers_weights_in_fp8() {
        let of = |system: &str, precision: &str, notes: &str| {
            let [system, precision, notes] = [system, precision, notes].map(String::from);
            gathers_fp8(&Training { system, precision, notes, ..Training::default() })
        };
        assert!(of("NeMo 24.12", "FP8", "") && of("NeMo/Megatron-Bridge 26.02", "FP8-CS", ""));
        assert!(of("NeMo of NGC 25.09 (HPE, MLPerf Training v5.1)", "FP8", ""));
        assert!(of("torchtitan", "float8 tensorwise", "with float8 all-gather"));
        assert!(of("torchtitan (FSDP2, float8 all-gather)", "float8", ""));
        assert!(of("Megatron-LM", "FP8 (delayed scaling)", "--fp8-param-gather"));
        // Other scales, other makers, earlier containers, and what is said not to.
        for (system, precision, notes) in [
            ("NeMo/Megatron-Bridge 26.02", "MXFP8", ""),
            ("NeMo/Megatron-Bridge 26.02", "FP8 blockwise", ""),
            ("NeMo/Megatron-Bridge 26.02", "NVFP4", ""),
            ("NeMo 24.12", "bf16", ""),
            ("NeMo 24.05", "FP8", ""),
            ("NeMo (MLPerf Training v3.1)", "FP8", ""),
            ("Megatron-LM (NeMo 26.04)", "FP8 tensorwise", ""),
            ("NeMo AutoModel (PyTorch FSDP2)", "FP8", ""),
            ("Megatron-LM", "FP8", ""),
            ("torchtitan", "float8 rowwise", "float8 all-gather"),
            ("torchtitan", "float8", "without float8 all-gather"),
        ] {
            assert!(!of(system, precision, notes), "{system}, {precision}, {notes}");
        }
    }

    #[test]
    fn who_keeps_codes() {
        let of = |system: &str, precision: &str| {
            keeps_codes(&Training { system: system.into(), precision: precision.into(), ..Training::default() })
        };
        for system in
            ["NeMo 24.03.01", "Megatron-Bridge (NeMo 26.04)", "Megatron-LM", "PyTorch FSDP + Transformer Engine"]
        {
            assert!(of(system, "FP8") && of(system, "MXFP8") && !of(system, "bf16"), "{system}");
        }
        for system in ["torchtitan (FSDP2 + torch.compile)", "nanochat", "MaxText (JAX)", "Megatron-LM with Lumen"] {
            assert!(!of(system, "FP8"), "{system}");
        }
    }

    /// Measured pairs of torchtitan on H100, of which nothing was fitted: rows cost 8 to 34 % of what a scale of the tensor has.
    #[test]
    fn scales_of_rows_cost_their_casts() {
        let shipped = Shipped::new().unwrap();
        let rate = |precision: &str, system: &str| {
            let (model, gpu) = ("Llama-3 8B".into(), "H100-SXM-80GB".into());
            let sizes = Training { gpus: Some(8), seq: Some(8192), global_batch: Some(8), ..Training::default() };
            let (precision, system, zero) = (precision.into(), system.into(), "FSDP".into());
            let rates = Training { tokens_per_s_per_gpu: Some(7000.0), ..sizes };
            let found = predict(&Training { model, gpu, precision, system, zero, ..rates }, &shipped);
            (found.predicted.unwrap(), found.why.iter().any(|why| why.contains("scales of rows")))
        };
        let titan = "torchtitan (FSDP2 + torch.compile)";
        let [bf16, tensors, rows] =
            ["bf16", "float8 tensorwise", "float8 rowwise"].map(|precision| rate(precision, titan));
        assert!(rows.1 && !tensors.1 && rows.0 / tensors.0 < 0.93 && rows.0 > bf16.0, "{rows:?} {tensors:?} {bf16:?}");
        let system = "torchtitan (FSDP2 + torch.compile, fp8-rowwise)";
        assert_eq!(rate("fp8", system), rows);
        assert_eq!(rate("bf16", system), bf16);
    }

    /// A rate above the GPU's peak is none.
    #[test]
    fn whole_numbers_run_at_their_own_rate() {
        let shipped = Shipped::new().unwrap();
        let rate = |gpu: &str, precision: &str| {
            let (model, gpu, precision) = ("GPT-2 1.5B".into(), gpu.into(), precision.into());
            let sizes = Training { gpus: Some(8), seq: Some(1024), global_batch: Some(64), ..Training::default() };
            let run = Training { model, gpu, precision, tflops_per_gpu: Some(10.0), ..sizes };
            let found = predict(&run, &shipped);
            found.predicted.unwrap_or_else(|| panic!("{:?}", found.why))
        };
        for (gpu, peak, tensor) in [("A100-SXM-80GB", 19.5, 156.0), ("V100-SXM2-32GB", 15.7, 15.7)] {
            let [bf16, tf32, f32] = ["fp16", "TF32", "fp32"].map(|precision| rate(gpu, precision));
            assert!(f32 < peak && tf32 < tensor && f32 <= tf32 && tf32 < bf16, "{gpu}: {bf16} {tf32} {f32}");
        }
    }
}
