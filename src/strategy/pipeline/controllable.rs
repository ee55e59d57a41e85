//! The orders of V-Half and V-Min (Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, section 4): one
//! microbatch's passes are repeated every six units of time, and squeezed.
//!
//! How long a microbatch waits from stage to stage is what keeps activations few: a chunk's live until it has come back.
//! That leaves gaps before the first has come back and behind the last. Passes there are moved to the earliest unit that is
//! free, as long as no more activations live at a time than in the steady state; gradients of weights fill what is left. The
//! offsets and what is squeezed when are those of the paper's authors (github:sail-sg/zero-bubble-pipeline-parallelism
//! @064369d, zbv_greedy.py), since a stage's order, once fixed, decides what it waits for where passes do not take one unit
//! each.

use super::Fold;
use super::folded::Next;

/// Units of time from one microbatch to the next: two forward passes, two backward ones in halves.
pub(super) const INTERVAL: u32 = 6;

/// The passes of a microbatch in the order in which a stage has them: forward of both chunks, backward of both; then
/// gradients of weights, which belong to no chunk here.
const PASSES: [Next; 5] = [Next::Forward(0), Next::Forward(1), Next::Inputs(1), Next::Inputs(0), Next::Weights];
const BACK: usize = 2;
const HOME: usize = 3;
const WEIGHTS: usize = 4;

/// When a stage begins each pass, in units of time: a list for each of [`PASSES`], by microbatch.
#[derive(Clone, Default)]
struct Times([Vec<u32>; 5]);

/// The orders of all stages.
pub(super) fn orders(fold: Fold, stages: u32, microbatches: u32) -> Vec<Vec<Next>> {
    // The order before and behind the steady state does not depend on how long that lasts.
    let few = 3 * stages + 4;
    let repeated = if microbatches > few { Some(of(fold, stages, few)) } else { None };
    let longer = repeated.and_then(|all| lengthened(&all, microbatches - few));
    longer.unwrap_or_else(|| of(fold, stages, microbatches).iter().map(order).collect())
}

fn of(fold: Fold, stages: u32, microbatches: u32) -> Vec<Times> {
    let repeated = |first: [u32; 4]| {
        let mut times = Times::default();
        let every = |at: u32| (0..microbatches).map(move |k| at + INTERVAL * k).collect();
        times.0.iter_mut().zip(first).for_each(|(of, at)| *of = every(at));
        times
    };
    let all: Vec<Times> = (0..stages).map(|stage| repeated(offsets(fold, stages, stage))).collect();
    let all = squeezed(&all.iter().map(with_weights).collect::<Vec<_>>(), true);
    let all = squeezed(&all.iter().map(without_weights).collect::<Vec<_>>(), false);
    all.iter().map(|times| with_weights(&without_weights(times))).collect()
}

/// When a stage begins the first microbatch's four passes, in units of time.
fn offsets(fold: Fold, p: u32, s: u32) -> [u32; 4] {
    match fold {
        Fold::Min => {
            let gap = if p.is_multiple_of(3) { 2 } else { 0 };
            [s, 2 * p - s - 1, 2 * p + gap + s, 4 * p + gap - s - 1]
        }
        _ => {
            let gap = if p.is_multiple_of(2) { 3 } else { 0 };
            [2 * s, 3 * p - s - 2, 3 * p + gap + 2 * s - 1, 6 * p + gap - s - 2]
        }
    }
}

/// The pass that a stage does at every unit of time; `None` where it idles.
fn line(times: &Times) -> Vec<Option<u8>> {
    let end = times.0.iter().filter_map(|of| of.last()).max().map_or(0, |&last| last as usize + 1);
    let mut line = vec![None; end];
    for (pass, of) in (0..).zip(&times.0) {
        of.iter().for_each(|&at| line[at as usize] = Some(pass));
    }
    line
}

fn without_weights(times: &Times) -> Times {
    let mut left = times.clone();
    left.0[WEIGHTS].clear();
    left
}

/// The times with gradients of weights, at the first units that are free behind the passes they belong to.
fn with_weights(times: &Times) -> Times {
    let (mut all, mut waiting) = (times.clone(), 0);
    let line = line(times);
    for (now, pass) in (0..).zip(&line) {
        match pass {
            Some(pass) => waiting += u32::from(usize::from(*pass) >= BACK),
            None if waiting > 0 => {
                all.0[WEIGHTS].push(now);
                waiting -= 1;
            }
            None => {}
        }
    }
    let end = line.len() as u32;
    all.0[WEIGHTS].extend(end..end + waiting);
    all
}

/// The most chunks whose activations live at a time: from the forward pass to the gradients of weights, which are made
/// as soon as the stage is free where the line does not have them.
fn peak(line: &[Option<u8>], has_weights: bool) -> i32 {
    let (mut live, mut waiting, mut most) = (0, 0, 0);
    for pass in line {
        match pass.map(usize::from) {
            Some(0 | 1) => live += 1,
            Some(WEIGHTS) => live -= 1,
            Some(_) => waiting += 1,
            None if !has_weights && waiting > 0 => (live, waiting) = (live - 1, waiting - 1),
            None => {}
        }
        most = most.max(live);
    }
    most
}

/// All passes of all stages in the order of their times: time, stage, pass, microbatch.
fn in_time(all: &[Times]) -> Vec<(u32, usize, usize, usize)> {
    let of_stage = |(stage, times): (usize, &Times)| {
        let of_pass = move |(pass, of): (usize, &Vec<u32>)| {
            of.iter().enumerate().map(|(k, &at)| (at, stage, pass, k)).collect::<Vec<_>>()
        };
        times.0.iter().enumerate().flat_map(of_pass).collect::<Vec<_>>()
    };
    let mut events: Vec<_> = all.iter().enumerate().flat_map(of_stage).collect();
    events.sort_unstable();
    events
}

