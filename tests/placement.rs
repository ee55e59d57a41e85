//! Copies of experts and limits of what an expert takes, in whole steps: run for real they give the dense f64 reference
//! that drops the same tokens, all gradients included; counts conserve; cost and simulation say the same of them.

mod dense;
mod plans;

use dense::{config, error, reference, run};
use foretrain::cost::{self, cost};
use foretrain::plan::expert::{ExpertKernel, ExpertOp};
use foretrain::plan::route::DROPPED;
use foretrain::plan::*;
use foretrain::routing::imbalance;
use foretrain::sim::{Effort, simulate};
use foretrain::spec::*;
use foretrain::strategy::build_routed;
use foretrain::strategy::expert::Routing;
use plans::{FLAT, Host, SM, same};

fn model(moe: MoeSpec, layers: u64) -> LlmSpec {
    let json = serde_json::json!({
        "model_type": "llama", "hidden_size": 12, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "intermediate_size": 8, "vocab_size": 29, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
        "tie_word_embeddings": false, "torch_dtype": "float32", "hidden_act": "silu",
    });
    LlmSpec { moe: Some(moe), ..LlmSpec::parse("test", "random", &json.to_string()).unwrap() }
}

fn eight() -> MoeSpec {
    MoeSpec { experts: 8, top_k: 2, ffn: 5, ..MoeSpec::default() }
}

/// A step: how its ranks are split, in which words, and how tokens choose.
#[derive(Clone, Copy)]
struct Step {
    moe: MoeSpec,
    par: Parallelism,
    routing: &'static str,
    layers: u64,
    microbatches: u64,
}

fn of(ep: u32, words: &str, routing: &'static str) -> Step {
    let par = Parallelism { dp: ep, ep, options: words.parse().unwrap(), ..Parallelism::default() };
    Step { moe: eight(), par, routing, layers: 1, microbatches: 1 }
}

impl Step {
    fn work(&self) -> Workload {
        let unit = 2 * u64::from(self.par.ring) * u64::from(self.par.ulysses) * u64::from(self.par.tp);
        Workload {
            seq_len: unit * 6,
            global_batch: 2 * self.microbatches * u64::from(self.par.dp),
            micro_batch: 2,
            dtype: Dtype::F64,
            documents: Default::default(),
        }
    }

    fn try_plan(&self) -> Result<Plan, String> {
        let (model, work) = (model(self.moe, self.layers), self.work());
        let routing: Routing = self.routing.parse().unwrap();
        let route = routing.route(&model, &work, &self.par, 2).map_err(|e| e.to_string())?;
        let plan = build_routed(&model, &work, &self.par, SM, route).map_err(|e| e.to_string())?;
        check::check(&plan).map_err(|e| e.to_string())?;
        Ok(plan)
    }

    fn plan(&self) -> Plan {
        self.try_plan().unwrap()
    }
}

/// The plan gives the reference; `what` is printed with what does not hold.
#[track_caller]
fn holds(what: &str, plan: &Plan) {
    println!("{what}");
    dense::holds(plan, 1e-10);
}

const WAYS: [&str; 8] = [
    "default",
    "dispatch-allgather",
    "dispatch-deepep-v1-normal",
    "dispatch-deepep-v1-ll",
    "dispatch-hybrid-ep",
    "dispatch-deepep-v2",
    "dispatch-deepep-v2-direct",
    "dispatch-hierarchical",
];

fn slots_of_the_fullest_expert(plan: &Plan) -> usize {
    let holds = &plan.routes[0].holds;
    holds.iter().map(|e| holds.iter().filter(|other| *other == e).count()).max().unwrap_or(1)
}

#[test]
fn copies_of_experts_take_the_step_of_one() {
    for words in WAYS {
        for (ep, replicas) in [(2, 2), (4, 4), (4, 12)] {
            let plan = of(ep, &format!("{words}+replicas-{replicas}"), "zipf:1.5").plan();
            assert!(slots_of_the_fullest_expert(&plan) >= if replicas > 2 { 3 } else { 2 });
            holds(&format!("{words} ep {ep}"), &plan);
        }
    }
}

