//! Gradients, weights and optimizer states in shares (ZeRO), and sums of gradients.

use crate::case::{Case, case, holds};
use foretrain::spec::{Parallelism, Recompute};

#[test]
fn sums_behind_the_backward_pass() {
    for (zero, dp, ring, microbatches) in [(0, 3, 1, 2), (1, 2, 2, 3), (1, 4, 1, 1)] {
        let options = "no-overlap-grad+wait-passes".parse().unwrap();
        let par = Parallelism { dp, ring, zero, options, ..case().par };
        holds(&Case { layers: 3, microbatches, tie: true, par, ..case() });
    }
}

/// What frameworks leave to kernels of their own: the sum of a weight's gradients, and the copy of logits for the loss.
#[test]
fn sums_and_losses_of_kernels_of_their_own() {
    for (zero, dp, tp, pp, words, tie) in [
        (0, 1, 1, 1, "add-grads", false),
        (1, 2, 2, 1, "add-grads+wide-loss+no-sp", true),
        (1, 2, 2, 2, "add-grads+wide-loss", false),
        (3, 2, 1, 1, "add-grads+wide-loss", true),
        (0, 2, 1, 1, "wide-loss-in-place", true),
        (1, 1, 2, 2, "wide-loss-in-place+loss-chunks-3", false),
    ] {
        let par = Parallelism { dp, tp, pp, zero, options: words.parse().unwrap(), ..case().par };
        holds(&Case { layers: 2, microbatches: 3, kv_heads: 2, tie, par, ..case() });
    }
}

#[test]
fn gradients_and_weights_in_shares() {
    let words = [(2, ""), (2, "no-prefetch"), (2, "copy-shards"), (3, ""), (3, "no-prefetch"), (3, "copy-shards")];
    for (zero, words) in words {
        for (layers, microbatches, dp, ring, recompute, tie) in [
            (1, 1, 2, 1, Recompute::None, false),
            (2, 3, 3, 1, Recompute::None, true),
            (3, 1, 1, 2, Recompute::Full, false),
            (5, 2, 2, 2, Recompute::Full, true),
        ] {
            let par = Parallelism { dp, ring, zero, recompute, options: words.parse().unwrap(), ..case().par };
            holds(&Case { layers, microbatches, tie, par, ..case() });
        }
    }
}

/// The same in stages, of which each gathers and scatters what passes it, and where gradients wait whole.
#[test]
fn gradients_and_weights_in_shares_of_stages() {
    for (zero, words) in [
        (2, ""),
        (2, "no-prefetch"),
        (2, "copy-shards"),
        (3, ""),
        (3, "no-prefetch"),
        (3, "no-sync"),
        (3, "no-sync+no-prefetch"),
        (3, "copy-shards+no-prefetch"),
        (3, "copy-shards+no-sync"),
    ] {
        for (pp, vp, layers, microbatches, dp, tp, recompute, tie) in [
            (1, 1, 3, 2, 3, 1, Recompute::None, true),
            (2, 1, 2, 1, 2, 1, Recompute::None, false),
            (2, 1, 6, 4, 2, 2, Recompute::None, true),
            (3, 1, 9, 2, 2, 1, Recompute::Full, true),
            (2, 2, 12, 4, 2, 1, Recompute::None, false),
        ] {
            let par = Parallelism { pp, vp, dp, tp, zero, recompute, options: words.parse().unwrap(), ..case().par };
            holds(&Case { layers, microbatches, tie, par, ..case() });
        }
    }
    // Embedding and head in stages of their own, without layers.
    let par = Parallelism { pp: 3, dp: 2, zero: 3, options: "short-ends".parse().unwrap(), ..case().par };
    holds(&Case { layers: 1, microbatches: 4, par, tie: true, ..case() });
    let options = "no-overlap-p2p+short-ends".parse().unwrap();
    let par = Parallelism { pp: 2, dp: 2, ring: 2, ulysses: 2, zero: 3, options, ..case().par };
    holds(&Case { layers: 4, microbatches: 3, batch: 2, par, tie: true, ..case() });
}

/// Adam operation by operation: all moments before the first weight, whoever has what share of them.
#[test]
fn adam_that_goes_through_all_weights_twice() {
    for (zero, dp, tp, pp, words, tie) in [
        (0, 1, 1, 1, "foreach", true),
        (0, 2, 1, 2, "foreach+no-overlap-grad", true),
        (1, 2, 2, 1, "foreach+overlap-gather", false),
        (1, 2, 1, 2, "foreach+all-reduce-grads", false),
        (2, 3, 1, 1, "foreach", true),
        (3, 2, 1, 2, "foreach", false),
    ] {
        let par = Parallelism { dp, tp, pp, zero, options: words.parse().unwrap(), ..case().par };
        holds(&Case { layers: 4, microbatches: 3, kv_heads: 2, tie, par, ..case() });
    }
}

/// Every rank has the sums whole and takes its share, wherever it stands among those with the same weights.
#[test]
fn gradients_whole_on_every_rank() {
    for (dp, ring, ulysses, tp, pp, vp, microbatches, words) in [
        (3, 1, 1, 1, 1, 1, 1, "all-reduce-grads"),
        (2, 2, 2, 1, 1, 1, 2, "all-reduce-grads+no-overlap-grad"),
        (2, 1, 1, 2, 2, 1, 3, "all-reduce-grads+no-sp"),
        (1, 3, 2, 1, 2, 1, 2, "all-reduce-grads"),
        (2, 2, 1, 1, 2, 2, 2, "all-reduce-grads+no-overlap-grad"),
        (2, 1, 1, 1, 1, 1, 2, "all-reduce-grads+wait-passes+add-grads"),
    ] {
        let options = words.parse().unwrap();
        let par = Parallelism { dp, ring, ulysses, tp, pp, vp, zero: 1, options, ..case().par };
        holds(&Case { layers: 4, microbatches, tie: true, par, ..case() });
        holds(&Case { layers: 4, microbatches, par, ..case() });
    }
}

/// Shares in groups of neighbours, sums over the groups.
#[test]
fn shares_in_groups_of_ranks() {
    for (zero, shard, dp, ring, pp, microbatches, words) in [
        (1, 2, 4, 1, 1, 2, ""),
        (2, 2, 6, 1, 1, 1, ""),
        (3, 3, 2, 3, 1, 3, ""),
        (3, 2, 2, 2, 2, 3, ""),
        (2, 2, 4, 1, 2, 2, "no-prefetch"),
        (3, 2, 4, 1, 2, 2, "no-sync"),
        (3, 2, 4, 1, 1, 2, "copy-shards+muon"),
        (3, 2, 4, 1, 1, 2, "offload-optimizer"),
    ] {
        let options = format!("{words}+shard-{shard}").parse().unwrap();
        let par = Parallelism { dp, ring, pp, zero, options, ..case().par };
        holds(&Case { layers: 4, microbatches, tie: true, par, ..case() });
        let par = Parallelism { tp: 2, ..par };
        holds(&Case { layers: 4, microbatches, par, ..case() });
    }
}
