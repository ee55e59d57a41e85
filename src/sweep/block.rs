//! What a GPU does during one layer, op by op, for ways that split one sequence equally far: spans.csv.
//!
//! The layer is the middle one of three, so that it has neighbours as any other.

use super::{Case, Point};
use crate::cost::{Effort, cost};
use crate::error::{Error, Result};
use crate::report::Row;
use crate::timeline::{Span, Timeline};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// An op of the layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BlockSpan {
    pub way: String,
    pub seq_len: u64,
    /// Ranks that share the sequence.
    pub ranks: u32,
    pub recompute: String,
    /// `fwd` or `bwd`.
    pub pass: &'static str,
    pub lane: String,
    /// Kernel, transfer or collective.
    pub what: &'static str,
    pub op: String,
    /// Since the first kernel of the pass started.
    pub start_s: f64,
    pub end_s: f64,
}

const LAYERS: u64 = 3;
/// Calls that the middle layer's passes are part of. Under ZeRO 2 and 3 the layers of a backward pass that ask for
/// something of the layer before them are a call of their own.
const MIDDLE: [(&str, &[&str]); 2] = [("fwd", &["fwd[1]/"]), ("bwd", &["bwd[1]/", "bwd.first[1]/"])];

/// Writes spans.csv, if there are ways to compare.
pub fn write(case: &Case, rows: &[Row], dir: &Path) -> Result<Option<PathBuf>> {
    let chosen = comparable(rows);
    let path = dir.join("spans.csv");
    let mut spans = Vec::new();
    for row in chosen {
        spans.extend(of(case, row)?);
    }
    if spans.is_empty() {
        // Of an earlier study.
        let _ = std::fs::remove_file(&path);
        return Ok(None);
    }
    let mut csv = csv::Writer::from_writer(vec![]);
    spans.iter().for_each(|span| csv.serialize(span).expect("a span is plain data"));
    let bytes = csv.into_inner().expect("written to memory");
    std::fs::write(&path, bytes).map_err(Error::io(&path))?;
    Ok(Some(path))
}

/// Ulysses, ring and hybrid of equal degree, length and recomputation, without options: of all such sets the largest;
/// of the largest that of the middle length, whose best is fastest.
fn comparable(rows: &[Row]) -> Vec<&Row> {
    // By length, degree and recomputation: by whether Ulysses, and whether a ring, is part of it.
    type Ways<'a> = BTreeMap<(bool, bool), &'a Row>;
    let mut sets: BTreeMap<(u64, u32, &str), Ways> = BTreeMap::new();
    let plain = |r: &&Row| r.feasible && r.options == "default" && (r.tp, r.pp) == (1, 1) && r.ulysses * r.ring > 1;
    for row in rows.iter().filter(plain) {
        let set = sets.entry((row.seq_len, row.ulysses * row.ring, &row.recompute)).or_default();
        let old = set.entry((row.ulysses > 1, row.ring > 1)).or_insert(row);
        if row.mfu > old.mfu {
            *old = row;
        }
    }
    let largest = sets.values().map(BTreeMap::len).max().unwrap_or(0);
    sets.retain(|_, set| set.len() == largest && largest > 1);
    let lengths: Vec<u64> = sets.keys().map(|(length, ..)| *length).collect();
    let Some(&middle) = lengths.get(lengths.len() / 2) else { return vec![] };
    let best = |set: &BTreeMap<_, &Row>| set.values().filter_map(|r| r.mfu).fold(0.0, f64::max);
    let of_middle = sets.into_iter().filter(|((length, ..), _)| *length == middle).map(|(_, set)| set);
    of_middle.max_by(|a, b| best(a).total_cmp(&best(b))).map_or(vec![], |set| set.into_values().rev().collect())
}

