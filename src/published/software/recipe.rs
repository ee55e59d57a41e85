//! Public recipes of training systems, by system, model and GPU: what a run does where its source says nothing.
//!
//! Those of Megatron-Bridge are github:NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs, 2025-11 to 2026-08; those of
//! Primus are github:AMD-AGI/Primus@05b350b examples/megatron/configs.

use super::era::{MIDDLE, released};
use super::release::Release;
use super::system::{NEMO, System};
use super::table::Fact;
use crate::published::row::case::Training;
use crate::published::row::words::{affirmed, is_narrow, squeezed, told};
use crate::spec::stack::{CLAMPED_EXPERTS, CLAMPED_EXPERTS_AGAIN};
use crate::spec::{Origin, Sourced, StackSpec};
use crate::units::Seconds;
use std::collections::BTreeMap;

/// What a recipe does with rows of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Recipe {
    model: &'static str,
    gpu: &'static str,
    since: Release,
    /// Who carries rows, and whether they travel beside another microbatch (`moe_a2a_overlap`).
    pub words: &'static [&'static str],
    pub issue: Issue,
}

/// How the CPU issues a layer of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Issue {
    /// Module by module.
    Eager,
    /// Attention, router and what precedes a dispatch are CUDA graphs (`cuda_graph_scope`).
    Graphs,
    /// So is the whole iteration (`full_iteration`), and a kernel takes all experts (`cutedsl_fused_grouped_mlp`).
    Whole,
}

use Issue::{Eager, Graphs, Whole};

pub const BESIDE: &str = "overlap-exchange";
const HYBRID: &[&str] = &["dispatch-hybrid-ep"];
const HYBRID_AGAIN: &[&str] = &["dispatch-hybrid-ep", "recompute-moe"];
const HYBRID_BESIDE: &[&str] = &["dispatch-hybrid-ep", BESIDE];

const fn recipe(
    model: &'static str,
    gpu: &'static str,
    since: Release,
    words: &'static [&'static str],
    issue: Issue,
) -> Recipe {
    Recipe { model, gpu, since, words, issue }
}

/// The first line that fits.
const BRIDGE: &[Recipe] = &[
    // In one domain of NVLink GPT-OSS has Megatron's own all-to-all, too, except in the newest recipes.
    recipe("gptoss", "gb", (26, 6), HYBRID_BESIDE, Whole),
    recipe("gptoss", "b300", (26, 6), &[], Whole),
    recipe("gptoss", "gb300", EVER, &[], Graphs),
    recipe("gptoss", "b300", EVER, &[], Graphs),
    recipe("gptoss", "", EVER, &[], Eager),
    recipe("qwen3", "gb", (26, 6), HYBRID_BESIDE, Whole),
    recipe("qwen3", "b300", (26, 6), HYBRID_BESIDE, Whole),
    recipe("qwen3235b", "h100", EVER, &[BESIDE], Eager),
    recipe("qwen3235b", "b200", EVER, &[], Eager),
    recipe("qwen3235b", "b300", EVER, &[], Eager),
    recipe("qwen330b", "b200", (26, 4), HYBRID, Graphs),
    recipe("deepseekv3", "gb", (26, 6), HYBRID_BESIDE, Whole),
    recipe("deepseekv3", "b300", (26, 6), HYBRID, Whole),
    // It runs layers of experts again (`recompute_modules` moe: @06e8da4 nemotronh/nemotron_3_workload_base_configs.py).
    recipe("nemotron3nano", "h100", EVER, HYBRID_AGAIN, Graphs),
    // What a layer of one mixer takes the CPU is not known: the stack's own time stands.
    recipe("nemotron", "", EVER, HYBRID, Graphs),
    recipe("", "gb", HYBRID_SINCE, HYBRID, Graphs),
    recipe("", "b300", HYBRID_SINCE, HYBRID, Graphs),
    recipe("", "", HYBRID_SINCE, HYBRID, Eager),
    // Before it, DeepEP, which needs InfiniBand's own kernels, for DeepSeek on Hopper alone (NeMo's scripts/performance/llm of
    // 2025, as remembered, not looked up), and Megatron's all-to-all.
    recipe("deepseekv3", "h100", EVER, &["dispatch-deepep-v1-normal"], Eager),
    recipe("", "gb", EVER, &[], Graphs),
    recipe("", "", EVER, &[], Eager),
];

/// From here on the library's recipes have Transformer Engine's loss (`cross_entropy_fusion_impl` te, the same repository @0cabbd5
/// src/megatron/bridge/recipes/qwen/h100/qwen3.py of 2026; the month is a guess).
pub const LIBRARY_OF_2026: Release = (26, 1);

