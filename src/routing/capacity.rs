//! How many tokens an expert takes from a source, and which are dropped beyond.

use super::Trace;
use crate::plan::route::DROPPED;
use std::collections::BTreeMap;

/// Tokens that an expert takes of a source's: ceil(T k / E factor).
pub fn capacity(tokens: u64, topk: u32, experts: u32, factor: f64) -> u64 {
    (tokens as f64 * f64::from(topk) / f64::from(experts) * factor).ceil() as u64
}

/// Tutel's: k int(factor T / E); for factor 0 what the fullest expert needs; for a negative one the lesser of
/// the two (tutel/impls/fast_dispatch.py).
pub fn tutel(tokens: u64, topk: u32, experts: u32, factor: f64, most: u64) -> u64 {
    let fixed = |factor: f64| u64::from(topk) * (factor * tokens as f64 / f64::from(experts)) as u64;
    if factor == 0.0 {
        return most;
    }
    if factor < 0.0 { most.min(fixed(-factor)) } else { fixed(factor) }
}

/// Drops what is beyond `capacity` of each source's tokens for an expert, earlier tokens first; how many.
pub fn drop_beyond(trace: &mut Trace, capacity: impl Fn(u64) -> u64) -> u64 {
    let (mut dropped, mut rest) = (0, trace.choices.as_mut_slice());
    for &tokens in &trace.tokens {
        let (own, after) = rest.split_at_mut(tokens as usize * trace.topk as usize);
        let room = capacity(tokens);
        let mut taken: BTreeMap<u32, u64> = BTreeMap::new();
        for choice in own.iter_mut().filter(|c| **c != DROPPED) {
            let n = taken.entry(*choice).or_default();
            *n += 1;
            if *n > room {
                *choice = DROPPED;
                dropped += 1;
            }
        }
        rest = after;
    }
    dropped
}

/// Rows that a source sends when every expert is padded to its capacity, whoever is chosen.
pub fn padded_rows(experts: u32, capacity: u64) -> u64 {
    u64::from(experts) * capacity
}
