//! The folder of a study: study.json says what was asked, rows.csv what was found.

use super::Point;
use crate::error::{Error, Result, json, text};
use crate::report::Row;
use serde::Serialize;
use serde_json::Value;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Of the folder's format: a study of another version is not gone on with.
const VERSION: u32 = 1;

#[derive(Serialize)]
struct StudyFile<'q, Q> {
    foretrain_study: u32,
    #[serde(flatten)]
    question: &'q Q,
    /// Rows that it will have, where that is known before: whoever reads the folder can tell whether it was stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    points: Option<usize>,
}

/// Rows as they come, each flushed before the next.
pub struct Store {
    study: PathBuf,
    path: PathBuf,
    rows: Vec<Row>,
    file: File,
    /// Held as long as the store: nobody else writes here.
    _ours: Option<File>,
}

impl Store {
    /// Opens the folder of a question, making it if need be, and reads the rows it has; a torn last line is dropped.
    /// `points`: rows that the study will have, if that is known. Errors, unless it is to start afresh: another study, or a
    /// rows.csv that is of none.
    pub fn open(question: &impl Serialize, points: Option<usize>, dir: &Path, fresh: bool) -> Result<Store> {
        fs::create_dir_all(dir).map_err(Error::io(dir))?;
        let ours = lock(dir)?;
        let (study, path) = (dir.join("study.json"), dir.join("rows.csv"));
        let asked = StudyFile { foretrain_study: VERSION, question, points };
        let asked = serde_json::to_value(&asked).expect("a question is plain data");
        let rows = match (fresh, study.exists()) {
            (true, _) => vec![],
            (false, true) => {
                same_study(&study, &asked)?;
                read(&path)?
            }
            (false, false) => {
                no_rows(&path)?;
                vec![]
            }
        };
        // The rows first: if this is interrupted, no study claims rows of another.
        let file = rewrite(&path, &rows)?;
        replace(&study, by_lines(&asked).as_bytes())?;
        Ok(Store { study, path, rows, file, _ours: ours })
    }

    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Forgets every row.
    pub fn clear(&mut self) -> Result<()> {
        self.rows.clear();
        self.file = rewrite(&self.path, &[])?;
        Ok(())
    }

    /// `written`: the row as [`written`] has it, so that whoever waits for the store waits for the file alone.
    pub fn append(&mut self, row: Row, written: &[u8]) -> Result<()> {
        // One write: a kill tears the last line at most.
        self.file.write_all(written).map_err(Error::io(&self.path))?;
        self.rows.push(row);
        Ok(())
    }

    /// Makes room for so many rows at once: they are a large study's memory, and growing would hold them twice.
    pub fn expect(&mut self, more: usize) {
        self.rows.reserve_exact(more);
    }

    /// Sorts the rows as `points` are and writes them anew. Of a point that was written twice the later row holds.
    pub fn finish(self, points: &[Point]) -> Result<(Vec<Row>, Vec<PathBuf>)> {
        let mut places: Vec<usize> = (0..points.len()).collect();
        places.sort_unstable_by_key(|&at| &points[at]);
        let place = |row: &Row| {
            let point = Point::of_row(row);
            places.binary_search_by(|&at| points[at].cmp(&point)).ok().map(|found| places[found])
        };
        let mut rows = self.rows;
        rows.retain(|row| place(row).is_some());
        rows.reverse();
        rows.sort_by_cached_key(place);
        rows.dedup_by_key(|row| Point::of_row(row));
        rewrite(&self.path, &rows)?;
        Ok((rows, vec![self.study, self.path]))
    }
}

