//! Kernels that take a little more or less each time, without a class for every rank.
//!
//! A class is followed by one rank. What the others of the class do is known as a distribution: how far the rank is
//! from their mean (`drift`) and how much they differ (`var`). Those who have met are alike from then on: what they
//! have in common does not tell them apart when they meet again, but it does tell them from others. At a meeting of n of them, the slowest of the others
//! is drawn, and the distribution becomes that of the slowest: of n normal numbers it has the mean
//! Q(0.5264^(1/n)) and the standard deviation (Q(0.8832^(1/n)) - Q(0.2142^(1/n))) / 2, Q being the quantiles of the
//! normal distribution (Chen and Tyler, Accurate approximation to the extreme order statistics of Gaussian samples,
//! 1999). Sums over many kernels are nearly normal whatever a kernel's own spread is. The slowest of several classes is taken as normal with the moments of Clark (The greatest of a finite set of
//! random variables, 1961).

use super::fault::{Fault, Shape};
use super::meeting::Party;
use crate::plan::Lane;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use statrs::distribution::{Continuous, ContinuousCDF, Normal};

/// The spread of a class's ranks around the rank that is followed, in ps: what each rank has for itself, and what ranks
/// have in common since they have met.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Noise {
    /// How far the rank is from the mean, and how far the ranks differ.
    own: Normally,
    common: Normally,
    /// Axes along which ranks have `common` in common, a bit each.
    scope: u16,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Normally {
    drift: f64,
    var: f64,
}

impl Noise {
    /// The part that tells ranks apart who meet along `axes`.
    fn along(&self, axes: u16) -> Normally {
        match self.scope & axes == axes {
            true => self.own,
            false => Normally { drift: self.own.drift + self.common.drift, var: self.own.var + self.common.var },
        }
    }

    /// The part that ranks who meet along `axes` have in common.
    fn beyond(&self, axes: u16) -> Normally {
        if self.scope & axes == axes { self.common } else { Normally::default() }
    }
}

/// The axes of a group, a bit each.
pub fn axes_of(lane: &Lane) -> u16 {
    match lane {
        Lane::Comm(group, _) => group.spans().iter().fold(0, |bits, &axis| bits | 1 << axis as u8),
        Lane::Compute(_) | Lane::Copy(_) | Lane::Host => 0,
    }
}

pub struct Jitter {
    /// The causes of jitter, by class.
    spread: Vec<Vec<Spread>>,
    rng: ChaCha8Rng,
    normal: Normal,
}

/// A kernel takes at least this part of its time.
const LEAST: f64 = 0.1;

/// A cause of jitter: what it adds to the times of kernels, as a part of them. Several add up.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    shape: Shape,
    sd: f64,
}

impl Spread {
    fn mean(self) -> f64 {
        if self.shape == Shape::Exponential { self.sd } else { 0.0 }
    }
}

impl Jitter {
    /// The jitter of the classes with these representatives; `None` if no kernel of theirs has any.
    pub fn of(faults: &[Fault], seed: u64, representatives: &[u32]) -> Option<Jitter> {
        let on = |rank: u32| {
            let spread = move |fault: &Fault| match *fault {
                Fault::Jitter { rank: whose, shape, sd } if whose.is_none_or(|r| r == rank) && sd > 0.0 => {
                    Some(Spread { shape, sd })
                }
                _ => None,
            };
            faults.iter().filter_map(spread).collect()
        };
        let spread: Vec<Vec<Spread>> = representatives.iter().map(|&rank| on(rank)).collect();
        let any = spread.iter().any(|of| !of.is_empty());
        any.then(|| Jitter { spread, rng: ChaCha8Rng::seed_from_u64(seed), normal: Normal::standard() })
    }

    /// Draws what a cause adds to one kernel, as a part of its time.
    fn draw(&mut self, Spread { shape, sd }: Spread) -> f64 {
        match shape {
            Shape::Normal => sd * self.greatest(1),
            Shape::Lognormal => {
                let var = (sd * sd).ln_1p();
                (var.sqrt() * self.greatest(1) - var / 2.0).exp() - 1.0
            }
            Shape::Exponential => -sd * self.rng.random_range(1e-12..1.0f64).ln(),
        }
    }

    /// Draws the greatest of `n` normal numbers.
    fn greatest(&mut self, n: u32) -> f64 {
        let u: f64 = self.rng.random_range(1e-12..1.0);
        self.normal.inverse_cdf(u.powf(1.0 / f64::from(n)))
    }

    /// Draws how long a kernel of a class takes this time, ps, and adds to the class's noise.
    pub fn kernel(&mut self, class: u32, duration: u64, noise: &mut Noise) -> u64 {
        let (mut factor, mut mean, mut var) = (1.0, 1.0, 0.0);
        for at in 0..self.spread[class as usize].len() {
            let spread = self.spread[class as usize][at];
            factor += self.draw(spread);
            mean += spread.mean();
            var += spread.sd * spread.sd;
        }
        let alone = duration as f64;
        let takes = (alone * factor.max(LEAST)).round() as u64;
        noise.own.drift += takes as f64 - alone * mean;
        noise.own.var += var * alone * alone;
        takes
    }

