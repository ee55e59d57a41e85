//! What a plan means, once for all interpreters: calls spliced, buffers resolved, edges derived.
//!
//! * **Splicing.** A call's ops join the caller's lanes; formals become real slots. A spliced op is named
//!   by its path, `call[iteration]/../op`, and timelines are joined on `(rank, path)`.
//! * **Edges.** An op waits for the last op of its lane, for the last writer of what it reads, and for the
//!   last writer and all readers since of what it writes. An exchange that leaves kernels no SM takes its
//!   turn on their lane, too ([`Turn`]). Edges come from the *actual* buffers after
//!   splicing, since aliasing shows only there. Ops of one lane end in their order, so that of those an op
//!   waits for only the last of each lane is kept: the others are implied.
//! * **Rows.** Every tensor's rows are cut at every boundary that any op names. An uncut piece of a slot is
//!   an *atom*: two ranges overlap when they share an atom.
//! * **Legs.** Per lane and ordered pair of ranks the k-th send meets the k-th receive
//!   ([`matching`](super::matching)). A slot that is written again waits for its local readers only,
//!   which is enough across ranks too: a send ends on delivery.

mod tracker;

use super::kernel::Kernel;
use super::op::*;
use super::program::Plan;
use super::route::Turn;
use crate::error::{Error, Result};
use std::collections::BTreeSet;
pub use tracker::Touches;
use tracker::{NONE, Tracker, Waits};

/// The most ops that are ever spliced: a plan with more is refused before it takes all memory.
pub const MOST_OPS: usize = 30_000_000;

/// The bindings of a body's formals: for each the tensor, and the slot that slot 0 of the formal means.
pub type Env = Vec<(TensorId, u32)>;

/// The lane of kernels.
const KERNELS: usize = 0;

/// A run of atoms, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Atoms {
    pub first: u32,
    pub count: u32,
}

impl Atoms {
    pub fn iter(self) -> impl Iterator<Item = u32> {
        self.first..self.first + self.count
    }
}

/// A buffer whose formal was resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub tensor: TensorId,
    pub slot: u32,
    pub rows: [u64; 2],
    pub atoms: Atoms,
    /// The buffer as the op names it, to be resolved again under other bindings.
    pub named: Buf,
}

impl Place {
    pub fn dtype(&self, plan: &Plan) -> Dtype {
        plan.tensors[self.tensor as usize].dtype
    }

    pub fn elems(&self, plan: &Plan) -> u64 {
        plan.tensors[self.tensor as usize].elems_of(Some(self.rows))
    }

    pub fn bytes(&self, plan: &Plan) -> u64 {
        self.elems(plan) * self.dtype(plan).size()
    }

    /// Its tensor, and how many elements of it.
    pub fn sized(&self, plan: &Plan) -> (TensorId, u64) {
        (self.tensor, self.elems(plan))
    }
}

/// Where the atoms of each tensor begin, and how its rows are cut.
#[derive(Debug, Clone)]
pub struct AtomTable {
    base: Vec<u32>,
    /// Rows at which each tensor is cut, ascending, from 0 to its number of rows.
    cuts: Vec<Vec<u64>>,
    pub count: u32,
}

impl AtomTable {
    /// The table of a plan's atoms. Errors: a buffer that names rows that its tensor does not have; more than
    /// [`MOST_OPS`] atoms.
    pub fn new(plan: &Plan) -> Result<AtomTable> {
        let mut cuts: Vec<Vec<u64>> = plan.tensors.iter().map(|t| vec![0, t.rows()]).collect();
        let mut seen = BTreeSet::new();
        for program in &plan.programs {
            collect_cuts(plan, &program.ops, &[], &mut cuts, &mut seen)?;
        }
        // A kernel may take several weights as one operand, as a norm's weight and its bias.
        for param in &plan.params {
            let tensor = param.weight as usize;
            if plan.tensors.get(tensor).is_some_and(|t| param.rows[1] <= t.rows()) {
                cuts[tensor].extend(param.rows);
            }
        }
        for cuts in cuts.iter_mut().filter(|cuts| cuts.len() > 2 || cuts[1] == 0) {
            cuts.sort_unstable();
            cuts.dedup();
        }
        let mut base = Vec::with_capacity(cuts.len());
        let mut count: u64 = 0;
        for (cuts, tensor) in cuts.iter().zip(&plan.tensors) {
            base.push(count as u32);
            count += (cuts.len() as u64 - 1) * u64::from(tensor.slots);
            if count > MOST_OPS as u64 {
                return Err(Error::plan(format!(
                    "tensor {:?} brings the buffers to more than {MOST_OPS}",
                    tensor.name
                )));
            }
        }
        Ok(AtomTable { base, cuts, count: count as u32 })
    }

