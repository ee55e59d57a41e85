//! Which keys a query of attention may see, and how its scores lean on the distance to them.

use crate::error::{Cause, Result};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// A query sees keys of its own document, and no others: with `causal` those at or before it, with `window` only
/// the last so many of these, its own among them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mask {
    pub causal: bool,
    /// Only for causal masks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    #[serde(default, skip_serializing_if = "Documents::is_empty")]
    pub documents: Documents,
    /// Scores lean on the distance of query and key, by a slope for each of so many heads of the model (ALiBi, Press et
    /// al., arXiv:2108.12409).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alibi: Option<u64>,
}

impl Mask {
    /// One document a sequence, no window.
    pub fn new(causal: bool) -> Mask {
        Mask { causal, window: None, documents: Documents::default(), alibi: None }
    }

    /// How much a score loses for each position that its key is further away, in a head of the model: 2^(-8 (i+1) / n)
    /// for n heads, if n is a power of two; else the slopes of the next smaller one, and then every second of those of the
    /// next larger one (section 3 of the paper, and its code).
    pub fn slope(&self, head: u64) -> Option<f64> {
        let heads = self.alibi?;
        let below = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
        let exponent = match head < below {
            true => (head + 1) as f64 / below as f64,
            false => (2 * (head - below) + 1) as f64 / (2 * below) as f64,
        };
        Some((-8.0 * exponent).exp2())
    }

    /// Visible pairs of a sequence without the diagonal's half: s^2 / 2 under a causal mask, and in a window of w
    /// keys w s - w^2 / 2.
    pub fn pairs(&self, seq_len: u64) -> f64 {
        let lengths = if self.documents.is_empty() { vec![seq_len] } else { self.documents.lengths() };
        let of_document = |s: u64| {
            let (n, w) = (s as f64, self.window.unwrap_or(s).min(s) as f64);
            if self.causal { w * n - w * w / 2.0 } else { n * n }
        };
        lengths.into_iter().map(of_document).sum()
    }

    /// Errors: what is wrong with it for sequences of `seq_len` tokens, and the remedy.
    pub fn check(&self, seq_len: u64) -> Result<()> {
        match self.window {
            Some(0) => return Err(Cause::Window.infeasible("0 keys are none; use at least 1")),
            Some(w) if !self.causal => {
                let why = format!("{w} keys back from a query need a causal mask; leave one of them out");
                return Err(Cause::Window.infeasible(why));
            }
            _ => {}
        }
        let (total, all) = (self.documents.total(), self.documents.lengths());
        if all.contains(&0) || (!all.is_empty() && total != Some(seq_len)) {
            let sum = total.map_or("more than any sequence".into(), |n| format!("{n} tokens"));
            return Err(Cause::Documents.infeasible(format!(
                "{} with {sum} in all, but none may be empty and together, or again and again, they fill seq_len {seq_len}; \
                 change a length or seq_len, or write as in 8x4K how many are alike",
                all.len()
            )));
        }
        Ok(())
    }
}

/// Documents packed one behind the other into each sequence. None: a sequence is one document.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(from = "Vec<u64>", into = "Vec<u64>")]
pub struct Documents {
    /// Where each ends; shared by every block of a plan.
    ends: Arc<[u64]>,
}

impl From<Vec<u64>> for Documents {
    fn from(lengths: Vec<u64>) -> Documents {
        let mut end = 0u64;
        let mut next = |length: &u64| {
            end = end.saturating_add(*length);
            end
        };
        Documents { ends: lengths.iter().map(&mut next).collect() }
    }
}

impl From<Documents> for Vec<u64> {
    fn from(documents: Documents) -> Vec<u64> {
        documents.lengths()
    }
}

impl Documents {
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub fn lengths(&self) -> Vec<u64> {
        self.ranges().map(|of| of.end - of.start).collect()
    }

    /// Where each is in the sequence.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(self.ends.iter().copied()).map(|(start, end)| start..end)
    }

    /// Tokens of the longest one of a sequence of so many.
    pub fn longest(&self, seq_len: u64) -> u64 {
        self.ranges().map(|of| of.end - of.start).max().unwrap_or(seq_len)
    }

    /// The same again and again, where that fills a sequence of `seq_len` tokens; else as they are.
    pub fn filling(&self, seq_len: u64) -> Documents {
        match self.total() {
            Some(total) if 0 < total && total < seq_len && seq_len.is_multiple_of(total) => {
                self.lengths().repeat((seq_len / total) as usize).into()
            }
            _ => self.clone(),
        }
    }

    /// Tokens in all; none where they are more than can be counted.
    fn total(&self) -> Option<u64> {
        self.ends.last().copied().filter(|end| *end < u64::MAX)
    }

    /// The document that position `at` is in, without bounds where there is but one.
    pub fn around(&self, at: u64) -> Range<u64> {
        let d = self.ends.partition_point(|end| *end <= at);
        let start = if d == 0 { 0 } else { self.ends[d - 1] };
        start..self.ends.get(d).copied().unwrap_or(u64::MAX)
    }
}
