//! What is taken in place of a part that a plan of this version refuses: as much work, said in the verdict.
//!
//! A line becomes idle, and can go, once plans have the part.

use crate::error::{Cause, Error, Reason};
use crate::published::split::Split;
use crate::published::split::options::with_words;
use crate::spec::{Fold, LlmSpec, Mlp, Positions};
use crate::strategy::feasible::IN_A_V;
use Fault::{Of, Word};

/// What a plan is refused for: a cause, whatever is at fault, or a word of `--options` that is.
enum Fault {
    Of(Cause),
    Word(&'static str),
}

/// A substitution: the faults that ask for it, what is said of it, and the change. Of all lines for a refusal the first counts
/// that changes anything.
struct Line {
    faults: &'static [Fault],
    said: &'static str,
    change: fn(&mut LlmSpec, &mut Split),
}

/// Where a cause has several lines, those of what is refused first stand first.
const LINES: &[Line] = &[
    Line {
        faults: &[Word("dualpipe-v")],
        said: "a pipeline that is not folded",
        change: |_, s| (s.par.options.fold, s.par.vp) = (Fold::None, 1),
    },
    Line {
        faults: &[Word(IN_A_V)],
        said: "a pipeline that is not in a V",
        change: |_, s| (s.par.options.fold, s.par.vp) = (Fold::None, 1),
    },
    // Attention is kept, and a network cut, where backward passes are in one piece.
    Line {
        faults: &[Of(Cause::Mtp), Word("zb-h1"), Word("keep-attention"), Word("mlp-chunks")],
        said: "a pipeline that does not halve its backward passes",
        change: |_, s| s.par.options.zb_h1 = false,
    },
    Line {
        faults: &[Of(Cause::Experts), Of(Cause::Mla)],
        said: "a block in sequence",
        change: |m, _| m.parallel_block = false,
    },
    Line { faults: &[Of(Cause::Experts), Of(Cause::Mla)], said: "no biases", change: without_biases },
    Line { faults: &[Of(Cause::Experts)], said: "SwiGLU of two thirds the width for GELU", change: swiglu },
    Line {
        faults: &[Of(Cause::Experts), Word("no-sp")],
        said: "activations that are not whole",
        change: |_, s| s.par.options.whole_activations = false,
    },
    // Before the next line: where both do not go together, it is this that goes.
    Line {
        faults: &[Word("recompute-moe")],
        said: "all computed again, not experts alone",
        change: |_, s| s.par.options.recompute_moe = false,
    },
    Line {
        faults: &[Of(Cause::Experts), Word("overlap-exchange"), Word("wait-passes"), Word("offload-activations")],
        said: "rows that travel beside no other microbatch",
        change: |_, s| s.par.options.overlap_exchange = false,
    },
    Line {
        faults: &[Of(Cause::Positions), Of(Cause::Mtp), Of(Cause::Mla)],
        said: "rotary positions",
        change: |m, _| (m.positions, m.rotary_dim) = (Positions::Rope, None),
    },
    Line { faults: &[Of(Cause::Mla)], said: "grouped queries with as much work for latent attention", change: grouped },
    Line { faults: &[Of(Cause::Model)], said: "no localized filtering", change: |m, _| m.lfa = false },
    Line { faults: &[Of(Cause::Batch)], said: "a batch that the replicas share evenly", change: even_batch },
    Line { faults: &[Of(Cause::Pp)], said: "stages as even as they can be", change: even_stages },
    // Full recomputation makes all of it again.
    Line {
        faults: &[Word("recompute-mla-up")],
        said: "all computed again, not what is projected up alone",
        change: |_, s| s.par.options.recompute_mla_up = false,
    },
    Line {
        faults: &[Word("recompute-mlp")],
        said: "all computed again, not networks alone",
        change: |_, s| s.par.options.recompute_mlp = false,
    },
    Line {
        faults: &[Word("keep-fp8")],
        said: "all computed again, not codes kept",
        change: |_, s| s.par.options.keep_fp8 = false,
    },
    Line {
        faults: &[Word("recompute-norm")],
        said: "all computed again, not norms alone",
        change: |_, s| s.par.options.recompute_norm = false,
    },
    Line {
        faults: &[Word("recompute-act")],
        said: "all computed again, not activations alone",
        change: |_, s| s.par.options.recompute_act = false,
    },
    Line {
        faults: &[Word("keep-attention")],
        said: "attention computed again with all else",
        change: |_, s| s.par.options.keep_attention = false,
    },
    Line { faults: &[Of(Cause::Vp)], said: "no interleaving", change: |_, s| s.par.vp = 1 },
    Line {
        faults: &[Of(Cause::Tp), Word("tp-overlap"), Word("mlp-chunks")],
        said: "no overlap within tensor parallelism",
        change: |_, s| s.par.options.tp_overlap = false,
    },
];

/// Experts go with biases of the projections before attention, latent attention with none.
fn without_biases(m: &mut LlmSpec, _: &mut Split) {
    if m.bias || m.mla.is_some() {
        (m.bias, m.qkv_bias) = (false, false);
    }
}

/// Three matrices of two thirds the width have the weights and FLOPs of two; 64 lets tensor parallelism cut it.
fn swiglu(m: &mut LlmSpec, _: &mut Split) {
    if m.mlp == Mlp::Gelu {
        (m.mlp, m.ffn) = (Mlp::SwiGlu, (2 * m.ffn / 3).next_multiple_of(64));
    }
}

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
/// the most interleaving for which there are layers. Without a pipeline there is nothing to even out.
fn even_stages(m: &mut LlmSpec, s: &mut Split) {
    let (layers, pp) = (m.layers, u64::from(s.par.pp));
    if pp == 1 {
        return;
    }
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

/// The nearest batch of whole micro-batches on every replica, where there is one for each.
fn even_batch(_: &mut LlmSpec, s: &mut Split) {
    let each = u64::from(s.par.dp) * s.micro_batch;
    if each > 0 && s.global_batch >= each {
        s.global_batch = (s.global_batch + each / 2) / each * each;
    }
}

impl Line {
    fn is_for(&self, why: &Reason) -> bool {
        self.faults.iter().any(|fault| match fault {
            Of(cause) => *cause == why.cause,
            Word(word) => why.word == Some(*word),
        })
    }
}

/// Changes what a refusal is about, and says how; `None` where nothing is known to take its place.
pub fn stand_in(refusal: &Error, model: &mut LlmSpec, split: &mut Split) -> Option<&'static str> {
    let Error::Infeasible(why) = refusal else { return None };
    let before = (model.clone(), split.clone());
    LINES.iter().filter(|line| line.is_for(why)).find_map(|line| {
        (line.change)(model, split);
        ((&*model, &*split) != (&before.0, &before.1)).then_some(line.said)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Dtype, MoeSpec, Options, Parallelism, Workload};
    use crate::strategy::feasible;

    fn split(par: Parallelism) -> Split {
        Split { seq: 2048, global_batch: 8, micro_batch: 1, par, unknown: vec![] }
    }

    fn model() -> LlmSpec {
        LlmSpec { layers: 2, ..LlmSpec::find("llama-3-8b").unwrap() }
    }

    /// What is said until nothing is refused any more; the last refusal where nothing stands in.
    fn taken(model: &mut LlmSpec, split: &mut Split) -> (Vec<&'static str>, Option<String>) {
        let mut all = vec![];
        loop {
            let (seq_len, global_batch, micro_batch) = (split.seq, split.global_batch, split.micro_batch);
            let work =
                Workload { seq_len, global_batch, micro_batch, dtype: Dtype::Bf16, documents: Default::default() };
            let Err(refusal) = feasible::check(model, &work, &split.par) else { return (all, None) };
            match stand_in(&refusal, model, split) {
                Some(said) => all.push(said),
                None => return (all, Some(refusal.to_string())),
            }
        }
    }

    #[test]
    fn what_stands_in_has_as_much_work() {
        let mut gpt = LlmSpec { ffn: 3072, mlp: Mlp::Gelu, bias: true, qkv_bias: true, ..model() };
        let flops = gpt.flops_per_token(2048);
        // Of a model without experts nothing is refused.
        assert_eq!(taken(&mut gpt, &mut split(Parallelism::default())), (vec![], None));
        let refusal = Cause::Experts.infeasible("not together with GELU");
        let mut said = || stand_in(&refusal, &mut gpt, &mut split(Parallelism::default()));
        assert_eq!(
            [said(), said(), said()],
            [Some("no biases"), Some("SwiGLU of two thirds the width for GELU"), None]
        );
        assert_eq!((gpt.flops_per_token(2048), gpt.mlp), (flops, Mlp::SwiGlu));
    }

    #[test]
    fn what_is_at_fault_goes_and_the_rest_stays() {
        let options: Options = "no-sp+tp-overlap+recompute-norm".parse().unwrap();
        let recompute = crate::spec::Recompute::Full;
        let mut cut = split(Parallelism { tp: 2, recompute, options, ..Parallelism::default() });
        let (said, left) = taken(&mut model(), &mut cut);
        assert_eq!(left, None);
        assert_eq!(said, ["no overlap within tensor parallelism", "all computed again, not norms alone"]);
        assert_eq!(cut.par.options.to_string(), "no-sp");
        let moe = MoeSpec { experts: 8, top_k: 2, ffn: 1024, ..MoeSpec::default() };
        let mut mixture = LlmSpec { moe: Some(moe), qkv_bias: true, ..model() };
        assert_eq!(taken(&mut mixture, &mut cut), (vec!["activations that are not whole"], None));
        assert!(mixture.qkv_bias);
        let options: Options = "overlap-exchange+recompute-moe".parse().unwrap();
        let mut beside = split(Parallelism { dp: 2, ep: 2, options, ..Parallelism::default() });
        assert_eq!(taken(&mut mixture, &mut beside), (vec!["all computed again, not experts alone"], None));
    }

    #[test]
    fn of_what_is_not_known_nothing_is_changed() {
        let too_few = split(Parallelism { dp: 16, ..Parallelism::default() });
        let mut cut = too_few.clone();
        let (said, left) = taken(&mut model(), &mut cut);
        assert!(said.is_empty() && left.unwrap().contains("is less than dp 16") && cut == too_few);
        let mut alone = split(Parallelism { vp: 2, ..Parallelism::default() });
        assert!(taken(&mut model(), &mut alone).1.unwrap().contains("vp 2 needs a pipeline"));
        assert_eq!(stand_in(&Error::plan("no sound one"), &mut model(), &mut cut), None);
    }

    #[test]
    fn words_are_those_of_options() {
        let words = LINES.iter().flat_map(|line| line.faults).filter_map(|fault| match fault {
            Word(word) => Some(*word).filter(|word| *word != IN_A_V),
            Of(_) => None,
        });
        for word in words {
            assert!(word.parse::<Options>().is_ok() || format!("{word}-4").parse::<Options>().is_ok(), "{word}");
        }
    }
}
