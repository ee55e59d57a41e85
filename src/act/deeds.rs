//! What the distinct ops of a program do on each class, without looking at whom they meet: a sheet finds that out as it
//! is written, an engine as it goes through events.

use super::kernels::operands;
use super::meetings::{Part, over};
use super::tallies::{Tallies, number_of};
use super::{Acts, Gang, Hop, RECV, SEND, Transit, ctas, port};
use crate::cluster::Tier;
use crate::device::OnSms;
use crate::error::Result;
use crate::plan::link::Line;
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

/// A leg as a class sees it.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    pub dir: Direction,
    /// Distance from the sender to the receiver, along the lane's group.
    pub by: u32,
    pub sender: u32,
    pub receiver: u32,
    pub transit: Transit,
    pub bytes: u64,
    pub tier: Tier,
}

impl Way {
    /// The ports of this end, a bit each, see [`port`].
    pub fn ports(&self) -> u8 {
        port(self.tier, if self.dir == Direction::Send { SEND } else { RECV })
    }
}

/// A collective or an exchange as a class sees it.
#[derive(Clone)]
pub struct Whole {
    pub gang: Rc<Gang>,
    pub transit: Transit,
    /// The collective's kind; `None` for an exchange.
    pub kind: Option<CollectiveKind>,
    /// Bytes of the full buffer; of an exchange, those that the member sends between nodes.
    pub bytes: u64,
    /// Bytes sent by each member inside nodes, and between them.
    pub sent: [f64; 2],
    pub ports: u8,
}

impl Whole {
    /// Whether every member is over with its own bytes, rather than with those of all: those of exchanges are.
    pub fn apart(&self) -> bool {
        self.kind.is_none()
    }
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
    /// What all ops add up to, if each runs as often as [`Acts::deeds`] was told: class after class of `classes`.
    pub(super) tallies: Tallies,
    /// The names of kernels, by the numbers that the tallies have for them.
    kernels: Vec<&'static str>,
}

impl Deeds {
    pub fn of(&self, op: u32, class: usize) -> Deed {
        self.deeds[op as usize * self.classes.len() + class]
    }

    /// How long the CPU takes to issue an op, in `host_launch`es: 0 where a mask leaves nothing of it.
    pub fn launches(&self, op: u32, class: usize) -> u32 {
        if matches!(self.of(op, class), Deed::Skip) { 0 } else { self.launches_unmasked(op) }
    }

    /// How long the CPU takes to issue an op where anything is left of it, in `host_launch`es.
    pub(super) fn launches_unmasked(&self, op: u32) -> u32 {
        self.launches[op as usize]
    }

