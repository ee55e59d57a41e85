//! Chakra traces say what the plan says, and are what the published schema says: read by `export::chakra`, and by a second
//! decoder that knows nothing of it but the wire format of protobuf and the numbers of et_def.proto.

mod plans;

use foretrain::export::chakra::{self, NodeType, Value};
use foretrain::plan::*;
use foretrain::sim::{Effort, Simulated, simulate};
use foretrain::spec::*;
use plans::{Host, SM, model, work};
use std::collections::BTreeMap;

fn simulated() -> (Plan, Simulated) {
    let par = Parallelism { pp: 2, dp: 2, ring: 2, zero: 1, ..Parallelism::default() };
    let plan = plans::plan(&model(4, 4, false), &par, &work(&par, 4096, 1, 3), SM);
    let found = simulate(&plan, Host::of(&plan, 1.0).machine(), &[], Effort::SPANS).unwrap();
    (plan, found)
}

/// Chakra traces: as many nodes as ops and legs, waits that come before, sends that meet receives, bytes as planned.
#[test]
fn chakra_traces_say_what_the_plan_says() {
    let (plan, found) = simulated();
    let dir = tempfile::tempdir().unwrap();
    let files = chakra::write(dir.path(), &plan, &found.timeline, &found.class_of).unwrap();
    assert_eq!(files.len(), plan.ranks() as usize + 1);
    let groups: BTreeMap<String, Vec<u32>> =
        serde_json::from_slice(&std::fs::read(dir.path().join("comm_group.json")).unwrap()).unwrap();
    let number = |node: &chakra::Node, name: &str| match node.value(name) {
        Some(Value::Int32(n)) => i64::from(*n),
        Some(Value::Int64(n)) => *n,
        other => panic!("{name} of {} is {other:?}", node.name),
    };
    let mut on_their_way: BTreeMap<[i64; 4], i64> = Default::default();
    let (mut sent, mut end) = (0, 0);
    for rank in 0..plan.ranks() {
        let (metadata, nodes) = chakra::read(&dir.path().join(format!("foretrain.{rank}.et"))).unwrap();
        assert_eq!(metadata.version, chakra::VERSION);
        let spans = &found.timeline.classes[found.class_of[rank as usize] as usize].spans;
        let legs = |path: &str| nodes.iter().filter(|n| n.name == path).count();
        assert!(nodes.len() >= spans.len() && spans.iter().all(|s| legs(&s.path) >= 1 || s.what == "transfer"));
        for (at, node) in nodes.iter().enumerate() {
            assert!(node.id == at as u64 && node.data_deps.iter().all(|&dep| dep < node.id), "{node:?}");
            end = end.max(node.start_time_micros + node.duration_micros);
            let (from, to) = match NodeType::try_from(node.kind).unwrap() {
                NodeType::CommSend => (1, 0),
                NodeType::CommRecv => (0, 1),
                NodeType::CommColl => {
                    let Some(Value::Text(group)) = node.value("pg_name") else { panic!("{node:?}") };
                    assert!(groups[group].contains(&rank) && number(node, "comm_size") > 0);
                    continue;
                }
                _ => {
                    assert!(number(node, "num_ops") >= 0);
                    continue;
                }
            };
            assert_eq!(number(node, if from == 1 { "comm_src" } else { "comm_dst" }), i64::from(rank));
            let key = ["comm_src", "comm_dst", "comm_tag", "comm_size"].map(|name| number(node, name));
            *on_their_way.entry(key).or_default() += from - to;
            sent += from * key[3];
        }
    }
    assert!(on_their_way.values().all(|&open| open == 0), "a send that nobody receives");
    let (usage, step) = (found.timeline.mean(), found.timeline.step.value());
    // Collectives count their own; what is sent point to point is a part of all.
    let all = (usage.bytes_scale_up + usage.bytes_scale_out) * f64::from(plan.ranks());
    assert!(sent > 0 && (sent as f64) < all, "{sent} of {all}");
    assert!((end as f64 - step * 1e6).abs() <= 2.0, "{end} us, not {step} s");
}

