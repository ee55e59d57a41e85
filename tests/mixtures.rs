//! Mixtures of experts in whole steps: cost and simulation say the same, a changed plan is caught, skewed routings cost
//! more than even ones, and a sweep goes over carriers.

mod plans;

use foretrain::cost::cost;
use foretrain::plan::*;
use foretrain::sim::{Effort, simulate};
use foretrain::spec::*;
use foretrain::strategy::build_routed;
use foretrain::strategy::expert::Routing;
use foretrain::sweep::{Batch, Grid, sweep};
use plans::{FLAT, Host, SM, same, work};

fn mixture(layers: u64) -> LlmSpec {
    let moe = MoeSpec { experts: 16, top_k: 3, ffn: 64, shared_ffn: 32, ..MoeSpec::default() };
    LlmSpec { moe: Some(moe), ..plans::model(layers, 4, false) }
}

fn way(ep: u32, words: &str) -> Parallelism {
    let options = words.parse().unwrap();
    Parallelism { dp: 4, tp: 2, ep, zero: 1, options, ..Parallelism::default() }
}

/// Eight ranks, `node` a node, routed so.
fn routed(par: &Parallelism, node: u32, routing: &str) -> Plan {
    let (model, work) = (mixture(3), work(par, 128, 1, 2));
    let routing: Routing = routing.parse().unwrap();
    let route = routing.route(&model, &work, par, node).unwrap();
    let plan = build_routed(&model, &work, par, SM, route).unwrap();
    check::check(&plan).unwrap();
    plan
}

const CARRIERS: [&str; 12] = [
    "default",
    "dispatch-allgather",
    "dispatch-deepep-v1-normal",
    "dispatch-deepep-v1-ll",
    "dispatch-deepep-v2",
    "dispatch-deepep-v2-direct",
    "dispatch-hybrid-ep",
    "dispatch-hierarchical+dispatch-fp8",
    "overlap-exchange",
    "dispatch-deepep-v1-normal+dispatch-fp8+overlap-shared+overlap-exchange",
    "dispatch-deepep-v1-ll+overlap-shared+overlap-exchange",
    "dispatch-deepep-v1-ll+deepep-hook+dispatch-fp8+overlap-exchange",
];

/// An exchange is one thing for both, however its rows go; a port is shared with nothing else here.
#[test]
fn cost_is_simulated() {
    let mut exact = 0;
    for words in CARRIERS {
        let alone = Parallelism { dp: 8, tp: 1, zero: 0, ..way(8, words) };
        for (par, node, routing) in [
            (alone, 8, "balanced"),
            (alone, 8, "zipf:1.0"),
            (way(8, words), 4, "balanced"),
            (way(4, words), 8, "zipf:1.0"),
            (way(8, words), 4, "hot-rank:0.6"),
        ] {
            let plan = routed(&par, node, routing);
            let host = Host::new(plan.ranks(), node, 1.0);
            let all = cost(&plan, host.machine(), FLAT).unwrap();
            let found = simulate(&plan, host.machine(), &[], Effort { fold: false, ..Effort::SUMS }).unwrap();
            if found.slowed == 0 {
                same(&found.timeline, &all);
                exact += 1;
            } else {
                let (sim, cost) = (found.timeline.step.value(), all.step.value());
                assert!(cost <= sim && sim <= 1.05 * cost, "{words} {routing}: {cost} {sim}");
            }
        }
    }
    assert!(exact > CARRIERS.len(), "{exact} plans without a shared port");
}

/// The more rows the fullest rank has, the longer the step: all wait for it.
#[test]
fn skewed_routings_take_longer() {
    let par = way(8, "default");
    let step = |routing: &str| {
        let plan = routed(&par, 8, routing);
        cost(&plan, Host::new(8, 8, 3000.0).machine(), FLAT).unwrap().step.value()
    };
    let [even, zipf, hot] = ["balanced", "zipf:1.0", "hot-rank:0.9"].map(step);
    assert!(even < zipf && zipf < hot, "{even} {zipf} {hot}");
}

/// A mixture in `pp` stages of `vp` chunks, eight microbatches, words.
fn staged(pp: u32, vp: u32, words: &str) -> Plan {
    let par = Parallelism { pp, vp, dp: 4, tp: 1, ..way(4, words) };
    let (model, work) = (mixture(4 * u64::from(pp * vp)), work(&par, 1024, 1, 8));
    let route = Routing::Balanced.route(&model, &work, &par, 2).unwrap();
    let plan = build_routed(&model, &work, &par, SM, route).unwrap();
    check::check(&plan).unwrap();
    plan
}

