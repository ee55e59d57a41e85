//! Models that everybody knows by name: their sizes, and the length of the sequences they were trained on.

mod mixtures;

use crate::published::row::case::Training;
use crate::published::row::words::squeezed;

/// What the name of a model stands for; the source is the configuration that its makers published.
struct Known {
    names: &'static [&'static str],
    layers: u64,
    hidden: u64,
    heads: u64,
    kv_heads: u64,
    ffn: u64,
    gated: bool,
    vocab: u64,
    seq: u64,
}

/// [layers, hidden, heads, KV heads, ffn], gated or not, [vocabulary, sequence].
const fn known(names: &'static [&'static str], sizes: [u64; 5], gated: bool, tokens: [u64; 2]) -> Known {
    let [layers, hidden, heads, kv_heads, ffn] = sizes;
    Known { names, layers, hidden, heads, kv_heads, ffn, gated, vocab: tokens[0], seq: tokens[1] }
}

const KNOWN: &[Known] = &[
    known(&["llama7b"], [32, 4096, 32, 32, 11008], true, [32000, 2048]),
    known(&["llama13b"], [40, 5120, 40, 40, 13824], true, [32000, 2048]),
    known(&["llama33b", "llama30b"], [60, 6656, 52, 52, 17920], true, [32000, 2048]),
    known(&["llama65b"], [80, 8192, 64, 64, 22016], true, [32000, 2048]),
    // The foundation model stack trained Llama 2's shape.
    known(&["llama27b", "ibmfms7b"], [32, 4096, 32, 32, 11008], true, [32000, 4096]),
    known(&["llama213b"], [40, 5120, 40, 40, 13824], true, [32000, 4096]),
    known(&["llama234b"], [48, 8192, 64, 8, 22016], true, [32000, 4096]),
    // Only the second and third Llama have 70 billion weights.
    known(&["llama270b", "llama70b"], [80, 8192, 64, 8, 28672], true, [32000, 4096]),
    known(&["llama38b", "llama8b"], [32, 4096, 32, 8, 14336], true, [128256, 8192]),
    known(&["llama370b"], [80, 8192, 64, 8, 28672], true, [128256, 8192]),
    known(&["llama3405b", "llama405b"], [126, 16384, 128, 8, 53248], true, [128256, 8192]),
    known(&["bloom176b", "bloom"], [70, 14336, 112, 112, 57344], false, [250880, 2048]),
    known(&["opt175b"], [96, 12288, 96, 96, 49152], false, [50272, 2048]),
    known(&["mpt7b"], [32, 4096, 32, 32, 16384], false, [50432, 2048]),
    known(&["smollm33b", "smollm3"], [36, 2048, 16, 4, 11008], true, [128256, 4096]),
    known(&["starcoder155b", "starcoder"], [40, 6144, 48, 1, 24576], false, [49152, 8192]),
    known(&["pythia69b"], [32, 4096, 32, 32, 16384], false, [50432, 2048]),
    known(&["pythia12b"], [36, 5120, 40, 40, 20480], false, [50688, 2048]),
    known(&["gptneox20b", "gptneox"], [44, 6144, 64, 64, 24576], false, [50432, 2048]),
    known(&["falcon7b"], [32, 4544, 71, 1, 18176], false, [65024, 2048]),
    known(&["falcon40b"], [60, 8192, 128, 8, 32768], false, [65024, 2048]),
    known(&["mistral7b"], [32, 4096, 32, 8, 14336], true, [32000, 8192]),
    known(&["qwen18b"], [24, 2048, 16, 16, 5504], true, [151936, 8192]),
    known(&["qwen7b"], [32, 4096, 32, 32, 11008], true, [151936, 8192]),
    known(&["qwen14b"], [40, 5120, 40, 40, 13696], true, [152064, 8192]),
    known(&["qwen72b"], [80, 8192, 64, 64, 24576], true, [152064, 8192]),
    known(&["qwen1505b"], [24, 1024, 16, 16, 2816], true, [151936, 8192]),
    known(&["qwen1518b"], [24, 2048, 16, 16, 5504], true, [151936, 8192]),
    known(&["qwen154b"], [40, 2560, 20, 20, 6912], true, [151936, 8192]),
    known(&["qwen157b"], [32, 4096, 32, 32, 11008], true, [151936, 8192]),
    known(&["qwen1514b"], [40, 5120, 40, 40, 13696], true, [152064, 8192]),
    known(&["qwen1532b"], [64, 5120, 40, 8, 27392], true, [152064, 8192]),
    known(&["qwen1572b"], [80, 8192, 64, 64, 24576], true, [152064, 8192]),
    known(&["qwen15110b"], [80, 8192, 64, 8, 49152], true, [152064, 8192]),
    known(&["codeqwen157b"], [32, 4096, 32, 4, 13440], true, [92416, 8192]),
    known(&["chatglm36b", "chatglm26b"], [28, 4096, 32, 2, 13696], true, [65024, 8192]),
    known(&["glm49b"], [40, 4096, 32, 2, 13696], true, [151552, 8192]),
    known(&["minicpm2b"], [40, 2304, 36, 36, 5760], true, [122753, 4096]),
    known(&["gemma34b"], [34, 2560, 8, 4, 10240], true, [262208, 8192]),
    known(&["gemma312b"], [48, 3840, 16, 8, 15360], true, [262208, 8192]),
    known(&["gemma327b"], [62, 5376, 32, 16, 21504], true, [262208, 8192]),
    known(&["yi1534b"], [60, 7168, 56, 8, 20480], true, [64000, 4096]),
    known(&["yi156b"], [32, 4096, 32, 4, 11008], true, [64000, 4096]),
    known(&["yi159b"], [48, 4096, 32, 4, 11008], true, [64000, 4096]),
    known(&["qwen27b"], [28, 3584, 28, 4, 18944], true, [152064, 4096]),
    known(&["qwen272b"], [80, 8192, 64, 8, 29568], true, [152064, 4096]),
    known(&["llama323b"], [28, 3072, 24, 8, 8192], true, [128256, 8192]),
    known(&["codellama7b"], [32, 4096, 32, 32, 11008], true, [32016, 16384]),
    known(&["codellama13b"], [40, 5120, 40, 40, 13824], true, [32016, 16384]),
    known(&["codellama34b"], [48, 8192, 64, 8, 22016], true, [32000, 16384]),
    known(&["tinyllama11b", "tinyllama"], [22, 2048, 32, 4, 5632], true, [32000, 2048]),
    known(&["opt67b"], [32, 4096, 32, 32, 16384], false, [50272, 2048]),
    known(&["opt13b"], [40, 5120, 40, 40, 20480], false, [50272, 2048]),
    known(&["opt30b"], [48, 7168, 56, 56, 28672], false, [50272, 2048]),
    known(&["opt66b"], [64, 9216, 72, 72, 36864], false, [50272, 2048]),
    known(&["mpt30b"], [48, 7168, 64, 64, 28672], false, [50432, 2048]),
    known(&["starcoder23b"], [30, 3072, 24, 2, 12288], false, [49152, 4096]),
    known(&["starcoder27b"], [32, 4608, 36, 4, 18432], false, [49152, 4096]),
    known(&["starcoder215b"], [40, 6144, 48, 4, 24576], false, [49152, 4096]),
    known(&["pythia1b"], [16, 2048, 8, 8, 8192], false, [50304, 2048]),
    known(&["pythia14b"], [24, 2048, 16, 16, 8192], false, [50304, 2048]),
    known(&["pythia28b"], [32, 2560, 32, 32, 10240], false, [50304, 2048]),
    known(&["gptj6b", "gptj"], [28, 4096, 16, 16, 16384], false, [50400, 2048]),
    known(&["falcon180b"], [80, 14848, 232, 8, 59392], false, [65024, 2048]),
    known(&["glm130b"], [70, 12288, 96, 96, 32768], true, [150528, 2048]),
    known(&["nemotron415b"], [32, 6144, 48, 8, 24576], false, [256000, 4096]),
    known(&["nemotron4340b"], [96, 18432, 96, 8, 73728], false, [256000, 4096]),
    known(&["olmo7b"], [32, 4096, 32, 32, 11008], true, [50304, 2048]),
    known(&["olmo27b"], [32, 4096, 32, 32, 11008], true, [100352, 4096]),
    known(&["olmo37b"], [32, 4096, 32, 32, 11008], true, [100352, 8192]),
    known(&["olmo213b"], [40, 5120, 40, 40, 13824], true, [100352, 4096]),
    known(&["olmo232b"], [64, 5120, 40, 8, 27648], true, [100352, 4096]),
    known(&["olmo332b"], [64, 5120, 40, 8, 27648], true, [100352, 8192]),
    known(&["stablelm3b", "stablelm3b4e1t"], [32, 2560, 32, 32, 6912], true, [50304, 4096]),
    known(&["smollm217b"], [24, 2048, 32, 32, 8192], true, [49152, 2048]),
    known(&["yi6b"], [32, 4096, 32, 4, 11008], true, [64000, 4096]),
    known(&["yi34b"], [60, 7168, 56, 8, 20480], true, [64000, 4096]),
    known(&["deepseekllm7b", "deepseek7b"], [30, 4096, 32, 32, 11008], true, [102400, 4096]),
    known(&["deepseekllm67b", "deepseek67b"], [95, 8192, 64, 8, 22016], true, [102400, 4096]),
    known(&["internlm27b"], [32, 4096, 32, 8, 14336], true, [92544, 4096]),
    known(&["internlm220b"], [48, 6144, 48, 8, 16384], true, [92544, 4096]),
    known(&["baichuan7b"], [32, 4096, 32, 32, 11008], true, [64000, 4096]),
    known(&["baichuan13b"], [40, 5120, 40, 40, 13696], true, [64000, 4096]),
    known(&["baichuan27b"], [32, 4096, 32, 32, 11008], true, [125696, 4096]),
    known(&["baichuan213b"], [40, 5120, 40, 40, 13696], true, [125696, 4096]),
    known(&["apertus8b"], [32, 4096, 32, 8, 21504], false, [131072, 4096]),
    known(&["apertus70b"], [80, 8192, 64, 8, 43008], false, [131072, 4096]),
    known(&["phi3mini38b", "phi3mini", "phi35mini"], [32, 3072, 32, 32, 8192], true, [32064, 4096]),
    known(&["phi227b", "phi2"], [32, 2560, 32, 32, 10240], false, [51200, 2048]),
    known(&["deepseekcoder67b"], [32, 4096, 32, 32, 11008], true, [32256, 4096]),
    known(&["deepseekcoder33b"], [62, 7168, 56, 8, 19200], true, [32256, 4096]),
    known(&["gpt215b", "gpt2xl", "gpt2xl15b"], [48, 1600, 25, 25, 6400], false, [50257, 1024]),
    known(&["gpt2124m", "gpt2small", "gpt2"], [12, 768, 12, 12, 3072], false, [50257, 1024]),
    known(&["gpt2355m", "gpt2350m", "gpt2medium"], [24, 1024, 16, 16, 4096], false, [50257, 1024]),
    known(&["gpt2774m", "gpt2762m", "gpt2large"], [36, 1280, 20, 20, 5120], false, [50257, 1024]),
    known(&["gptneo27b"], [32, 2560, 20, 20, 10240], false, [50257, 2048]),
    known(&["codegen16b"], [34, 6144, 24, 24, 24576], false, [51200, 2048]),
    known(&["bloom71b", "bloom7b1"], [30, 4096, 32, 32, 16384], false, [250880, 2048]),
    known(&["yi9b"], [48, 4096, 32, 4, 11008], true, [64000, 4096]),
    known(&["internlm7b"], [32, 4096, 32, 32, 11008], true, [103168, 2048]),
    known(&["internlm20b"], [60, 5120, 40, 40, 13824], true, [103168, 4096]),
    known(&["skywork13b"], [52, 4608, 36, 36, 12288], true, [65536, 4096]),
    known(&["qwen215b"], [28, 1536, 12, 2, 8960], true, [151936, 4096]),
    known(&["qwen23b"], [36, 2048, 16, 2, 11008], true, [151936, 4096]),
    known(&["qwen214b"], [48, 5120, 40, 8, 13824], true, [152064, 4096]),
    known(&["qwen232b"], [64, 5120, 40, 8, 27648], true, [152064, 4096]),
    known(&["qwen38b"], [36, 4096, 32, 8, 12288], true, [151936, 4096]),
    known(&["qwen314b"], [40, 5120, 40, 8, 17408], true, [151936, 4096]),
    known(&["llama321b"], [16, 2048, 32, 8, 8192], true, [128256, 8192]),
    known(&["qwen34b"], [36, 2560, 32, 8, 9728], true, [151936, 4096]),
    known(&["qwen317b"], [28, 2048, 16, 8, 6144], true, [151936, 4096]),
    known(&["qwen306b"], [28, 1024, 16, 8, 3072], true, [151936, 4096]),
    known(&["qwen332b"], [64, 5120, 64, 8, 25600], true, [151936, 4096]),
    known(&["qwen205b"], [24, 896, 14, 2, 4864], true, [151936, 4096]),
    known(&["mistralnemo12b", "mistral12b", "mistralnemo"], [40, 5120, 32, 8, 14336], true, [131072, 8192]),
    known(&["mistralsmall24b", "mistral24b"], [40, 5120, 32, 8, 32768], true, [131072, 8192]),
    known(
        &["mistrallarge123b", "mistral123b", "mistrallarge", "mistrallarge2", "mistrallarge2123b"],
        [88, 12288, 96, 8, 28672],
        true,
        [32768, 8192],
    ),
    known(&["codestral22b"], [56, 6144, 48, 8, 16384], true, [32768, 8192]),
    known(&["phi414b", "phi4"], [40, 5120, 40, 10, 17920], true, [100352, 4096]),
    known(&["phi3medium14b", "phi314b", "phi3medium"], [40, 5120, 40, 10, 17920], true, [32064, 4096]),
    known(&["gemma2b"], [18, 2048, 8, 1, 16384], true, [256000, 8192]),
    known(&["gemma7b"], [28, 3072, 16, 16, 24576], true, [256000, 8192]),
    known(&["gemma29b"], [42, 3584, 16, 8, 14336], true, [256000, 8192]),
    known(&["gemma227b"], [46, 4608, 32, 16, 36864], true, [256000, 8192]),
    known(&["granite7b"], [32, 4096, 32, 32, 11008], true, [32008, 4096]),
    known(&["granite38b", "granite8b"], [40, 4096, 32, 8, 12800], true, [49155, 4096]),
    known(&["opt1.3b"], [24, 2048, 32, 32, 8192], false, [50272, 2048]),
    known(&["opt27b"], [32, 2560, 32, 32, 10240], false, [50272, 2048]),
    known(&["gptneo13b"], [24, 2048, 16, 16, 8192], false, [50257, 2048]),
    known(&["bloom3b"], [30, 2560, 32, 32, 10240], false, [250880, 2048]),
    known(&["commandr35b"], [40, 8192, 64, 64, 22528], true, [256000, 8192]),
    known(&["commandr104b", "commandr+", "commandrplus"], [64, 12288, 96, 8, 33792], true, [256000, 8192]),
    known(&["commandr7b"], [32, 4096, 32, 8, 14336], true, [256000, 8192]),
    known(&["gpt3"], [96, 12288, 96, 96, 49152], false, [50257, 2048]),
    known(&["falcon11b"], [60, 4096, 32, 8, 16384], false, [65024, 8192]),
];

