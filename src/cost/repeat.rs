//! Iterations of a call that repeat the one before, taken in one stride.
//!
//! What an iteration does depends on what it *finds*: the last times of lanes and buffers, what is held, when
//! the compute lane was last busy. Every start is a maximum of found times plus constants. So if an iteration
//! finds everything later by the same D than the one before found it, it does the same, D later; and a time
//! before the *floor*, the earliest start in an iteration, decided nothing there and need not agree.
//!
//! Will the iterations after it find everything D later, too? Lanes: yes, since this one left them so.
//! Buffers take part by name: slot 5 in iteration 5 is what slot 4 was in iteration 4. A walk over slots may
//! come upon one that an iteration up to `lag` back has left, so that many iterations in a row must agree;
//! or upon one that no iteration has touched yet, which must be from before the floor. That is all if no
//! other name means the walked tensor; where one does, nothing is skipped.
//!
//! What an op has left behind matters to ops of other lanes alone: stamps that only ops of one lane ask for need not
//! agree.
//!
//! The CPU that issues the ops is in one of two states: everything waits for it, and it is D later too; or it has made
//! no op of the iteration before wait, and stays ahead at a pace of at most D an iteration.
//!
//! The stride adds D times the iterations left and is exact in picoseconds.

use super::alike::{Alike, Name};
use super::ports::held;
use super::ranks::{Held, Ranks, Stamp};
use crate::act::PORTS;
use crate::act::charges::Owed;
use crate::act::stamp::in_time;
use crate::error::Result;
use crate::plan::link::{Atoms, Env, bind};
use crate::plan::*;
use std::ops::Range;
use std::rc::Rc;

/// What an iteration finds.
#[derive(Default)]
pub struct Finds {
    lanes: Vec<Stamp>,
    /// When every atom of every named slot was last written, and last read.
    written: Vec<Stamp>,
    read: Vec<Stamp>,
    /// What is held, list behind list (the ports of a class, then its SMs), and where each list ends. Both are empty
    /// where much is held and the rest was not alike.
    held: Vec<Held>,
    held_ends: Vec<usize>,
    /// Spells that hold ports, at most.
    most_held: u64,
    /// The time after which spells have to be over to be counted and listed, ps.
    held_since: u64,
    lost: Vec<u64>,
    /// How many spells each port has had so far.
    marks: Vec<usize>,
    compute_end: Vec<u64>,
    /// What lanes owe on ports; empty for a class whose lanes owe nothing.
    owed: Vec<Owed>,
    devices: Vec<u64>,
    host: Vec<u64>,
    // Sums, which decide nothing: time waited by class and lane, and how often each segment ran.
    waited: Vec<u64>,
    runs: Vec<u64>,
}

/// Spells that are soon listed. Where more hold a port, it is first seen how many of them anybody is still likely to
/// ask for.
const FEW_HELD: u64 = 1 << 14;

/// Iterations after which most calls are alike. In later ones spells are listed only where they are few, or where all
/// else is as the iteration before found it, which takes one iteration more.
const FIRST: u32 = 4;

/// Spells that are compared at most: with more, comparing takes more memory than going on one by one.
const MOST_HELD: u64 = 1 << 22;

/// Lists of what is held of one class: one for each port, and one for its SMs.
const LISTS: usize = PORTS + 1;

/// Whether strides may save something: a call has iterations left once two have been compared, and to go through its
/// body takes longer than to look at all that it finds. Many iterations of a few kernels are soon alike; of a few
/// messages, of which each waits longer for its port than the one before, they are not.
pub fn can_stride(repeat: u32, body: &[Op]) -> bool {
    const FEW: usize = 4;
    const MANY: u32 = 16;
    let is_long = body.len() > FEW || body.iter().any(|op| matches!(op.kind, OpKind::Call { .. }));
    let kernels_alone = || body.iter().all(|op| matches!(op.kind, OpKind::Compute { .. }));
    repeat > 2 && (is_long || repeat >= MANY && kernels_alone())
}

