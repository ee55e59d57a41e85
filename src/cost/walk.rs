//! Walks a plan, segment by segment (a segment is a run of ops between calls), or op by op with all calls spliced.

use super::alike::Names;
use super::ranks::Ranks;
use super::repeat::{Course, Finds, can_stride};
use super::track::Track;
use super::{Effort, Found};
use crate::act::{Acts, Machine, Sheet, Tallies, seconds};
use crate::error::{Error, Result};
use crate::fold::Fold;
use crate::plan::link::{AtomTable, Atoms, Env, Line};
use crate::plan::matching::Matching;
use crate::plan::order::{self, Moment};
use crate::plan::segment::{self, Part, Segments};
use crate::plan::*;
use crate::timeline::Span;
use std::rc::Rc;

/// Walks a plan: one program segment by segment, several op by op. Errors: more than 200 lanes, a deadlock, those of
/// [`Acts::sheet`].
pub fn run(
    plan: &Plan,
    machine: Machine,
    fold: &Fold,
    effort: Effort,
    in_step: bool,
    atoms: &Rc<AtomTable>,
) -> Result<Found> {
    let walker = || Walker::new(plan, machine, fold, effort, in_step, atoms.clone());
    let mut forgetful = walker()?;
    forgetful.ranks = forgetful.ranks.forgetting();
    match forgetful.run()? {
        Some(found) => Ok(found),
        None => Ok(walker()?.run()?.expect("what is not forgotten is not missed")),
    }
}

/// A line made ready to be walked: what every class does on it, and in which order.
struct Compiled {
    sheet: Sheet,
    tracks: Vec<Track>,
    /// The order of starts and ends; `None` where ranks are in step.
    order: Option<Vec<Moment>>,
    width: usize,
}

pub struct Walker<'p> {
    pub plan: &'p Plan,
    pub effort: Effort,
    /// Whether every op meets only itself, so that all ranks go through their line side by side.
    in_step: bool,
    pub atoms: Rc<AtomTable>,
    pub ranks: Ranks,
    fold: &'p Fold,
    acts: Acts<'p>,
    segments: Segments<'p>,
    /// The segments by number; or the one set of lines of all programs.
    compiled: Vec<Rc<Compiled>>,
    /// How often each entry of `compiled` ran: its tallies are multiplied by that at the end.
    pub runs: Vec<u64>,
    pub names: Names,
    spare: Vec<Finds>,
    spans: Vec<Vec<Span>>,
}

