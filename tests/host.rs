//! What is kept in the host's memory: the numbers of the dense reference, bytes and peaks of both memories as planned,
//! costed and simulated alike, and plans changed for the worse.

mod dense;
mod plans;

use dense::{config, error, reference, run};
use foretrain::cost::{Effort, cost};
use foretrain::exec::source::Source;
use foretrain::exec::{Options, Run};
use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::memory::Layout;
use foretrain::plan::*;
use foretrain::report::{Place, Row};
use foretrain::sim;
use foretrain::spec::{LlmSpec, Parallelism, Recompute, Workload};
use foretrain::strategy::build;
use plans::{COPY, FLAT, Host, SM, close, same};

fn options(words: &str) -> foretrain::spec::Options {
    words.parse().unwrap()
}

fn way(words: &str) -> Parallelism {
    Parallelism { recompute: Recompute::Full, options: options(words), ..Parallelism::default() }
}

/// A model of `layers` with grouped queries, small enough to run.
fn small(layers: u64, heads: u64, kv_heads: u64) -> LlmSpec {
    let json = serde_json::json!({
        "model_type": "llama", "hidden_size": 12, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 4, "intermediate_size": 10, "vocab_size": 29,
        "rms_norm_eps": 1e-5, "rope_theta": 100.0, "tie_word_embeddings": false, "torch_dtype": "float32",
        "hidden_act": "silu",
    });
    LlmSpec::parse("test", "small", &json.to_string()).expect("a sound model")
}

fn work(par: &Parallelism, seq_len: u64, batches: u64, dtype: Dtype) -> Workload {
    let global_batch = u64::from(par.dp) * batches;
    Workload { seq_len, global_batch, micro_batch: 1, dtype, documents: Default::default() }
}

fn layouts(plan: &Plan) -> Vec<Layout> {
    let atoms = AtomTable::new(plan).unwrap();
    (0..plan.programs.len() as u32).map(|p| Layout::new(plan, &atoms, p).unwrap()).collect()
}

/// In f64 the plan's numbers are the reference's but for the order of sums, and both memories peak as planned.
fn holds(model: &LlmSpec, par: &Parallelism, seq_len: u64, batches: u64) -> Plan {
    let plan = build(model, &work(par, seq_len, batches, Dtype::F64), par, SM).unwrap();
    let (got, want) = (run(&plan), reference(&plan, &config(&plan)));
    assert!(error(&[got.loss], &[want.loss]) < 1e-10, "{par:?}: loss {} is not {}", got.loss, want.loss);
    assert_eq!(got.hidden.len(), want.hidden.len());
    for (got, want) in got.hidden.iter().zip(&want.hidden) {
        assert!(error(got, want) < 1e-10, "{par:?}: hidden states");
    }
    assert_eq!(got.grads.keys().collect::<Vec<_>>(), want.grads.keys().collect::<Vec<_>>());
    for (name, want) in &want.grads {
        let error = error(&got.grads[name], want);
        assert!(error < 1e-9, "{par:?}: gradient of {name} is off by {error:e}");
    }
    for (name, want) in &want.new_params {
        assert!(error(&got.weights[name], want) < 1e-7, "{par:?}: new {name}");
    }
    let layouts = layouts(&plan);
    let planned = |of: &dyn Fn(&Layout) -> u64| -> Vec<u64> {
        (0..plan.ranks()).map(|rank| of(&layouts[plan.program_of(rank) as usize])).collect()
    };
    assert_eq!(got.peak_bytes, planned(&|layout| layout.bytes), "{par:?}: the device's memory");
    assert_eq!(got.host_peak_bytes, planned(&|layout| layout.host_bytes), "{par:?}: the host's memory");
    assert!(got.host_peak_bytes.iter().all(|&bytes| bytes > 0), "{par:?}: nothing is in the host's memory");
    plan
}

