//! Why a step takes as long as it does: the chain of ops and waits in which everything has to be shorter for the step
//! to be so, how much later every other op could have ended, and what links were busy with.

use super::account::{exposed, tier_of};
use super::engine::Engine;
use super::links::capacity_of;
use super::links::census::ways;
use super::links::footprint::{Footprint, Way, any_shared};
use super::meeting::What;
use super::run::Kept;
use crate::act::{Machine, seconds};
use crate::cluster::{Cluster, Link as Wire, LinkClass};
use crate::plan::Lane;
use rustc_hash::FxHashMap;
use serde::Serialize;
use std::collections::BTreeMap;

/// Ops of the chain that follow each other on one rank and are of one kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stretch {
    pub rank: u32,
    /// `compute`, `host`, or the axis and tier of the communication, as in `dp scale_out`.
    pub what: String,
    pub from_s: f64,
    pub seconds: f64,
    pub ops: u32,
    /// Path of the op that takes most of it.
    pub longest: String,
}

/// A share of the chain, by what it is spent on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Part {
    pub what: String,
    pub seconds: f64,
    pub share: f64,
}

/// The bytes moved over the bytes that could have been moved, in equal intervals from the first to the last of the
/// step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Utilisation {
    /// `scale_up`, `scale_out` (the NICs), `bridge` between sockets, `uplink_0` of the innermost pods and so on, `wire`.
    pub link: String,
    pub mean: f64,
    pub over_time: Vec<f64>,
}

/// An op's slack: how much later it could end with the step as long as it is.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Slack {
    pub rank: u32,
    pub path: String,
    pub seconds: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Why {
    /// The chain from the first op to the last; the seconds of its stretches add up to the step.
    pub critical_path: Vec<Stretch>,
    /// The shares of the chain by kernel, and by axis and tier, the largest first.
    pub parts: Vec<Part>,
    pub utilisation: Vec<Utilisation>,
    /// Time in which ranks wait for communication and do not compute, by axis and tier: s, mean over the ranks.
    pub exposed: BTreeMap<String, f64>,
    /// The slack of every op in program order, by class, s.
    pub slack: Vec<Vec<f64>>,
    /// The op with the least slack that is not critical, for each class and lane: what would be critical next.
    pub next: Vec<Slack>,
}

/// Intervals into which the step is cut.
const TIMES: usize = 40;
/// Ops that are nearly critical and are told, at most.
const NEXT: usize = 12;

/// A link of the chain.
#[derive(Clone, Copy)]
struct Link {
    class: u32,
    /// The op; `None`: the host.
    op: Option<u32>,
    from: u64,
    to: u64,
}

impl Why {
    pub fn of(engine: &Engine, machine: Machine) -> Why {
        let chain = chain(engine);
        let latest = latest(engine);
        Why {
            exposed: exposed(engine),
            critical_path: stretches(engine, &chain),
            parts: parts(engine, &chain),
            utilisation: utilisation(engine, machine),
            next: next(engine, &latest),
            slack: slack(engine, &latest),
        }
    }
}

fn kept(engine: &Engine, class: u32, op: u32) -> Kept {
    engine.runs[class as usize].kept[op as usize]
}

/// The chain, from the op that ends last back to the beginning: whoever came last, and what it had waited for.
fn chain(engine: &Engine) -> Vec<Link> {
    let all = engine.runs.iter().enumerate().flat_map(|(class, run)| {
        let ends = run.kept.iter().enumerate();
        ends.map(move |(op, kept)| (kept.end, std::cmp::Reverse((class as u32, op as u32))))
    });
    let Some((_, std::cmp::Reverse(mut at))) = all.max() else { return vec![] };
    let mut links = vec![];
    loop {
        let (class, op) = at;
        let end = kept(engine, class, op).end;
        // A meeting begins with the last of those who meet.
        let (last, its) = kept(engine, class, op).by;
        let start = kept(engine, last, its).start;
        links.push(Link { class, op: Some(op), from: start, to: end });
        let script = &engine.scripts[engine.runs[last as usize].program];
        let before = script.preds(its).iter().map(|&p| (kept(engine, last, p).end, p)).max();
        let since = before.map_or(0, |(end, _)| end);
        if since < start {
            links.push(Link { class: last, op: None, from: since, to: start });
        }
        match before {
            Some((_, before)) => at = (last, before),
            None => break,
        }
    }
    links.retain(|link| link.to > link.from);
    links.reverse();
    links
}

