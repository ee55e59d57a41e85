//! One configuration on a number of GPUs.

use crate::error::{Cause, Result};
use crate::plan::About;
use crate::report::Row;
use crate::spec::Parallelism;

/// A configuration: the numbers a user types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    pub seq_len: u64,
    pub global_batch: u64,
    pub micro_batch: u64,
    pub par: Parallelism,
}

impl Point {
    /// The point that a row is about.
    pub fn of_row(row: &Row) -> Point {
        Point {
            seq_len: row.seq_len,
            global_batch: row.global_batch,
            micro_batch: row.micro_batch,
            par: row.parallelism(),
        }
    }

    pub fn of_plan(about: &About) -> Point {
        Point {
            seq_len: about.seq_len,
            global_batch: about.global_batch,
            micro_batch: about.micro_batch,
            par: about.par,
        }
    }

    /// What no plan of this version can be, or what would not make the GPUs there are.
    pub(super) fn check(&self, gpus: u32) -> Result<()> {
        let par = &self.par;
        let degrees = [par.pp, par.ring, par.ulysses, par.tp].map(u64::from);
        let split = degrees.iter().fold(1u64, |n, &d| n.saturating_mul(d));
        let [p, r, u, t] = degrees;
        let named = format!("ulysses {u} x ring {r} x tp {t} x pp {p}");
        if split == 0 {
            return Err(Cause::Degrees.infeasible(format!("{named}: a degree of 0; the least is 1")));
        }
        if !u64::from(gpus).is_multiple_of(split) {
            let why = format!("gpus {gpus} is not a multiple of {named} = {split}; change one of them");
            return Err(Cause::Degrees.infeasible(why));
        }
        if split * u64::from(par.dp) != u64::from(gpus) {
            let why = format!(
                "dp {} x {named} is {}, not gpus {gpus}; use dp {}",
                par.dp,
                u128::from(split) * u128::from(par.dp),
                u64::from(gpus) / split
            );
            return Err(Cause::Degrees.infeasible(why));
        }
        Ok(())
    }
}