impl<'p> Walker<'p> {
    pub fn new(
        plan: &'p Plan,
        machine: Machine<'p>,
        fold: &'p Fold,
        effort: Effort,
        in_step: bool,
        atoms: Rc<AtomTable>,
    ) -> Result<Walker<'p>> {
        if plan.lanes.len() > 200 {
            return Err(Error::plan(format!("{} lanes; at most 200 are costed", plan.lanes.len())));
        }
        let segments = Segments::new(plan, &atoms);
        let ranks = Ranks::new(machine, fold, plan, atoms.count as usize);
        let classes = ranks.classes;
        Ok(Walker {
            plan,
            effort,
            in_step,
            atoms,
            ranks,
            fold,
            acts: if in_step { Acts::of_one_program(plan, machine, fold) } else { Acts::new(plan, machine, fold) },
            segments,
            compiled: vec![],
            runs: vec![],
            names: Names::default(),
            spare: vec![],
            spans: vec![vec![]; classes],
        })
    }

    /// Walks the plan; `None` if something was asked for that had been forgotten.
    fn run(mut self) -> Result<Option<Found>> {
        let plan = self.plan;
        if self.effort.stride && !self.effort.spans && self.in_step && segment::show_all(plan) {
            self.body(None, &plan.programs[0].ops, &Env::new())?;
        } else {
            self.whole()?;
        }
        let end = self.ranks.end();
        Ok((!self.ranks.missed).then(|| self.found(end)))
    }

    /// Runs ops of the program between two calls. Errors: those of [`Acts::sheet`].
    pub fn run_ops(&mut self, ops: &'p [Op]) -> Result<()> {
        self.segment(None, ops, &Env::new())
    }

    /// Walks every op of every rank, all calls spliced.
    fn whole(&mut self) -> Result<()> {
        let programs = 0..self.plan.programs.len() as u32;
        let lines = programs.map(|p| Line::program(self.plan, &self.atoms, p)).collect::<Result<Vec<Line>>>()?;
        let compiled = self.compile(&lines)?;
        self.evaluate(&compiled);
        if self.effort.spans {
            self.record(&lines);
        }
        self.compiled.push(Rc::new(compiled));
        self.runs.push(1);
        Ok(())
    }

    /// Walks a body: its segments and calls in turn. Errors: those of [`Acts::sheet`], a step longer than can be told.
    pub fn body(&mut self, block: Option<BlockId>, ops: &'p [Op], env: &Env) -> Result<()> {
        for part in segment::parts(ops) {
            match part {
                Part::Call { block, args, repeat, .. } => self.call(block, args, repeat, env)?,
                Part::Segment(ops) => self.segment(block, ops, env)?,
            }
        }
        Ok(())
    }

    /// Runs a block `repeat` times. Errors: those of [`body`](Walker::body).
    pub fn call(&mut self, block: BlockId, args: &[Arg], repeat: u32, env: &Env) -> Result<()> {
        let names = (self.effort.stride && can_stride(repeat, &self.plan.blocks[block as usize].ops))
            .then(|| self.names.of(self.plan, block));
        Calls { block, walker: self }.repeat(names, args, repeat, env)
    }

    fn segment(&mut self, block: Option<BlockId>, ops: &'p [Op], env: &Env) -> Result<()> {
        let number = self.segments.enter(&self.atoms, block, ops, env);
        let segment = self.segments.get(number);
        let lines = std::slice::from_ref(&segment.line);
        if number == self.compiled.len() {
            let compiled = self.compile(lines)?;
            self.compiled.push(Rc::new(compiled));
            self.runs.push(0);
        }
        self.evaluate(&self.compiled[number].clone());
        self.runs[number] += 1;
        Ok(())
    }

    fn compile(&mut self, lines: &[Line]) -> Result<Compiled> {
        let matching = Matching::new(self.plan, lines);
        let order = match self.in_step {
            true => None,
            false => {
                let ranks: Vec<u32> = (0..self.plan.ranks()).collect();
                Some(order::of_ranks(self.plan, lines, &matching, &ranks)?)
            }
        };
        let sheet = self.acts.sheet(lines, &matching)?;
        let width = lines.iter().map(|l| l.nodes.len()).max().unwrap_or(0);
        let tracks = lines.iter().map(|line| Track::of(self.plan, line)).collect();
        Ok(Compiled { sheet, tracks, order, width })
    }

    /// Runs compiled lines once: a segment's line, or one of each program.
    fn evaluate(&mut self, compiled: &Compiled) {
        let (ranks, sheet, now) = (&mut self.ranks, &compiled.sheet, &self.segments.now);
        let Some(order) = &compiled.order else { return ranks.run(sheet, &compiled.tracks[0], now) };
        ranks.enter(sheet, compiled.width);
        let track = |class: usize| &compiled.tracks[self.plan.program_of(class as u32) as usize];
        for m in order {
            let (class, node) = (m.rank as usize, m.node as usize);
            match m.end {
                false => ranks.start(sheet, track(class), now, node, class..class + 1),
                true => ranks.finish(sheet, track(class), node, class..class + 1),
            }
        }
        (0..ranks.classes).for_each(|class| ranks.leave(track(class), now, class..class + 1));
        ranks.issued(sheet);
    }

    fn record(&mut self, lines: &[Line]) {
        for class in 0..self.ranks.classes {
            let program = self.plan.program_of(self.fold.representatives[class]);
            let line = &lines[program as usize];
            for i in 0..line.nodes.len() {
                let cell = i * self.ranks.classes + class;
                let (start, end) = (seconds(self.ranks.starts[cell].ps()), seconds(self.ranks.ends[cell].ps()));
                self.spans[class].push(Span::of(line, i, start, end));
            }
        }
    }

    /// What the walk found, the step being over at `end`.
    pub fn found(self, end: u64) -> Found {
        let (lanes, kernels) = (&self.plan.lanes, self.acts.kernel_names());
        let mut sum = Tallies::new(kernels.len(), lanes.len(), self.ranks.classes);
        for (compiled, &runs) in self.compiled.iter().zip(&self.runs) {
            sum.add(&compiled.sheet.tallies, runs as f64);
        }
        let usage = |class: usize| {
            let mut usage = sum.usage(class, kernels, lanes);
            self.ranks.settle(class, end, lanes, &mut usage);
            usage
        };
        Found { end, usages: (0..self.ranks.classes).map(usage).collect(), spans: self.spans }
    }
}

/// A walker inside a call.
struct Calls<'w, 'p> {
    block: BlockId,
    walker: &'w mut Walker<'p>,
}

impl Course for Calls<'_, '_> {
    fn ranks(&self) -> &Ranks {
        &self.walker.ranks
    }

    fn ranks_mut(&mut self) -> &mut Ranks {
        &mut self.walker.ranks
    }

    fn runs(&mut self) -> &mut Vec<u64> {
        &mut self.walker.runs
    }

    fn spare(&mut self) -> &mut Vec<Finds> {
        &mut self.walker.spare
    }

    fn atoms(&self, tensor: TensorId, slot: u32) -> Atoms {
        self.walker.atoms.slot(tensor, slot)
    }

    fn once(&mut self, env: &Env) -> Result<()> {
        let plan = self.walker.plan;
        self.walker.body(Some(self.block), &plan.blocks[self.block as usize].ops, env)
    }
}
