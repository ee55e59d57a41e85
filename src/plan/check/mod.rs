//! Proves that a plan is sound before anyone interprets it: names resolve, shapes agree, every leg meets
//! its other half, nothing is read that was never written, and no ranks wait for each other in a circle.

mod crossings;
mod routes;
mod written;

use super::crew::Crews;
use super::kernel::Kernel;
use super::link::{AtomTable, Line, bind, resolve};
use super::matching::{Matching, group_sizes};
use super::op::*;
use super::order;
use super::program::{Feed, Plan, VERSION};
use super::segs::Segs;
use super::wire::Wire;
use crate::error::{Error, Result};
use routes::exchange;
use std::collections::BTreeSet;

/// The most bytes that a tensor may have on one rank.
const MOST_BYTES: u64 = 1 << 50;

/// Checks everything that can be said of a plan without a cluster. Errors: the first thing that is wrong, by program,
/// op and buffer.
pub fn check(plan: &Plan) -> Result<()> {
    structure(plan)?;
    positions(plan)?;
    routes::check(plan)?;
    feed(plan)?;
    let atoms = AtomTable::new(plan)?;
    // Ranks are in step, all of them or those of each program.
    let crews = if plan.programs.len() > 1 { Crews::new(plan) } else { None };
    let in_step = crews.is_some() || order::meets_itself(plan);
    let crosses = |op: &Op| crews.as_ref().is_some_and(|crews| crews.is_crossing(op));
    let group_sizes = group_sizes(plan);
    Bodies { plan, in_step, crosses: &crosses, group_sizes, seen: BTreeSet::new(), path: vec![] }.program()?;
    if in_step && written::by_name(plan, &atoms) {
        let Some(Err(error)) = crews.map(|crews| crossings::meet(plan, &crews)) else { return Ok(()) };
        // Crews know no single ranks: only spliced lines can say which rank waits for which.
        return if error.to_string().contains("deadlock") { spliced(plan, &atoms).and(Err(error)) } else { Err(error) };
    }
    spliced(plan, &atoms)
}

/// Proves by spliced lines what bodies alone cannot prove.
fn spliced(plan: &Plan, atoms: &AtomTable) -> Result<()> {
    let programs = 0..plan.programs.len() as u32;
    let lines: Vec<Line> = programs.map(|p| Line::short(plan, atoms, p)).collect::<Result<_>>()?;
    lines.iter().try_for_each(|line| written::before_read(plan, line))?;
    let matching = Matching::new(plan, &lines);
    legs_meet(plan, &lines, &matching)?;
    order::of_all_ranks(plan, &lines, &matching).map(|_| ())
}

fn structure(plan: &Plan) -> Result<()> {
    let fail = |why: String| Err(Error::plan(why));
    if plan.version != VERSION {
        return fail(format!("format {} is not {VERSION}", plan.version));
    }
    let sizes: Vec<u64> = plan
        .views
        .iter()
        .map(|v| v.axes.iter().map(|a| u64::from(a.1)).try_fold(1, u64::checked_mul).unwrap_or(0))
        .collect();
    match sizes.first() {
        Some(&n) if n > 0 && n <= 1 << 20 && sizes.iter().all(|&m| m == n) => {}
        _ => return fail(format!("the views have {sizes:?} ranks; all need the same number, from 1 to 1048576")),
    }
    for lane in &plan.lanes {
        if let Lane::Comm(group, _) = lane
            && let Some(fault) = group.fault(&plan.views)
        {
            return fail(format!("lane {lane:?} has {fault}"));
        }
    }
    for t in &plan.tensors {
        let bytes = t.shape.iter().try_fold(t.dtype.size(), |n, &d| n.checked_mul(d));
        if t.slots == 0 || t.slots > 1 << 24 || t.shape.is_empty() || bytes.is_none_or(|b| b == 0 || b > MOST_BYTES) {
            return fail(format!("tensor {:?} has shape {:?} and {} slots", t.name, t.shape, t.slots));
        }
        let ends: Vec<u64> = t.in_fp8.iter().flatten().copied().collect();
        if !ends.is_sorted() || ends.last().is_some_and(|&end| end > t.elems()) {
            return fail(format!(
                "tensor {:?} of {} elements has in_fp8 {:?}; give ranges of elements, one behind the other",
                t.name,
                t.elems(),
                t.in_fp8
            ));
        }
    }
    let view = plan.views.get(plan.role_of.view as usize);
    let roles = view.map(|v| plan.role_of.axes.iter().map(|&a| v.degree(a) as usize).product::<usize>());
    if roles != Some(plan.role_of.table.len()) || plan.role_of.table.iter().any(|&p| p as usize >= plan.programs.len())
    {
        return fail("role_of does not name one program for each coordinate".into());
    }
    for (i, block) in plan.blocks.iter().enumerate() {
        body(plan, &block.name, &block.ops, i, block.formals.len())?;
    }
    for program in &plan.programs {
        body(plan, &program.name, &program.ops, plan.blocks.len(), 0)?;
        slots(plan, &program.ops, &[])?;
    }
    membership(plan)
}

