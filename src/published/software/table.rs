//! What is known of each system by its name: the one table that a framework is added to, and what can be said of one.
//!
//! A name often mentions several systems ("GPT-NeoX (Megatron-LM + DeepSpeed ZeRO-1)"), each with its entry. All that they do holds;
//! where entries contradict each other, the first one from above does: what is built on something stands above it. Public recipes, by
//! model and GPU, are in [`recipe`](super::recipe).

use super::habits::{ALL, EARLY, FLASH, FLASH_1, Habits, NEWEST, NOTHING, OTHERWISE, Overlap, TIMED, UNFUSED};
use super::habits::{CORE, TRANSFORMER_ENGINE, fused, habits, in_place, with};
use super::release::Release;
use super::system::{NEMO, System};
use crate::report::record::Software::{self, Deepspeed, Jax, Megatron, Others, Torch, Trainers};
use crate::spec::{Recompute, WideLoss};

/// What a system is or does, unless a run is told to do otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fact {
    /// For the record.
    Family(Software),
    Habit(Habits),
    Gradients(Grads),
    /// Since when what compiles its model compiles its loss, too.
    CompilesLoss(Release),
    /// JAX compiles a whole step, its loss with it.
    Jit,
    /// Norms, rotations and gates are PyTorch's own operators, each a kernel unless something fuses them.
    Operators(bool),
    /// Attention is PyTorch's `scaled_dot_product_attention`.
    Sdpa,
    /// A model is taken as its makers publish it: no vocabulary is filled up to a multiple of 128 rows for each rank of tensor
    /// parallelism, as Megatron-LM does (`make-vocab-size-divisible-by`).
    PublishedVocabulary,
    /// Liger's kernels come with that of output matrix and loss, as in what Liger makes of Hugging Face's models.
    LigerHead,
    /// What the name says of recomputation is not so.
    RecomputesNothing,
    /// Weights are sharded over replicas before tensors or stages are cut, as far as these are at all; or models are cut otherwise.
    Shards,
    Cuts,
    /// Weights are copied out of the buffer that they are gathered in, and gradients into the one that is scattered.
    CopiesShards,
    /// Weights of products in FP8 are gathered as such, see `rank::precision`.
    GathersFp8(bool),
    /// A sequence is shared by heads, by heads within a node, in a ring; long ones only.
    ByHeads,
    ByHeadsInNode,
    InRing,
    LongByHeads,
    LongInRing,
    /// Ranks that share a sequence gather all keys and values before attention.
    GathersKv,
    /// Stages are neighbours and replicas far apart.
    StagesInside,
    /// Pipelines are interleaved where nobody says how finely; or only where somebody does.
    Interleaves,
    StatesInterleaving,
    /// Embedding and head do not take the place of a layer each in a pipeline.
    EndsBesideLayers,
    /// Ranks that experts are spread over.
    ExpertRanks(u32),
    /// PyTorch's operators of indices put rows of experts in order, and all experts of a rank are one kernel (`_grouped_mm`,
    /// github:pytorch/torchtitan torchtitan/models/moe).
    IndexedExperts,
    /// Rows of experts are picked by products with masks where experts have a capacity.
    MasksRows,
    /// Tokens choose experts in a row; or do so where their balance is said to be forced.
    BalancedInTurn,
    ForcedInTurn,
    /// Rows of experts travel beside another microbatch in pipelines that are interleaved, not in plain ones.
    InterleavedExchange,
    /// DeepSeek's own software.
    DeepSeeks,
    /// Layers are its own, not those of Megatron Core.
    OwnLayers,
    /// Half of causal attention is counted as FLOPs; or is so of mixtures.
    CountsHalf,
    CountsHalfOfMixtures,
}
use Fact::*;

