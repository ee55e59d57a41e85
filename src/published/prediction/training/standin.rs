//! What is taken in place of a part that a plan of this version refuses: as much work, said in the verdict.
//!
//! A line becomes idle, and can go, once plans have the part.

use crate::published::split::Split;
use crate::published::split::options::with_words;
use crate::spec::{Fold, LlmSpec, Mlp, Positions};

/// A substitution: the word of the refusal that asks for it, what is said of it, and the change.
struct Line {
    refusal: &'static str,
    said: &'static str,
    change: fn(&mut LlmSpec, &mut Split),
}

const LINES: &[Line] = &[
    Line {
        refusal: "options: dualpipe-v",
        said: "a pipeline that is not folded",
        change: |_, s| (s.par.options.fold, s.par.vp) = (Fold::None, 1),
    },
    Line {
        refusal: "a pipeline in a V",
        said: "a pipeline that is not in a V",
        change: |_, s| (s.par.options.fold, s.par.vp) = (Fold::None, 1),
    },
    Line {
        refusal: "zb-h1",
        said: "a pipeline that does not halve its backward passes",
        change: |_, s| s.par.options.zb_h1 = false,
    },
    // Three matrices of two thirds the width have the weights and FLOPs of two; 64 lets tensor parallelism cut it.
    Line {
        refusal: "GELU",
        said: "SwiGLU of two thirds the width for GELU",
        change: |m, _| (m.mlp, m.ffn) = (Mlp::SwiGlu, (2 * m.ffn / 3).next_multiple_of(64)),
    },
    Line {
        refusal: "positions",
        said: "rotary positions",
        change: |m, _| (m.positions, m.rotary_dim) = (Positions::Rope, None),
    },
    Line { refusal: "biases", said: "no biases", change: |m, _| (m.bias, m.qkv_bias) = (false, false) },
    Line { refusal: "dropout", said: "no dropout", change: |m, _| m.dropout = 0.0 },
    Line { refusal: "parallel block", said: "a block in sequence", change: |m, _| m.parallel_block = false },
    Line {
        refusal: "latent attention",
        said: "grouped queries with as much work for latent attention",
        change: grouped,
    },
    Line { refusal: "localized filtering", said: "no localized filtering", change: |m, _| m.lfa = false },
    Line {
        refusal: "zero: ",
        said: "one stage of ZeRO less",
        change: |_, s| s.par.zero = s.par.zero.saturating_sub(1),
    },
    Line { refusal: "is not a multiple of dp", said: "a batch that the replicas share evenly", change: even_batch },
    Line { refusal: "do not split evenly", said: "stages as even as they can be", change: even_stages },
    // Full recomputation makes all of it again.
    Line {
        refusal: "recompute-mla-up",
        said: "all computed again, not what is projected up alone",
        change: |_, s| s.par.options.recompute_mla_up = false,
    },
    Line {
        refusal: "recompute-norm needs",
        said: "all computed again, not norms alone",
        change: |_, s| s.par.options.recompute_norm = false,
    },
    Line {
        refusal: "recompute-act needs",
        said: "all computed again, not activations alone",
        change: |_, s| s.par.options.recompute_act = false,
    },
    Line {
        refusal: "keep-attention needs",
        said: "attention computed again with all else",
        change: |_, s| s.par.options.keep_attention = false,
    },
    Line {
        refusal: "recompute-moe",
        said: "all computed again, not experts alone",
        change: |_, s| s.par.options.recompute_moe = false,
    },
    Line { refusal: "vp: ", said: "no interleaving", change: |_, s| s.par.vp = 1 },
    Line {
        refusal: "tp-overlap",
        said: "no overlap within tensor parallelism",
        change: |_, s| s.par.options.tp_overlap = false,
    },
    Line {
        refusal: "overlap-exchange",
        said: "rows that travel beside no other microbatch",
        change: |_, s| s.par.options.overlap_exchange = false,
    },
    Line {
        refusal: "no-sp",
        said: "activations that are not whole",
        change: |_, s| s.par.options.whole_activations = false,
    },
];

/// As many heads as latent attention has work, eight of which share keys and values.
fn grouped(m: &mut LlmSpec, s: &mut Split) {
    let Some(_) = m.mla else { return };
    let work = m.flops_per_token(s.seq);
    let with = |heads: u64| LlmSpec { heads, kv_heads: heads / 8, head_dim: 128, mla: None, ..m.clone() };
    let far = |heads: &u64| (with(*heads).flops_per_token(s.seq) - work).abs();
    let unit = 8 * u64::from(s.par.tp);
    let heads = (1..=m.heads.max(unit) * 2 / unit).map(|n| n * unit).min_by(|a, b| far(a).total_cmp(&far(b)));
    *m = with(heads.unwrap_or(unit));
}

/// Embedding and head counted as a layer each if need be; else stages of as many layers as any other, or one fewer, with
/// the most interleaving for which there are layers.
fn even_stages(m: &mut LlmSpec, s: &mut Split) {
    let (layers, pp) = (m.layers, u64::from(s.par.pp));
    let (short, _) = with_words(s.par.options, &["short-ends"]);
    if (layers + 2).is_multiple_of(pp * u64::from(s.par.vp)) && short != s.par.options {
        s.par.options = short;
        return;
    }
    s.par.vp = s.par.vp.min((layers / pp).max(1) as u32);
    match layers < pp {
        true => m.layers = pp,
        false => s.par.options.uneven = true,
    }
}

/// The nearest batch of whole micro-batches on every replica.
fn even_batch(_: &mut LlmSpec, s: &mut Split) {
    let each = u64::from(s.par.dp) * s.micro_batch;
    s.global_batch = ((s.global_batch + each / 2) / each).max(1) * each;
}

/// Changes what a refusal is about, and says how; `None` where nothing is known to take its place.
pub fn stand_in(refusal: &str, model: &mut LlmSpec, split: &mut Split) -> Option<&'static str> {
    let before = (model.clone(), split.clone());
    LINES.iter().filter(|line| refusal.contains(line.refusal)).find_map(|line| {
        (line.change)(model, split);
        ((&*model, &*split) != (&before.0, &before.1)).then_some(line.said)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Parallelism;

    #[test]
    fn what_stands_in_has_as_much_work() {
        let par = Parallelism { zero: 3, ..Parallelism::default() };
        let mut split = Split { seq: 2048, global_batch: 1, micro_batch: 1, par, unknown: vec![] };
        let mut model = LlmSpec { hidden: 1024, layers: 2, heads: 8, kv_heads: 8, head_dim: 128, ..LlmSpec::default() };
        (model.ffn, model.mlp, model.vocab) = (3072, Mlp::Gelu, 1000);
        let flops = model.flops_per_token(2048);
        assert!(stand_in("model: GPT has GELU, which no plan has", &mut model, &mut split).is_some());
        assert_eq!((model.flops_per_token(2048), model.mlp), (flops, Mlp::SwiGlu));
        assert!(stand_in("zero: stage 3 is not there", &mut model, &mut split).is_some());
        assert_eq!(split.par.zero, 2);
        // Of what a model has not there is nothing to change.
        assert_eq!(stand_in("model: GPT has dropout", &mut model, &mut split), None);
    }
}
