//! Points of one way, one after the other: what hangs on the structure of their plans alone is worked out once.
//!
//! Of every other point only the sizes are built. Its row is the one that its whole plan would have.

use super::case::{Case, Point};
use super::guard;
use crate::cost::{Frame, cost_on};
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::plan::link::AtomTable;
use crate::plan::memory::{Conflicts, Footprint};
use crate::report::Row;
use crate::spec::Parallelism;
use crate::strategy::{Engines, Sizes, sizes};
use crate::timeline::Timeline;
use std::sync::Arc;

/// What plans of one structure share.
struct Kept {
    par: Parallelism,
    structure: (u64, u64),
    conflicts: Arc<Conflicts>,
    /// None until one of them is costed, or if all of them have to be walked.
    frame: Option<Frame>,
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
        // How many rows a rank has, its route says and no size of a tensor.
        if point.par.pp > 1 || case.model.moe.is_some() {
            return case.row_of(&case.plan(point)?);
        }
        let Sizes { plan, structure } =
            sizes(&case.model, &work, &point.par, Engines::of(&case.stack, &case.cluster.spec))?;
        if guard::after(&plan).is_err() {
            // The whole plan has the words for it.
            return case.row_of(&case.plan(point)?);
        }
        let (at, built) = self.find(point, structure)?;
        let Ok(layout) = Footprint::of(&plan, &self.kept[at].conflicts) else {
            return case.row_of(&case.plan(point)?);
        };
        let mut row = Row::asked(&plan.about, &case.cluster, &case.stack);
        row.set_layout(&layout, &case.cluster, &case.stack);
        if row.feasible {
            row.set_time(&self.cost(at, point, &plan, built)?, plan.about.model_flops, case.peak().value());
        }
        Ok(row)
    }

    /// What is kept of a structure; the last one met stands last. With the whole plan, where it had to be built.
    fn find(&mut self, point: &Point, structure: (u64, u64)) -> Result<(usize, Option<Plan>)> {
        let same = |kept: &Kept| kept.structure == structure && kept.par == point.par;
        if let Some(at) = self.kept.iter().position(same) {
            return Ok((at, None));
        }
        let plan = self.case.plan(point)?;
        let conflicts = self.case.conflicts_of(&plan, &AtomTable::new(&plan)?)?;
        if self.kept.len() == MOST {
            self.kept.remove(0);
        }
        self.kept.push(Kept { par: point.par, structure, conflicts, frame: None });
        Ok((self.kept.len() - 1, Some(plan)))
    }

    /// `built`: the whole plan of the point, where there is one by now.
    fn cost(&mut self, at: usize, point: &Point, sizes: &Plan, built: Option<Plan>) -> Result<Timeline> {
        let (case, machine) = (self.case, self.case.machine());
        let kept = &mut self.kept[at];
        if let Some(frame) = &kept.frame {
            return match cost_on(frame, sizes, machine)? {
                Some(timeline) => Ok(timeline),
                None => case.cost(&case.plan(point)?),
            };
        }
        let plan = built.map_or_else(|| case.plan(point), Ok)?;
        if !Frame::fits(&plan, machine) {
            return case.cost(&plan);
        }
        let fold = crate::fold::refine(&plan, &case.cluster);
        let frame = Frame::new(&plan, &AtomTable::new(&plan)?, machine, fold)?;
        let frame = kept.frame.insert(frame);
        match cost_on(frame, sizes, machine)? {
            Some(timeline) => Ok(timeline),
            None => case.cost(&plan),
        }
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
