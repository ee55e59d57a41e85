//! How fast a machine is at the moment, by a few things that are the same every time; and a profile as it would be at
//! another moment's speed.
//!
//! Cores change their clock and share caches and memory with whoever else is there, so that the same step takes a
//! quarter longer an hour later. That is no error of a prediction that was made from the first hour's figures, and no
//! merit of one that hits it: whoever compares across hours has to take both.

use super::curve::Curve;
use super::measured::{Profile, Threads};
use serde::{Deserialize, Serialize};

/// Kernels on a core of their own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speed {
    /// A product of matrices of 512 by 512.
    pub product: Anchor,
    /// Adding two vectors that fit into a core's own cache, many times.
    pub pass: Anchor,
    /// Adding two vectors that fit into no core's own cache.
    pub stream: Anchor,
    /// A message of 1 MiB, copied out and in: for whoever reads it.
    pub copy: Anchor,
    /// From a message of some bytes to the thread that has waited for it, likewise.
    pub wake: Anchor,
    pub samples: u32,
}

/// Something that is the same every time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Anchor {
    pub seconds: f64,
    /// Of the samples, relative.
    pub spread: f64,
}

impl Speed {
    /// Names and values.
    pub fn parts(&self) -> [(&'static str, Anchor); 5] {
        let Speed { product, pass, stream, copy, wake, .. } = *self;
        [("product", product), ("pass", pass), ("stream", stream), ("copy", copy), ("wake", wake)]
    }
}

/// Bytes up to which a kernel has its operands in its core's cache, and from which it has them in memory.
const CACHED: f64 = 1e6;
const IN_MEMORY: f64 = 16e6;

/// How many times longer things take than at another moment. A copy takes longer as a pass over as many bytes does: its
/// own anchor, and that of waking up, fall into one of two ways by chance, and tell a moment less well than it is.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Slower {
    /// Products, and passes over what is in a core's caches.
    pub clock: f64,
    /// Passes over memory.
    pub memory: f64,
}

/// Passes over memory take up to so many times longer in one process than in another, by the pages that it got: in
/// eighteen validations on an idle machine 0.72 to 1.00, and the ops were no faster for it.
const PAGES: f64 = 1.5;

impl Slower {
    /// A difference that is no larger than the samples of either moment spread is none. A slower clock, and a host whose
    /// cores others have, slow products and passes in caches down alike: what the two say together is believed, the
    /// smaller of both, and what one says alone is not (traces/measured/cpu: predictions come closer without it).
    pub fn between(then: &Speed, now: &Speed) -> Slower {
        let of = |then: Anchor, now: Anchor| {
            let ratio = now.seconds / then.seconds;
            if ratio.ln().abs() <= then.spread.max(now.spread) { 1.0 } else { ratio }
        };
        let [product, pass] = [of(then.product, now.product), of(then.pass, now.pass)];
        let clock = if (product - 1.0) * (pass - 1.0) > 0.0 {
            if product.ln().abs() < pass.ln().abs() { product } else { pass }
        } else {
            1.0
        };
        let stream = of(then.stream, now.stream);
        let memory = if stream.ln().abs() > PAGES.ln() { stream } else { clock };
        Slower { clock, memory }
    }

    /// Of a kernel that moves so many bytes.
    fn of_bytes(&self, bytes: f64) -> f64 {
        let far = ((bytes / CACHED).ln() / (IN_MEMORY / CACHED).ln()).clamp(0.0, 1.0);
        self.clock.powf(1.0 - far) * self.memory.powf(far)
    }

    fn of_size(&self, size: &[f64]) -> f64 {
        match *size {
            // Products, and attention, which is products.
            [_, _, _, ..] => self.clock,
            [_, bytes] | [bytes] => self.of_bytes(bytes),
            [] => 1.0,
        }
    }

    fn curve(&self, curve: &mut Curve, of: &dyn Fn(&[f64]) -> f64) {
        // Coefficients are a start, and work: what is left over at each point stays with the points.
        let [first, last] = [curve.points.first(), curve.points.last()].map(|p| p.map_or(1.0, |p| of(&p.size)));
        let (start, work) = (first.min(last), first.max(last));
        for (i, c) in curve.fit.iter_mut().enumerate() {
            *c *= if i == 0 { start } else { work };
        }
        curve.points.iter_mut().for_each(|p| p.seconds *= of(&p.size));
    }
}

impl Profile {
    /// The profile had it been measured when the machine was so much slower.
    pub fn at(&self, slower: &Slower) -> Profile {
        let mut new = self.clone();
        new.kernels.values_mut().for_each(|c| slower.curve(c, &|size| slower.of_size(size)));
        if let Some(t) = &mut new.threads {
            for copies in [&mut t.alone, &mut t.beside.copies] {
                for curve in [&mut copies.post, &mut copies.take, &mut copies.add] {
                    slower.curve(curve, &|size| slower.of_size(size));
                }
            }
            for curves in [&mut t.exchanges, &mut t.beside.exchanges, &mut t.beside.kernels] {
                curves.values_mut().for_each(|c| slower.curve(c, &|size| slower.of_size(size)));
            }
            t.op_s *= slower.clock;
        }
        new
    }

