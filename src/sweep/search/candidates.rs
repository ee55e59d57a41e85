//! Ways that may be worth a plan, by their bounds.

use super::Search;
use super::probe::{Probe, Shape, Short, held};
use crate::error::Result;
use crate::sweep::{Case, Point};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A way that may be worth a plan.
#[derive(Clone, Copy)]
pub(super) struct Candidate {
    pub point: Point,
    /// Of its step, s.
    pub bound: f64,
    /// Its step where it was costed, and found too slow for its memory to be looked at.
    pub step: Option<f64>,
}

impl Candidate {
    pub fn bounded(point: Point, bound: f64) -> Candidate {
        Candidate { point, bound, step: None }
    }

    /// It takes no less.
    pub fn least(&self) -> f64 {
        self.step.unwrap_or(self.bound)
    }
}

/// A way whose memory is too much by its bound.
pub(super) struct TooLarge {
    pub bytes: f64,
    pub point: Point,
    /// None where its weights alone are too much.
    pub probe: Option<Probe>,
}

/// A way, and the probe that it shares with others; none where that has no plan.
pub(super) type Probed = (Option<Probe>, Point);

/// Probes that were made: ways of later looks share them.
pub(super) struct Probes {
    short: Option<Short>,
    made: BTreeMap<Point, Option<Probe>>,
}

impl Probes {
    pub fn new(case: &Case) -> Probes {
        Probes { short: Short::of(case), made: BTreeMap::new() }
    }

    pub fn len(&self) -> usize {
        self.made.len()
    }
}

impl Search<'_> {
    /// Ways that may fit, and those that do not by their bounds. Those that were not come to before the search was told to
    /// stop are in neither.
    pub(super) fn probed(&self, points: &[Point], probes: &mut Probes) -> Result<(Vec<Probed>, Vec<TooLarge>)> {
        let room = self.case.room();
        let (mut fit, mut too_large, mut light) = (vec![], vec![], vec![]);
        for &point in points {
            match held(self.case, &point) {
                bytes if bytes > room => too_large.push(TooLarge { bytes, point, probe: None }),
                _ => light.push((Probe::of(&point, 2), point)),
            }
        }
        self.make(light.iter().map(|(of, _)| *of).collect(), probes)?;
        for (of, point) in light {
            let Some(&probe) = probes.made.get(&of) else { continue };
            match probe.map(|probe| probe.bytes(&point)) {
                Some(bytes) if bytes > room => too_large.push(TooLarge { bytes, point, probe }),
                _ => fit.push((probe, point)),
            }
        }
        Ok((fit, too_large))
    }

    /// Makes those of `wanted` that are not there.
    fn make(&self, wanted: BTreeSet<Point>, probes: &mut Probes) -> Result<()> {
        let new: Vec<Point> = wanted.into_iter().filter(|of| !probes.made.contains_key(of)).collect();
        let (all, done) = (new.len(), AtomicUsize::new(0));
        let short = probes.short.as_ref();
        let made = new.into_par_iter().filter(|_| !(self.stop)()).map(|of| {
            let probe = Probe::new(self.case, short, &of)?;
            (self.progress)("ways bounded", done.fetch_add(1, Ordering::Relaxed) + 1, all);
            Ok((of, probe))
        });
        let made = made.collect::<Result<Vec<(Point, Option<Probe>)>>>()?;
        probes.made.extend(made);
        Ok(())
    }

    /// Ways with their bounds, the most promising first.
    pub(super) fn bounded(&self, ways: Vec<Probed>) -> Vec<Candidate> {
        let model = &self.case.model;
        let mut by_shape: BTreeMap<Option<Shape>, Vec<Probed>> = BTreeMap::new();
        for (probe, point) in ways {
            by_shape.entry(Shape::of(&point)).or_default().push((probe, point));
        }
        let bounded = by_shape.into_par_iter().flat_map_iter(|(shape, ways)| {
            let shortest = shape.and_then(|shape| shape.shortest(model));
            ways.into_iter().map(move |(probe, point)| {
                // Of what nothing is known goes first.
                let bound = probe.map_or(0.0, |probe| probe.seconds(model, &point, shortest.as_ref()));
                Candidate::bounded(point, bound)
            })
        });
        let mut all: Vec<Candidate> = bounded.collect();
        all.sort_by(|a, b| a.bound.total_cmp(&b.bound).then(a.point.cmp(&b.point)));
        all
    }
}
