//! An exchange of a mixture-of-experts layer under way on one rank: real rows in real messages, forwarded and summed
//! where the algorithm says so.

use super::arena::{Arena, Data};
use super::shared::Shared;
use super::transport::Key;
use crate::collective::count::row_bytes;
use crate::collective::forward::{Message, Round};
use crate::error::{Error, Result};
use crate::plan::link::{Line, Place};
use crate::plan::rows::{RowId, WHOLE, place_of};
use crate::plan::{Dtype, Group, Layout, OpKind, Phase, Route};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The values of one row in each of the buffers.
type Row = Vec<Data>;

pub struct Exchange {
    pub node: u32,
    path: String,
    rank: u32,
    members: Vec<u32>,
    here: u32,
    route: Route,
    phase: Phase,
    from: Layout,
    to: Layout,
    src: Vec<Place>,
    dst: Vec<Place>,
    /// Dtype and number of elements of a row of each buffer, as it travels.
    widths: Vec<(Dtype, u64)>,
    /// Whether a buffer of tokens has a number for each choice, which travel one by one.
    spread: Vec<bool>,
    /// Bytes that a row brings besides its values.
    extra: u64,
    rounds: Arc<Vec<Round>>,
    round: usize,
    sent: bool,
    running: bool,
    /// Rows that this rank has at the moment, its own and those that came.
    held: FxHashMap<RowId, Row>,
    /// Messages of the round, by sender and number, that have arrived.
    arrived: BTreeMap<(u32, u32), Vec<u8>>,
}

impl Exchange {
    /// Starts the exchange of an op. Errors: its route is balanced, which does not say which rows go.
    pub fn start(shared: &Shared, rank: u32, line: &Line, node: u32, group: &Group, arena: &Arena) -> Result<Exchange> {
        let OpKind::Exchange { route: number, algo, phase, .. } = &line.nodes[node as usize].op.kind else {
            unreachable!("only exchanges exchange")
        };
        let (plan, path) = (shared.plan, line.path(node as usize));
        let route = plan.route_of(*number, rank).clone();
        if !route.is_listed() {
            let why = "its route is balanced, which says how many rows go and not which; give --routing uniform";
            return Err(Error::device(format!("rank {rank}, {path}"), why));
        }
        let members = group.members(&plan.views, rank);
        let [from, to] = algo.ends(*phase);
        let (src, dst) = (line.reads(node as usize), line.writes(node as usize));
        let tensor = |place: &Place| &plan.tensors[place.tensor as usize];
        let width = |(a, b): (&Place, &Place)| (tensor(a).dtype, tensor(a).row_len().min(tensor(b).row_len()));
        let mut exchange = Exchange {
            node,
            path,
            rank,
            here: place_of(&plan.views, rank),
            rounds: shared.rounds_of(*number, rank, *algo, *phase),
            phase: *phase,
            from,
            to,
            widths: src.iter().zip(dst).map(width).collect(),
            spread: src.iter().zip(dst).map(|(a, b)| tensor(a).row_len() < tensor(b).row_len()).collect(),
            src: src.to_vec(),
            dst: dst.to_vec(),
            extra: 0,
            round: 0,
            sent: false,
            running: false,
            held: FxHashMap::default(),
            arrived: BTreeMap::new(),
            members,
            route,
        };
        let values: u64 = exchange.widths.iter().map(|(dtype, elems)| dtype.size() * elems).sum();
        exchange.extra = row_bytes(plan, line, node as usize, *algo, *phase, exchange.route.topk) - values;
        exchange.hold(arena, algo.landed().by_choice());
        shared.hub.start(exchange.meeting(), rank, &exchange.members);
        Ok(exchange)
    }

    fn meeting(&self) -> (u32, u32) {
        (self.members[0], self.node)
    }

    pub fn done(&self) -> bool {
        self.running && self.round == self.rounds.len()
    }

