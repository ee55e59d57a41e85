//! What each op of a line does on each class of ranks: durations, who is met, what is counted.

use super::{Machine, picoseconds};
use crate::cluster::Tier;
use crate::collective::{self, LinkTime};
use crate::device::Provenance;
use crate::error::{Error, Result};
use crate::fold::{Fold, crossing};
use crate::plan::link::Line;
use crate::plan::matching::{LegAt, Matching};
use crate::plan::*;
use crate::timeline::Usage;
use crate::units::Bytes;
use rustc_hash::FxHashMap;

/// What a kernel or a transfer takes alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alone {
    pub latency: u64,
    /// Time a port is busy.
    pub transfer: u64,
    /// Ports used: inside the node, out of it.
    pub up: bool,
    pub out: bool,
}

/// One leg as this class sees it.
#[derive(Debug, Clone, Copy)]
pub struct LegAct {
    pub send: bool,
    pub peer_class: u32,
    pub peer: LegAt,
    pub alone: Alone,
}

#[derive(Debug, Clone)]
pub enum Act {
    Compute {
        duration: u64,
        sm_bound: bool,
    },
    /// The mask leaves nothing: the op takes no time.
    Skip,
    Transfer {
        legs: Vec<LegAct>,
        ctas: u32,
    },
    /// Classes of the other members, and the op of theirs that is this one.
    Collective {
        with: Vec<(u32, u32)>,
        alone: Alone,
        ctas: u32,
    },
}

/// The acts of a line on one class, and what they add up to when each runs once.
pub struct ClassActs {
    pub acts: Vec<Act>,
    pub usage: Usage,
}

/// Makes acts, remembering what was computed before.
pub struct Acts<'a> {
    plan: &'a Plan,
    machine: Machine<'a>,
    fold: &'a Fold,
    kernels: FxHashMap<(Work, Dtype), (u64, bool, &'static str, f64)>,
    links: FxHashMap<(CollectiveKind, Vec<u32>, u64), LinkTime>,
    hops: FxHashMap<(u16, i32, u32, u64), (LinkTime, Tier)>,
    members: FxHashMap<(u16, u32), Vec<u32>>,
}

pub fn provenance_name(p: Provenance) -> &'static str {
    match p {
        Provenance::Measured => "measured",
        Provenance::Interpolated => "interpolated",
        Provenance::Extrapolated => "extrapolated",
        Provenance::Assumed => "assumed",
    }
}

fn bytes_of(plan: &Plan, place: &link::Place) -> u64 {
    let tensor = &plan.tensors[place.tensor as usize];
    (place.rows[1] - place.rows[0]) * tensor.row_len() * tensor.dtype.size()
}

fn ctas(engine: Engine) -> u32 {
    match engine {
        Engine::Sm { ctas } => u32::from(ctas),
        Engine::CopyEngine => 0,
    }
}

