//! Numbers and tables for people.

use crate::spec::Documents;
use std::fmt::Write;

/// A line for each note, and an empty one behind them; nothing where there are none.
pub fn notes(notes: &[String]) -> String {
    let lines: String = notes.iter().map(|note| format!("  note: {note}\n")).collect();
    if lines.is_empty() { lines } else { lines + "\n" }
}

/// `3.1 h`, `54.0 d`: times of people.
pub fn long(s: f64) -> String {
    match s {
        s if s >= 2.0 * 86_400.0 => format!("{:.1} d", s / 86_400.0),
        s if s >= 2.0 * 3600.0 => format!("{:.1} h", s / 3600.0),
        s if s >= 120.0 => format!("{:.1} min", s / 60.0),
        s => seconds(s),
    }
}

/// `12.8 s`, `3.41 ms`, `17.0 us`: three digits.
pub fn seconds(s: f64) -> String {
    let (scale, unit) = match s.abs() {
        v if v >= 1.0 || v == 0.0 => (1.0, "s"),
        v if v >= 1e-3 => (1e3, "ms"),
        _ => (1e6, "us"),
    };
    format!("{} {unit}", digits(s * scale))
}

/// `1.91 GB`-like quantities are decimal elsewhere; memory is in binary units: `82.5 GiB`.
pub fn bytes(b: f64) -> String {
    scaled(b, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1)
}

/// Traffic and FLOPs, in powers of ten: `1.91 GB`.
pub fn decimal(v: f64, unit: &str) -> String {
    let units: Vec<String> = ["", "K", "M", "G", "T", "P", "E", "Z"].iter().map(|p| format!("{p}{unit}")).collect();
    scaled(v, 1000.0, &units.iter().map(String::as_str).collect::<Vec<_>>(), 2)
}

fn scaled(mut v: f64, base: f64, units: &[&str], places: usize) -> String {
    let mut at = 0;
    while v >= base && at + 1 < units.len() {
        v /= base;
        at += 1;
    }
    // Below the first prefix numbers are mostly counts.
    if at == 0 && v == v.round() { format!("{v} {}", units[at]) } else { format!("{v:.places$} {}", units[at]) }
}

/// Tokens by powers of two: `8 K`, `1 M`; others as they are.
pub fn tokens(n: u64) -> String {
    match n {
        n if n > 0 && n.is_multiple_of(1 << 20) => format!("{} M", n >> 20),
        n if n > 0 && n.is_multiple_of(1 << 10) => format!("{} K", n >> 10),
        n => n.to_string(),
    }
}

/// `1 GPU`, `8 GPUs`.
pub fn counted(n: impl Into<u64>, what: &str) -> String {
    match n.into() {
        1 => format!("1 {what}"),
        n => format!("{n} {what}s"),
    }
}

pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// What a heading says of documents that sequences are packed with.
pub fn packed(documents: &Documents) -> String {
    match documents.lengths()[..] {
        [] => String::new(),
        [one] => format!(", documents of {} tokens", tokens(one)),
        ref all => format!(", {} documents of {} tokens in all until it is full", all.len(), tokens(all.iter().sum())),
    }
}

/// A model with all its weights and those of them that a token meets, if these are known: `llama-3-70b (70.6 B weights)`, of a
/// mixture `mixtral-8x7b (46.7 B weights, 12.9 B of them active)`.
pub fn weighed(model: &str, weights: Option<(u64, u64)>) -> String {
    let Some((all, active)) = weights else { return model.to_string() };
    let part = if active < all { format!(", {} of them active", billions(active)) } else { String::new() };
    format!("{model} ({} weights{part})", billions(all))
}

/// `70.6 B`, `124 M`: as people count weights, three digits.
fn billions(n: u64) -> String {
    let n = n as f64;
    let (scale, unit) = match n {
        n if n >= 1e9 => (1e9, "B"),
        n if n >= 1e6 => (1e6, "M"),
        n if n >= 1e3 => (1e3, "K"),
        _ => return n.to_string(),
    };
    format!("{} {unit}", digits(n / scale))
}

/// Three significant digits without an exponent.
fn digits(v: f64) -> String {
    let places = match v.abs() {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{v:.places$}")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Columns as wide as their widest cell, two spaces apart.
pub struct Table {
    align: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// `<` and `>` for each column: to the left, to the right.
    pub fn new(align: &str) -> Table {
        let align = align.chars().map(|c| if c == '<' { Align::Left } else { Align::Right }).collect();
        Table { align, rows: vec![] }
    }

    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        debug_assert!(cells.len() <= self.align.len(), "{cells:?}");
        self.rows.push(cells);
    }

    /// Every line begins with `indent`.
    pub fn render(&self, indent: &str) -> String {
        let width = |c: usize| self.rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.align.len()).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = indent.to_string();
            for ((cell, align), width) in row.iter().zip(&self.align).zip(&widths) {
                let _ = match align {
                    Align::Left => write!(line, "{cell:<width$}  "),
                    Align::Right => write!(line, "{cell:>width$}  "),
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_unit() {
        let all = [12.816, 0.003411, 1.7e-5, 0.0, 156.8, 99.97].map(seconds);
        assert_eq!(all, ["12.8 s", "3.41 ms", "17.0 us", "0.00 s", "157 s", "100 s"]);
        assert_eq!(bytes(82.5 * 1073741824.0), "82.5 GiB");
        assert_eq!(decimal(1.914e9, "B"), "1.91 GB");
        assert_eq!([8192, 1 << 20, 1536, 100].map(tokens), ["8 K", "1 M", "1536", "100"]);
    }

    #[test]
    fn models_are_told_with_their_weights() {
        assert_eq!(weighed("llama-3-70b", Some((70_553_706_496, 70_553_706_496))), "llama-3-70b (70.6 B weights)");
        let mixture = weighed("mixtral-8x7b", Some((46_702_792_704, 12_879_925_248)));
        assert_eq!(mixture, "mixtral-8x7b (46.7 B weights, 12.9 B of them active)");
        assert_eq!(weighed("attention", None), "attention");
        assert_eq!([1_026_408_232_448, 124_439_808, 82_000, 640].map(billions), ["1026 B", "124 M", "82.0 K", "640"]);
    }

    #[test]
    fn a_table_is_aligned() {
        let mut table = Table::new("<>");
        table.row(["a", "1"]);
        table.row(["long", "100"]);
        assert_eq!(table.render(" "), " a       1\n long  100\n");
    }
}
