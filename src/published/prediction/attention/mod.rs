//! Predicts one attention operation over its ranks; rows about whole models are read as training runs.

mod documents;
mod magi;
mod ways;

use crate::cost::{Effort, Machine, cost};
use crate::device::Roofline;
use crate::published::Shipped;
use crate::published::machine::{Chosen, Stated};
use crate::published::model::known;
use crate::published::outcome::verdict::Prediction;
use crate::published::prediction::{said, training};
use crate::published::rank::precision::is_whole;
use crate::published::row::case::{Attention, Training};
use crate::published::row::words::{is_narrow, squeezed, tokens};
use crate::published::software::recipe::EAGER_BF16;
use crate::published::software::system::System;
use crate::published::software::table::Fact;
use crate::published::split::options::with_words;
use crate::spec::{
    Architecture, AttentionSpec, Dtype, KvPath, LlmSpec, Mask, Options, Origin, Parallelism, Pass, RingLayout, Sourced,
    StackSpec,
};
use crate::strategy::{Engines, attention_pass};
use crate::units::Seconds;
use ways::{Way, kernels, way};

/// Tokens and width of a benchmark that states only length and head dim: the setting of FlashAttention's papers
/// (arXiv:2307.08691, section 4.1).
const TOKENS: u64 = 16384;
const WIDTH: u64 = 2048;

/// What the benchmark of ring-flash-attention has until it is changed: heads, their width and tokens a rank, of one
/// sequence (github:zhuzilin/ring-flash-attention benchmark/benchmark_qkvpacked_func.py).
const SCRIPT: (&str, [u64; 3]) = ("benchmark_qkvpacked_func default", [5, 128, 8192]);

/// What the operation would report, or why that cannot be said.
pub fn predict(row: &Attention, shipped: &Shipped) -> Prediction {
    if !row.model.is_empty() && named(&row.pass).is_none() {
        return whole_model(row, shipped);
    }
    let mut found = Prediction { measured: row.value, unit: row.unit.clone(), ..Prediction::default() };
    if let Err(why) = try_predict(row, shipped, &mut found) {
        found.why.push(why);
    }
    found
}

fn try_predict(row: &Attention, shipped: &Shipped, found: &mut Prediction) -> Result<(), String> {
    let whole = &filled_in(row, found);
    let fewer = magi::dealt(whole);
    let longest = documents::longest(whole);
    let row = fewer.as_ref().or(longest.as_ref()).unwrap_or(whole);
    let gpus = row.gpus.ok_or("gpus: not stated")?;
    let stated = Stated {
        gpu: &row.gpu,
        gpus,
        gpus_per_node: Some(gpus / row.nodes.unwrap_or(1).max(1)).filter(|n| *n >= 4),
        whole_nodes: false,
        interconnect: &row.link,
    };
    let mut machine = shipped.fleet.choose(&stated)?;
    found.cluster = machine.said.clone();
    found.why.append(&mut machine.why);
    found.why.extend(row.left_out.iter().cloned());
    if fewer.is_some() {
        machine.cluster = magi::spread(&machine.cluster, row.nodes.unwrap_or(1))?;
        found.why.push(format!("taken: a document is on {gpus} ranks, and what they hold of others does not matter"));
    }
    found.why.extend(magi::one_by_one(row, &mut machine.cluster));
    let newest = machine.cluster.gpu.architecture == Architecture::Blackwell;
    let stack = shipped.stacks.with_kernel(kernels(row, newest), &machine.cluster.gpu)?;
    found.stack = stack.name.clone();
    let way = way(row, gpus, machine.cluster.spec.gpus_per_node)?;
    found.why.extend(way.instead.map(|w| format!("taken: {w}")));
    let pass = pass(row, found)?;
    let mut par = parallelism(&way, found);
    if !stack.fuses_attention() {
        if par.ring > 1 {
            return Err(format!("gpu: {} has no fused attention, which a ring of this program needs", row.gpu));
        }
        par.options.unfused = true;
        found.why.push("taken: scores in memory".into());
    }
    let narrow = is_narrow(&row.dtype).then_some("FP8").or(is_whole(&row.dtype).map(|_| "32 bits"));
    found.why.extend(narrow.map(|dtype| format!("dtype: attention in {dtype} is not costed; bf16 taken")));
    let stack = &in_python(row, &par, shipped, stack);
    let specs = specs(row, gpus, &par)?;
    par.options.per_document = each_is_shared(&specs, &par);
    if specs.iter().any(|spec| are_padded(spec, par.ulysses)) {
        par.options.pad_heads = true;
        found.why.push(format!("taken: heads padded until ulysses {} divides them", par.ulysses));
    }
    let bench = Bench { machine, stack, pass, par };
    found.split = format!("ulysses {} x ring {}, {}, {}", par.ulysses, par.ring, par.options, pass.name());
    // Benchmarks over several sets of documents take them in turn.
    let mut seconds = 0.0;
    let mut flops = 0.0;
    for spec in &specs {
        seconds += bench.seconds(spec)? / specs.len() as f64;
        flops += spec.flops(pass) / specs.len() as f64;
    }
    if longest.is_some() {
        // Rates are of all documents, times of the ranks that take longest.
        flops /= documents::LONGEST;
        found.why.push(format!("taken: the ranks of the longest document, {gpus}, for which all others wait"));
    }
    // Of GPUs that each do the same by themselves, as in a benchmark of kernels on a node, the rate is that of one.
    let sharers = par.ring * par.ulysses;
    let rate = flops / f64::from(sharers);
    found.predicted = Some(in_unit(row, seconds, rate, bench.peak())?);
    Ok(())
}

