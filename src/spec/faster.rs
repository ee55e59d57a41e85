//! A cluster whose links carry more.
//!
//! Whoever adds a field to these structs is asked by the compiler whether it is a rate of a link: a rate that stays as it is
//! would be what limits, and faster links would seem to save nothing.

use super::{ClusterSpec, Graph, Line, MeasuredCollective, Package, ScaleOut, ScaleUp, Sockets, Sourced};
use crate::units::BytesPerSec;

impl ClusterSpec {
    /// Every link inside nodes carries `by` times as much; that to the CPUs' memory does not.
    pub fn scale_inside(&mut self, by: f64) {
        self.scale_up.scale(by);
        self.measured.iter_mut().filter(|m| m.nodes == 1).for_each(|m| m.scale(by));
        // The hosts of a graph are the GPUs of a cluster of one node.
        if self.scale_out.is_none() {
            self.graph.iter_mut().for_each(|graph| graph.scale(by));
        }
    }

    /// Every NIC carries `by` times as much, and so do the uplinks of pods, which are told by what their NICs carry. The
    /// wires of a graph do not.
    pub fn scale_nics(&mut self, by: f64) {
        self.scale_out.iter_mut().for_each(|out| out.scale(by));
        self.measured.iter_mut().filter(|m| m.nodes > 1).for_each(|m| m.scale(by));
    }
}

fn scale<'a>(rates: impl IntoIterator<Item = &'a mut Sourced<BytesPerSec>>, by: f64) {
    rates.into_iter().for_each(|rate| rate.value = rate.value * by);
}

impl ScaleUp {
    fn scale(&mut self, by: f64) {
        let ScaleUp {
            links: _,
            bandwidth,
            switch_reduce,
            switch_ramp: _,
            p2p,
            p2p_per_cta,
            per_peer,
            package,
            several,
            sockets,
            start: _,
            latency: _,
        } = self;
        scale([bandwidth, p2p, p2p_per_cta], by);
        scale([switch_reduce, per_peer, several].into_iter().flatten(), by);
        scale(package.iter_mut().map(|Package { gpus: _, per_peer }| per_peer), by);
        scale(sockets.iter_mut().map(|Sockets { gpus: _, bridge }| bridge), by);
    }
}

impl ScaleOut {
    fn scale(&mut self, by: f64) {
        let ScaleOut {
            nics_per_node: _,
            transport: _,
            raw,
            achieved,
            p2p,
            several,
            latency: _,
            rails: _,
            pxn: _,
            planes: _,
            routing: _,
        } = self;
        scale([raw, achieved, p2p].into_iter().chain(several), by);
    }
}

impl Graph {
    fn scale(&mut self, by: f64) {
        let Graph { shape: _, bandwidth, latency: _ } = self;
        scale([bandwidth], by);
    }
}

impl MeasuredCollective {
    /// What was measured on slower links: as long to begin, and the rest as links go.
    fn scale(&mut self, by: f64) {
        self.lines.iter_mut().for_each(|Line { latency: _, bandwidth }| *bandwidth = *bandwidth * by);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::shipped;
    use serde_json::Value;

    /// Doubles what is written as so much a second, wherever it stands.
    fn double(value: &mut Value) {
        match value {
            Value::Object(map) => map.values_mut().for_each(double),
            Value::Array(list) => list.iter_mut().for_each(double),
            Value::String(text) => {
                if let Ok(rate) = text.parse::<BytesPerSec>() {
                    *value = serde_json::to_value(rate * 2.0).unwrap();
                }
            }
            _ => {}
        }
    }

    /// A cluster's JSON with all that is a rate under these fields doubled.
    fn doubled(spec: &ClusterSpec, fields: &[&str]) -> ClusterSpec {
        let mut json = serde_json::to_value(spec).unwrap();
        fields.iter().for_each(|field| json.get_mut(*field).map(double).unwrap_or_default());
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn every_rate_in_the_file_of_a_cluster_is_scaled() {
        for name in shipped("cluster") {
            let spec = ClusterSpec::find(name).unwrap();
            let (mut inside, mut nics) = (spec.clone(), spec.clone());
            inside.scale_inside(2.0);
            nics.scale_nics(2.0);
            let up: &[&str] = if spec.scale_out.is_none() { &["scale_up", "graph"] } else { &["scale_up"] };
            assert_eq!(inside, doubled(&spec, up), "{name}");
            assert_eq!(nics, doubled(&spec, &["scale_out"]), "{name}");
        }
    }

    #[test]
    fn what_was_measured_goes_with_the_links_it_was_measured_on() {
        let mut spec = ClusterSpec::find("dgx-h100").unwrap();
        let line = r#"[{"op": "all_reduce", "gpus": 8, "nodes": 1, "lines": [{"latency": "9 us", "bandwidth": "100 GB/s"}],
            "rel_sd": 0.1, "source": "a test"}]"#;
        spec.measured = serde_json::from_str(line).unwrap();
        let at = |spec: &ClusterSpec| spec.measured[0].lines[0].bandwidth.value();
        spec.scale_nics(2.0);
        assert_eq!(at(&spec), 100e9);
        spec.scale_inside(2.0);
        assert_eq!(at(&spec), 200e9);
    }
}