/// Strides and folding change nothing, and the simulator agrees to the picosecond where nothing is shared.
fn agrees(plan: &Plan) {
    let host = Host::of(plan, 1.0);
    let all = cost(plan, host.machine(), FLAT).unwrap();
    same(&cost(plan, host.machine(), Effort::SUMS).unwrap(), &all);
    let alone = sim::Effort { shared: false, ..sim::Effort::SUMS };
    let played = sim::simulate(plan, host.machine(), &[], alone).unwrap().timeline;
    assert_eq!(played.step, all.step);
    for class in &played.classes {
        plans::same_usage(&class.usage, &all.classes[class.rank as usize].usage);
    }
    for class in &all.classes {
        let u = &class.usage;
        let parts = u.compute + u.exposed_total() + u.offload + u.bubble + u.host;
        assert!(close(parts, all.step.value()), "{parts} are not the step, {}", all.step);
        assert!(u.aside > 0.0);
    }
}

/// Bytes that a rank copies each way in a step, op by op.
fn copied(plan: &Plan) -> [u64; 2] {
    let atoms = AtomTable::new(plan).unwrap();
    let line = Line::program(plan, &atoms, 0).unwrap();
    let mut bytes = [0; 2];
    for node in 0..line.nodes.len() {
        if let Lane::Copy(toward) = plan.lanes[line.nodes[node].lane as usize] {
            let place = &line.reads(node)[0];
            let tensor = &plan.tensors[place.tensor as usize];
            let moved = (place.rows[1] - place.rows[0]) * tensor.row_len() * tensor.dtype.size();
            bytes[usize::from(toward == Toward::Device)] += moved;
        }
    }
    bytes
}

fn ways(words: &str) -> Vec<Parallelism> {
    let one = way(words);
    vec![
        one,
        Parallelism { dp: 2, zero: 1, ..one },
        Parallelism { ring: 2, dp: 2, zero: 2, ..one },
        Parallelism { ulysses: 2, dp: 2, zero: 3, ..one },
        Parallelism { tp: 2, ..one },
    ]
}

#[test]
fn inputs_of_layers_come_back_from_the_host() {
    for (layers, batches) in [(2, 1), (5, 2)] {
        let copied = ways("offload-activations+copy-shards").into_iter().filter(|par| par.zero > 1);
        for par in ways("offload-activations").into_iter().chain(copied) {
            holds(&small(layers, 4, 2), &par, 8 * u64::from(par.ring * par.ulysses * par.tp), batches);
        }
    }
}

#[test]
fn inputs_of_layers_in_the_host_are_costed_and_simulated_alike() {
    let copied = ways("offload-activations+copy-shards").into_iter().filter(|par| par.zero > 1);
    for par in ways("offload-activations").into_iter().chain(copied) {
        let model = plans::model(6, 4, false);
        for engines in [SM, COPY] {
            let plan = build(&model, &work(&par, 512, 3, Dtype::Bf16), &par, engines).unwrap();
            check::check(&plan).unwrap();
            agrees(&plan);
        }
    }
}

/// Stages whose optimizer waits for its gradients are walked one rank of each kind, not rank by rank.
#[test]
fn pipelines_with_the_optimizer_in_the_host_are_folded() {
    for (pp, vp) in [(2, 1), (4, 1), (2, 2)] {
        let par = Parallelism { pp, vp, dp: 4, zero: 1, ..way("offload-optimizer") };
        let plan = build(&plans::model(8, 4, false), &work(&par, 512, 4, Dtype::Bf16), &par, SM).unwrap();
        agrees(&plan);
        let found = cost(&plan, Host::of(&plan, 1.0).machine(), Effort::SUMS).unwrap();
        assert!(found.classes.len() < plan.ranks() as usize, "{} of {} ranks", found.classes.len(), plan.ranks());
    }
}

/// The device keeps two inputs and the last output where it had an input for every layer and that output.
#[test]
fn the_device_has_three_slots_of_the_stream_and_the_host_the_rest() {
    for layers in [2u64, 7, 32] {
        let model = plans::model(layers, 4, false);
        let of = |words: &str| {
            let par = way(words);
            let plan = build(&model, &work(&par, 4096, 1, Dtype::Bf16), &par, SM).unwrap();
            (layouts(&plan).remove(0), copied(&plan))
        };
        let ((kept, none), (away, both)) = (of(""), of("offload-activations"));
        let slot = 4096 * model.hidden * 2;
        let activations =
            |layout: &Layout| layout.live_by_kind.iter().find(|(kind, _)| *kind == TensorKind::Activation).unwrap().1;
        assert_eq!(activations(&kept) - activations(&away), (layers + 1 - 3) * slot);
        assert_eq!(kept.bytes - away.bytes, (layers + 1 - 3) * slot);
        assert_eq!((kept.host_bytes, away.host_bytes), (0, (layers - 1) * slot));
        assert_eq!((none, both), ([0; 2], [(layers - 1) * slot; 2]));
    }
}

