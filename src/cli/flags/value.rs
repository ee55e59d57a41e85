//! How values of flags are written. Errors: what is wrong with a value, and an example of a right one.

use crate::spec::{Capacity, Dispatch, Dtype, Options, Recompute};

/// How many ranks or stages; lists and powers of two are none.
pub fn degree(text: &str) -> std::result::Result<u32, String> {
    text.parse().map_err(|_| format!("write a whole number up to {}, as in 8", u32::MAX))
}

/// A whole number; K and M are powers of two, as for tokens.
pub fn count(text: &str) -> std::result::Result<u64, String> {
    let (digits, scale) = match text.strip_suffix(['K', 'k']) {
        Some(digits) => (digits, 1 << 10),
        None => text.strip_suffix('M').map_or((text, 1), |digits| (digits, 1 << 20)),
    };
    let number: Option<u64> = digits.parse().ok();
    number.and_then(|n| n.checked_mul(scale)).ok_or_else(|| "write a whole number, as in 131072 or 128K".to_string())
}

/// Tokens of a training run: K, M, B and T are powers of ten, as in what is said of data sets.
pub fn trained_tokens(text: &str) -> std::result::Result<f64, String> {
    let scales = [("K", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12)];
    let scaled = scales.into_iter().find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale)));
    let (number, scale) = scaled.unwrap_or((text, 1.0));
    let tokens = number.parse::<f64>().ok().map(|n| n * scale).filter(|n| (1.0..=1e18).contains(n));
    tokens.ok_or_else(|| format!("{text:?} is no number of tokens from 1 to 1e18; write 300B or 15.6T"))
}

pub fn recompute(text: &str) -> std::result::Result<Recompute, String> {
    Recompute::named(text).ok_or_else(|| "write none, selective or full".to_string())
}

pub fn options(text: &str) -> std::result::Result<Options, String> {
    text.parse()
}

pub fn dispatch(text: &str) -> std::result::Result<Dispatch, String> {
    let known: Vec<_> = Dispatch::ALL.iter().map(|d| d.name()).collect();
    let found = Dispatch::ALL.into_iter().find(|d| d.name() == text);
    found.ok_or_else(|| format!("{text:?} is none of {}", known.join(", ")))
}

pub fn capacity(text: &str) -> std::result::Result<Capacity, String> {
    text.parse()
}

pub fn dtype(text: &str) -> std::result::Result<Dtype, String> {
    let known = [Dtype::Bf16, Dtype::F32, Dtype::F64].into_iter().find(|d| d.name() == text);
    known.ok_or_else(|| format!("{text:?} is not bf16, f32 or f64"))
}
