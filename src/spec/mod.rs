//! Typed JSON in, checked, with what follows from one file alone: models, GPUs, clusters, software stacks.
//!
//! Each is a file a user writes or one of the shipped ones, which travel inside the binary.

pub mod attention;
pub mod cluster;
pub mod curves;
pub mod depth;
pub mod exchange;
mod faster;
pub mod fleet;
pub mod gpu;
mod huggingface;
pub mod hybrid;
mod indexer;
pub mod known;
pub mod mask;
pub mod model;
pub mod moe;
pub mod mtp;
pub mod options;
mod read;
pub mod rope;
pub mod schedule;
pub mod stack;
pub mod storage;
pub mod throttle;
pub mod workload;

pub use attention::{AttentionSpec, Pass};
pub use cluster::{
    ClusterSpec, CollectiveOp, Graph, GraphShape, Host, Line, MeasuredCollective, Package, Pod, Routing, ScaleOut,
    ScaleUp, Sockets, Transport,
};
pub use depth::Depth;
pub use exchange::{ExchangePass, ExchangeSpec, Notify, SmRule};
pub use fleet::{FleetSpec, InterruptionKind};
pub use gpu::{Architecture, AttentionCurve, GemmCurve, GpuSpec, Maker, MemoryCurve};
pub use huggingface::COMPUTED;
pub use hybrid::{MambaSpec, Mixer};
pub use indexer::IndexerSpec;
pub use known::{KnownExperts, KnownLength, KnownSizes};
pub use mask::{Documents, Mask};
pub use model::{LlmSpec, MlaSpec, Mlp, Norm, Positions};
pub use moe::{Gate, GroupScore, Groups, MoeSpec, Score};
pub use mtp::MtpSpec;
pub use options::{Capacity, Dispatch, Fold, KvPath, Options, RingBackward, RingLayout, RingMerge, WideLoss};
pub use rope::{Factor, RopeScaling, Turning};
pub use schedule::Schedule;
pub use stack::StackSpec;
pub use storage::StorageSpec;
pub use throttle::Throttle;
pub use workload::{Dtype, Parallelism, Recompute, Workload};

use crate::error::{Error, Result, text};
use read::read;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// How a number came to be known, from the best to the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// By this program or by whoever the source names, on the very thing.
    Measured,
    /// Stated by the maker.
    Published,
    /// Computed from measured or published numbers; the source says how.
    Derived,
    /// Nobody has measured it, as far as we know.
    Assumed,
}

/// What a predicted duration rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Provenance {
    /// This very op, of this size, on this device.
    Measured,
    /// Between sizes that were measured.
    Interpolated,
    /// Beyond what was measured, or carried over from another device.
    Extrapolated,
    /// At least one number in it is a guess.
    Assumed,
}

/// A number that says where it is from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sourced<T> {
    pub value: T,
    pub source: String,
    pub provenance: Origin,
}

// `SHIPPED`: (kind, name, text) of every file under models/, made by build.rs.
include!(concat!(env!("OUT_DIR"), "/shipped.rs"));

/// Names of the shipped files of a kind: `llm`, `gpu`, `cluster`, `stack`, `exchange`, `fleet`, `storage`, `known`.
pub fn shipped(kind: &str) -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().filter(move |(k, _, _)| *k == kind).map(|(_, name, _)| *name)
}

/// The text of a spec and what to call it in an error message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// What it is one of, as of [`shipped`].
    pub kind: &'static str,
    pub file: String,
    pub text: String,
}

