//! `foretrain crossover`: Ulysses or ring, over ranks, sequence lengths, KV heads and links.

use super::flags::value::{count, degree, dtype, options};
use super::flags::{Lengths, Output, Platform};
use super::progress::Clock;
use super::{Answer, list_of};
use crate::error::{Error, Result};
use crate::plot;
use crate::report::human::{Table, tokens};
use crate::spec::{Dtype, LlmSpec, Options};
use crate::sweep::case::default_dtype;
use crate::sweep::crossover::{Cell, Difference, Links, Question, Winner, crossover};
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

#[derive(Args)]
#[command(after_help = "Example: foretrain crossover\n         \
    foretrain crossover --model llama-3-70b --links cluster,net:25 --ranks 8,16,32 --out results/crossover-70b\n\n\
    Links: `cluster` as its file has them, `node:RATE` all ranks in one node, `net:RATE` every rank on a node of its\n\
    own, as where tensor parallelism fills the nodes; rates in GB/s per GPU and direction, what a transfer reaches.")]
pub struct Flags {
    /// The model whose heads, head dim and windows of attention are taken
    #[arg(long, value_name = "NAME", default_value = "llama-3-8b")]
    model: String,
    #[command(flatten)]
    platform: Platform,
    /// KV heads [default: the model's heads, a fourth, an eighth and a sixteenth of them]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = count)]
    kv_heads: Vec<u64>,
    /// What joins the ranks: cluster, node:GB/s or net:GB/s [default: node:365,node:200,cluster, and net:50,net:20 where there
    /// is a network]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    links: Vec<Links>,
    /// GPUs that share a sequence [default: 2,4,8,16,32,64, as many as the cluster can have]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = degree)]
    ranks: Vec<u32>,
    #[command(flatten)]
    lengths: Lengths,
    /// Choices of the implementation, of which each way takes its fastest, and of each the words that say something of it;
    /// see `foretrain options`
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "default", value_parser = options)]
    options: Vec<Options>,
    /// Of queries, keys and values: bf16, f32 or f64 [default: bf16 where the GPU has it]
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    dtype: Option<Dtype>,
    /// The folder of the study
    #[arg(long, value_name = "DIR", default_value = "results/crossover")]
    out: PathBuf,
    #[command(flatten)]
    output: Output,
}

impl Flags {
    fn question(&self) -> Result<Question> {
        let model = LlmSpec::find(&self.model)?;
        let (cluster, gpu) = self.platform.specs()?;
        if model.indexer.is_some() {
            let why = format!(
                "{name}: keys that an indexer chooses go neither with Ulysses nor with a ring whose KV circulate, but with gathered KV \
                 alone; `foretrain estimate --model {name} --ring 8 --options gather-kv` costs that",
                name = model.name
            );
            return Err(Error::spec("the command line", "--model", why));
        }
        let (window, near_and_far) = Question::windows_of(&model);
        let own_kv_heads = Question::default_kv_heads(&model);
        fn or<T: Clone>(list: &[T], default: impl FnOnce() -> Vec<T>) -> Vec<T> {
            if list.is_empty() { default() } else { list.to_vec() }
        }
        let fits = |ranks: &u32| cluster.scale_out.is_some() || *ranks <= cluster.gpus_per_node;
        let node = [Links::Node(365.0), Links::Node(200.0), Links::AsTheyStand];
        let network = [Links::Network(50.0), Links::Network(20.0)].into_iter().filter(|_| cluster.scale_out.is_some());
        Ok(Question {
            cluster: self.platform.cluster.clone(),
            stack: self.platform.stack.on(&gpu).into(),
            dtype: self.dtype.unwrap_or_else(|| default_dtype(&gpu)),
            heads: model.heads,
            head_dim: model.head_dim,
            window,
            near_and_far,
            model: model.name,
            kv_heads: or(&self.kv_heads, || own_kv_heads.clone()),
            links: or(&self.links, || node.into_iter().chain(network).collect()),
            ranks: or(&self.ranks, || (1..=6).map(|log| 1 << log).filter(fits).collect()),
            seq_len: self.lengths.tokens(),
            options: self.options.clone(),
        })
    }
}

