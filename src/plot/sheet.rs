//! A CSV file by the names of its columns, with errors that name file, column, line and remedy.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::error::{Error, Result};

/// All of a file.
pub struct Sheet {
    path: PathBuf,
    columns: HashMap<String, usize>,
    records: Vec<csv::StringRecord>,
}

impl Sheet {
    /// Reads a file that has at least one row.
    pub fn read(path: &Path) -> Result<Sheet> {
        let mut csv = csv::Reader::from_reader(File::open(path).map_err(Error::io(path))?);
        let broken =
            |e: csv::Error| Error::spec(path.display(), "rows", format!("not a CSV file: {e}; run the sweep again"));
        let columns = csv.headers().map_err(broken)?.iter().map(str::to_string).zip(0..).collect();
        let records = csv.records().map(|r| r.map_err(broken)).collect::<Result<Vec<_>>>()?;
        if records.is_empty() {
            return Err(Error::spec(path.display(), "rows", "there are 0 rows; run the sweep again"));
        }
        Ok(Sheet { path: path.to_path_buf(), columns, records })
    }

    pub fn has(&self, column: &str) -> bool {
        self.columns.contains_key(column)
    }

    pub fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        // Line 1 is the header.
        self.records.iter().zip(2..).map(|(record, number)| Line { sheet: self, number, record })
    }
}

/// A record with what an error about it has to name.
pub struct Line<'a> {
    sheet: &'a Sheet,
    number: usize,
    record: &'a csv::StringRecord,
}

impl Line<'_> {
    pub fn text(&self, column: &str) -> Result<&str> {
        let columns = &self.sheet.columns;
        let found = columns.get(column).and_then(|&i| self.record.get(i));
        found.map(str::trim).ok_or_else(|| {
            let mut known: Vec<&str> = columns.keys().map(String::as_str).collect();
            known.sort_unstable();
            let why = format!("the column is missing; there are: {}. Run the sweep again", known.join(", "));
            Error::spec(self.sheet.path.display(), column, why)
        })
    }

    pub fn value<T: FromStr>(&self, column: &str, want: &str, valid: impl Fn(&T) -> bool) -> Result<T> {
        let text = self.text(column)?;
        text.parse().ok().filter(valid).ok_or_else(|| {
            let why = format!("line {} has {text:?}, not {want}; correct it or run the sweep again", self.number);
            Error::spec(self.sheet.path.display(), column, why)
        })
    }

    /// None where the field is empty.
    pub fn maybe<T: FromStr>(&self, column: &str, want: &str, valid: impl Fn(&T) -> bool) -> Result<Option<T>> {
        if self.text(column)?.is_empty() { Ok(None) } else { self.value(column, want, valid).map(Some) }
    }
}
