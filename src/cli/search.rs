//! `foretrain search`: which parallelism is fastest.

use super::chosen::split_by_nodes;
use super::flags::value::{count, degree, dispatch, options, recompute};
use super::flags::{BatchSize, Fresh, Model, Mtp, Output, Packing, Platform, Precision, of_experts};
use super::interrupt::Interrupt;
use super::progress::bar;
use super::{Answer, list_of, software};
use crate::error::{Cause, Error, Result};
use crate::plot;
use crate::report::Row;
use crate::report::human::{self, Table, bytes, packed, percent, seconds, tokens};
use crate::report::record;
use crate::spec::{Dispatch, LlmSpec, Options, Recompute, Schedule};
use crate::sweep::search::{
    CEILING, Counts, Found, Nearest, Numerics, Progress, Question, Space, Stop, Value, ends, search,
};
use crate::sweep::{Case, Played, Point, usual_gpus};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args)]
#[command(after_help = "Example: foretrain search --model llama-3-70b --gpus 256 --seq-len 32K\n         \
    foretrain search --model deepseek-v3 --cluster h800-2k-mpft --gpus 2048 --seq-len 4K --global-batch 15360 --out results/dsv3\n         \
    foretrain search --model llama-3.1-405b --cluster h100-24k-roce --gpus 8192 --seq-len 8K --global-batch 2048 --schedules 1f1b,interleaved --tp 8\n\n\
Lists are separated by commas: a choice is among their values, and what is not said is open. Every way has a bound of its step;\n\
the most promising are costed first, until none that is left can be among the best. Then words of `foretrain options` that\n\
leave degrees alone, and stages of as many layers as keep all of them busy, are tried on the best three, and words that save memory on ways that lack nothing else and may be faster.\n\
All that is by the walk of one rank, which sends at full rate. At last the best with and without words are played event by event,\n\
as `foretrain simulate` does, where ranks that share a link get in each other's way, and stand in the order of that.\n\
Words that change numerics (fp8, dispatch-fp8, bf16-grads ..) are costed on the fastest, and not chosen. With --out rows are\n\
written as they are found, and a search that was stopped goes on. A dense model over hundreds of GPUs takes seconds, a large\n\
mixture with everything open minutes: --within 5, and lists of your own, shorten that.")]
pub struct Flags {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    platform: Platform,
    /// GPUs; dp is what the other degrees leave of them [default: 64, or what the only node has; on CPUs 8]
    #[arg(long, value_name = "N", value_parser = degree)]
    gpus: Option<u32>,
    /// Tokens of a sequence; each length is searched by itself
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count, default_value = "8K")]
    seq_len: Vec<u64>,
    #[command(flatten)]
    batch: BatchSize,
    /// How many of the fastest are found for certain
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u64).range(1..=1000))]
    best: u64,
    /// Percent that a way which was not costed may be faster by than the slowest of these: fewer ways have to be costed
    #[arg(long, value_name = "PERCENT", default_value = "0", value_parser = slack)]
    within: f64,
    /// Percent of a GPU's memory that every way has to leave free, beside what the stack takes: peaks are predicted, not known
    #[arg(long, value_name = "PERCENT", default_value = "0", value_parser = slack)]
    headroom: f64,
    /// Tensor parallelism [default: 1, 2, 4 and 8 within a node]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    tp: Vec<u32>,
    /// Pipeline stages [default: up to 64, as GPUs and layers allow]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    pp: Vec<u32>,
    /// Virtual stages where a pipeline is interleaved [default: those of 2 to 12 that divide its layers]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    vp: Vec<u32>,
    /// Order of microbatches in a pipeline: 1f1b, interleaved, dualpipe-v, zb-h1, zb-v, v-half, v-min [default: the first three]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = schedule)]
    schedules: Vec<Schedule>,
    /// Ulysses degrees [default: powers of two that leave a rank 2K tokens]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    ulysses: Vec<u32>,
    /// Ring degrees [default: powers of two that leave a rank 2K tokens]
    #[arg(long, visible_alias = "cp", value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    ring: Vec<u32>,
    /// Ranks that share the experts of a layer [default: divisors of the experts up to 64]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    ep: Vec<u32>,
    /// Who carries rows to experts [default: nccl, and on Hopper deepep-v1-normal, on Blackwell hybrid-ep]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = dispatch)]
    dispatch: Vec<Dispatch>,
    /// ZeRO stages [default: 1, and without a pipeline 3]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(0..=3))]
    zero: Vec<u32>,
    /// Sequences that a replica computes at a time [default: 1, and 2 and 4 up to 16K tokens a rank]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count)]
    micro_batch: Vec<u64>,
    /// What the backward pass computes again [default: none, full]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = recompute)]
    recompute: Vec<Recompute>,
    /// Words that every way has, e.g. fp8; a list is a choice, too [default: default]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = options)]
    options: Vec<Options>,
    /// How tokens choose experts: words of `foretrain help dispatch`, or a file [default: balanced]
    #[arg(long, value_name = "WORDS")]
    routing: Option<String>,
    #[command(flatten)]
    packing: Packing,
    #[command(flatten)]
    mtp: Mtp,
    #[command(flatten)]
    precision: Precision,
    /// Keep what was costed in this folder, and take from there what is known
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    fresh: Fresh,
    #[command(flatten)]
    output: Output,
}