/// A shipped file by name, or any file by path. A name with a slash or `.json` is a path; a folder is
/// taken to be a model's, with its config.json.
pub fn find(kind: &'static str, name: &str) -> Result<Found> {
    if let Some((_, _, text)) = SHIPPED.iter().find(|(k, n, _)| *k == kind && *n == name) {
        return Ok(Found { kind, file: format!("{kind}/{name}"), text: text.to_string() });
    }
    let path = Path::new(name);
    let folder = path.is_dir();
    let path = if folder { path.join("config.json") } else { path.to_path_buf() };
    if let Some(why) = repository(kind, name).filter(|_| !path.exists()) {
        return Err(Error::spec(name, kind, why));
    }
    if path.is_file() || folder || is_path(name) {
        return Ok(Found { kind, file: path.display().to_string(), text: text::spec(&path)? });
    }
    let known: Vec<_> = shipped(kind).collect();
    let meant = meant(name, &known);
    let why =
        format!("there is no {kind} of this name{meant}; known: {}; or give the path of a JSON file", known.join(", "));
    Err(Error::spec(if name.is_empty() { "\"\"" } else { name }, kind, why))
}

/// What to do with a name as Hugging Face has them, `meta-llama/Llama-3.1-8B`; none if it is no such name.
fn repository(kind: &str, name: &str) -> Option<String> {
    let (owner, model) = name.split_once('/').filter(|_| kind == "llm" && !name.ends_with(".json"))?;
    if owner.is_empty() || owner.starts_with(['.', '~']) || model.is_empty() || model.contains('/') {
        return None;
    }
    let known: Vec<_> = shipped(kind).collect();
    let written = model.to_lowercase();
    // Cards have words of kinds of training that a config does not differ by.
    let bare = ["-instruct", "-base", "-chat", "-hf", "-v0.1", "-v0.3", "meta-"].iter();
    let bare = bare.fold(written, |name, word| name.replace(word, ""));
    let meant = match known.contains(&bare.as_str()) {
        true => format!("; {bare} is shipped"),
        false => meant(&bare, &known),
    };
    Some(format!(
        "there is no such file{meant}; of a repository of Hugging Face give the path of its config.json, downloaded"
    ))
}

/// Whether a name can only be that of a file.
pub fn is_path(name: &str) -> bool {
    name.contains('/') || name.ends_with(".json")
}

/// ` (did you mean x?)`, where one of the known names is nearly what was written, or some begin so.
pub fn meant(name: &str, known: &[&str]) -> String {
    let written = name.to_lowercase();
    // Of those equally near, one that something was left out of: 405b is none of 70b.
    let changed = |known: &str| known.chars().count() != written.chars().count() + edits(&written, known);
    let nearest = known.iter().map(|known| (edits(&written, known), changed(known), known)).min();
    match nearest {
        Some((edits, _, known)) if edits <= (name.len() / 4).max(1) => format!(" (did you mean {known}?)"),
        _ => {
            let begin: Vec<&str> = known.iter().copied().filter(|known| known.starts_with(name)).collect();
            match &begin[..] {
                [] => String::new(),
                _ if name.len() < 2 || begin.len() > 6 => String::new(),
                [one] => format!(" (did you mean {one}?)"),
                [most @ .., last] => format!(" (did you mean {} or {last}?)", most.join(", ")),
            }
        }
    }
}

/// Letters to be put in, left out or changed to get from one word to the other (Levenshtein's distance).
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let least = (row[j] + 1).min(row[j + 1] + 1).min(corner + usize::from(x != *y));
            corner = std::mem::replace(&mut row[j + 1], least);
        }
    }
    row[b.len()]
}

/// Refuses a ratio that is not in 0..=1, 0 excluded.
fn check_ratio(file: &str, field: &str, ratio: f64) -> Result<()> {
    if ratio > 0.0 && ratio <= 1.0 {
        return Ok(());
    }
    Err(Error::spec(file, field, format!("{ratio} is not a ratio above 0 and up to 1 (0.8, never 80)")))
}

/// Refuses a zero where something has to be divided by.
fn check_positive(file: &str, field: &str, value: f64) -> Result<()> {
    if value > 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(Error::spec(file, field, format!("{value} is not above zero")))
}

/// A rate of a link, bytes a second: what is far from all that there is has a wrong unit.
fn check_rate(file: &str, field: &str, value: f64) -> Result<()> {
    check_positive(file, field, value)?;
    if (1.0..1e18).contains(&value) {
        return Ok(());
    }
    Err(Error::spec(file, field, format!("{value:e} B/s is not between 1 B/s and 10^18 B/s; correct its unit")))
}

