//! What each op of a line does on each class of ranks: how long kernels take, who meets whom and how long
//! the bytes of a meeting are under way, and what all of it counts.

mod deeds;
mod exchange;
mod form;
mod host;
mod machine;
pub mod stamp;
pub mod stretch;

pub use deeds::{Deed, Deeds, Way, Whole};
pub use form::{Form, Tallies};
pub use machine::{Machine, picoseconds, seconds};

use crate::cluster::Tier;
use crate::collective::{self, LinkTime};
use crate::error::{Error, Result};
use crate::fold::{Fold, crossing};
use crate::plan::link::{Csr, Line, Place};
use crate::plan::matching::{LegAt, Matching};
use crate::plan::visible::block_shape;
use crate::plan::*;
use crate::spec::Provenance;
use crate::timeline::Usage;
use crate::units::Bytes;
use exchange::Exchanged;
use rustc_hash::FxHashMap;
use std::ops::Range;
use std::rc::Rc;

/// One op on one class.
#[derive(Debug, Clone, Copy)]
pub enum Act {
    /// The mask leaves nothing, or the class has no such op: no time passes.
    Skip,
    Compute {
        duration: u64,
        sm_bound: bool,
    },
    /// Beside the compute lane, taking no SM from it: a copy to or from the host's memory, or the CPU's own kernel.
    Aside {
        duration: u64,
    },
    /// Ends when all its meetings have: `count` entries of [`Sheet::met`].
    Meet {
        first: u32,
        count: u16,
        ctas: u16,
    },
}

/// A leg with its other half, or a whole collective: begins when all ends have started.
#[derive(Debug, Clone)]
pub struct Meeting {
    pub latency: u64,
    /// How long ports are busy if nothing else uses them.
    pub transfer: u64,
    /// Entries of [`Sheet::ends`].
    ends: Range<u32>,
}

/// A class that takes part in a meeting, with which op and through which ports.
#[derive(Debug, Clone, Copy)]
pub struct End {
    pub class: u32,
    pub node: u32,
    /// A bit a port, see [`port`].
    ports: u8,
}

impl End {
    /// The ports used, by number.
    pub fn ports(self) -> impl Iterator<Item = usize> {
        numbers(self.ports)
    }
}

/// The ports of a bit set, by number.
pub fn numbers(ports: u8) -> impl Iterator<Item = usize> {
    // Most have one: to look for the next takes less than to look at each.
    let mut left = ports & ((1 << PORTS) - 1);
    std::iter::from_fn(move || {
        let next = (left != 0).then_some(left.trailing_zeros() as usize);
        left &= left.wrapping_sub(1);
        next
    })
}

/// Ports of a rank: send and receive, inside the node and out of it.
pub const PORTS: usize = 4;
/// The first port out of the node.
pub const SCALE_OUT: usize = 2;
pub const SEND: u8 = 1;
pub const RECV: u8 = 2;

/// The bits of `ways` for links of `tier`; none where nothing leaves the device.
pub fn port(tier: Tier, ways: u8) -> u8 {
    match tier {
        Tier::Local => 0,
        Tier::ScaleUp => ways,
        Tier::ScaleOut => ways << 2,
    }
}

/// The acts of all classes, and what they add up to when each runs once.
#[derive(Clone)]
pub struct Sheet {
    classes: usize,
    /// Node after node, class after class.
    acts: Vec<Act>,
    pub meetings: Vec<Meeting>,
    ends: Rc<[End]>,
    met: Rc<[u32]>,
    /// Meetings of each node: leg by leg and not class by class, so that ports are as busy for the last class as for
    /// the first. Of two nodes that have one in common, the first.
    order: Rc<Csr>,
    /// Ops that the host has issued once it has issued a node, from the first of the line on; then those of
    /// the whole line.
    issued: Vec<u32>,
    /// By class.
    pub usages: Vec<Usage>,
}

impl Sheet {
    pub fn act(&self, node: usize, class: usize) -> Act {
        self.acts[node * self.classes + class]
    }

    /// Ops that a class has issued when it has issued `node`.
    pub fn issued(&self, node: usize, class: usize) -> u64 {
        u64::from(self.issued[node * self.classes + class])
    }

    /// Ops of a class on the whole line.
    pub fn issues(&self, class: usize) -> u64 {
        u64::from(self.issued[self.issued.len() - self.classes + class])
    }