/// Whether heads of a run that was timed cannot be dealt out evenly: those are padded where implementations run at all.
fn are_padded(spec: &AttentionSpec, ulysses: u32) -> bool {
    let (heads, kv_heads, ranks) = (spec.heads, spec.kv_heads, u64::from(ulysses));
    !(heads.is_multiple_of(ranks) && (kv_heads.is_multiple_of(ranks) || ranks.is_multiple_of(kv_heads)))
}

/// The row with the sizes of the script, or of the model, that it names in place of its own.
fn filled_in(row: &Attention, found: &mut Prediction) -> Attention {
    let (script, [heads, width, tokens]) = SCRIPT;
    let mut row = row.clone();
    if row.head_dim.is_none() && row.note.contains(script) {
        (row.batch, row.heads, row.head_dim) = (row.batch.or(Some(1)), row.heads.or(Some(heads)), Some(width));
        row.seq = row.seq.or(row.gpus.map(|gpus| tokens * u64::from(gpus)));
    }
    let name = row.model.split_whitespace().next().unwrap_or_default().to_lowercase();
    let shipped = || LlmSpec::find(&name).ok().map(|model| [model.heads, model.kv_heads, model.head_dim]);
    let known = || {
        let run = known::filled_in(&Training { model: row.model.clone(), ..Training::default() });
        let (heads, hidden) = (run.heads?, run.hidden?);
        Some([heads, run.kv_heads.unwrap_or(heads), run.head_dim.unwrap_or(hidden / heads)])
    };
    let sizes = row.head_dim.is_none().then(|| shipped().or_else(known)).flatten();
    if let Some([heads, kv_heads, head_dim]) = sizes {
        found.why.push(format!("taken: the heads of {}, in one sequence", row.model));
        (row.batch, row.head_dim) = (row.batch.or(Some(1)), Some(head_dim));
        (row.heads, row.kv_heads) = (row.heads.or(Some(heads)), row.kv_heads.or(Some(kv_heads)));
    }
    row
}

/// A pass by its name, or as sources spell it: "forward", "FWD", "fwd + bwd", "forward/backward".
fn named(words: &str) -> Option<Pass> {
    let text = squeezed(words).replace("forward", "fwd").replace("backward", "bwd").replace(['/', '&'], "+");
    Pass::named(match text.as_str() {
        "fwdbwd" | "fwdandbwd" | "fwd+bwd" => "fwd+bwd",
        other => other,
    })
}

