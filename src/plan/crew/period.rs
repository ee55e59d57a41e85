//! Rounds that do what the rounds before them did, in other slots: they find what repeats in a pipeline's steady state,
//! however long anything takes.
//!
//! In a *round* every crew goes on as far as it can. Between two rounds every crew has come so many ops further. If
//! these ops are those of as many ops before, but for the slots that they name, and the same crossings are under way,
//! then the next rounds will go as these did, until a crew comes to an op that is another. So whoever watches may take
//! all of them in one stride, if for it nothing but time has changed either.

use super::{Crew, Crews, PostId, Queue, Run, Watch};
use crate::plan::op::*;
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// The slots that the ops of a period name, and for each the slot that the same ops of the next period name in its
/// place.
pub struct Moves {
    /// The slot that takes the place of each, and the slot whose place each takes, by tensor and slot; [`NONE`]: no op
    /// names it.
    to: Vec<Vec<u32>>,
    from: Vec<Vec<u32>>,
    /// Tensors that are inputs: they have a slot for each microbatch, and none of these comes again.
    given: Vec<bool>,
}

const NONE: u32 = u32::MAX;

/// The rounds since a mark, which can be done again.
pub struct Again<'p> {
    pub times: u64,
    /// The slots that change places, by crew.
    pub moves: Vec<Moves>,
    /// Crossings under way: the one at the mark, the one in its place now, and the op that is in its place in the end.
    pub posts: Vec<(PostId, PostId, &'p Op)>,
    /// Ops of a period, by crew.
    ops: Vec<usize>,
}

/// The state of a crossing at a mark; `index`, `after` and `next` are places in the program, not numbers of posts.
struct Standing {
    id: PostId,
    index: usize,
    ended: bool,
    /// Crossings and legs that it still waits for, to start and to end.
    counts: [usize; 2],
    started: bool,
    turns: Vec<usize>,
    after: Vec<usize>,
    next: Vec<usize>,
}

/// The state of a crew at a mark.
struct Stood {
    at: usize,
    queues: FxHashMap<Queue, usize>,
    posts: Vec<Standing>,
    lanes: Vec<(u16, usize)>,
    slots: Vec<usize>,
}

/// The state of all crews at a mark.
struct Mark {
    /// Rounds after which everyone may stand like this again.
    back: usize,
    until: usize,
    crews: Vec<Stood>,
}

/// Goes from round to round and finds periods that repeat.
#[derive(Default)]
pub(super) struct Rounds {
    number: usize,
    mark: Option<Mark>,
    /// The round before which nothing is marked; and how many marks in a row were in vain.
    rest: usize,
    vain: usize,
}

impl Rounds {
    pub fn look<'p>(&mut self, run: &mut Run<'_, 'p>, watch: &mut impl Watch<'p>) {
        self.number += 1;
        let back = watch.round();
        if let Some(mark) = self.mark.take_if(|mark| mark.until == self.number) {
            let again = if back == Some(mark.back) { run.again(&mark) } else { None };
            match again.filter(|again| watch.again(again)) {
                Some(again) => {
                    run.take(&again);
                    self.vain = 0;
                }
                None => {
                    self.vain += 1;
                    self.rest = self.number + mark.back * self.vain.min(8);
                }
            }
        }
        if let Some(back) = back.filter(|_| self.mark.is_none() && self.number >= self.rest) {
            let mark = run.mark(back, self.number + back);
            let posts: Vec<PostId> = mark.crews.iter().flat_map(|crew| crew.posts.iter().map(|post| post.id)).collect();
            watch.mark(&posts);
            self.mark = Some(mark);
        }
    }
}

impl Moves {
    fn new(crews: &Crews) -> Moves {
        let none = || crews.plan.tensors.iter().map(|t| vec![NONE; t.slots as usize]).collect();
        let mut given = vec![false; crews.plan.tensors.len()];
        crews.plan.feed.given().iter().for_each(|&t| given[t as usize] = true);
        Moves { to: none(), from: none(), given }
    }

    /// Whether a tensor is one of the inputs, of whose slots nothing is known here.
    pub fn is_given(&self, tensor: TensorId) -> bool {
        self.given[tensor as usize]
    }

    /// The slot that takes the place of `slot` in the next period; `None` if no op names it.
    pub fn of(&self, tensor: TensorId, slot: u32) -> Option<u32> {
        Some(self.to[tensor as usize][slot as usize]).filter(|to| *to != NONE)
    }

    /// Circles of slots: each slot of one takes the place of the slot before it, period by period.
    pub fn circles(&self, tensor: TensorId) -> Vec<Vec<u32>> {
        let to = &self.to[tensor as usize];
        let mut seen = vec![false; to.len()];
        let mut all = vec![];
        for first in (0..to.len()).filter(|&slot| to[slot] != NONE) {
            let (mut circle, mut slot) = (vec![], first);
            while !std::mem::replace(&mut seen[slot], true) {
                circle.push(slot as u32);
                slot = to[slot] as usize;
            }
            if !circle.is_empty() {
                all.push(circle);
            }
        }
        all
    }

