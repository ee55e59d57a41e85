//! Cuts a layer's backward pass in two: what the layer below waits for, and what nobody waits for, the gradients of
//! the weights (Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2, where they are called B and W).
//!
//! The first half is what the gradients of inputs are made of, found backward from them; all else is the second half.
//! What the second reads of the first's workspace is kept from one to the other in tensors of its own: as many slots
//! as passes may wait for their second half, where the workspace itself is one slot for all.

use super::builder::Builder;
use super::op::*;
use super::program::Block;
use std::collections::BTreeSet;

/// The result of cutting a block in two: both halves have its formals, and behind them one for each of `kept`.
pub struct Halves {
    /// The second half, a block of its own.
    pub weights: BlockId,
    /// Slots of the workspace that each half has a formal for in place of the slot itself.
    pub kept: Vec<Buf>,
}

/// A value that the first half leaves for the second: the buffer, and the ops that wrote it.
struct Left {
    of: Buf,
    writers: BTreeSet<usize>,
}

impl Builder {
    /// Cuts `block` in two: its first half takes its place. `gradients`: the formals to which the gradients of its
    /// weights are added.
    ///
    /// # Panics
    /// In a builder of sizes, which keeps no buffers, and for a block with calls.
    pub fn halve(&mut self, block: BlockId, gradients: &[u32]) -> Halves {
        assert!(self.keeps_names(), "a block without buffers cannot be cut in two");
        let whole = self.blocks[block as usize].clone();
        assert!(whole.ops.iter().all(|op| op.lane.is_some()), "{}: a call cannot be cut in two", whole.name);
        let (cut, left) = cut(&whole.ops, gradients, &|tensor| self.tensors[tensor as usize].rows());
        let names = left.iter().map(|left| format!("kept.{}", self.tensors[left.of.tensor() as usize].name));
        let formals: Vec<String> = whole.formals.iter().cloned().chain(names).collect();
        let half = |first, name| {
            let ops = cut.half(&whole.ops, first, whole.formals.len() as u32, &left);
            Block { name, formals: formals.clone(), ops }
        };
        let (inputs, weights) = (half(true, whole.name.clone()), half(false, format!("{}_weights", whole.name)));
        self.blocks[block as usize] = inputs;
        self.blocks.push(weights);
        let weights = self.blocks.len() as BlockId - 1;
        Halves { weights, kept: left.iter().map(|left| left.of).collect() }
    }
}

/// Which ops are in the first half, and who wrote what each op reads.
struct Cut {
    first: Vec<bool>,
    /// The ops of the block that wrote each read, by op and by read.
    sources: Vec<Vec<BTreeSet<usize>>>,
}

/// Cuts ops in two, and lists the values that the first half leaves. `rows`: the rows of a slot of a tensor.
fn cut(ops: &[Op], gradients: &[u32], rows: &dyn Fn(TensorId) -> u64) -> (Cut, Vec<Left>) {
    // A buffer that is written chunk by chunk may be read whole.
    let all_rows = |buf: Buf| match buf.of {
        TensorRef::Tensor(tensor) => Buf { rows: buf.rows.or(Some([0, rows(tensor)])), ..buf },
        TensorRef::Formal(_) => buf,
    };
    let with_rows = |op: &Op| {
        let (reads, writes) = op.bufs();
        (reads.into_iter().map(all_rows).collect(), writes.into_iter().map(all_rows).collect())
    };
    let bufs: Vec<(Vec<Buf>, Vec<Buf>)> = ops.iter().map(with_rows).collect();
    let sources: Vec<Vec<BTreeSet<usize>>> =
        (0..ops.len()).map(|i| bufs[i].0.iter().map(|read| writers(&bufs, i, read)).collect()).collect();
    let mut stay = BTreeSet::new();
    // An op of the second half that cannot run so late goes to the first, with what it needs.
    loop {
        let cut = Cut { first: first_half(&bufs, &sources, gradients, &stay), sources: sources.clone() };
        match cut.left(&bufs) {
            Ok(left) => return (cut, left),
            Err(op) => assert!(stay.insert(op), "an op of the first half is asked to go there"),
        }
    }
}

