//! The papers' letters for the small model of these tests, and what its plans send and keep.

use crate::plans::{self, SM, model, way, work};
use foretrain::plan::link::{AtomTable, Line, Place};
use foretrain::plan::memory::Layout;
use foretrain::plan::*;
use foretrain::spec::*;

pub const A: u64 = 8;
pub const D: u64 = 8;
pub const H: u64 = 64;
pub const F: u64 = 128;
pub const V: u64 = 256;
pub const S: u64 = 3840;
pub const E: u64 = 2;

/// Plain data of the ops of rank 0's step: path, bytes of what it reads and writes.
pub struct Steps<'a> {
    pub plan: &'a Plan,
    pub line: Line<'a>,
}

impl<'a> Steps<'a> {
    pub fn of(plan: &'a Plan) -> Steps<'a> {
        let line = Line::program(plan, &AtomTable::new(plan).unwrap(), 0).unwrap();
        Steps { plan, line }
    }

    pub fn bytes(&self, place: &Place) -> u64 {
        let tensor = &self.plan.tensors[place.tensor as usize];
        (place.rows[1] - place.rows[0]) * tensor.row_len() * tensor.dtype.size()
    }

    /// Bytes that ops under `path` send: what a transfer reads; all of an all-to-all or a reduce-scatter but
    /// a rank's own part; what a rank gives to an all-gather, once for each other rank. Not gradients' sums.
    pub fn sent(&self, path: &str) -> u64 {
        let asked = |path_of: &str| path_of.starts_with(path) && !path_of.contains("grad_sum");
        let own = (0..self.line.nodes.len()).filter(|&i| asked(&self.line.path(i)));
        own.map(|i| {
            let payload: u64 = self.line.reads(i).iter().map(|p| self.bytes(p)).sum();
            match &self.line.nodes[i].op.kind {
                OpKind::Transfer { .. } => payload,
                OpKind::Collective { kind, .. } => {
                    let Lane::Comm(group, _) = &self.plan.lanes[self.line.nodes[i].lane as usize] else { panic!() };
                    let p = u64::from(group.size(&self.plan.views));
                    match kind {
                        CollectiveKind::AllToAll | CollectiveKind::ReduceScatter => payload / p * (p - 1),
                        CollectiveKind::AllGather => payload * (p - 1),
                        CollectiveKind::AllReduce => 2 * (payload / p * (p - 1)),
                    }
                }
                _ => 0,
            }
        })
        .sum()
    }

    pub fn count(&self, path: &str, label: &str) -> usize {
        let paths = (0..self.line.nodes.len()).map(|i| self.line.path(i));
        paths.filter(|p| p.starts_with(path) && p.rsplit('/').next().unwrap().starts_with(label)).count()
    }
}

pub const FORWARD: &str = "last[0]/fwd[1]/";
pub const BACKWARD: &str = "last[0]/bwd[1]/";

pub fn built(k: u64, dp: u32, ring: u32, ulysses: u32) -> Plan {
    let par = way(dp, ring, ulysses);
    plans::plan(&model(2, k, false), &par, &work(&par, S, 1, 1), SM)
}

/// The plan of two layers with `k` KV heads and some words.
pub fn said(words: &str, k: u64, ring: u32, ulysses: u32) -> Plan {
    let par = Parallelism { options: words.parse().unwrap(), ..way(1, ring, ulysses) };
    plans::plan(&model(2, k, false), &par, &work(&par, S, 1, 1), SM)
}

pub fn kind_bytes(plan: &Plan, kind: TensorKind) -> u64 {
    plan.tensors.iter().filter(|t| t.kind == kind).map(|t| t.bytes() * u64::from(t.slots)).sum()
}

/// Visible pairs of a causal mask.
pub fn pairs(s: u64) -> u64 {
    s * (s + 1) / 2
}

/// Bytes of activations at the peak of a program.
pub fn live(plan: &Plan, program: u32) -> u64 {
    let layout = Layout::new(plan, &AtomTable::new(plan).unwrap(), program).unwrap();
    layout.live_by_kind.iter().find(|(kind, _)| *kind == TensorKind::Activation).unwrap().1
}