impl<'a> Acts<'a> {
    pub fn new(plan: &'a Plan, machine: Machine<'a>, fold: &'a Fold) -> Acts<'a> {
        let (kernels, links, hops, members) = Default::default();
        Acts { plan, machine, fold, kernels, links, hops, members }
    }

    /// The acts of `line` on the class `class`.
    pub fn of_class(&mut self, lines: &[Line], matching: &Matching, class: u32) -> Result<ClassActs> {
        let rank = self.fold.representatives[class as usize];
        let line = &lines[self.plan.program_of(rank) as usize];
        let mut usage = Usage::default();
        let mut acts = Vec::with_capacity(line.nodes.len());
        for i in 0..line.nodes.len() {
            acts.push(match &line.nodes[i].op.kind {
                OpKind::Compute { kernel, .. } => self.compute(line, i, kernel, rank, &mut usage)?,
                OpKind::Transfer { legs, engine } => {
                    let legs = self.transfer(lines, matching, i, legs, rank, &mut usage)?;
                    Act::Transfer { legs, ctas: ctas(*engine) }
                }
                OpKind::Collective { .. } => self.collective(lines, matching, i, rank, &mut usage)?,
                OpKind::Call { .. } => unreachable!("calls are spliced"),
            });
        }
        Ok(ClassActs { acts, usage })
    }

    fn compute(&mut self, line: &Line, i: usize, kernel: &Kernel, rank: u32, usage: &mut Usage) -> Result<Act> {
        let (mut sizes, mut dtype) = ([0u64; 12], Dtype::F64);
        let (reads, writes) = (line.reads(i), line.writes(i));
        for (size, place) in sizes.iter_mut().zip(reads.iter().chain(writes)) {
            *size = bytes_of(self.plan, place);
            // The narrowest operand is what the tensor cores are fed.
            let own = self.plan.tensors[place.tensor as usize].dtype;
            if own.size() < dtype.size() && own != Dtype::U32 {
                dtype = own;
            }
        }
        let (reads, writes) = sizes[..reads.len() + writes.len()].split_at(reads.len());
        let Some(work) = kernel.work(&self.plan.views, rank, reads, writes) else { return Ok(Act::Skip) };
        let machine = self.machine;
        let &mut (duration, sm_bound, provenance, rel_sd) = self.kernels.entry((work, dtype)).or_insert_with(|| {
            let t = machine.kernels.time(&work, dtype);
            (picoseconds(t.seconds), t.sm_bound, provenance_name(t.provenance), t.rel_sd)
        });
        let s = duration as f64 * 1e-12;
        *usage.by_kernel.entry(kernel.name()).or_default() += s;
        *usage.by_provenance.entry(provenance).or_default() += s;
        usage.sd += rel_sd * s;
        usage.flops += work.flops as f64;
        Ok(Act::Compute { duration, sm_bound })
    }

    fn group(&self, lane: u16) -> &'a Group {
        match &self.plan.lanes[lane as usize] {
            Lane::Comm(group, _) => group,
            Lane::Compute(_) => unreachable!("check: communication runs on communicators"),
        }
    }

    fn members(&mut self, lane: u16, rank: u32) -> Vec<u32> {
        let (group, views) = (self.group(lane), &self.plan.views);
        self.members.entry((lane, rank)).or_insert_with(|| group.members(views, rank)).clone()
    }

    fn hop(&mut self, lane: u16, by: i32, rank: u32, bytes: u64) -> (LinkTime, Tier) {
        if let Some(known) = self.hops.get(&(lane, by, rank, bytes)) {
            return *known;
        }
        let (group, cluster) = (self.group(lane), self.machine.cluster);
        let peer = group.neighbour(&self.plan.views, rank, by);
        let size = self.members(lane, rank).len() as u32;
        let tier = cluster.tier(rank, peer);
        let sharing = if tier == Tier::ScaleOut { crossing(self.plan, cluster, group, by, rank).max(1) } else { 1 };
        let bytes_moved = Bytes::new(bytes as f64);
        let time = collective::p2p(cluster, self.machine.stack, bytes_moved, rank, peer, size, f64::from(sharing));
        self.hops.insert((lane, by, rank, bytes), (time, tier));
        (time, tier)
    }

    fn transfer(
        &mut self,
        lines: &[Line],
        matching: &Matching,
        i: usize,
        legs: &[Leg],
        rank: u32,
        usage: &mut Usage,
    ) -> Result<Vec<LegAct>> {
        let own = self.plan.program_of(rank);
        let line = &lines[own as usize];
        let lane = line.nodes[i].lane;
        let axis = self.group(lane).charged_axis();
        let mut acts = Vec::with_capacity(legs.len());
        for (l, leg) in legs.iter().enumerate() {
            let peer = self.group(lane).neighbour(&self.plan.views, rank, leg.by);
            let at = LegAt { node: i as u32, leg: l as u16 };
            let met = matching
                .partner(own, self.plan.program_of(peer), lane, leg, at)
                .ok_or_else(|| Error::plan(format!("rank {rank}, {}: no op of rank {peer} meets it", line.path(i))))?;
            let places = if leg.dir == Direction::Send { line.reads(i) } else { line.writes(i) };
            let place = places.iter().find(|p| p.named == leg.buf).expect("a leg's buffer is among its op's places");
            let bytes = bytes_of(self.plan, place);
            // Seen from the sender, whose node decides what is shared.
            let send = leg.dir == Direction::Send;
            let (time, tier) =
                if send { self.hop(lane, leg.by, rank, bytes) } else { self.hop(lane, -leg.by, peer, bytes) };
            let alone = alone(&time, tier == Tier::ScaleUp, tier == Tier::ScaleOut);
            if send {
                count(usage, axis, &time);
                match tier {
                    Tier::ScaleOut => usage.bytes_scale_out += bytes as f64,
                    _ => usage.bytes_scale_up += bytes as f64,
                }
            }
            acts.push(LegAct { send, peer_class: self.fold.class_of[peer as usize], peer: met, alone });
        }
        Ok(acts)
    }

