//! Loads into any layout: every rank reads the elements that it holds from whoever saved them, and nothing else.

use super::extent::{Extents, Held, Run, State, stretches};
use super::index::{DAMAGED, Index, Stored, newest_of, passed_over, tensor_name};
use super::save::not_finite;
use crate::error::{Error, Result};
use crate::exec::Data;
use crate::exec::state::Memory;
use crate::plan::Plan;
use crate::plan::memory::SlotId;
use crate::spec::LlmSpec;
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;
use serde::Serialize;
use serde_json::Value;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Bytes that are read to save a second request.
const GAP: u64 = 64 << 10;

/// A checkpoint that a run goes on from.
pub struct Loader {
    pub dir: PathBuf,
    pub index: Index,
    /// What was not taken, though it is newer.
    pub note: Option<String>,
    files: Vec<Open>,
    loaded: Cell<Option<Loaded>>,
}

/// What loading took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Loaded {
    pub step: u64,
    /// Over all ranks.
    pub read_bytes: u64,
    pub requests: u64,
    /// Of all, checksums included.
    pub load_s: f64,
    /// Files that were held against their checksums, whole, and how long that took.
    pub checked_bytes: u64,
    pub check_s: f64,
}

/// A file of a checkpoint, its header read.
struct Open {
    path: PathBuf,
    file: RefCell<std::fs::File>,
    header: Metadata,
    /// First byte behind the header.
    data: u64,
    /// Whether it was held against its checksum.
    checked: Cell<bool>,
}

/// Elements that are wanted: where they are in a file's tensor, and where they go.
struct Want {
    file: u32,
    from: u64,
    to: u64,
    len: u64,
}

impl Loader {
    /// Opens the checkpoint that `dir` is, or the newest in it.
    pub fn open(dir: &Path) -> Result<Loader> {
        let (dir, later) = newest_of(dir)?;
        let (index, note) = (Index::read(&dir)?, passed_over(&dir, &later));
        let files = index.files.iter().map(|file| Open::new(&dir.join(&file.name))).collect::<Result<_>>()?;
        Ok(Loader { dir, index, note, files, loaded: Cell::new(None) })
    }

    /// Whether the checkpoint has what a plan trains.
    pub fn fits(&self, plan: &Plan) -> Result<()> {
        let path = self.dir.join(super::index::FILE);
        let wrong = |field: String, why: String| {
            let why = format!("{why}; it was saved by {}, give the same model", self.index.model);
            Err(Error::spec(path.display(), field, why))
        };
        for param in &plan.params {
            match self.index.params.get(&param.name) {
                None => return wrong(format!("params.{}", param.name), "missing".into()),
                Some(saved) if saved.shape != param.shape => {
                    let why = format!("{:?} was saved, {:?} is wanted", saved.shape, param.shape);
                    return wrong(format!("params.{}.shape", param.name), why);
                }
                Some(saved) if saved.by_muon == param.matrices.is_empty() => {
                    let [was, wanted, remedy] = match saved.by_muon {
                        true => ["Muon", "Adam", "give --options muon"],
                        false => ["Adam", "Muon", "leave --options muon out"],
                    };
                    let why = format!("its optimizer was {was}, and is {wanted} here; {remedy}");
                    return Err(Error::spec(path.display(), format!("params.{}", param.name), why));
                }
                Some(_) => {}
            }
        }
        match self.index.params.keys().find(|name| plan.params.iter().all(|p| p.name != **name)) {
            Some(name) => wrong(format!("params.{name}"), format!("{} has no such parameter", plan.about.model)),
            None => Ok(()),
        }?;
        match self.index.model_spec.as_ref().zip(plan.about.model_spec.as_ref()).and_then(differs) {
            Some((field, saved, wanted)) => {
                wrong(format!("model_spec.{field}"), format!("{saved} was saved, {wanted} is wanted"))
            }
            None => Ok(()),
        }
    }

