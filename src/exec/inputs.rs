//! A rank's part of the weights and of the tokens, put where its program looks for them.

use super::arena::{Arena, Data};
use super::attention_io;
use super::source::{Source, further};
use crate::plan::lasting::that_last;
use crate::plan::link::{AtomTable, Place};
use crate::plan::memory::SlotId;
use crate::plan::{Axis, Buf, Dtype, Feed, Held, Inputs, Master, Param, Plan, Shard, TensorId, TensorRef};
use std::collections::BTreeMap;
use std::ops::Range;

/// Where a rank stands among those that a weight is cut over, and how many they are.
fn coordinate(plan: &Plan, shard: &Shard, rank: u32) -> (u64, u64) {
    let mesh = plan.view_of(shard.axis);
    (mesh.coord(rank, shard.axis).into(), mesh.degree(shard.axis).into())
}

/// Where each element that a rank has of a weight stands in the whole weight; `None`: padding, which stands nowhere.
pub fn places(plan: &Plan, param: &Param, rank: u32) -> Vec<Option<u64>> {
    let Some(shard) = &param.shard else { return (0..param.shape.iter().product()).map(Some).collect() };
    let (at, ranks) = coordinate(plan, shard, rank);
    let along = shard.places(at, ranks);
    let inner: u64 = param.shape[shard.dim as usize + 1..].iter().product();
    let outer: u64 = param.shape[..shard.dim as usize].iter().product();
    let size = param.shape[shard.dim as usize];
    let of =
        |o: u64| along.iter().flat_map(move |at| (0..inner).map(move |i| at.map(|at| (o * size + at) * inner + i)));
    (0..outer).flat_map(of).collect()
}

/// The sequences of the global batch that a rank sees in a microbatch.
pub fn sequences_of(plan: &Plan, inputs: &Inputs, rank: u32, microbatch: u32) -> Range<u64> {
    let view = &plan.views[inputs.segs.view as usize];
    let (dp, at) = (u64::from(view.degree(Axis::Dp)), u64::from(view.coord(rank, Axis::Dp)));
    let first = (u64::from(microbatch) * dp + at) * inputs.batch;
    first..first + inputs.batch
}

/// A whole slot of a tensor.
pub fn slot(plan: &Plan, atoms: &AtomTable, tensor: TensorId, slot: u32) -> Place {
    atoms.place(plan, Buf { of: TensorRef::Tensor(tensor), slot, rows: None }, &[])
}

/// The tensors that every rank is given a part of; computed once for all of them.
pub fn shared(plan: &Plan, seed: u64) -> attention_io::Tensors {
    match &plan.feed {
        Feed::Tokens(_) => attention_io::Tensors::new(),
        Feed::Attention(feed) => attention_io::given(plan, feed, seed),
    }
}

/// Whether a rank's stage has a weight.
pub fn has(plan: &Plan, param: &Param, rank: u32) -> bool {
    param.stages.is_empty() || param.stages.contains(&plan.views[0].coord(rank, Axis::Pp))
}

/// Fills a rank's weights and its optimizer state, once for all steps.
pub fn fill(plan: &Plan, atoms: &AtomTable, rank: u32, source: &Source, arena: &mut Arena) {
    for t in that_last(plan) {
        let tensor = &plan.tensors[t as usize];
        for s in 0..tensor.slots {
            let place = slot(plan, atoms, t, s);
            put(arena, &place, &vec![0.0; tensor.elems() as usize], tensor.dtype);
        }
    }
    let own = plan.params.iter().filter(|p| has(plan, p, rank));
    let (cut, whole): (Vec<&Param>, Vec<&Param>) = own.partition(|p| master_of(plan, p).is_some_and(|m| m.shared));
    for param in whole {
        let named = Buf { of: TensorRef::Tensor(param.weight), slot: param.slot, rows: Some(param.rows) };
        let place = atoms.place(plan, named, &[]);
        put(arena, &place, &own_part(plan, param, rank, source), plan.tensors[param.weight as usize].dtype);
    }
    fill_shares(plan, atoms, rank, source, &cut, arena);
    fill_masters(plan, atoms, rank, arena);
}

/// Gives a rank what it is fed in a step, and counts its memory from here on.
pub fn feed(
    plan: &Plan,
    atoms: &AtomTable,
    rank: u32,
    (source, step): (&Source, u64),
    shared: &attention_io::Tensors,
    arena: &mut Arena,
) {
    arena.forget_peak();
    for t in that_last(plan) {
        (0..plan.tensors[t as usize].slots).for_each(|slot| arena.touch(SlotId { tensor: t, slot }));
    }
    for (at, values) in fed(plan, rank, (source, step), shared) {
        put(arena, &slot(plan, atoms, at.tensor, at.slot), &values, plan.tensors[at.tensor as usize].dtype);
    }
}