/// Rows that travel beside the compute of another microbatch are waited for less. Nothing else is saved, and what is
/// under way takes memory.
#[test]
fn rows_hide_behind_another_microbatch() {
    for (pp, vp) in [(1, 1), (2, 1), (2, 2), (4, 1)] {
        let [alone, paired] =
            ["dispatch-deepep-v1-normal", "dispatch-deepep-v1-normal+overlap-exchange"].map(|words| {
                let plan = staged(pp, vp, words);
                let host = Host::new(plan.ranks(), 2, 10.0);
                let [all, few] =
                    [FLAT, foretrain::cost::Effort::SUMS].map(|effort| cost(&plan, host.machine(), effort).unwrap());
                same(&few, &all);
                let atoms = link::AtomTable::new(&plan).unwrap();
                (all.step.value(), all.mean(), memory::Layout::new(&plan, &atoms, 0).unwrap().bytes)
            });
        let exposed = |usage: &foretrain::timeline::Usage| usage.exposed.get(&Axis::Ep).copied().unwrap_or(0.0);
        let [before, after] = [exposed(&alone.1), exposed(&paired.1)];
        assert!(after < 0.8 * before, "pp {pp} vp {vp}: exposed {before} and {after}");
        assert!(paired.0 < alone.0, "pp {pp} vp {vp}: {} and {}", alone.0, paired.0);
        assert!((paired.1.flops / alone.1.flops - 1.0).abs() < 1e-9);
        assert!(paired.2 > alone.2, "pp {pp} vp {vp}: {} and {} bytes", alone.2, paired.2);
    }
}

/// Seconds in which kernels run while rows travel, over all ranks.
fn beside(plan: &Plan, timeline: &foretrain::timeline::Timeline) -> f64 {
    let of = |spans: &[foretrain::timeline::Span]| {
        let (kernels, others): (Vec<_>, Vec<_>) =
            spans.iter().partition(|span| plan.lanes[span.lane as usize].computes());
        let rows = others.iter().filter(|span| ["dispatch", "cached_dispatch", "combine"].contains(&span.what));
        let shared = |row: &foretrain::timeline::Span| {
            let both = |k: &&foretrain::timeline::Span| {
                let (from, to) = (k.start.value().max(row.start.value()), k.end.value().min(row.end.value()));
                (to - from).max(0.0)
            };
            kernels.iter().map(both).sum::<f64>()
        };
        rows.map(|row| shared(row)).sum::<f64>()
    };
    timeline.classes.iter().map(|class| of(&class.spans)).sum()
}

/// DeepEP's low latency has a block on nearly every SM: nothing computes beside it, whichever was issued first. With the hook
/// kernels that are issued behind it do, where the NICs have the rows.
#[test]
fn low_latency_takes_turns_with_kernels() {
    let ll = "dispatch-deepep-v1-ll";
    for (pp, vp) in [(1, 1), (2, 1), (2, 2)] {
        let all = |words: &str| {
            let plan = staged(pp, vp, words);
            let host = Host::new(plan.ranks(), 2, 10.0);
            let [flat, few, spans] = [FLAT, foretrain::cost::Effort::SUMS, foretrain::cost::Effort::ALL_SPANS]
                .map(|effort| cost(&plan, host.machine(), effort).unwrap());
            same(&few, &flat);
            let effort = Effort { fold: false, spans: true, ..Effort::SUMS };
            let played = simulate(&plan, host.machine(), &[], effort).unwrap().timeline;
            [spans, played].map(|timeline| beside(&plan, &timeline))
        };
        for words in [ll, &format!("{ll}+overlap-shared"), &format!("{ll}+overlap-shared+overlap-exchange")] {
            assert!(all(words).iter().all(|s| *s < 1e-11), "pp {pp} vp {vp}: {words}: {:?}", all(words));
        }
        for words in ["dispatch-deepep-v1-normal", &format!("{ll}+deepep-hook+overlap-exchange")] {
            assert!(all(words).iter().all(|s| *s > 1e-7), "pp {pp} vp {vp}: {words}: {:?}", all(words));
        }
    }
}

