//! study.json and rows.csv of a map.

use super::{Cell, Question};
use crate::error::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Of the folder's format.
const VERSION: u32 = 1;

/// Columns of a cell itself, then those of either side.
const OF_CELL: [&str; 10] =
    ["links", "gb_per_s", "heads", "kv_heads", "seq_len", "ranks", "winner", "cause", "ulysses_over_ring", "reason"];
const OF_SIDE: [&str; 12] = [
    "time_s",
    "attention_s",
    "copies_s",
    "slowed_s",
    "waits_s",
    "imbalance_s",
    "host_s",
    "sent_bytes",
    "travels_s",
    "peak_mem_bytes",
    "options",
    "why_not",
];

/// Names of the columns of rows.csv.
pub fn columns() -> Vec<String> {
    let of_side = |side: &'static str| OF_SIDE.iter().map(move |name| format!("{side}_{name}"));
    OF_CELL.iter().map(|name| name.to_string()).chain(of_side("ulysses")).chain(of_side("ring")).collect()
}

/// Errors: rows that are of no map, which must not be written over. A map's study.json is written before its rows.
pub fn is_free(dir: &Path) -> Result<()> {
    let rows = dir.join("rows.csv");
    if !rows.exists() || dir.join("study.json").exists() {
        return Ok(());
    }
    let why = "no study.json stands beside it; choose another --out, or move the file away";
    Err(Error::spec(rows.display(), "not of a map", why))
}

pub fn write(question: &Question, cells: &[Cell], dir: &Path) -> Result<Vec<PathBuf>> {
    fs::create_dir_all(dir).map_err(Error::io(dir))?;
    let (study, rows) = (dir.join("study.json"), dir.join("rows.csv"));
    fs::write(&study, by_lines(question)).map_err(Error::io(&study))?;
    fs::write(&rows, table(cells)).map_err(Error::io(&rows))?;
    Ok(vec![study, rows])
}

/// JSON with a line for each field.
fn by_lines(question: &Question) -> String {
    let mut value = serde_json::to_value(question).expect("a question is plain data");
    value["foretrain_crossover"] = VERSION.into();
    let lines = value.as_object().into_iter().flatten().map(|(name, value)| format!("  \"{name}\": {value}"));
    format!("{{\n{}\n}}\n", lines.collect::<Vec<_>>().join(",\n"))
}

fn table(cells: &[Cell]) -> Vec<u8> {
    let mut csv = csv::WriterBuilder::new().has_headers(false).from_writer(vec![]);
    csv.write_record(columns()).expect("written to memory");
    cells.iter().for_each(|cell| csv.serialize(cell).expect("a cell is plain data"));
    csv.into_inner().expect("written to memory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_others_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        assert!(is_free(dir.path()).is_ok() && is_free(&dir.path().join("new")).is_ok());
        fs::write(dir.path().join("rows.csv"), "step,loss\n1,5.9\n").unwrap();
        let why = is_free(dir.path()).unwrap_err().to_string();
        assert!(why.contains("rows.csv: not of a map: no study.json stands beside it; choose another --out"), "{why}");
        fs::write(dir.path().join("study.json"), "{}").unwrap();
        assert!(is_free(dir.path()).is_ok());
    }
}
