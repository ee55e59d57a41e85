//! Codes of FP8 that are kept in place of what norms and activations leave for products: what Transformer Engine's modules
//! save of their inputs (github:NVIDIA/TransformerEngine transformer_engine/pytorch/module/linear.py, layernorm_linear.py:
//! `inputmat` and `ln_out`, by columns, or by rows where sequence parallelism gathers them).
//!
//! Attention's output stays as it is: its own backward pass reads it, and Megatron Core has the projection behind it save
//! no codes (`set_save_original_input`, github:NVIDIA/Megatron-LM megatron/core/transformer/attention.py). So does what a
//! router or latent attention reads, which several others do.
//!
//! The kernels here stand beside the products that round what they multiply, and cost what these do not count.

use super::Layer;
use super::backward::Backward;
use super::buffers::Saved;
use super::forward::Forward;
use crate::plan::kernel::FP8_BLOCK;
use crate::plan::{Buf, Builder, Dtype, Kernel};

/// What may be kept in codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coded {
    Norm1,
    Norm2,
    Act,
}

impl Coded {
    const ALL: [Coded; 3] = [Coded::Norm1, Coded::Norm2, Coded::Act];

    /// Names of the buffers of codes and of scales, and of the ops that make them and the numbers again.
    fn names(self) -> [&'static str; 4] {
        match self {
            Coded::Norm1 => ["normed1_codes", "normed1_scales", "norm1_quantise", "norm1_dequantise"],
            Coded::Norm2 => ["normed2_codes", "normed2_scales", "norm2_quantise", "norm2_dequantise"],
            Coded::Act => ["act_codes", "act_scales", "act_quantise", "act_dequantise"],
        }
    }
}

/// Codes and scales of each; `None` for what is kept as it is, or made again.
#[derive(Clone, Copy)]
pub(super) struct Codes([Option<[Buf; 2]>; 3]);

impl Codes {
    pub(super) fn bufs_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut Buf)> {
        let named = Coded::ALL.into_iter().zip(&mut self.0);
        named.flat_map(|(of, codes)| of.names().into_iter().zip(codes.iter_mut().flatten()))
    }
}

impl Layer {
    /// Whether codes are kept of it, where it is there.
    pub(super) fn codes_of(&self, of: Coded) -> bool {
        let is_kept = match of {
            Coded::Norm1 => !self.norms_again && self.latent.is_none(),
            Coded::Norm2 => !self.norms_again && self.experts.is_none(),
            Coded::Act => !(self.act_again || self.mlp_again || self.is_tiled() || self.experts_again),
        };
        self.keeps_codes && is_kept
    }

    fn shape_of(&self, of: Coded) -> [u64; 2] {
        if of == Coded::Act { [self.tokens(), self.ffn] } else { [self.residual_rows(), self.hidden] }
    }

    /// Declares the codes that are kept.
    pub(super) fn codes(&self, mut keep: impl FnMut(&'static str, u64, u64, Dtype) -> Buf) -> Codes {
        let there = [self.has_norm1().is_some(), self.rows.norm2.is_some(), self.ffn > 0];
        Codes(Coded::ALL.map(|of| {
            let is = there[of as usize] && self.codes_of(of);
            let ([codes, scales, ..], [rows, cols]) = (of.names(), self.shape_of(of));
            is.then(|| [keep(codes, rows, cols, Dtype::U8), keep(scales, rows, cols.div_ceil(FP8_BLOCK), Dtype::F32)])
        }))
    }
}

impl Saved {
    /// The codes of it, and the numbers.
    fn coded(&self, of: Coded) -> Option<([Buf; 2], Buf)> {
        let codes = self.codes.0[of as usize]?;
        let numbers = match of {
            Coded::Norm1 => self.normed1(),
            Coded::Norm2 => self.normed2(),
            Coded::Act => self.network().1,
        };
        Some((codes, numbers))
    }
}

impl Forward<'_> {
    /// Rounds it, where codes of it are kept.
    pub(super) fn quantise(&self, b: &mut Builder, of: Coded) {
        let Some((codes, numbers)) = self.keep.coded(of) else { return };
        let ([.., label, _], [rows, cols]) = (of.names(), self.layer.shape_of(of));
        b.compute(label, Kernel::Quantise { rows, cols }, &[numbers], &codes);
    }
}

impl Backward<'_> {
    /// Makes it of its codes; says whether there are any.
    pub(super) fn dequantise(&self, b: &mut Builder, of: Coded) -> bool {
        let Some((codes, numbers)) = self.keep.coded(of) else { return false };
        let ([.., label], [rows, cols]) = (of.names(), self.layer.shape_of(of));
        b.compute(label, Kernel::Dequantise { rows, cols }, &codes, &[numbers]);
        true
    }
}
