//! Runs of mixtures of experts: their layers, the ranks that their experts are spread over, and who carries the rows.

use crate::published::measured::convention::Convention;
use crate::published::row::case::{Experts, Training};
use crate::published::row::words::{affirmed, squeezed, told};
use crate::published::software::recipe::{self, BESIDE};
use crate::published::software::system::System;
use crate::published::software::table::Fact;
use crate::routing::Routing::RoundRobin;
use crate::spec::{Capacity, Gate, GroupScore, Groups, LlmSpec, MlaSpec, MoeSpec, MtpSpec, Parallelism, Score};
use crate::strategy::expert::Routing;

/// DeepSeek-V2 and -V3 alike (arXiv:2405.04434, section 2.1; arXiv:2412.19437, section 4.2).
const LATENT: MlaSpec = MlaSpec { q_lora: None, kv_lora: 512, rope_dim: 64, nope_dim: 128, v_dim: 128 };

/// `model` with the experts, the heads and the attention of the mixture that is stated.
pub fn mixed(model: LlmSpec, run: &Training) -> Result<LlmSpec, String> {
    let Some(stated) = &run.experts else { return Ok(model) };
    let missing = |what: &str| format!("experts: {what} is not stated");
    let moe = MoeSpec {
        experts: stated.n.ok_or_else(|| missing("n"))?,
        top_k: stated.top_k.ok_or_else(|| missing("topk"))?,
        ffn: stated.ffn.or(run.ffn).ok_or_else(|| missing("moe_ffn"))?,
        shared_ffn: stated.shared_ffn.unwrap_or(stated.shared.unwrap_or(0) * stated.ffn.unwrap_or(0)),
        dense_layers: stated.dense_layers.unwrap_or(0),
        every: stated.every.unwrap_or(0),
        gate: gate(stated),
        groups: groups(run, stated),
        ..MoeSpec::default()
    };
    let mla = stated.kv_lora.map(|kv_lora| MlaSpec { q_lora: stated.q_lora, kv_lora, ..LATENT });
    let mut mixed = LlmSpec { moe: Some(moe), mla, ..model };
    if let (Some(window), Some(seq)) = (stated.window, run.seq) {
        mixed.window = Some(between(window, seq));
    }
    // Recipes of pipelines take layers off the stage that has the module, and do not say how many.
    if is_deepseek_v3(run, stated) && run.pp.unwrap_or(1) == 1 {
        let ahead = Some(MtpSpec { depth: 1, weight: MtpSpec::WEIGHT, pattern: vec![] });
        let with = LlmSpec { mtp: ahead, ..mixed.clone() };
        if predicts_ahead(run, &mixed, &with) {
            return Ok(with);
        }
    }
    Ok(mixed)
}

/// The capacity of experts whose rows are picked by products with masks: with a `capacity_factor` above 0, where nothing
/// else is said to carry them.
pub fn masked(run: &Training, model: &LlmSpec) -> Option<Capacity> {
    let stated = run.experts.as_ref()?;
    let otherwise = ["deepep", "groupedproducts", "groupedgemm", "megablox", "dropless", "gmm"];
    let said = squeezed(&run.system) + &squeezed(&affirmed(&run.notes));
    let masks = model.moe.is_some() && System::of(&run.system).is(Fact::MasksRows);
    if !masks || otherwise.iter().any(|word| said.contains(word)) {
        return None;
    }
    let factor = stated.capacity.or_else(|| [&run.system, &run.notes].into_iter().find_map(|text| factor(text)))?;
    (0.01..=100.0).contains(&factor).then_some(Capacity::Pad((factor * 100.0).round() as u32))
}

/// The number behind "capacity factor".
fn factor(text: &str) -> Option<f64> {
    let text = text.to_lowercase();
    let behind = &text[text.find("capacity factor")? + "capacity factor".len()..];
    let number: String = behind.trim_start().chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    number.trim_end_matches('.').parse().ok()
}

/// Whether a run is said to train without the module of multi-token prediction that its model has.
pub fn is_without_ahead(run: &Training) -> bool {
    let names = |text: &str| ["multitoken", "mtp"].iter().any(|word| squeezed(text).contains(word));
    [&run.system, &run.model, &run.notes].iter().any(|text| names(&told(text)) && !names(&affirmed(text)))
}

