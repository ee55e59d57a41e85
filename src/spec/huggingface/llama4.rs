//! Llama 4: experts in every layer (Scout) or every second one (Maverick), beside one that every token visits; three layers
//! of four see chunks of the sequence, and the fourth all of it, without positions.

use super::{Config, llama_like, placed};
use crate::error::Result;
use crate::spec::{Gate, LlmSpec, MoeSpec, Score};

pub fn read(config: &Config) -> Result<LlmSpec> {
    let like = llama_like(config)?;
    let width = config.count("intermediate_size")?;
    let every = config.optional_count("interleave_moe_layer_step")?.unwrap_or(1);
    let listed = placed::layers(config, "moe_layers", like.layers)?;
    let in_turn = |l: &u64| (l + 1).is_multiple_of(every);
    // Other layers than each interleave_moe_layer_step-th.
    let others = !listed.is_empty() && listed != (0..like.layers).filter(in_turn).collect::<Vec<u64>>();
    let dense_at = (0..like.layers).filter(|l| others && !listed.contains(l)).collect();
    let moe = MoeSpec {
        experts: config.count("num_local_experts")?,
        top_k: config.optional_count("num_experts_per_tok")?.unwrap_or(1),
        ffn: width,
        shared_ffn: width,
        every: if others { 0 } else { every },
        gate: Gate { score: Score::Sigmoid, normalise: false, scale: 1.0 },
        ..MoeSpec::default()
    };
    config.check_experts(&moe)?;
    let chunk = config.optional_count("attention_chunk_size")?.unwrap_or(8192);
    let mut notes = vec![format!(
        "attention_chunk_size {chunk}: chunks are costed as a window of as many keys: as much work to {chunk} tokens, up to \
         twice as much beyond; all layers turn their heads"
    )];
    if config.flag_or("use_qk_norm", true)? {
        notes.push("use_qk_norm: heads are scaled to a length without weights, which is left out".into());
    }
    Ok(LlmSpec {
        ffn: config.optional_count("intermediate_size_mlp")?.unwrap_or(16384),
        moe: Some(moe),
        dense_at,
        window: Some(chunk),
        notes,
        ..like
    })
}
