use super::gate::{Gate, GroupLimit, GroupScore, choose, scores};
use super::*;

fn request(routing: &str, ranks: u32) -> Request {
    Request {
        routing: routing.parse().unwrap(),
        ranks,
        node: ranks.min(8),
        experts: 256,
        topk: 8,
        tokens: 32768 / u64::from(ranks),
        replicas: 0,
        node_limit: None,
        groups: None,
        seed: 1,
        step: 0,
    }
}

fn spread_of(request: &Request) -> f64 {
    let route = request.route().unwrap();
    imbalance(&(0..request.ranks).map(|r| route.expanded_rows(r)).collect::<Vec<_>>())
}

#[test]
fn every_generator_gives_each_token_its_experts() {
    let words = "uniform khot:32:0.9 zipf:1.0 dirichlet:1 lognormal:1.5 ratio:1.5 hot-rank:0.5 spread-hot:0.5 ragged \
                 zero-rank spread round-robin rotating:0.5 burst:0.9 w1 zipf:1000 zipf:1e308 dirichlet:1e-5 dirichlet:5e-324";
    for word in words.split_whitespace() {
        let mut request = request(word, 16);
        request.tokens = 200;
        let trace = request.trace().unwrap();
        let route = request.route().unwrap();
        assert_eq!(trace, request.trace().unwrap(), "{word} is not the same twice");
        assert!(trace.choices.iter().all(|e| *e < 256), "{word} drops");
        let rows: f64 = (0..16).map(|r| route.expanded_rows(r)).sum();
        assert_eq!(rows, 8.0 * trace.tokens.iter().sum::<u64>() as f64, "{word} loses rows");
    }
}

#[test]
fn imbalance_is_what_it_is_known_to_be() {
    // top-8 of 256, 32768 tokens; random orders of experts differ by some tens of per cent.
    for (word, ranks, known) in
        [("uniform", 8, 1.01), ("uniform", 64, 1.03), ("zipf:0.3", 32, 1.32), ("zipf:1.0", 8, 1.84)]
    {
        let got = spread_of(&request(word, ranks));
        assert!((got / known - 1.0).abs() < 0.25, "{word} on {ranks}: {got}, not about {known}");
    }
    assert!(spread_of(&request("zipf:1.0", 64)) > 4.0);
    assert!((spread_of(&request("lognormal:1.5", 32)) - 1.5).abs() < 0.1);
    assert!((spread_of(&request("ratio:1.75", 32)) - 1.75).abs() < 1e-3);
}

/// Powers that no number has: the eight most wanted experts get all there is, as they nearly do before.
#[test]
fn the_steepest_of_weights_are_as_uneven_as_steep_ones() {
    for (steep, steeper) in [
        ("zipf:100", ["zipf:1000", "zipf:1e9", "zipf:1e300"]),
        ("dirichlet:1e-4", ["dirichlet:1e-5", "dirichlet:1e-300", "dirichlet:5e-324"]),
    ] {
        let known = spread_of(&request(steep, 32));
        for word in steeper {
            let got = spread_of(&request(word, 32));
            assert!((got / known - 1.0).abs() < 0.01, "{word}: {got}, not about {known}");
        }
    }
}

#[test]
fn replicas_even_out_what_they_can() {
    for (word, ranks, replicas) in [("zipf:0.6", 8, 32), ("lognormal:2.0", 32, 32), ("dirichlet:1", 64, 64)] {
        let mut request = request(word, ranks);
        let before = spread_of(&request);
        request.replicas = replicas;
        let after = spread_of(&request);
        assert!(after < 1.12 && after < before, "{word}: {before} to {after}");
    }
}

#[test]
fn eplb_gives_its_published_example() {
    // github:deepseek-ai/EPLB README.md
    let layers: [[f64; 12]; 2] = [
        [90., 132., 40., 61., 104., 165., 39., 4., 73., 56., 183., 86.],
        [20., 107., 104., 64., 19., 197., 187., 157., 172., 86., 16., 27.],
    ];
    let placed =
        [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]];
    for (loads, placed) in layers.iter().zip(placed) {
        assert_eq!(eplb::rebalance(loads, 16, 4, 2, 8).unwrap(), placed);
    }
    for (slots, use_those) in
        [(15, "15 slots do not divide over 8 ranks; use 4 replicas"), (20, "; use 4 or 12 replicas")]
    {
        let why = eplb::rebalance(&layers[0], slots, 4, 2, 8).unwrap_err().to_string();
        assert!(why.ends_with(use_those), "{why}");
    }
    // Three groups do not divide over two nodes: global, every expert still has a slot.
    let all = eplb::rebalance(&layers[0], 16, 3, 2, 8).unwrap();
    assert!((0..12).all(|e| all.contains(&e)));
}

