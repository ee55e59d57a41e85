//! Times of kernels, by curve and size, and of copies of messages. The time that counts is that from start to end, as
//! in a timeline, but where the machine had the core for others meanwhile.

use super::rows::{Company, Row};
use crate::act::{cold_bytes, work_of};
use crate::collective::forward::{self, Round};
use crate::compare::stats::{quantile, spread};
use crate::device::curve::{Curve, Point, size};
use crate::device::measured::{exchange_key, is_exchange, key};
use crate::error::Result;
use crate::exec::Run;
use crate::exec::copied::How;
use crate::plan::link::{AtomTable, Line};
use crate::plan::{ExchangeAlgo, OpKind, Phase, Plan};
use crate::timeline::Span;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;

/// In place of a kernel's name: from op to op.
const GAP: &str = "gap";

/// A kernel's span is that much longer than its time on a core, at most, where nobody else had the core: the clocks are
/// read, and the timer's interrupts are served.
const LONGER: f64 = 1.03;
const LATER: f64 = 3e-6;

/// In place of a kernel's name: copies of messages.
fn message(how: How) -> &'static str {
    match how {
        How::Post => "message_post",
        How::Take => "message_take",
        How::Add => "message_add",
    }
}

/// Sizes are whole numbers: as keys they are exact.
type Size = Vec<u64>;

#[derive(Default)]
pub struct Samples {
    times: BTreeMap<(String, Size), Times>,
    /// Of exchanges of rows, by rows and bytes.
    exchanges: BTreeMap<(String, Size), Times>,
    /// On GPUs, blocks of products are filled up.
    filled: bool,
    /// From the end of a kernel to the start of the next.
    gaps: Vec<f64>,
}

