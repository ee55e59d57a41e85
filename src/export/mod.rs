//! Timelines in the formats of others.

pub mod chakra;
pub mod chrome;
