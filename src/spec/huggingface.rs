//! Reads the config.json of a Hugging Face model, in its old spellings and its new ones.

mod alibi;
mod deepseek;
mod falcon;
mod gemma;
mod glm;
mod gpt_oss;
mod kin;
mod llama4;
mod mixtures;
mod nemotron_h;
mod notes;
mod part;
mod placed;
mod qwen3_next;
mod rope;
mod values;
mod windows;

pub use values::COMPUTED;

use super::MtpSpec;
use super::hybrid::Mixer;
use super::model::{LlmSpec, Mlp, Norm, Positions};
use super::moe::{GroupScore, Groups, MoeSpec, Score};
use crate::error::{self, Error, Result};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// What the configs of one model type state.
type Reader = fn(&Config) -> Result<LlmSpec>;

/// The model types whose configs are understood.
const FAMILIES: &[(&str, Reader)] = &[
    ("llama", llama),
    ("mistral", mistral),
    ("mixtral", mixtral),
    ("qwen2", qwen2),
    ("qwen2_vl", qwen2),
    ("qwen2_vl_text", qwen2),
    ("qwen2_5_vl", qwen2),
    ("qwen2_5_vl_text", qwen2),
    ("qwen2_moe", mixtures::qwen2_moe),
    ("qwen3", qwen3),
    ("qwen3_vl_text", qwen3),
    ("qwen3_moe", mixtures::qwen3_moe),
    ("qwen3_vl_moe_text", mixtures::qwen3_moe),
    ("qwen3_next", qwen3_next::read),
    ("phi3", phi3),
    ("olmo2", olmo2),
    ("olmo3", kin::olmo3),
    ("olmoe", mixtures::olmoe),
    ("granite", llama),
    ("granitemoe", mixtures::granite),
    ("granitemoeshared", mixtures::granite),
    ("smollm3", kin::smollm3),
    ("seed_oss", kin::seed_oss),
    ("ernie4_5", kin::ernie),
    ("ernie4_5_moe", mixtures::ernie),
    ("minimax_m2", mixtures::minimax_m2),
    ("dots1", mixtures::dots1),
    ("cohere", kin::cohere),
    ("cohere2", kin::cohere2),
    ("starcoder2", kin::starcoder2),
    ("gemma", gemma::gemma),
    ("gemma2", gemma::gemma2),
    ("gemma3_text", gemma::gemma3),
    ("llama4_text", llama4::read),
    ("gpt_oss", gpt_oss::read),
    ("glm4", kin::glm4),
    ("glm4_moe", glm::read),
    ("deepseek_v2", deepseek::v2),
    ("deepseek_v3", deepseek::v3),
    ("deepseek_v32", deepseek::v32),
    ("glm_moe_dsa", deepseek::glm),
    ("kimi_k2", deepseek::v3),
    ("falcon", falcon::read),
    ("gpt2", gpt2),
    ("gpt_neox", gpt_neox),
    ("bloom", alibi::bloom),
    ("mpt", alibi::mpt),
    ("yuan", yuan),
    ("nemotron_h", nemotron_h::read),
];

/// The model that `text` states; `file` is what errors call it.
pub fn read(file: &str, name: &str, text: &str) -> Result<LlmSpec> {
    let json: Value = error::json::parse(file, text)?;
    let whole = Config::new(file, &json);
    let text = whole.text_alone()?;
    let config = text.as_ref().unwrap_or(&whole);
    let reader = config.family()?;
    let mut spec = LlmSpec { name: name.into(), ..reader(config)? };
    config.check_size(&spec)?;
    windows::read(config, &mut spec)?;
    notes::add(&whole, config, &mut spec);
    spec.uncomputed = values::uncomputed(config);
    rope::read(config, &mut spec)?;
    Ok(spec)
}

/// What Llama states, and with it most models since: RMSNorm, rotary embedding, grouped queries, SwiGLU.
fn llama_like(config: &Config) -> Result<LlmSpec> {
    config.is_act("hidden_act", "silu")?;
    llama_sizes(config)
}

