//! Runs of mixtures of experts: their layers, the ranks that their experts are spread over, and who carries the rows.

use super::case::{Experts, Training};
use super::words::squeezed;
use crate::spec::{Gate, LlmSpec, MlaSpec, MoeSpec, Score};

/// DeepSeek-V2 and -V3 alike (arXiv:2405.04434, section 2.1; arXiv:2412.19437, section 4.2).
const LATENT: MlaSpec = MlaSpec { q_lora: None, kv_lora: 512, rope_dim: 64, nope_dim: 128, v_dim: 128 };

/// `model` with the experts, the heads and the attention of the mixture that is stated.
pub fn mixed(model: LlmSpec, run: &Training) -> Result<LlmSpec, String> {
    let Some(stated) = &run.experts else { return Ok(model) };
    let missing = |what: &str| format!("experts: {what} is not stated");
    let moe = MoeSpec {
        experts: stated.n.ok_or_else(|| missing("n"))?,
        top_k: stated.top_k.ok_or_else(|| missing("topk"))?,
        ffn: stated.ffn.or(run.ffn).ok_or_else(|| missing("moe_ffn"))?,
        shared_ffn: stated.shared.unwrap_or(0) * stated.ffn.unwrap_or(0),
        dense_layers: stated.dense_layers.unwrap_or(0),
        gate: gate(stated),
        groups: None,
    };
    let mla = stated.kv_lora.map(|kv_lora| MlaSpec { q_lora: stated.q_lora, kv_lora, ..LATENT });
    let mut mixed = LlmSpec { moe: Some(moe), mla, ..model };
    if let (Some(window), Some(seq)) = (stated.window, run.seq) {
        mixed.window = Some(between(window, seq));
    }
    Ok(mixed)
}

fn gate(stated: &Experts) -> Gate {
    // Costs are the same; a group of models has both.
    let score = if stated.kv_lora.is_some() { Score::Sigmoid } else { Score::Softmax };
    Gate { score, ..Gate::default() }
}

/// One window for layers that have one and layers that have none in turn (GPT-OSS, arXiv:2508.10925, section 2.2): a token sees as
/// many keys in it as it does on average. Of a window w it sees w - w^2/2s.
fn between(window: u64, seq: u64) -> u64 {
    let (w, s) = (window.min(seq) as f64, seq as f64);
    let seen = (w - w * w / (2.0 * s) + s / 2.0) / 2.0;
    (s - (s * s - 2.0 * s * seen).max(0.0).sqrt()).round() as u64
}

/// Ranks that the experts are spread over. Where nobody says: as many as a node has, or what of that divides them.
pub fn ep(run: &Training, model: &LlmSpec, stage: u32, node: u32) -> u32 {
    let Some(moe) = model.moe else { return 1 };
    let fits = |n: u32| stage.is_multiple_of(n) && moe.experts.is_multiple_of(u64::from(n));
    run.ep.unwrap_or_else(|| (1..=node.min(stage)).rev().find(|n| fits(*n)).unwrap_or(1))
}

/// Who carries the rows in the recipes of Megatron-Bridge, by model and GPU, the first line that fits
/// (github:NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs, 2025-11 to 2026-08).
const RECIPES: &[(&str, &str, &[&str])] = &[
    // In one domain of NVLink GPT-OSS has Megatron's own all-to-all, too, except in the newest recipes.
    ("gptoss", "", &[]),
    ("qwen3235b", "h100", &[]),
    ("qwen3235b", "b200", &[]),
    ("qwen3235b", "b300", &[]),
    ("", "", &["dispatch-hybrid-ep"]),
];

/// The words of who carries the rows, by what a source calls it; Megatron-LM's own all-to-all where it says nothing.
pub fn dispatch(run: &Training) -> &'static [&'static str] {
    let system = squeezed(&run.system);
    if ["megatronbridge", "nemo"].iter().any(|word| system.contains(word)) {
        let (model, gpu) = (squeezed(&run.model), squeezed(&run.gpu));
        let fits = |line: &&(&str, &str, &[&str])| model.contains(line.0) && gpu.starts_with(line.1);
        return RECIPES.iter().find(fits).map_or(&[], |line| line.2);
    }
    let names: &[(&str, &[&str])] = &[
        ("hybridep", &["dispatch-hybrid-ep"]),
        ("deepep", &["dispatch-deepep-v1-normal"]),
        // DeepSeek's own kernels came to be DeepEP; rows travel in FP8 (arXiv:2412.19437, section 3.3.3).
        ("hai-llm", &["dispatch-deepep-v1-normal", "dispatch-fp8"]),
        ("haillm", &["dispatch-deepep-v1-normal", "dispatch-fp8"]),
        ("allgather", &["dispatch-allgather"]),
    ];
    names.iter().find(|(name, _)| system.contains(name)).map_or(&[], |(_, words)| words)
}