fn slack(text: &str) -> std::result::Result<f64, String> {
    let percent = text.trim_end_matches('%').parse().ok().filter(|percent| (0.0..=100.0).contains(percent));
    percent.ok_or_else(|| "write percent from 0 to 100, as in 5".into())
}

fn schedule(text: &str) -> std::result::Result<Schedule, String> {
    let known = || Schedule::ALL.map(Schedule::name).join(", ");
    Schedule::ALL.into_iter().find(|s| s.name() == text).ok_or_else(|| format!("{text:?} is none of {}", known()))
}

impl Flags {
    /// The tokens of a step that are given, and a length that they are no multiple of.
    fn odd_length(&self) -> Option<(u64, u64)> {
        let tokens = self.batch.tokens_per_step?;
        let odd = self.seq_len.iter().find(|seq_len| **seq_len > 0 && !tokens.is_multiple_of(**seq_len))?;
        Some((tokens, *odd))
    }

    fn question(&self) -> Result<Question> {
        let (cluster, gpu) = self.platform.specs()?;
        let gpus = self.gpus.unwrap_or_else(|| usual_gpus(&cluster, &gpu));
        if let Some((tokens, odd)) = self.odd_length() {
            let near = tokens.div_ceil(odd) * odd;
            let why = format!("{tokens} are no whole number of sequences of {odd}; e.g. {near} are");
            return Err(Error::spec("the command line", "--tokens-per-step", why));
        }
        let (stack, dtype) = (self.platform.stack.on(&gpu), self.precision.on(&gpu));
        let model = LlmSpec::find(&self.model.name)?;
        of_experts(&model, &[("--dispatch", !self.dispatch.is_empty()), ("--routing", self.routing.is_some())])?;
        let case = Case::new(model, &self.platform.cluster, stack, gpus, Some(dtype))?;
        let question = Question {
            model: self.model.name.clone(),
            cluster: self.platform.cluster.clone(),
            stack: stack.into(),
            gpus,
            dtype,
            seq_len: self.seq_len.clone(),
            batch: self.batch.batch(),
            routing: self.routing.clone(),
            documents: self.packing.documents.clone().unwrap_or_default(),
            no_mtp: self.mtp.no_mtp,
            best: self.best as usize,
            slack: self.within / 100.0,
            headroom: self.headroom / 100.0,
            space: self.space(&case),
        };
        question.check()?;
        Ok(question)
    }