/// The slots that a rank is fed in a step, and what they then hold.
pub fn fed(
    plan: &Plan,
    rank: u32,
    (source, step): (&Source, u64),
    shared: &attention_io::Tensors,
) -> Vec<(SlotId, Vec<f64>)> {
    match &plan.feed {
        Feed::Tokens(inputs) => fed_tokens(plan, inputs, rank, (source, step)),
        Feed::Attention(feed) => {
            let part = |held: &Held| attention_io::part(&feed.spec, held, &plan.views, rank, &shared[&held.what]);
            feed.given.iter().map(|held| (SlotId { tensor: held.tensor, slot: held.slot }, part(held))).collect()
        }
    }
}

fn fed_tokens(plan: &Plan, inputs: &Inputs, rank: u32, (source, step): (&Source, u64)) -> Vec<(SlotId, Vec<f64>)> {
    let mut fed = vec![];
    for m in 0..inputs.microbatches {
        let mut all = vec![vec![]; 2 + inputs.ahead.len()];
        for index in sequences_of(plan, inputs, rank, m) {
            let (ids, next) = source.sequence(plan, step, index);
            let ahead = (1..=inputs.ahead.len()).map(|k| further(&next, k));
            let each: Vec<Vec<u32>> = [ids, next.clone()].into_iter().chain(ahead).collect();
            for at in inputs.segs.positions(&plan.views, rank) {
                all.iter_mut().zip(&each).for_each(|(values, ids)| values.push(f64::from(ids[at as usize])));
            }
        }
        let tensors = [inputs.tokens, inputs.targets].into_iter().chain(inputs.ahead.iter().copied());
        fed.extend(tensors.map(|tensor| SlotId { tensor, slot: m }).zip(all));
    }
    fed
}

/// Where a rank has scales of norms, or other weights with a number for each channel that are no bias: in the weights,
/// and in the optimizer's copies of them.
pub fn scales_of_norms(plan: &Plan, rank: u32) -> Vec<(SlotId, Range<u64>)> {
    let scales = |p: &&Param| has(plan, p, rank) && p.shape.len() == 1 && !p.name.ends_with(".bias");
    let mut all = vec![];
    for param in plan.params.iter().filter(scales) {
        let of = |tensor| SlotId { tensor, slot: param.slot };
        let [from, to] = param.rows;
        let Some(master) = master_of(plan, param) else {
            all.push((of(param.weight), from..to));
            continue;
        };
        let share = share(plan, master, rank);
        // The part of these elements that is in the rank's share, counted from the share's start.
        let (first, last) = (from.max(share.start), to.min(share.end));
        let part = first.saturating_sub(share.start)..last.saturating_sub(share.start);
        let weight = if master.shared { part.clone() } else { from..to };
        all.extend([(of(param.weight), weight), (of(master.master), part)]);
    }
    all.retain(|(_, elems)| !elems.is_empty());
    all
}

/// What a rank has of a weight that may be cut.
fn own_part(plan: &Plan, param: &Param, rank: u32, source: &Source) -> Vec<f64> {
    let whole = source.weight(plan, param);
    places(plan, param, rank).iter().map(|at| at.map_or(0.0, |at| whole[at as usize])).collect()
}

/// The master copy of the tensor that a weight is in.
fn master_of<'p>(plan: &'p Plan, param: &Param) -> Option<&'p Master> {
    plan.masters.iter().find(|m| m.weight == param.weight)
}

/// This rank's parts of weights that nobody keeps whole.
fn fill_shares(plan: &Plan, atoms: &AtomTable, rank: u32, source: &Source, params: &[&Param], arena: &mut Arena) {
    let mut slots: BTreeMap<(TensorId, u32), Vec<f64>> = BTreeMap::new();
    for param in params {
        let tensor = &plan.tensors[param.weight as usize];
        let group = master_of(plan, param).and_then(|m| m.group.as_ref()).expect("what is shared has a group");
        let whole = tensor.elems() * u64::from(group.size(&plan.views));
        let slot = slots.entry((param.weight, param.slot)).or_insert_with(|| vec![0.0; whole as usize]);
        let values = own_part(plan, param, rank, source);
        slot[param.rows[0] as usize..param.rows[1] as usize].copy_from_slice(&values);
    }
    for ((tensor, s), whole) in slots {
        let share = plan.tensors[tensor as usize].elems() as usize;
        let group = plan.masters.iter().find(|m| m.weight == tensor).and_then(|m| m.group.as_ref());
        let here = group.map_or(0, |g| g.place(&plan.views, rank)) as usize;
        let part = &whole[here * share..(here + 1) * share];
        put(arena, &slot(plan, atoms, tensor, s), part, plan.tensors[tensor as usize].dtype);
    }
}