/// Megatron Core has Hybrid-EP since its release 0.15, of November 2025.
const HYBRID_SINCE: Release = (25, 11);

/// Of every release; NeMo's own recipes, which are older than those of Megatron-Bridge, where none is named.
const EVER: Release = (0, 0);

/// Megatron Core on H100 has DeepEP, which its recipes of H100 are tuned with (github:yanring/Megatron-MoE-ModelZoo@e865051
/// best_practice/Qwen3/readme.md).
const CORE_H100: Recipe = recipe("", "h100", EVER, &["dispatch-deepep-v1-normal", BESIDE], Eager);

/// Megatron-LM, or its core, by itself.
const PLAIN: [&str; 2] = ["megatronlm", "megatroncore"];

/// Its flags as they are where nobody sets them.
const LM: Recipe = recipe("", "", EVER, &[], Eager);

/// The recipe of a run of Megatron-Bridge, NeMo or Megatron Core.
pub fn of(run: &Training) -> Option<&'static Recipe> {
    let system = System::of(&run.system);
    let release = match () {
        () if system.is_bridge() || system.has(NEMO) => released(run).unwrap_or(EVER),
        () if is_core(&system.text) => MIDDLE,
        () if run.experts.is_some() && system.says(&PLAIN) => return Some(&LM),
        () => return None,
    };
    let (model, gpu) = (squeezed(&run.model), squeezed(&run.gpu));
    if is_core_h100(run) {
        return Some(&CORE_H100);
    }
    let fits = |line: &&Recipe| model.contains(line.model) && gpu.starts_with(line.gpu) && release >= line.since;
    BRIDGE.iter().find(fits)
}

/// Megatron Core's own figures of mixtures.
fn is_core(system: &str) -> bool {
    system.contains("megatroncoremoe")
}

/// Its figures on H100, by a recipe of their own.
fn is_core_h100(run: &Training) -> bool {
    is_core(&squeezed(&run.system)) && squeezed(&run.gpu).starts_with(CORE_H100.gpu)
}

/// CPU time of an op of a plan in eager Megatron. In FP8 with sixteen experts on a rank: what one sequence at a time of Qwen3-30B takes on
/// B200, 28.19 s for 64 microbatches of 48 layers and 42 ops (Megatron-Bridge 25.11), where no GPU limits it; in bf16 without
/// experts: see [`CHUNKED_DENSE`].
const EAGER_FP8: f64 = 217e-6;
pub const EAGER_BF16: f64 = 100e-6;

/// In bf16 with experts: a linear layer in FP8 takes more than twice the CPU time of one in bf16 (github issue
/// NVIDIA/TransformerEngine#761), and 12 of the 42 ops are products of such layers. Nothing was fitted on runs in bf16.
const EAGER_BF16_EXPERTS: f64 = EAGER_FP8 / 1.3;

/// What FP8 takes the CPU longer of a layer and microbatch: its four linear modules as much as those of a dense layer of 29 ops, and each
/// further expert of a rank, as Transformer Engine quantizes and multiplies the rows of one after the other (`split_quantize` and the
/// products of GroupedLinear): 43 us, of four quantized tensors and six products, is what that run of sixteen leaves for it. Qwen3-30B on
/// GB300, of which nothing was fitted, took 1.52 to 1.59 times as long in FP8 as in bf16 with 32 experts on a rank (lot 15); by this 1.4.
const MODULES_IN_FP8: f64 = 29.0 * EAGER_BF16 * (NARROW_DENSE - 1.0);
const EXPERT_IN_FP8: f64 = (OPS_OF_EXPERTS * (EAGER_FP8 - EAGER_BF16_EXPERTS) - MODULES_IN_FP8) / 15.0;
/// Ops of such a layer.
const OPS_OF_EXPERTS: f64 = 42.0;

/// What it takes longer where rows of several experts are put in order by PyTorch's operators, one by one
/// (`moe_permute_fusion` and `moe_router_fusion` off, as they are by default): fitted on 14 runs in bf16 that no GPU
/// limits, which take 204 to 364 us an op, 266 in the median (those of lots 6, 7, 12 and 13 with one short sequence at a
/// time: traces/published/README.md). Those by the library's own recipes fuse the order and leave the router as it is
/// (`moe_permute_fusion` true, `moe_router_fusion` false, `cuda_graph_impl` none:
/// github:NVIDIA-NeMo/Megatron-Bridge@04eb4f8 src/megatron/bridge/recipes/qwen/h100/qwen3_moe.py), and take as long: it is
/// not the order's alone.
const UNFUSED_ORDER: f64 = 100e-6;

