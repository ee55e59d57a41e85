//! `foretrain longest`: the longest sequence that fits, by way and by what saves memory.

use super::flags::value::{degree, options, recompute};
use super::flags::{Experts, Fresh, Model, Mtp, Output, Platform, Precision, Title};
use super::progress::bar;
use super::{Answer, list_of};
use crate::act::stamp::Stamp;
use crate::cluster::Cluster;
use crate::error::{Cause, Reason, Result};
use crate::plot;
use crate::report::Row;
use crate::report::human::{Table, bytes, counted, notes, percent, seconds};
use crate::spec::{ClusterSpec, GpuSpec, LlmSpec, Options, Recompute};
use crate::sweep::longest::{Longest, Question, Way, longest};
use clap::Args;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Instant;

#[derive(Args)]
#[command(after_help = "Example: foretrain longest\n         \
    foretrain longest --model llama-3-70b --gpus 64,128 --tp 8 --ring 8,16 --options default,offload-activations --out results/longest-70b\n\n\
    One sequence a replica. Lists are separated by commas; ways of which degrees are given are crossed with each other, and each\n\
    is tried with every set of words of --options. Memory is what a plan's tensors take and the stack sets aside, so that a\n\
    framework that fragments its memory ends before; for layers that are not fused say --stack torch-eager.")]
pub struct Flags {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    platform: Platform,
    /// GPUs; dp is what the other degrees leave of them [default: a node, and where there is a network two, four and eight]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    gpus: Vec<u32>,
    /// Tensor parallelism [default: 1]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    tp: Vec<u32>,
    /// Pipeline stages [default: 1]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    pp: Vec<u32>,
    /// Ulysses degrees [default: with --ring 1, else as many as share a node's heads, and all heads]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    ulysses: Vec<u32>,
    /// Ring degrees [default: with --ulysses 1, else all GPUs (or as many as share a hybrid's states), and what Ulysses leaves]
    #[arg(long, visible_alias = "cp", value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    ring: Vec<u32>,
    #[command(flatten)]
    experts: Experts,
    /// ZeRO stage
    #[arg(long, value_name = "STAGE", default_value = "3", value_parser = clap::value_parser!(u32).range(0..=3))]
    zero: u32,
    /// What the backward pass computes again
    #[arg(long, value_name = "HOW", default_value = "full", value_parser = recompute)]
    recompute: Recompute,
    /// What is tried one after the other: words joined by +, see `foretrain options` [default: what makes sequences longer,
    /// more and more of it]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = options)]
    options: Vec<Options>,
    #[command(flatten)]
    mtp: Mtp,
    #[command(flatten)]
    precision: Precision,
    #[command(flatten)]
    title: Title,
    /// The folder of the study
    #[arg(long, value_name = "DIR", default_value = "results/longest")]
    out: PathBuf,
    #[command(flatten)]
    fresh: Fresh,
    #[command(flatten)]
    output: Output,
}

impl Flags {
    fn question(&self) -> Result<Question> {
        let model = self.mtp.trained(&self.model.name)?;
        let (cluster, gpu) = self.platform.specs()?;
        let measures = match self.options.is_empty() {
            true => Question::default_measures(&model, cluster.host.is_some()),
            false => self.options.clone(),
        };
        Ok(Question {
            title: self.title.text.clone(),
            cluster: self.platform.cluster.clone(),
            stack: self.platform.stack.on(&gpu).into(),
            dtype: self.precision.on(&gpu),
            zero: self.zero,
            recompute: self.recompute,
            no_mtp: self.mtp.no_mtp,
            ways: self.ways(&model, &cluster, &gpu)?,
            model: self.model.name.clone(),
            measures,
        })
    }

