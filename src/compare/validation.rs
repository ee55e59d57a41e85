//! A prediction held against several runs of the same plan, op by op, with the reason where an op is far off.

use super::overlap::Overlap;
use super::stats::{quantile, spread};
use crate::spec::Provenance;
use crate::timeline::{Span, Timeline};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// Why an op may be far off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Repeated runs differ as much among themselves.
    Jitter,
    /// Its size, or the kernel itself, was never calibrated.
    NeverCalibrated,
    /// It waits for another rank, whose lateness is its own.
    Waiting,
    /// Another program had its core for a while.
    Preempted,
    /// Other ranks were busy beside it and it took longer than alone.
    Contention,
    Unknown,
}

impl Reason {
    pub fn says(self) -> &'static str {
        match self {
            Reason::Jitter => "jitter: runs differ as much",
            Reason::NeverCalibrated => "size never calibrated",
            Reason::Waiting => "waits for another rank",
            Reason::Preempted => "another program had the core",
            Reason::Contention => "others were busy beside it",
            Reason::Unknown => "not known",
        }
    }
}

/// An op of a rank: predicted, and measured as the median of the runs: a step is the sum of
/// its ops, and its median about that of theirs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OpCheck {
    pub rank: u32,
    pub path: String,
    pub what: &'static str,
    pub predicted_s: f64,
    pub measured_s: f64,
    /// |predicted / measured - 1|
    pub error: f64,
    /// What it had a core for; none for communication.
    pub on_core_s: Option<f64>,
    /// Of the runs, relative.
    pub spread: f64,
    /// Every run's time.
    pub runs_s: Vec<f64>,
    /// How its kernel's time is known; none for communication.
    pub provenance: Option<Provenance>,
    pub reason: Reason,
}

/// Ops of one kernel, transfer or collective.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KindCheck {
    pub what: &'static str,
    pub ops: usize,
    pub predicted_s: f64,
    pub measured_s: f64,
    pub median_error: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct Validation {
    pub ranks: u32,
    pub repeats: usize,
    pub predicted_step_s: f64,
    pub measured_step_s: f64,
    pub end_to_end_error: f64,
    pub median_op_error: f64,
    pub p90_op_error: f64,
    /// Of kernels, against the time that they had a core: what is left when other programs are out of the way.
    pub median_kernel_error_on_core: f64,
    /// Relative spread of the step over the runs.
    pub noise: f64,
    /// Share of the kernels' time that another thread had their cores.
    pub lost_to_others: f64,
    /// The end-to-end error is no larger than the runs differ among themselves, or than what other programs took.
    pub within_noise: bool,
    /// Communication, and how much of it kernels hide.
    pub predicted_overlap: Overlap,
    pub measured_overlap: Overlap,
    pub by_kind: Vec<KindCheck>,
    pub only_predicted: usize,
    pub only_measured: usize,
    pub ops: Vec<OpCheck>,
}

/// Shorter than this an op is one that a mask leaves nothing of, and its time is that of reading the clock.
const TRIFLE_S: f64 = 1e-6;

/// A run of the plan: its timeline, and how long each op of each rank had a core.
#[derive(Debug, Clone)]
pub struct Trial {
    pub timeline: Timeline,
    pub on_core: Vec<Vec<f64>>,
}

/// What one run says of an op.
struct Seen<'a> {
    span: &'a Span,
    on_core: f64,
}

