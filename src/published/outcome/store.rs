//! The table as a file: rows as they finish, sorted at the end.

use super::verdict::Verdict;
use crate::error::{Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// rows.csv of a folder, while it grows.
pub struct Store {
    path: PathBuf,
    file: Mutex<csv::Writer<File>>,
}

fn failed(path: &Path) -> impl Fn(csv::Error) -> Error + '_ {
    move |e| Error::spec(path.display(), "row", e)
}

impl Store {
    pub fn create(dir: &Path) -> Result<Store> {
        std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
        let path = dir.join("rows.csv");
        let file = File::create(&path).map_err(Error::io(&path))?;
        Ok(Store { path, file: Mutex::new(csv::Writer::from_writer(file)) })
    }

    /// Writes a row at once: whoever stops a long run keeps what is there.
    pub fn append(&self, verdict: &Verdict) -> Result<()> {
        let mut file = self.file.lock().unwrap_or_else(|e| e.into_inner());
        file.serialize(verdict).map_err(failed(&self.path))?;
        file.flush().map_err(Error::io(&self.path))
    }

    /// All rows in the order of the cases, in place of those that came as they came.
    pub fn finish(self, verdicts: &[Verdict]) -> Result<PathBuf> {
        let mut all = csv::Writer::from_writer(Vec::new());
        for verdict in verdicts {
            all.serialize(verdict).map_err(failed(&self.path))?;
        }
        let bytes = all.into_inner().map_err(|e| Error::spec(self.path.display(), "row", e))?;
        let beside = self.path.with_extension("csv.tmp");
        let mut file = File::create(&beside).map_err(Error::io(&beside))?;
        file.write_all(&bytes).map_err(Error::io(&beside))?;
        std::fs::rename(&beside, &self.path).map_err(Error::io(&self.path))?;
        Ok(self.path)
    }
}