/// A slow way to the host is waited for, a fast one is not.
#[test]
fn what_copies_take_longer_than_layers_is_exposed() {
    let (par, model) = (way("offload-activations"), plans::model(12, 4, false));
    let plan = build(&model, &work(&par, 16384, 1, Dtype::Bf16), &par, SM).unwrap();
    let step = |gb_per_s: f64| {
        let mut host = Host::of(&plan, 1.0);
        host.cluster.spec.host.as_mut().unwrap().copy.value = foretrain::units::BytesPerSec::new(gb_per_s * 1e9);
        let timeline = cost(&plan, host.machine(), Effort::SUMS).unwrap();
        (timeline.step.value(), timeline.mean().offload)
    };
    let ((slow, waits), (fast, hardly)) = (step(0.5), step(400.0));
    // Twelve layers' inputs there and back, but for the top one's, and nothing beside that takes so long.
    let bytes = 11.0 * 16384.0 * model.hidden as f64 * 2.0;
    assert!(slow > 2.0 * bytes / 0.5e9 && waits > 0.5 * slow, "{slow} s, {waits} s of it waiting");
    assert!(fast < 0.5 * slow && hardly < 0.05 * fast, "{fast} s, {hardly} s of it waiting");
}

fn refusal(model: &LlmSpec, par: &Parallelism, work: &Workload) -> String {
    build(model, work, par, SM).unwrap_err().to_string()
}

#[test]
fn what_does_not_go_together_is_refused() {
    let model = small(2, 4, 2);
    let asked = |par: Parallelism| refusal(&model, &par, &work(&par, 16, 2, Dtype::Bf16));
    let none = Parallelism { recompute: Recompute::None, ..way("offload-activations") };
    assert!(asked(none).contains("offload-activations needs recompute full"));
    assert!(asked(Parallelism { pp: 2, ..way("offload-activations") }).contains("needs pp 1"));
    let one = refusal(&small(1, 4, 2), &way("offload-activations"), &work(&way(""), 16, 1, Dtype::Bf16));
    assert!(one.contains("there is one layer; leave it out"), "{one}");
    // A cluster of which nothing is known says so.
    let plan = build(&model, &work(&way(""), 16, 1, Dtype::Bf16), &way("offload-activations"), SM).unwrap();
    let mut host = Host::of(&plan, 1.0);
    host.cluster.spec.host = None;
    let why = cost(&plan, host.machine(), Effort::SUMS).unwrap_err().to_string();
    assert!(why.contains("host: missing") && why.contains("leave out the options"), "{why}");
}

/// The first op of a plan that `is`.
fn first(plan: &mut Plan, is: impl Fn(&Op) -> bool) -> &mut Op {
    let blocks = plan.blocks.iter_mut().map(|b| &mut b.ops);
    blocks.chain(plan.programs.iter_mut().map(|p| &mut p.ops)).flatten().find(|op| is(op)).expect("there is one")
}

fn is_copy(op: &Op) -> bool {
    matches!(op.kind, OpKind::Copy { .. })
}

