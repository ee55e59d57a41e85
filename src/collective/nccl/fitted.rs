//! What the formulas take from tables of measurements rather than from NCCL's own tables.

/// Constants of the library that were fitted, the same on all clusters. tests/left_out.rs fits them anew without each
/// cluster in turn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fitted {
    /// What it takes to announce a message that is not sent at once: sends of 8 to 512 KiB between two, four and eight
    /// H100, A100 and B200 (traces/published/nccl.json). Seconds, as all that follow.
    pub announcement: f64,
    /// The same to another node, over the wire and back.
    pub announcement_between: f64,
    /// What it takes to post one more send to another node, behind the first: small all-to-alls of 16 B200 on two nodes
    /// take 37 us, a send alone 14.5 (traces/published/collectives.json).
    pub posting: f64,
    /// Steps between nodes and inside them, where a group has several nodes: of LL, LL128 and Simple. Fitted, with what
    /// follows up to the rate of LL128, on tables of two to sixteen nodes with the shipped clusters, messages of 1 MiB and
    /// more counted twice (traces/published/collectives.json).
    pub between: [ProtocolFit; 3],
    /// Until the pipeline between nodes is full where switches add up, beyond the latency of its steps.
    pub fill_switch: f64,
    /// A step of a tree's chain inside a node, in steps of a ring.
    pub tree_step: f64,
    /// Part of the bandwidth that LL128 reaches between nodes, of rings and of trees; the tuner has 0.92 for both.
    pub rate_ll128: f64,
    /// A ring inside a node: flags beside the data, and flags of whole chunks, which is less to wait for, or more to
    /// send. Fitted on the tables of traces/published/nccl.json (H100, H200, A100, B200, GB200, 2 to 8 GPUs) with a
    /// start, a latency and a bandwidth of each system.
    pub inside: [Inside; 2],
    /// Rings of two reach less, one pass and two: each GPU uses one direction of half its links at a time.
    pub pair: [f64; 2],
    /// Until the switch of a node adds up.
    pub setup_switch: f64,
}

/// What one of NCCL's protocols makes of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProtocolFit {
    /// A step inside a node in latencies of its links.
    pub inside: f64,
    /// A step between nodes in latencies of the wire.
    pub between: f64,
    /// Until the pipeline is full, beyond the latency of its steps: slots of 512 KiB on every channel where flags mark
    /// chunks.
    pub fill: f64,
}

/// A regime of a ring inside a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Inside {
    /// Beyond the start of the links.
    pub setup: f64,
    /// A step in latencies of the links.
    pub steps: f64,
    /// Part of the bandwidth of the ring.
    pub rate: f64,
}

/// As fitted.
pub const FITTED: Fitted = Fitted {
    announcement: 5e-6,
    announcement_between: 15e-6,
    posting: 3.5e-6,
    between: [
        ProtocolFit { inside: 1.2, between: 1.3, fill: 0.0 },
        ProtocolFit { inside: 0.8, between: 2.4, fill: 50e-6 },
        ProtocolFit { inside: 1.6, between: 5.1, fill: 155e-6 },
    ],
    fill_switch: 210e-6,
    tree_step: 0.74,
    rate_ll128: 0.64,
    inside: [Inside { setup: 0.0, steps: 1.0, rate: 0.4 }, Inside { setup: 13.8e-6, steps: 1.94, rate: 1.0 }],
    pair: [0.75, 0.88],
    setup_switch: 70e-6,
};
