//! Documents that sequences are packed with.

use super::value::count;
use crate::error::text;
use crate::spec::Documents;
use clap::Args;

#[derive(Args, Debug, Clone, Default, PartialEq)]
pub struct Packing {
    /// Lengths of documents packed into each sequence until it is full, e.g. 2K,6K or 8x1K, or a file of them [default: one]
    #[arg(long, value_name = "N,..", value_parser = documents)]
    pub documents: Option<Documents>,
}

/// Lengths joined by commas, as `8x4K` eight of them, or a file with lengths between commas, blanks or lines.
pub fn documents(text: &str) -> std::result::Result<Documents, String> {
    let wrong = |why: String| format!("{why}; write lengths as in 4096,8K or 8x4K, or the path of a file of them");
    let is_list = text.starts_with(|c: char| c.is_ascii_digit());
    let read = || text::spec(text).map_err(|e| wrong(e.to_string()));
    let text = if is_list { text.to_string() } else { read()? };
    let mut lengths: Vec<u64> = vec![];
    for word in text.split([',', ' ', '\n', '\t', '\r']).filter(|word| !word.is_empty()) {
        let (times, length) = word.split_once('x').unwrap_or(("1", word));
        let times = times.parse().ok().filter(|times| (1..=MOST_DOCUMENTS).contains(times));
        let (Some(times), Ok(length)) = (times, count(length)) else {
            return Err(wrong(format!("{word:?} is no length")));
        };
        lengths.extend(std::iter::repeat_n(length, times));
    }
    Ok(lengths.into())
}

/// More are not said to be alike.
const MOST_DOCUMENTS: usize = 1 << 20;
