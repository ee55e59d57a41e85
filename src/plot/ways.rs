//! Rows into lines: the ways to split the sequence, and the best point of each at every length.

use super::rows::Row;
use super::style::Shape;
use crate::error::{Cause, Reason};
use plotters::style::RGBColor;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    NoSplit,
    Ulysses,
    Ring,
    Gathered,
    Usp,
    Tensor,
    Pipeline,
}

impl Family {
    /// For headings.
    pub fn title(self) -> &'static str {
        match self {
            Family::NoSplit => "sequence not split",
            Family::Ulysses => "Ulysses",
            Family::Ring => "ring attention",
            Family::Gathered => "KV gathered, no ring",
            Family::Usp => "USP: Ulysses x ring",
            Family::Tensor => "tensor parallel + any",
            Family::Pipeline => "pipeline + any",
        }
    }

    /// For lines of tables.
    pub fn name(self) -> &'static str {
        match self {
            Family::NoSplit => "not split",
            Family::Ulysses => "Ulysses",
            Family::Ring => "ring",
            Family::Gathered => "gathered KV",
            Family::Usp => "USP",
            Family::Tensor => "tensor",
            Family::Pipeline => "pipeline",
        }
    }

    pub fn look(self) -> (Shape, RGBColor) {
        match self {
            Family::NoSplit => (Shape::Triangle, RGBColor(110, 110, 110)),
            Family::Ulysses => (Shape::Circle, RGBColor(30, 110, 200)),
            Family::Ring => (Shape::Square, RGBColor(226, 84, 10)),
            Family::Gathered => (Shape::Circle, RGBColor(142, 84, 180)),
            Family::Usp => (Shape::Diamond, RGBColor(0, 140, 110)),
            Family::Tensor => (Shape::Triangle, RGBColor(150, 104, 30)),
            Family::Pipeline => (Shape::Square, RGBColor(190, 40, 110)),
        }
    }
}

/// A way to split the work on a sequence. The order is that of the legend.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Way {
    pub family: Family,
    pub degree: u64,
    pub pp: u32,
    /// Virtual stages of each of a pipeline's.
    pub vp: u32,
    pub tp: u32,
    pub ulysses: u32,
    pub ring: u32,
    /// Ranks that share the experts of a layer, in a mixture.
    pub ep: u32,
    /// Words of the options, without those that the family says already.
    pub words: String,
}

impl Way {
    pub fn of(row: &Row) -> Way {
        let Row { pp, vp, tp, ulysses, ring, ep, .. } = *row;
        let gathers = row.strategy.contains("allgather-kv");
        let family = match (ulysses > 1, ring > 1) {
            _ if pp > 1 => Family::Pipeline,
            _ if tp > 1 => Family::Tensor,
            (false, false) => Family::NoSplit,
            (true, false) => Family::Ulysses,
            (false, true) if gathers => Family::Gathered,
            (false, true) => Family::Ring,
            (true, true) => Family::Usp,
        };
        let said = |word: &&str| !["", "default", "gather-kv"].contains(word);
        let words: Vec<&str> = row.options.split('+').filter(said).collect();
        let degree = [pp, tp, ulysses, ring].map(u64::from).iter().product();
        Way { family, degree, pp, vp, tp, ulysses, ring, ep, words: words.join("+") }
    }

    /// `8`, `8x4` of a hybrid, `tp 8, ring 4` where more than the sequence is split.
    pub fn split(&self) -> String {
        match self.family {
            Family::Usp => format!("{}x{}", self.ulysses, self.ring),
            Family::Tensor | Family::Pipeline => {
                let stages = [("pp", self.pp), ("vp", self.vp)];
                let all = stages.into_iter().chain([("tp", self.tp), ("ul", self.ulysses), ("ring", self.ring)]);
                let more: Vec<String> = all.filter(|(_, d)| *d > 1).map(|(n, d)| format!("{n} {d}")).collect();
                more.join(", ")
            }
            _ => self.degree.to_string(),
        }
    }

    /// The same, and how many ranks share the experts of a mixture: `8, ep 16`.
    pub fn degrees(&self) -> String {
        let split = self.split();
        if self.ep > 1 { format!("{split}, ep {}", self.ep) } else { split }
    }

