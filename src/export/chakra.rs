//! Execution traces in the format of MLCommons Chakra (schema/protobuf/et_def.proto), as ASTRA-sim reads them: a file
//! `<prefix>.<rank>.et` for each rank, metadata and then nodes, each with its length before it.
//!
//! An op is a node, a transfer a node for each of its sends and receives. What an op waits for are its `data_deps`.
//! `comm_size` is what ASTRA-sim takes it for: of an all-gather what a member brings, else the whole buffer. Sends meet
//! receives by (source, destination, tag), and the k-th on a lane between two ranks has the same tag on both. Groups are
//! numbers, whose members stand in `comm_group.json` (ASTRA-sim: `--comm-group-configuration`). Durations are whole
//! microseconds in the format; the attribute `duration_ps` loses nothing.
//!
//! Held field by field against et_def.proto of mlcommons/chakra@6dc63e1 (newer fields of storage are not written), its
//! feeder (src/feeder/et_feeder{,_node}.cpp @02da5d0) and ASTRA-sim's own (astra-sim/astra-sim@2aa2bbd feeder_v3,
//! @0383c20 workload/Workload.cc). What they make of it:
//!
//! * Only `data_deps` hold a node back in Chakra's feeder, so the order of lanes is in them, too; `ctrl_deps` stay empty.
//! * A node of either feeder that is not told to be none is an op of the CPU's: `is_cpu_op` is written always. The types
//!   of values are those that Chakra's feeder asks for: int32 of `comm_src`, `comm_dst` and `comm_tag`, int64 of
//!   `comm_type`, `comm_size` and `num_ops`, uint64 of `tensor_size`.
//! * Of what may be issued ASTRA-sim takes the lowest number first, one kernel at a time and one send or collective at a
//!   time, receives not counted: transfers that overlap here take turns there.
//! * Group 0 and no name are all ranks there, so that groups count from 1. It replays `duration_micros` (none counts as
//!   1 ns) or, with its roofline, works out kernels of `num_ops` and `tensor_size`; how long communication takes is its own.
//!
//! tests/chakra.rs plays the files by these rules; ASTRA-sim itself has not been run.

use crate::act::{picoseconds, work_of};
use crate::error::{Error, Result};
use crate::plan::link::{AtomTable, Line};
use crate::plan::*;
use crate::timeline::{Class, Span, Timeline};
use prost::Message;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The release of the schema that it was written by.
pub const VERSION: &str = "0.0.4";
/// A file a rank: of more ranks than this nobody wants them.
pub const MOST_RANKS: u32 = 4096;
/// Nobody wants to find a disk full of them.
const MOST_BYTES: u64 = 8_000_000_000;

#[derive(Clone, PartialEq, Message)]
pub struct GlobalMetadata {
    #[prost(string, tag = "1")]
    pub version: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Attribute {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(oneof = "Value", tags = "7, 9, 13, 27, 29")]
    pub value: Option<Value>,
}

/// The kinds of values that are written here, of those that the schema has.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Value {
    #[prost(int32, tag = "7")]
    Int32(i32),
    #[prost(int64, tag = "9")]
    Int64(i64),
    #[prost(uint64, tag = "13")]
    Uint64(u64),
    #[prost(bool, tag = "27")]
    Bool(bool),
    #[prost(string, tag = "29")]
    Text(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum NodeType {
    Invalid = 0,
    Metadata = 1,
    MemLoad = 2,
    MemStore = 3,
    Comp = 4,
    CommSend = 5,
    CommRecv = 6,
    CommColl = 7,
}

#[derive(Clone, PartialEq, Message)]
pub struct Node {
    #[prost(uint64, tag = "1")]
    pub id: u64,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(enumeration = "NodeType", tag = "3")]
    pub kind: i32,
    #[prost(uint64, repeated, tag = "4")]
    pub ctrl_deps: Vec<u64>,
    #[prost(uint64, repeated, tag = "5")]
    pub data_deps: Vec<u64>,
    #[prost(uint64, tag = "6")]
    pub start_time_micros: u64,
    #[prost(uint64, tag = "7")]
    pub duration_micros: u64,
    #[prost(message, repeated, tag = "10")]
    pub attr: Vec<Attribute>,
}

impl Node {
    /// The value of an attribute.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.attr.iter().find(|a| a.name == name)?.value.as_ref()
    }

    fn with(mut self, name: &str, value: Value) -> Node {
        self.attr.push(Attribute { name: name.into(), value: Some(value) });
        self
    }
}