/// The writers of what the op `at` reads: for every row the last op to write it, and the ops that have added to it
/// since.
fn writers(bufs: &[(Vec<Buf>, Vec<Buf>)], at: usize, read: &Buf) -> BTreeSet<usize> {
    let (mut found, mut open) = (BTreeSet::new(), vec![*read]);
    for earlier in (0..at).rev() {
        let (reads, writes) = &bufs[earlier];
        let hits: Vec<&Buf> = writes.iter().filter(|write| open.iter().any(|part| overlap(write, part))).collect();
        if hits.is_empty() {
            continue;
        }
        found.insert(earlier);
        if reads.iter().any(|r| overlap(r, read)) {
            continue;
        }
        for write in hits {
            open = open.iter().flat_map(|part| without(part, write)).collect();
        }
        if open.is_empty() {
            break;
        }
    }
    found
}

/// The rows of `part` that are not written by `write`. How many rows a formal has is not known.
fn without(part: &Buf, write: &Buf) -> Vec<Buf> {
    match (part.rows, write.rows) {
        _ if !same_slot(part, write) => vec![*part],
        (_, None) => vec![],
        (None, Some(_)) => vec![*part],
        (Some([start, end]), Some([from, to])) => {
            let rows = [[start, end.min(from)], [start.max(to), end]].into_iter().filter(|[from, to]| from < to);
            rows.map(|rows| Buf { rows: Some(rows), ..*part }).collect()
        }
    }
}

fn same_slot(a: &Buf, b: &Buf) -> bool {
    (a.of, a.slot) == (b.of, b.slot)
}

fn overlap(a: &Buf, b: &Buf) -> bool {
    let apart = |[from, to]: [u64; 2], [start, end]: [u64; 2]| to <= start || end <= from;
    same_slot(a, b) && !matches!((a.rows, b.rows), (Some(a), Some(b)) if apart(a, b))
}

/// Which ops are in the first half: those that write what others than the optimizer wait for, those that have to `stay`
/// with them, and all that these need.
fn first_half(
    bufs: &[(Vec<Buf>, Vec<Buf>)],
    sources: &[Vec<BTreeSet<usize>>],
    gradients: &[u32],
    stay: &BTreeSet<usize>,
) -> Vec<bool> {
    let leaves = |buf: &Buf| matches!(buf.of, TensorRef::Formal(f) if !gradients.contains(&f));
    let mut first: Vec<bool> =
        bufs.iter().enumerate().map(|(i, (_, writes))| stay.contains(&i) || writes.iter().any(leaves)).collect();
    for at in (0..bufs.len()).rev() {
        if first[at] {
            sources[at].iter().flatten().for_each(|&earlier| first[earlier] = true);
        }
    }
    first
}

impl Cut {
    /// The values that the second half reads of the first half's work. The error is an op that would find one
    /// overwritten.
    fn left(&self, bufs: &[(Vec<Buf>, Vec<Buf>)]) -> Result<Vec<Left>, usize> {
        let mut all: Vec<Left> = vec![];
        for at in (0..bufs.len()).filter(|at| !self.first[*at]) {
            for (read, sources) in bufs[at].0.iter().zip(&self.sources[at]) {
                let by_first = sources.iter().filter(|&&writer| self.first[writer]).count();
                let gone = |later: usize| self.first[later] && bufs[later].1.iter().any(|w| overlap(w, read));
                match read.of {
                    // What adds up may be added to in any order.
                    TensorRef::Formal(_) if bufs[at].1.iter().any(|write| overlap(write, read)) => {}
                    TensorRef::Formal(_) if (at + 1..bufs.len()).any(gone) => return Err(at),
                    TensorRef::Formal(_) => {}
                    TensorRef::Tensor(_) if by_first == 0 => {}
                    TensorRef::Tensor(_) if by_first < sources.len() => return Err(at),
                    TensorRef::Tensor(_) => {
                        let writers = self.with_adders(bufs, read, sources);
                        join(&mut all, Left { of: Buf { rows: None, ..*read }, writers });
                    }
                }
            }
        }
        match self.torn(bufs, &all) {
            Some(left) => {
                let reads = |at: &usize| {
                    let of = bufs[*at].0.iter().zip(&self.sources[*at]);
                    !self.first[*at] && of.clone().any(|(r, s)| same_slot(r, &left.of) && !s.is_disjoint(&left.writers))
                };
                Err((0..bufs.len()).find(reads).expect("the second half reads what is left"))
            }
            None => Ok(all),
        }
    }

    /// The writers of a value, and the writers of sums that some of these have added to.
    fn with_adders(&self, bufs: &[(Vec<Buf>, Vec<Buf>)], read: &Buf, sources: &BTreeSet<usize>) -> BTreeSet<usize> {
        let (mut all, mut more) = (sources.clone(), sources.clone());
        while let Some(writer) = more.pop_first() {
            for (buf, earlier) in bufs[writer].0.iter().zip(&self.sources[writer]) {
                if same_slot(buf, read) {
                    more.extend(earlier.difference(&all).copied());
                    all.extend(earlier);
                }
            }
        }
        all
    }

