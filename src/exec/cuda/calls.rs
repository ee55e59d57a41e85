//! What a rank's transfers and collectives are in calls of NCCL, for a process that has one rank.
//!
//! A communicator for each lane of a group, made in the order of the plan's lanes by all processes: so the order of
//! calls on one of them is the lane's own, which `check` has proven to be the same everywhere.

use super::exchange::{Between, Message};
use super::script::Linked;
use crate::error::{Error, Result};
use crate::plan::matching::LegAt;
use crate::plan::{CollectiveKind, Direction, Dtype, Lane, OpKind};

/// A communicator: the number of its lane in the plan.
pub type Communicator = u16;

/// One call; those of an op are one group. Ranks are positions in the communicator; addresses are this process's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// `bytes` of each member.
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
    /// `elems` to each member.
    ReduceScatter {
        from: u64,
        to: u64,
        elems: u64,
        dtype: Dtype,
    },
}

/// The members of every lane's communicator that a rank is in, by lane; none of a compute lane.
pub fn communicators(linked: Linked, rank: u32) -> Vec<Vec<u32>> {
    let of = |lane: &Lane| match lane {
        Lane::Comm(group, _) => group.members(&linked.plan.views, rank),
        _ => vec![],
    };
    linked.plan.lanes.iter().map(of).collect()
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
            // As a ring does it: what NCCL itself sends is not counted by it.
            let payload = if kind == CollectiveKind::AllGather { dst_bytes } else { src_bytes };
            sent = crate::collective::sent_bytes(kind, n, own, payload);
        }
        _ => return fail("this kind of op is not turned into calls yet"),
    }
    calls.retain(|call| !matches!(call, Call::Send { bytes: 0, .. } | Call::Receive { bytes: 0, .. }));
    Ok((op.lane, calls, sent))
}

/// An exchange's messages as one group, what goes being packed at the first address, and what comes wanted at the second.
pub fn of_exchange(between: &Between, [packed, wanted]: [u64; 2]) -> Vec<Call> {
    let send = |m: &Message| Call::Send { to: m.place, at: packed + m.at, bytes: m.bytes };
    let receive = |m: &Message| Call::Receive { from: m.place, at: wanted + m.at, bytes: m.bytes };
    between.sends.iter().map(send).chain(between.receives.iter().map(receive)).collect()
}
