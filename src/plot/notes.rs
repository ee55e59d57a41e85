//! What the study.json beside a rows.csv adds to a picture: words that rows do not have.

use std::path::Path;

use crate::error::{Error, Result, json};

/// Top-level fields; none where there is no file.
pub struct Notes(serde_json::Value);

impl Notes {
    /// Nothing is noted.
    pub fn none() -> Notes {
        Notes(serde_json::Value::Null)
    }

    /// Of the study that `rows_csv` belongs to.
    pub fn beside(rows_csv: &Path) -> Result<Notes> {
        let path = rows_csv.with_file_name("study.json");
        if !path.exists() {
            return Ok(Notes::none());
        }
        let text = std::fs::read_to_string(&path).map_err(Error::io(&path))?;
        json::parse(path.display(), &text).map(Notes)
    }

    pub fn has(&self, field: &str) -> bool {
        self.0.get(field).is_some()
    }

    pub fn text(&self, field: &str) -> Option<String> {
        self.0.get(field).and_then(|v| v.as_str()).map(str::to_string)
    }

    /// A number in an object.
    pub fn within(&self, object: &str, field: &str) -> Option<u64> {
        self.0.get(object)?.get(field)?.as_u64()
    }

    pub fn number(&self, field: &str) -> Option<u64> {
        self.0.get(field).and_then(|v| v.as_u64())
    }
}