    fn ways(&self, model: &LlmSpec, cluster: &ClusterSpec, gpu: &GpuSpec) -> Result<Vec<Way>> {
        let says_split = ![&self.tp, &self.pp, &self.ulysses, &self.ring].iter().all(|list| list.is_empty());
        let mut all = vec![];
        for gpus in self.sizes(cluster, gpu) {
            let usual = Question::default_ways(model, gpus, cluster.gpus_per_node);
            if !says_split && self.experts.ep.is_empty() {
                all.extend(usual);
                continue;
            }
            let splits = match says_split {
                false => usual.iter().map(|way| [way.ulysses, way.ring, 1, 1]).collect(),
                true => crossed([&self.ulysses, &self.ring, &self.tp, &self.pp].map(|list| or(list, 1))),
            };
            let fits = |split: &&[u32; 4]| gpus.is_multiple_of(split.iter().product::<u32>().max(1));
            for &[ulysses, ring, tp, pp] in splits.iter().filter(fits) {
                let ep = self.experts.or_usual(model, gpus, &[pp], cluster.gpus_per_node);
                all.extend(ep.into_iter().map(|ep| Way { gpus, ulysses, ring, tp, pp, ep }));
            }
        }
        if all.is_empty() {
            let why = "no product of --ulysses, --ring, --tp and --pp divides --gpus; change one of them";
            return Err(Cause::Degrees.infeasible(why));
        }
        Ok(all)
    }

    fn sizes(&self, cluster: &ClusterSpec, gpu: &GpuSpec) -> Vec<u32> {
        if !self.gpus.is_empty() {
            return self.gpus.clone();
        }
        let node = cluster.gpus_per_node;
        let nodes = if cluster.scale_out.is_some() { &[1, 2, 4, 8][..] } else { &[1] };
        nodes.iter().map(|n| n * node).filter(|&gpus| Cluster::new(cluster, gpu, gpus).is_ok()).collect()
    }
}

fn or(list: &[u32], one: u32) -> Vec<u32> {
    if list.is_empty() { vec![one] } else { list.to_vec() }
}

/// Every choice of one of each list.
fn crossed(lists: [Vec<u32>; 4]) -> Vec<[u32; 4]> {
    lists.iter().enumerate().fold(vec![[1; 4]], |all, (at, list)| {
        let with = |split: [u32; 4]| {
            list.iter().map(move |&n| {
                let mut split = split;
                split[at] = n;
                split
            })
        };
        all.into_iter().flat_map(with).collect()
    })
}

/// What `--json` prints.
#[derive(Serialize)]
struct Found<'a> {
    study: &'a Question,
    /// What the model's file states that no plan has, and that the cluster's file has fewer GPUs.
    notes: &'a [String],
    files: Vec<String>,
    longest: &'a [Longest],
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let question = flags.question()?;
    let started = Instant::now();
    let bar = bar(0, "{pos}/{len} ways, {eta} left");
    let (found, mut files) = longest(&question, &flags.out, flags.fresh.asked, &|there, all| {
        bar.set_length(all as u64);
        bar.set_position(there as u64);
    })?;
    bar.finish_and_clear();
    let took = started.elapsed().as_secs_f64();
    files.extend(plot::draw(&flags.out.join("rows.csv"), &flags.out)?);
    let most = question.ways.iter().map(|way| way.gpus).max().unwrap_or(0);
    let beyond = ClusterSpec::find(&question.cluster)?.beyond(most);
    let said: Vec<String> = question.spec()?.notes.into_iter().chain(beyond).collect();
    let mut text = notes(&said) + &render(&question, &found);
    text.push_str(&format!("\n{} lengths; {took:.2} s\n", found.len()));
    files.iter().for_each(|f| text.push_str(&format!("wrote {}\n", f.display())));
    let printed = Found { study: &question, notes: &said, files: list_of(&files), longest: &found };
    let error = found.iter().all(|found| !found.row.feasible).then(|| {
        let why = nearest(&found).or(found.first()).map_or(String::new(), |found| found.beyond.to_string());
        Cause::Longest.infeasible(format!("no way fits, however short its sequences: {why}"))
    });
    Ok(Answer::with_error(text, &printed, error))
}

fn render(question: &Question, found: &[Longest]) -> String {
    let Question { model, cluster, stack, dtype, zero, recompute, measures, .. } = question;
    let with = measures.iter().enumerate().map(|(at, options)| format!("  [{}] {options}\n", at + 1));
    format!(
        "{model} on {cluster}, stack {stack}, {}, zero {zero}, recompute {}, a sequence on each replica\n\n\
         the longest sequence that fits, in tokens (K 1024, M 1024 K)\n{}{}{}{}",
        dtype.name(),
        recompute.name(),
        lengths(measures.len(), found),
        with.collect::<String>(),
        legend(found),
        best(measures.len(), found)
    )
}

