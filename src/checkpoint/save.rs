//! Saves while training goes on: the run stands still while memory is copied, and files are written beside the steps
//! that follow. A folder gets its name once all of it is on the disk, so that what was cut off is never loaded.

use super::extent::{Extents, Held, Run, State, stretches};
use super::index::{self, File, Index, Param, Piece, boxes, folder, tensor_name};
use super::share::{missing, share};
use crate::error::{Error, Result};
use crate::exec::Data;
use crate::exec::source::Before;
use crate::exec::state::Memory;
use crate::plan::{Dtype, Plan};
use safetensors::SafeTensorError;
use safetensors::tensor::TensorView;
use serde::Serialize;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Instant;

/// A checkpoint that was written.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Saved {
    pub step: u64,
    pub dir: PathBuf,
    pub bytes: u64,
    /// The rank that wrote most, and its bytes.
    pub most_bytes: u64,
    pub files: u32,
    /// How long training stood still: while memory was copied, and before that while the last one was still written.
    pub stall_s: f64,
    /// From the copy to the last byte on the disk.
    pub write_s: f64,
}

/// Saves into a folder.
pub struct Saver {
    dir: PathBuf,
    seed: u64,
    /// What the run goes on from.
    before: Before,
    state: RefCell<Writing>,
}

#[derive(Default)]
struct Writing {
    under_way: Option<JoinHandle<Result<Saved>>>,
    done: Vec<Saved>,
}

/// A run that ends otherwise than by [`finish`](Saver::finish) leaves whole what it had copied, too.
impl Drop for Saver {
    fn drop(&mut self) {
        // Nobody is left to be told.
        let _ = self.end_of_last();
    }
}

/// The tensors of a rank's file.
type Tensors = Vec<(String, Data)>;

impl Saver {
    pub fn new(dir: &Path, seed: u64, before: Before) -> Result<Saver> {
        std::fs::create_dir_all(dir).map_err(Error::io(dir))?;
        Ok(Saver { dir: dir.to_path_buf(), seed, before, state: RefCell::default() })
    }

    /// Refuses, before a run, to write over what is there.
    pub fn free(&self, steps: impl Iterator<Item = u64>) -> Result<()> {
        let there = steps.map(|step| self.dir.join(folder(step))).find(|path| path.exists());
        let Some(path) = there else { return Ok(()) };
        let why = match path.join(index::FILE).exists() {
            true => "is there already; give another folder to --save, or go on from it with --load",
            false => "is there already, and not whole; delete it, or give another folder to --save",
        };
        Err(Error::spec(path.display(), "--save", why))
    }

    /// Refuses a folder with a checkpoint of a later step than `last`: it would be taken for the newest of this run.
    pub fn is_newest(&self, last: u64) -> Result<()> {
        let Ok(newest) = index::newest(&self.dir) else { return Ok(()) };
        let later = newest.file_name().is_some_and(|name| name.to_string_lossy().as_ref() > folder(last).as_str());
        let why =
            format!("is of a later step than {last}, and --load would go on from it; give another folder to --save");
        if later && newest != self.dir { Err(Error::spec(newest.display(), "--save", why)) } else { Ok(()) }
    }

    /// Copies what the ranks hold and begins to write it. Errors: those of the checkpoint before this one, too.
    pub fn save(&self, step: u64, memory: &Memory) -> Result<()> {
        let began = Instant::now();
        self.end_of_last()?;
        let plan = memory.plan();
        let extents = Extents::new(plan, memory.atoms())?;
        let held: Vec<Vec<Held>> = (0..plan.ranks()).map(|rank| extents.of(rank)).collect::<Result<_>>()?;
        let (tensors, params) = copied(plan, memory, &held)?;
        let index = self.index(memory, step, params);
        let (dir, stall_s) = (self.dir.join(folder(step)), began.elapsed().as_secs_f64());
        let write = move || write(dir, index, tensors, stall_s);
        self.state.borrow_mut().under_way = Some(std::thread::spawn(write));
        Ok(())
    }

    /// The index of files that are yet to be written.
    fn index(&self, memory: &Memory, step: u64, params: BTreeMap<String, Param>) -> Index {
        let plan = memory.plan();
        let master = plan.masters.first().map_or(plan.params[0].weight, |m| m.master);
        Index {
            foretrain_checkpoint: index::VERSION,
            step,
            sequences: self.before.sequences + (step - self.before.steps) * plan.about.global_batch,
            seed: self.seed,
            model: plan.about.model.clone(),
            model_spec: plan.about.model_spec.clone(),
            strategy: plan.about.strategy.clone(),
            ranks: plan.ranks(),
            plan: memory.hash().to_string(),
            optimizer: plan.optimizer().unwrap_or_default(),
            dtype: written_as(plan.tensors[master as usize].dtype),
            files: vec![],
            params,
        }
    }

    fn end_of_last(&self) -> Result<()> {
        let last = self.state.borrow_mut().under_way.take();
        if let Some(thread) = last {
            let saved = thread.join().map_err(|_| Error::device("checkpoint", "its writer panicked"))??;
            self.state.borrow_mut().done.push(saved);
        }
        Ok(())
    }

