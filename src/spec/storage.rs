//! Where checkpoints go: how fast GPUs, nodes and the store itself take and give them.

use super::{Found, Origin, Sourced, check_positive, find, read};
use crate::error::Result;
use crate::units::{BytesPerSec, Seconds};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StorageSpec {
    pub name: String,
    /// Training goes on once its state has been copied to the host's memory.
    pub in_background: bool,
    /// Training stands still for so long before a byte is copied: barriers, planning.
    pub stall: Sourced<Seconds>,
    /// From a GPU to its host's memory, pinned.
    pub to_host: Sourced<BytesPerSec>,
    /// Of a save, besides its bytes: planning, metadata, the last barrier.
    pub save: Sourced<Seconds>,
    /// Added to it for each doubling of the ranks: plans are gathered, and barriers passed, in trees.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub save_doubling: Option<Sourced<Seconds>>,
    pub write_per_node: Sourced<BytesPerSec>,
    /// What the store takes from all nodes together.
    pub write: Sourced<BytesPerSec>,
    /// Of loading, besides its bytes.
    pub load: Sourced<Seconds>,
    /// Added to it for each doubling of the ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_doubling: Option<Sourced<Seconds>>,
    /// How many times as long it takes to load into another layout than was saved, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reshard: Option<Sourced<f64>>,
    pub read_per_node: Sourced<BytesPerSec>,
    /// What the store gives to all nodes together.
    pub read: Sourced<BytesPerSec>,
}

impl StorageSpec {
    /// A shipped store by name, or a file by path.
    pub fn find(name: &str) -> Result<StorageSpec> {
        StorageSpec::from_found(&find("storage", name)?)
    }

    /// The fields that nobody has measured.
    pub fn assumed(&self) -> Vec<&'static str> {
        let of = |each: &Option<Sourced<Seconds>>| each.as_ref().map(|s| s.provenance);
        let all = [
            ("stall", Some(self.stall.provenance)),
            ("to_host", Some(self.to_host.provenance)),
            ("save", Some(self.save.provenance)),
            ("save_doubling", of(&self.save_doubling)),
            ("write_per_node", Some(self.write_per_node.provenance)),
            ("write", Some(self.write.provenance)),
            ("load", Some(self.load.provenance)),
            ("load_doubling", of(&self.load_doubling)),
            ("reshard", self.reshard.as_ref().map(|s| s.provenance)),
            ("read_per_node", Some(self.read_per_node.provenance)),
            ("read", Some(self.read.provenance)),
        ];
        all.into_iter().filter(|(_, origin)| *origin == Some(Origin::Assumed)).map(|(field, _)| field).collect()
    }

    fn from_found(found: &Found) -> Result<StorageSpec> {
        let spec: StorageSpec = read(found)?;
        let rates = [
            ("to_host", &spec.to_host),
            ("write_per_node", &spec.write_per_node),
            ("write", &spec.write),
            ("read_per_node", &spec.read_per_node),
            ("read", &spec.read),
        ];
        rates.into_iter().try_for_each(|(field, rate)| check_positive(&found.file, field, rate.value.value()))?;
        spec.reshard.iter().try_for_each(|times| check_positive(&found.file, "reshard", times.value))?;
        Ok(spec)
    }
}
