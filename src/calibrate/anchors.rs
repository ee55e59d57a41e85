//! The machine's speed, sampled beside whatever else is measured: often, and a little each time, so that what drifts
//! drifts through both.

use crate::compare::stats::{quantile, spread};
use crate::device::speed::{Anchor, Speed};
use crate::exec::probe;
use crate::exec::rate::Yardstick;

#[derive(Default)]
pub struct Anchors {
    yardstick: Yardstick,
    /// Product, pass, stream, copy, wake.
    all: [Vec<f64>; 5],
}

/// Messages of a sample: some to copy, more to wait for.
const COPIED: (u64, u32) = (1 << 20, 6);
const WAITED: (u64, u32) = (64, 40);
/// Kernels of a sample; the first warms the caches up.
const TIMES: usize = 4;

impl Anchors {
    /// Takes some tens of milliseconds.
    pub fn sample(&mut self) {
        for i in 0..TIMES {
            let seconds = self.yardstick.kernels();
            if i > 0 {
                self.all.iter_mut().zip(seconds).for_each(|(all, s)| all.push(s));
            }
        }
        let whole = |m: &probe::Message| m.post_s + m.take_s;
        self.all[3].extend(probe::messages(COPIED.0, COPIED.1).0.iter().map(whole));
        self.all[4].extend(probe::messages(WAITED.0, WAITED.1).0.iter().map(|m| m.wake_s));
    }

    /// As everything else is told: the median. None before a sample.
    pub fn speed(&self) -> Option<Speed> {
        let samples = self.all[0].len() as u32;
        let anchor = |all: &Vec<f64>| Anchor { seconds: quantile(all, 0.5).max(1e-8), spread: spread(all) };
        let [product, pass, stream, copy, wake] = self.all.each_ref().map(anchor);
        (samples > 0).then_some(Speed { product, pass, stream, copy, wake, samples })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_all_of_it() {
        let mut anchors = Anchors::default();
        assert_eq!(anchors.speed(), None);
        anchors.sample();
        let speed = anchors.speed().unwrap();
        assert!(speed.parts().iter().all(|(_, a)| a.seconds > 0.0) && speed.samples as usize == TIMES - 1);
    }
}
