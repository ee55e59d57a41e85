//! What a run does to save memory, by what its source says: what it goes through piece by piece, and what waits in the host's
//! memory. Words of options.

use crate::published::row::case::Training;
use crate::published::row::words::{affirmed, number_before, number_behind, squeezed, told};
use crate::published::software::system::System;
use crate::published::software::table::Fact;
use crate::spec::{LlmSpec, WideLoss};

/// Tokens of a chunk of FPDT where nobody says (arXiv:2408.16978, as remembered, not looked up: its figure of throughput by
/// chunk is flat from there on).
const CHUNK: u64 = 64 << 10;

/// FPDT is its chunks, and the inputs of its layers are in the host's memory too.
pub fn chunked(run: &Training, seq: u64) -> Vec<&'static str> {
    if !squeezed(&run.system).contains("fpdt") {
        return vec![];
    }
    let words = [(2, "fpdt-2"), (4, "fpdt-4"), (8, "fpdt-8"), (16, "fpdt-16"), (32, "fpdt-32"), (64, "fpdt-64")];
    let enough = words.iter().find(|(chunks, _)| chunks * CHUNK >= seq).unwrap_or(&words[5]);
    vec![enough.1, "offload-activations"]
}

/// Pieces where nobody says how many: logits and networks are a small part of what is kept of a layer from there on.
const TILED_LOSS: &str = "loss-chunks-16";
const TILED_MLP: &str = "mlp-chunks-16";
/// Said of a run, these and inputs of layers in the host's memory.
const ALL: &str = "allofalst";

/// What Arctic Long Sequence Training goes through piece by piece (arXiv:2506.13996), where it is said of a run.
pub fn tiled(run: &Training, model: &LlmSpec) -> Vec<&'static str> {
    let text = squeezed(&affirmed(&format!("{}; {}", run.system, run.notes)));
    let says = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let cut = says(&["chunkedloss", "chunkedcrossentropy", "chunkedce", "linearcrossentropy", "cutcrossentropy"]);
    let behind_attention = model.moe.is_none() && model.pattern.is_empty() && !model.parallel_block;
    let all = [
        (
            says(&["tiledlogits", "tiledloss", "tiledmlp/loss", "tiledmlpandloss", ALL]) || cut || fuses_head(run),
            TILED_LOSS,
        ),
        (says(&["tiledmlp", "tiledlogitsandmlp", ALL]) && behind_attention, TILED_MLP),
    ];
    all.into_iter().filter(|(is, _)| *is).map(|(_, word)| word).collect()
}

/// What becomes of a run's logits: nothing where the loss goes through them piece by piece, or is said to be fused. Liger's kernel
/// of the loss alone writes the gradient over what it reads.
pub fn wide_loss(run: &Training, in_tiles: &[&str], by_habit: WideLoss) -> WideLoss {
    let is_fused = squeezed(&affirmed(&run.notes)).contains("fusedcrossentropy");
    match by_habit {
        _ if is_fused || in_tiles.contains(&TILED_LOSS) => WideLoss::Never,
        WideLoss::Copied if System::of(&run.system).has("liger") => WideLoss::InPlace,
        _ => by_habit,
    }
}

/// Liger's kernel of output matrix and loss has a piece of the logits at a time (arXiv:2410.10989): it comes with what Liger makes
/// of Hugging Face's models, and not with the norms that others take from it.
fn fuses_head(run: &Training) -> bool {
    let system = System::of(&run.system);
    system.has("liger") && system.is(Fact::LigerHead)
}

/// Whether what a layer keeps is stated to be in the host's memory.
pub fn activations_are_away(run: &Training) -> bool {
    let remarked = ["checkpointsofactivationsoffloaded", "checkpointsoffloaded", ALL];
    let said = squeezed(&affirmed(&format!("{}; {}", run.system, run.notes)));
    remarked.iter().any(|word| said.contains(word))
        || squeezed(&run.system).contains("ckptoffload")
        || squeezed(&run.recompute).contains("offload")
}

/// Whether the optimizer is stated to be the CPU's, where the sharding is named or the system.
pub fn optimizer_is_away(run: &Training) -> bool {
    let said = [squeezed(&affirmed(&run.zero)), System::of(&run.system).text];
    let is = |text: &String| text.contains("offload") && (text.contains("optimizer") || text.contains("adam"));
    // ZeRO's offload is that of the optimizer first of all (arXiv:2101.06840), of activations only where it says so.
    let zeros = ["zerooffload", "zero3offload", "zero2offload", "zero3+offload", "zero2+offload", "zero1+offload"];
    let remarked = ["optimizeroffload", "offloadedoptimizer", "cpuoffload", "adamonthecpu"];
    if remarked.iter().any(|word| squeezed(&affirmed(&run.notes)).contains(word)) {
        return true;
    }
    said.iter().any(is) || said.iter().any(|text| zeros.iter().any(|word| text.contains(word)))
}