/// Holds `predicted` against `runs`, at least one; `known` says how a rank's op of a path is known, if it is a kernel.
/// Where every rank could have a core of its own, `own_cores`, a core that is gone is gone to another program.
pub fn validate(
    predicted: &Timeline,
    runs: &[Trial],
    known: &dyn Fn(u32, usize) -> Option<Provenance>,
    own_cores: bool,
) -> Validation {
    let mut measured: HashMap<(u32, &str), Vec<Seen>> = HashMap::new();
    for run in runs {
        for (rank, node, span) in spans(&run.timeline) {
            let seen = Seen { span, on_core: run.on_core[rank as usize][node] };
            measured.entry((rank, span.path.as_str())).or_default().push(seen);
        }
    }
    let (mut ops, mut only_predicted) = (vec![], 0);
    for (rank, index, span) in spans(predicted) {
        match measured.remove(&(rank, span.path.as_str())) {
            Some(there) => ops.extend(check(rank, span, &there, known(rank, index), runs)),
            None => only_predicted += 1,
        }
    }
    let steps: Vec<f64> = runs.iter().map(|r| r.timeline.step.value()).collect();
    let (step, noise) = (quantile(&steps, 0.5), spread(&steps));
    let errors: Vec<f64> = ops.iter().map(|op| op.error).collect();
    let on_core: Vec<f64> = ops.iter().filter_map(|op| Some(error(op.predicted_s, op.on_core_s?))).collect();
    let lost_to_others = lost(&ops);
    let end_to_end_error = error(predicted.step.value(), step);
    let is_kernel = |rank: u32, node: usize| known(rank, node).is_some();
    let overlaps: Vec<Overlap> = runs.iter().map(|r| Overlap::of(&r.timeline, &is_kernel)).collect();
    Validation {
        ranks: predicted.classes.len() as u32,
        repeats: runs.len(),
        predicted_step_s: predicted.step.value(),
        measured_step_s: step,
        end_to_end_error,
        median_op_error: quantile(&errors, 0.5),
        p90_op_error: quantile(&errors, 0.9),
        median_kernel_error_on_core: quantile(&on_core, 0.5),
        noise,
        lost_to_others,
        within_noise: end_to_end_error <= noise + if own_cores { lost_to_others } else { 0.0 },
        predicted_overlap: Overlap::of(predicted, &is_kernel),
        measured_overlap: Overlap::median(&overlaps),
        by_kind: by_kind(&ops),
        only_predicted,
        only_measured: measured.len(),
        ops,
    }
}

impl Validation {
    /// Of kernels alone, and the step as their sum: what is left where messages were not real.
    pub fn of_kernels(mut self) -> Validation {
        self.ops.retain(|op| op.on_core_s.is_some());
        let sum = |of: fn(&OpCheck) -> f64| self.ops.iter().map(of).sum::<f64>();
        (self.predicted_step_s, self.measured_step_s) = (sum(|op| op.predicted_s), sum(|op| op.measured_s));
        let errors: Vec<f64> = self.ops.iter().map(|op| op.error).collect();
        self.end_to_end_error = error(self.predicted_step_s, self.measured_step_s);
        (self.median_op_error, self.p90_op_error) = (quantile(&errors, 0.5), quantile(&errors, 0.9));
        self.within_noise = self.end_to_end_error <= self.noise;
        self.by_kind = by_kind(&self.ops);
        self
    }

    /// The ops that cost the prediction most: by seconds off, not by percent.
    pub fn worst(&self, count: usize) -> Vec<&OpCheck> {
        let mut all: Vec<&OpCheck> = self.ops.iter().collect();
        let off = |op: &OpCheck| (op.predicted_s - op.measured_s).abs();
        all.sort_by(|a, b| off(b).total_cmp(&off(a)));
        all.truncate(count);
        all
    }
}

fn error(predicted: f64, measured: f64) -> f64 {
    if measured > 0.0 { (predicted / measured - 1.0).abs() } else { 0.0 }
}

fn spans(timeline: &Timeline) -> impl Iterator<Item = (u32, usize, &Span)> {
    timeline.classes.iter().flat_map(|class| class.spans.iter().enumerate().map(|(i, span)| (class.rank, i, span)))
}

fn check(rank: u32, span: &Span, there: &[Seen], provenance: Option<Provenance>, runs: &[Trial]) -> Option<OpCheck> {
    let times: Vec<f64> = there.iter().map(|s| s.span.duration().value()).collect();
    let (predicted_s, measured_s) = (span.duration().value(), quantile(&times, 0.5));
    if predicted_s.max(measured_s) < TRIFLE_S {
        return None;
    }
    let (error, spread) = (error(predicted_s, measured_s), spread(&times));
    let on_core_s = provenance.map(|_| quantile(&there.iter().map(|s| s.on_core).collect::<Vec<f64>>(), 0.5));
    let reason = match provenance {
        _ if spread >= error => Reason::Jitter,
        None => Reason::Waiting,
        Some(Provenance::Extrapolated | Provenance::Assumed) => Reason::NeverCalibrated,
        _ if measured_s > predicted_s && on_core_s.is_some_and(|s| s < 0.95 * measured_s) => Reason::Preempted,
        _ if measured_s > predicted_s && crowded(rank, there[0].span, &runs[0].timeline) => Reason::Contention,
        _ => Reason::Unknown,
    };
    Some(OpCheck {
        rank,
        path: span.path.clone(),
        what: span.what,
        predicted_s,
        measured_s,
        error,
        on_core_s,
        spread,
        runs_s: times,
        provenance,
        reason,
    })
}

