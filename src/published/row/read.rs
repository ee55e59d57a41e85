//! Files of cases, in the three shapes in which they come: a list of training runs, `rows` with what they have in
//! `common`, and `cases` of sequence parallelism.

use super::case::{Attention, Case, Experts, Facts, Training};
use super::fields::Fields;
use super::loose;
use super::tables::{collectives, exchanges, libraries};
use super::words::{is_fp4, is_narrow, squeezed, tokens};
use crate::error::{self, Error, Result};
use crate::published::measured::memory::Counted;
use serde_json::{Map, Value};
use std::path::Path;

/// Reads a file of cases.
///
/// Errors: a file of which nothing can be told, or of whose rows none states anything measured.
pub fn load(path: impl AsRef<Path>) -> Result<Vec<Case>> {
    let path = path.as_ref();
    let text = error::text::spec(path)?;
    let file = path.display().to_string();
    let cases = parse(&file, &text)?;
    if cases.iter().any(|case| case.facts.measure()) {
        return Ok(cases);
    }
    let why = "no row states anything measured that can be predicted; write a time, a rate, a utilization or a memory into one";
    Err(Error::spec(file, "contents", why))
}

/// Reads the text of a file of cases; `file` is what errors call it.
pub fn parse(file: &str, text: &str) -> Result<Vec<Case>> {
    let json: Value = error::json::parse(file, &loose::without_nan(text))?;
    let mut cases = match &json {
        Value::Array(tables) if tables.iter().any(collectives::is_table) => collectives::nccl_tests(file, tables)?,
        Value::Array(rows) => each(file, rows, None, training)?,
        Value::Object(top) if top.contains_key("tables") => operators(file, &top["tables"])?,
        Value::Object(top) => match (top.get("rows"), top.get("cases")) {
            (Some(Value::Array(rows)), _) => each(file, rows, common(file, top)?, training)?,
            (_, Some(Value::Array(cases))) if libraries::is_library(cases) => libraries::library(file, cases),
            (_, Some(Value::Array(cases))) => each(file, cases, None, attention)?,
            _ => return Err(Error::spec(file, "contents", WANTED)),
        },
        _ => return Err(Error::spec(file, "contents", WANTED)),
    };
    if cases.is_empty() {
        return Err(Error::spec(file, "contents", "no case at all; write at least one"));
    }
    make_unique(&mut cases);
    Ok(cases)
}

const WANTED: &str = "neither a list of training runs, nor an object with `rows` and what they have in `common`, nor one \
                      with `cases` of sequence parallelism, nor tables of collectives; see traces/published for one of each";

/// Tables of operators by name, each of the kind that its columns say.
fn operators(file: &str, tables: &Value) -> Result<Vec<Case>> {
    let tables = tables.as_object().ok_or_else(|| Error::spec(file, "tables", "no object; name each table"))?;
    let mut cases = Vec::new();
    for (name, table) in tables {
        let Some(table) = table.as_object() else {
            return Err(Error::spec(file, format!("tables: {name}"), "no object; write its columns and rows"));
        };
        if collectives::is_nccl(table) {
            cases.extend(collectives::operator_table(file, name, table)?);
        } else if exchanges::is_exchange(table) {
            cases.extend(exchanges::operator_table(file, name, table)?);
        }
    }
    Ok(cases)
}

fn common<'a>(file: &str, top: &'a Map<String, Value>) -> Result<Option<&'a Map<String, Value>>> {
    match top.get("common") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(common)) => Ok(Some(common)),
        Some(other) => Err(Error::spec(file, "common", format!("{other} is no object; write the fields of a case"))),
    }
}

fn each(
    file: &str,
    rows: &[Value],
    common: Option<&Map<String, Value>>,
    read: fn(&Fields) -> Result<(String, Facts)>,
) -> Result<Vec<Case>> {
    let one = |(at, row): (usize, &Value)| {
        // Rows of a table have no name; their place in it is one.
        let place = format!("row-{}", at + 1);
        let Some(row) = row.as_object() else {
            let why = Error::spec(file, format!("case {}", at + 1), "no object; write the fields of a case");
            return Case::unread(place, why);
        };
        let mut fields = Fields::new(file, format!("{}", at + 1), row, common);
        fields.id = fields.text("id").ok().flatten().unwrap_or(place);
        match read(&fields) {
            Ok((group, facts)) => Case { id: fields.id, group, facts },
            // One wrong row is no reason to leave the others out.
            Err(why) => Case::unread(fields.id.clone(), why),
        }
    };
    Ok(rows.iter().enumerate().map(one).collect())
}

