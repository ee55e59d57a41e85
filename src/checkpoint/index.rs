//! `index.json`: what a checkpoint holds, and which elements of it lie where. Its first field is the checksum of all that follows.

use super::extent::{Run, State};
use crate::error::{Error, Result, json, text};
use crate::plan::{Adam, Dtype};
use crate::spec::LlmSpec;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

pub const FILE: &str = "index.json";
pub(super) const VERSION: u32 = 2;

/// A checkpoint as its index describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    pub(super) foretrain_checkpoint: u32,
    /// Steps that were done.
    pub step: u64,
    /// Sequences that were seen: where the data goes on.
    pub sequences: u64,
    pub seed: u64,
    pub model: String,
    /// What was trained, with the dropout that it was trained with; none where the plan did not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_spec: Option<LlmSpec>,
    /// How the run was laid out. No run that loads needs it.
    pub strategy: String,
    pub ranks: u32,
    pub plan: String,
    pub optimizer: Adam,
    /// Of every state.
    pub dtype: Dtype,
    pub files: Vec<File>,
    pub params: BTreeMap<String, Param>,
}

/// A safetensors file, as it was when it was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    pub name: String,
    pub bytes: u64,
    pub crc32: u32,
}

/// An index as it is written: the JSON of its other fields behind their checksum.
///
/// # Panics
/// For what is no JSON object.
pub fn sealed(json: &str) -> String {
    let fields = json.strip_prefix('{').expect("an object");
    format!("{SEAL}{:08x}\",{fields}", crc32fast::hash(json.as_bytes()))
}

/// What [`sealed`] was given. Errors: an index without a checksum, or with that of something else.
fn unsealed(path: &Path, written: &str) -> Result<String> {
    let wrong = |why: String| Error::spec(path.display(), "crc32", why);
    let Some((crc32, fields)) = written.strip_prefix(SEAL).and_then(|rest| rest.split_once("\",")) else {
        let why = "missing: the index was damaged, or is of a version before 2, which had none; load another checkpoint, or \
                   go on from this one with the foretrain that wrote it";
        return Err(wrong(why.into()));
    };
    let json = format!("{{{fields}");
    let there = format!("{:08x}", crc32fast::hash(json.as_bytes()));
    match there == crc32 {
        true => Ok(json),
        false => Err(wrong(format!("{there}, {crc32} was written; the index is damaged: {DAMAGED}"))),
    }
}

/// What an index begins with.
const SEAL: &str = "{\"crc32\":\"";

/// What to do about an index that cannot be as it was written.
pub(super) const DAMAGED: &str = "load another checkpoint, or copy it again";

/// Steps and sequences: no run has more, and numbers of JSON are not exact beyond.
const MOST_STEPS: u64 = 1 << 53;

/// A file is read in pieces of so many bytes to be held against its checksum.
const PIECE: usize = 1 << 20;

impl File {
    /// Errors: the file is not what was written.
    pub fn undamaged(&self, dir: &Path) -> Result<()> {
        let path = dir.join(&self.name);
        let mut file = std::fs::File::open(&path).map_err(Error::io(&path))?;
        let (mut hasher, mut piece) = (crc32fast::Hasher::new(), vec![0; PIECE]);
        loop {
            match file.read(&mut piece).map_err(Error::io(&path))? {
                0 => break,
                read => hasher.update(&piece[..read]),
            }
        }
        let there = hasher.finalize();
        if there == self.crc32 {
            return Ok(());
        }
        let why = format!(
            "{there:08x}, {:08x} was written; the file is damaged: go on from an earlier checkpoint, or copy it again",
            self.crc32
        );
        Err(Error::spec(path.display(), "crc32", why))
    }
}

/// Where a parameter is: in each file that has some of it, a flat tensor `STATE.NAME` for every state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Param {
    pub shape: Vec<u64>,
    pub pieces: Vec<Piece>,
    /// It is Muon's, which keeps no running mean of squares.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_muon: bool,
}

/// What one file has of a parameter: its boxes one behind the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// A place in [`Index::files`].
    pub file: u32,
    pub boxes: Vec<Box>,
}

/// `count` times `len` elements of the row-major whole, `stride` apart: rows of it, or columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "[u64; 4]", into = "[u64; 4]")]
pub struct Box {
    pub first: u64,
    pub len: u64,
    pub stride: u64,
    pub count: u64,
}

impl From<[u64; 4]> for Box {
    fn from([first, len, stride, count]: [u64; 4]) -> Box {
        Box { first, len, stride, count }
    }
}

impl From<Box> for [u64; 4] {
    fn from(b: Box) -> [u64; 4] {
        [b.first, b.len, b.stride, b.count]
    }
}

/// Elements of a parameter in a file's flat tensor of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    pub file: u32,
    /// `local` counts from the start of the flat tensor.
    pub run: Run,
}

/// The name of a parameter's state in a file.
pub fn tensor_name(param: &str, state: State) -> String {
    format!("{}.{param}", state.name())
}