/// What gradients are added up and sent in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grads {
    Wide,
    /// In 16 bits.
    Halved,
    /// In fp16 where weights are: Megatron-LM sums in fp32 for bf16 alone unless told to (`accumulate_allreduce_grads_in_fp32`,
    /// megatron/arguments.py).
    AsFp16,
    /// DeepSpeed's `communication_data_type` is that of the weights (github:microsoft/DeepSpeed deepspeed/runtime/engine.py), its fp16
    /// optimizer "grad accumulates in fp16" (github:bigscience-workshop/bigscience@053adaf train/tr11-176B-ml/chronicles-prequel.md,
    /// "Rebalancing layers"), and its engine of pipelines adds up in fp32 where weights are bf16 (BF16_Optimizer).
    AsWeights,
}
use Grads::{AsFp16, AsWeights, Halved, Wide};

impl System {
    /// What is known of the systems that the name mentions, from above.
    fn facts(&self) -> impl Iterator<Item = Fact> {
        SYSTEMS.iter().filter(move |(names, _)| self.says(names)).flat_map(|(_, facts)| facts.iter().copied())
    }

    /// The first fact of a kind.
    pub fn first<T>(&self, of: impl Fn(Fact) -> Option<T>) -> Option<T> {
        self.facts().find_map(of)
    }

    pub fn is(&self, fact: Fact) -> bool {
        self.facts().any(|of| of == fact)
    }
}

pub fn family(system: &str) -> Software {
    System::of(system).first(|fact| if let Family(family) = fact { Some(family) } else { None }).unwrap_or(Others)
}

/// Megatron of 2019 to 2022 on DeepSpeed's engine of pipelines (78 layers on 12 stages are eleven times 7 and 1:
/// github:bigscience-workshop/bigscience@053adaf train/tr11-176B-ml/chronicles-prequel.md, "Re-do"). Its examples of 2023
/// recompute still (github:microsoft/Megatron-DeepSpeed@79b8e22 examples_deepspeed/sequence_parallel,
/// `activation_checkpoint`), as GPT-NeoX's configurations do.
const ON_DEEPSPEED: Habits = Habits { fills_stages: true, recompute: Some(Recompute::Full), ..EARLY };

/// How vTrain's runs of one node are worded (traces/published/training_single_node_a100.json). What their times rule out:
///
/// * that layers are recomputed: one of width 2,048 takes 16.3 ms for 8 sequences of 1,024 whose scores are in memory. Of
///   that scores, elementwise kernels and norms are 6 ms by their bytes, and what is left would take 305 of the A100's 312
///   TFLOP/s; without recomputation it is 205;
/// * that the vocabulary is filled up where nobody shares it: its products run at 90 TFLOP/s there, and at 215 where two
///   ranks do;
/// * that gradients are summed behind the backward pass: 2 replicas of 1.3 billion weights take no less than 8.
const ONE_NODE: &str = "1f1b,fullactivationcheckpointing,fp16";
const ALONE: Habits = Habits { recompute: Some(Recompute::None), overlap: Overlap { grad: true, ..TIMED }, ..EARLY };
/// NeMo's and Megatron Core's recipes: distributed optimizer, sequence parallelism with tensor parallelism.
const RECIPES: Habits =
    fused(Habits { zero: 1, sequence_parallel: true, overlap: CORE, ..habits(TRANSFORMER_ENGINE, 0.0) });
/// What overlaps communication of tensor parallelism by default: NeMo and Megatron-Bridge (`tp_comm_overlap`), and as
/// Megatron Core's README has it for its own figures. Their loss is Transformer Engine's, which takes logits as they are
/// (`cross_entropy_fusion_impl`).
const OVERLAPPED: Habits = Habits { tp_overlap: true, tuned_sends: true, wide_loss: WideLoss::Never, ..RECIPES };
/// On Megatron Core. Its own pipeline wants gradients summed at the end (github:AMD-AGI/Primus@0768bf7
/// docs/tech_blogs/primus_pipeline/primus_pipeline.md).
const PRIMUS: Habits =
    Habits { wide_loss: WideLoss::Never, overlap: Overlap { grad: false, gather: false, ..CORE }, ..RECIPES };