/// The pass, read from words; where a benchmark does not say, it trains.
fn pass(row: &Attention, found: &mut Prediction) -> Result<Pass, String> {
    match named(&row.pass) {
        Some(pass) => Ok(pass),
        // Their times leave no room for what a backward pass would exchange (github issue
        // feifeibear/long-context-attention#88: on H800 2.7 ms, of which forward alone takes 2.5).
        None if row.pass.contains("test scripts") => {
            found.why.push("pass: not stated, taken as the forward pass of the test scripts".into());
            Ok(Pass::Forward)
        }
        None if row.pass.is_empty() || row.pass.starts_with("unstated") => {
            found.why.push("pass: not stated, taken as fwd+bwd".into());
            Ok(Pass::ForwardBackward)
        }
        None => Err(format!("pass: {:?} is no pass of one attention", row.pass)),
    }
}

/// A way with the options that this program knows; others are noted.
fn parallelism(way: &Way, found: &mut Prediction) -> Parallelism {
    let (options, unknown) = with_words(Options::default(), &way.words);
    found.why.extend(unknown.iter().map(|word| format!("taken without {word}, which this version has not")));
    Parallelism { ulysses: way.ulysses, ring: way.ring, options, ..Parallelism::default() }
}

/// The operation, once for each set of documents.
fn specs(row: &Attention, gpus: u32, par: &Parallelism) -> Result<Vec<AttentionSpec>, String> {
    let head_dim = row.head_dim.ok_or("head_dim: not stated")?;
    let heads = row.heads.unwrap_or((WIDTH / head_dim).max(1));
    // A benchmark that does not say trains a language model.
    let causal = row.causal.or_else(|| masked(row)).unwrap_or(true);
    let window = windowed(row).filter(|_| causal);
    let of = |seq_len: u64, documents: Vec<u64>| AttentionSpec {
        batch: row.batch.unwrap_or((TOKENS / seq_len).max(1)),
        seq_len,
        heads,
        kv_heads: row.kv_heads.unwrap_or(heads),
        head_dim,
        mask: Mask { documents: documents.into(), window: window.filter(|w| *w < seq_len), ..Mask::new(causal) },
        dtype: Dtype::Bf16,
    };
    if !row.documents.is_empty() {
        let lengths = |ends: &Vec<u64>| -> Vec<u64> {
            let of_one = ends.windows(2).map(|w| w[1].saturating_sub(w[0]));
            of_one.filter(|n| *n > 0).map(|n| n * u64::from(gpus)).collect()
        };
        return Ok(row.documents.iter().map(lengths).map(|l| of(l.iter().sum(), l)).collect());
    }
    let seq_len = row.seq.ok_or("seq: not stated")?;
    if !documents::are_packed(&row.mask) || gpus == 1 {
        return Ok(vec![of(seq_len, vec![])]);
    }
    // Documents as long as the one that a token is in, side by side: rings and gathers cut every document over all of
    // their ranks, so that ranks have as much of each to do (TransformerEngine's `thd`; MagiAttention's solver evens out).
    let batch = (seq_len as f64 / documents::seen(seq_len)).round().max(1.0) as u64;
    let unit = 2 * u64::from(par.ring * par.ulysses);
    let alike = AttentionSpec { batch, ..of((seq_len / batch / unit).max(1) * unit, vec![]) };
    Ok(vec![alike])
}

/// Whether ranks share each document by itself: where there are some, and they come out even (ring-flash-attention's functions
/// for sequences of unlike length, TransformerEngine's `thd`). Ranks that gather have consecutive parts of the sequence (that
/// library's functions named after Llama 3).
fn each_is_shared(specs: &[AttentionSpec], par: &Parallelism) -> bool {
    let parts = u64::from(par.ring) * if par.options.layout == RingLayout::Zigzag { 2 } else { 1 };
    let even = |spec: &AttentionSpec| {
        let lengths = spec.mask.documents.lengths();
        !lengths.is_empty() && lengths.iter().all(|length| length.is_multiple_of(parts))
    };
    par.ring > 1 && par.options.kv == KvPath::Ring && specs.iter().all(even)
}

