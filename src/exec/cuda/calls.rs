//! What a rank's transfers and collectives are in calls of NCCL, for a process that has one rank.
//!
//! A communicator for each lane of a group, made in the order of the plan's lanes by all processes: so the order of
//! calls on one of them is the lane's own, which `check` has proven to be the same everywhere.

use super::exchange::{Between, Message};
use super::script::Linked;
use crate::error::{Error, Result};
use crate::plan::matching::LegAt;
use crate::plan::memory::ALIGN;
use crate::plan::{CollectiveKind, Direction, Dtype, Lane, OpKind};
use rustc_hash::FxHashSet;

/// A communicator: the number of its lane in the plan.
pub type Communicator = u16;

/// One call of NCCL; the calls of an op are one group. Ranks are positions in the communicator; addresses are this
/// process's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    Send {
        to: u32,
        at: u64,
        bytes: u64,
    },
    Receive {
        from: u32,
        at: u64,
        bytes: u64,
    },
    /// Gathers `bytes` of each member.
    AllGather {
        from: u64,
        to: u64,
        bytes: u64,
    },
    AllReduce {
        from: u64,
        to: u64,
        elems: u64,
        dtype: Dtype,
    },
    /// Sums, and leaves `elems` with each member.
    ReduceScatter {
        from: u64,
        to: u64,
        elems: u64,
        dtype: Dtype,
    },
}

/// Every lane that has a communicator, and the members of the one that a rank is in. No members where the rank talks to
/// nobody there, being outside of the lane's groups: a communicator takes memory, used or not, and the others of the
/// lane make theirs without it.
pub fn communicators(linked: Linked, rank: u32) -> Vec<(Communicator, Vec<u32>)> {
    let used = |lane: Communicator| linked.line(rank).nodes.iter().any(|node| node.lane == lane);
    let of = |(number, lane): (Communicator, &Lane)| match lane {
        Lane::Comm(group, _) => {
            let members = group.members(&linked.plan.views, rank);
            Some((number, if members.len() > 1 || used(number) { members } else { vec![] }))
        }
        _ => None,
    };
    (0..).zip(&linked.plan.lanes).filter_map(of).collect()
}

/// The lane of an op that communicates, its calls, and the bytes that the rank sends by them. `address` is where the
/// rank's memory begins. Errors: what NCCL has no call for.
pub fn calls(linked: Linked, rank: u32, node: u32, address: u64) -> Result<(Communicator, Vec<Call>, u64)> {
    let line = linked.line(rank);
    let op = &line.nodes[node as usize];
    let fail = |why: &str| Err(Error::device(format!("rank {rank}, {}", line.path(node as usize)), why));
    let mut calls = vec![];
    let mut sent = 0;
    match &op.op.kind {
        OpKind::Transfer { legs, .. } => {
            let group = linked.group(rank, node);
            let members = group.members(&linked.plan.views, rank);
            for (l, leg) in legs.iter().enumerate() {
                let peer = group.neighbour(&linked.plan.views, rank, leg.by);
                let peer = members.iter().position(|m| *m == peer).expect("a neighbour is a member") as u32;
                let region = linked.leg_region(rank, LegAt { node, leg: l as u16 });
                let (at, bytes) = (address + region.bytes.start, region.bytes.end - region.bytes.start);
                calls.push(match leg.dir {
                    Direction::Send => Call::Send { to: peer, at, bytes },
                    Direction::Recv => Call::Receive { from: peer, at, bytes },
                });
                sent += if leg.dir == Direction::Send && members[peer as usize] != rank { bytes } else { 0 };
            }
        }
        &OpKind::Collective { kind, .. } => {
            let members = linked.members(rank, node)?;
            let n = members.len();
            let own = members.iter().position(|m| m.0 == rank).expect("a rank is in its own group");
            let [src, dst] = [false, true].map(|dst| linked.side((rank, node), dst, 0, 1));
            let [from, to] = [&src, &dst].map(|region| address + region.bytes.start);
            let [src_bytes, dst_bytes] = [&src, &dst].map(|region| region.bytes.end - region.bytes.start);
            if src.dtype != dst.dtype {
                return fail("its source and its result are of two dtypes; NCCL takes one");
            }
            let (dtype, size) = (src.dtype, src.dtype.size());
            match kind {
                CollectiveKind::AllReduce => calls.push(Call::AllReduce { from, to, elems: src_bytes / size, dtype }),
                CollectiveKind::AllGather if dst_bytes == src_bytes * n as u64 => {
                    calls.push(Call::AllGather { from, to, bytes: src_bytes });
                }
                CollectiveKind::ReduceScatter if src_bytes == dst_bytes * n as u64 => {
                    calls.push(Call::ReduceScatter { from, to, elems: dst_bytes / size, dtype });
                }
                CollectiveKind::AllToAll => {
                    for j in 0..n {
                        let parts = [false, true].map(|dst| linked.side((rank, node), dst, j, n).bytes);
                        let [send, receive] = parts;
                        let (at, bytes) = (address + send.start, send.end - send.start);
                        calls.push(Call::Send { to: j as u32, at, bytes });
                        let (at, bytes) = (address + receive.start, receive.end - receive.start);
                        calls.push(Call::Receive { from: j as u32, at, bytes });
                    }
                }
                _ => {
                    return fail("its parts are not all of one size, which NCCL wants; choose sizes that ranks divide");
                }
            }
            // Bytes are counted as of a ring: NCCL does not say what it itself sends.
            let payload = if kind == CollectiveKind::AllGather { dst_bytes } else { src_bytes };
            sent = crate::collective::sent_bytes(kind, n, own, payload);
        }
        _ => return fail("this kind of op is not turned into calls yet"),
    }
    calls.retain(|call| !matches!(call, Call::Send { bytes: 0, .. } | Call::Receive { bytes: 0, .. }));
    Ok((op.lane, calls, sent))
}

