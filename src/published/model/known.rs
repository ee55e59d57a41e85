//! Models that everybody knows by name: their sizes, and the length of the sequences they were trained on.

use crate::published::row::case::{Experts, Training};
use crate::published::row::words::squeezed;
use crate::spec::{KnownExperts, KnownLength, KnownSizes};
use std::sync::LazyLock;

static SIZES: LazyLock<Vec<KnownSizes>> =
    LazyLock::new(|| KnownSizes::shipped().expect("tests read the file that is shipped"));

static LENGTHS: LazyLock<Vec<KnownLength>> =
    LazyLock::new(|| KnownLength::shipped().expect("tests read the file that is shipped"));

/// What follows a size: what a model was made for, or which release it is.
const BEHIND: &[&str] = &["instruct", "chat", "hf", "it", "v0.1", "v0.2", "v0.3", "v1.0"];

/// A name without its maker's in front, what it was made for and what stands in brackets.
pub fn bare(name: &str) -> String {
    let outside = name.split('(').next().unwrap_or_default();
    let mut word = squeezed(outside.rsplit('/').next().unwrap_or_default());
    while let Some(short) = BEHIND.iter().find_map(|behind| word.strip_suffix(behind)).filter(|w| w.len() > 3) {
        word = short.into();
    }
    word
}

/// The name as the table has it: one word, without what is said of a version, a shape or a maker.
fn plain(name: &str) -> String {
    let outside = bare(name);
    let word = outside.replace("3.1", "3").replace("3.2", "32").replace("3.3", "3").replace("2.5", "2");
    let word = word.replace('.', "").replace("like", "").replace("base", "");
    word.strip_prefix("meta").map_or(word.clone(), String::from)
}

/// The line of a name; that of a name with its point first, without which 1.3 billion would be 13.
fn of(name: &str) -> Option<&'static KnownSizes> {
    let find = |name: &str| SIZES.iter().find(|known| known.names.iter().any(|of| of == name));
    find(&bare(name)).or_else(|| find(&plain(name)))
}

/// Tokens of the sequences that a model was trained on.
pub fn length(model: &str) -> Option<u64> {
    let shipped = || LENGTHS.iter().find(|known| known.name == plain(model)).map(|known| known.seq);
    of(model).map(|known| known.seq).or_else(shipped)
}

/// The run with the sizes of its model where none is stated, and with the experts of a mixture that it states none of.
pub fn filled_in(run: &Training) -> Training {
    let open = run.layers.is_none() && run.hidden.is_none();
    let fits = |known: &&KnownSizes| open && (known.experts.is_none() || run.experts.is_none());
    let Some(known) = of(&run.model).filter(fits) else { return run.clone() };
    Training {
        layers: Some(known.layers),
        hidden: Some(known.hidden),
        heads: Some(known.heads),
        kv_heads: Some(known.kv_heads),
        // Experts come with the heads that they were made with.
        head_dim: if known.experts.is_some() { known.head_dim } else { run.head_dim.or(known.head_dim) },
        ffn: Some(known.ffn),
        gated_ffn: Some(known.gated_ffn),
        vocab: Some(known.vocab),
        experts: known.experts.as_ref().map(stated).or(run.experts.clone()),
        ..run.clone()
    }
}

