//! The model: from the sizes a source states, or from its name, or from the number of its weights.

use super::known::{bare, length};
use super::mixture::{is_dualpipe, is_without_ahead, mixed};
use crate::published::row::case::{Experts, Training};
use crate::published::row::words::{affirmed, number_behind, squeezed, tokens};
use crate::published::software::habits::Habits;
use crate::published::software::recipe;
use crate::published::split::USUAL;
use crate::spec::{LlmSpec, Mlp, Norm, Parallelism, Positions, shipped};

/// A known shape: billions of weights, layers, hidden, heads.
type Shape = (f64, u64, u64, u64);

/// Shapes of GPT by size: Brown et al., arXiv:2005.14165, table 2.1; Narayanan et al., arXiv:2104.04473, table 1. That of 1.2
/// billion is DeepSpeed-Ulysses' (arXiv:2309.14509), on up to 64 GPUs for one sequence: its heads are taken to be 64.
const GPT: &[Shape] = &[
    (0.125, 12, 768, 12),
    (0.35, 24, 1024, 16),
    (0.76, 24, 1536, 16),
    (1.2, 24, 2048, 64),
    (1.3, 24, 2048, 32),
    (1.7, 24, 2304, 24),
    (2.7, 32, 2560, 32),
    (3.6, 30, 3072, 32),
    (6.7, 32, 4096, 32),
    (7.5, 36, 4096, 32),
    (13.0, 40, 5120, 40),
    (18.4, 40, 6144, 48),
    (22.0, 48, 6144, 64),
    (30.0, 48, 7168, 56),
    (39.1, 48, 8192, 64),
    (76.1, 60, 10240, 80),
    (145.6, 80, 12288, 96),
    (175.0, 96, 12288, 96),
    (310.1, 96, 16384, 128),
    (529.6, 105, 20480, 128),
    (1008.0, 128, 25600, 160),
];

/// A model, and what is to be said of it.
type Said = (LlmSpec, Option<String>);

/// The model of a run; or what is missing.
pub fn model(run: &Training, habits: Habits) -> Result<Said, String> {
    let (model, said) = match (run.layers, run.hidden, run.heads) {
        (Some(layers), Some(hidden), Some(heads)) => (stated(run, habits, layers, hidden, heads)?, None),
        (Some(layers), Some(hidden), None) => (stated(run, habits, layers, hidden, usual_heads(run, hidden))?, None),
        _ => unstated(run, habits)?,
    };
    // A shipped mixture brings its experts along.
    let whole = if model.moe.is_some() { model } else { mixed(model, run)? };
    let qk_norm = whole.qk_norm || (whole.mla.is_none() && norms_heads(&run.model));
    let mtp = whole.mtp.clone().filter(|_| !is_without_ahead(run));
    Ok((LlmSpec { qk_norm, mtp, ..whole }, said))
}

/// Models whose attention norms queries and keys, by the start of their names: huggingface/transformers, `q_norm` in
/// models/{qwen3,qwen3_moe,olmo2,olmo3,olmoe,gemma3,apertus,dots1,minimax_m2,hunyuan_v1_dense,hunyuan_v1_moe}.
const NORM_HEADS: &[&str] =
    &["qwen3", "olmo2", "olmo3", "olmoe", "gemma3", "apertus", "dots1", "dots.llm1", "hunyuan", "minimaxm2"];

/// A model that is only "like" another has its sizes, and the blocks of whoever wrote it.
fn norms_heads(name: &str) -> bool {
    let name = squeezed(name.rsplit('/').next().unwrap_or(name));
    NORM_HEADS.iter().any(|start| name.starts_with(start)) && !name.contains("like")
}

/// Heads of a width nearest to 128, of those that the ranks share evenly.
fn usual_heads(run: &Training, hidden: u64) -> u64 {
    let shared = u64::from(run.tp.unwrap_or(1));
    let even = |heads: &u64| hidden.is_multiple_of(*heads) && heads.is_multiple_of(shared);
    let far = |heads: &u64| (hidden / heads).abs_diff(128);
    (1..=hidden.min(1024)).filter(even).min_by_key(far).unwrap_or(1)
}

