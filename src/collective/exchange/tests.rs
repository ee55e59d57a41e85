use super::*;
use crate::plan::Wire;
use crate::plan::route::{Counts, DROPPED, expected_unique};
use crate::spec::{Architecture, ClusterSpec, GpuSpec};
use rand::{Rng, SeedableRng};

const ALL: [ExchangeAlgo; 7] = [
    ExchangeAlgo::Nccl,
    ExchangeAlgo::AllGather,
    ExchangeAlgo::DeepepNormal { sms: 24 },
    ExchangeAlgo::DeepepLowLatency { hook: false, slots: 128 },
    ExchangeAlgo::DeepepV2Hybrid { sms: Some(12) },
    ExchangeAlgo::DeepepV2Direct { sms: Some(12) },
    ExchangeAlgo::Hierarchical,
];

fn balanced(ranks: u32, experts: u32, topk: u32, tokens: u64) -> Route {
    Route::new([ranks, ranks.min(8)], experts, topk, Counts::Balanced { tokens }).unwrap()
}

/// Ragged tokens, some choices dropped, some ranks without a token.
fn random(shape: [u32; 2], experts: u32, topk: usize, seed: u64) -> Route {
    let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
    let tokens: Vec<u64> = (0..shape[0]).map(|r| if r % 3 == 1 { 0 } else { rng.random_range(0..40) }).collect();
    let mut choices = vec![];
    for _ in 0..tokens.iter().sum::<u64>() {
        let row = rand::seq::index::sample(&mut rng, experts as usize, topk).into_iter();
        choices.extend(row.map(|e| if e % 5 == 4 { DROPPED } else { e as u32 }));
    }
    Route::new(shape, experts, topk as u32, Counts::Listed { tokens, choices }).unwrap()
}

/// The time of an exchange on a shipped cluster of as many ranks as the route has.
fn on(name: &str, route: &Route, algo: ExchangeAlgo, phase: Phase, row_bytes: u64) -> Result<Estimate> {
    let members: Vec<u32> = (0..route.ranks).collect();
    let (cluster, stack) = (Cluster::shipped(name, route.ranks), StackSpec::find("nccl-fa3").unwrap());
    let (members, cluster, stack) = (&members, &cluster, &stack);
    time(&Setting { route, phase, row_bytes, members, cluster, stack, library: None }, algo)
}

fn slowest(route: &Route, algo: ExchangeAlgo, phase: Phase, row: u64, name: &str) -> RankTime {
    *on(name, route, algo, phase, row).unwrap().slowest()
}

/// A ring over nodes waits for whichever of links and NICs has less for it.
#[test]
fn gathered_rows_wait_for_the_narrower() {
    for (name, slower) in [("dgx-h100", Limiter::Links), ("h800-8x400", Limiter::Links), ("dgx-a100", Limiter::Network)]
    {
        let found = slowest(&balanced(32, 256, 8, 4096), ExchangeAlgo::AllGather, Phase::Dispatch, 7392, name);
        assert_eq!(found.limiter(), slower, "{name}: {found:?}");
    }
}

#[test]
fn rows_arrive_where_their_slots_are() {
    for (shape, experts, seed) in [([8, 4], 16, 1), ([6, 2], 24, 2), ([4, 4], 8, 3), ([3, 1], 9, 4)] {
        let route = random(shape, experts, 3, seed);
        for algo in ALL {
            let last = stages(&route, algo) - 1;
            for dst in 0..route.ranks {
                let arrived: Rows = hops(&route, algo, Phase::Dispatch)
                    .iter()
                    .filter(|h| h.stage == last && h.to == dst)
                    .map(|h| h.rows)
                    .sum();
                let expected = match algo {
                    ExchangeAlgo::AllGather => (0..route.ranks).map(|src| route.tokens(src) as f64).sum(),
                    _ if algo.deduplicates() => route.received_unique(dst),
                    _ => route.expanded_rows(dst),
                };
                assert_eq!(arrived, expected, "{algo:?} to {dst} of {shape:?}");
            }
        }
    }
}