#[derive(Default)]
struct Times {
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
    pub fn of_gpu() -> Samples {
        Samples { filled: true, ..Samples::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    /// Notes every kernel of a run.
    pub fn add(&mut self, plan: &Plan, run: &Run, warm_up: bool) -> Result<()> {
        let atoms = AtomTable::new(plan)?;
        let programs = 0..plan.programs.len() as u32;
        let lines = programs.map(|p| Line::program(plan, &atoms, p)).collect::<Result<Vec<Line>>>()?;
        let cold = if self.filled { vec![] } else { cold_bytes(plan, &atoms, &lines, 1)? };
        let mut rounds = Rounds::default();
        for class in &run.timeline.classes {
            let program = plan.program_of(class.rank) as usize;
            let line = &lines[program];
            for node in 0..class.spans.len() {
                let (at, seconds) = ((node, class.rank), run.on_core[class.rank as usize][node]);
                let span = class.spans[node].duration().value();
                let cold = cold.get(program).map(|cold| cold[node]);
                self.note((plan, line, cold), at, span.min(seconds * LONGER + LATER), warm_up);
                self.note_exchange(plan, line, at, &mut rounds, seconds, warm_up);
            }
            if plan.ranks() == 1 {
                self.gaps.extend(gaps(&class.spans));
            }
        }
        for copied in run.copied.iter().flatten().filter(|copied| copied.bytes > 0) {
            let times = self.times.entry((message(copied.how).into(), vec![copied.bytes])).or_default();
            if warm_up { times.warm.push(copied.seconds) } else { times.counted.push(copied.seconds) }
        }
        Ok(())
    }

    fn note(
        &mut self,
        (plan, line, cold): (&Plan, &Line, Option<u64>),
        (node, rank): (usize, u32),
        seconds: f64,
        warm_up: bool,
    ) {
        let OpKind::Compute { kernel, .. } = &line.nodes[node].op.kind else { return };
        let Some((work, dtype)) = work_of(plan, line, node, rank) else { return };
        let size: Size = size(&work, self.filled, cold).iter().map(|x| x.round() as u64).collect();
        // An expert that nobody chose says nothing about rows.
        if size.contains(&0) {
            return;
        }
        let times = self.times.entry((key(kernel.curve(), dtype), size)).or_default();
        if warm_up { times.warm.push(seconds) } else { times.counted.push(seconds) }
    }

    fn note_exchange(
        &mut self,
        plan: &Plan,
        line: &Line,
        (node, rank): (usize, u32),
        rounds: &mut Rounds,
        seconds: f64,
        warm_up: bool,
    ) {
        let OpKind::Exchange { route, algo, phase, .. } = &line.nodes[node].op.kind else { return };
        let number = plan.route_number(*route, rank);
        let found = || forward::rounds(&plan.routes[number as usize], *algo, *phase);
        let rounds = rounds.entry((number, *algo, *phase)).or_insert_with(found);
        let Some(load) = forward::load(plan, line, (node, rank), rounds) else { return };
        if load.rows() == 0 {
            return;
        }
        let at = (exchange_key(load.phase, load.dtype), load.size().map(|x| x as u64).to_vec());
        let times = self.exchanges.entry(at).or_default();
        if warm_up { times.warm.push(seconds) } else { times.counted.push(seconds) }
    }

    /// Every time, under the name of what was run.
    pub fn rows<'a>(&'a self, plan: &'a str) -> impl Iterator<Item = Row> + 'a {
        let row = move |curve: &str, size: &[u64], seconds: &[f64], warm| Row {
            plan: plan.into(),
            curve: curve.into(),
            size: size.into(),
            seconds: seconds.into(),
            warm,
            company: Company::default(),
            on: None,
        };
        let timed = self.times.iter().chain(&self.exchanges).flat_map(move |((name, size), times)| {
            let parts = [(&times.warm, true), (&times.counted, false)].into_iter();
            parts.filter(|(all, _)| !all.is_empty()).map(move |(all, warm)| row(name, size, all, warm))
        });
        timed.chain((!self.gaps.is_empty()).then(|| row(GAP, &[], &self.gaps, false)))
    }

    /// Notes times of another run.
    pub fn take(&mut self, row: Row) {
        if row.size.is_empty() {
            return self.gaps.extend(row.seconds);
        }
        let all = if is_exchange(&row.curve) { &mut self.exchanges } else { &mut self.times };
        let times = all.entry((row.curve, row.size)).or_default();
        if row.warm { times.warm.extend(row.seconds) } else { times.counted.extend(row.seconds) }
    }

    /// Between two ops of a rank.
    pub fn gap(&self) -> f64 {
        quantile(&self.gaps, 0.5).max(1e-8)
    }

    pub fn curves(&self) -> BTreeMap<String, Curve> {
        let mut all = curves(&self.times);
        all.retain(|name, _| !name.starts_with("message_"));
        all
    }

    /// What copies took, by bytes; empty where there was none.
    pub fn copies(&self, how: How) -> Vec<Point> {
        let times = self.times.iter().filter(|((name, _), _)| name == message(how));
        times.map(|((_, size), times)| point(size, times)).collect()
    }

    pub fn exchanges(&self) -> BTreeMap<String, Curve> {
        curves(&self.exchanges)
    }
}

/// The messages of a plan's exchanges, by the number of their route.
type Rounds = FxHashMap<(u32, ExchangeAlgo, Phase), Vec<Round>>;

fn curves(all: &BTreeMap<(String, Size), Times>) -> BTreeMap<String, Curve> {
    let mut points: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for ((name, size), times) in all {
        points.entry(name.clone()).or_default().push(point(size, times));
    }
    points.into_iter().map(|(name, points)| (name, Curve::new(points))).collect()
}

fn point(size: &Size, times: &Times) -> Point {
    let all = times.all();
    let size = size.iter().map(|x| *x as f64).collect();
    Point { size, seconds: quantile(all, 0.5).max(1e-9), spread: spread(all), runs: all.len() as u32 }
}

/// From the end of each op to the start of the next.
fn gaps(spans: &[Span]) -> Vec<f64> {
    let mut times: Vec<(f64, f64)> = spans.iter().map(|s| (s.start.value(), s.end.value())).collect();
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    times.windows(2).map(|w| w[1].0 - w[0].1).filter(|gap| *gap > 0.0).collect()
}
