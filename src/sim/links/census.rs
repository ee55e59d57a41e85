//! A census of links: which can be asked for more than they carry, by whom, and which of them are alike.
//!
//! Every meeting of every rank is counted on every link that it crosses, whichever classes ranks are folded into. A
//! link that carries all that can be on it at once slows nobody and is forgotten. Of the others, those that carry the
//! same are one *kind*, and ranks whose meetings cross different kinds are of different classes: colours of links and
//! of ranks are refined by each other until nothing changes. Then all links of a kind are as full as each other at all
//! times, and one of them stands for all.

use super::footprint::{Footprint, Way};
use crate::act::{Deed, Machine};
use crate::cluster::{Cluster, Link};
use crate::collective::chosen;
use crate::fold::{self, Fold};
use crate::plan::{Direction, Lane, Plan};
use crate::sim::script::Script;
use crate::units::Bytes;
use rustc_hash::{FxHashMap, FxHasher};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

/// The meetings that a class has: for each lane and way, the most bytes a second of one.
type Deeds = BTreeMap<(u16, Way), f64>;

/// A meeting of certain ranks that crosses links which matter.
struct Met {
    lane: u16,
    way: Way,
    /// The rank that sends, or members of a collective.
    ranks: Vec<u32>,
    /// Entries of [`Census::links`], each with the share of the meeting's bytes that it carries.
    loads: Vec<(u32, f64)>,
    flow: f64,
}

#[derive(Default)]
pub struct Census {
    met: Vec<Met>,
    pub links: Vec<Link>,
}

/// Relative error below which a link counts as just full, not as too full.
const ROUNDING: f64 = 1e-6;

/// The way of every collective of a script, by its place in the script's list.
pub fn ways(script: &Script, machine: Machine) -> Vec<Way> {
    let mut known = FxHashMap::default();
    let way = |whole: &crate::act::Whole| {
        let Some(kind) = whole.kind else { return Way::Exchange };
        let members = &whole.gang.members;
        let key = (kind, members[0], members.len(), whole.bytes);
        let chosen = || {
            let bytes = Bytes::new(whole.bytes as f64);
            let choice = chosen(machine.cluster, machine.stack, kind, members, bytes);
            choice.map_or(crate::collective::Algorithm::Ring, |choice| choice.algorithm)
        };
        Way::Whole(kind, *known.entry(key).or_insert_with(chosen))
    };
    script.deeds.wholes.iter().map(way).collect()
}

impl Census {
    /// Counts all meetings of all ranks, and keeps those on links that can be too full.
    pub fn take(plan: &Plan, machine: Machine, fold: &Fold, scripts: &[Script]) -> Census {
        let deeds = deeds(machine, fold, scripts);
        let mut count = Count { cluster: machine.cluster, met: vec![], rates: vec![], links: FxHashMap::default() };
        count.all(plan, fold, &deeds);
        count.keep()
    }

    pub fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// The fold refined so that ranks of a class see the same on all links; `marks` tell ranks apart from the start.
    pub fn refine(&self, plan: &Plan, cluster: &Cluster, fold: Fold, marks: &[u64]) -> Fold {
        let mut fold = fold;
        loop {
            let links = self.kinds(cluster, &fold);
            let mut seen = vec![0u64; fold.class_of.len()];
            for met in &self.met {
                let on = met.loads.iter().map(|&(link, share)| mixed(&(links[link as usize], fixed(share))));
                let whole = mixed(&(met.lane, met.way, on.fold(0u64, u64::wrapping_add)));
                let ends = met.ranks.iter().enumerate();
                ends.for_each(|(at, &rank)| {
                    // A sender is not what a receiver is.
                    let role = if matches!(met.way, Way::Hop(_)) { at } else { 0 };
                    let seen = &mut seen[rank as usize];
                    *seen = seen.wrapping_add(mixed(&(whole, role)));
                });
            }
            let marks: Vec<u64> = (0..seen.len()).map(|r| mixed(&(marks.get(r), fold.class_of[r], seen[r]))).collect();
            let next = fold::refine_marked(plan, cluster, &marks);
            if next.representatives.len() == fold.representatives.len() {
                return fold;
            }
            fold = next;
        }
    }

    /// A number for each link, equal for links of one kind.
    pub fn kinds(&self, cluster: &Cluster, fold: &Fold) -> Vec<u64> {
        let mut kinds: Vec<u64> =
            self.links.iter().map(|&l| mixed(&(l.class(), cluster.capacity(l).value().to_bits()))).collect();
        for met in &self.met {
            let ends = met.ranks.iter().map(|&r| mixed(&fold.class_of[r as usize])).fold(0u64, u64::wrapping_add);
            for &(link, share) in &met.loads {
                let kind = &mut kinds[link as usize];
                *kind = kind.wrapping_add(mixed(&(met.lane, met.way, ends, fixed(share))));
            }
        }
        kinds
    }

    /// Tells `each` of every meeting on a link: the link, the meeting's lane, way and class, the share of its bytes
    /// there, and that of its largest flow.
    pub fn on_links(&self, fold: &Fold, mut each: impl FnMut(u32, (u16, Way, u32), f64, f64)) {
        for met in &self.met {
            let of = |rank: &u32| fold.class_of[*rank as usize];
            let class = match met.way {
                Way::Whole(..) => met.ranks.iter().map(of).min(),
                _ => met.ranks.first().map(of),
            };
            let Some(class) = class else { continue };
            met.loads.iter().for_each(|&(link, share)| each(link, (met.lane, met.way, class), share, met.flow));
        }
    }
}

