//! Pipelines of every schedule.

use crate::case::{
    Case, Family, bloom, case, gpt2_dropping, holds, latent, latent_keys, llama, megascale, mpt, neox, palm, qwen2,
    qwen3,
};
use foretrain::plan::Dtype;
use foretrain::spec::{Parallelism, Recompute};

#[test]
fn a_pipeline_of_stages() {
    for (pp, vp, layers, microbatches, zero, recompute, tie) in [
        (2, 1, 2, 1, 0, Recompute::None, false),
        (2, 1, 4, 5, 0, Recompute::None, true),
        (3, 1, 6, 4, 0, Recompute::Full, false),
        (4, 1, 12, 3, 1, Recompute::None, true),
        (2, 2, 4, 4, 0, Recompute::None, false),
        (3, 2, 12, 6, 1, Recompute::Full, true),
        (2, 3, 18, 4, 1, Recompute::None, true),
    ] {
        let par = Parallelism { pp, vp, zero, recompute, ..case().par };
        holds(&Case { layers, microbatches, tie, par, ..case() });
    }
}

#[test]
fn a_pipeline_with_every_other_degree() {
    for (pp, vp, layers, microbatches, words) in [
        (2, 1, 4, 3, ""),
        (2, 1, 4, 3, "no-overlap-p2p+no-overlap-grad"),
        (2, 2, 8, 2, "no-overlap-p2p"),
        (2, 2, 8, 2, ""),
        (2, 1, 4, 2, "short-ends"),
        (2, 2, 10, 2, "short-ends"),
        // Embedding and head in chunks of their own, beside layers on the same stage and without any.
        (2, 2, 2, 4, "short-ends"),
        (3, 1, 1, 4, "short-ends+no-overlap-grad"),
        (4, 1, 2, 3, "short-ends+no-overlap-p2p"),
        (3, 1, 4, 2, "uneven"),
        (2, 2, 7, 2, "uneven+short-ends"),
        (3, 1, 5, 4, "first-stage-1+last-stage-1"),
        (2, 2, 6, 2, "last-stage-2"),
    ] {
        let options: foretrain::spec::Options = words.parse().unwrap();
        let par = Parallelism { pp, vp, dp: 2, ring: 2, ulysses: 2, zero: 1, options, ..case().par };
        holds(&Case { layers, microbatches, batch: 2, par, tie: true, ..case() });
    }
}

#[test]
fn a_pipeline_of_tensor_parallel_stages() {
    for (pp, vp, words) in [
        (2, 1, "default"),
        (2, 2, "default"),
        (3, 1, "no-sp"),
        (3, 1, "no-sp+scatter-p2p"),
        (2, 2, "no-sp+scatter-p2p+no-overlap-p2p"),
        (4, 1, "no-sp+scatter-p2p+no-overlap-p2p+short-ends+uneven"),
        (2, 2, "no-sp+scatter-p2p+dualpipe-v"),
        (2, 1, "no-sp+scatter-p2p+zb-h1"),
    ] {
        let par = Parallelism { pp, vp, tp: 2, dp: 2, zero: 1, options: words.parse().unwrap(), ..case().par };
        let layers = 2 * u64::from(pp * vp);
        holds(&Case { layers, ffn: 6, microbatches: 4, batch: 2, tie: true, par, ..case() });
    }
}

/// Stages that are neighbours, replicas going across nodes.
#[test]
fn a_pipeline_inside_of_replicas() {
    let one = case().par;
    for (words, layers, microbatches, par) in [
        ("default", 2, 3, Parallelism { pp: 2, dp: 2, ..one }),
        ("no-overlap-p2p", 6, 4, Parallelism { pp: 3, dp: 2, tp: 2, zero: 1, ..one }),
        ("default", 4, 4, Parallelism { pp: 2, vp: 2, dp: 3, ring: 2, ulysses: 2, zero: 1, ..one }),
        ("ring-inside", 2, 2, Parallelism { pp: 2, dp: 2, ring: 2, ulysses: 2, zero: 2, ..one }),
        ("shard-2", 2, 2, Parallelism { pp: 2, dp: 4, tp: 2, zero: 3, ..one }),
        ("zb-h1", 4, 4, Parallelism { pp: 2, dp: 2, tp: 2, ..one }),
        ("dualpipe-v", 8, 4, Parallelism { pp: 2, vp: 2, dp: 2, zero: 1, ..one }),
    ] {
        let options = format!("{words}+pp-inside").parse().unwrap();
        let par = Parallelism { options, ..par };
        holds(&Case { layers, microbatches, ffn: 12, kv_heads: 4, batch: 2, tie: true, par, ..case() });
    }
}

