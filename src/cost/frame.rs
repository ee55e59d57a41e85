//! The part of a plan's cost that hangs on its structure alone, worked out once: classes, edges, who meets whom. Plans
//! that differ in lengths, widths and the number of microbatches share it, and each takes a fraction of the time.
//!
//! A body is linked once for each choice of tensors its formals are bound to (a *scene*). Which slots these are does
//! not matter, as long as the names of the ops mean the same atoms as at linking. That is checked every time; where it
//! does not hold, the plan is walked instead.

use super::alike::{Alike, Name, Names};
use super::repeat::can_stride;
use super::telling::Telling;
use super::track::Track;
use crate::act::{Acts, Form, Known, Machine};
use crate::error::Result;
use crate::fold::Fold;
use crate::plan::link::{AtomTable, Env, Line, Place, Touches, bind, resolve};
use crate::plan::matching::Matching;
use crate::plan::segment::{self, Part};
use crate::plan::structure::is_of_microbatches;
use crate::plan::*;
use rustc_hash::{FxHashMap, FxHashSet};
use std::cell::RefCell;
use std::rc::Rc;

/// The structure of a plan of one program, ready to be costed in any sizes.
pub struct Frame {
    pub fold: Fold,
    /// Callees before their callers, the program last.
    pub scenes: Vec<Scene>,
    pub segments: Vec<Segment>,
    /// Names of kernels, by number.
    pub kernels: Vec<&'static str>,
    /// Atoms of one slot, by tensor: 0 for a tensor because of which no op waits for another lane.
    pub per_slot: Vec<u32>,
    pub known: RefCell<Known>,
    /// How the iterations of a call are alike, by scene and op of the call: an entry for each choice of arguments.
    pub alike: RefCell<FxHashMap<(usize, u32), Vec<AlikeAt>>>,
}

/// How the iterations of a call are alike where the atoms of what its arguments bind begin at these numbers; `alike` is
/// `None` where slots meet in a way that changes from iteration to iteration.
pub struct AlikeAt {
    pub begins: Vec<u32>,
    pub alike: Option<Rc<Alike>>,
}

/// A body under bindings.
pub struct Scene {
    pub body: Option<BlockId>,
    pub parts: Vec<Step>,
    /// The slots that the body touches; `None` where no call repeats it often enough for a stride.
    pub names: Option<Rc<[Name]>>,
}

pub enum Step {
    Segment(usize),
    /// A call: the op of the body that it is, and the scene that it goes through.
    Call {
        op: u32,
        scene: usize,
    },
}

/// The ops between two calls.
pub struct Segment {
    pub body: Option<BlockId>,
    pub form: Form,
    /// The edges of the ops; atoms are numbers of `atoms` here.
    pub track: Track,
    /// Tensors and formals that the ops name, and the atoms of these that the track needs.
    names: Vec<TensorRef>,
    atoms: Vec<AtomAt>,
    apart: Vec<Apart>,
}

/// An atom, counted from the first one of the tensor, or of the slot that a formal is bound to.
#[derive(Debug, Clone, Copy)]
struct AtomAt {
    /// Number of the name that it belongs to.
    of: u32,
    behind: u32,
}

/// Two names of a segment that mean one tensor, and how far apart their first atoms were at linking: their atoms
/// overlap unless that is more than the atoms named of either.
struct Apart {
    of: [u32; 2],
    by: i64,
    named: [i64; 2],
}

impl Apart {
    /// Whether the two names mean the same atoms, or others, as they did at linking. `now`: how far apart their first
    /// atoms are.
    fn holds(&self, now: i64) -> bool {
        let clear = |by: i64| by >= self.named[0] || -by >= self.named[1];
        now == self.by || (clear(now) && clear(self.by))
    }
}