/// Gives the second of two cases of one name, and any after it, a number.
fn make_unique(cases: &mut [Case]) {
    let mut seen: std::collections::BTreeSet<String> = cases.iter().map(|case| case.id.clone()).collect();
    let mut first = std::collections::BTreeSet::new();
    for case in cases {
        if !first.insert(case.id.clone()) {
            let id = (2..).map(|n| format!("{} ({n})", case.id)).find(|id| !seen.contains(id)).expect("one is free");
            seen.insert(id.clone());
            case.id = id;
        }
    }
}

fn training(f: &Fields) -> Result<(String, Facts)> {
    if f.value("gpu").is_none() && f.value("category").is_some() {
        let why = "a fact about failures or checkpoints is no training run; `goodput` works those out";
        return Err(f.wrong("category", why));
    }
    let text = |field| Ok::<_, Error>(f.text(field)?.unwrap_or_default());
    let run = Training {
        system: text("system")?,
        gpu: text("gpu")?,
        gpus: gpus(f)?,
        gpus_per_node: f.degree("gpus_per_node")?,
        interconnect: text("interconnect")?,
        model: text("model")?,
        params_b: f.number("params_b")?,
        layers: f.count("layers")?,
        hidden: f.count("hidden")?,
        heads: f.count("heads")?,
        kv_heads: f.count("kv_heads")?,
        head_dim: f.count("head_dim")?,
        ffn: f.count("ffn")?,
        gated_ffn: f.flag("gated_ffn")?,
        vocab: f.count("vocab")?,
        experts: mixture(f)?,
        seq: f.count("seq")?,
        global_batch: batch(f)?,
        micro_batch: f.count("micro_batch")?,
        tp: f.degree("tp")?,
        pp: f.degree("pp")?,
        vp: f.degree("vp")?,
        cp: f.degree("cp")?,
        ulysses: f.degree("ulysses")?,
        ring: f.degree("ring")?,
        ep: f.degree("ep")?,
        dp: f.degree("dp")?,
        zero: f.choice("zero")?.unwrap_or_default(),
        seq_parallel: f.flag("seq_parallel")?,
        recompute: f.choice("recompute")?.unwrap_or_default(),
        precision: precision(f)?,
        iteration_s: seconds(f)?,
        tokens_per_s_per_gpu: rate(f)?,
        tflops_per_gpu: f.number("tflops_per_gpu")?,
        flops_convention: text("flops_convention")?,
        mfu: f.share("mfu")?,
        hfu: f.share("hfu")?,
        pair_s: f.number("pair_s")?,
        max_tokens: f.number("max_tokens")?,
        mem_gib: f.number("mem_gib")?,
        mem_stage: f.degree("mem_stage")?,
        mem_kind: counted(f)?,
        notes: text("notes")?,
        left_out: Vec::new(),
    };
    f.know(&["id", "group", "source", "read", "read_kind", "derived", "url", "date", "page", "comment"]);
    f.know(&["iteration_ms", "samples_per_s", "global_batch_tokens", "grad_accum"]);
    let run = Training { left_out: f.left_out(), ..run };
    let group = match f.text("group")? {
        Some(group) => group,
        None => format!("{}, {}", run.system.split(',').next().unwrap_or_default(), run.gpu),
    };
    Ok((group, Facts::Training(Box::new(run))))
}

/// GPUs, also by the nodes and what each has: eight where nobody says, four of superchips.
fn gpus(f: &Fields) -> Result<Option<u32>> {
    let (gpus, nodes, each) = (f.degree("gpus")?, f.degree("nodes")?, f.degree("gpus_per_node")?);
    let named = squeezed(&f.text("gpu")?.unwrap_or_default());
    let usual = if ["gh200", "gb200", "gb300"].iter().any(|name| named.contains(name)) { 4 } else { 8 };
    if let (None, Some(nodes), None) = (gpus, nodes, each) {
        f.note(format!("gpus: not stated; {nodes} nodes of {usual} taken"));
    }
    Ok(gpus.or_else(|| nodes?.checked_mul(each.unwrap_or(usual))))
}

