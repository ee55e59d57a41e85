//! Closed forms of the papers, in the papers' arithmetic, against what plans come to.
//!
//! Notation: s sequence, b batch, a heads, k KV heads, d head dim, h hidden, f feed-forward width, v
//! vocabulary, P ranks that share a sequence, W ranks that share weights, n = b*s/P tokens of a rank, and
//! e = 2 bytes an element. Qb = n*a*d*e, KVb = 2*n*k*d*e.

mod activations;
mod flops;
mod losses;
mod notation;
mod pipelines;
#[path = "../plans/mod.rs"]
mod plans;
mod rings;
mod shares;
mod tensor_parallel;
mod ulysses;
