//! Plans that are saved are what their flags say, and are costed on what is said.

use crate::program::{folder, json, json_of, said, succeeds};

/// Numbers of a file are read to the last bit that was written: the FLOPs of these models in a step are such that a reader that
/// is off by one would find another plan.
#[test]
fn a_saved_plan_is_what_its_flags_say() {
    let dir = folder();
    // Two of them are plans that do not fit, and are costed all the same.
    for (flags, code) in [
        ("--model llama-3-70b --gpus 64 --tp 4 --pp 4 --global-batch 256 --recompute full", 0),
        ("--model llama-3-70b --gpus 64 --tp 8 --zero 3 --recompute full", 0),
        ("--model qwen3-30b-a3b --gpus 64 --ep 8 --zero 1", 2),
        ("--model qwen3-30b-a3b --gpus 64 --ep 8 --zero 1 --dispatch deepep-v2-direct", 2),
        ("--model llama-3-8b --gpus 16 --ulysses 4 --ring 2 --seq-len 24K", 0),
    ] {
        succeeds(dir.path(), &format!("plan {flags} --out plan.json"));
        let [saved, built] =
            ["--plan plan.json", flags].map(|of| json_of(dir.path(), &format!("estimate {of} --json"), code));
        assert_eq!((&saved["plan"], &saved["step_time_s"]), (&built["plan"], &built["step_time_s"]), "{flags}");
    }
}

/// A plan names no cluster: what it is costed on is said where nobody says it.
#[test]
fn a_plan_is_costed_on_a_cluster_that_is_said() {
    let dir = folder();
    succeeds(dir.path(), "plan --cluster dgx-a100 --gpus 8 --seq-len 4096 --zero 3 --recompute full --out pa.json");
    let note = "cluster: a plan names none, and no --cluster is given: taken is dgx-h100";
    for command in ["estimate", "simulate"] {
        let found = json(dir.path(), &format!("{command} --plan pa.json --json"));
        assert!(found["cluster"] == "dgx-h100" && found["notes"][0] == note, "{}", found["notes"]);
        let found = json(dir.path(), &format!("{command} --plan pa.json --cluster dgx-a100 --json"));
        assert!(found["cluster"] == "dgx-a100" && !found["notes"].to_string().contains("taken"), "{}", found["notes"]);
    }
    assert!(succeeds(dir.path(), "estimate --plan pa.json").contains(&format!("  note: {note}\n")));
}

/// What a plan settles no flag may say again, and what is not even is told of.
#[test]
fn a_plan_keeps_its_routes() {
    let dir = folder();
    let way = "--model qwen3-30b-a3b --gpus 16 --ep 8 --recompute full --global-batch 16";
    succeeds(dir.path(), &format!("plan {way} --routing zipf:1.0 --out plan.json"));
    let (code, _, err) = said(dir.path(), "estimate --plan plan.json --routing balanced");
    assert!(code == 2 && err.contains("contradicts the plan, which has routes of its own"), "{err}");
    let note = "routing: as --routing or the plan has it";
    assert!(succeeds(dir.path(), "estimate --plan plan.json").contains(note));
    assert!(!succeeds(dir.path(), &format!("estimate {way}")).contains(note));
}

/// Of one length, too, which is packed again and again.
#[test]
fn documents_of_a_sequence_are_told_of() {
    let dir = folder();
    for (lengths, said) in [("4K", "documents of 4 K tokens"), ("32K,32K", "2 documents of 64 K tokens in all")] {
        let found = succeeds(dir.path(), &format!("estimate --gpus 8 --tp 8 --seq-len 64K --documents {lengths}"));
        assert!(found.contains(&format!("packed: a sequence is {said}")), "{found}");
    }
}