    /// Puts the checkpoint into the ranks' memories.
    pub fn load(&self, memory: &mut Memory) -> Result<()> {
        let (began, mut read) = (Instant::now(), Loaded { step: self.index.step, ..Loaded::default() });
        let plan = memory.plan();
        let extents = Extents::new(plan, memory.atoms())?;
        for rank in 0..plan.ranks() {
            for held in extents.of(rank)? {
                let stored = self.index.params[&held.param.name].stored();
                for state in State::ALL {
                    let Some(at) = held.states[state as usize] else { continue };
                    let values = self.values(&held, &held.runs, &stored, state, &mut read)?;
                    put(memory, rank, (at, &held.placed(state, &held.runs)), &values)?;
                    if let Some((at, runs)) = held.working.as_ref().filter(|_| state == State::Weight) {
                        let same = *runs == held.runs;
                        let values = if same { values } else { self.values(&held, runs, &stored, state, &mut read)? };
                        put(memory, rank, (*at, runs), &values)?;
                    }
                }
            }
        }
        read.load_s = began.elapsed().as_secs_f64();
        self.loaded.set(Some(read));
        Ok(())
    }

    pub fn loaded(&self) -> Option<Loaded> {
        self.loaded.get()
    }

    /// Tensors with values that are no numbers, with how many of them: nothing goes on from such.
    pub fn not_finite(&self) -> Result<Vec<(String, usize)>> {
        let mut all: BTreeMap<String, usize> = BTreeMap::new();
        for (param, state) in
            self.index.params.iter().flat_map(|param| param.1.states().iter().map(move |state| (param, *state)))
        {
            let name = tensor_name(param.0, state);
            for piece in &param.1.pieces {
                let elems: u64 = piece.boxes.iter().map(|b| b.len * b.count).sum();
                let bytes = self.files[piece.file as usize].read(&name, 0..elems * self.index.dtype.size())?;
                let odd = not_finite(&Data::from_bytes(&bytes, self.index.dtype));
                if odd > 0 {
                    *all.entry(name.clone()).or_default() += odd;
                }
            }
        }
        Ok(all.into_iter().collect())
    }

    /// What is wrong with a tensor that has values that are no numbers.
    pub fn diverged(&self, tensor: &str, odd: usize) -> Error {
        let why = format!(
            "{odd} of its values are no numbers: the run that saved it had diverged; go on from an earlier checkpoint"
        );
        Error::spec(self.dir.display(), tensor, why)
    }

    /// Holds a file against its checksum before anything of it is read.
    fn check(&self, file: u32, read: &mut Loaded) -> Result<()> {
        if self.files[file as usize].checked.replace(true) {
            return Ok(());
        }
        let (began, file) = (Instant::now(), &self.index.files[file as usize]);
        file.undamaged(&self.dir)?;
        read.checked_bytes += file.bytes;
        read.check_s += began.elapsed().as_secs_f64();
        Ok(())
    }

    /// The elements of runs, one behind the other.
    fn values(
        &self,
        held: &Held,
        runs: &[Run],
        stored: &[Stored],
        state: State,
        read: &mut Loaded,
    ) -> Result<Vec<f64>> {
        let mut wants = wants(runs, stored);
        wants.sort_unstable_by_key(|want| (want.file, want.from));
        let mut values = vec![0.0; runs.iter().map(|run| run.len).sum::<u64>() as usize];
        let (size, name) = (self.index.dtype.size(), tensor_name(&held.param.name, state));
        let mut rest = &wants[..];
        while let Some(first) = rest.first() {
            let near = |pair: &[Want]| {
                pair[0].file == pair[1].file && (pair[1].from - pair[0].from - pair[0].len) * size <= GAP
            };
            let many = 1 + rest.windows(2).take_while(|pair| near(pair)).count();
            let (now, later) = rest.split_at(many);
            let end = now.last().map_or(0, |last| last.from + last.len);
            self.check(first.file, read)?;
            let bytes = self.files[first.file as usize].read(&name, first.from * size..end * size)?;
            read.read_bytes += bytes.len() as u64;
            read.requests += 1;
            let data = Data::from_bytes(&bytes, self.index.dtype).to_f64();
            for want in now {
                let from = (want.from - first.from) as usize;
                values[want.to as usize..][..want.len as usize].copy_from_slice(&data[from..from + want.len as usize]);
            }
            rest = later;
        }
        let odd = values.iter().filter(|x| !x.is_finite()).count();
        if odd > 0 {
            return Err(self.diverged(&name, odd));
        }
        Ok(values)
    }
}

