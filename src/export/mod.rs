//! Timelines in the formats of others.

pub mod chrome;
