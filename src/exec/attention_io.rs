//! What an attention-only plan is fed, and what it gives: whole tensors, cut and put together by position and
//! head, so that every way of sharing the work has the same numbers.

use super::arena::Data;
use super::rank::Done;
use super::reference;
use super::source::stream;
use crate::plan::memory::SlotId;
use crate::plan::{AttentionFeed, Held, Mesh, Operand, Plan};
use crate::spec::AttentionSpec;
use rand::Rng;
use std::collections::BTreeMap;

/// Whole tensors `[batch, seq, row]` by operand, rounded to the dtype that the plan keeps them in.
pub type Tensors = BTreeMap<Operand, Vec<f64>>;

/// Everything that `feed` is given. Without a forward pass of its own the plan gets what the dense reference
/// would have kept.
pub fn given(plan: &Plan, feed: &AttentionFeed, seed: u64) -> Tensors {
    let dense = |what| [Operand::O, Operand::Lse].contains(&what);
    let mut all: Tensors =
        feed.given.iter().filter(|h| !dense(h.what)).map(|h| (h.what, seeded(plan, feed, h, seed))).collect();
    if feed.given.iter().any(|h| dense(h.what)) {
        let want = reference::attention(&feed.spec, &all[&Operand::Q], &all[&Operand::Kv], &all[&Operand::DO]);
        for held in feed.given.iter().filter(|h| dense(h.what)) {
            all.insert(held.what, rounded(plan, held, &want[&held.what]));
        }
    }
    all
}

/// Seeded numbers of an operand, uniform with variance one, as normalised activations have.
fn seeded(plan: &Plan, feed: &AttentionFeed, held: &Held, seed: u64) -> Vec<f64> {
    let mut rng = stream(seed, &held.what.name());
    let n = feed.spec.batch * feed.spec.seq_len * held.what.row(&feed.spec).iter().product::<u64>();
    let values: Vec<f64> = (0..n).map(|_| 3f64.sqrt() * (2.0 * rng.random::<f64>() - 1.0)).collect();
    rounded(plan, held, &values)
}

fn rounded(plan: &Plan, held: &Held, values: &[f64]) -> Vec<f64> {
    Data::from_f64(values, plan.tensors[held.tensor as usize].dtype).to_f64()
}

/// Where the elements of a rank's part lie in the whole tensor, run by run in the part's order.
fn runs(spec: &AttentionSpec, held: &Held, views: &[Mesh], rank: u32) -> Vec<std::ops::Range<usize>> {
    let [lanes, heads, width] = held.what.row(spec);
    let (first, count) = held.heads(spec, views, rank);
    let mut all = Vec::new();
    for b in 0..spec.batch {
        for at in held.segs.positions(views, rank) {
            for lane in 0..lanes {
                let start = (((b * spec.seq_len + at) * lanes + lane) * heads + first) * width;
                all.push(start as usize..(start + count * width) as usize);
            }
        }
    }
    all
}

/// A rank's part of a whole tensor.
pub fn part(spec: &AttentionSpec, held: &Held, views: &[Mesh], rank: u32, whole: &[f64]) -> Vec<f64> {
    runs(spec, held, views, rank).into_iter().flat_map(|run| whole[run].iter().copied()).collect()
}

/// The whole tensors that a plan was run for, from the parts that its ranks have. NaN where no rank has one.
pub fn gather(plan: &Plan, feed: &AttentionFeed, done: &[Done]) -> BTreeMap<String, Vec<f64>> {
    let mut all = BTreeMap::new();
    for held in &feed.taken {
        let row: u64 = held.what.row(&feed.spec).iter().product();
        let mut whole = vec![f64::NAN; (feed.spec.batch * feed.spec.seq_len * row) as usize];
        for (rank, done) in (0..).zip(done) {
            let Some(data) = done.kept.get(&SlotId { tensor: held.tensor, slot: held.slot }) else { continue };
            let (values, mut at) = (data.to_f64(), 0);
            for run in runs(&feed.spec, held, &plan.views, rank) {
                let len = run.len();
                whole[run].copy_from_slice(&values[at..at + len]);
                at += len;
            }
        }
        all.insert(held.what.name().into(), whole);
    }
    all
}
