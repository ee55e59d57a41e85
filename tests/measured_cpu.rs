//! What one machine did, predicted by the profile that was measured on it: nothing is timed here, so the errors are the
//! prediction's own. Both come from `.ci/measure-cpu`.

use foretrain::calibrate::shapes;
use foretrain::cluster::Cluster;
use foretrain::compare::stats::quantile;
use foretrain::cost::{self, Machine, cost};
use foretrain::device::speed::{Slower, Speed};
use foretrain::device::{KernelTime, Profile};
use foretrain::plan::{Dtype, Plan, Work, WorkClass};
use foretrain::spec::{ClusterSpec, GpuSpec, StackSpec};
use foretrain::timeline::Timeline;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

fn home() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("traces/measured/cpu")
}

/// What `validate` wrote of plans of so many ranks.
fn measured(ranks: u32) -> Vec<(String, Value)> {
    let mut all = vec![];
    for entry in std::fs::read_dir(home()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with(&format!("{ranks}-ranks-")) {
            all.push((name, serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()));
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn predict(profile: &Profile, plan: &Plan, devices: u32) -> Timeline {
    let (gpu, stack) = (GpuSpec::find("cpu-core").unwrap(), StackSpec::find("cpu").unwrap());
    let cluster = Cluster::new(&ClusterSpec::find("local-cpu").unwrap(), &gpu, plan.ranks()).unwrap();
    let devices: Vec<u32> = (0..plan.ranks()).map(|rank| rank % devices).collect();
    let machine = Machine { cluster: &cluster, stack: &stack, kernels: profile, devices: Some(&devices) };
    cost(plan, machine, cost::Effort::ALL_SPANS).unwrap()
}

/// Errors of one plan.
struct Errors {
    name: String,
    step: f64,
    median_op: f64,
    /// Of kernels against the time that they had a core.
    median_kernel: f64,
    /// How far the runs spread.
    noise: f64,
    /// Share of the cores' time that other programs, or machines of the same host, had meanwhile.
    others: f64,
}

fn errors(profile: &Profile, name: &str, found: &Value) -> Errors {
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{name}: {value} is no number"));
    let whole = |field: &str| number(&found[field]) as u32;
    let plan = shapes::fresh(found["seed"].as_u64().unwrap(), whole("ranks")).plan().unwrap();
    let what = format!("{}, seq_len {}, {}", plan.about.model, plan.about.seq_len, plan.about.strategy);
    assert_eq!(found["what"], what, "{name}: plans are drawn otherwise now; measure again with .ci/measure-cpu");
    let now: Speed = serde_json::from_value(found["speed_now"].clone()).unwrap();
    let profile = profile.at(&Slower::between(profile.speed().unwrap(), &now));
    let predicted = predict(&profile, &plan, whole("devices"));
    let mut spans: BTreeMap<(u32, String), f64> = BTreeMap::new();
    for class in &predicted.classes {
        spans.extend(class.spans.iter().map(|s| ((class.rank, s.path.clone()), s.duration().value())));
    }
    let (mut ops, mut kernels) = (vec![], vec![]);
    for op in found["ops"].as_array().unwrap() {
        let at = (number(&op["rank"]) as u32, op["path"].as_str().unwrap().to_string());
        let predicted = spans.get(&at).unwrap_or_else(|| panic!("{name}: {at:?} is in no plan now; measure again"));
        ops.push((predicted / number(&op["measured_s"]) - 1.0).abs());
        kernels.extend(op["on_core_s"].as_f64().map(|s| (predicted / s - 1.0).abs()));
    }
    assert!(ops.len() > 20 && kernels.len() > 20, "{name}");
    Errors {
        name: name.into(),
        step: (predicted.step.value() / number(&found["measured_step_s"]) - 1.0).abs(),
        median_op: quantile(&ops, 0.5),
        median_kernel: quantile(&kernels, 0.5),
        noise: number(&found["noise"]),
        others: number(&found["others"]["programs"]) + number(&found["others"]["stolen"]),
    }
}

fn all(ranks: u32) -> Vec<Errors> {
    let profile = Profile::load(&home().join("profile.json")).unwrap();
    let all: Vec<Errors> = measured(ranks).iter().map(|(name, found)| errors(&profile, name, found)).collect();
    for e in &all {
        let [step, op, kernel, noise, others] =
            [e.step, e.median_op, e.median_kernel, e.noise, e.others].map(|x| format!("{:.1} %", 100.0 * x));
        println!("{}: step {step}, ops {op}, kernels on their core {kernel}; noise {noise}, others {others}", e.name);
    }
    all
}

fn median(all: &[Errors], of: fn(&Errors) -> f64) -> f64 {
    quantile(&all.iter().map(of).collect::<Vec<f64>>(), 0.5)
}

/// With a core for each rank a step is to be within 8 %, and an op in the median of the plans within 10 %.
const STEP: f64 = 0.08;
const OPS: f64 = 0.10;
/// With more ranks than cores a step is to be within 15 %.
const CROWDED_STEP: f64 = 0.15;
fn steps_are_right(all: &[Errors], worst: f64) {
    for e in all {
        assert!(e.step <= worst, "{}: the step is off by {:.3}, the runs spread by {:.3}", e.name, e.step, e.noise);
    }
}

#[test]
fn a_rank_a_core() {
    let all = all(2);
    assert!(all.len() >= 4, "{} timelines", all.len());
    steps_are_right(&all, STEP);
    assert!(median(&all, |e| e.median_op) <= OPS);
    assert!(median(&all, |e| e.median_kernel) <= OPS);
}

#[test]
fn more_ranks_than_cores() {
    let all = all(4);
    assert!(all.len() >= 2, "{} timelines", all.len());
    steps_are_right(&all, CROWDED_STEP);
    assert!(median(&all, |e| e.median_kernel) <= OPS);
}

/// Several matrices of one size, one behind the other, take as long as so many do; whatever was timed of such products.
#[test]
fn several_products_take_so_many_times_one() {
    let profile = Profile::load(&home().join("profile.json")).unwrap();
    let time = |curve: &str, groups: u64| {
        let class = WorkClass::Gemm {
            m: 64 * groups,
            n: 64,
            k: 128,
            cast: 0,
            result: 4,
            groups,
            unaligned: false,
            of_weights: false,
        };
        let work = Work { flops: groups * 2 * 64 * 64 * 128, bytes: groups * 100_000, class };
        profile.time_as(curve, &work, Dtype::F32).seconds.value()
    };
    for curve in ["matmul_nt", "matmul_nn", "matmul_tn_onto", "matmul_none_of_these"] {
        let [one, four] = [1, 4].map(|groups| time(curve, groups));
        assert!(one > 0.0 && (four / one - 4.0).abs() < 1e-9, "{curve}: {one} and {four}");
    }
}