/// Beside ranks that hold the same slots, whatever they share of them; in stages, computed again, beside another
/// microbatch, with a dense network, summed late.
#[test]
fn copies_beside_every_other_degree() {
    let zero = |zero| Parallelism { zero, ..Parallelism::default() };
    for (words, microbatches, par) in [
        ("replicas-4", 2, Parallelism { dp: 4, ep: 2, ..zero(0) }),
        ("replicas-4+dispatch-deepep-v2", 2, Parallelism { dp: 4, ep: 2, ..zero(1) }),
        ("replicas-4+no-overlap-grad", 3, Parallelism { dp: 8, ep: 4, recompute: Recompute::Full, ..zero(1) }),
        ("replicas-8+overlap-shared", 1, Parallelism { dp: 2, ep: 4, tp: 2, ..zero(1) }),
        ("replicas-2", 2, Parallelism { dp: 2, ep: 2, ring: 2, ..zero(1) }),
        ("replicas-4", 4, Parallelism { dp: 2, ep: 2, pp: 2, ..zero(1) }),
        ("replicas-2+overlap-exchange", 4, Parallelism { dp: 2, ep: 2, pp: 2, ..zero(1) }),
        ("replicas-4", 4, Parallelism { dp: 4, ep: 4, pp: 2, vp: 2, recompute: Recompute::Full, ..zero(1) }),
    ] {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let moe = MoeSpec { shared_ffn: 4, ..eight() };
        let step = Step { moe, par, microbatches, layers: 2 * u64::from(par.pp * par.vp), ..of(1, "", "zipf:1.2") };
        holds(words, &step.plan());
    }
}

#[test]
fn copies_even_out_what_ranks_compute_and_take_memory() {
    let [alone, copied] = ["default", "replicas-8"].map(|words| {
        let step = of(4, words, "hot-rank:0.8");
        Step { moe: MoeSpec { experts: 32, top_k: 4, ffn: 64, ..eight() }, ..step }.plan()
    });
    let spread = |plan: &Plan| {
        let route = &plan.routes[0];
        imbalance(&(0..route.ranks).map(|rank| route.expanded_rows(rank)).collect::<Vec<_>>())
    };
    assert!(spread(&copied) < 1.15 && spread(&alone) > 1.5, "{} {}", spread(&copied), spread(&alone));
    let rows = |plan: &Plan| (0..4).map(|rank| plan.routes[0].expanded_rows(rank)).sum::<f64>();
    assert_eq!(rows(&alone), rows(&copied));
    // Weights, gradients and optimizer state of ten slots on every rank, not eight.
    let kept = |plan: &Plan, name: &str| plan.tensors.iter().find(|t| t.name == name).unwrap().elems();
    for name in ["w.experts", "g.experts", "adam_m.experts"] {
        assert_eq!(kept(&copied, name) * 8, kept(&alone, name) * 10, "{name}");
    }
}

/// Without the sums, every copy steps by its own rows.
#[test]
fn copies_that_are_not_summed_are_caught() {
    let mut plan = of(4, "replicas-4", "zipf:1.5").plan();
    let want = reference(&plan, &config(&plan));
    let mut blinded = 0;
    for block in &mut plan.blocks {
        let total = |name: &str| {
            let op = block.ops.iter().find(|op| op.label == format!("grad_total_{name}"))?;
            let OpKind::Compute { writes, .. } = &op.kind else { return None };
            writes.first().copied()
        };
        let totals = ["up", "down"].map(total);
        for (name, to) in ["up", "down"].into_iter().zip(totals) {
            let op = block.ops.iter_mut().find(|op| op.label == format!("grad_same_{name}"));
            if let (Some(Op { kind: OpKind::Compute { writes, .. }, .. }), Some(to)) = (op, to) {
                // What came back goes where nobody looks for it.
                (writes[0], blinded) = (to, blinded + 1);
            }
        }
    }
    assert!(blinded > 0);
    let name = "model.layers.0.mlp.experts.down_proj.weight";
    let caught = match check::check(&plan) {
        Err(_) => true,
        Ok(()) => error(&run(&plan).grads[name], &want.grads[name]) > 1e-3,
    };
    assert!(caught, "gradients of one copy alone went unnoticed");
}

