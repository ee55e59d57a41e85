//! What gaps between the kernels of ranks are charged to where every op of every rank has a start and an end: the rules
//! of [`super::waits`] on what a run has measured.

use super::picoseconds;
use super::stamp::Stamp;
use super::waits::{OTHERS, Path};
use crate::plan::link::Line;
use crate::plan::matching::{LegAt, Matching};
use crate::plan::{Leg, OpKind, Plan};
use crate::timeline::{Span, Usage};
use crate::units::Seconds;

/// Start and end of every op of a rank, in s.
pub type Times = [(f64, f64)];

/// The spans of a rank's ops, as they ran.
pub fn spans(line: &Line, times: &Times) -> Vec<Span> {
    let span = |(node, t): (usize, &(f64, f64))| Span::of(line, node, Seconds::new(t.0), Seconds::new(t.1));
    times.iter().enumerate().map(span).collect()
}

/// An op of a rank: the rank, and the node of its line.
type Node = (u32, usize);

/// The usage of every rank: how long its kernels ran, and what it waited for, until the last rank was done.
///
/// The lane of an op is charged for the time in which its bytes were under way, and for the time from its end to the
/// start of who waited for it. The time in which the last of those who take part had not come is charged to what made
/// that one late; between stages of a pipeline that is other ranks' work. If the times of some ranks are not there,
/// nobody is late.
pub fn charge<'a>(plan: &'a Plan, lines: &'a [Line<'a>], matching: &'a Matching, times: &'a [&'a Times]) -> Vec<Usage> {
    let mut played = Played::new(plan, lines, matching, times);
    // At one moment lower nodes come first: an op that is over then has led to one that is launched then, and ops stand
    // behind those that they wait for.
    let both = |(rank, own): (u32, &&Times)| {
        let both = |(node, &(start, end)): (usize, &(f64, f64))| {
            let (start, end) = (ps(start), ps(end));
            [(start, node, false, rank), (end.max(start), node, true, rank)]
        };
        own.iter().enumerate().flat_map(both).collect::<Vec<_>>()
    };
    let mut moments: Vec<(u64, usize, bool, u32)> = (0..).zip(times).flat_map(both).collect();
    moments.sort_unstable();
    for (at, node, over, rank) in moments {
        match over {
            false => played.launch((rank, node), at),
            true => played.over((rank, node), at),
        }
    }
    played.usages()
}

fn ps(s: f64) -> u64 {
    picoseconds(Seconds::new(s))
}

struct Played<'a> {
    plan: &'a Plan,
    lines: &'a [Line<'a>],
    matching: &'a Matching,
    times: &'a [&'a Times],
    ranks: Vec<Rank>,
}

struct Rank {
    /// The path that led to the launch of every op; `None` for an op that was not launched yet.
    launched: Vec<Option<Path>>,
    /// The path that led to the end of every op that is over.
    over: Vec<Path>,
    /// The path that led to the end of the last kernel.
    kernel: Path,
    /// When that kernel ended, ps.
    free: u64,
    /// How long the compute lane has stood still, ps, by the lane it waited for; behind the lanes, how long it waited
    /// for its own turn to go on.
    waited: Vec<u64>,
    busy: u64,
}