    /// What was written, once all of it is on the disk.
    pub fn finish(&self) -> Result<Vec<Saved>> {
        self.end_of_last()?;
        Ok(self.state.borrow().done.clone())
    }
}

/// States that an optimizer keeps in bf16 are written in fp32, which has all of their values.
fn written_as(dtype: Dtype) -> Dtype {
    if dtype == Dtype::F64 { dtype } else { Dtype::F32 }
}

/// The tensors of every rank's file, and where each parameter is in them.
fn copied(plan: &Plan, memory: &Memory, held: &[Vec<Held>]) -> Result<(Vec<Tensors>, BTreeMap<String, Param>)> {
    let whole = |param: &crate::plan::Param| Param {
        shape: param.shape.clone(),
        pieces: vec![],
        by_muon: !param.matrices.is_empty(),
    };
    let mut params: BTreeMap<String, Param> = plan.params.iter().map(|p| (p.name.clone(), whole(p))).collect();
    let mut files = vec![];
    let tasks = share(held);
    for (rank, tasks) in (0..).zip(&tasks).filter(|(_, tasks)| !tasks.is_empty()) {
        let file = files.len() as u32;
        let mut runs_of: BTreeMap<&str, (&Held, Vec<Run>)> = BTreeMap::new();
        for task in tasks {
            let entry = runs_of.entry(&task.held.param.name).or_insert((task.held, vec![]));
            entry.1.extend(&task.runs);
        }
        let mut tensors = vec![];
        for (name, (held, runs)) in runs_of {
            for state in State::ALL {
                let Some(at) = held.states[state as usize] else { continue };
                let read = |elems| memory.read(rank, at, elems);
                let parts: Vec<Data> =
                    stretches(&held.placed(state, &runs)).into_iter().map(read).collect::<Result<_>>()?;
                tensors.push((tensor_name(name, state), Data::concat(parts.into_iter()).widened()));
            }
            let param = params.get_mut(name).expect("every parameter has a place");
            param.pieces.push(Piece { file, boxes: boxes(&runs) });
        }
        files.push(tensors);
    }
    for param in &plan.params {
        let saved = params[&param.name].stored().into_iter().map(|stored| stored.run);
        let missing = missing(param, saved);
        if missing > 0 {
            let why = format!("no rank holds {missing} elements of {}", param.name);
            return Err(Error::device("checkpoint", why));
        }
    }
    Ok((files, params))
}

fn write(dir: PathBuf, mut index: Index, tensors: Vec<Tensors>, stall_s: f64) -> Result<Saved> {
    let began = Instant::now();
    numbers(&dir, &tensors)?;
    let unfinished = dir.with_extension(index::UNFINISHED);
    if unfinished.exists() {
        std::fs::remove_dir_all(&unfinished).map_err(Error::io(&unfinished))?;
    }
    std::fs::create_dir(&unfinished).map_err(Error::io(&unfinished))?;
    for (i, tensors) in tensors.into_iter().enumerate() {
        let name = format!("part-{i:05}.safetensors");
        let bytes = contents(&tensors).map_err(|e| Error::spec(unfinished.join(&name).display(), "contents", e))?;
        put(&unfinished.join(&name), &bytes)?;
        index.files.push(File { name, bytes: bytes.len() as u64, crc32: crc32fast::hash(&bytes) });
    }
    let text = index::sealed(&serde_json::to_string(&index).expect("an index is plain data"));
    put(&unfinished.join(index::FILE), text.as_bytes())?;
    std::fs::rename(&unfinished, &dir).map_err(Error::io(&dir))?;
    Ok(Saved {
        step: index.step,
        bytes: index.bytes() + text.len() as u64,
        most_bytes: index.files.iter().map(|file| file.bytes).max().unwrap_or(0),
        files: index.files.len() as u32,
        dir,
        stall_s,
        write_s: began.elapsed().as_secs_f64(),
    })
}

/// Errors: a value that is no number. Nobody goes on from that.
fn numbers(dir: &Path, tensors: &[Tensors]) -> Result<()> {
    for (name, data) in tensors.iter().flatten() {
        let odd = not_finite(data);
        if odd > 0 {
            let why = format!(
                "{odd} of its {} values are no numbers after this step, so that it is not saved; lower --lr, or go on from an \
                 earlier checkpoint",
                data.len()
            );
            return Err(Error::spec(dir.display(), name, why));
        }
    }
    Ok(())
}

/// Values that are no numbers, or none that the dtype has.
pub(super) fn not_finite(data: &Data) -> usize {
    data.to_f64().iter().filter(|x| !x.is_finite()).count()
}

fn contents(tensors: &Tensors) -> std::result::Result<Vec<u8>, SafeTensorError> {
    let mut views = vec![];
    for (name, data) in tensors {
        let dtype = if matches!(data, Data::F64(_)) { safetensors::Dtype::F64 } else { safetensors::Dtype::F32 };
        views.push((name, TensorView::new(dtype, vec![data.len() as usize], data.to_bytes())?));
    }
    safetensors::serialize(views, None)
}

/// Writes a file down to the disk.
fn put(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = std::fs::File::create(path).map_err(Error::io(path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(Error::io(path))
}
