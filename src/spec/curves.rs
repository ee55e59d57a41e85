//! The names of the curves of all kernels, by which a stack says what its framework does not fuse.

/// What `Kernel::curve` of a plan can be, sorted.
#[rustfmt::skip]
pub const CURVES: &[&str] = &[
    "adam", "add", "add_lse", "add_weighted", "attention", "attention_bwd", "attention_bwd_onto", "attention_delta",
    "attention_onto", "bias_bwd", "cast", "causal_conv", "causal_conv_bwd", "cross_entropy", "dequantise_rows", "drop_probs",
    "dropout_bwd", "embed", "embed_bwd", "embed_bwd_part", "embed_part", "expert_relu2", "expert_relu2_bwd", "expert_swiglu",
    "expert_swiglu_bwd", "fill", "gate", "gate_bwd", "gated_norm", "gated_norm_bwd", "gelu", "gelu_bwd", "group_norm",
    "group_norm_bwd", "grouped_matmul", "grouped_matmul_dw", "grouped_matmul_dx", "head_norm", "head_norm_bwd", "join_keys",
    "join_keys_bwd", "kv_bwd", "latent_norm", "latent_norm_bwd", "latent_rope", "latent_rope_bwd", "layer_norm",
    "layer_norm_bwd", "lightning_index", "lightning_index_bwd", "log_softmax", "log_softmax_bwd", "mask_rows", "matmul_fp8",
    "matmul_nn", "matmul_nn_onto", "matmul_nt", "matmul_nt_onto", "matmul_tn", "matmul_tn_onto", "matmul_tt",
    "matmul_tt_onto", "merge_lse", "nll", "norm", "norm_bwd", "own_heads", "own_heads_bwd", "own_rows", "partial_rope",
    "partial_rope_bwd", "permute_pack_heads", "permute_pack_seq", "permute_unpack_heads", "permute_unpack_seq", "positions",
    "positions_bwd", "probs_bwd", "q_bwd", "quantise", "quantise_rows", "relu2", "relu2_bwd", "reorder", "reorder_back",
    "residual", "rope", "rope_bwd", "route_rows", "router", "router_bwd", "scores", "softmax", "softmax_apart",
    "softmax_bwd", "softmax_bwd_apart", "sparse_attention", "sparse_attention_bwd", "ssm_scan", "ssm_scan_bwd", "swiglu",
    "swiglu_bwd", "values", "vocab_cross_entropy", "vocab_stats", "wait",
];