    pub fn waits_for(&self, shared: &Shared) -> String {
        if !self.running {
            return format!("{} to start the {}", shared.hub.missing(self.meeting(), &self.members), self.phase.name());
        }
        let open = self.messages(|m| m.to == self.here).into_iter();
        let open = open.filter(|(number, m)| !self.arrived.contains_key(&(m.from, *number)));
        let mut from: Vec<u32> = open.map(|(_, m)| self.members[m.from as usize]).collect();
        from.dedup();
        format!("rows of round {} from ranks {from:?}", self.round)
    }

    /// Takes up the rank's own rows; where rows travel by choice, one for each choice of a token.
    fn hold(&mut self, arena: &Arena, by_choice: bool) {
        for (i, id) in self.from.list(&self.route, self.here).into_iter().enumerate() {
            let row: Row = self.src.iter().map(|place| arena.row(place, i as u64)).collect();
            if id.choice != WHOLE || !by_choice {
                self.held.insert(id, row);
                continue;
            }
            for choice in 0..self.route.topk {
                let own = |(data, width): (&Data, &(Dtype, u64))| match data.len() == width.1 {
                    true => data.clone(),
                    false => data.part(u64::from(choice)..u64::from(choice) + 1),
                };
                self.held.insert(RowId { choice, ..id }, row.iter().zip(&self.widths).map(own).collect());
            }
        }
    }

    /// Moves the exchange on as far as messages allow; returns whether it moved. Errors: rows that do not fit where
    /// they belong.
    pub fn poll(&mut self, shared: &Shared, arena: &mut Arena) -> Result<bool> {
        let mut moved = false;
        if !self.running {
            if shared.hub.started(self.meeting()) < self.members.len() as u32 {
                return Ok(false);
            }
            self.running = true;
            moved = true;
        }
        while self.round < self.rounds.len() {
            if !self.sent {
                self.send(shared)?;
                (self.sent, moved) = (true, true);
            }
            if !self.receive(shared) {
                return Ok(moved);
            }
            self.take_in();
            (self.round, self.sent, moved) = (self.round + 1, false, true);
        }
        self.land(arena)?;
        Ok(moved)
    }

    /// The messages of the round that `ours` wants, each with its number among those between the same two ranks.
    fn messages(&self, ours: impl Fn(&Message) -> bool) -> Vec<(u32, &Message)> {
        let mut counts: FxHashMap<(u32, u32), u32> = FxHashMap::default();
        let mut number = |m: &Message| {
            let count = counts.entry((m.from, m.to)).or_default();
            *count += 1;
            *count - 1
        };
        self.rounds[self.round].iter().filter(|m| ours(m)).map(|m| (number(m), m)).collect()
    }

    fn key(&self, message: &Message, number: u32) -> Key {
        let [from, to] = [message.from, message.to].map(|place| self.members[place as usize]);
        Key { from, to, node: self.node, part: (self.round as u32) << 24 | number }
    }

    fn send(&mut self, shared: &Shared) -> Result<()> {
        let mut gone = vec![];
        for (number, message) in self.messages(|m| m.from == self.here) {
            let mut bytes = vec![];
            for id in &message.rows {
                let row = self.held.get(id).ok_or_else(|| {
                    let why = format!("row {id:?} is to be sent and is not here");
                    Error::device(format!("rank {}, {}", self.rank, self.path), why)
                })?;
                row.iter().for_each(|data| bytes.extend(data.to_bytes()));
                bytes.resize(bytes.len() + self.extra as usize, 0);
                gone.push(*id);
            }
            shared.hub.send(self.key(message, number), Data::U8(bytes), number);
        }
        // A sum that has gone on is added to no more.
        if self.phase == Phase::Combine {
            gone.iter().for_each(|id| drop(self.held.remove(id)));
        }
        Ok(())
    }