fn stated(run: &Training, habits: Habits, layers: u64, hidden: u64, heads: u64) -> Result<LlmSpec, String> {
    let head_dim = run.head_dim.or(run.experts.as_ref().and_then(|experts| experts.head_dim));
    if head_dim.is_none() && !hidden.is_multiple_of(heads) {
        return Err(format!("heads: {heads} does not divide hidden {hidden}, and no head_dim is stated"));
    }
    let kv_heads = run.kv_heads.unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        return Err(format!("kv_heads: {kv_heads} does not divide heads {heads}"));
    }
    let gated = run.gated_ffn.unwrap_or(false);
    // Two thirds of four times the width, where three matrices take the place of two (Shazeer, arXiv:2002.05202).
    let usual = if gated { (8 * hidden / 3).next_multiple_of(256) } else { 4 * hidden };
    Ok(LlmSpec {
        name: run.model.clone(),
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim: head_dim.unwrap_or(hidden / heads),
        ffn: run.ffn.unwrap_or(usual),
        vocab: run.vocab.unwrap_or(if gated { 32000 } else { 50257 }),
        rms_eps: 1e-5,
        rope_theta: 10000.0,
        ..block(run, habits, gated)
    })
}

/// The rate of dropout that notes state, wherever they speak of it.
fn stated_dropout(run: &Training) -> Option<f64> {
    let text = affirmed(&run.notes);
    text.match_indices("dropout ").find_map(|(at, word)| number_behind(&text[at..], word))
}

/// A gated network comes with Llama's block, another with GPT's.
fn block(run: &Training, habits: Habits, gated: bool) -> LlmSpec {
    let seq = run.seq.or_else(|| length(&run.model));
    let mine = LlmSpec {
        dropout: stated_dropout(run).unwrap_or(habits.dropout),
        parallel_block: habits.parallel_block,
        window: habits.half_window.then_some(seq.unwrap_or(USUAL) / 2),
        ..LlmSpec::default()
    };
    if gated {
        return mine;
    }
    let positions = Positions::Learned { max: seq.unwrap_or(2048) };
    LlmSpec { norm: Norm::Layer, mlp: Mlp::Gelu, positions, bias: true, tie_embeddings: true, ..mine }
}

/// What is to be said of a window that no source states.
pub fn assumed_window(model: &LlmSpec, habits: Habits) -> Option<String> {
    let window = model.window.filter(|_| habits.half_window)?;
    Some(format!("window: not stated; {window} tokens taken, half of the sequence"))
}

/// What is to be said of a run of Mamba whose layers are no others than attention and networks here.
pub fn unknown_mamba(run: &Training, model: &LlmSpec) -> Option<String> {
    let says = |text: &str, more: &[&str]| {
        tokens(text).iter().any(|word| word.starts_with("mamba") || word == "ssm" || more.contains(&&word[..]))
    };
    let remarks = affirmed(&format!("{}; {}", run.system, run.notes));
    let named = says(&run.model, &["hybrid"]) || says(&remarks, &[]);
    let said = "layers of Mamba: not known of this model; attention and networks in all layers are predicted";
    (named && model.mamba.is_none()).then(|| said.into())
}

