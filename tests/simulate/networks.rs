//! Files of clusters: networks that carry nothing, and anything in the place of a number.

use foretrain::cluster::Cluster;
use foretrain::plan::CollectiveKind;
use foretrain::spec::*;

/// A link that carries nothing is a file that is wrong; one that nearly does is slow.
#[test]
fn networks_that_carry_nothing_are_refused_by_name() {
    let text = |from: &str, to: &str| {
        let text = std::fs::read_to_string("models/cluster/h100-24k-roce.json").unwrap();
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.json");
    let graph = |links: &str| {
        let of = |v: &str| format!(r#"{{"value": "{v}", "source": "test", "provenance": "assumed"}}"#);
        let (rate, time) = (of("10 GB/s"), of("1 us"));
        format!(r#""nodes": 4, "graph": {{"shape": {{"links": {links}}}, "bandwidth": {rate}, "latency": {time}}}"#)
    };
    for (text, part) in [
        (text("\"48.5 GB/s\"", "\"0 GB/s\""), "scale_out.achieved"),
        (text("\"48.5 GB/s\"", "\"NaN GB/s\""), "scale_out.achieved"),
        (text("\"355 GB/s\"", "\"-1 GB/s\""), "scale_up.bandwidth"),
        (text("\"355 GB/s\"", "\"1e-300 GB/s\""), "scale_up.bandwidth"),
        (text("\"5 us\"", "\"1e300 s\""), "scale_out.latency"),
        (text("7.0", "0"), "pods.oversubscription"),
        (text("7.0", "NaN"), "line"),
        (text("\"nodes\": 3072", &graph("[[0, 1], [2, 3]]")), "no way leads from host 0 to host 2"),
        (text("\"nodes\": 3072", &graph("[[0, 1], [1, 1]]")), "leads from a vertex to itself"),
        (text("\"nodes\": 3072", &graph("[[0, 1], [1, 4294967295]]")), "the most is 16777216"),
    ] {
        std::fs::write(&path, text).unwrap();
        let gpu = GpuSpec::find("h100-sxm5").unwrap();
        let made = ClusterSpec::load(&path).and_then(|spec| Cluster::new(&spec, &gpu, 32));
        let why = made.unwrap_err().to_string();
        assert!(why.contains("mine.json") || why.contains("h100-24k"), "{why}");
        assert!(why.contains(part), "{why} does not say {part}");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 400, ..Default::default() })]

    /// A cluster file with anything in the place of a number is an error or a cluster on which everything has a time.
    #[test]
    fn no_cluster_file_makes_it_panic(
        which in 0usize..6, place in 0usize..40,
        with in "(NaN|-1|0|1e308|1e-308|\"\"|\"0 GB/s\"|\"1e300 GB/s\"|\"1e-300 us\"|\"NaN us\"|\"GB/s\"|null|\\[\\]|4294967295|true|[0-9]{1,6})",
    ) {
        let name = ["h100-24k-roce", "alibaba-hpn-15k", "l20-pcie", "gb200-nvl72", "tpu-v4-pod", "mi300x-8x400"][which];
        let text = std::fs::read_to_string(format!("models/cluster/{name}.json")).unwrap();
        let places: Vec<usize> = text.match_indices(": ").map(|(at, _)| at + 2).collect();
        let from = places[place % places.len()];
        let rest = &text[from..];
        let end = rest.find(['\n', '{']).unwrap_or(rest.len()).min(rest.find(", ").unwrap_or(rest.len()));
        let changed = format!("{}{with}{}", &text[..from], &rest[end..]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.json");
        std::fs::write(&path, changed).unwrap();
        if let Ok(spec) = ClusterSpec::load(&path) {
            let Ok(gpu) = GpuSpec::find(&spec.gpu) else { return Ok(()) };
            let Ok(cluster) = Cluster::new(&spec, &gpu, 16) else { return Ok(()) };
            let stack = StackSpec::find("nccl-fa3").unwrap();
            let members: Vec<u32> = (0..16).collect();
            let bytes = foretrain::units::Bytes::new(1e6);
            let time = foretrain::collective::collective(&cluster, &stack, CollectiveKind::AllReduce, &members, bytes);
            assert!(time.total().value() >= 0.0, "{time:?}");
            for to in 1..16 {
                cluster.path(0, to).links.iter().for_each(|&link| assert!(cluster.capacity(link).value() >= 0.0));
            }
        }
    }
}
