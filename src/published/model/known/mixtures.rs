//! Mixtures of experts that everybody knows by name and that no file ships: their sizes as their makers published them, as
//! remembered, not looked up; their weights are held against the names below.

use super::plain;
use crate::published::row::case::{Experts, Training};

struct Mixture {
    name: &'static str,
    /// Layers, width, heads, KV heads, their width, the vocabulary.
    sizes: [u64; 6],
    /// Experts, how many a token visits, their width, those that every token visits, layers without, and their width.
    experts: [u64; 6],
    seq: u64,
}

const fn mixture(name: &'static str, sizes: [u64; 6], experts: [u64; 6], seq: u64) -> Mixture {
    Mixture { name, sizes, experts, seq }
}

const MIXTURES: &[Mixture] = &[
    mixture("dbrx", [40, 6144, 48, 8, 128, 100352], [16, 4, 10752, 0, 0, 10752], 4096),
    mixture("grok1", [64, 6144, 48, 8, 128, 131072], [8, 2, 32768, 0, 0, 32768], 8192),
    mixture("hunyuana13b", [32, 4096, 32, 8, 128, 128167], [64, 8, 3072, 1, 0, 3072], 4096),
    mixture("ernie4521ba3b", [28, 2560, 20, 4, 128, 103424], [64, 6, 1536, 2, 1, 12288], 4096),
    mixture("phi35moe", [32, 4096, 32, 8, 128, 32064], [16, 2, 6400, 0, 0, 6400], 4096),
    mixture("olmoe1b7b", [16, 2048, 16, 16, 128, 50304], [64, 8, 1024, 0, 0, 1024], 4096),
    mixture("qwen15moea27b", [24, 2048, 16, 16, 128, 151936], [60, 4, 1408, 4, 0, 5632], 4096),
    mixture("qwen257ba14b", [28, 3584, 28, 4, 128, 151936], [64, 8, 2560, 8, 0, 18944], 4096),
    mixture("deepseekmoe16b", [28, 2048, 16, 16, 128, 102400], [64, 6, 1408, 2, 1, 10944], 4096),
    mixture("linglite", [28, 2048, 16, 4, 128, 126464], [64, 6, 1408, 2, 0, 5632], 4096),
    mixture("qwen3coder480ba35b", [62, 6144, 96, 8, 128, 151936], [160, 8, 2560, 0, 0, 2560], 4096),
    mixture("ernie45300ba47b", [54, 8192, 64, 8, 128, 103424], [64, 8, 3584, 0, 3, 28672], 4096),
    mixture("minimaxm2", [62, 3072, 48, 8, 128, 200064], [256, 8, 1536, 0, 0, 1536], 4096),
    mixture("dotsllm1", [62, 4096, 32, 32, 128, 152064], [128, 6, 1408, 2, 1, 10944], 8192),
    mixture("granite303ba800m", [32, 1536, 24, 8, 64, 49155], [40, 8, 512, 0, 0, 512], 4096),
    mixture("granite301ba400m", [24, 1024, 16, 8, 64, 49155], [32, 8, 512, 0, 0, 512], 4096),
    mixture("moonlight16ba3b", [27, 2048, 16, 16, 128, 163840], [64, 6, 1408, 2, 1, 11264], 8192),
];

/// Columns that the keys and values of a mixture with latent attention are compressed to; queries are projected at once, and
/// heads are as wide as DeepSeek-V2's.
const LATENT: &[(&str, u64)] = &[("moonlight16ba3b", 512)];

fn kv_lora(known: &Mixture) -> Option<u64> {
    LATENT.iter().find(|(name, _)| *name == known.name).map(|(_, columns)| *columns)
}

fn of(model: &str) -> Option<&'static Mixture> {
    let name = plain(model);
    MIXTURES.iter().find(|known| known.name == name)
}

/// Tokens of the sequences that such a mixture is trained on.
pub fn length(model: &str) -> Option<u64> {
    of(model).map(|known| known.seq)
}

/// The run with the sizes and the experts of its mixture, where it states none.
pub fn filled_in(run: &Training) -> Option<Training> {
    let known = of(&run.model).filter(|_| run.layers.is_none() && run.hidden.is_none() && run.experts.is_none())?;
    let ([layers, hidden, heads, kv_heads, head_dim, vocab], [n, top_k, ffn, shared, dense_layers, dense]) =
        (known.sizes, known.experts);
    let [n, top_k, ffn, shared, dense_layers] = [n, top_k, ffn, shared, dense_layers].map(Some);
    Some(Training {
        layers: Some(layers),
        hidden: Some(hidden),
        heads: Some(heads),
        kv_heads: Some(kv_heads),
        head_dim: Some(head_dim),
        vocab: Some(vocab),
        ffn: Some(dense),
        gated_ffn: Some(true),
        experts: Some(Experts { n, top_k, ffn, shared, dense_layers, kv_lora: kv_lora(known), ..Experts::default() }),
        ..run.clone()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Billions of weights of the checkpoints, by the cards of the models.
    #[test]
    fn weights_are_those_of_the_names() {
        let billions =
            [132.0, 314.0, 80.4, 21.8, 41.9, 6.9, 14.3, 57.4, 16.4, 16.8, 480.0, 300.0, 229.0, 142.0, 3.37, 1.38, 16.0];
        assert_eq!(billions.len(), MIXTURES.len());
        for (known, said) in MIXTURES.iter().zip(billions) {
            let [layers, hidden, heads, kv_heads, width, vocab] = known.sizes;
            let [n, _, ffn, shared, dense_layers, dense] = known.experts;
            let whole = 2 * hidden * (heads + kv_heads) * width;
            // Queries with 64 turned elements a head, what is compressed with as many, keys and values of it, and the output.
            let latent =
                |kv: u64| hidden * (heads * (width + 64) + kv + 64) + 2 * kv * heads * width + heads * width * hidden;
            let attention = kv_lora(known).map_or(whole, latent);
            let experts = (layers - dense_layers) * 3 * hidden * ffn * (n + shared);
            let weights = layers * attention + experts + dense_layers * 3 * hidden * dense + 2 * vocab * hidden;
            let weights = weights as f64 * 1e-9;
            assert!((weights / said - 1.0).abs() < 0.03, "{}: {weights}", known.name);
        }
    }

    #[test]
    fn a_name_brings_experts_unless_a_row_has_its_own() {
        let run = Training { model: "databricks/dbrx-instruct".into(), ..Training::default() };
        assert_eq!(filled_in(&run).and_then(|run| run.experts?.n), Some(16));
        assert_eq!(filled_in(&Training { layers: Some(2), ..run }), None);
    }
}