/// The shipped model that a name means, and what is to be said of it.
///
/// Errors: a name that goes with a size which is neither that model's nor that of one of its family.
fn shipped_as(run: &Training) -> Result<Option<(&'static str, Option<String>)>, String> {
    let Some(named) = shipped_named(&run.model) else { return Ok(None) };
    let Some(billions) = run.params_b.or_else(|| billions(&run.model)).filter(|n| *n > 0.0) else {
        return Ok(Some((named, None)));
    };
    if is_as_large(named, billions) {
        return Ok(Some((named, None)));
    }
    let family = |known: &&'static str| tokens(known).first() == tokens(named).first();
    let far = |known: &&'static str| weights(known).map_or(f64::MAX, |all| (all / billions).ln().abs());
    let nearest = shipped("llm").filter(family).min_by(|a, b| far(a).total_cmp(&far(b)));
    let has = weights(named).unwrap_or_default();
    let said = format!("model: {:?} of {billions} billion weights is no {named}, which has {has:.0}", run.model);
    match nearest.filter(|known| is_as_large(known, billions)) {
        Some(kin) => Ok(Some((kin, Some(format!("{said}; {kin}, of its family and about as large, taken"))))),
        None => Err(format!("{said}; state layers, hidden and heads")),
    }
}

/// What a stated size may be off a model's own: names round, count embeddings or leave them out.
const ROUNDED: f64 = 0.25;

/// Whether so many billions are about all weights of a shipped model, or those that a token meets.
fn is_as_large(known: &str, billions: f64) -> bool {
    let near = |weights: u64| (weights as f64 * 1e-9 / billions - 1.0).abs() <= ROUNDED;
    LlmSpec::find(known).is_ok_and(|spec| near(spec.params()) || near(spec.active_params()))
}

/// Weights of a shipped model, in billions.
fn weights(known: &str) -> Option<f64> {
    LlmSpec::find(known).ok().map(|spec| spec.params() as f64 * 1e-9)
}

/// The shipped model that has a name, whatever sizes go with it.
fn shipped_named(model: &str) -> Option<&'static str> {
    let name = |text: &str| {
        // With its dots: Qwen2-57B is no Qwen2.5-7B.
        let name = bare(text).replace("3.1", "3");
        ALSO.iter()
            .find(|(also, _)| *also == name.replace('.', ""))
            .map_or(name.replace("deepseekr1", "deepseekv3"), |(_, is)| is.to_string())
    };
    let sized = |known: &str| {
        let rest = name(model).strip_prefix(&name(known)).map(String::from);
        rest.is_some_and(|rest| only_sizes(&rest))
    };
    let named = || shipped("llm").find(|known| name(known) == name(model));
    named().or_else(|| shipped("llm").find(|n| sized(n))).or_else(|| only_of_its_name(model))
}

/// The run with the experts of a shipped mixture that it names, where it states no sizes: rules look at whether it has any.
pub fn with_experts(run: Training) -> Training {
    let unsaid = run.experts.is_none() && run.layers.is_none() && run.hidden.is_none();
    let named = shipped_as(&run).ok().flatten().filter(|_| unsaid);
    let spec = named.and_then(|(name, _)| LlmSpec::find(name).ok());
    let Some(moe) = spec.and_then(|spec| spec.moe) else { return run };
    let experts = Experts { n: Some(moe.experts), top_k: Some(moe.top_k), ffn: Some(moe.ffn), ..Experts::default() };
    Training { experts: Some(experts), ..run }
}