/// What each iteration adds once it repeats the one before; `d` is in ps.
pub struct Pace {
    pub d: u64,
    /// Stamps from before this time, ps, stay where they are, and decide nothing in the iterations.
    pub floor: u64,
    /// Time waited, ps, by class and for each class by lane; and how often each segment ran.
    pub waited: Vec<u64>,
    pub runs: Vec<u64>,
    /// Whether the CPU of every class is `d` later each time, as the device is, rather than running ahead of it.
    pub host_keeps_pace: bool,
}

/// A stamp that an iteration left: the name and the cell it is on, and whether it is of a read.
pub struct Trace {
    name: usize,
    cell: usize,
    read: bool,
    stamp: Stamp,
}

/// A way through a plan that comes to calls and repeats them.
pub trait Course {
    fn ranks(&self) -> &Ranks;
    fn ranks_mut(&mut self) -> &mut Ranks;
    /// How often each segment ran.
    fn runs(&mut self) -> &mut Vec<u64>;
    fn atoms(&self, tensor: TensorId, slot: u32) -> Atoms;
    /// Goes through the body of the call once, under the bindings `env`.
    fn once(&mut self, env: &Env) -> Result<()>;
    /// Finds of calls that are over, kept to be filled again.
    fn spare(&mut self) -> &mut Vec<Finds>;

    /// Is told that the rest of a call is about to be taken in one stride: `before` is what the iteration before the
    /// last found, and each iteration that is left is `d` later than the one before it.
    fn strides(&mut self, _before: &Finds, _d: u64) {}

    /// How the iterations of a call are alike; `None` where slots meet in a way that changes from iteration to
    /// iteration.
    fn alike(&self, names: &[Name], args: &[Arg], repeat: u32, env: &Env) -> Option<Rc<Alike>> {
        self.compared(names, args, repeat, env)
    }

    /// [`alike`](Course::alike), found out anew.
    fn compared(&self, names: &[Name], args: &[Arg], repeat: u32, env: &Env) -> Option<Rc<Alike>> {
        let classes = self.ranks().classes;
        let cells = |tensor: TensorId| {
            let atoms = self.atoms(tensor, 0);
            (atoms.first as usize * classes, atoms.count as usize * classes)
        };
        Alike::of(names, args, repeat, env, &cells).map(Rc::new)
    }

    /// Goes through the body `repeat` times. `names`: the slots that it touches; `None` where no strides may be taken.
    /// Errors: those of [`once`](Course::once), a step longer than can be told.
    fn repeat(&mut self, names: Option<Rc<[Name]>>, args: &[Arg], repeat: u32, env: &Env) -> Result<()> {
        let alike = names.filter(|_| repeat > 2).and_then(|names| self.alike(&names, args, repeat, env));
        let outside = std::mem::replace(&mut self.ranks_mut().floor, u64::MAX);
        let (mut earliest, mut led) = (outside, true);
        // What the iteration before found; and by how much later than the one before it, and how many times in a row.
        let (mut before, mut agreed): (Option<Finds>, (u64, u32)) = (None, (0, 0));
        for i in 0..repeat {
            // What the first iteration finds may be what all others find. How early it will begin is not known yet.
            let since = if i > 0 { self.ranks().floor } else { outside };
            if let Some(alike) = alike.as_deref().filter(|_| since < u64::MAX) {
                let mut finds = self.spare().pop().unwrap_or_default();
                self.find(alike, i, since, &mut finds);
                let floor = self.ranks().floor;
                let mut step = before.as_ref().and_then(|b| finds.later_than(b, alike, floor, led));
                let too_many = finds.most_held > MOST_HELD;
                if finds.most_held <= FEW_HELD || (step.is_some() || i < FIRST) && !too_many {
                    self.find_held(&mut finds);
                    step = step.filter(|d| before.as_ref().is_some_and(|b| finds.held_later_than(b, *d, floor)));
                } else {
                    step = None;
                }
                agreed = match step {
                    Some(d) if d == agreed.0 => (d, agreed.1 + 1),
                    Some(d) => (d, 1),
                    None => (0, 0),
                };
                let last = before.replace(finds);
                if let Some(last) = last {
                    let stride = agreed.1 >= alike.lag && self.rest_is_early(alike, i..repeat);
                    if stride {
                        self.strides(&last, agreed.0);
                        self.take(alike, i..repeat, &last, agreed.0);
                    }
                    self.spare().push(last);
                    if stride {
                        break;
                    }
                }
            }
            let ranks = self.ranks_mut();
            ranks.floor = u64::MAX;
            let led_before = std::mem::replace(&mut ranks.host_led, false);
            self.once(&bind(args, env, i))?;
            let ranks = self.ranks_mut();
            in_time(ranks.state.first().map_or(0, |state| state.compute_end))?;
            led = ranks.host_led;
            ranks.host_led |= led_before;
            earliest = earliest.min(ranks.floor);
        }
        self.spare().extend(before);
        self.ranks_mut().floor = earliest;
        Ok(())
    }

