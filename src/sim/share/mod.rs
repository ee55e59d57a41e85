//! Shared resources: who gets how much of them, as weighted max-min fair rates, kept up to date as activities come and
//! go.
//!
//! **The mathematics.** Activity `i` has work left and a rate `y_i >= 0`, and uses `d_ri y_i` of resource `r`. Rates are
//! feasible if `y_i <= cap_i` for all `i` and `sum_i d_ri y_i <= C_r` for all `r`. With weights `w_i`, the *level* of an
//! activity is `y_i / w_i`. A feasible allocation is max-min fair if no level can grow without a level that is no higher
//! having to shrink. It exists, is unique, and is known by its *bottlenecks*: every activity is at its cap, or uses a
//! resource that is full and on which no one's level is higher (Bertsekas and Gallager, Data Networks, section 6.5.2).
//!
//! **What is incremental.** Equal activities are one *class*, one variable that counts as often as it has members
//! (`class`). What ends together (relative `TOGETHER`) is taken out together, before rates are found again. A change
//! frees those that were bound by the resources it touched; they are filled with all others held still (`fill`), then
//! every bottleneck nearby is checked, and whoever's does not hold any more is freed, too. Where all hold, the allocation
//! is *the* max-min fair one by the theorem above, however few were looked at. `full` finds it anew from nothing: the
//! slow oracle of the tests.
//!
//! A flow over links has its bytes as work, the rate of its own transport as cap, and 1 on every link. An op that others
//! slow down has its seconds as work, a cap of 1, and on each resource what it uses a second when alone.

mod class;
mod fill;
pub mod full;

use class::{Class, Ends};
use fill::Scratch;
use rustc_hash::{FxHashMap, FxHasher};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::hash::{Hash, Hasher};

/// Something with a capacity, as given by [`Share::resource`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Resource(pub u32);

/// Something that makes progress, as given by [`Share::add`]. Names what was added once and nothing after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Activity {
    slot: u32,
    born: u64,
}

/// The demand of an activity: its work, and what it takes of resources.
#[derive(Debug, Clone, PartialEq)]
pub struct Demand<'a> {
    /// Bytes, or seconds when alone; above zero.
    pub work: f64,
    /// Rate when alone, work per second.
    pub cap: f64,
    /// Activities share a full resource in proportion to their weights.
    pub weight: f64,
    /// Units a second that a rate of 1 takes of each resource.
    pub uses: &'a [(Resource, f64)],
    /// Whatever the caller wants to be told when the activity is done.
    pub tag: u64,
}

impl<'a> Demand<'a> {
    /// The demand of `bytes` over links, at most at `cap` bytes/s.
    pub fn flow(bytes: f64, cap: f64, links: &'a [(Resource, f64)], tag: u64) -> Demand<'a> {
        Demand { work: bytes, cap, weight: 1.0, uses: links, tag }
    }
}

/// Activities that share a resource end together if their ends are within this part of their duration.
pub const TOGETHER: f64 = 1e-6;

/// In place of a slot, a class or a resource: none; a class without a resource is bound by its own cap.
const NONE: u32 = u32::MAX;
/// Picoseconds in a second.
const PS: f64 = 1e12;

/// A change of a resource since rates were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    /// A user left: nobody has to give way.
    Left,
    Capacity,
}

struct Room {
    capacity: f64,
    /// The classes that use it, each with the place of the resource in the class's list.
    users: Vec<(u32, u32)>,
    /// Units that it has given to work that is done.
    carried: f64,
    dirty: Option<Change>,
}

struct Slot {
    born: u64,
    class: u32,
    work: f64,
    /// The service of the class at which the activity is done.
    finish: f64,
    started: u64,
    tag: u64,
}

