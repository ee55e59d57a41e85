//! What goes with the name of a model that tables name and state nothing else of: its sizes, and how long the sequences were that
//! it was trained on. A model that has a file of its own in `models/llm` has only its length here.

use super::{Found, find, read};
use crate::error::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeSet;

/// The sizes of a model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownSizes {
    /// What it is called, each as one word in lower case.
    pub names: Vec<String>,
    pub layers: u64,
    pub hidden: u64,
    pub heads: u64,
    pub kv_heads: u64,
    /// Width of a head, where it is no equal part of `hidden`.
    pub head_dim: Option<u64>,
    /// Width of the network, in layers without experts.
    pub ffn: u64,
    pub gated_ffn: bool,
    pub vocab: u64,
    pub experts: Option<KnownExperts>,
    /// Tokens of the sequences that it was trained on.
    pub seq: u64,
    pub source: String,
}

/// The experts of a mixture.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownExperts {
    pub n: u64,
    /// Experts that a token visits.
    pub top_k: u64,
    /// Width of one.
    pub ffn: u64,
    /// Experts that every token visits.
    pub shared: u64,
    pub dense_layers: u64,
    /// Columns that keys and values are compressed to, with latent attention: queries are projected at once, and heads are as
    /// wide as DeepSeek-V2's.
    pub kv_lora: Option<u64>,
}

/// The length of the sequences of a model whose sizes are in `models/llm`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownLength {
    pub name: String,
    pub seq: u64,
    pub source: String,
}

impl KnownSizes {
    /// All of `models/known/sizes.json`.
    ///
    /// # Errors
    /// A field that is unknown or missing, a name that two models have, or sizes that make no model.
    pub fn shipped() -> Result<Vec<KnownSizes>> {
        KnownSizes::from_found(&find("known", "sizes")?)
    }

    fn from_found(found: &Found) -> Result<Vec<KnownSizes>> {
        let all: Vec<KnownSizes> = read(found)?;
        let mut names = BTreeSet::new();
        for (at, known) in all.iter().enumerate() {
            let wrong = |why: String| Err(Error::spec(&found.file, format!("[{at}]"), why));
            if let Some(twice) = known.names.iter().find(|name| !names.insert(name.as_str())) {
                return wrong(format!("{twice:?} is the name of two models; leave it to one"));
            }
            if known.names.is_empty() || known.source.is_empty() {
                return wrong("has no name or no source; write both".into());
            }
            let [heads, kv_heads] = [known.heads, known.kv_heads];
            if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
                return wrong(format!("{kv_heads} KV heads do not share out {heads} heads evenly"));
            }
            if known.head_dim.is_none() && !known.hidden.is_multiple_of(heads) {
                return wrong(format!("{heads} heads are no equal parts of {}; write head_dim", known.hidden));
            }
        }
        Ok(all)
    }
}

impl KnownLength {
    /// All of `models/known/lengths.json`.
    ///
    /// # Errors
    /// A field that is unknown or missing, a name said twice, or no source.
    pub fn shipped() -> Result<Vec<KnownLength>> {
        let found = find("known", "lengths")?;
        let all: Vec<KnownLength> = read(&found)?;
        let mut names = BTreeSet::new();
        match all.iter().position(|known| known.source.is_empty() || !names.insert(known.name.as_str())) {
            Some(at) => Err(Error::spec(
                &found.file,
                format!("[{at}]"),
                "has no source, or a name that another has; write both",
            )),
            None => Ok(all),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shipped_is_read() {
        assert!(KnownSizes::shipped().unwrap().len() > 100);
        assert!(KnownLength::shipped().unwrap().iter().all(|known| !known.source.is_empty()));
    }

    #[test]
    fn unknown_fields_and_sizes_that_make_no_model_are_refused() {
        let text = r#"[{"names": ["a"], "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 256,
            "gated_ffn": true, "vocab": 100, "seq": 128, "source": "nobody"}]"#;
        let read = |text: String| KnownSizes::from_found(&Found { kind: "known", file: "known/sizes".into(), text });
        assert_eq!(read(text.into()).unwrap()[0].head_dim, None);
        for (from, to, why) in [
            (r#""seq""#, r#""sequence""#, "unknown field `sequence`"),
            (r#""vocab": 100, "#, "", "missing field `vocab`"),
            (r#"["a"]"#, r#"["a", "a"]"#, "name of two models"),
            (r#"["a"]"#, "[]", "no name"),
            ("nobody", "", "no source"),
            (r#""kv_heads": 2"#, r#""kv_heads": 3"#, "3 KV heads"),
            (r#""hidden": 64"#, r#""hidden": 63"#, "write head_dim"),
        ] {
            let said = read(text.replace(from, to)).unwrap_err().to_string();
            assert!(said.contains(why) && said.contains("known/sizes"), "{from}: {said}");
        }
    }
}