/// Whether the mask is causal, by its name.
fn masked(row: &Attention) -> Option<bool> {
    let text = squeezed(&row.mask);
    match () {
        () if text.contains("causal") => Some(!text.contains("noncausal") && !text.contains("nocausal")),
        () => ["full", "bidirectional", "none"].iter().any(|word| text.contains(word)).then_some(false),
    }
}

/// Keys that a query sees at most: stated, or behind the name of the mask, of which a window is.
fn windowed(row: &Attention) -> Option<u64> {
    let text = squeezed(&row.mask);
    let is = ["sliding", "window", "swa"].iter().any(|word| text.contains(word));
    let by_name = || tokens(&row.mask).iter().find_map(|word| word.parse().ok());
    row.window.or_else(|| is.then(by_name).flatten())
}

/// The stack as it is where the loop over blocks is in Python and its merges are PyTorch's own operators.
fn in_python(row: &Attention, par: &Parallelism, shipped: &Shipped, stack: &StackSpec) -> StackSpec {
    let is = ["zhuzilin", "yunchang"].iter().any(|who| row.implementation.contains(who));
    match par.options.kv {
        _ if !is => stack.clone(),
        KvPath::Ring => called_one_by_one(shipped.stacks.eager(stack.clone())),
        _ => shipped.stacks.eager(stack.clone()),
    }
}

/// The stack where each op of a plan is a call from Python, which is several of PyTorch's: a ring of eight L20 on 8192
/// tokens takes 2.8 ms in any layout, 115 us for each hop, kernel and merge.
fn called_one_by_one(stack: StackSpec) -> StackSpec {
    let source = "as modules of Megatron and Transformer Engine without CUDA graphs".into();
    let value = Seconds::new(EAGER_BF16);
    stack.issuing(Sourced { value, source, provenance: Origin::Derived })
}

/// Everything but the operation itself.
struct Bench<'a> {
    machine: Chosen,
    stack: &'a StackSpec,
    pass: Pass,
    par: Parallelism,
}

impl Bench<'_> {
    /// FLOP/s of a GPU in bf16.
    fn peak(&self) -> f64 {
        self.machine.cluster.gpu.peak.get("bf16").map_or(f64::NAN, |peak| peak.value.value())
    }

    fn seconds(&self, spec: &AttentionSpec) -> Result<f64, String> {
        let engines = Engines::of(self.stack, &self.machine.cluster.spec);
        let plan = attention_pass::build(spec, self.pass, &self.par, engines).map_err(said)?;
        let kernels = Roofline::new(&self.machine.cluster.gpu, self.stack).map_err(said)?;
        let kernels = if plan.ranks() == 1 { kernels.alone() } else { kernels };
        let machine = Machine { cluster: &self.machine.cluster, stack: self.stack, kernels: &kernels, devices: None };
        let seconds = cost(&plan, machine, Effort::SUMS).map_err(said)?.step.value();
        let call = self.stack.attention_call.as_ref().map_or(0.0, |call| call.value.value());
        let by_itself = plan.ranks() == 1 && self.pass == Pass::Forward;
        Ok(if by_itself { seconds.max(call) } else { seconds })
    }
}