/// Checks that no rank talks in a group that it is not in.
fn membership(plan: &Plan) -> Result<()> {
    let mut lanes: Vec<BTreeSet<u16>> = Vec::new();
    let used = |ops: &[Op], lanes: &[BTreeSet<u16>]| {
        ops.iter().fold(BTreeSet::new(), |mut all: BTreeSet<u16>, op| {
            match &op.kind {
                OpKind::Call { block, .. } => all.extend(&lanes[*block as usize]),
                _ => all.extend(op.lane),
            }
            all
        })
    };
    for block in &plan.blocks {
        lanes.push(used(&block.ops, &lanes));
    }
    let by_program: Vec<BTreeSet<u16>> = plan.programs.iter().map(|p| used(&p.ops, &lanes)).collect();
    for rank in 0..plan.ranks() {
        let program = plan.program_of(rank) as usize;
        let outside = |lane: &&u16| match &plan.lanes[**lane as usize] {
            Lane::Comm(group, _) => !group.contains(&plan.views, rank),
            Lane::Compute(_) | Lane::Copy(_) | Lane::Host => false,
        };
        if let Some(&lane) = by_program[program].iter().find(outside) {
            let (name, lane) = (&plan.programs[program].name, plan.lanes[lane as usize].label());
            return Err(Error::plan(format!("rank {rank} runs {name:?}, which uses {lane}, but is in no set of it")));
        }
    }
    Ok(())
}

/// Checks that the ops of a body name only what is there. A block calls only blocks before it, so calls end.
fn body(plan: &Plan, name: &str, ops: &[Op], blocks: usize, formals: usize) -> Result<()> {
    for (i, op) in ops.iter().enumerate() {
        let fail = |why: String| Err(Error::plan(format!("{name}/{}: {why}", op.label)));
        if op.id as usize != i
            || op.after.iter().any(|&a| a >= op.id || matches!(ops[a as usize].kind, OpKind::Call { .. }))
        {
            return fail(format!("op id {} or its `after` {:?} is out of order", op.id, op.after));
        }
        let known = |of: TensorRef| match of {
            TensorRef::Tensor(t) => (t as usize) < plan.tensors.len(),
            TensorRef::Formal(f) => (f as usize) < formals,
        };
        if let Some(buf) = op.reads().chain(op.writes()).find(|b| !known(b.of)) {
            return fail(format!("{:?} names no tensor", buf.of));
        }
        let lane = op.lane.map(|l| plan.lanes.get(l as usize));
        match (&op.kind, lane) {
            (OpKind::Call { block, args, repeat }, None) => {
                let callee = plan.blocks.get(*block as usize).filter(|_| (*block as usize) < blocks);
                if callee.is_none_or(|b| b.formals.len() != args.len()) || *repeat == 0 {
                    return fail(format!("calls block {block} with {} buffers, {repeat} times", args.len()));
                }
                if args.iter().any(|a| !known(a.of()) || a.period() == 0) {
                    return fail("an argument names no tensor or no slots".into());
                }
            }
            (OpKind::Compute { .. }, Some(Some(Lane::Compute(_) | Lane::Host)))
            | (OpKind::Copy { .. }, Some(Some(Lane::Copy(_)))) => {}
            (
                OpKind::Transfer { .. } | OpKind::Collective { .. } | OpKind::Exchange { .. },
                Some(Some(Lane::Comm(..))),
            ) => {}
            _ => return fail(format!("lane {:?} does not fit the op", op.lane)),
        }
    }
    Ok(())
}