/// A shipped model of that name, else the shape of a GPT with as many weights.
fn unstated(run: &Training, habits: Habits) -> Result<Said, String> {
    if let Some((found, kin)) = shipped_as(run)? {
        let mut model = LlmSpec::find(found).map_err(|e| e.to_string())?;
        model.mtp.iter_mut().for_each(|mtp| mtp.depth = recipe::passes_ahead(run, mtp.depth));
        // The stage that has the module has fewer layers there, and nobody says how many.
        let without = model.mtp.take_if(|mtp| mtp.depth > 0 && is_dualpipe(run));
        let said = without.map(
            |_| "mtp: left out with DualPipe, whose stage with the module has fewer layers, and nobody says how many",
        );
        return Ok((model, kin.or(said.map(String::from))));
    }
    let missing =
        || format!("layers, hidden, heads: not stated, and {:?} is no model that is known by name", run.model);
    let billions = run.params_b.or_else(|| billions(&run.model)).filter(|n| *n > 0.0).ok_or_else(missing)?;
    let called = squeezed(&run.model);
    // "1T GPT", too, but none that is only like one.
    let behind = called.strip_suffix("gpt").is_some_and(only_sizes);
    let gpt = called.starts_with("gpt") || called.starts_with("megatron") || behind;
    let gpt = gpt && !names_experts(&run.model);
    let far = |shape: &Shape| (shape.0 / billions).ln().abs();
    let nearest = GPT.iter().min_by(|a, b| far(a).total_cmp(&far(b))).expect("the table has lines");
    if !gpt || far(nearest) > 0.15 {
        let model = as_large(run, habits, billions).ok_or_else(missing)?;
        let said = format!("sizes: not stated; those of a Llama of {billions} billion weights taken");
        return Ok((model, Some(said)));
    }
    // Heads of such a model follow the degrees that have to divide them.
    let shared = run.ulysses.or(run.cp).unwrap_or(1).max(1).saturating_mul(run.tp.unwrap_or(1).max(1));
    let heads = nearest.3.checked_next_multiple_of(shared.into()).filter(|heads| nearest.2.is_multiple_of(*heads));
    let heads = heads.unwrap_or(nearest.3);
    Ok((stated(run, habits, nearest.1, nearest.2, heads)?, None))
}

/// Other names of shipped models, R1's weights being V3's in the same places: for short, by their size without that of what is
/// active, and of releases that are as large as others. V3.2-Exp and V3.2 are one.
const ALSO: &[(&str, &str)] = &[
    ("dsv3", "deepseekv3"),
    ("deepseekv32", "deepseekv3.2"),
    ("deepseekv32exp", "deepseekv3.2"),
    ("deepseekv25", "deepseekv2"),
    ("glm46", "glm4.5"),
    ("mixtral", "mixtral8x7b"),
    ("qwen3235b", "qwen3235ba22b"),
    ("qwen330b", "qwen330ba3b"),
    ("qwen3coder30ba3b", "qwen330ba3b"),
    ("yuan202b", "yuan22b"),
    ("yuan2051b", "yuan251b"),
    ("yuan20102b", "yuan2102b"),
];

/// Whether attention to the keys that an indexer chooses has plans of such degrees: its one key is of all heads, which no ranks
/// share out.
pub fn has_sparse_attention(par: &Parallelism) -> bool {
    par.tp == 1 && par.ulysses == 1 && par.options.chunks == 0 && !par.options.keep_attention
}

/// Shapes of Llama (arXiv:2302.13971, table 2; arXiv:2307.09288; arXiv:2407.21783, table 3) and of its smaller kin: billions
/// of weights, layers, hidden, heads, KV heads, width of the network, words.
const LLAMA: &[(f64, [u64; 6])] = &[
    // Of SmolLM.
    (0.135, [30, 576, 9, 3, 1536, 49152]),
    (0.36, [32, 960, 15, 5, 2560, 49152]),
    (1.1, [22, 2048, 32, 4, 5632, 32000]),
    (3.2, [28, 3072, 24, 8, 8192, 128256]),
    (6.7, [32, 4096, 32, 32, 11008, 32000]),
    (8.0, [32, 4096, 32, 8, 14336, 128256]),
    (13.0, [40, 5120, 40, 40, 13824, 32000]),
    (32.5, [60, 6656, 52, 52, 17920, 32000]),
    (65.2, [80, 8192, 64, 64, 22016, 32000]),
    (70.6, [80, 8192, 64, 8, 28672, 128256]),
    // No Llama: Mistral Large's depth and width with a network as wide as those of Llama 3, 3.5 times; without it 157 to 182
    // billion weights would be too far from any line.
    (175.0, [88, 12288, 96, 8, 43008, 128256]),
    (405.0, [126, 16384, 128, 8, 53248, 128256]),
];

/// Names of mixtures, of which the number of weights says too little.
const MIXED: &[&str] = &[
    "deepseekv",
    "moe",
    "mixtral",
    "arctic",
    "dbrx",
    "grok",
    "gptoss",
    "kimi",
    "llama4",
    "minimax",
    "jamba",
    "glm4.5",
    "glm5",
    "switch",
    "glam",
];

