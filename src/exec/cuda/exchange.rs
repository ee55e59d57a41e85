//! An exchange of a mixture-of-experts layer between ranks of one process: every member takes its rows out of the
//! others' memories, and adds up what belongs together.
//!
//! Rows end where the plan's algorithm leaves them. Its way there, over other ranks and nodes, is not gone: between
//! memories of one process it would show nothing of a network.

use super::lower::{Lowered, Sum, Term, sums};
use super::script::Linked;
use crate::error::{Error, Result};
use crate::plan::link::Place;
use crate::plan::rows::{Layout, RowId, WHOLE, place_of};
use crate::plan::{OpKind, Phase, Route};
use rustc_hash::FxHashMap;

/// What a member's exchange is about.
struct Meeting<'p> {
    route: &'p Route,
    here: u32,
    from: Layout,
    to: Layout,
    /// Whether rows of tokens go as one row for each choice.
    by_choice: bool,
    combines: bool,
}

impl<'p> Meeting<'p> {
    fn new(linked: Linked<'p>, rank: u32, node: u32) -> Result<Meeting<'p>> {
        let line = linked.line(rank);
        let OpKind::Exchange { route, algo, phase, .. } = &line.nodes[node as usize].op.kind else {
            unreachable!("only exchanges exchange")
        };
        let route = linked.plan.route_of(*route, rank);
        if !route.is_listed() {
            let why = "its route is balanced, which says how many rows go and not which; give --routing uniform";
            return Err(Error::device(format!("rank {rank}, {}", line.path(node as usize)), why));
        }
        let [from, to] = algo.ends(*phase);
        let (here, combines) = (place_of(&linked.plan.views, rank), *phase == Phase::Combine);
        Ok(Meeting { route, here, from, to, by_choice: algo.landed().by_choice(), combines })
    }

    /// Where the members have the rows of each name: by place and number, in the order they are added up.
    fn offers(&self) -> FxHashMap<RowId, Vec<(u32, u32, u32)>> {
        let mut offers: FxHashMap<RowId, Vec<(u32, u32, u32)>> = FxHashMap::default();
        for place in 0..self.route.ranks {
            for (i, id) in (0..).zip(self.from.list(self.route, place)) {
                offers.entry(id).or_default().push((place, i, id.choice));
                if id.choice != WHOLE {
                    offers.entry(id.whole()).or_default().push((place, i, id.choice));
                }
            }
        }
        // Choices in their order; what whole rows have is added in the order of the ranks.
        offers.values_mut().for_each(|all| all.sort_by_key(|&(place, i, choice)| (choice, place, i)));
        offers
    }

    /// The rows that this member gets, each with what it is made of.
    fn rows(&self, capacity: usize) -> Vec<Vec<(u32, u32, u32)>> {
        let offers = self.offers();
        let of = |id: RowId| match offers.get(&id).or_else(|| offers.get(&id.whole())) {
            // Out of a token's row several may be made: each is it, and not one of its copies.
            Some(all) if !self.combines => all.iter().filter(|o| o.0 == id.src).take(1).copied().collect(),
            Some(all) => all.clone(),
            None => vec![],
        };
        let mut rows: Vec<_> = self.to.list(self.route, self.here).into_iter().map(of).collect();
        if self.to == Layout::Tokens {
            rows.resize(capacity, vec![]);
        }
        rows
    }
}

/// What one member launches. Its reads are the buffers of all members, one member after the other.
pub fn lower(linked: Linked, rank: u32, node: u32) -> Result<Lowered> {
    let meeting = Meeting::new(linked, rank, node)?;
    let line = linked.line(rank);
    let (src, dst) = (line.reads(node as usize), line.writes(node as usize));
    let tensor = |place: &Place| &linked.plan.tensors[place.tensor as usize];
    let mut lowered = Lowered::default();
    for (b, (from, to)) in src.iter().zip(dst).enumerate() {
        let (a, z) = (tensor(from).row_len(), tensor(to).row_len());
        let rows = meeting.rows((to.rows[1] - to.rows[0]) as usize);
        let read = |place: u32| place as usize * src.len() + b;
        let ids = meeting.to.list(meeting.route, meeting.here);
        let mut all = vec![];
        for (i, terms) in rows.iter().enumerate() {
            let choice = ids.get(i).map_or(WHOLE, |id| id.choice);
            if a < z {
                // A number for each choice lands in the row of its token.
                for c in 0..z {
                    let own = terms.iter().filter(|t| u64::from(t.2) == c);
                    let terms = own.map(|&(place, row, _)| Term { read: read(place), from: u64::from(row) * a });
                    all.push(Sum { to: i as u64 * z + c, terms: terms.collect() });
                }
                continue;
            }
            // Of a token's numbers for each choice, a row of one choice takes its own.
            let skip = if a > z && meeting.by_choice { u64::from(choice) } else { 0 };
            let term = |&(place, row, _): &(u32, u32, u32)| Term { read: read(place), from: u64::from(row) * a + skip };
            all.push(Sum { to: i as u64 * z, terms: terms.iter().map(term).collect() });
        }
        sums(&mut lowered, &all, [a.min(z), b as u64], [tensor(from).dtype, tensor(to).dtype])?;
    }
    Ok(lowered)
}

/// Bytes that a member takes from each of the others: by rank.
pub fn taken(linked: Linked, rank: u32, node: u32) -> Result<Vec<(u32, u64)>> {
    let meeting = Meeting::new(linked, rank, node)?;
    let line = linked.line(rank);
    let members = linked.members(rank, node)?;
    let (src, dst) = (line.reads(node as usize), line.writes(node as usize));
    let mut bytes = vec![0u64; members.len()];
    for (from, to) in src.iter().zip(dst) {
        let [a, z] = [from, to].map(|place| &linked.plan.tensors[place.tensor as usize]);
        let row = a.row_len().min(z.row_len()) * a.dtype.size();
        for (place, _, _) in meeting.rows((to.rows[1] - to.rows[0]) as usize).into_iter().flatten() {
            bytes[place as usize] += row;
        }
    }
    let others = members.iter().zip(bytes).filter(|((member, _), _)| *member != rank);
    Ok(others.map(|((member, _), bytes)| (*member, bytes)).collect())
}