/// The same whatever the activation between the two products of its network.
fn llama_sizes(config: &Config) -> Result<LlmSpec> {
    let (hidden, heads) = (config.count("hidden_size")?, config.count("num_attention_heads")?);
    let kv_heads = config.optional_count("num_key_value_heads")?.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let why = format!("{kv_heads} does not divide the {heads} of num_attention_heads; use a divisor of {heads}");
        return Err(config.wrong("num_key_value_heads", why));
    }
    Ok(LlmSpec {
        hidden,
        layers: config.count("num_hidden_layers")?,
        heads,
        kv_heads,
        head_dim: config.head_dim(hidden, heads)?,
        ffn: config.count("intermediate_size")?,
        vocab: config.count("vocab_size")?,
        rms_eps: config.number("rms_norm_eps")?.unwrap_or(1e-6),
        rope_theta: config.rope_theta()?,
        tie_embeddings: config.flag("tie_word_embeddings")?,
        ..LlmSpec::default()
    })
}

fn llama(config: &Config) -> Result<LlmSpec> {
    let (attention, mlp) = (config.flag("attention_bias")?, config.flag("mlp_bias")?);
    if attention != mlp {
        let field = if attention { "attention_bias" } else { "mlp_bias" };
        let why = "true: biases of this part of a layer alone are not modelled; set both to true or both to false";
        return Err(config.wrong(field, why));
    }
    Ok(LlmSpec { bias: attention, ..llama_like(config)? })
}

fn mistral(config: &Config) -> Result<LlmSpec> {
    Ok(LlmSpec { window: config.optional_count("sliding_window")?, ..llama_like(config)? })
}

/// Phi-3 and Phi-4: Mistral's layers, of whose heads a part may turn.
fn phi3(config: &Config) -> Result<LlmSpec> {
    let like = mistral(config)?;
    Ok(LlmSpec { rotary_dim: turned(config.rotary_share(1.0)?, like.head_dim), ..like })
}

/// OLMo 2 (arXiv:2501.00656): norms stand behind attention and network instead of before them, and queries and keys have
/// one norm each over all heads.
fn olmo2(config: &Config) -> Result<LlmSpec> {
    let notes = vec![
        "olmo2: norms are costed before attention and network, not behind them, and those of queries and keys a head at a \
         time: as many bytes"
            .into(),
    ];
    Ok(LlmSpec { qk_norm: true, notes, ..llama_like(config)? })
}

/// Elements of a head that rotary embedding turns; `None`: all.
fn turned(share: f64, head_dim: u64) -> Option<u64> {
    Some((share * head_dim as f64) as u64).filter(|dim| *dim < head_dim)
}

fn mixtral(config: &Config) -> Result<LlmSpec> {
    let moe = MoeSpec {
        experts: config.count("num_local_experts")?,
        top_k: config.optional_count("num_experts_per_tok")?.unwrap_or(2),
        ffn: config.count("intermediate_size")?,
        ..MoeSpec::default()
    };
    config.check_experts(&moe)?;
    Ok(LlmSpec { moe: Some(moe), ..mistral(config)? })
}

fn qwen2(config: &Config) -> Result<LlmSpec> {
    Ok(LlmSpec { qkv_bias: true, ..llama_like(config)? })
}

fn qwen3(config: &Config) -> Result<LlmSpec> {
    config.is_off("attention_bias")?;
    Ok(LlmSpec { qk_norm: true, ..llama_like(config)? })
}

