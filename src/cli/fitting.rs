//! Where nothing is said of how a model is split, and the default does not fit: the fastest of a few simple ways that do.

use super::progress::bar;
use crate::error::{Cause, Error, Result};
use crate::report::Row;
use crate::spec::{LlmSpec, Parallelism, Recompute};
use crate::sweep::{Case, Point};
use rayon::prelude::*;

/// A way that was taken, and what is said of it.
pub struct Taken {
    pub point: Point,
    pub note: String,
}

/// The fastest way of the first group of which any fits, or of all where it is a batch that the GPUs do not share evenly;
/// the default where none does; `None` if the default fits, or has something else wrong with it. Sequences of a step are as
/// many as `batch` says; `None`: one a replica, or in a pipeline four a stage.
pub fn fitting(case: &Case, point: &Point, batch: Option<u64>) -> Result<Option<Taken>> {
    let default = match case.row(point)? {
        // What is wrong with what was said is not for another split to hide.
        row if row.feasible => return Ok(None),
        row if row.why.cause == Cause::Memory => row,
        // A sequence for each GPU, each so long that nobody waits for it: fewer at a time, shared by ranks, may do.
        row if row.why.cause == Cause::Time && batch.is_none() => row,
        // A batch that all GPUs as replicas do not share evenly, fewer may.
        row if row.why.cause == Cause::Batch && batch.is_some() => row,
        _ => return Ok(None),
    };
    let odd = default.why.cause == Cause::Batch;
    let groups = if odd { vec![groups(case).concat()] } else { groups(case) };
    let mut all = 0;
    for group in groups {
        let points: Vec<Point> = group.into_iter().filter_map(|way| at(case, point, way, batch)).collect();
        let Tried { tried, fit, refused } = try_all(case, &points)?;
        let rate = |row: &Row| row.tokens_per_s_per_gpu.unwrap_or(0.0);
        if let Some((point, _)) = fit.iter().max_by(|a, b| rate(&a.1).total_cmp(&rate(&b.1))) {
            let note = format!(
                "nothing is said of the split, and the default (no degree, zero 1, recompute none) does not fit ({}); taken is \
                 {}, the fastest of {} simple ways that fit, of {tried} tried{}; say --zero, --recompute, --tp .. for another, or \
                 let `foretrain search` look{}",
                short(&default.why.to_string()),
                words(&point.par),
                fit.len(),
                refused.map_or(String::new(), |(n, why)| format!(" ({n} are refused, the first for {})", short(&why))),
                if odd { even_batches(case, point) } else { String::new() }
            );
            return Ok(Some(Taken { point: *point, note }));
        }
        all += tried;
    }
    if odd {
        return Ok(None);
    }
    if default.why.cause == Cause::Time {
        let more = format!(
            "nothing is said of the split, and of {all} simple ways tried none fits; `foretrain search` tries more"
        );
        return Err(Error::Infeasible(default.why.and(more)));
    }
    let note = format!(
        "nothing is said of the split, and of {all} simple ways tried none fits; this is the default, and `foretrain search` \
         tries more, and what saves memory"
    );
    Ok(Some(Taken { point: *point, note }))
}

/// Which batches all GPUs would share as replicas: those next to this one.
fn even_batches(case: &Case, point: &Point) -> String {
    let unit = u64::from(case.cluster.gpus()).saturating_mul(point.micro_batch).max(1);
    let (below, above) = (point.global_batch / unit * unit, point.global_batch.div_ceil(unit).saturating_mul(unit));
    let below = if below > 0 { format!("{below} or ") } else { String::new() };
    format!(", or --global-batch {below}{above} for one replica a GPU")
}

/// What became of simple ways.
struct Tried {
    tried: usize,
    fit: Vec<(Point, Row)>,
    /// How many are refused for something else than memory, and what was said of the first.
    refused: Option<(usize, String)>,
}

