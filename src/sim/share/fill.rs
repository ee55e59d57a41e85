//! Water-filling of the classes whose rate may change, all others held still; then the check that the others may stay.

use super::{Change, NONE, Share};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Relative difference below which two levels are the same.
const SAME: f64 = 1e-9;

/// A level in a heap. Levels are never NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Level(f64);

impl PartialOrd for Level {
    fn partial_cmp(&self, other: &Level) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Eq for Level {}

impl Ord for Level {
    fn cmp(&self, other: &Level) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// A resource that freed classes use.
#[derive(Debug, Clone, Copy)]
struct Basin {
    resource: u32,
    /// Capacity that no class has yet.
    left: f64,
    /// Units a second that the classes which are not fixed yet take at a level of 1.
    weight: f64,
    /// Number of classes that are not fixed yet: once there are none, the rest of `weight` is a rounding error.
    open: u32,
    /// The level at which it became full, if it binds any class.
    full_at: f64,
}

impl Basin {
    fn of(resource: u32) -> Basin {
        Basin { resource, left: 0.0, weight: 0.0, open: 0, full_at: f64::INFINITY }
    }
}

/// Room that a filling needs, and the next one uses again.
#[derive(Default)]
pub struct Scratch {
    round: u32,
    freed: Vec<u32>,
    /// The rates that freed classes had before.
    before: Vec<f64>,
    basins: Vec<Basin>,
    /// The basin of each resource, valid if that basin's resource is this one.
    basin_of: Vec<u32>,
    heap: BinaryHeap<Reverse<(Level, u32)>>,
    caps: Vec<(Level, u32)>,
}

impl Share {
    /// Finds the rates after a change, looking no further than its effects reach.
    pub(super) fn fill(&mut self) {
        let mut s = std::mem::take(&mut self.scratch);
        s.round = s.round.wrapping_add(1);
        s.basin_of.resize(self.rooms.len(), NONE);
        self.free_bound(&mut s);
        self.free_fresh(&mut s);
        while !s.freed.is_empty() || !s.basins.is_empty() {
            self.fill_freed(&mut s);
            if !self.free_more(&mut s) {
                break;
            }
        }
        self.keep(&mut s);
        self.scratch = s;
    }

    fn free(&mut self, id: u32, s: &mut Scratch) {
        let class = &mut self.classes[id as usize];
        if class.freed == s.round || class.count == 0 {
            return;
        }
        class.freed = s.round;
        s.freed.push(id);
        s.before.push(class.rate);
        for used in &class.uses {
            open(&mut s.basins, &mut s.basin_of, used.resource);
        }
    }

    /// Frees the classes that came, or whose number grew. One that shares with nobody needs no filling.
    fn free_fresh(&mut self, s: &mut Scratch) {
        for i in 0..self.fresh.len() {
            let id = self.fresh[i];
            let class = &self.classes[id as usize];
            let alone = |used: &super::class::Used| self.rooms[used.resource as usize].users.len() == 1;
            if class.freed != s.round && class.count > 0 && class.uses.iter().all(alone) {
                self.fill_alone(id);
            } else {
                self.free(id, s);
            }
        }
    }

    fn fill_alone(&mut self, id: u32) {
        let class = &self.classes[id as usize];
        let (mut rate, mut bound) = (class.cap, NONE);
        for (at, used) in class.uses.iter().enumerate() {
            let most = self.rooms[used.resource as usize].capacity / class.takes(at as u32);
            if most < rate {
                (rate, bound) = (most, used.resource);
            }
        }
        let class = &mut self.classes[id as usize];
        class.bound = bound;
        if rate != class.rate {
            class.set_rate(rate, self.now);
        }
    }

    /// Frees the classes that were bound by a resource that changed.
    fn free_bound(&mut self, s: &mut Scratch) {
        while let Some(resource) = self.dirty.pop() {
            let shrunk = std::mem::take(&mut self.rooms[resource as usize].dirty) == Some(Change::Capacity);
            if shrunk && !self.rooms[resource as usize].users.is_empty() {
                open(&mut s.basins, &mut s.basin_of, resource);
            }
            for i in 0..self.rooms[resource as usize].users.len() {
                let (id, _) = self.rooms[resource as usize].users[i];
                if self.classes[id as usize].bound == resource {
                    self.free(id, s);
                }
            }
        }
    }

