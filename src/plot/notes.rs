//! What the study.json beside a rows.csv adds to a picture: words that rows do not have.

use std::path::Path;

use super::sheet::Sheet;
use crate::error::{Result, json, text};

/// Top-level fields; none where there is no file.
pub struct Notes {
    fields: serde_json::Value,
    /// Rows that are there, of those that the study asks for, where some are missing.
    unfinished: Option<[u64; 2]>,
}

impl Notes {
    /// Nothing is noted.
    pub fn none() -> Notes {
        Notes { fields: serde_json::Value::Null, unfinished: None }
    }

    /// Of the study that `rows_csv` belongs to.
    pub fn beside(rows_csv: &Path) -> Result<Notes> {
        let path = rows_csv.with_file_name("study.json");
        if !path.exists() {
            return Ok(Notes::none());
        }
        let text = text::spec(&path)?;
        let mut notes = Notes { fields: json::parse(path.display(), &text)?, ..Notes::none() };
        if let Some(points) = notes.number("points") {
            let rows = Sheet::read(rows_csv)?.lines().count() as u64;
            notes.unfinished = (rows < points).then_some([rows, points]);
        }
        Ok(notes)
    }

    /// What a picture of a study that was stopped has to say, as what is best so far may not be the best.
    pub fn unfinished(&self) -> Option<String> {
        let said = |[rows, points]: [u64; 2]| format!("STOPPED: only {rows} of {points} rows are there");
        self.unfinished.map(said)
    }

    pub fn has(&self, field: &str) -> bool {
        self.fields.get(field).is_some()
    }

    pub fn text(&self, field: &str) -> Option<String> {
        self.fields.get(field).and_then(|v| v.as_str()).map(str::to_string)
    }

    /// A number in an object.
    pub fn within(&self, object: &str, field: &str) -> Option<u64> {
        self.fields.get(object)?.get(field)?.as_u64()
    }

    pub fn number(&self, field: &str) -> Option<u64> {
        self.fields.get(field).and_then(|v| v.as_u64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_study_that_was_stopped_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let rows = dir.path().join("rows.csv");
        std::fs::write(&rows, "a\n1\n2\n").unwrap();
        let said = |study: &str| {
            std::fs::write(dir.path().join("study.json"), study).unwrap();
            Notes::beside(&rows).unwrap().unfinished()
        };
        assert_eq!(said(r#"{"points": 3}"#).unwrap(), "STOPPED: only 2 of 3 rows are there");
        assert_eq!([r#"{"points": 2}"#, "{}"].map(said), [None, None]);
    }
}