/// The first field in which two models compute something else, with both values. Names of weights and their shapes do not say how
/// many heads there are, or how positions turn them.
fn differs((saved, wanted): (&LlmSpec, &LlmSpec)) -> Option<(String, Value, Value)> {
    let fields = |spec: &LlmSpec| {
        // What is said of a model is none of it.
        let bare = LlmSpec { name: String::new(), notes: vec![], uncomputed: vec![], ..spec.clone() };
        serde_json::to_value(bare).expect("a model is plain data")
    };
    let [saved, wanted] = [fields(saved), fields(wanted)];
    let names = [&saved, &wanted].into_iter().filter_map(Value::as_object).flat_map(|fields| fields.keys());
    let other = names.into_iter().find(|name| saved.get(*name) != wanted.get(*name))?;
    let of = |spec: &Value| spec.get(other).cloned().unwrap_or_default();
    Some((other.clone(), of(&saved), of(&wanted)))
}

/// Where the elements of runs are stored. What is stored has every element, so all of them are found.
fn wants(runs: &[Run], stored: &[Stored]) -> Vec<Want> {
    let (mut wants, mut to) = (vec![], 0);
    for run in runs {
        let (mut at, end) = (run.whole, run.whole + run.len);
        let mut i = stored.partition_point(|s| s.run.whole + s.run.len <= at);
        while at < end {
            let Stored { file, run: there } = stored[i];
            let len = (there.whole + there.len).min(end) - at;
            wants.push(Want { file, from: there.local + at - there.whole, to, len });
            (at, to, i) = (at + len, to + len, i + 1);
        }
    }
    wants
}

fn put(memory: &mut Memory, rank: u32, (at, runs): (SlotId, &[Run]), values: &[f64]) -> Result<()> {
    let mut from = 0;
    for elems in stretches(runs) {
        let part = &values[from..from + (elems.end - elems.start) as usize];
        memory.write(rank, at, elems, part)?;
        from += part.len();
    }
    Ok(())
}

impl Open {
    fn new(path: &Path) -> Result<Open> {
        let mut file = std::fs::File::open(path).map_err(Error::io(path))?;
        let all = file.metadata().map_err(Error::io(path))?.len();
        let wrong = |why: String| Error::spec(path.display(), "header", format!("{why}; {DAMAGED}"));
        let mut start = [0; 8];
        file.read_exact(&mut start).map_err(Error::io(path))?;
        let length = u64::from_le_bytes(start);
        if length > all.saturating_sub(8) {
            return Err(wrong(format!("{length} bytes of header in a file of {all}; it is no whole safetensors file")));
        }
        let mut text = start.to_vec();
        text.resize(8 + length as usize, 0);
        file.read_exact(&mut text[8..]).map_err(Error::io(path))?;
        // A header alone is no whole file: its tensors' ends are checked when they are read.
        let (_, header) = SafeTensors::read_metadata(&text).or_else(|_| {
            let json: std::result::Result<Metadata, _> = serde_json::from_slice(&text[8..]);
            json.map(|header| (0, header)).map_err(|e| wrong(e.to_string()))
        })?;
        Ok(Open {
            path: path.to_path_buf(),
            file: RefCell::new(file),
            header,
            data: 8 + length,
            checked: Cell::new(false),
        })
    }

    /// Bytes of a tensor.
    fn read(&self, name: &str, range: std::ops::Range<u64>) -> Result<Vec<u8>> {
        let wrong = |why: String| Error::spec(self.path.display(), name, format!("{why}; {DAMAGED}"));
        let info = self.header.info(name).ok_or_else(|| wrong("missing, though index.json has it here".into()))?;
        let (from, to) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        if from + range.end > to {
            return Err(wrong(format!("{} bytes, index.json has {} of it here", to - from, range.end)));
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let mut file = self.file.borrow_mut();
        let read = file.seek(SeekFrom::Start(self.data + from + range.start)).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(Error::io(&self.path))?;
        Ok(bytes)
    }
}
