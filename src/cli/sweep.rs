//! `foretrain sweep`: a grid of configurations.

use super::flags::value::{capacity, count, degree, dispatch, options, recompute};
use super::flags::{
    BatchSize, Experts, Fresh, Lengths, Model, Mtp, Output, Packing, Platform, Precision, Title, agree, of_experts,
};
use super::progress::bar;
use super::{Answer, list_of, software};
use crate::error::{Cause, Result};
use crate::plot;
use crate::report::Row;
use crate::report::human::{self, counted, packed, seconds, tokens};
use crate::report::record;
use crate::spec::{Capacity, Dispatch, LlmSpec, Options, Recompute};
use crate::sweep::grid::cross;
use crate::sweep::{Also, Batch, Grid, Study, summary, sweep, usual_gpus};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

#[derive(Args)]
#[command(after_help = "Example: foretrain sweep\n         \
    foretrain sweep --model llama-3-70b --gpus 256 --seq-len 32K,128K,512K --ulysses 1,8 --ring 1,2,4,8 --zero 3 --out results/70b\n\n\
    Lists are separated by commas and crossed with each other. A sweep that was stopped goes on when it is started again.\n\
Rows are by the walk of one rank. Where GPUs share the NICs of a node, or the bridge between its sockets, the five fastest\n\
of each length are simulated, too, as ranks get in each other's way there, and the best way is the best of these.")]
pub struct Flags {
    #[command(flatten)]
    model: Model,
    #[command(flatten)]
    platform: Platform,
    /// GPUs; dp is what the other degrees leave of them [default: 64, or what the only node has; on CPUs 8]
    #[arg(long, value_name = "N", value_parser = degree)]
    gpus: Option<u32>,
    #[command(flatten)]
    lengths: Lengths,
    #[command(flatten)]
    batch: BatchSize,
    /// Sequences that a replica computes at a time
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count, default_value = "1")]
    micro_batch: Vec<u64>,
    /// Tensor parallelism
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree, default_value = "1")]
    tp: Vec<u32>,
    /// Pipeline stages
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree, default_value = "1")]
    pp: Vec<u32>,
    /// Virtual stages of each pipeline stage
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree, default_value = "1")]
    vp: Vec<u32>,
    /// Ulysses degrees [default: with --ring 1, else a choice of both]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    ulysses: Vec<u32>,
    /// Ring degrees [default: with --ulysses 1, else a choice of both]
    #[arg(long, visible_alias = "cp", value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    ring: Vec<u32>,
    #[command(flatten)]
    experts: Experts,
    /// ZeRO stages
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u32).range(0..=3))]
    zero: Vec<u32>,
    /// What the backward pass computes again
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "none,full", value_parser = recompute)]
    recompute: Vec<Recompute>,
    /// Choices of the implementation: words joined by +, see `foretrain options`
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "default", value_parser = options)]
    options: Vec<Options>,
    /// Who carries rows to experts, see `foretrain help estimate`; crossed with --options
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = dispatch)]
    dispatch: Vec<Dispatch>,
    /// Of rows on their way to experts: fp8 with a scale for each 128 elements, or bf16
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = ["bf16", "fp8"])]
    dispatch_dtype: Vec<String>,
    /// How tokens choose experts: words of `foretrain help dispatch`, or a file; drawn from seed 1 [default: balanced]
    #[arg(long, value_name = "WORDS")]
    routing: Option<String>,
    /// Copies of experts, see `foretrain help estimate`; crossed with --options
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    replicas: Vec<u32>,
    /// What an expert takes of a rank's tokens, see `foretrain help estimate`; crossed with --options
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = capacity)]
    capacity: Vec<Capacity>,
    /// Hot experts that every rank computes for itself, see `foretrain help estimate`; crossed with --options
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    shadow: Vec<u32>,
    #[command(flatten)]
    packing: Packing,
    #[command(flatten)]
    mtp: Mtp,
    #[command(flatten)]
    precision: Precision,
    #[command(flatten)]
    title: Title,
    /// The folder of the study
    #[arg(long, value_name = "DIR", default_value = "results/default")]
    out: PathBuf,
    #[command(flatten)]
    fresh: Fresh,
    #[command(flatten)]
    output: Output,
}

impl Flags {
    fn grid(&self) -> Result<Grid> {
        let said = [
            ("--dispatch", !self.dispatch.is_empty()),
            ("--dispatch-dtype", !self.dispatch_dtype.is_empty()),
            ("--routing", self.routing.is_some()),
        ];
        let model = LlmSpec::find(&self.model.name)?;
        of_experts(&model, &said)?;
        self.options.iter().try_for_each(|words| self.agrees(words))?;
        let (cluster, gpu) = self.platform.specs()?;
        let gpus = self.gpus.unwrap_or_else(|| usual_gpus(&cluster, &gpu));
        Ok(Grid {
            title: self.title.text.clone(),
            model: self.model.name.clone(),
            cluster: self.platform.cluster.clone(),
            stack: self.platform.stack.on(&gpu).into(),
            gpus,
            dtype: self.precision.on(&gpu),
            seq_len: self.lengths.tokens(),
            batch: self.batch.batch(),
            micro_batch: self.micro_batch.clone(),
            ways: self.ways(gpus),
            tp: self.tp.clone(),
            pp: self.pp.clone(),
            vp: self.vp.clone(),
            ep: self.experts.or_usual(&model, gpus, &self.pp, cluster.gpus_per_node),
            zero: self.zero.clone(),
            recompute: self.recompute.clone(),
            options: self.all_options(),
            routing: self.routing.clone(),
            documents: self.packing.documents.clone().unwrap_or_default(),
            no_mtp: self.mtp.no_mtp,
            also: self.also(gpus),
        })
    }

