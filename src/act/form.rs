//! A sheet made once for a structure, to be filled in anew for other sizes: who meets whom stays, and only how long
//! kernels and messages take, and what they add up to, changes.

use super::deeds::together;
use super::kernels::{Sizes, Timed, narrowest};
use super::meetings::over;
use super::sheet::issued;
use super::tallies::{Tallies, number_of};
use super::{Act, Acts, Sheet, Transit};
use crate::collective::LinkTime;
use crate::error::Result;
use crate::plan::link::Line;
use crate::plan::*;

/// An operand of an op: rows of a slot of a tensor; `None`: all rows.
#[derive(Debug, Clone, Copy)]
struct Operand {
    tensor: TensorId,
    rows: Option<[u64; 2]>,
}

impl Operand {
    /// Elements and bytes of the operand.
    fn size(self, plan: &Plan) -> (u64, u64) {
        let tensor = &plan.tensors[self.tensor as usize];
        let elems = tensor.elems_of(self.rows);
        (elems, elems * tensor.dtype.size())
    }
}

/// An op: its place in its body, its lane, its kernel's number, and where its reads and its writes end among all
/// operands.
struct Entry {
    op: u32,
    lane: u16,
    kernel: u16,
    reads: u32,
    writes: u32,
}

/// The ops of a segment with a sheet of theirs, made for whatever sizes there were.
pub struct Form {
    sheet: Sheet,
    entries: Vec<Entry>,
    operands: Vec<Operand>,
}

impl Form {
    /// A form of the ops of `line`. `kernels`: the names, by number, that the tallies of the sheet go by.
    pub fn new(line: &Line, sheet: Sheet, kernels: &[&'static str]) -> Form {
        let mut operands = vec![];
        let mut add = |places: &[crate::plan::link::Place]| {
            operands.extend(places.iter().map(|p| Operand { tensor: p.tensor, rows: p.named.rows }));
            operands.len() as u32
        };
        let mut entry = |node: usize| {
            let (n, reads) = (&line.nodes[node], add(line.reads(node)));
            let kernel = match &n.op.kind {
                OpKind::Compute { kernel, .. } => number_of(kernels, kernel.name()) as u16,
                _ => 0,
            };
            Entry { op: n.op.id, lane: n.lane, kernel, reads, writes: add(line.writes(node)) }
        };
        let entries = (0..line.nodes.len()).map(&mut entry).collect();
        Form { sheet, entries, operands }
    }

    pub fn width(&self) -> usize {
        self.entries.len()
    }

    /// The sheet for other sizes: those that `body`, the ops of this body in another plan, has. Errors: a copy to a
    /// host's memory that the cluster says nothing of.
    pub fn fill(&self, acts: &mut Acts, body: &[Op], tallies: &mut Tallies) -> Result<Sheet> {
        let mut filling = Filling { sheet: self.sheet.clone(), tallies, meeting: 0 };
        let mut first = 0;
        for (node, entry) in self.entries.iter().enumerate() {
            let reads = &self.operands[first..entry.reads as usize];
            let writes = &self.operands[entry.reads as usize..entry.writes as usize];
            first = entry.writes as usize;
            match &body[entry.op as usize].kind {
                OpKind::Copy { .. } => filling.beside(acts, node, entry, reads, writes)?,
                OpKind::Compute { .. } if !acts.plan.lanes[entry.lane as usize].computes() => {
                    filling.beside(acts, node, entry, reads, writes)?
                }
                OpKind::Compute { kernel, .. } => filling.compute(acts, node, entry, kernel, reads, writes),
                OpKind::Transfer { legs, .. } => {
                    let sends = legs.iter().filter(|leg| leg.dir == Direction::Send);
                    let sizes = reads.iter().map(|read| read.size(acts.plan).1);
                    let sends: Vec<(&Leg, u64)> = sends.zip(sizes).collect();
                    for &(leg, bytes) in &sends {
                        let all = together(sends.iter().copied(), leg);
                        filling.send(acts, entry.lane, leg, [bytes, all]);
                    }
                }
                OpKind::Collective { kind, wire, .. } => {
                    let ends = [reads[0], writes[0]].map(|end| (end.tensor, end.size(acts.plan).0));
                    filling.gather(acts, entry.lane, *kind, wire.full_bytes(acts.plan, ends));
                }
                OpKind::Exchange { .. } => unreachable!("plans with routes are walked, op by op"),
                OpKind::Call { .. } => unreachable!("a segment has no calls"),
            }
        }
        let mut sheet = filling.sheet;
        sheet.issued = issued(&sheet.acts, &sheet.launches, sheet.classes);
        Ok(sheet)
    }
}

struct Filling<'t> {
    sheet: Sheet,
    tallies: &'t mut Tallies,
    /// Meetings filled in so far: they come in the order of ops, legs and classes.
    meeting: usize,
}

