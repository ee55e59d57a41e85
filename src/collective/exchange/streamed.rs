//! The time of kernels that stream rows: their start, then the slowest of network, links and SMs, by rank.

use super::{Estimate, RankTime, Setting, Traffic};
use crate::plan::route::Phase;
use crate::spec::{ExchangePass, ExchangeSpec, Origin, Provenance, Sourced, shipped};
use crate::units::Seconds;
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// A library, and the SMs that it runs on and keeps from others.
pub(super) struct Library {
    pub spec: &'static ExchangeSpec,
    pub sms: u32,
    pub held: u32,
}

/// The shipped library of this name.
pub fn library(name: &str) -> &'static ExchangeSpec {
    static ALL: OnceLock<BTreeMap<&'static str, ExchangeSpec>> = OnceLock::new();
    let read = |name| (name, ExchangeSpec::find(name).expect("shipped files are read by a test"));
    &ALL.get_or_init(|| shipped("exchange").map(read).collect())[name]
}

/// How long an exchange by such a library takes; `wire`: bytes of a row where it leaves the node.
pub(super) fn streamed(at: &Setting, all: &[Traffic], library: &Library, wire: u64) -> Estimate {
    let pass = if at.phase == Phase::Combine { &library.spec.combine } else { &library.spec.dispatch };
    let on = On { at, pass, sms: f64::from(library.sms.max(1)), wire: wire as f64 };
    let notify = |rank: usize| {
        let choices = at.route.tokens(rank as u32) as f64 * f64::from(at.route.topk);
        notify(library.spec, at.phase, choices, at.route.nodes())
    };
    let ranks = all.iter().enumerate().map(|(rank, t)| on.rank(rank, t, notify(rank)));
    Estimate {
        ranks: ranks.collect(),
        sms: library.held,
        provenance: provenance(if at.route.nodes() > 1 { pass.nic.provenance } else { pass.links.provenance }),
        rel_sd: pass.rel_sd.value,
    }
}

fn notify(spec: &ExchangeSpec, phase: Phase, choices: f64, nodes: u32) -> Seconds {
    match &spec.notify {
        Some(n) if phase == Phase::Dispatch => {
            let layout = n.layout.value + n.layout_choice.value * choices;
            layout + n.counts.value + n.node.value * f64::from(nodes)
        }
        _ => Seconds::ZERO,
    }
}

fn provenance(origin: Origin) -> Provenance {
    match origin {
        Origin::Measured | Origin::Published | Origin::Derived => Provenance::Interpolated,
        Origin::Assumed => Provenance::Assumed,
    }
}

struct On<'a> {
    at: &'a Setting<'a>,
    pass: &'a ExchangePass,
    sms: f64,
    wire: f64,
}

impl On<'_> {
    fn rank(&self, rank: usize, t: &Traffic, notify: Seconds) -> RankTime {
        let (pass, row) = (self.pass, self.at.row_bytes as f64);
        let far = self.at.route.nodes() > 1;
        let mut start = pass.start.value + Seconds::new(row / pass.fill.value.value());
        if far {
            start += pass.network_start.value;
        }
        if let Some(doubling) = &pass.doubling {
            start += doubling.value * f64::from(self.at.route.ranks).log2();
        }
        let tokens = self.at.route.tokens(rank as u32) as f64;
        RankTime {
            start,
            notify,
            finish: pass.finish.as_ref().map_or(Seconds::ZERO, |each| each.value * tokens),
            network: if far { self.network(t) } else { Seconds::ZERO },
            links: self.links(t).max(self.pairs(t)),
            sms: if far { self.forwarding(t) } else { self.copying(rank, t) },
            in_turn: false,
        }
    }

    /// The time over the NICs of a rank, or over the uplinks of pods where these are narrower.
    fn network(&self, t: &Traffic) -> Seconds {
        let cluster = self.at.cluster;
        let out = cluster.spec.scale_out.as_ref().expect("asked for before");
        let nic = out.raw.value.value() * self.pass.nic.value * cluster.nics_per_rank().unwrap_or(1.0);
        let bytes = t.network.busier() * self.wire;
        let route = self.at.route;
        let one = bytes / f64::from(route.ranks - route.node).max(1.0);
        Seconds::new((bytes / nic).max(one * cluster.beyond_pods(self.at.members) / nic)).max(self.posting(t))
    }

    /// The time of the messages that one thread posts, one after another.
    fn posting(&self, t: &Traffic) -> Seconds {
        let (route, value) =
            (self.at.route, |each: &Option<Sourced<Seconds>>| each.as_ref().map_or(0.0, |s| s.value.value()));
        let told = if self.at.phase == Phase::Combine { route.ranks } else { route.experts };
        let signals = f64::from(told) * f64::from(route.ranks - route.node) / f64::from(route.ranks);
        Seconds::new(t.network.busier() * value(&self.pass.message) + signals * value(&self.pass.signal))
    }

    fn links(&self, t: &Traffic) -> Seconds {
        let (spec, route) = (&self.at.cluster.spec, self.at.route);
        let near = self.pass.links.value;
        let part = self.pass.links_far.as_ref().filter(|_| route.nodes() > 1).map_or(near, |far| far.value);
        let peer = self.at.cluster.slowest_peer(self.at.members);
        let up = &spec.scale_up;
        let ring = up.ring(spec.gpus_per_node, route.node, peer);
        // Where each peer has links of its own, rows take those of all peers at once, which a ring may not.
        let direct = peer.map(|one| up.p2p.value.min(one * f64::from(route.node.saturating_sub(1))));
        let rate = direct.map_or(ring, |direct| direct.max(ring)).value() * part;
        let header = self.pass.header.as_ref().map_or(0.0, |bytes| bytes.value);
        Seconds::new(t.links.busier() * (self.at.row_bytes as f64 + header) / rate)
    }

    /// The time from a rank to each other rank of its node, where one pair is no faster than it can be.
    fn pairs(&self, t: &Traffic) -> Seconds {
        let rows = t.links.busier() / f64::from(self.at.route.node - 1).max(1.0);
        let row = self.pass.peer_row.as_ref().map_or(0.0, |row| row.value.value());
        let bytes = self.pass.peer_rate.as_ref().map_or(0.0, |rate| self.at.row_bytes as f64 / rate.value.value());
        Seconds::new(rows * row.max(bytes))
    }

    /// The time of the SMs inside a node: a share of them for each row and each token.
    fn copying(&self, rank: usize, t: &Traffic) -> Seconds {
        let (pass, row) = (self.pass, self.at.row_bytes as f64);
        let rows = t.links.busier() + t.links.kept;
        let tokens = self.at.route.tokens(rank as u32) as f64;
        let rows = rows * (pass.row.value.value() + row / pass.row_rate.value.value());
        let tokens = tokens * (pass.token.value.value() + row / pass.token_rate.value.value());
        Seconds::new((rows + tokens) / self.sms)
    }

    /// The time of the SMs across nodes: all rows that the links bring to a rank have been forwarded by a rank.
    fn forwarding(&self, t: &Traffic) -> Seconds {
        let each = self.pass.forward_row.as_ref().map_or(0.0, |row| row.value.value());
        let row = each + self.at.row_bytes as f64 / self.pass.forward.value.value();
        Seconds::new((t.links.busier() + t.links.kept) * row / self.sms)
    }
}
