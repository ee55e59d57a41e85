//! Activities that are equal except for their work: one variable, however many they are.

use super::{Demand, PS};
use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// A resource that a class uses.
#[derive(Debug, Clone, Copy)]
pub struct Used {
    pub resource: u32,
    /// Units a second that it takes of the resource for each member at a rate of 1.
    pub demand: f64,
    /// The place of the class in the resource's list of users.
    pub place: u32,
}

/// When a member is done, in service of the class: the earliest is the greatest, as a heap wants it.
#[derive(Debug, Clone, Copy)]
pub struct Ends {
    pub finish: f64,
    pub born: u64,
    pub slot: u32,
}

impl PartialEq for Ends {
    fn eq(&self, other: &Ends) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Ends {}

impl PartialOrd for Ends {
    fn partial_cmp(&self, other: &Ends) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ends {
    fn cmp(&self, other: &Ends) -> Ordering {
        other.finish.total_cmp(&self.finish).then(other.born.cmp(&self.born))
    }
}

/// A class: its members have one rate at all times. Its *service* is the work that a member did which was always there;
/// each member is done when the service has grown by the member's own work.
#[derive(Debug, Default)]
pub struct Class {
    pub kind: u64,
    pub uses: Vec<Used>,
    pub cap: f64,
    pub weight: f64,
    pub count: u32,
    pub rate: f64,
    /// The resource that keeps it from going faster; `NONE`: its own cap does.
    pub bound: u32,
    /// The service at `since`, the last time, ps, at which the rate changed.
    pub service: f64,
    pub since: u64,
    pub flows: BinaryHeap<Ends>,
    /// Number of its valid entry in the calendar.
    pub stamp: u32,
    /// The round of the filling in which it was freed.
    pub freed: u32,
    /// Whether its rate was found in this filling.
    pub fixed: bool,
}

impl Class {
    /// Becomes another class, reusing what it has allocated.
    pub fn begin(&mut self, demand: &Demand, kind: u64, now: u64) {
        (self.kind, self.cap, self.weight) = (kind, demand.cap, demand.weight);
        (self.count, self.rate, self.service, self.since) = (0, 0.0, 0.0, now);
        self.bound = super::NONE;
        self.stamp = self.stamp.wrapping_add(1);
        self.uses.clear();
        for &(resource, takes) in demand.uses {
            assert!(takes > 0.0 && takes.is_finite(), "{takes} of resource {}", resource.0);
            match self.uses.iter_mut().find(|u| u.resource == resource.0) {
                Some(twice) => twice.demand += takes,
                None => self.uses.push(Used { resource: resource.0, demand: takes, place: 0 }),
            }
        }
    }

    pub fn is_of(&self, demand: &Demand) -> bool {
        let same = |(used, (resource, takes)): (&Used, &(super::Resource, f64))| {
            used.resource == resource.0 && used.demand == *takes
        };
        self.cap == demand.cap
            && self.weight == demand.weight
            && self.uses.len() == demand.uses.len()
            && self.uses.iter().zip(demand.uses).all(same)
    }

    pub fn service_at(&self, now: u64) -> f64 {
        self.service + self.rate * ((now - self.since) as f64 / PS)
    }

    /// Units a second that all members at a rate of 1 take of the resource at place `at` of the list.
    pub fn takes(&self, at: u32) -> f64 {
        self.uses[at as usize].demand * f64::from(self.count)
    }

    /// Its level: rate over weight.
    pub fn level(&self) -> f64 {
        self.rate / self.weight
    }

    pub fn set_rate(&mut self, rate: f64, now: u64) {
        self.service = self.service_at(now);
        self.since = now;
        self.rate = rate;
    }
}