/// Rows are cut into pieces by expert and by rank: of no more experts than this that takes hardly longer. Known of 8 experts (Mixtral on
/// GH200 and H100 in lots 3 and 5) and of 64 and more; where between them it begins is a guess.
const FEW: u64 = 16;

/// Part of that an op takes where chunks of rows travel beside products: a call of Transformer Engine issues all chunks
/// of a product, and the 47 ops of a layer of Qwen3-235B become 72.
const CHUNKED: f64 = 47.0 / 72.0;

/// Without experts all four products of a layer are cut into chunks: its 41 ops become 89. Without chunks [`EAGER_BF16`] is that
/// of layers without experts, too: one of Qwen3-4B takes 2.9 ms on H200, 3.3 where tensors are cut (h200c-mb1, -tp2 and -tp4 in
/// traces/published/blind_training_9.json), one of GPT in Megatron-LM of 2023 3.5 (models/stack/nccl-unfused.json).
const CHUNKED_DENSE: f64 = 41.0 / 89.0;

/// CPU time of an op in bf16 in the library Megatron-Bridge, without experts: fitted on a layer of Qwen3-8B of 34.5 ops, 4.4 ms a
/// microbatch over eight ranks of tensor parallelism on H100, 4.5 over four (q16-8b-tp8-dp2 and -tp4-dp4 there).
const LIBRARY_DENSE: f64 = 138e-6;

/// In FP8, times that: linear layers are half of a layer's ops, and take twice the CPU time (the same issue).
const NARROW_DENSE: f64 = 1.5;

/// What a layer's second half is to the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    Dense,
    /// So many experts on a rank, whose rows kernels put in order, or single calls of Transformer Engine.
    Experts(u64),
    /// So many whose rows PyTorch's operators put in order.
    Unfused(u64),
}

/// CPU time of an op of a plan in eager Megatron, s: in FP8 or bf16, with chunks beside products or without.
pub fn eager_call(half: Half, narrow: bool, chunked: bool) -> f64 {
    let longer = |local: u64| (MODULES_IN_FP8 + EXPERT_IN_FP8 * local.saturating_sub(1) as f64) / OPS_OF_EXPERTS;
    let in_fp8 = |local: u64| EAGER_BF16_EXPERTS + longer(local);
    let ([in_fp8, in_bf16], in_chunks) = match half {
        Half::Dense => ([EAGER_BF16 * NARROW_DENSE, EAGER_BF16], CHUNKED_DENSE),
        Half::Experts(local) => ([in_fp8(local), EAGER_BF16_EXPERTS], CHUNKED),
        Half::Unfused(local) => ([in_fp8(local), EAGER_BF16_EXPERTS].map(|call| call + UNFUSED_ORDER), CHUNKED),
    };
    (if narrow { in_fp8 } else { in_bf16 }) * if chunked { in_chunks } else { 1.0 }
}

/// Whether a run takes the CPU longer by [`UNFUSED_ORDER`]: recipes of performance ask for fused operators (`moe_router_fusion` True,
/// github:NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs/deepseek and qwen, of whatever dispatcher), and Hybrid-EP's kernels put
/// rows in order themselves. Megatron-LM as it is does neither; recipes of the library Megatron-Bridge fuse the order alone, as do runs that
/// are set up by hand: they carry rows in another way than the recipe of their release, and cut tensors as no recipe does.
fn orders_unfused(run: &Training) -> bool {
    let system = System::of(&run.system);
    let many = run.experts.as_ref().and_then(|e| e.n).is_some_and(|n| n > FEW);
    let plain = system.text.starts_with("megatronlm") && !is_core(&system.text);
    let by_kernels = system.has("hybridep") || system.is(Fact::OwnLayers);
    let by_recipe = system.is_bridge() && !system.is_library() && run.tp.unwrap_or(1) <= MOST_TENSORS;
    many && !by_kernels && (plain || carries_otherwise(run) && !by_recipe || system.is_library())
}

/// Ranks that recipes of Qwen3, DeepSeek-V3 and GPT-OSS cut tensors over at most, see [`LAYOUTS`].
const MOST_TENSORS: u32 = 2;

/// Whether a run names who carries its rows, and recipes of its system's release have another: it is set up by hand.
fn carries_otherwise(run: &Training) -> bool {
    System::of(&run.system).says(&["alltoall", "deepep"]) && !is_core_h100(run)
}

/// Systems whose layers are modules of Megatron Core around Transformer Engine's.
const MODULES: [&str; 4] = [NEMO, "megatronbridge", "megatroncore", "megatronlm"];

