//! Kernels, links and planes that are slower than they should be, or gone for a while.

use crate::plans::{self, SM, pods, way, work};
use crate::played::{host, large, sim, step, two_nodes, with};
use foretrain::sim::{Effort, Fault, Faults, simulate};

/// What is wrong with one rank tells ranks apart, and no more than it has to.
#[test]
fn folded_equals_unfolded_whatever_is_wrong() {
    let (plan, host) = two_nodes();
    let cases: [&[Fault]; 5] = [
        &[Fault::slow_gpu("5:1.3").unwrap()],
        &[Fault::slow_link("3:0.25").unwrap(), Fault::slow_gpu("12:1.1").unwrap()],
        &[Fault::slow_link("0:nvlink:0.1").unwrap()],
        &[Fault::flapping("9:0.0001:0.0001").unwrap()],
        &[Fault::slow_gpu("0:1.2").unwrap(), Fault::slow_gpu("1:1.2").unwrap()],
    ];
    let well = step(&sim(&plan, &host, true));
    for faults in cases {
        let (few, all) = (with(&plan, &host, true, faults), with(&plan, &host, false, faults));
        assert_eq!(few.timeline.step, all.timeline.step, "{faults:?}");
        assert!(few.timeline.classes.len() < 16, "{faults:?}: {} classes", few.timeline.classes.len());
        assert!(step(&few) > 1.001 * well, "{faults:?}: {} is not slower than {well}", step(&few));
    }
}

/// One slow GPU slows everyone: what it computes is on the critical path.
#[test]
fn a_straggler_sets_the_pace() {
    let (plan, host) = two_nodes();
    let fault = [Fault::slow_gpu("5:1.5").unwrap()];
    let found = simulate(&plan, host.machine(), &fault, Effort::SPANS).unwrap();
    let why = found.why.as_ref().unwrap();
    let of_rank_5: f64 = why.critical_path.iter().filter(|s| s.rank == 5).map(|s| s.seconds).sum();
    assert!(of_rank_5 > 0.5 * step(&found), "{of_rank_5} of {}", step(&found));
}

/// Half of the planes carry all at half the speed: as if every NIC and every link between nodes had half of it. Some of
/// the time is as much of the time; and only networks of several planes have one that can be dead.
#[test]
fn a_dead_plane_leaves_its_bytes_to_the_others() {
    let par = way(32, 1, 1);
    let plan = plans::plan(&large(4), &par, &work(&par, 8192, 1, 2), SM);
    let of = |planes: u32, factor: f64, narrow: bool| {
        host(&plan, &|spec| {
            spec.pods = if narrow { pods(16, 4.0, None) } else { vec![] };
            let out = spec.scale_out.as_mut().unwrap();
            // NICs far slower than what is inside nodes.
            (out.planes, out.achieved.value) = (planes, out.achieved.value * (0.125 * factor));
            out.p2p.value = out.achieved.value;
        })
    };
    let dead = |word: &str| Fault::dead_plane(word).unwrap();
    for narrow in [false, true] {
        let (two, one) = (of(2, 1.0, narrow), of(1, 0.5, narrow));
        let well = step(&with(&plan, &two, true, &[]));
        let half = step(&with(&plan, &two, true, &[dead("1")]));
        let wanted = step(&with(&plan, &one, true, &[]));
        // The time of a sum is its bytes' alone, whichever network the library chose its protocols for; 1e-12 s round it.
        assert!(half > 1.5 * well && (half / wanted - 1.0).abs() < 1e-9, "{narrow}: {well} {half} {wanted}");
        let each = step(&with(&plan, &two, false, &[dead("1")]));
        assert!((each / half - 1.0).abs() < 1e-6, "{narrow}: {each} unfolded, {half} folded");
        let late = step(&with(&plan, &two, true, &[dead(&format!("1@{}", 0.5 * well))]));
        assert!(well < late && late < half, "{narrow}: {well} {late} {half}");
        assert!(with(&plan, &two, true, &[dead("0"), dead("1")]).hang.is_some());
        let why = simulate(&plan, one.machine(), &[dead("0")], Effort::SUMS).unwrap_err().to_string();
        assert!(why.contains("plane 0") && why.contains("is one network"), "{why}");
        let why = simulate(&plan, two.machine(), &[dead("2")], Effort::SUMS).unwrap_err().to_string();
        assert!(why.contains("has planes 0 to 1"), "{why}");
    }
}

#[test]
fn shipped_faults_can_be_read_and_nonsense_is_told_by_file_and_place() {
    for file in std::fs::read_dir("traces/failures").unwrap() {
        let faults = Faults::load(&file.unwrap().path()).unwrap();
        assert!(!faults.source.is_empty() && !faults.faults.is_empty());
    }
    let dir = tempfile::tempdir().unwrap();
    for (text, part) in [
        (r#"{"faults": [{"kind": "slow_gpu", "rank": 1, "factor": 0.5}]}"#, "faults[0]: a factor of 0.5"),
        (r#"{"faults": [{"kind": "slow_gpu", "rank": 1, "factor": NaN}]}"#, "line 1 column"),
        (r#"{"faults": [{"kind": "melted", "rank": 1}]}"#, "melted"),
        (r#"{"watchdog_s": -1}"#, "watchdog_s: -1 is not a time"),
    ] {
        let path = dir.path().join("faults.json");
        std::fs::write(&path, text).unwrap();
        let why = Faults::load(&path).unwrap_err().to_string();
        assert!(why.contains("faults.json") && why.contains(part), "{why}");
    }
}