    /// A value that cannot be kept apart: an op of the first half reads it together with another value, adds to it
    /// behind the second half's back, or writes it again before the second half has read it. `None` if there is none.
    fn torn<'l>(&self, bufs: &[(Vec<Buf>, Vec<Buf>)], all: &'l [Left]) -> Option<&'l Left> {
        all.iter().find(|left| {
            (0..bufs.len()).any(|at| {
                let reads = bufs[at].0.iter().zip(&self.sources[at]).filter(|(read, _)| same_slot(read, &left.of));
                let of_it: Vec<_> = reads.filter(|(_, sources)| !sources.is_disjoint(&left.writers)).collect();
                let mixed = of_it.iter().any(|(_, sources)| !sources.is_subset(&left.writers));
                let writes = || bufs[at].1.iter().any(|write| same_slot(write, &left.of));
                let again = |read: &Buf| {
                    left.writers.range(at + 1..).any(|&later| bufs[later].1.iter().any(|write| overlap(write, read)))
                };
                let gone = !self.first[at] && of_it.iter().any(|(read, _)| again(read));
                gone || mixed
                    || (!of_it.is_empty() && !left.writers.contains(&at) && writes() && adds(bufs, at, &left.of))
            })
        })
    }

    /// The ops of one half; values that are left have the formals behind the first `formals`.
    fn half(&self, ops: &[Op], first: bool, formals: u32, left: &[Left]) -> Vec<Op> {
        let mut ids = vec![None; ops.len()];
        let mut half: Vec<Op> = vec![];
        for (at, op) in ops.iter().enumerate().filter(|(at, _)| self.first[*at] == first) {
            ids[at] = Some(half.len() as u32);
            let mut op = Op { id: half.len() as u32, ..op.clone() };
            // What stood before an op in the other half is over by then, or is ordered by what it writes.
            op.after = op.after.iter().filter_map(|&earlier| ids[earlier as usize]).collect();
            let (reads, writes) = op.kind.bufs_mut();
            for (read, sources) in reads.into_iter().zip(&self.sources[at]) {
                let of_it = |l: &Left| same_slot(read, &l.of) && !sources.is_disjoint(&l.writers);
                if let Some(k) = left.iter().position(of_it) {
                    (read.of, read.slot) = (TensorRef::Formal(formals + k as u32), 0);
                }
            }
            for write in writes {
                if let Some(k) = left.iter().position(|l| same_slot(write, &l.of) && l.writers.contains(&at)) {
                    (write.of, write.slot) = (TensorRef::Formal(formals + k as u32), 0);
                }
            }
            half.push(op);
        }
        half
    }
}

/// Whether an op both reads and writes the same rows of a slot.
fn adds(bufs: &[(Vec<Buf>, Vec<Buf>)], at: usize, of: &Buf) -> bool {
    let (reads, writes) = &bufs[at];
    let of_it = |buf: &&Buf| same_slot(buf, of);
    writes.iter().filter(of_it).any(|write| reads.iter().filter(of_it).any(|read| overlap(read, write)))
}

