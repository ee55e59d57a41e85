//! What a search brings.

use super::{Nearest, Numerics, Played, Value};
use crate::error::Reason;
use serde::Serialize;
use std::collections::BTreeMap;

/// What came of one length.
#[derive(Debug, Clone, Serialize)]
pub struct Found {
    pub seq_len: u64,
    pub global_batch: u64,
    pub counts: Counts,
    /// The fastest that fit, of the plain ways; as many as were asked for, in the order in which they are when they are played.
    pub best: Vec<Played>,
    /// The best of these with words that leave their degrees alone, where any helps, and a faster way that fits with words
    /// that save memory, where there is one. In order as the others.
    pub refined: Vec<Played>,
    /// The fastest of all with words that change its numerics.
    pub numerics: Vec<Numerics>,
    /// What it costs to choose otherwise: the fastest way found with each value of each choice, by the walk of one rank.
    pub values: Vec<Value>,
    /// Where nothing fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nearest: Option<Nearest>,
}

/// Ways by what became of them.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Counts {
    /// Combinations that cannot be built, by the kind of reason.
    pub refused: BTreeMap<String, usize>,
    /// Why the first of the kind that most are of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_why: Option<Reason>,
    pub ways: usize,
    /// Plans that their bounds rest on.
    pub probes: usize,
    /// Not costed, since weights and activations that are certain do not fit.
    pub too_large: usize,
    /// Not costed, since no way is faster than its bound.
    pub too_slow: usize,
    pub costed: usize,
    /// Costed, but not to be had: memory.
    pub do_not_fit: usize,
    /// Not costed after all: more ops than are laid out.
    pub too_long: usize,
    /// Why the first of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub too_long_why: Option<Reason>,
    /// Not looked at: it was told to stop.
    #[serde(skip_serializing_if = "is_none")]
    pub left: usize,
    /// Costed besides, to say what each value of each choice costs; known ones among them.
    pub beside: usize,
    /// Costed with words that save memory, where nothing else was lacking.
    pub spared: usize,
    /// The least that a costed way took, as a multiple of its bound: below 1 a bound was wrong.
    pub nearest_bound: Option<f64>,
}

fn is_none(n: &usize) -> bool {
    *n == 0
}
