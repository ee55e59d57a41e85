//! Ops beside the device: copies between its memory and the host's, and the CPU's own kernels.
//!
//! All ranks of a node do the same at the same time, as their plan has it: the ranks behind one PCIe switch share its
//! link to the CPU, and all ranks of a node share its memory. Copies in opposite directions do not slow each other
//! down. What a copy takes of the device's own memory bandwidth is not counted: it is a hundredth of it or less over
//! PCIe.

use super::{Acts, picoseconds};
use crate::error::{Error, Result};
use crate::plan::*;
use crate::spec::{Host, Origin, Provenance};
use crate::units::{BytesPerSec, Seconds};

/// How long an op beside the device takes, ps.
#[derive(Debug, Clone, Copy)]
pub struct Aside {
    pub duration: u64,
    /// Bytes between the two memories; 0 for kernels of the CPU.
    pub bytes: u64,
    pub provenance: Provenance,
}

impl Acts<'_> {
    /// The time of an op on `lane` whose operands have these bytes. Errors: the cluster says nothing of the node's
    /// memory.
    pub(super) fn aside(&self, lane: &Lane, reads: &[u64], writes: &[u64]) -> Result<Aside> {
        let cluster = self.machine.cluster;
        let host = cluster.spec.host.as_ref().ok_or_else(|| missing(&cluster.spec.name))?;
        let ranks = f64::from(cluster.gpus().min(cluster.per_node()));
        let memory = host.bandwidth.value.value() / ranks;
        let (rate, bytes, latency) = match lane {
            Lane::Copy(_) => (copied_by_one(host, ranks).min(memory), reads[0], host.latency.value),
            _ => (computed(host, memory), 0, Seconds::new(0.0)),
        };
        let moved = if bytes > 0 { bytes } else { reads.iter().chain(writes).sum() };
        let seconds = Seconds::new(moved as f64 / BytesPerSec::new(rate).value()) + latency;
        Ok(Aside { duration: picoseconds(seconds), bytes, provenance: provenance(host) })
    }
}

/// Bytes a second that each of `ranks` GPUs of a node copies while all others do.
fn copied_by_one(host: &Host, ranks: f64) -> f64 {
    host.copy.value.value() / f64::from(host.gpus_per_link.value).min(ranks)
}

/// Bytes a second that the CPU's kernels of one rank move, of which its share of the node's memory bandwidth is the
/// most.
fn computed(host: &Host, share: f64) -> f64 {
    host.kernels.as_ref().map_or(share, |rate| share.min(rate.value.value()))
}

/// The figures of a node's memory are no measurements of this op, so its time is extrapolated at best.
fn provenance(host: &Host) -> Provenance {
    let guessed = [host.bandwidth.provenance, host.copy.provenance, host.latency.provenance].contains(&Origin::Assumed);
    if guessed { Provenance::Assumed } else { Provenance::Extrapolated }
}

fn missing(cluster: &str) -> Error {
    let why = "missing, and the plan keeps data in the memory of the CPUs; describe that memory as \
               models/cluster/dgx-h100.json does, or leave out the options that offload";
    Error::spec(cluster, "host", why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::ClusterSpec;

    #[test]
    fn a_rank_computes_on_its_own_thread() {
        let host = ClusterSpec::find("dgx-h100").unwrap().host.unwrap();
        let thread = host.kernels.as_ref().unwrap().value.value();
        assert_eq!((computed(&host, 4.0 * thread), computed(&host, thread / 4.0)), (thread, thread / 4.0));
        assert_eq!(computed(&Host { kernels: None, ..host }, 4.0 * thread), 4.0 * thread);
    }
}