    /// Where the rows of a tensor are cut, from 0 to their number.
    pub fn cuts(&self, tensor: TensorId) -> &[u64] {
        &self.cuts[tensor as usize]
    }

    /// Atoms of each slot of a tensor.
    pub fn per_slot(&self, tensor: TensorId) -> u32 {
        self.cuts[tensor as usize].len() as u32 - 1
    }

    pub fn slot(&self, tensor: TensorId, slot: u32) -> Atoms {
        let count = self.per_slot(tensor);
        Atoms { first: self.base[tensor as usize] + slot * count, count }
    }

    fn range(&self, tensor: TensorId, slot: u32, rows: [u64; 2]) -> Atoms {
        let cuts = &self.cuts[tensor as usize];
        let at = |row| cuts.binary_search(&row).expect("every named row is a cut") as u32;
        let (from, to) = (at(rows[0]), at(rows[1]));
        Atoms { first: self.slot(tensor, slot).first + from, count: to - from }
    }

    /// Resolves a buffer under the bindings `env`.
    pub fn place(&self, plan: &Plan, buf: Buf, env: &[(TensorId, u32)]) -> Place {
        let (tensor, base) = resolve(buf.of, env);
        let slot = base + buf.slot;
        let (rows, atoms) = match buf.rows {
            Some(rows) => (rows, self.range(tensor, slot, rows)),
            None => ([0, plan.tensors[tensor as usize].rows()], self.slot(tensor, slot)),
        };
        Place { tensor, slot, rows, atoms, named: buf }
    }
}

/// The tensor that a name means under the bindings `env`, and the slot that its slot 0 means.
pub fn resolve(of: TensorRef, env: &[(TensorId, u32)]) -> (TensorId, u32) {
    match of {
        TensorRef::Tensor(id) => (id, 0),
        TensorRef::Formal(i) => env[i as usize],
    }
}

/// Notes every row boundary, going into calls once for each combination of tensors bound.
fn collect_cuts(
    plan: &Plan,
    ops: &[Op],
    env: &[(TensorId, u32)],
    cuts: &mut [Vec<u64>],
    seen: &mut BTreeSet<(BlockId, Vec<TensorId>)>,
) -> Result<()> {
    for op in ops {
        if let OpKind::Call { block, args, .. } = &op.kind {
            let inner = bind(args, env, 0);
            if seen.insert((*block, inner.iter().map(|b| b.0).collect())) {
                collect_cuts(plan, &plan.blocks[*block as usize].ops, &inner, cuts, seen)?;
            }
            continue;
        }
        for buf in op.reads().chain(op.writes()) {
            let Some(rows) = buf.rows else { continue };
            let tensor = resolve(buf.of, env).0 as usize;
            if rows[0] >= rows[1] || rows[1] > plan.tensors[tensor].rows() {
                return Err(Error::plan(format!(
                    "op {:?} names rows {}..{} of tensor {:?}, which has {}",
                    op.label,
                    rows[0],
                    rows[1],
                    plan.tensors[tensor].name,
                    plan.tensors[tensor].rows()
                )));
            }
            cuts[tensor].extend(rows);
        }
    }
    Ok(())
}