/// Widths of heads that are no equal parts of the width of the model.
const HEAD_DIMS: &[(&str, u64)] = &[
    ("qwen34b", 128),
    ("qwen306b", 128),
    ("qwen332b", 128),
    ("mistralnemo12b", 128),
    ("mistral12b", 128),
    ("mistralsmall24b", 128),
    ("mistral24b", 128),
    ("gemma7b", 256),
    ("gemma29b", 256),
    ("gemma227b", 128),
    ("gemma34b", 256),
    ("gemma312b", 256),
    ("gemma327b", 128),
];

/// Lengths of mixtures, whose sizes are among the shipped models.
const MIXTURES: &[(&str, u64)] =
    &[("qwen3next80ba3b", 4096), ("deepseekv3", 4096), ("mixtral8x7b", 32768), ("mixtral8x22b", 65536)];

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
fn of(name: &str) -> Option<&'static Known> {
    let find = |name: &str| KNOWN.iter().find(|known| known.names.contains(&name));
    find(&bare(name)).or_else(|| find(&plain(name)))
}

fn head_dim(name: &str) -> Option<u64> {
    let name = plain(name);
    HEAD_DIMS.iter().find(|(known, _)| *known == name).map(|(_, width)| *width)
}

/// Tokens of the sequences that a model was trained on.
pub fn length(model: &str) -> Option<u64> {
    let shipped = || MIXTURES.iter().find(|(name, _)| *name == plain(model)).map(|(_, seq)| *seq);
    of(model).map(|known| known.seq).or_else(shipped).or_else(|| mixtures::length(model))
}