    /// Degrees and words: how tests name a way.
    #[cfg(test)]
    pub fn short(&self) -> String {
        if self.words.is_empty() { self.degrees() } else { format!("{} {}", self.degrees(), self.words) }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Best {
    Mfu {
        mfu: f64,
        full_recompute: bool,
        zero: u32,
        global_batch: u64,
    },
    /// No configuration fits.
    Never(Kind),
}

/// The kind of reason why nothing runs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// What stands before the colon of the reason, or its first two words; short.
    pub word: String,
    cause: Cause,
}

/// The best of each way at each length.
pub fn best(rows: &[Row]) -> BTreeMap<Way, BTreeMap<u64, Best>> {
    let mut all: BTreeMap<Way, BTreeMap<u64, Best>> = BTreeMap::new();
    for row in rows {
        let new = match &row.mfu {
            Ok(mfu) => {
                let (full_recompute, zero, global_batch) = (row.recompute == "full", row.zero, row.global_batch);
                Best::Mfu { mfu: *mfu, full_recompute, zero, global_batch }
            }
            Err(why) => Best::Never(Kind::of(why)),
        };
        let points = all.entry(Way::of(row)).or_default();
        if points.get(&row.seq_len).is_none_or(|old| better(&new, old)) {
            points.insert(row.seq_len, new);
        }
    }
    all
}

/// Why none of these rows runs, in every picture of a study: memory, if one of them lacks only that, since its plan passed
/// every other check before; else what most of them say, of equals the first in the alphabet. A word that is refused is the
/// reason only where each row has one: without it a row would have had another. None where one runs.
pub fn why_none<'a>(rows: impl Iterator<Item = &'a Row>) -> Option<Kind> {
    let mut counts: BTreeMap<Kind, usize> = BTreeMap::new();
    for row in rows {
        *counts.entry(Kind::of(row.mfu.as_ref().err()?)).or_default() += 1;
    }
    let most = counts.into_iter().max_by_key(|(kind, count)| {
        (kind.cause == Cause::Memory, kind.cause != Cause::Options, *count, std::cmp::Reverse(kind.clone()))
    });
    most.map(|(kind, _)| kind)
}

/// Of two reasons, memory, as in [`why_none`].
fn better(new: &Best, old: &Best) -> bool {
    match (new, old) {
        (Best::Mfu { mfu: a, .. }, Best::Mfu { mfu: b, .. }) => a > b,
        (Best::Mfu { .. }, Best::Never(_)) => true,
        (Best::Never(a), Best::Never(b)) => a.cause == Cause::Memory && b.cause != Cause::Memory,
        (Best::Never(_), Best::Mfu { .. }) => false,
    }
}

impl Kind {
    pub fn of(why: &Reason) -> Kind {
        let word = match why.parts() {
            (word, "") => word.split_whitespace().take(2).collect::<Vec<_>>().join(" "),
            (word, _) => word.trim().to_string(),
        };
        let word = if word.is_empty() { "unsaid".into() } else { word.chars().take(14).collect() };
        Kind { word, cause: why.cause }
    }

    /// What it means, for the legend.
    pub fn meaning(&self) -> &str {
        match self.cause {
            Cause::Memory => "more than a GPU holds",
            Cause::Heads => "do not divide over Ulysses",
            Cause::Batch => "too few or uneven sequences",
            Cause::Sequence => "does not divide evenly",
            Cause::Degrees => "do not make the GPUs",
            Cause::Time => "a step too long to tell",
            Cause::Size => "too long a plan to lay out",
            _ => "see rows.csv",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three pictures of one sweep gave three reasons for the same cell.
    #[test]
    fn one_rule_says_why_nothing_runs() {
        let row = |why: std::result::Result<f64, &str>| Row {
            model: "m".into(),
            cluster: "c".into(),
            stack: "s".into(),
            gpus: 8,
            seq_len: 8,
            global_batch: 1,
            tp: 1,
            pp: 1,
            vp: 1,
            ulysses: 8,
            ring: 1,
            ep: 1,
            zero: 1,
            options: "default".into(),
            strategy: "ulysses".into(),
            recompute: "none".into(),
            mfu: why.map_err(Reason::from),
        };
        let of = |whys: &[&str]| {
            why_none(whys.iter().map(|why| row(Err(why))).collect::<Vec<_>>().iter()).map(|kind| kind.word)
        };
        assert_eq!(of(&["heads: 3", "batch: few", "heads: 4"]).unwrap(), "heads");
        assert_eq!(of(&["heads: 3", "batch: few"]).unwrap(), "batch");
        assert_eq!(of(&["heads: 3", "memory: 90 GiB", "heads: 4"]).unwrap(), "memory");
        assert_eq!(of(&["options: a word", "batch: few", "options: a word"]).unwrap(), "batch");
        assert_eq!(of(&["options: a word"]).unwrap(), "options");
        assert_eq!(of(&[]), None);
        assert_eq!(why_none([row(Err("heads: 3")), row(Ok(0.5))].iter()), None);
    }

    /// Sequences may be too few for dp, and tokens of a step no whole number of sequences.
    #[test]
    fn a_batch_may_be_uneven_too() {
        let why = "batch: 4194304 tokens a step are no whole number of sequences of 1000; e.g. 4195000 are";
        assert_eq!(Kind::of(&why.into()).meaning(), "too few or uneven sequences");
    }
}
