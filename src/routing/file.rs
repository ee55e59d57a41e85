//! Routing traces as files, so that the log of a real router can be replayed.
//!
//! CSV: a header `source,experts,weights` and a line a token, experts and weights apart by blanks; the weights may be
//! left out. JSON lines: `{"source": 0, "experts": [3, 17], "weights": [0.6, 0.4]}`. Sources ascend; an expert of -1
//! is a choice that was dropped.

use super::Trace;
use crate::error::{Error, Result, text};
use crate::plan::route::DROPPED;
use serde::Deserialize;
use std::path::Path;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Token {
    #[serde(default)]
    source: u32,
    experts: Vec<i64>,
    #[serde(default)]
    weights: Vec<f32>,
}

/// What a line is, or why it is nothing.
type Line<T> = std::result::Result<T, String>;

/// A trace of so many logical experts.
pub fn read(path: &Path, experts: u32) -> Result<Trace> {
    let text = text::data(path)?;
    parse(&path.display().to_string(), &text, experts)
}

pub fn parse(file: &str, text: &str, experts: u32) -> Result<Trace> {
    let mut trace = Trace { experts, topk: 0, tokens: vec![], choices: vec![], weights: vec![] };
    let lines = text.lines().enumerate().map(|(i, line)| (i + 1, line.trim()));
    for (at, line) in lines.filter(|(_, l)| !l.is_empty() && !l.starts_with('#') && !l.starts_with("source")) {
        let bad = |why: String| Error::spec(file, format!("line {at}"), why);
        let token = if line.starts_with('{') {
            serde_json::from_str(line).map_err(|e| bad(e.to_string()))
        } else {
            from_csv(line).map_err(bad)
        };
        add(&mut trace, token?).map_err(bad)?;
    }
    if trace.topk == 0 {
        return Err(Error::spec(file, "contents", "no token; write lines of `source,experts,weights`"));
    }
    Ok(trace)
}

fn from_csv(line: &str) -> Line<Token> {
    let columns: Vec<&str> = line.split(',').collect();
    let [source, experts, rest @ ..] = columns.as_slice() else {
        return Err("fewer than two columns; write source,experts,weights".into());
    };
    if rest.len() > 1 {
        return Err(format!("{} columns; experts are apart by blanks", columns.len()));
    }
    let number =
        |text: &str, what: &str| text.trim().parse::<i64>().map_err(|_| format!("{what} {text:?} is no integer"));
    let weight = |text: &str| text.parse::<f32>().map_err(|_| format!("weight {text:?} is no number"));
    let source =
        u32::try_from(number(source, "source")?).map_err(|_| format!("source {source} is negative or huge"))?;
    let experts = experts.split_whitespace().map(|e| number(e, "expert")).collect::<Line<_>>()?;
    let weights = rest.first().copied().unwrap_or("").split_whitespace().map(weight).collect::<Line<_>>()?;
    Ok(Token { source, experts, weights })
}

/// Most sources of a file, so that a slip of the pen is no allocation.
const MOST_SOURCES: u32 = 1 << 20;

fn add(trace: &mut Trace, token: Token) -> Line<()> {
    let k = token.experts.len();
    if trace.topk == 0 {
        trace.topk = k as u32;
    }
    if k == 0 || k != trace.topk as usize {
        return Err(format!("{k} experts where the first token has {}; write -1 for one dropped", trace.topk));
    }
    if !(token.weights.is_empty() || token.weights.len() == k) {
        return Err(format!("{} weights for {k} experts; write one for each, or none", token.weights.len()));
    }
    if let Some(weight) = token.weights.iter().find(|w| !(w.is_finite() && **w >= 0.0)) {
        return Err(format!("weight {weight} is no number of 0 or more; write what the router multiplies by"));
    }
    if token.source >= MOST_SOURCES || (token.source as usize) + 1 < trace.tokens.len() {
        return Err(format!("source {} after source {}; sources ascend", token.source, trace.tokens.len() - 1));
    }
    if token.weights.is_empty() != trace.weights.is_empty() && !trace.choices.is_empty() {
        return Err("some tokens have weights and some have none".into());
    }
    for (i, &e) in token.experts.iter().enumerate() {
        if e < -1 || e >= i64::from(trace.experts) {
            return Err(format!("expert {e} of {}; write -1 for one dropped", trace.experts));
        }
        if e >= 0 && token.experts[..i].contains(&e) {
            return Err(format!("expert {e} twice"));
        }
        trace.choices.push(if e < 0 { DROPPED } else { e as u32 });
    }
    trace.tokens.resize(trace.tokens.len().max(token.source as usize + 1), 0);
    trace.tokens[token.source as usize] += 1;
    trace.weights.extend(token.weights);
    Ok(())
}
