//! The plan of a run that fits, where its source leaves open how it was made to.

use super::plan::Made;
use super::setup::Setup;
use crate::plan::unfused::AT_A_TIME;
use crate::published::Shipped;
use crate::published::outcome::verdict::Prediction;
use crate::published::rank::recompute::recompute;
use crate::published::row::case::Training;
use crate::published::split::wider::wider;
use crate::published::split::{ROWS, sharding};
use crate::spec::Recompute;

/// The plan of a run, with more ranks to share what they have where its source leaves that open and the plan cannot
/// be, or does not fit, otherwise: a run that really happened did fit.
pub fn fitting(
    stated: &Training,
    shipped: &Shipped,
    setup: Setup,
    found: &mut Prediction,
) -> Result<(Setup, Made), String> {
    for sequences in at_a_time(&setup, stated) {
        let run = Training { micro_batch: Some(sequences), ..stated.clone() };
        let mut tried = found.clone();
        let fits = attempt(&run, stated, shipped, &mut tried);
        // Nobody computes again for more sequences at a time, unless fewer cost the network.
        let whole = |made: &Made| recompute(stated).is_some() || made.split.par.recompute == Recompute::None;
        let plain = |made: &Made| made.beside.is_none() && whole(made);
        if let Some(fits) = fits.filter(|(setup, made)| setup.split.par.zero == 3 || plain(made)) {
            *found = tried;
            return Ok(fits);
        }
    }
    let first = setup.plan(recompute(stated), found);
    if first.is_ok() && found.memory.is_none() {
        return first.map(|made| (setup, made));
    }
    let why = first.as_ref().err().cloned();
    for zero in sharding::to_try(stated) {
        let run = Training { zero: (*zero).into(), ..stated.clone() };
        if let Some(fits) = attempt(&run, stated, shipped, found) {
            found.why.push(format!("zero: not stated; {zero} taken, which fits"));
            return Ok(fits);
        }
    }
    // ZeRO 3 goes on being tried where more ranks share the sequence.
    let zeros: Vec<&str> = std::iter::once("").chain(sharding::to_try(stated).iter().copied()).collect();
    let (node, mut run) = (setup.machine.cluster.spec.gpus_per_node, stated.clone());
    // A plan that needs the least over what there is, where none fits.
    let mut nearest = first.ok().map(|made| (made.needs / setup.room(), setup, made, found.clone()));
    while let Some(next) = wider(&run, stated, node) {
        run = next;
        for zero in &zeros {
            let zero = if zero.is_empty() { stated.zero.clone() } else { (*zero).into() };
            let run = Training { zero, ..run.clone() };
            let mut tried = Prediction::default();
            let Some((setup, made)) = built(&run, stated, shipped, &mut tried) else { continue };
            let par = &setup.split.par;
            let [tp, pp, ulysses, ring] = [par.tp, par.pp, par.ulysses, par.ring];
            let fits = tried.memory.is_none();
            let said = if fits { "which fit" } else { "none that fit being known, which come nearest to it" };
            let taken =
                format!("degrees: not all stated; tp {tp}, pp {pp}, ulysses {ulysses}, ring {ring} taken, {said}");
            tried.why.push(taken);
            if fits {
                note(found, tried);
                return Ok((setup, made));
            }
            let over = made.needs / setup.room();
            if nearest.as_ref().is_none_or(|(least, ..)| over < *least) {
                nearest = Some((over, setup, made, tried));
            }
        }
    }
    // What can be built says more than why what was stated cannot.
    let (_, setup, made, tried) = nearest.ok_or_else(|| why.unwrap_or_default())?;
    note(found, tried);
    Ok((setup, made))
}

/// What was chosen in place of what was noted before.
fn note(found: &mut Prediction, tried: Prediction) {
    (found.memory, found.why, found.cluster) = (tried.memory, tried.why, tried.cluster);
}

/// The plan of `run`, whether or not it fits.
fn built(run: &Training, stated: &Training, shipped: &Shipped, tried: &mut Prediction) -> Option<(Setup, Made)> {
    let setup = Setup::of(run, shipped, tried).ok()?;
    let made = setup.plan(recompute(stated), tried).ok()?;
    Some((setup, made))
}

/// Sequences at a time where nobody says, the most first.
///
/// Where weights are gathered anew for each microbatch (ZeRO 3), whoever gathers for one at a time waits for the network:
/// all that a rank has, or half as many until they fit. Where tensors are cut and no pipeline asks for many microbatches, a
/// rank's part of a product needs as many times the rows to be as large as it was. Where scores are in memory, whoever
/// chose found out that some numbers of heads and sequences go around the fused softmax: as few as do not.
fn at_a_time(setup: &Setup, stated: &Training) -> Vec<u64> {
    let (split, par) = (&setup.split, &setup.split.par);
    let share = stated.global_batch.map_or(1, |batch| batch / u64::from(par.dp));
    let most = match par.zero {
        _ if stated.micro_batch.is_some() || par.pp > 1 => 1,
        3 => share,
        _ => share.min(u64::from(par.tp) * (ROWS * u64::from(par.ulysses * par.ring) / split.seq).max(1)),
    };
    let halved = std::iter::successors(Some(most), |n| Some(n / 2)).take_while(|n| *n > 1);
    let heads = setup.model.heads / u64::from(par.tp * par.ulysses).max(1);
    let scores = stated.micro_batch.is_none() && !setup.stack.fuses_attention();
    let fused = (1..=AT_A_TIME).find(|n| (n * heads).is_multiple_of(AT_A_TIME)).filter(|n| scores && *n > 1);
    halved.chain(fused).filter(|n| share.is_multiple_of(*n)).collect()
}

/// The plan of `run`, if it fits; then what was chosen is noted in place of what was noted before.
fn attempt(run: &Training, stated: &Training, shipped: &Shipped, found: &mut Prediction) -> Option<(Setup, Made)> {
    let mut tried = Prediction::default();
    let both = built(run, stated, shipped, &mut tried).filter(|_| tried.memory.is_none())?;
    note(found, tried);
    Some(both)
}