    /// Receives the messages of the round that have come; returns whether all of them have.
    fn receive(&mut self, shared: &Shared) -> bool {
        let expected: Vec<(u32, u32, Key)> =
            self.messages(|m| m.to == self.here).iter().map(|(n, m)| (m.from, *n, self.key(m, *n))).collect();
        for (from, number, key) in &expected {
            if self.arrived.contains_key(&(*from, *number)) {
                continue;
            }
            if let Some((Data::U8(bytes), _)) = shared.hub.receive(*key, false) {
                self.arrived.insert((*from, *number), bytes);
            }
        }
        self.arrived.len() == expected.len()
    }

    /// Adds what arrived to what is here, in the order of the ranks it came from.
    fn take_in(&mut self) {
        let mut incoming: BTreeMap<RowId, Vec<(u32, Row)>> = BTreeMap::new();
        let arrived = std::mem::take(&mut self.arrived);
        for (number, message) in self.messages(|m| m.to == self.here) {
            let bytes = &arrived[&(message.from, number)];
            for (id, bytes) in message.rows.iter().zip(bytes.chunks(bytes.len() / message.rows.len())) {
                incoming.entry(*id).or_default().push((message.from, self.unpack(bytes)));
            }
        }
        for (id, mut rows) in incoming {
            rows.extend(self.held.remove(&id).map(|row| (self.here, row)));
            rows.sort_by_key(|row| row.0);
            self.held.insert(id, sum(rows.into_iter().map(|row| row.1)));
        }
    }

    fn unpack(&self, bytes: &[u8]) -> Row {
        let mut at = 0;
        let part = |&(dtype, elems): &(Dtype, u64)| {
            let size = (elems * dtype.size()) as usize;
            at += size;
            Data::from_bytes(&bytes[at - size..at], dtype)
        };
        self.widths.iter().map(part).collect()
    }

    /// Writes the rows where they belong; a token that nobody computed anything for gets zeros.
    fn land(&mut self, arena: &mut Arena) -> Result<()> {
        let path = format!("rank {}, {}", self.rank, self.path);
        let list = self.to.list(&self.route, self.here);
        let rows = if self.to == Layout::Tokens { arena.rows(&self.dst[0]) } else { list.len() as u64 };
        for i in 0..rows {
            let row = list.get(i as usize).map(|&id| self.landed(id)).unwrap_or_default();
            for (place, data) in self.dst.iter().zip(row.into_iter().map(Some).chain(std::iter::repeat(None))) {
                arena.put_row(place, i, data).map_err(|why| Error::device(&path, why))?;
            }
        }
        Ok(())
    }

    /// A row as it lands: itself, or made of the choices of its token.
    fn landed(&self, id: RowId) -> Row {
        if let Some(row) = self.held.get(&id) {
            return row.clone();
        }
        let of = |choice| self.held.get(&RowId { choice, ..id });
        let choices: Vec<(u32, &Row)> = (0..self.route.topk).filter_map(|c| of(c).map(|row| (c, row))).collect();
        let Some((_, first)) = choices.first() else { return vec![] };
        let each = |i: usize| match self.spread[i] {
            true => {
                let mut all = vec![0.0; self.route.topk as usize];
                choices.iter().for_each(|(c, row)| all[*c as usize] = row[i].to_f64()[0]);
                Data::from_f64(&all, self.widths[i].0)
            }
            false => sum(choices.iter().map(|(_, row)| vec![row[i].clone()])).remove(0),
        };
        (0..first.len()).map(each).collect()
    }
}

/// The sum of rows in the order given: what is kept in two bytes is added in four, and rounded once.
fn sum(mut rows: impl Iterator<Item = Row>) -> Row {
    let first = rows.next().expect("a row at least");
    let Some(second) = rows.next() else { return first };
    let wide = |row: Row| row.into_iter().map(Data::widened).collect::<Row>();
    let dtypes: Vec<Dtype> = first.iter().map(Data::dtype).collect();
    let total = std::iter::once(second).chain(rows).fold(wide(first), |mut sum, row| {
        sum.iter_mut().zip(wide(row)).for_each(|(sum, row)| sum.add(&row));
        sum
    });
    total.into_iter().zip(dtypes).map(|(data, dtype)| data.narrowed(dtype)).collect()
}
