//! What every op of every rank launches, worked out on the host before anything is asked of a GPU: so that the memory
//! it takes is known, and refused where it is too much.

use super::device::{Device, FunctionId, Operands, Size};
use super::exchange::{self, Between};
use super::fused::Sdpa;
use super::lower::{Action, Arg, Gemm, Launch, Lowered, Part, Where, lower};
use super::script::Linked;
use crate::error::{Error, Result};
use crate::plan::link::Place;
use crate::plan::memory::ALIGN;
use crate::plan::{Dtype, OpKind};
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// An op of a rank: the rank, and the op's node in its line.
pub type OpAt = (u32, u32);

/// One deed of an op on a stream, with addresses.
#[derive(Debug, Clone)]
pub enum Ready {
    Launch { function: FunctionId, size: Size, words: Vec<u64> },
    Gemm { gemm: Gemm, at: Operands },
    Copy { to: u64, from: u64, bytes: u64 },
    Fused { sdpa: Rc<Sdpa>, at: Vec<u64>, workspace: u64 },
}

/// Everything that is launched in a step.
pub struct Prepared {
    pub ops: Vec<(OpAt, Rc<Lowered>)>,
    /// Bytes by device: the most that one op wants of scratch memory, and all constants together.
    pub scratch: Vec<u64>,
    pub tables: Vec<u64>,
    /// Exchanges with other processes, of the rank that is here, by op.
    pub between: Vec<(u32, Between)>,
}

/// Dtypes of an op's operands.
pub fn dtypes(linked: Linked, places: &[Place]) -> Vec<Dtype> {
    places.iter().map(|p| p.dtype(linked.plan)).collect()
}

/// The launches of an op in a step; `None` for a transfer or a collective. Errors: a dtype that no kernel takes, a
/// balanced route, with the op's name.
pub fn lower_op(linked: Linked, (rank, node): OpAt, step: u64) -> Result<Option<Lowered>> {
    let line = linked.line(rank);
    let (reads, writes) = (line.reads(node as usize), line.writes(node as usize));
    let lowered = match &line.nodes[node as usize].op.kind {
        OpKind::Compute { kernel, .. } => {
            let route = kernel.routed().map(|routed| linked.plan.route_of(routed.route, rank));
            let on = Where { views: &linked.plan.views, route, rank, shared: linked.shared, fused: linked.fused };
            lower(kernel, on, &dtypes(linked, reads), &dtypes(linked, writes), step)
        }
        OpKind::Exchange { .. } => exchange::lower(linked, rank, node),
        _ => return Ok(None),
    };
    lowered.map(Some).map_err(|e| Error::device(named(linked, rank, node), e))
}

/// The name of an op in an error: rank, path and operands.
pub fn named(linked: Linked, rank: u32, node: u32) -> String {
    let line = linked.line(rank);
    let shape = |place: &Place| {
        let tensor = &linked.plan.tensors[place.tensor as usize];
        format!("{} [{}, {}] {}", tensor.name, place.rows[1] - place.rows[0], tensor.row_len(), tensor.dtype.name())
    };
    let all = |places: &[Place]| places.iter().map(shape).collect::<Vec<_>>().join(", ");
    let (reads, writes) = (line.reads(node as usize), line.writes(node as usize));
    format!("rank {rank}, {}, of {} to {}", line.path(node as usize), all(reads), all(writes))
}

impl Prepared {
    /// The launches of ranks on `devices`, of which there are `count`.
    pub fn new(linked: Linked, devices: &[u32], count: usize) -> Result<Prepared> {
        let mut all = Prepared { ops: vec![], scratch: vec![0; count], tables: vec![0; count], between: vec![] };
        let mut alike: FxHashMap<(u32, String), Rc<Lowered>> = FxHashMap::default();
        let mut constants: FxHashMap<(u32, Rc<[u8]>), ()> = FxHashMap::default();
        for rank in linked.ranks() {
            let (line, device) = (linked.line(rank), devices[rank as usize]);
            for node in 0..line.nodes.len() as u32 {
                if linked.joined && matches!(line.nodes[node as usize].op.kind, OpKind::Exchange { .. }) {
                    let between = exchange::between(linked, rank, node);
                    let between = between.map_err(|e| Error::device(named(linked, rank, node), e))?;
                    let mut own = |lowered| interned(lowered, device, &mut constants, &mut all.tables);
                    let (pack, unpack) = (own(between.pack), own(between.unpack));
                    all.between.push((node, Between { pack, unpack, ..between }));
                    continue;
                }
                let Some(name) = name(linked, rank, node) else { continue };
                let lowered = match alike.get(&(rank, name.clone())) {
                    Some(known) => known.clone(),
                    None => {
                        let Some(lowered) = lower_op(linked, (rank, node), 1)? else { continue };
                        let lowered = Rc::new(interned(lowered, device, &mut constants, &mut all.tables));
                        alike.insert((rank, name), lowered.clone());
                        lowered
                    }
                };
                let scratch = lowered.scratch.iter().map(|n| n.next_multiple_of(ALIGN)).sum::<u64>();
                all.scratch[device as usize] = all.scratch[device as usize].max(scratch);
                all.ops.push(((rank, node), lowered));
            }
        }
        Ok(all)
    }
}

impl Prepared {
    /// Ops with a product in FP8.
    pub fn in_fp8(&self) -> impl Iterator<Item = OpAt> {
        self.ops.iter().filter(|(_, lowered)| lowered.in_fp8()).map(|(op, _)| *op)
    }