/// Seconds of one operation in the unit of the source. `flops`: of one GPU, as benchmarks count them; `peak`: its FLOP/s.
fn in_unit(row: &Attention, seconds: f64, flops: f64, peak: f64) -> Result<f64, String> {
    let unit = squeezed(&row.unit).replace(['\u{b5}', '\u{3bc}'], "u");
    let tokens = row.seq.unwrap_or(0) as f64 * row.batch.unwrap_or(1) as f64;
    match unit.as_str() {
        "s" | "sec" | "seconds" | "s/iter" => Ok(seconds),
        "ms" | "ms/iter" | "milliseconds" => Ok(seconds * 1e3),
        "us" | "us/iter" | "microseconds" => Ok(seconds * 1e6),
        "iter/s" | "it/s" | "iters/s" => Ok(1.0 / seconds),
        "tokens/s" | "tokens/sec" if tokens > 0.0 => Ok(tokens / seconds),
        "tokens/s/gpu" | "tokens/sec/gpu" if tokens > 0.0 => Ok(tokens / seconds / f64::from(row.gpus.unwrap_or(1))),
        "%ofpeak" | "%mfu" | "mfu%" => Ok(100.0 * flops / seconds / peak),
        "mfu" | "ofpeak" => Ok(flops / seconds / peak),
        u if u.starts_with("tflop") => Ok(flops / seconds / 1e12),
        u if u.starts_with("pflop") => Ok(flops / seconds / 1e15),
        _ => Err(format!("unit: {:?} is no time and no rate of one attention", row.unit)),
    }
}

/// A row about a training run in the words of one: its algorithm is its system.
fn whole_model(row: &Attention, shipped: &Shipped) -> Prediction {
    let unit = squeezed(&row.unit);
    let rate = |of: &str| row.value.filter(|_| unit.starts_with(of));
    let billions = row.model.split_whitespace().find_map(|w| {
        let number = w.trim_start_matches(|c: char| !c.is_ascii_digit()).split(['B', 'b']).next()?;
        let number = number.rsplit('-').next()?;
        number.parse().ok()
    });
    let run = Training {
        system: row.family.clone(),
        gpu: row.gpu.clone(),
        gpus: row.gpus,
        gpus_per_node: row.gpus.map(|g| (g / row.nodes.unwrap_or(1).max(1)).min(8)),
        interconnect: row.link.clone(),
        model: row.model.replace('-', " "),
        params_b: billions,
        seq: row.seq,
        // A row that states no degree of data parallelism has one replica: its batch is that of the step.
        global_batch: row.global_batch.or(row.batch),
        ulysses: row.ulysses,
        ring: row.ring,
        tp: row.tp,
        pp: row.pp,
        cp: row.cp,
        dp: row.dp,
        precision: row.dtype.clone(),
        notes: row.notes.clone(),
        left_out: row.left_out.clone(),
        tflops_per_gpu: rate("tflop"),
        mfu: rate("%mfu").or(rate("mfu")).or(rate("%ofpeak")).map(|v| if v > 1.5 { v / 100.0 } else { v }),
        tokens_per_s_per_gpu: row.value.and_then(|value| match unit.as_str() {
            "tokens/s/gpu" | "tokens/sec/gpu" => Some(value),
            "tokens/s" | "tokens/sec" => Some(value / f64::from(row.gpus?)),
            _ => None,
        }),
        iteration_s: row.value.filter(|_| row.global_batch.or(row.batch).is_some()).and_then(|value| {
            match unit.as_str() {
                "s" | "s/iter" | "s/step" | "sec" | "seconds" => Some(value),
                "ms" | "ms/iter" | "ms/step" => Some(value * 1e-3),
                _ => None,
            }
        }),
        ..Training::default()
    };
    let run = with_longest(row, run);
    let training = ["train", "sft", "finetun", "e2estep"].iter().any(|word| squeezed(&row.pass).contains(word));
    let rates = [run.tflops_per_gpu, run.mfu, run.tokens_per_s_per_gpu, run.iteration_s, run.max_tokens];
    let known = rates.iter().any(Option::is_some);
    if !training || !known {
        return Prediction {
            measured: row.value,
            unit: row.unit.clone(),
            why: vec![format!("{:?} in {:?} is not what this program predicts", row.pass, row.unit)],
            ..Prediction::default()
        };
    }
    training::predict(&run, shipped)
}

