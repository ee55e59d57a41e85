//! A small model and a way to run it, and that what runs is the reference's.

use crate::dense::{self, largest};
use foretrain::exec::reference::StepResult;
use foretrain::plan::{Dtype, Engine, Plan};
use foretrain::spec::{LlmSpec, MlaSpec, Mlp, Norm, Parallelism, Positions, Workload};
use foretrain::strategy::{Engines, build};
use std::collections::BTreeSet;

#[derive(Debug, Clone)]
pub struct Case {
    pub layers: u64,
    pub kv_heads: u64,
    pub group: u64,
    pub head_dim: u64,
    pub ffn: u64,
    pub tie: bool,
    pub seq_units: u64,
    pub batch: u64,
    pub microbatches: u64,
    pub par: Parallelism,
    pub dtype: Dtype,
    /// Makes another model of a Llama.
    pub family: fn(&mut LlmSpec),
    pub window: Option<u64>,
    /// Where documents end, as shares of the sequence.
    pub cuts: Vec<f64>,
}

impl Case {
    pub fn model(&self) -> LlmSpec {
        let heads = self.kv_heads * self.group;
        let json = serde_json::json!({
            "model_type": "llama", "hidden_size": 12, "num_hidden_layers": self.layers,
            "num_attention_heads": heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.ffn, "vocab_size": 29, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
            "tie_word_embeddings": self.tie, "torch_dtype": "float32", "hidden_act": "silu",
        });
        let mut model = LlmSpec::parse("test", "random", &json.to_string()).expect("a sound model");
        (self.family)(&mut model);
        model.window = self.window;
        model
    }

    pub fn work(&self) -> Workload {
        let unit = 2 * u64::from(self.par.ring) * u64::from(self.par.ulysses) * u64::from(self.par.tp);
        let seq_len = unit * self.seq_units;
        Workload {
            seq_len,
            global_batch: self.batch * self.microbatches * u64::from(self.par.dp),
            micro_batch: self.batch,
            dtype: self.dtype,
            documents: self.documents(seq_len).into(),
        }
    }

    /// Lengths of documents; none where there is but one.
    fn documents(&self, seq_len: u64) -> Vec<u64> {
        let ends: BTreeSet<u64> = self.cuts.iter().map(|cut| (cut * seq_len as f64) as u64).chain([seq_len]).collect();
        let ends: Vec<u64> = ends.into_iter().filter(|end| *end > 0).collect();
        let starts = std::iter::once(&0).chain(&ends);
        let lengths = ends.iter().zip(starts).map(|(end, start)| end - start);
        // Learned positions go on through documents, which is refused.
        let learned = matches!(self.model().positions, Positions::Learned { .. });
        if ends.len() > 1 && !learned { lengths.collect() } else { vec![] }
    }

    pub fn plan(&self) -> Plan {
        let engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 16 } };
        build(&self.model(), &self.work(), &self.par, engines).expect("a feasible case")
    }
}

pub fn case() -> Case {
    let par = Parallelism::default();
    Case {
        layers: 2,
        kv_heads: 2,
        group: 2,
        head_dim: 4,
        ffn: 10,
        tie: false,
        seq_units: 4,
        batch: 1,
        microbatches: 1,
        par,
        dtype: Dtype::F64,
        family: llama,
        window: None,
        cuts: vec![],
    }
}

/// The case with some words.
pub fn said(words: &str, ring: u32, ulysses: u32) -> Case {
    let options = words.parse().unwrap();
    Case { par: Parallelism { ring, ulysses, options, ..Parallelism::default() }, ..case() }
}

/// What passes a norm over two or four numbers all but cancels: rounding in f32 is of the size of the terms, and those of
/// the largest gradients show it. Of two hundredths of them a tolerance of 1e-4 is some 30 of their last places.
pub fn least(want: &StepResult) -> f64 {
    0.02 * want.grads.values().map(|grad| largest(grad)).fold(0.0, f64::max)
}

/// Behind a gradient of these models are some 500 roundings, 2^-53 or 2^-24 each: 6e-14 and 2e-5 at worst. What is logically
/// wrong is off by more than a hundredth.
const F64: f64 = 1e-12;
pub const F32: f64 = 1e-4;

/// The case is the reference, as near as rounding to its dtype lets it be.
#[track_caller]
pub fn holds(case: &Case) {
    holds_within(case, if case.dtype == Dtype::F32 { F32 } else { F64 });
}

#[track_caller]
pub fn holds_within(case: &Case, tolerance: f64) {
    dense::holds_beside(&case.plan(), tolerance, |want| if case.dtype == Dtype::F32 { least(want) } else { 0.0 });
}

pub type Family = fn(&mut LlmSpec);

pub fn llama(_: &mut LlmSpec) {}

/// GPT-2's block, GPT-3's and BLOOM's but for where they have their positions from.
pub fn gpt2(m: &mut LlmSpec) {
    (m.norm, m.mlp, m.bias, m.positions) = (Norm::Layer, Mlp::Gelu, true, Positions::Learned { max: 400 });
}

/// The same in training.
pub fn gpt2_dropping(m: &mut LlmSpec) {
    gpt2(m);
    m.dropout = 0.2;
}

/// A quarter of a head turns, or two elements at least.
pub fn neox(m: &mut LlmSpec) {
    (m.norm, m.mlp, m.bias, m.parallel_block, m.own_norms, m.rotary_dim) =
        (Norm::Layer, Mlp::Gelu, true, true, true, Some(2));
}

/// BLOOM's block.
pub fn bloom(m: &mut LlmSpec) {
    (m.norm, m.mlp, m.bias, m.positions) = (Norm::Layer, Mlp::Gelu, true, Positions::Alibi);
}

/// MPT's.
pub fn mpt(m: &mut LlmSpec) {
    (m.norm, m.mlp, m.positions) = (Norm::Layer, Mlp::Gelu, Positions::Alibi);
}

pub fn megascale(m: &mut LlmSpec) {
    (m.norm, m.mlp, m.bias, m.parallel_block, m.positions) = (Norm::Layer, Mlp::Gelu, true, true, Positions::None);
}

pub fn qwen2(m: &mut LlmSpec) {
    m.qkv_bias = true;
}

pub fn qwen3(m: &mut LlmSpec) {
    m.qk_norm = true;
}

/// DeepSeek's attention: heads of 4 + 2 elements, values of 3.
pub fn latent(m: &mut LlmSpec) {
    m.kv_heads = m.heads;
    m.head_dim = 6;
    m.mla = Some(MlaSpec { q_lora: Some(7), kv_lora: 5, rope_dim: 2, nope_dim: 4, v_dim: 3 });
}

/// The same with queries projected at once.
pub fn latent_keys(m: &mut LlmSpec) {
    latent(m);
    m.mla = m.mla.map(|mla| MlaSpec { q_lora: None, ..mla });
}

/// One norm, SwiGLU and no bias beside each other, as PaLM has it; layer norms without biases, as MPT; dropped.
pub fn palm(m: &mut LlmSpec) {
    (m.parallel_block, m.norm, m.dropout) = (true, Norm::Layer, 0.1);
}
