//! How a run was cut over its GPUs. What is stated is taken; what is not follows one rule for all runs:
//!
//! * tensor, pipeline, Ulysses, ring 1, and more of one of them where the plan would not fit or the batch not be
//!   enough ([`wider`]); experts over the ranks of a node; data parallelism what they leave of the GPUs;
//! * without GPUs, a replica, and a whole node at least: what a GPU does hardly depends on how many there are;
//! * micro-batch 1: the memory of a large model leaves no choice, and a small one gains little; where no batch is
//!   stated either, what gives a rank `ROWS` tokens at a time, without which products starve;
//! * a batch of four micro-batches a stage where there is a pipeline, with which the bubble is small, else of one a replica: four
//!   come closer to what is published of plain data parallelism, and less close of optimizers that are shared out;
//! * recomputation as the system's examples have it, else the least with which the plan fits the GPU, see `prediction::training`.
//!
//! What replicas share out is in [`sharding`]; what a rank does with its share comes from `rank`, and goes into the split as
//! words of options ([`options`]).

pub mod options;
pub mod sharding;
pub mod wider;

use crate::published::measured::convention::Convention;
use crate::published::model::known::length;
use crate::published::model::mixture;
use crate::published::rank::recompute::{
    keeps_attention, parts_made_again, recompute, recomputes_experts, recomputes_networks,
};
use crate::published::rank::savings::{self, activations_are_away, optimizer_is_away};
use crate::published::rank::tuning::Tuning;
use crate::published::rank::{gradients, precision};
use crate::published::row::case::Training;
use crate::published::row::words::{affirmed, is_narrow, squeezed};
use crate::published::software::era::{is_later_gpu, is_later_model};
use crate::published::software::habits::Habits;
use crate::published::software::system::System;
use crate::published::software::table::Fact;
use crate::published::software::{adam, recipe};
use crate::spec::{LlmSpec, Options, Parallelism, Recompute, WideLoss};
use options::with_words;

/// A run's degrees and batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Split {
    pub seq: u64,
    pub global_batch: u64,
    pub micro_batch: u64,
    pub par: Parallelism,
    /// Words of options that this program does not have.
    pub unknown: Vec<&'static str>,
}

/// Tokens that a rank has at a time where nobody says.
pub const ROWS: u64 = 4096;

/// Tokens of a sequence where neither the source nor the name of the model says: those of most models since 2023.
pub const USUAL: u64 = 4096;

/// GPUs of the run: stated, or the product of the degrees, and a node's at least where dp is not among them.
pub fn gpus(run: &Training) -> Result<u32, String> {
    let (ulysses, ring) = sequence_ways(run);
    let degrees = [run.tp.unwrap_or(1), run.pp.unwrap_or(1), ulysses, ring, run.dp.unwrap_or(1)];
    let product = degrees.iter().try_fold(1u32, |n, &d| n.checked_mul(d));
    let product = product.ok_or("gpus: the degrees are beyond any run; check for extra digits")?;
    let node = run.gpus_per_node.unwrap_or(8);
    Ok(run.gpus.unwrap_or(if run.dp.is_some() { product } else { product.next_multiple_of(node) }))
}

/// A run without the degrees that its notes call assumed: whoever wrote the row down took them, its source states none.
pub fn without_assumed(run: Training) -> Training {
    let clauses = run.notes.split([',', ';', '.', '(']);
    let assumed = clauses.into_iter().any(|clause| clause.contains("degree") && clause.contains("assumed"));
    if assumed { Training { cp: None, ulysses: None, ring: None, dp: None, ..run } } else { run }
}

