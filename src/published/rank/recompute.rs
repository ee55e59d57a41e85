//! What a run computes again in its backward pass, by the words of its source.

use crate::published::row::case::Training;
use crate::published::row::words::{number_before, number_behind, squeezed, tokens};
use crate::published::software::habits::Habits;
use crate::published::software::system::System;
use crate::published::software::table::Fact;
use crate::spec::{LlmSpec, Recompute};

/// What is recomputed, if the source says so: in its own field, or in the name of the system.
pub fn recompute(run: &Training) -> Option<Recompute> {
    let (text, system) = (squeezed(&run.recompute), squeezed(&run.system));
    if text.contains("notstated") {
        return None;
    }
    if keeps_attention(run) {
        return Some(Recompute::Full);
    }
    // Words of their own say so.
    if text.contains("mlaup") || parts_made_again(run).contains(&true) {
        return Some(Recompute::None);
    }
    if System::of(&run.system).is(Fact::RecomputesNothing) {
        return Habits::of_run(run).recompute;
    }
    let named = [
        "fullactivation",
        "actckpt",
        "ckptoffload",
        "fpdt",
        "gradientcheckpoint",
        "activationcheckpoint",
        "fullrecompu",
    ];
    let denied = ["nogradient", "noactivation", "withoutgradient", "withoutactivation"];
    let is = named.iter().any(|w| system.contains(w)) && !denied.iter().any(|w| system.contains(w));
    let in_system = is.then_some(Recompute::Full);
    by_words(&run.recompute).or(in_system).or(Habits::of_run(run).recompute)
}

/// What words of recomputation alone say of it; none where they are not understood.
fn by_words(words: &str) -> Option<Recompute> {
    let text = &squeezed(words);
    let first = tokens(words.split([',', ';', '(']).next().unwrap_or_default());
    let denies = first.first().is_some_and(|word| ["no", "without"].contains(&word.as_str()));
    if denies || first.iter().any(|word| ["off", "disabled"].contains(&word.as_str())) {
        return Some(Recompute::None);
    }
    // Of all but a few activations, and of what goes to the host and comes back, little but products is left to keep.
    let all = ["allbut", "allexcept"].iter().any(|word| text.starts_with(word)) || text.contains("remat");
    let starts = [
        ("full", Recompute::Full),
        ("selective", Recompute::Selective),
        ("none", Recompute::None),
        ("nexttonone", Recompute::None),
        // Of torchtitan's words: activation checkpointing, and the selective one.
        ("sac", Recompute::Selective),
        ("coreattn", Recompute::Selective),
        // How Megatron-LM goes about the full one (`recompute-method`).
        ("uniform", Recompute::Full),
        ("block", Recompute::Full),
        ("everylayer", Recompute::Full),
        ("alllayers", Recompute::Full),
        ("100%", Recompute::Full),
    ];
    let found = starts.into_iter().find(|(word, _)| text.starts_with(word)).map(|(_, r)| r);
    let found = found.or((text == "ac").then_some(Recompute::Full));
    let counts = Counted::of(words).is_some() || nth(text).is_some();
    let found = found.or_else(|| in_words(text)).or((all || counts).then_some(Recompute::Full));
    // Whole networks plans do not make again by themselves.
    let elsewhere = ["moe", "mlp", "expert"].iter().any(|part| text.contains(part));
    found.map(|r| if r == Recompute::Selective && elsewhere { Recompute::None } else { r })
}

/// What is to be said where a source says something of recomputation that is not understood: it is as if it said nothing, or
/// no more than what is.
pub fn unread(run: &Training) -> Option<String> {
    let text = squeezed(&run.recompute);
    let understood = text.is_empty()
        || text.contains("notstated")
        || System::of(&run.system).is(Fact::RecomputesNothing)
        || keeps_attention(run)
        || text.contains("mlaup")
        || parts_made_again(run).contains(&true)
        || by_words(&run.recompute).is_some()
        || HALVES.iter().any(|word| text.contains(word));
    if !understood {
        return Some(format!("recompute: {:?} not read; taken as if nothing were said of it", run.recompute));
    }
    let left = unread_behind(&run.recompute);
    (!left.is_empty()).then(|| format!("recompute: {} not read, beside the rest of it", left.join(", ")))
}

