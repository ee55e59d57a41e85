//! How fast max-min fair rates follow what ends and what begins, beside finding all rates anew at every event.
//!
//! Throughput is in completions. `lockstep`: 1,024 hosts, round t of an all-to-all by pairs, 1,024 flows at once that end
//! together. `random`: so many flows at once between so many hosts, of sizes log-uniform from 1 KB to 1 GB; whatever
//! ends is followed by another. `dense` has the same flows between 1,024 hosts, so that every port has many.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use foretrain::sim::share::full::{Flow, max_min};
use foretrain::sim::share::{Demand, Resource, Share};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::time::{Duration, Instant};

const PORT: f64 = 50e9;

struct Net {
    share: Share,
    up: Vec<Resource>,
    down: Vec<Resource>,
}

impl Net {
    fn new(hosts: usize) -> Net {
        let mut share = Share::new();
        let up = (0..hosts).map(|_| share.resource(PORT)).collect();
        let down = (0..hosts).map(|_| share.resource(PORT)).collect();
        Net { share, up, down }
    }

    fn send(&mut self, from: usize, to: usize, bytes: f64) {
        let links = [(self.up[from], 1.0), (self.down[to], 1.0)];
        self.share.add(&Demand::flow(bytes, 2.0 * PORT, &links, 0));
    }
}

/// All rounds of an all-to-all; completions.
fn lockstep(hosts: usize) -> u64 {
    let (mut net, mut tags, mut done) = (Net::new(hosts), Vec::new(), 0);
    for round in 1..hosts {
        (0..hosts).for_each(|from| net.send(from, (from + round) % hosts, 1e6));
        while net.share.complete(&mut tags).is_some() {}
        done += tags.len() as u64;
        tags.clear();
    }
    done
}

struct Pairs {
    net: Net,
    random: ChaCha8Rng,
    hosts: usize,
}

impl Pairs {
    fn new(hosts: usize, flows: usize) -> Pairs {
        let mut pairs = Pairs { net: Net::new(hosts), random: ChaCha8Rng::seed_from_u64(1), hosts };
        (0..flows).for_each(|_| pairs.one());
        pairs.run(flows as u64);
        pairs
    }

    fn one(&mut self) {
        let (from, to) = (self.random.random_range(0..self.hosts), self.random.random_range(0..self.hosts));
        let bytes = 10f64.powf(self.random.random_range(3.0..9.0));
        self.net.send(from, to, bytes);
    }

    /// As many completions, each followed by another flow.
    fn run(&mut self, completions: u64) {
        let (mut done, mut tags) = (0, Vec::new());
        while done < completions {
            self.net.share.complete(&mut tags).expect("flows end");
            done += tags.len() as u64;
            tags.drain(..).for_each(|_| self.one());
        }
    }
}

/// What one event costs if all rates are found anew: of a round of `lockstep` where every host has one flow, else of
/// random pairs.
fn anew(hosts: usize, flows: usize) -> impl FnMut() {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut one = |flow: usize| {
        let (from, to) = match hosts {
            1_024 => (flow, (flow + 1) % hosts),
            _ => (random.random_range(0..hosts), random.random_range(0..hosts)),
        };
        Flow { cap: 2.0 * PORT, weight: 1.0, uses: vec![(from, 1.0), (hosts + to, 1.0)] }
    };
    let flows: Vec<Flow> = (0..flows).map(&mut one).collect();
    let capacities = vec![PORT; 2 * hosts];
    move || drop(max_min(&capacities, &flows))
}

fn shares(c: &mut Criterion) {
    let mut group = c.benchmark_group("share");
    group.sample_size(10).warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    let hosts = 1024;
    group.throughput(Throughput::Elements((hosts * (hosts - 1)) as u64));
    group.bench_function(BenchmarkId::new("lockstep", hosts), |b| b.iter(|| lockstep(hosts)));
    group.throughput(Throughput::Elements(1));
    for (name, hosts, flows) in [("random", 1_000, 1_000), ("random", 100_000, 100_000), ("dense", 1_024, 10_000)] {
        let mut pairs = Pairs::new(hosts, flows);
        group.bench_function(BenchmarkId::new(name, flows), |b| {
            b.iter_custom(|n| {
                let from = Instant::now();
                pairs.run(n);
                from.elapsed()
            });
        });
    }
    // One event each, beside one completion of the above.
    for (hosts, flows) in [(1_024, 1_024), (1_000, 1_000), (100_000, 100_000)] {
        let name = if hosts == 1_024 { "anew-lockstep" } else { "anew-random" };
        group.bench_function(BenchmarkId::new(name, flows), |b| b.iter(anew(hosts, flows)));
    }
    group.finish();
}

criterion_group!(benches, shares);
criterion_main!(benches);
