//! The simulator agrees with the analytic cost to the picosecond where ranks share no link.

mod agreement;
mod blocks;
mod explanations;
mod faults;
mod hangs;
mod jitter;
mod networks;
#[path = "../plans/mod.rs"]
mod plans;
mod played;
mod sharing;
mod threads;