    pub fn met(&self, first: u32, count: u16) -> &[u32] {
        &self.met[first as usize..][..count as usize]
    }

    /// What every class does.
    pub fn acts(&self, node: usize) -> &[Act] {
        &self.acts[node * self.classes..][..self.classes]
    }

    /// Ops that every class has issued when it has issued `node`.
    pub fn all_issued(&self, node: usize) -> &[u32] {
        &self.issued[node * self.classes..][..self.classes]
    }

    /// The meetings that come about at a node.
    pub fn meetings_of(&self, node: usize) -> &[u32] {
        self.order.of(node)
    }

    pub fn ends(&self, meeting: &Meeting) -> &[End] {
        &self.ends[meeting.ends.start as usize..meeting.ends.end as usize]
    }
}

/// A kernel's time as it is remembered.
#[derive(Clone, Copy)]
struct Timed {
    duration: u64,
    sm_bound: bool,
    provenance: Provenance,
    rel_sd: f64,
}

impl Timed {
    fn act(self) -> Act {
        Act::Compute { duration: self.duration, sm_bound: self.sm_bound }
    }
}

/// Bytes on their way, as the class that sends them sees it.
#[derive(Clone, Copy)]
pub struct Hop {
    pub time: LinkTime,
    pub tier: Tier,
    pub peer: u32,
}

/// The members of a communicator around one rank.
pub struct Gang {
    pub members: Vec<u32>,
    /// The classes they are in.
    pub classes: Vec<u32>,
    /// Of hops between members in rank order around a ring, and of ordered pairs: shares inside nodes and
    /// between them. What a member sends is counted as the mean over the group: which of its members sits
    /// at the edge of a node is an accident of numbering.
    ring: [f64; 2],
    pairs: [f64; 2],
}

/// Makes sheets, remembering what was computed before.
pub struct Acts<'a> {
    plan: &'a Plan,
    machine: Machine<'a>,
    fold: &'a Fold,
    /// Program of each class.
    program: Vec<u32>,
    known: Known,
    positions: Positions,
    hops: FxHashMap<(u16, i32, u64), Rc<[Hop]>>,
    exchanges: FxHashMap<exchange::Asked, exchange::Found>,
}

/// What stays true of other sizes of a plan, on the same machine.
#[derive(Default)]
pub struct Known {
    kernels: FxHashMap<(&'static str, Work, Dtype), Timed>,
    routes: FxHashMap<(u16, i32), Rc<[Route]>>,
    gangs: FxHashMap<u16, Rc<[Rc<Gang>]>>,
    links: FxHashMap<(CollectiveKind, u16, u32, u64), LinkTime>,
}

impl Known {
    /// Times are forgotten when there are many of them.
    const MOST: usize = 1 << 16;

    /// What is known of kernels, whatever the plan.
    pub fn of_kernels(self) -> Known {
        Known { kernels: self.kernels, ..Known::default() }
    }

    /// Takes over what another plan's times of kernels were.
    pub fn take_kernels(&mut self, from: &mut Known) {
        std::mem::swap(&mut self.kernels, &mut from.kernels);
    }

