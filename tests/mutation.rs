//! A plan that is changed for the worse is refused by `check`, or costs something else. What slips through
//! both computes wrong numbers in the same time, and is listed for the executor to catch.

mod plans;

use foretrain::cost::{Effort, cost};
use foretrain::error::Result;
use foretrain::exec::{Options, execute};
use foretrain::plan::builder::Via;
use foretrain::plan::*;
use foretrain::spec::Parallelism;
use foretrain::timeline::Timeline;
use plans::{FLAT, Host, SM, model, same, way, work};

/// Mutations that only change what is computed: neither `check` nor `cost` can see them.
pub const NUMERIC_ONLY: &[&str] = &[
    "layers walked from the wrong end",
    "all layers read the first layer's weights",
    "kv goes around the other way",
    "merge sees the blocks swapped",
    "rope in the backward pass turns forward",
];

/// A ring and an exchange, two layers, two microbatches: every kind of op there is.
fn plan() -> Plan {
    let par = way(1, 3, 2);
    plans::plan(&model(2, 4, false), &par, &work(&par, 96, 1, 2), SM)
}

/// Ways to bring KV and to exchange heads that the plan above has not.
fn others() -> Vec<Plan> {
    let said = |words: &str, ring, ulysses| {
        let par = Parallelism { options: words.parse().unwrap(), ..way(1, ring, ulysses) };
        plans::plan(&model(2, 2, false), &par, &work(&par, 96, 1, 1), SM)
    };
    vec![said("gather-kv+a2a-separate+replicate-after", 2, 4), said("gather-kv-prefetch", 3, 1)]
}

/// Two stages whose gradients of weights come later.
fn halved() -> Plan {
    let par = Parallelism { pp: 2, options: "zb-h1".parse().unwrap(), ..way(2, 1, 1) };
    plans::plan(&model(4, 2, false), &par, &work(&par, 32, 1, 3), SM)
}

fn times(plan: &Plan) -> Result<Timeline> {
    cost(plan, Host::new(plan.ranks(), plan.ranks(), 100.0).machine(), FLAT)
}

/// Whether `check` refuses the plan or it costs something else.
fn is_caught(mutant: &Plan, sound: &Timeline) -> bool {
    check::check(mutant).is_err() || times(mutant).unwrap() != *sound
}

/// The ops of every block and of the program.
fn bodies(plan: &mut Plan) -> Vec<&mut Vec<Op>> {
    let blocks = plan.blocks.iter_mut().map(|b| &mut b.ops);
    blocks.chain(plan.programs.iter_mut().map(|p| &mut p.ops)).collect()
}

/// The op with a label, in a block by name or in the program.
fn op<'a>(plan: &'a mut Plan, body: &str, label: &str) -> &'a mut Op {
    let block = plan.blocks.iter_mut().find(|b| b.name == body).map(|b| &mut b.ops);
    let ops = block.unwrap_or_else(|| &mut plan.programs[0].ops);
    ops.iter_mut().find(|op| op.label == label).unwrap_or_else(|| panic!("no {label} in {body}"))
}

fn legs(op: &mut Op) -> &mut Vec<Leg> {
    let OpKind::Transfer { legs, .. } = &mut op.kind else { panic!("{} is no transfer", op.label) };
    legs
}

fn bufs(op: &mut Op) -> Vec<&mut Buf> {
    match &mut op.kind {
        OpKind::Compute { reads, writes, .. } => reads.iter_mut().chain(writes).collect(),
        OpKind::Transfer { legs, .. } => legs.iter_mut().map(|leg| &mut leg.buf).collect(),
        OpKind::Collective { src, dst, .. } | OpKind::Copy { src, dst } => vec![src, dst],
        OpKind::Exchange { src, dst, .. } => src.iter_mut().chain(dst).collect(),
        OpKind::Call { .. } => vec![],
    }
}