    /// What the ops of a class add up to, which is counted among `classes`.
    pub fn usage(&self, class: usize, lanes: &[Lane]) -> Usage {
        self.tallies.usage(class, &self.kernels, lanes)
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
        let ways = self.ways.iter().map(|way| way.transit.latency.saturating_add(way.transit.transfer));
        let wholes = self.wholes.iter().map(|whole| whole.transit.latency.saturating_add(whole.transit.transfer));
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
            Deed::Legs { first, count, .. } => self.legs(first, count).iter().fold(0, |bits, way| bits | way.ports()),
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
        self.name_kernels(line);
        let classes: Vec<usize> = (0..self.program.len()).filter(|&c| self.program[c] == program).collect();
        let tallies = Tallies::new(self.names.len(), self.plan.lanes.len(), classes.len());
        let (deeds, kernels) = (Vec::with_capacity(nodes.len() * classes.len()), self.names.clone());
        let mut all = Deeds { classes, deeds, launches: vec![], ways: vec![], wholes: vec![], tallies, kernels };
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
                OpKind::Collective { .. } | OpKind::Exchange { .. } => self.wholes_of(&mut all, line, node, times)?,
                OpKind::Call { .. } => unreachable!("calls are spliced"),
            }
        }
        Ok(all)
    }

    fn asides_of(&mut self, all: &mut Deeds, line: &Line, node: usize, times: f64) -> Result<()> {
        let lane = line.nodes[node].lane;
        let (sizes, _) = operands(self.plan, line, node);
        let (reads, writes) = sizes.split();
        let aside = self.aside(&self.plan.lanes[lane as usize], reads, writes)?;
        for class in 0..all.classes.len() {
            all.tallies.aside(class, lane, aside, times);
            all.deeds.push(Deed::Aside { duration: aside.duration });
        }
        Ok(())
    }

    fn kernels_of(&mut self, all: &mut Deeds, line: &Line, node: usize, kernel: &Kernel, times: f64) {
        let (first, number) = (all.deeds.len(), number_of(&self.names, kernel.name()) as u16);
        all.deeds.resize(first + all.classes.len(), Deed::Skip);
        let (deeds, tallies, mut at) = (&mut all.deeds, &mut all.tallies, 0);
        self.kernel(line, node, kernel, &all.classes, |class, flops, timed| {
            while all.classes[at] != class {
                at += 1;
            }
            deeds[first + at] = Deed::Kernel { duration: timed.duration, on_sms: timed.on_sms };
            tallies.kernel(at, number, flops, timed, times);
        });
    }

    fn legs_of(&mut self, all: &mut Deeds, line: &Line, node: usize, legs: &[Leg], ctas: u16, times: f64) {
        let lane = line.nodes[node].lane;
        let size = self.group(lane).size(&self.plan.views) as i32;
        let bytes = |leg: &Leg| {
            let mut places = line.reads(node).iter().chain(line.writes(node));
            places.find(|p| p.named == leg.buf).expect("a leg's buffer is an operand").bytes(self.plan)
        };
        let sizes: Vec<u64> = legs.iter().map(bytes).collect();
        let to_peer = |leg: &Leg| together(legs.iter().zip(sizes.iter().copied()), leg);
        let hops = legs.iter().zip(&sizes).map(|(leg, &b)| self.hops(lane, leg.by, [b, to_peer(leg)]));
        let hops: Vec<Rc<[Hop]>> = hops.collect();
        for (at, &class) in all.classes.iter().enumerate() {
            let first = all.ways.len() as u32;
            for ((leg, &bytes), hops) in legs.iter().zip(&sizes).zip(&hops) {
                let Hop { time, own: alone, tier, peer } = hops[class];
                let (own, peer) = (class as u32, self.class_of(peer));
                let (by, sender, receiver) = match leg.dir {
                    Direction::Send => (leg.by, own, peer),
                    Direction::Recv => (leg.by.wrapping_neg(), peer, own),
                };
                let (by, transit) = (by.rem_euclid(size) as u32, Transit::of(&time));
                all.ways.push(Way { dir: leg.dir, by, sender, receiver, transit, bytes, tier });
                if leg.dir == Direction::Send {
                    all.tallies.link(at, lane, &alone, over(tier, bytes), times);
                }
            }
            all.deeds.push(Deed::Legs { first, count: legs.len() as u16, ctas });
        }
    }

    /// Errors: those of [`Acts::exchanged`].
    fn wholes_of(&mut self, all: &mut Deeds, line: &Line, node: usize, times: f64) -> Result<()> {
        let lane = line.nodes[node].lane;
        let kind = if let OpKind::Collective { kind, .. } = line.nodes[node].op.kind { Some(kind) } else { None };
        let gangs = self.gangs(lane);
        for (at, &class) in all.classes.iter().enumerate() {
            let gang = gangs[class].clone();
            let Part { time, bytes, sent, ctas } = match kind {
                Some(kind) => self.gathered(line, node, kind, &gang),
                None => self.exchanged(line, node, class, &gang)?,
            };
            all.tallies.link(at, lane, &time, sent, times);
            let ports = gang.ports(self.machine.cluster.node_of(self.representative(class as u32)));
            all.deeds.push(Deed::Whole { at: all.wholes.len() as u32, ctas });
            let transit = Transit::of(&time);
            all.wholes.push(Whole { gang, transit, kind, bytes, sent, ports });
        }
        Ok(())
    }
}

/// Bytes of all legs of an op that go to, or come from, the peer of one of them.
pub fn together<'l>(legs: impl Iterator<Item = (&'l Leg, u64)>, leg: &Leg) -> u64 {
    legs.filter(|(other, _)| (other.dir, other.by) == (leg.dir, leg.by)).map(|(_, bytes)| bytes).sum()
}
