//! One configuration beside another: which part of the step makes the one faster, and which memory differs.

use super::human::{Table, bytes, decimal, percent, seconds};
use super::text::axis;
use super::{Report, Row};
use crate::error::{Error, Result, json, text};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Parts that differ by less of the longer of both are summed up.
const LEAST: f64 = 0.01;

/// A report beside what an earlier one found. Parts of either add up to its step.
#[derive(Debug, Clone, Serialize)]
pub struct Beside {
    /// The file of the other.
    pub file: String,
    /// The other configuration, in words.
    pub what: String,
    /// Why this one does not run, and the other; none of one that does.
    pub refused: [Option<String>; 2],
    pub unit: Unit,
    /// In `unit`; those that differ most first, and what hardly differs in one.
    pub time: Vec<Pair>,
    /// Of a rank at its fullest, bytes.
    pub memory: Vec<Pair>,
    /// Sent by one rank in a step, bytes, inside its node and out of it.
    pub sent: [Pair; 2],
    pub mfu: Pair,
}

/// What times of two steps are compared in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Steps of as many tokens on as many GPUs.
    StepSeconds,
    /// Others.
    GpuSecondsPerMillionTokens,
}

/// A quantity of this configuration and of the other.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pair {
    pub name: String,
    pub this: f64,
    pub other: f64,
}

/// What is read of a report.
#[derive(Deserialize)]
struct Read {
    #[serde(flatten)]
    row: Row,
    kernels: Vec<ReadShare>,
    exposed: Vec<ReadShare>,
    slowed_s: f64,
    others_s: f64,
    offload_s: f64,
    memory: ReadMemory,
}

#[derive(Deserialize)]
struct ReadShare {
    name: String,
    seconds: f64,
}

#[derive(Deserialize)]
struct ReadMemory {
    at_the_fullest: Vec<(String, u64)>,
    gaps: u64,
    buffers: u64,
    reserved: u64,
}

/// Names with numbers, in the order in which they were found.
type Named = Vec<(String, f64)>;

impl Read {
    /// Parts of the step, s; they add up to it.
    fn time(&self) -> Named {
        let kernels = self.kernels.iter().map(|k| (k.name.clone(), k.seconds));
        let waits = self.exposed.iter().map(|e| (format!("waiting for {}", axis(&e.name)), e.seconds));
        let rest = [
            ("SMs lost to communication", self.slowed_s),
            ("waiting for host memory", self.offload_s),
            ("waiting for other ranks", self.others_s),
            ("waiting for the host", self.row.host_s.unwrap_or(0.0)),
        ];
        kernels.chain(waits).chain(rest.map(|(name, s)| (name.to_string(), s))).collect()
    }

    fn memory(&self) -> Named {
        let ReadMemory { at_the_fullest, gaps, buffers, reserved } = &self.memory;
        let kinds = at_the_fullest.iter().map(|(kind, size)| (kind.clone(), *size as f64));
        let rest =
            [("gaps between them", gaps), ("buffers of a library", buffers), ("reserved by the stack", reserved)];
        kinds.chain(rest.map(|(name, size)| (name.to_string(), *size as f64))).collect()
    }

    fn tokens(&self) -> f64 {
        (self.row.seq_len as f64) * (self.row.global_batch as f64)
    }

    /// What a second of the step is in GPU-seconds for a million tokens.
    fn per_million(&self) -> f64 {
        f64::from(self.row.gpus) / self.tokens() * 1e6
    }
}

impl Beside {
    /// `report` beside what `--out` or `--json` of an estimate wrote to `file`. Errors: no such file, something else than an
    /// estimate, a step that is not known of either.
    pub fn of(report: &Report, file: &Path) -> Result<Beside> {
        let name = file.display().to_string();
        let text = text::spec(file)?;
        let wants = "write it with `foretrain estimate .. --out FILE`";
        let other: Read = json::parse(&name, &text)
            .map_err(|e| Error::spec(&name, "the file", format!("is no answer of estimate ({e}); {wants}")))?;
        let own = serde_json::to_string(report).expect("a report is plain data");
        let this: Read = serde_json::from_str(&own).expect("what was written is read");
        if other.row.step_time_s.is_none() {
            let why = format!("is not known, as {}; compare with one that runs", other.row.why);
            return Err(Error::spec(&name, "step_time_s", why));
        }
        Ok(Beside::pairs(name, &this, &other))
    }

    fn pairs(file: String, this: &Read, other: &Read) -> Beside {
        let alike = this.tokens() == other.tokens() && this.row.gpus == other.row.gpus;
        let (unit, scales) = match alike {
            true => (Unit::StepSeconds, [1.0; 2]),
            false => (Unit::GpuSecondsPerMillionTokens, [this, other].map(Read::per_million)),
        };
        let pair = |name: &str, of: fn(&Row) -> Option<f64>| {
            let [this, other] = [this, other].map(|read| of(&read.row).unwrap_or(0.0));
            Pair { name: name.into(), this, other }
        };
        let row = &other.row;
        Beside {
            file,
            what: format!("{} on {} GPUs of {}, stack {}, {}", row.model, row.gpus, row.cluster, row.stack, row.what()),
            refused: [this, other].map(|read| (!read.row.feasible).then(|| read.row.why.to_string())),
            unit,
            time: summed(&joined(&this.time(), &other.time(), scales)),
            memory: joined(&this.memory(), &other.memory(), [1.0; 2]),
            sent: [pair("inside its node", |row| row.bytes_scale_up), pair("out of it", |row| row.bytes_scale_out)],
            mfu: pair("MFU", |row| row.mfu),
        }
    }

