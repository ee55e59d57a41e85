//! The command line as its users meet it: the binary is run, and what it prints is held against golden files.
//! `UPDATE_GOLDEN=1 cargo test --test cli` rewrites them; a difference is a change of what others script against.

mod calibration;
mod checkpoints;
mod choices;
mod estimates;
mod exchanges;
mod files;
mod help;
mod machines;
mod plans;
mod program;
mod refusals;
mod runs;
mod simulations;
mod studies;