    fn collective(
        &mut self,
        lines: &[Line],
        matching: &Matching,
        i: usize,
        rank: u32,
        usage: &mut Usage,
    ) -> Result<Act> {
        let own = self.plan.program_of(rank);
        let line = &lines[own as usize];
        let node = &line.nodes[i];
        let OpKind::Collective { kind, wire, engine, .. } = &node.op.kind else { unreachable!("a collective") };
        let members = self.members(node.lane, rank);
        let elems = |p: &link::Place| bytes_of(self.plan, p) / self.plan.tensors[p.tensor as usize].dtype.size();
        let full = elems(&line.reads(i)[0]).max(elems(&line.writes(i)[0]));
        let bytes = full * wire.size();
        let (cluster, stack) = (self.machine.cluster, self.machine.stack);
        let time = *self
            .links
            .entry((*kind, members.clone(), bytes))
            .or_insert_with(|| collective::collective(cluster, stack, *kind, &members, Bytes::new(bytes as f64)));
        count(usage, self.group(node.lane).charged_axis(), &time);
        count_collective(usage, cluster, *kind, &members, rank, full, wire.size());
        let mut with: Vec<(u32, u32)> = Vec::new();
        for &m in members.iter().filter(|&&m| m != rank) {
            let same = matching.same_collective(own, self.plan.program_of(m), node.lane, i as u32);
            let node =
                same.ok_or_else(|| Error::plan(format!("rank {rank}, {}: rank {m} does not take part", line.path(i))))?;
            with.push((self.fold.class_of[m as usize], node));
        }
        with.sort_unstable();
        with.dedup();
        let tier = |t| members.iter().any(|&m| cluster.tier(rank, m) == t);
        Ok(Act::Collective {
            with,
            alone: alone(&time, tier(Tier::ScaleUp), tier(Tier::ScaleOut)),
            ctas: ctas(*engine),
        })
    }
}

fn alone(time: &LinkTime, up: bool, out: bool) -> Alone {
    Alone { latency: picoseconds(time.latency), transfer: picoseconds(time.transfer), up, out }
}

fn count(usage: &mut Usage, axis: Axis, time: &LinkTime) {
    let s = time.total().value();
    *usage.comm.entry(axis).or_default() += s;
    *usage.by_provenance.entry(provenance_name(time.provenance)).or_default() += s;
}

/// Bytes that `rank` sends in a whole collective, hop by hop as [`collective::rounds`] lowers it: a ring
/// member sends every part but one of each pass, to the next member; an all-to-all sends to each its own.
fn count_collective(
    usage: &mut Usage,
    cluster: &crate::cluster::Cluster,
    kind: CollectiveKind,
    members: &[u32],
    rank: u32,
    elems: u64,
    size: u64,
) {
    let n = members.len();
    let here = members.iter().position(|&m| m == rank).expect("a rank is in its own group");
    let part = |i: usize| {
        let r = collective::part(elems, i % n, n);
        (r.end - r.start) * size
    };
    let mut send = |to: usize, bytes: u64| match cluster.tier(rank, members[to % n]) {
        Tier::ScaleOut => usage.bytes_scale_out += bytes as f64,
        Tier::ScaleUp => usage.bytes_scale_up += bytes as f64,
        Tier::Local => {}
    };
    let (whole, next) = (elems * size, here + 1);
    match kind {
        CollectiveKind::AllReduce => send(next, 2 * whole - part(here) - part(next)),
        CollectiveKind::ReduceScatter => send(next, whole - part(here)),
        CollectiveKind::AllGather => send(next, whole - part(next)),
        CollectiveKind::AllToAll => (0..n).filter(|&to| to != here).for_each(|to| send(to, part(to))),
    }
}
