//! The rows of a study, as far as pictures need them.

use std::collections::HashMap;
use std::path::Path;
use std::str::FromStr;

use crate::error::{Error, Result};

/// One configuration of a sweep. The names are those of the columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub model: String,
    pub cluster: String,
    pub stack: String,
    pub gpus: u64,
    pub seq_len: u64,
    pub global_batch: u64,
    pub ulysses: u32,
    pub ring: u32,
    pub zero: u32,
    pub strategy: String,
    pub recompute: String,
    /// The MFU in 0..=1, or why there is none.
    pub mfu: std::result::Result<f64, String>,
}

/// Reads a rows.csv. Columns that no picture needs may be missing.
pub fn read(path: &Path) -> Result<Vec<Row>> {
    let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
    let mut csv = csv::Reader::from_reader(text.as_bytes());
    let broken =
        |e: csv::Error| Error::spec(path.display(), "rows", format!("not a CSV file: {e}; run the sweep again"));
    let columns: HashMap<String, usize> = csv.headers().map_err(broken)?.iter().map(str::to_string).zip(0..).collect();
    let mut rows = Vec::new();
    for (i, record) in csv.records().enumerate() {
        let record = record.map_err(broken)?;
        // Line 1 is the header.
        rows.push(Line { path, number: i + 2, columns: &columns, record: &record }.row()?);
    }
    if rows.is_empty() {
        return Err(Error::spec(path.display(), "rows", "there are 0 rows; run the sweep again"));
    }
    Ok(rows)
}

/// A record with what an error about it has to name.
struct Line<'a> {
    path: &'a Path,
    number: usize,
    columns: &'a HashMap<String, usize>,
    record: &'a csv::StringRecord,
}

impl Line<'_> {
    fn row(&self) -> Result<Row> {
        Ok(Row {
            model: self.text("model")?.into(),
            cluster: self.text("cluster")?.into(),
            stack: self.text("stack")?.into(),
            gpus: self.value("gpus", "a count of GPUs of at least 1", |&n: &u64| n > 0)?,
            seq_len: self.value("seq_len", "a count of tokens of at least 1", |&n: &u64| n > 0)?,
            global_batch: self.value("global_batch", "a count of sequences of at least 1", |&n: &u64| n > 0)?,
            ulysses: self.value("ulysses", "a degree of at least 1", |&n: &u32| n > 0)?,
            ring: self.value("ring", "a degree of at least 1", |&n: &u32| n > 0)?,
            zero: self.value("zero", "a ZeRO stage of 0..=3", |&n: &u32| n <= 3)?,
            strategy: self.text("strategy")?.into(),
            recompute: self.text("recompute")?.into(),
            mfu: self.mfu()?,
        })
    }

    fn mfu(&self) -> Result<std::result::Result<f64, String>> {
        let ratio = |mfu: &f64| (0.0..=1.0).contains(mfu);
        if self.value("feasible", "true or false", |_: &bool| true)? {
            self.value("mfu", "a ratio in 0..=1 where feasible is true", ratio).map(Ok)
        } else {
            // Error::Infeasible puts the word before its reason.
            let why = self.text("why")?;
            Ok(Err(why.strip_prefix("infeasible:").unwrap_or(why).trim().to_string()))
        }
    }

    fn text(&self, column: &str) -> Result<&str> {
        let found = self.columns.get(column).and_then(|&i| self.record.get(i));
        found.map(str::trim).ok_or_else(|| {
            let mut known: Vec<&str> = self.columns.keys().map(String::as_str).collect();
            known.sort_unstable();
            let why = format!("the column is missing; there are: {}. Run the sweep again", known.join(", "));
            Error::spec(self.path.display(), column, why)
        })
    }

    fn value<T: FromStr>(&self, column: &str, want: &str, valid: impl Fn(&T) -> bool) -> Result<T> {
        let text = self.text(column)?;
        text.parse().ok().filter(valid).ok_or_else(|| {
            let why = format!("line {} has {text:?}, not {want}; correct it or run the sweep again", self.number);
            Error::spec(self.path.display(), column, why)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str =
        "model,cluster,stack,gpus,seq_len,global_batch,tp,ulysses,ring,zero,recompute,strategy,feasible,why,mfu";
    const GOOD: &str = "m,c,s,64,8192,512,1,8,1,1,none,ulysses,true,,0.5";

    fn read_text(text: &str) -> Result<Vec<Row>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.csv");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    fn message(text: &str) -> String {
        read_text(text).unwrap_err().to_string()
    }

    #[test]
    fn a_row_says_its_mfu_or_why_there_is_none() {
        let bad = GOOD.replace("true,,0.5", "false,\"infeasible: memory: 90 GiB, there are 80\",");
        let rows = read_text(&format!("{HEAD}\n{GOOD}\n{bad}\n")).unwrap();
        assert_eq!(rows[0].mfu, Ok(0.5));
        assert_eq!(rows[1].mfu, Err("memory: 90 GiB, there are 80".into()));
        assert_eq!((rows[0].gpus, rows[0].seq_len, rows[0].ulysses), (64, 8192, 8));
    }

    #[test]
    fn a_missing_column_is_named() {
        for column in HEAD.split(',').filter(|&c| c != "tp" && c != "why") {
            let text = message(&format!("{}\n{GOOD}\n", HEAD.replace(column, "other")));
            assert!(text.contains("rows.csv") && text.contains(&format!("{column}: the column is missing")), "{text}");
        }
    }

    #[test]
    fn a_bad_value_is_named_with_its_line_and_the_remedy() {
        for (good, bad, column) in
            [(",64,", ",many,", "gpus"), ("0.5", "1.5", "mfu"), ("0.5", "NaN", "mfu"), ("true", "yes", "feasible")]
        {
            let text = message(&format!("{HEAD}\n{GOOD}\n{}\n", GOOD.replace(good, bad)));
            let value = bad.trim_matches(',');
            assert!(
                text.contains(&format!("{column}: line 3 has {value:?}")) && text.contains("run the sweep again"),
                "{text}"
            );
        }
    }

    #[test]
    fn empty_and_torn_files_are_errors() {
        assert!(message("").contains("0 rows"));
        assert!(message(&format!("{HEAD}\n")).contains("0 rows"));
        assert!(message(&format!("{HEAD}\nm,c,s\n")).contains("not a CSV file"));
        assert!(matches!(read(Path::new("/nowhere/rows.csv")), Err(Error::Io { .. })));
    }
}
