//! How much of the communication of a timeline is hidden behind kernels.

use super::stats::quantile;
use crate::timeline::{Class, Timeline};
use serde::Serialize;

/// Of all ranks together, in s.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Overlap {
    /// Some transfer or collective of a rank is under way: from its start on the rank to its end there.
    pub under_way_s: f64,
    /// The part of it in which the rank runs no kernel.
    pub exposed_s: f64,
}

impl Overlap {
    /// Of a timeline; `is_kernel` says it of op `node` of a rank.
    pub fn of(timeline: &Timeline, is_kernel: &dyn Fn(u32, usize) -> bool) -> Overlap {
        timeline.classes.iter().fold(Overlap::default(), |sum, class| {
            let (under_way_s, exposed_s) = of_rank(class, is_kernel);
            let times = f64::from(class.multiplicity);
            Overlap { under_way_s: sum.under_way_s + times * under_way_s, exposed_s: sum.exposed_s + times * exposed_s }
        })
    }

    /// The median of some runs.
    pub fn median(runs: &[Overlap]) -> Overlap {
        let of = |f: &dyn Fn(&Overlap) -> f64| quantile(&runs.iter().map(f).collect::<Vec<f64>>(), 0.5);
        Overlap { under_way_s: of(&|o| o.under_way_s), exposed_s: of(&|o| o.exposed_s) }
    }

    /// Share of the communication that kernels hide; one where there is none.
    pub fn hidden(&self) -> f64 {
        if self.under_way_s > 0.0 { 1.0 - self.exposed_s / self.under_way_s } else { 1.0 }
    }
}

type Interval = (f64, f64);

fn of_rank(class: &Class, is_kernel: &dyn Fn(u32, usize) -> bool) -> (f64, f64) {
    let spans = class.spans.iter().enumerate().map(|(node, s)| (node, (s.start.value(), s.end.value())));
    let (kernels, comm): (Vec<_>, Vec<_>) = spans.partition(|(node, _)| is_kernel(class.rank, *node));
    let [kernels, comm] = [kernels, comm].map(|all| union(all.into_iter().map(|(_, at)| at).collect()));
    let hidden: f64 = comm.iter().map(|c| kernels.iter().map(|k| common(*c, *k)).sum::<f64>()).sum();
    let under_way: f64 = comm.iter().map(|(from, to)| to - from).sum();
    (under_way, under_way - hidden)
}

fn common(a: Interval, b: Interval) -> f64 {
    (a.1.min(b.1) - a.0.max(b.0)).max(0.0)
}

/// The same instants in intervals that do not overlap.
fn union(mut all: Vec<Interval>) -> Vec<Interval> {
    all.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut out: Vec<Interval> = vec![];
    for (from, to) in all.into_iter().filter(|(from, to)| to > from) {
        match out.last_mut().filter(|last| from <= last.1) {
            Some(last) => last.1 = last.1.max(to),
            None => out.push((from, to)),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::{Span, Usage};
    use crate::units::Seconds;

    #[test]
    fn what_no_kernel_covers_is_exposed() {
        let span = |(what, from, to): (&'static str, f64, f64)| {
            let (start, end) = (Seconds::new(from), Seconds::new(to));
            Span { path: what.into(), what, lane: 0, start, end }
        };
        // Kernels 0-2 and 3-4; transfers 1-5 and, at the same time, 2-4.5: 1-2 and 3-4 of 1-5 are hidden.
        let spans = [("k", 0.0, 2.0), ("t", 1.0, 5.0), ("k", 3.0, 4.0), ("t", 2.0, 4.5)].map(span).to_vec();
        let class = Class { rank: 0, multiplicity: 2, usage: Usage::default(), spans };
        let timeline = Timeline { step: Seconds::new(5.0), classes: vec![class], lanes: vec![] };
        let found = Overlap::of(&timeline, &|_, node| node % 2 == 0);
        assert_eq!(found, Overlap { under_way_s: 8.0, exposed_s: 4.0 });
        assert_eq!(found.hidden(), 0.5);
        assert_eq!(Overlap::of(&timeline, &|_, _| true).hidden(), 1.0);
    }
}