#[test]
fn plans_that_mix_up_the_memories_are_refused() {
    let par = way("offload-activations");
    let plan = build(&small(3, 4, 2), &work(&par, 16, 1, Dtype::F64), &par, SM).unwrap();
    check::check(&plan).unwrap();
    let broken = |change: &dyn Fn(&mut Plan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        check::check(&plan).unwrap_err().to_string()
    };
    let lane = |plan: &Plan, of: Lane| plan.lanes.iter().position(|lane| *lane == of).unwrap() as u16;
    let turned = broken(&|plan| {
        let back = lane(plan, Lane::Copy(Toward::Device));
        first(plan, |op| op.label == "x_to_host").lane = Some(back);
    });
    assert!(turned.contains("x_to_host") && turned.contains("the host's memory"), "{turned}");
    let on_device = broken(&|plan| plan.tensors.iter_mut().filter(|t| t.host).for_each(|t| t.host = false));
    assert!(on_device.contains("memory"), "{on_device}");
    let computes = broken(&|plan| first(plan, is_copy).lane = Some(0));
    assert!(computes.contains("does not fit the op"), "{computes}");
    let narrow = broken(&|plan| plan.tensors.iter_mut().filter(|t| t.host).for_each(|t| t.shape[0] /= 2));
    assert!(narrow.contains("copied to"), "{narrow}");
    let never = broken(&|plan| {
        let op = first(plan, |op| op.label == "x_to_host");
        let OpKind::Copy { src, .. } = op.kind else { panic!("a copy") };
        *op = Op {
            lane: Some(0),
            kind: OpKind::Compute {
                kernel: Kernel::Wait { reads: vec![16 * 12], writes: vec![], stream: false },
                reads: vec![src],
                writes: vec![],
            },
            ..op.clone()
        };
    });
    assert!(never.contains("before anything wrote it"), "{never}");
}

#[test]
fn a_copy_of_another_layer_is_found_out_by_the_numbers() {
    let par = way("offload-activations");
    let mut plan = build(&small(4, 4, 2), &work(&par, 16, 1, Dtype::F64), &par, SM).unwrap();
    let want = reference(&plan, &config(&plan));
    // Layers find each other's inputs: the walk over the host's slots begins one too low, and wraps.
    let host = plan.tensors.iter().position(|t| t.name == "x_host").unwrap() as u32;
    let calls = plan.blocks.iter_mut().flat_map(|b| &mut b.ops).filter_map(|op| match &mut op.kind {
        OpKind::Call { args, .. } => Some(args),
        _ => None,
    });
    let walks = calls.flatten().filter(|arg| arg.of() == TensorRef::Tensor(host));
    let Some(Arg::Each { first, .. }) = walks.last() else { panic!("inputs come back in a walk") };
    *first -= 1;
    let got = run(&plan);
    assert!(error(&[got.loss], &[want.loss]) < 1e-10);
    assert!(want.grads.iter().any(|(name, want)| error(&got.grads[name], want) > 1e-3));
}

#[test]
fn chunks_of_the_sequence_give_the_reference() {
    for (chunks, ulysses, dp, zero) in
        [(2, 1, 1, 0), (4, 1, 2, 1), (2, 2, 1, 1), (4, 2, 2, 3), (8, 4, 1, 2), (16, 2, 1, 0)]
    {
        let par = Parallelism { ulysses, dp, zero, ..way(&format!("fpdt-{chunks}")) };
        // Two tokens of each chunk on every rank.
        let seq_len = 2 * chunks * u64::from(ulysses);
        // Four KV heads, two that four ranks need twice each, and one for all.
        for (heads, kv_heads) in [(4, 4), (4, 2), (8, 1)] {
            holds(&small(2, heads, kv_heads), &par, seq_len, 2);
        }
    }
}

#[test]
fn chunks_go_with_whatever_else_is_split_or_in_the_host() {
    let all = "fpdt-4+offload-activations";
    for par in [
        way(all),
        Parallelism { ulysses: 2, dp: 2, zero: 3, ..way(all) },
        Parallelism { ulysses: 2, zero: 2, ..way(all) },
    ] {
        holds(&small(3, 4, 2), &par, 16 * u64::from(par.ulysses), 2);
    }
    for words in ["fpdt-4+a2a-separate", "fpdt-4+replicate-after", "fpdt-2+pad-heads"] {
        let par = Parallelism { ulysses: if words.contains("pad") { 3 } else { 4 }, ..way(words) };
        holds(&small(2, 4, if words.contains("after") { 2 } else { 4 }), &par, 24 * 2, 1);
    }
}