/// A run on as many GPUs as its degrees make, all being stated, where a batch would not be enough for those that its source
/// says (NeMo's tables of long sequences keep the GPUs of another line).
pub fn without_spare(run: Training) -> Training {
    let (ulysses, ring) = sequence_ways(&run);
    let degrees = [degree(run.tp), degree(run.pp), ulysses.into(), ring.into()];
    let replica = degrees.into_iter().fold(1, u64::saturating_mul);
    let (Some(gpus), Some(dp), Some(batch)) = (run.gpus, run.dp, run.global_batch) else { return run };
    let idle = u64::from(gpus) > batch.saturating_mul(replica) && batch.is_multiple_of(u64::from(dp).max(1));
    let made = u32::try_from(replica.saturating_mul(dp.into())).ok().filter(|made| idle && *made > 0);
    Training { gpus: Some(made.unwrap_or(gpus)), ..run }
}

/// Ranks of a way; one where it is not stated.
pub fn degree(of: Option<u32>) -> u64 {
    u64::from(of.unwrap_or(1))
}

/// `node` ranks share the fast links.
pub fn split(run: &Training, model: &LlmSpec, habits: Habits, node: u32) -> Result<Split, String> {
    let gpus = gpus(run)?;
    let seq = run.seq.or_else(|| by_rate(run, model)).or_else(|| length(&run.model)).unwrap_or(USUAL);
    let (ulysses, ring) = sequence_ways(run);
    let (tp, pp) = (run.tp.unwrap_or(1), run.pp.unwrap_or(1));
    let replica = [tp, pp, ulysses, ring].iter().try_fold(1u32, |n, &d| n.checked_mul(d)).unwrap_or(u32::MAX);
    if !gpus.is_multiple_of(replica) {
        return Err(format!("gpus: {gpus} is not a multiple of tp {tp} x pp {pp} x ulysses {ulysses} x ring {ring}"));
    }
    let dp = gpus / replica;
    let rows = (seq / u64::from(ulysses * ring)).max(1);
    let ample = if run.global_batch.is_some() { 1 } else { ROWS.div_ceil(rows) };
    let micro_batch = run.micro_batch.unwrap_or(ample);
    let filled = u64::from(dp) * micro_batch * if pp > 1 { 4 * u64::from(pp) } else { 1 };
    let vp = match halved(run) {
        Some("zb-h1") => 1,
        Some(_) => 2,
        None => run.vp.or(interleaving(run, model, pp)).unwrap_or(1),
    };
    let stage = sharding::stage(run, habits);
    // Beside a pipeline weights stay whole and gradients are scattered once a step: FSDP under PyTorch's schedules,
    // Llama 3's stack; Megatron-LM and DeepSpeed have no more than stage 1 there.
    let zero = if pp > 1 { stage.min(1) } else { stage };
    let mut asked = words(run, model, [tp, pp, vp, zero], habits, seq);
    asked.extend((ring > 1 && (gathers_kv(run) || model.indexer.is_some())).then_some("gather-kv"));
    // Ranks that hold the same weights.
    let same = dp * ulysses * ring;
    asked.extend((same > 1 && gradients::are_summed_whole(run, pp, zero)).then_some("all-reduce-grads"));
    asked.extend((same > 1 && zero > 0 && precision::gathers_fp8(run)).then_some("gather-fp8"));
    let gathers_ahead = habits.overlap.gather && !optimizer_is_away(run) && Tuning::of(run).is_none();
    asked.extend((same > 1 && zero == 1 && gathers_ahead).then_some("overlap-gather"));
    let rings = (model.indexer.is_none() && !gathers_kv(run)).then(|| rings_of_nodes(run, ring, node / (tp * ulysses)));
    asked.extend(rings.flatten());
    let inside = pp > 1 && dp > 1 && model.moe.is_none() && has_stages_inside(run);
    asked.extend(inside.then_some("pp-inside"));
    let (mut options, unknown) = with_words(Options::default(), &asked);
    // Sums of gradients that stay whole go over all replicas, whoever has the optimizer's states (InternEvo).
    options.shard =
        sharding::sharers(run, node).filter(|n| zero > 1 && *n < same && same.is_multiple_of(*n)).unwrap_or(0);
    if let Some(capacity) = mixture::masked(run, model) {
        (options.capacity, options.mask_rows) = (capacity, true);
    }
    options.last_stage = left_over(model.layers, pp, vp).filter(|_| habits.fills_stages);
    let par = Parallelism {
        dp,
        pp,
        vp,
        ring,
        ulysses,
        tp,
        ep: mixture::ep(run, model, gpus / pp, node),
        zero,
        recompute: recompute(run).unwrap_or(Recompute::None),
        options,
    };
    Ok(Split { seq, global_batch: run.global_batch.unwrap_or(filled), micro_batch, par, unknown })
}

