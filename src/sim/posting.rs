//! The order in which transfers count as posted where programs differ: on a port, those posted before go first.
//!
//! Ranks of one program post in its order. Ranks of several programs have no order that all could agree on. They take
//! the one in which the analytic cost comes to their ops ([`Crews`]), which no duration changes: so both interpreters
//! give a port to the same transfer.

use crate::error::Result;
use crate::plan::crew::{Crews, PostId, Watch};
use crate::plan::{BlockId, Op, OpKind, Plan};
use rustc_hash::FxHashMap;

/// The numbers of the ops of every program, and of the legs of crossings, by the order of posting.
#[derive(Debug, Default)]
pub struct Posting {
    nodes: Vec<Vec<u32>>,
    legs: FxHashMap<(u32, u32, u16), u32>,
}

impl Posting {
    /// The order of a plan; `None` for one program, and where crews cannot follow the plan.
    pub fn of(plan: &Plan) -> Option<Posting> {
        let crews = if plan.programs.len() > 1 { Crews::new(plan)? } else { return None };
        let posting = Posting { nodes: vec![vec![]; plan.programs.len()], ..Posting::default() };
        let mut count = Count { plan, posting, posts: vec![], next: 0, spliced: FxHashMap::default() };
        // A deadlock is for the simulation to find and to name.
        crews.run(&mut count).ok().map(|()| count.posting)
    }

    /// The number of a leg of a spliced op of a program, or of its collective.
    pub fn number(&self, program: u32, node: u32, leg: u16) -> u32 {
        let of_leg = self.legs.get(&(program, node, leg)).copied();
        of_leg.unwrap_or_else(|| self.nodes[program as usize][node as usize])
    }
}

struct Count<'p> {
    plan: &'p Plan,
    posting: Posting,
    /// The program and the op of each crossing.
    posts: Vec<(u32, u32)>,
    next: u32,
    /// Ops of each block, with those of all blocks that it calls.
    spliced: FxHashMap<BlockId, u32>,
}

impl Count<'_> {
    fn take(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn ops(&mut self, op: &Op) -> u32 {
        let OpKind::Call { block, repeat, .. } = &op.kind else { return 1 };
        let once = match self.spliced.get(block) {
            Some(&known) => known,
            None => {
                let plan = self.plan;
                let sum = plan.blocks[*block as usize].ops.iter().map(|op| self.ops(op)).sum();
                self.spliced.insert(*block, sum);
                sum
            }
        };
        once * repeat
    }
}

impl<'p> Watch<'p> for Count<'p> {
    fn local(&mut self, crew: usize, ops: &'p [Op]) -> Result<()> {
        ops.iter().try_for_each(|op| self.call(crew, op))
    }

    fn call(&mut self, crew: usize, op: &'p Op) -> Result<()> {
        for _ in 0..self.ops(op) {
            let number = self.take();
            self.posting.nodes[crew].push(number);
        }
        Ok(())
    }

    fn post(&mut self, _: PostId, crew: usize, _: &'p Op) -> Result<()> {
        let nodes = &mut self.posting.nodes[crew];
        self.posts.push((crew as u32, nodes.len() as u32));
        nodes.push(0);
        Ok(())
    }

    fn start(&mut self, _: PostId, _: &[PostId]) -> Result<()> {
        Ok(())
    }

    fn meet(&mut self, send: (PostId, u16), _: (PostId, u16)) -> Result<()> {
        let ((program, node), number) = (self.posts[send.0], self.take());
        self.posting.legs.insert((program, node, send.1), number);
        Ok(())
    }

    fn gather(&mut self, posts: &[PostId]) -> Result<()> {
        let number = self.take();
        for &post in posts {
            let (program, node) = self.posts[post];
            self.posting.nodes[program as usize][node as usize] = number;
        }
        Ok(())
    }

    fn end(&mut self, _: PostId) -> Result<()> {
        Ok(())
    }
}
