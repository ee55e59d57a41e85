//! The links that ranks share, while a step is played: which meetings are on them, and how fast each gets on.
//!
//! A meeting is one activity of [`share`](super::share), with its seconds alone as work. Alone it takes of every link
//! the bytes that it puts there over those seconds; of what is too narrow for all, every flow gets as much as every
//! other, so that a meeting of large flows has to wait for its slowest. A port of its rank that others were posted to
//! before, or that is ill, is its cap.
//!
//! * [`footprint`]: what a meeting puts on which links.
//! * [`census`]: all meetings of all ranks on all links, which links can be too full, and which of those are alike.

pub mod census;
pub mod footprint;

use super::meeting::{Meeting, MeetingId};
use super::pace::Pace;
use super::share::{Demand, Resource, Share};
use crate::act::Machine;
use crate::cluster::{Cluster, Link, LinkClass};
use crate::fold::Fold;
use crate::sim::script::Script;
use census::Census;
use footprint::Way;
use rustc_hash::FxHashMap;
use serde::Serialize;
use std::collections::BTreeMap;

/// Names meetings that are alike on links: lane, way, and the class that sends, or the first class of a collective.
pub type Kind = (u16, Way, u32);

/// The part of each byte that meetings of a kind put on a link that stands for all links like it.
#[derive(Debug, Clone, Copy)]
struct Part {
    resource: Resource,
    share: f64,
    /// The most that one of these meetings puts there.
    own: f64,
}

#[derive(Debug, Clone, Default)]
struct Parts {
    all: Vec<Part>,
    /// The largest flow's share of the bytes.
    flow: f64,
}

/// A link that stands for all like it.
#[derive(Debug, Clone)]
struct Known {
    link: Link,
    like_it: u32,
    capacity: f64,
    /// How long the link was full, ps.
    full: u64,
    slowed: u64,
    /// How much longer meetings took because of it, ps, all together.
    delay: u64,
}

pub struct Links {
    share: Share,
    known: Vec<Known>,
    parts: FxHashMap<Kind, Parts>,
    /// The way of every collective in the list of each program.
    ways: Vec<Vec<Way>>,
    /// Whether to note how long links were full.
    keep: bool,
    /// Speed of what is left of the planes between nodes.
    planes: Pace,
    scratch: Vec<(Resource, f64)>,
}

/// A link that was asked for more than it carries at some time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SharedLink {
    /// Name of the link, as in `uplinks of pod 0`.
    pub link: String,
    /// Number of links that are as full at all times, this one included.
    pub links: u32,
    /// Capacity, in bytes a second.
    pub capacity: f64,
    /// Share of the step in which it was busy, and in which it was full.
    pub busy: f64,
    pub full: f64,
    /// Meetings that took longer because of this link, and by how many seconds together.
    pub slowed: u64,
    pub delay_s: f64,
}

/// Relative amount that capacities are raised by, so that what just fits does, however it was rounded.
const ROUNDING: f64 = 2e-6;
/// A link counts as full from this load on.
const FULL: f64 = 0.999;

impl Links {
    /// The links of a census, links of a kind being one. `keep`: notes how long they were full.
    pub fn new(census: &Census, machine: Machine, fold: &Fold, scripts: &[Script], planes: Pace, keep: bool) -> Links {
        let kinds = census.kinds(machine.cluster, fold);
        let mut first: BTreeMap<u64, (u32, u32)> = BTreeMap::new();
        for (link, kind) in kinds.iter().enumerate() {
            first.entry(*kind).or_insert((link as u32, 0)).1 += 1;
        }
        let mut stands: Vec<(u32, u32)> = first.into_values().collect();
        stands.sort_unstable();
        let (mut share, mut resource_of) = (Share::new(), vec![None; census.links.len()]);
        let mut known = vec![];
        for (at, like_it) in stands {
            let link = census.links[at as usize];
            let capacity = machine.cluster.capacity(link).value();
            resource_of[at as usize] = Some(share.resource(capacity * (1.0 + ROUNDING)));
            known.push(Known { link, like_it, capacity, full: 0, slowed: 0, delay: 0 });
        }
        let mut parts: FxHashMap<Kind, Parts> = FxHashMap::default();
        census.on_links(fold, |link, kind, share, flow| {
            let parts = parts.entry(kind).or_default();
            parts.flow = parts.flow.max(flow);
            let Some(resource) = resource_of[link as usize] else { return };
            match parts.all.iter_mut().find(|part| part.resource == resource) {
                Some(part) => (part.share, part.own) = (part.share + share, part.own.max(share)),
                None => parts.all.push(Part { resource, share, own: share }),
            }
        });
        // Meetings on links of a kind cross the one that stands for them: it is among those counted there.
        parts.values_mut().for_each(|parts| parts.all.sort_by_key(|part| part.resource));
        let ways = scripts.iter().map(|script| census::ways(script, machine)).collect();
        Links { share, known, parts, ways, keep, planes, scratch: vec![] }
    }

