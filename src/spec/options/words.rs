//! Every word of `--options`.

use super::{Dispatch, Fold, KvPath, Options, RingBackward, RingLayout, RingMerge};

/// A choice other than the default.
pub struct Word {
    pub name: &'static str,
    /// For help texts.
    pub about: &'static str,
    pub(super) set: fn(&mut Options),
    pub(super) is_set: fn(&Options) -> bool,
}

/// Every word that is understood.
pub const WORDS: &[Word] = &[
    Word {
        name: "no-sp",
        about: "tensor parallelism without sequence parallelism: all-reduce, whole activations",
        set: |o| o.whole_activations = true,
        is_set: |o| o.whole_activations,
    },
    Word {
        name: "tp-overlap",
        about: "tensor parallelism gathers and sums rows in chunks beside the products (Transformer Engine's userbuffers)",
        set: |o| o.tp_overlap = true,
        is_set: |o| o.tp_overlap,
    },
    Word {
        name: "contiguous",
        about: "context-parallel ranks hold consecutive parts of the sequence, not zigzag's two chunks",
        set: |o| o.layout = RingLayout::Contiguous,
        is_set: |o| o.layout == RingLayout::Contiguous,
    },
    Word {
        name: "gather-kv",
        about: "context-parallel ranks gather all KV before attention, in place of a ring",
        set: |o| o.kv = KvPath::Gather,
        is_set: |o| o.kv == KvPath::Gather,
    },
    Word {
        name: "gather-kv-prefetch",
        about: "the same, KV head by KV head, the next being gathered while attention runs on one",
        set: |o| o.kv = KvPath::GatherByHead,
        is_set: |o| o.kv == KvPath::GatherByHead,
    },
    Word {
        name: "stripe",
        about: "context-parallel ranks take the tokens of the sequence in turn (Striped Attention)",
        set: |o| o.layout = RingLayout::Stripe,
        is_set: |o| o.layout == RingLayout::Stripe,
    },
    Word {
        name: "per-document",
        about: "context-parallel ranks have an equal part of every packed document (TransformerEngine's thd), not of the sequence: zigzag's two chunks are those of each",
        set: |o| o.per_document = true,
        is_set: |o| o.per_document,
    },
    Word {
        name: "dkv-model",
        about: "a ring's dKV travels in the model's dtype, in one message with KV, over P-1 hops (TransformerEngine)",
        set: |o| o.ring_backward = RingBackward::Reverse,
        is_set: |o| o.ring_backward == RingBackward::Reverse,
    },
    Word {
        name: "burst",
        about: "backward, KV stay and q, do, lse and delta travel round the ring, dq behind them (BurstAttention)",
        set: |o| o.ring_backward = RingBackward::Burst,
        is_set: |o| o.ring_backward == RingBackward::Burst,
    },
    Word {
        name: "kv-in-two",
        about: "a ring sends KV, and dKV, as two messages of one group",
        set: |o| o.kv_in_two = true,
        is_set: |o| o.kv_in_two,
    },
    Word {
        name: "one-comm",
        about: "a ring's KV and its gradients take turns on one communicator (as in ring-flash-attention)",
        set: |o| o.one_comm = true,
        is_set: |o| o.one_comm,
    },
    Word {
        name: "merge-at-end",
        about: "a ring keeps every block's output and sums them at the end (TransformerEngine, which holds every KV until then as well: its forward pass needs more memory than here, where outputs take the place of KV that has been used)",
        set: |o| o.merge = RingMerge::AtEnd,
        is_set: |o| o.merge == RingMerge::AtEnd,
    },
    Word {
        name: "merge-in-kernel",
        about: "a ring's kernels go on from running sums: nothing is merged or rounded between blocks",
        set: |o| o.merge = RingMerge::InKernel,
        is_set: |o| o.merge == RingMerge::InKernel,
    },
    Word {
        name: "double-ring-2",
        about: "a ring of rings of 2 ranks: KV goes round a window of ranks while that of the next comes (LoongTrain)",
        set: |o| o.double_ring = 2,
        is_set: |o| o.double_ring == 2,
    },
    Word {
        name: "double-ring-4",
        about: "the same with rings of 4 ranks",
        set: |o| o.double_ring = 4,
        is_set: |o| o.double_ring == 4,
    },
    Word {
        name: "double-ring-8",
        about: "the same with rings of 8 ranks",
        set: |o| o.double_ring = 8,
        is_set: |o| o.double_ring == 8,
    },
    Word {
        name: "ring-inside",
        about: "ring and Ulysses together: neighbouring ranks make the ring, Ulysses goes across nodes",
        set: |o| o.ring_inside = true,
        is_set: |o| o.ring_inside,
    },
    Word {
        name: "fp8",
        about: "products of the layers on operands rounded to FP8 (E4M3, a scale every 128)",
        set: |o| o.fp8 = true,
        is_set: |o| o.fp8,
    },
    Word {
        name: "a2a-separate",
        about: "Ulysses exchanges q, k and v, and around a scan z, x, B, C and dt, in an all-to-all each, the next being packed meanwhile",
        set: |o| o.a2a_separate = true,
        is_set: |o| o.a2a_separate,
    },
    Word {
        name: "replicate-after",
        about: "a KV head that several Ulysses ranks need travels once, and is gathered by these neighbours",
        set: |o| o.replicate_after = true,
        is_set: |o| o.replicate_after,
    },
    Word {
        name: "pad-heads",
        about: "heads of zeros are added where Ulysses does not divide the heads",
        set: |o| o.pad_heads = true,
        is_set: |o| o.pad_heads,
    },
    Word {
        name: "short-ends",
        about: "pipeline: the first and the last stage have one layer less than the others",
        set: |o| o.short_ends = true,
        is_set: |o| o.short_ends,
    },
    Word {
        name: "uneven",
        about: "pipeline: layers that do not come out even: the last stage and then the first ones have one fewer",
        set: |o| o.uneven = true,
        is_set: |o| o.uneven,
    },
    Word {
        name: "unfused",
        about: "attention as products and a softmax on matrices of scores in memory, as before FlashAttention",
        set: |o| o.unfused = true,
        is_set: |o| o.unfused,
    },
    Word {
        name: "no-prefetch",
        about: "ZeRO 2 and 3: one layer's gathered weights and gradient at a time, none ahead or behind",
        set: |o| o.no_prefetch = true,
        is_set: |o| o.no_prefetch,
    },
    Word {
        name: "no-sync",
        about: "ZeRO 3: gradients add up whole over microbatches and are scattered behind the last (PyTorch FSDP's no_sync)",
        set: |o| o.no_sync = true,
        is_set: |o| o.no_sync,
    },
    Word {
        name: "bf16-grads",
        about: "gradients of bf16 weights are added up, kept and summed over replicas in bf16 (Megatron's grad-reduce-in-bf16, PyTorch FSDP's reduce_dtype, DeepSpeed's communication_data_type)",
        set: |o| o.bf16_grads = true,
        is_set: |o| o.bf16_grads,
    },
    Word {
        name: "bf16-moments",
        about: "Adam's moments of bf16 weights are kept in bf16 (DeepSeek-V3, Megatron's precision-aware optimizer)",
        set: |o| o.bf16_moments = true,
        is_set: |o| o.bf16_moments,
    },
    Word {
        name: "no-master",
        about: "the optimizer updates bf16 weights as they are, without a copy of them in fp32; with bf16-grads and bf16-moments that is pure bf16 (torchtune)",
        set: |o| o.no_master = true,
        is_set: |o| o.no_master,
    },
    Word {
        name: "all-reduce-grads",
        about: "ZeRO 1: gradients are summed whole on every rank, which takes its share, in place of being scattered (DeepSpeed's pipelines)",
        set: |o| o.all_reduce_grads = true,
        is_set: |o| o.all_reduce_grads,
    },
    Word {
        name: "no-overlap-grad",
        about: "gradients are summed behind the whole backward pass (Megatron-LM without overlap-grad-reduce)",
        set: |o| o.no_overlap_grad = true,
        is_set: |o| o.no_overlap_grad,
    },
    Word {
        name: "no-overlap-p2p",
        about: "pipeline: CPU and GPU wait for what a stage sends and receives, interleaved both ways at once behind a forward and a backward unit (Megatron-LM without overlap-p2p)",
        set: |o| o.no_overlap_p2p = true,
        is_set: |o| o.no_overlap_p2p,
    },
    Word {
        name: "scatter-p2p",
        about: "tensor parallelism without sequence parallelism: every rank sends its own rows alone to the next stage, whose ranks gather them (Megatron-LM's scatter and gather; DeepSpeed's pipe_partitioned)",
        set: |o| o.scatter_p2p = true,
        is_set: |o| o.scatter_p2p,
    },
    Word {
        name: "zb-h1",
        about: "a pipeline makes gradients of weights apart from those of inputs, and fills its bubble with them (ZB-H1)",
        set: |o| o.zb_h1 = true,
        is_set: |o| o.zb_h1,
    },
    Word {
        name: "dualpipe-v",
        about: "a pipeline of two chunks a stage (vp 2), the first stage having the first and the last: forward and backward units of both by turns, some gradients of weights put off (DualPipeV)",
        set: |o| o.fold = Fold::DualPipe,
        is_set: |o| o.fold == Fold::DualPipe,
    },
    Word {
        name: "zb-v",
        about: "a pipeline of two chunks a stage in a V (vp 2), every backward pass in two halves: 1F1B's activations (with tp and the gradients that wait, gathered, for their weight halves), next to no bubble (ZB-V)",
        set: |o| o.fold = Fold::ZeroBubble,
        is_set: |o| o.fold == Fold::ZeroBubble,
    },
    Word {
        name: "v-half",
        about: "the same with half of 1F1B's activations and half of its bubble (V-Half)",
        set: |o| o.fold = Fold::Half,
        is_set: |o| o.fold == Fold::Half,
    },
    Word {
        name: "v-min",
        about: "the same with a third of 1F1B's activations and two thirds of its bubble, or more where halves take unequal time (V-Min)",
        set: |o| o.fold = Fold::Min,
        is_set: |o| o.fold == Fold::Min,
    },
    Word {
        name: "recompute-mla-up",
        about: "latent attention: the backward pass makes queries, keys and values again of what is compressed (DeepSeek-V3; Megatron Core's recompute-modules mla_up_proj)",
        set: |o| o.recompute_mla_up = true,
        is_set: |o| o.recompute_mla_up,
    },
    Word {
        name: "recompute-act",
        about: "the backward pass makes the output of a network's activation again, experts' too, in place of keeping it (DeepSeek-V3; Megatron Core's recompute-modules moe_act; Liger's SwiGLU)",
        set: |o| o.recompute_act = true,
        is_set: |o| o.recompute_act,
    },
    Word {
        name: "recompute-norm",
        about: "the backward pass makes the outputs of norms again, in place of keeping them (DeepSeek-V3; Megatron Core's recompute-modules layernorm)",
        set: |o| o.recompute_norm = true,
        is_set: |o| o.recompute_norm,
    },
    Word {
        name: "keep-attention",
        about: "with recompute full, attention runs once: its output and log-sum-exps are kept beside the inputs of layers (DistFlashAttn's rematerialization-aware checkpoints; LoongTrain's selective checkpoint++)",
        set: |o| o.keep_attention = true,
        is_set: |o| o.keep_attention,
    },
    Word {
        name: "recompute-moe",
        about: "experts run again in the backward pass, with their exchanges: layers keep the inputs of these halves alone, hybrids those of layers of experts (Megatron Core's recompute-modules moe)",
        set: |o| o.recompute_moe = true,
        is_set: |o| o.recompute_moe,
    },
    Word {
        name: "wait-passes",
        about: "the CPU waits for the GPU behind every pass of a microbatch (Megatron-LM's timers until 2022)",
        set: |o| o.wait_passes = true,
        is_set: |o| o.wait_passes,
    },
    Word {
        name: "add-grads",
        about: "a weight's gradient is written by its product, and added to those of other microbatches by another kernel (Megatron-LM without gradient-accumulation-fusion)",
        set: |o| o.add_grads = true,
        is_set: |o| o.add_grads,
    },
    Word {
        name: "wide-loss",
        about: "logits are made fp32 before the loss, and their gradient is made bf16 again behind it (`logits.float()`)",
        set: |o| o.wide_loss = true,
        is_set: |o| o.wide_loss,
    },
    Word {
        name: "dispatch-allgather",
        about: "experts: all rows are gathered everywhere, sums are scattered back (Megatron's allgather)",
        set: |o| o.dispatch = Dispatch::AllGather,
        is_set: |o| o.dispatch == Dispatch::AllGather,
    },
    Word {
        name: "dispatch-deepep-v1-normal",
        about: "experts: a row goes once to a node, from there once to a rank; summed in the node (DeepEP V1)",
        set: |o| o.dispatch = Dispatch::DeepepNormal,
        is_set: |o| o.dispatch == Dispatch::DeepepNormal,
    },
    Word {
        name: "dispatch-deepep-v1-ll",
        about: "experts: a message for each token and expert (DeepEP V1, low latency)",
        set: |o| o.dispatch = Dispatch::DeepepLowLatency,
        is_set: |o| o.dispatch == Dispatch::DeepepLowLatency,
    },
    Word {
        name: "deepep-hook",
        about: "experts: DeepEP's low-latency kernels leave the SMs to others while rows travel (return_recv_hook)",
        set: |o| o.deepep_hook = true,
        is_set: |o| o.deepep_hook,
    },
    Word {
        name: "dispatch-deepep-v2",
        about: "experts: DeepEP V2, hybrid over scale-out and scale-up",
        set: |o| o.dispatch = Dispatch::DeepepV2,
        is_set: |o| o.dispatch == Dispatch::DeepepV2,
    },
    Word {
        name: "dispatch-deepep-v2-direct",
        about: "experts: DeepEP V2, a row straight to every rank that it has to reach",
        set: |o| o.dispatch = Dispatch::DeepepV2Direct,
        is_set: |o| o.dispatch == Dispatch::DeepepV2Direct,
    },
    Word {
        name: "dispatch-hybrid-ep",
        about: "experts: a row once to a node, from there once to a rank, streamed by TMA (NVIDIA's Hybrid-EP)",
        set: |o| o.dispatch = Dispatch::HybridEp,
        is_set: |o| o.dispatch == Dispatch::HybridEp,
    },
    Word {
        name: "dispatch-hierarchical",
        about: "experts: two all-to-alls, between nodes and within (Tutel's 2DH)",
        set: |o| o.dispatch = Dispatch::Hierarchical,
        is_set: |o| o.dispatch == Dispatch::Hierarchical,
    },
    Word {
        name: "dispatch-fp8",
        about: "experts: rows travel there in FP8 with a scale every 128 elements",
        set: |o| o.dispatch_fp8 = true,
        is_set: |o| o.dispatch_fp8,
    },
    Word {
        name: "keep-fp8-rows",
        about: "experts: of rows that travelled in FP8 the codes are kept, and expanded again for the backward pass (DeepSeek-V3)",
        set: |o| o.keep_fp8_rows = true,
        is_set: |o| o.keep_fp8_rows,
    },
    Word {
        name: "keep-fp8-gate-up",
        about: "experts: what goes into their activation is kept rounded to FP8, a scale every 128, for the backward pass (DeepSeek-V3)",
        set: |o| o.keep_fp8_gate_up = true,
        is_set: |o| o.keep_fp8_gate_up,
    },
    Word {
        name: "overlap-shared",
        about: "experts that every token visits compute while rows travel to the others and back",
        set: |o| o.overlap_shared = true,
        is_set: |o| o.overlap_shared,
    },
    Word {
        name: "overlap-exchange",
        about: "experts: a layer forward in one microbatch and one backward in another by turns, so that rows travel beside compute (DualPipe, Megatron Core's 1F1B overlap)",
        set: |o| o.overlap_exchange = true,
        is_set: |o| o.overlap_exchange,
    },
    Word {
        name: "offload-activations",
        about: "with full recomputation, the inputs of layers wait in the CPUs' memory and come back one layer ahead",
        set: |o| o.offload_activations = true,
        is_set: |o| o.offload_activations,
    },
    Word {
        name: "offload-optimizer",
        about: "optimizer state in the CPUs' memory: gradients go there, the CPU runs Adam, weights come back (ZeRO-Offload)",
        set: |o| o.offload_optimizer = true,
        is_set: |o| o.offload_optimizer,
    },
    Word {
        name: "fpdt-2",
        about: "layers go through the sequence in 2 chunks, keys and values waiting in the CPUs' memory (FPDT, Ulysses-Offload)",
        set: |o| o.chunks = 2,
        is_set: |o| o.chunks == 2,
    },
    Word { name: "fpdt-4", about: "the same in 4 chunks", set: |o| o.chunks = 4, is_set: |o| o.chunks == 4 },
    Word { name: "fpdt-8", about: "the same in 8 chunks", set: |o| o.chunks = 8, is_set: |o| o.chunks == 8 },
    Word { name: "fpdt-16", about: "the same in 16 chunks", set: |o| o.chunks = 16, is_set: |o| o.chunks == 16 },
    Word { name: "fpdt-32", about: "the same in 32 chunks", set: |o| o.chunks = 32, is_set: |o| o.chunks == 32 },
    Word { name: "fpdt-64", about: "the same in 64 chunks", set: |o| o.chunks = 64, is_set: |o| o.chunks == 64 },
];