/// Checks that no buffer names a slot its tensor does not have, in whatever iteration. `env`: the tensors and the
/// largest slots that formals are bound to.
fn slots(plan: &Plan, ops: &[Op], env: &[(TensorId, u32)]) -> Result<()> {
    let resolve = |of: TensorRef, slot: u32, label: &str| {
        let (tensor, base) = match of {
            TensorRef::Tensor(t) => (t, 0),
            TensorRef::Formal(f) => env[f as usize],
        };
        let t = &plan.tensors[tensor as usize];
        let slot = u64::from(base) + u64::from(slot);
        if slot >= u64::from(t.slots) {
            return Err(Error::plan(format!("{label}: slot {slot} of tensor {:?}, which has {}", t.name, t.slots)));
        }
        Ok((tensor, slot as u32))
    };
    for op in ops {
        if let OpKind::Call { block, args, repeat } = &op.kind {
            let most = |arg: &Arg| {
                // A walk shorter than its period is followed; a walk of a whole period reaches the last slot.
                let top = if *repeat < arg.period() { (0..*repeat).map(|i| arg.slot(i)).max() } else { None };
                resolve(arg.of(), top.unwrap_or(arg.slot(0).max(arg.period() - 1)), &op.label)
            };
            let inner: Vec<(TensorId, u32)> = args.iter().map(most).collect::<Result<_>>()?;
            slots(plan, &plan.blocks[*block as usize].ops, &inner)?;
            continue;
        }
        for buf in op.reads().chain(op.writes()) {
            resolve(buf.of, buf.slot, &op.label)?;
        }
    }
    Ok(())
}

/// Checks that every split of the sequence comes out even: otherwise ranks would hold fewer tokens than their buffers
/// have.
fn positions(plan: &Plan) -> Result<()> {
    let even = |what: &str, segs: &Segs| {
        let known = (segs.view as usize) < plan.views.len();
        let why = || format!("{what}: {} tokens do not split evenly over {:?}", segs.seq, segs.order);
        if known && segs.divide(&plan.views) { Ok(()) } else { Err(Error::plan(why())) }
    };
    plan.feed.segs().into_iter().try_for_each(|segs| even("inputs", segs))?;
    for (body, op) in plan.ops() {
        let OpKind::Compute { kernel, .. } = &op.kind else { continue };
        let own = match kernel {
            Kernel::Rope { segs, .. } | Kernel::Positions { segs, .. } => vec![segs],
            Kernel::Residual { dropout: Some(dropout), .. } => vec![&dropout.segs],
            Kernel::Reorder { segs, .. } if segs.order.len() != 1 => {
                return Err(Error::plan(format!("{body}/{}: positions split along {:?}", op.label, segs.order)));
            }
            Kernel::Reorder { segs, .. } => vec![segs],
            Kernel::Unfused { block, .. } => vec![&block.q, &block.kv],
            Kernel::Sparse(kernel) if kernel.mask().is_some_and(|block| !block.kv.order.is_empty()) => {
                return Err(Error::plan(format!("{body}/{}: chosen keys are those of the whole sequence", op.label)));
            }
            Kernel::Sparse(kernel) if kernel.mask().is_none() => kernel.segs().into_iter().collect(),
            _ => kernel.mask().map_or(vec![], |block| vec![&block.q, &block.kv]),
        };
        own.into_iter().try_for_each(|segs| even(&format!("{body}/{}", op.label), segs))?;
    }
    Ok(())
}

/// Checks that the plan's inputs and outputs fit its tensors.
fn feed(plan: &Plan) -> Result<()> {
    let known = |tensor: TensorId, slot: u32| {
        plan.tensors
            .get(tensor as usize)
            .filter(|t| slot < t.slots)
            .ok_or_else(|| Error::plan(format!("inputs: slot {slot} of tensor {tensor}, which there is not")))
    };
    let Feed::Attention(feed) = &plan.feed else { return Ok(()) };
    for held in feed.given.iter().chain(&feed.taken) {
        let (has, want) = (known(held.tensor, held.slot)?.elems(), held.elems(&feed.spec, &plan.views));
        if has != want {
            let why = format!("inputs: {} has {has} elements, its part of the whole is {want}", held.what.name());
            return Err(Error::plan(why));
        }
    }
    Ok(())
}

/// Elements and dtype of a buffer.
type Size = (u64, Dtype);