/// CollectiveCommType of the schema.
fn number(kind: CollectiveKind) -> i64 {
    match kind {
        CollectiveKind::AllReduce => 0,
        CollectiveKind::AllGather => 2,
        CollectiveKind::AllToAll => 6,
        CollectiveKind::ReduceScatter => 7,
    }
}

/// Writes a trace of every rank of a timeline with spans, `class_of` saying whose each rank's are. Errors: too many
/// ranks, a timeline without spans, a file that cannot be written.
pub fn write(dir: &Path, plan: &Plan, timeline: &Timeline, class_of: &[u32]) -> Result<Vec<PathBuf>> {
    if plan.ranks() > MOST_RANKS {
        let why = format!("{} ranks would be as many files; use {MOST_RANKS} or fewer", plan.ranks());
        return Err(Error::spec("--chakra", "gpus", why));
    }
    std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
    let atoms = AtomTable::new(plan)?;
    let mut lines: BTreeMap<u32, Line> = BTreeMap::new();
    let (mut groups, mut written) = (Groups::default(), vec![]);
    for rank in 0..plan.ranks() {
        let program = plan.program_of(rank);
        if let std::collections::btree_map::Entry::Vacant(new) = lines.entry(program) {
            new.insert(Line::program(plan, &atoms, program)?);
        }
        let class = &timeline.classes[class_of[rank as usize] as usize];
        let nodes = Trace { plan, line: &lines[&program], rank, class, groups: &mut groups }.nodes()?;
        let mut bytes = GlobalMetadata { version: VERSION.into() }.encode_length_delimited_to_vec();
        nodes.iter().for_each(|node| bytes.extend(node.encode_length_delimited_to_vec()));
        let all = bytes.len() as u64 * u64::from(plan.ranks());
        if rank == 0 && all > MOST_BYTES {
            let why = format!(
                "a file of {:.0} MB for each of {} ranks makes {:.0} GB; a smaller --global-batch, fewer layers or GPUs make less",
                bytes.len() as f64 * 1e-6,
                plan.ranks(),
                all as f64 * 1e-9
            );
            return Err(Error::spec("--chakra", "size", why));
        }
        let path = dir.join(format!("foretrain.{rank}.et"));
        std::fs::write(&path, bytes).map_err(Error::io(&path))?;
        written.push(path);
    }
    let path = dir.join("comm_group.json");
    let text = serde_json::to_string_pretty(&groups.named()).expect("JSON from plain data");
    std::fs::write(&path, text + "\n").map_err(Error::io(&path))?;
    written.push(path);
    Ok(written)
}

/// What a file holds. Errors: bytes that are no trace.
pub fn read(path: &Path) -> Result<(GlobalMetadata, Vec<Node>)> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    let wrong = |e: prost::DecodeError| Error::spec(path.display().to_string(), "trace", e.to_string());
    let mut rest = bytes.as_slice();
    let metadata = GlobalMetadata::decode_length_delimited(&mut rest).map_err(wrong)?;
    let mut nodes = vec![];
    while !rest.is_empty() {
        nodes.push(Node::decode_length_delimited(&mut rest).map_err(wrong)?);
    }
    Ok((metadata, nodes))
}

/// Groups of ranks by number.
#[derive(Default)]
struct Groups(BTreeMap<Vec<u32>, usize>);

impl Groups {
    fn name(&mut self, members: Vec<u32>) -> String {
        // ASTRA-sim's groups count from 1.
        let next = self.0.len() + 1;
        self.0.entry(members).or_insert(next).to_string()
    }

    fn named(&self) -> BTreeMap<String, &Vec<u32>> {
        self.0.iter().map(|(members, number)| (number.to_string(), members)).collect()
    }
}

/// The trace of one rank while it is made.
struct Trace<'a, 'p> {
    plan: &'p Plan,
    line: &'a Line<'p>,
    rank: u32,
    class: &'a Class,
    groups: &'a mut Groups,
}

impl Trace<'_, '_> {
    fn nodes(mut self) -> Result<Vec<Node>> {
        if self.class.spans.len() != self.line.nodes.len() {
            let why =
                format!("{} of {} ops have a time; simulate with spans", self.class.spans.len(), self.line.nodes.len());
            return Err(Error::spec("--chakra", "timeline", why));
        }
        let mut all: Vec<Node> = vec![];
        // Nodes of every op.
        let mut of: Vec<std::ops::Range<u64>> = Vec::with_capacity(self.line.nodes.len());
        let mut turns: FxHashMap<(u16, u32, u32), u32> = FxHashMap::default();
        for op in 0..self.line.nodes.len() {
            let data_deps: Vec<u64> = self.line.preds(op).iter().flat_map(|&p| of[p as usize].clone()).collect();
            let first = all.len() as u64;
            for made in self.op(op, &mut turns) {
                let id = all.len() as u64;
                all.push(Node { id, data_deps: data_deps.clone(), ..made });
            }
            of.push(first..all.len() as u64);
        }
        Ok(all)
    }