/// What `--json` prints.
#[derive(Serialize)]
struct Found<'a> {
    question: &'a Question,
    files: Vec<String>,
    cells: &'a [Cell],
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let question = flags.question()?;
    let started = Instant::now();
    let _clock = Clock::start("costing both ways");
    let map = crossover(&question, &flags.out)?;
    let took = started.elapsed().as_secs_f64();
    let mut files = map.files.clone();
    files.extend(plot::draw(&flags.out.join("rows.csv"), &flags.out)?);
    let mut text = render(&question, &map.cells);
    text.push_str(&format!("\n{} points, each costed both ways; {took:.2} s\n", map.cells.len()));
    files.iter().for_each(|f| text.push_str(&format!("wrote {}\n", f.display())));
    Ok(Answer::new(text, &Found { question: &question, files: list_of(&files), cells: &map.cells }))
}

fn render(question: &Question, cells: &[Cell]) -> String {
    let Question { model, heads, head_dim, stack, cluster, dtype, .. } = question;
    let seen = match (question.window, question.near_and_far) {
        (Some(window), Some([_, 0])) => format!(", a window of {window} tokens"),
        (Some(window), Some([near, far])) => {
            format!(", a window of {window} tokens in {near} of {} layers: times are their mean", near + far)
        }
        _ => String::new(),
    };
    format!(
        "Causal attention of {model} ({heads} heads of {head_dim}{seen}), forward and backward, {}, on GPUs of {cluster}, \
         stack {stack}\n\nWho wins from which sequence length on (U Ulysses, R ring, = within 2 %, X neither runs; \
         `U, R 64K`: Ulysses, and the ring from 64K on), by ranks:\n\n{}\nWhy:\n\n{}",
        dtype.name(),
        winners(question, cells),
        causes(cells)
    )
}

/// A line for each kind of links and each number of KV heads, a column for each number of ranks.
fn winners(question: &Question, cells: &[Cell]) -> String {
    let mut table = Table::new(&format!("<>{}", "<".repeat(question.ranks.len())));
    let head = ["links".to_string(), "kv heads".into()];
    table.row(head.into_iter().chain(question.ranks.iter().map(u32::to_string)));
    for &links in &question.links {
        for &kv_heads in &question.kv_heads {
            let line = question.ranks.iter().map(|&ranks| {
                let here = |c: &&Cell| (c.links, c.kv_heads, c.ranks) == (links, kv_heads, ranks);
                turns(cells.iter().filter(here))
            });
            table.row([links.to_string(), kv_heads.to_string()].into_iter().chain(line));
        }
    }
    table.render("")
}

/// `U, R 64 K`: Ulysses, and the ring from 64 K on.
fn turns<'a>(cells: impl Iterator<Item = &'a Cell>) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut last = None;
    for cell in cells.filter(|c| last.replace(c.winner) != Some(c.winner)).collect::<Vec<_>>() {
        let letter = match cell.winner {
            Winner::Ulysses => "U",
            Winner::Ring => "R",
            Winner::Even => "=",
            Winner::None => "X",
        };
        let from = if parts.is_empty() { String::new() } else { format!(" {}", tokens(cell.seq_len).replace(' ', "")) };
        parts.push(format!("{letter}{from}"));
    }
    parts.join(", ")
}

/// How often each way wins for each cause, with the clearest of its points.
fn causes(cells: &[Cell]) -> String {
    let mut groups: BTreeMap<(Winner, Difference), Vec<&Cell>> = BTreeMap::new();
    let won = cells.iter().filter(|c| [Winner::Ulysses, Winner::Ring].contains(&c.winner));
    won.for_each(|cell| groups.entry((cell.winner, cell.cause)).or_default().push(cell));
    let mut groups: Vec<Vec<&Cell>> = groups.into_values().collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.len()));
    if groups.is_empty() {
        let why = cells.first().map_or("", |cell| cell.reason.as_str());
        return format!("- neither is ahead anywhere: {why}\n");
    }
    let mut table = Table::new("<<");
    for group in groups {
        let clear = |c: &Cell| c.ulysses_over_ring.map_or(0.0, |ratio| ratio.ln().abs());
        let best = group.iter().max_by(|a, b| clear(a).total_cmp(&clear(b))).expect("a group has a cell");
        let at = format!(
            "{} points, most of all at {}, kv heads {}, {} ranks, {}: {}",
            group.len(),
            best.links,
            best.kv_heads,
            best.ranks,
            tokens(best.seq_len),
            best.reason
        );
        table.row(["-".to_string(), at]);
    }
    table.render("")
}