/// The option of a ring of rings, one in each node, of which `here` ranks of a ring have a share: BurstAttention's ring of two
/// levels (arXiv:2403.09347, section 3.2, "topology-aware") and LoongTrain's (arXiv:2406.18485) where they go over several.
fn rings_of_nodes(run: &Training, ring: u32, here: u32) -> Option<&'static str> {
    let said = [&run.system, &run.notes].map(|text| squeezed(&affirmed(text)));
    let names = ["doublering", "burst+double", "ringoftwolevels", "awareoftopology", "topologyawarering", "loongtrain"];
    let words = [(2, "double-ring-2"), (4, "double-ring-4"), (8, "double-ring-8")];
    let named = names.iter().any(|name| said.iter().any(|text| text.contains(name)));
    let fits = |inner: u32| inner == here && ring > inner && ring.is_multiple_of(inner);
    words.into_iter().find(|(inner, _)| named && fits(*inner)).map(|(_, word)| word)
}

/// Whether ranks that share a sequence gather all keys and values before attention, in place of a ring: Llama 3's stack does
/// (arXiv:2407.21783, section 3.3.2), as does whoever says so.
fn gathers_kv(run: &Training) -> bool {
    let (system, notes) = (squeezed(&run.system), squeezed(&affirmed(&run.notes)));
    let said =
        ["allgathercp", "allgatherbasedcp", "allgatherk", "allgatherofk", "kvallgather", "parallelism:allgather"];
    System::of(&run.system).is(Fact::GathersKv) || said.iter().any(|word| system.contains(word) || notes.contains(word))
}

/// Layers of the last stage where all others are filled first; `None` where they come out even, or do with embedding and
/// head counted as a layer each.
fn left_over(layers: u64, pp: u32, vp: u32) -> Option<u16> {
    let pp = u64::from(pp);
    let even = layers.is_multiple_of(pp) || (layers + 2).is_multiple_of(pp);
    let left = layers.checked_sub(layers.div_ceil(pp) * (pp - 1)).filter(|left| *left > 0 && vp == 1 && !even)?;
    u16::try_from(left).ok()
}

/// Tokens of a sequence that make the stated FLOP/s of the stated tokens/s, as a power of two.
fn by_rate(run: &Training, model: &LlmSpec) -> Option<u64> {
    let per_token = run.tflops_per_gpu? * 1e12 / run.tokens_per_s_per_gpu?;
    let convention = Convention::of_run(run, false);
    let far = |seq: u64| (convention.flops_per_token(model, seq) / per_token).ln().abs();
    let best = (9..=20).map(|n| 1u64 << n).min_by(|a, b| far(*a).total_cmp(&far(*b)))?;
    (far(best) < 0.03).then_some(best)
}