/// Runs one behind the other, as few boxes.
pub fn boxes(runs: &[Run]) -> Vec<Box> {
    let mut boxes: Vec<Box> = vec![];
    for run in runs {
        if let Some(last) = boxes.last_mut().filter(|last| last.len == run.len && run.whole > last.first) {
            let stride = if last.count == 1 { run.whole - last.first } else { last.stride };
            if run.whole == last.first + last.count * stride {
                (last.stride, last.count) = (stride, last.count + 1);
                continue;
            }
        }
        boxes.push(Box { first: run.whole, len: run.len, stride: run.len, count: 1 });
    }
    boxes
}

impl Param {
    /// What is kept of it.
    pub fn states(&self) -> &'static [State] {
        if self.by_muon { &[State::Weight, State::ExpAvg] } else { &State::ALL }
    }

    pub fn elems(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether every element is in one place of so many files; else the field that says otherwise, and what it says.
    fn whole(&self, files: usize) -> std::result::Result<(), (&'static str, String)> {
        let wrong = |why: String| Err(("pieces", why));
        let Some(elems) = self.shape.iter().try_fold(1u64, |all, n| all.checked_mul(*n)) else {
            return Err(("shape", format!("{:?} has too many elements", self.shape)));
        };
        if let Some(piece) = self.pieces.iter().find(|piece| piece.file as usize >= files) {
            return wrong(format!("file {} of {files}", piece.file));
        }
        sound(&self.pieces, elems).or_else(wrong)?;
        let mut next = 0;
        for Stored { run, .. } in self.stored() {
            if run.whole != next {
                let what = if run.whole > next { "missing" } else { "there twice" };
                return wrong(format!("element {} is {what}", next.min(run.whole)));
            }
            next = run.whole + run.len;
        }
        if next != elems {
            return wrong(format!("element {next} of {elems} is missing"));
        }
        Ok(())
    }

    /// Where every element is, in the order of the whole.
    pub fn stored(&self) -> Vec<Stored> {
        let mut all = vec![];
        for piece in &self.pieces {
            let mut local = 0;
            for b in &piece.boxes {
                for i in 0..b.count {
                    let run = Run { local, whole: b.first + i * b.stride, len: b.len };
                    all.push(Stored { file: piece.file, run });
                    local += b.len;
                }
            }
        }
        all.sort_unstable_by_key(|s| s.run.whole);
        all
    }
}

impl Index {
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    pub fn elems(&self) -> u64 {
        self.params.values().map(Param::elems).sum()
    }

    /// Reads the index of a checkpoint's folder and checks that it is whole: every file there and as long as it was,
    /// every element of every parameter in one place.
    pub fn read(dir: &Path) -> Result<Index> {
        let path = dir.join(FILE);
        let index: Index = json::parse(path.display(), &unsealed(&path, &text::data(&path)?)?)?;
        index.check(dir, &path)?;
        Ok(index)
    }

    fn check(&self, dir: &Path, path: &Path) -> Result<()> {
        let wrong = |field: &str, why: String| Err(Error::spec(path.display(), field, why));
        if self.foretrain_checkpoint != VERSION {
            let why = format!("{}; version {VERSION} is read here: save it again", self.foretrain_checkpoint);
            return wrong("foretrain_checkpoint", why);
        }
        if !matches!(self.dtype, Dtype::F32 | Dtype::F64) {
            return wrong("dtype", format!("{}; states are f32 or f64: {DAMAGED}", self.dtype.name()));
        }
        for (field, count) in [("step", self.step), ("sequences", self.sequences)] {
            if count > MOST_STEPS {
                return wrong(field, format!("{count} is more than {MOST_STEPS}; {DAMAGED}"));
            }
        }
        if let Some((field, why)) = odd_constant(&self.optimizer) {
            return wrong(&format!("optimizer.{field}"), format!("{why}; {DAMAGED}"));
        }
        for (i, file) in self.files.iter().enumerate() {
            if file.name.contains(['/', '\\']) || file.name.contains("..") {
                let why = format!("{:?} is no file of this folder; {DAMAGED}", file.name);
                return wrong(&format!("files[{i}].name"), why);
            }
            let path = dir.join(&file.name);
            let there = std::fs::metadata(&path).map_err(Error::io(&path))?.len();
            if there != file.bytes {
                let why = format!("{there} bytes, {} were saved; {DAMAGED}", file.bytes);
                return Err(Error::spec(path.display(), "size", why));
            }
        }
        for (name, param) in &self.params {
            let whole = param.whole(self.files.len());
            whole.or_else(|(what, why)| wrong(&format!("params.{name}.{what}"), format!("{why}; {DAMAGED}")))?;
        }
        Ok(())
    }
}

