//! Bytes that a rank of a plan sends, as integers: what the executor's transport must have counted.

use super::{exchange, part, rounds};
use crate::plan::link::{Line, Place};
use crate::plan::rows::place_of;
use crate::plan::wire::{self, Wire};
use crate::plan::{CollectiveKind, Direction, ExchangeAlgo, Lane, OpKind, Phase, Plan, TensorId};
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Bytes that `rank` sends in one step, its program being spliced in `line`.
pub fn sent_by(plan: &Plan, line: &Line, rank: u32) -> u64 {
    let mut known: FxHashMap<(CollectiveKind, u16, u64, Option<TensorId>), u64> = FxHashMap::default();
    let mut total = 0;
    for (i, node) in line.nodes.iter().enumerate() {
        let Lane::Comm(group, _) = &plan.lanes[node.lane as usize] else { continue };
        total += match &node.op.kind {
            OpKind::Transfer { legs, .. } => {
                let sends = legs.iter().filter(|l| l.dir == Direction::Send);
                let place = |buf| line.reads(i).iter().find(|p| p.named == buf).expect("a sent buffer is read");
                sends.map(|l| place(l.buf).bytes(plan)).sum()
            }
            OpKind::Collective { kind, wire, .. } => {
                let (tensor, elems) = wire::full([line.reads(i)[0], line.writes(i)[0]].map(|end| end.sized(plan)));
                let full = &plan.tensors[tensor as usize];
                // Parts of one size are alike, but for where matrices begin in them.
                let own = (*wire == Wire::Fp8).then_some(tensor);
                *known.entry((*kind, node.lane, wire.bytes(full, 0..elems), own)).or_insert_with(|| {
                    let (here, ranks) = (group.place(&plan.views, rank), group.size(&plan.views));
                    let parts = sent_parts(*kind, ranks as usize, here as usize, elems);
                    parts.map(|part| wire.bytes(full, part)).sum()
                })
            }
            OpKind::Exchange { route, algo, phase, .. } => {
                let route = plan.route_of(*route, rank);
                let row = row_bytes(plan, line, i, *algo, *phase, route.topk);
                let here = place_of(&plan.views, rank);
                let hops = exchange::hops(route, *algo, *phase);
                let rows: f64 = hops.iter().filter(|h| h.crosses() && h.from == here).map(|h| h.rows).sum();
                (rows * row as f64).round() as u64
            }
            _ => 0,
        };
    }
    total
}

/// Bytes of a row's values, and of the numbers that its choices have, as an exchange carries them; a token's numbers
/// may travel one by one.
pub fn carried(plan: &Plan, line: &Line, node: usize) -> [u64; 2] {
    let OpKind::Exchange { wire, .. } = &line.nodes[node].op.kind else { return [0, 0] };
    let travels = |(from, to): (&Place, &Place)| {
        let [a, b] = [from, to].map(|place| &plan.tensors[place.tensor as usize]);
        a.row_len().min(b.row_len()) * a.dtype.size()
    };
    let each: Vec<u64> = line.reads(node).iter().zip(line.writes(node)).map(travels).collect();
    let (values, choices) = each.split_at(if *wire == Wire::Fp8 { 2 } else { 1 });
    [values.iter().sum(), choices.iter().sum()]
}

/// Bytes of a row of an exchange on the wire.
pub fn row_bytes(plan: &Plan, line: &Line, node: usize, algo: ExchangeAlgo, phase: Phase, topk: u32) -> u64 {
    let [values, choices] = carried(plan, line, node);
    exchange::message_row(algo, phase, topk, values, choices)
}

/// The elements of a full buffer that the member at `here` of `n` sends, hop by hop.
fn sent_parts(kind: CollectiveKind, n: usize, here: usize, full: u64) -> impl Iterator<Item = Range<u64>> {
    let hops = rounds(kind, n).into_iter().flatten().filter(move |hop| hop.from == here);
    hops.map(move |hop| part(full, hop.part, n))
}
