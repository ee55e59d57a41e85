//! Predicts one attention operation over its ranks.

use super::Shipped;
use super::case::Attention;
use super::verdict::Prediction;

/// What the operation would report, or why that cannot be said.
pub fn predict(row: &Attention, _shipped: &Shipped) -> Prediction {
    Prediction {
        measured: row.value,
        unit: row.unit.clone(),
        why: vec!["attention-only plans are not in this version".into()],
        ..Prediction::default()
    }
}