/// The part of the optimizer that is stated to be away, where that is not all of it: "75% of the optimizer offloaded", Megatron Core's
/// `optimizer_offload_fraction`.
pub fn part_away(run: &Training) -> Option<f64> {
    let texts = [&run.zero, &run.system, &run.notes].map(|text| squeezed(&told(text)));
    let of = |text: &String| {
        let at = text.find("%oftheoptimizer");
        let percent = at.and_then(|at| number_before(text, at)).map(|percent| percent / 100.0);
        let fraction = || ["offloadfraction=", "offloadfraction"].iter().find_map(|word| number_behind(text, word));
        percent.filter(|_| text.contains("offload")).or_else(fraction)
    };
    texts.iter().find_map(of).filter(|part| (0.0..1.0).contains(part))
}

/// Whether weights are stated to wait in the host's memory, too (ZeRO-Infinity, arXiv:2104.07857; FSDP's `offload_params`),
/// which no plan has.
pub fn weights_are_away(run: &Training) -> bool {
    let of = |words: &str| {
        let mut clauses = words.split([',', ';', '+']).map(squeezed);
        let is = |clause: String| {
            let weights = ["param", "weight"].iter().any(|word| clause.contains(word));
            let away = ["offload", "onthehost", "onthecpu", "inthehost", "oncpu", "cpu'smemory"];
            let denied = ["nooffload", "nothingoffload", "notoffload", "withoutoffload"];
            let says = |words: &[&str]| words.iter().any(|word| clause.contains(word));
            let named = says(&["zeroinfinity", "notfitofweights"]);
            named || weights && says(&away) && !says(&denied)
        };
        clauses.any(is)
    };
    [&run.zero, &run.system, &run.notes].iter().any(|words| of(&told(words)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_optimizer_away() {
        let of = |zero: &str, notes: &str| {
            part_away(&Training { zero: zero.into(), notes: notes.into(), ..Training::default() })
        };
        assert_eq!(of("distributed optimizer, 75% of the optimizer offloaded to the CPU", ""), Some(0.75));
        assert_eq!(of("", "optimizer_offload_fraction=0.4"), Some(0.4));
        assert_eq!([of("ZeRO-3 + offload", ""), of("", "100 % of the optimizer offloaded")], [None; 2]);
    }

    #[test]
    fn what_is_in_the_host_by_the_names_of_systems() {
        let run =
            |system: &str, zero: &str| Training { system: system.into(), zero: zero.into(), ..Training::default() };
        assert!(optimizer_is_away(&run("HF+DeepSpeed ZeRO-3 + act ckpt + CPU AdamW offload", "")));
        assert!(optimizer_is_away(&run("", "ZeRO-3 + CPU optimizer offload")));
        assert!(!optimizer_is_away(&run("Ulysses-Offload/FPDT", "ZeRO-3")));
        assert!(optimizer_is_away(&run("Hugging Face", "ZeRO-3 + offload")));
        assert!(!optimizer_is_away(&run("activation ckpt offload", "ZeRO-3")));
        assert!(!optimizer_is_away(&run("PyTorch", "ZeRO-3, no optimizer offload")));
        for words in [
            "ZeRO-3 + offload params",
            "FSDP2, offload_params=True",
            "optimizer and what does not fit of weights, gradients and activations on the host, overlapped",
            "ZeRO-3 offload (optimizer, parameters offloaded)",
            "ZeRO-Infinity",
        ] {
            assert!(weights_are_away(&run("", words)), "{words}");
        }
        for words in [
            "ZeRO-3 + offload",
            "Gemini, all parameters sharded, nothing offloaded",
            "FSDP, parameters kept, optimizer offload",
        ] {
            assert!(!weights_are_away(&run("", words)), "{words}");
        }
        let model = LlmSpec::find("llama-3-8b").unwrap();
        let in_tiles = |notes: &str| tiled(&Training { notes: notes.into(), ..Training::default() }, &model);
        assert_eq!(in_tiles("tiled logits and loss, tiled MLP"), [TILED_LOSS, TILED_MLP]);
        assert_eq!(in_tiles("tiled logits and loss, no tiled MLP"), [TILED_LOSS]);
        let loss = |notes: &str, in_tiles: &[&str]| {
            wide_loss(&Training { notes: notes.into(), ..Training::default() }, in_tiles, WideLoss::InPlace)
        };
        let ligers = Training { system: "PyTorch FSDP2 + Liger".into(), ..Training::default() };
        assert_eq!(wide_loss(&ligers, &[], WideLoss::Copied), WideLoss::InPlace);
        assert!(!fuses_head(&ligers) && fuses_head(&Training { system: "TRL, Liger kernels".into(), ..ligers }));
        assert_eq!(loss("TE fused cross entropy", &[]), WideLoss::Never);
        assert_eq!((loss("", &[TILED_LOSS]), loss("", &[TILED_MLP])), (WideLoss::Never, WideLoss::InPlace));
        assert!(activations_are_away(&Training {
            notes: "checkpoints of activations offloaded to the CPU".into(),
            ..Training::default()
        }));
        let words = |seq| chunked(&run("Ulysses-Offload/FPDT", ""), seq);
        assert_eq!(words(2_000_000), ["fpdt-32", "offload-activations"]);
        assert_eq!((words(64 << 10)[0], words(1 << 30)[0]), ("fpdt-2", "fpdt-64"));
        assert!(chunked(&run("DeepSpeed-Ulysses", ""), 1 << 20).is_empty());
    }
}
