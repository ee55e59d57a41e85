//! A process among others, before its first step: the connections that its messages go over are made, its calls are worked
//! out, and what libraries do at first they have done.
//!
//! **Between GPUs this is unverified**: it has run on doubles of the device, whose board takes memory for each connection
//! and refuses those that come too late (`tests/cuda_joined.rs`).

use super::super::blas;
use super::super::calls::{Call, Communicator, calls, communicators, first_calls, of_exchange};
use super::super::device::Device;
use super::super::exchange::Between;
use super::super::prepare::{Prepared, Ready, Spans, named, resolve};
use super::super::script::{Command, Linked, Script};
use super::{Session, Talk};
use crate::error::{Error, Result};
use crate::plan::OpKind;
use crate::plan::link::Place;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;

/// Makes the communicators of this process and has NCCL connect everything that a step goes over: connections that were made
/// only when they are first used could wait for each other, since the host waits for them, and what each rank comes to first
/// is another lane. No other: a pair of ranks takes up to 32 channels of 12 MiB for each direction and communicator
/// (NVIDIA/nccl#1685). All ranks do it at once, lane after lane in the plan's order; on a lane whoever sends to somebody
/// is received from, since `check` has matched them. The memory that it takes is taken before the rank's own, so that what
/// is free then is free. Errors: NCCL's; where it fails on one rank alone the others wait until that one's process ends and
/// NCCL finds its sockets closed.
pub fn connect<D: Device>(device: &mut D, linked: Linked, script: &Script, prepared: &Prepared) -> Result<()> {
    let rank = linked.solo.expect("a process has one rank");
    let members = communicators(linked, rank);
    for (lane, members) in &members {
        device.communicator(*lane, rank, members)?;
    }
    let used = by_lane(linked, script, prepared)?;
    let first = |room: u64| {
        let used = &used;
        members.iter().filter_map(move |(lane, all)| {
            let own = all.iter().position(|member| *member == rank)?;
            Some((*lane, first_calls(used.get(lane)?, [own as u32, all.len() as u32], room)))
        })
    };
    let bytes = first(0).map(|(_, (_, bytes))| bytes).max().unwrap_or(0);
    let (stream, room) = (device.stream(0)?, device.allocate(0, bytes)?);
    for (lane, (groups, _)) in first(room) {
        groups.iter().try_for_each(|group| device.call(stream, lane, group))?;
        device.synchronize()?;
    }
    // The room is given back: nothing else is there yet.
    device.clear()
}

/// The calls of a step in the order of each lane, their addresses counted from the beginning of the rank's memory.
fn by_lane(linked: Linked, script: &Script, prepared: &Prepared) -> Result<BTreeMap<Communicator, Vec<Call>>> {
    let between: FxHashMap<u32, &Between> = prepared.between.iter().map(|(node, between)| (*node, between)).collect();
    let mut lanes: BTreeMap<Communicator, Vec<Call>> = BTreeMap::new();
    for command in &script.commands {
        let Command::Call { rank, node, .. } = command else { continue };
        let (lane, calls) = match between.get(node) {
            Some(between) => (linked.line(*rank).nodes[*node as usize].lane, of_exchange(between, [0, 0])),
            None => calls(linked, *rank, *node, 0).map(|(lane, calls, _)| (lane, calls))?,
        };
        lanes.entry(lane).or_default().extend(calls);
    }
    Ok(lanes)
}

impl<D: Device> Session<'_, '_, D> {
    /// Works out the ops between this process and others. Memory is filled after this.
    pub fn acquaint(&mut self) -> Result<()> {
        self.warm_libraries()?;
        for command in &self.script.commands {
            let Command::Call { rank, node, .. } = command else { continue };
            if let OpKind::Exchange { .. } = self.linked.line(*rank).nodes[*node as usize].op.kind {
                continue;
            }
            let (lane, calls, sent) = calls(self.linked, *rank, *node, self.bases[*rank as usize])?;
            self.talks.insert(*node, Talk { lane, pack: vec![], calls, unpack: vec![], sent });
        }
        for (node, between) in std::mem::take(&mut self.between) {
            let talk = self.exchange(node, &between)?;
            self.talks.insert(node, talk);
        }
        Ok(())
    }

    /// One call of each kind of a library, whatever its operands hold. The driver loads a library's kernels when they are
    /// first launched, and may wait for the whole GPU to do it (CUDA C++ Programming Guide, "Lazy Loading", "Concurrent
    /// Execution"): later there could be messages under way, which wait for what this process has not handed over yet.
    fn warm_libraries(&mut self) -> Result<()> {
        let mut seen = FxHashSet::default();
        let mut calls = vec![];
        for one in self.ready.values().flatten() {
            let kind = match one {
                // Products differ by what an algorithm is chosen by: each algorithm is a kernel of its own.
                Ready::Gemm { gemm, at } => format!("{:?}", blas::shape(gemm, *at)),
                Ready::Fused { sdpa, .. } => format!("{sdpa:?}"),
                Ready::Launch { .. } | Ready::Copy { .. } => continue,
            };
            if seen.insert(kind) {
                calls.push(one.clone());
            }
        }
        let stream = self.device.stream(0)?;
        self.hand_over(stream, &calls)?;
        self.device.synchronize()
    }

    /// The deeds and calls of an exchange with other processes: on its own buffers, and those of its lane.
    fn exchange(&mut self, node: u32, between: &Between) -> Result<Talk> {
        let rank = self.linked.solo.expect("a process has one rank");
        let line = self.linked.line(rank);
        let lane = line.nodes[node as usize].lane;
        let room = self.rooms[&lane];
        let span = |place: &Place| self.address(&self.linked.region(rank, place));
        let reads: Vec<_> = line.reads(node as usize).iter().map(span).collect();
        let writes = line.writes(node as usize).iter().map(span).collect();
        let [packed, come] = [0, 1].map(|side| -> Vec<(u64, u64)> {
            let pieces = between.pieces[side].windows(2);
            pieces.map(|at| (room[side] + at[0], at[1] - at[0])).collect()
        });
        let goes = Spans { reads: reads.clone(), writes: packed, scratch: 0 };
        let comes = Spans { reads: [reads, come].concat(), writes, scratch: 0 };
        let tables = &mut self.tables[0];
        let named = |e| Error::device(named(self.linked, rank, node), e);
        let pack = resolve(self.device, 0, tables, &between.pack, &goes).map_err(named)?;
        let unpack = resolve(self.device, 0, tables, &between.unpack, &comes).map_err(named)?;
        Ok(Talk { lane, pack, calls: of_exchange(between, room), unpack, sent: between.sent() })
    }
}
