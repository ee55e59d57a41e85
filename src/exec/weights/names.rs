//! How a Hugging Face checkpoint names a plan's weights, and how they lie there. A plan has q, k and v in one
//! matrix, gate and up in another, all `[out, in]`, and those of all experts of a layer below each other; a Llama's file
//! has them apart, a mixture's every expert too, GPT-2's has q, k and v together but `[in, out]`, as its Conv1D multiplies.

use crate::error::{Cause, Result};
use crate::plan::Param;
use crate::spec::{COMPUTED, LlmSpec, Mlp, MtpSpec, Norm, Positions};
use std::ops::Range;

/// A tensor of a checkpoint: some rows of a weight of the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub name: String,
    /// The rows of the weight's first dim.
    pub rows: Range<usize>,
    /// Whether the checkpoint has it as `[in, out]`.
    pub transposed: bool,
}

impl Piece {
    /// The tensor's shape in the checkpoint.
    pub fn shape(&self, param: &Param) -> Vec<usize> {
        let mut shape: Vec<usize> = param.shape.iter().map(|&n| n as usize).collect();
        shape[0] = self.rows.len();
        if self.transposed {
            shape.reverse();
        }
        shape
    }

    /// Elements of a row of the weight.
    pub fn row(param: &Param) -> usize {
        param.shape[1..].iter().product::<u64>() as usize
    }
}

/// Whose names a checkpoint has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// A Llama's names, which are Mistral's and Qwen's too.
    Llama,
    /// A Llama with experts, by Mixtral's names.
    Mixtral,
    /// A Llama with experts, by the names of Qwen3's mixtures and DeepSeek's.
    Qwen3Moe,
    Gpt2,
}

impl Family {
    /// The family of a model's checkpoints. Errors: a model whose weights are neither read nor written, with what
    /// stands in the way.
    pub fn of(model: &LlmSpec) -> Result<Family> {
        let refused = |what: &str| {
            let known = COMPUTED.join(", ");
            let why = format!("{} has {what}; read and written are the layers of {known}", model.name);
            Err(Cause::Weights.infeasible(why))
        };
        if model.lfa || (model.mla.is_some() && model.moe.is_none()) {
            return refused("filters, or latent attention without experts");
        }
        if model.mtp.is_some() {
            return refused(
                "modules of multi-token prediction, whose weights are not read (--no-mtp trains without them)",
            );
        }
        if let Some(note) = model.notes.iter().find(|note| !note.starts_with(MtpSpec::LEFT_OUT)) {
            return refused(&format!("what is not computed ({note})"));
        }
        if let Some(what) = model.uncomputed.first() {
            return refused(&format!("{what} in its config.json, and what that changes is not computed"));
        }
        let placed = !model.dense_at.is_empty();
        if model.mla.is_none()
            && model.moe.is_some_and(|moe| moe.shared_ffn > 0 || moe.dense_layers > 0 || moe.every > 1 || placed)
        {
            return refused("experts that every token visits, or dense layers, and no latent attention");
        }
        if model.rope_scaled && model.rope_scaling.is_none() {
            return refused("scaled rotary frequencies that its plan has no word of (make the plan anew)");
        }
        match (model.norm, model.mlp, model.positions, model.parallel_block) {
            (Norm::Rms, Mlp::SwiGlu, Positions::Rope, false) => Ok(match model.moe {
                None => Family::Llama,
                Some(_) if model.qk_norm || model.mla.is_some() => Family::Qwen3Moe,
                Some(_) => Family::Mixtral,
            }),
            (Norm::Layer, Mlp::Gelu, Positions::Learned { .. }, false) => Ok(Family::Gpt2),
            _ => refused("layers of another family"),
        }
    }

    /// The tensors that make up a weight, in the order of its rows.
    pub fn pieces(self, model: &LlmSpec, param: &Param) -> Vec<Piece> {
        match self {
            Family::Llama => llama(model, param),
            Family::Mixtral => experts(model, param, &MIXTRAL),
            Family::Qwen3Moe => experts(model, param, &QWEN3_MOE),
            Family::Gpt2 => vec![gpt2(param)],
        }
    }
}