    /// The kind of a collective of a program; `None` if it crosses no shared links.
    pub fn kind(&self, program: usize, lane: u16, at: u32, class: u32) -> Option<Kind> {
        let kind = (lane, self.ways[program][at as usize], class);
        self.crosses(&kind).then_some(kind)
    }

    pub fn crosses(&self, kind: &Kind) -> bool {
        self.parts.contains_key(kind)
    }

    /// When the bytes of the next meeting have arrived, ps; `None` if no meeting is under way.
    pub fn next_end(&mut self) -> Option<u64> {
        self.share.next_end()
    }

    /// Goes on to the next end, and tells which meetings' bytes have arrived then; `None` if there is none.
    pub fn complete(&mut self, done: &mut Vec<u64>) -> Option<u64> {
        let to = self.share.next_end()?;
        self.note_full(to);
        self.share.complete(done)
    }

    pub fn advance(&mut self, now: u64) {
        if self.share.now() < now {
            self.note_full(now);
            self.share.advance(now);
        }
    }

    /// Sets the links of the network to what is left of its planes now; returns until when that holds, ps.
    pub fn planes_change(&mut self, now: u64) -> u64 {
        if self.planes.is_well() {
            return u64::MAX;
        }
        self.advance(now);
        let left = self.planes.speed(now);
        for (at, known) in (0..).zip(&self.known) {
            if known.link.is_between_nodes() {
                self.share.set_capacity(Resource(at), known.capacity * left * (1.0 + ROUNDING));
            }
        }
        self.planes.next(now)
    }

    fn note_full(&mut self, to: u64) {
        let from = self.share.now();
        if self.keep && to > from {
            for (at, known) in self.known.iter_mut().enumerate() {
                let load = self.share.load(Resource(at as u32));
                let capacity = self.share.capacity(Resource(at as u32)) / (1.0 + ROUNDING);
                known.full += if load > FULL * capacity { to - from } else { 0 };
            }
        }
    }

    /// Lets a meeting's bytes go at no more than `cap` of their speed, or changes that cap; `false` if it has no bytes.
    pub fn go(&mut self, id: MeetingId, meeting: &mut Meeting, cap: f64) -> bool {
        let mut work = meeting.transit.transfer as f64 * 1e-12;
        if let Some(activity) = meeting.activity {
            if meeting.cap == cap {
                return true;
            }
            work = self.share.remaining(activity).unwrap_or(0.0);
            self.share.cancel(activity);
        }
        meeting.activity = None;
        if work <= 0.0 {
            return false;
        }
        meeting.cap = cap;
        let Some(kind) = meeting.kind else { return false };
        let parts = &self.parts[&kind];
        let speed = meeting.bytes as f64 / (meeting.transit.transfer as f64 * 1e-12);
        self.scratch.clear();
        for part in &parts.all {
            let known = &self.known[part.resource.0 as usize];
            // Alone a meeting takes what the model of its library says, except where hashed flows meet on uplinks, or
            // rows that are not spread evenly on wires.
            let fits = match known.link {
                Link::Up { .. } | Link::Down { .. } | Link::Wire { .. } => 1.0,
                _ => (known.capacity / (part.own * speed)).min(1.0),
            };
            self.scratch.push((part.resource, part.share * speed * fits));
        }
        let flow = (parts.flow * speed).max(f64::MIN_POSITIVE);
        let demand = Demand { work, cap, weight: 1.0 / flow, uses: &self.scratch, tag: u64::from(id) };
        meeting.activity = Some(self.share.add(&demand));
        true
    }