fn is_deepseek_v3(run: &Training, stated: &Experts) -> bool {
    squeezed(&run.model).contains("deepseekv3") && stated.n == Some(256)
}

/// Whether a run trains the module of multi-token prediction that the model has: where its source prints FLOPs and tokens, the
/// FLOPs of a token say so. DeepSeek's own training does, though its figures do not count it.
fn predicts_ahead(run: &Training, without: &LlmSpec, with: &LlmSpec) -> bool {
    let (Some(tflops), Some(seq)) = (run.tflops_per_gpu, run.seq) else { return true };
    let tokens = run
        .tokens_per_s_per_gpu
        .or_else(|| Some(run.global_batch? as f64 * seq as f64 / run.iteration_s? / f64::from(run.gpus?)));
    let Some(tokens) = tokens.filter(|_| !is_deepseeks(run)) else { return true };
    let far = |model: &LlmSpec| {
        let of = |causal| Convention { causal, recompute: false }.flops_per_token(model, seq);
        [true, false]
            .map(|causal| (of(causal) * tokens / tflops / 1e12).ln().abs())
            .into_iter()
            .fold(f64::MAX, f64::min)
    };
    far(with) <= far(without)
}

/// DeepSeek-V3's tokens keep to four of eight groups, which nodes hold (arXiv:2412.19437, section 4.2).
fn groups(run: &Training, stated: &Experts) -> Option<Groups> {
    is_deepseek_v3(run, stated).then_some(Groups { count: 8, kept: 4, score: GroupScore::TwoBest })
}

fn gate(stated: &Experts) -> Gate {
    // Costs are the same; a group of models has both.
    let score = if stated.kv_lora.is_some() { Score::Sigmoid } else { Score::Softmax };
    Gate { score, ..Gate::default() }
}

/// One window for layers that have one and layers that have none in turn (GPT-OSS, arXiv:2508.10925, section 2.2): a token sees as
/// many keys in it as it does on average. Of a window w it sees w - w^2/2s.
fn between(window: u64, seq: u64) -> u64 {
    let (w, s) = (window.min(seq) as f64, seq as f64);
    let seen = (w - w * w / (2.0 * s) + s / 2.0) / 2.0;
    (s - (s * s - 2.0 * s * seen).max(0.0).sqrt()).round() as u64
}

/// Ranks that the experts are spread over, of those of a pipeline stage: as many as are stated, or what of them divides
/// both. Where nobody says: as many as a node has, or as a recipe has.
pub fn ep(run: &Training, model: &LlmSpec, stage: u32, node: u32) -> u32 {
    let Some(moe) = model.moe else { return 1 };
    let fits = |n: &u32| stage.is_multiple_of(*n) && moe.experts.is_multiple_of(u64::from(*n));
    let habit = || System::of(&run.system).first(|fact| if let Fact::ExpertRanks(n) = fact { Some(n) } else { None });
    (1..=run.ep.or_else(habit).unwrap_or(node).min(stage)).rev().find(fits).unwrap_or(1)
}

/// What is to be said where nobody says over how many ranks experts are spread. Trainers of PyTorch and JAX leave them whole by
/// default, and ZeRO 3 gathers them; with that rule runs of TRL, 25 to 69 % too fast, would be 30 to 99 %.
pub fn assumed_ep(run: &Training, model: &LlmSpec, par: &Parallelism) -> Option<String> {
    let unsaid = run.ep.is_none() && model.moe.is_some();
    unsaid.then(|| {
        format!(
            "ep: not stated; experts over {} taken",
            if par.ep == 1 { "one rank".into() } else { format!("{} ranks", par.ep) }
        )
    })
}

/// Experts on each of the ranks that they are spread over; 1 where there are none.
pub fn local(model: &LlmSpec, ep: u32) -> u64 {
    model.moe.map_or(1, |moe| (moe.experts / u64::from(ep.max(1))).max(1))
}

/// What is to be said where a stage has not the ranks that experts are stated to be spread over.
pub fn parted(run: &Training, model: &LlmSpec, par: &Parallelism) -> Option<String> {
    let stated = run.ep.filter(|ep| model.moe.is_some() && *ep != par.ep)?;
    let ranks = par.dp * par.tp * par.ulysses * par.ring;
    Some(format!("ep: {stated} stated; {} taken, as a stage has {ranks} ranks", par.ep))
}

