//! Exchanges of mixture-of-experts layers: every member takes as long as its own rows.

use super::meetings::Part;
use super::{Acts, Gang};
use crate::collective::LinkTime;
use crate::collective::count::carried;
use crate::collective::exchange::{self, Estimate, Setting, Traffic};
use crate::error::Result;
use crate::plan::link::Line;
use crate::plan::rows::place_of;
use crate::plan::*;
use std::rc::Rc;

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
    /// A member's part of an exchange. Errors: those of [`exchange::time`].
    pub(super) fn exchanged(&mut self, line: &Line, node: usize, class: usize, gang: &Gang) -> Result<Part> {
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
                let found = Rc::new((exchange::time(&at, *algo)?, exchange::traffic_of(&at, *algo)));
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
        let sent = [sent.links.sent * row, sent.network.sent * row];
        Ok(Part {
            time: LinkTime { latency, transfer, fills: 1.0, provenance, rel_sd },
            bytes: sent[1] as u64,
            sent,
            // The algorithm knows how many SMs its kernels really take.
            ctas: match engine {
                Engine::Sm { .. } => estimate.sms.min(u32::from(u16::MAX)) as u16,
                Engine::CopyEngine => 0,
            },
        })
    }
}