/// Sequences of a step, also by its tokens, or by the microbatches of a replica.
fn batch(f: &Fields) -> Result<Option<u64>> {
    let seq = f.count("seq")?;
    let of_tokens = |tokens: u64| seq.map(|seq| (tokens / seq).max(1));
    let in_tokens = f.value("global_batch").and_then(Value::as_str).is_some_and(|text| text.contains("token"));
    if let (true, Some(tokens)) = (in_tokens, f.number("global_batch")?) {
        return Ok(of_tokens(tokens as u64));
    }
    if let Some(batch) = f.count("global_batch")? {
        return Ok(Some(batch));
    }
    if let Some(tokens) = f.count("global_batch_tokens")? {
        return Ok(of_tokens(tokens));
    }
    let (steps, at_a_time) = (f.count("grad_accum")?, f.count("micro_batch")?);
    let of = |names: &[&str]| -> Result<u64> {
        names.iter().try_fold(1u64, |n, name| Ok(n.saturating_mul(f.degree(name)?.unwrap_or(1).into())))
    };
    let sequence = of(&["cp"])?.max(of(&["ulysses", "ring"])?);
    let replica = of(&["tp", "pp"])?.saturating_mul(sequence);
    let dp = f.degree("dp")?.map(u64::from).or(gpus(f)?.map(|gpus| (u64::from(gpus) / replica).max(1)));
    Ok(steps.zip(dp).and_then(|(steps, dp)| steps.checked_mul(dp)?.checked_mul(at_a_time.unwrap_or(1))))
}

/// The experts of an object of their own, or of a row that has their fields among its own.
fn mixture(f: &Fields) -> Result<Option<Experts>> {
    match f.value("experts") {
        None | Some(Value::Number(_)) => {}
        _ => {
            let Some(inner) = f.inner("experts")? else { return Ok(None) };
            let found = experts(&inner)?;
            inner.know(&["active_params_b"]);
            inner.tell_unasked("experts");
            return Ok(Some(found));
        }
    }
    let mut n = f.degree("experts")?;
    for name in loose::names("n") {
        n = n.or(f.degree(name)?);
    }
    let n = n.map(u64::from).filter(|n| *n > 1);
    Ok(if n.is_some() { Some(Experts { n, ..experts(f)? }) } else { None })
}

/// What a figure of memory is of.
fn counted(f: &Fields) -> Result<Option<Counted>> {
    let Some(said) = f.text("mem_kind")?.filter(|said| !said.is_empty()) else { return Ok(None) };
    let found = Counted::find(&said);
    if found.is_none() {
        f.note(format!("mem_kind: {said:?} is none of {}; taken as if it were not stated", Counted::WORDS));
    }
    Ok(found)
}

/// As stated, or one of eight bits that the system's name says.
fn precision(f: &Fields) -> Result<String> {
    let narrow = |system: String| match () {
        () if is_fp4(&system) => Some("FP4".into()),
        () => is_narrow(&system).then(|| "FP8".into()),
    };
    Ok(f.text("precision")?.or(f.text("system")?.and_then(narrow)).unwrap_or_default())
}

/// Seconds of a step, also by milliseconds or by the sequences of a second.
fn seconds(f: &Fields) -> Result<Option<f64>> {
    if let Some(stated) = f.number("iteration_s")? {
        return Ok(Some(stated));
    }
    let milliseconds = f.number("iteration_ms")?.map(|ms| ms * 1e-3);
    let samples = f.number("samples_per_s")?.zip(batch(f)?).map(|(rate, batch)| batch as f64 / rate);
    Ok(milliseconds.or(samples))
}

/// Tokens that a GPU takes a second, also by those of all of them.
fn rate(f: &Fields) -> Result<Option<f64>> {
    let all = f.number("tokens_per_s")?.zip(gpus(f)?).map(|(rate, gpus)| rate / f64::from(gpus));
    Ok(f.number("tokens_per_s_per_gpu")?.or(all))
}