/// Bytes of the first message between two ranks.
const WORD: u64 = 16;

/// The first calls of a communicator of `members`, as the one at `own` makes them, in memory at `room`: groups that go over
/// everything that `calls`, which are those of a step in their order, go over, and the bytes that they want there. NCCL
/// connects two ranks for all messages there will be when the first goes from one to the other (taskAppend in enqueue.cc),
/// but collectives for each algorithm by itself, which it chooses by operation, size and dtype (2.22 and newer:
/// NCCL_RUNTIME_CONNECT): so each of those that differ is made once.
pub fn first_calls(calls: &[Call], [own, members]: [u32; 2], room: u64) -> (Vec<Vec<Call>>, u64) {
    let (mut messages, mut groups, mut bytes): (Vec<Call>, Vec<Vec<Call>>, u64) = (vec![], vec![], 2 * WORD);
    for call in calls {
        match *call {
            // A member's message to itself is a copy, and no connection.
            Call::Send { to: peer, .. } | Call::Receive { from: peer, .. } if peer == own => {}
            Call::Send { to, .. } => messages.push(Call::Send { to, at: room, bytes: WORD }),
            Call::Receive { from, .. } => messages.push(Call::Receive { from, at: room + WORD, bytes: WORD }),
            collective => {
                let [reads, writes] = collective.sizes(members);
                let first = vec![collective.at(room, room + reads.next_multiple_of(ALIGN))];
                bytes = bytes.max(reads.next_multiple_of(ALIGN) + writes);
                if !groups.contains(&first) {
                    groups.push(first);
                }
            }
        }
    }
    let mut seen = FxHashSet::default();
    messages.retain(|message| seen.insert(*message));
    if !messages.is_empty() {
        groups.insert(0, messages);
    }
    (groups, bytes)
}

impl Call {
    /// Bytes that a collective reads, and bytes that it writes.
    fn sizes(self, members: u32) -> [u64; 2] {
        let all = u64::from(members);
        match self {
            Call::Send { bytes, .. } | Call::Receive { bytes, .. } => [bytes; 2],
            Call::AllGather { bytes, .. } => [bytes, all * bytes],
            Call::AllReduce { elems, dtype, .. } => [elems * dtype.size(); 2],
            Call::ReduceScatter { elems, dtype, .. } => [all, 1].map(|parts| parts * elems * dtype.size()),
        }
    }

    /// The collective on other operands.
    fn at(self, from: u64, to: u64) -> Call {
        match self {
            Call::AllGather { bytes, .. } => Call::AllGather { from, to, bytes },
            Call::AllReduce { elems, dtype, .. } => Call::AllReduce { from, to, elems, dtype },
            Call::ReduceScatter { elems, dtype, .. } => Call::ReduceScatter { from, to, elems, dtype },
            message => message,
        }
    }
}

/// An exchange's messages as one group, what goes being packed at the first address, and what comes wanted at the second.
pub fn of_exchange(between: &Between, [packed, wanted]: [u64; 2]) -> Vec<Call> {
    let send = |m: &Message| Call::Send { to: m.place, at: packed + m.at, bytes: m.bytes };
    let receive = |m: &Message| Call::Receive { from: m.place, at: wanted + m.at, bytes: m.bytes };
    between.sends.iter().map(send).chain(between.receives.iter().map(receive)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_calls_go_over_each_connection_once() {
        let dtype = Dtype::Bf16;
        let sum = |elems| Call::AllReduce { from: 70_000, to: 70_000, elems, dtype };
        let step = [
            Call::Send { to: 1, at: 4096, bytes: 1 << 20 },
            sum(100),
            Call::Receive { from: 3, at: 0, bytes: 1 << 20 },
            Call::Send { to: 2, at: 0, bytes: 8 },
            Call::Send { to: 1, at: 0, bytes: 1 << 10 },
            Call::Receive { from: 2, at: 0, bytes: 8 },
            sum(100),
            Call::AllGather { from: 0, to: 0, bytes: 1000 },
            sum(9),
        ];
        let (groups, bytes) = first_calls(&step, [2, 4], 1 << 30);
        let word = |at| (1 << 30) + at;
        let messages = vec![
            Call::Send { to: 1, at: word(0), bytes: WORD },
            Call::Receive { from: 3, at: word(WORD), bytes: WORD },
        ];
        let apart = |elems, reads: u64| Call::AllReduce { from: word(0), to: word(reads), elems, dtype };
        let gathered = Call::AllGather { from: word(0), to: word(1024), bytes: 1000 };
        assert_eq!(groups, [messages, vec![apart(100, 256)], vec![gathered], vec![apart(9, 256)]]);
        assert_eq!(bytes, 1024 + 4 * 1000);
        assert_eq!(first_calls(&[], [0, 4], 0).0, Vec::<Vec<Call>>::new());
    }
}
