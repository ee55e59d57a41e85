//! JSON in which an object states a field once. Readers of JSON take the last of two and say nothing, so that whoever
//! wrote both is answered about one of them.

use super::{Error, Result};
use rustc_hash::FxHashMap;
use serde::de::DeserializeOwned;

/// What a JSON text states; `file` is what errors call it.
///
/// # Errors
/// [`Error::Spec`] for a field that an object states twice, and for whatever serde_json has to say.
pub fn parse<T: DeserializeOwned>(file: impl ToString, text: &str) -> Result<T> {
    stated_once(&file, text)?;
    serde_json::from_str(text).map_err(Error::json(file))
}

/// Refuses a text one of whose objects has a key twice. What else is wrong with the text is for its reader to say.
pub fn stated_once(file: &impl ToString, text: &str) -> Result<()> {
    match repeated(text) {
        None => Ok(()),
        Some(Repeated { path, lines: [first, second] }) => {
            let lines = match first == second {
                true => format!("twice in line {first}"),
                false => format!("in line {first} and again in line {second}"),
            };
            Err(Error::spec(file.to_string(), path, format!("stands there {lines}; leave one of them")))
        }
    }
}

/// A key that an object has twice.
struct Repeated {
    /// `causes[2].count`
    path: String,
    /// From 1.
    lines: [usize; 2],
}

/// What a place in a JSON text is in.
enum Inside<'t> {
    Object {
        /// As written, between quotes, with the line of each.
        keys: FxHashMap<&'t str, usize>,
        key: &'t str,
        /// What comes next is a key.
        wants_key: bool,
    },
    List(usize),
}

/// The first key that stands twice in one object. Walks the bytes once and allocates nothing but the keys of the objects
/// that are open.
fn repeated(text: &str) -> Option<Repeated> {
    let bytes = text.as_bytes();
    let (mut open, mut line, mut i): (Vec<Inside>, usize, usize) = (vec![], 1, 0);
    while i < bytes.len() {
        match bytes[i] {
            b'\n' => line += 1,
            b'{' => open.push(Inside::Object { keys: FxHashMap::default(), key: "", wants_key: true }),
            b'[' => open.push(Inside::List(0)),
            b'}' | b']' => drop(open.pop()),
            b',' => match open.last_mut() {
                Some(Inside::Object { wants_key, .. }) => *wants_key = true,
                Some(Inside::List(at)) => *at += 1,
                None => {}
            },
            b'"' => {
                let end = end_of_string(bytes, i + 1);
                let mut twice = None;
                if let Some(Inside::Object { keys, key, wants_key: wants @ true }) = open.last_mut() {
                    (*key, *wants) = (&text[i + 1..end], false);
                    twice = keys.insert(key, line);
                }
                if let Some(first) = twice {
                    return Some(Repeated { path: path(&open), lines: [first, line] });
                }
                line += bytes[i..end].iter().filter(|byte| **byte == b'\n').count();
                i = end;
            }
            _ => {}
        }
        i += 1;
    }
    None
}

/// Where the string that begins at `from`, behind its first quote, has its last one, or where the text ends.
pub(crate) fn end_of_string(text: &[u8], from: usize) -> usize {
    let mut i = from;
    while i < text.len() && text[i] != b'"' {
        i += if text[i] == b'\\' { 2 } else { 1 };
    }
    i.min(text.len())
}

fn path(open: &[Inside]) -> String {
    let mut said = String::new();
    for step in open {
        match step {
            Inside::Object { key, .. } if said.is_empty() => said += key,
            Inside::Object { key, .. } => said += &format!(".{key}"),
            Inside::List(at) => said += &format!("[{at}]"),
        }
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn why(text: &str) -> String {
        parse::<Value>("x.json", text).unwrap_err().to_string()
    }

    #[test]
    fn a_field_that_stands_twice_is_named_with_both_lines() {
        assert_eq!(
            why("{\n \"a\": 1,\n \"b\": [],\n \"a\": 2\n}"),
            "x.json: a: stands there in line 2 and again in line 4; leave one of them"
        );
        let text = r#"{"rows": [{"gpus": 8}, {"gpus": 8, "of": {"x": "\"gpus", "x": 1}}]}"#;
        assert_eq!(why(text), "x.json: rows[1].of.x: stands there twice in line 1; leave one of them");
        assert!(why(r#"[[{"a": {}, "a": []}]]"#).starts_with("x.json: [0][0].a: "));
    }

    #[test]
    fn what_stands_once_is_read_and_other_errors_are_as_ever() {
        let text = r#"{"a": {"a": "a"}, "b": ["b", "b", {"a": "{\"a\": 1, \"a\""}], "ü": [], "": ["a\\", "a"]}"#;
        assert_eq!(parse::<Value>("x.json", text).unwrap()["b"][0], "b");
        assert!(why("{\"a\": 1, ").contains("ends early"));
        for odd in ["", "\"", "{\"", "}", "]", ",", "\"\\", "{\"a\\", "[\"\\\""] {
            why(odd);
        }
    }
}