    /// The profile of a GPU that trains without rest: what clocks decide takes as much longer as it does in steps
    /// without rest ([`GpuSide::sustained`](super::measured::GpuSide)), what memory decides as long as before.
    pub fn under_load(&self) -> Profile {
        let sustained = self.gpu.as_ref().and_then(|gpu| gpu.sustained).unwrap_or(1.0).max(1.0);
        if sustained == 1.0 { self.clone() } else { self.at(&Slower { clock: sustained, memory: 1.0 }) }
    }

    /// The profile of a GPU that rests between steps, as it was measured: what load does to it is left out.
    pub fn at_rest(mut self) -> Profile {
        if let Some(gpu) = &mut self.gpu {
            gpu.sustained = None;
        }
        self
    }

    /// What the machine's speed was when the profile was measured; none in one that did not look.
    pub fn speed(&self) -> Option<&Speed> {
        self.threads.as_ref().and_then(|t: &Threads| t.speed.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::curve::Point;

    fn curve(sizes: &[&[f64]], seconds: impl Fn(&[f64]) -> f64) -> Curve {
        let point = |size: &&[f64]| Point { size: size.to_vec(), seconds: seconds(size), spread: 0.0, runs: 1 };
        Curve::new(sizes.iter().map(point).collect())
    }

    const SLOWER: Slower = Slower { clock: 1.25, memory: 1.5 };

    /// Between the points that were timed, too.
    #[test]
    fn products_take_as_much_longer_as_the_anchor() {
        let sizes: Vec<Vec<f64>> = (4..12).map(|i| vec![2f64.powi(i), 512.0, 256.0]).collect();
        let sizes: Vec<&[f64]> = sizes.iter().map(Vec::as_slice).collect();
        let before = curve(&sizes, |s| 1e-6 + s.iter().product::<f64>() / 5e10);
        let mut after = before.clone();
        SLOWER.curve(&mut after, &|size| SLOWER.of_size(size));
        for m in [16.0, 100.0, 3000.0] {
            let at = [m, 512.0, 256.0];
            assert!((after.at(&at).0 / before.at(&at).0 - 1.25).abs() < 1e-6, "{m}");
        }
    }

    #[test]
    fn what_is_in_a_cache_slows_with_the_cache_and_what_is_in_memory_with_memory() {
        let sizes: Vec<Vec<f64>> = (10..28).map(|i| vec![2f64.powi(i)]).collect();
        let sizes: Vec<&[f64]> = sizes.iter().map(Vec::as_slice).collect();
        let before = curve(&sizes, |s| 1e-6 + s[0] / 1e10);
        let mut after = before.clone();
        SLOWER.curve(&mut after, &|size| SLOWER.of_size(size));
        let ratio = |bytes: f64| after.at(&[bytes]).0 / before.at(&[bytes]).0;
        assert!((ratio(65536.0) - 1.25).abs() < 0.02 && (ratio(33554432.0) - 1.5).abs() < 0.02);
        assert!((1.3..1.45).contains(&ratio(4e6)), "{}", ratio(4e6));
    }

    #[test]
    fn what_the_samples_do_not_tell_apart_is_the_same_speed() {
        let [product, pass, stream, copy, wake] =
            [2e-3, 1e-4, 3e-3, 2e-4, 3e-6].map(|seconds| Anchor { seconds, spread: 0.05 });
        let now = Speed { product, pass, stream, copy, wake, samples: 9 };
        let same = Slower { clock: 1.0, memory: 1.0 };
        assert_eq!(Slower::between(&now, &now), same);
        let slower = |seconds: f64, spread: f64| Speed { stream: Anchor { seconds, spread }, ..now };
        assert_eq!(Slower::between(&now, &slower(6e-3, 0.0)), Slower { memory: 2.0, ..same });
        assert_eq!(Slower::between(&now, &slower(3.1e-3, 0.0)), same);
        assert_eq!(Slower::between(&now, &slower(6e-3, 0.8)), same);
        assert_eq!(Slower::between(&now, &slower(4e-3, 0.0)), same);
    }

    #[test]
    fn a_clock_is_what_products_and_passes_say_together() {
        let at = |seconds: f64| Anchor { seconds, spread: 0.01 };
        let speed = |product: f64, pass: f64| {
            let [stream, copy, wake] = [at(1.0), at(1.0), at(1.0)];
            Speed { product: at(product), pass: at(pass), stream, copy, wake, samples: 9 }
        };
        let found = |product, pass| Slower::between(&speed(1.0, 1.0), &speed(product, pass)).clock;
        for (product, pass, want) in
            [(1.2, 1.3, 1.2), (0.9, 0.8, 0.9), (0.9, 1.1, 1.0), (0.9, 1.0, 1.0), (1.0, 1.2, 1.0)]
        {
            assert!((found(product, pass) - want).abs() < 1e-12, "{product}, {pass}: {}", found(product, pass));
        }
    }
}