#[test]
fn a_limit_on_nodes_binds_and_an_impossible_one_is_refused() {
    let mut request = request("uniform", 64);
    request.tokens = 64;
    request.node_limit = Some(4);
    let route = request.route().unwrap();
    let nodes: f64 = (0..64).flat_map(|s| (0..8).map(move |n| (s, n))).map(|(s, n)| route.unique_to_node(s, n)).sum();
    let mean = nodes / (64.0 * 64.0);
    // 3.984 by Monte Carlo of DeepEP's own test.
    assert!((mean - 3.984).abs() < 0.02, "{mean}");
    request.topk = 40;
    request.node_limit = Some(1);
    assert!(request.route().unwrap_err().to_string().contains("use 2 or more"));
}

#[test]
fn drawn_choices_stand_in_the_groups_that_a_router_keeps() {
    for routing in ["zipf:1.2", "dirichlet:0.3", "hot-rank:0.5", "uniform"] {
        let request = Request {
            groups: Some(GroupLimit { groups: 8, limit: 4, score: GroupScore::TwoBest }),
            experts: 256,
            topk: 8,
            tokens: 64,
            ..request(routing, 8)
        };
        let trace = request.trace().unwrap();
        for token in trace.choices.chunks(8) {
            let mut groups: Vec<u32> = token.iter().map(|expert| expert / 32).collect();
            groups.sort_unstable();
            groups.dedup();
            let mut once = token.to_vec();
            once.sort_unstable();
            once.dedup();
            assert!(groups.len() <= 4 && once.len() == 8, "{routing}: {token:?}");
        }
    }
}

#[test]
fn gates_select_by_bias_and_weigh_without() {
    let s = scores(Gate::Sigmoid, &[0.0, 1.0, -1.0, 2.0]);
    let (chosen, weights) = choose(&s, &[0.0, 0.0, 9.0, 0.0], 2, None);
    assert_eq!(chosen, [2, 3]);
    assert!((weights[0] + weights[1] - 1.0).abs() < 1e-6 && weights[0] < weights[1]);
    assert!((scores(Gate::Softmax, &[800.0, 800.0])[0] - 0.5).abs() < 1e-12);
    let limit = |score| Some(GroupLimit { groups: 2, limit: 1, score });
    assert_eq!(choose(&[9.0, 0.0, 5.0, 5.0], &[], 2, limit(GroupScore::TwoBest)).0, [2, 3]);
    assert_eq!(choose(&[9.0, 0.0, 5.0, 5.0], &[], 2, limit(GroupScore::Best)).0, [0, 1]);
    let all = choose(&[0.1, 0.2, 0.3], &[], 3, None).0;
    assert_eq!(all, [2, 1, 0]);
}

#[test]
fn the_bias_follows_the_load() {
    let mut bias = vec![0.0; 3];
    bias::update(&mut bias, &[10, 0, 5], 0.001);
    assert_eq!(bias, [-0.001, 0.001, 0.0]);
}

#[test]
fn capacity_drops_what_is_beyond_it_and_counts_conserve() {
    assert_eq!(capacity::capacity(4096, 8, 256, 1.25), 160);
    let tutel = |factor| capacity::tutel(4096, 2, 64, factor, 300);
    assert_eq!([tutel(1.0), tutel(0.0), tutel(-1.0), tutel(-4.0)], [128, 300, 128, 300]);
    let mut trace = request("zipf:1.0", 8).trace().unwrap();
    let before: u64 = trace.loads().iter().sum();
    let dropped = capacity::drop_beyond(&mut trace, |tokens| capacity::capacity(tokens, 8, 256, 1.0));
    assert!(dropped > 0);
    assert_eq!(trace.loads().iter().sum::<u64>() + dropped, before);
    assert!(trace.loads().iter().all(|l| *l <= 8 * 128));
    let route = trace.route(&Placement::contiguous(256, 8).unwrap(), 8).unwrap();
    assert_eq!((0..8).map(|r| route.expanded_rows(r)).sum::<f64>() as u64 + dropped, before);
}

#[test]
fn shadowing_stops_where_it_no_longer_pays() {
    let costs = shadow::Costs { width: 1024.0, widening: 4.0, element: 2.0, flops: 300e12, bandwidth: 25e9 };
    let route = |word, tokens| {
        let mut request = request(word, 8);
        request.tokens = tokens;
        request.route().unwrap()
    };
    let hot = shadow::shadowed(&route("hot-rank:0.9", 65536), &costs);
    assert!(!hot.is_empty() && hot.iter().all(|e| *e < 32), "{hot:?}");
    assert!(shadow::shadowed(&route("uniform", 4096), &costs).is_empty());
    assert!(shadow::shadowed(&route("hot-rank:0.9", 8), &costs).is_empty());
}