fn experts(f: &Fields) -> Result<Experts> {
    // None at all is a statement, too.
    let shared = if f.value("shared").and_then(Value::as_u64) == Some(0) { None } else { f.count("shared")? };
    let dense = f.value("dense_layers").and_then(Value::as_u64) == Some(0);
    Ok(Experts {
        n: f.count("n")?,
        top_k: f.count("topk")?,
        shared,
        shared_ffn: f.count("shared_ffn")?,
        every: f.degree("every")?.map(u64::from),
        ffn: f.count("moe_ffn")?,
        dense_layers: if dense { None } else { f.count("dense_layers")? },
        capacity: f.number("capacity_factor")?,
        head_dim: f.count("head_dim")?,
        attn: f.text("attn")?.unwrap_or_default(),
        q_lora: f.count("q_lora")?,
        kv_lora: f.count("kv_lora")?,
        window: count_among_words(f, "swa")?,
    })
}

/// The first number of a field, be it a number or in words ("128 tokens, every second layer").
fn count_among_words(f: &Fields, field: &str) -> Result<Option<u64>> {
    let Some(Value::String(words)) = f.value(field) else { return f.count(field) };
    Ok(tokens(words).iter().find_map(|word| word.parse().ok()))
}

/// A number that some sources write in words ("up to 64"): words are no statement.
fn count_or_words(f: &Fields, field: &str) -> Result<Option<u64>> {
    if f.value(field).is_some_and(Value::is_string) { Ok(None) } else { f.count(field) }
}

fn attention(f: &Fields) -> Result<(String, Facts)> {
    let empty = Map::new();
    let inner = |field: &str| -> Result<Fields> {
        let none = Fields::new(f.file, format!("{}: {field}", f.id), &empty, None);
        Ok(f.inner(field)?.unwrap_or(none))
    };
    let (system, model, algorithm) = (inner("system")?, inner("model")?, inner("algorithm")?);
    let gpus = count_or_words(&system, "gpus")?.map(|n| n as u32);
    let text = |of: &Fields, field| Ok::<_, Error>(of.text(field)?.unwrap_or_default());
    let row = Attention {
        gpu: text(&system, "gpu")?,
        gpus,
        nodes: system.degree("nodes")?,
        link: text(&system, "link")?,
        batch: model.count("batch")?,
        seq: sequence(&model, gpus)?,
        heads: model.count("heads_q")?,
        kv_heads: model.count("heads_kv")?,
        head_dim: model.count("head_dim")?,
        documents: documents(&model)?,
        causal: f.value("causal").and_then(loose::flag),
        pass: text(f, "pass")?,
        dtype: text(f, "dtype")?,
        mask: text(&model, "mask")?,
        window: count_among_words(&model, "window")?,
        model: text(&model, "model")?,
        note: text(&model, "note")?,
        notes: text(f, "notes")?,
        family: text(&algorithm, "family")?,
        variant: text(&algorithm, "variant")?,
        implementation: text(&algorithm, "impl")?,
        kernel: text(&algorithm, "kernel")?,
        packing: text(&algorithm, "packing")?,
        ulysses: algorithm.degree("ulysses_degree")?,
        ring: algorithm.degree("ring_degree")?,
        tp: algorithm.degree("TP")?,
        pp: algorithm.degree("PP")?,
        dp: algorithm.degree("DP")?,
        cp: algorithm.degree("CP")?.or(algorithm.degree("cp")?),
        global_batch: model.count("global_batch")?,
        value: f.number("value")?,
        unit: text(f, "unit")?,
        left_out: Vec::new(),
    };
    let row = Attention { left_out: f.unclear.borrow().clone(), ..row };
    let group = format!("{}, {}", row.family, short_gpu(&row.gpu));
    Ok((group, Facts::Attention(Box::new(row))))
}

/// Tokens of a whole sequence, under whichever name the source gives them.
fn sequence(model: &Fields, gpus: Option<u32>) -> Result<Option<u64>> {
    for name in ["seq_global", "total_tokens_global", "seqlen", "seqlen_as_reported"] {
        if let Some(tokens) = model.count(name)? {
            return Ok(Some(tokens));
        }
    }
    let share = model.count("seq_per_rank")?;
    Ok(share.zip(gpus).map(|(share, gpus)| share * u64::from(gpus)))
}