    /// Whether slot `to` can take the place of `from`, which is noted.
    fn note(&mut self, tensor: TensorId, from: u32, to: u32) -> bool {
        let (t, a, b) = (tensor as usize, from as usize, to as usize);
        if self.given[t] || (self.to[t][a], self.from[t][b]) == (to, from) {
            return true;
        }
        let is_new = (self.to[t][a], self.from[t][b]) == (NONE, NONE);
        if is_new {
            (self.to[t][a], self.from[t][b]) = (to, from);
        }
        is_new
    }

    fn note_buf(&mut self, from: &Buf, to: &Buf) -> bool {
        (from.of, from.rows) == (to.of, to.rows) && self.note(from.tensor(), from.slot, to.slot)
    }

    /// Whether every slot that takes a place has its own place taken, and the other way round.
    fn is_closed(&self) -> bool {
        let both = |(to, from): (&Vec<u32>, &Vec<u32>)| to.iter().zip(from).all(|(a, b)| (*a == NONE) == (*b == NONE));
        self.to.iter().zip(&self.from).all(both)
    }

    /// Whether `later` does what `op` does in other slots, which are noted.
    fn fit(&mut self, crews: &Crews, op: &Op, later: &Op) -> bool {
        if op.lane != later.lane || !op.after.is_empty() || !later.after.is_empty() {
            return false;
        }
        match (&op.kind, &later.kind) {
            (OpKind::Call { block, args, repeat }, OpKind::Call { block: b, args: others, repeat: r }) => {
                (block, repeat, args.len()) == (b, r, others.len())
                    && crews.touches[*block as usize]
                        .tensors
                        .iter()
                        .all(|&(tensor, slot)| self.note(tensor, slot, slot))
                    && (0..)
                        .zip(args.iter().zip(others))
                        .all(|(f, (a, b))| self.fit_arg(crews, (*block, f), *repeat, a, b))
            }
            (OpKind::Transfer { legs, engine }, OpKind::Transfer { legs: others, engine: e }) => {
                let fit = |(a, b): (&Leg, &Leg)| (a.dir, a.by) == (b.dir, b.by) && self.note_buf(&a.buf, &b.buf);
                (engine, legs.len()) == (e, others.len()) && legs.iter().zip(others).all(fit)
            }
            (
                OpKind::Collective { kind, src, dst, wire, acc, engine },
                OpKind::Collective { kind: k, src: s, dst: d, wire: w, acc: a, engine: e },
            ) => (kind, wire, acc, engine) == (k, w, a, e) && self.note_buf(src, s) && self.note_buf(dst, d),
            _ => false,
        }
    }

    fn fit_arg(&mut self, crews: &Crews, formal: (BlockId, usize), repeat: u32, a: &Arg, b: &Arg) -> bool {
        let alike = match (a, b) {
            (Arg::Buf { .. }, Arg::Buf { .. }) => true,
            (Arg::Each { step, of, .. }, Arg::Each { step: s, of: o, .. }) => (step, of) == (s, o),
            _ => false,
        };
        let TensorRef::Tensor(tensor) = a.of() else { return false };
        if !alike || a.of() != b.of() {
            return false;
        }
        let inner = &crews.touches[formal.0 as usize].formals[formal.1];
        let mut each = (0..repeat.min(a.period())).flat_map(|i| inner.iter().map(move |slot| (i, slot)));
        each.all(|(i, slot)| self.note(tensor, a.slot(i) + slot, b.slot(i) + slot))
    }
}