    /// No word says another thing than the flags of experts.
    fn agrees(&self, words: &Options) -> Result<()> {
        let usual = Options::default();
        let dtype = |fp8: bool| if fp8 { "fp8" } else { "bf16" }.to_string();
        let numbers = |all: &[u32]| all.iter().map(u32::to_string).collect();
        agree(&[
            (
                "dispatch",
                self.dispatch.iter().map(|d| d.name().into()).collect(),
                words.dispatch.name().into(),
                usual.dispatch.name().into(),
            ),
            ("dispatch-dtype", self.dispatch_dtype.clone(), dtype(words.dispatch_fp8), dtype(usual.dispatch_fp8)),
            ("replicas", numbers(&self.replicas), words.replicas.to_string(), usual.replicas.to_string()),
            (
                "capacity",
                self.capacity.iter().map(ToString::to_string).collect(),
                words.capacity.to_string(),
                usual.capacity.to_string(),
            ),
            ("shadow", numbers(&self.shadow), words.shadow.to_string(), usual.shadow.to_string()),
        ])
    }

    /// The words, crossed with who carries rows and as what, where that is said.
    fn all_options(&self) -> Vec<Options> {
        let said = |o: &Options| (vec![o.dispatch], vec![o.dispatch_fp8]);
        let mut all = vec![];
        for options in &self.options {
            let (mut carriers, mut narrow) = said(options);
            if !self.dispatch.is_empty() {
                carriers = self.dispatch.clone();
            }
            if !self.dispatch_dtype.is_empty() {
                narrow = self.dispatch_dtype.iter().map(|dtype| dtype == "fp8").collect();
            }
            let or_said = |list: &[u32], said: u32| if list.is_empty() { vec![said] } else { list.to_vec() };
            let copies = or_said(&self.replicas, options.replicas);
            let room = if self.capacity.is_empty() { vec![options.capacity] } else { self.capacity.clone() };
            let shadows = or_said(&self.shadow, options.shadow);
            for ((&dispatch, &dispatch_fp8), &shadow) in
                cross(&carriers, &narrow).flat_map(|way| shadows.iter().map(move |n| (way, n)))
            {
                let options = Options { dispatch, dispatch_fp8, shadow, ..*options };
                let with = |(&replicas, &capacity)| Options { replicas, capacity, ..options };
                all.extend(cross(&copies, &room).map(with));
            }
        }
        all
    }

    /// Whoever names ways to split the sequence, or options, wants these and no others; who says how rows travel to experts
    /// wants that of every way.
    fn also(&self, gpus: u32) -> Vec<Also> {
        let is_one = |list: &[u32]| list == [1];
        let unsaid = self.ulysses.is_empty() && self.ring.is_empty() && is_one(&self.tp) && is_one(&self.pp);
        if !unsaid || self.options != [Options::default()] {
            return vec![];
        }
        let with = |(way, how): (&Also, &Options)| {
            let Options { dispatch, dispatch_fp8, replicas, capacity, shadow, .. } = *how;
            Also { options: Options { dispatch, dispatch_fp8, replicas, capacity, shadow, ..way.options }, ..*way }
        };
        cross(&Grid::default_also(gpus), &self.all_options()).map(with).collect()
    }