/// A field as it is on the wire: its number, and a varint or the bytes of something longer.
#[derive(Debug, PartialEq)]
enum Field<'a> {
    Varint(u32, u64),
    Bytes(u32, &'a [u8]),
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes.split_first().expect("a varint has an end");
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return value;
        }
    }
    panic!("a varint of more than ten bytes")
}

fn long<'a>(bytes: &mut &'a [u8]) -> &'a [u8] {
    let len = varint(bytes) as usize;
    let (taken, rest) = bytes.split_at(len);
    *bytes = rest;
    taken
}

fn fields(mut bytes: &[u8]) -> Vec<Field<'_>> {
    let mut all = vec![];
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let number = (key >> 3) as u32;
        all.push(match key & 7 {
            0 => Field::Varint(number, varint(&mut bytes)),
            2 => Field::Bytes(number, long(&mut bytes)),
            other => panic!("wire type {other} of field {number}: none of what is written has it"),
        });
    }
    all
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// AttributeProto: name 1; int32_val 7, int64_val 9, uint64_val 13, bool_val 27, string_val 29.
fn attribute(bytes: &[u8]) -> (String, Value) {
    let (mut name, mut value) = (None, None);
    for field in fields(bytes) {
        match field {
            Field::Bytes(1, bytes) => name = Some(text(bytes)),
            Field::Varint(7, n) => value = Some(Value::Int32(n as i32)),
            Field::Varint(9, n) => value = Some(Value::Int64(n as i64)),
            Field::Varint(13, n) => value = Some(Value::Uint64(n)),
            Field::Varint(27, n) => value = Some(Value::Bool(n == 1)),
            Field::Bytes(29, bytes) => value = Some(Value::Text(text(bytes))),
            other => panic!("{other:?} is none of AttributeProto that is written"),
        }
    }
    // A value that is the default of its type is not left out of a oneof.
    (name.expect("a name"), value.expect("a value"))
}

/// Node: id 1, name 2, type 3, ctrl_deps 4, data_deps 5 (packed), start_time_micros 6, duration_micros 7, attr 10.
fn node(bytes: &[u8]) -> chakra::Node {
    let mut node = chakra::Node::default();
    for field in fields(bytes) {
        match field {
            Field::Varint(1, n) => node.id = n,
            Field::Bytes(2, bytes) => node.name = text(bytes),
            Field::Varint(3, n) => node.kind = n as i32,
            Field::Bytes(5, mut packed) => {
                while !packed.is_empty() {
                    node.data_deps.push(varint(&mut packed));
                }
            }
            Field::Varint(6, n) => node.start_time_micros = n,
            Field::Varint(7, n) => node.duration_micros = n,
            Field::Bytes(10, bytes) => {
                let (name, value) = attribute(bytes);
                node.attr.push(chakra::Attribute { name, value: Some(value) });
            }
            other => panic!("{other:?} is none of Node that is written"),
        }
    }
    node
}

/// What ASTRA-sim's feeder asks a node of each type for.
fn asked_for(kind: NodeType) -> &'static [&'static str] {
    match kind {
        NodeType::Comp => &["is_cpu_op", "num_ops", "tensor_size"],
        NodeType::CommSend | NodeType::CommRecv => &["is_cpu_op", "comm_src", "comm_dst", "comm_tag", "comm_size"],
        NodeType::CommColl => &["is_cpu_op", "comm_type", "comm_size", "pg_name"],
        other => panic!("{other:?} is not written"),
    }
}