/// Windows and documents leave whole pairs of chunks out, and parts of others; biases, tanh and dropout are chunk by chunk.
#[test]
fn chunks_of_masks_and_of_other_layers_give_the_reference() {
    let par = Parallelism { ulysses: 2, ..way("fpdt-4") };
    let mut windowed = small(2, 4, 2);
    windowed.window = Some(5);
    let far = holds(&windowed, &par, 32, 1);
    let fetches = |plan: &Plan| plan.ops().filter(|(_, op)| op.label.starts_with("kv_fetch")).count();
    let all = holds(&small(2, 4, 2), &par, 32, 1);
    // Each of four chunks of 8 sees the one before it: 3 pairs in place of 6, in both forward passes.
    assert_eq!((fetches(&all), fetches(&far)), (6 + 6 + 4, 3 + 3 + 4));

    let work = Workload { documents: vec![3, 10, 19].into(), ..work(&par, 32, 1, Dtype::F64) };
    let plan = build(&small(2, 4, 2), &work, &par, SM).unwrap();
    let (got, want) = (run(&plan), reference(&plan, &config(&plan)));
    for (name, want) in &want.grads {
        assert!(error(&got.grads[name], want) < 1e-9, "documents: gradient of {name}");
    }

    let mut gpt = small(2, 4, 4);
    (gpt.norm, gpt.mlp, gpt.bias, gpt.dropout) = (foretrain::spec::Norm::Layer, foretrain::spec::Mlp::Gelu, true, 0.2);
    gpt.positions = foretrain::spec::Positions::Learned { max: 64 };
    holds(&gpt, &par, 32, 2);
}

#[test]
fn chunks_are_costed_and_simulated_alike() {
    for (chunks, ulysses) in [(2, 1), (4, 2), (8, 4)] {
        for words in [format!("fpdt-{chunks}"), format!("fpdt-{chunks}+offload-activations")] {
            let par = Parallelism { ulysses, dp: 2, zero: 3, ..way(&words) };
            let plan = build(&plans::model(4, 4, false), &work(&par, 2048, 2, Dtype::Bf16), &par, SM).unwrap();
            check::check(&plan).unwrap();
            agrees(&plan);
        }
    }
}

/// Bytes over the bus, and in the host's memory, pair of chunks by pair.
#[test]
fn chunks_copy_and_keep_what_their_pairs_need() {
    let model = plans::model(3, 4, false);
    for (chunks, ulysses) in [(2u64, 1u64), (4, 2), (16, 4)] {
        let par = Parallelism { ulysses: ulysses as u32, ..way(&format!("fpdt-{chunks}")) };
        let seq_len = 4096;
        let plan = build(&model, &work(&par, seq_len, 1, Dtype::Bf16), &par, SM).unwrap();
        // Of one chunk, all its tokens, a rank's heads, in bf16.
        let q = seq_len / chunks * model.heads / ulysses * model.head_dim * 2;
        let kv = seq_len / chunks * (model.kv_heads / ulysses).max(1) * model.head_dim * 2 * 2;
        let (pairs, before) = (chunks * (chunks + 1) / 2, chunks * (chunks - 1) / 2);
        // KV of two forward passes, the last chunk's only of the second; q, do, and sums of dq in fp32.
        let there = (chunks - 1) * kv + chunks * (kv + q + q) + before * 2 * q;
        let back = 2 * before * kv + chunks * kv + pairs * (q + q) + before * 2 * q;
        assert_eq!(copied(&plan), [there * model.layers, back * model.layers], "{chunks} chunks");
        // Chunk 0's dq is whole at once. What is used up may make room for the first sums.
        let (host, all) = (layouts(&plan).remove(0).host_bytes, chunks * (kv + 2 * q) + (chunks - 1) * 2 * q);
        assert!(host <= all && host >= all - (kv + 2 * q), "{host} bytes in the host's memory, {all} by the formula");
    }
}

