//! Tensor parallelism, alone and inside everything else.

use crate::case::{Case, Family, case, gpt2, gpt2_dropping, holds, llama, megascale, neox, palm, qwen2, qwen3};
use foretrain::plan::Dtype;
use foretrain::spec::{Parallelism, Recompute};

/// The vocabulary of 29 comes out even over no number of ranks.
#[test]
fn tensor_parallel_ranks_are_the_reference() {
    for (tp, words) in [(2, "default"), (2, "no-sp"), (3, "default")] {
        for tie in [false, true] {
            let par = Parallelism { tp, options: words.parse().unwrap(), ..case().par };
            holds(&Case { kv_heads: u64::from(tp), ffn: 6, tie, batch: 2, microbatches: 2, par, ..case() });
        }
    }
}

#[test]
fn tensor_parallel_inside_everything_else() {
    let (recompute, rest) = (Recompute::Full, Parallelism::default());
    for words in ["default", "no-sp"] {
        let options = words.parse().unwrap();
        let par = Parallelism { dp: 2, ring: 2, ulysses: 2, tp: 2, zero: 1, recompute, options, ..rest };
        holds(&Case { kv_heads: 4, batch: 2, microbatches: 2, par, ..case() });
    }
}

/// Rows gathered and summed in chunks, whatever knows where a row of a share stands.
#[test]
fn tensor_parallel_in_chunks() {
    for (family, tp) in [(llama, 2), (gpt2_dropping, 2), (palm, 3), (neox, 4)] as [(Family, _); 4] {
        let par = Parallelism { tp, options: "tp-overlap".parse().unwrap(), ..case().par };
        let of = Case { family, kv_heads: u64::from(tp), ffn: 12, seq_units: 4, par, ..case() };
        holds(&Case { batch: 2, microbatches: 2, ..of.clone() });
        let recompute = Recompute::Full;
        holds(&Case { par: Parallelism { dp: 2, ring: 2, zero: 1, recompute, ..par }, ..of.clone() });
        holds(&Case { par: Parallelism { pp: 2, ..par }, microbatches: 2, ..of });
    }
}

/// Fewer KV heads than tensor-parallel ranks: neighbours have the same one, and sum what they found for it.
#[test]
fn kv_heads_on_several_tensor_parallel_ranks() {
    let one = case().par;
    for (family, words, tp, kv_heads, group, par) in [
        (llama, "default", 2, 1, 2, one),
        (qwen2, "no-sp", 4, 2, 2, Parallelism { dp: 2, ..one }),
        (qwen3, "tp-overlap", 4, 1, 8, Parallelism { dp: 2, zero: 1, ..one }),
        (gpt2_dropping, "default", 4, 2, 4, Parallelism { zero: 2, dp: 2, ..one }),
        (neox, "default", 6, 2, 3, Parallelism { pp: 2, recompute: Recompute::Full, ..one }),
        (qwen2, "default", 4, 2, 4, Parallelism { zero: 3, dp: 2, pp: 2, ..one }),
        (llama, "a2a-separate", 4, 2, 4, Parallelism { ulysses: 2, ring: 2, zero: 1, ..one }),
        (megascale, "add-grads+no-overlap-grad", 4, 2, 2, Parallelism { dp: 2, zero: 1, ..one }),
    ] as [(Family, _, _, _, _, _); 8]
    {
        let par = Parallelism { tp, options: words.parse().unwrap(), ..par };
        let case = Case { family, kv_heads, group, ffn: 12, microbatches: 2, par, ..case() };
        holds(&case);
        holds(&Case { batch: 2, dtype: Dtype::F32, ..case });
    }
}

/// Weights that every tensor-parallel rank has whole, learned positions among them, are summed over these ranks
/// before the data ranks share the sum out.
#[test]
fn shared_weights_under_every_stage_of_zero() {
    for zero in 0..=3 {
        let par = Parallelism { tp: 3, ulysses: 2, zero, recompute: Recompute::Full, ..Parallelism::default() };
        holds(&Case { family: gpt2, kv_heads: 6, ffn: 21, par, ..case() });
    }
}