/// The longest sequence that ran, where that is what a row is about. Where nothing is said of it, all GPUs share it.
fn with_longest(row: &Attention, run: Training) -> Training {
    let unit = squeezed(&row.unit);
    if !["maxtokens", "tokens(max)", "maxseq", "maxcontext"].iter().any(|word| unit.starts_with(word)) {
        return run;
    }
    let all = run.gpus.filter(|_| [run.ulysses, run.ring, run.cp, run.dp, run.tp, run.pp].iter().all(Option::is_none));
    let by_heads = System::of(&run.system).is(Fact::ByHeads);
    Training {
        max_tokens: row.value,
        ulysses: run.ulysses.or(all.filter(|_| by_heads)),
        cp: run.cp.or(all.filter(|_| !by_heads)),
        global_batch: run.global_batch.or(all.map(|_| 1)),
        ..run
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Arctic's longest sequence on eight H100 (DeepSpeed's tutorial: 3.7 million tokens).
    #[test]
    fn the_longest_sequence_is_predicted_too() {
        let row = Attention {
            gpu: "H100-80GB".into(),
            gpus: Some(8),
            model: "Llama-3.1-8B".into(),
            seq: Some(3_700_000),
            pass: "e2e train".into(),
            family: "ALST (Ulysses + tiled MLP/loss + ckpt offload + ZeRO-3)".into(),
            value: Some(3_700_000.0),
            unit: "max tokens".into(),
            ..Attention::default()
        };
        let found = predicted(row);
        let off = found.predicted.unwrap() / 3_700_000.0;
        assert!((0.85..1.15).contains(&off) && found.unit == "tokens", "{off} {:?}", found.split);
        let share = found.split.contains("ulysses 8") && found.split.contains("offload-activations");
        assert!(share && found.split.contains("mlp-chunks"), "{}", found.split);
    }

    fn predicted(row: Attention) -> Prediction {
        predict(&row, &Shipped::new().unwrap())
    }

    #[test]
    fn a_script_or_a_model_that_is_named_has_the_sizes() {
        let row = |note: &str, model: &str| Attention {
            gpu: "A800".into(),
            gpus: Some(8),
            seq: (!model.is_empty()).then_some(65536),
            pass: "fwd".into(),
            causal: Some(true),
            note: note.into(),
            model: model.into(),
            family: "ring zigzag".into(),
            unit: "ms".into(),
            ..Attention::default()
        };
        let script = predicted(row("benchmark_qkvpacked_func default of Feb 2024", "")).predicted.unwrap();
        let model = predicted(row("", "Qwen3-30B-A3B one layer")).predicted.unwrap();
        // 32 heads in place of 5.
        assert!(model > 3.0 * script && model < 6.5 * script, "{model} {script}");
        assert!(predicted(row("a script", "")).why.iter().any(|why| why.starts_with("head_dim")));
    }

    #[test]
    fn a_whole_model_may_be_measured_in_tokens_of_all_gpus_or_of_one() {
        let row = |value: f64, unit: &str| Attention {
            gpu: "H100".into(),
            gpus: Some(8),
            model: "Llama-3-8B".into(),
            seq: Some(8192),
            global_batch: Some(64),
            pass: "e2e train".into(),
            family: "FSDP".into(),
            value: Some(value),
            unit: unit.into(),
            ..Attention::default()
        };
        let [all, one, step] = [(64_000.0, "tokens/s"), (8_000.0, "tokens/s/GPU"), (8.0, "s")]
            .map(|(value, unit)| predicted(row(value, unit)));
        assert_eq!((all.measured, all.unit.as_str()), (Some(8_000.0), "tokens/s/GPU"));
        assert!(all.predicted.is_some() && all.predicted == one.predicted, "{:?}", all.why);
        let tokens = 64.0 * 8192.0 / 8.0;
        assert!((step.predicted.unwrap() * one.predicted.unwrap() / tokens - 1.0).abs() < 1e-9);
        assert!(predicted(row(1.0, "max steps")).predicted.is_none());
    }

    /// A ring on a node of H100, as a row has it.
    fn ring(change: &dyn Fn(&mut Attention)) -> Prediction {
        let mut row = Attention {
            gpu: "H100".into(),
            gpus: Some(8),
            nodes: Some(1),
            batch: Some(1),
            seq: Some(65_536),
            heads: Some(32),
            kv_heads: Some(8),
            head_dim: Some(128),
            causal: Some(true),
            pass: "fwd".into(),
            family: "ring".into(),
            unit: "ms".into(),
            ..Attention::default()
        };
        change(&mut row);
        predicted(row)
    }

    #[test]
    fn units_and_passes_in_the_spellings_of_sources() {
        let of = |pass: &str, unit: &str| {
            ring(&|row| (row.pass, row.unit) = (pass.into(), unit.into())).predicted.unwrap_or(f64::NAN)
        };
        let ms = of("fwd", "ms");
        for (unit, ratio) in [("s", 1e-3), ("ms/iter", 1.0), ("\u{b5}s", 1e3), ("seconds", 1e-3)] {
            assert!((of("fwd", unit) / ms / ratio - 1.0).abs() < 1e-12, "{unit}");
        }
        assert!((of("fwd", "tokens/s") * ms / 1e3 / 65_536.0 - 1.0).abs() < 1e-12);
        assert!((of("fwd", "TFLOPs/s") / of("fwd", "PFLOP/s") / 1e3 - 1.0).abs() < 1e-12);
        assert!((of("fwd", "% of peak") / of("fwd", "TFLOPs/s") - 100.0 / 989.0).abs() < 1e-6);
        assert_eq!([of("forward", "ms"), of("FWD", "ms")], [ms; 2]);
        assert_eq!(of("forward/backward", "ms"), of("fwd+bwd", "ms"));
        assert!(of("fwd", "lightyears").is_nan());
    }

    #[test]
    fn masks_by_their_names() {
        let of = |mask: &str, causal: Option<bool>| {
            ring(&|row| (row.mask, row.causal) = (mask.into(), causal)).predicted.unwrap()
        };
        let (causal, full) = (of("", Some(true)), of("", Some(false)));
        assert_eq!([of("causal_mask", None), of("full_mask", None), of("non-causal", None)], [causal, full, full]);
        let [window, packed] = ["sliding_window_causal 4096", "causal_document"].map(|mask| of(mask, None));
        assert!(full > 1.5 * causal && window < 0.5 * causal && packed < 0.5 * causal, "{window} {packed} {causal}");
    }

    #[test]
    fn what_has_no_fused_attention_keeps_scores_in_memory() {
        let v100 = ring(&|row| (row.gpu, row.gpus) = ("V100".into(), Some(1)));
        assert!(v100.predicted.is_some() && v100.why.iter().any(|why| why.contains("scores in memory")), "{v100:?}");
        let over = ring(&|row| row.gpu = "V100".into());
        assert!(over.predicted.is_none() && over.why.iter().any(|why| why.contains("no fused attention")), "{over:?}");
        // A node of GPUs that each do the same has the rate of one.
        let alone =
            |gpus| ring(&|row| (row.family, row.gpus, row.unit) = ("flash".into(), Some(gpus), "TFLOPs/s".into()));
        assert_eq!(alone(1).predicted, alone(8).predicted);
    }

    #[test]
    fn what_goes_to_every_rank_by_itself_takes_longer_between_nodes() {
        let row = |family: &str, gpus: u32| Attention {
            gpu: "H100".into(),
            gpus: Some(gpus),
            nodes: Some(gpus / 8),
            seq: Some(8192 * u64::from(gpus)),
            heads: Some(64),
            kv_heads: Some(8),
            head_dim: Some(128),
            causal: Some(false),
            pass: "fwd".into(),
            family: family.into(),
            unit: "ms".into(),
            ..Attention::default()
        };
        let of = |family: &str, gpus| predicted(row(family, gpus)).predicted.unwrap();
        assert!(of("magi_attn-a2av", 64) > 1.01 * of("magi_attn-native", 64));
        assert_eq!(of("magi_attn-a2av", 8), of("magi_attn-native", 8));
    }
}
