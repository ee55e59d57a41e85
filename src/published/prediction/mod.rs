//! The kinds of prediction, one for each kind of facts: a training run, an attention operation, a collective, an exchange of
//! experts' rows, a matrix product. Each chooses cluster and stack for its row, builds a plan or asks for one op, and costs it.

mod attention;
pub mod collectives;
pub mod exchange;
mod products;
pub mod training;

use super::Shipped;
use super::outcome::verdict::Prediction;
use super::row::case::Facts;
use crate::error::Error;

/// What the source would report, or why that cannot be said.
pub fn of(facts: &Facts, shipped: &Shipped) -> Prediction {
    match facts {
        Facts::Training(run) => training::predict(run, shipped),
        Facts::Attention(row) => attention::predict(row, shipped),
        Facts::Collective(row) => collectives::predict(row, shipped),
        Facts::Exchange(row) => exchange::predict(row, shipped),
        Facts::Product(row) => products::predict(row, shipped),
        Facts::Unread(why) => Prediction { why: vec![why.clone()], ..Prediction::default() },
    }
}

/// An error, as the reason why there is no prediction.
fn said(error: Error) -> String {
    match error {
        Error::Infeasible(why) => why.to_string(),
        other => other.to_string(),
    }
}