    fn op(&mut self, op: usize, turns: &mut FxHashMap<(u16, u32, u32), u32>) -> Vec<Node> {
        let (line, plan, span) = (self.line, self.plan, &self.class.spans[op]);
        let node = &line.nodes[op];
        let moved = |places: &[link::Place]| places.iter().map(|p| p.bytes(plan)).sum::<u64>();
        let group = match &plan.lanes[node.lane as usize] {
            Lane::Comm(group, _) => Some(group),
            Lane::Compute(_) | Lane::Copy(_) | Lane::Host => None,
        };
        match (&node.op.kind, group) {
            (OpKind::Transfer { legs, .. }, Some(group)) => {
                let leg = |leg: &Leg| {
                    let mut places = line.reads(op).iter().chain(line.writes(op));
                    let bytes = places.find(|p| p.named == leg.buf).map_or(0, |p| p.bytes(plan));
                    let peer = group.neighbour(&plan.views, self.rank, leg.by);
                    let (kind, from, to) = match leg.dir {
                        Direction::Send => (NodeType::CommSend, self.rank, peer),
                        Direction::Recv => (NodeType::CommRecv, peer, self.rank),
                    };
                    let turn = turns.entry((node.lane, from, to)).or_default();
                    let tag = i32::from(node.lane) << 22 | *turn as i32;
                    *turn += 1;
                    plain(span, kind)
                        .with("comm_src", Value::Int32(from as i32))
                        .with("comm_dst", Value::Int32(to as i32))
                        .with("comm_tag", Value::Int32(tag))
                        .with("comm_size", Value::Int64(bytes as i64))
                };
                legs.iter().map(leg).collect()
            }
            (OpKind::Collective { kind, wire, .. }, Some(group)) => {
                let members = group.members(&plan.views, self.rank);
                let full = wire.full_bytes(plan, [line.reads(op)[0], line.writes(op)[0]].map(|end| end.sized(plan)));
                let size = if *kind == CollectiveKind::AllGather { full / members.len() as u64 } else { full };
                vec![self.whole(span, number(*kind), size, members)]
            }
            (OpKind::Exchange { .. }, Some(group)) => {
                let members = group.members(&plan.views, self.rank);
                vec![self.whole(span, number(CollectiveKind::AllToAll), moved(line.reads(op)), members)]
            }
            // As the schema has it: what comes from the remote memory is loaded, what goes there is stored.
            (OpKind::Copy { .. }, _) => {
                let stores = plan.lanes[node.lane as usize] == Lane::Copy(Toward::Host);
                let kind = if stores { NodeType::MemStore } else { NodeType::MemLoad };
                vec![plain(span, kind).with("tensor_size", Value::Uint64(moved(line.reads(op))))]
            }
            _ => {
                let work = work_of(plan, line, op, self.rank).map(|(work, _)| work);
                let flops = work.map_or(0, |w| w.flops) as i64;
                let bytes = work.map_or(0, |w| w.bytes);
                let node = plain(span, NodeType::Comp).with("num_ops", Value::Int64(flops));
                vec![node.with("tensor_size", Value::Uint64(bytes))]
            }
        }
    }

    fn whole(&mut self, span: &Span, kind: i64, bytes: u64, members: Vec<u32>) -> Node {
        plain(span, NodeType::CommColl)
            .with("comm_type", Value::Int64(kind))
            .with("comm_size", Value::Int64(bytes as i64))
            .with("pg_name", Value::Text(self.groups.name(members)))
    }
}

fn plain(span: &Span, kind: NodeType) -> Node {
    let micros = |s: crate::units::Seconds| (s.value() * 1e6).round() as u64;
    let node = Node {
        name: span.path.clone(),
        kind: kind as i32,
        start_time_micros: micros(span.start),
        duration_micros: micros(span.duration()),
        ..Node::default()
    };
    let ps = picoseconds(span.end) - picoseconds(span.start);
    node.with("is_cpu_op", Value::Bool(false)).with("duration_ps", Value::Uint64(ps))
}