/// Every rank computes the hottest experts for itself: the step is that of the dense reference, whatever else it shares.
#[test]
fn shadowed_experts_take_the_step_of_one() {
    for words in WAYS {
        for (ep, n) in [(2, 1), (4, 3), (4, 8)] {
            let plan = of(ep, &format!("{words}+shadow-{n}"), "zipf:1.5").plan();
            assert_eq!(plan.routes[0].shadows, n);
            holds(&format!("{words} ep {ep} shadow {n}"), &plan);
        }
    }
    let zero = |zero| Parallelism { zero, ..Parallelism::default() };
    for (words, microbatches, par) in [
        ("shadow-2", 2, Parallelism { dp: 4, ep: 2, ..zero(0) }),
        ("shadow-3+no-overlap-grad", 3, Parallelism { dp: 8, ep: 4, recompute: Recompute::Full, ..zero(1) }),
        ("shadow-1+overlap-shared", 1, Parallelism { dp: 2, ep: 4, tp: 2, ..zero(1) }),
        ("shadow-2+capacity-0.75", 2, Parallelism { dp: 2, ep: 2, ring: 2, ..zero(1) }),
        ("shadow-2", 4, Parallelism { dp: 4, ep: 4, pp: 2, vp: 2, ..zero(1) }),
    ] {
        let par = Parallelism { options: words.parse().unwrap(), ..par };
        let moe = MoeSpec { shared_ffn: 4, ..eight() };
        let step = Step { moe, par, microbatches, layers: 2 * u64::from(par.pp * par.vp), ..of(1, "", "zipf:1.2") };
        holds(words, &step.plan());
    }
}

/// Rows of shadowed experts stay where they are; memory of weights that are kept grows by nothing.
#[test]
fn shadows_take_rows_off_the_way_and_weights_onto_it() {
    let [alone, shadowed] = ["default", "shadow-2"].map(|words| of(4, words, "hot-rank:0.9").plan());
    let hot: Vec<u32> = shadowed.routes[0].shadowed().to_vec();
    let [plain, route] = [&alone, &shadowed].map(|plan| &plan.routes[0]);
    for src in 0..4 {
        let experts =
            |route: &Route| route.choices(src).unwrap().iter().map(|s| route.expert_in(*s)).collect::<Vec<_>>();
        assert_eq!(experts(plain), experts(route), "the same choices");
        for &slot in route.choices(src).unwrap() {
            let expert = route.expert_in(slot);
            let home = if hot.contains(&expert) { src } else { expert / 2 };
            assert_eq!(route.rank_of(slot), home, "expert {expert} of source {src}");
        }
    }
    let loads = hot.iter().map(|e| plain.rows_of_expert(*e)).fold(f64::MAX, f64::min);
    assert!((0..8).filter(|e| !hot.contains(e)).all(|e| plain.rows_of_expert(e) <= loads), "the hottest are shadowed");
    let kept = |plan: &Plan, name: &str| plan.tensors.iter().find(|t| t.name == name).unwrap().elems();
    for name in ["w.experts", "g.experts", "adam_m.experts"] {
        assert_eq!(kept(&shadowed, name), kept(&alone, name), "{name}");
    }
    // Both shadows of every layer, to three others: up and down, out in two bytes less than home.
    let labels: Vec<&str> = shadowed.ops().map(|(_, op)| op.label.as_str()).collect();
    for label in ["shadow_out_up", "shadow_out_down", "shadow_home_up", "shadow_home_down"] {
        assert!(labels.contains(&label), "{label}");
    }
}

/// Gradients of shadows that stay away from home are missed.
#[test]
fn shadows_that_do_not_come_home_are_caught() {
    let mut plan = of(4, "shadow-2", "zipf:1.5").plan();
    let want = reference(&plan, &config(&plan));
    let before = plan.ops().count();
    for block in &mut plan.blocks {
        for op in &mut block.ops {
            if let (true, OpKind::Compute { reads, .. }) = (op.label == "add_shadow_down", &mut op.kind) {
                reads[1] = reads[0];
            }
        }
    }
    assert_eq!(plan.ops().count(), before);
    let name = "model.layers.0.mlp.experts.down_proj.weight";
    assert!(error(&run(&plan).grads[name], &want.grads[name]) > 1e-3, "gradients of shadows went unnoticed");
}

