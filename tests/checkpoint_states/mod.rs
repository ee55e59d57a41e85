//! What tests do with checkpoints of any executor: load, save, and look at what is in the files.

use foretrain::checkpoint::extent::State;
use foretrain::checkpoint::index::tensor_name;
use foretrain::checkpoint::{Index, Loader, Saver, newest};
use foretrain::error::Result;
use foretrain::exec::state::{Memory, Watch};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;

/// Loads before the first step, saves at once or after steps.
pub struct Keep<'a> {
    pub load: Option<&'a Loader>,
    pub save: Option<(&'a Saver, u64)>,
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

/// Every parameter's states, put together from all files.
pub fn states(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let dir = newest(dir).expect("a checkpoint");
    let index = Index::read(&dir).expect("a sound index");
    let size = index.dtype.size() as usize;
    let files: Vec<Vec<u8>> = index.files.iter().map(|f| std::fs::read(dir.join(&f.name)).expect("a file")).collect();
    let mut all = BTreeMap::new();
    for (name, param) in &index.params {
        for state in State::ALL {
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