/// The resources, the activities that share them, and the time; all times are in picoseconds.
#[derive(Default)]
pub struct Share {
    rooms: Vec<Room>,
    classes: Vec<Class>,
    free_classes: Vec<u32>,
    by_kind: FxHashMap<u64, u32>,
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
    ends: BinaryHeap<Reverse<(u64, u32, u32)>>,
    dirty: Vec<u32>,
    /// Classes that came, and classes whose next end has to be found again.
    fresh: Vec<u32>,
    late: Vec<u32>,
    scratch: Scratch,
    batch: Vec<(u64, u32)>,
    now: u64,
    born: u64,
    alive: usize,
}

impl Share {
    pub fn new() -> Share {
        Share::default()
    }

    /// A resource of `capacity` units a second.
    pub fn resource(&mut self, capacity: f64) -> Resource {
        assert!(capacity >= 0.0 && capacity.is_finite(), "capacity {capacity}");
        self.rooms.push(Room { capacity, users: Vec::new(), carried: 0.0, dirty: None });
        Resource(self.rooms.len() as u32 - 1)
    }

    /// Changes a capacity from now on; 0 is a resource that is down.
    pub fn set_capacity(&mut self, resource: Resource, capacity: f64) {
        assert!(capacity >= 0.0 && capacity.is_finite(), "capacity {capacity}");
        self.rooms[resource.0 as usize].capacity = capacity;
        self.touch(resource.0, Change::Capacity);
    }

    pub fn capacity(&self, resource: Resource) -> f64 {
        self.rooms[resource.0 as usize].capacity
    }

    /// The time, in picoseconds since the start.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Number of activities that are not done.
    pub fn len(&self) -> usize {
        self.alive
    }

    pub fn is_empty(&self) -> bool {
        self.alive == 0
    }

    /// Starts an activity now.
    pub fn add(&mut self, demand: &Demand) -> Activity {
        assert!(demand.work > 0.0 && demand.work.is_finite(), "work {}", demand.work);
        assert!(demand.cap >= 0.0 && demand.cap.is_finite(), "cap {}", demand.cap);
        assert!(demand.weight > 0.0 && demand.weight.is_finite(), "weight {}", demand.weight);
        let id = self.class_of(demand);
        let class = &mut self.classes[id as usize];
        let finish = class.service_at(self.now) + demand.work;
        self.born += 1;
        let slot = Slot { born: self.born, class: id, work: demand.work, finish, started: self.now, tag: demand.tag };
        let at = self.free_slots.pop().unwrap_or(self.slots.len() as u32);
        match self.slots.get_mut(at as usize) {
            Some(free) => *free = slot,
            None => self.slots.push(slot),
        }
        class.count += 1;
        class.flows.push(Ends { finish, born: self.born, slot: at });
        self.fresh.push(id);
        self.alive += 1;
        Activity { slot: at, born: self.born }
    }

    /// Takes an activity out that is not wanted any more; what it has done stays done. False if it has ended before.
    pub fn cancel(&mut self, activity: Activity) -> bool {
        let Some(left) = self.remaining(activity) else { return false };
        let done = self.slots[activity.slot as usize].work - left;
        self.take_out(activity.slot, done);
        true
    }

    /// Work that an activity has left now; `None` if it has ended.
    pub fn remaining(&self, activity: Activity) -> Option<f64> {
        let slot = self.slots.get(activity.slot as usize).filter(|s| s.born == activity.born)?;
        let class = &self.classes[slot.class as usize];
        Some((slot.finish - class.service_at(self.now)).clamp(0.0, slot.work))
    }

    /// Rate of an activity from now on, in work per second; `None` if it has ended.
    pub fn rate(&mut self, activity: Activity) -> Option<f64> {
        self.settle();
        let slot = self.slots.get(activity.slot as usize).filter(|s| s.born == activity.born)?;
        Some(self.classes[slot.class as usize].rate)
    }