/// ceil(T k / E factor) of each source's tokens, earlier ones first (Megatron Core), by hand.
#[test]
fn what_is_beyond_the_capacity_is_dropped() {
    for (words, room) in [("capacity-1", 6), ("capacity-0.5", 3), ("capacity-1.25", 8), ("capacity-0.01", 1)] {
        let [free, limited] = ["default", words].map(|words| of(4, words, "zipf:1.2").plan());
        let (mut dropped, mut all) = (0, 0);
        for src in 0..4 {
            let [free, limited] = [&free, &limited].map(|plan| plan.routes[0].choices(src).unwrap());
            let mut taken = [0; 8];
            for (&was, &is) in free.iter().zip(limited) {
                taken[was as usize] += 1;
                let want = if taken[was as usize] > room { DROPPED } else { was };
                assert_eq!(is, want, "{words} source {src}");
                dropped += u32::from(is == DROPPED);
                all += 1;
            }
        }
        let kept: f64 = (0..4).map(|rank| limited.routes[0].expanded_rows(rank)).sum();
        assert_eq!(f64::from(all), kept + f64::from(dropped), "every choice is computed or dropped");
        assert!(dropped > 0, "{words}");
        holds(words, &limited);
    }
}

#[test]
fn every_way_drops_the_same() {
    for words in WAYS {
        holds(words, &of(4, &format!("{words}+capacity-0.75"), "zipf:1.0").plan());
    }
    let beside = of(4, "capacity-0.75+replicas-4+overlap-shared", "hot-rank:0.9");
    holds("copies", &Step { moe: MoeSpec { shared_ffn: 4, ..eight() }, layers: 2, microbatches: 2, ..beside }.plan());
}

/// What is left of the room is sent and computed as zeros, the same for everyone.
#[test]
fn room_that_is_left_is_filled_up() {
    // 24 tokens of a rank, two choices of eight experts: an even share is 6.
    let tutel = |factor: f64| 2 * (factor * 24.0 / 8.0) as u64;
    for (words, room) in [
        ("capacity-pad:1", 6),
        ("capacity-pad:2.5", 15),
        ("capacity-tutel:1.25", tutel(1.25)),
        ("capacity-tutel:-1", tutel(1.0)),
        ("capacity-tutel:0.1", 0),
    ] {
        for (ep, way) in [(1, "default"), (2, "default"), (4, "dispatch-hierarchical")] {
            let plan = of(ep, &format!("{way}+{words}"), "zipf:0.7").plan();
            let route = &plan.routes[0];
            assert_eq!(route.pad.map(u64::from), Some(room), "{words}");
            for rank in 0..ep {
                let each = f64::from(ep) * room as f64;
                assert!(route.rows_by_local_expert(rank).iter().all(|rows| *rows == each), "{words}");
            }
            holds(&format!("{words} ep {ep}"), &plan);
            // Products with masks pick the same rows, each over the tokens of a sequence.
            let masked = of(ep, &format!("{way}+{words}+mask-rows"), "zipf:0.7").plan();
            holds(&format!("{words}+mask-rows ep {ep}"), &masked);
            // There and back, and behind them the gradients of both, and of the masks that weigh the sum.
            let products = |plan: &Plan| -> Vec<u64> {
                let of = |kernel: &Kernel| match kernel {
                    Kernel::Expert(ExpertKernel { op: ExpertOp::Masked { products, .. }, .. }) => Some(*products),
                    _ => None,
                };
                plan.kernels().filter_map(of).collect()
            };
            let found = products(&masked);
            assert!(products(&plan).is_empty() && found.len() % 4 == 0, "{words}: {found:?}");
            assert!(!found.is_empty() && found.iter().sum::<u64>() * 4 == 5 * found.len() as u64, "{words}: {found:?}");
        }
    }
}

/// Tutel's factor 0 makes room for the fullest expert of any rank: nothing is dropped.
#[test]
fn dynamic_capacity_drops_nothing() {
    let [free, dynamic] = ["default", "capacity-tutel:0"].map(|words| of(4, words, "zipf:1.5").plan());
    let most = (0..4).flat_map(|src| (0..8).map(move |e| (src, e))).map(|(s, e)| free.routes[0].copies(s, e));
    assert_eq!(dynamic.routes[0].pad.map(f64::from), most.reduce(f64::max));
    for src in 0..4 {
        assert_eq!(free.routes[0].choices(src), dynamic.routes[0].choices(src));
    }
    holds("tutel:0", &dynamic);
    let limited = of(4, "capacity-tutel:-100", "zipf:1.5").plan();
    assert_eq!(limited.routes[0].pad, dynamic.routes[0].pad);
}