    /// Notes that a meeting took `delay` ps longer than alone.
    pub fn was_slowed(&mut self, kind: &Kind, delay: u64) {
        for part in &self.parts[kind].all {
            let known = &mut self.known[part.resource.0 as usize];
            (known.slowed, known.delay) = (known.slowed + 1, known.delay + delay);
        }
    }

    /// The links that slowed a meeting down, the worst first.
    pub fn told(&self, step_ps: u64, rails: bool) -> Vec<SharedLink> {
        let step = step_ps.max(1) as f64 * 1e-12;
        let tell = |(at, known): (usize, &Known)| SharedLink {
            link: name(known.link, rails),
            links: known.like_it,
            capacity: known.capacity,
            busy: self.share.carried(Resource(at as u32)) / (known.capacity * step),
            full: known.full as f64 * 1e-12 / step,
            slowed: known.slowed,
            delay_s: known.delay as f64 * 1e-12,
        };
        let mut all: Vec<SharedLink> =
            self.known.iter().enumerate().map(tell).filter(|told| told.slowed > 0 && told.full > 0.0).collect();
        all.sort_by(|a, b| b.delay_s.total_cmp(&a.delay_s).then_with(|| a.link.cmp(&b.link)));
        all
    }
}

/// The name of a link in words.
fn name(link: Link, rails: bool) -> String {
    let pods = |pod: u32, tier: u32, rail: u32| match rails && tier == 0 {
        true => format!("links of pod {pod} of tier {tier} on rail {rail}"),
        false => format!("links of pod {pod} of tier {tier}"),
    };
    match link {
        Link::Out(rank) | Link::In(rank) => format!("port of rank {rank}"),
        Link::Peer(a, b) => format!("link from rank {a} to rank {b}"),
        Link::Bridge { node, socket } => format!("bridge from socket {socket} of node {node}"),
        Link::NicOut { node, nic } => format!("NIC {nic} out of node {node}"),
        Link::NicIn { node, nic } => format!("NIC {nic} into node {node}"),
        Link::Up { tier, pod, rail } => format!("up{}", pods(pod, tier, rail)),
        Link::Down { tier, pod, rail } => format!("down{}", pods(pod, tier, rail)),
        Link::Wire { from, to } => format!("wire from {from} to {to}"),
    }
}

/// Bytes a second that all links of a [`LinkClass`] carry together.
pub fn capacity_of(cluster: &Cluster, class: LinkClass) -> f64 {
    let (spec, gpus) = (&cluster.spec, f64::from(cluster.gpus()));
    let out = spec.scale_out.as_ref();
    let nics = out.map_or(0.0, |out| gpus * f64::from(out.nics_per_node) / f64::from(spec.gpus_per_node));
    match class {
        // Chips on a graph have all of its links.
        LinkClass::ScaleUp if spec.graph.is_some() && out.is_none() => capacity_of(cluster, LinkClass::Wire),
        LinkClass::ScaleUp => spec.scale_up.bandwidth.value.value().max(spec.scale_up.p2p.value.value()) * gpus,
        LinkClass::Nic => out.map_or(0.0, |out| out.raw.value.value() * nics),
        LinkClass::Bridge => {
            let sockets = spec.scale_up.sockets.as_ref().map_or(1, |s| spec.gpus_per_node / s.gpus);
            let rate = cluster.capacity(Link::Bridge { node: 0, socket: 0 }).value();
            rate * f64::from(cluster.nodes() * sockets)
        }
        LinkClass::Uplink(tier) => {
            let rails = if out.is_some_and(|out| out.rails) && tier == 0 { cluster.nics_apart() } else { 1 };
            let pods = cluster.gpus().div_ceil(spec.pods[tier as usize].gpus);
            cluster.capacity(Link::Up { tier, pod: 0, rail: 0 }).value() * f64::from(pods * rails)
        }
        LinkClass::Wire => cluster.wires() as f64 * spec.graph.as_ref().map_or(0.0, |g| g.bandwidth.value.value()),
    }
}