/// Adds a value, joined with those that have a writer in common with it.
fn join(all: &mut Vec<Left>, mut more: Left) {
    let same = |l: &Left, more: &Left| same_slot(&l.of, &more.of) && !l.writers.is_disjoint(&more.writers);
    while let Some(at) = all.iter().position(|l| same(l, &more)) {
        more.writers.extend(all.remove(at).writers);
    }
    all.push(more);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Kernel;

    const F32: Dtype = Dtype::F32;

    /// Reads and writes of each op by name.
    fn said(b: &Builder, block: BlockId) -> Vec<(String, Vec<String>, Vec<String>)> {
        let block = &b.blocks[block as usize];
        let name = |buf: &Buf| match buf.of {
            TensorRef::Tensor(t) => b.tensors[t as usize].name.clone(),
            TensorRef::Formal(f) => block.formals[f as usize].clone(),
        };
        let names = |bufs: Vec<Buf>| bufs.iter().map(name).collect();
        let ops = block.ops.iter().map(|op| (op.label.clone(), op.bufs()));
        ops.map(|(label, (reads, writes))| (label, names(reads), names(writes))).collect()
    }

    /// y = x w1, z = y w2, backward: the workspace `s` has the gradient of y, and then that of something else.
    #[test]
    fn gradients_of_weights_come_behind_and_read_what_was_kept() {
        let mut b = Builder::new();
        let s = b.tensor("s", &[4], F32, TensorKind::Workspace, 1);
        let idle = b.tensor("idle", &[4], F32, TensorKind::Workspace, 1);
        b.open("bwd");
        let [g, x, y, dy, dx] = ["g", "x", "y", "dy", "dx"].map(|name| b.formal(name));
        let op = || Kernel::Add { elems: 4, trim: None };
        b.compute("dw2", op(), &[dy, y, g.rows(0, 4)], &[g.rows(0, 4)]);
        b.compute("dx2", op(), &[dy], &[s]);
        b.compute("gathered", op(), &[x], &[idle]);
        b.compute("dw1", op(), &[s, idle, g.rows(4, 8)], &[g.rows(4, 8)]);
        b.compute("dx1", op(), &[s], &[dx]);
        b.compute("more", op(), &[dx], &[s]);
        b.compute("norm", op(), &[s, dx, g.rows(8, 12)], &[dx, g.rows(8, 12)]);
        let block = b.close();
        let halves = b.halve(block, &[0]);
        assert_eq!(halves.kept, [s]);
        let line = |label: &str, reads: &[&str], writes: &[&str]| {
            let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
            (label.to_string(), names(reads), names(writes))
        };
        let first = [
            line("dx2", &["dy"], &["kept.s"]),
            line("dx1", &["kept.s"], &["dx"]),
            line("more", &["dx"], &["s"]),
            line("norm", &["s", "dx", "g"], &["dx", "g"]),
        ];
        assert_eq!(said(&b, block), first);
        let second = [
            line("dw2", &["dy", "y", "g"], &["g"]),
            line("gathered", &["x"], &["idle"]),
            line("dw1", &["kept.s", "idle", "g"], &["g"]),
        ];
        assert_eq!(said(&b, halves.weights), second);
    }

    /// Two values of one buffer, written a chunk at a time and read whole, are two things that are kept.
    #[test]
    fn chunks_of_two_values_are_kept_apart() {
        let mut b = Builder::new();
        let s = b.tensor("s", &[4], F32, TensorKind::Workspace, 1);
        b.open("bwd");
        let [g, x, dy, dx] = ["g", "x", "dy", "dx"].map(|name| b.formal(name));
        let op = || Kernel::Add { elems: 2, trim: None };
        for half in [[0, 2], [2, 4]] {
            b.compute("dy2", op(), &[dy], &[s.rows(half[0], half[1])]);
        }
        b.compute("dw2", op(), &[s, x, g.rows(0, 4)], &[g.rows(0, 4)]);
        b.compute("dx2", op(), &[s], &[dx]);
        for half in [[0, 2], [2, 4]] {
            b.compute("dy1", op(), &[dx], &[s.rows(half[0], half[1])]);
        }
        b.compute("dw1", op(), &[s, x, g.rows(4, 8)], &[g.rows(4, 8)]);
        b.compute("dx1", op(), &[s], &[dx]);
        let block = b.close();
        let halves = b.halve(block, &[0]);
        assert_eq!(halves.kept.len(), 2);
        let names = b.blocks[halves.weights as usize].formals.len() as u32;
        let reads: Vec<TensorRef> = b.blocks[halves.weights as usize].ops.iter().map(|op| op.bufs().0[0].of).collect();
        assert_eq!(reads, [TensorRef::Formal(names - 2), TensorRef::Formal(names - 1)]);
    }

    /// A gradient of weights made of what the first half overwrites stays with it.
    #[test]
    fn what_cannot_wait_does_not() {
        let mut b = Builder::new();
        let s = b.tensor("s", &[4], F32, TensorKind::Workspace, 1);
        b.open("bwd");
        let [g, dy, dx] = ["g", "dy", "dx"].map(|name| b.formal(name));
        let op = || Kernel::Add { elems: 4, trim: None };
        b.compute("first", op(), &[dy], &[s]);
        b.compute("dw", op(), &[s, g], &[g]);
        b.compute("adds", op(), &[s, dy], &[s]);
        b.compute("early", op(), &[dx, g.rows(0, 2)], &[g.rows(0, 2)]);
        b.compute("last", op(), &[s], &[dx]);
        let block = b.close();
        let halves = b.halve(block, &[0]);
        let labels = |block| said(&b, block).into_iter().map(|op| op.0).collect::<Vec<_>>();
        assert_eq!(labels(block), ["first", "dw", "adds", "early", "last"]);
        assert!(labels(halves.weights).is_empty() && halves.kept.is_empty());
    }
}
