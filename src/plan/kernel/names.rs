//! The names of kernels, and which of them behave alike.

use super::{Exchange, HeadPermute, Kernel};
use crate::plan::foreach::ForeachKernel;
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
            Kernel::Quantise { .. } => "quantise_rows",
            Kernel::Dequantise { .. } => "dequantise_rows",
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
            Kernel::Foreach(kernel) => kernel.name(),
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
            Kernel::Unfused { step, .. } => step.is_forward(),
            Kernel::Ssm(kernel) => kernel.is_forward(),
            Kernel::Sparse(kernel) => kernel.is_forward(),
            Kernel::Expert(kernel) => kernel.is_forward(),
            Kernel::Permute(HeadPermute { backward, .. })
            | Kernel::Rope { backward, .. }
            | Kernel::LatentRope { backward, .. }
            | Kernel::Positions { backward, .. } => !backward,
            Kernel::Reorder { inverse, .. } => !inverse,
            Kernel::Attention(_) | Kernel::AttentionOnto(_) => true,
            Kernel::AddLse(_) | Kernel::AddWeighted(_) | Kernel::MergeLse(_) => true,
            Kernel::Norm { .. } | Kernel::HeadNorm { .. } | Kernel::LatentNorm { .. } => true,
            Kernel::LayerNorm { .. } | Kernel::Residual { .. } | Kernel::Embed { .. } => true,
            Kernel::Gelu { .. } | Kernel::Relu2 { .. } | Kernel::SwiGlu { .. } | Kernel::Quantise { .. } => true,
            Kernel::CrossEntropy { .. } | Kernel::VocabStats(_) | Kernel::VocabCrossEntropy { .. } => true,
            Kernel::LogSoftmax { .. } | Kernel::Nll { .. } => true,
            // The schedule of a pipeline and the optimizer of one cut rows in Python, whichever way they go.
            Kernel::OwnRows { .. } => true,
            Kernel::AttentionDelta { .. } | Kernel::AttentionBwd(_) | Kernel::AttentionBwdOnto(..) => false,
            Kernel::NormBwd { .. } | Kernel::HeadNormBwd { .. } | Kernel::LatentNormBwd { .. } => false,
            Kernel::LayerNormBwd { .. } | Kernel::BiasBwd { .. } | Kernel::DropoutBwd { .. } => false,
            Kernel::GeluBwd { .. } | Kernel::Relu2Bwd { .. } | Kernel::SwiGluBwd { .. } => false,
            Kernel::LogSoftmaxBwd { .. } | Kernel::Dequantise { .. } => false,
            Kernel::EmbedBwd { .. } | Kernel::Adam { .. } | Kernel::Foreach(_) | Kernel::Muon(_) => false,
            Kernel::Add { .. } | Kernel::Fill { .. } | Kernel::Cast { .. } | Kernel::Wait { .. } => false,
        }
    }

    /// Whether the kernel is the one that makes logits, its first operand, into a loss: where that is several kernels, the
    /// first of them.
    pub fn takes_logits(&self) -> bool {
        matches!(self, Kernel::CrossEntropy { .. } | Kernel::VocabCrossEntropy { .. } | Kernel::LogSoftmax { .. })
    }

    /// Whether the kernel may have one more operand than it needs, to which it writes the new weights in another dtype.
    pub fn may_cast(&self) -> bool {
        matches!(
            self,
            Kernel::Adam { .. } | Kernel::Foreach(ForeachKernel::Move { .. }) | Kernel::Muon(MuonKernel::Update { .. })
        )
    }

    /// Whether what the kernel computes depends on how many steps came before: Adam corrects moments by that.
    pub fn counts_steps(&self) -> bool {
        matches!(self, Kernel::Adam { .. } | Kernel::Foreach(_) | Kernel::Muon(MuonKernel::Update { .. }))
    }

    /// Whether the kernel is the optimizer's and reads gradients.
    pub fn steps(&self) -> bool {
        match self {
            Kernel::Adam { .. } | Kernel::Foreach(ForeachKernel::Moments { .. }) => true,
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
            // As much for each byte as the one kernel.
            Kernel::Foreach(_) => "adam",
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

/// What a kernel computes, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Products of matrices, those of experts and of the optimizer included.
    Product,
    /// Products of queries, keys, values and their gradients where attention is not fused.
    HeadProduct,
    /// Attention in one kernel, be its sums its own or added to others', and the scores that choose its keys.
    Attention,
    AttentionBwd,
    /// What memory bounds, and communication.
    Other,
}

impl Family {
    pub fn of(kernel: &str) -> Family {
        match kernel {
            "matmul" | "grouped_matmul" | "mask_rows" | "head_matmul" => Family::Product,
            "muon_gram" | "muon_square" | "muon_apply" => Family::Product,
            "scores" | "values" | "probs_bwd" | "q_bwd" | "kv_bwd" => Family::HeadProduct,
            "attention" | "attention_onto" | "sparse_attention" | "lightning_index" => Family::Attention,
            "attention_bwd" | "attention_bwd_onto" | "sparse_attention_bwd" | "lightning_index_bwd" => {
                Family::AttentionBwd
            }
            _ => Family::Other,
        }
    }

    pub fn is_product(self) -> bool {
        matches!(self, Family::Product | Family::HeadProduct)
    }

    pub fn is_attention(self) -> bool {
        matches!(self, Family::Attention | Family::AttentionBwd)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::kernel::Operands;
    use crate::plan::muon::Matrices;
    use crate::plan::{AttnBlock, HeadDropout, Mesh, ScoreStep, Segs, WorkClass};
    use crate::spec::curves::CURVES;
    use crate::spec::{Factor, Mask};
    use std::collections::BTreeSet;

    /// Every name that a kernel has is that of a curve that files of stacks may name, but for those that share others'.
    #[test]
    fn stacks_know_every_curve() {
        let no_curves = ["matmul", "permute", "head_matmul"];
        let sources = [
            include_str!("names.rs"),
            include_str!("ssm.rs"),
            include_str!("../expert.rs"),
            include_str!("../muon.rs"),
            include_str!("../sparse.rs"),
            include_str!("../unfused.rs"),
        ];
        let of_file = |text: &'static str| text.split("#[cfg(test)]").next().unwrap().split("=> \"").skip(1);
        let names = sources.into_iter().flat_map(of_file).map(|rest| rest.split('"').next().unwrap());
        let curves: BTreeSet<&str> =
            names.filter(|name| !no_curves.contains(name) && !name.starts_with("muon_")).collect();
        assert_eq!(curves.into_iter().collect::<Vec<_>>(), CURVES);
    }

    /// Codes are one more thing to write beside those to multiply, and to read in place of numbers.
    #[test]
    fn codes_cost_what_products_do_not_count() {
        let (views, rows, cols) = ([Mesh::new(&[])], 3, 200);
        for kernel in [Kernel::Quantise { rows, cols }, Kernel::Dequantise { rows, cols }] {
            let Operands { reads, writes } = kernel.operands(&views);
            let bytes = |elems: &[u64]| match elems {
                [numbers] => vec![2 * numbers],
                _ => vec![rows * cols, 4 * rows * 2],
            };
            let work = kernel.work(&views, 0, &bytes(&reads), &bytes(&writes)).unwrap();
            assert_eq!((work.bytes, work.flops), (rows * (cols + 8), 0), "{}", kernel.name());
        }
    }

    /// Products by their names are products by their work, whether of heads whose attention is not fused or of Muon.
    #[test]
    fn families_are_what_kernels_work_on() {
        let segs = Segs::new(64, &[]);
        let block = AttnBlock {
            q: segs.clone(),
            kv: segs,
            batch: 1,
            heads: 4,
            kv_heads: 4,
            head_dim: 8,
            v_dim: None,
            mask: Mask::new(true),
            factor: Factor::ONE,
        };
        let steps = [
            ScoreStep::Scores,
            ScoreStep::Softmax,
            ScoreStep::Drop(HeadDropout { probability: 0.1, heads_over: vec![] }),
            ScoreStep::Values,
            ScoreStep::ProbsBwd,
            ScoreStep::SoftmaxBwd,
            ScoreStep::QBwd,
            ScoreStep::KvBwd,
        ];
        let of = Matrices { from: 0, count: 2, rows: 16, cols: 32, longer: 32 };
        let muon = [
            MuonKernel::Normalise { of },
            MuonKernel::Gram { of },
            MuonKernel::Square { of },
            MuonKernel::Apply { of },
        ];
        let kernels = steps.into_iter().map(|step| Kernel::Unfused { block: block.clone(), step });
        let views = [Mesh::new(&[])];
        for kernel in kernels.chain(muon.into_iter().map(Kernel::Muon)) {
            let Operands { reads, writes } = kernel.operands(&views);
            let work = kernel.work(&views, 0, &reads, &writes).unwrap();
            let multiplies = matches!(work.class, WorkClass::Gemm { .. });
            assert_eq!(Family::of(kernel.name()).is_product(), multiplies, "{}", kernel.name());
        }
    }
}
