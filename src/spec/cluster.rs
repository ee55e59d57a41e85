//! Nodes of GPUs, the links inside them and between them.

use super::{Found, Sourced, check_positive, find, read};
use crate::error::{Error, Result};
use crate::units::{BytesPerSec, Seconds};
use serde::{Deserialize, Serialize};
use std::path::Path;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterSpec {
    pub name: String,
    pub gpu: String,
    pub gpus_per_node: u32,
    /// How many nodes there are where nothing else is asked for.
    pub nodes: u32,
    /// A job takes so many GPUs of a node at least, and a multiple of them: those of one chassis where a
    /// node is a rack. Absent where a node is taken whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tray: Option<u32>,
    pub scale_up: ScaleUp,
    /// Absent where all devices share a node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_out: Option<ScaleOut>,
    /// What narrows above the nodes, from the inside out. Empty where the network is not blocking.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<Pod>,
}

/// Nodes whose switches lead upwards with less than they lead down to the NICs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pod {
    /// GPUs of one.
    pub gpus: u32,
    /// Bandwidth of all its NICs over that of its uplinks.
    pub oversubscription: Sourced<f64>,
}

/// The links inside a node. Bandwidths are per direction and per GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleUp {
    /// Links of one GPU: NCCL counts its channels by them.
    pub links: u32,
    /// What a ring reaches with large messages.
    pub bandwidth: Sourced<BytesPerSec>,
    /// Bus bandwidth of an all-reduce that the switch adds up, with all GPUs of a node; absent where the
    /// switch cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switch_reduce: Option<Sourced<BytesPerSec>>,
    /// What a send and receive reaches with a huge message.
    pub p2p: Sourced<BytesPerSec>,
    /// What one thread block moves in a send and receive.
    pub p2p_per_cta: Sourced<BytesPerSec>,
    /// What goes to one peer at most, where each peer has a link of its own; absent behind a switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_peer: Option<Sourced<BytesPerSec>>,
    /// Absent where the links do not go by way of the CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sockets: Option<Sockets>,
    /// From the start of the slowest member to the first byte of a small message.
    pub start: Sourced<Seconds>,
    /// From one GPU to its neighbour in a ring, of a small message.
    pub latency: Sourced<Seconds>,
}

/// GPUs on PCIe under several CPUs: what one socket's send to the other's shares a bridge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sockets {
    /// GPUs of a socket.
    pub gpus: u32,
    /// Between two sockets, per direction.
    pub bridge: Sourced<BytesPerSec>,
}

/// The network between nodes. Bandwidths are per NIC and direction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleOut {
    pub nics_per_node: u32,
    pub raw: Sourced<BytesPerSec>,
    /// What a ring reaches with large messages.
    pub achieved: Sourced<BytesPerSec>,
    /// What sends to one peer reach with the library's default number of channels.
    pub p2p: Sourced<BytesPerSec>,
    /// Of the wire and the switches, without the library's own.
    pub latency: Sourced<Seconds>,
}

impl ClusterSpec {
    /// A shipped cluster by name, or a file by path.
    pub fn find(name: &str) -> Result<ClusterSpec> {
        ClusterSpec::from_found(&find("cluster", name)?)
    }

    pub fn load(path: impl AsRef<Path>) -> Result<ClusterSpec> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
        ClusterSpec::from_found(&Found { file: path.display().to_string(), text })
    }

    fn from_found(found: &Found) -> Result<ClusterSpec> {
        let spec: ClusterSpec = read(found)?;
        spec.check(&found.file)?;
        Ok(spec)
    }

    fn check(&self, file: &str) -> Result<()> {
        check_positive(file, "gpus_per_node", f64::from(self.gpus_per_node))?;
        check_positive(file, "nodes", f64::from(self.nodes))?;
        check_positive(file, "scale_up.links", f64::from(self.scale_up.links))?;
        check_positive(file, "scale_up.bandwidth", self.scale_up.bandwidth.value.value())?;
        check_positive(file, "scale_up.p2p", self.scale_up.p2p.value.value())?;
        check_positive(file, "scale_up.p2p_per_cta", self.scale_up.p2p_per_cta.value.value())?;
        if let Some(peer) = &self.scale_up.per_peer {
            check_positive(file, "scale_up.per_peer", peer.value.value())?;
        }
        if let Some(sockets) = &self.scale_up.sockets {
            check_positive(file, "scale_up.sockets.gpus", f64::from(sockets.gpus))?;
            check_positive(file, "scale_up.sockets.bridge", sockets.bridge.value.value())?;
        }
        self.check_shape(file)?;
        if let Some(reduce) = &self.scale_up.switch_reduce {
            check_positive(file, "scale_up.switch_reduce", reduce.value.value())?;
        }
        match &self.scale_out {
            None if self.nodes > 1 => {
                let why =
                    format!("missing, but there are {} nodes; describe the network or set nodes to 1", self.nodes);
                Err(Error::spec(file, "scale_out", why))
            }
            None => Ok(()),
            Some(out) => out.check(file),
        }
    }

    /// Trays fill nodes, nodes fill pods, pods fill larger pods.
    fn check_shape(&self, file: &str) -> Result<()> {
        if let Some(tray) = self.tray
            && (tray == 0 || !self.gpus_per_node.is_multiple_of(tray))
        {
            let why = format!("{tray} does not divide the {} GPUs of a node", self.gpus_per_node);
            return Err(Error::spec(file, "tray", why));
        }
        let mut inner = self.gpus_per_node;
        for pod in &self.pods {
            if pod.gpus <= inner || !pod.gpus.is_multiple_of(inner) {
                let why = format!("{} is no multiple of {inner}, of which it is made", pod.gpus);
                return Err(Error::spec(file, "pods.gpus", why));
            }
            let over = pod.oversubscription.value;
            if !(over >= 1.0 && over.is_finite()) {
                let why = format!("{over} is not 1 or more; leave the pod out where its uplinks carry all");
                return Err(Error::spec(file, "pods.oversubscription", why));
            }
            inner = pod.gpus;
        }
        Ok(())
    }
}

impl ScaleOut {
    fn check(&self, file: &str) -> Result<()> {
        check_positive(file, "scale_out.nics_per_node", f64::from(self.nics_per_node))?;
        check_positive(file, "scale_out.achieved", self.achieved.value.value())?;
        check_positive(file, "scale_out.p2p", self.p2p.value.value())?;
        let (achieved, raw) = (self.achieved.value, self.raw.value);
        if achieved > raw {
            let why = format!("{achieved} is more than the {raw} of the wire; one of the two is wrong");
            return Err(Error::spec(file, "scale_out.achieved", why));
        }
        Ok(())
    }
}
