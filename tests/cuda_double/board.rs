//! What stands for NCCL between doubles: every call is put on a board and goes on once all that it meets is there.

use foretrain::exec::cuda::calls::{Call, Communicator};
use foretrain::plan::Dtype;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// The ranks of a communicator and what of it: a message between two of them or a member's part of a collective, each
/// with how many there were before.
type Key = (Communicator, Vec<u32>, What, u64);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum What {
    Message { from: u32, to: u32 },
    Part(u32),
}

#[derive(Default)]
pub struct Board {
    put: Mutex<HashMap<Key, Vec<u8>>>,
    changed: Condvar,
}

/// One process's view of the board.
pub struct Seat {
    board: Arc<Board>,
    pub rank: u32,
    members: HashMap<Communicator, Vec<u32>>,
    /// Of each lane, by what there was, and whether it came from another.
    counts: HashMap<(Communicator, What, bool), u64>,
    /// What is connected, as NCCL does it: a direction to another member for all messages, a collective of one size.
    pub connected: HashSet<(Communicator, Connection)>,
    /// Whether something new may not be connected any more.
    pub closed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Connection {
    To(u32),
    From(u32),
    Gathers(u64),
    Reduces(u64, Dtype),
    Scatters(u64, Dtype),
}

/// What a group of calls waits for: the keys, and where each is to go.
pub struct Open(Vec<(Call, Vec<Key>)>);

impl Seat {
    pub fn new(board: &Arc<Board>, rank: u32) -> Seat {
        let (members, counts, connected) = (HashMap::new(), HashMap::new(), HashSet::new());
        Seat { board: board.clone(), rank, members, counts, connected, closed: false }
    }

    /// The members of each lane that this process has a part in.
    pub fn members(&self) -> &HashMap<Communicator, Vec<u32>> {
        &self.members
    }

    /// How many connections calls need that are not there yet.
    pub fn connect(&mut self, lane: Communicator, calls: &[Call]) -> u64 {
        let own = self.members[&lane].iter().position(|m| *m == self.rank).unwrap() as u32;
        let of = |call: &Call| match *call {
            Call::Send { to, .. } => (to != own).then_some(Connection::To(to)),
            Call::Receive { from, .. } => (from != own).then_some(Connection::From(from)),
            Call::AllGather { bytes, .. } => Some(Connection::Gathers(bytes)),
            Call::AllReduce { elems, dtype, .. } => Some(Connection::Reduces(elems, dtype)),
            Call::ReduceScatter { elems, dtype, .. } => Some(Connection::Scatters(elems, dtype)),
        };
        let mut new = 0;
        for connection in calls.iter().filter_map(of) {
            if self.connected.insert((lane, connection)) {
                assert!(!self.closed, "lane {lane}: {connection:?} is connected too late");
                new += 1;
            }
        }
        new
    }

    pub fn join(&mut self, lane: Communicator, members: &[u32]) {
        assert!(members.contains(&self.rank), "rank {} is not among {members:?}", self.rank);
        assert!(self.members.insert(lane, members.to_vec()).is_none(), "lane {lane} is joined twice");
    }

    fn key(&mut self, lane: Communicator, what: What, comes: bool) -> Key {
        let count = self.counts.entry((lane, what.clone(), comes)).or_default();
        *count += 1;
        (lane, self.members[&lane].clone(), what, *count)
    }