/// The name of a link of the chain, and its kernel if it is one.
fn name(engine: &Engine, link: &Link) -> (String, Option<&'static str>) {
    let Some(op) = link.op else { return ("host".into(), None) };
    let run = &engine.runs[link.class as usize];
    let script = &engine.scripts[run.program];
    let lane = &engine.plan.lanes[script.lane(op) as usize];
    let group = match lane {
        Lane::Comm(group, _) => group,
        Lane::Copy(_) | Lane::Host => return (lane.label(), None),
        Lane::Compute(_) => return ("compute".into(), Some(script.what(op))),
    };
    let tier = tier_of(script.ports(op, run.local));
    (format!("{} {tier}", group.charged_axis().name()), None)
}

fn stretches(engine: &Engine, chain: &[Link]) -> Vec<Stretch> {
    let named: Vec<(String, Link)> = chain.iter().map(|link| (name(engine, link).0, *link)).collect();
    let runs = named.chunk_by(|(a, x), (b, y)| a == b && x.class == y.class);
    let stretch = |run: &[(String, Link)]| {
        let (what, first) = &run[0];
        let longest = run.iter().map(|r| r.1).max_by_key(|link| link.to - link.from).unwrap_or(*first);
        let script = &engine.scripts[engine.runs[longest.class as usize].program];
        Stretch {
            rank: engine.fold.representatives[first.class as usize],
            what: what.clone(),
            from_s: seconds(first.from).value(),
            seconds: seconds(run.iter().map(|(_, link)| link.to - link.from).sum()).value(),
            ops: run.len() as u32,
            longest: longest.op.map(|op| script.path(op)).unwrap_or_default(),
        }
    };
    runs.map(stretch).collect()
}

fn parts(engine: &Engine, chain: &[Link]) -> Vec<Part> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for link in chain {
        let (what, kernel) = name(engine, link);
        *sums.entry(kernel.map_or(what, str::to_string)).or_default() += link.to - link.from;
    }
    let whole: u64 = sums.values().sum();
    let part =
        |(what, ps): (String, u64)| Part { what, seconds: seconds(ps).value(), share: ps as f64 / whole.max(1) as f64 };
    let mut parts: Vec<Part> = sums.into_iter().map(part).collect();
    parts.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    parts
}

fn utilisation(engine: &Engine, machine: Machine) -> Vec<Utilisation> {
    let (end, cluster) = (last_byte(engine), machine.cluster);
    let (mut bins, mut beyond): (BTreeMap<LinkClass, [f64; TIMES]>, _) =
        (BTreeMap::new(), Beyond::new(engine, machine));
    for moved in &engine.moved {
        let over_time = spread(moved.from, moved.to, end);
        let nodes = [LinkClass::ScaleUp, LinkClass::Nic].into_iter().zip(moved.sent);
        let others = beyond.of(moved.what).iter().map(|&(class, share)| (class, share * moved.bytes as f64));
        for (class, bytes) in nodes.chain(others).filter(|(_, bytes)| *bytes > 0.0) {
            let bins = bins.entry(class).or_insert([0.0; TIMES]);
            over_time.iter().for_each(|&(at, part)| bins[at] += bytes * moved.times * part);
        }
    }
    let width = seconds(end).value() / TIMES as f64;
    let of = |(class, mut bins): (LinkClass, [f64; TIMES])| {
        let full = capacity_of(cluster, class) * width;
        settle(&mut bins, full);
        let over_time: Vec<f64> = bins.iter().map(|bytes| bytes / full).collect();
        Utilisation { link: name_of(class), mean: over_time.iter().sum::<f64>() / TIMES as f64, over_time }
    };
    bins.into_iter().map(of).collect()
}

