//! Rotary embedding as configs state it: its base, how much of a head turns, and how its frequencies are scaled
//! (`rope_scaling`, or `rope_parameters` as transformers 5 writes it).

use super::Config;
use super::notes::says;
use crate::error::{Error, Result};
use crate::spec::rope::{RopeScaling, yarn_mscale};
use crate::spec::{LlmSpec, Positions};
use serde_json::Value;

/// Model types some of whose layers turn by other frequencies than the rest: scaled or not, they are left plain.
const BY_LAYER: &[&str] = &["gemma3_text", "olmo3"];

/// What an object of scaling may have beside the fields of its kind: read elsewhere, or nothing that values depend on.
const BESIDE: &[&str] = &["type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"];

/// The kinds that are computed, and the fields of each.
const KINDS: &[(&str, &[&str])] = &[
    ("linear", &["factor"]),
    ("dynamic", &["factor", "original_max_position_embeddings"]),
    ("llama3", &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
    (
        "yarn",
        &[
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ],
    ),
    ("longrope", &["short_factor", "long_factor", "factor", "attention_factor", "original_max_position_embeddings"]),
];

/// Adds to a model how its config scales the frequencies; a kind that is not computed is said among what is not. Errors: a number
/// of a kind that is, which no model can have.
pub fn read(config: &Config, spec: &mut LlmSpec) -> Result<()> {
    let Some(stated) = Stated::of(config).filter(|_| spec.positions == Positions::Rope) else { return Ok(()) };
    if !stated.object.is_object() {
        let why =
            format!("{} is no object; write {{\"rope_type\": \"linear\", \"factor\": 2.0}}, or null", stated.object);
        return Err(config.wrong(stated.field, why));
    }
    match stated.kind() {
        Ok(None) => {}
        Ok(Some(kind)) => (spec.rope_scaled, spec.rope_scaling) = (true, Some(stated.of_kind(kind, spec)?)),
        Err(what) => {
            spec.rope_scaled = true;
            spec.uncomputed.push(what);
        }
    }
    Ok(())
}

impl Config<'_> {
    /// That of the object of scaling before that of the config, as transformers have it.
    pub fn rope_theta(&self) -> Result<f64> {
        let inner = Stated::of(self).map(|stated| Config::new(self.file, stated.object).number("rope_theta"));
        match inner.transpose()?.flatten() {
            Some(theta) => Ok(theta),
            None => Ok(self.number("rope_theta")?.unwrap_or(10000.0)),
        }
    }

    /// Of a head's elements, the share that turns.
    pub fn rotary_share(&self, default: f64) -> Result<f64> {
        let inner =
            Stated::of(self).map(|stated| Config::new(self.file, stated.object).number("partial_rotary_factor"));
        match inner.transpose()?.flatten() {
            Some(share) => Ok(share),
            None => Ok(self.number("partial_rotary_factor")?.unwrap_or(default)),
        }
    }
}

/// What a config states of scaling, and under which name.
struct Stated<'a> {
    config: &'a Config<'a>,
    field: &'static str,
    object: &'a Value,
}

/// Factors are from 1 to this, as those that divide frequencies are at least its inverse: beyond it frequencies or scores end as no
/// numbers, and no model is near.
const MOST: f64 = 1e6;

