//! Token ids from a JSON list, cut into the sequences of a run.

use crate::error::{Error, Result, json, text};
use crate::plan::Plan;
use serde_json::Value;
use std::path::Path;

/// The sequences of `steps` steps, in order, with those that were `seen` before them. A flat list is cut into runs of seq_len + 1 ids, one behind the
/// other; a list of lists has a sequence in each. The first seq_len ids of a sequence are its tokens, the last
/// seq_len what they are to predict. Ids that are left over are not used. Errors: a file that cannot be read, ids
/// beyond the vocabulary, too few of them.
pub fn read(path: &Path, plan: &Plan, seen: u64, steps: u64) -> Result<Vec<Vec<u32>>> {
    let inputs = plan.inputs()?;
    let (length, count) = (inputs.segs.seq as usize + 1, (seen + plan.about.global_batch * steps) as usize);
    let file = path.display();
    let text = text::data(path)?;
    let json: Value = json::parse(&file, &text)?;
    let list =
        json.as_array().ok_or_else(|| Error::spec(&file, "contents", "not a JSON list of token ids, as [5, 17, 2]"))?;
    let id = |(at, value): (String, &Value)| id(&file.to_string(), &at, value, inputs.vocab);
    let after = if seen == 0 { String::new() } else { format!(" after {seen} that were seen") };
    let needed = format!(
        "{steps} steps of {} sequences{after} need {count} times {length} (seq_len + 1: the last of a sequence is only predicted)",
        plan.about.global_batch
    );
    let few = |what: String| {
        let why = format!("{what}; {needed}; lower --steps, --global-batch or --seq-len");
        Error::spec(&file, "contents", why)
    };
    if !list.iter().any(Value::is_array) {
        if list.len() < count * length {
            return Err(few(format!("{} token ids", list.len())));
        }
        let ids = list.iter().enumerate().map(|(i, v)| id((format!("[{i}]"), v))).collect::<Result<Vec<u32>>>()?;
        return Ok(ids.chunks_exact(length).take(count).map(<[u32]>::to_vec).collect());
    }
    if list.len() < count {
        return Err(few(format!("{} sequences", list.len())));
    }
    let sequence = |(i, row): (usize, &Value)| {
        let row = row.as_array().filter(|row| row.len() >= length);
        let row = row.ok_or_else(|| few(format!("sequence [{i}] has not the {length} ids that it needs")))?;
        row[..length].iter().enumerate().map(|(j, v)| id((format!("[{i}][{j}]"), v))).collect()
    };
    list.iter().enumerate().take(count).map(sequence).collect()
}

fn id(file: &str, at: &str, value: &Value, vocab: u64) -> Result<u32> {
    let wrong = |why: String| Err(Error::spec(file, at, why));
    match value.as_u64() {
        Some(id) if id < vocab => Ok(id as u32),
        Some(id) => wrong(format!(
            "token id {id} is outside the vocabulary of {vocab}; use ids of this model's tokenizer, 0 to {}",
            vocab - 1
        )),
        None => wrong(format!("{value} is not a token id; write whole numbers from 0 to {}", vocab - 1)),
    }
}