/// GPT-2 and what was published in its shape. Beside its own keys, `parallel_block` and `sliding_window` are read:
/// they make MegaScale's models of it (arXiv:2402.15627, section 3.1).
fn gpt2(config: &Config) -> Result<LlmSpec> {
    let (hidden, heads) = (config.count("n_embd")?, config.count("n_head")?);
    config.is_act("activation_function", "gelu")?;
    let max = config.optional_count("n_positions")?.or(config.optional_count("n_ctx")?).unwrap_or(1024);
    Ok(LlmSpec {
        hidden,
        layers: config.count("n_layer")?,
        heads,
        kv_heads: heads,
        head_dim: config.head_dim_of(hidden, heads, "n_embd", "n_head")?,
        ffn: config.optional_count("n_inner")?.unwrap_or(4 * hidden),
        vocab: config.count("vocab_size")?,
        rms_eps: config.number("layer_norm_epsilon")?.unwrap_or(1e-5),
        tie_embeddings: config.flag_or("tie_word_embeddings", true)?,
        norm: Norm::Layer,
        mlp: Mlp::Gelu,
        positions: Positions::Learned { max },
        bias: true,
        parallel_block: config.flag("parallel_block")?,
        window: config.optional_count("sliding_window")?,
        dropout: config.probability("resid_pdrop")?.unwrap_or(0.1),
        ..LlmSpec::default()
    })
}

fn gpt_neox(config: &Config) -> Result<LlmSpec> {
    let (hidden, heads) = (config.count("hidden_size")?, config.count("num_attention_heads")?);
    config.is_act("hidden_act", "gelu")?;
    let head_dim = config.head_dim(hidden, heads)?;
    let parallel = config.flag_or("use_parallel_residual", true)?;
    let rotary_pct = config.number("rotary_pct")?;
    Ok(LlmSpec {
        hidden,
        layers: config.count("num_hidden_layers")?,
        heads,
        kv_heads: heads,
        head_dim,
        ffn: config.count("intermediate_size")?,
        vocab: config.count("vocab_size")?,
        rms_eps: config.number("layer_norm_eps")?.unwrap_or(1e-5),
        rope_theta: config.number("rotary_emb_base")?.map_or_else(|| config.rope_theta(), Ok)?,
        tie_embeddings: config.flag("tie_word_embeddings")?,
        norm: Norm::Layer,
        mlp: Mlp::Gelu,
        rotary_dim: turned(rotary_pct.map_or_else(|| config.rotary_share(0.25), Ok)?, head_dim),
        bias: config.flag_or("attention_bias", true)?,
        parallel_block: parallel,
        own_norms: parallel,
        dropout: config.probability("hidden_dropout")?.unwrap_or(0.0),
        ..LlmSpec::default()
    })
}

/// Yuan 2.0 (arXiv:2311.15786): Llama with localized filtering, and the embedding table used twice.
fn yuan(config: &Config) -> Result<LlmSpec> {
    let tie_embeddings = config.flag_or("tie_word_embeddings", true)?;
    Ok(LlmSpec { lfa: true, tie_embeddings, ..llama_like(config)? })
}

/// More than any model has; a typo is caught before it becomes an allocation.
fn most(field: &str) -> u64 {
    match field {
        "num_hidden_layers" | "num_attention_heads" | "num_key_value_heads" => 1_000_000,
        "head_dim" => 65_536,
        _ => 1 << 32,
    }
}

struct Config<'a> {
    file: &'a str,
    json: &'a Value,
    /// What has it as a part, if anything has.
    outer: Option<&'a Value>,
    /// Fields that were asked for.
    read: RefCell<BTreeSet<String>>,
}

impl<'a> Config<'a> {
    fn new(file: &'a str, json: &'a Value) -> Config<'a> {
        Config { file, json, outer: None, read: RefCell::default() }
    }
}

