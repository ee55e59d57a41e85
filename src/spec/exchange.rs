//! A library that exchanges rows between experts' ranks: what its kernels reach on links they do not own.

use super::{Architecture, Found, Sourced, check_positive, check_ratio, find, read};
use crate::error::{Result, text};
use crate::units::{BytesPerSec, Seconds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExchangeSpec {
    pub name: String,
    pub dispatch: ExchangePass,
    pub combine: ExchangePass,
    /// Before a dispatch whose counts nobody knows; absent where the buffers make room for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notify: Option<Notify>,
    /// How many SMs it takes where nobody says; absent where it is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_rule: Option<SmRule>,
}

/// One way. Rows go in a stream of chunks, so that the narrowest of links, NIC and SMs sets the pace.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExchangePass {
    /// Of nothing at all, inside a node.
    pub start: Sourced<Seconds>,
    /// One row through the one warp that has it, before others follow.
    pub fill: Sourced<BytesPerSec>,
    /// SM time of a row besides its bytes: queue slot, flags, indices.
    pub row: Sourced<Seconds>,
    /// What one SM moves of rows.
    pub row_rate: Sourced<BytesPerSec>,
    /// SM time of a token besides its bytes.
    pub token: Sourced<Seconds>,
    /// What one SM reads or sums up of tokens, once for all their rows.
    pub token_rate: Sourced<BytesPerSec>,
    /// Part of the bandwidth of a ring on the links inside a node.
    pub links: Sourced<f64>,
    /// The same where rows come from other nodes as well; as within one where it is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links_far: Option<Sourced<f64>>,
    /// Added to the start where rows leave the node.
    pub network_start: Sourced<Seconds>,
    /// Part of the raw bandwidth of a NIC.
    pub nic: Sourced<f64>,
    /// What one SM forwards between NIC and links, in rows that ranks of its node get.
    pub forward: Sourced<BytesPerSec>,
    /// SM time of a forwarded row besides its bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward_row: Option<Sourced<Seconds>>,
    /// Added to the start for each doubling of the ranks: flags of all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doubling: Option<Sourced<Seconds>>,
    /// Bytes that a row takes on the links besides its own: headers, flags between its words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header: Option<Sourced<f64>>,
    /// What one rank moves to one other: a row at least so long, and bytes so fast.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_row: Option<Sourced<Seconds>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_rate: Option<Sourced<BytesPerSec>>,
    /// Posting a row that leaves its node, where that is done one after another: by a thread of the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<Sourced<Seconds>>,
    /// Posting a signal: a dispatch sends one to each slot elsewhere, of how many rows it gets, a combine one to each rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<Sourced<Seconds>>,
    /// Of each token, once its rows are there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finish: Option<Sourced<Seconds>>,
    /// Beside the kernels, where the calls that start them are timed: metadata, permutation, launches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<Sourced<Seconds>>,
    /// Relative standard deviation of prediction over measurement.
    pub rel_sd: Sourced<f64>,
}

/// What a dispatch does before its rows move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Notify {
    /// Counting where the tokens go: the kernel itself, and each choice.
    pub layout: Sourced<Seconds>,
    pub layout_choice: Sourced<Seconds>,
    /// The counts go round inside a node, and the host reads them.
    pub counts: Sourced<Seconds>,
    /// Added for each node.
    pub node: Sourced<Seconds>,
}

/// SMs by traffic: those that read and write fast enough for the slower link (DeepEP V2, `get_theoretical_num_sms`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmRule {
    pub read: Sourced<BytesPerSec>,
    pub write: Sourced<BytesPerSec>,
    /// So many times what is needed.
    pub margin: Sourced<f64>,
    pub network: Sourced<BytesPerSec>,
    /// Of the links inside a node, by architecture.
    pub links: BTreeMap<Architecture, Sourced<BytesPerSec>>,
}

impl ExchangeSpec {
    /// A shipped library by name, or a file by path.
    pub fn find(name: &str) -> Result<ExchangeSpec> {
        ExchangeSpec::from_found(&find("exchange", name)?)
    }

    pub fn load(path: impl AsRef<Path>) -> Result<ExchangeSpec> {
        let path = path.as_ref();
        let text = text::spec(path)?;
        ExchangeSpec::from_found(&Found { kind: "exchange", file: path.display().to_string(), text })
    }

    fn from_found(found: &Found) -> Result<ExchangeSpec> {
        let spec: ExchangeSpec = read(found)?;
        spec.dispatch.check(&found.file, "dispatch")?;
        spec.combine.check(&found.file, "combine")?;
        if let Some(rule) = &spec.sm_rule {
            check_positive(&found.file, "sm_rule.read", rule.read.value.value())?;
            check_positive(&found.file, "sm_rule.write", rule.write.value.value())?;
        }
        Ok(spec)
    }
}

impl ExchangePass {
    fn check(&self, file: &str, pass: &str) -> Result<()> {
        let rates = [
            ("fill", &self.fill),
            ("row_rate", &self.row_rate),
            ("token_rate", &self.token_rate),
            ("forward", &self.forward),
        ];
        for (field, rate) in rates {
            check_positive(file, &format!("{pass}.{field}"), rate.value.value())?;
        }
        if let Some(rate) = &self.peer_rate {
            check_positive(file, &format!("{pass}.peer_rate"), rate.value.value())?;
        }
        check_ratio(file, &format!("{pass}.links"), self.links.value)?;
        if let Some(far) = &self.links_far {
            check_ratio(file, &format!("{pass}.links_far"), far.value)?;
        }
        check_ratio(file, &format!("{pass}.nic"), self.nic.value)
    }
}