/// A constant outside the range that the command line has for it, and why.
fn odd_constant(adam: &Adam) -> Option<(&'static str, String)> {
    let above_zero = |x: f64| x.is_finite() && x > 0.0;
    let share = |x: f64| (0.0..1.0).contains(&x);
    [
        ("lr", adam.lr, above_zero(adam.lr), "above zero"),
        ("beta1", adam.beta1, share(adam.beta1), "from 0 to below 1"),
        ("beta2", adam.beta2, share(adam.beta2), "from 0 to below 1"),
        ("eps", adam.eps, above_zero(adam.eps), "above zero"),
        ("weight_decay", adam.weight_decay, share(adam.weight_decay), "from 0 to below 1"),
    ]
    .into_iter()
    .find_map(|(field, x, fine, range)| (!fine).then(|| (field, format!("{x} is not {range}"))))
}

/// Boxes that lie in the whole, before any of their elements is counted one by one.
fn sound(pieces: &[Piece], elems: u64) -> std::result::Result<(), String> {
    let mut most = elems;
    for b in pieces.iter().flat_map(|piece| &piece.boxes) {
        let end =
            b.count.checked_sub(1).and_then(|n| n.checked_mul(b.stride)?.checked_add(b.first)?.checked_add(b.len));
        let inside = b.len > 0 && end.is_some_and(|end| end <= elems);
        let left = b.count.checked_mul(b.len).and_then(|n| most.checked_sub(n));
        match left.filter(|_| inside) {
            Some(left) => most = left,
            None => return Err(format!("{:?} is no box of {elems} elements", <[u64; 4]>::from(*b))),
        }
    }
    Ok(())
}

/// The folder of a step.
pub fn folder(step: u64) -> String {
    format!("step-{step:08}")
}

/// The extension of a folder that is being written.
pub(super) const UNFINISHED: &str = "unfinished";

/// The checkpoint that `dir` is, or the newest that is in it. One that was not written to its end has another name.
pub fn newest(dir: &Path) -> Result<PathBuf> {
    Ok(newest_of(dir)?.0)
}

/// The same with folders of later steps, in order, that have no index: cut off while they were written, or damaged.
pub fn newest_of(dir: &Path) -> Result<(PathBuf, Vec<PathBuf>)> {
    if dir.join(FILE).exists() {
        return Ok((dir.to_path_buf(), vec![]));
    }
    let entries = std::fs::read_dir(dir).map_err(Error::io(dir))?;
    let cut_off = |path: &PathBuf| path.extension().is_some_and(|end| end == UNFINISHED);
    let named = |path: &PathBuf| if cut_off(path) { path.with_extension("") } else { path.clone() };
    let step = |path: &PathBuf| named(path).file_name()?.to_str()?.strip_prefix("step-")?.parse::<u64>().ok();
    let all = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir());
    let mut all: Vec<(u64, PathBuf)> = all.filter_map(|path| Some((step(&path)?, path))).collect();
    all.sort();
    let is_whole = |path: &PathBuf| path.join(FILE).exists() && !cut_off(path);
    let (last, newest) = all.iter().rfind(|(_, path)| is_whole(path)).cloned().ok_or_else(|| {
        let why =
            "neither this folder nor a folder step-N in it has an index.json; give what `foretrain run --save` wrote";
        Error::spec(dir.display(), "checkpoint", why)
    })?;
    Ok((newest, all.into_iter().filter(|(step, _)| *step > last).map(|(_, path)| path).collect()))
}

/// A word on the folders that [`newest_of`] passed over, if any.
pub fn passed_over(chosen: &Path, later: &[PathBuf]) -> Option<String> {
    let names: Vec<_> = later.iter().map(|path| path.display().to_string()).collect();
    let (later, chosen) = (names.join(", "), chosen.display());
    let why =
        format!("{later}: not whole, without {FILE} or cut off while it was saved; {chosen} is taken, which is older");
    Some(why).filter(|_| !names.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_one_box_and_come_back_as_they_were() {
        let runs: Vec<Run> = (0..6).map(|i| Run { local: 4 * i, whole: 10 * i + 2, len: 4 }).collect();
        let boxes = boxes(&runs);
        assert_eq!(boxes, [Box { first: 2, len: 4, stride: 10, count: 6 }]);
        let param = Param { shape: vec![6, 10], pieces: vec![Piece { file: 0, boxes }], by_muon: false };
        assert_eq!(param.stored().iter().map(|s| s.run).collect::<Vec<_>>(), runs);
    }

    #[test]
    fn boxes_beyond_the_whole_are_refused_before_they_are_counted() {
        let piece = |b| [Piece { file: 0, boxes: vec![b] }];
        let huge = Box { first: 0, len: 1, stride: 0, count: u64::MAX };
        assert!(sound(&piece(huge), 10).is_err());
        assert!(sound(&piece(Box { first: 8, len: 3, stride: 3, count: 1 }), 10).is_err());
        assert!(sound(&piece(Box { first: 0, len: 5, stride: 5, count: 2 }), 10).is_ok());
        assert!(sound(&piece(Box { first: 0, len: 0, stride: 5, count: 2 }), 10).is_err());
    }
}