/// CPU time of an op where layers without experts are issued module by module. Runs for MLPerf and, in Megatron-Bridge, those
/// on Blackwell are CUDA graphs unless a source says otherwise.
fn eager_dense(run: &Training, stack: &StackSpec, chunked: bool) -> Option<f64> {
    let (system, gpu) = (System::of(&run.system), squeezed(&run.gpu));
    let modules = stack.name == "nccl-cudnn" && system.says(&MODULES);
    let graphs = system.says(&["mlperf", "cudagraph"]) || system.is(Fact::OwnLayers);
    let blackwell = ["b200", "b300", "gb200", "gb300"].iter().any(|word| gpu.contains(word));
    let is_graph = issued(run).map_or(graphs || blackwell, |issue| issue != Eager);
    if run.experts.is_some() || !modules || is_graph {
        return None;
    }
    let slower = if system.is_library() { LIBRARY_DENSE / EAGER_BF16 } else { 1.0 };
    Some(eager_call(Half::Dense, is_narrow(&run.precision), chunked) * slower)
}

/// CPU time of an op of a plan where tensors that are cut are PyTorch's DTensors and nothing compiles them: every operator
/// is dispatched in Python. A layer of Llama-3.1 takes 18 ms a step where no GPU limits it, in the 8B as in the 70B, tensors
/// cut over eight H200 and one sequence at a time (886 and 358 tokens/s a GPU, nebius-8b-tp8 and nebius-70b-tp8 in
/// traces/published/blind_training_5.json): 57 ops.
const DISPATCHED: f64 = 316e-6;

/// Whether tensor parallelism is that of PyTorch, operator by operator.
fn is_dispatched(run: &Training) -> bool {
    let system = System::of(&run.system);
    run.tp.is_some_and(|tp| tp > 1) && system.has("torchtitan") && !system.has("compile")
}

/// The stack as a run's recipe has it. `chunked`: tensor parallelism sends chunks beside products; `local`: experts on a rank.
pub fn stack(run: &Training, stack: &StackSpec, chunked: bool, local: u64) -> StackSpec {
    let mut stack = stack.clone();
    // With a capacity MaxText multiplies by masks of who goes where, and gathers no rows (`capacity_factor`).
    if stack.name == "tpu" && squeezed(&affirmed(&run.notes)).contains("tokensdropped") {
        stack.unfused = None;
    }
    let system = System::of(&run.system);
    if system.is(Fact::IndexedExperts) {
        stack.group_start = None;
    }
    if is_dispatched(run) {
        let source = "operators on DTensors, one by one".into();
        stack = stack.issuing(Sourced { value: Seconds::new(DISPATCHED), source, provenance: Origin::Derived });
    }
    if let Some(call) = eager_dense(run, &stack, chunked) {
        let source = "modules of Megatron and Transformer Engine without CUDA graphs".into();
        stack = stack.issuing(Sourced { value: Seconds::new(call), source, provenance: Origin::Derived });
    }
    let Some(recipe) = of(run).filter(|_| run.experts.is_some()) else { return stack };
    let is_auto = system.is(Fact::OwnLayers);
    // CUDA graphs come with the recipes of performance, and are not for dispatchers whose counts the CPU waits for.
    let by_hand = carries_otherwise(run) && !is_auto;
    let issue = issued(run).unwrap_or(if by_hand { Issue::Eager } else { recipe.issue });
    match issue {
        Issue::Eager => {
            let half = if orders_unfused(run) { Half::Unfused(local) } else { Half::Experts(local) };
            let value = Seconds::new(eager_call(half, is_narrow(&run.precision), chunked));
            let source = "modules of Megatron and Transformer Engine without CUDA graphs".into();
            stack = stack.issuing(Sourced { value, source, provenance: Origin::Derived });
        }
        Issue::Graphs => {}
        Issue::Whole => stack.group_start = None,
    }
    if is_fused(run) {
        stack.group_start = None;
    }
    // One call of grouped_gemm for all experts of a rank, in bf16 (`experts: gmm`, github:NVIDIA-NeMo/Automodel@e344133
    // examples/benchmark/configs).
    if is_auto {
        stack.group_start = None;
    }
    if let Some(moved) = biased(run).filter(|_| issue != Issue::Whole && !is_auto && !is_fused(run)) {
        let source = "experts with biases and a clamp, around the fused kernel of Megatron Core's GroupedMLP".into();
        stack.unfused = Some(Sourced { value: moved, source, provenance: Origin::Derived });
    }
    stack
}

/// Whether a source says that one kernel takes the products of all experts with what stands between them
/// (`cutedsl_fused_grouped_mlp`).
fn is_fused(run: &Training) -> bool {
    [&run.system, &run.notes].iter().any(|text| squeezed(&affirmed(text)).contains("fusedgroupedmlp"))
}

