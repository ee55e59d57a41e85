//! model x workload x mesh -> Plan. One parallel algorithm a file; [`step`] composes them. In the order of reading:
//!
//! * [`step`]: a whole training step, built from all the others; `sizes`: the same of sizes alone.
//! * [`attention`]: the boundary between a layer and the ways to reach other ranks' keys and values.
//! * [`ring`]: ring attention, forward; the files of the next two lines are its parts.
//! * [`ring_merge`], [`double_ring`]: how outputs of blocks become one; two rings in place of one.
//! * [`ring_follow`], [`ring_reverse`], [`ring_burst`]: three ways for its gradients to travel.
//! * [`allgather_kv`]: every rank gathers all keys and values.
//! * [`ulysses`], [`head_exchange`]: tokens exchanged for heads; how what is exchanged is packed.
//! * [`fpdt`]: a sequence chunk by chunk, the rest waiting in the host's memory.
//! * `sparse`, [`unfused`]: attention to chosen keys; attention with its scores in memory.
//! * [`attention_pass`]: a plan of one attention operation alone.
//! * [`transformer`]: a layer, forward and backward, op by op.
//! * [`tensor`]: matrices cut over ranks, with sequence parallelism.
//! * [`expert`]: experts spread over ranks.
//! * [`norm`], [`embedding`], [`head`], `mtp`: the norms; the model's two ends; multi-token prediction.
//! * [`weights`]: the weights of a part of the model in one flat tensor.
//! * [`layers`], [`kind`]: which layers are made alike, and the blocks of such a kind.
//! * [`residual`]: where inputs of layers wait for the backward pass.
//! * [`data`]: data parallelism, and ZeRO's stages.
//! * `sharded`: layers whose gradients or weights are whole only while they are used.
//! * `muon`: the optimizer Muon over ranks that share weights out.
//! * [`pipeline`]: which unit each stage runs when, by schedule.
//! * `stages`: the programs of a pipeline's stages, written out.
//! * [`feasible`], [`guard`]: what cannot be built, and what is too large to build.
//! * [`lengths`]: the longest sequence that fits.

pub mod allgather_kv;
pub mod attention;
pub mod attention_pass;
pub mod data;
pub mod double_ring;
pub mod embedding;
pub mod expert;
pub mod feasible;
pub mod fpdt;
pub mod guard;
pub mod head;
pub mod head_exchange;
pub mod kind;
pub mod layers;
pub mod lengths;
mod mtp;
mod muon;
pub mod norm;
pub mod pipeline;
pub mod residual;
pub mod ring;
pub mod ring_burst;
pub mod ring_follow;
pub mod ring_merge;
pub mod ring_reverse;
mod sharded;
mod sizes;
mod sparse;
mod stages;
pub mod step;
pub mod tensor;
pub mod transformer;
pub mod ulysses;
pub mod unfused;
pub mod weights;

pub use sizes::Sizes;
pub use step::{Engines, build, build_by_layer, build_routed, sizes};