/// Virtual stages of a system that interleaves without saying how finely (NeMo's tables have a pipeline of more than one
/// stage interleaved wherever they state it; Megatron Core's own figures lose a tenth where a pipeline of six stages has
/// twelve micro-batches, of which the plain schedule would idle a third): a layer each, or as close to it as the layers
/// come out even.
fn interleaving(run: &Training, model: &LlmSpec, pp: u32) -> Option<u32> {
    let system = System::of(&run.system);
    let habit = system.is(Fact::Interleaves) && !system.is(Fact::StatesInterleaving);
    let interleaves = system.has("interleaved") || habit;
    if mixture::is_dualpipe(run) {
        return Some(2);
    }
    let layers = Some(model.layers).filter(|_| interleaves && pp > 1)?;
    // Embedding and head take the place of a layer each where its makers say so (arXiv:2407.21783, section 3.3.2), in
    // NVIDIA's recipes they do not, nor in Megatron as it was before that.
    let before = !is_later_gpu(&run.gpu) && !is_later_model(run);
    let ends = if before || system.is(Fact::EndsBesideLayers) { 0 } else { 2 };
    let even = |vp: &u64| [layers, layers + ends].iter().any(|l| l.is_multiple_of(u64::from(pp) * vp));
    (1..=((layers + ends) / u64::from(pp)).clamp(1, 64)).rev().find(even).map(|vp| vp as u32)
}

/// The option of a pipeline whose backward passes are in two halves, by the name of its schedule (arXiv:2401.10241: ZB-H1,
/// ZB-H2 or 1p and 2p, ZB-V; arXiv:2405.15362: V-Half, V-Min). Of those that are not in a V plans have ZB-H1.
fn halved(run: &Training) -> Option<&'static str> {
    let system = squeezed(&run.system);
    let names = [
        ("zbv", "zb-v"),
        ("vhalf", "v-half"),
        ("vmin", "v-min"),
        ("zerobubble", "zb-h1"),
        ("zbh1", "zb-h1"),
        ("zbh2", "zb-h1"),
        ("zb1p", "zb-h1"),
        ("zb2p", "zb-h1"),
        ("zbb", "zb-h1"),
    ];
    let named = names.iter().find(|(name, _)| system.contains(name)).map(|(_, word)| *word);
    named.filter(|_| run.pp.is_some_and(|pp| pp > 1))
}

/// Ulysses and ring degrees. Where only their product is stated, the name of the system says which it is; most
/// have a ring.
fn sequence_ways(run: &Training) -> (u32, u32) {
    let cp = run.cp.unwrap_or(1);
    match (run.ulysses, run.ring) {
        (Some(u), Some(r)) => (u, r),
        (Some(u), None) => (u, (cp / u).max(1)),
        (None, Some(r)) => ((cp / r).max(1), r),
        (None, None) if System::of(&run.system).has("ulysses") => (cp, 1),
        (None, None) => (1, cp),
    }
}

/// Whether stages are neighbours and replicas far apart: where a source says so, or of whose software it is known.
fn has_stages_inside(run: &Training) -> bool {
    let said = [&run.system, &run.notes].map(|text| squeezed(&affirmed(text)));
    said.iter().any(|text| text.contains("tpppdp") || System::of(text).is(Fact::StagesInside))
}