/// Checks the ops of each body, once for each combination of tensors bound: their operands have to fit and, where ranks
/// are in step, what an op sends has to be what it receives.
struct Bodies<'a> {
    plan: &'a Plan,
    in_step: bool,
    /// Whether an op meets ops other than itself.
    crosses: &'a dyn Fn(&Op) -> bool,
    group_sizes: Vec<u32>,
    seen: BTreeSet<(BlockId, Vec<TensorId>)>,
    path: Vec<&'a str>,
}

impl<'a> Bodies<'a> {
    fn program(mut self) -> Result<()> {
        let plan = self.plan;
        plan.programs.iter().try_for_each(|program| self.body(&program.ops, &[]))
    }

    fn body(&mut self, ops: &'a [Op], env: &[(TensorId, u32)]) -> Result<()> {
        for op in ops {
            self.path.push(&op.label);
            let size = |buf: &Buf| {
                let tensor = &self.plan.tensors[resolve(buf.of, env).0 as usize];
                (tensor.elems_of(buf.rows), tensor.dtype)
            };
            let elems = |bufs: &[Buf]| bufs.iter().map(|b| size(b).0).collect::<Vec<u64>>();
            self.memory(op, env)?;
            match &op.kind {
                OpKind::Call { block, args, .. } => {
                    let inner = bind(args, env, 0);
                    if self.seen.insert((*block, inner.iter().map(|bound| bound.0).collect())) {
                        self.body(&self.plan.blocks[*block as usize].ops, &inner)?;
                    }
                }
                OpKind::Compute { kernel, reads, writes } => self.kernel(kernel, &elems(reads), &elems(writes))?,
                OpKind::Collective { kind, src, dst, wire, .. } => {
                    self.collective(*kind, op.lane, size(src).0, size(dst).0)?;
                    if *wire == Wire::Fp8 && (*kind != CollectiveKind::AllGather || dst.rows.is_some()) {
                        self.fail(format!("a {} of FP8: only whole slots are gathered so", kind.name()))?;
                    }
                }
                OpKind::Copy { src, dst } if size(src) != size(dst) => {
                    self.fail(format!("{:?} are copied to {:?}", size(src), size(dst)))?
                }
                OpKind::Copy { .. } => {}
                OpKind::Exchange { .. } => exchange(self.plan, op, &size).or_else(|why| self.fail(why))?,
                OpKind::Transfer { legs, .. } if self.in_step && !(self.crosses)(op) => {
                    self.transfer(op.lane, legs, &size)?
                }
                OpKind::Transfer { .. } => {}
            }
            self.path.pop();
        }
        Ok(())
    }

    fn fail(&self, why: String) -> Result<()> {
        Err(Error::plan(format!("{}: {why}", self.path.join("/"))))
    }

    /// Checks that an op on the device touches the device's memory, an op on the CPU the host's, and that a copy goes
    /// from one to the other as its lane says.
    fn memory(&self, op: &Op, env: &[(TensorId, u32)]) -> Result<()> {
        let Some(lane) = op.lane.map(|lane| &self.plan.lanes[lane as usize]) else { return Ok(()) };
        let host = |buf: &Buf| self.plan.tensors[resolve(buf.of, env).0 as usize].host;
        let (reads, writes) = op.bufs();
        let [from, to] = match lane {
            Lane::Copy(Toward::Host) => [false, true],
            Lane::Copy(Toward::Device) => [true, false],
            Lane::Host => [true, true],
            Lane::Compute(_) | Lane::Comm(..) => [false, false],
        };
        if reads.iter().any(|buf| host(buf) != from) || writes.iter().any(|buf| host(buf) != to) {
            let memory = |host| if host { "the host's" } else { "the device's" };
            let why =
                format!("what {} reads is in {} memory, what it writes in {}", lane.label(), memory(from), memory(to));
            return self.fail(why);
        }
        match &op.kind {
            OpKind::Compute { kernel, .. } if *lane == Lane::Host && !kernel.runs_on_host() => {
                self.fail(format!("{} is no kernel of the CPU's", kernel.name()))
            }
            _ => Ok(()),
        }
    }

    fn kernel(&self, kernel: &Kernel, reads: &[u64], writes: &[u64]) -> Result<()> {
        let want = kernel.operands(&self.plan.views);
        let known = want.writes.len();
        let cast_too = kernel.may_cast() && writes.len() == known + 1;
        let fits =
            if cast_too { writes[..known] == want.writes && writes[known] == writes[0] } else { writes == want.writes };
        if reads == want.reads && fits {
            return Ok(());
        }
        self.fail(format!(
            "operands have {reads:?} -> {writes:?} elements, {} needs {:?} -> {:?}",
            kernel.name(),
            want.reads,
            want.writes
        ))
    }