impl<'a> Played<'a> {
    fn new(plan: &'a Plan, lines: &'a [Line<'a>], matching: &'a Matching, times: &'a [&'a Times]) -> Played<'a> {
        let rank = |own: &&Times| Rank {
            launched: vec![None; own.len()],
            over: vec![Path::default(); own.len()],
            kernel: Path::default(),
            free: 0,
            waited: vec![0; plan.lanes.len() + 1],
            busy: 0,
        };
        Played { plan, lines, matching, times, ranks: times.iter().map(rank).collect() }
    }

    fn line(&self, rank: u32) -> &'a Line<'a> {
        &self.lines[self.plan.program_of(rank) as usize]
    }

    fn launch(&mut self, (rank, node): Node, at: u64) {
        let line = self.line(rank);
        let own = &mut self.ranks[rank as usize];
        let before = line.preds(node).iter().map(|&pred| own.over[pred as usize]).max().unwrap_or_default();
        let waits_for = match before.end().lane() as usize {
            OTHERS => self.plan.lanes.len() as u16,
            lane => lane as u16,
        };
        let path = before.on_to(Stamp::new(at, waits_for));
        own.launched[node] = Some(path);
        if self.plan.lanes[line.nodes[node].lane as usize].computes() && at > own.free {
            path.charge(&mut own.waited, own.free);
        }
    }

    fn over(&mut self, (rank, node): Node, at: u64) {
        let lane = self.line(rank).nodes[node].lane;
        let computes = self.plan.lanes[lane as usize].computes();
        let ready = if computes { Stamp::default() } else { self.ready((rank, node), at) };
        let own = &mut self.ranks[rank as usize];
        let mut path = own.launched[node].unwrap_or_default();
        let start = path.end().ps();
        if computes {
            // Kernels with no gap between them are one stretch.
            if own.kernel.end().ps() == start && start > 0 {
                path = own.kernel;
            }
            path = path.on_to(Stamp::new(at, OTHERS as u16));
            own.busy += at - start;
            (own.free, own.kernel) = (own.free.max(at), path);
        } else if at > start {
            path = path.on_to(ready).on_to(Stamp::new(at, lane));
        }
        own.over[node] = path;
    }

    /// When all who take part in an op had come, and the lane that had made the last of them late; 0 where the rank
    /// itself was the last.
    fn ready(&self, (rank, node): Node, end: u64) -> Stamp {
        let start = |(rank, node): Node| ps(self.times[rank as usize][node].0);
        let (since, parties) = (start((rank, node)), self.parties((rank, node)));
        let last = parties.iter().map(|&party| start(party)).max().unwrap_or(since);
        if last <= since {
            return Stamp::default();
        }
        let joins_stages = self.plan.lanes[self.line(rank).nodes[node].lane as usize].joins_stages();
        let paths = parties.iter().filter(|&&party| start(party) == last);
        // Nothing is known of one who comes when all is over, as where bytes wait for it in a queue.
        let paths = paths.filter_map(|&(rank, node)| self.ranks[rank as usize].launched[node]);
        let path = if joins_stages { None } else { paths.map(|path| path.back_to(since)).max() };
        Stamp::new(last.min(end), path.map_or(OTHERS as u16, |path| path.made_late(since)))
    }

    /// The others who take part in an op, each with the node that it has for it; empty where the times of some ranks
    /// are not there.
    fn parties(&self, (rank, node): Node) -> Vec<Node> {
        let (own, spliced) = (self.plan.program_of(rank), &self.line(rank).nodes[node]);
        let group = self.plan.lanes[spliced.lane as usize].group();
        let Some(group) = group.filter(|_| self.times.len() == self.plan.ranks() as usize) else { return vec![] };
        let peers: Vec<(u32, Option<u32>)> = match &spliced.op.kind {
            OpKind::Transfer { legs, .. } => {
                let met = |(leg, way): (u16, &Leg)| {
                    let (peer, at) =
                        (group.neighbour(&self.plan.views, rank, way.by), LegAt { node: node as u32, leg });
                    let met = self.matching.partner(own, self.plan.program_of(peer), spliced.lane, way, at);
                    (peer, met.map(|met| met.node))
                };
                (0..).zip(legs).map(met).collect()
            }
            OpKind::Collective { .. } | OpKind::Exchange { .. } => {
                let program = |peer| self.plan.program_of(peer);
                let same = |peer| self.matching.same_collective(own, program(peer), spliced.lane, node as u32);
                group.members(&self.plan.views, rank).into_iter().map(|peer| (peer, same(peer))).collect()
            }
            _ => vec![],
        };
        let there = |(peer, node): (u32, Option<u32>)| Some((peer, node? as usize));
        let all = peers.into_iter().filter_map(there);
        all.filter(|&(peer, node)| node < self.times[peer as usize].len()).collect()
    }

    fn usages(self) -> Vec<Usage> {
        let last = |own: &Rank| own.over.iter().max().copied().unwrap_or_default();
        let end = self.ranks.iter().map(|own| last(own).end().ps()).max().unwrap_or(0);
        let usage = |mut own: Rank| {
            let last = last(&own);
            last.charge(&mut own.waited, own.free);
            own.waited[OTHERS] += end - last.end().ps().max(own.free);
            let mut usage = Usage { compute: own.busy as f64 * 1e-12, ..Usage::default() };
            self.plan.lanes.iter().zip(&own.waited).for_each(|(lane, &ps)| usage.waited(lane, ps as f64 * 1e-12));
            usage.bubble += own.waited[self.plan.lanes.len()] as f64 * 1e-12;
            usage
        };
        self.ranks.into_iter().map(usage).collect()
    }
}