    fn ways(&self, gpus: u32) -> Vec<[u32; 2]> {
        if self.ulysses.is_empty() && self.ring.is_empty() {
            return Grid::default_ways(gpus);
        }
        let or_one = |list: &[u32]| if list.is_empty() { vec![1] } else { list.to_vec() };
        let rings = or_one(&self.ring);
        or_one(&self.ulysses).into_iter().flat_map(|u| rings.iter().map(move |r| [u, *r])).collect()
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Found<'a> {
    study: &'a Grid,
    /// What the model's file states that no plan has, and that the cluster's file has fewer GPUs.
    notes: Vec<String>,
    best: Vec<summary::Best>,
    /// How published runs on such GPUs and of such models came out.
    record: Vec<record::Line>,
    /// The same of peaks of memory.
    memory_record: Vec<record::Line>,
    kept_rows: usize,
    files: Vec<String>,
    /// Time in which the rows were computed, and what half of them took no longer than, on one core.
    took_s: f64,
    median_row_s: Option<f64>,
    rows: &'a [Row],
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let grid = flags.grid()?;
    let started = Instant::now();
    let bar = bar(0, "{pos}/{len} rows, {eta} left");
    let study = sweep(&grid, &flags.out, flags.fresh.asked, &|there, all| {
        bar.set_length(all as u64);
        bar.set_position(there as u64);
    })?;
    bar.finish_and_clear();
    let took = started.elapsed().as_secs_f64();
    let mut files = study.files.clone();
    files.extend(plot::draw(&flags.out.join("rows.csv"), &flags.out)?);
    let case = grid.case()?;
    let [record, memory_record] = software::record(&case);
    let mut best = summary::best(&study.rows);
    summary::play(&case, &study.rows, &mut best);
    let of_cluster = case.cluster.spec.beyond(grid.gpus).into_iter().chain(summary::crowded(&best));
    let notes: Vec<String> = case.model.notes.iter().cloned().chain(of_cluster).collect();
    let nothing = summary::nothing_runs(&case, &study.rows)?;
    let came = record::sentence(&record) + &record::memory_sentence(&memory_record, "");
    let text = human::notes(&notes) + &render(&grid, (&study, &best), nothing.as_deref(), took, &came, &files);
    let found = Found {
        study: &grid,
        notes,
        best,
        record,
        memory_record,
        kept_rows: study.kept,
        files: list_of(&files),
        took_s: took,
        median_row_s: study.median.map(|m| m.as_secs_f64()),
        rows: &study.rows,
    };
    let error = nothing.map(|why| Cause::Sweep.infeasible(format!("nothing runs; what comes nearest: {why}")));
    Ok(Answer::with_error(text, &found, error))
}

/// `nothing`: why none of the rows runs, if none does.
fn render(
    grid: &Grid,
    (study, best): (&Study, &[summary::Best]),
    nothing: Option<&str>,
    took: f64,
    record: &str,
    files: &[PathBuf],
) -> String {
    let batch = match &grid.batch {
        Batch::TokensPerStep(n) => format!("{} tokens a step", tokens(*n)),
        Batch::GlobalBatch(list) => {
            let all: Vec<String> = list.iter().map(u64::to_string).collect();
            format!("{} sequences a step", all.join(" or "))
        }
    };
    let mut text = format!(
        "{} on {} of {}, stack {}, {}, {batch}{}\n\n{}\n",
        grid.model,
        counted(grid.gpus, "GPU"),
        grid.cluster,
        grid.stack,
        grid.dtype.name(),
        packed(&grid.documents),
        summary::render(best, &study.rows)
    );
    if let Some(why) = nothing {
        text.push_str(&format!("nothing runs; what comes nearest\n  {why}\n\n"));
    }
    if study.outdated {
        text.push_str("the rows that were there no longer hold (another version or another model file): all were computed again\n");
    }
    let feasible = study.rows.iter().filter(|r| r.feasible).count();
    let kept = if study.kept > 0 { format!(", {} of them were there before", study.kept) } else { String::new() };
    let each =
        study.median.map_or(String::new(), |m| format!(", {} a row (median, on one core)", seconds(m.as_secs_f64())));
    text.push_str(&format!("{} rows, {feasible} that run{kept}; {took:.2} s{each}\n", study.rows.len()));
    text.push_str(record);
    files.iter().for_each(|f| text.push_str(&format!("wrote {}\n", f.display())));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    fn grid(line: &str) -> Grid {
        Line::parse_from(["sweep"].into_iter().chain(line.split_whitespace())).flags.grid().unwrap()
    }

    /// With the experts of a mixture on every rank nothing ran. Of a dense model, and where it is said, nothing is chosen.
    #[test]
    fn experts_are_shared_where_nothing_is_said_of_them() {
        let ep = |line: &str| grid(line).ep;
        assert_eq!(ep("--model qwen3-30b-a3b --gpus 64"), [8]);
        assert_eq!(ep("--model qwen3-30b-a3b --gpus 64 --pp 1,16"), [4]);
        assert_eq!(ep("--model qwen3-30b-a3b --gpus 64 --ep 1,16"), [1, 16]);
        assert_eq!(ep(""), [1]);
    }

    /// The best of the ways that nobody named had 1 rank of experts and NCCL where 8 and DeepEP were asked for.
    #[test]
    fn what_is_said_of_experts_holds_for_every_way() {
        let line = "--model qwen3-30b-a3b --seq-len 8K --recompute full --ep 4,8 --dispatch deepep-v1-normal --dispatch-dtype fp8";
        let said = grid(line);
        let points = said.points().unwrap();
        let as_asked = |o: &Options| o.dispatch == Dispatch::DeepepNormal && o.dispatch_fp8;
        assert!(points.iter().all(|p| [4, 8].contains(&p.par.ep) && as_asked(&p.par.options)));
        let unsaid = grid("--model qwen3-30b-a3b --seq-len 8K --recompute full");
        assert_eq!(points.len(), 2 * unsaid.points().unwrap().len());
        assert_eq!(unsaid.also, Grid::default_also(64));
        assert!(points.iter().any(|p| p.par.options.keep_attention) && points.iter().any(|p| p.par.tp == 8));
        assert_eq!(grid("--ring 8").also, []);
    }
}