/// What is not as large as the whole sequence is as large as a chunk.
#[test]
fn the_device_keeps_the_stream_whole_and_a_chunk_of_the_rest() {
    let model = plans::model(3, 4, false);
    let bytes = |chunks: u64| {
        let par = Parallelism { ulysses: 2, ..way(&format!("fpdt-{chunks}")) };
        let plan = build(&model, &work(&par, 1 << 16, 1, Dtype::Bf16), &par, SM).unwrap();
        layouts(&plan).remove(0)
    };
    let (four, eight, sixteen) = (bytes(4), bytes(8), bytes(16));
    // Half as much in twice as many chunks, as far as the fullest moment is the same.
    let halves = (four.bytes - eight.bytes) as f64 / (eight.bytes - sixteen.bytes) as f64;
    assert!((halves - 2.0).abs() < 0.2, "{halves}");
    // What no chunk takes is the stream: the inputs of three layers, two gradients and that of the middle,
    // log-sum-exps and delta in fp32, two tokens a row, weights and the like.
    let whole = sixteen.bytes - (eight.bytes - sixteen.bytes);
    let (rows, fixed) = (1u64 << 15, sixteen.persisting());
    let stream = rows * model.hidden * 2 * (3 + 2 + 1) + 2 * (1 << 16) * model.heads / 2 * 4 + 2 * rows * 4;
    let off = (whole as f64 - (fixed + stream) as f64) / stream as f64;
    assert!(off.abs() < 0.1, "{whole} bytes whatever the chunks, {} by the formula", fixed + stream);
    let at_once = Parallelism { ulysses: 2, ..way("") };
    let plan = build(&model, &work(&at_once, 1 << 16, 1, Dtype::Bf16), &at_once, SM).unwrap();
    assert!(sixteen.bytes - fixed < (layouts(&plan).remove(0).bytes - fixed) / 2);
}

#[test]
fn chunks_that_cannot_be_are_refused() {
    let model = small(2, 4, 2);
    let asked = |par: Parallelism, seq_len| refusal(&model, &par, &work(&par, seq_len, 2, Dtype::Bf16));
    let all = [
        (Parallelism { recompute: Recompute::None, ..way("fpdt-4") }, "fpdt-4 needs recompute full"),
        (Parallelism { ring: 2, ..way("fpdt-4") }, "fpdt-4 needs ring 1"),
        (Parallelism { tp: 2, ..way("fpdt-4") }, "fpdt-4 needs tp 1"),
        (Parallelism { pp: 2, ..way("fpdt-4") }, "fpdt-4 needs pp 1"),
    ];
    for (par, why) in all {
        let said = asked(par, 32);
        assert!(said.contains(why), "{said}");
    }
    let par = Parallelism { ulysses: 2, ..way("fpdt-4") };
    assert!(asked(par, 20).contains("e.g. seq_len 24"), "{}", asked(par, 20));
    let two = Workload { micro_batch: 2, global_batch: 2, ..work(&par, 32, 2, Dtype::Bf16) };
    assert!(refusal(&model, &par, &two).contains("needs micro_batch 1"));
}

/// Every copy matters: where one brings another chunk than it should, a gradient shows it.
#[test]
fn a_chunk_in_the_wrong_place_is_found_out_by_the_numbers() {
    let par = Parallelism { ulysses: 2, ..way("fpdt-4") };
    let plan = build(&small(2, 4, 2), &work(&par, 16, 1, Dtype::F64), &par, SM).unwrap();
    let want = reference(&plan, &config(&plan));
    let mut mutants = 0;
    for block in 0..plan.blocks.len() {
        for at in 0..plan.blocks[block].ops.len() {
            let mut mutant = plan.clone();
            let op = &mut mutant.blocks[block].ops[at];
            let OpKind::Copy { src, dst } = &mut op.kind else { continue };
            // The host's side has four slots.
            let slot = if op.label.contains("fetch") { &mut src.slot } else { &mut dst.slot };
            *slot = (*slot + 1) % 4;
            let label = op.label.clone();
            mutants += 1;
            if check::check(&mutant).is_err() {
                continue;
            }
            let got = run(&mutant);
            let differs = |(name, want): (&String, &Vec<f64>)| {
                let error = error(&got.grads[name], want);
                error.is_nan() || error > 1e-6
            };
            assert!(want.grads.iter().any(differs), "{label}");
        }
    }
    assert!(mutants > 40, "{mutants} mutants");
}