/// Takes an op out; the ones behind it move up.
fn delete(ops: &mut Vec<Op>, at: usize) {
    ops.remove(at);
    (0..).zip(ops).for_each(|(id, op)| op.id = id);
}

/// Applies `mutate` to every op in turn, each time to a fresh plan; it says how many ways it knows.
fn every_op(what: &str, mutate: impl Fn(&mut Vec<Op>, usize, usize) -> usize) {
    every_op_of(&plan(), what, mutate);
}

fn every_op_of(base: &Plan, what: &str, mutate: impl Fn(&mut Vec<Op>, usize, usize) -> usize) {
    let sound = times(base).unwrap();
    let mut mutants = 0;
    for body in 0..base.blocks.len() + 1 {
        for at in 0..bodies(&mut base.clone())[body].len() {
            let mut ways = 1;
            let mut way = 0;
            while way < ways {
                let mut mutant = base.clone();
                let label = bodies(&mut mutant)[body][at].label.clone();
                ways = mutate(bodies(&mut mutant)[body], at, way);
                if ways > 0 {
                    mutants += 1;
                    assert!(is_caught(&mutant, &sound), "{what}: body {body}, {label}, way {way}");
                }
                way += 1;
            }
        }
    }
    assert!(mutants > 5, "{what}: {mutants} mutants");
}

#[test]
fn no_op_is_idle() {
    for plan in others().iter().chain([&plan(), &halved()]) {
        every_op_of(plan, "deleted", |ops, at, _| {
            delete(ops, at);
            1
        });
    }
}

#[test]
fn no_buffer_may_be_halved() {
    others().iter().chain([&plan()]).for_each(halve_every_buffer);
}

fn halve_every_buffer(plan: &Plan) {
    let tensors = &plan.tensors;
    every_op_of(plan, "halved", |ops, at, way| {
        let mut bufs = bufs(&mut ops[at]);
        if let Some(buf) = bufs.get_mut(way) {
            let rows = buf.rows.unwrap_or_else(|| match buf.of {
                TensorRef::Tensor(id) => [0, tensors[id as usize].rows()],
                // Any half of a formal: all the plan's tensors have more than two rows.
                TensorRef::Formal(_) => [0, 3],
            });
            buf.rows = Some([rows[0], rows[0] + (rows[1] - rows[0]).div_ceil(2)]);
            // Half of one row is one row: the loss.
            if buf.rows == Some(rows) {
                buf.rows = Some([rows[0], rows[0]]);
            }
        }
        bufs.len()
    });
}

#[test]
fn every_leg_needs_its_other_half() {
    every_op("a leg dropped", |ops, at, way| match &mut ops[at].kind {
        OpKind::Transfer { legs, .. } => {
            legs.remove(way);
            legs.len() + 1
        }
        _ => 0,
    });
    every_op("a tag changed", |ops, at, way| match &mut ops[at].kind {
        OpKind::Transfer { legs, .. } => {
            legs[way].tag += 100;
            legs.len()
        }
        _ => 0,
    });
    every_op("a leg sent elsewhere", |ops, at, way| match &mut ops[at].kind {
        OpKind::Transfer { legs, .. } => {
            legs[way].by += 1;
            legs.len()
        }
        _ => 0,
    });
}

#[test]
fn collectives_are_what_they_are() {
    others().iter().chain([&plan()]).for_each(change_every_collective);
}

fn change_every_collective(plan: &Plan) {
    every_op_of(plan, "another collective", |ops, at, way| match &mut ops[at].kind {
        OpKind::Collective { kind, .. } => {
            use CollectiveKind::*;
            let others: Vec<_> =
                [AllReduce, ReduceScatter, AllGather, AllToAll].into_iter().filter(|k| k != kind).collect();
            *kind = others[way];
            others.len()
        }
        _ => 0,
    });
    every_op_of(plan, "another wire", |ops, at, _| match &mut ops[at].kind {
        OpKind::Collective { wire, .. } => {
            *wire = if *wire == Dtype::F64.into() { Dtype::Bf16.into() } else { Dtype::F64.into() };
            1
        }
        _ => 0,
    });
}