/// Clauses behind the first of which nothing is understood, in quotes.
fn unread_behind(words: &str) -> Vec<String> {
    let clauses = words.split([',', ';', '(', ')']).map(str::trim).filter(|clause| !clause.is_empty());
    let is_read = |clause: &str| {
        let text = squeezed(clause);
        let known = BESIDE.iter().chain(HALVES).any(|word| text.contains(word));
        known || by_words(clause).is_some()
    };
    clauses.skip(1).filter(|clause| !is_read(clause)).map(|clause| format!("{clause:?}")).collect()
}

/// Words of clauses behind what is recomputed: parts of a layer, where things go, flags and rates that are read elsewhere.
const BESIDE: &[&str] = &[
    "act",
    "attention",
    "attn",
    "checkpoint",
    "default",
    "expert",
    "flash",
    "gelu",
    "hfu",
    "host",
    "input",
    "kept",
    "key",
    "mfu",
    "mla",
    "mlp",
    "moe",
    "norm",
    "numlayers",
    "offload",
    "output",
    "projection",
    "query",
    "recompute",
    "stage",
    "swiglu",
    "value",
    "notstated",
];

/// Recomputation by what else sources say of it, where they do not begin with its name.
fn in_words(text: &str) -> Option<Recompute> {
    let is = |words: &[&str]| words.contains(&text) || words.iter().any(|word| word.len() > 5 && text.contains(word));
    let not =
        ["no", "off", "false", "disabled", "without", "norecomput", "nogradientcheckpoint", "noactivationcheckpoint"];
    let said = ["yes", "on", "true", "enabled", "gradientcheckpoint", "activationcheckpoint", "activationrecomput"];
    match () {
        () if is(&not) => Some(Recompute::None),
        () if text.contains("selective") => Some(Recompute::Selective),
        () => is(&said).then_some(Recompute::Full),
    }
}

/// Whether all is made again but attention, whose output is kept.
pub fn keeps_attention(run: &Training) -> bool {
    let text = squeezed(&run.recompute);
    ["attention'soutput", "outputofattention"].iter().any(|word| text.contains(word))
}

/// Whether selective recomputation is that of experts, among others.
pub fn recomputes_experts(run: &Training, model: &LlmSpec) -> bool {
    let text = squeezed(&run.recompute);
    // Their activation is another module (`moe_act`).
    let whole = tokens(&run.recompute.replace("moe_act", "").replace("experts' activation", ""));
    let whole = whole.iter().any(|word| word == "moe" || word == "experts");
    model.moe.is_some() && (text.starts_with("selective") && whole || keeps_products(run))
}

/// Whether what is kept of a layer of experts is outputs of products and of attention, operator by operator: those of grouped
/// products are not on torchtitan's list, nor those of norms (`_op_sac_save_list`, github:pytorch/torchtitan
/// torchtitan/models/llama4/infra/parallelize.py).
fn keeps_products(run: &Training) -> bool {
    let text = squeezed(&run.recompute);
    let by_layer = ["layer", "every"].iter().any(|word| text.contains(word));
    run.experts.is_some() && text.starts_with("selective") && Habits::of_run(run).halves && !by_layer
}

/// Whether of a dense layer outputs of attention and of every second product are kept, and nothing else: torchtitan's
/// selective recomputation by operator (`_get_custom_policy`, github:pytorch/torchtitan
/// torchtitan/distributed/activation_checkpoint.py: "every second mm"). What is kept of queries, keys and values, and of
/// projections, is about what plans keep: x, q, v, o and w2's output of a Llama's 4 + 4 + 1 + 4 + 4 thousand columns, in plans
/// x, q, k, v, o and the sum before the network. The halves of gate and up are those that tell; that wk and wo run again, a
/// tenth of a forward pass's products, is left out.
pub fn keeps_half_of_products(run: &Training) -> bool {
    let text = squeezed(&run.recompute);
    let by_layer = ["layer", "every"].iter().any(|word| text.contains(word));
    let by_habit = text.starts_with("selective") && Habits::of_run(run).halves;
    let said = BY_OP.iter().any(|word| text.contains(word));
    run.experts.is_none() && !by_layer && (by_habit || said)
}

