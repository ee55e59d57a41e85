//! Which tensors make an op of one lane wait for one of another: these *tell* the lanes of each other.
//!
//! The ops of a lane start and end in their order. So an op that only ops of its own lane have touched a buffer before
//! need not look for them, and nothing has to be remembered of a tensor that ops of one lane alone touch. That is
//! nearly all of them: only what is sent or received, copied or gathered tells two lanes of each other.

use super::track::Track;
use crate::plan::link::{Csr, Env, bind, resolve};
use crate::plan::*;
use rustc_hash::FxHashSet;

/// The lanes whose ops touch a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
enum Lanes {
    #[default]
    None,
    One(u16),
    Several,
}

impl Lanes {
    fn add(&mut self, lane: u16) {
        *self = match *self {
            Lanes::None => Lanes::One(lane),
            Lanes::One(own) if own == lane => Lanes::One(own),
            Lanes::One(_) | Lanes::Several => Lanes::Several,
        }
    }

    /// Whether a lane other than `lane` is among them.
    fn beside(self, lane: u16) -> bool {
        match self {
            Lanes::None => false,
            Lanes::One(own) => own != lane,
            Lanes::Several => true,
        }
    }
}

/// The lanes that write each tensor, and those that read it.
pub struct Telling {
    writers: Vec<Lanes>,
    readers: Vec<Lanes>,
}

impl Telling {
    /// The lanes of a plan of one program.
    pub fn new(plan: &Plan) -> Telling {
        Telling::of_body(plan, &plan.programs[0].ops, &vec![])
    }

    /// The lanes of these ops and of what they call, under the bindings `env`.
    pub fn of_body(plan: &Plan, ops: &[Op], env: &Env) -> Telling {
        let none = || vec![Lanes::None; plan.tensors.len()];
        let mut telling = Telling { writers: none(), readers: none() };
        telling.add(plan, ops, env, &mut FxHashSet::default());
        telling
    }

    /// The lane of all ops that touch a tensor; `None` if several do, or none.
    pub fn lane(&self, tensor: TensorId) -> Option<u16> {
        match [self.writers[tensor as usize], self.readers[tensor as usize]] {
            [Lanes::None, Lanes::One(lane)] | [Lanes::One(lane), Lanes::None] => Some(lane),
            [Lanes::One(writer), Lanes::One(reader)] if writer == reader => Some(writer),
            _ => None,
        }
    }

    /// Notes ops, going into calls once for each combination of tensors bound.
    fn add(&mut self, plan: &Plan, ops: &[Op], env: &Env, seen: &mut FxHashSet<(BlockId, Vec<TensorId>)>) {
        for op in ops {
            if let OpKind::Call { block, args, .. } = &op.kind {
                let inner = bind(args, env, 0);
                if seen.insert((*block, inner.iter().map(|bound| bound.0).collect())) {
                    self.add(plan, &plan.blocks[*block as usize].ops, &inner, seen);
                }
                continue;
            }
            let lane = op.lane.unwrap_or(0);
            op.reads().for_each(|buf| self.readers[resolve(buf.of, env).0 as usize].add(lane));
            op.writes().for_each(|buf| self.writers[resolve(buf.of, env).0 as usize].add(lane));
        }
    }

    /// Whether any op waits for another lane's because of a tensor.
    pub fn tells(&self, tensor: TensorId) -> bool {
        let (writers, readers) = (self.writers[tensor as usize], self.readers[tensor as usize]);
        match writers {
            Lanes::None => false,
            Lanes::One(lane) => readers.beside(lane),
            Lanes::Several => true,
        }
    }

    /// Leaves out of a track the waits that its lanes' order implies. `tensor_of`: the tensor of an atom.
    pub fn shorten(&self, track: &mut Track, tensor_of: &dyn Fn(u32) -> TensorId) {
        let writers = |atom: u32| self.writers[tensor_of(atom) as usize];
        let readers = |atom: u32| self.readers[tensor_of(atom) as usize];
        let lane = |node: u32| track.lane[node as usize];
        let width = track.width() as u32;
        let among = |waits: &Csr, lanes: &dyn Fn(u32) -> Lanes| {
            let mut kept = Csr::default();
            for node in 0..width {
                let needed = waits.of(node as usize).iter().copied().filter(|&atom| lanes(atom).beside(lane(node)));
                kept.push(&needed.collect::<Vec<u32>>());
            }
            kept
        };
        let (after_write, after_reads) = (among(&track.after_write, &writers), among(&track.after_reads, &readers));
        // The stamps that an op leaves are for ops of other lanes: whoever touches what it wrote, whoever writes what
        // it read.
        let asks = |atom: u32, node: u32| writers(atom).beside(lane(node)) || readers(atom).beside(lane(node));
        let (mut last_write, mut last_reads) = (track.last_write.clone(), track.last_reads.clone());
        last_write.retain(|&(atom, node)| asks(atom, node));
        last_reads.retain(|&(atom, node)| writers(atom).beside(lane(node)));
        *track = Track { after_write, after_reads, last_write, last_reads, ..track.clone() };
    }
}