/// Words that end in a number of the user's, for help texts.
pub const NUMBERED: &[(&str, &str)] = &[
    ("replicas-N", "N slots of experts beyond one for each, which EPLB gives to those with most rows; as --replicas"),
    (
        "shard-N",
        "ZeRO among N neighbouring ranks that hold the same weights, sums going on to the other groups of N (hybrid sharding: FSDP's HYBRID_SHARD, MiCS, Megatron-LM's num-distributed-optimizer-instances)",
    ),
    ("shadow-N", "every rank computes the N hottest experts for itself, their weights being broadcast; as --shadow"),
    (
        "first-stage-N",
        "pipeline: N layers on the first stage, the others sharing the rest (Megatron-LM's decoder-first-pipeline-num-layers); of a pipeline in a V those of its first chunk",
    ),
    (
        "last-stage-N",
        "the same of the last stage; of a pipeline in a V of its last chunk, which the first stage has as well",
    ),
    (
        "stages-N",
        "pipeline: layers of every stage, as stages-2.2.3.3.4.4.4.2, or stages-2x10.3x20.2x2 for 10 stages of 2 layers, 20 of 3 and 2 of 2 (Yuan 2.0); with vp of every chunk, the first of every stage before the second of any",
    ),
    (
        "loss-chunks-N",
        "head and loss in N pieces of a microbatch: logits and their gradient are those of one piece at a time (Liger's fused linear cross-entropy, torchtune's chunked loss)",
    ),
    (
        "mlp-chunks-N",
        "feed-forward networks in N pieces of a microbatch, each made again in the backward pass: gate, up and activation are those of one piece at a time (Arctic's TiledMLP)",
    ),
    ("capacity-HOW", "what an expert takes of a rank's tokens: 1.25, pad:1.25, tutel:1.25 or tutel:0; as --capacity"),
];