/// How a source says that the CPU issues layers; none: it does not say.
fn issued(run: &Training) -> Option<Issue> {
    let text = format!("{}; {}", run.system, run.notes);
    let [told, affirmed] = [told(&text), affirmed(&text)].map(|text| squeezed(&text));
    let has = |text: &str, words: &[&str]| words.iter().any(|word| text.contains(word));
    let whole =
        &["cudagraphofthefulliteration", "cudagraphsofthefulliteration", "fullcudagraph", "fulliterationcudagraph"];
    let graphs = &["cudagraphs", "withcudagraph"];
    match () {
        () if has(&told, &["nocudagraph", "withoutcudagraph"]) => Some(Eager),
        () if has(&affirmed, whole) => Some(Whole),
        () if has(&affirmed, graphs) => Some(Graphs),
        // "CUDA graphs off".
        () => has(&told, graphs).then_some(Eager),
    }
}

/// Whether chunks of rows travel beside products where tensors are cut: recipes ask for it (`comm_overlap`), but for those of
/// Nemotron 3, which leave it as it is, off (github:NVIDIA-NeMo/Megatron-Bridge@1c92643
/// src/megatron/bridge/recipes/nemotronh/nemotron_3_super.py, and @13d58bb scripts/performance/configs/nemotronh).
pub fn sends_chunks(run: &Training) -> bool {
    !is_bridge(run) || !squeezed(&run.model).contains("nemotron3")
}

fn is_bridge(run: &Training) -> bool {
    System::of(&run.system).is_bridge()
}

/// How often a run goes through a module of multi-token prediction of a hybrid: twice in Megatron-Bridge (`mtp_num_layers` 2
/// with `mtp_use_repeated_layer`, the same recipe). Its figures say so: 84.3 to 84.7 GFLOP a token of Nemotron 3 Super, of
/// which 75 are the model's and 4.9 each pass's.
pub fn passes_ahead(run: &Training, depth: u64) -> u64 {
    let twice = is_bridge(run) && squeezed(&run.model).contains("nemotron3");
    if twice { depth.max(2) } else { depth }
}

/// What GPT-OSS's experts move through memory in Megatron Core, see [`CLAMPED_EXPERTS`]. Recipes of GPUs of less memory make
/// the gate again in the backward pass, and the norms, 4 of 10 (`recompute_modules` layernorm and moe_act:
/// github:NVIDIA-NeMo/Megatron-Bridge@07eea52 scripts/performance/configs/gpt_oss).
fn biased(run: &Training) -> Option<BTreeMap<String, f64>> {
    let (model, gpu) = (squeezed(&run.model), squeezed(&run.gpu));
    let again = ["h100", "b200", "gb200"].iter().any(|less| gpu.starts_with(less));
    let mut moved: BTreeMap<String, f64> = CLAMPED_EXPERTS.map(|(kernel, times)| (kernel.to_string(), times)).into();
    if again {
        moved.insert("expert_swiglu_bwd".into(), CLAMPED_EXPERTS_AGAIN);
        moved.insert("norm_bwd".into(), 1.4);
    }
    model.contains("gptoss").then_some(moved)
}

/// How a recipe cuts a model over GPUs, and what it gives them.
struct Layout {
    model: &'static str,
    gpu: &'static str,
    /// tp, pp, vp, ep.
    degrees: [u32; 4],
    /// Sequences at a time, and of a step.
    batch: [u64; 2],
}

const fn layout(model: &'static str, gpu: &'static str, degrees: [u32; 4], batch: [u64; 2]) -> Layout {
    Layout { model, gpu, degrees, batch }
}

/// Megatron-Bridge's, of 2026-02 to 2026-03.
const LAYOUTS: &[Layout] = &[
    layout("deepseekv3", "h100", [2, 8, 4, 64], [1, 8192]),
    layout("deepseekv3", "gb200", [1, 4, 4, 64], [1, 4096]),
    layout("deepseekv3", "gb300", [1, 2, 8, 32], [2, 4096]),
    layout("qwen3235b", "h100", [2, 8, 4, 32], [1, 8192]),
    layout("qwen3235b", "gb200", [1, 8, 3, 32], [1, 8192]),
    layout("qwen3235b", "gb300", [1, 4, 12, 32], [2, 8192]),
];

/// Primus's of Qwen3-235B on a few nodes: sequences at a time, and of a step for each GPU
/// (github:Xiaoming-AMD/Training-Benchmark@fa60ae7 scripts/MI355/perf_test_qwen3_235b_a22b.sh; with more at a time, schedules
/// that put gradients of weights off would not fit: what these need, recomputation cannot free).
const PRIMUS: [u64; 2] = [1, 32];

