//! Runs of kernels that are one op where a step is played block by block.

use crate::act::Deeds;
use crate::plan::link::{Csr, Line};
use crate::plan::{Lane, OpKind, Plan};
use rustc_hash::FxHashMap;

/// Which ops of a line are one, with what they wait for.
pub struct Blocks {
    /// Of each block, the first op of the line that is in it.
    pub heads: Vec<u32>,
    /// Blocks that a block waits for.
    pub preds: Csr,
    /// Of distinct ops that are several: how many kernels of each class.
    pub kernels: FxHashMap<u32, Vec<u32>>,
}

impl Blocks {
    /// The blocks of a line, and which distinct op each is: those of several kernels are added to `deeds`.
    ///
    /// A kernel joins the one before it on its lane if it waits for nothing but kernels of that lane, which are over
    /// when their turn has been, and if no op of another lane waits for the one before. Then nothing can happen
    /// between the two, and their times add up: exactly, but for SMs that communication takes or gives back inside a
    /// block, whose kernels are all bound by SMs or none of them.
    pub fn of(plan: &Plan, line: &Line, distinct: &[u32], deeds: &mut Deeds) -> (Blocks, Vec<u32>) {
        let n = line.nodes.len();
        let kernel = |op: usize| {
            let computes = matches!(plan.lanes[line.nodes[op].lane as usize], Lane::Compute(_));
            computes && matches!(line.nodes[op].op.kind, OpKind::Compute { .. }) && !line.is_wait(op)
        };
        let lane = |op: usize| line.nodes[op].lane;
        // Who on another lane waits for an op ends its block.
        let mut waited = vec![false; n];
        for op in 0..n {
            line.preds(op).iter().filter(|&&p| lane(p as usize) != lane(op)).for_each(|&p| waited[p as usize] = true);
        }
        let (mut block_of, mut members): (Vec<u32>, Vec<Vec<u32>>) = (Vec::with_capacity(n), vec![]);
        let mut last: FxHashMap<u16, u32> = FxHashMap::default();
        for op in 0..n {
            let own = line.preds(op).iter().all(|&p| lane(p as usize) == lane(op));
            let before = last.insert(lane(op), op as u32).filter(|&b| kernel(op) && kernel(b as usize));
            match before.filter(|&b| own && !waited[b as usize]) {
                Some(before) => {
                    let block = block_of[before as usize];
                    members[block as usize].push(op as u32);
                    block_of.push(block);
                }
                None => {
                    block_of.push(members.len() as u32);
                    members.push(vec![op as u32]);
                }
            }
        }
        let mut blocks = Blocks { heads: vec![], preds: Csr::default(), kernels: FxHashMap::default() };
        let (mut numbers, mut known) = (vec![], FxHashMap::<Vec<u32>, u32>::default());
        for (block, ops) in members.iter().enumerate() {
            let head = ops[0] as usize;
            let mut preds: Vec<u32> = line.preds(head).iter().map(|&p| block_of[p as usize]).collect();
            preds.sort_unstable();
            preds.dedup();
            debug_assert!(preds.iter().all(|&p| (p as usize) < block));
            blocks.preds.push(&preds);
            blocks.heads.push(head as u32);
            let kinds: Vec<u32> = ops.iter().map(|&op| distinct[op as usize]).collect();
            numbers.push(match kinds[..] {
                [one] => one,
                _ => *known.entry(kinds).or_insert_with_key(|kinds| {
                    let (number, kernels) = deeds.join(kinds);
                    blocks.kernels.insert(number, kernels);
                    number
                }),
            });
        }
        (blocks, numbers)
    }
}