/// The spans of the middle layer of a row's way; none where three layers cannot be built.
fn of(case: &Case, row: &Row) -> Result<Vec<BlockSpan>> {
    let short = case.with_layers(LAYERS);
    let point = Point::of_row(row);
    let one = Point { global_batch: u64::from(point.par.dp) * point.micro_batch, ..point };
    let plan = match short.plan(&one) {
        Err(Error::Infeasible(_)) => return Ok(vec![]),
        other => other?,
    };
    let timeline = cost(&plan, short.machine(), Effort { fold: true, stride: false, spans: true })?;
    Ok(MIDDLE.iter().flat_map(|(pass, calls)| pass_of(row, &timeline, pass, calls)).collect())
}

fn pass_of(row: &Row, timeline: &Timeline, pass: &'static str, calls: &[&str]) -> Vec<BlockSpan> {
    let lane = |span: &Span| timeline.lanes[span.lane as usize].clone();
    let part = |span: &&Span| calls.iter().any(|call| span.path.contains(call));
    let spans: Vec<&Span> = timeline.classes[0].spans.iter().filter(part).collect();
    let kernels = spans.iter().filter(|s| lane(s).starts_with("compute"));
    let first = kernels.map(|s| s.start.value()).fold(f64::INFINITY, f64::min);
    let block_span = |span: &&Span| BlockSpan {
        way: row.way(),
        seq_len: row.seq_len,
        ranks: row.ulysses * row.ring,
        recompute: row.recompute.clone(),
        pass,
        lane: lane(span),
        what: span.what,
        op: span.path.rsplit('/').next().unwrap_or(&span.path).to_string(),
        start_s: span.start.value() - first,
        end_s: span.end.value() - first,
    };
    spans.iter().map(block_span).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::LlmSpec;

    fn row(seq_len: u64, (ulysses, ring): (u32, u32), mfu: f64) -> Row {
        Row {
            seq_len,
            ulysses,
            ring,
            tp: 1,
            pp: 1,
            dp: 8 / (ulysses * ring),
            ep: 1,
            vp: 1,
            global_batch: 8,
            micro_batch: 1,
            zero: 1,
            mfu: Some(mfu),
            feasible: true,
            options: "default".into(),
            recompute: "none".into(),
            ..Row::default()
        }
    }

    #[test]
    fn ways_of_one_degree_are_compared() {
        let rows =
            [row(8, (4, 1), 0.5), row(8, (1, 4), 0.4), row(8, (2, 2), 0.3), row(8, (8, 1), 0.6), row(16, (1, 8), 0.9)];
        let chosen: Vec<_> = comparable(&rows).iter().map(|r| (r.ulysses, r.ring)).collect();
        assert_eq!(chosen, [(2, 2), (4, 1), (1, 4)]);
        assert!(comparable(&rows[3..]).is_empty());
    }

    #[test]
    fn a_layer_has_both_passes_and_its_transfers() {
        let llama = LlmSpec::find("llama-3-8b").unwrap();
        let windowed = (0..llama.layers).map(|layer| layer % 6 != 5).collect();
        let gemma = LlmSpec { window: Some(1024), windowed, ..llama.clone() };
        // Of a hybrid a layer with attention.
        let hybrid = LlmSpec::find("nemotron-h-8b").unwrap();
        for (model, zero) in
            [(&llama, 1), (&gemma, 1), (&llama, 2), (&llama, 3), (&gemma, 3), (&hybrid, 1), (&hybrid, 3)]
        {
            let case = Case::new(model.clone(), "dgx-h100", "nccl-fa3", 8, None).unwrap();
            let spans = of(&case, &Row { zero, ..row(65_536, (1, 8), 0.5) }).unwrap();
            let of_pass = |pass: &str, what: &str| spans.iter().filter(|s| s.pass == pass && s.what == what).count();
            assert_eq!((of_pass("fwd", "attention"), of_pass("bwd", "attention_bwd")), (8, 8), "zero {zero}");
            assert!(
                spans.iter().any(|s| s.lane.contains("cp") && s.pass == "fwd")
                    && spans.iter().all(|s| s.end_s >= s.start_s)
            );
        }
    }
}
