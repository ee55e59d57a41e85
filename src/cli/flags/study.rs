//! Studies that keep their rows in a folder.

use crate::cluster::Cluster;
use crate::spec::{Architecture, ClusterSpec, GpuSpec};
use clap::Args;

#[derive(Args)]
pub struct Title {
    /// Title of the picture
    #[arg(long = "title", value_name = "TEXT")]
    pub text: Option<String>,
}

#[derive(Args)]
pub struct Fresh {
    /// Forget the rows that the folder has
    #[arg(long = "fresh")]
    pub asked: bool,
}

/// GPUs that a study takes of a cluster unless told: a few nodes, or what its only node has.
pub fn gpus_of_a_study(cluster: &ClusterSpec, gpu: &GpuSpec) -> u32 {
    let usual = if gpu.architecture == Architecture::Cpu { 8 } else { 64 };
    let most = if cluster.scale_out.is_none() { usual.min(cluster.gpus_per_node) } else { usual };
    (1..=most).rev().find(|&gpus| Cluster::new(cluster, gpu, gpus).is_ok()).unwrap_or(most)
}