fn mixed(of: &impl Hash) -> u64 {
    let mut h = FxHasher::default();
    of.hash(&mut h);
    // Sums of these have to tell multisets apart: every bit has to count (splitmix64).
    let mut x = h.finish().wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A share as a whole number, so that equal ones are equal.
fn fixed(share: f64) -> u64 {
    (share * 1e9).round() as u64
}

/// The meetings of every class.
fn deeds(machine: Machine, fold: &Fold, scripts: &[Script]) -> Vec<Deeds> {
    let mut all = vec![Deeds::new(); fold.representatives.len()];
    let mut note = |class: usize, key: (u16, Way), bytes: u64, transfer: u64| {
        if bytes > 0 && transfer > 0 {
            let most = all[class].entry(key).or_default();
            *most = most.max(bytes as f64 / (transfer as f64 * 1e-12));
        }
    };
    for script in scripts {
        let ways = ways(script, machine);
        for (op, lane) in script.distinct_lanes() {
            for (local, &class) in script.deeds.classes.iter().enumerate() {
                match script.deeds.of(op, local) {
                    Deed::Legs { first, count, .. } => {
                        let sends = script.deeds.legs(first, count).iter().filter(|leg| leg.dir == Direction::Send);
                        sends.for_each(|leg| note(class, (lane, Way::Hop(leg.by)), leg.bytes, leg.transit.transfer));
                    }
                    Deed::Whole { at, .. } => {
                        let whole = &script.deeds.wholes[at as usize];
                        note(class, (lane, ways[at as usize]), whole.bytes, whole.transit.transfer);
                    }
                    Deed::Skip | Deed::Kernel { .. } | Deed::Aside { .. } => {}
                }
            }
        }
    }
    all
}

/// The meetings and links while they are counted.
struct Count<'a> {
    cluster: &'a Cluster,
    met: Vec<Met>,
    /// The most bytes a second of each meeting.
    rates: Vec<f64>,
    links: FxHashMap<Link, u32>,
}

impl Count<'_> {
    fn all(&mut self, plan: &Plan, fold: &Fold, deeds: &[Deeds]) {
        for (lane, of) in plan.lanes.iter().enumerate() {
            let Lane::Comm(group, _) = of else { continue };
            let lane = lane as u16;
            let span = (lane, Way::Hop(0))..(lane + 1, Way::Hop(0));
            for rank in 0..plan.ranks() {
                let class = fold.class_of[rank as usize];
                let mut members = None;
                for (&(_, way), &rate) in deeds[class as usize].range(span.clone()) {
                    let (ranks, footprint) = match way {
                        Way::Hop(by) => {
                            let peer = group.neighbour(&plan.views, rank, by as i32);
                            (vec![rank, peer], Footprint::of_message(self.cluster, rank, peer))
                        }
                        // The first member counts for all members.
                        Way::Whole(..) if group.first(&plan.views, rank) != rank => continue,
                        Way::Whole(kind, algorithm) => {
                            let members = members.get_or_insert_with(|| group.members(&plan.views, rank));
                            (members.clone(), Footprint::of_whole(self.cluster, kind, algorithm, members))
                        }
                        Way::Exchange => {
                            let members = members.get_or_insert_with(|| group.members(&plan.views, rank));
                            (vec![rank], Footprint::of_rows(self.cluster, rank, members))
                        }
                    };
                    self.meet((lane, way), ranks, &footprint, rate);
                }
            }
        }
    }

    fn meet(&mut self, (lane, way): (u16, Way), ranks: Vec<u32>, footprint: &Footprint, rate: f64) {
        if footprint.loads.is_empty() {
            return;
        }
        let mut number = |link| {
            let next = self.links.len() as u32;
            *self.links.entry(link).or_insert(next)
        };
        let loads = footprint.loads.iter().map(|load| (number(load.link), load.share)).collect();
        self.met.push(Met { lane, way, ranks, loads, flow: footprint.flow });
        self.rates.push(rate);
    }

    /// Forgets links that carry all that can be on them at once: at any time a lane has one collective of a group, and
    /// one message over every distance.
    fn keep(self) -> Census {
        let Count { cluster, mut met, rates, links } = self;
        let mut most = vec![0.0f64; links.len()];
        let mut together: FxHashMap<(u16, u32, u32), f64> = FxHashMap::default();
        for (met, rate) in met.iter().zip(&rates) {
            for &(link, share) in &met.loads {
                match met.way {
                    Way::Hop(_) => most[link as usize] += share * rate,
                    _ => {
                        let most = together.entry((met.lane, met.ranks[0], link)).or_default();
                        *most = most.max(share * rate);
                    }
                }
            }
        }
        together.iter().for_each(|(&(_, _, link), rate)| most[link as usize] += rate);
        let mut named: Vec<(Link, u32)> = links.into_iter().collect();
        named.sort_unstable();
        let full = |&(link, at): &(Link, u32)| most[at as usize] > cluster.capacity(link).value() * (1.0 + ROUNDING);
        named.retain(full);
        let mut place = vec![u32::MAX; most.len()];
        named.iter().enumerate().for_each(|(at, &(_, before))| place[before as usize] = at as u32);
        for met in &mut met {
            met.loads.retain_mut(|load| {
                load.0 = place[load.0 as usize];
                load.0 != u32::MAX
            });
        }
        met.retain(|met| !met.loads.is_empty());
        Census { met, links: named.into_iter().map(|(link, _)| link).collect() }
    }
}
