//! Points of one way, one after the other: what hangs on the structure of their plans alone is worked out once.
//!
//! Of every other point only the sizes are built, and not even those where it differs from one before it in having more
//! microbatches. Its row is the one that its whole plan would have.

use super::{Case, Point};
use crate::collective::exchange::Aside;
use crate::cost::{Frame, Series, series_on};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::plan::link::AtomTable;
use crate::plan::memory::{Conflicts, Footprint};
use crate::plan::print::Prints;
use crate::report::Row;
use crate::spec::{Parallelism, Workload};
use crate::strategy::{Engines, Sizes, guard, sizes};
use crate::timeline::Timeline;
use std::rc::Rc;
use std::sync::Arc;

/// What plans of one structure share.
struct Kept {
    par: Parallelism,
    prints: Prints,
    conflicts: Arc<Conflicts>,
    /// None until one of them is costed, or if all of them have to be walked.
    frame: Option<Rc<Frame>>,
    /// The point costed last that others with more microbatches can follow.
    fewer: Option<Fewer>,
}

/// A point that is followed by those that differ from it in having more microbatches, and nothing else.
struct Fewer {
    seq_len: u64,
    micro_batch: u64,
    /// Microbatches that are alike: of the point itself, and of the sizes by now.
    alike: u32,
    now: u32,
    sizes: Sizes,
    footprint: Footprint,
    /// None if it does not fit into memory.
    series: Option<Series>,
}

/// The structures met last.
pub struct Frames<'c> {
    case: &'c Case,
    kept: Vec<Kept>,
}

/// One way in several structures is rare: few microbatches, odd lengths.
const MOST: usize = 8;