/// Whether selective recomputation is that of networks, by the name of their module in Megatron Core (`mlp`), which are those of
/// dense layers.
pub fn recomputes_networks(run: &Training, model: &LlmSpec) -> bool {
    let named = tokens(&run.recompute.replace("mlp_act", "")).iter().any(|word| word == "mlp");
    model.moe.is_none() && squeezed(&run.recompute).starts_with("selective") && named
}

/// Parts of a layer that a source names as made again by themselves: norms, and outputs of activations.
pub fn parts_made_again(run: &Training) -> [bool; 2] {
    let text = squeezed(&run.recompute);
    if text.starts_with("full") {
        return [false; 2];
    }
    if keeps_products(run) || keeps_half_of_products(run) {
        return [true; 2];
    }
    let acts = ["moeact", "mlpact", "experts'activation", "swiglu", "gelu"].iter().any(|part| text.contains(part));
    [text.contains("norm"), acts || tokens(&run.recompute).iter().any(|word| word == "act")]
}

/// Of the layers, or of what is before their activations, where every second one is computed again.
pub const HALF: f64 = 0.5;

/// Words of recomputation by operator, and of a part that is half of the layers.
const BY_OP: [&str; 3] = ["selectiveop", "perop", "sac"];
const HALVES: &[&str] = &["selectiveop", "selectivelayer", "perop", "everyother", "everysecond", "half", "sac"];

/// The part of the layers where every so manieth is computed again: torchtitan's `selective_ac_option` of a number, OLMo-core's
/// `block_interval`.
fn nth(text: &str) -> Option<f64> {
    let named = [("everythird", 3.0), ("everyfourth", 4.0)];
    let named = named.iter().find(|(word, _)| text.contains(word)).map(|(_, n)| *n);
    named.or_else(|| number_behind(text, "every")).filter(|n| *n >= 1.0).map(|n| 1.0 / n)
}

/// Numbers as words have them.
const NUMBERS: [&str; 11] = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];

/// The half of "one layer in two", "1 of 2 layers", "one_in_two" (OLMo's words) and "one out of every two blocks". Of the words
/// as they are: without their spaces "one in two" is no number.
fn some_in_all(words: &str) -> Option<f64> {
    let all = tokens(words);
    let is_layer = |word: &str| ["layer", "layers", "block", "blocks"].contains(&word);
    let number = |word: &String| {
        let named = NUMBERS.iter().position(|name| name == word).map(|n| n as f64);
        named.or_else(|| word.parse::<u32>().ok().map(f64::from))
    };
    let from = |at: usize| {
        let some = number(&all[at])?;
        let rest = all[at + 1..].iter().skip_while(|word| is_layer(word) || *word == "out");
        let mut rest = rest.skip_while(|word| *word == "the").peekable();
        rest.next().filter(|word| ["in", "of", "per"].contains(&word.as_str()))?;
        let whole = rest.find(|word| !["every", "each", "the", "all"].contains(&word.as_str())).and_then(number)?;
        // "2 layers of 4 stages" are others' parts.
        let of_others = rest.next().is_some_and(|word| OTHERS.iter().any(|other| word.starts_with(other)));
        (!of_others && some >= 1.0 && some <= whole).then(|| some / whole)
    };
    (0..all.len()).find_map(from)
}

/// What is counted beside layers.
const OTHERS: [&str; 6] = ["stage", "chunk", "rank", "gpu", "node", "microbatch"];

/// Layers that are computed again, as a source counts them.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Counted {
    /// A part of all.
    Part(f64),
    /// So many of a stage of the pipeline.
    OfStage(f64),
    /// So many of each chunk of layers that a rank has (Megatron's `recompute_num_layers` of its method `block`).
    OfChunk(f64),
}

