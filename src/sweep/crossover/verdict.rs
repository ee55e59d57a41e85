//! Which of two costed plans is faster, and what makes the difference.
//!
//! The time of a way is cut into parts that add up to it, so the part in which the two differ most in the
//! winner's favour is the cause.

use super::Side;
use crate::report::human::{decimal, percent, seconds};
use serde::Serialize;

/// Ways nearer to each other than this are called even: constants are not known any better.
pub const EVEN: f64 = 0.02;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Winner {
    Ulysses,
    Ring,
    Even,
    /// Neither can run.
    None,
}

/// What the difference comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Difference {
    /// Communication that no kernel hides.
    Waits,
    /// The attention kernels themselves: shapes that fill a GPU better or worse.
    Attention,
    /// Packing, merging, adding, casting.
    Copies,
    /// Kernels run slower beside communication, which takes SMs.
    StolenSms,
    /// Ranks wait for kernels of others.
    Imbalance,
    /// The CPU issues kernels more slowly than the GPU runs them.
    Host,
    /// The other way cannot run.
    Impossible,
    /// There is no difference to speak of.
    Even,
}

impl Winner {
    pub fn name(self) -> &'static str {
        match self {
            Winner::Ulysses => "Ulysses",
            Winner::Ring => "ring",
            Winner::Even => "even",
            Winner::None => "none",
        }
    }
}

/// The winner, what makes the difference, and both in a sentence. `all_heads`: what the attention kernels of Ulysses would
/// take at the rate of one that has all heads, s, if that is known.
pub fn verdict(ulysses: &Side, ring: &Side, all_heads: impl FnOnce() -> Option<f64>) -> (Winner, Difference, String) {
    match (ulysses.time_s, ring.time_s) {
        (None, None) => {
            (Winner::None, Difference::Impossible, format!("neither runs: {}; {}", ulysses.why_not, ring.why_not))
        }
        (Some(_), None) => (Winner::Ulysses, Difference::Impossible, format!("only Ulysses runs: {}", ring.why_not)),
        (None, Some(_)) => (Winner::Ring, Difference::Impossible, format!("only the ring runs: {}", ulysses.why_not)),
        (Some(u), Some(r)) if (u / r - 1.0).abs() < EVEN => (Winner::Even, Difference::Even, even(ulysses, ring)),
        (Some(u), Some(r)) => {
            let (winner, fast, slow) = match u < r {
                true => (Winner::Ulysses, ulysses, ring),
                false => (Winner::Ring, ring, ulysses),
            };
            let cause = difference(fast, slow);
            let sentence = match (winner, cause) {
                (Winner::Ring, Difference::Attention) => {
                    format!("ring wins: {}", slower_kernels(fast, slow, all_heads()))
                }
                _ => sentence(winner, cause, fast, slow),
            };
            (winner, cause, sentence)
        }
    }
}

/// The part of the time that `slow` has most more of than `fast`.
fn difference(fast: &Side, slow: &Side) -> Difference {
    let parts = [
        (Difference::Waits, slow.waits_s - fast.waits_s),
        (Difference::Attention, slow.attention_s - fast.attention_s),
        (Difference::Copies, slow.copies_s - fast.copies_s),
        (Difference::StolenSms, slow.slowed_s - fast.slowed_s),
        (Difference::Imbalance, slow.imbalance_s - fast.imbalance_s),
        (Difference::Host, slow.host_s - fast.host_s),
    ];
    parts.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("there are six").0
}

fn even(ulysses: &Side, ring: &Side) -> String {
    let share = |s: &Side| percent(s.waits_s / s.time_s.unwrap_or(f64::NAN));
    format!("even: Ulysses waits for {} of its time, the ring for {}", share(ulysses), share(ring))
}

fn sentence(winner: Winner, cause: Difference, fast: &Side, slow: &Side) -> String {
    let ring_wins = winner == Winner::Ring;
    let other = if ring_wins { "Ulysses" } else { "the ring" };
    let why = match (cause, ring_wins) {
        (Difference::Waits, true) => format!(
            "it sends {} and waits {}; Ulysses sends {}, hides nothing of it and waits {}",
            sent(fast),
            seconds(fast.waits_s),
            sent(slow),
            seconds(slow.waits_s)
        ),
        (Difference::Waits, false) => format!(
            "the ring sends {} and its blocks are too short to hide it: it waits {}, Ulysses {} for {}",
            sent(slow),
            seconds(slow.waits_s),
            seconds(fast.waits_s),
            sent(fast)
        ),
        (Difference::Attention, _) => {
            format!("one attention over all tokens takes {}, the ring's blocks {}", of(fast), of(slow))
        }
        (Difference::Copies, true) => {
            format!("Ulysses packs and unpacks for {}, the ring merges for {}", copies(slow), copies(fast))
        }
        (Difference::Copies, false) => {
            format!("the ring merges partial results for {}, Ulysses packs for {}", copies(slow), copies(fast))
        }
        (Difference::StolenSms, _) => format!(
            "transfers of {other} take SMs from its kernels and slow them by {}, here by {}",
            seconds(slow.slowed_s),
            seconds(fast.slowed_s)
        ),
        (Difference::Imbalance, _) => format!("the ranks of {other} wait {} for each other", seconds(slow.imbalance_s)),
        (Difference::Host, _) => format!(
            "{other} has so many short kernels that the CPU cannot issue them in time: {} of {}",
            seconds(slow.host_s),
            seconds(slow.time_s.unwrap_or(f64::NAN))
        ),
        (Difference::Impossible | Difference::Even, _) => String::new(),
    };
    format!("{} wins: {why}", winner.name())
}

