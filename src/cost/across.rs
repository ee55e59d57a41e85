//! Several programs: a walker for the ranks of each, and what passes between them.
//!
//! A walker goes on until its crew needs something of another ([`Crews`]). The bytes of a crossing set off when its
//! last member has started, by the same rules as within a program; its ends are stamped where later ops find them.

use super::guess::Guess;
use super::ranks::{Held, Stamp, raise};
use super::steady::{Steady, Sum};
use super::walk::Walker;
use super::{Effort, Found};
use crate::act::charges::{Spell, Stream};
use crate::act::waits::Path;
use crate::act::{Acts, Machine, RECV, SEND, Transit, ctas, numbers, picoseconds, port, together};
use crate::collective::LinkTime;
use crate::error::Result;
use crate::fold::Fold;
use crate::plan::crew::{Again, Crews, PostId, Watch};
use crate::plan::link::{AtomTable, Atoms};
use crate::plan::*;
use crate::timeline::Usage;
use std::collections::BTreeSet;
use std::rc::Rc;

/// Costs a plan of several programs. Errors: a deadlock, those of [`Acts::sheet`], a step longer than can be told.
pub fn run(
    plan: &Plan,
    machine: Machine,
    fold: &Fold,
    effort: Effort,
    crews: &Crews,
    atoms: &Rc<AtomTable>,
) -> Result<Found> {
    let parts = parts(plan, fold);
    let walk = |guesses: bool| {
        let mut walkers = Vec::with_capacity(parts.len());
        for part in &parts {
            let mut walker = Walker::new(plan, machine, part, effort, true, atoms.clone())?;
            if guesses {
                let posted = vec![u64::MAX; walker.ranks.classes];
                walker.ranks.guess = Some(Guess { posted, ..Guess::default() });
            }
            walkers.push(walker);
        }
        let mut across = Across {
            plan,
            atoms,
            at: places(plan, fold),
            acts: Acts::new(plan, machine, fold),
            machine,
            host_launch: picoseconds(machine.host_launch()),
            open: vec![BTreeSet::new(); walkers.len()],
            walkers,
            posts: vec![],
            extra: vec![Usage::default(); fold.representatives.len()],
            steady: effort.stride.then(Steady::default),
        };
        crews.run(&mut across)?;
        let missed = across.walkers.iter().any(|walker| walker.ranks.missed);
        Ok((!missed).then(|| across.found()))
    };
    match walk(true)? {
        Some(found) => Ok(found),
        None => Ok(walk(false)?.expect("what is not forgotten is not missed")),
    }
}

/// The classes of each program, as a fold of its own.
fn parts(plan: &Plan, fold: &Fold) -> Vec<Fold> {
    let none = || Fold { representatives: vec![], multiplicity: vec![], class_of: vec![NOBODY; fold.class_of.len()] };
    let mut parts: Vec<Fold> = plan.programs.iter().map(|_| none()).collect();
    let at = places(plan, fold);
    for (&rank, &multiplicity) in fold.representatives.iter().zip(&fold.multiplicity) {
        let part = &mut parts[plan.program_of(rank) as usize];
        part.representatives.push(rank);
        part.multiplicity.push(multiplicity);
    }
    for (rank, &class) in fold.class_of.iter().enumerate() {
        let place = at[class as usize];
        parts[place.crew].class_of[rank] = place.class as u32;
    }
    parts
}

/// In place of a class: that of a rank of another program.
const NOBODY: u32 = u32::MAX;

/// Where a class of the whole fold is: its crew, and its number there.
#[derive(Debug, Clone, Copy)]
struct PlaceOf {
    crew: usize,
    class: usize,
}

fn places(plan: &Plan, fold: &Fold) -> Vec<PlaceOf> {
    let mut counts = vec![0; plan.programs.len()];
    let place = |&rank: &u32| {
        let crew = plan.program_of(rank) as usize;
        counts[crew] += 1;
        PlaceOf { crew, class: counts[crew] - 1 }
    };
    fold.representatives.iter().map(place).collect()
}

/// A crossing that a crew has posted; its lists have an entry for each class of the crew.
pub(super) struct Posted<'p> {
    crew: usize,
    op: &'p Op,
    lane: u16,
    reads: Vec<Atoms>,
    writes: Vec<Atoms>,
    pub starts: Vec<Stamp>,
    /// The paths that led to the starts.
    pub paths: Vec<Path>,
    /// When the bytes that arrive last set off, and the lane that had made late whoever came last.
    pub readies: Vec<Stamp>,
    pub ends: Vec<u64>,
}

impl Posted<'_> {
    /// When the crossing was over in each class, and its lane; where no time passed, what it had waited for.
    fn ended(&self) -> impl Iterator<Item = Stamp> {
        self.starts.iter().zip(&self.ends).map(|(start, &end)| start.or_later(end, self.lane))
    }
}