impl<'p> Run<'_, 'p> {
    fn mark(&self, back: usize, until: usize) -> Mark {
        Mark { back, until, crews: self.all.iter().map(|crew| self.stood(crew)).collect() }
    }

    fn stood(&self, crew: &Crew) -> Stood {
        let index = |id: &PostId| self.posts[*id].index;
        let under_way = crew.slots.iter().map(|slot| slot.3).chain(crew.lanes.iter().map(|lane| lane.1));
        let mut ids: BTreeSet<PostId> = under_way.collect();
        let waiting: Vec<PostId> = ids.iter().copied().filter(|&id| !self.posts[id].started).collect();
        ids.extend(waiting.iter().flat_map(|&id| &self.posts[id].after));
        let standing = |&id: &PostId| {
            let post = &self.posts[id];
            let after = if post.started { &[][..] } else { &post.after };
            Standing {
                id,
                index: post.index,
                ended: post.ended,
                started: post.started,
                counts: [post.open, post.legs_left],
                turns: post.turns.clone(),
                after: after.iter().map(index).collect(),
                next: post.next.iter().map(index).collect(),
            }
        };
        Stood {
            at: crew.at,
            queues: crew.queues.iter().map(|(queue, posts)| (*queue, posts.len())).collect(),
            posts: ids.iter().map(standing).collect(),
            lanes: crew.lanes.iter().map(|(lane, id)| (*lane, index(id))).collect(),
            slots: crew.slots.iter().map(|slot| index(&slot.3)).collect(),
        }
    }

    /// The rounds since `mark` that can be done again; `None` unless everyone stands as at the mark.
    fn again(&self, mark: &Mark) -> Option<Again<'p>> {
        let now: Vec<Stood> = self.all.iter().map(|crew| self.stood(crew)).collect();
        let ops: Vec<usize> = now.iter().zip(&mark.crews).map(|(now, then)| now.at - then.at).collect();
        if !ops.iter().enumerate().all(|(crew, &ops)| self.stands_alike(crew, &mark.crews, &now, ops)) {
            return None;
        }
        let (mut times, mut moves) = (u64::MAX, vec![]);
        for ((crew, then), &ops) in self.all.iter().zip(&mark.crews).zip(&ops) {
            let (own, more) = self.repeats(crew, then, ops)?;
            times = times.min(more);
            moves.push(own);
        }
        if times < 2 || times == u64::MAX {
            return None;
        }
        let under_way = |crew: usize| {
            let (program, by) = (self.all[crew].ops, times as usize * ops[crew]);
            let later = move |post: &Standing| &program[post.index + by];
            mark.crews[crew].posts.iter().zip(&now[crew].posts).map(move |(then, now)| (then.id, now.id, later(now)))
        };
        let posts = (0..now.len()).flat_map(under_way).collect();
        Some(Again { times, moves, posts, ops })
    }

    /// Whether the crossings that a crew has under way are those of the mark, `ops` ops further on.
    fn stands_alike(&self, crew: usize, then: &[Stood], now: &[Stood], ops: usize) -> bool {
        let grown = |crew: usize, queue: &Queue| {
            let [now, then] = [now, then].map(|all| all[crew].queues.get(queue).copied().unwrap_or(0));
            now - then
        };
        let queue_of = |op: &Op, turn: usize| match &op.kind {
            OpKind::Transfer { legs, .. } => {
                let (lane, leg) = (op.lane.unwrap_or(0), &legs[turn]);
                (lane, Some((leg.dir, self.crews.distance(lane, leg.by))))
            }
            _ => (op.lane.unwrap_or(0), None),
        };
        let on = |all: &[usize]| all.iter().map(|index| index + ops).collect::<Vec<usize>>();
        let same = |(a, b): (&Standing, &Standing)| {
            let op = self.posts[b.id].op;
            let mut turns = a.turns.iter().zip(&b.turns).enumerate();
            (a.index + ops, a.ended, a.started, a.counts) == (b.index, b.ended, b.started, b.counts)
                && on(&a.after) == b.after
                && on(&a.next) == b.next
                && (a.ended || turns.all(|(turn, (a, b))| a + grown(crew, &queue_of(op, turn)) == *b))
        };
        // Both ends of a queue have moved by as many legs.
        let even = |queue: &Queue| match queue.1 {
            Some((dir, by)) => {
                let back = self.crews.distance(queue.0, (by as i32).wrapping_neg());
                let peer = self.crews.peers[&(crew, queue.0, by)];
                grown(crew, queue) == grown(peer, &(queue.0, Some((dir.other(), back))))
            }
            None => self.crews.gangs[&(crew, queue.0)].iter().all(|&c| grown(c, queue) == grown(crew, queue)),
        };
        let (then, now) = (&then[crew], &now[crew]);
        let lanes = then.lanes.iter().map(|(lane, index)| (*lane, index + ops));
        then.posts.len() == now.posts.len()
            && then.posts.iter().zip(&now.posts).all(same)
            && lanes.eq(now.lanes.iter().copied())
            && on(&then.slots) == now.slots
            && now.queues.keys().all(even)
    }

    /// How often a crew can do what it did since the mark once more, and the slots that change places: one time less
    /// than its next ops are the same, since a crew that has to wait has looked at the ops behind.
    fn repeats(&self, crew: &Crew, then: &Stood, ops: usize) -> Option<(Moves, u64)> {
        let mut moves = Moves::new(self.crews);
        if ops == 0 {
            return Some((moves, u64::MAX));
        }
        let first = then.posts.iter().map(|post| post.index).min().map_or(then.at, |index| index.min(then.at));
        let mut at = first;
        while at + ops < crew.ops.len() && moves.fit(self.crews, &crew.ops[at], &crew.ops[at + ops]) {
            at += 1;
        }
        let further = (at + ops).checked_sub(crew.at)? / ops;
        moves.is_closed().then_some((moves, further.checked_sub(1)? as u64))
    }

    /// Moves every crew on by as many ops as it does in all repetitions.
    fn take(&mut self, again: &Again<'p>) {
        let by = |ops: usize| again.times as usize * ops;
        for &(_, id, op) in &again.posts {
            let post = &mut self.posts[id];
            (post.index, post.op) = (post.index + by(again.ops[post.crew]), op);
        }
        for (crew, &ops) in self.all.iter_mut().zip(&again.ops) {
            crew.at += by(ops);
            let posts: Vec<PostId> = crew.slots.drain(..).map(|slot| slot.3).collect();
            for id in posts.chunk_by(|a, b| a == b).map(|same| same[0]) {
                crew.slots
                    .extend(super::touched(self.posts[id].op).map(|(tensor, slot, writes)| (tensor, slot, writes, id)));
            }
        }
    }
}
