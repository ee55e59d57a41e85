//! The size of a row of an exchange on the wire: its values, the weights of its choices, and what a library sends
//! along.

use super::{deepep_ll, deepep_normal};
use crate::plan::route::{ExchangeAlgo, Phase};

/// Bytes of a row whose values take `values` bytes and whose numbers of choices take `choices`. Where a header has room
/// for the choices, these take no bytes of their own.
pub fn message_row(algo: ExchangeAlgo, phase: Phase, topk: u32, values: u64, choices: u64) -> u64 {
    let framed = match algo {
        ExchangeAlgo::DeepepNormal { .. }
        | ExchangeAlgo::DeepepV2Hybrid { .. }
        | ExchangeAlgo::DeepepV2Direct { .. }
        | ExchangeAlgo::HybridEp { .. } => deepep_normal::wire_row(values, topk),
        ExchangeAlgo::DeepepLowLatency { .. } => deepep_ll::wire_row(values, phase),
        _ => 0,
    };
    framed.max(values + choices)
}