/// A line for each way, a column for each of so many measures.
fn lengths(measures: usize, found: &[Longest]) -> String {
    let mut table = Table::new(&format!("><{}", ">".repeat(measures)));
    let numbers = (1..=measures).map(|n| format!("[{n}]"));
    table.row(["GPUs".to_string(), "a sequence over".into()].into_iter().chain(numbers));
    let others = others(found);
    let cell = |found: &Longest| match found.row.feasible {
        true => short(found.row.seq_len) + if is_timed(found) { "" } else { "*" },
        false => others.iter().position(|why| *why == found.beyond.to_string()).map_or("-".into(), letter),
    };
    for way in found.chunks(measures) {
        let row = &way[0].row;
        table.row([row.gpus.to_string(), ranks(row)].into_iter().chain(way.iter().map(cell)));
    }
    table.render("  ")
}

/// What stands in cells that are no length, and what ends lengths other than memory.
fn legend(found: &[Longest]) -> String {
    let line = |mark: &str, why: &str| format!("  {mark:<3} {why}\n");
    let gathers = found.iter().any(|found| found.row.ring > 1 && found.row.options.contains("gather-kv"));
    let gathers = if gathers { "  rings gather all keys and values (gather-kv)\n" } else { "" };
    let mut text = gathers.to_string();
    text += &nearest(found).map_or(String::new(), |found| {
        line("-", &format!("not even {} fits; what comes nearest: {}", short(found.row.seq_len), found.beyond))
    });
    for (at, why) in others(found).into_iter().enumerate() {
        text.push_str(&line(&letter(at), &why));
    }
    let untimed: BTreeSet<String> =
        found.iter().filter(|found| !is_timed(found)).map(|found| found.row.why.to_string()).collect();
    untimed.into_iter().for_each(|why| text.push_str(&line("*", &format!("fits, but has no step: {why}"))));
    let ended = found.iter().filter(|found| found.row.feasible && is_other(&found.beyond));
    let ended: BTreeSet<String> = ended.map(|found| found.beyond.to_string()).collect();
    ended.into_iter().for_each(|why| text.push_str(&format!("  ended by {why}\n")));
    text
}

/// Of those that lack memory for any length the one that lacks least.
fn nearest(found: &[Longest]) -> Option<&Longest> {
    let lacks = found.iter().filter(|found| !found.row.feasible && !is_other(&found.beyond));
    let over = |found: &&Longest| found.row.over().unwrap_or(f64::INFINITY);
    lacks.min_by(|a, b| over(a).total_cmp(&over(b)))
}

/// Of each number of GPUs the way and the measures that bring the longest.
fn best(measures: usize, found: &[Longest]) -> String {
    let mut table = Table::new("><<>>><");
    table.row(["GPUs", "a sequence over", "with", "longest", "step", "MFU", "what ends it"].map(String::from));
    let mut any = false;
    for of_gpus in found.chunk_by(|a, b| a.row.gpus == b.row.gpus) {
        // Of equal ones the first, which saves least.
        let fits = of_gpus.iter().enumerate().filter(|(_, found)| found.row.feasible);
        let Some((at, found)) = fits.max_by_key(|(at, f)| (f.row.seq_len, Reverse(*at))) else { continue };
        let row = &found.row;
        any = true;
        table.row([
            row.gpus.to_string(),
            ranks(row),
            format!("[{}]", at % measures + 1),
            short(row.seq_len),
            row.step_time_s.map_or_else(|| untold(row), seconds),
            row.mfu.map_or("-".into(), percent),
            filled(found),
        ]);
    }
    if any { format!("\nthe longest of each\n{}", table.render("  ")) } else { String::new() }
}

/// Whether it is no want of memory.
fn is_other(why: &Reason) -> bool {
    *why != Reason::default() && !why.cause.is_memory()
}

/// Why ways have no length at all, other than for want of memory: each once, in order.
fn others(found: &[Longest]) -> Vec<String> {
    let all = found.iter().filter(|found| !found.row.feasible && is_other(&found.beyond));
    let all: BTreeSet<String> = all.map(|found| found.beyond.to_string()).collect();
    all.into_iter().collect()
}

/// Of reasons: (a), (b), .. (z), (aa).
fn letter(at: usize) -> String {
    let letter = char::from(b'a' + (at % 26) as u8).to_string();
    format!("({})", letter.repeat(at / 26 + 1))
}

