//! Why a configuration cannot run: a cause, for code, and a sentence, for people.
//!
//! Messages, CSV and JSON have both in one text: `memory: needs 90 GiB of 80 GiB`. Causes are read out of it in this file alone.

use super::Error;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What a configuration is refused for. `WORDS` has the word of each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// Of a GPU, or of the machine at hand.
    Memory,
    /// Of a node's CPUs.
    HostMemory,
    Buffers,
    /// More of this program than of the machine: ranks, layers, ops, kernels.
    Size,
    /// A step that is too long to tell.
    Time,
    Degrees,
    Tp,
    Pp,
    Vp,
    Ep,
    Zero,
    Heads,
    HeadDim,
    Sequence,
    Documents,
    Window,
    Batch,
    /// Numbers of an attention alone.
    Sizes,
    Positions,
    Model,
    Mla,
    Mtp,
    /// Layers of a pattern.
    Hybrid,
    Attention,
    SparseAttention,
    Experts,
    Replicas,
    Shadow,
    Capacity,
    Routing,
    Dispatch,
    Fp8,
    /// Words of `--options`.
    Options,
    Weights,
    Checkpoint,
    /// Of a row, slower than the best of its search; of a search, nothing found.
    Search,
    Sweep,
    Longest,
    /// Said by the sentence alone, which begins with no word of the others and a colon.
    #[default]
    Other,
}

/// In the order of [`Cause`].
const WORDS: [(Cause, &str); Cause::Other as usize] = [
    (Cause::Memory, "memory"),
    (Cause::HostMemory, "host memory"),
    (Cause::Buffers, "buffers"),
    (Cause::Size, "size"),
    (Cause::Time, "time"),
    (Cause::Degrees, "degrees"),
    (Cause::Tp, "tp"),
    (Cause::Pp, "pp"),
    (Cause::Vp, "vp"),
    (Cause::Ep, "ep"),
    (Cause::Zero, "zero"),
    (Cause::Heads, "heads"),
    (Cause::HeadDim, "head_dim"),
    (Cause::Sequence, "sequence"),
    (Cause::Documents, "documents"),
    (Cause::Window, "window"),
    (Cause::Batch, "batch"),
    (Cause::Sizes, "sizes"),
    (Cause::Positions, "positions"),
    (Cause::Model, "model"),
    (Cause::Mla, "mla"),
    (Cause::Mtp, "mtp"),
    (Cause::Hybrid, "hybrid"),
    (Cause::Attention, "attention"),
    (Cause::SparseAttention, "sparse attention"),
    (Cause::Experts, "experts"),
    (Cause::Replicas, "replicas"),
    (Cause::Shadow, "shadow"),
    (Cause::Capacity, "capacity"),
    (Cause::Routing, "routing"),
    (Cause::Dispatch, "dispatch"),
    (Cause::Fp8, "fp8"),
    (Cause::Options, "options"),
    (Cause::Weights, "weights"),
    (Cause::Checkpoint, "checkpoint"),
    (Cause::Search, "search"),
    (Cause::Sweep, "sweep"),
    (Cause::Longest, "longest"),
];

impl Cause {
    /// The error that says so, with the values and the remedy.
    pub fn infeasible(self, said: impl ToString) -> Error {
        Error::Infeasible(Reason::new(self, said))
    }

    /// The word before the colon; none of a reason without one.
    fn word(self) -> Option<&'static str> {
        WORDS.get(self as usize).map(|(_, word)| *word)
    }

    /// Whether it is a GPU's memory, or that of the CPUs beside it.
    pub fn is_memory(self) -> bool {
        matches!(self, Cause::Memory | Cause::HostMemory)
    }
}

/// A cause, and a sentence with the values and the remedy. Its text, which serde reads and writes, is the cause's word, a colon
/// and the sentence; that of the default, which is no reason at all, is empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub struct Reason {
    pub cause: Cause,
    pub said: String,
    /// The word of `--options` that is at fault, where whoever refuses has said so, as by [`Error::option`]. The text has it in
    /// its sentence alone: a reason that was read has none.
    #[serde(skip)]
    pub word: Option<&'static str>,
}