/// How tokens choose experts. Sources force them to do it evenly, or near to it: Megatron Core by random numbers, torchtitan
/// (`_debug_force_load_balance_routing` of torchtitan/models/moe.py) and the gate of NeMo AutoModel's benchmarks
/// (`FakeBalancedGate`, docs/performance-summary.md@01926a5) in a row, so that hardly any row leaves its node.
pub fn routing(run: &Training) -> Routing {
    let (system, notes) = (System::of(&run.system), squeezed(&affirmed(&run.notes)));
    let forced = ["forced", "forcebalanced", "forceloadbalance"].iter().any(|word| notes.contains(word));
    if system.is(Fact::BalancedInTurn) || forced && system.is(Fact::ForcedInTurn) {
        return Routing::Traced { routing: RoundRobin, seed: 1 };
    }
    Routing::Balanced
}

/// DeepSeek's own training, whose kernels came to be DeepEP: rows travel there in FP8 (arXiv:2412.19437, section 3.3.3), beside
/// the other half of a pair of microbatches (section 3.2.1), and what latent attention projects up is made again (3.2.3).
const DEEPSEEK: &[&str] = &["dispatch-deepep-v1-normal", "dispatch-fp8", BESIDE, "recompute-mla-up"];

/// The words of who carries the rows, by what a source calls it; Megatron-LM's own all-to-all where it says nothing.
pub fn dispatch(run: &Training) -> Vec<&'static str> {
    let mut words = carried(run, &squeezed(&run.system)).to_vec();
    if is_beside(run) && !words.contains(&BESIDE) {
        words.push(BESIDE);
    }
    if is_dualpipe(run) {
        words.push("dualpipe-v");
    }
    // Megatron Core asks for an interleaved pipeline, or none.
    let is_megatron = System::of(&run.system).is(Fact::InterleavedExchange);
    let plain = run.pp.unwrap_or(1) > 1 && run.vp.unwrap_or(1) == 1 && is_megatron;
    words.retain(|word| *word != BESIDE || !plain);
    words
}

/// Whether a source says that rows travel beside other work: "EP A2A overlap", "exchange overlapped (1F1B)", "overlap of
/// all-to-all".
fn is_beside(run: &Training) -> bool {
    let said = affirmed(&run.system) + &affirmed(&run.notes);
    let rows = ["a2a", "alltoall", "exchange", "1f1boverlap", "epoverlap", "hybridep+", "expertcommunication"];
    // What tensors cut by heads and stages of a pipeline send is something else.
    let others = ["ulysses", "heads", "p2p"];
    let has = |clause: &str, words: &[&str]| words.iter().any(|word| clause.contains(word));
    let says = |clause: String| clause.contains("overlap") && has(&clause, &rows) && !has(&clause, &others);
    said.split(';').map(squeezed).any(says)
}

/// DeepSeek's own software.
pub fn is_deepseeks(run: &Training) -> bool {
    System::of(&run.system).is(Fact::DeepSeeks)
}

/// Its pipelines: DualPipe's schedule, of which plans have the form with one copy of the weights and two chunks on each of
/// as many GPUs.
pub fn is_dualpipe(run: &Training) -> bool {
    run.pp.unwrap_or(1) > 1 && run.vp.is_none() && is_deepseeks(run)
}

/// Libraries of kernels that carry rows.
const LIBRARIES: [(&str, &[&str]); 2] =
    [("hybridep", &["dispatch-hybrid-ep"]), ("deepep", &["dispatch-deepep-v1-normal"])];