    /// What is usual, but for what is said.
    fn space(&self, case: &Case) -> Space {
        let usual = Space::usual(case, self.seq_len.iter().copied().max().unwrap_or(1));
        fn or<T: Clone>(said: &[T], usual: Vec<T>) -> Vec<T> {
            if said.is_empty() { usual } else { said.to_vec() }
        }
        let says_split = !self.ulysses.is_empty() || !self.ring.is_empty();
        // Whoever says one of the two wants no other ways to share the sequence.
        let one = |usual: Vec<u32>| if says_split { vec![1] } else { usual };
        Space {
            tp: or(&self.tp, usual.tp),
            pp: or(&self.pp, usual.pp),
            vp: or(&self.vp, usual.vp),
            ulysses: or(&self.ulysses, one(usual.ulysses)),
            ring: or(&self.ring, one(usual.ring)),
            ep: or(&self.ep, usual.ep),
            zero: or(&self.zero, usual.zero),
            micro_batch: or(&self.micro_batch, usual.micro_batch),
            recompute: or(&self.recompute, usual.recompute),
            schedules: or(&self.schedules, usual.schedules),
            dispatch: or(&self.dispatch, usual.dispatch),
            options: or(&self.options, usual.options),
            least_tokens: if says_split { 1 } else { usual.least_tokens },
        }
    }

    /// That the best way has the last of a usual list, where more could be tried.
    fn at_an_end(&self, question: &Question, found: &Found) -> Result<Vec<String>> {
        let Some(best) = found.best.first().map(|way| Point::of_row(way)) else { return Ok(vec![]) };
        let said = [
            ("tp", self.tp.len()),
            ("pp", self.pp.len()),
            ("ulysses", self.ulysses.len().max(self.ring.len())),
            ("ring", self.ulysses.len().max(self.ring.len())),
            ("ep", self.ep.len()),
            ("micro-batch", self.micro_batch.len()),
        ];
        let open = |name: &str| said.iter().any(|(other, said)| *other == name && *said == 0);
        let ends = ends(&question.case()?, &best).into_iter().filter(|(name, _)| open(name));
        let note = |(name, next)| {
            format!(
                "{name}: the fastest of {} tokens a sequence has the largest that was tried; --{name} {next} may be faster",
                tokens(found.seq_len)
            )
        };
        Ok(ends.map(note).collect())
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Printed<'a> {
    question: &'a Question,
    /// What the model's file states that no plan has, what the cluster's file has not, lists of values that may be too short, and
    /// what is to be known of the fastest.
    notes: &'a [String],
    found: &'a [Found],
    /// Percent that a way which was not costed may be faster by than the last of the fastest.
    within: f64,
    /// How published runs on such GPUs and of such models came out.
    record: &'a [record::Line],
    /// The same of peaks of memory.
    memory_record: &'a [record::Line],
    files: Vec<String>,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let question = flags.question()?;
    let bar = bar(0, "{pos}/{len} {msg}");
    let interrupt = Interrupt::watch()?;
    let progress = |what: &'static str, done: usize, all: usize| {
        bar.set_message(what);
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    };
    let hears = (&progress as Progress, &(|| interrupt.asked()) as Stop);
    let (found, mut files) = search(&question, flags.out.as_deref(), flags.fresh.asked, hears)?;
    bar.finish_and_clear();
    if found.iter().all(|found| found.counts.ways == 0) {
        return Err(nothing_comes_out_even(&question, &found));
    }
    if let Some(dir) = flags.out.as_deref().filter(|_| found.iter().any(|found| !found.best.is_empty())) {
        files.extend(plot::draw(&dir.join("rows.csv"), dir)?);
    }
    let case = question.case()?;
    let [record, memory_record] = software::record(&case);
    let mut notes = case.model.notes.clone();
    notes.extend(case.cluster.spec.beyond(question.gpus));
    for found in &found {
        notes.extend(flags.at_an_end(&question, found)?);
        if let Some((best, fastest)) = found.best.first().zip(found.fastest()) {
            let split = split_by_nodes(&case.cluster, &fastest.parallelism());
            let otherwise = software::notes_of(&case, best)?;
            let (length, batch) = (tokens(found.seq_len), found.global_batch);
            let all = crowded(fastest).into_iter().chain(not_simulated(found)).chain(split).chain(otherwise);
            notes.extend(all.map(|note| format!("of the fastest at {length} x {batch}: {note}")));
        }
    }
    let mut text = human::notes(&notes);
    text.push_str(&format!(
        "{} on {} of {}, stack {}, {}{}\n",
        human::weighed(&question.model, Some(case.model.trained_params())),
        human::counted(question.gpus, "GPU"),
        question.cluster,
        question.stack,
        question.dtype.name(),
        packed(&question.documents)
    ));
    found.iter().for_each(|found| text.push_str(&render(found, flags.within)));
    text.push_str(&format!("\n{}", record::sentence(&record)));
    text.push_str(&record::memory_sentence(&memory_record, "; --headroom has ways leave some free"));
    files.iter().for_each(|f| text.push_str(&format!("wrote {}\n", f.display())));
    let printed = Printed {
        question: &question,
        notes: &notes,
        found: &found,
        within: flags.within,
        record: &record,
        memory_record: &memory_record,
        files: list_of(&files),
    };
    let nothing_fits = found.iter().all(|found| found.best.is_empty());
    let error = (nothing_fits || interrupt.asked()).then(|| {
        if interrupt.asked() {
            let rest = match &flags.out {
                Some(dir) => format!("what was costed is in {}, and the same command goes on", dir.display()),
                None => "with --out what was costed is kept, and the same command goes on".into(),
            };
            return Error::device("search", format!("interrupted: {rest}"));
        }
        // Lengths that no way comes out even for say nothing of either.
        let looked_at = found.iter().filter(|found| found.counts.ways > 0);
        let least = looked_at.min_by_key(|found| (is_too_long(&found.counts), found.seq_len, found.global_batch));
        Cause::Search.infeasible(nothing(least.expect("a length that has ways")))
    });
    Ok(Answer::with_error(text, &printed, error))
}