    pub fn render(&self) -> String {
        let total = |pairs: &[Pair]| {
            let sum = |of: fn(&Pair) -> f64| pairs.iter().map(of).sum::<f64>();
            Pair { name: String::new(), this: sum(|p| p.this), other: sum(|p| p.other) }
        };
        let mut table = Table::new("<>>>>");
        let heading = match self.unit {
            Unit::StepSeconds => "time of a step, mean of the ranks",
            Unit::GpuSecondsPerMillionTokens => "GPU time of a million tokens",
        };
        table.row([heading, "this", "other", "more", "of the other's step"]);
        let step = total(&self.time);
        let mut line = |name: &str, pair: &Pair, show: fn(f64) -> String, whole: f64| {
            let more = pair.this - pair.other;
            let share = if whole > 0.0 { signed(more / whole, percent) } else { String::new() };
            table.row([format!("  {name}"), show(pair.this), show(pair.other), signed(more, show), share]);
        };
        for pair in &self.time {
            line(&pair.name, pair, seconds, step.other);
        }
        line("all", &step, seconds, step.other);
        line("memory of a rank", &total(&self.memory), bytes, 0.0);
        for pair in self.memory.iter().filter(|pair| pair.this != pair.other) {
            line(&format!("  {}", pair.name), pair, bytes, 0.0);
        }
        for pair in &self.sent {
            line(&format!("sent by a rank {}", pair.name), pair, |b| decimal(b, "B"), 0.0);
        }
        line("MFU", &self.mfu, percent, 0.0);
        let (fast, by) = match step.this < step.other {
            true => ("this one", step.other / step.this),
            false => ("the other", step.this / step.other),
        };
        let verdict = match by {
            by if by < 1.0005 => "both take the same".to_string(),
            by => format!("{fast} is {:.1} % faster", 100.0 * (by - 1.0)),
        };
        let which = ["this one", "the other"].into_iter().zip(&self.refused);
        let refused: String = which
            .filter_map(|(which, why)| why.as_ref().map(|why| format!("\n  {which} does not run: {why}")))
            .collect();
        format!("beside {}: {}\n  {verdict}{refused}\n\n{}", self.file, self.what, table.render(""))
    }
}

/// With a plus where it is more.
fn signed(more: f64, show: fn(f64) -> String) -> String {
    format!("{}{}", if more < 0.0 { "-" } else { "+" }, show(more.abs()))
}

/// Both lists by name, what only one has being nothing in the other.
fn joined(this: &Named, other: &Named, [scale, scale_other]: [f64; 2]) -> Vec<Pair> {
    let mut all: Vec<Pair> = vec![];
    let mut add = |name: &str, this: f64, other: f64| match all.iter_mut().find(|pair| pair.name == name) {
        Some(pair) => (pair.this, pair.other) = (pair.this + this, pair.other + other),
        None => all.push(Pair { name: name.into(), this, other }),
    };
    this.iter().for_each(|(name, n)| add(name, n * scale, 0.0));
    other.iter().for_each(|(name, n)| add(name, 0.0, n * scale_other));
    all.retain(|pair| pair.this != 0.0 || pair.other != 0.0);
    all
}

/// Those that differ most first, and in one what hardly differs.
fn summed(all: &[Pair]) -> Vec<Pair> {
    let of = |sum: fn(&Pair) -> f64| all.iter().map(sum).sum::<f64>();
    let least = LEAST * of(|p| p.this).max(of(|p| p.other));
    let more = |pair: &Pair| (pair.this - pair.other).abs();
    let (mut large, small): (Vec<Pair>, Vec<Pair>) = all.iter().cloned().partition(|pair| more(pair) >= least);
    large.sort_by(|a, b| more(b).total_cmp(&more(a)));
    if !small.is_empty() {
        let sum = |of: fn(&Pair) -> f64| small.iter().map(of).sum();
        let name = "what differs by less than 1 % of the step".to_string();
        large.push(Pair { name, this: sum(|p| p.this), other: sum(|p| p.other) });
    }
    large
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(all: &[(&str, f64)]) -> Named {
        all.iter().map(|(name, n)| (name.to_string(), *n)).collect()
    }

    #[test]
    fn what_only_one_has_is_nothing_in_the_other_and_sums_stay() {
        let (this, other) = (named(&[("a", 1.0), ("b", 2.0), ("c", 0.001)]), named(&[("b", 4.0), ("d", 0.5)]));
        let all = summed(&joined(&this, &other, [1.0, 2.0]));
        let of = |name: &str| all.iter().find(|p| p.name == name).map(|p| (p.this, p.other));
        assert_eq!([of("a"), of("b"), of("d")], [Some((1.0, 0.0)), Some((2.0, 8.0)), Some((0.0, 1.0))]);
        assert_eq!(all[0].name, "b");
        assert_eq!(of("c"), None);
        let sum = |of: fn(&Pair) -> f64| all.iter().map(of).sum::<f64>();
        assert!((sum(|p| p.this) - 3.001).abs() < 1e-12 && (sum(|p| p.other) - 9.0).abs() < 1e-12);
    }

    #[test]
    fn less_has_a_minus() {
        assert_eq!([signed(-0.25, percent), signed(0.5, percent)], ["-25.0 %", "+50.0 %"]);
    }
}
