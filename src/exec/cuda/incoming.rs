//! What others would send a rank that is alone. Nobody does, so what was in memory before stays there. Where kernels write to the
//! same buffers too, as experts do whose rows go back in the buffer that they came in, the next kernel to read what has come
//! would read what they left: smaller numbers from layer to layer and soon zeros, with which an H200's products take an
//! eighth less time. Kernels read what has come in a place of its own.

use crate::plan::lasting::lasting;
use crate::plan::link::Line;
use crate::plan::memory::{Layout, SlotId};
use crate::plan::{OpKind, Plan};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, BTreeSet};

/// What would come to the one rank that is there.
#[derive(Debug, Clone, Default)]
pub struct Incoming {
    /// Slots that both messages and kernels write, each with the place in the rank's memory for what comes by message.
    pub places: BTreeMap<SlotId, u64>,
    /// Operands that have come by message: the op and the number among its reads.
    reads: FxHashSet<(u32, u32)>,
}

impl Incoming {
    /// Makes room in the rank's memory, for which its line decides who reads what has come.
    pub fn new(plan: &Plan, line: &Line, layout: &mut Layout) -> Incoming {
        let received = received(plan, line);
        // Numbers must be there as they would come: what is left of wider ones in memory that others use too is none in bf16
        // here and there, nor is what follows from it, which takes less power.
        *layout = layout.clone().apart(plan, &received);
        let computed: BTreeSet<SlotId> = (0..line.nodes.len())
            .filter(|&node| !communicates(line, node))
            .flat_map(|node| written(line, node))
            .collect();
        let places = layout.beside(plan, received.intersection(&computed));
        let mut came: FxHashMap<SlotId, bool> = FxHashMap::default();
        let mut reads = FxHashSet::default();
        // Twice: a step begins with what the one before has left.
        for _ in 0..2 {
            for node in 0..line.nodes.len() {
                let by_message = communicates(line, node);
                for (i, place) in (0..).zip(line.reads(node)).filter(|_| !by_message) {
                    if came.get(&SlotId { tensor: place.tensor, slot: place.slot }) == Some(&true) {
                        reads.insert((node as u32, i));
                    }
                }
                came.extend(written(line, node).filter(|at| places.contains_key(at)).map(|at| (at, by_message)));
            }
        }
        Incoming { places, reads }
    }

    /// Where a slot begins for an operand of an op, if that has come by message; `None`: it is read where kernels leave
    /// it.
    pub fn at(&self, (node, read): (u32, u32), slot: SlotId) -> Option<u64> {
        self.places.get(&slot).filter(|_| self.reads.contains(&(node, read))).copied()
    }
}

/// Slots that messages and collectives write, without weights and gradients, which are there all the time.
fn received(plan: &Plan, line: &Line) -> BTreeSet<SlotId> {
    let written = (0..line.nodes.len()).filter(|&node| communicates(line, node)).flat_map(|node| written(line, node));
    let lasting = lasting(plan);
    written.filter(|at| !lasting[at.tensor as usize]).collect()
}

fn communicates(line: &Line, node: usize) -> bool {
    !matches!(line.nodes[node].op.kind, OpKind::Compute { .. } | OpKind::Copy { .. })
}

fn written<'a>(line: &'a Line, node: usize) -> impl Iterator<Item = SlotId> + 'a {
    line.writes(node).iter().map(|place| SlotId { tensor: place.tensor, slot: place.slot })
}