/// That the best way takes another time when it is played, and what ranks share.
fn crowded(fastest: &Played) -> Option<String> {
    let over = fastest.crowded("by which ways are searched, and what other choices cost is told")?;
    Some(format!("simulated, the best takes {over}"))
}

/// That ways keep their places and times: why the first of them, and how many there are.
fn not_simulated(found: &Found) -> Option<String> {
    let all: Vec<&Played> = found.best.iter().chain(&found.refined).collect();
    let without: Vec<&String> = all.iter().filter_map(|way| way.not_simulated.as_ref()).collect();
    let why = without.first()?;
    Some(format!(
        "{} of {} are not simulated, and stand where they are by their step, as in: {why}",
        without.len(),
        all.len()
    ))
}

/// Whether nothing is known of memory: no way was laid out.
fn is_too_long(counts: &Counts) -> bool {
    counts.too_long > 0 && counts.do_not_fit + counts.too_large == 0
}

/// Why there is no way, and what might make one.
fn nothing(found: &Found) -> String {
    let more = "more GPUs or a shorter sequence might";
    if let Some(why) = found.counts.too_long_why.as_ref().filter(|_| is_too_long(&found.counts)) {
        return format!("all have more ops than are laid out, as in: {why}");
    }
    let Some(Nearest { row, with }) = &found.nearest else { return format!("nothing fits: {more}") };
    let options = if row.options == "default" { String::new() } else { format!(", {}", row.options) };
    let near = format!("what comes nearest, {}{options}: {}", degrees(row), row.why);
    match found.nearest.as_ref().and_then(Nearest::words).zip(with.as_ref()) {
        Some((words, with)) => {
            let plan = bytes(with.peak_mem_bytes.unwrap_or(0) as f64);
            format!("nothing fits; {near}; it fits with --options {words} (a plan of {plan})")
        }
        None => format!("nothing fits: {more}; {near}"),
    }
}

