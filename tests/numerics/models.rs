//! Blocks and attention of every family of models, in layouts of the sequence, of heads and of stages.

use crate::case::{
    Case, Family, bloom, case, gpt2, gpt2_dropping, holds, latent, latent_keys, megascale, mpt, neox, palm, qwen2,
    qwen3,
};
use foretrain::plan::Dtype;
use foretrain::spec::{Parallelism, Recompute};

#[test]
fn blocks_of_every_family() {
    for family in [gpt2, gpt2_dropping, neox, megascale, qwen2, qwen3, palm] {
        for (tp, words) in [(1, "default"), (2, "default"), (2, "no-sp")] {
            let par = Parallelism { tp, options: words.parse().unwrap(), ..case().par };
            holds(&Case { family, tie: tp == 1, batch: 2, microbatches: 2, par, ..case() });
        }
        let (recompute, rest) = (Recompute::Full, Parallelism::default());
        let par = Parallelism { dp: 2, ring: 2, ulysses: 2, tp: 2, zero: 1, recompute, ..rest };
        holds(&Case { family, kv_heads: 4, par, ..case() });
    }
}

/// A slope of its own for every head, wherever the head and its keys are; heads that are no power of two.
#[test]
fn scores_lean_on_distance_in_every_layout() {
    let one = case().par;
    for (family, words, kv_heads, group, par) in [
        (bloom, "default", 3, 1, one),
        (mpt, "default", 2, 2, Parallelism { ring: 3, ulysses: 2, ..one }),
        (bloom, "stripe+merge-in-kernel", 6, 1, Parallelism { ring: 2, tp: 2, ..one }),
        (mpt, "dkv-model", 2, 3, Parallelism { ring: 3, dp: 2, zero: 1, ..one }),
        (bloom, "gather-kv", 4, 1, Parallelism { ring: 2, ulysses: 2, zero: 3, ..one }),
        (mpt, "a2a-separate+replicate-after", 1, 4, Parallelism { ulysses: 4, ..one }),
        (bloom, "burst", 4, 1, Parallelism { ring: 4, ..one }),
        (bloom, "unfused", 6, 1, Parallelism { tp: 2, ulysses: 3, pp: 2, recompute: Recompute::Selective, ..one }),
        (mpt, "no-sp", 2, 2, Parallelism { tp: 4, pp: 2, recompute: Recompute::Full, ..one }),
        (bloom, "fpdt-2", 4, 1, Parallelism { ulysses: 2, recompute: Recompute::Full, ..one }),
    ] as [(Family, _, _, _, _); 10]
    {
        let options: foretrain::spec::Options = words.parse().unwrap();
        let (par, batch) = (Parallelism { options, ..par }, if options.chunks > 0 { 1 } else { 2 });
        let case = Case { family, kv_heads, group, ffn: 12, batch, microbatches: 2, par, ..case() };
        holds(&case);
        holds(&Case { window: Some(5), cuts: vec![0.4], ..case.clone() });
        holds(&Case { dtype: Dtype::F32, ..case });
    }
}

/// Latent attention in every layout of the sequence and of the heads, in stages, in shares.
#[test]
fn latent_attention_is_the_reference_in_every_layout() {
    let one = Parallelism::default();
    for (words, par) in [
        ("default", one),
        ("default", Parallelism { ring: 3, ulysses: 2, ..one }),
        ("kv-in-two+merge-at-end", Parallelism { ring: 2, recompute: Recompute::Full, zero: 3, ..one }),
        ("burst+merge-in-kernel", Parallelism { ring: 3, dp: 2, zero: 1, ..one }),
        ("dkv-model", Parallelism { ring: 2, tp: 2, ..one }),
        ("double-ring-2", Parallelism { ring: 4, ..one }),
        ("gather-kv", Parallelism { ring: 2, ulysses: 2, zero: 2, ..one }),
        ("gather-kv-prefetch+contiguous", Parallelism { ring: 3, ..one }),
        ("a2a-separate", Parallelism { ulysses: 4, ..one }),
        ("pad-heads", Parallelism { ulysses: 3, ..one }),
        ("default", Parallelism { tp: 2, ulysses: 2, ..one }),
        ("no-sp", Parallelism { tp: 2, dp: 2, zero: 1, ..one }),
        ("tp-overlap", Parallelism { tp: 4, ..one }),
        ("default", Parallelism { tp: 2, pp: 2, vp: 2, zero: 1, recompute: Recompute::Full, ..one }),
        ("recompute-mla-up", Parallelism { zero: 3, dp: 2, ..one }),
        ("recompute-mla-up+tp-overlap", Parallelism { tp: 4, pp: 2, ..one }),
        ("recompute-mla-up+burst", Parallelism { ring: 3, tp: 2, ..one }),
        ("recompute-mla-up+gather-kv-prefetch+contiguous", Parallelism { ring: 2, ..one }),
        ("recompute-mla-up+zb-h1", Parallelism { pp: 2, ring: 2, ..one }),
    ] {
        for family in [latent, latent_keys] {
            let par = Parallelism { options: words.parse().unwrap(), ..par };
            let layers = 2 * u64::from(par.pp * par.vp);
            let case =
                Case { family, kv_heads: 4, group: 1, ffn: 12, layers, batch: 2, microbatches: 2, par, ..case() };
            holds(&case);
            holds(&Case { window: Some(5), cuts: vec![0.4], batch: 1, dtype: Dtype::F32, ..case });
        }
    }
}

/// Norms of heads in every layout of the sequence, in stages, in shares, and where all tokens are everywhere.
#[test]
fn queries_and_keys_are_normed_in_every_layout() {
    for (words, par) in [
        ("default", Parallelism { ring: 3, ulysses: 2, ..Parallelism::default() }),
        ("gather-kv", Parallelism { ring: 2, recompute: Recompute::Full, zero: 3, ..Parallelism::default() }),
        ("no-sp", Parallelism { tp: 2, dp: 2, zero: 2, ..Parallelism::default() }),
        ("tp-overlap", Parallelism { tp: 2, ..Parallelism::default() }),
        ("no-sp", Parallelism { tp: 2, pp: 2, zero: 1, ..Parallelism::default() }),
        ("unfused", Parallelism { pp: 2, vp: 2, recompute: Recompute::Selective, ..Parallelism::default() }),
    ] {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let layers = 2 * u64::from(par.pp * par.vp);
        holds(&Case { family: qwen3, kv_heads: 4, layers, batch: 2, microbatches: 2, par, ..case() });
    }
}
