//! How many tokens an expert takes from a source, and which are dropped beyond.

use super::Trace;
use crate::plan::route::DROPPED;
use crate::spec::Capacity;
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

/// Most tokens of one source that one expert has.
fn fullest(trace: &Trace) -> u64 {
    let (mut most, mut rest) = (0, trace.choices.as_slice());
    for &tokens in &trace.tokens {
        let (own, after) = rest.split_at(tokens as usize * trace.topk as usize);
        let mut taken = vec![0u64; trace.experts as usize];
        own.iter().filter(|e| **e != DROPPED).for_each(|e| taken[*e as usize] += 1);
        most = most.max(taken.into_iter().max().unwrap_or(0));
        rest = after;
    }
    most
}

/// Drops what is beyond the capacity of experts; how many tokens of each source they then have room for, where room that
/// is left is filled up. All sources have the room of the fullest where it is.
pub fn limit(trace: &mut Trace, capacity: Capacity) -> Option<u64> {
    let (topk, experts, most) = (trace.topk, trace.experts, trace.tokens.iter().copied().max().unwrap_or(0));
    let hundredths = |n: u32| f64::from(n) / 100.0;
    let room = match capacity {
        Capacity::Unlimited => return None,
        Capacity::Drop(n) => {
            drop_beyond(trace, |tokens| self::capacity(tokens, topk, experts, hundredths(n)));
            return None;
        }
        Capacity::Pad(n) => self::capacity(most, topk, experts, hundredths(n)),
        Capacity::Tutel(n) => tutel(most, topk, experts, hundredths(n), 0),
        Capacity::Dynamic(n) => tutel(most, topk, experts, -n.map_or(0.0, hundredths), fullest(trace)),
    };
    drop_beyond(trace, |_| room);
    Some(room)
}