#[test]
fn what_is_sent_is_received_and_comes_back() {
    for algo in ALL {
        let route = random([8, 4], 16, 2, 11);
        let there = traffic(&route, algo, Phase::Dispatch);
        let back = traffic(&route, algo, Phase::Combine);
        let sum = |all: &[Traffic], f: &dyn Fn(&Traffic) -> Rows| all.iter().map(f).sum::<Rows>();
        assert_eq!(sum(&there, &|t| t.links.sent), sum(&there, &|t| t.links.received), "{algo:?}");
        assert_eq!(sum(&there, &|t| t.network.sent), sum(&there, &|t| t.network.received), "{algo:?}");
        for (a, b) in there.iter().zip(&back) {
            assert_eq!((a.links.sent, a.network.sent), (b.links.received, b.network.received), "{algo:?}");
            assert_eq!((a.links.kept, a.network.kept), (b.links.kept, b.network.kept), "{algo:?}");
        }
    }
}

#[test]
fn network_hops_leave_the_node_and_links_do_not() {
    let route = random([12, 4], 24, 4, 5);
    for hop in ALL.iter().flat_map(|algo| hops(&route, *algo, Phase::Combine)) {
        let same = route.node_of(hop.from) == route.node_of(hop.to);
        assert_eq!(same, hop.via == Via::Links || !hop.crosses(), "{hop:?}");
    }
}

#[test]
fn balanced_routes_have_the_closed_forms_of_their_rows() {
    let route = balanced(32, 256, 8, 4096);
    let t = &traffic(&route, ExchangeAlgo::DeepepNormal { sms: 24 }, Phase::Dispatch)[0];
    let near = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-9, "{a} is not {b}");
    near(t.links.logical(), 4096.0 * expected_unique(256, 8, 32));
    near(t.network.logical(), 4096.0 * expected_unique(256, 8, 4));
    near(t.network.sent, 4096.0 * expected_unique(256, 8, 4) * 0.75);
    let t = &traffic(&route, ExchangeAlgo::Nccl, Phase::Dispatch)[0];
    near(t.links.sent + t.network.sent, 4096.0 * 8.0 * 31.0 / 32.0);
    let t = &traffic(&route, ExchangeAlgo::AllGather, Phase::Dispatch)[0];
    near(t.links.received + t.network.received, 4096.0 * 31.0);
}

#[test]
fn nothing_takes_the_start_alone_and_no_nan() {
    let empty = Route::new([16, 8], 32, 2, Counts::Listed { tokens: vec![0; 16], choices: vec![] }).unwrap();
    for algo in ALL {
        let one = slowest(&empty, algo, Phase::Dispatch, 4096, "dgx-h100");
        assert_eq!(one.rows(), Seconds::ZERO, "{algo:?}");
        assert!(one.total().value() > 0.0 && one.total().value() < 3e-4, "{algo:?} {one:?}");
    }
}

#[test]
fn a_hot_expert_slows_its_rank_and_all_wait_for_it() {
    let tokens = vec![2048u64; 16];
    let choices: Vec<u32> = (0..2048 * 16).flat_map(|t| [0, 1 + t % 31]).collect();
    let hot = Route::new([16, 8], 32, 2, Counts::Listed { tokens, choices }).unwrap();
    for algo in ALL.into_iter().filter(|a| *a != ExchangeAlgo::AllGather) {
        let hot = slowest(&hot, algo, Phase::CachedDispatch, 7392, "dgx-h100");
        let even = slowest(&balanced(16, 32, 2, 2048), algo, Phase::CachedDispatch, 7392, "dgx-h100");
        assert!(hot.total() > even.total() * 2.0, "{algo:?}: {hot:?} {even:?}");
    }
}