/// Tries points. What fits without recomputation is faster than with it, so that only the others are tried with it.
fn try_all(case: &Case, points: &[Point]) -> Result<Tried> {
    let plain = |par: Parallelism| Parallelism { recompute: Recompute::None, ..par };
    let (first, second): (Vec<Point>, Vec<Point>) = points.iter().partition(|point| point.par == plain(point.par));
    let bar = bar(points.len() as u64, "{pos}/{len} simple ways tried");
    let rows = |points: &[Point]| -> Result<Vec<(Point, Row)>> {
        let row = |point: &Point| Ok((*point, case.row(point).inspect(|_| bar.inc(1))?));
        points.par_iter().map(row).collect()
    };
    let mut all = rows(&first)?;
    let faster: Vec<Parallelism> = all.iter().filter(|(_, row)| row.feasible).map(|(point, _)| point.par).collect();
    let second: Vec<Point> = second.into_iter().filter(|point| !faster.contains(&plain(point.par))).collect();
    all.extend(rows(&second)?);
    bar.finish_and_clear();
    let (fit, other): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, row)| row.feasible);
    let mut refused = other.iter().filter(|(_, row)| row.why.cause != Cause::Memory).peekable();
    let why = refused.peek().map(|(_, row)| row.why.to_string());
    Ok(Tried { tried: first.len() + second.len(), refused: why.map(|why| (refused.count(), why)), fit })
}

/// What memory is needed, without the remedies behind it: the way that was taken is one.
fn short(why: &str) -> &str {
    let why = why.split(';').next().unwrap_or(why);
    why.split(" (").next().unwrap_or(why)
}

/// Degrees above one, and what is always said.
fn words(par: &Parallelism) -> String {
    let degrees = [("pp", par.pp), ("tp", par.tp), ("ulysses", par.ulysses), ("ring", par.ring), ("ep", par.ep)];
    let above = degrees.into_iter().filter(|(_, n)| *n > 1).map(|(name, n)| format!("{name} {n}, "));
    format!("{}zero {}, recompute {}", above.collect::<String>(), par.zero, par.recompute.name())
}

/// Ways by how much they ask of whoever trains: state and activations first, then ranks of a node that share products, or
/// ranks that share the sequence, then both, then pipelines.
fn groups(case: &Case) -> Vec<Vec<Parallelism>> {
    let node = case.cluster.spec.gpus_per_node.min(case.cluster.gpus());
    let with = |degrees: &[(u32, u32, u32)]| {
        let all = degrees.iter().flat_map(|&(tp, ulysses, ring)| {
            experts(&case.model, case.cluster.gpus()).into_iter().map(move |ep| (tp, ulysses, ring, ep))
        });
        all.flat_map(|(tp, ulysses, ring, ep)| {
            let of = move |(zero, recompute)| Parallelism {
                tp,
                ulysses,
                ring,
                ep,
                zero,
                recompute,
                ..Parallelism::default()
            };
            let (none, full) = (Recompute::None, Recompute::Full);
            [(1, none), (3, none), (1, full), (3, full)].map(of)
        })
        .collect::<Vec<_>>()
    };
    let powers = |most: u32| (1..8).map(|log| 1 << log).filter(move |n| *n <= most);
    let tensor = powers(node).map(|tp| (tp, 1, 1));
    let sequence = powers(node).map(|u| (1, u, 1)).chain(powers(64).map(|ring| (1, 1, ring)));
    let one: Vec<_> = tensor.chain(sequence).collect();
    let shared =
        powers(node).map(|tp| (tp, node / tp, 1)).filter(|(tp, ulysses, _)| *ulysses > 1 && tp * ulysses == node);
    let both = powers(64).flat_map(|ring| [(node, 1, ring), (1, node, ring)]).chain(shared).collect::<Vec<_>>();
    let staged = [1, node].into_iter().flat_map(|tp| with(&[(tp, 1, 1)])).filter(|way| way.zero == 1);
    let staged = staged.flat_map(|way| powers(32).map(move |pp| Parallelism { pp, ..way })).collect();
    vec![with(&[(1, 1, 1)]), with(&one), with(&both), staged]
}

/// Degrees of expert parallelism to try.
fn experts(model: &LlmSpec, gpus: u32) -> Vec<u32> {
    let fits = |ep: &u32| model.moe.is_some_and(|moe| *ep <= gpus && moe.experts.is_multiple_of(u64::from(*ep)));
    let mut all: Vec<u32> = [8, 64].into_iter().filter(fits).collect();
    if all.is_empty() {
        all.push(1);
    }
    all
}

/// The point split that way; `None` where the GPUs do not come out even.
fn at(case: &Case, point: &Point, way: Parallelism, batch: Option<u64>) -> Option<Point> {
    let split = way.pp * way.tp * way.ulysses * way.ring;
    let gpus = case.cluster.gpus();
    let dp = gpus.is_multiple_of(split).then_some(gpus / split)?;
    let microbatches = if way.pp > 1 { 4 * u64::from(way.pp) } else { 1 };
    let global_batch = batch.unwrap_or(u64::from(dp) * point.micro_batch * microbatches);
    Some(Point { global_batch, par: Parallelism { dp, ..way }, ..*point })
}
