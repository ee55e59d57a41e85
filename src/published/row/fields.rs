//! The fields of one case, read with errors that name file, case, field, value and remedy.

use super::loose;
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

/// One JSON object of a file of cases; what it leaves out may stand once for all cases of the file.
pub struct Fields<'a> {
    pub file: &'a str,
    /// What errors call the case.
    pub id: String,
    pub row: &'a Map<String, Value>,
    pub common: Option<&'a Map<String, Value>>,
    /// What could not be read, in words; of a row and of the objects in it together.
    pub unclear: Rc<RefCell<Vec<String>>>,
    /// Names of fields that somebody asked for.
    pub asked: RefCell<BTreeSet<String>>,
}

/// What becomes of a number that cannot be read.
const TAKEN: &str = "; taken as not stated";

/// More than any run had; a typo is caught before it becomes an allocation.
fn most(field: &str) -> u64 {
    match field {
        "layers" => 2048,
        "gpus" | "gpus_per_node" | "nodes" => 1 << 17,
        "global_batch_tokens" => 1 << 40,
        "heads" | "kv_heads" | "heads_q" | "heads_kv" | "head_dim" => 1 << 16,
        "tp" | "pp" | "vp" | "cp" | "dp" | "ep" | "etp" | "ulysses" | "ring" => 1 << 17,
        "seq" => 1 << 27,
        "global_batch" => 1 << 24,
        "micro_batch" => 1 << 16,
        "hidden" => 1 << 18,
        "ffn" | "vocab" | "moe_ffn" => 1 << 24,
        _ => 1 << 32,
    }
}