impl Counted {
    fn of(words: &str) -> Option<Counted> {
        let text = &squeezed(words)[..];
        let flag = || {
            let tail = &text[text.find("numlayers")?..];
            let at = tail.find(|c: char| c.is_ascii_digit())?;
            let n = number_behind(tail, &tail[..at])?;
            // Of the method `uniform` it is how many layers have one checkpoint among them.
            Some(if text.contains("uniform") { Counted::Part(1.0) } else { Counted::OfChunk(n) })
        };
        let bare = || {
            let at = text.find("layer").filter(|_| !text.contains("every"))?;
            number_before(text, at).map(Counted::OfStage)
        };
        some_in_all(words).map(Counted::Part).or_else(flag).or_else(bare)
    }

    /// As a part of all layers, of which a rank of `pp` has `vp` chunks.
    fn part(self, layers: u64, pp: u32, vp: u32) -> f64 {
        let all = layers as f64;
        let of_stage = all / f64::from(pp.max(1));
        let part = match self {
            Counted::Part(part) => part,
            // More than a stage has are of all of them.
            Counted::OfStage(n) if n > of_stage => n / all,
            Counted::OfStage(n) => n / of_stage,
            Counted::OfChunk(n) => n * f64::from(vp.max(1)) / of_stage,
        };
        part.min(1.0)
    }
}

