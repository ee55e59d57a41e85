//! One error type. The message names the file, the field, the value and the remedy.

pub mod json;
mod reason;
pub mod text;

pub use reason::{Cause, Reason};
use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What the user wrote cannot be read as what it should be.
    #[error("{file}: {field}: {why}")]
    Spec { file: String, field: String, why: String },
    /// A configuration that is well formed but cannot run. A row of a sweep, not a failure.
    #[error("infeasible: {0}")]
    Infeasible(Reason),
    /// A plan that breaks its own rules: unmatched legs, a cycle, shapes that disagree.
    #[error("the plan is not sound: {0}")]
    Plan(String),
    /// An op that failed or hung while it ran.
    #[error("{op}: {why}")]
    Device { op: String, why: String },
    #[error("{path}: {source}; {}", remedy(source))]
    Io { path: PathBuf, source: std::io::Error },
}

/// What to do about a file that cannot be read or written.
fn remedy(source: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match source.kind() {
        ErrorKind::NotFound => "correct the path",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "choose a place that you may read and write",
        ErrorKind::IsADirectory => "that is a folder, give a file",
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => "a part of the path is a file, give a folder",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room there",
        ErrorKind::InvalidData => "write it as UTF-8 text",
        _ => "choose another path",
    }
}

impl Error {
    pub fn spec(file: impl ToString, field: impl ToString, why: impl ToString) -> Error {
        Error::Spec { file: file.to_string(), field: field.to_string(), why: why.to_string() }
    }

    /// A word of `--options` that cannot be had here; it begins the sentence.
    pub fn option(word: &'static str, rest: impl std::fmt::Display) -> Error {
        Error::Infeasible(Reason { word: Some(word), ..Reason::new(Cause::Options, format!("{word} {rest}")) })
    }

    pub fn plan(why: impl ToString) -> Error {
        Error::Plan(why.to_string())
    }

    pub fn device(op: impl ToString, why: impl ToString) -> Error {
        Error::Device { op: op.to_string(), why: why.to_string() }
    }

    /// The same with something more to say.
    pub fn and(self, more: impl std::fmt::Display) -> Error {
        let with = |why: String| format!("{why}; {more}");
        match self {
            Error::Spec { file, field, why } => Error::Spec { file, field, why: with(why) },
            Error::Infeasible(why) => Error::Infeasible(why.and(more)),
            Error::Plan(why) => Error::Plan(with(why)),
            Error::Device { op, why } => Error::Device { op, why: with(why) },
            Error::Io { path, source } => {
                Error::Io { path, source: std::io::Error::new(source.kind(), with(source.to_string())) }
            }
        }
    }

    pub fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.as_ref().to_path_buf();
        move |source| Error::Io { path, source }
    }

    /// Turns a serde_json error into one that names the file and, where the message has it, the field.
    pub fn json(file: impl ToString) -> impl FnOnce(serde_json::Error) -> Error {
        let file = file.to_string();
        move |e| {
            let why = match e.classify() {
                serde_json::error::Category::Eof => {
                    format!("the file ends early ({e}); it may have been cut off while it was written")
                }
                serde_json::error::Category::Syntax => format!("not valid JSON ({e})"),
                _ => e.to_string(),
            };
            // A value that was already parsed has no position.
            let at = if e.line() == 0 { "contents".into() } else { format!("line {} column {}", e.line(), e.column()) };
            Error::spec(file, at, why)
        }
    }
}
