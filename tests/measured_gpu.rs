//! What one GPU did, predicted by the profile that was measured on it: nothing runs on a GPU here, so the errors are the
//! prediction's own. Both come from `traces/measured/h100/measure`.

use foretrain::calibrate::shapes;
use foretrain::compare::stats::quantile;
use foretrain::device::Profile;
use foretrain::exec::cuda::contention::play;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

fn home() -> PathBuf {
    std::env::var_os("FT_DIR")
        .map_or(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("traces/measured/h100"), PathBuf::from)
}

#[test]
fn dev() {
    let profile = Profile::load(&home().join("gpu.json")).unwrap();
    let gpu = profile.gpu.as_ref().unwrap();
    let mut all: Vec<_> = std::fs::read_dir(home())
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| {
            p.file_name().unwrap().to_string_lossy().starts_with("v")
                && p.to_string_lossy().ends_with(".json")
                && !p.to_string_lossy().contains("trace.json")
        })
        .collect();
    all.sort();
    for path in all {
        let found: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let plan =
            shapes::gpu_fresh(found["seed"].as_u64().unwrap(), found["ranks"].as_u64().unwrap() as u32).plan().unwrap();
        let t = play(&plan, &profile, gpu).unwrap();
        let mut spans: BTreeMap<(u32, String), f64> = BTreeMap::new();
        for class in &t.classes {
            spans.extend(class.spans.iter().map(|s| ((class.rank, s.path.clone()), s.duration().value())));
        }
        let (mut ops, mut lines) = (vec![], vec![]);
        for op in found["ops"].as_array().unwrap() {
            let at = (op["rank"].as_u64().unwrap() as u32, op["path"].as_str().unwrap().to_string());
            let (p, m) = (spans[&at], op["measured_s"].as_f64().unwrap());
            ops.push((p / m - 1.0).abs());
            lines.push((p, m, at));
        }
        let f = |x: &str| found[x].as_f64().unwrap_or(0.0);
        println!(
            "{:16} {:32} pred {:7.2} meas {:7.2} graph {:7.2} ms  e2e {:+.3} ({:+.3} graph)  med {:.3} p90 {:.3}   was {:.3} {:.3}",
            path.file_name().unwrap().to_string_lossy(),
            found["what"].as_str().unwrap().chars().take(30).collect::<String>(),
            t.step.value() * 1e3,
            f("measured_step_s") * 1e3,
            f("graph_step_s") * 1e3,
            t.step.value() / f("measured_step_s") - 1.0,
            t.step.value() / f("graph_step_s") - 1.0,
            quantile(&ops, 0.5),
            quantile(&ops, 0.9),
            f("end_to_end_error"),
            f("median_op_error")
        );
        if std::env::var_os("FT_OPS").is_some() {
            for (p, m, at) in lines.iter().filter(|l| (l.0 / l.1 - 1.0).abs() > 0.08 && l.1 > 4e-5) {
                println!("    {:3} {:50} {:9.1} {:9.1} {:+.2}", at.0, at.1, p * 1e6, m * 1e6, p / m - 1.0);
            }
        }
    }
}

#[test]
fn drawn() {
    let profile = Profile::load(&home().join("gpu.json")).unwrap();
    for (seed, ranks) in (1..7).map(|s| (s, 1)).chain((27..60).map(|s| (s, 4))) {
        let plan = shapes::gpu_fresh(seed, ranks).plan().unwrap();
        let atoms = foretrain::plan::link::AtomTable::new(&plan).unwrap();
        let bytes: u64 = (0..plan.ranks()).map(|r| foretrain::plan::memory::Layout::new(&plan, &atoms, plan.program_of(r)).unwrap().bytes).sum();
        let t = play(&plan, &profile, profile.gpu.as_ref().unwrap()).unwrap();
        println!("seed {seed} ranks {ranks} {} seq {} {} {:.1} GiB {:.2} ms", plan.about.model, plan.about.seq_len, plan.about.strategy, bytes as f64 / (1u64<<30) as f64, t.step.value()*1e3);
    }
}
