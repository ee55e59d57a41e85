//! Files of our own format, and what is wrong with them in the words of whoever writes one.

use super::{Found, SHIPPED};
use crate::error::{Error, Result, json};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::error::Category;
use serde_json::{Map, Value};

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
        let missing = why.strip_prefix("missing field `").and_then(|rest| rest.split_once('`'));
        // The place is named by its path; line and column stay for an editor.
        match missing {
            Some((name, _)) => {
                let place = within(&field);
                let why = format!("{why}{}", as_shipped(found, &place, name));
                Error::spec(&found.file, place, why)
            }
            None => Error::spec(&found.file, field, why),
        }
    })
}

/// The path of what is in nothing else.
const THE_FILE: &str = "the file";

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
    path.rsplit_once('.').map_or(THE_FILE.into(), |(outer, _)| outer.into())
}

/// The most of a value that is shown as an example.
const SHOWN: usize = 150;

/// What shipped files of this kind have for a field that is missing, and what else all of them have there and this one has
/// not; nothing where none has the field.
fn as_shipped(found: &Found, place: &str, name: &str) -> String {
    let ours = serde_json::from_str(&found.text).unwrap_or(Value::Null);
    let files = SHIPPED.iter().filter(|(kind, ..)| *kind == found.kind);
    let files = files.filter_map(|(_, file, text)| Some((file, serde_json::from_str::<Value>(text).ok()?)));
    let files: Vec<(&&str, Map<String, Value>)> =
        files.filter_map(|(file, value)| Some((file, object_at(&value, place)?.clone()))).collect();
    let Some((file, value)) = files.iter().find_map(|(file, object)| Some((file, object.get(name)?))) else {
        return String::new();
    };
    let shown = value.to_string();
    let value = if shown.len() <= SHOWN { format!(": {shown}") } else { String::new() };
    let lacks = |key: &&String| *key != name && object_at(&ours, place).is_none_or(|object| !object.contains_key(*key));
    let always = |key: &&String| files.iter().all(|(_, object)| object.contains_key(*key));
    let more: Vec<String> = files[0].1.keys().filter(lacks).filter(always).map(|key| format!("`{key}`")).collect();
    let more = match more.is_empty() {
        true => String::new(),
        false => format!("; all that are shipped have {} as well, and this one has not", more.join(", ")),
    };
    format!("; write it as models/{}/{file}.json has it{value}{more}", found.kind)
}

/// The object at a path; of a list the first item stands for all.
fn object_at<'v>(value: &'v Value, path: &str) -> Option<&'v Map<String, Value>> {
    let mut at = value;
    for step in path.split('.').filter(|_| path != THE_FILE) {
        let (key, item) = step.split_once('[').map_or((step, false), |(key, _)| (key, true));
        at = if key.is_empty() { at } else { at.get(key)? };
        at = if item { at.get(0)? } else { at };
    }
    at.as_object()
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
    if said.is_empty() { THE_FILE.into() } else { said }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{FleetSpec, GpuSpec, find};

    #[test]
    fn errors_name_file_and_field() {
        let text = find("gpu", "h100-sxm5").unwrap().text;
        let load = |text: String| {
            read::<GpuSpec>(&Found { kind: "gpu", file: "x.json".into(), text }).unwrap_err().to_string()
        };
        let err = load(text.replace("\"3.35 TB/s\"", "3350"));
        assert!(err.starts_with("x.json: memory_bandwidth.value: ") && err.contains("\"450 GB/s\""), "{err}");
        let err = load(text.replace("\"sms\"", "\"smss\""));
        assert!(err.starts_with("x.json: smss: ") && err.contains("unknown field `smss`"), "{err}");
        let err = load(text[..text.len() / 2].to_string());
        assert!(err.contains("ends early"), "{err}");
    }

    /// Whoever writes a file of his own sees all that it lacks, and how it is written.
    #[test]
    fn what_is_missing_is_as_shipped_files_have_it() {
        let load = |text: &str| read::<GpuSpec>(&Found { kind: "gpu", file: "x.json".into(), text: text.into() });
        let err = load(r#"{"name": "x", "sms": {"value": 1, "source": "mine", "provenance": "assumed"}}"#);
        let err = err.unwrap_err().to_string();
        let (said, more) = err.split_once("; all that are shipped have ").unwrap();
        assert!(said.starts_with("x.json: the file: missing field `architecture`"), "{said}");
        assert!(said.contains("; write it as models/gpu/") && said.contains(".json has it: \""), "{said}");
        assert!(more.contains("`memory`, `memory_bandwidth`") && !more.contains("`sms`"), "{more}");
        let text = find("gpu", "h100-sxm5").unwrap().text;
        let err = load(&text.replacen("\"source\"", "\"sourc\"", 1)).unwrap_err().to_string();
        assert!(err.contains("unknown field `sourc`"), "{err}");
        let at = text.find("\"operands\": ").unwrap();
        let err = load(&format!("{}{}", &text[..at], &text[at + text[at..].find('}').unwrap() + 2..])).unwrap_err();
        let err = err.to_string();
        assert!(err.starts_with("x.json: gemm: missing field `operands`"), "{err}");
        assert!(err.contains(".json has it: {\"") && !err.contains("all that are shipped"), "{err}");
    }

    #[test]
    fn what_is_wrong_is_said_without_names_of_types() {
        let text = find("fleet", "llama-3-405b").unwrap().text;
        let load = |text: String| {
            read::<FleetSpec>(&Found { kind: "fleet", file: "x.json".into(), text }).unwrap_err().to_string()
        };
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
