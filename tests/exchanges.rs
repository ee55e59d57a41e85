//! Exchanges that others have measured: traces/published/exchange.json and exchange_tables.json.

use foretrain::published::{Verdict, load, predict};
use std::path::{Path, PathBuf};

fn verdicts(file: &str) -> Vec<Verdict> {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces/published").join(file);
    predict(&load(path).unwrap(), &|_| {}).unwrap()
}

/// Every prediction of a table whose id ends so is within `most` of what was measured.
#[track_caller]
fn within(all: &[Verdict], table: &str, way: &str, most: f64) {
    let of: Vec<_> = all.iter().filter(|v| v.group == table && v.id.contains(way)).collect();
    assert!(!of.is_empty(), "no row of {table} {way}");
    for v in of {
        let error = v.rel_error.unwrap_or_else(|| panic!("{}: {}", v.id, v.why));
        assert!(error.abs() <= most, "{}: {:?} is not {:?} {}", v.id, v.predicted, v.measured, v.unit);
    }
}

#[test]
fn deepep_tables() {
    let all = verdicts("exchange.json");
    within(&all, "deepep-v1-normal-2025-04-22", "#", 0.10);
    within(&all, "deepep-v2-2026-04", "#", 0.10);
    within(&all, "deepep-v1-ll-2025-06", "dispatch", 0.08);
    within(&all, "deepep-v1-ll-2025-06", "combine", 0.12);
    within(&all, "deepep-v1-ll-2025-02", "dispatch", 0.08);
    within(&all, "deepep-v1-ll-2025-02", "combine", 0.12);
    within(&all, "deepep-v2-sm-golden", "#", 0.0);
}

/// Four layers with experts forward beside four backward, as DeepSeek published the trace of it: with kernels as its own
/// software has them (models/stack/hai-llm.json) they compute for 123 ms, of 124 there, in which exchanges hide here and all
/// but 4 % of them there. Attention takes 23 ms here and 20 there. Of the whole step, which goes by DualPipe's schedule, a
/// tenth is missing: modules of multi-token prediction are not in the plan, and what is not side by side is not numbered.
#[test]
fn deepseeks_pair_of_chunks() {
    let all = verdicts("exchange.json");
    within(&all, "dsv3-profile-train", "#", 0.05);
    within(&all, "dsv3-training", "#", 0.13);
}

/// The median error of a table whose ids contain `way`.
fn median(all: &[Verdict], table: &str, way: &str) -> f64 {
    let of = all.iter().filter(|v| v.group.contains(table) && v.id.contains(way));
    let mut errors: Vec<f64> = of.map(Verdict::error).collect();
    assert!(!errors.is_empty(), "no row of {table} {way}");
    errors.sort_by(f64::total_cmp);
    errors[errors.len() / 2]
}

/// Rows of other libraries that none of their constants was fitted on.
#[test]
fn other_libraries_in_the_median() {
    let all = verdicts("exchange.json");
    for (table, way, most) in [
        ("hybridep-gb200", "kern", 0.08),
        ("hybridep-gb200", "torch", 0.15),
        ("uccl-mi355x-pollara", "#", 0.08),
        ("mori-normal", "#", 0.15),
        ("pplx-garden-decode", "pplx", 0.06),
        ("pplx-garden-prefill", "pplx", 0.05),
    ] {
        let found = median(&all, table, way);
        assert!(found <= most, "{table} {way}: {found}");
    }
    let found = median(&verdicts("exchange_tables.json"), "trtllm_alltoall", "#");
    assert!(found <= 0.06, "TensorRT-LLM: {found}");
}

#[test]
fn operator_tables_in_the_median() {
    let all = verdicts("exchange_tables.json");
    for (table, most) in [("h200_sxm/comm/sglang/0.5.12/wideep_deepep_normal_perf", 0.08), ("_ll_perf", 0.10)] {
        let mut errors: Vec<f64> = all.iter().filter(|v| v.group.contains(table)).map(Verdict::error).collect();
        errors.sort_by(f64::total_cmp);
        let median = errors[errors.len() / 2];
        assert!(median <= most, "{table}: {median} of {} rows", errors.len());
    }
}