type Mutation = (&'static str, fn(&mut Plan));

const SINGLE: &[Mutation] = &[
    ("a slot of a double buffer taken twice", |p| {
        bufs(op(p, "layer_fwd", "attention.2"))[1].slot ^= 1;
    }),
    ("a hop lands where it came from", |p| {
        let legs = legs(op(p, "layer_fwd", "kv_hop.1"));
        legs[1].buf = legs[0].buf;
    }),
    ("hops change places", |p| {
        let block = p.blocks.iter_mut().find(|b| b.name == "layer_fwd").unwrap();
        let at = |label: &str| block.ops.iter().position(|op| op.label == label).unwrap();
        let (first, second) = (at("kv_hop.0"), at("kv_hop.1"));
        block.ops.swap(first, second);
        (block.ops[first].id, block.ops[second].id) = (first as u32, second as u32);
    }),
    ("kv and its gradients share a lane", |p| {
        let lane = op(p, "layer_bwd", "kv_hop.0").lane;
        (0..3).for_each(|i| op(p, "layer_bwd", &format!("dkv_hop.{i}")).lane = lane);
    }),
    ("an exchange within the ring", |p| {
        let lane = op(p, "layer_fwd", "kv_hop.0").lane;
        op(p, "layer_fwd", "qkv_a2a").lane = lane;
    }),
    ("a full mask", |p| {
        if let OpKind::Compute { kernel: Kernel::Attention(block), .. } = &mut op(p, "layer_fwd", "attention.0").kind {
            block.mask.causal = false;
        }
    }),
    ("attention of another step's keys", |p| {
        if let OpKind::Compute { kernel: Kernel::Attention(block), .. } = &mut op(p, "layer_fwd", "attention.1").kind {
            block.kv.shift.1 = 0;
        }
    }),
    ("microbatches of another block", |p| {
        if let OpKind::Call { block, .. } = &mut op(p, "rank", "mb").kind {
            *block -= 1;
        }
    }),
    ("one layer less", |p| {
        if let OpKind::Call { repeat, .. } = &mut op(p, "microbatch", "fwd").kind {
            *repeat -= 1;
        }
    }),
    ("layers walked from the wrong end", |p| {
        if let OpKind::Call { args, .. } = &mut op(p, "microbatch", "bwd").kind {
            for arg in args {
                if let Arg::Each { first, step, of, .. } = arg
                    && *step == -1
                {
                    (*first, *step) = (*of as i32, 1);
                }
            }
        }
    }),
    ("all layers read the first layer's weights", |p| {
        if let OpKind::Call { args, .. } = &mut op(p, "microbatch", "fwd").kind {
            args[0] = Arg::Buf { of: args[0].of(), slot: 0 };
        }
    }),
    ("kv goes around the other way", |p| {
        for block in ["layer_fwd", "layer_bwd"] {
            for hop in ["kv_hop.0", "kv_hop.1"] {
                legs(op(p, block, hop)).iter_mut().for_each(|leg| leg.by = -leg.by);
            }
        }
    }),
    ("merge sees the blocks swapped", |p| {
        if let OpKind::Compute { reads, .. } = &mut op(p, "layer_fwd", "merge.1").kind {
            reads.swap(1, 3);
        }
    }),
    ("rope in the backward pass turns forward", |p| {
        if let OpKind::Compute { kernel: Kernel::Rope { theta, .. }, .. } = &mut op(p, "layer_bwd", "rope_bwd").kind {
            *theta = 1.0;
        }
    }),
];

#[test]
fn only_numbers_slip_through() {
    let sound = times(&plan()).unwrap();
    let slips = |(name, mutate): &&Mutation| {
        let mut mutant = plan();
        mutate(&mut mutant);
        assert_ne!(mutant, plan(), "{name} changes nothing");
        !is_caught(&mutant, &sound)
    };
    let slipped: Vec<&str> = SINGLE.iter().filter(slips).map(|m| m.0).collect();
    assert_eq!(slipped, NUMERIC_ONLY);
}

/// What the predictors cannot see, the executor does: loss, gradients or both come out different.
#[test]
fn the_executor_sees_what_only_changes_numbers() {
    let run = |plan: &Plan| execute(plan, &Options::new(3, (0..plan.ranks()).collect(), true));
    let sound = run(&plan()).unwrap();
    for (name, mutate) in SINGLE.iter().filter(|m| NUMERIC_ONLY.contains(&m.0)) {
        let mut mutant = plan();
        mutate(&mut mutant);
        let Ok(got) = run(&mutant) else { continue };
        assert!(got.loss.to_bits() != sound.loss.to_bits() || got.grads != sound.grads, "{name} changes no number");
    }
}

fn refused(why: &str, mutate: impl Fn(&mut Plan)) {
    let mut mutant = plan();
    mutate(&mut mutant);
    let error = check::check(&mutant).expect_err(why).to_string();
    assert!(error.contains(why), "{error}");
}

fn call(plan: &mut Plan) -> (&mut BlockId, &mut Vec<Arg>, &mut u32) {
    match &mut op(plan, "microbatch", "fwd").kind {
        OpKind::Call { block, args, repeat } => (block, args, repeat),
        _ => unreachable!(),
    }
}

#[test]
fn what_is_not_a_plan_is_refused() {
    refused("calls block 3", |p| *call(p).0 = 3);
    refused("calls block 99", |p| *call(p).0 = 99);
    refused("with 2 buffers", |p| call(p).1.truncate(2));
    refused("0 times", |p| *call(p).2 = 0);
    refused("names no tensor", |p| call(p).1[0] = Arg::Buf { of: TensorRef::Formal(9), slot: 0 });
    refused("names no tensor", |p| bufs(op(p, "layer_fwd", "norm1"))[0].of = TensorRef::Tensor(999));
    refused("slot 9 of tensor", |p| bufs(op(p, "layer_fwd", "attention.1"))[1].slot = 9);
    refused("out of order", |p| op(p, "layer_fwd", "norm1").id = 5);
    refused("out of order", |p| op(p, "layer_fwd", "norm1").after.push(3));
    refused("does not fit the op", |p| op(p, "layer_fwd", "norm1").lane = Some(1));
    refused("does not fit the op", |p| op(p, "layer_fwd", "kv_hop.0").lane = Some(0));
    refused("does not fit the op", |p| op(p, "layer_fwd", "kv_hop.0").lane = Some(77));
    refused("the views have", |p| p.views.push(Mesh::new(&[(Axis::Dp, 4)])));
    refused("has no axes", |p| p.lanes.push(Lane::Comm(Group::Axes { view: 0, axes: vec![] }, 0)));
    let subset = |sets: &[&[u32]]| Group::subset(Axis::Cp, sets.iter().map(|set| set.to_vec()).collect());
    refused("not disjoint", |p| p.lanes.push(Lane::Comm(subset(&[&[0, 1], &[1, 2]]), 0)));
    refused("on the axis cp", |p| p.lanes.push(Lane::Comm(subset(&[&[0, 3]]), 0)));
    refused("is in no set of it", |p| {
        let lane = p.lanes.iter_mut().find(|l| matches!(l, Lane::Comm(g, _) if g.spans() == [Axis::Cp])).unwrap();
        *lane = Lane::Comm(subset(&[&[0, 1]]), 0);
    });
    refused("no view 3", |p| p.lanes.push(Lane::Comm(Group::Axes { view: 3, axes: vec![Axis::Dp] }, 0)));
    refused("role_of", |p| p.role_of.table.push(0));
    refused("format 99", |p| p.version = 99);
    refused("names rows", |p| bufs(op(p, "layer_fwd", "norm1"))[0].rows = Some([5, 1 << 20]));
}

fn inputs(plan: &mut Plan) -> &mut Inputs {
    match &mut plan.feed {
        Feed::Tokens(inputs) => inputs,
        Feed::Attention(_) => unreachable!(),
    }
}

#[test]
fn a_sequence_that_does_not_split_evenly_is_refused() {
    // Zigzag over three ranks cuts in six: of 99 tokens 3 would be nobody's.
    refused("do not split evenly", |p| inputs(p).segs.seq = 99);
    refused("do not split evenly", |p| {
        if let OpKind::Compute { kernel: Kernel::Attention(block), .. } = &mut op(p, "layer_fwd", "attention.0").kind {
            block.kv.seq = 99;
        }
    });
    refused("do not split evenly", |p| inputs(p).segs.view = 4);
    // Over one rank nothing is cut, however odd.
    let segs = Segs::new(7, &[(Axis::Cp, Split::Zigzag)]);
    assert_eq!(segs.positions(&[Mesh::new(&[(Axis::Cp, 1)])], 0), [0, 1, 2, 3, 4, 5, 6]);
    let six = Segs::new(6, &[(Axis::Cp, Split::Zigzag)]);
    assert!(!six.divide(&[Mesh::new(&[(Axis::Cp, 2)])]) && six.divide(&[Mesh::new(&[(Axis::Cp, 3)])]));
}

/// Two ranks that pass a buffer on, one leg an op, in the order that each rank's program has.
fn pair(orders: &[[Direction; 2]]) -> Plan {
    let par = way(1, 2, 1);
    let mut plan = plans::plan(&model(1, 4, false), &par, &work(&par, 16, 1, 1), SM);
    let (mut b, group) = (Builder::new(), Group::axes(&[Axis::Cp]));
    let [mine, theirs] = ["mine", "theirs"].map(|name| b.tensor(name, &[64], Dtype::F32, TensorKind::CommBuffer, 1));
    let program = |order: &[Direction; 2]| {
        b.compute("fill", Kernel::Fill { elems: 64 }, &[], &[mine]);
        for dir in order {
            b.hop(&format!("{dir:?}"), Via { group: &group, index: 0, engine: SM.p2p }, 1, mine, theirs, 0);
        }
        let mut ops = b.finish();
        (ops[1..].iter_mut().zip(order)).for_each(|(op, dir)| legs(op).retain(|leg| leg.dir == *dir));
        Program { name: "half".into(), ops }
    };
    plan.programs = orders.iter().map(program).collect();
    if orders.len() == 2 {
        plan.role_of = RoleMap { view: 0, axes: vec![Axis::Cp], table: vec![0, 1] };
    }
    (plan.lanes, plan.tensors, plan.blocks) = (b.lanes, b.tensors, vec![]);
    plan
}

#[test]
fn ranks_that_wait_for_each_other_are_named() {
    use Direction::*;
    for first in [[Recv, Send], [Send, Recv]] {
        let error = check::check(&pair(&[first])).unwrap_err().to_string();
        let op = format!("{:?}", first[0]);
        assert!(error.contains("deadlock"), "{error}");
        assert!(error.contains(&format!("rank 0 waits in {op} for rank 1")), "{error}");
        assert!(error.contains(&format!("rank 1 waits in {op} for rank 0")), "{error}");
    }
}

#[test]
fn one_sends_while_the_other_receives() {
    use Direction::*;
    let plan = pair(&[[Send, Recv], [Recv, Send]]);
    check::check(&plan).unwrap();
    let host = Host::of(&plan, 1.0);
    let all = cost(&plan, host.machine(), FLAT).unwrap();
    // The two hops follow one another; ranks that meet in different ops are not folded.
    let one = cost(&pair(&[[Send, Recv], [Recv, Send]]), Host::of(&plan, 2.0).machine(), FLAT).unwrap();
    assert!(one.step > all.step);
    let few = cost(&plan, host.machine(), Effort::SUMS).unwrap();
    assert_eq!(few.classes.len(), 2);
    same(&few, &all);
}