impl<'c> Frames<'c> {
    pub fn new(case: &'c Case) -> Frames<'c> {
        Frames { case, kept: vec![] }
    }

    /// The row of a point. Only what is wrong with the machine or the program is an error.
    pub fn row(&mut self, point: &Point) -> Result<Row> {
        match self.try_row(point) {
            Err(Error::Infeasible(why)) => Ok(self.case.infeasible(point, why)),
            other => other,
        }
    }

    fn try_row(&mut self, point: &Point) -> Result<Row> {
        let case = self.case;
        let work = case.workload(point)?;
        // How many rows a rank has, its route says and no size of a tensor; which tensors a framework keeps, no size does.
        if point.par.pp > 1 || case.model.moe.is_some() || case.stack.kept.is_some() {
            return case.row_of(&case.plan(point)?);
        }
        if let Some(row) = self.follow(point, &work) {
            return Ok(row);
        }
        let sizes = sizes(&case.model, &work, &point.par, Engines::of(&case.stack, &case.cluster.spec))?;
        if guard::after(&sizes.plan).is_err() {
            // The whole plan has the words for it.
            return case.row_of(&case.plan(point)?);
        }
        let (at, built) = self.find(point, sizes.prints)?;
        let Ok(footprint) = Footprint::of(&sizes.plan, &self.kept[at].conflicts) else {
            return case.row_of(&case.plan(point)?);
        };
        let mut row = Row::asked(&sizes.plan.about, &case.cluster, &case.stack);
        row.set_layout(&footprint, &case.place(&Ok(Aside::default())));
        let mut series = None;
        if row.feasible {
            let timeline = match self.series(at, point, &sizes.plan, built)? {
                Costed::Series(found) => self.kept[at].timeline(series.insert(found), &sizes.plan, 0),
                Costed::Walked(timeline) => timeline,
            };
            row.set_time(&timeline, sizes.plan.about.model_flops, case.peak().value());
        }
        self.kept[at].lead(point, sizes, footprint, series, row.feasible);
        Ok(row)
    }

    /// The row of a point that only has more microbatches than one before it.
    fn follow(&mut self, point: &Point, work: &Workload) -> Option<Row> {
        let case = self.case;
        let microbatches = u32::try_from(work.global_batch / (u64::from(point.par.dp) * work.micro_batch)).ok()?;
        let leads = |kept: &Kept| {
            let same = |fewer: &Fewer| (fewer.seq_len, fewer.micro_batch) == (point.seq_len, point.micro_batch);
            kept.par == point.par && kept.fewer.as_ref().is_some_and(|f| same(f) && f.now < microbatches)
        };
        let at = self.kept.iter().position(leads)?;
        let kept = &mut self.kept[at];
        let fewer = kept.fewer.as_mut().expect("one that leads");
        // The last is not one of those that are alike.
        let (before, more) = (fewer.now, microbatches - 1 - fewer.now);
        fewer.sizes.lengthen(&case.model, work, more);
        fewer.now = before + more;
        let plan = &fewer.sizes.plan;
        if !guard::has_room_for_more(plan) {
            kept.fewer = None;
            return None;
        }
        let more = fewer.now - fewer.alike;
        let Some(footprint) = fewer.footprint.with_inputs(plan, &kept.conflicts, u64::from(more)) else {
            kept.fewer = None;
            return None;
        };
        let mut row = Row::asked(&plan.about, &case.cluster, &case.stack);
        row.set_layout(&footprint, &case.place(&Ok(Aside::default())));
        if row.feasible {
            let (frame, series) = (kept.frame.as_ref()?, fewer.series.as_ref()?);
            row.set_time(&series.timeline(frame, plan, u64::from(more)), plan.about.model_flops, case.peak().value());
        }
        Some(row)
    }

    /// What is kept of a structure; the last one met stands last. With the whole plan, where it had to be built.
    fn find(&mut self, point: &Point, prints: Prints) -> Result<(usize, Option<Plan>)> {
        let of_way = |kept: &&Kept| kept.par == point.par;
        let same = |kept: &Kept| kept.prints.whole == prints.whole && of_way(&kept);
        if let Some(at) = self.kept.iter().position(same) {
            return Ok((at, None));
        }
        let microbatches = point.global_batch / (u64::from(point.par.dp) * point.micro_batch).max(1);
        let counted = |kept: &&Kept| {
            let enough = kept.conflicts.of_microbatches_from.is_some_and(|least| microbatches >= least);
            enough && kept.prints.rest == prints.rest
        };
        let known = self.kept.iter().filter(of_way).find(counted).map(|kept| kept.conflicts.clone());
        let (conflicts, plan) = match known {
            Some(known) => (known, None),
            None => {
                let plan = self.case.plan(point)?;
                (self.case.conflicts_of(&plan, &AtomTable::new(&plan)?)?, Some(plan))
            }
        };
        // How often it goes through microbatches is nothing to a frame.
        let loops = |kept: &&Kept| kept.prints.uncounted == prints.uncounted;
        let frame = self.kept.iter().filter(of_way).filter(loops).find_map(|kept| kept.frame.clone());
        if self.kept.len() == MOST {
            self.kept.remove(0);
        }
        self.kept.push(Kept { par: point.par, prints, conflicts, frame, fewer: None });
        Ok((self.kept.len() - 1, plan))
    }

    /// `built`: the whole plan of the point, where there is one by now.
    fn series(&mut self, at: usize, point: &Point, sizes: &Plan, built: Option<Plan>) -> Result<Costed> {
        let (case, machine) = (self.case, self.case.machine());
        let kept = &mut self.kept[at];
        let walked = |plan: &Plan| Ok(Costed::Walked(case.cost(plan)?));
        if let Some(frame) = &kept.frame {
            return match series_on(frame, sizes, machine)? {
                Some(series) => Ok(Costed::Series(series)),
                None => walked(&case.plan(point)?),
            };
        }
        let plan = built.map_or_else(|| case.plan(point), Ok)?;
        if !Frame::fits(&plan, machine) {
            return walked(&plan);
        }
        let fold = crate::fold::refine(&plan, &case.cluster);
        let frame = Frame::new(&plan, &AtomTable::new(&plan)?, machine, fold)?;
        match series_on(kept.frame.insert(Rc::new(frame)), sizes, machine)? {
            Some(series) => Ok(Costed::Series(series)),
            None => walked(&plan),
        }
    }
}

/// A plan costed on a frame, or op by op.
enum Costed {
    Series(Series),
    Walked(Timeline),
}

impl Kept {
    fn timeline(&self, series: &Series, plan: &Plan, more: u64) -> Timeline {
        series.timeline(self.frame.as_ref().expect("it was costed on one"), plan, more)
    }

