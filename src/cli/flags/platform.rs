//! The hardware and the software that a step is predicted for.

use crate::error::Result;
use crate::spec::{Architecture, ClusterSpec, GpuSpec};
use clap::Args;

/// A cluster and a stack.
#[derive(Args)]
pub struct Platform {
    /// A shipped cluster, or the path of its JSON file
    #[arg(long, value_name = "NAME", default_value = "dgx-h100")]
    pub cluster: String,
    #[command(flatten)]
    pub stack: Stack,
}

impl Platform {
    /// The cluster, and the GPU that it has. Errors: a name or a file that is none.
    pub fn specs(&self) -> Result<(ClusterSpec, GpuSpec)> {
        let cluster = ClusterSpec::find(&self.cluster)?;
        let gpu = GpuSpec::find(&cluster.gpu)?;
        Ok((cluster, gpu))
    }
}

/// A stack alone, where a command has a cluster of its own default.
#[derive(Args, Debug, Clone, Default, PartialEq)]
pub struct Stack {
    /// A shipped software stack, or the path of its JSON file [default: what fits the GPU]
    #[arg(long, value_name = "NAME")]
    stack: Option<String>,
}

impl Stack {
    /// As the flag says, or what fits the GPU.
    pub fn on(&self, gpu: &GpuSpec) -> &str {
        self.stack.as_deref().unwrap_or(stack_of(gpu))
    }
}

/// The stack that has an attention kernel for the GPU.
fn stack_of(gpu: &GpuSpec) -> &'static str {
    match gpu.architecture {
        Architecture::Hopper => "nccl-fa3",
        Architecture::Ampere | Architecture::Ada => "nccl-fa2",
        // FlashAttention 2 needs Ampere.
        Architecture::Volta | Architecture::Turing => "nccl-unfused",
        // GeForce and DGX Spark have been measured with FlashAttention 2 alone.
        // A kernel for all experts of a rank, as on Hopper.
        Architecture::Blackwell if gpu.attention.contains_key("cudnn") => "nccl-cudnn-grouped",
        Architecture::Blackwell => "nccl-fa2",
        Architecture::Cdna1 | Architecture::Cdna2 | Architecture::Cdna3 | Architecture::Cdna4 => "rccl-fa2",
        Architecture::Tpu => "tpu",
        Architecture::Npu => "hccl-fa2",
        Architecture::Cpu => "cpu",
    }
}
