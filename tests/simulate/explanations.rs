//! What is told of a step beside its time: the critical path, and a trace.

use crate::plans;
use crate::played::{pipeline, step, two_nodes};
use foretrain::sim::{Effort, simulate};

#[test]
fn the_critical_path_is_as_long_as_the_step() {
    for (plan, host) in [two_nodes(), pipeline()] {
        let found = simulate(&plan, host.machine(), &[], Effort::SPANS).unwrap();
        let why = found.why.as_ref().unwrap();
        let sum: f64 = why.critical_path.iter().map(|s| s.seconds).sum();
        assert!(plans::close(sum, step(&found)), "{sum} is not {}", step(&found));
        let mut at = 0.0;
        for s in &why.critical_path {
            assert!(plans::close(s.from_s, at), "a gap before {s:?}");
            at = s.from_s + s.seconds;
        }
        let shares: f64 = why.parts.iter().map(|p| p.share).sum();
        assert!(plans::close(shares, 1.0));
        assert!(!why.next.is_empty() && why.next.iter().all(|s| s.seconds > 0.0 && s.seconds < step(&found)));
        assert!(
            why.utilisation.iter().all(|u| u.over_time.iter().all(|x| (0.0..=1.0).contains(x))),
            "{:?}",
            why.utilisation
        );
    }
}

/// A trace as Perfetto reads it: ops of a lane do not overlap, and each arrow has both ends within ops.
#[test]
fn a_trace_has_messages_as_arrows_between_ops() {
    let (plan, host) = pipeline();
    let found = simulate(&plan, host.machine(), &[], Effort::SPANS).unwrap();
    let mut bytes = vec![];
    foretrain::export::chrome::write_with(&mut bytes, &[("simulated", &found.timeline)], &found.arrows).unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |ph: &str| events.iter().filter(|e| e["ph"] == ph).collect::<Vec<_>>();
    let time = |e: &serde_json::Value, key: &str| e[key].as_f64().unwrap();
    let (ops, begins, ends) = (of("X"), of("s"), of("f"));
    // Three links between four stages, six microbatches, there and back.
    assert!(begins.len() >= 36 && begins.len() == ends.len(), "{} {}", begins.len(), ends.len());
    let inside = |e: &&serde_json::Value| {
        let same = |x: &&&serde_json::Value| x["pid"] == e["pid"] && x["tid"] == e["tid"];
        let around =
            |x: &serde_json::Value| time(x, "ts") <= time(e, "ts") && time(e, "ts") <= time(x, "ts") + time(x, "dur");
        ops.iter().filter(same).any(|x| around(x) && x["cat"] == "transfer")
    };
    assert!(begins.iter().chain(&ends).all(inside));
    for (s, f) in begins.iter().zip(&ends) {
        assert!(s["id"] == f["id"] && s["pid"] != f["pid"] && time(s, "ts") <= time(f, "ts"), "{s} {f}");
    }
    let mut lanes: std::collections::BTreeMap<String, Vec<(f64, f64)>> = Default::default();
    for x in &ops {
        let lane = format!("{} {}", x["pid"], x["tid"]);
        lanes.entry(lane).or_default().push((time(x, "ts"), time(x, "ts") + time(x, "dur")));
    }
    for (lane, mut spans) in lanes {
        spans.sort_by(|a, b| a.partial_cmp(b).unwrap());
        assert!(spans.windows(2).all(|w| w[1].0 >= w[0].1), "{lane} overlaps");
    }
}