    /// Bytes of what goes, and of what comes, by the exchanges of each lane: the most of any, as they run one after the
    /// other.
    pub fn rooms(&self, linked: Linked) -> FxHashMap<u16, [u64; 2]> {
        let mut rooms: FxHashMap<u16, [u64; 2]> = FxHashMap::default();
        for (node, between) in &self.between {
            let rank = linked.solo.expect("a process has one rank");
            let room = rooms.entry(linked.line(rank).nodes[*node as usize].lane).or_default();
            *room = [0, 1].map(|side| room[side].max(between.room()[side]));
        }
        rooms
    }
}

/// A name of what an op launches: ops of a rank with equal names launch the same. `None` where nothing is launched.
fn name(linked: Linked, rank: u32, node: u32) -> Option<String> {
    let line = linked.line(rank);
    let types = |places: &[Place]| dtypes(linked, places);
    match &line.nodes[node as usize].op.kind {
        OpKind::Compute { kernel, .. } => {
            Some(format!("{kernel:?} {:?} {:?}", types(line.reads(node as usize)), types(line.writes(node as usize))))
        }
        // A rank alone waits in place of an exchange.
        OpKind::Exchange { .. } if linked.waits.is_some() => None,
        OpKind::Exchange { .. } => Some(format!("exchange {node}")),
        _ => None,
    }
}

/// The launches with one copy of each constant on a device.
fn interned(
    mut lowered: Lowered,
    device: u32,
    known: &mut FxHashMap<(u32, Rc<[u8]>), ()>,
    bytes: &mut [u64],
) -> Lowered {
    let launches = lowered.actions.iter_mut().filter_map(|a| if let Action::Launch(l) = a { Some(l) } else { None });
    for arg in launches.flat_map(|launch| &mut launch.args) {
        let Arg::Table(table) = arg else { continue };
        let at = (device, table.clone());
        match known.get_key_value(&at) {
            Some(((_, same), ())) => *table = same.clone(),
            None => {
                bytes[device as usize] += (table.len() as u64).next_multiple_of(ALIGN);
                known.insert(at, ());
            }
        }
    }
    lowered
}

/// Whether what an op launches depends on the step.
pub fn changes(linked: Linked, (rank, node): OpAt) -> bool {
    let kind = &linked.line(rank).nodes[node as usize].op.kind;
    matches!(kind, OpKind::Compute { kernel, .. } if kernel.counts_steps())
}

/// Constants of one device, in one piece of memory.
pub struct Tables {
    at: u64,
    bytes: u64,
    used: u64,
    known: FxHashMap<Rc<[u8]>, u64>,
}

impl Tables {
    pub fn new(at: u64, bytes: u64) -> Tables {
        Tables { at, bytes, used: 0, known: FxHashMap::default() }
    }

    fn address<D: Device>(&mut self, device: &mut D, gpu: u32, table: &Rc<[u8]>) -> Result<u64> {
        if let Some(&at) = self.known.get(table) {
            return Ok(at);
        }
        let bytes = (table.len() as u64).next_multiple_of(ALIGN);
        assert!(self.used + bytes <= self.bytes, "{bytes} more bytes of constants than were counted");
        let at = self.at + self.used;
        device.write(gpu, at, table)?;
        self.used += bytes;
        self.known.insert(table.clone(), at);
        Ok(at)
    }
}

/// Addresses and bytes of an op's operands.
pub struct Spans {
    pub reads: Vec<(u64, u64)>,
    pub writes: Vec<(u64, u64)>,
    /// Where the device's scratch memory begins.
    pub scratch: u64,
}

/// Gives what was lowered its addresses, and loads its kernels.
pub fn resolve<D: Device>(
    device: &mut D,
    gpu: u32,
    tables: &mut Tables,
    lowered: &Lowered,
    spans: &Spans,
) -> Result<Vec<Ready>> {
    let mut scratch = vec![spans.scratch];
    lowered.scratch.iter().for_each(|n| scratch.push(scratch[scratch.len() - 1] + n.next_multiple_of(ALIGN)));
    let address = |arg: &Arg| match arg {
        Arg::Read(i) => spans.reads[*i].0,
        Arg::Write(i) => spans.writes[*i].0,
        Arg::Scratch(i) => scratch[*i],
        other => unreachable!("{other:?} is no operand"),
    };
    let mut ready = vec![];
    for action in &lowered.actions {
        match action {
            Action::Copy { read, write } => {
                let ((from, bytes), (to, _)) = (spans.reads[*read], spans.writes[*write]);
                if from != to {
                    ready.push(Ready::Copy { to, from, bytes });
                }
            }
            Action::Gemm { gemm, factors, a, b, c, bias, scales } => {
                let [a, b, c] = [a, b, c].map(|part: &Part| address(&part.of) + part.skip);
                let scales = scales.as_ref().map(|both| [address(&both[0]), address(&both[1])]);
                device.multiplies(gpu)?;
                let at = Operands { factors: *factors, a, b, c, bias: bias.as_ref().map(address), scales };
                ready.push(Ready::Gemm { gemm: gemm.clone(), at });
            }
            Action::Fused { sdpa, at, workspace } => {
                let at = at.iter().map(|part| address(&part.of) + part.skip).collect();
                let (sdpa, workspace) = (Rc::new(sdpa.clone()), address(workspace));
                ready.push(Ready::Fused { sdpa, at, workspace });
            }
            Action::Launch(launch) => {
                let mut words = vec![];
                for arg in &launch.args {
                    words.push(match arg {
                        Arg::Null => 0,
                        Arg::Int(n) => *n as u64,
                        Arg::Real(x) => x.to_bits(),
                        Arg::Table(table) => tables.address(device, gpu, table)?,
                        operand => address(operand),
                    });
                }
                let Launch { grid, threads, shared, .. } = *launch;
                let function = device.load(gpu, launch)?;
                ready.push(Ready::Launch { function, size: Size { grid, threads, shared }, words });
            }
        }
    }
    Ok(ready)
}
