//! Programs side by side: which op of one has to wait for which op of another, however long anything takes.
//!
//! A *crew* is all ranks of one program. What a crew does inside itself, be it alone or with each other, it
//! does in step, op by op in program order. Only ops whose group reaches into other crews, the *crossings*,
//! have two moments: one is *posted* when its crew comes to it, *starts* when what it waits for has ended, and
//! *ends* when everyone it meets has started. A crew goes on behind a crossing until it comes to an op that
//! needs what the crossing has not brought yet. So crews take turns, and a plan of 30 stages with thousands of
//! microbatches is walked call by call: in time linear in its calls, with no graph of its ops.

mod period;

use super::link::resolve;
use super::matching::group_sizes;
use super::op::*;
use super::order::receives_what_it_sends;
use super::program::Plan;
use super::segment::{self, Part};
use crate::error::{Error, Result};
use period::Rounds;
pub use period::{Again, Moves};
use rustc_hash::FxHashMap;
use std::collections::{BTreeSet, VecDeque};

/// Number of a crossing that was posted.
pub type PostId = usize;

/// Is told what happens as crews go along.
pub trait Watch<'p> {
    /// A run of ops between calls that needs nobody outside the crew.
    fn local(&mut self, crew: usize, ops: &'p [Op]) -> Result<()>;
    fn call(&mut self, crew: usize, op: &'p Op) -> Result<()>;
    /// A crossing is posted; numbers of posts count from 0.
    fn post(&mut self, post: PostId, crew: usize, op: &'p Op) -> Result<()>;
    /// A crossing starts: those in `after`, which it had to wait for, have ended.
    fn start(&mut self, post: PostId, after: &[PostId]) -> Result<()>;
    /// A send and its receive have started: (post, leg) of either.
    fn meet(&mut self, send: (PostId, u16), recv: (PostId, u16)) -> Result<()>;
    /// All parts of one collective have started.
    fn gather(&mut self, posts: &[PostId]) -> Result<()>;
    fn end(&mut self, post: PostId) -> Result<()>;

    /// A round is over: every crew has gone on as far as it can. Returns after how many more rounds everyone may stand
    /// as now, except for time; `None` where that is not looked for.
    fn round(&mut self) -> Option<usize> {
        None
    }

    /// Marks the state of now, with the crossings `posts` under way: everyone may come to stand like this again.
    fn mark(&mut self, _posts: &[PostId]) {}

    /// Is told that the crews could do what they did since the mark some more times; returns whether it has taken these
    /// in one stride.
    fn again(&mut self, _again: &Again<'p>) -> bool {
        false
    }
}

/// The slots that a block touches, in the names of its tensors and formals.
#[derive(Debug, Clone, Default)]
struct Touches {
    tensors: BTreeSet<(TensorId, u32)>,
    formals: Vec<BTreeSet<u32>>,
}

/// How the crews of a plan meet.
pub struct Crews<'p> {
    plan: &'p Plan,
    /// Whether the groups of each lane reach into several crews.
    crosses: Vec<bool>,
    group_sizes: Vec<u32>,
    touches: Vec<Touches>,
    /// The crew at a distance, by (crew, lane, distance); and the crews of a group, by (crew, lane).
    peers: FxHashMap<(usize, u16, u32), usize>,
    gangs: FxHashMap<(usize, u16), Vec<usize>>,
}

impl<'p> Crews<'p> {
    /// The crews of a plan; `None` where programs meet in a way that crews cannot follow: inside of blocks, by edges of
    /// `after` over a call or a meeting, or so that ranks of one crew meet different crews.
    pub fn new(plan: &'p Plan) -> Option<Crews<'p>> {
        let sizes = group_sizes(plan);
        let crosses: Vec<bool> = plan.lanes.iter().map(|lane| crosses(plan, lane)).collect();
        let inner = |op: &Op| op.lane.is_none_or(|l| !crosses[l as usize]) && receives_what_it_sends(op, &sizes);
        let mut bodies = plan.blocks.iter().flat_map(|b| &b.ops);
        if !bodies.all(inner) || !segment::show_all(plan) {
            return None;
        }
        let mut crews = Crews {
            plan,
            touches: touches(plan),
            group_sizes: sizes,
            peers: FxHashMap::default(),
            gangs: FxHashMap::default(),
            crosses,
        };
        for (crew, program) in plan.programs.iter().enumerate() {
            // The first of the ops that are walked together, which see each other's edges of `after`.
            let mut first = None;
            for op in &program.ops {
                let crossing = crews.is_crossing(op);
                let apart = crossing || matches!(op.kind, OpKind::Call { .. });
                first = if apart { None } else { first.or(Some(op.id)) };
                let seen = op.after.iter().all(|&after| first.is_some_and(|first| after >= first));
                if !seen || (!crossing && !receives_what_it_sends(op, &crews.group_sizes)) {
                    return None;
                }
                crews.note(crew, op);
            }
        }
        crews.fits().then_some(crews)
    }

    pub fn is_crossing(&self, op: &Op) -> bool {
        op.lane.is_some_and(|lane| self.crosses[lane as usize])
    }

    fn distance(&self, lane: u16, by: i32) -> u32 {
        by.rem_euclid(self.group_sizes[lane as usize] as i32) as u32
    }

    /// Notes whom a crossing asks for; [`fits`](Crews::fits) finds out which crew that is.
    fn note(&mut self, crew: usize, op: &Op) {
        let Some(lane) = op.lane.filter(|&l| self.crosses[l as usize]) else { return };
        match &op.kind {
            OpKind::Transfer { legs, .. } => {
                for leg in legs {
                    let distance = self.distance(lane, leg.by);
                    self.peers.insert((crew, lane, distance), usize::MAX);
                }
            }
            _ => drop(self.gangs.insert((crew, lane), vec![])),
        }
    }

    /// Finds the crews that were asked for; false if ranks of a crew find different ones.
    fn fits(&mut self) -> bool {
        let plan = self.plan;
        let group = |lane: u16| match &plan.lanes[lane as usize] {
            Lane::Comm(group, _) => group,
            _ => unreachable!("only communicators cross"),
        };
        let of_crew: Vec<usize> = (0..plan.ranks()).map(|rank| plan.program_of(rank) as usize).collect();
        for ((crew, lane, by), peer) in &mut self.peers {
            let step = group(*lane).step(&plan.views, *by as i32);
            let own = (0..).zip(&of_crew).filter(|(_, own)| *own == crew);
            let mut there = own.map(|(rank, _)| of_crew[step.of(rank) as usize]);
            let Some(first) = there.next() else { continue };
            if first == *crew || there.any(|other| other != first) {
                return false;
            }
            *peer = first;
        }
        for ((crew, lane), gang) in &mut self.gangs {
            let mut known: BTreeSet<u32> = BTreeSet::new();
            for rank in (0..plan.ranks()).filter(|&rank| of_crew[rank as usize] == *crew) {
                if !known.insert(group(*lane).first(&plan.views, rank)) {
                    continue;
                }
                let members = group(*lane).members(&plan.views, rank);
                let mut there: Vec<usize> = members.iter().map(|&m| of_crew[m as usize]).collect();
                there.sort_unstable();
                there.dedup();
                if !gang.is_empty() && *gang != there {
                    return false;
                }
                *gang = there;
            }
        }
        true
    }

    /// Goes through all programs to their ends. Errors: crews that wait for each other for ever, by name; those of
    /// `watch`.
    pub fn run(&self, watch: &mut impl Watch<'p>) -> Result<()> {
        let (mut run, mut rounds) = (Run::new(self), Rounds::default());
        loop {
            let mut moved = false;
            for crew in 0..self.plan.programs.len() {
                moved |= run.advance(crew, watch)?;
            }
            if !moved {
                return run.finish();
            }
            rounds.look(&mut run, watch);
        }
    }

    /// Whether a call or an op touches a slot.
    fn touched(&self, op: &Op, tensor: TensorId, slot: u32) -> bool {
        let OpKind::Call { block, args, repeat } = &op.kind else {
            return op.reads().chain(op.writes()).any(|b| (b.tensor(), b.slot) == (tensor, slot));
        };
        let touches = &self.touches[*block as usize];
        touches.tensors.contains(&(tensor, slot))
            || args.iter().zip(&touches.formals).any(|(arg, slots)| {
                let binds = |i: u32| slot.checked_sub(arg.slot(i)).is_some_and(|inner| slots.contains(&inner));
                resolve(arg.of(), &[]).0 == tensor && (0..arg.period().min(*repeat)).any(binds)
            })
    }
}

/// Whether members of a lane's group run different programs.
fn crosses(plan: &Plan, lane: &Lane) -> bool {
    let Lane::Comm(group, _) = lane else { return false };
    let mut program_of: FxHashMap<u32, u32> = FxHashMap::default();
    let other = |rank: u32| {
        let own = plan.program_of(rank);
        *program_of.entry(group.first(&plan.views, rank)).or_insert(own) != own
    };
    plan.programs.len() > 1 && (0..plan.ranks()).any(other)
}

fn touches(plan: &Plan) -> Vec<Touches> {
    let mut all: Vec<Touches> = Vec::with_capacity(plan.blocks.len());
    for block in &plan.blocks {
        let mut own = Touches { formals: vec![BTreeSet::new(); block.formals.len()], ..Touches::default() };
        let mut add = |of: TensorRef, slot: u32| match of {
            TensorRef::Tensor(tensor) => drop(own.tensors.insert((tensor, slot))),
            TensorRef::Formal(formal) => drop(own.formals[formal as usize].insert(slot)),
        };
        for op in &block.ops {
            let OpKind::Call { block, args, repeat } = &op.kind else {
                op.reads().chain(op.writes()).for_each(|b| add(b.of, b.slot));
                continue;
            };
            let inner = &all[*block as usize];
            inner.tensors.iter().for_each(|&(tensor, slot)| add(TensorRef::Tensor(tensor), slot));
            for (arg, slots) in args.iter().zip(&inner.formals) {
                for i in 0..arg.period().min(*repeat) {
                    slots.iter().for_each(|slot| add(arg.of(), arg.slot(i) + slot));
                }
            }
        }
        all.push(own);
    }
    all
}

/// Names a queue of a crew: lane, direction and distance of legs; `None`: the lane's collectives.
type Queue = (u16, Option<(Direction, u32)>);

struct Post<'p> {
    crew: usize,
    /// The number of its op in the program, and the op.
    index: usize,
    op: &'p Op,
    /// Crossings that were under way when it was posted, and how many of them still are.
    after: Vec<PostId>,
    open: usize,
    /// Crossings that wait for it.
    next: Vec<PostId>,
    started: bool,
    ended: bool,
    /// Its place in its queue, for each leg; one entry for a collective.
    turns: Vec<usize>,
    legs_left: usize,
}

/// Slots that a crossing reads and writes.
fn touched(op: &Op) -> impl Iterator<Item = (TensorId, u32, bool)> {
    let bufs = op.reads().map(|b| (b, false)).chain(op.writes().map(|b| (b, true)));
    bufs.map(|(b, writes)| (b.tensor(), b.slot, writes))
}

struct Crew<'p> {
    ops: &'p [Op],
    at: usize,
    /// Crossings under way: the last one of each lane, and the slots that all of them touch.
    lanes: Vec<(u16, PostId)>,
    slots: Vec<(TensorId, u32, bool, PostId)>,
    queues: FxHashMap<Queue, Vec<(PostId, u16)>>,
}