    /// Draws how much later the last of all ranks who meet along `axes` starts than the last of those who are followed,
    /// ps; and the noise behind the meeting.
    pub fn gather(&mut self, parties: &[Party], axes: u16) -> (u64, Noise) {
        let (mut late, mut all): (f64, Option<(f64, f64)>) = (0.0, None);
        let (mut common, mut scope) = (Normally::default(), axes);
        for (at, party) in parties.iter().enumerate() {
            if parties[..at].iter().any(|p| p.class == party.class) {
                continue;
            }
            // A class may meet itself: two ranks of it.
            let count: u32 = parties.iter().filter(|p| p.class == party.class).map(|p| p.count).sum();
            let noise = party.noise.along(axes);
            // Times are counted from when the last of them came.
            let (mean, sd) = (-noise.drift - party.ago as f64, noise.var.sqrt());
            if count > 1 && sd > 0.0 {
                late = late.max(mean + sd * self.greatest(count - 1));
            }
            let own = (mean + sd * self.mean(count), (sd * self.spread(count)).powi(2));
            all = Some(all.map_or(own, |all| self.greater(all, own)));
            (common, scope) = (party.noise.beyond(axes), scope | party.noise.scope);
        }
        let (late, (mean, var)) = (late.round(), all.unwrap_or_default());
        let common = Normally { drift: common.drift + late - mean, var: common.var + var };
        (late as u64, Noise { own: Normally::default(), common, scope })
    }

    /// Mean of the greatest of `n` normal numbers: known for a few (Jones, 1948), and by Blom (1958) within 0.02 for
    /// many.
    fn mean(&self, n: u32) -> f64 {
        const ONE_BY_ROOT_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI / 2.0;
        match n {
            0 | 1 => 0.0,
            2 => ONE_BY_ROOT_PI,
            3 => 1.5 * ONE_BY_ROOT_PI,
            _ => self.normal.inverse_cdf((f64::from(n) - 0.375) / (f64::from(n) + 0.25)),
        }
    }

    /// Standard deviation of the greatest of `n` normal numbers.
    fn spread(&self, n: u32) -> f64 {
        let q = |p: f64| self.normal.inverse_cdf(p.powf(1.0 / f64::from(n)));
        if n > 1 { (q(0.8832) - q(0.2142)) / 2.0 } else { 1.0 }
    }

    /// Mean and variance of the greater of two normal numbers with these means and variances.
    fn greater(&self, (m, v): (f64, f64), (n, w): (f64, f64)) -> (f64, f64) {
        let theta = (v + w).sqrt();
        if theta == 0.0 {
            return (m.max(n), 0.0);
        }
        let alpha = (m - n) / theta;
        let (p, q, density) = (self.normal.cdf(alpha), self.normal.cdf(-alpha), theta * self.normal.pdf(alpha));
        let mean = m * p + n * q + density;
        let square = (m * m + v) * p + (n * n + w) * q + (m + n) * density;
        (mean, (square - mean * mean).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn jitter() -> Jitter {
        Jitter::of(&[Fault::jitter("normal:0.02").unwrap()], 7, &[0]).unwrap()
    }

    #[test]
    fn kernels_are_spread_as_told_and_ranks_have_their_own() {
        let faults = ["2:normal:0.1", "3:lognormal:0.3", "5:exponential:0.2", "5:normal:0.1"];
        let faults = faults.map(|word| Fault::jitter(word).unwrap());
        let mut j = Jitter::of(&faults, 1, &[0, 2, 3, 5]).unwrap();
        for (class, mean, sd) in [(0, 1.0, 0.0), (1, 1.0, 0.1), (2, 1.0, 0.3), (3, 1.2, 0.05f64.sqrt())] {
            let mut noise = Noise::default();
            let draws: Vec<f64> = (0..40_000).map(|_| j.kernel(class, 1_000_000, &mut noise) as f64 * 1e-6).collect();
            let found = draws.iter().sum::<f64>() / 4e4;
            let spread = (draws.iter().map(|x| (x - found).powi(2)).sum::<f64>() / 4e4).sqrt();
            assert!((found - mean).abs() < 0.005 && (spread - sd).abs() < 0.01, "{class}: {found} {spread}");
            assert!((noise.own.var * 1e-12 / 4e4 - sd * sd).abs() < 1e-9);
        }
        assert!(Jitter::of(&faults, 1, &[0, 1]).is_none());
    }

    #[test]
    fn the_greatest_of_many_has_the_moments_it_is_said_to_have() {
        let mut j = jitter();
        for n in [2, 8, 64, 1024] {
            let draws: Vec<f64> = (0..20_000).map(|_| j.greatest(n)).collect();
            let mean = draws.iter().sum::<f64>() / 20_000.0;
            let sd = (draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 20_000.0).sqrt();
            assert!((mean - j.mean(n)).abs() < 0.03, "{n}: mean {mean}, not {}", j.mean(n));
            assert!((sd / j.spread(n) - 1.0).abs() < 0.05, "{n}: sd {sd}, not {}", j.spread(n));
        }
    }

    #[test]
    fn the_greater_of_two_has_the_moments_it_is_said_to_have() {
        let mut j = jitter();
        let draws: Vec<f64> = (0..50_000).map(|_| (1.0 + 2.0 * j.greatest(1)).max(2.0 + j.greatest(1))).collect();
        let mean = draws.iter().sum::<f64>() / 50_000.0;
        let var = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 50_000.0;
        let said = j.greater((1.0, 4.0), (2.0, 1.0));
        assert!((mean - said.0).abs() < 0.03 && (var - said.1).abs() < 0.06, "{mean} {var}, not {said:?}");
    }
}
