//! What a row of an exchange is on the wire: its values, what its choices weigh, and what a library sends along.

use super::{deepep_ll, deepep_normal};
use crate::plan::route::{ExchangeAlgo, Phase};

/// Bytes of a row whose values take `values` and whose numbers of choices take `choices`. Where a header has room for
/// the choices they take none of their own.
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