/// The run with the sizes of its model where none is stated.
pub fn filled_in(run: &Training) -> Training {
    let mut run = mixtures::filled_in(run).unwrap_or_else(|| run.clone());
    let Some(known) = of(&run.model) else { return run };
    if run.layers.is_none() && run.hidden.is_none() {
        (run.layers, run.hidden, run.heads) = (Some(known.layers), Some(known.hidden), Some(known.heads));
        (run.kv_heads, run.ffn, run.vocab) = (Some(known.kv_heads), Some(known.ffn), Some(known.vocab));
        run.gated_ffn = Some(known.gated);
        run.head_dim = run.head_dim.or_else(|| head_dim(&run.model));
    }
    run
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
        for known in KNOWN {
            let number = |c: &char| c.is_ascii_digit() || *c == '.';
            let digits: String = known.names[0].chars().rev().skip(1).take_while(number).collect();
            let said: f64 = digits.chars().rev().collect::<String>().parse().unwrap_or(176.0);
            let wide = head_dim(known.names[0]).unwrap_or(known.hidden / known.heads);
            let layer = 2 * known.hidden * (known.heads + known.kv_heads) * wide
                + known.hidden * known.ffn * if known.gated { 3 } else { 2 };
            // Tables of words: small models without a tied one have two, and MiniCPM's name counts none.
            let tables = match known.names[0] {
                "minicpm2b" => 0,
                "qwen18b" | "qwen1518b" => 2,
                _ => 1,
            };
            let unit = if known.names[0].ends_with('m') { 1e-6 } else { 1e-9 };
            let weights = (known.layers * layer + tables * known.vocab * known.hidden) as f64 * unit;
            // The version's figure stands before the size's: any tail of the digits may be meant, or tenths.
            let tails = (0..digits.len()).map(|n| said % 10f64.powi(n as i32 + 1)).flat_map(|t| [t, t / 10.0]);
            let rounds = ["llama321b", "gemma2b", "gemma7b", "minicpm2b", "commandr7b"].contains(&known.names[0]);
            assert!(
                tails.chain([said]).any(|size| (weights / size - 1.0).abs() < if rounds { 0.26 } else { 0.12 }),
                "{:?}: {weights}",
                known.names
            );
        }
    }
}
