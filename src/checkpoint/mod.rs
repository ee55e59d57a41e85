//! Checkpoints that do not know how the run was laid out: ranks save their own parts, side by side, and a run of any
//! other layout loads the parts that it needs (load-time resharding, ByteCheckpoint, arXiv:2407.20143, section 3).
//!
//! A checkpoint is a folder `step-N`: a file of flat tensors for each rank that saves something, and `index.json`, which
//! has the shape of every parameter and says which of its elements lie where. Three states of a parameter are kept: its
//! value as the optimizer has it, and Adam's two moments. What several ranks hold alike one of them saves, and they take
//! turns so that all write about as much.
//!
//! * [`extent`]: which elements of which parameter a rank holds, and where.
//! * [`share`]: who saves what.
//! * [`index`]: what `index.json` says, read, checked and searched.
//! * [`save`]: memory is copied while the run stands still, files are written while it goes on.
//! * [`load`]: a rank reads its parts from whoever saved them.

pub mod extent;
pub mod index;
pub mod load;
pub mod save;
pub mod share;

pub use index::{Index, newest, newest_of, passed_over};
pub use load::{Loaded, Loader};
pub use save::{Saved, Saver};
