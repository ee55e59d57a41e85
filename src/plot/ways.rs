//! Rows into lines: the ways to split the sequence, and the best point of each at every length.

use super::rows::Row;
use std::collections::BTreeMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    NoSplit,
    Ulysses,
    Ring,
    Usp,
}

impl Family {
    /// For headings.
    pub fn title(self) -> &'static str {
        match self {
            Family::NoSplit => "sequence not split",
            Family::Ulysses => "Ulysses",
            Family::Ring => "ring attention",
            Family::Usp => "USP: Ulysses x ring",
        }
    }
}

/// A way to split the sequence. The order is that of the legend.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Way {
    pub family: Family,
    pub degree: u64,
    pub ulysses: u32,
    pub ring: u32,
    pub strategy: String,
}

impl Way {
    pub fn of(row: &Row) -> Way {
        let (ulysses, ring) = (row.ulysses, row.ring);
        let family = match (ulysses > 1, ring > 1) {
            (false, false) => Family::NoSplit,
            (true, false) => Family::Ulysses,
            (false, true) => Family::Ring,
            (true, true) => Family::Usp,
        };
        Way { family, degree: u64::from(ulysses) * u64::from(ring), ulysses, ring, strategy: row.strategy.clone() }
    }

    /// `8`, or `8x4` of a hybrid.
    pub fn degrees(&self) -> String {
        match self.family {
            Family::Usp => format!("{}x{}", self.ulysses, self.ring),
            _ => self.degree.to_string(),
        }
    }

    /// Says the order of a ring's chunks; zigzag is what a plain "ring" means here.
    pub fn label(&self) -> String {
        let (u, r) = (self.ulysses, self.ring);
        match self.family {
            Family::NoSplit => "no split".into(),
            Family::Ulysses => format!("Ulysses {u}"),
            Family::Ring => match self.strategy.split_once(['-', '_', ' ']) {
                Some(("ring", order)) => format!("Ring {r} ({order})"),
                Some(("allgather", _)) => format!("All-gather KV {r}"),
                _ => format!("Ring {r} (zigzag)"),
            },
            Family::Usp => format!("USP {u} x {r}"),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Best {
    Mfu {
        mfu: f64,
        full_recompute: bool,
    },
    /// No configuration fits; the kind of reason.
    Never(String),
}

/// The best of each way at each length.
pub fn best(rows: &[Row]) -> BTreeMap<Way, BTreeMap<u64, Best>> {
    let mut all: BTreeMap<Way, BTreeMap<u64, Best>> = BTreeMap::new();
    for row in rows {
        let new = match &row.mfu {
            Ok(mfu) => Best::Mfu { mfu: *mfu, full_recompute: row.recompute == "full" },
            Err(why) => Best::Never(reason(why)),
        };
        let points = all.entry(Way::of(row)).or_default();
        if points.get(&row.seq_len).is_none_or(|old| better(&new, old)) {
            points.insert(row.seq_len, new);
        }
    }
    all
}

/// Of two reasons, memory: the plan passed every other check before its memory was counted.
fn better(new: &Best, old: &Best) -> bool {
    match (new, old) {
        (Best::Mfu { mfu: a, .. }, Best::Mfu { mfu: b, .. }) => a > b,
        (Best::Mfu { .. }, Best::Never(_)) => true,
        (Best::Never(a), Best::Never(b)) => a == "memory" && b != "memory",
        (Best::Never(_), Best::Mfu { .. }) => false,
    }
}

/// The word before the colon, or the first two words.
pub fn reason(why: &str) -> String {
    let kind = match why.split_once(':') {
        Some((kind, _)) => kind.trim().to_string(),
        None => why.split_whitespace().take(2).collect::<Vec<_>>().join(" "),
    };
    if kind.is_empty() { "unsaid".into() } else { kind.chars().take(14).collect() }
}

/// What a kind of reason means, for the legend.
pub fn meaning(reason: &str) -> &str {
    match reason {
        "memory" => "more than a GPU holds",
        "heads" => "do not divide over Ulysses",
        "batch" => "too few sequences for dp",
        "sequence" => "does not divide evenly",
        "degrees" => "do not make the GPUs",
        _ => "see rows.csv",
    }
}
