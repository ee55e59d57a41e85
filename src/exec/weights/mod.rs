//! Weights from Hugging Face checkpoints, and what a run brought under their names.

mod dump;
mod names;
mod read;
mod tokens;

pub use dump::{Dump, dump};
pub use read::load;
pub use tokens::read as read_tokens;