#[test]
fn a_second_decoder_reads_the_same() {
    let (plan, found) = simulated();
    let dir = tempfile::tempdir().unwrap();
    chakra::write(dir.path(), &plan, &found.timeline, &found.class_of).unwrap();
    let mut kinds: BTreeMap<i32, u32> = BTreeMap::new();
    for rank in 0..plan.ranks() {
        let path = dir.path().join(format!("foretrain.{rank}.et"));
        let (bytes, (metadata, nodes)) = (std::fs::read(&path).unwrap(), chakra::read(&path).unwrap());
        let mut rest = bytes.as_slice();
        assert_eq!(
            fields(long(&mut rest)),
            [Field::Bytes(1, metadata.version.as_bytes())],
            "GlobalMetadata: version 1"
        );
        for expected in &nodes {
            assert_eq!(&node(long(&mut rest)), expected);
            let kind = NodeType::try_from(expected.kind).unwrap();
            asked_for(kind).iter().for_each(|name| assert!(expected.value(name).is_some(), "{name}: {expected:?}"));
            *kinds.entry(expected.kind).or_default() += 1;
        }
        assert!(rest.is_empty());
    }
    // COMP_NODE 4, COMM_SEND_NODE 5, COMM_RECV_NODE 6, COMM_COLL_NODE 7.
    assert!(kinds.keys().eq(&[4, 5, 6, 7]) && kinds[&5] == kinds[&6], "{kinds:?}");
}

/// The nodes of all ranks played by the rules of ASTRA-sim's feeder and nothing else: a node may be issued once all its
/// `data_deps` have finished, the lowest number first; one kernel at a time on a rank, and with `one_message` one send or
/// collective besides (receives are not counted). A collective begins when all members have issued it, a message when both
/// ends have; how long it takes is what its last member or end took. Gives the end in ps, or who is left.
fn played(traces: &[Vec<chakra::Node>], groups: &BTreeMap<String, Vec<u32>>, one_message: bool) -> Result<u64, String> {
    use std::cmp::Reverse;
    use std::collections::{BTreeSet, BinaryHeap};
    let text = |node: &chakra::Node, name: &str| match node.value(name) {
        Some(Value::Text(text)) => text.clone(),
        Some(Value::Int32(n)) => n.to_string(),
        other => panic!("{name} of {} is {other:?}", node.name),
    };
    let takes = |node: &chakra::Node| match node.value("duration_ps") {
        Some(Value::Uint64(ps)) => *ps,
        other => panic!("{other:?}"),
    };
    let kind = |node: &chakra::Node| NodeType::try_from(node.kind).unwrap();
    // The k-th collective of a group meets the k-th of its other members.
    let mut meets: BTreeMap<(usize, u64), String> = BTreeMap::new();
    let mut ends: BTreeMap<String, (usize, u64)> = BTreeMap::new();
    for (rank, nodes) in traces.iter().enumerate() {
        let mut turns: BTreeMap<String, u32> = BTreeMap::new();
        for node in nodes {
            let (name, all) = match kind(node) {
                NodeType::Comp => continue,
                NodeType::CommColl => {
                    let group = text(node, "pg_name");
                    let turn = turns.entry(group.clone()).or_default();
                    *turn += 1;
                    (format!("group {group}, {turn}"), groups[&group].len())
                }
                _ => (["comm_src", "comm_dst", "comm_tag"].map(|name| text(node, name)).join(" "), 2),
            };
            let end = ends.entry(name.clone()).or_insert((all, u64::MAX));
            end.1 = end.1.min(takes(node));
            meets.insert((rank, node.id), name);
        }
    }
    let mut waits: Vec<Vec<usize>> = traces.iter().map(|t| t.iter().map(|n| n.data_deps.len()).collect()).collect();
    let mut next: Vec<Vec<Vec<u64>>> = traces.iter().map(|t| vec![vec![]; t.len()]).collect();
    for (rank, nodes) in traces.iter().enumerate() {
        nodes.iter().for_each(|n| n.data_deps.iter().for_each(|&dep| next[rank][dep as usize].push(n.id)));
    }
    let mut free: Vec<BTreeSet<u64>> =
        waits.iter().map(|w| (0..w.len() as u64).filter(|&id| w[id as usize] == 0).collect()).collect();
    let (mut busy, mut there) = (vec![[false; 2]; traces.len()], BTreeMap::<String, Vec<(usize, u64)>>::new());
    let (mut now, mut queue) = (0, BinaryHeap::new());
    loop {
        for rank in 0..traces.len() {
            for id in free[rank].clone() {
                let node = &traces[rank][id as usize];
                let unit = match kind(node) {
                    NodeType::Comp => Some(0),
                    NodeType::CommRecv => None,
                    _ => one_message.then_some(1),
                };
                if unit.is_some_and(|unit| busy[rank][unit]) {
                    continue;
                }
                unit.into_iter().for_each(|unit| busy[rank][unit] = true);
                free[rank].remove(&id);
                match meets.get(&(rank, id)) {
                    None => queue.push(Reverse((now + takes(node), rank, id))),
                    Some(name) => {
                        let (present, (all, long)) = (there.entry(name.clone()).or_default(), ends[name]);
                        present.push((rank, id));
                        if present.len() == all {
                            present.iter().for_each(|&(rank, id)| queue.push(Reverse((now + long, rank, id))));
                            there.remove(name);
                        }
                    }
                }
            }
        }
        let Some(Reverse((at, rank, id))) = queue.pop() else { break };
        now = at;
        let unit = usize::from(kind(&traces[rank][id as usize]) != NodeType::Comp);
        if kind(&traces[rank][id as usize]) != NodeType::CommRecv {
            busy[rank][unit] = false;
        }
        for &child in &next[rank][id as usize] {
            waits[rank][child as usize] -= 1;
            if waits[rank][child as usize] == 0 {
                free[rank].insert(child);
            }
        }
    }
    let left: Vec<String> = there.into_iter().map(|(name, present)| format!("{name}: {present:?}")).collect();
    let stuck = free.iter().any(|free| !free.is_empty()) || !left.is_empty();
    if stuck { Err(left.join("; ")) } else { Ok(now) }
}