/// Two calls, of which the second has its time under links; rows that all end at one rank cross those of one node.
#[test]
fn the_second_of_two_calls_crosses_links() {
    let hot = Counts::Listed { tokens: vec![2048; 16], choices: [0, 1].repeat(2048 * 16) };
    let hot = Route::new([16, 8], 32, 2, hot).unwrap();
    for (route, slower) in [(&balanced(16, 256, 8, 4096), Limiter::Network), (&hot, Limiter::Links)] {
        let found = slowest(route, ExchangeAlgo::Hierarchical, Phase::Dispatch, 7392, "h800-8x400");
        assert!(found.in_turn && found.links.value() > 0.0, "{found:?}");
        assert_eq!(found.total(), found.start + found.notify + (found.network + found.links));
        assert!(found.start.value() < 2e-4, "no row crosses before the first: {found:?}");
        assert_eq!(found.limiter(), slower, "{found:?}");
    }
    let one_node = slowest(&balanced(8, 256, 8, 4096), ExchangeAlgo::Hierarchical, Phase::Dispatch, 7392, "h800-8x400");
    assert!(!one_node.in_turn, "one call: {one_node:?}");
}

/// GB/s over the network as DeepEP counts them: all rows that leave for a node, the own one as well.
fn logical(ranks: u32, topk_nodes: Option<f64>, phase: Phase, row: u64) -> (f64, Limiter) {
    let route = balanced(ranks, 256, 8, 4096);
    let one = slowest(&route, ExchangeAlgo::DeepepNormal { sms: 24 }, phase, row, "h800-8x400");
    let (parts, real) = match ranks {
        8 => (expected_unique(256, 8, 8), 1.0),
        _ => {
            let nodes = expected_unique(256, 8, ranks / 8);
            (nodes, topk_nodes.unwrap_or(nodes) / nodes)
        }
    };
    (4096.0 * parts * row as f64 / one.total().value() / 1e9 * real.min(1.0), one.limiter())
}

#[test]
fn deepep_v1_normal_is_as_published() {
    // README.md of 2025-04-22: dispatch and combine on H800.
    let within = |got: (f64, Limiter), published: f64| {
        assert!((got.0 / published - 1.0).abs() < 0.1, "{got:?} is not {published}");
        got.1
    };
    let (fp8, bf16) = (Wire::Fp8.row_bytes(7168), Wire::BF16.row_bytes(7168));
    assert_eq!(within(logical(8, None, Phase::CachedDispatch, fp8), 153.0), Limiter::Links);
    assert_eq!(within(logical(8, None, Phase::Combine, bf16), 158.0), Limiter::Links);
    // What two nodes reach is less than their NICs could: the links of the H800 are the limit.
    assert_eq!(within(logical(16, None, Phase::CachedDispatch, fp8), 43.0), Limiter::Links);
    assert_eq!(within(logical(32, None, Phase::CachedDispatch, fp8), 58.0), Limiter::Network);
    assert_eq!(within(logical(32, None, Phase::Combine, bf16), 57.0), Limiter::Network);
}

#[test]
fn deepep_low_latency_is_as_published() {
    let us = |ranks, phase, row| {
        let route = balanced(ranks, 256, 8, 128);
        let algo = ExchangeAlgo::DeepepLowLatency { hook: false, slots: 128 };
        slowest(&route, algo, phase, row, "h800-8x400").total().value() * 1e6
    };
    let (fp8, bf16) = (Wire::Fp8.row_bytes(7168), Wire::BF16.row_bytes(7168));
    for (ranks, dispatch, combine) in
        [(8, 77., 114.), (16, 118., 195.), (32, 155., 273.), (64, 173., 314.), (256, 194., 360.)]
    {
        let got = us(ranks, Phase::Dispatch, fp8);
        assert!((got / dispatch - 1.0).abs() < 0.08, "dispatch of {ranks}: {got} is not {dispatch}");
        let got = us(ranks, Phase::Combine, bf16);
        assert!((got / combine - 1.0).abs() < 0.12, "combine of {ranks}: {got} is not {combine}");
    }
}