    /// Fills `finds` with what iteration `i` finds, except for what is held: it counts the spells that are over after
    /// `since`.
    fn find(&mut self, alike: &Alike, i: u32, since: u64, finds: &mut Finds) {
        finds.clear();
        finds.most_held = self.ranks().held_since(since);
        if finds.most_held > FEW_HELD {
            self.ranks_mut().forget();
            finds.most_held = self.ranks().held_since(since);
        }
        finds.runs.extend_from_slice(self.runs());
        let ranks = self.ranks();
        finds.held_since = since;
        let walked = alike.cells.iter().filter(|name| name.walks).map(|name| name.of(i));
        for cells in alike.fixed.iter().cloned().chain(walked) {
            extend(&mut finds.written, &ranks.stamps.written[cells.clone()]);
            extend(&mut finds.read, &ranks.stamps.read[cells]);
        }
        for state in &ranks.state {
            for port in &state.ports {
                finds.lost.push(port.lost());
                finds.marks.push(port.mark());
            }
            finds.waited.extend_from_slice(&state.waited);
            finds.compute_end.push(state.compute_end);
            finds.owed.extend(state.owed.iter().flatten().filter(|_| state.owes));
        }
        finds.lanes.extend_from_slice(&ranks.stamps.lanes);
        finds.devices.extend_from_slice(&ranks.devices);
        finds.host.extend_from_slice(&ranks.host);
    }

    /// Lists the spells that are over after the time from which they were counted, and the SMs that are held.
    fn find_held(&self, finds: &mut Finds) {
        for state in &self.ranks().state {
            for port in &state.ports {
                port.since(finds.held_since, &mut |spell| finds.held.push(held(spell)));
                finds.held_ends.push(finds.held.len());
            }
            finds.held.extend_from_slice(&state.sms);
            finds.held_ends.push(finds.held.len());
        }
    }

    /// Whether the slots that the iterations left are the first to touch have stamps from before the floor.
    fn rest_is_early(&self, alike: &Alike, rest: Range<u32>) -> bool {
        let ranks = self.ranks();
        let early = |cells: Range<usize>| {
            let early = |stamps: &[Stamp]| stamps.iter().all(|s| s.ps() < ranks.floor);
            early(&ranks.stamps.written[cells.clone()]) && early(&ranks.stamps.read[cells])
        };
        alike.walks.iter().all(|walk| {
            // Slots that lie one behind the other are looked at in one go.
            if let Some(slots) = walk.run(rest.clone())
                && early(walk.first + slots.start * walk.cells..walk.first + slots.end * walk.cells)
            {
                return true;
            }
            rest.clone().all(|j| {
                let slot = walk.slot(j);
                let first = walk.first + slot as usize * walk.cells;
                // A slot that nobody has touched is early: to look that up is cheaper than to find who has.
                early(first..first + walk.cells)
                    || alike.touched(0..rest.start).any(|before| before == (walk.tensor, slot))
            })
        })
    }

    /// The stamps that iteration `i` left, except for those from before the floor: on slots that all iterations share,
    /// and on slots that are its own.
    fn traces(&self, alike: &Alike, i: u32) -> [Vec<Trace>; 2] {
        let (ranks, mut all) = (self.ranks(), [Vec::with_capacity(64), Vec::with_capacity(64)]);
        for (number, name) in alike.cells.iter().enumerate() {
            let (cells, found) = (name.of(i), &mut all[usize::from(name.walks)]);
            for (read, stamps) in [(false, &ranks.stamps.written), (true, &ranks.stamps.read)] {
                for (cell, &stamp) in stamps[cells.clone()].iter().enumerate() {
                    if stamp.ps() >= ranks.floor {
                        found.push(Trace { name: number, cell, read, stamp });
                    }
                }
            }
        }
        all
    }