/// The part of the layers that is computed again where it is not all of them: as many as are stated, or half of them where
/// selective recomputation is that of every second layer. A rank of `pp` has `vp` chunks of the `layers`.
pub fn recomputed_part(run: &Training, layers: u64, pp: u32, vp: u32) -> Option<f64> {
    if keeps_products(run) || keeps_half_of_products(run) {
        return None;
    }
    let text = squeezed(&run.recompute);
    let selective = text.starts_with("selective") && Habits::of_run(run).halves;
    let none = by_words(&run.recompute) == Some(Recompute::None);
    let counted = Counted::of(&run.recompute).filter(|_| !none).map(|counted| counted.part(layers, pp, vp));
    let halves = !none && (selective || HALVES.iter().any(|word| text.contains(word)));
    counted.or_else(|| nth(&text)).or(halves.then_some(HALF))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::rank::savings::activations_are_away;

    /// A number of layers is of a stage of the pipeline, Megatron's flag of a chunk; every so manieth is one of so many.
    #[test]
    fn layers_that_are_counted() {
        let of = |words: &str, pp: u32, vp: u32| {
            let run = Training { recompute: words.into(), ..Training::default() };
            assert_eq!((recompute(&run), unread(&run)), (Some(Recompute::Full), None), "{words}");
            recomputed_part(&run, 40, pp, vp)
        };
        assert_eq!(
            [of("recompute 10 layers", 1, 1), of("10 layers", 2, 1), of("30 layers", 2, 1)],
            [Some(0.25), Some(0.5), Some(0.75)]
        );
        assert_eq!(
            [of("recompute_num_layers=10", 1, 1), of("--recompute-num-layers 2", 4, 2)],
            [Some(0.25), Some(0.4)]
        );
        assert_eq!(of("full, uniform, recompute_num_layers: 4", 1, 1), Some(1.0));
        assert_eq!([of("checkpoint every 4 layers", 1, 1), of("every 4th layer", 2, 1)], [Some(0.25); 2]);
        assert_eq!([of("40 layers", 1, 1), of("full, 8 of 32 layers", 4, 1)], [Some(1.0), Some(0.25)]);
        for words in
            ["full, one layer in two", "one_in_two", "1 in 2", "full: one out of every two blocks", "5 of ten layers"]
        {
            assert_eq!(of(words, 4, 1), Some(0.5), "{words}");
        }
        assert_eq!([of("full, one layer in four", 1, 1), of("1 layer of 4", 1, 1)], [Some(0.25); 2]);
        assert_eq!(of("full, 1 of 2 stages", 1, 1), None);
        let none = Training { recompute: "none (40 layers)".into(), ..Training::default() };
        assert_eq!(recomputed_part(&none, 40, 1, 1), None);
    }

    #[test]
    fn what_is_not_understood_is_said() {
        let of = |words: &str| unread(&Training { recompute: words.into(), ..Training::default() });
        for words in ["memory budget 0.5", "part (HFU 0.616, MFU 0.527)", "some"] {
            let said = of(words).unwrap_or_default();
            assert!(said.contains("recompute") && said.contains(words) && said.contains("not read"), "{words}: {said}");
        }
        for words in
            ["", "full", "none/selective (not stated)", "norm, act", "custom (attention's output kept)", "AC", "half"]
        {
            assert_eq!(of(words), None, "{words}");
        }
        let behind = of("full, of layers on Tuesdays (gradient checkpointing)").unwrap_or_default();
        assert!(behind.contains("\"of layers on Tuesdays\" not read") && !behind.contains("gradient"), "{behind}");
        for words in [
            "full (block, 2 layers/stage in the script)",
            "selective (layernorm, moe_act)",
            "none at 8K",
            "full, one layer in two",
        ] {
            assert_eq!(of(words), None, "{words}");
        }
    }

    #[test]
    fn every_second_product_or_layer() {
        let run = |system: &str, recompute: &str| Training {
            system: system.into(),
            recompute: recompute.into(),
            ..Training::default()
        };
        let part = |system: &str, recompute: &str| recomputed_part(&run(system, recompute), 32, 1, 1);
        let by_op = |system: &str, recompute: &str| {
            let run = run(system, recompute);
            (keeps_half_of_products(&run), super::recompute(&run), parts_made_again(&run))
        };
        for (system, words) in [("torchtitan (FSDP)", "selective"), ("", "selective (per op)"), ("", "SAC")] {
            assert_eq!(by_op(system, words), (true, Some(Recompute::None), [true; 2]), "{system} {words}");
            assert_eq!(part(system, words), None);
        }
        assert!(!by_op("Megatron-LM", "selective").0 && !by_op("torchtitan", "full").0);
        assert_eq!([part("", "selective layer"), part("torchtitan", "selective, every second layer")], [Some(HALF); 2]);
        assert_eq!([part("Megatron-LM", "selective"), part("torchtitan", "full")], [None; 2]);
        assert_eq!(part("", "full, 8 of 32 layers"), Some(0.25));
        assert_eq!(part("", "selective, every fourth layer"), Some(0.25));
        assert_eq!(part("", "full, inputs of layers offloaded"), None);
    }

    #[test]
    fn what_times_rule_out_is_not_taken() {
        let of = |system: &str| {
            let run = Training { system: system.into(), ..Training::default() };
            (recompute(&run), !System::of(system).is(Fact::PublishedVocabulary))
        };
        let one_node = "Megatron-DeepSpeed, 1F1B, full activation checkpointing, fp16, ffn=4h, vocab 50257";
        assert_eq!(of(one_node), (Some(Recompute::None), false));
        assert_eq!(of("Megatron-DeepSpeed (Megatron 3D, 1F1B)"), (Some(Recompute::Full), true));
        assert_eq!(of("Hugging Face transformers"), (None, false));
    }

    #[test]
    fn recomputation_is_read_where_it_is_said() {
        let run = |recompute: &str, system: &str| {
            super::recompute(&Training { recompute: recompute.into(), system: system.into(), ..Training::default() })
        };
        assert_eq!(run("full (block, 2 layers/stage in the script)", ""), Some(Recompute::Full));
        assert_eq!(run("none at 8K", ""), Some(Recompute::None));
        assert_eq!(run("none/selective (not stated)", ""), None);
        assert_eq!(run("selective layernorm+moe", ""), Some(Recompute::None));
        assert_eq!(run("selective (core attention)", ""), Some(Recompute::Selective));
        assert_eq!(run("", "Megatron, full activation checkpointing, fp16"), Some(Recompute::Full));
        for (words, found) in [
            ("all but inputs of layers, which are offloaded", Some(Recompute::Full)),
            ("gradient checkpointing", Some(Recompute::Full)),
            ("True", Some(Recompute::Full)),
            ("activation checkpointing, selective", Some(Recompute::Selective)),
            ("no activation checkpointing", Some(Recompute::None)),
            ("off", Some(Recompute::None)),
            ("full recomputation off", Some(Recompute::None)),
            ("no selective recomputation", Some(Recompute::None)),
            ("norm, act", Some(Recompute::None)),
        ] {
            assert_eq!(run(words, ""), found, "{words}");
        }
        assert!(activations_are_away(&Training { recompute: "full, offloaded".into(), ..Training::default() }));
    }
}
