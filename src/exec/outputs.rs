//! What a run brought, gathered from its ranks and put in the order of the dense model.

use super::Run;
use super::attention_io;
use super::rank::{Done, Times};
use super::transport::Hub;
use crate::act::gaps;
use crate::error::Result;
use crate::plan::link::Line;
use crate::plan::matching::Matching;
use crate::plan::memory::SlotId;
use crate::plan::{Axis, Feed, Inputs, Param, Plan, Share, TensorId};
use crate::timeline::{Class, Timeline, Usage, lane_labels};
use crate::units::Seconds;
use std::collections::BTreeMap;

/// Slots whose contents are gone by the end of the step, and are wanted.
pub fn watched(plan: &Plan) -> Vec<SlotId> {
    let mut slots: Vec<SlotId> = plan.feed.tokens().into_iter().flat_map(hidden_slots).collect();
    for master in plan.masters.iter().filter(|m| m.group.is_some()) {
        slots.extend(slots_of(plan, master.grad_share));
    }
    slots
}

/// Slots whose contents are wanted at the end of the step: the loss, and all weights and gradients.
pub fn kept(plan: &Plan, all: bool) -> Vec<SlotId> {
    let mut tensors = match &plan.feed {
        Feed::Tokens(inputs) => vec![inputs.loss],
        Feed::Attention(feed) if all => feed.taken.iter().map(|held| held.tensor).collect(),
        Feed::Attention(_) => vec![],
    };
    if all {
        tensors.extend(plan.params.iter().flat_map(|p| [p.weight, p.grad]));
        tensors.sort_unstable();
        tensors.dedup();
    }
    tensors.into_iter().flat_map(|t| slots_of(plan, t)).collect()
}

/// The slots that microbatches leave their hidden states in, by turns.
fn hidden_slots(inputs: &Inputs) -> impl Iterator<Item = SlotId> {
    let (tensor, first) = (inputs.hidden, inputs.hidden_slot);
    (first..first + inputs.hidden_turns).map(move |slot| SlotId { tensor, slot })
}

fn slots_of(plan: &Plan, tensor: TensorId) -> impl Iterator<Item = SlotId> {
    (0..plan.tensors[tensor as usize].slots).map(move |slot| SlotId { tensor, slot })
}

pub fn gather(plan: &Plan, lines: &[Line], hub: &Hub, done: Vec<Done>) -> Result<Run> {
    let kept = |rank: u32, tensor, slot| done[rank as usize].kept.get(&SlotId { tensor, slot }).map(|d| d.to_f64());
    // The loss is where the head is.
    let loss_of = |loss| (0..plan.ranks()).find_map(|rank| kept(rank, loss, 0));
    let loss = plan.feed.tokens().and_then(|inputs| loss_of(inputs.loss)).map_or(f64::NAN, |v| v[0]);
    let (mut grads, mut weights) = (BTreeMap::new(), BTreeMap::new());
    for p in &plan.params {
        let weight = |rank| whole(plan, &done, rank, p.weight, p.slot).or_else(|| kept(rank, p.weight, p.slot));
        if let Some(whole) = assemble(plan, p, weight) {
            weights.insert(p.name.clone(), whole);
        }
        let grad = |rank| shares(plan, &done, rank, p.weight, p.slot).or_else(|| kept(rank, p.grad, p.slot));
        if let Some(whole) = assemble(plan, p, grad).filter(|_| !weights.is_empty()) {
            grads.insert(p.name.clone(), whole);
        }
    }
    Ok(Run {
        attention: None,
        timeline: timeline(plan, lines, &done),
        loss,
        sent_bytes: hub.sent_bytes(),
        peak_bytes: done.iter().map(|d| d.peak.device).collect(),
        host_peak_bytes: done.iter().map(|d| d.peak.host).collect(),
        on_core: done.iter().map(|d| d.on_core.clone()).collect(),
        copied: done.iter().map(|d| d.copied.clone()).collect(),
        grads,
        weights,
        hidden: plan.feed.tokens().map_or(vec![], |inputs| hidden(plan, inputs, &done)),
        logits: plan.feed.tokens().map_or(vec![], |inputs| logits(plan, inputs, &done)),
        tensors: match &plan.feed {
            Feed::Tokens(_) => BTreeMap::new(),
            Feed::Attention(feed) => attention_io::gather(plan, feed, &done),
        },
    })
}

/// A weight, or its gradient, put together from the flat tensors of one rank for each part of it.
fn assemble(plan: &Plan, param: &Param, flat: impl Fn(u32) -> Option<Vec<f64>>) -> Option<Vec<f64>> {
    let first = (0..plan.ranks()).find(|&rank| super::inputs::has(plan, param, rank)).unwrap_or(0);
    let owners = match &param.shard {
        None => vec![first],
        Some(shard) => {
            let mesh = plan.view_of(shard.axis);
            (0..mesh.degree(shard.axis)).map(|c| mesh.shift(first, shard.axis, c as i32)).collect()
        }
    };
    // First the parts: most runs keep none, and a whole one of a large model takes gigabytes.
    let rows = param.rows[0] as usize..param.rows[1] as usize;
    let part = |rank: u32| Some((rank, flat(rank)?[rows.clone()].to_vec()));
    let parts = owners.into_iter().map(part).collect::<Option<Vec<_>>>()?;
    let mut whole = vec![f64::NAN; param.shape.iter().product::<u64>() as usize];
    for (rank, part) in parts {
        for (at, value) in super::inputs::places(plan, param, rank).into_iter().zip(part) {
            at.into_iter().for_each(|at| whole[at as usize] = value);
        }
    }
    Some(whole)
}

