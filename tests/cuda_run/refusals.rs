//! What cannot be run, and what fails.

use crate::cuda_double::Double;
use crate::step::{ENGINES, model, none, options, plan};
use foretrain::exec::Job;
use foretrain::exec::cuda::run::train_on;
use foretrain::exec::source::Source;
use foretrain::plan::{Dtype, Plan};
use foretrain::spec::{LlmSpec, Parallelism, Workload};
use foretrain::strategy::build;

fn error_of(plan: &Plan, double: &mut Double) -> String {
    let job = Job { source: &Source::seeded(7), steps: 1, keep_last: false, watch: None };
    train_on(double, plan, &options(plan, &[0]), &job, &mut |_, _| Ok(())).unwrap_err().to_string()
}

#[test]
fn what_fails_is_named() {
    let plan = plan(Parallelism { ring: 2, ..none() }, 1);
    let mut double = Double::new(1, 8 << 30, 1);
    double.broken = Some("row_norm");
    let error = error_of(&plan, &mut double);
    for part in ["rank ", "norm", "stream", "bf16", "illegal memory access", "[64, 64]"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn too_little_memory_is_refused_before_any_is_asked_for() {
    let plan = plan(Parallelism { ring: 2, ..none() }, 1);
    let mut double = Double::new(1, 100 << 20, 1);
    let error = error_of(&plan, &mut double);
    assert!(error.contains("memory: 2 ranks need") && error.contains("use more GPUs"), "{error}");
    assert_eq!(double.free(0), 100 << 20);
}

#[test]
fn what_no_kernel_takes_is_refused_with_the_remedy() {
    let work =
        Workload { seq_len: 64, global_batch: 1, micro_batch: 1, dtype: Dtype::F32, documents: Default::default() };
    let f32 = build(&model(1, 4), &work, &none(), ENGINES).unwrap();
    let error = error_of(&f32, &mut Double::new(1, 1 << 30, 1));
    assert!(error.contains("f32") && error.contains("--dtype bf16"), "{error}");
    let work = Workload { dtype: Dtype::Bf16, ..work };
    let narrow = build(&LlmSpec::find("tiny").unwrap(), &work, &none(), ENGINES).unwrap();
    let error = error_of(&narrow, &mut Double::new(1, 8 << 30, 1));
    assert!(error.contains("head_dim 8") && error.contains("multiple of 32"), "{error}");
}
