//! A checkpoint: every rank saves its share of weights and optimizer, each byte once.

use crate::spec::{Dtype, FleetSpec, LlmSpec, Options, Sourced, StorageSpec};
use crate::units::Seconds;
use serde::Serialize;

/// What saving and loading takes, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Checkpoint {
    pub bytes: f64,
    pub bytes_per_gpu: f64,
    /// Training stands still.
    pub stall_s: f64,
    /// From its start until it is safe.
    pub save_s: f64,
    pub load_s: f64,
    /// Into another layout than was saved; `None` where the store's file does not say.
    pub reshard_s: Option<f64>,
}

impl Checkpoint {
    /// Of so many bytes on so many GPUs. Copies to the host, writing by the node and writing to the store overlap, so
    /// that the slowest sets the pace (ByteCheckpoint's pipeline, arXiv:2407.20143 section 4).
    pub fn new(bytes: f64, gpus: u32, fleet: &FleetSpec, storage: &StorageSpec) -> Checkpoint {
        let nodes = f64::from(gpus.div_ceil(fleet.gpus_per_node).max(1));
        let bytes_per_gpu = bytes / f64::from(gpus.max(1));
        let to_host = bytes_per_gpu / storage.to_host.value.value();
        let by = |per_node: f64, all: f64| (bytes / nodes / per_node).max(bytes / all);
        let written = by(storage.write_per_node.value.value(), storage.write.value.value()).max(to_host);
        let read = by(storage.read_per_node.value.value(), storage.read.value.value()).max(to_host);
        let doublings = f64::from(gpus.max(1)).log2();
        let more = |each: &Option<Sourced<Seconds>>| each.as_ref().map_or(0.0, |s| s.value.value() * doublings);
        let save_s = storage.save.value.value() + more(&storage.save_doubling) + written;
        let stall_s = storage.stall.value.value() + to_host;
        let load_s = storage.load.value.value() + more(&storage.load_doubling) + read;
        Checkpoint {
            bytes,
            bytes_per_gpu,
            stall_s: if storage.in_background { stall_s.min(save_s) } else { save_s },
            save_s,
            load_s,
            reshard_s: storage.reshard.as_ref().map(|times| times.value * load_s),
        }
    }

    /// From the end of the stall until the checkpoint is safe.
    pub fn behind_s(&self) -> f64 {
        (self.save_s - self.stall_s).max(0.0)
    }

    /// Of training, so that a save is over before the next one begins.
    pub fn shortest_interval_s(&self) -> f64 {
        self.behind_s().max(1e-3)
    }
}

/// Bytes of weights, of modules of multi-token prediction too, and of Adam's state: two moments in f32 (f64 where that is trained
/// in), and a master copy where the weights themselves are narrower. 14 bytes a parameter in bf16, less where `options` keep
/// moments in bf16 or no master copy, or where matrices of layers have one moment alone (Muon's).
pub fn state_bytes(model: &LlmSpec, dtype: Dtype, options: &Options) -> f64 {
    let (per_param, moment) = match dtype {
        // Nothing is trained in integers.
        Dtype::Bf16 | Dtype::U32 | Dtype::U8 => {
            let master = if options.no_master { 0 } else { 4 };
            let moment = if options.bf16_moments { 2 } else { 4 };
            (2 + master + 2 * moment, moment)
        }
        Dtype::F32 => (4 + 2 * 4, 4),
        Dtype::F64 => (8 + 2 * 8, 8),
    };
    let spared = if options.muon { model.matrix_params() * moment } else { 0 };
    ((model.params() + model.mtp_params()) * per_param - spared) as f64
}