/// The bindings of the block in iteration `i` of a call made under `env`.
pub fn bind(args: &[Arg], env: &[(TensorId, u32)], i: u32) -> Env {
    args.iter()
        .map(|arg| {
            let (tensor, base) = resolve(arg.of(), env);
            (tensor, base + arg.slot(i))
        })
        .collect()
}

/// Whether all iterations of a call touch the same slots, except for tensors that it only reads.
pub fn repeats_itself(plan: &Plan, call: &Op) -> bool {
    let OpKind::Call { block, args, .. } = &call.kind else { return false };
    args.iter().enumerate().all(|(i, arg)| match arg {
        Arg::Buf { .. } => true,
        Arg::Each { of, .. } => *of == 1 || !writes_formal(plan, *block, i as u32),
    })
}

fn writes_formal(plan: &Plan, block: BlockId, formal: u32) -> bool {
    plan.blocks[block as usize].ops.iter().any(|op| match &op.kind {
        OpKind::Call { block, args, .. } => args
            .iter()
            .enumerate()
            .any(|(i, arg)| arg.of() == TensorRef::Formal(formal) && writes_formal(plan, *block, i as u32)),
        _ => op.writes().any(|b| b.of == TensorRef::Formal(formal)),
    })
}

/// A spliced op.
#[derive(Debug, Clone)]
pub struct Node<'p> {
    pub op: &'p Op,
    pub lane: u16,
    /// Index of the call that it stands in, among the line's frames.
    pub frame: u32,
    reads: (u32, u32),
    writes: (u32, u32),
}

/// A call being gone through: one iteration of it, inside of which ops stand.
#[derive(Debug, Clone)]
struct Frame<'p> {
    parent: u32,
    label: &'p str,
    iteration: u32,
}

/// Whether an iteration of a call is spliced, by the call's op and the iteration.
pub type Unroll<'a> = &'a dyn Fn(&Op, u32) -> bool;

/// Spliced ops in program order, with their places and edges.
#[derive(Debug, Clone)]
pub struct Line<'p> {
    pub nodes: Vec<Node<'p>>,
    frames: Vec<Frame<'p>>,
    places: Vec<Place>,
    /// The ops of the line that each op waits for.
    preds: Csr,
    /// What each op waits for from before the line began, and what the line leaves behind.
    pub outer: Outer,
    pub lanes: usize,
}

/// Dependencies on what happened before the line, and what the line leaves behind.
#[derive(Debug, Clone, Default)]
pub struct Outer {
    /// Lanes whose last op from before the line each op waits for: its own, of which it is the first, and that of kernels
    /// where it takes a turn among them.
    pub lanes: Csr,
    /// Atoms that each op reads before anything in the line has written them.
    pub reads: Csr,
    /// Atoms that each op writes before anything in the line has written them: it waits for their outer writers and
    /// readers.
    pub writes: Csr,
    /// The last op of each lane that has any: (lane, op).
    pub last_on_lane: Vec<(u16, u32)>,
    /// The last writer of each atom: (atom, op).
    pub last_write: Vec<(u32, u32)>,
    /// The last readers of each atom since its last write, one for each lane: (atom, op).
    pub last_reads: Vec<(u32, u32)>,
}

/// Lists of lists, stored flat.
#[derive(Debug, Clone, Default)]
pub struct Csr {
    at: Vec<u32>,
    pub items: Vec<u32>,
}

impl Csr {
    pub fn reserve(&mut self, lists: usize, items: usize) {
        self.at.reserve(lists + 1);
        self.items.reserve(items);
    }

    pub fn push(&mut self, list: &[u32]) {
        if self.at.is_empty() {
            self.at.push(0);
        }
        self.items.extend_from_slice(list);
        self.at.push(self.items.len() as u32);
    }

    pub fn of(&self, i: usize) -> &[u32] {
        &self.items[self.at[i] as usize..self.at[i + 1] as usize]
    }
}

