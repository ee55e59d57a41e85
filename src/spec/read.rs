//! Files of our own format, and what is wrong with them in the words of whoever writes one.

use super::Found;
use crate::error::{Error, Result, json};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::error::Category;

/// Reads one of our own files: unknown keys are refused, and the error names the field.
pub fn read<T: DeserializeOwned>(found: &Found) -> Result<T> {
    json::stated_once(&found.file, &found.text)?;
    serde_json::from_str(&found.text).map_err(|e| {
        // The reader of a word takes anything else for bad JSON.
        let is_json = || serde_json::from_str::<IgnoredAny>(&found.text).is_ok();
        let why = match e.classify() {
            Category::Data => in_words(&e.to_string()),
            Category::Syntax if is_json() => {
                format!("no word, which this field wants, in quotes, at line {} column {}", e.line(), e.column())
            }
            _ => return Error::json(&found.file)(e),
        };
        let field = path_at(&found.text, e.line(), e.column());
        // What is missing is noticed at the end of what it should be in, whose last field is not at fault.
        let missing = why.starts_with("missing field");
        let field = if missing { within(&field) } else { field };
        // The place is named by its path; line and column stay for an editor.
        Error::spec(&found.file, field, why)
    })
}

/// A message of the reader without the names of its types.
fn in_words(said: &str) -> String {
    const NUMBERED: &str = "expected an object with value, source and provenance";
    let mut said = said.replace("expected struct Sourced", NUMBERED);
    for (its, ours) in [("f64", "a number"), ("u32", "a whole number"), ("u64", "a whole number")] {
        said = said.replace(&format!("expected {its}"), &format!("expected {ours}"));
    }
    match said.split_once("expected struct ") {
        Some((before, after)) => {
            let rest = after.trim_start_matches(|c: char| c.is_alphanumeric());
            format!("{before}expected an object with fields{rest}")
        }
        None => said,
    }
}

/// The path of what a field is in.
fn within(path: &str) -> String {
    path.rsplit_once('.').map_or("the file".into(), |(outer, _)| outer.into())
}

/// A step on the way into a JSON text.
enum Step {
    Key(String),
    Item(usize),
}

/// The path of keys and of items of lists that leads to a place in a JSON text: `causes[2].count`.
fn path_at(text: &str, line: usize, column: usize) -> String {
    let before: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    let upto = &text.as_bytes()[..(before + column).min(text.len())];
    let (mut path, mut i, mut is_key) = (vec![], 0, true);
    while i < upto.len() {
        match upto[i] {
            b'"' => {
                let end = json::end_of_string(upto, i + 1);
                if let (Some(Step::Key(key)), true) = (path.last_mut(), is_key) {
                    *key = String::from_utf8_lossy(&upto[i + 1..end]).into_owned();
                }
                i = end;
            }
            b':' => is_key = false,
            b',' => {
                is_key = true;
                if let Some(Step::Item(at)) = path.last_mut() {
                    *at += 1;
                }
            }
            b'{' => {
                is_key = true;
                path.push(Step::Key(String::new()));
            }
            b'[' => path.push(Step::Item(0)),
            b'}' | b']' if i + 1 < upto.len() => drop(path.pop()),
            _ => {}
        }
        i += 1;
    }
    let mut said = String::new();
    for step in path {
        match step {
            Step::Key(key) if key.is_empty() => {}
            Step::Key(key) if said.is_empty() => said = key,
            Step::Key(key) => said += &format!(".{key}"),
            Step::Item(at) => said += &format!("[{at}]"),
        }
    }
    if said.is_empty() { "the file".into() } else { said }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{FleetSpec, GpuSpec, find};

    #[test]
    fn errors_name_file_and_field() {
        let text = find("gpu", "h100-sxm5").unwrap().text;
        let load = |text: String| read::<GpuSpec>(&Found { file: "x.json".into(), text }).unwrap_err().to_string();
        let err = load(text.replace("\"3.35 TB/s\"", "3350"));
        assert!(err.starts_with("x.json: memory_bandwidth.value: ") && err.contains("\"450 GB/s\""), "{err}");
        let err = load(text.replace("\"sms\"", "\"smss\""));
        assert!(err.starts_with("x.json: smss: ") && err.contains("unknown field `smss`"), "{err}");
        let err = load(text[..text.len() / 2].to_string());
        assert!(err.contains("ends early"), "{err}");
    }

    #[test]
    fn what_is_wrong_is_said_without_names_of_types() {
        let text = find("fleet", "llama-3-405b").unwrap().text;
        let load = |text: String| read::<FleetSpec>(&Found { file: "x.json".into(), text }).unwrap_err().to_string();
        let causes = text.find("\"causes\"").unwrap();
        let second = causes + text[causes..].match_indices("\"count\": ").nth(1).unwrap().0;
        let err = load(format!("{}\"count\": \"many\", \"x\": {}", &text[..second], &text[second + 9..]));
        assert!(err.starts_with("x.json: causes[1].count: ") && err.contains("expected a number"), "{err}");
        let at = text.find("\"provenance\": ").unwrap();
        let end = at + text[at..].find(['}', ',']).unwrap();
        let err = load(format!("{}\"provenance\": 3{}", &text[..at], &text[end..]));
        assert!(err.contains(".provenance: no word") && !err.contains("valid JSON"), "{err}");
        let err = load(text.replacen("\"node_days\": {", "\"node_days\": 3, \"other\": {", 1));
        assert!(err.contains("node_days: ") && err.contains("an object with value, source and provenance"), "{err}");
    }
}