impl<'a> Stated<'a> {
    fn of(config: &'a Config<'a>) -> Option<Stated<'a>> {
        let field = |name| Some((name, config.value(name).filter(|value| says(value))?));
        let (field, object) = field("rope_scaling").or_else(|| field("rope_parameters"))?;
        Some(Stated { config, field, object })
    }

    /// Which of [`KINDS`], if any. Errors: what is stated in place of one.
    fn kind(&self) -> std::result::Result<Option<&'a str>, String> {
        let field = self.field;
        let kind = ["rope_type", "type"].iter().find_map(|name| self.value(name));
        let Some(kind) = kind.map_or(Some("default"), Value::as_str) else {
            return Err(format!("{field}.rope_type that is no string"));
        };
        if self.object.as_object().is_none_or(|all| all.values().any(Value::is_object)) {
            return Err(format!("{field} that is not one object for all layers"));
        }
        if kind == "default" {
            let plain = field == "rope_parameters" || self.value("factor").is_none();
            return if plain { Ok(None) } else { Err(format!("{field} with a factor and no rope_type")) };
        }
        let Some((_, fields)) = KINDS.iter().find(|known| known.0 == kind) else {
            return Err(format!("{field} of type {kind}"));
        };
        let name = self.config.value("model_type").and_then(Value::as_str).unwrap_or_default();
        if BY_LAYER.contains(&name) {
            return Err(format!("{field} in some layers alone"));
        }
        let all = self.object.as_object().into_iter().flatten();
        let known = |name: &str| fields.contains(&name) || BESIDE.contains(&name);
        if let Some((name, value)) = all.into_iter().find(|(name, value)| says(value) && !known(name)) {
            return Err(format!("{field}.{name} {value} beside its type {kind}"));
        }
        Ok(Some(kind))
    }

    fn of_kind(&self, kind: &str, spec: &LlmSpec) -> Result<RopeScaling> {
        match kind {
            "linear" => Ok(RopeScaling::Linear { factor: self.needed("factor", 1.0)? }),
            "dynamic" => Ok(RopeScaling::Dynamic { factor: self.needed("factor", 1.0)?, original: self.most()? }),
            "llama3" => self.llama3(),
            "yarn" => self.yarn(),
            _ => self.longrope(spec),
        }
    }

    fn llama3(&self) -> Result<RopeScaling> {
        let [low, high] = [self.needed("low_freq_factor", 0.0)?, self.needed("high_freq_factor", 0.0)?];
        if high <= low {
            let why = format!("{high} is not above low_freq_factor {low}");
            return Err(self.wrong("high_freq_factor", why));
        }
        Ok(RopeScaling::Llama3 { factor: self.needed("factor", 1.0)?, low, high, original: self.original()? })
    }

    fn yarn(&self) -> Result<RopeScaling> {
        let (original, factor) = (self.original()?, self.factor()?);
        let [mscale, all] = ["mscale", "mscale_all_dim"].map(|name| self.number(name, 0.0));
        let (mscale, all) = (mscale?.unwrap_or(0.0), all?.unwrap_or(0.0));
        let both = mscale != 0.0 && all != 0.0;
        let own = match both {
            true => yarn_mscale(factor, mscale) / yarn_mscale(factor, all),
            false => yarn_mscale(factor, 1.0),
        };
        let truncate = match self.value("truncate") {
            None => true,
            Some(value) => {
                value.as_bool().ok_or_else(|| self.wrong("truncate", format!("{value} is not true or false")))?
            }
        };
        let beta =
            |name, default| -> Result<f64> { Ok(self.number(name, 0.0)?.filter(|b| *b != 0.0).unwrap_or(default)) };
        let [beta_fast, beta_slow] = [beta("beta_fast", 32.0)?, beta("beta_slow", 1.0)?];
        if beta_fast < beta_slow {
            return Err(self.wrong("beta_fast", format!("{beta_fast} is below beta_slow {beta_slow}")));
        }
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original,
            truncate,
            attention_factor: self.number("attention_factor", 0.0)?.unwrap_or(own),
            mscale_all_dim: all,
        })
    }

    fn longrope(&self, spec: &LlmSpec) -> Result<RopeScaling> {
        let (original, factor, pairs) = (self.original()?, self.factor()?, spec.turned_dims() / 2);
        let own = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() };
        let list = |name: &str| -> Result<Vec<f64>> {
            let all = self.value(name).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
            let divides = |by: &f64| (1.0 / MOST..=MOST).contains(by);
            let numbers: Vec<f64> = all.iter().filter_map(Value::as_f64).filter(divides).collect();
            match numbers.len() as u64 == pairs && numbers.len() == all.len() {
                true => Ok(numbers),
                false => {
                    let why = format!("not a number from {:e} to {MOST} for each of {pairs} pairs", 1.0 / MOST);
                    Err(self.wrong(name, why))
                }
            }
        };
        let (short, long) = (list("short_factor")?, list("long_factor")?);
        let attention_factor = self.number("attention_factor", 0.0)?.unwrap_or(own);
        Ok(RopeScaling::LongRope { short, long, original, attention_factor })
    }

    fn value(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    fn wrong(&self, name: &str, why: impl std::fmt::Display) -> Error {
        self.config.wrong(&format!("{}.{name}", self.field), format!("{why}; write what the model was trained with"))
    }

    fn number(&self, name: &str, least: f64) -> Result<Option<f64>> {
        let of = |value: &Value| value.as_f64().filter(|n| (least..=MOST).contains(n));
        let why = |value| self.wrong(name, format!("{value} is not a number from {least} to {MOST}"));
        self.value(name).map(|value| of(value).ok_or_else(|| why(value))).transpose()
    }

    /// A number that there has to be, and not 0.
    fn needed(&self, name: &str, least: f64) -> Result<f64> {
        match self.number(name, least)? {
            Some(0.0) => Err(self.wrong(name, "0 is not above zero")),
            Some(number) => Ok(number),
            None => Err(self.wrong(name, "missing")),
        }
    }

    /// Longer than the sequences before by that much.
    fn factor(&self) -> Result<f64> {
        match self.number("factor", 1.0)? {
            Some(factor) => Ok(factor),
            None => {
                let (most, original) = (self.most()?, self.original()?);
                let factor = most as f64 / original as f64;
                let why = || {
                    format!("{original}, and max_position_embeddings {most}: {factor} is no factor from 1 to {MOST}")
                };
                if (1.0..=MOST).contains(&factor) {
                    Ok(factor)
                } else {
                    Err(self.wrong("original_max_position_embeddings", why()))
                }
            }
        }
    }

    /// Tokens of the sequences before: of the config itself before those of the object, and else the most it takes.
    fn original(&self) -> Result<u64> {
        const NAME: &str = "original_max_position_embeddings";
        let stated = self.config.value(NAME).or_else(|| self.value(NAME));
        stated.map_or_else(|| self.most(), |value| self.tokens(NAME, value))
    }

    fn most(&self) -> Result<u64> {
        const NAME: &str = "max_position_embeddings";
        let missing = || self.config.wrong(NAME, format!("missing; {} goes by it", self.field));
        self.config.value(NAME).map_or_else(|| Err(missing()), |value| self.tokens(NAME, value))
    }

    fn tokens(&self, name: &str, value: &Value) -> Result<u64> {
        let whole = value.as_f64().filter(|n| *n >= 2.0 && n.fract() == 0.0 && *n < 1e15);
        let why = || format!("{value} is not a number of tokens from 2, which {} goes by", self.field);
        whole.map(|n| n as u64).ok_or_else(|| self.config.wrong(name, why()))
    }
}
