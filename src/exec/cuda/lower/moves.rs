//! Rows moved about: the kernels get the list of what goes where.

use super::super::source;
use super::{Arg, Lowering, Where, ints, table};
use crate::error::Result;
use crate::exec::kernels::exchange::{Layout, Moved};
use crate::exec::kernels::reorder::Pieces;
use crate::plan::Kernel;
use std::collections::BTreeMap;

/// A move: from and to, in elements (from -1: zeros), and whether it is added to what is there; `Move` of layout.cu.
type Move = [i64; 3];

/// The moves of one launch: between one pair of operands, all of one length, and no two of them to one place.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Group {
    /// Copies of one head are summed one after the other.
    turn: usize,
    read: usize,
    write: usize,
    len: usize,
}

impl Lowering<'_> {
    pub(super) fn moved(&mut self, kernel: &Kernel, on: Where) -> Result<()> {
        self.by_list(pieces(kernel, on))
    }

    pub(super) fn by_list(&mut self, all: Vec<Moved>) -> Result<()> {
        let mut groups: BTreeMap<Group, Vec<Move>> = BTreeMap::new();
        for moved in all {
            let Moved { read, from, write, to, len, turn } = moved;
            let from = from.map_or(-1, |at| at as i64);
            let group = groups.entry(Group { turn, read, write, len }).or_default();
            group.push([from, to as i64, i64::from(turn > 0)]);
        }
        for (group, moves) in groups {
            let defines = self.types(&[("R", 0, self.reads[group.read]), ("W", 0, self.writes[group.write])])?;
            let flat: Vec<i64> = moves.iter().flatten().copied().collect();
            let mut args = vec![Arg::Read(group.read), Arg::Write(group.write), table(&flat)];
            // Columns of one operand begin anywhere in its rows.
            let places = moves.iter().fold(0, |bits, [from, to, _]| bits | from.max(&0) | to);
            args.extend(ints(&[moves.len() as u64, group.len as u64, places as u64]));
            self.spread((source::layout, "moves"), defines, (moves.len() * group.len) as u64 / 8, args);
        }
        Ok(())
    }
}

fn pieces(kernel: &Kernel, on: Where) -> Vec<Moved> {
    match kernel {
        Kernel::Permute(permute) => Layout::new(permute, on.views, on.rank).moves(),
        Kernel::Reorder { segs, batch, cols, inverse } => {
            Pieces::new(segs, on.views, on.rank, *batch as usize, *cols as usize).moves(*inverse)
        }
        Kernel::OwnRows { rows, cols, group, .. } => {
            let len = (rows * cols) as usize;
            let from = group.place(on.views, on.rank) as usize * len;
            vec![Moved { read: 0, from: Some(from), write: 0, to: 0, len, turn: 0 }]
        }
        _ => vec![],
    }
}