#[test]
fn deepep_v2_takes_the_sms_of_its_table() {
    let sms = |ranks, arch| deepep_v2::theoretical_sms(&balanced(ranks, 256, 8, 8192), arch).unwrap();
    assert_eq!([16, 32, 64, 8].map(|n| sms(n, Architecture::Hopper)), [12, 6, 4, 14]);
    assert_eq!(sms(8, Architecture::Blackwell), 24);
    let why = deepep_v2::theoretical_sms(&balanced(8, 256, 8, 1), Architecture::Ampere).unwrap_err().to_string();
    assert!(why.contains("ampere") && why.contains("hopper"), "{why}");
    // Nothing travels, and no rate of links is asked for.
    assert_eq!(sms(1, Architecture::Hopper), 4);
}

#[test]
fn deepep_v2_takes_the_sms_of_the_machine_where_nobody_says() {
    let held = |sms, name: &str, ranks| {
        let both = [ExchangeAlgo::DeepepV2Hybrid { sms }, ExchangeAlgo::DeepepV2Direct { sms }];
        both.map(|algo| {
            on(name, &balanced(ranks, 256, 8, 4096), algo, Phase::Dispatch, 7392).map(|found| found.sms).ok()
        })
    };
    assert_eq!(held(None, "dgx-h100", 8), [Some(14); 2]);
    assert_eq!(held(None, "dgx-b200", 8), [Some(24); 2]);
    assert_eq!(held(None, "dgx-h100", 64), [Some(4); 2]);
    assert_eq!(held(Some(20), "dgx-h100", 64), [Some(20); 2]);
    // No rule, and none that is made up. On CPUs this program carries the rows.
    assert_eq!(held(None, "dgx-a100", 8), [None; 2]);
    assert_eq!(held(None, "local-cpu", 2), [Some(1); 2]);
}

#[test]
fn buffers_are_those_the_libraries_allocate() {
    let of = |route: &Route, algo| buffers(route, algo, 7168, Wire::BF16.row_bytes(7168)).unwrap();
    // github issue sgl-project/sglang#24443: 16 ranks, 4096 tokens, bf16.
    let v2 = of(&balanced(16, 256, 8, 4096), ExchangeAlgo::DeepepV2Hybrid { sms: Some(12) });
    assert_eq!(v2.total(), 1_218_445_312);
    // 2 (E T m_c + E T m_d + 4 E) of 288 slots and 128 tokens: 2.1 GB.
    let ll = of(&balanced(8, 288, 8, 128), ExchangeAlgo::DeepepLowLatency { hook: true, slots: 128 });
    assert_eq!(ll.total(), 2 * (288 * 128 * (14336 + 224) + 288 * 128 * 14560 + 4 * 288));
    let one = of(&balanced(8, 256, 8, 4096), ExchangeAlgo::DeepepNormal { sms: 20 });
    assert_eq!((one.links, one.network), ((10u64 * 8 * (5 * 4 + 256 * (14336 + 8 + 2048))).next_multiple_of(128), 0));
    let two = of(&balanced(16, 256, 8, 4096), ExchangeAlgo::DeepepNormal { sms: 20 });
    assert_eq!(two.network, (10u64 * 2 * (18 * 8 + 2 * 128 * (14336 + 8 + 2048 + 16))).next_multiple_of(128));
}

#[test]
fn what_the_libraries_assert_is_infeasible_with_a_remedy() {
    let why = |route: &Route, algo, hidden| buffers(route, algo, hidden, 2 * hidden).unwrap_err().to_string();
    let ll = ExchangeAlgo::DeepepLowLatency { hook: true, slots: 128 };
    assert!(why(&balanced(8, 256, 8, 128), ll, 7424).contains("6144, 7168, 8192, not 7424; use"));
    assert!(why(&balanced(8, 256, 12, 128), ll, 7168).contains("at most 11"));
    assert!(why(&balanced(8, 256, 8, 129), ll, 7168).contains("make room for 129"));
    assert!(why(&balanced(8, 256, 8, 128), ExchangeAlgo::DeepepNormal { sms: 21 }, 7168).contains("use 20"));
    let normal = ExchangeAlgo::DeepepNormal { sms: 20 };
    assert!(why(&balanced(320, 640, 8, 128), normal, 7168).contains("deepep-v2"));
    assert!(why(&balanced(8, 256, 33, 128), normal, 7168).contains("at most 32 choices of a token, not 33"));
    assert!(why(&balanced(8, 256, 8, 128), normal, 7100).contains("hidden 7100 is no multiple of 8"));
    let fp8 = |hidden| buffers(&balanced(8, 256, 8, 128), normal, hidden, Wire::Fp8.row_bytes(hidden));
    assert!(fp8(7176).unwrap_err().to_string().contains("no multiple of 16") && fp8(7184).is_ok());
}

