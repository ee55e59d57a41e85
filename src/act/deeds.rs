//! What the distinct ops of a program do on each class, without looking at whom they meet: that is for whoever
//! goes through events to find out.

use super::exchange::Exchanged;
use super::kernels::{Timed, operands};
use super::{Acts, Gang, Hop, PROVENANCES, RECV, SEND, bytes_of, ctas, picoseconds, port};
use crate::cluster::Tier;
use crate::collective::LinkTime;
use crate::device::OnSms;
use crate::error::Result;
use crate::plan::link::{Line, Place};
use crate::plan::*;
use crate::timeline::Usage;
use std::rc::Rc;

/// What one op does on one class, without whom it meets.
#[derive(Debug, Clone, Copy)]
pub enum Deed {
    /// No time passes: the mask leaves nothing.
    Skip,
    Kernel {
        duration: u64,
        on_sms: OnSms,
    },
    /// An op beside the compute lane: a copy to or from the host's memory, or a kernel of the CPU.
    Aside {
        duration: u64,
    },
    /// A transfer: `count` entries of [`Deeds::ways`] from `first` on.
    Legs {
        first: u32,
        count: u16,
        ctas: u16,
    },
    /// A collective: an entry of [`Deeds::wholes`].
    Whole {
        at: u32,
        ctas: u16,
    },
}

/// A leg as a class sees it; times in ps.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    pub dir: Direction,
    /// Distance from the sender to the receiver, along the lane's group.
    pub by: u32,
    pub sender: u32,
    pub receiver: u32,
    pub latency: u64,
    pub transfer: u64,
    /// The part of its ports that the bytes fill alone.
    pub fills: f64,
    pub bytes: u64,
    /// The ports of this end, a bit each, see [`port`].
    pub ports: u8,
}

/// A collective or an exchange as a class sees it; times in ps.
#[derive(Clone)]
pub struct Whole {
    pub gang: Rc<Gang>,
    pub latency: u64,
    pub transfer: u64,
    /// The collective's kind; `None` for an exchange.
    pub kind: Option<CollectiveKind>,
    /// Bytes of the full buffer; of an exchange, those that the member sends between nodes.
    pub bytes: u64,
    /// Bytes sent by each member inside nodes, and between them.
    pub sent: [f64; 2],
    pub ports: u8,
    /// Whether every member is over with its own bytes, rather than with those of all.
    pub apart: bool,
}

/// The deeds of all distinct ops of a program.
pub struct Deeds {
    /// The classes that run the program.
    pub classes: Vec<usize>,
    /// A deed for each op and class: op after op, class after class.
    deeds: Vec<Deed>,
    /// How long the CPU takes to issue each op, in `host_launch`es.
    launches: Vec<u32>,
    pub ways: Vec<Way>,
    pub wholes: Vec<Whole>,
    /// The usage of each class, if each op runs as often as [`Acts::deeds`] was told.
    pub usages: Vec<Usage>,
}

impl Deeds {
    pub fn of(&self, op: u32, class: usize) -> Deed {
        self.deeds[op as usize * self.classes.len() + class]
    }

    /// How long the CPU takes to issue an op, in `host_launch`es: 0 where a mask leaves nothing of it.
    pub fn launches(&self, op: u32, class: usize) -> u32 {
        if matches!(self.of(op, class), Deed::Skip) { 0 } else { self.launches[op as usize] }
    }

    /// Adds a kernel that stands for those of `ops`, one after the other: SMs decide as much of it as they decide of
    /// these. Returns its number and, for each class, how long the CPU takes to issue the first kernel and all of them.
    pub fn join(&mut self, ops: &[u32]) -> (u32, Vec<[u32; 2]>) {
        let (number, mut issues) = (self.launches.len() as u32, vec![]);
        for class in 0..self.classes.len() {
            let (mut sum, mut bound, mut own) = (0, 0.0, [0, 0]);
            for &op in ops {
                if let Deed::Kernel { duration, on_sms } = self.of(op, class) {
                    sum += duration;
                    bound += if on_sms.decide() { duration as f64 * f64::from(on_sms.computes) } else { 0.0 };
                    let launches = self.launches(op, class);
                    own = [if own[0] > 0 { own[0] } else { launches }, own[1] + launches];
                }
            }
            issues.push(own);
            let on_sms = match bound > 0.0 {
                true => OnSms { computes: (bound / sum as f64) as f32, on_top: (1.0 - bound / sum as f64) as f32 },
                false => OnSms::NONE,
            };
            let whole = Deed::Kernel { duration: sum, on_sms };
            self.deeds.push(if own[1] > 0 { whole } else { Deed::Skip });
        }
        // Whoever issues the kernel uses the numbers that are returned.
        self.launches.push(1);
        (number, issues)
    }

    /// The longest time that any kernel, leg or collective takes alone, ps.
    pub fn longest(&self) -> u64 {
        let kernel = |deed: &Deed| if let Deed::Kernel { duration, .. } = deed { *duration } else { 0 };
        let kernels = self.deeds.iter().map(kernel);
        let ways = self.ways.iter().map(|way| way.latency.saturating_add(way.transfer));
        let wholes = self.wholes.iter().map(|whole| whole.latency.saturating_add(whole.transfer));
        kernels.chain(ways).chain(wholes).max().unwrap_or(0)
    }