impl Config<'_> {
    fn wrong(&self, field: &str, why: impl ToString) -> Error {
        Error::spec(self.file, field, why)
    }

    /// `null` is how a config says "not set".
    fn value(&self, field: &str) -> Option<&Value> {
        self.read.borrow_mut().insert(field.into());
        self.json.get(field).filter(|v| !v.is_null()).or_else(|| self.outside(field))
    }

    fn family(&self) -> Result<Reader> {
        let known = FAMILIES.iter().map(|f| f.0).collect::<Vec<_>>().join(", ");
        if !self.json.is_object() {
            return Err(self.wrong("the file", "not a JSON object; a Hugging Face config.json is wanted"));
        }
        let Some(value) = self.value("model_type") else {
            return Err(
                self.wrong("model_type", format!("missing; a Hugging Face config names one; read are: {known}"))
            );
        };
        let Some(name) = value.as_str() else {
            return Err(self.wrong("model_type", format!("{value} is not a string; read are: {known}")));
        };
        let found = FAMILIES.iter().find(|f| f.0 == name).map(|f| f.1);
        found.ok_or_else(|| {
            let remedy = "if its layers are those of one of these, write that name and the sizes by its spelling";
            self.wrong("model_type", format!("\"{name}\" is not understood; read are: {known}; {remedy}"))
        })
    }

    fn optional_count(&self, field: &str) -> Result<Option<u64>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let whole =
            value.as_u64().or_else(|| value.as_f64().filter(|v| v.fract() == 0.0 && *v >= 0.0).map(|v| v as u64));
        match whole {
            Some(0) => Err(self.wrong(field, "0; at least 1 is needed")),
            Some(n) if n > most(field) => {
                Err(self
                    .wrong(field, format!("{n} is beyond any model (at most {}); check for extra digits", most(field))))
            }
            Some(n) => Ok(Some(n)),
            None => {
                Err(self.wrong(field, format!("{value} is not a positive whole number; write one, without quotes")))
            }
        }
    }

    /// A count that may be 0.
    fn whole(&self, field: &str) -> Result<Option<u64>> {
        match self.value(field).map(Value::as_u64) {
            Some(Some(0)) => Ok(Some(0)),
            _ => self.optional_count(field),
        }
    }

    /// Modules of multi-token prediction, by any of the names that configs have for their number.
    fn mtp(&self, pattern: Vec<Mixer>) -> Result<Option<MtpSpec>> {
        for field in ["num_nextn_predict_layers", "mtp_num_layers", "mtp_num_hidden_layers", "num_mtp_modules"] {
            if let Some(depth) = self.whole(field)? {
                if depth > MtpSpec::MOST {
                    return Err(self.wrong(field, format!("{depth} modules; at most {} are taken", MtpSpec::MOST)));
                }
                let weight = self.number("mtp_loss_scaling_factor")?.unwrap_or(MtpSpec::WEIGHT);
                return Ok((depth > 0).then_some(MtpSpec { depth, weight, pattern }));
            }
        }
        Ok(None)
    }

    fn count(&self, field: &str) -> Result<u64> {
        let missing = || self.wrong(field, "missing; the config of this model type must state it");
        self.optional_count(field)?.ok_or_else(missing)
    }

    fn number(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_f64() {
            Some(v) if v > 0.0 && v.is_finite() => Ok(Some(v)),
            _ => Err(self.wrong(field, format!("{value} is not a number above zero"))),
        }
    }

    fn probability(&self, field: &str) -> Result<Option<f64>> {
        match self.value(field).map(|v| (v, v.as_f64())) {
            None => Ok(None),
            Some((_, Some(p))) if (0.0..1.0).contains(&p) => Ok(Some(p)),
            Some((v, _)) => Err(self.wrong(field, format!("{v} is not a probability below 1"))),
        }
    }

    fn flag(&self, field: &str) -> Result<bool> {
        self.flag_or(field, false)
    }

    fn flag_or(&self, field: &str, default: bool) -> Result<bool> {
        match self.value(field) {
            None => Ok(default),
            Some(v) => v.as_bool().ok_or_else(|| self.wrong(field, format!("{v} is neither true nor false"))),
        }
    }

    fn head_dim(&self, hidden: u64, heads: u64) -> Result<u64> {
        let dim = match self.optional_count("head_dim")? {
            Some(dim) => dim,
            None => self.head_dim_of(hidden, heads, "hidden_size", "num_attention_heads")?,
        };
        if dim % 2 == 1 {
            let why = format!("{dim} is odd, but rotary embedding turns pairs; use an even head_dim");
            return Err(self.wrong("head_dim", why));
        }
        Ok(dim)
    }

    /// `wide` and `many` are what the config calls them.
    fn head_dim_of(&self, hidden: u64, heads: u64, wide: &str, many: &str) -> Result<u64> {
        if hidden.is_multiple_of(heads) {
            return Ok(hidden / heads);
        }
        let why = format!("{heads} does not divide {wide} {hidden}; correct one, or state head_dim");
        Err(self.wrong(many, why))
    }

    /// Refuses numbers that are each possible but make a model that is not, before a product overflows.
    fn check_size(&self, spec: &LlmSpec) -> Result<()> {
        let [hidden, layers, ffn, vocab] = [spec.hidden, spec.layers, spec.ffn, spec.vocab].map(|n| n as f64);
        let attention = (spec.heads + spec.kv_heads) as f64 * spec.head_dim as f64;
        let experts = spec.moe.map_or(0.0, |moe| moe.experts as f64 * moe.ffn as f64);
        let mamba = spec.mamba.map_or(0.0, |m| {
            let [heads, dim, groups, state] = [m.heads, m.head_dim, m.groups, m.state].map(|n| n as f64);
            heads * dim + groups * state
        });
        let params = layers * hidden * (2.0 * attention + 3.0 * (ffn + experts + mamba)) + 2.0 * hidden * vocab;
        if params <= 1e15 {
            return Ok(());
        }
        let why = format!("together with the other sizes it makes {params:.1e} weights; check for extra digits");
        Err(self.wrong("hidden_size", why))
    }

    /// Refuses an activation other than the family's own. GELU goes by several names.
    fn is_act(&self, field: &str, wanted: &str) -> Result<()> {
        match self.value(field) {
            Some(act) if !act.as_str().is_some_and(|act| act.starts_with(wanted)) => {
                Err(self.wrong(field, format!("{act} is not modelled; only \"{wanted}\" is read")))
            }
            _ => Ok(()),
        }
    }

    fn is_off(&self, field: &str) -> Result<()> {
        match self.flag(field)? {
            true => Err(self.wrong(field, "true: this bias is not modelled; only false is read")),
            false => Ok(()),
        }
    }

    fn is_one(&self, field: &str) -> Result<()> {
        match self.optional_count(field)? {
            None | Some(1) => Ok(()),
            Some(n) => Err(self.wrong(field, format!("{n}: experts in every layer are modelled; only 1 is read"))),
        }
    }

    fn score(&self, default: Score) -> Result<Score> {
        match self.value("scoring_func").and_then(Value::as_str) {
            None => Ok(default),
            Some("sigmoid") => Ok(Score::Sigmoid),
            Some("softmax") => Ok(Score::Softmax),
            Some(other) => Err(self.wrong("scoring_func", format!("\"{other}\" is neither sigmoid nor softmax"))),
        }
    }

    /// None where all groups are kept, or none is asked for.
    fn groups(&self) -> Result<Option<Groups>> {
        let (count, kept) =
            (self.optional_count("n_group")?.unwrap_or(1), self.optional_count("topk_group")?.unwrap_or(1));
        let (experts, chosen) = (self.count("n_routed_experts")?, self.count("num_experts_per_tok")?);
        self.check_choices(chosen, experts)?;
        if kept > count || !experts.is_multiple_of(count) || chosen > experts / count * kept {
            let why = format!(
                "{kept} of {count} groups (n_group) of {experts} experts do not hold {chosen} choices; use a divisor of \
                 {experts} for n_group, and groups enough"
            );
            return Err(self.wrong("topk_group", why));
        }
        let score = match self.value("topk_method").and_then(Value::as_str) {
            Some("greedy") => return Ok(None),
            Some("group_limited_greedy") => GroupScore::Best,
            _ => GroupScore::TwoBest,
        };
        Ok((kept < count).then_some(Groups { count, kept, score }))
    }

    /// Layers at the beginning that have a dense network; some have to be left.
    fn dense_layers(&self) -> Result<u64> {
        let (dense, all) = (self.whole("first_k_dense_replace")?.unwrap_or(0), self.count("num_hidden_layers")?);
        if dense >= all {
            let why = format!("{dense} leaves none of the {all} layers (num_hidden_layers) with experts; use fewer");
            return Err(self.wrong("first_k_dense_replace", why));
        }
        Ok(dense)
    }

    fn check_experts(&self, moe: &MoeSpec) -> Result<()> {
        self.check_choices(moe.top_k, moe.experts)
    }

    fn check_choices(&self, top_k: u64, experts: u64) -> Result<()> {
        match top_k > experts {
            true => {
                let why = format!("{top_k} is more than the {experts} experts there are; use {experts} or fewer");
                Err(self.wrong("num_experts_per_tok", why))
            }
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::find;
    use serde_json::json;

    fn tiny() -> Value {
        serde_json::from_str(&find("llm", "tiny").unwrap().text).unwrap()
    }

    fn with(changes: Value) -> Result<LlmSpec> {
        let mut config = tiny();
        for (key, value) in changes.as_object().unwrap() {
            match value.as_str() {
                Some("REMOVE") => drop(config.as_object_mut().unwrap().remove(key)),
                _ => config[key] = value.clone(),
            }
        }
        LlmSpec::parse("c.json", "c", &config.to_string())
    }

    #[test]
    fn defaults_follow_hugging_face() {
        let m = with(json!({"num_key_value_heads": "REMOVE", "rope_theta": "REMOVE", "head_dim": null})).unwrap();
        assert_eq!((m.kv_heads, m.rope_theta, m.head_dim), (8, 10000.0, 8));
        let new = json!({"rope_theta": "REMOVE", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}});
        let m = with(new).unwrap();
        assert_eq!((m.rope_theta, m.rope_scaled), (5e5, false));
        assert!(with(json!({"rope_scaling": {"factor": 8.0}})).unwrap().rope_scaled);
        assert_eq!(with(json!({"head_dim": 16})).unwrap().q_cols(), 128);
    }

    #[test]
    fn contradictions_are_refused_by_field() {
        for (changes, field, part) in [
            (json!({"model_type": "bert"}), "model_type", "llama, mistral, mixtral"),
            (json!({"model_type": "mixtral"}), "num_local_experts", "missing"),
            (json!({"model_type": "gpt2"}), "n_embd", "missing"),
            (json!({"model_type": "REMOVE"}), "model_type", "missing"),
            (json!({"num_key_value_heads": 3}), "num_key_value_heads", "3 does not divide the 8"),
            (json!({"num_key_value_heads": 16}), "num_key_value_heads", "does not divide"),
            (json!({"hidden_size": 0}), "hidden_size", "at least 1"),
            (json!({"hidden_size": 63}), "num_attention_heads", "does not divide hidden_size 63"),
            (json!({"hidden_size": "64"}), "hidden_size", "without quotes"),
            (json!({"hidden_size": -64}), "hidden_size", "-64"),
            (json!({"hidden_size": 6.5}), "hidden_size", "6.5"),
            (json!({"hidden_size": "REMOVE"}), "hidden_size", "missing"),
            (json!({"num_hidden_layers": 2000000}), "num_hidden_layers", "extra digits"),
            (json!({"vocab_size": 1e300}), "vocab_size", "extra digits"),
            (json!({"hidden_size": 400000000, "intermediate_size": 400000000}), "hidden_size", "extra digits"),
            (json!({"head_dim": 7}), "head_dim", "odd"),
            (json!({"rope_theta": -1.0}), "rope_theta", "above zero"),
            (json!({"tie_word_embeddings": 1}), "tie_word_embeddings", "neither true nor false"),
            (json!({"hidden_act": "gelu"}), "hidden_act", "silu"),
            (json!({"mlp_bias": true}), "mlp_bias", "biases"),
            (
                json!({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}),
                "num_experts_per_tok",
                "4 experts",
            ),
        ] {
            let err = with(changes.clone()).unwrap_err().to_string();
            assert!(err.starts_with(&format!("c.json: {field}: ")) && err.contains(part), "{changes}: {err}");
        }
    }

    #[test]
    fn a_file_cut_off_says_so() {
        let text = tiny().to_string();
        let err = LlmSpec::parse("c.json", "c", &text[..40]).unwrap_err().to_string();
        assert!(err.contains("ends early"), "{err}");
        let err = LlmSpec::parse("c.json", "c", "[1, 2]").unwrap_err().to_string();
        assert!(err.contains("not a JSON object"), "{err}");
    }
}