/// A relative standard deviation.
fn check_spread(file: &str, field: &str, rel_sd: f64) -> Result<()> {
    if (0.0..1.0).contains(&rel_sd) {
        return Ok(());
    }
    let why = format!("{rel_sd} is no relative standard deviation; write one from 0 to below 1, as in 0.05");
    Err(Error::spec(file, field, why))
}

/// A latency of a link, seconds.
fn check_latency(file: &str, field: &str, value: f64) -> Result<()> {
    if (0.0..1e3).contains(&value) {
        return Ok(());
    }
    Err(Error::spec(file, field, format!("{value:e} s is not between 0 and 1000 s; correct its unit")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_nearly_right_is_recognized() {
        let known = ["llama-3-8b", "llama-3-70b", "llama-3.1-405b", "tiny"];
        for (name, meant_is) in [
            ("llama-3-8B", "llama-3-8b"),
            ("lama-3-70b", "llama-3-70b"),
            ("tinny", "tiny"),
            ("llama-3-405b", "llama-3.1-405b"),
        ] {
            assert_eq!(meant(name, &known), format!(" (did you mean {meant_is}?)"));
        }
        assert_eq!(meant("llama-3", &known), " (did you mean llama-3-8b, llama-3-70b or llama-3.1-405b?)");
        assert!(meant("mixtral", &known).is_empty() && meant("", &known).is_empty() && meant("x", &[]).is_empty());
    }

    #[test]
    fn names_of_repositories_are_answered_with_what_is_shipped() {
        for (name, part) in [
            ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b is shipped"),
            ("Qwen/Qwen2.5-72B", "qwen2.5-72b is shipped"),
            ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b is shipped"),
            ("acme/secret", "path of its config.json"),
        ] {
            let said = LlmSpec::find(name).unwrap_err().to_string();
            assert!(said.contains(part), "{name}: {said}");
        }
        for path in ["./nowhere/model", "nowhere/to/config.json", "/nowhere"] {
            let said = LlmSpec::find(path).unwrap_err().to_string();
            assert!(said.contains("No such file"), "{path}: {said}");
        }
    }

    #[test]
    fn a_file_may_begin_with_the_mark_of_an_editor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpu.json");
        let text = SHIPPED.iter().find(|(kind, name, _)| (*kind, *name) == ("gpu", "h100-sxm5")).unwrap().2;
        std::fs::write(&path, format!("\u{feff}{}", text.replace('\n', "\r\n"))).unwrap();
        assert_eq!(
            GpuSpec::find(&path.display().to_string()).unwrap().memory,
            GpuSpec::find("h100-sxm5").unwrap().memory
        );
    }

    #[test]
    fn every_shipped_file_is_read() {
        for name in shipped("llm") {
            assert_eq!(LlmSpec::find(name).unwrap().name, name);
        }
        for name in shipped("gpu") {
            assert_eq!(GpuSpec::find(name).unwrap().name, name);
        }
        for name in shipped("cluster") {
            let cluster = ClusterSpec::find(name).unwrap();
            assert_eq!(cluster.name, name);
            GpuSpec::find(&cluster.gpu).unwrap();
        }
        for name in shipped("stack") {
            assert_eq!(StackSpec::find(name).unwrap().name, name);
        }
        for name in shipped("exchange") {
            assert_eq!(ExchangeSpec::find(name).unwrap().name, name);
        }
        for name in shipped("fleet") {
            assert_eq!(FleetSpec::find(name).unwrap().name, name);
        }
        for name in shipped("storage") {
            assert_eq!(StorageSpec::find(name).unwrap().name, name);
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let err = find("gpu", "h1000").unwrap_err().to_string();
        assert!(err.contains("h1000") && err.contains("h100-sxm5, h20-sxm5, h200-sxm5"), "{err}");
        let err = find("llm", "no/such/config.json").unwrap_err().to_string();
        assert!(err.contains("no/such/config.json"), "{err}");
    }
}