    /// The resource that keeps an activity from going faster; `None` if it has ended, or if only its cap does.
    pub fn bottleneck(&mut self, activity: Activity) -> Option<Resource> {
        self.settle();
        let slot = self.slots.get(activity.slot as usize).filter(|s| s.born == activity.born)?;
        let bound = self.classes[slot.class as usize].bound;
        (bound != NONE).then_some(Resource(bound))
    }

    /// Units a second that a resource gives from now on.
    pub fn load(&mut self, resource: Resource) -> f64 {
        self.settle();
        let users = &self.rooms[resource.0 as usize].users;
        users
            .iter()
            .map(|&(class, at)| self.classes[class as usize].takes(at) * self.classes[class as usize].rate)
            .sum()
    }

    /// Units that a resource has given to activities that have ended.
    pub fn carried(&self, resource: Resource) -> f64 {
        self.rooms[resource.0 as usize].carried
    }

    /// When the next activities end if nothing changes, ps; `None` if none ever does.
    pub fn next_end(&mut self) -> Option<u64> {
        self.settle();
        while let Some(&Reverse((end, class, stamp))) = self.ends.peek() {
            if self.classes[class as usize].stamp == stamp {
                return Some(end.max(self.now));
            }
            self.ends.pop();
        }
        None
    }

    /// Lets time pass. Nothing may end on the way: ends are events, see [`Share::next_end`] and [`Share::complete`].
    pub fn advance(&mut self, to: u64) {
        assert!(to >= self.now, "back from {} to {to} ps", self.now);
        debug_assert!(self.next_end().is_none_or(|end| end >= to), "an end was passed over");
        self.settle();
        self.now = to;
    }

    /// Goes to the next end and takes out all activities that end then; adds their tags in the order in which they
    /// came. `None` if nothing ever ends.
    pub fn complete(&mut self, tags: &mut Vec<u64>) -> Option<u64> {
        let to = self.next_end()?;
        self.now = to;
        while let Some(&Reverse((end, class, stamp))) = self.ends.peek() {
            if self.classes[class as usize].stamp == stamp {
                if !self.ends_with(class, end) {
                    break;
                }
                self.complete_class(class);
            }
            self.ends.pop();
        }
        self.batch.sort_unstable();
        tags.extend(self.batch.drain(..).map(|(_, slot)| self.slots[slot as usize].tag));
        Some(to)
    }

    /// Whether an activity of `class` that ends at `end` ends now: exactly, or nearly so if its end hangs on others'
    /// ends.
    fn ends_with(&self, class: u32, end: u64) -> bool {
        let class = &self.classes[class as usize];
        let started = class.flows.peek().map_or(end, |head| self.slots[head.slot as usize].started);
        let near = if class.bound == NONE { 0.0 } else { TOGETHER * (end - started.min(end)) as f64 };
        end.saturating_sub(self.now) as f64 <= near
    }

    fn complete_class(&mut self, id: u32) {
        while let Some(&head) = self.classes[id as usize].flows.peek() {
            let gone = self.slots[head.slot as usize].born != head.born;
            let end = if gone { 0 } else { self.end_of(id, head.slot) };
            if !gone && !self.ends_with(id, end) {
                break;
            }
            self.classes[id as usize].flows.pop();
            if !gone {
                let work = self.slots[head.slot as usize].work;
                self.batch.push((head.born, head.slot));
                self.take_out(head.slot, work);
            }
            if self.classes[id as usize].count == 0 {
                break;
            }
        }
    }

    /// Takes an activity out, of which `done` has been done.
    fn take_out(&mut self, slot: u32, done: f64) {
        let id = self.slots[slot as usize].class;
        self.slots[slot as usize].born = 0;
        self.free_slots.push(slot);
        self.alive -= 1;
        let class = &mut self.classes[id as usize];
        class.count -= 1;
        class.stamp = class.stamp.wrapping_add(1);
        let empty = class.count == 0;
        for at in 0..class.uses.len() {
            let used = self.classes[id as usize].uses[at];
            self.rooms[used.resource as usize].carried += used.demand * done;
            self.touch(used.resource, Change::Left);
        }
        if empty { self.drop_class(id) } else { self.late.push(id) }
    }