#[test]
fn the_hook_leaves_the_sms_to_others() {
    let route = balanced(16, 256, 8, 128);
    let sms = |hook| {
        let algo = ExchangeAlgo::DeepepLowLatency { hook, slots: 128 };
        on("dgx-h100", &route, algo, Phase::Dispatch, 7392).unwrap().sms
    };
    assert_eq!((sms(true), sms(false)), (0, 128));
}

/// 64 ranks, half of them on either rack, as parts of 8 that no rack cuts: what goes straight to its rank leaves the rack
/// for every second one, and what goes by way of such parts leaves them for seven of eight.
#[test]
fn rows_leave_the_nodes_where_ranks_are() {
    let spec = ClusterSpec::find("gb200-nvl72").unwrap();
    let cluster = Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), 576).unwrap();
    let members: Vec<u32> = (40..104).collect();
    let route = Route::new([64, cluster.together(64)], 128, 8, Counts::Balanced { tokens: 1000 }).unwrap();
    assert_eq!(route.nodes(), 8);
    let stack = StackSpec::find("nccl-fa3").unwrap();
    for phase in [Phase::Dispatch, Phase::Combine] {
        let at = Setting {
            route: &route,
            phase,
            row_bytes: 1,
            members: &members,
            cluster: &cluster,
            stack: &stack,
            library: None,
        };
        let straight = traffic_of(&at, ExchangeAlgo::Nccl);
        assert_eq!(straight.len(), 64);
        for one in &straight {
            assert!((one.network.sent - 4000.0).abs() < 1e-6 && (one.network.received - 4000.0).abs() < 1e-6);
            assert!((one.links.sent + one.links.kept - 4000.0).abs() < 1e-6);
        }
        let by_parts = traffic_of(&at, ExchangeAlgo::HybridEp { sms: 16 });
        assert_eq!(by_parts, traffic(&route, ExchangeAlgo::HybridEp { sms: 16 }, phase));
        assert!((by_parts[0].network.sent - 7.0 * route.unique_to_node(0, 1)).abs() < 1e-6);
    }
    // On whole racks nothing leaves.
    let whole = Route::new([64, 64], 128, 8, Counts::Balanced { tokens: 1000 }).unwrap();
    assert_eq!(traffic(&whole, ExchangeAlgo::Nccl, Phase::Dispatch)[0].network.sent, 0.0);
}

/// Four GH200, each with links of its own to the other three: rows take all of them, where a ring has those to one neighbour.
#[test]
fn rows_take_the_links_to_all_peers() {
    let route = balanced(4, 256, 8, 4096);
    let of = |edit: &dyn Fn(&mut ClusterSpec)| {
        let mut spec = ClusterSpec::find("alps-gh200").unwrap();
        edit(&mut spec);
        let cluster = Cluster::new(&spec, &GpuSpec::find(&spec.gpu).unwrap(), 4).unwrap();
        let (members, stack) = (&[0, 1, 2, 3][..], &StackSpec::find("nccl-fa3").unwrap());
        let (phase, row_bytes) = (Phase::Combine, 14336);
        let setting = Setting { route: &route, phase, row_bytes, members, cluster: &cluster, stack, library: None };
        let found = time(&setting, ExchangeAlgo::DeepepNormal { sms: 24 }).unwrap();
        found.slowest().links
    };
    let peers = of(&|_| ());
    let switch = of(&|spec| {
        spec.scale_up.per_peer = None;
        spec.scale_up.bandwidth = spec.scale_up.p2p.clone();
    });
    let ring = of(&|spec| spec.scale_up.per_peer = None);
    assert_eq!(peers, switch);
    assert!(ring / peers > 2.0, "{ring:?} {peers:?}");
}