impl Filling<'_> {
    fn compute(
        &mut self,
        acts: &mut Acts,
        node: usize,
        entry: &Entry,
        kernel: &Kernel,
        reads: &[Operand],
        writes: &[Operand],
    ) {
        let (plan, operands) = (acts.plan, || reads.iter().chain(writes));
        let sizes = Sizes::new(reads.len(), reads.len() + writes.len(), operands().map(|o| o.size(plan).1));
        let dtype = narrowest(plan, operands().map(|operand| operand.tensor));
        let (reads, writes) = sizes.split();
        let (views, ranks) = (&plan.views, &acts.fold.representatives);
        let classes = node * self.sheet.classes..(node + 1) * self.sheet.classes;
        let Some(block) = kernel.mask() else {
            let work = kernel.work(views, ranks[0], reads, writes).expect("only a mask leaves nothing");
            let timed = acts.timed(kernel.curve(), work, dtype);
            for (class, act) in self.sheet.acts[classes].iter_mut().enumerate() {
                *act = timed.act();
                self.tallies.kernel(class, entry.kernel, work.flops, timed, 1.0);
            }
            return;
        };
        let shapes = acts.positions.shapes(block, views, ranks);
        let mut last: Option<(BlockShape, Work, Timed)> = None;
        for (class, (act, &shape)) in self.sheet.acts[classes].iter_mut().zip(shapes.iter()).enumerate() {
            *act = Act::Skip;
            if shape.area == 0 {
                continue;
            }
            // Many a class has the shape of the class before it.
            let (_, work, timed) = last.filter(|last| last.0 == shape).unwrap_or_else(|| {
                let work = kernel.masked_work(block, shape, views, reads, writes);
                (shape, work, acts.timed(kernel.curve(), work, dtype))
            });
            last = Some((shape, work, timed));
            *act = timed.act();
            self.tallies.kernel(class, entry.kernel, work.flops, timed, 1.0);
        }
    }

    fn beside(&mut self, acts: &Acts, node: usize, entry: &Entry, reads: &[Operand], writes: &[Operand]) -> Result<()> {
        let bytes = |all: &[Operand]| all.iter().map(|operand| operand.size(acts.plan).1).collect::<Vec<u64>>();
        let aside = acts.aside(&acts.plan.lanes[entry.lane as usize], &bytes(reads), &bytes(writes))?;
        let classes = node * self.sheet.classes..(node + 1) * self.sheet.classes;
        for (class, act) in self.sheet.acts[classes].iter_mut().enumerate() {
            *act = Act::Aside { duration: aside.duration };
            self.tallies.aside(class, entry.lane, aside, 1.0);
        }
        Ok(())
    }

    fn send(&mut self, acts: &mut Acts, lane: u16, leg: &Leg, bytes: [u64; 2]) {
        for (class, hop) in acts.hops(lane, leg.by, bytes).iter().enumerate() {
            self.meet(&hop.time);
            self.tallies.link(class, lane, &hop.own, over(hop.tier, bytes[0]), 1.0);
        }
    }

    fn gather(&mut self, acts: &mut Acts, lane: u16, kind: CollectiveKind, bytes: u64) {
        for (class, gang) in acts.gangs(lane).iter().enumerate() {
            let (time, sent) = acts.link(kind, lane, gang, bytes);
            self.tallies.link(class, lane, &time, sent, 1.0);
            if gang.classes[0] as usize == class {
                self.meet(&time);
            }
        }
    }

    fn meet(&mut self, time: &LinkTime) {
        self.sheet.meetings[self.meeting].transit = Transit::of(time);
        self.meeting += 1;
    }
}