/// Whether its step is known, if it fits.
fn is_timed(found: &Longest) -> bool {
    !found.row.feasible || found.row.step_time_s.is_some()
}

/// The step of a row that fits and has no time.
fn untold(row: &Row) -> String {
    if row.why.cause == Cause::Time { format!("> {} h", Stamp::HOURS) } else { "-".into() }
}

/// `1 GPU`, `ulysses 8 x ring 2`.
fn ranks(row: &Row) -> String {
    let degrees = [("ulysses", row.ulysses), ("ring", row.ring), ("tp", row.tp), ("pp", row.pp)];
    let said: Vec<String> = degrees.iter().filter(|(_, n)| *n > 1).map(|(name, n)| format!("{name} {n}")).collect();
    let said = if said.is_empty() { counted(1u32, "GPU") } else { said.join(" x ") };
    if row.ep > 1 { format!("{said}, ep {}", row.ep) } else { said }
}

/// In K throughout: a column is compared by eye, and what stands there can be typed.
fn short(n: u64) -> String {
    if n > 0 && n.is_multiple_of(1 << 10) { format!("{} K", n >> 10) } else { n.to_string() }
}

/// Which memory is full, and of what.
fn filled(Longest { row, beyond }: &Longest) -> String {
    let host = bytes(row.host_mem_bytes.unwrap_or(0) as f64);
    if beyond.cause == Cause::HostMemory {
        return format!("the host's memory: {host} a rank");
    }
    if is_other(beyond) {
        return beyond.parts().0.into();
    }
    let parts = [
        ("weights", row.mem_params_bytes),
        ("gradients", row.mem_grads_bytes),
        ("optimizer", row.mem_optimizer_bytes),
        ("activations", row.mem_activations_bytes),
        ("workspace", row.mem_workspace_bytes),
        ("buffers of communication", row.mem_comm_bytes),
    ];
    let (name, most) = parts.into_iter().max_by_key(|(_, bytes)| *bytes).expect("a list");
    let away =
        if row.host_mem_bytes.is_some_and(|n| n > 0) { format!(", {host} in the host's") } else { String::new() };
    let [most, all] = [most, row.peak_mem_bytes].map(|n| bytes(n.unwrap_or(0) as f64));
    format!("the GPU's memory: {name} {most} of {all}{away}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(seq_len: Option<u64>, (step_time_s, why): (Option<f64>, &str), beyond: &str) -> Longest {
        let row = Row {
            gpus: 8,
            ring: 8,
            ulysses: 1,
            tp: 1,
            pp: 1,
            seq_len: seq_len.unwrap_or(1024),
            feasible: seq_len.is_some(),
            step_time_s,
            why: why.into(),
            peak_mem_bytes: Some(beyond.len() as u64),
            mem_room_bytes: Some(0),
            ..Row::default()
        };
        Longest { row, beyond: beyond.into() }
    }

    /// A cell without a length says why by its own mark, want of memory too.
    #[test]
    fn every_mark_of_the_table_is_explained_by_its_own_reason() {
        let (none, memory) = ((None, ""), "memory: needs 9 GiB of 8 GiB");
        let all = [
            found(None, none, memory),
            found(None, none, "memory: needs 12 GiB of 8 GiB"),
            found(None, none, "options: fpdt-16 needs ring 1"),
            found(Some(2 << 20), (None, "time: a step of more than 20 hours"), memory),
        ];
        let (table, legend) = (lengths(4, &all), legend(&all));
        let cells: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().skip(3).collect();
        assert_eq!(cells, ["-", "-", "(a)", "2048", "K*"], "{table}");
        let want = "  -   not even 1 K fits; what comes nearest: memory: needs 9 GiB of 8 GiB\n  (a) options: fpdt-16 needs ring 1\n  \
                    *   fits, but has no step: time: a step of more than 20 hours\n";
        assert_eq!(legend, want);
        assert!(best(4, &all).contains(" > 20 h "), "{}", best(4, &all));
        assert_eq!(
            nearest(&all).unwrap().beyond,
            memory.into(),
            "of what does not fit at all, the error says this one, too"
        );
        assert_eq!([0, 25, 26].map(letter), ["(a)", "(z)", "(aa)"]);
    }
}