    fn bound(&mut self) {
        if self.kernels.len() > Self::MOST {
            self.kernels.clear();
        }
        if self.links.len() > Self::MOST {
            self.links.clear();
        }
    }
}

/// Where a class sends to, and with how many others it shares the way.
struct Route {
    peer: u32,
    tier: Tier,
    sharing: f64,
}

pub fn bytes_of(plan: &Plan, place: &Place) -> u64 {
    let tensor = &plan.tensors[place.tensor as usize];
    (place.rows[1] - place.rows[0]) * tensor.row_len() * tensor.dtype.size()
}

/// Bytes of an op's operands, without a place on the heap: there are millions of ops.
struct Sizes {
    all: [u64; 12],
    reads: usize,
    count: usize,
}

impl Sizes {
    /// Those that are read, and those that are written.
    fn split(&self) -> (&[u64], &[u64]) {
        self.all[..self.count].split_at(self.reads)
    }
}

/// The operands' sizes, and the dtype that the kernel computes in: that of the narrowest operand, which is what
/// the tensor cores are fed.
fn operands(plan: &Plan, line: &Line, node: usize) -> (Sizes, Dtype) {
    let (reads, writes) = (line.reads(node), line.writes(node));
    let (mut all, mut dtype) = ([0u64; 12], Dtype::F64);
    for (size, place) in all.iter_mut().zip(reads.iter().chain(writes)) {
        *size = bytes_of(plan, place);
        let own = plan.tensors[place.tensor as usize].dtype;
        if own.size() < dtype.size() && !matches!(own, Dtype::U32 | Dtype::U8) {
            dtype = own;
        }
    }
    (Sizes { all, reads: reads.len(), count: reads.len() + writes.len() }, dtype)
}

/// What a kernel has to do on `rank`, and in which dtype; none for an op that is no kernel or that the mask leaves
/// nothing of.
pub fn work_of(plan: &Plan, line: &Line, node: usize, rank: u32) -> Option<(Work, Dtype)> {
    let OpKind::Compute { kernel, .. } = &line.nodes[node].op.kind else { return None };
    let (sizes, dtype) = operands(plan, line, node);
    let (reads, writes) = sizes.split();
    if let Some(routed) = kernel.routed() {
        let route = plan.route_of(routed.route, rank);
        return Some((routed.work(route, &plan.views, rank, reads, writes), dtype));
    }
    Some((kernel.work(&plan.views, rank, reads, writes)?, dtype))
}

pub fn ctas(engine: Engine) -> u16 {
    match engine {
        Engine::Sm { ctas } => ctas,
        Engine::CopyEngine => 0,
    }
}

impl<'a> Acts<'a> {
    pub fn new(plan: &'a Plan, machine: Machine<'a>, fold: &'a Fold) -> Acts<'a> {
        let program = fold.representatives.iter().map(|&r| plan.program_of(r)).collect();
        let (known, positions, hops, exchanges) = Default::default();
        Acts { plan, machine, fold, program, known, positions, hops, exchanges }
    }

    /// For other sizes of a plan that `known` is true of, its ranks all running one program.
    pub fn resume(plan: &'a Plan, machine: Machine<'a>, fold: &'a Fold, mut known: Known) -> Acts<'a> {
        known.bound();
        let (positions, hops, exchanges) = Default::default();
        let program = vec![0; fold.representatives.len()];
        Acts { plan, machine, fold, program, known, positions, hops, exchanges }
    }

    pub fn into_known(self) -> Known {
        self.known
    }

    /// For ranks that all run one program, whichever of the plan it is.
    pub fn of_one_program(plan: &'a Plan, machine: Machine<'a>, fold: &'a Fold) -> Acts<'a> {
        let mut acts = Acts::new(plan, machine, fold);
        acts.program.fill(0);
        acts
    }

    pub fn class_of(&self, rank: u32) -> u32 {
        self.fold.class_of[rank as usize]
    }

    pub fn representative(&self, class: u32) -> u32 {
        self.fold.representatives[class as usize]
    }

    /// The acts of every class on its program's line.
    pub fn sheet(&mut self, lines: &[Line], matching: &Matching) -> Result<Sheet> {
        let mut draft = Draft::new(self.plan, lines, matching, self.fold.representatives.len());
        for (p, line) in lines.iter().enumerate() {
            let classes: Vec<usize> = (0..self.program.len()).filter(|&c| self.program[c] as usize == p).collect();
            for node in 0..line.nodes.len() {
                let spliced = &line.nodes[node];
                match &spliced.op.kind {
                    OpKind::Copy { .. } => self.beside(&mut draft, line, node, &classes)?,
                    OpKind::Compute { .. } if !self.plan.lanes[spliced.lane as usize].computes() => {
                        self.beside(&mut draft, line, node, &classes)?
                    }
                    OpKind::Compute { kernel, .. } => self.compute(&mut draft, line, node, kernel, &classes),
                    OpKind::Transfer { legs, .. } => self.send(&mut draft, line, node, legs, &classes),
                    OpKind::Collective { .. } => self.gather(&mut draft, line, node, &classes)?,
                    OpKind::Exchange { .. } => self.exchange(&mut draft, line, node, &classes)?,
                    OpKind::Call { .. } => unreachable!("calls are spliced"),
                }
            }
        }
        for (class, &program) in self.program.iter().enumerate() {
            let line = &lines[program as usize];
            for (node, spliced) in line.nodes.iter().enumerate() {
                if let OpKind::Transfer { legs, engine } = &spliced.op.kind {
                    self.meet(&mut draft, line, node, legs, ctas(*engine), class)?;
                }
            }
        }
        Ok(draft.finish())
    }

    fn compute(&mut self, draft: &mut Draft, line: &Line, node: usize, kernel: &Kernel, classes: &[usize]) {
        let name = draft.kernel(kernel.name());
        self.kernel(line, node, kernel, classes, |class, flops, timed| draft.compute(node, class, name, flops, timed));
    }

    /// A copy, or a kernel of the CPU's.
    fn beside(&mut self, draft: &mut Draft, line: &Line, node: usize, classes: &[usize]) -> Result<()> {
        let lane = line.nodes[node].lane;
        let (sizes, _) = operands(self.plan, line, node);
        let (reads, writes) = sizes.split();
        let aside = self.aside(&self.plan.lanes[lane as usize], reads, writes)?;
        for &class in classes {
            draft.act(node, class, Act::Aside { duration: aside.duration });
            let (tally, s) = (&mut draft.tallies[class], aside.duration as f64 * 1e-12);
            tally.comm[lane as usize] += s;
            tally.provenance[aside.provenance as usize] += s;
            tally.bytes_host += aside.bytes as f64;
        }
        Ok(())
    }

    /// Tells `each` class its FLOPs and time of a kernel, but for those whose mask leaves nothing.
    fn kernel(
        &mut self,
        line: &Line,
        node: usize,
        kernel: &Kernel,
        classes: &[usize],
        mut each: impl FnMut(usize, u64, Timed),
    ) {
        let (sizes, dtype) = operands(self.plan, line, node);
        let (reads, writes) = sizes.split();
        let views = &self.plan.views;
        if let Some(routed) = kernel.routed() {
            // Rows are others on every class.
            for &class in classes {
                let rank = self.fold.representatives[class];
                let work = routed.work(self.plan.route_of(routed.route, rank), views, rank, reads, writes);
                let timed = self.timed(kernel.curve(), work, dtype);
                each(class, work.flops, timed);
            }
            return;
        }
        let Some(block) = kernel.mask() else {
            let Some(&first) = classes.first() else { return };
            let work = kernel.work(views, self.fold.representatives[first], reads, writes);
            let timed = self.timed(kernel.curve(), work.expect("only a mask leaves nothing"), dtype);
            classes.iter().for_each(|&class| each(class, work.map_or(0, |w| w.flops), timed));
            return;
        };
        let shapes = self.positions.shapes(block, views, &self.fold.representatives);
        for &class in classes.iter().filter(|&&c| shapes[c].area > 0) {
            let work = kernel.masked_work(block, shapes[class], views, reads, writes);
            let timed = self.timed(kernel.curve(), work, dtype);
            each(class, work.flops, timed);
        }
    }

    fn timed(&mut self, curve: &'static str, work: Work, dtype: Dtype) -> Timed {
        let kernels = self.machine.kernels;
        *self.known.kernels.entry((curve, work, dtype)).or_insert_with(|| {
            let t = kernels.time_as(curve, &work, dtype);
            let duration = picoseconds(t.seconds);
            Timed { duration, sm_bound: t.sm_bound, provenance: t.provenance, rel_sd: t.rel_sd }
        })
    }

    fn group(&self, lane: u16) -> &'a Group {
        self.plan.lanes[lane as usize].group().expect("check: communication runs on communicators")
    }

    /// The sends of a transfer, each a meeting with whoever receives it.
    fn send(&mut self, draft: &mut Draft, line: &Line, node: usize, legs: &[Leg], classes: &[usize]) {
        let lane = line.nodes[node].lane;
        for (l, leg) in legs.iter().enumerate().filter(|(_, leg)| leg.dir == Direction::Send) {
            let place = line.reads(node).iter().find(|p| p.named == leg.buf).expect("a sent buffer is read");
            let bytes = bytes_of(self.plan, place);
            let hops = self.hops(lane, leg.by, bytes);
            let at = LegAt { node: node as u32, leg: l as u16 };
            for &class in classes {
                let Hop { time, tier, peer } = hops[class];
                let (own, peer) = (self.program[class], (peer, self.fold.class_of[peer as usize]));
                // Without a partner there is no one to receive; `meet` says so for either end.
                let met = draft.matching.partner(own, self.program[peer.1 as usize], lane, leg, at);
                let from = End { class: class as u32, node: node as u32, ports: port(tier, SEND) };
                let to = met.map(|m| End { class: peer.1, node: m.node, ports: port(tier, RECV) });
                let meeting = draft.meeting(&time, [from].into_iter().chain(to));
                draft.sent[draft.matching.leg(own, at) * draft.classes + class] = meeting;
                draft.count(class, lane, &time);
                draft.tallies[class].sent(tier, bytes as f64);
            }
        }
    }

    pub fn hops(&mut self, lane: u16, by: i32, bytes: u64) -> Rc<[Hop]> {
        if let Some(known) = self.hops.get(&(lane, by, bytes)) {
            return known.clone();
        }
        let (size, cluster) = (self.group(lane).size(&self.plan.views), self.machine.cluster);
        let (routes, moved) = (self.routes(lane, by), Bytes::new(bytes as f64));
        let hop = |(&rank, route): (&u32, &Route)| {
            let time = collective::p2p(cluster, self.machine.stack, moved, rank, route.peer, size, route.sharing);
            Hop { time, tier: route.tier, peer: route.peer }
        };
        let hops: Rc<[Hop]> = self.fold.representatives.iter().zip(routes.iter()).map(hop).collect();
        self.hops.insert((lane, by, bytes), hops.clone());
        hops
    }

    fn routes(&mut self, lane: u16, by: i32) -> Rc<[Route]> {
        if let Some(known) = self.known.routes.get(&(lane, by)) {
            return known.clone();
        }
        let (group, cluster, plan) = (self.group(lane), self.machine.cluster, self.plan);
        let route = |&rank: &u32| {
            let peer = group.neighbour(&plan.views, rank, by);
            let tier = cluster.tier(rank, peer);
            let sharing = if tier == Tier::ScaleOut { crossing(plan, cluster, group, by, rank).max(1) } else { 1 };
            Route { peer, tier, sharing: f64::from(sharing) }
        };
        let routes: Rc<[Route]> = self.fold.representatives.iter().map(route).collect();
        self.known.routes.insert((lane, by), routes.clone());
        routes
    }

    /// Joins the legs of a transfer of one class to the meetings that their senders made.
    fn meet(&self, draft: &mut Draft, line: &Line, node: usize, legs: &[Leg], ctas: u16, class: usize) -> Result<()> {
        let (rank, own, lane) = (self.fold.representatives[class], self.program[class], line.nodes[node].lane);
        let first = draft.met.len() as u32;
        for (l, leg) in legs.iter().enumerate() {
            let at = LegAt { node: node as u32, leg: l as u16 };
            let peer = self.group(lane).neighbour(&self.plan.views, rank, leg.by);
            let there = self.fold.class_of[peer as usize] as usize;
            let met = draft.matching.partner(own, self.program[there], lane, leg, at);
            let met = met.ok_or_else(|| {
                Error::plan(format!("rank {rank}, {}: no op of rank {peer} meets it", line.path(node)))
            })?;
            let (sender, from) = match leg.dir {
                Direction::Send => (class, at),
                Direction::Recv => (there, met),
            };
            let leg = draft.matching.leg(self.program[sender], from);
            draft.met.push(draft.sent[leg * draft.classes + sender]);
        }
        draft.act(node, class, Act::Meet { first, count: legs.len() as u16, ctas });
        Ok(())
    }

    /// The communicators of a lane, by class.
    pub fn gangs(&mut self, lane: u16) -> Rc<[Rc<Gang>]> {
        if let Some(known) = self.known.gangs.get(&lane) {
            return known.clone();
        }
        let (group, mut by_first) = (self.group(lane), FxHashMap::<u32, Rc<Gang>>::default());
        let gang = |&rank: &u32| {
            let members = group.members(&self.plan.views, rank);
            by_first.entry(members[0]).or_insert_with(|| Rc::new(self.gang(members))).clone()
        };
        let gangs: Rc<[Rc<Gang>]> = self.fold.representatives.iter().map(gang).collect();
        self.known.gangs.insert(lane, gangs.clone());
        gangs
    }

    fn gang(&self, members: Vec<u32>) -> Gang {
        let mut classes: Vec<u32> = members.iter().map(|&m| self.fold.class_of[m as usize]).collect();
        classes.sort_unstable();
        classes.dedup();
        let cluster = self.machine.cluster;
        let mut on_node: FxHashMap<u32, f64> = FxHashMap::default();
        members.iter().for_each(|&m| *on_node.entry(cluster.node_of(m)).or_default() += 1.0);
        let n = members.len() as f64;
        // Members are in rank order and nodes are filled in rank order: a ring leaves each node once.
        let leaves = if on_node.len() > 1 { on_node.len() as f64 / n } else { 0.0 };
        let inside = if n > 1.0 { on_node.values().map(|k| k * (k - 1.0)).sum::<f64>() / (n * (n - 1.0)) } else { 1.0 };
        Gang { members, classes, ring: [1.0 - leaves, leaves], pairs: [inside, 1.0 - inside] }
    }

    /// A collective: one meeting of each gang.
    fn gather(&mut self, draft: &mut Draft, line: &Line, node: usize, classes: &[usize]) -> Result<()> {
        let spliced = &line.nodes[node];
        let OpKind::Collective { kind, wire, engine, .. } = &spliced.op.kind else { unreachable!("a collective") };
        let elems = |p: &Place| bytes_of(self.plan, p) / self.plan.tensors[p.tensor as usize].dtype.size();
        let bytes = elems(&line.reads(node)[0]).max(elems(&line.writes(node)[0])) * wire.size();
        let gangs = self.gangs(spliced.lane);
        for &class in classes {
            let gang = &*gangs[class];
            let time = self.link(*kind, spliced.lane, gang, bytes);
            draft.count(class, spliced.lane, &time);
            let [up, out] = sent(*kind, gang, bytes as f64);
            draft.tallies[class].sent(Tier::ScaleUp, up);
            draft.tallies[class].sent(Tier::ScaleOut, out);
            // The gang's first class makes the meeting for all.
            if gang.classes[0] as usize == class {
                let ends = self.ends(draft, line, node, class, &gangs)?;
                draft.gather(&time, ends, ctas(*engine));
            }
        }
        Ok(())
    }

    pub fn link(&mut self, kind: CollectiveKind, lane: u16, gang: &Gang, bytes: u64) -> LinkTime {
        let (cluster, stack) = (self.machine.cluster, self.machine.stack);
        let time = || collective::collective(cluster, stack, kind, &gang.members, Bytes::new(bytes as f64));
        *self.known.links.entry((kind, lane, gang.members[0], bytes)).or_insert_with(time)
    }

    /// Everyone in the collective that `node` is of `class`.
    fn ends(&self, draft: &Draft, line: &Line, node: usize, class: usize, gangs: &[Rc<Gang>]) -> Result<Vec<End>> {
        let (own, lane) = (self.program[class], line.nodes[node].lane);
        let end = |&there: &u32| {
            let same = draft.matching.same_collective(own, self.program[there as usize], lane, node as u32);
            let (rank, other) = (self.fold.representatives[class], self.fold.representatives[there as usize]);
            let node = same.ok_or_else(|| {
                Error::plan(format!("rank {rank}, {}: rank {other} does not take part", line.path(node)))
            })?;
            let tiers = gangs[there as usize].members.iter().map(|&m| self.machine.cluster.tier(other, m));
            Ok(End { class: there, node, ports: tiers.fold(0, |bits, tier| bits | port(tier, SEND | RECV)) })
        };
        gangs[class].classes.iter().map(end).collect()
    }
}

/// Bytes that a member sends inside nodes and between them, on average over the group.
pub fn sent(kind: CollectiveKind, gang: &Gang, bytes: f64) -> [f64; 2] {
    let n = gang.members.len() as f64;
    let (passes, shares) = match kind {
        CollectiveKind::AllReduce => (2.0, gang.ring),
        CollectiveKind::ReduceScatter | CollectiveKind::AllGather => (1.0, gang.ring),
        CollectiveKind::AllToAll => (1.0, gang.pairs),
    };
    shares.map(|share| share * passes * bytes * (n - 1.0) / n)
}

/// The positions of each rank asked for.
type SpansOf = FxHashMap<u32, Rc<[Span]>>;

/// What the masks of a plan leave on each rank, its positions looked up rather than cut anew.
#[derive(Default)]
struct Positions {
    /// Whole splits, and what each rank asked for holds of them.
    splits: Vec<(Segs, SpansOf)>,
    /// Attention, the merge or sum behind it, and backward, have the same block.
    known: FxHashMap<AttnBlock, Rc<[BlockShape]>>,
}

impl Positions {
    /// More shapes than this are not kept: blocks of very long rings.
    const MOST: usize = 1 << 16;

    /// What `block` is on each of `ranks`.
    fn shapes(&mut self, block: &AttnBlock, views: &[Mesh], ranks: &[u32]) -> Rc<[BlockShape]> {
        if let Some(shapes) = self.known.get(block) {
            return shapes.clone();
        }
        let (q, kv) = (self.split(&block.q), self.split(&block.kv));
        let shape = |&rank: &u32| {
            let q = self.held(q, views, block.q.holder(views, rank));
            let kv = self.held(kv, views, block.kv.holder(views, rank));
            block_shape(&q, &kv, &block.mask)
        };
        let shapes: Rc<[BlockShape]> = ranks.iter().map(shape).collect();
        if self.known.len() * ranks.len() > Self::MOST {
            self.known.clear();
        }
        self.known.insert(block.clone(), shapes.clone());
        shapes
    }

    fn held(&mut self, split: usize, views: &[Mesh], rank: u32) -> Rc<[Span]> {
        let (whole, held) = &mut self.splits[split];
        held.entry(rank).or_insert_with(|| whole.spans(views, rank).into()).clone()
    }

    fn split(&mut self, segs: &Segs) -> usize {
        let same = |known: &Segs| {
            (known.seq, known.view, &known.order, known.part) == (segs.seq, segs.view, &segs.order, segs.part)
        };
        self.splits.iter().position(|(known, _)| same(known)).unwrap_or_else(|| {
            self.splits.push((segs.shifted(segs.shift.0, 0), FxHashMap::default()));
            self.splits.len() - 1
        })
    }
}

/// How many ops each class has issued by each node, and in all. What a mask leaves nothing of is not issued.
fn issued(acts: &[Act], classes: usize) -> Vec<u32> {
    let mut all = Vec::with_capacity(acts.len() + classes);
    let mut count = vec![0; classes];
    for acts in acts.chunks(classes) {
        count.iter_mut().zip(acts).for_each(|(count, act)| *count += u32::from(!matches!(act, Act::Skip)));
        all.extend_from_slice(&count);
    }
    all.extend_from_slice(&count);
    all
}

/// The meetings of every node, see [`Sheet::order`].
fn order(acts: &[Act], classes: usize, met: &[u32], meetings: usize) -> Csr {
    let (mut all, mut own, mut seen) = (Csr::default(), vec![], vec![false; meetings]);
    for acts in acts.chunks(classes) {
        let of = |act: &Act| match *act {
            Act::Meet { first, count, .. } => &met[first as usize..][..count as usize],
            _ => &[],
        };
        let legs = acts.iter().map(|act| of(act).len()).max().unwrap_or(0);
        for meeting in (0..legs).flat_map(|leg| acts.iter().filter_map(move |act| of(act).get(leg))) {
            if !std::mem::replace(&mut seen[*meeting as usize], true) {
                own.push(*meeting);
            }
        }
        all.push(&own);
        own.clear();
    }
    all
}

/// No meeting yet.
const NONE: u32 = u32::MAX;

/// A sheet being written.
struct Draft<'a> {
    plan: &'a Plan,
    matching: &'a Matching,
    classes: usize,
    acts: Vec<Act>,
    meetings: Vec<Meeting>,
    ends: Vec<End>,
    met: Vec<u32>,
    /// The meeting of each sent leg, class after class.
    sent: Vec<u32>,
    /// Names of the kernels that tallies count.
    kernels: Vec<&'static str>,
    tallies: Vec<Tally>,
}

/// What one class counts, by number rather than by name.
#[derive(Clone)]
struct Tally {
    kernels: Vec<f64>,
    /// By lane.
    comm: Vec<f64>,
    provenance: [f64; PROVENANCES.len()],
    flops: f64,
    bytes_up: f64,
    bytes_out: f64,
    bytes_host: f64,
    sd: f64,
    comm_sd: f64,
}

pub const PROVENANCES: [&str; 4] = ["measured", "interpolated", "extrapolated", "assumed"];

impl Tally {
    fn sent(&mut self, tier: Tier, bytes: f64) {
        match tier {
            Tier::ScaleOut => self.bytes_out += bytes,
            Tier::ScaleUp | Tier::Local => self.bytes_up += bytes,
        }
    }
}

impl<'a> Draft<'a> {
    fn new(plan: &'a Plan, lines: &[Line], matching: &'a Matching, classes: usize) -> Draft<'a> {
        let width = lines.iter().map(|l| l.nodes.len()).max().unwrap_or(0);
        let legs = (0..lines.len() as u32).map(|p| matching.leg_count(p)).max().unwrap_or(0);
        let comm = vec![0.0; plan.lanes.len()];
        let (kernels, provenance, flops, bytes_up, bytes_out, bytes_host, sd, comm_sd) = Default::default();
        let tally = Tally { kernels, comm, provenance, flops, bytes_up, bytes_out, bytes_host, sd, comm_sd };
        Draft {
            plan,
            matching,
            classes,
            acts: vec![Act::Skip; width * classes],
            meetings: vec![],
            ends: vec![],
            met: vec![],
            sent: vec![NONE; legs * classes],
            kernels: vec![],
            tallies: vec![tally; classes],
        }
    }