/// A weight that no rank has whole, put together from the ranks' shares of its master copy.
fn whole(plan: &Plan, done: &[Done], rank: u32, weight: TensorId, slot: u32) -> Option<Vec<f64>> {
    let master = plan.masters.iter().find(|m| m.weight == weight && m.shared)?;
    let members = master.group.as_ref()?.members(&plan.views, rank);
    let at = SlotId { tensor: weight, slot };
    let parts = members.iter().map(|&m| done[m as usize].kept.get(&at).map(|d| d.to_f64()));
    Some(parts.collect::<Option<Vec<_>>>()?.concat())
}

/// A summed gradient, put together from the shares of the ranks which hold the weights that `rank` holds.
fn shares(plan: &Plan, done: &[Done], rank: u32, weight: TensorId, slot: u32) -> Option<Vec<f64>> {
    let master = plan.masters.iter().find(|m| m.weight == weight)?;
    let members = master.group.as_ref()?.members(&plan.views, rank);
    let at = SlotId { tensor: master.grad_share, slot };
    let parts = members.iter().map(|&m| done[m as usize].seen.get(&at)?.last().map(|d| d.to_f64()));
    Some(parts.collect::<Option<Vec<_>>>()?.concat())
}

/// Final hidden states, by sequence of the global batch; empty where they were not watched.
fn hidden(plan: &Plan, inputs: &Inputs, done: &[Done]) -> Vec<Vec<f64>> {
    let tensor = &plan.tensors[inputs.hidden as usize];
    let (rows, row) = (tensor.rows() as usize, tensor.row_len() as usize);
    let mut all: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for (rank, done) in done.iter().enumerate() {
        let positions = inputs.segs.positions(&plan.views, rank as u32);
        let row_of = |i: usize| {
            let share = |share: Share| share.row(&plan.views, rank as u32, rows as u64, i as u64) as usize;
            inputs.share.map_or(i, share)
        };
        let turns = hidden_slots(inputs).enumerate().flat_map(|(turn, at)| {
            let seen = done.seen.get(&at).into_iter().flatten().enumerate();
            seen.map(move |(i, data)| (i * inputs.hidden_turns as usize + turn, data))
        });
        for (m, data) in turns {
            let sequences = super::inputs::sequences_of(plan, inputs, rank as u32, m as u32);
            for (i, values) in data.to_f64().chunks(row).enumerate() {
                let (sequence, token) = (row_of(i) / positions.len(), row_of(i) % positions.len());
                let out = all.entry(sequences.start + sequence as u64);
                let out = out.or_insert_with(|| vec![f64::NAN; inputs.segs.seq as usize * row]);
                out[positions[token] as usize * row..][..row].copy_from_slice(values);
            }
        }
    }
    all.into_values().collect()
}

/// Logits, by sequence of the global batch; empty where they were not kept. Tensor-parallel ranks have the columns
/// of a part of the vocabulary each, the last ones maybe some beyond its end.
fn logits(plan: &Plan, inputs: &Inputs, done: &[Done]) -> Vec<Vec<f64>> {
    let (vocab, seq) = (inputs.vocab as usize, inputs.segs.seq as usize);
    let mut all: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for (rank, done) in (0..).zip(done) {
        let positions = inputs.segs.positions(&plan.views, rank);
        // A microbatch may have them in several pieces, one behind the other.
        let pieces = (done.logits.len() / inputs.microbatches.max(1) as usize).max(1);
        for (m, data) in (0..).zip(done.logits.chunks(pieces)) {
            let data: Vec<f64> = data.iter().flat_map(|piece| piece.to_f64()).collect();
            let sequences = super::inputs::sequences_of(plan, inputs, rank, m);
            let cols = data.len() / (positions.len() * inputs.batch as usize);
            let first = (plan.views[0].coord(rank, Axis::Tp) as usize * cols).min(vocab);
            let own = cols.min(vocab - first);
            for (i, values) in data.chunks(cols).enumerate() {
                let (sequence, token) = (i / positions.len(), i % positions.len());
                let out = all.entry(sequences.start + sequence as u64);
                let out = out.or_insert_with(|| vec![f64::NAN; seq * vocab]);
                out[positions[token] as usize * vocab + first..][..own].copy_from_slice(&values[..own]);
            }
        }
    }
    all.into_values().collect()
}

fn timeline(plan: &Plan, lines: &[Line], done: &[Done]) -> Timeline {
    let last = |times: &Times| times.iter().map(|t| t.1).fold(0.0, f64::max);
    let step = done.iter().map(|d| last(&d.times)).fold(0.0, f64::max);
    let times: Vec<&gaps::Times> = done.iter().map(|d| d.times.as_slice()).collect();
    let usages = gaps::charge(plan, lines, &Matching::new(plan, lines), &times);
    let class = |(rank, (mut usage, done)): (u32, (Usage, &Done))| {
        let line = &lines[plan.program_of(rank) as usize];
        for (i, &(start, end)) in done.times.iter().enumerate() {
            if plan.lanes[line.nodes[i].lane as usize].computes() {
                *usage.by_kernel.entry(line.nodes[i].op.kind.name()).or_default() += end - start;
            }
        }
        Class { rank, multiplicity: 1, usage, spans: gaps::spans(line, &done.times) }
    };
    let classes = (0..).zip(usages.into_iter().zip(done)).map(class).collect();
    Timeline { step: Seconds::new(step), classes, lanes: lane_labels(plan) }
}