#[test]
fn a_log_is_read_and_a_bad_line_is_named() {
    let text = "source,experts,weights\n0,3 1,0.75 0.25\n2,0 -1,0.5 0.5\n";
    let trace = file::parse("log.csv", text, 4).unwrap();
    assert_eq!((trace.tokens.as_slice(), trace.choices.as_slice()), (&[1, 0, 1][..], &[3, 1, 0, DROPPED][..]));
    let lines = "{\"source\": 0, \"experts\": [3, 1], \"weights\": [0.75, 0.25]}\n{\"source\": 2, \"experts\": [0, -1], \"weights\": [0.5, 0.5]}";
    assert_eq!(file::parse("log.jsonl", lines, 4).unwrap(), trace);
    let why = |text: &str| file::parse("log.csv", text, 4).unwrap_err().to_string();
    assert!(why("0,1 2\n0,4 1").contains("line 2: expert 4 of 4"));
    assert!(why("0,1 1").contains("line 1: expert 1 twice"));
    assert!(why("0,1 2\n0,3").contains("1 experts where the first token has 2"));
    assert!(why("1,1 2\n0,3 1").contains("sources ascend"));
    assert!(why("0,1 x").contains("\"x\" is no integer"));
    assert!(why("").contains("no token"));
    assert!(why("-3,1").contains("negative"));
    assert!(why("0,1 2,0.5").contains("1 weights for 2 experts"));
    assert!(why("0,1 2,-0.5 1.5").contains("line 1: weight -0.5 is no number of 0 or more"));
    assert!(why("0,1 2,0.5 nan").contains("weight NaN is no number"));
}

#[test]
fn a_routing_is_written_as_it_is_read() {
    for words in [
        "balanced",
        "spread",
        "round-robin",
        "uniform",
        "khot:32:0.9",
        "zipf:1",
        "dirichlet:0.5",
        "lognormal:1.5",
        "ratio:2",
        "hot-rank:0.5",
        "spread-hot:0.25",
        "ragged",
        "zero-rank",
        "rotating:0.5",
        "burst:0.9",
        "traces/routing/log.csv",
    ] {
        assert_eq!(words.parse::<Routing>().unwrap().to_string(), words);
    }
}

#[test]
fn words_are_refused_with_the_known_ones() {
    for bad in ["zipf", "zipf:x", "khot", "khot:0", "khot:2.5", "lognormal:0.5", "hot-rank:2", "dirichlet:0", "unifrom"]
    {
        let why = bad.parse::<Routing>().unwrap_err().to_string();
        assert!(why.contains("--routing") && why.contains(bad), "{why}");
    }
    assert!("traces/routing/a.csv".parse::<Routing>().is_ok());
}

#[test]
fn hard_cases_are_routes_or_errors() {
    let of = |change: &dyn Fn(&mut Request)| {
        let mut request = request("uniform", 8);
        request.tokens = 16;
        change(&mut request);
        request.route()
    };
    let rows = |route: &Route| (0..route.ranks).map(|r| route.expanded_rows(r)).sum::<f64>();
    assert_eq!(rows(&of(&|r| r.tokens = 0).unwrap()), 0.0);
    assert_eq!(rows(&of(&|r| r.topk = 1).unwrap()), 128.0);
    assert_eq!(rows(&of(&|r| (r.topk, r.experts) = (16, 16)).unwrap()), 2048.0);
    assert!(of(&|r| r.topk = 257).unwrap_err().to_string().contains("257 of 256"));
    assert!(of(&|r| r.experts = 250).unwrap_err().to_string().contains("add 6 replicas"));
    assert_eq!(of(&|r| (r.experts, r.replicas) = (250, 6)).unwrap().experts, 256);
    let one = of(&|r| (r.routing, r.topk) = (Routing::Khot { hot: 1, share: 1.0 }, 1)).unwrap();
    assert_eq!((0..8).map(|r| one.expanded_rows(r)).fold(0.0, f64::max), 128.0);
    assert!(of(&|r| r.ranks = 0).is_err());
}

/// Before it is drawn: memory for any of these is asked for in hundreds of gigabytes, or they take for ever.
#[test]
fn what_is_too_much_to_draw_is_refused() {
    let said = |word: &str, change: fn(&mut Request)| {
        let mut request = request(word, 32);
        change(&mut request);
        request.route().unwrap_err().to_string()
    };
    let wide: fn(&mut Request) = |r| (r.ranks, r.experts) = (2_000_000, 2_000_000);
    for (word, change, why) in [
        ("uniform", (|r| r.tokens = 100_000_000) as fn(&mut Request), "25600000000 choices of 3200000000 tokens"),
        ("ragged", |r| r.tokens = u64::MAX, "fewer tokens, or --routing balanced"),
        ("ratio:1e9", |r| r.tokens = 10_000_000, "fewer tokens"),
        ("zipf:1", |r| (r.topk, r.tokens) = (1, 8_000_000), "experts of 256000000 tokens"),
        ("zipf:1", wide, "4000000000000 counts of rows, 2000000 ranks by 2000000 slots, are"),
        ("ragged", |r| r.experts = 1 << 31, "fewer experts or ranks"),
        ("uniform", |r| r.replicas = 1 << 31, "fewer experts or ranks"),
        ("balanced", |r| r.replicas = u32::MAX, "use fewer"),
        ("uniform", |r| r.ranks = 1_000_000_000, "256 experts do not divide over 1000000000 ranks"),
        ("dirichlet:1e-9", |r| (r.ranks, r.node, r.tokens) = (7, 7, 1 << 31), "256 experts do not divide over 7 ranks"),
    ] {
        let got = said(word, change);
        assert!(got.contains(why), "{word}: {got}");
    }
}