/// Of a dense model of which no more is known than the number of its weights: the Llama nearest to it, with as many layers
/// as make that number.
fn as_large(run: &Training, habits: Habits, billions: f64) -> Option<LlmSpec> {
    let far = |shape: &&(f64, [u64; 6])| (shape.0 / billions).ln().abs();
    let nearest = LLAMA.iter().min_by(|a, b| far(a).total_cmp(&far(b))).filter(|shape| far(shape) < 0.8)?;
    let [layers, hidden, heads, kv_heads, ffn, vocab] = nearest.1;
    // Stages are alike.
    let unit = u64::from(run.pp.unwrap_or(1).max(1));
    let layers = ((layers as f64 * billions / nearest.0 / unit as f64).round() as u64).max(1) * unit;
    let sized = Training {
        kv_heads: Some(kv_heads),
        ffn: Some(ffn),
        vocab: run.vocab.or(Some(vocab)),
        gated_ffn: Some(true),
        head_dim: None,
        ..run.clone()
    };
    let dense = run.experts.is_none() && !names_experts(&run.model);
    dense.then(|| stated(&sized, habits, layers, hidden, heads).ok()).flatten()
}

/// Whether a name is that of a mixture, or a word of it is one of mixtures: "8x7b", "a3b", "a800m", "64e".
fn names_experts(model: &str) -> bool {
    let number = |word: &str| word.parse::<u32>().is_ok();
    let counted = |word: &str| word.strip_suffix('e').is_some_and(number);
    // "8x7b", not "exaone".
    let times = |word: &str| word.split_once('x').is_some_and(|(n, of)| number(n) && number(of.trim_end_matches('b')));
    let millions = |word: &str| word.strip_suffix('m').is_some_and(number);
    let active = |word: &str| word.strip_prefix('a').is_some_and(|size| is_size(size) || millions(size));
    let mixture = |word: &String| word == "moe" || word == "active" || times(word) || active(word) || counted(word);
    tokens(model).iter().any(mixture) || MIXED.iter().any(|name| squeezed(model).contains(name))
}

/// The one shipped model of whose name `model` is all but the sizes at the end: of nemotron-3-nano-30b-a3b say.
fn only_of_its_name(model: &str) -> Option<&'static str> {
    let wanted = tokens(model);
    let sized = |word: &String| is_size(word.trim_start_matches('a'));
    let fits = |known: &&'static str| {
        let rest = tokens(known).strip_prefix(&wanted[..]).map(<[String]>::to_vec);
        rest.is_some_and(|rest| rest.len() == 2 && rest.iter().all(sized))
    };
    let mut all = shipped("llm").filter(fits);
    all.next().filter(|_| all.next().is_none())
}

/// Whether what follows the name of a known model says no more than how large it is, in billions or trillions, active or of
/// how many experts, or which release: "17b16e", "1t", "0324", "base".
fn only_sizes(rest: &str) -> bool {
    let rest = rest.trim_end_matches("base").trim_end_matches("instruct");
    let release = rest.len() == 4 && rest.chars().all(|c| c.is_ascii_digit());
    let mut groups = rest.split_inclusive(|c: char| !c.is_ascii_digit()).filter(|group| *group != "a");
    release || groups.all(|group| group.len() > 1 && group.ends_with(['b', 't', 'e']))
}

/// Whether a word is a number of billions.
fn is_size(word: &str) -> bool {
    word.strip_suffix('b').is_some_and(|digits| !digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit()))
}