/// Takes the folder for this sweep; the system gives it free when the program ends, however it does. None where the file
/// system knows no locks.
fn lock(dir: &Path) -> Result<Option<File>> {
    let Ok(folder) = File::open(dir) else { return Ok(None) };
    match folder.try_lock() {
        Ok(()) => Ok(Some(folder)),
        Err(TryLockError::WouldBlock) => {
            let why = "another sweep is writing into it; wait until it has ended, or choose another --out";
            Err(Error::spec(dir.display(), "the folder", why))
        }
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

/// JSON with a line for each field.
fn by_lines(study: &Value) -> String {
    let fields = study.as_object().into_iter().flatten();
    let lines: Vec<String> = fields.map(|(name, value)| format!("  \"{name}\": {value}")).collect();
    format!("{{\n{}\n}}\n", lines.join(",\n"))
}

/// Characters of a value that are said of it.
const LONGEST: usize = 60;

fn shortened(text: &str) -> String {
    match text.chars().count() > LONGEST {
        true => text.chars().take(LONGEST).chain("..".chars()).collect(),
        false => text.into(),
    }
}

/// An error unless the folder's study is the one asked for. Names every field that differs.
fn same_study(path: &Path, asked: &Value) -> Result<()> {
    let text = text::spec(path)?;
    let name = path.display();
    let there: Value = json::parse(&name, &text)?;
    let (Some(old), Some(new)) = (there.as_object(), asked.as_object()) else {
        return Err(Error::spec(name, "the file", "not a study; choose another --out, or start anew with --fresh"));
    };
    let keys: std::collections::BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let show = |v: Option<&Value>| shortened(&v.map_or("nothing".into(), Value::to_string));
    let differ: Vec<String> = keys
        .into_iter()
        .filter(|k| old.get(*k) != new.get(*k))
        .map(|k| format!("{k} is {} there, {} was asked for", show(old.get(k)), show(new.get(k))))
        .collect();
    if differ.is_empty() {
        return Ok(());
    }
    let why = format!("{}; choose another --out, or start anew with --fresh", differ.join("; "));
    Err(Error::spec(name, "the folder has another study", why))
}

/// What a file has; nothing if it is not there.
fn contents(path: &Path) -> Result<Vec<u8>> {
    match fs::read(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(vec![]),
        read => read.map_err(Error::io(path)),
    }
}

/// An error if there are rows, which without a study.json are somebody else's. The names of the columns may stand there: they
/// are written before it.
fn no_rows(path: &Path) -> Result<()> {
    match names().starts_with(&contents(path)?) {
        true => Ok(()),
        false => Err(not_ours(path, "no study.json stands beside it".into())),
    }
}

/// A file that must not be written over.
fn not_ours(path: &Path, why: String) -> Error {
    let remedy = "choose another --out, move the file away, or give it up with --fresh";
    Error::spec(path.display(), "not of this study", format!("{why}; {remedy}"))
}

/// An error unless the first line has the names of the columns. Of a file with no whole line it may be torn.
fn has_columns(path: &Path, bytes: &[u8]) -> Result<()> {
    let (names, end) = (names(), bytes.iter().position(|b| *b == b'\n'));
    let ours = match end {
        Some(end) => bytes[..end].trim_ascii_end() == names.trim_ascii_end(),
        None => names.starts_with(bytes),
    };
    if ours {
        return Ok(());
    }
    let line = String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]);
    Err(not_ours(path, format!("its columns are other ones: {}", shortened(line.trim_end()))))
}

/// The rows of a file. What follows the last line end was torn and is left out.
fn read(path: &Path) -> Result<Vec<Row>> {
    let bytes = contents(path)?;
    has_columns(path, &bytes)?;
    let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |end| end + 1);
    let mut csv = csv::Reader::from_reader(&bytes[..whole]);
    let broken = |e: csv::Error| {
        let why = format!("{e}; the file was damaged or is of another version: start anew with --fresh");
        Error::spec(path.display(), "rows", why)
    };
    csv.deserialize().map(|row| row.map_err(broken)).collect()
}

