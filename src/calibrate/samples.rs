//! Times of kernels, by curve and size. The time that counts is that on a core: what the machine did meanwhile for
//! others is not the kernel's.

use crate::act::work_of;
use crate::compare::stats::{quantile, quiet, spread};
use crate::device::curve::{Curve, Point, size};
use crate::device::measured::key;
use crate::error::Result;
use crate::exec::Run;
use crate::plan::link::{AtomTable, Line};
use crate::plan::{OpKind, Plan, WorkClass};
use crate::timeline::Span;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    Gemm,
    Attention,
    Memory,
}

impl Class {
    fn of(class: &WorkClass) -> Class {
        match class {
            WorkClass::Gemm { .. } => Class::Gemm,
            WorkClass::Attention { .. } => Class::Attention,
            WorkClass::Memory => Class::Memory,
        }
    }
}

/// Sizes are whole numbers: as keys they are exact.
type Size = Vec<u64>;

#[derive(Default)]
pub struct Samples {
    times: BTreeMap<(String, Size), Times>,
    /// From the end of a kernel to the start of the next.
    gaps: Vec<f64>,
}

struct Times {
    class: Class,
    /// Of runs that warmed up, and of those that count.
    warm: Vec<f64>,
    counted: Vec<f64>,
}

impl Times {
    fn all(&self) -> &[f64] {
        if self.counted.len() < 2 { &self.warm } else { &self.counted }
    }
}

impl Samples {
    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    /// Notes every kernel of a run.
    pub fn add(&mut self, plan: &Plan, run: &Run, warm_up: bool) -> Result<()> {
        let atoms = AtomTable::new(plan)?;
        let programs = 0..plan.programs.len() as u32;
        let lines = programs.map(|p| Line::program(plan, &atoms, p)).collect::<Result<Vec<Line>>>()?;
        for class in &run.timeline.classes {
            let line = &lines[plan.program_of(class.rank) as usize];
            for node in 0..class.spans.len() {
                self.note(plan, line, (node, class.rank), run.on_core[class.rank as usize][node], warm_up);
            }
            if plan.ranks() == 1 {
                self.gaps.extend(gaps(&class.spans));
            }
        }
        Ok(())
    }

    fn note(&mut self, plan: &Plan, line: &Line, (node, rank): (usize, u32), seconds: f64, warm_up: bool) {
        let OpKind::Compute { kernel, .. } = &line.nodes[node].op.kind else { return };
        let Some((work, dtype)) = work_of(plan, line, node, rank) else { return };
        let at = (key(kernel.curve(), dtype), size(&work).iter().map(|x| *x as u64).collect());
        let empty = || Times { class: Class::of(&work.class), warm: vec![], counted: vec![] };
        let times = self.times.entry(at).or_insert_with(empty);
        if warm_up { times.warm.push(seconds) } else { times.counted.push(seconds) }
    }

    /// Every time that counts, by curve and size.
    pub fn rows(&self) -> impl Iterator<Item = (&str, &[u64], &[f64])> {
        self.times.iter().map(|((name, size), times)| (&name[..], &size[..], times.all()))
    }

    /// Notes times of another day.
    pub fn take(&mut self, (name, size, seconds): (String, Size, Vec<f64>)) {
        let class = match (size.len(), &name[..]) {
            (3, _) => Class::Gemm,
            (5, _) => Class::Attention,
            _ => Class::Memory,
        };
        let times = self.times.entry((name, size)).or_insert(Times { class, warm: vec![], counted: vec![] });
        times.counted.extend(seconds);
    }

    /// Between two ops of a rank.
    pub fn gap(&self) -> f64 {
        quantile(&self.gaps, 0.5).max(1e-8)
    }

    pub fn curves(&self) -> BTreeMap<String, Curve> {
        let mut points: BTreeMap<String, Vec<Point>> = BTreeMap::new();
        for ((name, size), times) in &self.times {
            let all = times.all();
            let size = size.iter().map(|x| *x as f64).collect();
            let point = Point { size, seconds: quiet(all).max(1e-9), spread: spread(all), runs: all.len() as u32 };
            points.entry(name.clone()).or_default().push(point);
        }
        points.into_iter().map(|(name, points)| (name, Curve::new(points))).collect()
    }

    /// How many times longer the kernels of a class took here than in `other`, all together.
    pub fn ratio(&self, other: &Samples, class: Class) -> f64 {
        let of_class = self.times.iter().filter(|(_, t)| t.class == class);
        let both = of_class.filter_map(|(at, t)| Some((quiet(t.all()), quiet(other.times.get(at)?.all()))));
        let (here, there) = both.fold((0.0, 0.0), |(a, b), (x, y)| (a + x, b + y));
        if there > 0.0 { here / there } else { 1.0 }
    }
}

/// From the end of each op to the start of the next.
fn gaps(spans: &[Span]) -> Vec<f64> {
    let mut times: Vec<(f64, f64)> = spans.iter().map(|s| (s.start.value(), s.end.value())).collect();
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    times.windows(2).map(|w| w[1].0 - w[0].1).filter(|gap| *gap > 0.0).collect()
}