/// No way at all: not for want of memory.
fn nothing_comes_out_even(question: &Question, found: &[Found]) -> Error {
    let refused = found.iter().flat_map(|found| &found.counts.refused).map(|(kind, n)| format!("{n} for {kind}"));
    let refused: Vec<String> = refused.collect();
    if let Some(why) = found.iter().find_map(|found| found.counts.refused_why.as_ref()) {
        let all = refused.join(", ");
        return Cause::Search.infeasible(format!("none of these ways can be built (refused: {all}), as in: {why}"));
    }
    Cause::Search.infeasible(format!(
        "none of these degrees come out even on {} GPUs; tp x pp x ulysses x ring has to divide the GPUs, \
         the replicas that leaves the global batch, and ep the experts and a stage's ranks (1 where there are none), and \
         a schedule that is asked for wants stages: give other degrees, or leave some to the search",
        question.gpus
    ))
}

fn render(found: &Found, within: f64) -> String {
    let mut text = format!(
        "\n{} tokens a sequence, {} sequences a step\n{}",
        tokens(found.seq_len),
        found.global_batch,
        counted(&found.counts)
    );
    if within > 0.0 && found.counts.left == 0 {
        text.push_str(&format!("a way that was not costed may be faster than the last of the fastest by {within} %\n"));
    }
    if found.best.is_empty() && found.counts.left > 0 {
        return text;
    }
    if found.best.is_empty() {
        text.push_str(&format!("\n{}\n", nothing(found)));
        return text;
    }
    text.push_str(&format!("\nthe fastest ways\n{}", ways(&found.best)));
    if !found.refined.is_empty() {
        text.push_str(&format!(
            "\nwith words that make the best of these faster, or others fit\n{}",
            ways(&found.refined)
        ));
    }
    if !found.numerics.is_empty() {
        text.push_str(&format!(
            "\nwhat the fastest takes with words that change its numerics, which no search chooses\n{}",
            numerics(&found.numerics)
        ));
    }
    let shown = |way: &Played| way.step_time_s.unwrap_or(f64::NAN);
    let by_step = found.best.iter().zip(1..).min_by(|(a, _), (b, _)| shown(a).total_cmp(&shown(b)));
    let first =
        by_step.filter(|(_, at)| *at > 1).map(|(_, at)| format!(", by their steps as way {at} above has the best"));
    text.push_str(&format!(
        "\nwhat it costs to choose otherwise: the fastest way found with each value, of those that were searched{}\n{}",
        first.unwrap_or_default(),
        choices(&found.values)
    ));
    text
}

/// What became of all ways.
fn counted(counts: &Counts) -> String {
    let mut text = format!(
        "{} ways, bounded by {} plans: {} do not fit by their bound, {} are too slow by theirs, {} costed",
        counts.ways, counts.probes, counts.too_large, counts.too_slow, counts.costed
    );
    if counts.do_not_fit > 0 {
        text.push_str(&format!(", {} of which do not fit", counts.do_not_fit));
    }
    if counts.too_long > 0 {
        text.push_str(&format!(", {} of which have more ops than are laid out", counts.too_long));
    }
    text.push_str(&format!("; {} more for what other choices cost", counts.beside));
    if counts.spared > 0 {
        text.push_str(&format!(", {} with words that save memory", counts.spared));
    }
    text.push('\n');
    if counts.left > 0 {
        text.push_str(&format!(
            "interrupted: {} ways were not looked at, and a faster one may be among them\n",
            counts.left
        ));
    }
    match counts.nearest_bound {
        Some(least) if least < 1.0 => text.push_str(&format!(
            "a way took {} of its bound: another that was not costed may be faster than the last of these by as much\n",
            percent(least)
        )),
        _ => {}
    }
    text
}