fn documents(model: &Fields) -> Result<Vec<Vec<u64>>> {
    let name = "cu_seqlens_patterns_times_world_size";
    let Some(value) = model.value(name) else { return Ok(vec![]) };
    serde_json::from_value(value.clone()).map_err(|e| {
        model.wrong(name, format!("{e}; write lists of the boundaries of documents, as in [[0, 4096, 8192]]"))
    })
}

/// The name of a GPU without what a source remarks about it.
fn short_gpu(gpu: &str) -> String {
    let short = gpu.split('(').next().unwrap_or_default().trim();
    if short.is_empty() { "GPU not stated".into() } else { short.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        match parse("c.json", text) {
            Err(why) => why.to_string(),
            Ok(cases) => match &cases[0].facts {
                Facts::Unread(why) => why.clone(),
                facts => panic!("{text}: {facts:?}"),
            },
        }
    }

    #[test]
    fn a_wrong_field_is_named_with_its_case_value_and_remedy() {
        for (text, parts) in [
            (r#"[{"id": "a", "category": "failures", "data": {}}]"#, ["case a: category", "`goodput`"]),
            (r#"[{"id": "a", "layers": 9999}]"#, ["case a: layers: 9999", "extra digits"]),
            (r#"[{"id": "a", "gpu": {}}]"#, ["case a: gpu: {}", "quotes"]),
            (r#"[{"id": "a", "experts": "eight"}]"#, ["case a: experts: \"eight\"", "object"]),
            (r#"{"cases": [{"id": "b", "system": 3}]}"#, ["case b: system", "object"]),
            (r#"{"rows": [7]}"#, ["case 1", "no object"]),
            (r#"{"rows": [], "common": 1}"#, ["common: 1", "no object"]),
            ("[]", ["contents", "at least one"]),
            ("7", ["contents", "list of training runs"]),
            ("[{", ["c.json", "ends early"]),
        ] {
            let said = error(text);
            assert!(parts.iter().all(|p| said.contains(p)), "{text}: {said}");
        }
    }

    #[test]
    fn one_wrong_row_leaves_the_others_and_names_are_made_unique() {
        let text = r#"[{"id": "a", "tp": "2", "mfu": 45, "cp": 0}, {"id": "a", "gpu": {}}, null, {"num_gpus": NaN}]"#;
        let cases = parse("c.json", text).unwrap();
        let ids: Vec<_> = cases.iter().map(|c| c.id.as_str()).collect();
        assert_eq!(ids, ["a", "a (2)", "row-3", "row-4"]);
        let Facts::Training(run) = &cases[0].facts else { panic!("a run") };
        assert_eq!((run.tp, run.mfu, run.cp), (Some(2), Some(0.45), None));
        let unread: Vec<_> = cases.iter().map(|c| matches!(c.facts, Facts::Unread(_))).collect();
        assert_eq!(unread, [false, true, true, false]);
    }

    fn run(text: &str) -> Training {
        match &parse("c.json", text).unwrap()[0].facts {
            Facts::Training(run) => (**run).clone(),
            facts => panic!("{text}: {facts:?}"),
        }
    }

    #[test]
    fn a_number_that_cannot_be_read_is_not_stated() {
        for (field, why) in [
            (r#""layers": "thirty""#, "layers: \"thirty\" is not a number"),
            (r#""mem_kind": "HBM peak""#, "mem_kind: \"HBM peak\" is none of"),
            (r#""layers": -1"#, "layers: -1"),
            (r#""seq": 1.5"#, "seq: 1.5 is not a whole number"),
            (r#""gated_ffn": "maybe""#, "gated_ffn: \"maybe\""),
            (r#""gpus": [8, 16]"#, "gpus: [8,16]"),
            (r#""tp": "2 or 4""#, "tp: \"2 or 4\""),
            (r#""mfu": 480"#, "mfu: 480 is more than all"),
            (r#""speed": "45", "year": null, "etp": 1"#, "not read: speed: \"45\""),
            (r#""hybrid_layers": {"mamba": 24}, "compile": false, "x": {}"#, "not read: hybrid_layers: {\"mamba\":24}"),
            (r#""attention": "unfused", "url": "x""#, "not read: attention: \"unfused\""),
            (r#""experts": {"n": 8, "active_params_b": 2, "drop": 1.25}"#, "not read: experts.drop: 1.25"),
        ] {
            let left_out = run(&format!("[{{{field}, \"pp\": 2}}]")).left_out;
            assert!(left_out.len() == 1 && left_out[0].starts_with(why), "{field}: {left_out:?}");
        }
        assert!(run(r#"[{"id": 7, "gpu": "H100", "tp": "TP2", "mfu": "38-43%", "notes": "x"}]"#).left_out.is_empty());
    }

    #[test]
    fn fields_by_their_other_names() {
        let names = run(
            r#"[{"num_nodes": 8, "gpus_per_node": 8, "num_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 100, "seq_length": 2048, "tp": 2, "vpp": 3,
            "gradient_accumulation_steps": 4, "micro_batch_size": 2, "zero_stage": 3, "sequence_parallel": true,
            "num_experts": 8, "moe_router_topk": 2, "step_time": "900 ms"}]"#,
        );
        let sizes = [names.layers, names.hidden, names.heads, names.kv_heads, names.ffn, names.vocab, names.seq];
        assert_eq!(sizes.map(Option::unwrap), [4, 64, 4, 2, 256, 100, 2048]);
        // 32 replicas of two sequences, four times.
        assert_eq!((names.gpus, names.global_batch, names.vp), (Some(64), Some(256), Some(3)));
        assert_eq!((names.zero.as_str(), names.seq_parallel, names.iteration_s), ("3", Some(true), Some(0.9)));
        let experts = names.experts.unwrap();
        assert_eq!((experts.n, experts.top_k), (Some(8), Some(2)));
        assert!(names.left_out.is_empty(), "{:?}", names.left_out);
        for batch in [r#""global_batch": "4M tokens""#, r#""tokens_per_batch": 4194304"#, r#""batch_size": 1024"#] {
            assert_eq!(run(&format!("[{{{batch}, \"seq\": 4096}}]")).global_batch, Some(1024), "{batch}");
        }
        assert_eq!(run(r#"[{"nodes": 2, "gpu": "GH200"}]"#).gpus, Some(8));
    }

    #[test]
    fn rows_take_what_they_have_in_common_and_are_named_by_their_place() {
        let text =
            r#"{"common": {"gpu": "A100", "system": "Megatron, fp16"}, "rows": [{"tp": 2}, {"tp": 4, "gpu": "H100"}]}"#;
        let cases = parse("c.json", text).unwrap();
        let gpus: Vec<_> = cases
            .iter()
            .map(|c| match &c.facts {
                Facts::Training(t) => (c.id.as_str(), t.gpu.as_str(), t.tp),
                _ => panic!("no training run"),
            })
            .collect();
        assert_eq!(gpus, [("row-1", "A100", Some(2)), ("row-2", "H100", Some(4))]);
        assert_eq!(cases[0].group, "Megatron, A100");
    }

    #[test]
    fn nothing_is_recomputed_where_it_says_none() {
        let text = r#"{"common": {"gpu": "A100", "system": "Megatron-LM", "activation_checkpointing": "None"},
            "rows": [{"tp": 2}, {"tp": 4, "recompute": "full"}, {"tp": 8, "recompute": null}]}"#;
        let cases = parse("c.json", text).unwrap();
        let said = cases.iter().map(|c| if let Facts::Training(t) = &c.facts { t.recompute.as_str() } else { "?" });
        assert_eq!(said.collect::<Vec<_>>(), ["none", "full", "none"]);
    }

    #[test]
    fn words_for_a_number_of_gpus_are_no_statement() {
        let text =
            r#"{"cases": [{"id": "a", "system": {"gpus": "up to 64"}, "model": {}, "algorithm": {"family": "x"}}]}"#;
        assert!(matches!(&parse("c.json", text).unwrap()[0].facts, Facts::Attention(a) if a.gpus.is_none()));
    }
}