impl Segment {
    /// Writes to `now` which atom each number means under the bindings of the moment. False: names meet in another way
    /// than at linking. `first`: the first atom of a name. `firsts`: room for these, each worked out once.
    pub fn place(&self, first: impl Fn(TensorRef) -> u32, firsts: &mut Vec<u32>, now: &mut Vec<u32>) -> bool {
        firsts.clear();
        firsts.extend(self.names.iter().map(|&name| first(name)));
        now.clear();
        now.extend(self.atoms.iter().map(|atom| firsts[atom.of as usize] + atom.behind));
        let first = |name: u32| i64::from(firsts[name as usize]);
        self.apart.iter().all(|a| a.holds(first(a.of[1]) - first(a.of[0])))
    }
}

impl Frame {
    /// Whether a plan can be costed on a frame: one program, no routes, at most 200 lanes, ranks in step on devices of
    /// their own, no edges of `after` over calls.
    pub fn fits(plan: &Plan, machine: Machine) -> bool {
        plan.routes.is_empty()
            && machine.devices.is_none()
            && plan.lanes.len() <= 200
            && order::meets_itself(plan)
            && segment::show_all(plan)
    }

    /// The frame of a plan that [fits](Frame::fits), its ranks folded into the classes of `fold`. Errors: those of
    /// [`Acts::sheet`].
    pub fn new(plan: &Plan, atoms: &AtomTable, machine: Machine, fold: Fold) -> Result<Frame> {
        let telling = Telling::new(plan);
        let per_slot = |t: TensorId| if telling.tells(t) { atoms.per_slot(t) } else { 0 };
        let per_slot = (0..plan.tensors.len() as u32).map(per_slot).collect();
        let (known, alike) = Default::default();
        let (scenes, segments, kernels) = (vec![], vec![], vec![]);
        let mut frame = Frame { fold, scenes, segments, kernels, per_slot, known, alike };
        let fold = frame.fold.clone();
        let acts = Acts::resume(plan, machine, &fold, Known::default());
        let mut making = Making {
            plan,
            atoms,
            touches: Touches::new(atoms),
            telling,
            acts,
            names: Names::default(),
            made: FxHashMap::default(),
        };
        making.scene(&mut frame, None, &plan.programs[0].ops, &vec![])?;
        frame.kernels = making.acts.kernel_names().to_vec();
        frame.known = RefCell::new(making.acts.into_known());
        Ok(frame)
    }

    /// The ops of a scene's body in a plan; `None`: those of the program.
    pub fn ops(plan: &Plan, body: Option<BlockId>) -> &[Op] {
        body.map_or(&plan.programs[0].ops, |block| &plan.blocks[block as usize].ops)
    }
}

struct Making<'p> {
    plan: &'p Plan,
    atoms: &'p AtomTable,
    touches: Touches,
    telling: Telling,
    acts: Acts<'p>,
    names: Names,
    /// Number of the scene, by block and tensors bound.
    made: FxHashMap<(BlockId, Vec<TensorId>), usize>,
}

impl<'p> Making<'p> {
    fn scene(&mut self, frame: &mut Frame, body: Option<BlockId>, ops: &'p [Op], env: &Env) -> Result<usize> {
        let key = body.map(|block| (block, env.iter().map(|bound| bound.0).collect::<Vec<TensorId>>()));
        if let Some(known) = key.as_ref().and_then(|key| self.made.get(key)) {
            return Ok(*known);
        }
        let mut parts = vec![];
        for part in segment::parts(ops) {
            parts.push(match part {
                Part::Segment(ops) => {
                    let segment = self.segment(body, ops, env)?;
                    frame.segments.push(segment);
                    Step::Segment(frame.segments.len() - 1)
                }
                Part::Call { block, args, repeat, op } => {
                    let inner = &self.plan.blocks[block as usize].ops;
                    let bound = bind(args, env, 0);
                    let scene = self.scene(frame, Some(block), inner, &bound)?;
                    // Plans with more microbatches share the frame: at least three are assumed.
                    let most = if is_of_microbatches(&self.plan.feed.given(), args) { repeat.max(3) } else { repeat };
                    if can_stride(most, inner) && frame.scenes[scene].names.is_none() {
                        frame.scenes[scene].names = Some(self.names(block, inner, &bound));
                    }
                    Step::Call { op: op.id, scene }
                }
            });
        }
        frame.scenes.push(Scene { body, parts, names: None });
        let number = frame.scenes.len() - 1;
        self.made.extend(key.map(|key| (key, number)));
        Ok(number)
    }

