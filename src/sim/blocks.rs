//! Blocks: runs of kernels that are one op where a step is played block by block.

use super::block_times::Lookup;
use crate::act::Deeds;
use crate::plan::link::{Csr, Line};
use crate::plan::{Lane, OpKind, Plan};
use rustc_hash::FxHashMap;

/// The blocks of a line, with the blocks that they wait for.
pub struct Blocks {
    /// The ops of the line in each block.
    pub members: Csr,
    /// The blocks that each block waits for.
    pub preds: Csr,
    /// For each distinct op that stands for several kernels, and each class: how long the CPU takes to issue the first
    /// kernel, and all of them, in `host_launch`es.
    pub kernels: FxHashMap<u32, Vec<[u32; 2]>>,
}

impl Blocks {
    /// Finds the blocks of a line, and which distinct op each is; blocks of several kernels are added to `deeds`.
    ///
    /// A kernel joins the one before it on its lane if it waits for nothing but kernels of that lane, which are over
    /// when their turn has been, and if no op of another lane waits for the one before. Then nothing can happen
    /// between the two, and their times add up: exactly, but for SMs that communication takes or gives back inside a
    /// block, whose kernels are all bound by SMs or none of them. A block that was measured takes what was measured.
    pub fn of(
        plan: &Plan,
        line: &Line,
        distinct: &[u32],
        deeds: &mut Deeds,
        (program, times): (u32, &Lookup),
    ) -> (Blocks, Vec<u32>) {
        let n = line.nodes.len();
        let kernel = |op: usize| {
            let computes = matches!(plan.lanes[line.nodes[op].lane as usize], Lane::Compute(_));
            computes && matches!(line.nodes[op].op.kind, OpKind::Compute { .. }) && !line.is_wait(op)
        };
        let lane = |op: usize| line.nodes[op].lane;
        // An op that an op of another lane waits for ends its block.
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
        let mut blocks = Blocks { members: Csr::default(), preds: Csr::default(), kernels: FxHashMap::default() };
        let (mut numbers, mut known) = (vec![], FxHashMap::<(Vec<u32>, Option<u64>), u32>::default());
        for (block, ops) in members.iter().enumerate() {
            let head = ops[0] as usize;
            let mut preds: Vec<u32> = line.preds(head).iter().map(|&p| block_of[p as usize]).collect();
            preds.sort_unstable();
            preds.dedup();
            debug_assert!(preds.iter().all(|&p| (p as usize) < block));
            blocks.preds.push(&preds);
            blocks.members.push(ops);
            let kinds: Vec<u32> = ops.iter().map(|&op| distinct[op as usize]).collect();
            let looked_up = !times.is_empty() && kernel(head);
            let measured = looked_up.then(|| times.of(&name(plan, program, line, ops))).flatten();
            numbers.push(match (&kinds[..], measured) {
                (&[one], None) => one,
                _ => *known.entry((kinds, measured)).or_insert_with_key(|(kinds, measured)| {
                    let (number, kernels) = deeds.join(kinds);
                    if let &Some(longest) = measured {
                        deeds.last(number, longest);
                    }
                    blocks.kernels.insert(number, kernels);
                    number
                }),
            });
        }
        (blocks, numbers)
    }
}

/// The name of the block of these ops, see [`block_times`](super::block_times).
pub fn name(plan: &Plan, program: u32, line: &Line, ops: &[u32]) -> String {
    let (head, tail) = (line.path(ops[0] as usize), &line.nodes[ops[ops.len() - 1] as usize].op.label);
    let parts: Vec<&str> = head.split('/').map(|part| part.split('[').next().unwrap_or(part)).collect();
    let of_program = match plan.programs.len() {
        1 => String::new(),
        _ => format!("{}: ", plan.programs[program as usize].name),
    };
    match ops.len() {
        1 => format!("{of_program}{}", parts.join("/")),
        n => format!("{of_program}{}..{tail} x{n}", parts.join("/")),
    }
}