/// Folded, walked op by op, and event by event.
#[test]
fn predictions_agree() {
    let moe = MoeSpec { experts: 16, top_k: 3, ffn: 64, shared_ffn: 32, ..MoeSpec::default() };
    for (words, routing) in [
        ("replicas-8", "balanced"),
        ("replicas-8", "zipf:1.0"),
        ("replicas-8+dispatch-deepep-v1-normal", "zipf:1.0"),
        ("capacity-1", "zipf:1.0"),
        ("capacity-pad:1.5", "balanced"),
        ("capacity-pad:1.5", "zipf:1.0"),
        ("replicas-8+capacity-1", "zipf:1.0"),
        ("shadow-2", "zipf:1.0"),
        ("shadow-3+dispatch-deepep-v1-normal", "zipf:1.0"),
    ] {
        let plan = Step { moe, layers: 3, microbatches: 2, ..of(8, words, routing) }.plan();
        let host = Host::new(8, 8, 1.0);
        let all = cost(&plan, host.machine(), FLAT).unwrap();
        same(&cost(&plan, host.machine(), cost::Effort::SUMS).unwrap(), &all);
        let found = simulate(&plan, host.machine(), &[], Effort { fold: false, ..Effort::SUMS }).unwrap();
        let (sim, cost) = (found.timeline.step.value(), all.step.value());
        assert!(cost <= sim * (1.0 + 1e-9) && sim <= 1.05 * cost, "{words} {routing}: {cost} {sim}");
    }
}

/// Where one expert is hot, copies of it are worth their sums on slow devices' products.
#[test]
fn copies_pay_where_experts_are_hot() {
    let moe = MoeSpec { experts: 16, top_k: 2, ffn: 512, ..MoeSpec::default() };
    let step = |words: &str| {
        let par = Parallelism { dp: 8, ep: 8, options: words.parse().unwrap(), ..Parallelism::default() };
        let model = LlmSpec { moe: Some(moe), ..plans::model(2, 4, false) };
        let work = plans::work(&par, 8192, 1, 8);
        let routing: Routing = "zipf:1.0".parse().unwrap();
        let route = routing.route(&model, &work, &par, 8).unwrap();
        cost(&build_routed(&model, &work, &par, SM, route).unwrap(), Host::new(8, 8, 1.0).machine(), FLAT).unwrap()
    };
    let rows = |t: &foretrain::timeline::Timeline| {
        let of = |c: &foretrain::timeline::Class| c.usage.by_kernel.get("grouped_matmul").copied().unwrap_or(0.0);
        t.classes.iter().map(of).fold(0.0, f64::max)
    };
    let (alone, copied) = (step("default"), step("replicas-8"));
    assert!(rows(&copied) < 0.8 * rows(&alone), "{} {}", rows(&copied), rows(&alone));
}

#[test]
fn what_cannot_be_is_refused_with_a_remedy() {
    let why = |step: Step| step.try_plan().unwrap_err();
    for (ep, words, routing, wants) in [
        (1, "replicas-4", "uniform", "use ep above 1"),
        (4, "replicas-3", "uniform", "use 4"),
        (4, "replicas-1000", "uniform", "too many; use 24"),
        (4, "capacity-pad:1+replicas-4", "uniform", "drop without pad"),
        (4, "capacity-pad:1+dispatch-deepep-v1-normal", "uniform", "use dispatch nccl"),
        (4, "capacity-0.5", "balanced", "use --routing uniform"),
        (1, "shadow-2", "uniform", "leave it out"),
        (4, "shadow-2", "balanced", "use --routing zipf:1.0"),
        (4, "shadow-9", "uniform", "use fewer"),
        (4, "shadow-2+replicas-4", "uniform", "leave one out"),
        (4, "shadow-2+capacity-pad:1", "uniform", "drop without pad"),
    ] {
        let said = why(of(ep, words, routing));
        assert!(said.contains(wants), "{words}: {said}");
    }
    let stages = Parallelism { pp: 2, tp: 2, ..of(4, "pp-inside", "uniform").par };
    let said = why(Step { par: stages, layers: 2, ..of(4, "pp-inside", "uniform") });
    assert!(said.contains("use ep 2 or leave pp-inside out"), "{said}");
    let dense = LlmSpec { moe: None, ..model(eight(), 1) };
    for (words, wants) in [("replicas-4", "has none"), ("capacity-2", "has none"), ("shadow-1", "has none")] {
        let step = of(1, words, "uniform");
        let said = build_routed(&dense, &step.work(), &step.par, SM, None).unwrap_err().to_string();
        assert!(said.contains(wants), "{words}: {said}");
    }
}
