//! What replicas share out among themselves (ZeRO, arXiv:1910.02054), by the words of a source.

use super::wider::shares_sequences;
use crate::published::row::case::Training;
use crate::published::row::words::{number_behind, squeezed};
use crate::published::software::habits::Habits;
use crate::published::software::system::System;
use crate::published::software::table::Fact;

/// Names of what a system shards, and the stage of ZeRO that does.
const BY_NAME: &[(&str, u32)] = &[
    ("distributedoptimizer", 1),
    ("optimizerparallel", 1),
    ("shardgradop", 2),
    ("fsdp", 3),
    ("hsdp", 3),
    ("hybridshard", 3),
    ("fullshard", 3),
    ("fullysharded", 3),
    ("gemini", 3),
    ("zero++", 3),
    ("mics", 3),
    ("hpz", 3),
    ("zeroinfinity", 3),
    ("zerooffload", 2),
    ("distopt", 1),
    ("parameterssharded", 3),
];

/// The stage of ZeRO: as stated, else as the name of the system has it, else the system's habit.
pub fn stage(run: &Training, habits: Habits) -> u32 {
    let found = as_named(run, habits);
    if found == 3 && keeps_weights(&run.system) { 2 } else { found }
}

fn as_named(run: &Training, habits: Habits) -> u32 {
    match run.zero.trim() {
        "" => named(&run.system).unwrap_or(habits.zero),
        number @ ("0" | "1" | "2" | "3") => number.parse().unwrap_or(0),
        words => named(words).unwrap_or(0),
    }
}

/// Whether words say that gathered weights stay until the backward pass is over, which is stage 2: FSDP2's
/// `reshard_after_forward=False`, torchtitan's `never`.
fn keeps_weights(words: &str) -> bool {
    let text = squeezed(words);
    let denied = ["notreshard", "noreshard", "neverreshard", "withoutreshard"].iter().any(|word| text.contains(word));
    let set = text.split("reshard").skip(1).any(|rest| {
        let rest = rest.strip_prefix("ed").unwrap_or(rest);
        let value = rest.strip_prefix("afterforward").unwrap_or(rest).trim_start_matches(['=', ':', '(', '"', '\'']);
        ["false", "never", "no", "off"].iter().any(|word| value.starts_with(word))
    });
    denied || set
}

/// The stage that words name.
fn named(words: &str) -> Option<u32> {
    let text = squeezed(words);
    let counted = ["zero", "stage"].iter().filter_map(|word| number_behind(&text, word)).find(|stage| *stage <= 3.0);
    let by_name = || BY_NAME.iter().find(|(name, _)| text.contains(name)).map(|(_, stage)| *stage);
    let by_name = || if keeps_weights(words) { Some(2) } else { by_name() };
    let bare = (text == "zero").then_some(1);
    counted.map(|stage| stage as u32).or_else(by_name).or(bare)
}

/// Ranks that share out among themselves where not all that hold the same weights do: those that are stated, else those
/// of a node that do (FSDP's HYBRID_SHARD), one for each cut of the tensors.
pub fn sharers(run: &Training, node: u32) -> Option<u32> {
    let text = squeezed(if run.zero.is_empty() { &run.system } else { &run.zero });
    let counted =
        ["groupsof", "withinnode(", "inanodeof"].iter().find_map(|word| number_behind(&text, word)).map(|n| n as u32);
    let hybrid = ["hsdp", "hybridshard", "withinnode", "inanode", "mics", "hpz", "zero++"]
        .iter()
        .any(|word| text.contains(word));
    let of_node = node / run.tp.unwrap_or(1).max(1);
    counted.or(degree(&text)).or(hybrid.then_some(of_node)).filter(|n| *n > 1)
}

/// The degree of sharding: "HSDP, shard 2", `dp_shard=8`, torchtitan's `data_parallel_shard_degree`.
fn degree(text: &str) -> Option<u32> {
    text.match_indices("shard").filter(|(at, _)| !text[..*at].ends_with("re")).find_map(|(at, word)| {
        let tail = &text[at + word.len()..];
        let tail = ["degree", "size"].iter().find_map(|name| tail.strip_prefix(name)).unwrap_or(tail);
        let digits = tail.trim_start_matches(['=', ':']);
        digits[..digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len())].parse().ok()
    })
}

/// Whether weights are copied out of the buffer that they are gathered in, and gradients into the one that is scattered: by
/// PyTorch's FSDP2 (`fully_shard`), where they are parameters of their own and not views of a flat one, and by DeepSpeed.
/// Megatron-FSDP, FSDP's first version and XLA have them where they are read.
pub fn copies(run: &Training, zero: u32) -> bool {
    let system = System::of(&format!("{}; {}", run.system, run.zero));
    let copied = system.says(&["fsdp2", "fullyshard("]) || system.is(Fact::CopiesShards);
    zero >= 2 && copied && !system.says(&["megatronfsdp", "jax", "xla"])
}