/// Who carries rows: a library, which notes tell as well, or what a system has; nothing is known here of AMD's ports of the
/// libraries. Where nobody is named, they are those of the recipes.
fn carried(run: &Training, system: &str) -> &'static [&'static str] {
    let notes = squeezed(&affirmed(&run.notes));
    let ported = squeezed(&run.gpu).starts_with("mi");
    let library = |text: &str| LIBRARIES.iter().find(|(name, _)| text.contains(name)).map(|(_, words)| *words);
    let of_system = || match () {
        () if is_deepseeks(run) => Some(DEEPSEEK),
        () if system.contains("allgather") => Some(&["dispatch-allgather"][..]),
        () => None,
    };
    let named = library(system).or_else(of_system).or_else(|| library(&notes).filter(|_| !ported));
    let own = ["dispatcher", "alltoall"].iter().any(|word| system.contains(word));
    let by_recipe = || recipe::of(run).filter(|_| !own).map(|recipe| recipe.words);
    named.or_else(by_recipe).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::Shipped;
    use crate::published::model::sizes;
    use crate::published::outcome::verdict::Prediction;
    use crate::published::prediction::training::predict;
    use crate::published::software::habits::Habits;

    /// A sharded run stays so, whatever its model predicts ahead.
    #[test]
    fn nothing_is_predicted_ahead_where_a_source_says_so_or_weights_are_sharded() {
        let run = Training {
            model: "DeepSeek-V3".into(),
            gpu: "B200".into(),
            gpus: Some(64),
            seq: Some(4096),
            global_batch: Some(64),
            tokens_per_s_per_gpu: Some(1000.0),
            ..Training::default()
        };
        let run = |zero: &str, notes: &str| Training { zero: zero.into(), notes: notes.into(), ..run.clone() };
        let depth = |notes: &str| {
            let model = sizes::model(&run("", notes), Habits::of("")).unwrap().0;
            model.mtp.map(|mtp| mtp.depth)
        };
        let said = ["", "no multi-token prediction", "no MTP", "MTP not stated", "MTP of one layer"].map(depth);
        assert_eq!(said, [Some(1), None, None, Some(1), Some(1)]);
        let found = predict(&run("FSDP", ""), &Shipped::new().unwrap());
        assert!(found.split.contains("zero 3"), "{found:?}");
        assert!(found.why.iter().any(|why| why.contains("without the module of multi-token")), "{found:?}");
    }

    #[test]
    fn experts_that_a_stage_has_no_ranks_for_and_plans_that_do_not_fit_are_told() {
        let run = Training {
            model: "DeepSeek-V3".into(),
            system: "Megatron-LM".into(),
            gpu: "A100-SXM-80GB".into(),
            gpus: Some(16),
            tp: Some(1),
            ep: Some(16),
            tokens_per_s_per_gpu: Some(100.0),
            ..Training::default()
        };
        let shipped = Shipped::new().unwrap();
        let found = predict(&run, &shipped);
        assert!(found.memory.is_some() && !found.split.contains("x pp 1 "), "{found:?}");
        assert!(found.why.iter().any(|why| why.contains("come nearest")), "{found:?}");
        let told = |found: &Prediction| found.why.iter().any(|why| why.starts_with("ep: 16 stated; 8 taken"));
        let two = predict(&Training { pp: Some(2), ..run.clone() }, &shipped);
        assert!(told(&two) && !told(&predict(&Training { pp: Some(1), ..run.clone() }, &shipped)), "{two:?}");
        let unsaid = |ep| {
            let par = Parallelism { ep: 8, ..Parallelism::default() };
            assumed_ep(&Training { ep, ..run.clone() }, &sizes::model(&run, Habits::of("")).unwrap().0, &par)
        };
        assert_eq!((unsaid(None), unsaid(Some(8))), (Some("ep: not stated; experts over 8 ranks taken".into()), None));
    }

    #[test]
    fn experts_over_a_node_or_as_a_recipe_has_them() {
        let model = LlmSpec { moe: Some(MoeSpec { experts: 128, ..MoeSpec::default() }), ..LlmSpec::default() };
        let of = |system: &str, stage| ep(&Training { system: system.into(), ..Training::default() }, &model, stage, 8);
        let automodel = "NeMo AutoModel (PyTorch FSDP2, TE + DeepEP)";
        assert_eq!([of(automodel, 64), of(automodel, 8), of(automodel, 256), of("torchtitan", 64)], [64, 8, 64, 8]);
    }

    /// Shared experts may be wider than others, and every second layer dense.
    #[test]
    fn widths_of_shared_experts_and_layers_in_turn_are_those_stated() {
        let experts = Experts { n: Some(8), top_k: Some(2), ffn: Some(64), shared: Some(1), ..Experts::default() };
        let of = |experts: Experts| {
            let run = Training { experts: Some(experts), ..Training::default() };
            mixed(LlmSpec { layers: 4, ..LlmSpec::default() }, &run).unwrap()
        };
        let width = |experts: Experts| of(experts).moe.unwrap().shared_ffn;
        assert_eq!([width(experts.clone()), width(Experts { shared_ffn: Some(96), ..experts.clone() })], [64, 96]);
        let turns = of(Experts { every: Some(2), ..experts });
        assert_eq!([0, 1, 2, 3].map(|layer| turns.has_experts(layer)), [false, true, false, true]);
    }

    #[test]
    fn gates_of_benchmarks_give_experts_out_in_a_row() {
        let of = |system: &str, notes: &str| {
            routing(&Training { system: system.into(), notes: notes.into(), ..Training::default() })
                != Routing::Balanced
        };
        assert!(of("NeMo AutoModel (PyTorch FSDP2, TE + DeepEP)", ""));
        assert!(of("torchtitan (FSDP2 + EP)", "experts forced to be even") && !of("torchtitan (FSDP2 + EP)", ""));
        assert!(!of("Megatron-Core MoE", "force-balanced"));
    }

    #[test]
    fn recipes_by_model_gpu_and_release() {
        let words = |system: &str, model: &str, gpu: &str, [pp, vp]: [u32; 2], notes: &str| {
            let (system, model, gpu, notes) = (system.into(), model.into(), gpu.into(), notes.into());
            dispatch(&Training { system, model, gpu, notes, pp: Some(pp), vp: Some(vp), ..Training::default() })
        };
        let bridge = "NeMo/Megatron-Bridge 26.08";
        assert_eq!(words(bridge, "DeepSeek-V3", "GB300", [2, 8], ""), ["dispatch-hybrid-ep", BESIDE]);
        let own = "NeMo/Megatron-Bridge 26.08, NCCL all-to-all";
        assert!(words(own, "DeepSeek-V3", "GB300", [2, 8], "").is_empty());
        assert_eq!(words(bridge, "DeepSeek-V3", "GB300", [2, 1], ""), ["dispatch-hybrid-ep"]);
        assert_eq!(words("NeMo/Megatron-Bridge 26.04.01", "DeepSeek-V3", "GB300", [2, 8], ""), ["dispatch-hybrid-ep"]);
        assert_eq!(words("NeMo/Megatron-Bridge 26.06.01", "DeepSeek-V3", "GB200", [4, 4], "")[1], BESIDE);
        assert_eq!(words(bridge, "Qwen3-235B-A22B", "H100-SXM", [8, 4], ""), [BESIDE]);
        assert_eq!(words("DeepSeek HAI-LLM (DualPipe)", "DeepSeek-V3", "H800", [16, 1], ""), DEEPSEEK);
        assert_eq!(words("DeepSeek-V3 pretraining", "", "2048 H800", [16, 1], ""), DEEPSEEK);
        let folded = Training { system: "DeepSeek-V3 pretraining".into(), pp: Some(16), ..Training::default() };
        assert_eq!(dispatch(&folded).last(), Some(&"dualpipe-v"));
        let core = "Megatron-Core MoE, dispatcher DeepEP";
        assert_eq!(words(core, "", "H100", [8, 4], "+1f1b A2A overlap"), ["dispatch-deepep-v1-normal", BESIDE]);
        assert_eq!(words(core, "", "H100", [8, 4], "EP overlap off"), ["dispatch-deepep-v1-normal"]);
        let torch = "PyTorch FSDP2";
        assert_eq!(words(torch, "", "H100", [1, 1], "DeepEP"), ["dispatch-deepep-v1-normal"]);
        assert!(words(torch, "", "H100", [1, 1], "no DeepEP").is_empty());
        assert!(words(torch, "", "MI355X", [1, 1], "DeepEP").is_empty());
    }

    #[test]
    fn rows_travel_beside_other_work_in_many_words() {
        let of = |notes: &str| is_beside(&Training { notes: notes.into(), ..Training::default() });
        for told in ["overlap of all-to-all (1F1B)", "exchange overlapped (1F1B)", "EP A2A overlap", "moe_a2a_overlap"]
        {
            assert!(of(told), "{told}");
        }
        for other in ["no overlap of the exchange", "exchange not overlapped", "TP overlap; Ulysses by all-to-all", ""]
        {
            assert!(!of(other), "{other}");
        }
    }
}
