//! Ranks on devices: which node each is in, and what lies between two of them.

use crate::error::{Error, Result};
use crate::spec::{ClusterSpec, GpuSpec};

/// What the bytes between two ranks cross.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// The same device.
    Local,
    /// The links inside a node.
    ScaleUp,
    /// The network between nodes.
    ScaleOut,
}

/// One rank a GPU; ranks fill node after node.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    pub spec: ClusterSpec,
    pub gpu: GpuSpec,
    gpus: u32,
}

impl Cluster {
    pub fn new(spec: &ClusterSpec, gpu: &GpuSpec, gpus: u32) -> Result<Cluster> {
        let per_node = spec.gpus_per_node;
        if gpu.name != spec.gpu {
            let why = format!("the cluster has {}, not {}; choose one of the two again", spec.gpu, gpu.name);
            return Err(Error::spec(&spec.name, "gpu", why));
        }
        if gpus == 0 {
            return Err(Error::spec(&spec.name, "gpus", "0; at least 1 is needed"));
        }
        if gpus > per_node && spec.scale_out.is_none() {
            let why = format!("{gpus} is more than the {per_node} of its only node; use {per_node} or fewer");
            return Err(Error::spec(&spec.name, "gpus", why));
        }
        if gpus > per_node && !gpus.is_multiple_of(per_node) {
            let below = gpus / per_node * per_node;
            let why = format!(
                "{gpus} does not fill nodes of {per_node}; use {below} or {}",
                u64::from(below) + u64::from(per_node)
            );
            return Err(Error::spec(&spec.name, "gpus", why));
        }
        Ok(Cluster { spec: spec.clone(), gpu: gpu.clone(), gpus })
    }

    pub fn gpus(&self) -> u32 {
        self.gpus
    }

    pub fn nodes(&self) -> u32 {
        self.gpus.div_ceil(self.spec.gpus_per_node)
    }

    pub fn node_of(&self, rank: u32) -> u32 {
        assert!(rank < self.gpus, "rank {rank} of {} GPUs", self.gpus);
        rank / self.spec.gpus_per_node
    }

    /// The ranks of a node.
    pub fn ranks_on(&self, node: u32) -> std::ops::Range<u32> {
        let first = node * self.spec.gpus_per_node;
        first..(first + self.spec.gpus_per_node).min(self.gpus)
    }

    pub fn tier(&self, a: u32, b: u32) -> Tier {
        match (a == b, self.node_of(a) == self.node_of(b)) {
            (true, _) => Tier::Local,
            (_, true) => Tier::ScaleUp,
            _ => Tier::ScaleOut,
        }
    }

    /// NICs a rank can call its own: below 1 where GPUs share one. None without a network.
    pub fn nics_per_rank(&self) -> Option<f64> {
        let out = self.spec.scale_out.as_ref()?;
        Some(f64::from(out.nics_per_node) / f64::from(self.spec.gpus_per_node))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dgx(gpus: u32) -> Result<Cluster> {
        Cluster::new(&ClusterSpec::find("dgx-h100").unwrap(), &GpuSpec::find("h100-sxm5").unwrap(), gpus)
    }

    #[test]
    fn ranks_fill_node_after_node() {
        let c = dgx(16).unwrap();
        assert_eq!((c.nodes(), c.node_of(7), c.node_of(8)), (2, 0, 1));
        assert_eq!([c.tier(3, 3), c.tier(0, 7), c.tier(7, 8)], [Tier::Local, Tier::ScaleUp, Tier::ScaleOut]);
        assert_eq!(c.nics_per_rank(), Some(1.0));
        assert_eq!(dgx(3).unwrap().nodes(), 1);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_a_remedy() {
        assert!(dgx(0).unwrap_err().to_string().contains("at least 1"));
        assert!(dgx(20).unwrap_err().to_string().contains("use 16 or 24"));
        let (cpu, core) = (ClusterSpec::find("local-cpu").unwrap(), GpuSpec::find("cpu-core").unwrap());
        assert!(Cluster::new(&cpu, &core, 257).unwrap_err().to_string().contains("256 or fewer"));
        let h200 = GpuSpec::find("h200-sxm5").unwrap();
        assert!(Cluster::new(&cpu, &h200, 1).unwrap_err().to_string().contains("cpu-core, not h200-sxm5"));
    }
}
