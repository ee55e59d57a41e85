//! `foretrain checkpoint`: what a checkpoint holds, and whether it is whole.

use super::Answer;
use super::flags::Output;
use crate::checkpoint::{Index, Loader, newest_of, passed_over};
use crate::error::Result;
use crate::plan::Adam;
use crate::report::human::{Table, bytes, decimal, notes};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args)]
#[command(
    after_help = "Example: foretrain checkpoint ckpt\n         foretrain checkpoint ckpt/step-00000005 --params --json\n\n\
    Reads every file, the index too, and holds it against the checksum that was written with it (CRC-32), and every element\n\
    of every parameter against the index: each has to be in one place, and a number. Of a folder with several, the newest\n\
    that is whole is looked at."
)]
pub struct Flags {
    /// A checkpoint, or the folder that `foretrain run --save` was given
    dir: PathBuf,
    /// List every parameter
    #[arg(long)]
    params: bool,
    #[command(flatten)]
    output: Output,
}

/// What a checkpoint holds.
#[derive(Serialize)]
struct Found {
    dir: PathBuf,
    step: u64,
    sequences: u64,
    seed: u64,
    model: String,
    strategy: String,
    ranks: u32,
    dtype: &'static str,
    /// Constants of the run that saved: a run that loads has them unless flags say others.
    optimizer: Adam,
    /// Matrices of layers are Muon's.
    by_muon: bool,
    parameters: u64,
    bytes: u64,
    files: Vec<File>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    params: Vec<Param>,
    /// Tensors with values that are no numbers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_finite: Vec<NotFinite>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

#[derive(Serialize)]
struct NotFinite {
    tensor: String,
    values: usize,
}

#[derive(Serialize)]
struct File {
    name: String,
    bytes: u64,
    /// Elements that it has of the parameters.
    parameters: u64,
}

#[derive(Serialize)]
struct Param {
    name: String,
    shape: Vec<u64>,
    /// Files that have some of it.
    files: u32,
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let (dir, later) = newest_of(&flags.dir)?;
    let index = Index::read(&dir)?;
    index.files.iter().try_for_each(|file| file.undamaged(&dir))?;
    let loader = Loader::open(&dir)?;
    let not_finite = loader.not_finite()?;
    let diverged = not_finite.first().map(|(tensor, values)| loader.diverged(tensor, *values));
    let held = |file: usize| {
        let pieces = index.params.values().flat_map(|param| &param.pieces).filter(|piece| piece.file as usize == file);
        pieces.flat_map(|piece| &piece.boxes).map(|b| b.len * b.count).sum()
    };
    let files = index.files.iter().enumerate();
    let files = files.map(|(i, file)| File { name: file.name.clone(), bytes: file.bytes, parameters: held(i) });
    let param = |(name, param): (&String, &crate::checkpoint::index::Param)| Param {
        name: name.clone(),
        shape: param.shape.clone(),
        files: param.pieces.len() as u32,
    };
    let found = Found {
        step: index.step,
        sequences: index.sequences,
        seed: index.seed,
        model: index.model.clone(),
        strategy: index.strategy.clone(),
        ranks: index.ranks,
        dtype: index.dtype.name(),
        optimizer: index.optimizer,
        by_muon: index.params.values().any(|param| param.by_muon),
        parameters: index.elems(),
        bytes: index.bytes(),
        files: files.collect(),
        params: if flags.params { index.params.iter().map(param).collect() } else { vec![] },
        not_finite: not_finite.into_iter().map(|(tensor, values)| NotFinite { tensor, values }).collect(),
        notes: passed_over(&dir, &later).into_iter().collect(),
        dir,
    };
    Ok(Answer::with_error(found.render(), &found, diverged))
}

impl Found {
    fn render(&self) -> String {
        let mut text = format!(
            "{}{}\n{} after step {} ({} sequences, seed {}), saved by {} on {} ranks\n{} parameters in {}, each with two \
             moments{}: {}. Every file is as it was written.\nOptimizer: {}\n\n",
            notes(&self.notes),
            self.dir.display(),
            self.model,
            self.step,
            self.sequences,
            self.seed,
            self.strategy,
            self.ranks,
            decimal(self.parameters as f64, ""),
            self.dtype,
            if self.by_muon { ", and matrices of layers with one (Muon's)" } else { "" },
            bytes(self.bytes as f64),
            self.optimizer
        );
        let mut table = Table::new("<>>");
        table.row(["file", "bytes", "parameters"]);
        for file in &self.files {
            table.row([&file.name, &bytes(file.bytes as f64), &decimal(file.parameters as f64, "")]);
        }
        text.push_str(&table.render("  "));
        if !self.not_finite.is_empty() {
            let mut table = Table::new("<>");
            table.row(["no numbers in", "values"]);
            self.not_finite.iter().for_each(|odd| table.row([&odd.tensor, &odd.values.to_string()]));
            text.push('\n');
            text.push_str(&table.render("  "));
        }
        if !self.params.is_empty() {
            let mut table = Table::new("<<>");
            table.row(["parameter", "shape", "files"]);
            for param in &self.params {
                table.row([&param.name, &format!("{:?}", param.shape), &param.files.to_string()]);
            }
            text.push('\n');
            text.push_str(&table.render("  "));
        }
        text
    }
}