    /// Makes a kernel last `longest` ps on the classes where it takes longest, and in proportion on the others.
    pub fn last(&mut self, op: u32, longest: u64) {
        let classes = self.classes.len();
        let deeds = &mut self.deeds[op as usize * classes..][..classes];
        let alone = |deed: &Deed| if let Deed::Kernel { duration, .. } = deed { *duration } else { 0 };
        let most = deeds.iter().map(alone).max().unwrap_or(0);
        for deed in deeds {
            if let Deed::Kernel { duration, .. } = deed {
                let scaled = || (longest as f64 * (*duration as f64 / most as f64)).round() as u64;
                *duration = if *duration == most { longest } else { scaled() };
            }
        }
    }

    /// The ports that an op uses, a bit each, see [`port`].
    pub fn ports(&self, op: u32, class: usize) -> u8 {
        match self.of(op, class) {
            Deed::Legs { first, count, .. } => self.legs(first, count).iter().fold(0, |bits, way| bits | way.ports),
            Deed::Whole { at, .. } => self.wholes[at as usize].ports,
            Deed::Skip | Deed::Kernel { .. } | Deed::Aside { .. } => 0,
        }
    }

    pub fn legs(&self, first: u32, count: u16) -> &[Way] {
        &self.ways[first as usize..][..count as usize]
    }
}

impl Acts<'_> {
    /// The deeds of the ops at `nodes` of a program's line; with each node comes how often it runs. Errors: a copy to a
    /// host's memory that the cluster says nothing of, an exchange that its library or the cluster refuses.
    pub fn deeds(&mut self, program: u32, line: &Line, nodes: &[(u32, u32)]) -> Result<Deeds> {
        let classes: Vec<usize> = (0..self.program.len()).filter(|&c| self.program[c] == program).collect();
        let (deeds, usages) = (Vec::with_capacity(nodes.len() * classes.len()), vec![Usage::default(); classes.len()]);
        let mut all = Deeds { classes, deeds, launches: vec![], ways: vec![], wholes: vec![], usages };
        for &(node, times) in nodes {
            let (node, times) = (node as usize, f64::from(times));
            all.launches.push(self.machine.launches(line.nodes[node].op));
            match &line.nodes[node].op.kind {
                OpKind::Copy { .. } => self.asides_of(&mut all, line, node, times)?,
                OpKind::Compute { .. } if !self.plan.lanes[line.nodes[node].lane as usize].computes() => {
                    self.asides_of(&mut all, line, node, times)?
                }
                OpKind::Compute { kernel, .. } => self.kernels_of(&mut all, line, node, kernel, times),
                OpKind::Transfer { legs, engine } => self.legs_of(&mut all, line, node, legs, ctas(*engine), times),
                OpKind::Collective { .. } => self.wholes_of(&mut all, line, node, times),
                OpKind::Exchange { .. } => self.exchanges_of(&mut all, line, node, times)?,
                OpKind::Call { .. } => unreachable!("calls are spliced"),
            }
        }
        Ok(all)
    }

    fn asides_of(&mut self, all: &mut Deeds, line: &Line, node: usize, times: f64) -> Result<()> {
        let lane = &self.plan.lanes[line.nodes[node].lane as usize];
        let (sizes, _) = operands(self.plan, line, node);
        let (reads, writes) = sizes.split();
        let aside = self.aside(lane, reads, writes)?;
        for usage in &mut all.usages {
            let s = aside.duration as f64 * 1e-12 * times;
            usage.busy(lane, s);
            *usage.by_provenance.entry(PROVENANCES[aside.provenance as usize]).or_default() += s;
            usage.bytes_host += aside.bytes as f64 * times;
            all.deeds.push(Deed::Aside { duration: aside.duration });
        }
        Ok(())
    }

    fn kernels_of(&mut self, all: &mut Deeds, line: &Line, node: usize, kernel: &Kernel, times: f64) {
        let (first, name) = (all.deeds.len(), kernel.name());
        all.deeds.resize(first + all.classes.len(), Deed::Skip);
        let (deeds, usages, mut at) = (&mut all.deeds, &mut all.usages, 0);
        self.kernel(line, node, kernel, &all.classes, |class, flops, timed| {
            while all.classes[at] != class {
                at += 1;
            }
            let Timed { duration, on_sms, provenance, rel_sd } = timed;
            deeds[first + at] = Deed::Kernel { duration, on_sms };
            let (usage, s) = (&mut usages[at], duration as f64 * 1e-12 * times);
            *usage.by_kernel.entry(name).or_default() += s;
            *usage.by_provenance.entry(PROVENANCES[provenance as usize]).or_default() += s;
            usage.sd += rel_sd * s;
            usage.flops += flops as f64 * times;
        });
    }

    fn legs_of(&mut self, all: &mut Deeds, line: &Line, node: usize, legs: &[Leg], ctas: u16, times: f64) {
        let lane = line.nodes[node].lane;
        let size = self.group(lane).size(&self.plan.views) as i32;
        let bytes = |leg: &Leg| {
            let mut places = line.reads(node).iter().chain(line.writes(node));
            bytes_of(self.plan, places.find(|p| p.named == leg.buf).expect("a leg's buffer is an operand"))
        };
        let sizes: Vec<u64> = legs.iter().map(bytes).collect();
        let hops: Vec<Rc<[Hop]>> = legs.iter().zip(&sizes).map(|(leg, &b)| self.hops(lane, leg.by, b)).collect();
        for (at, &class) in all.classes.iter().enumerate() {
            let first = all.ways.len() as u32;
            for ((leg, &bytes), hops) in legs.iter().zip(&sizes).zip(&hops) {
                let Hop { time, tier, peer } = hops[class];
                let (own, peer) = (class as u32, self.class_of(peer));
                let (by, sender, receiver, way) = match leg.dir {
                    Direction::Send => (leg.by, own, peer, SEND),
                    Direction::Recv => (leg.by.wrapping_neg(), peer, own, RECV),
                };
                let (latency, transfer) = (picoseconds(time.latency), picoseconds(time.transfer));
                let (by, ports) = (by.rem_euclid(size) as u32, port(tier, way));
                let fills = time.fills;
                all.ways.push(Way { dir: leg.dir, by, sender, receiver, latency, transfer, fills, bytes, ports });
                if leg.dir == Direction::Send {
                    count(&mut all.usages[at], self.plan, lane, &time, times);
                    carry(&mut all.usages[at], tier, bytes as f64 * times);
                }
            }
            all.deeds.push(Deed::Legs { first, count: legs.len() as u16, ctas });
        }
    }

    fn wholes_of(&mut self, all: &mut Deeds, line: &Line, node: usize, times: f64) {
        let spliced = &line.nodes[node];
        let OpKind::Collective { kind, wire, engine, .. } = &spliced.op.kind else { unreachable!("a collective") };
        let elems = |p: &Place| bytes_of(self.plan, p) / self.plan.tensors[p.tensor as usize].dtype.size();
        let bytes = elems(&line.reads(node)[0]).max(elems(&line.writes(node)[0])) * wire.size();
        let gangs = self.gangs(spliced.lane);
        for (at, &class) in all.classes.iter().enumerate() {
            let gang = gangs[class].clone();
            let (time, sent) = self.link(*kind, spliced.lane, &gang, bytes);
            let usage = &mut all.usages[at];
            count(usage, self.plan, spliced.lane, &time, times);
            carry(usage, Tier::ScaleUp, sent[0] * times);
            carry(usage, Tier::ScaleOut, sent[1] * times);
            let rank = self.fold.representatives[class];
            let tiers = gang.members.iter().map(|&m| self.machine.cluster.tier(rank, m));
            let ports = tiers.fold(0, |bits, tier| bits | port(tier, SEND | RECV));
            let (latency, transfer) = (picoseconds(time.latency), picoseconds(time.transfer));
            all.deeds.push(Deed::Whole { at: all.wholes.len() as u32, ctas: ctas(*engine) });
            let kind = Some(*kind);
            all.wholes.push(Whole { gang, latency, transfer, kind, bytes, sent, ports, apart: false });
        }
    }
}

