//! Sends by NCCL's channel rule (src/enqueue.cc, src/graph/paths.cc), one alone and one to every peer.

use super::shape::Shape;
use super::{LinkTime, Nccl, SPREAD_BETWEEN, SPREAD_SENDS, provenance};
use crate::cluster::{Cluster, Tier};
use crate::spec::{Architecture, ScaleOut, StackSpec};
use crate::units::{Bytes, BytesPerSec, Seconds};

/// A message above so much a channel is announced before it is sent (NCCL: Simple in place of LL).
const ANNOUNCED: f64 = 16.0 * KIB;
const KIB: f64 = 1024.0;
/// A channel gets at least this much of a message ..
const MIN_PART: f64 = 64.0 * KIB;
/// .. and, as long as there are more channels, at most this much, or a chunk where the communicator has several nodes.
const MAX_PART: f64 = 16.0 * KIB * KIB;
const CHUNK: f64 = 128.0 * KIB;

/// Channels of a send to another node, unless told otherwise.
const BETWEEN: u32 = 2;
/// Beside so many operations a channel each keeps its sync warp.
const BESIDE: u32 = 4;

/// Who sends to whom: a communicator of so many ranks, on so many nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Comm {
    pub size: u32,
    pub nodes: u32,
}

/// Thread blocks that one send inside a node gets. Few for all but huge messages, and the fewer the more
/// ranks the communicator has: a channel is kept for each of them. Every peer gets as many as the one with the fewest,
/// so beside peers on other nodes it is what a NIC gets, in parts of a chunk: however large the message.
fn channels(cluster: &Cluster, stack: &StackSpec, bytes: f64, comm: Comm) -> u32 {
    let own = (2 * cluster.spec.scale_up.links).next_power_of_two().min(stack.p2p_ctas.value);
    let most = if BETWEEN * comm.size > BESIDE * own { 1 } else { BETWEEN };
    let (all, max_part) = if comm.nodes > 1 { (own.min(most), CHUNK) } else { (own, MAX_PART) };
    let mut few = all;
    while few > 1 && few * comm.size > own {
        few /= 2;
    }
    let wanted = (bytes / MIN_PART).ceil().max(1.0);
    let mut n = if wanted < f64::from(few) { wanted as u32 } else { few };
    while bytes / f64::from(n) > max_part && n <= all / 2 {
        n *= 2;
    }
    n
}

/// What a send between nodes reaches.
fn of_a_send(out: &ScaleOut, stack: &StackSpec) -> BytesPerSec {
    stack.tuned_sends.as_ref().map_or(out.p2p.value, |part| out.p2p.value.max(out.raw.value * part.value))
}

/// From the start of both ends to the first byte, of `bytes` on `channels`, where it takes `announcement` seconds to
/// announce them.
fn send_latency(nccl: &Nccl, bytes: f64, channels: u32, announcement: f64) -> Seconds {
    let (cluster, stack) = (nccl.cluster, nccl.stack);
    let announced = cluster.gpu.architecture != Architecture::Cpu && bytes > f64::from(channels) * ANNOUNCED;
    let start = cluster.spec.scale_up.start.value + stack.p2p_latency.value;
    if announced { start + Seconds::new(announcement) } else { start }
}

/// With whom a send shares its way.
#[derive(Debug, Clone, Copy)]
pub struct Shared {
    /// How many such flows leave the node at once, or share the port of a rank inside it, at least 1.
    pub flows: f64,
    /// The share of its NIC that the uplinks of pods leave it.
    pub uplinks: f64,
}

impl Shared {
    /// With nobody.
    pub const ALONE: Shared = Shared { flows: 1.0, uplinks: 1.0 };
}

/// A send and the receive that meets it, between two ranks of a communicator.
pub fn p2p(nccl: &Nccl, bytes: Bytes, [from, to]: [u32; 2], comm: Comm, shared: Shared) -> LinkTime {
    let (cluster, stack) = (nccl.cluster, nccl.stack);
    let up = &cluster.spec.scale_up;
    let gpu = &cluster.gpu;
    match cluster.tier(from, to) {
        Tier::Local => LinkTime {
            latency: gpu.launch.value,
            // Read and written.
            transfer: bytes * 2.0 / (gpu.memory_bandwidth.value * gpu.memory_bound.fraction.value),
            fills: 1.0,
            provenance: provenance(gpu.memory_bound.fraction.provenance),
            rel_sd: gpu.memory_bound.rel_sd.value,
        },
        Tier::ScaleUp => {
            let channels = channels(cluster, stack, bytes.value(), comm);
            let ctas = f64::from(channels);
            let bridge = cluster.bridge_of_ring(&[from, to], comm.size);
            let port = [cluster.peer(from, to), bridge].into_iter().flatten().fold(up.p2p.value, BytesPerSec::min);
            let rate = (up.p2p_per_cta.value * ctas).min(port * (1.0 / shared.flows));
            LinkTime {
                latency: send_latency(nccl, bytes.value(), channels, nccl.fitted.announcement) + up.latency.value,
                transfer: bytes / rate,
                fills: 1.0,
                provenance: provenance(up.p2p_per_cta.provenance),
                rel_sd: SPREAD_SENDS,
            }
        }
        Tier::ScaleOut => {
            let out = cluster.spec.scale_out.as_ref().expect("a cluster of several nodes has a network");
            let share = cluster.nic_share(shared.flows) * shared.uplinks;
            let (send, port) = (of_a_send(out, stack), out.achieved.value * share);
            let rate = send.min(port);
            let wire = cluster.spec.graph.as_ref().map(|graph| graph.bandwidth.value);
            // What a wire holds up holds all of the wire; a NIC may have room beside the channel of a send, as much as
            // several sends together have of it.
            let several = out.several.as_ref().map_or(port, |s| port.min(s.value.max(send) * share)).max(rate);
            let (rate, fills) = wire.map_or((rate, rate / several), |wire| (rate.min(wire), 1.0));
            LinkTime {
                latency: send_latency(nccl, bytes.value(), BETWEEN, nccl.fitted.announcement_between)
                    + out.latency.value,
                transfer: bytes / rate,
                fills,
                provenance: provenance(out.p2p.provenance),
                rel_sd: SPREAD_BETWEEN,
            }
        }
    }
}