/// Levels the load of the intervals: bytes beyond `full` go later, and those beyond the last interval earlier. While
/// transfers share a port, those posted first go at their full speed and owe what the others took, which what comes
/// behind them pays (see [`ports`](super::ports)).
fn settle(bins: &mut [f64; TIMES], full: f64) {
    let mut beyond = 0.0;
    let mut fill = |bin: &mut f64| {
        let all = *bin + beyond;
        *bin = all.min(full);
        beyond = all - *bin;
    };
    bins.iter_mut().for_each(&mut fill);
    bins.iter_mut().rev().for_each(&mut fill);
    bins[0] += beyond;
}

/// When the last bytes arrive, ps.
fn last_byte(engine: &Engine) -> u64 {
    engine.moved.iter().map(|m| m.to).max().unwrap_or(0).max(engine.now).max(1)
}

/// The intervals of the step that a span falls into, each with the part of the span in it.
fn spread(from: u64, to: u64, end: u64) -> Vec<(usize, f64)> {
    let (from, to, length) = (from as f64, to as f64, (to - from).max(1) as f64);
    let width = end as f64 / TIMES as f64;
    let (first, last) = ((from / width) as usize, ((to / width) as usize).min(TIMES - 1));
    let inside = |at: usize| (to.min((at + 1) as f64 * width) - from.max(at as f64 * width)).max(0.0);
    (first.min(TIMES - 1)..=last).map(|at| (at, inside(at) / length)).collect()
}

fn name_of(class: LinkClass) -> String {
    match class {
        LinkClass::ScaleUp => "scale_up".into(),
        LinkClass::Nic => "scale_out".into(),
        LinkClass::Bridge => "bridge".into(),
        LinkClass::Uplink(tier) => format!("uplink_{tier}"),
        LinkClass::Wire => "wire".into(),
    }
}

/// The loads that meetings put on bridges, uplinks and wires, for each byte.
struct Beyond<'a, 'p> {
    engine: &'a Engine<'p>,
    machine: Machine<'a>,
    ways: Vec<Vec<Way>>,
    known: FxHashMap<What, Vec<(LinkClass, f64)>>,
}

impl<'a, 'p> Beyond<'a, 'p> {
    fn new(engine: &'a Engine<'p>, machine: Machine<'a>) -> Beyond<'a, 'p> {
        let ways = match any_shared(machine.cluster) {
            true => engine.scripts.iter().map(|script| ways(script, machine)).collect(),
            false => vec![],
        };
        Beyond { engine, machine, ways, known: FxHashMap::default() }
    }

    fn of(&mut self, what: What) -> &[(LinkClass, f64)] {
        if self.ways.is_empty() {
            return &[];
        }
        let Beyond { engine, machine, ways, known } = self;
        known.entry(what).or_insert_with(|| {
            let mut sums: BTreeMap<LinkClass, f64> = BTreeMap::new();
            for load in footprint(engine, machine.cluster, ways, what).loads {
                // Links down into pods are as full as links up out of them.
                if !matches!(load.link, Wire::Down { .. } | Wire::NicOut { .. } | Wire::NicIn { .. }) {
                    *sums.entry(load.link.class()).or_default() += load.share;
                }
            }
            sums.into_iter().collect()
        })
    }
}

fn footprint(engine: &Engine, cluster: &Cluster, ways: &[Vec<Way>], what: What) -> Footprint {
    match what {
        What::Hop { lane, by, class } => {
            let Lane::Comm(group, _) = &engine.plan.lanes[lane as usize] else { return Footprint::default() };
            let rank = engine.fold.representatives[class as usize];
            Footprint::of_message(cluster, rank, group.neighbour(&engine.plan.views, rank, by as i32))
        }
        What::Whole { program, at } => {
            let members = &engine.scripts[program as usize].deeds.wholes[at as usize].gang.members;
            match ways[program as usize][at as usize] {
                Way::Whole(kind, algorithm) => Footprint::of_whole(cluster, kind, algorithm, members),
                _ => Footprint::of_rows(cluster, members[0], members),
            }
        }
    }
}