    fn collective(&self, kind: CollectiveKind, lane: Option<u16>, src: u64, dst: u64) -> Result<()> {
        let n = lane.map_or(1, |lane| u64::from(self.group_sizes[lane as usize]));
        let fits = match kind {
            CollectiveKind::AllReduce => src == dst,
            CollectiveKind::ReduceScatter => src == n * dst,
            CollectiveKind::AllGather => n * src == dst,
            CollectiveKind::AllToAll => src == dst && src.is_multiple_of(n),
        };
        if fits {
            return Ok(());
        }
        self.fail(format!("{src} -> {dst} elements, which does not fit {} over {n} ranks", kind.name()))
    }

    /// Checks that the k-th leg of an op that sends over a distance fits the k-th that receives over it.
    fn transfer(&self, lane: Option<u16>, legs: &[Leg], size: &dyn Fn(&Buf) -> Size) -> Result<()> {
        let around = lane.map_or(1, |lane| self.group_sizes[lane as usize]) as i32;
        let of = |dir| legs.iter().filter(move |leg| leg.dir == dir);
        for send in of(Direction::Send) {
            let alike = |leg: &&Leg| (leg.by - send.by).rem_euclid(around) == 0;
            let k = of(Direction::Send).filter(alike).position(|leg| std::ptr::eq(leg, send)).unwrap_or(0);
            let back = |leg: &&Leg| (leg.by + send.by).rem_euclid(around) == 0;
            let Some(recv) = of(Direction::Recv).filter(back).nth(k) else { continue };
            let (sent, received) = (size(&send.buf), size(&recv.buf));
            if send.tag != recv.tag || sent != received {
                return self.fail(format!(
                    "Send by {} with tag {} and {sent:?} meets Recv with tag {} and {received:?}",
                    send.by, send.tag, recv.tag
                ));
            }
        }
        Ok(())
    }
}

/// Checks that every leg that any rank posts has its other half, with the same tag and the same size.
fn legs_meet(plan: &Plan, lines: &[Line], matching: &Matching) -> Result<()> {
    for rank in ranks_to_ask(plan) {
        let own = plan.program_of(rank);
        let line = &lines[own as usize];
        for (at, lane, leg) in matching.legs(own, line) {
            let Lane::Comm(group, _) = &plan.lanes[lane as usize] else { continue };
            let peer = group.neighbour(&plan.views, rank, leg.by);
            let other = plan.program_of(peer);
            let here = || format!("rank {rank}, {}: {:?} by {}", line.path(at.node as usize), leg.dir, leg.by);
            let Some(met) = matching.partner(own, other, lane, &leg, at) else {
                return Err(Error::plan(format!("{} has no other half on rank {peer}", here())));
            };
            let far = &lines[other as usize];
            let OpKind::Transfer { legs, .. } = &far.nodes[met.node as usize].op.kind else { continue };
            let theirs = legs[met.leg as usize];
            let sizes = [leg_elems(plan, line, at.node, &leg), leg_elems(plan, far, met.node, &theirs)];
            if leg.tag != theirs.tag || sizes[0] != sizes[1] {
                return Err(Error::plan(format!(
                    "{} with tag {} and {:?} meets {} with tag {} and {:?}",
                    here(),
                    leg.tag,
                    sizes[0],
                    far.path(met.node as usize),
                    theirs.tag,
                    sizes[1]
                )));
            }
        }
    }
    Ok(())
}

/// Elements and dtype of a leg's buffer.
fn leg_elems(plan: &Plan, line: &Line, node: u32, leg: &Leg) -> Size {
    let places = if leg.dir == Direction::Send { line.reads(node as usize) } else { line.writes(node as usize) };
    let place = places.iter().find(|p| p.named == leg.buf).expect("a leg's buffer is among its op's places");
    (place.elems(plan), place.dtype(plan))
}

/// Ranks whose legs are checked: one is enough when all run the same program, since peers are relative.
fn ranks_to_ask(plan: &Plan) -> std::ops::Range<u32> {
    0..if plan.programs.len() == 1 { 1 } else { plan.ranks() }
}
