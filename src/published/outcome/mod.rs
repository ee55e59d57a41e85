//! What came of it: a prediction beside what was measured is a [`verdict`], verdicts make a [`table`], a file ([`store`]) and a
//! [`summary`] of their errors, and those of training runs go into the [`record`] that `estimate` speaks from.

pub mod record;
pub mod store;
pub mod summary;
pub mod table;
pub mod verdict;
