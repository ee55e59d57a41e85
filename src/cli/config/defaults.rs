//! Defaults of what is predicted, and of what is run.

use crate::strategy::expert::Routing;

/// What a command takes where nothing is said.
#[derive(Debug, Clone, Copy)]
pub struct Defaults {
    pub model: &'static str,
    pub cluster: &'static str,
    pub routing: fn() -> Routing,
    /// Whether plans are run on the machine at hand: then nobody means all GPUs of the cluster.
    pub at_hand: bool,
}

/// For what is predicted.
pub const CLUSTER: Defaults =
    Defaults { model: "llama-3-8b", cluster: "dgx-h100", routing: Routing::default, at_hand: false };
/// For what is run here.
pub const LOCAL: Defaults = Defaults { model: "tiny", cluster: "local-cpu", routing: listed_routing, at_hand: true };
/// For what is run on GPUs here: kernels of attention take heads that are a multiple of 32 wide.
pub const GPUS: Defaults = Defaults { model: "small", cluster: "dgx-h200", routing: listed_routing, at_hand: true };

fn listed_routing() -> Routing {
    Routing::Uniform { seed: 1 }
}