/// Gradients of weights made apart from those of inputs, and later (ZB-H1), of every block and beside every degree.
#[test]
fn gradients_of_weights_come_later() {
    let one = case().par;
    for (family, words, tie, layers, microbatches, par) in [
        (llama, "default", false, 2, 1, Parallelism { pp: 2, ..one }),
        (llama, "default", true, 6, 5, Parallelism { pp: 3, dp: 2, zero: 1, ..one }),
        (llama, "no-overlap-grad+no-overlap-p2p", true, 4, 3, Parallelism { pp: 4, ..one }),
        (gpt2_dropping, "unfused", false, 4, 3, Parallelism { pp: 2, recompute: Recompute::Selective, ..one }),
        (qwen3, "default", false, 4, 4, Parallelism { pp: 2, tp: 2, dp: 2, ..one }),
        (palm, "tp-overlap", false, 4, 3, Parallelism { pp: 2, tp: 2, ..one }),
        (neox, "no-sp+add-grads", true, 4, 3, Parallelism { pp: 2, tp: 2, ..one }),
        (megascale, "add-grads", false, 4, 3, Parallelism { pp: 4, zero: 1, dp: 2, ..one }),
        (bloom, "default", false, 3, 4, Parallelism { pp: 3, ulysses: 2, ring: 2, ..one }),
        (latent, "default", false, 4, 4, Parallelism { pp: 2, ring: 2, dp: 2, zero: 1, ..one }),
        (latent_keys, "default", true, 6, 3, Parallelism { pp: 3, ulysses: 2, tp: 2, ..one }),
        (qwen2, "short-ends", false, 4, 5, Parallelism { pp: 3, tp: 2, ..one }),
        (mpt, "first-stage-0+last-stage-0", true, 4, 4, Parallelism { pp: 3, ..one }),
    ] as [(Family, _, _, _, _, _); 13]
    {
        let options = format!("{words}+zb-h1").parse().unwrap();
        let par = Parallelism { options, ..par };
        let case = Case { family, tie, layers, microbatches, kv_heads: 4, ffn: 12, par, ..case() };
        holds(&case);
        holds(&Case { batch: 2, dtype: Dtype::F32, ..case });
    }
}

/// Layers that are computed again before the first half of their backward pass, and kept for the second.
#[test]
fn gradients_of_weights_come_later_of_what_is_computed_again() {
    let one = Parallelism { recompute: Recompute::Full, ..case().par };
    for (family, words, tie, layers, microbatches, par) in [
        (llama, "zb-h1", true, 6, 5, Parallelism { pp: 3, dp: 2, zero: 1, ..one }),
        (gpt2_dropping, "zb-h1+unfused", false, 4, 3, Parallelism { pp: 2, ..one }),
        (qwen3, "zb-h1", false, 4, 4, Parallelism { pp: 2, tp: 2, dp: 2, ..one }),
        (latent, "zb-h1", false, 4, 4, Parallelism { pp: 2, ring: 2, ..one }),
        (bloom, "zb-v", false, 6, 4, Parallelism { pp: 3, vp: 2, ulysses: 2, ..one }),
        (palm, "v-half+tp-overlap", false, 4, 5, Parallelism { pp: 2, vp: 2, tp: 2, ..one }),
        (llama, "zb-h1+tp-overlap", false, 4, 3, Parallelism { pp: 2, tp: 2, ..one }),
    ] as [(Family, _, _, _, _, _); 7]
    {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let case = Case { family, tie, layers, microbatches, kv_heads: 4, ffn: 12, par, ..case() };
        holds(&case);
        holds(&Case { batch: 2, dtype: Dtype::F32, ..case });
    }
}