/// Stages to try where nothing is said of sharding nor of the split and the plan does not fit, the least first: those that
/// every framework has where the system is not named either, else the one of systems that shard.
pub fn to_try(run: &Training) -> &'static [&'static str] {
    let degrees = [run.tp, run.pp, run.cp, run.ulysses, run.ring, run.ep];
    let cut = [run.tp, run.pp, run.ep];
    let open = run.zero.is_empty() && cut.iter().all(|degree| degree.unwrap_or(1) == 1);
    let system = System::of(&run.system);
    let cuts = system.is(Fact::Cuts) || system.says(&["pipeline", "autotp", "3d", "tensorparallel"]);
    match () {
        () if !open => &[],
        () if run.system.is_empty() && degrees.iter().all(Option::is_none) => &["ZeRO-1", "ZeRO-3"],
        // The examples of who shares sequences shard by ZeRO or FSDP.
        () if (system.is(Fact::Shards) || shares_sequences(&run.system)) && !cuts => &["ZeRO-3"],
        () => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(system: &str, zero: &str) -> Training {
        Training { system: system.into(), zero: zero.into(), ..Training::default() }
    }

    #[test]
    fn zero_by_the_names_of_systems() {
        for (words, found) in [
            ("ZeRO-3 (FSDP FULL_SHARD)", 3),
            ("distributed-optimizer (ZeRO-1)", 1),
            ("distributed-optimizer, overlapped", 1),
            ("FSDP ZeRO-2-like (params not resharded after forward)", 2),
            ("ZeRO-1/2 (all-gather params / reduce-scatter grads per chunk)", 1),
            ("none/DDP (not stated)", 0),
            ("FSDP", 3),
            ("HSDP", 3),
            ("3", 3),
            ("stage 2", 2),
            ("Gemini, all parameters sharded", 3),
            ("DP", 0),
            ("", 0),
            ("ZeRO", 1),
            ("ZeRO++", 3),
            ("ZeRO-Infinity", 3),
            ("ZeRO-Offload", 2),
            ("dist-opt", 1),
            ("FSDP2 (reshard_after_forward=False)", 2),
            ("FSDP, reshard_after_forward=never", 2),
            ("FSDP2, reshard_after_forward: \"never\"", 2),
            ("FSDP, no reshard after forward", 2),
            ("FSDP, not resharded after forward", 2),
            ("FSDP2 (reshard_after_forward=True)", 3),
            ("FSDP, resharded after forward, no offload", 3),
        ] {
            assert_eq!(stage(&run("", words), Habits::of("Megatron-LM PTD-P")), found, "{words}");
        }
    }

    #[test]
    fn who_copies_what_is_gathered() {
        let of = |system: &str, zero: &str, stage| copies(&run(system, zero), stage);
        assert!(of("torchtitan (torch.compile)", "FSDP", 3) && of("Accelerate", "FSDP2", 3) && of("DeepSpeed", "3", 3));
        assert!(of("DeepSpeed", "2", 2) && !of("DeepSpeed", "1", 1) && !of("torchtitan", "", 0));
        for system in ["MosaicML LLM Foundry", "PyTorch FSDP", "Megatron-FSDP", "MaxText (JAX)", "Megatron-LM"] {
            assert!(!of(system, "FSDP", 3), "{system}");
        }
    }

    #[test]
    fn where_nothing_is_said_the_name_of_the_system_may() {
        let of = |system: &str, zero: &str| stage(&run(system, zero), Habits::of(system));
        assert_eq!(
            [of("PyTorch FSDP", ""), of("DeepSpeed ZeRO-3", ""), of("DeepSpeed ZeRO-2 + offload", "")],
            [3, 3, 2]
        );
        let never = "torchtitan, reshard_after_forward never";
        assert_eq!([of(never, ""), of(never, "FSDP"), of("torchtitan", ""), of(never, "ZeRO-1")], [2, 2, 3, 1]);
        assert_eq!([of("PyTorch FSDP", "none"), of("Megatron-LM", ""), of("Megatron zero-bubble", "")], [0, 1, 0]);
        assert_eq!(of("DeepSpeed ZeRO-100B + Megatron-LM", ""), 1);
        assert_eq!(to_try(&run("LitGPT", "")), ["ZeRO-3"]);
        assert!(to_try(&run("Megatron-DeepSpeed", "")).is_empty() && to_try(&run("LitGPT", "none")).is_empty());
    }

    #[test]
    fn who_shares_out_by_the_words_of_systems() {
        for (words, ranks) in [
            ("ZeRO-1 within node (8), replicated across nodes", Some(8)),
            ("ZeRO-1 sharded within groups of 4 (hierarchical), replicated across", Some(4)),
            ("HSDP", Some(16)),
            ("FSDP (HYBRID_SHARD)", Some(16)),
            ("ZeRO-3 (FSDP FULL_SHARD)", None),
            ("HSDP, shard 2, reshard_after_forward=never", Some(2)),
            ("HSDP (dp_shard = 4, dp_replicate = 8)", Some(4)),
            ("FSDP, data_parallel_shard_degree: 8", Some(8)),
            ("FSDP, reshard 2", None),
            ("", None),
        ] {
            assert_eq!(sharers(&run("", words), 16), ranks, "{words}");
        }
        // Of 16 ranks of a node four hold the same cut of the tensors.
        let cut = |tp| sharers(&Training { tp: Some(tp), ..run("", "HSDP") }, 16);
        assert_eq!([cut(4), cut(16), cut(32)], [Some(4), None, None]);
    }
}