struct Across<'p> {
    plan: &'p Plan,
    atoms: &'p AtomTable,
    /// Where each class of the whole fold is: its crew, and its number there.
    at: Vec<PlaceOf>,
    /// The acts of all classes of the whole fold.
    acts: Acts<'p>,
    machine: Machine<'p>,
    host_launch: u64,
    walkers: Vec<Walker<'p>>,
    posts: Vec<Posted<'p>>,
    /// The crossings of each crew that have not ended.
    open: Vec<BTreeSet<PostId>>,
    /// What crossings add to usages, by class of the whole fold.
    extra: Vec<Usage>,
    /// Finds periods that can be taken in one stride; `None` where strides are not asked for.
    steady: Option<Steady>,
}

impl<'p> Watch<'p> for Across<'p> {
    fn local(&mut self, crew: usize, ops: &'p [Op]) -> Result<()> {
        self.walkers[crew].run_ops(ops)
    }

    fn call(&mut self, crew: usize, op: &'p Op) -> Result<()> {
        let OpKind::Call { block, args, repeat } = &op.kind else { return Ok(()) };
        self.walkers[crew].call(*block, args, *repeat, &vec![])
    }

    fn post(&mut self, post: PostId, crew: usize, op: &'p Op) -> Result<()> {
        let ([reads, writes], lane) = (self.atoms_of(op), op.lane.unwrap_or(0));
        let host_lane = self.plan.lanes.len() as u16;
        let walker = &mut self.walkers[crew];
        let n = walker.ranks.classes;
        let mut starts: Vec<Stamp> = walker.ranks.stamps.lanes[lane as usize * n..][..n].to_vec();
        for atom in reads.iter().chain(&writes).flat_map(|a| a.iter()) {
            raise(&mut starts, &walker.ranks.stamps.written[atom as usize * n..][..n]);
        }
        for atom in writes.iter().flat_map(|a| a.iter()) {
            raise(&mut starts, &walker.ranks.stamps.read[atom as usize * n..][..n]);
        }
        let launches = u64::from(self.machine.launches(op));
        for (start, host) in starts.iter_mut().zip(&mut walker.ranks.host) {
            *host += self.host_launch * launches;
            if *host > start.ps() {
                *start = Stamp::new(*host, host_lane);
                walker.ranks.host_led = true;
            }
        }
        let (readies, ends) = (vec![Stamp::default(); n], vec![0; n]);
        self.posts.push(Posted { crew, op, lane, reads, writes, starts, paths: vec![], readies, ends });
        self.open[crew].insert(post);
        self.look(crew);
        Ok(())
    }

    fn start(&mut self, post: PostId, after: &[PostId]) -> Result<()> {
        let (before, rest) = self.posts.split_at_mut(post);
        for &earlier in after {
            let earlier = &before[earlier];
            raise(&mut rest[0].starts, &earlier.ended().collect::<Vec<Stamp>>());
        }
        rest[0].ends = rest[0].starts.iter().map(|s| s.ps()).collect();
        rest[0].readies = rest[0].starts.clone();
        let state = self.walkers[rest[0].crew].ranks.state.iter();
        rest[0].paths = state.zip(&rest[0].starts).map(|(state, &start)| state.past.path(start, 0)).collect();
        let floor = &mut self.walkers[rest[0].crew].ranks.floor;
        *floor = rest[0].ends.iter().fold(*floor, |least, &start| least.min(start));
        Ok(())
    }

    fn meet(&mut self, send: (PostId, u16), recv: (PostId, u16)) -> Result<()> {
        let (crew, lane) = (self.posts[send.0].crew, self.posts[send.0].lane);
        let OpKind::Transfer { legs, .. } = &self.posts[send.0].op.kind else { return Ok(()) };
        let leg = legs[send.1 as usize];
        let sized = |leg: &Leg| {
            let (elems, dtype) = self.size(leg.buf);
            elems * dtype.size()
        };
        let (bytes, all) = (sized(&leg), together(legs.iter().map(|other| (other, sized(other))), &leg));
        let hops = self.acts.hops(lane, leg.by, [bytes, all]);
        for (global, from) in self.classes_of(crew) {
            let hop = hops[global];
            let to = self.at[self.acts.class_of(hop.peer) as usize];
            let ends = [(send.0, from, port(hop.tier, SEND)), (recv.0, to.class, port(hop.tier, RECV))];
            self.arrive(&hop.time, &ends);
            self.count(global, lane, &hop.own);
            match hop.tier {
                crate::cluster::Tier::ScaleOut => self.add(global, Sum::ScaleOut, bytes as f64),
                _ => self.add(global, Sum::ScaleUp, bytes as f64),
            }
        }
        Ok(())
    }

    fn gather(&mut self, posts: &[PostId]) -> Result<()> {
        let (op, lane) = (self.posts[posts[0]].op, self.posts[posts[0]].lane);
        let OpKind::Collective { kind, src, dst, wire, .. } = &op.kind else { return Ok(()) };
        let bytes = wire.full_bytes(self.plan, [*src, *dst].map(|buf| (buf.tensor(), self.size(buf).0)));
        let gangs = self.acts.gangs(lane);
        let mut met: BTreeSet<&[u32]> = BTreeSet::new();
        for &post in posts {
            for (global, _) in self.classes_of(self.posts[post].crew) {
                let gang = &*gangs[global];
                let (time, [up, out]) = self.acts.link(*kind, lane, gang, bytes);
                self.count(global, lane, &time);
                self.add(global, Sum::ScaleUp, up);
                self.add(global, Sum::ScaleOut, out);
                if met.insert(&gang.classes) {
                    let ends: Vec<(PostId, usize, u8)> =
                        gang.classes.iter().map(|&c| self.part(posts, c, &gang.members)).collect();
                    self.arrive(&time, &ends);
                }
            }
        }
        Ok(())
    }

    fn end(&mut self, id: PostId) -> Result<()> {
        let post = &self.posts[id];
        let (walker, lane) = (&mut self.walkers[post.crew], post.lane);
        let n = walker.ranks.classes;
        let ends: Vec<Stamp> = post.ended().collect();
        raise(&mut walker.ranks.stamps.lanes[lane as usize * n..][..n], &ends);
        for atom in post.reads.iter().flat_map(|a| a.iter()) {
            raise(&mut walker.ranks.stamps.read[atom as usize * n..][..n], &ends);
        }
        for atom in post.writes.iter().flat_map(|a| a.iter()) {
            walker.ranks.stamps.written[atom as usize * n..][..n].copy_from_slice(&ends);
        }
        let amount = match &post.op.kind {
            OpKind::Transfer { engine, .. } | OpKind::Collective { engine, .. } => u32::from(ctas(*engine)),
            _ => 0,
        };
        for (class, state) in walker.ranks.state.iter_mut().enumerate() {
            let (start, to) = (post.starts[class], post.ends[class]);
            state.past.note(lane, start, post.readies[class], to);
            if amount > 0 && to > start.ps() {
                state.sms.push(Held { from: start.ps(), to, amount });
            }
        }
        let crew = post.crew;
        self.open[crew].remove(&id);
        self.look(crew);
        Ok(())
    }

    fn round(&mut self) -> Option<usize> {
        self.steady.as_mut()?.round(&self.walkers)
    }

    fn mark(&mut self, posts: &[PostId]) {
        let posts: Vec<(PostId, &Posted)> = posts.iter().map(|&id| (id, &self.posts[id])).collect();
        if let Some(steady) = &mut self.steady {
            steady.mark(&mut self.walkers, &posts);
        }
    }

    fn again(&mut self, again: &Again<'p>) -> bool {
        let (Some(steady), plan) = (&mut self.steady, (self.plan, self.atoms)) else { return false };
        if !steady.again(plan, again, &mut self.walkers, &mut self.posts, &mut self.extra) {
            return false;
        }
        for &(_, now, op) in &again.posts {
            let [reads, writes] = self.atoms_of(op);
            let post = &mut self.posts[now];
            (post.op, post.reads, post.writes) = (op, reads, writes);
        }
        (0..self.walkers.len()).for_each(|crew| self.look(crew));
        true
    }
}