    /// Leaves in each of the iterations the stamps of `traces`, `d` later than in the one before.
    fn retrace(&mut self, alike: &Alike, iterations: Range<u32>, traces: &[Trace], d: u64) {
        let stamps = &mut self.ranks_mut().stamps;
        let mut leave = |trace: &Trace, at: usize, n: u32| {
            let stamps = if trace.read { &mut stamps.read } else { &mut stamps.written };
            stamps[at + trace.cell] = trace.stamp.later(d * u64::from(n + 1));
        };
        let mut met = Vec::with_capacity(traces.len());
        for trace in traces {
            let name = &alike.cells[trace.name];
            match name.pace(iterations.clone()).filter(|_| name.alone) {
                Some((first, step)) => {
                    let mut at = first;
                    for n in 0..iterations.len() as u32 {
                        leave(trace, at, n);
                        at = at.wrapping_add_signed(step);
                    }
                }
                None => met.push(trace),
            }
        }
        // Where two walks come upon the same slots, the later iteration overwrites the stamps of the earlier.
        for (n, j) in (0..).zip(iterations) {
            met.iter().for_each(|trace| leave(trace, alike.cells[trace.name].of(j).start, n));
        }
    }

    /// Takes the iterations `rest`, each `d` later than the one before, in one stride.
    fn take(&mut self, alike: &Alike, rest: Range<u32>, before: &Finds, d: u64) {
        let (floor, left) = (self.ranks().floor, rest.len() as u64);
        let [shared, walked] = self.traces(alike, rest.start - 1);
        self.retrace(alike, rest.clone(), &walked, d);
        // A slot that all iterations share has the stamps of the last one.
        self.retrace(alike, rest.end - 1..rest.end, &shared, d * left);
        let by = d * left;
        let ranks = self.ranks_mut();
        ranks.stamps.lanes.iter_mut().filter(|l| l.ps() >= floor).for_each(|l| *l = l.later(by));
        // With several programs the guess stays: what is posted next may have begun before all of this.
        ranks.guess.iter_mut().filter(|guess| guess.posted.is_empty()).for_each(|guess| guess.later(by));
        ranks.devices.iter_mut().filter(|t| **t >= floor).for_each(|t| *t += by);
        // The CPU goes on at its own pace, whether that is the device's or ahead of it.
        ranks.host.iter_mut().zip(&before.host).for_each(|(now, was)| *now += (*now - was) * left);
        let width = before.waited.len() / ranks.classes;
        let ports = before.marks.chunks(PORTS);
        for ((state, waited), marks) in ranks.state.iter_mut().zip(before.waited.chunks(width)).zip(ports) {
            for (port, &mark) in state.ports.iter_mut().zip(marks) {
                port.again(mark, d, left);
            }
            for held in state.sms.iter_mut().filter(|h| h.to > floor) {
                (held.from, held.to) = (held.from + by, held.to + by);
            }
            state.compute_end += by;
            state.owed.iter_mut().flatten().for_each(|owed| owed.later(floor, by));
            state.past.later(floor, by, d);
            state.waited.iter_mut().zip(waited).for_each(|(now, was)| *now += (*now - was) * left);
        }
        for (segment, runs) in self.runs().iter_mut().enumerate() {
            *runs += (*runs - before.runs.get(segment).copied().unwrap_or(0)) * left;
        }
    }
}

/// Adds all stamps of `from`, mostly a single one.
fn extend(to: &mut Vec<Stamp>, from: &[Stamp]) {
    match *from {
        [one] => to.push(one),
        _ => to.extend_from_slice(from),
    }
}

impl Finds {
    fn clear(&mut self) {
        [&mut self.lanes, &mut self.written, &mut self.read].into_iter().for_each(Vec::clear);
        [&mut self.lost, &mut self.compute_end, &mut self.devices, &mut self.host, &mut self.waited, &mut self.runs]
            .into_iter()
            .for_each(Vec::clear);
        self.held.clear();
        self.held_ends.clear();
        self.owed.clear();
        self.marks.clear();
        self.most_held = 0;
    }