impl Acts<'_> {
    fn exchanges_of(&mut self, all: &mut Deeds, line: &Line, node: usize, times: f64) -> Result<()> {
        let spliced = &line.nodes[node];
        let gangs = self.gangs(spliced.lane);
        for (at, &class) in all.classes.iter().enumerate() {
            let gang = gangs[class].clone();
            let Exchanged { time, sent, ctas } = self.exchanged(line, node, class, &gang)?;
            let usage = &mut all.usages[at];
            count(usage, self.plan, spliced.lane, &time, times);
            carry(usage, Tier::ScaleUp, sent[0] * times);
            carry(usage, Tier::ScaleOut, sent[1] * times);
            let ports = self.ports_of(class, &gang);
            let (latency, transfer) = (picoseconds(time.latency), picoseconds(time.transfer));
            all.deeds.push(Deed::Whole { at: all.wholes.len() as u32, ctas });
            let bytes = sent[1] as u64;
            all.wholes.push(Whole { gang, latency, transfer, kind: None, bytes, sent, ports, apart: true });
        }
        Ok(())
    }
}

/// Notes `times` times that a class communicates for `time`.
fn count(usage: &mut Usage, plan: &Plan, lane: u16, time: &LinkTime, times: f64) {
    let s = time.total().value() * times;
    usage.busy(&plan.lanes[lane as usize], s);
    *usage.by_provenance.entry(PROVENANCES[time.provenance as usize]).or_default() += s;
    usage.comm_sd += time.rel_sd * s;
}

fn carry(usage: &mut Usage, tier: Tier, bytes: f64) {
    match tier {
        Tier::ScaleOut => usage.bytes_scale_out += bytes,
        Tier::ScaleUp | Tier::Local => usage.bytes_scale_up += bytes,
    }
}
