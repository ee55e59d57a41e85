//! What is made again for the backward pass, or piece by piece.

use crate::case::{Case, Family, case, gpt2, gpt2_dropping, holds, latent, llama, neox, palm, said};
use crate::dense::run;
use foretrain::plan::Dtype;
use foretrain::spec::{Parallelism, Recompute};

/// Scores in memory, kept or computed again, whatever shares out the heads and whatever masks.
#[test]
fn unfused_attention_is_the_reference() {
    let ways = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)];
    for (family, recompute) in [(llama, Recompute::None), (gpt2_dropping, Recompute::Selective)] as [(Family, _); 2] {
        for (tp, ulysses, dp) in ways {
            let par = Parallelism { tp, ulysses, dp, recompute, ..said("unfused", 1, 1).par };
            let case = Case { family, kv_heads: 4, microbatches: 2, par, ..case() };
            holds(&Case { batch: 2, ..case.clone() });
            holds(&Case { window: Some(3), ..case.clone() });
            holds(&Case { cuts: vec![0.3, 0.7], kv_heads: 2 * u64::from(tp), ..case });
        }
    }
    for recompute in Recompute::ALL {
        let par = Parallelism { recompute, pp: 2, ..said("unfused", 1, 1).par };
        holds(&Case { family: gpt2_dropping, microbatches: 3, par, ..case() });
    }
}

/// A fused kernel of attention may run again as well, for nothing, however its keys are reached.
#[test]
fn fused_attention_again() {
    let par = |words: &str, [tp, ring, ulysses, pp]: [u32; 4]| Parallelism {
        recompute: Recompute::Selective,
        options: words.parse().unwrap(),
        ..Parallelism { tp, ring, ulysses, pp, ..Parallelism::default() }
    };
    for par in [
        par("default", [2, 1, 2, 1]),
        par("default", [1, 3, 1, 2]),
        par("gather-kv", [1, 2, 1, 1]),
        par("dkv-model", [1, 3, 1, 1]),
        Parallelism { dp: 2, zero: 3, ..par("default", [1, 1, 1, 1]) },
        par("zb-h1", [1, 1, 1, 2]),
    ] {
        holds(&Case { kv_heads: 4, microbatches: 2, batch: 2, par, ..case() });
    }
}

/// Attention whose output is kept where layers are computed again: to the bit what it is where attention runs twice.
#[test]
fn attention_that_runs_once() {
    let full = Recompute::Full;
    for (family, words, par) in [
        (llama as Family, "", Parallelism { dp: 2, zero: 3, ..Parallelism::default() }),
        (llama, "", Parallelism { ring: 2, ulysses: 2, ..Parallelism::default() }),
        (llama, "burst+merge-at-end", Parallelism { ring: 3, zero: 1, dp: 2, ..Parallelism::default() }),
        (llama, "merge-in-kernel", Parallelism { ring: 4, ..Parallelism::default() }),
        (llama, "gather-kv-prefetch", Parallelism { ring: 2, tp: 2, ..Parallelism::default() }),
        (llama, "", Parallelism { tp: 2, pp: 2, ..Parallelism::default() }),
        (llama, "dualpipe-v", Parallelism { pp: 2, vp: 2, ..Parallelism::default() }),
        (llama, "", Parallelism { pp: 2, vp: 2, ..Parallelism::default() }),
        (gpt2, "", Parallelism { ulysses: 2, ..Parallelism::default() }),
        (palm, "", Parallelism { tp: 2, ..Parallelism::default() }),
        (latent, "", Parallelism { tp: 2, ring: 2, ..Parallelism::default() }),
    ] {
        let of = |more: &str| {
            let words = format!("{words}{}{more}", if words.is_empty() || more.is_empty() { "" } else { "+" });
            let par = Parallelism { options: words.parse().unwrap(), recompute: full, ..par };
            let layers = 2 * u64::from(par.pp * par.vp);
            Case { family, kv_heads: 6, group: 1, ffn: 12, layers, batch: 2, microbatches: 4, par, ..case() }
        };
        holds(&of("keep-attention"));
        let [twice, once] = ["", "keep-attention"].map(|more| run(&Case { dtype: Dtype::F32, ..of(more) }.plan()));
        assert_eq!((twice.loss, twice.grads), (once.loss, once.grads), "{words} {par:?}");
    }
}

