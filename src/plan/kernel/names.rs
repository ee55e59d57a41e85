//! The names of kernels, and which of them behave alike.

use super::{Exchange, Kernel};
use crate::plan::muon::MuonKernel;

impl Kernel {
    pub fn name(&self) -> &'static str {
        match self {
            Kernel::MatMul { .. } => "matmul",
            Kernel::Attention(_) => "attention",
            Kernel::Unfused { step, .. } => step.name(),
            Kernel::AttentionDelta { .. } => "attention_delta",
            Kernel::AttentionBwd(_) => "attention_bwd",
            Kernel::AttentionOnto(_) => "attention_onto",
            Kernel::AttentionBwdOnto(..) => "attention_bwd_onto",
            Kernel::AddLse(_) => "add_lse",
            Kernel::AddWeighted(_) => "add_weighted",
            Kernel::MergeLse(_) => "merge_lse",
            Kernel::Norm { .. } => "norm",
            Kernel::NormBwd { .. } => "norm_bwd",
            Kernel::HeadNorm { .. } => "head_norm",
            Kernel::HeadNormBwd { .. } => "head_norm_bwd",
            Kernel::LatentNorm { .. } => "latent_norm",
            Kernel::LatentNormBwd { .. } => "latent_norm_bwd",
            Kernel::LatentRope { .. } => "latent_rope",
            Kernel::LayerNorm { .. } => "layer_norm",
            Kernel::LayerNormBwd { .. } => "layer_norm_bwd",
            Kernel::BiasBwd { .. } => "bias_bwd",
            Kernel::Residual { .. } => "residual",
            Kernel::DropoutBwd { .. } => "dropout_bwd",
            Kernel::Positions { .. } => "positions",
            Kernel::Gelu { .. } => "gelu",
            Kernel::GeluBwd { .. } => "gelu_bwd",
            Kernel::Relu2 { .. } => "relu2",
            Kernel::Relu2Bwd { .. } => "relu2_bwd",
            Kernel::Ssm(kernel) => kernel.name(),
            Kernel::Rope { .. } => "rope",
            Kernel::SwiGlu { .. } => "swiglu",
            Kernel::SwiGluBwd { .. } => "swiglu_bwd",
            Kernel::Permute(_) => "permute",
            Kernel::Reorder { .. } => "reorder",
            Kernel::OwnRows { .. } => "own_rows",
            Kernel::Cast { .. } => "cast",
            Kernel::Add { .. } => "add",
            Kernel::Fill { .. } => "fill",
            Kernel::Wait { .. } => "wait",
            Kernel::Embed { .. } => "embed",
            Kernel::EmbedBwd { .. } => "embed_bwd",
            Kernel::CrossEntropy { .. } => "cross_entropy",
            Kernel::LogSoftmax { .. } => "log_softmax",
            Kernel::Nll { .. } => "nll",
            Kernel::LogSoftmaxBwd { .. } => "log_softmax_bwd",
            Kernel::VocabStats(_) => "vocab_stats",
            Kernel::VocabCrossEntropy { .. } => "vocab_cross_entropy",
            Kernel::Adam { .. } => "adam",
            Kernel::Muon(kernel) => kernel.name(),
            Kernel::Sparse(kernel) => kernel.name(),
            Kernel::Expert(kernel) => kernel.name(),
        }
    }

    /// Whether a framework runs the kernel in a forward pass, which is written in Python, or in one that is run again.
    /// The other kernels are issued by its engine of gradients and by its optimizer, which need no Python for each.
    pub fn is_forward(&self) -> bool {
        match self {
            Kernel::MatMul { b_t, .. } => *b_t,
            Kernel::Add { .. } | Kernel::Fill { .. } | Kernel::Cast { .. } | Kernel::Adam { .. } => false,
            Kernel::AttentionDelta { .. } | Kernel::Wait { .. } => false,
            Kernel::Sparse(kernel) => kernel.is_forward(),
            other => !other.curve().contains("bwd"),
        }
    }

    /// Whether the kernel is the one that makes logits, its first operand, into a loss: where that is several kernels, the
    /// first of them.
    pub fn takes_logits(&self) -> bool {
        matches!(self, Kernel::CrossEntropy { .. } | Kernel::VocabCrossEntropy { .. } | Kernel::LogSoftmax { .. })
    }

    /// Whether the kernel may have one more operand than it needs, to which it writes the new weights in another dtype.
    pub fn may_cast(&self) -> bool {
        matches!(self, Kernel::Adam { .. } | Kernel::Muon(MuonKernel::Update { .. }))
    }

    /// Whether the kernel is the optimizer's and reads gradients.
    pub fn steps(&self) -> bool {
        match self {
            Kernel::Adam { .. } => true,
            Kernel::Muon(kernel) => kernel.reads_gradients(),
            _ => false,
        }
    }

    /// Whether the CPU has the kernel, too, for operands in the host's memory.
    pub fn runs_on_host(&self) -> bool {
        matches!(self, Kernel::Adam { .. } | Kernel::Add { trim: None, .. } | Kernel::Cast { .. } | Kernel::Fill { .. })
    }

    /// The name of the curve on which the kernel's times lie over its sizes: a table of measurements has a curve for
    /// each name.
    pub fn curve(&self) -> &'static str {
        match self {
            Kernel::MatMul { fp8: true, .. } => "matmul_fp8",
            Kernel::MatMul { a_t: false, b_t: false, accumulate: false, .. } => "matmul_nn",
            Kernel::MatMul { a_t: false, b_t: true, accumulate: false, .. } => "matmul_nt",
            Kernel::MatMul { a_t: true, b_t: false, accumulate: false, .. } => "matmul_tn",
            Kernel::MatMul { a_t: true, b_t: true, accumulate: false, .. } => "matmul_tt",
            Kernel::MatMul { a_t: false, b_t: false, .. } => "matmul_nn_onto",
            Kernel::MatMul { a_t: false, b_t: true, .. } => "matmul_nt_onto",
            Kernel::MatMul { a_t: true, b_t: false, .. } => "matmul_tn_onto",
            Kernel::MatMul { .. } => "matmul_tt_onto",
            Kernel::Rope { backward: true, .. } => "rope_bwd",
            // Rows of ids that stand in other parts are not looked up.
            Kernel::Embed { shard: Some(_), .. } => "embed_part",
            Kernel::EmbedBwd { shard: Some(_), .. } => "embed_bwd_part",
            Kernel::LatentRope { backward: true, .. } => "latent_rope_bwd",
            Kernel::Positions { backward: true, .. } => "positions_bwd",
            Kernel::Permute(permute) => match permute.exchange {
                Exchange::PackHeads => "permute_pack_heads",
                Exchange::UnpackSeq => "permute_unpack_seq",
                Exchange::PackSeq => "permute_pack_seq",
                Exchange::UnpackHeads => "permute_unpack_heads",
            },
            Kernel::Reorder { inverse: true, .. } => "reorder_back",
            Kernel::Expert(kernel) => kernel.curve(),
            Kernel::Muon(kernel) => kernel.curve(),
            Kernel::Sparse(kernel) => kernel.curve(),
            Kernel::Unfused { block, step } => step.curve(block),
            other => other.name(),
        }
    }

    /// Calls that a framework makes if it does not fuse the kernel, see
    /// [`StackSpec::unfused`](crate::spec::StackSpec::unfused).
    pub fn calls(&self) -> u32 {
        match self {
            Kernel::Unfused { block, step } => step.calls(block),
            _ => 1,
        }
    }
}

/// Whether a kernel's name is that of a product of matrices, those of experts and of the optimizer included.
pub fn is_product(kernel: &str) -> bool {
    ["matmul", "grouped_matmul", "mask_rows", "head_matmul", "muon_gram", "muon_square", "muon_apply"].contains(&kernel)
}