    /// The slots of a body whose tensors make ops of one lane wait for another's, each with the lane of all ops that
    /// touch it.
    fn names(&mut self, block: BlockId, ops: &[Op], env: &Env) -> Rc<[Name]> {
        let (names, here) = (self.names.of(self.plan, block), Telling::of_body(self.plan, ops, env));
        let tensor = |name: &Name| resolve(name.of, env).0;
        let telling = names.iter().filter(|name| self.telling.tells(tensor(name)));
        telling.map(|name| Name { lane: here.lane(tensor(name)), ..*name }).collect()
    }

    fn segment(&mut self, body: Option<BlockId>, ops: &'p [Op], env: &Env) -> Result<Segment> {
        let line = Line::segment(self.plan, self.atoms, ops, env, &mut self.touches);
        let lines = std::slice::from_ref(&line);
        let sheet = self.acts.sheet(lines, &Matching::new(self.plan, lines))?;
        let (mut names, mut tensors) = (vec![], FxHashMap::default());
        let mut named: Vec<(u32, AtomAt)> = vec![];
        for place in line.places() {
            tensors.extend(place.atoms.iter().map(|atom| (atom, place.tensor)));
            if self.telling.tells(place.tensor) {
                named.extend(self.named(place, &mut names));
            }
        }
        let mut track = Track::of(self.plan, &line);
        self.telling.shorten(&mut track, &|atom| tensors[&atom]);
        let used: FxHashSet<u32> = track.atoms().collect();
        // One name of each atom is enough: `apart` sees that the other names go on to mean the same.
        let (mut atoms, mut numbers) = (vec![], FxHashMap::default());
        for (atom, at) in named.iter().filter(|(atom, _)| used.contains(atom)) {
            numbers.entry(*atom).or_insert_with(|| {
                atoms.push(*at);
                atoms.len() as u32 - 1
            });
        }
        track.renumber(&|atom| numbers[&atom]);
        let apart = self.apart(&names, named.iter().map(|(_, at)| *at), env);
        Ok(Segment { body, form: Form::new(&line, sheet, self.acts.kernel_names()), track, names, atoms, apart })
    }

    /// The atoms of a place, each counted from the first one of the name that the op has for it.
    fn named(&self, place: &Place, names: &mut Vec<TensorRef>) -> impl Iterator<Item = (u32, AtomAt)> + use<> {
        let slot = match place.named.of {
            TensorRef::Tensor(_) => 0,
            TensorRef::Formal(_) => place.slot - place.named.slot,
        };
        let of = names.iter().position(|name| *name == place.named.of).unwrap_or_else(|| {
            names.push(place.named.of);
            names.len() - 1
        });
        let first = self.atoms.slot(place.tensor, slot).first;
        place.atoms.iter().map(move |atom| (atom, AtomAt { of: of as u32, behind: atom - first }))
    }

    /// Every pair of names of the segment that mean one tensor.
    fn apart(&self, names: &[TensorRef], atoms: impl Iterator<Item = AtomAt>, env: &Env) -> Vec<Apart> {
        let mut named = vec![0; names.len()];
        for atom in atoms {
            let most: &mut i64 = &mut named[atom.of as usize];
            *most = (*most).max(i64::from(atom.behind) + 1);
        }
        let first = |name: usize| {
            let (tensor, slot) = resolve(names[name], env);
            i64::from(self.atoms.slot(tensor, slot).first)
        };
        let tensor = |name: usize| resolve(names[name], env).0;
        let mut all = vec![];
        for a in 0..names.len() {
            for b in (0..a).filter(|&b| tensor(b) == tensor(a)) {
                all.push(Apart { of: [a as u32, b as u32], by: first(b) - first(a), named: [named[a], named[b]] });
            }
        }
        all
    }
}
