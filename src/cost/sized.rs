//! Goes through a plan of some sizes on the frame of its structure.

use super::Found;
use super::frame::{AlikeAt, Frame, Step};
use super::ranks::Ranks;
use super::repeat::{Alike, Course, Finds, Name};
use crate::act::{Acts, Machine, Sheet, Tallies};
use crate::error::Result;
use crate::plan::link::{Atoms, Env, resolve};
use crate::plan::*;
use std::rc::Rc;

/// Costs `plan`, of which only sizes are looked at, on a frame of the same structure. None where names meet in
/// another way than in the plan that the frame is of.
pub fn run(frame: &Frame, plan: &Plan, machine: Machine) -> Result<Option<Found>> {
    let mut acts = Acts::resume(plan, machine, &frame.fold, frame.known.take());
    let classes = frame.fold.representatives.len();
    let (mut sheets, mut tallies) = (Vec::with_capacity(frame.segments.len()), vec![]);
    for segment in &frame.segments {
        let mut tally = Tallies::new(frame.kernels.len(), plan.lanes.len(), classes);
        sheets.push(segment.form.fill(&mut acts, Frame::ops(plan, segment.body), &mut tally)?);
        tallies.push(tally);
    }
    frame.known.replace(acts.into_known());
    let slots = Slots::new(frame, plan);
    let mut sized = Sized {
        frame,
        plan,
        sheets,
        ranks: Ranks::new(machine, &frame.fold, plan.lanes.len(), slots.count as usize),
        slots,
        runs: vec![0; frame.segments.len()],
        now: vec![],
        firsts: vec![],
        spare: vec![],
        unlike: false,
    };
    sized.scene(frame.scenes.len() - 1, &vec![])?;
    if sized.unlike {
        return Ok(None);
    }
    Ok(Some(sized.found(&tallies)))
}

/// No more ways to bind the arguments of a call are kept.
const MOST_ALIKE: usize = 32;

/// Where the slots of each tensor are among all atoms.
struct Slots {
    base: Vec<u32>,
    count: u32,
}

impl Slots {
    fn new(frame: &Frame, plan: &Plan) -> Slots {
        let mut count = 0;
        let base = plan.tensors.iter().zip(&frame.per_slot).map(|(tensor, per_slot)| {
            let base = count;
            count += tensor.slots * per_slot;
            base
        });
        Slots { base: base.collect(), count }
    }
}

struct Sized<'f> {
    frame: &'f Frame,
    plan: &'f Plan,
    sheets: Vec<Sheet>,
    ranks: Ranks,
    slots: Slots,
    /// How often each segment ran.
    runs: Vec<u64>,
    /// What the atoms of the segment entered last are.
    now: Vec<u32>,
    /// Where the atoms of each of its names begin.
    firsts: Vec<u32>,
    spare: Vec<Finds>,
    /// Names have met in another way than at linking.
    unlike: bool,
}

impl Sized<'_> {
    fn scene(&mut self, scene: usize, env: &Env) -> Result<()> {
        let frame = self.frame;
        for part in &frame.scenes[scene].parts {
            match *part {
                Step::Segment(segment) => self.segment(segment, env),
                Step::Call { op, scene: inner } => {
                    let body = Frame::ops(self.plan, frame.scenes[scene].body);
                    let OpKind::Call { args, repeat, .. } = &body[op as usize].kind else {
                        unreachable!("plans of one structure have their calls in the same places")
                    };
                    let names = Some(frame.scenes[inner].names.clone());
                    Calls { at: (scene, op), scene: inner, sized: self }.repeat(names, args, *repeat, env)?;
                }
            }
        }
        Ok(())
    }

    fn segment(&mut self, number: usize, env: &Env) {
        let segment = &self.frame.segments[number];
        let first = |of: TensorRef| {
            let (tensor, slot) = resolve(of, env);
            self.slots.base[tensor as usize] + slot * self.frame.per_slot[tensor as usize]
        };
        if !segment.place(first, &mut self.firsts, &mut self.now) {
            self.unlike = true;
        }
        if !self.unlike {
            self.ranks.run(&self.sheets[number], &segment.track, &self.now);
            self.runs[number] += 1;
        }
    }

    fn found(self, tallies: &[Tallies]) -> Found {
        let (frame, lanes, classes) = (self.frame, &self.plan.lanes, self.ranks.classes);
        let mut sum = Tallies::new(frame.kernels.len(), lanes.len(), classes);
        tallies.iter().zip(&self.runs).for_each(|(tally, &runs)| sum.add(tally, runs as f64));
        let end = self.ranks.end();
        let usage = |class: usize| {
            let mut usage = sum.usage(class, &frame.kernels, lanes);
            self.ranks.settle(class, end, lanes, &mut usage);
            usage
        };
        Found { end, usages: (0..classes).map(usage).collect(), spans: vec![vec![]; classes] }
    }
}

/// A plan in a call.
struct Calls<'s, 'f> {
    /// Scene of the caller, and op.
    at: (usize, u32),
    scene: usize,
    sized: &'s mut Sized<'f>,
}

impl Course for Calls<'_, '_> {
    fn ranks(&self) -> &Ranks {
        &self.sized.ranks
    }

    fn ranks_mut(&mut self) -> &mut Ranks {
        &mut self.sized.ranks
    }

    fn runs(&mut self) -> &mut Vec<u64> {
        &mut self.sized.runs
    }

    fn alike(&self, names: &[Name], args: &[Arg], repeat: u32, env: &Env) -> Option<Rc<Alike>> {
        let slots = &self.sized.slots;
        let begin = |arg: &Arg| {
            let (tensor, base) = resolve(arg.of(), env);
            slots.base[tensor as usize] + base * self.sized.frame.per_slot[tensor as usize]
        };
        // Only how many slots inputs have is not the same in all plans of a structure.
        let begins: Vec<u32> = [slots.count, repeat].into_iter().chain(args.iter().map(begin)).collect();
        let mut known = self.sized.frame.alike.borrow_mut();
        let known = known.entry(self.at).or_default();
        if let Some(found) = known.iter().rev().find(|found| found.begins == begins) {
            return found.alike.clone();
        }
        if known.len() == MOST_ALIKE {
            known.clear();
        }
        let alike = Alike::of_course(self, names, args, repeat, env);
        known.push(AlikeAt { begins, alike: alike.clone() });
        alike
    }

    fn spare(&mut self) -> &mut Vec<Finds> {
        &mut self.sized.spare
    }

    fn atoms(&self, tensor: TensorId, slot: u32) -> Atoms {
        let count = self.sized.frame.per_slot[tensor as usize];
        Atoms { first: self.sized.slots.base[tensor as usize] + slot * count, count }
    }

    fn once(&mut self, env: &Env) -> Result<()> {
        self.sized.scene(self.scene, env)
    }
}
