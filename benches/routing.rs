//! How fast choices are drawn and become the rows of a route: 64 ranks of 4096 tokens, top 8 of 256. `maps` is the
//! baseline: the same counts, gathered in ordered maps token by token.

use criterion::{Criterion, criterion_group, criterion_main};
use foretrain::plan::route::{Phase, Route};
use foretrain::routing::{Placement, Request};
use std::collections::{BTreeMap, BTreeSet};
use std::hint::black_box;
use std::time::Duration;

fn request(words: &str) -> Request {
    Request {
        routing: words.parse().expect("a known routing"),
        ranks: 64,
        node: 8,
        experts: 256,
        topk: 8,
        tokens: 4096,
        replicas: 0,
        node_limit: None,
        groups: None,
        seed: 1,
        step: 0,
    }
}

/// Rows of every source for every slot, rank and node.
fn by_maps(route: &Route) -> [BTreeMap<(u32, u32), u64>; 3] {
    let mut counts: [BTreeMap<(u32, u32), u64>; 3] = Default::default();
    for src in 0..route.ranks {
        for token in route.choices(src).expect("listed").chunks(route.topk as usize) {
            let ranks: BTreeSet<u32> = token.iter().map(|slot| route.rank_of(*slot)).collect();
            let nodes: BTreeSet<u32> = ranks.iter().map(|rank| route.node_of(*rank)).collect();
            token.iter().for_each(|slot| *counts[0].entry((src, *slot)).or_default() += 1);
            ranks.iter().for_each(|rank| *counts[1].entry((src, *rank)).or_default() += 1);
            nodes.iter().for_each(|node| *counts[2].entry((src, *node)).or_default() += 1);
        }
    }
    counts
}

fn routing(c: &mut Criterion) {
    let mut group = c.benchmark_group("routing");
    group.measurement_time(Duration::from_secs(5)).sample_size(20);
    for words in ["uniform", "zipf:1.0"] {
        let request = request(words);
        group.bench_function(format!("{words} to route"), |b| b.iter(|| black_box(request.route())));
    }
    let request = request("uniform");
    let trace = request.trace().expect("a trace");
    let placement = Placement::contiguous(256, 64).expect("even");
    group.bench_function("trace to route", |b| b.iter(|| black_box(trace.route(&placement, 8))));
    let route = request.route().expect("a route");
    group.bench_function("maps", |b| b.iter(|| black_box(by_maps(&route))));
    let copied = Request { replicas: 64, ..request.clone() };
    group.bench_function("uniform to route, 64 copies", |b| b.iter(|| black_box(copied.route())));
    group.bench_function("hops", |b| {
        use foretrain::collective::exchange::hops;
        use foretrain::plan::route::ExchangeAlgo;
        b.iter(|| black_box(hops(&route, ExchangeAlgo::DeepepNormal { sms: 24 }, Phase::Dispatch)));
    });
    group.finish();
}

criterion_group!(benches, routing);
criterion_main!(benches);