/// Share of the kernels' time in which another thread had the core.
fn lost(ops: &[OpCheck]) -> f64 {
    let kernels = ops.iter().filter_map(|op| Some((op.measured_s, op.on_core_s?)));
    let (spans, cores) = kernels.fold((0.0, 0.0), |(a, b), (span, core)| (a + span, b + core));
    if spans > 0.0 { (1.0 - cores / spans).max(0.0) } else { 0.0 }
}

/// Whether another rank was busy for half of the span or more.
fn crowded(rank: u32, span: &Span, run: &Timeline) -> bool {
    let others = run.classes.iter().filter(|c| c.rank != rank).flat_map(|c| &c.spans).filter(|s| s.lane == span.lane);
    let shared = others.map(|s| (s.end.min(span.end) - s.start.max(span.start)).value().max(0.0)).sum::<f64>();
    shared * 2.0 >= span.duration().value()
}

fn by_kind(ops: &[OpCheck]) -> Vec<KindCheck> {
    let mut kinds: BTreeMap<&'static str, Vec<&OpCheck>> = BTreeMap::new();
    ops.iter().for_each(|op| kinds.entry(op.what).or_default().push(op));
    let kind = |(what, ops): (&'static str, Vec<&OpCheck>)| KindCheck {
        what,
        ops: ops.len(),
        predicted_s: ops.iter().map(|op| op.predicted_s).sum(),
        measured_s: ops.iter().map(|op| op.measured_s).sum(),
        median_error: quantile(&ops.iter().map(|op| op.error).collect::<Vec<f64>>(), 0.5),
    };
    let mut all: Vec<KindCheck> = kinds.into_iter().map(kind).collect();
    all.sort_by(|a, b| b.measured_s.total_cmp(&a.measured_s));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::{Class, Usage};
    use crate::units::Seconds;

    fn timeline(step: f64, ranks: &[&[(&str, &'static str, f64)]]) -> Timeline {
        let span = |&(path, what, s): &(&str, &'static str, f64)| Span {
            path: path.into(),
            what,
            lane: 0,
            start: Seconds::ZERO,
            end: Seconds::new(s),
        };
        let class = |(rank, spans): (usize, &&[(&str, &'static str, f64)])| Class {
            rank: rank as u32,
            multiplicity: 1,
            usage: Usage::default(),
            spans: spans.iter().map(span).collect(),
        };
        Timeline { step: Seconds::new(step), classes: ranks.iter().enumerate().map(class).collect(), lanes: vec![] }
    }

    #[test]
    fn errors_are_relative_to_what_was_measured_and_have_their_reasons() {
        let predicted =
            timeline(9.0, &[&[("a", "matmul", 1.0), ("b", "norm", 4.6), ("c", "transfer", 1.0), ("e", "add", 1.0)]]);
        let run = |a, b| {
            timeline(10.0, &[&[("a", "matmul", a), ("b", "norm", b), ("c", "transfer", 4.0), ("f", "add", 1.0)]])
        };
        let trial = |timeline: Timeline| Trial { timeline, on_core: vec![vec![1.0; 4]] };
        let runs = [run(2.0, 2.0), run(2.0, 4.0), run(2.0, 3.0), run(2.0, 2.5)].map(trial);
        let known = |_: u32, node: usize| match node {
            0 => Some(Provenance::Extrapolated),
            1 | 3 => Some(Provenance::Interpolated),
            _ => None,
        };
        assert!(
            validate(&predicted, &runs, &known, true).within_noise,
            "half of the time another program had the core"
        );
        let v = validate(&predicted, &runs, &known, false);
        assert!((v.end_to_end_error - 0.1).abs() < 1e-12 && v.noise == 0.0 && !v.within_noise);
        let reasons: Vec<Reason> = v.ops.iter().map(|op| op.reason).collect();
        assert_eq!(reasons, [Reason::NeverCalibrated, Reason::Unknown, Reason::Waiting]);
        assert_eq!((v.only_predicted, v.only_measured), (1, 1));
        assert_eq!(v.worst(1)[0].path, "c");
        assert_eq!(v.by_kind[0].what, "transfer");
        // Of 2 and 2.75 seconds, the medians, a core was there for one each.
        assert!((v.lost_to_others - (1.0 - 2.0 / 4.75)).abs() < 1e-12, "{}", v.lost_to_others);
        let errors: Vec<f64> = v.ops.iter().map(|op| op.error).collect();
        assert!((v.median_op_error - (4.6 / 2.75 - 1.0)).abs() < 1e-12, "{errors:?}");
    }
}
