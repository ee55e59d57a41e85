//! What tests do with checkpoints of any executor: load, save, and look at what is in the files.

use foretrain::checkpoint::index::tensor_name;
use foretrain::checkpoint::{Index, Loader, Saver, newest};
use foretrain::error::Result;
use foretrain::exec::Job;
use foretrain::exec::source::{Before, Source};
use foretrain::exec::state::{Memory, Watch};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;

/// Loads before the first step, saves at once or after steps.
struct Keep<'a> {
    load: Option<&'a Loader>,
    save: Option<(&'a Saver, u64)>,
}

impl Watch for Keep<'_> {
    fn begin(&self, memory: &mut Memory) -> Result<()> {
        self.load.map_or(Ok(()), |loader| loader.load(memory))?;
        self.after(self.load.map_or(0, |loader| loader.index.step), memory)
    }

    fn after(&self, step: u64, memory: &Memory) -> Result<()> {
        match self.save {
            Some((saver, at)) if at == step => saver.save(step, memory),
            _ => Ok(()),
        }
    }
}

/// Does what `train` does with a job of so many steps, from where a checkpoint was, and saves after step `save`.
pub fn from_to(
    (seed, steps): (u64, u64),
    load: Option<&Path>,
    save: Option<(&Path, u64)>,
    train: impl FnOnce(&Job) -> Result<()>,
) {
    let loader = load.map(|dir| Loader::open(dir).expect("a whole checkpoint"));
    let before =
        loader.as_ref().map_or(Before::default(), |l| Before { steps: l.index.step, sequences: l.index.sequences });
    let saver = save.map(|(dir, at)| (Saver::new(dir, seed, before).expect("a folder"), at));
    let keep = Keep { load: loader.as_ref(), save: saver.as_ref().map(|(saver, at)| (saver, *at)) };
    let source = Source { before, ..Source::seeded(seed) };
    train(&Job { keep_last: true, watch: Some(&keep), ..Job::new(&source, steps) }).expect("the plan runs");
    saver.into_iter().for_each(|(saver, _)| drop(saver.finish().expect("it was written")));
}

/// Every parameter's states, put together from all files.
pub fn states(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let dir = newest(dir).expect("a checkpoint");
    let index = Index::read(&dir).expect("a sound index");
    let size = index.dtype.size() as usize;
    let files: Vec<Vec<u8>> = index.files.iter().map(|f| std::fs::read(dir.join(&f.name)).expect("a file")).collect();
    let mut all = BTreeMap::new();
    for (name, param) in &index.params {
        for &state in param.states() {
            let mut whole = vec![];
            for stored in param.stored() {
                let file = SafeTensors::deserialize(&files[stored.file as usize]).expect("a safetensors file");
                let tensor = file.tensor(&tensor_name(name, state)).expect("it has the tensor");
                let from = stored.run.local as usize * size;
                whole.extend(&tensor.data()[from..from + stored.run.len as usize * size]);
            }
            all.insert(tensor_name(name, state), whole);
        }
    }
    all
}
