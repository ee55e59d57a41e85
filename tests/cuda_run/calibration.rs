//! Calibration of a GPU.

use crate::cuda_double::Double;
use crate::step::{none, plan};
use foretrain::act::work_of;
use foretrain::calibrate::{Effort, gpu};
use foretrain::device::curve::Curve;
use foretrain::device::{KernelTime, Profile};
use foretrain::exec::cuda::fused::Attention;
use foretrain::plan::OpKind;
use foretrain::plan::link::{AtomTable, Line};
use foretrain::spec::{Parallelism, Provenance};

#[test]
fn a_calibration_is_a_profile_and_goes_on_where_it_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let rows = dir.path().join("rows.jsonl");
    let job = gpu::Job {
        effort: Effort::TINY,
        command: "a test".into(),
        arch: "sm_90a".into(),
        rows: rows.clone(),
        attention: Attention::Best,
        plans: vec![],
    };
    let measure = |seed| gpu::measure(&mut Double::new(1, 8 << 30, seed), &job, &|_, _| {}).unwrap();
    let profile = measure(1);
    for name in ["matmul_nt/bf16", "attention/bf16", "attention_bwd/bf16", "norm/bf16", "adam/bf16"] {
        assert!(profile.kernels.contains_key(name), "{name} is not among {:?}", profile.kernels.keys());
    }
    let gpu = profile.gpu.as_ref().unwrap();
    assert!(profile.threads.is_none() && gpu.launch_s > 0.0 && gpu.host_launch_s > 0.0);
    // The double takes as long for the same, with rests or without.
    assert!((gpu.sustained.unwrap() - 1.0).abs() < 1e-9, "{:?}", gpu.sustained);
    assert!(gpu.conditions.iter().all(|one| !one.when.contains("left out")), "{:?}", gpu.conditions);
    // It draws a hundred watts whatever it does, by a clock that others share.
    let power = gpu.power.as_ref().unwrap();
    assert!(power.limit_w == Some(700.0) && power.pressed.len() == 1, "{power:?}");
    for watts in [power.idle_w, power.pressed[0].watts] {
        assert!((50.0..200.0).contains(&watts), "{power:?}");
    }
    assert_eq!(power.pressed[0].says.as_deref(), Some("busy"));
    assert!(power.pressed[0].rate.is_some_and(|rate| rate > 0.0) && !power.pressed[0].ramp.is_empty(), "{power:?}");
    let path = dir.path().join("profile.json");
    std::fs::write(&path, serde_json::to_string(&profile).unwrap()).unwrap();
    assert!(same(&Profile::load(&path).unwrap(), &profile));
    // What is in the file is not measured again, and a torn line is left out.
    let text = std::fs::read_to_string(&rows).unwrap();
    std::fs::write(&rows, format!("{text}{{\"plan\": \"x")).unwrap();
    assert!(same(&measure(2), &profile));
    // Nor does anything of another's attention, or of another GPU, go among it.
    for (field, was, is) in [("attention", "own kernels", "cuDNN 9.19"), ("gpu", "\"gpu\":\"", "\"gpu\":\"not ")] {
        std::fs::write(&rows, text.replace(was, is)).unwrap();
        let said = gpu::measure(&mut Double::new(1, 8 << 30, 3), &job, &|_, _| {}).unwrap_err().to_string();
        assert!(said.contains("rows.jsonl") && said.contains(field) && said.contains("remove the file"), "{said}");
    }
}

/// Of plans that are asked for the kernels of the first and the last stage are timed at their own shapes: nothing of them is
/// interpolated.
#[test]
fn plans_that_are_asked_for_are_timed_at_their_shapes() {
    let dir = tempfile::tempdir().unwrap();
    let plans = vec![
        plan(Parallelism { pp: 2, ring: 2, ..none() }, 2),
        plan(Parallelism { tp: 2, dp: 2, zero: 3, ..none() }, 1),
    ];
    let job = gpu::Job {
        effort: Effort::TINY,
        command: "a test".into(),
        arch: "sm_90a".into(),
        rows: dir.path().join("rows.jsonl"),
        attention: Attention::Own,
        plans: plans.clone(),
    };
    let profile = gpu::measure(&mut Double::new(1, 8 << 30, 1), &job, &|_, _| {}).unwrap();
    let mut stages = 0;
    for plan in &plans {
        let atoms = AtomTable::new(plan).unwrap();
        let last = plan.programs.len() as u32 - 1;
        for program in std::collections::BTreeSet::from([0, last]) {
            let rank = (0..plan.ranks()).find(|rank| plan.program_of(*rank) == program).unwrap();
            let line = Line::program(plan, &atoms, program).unwrap();
            let mut kernels = 0;
            for (node, one) in line.nodes.iter().enumerate() {
                let OpKind::Compute { kernel, .. } = &one.op.kind else { continue };
                let Some((work, dtype)) = work_of(plan, &line, node, rank) else { continue };
                let found = profile.time_as(kernel.curve(), &work, dtype).provenance;
                assert_eq!(found, Provenance::Measured, "rank {rank}, {}", line.path(node));
                kernels += 1;
            }
            assert!(kernels > 10);
            stages += 1;
        }
    }
    assert_eq!(stages, 3);
    let conditions = &profile.gpu.as_ref().unwrap().conditions;
    assert!(conditions.iter().all(|one| !one.when.ends_with(gpu::LEFT_OUT)), "{conditions:?}");
}

/// A plan that cannot be run is left out of a profile, by name, and all of them are an error that says why.
#[test]
fn a_plan_that_is_too_large_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let job = gpu::Job {
        effort: Effort::TINY,
        command: "a test".into(),
        arch: "sm_90a".into(),
        rows: dir.path().join("rows.jsonl"),
        attention: Attention::Own,
        plans: vec![],
    };
    // Less than what stays free for the libraries.
    let said = gpu::measure(&mut Double::new(1, 500 << 20, 1), &job, &|_, _| {}).unwrap_err().to_string();
    assert!(said.contains("was left out") && said.contains("memory"), "{said}");
}

/// Kernels and sizes, and their times but for the last place of what has been through a file.
fn same(a: &Profile, b: &Profile) -> bool {
    let points = |p: &Profile| -> Vec<(String, Vec<f64>, f64)> {
        let of = |(name, curve): (&String, &Curve)| {
            curve.points.iter().map(|p| (name.clone(), p.size.clone(), p.seconds)).collect::<Vec<_>>()
        };
        p.kernels.iter().flat_map(of).collect()
    };
    let (a, b) = (points(a), points(b));
    a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| (&a.0, &a.1) == (&b.0, &b.1) && (a.2 / b.2 - 1.0).abs() < 1e-9)
}
