//! What was there when a run was made: releases, attention kernels, and what is younger than FlashAttention.

use super::release::{Release, numbered, release};
use super::system::{NEMO, System};
use crate::published::row::case::Training;
use crate::published::row::words::{squeezed, tokens};
use crate::spec::{Architecture, GpuSpec, Origin, Sourced, StackSpec};

/// The release that stands for Megatron-Bridge where none is named, be it that a commit or a version is: the middle of its
/// releases, which are those of 25.09 to 26.08, so that half a year is the most that it is off. It is the month of Megatron
/// Core's report on mixtures (arXiv:2603.07685), too, and stands for that report's figures.
pub const MIDDLE: Release = (26, 3);

/// The release of the software of a run, from the name of its system or from what is noted of its container; of
/// Megatron-Bridge always one.
pub fn released(run: &Training) -> Option<Release> {
    let noted = || run.notes.find("container").and_then(|at| numbered(&run.notes[at..]));
    let bridge = || System::of(&run.system).is_bridge().then_some(MIDDLE);
    release(&run.system).or_else(noted).or_else(bridge)
}

/// The first of NeMo's containers with FlashAttention; until then scores were in memory, with the dropout that its
/// configurations of GPT have, and nothing travelled beside products (github:NVIDIA/NeMo-Framework-Launcher
/// CHANGELOG.md, as remembered, not looked up; its GPT of 5B on A100, 40 % slower than with fused attention, says so).
const FLASH_IN_NEMO: Release = (23, 8);

/// Whether a system is NeMo before it had FlashAttention.
pub fn precedes_flash(system: &str) -> bool {
    System::of(system).has(NEMO) && release(system).is_some_and(|release| release < FLASH_IN_NEMO)
}

/// GPUs that came after FlashAttention (arXiv:2205.14135, of May 2022). An A800 is an A100 with fewer links.
const LATER_GPUS: &[&str] = &[
    "h100",
    "h200",
    "h800",
    "h20",
    "b100",
    "b200",
    "b300",
    "hopper",
    "blackwell",
    "l40",
    "4090",
    "5090",
    "mi300",
    "mi325",
    "mi350",
    "mi355",
    "gaudi3",
    "v5e",
    "v5p",
    "v6e",
    "trillium",
];

pub fn is_later_gpu(gpu: &str) -> bool {
    let text = squeezed(gpu);
    let alone = tokens(gpu).iter().any(|word| ["l4", "ada"].contains(&word.as_str()));
    alone || LATER_GPUS.iter().any(|name| text.contains(name))
}

/// Families of models that came after it, 2023 at the earliest.
const LATER_MODELS: &[&str] =
    &["llama", "qwen", "mistral", "mixtral", "deepseek", "gemma", "falcon", "mpt", "starcoder", "pythia", "nemotron"];

/// Models with a gated network from before it.
const EARLIER_GATED: &[&str] = &["glm130b", "palm"];

/// Whether a model is younger than FlashAttention: by the name of its family, or by its gated network, which hardly any had
/// before LLaMA.
pub fn is_later_model(run: &Training) -> bool {
    let model = squeezed(&run.model);
    let names = format!("{model} {}", squeezed(&run.system));
    let gated = run.gated_ffn == Some(true) && !EARLIER_GATED.iter().any(|name| names.contains(name));
    gated || LATER_MODELS.iter().any(|family| model.contains(family))
}

/// Families of models and their generations of 2024 and later; none: all of them are.
const MODELS_SINCE_2024: &[(&str, &str)] = &[
    ("llama", "34"),
    ("qwen", "23"),
    ("deepseekv", "234"),
    ("gemma", ""),
    ("phi", "34"),
    ("olmo", "23"),
    ("gptoss", ""),
    ("smollm", ""),
    ("glm", "45"),
    ("mistralnemo", ""),
];

/// Whether a model is of such a family: its generation stands behind the name, and is no number of weights (LLaMA 30B).
fn is_of_2024(model: &str) -> bool {
    let words = tokens(model);
    (0..words.len()).any(|at| {
        let text = words[at..].join(" ");
        MODELS_SINCE_2024.iter().any(|(family, generations)| {
            let Some(rest) = behind(&text, family) else { return false };
            let mut rest = rest.trim_start().chars();
            let known = generations.is_empty() || rest.next().is_some_and(|c| generations.contains(c));
            known && (generations.is_empty() || rest.next().is_none_or(|c| !c.is_ascii_digit() && c != 'b'))
        })
    })
}

/// What stands behind a name in a text, whose words may be parts of it.
fn behind<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let mut rest = text;
    for letter in name.chars() {
        rest = rest.trim_start().strip_prefix(letter)?;
    }
    Some(rest)
}

/// Whether a run is certainly later than FlashAttention 2 (arXiv:2307.08691, of July 2023): its software is said to be of
/// 2024 or later, or its model is.
pub fn follows_flash_2(run: &Training) -> bool {
    let later = |release: Release| release >= (24, 1);
    release(&run.system).is_some_and(later) || is_of_2024(&run.model)
}

/// Curves of attention in older containers of NeMo, and the first container that has the newer one:
///
/// * on a Blackwell Ultra: DeepSeek-V3 went from 4.6 to 6.3 thousand tokens/s on GB300 with it
///   (github:NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md);
/// * on Hopper: cuDNN 9.0 in 24.03, in the tables of long sequences; those of 24.07, no longer than 8192, do not tell.
const RATES_OF_2026: (&str, Release) = ("cudnn-2025", (26, 6));
const RATES_OF_2024: (&str, Release) = ("cudnn-9.0", (24, 5));

