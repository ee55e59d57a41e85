//! Published measurements, predicted: how far to trust this program, by numbers that others have measured.
//!
//! A case states what its source states. Which shipped cluster, software and model it means, and how it was split,
//! follows from that by rules that are the same for all cases ([`machine`], [`software`], [`sizes`], [`split`]);
//! who published it is not looked at. The reported quantity is converted by the source's own convention
//! ([`convention`]), so that a predicted step is held against what was really measured.

pub mod attention;
pub mod case;
pub mod collectives;
pub mod convention;
mod documents;
mod era;
pub mod exchange;
mod family;
mod fields;
mod gradients;
mod known;
mod loose;
pub mod machine;
mod magi;
pub mod measured;
pub mod memory;
mod mixture;
mod network;
mod options;
mod pair;
mod precision;
pub mod products;
mod quantity;
pub mod read;
pub mod recipe;
mod recompute;
pub mod record;
mod release;
mod reports;
mod runs;
mod savings;
mod sdpa;
mod sharding;
pub mod sizes;
pub mod software;
pub mod split;
pub mod stacks;
mod standin;
pub mod store;
pub mod summary;
mod system;
pub mod table;
pub mod training;
pub mod tuning;
pub mod verdict;
pub mod ways;
mod wider;
mod words;

pub use case::{Case, Facts};
pub use read::load;
pub use summary::Summary;
pub use verdict::Verdict;

use crate::error::Result;
use machine::Fleet;
use rayon::prelude::*;
use stacks::Stacks;
use verdict::Prediction;

/// Every cluster and stack there is to choose from.
pub struct Shipped {
    pub fleet: Fleet,
    pub stacks: Stacks,
}

impl Shipped {
    pub fn new() -> Result<Shipped> {
        Ok(Shipped { fleet: Fleet::shipped()?, stacks: Stacks::shipped()? })
    }
}

fn of(facts: &Facts, shipped: &Shipped) -> Prediction {
    match facts {
        Facts::Training(run) => training::predict(run, shipped),
        Facts::Attention(row) => attention::predict(row, shipped),
        Facts::Collective(row) => collectives::predict(row, shipped),
        Facts::Exchange(row) => exchange::predict(row, shipped),
        Facts::Product(row) => products::predict(row, shipped),
        Facts::Unread(why) => Prediction { why: vec![why.clone()], ..Prediction::default() },
    }
}

/// Predicts every case, in their order. `done` hears of each as it is there.
pub fn predict(cases: &[Case], done: &(dyn Fn(&Verdict) + Sync)) -> Result<Vec<Verdict>> {
    let shipped = Shipped::new()?;
    let one = |case: &Case| {
        // A row that nobody has thought of is one row without a prediction, whatever becomes of it here.
        let found = std::panic::catch_unwind(|| of(&case.facts, &shipped)).unwrap_or_else(|_| Prediction {
            why: vec!["a defect of this program: no row should come to this; please report it".into()],
            ..Prediction::default()
        });
        let verdict = Verdict::of(case, found);
        done(&verdict);
        verdict
    };
    Ok(cases.par_iter().map(one).collect())
}