/// Two chunks a stage, folded in the middle: some gradients of weights come later, and the last stage hands over to itself.
#[test]
fn a_pipeline_that_is_folded() {
    let one = Parallelism { vp: 2, ..case().par };
    for (family, words, tie, layers, microbatches, par) in [
        (llama, "default", true, 4, 4, Parallelism { pp: 2, ..one }),
        (qwen3, "default", false, 8, 5, Parallelism { pp: 2, tp: 2, dp: 2, zero: 1, ..one }),
        (llama, "no-overlap-grad+uneven", true, 8, 7, Parallelism { pp: 3, ..one }),
        (latent, "uneven", false, 9, 6, Parallelism { pp: 3, ring: 2, ..one }),
        (gpt2_dropping, "unfused", false, 4, 4, Parallelism { pp: 2, recompute: Recompute::Selective, ..one }),
        (bloom, "short-ends", false, 10, 6, Parallelism { pp: 3, ulysses: 2, dp: 2, ..one }),
        (llama, "default", false, 8, 9, Parallelism { pp: 4, recompute: Recompute::Full, ..one }),
        (llama, "first-stage-1+last-stage-3", true, 8, 5, Parallelism { pp: 2, dp: 2, ..one }),
    ] as [(Family, _, _, _, _, _); 8]
    {
        let options = format!("{words}+dualpipe-v").parse().unwrap();
        let par = Parallelism { options, ..par };
        let case = Case { family, tie, layers, microbatches, kv_heads: 4, ffn: 12, par, ..case() };
        holds(&case);
        holds(&Case { batch: 2, dtype: Dtype::F32, ..case });
    }
}

/// Two chunks a stage in a V, every backward pass in two halves, with fewer microbatches than fill it, and with more.
#[test]
fn pipelines_in_a_v_are_the_reference() {
    let one = Parallelism { vp: 2, ..case().par };
    for (family, words, tie, layers, microbatches, par) in [
        (llama, "zb-v", true, 4, 1, Parallelism { pp: 2, ..one }),
        (qwen3, "zb-v", false, 8, 5, Parallelism { pp: 2, tp: 2, dp: 2, zero: 1, ..one }),
        (gpt2_dropping, "zb-v+unfused", false, 6, 4, Parallelism { pp: 3, recompute: Recompute::Selective, ..one }),
        (llama, "v-half+no-overlap-grad+uneven", true, 9, 7, Parallelism { pp: 3, ..one }),
        (latent, "v-half+uneven", false, 9, 6, Parallelism { pp: 4, ring: 2, ..one }),
        (bloom, "v-half+short-ends", false, 10, 6, Parallelism { pp: 3, ulysses: 2, dp: 2, ..one }),
        (neox, "v-min", false, 4, 3, Parallelism { pp: 2, ..one }),
        (megascale, "v-min+add-grads", false, 8, 9, Parallelism { pp: 4, zero: 1, dp: 2, ..one }),
        (llama, "v-min", true, 8, 5, Parallelism { pp: 4, recompute: Recompute::Full, ..one }),
        (qwen3, "zb-v+first-stage-3+last-stage-1", false, 8, 5, Parallelism { pp: 2, tp: 2, ..one }),
        (llama, "dualpipe-v+tp-overlap", false, 4, 5, Parallelism { pp: 2, tp: 2, ..one }),
        (llama, "v-half+tp-overlap", false, 4, 4, Parallelism { pp: 2, tp: 2, ..one }),
    ] as [(Family, _, _, _, _, _); 12]
    {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let case = Case { family, tie, layers, microbatches, kv_heads: 4, ffn: 12, par, ..case() };
        holds(&case);
        holds(&Case { batch: 2, dtype: Dtype::F32, ..case });
    }
}