/// Attention as it was when a run was made, where the GPU has a curve for that: training of which no release is known
/// is from before 2026, and from after 2024.
pub fn older_kernels(run: &Training, gpu: &mut GpuSpec) {
    let released = released(run);
    let from = |(curve, first): (&'static str, _), unsaid| {
        let older = released.map_or(unsaid, |release| release < first);
        older.then(|| gpu.attention.get(curve)).flatten().cloned()
    };
    if let Some(older) = from(RATES_OF_2026, true).or_else(|| from(RATES_OF_2024, false)) {
        gpu.attention.insert("cudnn".into(), older);
    }
}

/// The first of NVIDIA's containers with NCCL 2.23 and its parallel aggregated trees (2.23.4; which container was the
/// first is remembered, not looked up).
const TREES_OF_ALL: Release = (24, 12);

/// The stack with the library of when a run was made: of training of which no release is known nothing younger than its GPU
/// is taken for granted, and Blackwell came with newer ones.
pub fn older_library(run: &Training, architecture: Architecture, stack: &StackSpec) -> StackSpec {
    let unsaid = architecture != Architecture::Blackwell;
    if !stack.has_pat() || !released(run).map_or(unsaid, |release| release < TREES_OF_ALL) {
        return stack.clone();
    }
    let source = "older than NCCL 2.23".into();
    StackSpec { no_pat: Some(Sourced { value: true, source, provenance: Origin::Derived }), ..stack.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_are_no_numbers_of_weights() {
        for model in [
            "Llama-3 8B",
            "Llama3-70B",
            "Meta Llama 3.1 405B",
            "Qwen2.5-7B",
            "Qwen 3 30B-A3B",
            "DeepSeek-V3",
            "gpt-oss 20b",
        ] {
            assert!(is_of_2024(model), "{model}");
        }
        for model in [
            "LLaMA 30B",
            "LLaMA-33B",
            "OpenLLaMA 3B",
            "Llama-2 7B",
            "Qwen-14B",
            "Qwen 1.8B",
            "GPT 22B",
            "GLM-130B",
            "Phi-2",
            "DeepSeek 67B",
        ] {
            assert!(!is_of_2024(model), "{model}");
        }
    }

    fn run(system: &str, notes: &str) -> Training {
        Training { system: system.into(), notes: notes.into(), ..Training::default() }
    }

    #[test]
    fn what_is_not_said_of_megatron_bridge_is_the_middle() {
        for unsaid in ["Megatron-Bridge@79308d0", "Megatron-Bridge 0.4.2", "Megatron-Bridge"] {
            assert_eq!(released(&run(unsaid, "")), Some(MIDDLE), "{unsaid}");
        }
        assert_eq!(released(&run("Megatron-Bridge@79308d0 (NeMo 26.04)", "")), Some((26, 4)));
        assert_eq!(released(&run("Megatron-Bridge@79308d0", "container nemo:25.09")), Some((25, 9)));
        assert_eq!([released(&run("NeMo", "24.03 ms a layer")), released(&run("Megatron-LM", ""))], [None; 2]);
    }

    #[test]
    fn kernels_are_those_of_their_time() {
        let half = |system: &str| {
            let mut gpu = GpuSpec::find("gb300").unwrap();
            older_kernels(&run(system, ""), &mut gpu);
            gpu.attention["cudnn"].backward.half.value
        };
        assert!(half("NeMo 26.08") < half("NeMo 26.04") && half("Megatron-Core MoE") == half("NeMo 26.04"));
        assert_eq!(half("Megatron-Bridge (NeMo, July 2026)"), half("NeMo 26.08"));
        let long = |system: &str, notes: &str| {
            let mut gpu = GpuSpec::find("h100-sxm5").unwrap();
            older_kernels(&run(system, notes), &mut gpu);
            gpu.attention["cudnn"].forward.ceiling.value[0].1
        };
        let (old, new) = (long("NeMo 24.03.01", ""), long("NeMo", "24.03 ms a layer"));
        assert!(old < new && long("NeMo", "container NeMo24.03.01") == old && long("NeMo 24.07", "") == new);
        assert_eq!(long("NeMo before 24.05", ""), old);
    }

    #[test]
    fn libraries_are_those_of_their_time() {
        let has = |system: &str, architecture| {
            older_library(&run(system, ""), architecture, &StackSpec::find("nccl-cudnn").unwrap()).has_pat()
        };
        assert!(has("NeMo 25.02", Architecture::Hopper) && has("Megatron-LM", Architecture::Blackwell));
        assert!(!has("NeMo 24.07", Architecture::Hopper) && !has("Megatron-LM", Architecture::Ampere));
    }

    #[test]
    fn what_is_younger_than_flash_attention() {
        assert!(
            ["H100-SXM-80GB", "8xGB200", "RTX 6000 Ada", "NVIDIA L4", "MI300X", "RTX 4090"]
                .map(is_later_gpu)
                .iter()
                .all(|is| *is)
        );
        assert!(
            ["A100-SXM-80GB", "A800", "V100", "MI250X (GCD)", "RTX 3090", "A40"].map(is_later_gpu).iter().all(|is| !is)
        );
        let model = |model: &str, gated_ffn| {
            is_later_model(&Training { model: model.into(), gated_ffn, ..Training::default() })
        };
        assert!(model("Llama-3 8B", None) && model("a model", Some(true)) && model("Falcon-40B", Some(false)));
        assert!(!model("GLM-130B", Some(true)) && !model("GPT-3 175B", Some(false)) && !model("BLOOM-176B", None));
    }
}