/// The 7 of "GPT 7B", the 1000 of "GPT 1T", the 0.35 of "350M".
fn billions(name: &str) -> Option<f64> {
    let lower = name.to_lowercase();
    let sized = |word: &str| {
        let thousands = word.strip_suffix('t').and_then(|n| n.parse::<f64>().ok()).map(|n| 1000.0 * n);
        let thousandths = || word.strip_suffix('m')?.parse::<f64>().ok().map(|n| n / 1000.0);
        thousands.or_else(|| word.strip_suffix('b')?.parse().ok()).or_else(thousandths)
    };
    lower.split(|c: char| !c.is_ascii_alphanumeric() && c != '.').find_map(sized)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_a_known_name_may_say_how_large_it_is() {
        for rest in ["", "7b", "1t", "17b16e", "671ba37b", "0324", "base", "7binstruct"] {
            assert!(only_sizes(rest), "{rest}");
        }
        for rest in ["air", "lite", "coder480ba35b", "05", "lite16b", "vl"] {
            assert!(!only_sizes(rest), "{rest}");
        }
    }

    #[test]
    fn a_window_that_is_assumed_is_half_of_the_sequence_and_said() {
        let of = |system: &str, seq| {
            let run = Training { model: "GPT 30B".into(), seq, ..Training::default() };
            let habits = Habits::of(system);
            let model = model(&run, habits).unwrap().0;
            (model.window, assumed_window(&model, habits).is_some())
        };
        assert_eq!(
            [of("MegaScale", Some(2048)), of("MegaScale", Some(8192))],
            [(Some(1024), true), (Some(4096), true)]
        );
        assert_eq!([of("MegaScale-MoE", Some(8192)), of("Megatron-LM", Some(8192))], [(None, false); 2]);
    }

    #[test]
    fn heads_of_a_gpt_follow_the_degrees_that_divide_them() {
        let heads = |ulysses, tp| {
            let run = Training { model: "GPT 30B".into(), ulysses, tp, ..Training::default() };
            model(&run, Habits::of("Megatron-LM")).unwrap().0.heads
        };
        assert_eq!([heads(None, None), heads(None, Some(8)), heads(Some(7), None)], [56; 3]);
        assert_eq!([heads(Some(32), None), heads(None, Some(16)), heads(Some(8), Some(8))], [64; 3]);
        // No width of 7168 is one of 66 heads.
        assert_eq!(heads(Some(33), None), 56);
    }

    #[test]
    fn a_model_norms_its_heads_if_it_is_one_of_those_that_do() {
        for (name, norms) in [
            ("Qwen3-30B-A3B", true),
            ("Qwen/Qwen3-8B", true),
            ("Qwen3 235B", true),
            ("OLMo 2 32B", true),
            ("Qwen3-32B-like", false),
            ("Qwen2.5-32B", false),
            ("Llama 3 8B", false),
        ] {
            assert_eq!(norms_heads(name), norms, "{name}");
        }
    }

    #[test]
    fn mamba_that_no_model_has_is_told() {
        let of = |model: &str, notes: &str| {
            let run = Training { model: model.into(), notes: notes.into(), params_b: Some(8.0), ..Training::default() };
            unknown_mamba(&run, &super::model(&run, Habits::of("")).unwrap().0).is_some()
        };
        assert!(of("Mamba-2 hybrid 8B", "") && of("ours 8B", "24 Mamba-2, 4 attention, 28 MLP"));
        assert!(!of("ours 8B", "hybrid sharding, no Mamba") && !of("Nemotron-H 8B", "Mamba-2"));
    }

    #[test]
    fn a_name_whose_size_is_anothers_is_one_of_its_family_or_none() {
        let of = |name: &str, params_b: Option<f64>| {
            let run = Training { model: name.into(), params_b, ..Training::default() };
            shipped_as(&run).map(|found| found.map(|(known, said)| (known, said.is_some())))
        };
        assert_eq!(of("DeepSeek-V3 16B", None), Ok(Some(("deepseek-v2-lite", true))));
        assert_eq!(of("DeepSeek-V3", Some(15.7)), Ok(Some(("deepseek-v2-lite", true))));
        let refused = of("DeepSeek-V3 90B", None).unwrap_err();
        assert!(refused.contains("90 billion") && refused.contains("no deepseek-v3, which has 6"), "{refused}");
        for (name, params_b, known) in [
            ("DeepSeek-V3", Some(685.0), "deepseek-v3"),
            ("Llama 3 8B", Some(8.03), "llama-3-8b"),
            ("Qwen3-30B-A3B", None, "qwen3-30b-a3b"),
            ("Mixtral 8x7B", Some(46.7), "mixtral-8x7b"),
            ("Mixtral 8x22B", None, "mixtral-8x22b"),
            ("Llama-4-Scout-17B-16E", None, "llama-4-scout"),
            ("Kimi K2 1T", None, "kimi-k2"),
            ("gpt-oss-20b", None, "gpt-oss-20b"),
        ] {
            assert_eq!(of(name, params_b), Ok(Some((known, false))), "{name}");
        }
    }

    #[test]
    fn a_name_without_its_sizes_is_the_one_model_that_has_it() {
        for (name, found) in [
            ("Nemotron_3_Nano", Some("nemotron-3-nano-30b-a3b")),
            ("Nemotron 3.5 Lightning", Some("nemotron-3.5-lightning-30b-a3b")),
            // Two of the one name, none of the other, and one that has more than sizes behind.
            ("Qwen3", None),
            ("Nemotron_4", None),
            ("DeepSeek", None),
        ] {
            assert_eq!(only_of_its_name(name), found, "{name}");
        }
    }

    #[test]
    fn what_only_its_size_is_known_of_is_a_llama_of_that_size_unless_it_is_a_mixture() {
        let layers = |name: &str, params_b: Option<f64>| {
            let run = Training { model: name.into(), params_b, ..Training::default() };
            unstated(&run, Habits::of("")).map(|(model, _)| (model.layers, model.moe.is_some())).ok()
        };
        assert_eq!(layers("Someone's 8B", None), Some((32, false)));
        assert_eq!(layers("a model", Some(35.0)), Some((65, false)));
        assert_eq!(layers("GPT 22B", None), Some((48, false)));
        assert_eq!(layers("Megatron 1T", None), Some((128, false)));
        assert_eq!(layers("dense 175B", None), Some((88, false)));
        assert_eq!(layers("OPT-350M", None).map(|found| found.1), Some(false));
        for dense in ["EXAONE 3.5 32B", "XGen-7B", "Phoenix 7B"] {
            assert_eq!(layers(dense, None).map(|found| found.1), Some(false), "{dense}");
        }
        let yuan = |name: &str| LlmSpec::find(name).unwrap().layers;
        assert_eq!(layers("Yuan 2.0 102B", None), Some((yuan("yuan2-102b"), false)));
        assert_eq!(layers("Yuan 2.0-51B", None), Some((yuan("yuan2-51b"), false)));
        assert_eq!(layers("DeepSeek-V3 671B", None), Some((61, true)));
        assert_eq!(layers("DeepSeek-V3", Some(37.0)), Some((61, true)));
        for (mixture, deep) in [
            ("gpt-oss-20b", 24),
            ("DeepSeek-R1", 61),
            ("Kimi K2 1T", 61),
            ("Llama-4-Scout-17B-16E", 48),
            ("GLM-4.5", 92),
            ("GLM-4.6", 92),
            ("GLM-4.5-Air", 46),
            ("DeepSeek-V3.2", 61),
            ("DeepSeek-V3.2-Exp", 61),
            ("GLM-5", 78),
            ("Qwen3-235B", 94),
            ("DSV3", 61),
            ("Mixtral", 32),
        ] {
            assert_eq!(layers(mixture, None), Some((deep, true)), "{mixture}");
        }
        for mixture in [
            "gpt-oss-7b",
            "GPT-MoE 1.3B-64E",
            "DeepSeekMoE 16B",
            "Qwen2-57B-A14B",
            "a model",
            "Arctic 480B",
            "Mixtral 8x9B",
            "Someone's 3B-A800M",
        ] {
            assert_eq!(layers(mixture, None), None, "{mixture}");
        }
    }
}