fn ways(rows: &[Played]) -> String {
    let mut table = Table::new(">>>>><<<");
    table.row(["", "step", "simulated", "MFU", "memory", "way", "", "most time goes to"]);
    for (at, row) in rows.iter().enumerate() {
        table.row([
            (at + 1).to_string(),
            seconds(row.step_time_s.unwrap_or(f64::NAN)),
            row.simulated_s.map_or(String::new(), seconds),
            percent(row.mfu.unwrap_or(f64::NAN)),
            row.memory(),
            degrees(row),
            if row.options == "default" { String::new() } else { row.options.clone() },
            row.limit.clone(),
        ]);
    }
    table.render("  ")
}

/// Degrees above one, and what is always said.
fn degrees(row: &Row) -> String {
    let all = [
        ("dp", row.dp),
        ("tp", row.tp),
        ("pp", row.pp),
        ("vp", row.vp),
        ("ulysses", row.ulysses),
        ("ring", row.ring),
        ("ep", row.ep),
    ];
    let above = all.into_iter().filter(|(_, n)| *n > 1).map(|(name, n)| format!("{name} {n}, "));
    let recompute = if row.recompute == "none" { String::new() } else { format!(", recompute {}", row.recompute) };
    let micro_batch = if row.micro_batch > 1 { format!(", micro_batch {}", row.micro_batch) } else { String::new() };
    format!("{}zero {}{micro_batch}{recompute}", above.collect::<String>(), row.zero)
}

/// A line for each word.
fn numerics(all: &[Numerics]) -> String {
    let mut table = Table::new("<>>><");
    for Numerics { words, row, over_fastest } in all {
        table.row([
            words.to_string(),
            seconds(row.step_time_s.unwrap_or(f64::NAN)),
            format!("{:+.1} %", 100.0 * (over_fastest - 1.0)),
            row.peak_mem_bytes.map_or(String::new(), |b| bytes(b as f64)),
            if row.feasible { String::new() } else { row.why.to_string() },
        ]);
    }
    table.render("  ")
}

/// A line for each choice.
fn choices(values: &[Value]) -> String {
    let mut table = Table::new("<<");
    for of_choice in values.chunk_by(|a, b| a.choice == b.choice) {
        let more = |over: f64| 100.0 * (over - 1.0);
        let said = |value: &Value| match (value.over_best, value.at_least) {
            (Some(over), _) if over < 1.0005 => "best".into(),
            (Some(over), None) => format!("+{:.1} %", more(over)),
            // A way that was not costed may be faster.
            (Some(over), Some(_)) => format!("at most +{:.1} %", more(over)),
            (None, Some(least)) => format!("over +{:.0} %", more(least)),
            (None, None) => format!("none found within +{:.0} %", more(CEILING)),
        };
        // Words are told from what is said of them.
        let name = |Value { value, .. }: &Value| match value.parse::<u64>() {
            Ok(_) => value.clone(),
            Err(_) => format!("\"{value}\""),
        };
        let line: Vec<String> = of_choice.iter().map(|value| format!("{} {}", name(value), said(value))).collect();
        table.row([of_choice[0].choice.to_string(), line.join(" | ")]);
    }
    table.render("  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `none none found` was a value and what became of it.
    #[test]
    fn values_that_are_words_are_quoted() {
        let value = |choice, value: &str, over_best| Value {
            choice,
            value: value.into(),
            row: None,
            over_best,
            at_least: None,
        };
        let all = [
            value("recompute", "none", None),
            value("recompute", "full", Some(1.0)),
            value("tp", "8", Some(1.1)),
            Value { at_least: Some(1.05), ..value("tp", "4", Some(1.1)) },
        ];
        let table = choices(&all);
        assert!(table.contains("| 4 at most +10.0 %"), "{table}");
        assert!(table.contains("\"none\" none found within +50 % | \"full\" best"), "{table}");
        assert!(table.contains("8 +10.0 %"), "{table}");
    }
}
