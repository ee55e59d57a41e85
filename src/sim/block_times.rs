//! Measured durations of blocks of kernels, in place of the predicted ones of their kernels.
//!
//! A block's name is the path of its first kernel without iterations, the label of its last kernel, and how many
//! kernels there are: `last/fwd/norm2`, `last/fwd/qkv..rope x2`; where there are several programs, the program stands
//! before it.

use super::script;
use crate::act::{Machine, picoseconds};
use crate::error::{Error, Result, json, text};
use crate::fold;
use crate::plan::Plan;
use crate::units::Seconds;
use rustc_hash::{FxHashMap, FxHashSet};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::path::Path;

/// A file of durations of blocks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockTimes {
    /// Who measured the blocks, and on what.
    #[serde(default)]
    pub source: String,
    pub blocks: Vec<BlockTime>,
}

/// How long a block takes on the ranks where it takes longest; on others in proportion to what their kernels do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockTime {
    pub block: String,
    pub time_s: f64,
    /// Seconds that its kernels were predicted to take together where the file was written: blocks of one name may be
    /// of other sizes in another plan. `None`: nobody says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_s: Option<f64>,
}

/// Two predictions of one block that are further apart than this, relative, are of different kernels.
const ALIKE: f64 = 0.02;

impl BlockTimes {
    /// The measured blocks of a JSON file. Errors: it cannot be read, has a time that is not between 0 and 100,000 s,
    /// or names a block twice.
    pub fn load(path: &Path) -> Result<BlockTimes> {
        let file = path.display().to_string();
        let text = text::spec(path)?;
        let times: BlockTimes = json::parse(&file, &text)?;
        let mut seen = FxHashSet::default();
        for (at, BlockTime { block, time_s, .. }) in times.blocks.iter().enumerate() {
            let wrong = |field: &str, why: String| Err(Error::spec(&file, format!("blocks[{at}].{field}"), why));
            if !(0.0..1e5).contains(time_s) {
                return wrong("time_s", format!("{time_s} is not between 0 and 100,000 s"));
            }
            if !seen.insert(block) {
                return wrong("block", format!("{block:?} stands there twice; leave one of them"));
            }
        }
        Ok(times)
    }

    /// The blocks of a plan with the seconds their kernels take together, to be filled with measurements. Errors: those
    /// of [`crate::act::Acts::deeds`].
    pub fn predicted(plan: &Plan, machine: Machine) -> Result<BlockTimes> {
        let fold = fold::refine_marked(plan, machine.cluster, &vec![0; plan.ranks() as usize]);
        let none = Lookup::default();
        let scripts = script::write(plan, machine, &fold, Some(&none))?;
        let (mut blocks, mut at): (Vec<BlockTime>, FxHashMap<String, usize>) = (vec![], FxHashMap::default());
        for (block, ps) in (0..).zip(&scripts).flat_map(|(program, script)| script.block_times(plan, program)) {
            let next = blocks.len();
            let place = *at.entry(block.clone()).or_insert(next);
            if place == next {
                blocks.push(BlockTime { block, time_s: 0.0, predicted_s: None });
            }
            let known = &mut blocks[place];
            known.time_s = known.time_s.max(ps as f64 * 1e-12);
            known.predicted_s = Some(known.time_s);
        }
        Ok(BlockTimes { source: "what the kernels are predicted to take together; not measured".into(), blocks })
    }

    /// Compares the blocks with those of a plan. Errors: a block that was written for kernels of other sizes than the
    /// plan's, whose blocks are `predicted`.
    pub fn check(&self, predicted: &BlockTimes) -> Result<()> {
        let now: FxHashMap<&str, f64> = predicted.blocks.iter().map(|b| (b.block.as_str(), b.time_s)).collect();
        for BlockTime { block, predicted_s, .. } in &self.blocks {
            let (Some(then), Some(now)) = (predicted_s, now.get(block.as_str())) else { continue };
            if (then - now).abs() > ALIKE * then.max(*now) {
                let why = format!(
                    "{block:?} was written for kernels that take {then:.3e} s by prediction, and here they take {now:.3e} s: those \
                     of another plan; measure this plan's (--write-blocks), or leave predicted_s out where that is meant"
                );
                return Err(Error::spec("block times", "blocks.predicted_s", why));
            }
        }
        Ok(())
    }

    /// The blocks of a plan: those of `predicted`, with the times of this file for the blocks that it has.
    pub fn beside(&self, predicted: BlockTimes) -> Vec<BlockTime> {
        let known: FxHashMap<&str, f64> = self.blocks.iter().map(|b| (b.block.as_str(), b.time_s)).collect();
        let taken = |b: BlockTime| BlockTime { time_s: *known.get(b.block.as_str()).unwrap_or(&b.time_s), ..b };
        predicted.blocks.into_iter().map(taken).collect()
    }

    /// The times, to be looked up by name.
    pub fn lookup(&self) -> Lookup {
        let ps = |time: &BlockTime| (time.block.clone(), picoseconds(Seconds::new(time.time_s)));
        Lookup { times: self.blocks.iter().map(ps).collect(), used: RefCell::default() }
    }
}

/// Picoseconds by name of a block, and which of the names were asked for.
#[derive(Debug, Default)]
pub struct Lookup {
    times: FxHashMap<String, u64>,
    used: RefCell<FxHashSet<String>>,
}

impl Lookup {
    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    pub fn of(&self, block: &str) -> Option<u64> {
        let found = self.times.get(block).copied();
        if found.is_some() {
            self.used.borrow_mut().insert(block.into());
        }
        found
    }

    /// Checks that every name was asked for. Errors: a name that no block of the plan has.
    pub fn check(&self) -> Result<()> {
        let used = self.used.borrow();
        match self.times.keys().filter(|name| !used.contains(*name)).min() {
            Some(name) => {
                let why =
                    format!("no block of this plan is called {name:?}; --write-blocks writes those that there are");
                Err(Error::spec("block times", "blocks.block", why))
            }
            None => Ok(()),
        }
    }
}