/// Writes all rows and returns the file, open at its end.
fn rewrite(path: &Path, rows: &[Row]) -> Result<File> {
    let temporary = path.with_extension("tmp");
    let mut file = BufWriter::new(File::create(&temporary).map_err(Error::io(&temporary))?);
    file.write_all(&names()).map_err(Error::io(&temporary))?;
    let mut csv = csv::WriterBuilder::new().has_headers(false).from_writer(file);
    for row in rows {
        csv.serialize(row).map_err(|e| Error::io(&temporary)(e.into()))?;
    }
    csv.flush().map_err(Error::io(&temporary))?;
    drop(csv);
    fs::rename(&temporary, path).map_err(Error::io(path))?;
    OpenOptions::new().append(true).open(path).map_err(Error::io(path))
}

/// Puts a whole file in the place of another: nobody ever sees half of it.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, bytes).map_err(Error::io(&temporary))?;
    fs::rename(&temporary, path).map_err(Error::io(path))
}

/// A row as a line of CSV.
pub fn written(row: &Row) -> Vec<u8> {
    let mut csv = csv::WriterBuilder::new().has_headers(false).buffer_capacity(1024).from_writer(vec![]);
    csv.serialize(row).expect("a row is plain data");
    csv.into_inner().expect("written to memory")
}

/// The line of the column names.
pub fn names() -> Vec<u8> {
    let mut csv = csv::Writer::from_writer(vec![]);
    csv.serialize(Row::default()).expect("a row is plain data");
    let mut bytes = csv.into_inner().expect("written to memory");
    let end = bytes.iter().position(|b| *b == b'\n').map_or(bytes.len(), |at| at + 1);
    bytes.truncate(end);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes `rows` into a folder, and what opening it as a study says then; `known`: it has a study.json of the same question.
    fn opened(rows: &[u8], known: bool, fresh: bool) -> (std::result::Result<usize, String>, Vec<u8>) {
        let question = std::collections::BTreeMap::from([("what", "a question")]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.csv");
        if known {
            drop(Store::open(&question, None, dir.path(), false).unwrap());
        }
        fs::write(&path, rows).unwrap();
        let store = Store::open(&question, None, dir.path(), fresh);
        let said = store.map(|store| store.rows().len()).map_err(|e| e.to_string());
        (said, fs::read(&path).unwrap())
    }

    #[test]
    fn rows_that_are_of_no_study_are_not_written_over() {
        let log = b"step,loss\n1,5.9\n".as_slice();
        let of_a_study = [names(), written(&Row::default())].concat();
        for (rows, known, part) in [
            (log, false, "rows.csv: not of this study: no study.json stands beside it; choose another --out, move "),
            (&of_a_study[..], false, "no study.json stands beside it"),
            (log, true, "its columns are other ones: step,loss; choose another --out, move the file away, or "),
            // The names alone of other columns, too, and a file without a whole line.
            (b"step,loss\n", true, "its columns are other ones: step,loss; "),
            (b"notes", true, "its columns are other ones: notes; "),
        ] {
            let (said, left) = opened(rows, known, false);
            assert!(said.as_ref().is_err_and(|why| why.contains(part) && why.contains("--fresh")), "{said:?}");
            assert!(left == rows, "{part}");
            assert_eq!(opened(rows, known, true), (Ok(0), names()), "{part}");
        }
    }

    /// The names of the columns are written before study.json, and a kill may come in between.
    #[test]
    fn what_an_interruption_leaves_is_gone_on_with() {
        let names = names();
        let row = [&names[..], &written(&Row::default())].concat();
        for (rows, known, count) in [
            (&names[..], false, 0),
            (b"", false, 0),
            (&names[..10], true, 0),
            (b"", true, 0),
            (&row[..], true, 1),
            (&row[..row.len() - 1], true, 0),
            // As an editor of Windows ends lines.
            (&[names.trim_ascii_end(), b"\r\n"].concat()[..], true, 0),
        ] {
            let (said, _) = opened(rows, known, false);
            assert_eq!(said, Ok(count), "{}", String::from_utf8_lossy(rows));
        }
    }
}