fn llama(model: &LlmSpec, param: &Param) -> Vec<Piece> {
    let (q, kv, f) = (model.q_cols(), model.kv_cols(), param.shape[0] / 2);
    let fused: [(&str, &[(&str, u64)]); 2] = [
        ("qkv_proj", &[("q_proj", q), ("k_proj", kv), ("v_proj", kv)]),
        ("gate_up_proj", &[("gate_proj", f), ("up_proj", f)]),
    ];
    let whole = [("", param.shape[0])];
    let found = fused.into_iter().find(|(ours, _)| param.name.contains(ours));
    let (ours, parts) = found.unwrap_or(("", &whole));
    let mut from = 0;
    let piece = |&(theirs, rows): &(&str, u64)| {
        let name = if ours.is_empty() { param.name.clone() } else { param.name.replace(ours, theirs) };
        from += rows as usize;
        Piece { name, rows: from - rows as usize..from, transposed: false }
    };
    parts.iter().map(piece).collect()
}

/// How a mixture's file calls the layer of experts, and an expert's gate, up and down.
struct Named {
    layer: &'static str,
    parts: [&'static str; 3],
}

const MIXTRAL: Named = Named { layer: "block_sparse_moe", parts: ["w1", "w3", "w2"] };
const QWEN3_MOE: Named = Named { layer: "mlp", parts: ["gate_proj", "up_proj", "down_proj"] };

fn experts(model: &LlmSpec, param: &Param, named: &Named) -> Vec<Piece> {
    let Some((layer, matrix)) = param.name.split_once("mlp.experts.") else {
        let name = param.name.replace("mlp.gate.", &format!("{}.gate.", named.layer));
        let renamed = |piece: Piece| Piece { name: piece.name.replace(&param.name, &name), ..piece };
        return llama(model, param).into_iter().map(renamed).collect();
    };
    let ([gate, up, down], moe) = (named.parts, model.moe.unwrap_or_default());
    let (parts, rows): (&[&str], u64) =
        if matrix.starts_with("gate_up_proj") { (&[gate, up], moe.ffn) } else { (&[down], model.hidden) };
    let pieces = (0..moe.experts).flat_map(|expert| parts.iter().map(move |part| (expert, part)));
    let piece = |(at, (expert, part)): (usize, (u64, &&str))| {
        let from = at * rows as usize;
        let name = format!("{layer}{}.experts.{expert}.{part}.weight", named.layer);
        Piece { name, rows: from..from + rows as usize, transposed: false }
    };
    pieces.enumerate().map(piece).collect()
}

/// Parts of GPT-2's names. What stands in Conv1D layers is stored `[in, out]`.
const GPT2: &[(&str, &str, bool)] = &[
    ("input_layernorm", "ln_1", false),
    ("post_attention_layernorm", "ln_2", false),
    ("self_attn.qkv_proj", "attn.c_attn", true),
    ("self_attn.o_proj", "attn.c_proj", true),
    ("mlp.up_proj", "mlp.c_fc", true),
    ("mlp.down_proj", "mlp.c_proj", true),
    ("model.norm", "transformer.ln_f", false),
    ("model.embed_tokens", "transformer.wte", false),
    ("model.embed_positions", "transformer.wpe", false),
];

fn gpt2(param: &Param) -> Piece {
    let name = param.name.replace("model.layers.", "transformer.h.");
    let found = GPT2.iter().find(|(ours, ..)| name.contains(ours));
    let (name, conv) = found.map_or((name.clone(), false), |(ours, theirs, conv)| (name.replace(ours, theirs), *conv));
    Piece { name, rows: 0..param.shape[0] as usize, transposed: conv && param.shape.len() == 2 }
}

/// What a router adds to its scores when it chooses, and only then; no gradient reaches it (DeepSeek-V3).
pub const ROUTER_BIAS: &str = "mlp.gate.e_score_correction_bias";

/// A tensor's name without the prefix that some files leave out.
pub fn bare(name: &str) -> &str {
    ["transformer.", "model."].iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}

/// The transpose of a matrix `[rows, cols]`.
pub fn transpose<T: Copy>(values: &[T], cols: usize) -> Vec<T> {
    let rows = values.len() / cols.max(1);
    (0..cols).flat_map(|c| (0..rows).map(move |r| values[r * cols + c])).collect()
}