struct Run<'c, 'p> {
    crews: &'c Crews<'p>,
    all: Vec<Crew<'p>>,
    posts: Vec<Post<'p>>,
    /// Crossings that can start now.
    ready: VecDeque<PostId>,
}

impl<'c, 'p> Run<'c, 'p> {
    fn new(crews: &'c Crews<'p>) -> Run<'c, 'p> {
        let crew = |program: &'p super::program::Program| Crew {
            ops: &program.ops,
            at: 0,
            lanes: vec![],
            slots: vec![],
            queues: FxHashMap::default(),
        };
        Run { crews, all: crews.plan.programs.iter().map(crew).collect(), posts: vec![], ready: VecDeque::new() }
    }

    /// Lets a crew go on as far as it can; returns whether it could go on at all.
    fn advance(&mut self, crew: usize, watch: &mut impl Watch<'p>) -> Result<bool> {
        let from = self.all[crew].at;
        while let Some(op) = self.all[crew].ops.get(self.all[crew].at) {
            if self.crews.is_crossing(op) {
                self.all[crew].at += 1;
                self.post(crew, op, watch)?;
                continue;
            }
            let run = self.run_at(crew);
            if run.iter().any(|op| self.waits(crew, op)) {
                break;
            }
            match run[0].kind {
                OpKind::Call { .. } => watch.call(crew, &run[0])?,
                _ => watch.local(crew, run)?,
            }
            self.all[crew].at += run.len();
        }
        Ok(self.all[crew].at > from)
    }

    /// The ops that a crew runs next: a call, or the ops up to the next call or crossing.
    fn run_at(&self, crew: usize) -> &'p [Op] {
        let here = &self.all[crew];
        let rest = &here.ops[here.at..];
        let Some(Part::Segment(ops)) = segment::parts(rest).next() else { return &rest[..1] };
        let count = ops.iter().position(|op| self.crews.is_crossing(op)).unwrap_or(ops.len());
        &ops[..count]
    }

    /// Whether an op or a call needs a slot that a crossing under way still uses.
    fn waits(&self, crew: usize, op: &Op) -> bool {
        self.all[crew].slots.iter().any(|&(tensor, slot, ..)| self.crews.touched(op, tensor, slot))
    }

    fn post(&mut self, crew: usize, op: &'p Op, watch: &mut impl Watch<'p>) -> Result<()> {
        let (id, lane) = (self.posts.len(), op.lane.expect("a crossing is on a lane"));
        let own: Vec<(TensorId, u32, bool)> = touched(op).collect();
        let here = &mut self.all[crew];
        let index = here.at - 1;
        let meets = |&(tensor, slot, writes, _): &(TensorId, u32, bool, PostId)| {
            own.iter().any(|o| (o.0, o.1) == (tensor, slot) && (o.2 || writes))
        };
        let mut after: Vec<PostId> = here.slots.iter().filter(|s| meets(s)).map(|s| s.3).collect();
        after.extend(here.lanes.iter().filter(|l| l.0 == lane).map(|l| l.1));
        after.sort_unstable();
        after.dedup();
        here.lanes.retain(|l| l.0 != lane);
        here.lanes.push((lane, id));
        here.slots.extend(own.iter().map(|o| (o.0, o.1, o.2, id)));
        let queues: Vec<Queue> = match &op.kind {
            OpKind::Transfer { legs, .. } => {
                legs.iter().map(|leg| (lane, Some((leg.dir, self.crews.distance(lane, leg.by))))).collect()
            }
            _ => vec![(lane, None)],
        };
        let mut turns = vec![];
        for (leg, queue) in (0..).zip(queues) {
            let queue = here.queues.entry(queue).or_default();
            turns.push(queue.len());
            queue.push((id, leg));
        }
        after.iter().for_each(|&before| self.posts[before].next.push(id));
        let (open, legs_left) = (after.len(), turns.len());
        self.posts.push(Post {
            crew,
            index,
            op,
            after,
            open,
            next: vec![],
            started: false,
            ended: false,
            turns,
            legs_left,
        });
        watch.post(id, crew, op)?;
        if open == 0 {
            self.ready.push_back(id);
        }
        self.settle(watch)
    }

    /// Starts the crossings that can start, and ends those that have met everyone.
    fn settle(&mut self, watch: &mut impl Watch<'p>) -> Result<()> {
        while let Some(id) = self.ready.pop_front() {
            self.posts[id].started = true;
            watch.start(id, &self.posts[id].after)?;
            match &self.posts[id].op.kind {
                OpKind::Transfer { legs, .. } => {
                    for (l, leg) in (0..).zip(legs) {
                        self.meet(id, l, leg, watch)?;
                    }
                }
                _ => self.gather(id, watch)?,
            }
        }
        Ok(())
    }

    fn meet(&mut self, id: PostId, l: u16, leg: &Leg, watch: &mut impl Watch<'p>) -> Result<()> {
        let (post, lane) = (&self.posts[id], self.posts[id].op.lane.unwrap_or(0));
        let peer = self.crews.peers[&(post.crew, lane, self.crews.distance(lane, leg.by))];
        let queue = (lane, Some((leg.dir.other(), self.crews.distance(lane, leg.by.wrapping_neg()))));
        let met = self.all[peer].queues.get(&queue).and_then(|q| q.get(post.turns[l as usize]).copied());
        let Some((other, other_leg)) = met.filter(|m| self.posts[m.0].started) else { return Ok(()) };
        match leg.dir {
            Direction::Send => watch.meet((id, l), (other, other_leg))?,
            Direction::Recv => watch.meet((other, other_leg), (id, l))?,
        }
        for post in [id, other] {
            self.posts[post].legs_left -= 1;
            if self.posts[post].legs_left == 0 {
                self.end(post, watch)?;
            }
        }
        Ok(())
    }

    fn gather(&mut self, id: PostId, watch: &mut impl Watch<'p>) -> Result<()> {
        let (post, lane) = (&self.posts[id], self.posts[id].op.lane.unwrap_or(0));
        let part = |&crew: &usize| {
            let part = self.all[crew].queues.get(&(lane, None))?.get(post.turns[0])?.0;
            self.posts[part].started.then_some(part)
        };
        let parts: Option<Vec<PostId>> = self.crews.gangs[&(post.crew, lane)].iter().map(part).collect();
        let Some(parts) = parts else { return Ok(()) };
        watch.gather(&parts)?;
        parts.into_iter().try_for_each(|part| self.end(part, watch))
    }

    fn end(&mut self, id: PostId, watch: &mut impl Watch<'p>) -> Result<()> {
        watch.end(id)?;
        let here = &mut self.all[self.posts[id].crew];
        here.lanes.retain(|l| l.1 != id);
        here.slots.retain(|s| s.3 != id);
        self.posts[id].ended = true;
        for next in std::mem::take(&mut self.posts[id].next) {
            self.posts[next].open -= 1;
            if self.posts[next].open == 0 {
                self.ready.push_back(next);
            }
        }
        Ok(())
    }

    /// Ends a walk in which nobody can go on. Errors: who waits for whom, unless all are done.
    fn finish(&self) -> Result<()> {
        let name = |crew: usize| &self.crews.plan.programs[crew].name;
        let mut waiting = vec![];
        for (crew, here) in self.all.iter().enumerate() {
            let post = self.posts.iter().find(|post| post.crew == crew && !post.ended);
            if let Some(post) = post {
                let lane = self.crews.plan.lanes[post.op.lane.unwrap_or(0) as usize].label();
                let what = if post.started { "its other half" } else { "a transfer before it" };
                waiting.push(format!("{} waits in {} for {what} on {lane}", name(crew), post.op.label));
            } else if here.at < here.ops.len() {
                waiting.push(format!("{} waits in {}", name(crew), here.ops[here.at].label));
            }
        }
        if waiting.is_empty() {
            return Ok(());
        }
        let more = waiting.len().saturating_sub(8);
        waiting.truncate(8);
        let tail = if more > 0 { format!("; and {more} more") } else { String::new() };
        Err(Error::plan(format!("deadlock: {}{tail}", waiting.join("; "))))
    }
}
