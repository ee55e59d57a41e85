//! Rings of every kind, and keys and values that are gathered in place of one.

use crate::case::{Case, case, holds, said};
use foretrain::plan::Dtype;
use foretrain::spec::{Parallelism, Recompute};

#[test]
fn a_ring_of_three_is_the_reference() {
    holds(&Case { par: Parallelism { ring: 3, ..case().par }, ..case() });
}

#[test]
fn a_ring_of_consecutive_parts() {
    let par = Parallelism { ring: 3, options: "contiguous".parse().unwrap(), ..case().par };
    holds(&Case { batch: 2, par, ..case() });
}

#[test]
fn rings_of_tokens_in_turn() {
    for (words, ring, ulysses) in [("stripe", 3, 1), ("stripe", 2, 2), ("stripe+gather-kv", 3, 1)] {
        let par = Parallelism { ring, ulysses, options: words.parse().unwrap(), ..case().par };
        holds(&Case { batch: 2, par, ..case() });
    }
}

/// Every choice of a ring, and two of them together, where ranks are odd, KV heads few and blocks masked.
#[test]
fn every_word_of_a_ring() {
    let words = "dkv-model burst kv-in-two merge-at-end merge-in-kernel dkv-model+merge-at-end+contiguous \
                 dkv-model+merge-in-kernel+stripe burst+merge-in-kernel burst+contiguous burst+merge-at-end+stripe \
                 kv-in-two+merge-at-end";
    for options in words.split_whitespace().map(|words| words.parse().unwrap()) {
        for (ring, ulysses) in [(2, 1), (3, 1), (5, 1), (2, 2)] {
            let par = Parallelism { ring, ulysses, options, ..case().par };
            holds(&Case { batch: 2, kv_heads: 1, group: 4, par, ..case() });
        }
    }
}

/// Inner rings of an outer one, in windows of 2 and 4, two windows and three.
#[test]
fn double_rings_are_the_reference() {
    for (words, ring, ulysses) in [
        ("double-ring-2", 4, 1),
        ("double-ring-2+stripe", 6, 1),
        ("double-ring-4+contiguous", 8, 1),
        ("double-ring-2+merge-in-kernel", 4, 2),
        ("double-ring-2+merge-at-end+kv-in-two", 4, 1),
        ("double-ring-2+ring-inside+one-comm", 6, 2),
    ] {
        let par = Parallelism { ring, ulysses, options: words.parse().unwrap(), ..case().par };
        holds(&Case { batch: 2, par, ..case() });
    }
}

#[test]
fn a_ring_inside_of_ulysses() {
    let par = Parallelism { dp: 2, ring: 3, ulysses: 2, options: "ring-inside".parse().unwrap(), ..case().par };
    holds(&Case { batch: 2, par, ..case() });
}

#[test]
fn all_kv_gathered_in_any_layout() {
    let orders = ["", "+contiguous", "+stripe"];
    for words in ["gather-kv", "gather-kv-prefetch"].iter().flat_map(|w| orders.map(|order| format!("{w}{order}"))) {
        for (batch, ring, ulysses) in [(1, 2, 1), (2, 3, 1), (1, 4, 1), (2, 2, 2)] {
            // Of KV heads there are 3 a rank.
            let model = Case { kv_heads: 3 * u64::from(ulysses), batch, ..said(&words, ring, ulysses) };
            holds(&model);
            let recompute = Recompute::Full;
            let par = Parallelism { dp: 2, zero: 1, recompute, ..model.par };
            holds(&Case { microbatches: 2, dtype: Dtype::F32, par, ..model });
        }
    }
}

#[test]
fn a_window_of_packed_documents_on_a_ring_and_on_ulysses() {
    for (ring, ulysses) in [(1, 1), (3, 1), (1, 2), (2, 2)] {
        let par = Parallelism { ring, ulysses, ..case().par };
        holds(&Case { par, window: Some(5), ..case() });
        holds(&Case { par, cuts: vec![0.1, 0.35, 0.8], ..case() });
        holds(&Case { par, window: Some(3), cuts: vec![0.4], batch: 2, ..case() });
    }
    // Every document is shared by all of the ring.
    for (words, ring, ulysses) in
        [("per-document", 3, 1), ("per-document+stripe", 2, 2), ("per-document+gather-kv", 2, 1)]
    {
        let par = Parallelism { ring, ulysses, options: words.parse().unwrap(), ..case().par };
        // Halves and quarters of eight parts for each rank of the ring.
        let seq_units = 8;
        holds(&Case { par, seq_units, cuts: vec![0.25, 0.5], window: Some(9), ..case() });
    }
    // Rings that stop where nobody sees further back.
    for words in ["contiguous", "contiguous+dkv-model", "contiguous+burst", "contiguous+merge-at-end"] {
        let par = Parallelism { ring: 3, options: words.parse().unwrap(), ..case().par };
        for (window, microbatches) in [(1, 1), (3, 2), (9, 1)] {
            holds(&Case { par, window: Some(window), microbatches, ..case() });
        }
    }
}