    /// The number of a kernel's name.
    fn kernel(&mut self, name: &'static str) -> usize {
        self.kernels.iter().position(|k| *k == name).unwrap_or_else(|| {
            self.kernels.push(name);
            self.tallies.iter_mut().for_each(|t| t.kernels.push(0.0));
            self.kernels.len() - 1
        })
    }

    fn act(&mut self, node: usize, class: usize, act: Act) {
        self.acts[node * self.classes + class] = act;
    }

    fn compute(&mut self, node: usize, class: usize, kernel: usize, flops: u64, timed: Timed) {
        let Timed { duration, sm_bound, provenance, rel_sd } = timed;
        let (tally, s) = (&mut self.tallies[class], duration as f64 * 1e-12);
        tally.kernels[kernel] += s;
        tally.provenance[provenance as usize] += s;
        tally.sd += rel_sd * s;
        tally.flops += flops as f64;
        self.act(node, class, Act::Compute { duration, sm_bound });
    }

    /// Notes that a class communicates for `time`.
    fn count(&mut self, class: usize, lane: u16, time: &LinkTime) {
        let s = time.total().value();
        self.tallies[class].comm[lane as usize] += s;
        self.tallies[class].provenance[time.provenance as usize] += s;
        self.tallies[class].comm_sd += time.rel_sd * s;
    }