impl<'p> Line<'p> {
    /// A whole program with every call spliced. Errors: more than [`MOST_OPS`] ops.
    pub fn program(plan: &'p Plan, atoms: &AtomTable, program: u32) -> Result<Line<'p>> {
        Line::unrolled(plan, atoms, program, &|_, _| true)
    }

    /// A program in which calls that only repeat themselves are spliced three times: the first two iterations and the
    /// last show every neighbourhood that more would. Errors: more than [`MOST_OPS`] ops.
    pub fn short(plan: &'p Plan, atoms: &AtomTable, program: u32) -> Result<Line<'p>> {
        let keep = |op: &Op, i: u32| match &op.kind {
            OpKind::Call { repeat, .. } if *repeat > 3 && repeats_itself(plan, op) => i < 2 || i + 1 == *repeat,
            _ => true,
        };
        Line::unrolled(plan, atoms, program, &keep)
    }

    /// A program with only the iterations spliced that `keep` wants. Errors: more than [`MOST_OPS`] ops.
    pub fn unrolled(plan: &'p Plan, atoms: &AtomTable, program: u32, keep: Unroll) -> Result<Line<'p>> {
        let mut line = Line::empty(plan);
        line.splice(plan, atoms, &plan.programs[program as usize].ops, &[], 0, keep)?;
        line.link(&mut Touches::new(atoms));
        Ok(line)
    }

    /// The line of consecutive ops of one body, none of them a call. `touches`: room to work in, made for the same
    /// atoms.
    pub fn segment(
        plan: &'p Plan,
        atoms: &AtomTable,
        ops: &'p [Op],
        env: &[(TensorId, u32)],
        touches: &mut Touches,
    ) -> Line<'p> {
        let mut line = Line::empty(plan);
        line.nodes.reserve(ops.len());
        line.places.reserve(ops.iter().map(|op| op.reads().count() + op.writes().count()).sum());
        for op in ops {
            line.push(plan, atoms, op, env, 0);
        }
        line.link(touches);
        line
    }

    fn empty(plan: &Plan) -> Line<'p> {
        let root = Frame { parent: 0, label: "", iteration: 0 };
        let (frames, lanes) = (vec![root], plan.lanes.len());
        Line { nodes: vec![], frames, places: vec![], preds: Csr::default(), outer: Outer::default(), lanes }
    }

    fn splice(
        &mut self,
        plan: &'p Plan,
        atoms: &AtomTable,
        ops: &'p [Op],
        env: &[(TensorId, u32)],
        frame: u32,
        keep: Unroll,
    ) -> Result<()> {
        for op in ops {
            let OpKind::Call { block, args, repeat } = &op.kind else {
                self.push(plan, atoms, op, env, frame);
                continue;
            };
            for i in (0..*repeat).filter(|&i| keep(op, i)) {
                self.frames.push(Frame { parent: frame, label: &op.label, iteration: i });
                let inner = self.frames.len() as u32 - 1;
                let body = &plan.blocks[*block as usize].ops;
                self.splice(plan, atoms, body, &bind(args, env, i), inner, keep)?;
                if self.nodes.len() > MOST_OPS {
                    return Err(Error::plan(format!("call {:?} splices to more than {MOST_OPS} ops", op.label)));
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, plan: &Plan, atoms: &AtomTable, op: &'p Op, env: &[(TensorId, u32)], frame: u32) {
        let start = self.places.len() as u32;
        self.places.extend(op.reads().map(|buf| atoms.place(plan, buf, env)));
        let mid = self.places.len() as u32;
        self.places.extend(op.writes().map(|buf| atoms.place(plan, buf, env)));
        let end = self.places.len() as u32;
        let lane = op.lane.unwrap_or(0);
        self.nodes.push(Node { op, lane, frame, reads: (start, mid), writes: (mid, end) });
    }

    pub fn reads(&self, node: usize) -> &[Place] {
        let (a, b) = self.nodes[node].reads;
        &self.places[a as usize..b as usize]
    }

    pub fn writes(&self, node: usize) -> &[Place] {
        let (a, b) = self.nodes[node].writes;
        &self.places[a as usize..b as usize]
    }

    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// The ops of the line that `node` waits for.
    pub fn preds(&self, node: usize) -> &[u32] {
        self.preds.of(node)
    }

    pub fn all_preds(&self) -> &Csr {
        &self.preds
    }

    pub fn outer_reads(&self, node: usize) -> &[u32] {
        self.outer.reads.of(node)
    }

    pub fn outer_writes(&self, node: usize) -> &[u32] {
        self.outer.writes.of(node)
    }

    /// `call[iteration]/../label`, unique on a rank.
    pub fn path(&self, node: usize) -> String {
        let n = &self.nodes[node];
        let mut parts = vec![n.op.label.clone()];
        let mut frame = n.frame;
        while frame != 0 {
            let f = &self.frames[frame as usize];
            parts.push(format!("{}[{}]", f.label, f.iteration));
            frame = f.parent;
        }
        parts.reverse();
        parts.join("/")
    }

    /// Derives every edge from lanes, atoms and `after`.
    fn link(&mut self, touches: &mut Touches) {
        let lane_of: Vec<u16> = self.nodes.iter().map(|node| node.lane).collect();
        let mut tracker = Tracker::new(&lane_of, self.lanes, touches);
        let mut waits = Waits::default();
        let (nodes, places) = (self.nodes.len(), self.places.len());
        [&mut self.preds, &mut self.outer.lanes, &mut self.outer.reads, &mut self.outer.writes]
            .into_iter()
            .for_each(|lists| lists.reserve(nodes, places));
        for (i, &lane) in lane_of.iter().enumerate() {
            waits.clear();
            let lane = lane as usize;
            tracker.before_turn(lane, &mut waits);
            let turn = self.turn(i);
            if turn.is_some() {
                tracker.before_turn(KERNELS, &mut waits);
            }
            self.add_after(i, &tracker, &mut waits.preds);
            let waited = std::mem::replace(&mut tracker.waited[lane], NONE);
            if waited != NONE {
                tracker.latest(&mut waits.preds, waited);
            }
            let (reads, writes) = (self.reads(i), self.writes(i));
            for atom in reads.iter().flat_map(|p| p.atoms.iter()) {
                tracker.before_read(atom, &mut waits);
            }
            for atom in writes.iter().flat_map(|p| p.atoms.iter()) {
                tracker.before_write(atom, &mut waits);
            }
            for atom in reads.iter().flat_map(|p| p.atoms.iter()) {
                tracker.read(atom, i as u32);
            }
            for atom in writes.iter().flat_map(|p| p.atoms.iter()) {
                tracker.write(atom, i as u32);
            }
            waits.preds.sort_unstable();
            self.preds.push(&waits.preds);
            self.outer.lanes.push(&waits.outer_lanes);
            self.outer.reads.push(&waits.outer_reads);
            self.outer.writes.push(&waits.outer_writes);
            tracker.lane[lane] = i as u32;
            if turn == Some(Turn::Alone) {
                tracker.lane[KERNELS] = i as u32;
            }
            if self.is_wait(i) {
                tracker.waited.fill(i as u32);
            }
        }
        tracker.finish(&mut self.outer);
    }

    /// Whether an op makes the CPU wait, so that nothing behind it begins before it is over.
    pub fn is_wait(&self, node: usize) -> bool {
        matches!(&self.nodes[node].op.kind, OpKind::Compute { kernel: Kernel::Wait { stream: false, .. }, .. })
    }

    /// How an exchange is ordered among kernels; `None` where its rows alone say.
    fn turn(&self, node: usize) -> Option<Turn> {
        match &self.nodes[node].op.kind {
            OpKind::Exchange { algo, .. } => algo.turn(),
            _ => None,
        }
    }

    /// Adds the edges that `after` names, each to the op with that id in the same body and iteration.
    fn add_after(&self, node: usize, tracker: &Tracker, preds: &mut Vec<u32>) {
        let n = &self.nodes[node];
        for &id in &n.op.after {
            let same = |&j: &usize| self.nodes[j].frame == n.frame && self.nodes[j].op.id == id;
            (0..node).rev().find(same).into_iter().for_each(|j| tracker.latest(preds, j as u32));
        }
    }
}