impl Reason {
    pub fn new(cause: Cause, said: impl ToString) -> Reason {
        Reason { cause, said: said.to_string(), word: None }
    }

    /// The same with something more to say.
    pub fn and(self, more: impl fmt::Display) -> Reason {
        Reason { said: format!("{}; {more}", self.said), ..self }
    }

    /// The same without line breaks: a row of a CSV is one line.
    pub fn in_a_line(self) -> Reason {
        Reason { said: self.said.replace('\n', " "), ..self }
    }

    /// What reasons are counted by, and the rest: the cause's word and the sentence; without a cause what stands before the
    /// first colon of the sentence, if it has one, and behind.
    pub fn parts(&self) -> (&str, &str) {
        match self.cause.word() {
            Some(word) => (word, &self.said),
            None => self.said.split_once(':').map_or((&self.said, ""), |(kind, rest)| (kind, rest.trim_start())),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.cause.word() {
            Some(word) => write!(f, "{word}: {}", self.said),
            None => f.write_str(&self.said),
        }
    }
}

impl From<&str> for Reason {
    /// Of its text.
    fn from(text: &str) -> Reason {
        let known = text.split_once(": ").and_then(|(word, said)| {
            let (cause, _) = WORDS.iter().find(|(_, known)| *known == word)?;
            Some(Reason::new(*cause, said))
        });
        known.unwrap_or_else(|| Reason::new(Cause::Other, text))
    }
}

impl From<String> for Reason {
    fn from(text: String) -> Reason {
        text.as_str().into()
    }
}

impl From<Reason> for String {
    fn from(reason: Reason) -> String {
        reason.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_is_found_again_in_its_text() {
        for (at, (cause, word)) in WORDS.into_iter().enumerate() {
            assert_eq!(cause as usize, at, "{word} is out of order");
            let reason = Reason::new(cause, "needs 2: more; memory: or less\nat least");
            assert_eq!(reason.to_string(), format!("{word}: needs 2: more; memory: or less\nat least"));
            assert_eq!(Reason::from(reason.to_string()), reason);
            assert_eq!(reason.parts(), (word, reason.said.as_str()));
        }
    }

    #[test]
    fn a_text_without_a_cause_stays_as_it_is() {
        let kinds = [
            ("", ("", "")),
            ("nothing runs", ("nothing runs", "")),
            ("DeepEP V2: 33 choices", ("DeepEP V2", "33 choices")),
            ("rank 0, memory: none", ("rank 0, memory", "none")),
            ("Memory: none", ("Memory", "none")),
            ("memory:none", ("memory", "none")),
        ];
        for (text, parts) in kinds {
            let reason = Reason::from(text);
            assert_eq!((reason.cause, reason.to_string().as_str(), reason.parts()), (Cause::Other, text, parts));
        }
        assert_eq!(Reason::from(""), Reason::default());
    }

    /// As files of studies have it since the first of them.
    #[test]
    fn files_have_a_reason_as_one_text() {
        let reason = Reason::new(Cause::HostMemory, "8 ranks need 2.0 TiB").and("offload less");
        let text = "host memory: 8 ranks need 2.0 TiB; offload less";
        let json = serde_json::to_string(&reason).unwrap();
        assert_eq!(json, format!("{text:?}"));
        assert_eq!(serde_json::from_str::<Reason>(&json).unwrap(), reason);
        let mut csv = csv::Writer::from_writer(vec![]);
        csv.serialize((1, &reason, true)).unwrap();
        assert_eq!(csv.into_inner().unwrap(), format!("1,{text},true\n").as_bytes());
        assert_eq!(Error::Infeasible(reason).to_string(), format!("infeasible: {text}"));
    }
}