fn steps(plan: &Plan, steps: u64) -> Vec<Run> {
    let mut all = vec![];
    let source = Source::seeded(7);
    let job = foretrain::exec::Job { source: &source, steps, keep_last: false, watch: None };
    let options = Options::new(7, (0..plan.ranks()).collect(), true);
    foretrain::exec::train(plan, &options, &job, &mut |_, run| {
        all.push(run);
        Ok(())
    })
    .expect("the plan runs");
    all
}

#[test]
fn the_optimizer_in_the_host_gives_the_reference() {
    for par in ways("offload-optimizer") {
        holds(&small(3, 4, 2), &par, 8 * u64::from(par.ring * par.ulysses * par.tp), 2);
    }
    let staged = Parallelism { pp: 2, dp: 2, zero: 1, ..way("offload-optimizer") };
    holds(&small(4, 4, 2), &staged, 16, 2);
    let all = Parallelism { ulysses: 2, dp: 2, zero: 3, ..way("offload-optimizer+offload-activations+fpdt-4") };
    holds(&small(3, 4, 2), &all, 32, 2);
    // Without recomputation, and a model whose embedding is its head.
    let mut tied = small(2, 4, 2);
    tied.tie_embeddings = true;
    holds(&tied, &Parallelism { dp: 2, recompute: Recompute::None, ..way("offload-optimizer") }, 8, 1);
}

/// Step after step, weights and moments come out as where the GPU keeps them.
#[test]
fn training_on_the_hosts_state_is_training_on_the_devices() {
    let model = small(2, 4, 2);
    let of = |words: &str| {
        let par = Parallelism { dp: 2, zero: 2, ..way(words) };
        steps(&build(&model, &work(&par, 16, 1, Dtype::F64), &par, SM).unwrap(), 3)
    };
    for (away, here) in of("offload-optimizer").iter().zip(of("")) {
        assert_eq!((away.loss, &away.weights), (here.loss, &here.weights));
    }
}

/// Of the 16 bytes that mixed precision keeps of a weight (ZeRO-Offload, arXiv:2101.06840, section 3) the fp32 weight and
/// both moments leave the device; over the bus go the gradient, in fp32 here, and the new weight.
#[test]
fn the_optimizers_bytes_are_the_hosts() {
    let model = plans::model(4, 4, false);
    for (dp, zero) in [(1, 0), (4, 1), (4, 2), (4, 3)] {
        let of = |words: &str| {
            let par = Parallelism { dp, zero, ..way(words) };
            let plan = build(&model, &work(&par, 512, 1, Dtype::Bf16), &par, SM).unwrap();
            check::check(&plan).unwrap();
            (layouts(&plan).remove(0), copied(&plan), plan)
        };
        let ((here, none, _), (away, both, plan)) = (of(""), of("offload-optimizer"));
        let share = |name: &str| -> u64 {
            let of = |t: &&Tensor| t.name.starts_with(name);
            plan.tensors.iter().filter(of).map(|t| t.elems() * u64::from(t.slots)).sum()
        };
        let elems = share("adam_m.");
        assert_eq!((none, both), ([0; 2], [4 * elems, 2 * elems]), "dp {dp}, zero {zero}");
        // But for where slots begin.
        let kept =
            |of: &Layout| of.live_by_kind.iter().find(|kind| kind.0 == TensorKind::OptState).map_or(0, |kind| kind.1);
        let left = (kept(&here) - kept(&away)) as f64 / (12 * elems) as f64;
        assert!((left - 1.0).abs() < 0.01, "dp {dp}, zero {zero}: {left} of the optimizer's bytes");
        // And fp32 gradients, and two new weights on their way back, of the largest two of each kind.
        let state = 16 * elems;
        assert!(away.host_bytes > state && away.host_bytes < state + 2 * 2 * elems, "{} of {state}", away.host_bytes);
    }
}

