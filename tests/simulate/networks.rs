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

/// What is put in the place of numbers: nonsense, extremes, and what some networks have.
const WORDS: &[&str] = &[
    "NaN",
    "-1",
    "0",
    "1",
    "2",
    "16",
    "4294967295",
    "1e308",
    "1e-308",
    "0.5",
    "null",
    "[]",
    "true",
    "\"\"",
    "\"GB/s\"",
    "\"0 GB/s\"",
    "\"20 GB/s\"",
    "\"1e300 GB/s\"",
    "\"3 us\"",
    "\"1e-300 us\"",
    "\"NaN us\"",
];

/// A cluster file with anything in the place of a number is an error that names it, or a cluster on which everything has a
/// time.
#[test]
fn no_cluster_file_makes_it_panic() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.json");
    let (mut refused, mut timed) = (0, 0);
    for (name, gpus) in [
        ("h100-24k-roce", 16),
        ("alibaba-hpn-15k", 16),
        ("l20-pcie", 8),
        ("gb200-nvl72", 16),
        ("tpu-v4-pod", 16),
        ("mi300x-8x400", 16),
    ] {
        let text = std::fs::read_to_string(format!("models/cluster/{name}.json")).unwrap();
        for (from, with) in text.match_indices(": ").flat_map(|(at, _)| WORDS.iter().map(move |word| (at + 2, word))) {
            let rest = &text[from..];
            let end = rest.find(['\n', '{']).unwrap_or(rest.len()).min(rest.find(", ").unwrap_or(rest.len()));
            std::fs::write(&path, format!("{}{with}{}", &text[..from], &rest[end..])).unwrap();
            let spec = ClusterSpec::load(&path);
            let called = spec.as_ref().map_or("mine.json".into(), |spec| spec.name.clone());
            // A GPU by another name is none, whatever the network.
            let Ok(gpu) = GpuSpec::find(spec.as_ref().map_or("h100-sxm5", |spec| &spec.gpu)) else { continue };
            match spec.and_then(|spec| Cluster::new(&spec, &gpu, gpus)) {
                Ok(cluster) => {
                    everything_has_a_time(&cluster, gpus, &format!("{name}, {with} at {from}"));
                    timed += 1;
                }
                Err(why) => {
                    assert!(why.to_string().contains(&called), "{name}, {with} at {from}: {why}");
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 9000 && timed > 700, "{refused} refused, {timed} timed");
}

fn everything_has_a_time(cluster: &Cluster, gpus: u32, what: &str) {
    let (stack, members) = (StackSpec::find("nccl-fa3").unwrap(), (0..gpus).collect::<Vec<u32>>());
    let bytes = foretrain::units::Bytes::new(1e6);
    let time = foretrain::collective::collective(cluster, &stack, CollectiveKind::AllReduce, &members, bytes);
    let seconds = time.total().value();
    assert!(seconds > 0.0 && seconds.is_finite(), "{what}: {time:?}");
    let links = (1..gpus).flat_map(|to| cluster.path(0, to).links);
    links.for_each(|link| assert!(cluster.capacity(link).value() > 0.0, "{what}: {link:?}"));
}
