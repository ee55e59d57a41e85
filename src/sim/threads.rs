//! Ranks that are threads of one machine, by its profile: the step that [`act::threads`](crate::act::threads) plays,
//! with ranks that have faults, and why it takes as long as it does.
//!
//! Threads share the cores and the memory in front of these, which the player accounts for; they have no NICs, and no
//! links but one throttle for all.

use super::fault::Fault;
use super::jitter::{Jitter, Noise};
use super::why::{Part, Stretch, Why};
use super::{Effort, Simulated};
use crate::act::threads::{Piece, Played, play};
use crate::act::{Machine, picoseconds, seconds};
use crate::device::Threads;
use crate::error::{Error, Result};
use crate::plan::{Lane, Plan};
use crate::timeline::{Span, Timeline};
use crate::units::Seconds;
use std::collections::BTreeMap;

/// Plays a plan on threads. Errors: blocks or faults that threads do not have, and what [`play`] refuses.
pub fn run(plan: &Plan, machine: Machine, threads: &Threads, faults: &[Fault], effort: Effort) -> Result<Simulated> {
    let crowd = format!("{} ranks on {} cores", plan.ranks(), threads.cores);
    if effort.blocks {
        let why = format!("{crowd} are played op by op; use as many cores as ranks, or leave --fidelity block out");
        return Err(Error::spec("--fidelity", "fidelity", why));
    }
    if effort.apart {
        let why = format!("{crowd} have none: who has a core decides what waits; use as many cores as ranks");
        return Err(Error::spec("--slack", "slack", why));
    }
    if let Some(fault) = beyond(faults) {
        let why = format!("{fault:?}; {crowd} may be slow or jitter, and no more: use as many cores as ranks");
        return Err(Error::spec("faults", "kind", why));
    }
    let ranks: Vec<u32> = (0..plan.ranks()).collect();
    let slow: Vec<f64> = ranks.iter().map(|&rank| slow(faults, rank)).collect();
    let mut jitter = Jitter::of(faults, effort.seed, &ranks);
    let mut takes = |rank: u32, s: f64| {
        let s = s * slow[rank as usize];
        jitter.as_mut().map_or(s, |jitter| {
            let ps = jitter.kernel(rank, picoseconds(Seconds::new(s)), &mut Noise::default());
            seconds(ps).value()
        })
    };
    let Played { mut timeline, pieces } = play(plan, machine, threads, &mut takes)?;
    let why = effort.why.then(|| why(plan, &timeline, &pieces));
    if !effort.spans {
        timeline.classes.iter_mut().for_each(|class| class.spans.clear());
    }
    Ok(Simulated {
        timeline,
        events: pieces.iter().map(|of| of.len() as u64).sum(),
        slowed: 0,
        shared: vec![],
        class_of: ranks,
        arrows: vec![],
        hang: None,
        why,
    })
}

/// The first fault that threads cannot have; `None` if there is none.
pub fn beyond(faults: &[Fault]) -> Option<&Fault> {
    faults.iter().find(|fault| !matches!(fault, Fault::SlowGpu { .. } | Fault::Jitter { .. }))
}

fn slow(faults: &[Fault], rank: u32) -> f64 {
    let factor = |fault: &Fault| match *fault {
        Fault::SlowGpu { rank: whose, factor } if whose == rank => Some(factor),
        _ => None,
    };
    faults.iter().filter_map(factor).product()
}

/// A link of the chain: a piece of work, or the time in which a thread saw that it could go on.
struct Link<'a> {
    rank: u32,
    span: Option<&'a Span>,
    what: String,
    from: f64,
    to: f64,
}

/// The chain, from the piece that ends last back to the beginning: what its thread did before, or what that had waited
/// for.
fn chain<'a>(plan: &Plan, timeline: &'a Timeline, pieces: &[Vec<Piece>]) -> Vec<Link<'a>> {
    let last = |(thread, of): (usize, &Vec<Piece>)| Some((of.last()?.to, (thread, of.len() - 1)));
    let Some((_, mut at)) = pieces.iter().enumerate().filter_map(last).max_by(|a, b| a.0.total_cmp(&b.0)) else {
        return vec![];
    };
    let mut links = vec![];
    loop {
        let piece = pieces[at.0][at.1];
        let span = &timeline.classes[piece.rank as usize].spans[piece.node as usize];
        let what = match &plan.lanes[span.lane as usize] {
            Lane::Comm(group, _) => format!("{} local", group.charged_axis().name()),
            Lane::Copy(_) | Lane::Host => plan.lanes[span.lane as usize].label(),
            Lane::Compute(_) => "compute".into(),
        };
        links.push(Link { rank: piece.rank, span: Some(span), what, from: piece.from, to: piece.to });
        let before = match piece.after {
            Some((thread, number)) => Some((thread as usize, number as usize)),
            None => at.1.checked_sub(1).map(|number| (at.0, number)),
        };
        let since = before.map_or(0.0, |(thread, number)| pieces[thread][number].to);
        if since < piece.from {
            links.push(Link { rank: piece.rank, span: None, what: "wake-up".into(), from: since, to: piece.from });
        }
        match before {
            Some(before) => at = before,
            None => break,
        }
    }
    links.reverse();
    links
}

fn why(plan: &Plan, timeline: &Timeline, pieces: &[Vec<Piece>]) -> Why {
    let chain = chain(plan, timeline, pieces);
    let stretch = |run: &[Link]| {
        let longest = run.iter().max_by(|a, b| (a.to - a.from).total_cmp(&(b.to - b.from)));
        Stretch {
            rank: run[0].rank,
            what: run[0].what.clone(),
            from_s: run[0].from,
            seconds: run.iter().map(|link| link.to - link.from).sum(),
            ops: run.len() as u32,
            longest: longest.and_then(|link| link.span).map(|span| span.path.clone()).unwrap_or_default(),
        }
    };
    let mut sums: BTreeMap<String, f64> = BTreeMap::new();
    for link in &chain {
        let kernel = link.span.filter(|_| link.what == "compute").map(|span| span.what.to_string());
        *sums.entry(kernel.unwrap_or_else(|| link.what.clone())).or_default() += link.to - link.from;
    }
    let whole: f64 = sums.values().sum::<f64>().max(f64::MIN_POSITIVE);
    let part = |(what, seconds): (String, f64)| Part { what, seconds, share: seconds / whole };
    let mut parts: Vec<Part> = sums.into_iter().map(part).collect();
    parts.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let mut exposed: BTreeMap<String, f64> = BTreeMap::new();
    for class in &timeline.classes {
        for (axis, s) in &class.usage.exposed {
            *exposed.entry(format!("{} local", axis.name())).or_default() += s / timeline.classes.len() as f64;
        }
    }
    Why {
        critical_path: chain.chunk_by(|a, b| a.what == b.what && a.rank == b.rank).map(stretch).collect(),
        parts,
        // Threads have no links of their own, and how late an op may be depends on who has the cores meanwhile.
        utilisation: vec![],
        exposed,
        slack: vec![],
        next: vec![],
    }
}
