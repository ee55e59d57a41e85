//! The Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open: a process for each
//! rank of each timeline, a thread for each lane, a complete event for each op, in microseconds.
//!
//! Times are whole 1024ths of a microsecond, which floating-point numbers hold and add exactly: where an op ends the next
//! one of its lane begins, and no reader finds the two to overlap by the last bit of a sum.

use crate::timeline::{Arrow, ArrowEnd, Span, Timeline};
use crate::units::Seconds;
use serde_json::{Value, json};
use std::io::{self, Write};

/// Of a microsecond.
const TICKS: f64 = 1024.0;

/// Microseconds in whole ticks.
fn us(time: Seconds) -> f64 {
    (time.value() * (1e6 * TICKS)).round() / TICKS
}

/// Ranks of the next timeline start here.
const NEXT_GROUP: u32 = 100_000;

/// Writes all `timelines` into one trace; each has a name that stands before its ranks.
pub fn write(out: &mut dyn Write, timelines: &[(&str, &Timeline)]) -> io::Result<()> {
    write_with(out, timelines, &[])
}

/// As [`write()`], with messages between ranks of the first timeline as arrows.
pub fn write_with(out: &mut dyn Write, timelines: &[(&str, &Timeline)], arrows: &[Arrow]) -> io::Result<()> {
    let mut events = Events { out, first: true };
    events.out.write_all(b"{\"displayTimeUnit\": \"ms\", \"traceEvents\": [")?;
    for (group, (name, timeline)) in timelines.iter().enumerate() {
        for class in &timeline.classes {
            let pid = group as u32 * NEXT_GROUP + class.rank;
            // One rank's prediction and measurement stand together.
            let place = class.rank * timelines.len() as u32 + group as u32;
            events.add(&meta(pid, 0, "process_name", json!({"name": format!("{name} rank {}", class.rank)})))?;
            events.add(&meta(pid, 0, "process_sort_index", json!({"sort_index": place})))?;
            for (tid, lane) in timeline.lanes.iter().enumerate() {
                events.add(&meta(pid, tid, "thread_name", json!({"name": lane})))?;
                events.add(&meta(pid, tid, "thread_sort_index", json!({"sort_index": tid})))?;
            }
            for span in &class.spans {
                events.add(&complete(pid, span))?;
            }
        }
    }
    for (id, arrow) in arrows.iter().enumerate() {
        let begins = us(arrow.from.at);
        events.add(&flow("s", id, &arrow.from, begins))?;
        // An event at the very end of an op is not within it: one tick before is.
        events.add(&flow("f", id, &arrow.to, begins.max(us(arrow.to.at) - 1.0 / TICKS)))?;
    }
    events.out.write_all(b"\n]}\n")
}

/// A list that is written as it grows: a trace may be larger than memory likes.
struct Events<'a> {
    out: &'a mut dyn Write,
    first: bool,
}

impl Events<'_> {
    fn add(&mut self, event: &Value) -> io::Result<()> {
        self.out.write_all(if std::mem::take(&mut self.first) { b"\n" } else { b",\n" })?;
        serde_json::to_writer(&mut *self.out, event).map_err(io::Error::from)
    }
}

fn meta(pid: u32, tid: usize, name: &str, args: Value) -> Value {
    json!({"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args})
}

fn complete(pid: u32, span: &Span) -> Value {
    // The last part of a path is the op; the whole path is shown when the event is selected.
    let label = span.path.rsplit('/').next().unwrap_or(&span.path);
    json!({
        "ph": "X",
        "pid": pid,
        "tid": span.lane,
        "ts": us(span.start),
        "dur": us(span.end) - us(span.start),
        "name": label,
        "cat": span.what,
        "args": {"path": span.path},
    })
}

/// One end of an arrow: it is tied to the op on whose lane it stands at its time.
fn flow(ph: &str, id: usize, end: &ArrowEnd, ts: f64) -> Value {
    json!({"ph": ph, "bp": "e", "id": id, "pid": end.rank, "tid": end.lane, "ts": ts, "name": "message", "cat": "message"})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::cost::{Effort, Machine, cost};
    use crate::device::Roofline;
    use crate::plan::{Dtype, Engine};
    use crate::spec::{ClusterSpec, GpuSpec, LlmSpec, Parallelism, StackSpec, Workload};
    use crate::strategy::{Engines, build};
    use std::collections::BTreeMap;

    fn timeline() -> Timeline {
        let model = LlmSpec::find("tiny").unwrap();
        let work =
            Workload { seq_len: 64, global_batch: 1, micro_batch: 1, dtype: Dtype::F32, documents: Default::default() };
        let par = Parallelism { ring: 2, ulysses: 2, zero: 1, ..Parallelism::default() };
        let engine = Engine::Sm { ctas: 1 };
        let plan = build(&model, &work, &par, Engines { p2p: engine, collective: engine }).unwrap();
        let gpu = GpuSpec::find("cpu-core").unwrap();
        let cluster = Cluster::new(&ClusterSpec::find("local-cpu").unwrap(), &gpu, 4).unwrap();
        let stack = StackSpec::find("cpu").unwrap();
        let kernels = Roofline::new(&gpu, &stack).unwrap();
        let machine = Machine { cluster: &cluster, stack: &stack, kernels: &kernels, devices: None };
        cost(&plan, machine, Effort::ALL_SPANS).unwrap()
    }

    fn events(timelines: &[(&str, &Timeline)]) -> Vec<Value> {
        let mut bytes = vec![];
        write(&mut bytes, timelines).unwrap();
        let trace: Value = serde_json::from_slice(&bytes).unwrap();
        trace["traceEvents"].as_array().unwrap().clone()
    }

    #[test]
    fn every_span_is_an_event_and_lanes_do_not_nest() {
        let timeline = timeline();
        let all = events(&[("predicted", &timeline), ("measured", &timeline)]);
        let spans: usize = timeline.classes.iter().map(|c| c.spans.len()).sum();
        let complete: Vec<&Value> = all.iter().filter(|e| e["ph"] == "X").collect();
        assert!(spans > 100 && complete.len() == 2 * spans, "{spans} spans, {} events", complete.len());
        let mut lanes: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
        for e in complete {
            let number = |key: &str| e[key].as_u64().unwrap();
            let (ts, dur) = (e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap());
            assert!(ts >= 0.0 && dur >= 0.0 && !e["args"]["path"].as_str().unwrap().is_empty());
            lanes.entry((number("pid"), number("tid"))).or_default().push((ts, ts + dur));
        }
        for (lane, mut spans) in lanes {
            spans.sort_by(|a, b| a.partial_cmp(b).unwrap());
            assert!(spans.windows(2).all(|w| w[1].0 >= w[0].1), "{lane:?} overlaps");
        }
    }

    #[test]
    fn ranks_and_lanes_have_names() {
        let timeline = timeline();
        let all = events(&[("predicted", &timeline), ("measured", &timeline)]);
        let names = |kind: &str| {
            let of_kind = all.iter().filter(|e| e["name"] == kind);
            of_kind.map(|e| e["args"]["name"].as_str().unwrap().to_string()).collect::<Vec<_>>()
        };
        let ranks = names("process_name");
        assert_eq!(ranks.len(), 8);
        assert!(ranks.contains(&"predicted rank 3".into()) && ranks.contains(&"measured rank 0".into()));
        assert!(names("thread_name").contains(&"compute.0".into()));
    }
}