/// Rows of low latency arrive where every slot has room for all tokens of every rank, and are put together for the products
/// of experts as those of the normal kernels are.
#[test]
fn rows_of_low_latency_are_put_together() {
    let labels = |words: &str| {
        let plan = routed(&way(8, words), 4, "balanced");
        let moved = plan.ops().filter(|(_, op)| ["expand", "gather"].iter().any(|of| op.label.contains(of)));
        let landed = plan.tensors.iter().find(|tensor| tensor.name == "landed_rows").unwrap().rows();
        (moved.map(|(_, op)| op.label.clone()).collect::<Vec<_>>(), landed, plan.routes[0].clone())
    };
    let (normal, ..) = labels("dispatch-deepep-v1-normal");
    let (moved, landed, route) = labels("dispatch-deepep-v1-ll");
    assert!(moved == normal && moved.len() >= 4, "{moved:?} {normal:?}");
    assert_eq!(landed, u64::from(route.local_experts() * route.ranks) * route.most_tokens());
}

#[test]
fn pairs_need_two_microbatches_whose_rows_travel() {
    let refusal = |model: &LlmSpec, par: Parallelism, batches| {
        let refused = foretrain::strategy::build(model, &work(&par, 128, 1, batches), &par, SM);
        refused.expect_err("refused").to_string()
    };
    let (mixture, par) = (mixture(4), way(4, "overlap-exchange"));
    for (model, par, batches, why) in [
        (&mixture, par, 1, "there is 1; use global_batch 8"),
        (&mixture, Parallelism { ep: 1, ..par }, 2, "nothing travels with ep 1"),
        (&mixture, Parallelism { recompute: Recompute::Full, ..par }, 2, "use recompute none"),
        (&plans::model(4, 4, false), Parallelism { ep: 1, ..par }, 2, "overlap-exchange needs experts"),
        (
            &mixture,
            Parallelism { pp: 2, options: "no-overlap-p2p+overlap-exchange".parse().unwrap(), ..par },
            2,
            "use vp",
        ),
        (
            &mixture,
            Parallelism { options: "deepep-hook+overlap-exchange".parse().unwrap(), ..par },
            2,
            "dispatch-deepep-v1-ll",
        ),
        (&mixture, Parallelism { options: "wait-passes+overlap-exchange".parse().unwrap(), ..par }, 2, "wait-passes"),
    ] {
        let said = refusal(model, par, batches);
        assert!(said.contains(why), "{said}");
    }
}

/// A routing of a file is that of its lines.
#[test]
fn a_file_of_choices_is_a_routing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("router.csv");
    let rows = (0..256).map(|token| format!("0,{} {} {}\n", token % 16, (token + 1) % 16, (token + 5) % 16));
    std::fs::write(&path, format!("source,experts\n{}", rows.collect::<String>())).unwrap();
    let par = way(4, "default");
    let plan = routed(&par, 8, path.to_str().unwrap());
    let Counts::Listed { tokens, choices } = &plan.routes[0].counts else { panic!("listed") };
    assert_eq!((tokens.iter().sum::<u64>(), choices.len()), (256, 768));
    assert_eq!(plan.routes[0].choices(0).unwrap()[..6], [0, 1, 5, 1, 2, 6]);
}

/// A log that is shorter than a microbatch is repeated, source by source, or of other sources dealt out and repeated; one that is
/// longer, or has none of a source, is refused.
#[test]
fn a_short_log_is_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("router.csv");
    let par = way(4, "default");
    let (model, work) = (mixture(3), work(&par, 128, 1, 2));
    let log = |sources: u32, tokens: u32| {
        let row = |source: u32, t: u32| format!("{source},{} {} {}\n", t % 16, (t + source + 1) % 16, (t + 9) % 16);
        let rows = (0..sources).flat_map(|source| (0..tokens).map(move |token| row(source, token)));
        std::fs::write(&path, rows.collect::<String>()).unwrap();
        path.to_str().unwrap().parse::<Routing>().unwrap()
    };
    let own = log(4, 5);
    let route = own.route(&model, &work, &par, 8).unwrap().unwrap();
    for src in 0..4 {
        let choices = route.choices(src).unwrap();
        assert_eq!((route.tokens(src), choices.len()), (64, 192));
        assert!((15..192).all(|at| choices[at] == choices[at % 15]), "{choices:?}");
        assert_eq!(choices[..3], [0, src + 1, 9]);
    }
    assert_eq!(
        own.repeats(&model, &work, &par).unwrap(),
        "the log has 5 tokens of a source, a rank 64: it is repeated"
    );
    let dealt = log(3, 5);
    let route = dealt.route(&model, &work, &par, 8).unwrap().unwrap();
    let all: Vec<u32> = (0..4).flat_map(|src| route.choices(src).unwrap().to_vec()).collect();
    assert!((45..768).all(|at| all[at] == all[at % 45]) && route.tokens(3) == 64);
    assert!(dealt.repeats(&model, &work, &par).unwrap().contains("15 tokens of 3 sources, 4 ranks 64 each"));
    let whole = log(4, 64);
    assert!(whole.route(&model, &work, &par, 8).is_ok() && whole.repeats(&model, &work, &par).is_none());
    let refused = |routing: Routing| routing.route(&model, &work, &par, 8).unwrap_err().to_string();
    assert!(refused(log(4, 65)).contains("65 tokens of source 0, whose ranks have 64; log fewer"));
    std::fs::write(&path, "0,1 2 3\n3,1 2 3\n").unwrap();
    let why = refused(path.to_str().unwrap().parse().unwrap());
    assert!(why.contains("router.csv: 0 tokens of source 1, whose ranks have 64; log some of every source"), "{why}");
}