    /// What each iteration adds, where this is what one iteration finds, and `ranks` and `runs` are what the next
    /// finds, `d` later.
    pub fn pace(&self, ranks: &Ranks, runs: &[u64], d: u64) -> Pace {
        let waited = ranks.state.iter().flat_map(|state| &state.waited).zip(&self.waited);
        let runs = runs.iter().enumerate().map(|(s, now)| now - self.runs.get(s).copied().unwrap_or(0));
        Pace {
            d,
            floor: ranks.floor,
            waited: waited.map(|(now, was)| now - was).collect(),
            runs: runs.collect(),
            host_keeps_pace: ranks.host.iter().zip(&self.host).all(|(now, was)| now - was == d),
        }
    }

    /// One of the lists of what is held, by its number.
    fn held(&self, list: usize) -> &[Held] {
        &self.held[list.checked_sub(1).map_or(0, |before| self.held_ends[before])..self.held_ends[list]]
    }

    /// By how much everything that matters, except what is held, is later than in `before`, what the iteration before
    /// found, whose earliest start was `floor`; `None` if not all by the same. `led`: whether an op of it waited for
    /// the CPU.
    fn later_than(&self, before: &Finds, alike: &Alike, floor: u64, led: bool) -> Option<u64> {
        if floor < before.held_since {
            return None;
        }
        let d = self.compute_end[0].checked_sub(before.compute_end[0])?;
        let same = |now: u64, then: u64| now == then + d || (now < floor + d && then < floor);
        let stamps = |now: &[Stamp], then: &[Stamp]| {
            now.iter().zip(then).all(|(n, t)| *n == t.later(d) || (n.ps() < floor + d && t.ps() < floor))
        };
        // Only ops of the same lane ask for a stamp that its own ops have left in this iteration or the one before, and
        // they come behind it anyway.
        let in_order = |cell: usize, n: &Stamp, t: &Stamp| {
            n > t && alike.lanes[cell].is_some_and(|lane| n.lane() == lane && t.lane() == lane)
        };
        let atoms = |now: &[Stamp], then: &[Stamp]| {
            now.iter().zip(then).enumerate().all(|(cell, (n, t))| {
                *n == t.later(d) || (n.ps() < floor + d && t.ps() < floor) || in_order(cell, n, t)
            })
        };
        let all = self.compute_end.iter().zip(&before.compute_end).all(|(n, t)| *n == t + d)
            && stamps(&self.lanes, &before.lanes)
            && atoms(&self.written, &before.written)
            && atoms(&self.read, &before.read)
            && self.owed.len() == before.owed.len()
            && self.owed.iter().zip(&before.owed).all(|(n, t)| same(n.last, t.last) && same(n.until, t.until))
            && self.devices.iter().zip(&before.devices).all(|(n, t)| same(*n, *t))
            && self.host.iter().zip(&before.host).all(|(n, t)| *n == t + d || (n - t <= d && (*n < floor || !led)));
        all.then_some(d)
    }

    /// Whether what is held is `d` later, too; false where one of the two has no list of it.
    fn held_later_than(&self, before: &Finds, d: u64, floor: u64) -> bool {
        let held = |now: &[Held], then: &[Held], since: u64| {
            let now = now.iter().filter(|h| h.to > since + d).map(|h| (h.from, h.to, h.amount));
            now.eq(then.iter().filter(|h| h.to > since).map(|h| (h.from + d, h.to + d, h.amount)))
        };
        // Each class has a list for each port, and then one for its SMs.
        let of_class = |class: usize| {
            let list = |i: usize| (self.held(class * LISTS + i), before.held(class * LISTS + i));
            let ports = (0..PORTS).all(|i| {
                let port = class * PORTS + i;
                // The iteration before asked for no earlier time, and the next must not find that the port has forgotten more.
                let asked = floor.max(before.lost[port]);
                self.lost[port] <= asked + d && held(list(i).0, list(i).1, asked)
            });
            let sms = list(PORTS);
            ports && held(sms.0, sms.1, floor)
        };
        let classes = self.compute_end.len();
        let listed = |finds: &Finds| finds.held_ends.len() == classes * LISTS;
        listed(self) && listed(before) && (0..classes).all(of_class)
    }
}