/// The elements of a flat tensor that a rank's master copy has, counted in what the ranks of its group have together.
pub fn share(plan: &Plan, master: &Master, rank: u32) -> Range<u64> {
    let elems = plan.tensors[master.weight as usize].elems();
    let Some(group) = &master.group else { return 0..elems };
    let (here, ranks) = (group.place(&plan.views, rank), group.size(&plan.views));
    let whole = if master.shared { elems * u64::from(ranks) } else { elems };
    crate::collective::part(whole, here as usize, ranks as usize)
}

/// Master copies start as the weights they are copies of, or as this rank's share of them.
fn fill_masters(plan: &Plan, atoms: &AtomTable, rank: u32, arena: &mut Arena) {
    for master in &plan.masters {
        let held = |&slot: &u32| arena.holds(SlotId { tensor: master.weight, slot });
        let slots: Vec<u32> = (0..plan.tensors[master.weight as usize].slots).filter(held).collect();
        for s in slots {
            let values = arena.read(&arena.whole(&slot(plan, atoms, master.weight, s))).to_f64();
            let own = if master.shared { 0..values.len() as u64 } else { share(plan, master, rank) };
            let share = &values[own.start as usize..own.end as usize];
            put(arena, &slot(plan, atoms, master.master, s), share, plan.tensors[master.master as usize].dtype);
        }
    }
}

fn put(arena: &mut Arena, place: &Place, values: &[f64], dtype: Dtype) {
    if arena.holds(SlotId { tensor: place.tensor, slot: place.slot }) {
        let part = arena.whole(place);
        arena.write(&part, &Data::from_f64(values, dtype)).expect("as many values as the slot has");
        arena.touch(SlotId { tensor: place.tensor, slot: place.slot });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::memory::Layout;
    use crate::plan::{Engine, TensorKind};
    use crate::spec::{LlmSpec, Mlp, Norm, Parallelism, Workload};
    use crate::strategy::{Engines, build};

    /// Seeded scales are between 0.8 and 1.2, and all other weights of these models below 0.5: the root of three over 64 columns,
    /// or a fifth.
    #[test]
    fn scales_of_norms_are_where_weights_and_their_copies_have_them() {
        let none = Parallelism::default;
        let in_groups = Parallelism { dp: 4, zero: 3, options: "shard-2".parse().unwrap(), ..none() };
        let ways = [
            none(),
            Parallelism { dp: 2, zero: 1, ..none() },
            Parallelism { dp: 3, zero: 3, ..none() },
            in_groups,
            Parallelism { tp: 2, pp: 2, dp: 2, zero: 1, ..none() },
        ];
        let tiny = LlmSpec::find("tiny").unwrap();
        let biased = LlmSpec { norm: Norm::Layer, mlp: Mlp::Gelu, bias: true, ..tiny.clone() };
        for (model, dtype) in [(&tiny, Dtype::Bf16), (&tiny, Dtype::F32), (&biased, Dtype::Bf16)] {
            for par in &ways {
                let batch = u64::from(par.dp * par.pp);
                let work =
                    Workload { seq_len: 64, global_batch: batch, micro_batch: 1, dtype, documents: Default::default() };
                let engine = Engine::Sm { ctas: 1 };
                let plan = build(model, &work, par, Engines { p2p: engine, collective: engine }).unwrap();
                let atoms = AtomTable::new(&plan).unwrap();
                let (mut all, mut copies) = (0, 0);
                for rank in 0..plan.ranks() {
                    let layout = Layout::new(&plan, &atoms, plan.program_of(rank)).unwrap();
                    let mut arena = Arena::new(&plan, &layout);
                    fill(&plan, &atoms, rank, &Source::seeded(1), &mut arena);
                    let mut scales = vec![];
                    for (at, elems) in scales_of_norms(&plan, rank).into_iter().filter(|(at, _)| arena.holds(*at)) {
                        scales.extend(elems.map(|elem| (at, elem)));
                    }
                    scales.sort_unstable();
                    let mut large = vec![];
                    for (t, tensor) in that_last(&plan).map(|t| (t, &plan.tensors[t as usize])) {
                        for at in (0..tensor.slots).map(|slot| SlotId { tensor: t, slot }).filter(|at| arena.holds(*at))
                        {
                            let values = arena.read(&arena.whole(&slot(&plan, &atoms, t, at.slot))).to_f64();
                            let of = (0..).zip(&values).filter(|(_, x)| **x > 0.5).map(|(elem, _)| (at, elem));
                            large.extend(of);
                        }
                    }
                    large.sort_unstable();
                    copies += large
                        .iter()
                        .filter(|(at, _)| plan.tensors[at.tensor as usize].kind == TensorKind::OptState)
                        .count();
                    all += large.len();
                    assert_eq!(scales, large, "{}, rank {rank} of {par:?}", model.name);
                }
                assert!(all > copies && (copies > 0 || plan.masters.is_empty()), "{all} scales, {copies} in copies");
            }
        }
    }
}