/// Words of options. Sequence parallelism is as stated, or the system's habit; products are in FP8 where the precision
/// names it, or something narrower still.
fn words(run: &Training, model: &LlmSpec, [tp, pp, vp, zero]: [u32; 4], habits: Habits, seq: u64) -> Vec<&'static str> {
    let beside = habits.overlap;
    let p2p = if vp > 1 { beside.interleaved_p2p } else { beside.p2p };
    // What goes through a V both ways is sent and received beside compute.
    let in_v = halved(run).is_some_and(|word| word != "zb-h1");
    let cut = run.seq_parallel.unwrap_or(habits.sequence_parallel);
    let ([norms, acts], in_tiles) = (parts_made_again(run), savings::tiled(run, model));
    let all_narrow = gradients::is_pure_bf16(run) && !optimizer_is_away(run);
    let wide_loss = savings::wide_loss(run, &in_tiles, habits.wide_loss);
    let all = [
        (tp > 1 && !cut, "no-sp"),
        (tp > 1 && cut && habits.tp_overlap && recipe::sends_chunks(run), "tp-overlap"),
        (is_narrow(&run.precision), "fp8"),
        (habits.kernels[0] == "unfused", "unfused"),
        (zero < 2 && !beside.grad, "no-overlap-grad"),
        (gradients::are_halved(run, zero), "bf16-grads"),
        (sharding::copies(run, zero), "copy-shards"),
        (gradients::is_muon(run) && !optimizer_is_away(run), "muon"),
        (adam::is_foreach(run) && !gradients::is_muon(run) && !optimizer_is_away(run), "foreach"),
        (all_narrow, "bf16-moments"),
        (all_narrow, "no-master"),
        (recomputes_experts(run, model), "recompute-moe"),
        (recomputes_networks(run, model), "recompute-mlp"),
        (
            precision::keeps_codes(run) && recompute(run) != Some(Recompute::Full) && Tuning::of(run).is_none(),
            "keep-fp8",
        ),
        (pp > 1 && !p2p && !in_v, "no-overlap-p2p"),
        (pp > 1 && tp > 1 && !cut && habits.scattered_p2p, "scatter-p2p"),
        (pp == 1 && zero < 2 && !beside.passes, "wait-passes"),
        // Where gradients are cut, each microbatch's is sent away whole, and it is the shares that are added up.
        (zero < 2 && !habits.fused_grads && model.mla.is_none(), "add-grads"),
        (wide_loss == WideLoss::Copied, "wide-loss"),
        (wide_loss == WideLoss::InPlace, "wide-loss-in-place"),
        (model.mla.is_some() && squeezed(&run.recompute).contains("mlaup"), "recompute-mla-up"),
        (norms, "recompute-norm"),
        (acts, "recompute-act"),
        (keeps_attention(run), "keep-attention"),
        (optimizer_is_away(run), "offload-optimizer"),
        (pp == 1 && activations_are_away(run), "offload-activations"),
    ];
    let carried = model.moe.map(|_| mixture::dispatch(run)).unwrap_or_default();
    let given = all.into_iter().filter(|(is, _)| *is).map(|(_, word)| word);
    given.chain(in_tiles).chain(halved(run)).chain(carried).chain(savings::chunked(run, seq)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::rank::recompute::recomputed_part;
    use crate::published::row::case::Experts;

    fn habits() -> Habits {
        Habits::of("Megatron-LM PTD-P")
    }

    #[test]
    fn gpus_that_a_batch_leaves_idle_are_another_lines() {
        let long = Training {
            gpus: Some(1024),
            dp: Some(4),
            tp: Some(4),
            cp: Some(16),
            global_batch: Some(4),
            ..Training::default()
        };
        assert_eq!(without_spare(long.clone()).gpus, Some(256));
        // Where the batch is enough for all, nothing says that the GPUs are wrong, and not the degrees.
        let enough = Training { global_batch: Some(16), ..long.clone() };
        let open = Training { dp: None, ..long };
        for run in [enough, open] {
            assert_eq!(without_spare(run.clone()), run);
        }
    }

    #[test]
    fn who_has_rings_of_nodes() {
        let of = |system: &str, notes: &str, ring, here| {
            let run = Training { system: system.into(), notes: notes.into(), ..Training::default() };
            rings_of_nodes(&run, ring, here)
        };
        assert_eq!(of("Burst+Double+ZeRO3", "", 32, 8), Some("double-ring-8"));
        assert_eq!(of("LoongTrain", "", 16, 4), Some("double-ring-4"));
        assert_eq!(of("BurstEngine", "ring aware of topology", 16, 8), Some("double-ring-8"));
        // One node has one ring, and nobody has a ring of three.
        assert_eq!([of("LoongTrain", "", 8, 8), of("LoongTrain", "", 12, 3)], [None, None]);
        assert_eq!([of("EasyContext", "", 16, 8), of("BurstEngine", "without a double ring", 16, 8)], [None, None]);
    }

    #[test]
    fn whose_stages_are_neighbours() {
        let of = |system: &str, notes: &str| {
            has_stages_inside(&Training { system: system.into(), notes: notes.into(), ..Training::default() })
        };
        assert!(of("NeMo of NGC 25.09 (HPE, MLPerf Training v5.1)", "") && !of("NeMo (MLPerf Training v4.1)", ""));
        assert!(of("Megatron-LM", "use_tp_pp_dp_mapping") && !of("Megatron-LM", "without tp-pp-dp order"));
    }

    /// DeepSpeed's engine and Megatron-LM until 2022 scatter what passes between stages, unless rows are cut as it is.
    #[test]
    fn who_scatters_between_stages() {
        let model = LlmSpec::find("gpt3-175b").unwrap();
        let scatters = |system: &str, seq_parallel: Option<bool>, tp: u32| {
            let run = Training { system: system.into(), seq_parallel, ..Training::default() };
            words(&run, &model, [tp, 8, 1, 0], Habits::of(system), 2048).contains(&"scatter-p2p")
        };
        for system in ["Megatron-DeepSpeed (BigScience)", "Megatron-LM PTD-P", "GPT-NeoX"] {
            assert!(scatters(system, None, 8) && !scatters(system, None, 1) && !scatters(system, Some(true), 8));
        }
        for system in ["torchtitan", "nanotron", "Megatron Core"] {
            assert!(!scatters(system, Some(false), 8), "{system}");
        }
    }

    #[test]
    fn what_is_not_stated_follows_the_rule() {
        let run = Training { gpus: Some(64), seq: Some(2048), tp: Some(8), pp: Some(2), ..Training::default() };
        let found = split(&run, &LlmSpec::default(), habits(), 8).unwrap();
        // Of 2048 tokens two make the rows that a rank has at a time.
        assert_eq!((found.par.dp, found.micro_batch, found.global_batch), (4, 2, 64));
        assert!(found.par.options.whole_activations);
        let uneven = Training { gpus: Some(60), ..run.clone() };
        assert!(split(&uneven, &LlmSpec::default(), habits(), 8).unwrap_err().contains("60 is not a multiple"));
        let cp = Training { cp: Some(4), tp: None, pp: None, ..run };
        assert_eq!(
            (
                split(&cp, &LlmSpec::default(), habits(), 8).unwrap().par.ring,
                split(&cp, &LlmSpec::default(), habits(), 8).unwrap().par.ulysses
            ),
            (4, 1)
        );
        let ulysses = Training { system: "DeepSpeed-Ulysses".into(), ..cp };
        assert_eq!(split(&ulysses, &LlmSpec::default(), habits(), 8).unwrap().par.ulysses, 4);
    }

    #[test]
    fn parts_that_are_made_again_by_themselves() {
        let model = LlmSpec::find("qwen3-235b-a22b").unwrap();
        let of = |text: &str| {
            let run = Training { recompute: text.into(), ..Training::default() };
            let found = words(&run, &model, [1, 8, 4, 1], habits(), 4096);
            let word = |word| found.contains(&word);
            (recompute(&run), word("recompute-norm"), word("recompute-act"), recomputed_part(&run, 94, 8, 4).is_some())
        };
        let none = Some(Recompute::None);
        assert_eq!(of("norm, act"), (none, true, true, false));
        assert_eq!(of("selective (layernorm, moe_act)"), (none, true, true, false));
        assert_eq!(of("selective (norms and the experts' activation)"), (none, true, true, false));
        let experts = |text: &str, model: &LlmSpec| {
            let run = Training { recompute: text.into(), ..Training::default() };
            words(&run, model, [1, 8, 4, 1], habits(), 4096).contains(&"recompute-moe")
        };
        assert!(experts("selective (layernorm, moe)", &model) && !experts("selective (layernorm, moe_act)", &model));
        assert!(!experts("selective (layernorm, moe)", &LlmSpec::default()));
        let named = ["selective (attention, layernorm, experts)", "selective (norms and the experts' activation)"];
        assert_eq!(named.map(|text| experts(text, &model)), [true, false]);
        let networks = |text: &str, model: &LlmSpec| {
            let run = Training { recompute: text.into(), ..Training::default() };
            words(&run, model, [1, 8, 4, 1], habits(), 4096).contains(&"recompute-mlp")
        };
        let dense = LlmSpec::default();
        assert!(networks("selective (mlp, core_attn)", &dense) && !networks("selective (mlp_act)", &dense));
        assert!(!networks("selective (mlp)", &model) && !networks("selective (core attention)", &dense));
        let titan = |text: &str, experts: Option<Experts>| {
            let run = Training {
                recompute: text.into(),
                system: "torchtitan (FSDP2)".into(),
                experts,
                ..Training::default()
            };
            let found = words(&run, &model, [1, 8, 4, 1], habits(), 4096);
            (found.contains(&"recompute-moe"), found.contains(&"recompute-norm"), recomputed_part(&run, 94, 8, 4))
        };
        assert_eq!(titan("selective (per op)", Some(Experts::default())), (true, true, None));
        assert!(!titan("selective, every fourth layer", Some(Experts::default())).0);
        assert_eq!(titan("selective (per op)", None), (false, true, None));
        assert_eq!(titan("selective, every second layer", None), (false, false, Some(0.5)));
        assert_eq!(of("selective"), (Some(Recompute::Selective), false, false, false));
        // Activations, as most call them, are all that is kept.
        assert_eq!(of("full (activation checkpointing)"), (Some(Recompute::Full), false, false, false));
        assert_eq!(of("selective activation recomputation"), (Some(Recompute::Selective), false, false, false));
    }

    #[test]
    fn who_interleaves_without_saying_so() {
        let model = LlmSpec { layers: 32, ..LlmSpec::default() };
        let of = |system: &str| interleaving(&Training { system: system.into(), ..Training::default() }, &model, 4);
        assert_eq!([of("NeMo 24.07"), of("Megatron-Core w/ Folding"), of("Megatron-LM")], [Some(8), Some(8), None]);
        assert_eq!(
            [
                of("NeMo/Megatron-Bridge 26.04"),
                of("Megatron-SWIFT (Megatron-Core 0.12)"),
                of("Megatron-LM (Nemotron-4)")
            ],
            [None; 3]
        );
        // Embedding and head have no place of their own on what is older than Llama 3 and its GPUs.
        let gpt = LlmSpec { layers: 48, ..LlmSpec::default() };
        let of = |gpu: &str, model: &str| {
            let (system, gpu, model) = ("Megatron-LM PTD-P, interleaved".into(), gpu.into(), model.into());
            interleaving(&Training { system, gpu, model, ..Training::default() }, &gpt, 2)
        };
        assert_eq!([of("A100-SXM-80GB", "GPT 39.1B"), of("H100-SXM-80GB", "GPT 39.1B")], [Some(24), Some(25)]);
    }

    #[test]
    fn what_a_row_assumes_is_not_stated() {
        let run =
            |notes: &str| Training { notes: notes.into(), cp: Some(16), ulysses: Some(16), ..Training::default() };
        let open = without_assumed(run("strong scaling; SP degree = #GPUs assumed"));
        assert_eq!([open.cp, open.ulysses], [None; 2]);
        assert_eq!(without_assumed(run("tp8/pp6 assumed = table row")).ulysses, Some(16));
        assert_eq!(without_assumed(run("SP degree 16")).ulysses, Some(16));
    }

    #[test]
    fn stages_are_filled_from_the_first_one_on() {
        assert_eq!([(78, 12), (79, 10), (77, 6)].map(|(l, pp)| left_over(l, pp, 1)), [Some(1), Some(7), Some(12)]);
        // Even, even with embedding and head, more stages than can be filled, interleaved.
        assert_eq!(
            [(72, 12, 1), (70, 12, 1), (13, 6, 1), (77, 6, 2)].map(|(l, pp, vp)| left_over(l, pp, vp)),
            [None; 4]
        );
    }
}
