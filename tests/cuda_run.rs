//! Whole training steps as GPUs are told to do them, without a GPU: a double of the device obeys the commands in any
//! order that streams and events allow, its kernels run by the emulator. Losses, gradients and bytes are held to the
//! dense f64 reference and to the plan. What is not tested here is the driver, and how long anything takes.

mod checkpoint_states;
mod cuda_double;
mod cuda_emulator;
mod dense;

use checkpoint_states::{from_to, states};
use cuda_double::Double;
use dense::error;
use foretrain::act::work_of;
use foretrain::calibrate::{Effort, gpu};
use foretrain::collective::count::sent_by;
use foretrain::device::curve::Curve;
use foretrain::device::{KernelTime, Profile};
use foretrain::exec::cuda::fused::Attention;
use foretrain::exec::cuda::run::{Rest, Square, Timing, time_steps, train_on};
use foretrain::exec::reference::{DenseConfig, Experts, step};
use foretrain::exec::source::Source;
use foretrain::exec::{Job, Options, Run, routing, train};
use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::{Dtype, Engine, OpKind, Plan, memory::Layout};
use foretrain::spec::{
    Documents, LlmSpec, MlaSpec, MoeSpec, Parallelism, Positions, Provenance, Recompute, RopeScaling, Workload,
};
use foretrain::strategy::expert::Routing;
use foretrain::strategy::{Engines, build, build_routed};
use std::path::Path;
use std::sync::LazyLock;

/// Heads 32 wide: the narrowest that the kernels of attention take.
fn model(layers: u64, kv_heads: u64) -> LlmSpec {
    let (heads, head_dim) = (4, 32);
    LlmSpec { hidden: 64, layers, heads, kv_heads, head_dim, ffn: 96, vocab: 64, ..LlmSpec::find("tiny").unwrap() }
}

const ENGINES: Engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 8 } };

