//! Goes through a plan of some sizes on the frame of its structure.

use super::alike::{Alike, Name};
use super::frame::{AlikeAt, Frame, Step};
use super::ranks::Ranks;
use super::repeat::{Course, Finds, Pace};
use super::series::{Series, Standing};
use crate::act::stamp::in_time;
use crate::act::{Acts, Machine, Sheet, Tallies};
use crate::error::Result;
use crate::plan::link::{Atoms, Env, resolve};
use crate::plan::*;
use std::rc::Rc;

/// Costs `plan`, of which only sizes are looked at, on a frame of the same structure. `None`: names meet in another way
/// than in the plan that the frame is of. Errors: those of [`Acts::sheet`], a step longer than can be told.
pub fn run(frame: &Frame, plan: &Plan, machine: Machine) -> Result<Option<Series>> {
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
    let atoms = slots.count as usize;
    let ranks = || Ranks::new(machine, &frame.fold, plan, atoms);
    let mut sized = Sized {
        frame,
        plan,
        sheets,
        ranks: ranks().forgetting(),
        slots,
        runs: vec![0; frame.segments.len()],
        now: vec![],
        firsts: vec![],
        spare: vec![],
        unlike: false,
        inputs: plan.feed.given(),
        pace: None,
        last: false,
    };
    sized.walk()?;
    if sized.ranks.missed {
        sized.again(ranks());
        sized.walk()?;
    }
    if sized.unlike {
        return Ok(None);
    }
    let series = sized.series(tallies);
    in_time(series.whole.end)?;
    Ok(Some(series))
}

/// Choices of a call's arguments that are kept; where there are more, all are forgotten.
const MOST_ALIKE: usize = 32;

/// Where the atoms of each tensor's slot 0 begin among all atoms.
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
    /// The atom that each number means in the segment entered last.
    now: Vec<u32>,
    /// Where the atoms of each name of that segment begin.
    firsts: Vec<u32>,
    spare: Vec<Finds>,
    /// Whether names have met in another way than at linking.
    unlike: bool,
    inputs: Vec<TensorId>,
    /// What every microbatch adds in the program's call of them, once they are alike; `None` until then.
    pace: Option<Pace>,
    /// Whether that call is over: from there on the ranks' earliest start, and whether the CPU led, are of what follows
    /// it.
    last: bool,
}

impl Sized<'_> {
    /// Goes through the whole program.
    fn walk(&mut self) -> Result<()> {
        self.scene(self.frame.scenes.len() - 1, &vec![])
    }

    /// Goes back to where nothing has happened yet.
    fn again(&mut self, ranks: Ranks) {
        (self.ranks, self.unlike, self.pace, self.last) = (ranks, false, None, false);
        self.runs.fill(0);
    }

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
                    let names = frame.scenes[inner].names.clone();
                    Calls { at: (scene, op), scene: inner, sized: self }.repeat(names, args, *repeat, env)?;
                    if self.pace.is_some() && !std::mem::replace(&mut self.last, true) {
                        (self.ranks.floor, self.ranks.host_led) = (u64::MAX, false);
                    }
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

    /// Whether op `op` of a scene is the program's call of the microbatches that are all alike.
    fn is_of_microbatches(&self, (scene, op): (usize, u32)) -> bool {
        if scene + 1 != self.frame.scenes.len() {
            return false;
        }
        match &Frame::ops(self.plan, None)[op as usize].kind {
            OpKind::Call { args, .. } => {
                args.iter().any(|arg| matches!(arg.of(), TensorRef::Tensor(t) if self.inputs.contains(&t)))
            }
            _ => false,
        }
    }

    /// Whether a step with more microbatches only has everything behind them later by as much. Nothing behind them may
    /// have found a time from before the floor, which the stride left where it was; and where the CPU does not fall
    /// behind with the device, no op behind them may have waited for it.
    fn goes_on(&self, pace: &Pace) -> bool {
        let waits = || self.frame.segments.iter().any(|segment| segment.track.any_wait);
        self.ranks.floor >= pace.floor && (pace.host_keeps_pace || !self.ranks.host_led && !waits())
    }

    fn series(mut self, tallies: Vec<Tallies>) -> Series {
        let (classes, end) = (self.ranks.classes, self.ranks.end());
        let pace = self.pace.take().filter(|pace| self.goes_on(pace));
        let each = pace.map(|pace| Standing {
            end: pace.d,
            waited: pace.waited.chunks(pace.waited.len() / classes).map(<[u64]>::to_vec).collect(),
            runs: pace.runs,
        });
        let waited = (0..classes).map(|class| self.ranks.waits(class, end)).collect();
        Series { tallies, whole: Standing { end, waited, runs: self.runs }, each }
    }
}

/// A walk on a frame inside a call.
struct Calls<'s, 'f> {
    /// The scene of the caller, and the op of the call there.
    at: (usize, u32),
    scene: usize,
    sized: &'s mut Sized<'f>,
}

impl Calls<'_, '_> {
    /// Where the atoms begin that each argument binds.
    fn begins(&self, args: &[Arg], env: &Env) -> impl Iterator<Item = u32> {
        args.iter().map(|arg| {
            let (tensor, base) = resolve(arg.of(), env);
            self.sized.slots.base[tensor as usize] + base * self.sized.frame.per_slot[tensor as usize]
        })
    }
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
        // Where no argument walks, the iterations are alike however many there are.
        let named = |f: usize| names.iter().any(|name| name.of == TensorRef::Formal(f as u32));
        let walks = args.iter().enumerate().any(|(f, arg)| arg.period() > 1 && named(f));
        let head = [self.sized.slots.count, if walks { repeat } else { 0 }];
        let begins: Vec<u32> = head.into_iter().chain(self.begins(args, env)).collect();
        let mut known = self.sized.frame.alike.borrow_mut();
        let known = known.entry(self.at).or_default();
        if let Some(found) = known.iter().rev().find(|found| found.begins == begins) {
            return found.alike.clone();
        }
        if known.len() == MOST_ALIKE {
            known.clear();
        }
        let alike = self.compared(names, args, repeat, env);
        known.push(AlikeAt { begins, alike: alike.clone() });
        alike
    }

    fn strides(&mut self, before: &Finds, d: u64) {
        if self.sized.is_of_microbatches(self.at) {
            self.sized.pace = Some(before.pace(&self.sized.ranks, &self.sized.runs, d));
        }
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