    fn touch(&mut self, resource: u32, change: Change) {
        let room = &mut self.rooms[resource as usize];
        if room.dirty.is_none() {
            self.dirty.push(resource);
        }
        room.dirty = room.dirty.max(Some(change));
    }

    /// The class for a demand, whatever its work: the one there is, or a new one.
    fn class_of(&mut self, demand: &Demand) -> u32 {
        let kind = kind_of(demand);
        if let Some(&id) = self.by_kind.get(&kind)
            && self.classes[id as usize].is_of(demand)
        {
            return id;
        }
        let id = self.free_classes.pop().unwrap_or(self.classes.len() as u32);
        if id as usize == self.classes.len() {
            self.classes.push(Class::default());
        }
        let class = &mut self.classes[id as usize];
        class.begin(demand, kind, self.now);
        for at in 0..class.uses.len() {
            let users = &mut self.rooms[class.uses[at].resource as usize].users;
            class.uses[at].place = users.len() as u32;
            users.push((id, at as u32));
        }
        self.by_kind.insert(kind, id);
        id
    }

    fn drop_class(&mut self, id: u32) {
        for at in 0..self.classes[id as usize].uses.len() {
            let used = self.classes[id as usize].uses[at];
            let users = &mut self.rooms[used.resource as usize].users;
            users.swap_remove(used.place as usize);
            if let Some(&(moved, its)) = users.get(used.place as usize) {
                self.classes[moved as usize].uses[its as usize].place = used.place;
            }
        }
        let class = &mut self.classes[id as usize];
        class.flows.clear();
        if self.by_kind.get(&class.kind) == Some(&id) {
            self.by_kind.remove(&class.kind);
        }
        self.free_classes.push(id);
    }

    /// When an activity ends at the rate its class has, ps. One whose rate never changed is rounded once.
    fn end_of(&self, id: u32, slot: u32) -> u64 {
        let (class, slot) = (&self.classes[id as usize], &self.slots[slot as usize]);
        let (from, left) = if slot.started >= class.since {
            (slot.started, slot.work)
        } else {
            (class.since, (slot.finish - class.service).max(0.0))
        };
        from.saturating_add((left / class.rate * PS).round() as u64).max(self.now)
    }

    /// Finds the rates after all changes since the last time.
    fn settle(&mut self) {
        if self.dirty.is_empty() && self.fresh.is_empty() && self.late.is_empty() {
            return;
        }
        self.fill();
        for list in [std::mem::take(&mut self.fresh), std::mem::take(&mut self.late)] {
            list.iter().for_each(|&id| self.schedule(id));
            if self.fresh.capacity() == 0 {
                self.fresh = list;
                self.fresh.clear();
            } else {
                self.late = list;
                self.late.clear();
            }
        }
    }

    /// Puts the next end of a class on the calendar, in place of what was there.
    fn schedule(&mut self, id: u32) {
        let class = &mut self.classes[id as usize];
        while class.flows.peek().is_some_and(|head| self.slots[head.slot as usize].born != head.born) {
            class.flows.pop();
        }
        class.stamp = class.stamp.wrapping_add(1);
        let (stamp, head) = (class.stamp, class.flows.peek().map(|head| head.slot));
        if let (Some(slot), true) = (head, class.count > 0 && class.rate > 0.0) {
            let end = self.end_of(id, slot);
            self.ends.push(Reverse((end, id, stamp)));
        }
    }
}

fn kind_of(demand: &Demand) -> u64 {
    let mut hasher = FxHasher::default();
    (demand.cap.to_bits(), demand.weight.to_bits()).hash(&mut hasher);
    demand.uses.iter().for_each(|(resource, takes)| (resource.0, takes.to_bits()).hash(&mut hasher));
    hasher.finish()
}

#[cfg(test)]
mod tests;