fn plan(par: Parallelism, batches: u64) -> Plan {
    let global_batch = u64::from(par.dp) * batches;
    let documents = Default::default();
    let work = Workload { seq_len: 128, global_batch, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let layers = if par.pp > 1 { 2 } else { 1 };
    build(&model(layers, 4), &work, &par, ENGINES).unwrap()
}

fn options(plan: &Plan, devices: &[u32]) -> Options {
    let of = |rank: u32| devices[rank as usize % devices.len()];
    Options::new(7, (0..plan.ranks()).map(of).collect(), true)
}

/// Steps on a double that goes by `seed`.
fn steps(plan: &Plan, devices: &[u32], count: u64, seed: u64) -> Vec<Run> {
    let mut runs = vec![];
    let job = Job { source: &Source::seeded(7), steps: count, keep_last: false, watch: None };
    let mut double = Double::new(devices.iter().max().unwrap() + 1, 8 << 30, seed);
    train_on(&mut double, plan, &options(plan, devices), &job, &mut |_, run| {
        runs.push(run);
        Ok(())
    })
    .unwrap();
    runs
}

/// bf16 keeps 8 bits, and a gradient is behind some dozen roundings of it.
const TOLERANCE: f64 = 0.06;

#[track_caller]
fn hold(plan: &Plan, devices: &[u32]) {
    if !cuda_emulator::is_here() {
        return;
    }
    let run = steps(plan, devices, 1, 1).remove(0);
    let mut config = DenseConfig::from(plan.model().unwrap());
    config.experts = config.experts.map(|e| Experts { choices: routing::choices(plan), ..e });
    let (tokens, targets) = Source::seeded(7).batch(plan, 1);
    let want = step(&config, &Source::seeded(7).weights(plan), &tokens, &targets, &plan.optimizer().unwrap());
    assert!((run.loss - want.loss).abs() < 0.005 * want.loss, "loss {} is not {}", run.loss, want.loss);
    assert_eq!(run.hidden.len(), want.hidden.len());
    for (got, want) in run.hidden.iter().zip(&want.hidden) {
        assert!(error(got, want) < TOLERANCE, "hidden states are off by {}", error(got, want));
    }
    assert_eq!(run.grads.keys().collect::<Vec<_>>(), want.grads.keys().collect::<Vec<_>>());
    for (name, want) in &want.grads {
        let off = error(&run.grads[name], want);
        assert!(off < TOLERANCE, "gradient of {name} is off by {off}");
    }
    bytes(plan, &run);
}

/// As the plan says: what a rank's memory is, and what goes from one to another.
fn bytes(plan: &Plan, run: &Run) {
    let atoms = AtomTable::new(plan).unwrap();
    let line = |rank| Line::program(plan, &atoms, plan.program_of(rank)).unwrap();
    let ranks = || 0..plan.ranks();
    let planned: u64 = ranks().map(|rank| sent_by(plan, &line(rank), rank)).sum();
    // Rows of an exchange are taken from where they are, whatever their algorithm sends along.
    if plan.routes.is_empty() {
        assert_eq!(run.sent_bytes.iter().sum::<u64>(), planned);
    }
    let layout = |rank| Layout::new(plan, &atoms, plan.program_of(rank)).unwrap().bytes;
    assert_eq!(run.peak_bytes, ranks().map(layout).collect::<Vec<_>>());
    for (rank, class) in run.timeline.classes.iter().enumerate() {
        assert_eq!(class.spans.len(), line(rank as u32).nodes.len());
        assert!(class.spans.iter().all(|s| s.end >= s.start && s.start.value() >= 0.0), "times go forward");
    }
}

fn none() -> Parallelism {
    Parallelism::default()
}

/// A mixture of experts, its tokens routed by a seed.
fn experts(options: &str, ep: u32) -> Plan {
    let moe = MoeSpec { experts: 4, top_k: 2, ffn: 32, shared_ffn: 0, ..MIXTRAL.moe.unwrap() };
    let model = LlmSpec { moe: Some(moe), ..model(1, 4) };
    let documents = Default::default();
    let work = Workload { seq_len: 64, global_batch: 2, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let par = Parallelism { dp: 2, ep, zero: 0, options: options.parse().unwrap(), ..none() };
    let route = Routing::Uniform { seed: 5 }.route(&model, &work, &par, 2).unwrap();
    build_routed(&model, &work, &par, ENGINES, route).unwrap()
}

static MIXTRAL: LazyLock<LlmSpec> = LazyLock::new(|| LlmSpec::find("mixtral-8x7b").unwrap());

#[test]
fn experts_by_every_way() {
    for words in ["default", "dispatch-deepep-v1-normal", "dispatch-deepep-v1-ll", "dispatch-allgather"] {
        hold(&experts(words, 2), &[0]);
        hold(&experts(&format!("{words}+recompute-moe"), 2), &[0]);
    }
}

#[test]
fn training_goes_on_from_the_weights_that_a_step_left() {
    goes_on(1, "default");
}

/// Without a copy in fp32 it is the weights that are updated: whole, and a share of them.
#[test]
fn training_goes_on_from_weights_without_a_master_copy() {
    for (zero, words) in [(0, "no-master"), (1, "bf16-moments"), (3, "bf16-moments+no-master")] {
        goes_on(zero, words);
    }
}

/// Three steps of two replicas have the losses that the CPU's kernels have.
fn goes_on(zero: u32, words: &str) {
    if !cuda_emulator::is_here() {
        return;
    }
    let plan = plan(Parallelism { dp: 2, zero, options: words.parse().unwrap(), ..none() }, 1);
    let losses: Vec<f64> = steps(&plan, &[0], 3, 1).iter().map(|run| run.loss).collect();
    let mut want = vec![];
    let job = Job { source: &Source::seeded(7), steps: 3, keep_last: false, watch: None };
    train(&plan, &options(&plan, &[0]), &job, &mut |_, run| {
        want.push(run.loss);
        Ok(())
    })
    .unwrap();
    for (got, want) in losses.iter().zip(&want) {
        assert!((got - want).abs() < 0.005 * want, "{losses:?} are not {want:?}");
    }
    // Another order of what streams leave open brings the same bits.
    let again: Vec<f64> = steps(&plan, &[0], 3, 2).iter().map(|run| run.loss).collect();
    assert_eq!(again, losses);
}

/// Losses of steps on a double of a GPU, or on threads, from a checkpoint and to one.
fn losses(plan: &Plan, on_gpu: bool, steps: u64, load: Option<&Path>, save: Option<(&Path, u64)>) -> Vec<f64> {
    let mut losses = vec![];
    let mut each = |_, run: Run| {
        losses.push(run.loss);
        Ok(())
    };
    from_to((7, steps), load, save, |job| match on_gpu {
        true => train_on(&mut Double::new(1, 8 << 30, 1), plan, &options(plan, &[0]), job, &mut each),
        false => train(plan, &options(plan, &[0]), job, &mut each),
    });
    losses
}

/// What ranks on GPUs save they go on from to the bit; threads do, and other layouts; and what those save has every bit that it had.
#[test]
fn checkpoints_go_from_gpus_to_gpus_and_threads() {
    if !cuda_emulator::is_here() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let sharded = plan(Parallelism { dp: 2, zero: 3, ..none() }, 1);
    let tensor = plan(Parallelism { tp: 2, ..none() }, 2);
    let at = |name: &str| dir.path().join(name);
    let whole = losses(&sharded, true, 4, None, Some((&at("gpu"), 2)));
    assert_eq!(losses(&sharded, true, 2, Some(&at("gpu")), None), whole[2..]);
    let saved = states(&at("gpu"));
    assert!(saved.values().all(|bytes| bytes.iter().any(|b| *b != 0)), "two steps move every state");
    for (i, (plan, on_gpu)) in [(&sharded, false), (&tensor, true), (&tensor, false)].into_iter().enumerate() {
        let to = at(&format!("{i}"));
        let found = losses(plan, on_gpu, 2, Some(&at("gpu")), Some((&to, 2)));
        assert!(states(&to) == saved, "{i}");
        for (loss, want) in found.iter().zip(&whole[2..]) {
            assert!((loss - want).abs() < 0.005 * want, "{i}: {found:?} are not {:?}", &whole[2..]);
        }
    }
    // From threads to a GPU.
    losses(&tensor, false, 2, None, Some((&at("threads"), 2)));
    losses(&sharded, true, 1, Some(&at("threads")), Some((&at("back"), 2)));
    assert!(states(&at("back")) == states(&at("threads")));
}

/// One rank of four, by itself: the same kernels, and nothing of the others.
#[test]
fn one_rank_of_many_runs_alone() {
    if !cuda_emulator::is_here() {
        return;
    }
    for par in [Parallelism { ring: 4, ..none() }, Parallelism { tp: 2, dp: 2, ..none() }] {
        let plan = plan(par, 1);
        let mut double = Double::new(1, 8 << 30, 1);
        let mut runs = vec![];
        let ops = plan.ops().count();
        let waits = vec![1e-6; 4 * ops];
        for waits in [None, Some(&waits[..])] {
            runs.clear();
            let timing = Timing { steps: 2, solo: Some(2), waits, graphs: 2, ..Timing::default() };
            let graphs = time_steps(&mut double, &plan, &[0; 4], timing, &mut |run, _| {
                runs.push(run);
                Ok(())
            });
            assert!(graphs.unwrap().into_iter().all(|seconds| seconds > 0.0));
            if waits.is_none() {
                foretrain::exec::cuda::device::Device::clear(&mut double).unwrap();
            }
        }
        assert_eq!(runs.len(), 2);
        let spans: Vec<usize> = runs[1].timeline.classes.iter().map(|c| c.spans.len()).collect();
        let atoms = AtomTable::new(&plan).unwrap();
        let line = Line::program(&plan, &atoms, plan.program_of(2)).unwrap();
        assert_eq!(spans, [0, 0, line.nodes.len(), 0]);
        // Each of its ops that communicate was waited for, in both steps, and nothing else.
        let talks = line.nodes.iter().filter(|node| !matches!(node.op.kind, OpKind::Compute { .. })).count();
        assert!(talks > 3 && double.rests == vec![1e-6; 2 * talks], "{talks}: {:?}", double.rests);
        let layout = Layout::new(&plan, &atoms, plan.program_of(2)).unwrap().bytes;
        let taken = (8 << 30) - double.free(0);
        assert!(taken >= layout && taken < 2 * layout, "{taken} for one rank of {layout}");
    }
}

/// A GPU's power, and so its clocks, depends on what is multiplied: nobody looks at what a timed step computes, but numbers it
/// must be, with weights of either sign, and no zeros. What others would have sent a rank that is alone is among them.
#[test]
fn timed_steps_multiply_numbers() {
    if !cuda_emulator::is_here() {
        return;
    }
    let ways = [
        none(),
        Parallelism { ring: 4, recompute: Recompute::Full, ..none() },
        Parallelism { ulysses: 2, dp: 2, zero: 1, ..none() },
        Parallelism { tp: 2, dp: 2, zero: 3, ..none() },
        Parallelism { dp: 2, pp: 2, ..none() },
    ];
    let mut plans: Vec<Plan> = ways.map(|par| plan(par, u64::from(par.pp))).into();
    plans.push(experts("default", 2));
    for plan in plans {
        let waits = vec![1e-6; 4 * plan.ops().count()];
        let alone = Timing { solo: Some(plan.ranks() - 1), waits: Some(&waits), ..Timing::default() };
        for timing in [alone, Timing::default()] {
            let mut double = Double::new(1, 8 << 30, 1);
            let timing = Timing { steps: 3, ..timing };
            time_steps(&mut double, &plan, &vec![0; plan.ranks() as usize], timing, &mut |_, _| Ok(())).unwrap();
            let [all, without, empty] = double.products;
            let what = (&plan.about.strategy, plan.about.par.zero, timing.solo);
            assert!(all > 10 && without == 0, "{what:?}: {without} of {all} products are not of numbers");
            assert!(empty == 0, "{what:?}: {empty} of {all} products are of zeros");
        }
    }
}

/// Behind so much work a GPU rests for as long within each step, too, but in the first, which says how long ops take.
#[test]
fn long_steps_have_rests_within_them() {
    if !cuda_emulator::is_here() {
        return;
    }
    let plan = plan(Parallelism { tp: 2, ..none() }, 1);
    let mut double = Double::new(1, 8 << 30, 1);
    let mut work = vec![];
    let mut with = |double: &mut Double, steps, rest| {
        let timing = Timing { steps, in_line: true, rest, graphs: 1, ..Timing::default() };
        time_steps(double, &plan, &[0; 2], timing, &mut |run, _| {
            let spans = run.timeline.classes.iter().flat_map(|class| &class.spans);
            work.push(spans.map(|span| span.duration().value()).collect::<Vec<_>>());
            Ok(())
        })
        .unwrap();
        foretrain::exec::cuda::device::Device::clear(double).unwrap();
    };
    with(&mut double, 2, Rest::BetweenSteps);
    assert!(double.rests.is_empty());
    let most = 20e-6;
    with(&mut double, 3, Rest::Within(most));
    let (first, longest) = (&work[2][..], work[2].iter().copied().fold(0.0, f64::max));
    // As many in the second step as in the third, none in the first and in the graph.
    let [second, third] = [0, 1].map(|i| double.rests.chunks(double.rests.len() / 2).nth(i).unwrap());
    assert!(second.len() > 4 && second == third, "{:?}", double.rests);
    // Before the step for the host's sake, then for what was done.
    let within = &second[1..];
    assert!(second[0] > 1e-3 && within.iter().all(|rest| *rest <= most.max(longest)), "{second:?}");
    let [all, rested] = [first, within].map(|of| of.iter().sum::<f64>());
    assert!(rested < all && rested + most.max(longest) > all, "{rested} of {all}");
}

#[test]
fn a_calibration_is_a_profile_and_goes_on_where_it_stopped() {
    if !cuda_emulator::is_here() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let rows = dir.path().join("rows.jsonl");
    let job = gpu::Job {
        effort: Effort::TINY,
        command: "a test".into(),
        arch: "sm_90a".into(),
        rows: rows.clone(),
        attention: Attention::Best,
        plans: vec![],
    };
    let measure = |seed| gpu::measure(&mut Double::new(1, 8 << 30, seed), &job, &|_, _| {}).unwrap();
    let profile = measure(1);
    for name in ["matmul_nt/bf16", "attention/bf16", "attention_bwd/bf16", "norm/bf16", "adam/bf16"] {
        assert!(profile.kernels.contains_key(name), "{name} is not among {:?}", profile.kernels.keys());
    }
    let gpu = profile.gpu.as_ref().unwrap();
    assert!(profile.threads.is_none() && gpu.launch_s > 0.0 && gpu.host_launch_s > 0.0);
    // The double takes as long for the same, with rests or without.
    assert!((gpu.sustained.unwrap() - 1.0).abs() < 0.2, "{:?}", gpu.sustained);
    assert!(gpu.conditions.iter().all(|one| !one.when.contains("left out")), "{:?}", gpu.conditions);
    // It draws a hundred watts whatever it does, by a clock that others share.
    let power = gpu.power.as_ref().unwrap();
    assert!(power.limit_w == Some(700.0) && power.pressed.len() == 1, "{power:?}");
    for watts in [power.idle_w, power.pressed[0].watts] {
        assert!((50.0..200.0).contains(&watts), "{power:?}");
    }
    assert_eq!(power.pressed[0].says.as_deref(), Some("busy"));
    assert!(power.pressed[0].rate.is_some_and(|rate| rate > 0.0) && !power.pressed[0].ramp.is_empty(), "{power:?}");
    let path = dir.path().join("profile.json");
    std::fs::write(&path, serde_json::to_string(&profile).unwrap()).unwrap();
    assert!(same(&Profile::load(&path).unwrap(), &profile));
    // What is in the file is not measured again, and a torn line is left out.
    let text = std::fs::read_to_string(&rows).unwrap();
    std::fs::write(&rows, format!("{text}{{\"plan\": \"x")).unwrap();
    assert!(same(&measure(2), &profile));
    // Nor does anything of another's attention, or of another GPU, go among it.
    for (field, was, is) in [("attention", "own kernels", "cuDNN 9.19"), ("gpu", "\"gpu\":\"", "\"gpu\":\"not ")] {
        std::fs::write(&rows, text.replace(was, is)).unwrap();
        let said = gpu::measure(&mut Double::new(1, 8 << 30, 3), &job, &|_, _| {}).unwrap_err().to_string();
        assert!(said.contains("rows.jsonl") && said.contains(field) && said.contains("remove the file"), "{said}");
    }
}

/// Of plans that are asked for the kernels of the first and the last stage are timed at their own shapes: nothing of them is
/// interpolated.
#[test]
fn plans_that_are_asked_for_are_timed_at_their_shapes() {
    if !cuda_emulator::is_here() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let plans = vec![
        plan(Parallelism { pp: 2, ring: 2, ..none() }, 2),
        plan(Parallelism { tp: 2, dp: 2, zero: 3, ..none() }, 1),
    ];
    let job = gpu::Job {
        effort: Effort::TINY,
        command: "a test".into(),
        arch: "sm_90a".into(),
        rows: dir.path().join("rows.jsonl"),
        attention: Attention::Own,
        plans: plans.clone(),
    };
    let profile = gpu::measure(&mut Double::new(1, 8 << 30, 1), &job, &|_, _| {}).unwrap();
    let mut stages = 0;
    for plan in &plans {
        let atoms = AtomTable::new(plan).unwrap();
        let last = plan.programs.len() as u32 - 1;
        for program in std::collections::BTreeSet::from([0, last]) {
            let rank = (0..plan.ranks()).find(|rank| plan.program_of(*rank) == program).unwrap();
            let line = Line::program(plan, &atoms, program).unwrap();
            let mut kernels = 0;
            for (node, one) in line.nodes.iter().enumerate() {
                let OpKind::Compute { kernel, .. } = &one.op.kind else { continue };
                let Some((work, dtype)) = work_of(plan, &line, node, rank) else { continue };
                let found = profile.time_as(kernel.curve(), &work, dtype).provenance;
                assert_eq!(found, Provenance::Measured, "rank {rank}, {}", line.path(node));
                kernels += 1;
            }
            assert!(kernels > 10);
            stages += 1;
        }
    }
    assert_eq!(stages, 3);
    let conditions = &profile.gpu.as_ref().unwrap().conditions;
    assert!(conditions.iter().all(|one| !one.when.ends_with(gpu::LEFT_OUT)), "{conditions:?}");
}

/// Kernels and sizes, and their times but for the last place of what has been through a file.
fn same(a: &Profile, b: &Profile) -> bool {
    let points = |p: &Profile| -> Vec<(String, Vec<f64>, f64)> {
        let of = |(name, curve): (&String, &Curve)| {
            curve.points.iter().map(|p| (name.clone(), p.size.clone(), p.seconds)).collect::<Vec<_>>()
        };
        p.kernels.iter().flat_map(of).collect()
    };
    let (a, b) = (points(a), points(b));
    a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| (&a.0, &a.1) == (&b.0, &b.1) && (a.2 / b.2 - 1.0).abs() < 1e-9)
}

fn error_of(plan: &Plan, double: &mut Double) -> String {
    let job = Job { source: &Source::seeded(7), steps: 1, keep_last: false, watch: None };
    train_on(double, plan, &options(plan, &[0]), &job, &mut |_, _| Ok(())).unwrap_err().to_string()
}

#[test]
fn what_fails_is_named() {
    if !cuda_emulator::is_here() {
        return;
    }
    let plan = plan(Parallelism { ring: 2, ..none() }, 1);
    let mut double = Double::new(1, 8 << 30, 1);
    double.broken = Some("row_norm");
    let error = error_of(&plan, &mut double);
    for part in ["rank ", "norm", "stream", "bf16", "illegal memory access", "[64, 64]"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[test]
fn too_little_memory_is_refused_before_any_is_asked_for() {
    let plan = plan(Parallelism { ring: 2, ..none() }, 1);
    let mut double = Double::new(1, 100 << 20, 1);
    let error = error_of(&plan, &mut double);
    assert!(error.contains("memory: 2 ranks need") && error.contains("use more GPUs"), "{error}");
    assert_eq!(double.free(0), 100 << 20);
}

#[test]
fn what_no_kernel_takes_is_refused_with_the_remedy() {
    let work =
        Workload { seq_len: 64, global_batch: 1, micro_batch: 1, dtype: Dtype::F32, documents: Default::default() };
    let f32 = build(&model(1, 4), &work, &none(), ENGINES).unwrap();
    let error = error_of(&f32, &mut Double::new(1, 1 << 30, 1));
    assert!(error.contains("f32") && error.contains("--dtype bf16"), "{error}");
    let work = Workload { dtype: Dtype::Bf16, ..work };
    let narrow = build(&LlmSpec::find("tiny").unwrap(), &work, &none(), ENGINES).unwrap();
    let error = error_of(&narrow, &mut Double::new(1, 8 << 30, 1));
    assert!(error.contains("head_dim 8") && error.contains("multiple of 32"), "{error}");
}

#[test]
fn one_rank() {
    hold(&plan(none(), 2), &[0]);
}

#[test]
fn a_ring_on_one_gpu_and_on_two() {
    for devices in [&[0][..], &[0, 1]] {
        hold(&plan(Parallelism { ring: 4, ..none() }, 1), devices);
    }
}

#[test]
fn usp_with_replicas() {
    hold(&plan(Parallelism { ulysses: 2, ring: 2, dp: 2, zero: 1, ..none() }, 1), &[0]);
}

#[test]
fn tensor_parallel_with_recomputation() {
    hold(&plan(Parallelism { tp: 2, dp: 2, recompute: Recompute::Full, ..none() }, 1), &[0]);
}

#[test]
fn a_pipeline() {
    hold(&plan(Parallelism { pp: 2, dp: 2, ..none() }, 2), &[0]);
    let options = "zb-h1".parse().unwrap();
    hold(&plan(Parallelism { pp: 2, dp: 2, options, ..none() }, 2), &[0]);
    for (words, recompute) in [("dualpipe-v", Recompute::None), ("v-min", Recompute::Full)] {
        let par = Parallelism { pp: 2, vp: 2, recompute, options: words.parse().unwrap(), ..none() };
        let documents = Default::default();
        let work = Workload { seq_len: 128, global_batch: 4, micro_batch: 1, dtype: Dtype::Bf16, documents };
        hold(&build(&model(4, 4), &work, &par, ENGINES).unwrap(), &[0]);
    }
}

/// Norms of heads (Qwen3), and latent attention (DeepSeek-V2) with queries compressed and not, heads 32 + 32 wide.
#[test]
fn heads_of_other_models() {
    let documents = Documents::default();
    let work = Workload { seq_len: 64, global_batch: 2, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let mla = |q_lora| MlaSpec { q_lora, kv_lora: 24, rope_dim: 32, nope_dim: 32, v_dim: 32 };
    let latent = |q_lora| LlmSpec { mla: Some(mla(q_lora)), head_dim: 64, ..model(1, 4) };
    let plan = |model: &LlmSpec, par| build(model, &work, &par, ENGINES).unwrap();
    hold(&plan(&LlmSpec { qk_norm: true, ..model(1, 2) }, Parallelism { ring: 2, ..none() }), &[0]);
    hold(&plan(&latent(Some(40)), Parallelism { ring: 2, ..none() }), &[0]);
    hold(&plan(&latent(None), Parallelism { tp: 2, ..none() }), &[0, 1]);
}

/// Frequencies scaled as YaRN does it, with a factor of turned queries and keys and, of latent attention, one of all scores.
#[test]
fn heads_that_turn_by_scaled_frequencies() {
    let documents = Documents::default();
    let work = Workload { seq_len: 64, global_batch: 2, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let rope_scaling = Some(RopeScaling::Yarn {
        factor: 8.0,
        beta_fast: 2.0,
        beta_slow: 0.25,
        original: 16,
        truncate: true,
        attention_factor: 1.2,
        mscale_all_dim: 1.0,
    });
    let model = LlmSpec { rope_scaling, ..model(1, 4) };
    let mla = MlaSpec { q_lora: Some(40), kv_lora: 24, rope_dim: 32, nope_dim: 32, v_dim: 32 };
    let latent = LlmSpec { mla: Some(mla), head_dim: 64, ..model.clone() };
    hold(&build(&model, &work, &Parallelism { ring: 2, ..none() }, ENGINES).unwrap(), &[0]);
    hold(&build(&latent, &work, &Parallelism { ring: 2, ..none() }, ENGINES).unwrap(), &[0]);
}

/// Scores that lean on distance (ALiBi), by heads that are cut over ranks too.
#[test]
fn scores_that_lean_on_distance() {
    let model = LlmSpec { positions: Positions::Alibi, ..model(1, 4) };
    let work =
        Workload { seq_len: 128, global_batch: 1, micro_batch: 1, dtype: Dtype::Bf16, documents: Default::default() };
    for par in [Parallelism { ring: 2, ulysses: 2, ..none() }, Parallelism { tp: 2, ..none() }] {
        hold(&build(&model, &work, &par, ENGINES).unwrap(), &[0]);
    }
}

/// Few layers, each of one kind behind a norm (Nemotron-H): gradients of more of them are far off in bf16 on CPUs too.
fn layers(pattern: &str) -> LlmSpec {
    let json = serde_json::json!({
        "model_type": "nemotron_h", "hidden_size": 64, "hybrid_override_pattern": pattern,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
        "chunk_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32, "vocab_size": 64,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": false,
    });
    LlmSpec::parse("test", pattern, &json.to_string()).unwrap()
}

/// State spaces, and networks and experts with squared ReLUs.
#[test]
fn layers_of_several_kinds() {
    let documents = Documents::default();
    let work = Workload { seq_len: 128, global_batch: 2, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let tp = Parallelism { tp: 2, ..none() };
    let ep = Parallelism { dp: 2, ep: 2, zero: 0, ..none() };
    // Two ranks to a group, in the order of a zigzag ring.
    let spread = Parallelism { ring: 2, ulysses: 2, ..none() };
    for (pattern, par) in [("M", &tp), ("-", &tp), ("ME", &ep), ("M", &spread)] {
        let route = Routing::Uniform { seed: 5 }.route(&layers(pattern), &work, par, 2).unwrap();
        hold(&build_routed(&layers(pattern), &work, par, ENGINES, route).unwrap(), &[0]);
    }
}

#[test]
fn nobody_has_the_weights_whole() {
    hold(&plan(Parallelism { dp: 4, zero: 3, ..none() }, 1), &[0, 0, 1, 1]);
}

/// Shares of the sums are taken where each rank stands among those with the same weights.
#[test]
fn everyone_has_the_sums_whole() {
    let options = "all-reduce-grads".parse().unwrap();
    hold(&plan(Parallelism { dp: 2, ring: 2, zero: 1, options, ..none() }, 2), &[0, 0, 0, 0]);
}

/// Rows of networks and logits in pieces, where they are not all of a buffer.
#[test]
fn networks_and_logits_in_pieces() {
    let options = "mlp-chunks-3+loss-chunks-3".parse().unwrap();
    let par = Parallelism { tp: 2, recompute: Recompute::Full, options, ..none() };
    hold(&plan(par, 2), &[0, 0]);
}

#[test]
fn nobody_of_a_group_has_the_weights_whole() {
    let options = "shard-2".parse().unwrap();
    hold(&plan(Parallelism { dp: 4, zero: 3, options, ..none() }, 1), &[0, 0, 1, 1]);
    hold(&plan(Parallelism { pp: 2, dp: 2, zero: 3, ..none() }, 2), &[0, 1]);
}

#[test]
fn two_ranks_have_the_same_kv_head() {
    let work =
        Workload { seq_len: 128, global_batch: 1, micro_batch: 1, dtype: Dtype::Bf16, documents: Default::default() };
    hold(&build(&model(1, 1), &work, &Parallelism { tp: 2, ..none() }, ENGINES).unwrap(), &[0, 1]);
}

/// A plan that cannot be run is left out of a profile, by name, and all of them are an error that says why.
#[test]
fn a_plan_that_is_too_large_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let job = gpu::Job {
        effort: Effort::TINY,
        command: "a test".into(),
        arch: "sm_90a".into(),
        rows: dir.path().join("rows.jsonl"),
        attention: Attention::Own,
        plans: vec![],
    };
    // Less than what stays free for the libraries.
    let said = gpu::measure(&mut Double::new(1, 500 << 20, 1), &job, &|_, _| {}).unwrap_err().to_string();
    assert!(said.contains("was left out") && said.contains("memory"), "{said}");
}

/// The product that keeps a GPU busy can be handed over again while nothing is made anew.
#[test]
fn a_product_is_done_again_and_again() {
    let mut double = Double::new(1, 8 << 30, 1);
    let mut square = Square::new(&mut double, 64, 3).unwrap();
    for _ in 0..3 {
        square.hand_over(&mut double).unwrap();
        assert!(square.seconds(&mut double, 1).unwrap() > 0.0);
    }
}
