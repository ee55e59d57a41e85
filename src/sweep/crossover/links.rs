//! The links that a question is asked of: those of a cluster as it stands, or all alike at a rate of one's choice.

use crate::error::{Error, Result};
use crate::spec::{ClusterSpec, Origin, ScaleUp, Sourced};
use crate::units::BytesPerSec;
use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// What lies between the ranks. Rates are in GB/s per GPU and direction, what sends and collectives reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Links {
    /// Nodes and network of the cluster, ranks filling node after node.
    AsTheyStand,
    /// All ranks in one node, whatever its size.
    Node(f64),
    /// Every rank on a node of its own, as where tensor parallelism fills the nodes.
    Network(f64),
}

impl Links {
    /// Where one rank's links carry less than another's, `cluster` has no single rate.
    pub fn gb_per_s(self) -> Option<f64> {
        match self {
            Links::AsTheyStand => None,
            Links::Node(rate) | Links::Network(rate) => Some(rate),
        }
    }

    /// The cluster with `ranks` of its GPUs joined by these links. What is not said of a link, its latency and
    /// what a thread block moves, stays as the cluster has it.
    pub fn of(self, cluster: &ClusterSpec, ranks: u32) -> Result<ClusterSpec> {
        let mut spec = cluster.clone();
        match self {
            Links::AsTheyStand => {}
            Links::Node(rate) => {
                (spec.gpus_per_node, spec.nodes) = (ranks.max(1), 1);
                spec.scale_up = on_one_switch(&spec.scale_up, rate);
                spec.measured.clear();
            }
            Links::Network(rate) => {
                let Some(out) = &mut spec.scale_out else {
                    let why = "there is no network to give a rate to; choose another cluster, or links node:RATE";
                    return Err(Error::spec(&cluster.name, "scale_out", why));
                };
                out.nics_per_node = 1;
                (out.raw, out.achieved, out.p2p) = (chosen(rate), chosen(rate), chosen(rate));
                out.several = None;
                (spec.gpus_per_node, spec.nodes) = (1, ranks);
                spec.measured.clear();
            }
        }
        Ok(spec)
    }
}

/// Links of a node at `rate` GB/s, whoever sends to whom: no bridge between sockets, no wire for each peer, no bound of
/// several sends. Latencies stay, and so does what a thread block moves, unless all blocks of a send together would not
/// reach the rate.
fn on_one_switch(up: &ScaleUp, rate: f64) -> ScaleUp {
    let blocks = f64::from((2 * up.links.max(1)).next_power_of_two());
    let enough = chosen(rate / blocks);
    let p2p_per_cta = if up.p2p_per_cta.value < enough.value { enough } else { up.p2p_per_cta.clone() };
    let (bandwidth, p2p) = (chosen(rate), chosen(rate));
    ScaleUp { bandwidth, p2p, p2p_per_cta, sockets: None, per_peer: None, package: None, several: None, ..up.clone() }
}

fn chosen(rate: f64) -> Sourced<BytesPerSec> {
    let source = "chosen for the comparison".to_string();
    Sourced { value: BytesPerSec::new(rate * 1e9), source, provenance: Origin::Assumed }
}

impl fmt::Display for Links {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Links::AsTheyStand => f.write_str("cluster"),
            Links::Node(rate) => write!(f, "node:{rate}"),
            Links::Network(rate) => write!(f, "net:{rate}"),
        }
    }
}

impl FromStr for Links {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Links, String> {
        let wrong =
            || format!("{text:?} is not `cluster`, `node:RATE` or `net:RATE` with a rate in GB/s, e.g. node:365");
        if text == "cluster" {
            return Ok(Links::AsTheyStand);
        }
        let (kind, rate) = text.split_once(':').ok_or_else(wrong)?;
        let rate = rate.parse().ok().filter(|r: &f64| *r > 0.0 && r.is_finite()).ok_or_else(wrong)?;
        match kind {
            "node" => Ok(Links::Node(rate)),
            "net" => Ok(Links::Network(rate)),
            _ => Err(wrong()),
        }
    }
}

impl Serialize for Links {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Cluster, Tier};
    use crate::collective::{Comm, Shared, p2p};
    use crate::spec::{GpuSpec, StackSpec};
    use crate::units::Bytes;

    fn dgx(links: Links, ranks: u32) -> Cluster {
        let spec = links.of(&ClusterSpec::find("dgx-h100").unwrap(), ranks).unwrap();
        Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), ranks).unwrap()
    }

    #[test]
    fn words_go_there_and_back() {
        for text in ["cluster", "node:365", "net:12.5"] {
            assert_eq!(text.parse::<Links>().unwrap().to_string(), text);
        }
        for text in ["", "node", "node:0", "net:-1", "net:inf", "wire:5"] {
            assert!(text.parse::<Links>().unwrap_err().contains("node:365"), "{text}");
        }
    }

    /// Whatever the cluster's own links are: over PCIe between sockets, a wire for each peer, a switch.
    #[test]
    fn a_node_has_the_rate_that_was_asked_for() {
        let stack = StackSpec::find("nccl-fa2").unwrap();
        for name in ["h100-pcie", "rtx4090-pcie", "mi300x-8x400", "dgx-h100", "gb200-nvl72"] {
            let spec = Links::Node(200.0).of(&ClusterSpec::find(name).unwrap(), 8).unwrap();
            let cluster = Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), 8).unwrap();
            let bytes = Bytes::new(256e6);
            let hop = p2p(&cluster, &stack, bytes, [0, 7], Comm { size: 8, nodes: 1 }, Shared::ALONE);
            let rate = bytes.value() / hop.transfer.value();
            assert!((rate / 200e9 - 1.0).abs() < 0.01, "{name}: {rate}");
        }
    }

    #[test]
    fn ranks_are_all_in_one_node_or_each_in_its_own() {
        assert_eq!(dgx(Links::Node(200.0), 32).tier(0, 31), Tier::ScaleUp);
        assert_eq!(dgx(Links::Network(50.0), 32).tier(0, 1), Tier::ScaleOut);
        let as_is = dgx(Links::AsTheyStand, 32);
        assert_eq!([as_is.tier(0, 1), as_is.tier(0, 31)], [Tier::ScaleUp, Tier::ScaleOut]);
        let error = Links::Network(50.0).of(&ClusterSpec::find("local-cpu").unwrap(), 2).unwrap_err().to_string();
        assert!(error.contains("local-cpu: scale_out") && error.contains("node:RATE"), "{error}");
    }
}