/// What norms and activations leave made again for the backward pass, and logits a few tokens at a time: to the bit what is
/// kept, but for the order in which a table's gradient is summed.
#[test]
fn what_is_made_again_or_piece_by_piece() {
    let (none, selective) = (Recompute::None, Recompute::Selective);
    for (family, words, recompute, par) in [
        (llama as Family, "recompute-act", none, Parallelism { dp: 2, zero: 3, ..Parallelism::default() }),
        (llama, "recompute-norm", none, Parallelism { ring: 2, ulysses: 2, ..Parallelism::default() }),
        (llama, "recompute-act+recompute-norm", none, Parallelism { tp: 2, pp: 2, ..Parallelism::default() }),
        (llama, "recompute-act+recompute-norm+tp-overlap", selective, Parallelism { tp: 2, ..Parallelism::default() }),
        (llama, "recompute-act+recompute-norm+zb-h1", none, Parallelism { pp: 2, dp: 2, ..Parallelism::default() }),
        (llama, "recompute-act+recompute-norm+v-half", none, Parallelism { pp: 2, vp: 2, ..Parallelism::default() }),
        (gpt2, "recompute-act+recompute-norm+no-sp", none, Parallelism { tp: 3, ..Parallelism::default() }),
        (palm, "recompute-act+recompute-norm", none, Parallelism { tp: 2, zero: 1, ..Parallelism::default() }),
        (neox, "recompute-norm+recompute-act", none, Parallelism { tp: 2, ..Parallelism::default() }),
        (llama, "recompute-mlp", none, Parallelism { dp: 2, zero: 3, ..Parallelism::default() }),
        (llama, "recompute-mlp+recompute-norm+tp-overlap", selective, Parallelism { tp: 2, ..Parallelism::default() }),
        (llama, "recompute-mlp+recompute-act", none, Parallelism { pp: 2, ..Parallelism::default() }),
        (gpt2, "recompute-mlp+no-sp", none, Parallelism { tp: 3, ..Parallelism::default() }),
        (latent, "recompute-mlp", none, Parallelism { tp: 2, ring: 2, ..Parallelism::default() }),
        (latent, "recompute-norm+recompute-mla-up", none, Parallelism { tp: 2, ring: 2, ..Parallelism::default() }),
    ] {
        let of = |words: &str| {
            let par = Parallelism { options: words.parse().unwrap(), recompute, ..par };
            let layers = 2 * u64::from(par.pp * par.vp);
            Case { family, kv_heads: 6, group: 1, ffn: 12, layers, batch: 2, microbatches: 3, par, ..case() }
        };
        holds(&of(words));
        let again = ["recompute-act", "recompute-norm", "recompute-mlp"];
        let rest = words.split('+').filter(|word| !again.contains(word));
        let rest: Vec<&str> = rest.collect();
        let [kept, again] = [&rest.join("+"), words].map(|words| run(&Case { dtype: Dtype::F32, ..of(words) }.plan()));
        assert_eq!((kept.loss, kept.grads), (again.loss, again.grads), "{words}");
    }
    for (words, tie, par) in [
        ("loss-chunks-2", false, Parallelism { dp: 2, zero: 1, ..Parallelism::default() }),
        ("loss-chunks-5", true, Parallelism { tp: 2, ring: 2, ..Parallelism::default() }),
        ("loss-chunks-7+wide-loss+add-grads+no-sp", false, Parallelism { tp: 2, pp: 2, ..Parallelism::default() }),
        ("loss-chunks-3+wide-loss", false, Parallelism { dp: 2, zero: 1, ..Parallelism::default() }),
        ("loss-chunks-3+zb-h1", true, Parallelism { pp: 2, ..Parallelism::default() }),
        ("loss-chunks-8", false, Parallelism { ulysses: 2, zero: 3, ..Parallelism::default() }),
    ] {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let layers = 2 * u64::from(par.pp);
        holds(&Case { layers, microbatches: 2, kv_heads: 2, tie, par, ..case() });
    }
}

/// Networks piece by piece: against the dense reference, with pieces that do not come out even and as many of them as rows.
#[test]
fn networks_in_pieces() {
    let (none, full) = (Recompute::None, Recompute::Full);
    for (family, words, recompute, par) in [
        (llama as Family, "mlp-chunks-2", none, Parallelism { dp: 2, zero: 1, ..Parallelism::default() }),
        (llama, "mlp-chunks-5+add-grads", none, Parallelism { tp: 2, ring: 2, ..Parallelism::default() }),
        (llama, "mlp-chunks-3+no-sp", full, Parallelism { tp: 2, pp: 2, ..Parallelism::default() }),
        (llama, "mlp-chunks-3+loss-chunks-3", full, Parallelism { ulysses: 2, zero: 3, ..Parallelism::default() }),
        (llama, "mlp-chunks-16+recompute-act", none, Parallelism { ulysses: 2, dp: 2, ..Parallelism::default() }),
        (llama, "mlp-chunks-4+recompute-norm", none, Parallelism { ring: 3, zero: 2, ..Parallelism::default() }),
        (gpt2, "mlp-chunks-3", none, Parallelism { tp: 2, ..Parallelism::default() }),
        (latent, "mlp-chunks-3", full, Parallelism { tp: 2, ..Parallelism::default() }),
    ] {
        let par = Parallelism { options: words.parse().unwrap(), recompute, ..par };
        let layers = 2 * u64::from(par.pp);
        holds(&Case { family, kv_heads: 6, group: 1, ffn: 12, layers, batch: 2, microbatches: 2, par, ..case() });
    }
}