#[test]
fn the_cpus_optimizer_is_costed_by_its_memory_and_simulated_alike() {
    let model = plans::model(6, 4, false);
    for (dp, zero) in [(1, 0), (8, 1), (8, 3)] {
        let par = Parallelism { dp, zero, ..way("offload-optimizer") };
        let plan = build(&model, &work(&par, 512, 2, Dtype::Bf16), &par, SM).unwrap();
        agrees(&plan);
        let mut host = Host::of(&plan, 1.0);
        let gb = |gb: f64| foretrain::units::BytesPerSec::new(gb * 1e9);
        let spec = host.cluster.spec.host.as_mut().unwrap();
        // So slow a memory, and so fast a bus, that Adam is all that counts.
        (spec.bandwidth.value, spec.copy.value) = (gb(0.1), gb(1000.0));
        let elems: u64 =
            plan.tensors.iter().filter(|t| t.name.starts_with("adam_m.")).map(|t| t.elems() * u64::from(t.slots)).sum();
        // Gradient, weight and two moments are read, and these three and a weight in bf16 written, by all ranks of a node.
        let adam = 30.0 * elems as f64 / (0.1e9 / f64::from(dp));
        let timeline = cost(&plan, host.machine(), Effort::SUMS).unwrap();
        let (step, mean) = (timeline.step.value(), timeline.mean());
        // Where new weights are gathered, that comes last and is what is waited for.
        let waits = mean.offload + mean.exposed_total();
        assert!(
            mean.aside > adam && step > adam && waits > 0.9 * adam,
            "{step} s, {waits} s of waits, {adam} s of Adam"
        );
        // The bus moves what the memory behind it brings.
        assert!(mean.aside < adam * (1.0 + 6.5 / 30.0), "{} s, {adam} s of Adam", mean.aside);
    }
}

/// The CPU begins when it has all gradients, and every weight goes back when it is there.
#[test]
fn adam_waits_for_the_last_gradient() {
    let par = way("offload-optimizer");
    let plan = build(&plans::model(4, 4, false), &work(&par, 512, 1, Dtype::Bf16), &par, SM).unwrap();
    let host = Host::of(&plan, 1.0);
    let timeline = cost(&plan, host.machine(), Effort::ALL_SPANS).unwrap();
    let spans = &timeline.classes[0].spans;
    let of = |name: &'static str| spans.iter().filter(move |span| span.path.starts_with(name));
    let (last, first) = (
        of("g_to_host").map(|s| s.end).fold(Default::default(), foretrain::units::Seconds::max),
        of("adam").next().unwrap(),
    );
    assert_eq!(first.start, last);
    assert_eq!(of("adam").count(), of("w_from_host").count());
    for (adam, back) in of("adam").zip(of("w_from_host")) {
        assert!(back.start >= adam.end, "{} begins before {} is over", back.path, adam.path);
    }
    // Without that edge the CPU would begin earlier.
    let mut eager = plan.clone();
    first_of(&mut eager, "adam.head").after.clear();
    let earlier = cost(&eager, host.machine(), Effort::ALL_SPANS).unwrap();
    let begins = earlier.classes[0].spans.iter().find(|span| span.path == "adam.head").unwrap().start;
    assert!(begins < last);
}

fn first_of<'p>(plan: &'p mut Plan, label: &str) -> &'p mut Op {
    first(plan, |op| op.label == label)
}

#[test]
fn a_host_too_small_for_a_node_is_refused() {
    let par = Parallelism { dp: 8, zero: 1, ..way("offload-optimizer") };
    let plan = build(&plans::model(4, 4, false), &work(&par, 512, 1, Dtype::Bf16), &par, SM).unwrap();
    let mut host = Host::of(&plan, 1.0);
    let layout = layouts(&plan).remove(0);
    let mut row = |bytes: u64| {
        let memory = host.cluster.spec.host.as_mut().unwrap().memory.as_mut().unwrap();
        memory.value = foretrain::units::Bytes::new(bytes as f64);
        let mut row = Row::asked(&plan.about, &host.cluster, &host.stack);
        let aside = &Ok(Default::default());
        row.set_layout(&layout, &Place { aside, cluster: &host.cluster, stack: &host.stack, headroom: 0.0 });
        row
    };
    let fits = row(8 * layout.host_bytes);
    assert!(fits.feasible && fits.host_mem_bytes == Some(layout.host_bytes), "{}", fits.why);
    let small = row(8 * layout.host_bytes - 1);
    let why = small.why.to_string();
    assert!(!small.feasible && why.starts_with("host memory: 8 ranks of a node need"), "{why}");
}