/// All peers at once, each by the rule of a send: what goes over the switch beside what goes over the NIC.
pub fn all_to_all(nccl: &Nccl, shape: &Shape, bytes: Bytes) -> LinkTime {
    let (cluster, stack) = (nccl.cluster, nccl.stack);
    let up = &cluster.spec.scale_up;
    let one = bytes * (1.0 / f64::from(shape.n));
    let near = f64::from(shape.most - 1);
    let each = channels(cluster, stack, one.value(), Comm { size: shape.n, nodes: shape.nodes });
    let ctas = near * f64::from(each);
    // Where each peer has a link of its own, all of them are busy.
    let port = shape.peer.map_or(up.p2p.value, |peer| up.p2p.value.min(peer * near.max(1.0)));
    let port = up.several.as_ref().filter(|_| near > 1.0).map_or(port, |s| port.min(s.value * (1.0 / near)));
    let rate = (up.p2p_per_cta.value * ctas.clamp(1.0, f64::from(stack.p2p_ctas.value))).min(port);
    let mut inside = one * near / rate;
    if let (Some(bridge), Some(sockets)) = (shape.bridge, &up.sockets) {
        // From every GPU of one socket to every one of the other.
        let across = f64::from(shape.most.min(2 * sockets.gpus)) / 2.0;
        inside = inside.max(one * (across * across) / bridge);
    }
    if let Some(block) = &shape.block {
        inside = block.all_to_all(bytes);
    }
    let mut time = LinkTime {
        latency: send_latency(nccl, one.value(), each, nccl.fitted.announcement) + up.latency.value,
        transfer: inside,
        fills: 1.0,
        provenance: provenance(up.p2p_per_cta.provenance),
        rel_sd: SPREAD_SENDS,
    };
    if shape.nodes > 1 {
        let out = cluster.spec.scale_out.as_ref().expect("a cluster of several nodes has a network");
        let nic = out.achieved.value * cluster.nics_per_rank().unwrap_or(1.0);
        let send = of_a_send(out, stack);
        let others = f64::from(shape.n - shape.fewest - 1);
        // A send is held up by its one channel, many beside each other by the NIC.
        let together =
            out.several.as_ref().filter(|_| others > 0.0).map_or(send, |s| s.value.min(send * (others + 1.0)));
        let outside = one * f64::from(shape.n - shape.fewest) / together.max(send).min(nic);
        let outside = outside.max(one * shape.beyond / nic);
        let start = send_latency(nccl, one.value(), BETWEEN, nccl.fitted.announcement_between);
        time.latency = start + out.latency.value + Seconds::new(nccl.fitted.posting * others);
        time.rel_sd = SPREAD_BETWEEN;
        if outside > inside {
            time.transfer = outside;
            time.provenance = provenance(out.p2p.provenance);
        }
    }
    time
}

#[cfg(test)]
mod tests {
    use super::super::tests::{MIB, at};
    use super::*;

    #[test]
    fn channels_of_eight_ranks_climb_as_on_b200() {
        let (c, s) = at("dgx-h100", 8);
        let of = |mib: f64| channels(&c, &s, mib * MIB, Comm { size: 8, nodes: 1 });
        assert_eq!([of(0.01), of(0.125), of(1.0), of(64.0)], [1, 2, 4, 4]);
        assert_eq!([of(128.0), of(256.0), of(512.0), of(4096.0)], [8, 16, 32, 32]);
    }

    /// A ring over nodes has no fewer channels inside of them than out of them, however many ranks there are, and no more.
    #[test]
    fn beside_a_nic_all_peers_get_what_it_gets() {
        let (c, s) = at("dgx-h100", 128);
        let of = |size: u32, mib: f64| channels(&c, &s, mib * MIB, Comm { size, nodes: size / 8 });
        assert_eq!([16, 32, 64, 128].map(|size| of(size, 1.0)), [2, 2, 2, 1]);
        assert_eq!([0.01, 0.1, 1.0, 1024.0].map(|mib| of(64, mib)), [1, 1, 2, 2]);
    }
}
