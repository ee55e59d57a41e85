//! Text files of users, read whole: up to a size that no honest one has, whatever the path leads to, and without the mark that editors
//! of Windows begin a file with.

use super::{Error, Result};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// What is written down: of a model, a machine, a study, a list of faults or of cases.
///
/// # Errors
/// [`Error::Io`] for a file that cannot be read or is no UTF-8, [`Error::Spec`] for one of more than 256 MiB.
pub fn spec(path: impl AsRef<Path>) -> Result<String> {
    up_to(path.as_ref(), 256 << 20)
}

/// What programs write: plans, profiles, checkpoints' indices, token ids, logs of routers and libraries.
///
/// # Errors
/// Those of [`spec`], for one of more than 1 GiB.
pub fn data(path: impl AsRef<Path>) -> Result<String> {
    up_to(path.as_ref(), 1 << 30)
}

/// Devices have no size to ask for, and some no end: what is too much is noticed as it is read.
fn up_to(path: &Path, most: u64) -> Result<String> {
    let mut bytes = vec![];
    let file = File::open(path).map_err(Error::io(path))?;
    file.take(most + 1).read_to_end(&mut bytes).map_err(Error::io(path))?;
    if bytes.len() as u64 > most {
        let why = format!(
            "more than the {} MiB that are read of such a file; give another path, or a smaller file",
            most >> 20
        );
        return Err(Error::spec(path.display(), "size", why));
    }
    let no_text = |_| io::Error::new(io::ErrorKind::InvalidData, "stream did not contain valid UTF-8");
    let mut text = String::from_utf8(bytes).map_err(no_text).map_err(Error::io(path))?;
    if text.starts_with('\u{feff}') {
        text.remove(0);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_up_to_a_size_and_without_an_editors_mark() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let read = |bytes: &[u8], most| {
            std::fs::write(&path, bytes).unwrap();
            up_to(&path, most).map_err(|e| e.to_string())
        };
        assert_eq!(read("\u{feff}a\u{feff}b".as_bytes(), 8), Ok("a\u{feff}b".into()));
        assert_eq!(read(b"", 0), Ok("".into()));
        // Cut off inside a letter it is too long, and not no text.
        let long = read("aä".as_bytes(), 2).unwrap_err();
        assert!(long.contains("file: size: more than the 0 MiB"), "{long}");
        assert!(read(b"\xff", 8).unwrap_err().ends_with("valid UTF-8; write it as UTF-8 text"));
        assert!(up_to(&dir.path().join("none"), 8).unwrap_err().to_string().ends_with("correct the path"));
        #[cfg(unix)]
        assert!(up_to(Path::new("/dev/zero"), 1 << 20).unwrap_err().to_string().contains("the 1 MiB"));
    }
}