impl<'a> Fields<'a> {
    pub fn new(
        file: &'a str,
        id: String,
        row: &'a Map<String, Value>,
        common: Option<&'a Map<String, Value>>,
    ) -> Fields<'a> {
        Fields { file, id, row, common, unclear: Rc::default(), asked: RefCell::default() }
    }

    pub fn wrong(&self, field: &str, why: impl std::fmt::Display) -> Error {
        Error::spec(self.file, format!("case {}: {field}", self.id), why)
    }

    /// Notes that a field could not be read and is as good as not stated: one number is no reason to leave a row out.
    fn doubt(&self, field: &str, why: impl std::fmt::Display) {
        self.note(format!("{field}: {why}{TAKEN}"));
    }

    /// For rows of which no number is optional.
    ///
    /// Errors: the first that could not be read.
    pub fn all_clear(&self) -> Result<()> {
        let unclear = self.unclear.borrow();
        let Some(line) = unclear.first() else { return Ok(()) };
        let (field, why) = line.split_once(": ").unwrap_or((line, ""));
        Err(self.wrong(field, format!("{}; correct it, or write null", why.trim_end_matches(TAKEN))))
    }

    /// Notes how a row was read.
    pub fn note(&self, line: String) {
        let mut unclear = self.unclear.borrow_mut();
        if !unclear.contains(&line) {
            unclear.push(line);
        }
    }

    /// Marks fields as asked for: they are no quantities, or what they say is said by others, too.
    pub fn know(&self, fields: &[&str]) {
        for field in fields {
            self.value(field);
        }
    }

    /// What could not be read, and what nobody asked for that says something.
    pub fn left_out(&self) -> Vec<String> {
        let mut said = self.unclear.borrow().clone();
        let left = self.unasked("");
        said.extend((!left.is_empty()).then(|| format!("not read: {}", left.join(", "))));
        said
    }

    /// Notes what of the object `within` a row nobody asked for.
    pub fn tell_unasked(&self, within: &str) {
        let left = self.unasked(&format!("{within}."));
        if !left.is_empty() {
            self.note(format!("not read: {}", left.join(", ")));
        }
    }

    /// Fields that say something and that nobody asked for, with their values.
    fn unasked(&self, before: &str) -> Vec<String> {
        let asked = self.asked.borrow();
        let rest = |(name, value): (&String, &Value)| {
            (!asked.contains(name) && loose::says_something(value))
                .then(|| format!("{before}{name}: {}", loose::clipped(&value.to_string())))
        };
        let mut left: Vec<String> = self.row.iter().chain(self.common.into_iter().flatten()).filter_map(rest).collect();
        left.dedup();
        left
    }

    /// `null` is how a source says "not stated". Of several names of a field the first that is there counts.
    pub fn value(&self, field: &str) -> Option<&'a Value> {
        let names = std::iter::once(field).chain(loose::names(field).iter().copied());
        self.asked.borrow_mut().extend(names.map(String::from));
        let of = |all: &'a Map<String, Value>| {
            let mut named = std::iter::once(field).chain(loose::names(field).iter().copied());
            named.find_map(|name| loose::stated(all.get(name)?))
        };
        of(self.row).or_else(|| of(self.common?))
    }

    pub fn text(&self, field: &str) -> Result<Option<String>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let text = loose::text(value).ok_or_else(|| {
            self.wrong(field, format!("{value} is no text; write it in quotes, or null where it is not stated"))
        })?;
        Ok(Some(text))
    }

    /// A text of which `none` is one that says something: that nothing is done, and not that nothing is known.
    pub fn choice(&self, field: &str) -> Result<Option<String>> {
        let of = |all: &Map<String, Value>| {
            let mut named = std::iter::once(field).chain(loose::names(field).iter().copied());
            named.any(|name| {
                all.get(name).and_then(Value::as_str).is_some_and(|text| text.trim().eq_ignore_ascii_case("none"))
            })
        };
        let found = self.text(field)?;
        let none = of(self.row) || found.is_none() && self.common.is_some_and(of);
        Ok(if none { Some("none".into()) } else { found })
    }

    /// A number above zero; what is none is noted, and as good as not stated.
    pub fn number(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let number = loose::number(field, value).filter(|v| *v > 0.0 && v.is_finite());
        if number.is_none() {
            self.doubt(field, format!("{value} is not a number above zero"));
        }
        Ok(number)
    }

    /// A whole number above zero.
    ///
    /// Errors: more than any run had.
    pub fn count(&self, field: &str) -> Result<Option<u64>> {
        let Some(number) = self.number(field)? else { return Ok(None) };
        if number.fract() != 0.0 {
            self.doubt(field, format!("{number} is not a whole number"));
            return Ok(None);
        }
        if number > most(field) as f64 {
            let why = format!("{number} is beyond any run (at most {}); check for extra digits", most(field));
            return Err(self.wrong(field, why));
        }
        Ok(Some(number as u64))
    }

    /// A degree; none of a way is as good as one rank of it.
    pub fn degree(&self, field: &str) -> Result<Option<u32>> {
        if self.value(field).and_then(|value| loose::number(field, value)) == Some(0.0) {
            return Ok(None);
        }
        Ok(self.count(field)?.map(|n| n as u32))
    }

    /// A share of a peak, also in percent.
    pub fn share(&self, field: &str) -> Result<Option<f64>> {
        Ok(match self.number(field)? {
            Some(share) if share > 100.0 => {
                self.doubt(field, format!("{share} is more than all of a peak"));
                None
            }
            Some(percent) if percent > 1.5 => Some(percent / 100.0),
            share => share,
        })
    }

    pub fn flag(&self, field: &str) -> Result<Option<bool>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let flag = loose::flag(value);
        if flag.is_none() {
            self.doubt(field, format!("{value} is neither true nor false"));
        }
        Ok(flag)
    }

    /// A nested object, empty where there is none.
    pub fn inner(&self, field: &str) -> Result<Option<Fields<'a>>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let Some(row) = value.as_object() else {
            return Err(
                self.wrong(field, format!("{value} is no object; write {{..}}, or null where it is not stated"))
            );
        };
        let inner = Fields::new(self.file, format!("{}: {field}", self.id), row, None);
        Ok(Some(Fields { unclear: Rc::clone(&self.unclear), ..inner }))
    }
}