/// DeepSeek-V3 ranks groups by their two best experts, V2 by the best, and V2 Lite has a group of them all.
#[test]
fn gates_rank_groups_as_their_models_do() {
    let score = |name: &str| LlmSpec::find(name).unwrap().moe.unwrap().groups.map(|groups| groups.score);
    let of = ["deepseek-v3", "deepseek-v2", "deepseek-v2-lite"].map(score);
    assert_eq!(of, [Some(GroupScore::TwoBest), Some(GroupScore::Best), None]);
}

/// Tokens that keep to some groups of experts reach as many ranks and nodes where they are drawn as where they are expected.
#[test]
fn gates_with_groups_are_expected_as_they_are_drawn() {
    let par = Parallelism { dp: 16, tp: 1, ..way(16, "default") };
    let work = work(&par, 512, 1, 2);
    for (experts, top_k, kept, score) in [(64, 8, 4, GroupScore::TwoBest), (32, 6, 3, GroupScore::Best)] {
        let mut model = mixture(3);
        let groups = Some(Groups { count: 8, kept, score });
        model.moe = model.moe.map(|moe| MoeSpec { experts, top_k, groups, ..moe });
        let reached = |words: &str, node: u32| {
            let routing: Routing = words.parse().unwrap();
            let route = routing.route(&model, &work, &par, node).unwrap().unwrap();
            let tokens = (0..16).map(|src| route.tokens(src) as f64).sum::<f64>();
            let pairs = |n: u32| (0..16).flat_map(move |src| (0..n).map(move |to| (src, to)));
            let ranks: f64 = pairs(16).map(|(src, dst)| route.unique_to_rank(src, dst)).sum();
            let nodes: f64 = pairs(route.nodes()).map(|(src, to)| route.unique_to_node(src, to)).sum();
            [ranks / tokens, nodes / tokens]
        };
        for node in [2, 4, 8] {
            let [expected, uniform, zipf] = ["balanced", "uniform", "zipf:0"].map(|words| reached(words, node));
            for drawn in [uniform, zipf] {
                let close = |at: usize| (drawn[at] / expected[at] - 1.0).abs() < 0.01;
                assert!(close(0) && close(1), "{score:?}, {node} a node: {drawn:?} are not {expected:?}");
            }
        }
    }
}

/// Links carry the same whether ranks that are alike are looked at once or each.
#[test]
fn links_are_as_busy_folded() {
    let rings = Parallelism { dp: 2, tp: 1, ring: 4, ..way(8, "dispatch-hybrid-ep") };
    for plan in [routed(&way(8, "default"), 4, "balanced"), routed(&rings, 4, "balanced"), staged(2, 1, "default")] {
        let host = Host::new(plan.ranks(), 4, 10.0);
        let busy = |fold: bool| {
            let effort = Effort { fold, ..Effort::SPANS };
            let found = simulate(&plan, host.machine(), &[], effort).unwrap();
            found.why.unwrap().utilisation.iter().map(|link| link.mean).collect::<Vec<f64>>()
        };
        let [once, each] = [true, false].map(busy);
        let same = once.iter().zip(&each).all(|(a, b)| (a / b - 1.0).abs() < 1e-3);
        assert!(same && once.len() == each.len() && once[0] > 0.0, "{once:?} {each:?}");
    }
}