/// Experts as a row would state them.
fn stated(known: &KnownExperts) -> Experts {
    let [n, top_k, ffn, shared, dense_layers] =
        [known.n, known.top_k, known.ffn, known.shared, known.dense_layers].map(Some);
    Experts { n, top_k, ffn, shared, dense_layers, kv_lora: known.kv_lora, ..Experts::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_many_spellings() {
        for (name, layers) in [
            ("LLaMA-65B", 80),
            ("Llama2-34B", 48),
            ("Llama3.1-405B", 126),
            ("Meta Llama 3 8B", 32),
            ("Llama-like 70b", 80),
            ("SmolLM3-3B", 36),
            ("StarCoderBase-15.5B", 40),
            ("Pythia-6.9B", 32),
            ("Llama-3.2-3B", 28),
            ("OLMo-2 13B", 40),
            ("Nemotron-4 340B", 96),
            ("Llama-3.2 1B", 16),
            ("OPT-1.3B", 24),
            ("OPT-13B", 40),
            ("GPT-2", 12),
            ("GPT-2 (124M)", 12),
            ("gpt2-medium", 24),
            ("mistralai/Mistral-7B-Instruct-v0.3", 32),
            ("google/gemma-2-27b-it", 46),
            ("Llama-2-13b-chat-hf", 40),
            ("Command R+", 64),
            ("Command R7B", 32),
            ("Mistral Large 2", 88),
            ("GPT-3", 96),
        ] {
            let run = Training { model: name.into(), ..Training::default() };
            assert_eq!(filled_in(&run).layers, Some(layers), "{name}");
        }
        let own = Training { model: "Llama-2 7B".into(), layers: Some(2), hidden: Some(64), ..Training::default() };
        assert_eq!((filled_in(&own).layers, length(&own.model)), (Some(2), Some(4096)));
        let unknown = Training { model: "a model".into(), ..Training::default() };
        assert_eq!(filled_in(&unknown), unknown);
    }

    /// Weights of a shape are those of the name, to a tenth; Google and Meta round some of theirs down.
    #[test]
    fn sizes_are_those_of_the_name() {
        for known in SIZES.iter().filter(|known| known.experts.is_none()) {
            let name = known.names[0].as_str();
            let number = |c: &char| c.is_ascii_digit() || *c == '.';
            let digits: String = name.chars().rev().skip(1).take_while(number).collect();
            let said: f64 = match name {
                "gpt3" => 175.0,
                _ => digits.chars().rev().collect::<String>().parse().unwrap(),
            };
            let wide = known.head_dim.unwrap_or(known.hidden / known.heads);
            let layer = 2 * known.hidden * (known.heads + known.kv_heads) * wide
                + known.hidden * known.ffn * if known.gated_ffn { 3 } else { 2 };
            // Tables of words: small models without a tied one have two, and MiniCPM's name counts none.
            let tables = match name {
                "minicpm2b" => 0,
                "qwen18b" | "qwen1518b" => 2,
                _ => 1,
            };
            let unit = if name.ends_with('m') { 1e-6 } else { 1e-9 };
            let weights = (known.layers * layer + tables * known.vocab * known.hidden) as f64 * unit;
            // The version's figure stands before the size's: any tail of the digits may be meant, or tenths.
            let tails = (0..digits.len()).map(|n| said % 10f64.powi(n as i32 + 1)).flat_map(|t| [t, t / 10.0]);
            let rounds = ["llama321b", "gemma2b", "gemma7b", "minicpm2b", "commandr7b"].contains(&name);
            assert!(
                tails.chain([said]).any(|size| (weights / size - 1.0).abs() < if rounds { 0.26 } else { 0.12 }),
                "{name}: {weights}"
            );
        }
    }

    /// Billions of weights of the checkpoints of mixtures, by the cards of the models.
    #[test]
    fn weights_of_mixtures_are_those_of_their_cards() {
        let billions = [
            ("dbrx", 132.0),
            ("grok1", 314.0),
            ("hunyuana13b", 80.4),
            ("ernie4521ba3b", 21.8),
            ("phi35moe", 41.9),
            ("olmoe1b7b", 6.9),
            ("qwen15moea27b", 14.3),
            ("qwen257ba14b", 57.4),
            ("deepseekmoe16b", 16.4),
            ("linglite", 16.8),
            ("qwen3coder480ba35b", 480.0),
            ("ernie45300ba47b", 300.0),
            ("minimaxm2", 229.0),
            ("dotsllm1", 142.0),
            ("granite303ba800m", 3.37),
            ("granite301ba400m", 1.38),
            ("moonlight16ba3b", 16.0),
        ];
        assert_eq!(billions.len(), SIZES.iter().filter(|known| known.experts.is_some()).count());
        for (name, said) in billions {
            let known = of(name).unwrap();
            let experts = known.experts.as_ref().unwrap();
            let (hidden, heads, width) = (known.hidden, known.heads, known.head_dim.unwrap());
            let whole = 2 * hidden * (heads + known.kv_heads) * width;
            // Queries with 64 turned elements a head, what is compressed with as many, keys and values of it, and the output.
            let latent =
                |kv: u64| hidden * (heads * (width + 64) + kv + 64) + 2 * kv * heads * width + heads * width * hidden;
            let attention = experts.kv_lora.map_or(whole, latent);
            let mixed = (known.layers - experts.dense_layers) * 3 * hidden * experts.ffn * (experts.n + experts.shared);
            let dense = experts.dense_layers * 3 * hidden * known.ffn;
            let weights = known.layers * attention + mixed + dense + 2 * known.vocab * hidden;
            let weights = weights as f64 * 1e-9;
            assert!((weights / said - 1.0).abs() < 0.03, "{name}: {weights}");
        }
    }

    #[test]
    fn a_name_brings_experts_unless_a_row_has_its_own() {
        let run = Training { model: "databricks/dbrx-instruct".into(), ..Training::default() };
        assert_eq!(filled_in(&run).experts.and_then(|experts| experts.n), Some(16));
        let own = Training { layers: Some(2), ..run };
        assert_eq!(filled_in(&own), own);
    }
}