/// What the files say is enough to find the step again: by their dependencies alone it takes as long as here, to the
/// picosecond; with one message of a rank at a time, which is ASTRA-sim's rule, it takes longer, and ends.
#[test]
fn the_feeders_rules_find_the_same_step() {
    let one = Parallelism { zero: 1, ..Parallelism::default() };
    for (par, batches) in [
        (Parallelism { dp: 4, ..one }, 3),
        (Parallelism { pp: 4, zero: 0, ..one }, 6),
        (Parallelism { pp: 2, dp: 2, tp: 2, ..one }, 4),
        (Parallelism { pp: 2, vp: 2, dp: 2, ..one }, 4),
        (Parallelism { ring: 4, ulysses: 2, ..one }, 2),
        (Parallelism { dp: 2, zero: 3, ring: 2, ..one }, 2),
    ] {
        let plan = plans::plan(&model(8, 4, false), &par, &work(&par, 2048, 1, batches), plans::COPY);
        // Nothing shares a port, and the CPU has issued all ops: what is left are dependencies.
        let host = Host::of(&plan, 1e-9).issuing(0.0);
        let found = simulate(&plan, host.machine(), &[], Effort::SPANS).unwrap();
        let dir = tempfile::tempdir().unwrap();
        chakra::write(dir.path(), &plan, &found.timeline, &found.class_of).unwrap();
        let groups = serde_json::from_slice(&std::fs::read(dir.path().join("comm_group.json")).unwrap()).unwrap();
        let file = |rank: u32| dir.path().join(format!("foretrain.{rank}.et"));
        let traces: Vec<Vec<chakra::Node>> =
            (0..plan.ranks()).map(|rank| chakra::read(&file(rank)).unwrap().1).collect();
        let step = (found.timeline.step.value() * 1e12).round() as u64;
        assert_eq!(played(&traces, &groups, false), Ok(step), "{par:?}");
        let one_message = played(&traces, &groups, true);
        assert!(one_message.as_ref().is_ok_and(|&ps| ps >= step), "{par:?}: {one_message:?} for {step}");
    }
}