/// The run with what its system's recipe has where its source leaves it out: all degrees and the batch where it states
/// none of them, the batch alone where it states degrees.
pub fn filled_in(mut run: Training) -> Training {
    let (system, model, gpu) = (squeezed(&run.system), squeezed(&run.model), squeezed(&run.gpu));
    let unstated = [run.tp, run.pp, run.vp, run.ep, run.cp].iter().all(Option::is_none);
    let no_batch = run.micro_batch.is_none() && run.global_batch.is_none();
    let fits = |line: &&Layout| model.contains(line.model) && gpu.starts_with(line.gpu);
    if let Some(line) = LAYOUTS.iter().find(fits).filter(|_| is_core(&system) && unstated && no_batch) {
        let [tp, pp, vp, ep] = line.degrees;
        (run.tp, run.pp, run.vp, run.ep) = (Some(tp), Some(pp), Some(vp), Some(ep));
        (run.micro_batch, run.global_batch) = (Some(line.batch[0]), Some(line.batch[1]));
    }
    if System::of(&run.system).is_library() && model.contains("qwen3") {
        // Dense ones cut tensors without sequences, large ones of 2025 recompute (github:NVIDIA-NeMo/Megatron-Bridge@3594df9
        // src/megatron/bridge/recipes/qwen).
        run.seq_parallel = run.seq_parallel.or(run.experts.is_none().then_some(false));
        let large = ["qwen332b", "qwen330b"].iter().any(|name| model.contains(name));
        if large && run.recompute.is_empty() && released(&run).is_some_and(|release| release < LIBRARY_OF_2026) {
            run.recompute = "full".into();
        }
    }
    // Interleaved, a rank has two stages (`stages_per_rank`, github:pytorch/torchtitan torchtitan/distributed/pipeline_parallel.py).
    let interleaved = system.contains("torchtitan") && system.contains("interleaved");
    run.vp = run.vp.or((interleaved && run.pp.is_some_and(|pp| pp > 1)).then_some(2));
    // As many microbatches as stages (torchtitan's `pipeline_parallel_microbatches`).
    if system.contains("torchtitan") && run.micro_batch.is_none() {
        let stages = run.pp.filter(|pp| *pp > 1).map(|pp| u64::from(pp * run.vp.unwrap_or(1)));
        let local = run.global_batch.zip(run.dp).map(|(batch, dp)| batch / u64::from(dp));
        run.micro_batch = local.zip(stages).map(|(local, stages)| (local / stages).max(1));
    }
    if system.contains("primus") && model.contains("qwen3235b") && no_batch {
        run.micro_batch = Some(PRIMUS[0]);
        run.global_batch = run.gpus.map(|gpus| PRIMUS[1] * u64::from(gpus));
    }
    run
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::row::case::Experts;

    fn run(system: &str, model: &str, gpu: &str, precision: &str) -> Training {
        let experts = Some(Experts::default());
        let [system, model, gpu, precision] = [system, model, gpu, precision].map(String::from);
        Training { system, model, gpu, precision, experts, ..Training::default() }
    }

    #[test]
    fn the_shipped_stacks_without_graphs_are_those_of_the_recipes() {
        for (name, half) in [("megatron-eager", Half::Dense), ("megatron-eager-experts", Half::Experts(16))] {
            let shipped = StackSpec::find(name).unwrap().host_launch.value.value();
            assert!((shipped / eager_call(half, false, false) - 1.0).abs() < 1e-3, "{name}: {shipped}");
        }
    }

    #[test]
    fn rows_are_put_in_order_by_kernels_where_somebody_asks_for_them() {
        let cut = |system: &str, gpu: &str, experts: u64, tp: u32| {
            let run = run(system, "Qwen3-30B-A3B", gpu, "bf16");
            let experts = Some(Experts { n: Some(experts), ..Experts::default() });
            orders_unfused(&Training { experts, tp: Some(tp), ..run })
        };
        let of = |system: &str, gpu: &str, experts: u64| cut(system, gpu, experts, 1);
        let own = [
            "Megatron-LM of November 2025, all-to-all dispatcher",
            "Megatron-LM",
            "NeMo/Megatron-Bridge of July 2026, DeepEP",
            "Megatron-Bridge@6799f09 (NeMo 26.06)",
            "Megatron-Bridge 0.1.0rc4 (NeMo 25.09)",
            "Megatron-Core MoE, dispatcher all-to-all",
        ];
        // A recipe of performance fuses whoever carries its rows; what cuts tensors over a node is none.
        let recipe = "NeMo/Megatron-Bridge 26.04, NCCL all-to-all";
        assert!(!cut(recipe, "B200", 128, 1) && cut(recipe, "B200", 128, 8));
        assert!(own.iter().all(|system| of(system, "B200", 128)));
        // Rows of a few experts are not cut into many pieces.
        assert!(own.iter().all(|system| !of(system, "B200", 8)));
        let tuned = [
            "NeMo/Megatron-Bridge 26.04.01",
            "NeMo 25.09",
            "Megatron-Bridge 26.06, HybridEP",
            "NeMo/Megatron-Bridge of July 2026, HybridEP",
            "Megatron-Core MoE, dispatcher DeepEP",
            "MegaScale-MoE (on Megatron-LM)",
            "NeMo AutoModel (PyTorch FSDP2, TE, DeepEP)",
        ];
        assert!(tuned.iter().all(|system| !of(system, "H100", 128)));
    }

    /// Fitted on a run of 16 experts a rank: with 32 it is more, with four less.
    #[test]
    fn what_fp8_takes_the_cpu_grows_with_the_experts_of_a_rank() {
        let over = |local: u64| {
            let call = |narrow| eager_call(Half::Experts(local), narrow, false);
            call(true) / call(false)
        };
        assert!((over(16) - 1.3).abs() < 1e-9 && (1.38..1.6).contains(&over(32)) && (1.2..1.25).contains(&over(4)));
        let added =
            |local: u64| eager_call(Half::Unfused(local), true, false) - eager_call(Half::Unfused(local), false, false);
        assert!(added(32) > added(8) && eager_call(Half::Experts(8), false, false) == EAGER_BF16_EXPERTS);
    }

    #[test]
    fn stacks_by_recipe() {
        let given = StackSpec::find("nccl-cudnn").unwrap();
        let launch = |run: &Training| stack(run, &given, false, 16).host_launch.value.value() * 1e6;
        let bridge = |release: &str| format!("NeMo/Megatron-Bridge {release}");
        let eager = run(&bridge("25.11"), "Qwen3-30B-A3B", "B200", "FP8-MX");
        assert!((launch(&eager) - 217.0).abs() < 1e-9);
        assert!((launch(&run(&bridge("25.11"), "GPT-OSS-120B", "H100-SXM-80GB", "BF16")) - 217.0 / 1.3).abs() < 1e-9);
        let own = Training {
            experts: Some(Experts { n: Some(128), ..Experts::default() }),
            tp: Some(8),
            ..run(&bridge("26.04, NCCL all-to-all"), "Qwen3-30B-A3B", "H100", "bf16")
        };
        assert!((launch(&own) - (217.0 / 1.3 + 100.0)).abs() < 1e-9);
        let moved = |release: &str, gpu: &str| {
            stack(&run(&bridge(release), "GPT-OSS-120B", gpu, "BF16"), &given, false, 16).unfused
        };
        assert_eq!(moved("25.11", "GB300").map(|m| m.value["expert_swiglu_bwd"]), Some(14.8));
        assert_eq!(moved("25.11", "H100-SXM-80GB").map(|m| m.value["expert_swiglu_bwd"]), Some(18.6));
        assert_eq!(moved("26.06", "GB300"), None);
        let chunked = stack(&eager, &given, true, 16).host_launch.value.value() * 1e6;
        assert!((chunked - 217.0 * 47.0 / 72.0).abs() < 1e-9);
        let graphs = stack(&run(&bridge("26.02"), "Qwen3-235B-A22B", "GB300", "MXFP8"), &given, false, 16);
        assert_eq!(graphs, given);
        // A source that says how layers are issued is believed.
        let said = |notes: &str| {
            let newest = run(&bridge("26.06"), "Qwen3-235B-A22B", "GB200", "MXFP8");
            stack(&Training { notes: notes.into(), ..newest }, &given, false, 16)
        };
        assert_eq!([said(""), said("CUDA graph of the full iteration")].map(|s| s.group_start), [None, None]);
        assert_eq!(said("CUDA graphs of attention and router"), given);
        assert_eq!(said("CUDA graphs not stated"), said(""));
        assert_eq!(said("CUDA graphs off"), said("no CUDA graphs"));
        let by_hand = run(&bridge("26.04, NCCL all-to-all"), "DeepSeek-V3", "B300", "bf16");
        assert!(launch(&by_hand) > launch(&run(&bridge("26.04"), "DeepSeek-V3", "B300", "bf16")));
        let eager = said("no CUDA graphs");
        assert!((eager.host_launch.value.value() * 1e6 - 217.0).abs() < 1e-9 && eager.group_start.is_some());
        let whole = stack(&run(&bridge("26.06.01"), "Qwen3-235B-A22B", "GB300", "MXFP8"), &given, false, 16);
        assert_eq!((whole.host_launch, whole.group_start), (given.host_launch.clone(), None));
        let auto = run("NeMo AutoModel (PyTorch FSDP2, TE + DeepEP)", "Qwen3-30B-A3B", "H100-SXM-80GB", "BF16");
        assert_eq!(stack(&auto, &given, false, 16).group_start, None);
        assert_eq!(stack(&run("DeepSeek HAI-LLM (DualPipe)", "DeepSeek-V3", "H800", "FP8"), &given, false, 16), given);
        let dense = |gpu: &str, precision: &str| Training {
            experts: None,
            ..run(&bridge("25.11"), "Llama3-8B", gpu, precision)
        };
        assert_eq!(stack(&dense("GB200", "FP8"), &given, false, 16), given);
        assert!((launch(&dense("H100", "FP8")) / launch(&dense("H100", "BF16")) - NARROW_DENSE).abs() < 1e-9);
        let titan = run("torchtitan (FSDP2 + EP)", "Qwen3-30B-A3B", "B200", "BF16");
        assert_eq!(stack(&titan, &given, false, 16).group_start, None);
        let older = StackSpec::find("nccl-fa1").unwrap();
        assert_eq!(stack(&dense("A100", "BF16"), &older, false, 16), older);
    }

    /// Neither a commit nor the version of a library tells of a release.
    #[test]
    fn recipes_are_those_of_a_release() {
        let since = |system: &str| of(&run(system, "Qwen3-30B-A3B", "GB300", "MXFP8")).map(|recipe| recipe.since);
        for newest in ["Megatron-Bridge (NeMo 26.08)", "Megatron-Bridge (NeMo, July 2026)"] {
            assert_eq!(since(newest), Some((26, 6)), "{newest}");
        }
        for middle in
            ["Megatron-Bridge@79308d0", "Megatron-Bridge 0.4.2 (Core 0.17.1, NeMo 26.04.01)", "Megatron-Core MoE"]
        {
            assert_eq!(since(middle), Some(HYBRID_SINCE), "{middle}");
        }
        assert_eq!([since("Megatron-Bridge 0.1.0rc4 (NeMo 25.09)"), since("NeMo")], [Some(EVER); 2]);
        assert_eq!(of(&run("Megatron-LM (Nemotron-4)", "Nemotron-4", "H100", "bf16")), Some(&LM));
    }

    #[test]
    fn nemotron_3_in_megatron_bridge() {
        let of = |system: &str, model: &str| {
            let run = run(system, model, "GB200", "MXFP8");
            (sends_chunks(&run), passes_ahead(&run, 1))
        };
        assert_eq!(of("NeMo/Megatron-Bridge 26.04", "Nemotron_3_Super"), (false, 2));
        assert_eq!(of("NeMo/Megatron-Bridge 26.04", "Nemotron-4 340B"), (true, 1));
        assert_eq!(of("NeMo AutoModel (PyTorch FSDP2)", "Nemotron 3 Super"), (true, 1));
    }

    #[test]
    fn stages_of_torchtitan_are_two_a_rank_where_they_are_interleaved() {
        let of = |system: &str, pp: u32, micro_batch: Option<u64>| {
            let (system, pp, dp) = (system.into(), Some(pp), Some(8));
            let run = Training { system, pp, dp, micro_batch, global_batch: Some(256), ..Training::default() };
            let filled = filled_in(run);
            (filled.vp, filled.micro_batch)
        };
        let interleaved = "torchtitan (FSDP + TP + PP Interleaved 1F1B)";
        assert_eq!(of(interleaved, 8, Some(1)), (Some(2), Some(1)));
        assert_eq!(of(interleaved, 8, None), (Some(2), Some(2)));
        assert_eq!(of("torchtitan (PP 1F1B)", 8, None), (None, Some(4)));
        assert_eq!(of(interleaved, 1, Some(1)), (None, Some(1)));
        assert_eq!(of("Megatron-LM, interleaved", 8, Some(1)), (None, Some(1)));
    }

    #[test]
    fn layouts_only_where_nothing_is_stated() {
        let core = run("Megatron-Core MoE", "DeepSeek-V3", "GB300", "MXFP8");
        let filled = filled_in(core.clone());
        assert_eq!((filled.tp, filled.pp, filled.vp, filled.ep), (Some(1), Some(2), Some(8), Some(32)));
        assert_eq!((filled.micro_batch, filled.global_batch), (Some(2), Some(4096)));
        let stated = Training { pp: Some(4), ..core };
        assert_eq!(filled_in(stated.clone()), stated);
        let primus =
            Training { pp: Some(4), gpus: Some(32), ..run("Primus-pipeline", "Qwen3-235B-A22B", "MI355X", "bf16") };
        assert_eq!(filled_in(primus).global_batch, Some(1024));
    }
}