/// Every op of the experts and every field of an exchange is there for something: without it, or with another, `check`
/// refuses the plan or it costs something else.
#[test]
fn changed_mixtures_are_caught() {
    let plan = routed(&way(8, "dispatch-deepep-v1-normal+dispatch-fp8"), 4, "zipf:0.5");
    let times = |p: &Plan| cost(p, Host::new(8, 4, 100.0).machine(), FLAT);
    let sound = times(&plan).unwrap();
    let caught = |mutant: &Plan| check::check(mutant).is_err() || times(mutant).unwrap() != sound;
    let mut mutants = 0;
    for block in 0..plan.blocks.len() {
        for at in 0..plan.blocks[block].ops.len() {
            let op = &plan.blocks[block].ops[at];
            let of_experts =
                matches!(op.kind, OpKind::Exchange { .. } | OpKind::Compute { kernel: Kernel::Expert(_), .. });
            if !of_experts {
                continue;
            }
            let label = op.label.clone();
            let mut changed = |what: &str, change: &dyn Fn(&mut Vec<Op>)| {
                let mut mutant = plan.clone();
                change(&mut mutant.blocks[block].ops);
                assert!(caught(&mutant), "{label} {what}");
                mutants += 1;
            };
            changed("deleted", &|ops| {
                ops.remove(at);
                (0..).zip(ops).for_each(|(id, op)| op.id = id);
            });
            if matches!(op.kind, OpKind::Exchange { .. }) {
                changed("by NCCL", &|ops| {
                    let OpKind::Exchange { algo, .. } = &mut ops[at].kind else { unreachable!() };
                    *algo = ExchangeAlgo::Nccl;
                });
                changed("the other way", &|ops| {
                    let OpKind::Exchange { phase, .. } = &mut ops[at].kind else { unreachable!() };
                    *phase = if *phase == Phase::Combine { Phase::Dispatch } else { Phase::Combine };
                });
                changed("of another route", &|ops| {
                    let OpKind::Exchange { route, .. } = &mut ops[at].kind else { unreachable!() };
                    *route += 1;
                });
            }
        }
    }
    assert!(mutants > 20, "{mutants} mutants");
}

/// Carriers, dtypes and ranks are axes of a sweep; a row says which it is, and what of the exchanges is waited for.
#[test]
fn a_sweep_over_carriers() {
    let dir = tempfile::tempdir().unwrap();
    let options = ["default", "dispatch-hybrid-ep", "dispatch-hybrid-ep+dispatch-fp8"].map(|w| w.parse().unwrap());
    let grid = Grid {
        title: None,
        model: "mixtral-8x7b".into(),
        cluster: "dgx-h100".into(),
        stack: "nccl-fa3".into(),
        gpus: 32,
        dtype: Dtype::Bf16,
        seq_len: vec![4096],
        batch: Batch::GlobalBatch(vec![32]),
        micro_batch: vec![1],
        ways: vec![[1, 1]],
        tp: vec![2],
        pp: vec![1],
        vp: vec![1],
        ep: vec![2, 8],
        zero: vec![1],
        recompute: vec![Recompute::Full],
        options: options.to_vec(),
        routing: Some("zipf:0.3".into()),
        documents: Default::default(),
        no_mtp: false,
        also: vec![],
    };
    let study = sweep(&grid, dir.path(), true, &|_, _| {}).unwrap();
    let found: Vec<String> = study.rows.iter().map(|row| format!("ep {} {}", row.ep, row.options)).collect();
    let all = ["default", "dispatch-hybrid-ep", "dispatch-hybrid-ep+dispatch-fp8"];
    let want: Vec<String> = [2, 8].iter().flat_map(|ep| all.map(|w| format!("ep {ep} {w}"))).collect();
    let mut sorted = found.clone();
    sorted.sort();
    assert_eq!(sorted, want);
    let waits = |name: &str| {
        let at = found.iter().position(|row| row == name).unwrap();
        study.rows[at].exposed_ep_s.unwrap_or_else(|| panic!("{name}: {}", study.rows[at].why))
    };
    let [all_to_all, once, narrow] = all.map(|w| waits(&format!("ep 8 {w}")));
    // Half the bytes on the way there are waited for less; two carriers are not the same.
    assert!(narrow < once && narrow > 0.0 && once != all_to_all, "{narrow} {once} {all_to_all}");
}
