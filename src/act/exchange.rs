//! Exchanges of mixture-of-experts layers: every member takes as long as its own rows.

use super::draft::Draft;
use super::{Act, Acts, Gang, RECV, SEND, port};
use crate::collective::LinkTime;
use crate::collective::count::carried;
use crate::collective::exchange::{self, Estimate, Setting, Traffic};
use crate::error::Result;
use crate::plan::link::Line;
use crate::plan::rows::place_of;
use crate::plan::*;
use std::rc::Rc;

/// One member's part of an exchange.
pub struct Exchanged {
    pub time: LinkTime,
    /// Bytes that it sends inside nodes, and between them.
    pub sent: [f64; 2],
    /// SMs that the kernels of the exchange hold.
    pub ctas: u16,
}

/// The key of an exchange's time: everything that the time depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Asked {
    route: u32,
    algo: ExchangeAlgo,
    phase: Phase,
    /// The first member of the gang, which names it.
    first: u32,
    values: u64,
}

/// The times of all members of an exchange, and the rows that each sends and receives.
pub(super) type Found = Rc<(Estimate, Vec<Traffic>)>;

impl Acts<'_> {
    /// Makes a meeting for each class, which begins when all members have started and is over with the class's own last
    /// hop. Errors: those of [`exchange::time`], a member that does not take part.
    pub(super) fn exchange(&mut self, draft: &mut Draft, line: &Line, node: usize, classes: &[usize]) -> Result<()> {
        let lane = line.nodes[node].lane;
        let gangs = self.gangs(lane);
        for &class in classes {
            let gang = &*gangs[class];
            let Exchanged { time, sent, ctas } = self.exchanged(line, node, class, gang)?;
            draft.tallies.link(class, lane, &time);
            draft.tallies.sent(class, sent);
            let mut ends = self.ends(draft, line, node, class, &gangs)?;
            ends.iter_mut().filter(|end| end.class as usize != class).for_each(|end| end.ports = 0);
            let first = draft.met.len() as u32;
            let meeting = draft.meeting(&time, ends);
            draft.met.push(meeting);
            draft.act(node, class, Act::Meet { first, count: 1, ctas });
        }
        Ok(())
    }

    /// The ports through which a class reaches its gang, a bit each.
    pub(super) fn ports_of(&self, class: usize, gang: &Gang) -> u8 {
        let rank = self.fold.representatives[class];
        let tiers = gang.members.iter().map(|&m| self.machine.cluster.tier(rank, m));
        tiers.fold(0, |bits, tier| bits | port(tier, SEND | RECV))
    }

    pub(super) fn exchanged(&mut self, line: &Line, node: usize, class: usize, gang: &Gang) -> Result<Exchanged> {
        let OpKind::Exchange { route, algo, phase, engine, .. } = &line.nodes[node].op.kind else {
            unreachable!("an exchange")
        };
        let place = place_of(&self.plan.views, self.fold.representatives[class]);
        let [values, choices] = carried(self.plan, line, node);
        let asked = Asked { route: *route, algo: *algo, phase: *phase, first: gang.members[0], values };
        let known = self.exchanges.get(&asked).cloned();
        let found = match known {
            Some(found) => found,
            None => {
                let (route, phase) = (self.plan.route_of(*route, gang.members[0]), *phase);
                let (cluster, stack) = (self.machine.cluster, self.machine.stack);
                let members = &gang.members;
                let at = Setting { route, phase, row_bytes: values, members, cluster, stack, library: None };
                let found = Rc::new((exchange::time(&at, *algo)?, exchange::traffic(route, *algo, phase)));
                self.exchanges.insert(asked, found.clone());
                found
            }
        };
        let (estimate, traffic) = &*found;
        let (own, sent) = (estimate.rank(place), traffic.get(place as usize).unwrap_or(&traffic[0]));
        let topk = self.plan.routes[*route as usize].topk;
        let row = exchange::message_row(*algo, *phase, topk, values, choices) as f64;
        let (latency, transfer) = (own.start + own.notify, own.rows());
        let (provenance, rel_sd) = (estimate.provenance, estimate.rel_sd);
        Ok(Exchanged {
            time: LinkTime { latency, transfer, fills: 1.0, provenance, rel_sd },
            sent: [sent.links.sent * row, sent.network.sent * row],
            // The algorithm knows how many SMs its kernels really take.
            ctas: match engine {
                Engine::Sm { .. } => estimate.sms.min(u32::from(u16::MAX)) as u16,
                Engine::CopyEngine => 0,
            },
        })
    }
}