/// The pass that a pass waits for on another stage: the one before it on the microbatch's way, as (stage, pass).
fn before(stages: usize, stage: usize, pass: usize) -> Option<(usize, usize)> {
    match pass {
        0 | BACK if stage > 0 => Some((stage - 1, pass)),
        1 | HOME if stage + 1 < stages => Some((stage + 1, pass)),
        _ => None,
    }
}

/// The times with passes before the first microbatch is back, and behind the last to set out, moved to the earliest
/// unit that is free; without gradients of weights only those at the end. Then every stage is as early as its order
/// lets it be.
fn squeezed(all: &[Times], has_weights: bool) -> Vec<Times> {
    let most = all.iter().map(|times| peak(&line(times), has_weights)).max().unwrap_or(0);
    let mut moved = all.to_vec();
    let mut lines: Vec<Vec<Option<u8>>> = all.iter().map(line).collect();
    // Times at which backward passes of each stage began, ascending.
    let mut back: Vec<Vec<u32>> = vec![vec![]; all.len()];
    let last = all[0].0[0].len() - 1;
    let (mut returned, mut set_out) = (false, false);
    for (at, stage, pass, k) in in_time(all) {
        returned |= pass == HOME && stage == 0;
        let stays = match (returned, set_out) {
            (false, _) => !has_weights,
            (true, set_out) => !set_out,
        };
        set_out |= returned && pass == 0 && k == last;
        if !stays {
            let own = match pass {
                0 => None,
                WEIGHTS => back[stage].get(k).copied(),
                _ => Some(moved[stage].0[pass - 1][k]),
            };
            let from = before(all.len(), stage, pass).map(|(other, pass)| moved[other].0[pass][k]);
            let same = k.checked_sub(1).map(|k| moved[stage].0[pass][k]);
            let earliest = own.into_iter().chain(from).chain(same).max().map_or(0, |at| at + 1);
            let line = &mut lines[stage];
            line[at as usize] = None;
            let fits = |&to: &u32| {
                if line[to as usize].is_some() {
                    return false;
                }
                line[to as usize] = Some(pass as u8);
                let fits = peak(line, has_weights) <= most;
                line[to as usize] = None;
                fits
            };
            let to = (earliest..at).find(fits).unwrap_or(at);
            line[to as usize] = Some(pass as u8);
            moved[stage].0[pass][k] = to;
        }
        if pass == BACK || pass == HOME {
            let to = moved[stage].0[pass][k];
            let place = back[stage].partition_point(|&other| other < to);
            back[stage].insert(place, to);
        }
    }
    match has_weights {
        true => early(&moved),
        false => early(&moved.iter().map(with_weights).collect::<Vec<_>>()),
    }
}

/// The orders with each pass as soon as what it waits for is over.
fn early(all: &[Times]) -> Vec<Times> {
    let mut moved = all.to_vec();
    let mut free = vec![0; all.len()];
    for (_, stage, pass, k) in in_time(all) {
        let own = (pass > 0 && pass < WEIGHTS).then(|| moved[stage].0[pass - 1][k] + 1);
        let from = before(all.len(), stage, pass).map(|(other, pass)| moved[other].0[pass][k] + 1);
        let at = own.into_iter().chain(from).fold(free[stage], u32::max);
        moved[stage].0[pass][k] = at;
        free[stage] = at + 1;
    }
    moved
}

fn order(times: &Times) -> Vec<Next> {
    line(times).into_iter().flatten().map(|pass| PASSES[usize::from(pass)]).collect()
}

/// The orders with `more` microbatches in their steady state, of which six units are repeated; `None` where none is
/// found that repeats itself.
fn lengthened(all: &[Times], more: u32) -> Option<Vec<Vec<Next>>> {
    let lines: Vec<Vec<Option<u8>>> = all.iter().map(line).collect();
    let interval = INTERVAL as usize;
    let repeats = |line: &Vec<Option<u8>>, at: usize| {
        let [this, next] = [at, at + interval].map(|at| line.get(at..at + interval));
        let mut passes: Vec<_> = this.into_iter().flatten().collect();
        passes.sort_unstable();
        this == next && passes == [0, 1, 2, 3, 4, 4].map(|pass| Some(pass as u8)).iter().collect::<Vec<_>>()
    };
    let shortest = lines.iter().map(Vec::len).min()?;
    let at = (0..shortest).find(|&at| lines.iter().all(|line| repeats(line, at)))?;
    let of = |line: &Vec<Option<u8>>| {
        let (head, rest) = line.split_at(at);
        let steady = rest[..interval].iter().cycle().take(interval * more as usize);
        let all = head.iter().chain(steady).chain(rest).flatten();
        all.map(|&pass| PASSES[usize::from(pass)]).collect()
    };
    Some(lines.iter().map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A steady state that is repeated is the one that there would be.
    #[test]
    fn more_microbatches_lengthen_the_steady_state_alone() {
        for fold in [Fold::Half, Fold::Min] {
            for stages in [2, 3, 4, 5, 6, 8, 13] {
                let m = 3 * stages + 4 + 7;
                let whole: Vec<Vec<Next>> = of(fold, stages, m).iter().map(order).collect();
                let longer = lengthened(&of(fold, stages, m - 7), 7);
                assert!(longer.as_ref() == Some(&whole), "{fold:?} {stages}: {:?}", longer.is_some());
            }
        }
    }
}