    /// Finds the max-min rates of the freed classes in what the others leave: raises the level of all of them, and
    /// fixes those that meet their cap or a full resource. A resource's level only grows while others are fixed below
    /// it, so that an entry of the heap that is out of date is too low, and is put back when it comes up.
    fn fill_freed(&mut self, s: &mut Scratch) {
        self.measure(s);
        s.caps.clear();
        for &id in &s.freed {
            let class = &mut self.classes[id as usize];
            class.fixed = false;
            s.caps.push((Level(class.cap / class.weight), id));
        }
        s.caps.sort_unstable();
        s.heap.clear();
        s.heap.extend(s.basins.iter().enumerate().filter(|(_, b)| b.open > 0).map(|(i, b)| entry(b, i)));
        let (mut next_cap, mut open) = (0, s.freed.len());
        while open > 0 {
            while next_cap < s.caps.len() && self.classes[s.caps[next_cap].1 as usize].fixed {
                next_cap += 1;
            }
            let cap = s.caps.get(next_cap).map_or(f64::INFINITY, |c| c.0.0);
            let Some(Reverse((level, at))) = s.heap.peek().copied().filter(|top| top.0.0.0 < cap) else {
                let id = s.caps[next_cap].1;
                self.fix(id, cap, NONE, s);
                open -= 1;
                continue;
            };
            s.heap.pop();
            let basin = s.basins[at as usize];
            if basin.open == 0 {
                continue;
            }
            if entry(&basin, 0).0.0.0 > level.0 * (1.0 + 1e-12) {
                s.heap.push(entry(&basin, at as usize));
                continue;
            }
            s.basins[at as usize].full_at = level.0;
            for i in 0..self.rooms[basin.resource as usize].users.len() {
                let (id, _) = self.rooms[basin.resource as usize].users[i];
                let class = &self.classes[id as usize];
                if class.freed == s.round && !class.fixed {
                    self.fix(id, level.0, basin.resource, s);
                    open -= 1;
                }
            }
        }
    }

    /// Measures what the classes that are held still leave of every basin, and what the freed ones weigh on it.
    fn measure(&self, s: &mut Scratch) {
        for basin in &mut s.basins {
            let room = &self.rooms[basin.resource as usize];
            *basin = Basin { left: room.capacity, ..Basin::of(basin.resource) };
            for &(id, at) in &room.users {
                let class = &self.classes[id as usize];
                if class.freed == s.round {
                    basin.weight += class.takes(at) * class.weight;
                    basin.open += 1;
                } else {
                    basin.left -= class.takes(at) * class.rate;
                }
            }
        }
    }

    fn fix(&mut self, id: u32, level: f64, bound: u32, s: &mut Scratch) {
        let class = &mut self.classes[id as usize];
        class.fixed = true;
        class.bound = bound;
        // The rate is found but not yet kept: service is counted with the one before until all is settled.
        class.rate = if bound == NONE { class.cap } else { level * class.weight };
        for used in &class.uses {
            let basin = &mut s.basins[s.basin_of[used.resource as usize] as usize];
            let takes = used.demand * f64::from(class.count);
            basin.left -= takes * class.rate;
            basin.weight -= takes * class.weight;
            basin.open -= 1;
        }
    }

    /// Frees the classes whose bottleneck does not hold beside the rates just found; false if there are none.
    fn free_more(&mut self, s: &mut Scratch) -> bool {
        let known = s.freed.len();
        for i in 0..s.basins.len() {
            let basin = s.basins[i];
            let room = &self.rooms[basin.resource as usize];
            let (mut used, mut weights, mut highest) = (0.0, 0.0, 0.0f64);
            for &(id, at) in &room.users {
                let class = &self.classes[id as usize];
                used += class.takes(at) * class.rate;
                weights += class.takes(at) * class.weight;
                if class.freed == s.round {
                    highest = highest.max(class.level());
                }
            }
            // A class below an equal share of all leaves the rest to the others, and need not give way.
            let equal = room.capacity / weights;
            let over = used > room.capacity * (1.0 + SAME);
            let limit = if basin.full_at.is_finite() || over {
                (if basin.full_at.is_finite() { basin.full_at } else { 0.0 }).max(equal)
            } else {
                f64::INFINITY
            };
            let slack = used < room.capacity * (1.0 - SAME);
            for u in 0..room.users.len() {
                let room = &self.rooms[basin.resource as usize];
                let (id, _) = room.users[u];
                let class = &self.classes[id as usize];
                if class.freed == s.round {
                    continue;
                }
                let level = class.level();
                let unbound = class.bound == basin.resource && (slack || highest > level * (1.0 + SAME));
                if unbound || level > limit * (1.0 + SAME) {
                    self.free(id, s);
                }
            }
        }
        s.freed.len() > known
    }

    /// Makes the rates found those that count from now on.
    fn keep(&mut self, s: &mut Scratch) {
        for (i, &id) in s.freed.iter().enumerate() {
            let class = &mut self.classes[id as usize];
            let (found, before) = (class.rate, s.before[i]);
            class.rate = before;
            if (found - before).abs() > 1e-12 * before {
                class.set_rate(found, self.now);
                self.late.push(id);
            }
        }
        s.basins.iter().for_each(|b| s.basin_of[b.resource as usize] = NONE);
        s.basins.clear();
        s.freed.clear();
        s.before.clear();
    }
}

fn open(basins: &mut Vec<Basin>, basin_of: &mut [u32], resource: u32) {
    if basin_of[resource as usize] == NONE {
        basin_of[resource as usize] = basins.len() as u32;
        basins.push(Basin::of(resource));
    }
}

fn entry(basin: &Basin, at: usize) -> Reverse<(Level, u32)> {
    Reverse((Level((basin.left / basin.weight).max(0.0)), at as u32))
}