/// Why attention kernels of Ulysses take longer: they have few heads, if that makes most of the difference.
fn slower_kernels(ring: &Side, ulysses: &Side, all_heads: Option<f64>) -> String {
    let more = ulysses.attention_s - ring.attention_s;
    let by_few = all_heads.map(|all| ulysses.attention_s - all);
    match by_few {
        Some(by_few) if by_few >= 0.5 * more => {
            format!("its attention kernels take {}, those of Ulysses' few heads {}", of(ring), of(ulysses))
        }
        Some(_) => format!(
            "its blocks off the diagonal need no mask, and its attention kernels take {}; those of Ulysses, all under a mask, \
             take {}, as they would with all heads",
            of(ring),
            of(ulysses)
        ),
        None => format!("its attention kernels take {}, those of Ulysses {}", of(ring), of(ulysses)),
    }
}

fn of(side: &Side) -> String {
    seconds(side.attention_s)
}

/// With the rate that it comes to: a link may be fast, and messages too short for it.
fn sent(side: &Side) -> String {
    let sent = decimal(side.sent_bytes, "B");
    if side.travels_s > 0.0 { format!("{sent} at {}", decimal(side.sent_bytes / side.travels_s, "B/s")) } else { sent }
}

fn copies(side: &Side) -> String {
    seconds(side.copies_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(attention_s: f64, copies_s: f64, waits_s: f64) -> Side {
        let time_s = Some(attention_s + copies_s + waits_s);
        Side { time_s, attention_s, copies_s, waits_s, sent_bytes: 1e9, travels_s: 0.05, ..Side::default() }
    }

    fn impossible(why: &str) -> Side {
        Side { why_not: why.into(), ..Side::default() }
    }

    #[test]
    fn the_largest_part_of_the_difference_is_the_cause() {
        let (quick, waits, slow) = (side(1.0, 0.1, 0.0), side(1.0, 0.0, 0.9), side(1.5, 0.2, 0.3));
        let said = |u, r| {
            let (winner, cause, why) = verdict(u, r, || None);
            (winner, cause, why)
        };
        assert_eq!(said(&quick, &waits).1, Difference::Waits);
        assert!(said(&quick, &waits).2.starts_with("Ulysses wins: the ring sends 1.00 GB at 20.00 GB/s and"));
        assert_eq!((said(&slow, &quick).0, said(&slow, &quick).1), (Winner::Ring, Difference::Attention));
        assert_eq!(said(&quick, &side(1.0, 0.5, 0.1)).1, Difference::Copies);
    }

    #[test]
    fn what_cannot_run_loses_and_what_hardly_differs_is_even() {
        let (good, bad) = (side(1.0, 0.1, 0.0), impossible("heads: 32 over 64"));
        assert_eq!(verdict(&bad, &good, || None).2, "only the ring runs: heads: 32 over 64");
        assert_eq!(verdict(&bad, &bad, || None).0, Winner::None);
        assert_eq!(verdict(&good, &side(1.0, 0.1, 0.01), || None).0, Winner::Even);
        assert_eq!(verdict(&good, &side(1.0, 0.1, 0.03), || None).0, Winner::Ulysses);
    }

    #[test]
    fn few_heads_are_the_cause_where_all_of_them_would_be_faster() {
        let (ring, ulysses) = (side(1.0, 0.1, 0.0), side(1.5, 0.0, 0.0));
        let said = |all| verdict(&ulysses, &ring, || all).2;
        assert!(said(Some(1.1)).contains("Ulysses' few heads 1.50 s"), "{}", said(Some(1.1)));
        assert!(said(Some(1.45)).contains("1.50 s, as they would with all heads"), "{}", said(Some(1.45)));
        assert!(!said(None).contains("heads"), "{}", said(None));
    }
}