/// Whose communication all goes beside compute, as MegaScale's (arXiv:2402.15627, section 3.2) and its successor's does.
const IN_CHUNKS: Habits =
    fused(Habits { tp_overlap: true, ..with(Overlap { gather: true, ..ALL }, habits(FLASH, 0.0)) });
/// MegaScale's block (section 3.1 there); its window is not printed, half of its sequence is what its MFU says.
const MEGASCALE: Habits = Habits { parallel_block: true, half_window: true, ..IN_CHUNKS };
/// Megatron-LM of 2023, as MegaScale was built on it and is compared with it.
const BASELINE: Habits = fused(with(NOTHING, habits(FLASH_1, 0.0)));
/// FlashAttention 2, and nothing else that is known.
const PLAIN: Habits = habits(FLASH, 0.0);
/// PyTorch's own sharding, with the attention that `scaled_dot_product_attention` chooses.
const TITAN: Habits = Habits { zero: 3, sequence_parallel: true, halves: true, ..PLAIN };

/// When torchtitan began to compile the loss (github pull pytorch/torchtitan#1033 of 2025-03-30): before, blocks alone.
const IN_TITAN: Release = (25, 4);
pub(super) const NEVER: Release = (u32::MAX, 1);
/// Recipes of fine-tuning compute again unless told otherwise (github:pytorch/torchtune recipes/configs,
/// `enable_activation_checkpointing`; github:QwenLM/Qwen finetune, `--gradient_checkpointing`).
const TUNED: Habits = Habits { recompute: Some(Recompute::Full), ..PLAIN };
/// Hugging Face's blocks with FlashAttention 2 under DeepSpeed.
const ON_ZERO_3: Habits = Habits { zero: 3, ..PLAIN };
/// DeepSpeed's, of 2023 and on A100, which comes with its ZeRO 3 (arXiv:2309.14509). Its examples recompute, see `ON_DEEPSPEED`.
const ULYSSES: Habits = Habits { zero: 3, recompute: Some(Recompute::Full), early: true, ..habits(FLASH_1, 0.0) };
/// Of trainers whose loss is FlashAttention's.
const FLASH_LOSS: Habits = Habits { wide_loss: WideLoss::Never, ..habits(FLASH_1, 0.0) };

