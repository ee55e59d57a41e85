//! How long a sequence may be: which lengths plans can have, and the longest of them that fits.

use crate::spec::Parallelism;

/// Tokens that every length is a multiple of, besides what the degrees want.
const GRAIN: u64 = 1 << 10;

/// The longest sequence that any plan has, in tokens.
const MOST: u64 = 1 << 32;

/// The part of a length to which the longest is found, as one over this.
pub const PART: u64 = 256;

/// Tokens that every length is a multiple of, so that chunks of ranks and of layers come out even.
pub fn grain(par: &Parallelism) -> u64 {
    let parts = [2, par.ring, par.ulysses, par.tp, par.options.chunks.max(1)];
    let parts = parts.into_iter().map(u64::from).product::<u64>();
    lcm(parts, GRAIN)
}

/// The least common multiple of two numbers above 0.
pub(super) fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

/// The longest length that fits, a multiple of `grain`; `None` if none does. A length beyond one that does not fit is
/// taken not to fit. Errors: those of `fits`.
pub fn bisect<E>(grain: u64, mut fits: impl FnMut(u64) -> Result<bool, E>) -> Result<Option<u64>, E> {
    if !fits(grain)? {
        return Ok(None);
    }
    // In grains: the longest known to fit, and the shortest known not to.
    let most = MOST / grain;
    let (mut fitting, mut beyond) = (1, most + 1);
    while beyond - fitting > (fitting / PART).max(1) {
        let next = if beyond > most { (2 * fitting).min(most) } else { fitting.midpoint(beyond) };
        match fits(next * grain)? {
            true => fitting = next,
            false => beyond = next,
        }
    }
    Ok(Some(fitting * grain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_told_to_a_part_of_them() {
        for (grain, most) in [(1024, 1024), (1024, 70_000), (3072, 9_000_000), (1 << 20, MOST)] {
            let found = bisect(grain, |n| Ok::<bool, ()>(n <= most)).unwrap().unwrap();
            let next = found + (found / PART).max(1).next_multiple_of(grain);
            assert!(found <= most && found.is_multiple_of(grain) && (next > most || next > MOST), "{found} {most}");
        }
        assert_eq!(bisect(1024, |_| Ok::<bool, ()>(false)).unwrap(), None);
    }

    #[test]
    fn every_part_of_a_length_comes_out_even() {
        let par = |ring, ulysses, words: &str| Parallelism {
            ring,
            ulysses,
            options: words.parse().unwrap(),
            ..Parallelism::default()
        };
        assert_eq!(grain(&par(1, 8, "default")), 1024);
        assert_eq!(grain(&par(3, 1, "fpdt-16")), 3 * 1024);
        assert_eq!(grain(&par(64, 32, "default")), 4096);
    }
}
