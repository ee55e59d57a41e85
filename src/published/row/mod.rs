//! What a source states: a row of a file of cases, read.
//!
//! [`read`] tells the shape of a file and hands each row on: runs and attention read it field by field (`fields`), of which
//! values are as people write them (`loose`, `quantity`); tables of others have readers of their own (`tables`). What comes
//! out is a [`case`]: nothing is chosen here, and what is not stated is `None`. Rules look for what its texts say with [`words`].

pub mod case;
mod fields;
mod loose;
mod quantity;
pub mod read;
mod tables;
pub mod words;