/// The latest end of every op, from the last op back: before what waits for it has to start. Those who meet end
/// together, so that each may end as late as the one with the least room.
fn latest(engine: &Engine) -> Vec<Vec<u64>> {
    let end = engine.runs.iter().map(|run| run.last().ps()).max().unwrap_or(0);
    let mut latest: Vec<Vec<u64>> = engine.runs.iter().map(|run| vec![end; run.kept.len()]).collect();
    let ops = |(class, run): (usize, &super::run::Run)| (0..run.kept.len() as u32).map(move |op| (class as u32, op));
    let mut order: Vec<(u32, u32)> = engine.runs.iter().enumerate().flat_map(ops).collect();
    // An op that waits for another starts no earlier than that ends; at one moment it stands later in the program.
    order.sort_unstable_by_key(|&(class, op)| {
        let kept = kept(engine, class, op);
        std::cmp::Reverse((kept.end, kept.start, op))
    });
    for (class, op) in order {
        let (own, run) = (kept(engine, class, op), &engine.runs[class as usize]);
        let room = latest[class as usize][op as usize] - own.end;
        // An op that was late because of another leaves that one as much room, and its own waiting does not count.
        let (last, its) = own.by;
        let begun = kept(engine, last, its).start;
        let starts = [(class, op, own.start + (begun - own.start.min(begun))), (last, its, begun)];
        for (class, op, start) in starts {
            let script = &engine.scripts[engine.runs[class as usize].program];
            for &before in script.preds(op) {
                let may = &mut latest[class as usize][before as usize];
                *may = (*may).min(start + room).max(kept(engine, class, before).end);
            }
        }
        debug_assert!(run.left == 0);
    }
    latest
}

fn slack(engine: &Engine, latest: &[Vec<u64>]) -> Vec<Vec<f64>> {
    let of = |(run, latest): (&super::run::Run, &Vec<u64>)| {
        run.kept.iter().zip(latest).map(|(kept, &latest)| seconds(latest - kept.end).value()).collect()
    };
    engine.runs.iter().zip(latest).map(of).collect()
}

fn next(engine: &Engine, latest: &[Vec<u64>]) -> Vec<Slack> {
    let mut least: BTreeMap<(usize, u16), (u64, u32)> = BTreeMap::new();
    for (class, run) in engine.runs.iter().enumerate() {
        let script = &engine.scripts[run.program];
        for (op, kept) in run.kept.iter().enumerate() {
            let slack = latest[class][op] - kept.end;
            if slack > 0 && kept.end > kept.start {
                let at = least.entry((class, script.lane(op as u32))).or_insert((slack, op as u32));
                *at = (*at).min((slack, op as u32));
            }
        }
    }
    let mut all: Vec<(u64, u32, usize)> =
        least.into_iter().map(|((class, _), (slack, op))| (slack, op, class)).collect();
    all.sort_unstable();
    let told = |(slack, op, class): (u64, u32, usize)| Slack {
        rank: engine.fold.representatives[class],
        path: engine.scripts[engine.runs[class].program].path(op),
        seconds: seconds(slack).value(),
    };
    all.into_iter().take(NEXT).map(told).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_has_more_than_links_carry_and_nothing_is_lost() {
        let mut bins = [0.0; TIMES];
        (bins[3], bins[4], bins[TIMES - 2], bins[TIMES - 1]) = (1.5, 0.75, 0.5, 1.25);
        settle(&mut bins, 1.0);
        assert_eq!((bins[2], bins[3], bins[4], bins[5], bins[6]), (0.0, 1.0, 1.0, 0.25, 0.0));
        assert_eq!((bins[TIMES - 2], bins[TIMES - 1]), (0.75, 1.0));
        let mut all = [2.0; TIMES];
        settle(&mut all, 1.0);
        assert_eq!(all.iter().sum::<f64>(), 2.0 * TIMES as f64);
    }
}
