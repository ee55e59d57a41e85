//! Published measurements, predicted: how far to trust this program, by numbers that others have measured.
//!
//! A [`row`] states what its source states. Which shipped cluster, software and model it means, how it was split and what a
//! rank does with its share follows from that by rules that are the same for all rows (`machine`, [`software`], `model`, `split`,
//! `rank`); who published it is not looked at. A `prediction` makes a plan of that and costs it, in the quantity that was `measured`,
//! counted by the source's own convention; the [`outcome`] is a verdict on the row, and the errors of many.

mod machine;
mod measured;
mod model;
pub mod outcome;
mod prediction;
mod rank;
pub mod row;
pub mod software;
mod split;

pub use machine::is_another;
pub use outcome::summary::Summary;
pub use outcome::verdict::Verdict;
pub use row::case::{Case, Facts};
pub use row::read::load;

use crate::error::Result;
use machine::Fleet;
use outcome::verdict::Prediction;
use rayon::prelude::*;
use software::stacks::Stacks;

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

/// Predicts every case, in their order. `done` hears of each as it is there.
pub fn predict(cases: &[Case], done: &(dyn Fn(&Verdict) + Sync)) -> Result<Vec<Verdict>> {
    let shipped = Shipped::new()?;
    let one = |case: &Case| {
        // A row that nobody has thought of is one row without a prediction, whatever becomes of it here.
        let found = std::panic::catch_unwind(|| prediction::of(&case.facts, &shipped)).unwrap_or_else(|_| Prediction {
            why: vec!["a defect of this program: no row should come to this; please report it".into()],
            ..Prediction::default()
        });
        let verdict = Verdict::of(case, found);
        done(&verdict);
        verdict
    };
    Ok(cases.par_iter().map(one).collect())
}
