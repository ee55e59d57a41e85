//! Exchanges of heads (Ulysses).

use crate::case::{Case, case, holds, said};
use crate::dense::run;
use foretrain::plan::Dtype;
use foretrain::spec::{Parallelism, Recompute};

#[test]
fn ulysses_with_more_ranks_than_kv_heads() {
    let par = Parallelism { ulysses: 8, ..case().par };
    holds(&Case { group: 4, batch: 2, par, ..case() });
}

#[test]
fn every_way_to_exchange_heads() {
    // (words, ulysses, KV heads, query heads of each)
    let ways = [
        ("a2a-separate", 4, 4, 2),
        ("a2a-separate", 4, 1, 4),
        ("replicate-after", 4, 2, 2),
        ("replicate-after+a2a-separate", 4, 1, 8),
        ("pad-heads", 4, 3, 1),
        ("pad-heads", 4, 2, 3),
        ("pad-heads+replicate-after+a2a-separate", 8, 3, 3),
        ("pad-heads+gather-kv-prefetch", 2, 3, 1),
        ("a2a-separate+replicate-after+ring-inside", 2, 1, 2),
    ];
    for (i, (words, ulysses, kv_heads, group)) in ways.into_iter().enumerate() {
        let ring = if words.contains("gather") || words.contains("ring") { 2 } else { 1 };
        let batch = 1 + i as u64 % 2;
        let model = Case { kv_heads, group, batch, ..said(words, ring, ulysses) };
        holds(&model);
        let par = Parallelism { zero: 1, recompute: Recompute::Full, ..model.par };
        holds(&Case { microbatches: 2, dtype: Dtype::F32, par, ..model.clone() });
        // Tensor-parallel ranks have as many heads each.
        let par = Parallelism { tp: 2, ..model.par };
        holds(&Case { kv_heads: 2 * kv_heads, ffn: 4, par, ..model });
    }
}

/// Ulysses runs the same kernel on the same rows, so its hidden states are the single rank's to the bit.
#[test]
fn ulysses_is_bit_identical_to_one_rank() {
    let alone = run(&Case { seq_units: 4, dtype: Dtype::F32, ..case() }.plan());
    for words in ["default", "a2a-separate"] {
        let split = run(&Case { seq_units: 2, dtype: Dtype::F32, ..said(words, 1, 2) }.plan());
        assert_eq!(alone.hidden, split.hidden, "{words}");
    }
    for words in ["default", "replicate-after", "replicate-after+a2a-separate"] {
        let split = run(&Case { seq_units: 1, dtype: Dtype::F32, ..said(words, 1, 4) }.plan());
        assert_eq!(alone.hidden, split.hidden, "{words}, two ranks a KV head");
    }
    let odd = Case { kv_heads: 3, dtype: Dtype::F32, ..case() };
    let padded = Case { seq_units: 1, par: said("pad-heads", 1, 4).par, ..odd.clone() };
    assert_eq!(run(&odd.plan()).hidden, run(&padded.plan()).hidden, "zeros change nothing");
}