    fn meeting(&mut self, time: &LinkTime, ends: impl IntoIterator<Item = End>) -> u32 {
        let first = self.ends.len() as u32;
        self.ends.extend(ends);
        let (latency, transfer) = (picoseconds(time.latency), picoseconds(time.transfer));
        self.meetings.push(Meeting { latency, transfer, ends: first..self.ends.len() as u32 });
        self.meetings.len() as u32 - 1
    }

    /// One meeting for all of `ends`.
    fn gather(&mut self, time: &LinkTime, ends: Vec<End>, ctas: u16) {
        let first = self.met.len() as u32;
        for end in &ends {
            self.act(end.node as usize, end.class as usize, Act::Meet { first, count: 1, ctas });
        }
        let meeting = self.meeting(time, ends);
        self.met.push(meeting);
    }

    fn finish(self) -> Sheet {
        let usages = self.tallies.iter().map(|t| self.usage(t)).collect();
        let Draft { classes, acts, meetings, ends, met, .. } = self;
        let (issued, order) = (issued(&acts, classes), order(&acts, classes, &met, meetings.len()).into());
        Sheet { classes, acts, meetings, ends: ends.into(), met: met.into(), order, issued, usages }
    }

    fn usage(&self, tally: &Tally) -> Usage {
        let mut usage = Usage {
            flops: tally.flops,
            bytes_scale_up: tally.bytes_up,
            bytes_scale_out: tally.bytes_out,
            bytes_host: tally.bytes_host,
            sd: tally.sd,
            comm_sd: tally.comm_sd,
            ..Usage::default()
        };
        usage.by_kernel.extend(self.kernels.iter().zip(&tally.kernels).filter(|(_, s)| **s > 0.0));
        usage.by_provenance.extend(PROVENANCES.iter().zip(&tally.provenance).filter(|(_, s)| **s > 0.0));
        for (lane, s) in self.plan.lanes.iter().zip(&tally.comm).filter(|(_, s)| **s > 0.0) {
            usage.busy(lane, *s);
        }
        usage
    }
}