impl Across<'_> {
    /// The atoms that an op reads, and those that it writes.
    fn atoms_of(&self, op: &Op) -> [Vec<Atoms>; 2] {
        let atoms = |buf: Buf| self.atoms.place(self.plan, buf, &[]).atoms;
        [op.reads().map(atoms).collect(), op.writes().map(atoms).collect()]
    }

    /// Adds `by` to a sum of a class, for what a crossing did.
    fn add(&mut self, class: usize, sum: Sum, by: f64) {
        *sum.of(&mut self.extra[class]) += by;
        if let Some(steady) = &mut self.steady {
            steady.add(class, sum, by);
        }
    }

    /// Notes that a class communicates on `lane` for `time`.
    fn count(&mut self, class: usize, lane: u16, time: &LinkTime) {
        let s = time.total().value();
        if let Lane::Comm(group, _) = &self.plan.lanes[lane as usize] {
            self.add(class, Sum::Comm(group.charged_axis()), s);
        }
        self.add(class, Sum::Provenance(time.provenance as usize), s);
    }

    /// Notes the earliest start of the crossings of a crew that were posted and have not ended.
    fn look(&mut self, crew: usize) {
        let Some(guess) = &mut self.walkers[crew].ranks.guess else { return };
        guess.posted.fill(u64::MAX);
        for &post in &self.open[crew] {
            let starts = self.posts[post].starts.iter().map(|start| start.ps());
            guess.posted.iter_mut().zip(starts).for_each(|(earliest, start)| *earliest = start.min(*earliest));
        }
    }

    /// The classes of a crew: their numbers in the whole fold and in the crew.
    fn classes_of(&self, crew: usize) -> Vec<(usize, usize)> {
        let own = self.at.iter().enumerate().filter(|(_, at)| at.crew == crew);
        own.map(|(global, at)| (global, at.class)).collect()
    }

    fn size(&self, buf: Buf) -> (u64, Dtype) {
        let tensor = &self.plan.tensors[buf.tensor() as usize];
        (tensor.elems_of(buf.rows), tensor.dtype)
    }

    /// The part of a class in a collective: its crossing, its number in its crew, and the ports it uses, a bit each.
    fn part(&self, posts: &[PostId], class: u32, members: &[u32]) -> (PostId, usize, u8) {
        let at = self.at[class as usize];
        let post = posts.iter().find(|&&post| self.posts[post].crew == at.crew);
        let rank = self.acts.representative(class);
        let tiers = members.iter().map(|&m| self.machine.cluster.tier(rank, m));
        let ports = tiers.fold(0, |bits, tier| bits | port(tier, SEND | RECV));
        (*post.expect("every crew of a gang takes part"), at.class, ports)
    }

    /// Notes when the bytes of one meeting of crossings arrive: they set off when the last of `ends` (crossing, class,
    /// ports) has started, as in a walk.
    fn arrive(&mut self, time: &LinkTime, ends: &[(PostId, usize, u8)]) {
        let Transit { latency, transfer, fills } = Transit::of(time);
        let start = |post: PostId, class: usize| self.posts[post].starts[class];
        let launched = ends.iter().map(|&(post, class, _)| start(post, class)).max().unwrap_or_default();
        let last = ends.iter().filter(|&&(post, class, _)| start(post, class) == launched);
        let first = ends.iter().map(|&(post, class, _)| start(post, class).ps()).min().unwrap_or_default();
        let path = last.map(|&(post, class, _)| self.posts[post].paths[class].back_to(first)).max().unwrap_or_default();
        let lane = ends.first().map_or(0, |&(post, ..)| self.posts[post].lane);
        let path = if self.plan.lanes[lane as usize].joins_stages() { Path::default() } else { path };
        let ready = launched.ps();
        let ports =
            || ends.iter().flat_map(|&(post, class, ports)| numbers(ports).map(move |port| (post, class, port)));
        let mut off = ready;
        for (post, class, port) in ports() {
            let post = &self.posts[post];
            off = off.max(self.walkers[post.crew].ranks.owed(class, port, post.lane));
        }
        let mut longest = transfer;
        for (post, class, port) in ports() {
            let (crew, lane) = (self.posts[post].crew, self.posts[post].lane);
            let ranks = &mut self.walkers[crew].ranks;
            ranks.floor = ranks.floor.min(ready);
            let port = &ranks.state[class].ports[port];
            ranks.missed |= !port.knows(off);
            longest = longest.max(port.lasting(Stream::new(lane, fills), off, transfer, &mut ranks.edges));
        }
        for &(post, class, ports) in ends {
            let made_late = path.made_late(self.posts[post].starts[class].ps());
            let lane = self.posts[post].lane;
            let ranks = &mut self.walkers[self.posts[post].crew].ranks;
            let spell = Spell::new(off, off + longest, Stream::new(lane, fills));
            numbers(ports).for_each(|port| ranks.hold(class, port, spell, transfer));
            let (end, post) = (off + latency + longest, &mut self.posts[post]);
            // Of messages that arrive at the same moment, the one that set off last counts.
            let ready = Stamp::new(ready, made_late);
            if (end, ready) > (post.ends[class], post.readies[class]) {
                (post.readies[class], post.ends[class]) = (ready, end);
            }
        }
    }

    fn found(self) -> Found {
        let end = self.walkers.iter().map(|w| w.ranks.end()).max().unwrap_or(0);
        let found: Vec<Found> = self.walkers.into_iter().map(|walker| walker.found(end)).collect();
        let usages = self.at.iter().zip(&self.extra).map(|(at, extra)| {
            let mut usage = found[at.crew].usages[at.class].clone();
            usage.add(extra, 1.0);
            usage
        });
        Found { end, usages: usages.collect(), spans: vec![vec![]; self.at.len()] }
    }
}