    /// Puts up what this process has for a group of calls; `read` reads its memory.
    pub fn put(&mut self, lane: Communicator, calls: &[Call], read: impl Fn(u64, u64) -> Vec<u8>) -> Open {
        let own = self.members[&lane].iter().position(|m| *m == self.rank).unwrap() as u32;
        let n = self.members[&lane].len() as u32;
        let mut open = vec![];
        for &call in calls {
            let (put, wanted) = match call {
                Call::Send { to, at, bytes } => {
                    assert!(to < n, "nobody is {to} of {n}");
                    (Some((self.key(lane, What::Message { from: own, to }, false), read(at, bytes))), vec![])
                }
                Call::Receive { from, .. } => (None, vec![self.key(lane, What::Message { from, to: own }, true)]),
                Call::AllGather { from, bytes, .. } => self.part(lane, own, n, read(from, bytes)),
                Call::AllReduce { from, elems, dtype, .. } => self.part(lane, own, n, read(from, elems * dtype.size())),
                Call::ReduceScatter { from, elems, dtype, .. } => {
                    self.part(lane, own, n, read(from, u64::from(n) * elems * dtype.size()))
                }
            };
            if let Some((key, data)) = put {
                assert!(self.board.put.lock().unwrap().insert(key, data).is_none());
                self.board.changed.notify_all();
            }
            open.push((call, wanted));
        }
        Open(open)
    }

    fn part(&mut self, lane: Communicator, own: u32, n: u32, data: Vec<u8>) -> (Option<(Key, Vec<u8>)>, Vec<Key>) {
        let keys: Vec<Key> = (0..n).map(|of| self.key(lane, What::Part(of), true)).collect();
        (Some((keys[own as usize].clone(), data)), keys)
    }

    pub fn is_there(&self, open: &Open) -> bool {
        let put = self.board.put.lock().unwrap();
        open.0.iter().flat_map(|(_, keys)| keys).all(|key| put.contains_key(key))
    }

    /// Waits a little for something new.
    pub fn wait(&self) {
        let put = self.board.put.lock().unwrap();
        drop(self.board.changed.wait_timeout(put, Duration::from_millis(2)).unwrap());
    }

    /// What is to be written where, all being there.
    pub fn take(&self, open: &Open) -> Vec<(u64, Vec<u8>)> {
        let put = self.board.put.lock().unwrap();
        let of = |(call, keys): &(Call, Vec<Key>)| {
            let parts: Vec<&Vec<u8>> = keys.iter().map(|key| &put[key]).collect();
            match *call {
                Call::Send { .. } => None,
                Call::Receive { at, bytes, .. } => {
                    assert_eq!(parts[0].len() as u64, bytes, "a message of another size: {call:?}");
                    Some((at, parts[0].clone()))
                }
                Call::AllGather { to, .. } => Some((to, parts.into_iter().flatten().copied().collect())),
                Call::AllReduce { to, dtype, .. } => Some((to, sum(&parts, dtype))),
                Call::ReduceScatter { to, elems, dtype, .. } => {
                    let bytes = (elems * dtype.size()) as usize;
                    let own = keys.iter().find(|key| key.1[part_of(key)] == self.rank).unwrap();
                    let at = part_of(own) * bytes;
                    Some((to, sum(&parts, dtype)[at..at + bytes].to_vec()))
                }
            }
        };
        open.0.iter().filter_map(of).collect()
    }
}

fn part_of(key: &Key) -> usize {
    let What::Part(of) = key.2 else { panic!("{key:?} is no part") };
    of as usize
}

/// In f32, rounded at the end.
fn sum(parts: &[&Vec<u8>], dtype: Dtype) -> Vec<u8> {
    assert!(parts.iter().all(|part| part.len() == parts[0].len()), "parts of several sizes");
    let size = dtype.size() as usize;
    let float = |b: &[u8]| {
        if size == 2 { f32::from_le_bytes([0, 0, b[0], b[1]]) } else { f32::from_le_bytes(b.try_into().unwrap()) }
    };
    let mut out = vec![];
    for at in (0..parts[0].len()).step_by(size) {
        let sum: f32 = parts.iter().map(|part| float(&part[at..at + size])).sum();
        match dtype {
            Dtype::Bf16 => {
                let bits = sum.to_bits();
                out.extend((((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes());
            }
            Dtype::F32 => out.extend(sum.to_le_bytes()),
            other => panic!("no sum of {other:?}"),
        }
    }
    out
}
