//! What every op of a line does on every class, and who meets whom: written once, read by whoever walks the line.

use super::meetings::Transit;
use super::ports::numbers;
use super::tallies::Tallies;
use crate::device::OnSms;
use crate::plan::link::Csr;
use std::ops::Range;
use std::rc::Rc;

/// One op on one class.
#[derive(Debug, Clone, Copy)]
pub enum Act {
    /// No time passes: the mask leaves nothing, or the class has no such op.
    Skip,
    Compute {
        duration: u64,
        on_sms: OnSms,
    },
    /// An op beside the compute lane that takes no SM from it: a copy to or from the host's memory, or a kernel of the
    /// CPU.
    Aside {
        duration: u64,
    },
    /// A transfer or collective, which ends when all its meetings have: `count` entries of [`Sheet::met`] from `first`
    /// on.
    Meet {
        first: u32,
        count: u16,
        ctas: u16,
    },
}

/// A leg with its other half, or a whole collective: its bytes set off when all ends have started.
#[derive(Debug, Clone)]
pub struct Meeting {
    pub transit: Transit,
    /// Entries of [`Sheet::ends`].
    pub(super) ends: Range<u32>,
}

/// A class that takes part in a meeting, with which op and through which ports.
#[derive(Debug, Clone, Copy)]
pub struct End {
    pub class: u32,
    pub node: u32,
    /// The ports it uses, a bit each, see [`port`].
    pub(super) ports: u8,
}

impl End {
    /// The ports used, by number.
    #[inline]
    pub fn ports(self) -> impl Iterator<Item = usize> {
        numbers(self.ports)
    }
}

/// The acts of all classes on a line, and what they add up to when each runs once.
#[derive(Clone)]
pub struct Sheet {
    pub(super) classes: usize,
    /// An act for each op and class: node after node, class after class.
    pub(super) acts: Vec<Act>,
    pub meetings: Vec<Meeting>,
    pub(super) ends: Rc<[End]>,
    pub(super) met: Rc<[u32]>,
    /// The meetings of each node: leg by leg and not class by class, so that ports are as busy for the last class as
    /// for the first. A meeting that two nodes have in common stands with the first.
    pub(super) order: Rc<Csr>,
    /// How long the CPU takes to issue an op, in `host_launch`es: node after node, class after class.
    pub(super) launches: Rc<[u32]>,
    /// How long the CPU takes from the first node of the line until it has issued a node, in `host_launch`es; behind
    /// the last node, that of the whole line.
    pub(super) issued: Vec<u32>,
    pub tallies: Rc<Tallies>,
}

impl Sheet {
    #[inline]
    pub fn act(&self, node: usize, class: usize) -> Act {
        self.acts[node * self.classes + class]
    }

    /// How long a class takes until it has issued `node`, in `host_launch`es.
    #[inline]
    pub fn issued(&self, node: usize, class: usize) -> u64 {
        u64::from(self.issued[node * self.classes + class])
    }

    /// How long a class takes until it has issued the whole line, in `host_launch`es.
    #[inline]
    pub fn issues(&self, class: usize) -> u64 {
        u64::from(self.issued[self.issued.len() - self.classes + class])
    }

    #[inline]
    pub fn met(&self, first: u32, count: u16) -> &[u32] {
        &self.met[first as usize..][..count as usize]
    }

    /// The acts of every class at `node`.
    #[inline]
    pub fn acts(&self, node: usize) -> &[Act] {
        &self.acts[node * self.classes..][..self.classes]
    }

    /// How long every class takes until it has issued `node`, in `host_launch`es.
    #[inline]
    pub fn all_issued(&self, node: usize) -> &[u32] {
        &self.issued[node * self.classes..][..self.classes]
    }

    /// The meetings that come about at a node.
    #[inline]
    pub fn meetings_of(&self, node: usize) -> &[u32] {
        self.order.of(node)
    }

    #[inline]
    pub fn ends(&self, meeting: &Meeting) -> &[End] {
        &self.ends[meeting.ends.start as usize..meeting.ends.end as usize]
    }
}

/// [`Sheet::issued`] of these acts. Ops that a mask leaves nothing of are not issued.
pub(super) fn issued(acts: &[Act], launches: &[u32], classes: usize) -> Vec<u32> {
    let mut all = Vec::with_capacity(acts.len() + classes);
    let mut count = vec![0; classes];
    for (acts, launches) in acts.chunks(classes).zip(launches.chunks(classes)) {
        let each = acts.iter().zip(launches);
        count
            .iter_mut()
            .zip(each)
            .for_each(|(count, (act, &own))| *count += if matches!(act, Act::Skip) { 0 } else { own });
        all.extend_from_slice(&count);
    }
    all.extend_from_slice(&count);
    all
}

/// The meetings of every node, see [`Sheet::order`].
pub(super) fn order(acts: &[Act], classes: usize, met: &[u32], meetings: usize) -> Csr {
    let (mut all, mut own, mut seen) = (Csr::default(), vec![], vec![false; meetings]);
    for acts in acts.chunks(classes) {
        let of = |act: &Act| match *act {
            Act::Meet { first, count, .. } => &met[first as usize..][..count as usize],
            _ => &[],
        };
        let legs = acts.iter().map(|act| of(act).len()).max().unwrap_or(0);
        for meeting in (0..legs).flat_map(|leg| acts.iter().filter_map(move |act| of(act).get(leg))) {
            if !std::mem::replace(&mut seen[*meeting as usize], true) {
                own.push(*meeting);
            }
        }
        all.push(&own);
        own.clear();
    }
    all
}
