//! Segments: the runs of ops between the calls of a body, linked once and met again under other bindings.
//!
//! Walking a plan segment by segment sees every op with its edges, as a spliced [`Line`] has them, without
//! ever holding the spliced whole. Only an `after` that reaches over a call is not seen.

use super::link::{AtomTable, Atoms, Line, Place, Touches, resolve};
use super::op::*;
use super::program::Plan;
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// Atoms in a row, as an op names them: to be resolved under the bindings of the moment.
#[derive(Debug, Clone, Copy)]
struct Named {
    of: TensorRef,
    slot: u32,
    /// The first atom named, counted from the slot's first one; and how many are named.
    behind: u32,
    count: u32,
    /// The first atom named, at linking.
    then: u32,
}

/// A segment linked under some bindings.
#[derive(Debug)]
pub struct Segment<'p> {
    pub line: Line<'p>,
    /// The names that its ops have for its places, a name for each.
    names: Vec<Named>,
}

/// Names a segment: the block it stands in (`None`: the program), its first op, the tensors bound to the block's
/// formals.
type Key = (Option<BlockId>, u32, Vec<TensorId>);

/// Every segment met so far.
pub struct Segments<'p> {
    plan: &'p Plan,
    touches: Touches,
    all: Vec<Rc<Segment<'p>>>,
    known: FxHashMap<Key, usize>,
    /// The atom of now that takes the place of each atom of linking, for the segment entered last.
    pub now: Vec<u32>,
    /// Counts of bindings: in which one each atom of linking was given a meaning last, and in which one each atom was
    /// taken as such a meaning last. So nothing is cleared from binding to binding.
    bound: Vec<u32>,
    taken: Vec<u32>,
    binding: u32,
}

/// A part of a body.
pub enum Part<'p> {
    Call { block: BlockId, args: &'p [Arg], repeat: u32, op: &'p Op },
    Segment(&'p [Op]),
}

/// The segments and calls of a body in turn.
pub fn parts(ops: &[Op]) -> impl Iterator<Item = Part<'_>> {
    let together = |a: &Op, b: &Op| !is_call(a) && !is_call(b);
    ops.chunk_by(together).map(|part| match &part[0].kind {
        OpKind::Call { block, args, repeat } => Part::Call { block: *block, args, repeat: *repeat, op: &part[0] },
        _ => Part::Segment(part),
    })
}

fn is_call(op: &Op) -> bool {
    matches!(op.kind, OpKind::Call { .. })
}

/// Whether segments show every edge: no `after` reaches over a call.
pub fn show_all(plan: &Plan) -> bool {
    let within = |part: Part| match part {
        Part::Segment(ops) => ops.iter().flat_map(|op| &op.after).all(|&after| after >= ops[0].id),
        Part::Call { .. } => true,
    };
    let bodies = plan.programs.iter().map(|p| &p.ops).chain(plan.blocks.iter().map(|b| &b.ops));
    bodies.flat_map(|ops| parts(ops)).all(within)
}

impl<'p> Segments<'p> {
    pub fn new(plan: &'p Plan, atoms: &AtomTable) -> Segments<'p> {
        let count = atoms.count;
        let untouched = vec![0; count as usize];
        let (bound, taken) = (untouched.clone(), untouched);
        Segments {
            plan,
            touches: Touches::new(atoms),
            all: vec![],
            known: FxHashMap::default(),
            now: (0..count).collect(),
            bound,
            taken,
            binding: 0,
        }
    }

    pub fn get(&self, segment: usize) -> Rc<Segment<'p>> {
        self.all[segment].clone()
    }

    /// Comes to the segment `ops` of a body under `env`; returns its number. It is linked now unless it was before.
    pub fn enter(
        &mut self,
        atoms: &AtomTable,
        block: Option<BlockId>,
        ops: &'p [Op],
        env: &[(TensorId, u32)],
    ) -> usize {
        let key = (block, ops[0].id, env.iter().map(|bound| bound.0).collect::<Vec<TensorId>>());
        if let Some(&known) = self.known.get(&key) {
            let segment = self.get(known);
            if self.rebind(atoms, &segment.names, env) {
                return known;
            }
        }
        let line = Line::segment(self.plan, atoms, ops, env, &mut self.touches);
        let names = names(&line, atoms);
        let fits = self.rebind(atoms, &names, env);
        debug_assert!(fits, "a segment fits the bindings it was linked under");
        self.all.push(Rc::new(Segment { line, names }));
        self.known.insert(key, self.all.len() - 1);
        self.all.len() - 1
    }

    /// Finds the atoms of now for a segment; false if buffers alias in another way than at linking.
    fn rebind(&mut self, atoms: &AtomTable, names: &[Named], env: &[(TensorId, u32)]) -> bool {
        self.binding += 1;
        let is_new = |bindings: &mut u32, now: u32| std::mem::replace(bindings, now) != now;
        for name in names {
            let (tensor, base) = resolve(name.of, env);
            let first = atoms.slot(tensor, base + name.slot).first + name.behind;
            for (then, atom) in (name.then as usize..).zip(first..first + name.count) {
                if !is_new(&mut self.bound[then], self.binding) {
                    // Another name has the atom, too.
                    if self.now[then] != atom {
                        return false;
                    }
                    continue;
                }
                self.now[then] = atom;
                if !is_new(&mut self.taken[atom as usize], self.binding) {
                    return false;
                }
            }
        }
        true
    }
}

/// The names that the ops of a line have for each of its places.
fn names(line: &Line, atoms: &AtomTable) -> Vec<Named> {
    let name = |place: &Place| {
        let (Buf { of, slot, .. }, Atoms { first: then, count }) = (place.named, place.atoms);
        Named { of, slot, behind: then - atoms.slot(place.tensor, place.slot).first, count, then }
    };
    line.places().iter().map(name).collect()
}