/// Words that name a system, one of which is in a name as [`System::has`] finds it, and what is known of it.
#[rustfmt::skip]
const SYSTEMS: &[(&[&str], &[Fact])] = &[
    (&[ONE_NODE], &[Family(Deepspeed), Habit(ALONE), PublishedVocabulary, RecomputesNothing]),
    (&["mindspore"], &[Family(Others)]),
    // Its automatic mixed precision keeps weights, and what it adds up, in fp32, whoever's layers it has.
    (&["oneflow"], &[Gradients(Wide)]),
    // On JAX, whatever stands beside it.
    (&["jax", "maxtext", "levanter", "axlearn", "paxml", "pax("], &[Family(Jax), Jit, Shards, LongInRing]),
    (&["torchprime", "pytorch/xla", "meshtransformer"], &[Family(Jax)]),

    // On PyTorch's FSDP, whatever stands before it. Tensor parallelism of torchtitan is in chunks where it is asked for
    // (`enable_async_tensor_parallel`).
    (&["asynctp", "asynctensor"], &[Habit(Habits { tp_overlap: true, ..TITAN })]),
    (&["torchtitan0.0"], &[CompilesLoss(NEVER)]),
    (&["torchtitan"], &[
        Family(Torch), Habit(TITAN), Operators(true), CompilesLoss(IN_TITAN), Sdpa, IndexedExperts, ForcedInTurn,
        CopiesShards, Shards, LongInRing,
    ]),
    // Trained before July 2024, when FlashAttention 3 came (arXiv:2407.08608). Gathers keys and values, and its order of parallelism is
    // TP, CP, PP, DP (arXiv:2407.21783, section 3.3.2).
    (&["llama3stack"], &[Habit(PLAIN), GathersKv, StagesInside, Interleaves]),
    // `reduce_dtype` is bf16 (github:foundation-model-stack/fms-fsdp@8ec8256 fms_fsdp/policies/mixed_precision.py), as in the post that
    // tells of it.
    (&["fmsfsdp"], &[Family(Torch), Habit(PLAIN), Gradients(Halved)]),
    // PyTorch's FSDP where nothing else is told of a system, as the posts of the same have it.
    (&["fsdp,sdpa"], &[Habit(PLAIN), Gradients(Halved)]),
    // Who tells of PyTorch's FSDP alone has its attention, too.
    (&["pytorchfsdp", "torchfsdp"], &[Habit(PLAIN)]),
    (&["tinyllama"], &[Family(Torch), Habit(PLAIN)]),
    // Its loss is PyTorch's unless another is named (`MaskedCrossEntropy`, github:NVIDIA-NeMo/Automodel
    // nemo_automodel/components/loss). Its benchmarks spread experts of GPT-OSS 120B, DeepSeek-V3 and Nemotron 3 Super on H100 over 64
    // ranks, and over all where they are fewer (`ep_size`, @037e04a examples/benchmark/configs and @e344133; those of one node have 8).
    (&["automodel"], &[
        Family(Torch), Habit(Habits { wide_loss: WideLoss::Copied, ..OVERLAPPED }), Operators(false), Gradients(Wide),
        GathersFp8(false), ExpertRanks(64), OwnLayers, BalancedInTurn, CopiesShards,
    ]),
    // Nothing is compiled unless it is told to (github:PrimeIntellect-ai/prime-rl@01468a1 src/prime_rl/trainer/config.py, `compile`).
    (&["primerl"], &[Family(Torch), Operators(true), CopiesShards]),
    (&["kempnerforge", "ezpz", "openlm"], &[Family(Torch)]),
    (&["litgpt"], &[Family(Torch), Shards]),
    (&["olmocore"], &[CopiesShards]),
    // Its loss is beside the model that it compiles.
    (&["olmo("], &[CompilesLoss(NEVER)]),

    // Trainers, before Megatron and DeepSpeed, which some of them use.
    (&["torchtune"], &[Family(Trainers), Habit(TUNED), Operators(true), CopiesShards, Shards]),
    (&["unsloth"], &[Family(Trainers), Habit(TUNED), Operators(false), Shards]),
    (&["trl"], &[Family(Trainers), Habit(TUNED), Operators(true), PublishedVocabulary, Shards, LigerHead]),
    (&["peft"], &[Family(Trainers), Habit(TUNED), PublishedVocabulary]),
    (&["alst"], &[
        Family(Deepspeed), Habit(Habits { zero: 3, ..habits(NEWEST, 0.0) }), Operators(true), Gradients(AsWeights), ByHeads,
        CopiesShards, LigerHead,
    ]),
    // XTuner puts operators of its own into Hugging Face's blocks.
    (&["xtuner"], &[Family(Trainers), Habit(ON_ZERO_3), Gradients(AsWeights), LigerHead]),
    (&["llamafactory"], &[Family(Trainers), Habit(ON_ZERO_3), Operators(true), Gradients(AsWeights), LigerHead]),
    (&["openrlhf"], &[Family(Trainers), Habit(ON_ZERO_3), Operators(true), Gradients(AsWeights)]),
    (&["axolotl"], &[Family(Trainers), Habit(ON_ZERO_3), Operators(true), LigerHead]),
    (&["easycontext"], &[Family(Trainers), Habit(ON_ZERO_3), Operators(true)]),
    (&["huggingface", "transformers", "hf+", "hftrainer", "hfaccelerate"], &[
        Family(Trainers), Operators(true), PublishedVocabulary, Shards, LigerHead,
    ]),
    (&["msswift", "lightning(", "pytorchlightning", "alpaca"], &[Family(Trainers)]),
    (&["swift"], &[Shards, LigerHead]),
    (&["accelerate", "lightning", "verl", "habana", "t5x", "pathways"], &[Shards]),

    // On DeepSpeed, which concatenates the partitions that it gathered (`AllGatherCoalescedHandle.wait`,
    // deepspeed/runtime/zero/partition_parameters.py) and copies gradients into buckets (`contiguous_gradients`).
    (&["deepspeed"], &[Family(Deepspeed), Gradients(AsWeights), CopiesShards, Shards, LongByHeads]),
    // BigScience kept the GPUs from hanging by waiting for every kernel (github:bigscience-workshop/bigscience@053adaf
    // train/tr11-176B-ml/chronicles-prequel.md, "dealing with JZ hanging on the large model").
    (&["bigscience"], &[Family(Deepspeed), Habit(with(Overlap { kernels: false, ..TIMED }, ON_DEEPSPEED))]),
    (&["megatrondeepspeed", "megatron+deepspeed", "megatron3d"], &[Habit(ON_DEEPSPEED)]),
    // On DeepSpeed's engine of pipelines and its optimizer (github:EleutherAI/gpt-neox configs/20B.yml: ZeRO 1, activations
    // checkpointed, no dropout).
    (&["gptneox"], &[Family(Deepspeed), Habit(Habits { zero: 1, dropout: 0.0, ..ON_DEEPSPEED }), Gradients(AsFp16)]),

    // DeepSeek's own.
    (&["haillm"], &[Family(Megatron), DeepSeeks]),
    (&["dualpipe", "deepseekv3pretraining"], &[DeepSeeks]),

    // On Megatron. First, as a "usp" is in "primuspipeline":
    (&["primus"], &[Family(Megatron), Habit(PRIMUS), GathersFp8(false), CountsHalfOfMixtures]),
    // Blocks of Megatron-LM until Transformer Engine's took their place in 2024: for Llama's, norms are in PyTorch's operators
    // (github:NVIDIA/Megatron-LM megatron/legacy/model/rms_norm.py).
    (&["flagscale", "skywork", "megatronlm+flashattention"], &[Family(Megatron), Operators(true)]),
    (&["yunchang"], &[Family(Megatron), Habit(Habits { kernels: FLASH, ..BASELINE }), Operators(true), ByHeadsInNode, InRing]),
    (&["usp"], &[Family(Megatron), Habit(Habits { kernels: FLASH, ..BASELINE })]),
    (&["megatronlm(commit"], &[Habit(BASELINE)]),
    (&["megascalemoe"], &[Family(Megatron), Habit(IN_CHUNKS)]),
    // MegaScale's ablation adds one thing after the other (table 3), FlashAttention 2 near the end; that it gains no more than 3 % with
    // all its fused operators says that the baseline's attention was fused already.
    (&["megascale&ablation+efficient", "megascale&ablation+misc", "megascale&ablation+lamb"], &[Habit(MEGASCALE)]),
    (&["megascale&ablationbaseline"], &[Habit(BASELINE)]),
    (&["megascale&ablation+parallel"], &[Habit(Habits { parallel_block: true, ..BASELINE })]),
    (&["megascale&ablation+sliding"], &[Habit(Habits { parallel_block: true, half_window: true, ..BASELINE })]),
    (&["megascale&ablation+tp"], &[Habit(Habits { kernels: FLASH_1, overlap: NOTHING, ..MEGASCALE })]),
    (&["megascale&ablation+pp"], &[Habit(Habits { kernels: FLASH_1, overlap: Overlap { grad: false, ..ALL }, ..MEGASCALE })]),
    (&["megascale&ablation"], &[Habit(Habits { kernels: FLASH_1, ..MEGASCALE })]),
    (&["megascale"], &[Family(Megatron), Habit(MEGASCALE)]),
    // Megatron of 2019 to 2023, and what was built on it then; its dropout is 0.1 unless turned off.
    (&["ptdp", "yuan1"], &[Family(Megatron), Habit(EARLY)]),
    (&["metaseq"], &[Family(Torch), Habit(EARLY), Gradients(AsFp16)]),
    (&["glm130b"], &[Habit(EARLY), Gradients(AsFp16)]),
    // Of 2023: FlashAttention, and Megatron-LM's optimizer, whose collectives wait, or its own, whose do not
    // (github:alibaba/Megatron-LLaMA README.md).
    (&["megatronllama(over"], &[Habit(fused(Habits { zero: 1, ..habits(FLASH_1, 0.0) }))]),
    (&["megatronllama"], &[Habit(fused(Habits { zero: 1, ..with(NOTHING, habits(FLASH_1, 0.0)) })), Operators(true)]),
    // A fork of Megatron-LM; its model of the time of a step adds up compute and communication.
    (&["yuan2"], &[Habit(in_place(with(NOTHING, PLAIN)))]),
    // Megatron-LM on its Core is Megatron-LM, and no recipe of NeMo's; in NeMo's containers it has those.
    (&["megatronlm(megatroncore"], &[Habit(RECIPES)]),
    (&["megatronlm&nemo"], &[Habit(OVERLAPPED), Gradients(AsFp16), GathersFp8(false)]),
    // Its recipes for figures of performance sum in bf16 (`grad_reduce_in_fp32` false: github:NVIDIA-NeMo/Megatron-Bridge@13d58bb
    // scripts/performance/configs/nemotronh/nemotron_3_llm_pretrain.py, and in those of every other family). Its tables state a
    // pipeline's interleaving where there is any, and its models have none by themselves, nor do others' scripts around Megatron Core.
    (&["megatronbridge"], &[Family(Megatron), Habit(OVERLAPPED), Gradients(Halved), GathersFp8(true), StatesInterleaving, EndsBesideLayers, CountsHalf]),
    // Those for MLPerf of the rounds whose files set `TP_PP_DP_MAPPING` (github:Richardyu114/training_results_v6.0@eabf23a, a fork of
    // mlcommons', ASUSTeK/benchmarks/llama31_8b/implementations/nemo/config_common.sh; that a replica is a segment of a rack has it,
    // too, in Azure/benchmarks/llama31_405b).
    (&["mlperftrainingv5", "mlperftrainingv6"], &[StagesInside]),
    (&["mlperf"], &[Family(Megatron), Habit(OVERLAPPED), GathersFp8(true), Interleaves, EndsBesideLayers]),
    // As it is since it has FlashAttention (`grad_sync_dtype`), until then it added up in fp32 (`fp32_grad_accum`, as remembered, not
    // looked up).
    (&[NEMO], &[Family(Megatron), Habit(OVERLAPPED), Operators(false), Gradients(Halved), GathersFp8(true), Interleaves, EndsBesideLayers]),
    (&["megatroncore"], &[Family(Megatron), Habit(OVERLAPPED), Interleaves, CountsHalfOfMixtures]),
    // They follow NeMo's recipes (github:NVIDIA/Megatron-LM examples/llama/README.md, section 4).
    (&["megatron/te", "megatronlmexamples"], &[Habit(OVERLAPPED)]),
    // Megatron of 2022 and 2023 with sequence parallelism (arXiv:2205.05198), the baseline of DeepSpeed-Ulysses: every
    // replica holds its optimizer (`--use-distributed-optimizer` is no default), and its collectives wait.
    (&["megatronlmsp"], &[Habit(fused(Habits { sequence_parallel: true, ..with(NOTHING, habits(FLASH_1, 0.0)) }))]),
    // By its bare name, too.
    (&["megatronlm", "=megatron", "=nvidiamegatron", "megatronv"], &[Family(Megatron), Habit(RECIPES), GathersFp8(false)]),
    (&["transformerengine"], &[Habit(RECIPES)]),

    // Who shares sequences.
    (&["ulysses"], &[Family(Deepspeed), Habit(ULYSSES), ByHeads]),
    (&["fpdt"], &[ByHeads]),
    (&["distflashattn"], &[Family(Trainers), InRing]),
    (&["ringattention", "ringflash", "distattn", "burst", "striped"], &[InRing]),
    (&["loongtrain", "xdit"], &[ByHeadsInNode, InRing]),
    // Its ring of sequence parallelism (arXiv:2105.13120) has scores in memory, as it sums over all of K before it takes
    // V, and shares no weights, so that they must be sharded (its ZeRO).
    (&["colossalaisp", "colaisp"], &[Habit(Habits { zero: 3, ..habits(UNFUSED, 0.0) })]),
    (&["colossalai", "colai"], &[Habit(PLAIN), Shards]),

    // JAX's trainers shard weights over all chips where nothing else is asked for. With a capacity MaxText multiplies
    // by masks (github:AI-Hypercomputer/maxtext src/MaxText/layers/moe.py, dense_matmul).
    (&["maxtext"], &[Habit(Habits { zero: 3, ..OTHERWISE }), Operators(false), MasksRows]),
    (&["levanter", "axlearn"], &[Habit(Habits { zero: 3, ..OTHERWISE })]),
    // Whatever else is built on Megatron: of today.
    (&["megatronswift", "megatronpatch"], &[Habit(RECIPES), StatesInterleaving]),
    (&["mindspeed", "(megatron)"], &[Family(Megatron), Habit(RECIPES)]),
    (&["megatron"], &[Family(Megatron), Operators(false), Gradients(AsFp16), InterleavedExchange, Cuts]),
    (&["yuan"], &[Family(Megatron)]),
    // XLA makes its own kernels of attention where Transformer Engine's are not asked for.
    (&["paxml", "pax("], &[Habit(habits(UNFUSED, 0.0))]),

    // PyTorch's. `fused_crossentropy` (github:mosaicml/llm-foundry llmfoundry/models/mpt), and the benchmark's
    // `fsdp_config_mixed_precision` is PURE (github:mosaicml/llm-foundry@12a6319 scripts/train/benchmarking/submit_benchmarks.py).
    (&["llmfoundry", "mosaic"], &[Family(Torch), Habit(FLASH_LOSS), Operators(false), Gradients(Halved), Shards]),
    // `FlashGPTLMLoss` (github:InternLM/InternEvo).
    (&["internevo"], &[Family(Torch), Habit(FLASH_LOSS)]),
    // Its loss is made after Megatron's (`sharded_cross_entropy`, github:huggingface/nanotron).
    (&["nanotron"], &[Family(Torch), Habit(in_place(with(NOTHING, PLAIN)))]),
    (&["arctictraining", "atorch", "paddle"], &[Operators(true)]),
    (&["pytorch"], &[Family(Torch), Operators(true), Shards, LongInRing]),
    (&["fsdp"], &[Family(Torch), Shards, LongInRing]),
    (&["torch.compile"], &[Shards]),
    (&["torch", "ddp", "olmo", "nanogpt", "nanochat", "picotron"], &[Family(Torch)]),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::row::words::squeezed;

    #[test]
    fn who_belongs_to_whom() {
        for (system, expected) in [
            ("NeMo/Megatron-Bridge 26.06", Software::Megatron),
            ("Megatron-LM of 2023, 1F1B", Software::Megatron),
            ("Megatron-LM (Nemotron-4)", Software::Megatron),
            ("MegaScale", Software::Megatron),
            ("Megatron-Bridge, context parallelism by all-to-all (Ulysses)", Software::Megatron),
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

    /// A word that is written otherwise would never be found.
    #[test]
    fn words_are_as_names_are_read() {
        for word in SYSTEMS.iter().flat_map(|(words, _)| *words) {
            assert_eq!(squeezed(word), *word);
        }
    }
}