    /// Lets points with more microbatches follow one that has been costed, if they can.
    fn lead(&mut self, point: &Point, mut sizes: Sizes, footprint: Footprint, series: Option<Series>, feasible: bool) {
        let alike = sizes.alike().filter(|alike| *alike > 2 && footprint.host_bytes == 0);
        let series = series.filter(Series::goes_on);
        let Some(alike) = alike.filter(|_| series.is_some() || !feasible) else { return };
        let Point { seq_len, micro_batch, .. } = *point;
        self.fewer = Some(Fewer { seq_len, micro_batch, alike, now: alike, sizes, footprint, series });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{LlmSpec, Recompute};
    use crate::sweep::Grid;

    /// Points of every way of the default study, and of options that it leaves out.
    fn points() -> Vec<Point> {
        let plain = Grid::default_ways(16).into_iter().map(|[u, r]| (u, r, 1, "default"));
        let named = [(1, 4, 2, "contiguous"), (2, 4, 1, "burst+kv-in-two"), (1, 4, 1, "merge-in-kernel+one-comm")];
        let also = Grid::default_also(16).into_iter().map(|a| (a.ulysses, a.ring, a.tp, a.options));
        let named = named.map(|(u, r, t, words)| (u, r, t, words.parse().unwrap()));
        let plain = plain.map(|(u, r, t, words)| (u, r, t, words.parse().unwrap()));
        let mut all = vec![];
        for (i, (ulysses, ring, tp, options)) in plain.chain(also).chain(named).enumerate() {
            let recompute = [Recompute::None, Recompute::Full][i % 2];
            let (dp, zero) = (16 / (ulysses * ring * tp), i as u32 % 4);
            let par = Parallelism { dp, ring, ulysses, tp, zero, recompute, options, ..Parallelism::default() };
            for (seq_len, batches, micro_batch) in [(8192, 1, 1), (8192, 2, 2), (16384, 5, 1), (65536, 9, 1)] {
                let global_batch = u64::from(dp) * micro_batch * batches;
                all.push(Point { seq_len, global_batch, micro_batch, par });
            }
        }
        all
    }

    #[test]
    fn rows_with_more_microbatches_are_those_of_whole_plans() {
        let model = LlmSpec { layers: 3, vocab: 32_000, ..LlmSpec::find("llama-3-8b").unwrap() };
        let case = Case::new(model, "dgx-h100", "nccl-fa3", 16, None).unwrap();
        let (mut frames, mut followed, mut feasible) = (Frames::new(&case), 0, 0);
        let mut all: Vec<Point> = points().into_iter().filter(|p| p.global_batch == u64::from(p.par.dp)).collect();
        // What waits for the CPU, and what hardly ends before it has issued the next.
        all.extend(all.clone().into_iter().map(|point| Point { seq_len: 1024, ..point }));
        for point in all {
            // Fewer again too; and so many that inputs alone take room.
            for batches in [4, 5, 9, 12, 7, 64, 1000] {
                let point = Point { global_batch: u64::from(point.par.dp) * batches, ..point };
                let work = case.workload(&point);
                followed += usize::from(work.is_ok_and(|work| frames.follow(&point, &work).is_some()));
                let row = frames.row(&point).unwrap();
                let whole = match case.plan(&point).and_then(|plan| case.row_of(&plan)) {
                    Err(Error::Infeasible(why)) => case.infeasible(&point, why),
                    other => other.unwrap(),
                };
                assert_eq!(row, whole, "{point:?}");
                feasible += usize::from(row.feasible);
            }
        }
        assert!(followed > feasible / 2 && feasible > 200, "{followed} of {feasible}");
    }

    /// One structure but for the calls that scores take: six heads of one sequence go around the fused softmax.
    #[test]
    fn calls_of_the_framework_are_part_of_the_structure() {
        let model = LlmSpec { layers: 3, heads: 6, kv_heads: 6, head_dim: 64, ..LlmSpec::find("gpt3-175b").unwrap() };
        let case = Case::new(LlmSpec { hidden: 384, ..model }, "dgx-a100", "nccl-unfused", 1, None).unwrap();
        let par = Parallelism { options: "unfused".parse().unwrap(), ..Parallelism::default() };
        let mut frames = Frames::new(&case);
        let rows = [2, 1, 2, 3].map(|micro_batch| {
            let point = Point { seq_len: 512, global_batch: 6 * micro_batch, micro_batch, par };
            let (row, whole) = (frames.row(&point).unwrap(), case.row_of(&case.plan(&point).unwrap()).unwrap());
            assert!(row.feasible && row == whole, "{row:?} {whole:?}");
            row.step_time_s.unwrap()
        });
        assert!(rows[1] > rows[0] && rows[3] > rows[0], "{rows:?}");
    }

    #[test]
    fn rows_are_those_of_whole_plans() {
        let model = LlmSpec { layers: 5, vocab: 32_000, ..LlmSpec::find("llama-3-8b").unwrap() };
        let case = Case::new(model, "dgx-h100", "nccl-fa3", 16, None).unwrap();
        let mut frames = Frames::new(&case);
        let mut feasible = 0;
        for point in points() {
            let whole = match case.plan(&point).and_then(|plan| case.row_of(&plan)) {
                Err(Error::Infeasible(why)) => case.infeasible(&point, why),
                other => other.unwrap(),
            };
            assert_eq!(frames.row(&point).unwrap(), whole, "{point:?}");
            feasible += usize::from(whole.feasible);
        }
        assert!(feasible > 80, "{feasible}");
    }
}
