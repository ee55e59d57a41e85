//! What a GPU's power limit does to its clocks. Kernels may draw more than the limit for some tens of milliseconds; then clocks
//! fall until what is done draws the limit, and rise again where there is less to do.
//!
//! The power of a kernel at clocks that are `1/c` of the full ones is `idle + (full - idle) / c^2`: of what switches, by frequency
//! times voltage squared, with a voltage that falls more slowly than the frequency. What clocks decide takes `c` times as long, what memory
//! decides as long as before. How much a kernel would draw at full clocks is not seen, since the limit does not let it; it follows
//! from how much slower it is there ([`Power`], measured by `calibrate`).

use super::measured::{Power, Pressed};
use crate::plan::{Work, WorkClass};

/// See the formula above.
const EXPONENT: f64 = 2.0;
/// What is measured ([`Pressed::what`]), in the order in which it is kept here: the last is decided by memory.
pub const KINDS: [&str; 4] = ["matmul", "attention", "attention_bwd", "memory"];
/// No kernel is so much better than those that it draws more.
const MOST: f64 = 1.1;
/// Where no kernel was held down while the others were measured, nothing follows from it.
const WINDOW_S: f64 = 0.04;

/// What a kernel draws and what its length is decided by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// At full clocks, beside what an idle GPU draws.
    watts: f64,
    /// Not by memory.
    by_clocks: bool,
}

impl Load {
    /// Nothing is known to hold it down.
    pub const NONE: Load = Load { watts: 0.0, by_clocks: false };
}

impl Pressed {
    /// How many times as long it takes in the long run as behind a rest.
    pub fn slower(&self) -> f64 {
        match (self.ramp.first(), self.ramp.last()) {
            (Some([_, first]), Some([_, last])) if *first > 0.0 => (last / first).max(1.0),
            _ => 1.0,
        }
    }

    /// The end of what is as it is behind a rest: seconds until half of the way is gone.
    fn until(&self) -> Option<f64> {
        let first = self.ramp.first()?[1];
        let half = first * (1.0 + self.slower()) / 2.0;
        let then = self.ramp.iter().position(|[_, seconds]| *seconds > half)?;
        then.checked_sub(1).map(|before| self.ramp[before][0])
    }
}

/// Work as it would be at full clocks, without what an idle GPU draws.
#[derive(Debug, Clone, Copy, Default)]
struct Done {
    seconds: f64,
    joules: f64,
}

/// A GPU's clocks as time passes.
#[derive(Debug, Clone)]
pub struct Clocks {
    limit_w: f64,
    idle_w: f64,
    /// Of what was measured, by [`KINDS`]: what it draws at full clocks and what it does in a second.
    kinds: [(f64, f64); 4],
    /// The limit is held to what is drawn in so long.
    window_s: f64,
    /// What was done since the window began, by what decides its length, and the seconds that have passed.
    by_clocks: Done,
    by_memory: Done,
    passed: f64,
    /// Full clocks over those of now.
    slower: f64,
}

/// Slowed by so little a kernel is not seen to be.
const SEEN: f64 = 1.01;

impl Clocks {
    /// Behind a rest. None where the profile does not say enough.
    pub fn new(power: &Power) -> Option<Clocks> {
        let (limit_w, idle_w) = (power.limit_w?, power.idle_w);
        let mut kinds = [(0.0, 0.0); 4];
        let mut window_s = None;
        for (kind, what) in kinds.iter_mut().zip(KINDS) {
            let pressed = power.pressed.iter().find(|pressed| pressed.what == what)?;
            let slower = pressed.slower();
            let watts = match slower > SEEN {
                true => (limit_w - idle_w) * slower.powf(EXPONENT),
                false => (pressed.watts.min(limit_w) - idle_w).max(0.0),
            };
            *kind = (watts, pressed.rate?);
            if slower > SEEN {
                window_s = window_s.or(pressed.until());
            }
        }
        let window_s = window_s.unwrap_or(WINDOW_S);
        let (by_clocks, by_memory) = (Done::default(), Done::default());
        Some(Clocks { limit_w, idle_w, kinds, window_s, by_clocks, by_memory, passed: 0.0, slower: 1.0 })
    }

    /// Of a kernel that takes so many seconds at full clocks: a FLOP, or a byte of what memory decides, draws what it does in the
    /// kernel that was measured.
    pub fn load(&self, work: &Work, seconds: f64) -> Load {
        let (kind, done) = match work.class {
            WorkClass::Gemm { .. } | WorkClass::Scan { .. } => (0, work.flops),
            WorkClass::Attention { backward, .. } => (1 + usize::from(backward), work.flops),
            WorkClass::Memory => (3, work.bytes),
        };
        let (watts, rate) = self.kinds[kind];
        let part = if seconds > 0.0 && rate > 0.0 { done as f64 / seconds / rate } else { 0.0 };
        Load { watts: watts * part.min(MOST), by_clocks: kind < 3 }
    }

    /// How many times as long a kernel takes now as at full clocks.
    pub fn slower(&self, load: Load) -> f64 {
        if load.by_clocks { self.slower } else { 1.0 }
    }

    /// Seconds until the clocks are looked at again.
    pub fn left(&self) -> f64 {
        self.window_s - self.passed
    }

    /// `passed` seconds have gone by, in which so many seconds' work of each was done.
    pub fn pass(&mut self, passed: f64, work: impl IntoIterator<Item = (Load, f64)>) {
        self.passed += passed;
        for (load, seconds) in work {
            let of = if load.by_clocks { &mut self.by_clocks } else { &mut self.by_memory };
            of.seconds += seconds;
            of.joules += seconds * load.watts;
        }
        // What is a rounding short of the window is none of a next one.
        if self.passed >= self.window_s * (1.0 - 1e-9) {
            let rest = self.passed - self.by_clocks.seconds * self.slower - self.by_memory.seconds;
            self.slower = self.balanced(rest.max(0.0));
            (self.by_clocks, self.by_memory, self.passed) = (Done::default(), Done::default(), 0.0);
        }
    }

    /// A kernel alone, of so many seconds at full clocks: what it takes.
    pub fn alone(&mut self, load: Load, seconds: f64) -> f64 {
        let (mut left, mut took) = (seconds, 0.0);
        while left > 0.0 {
            let slower = self.slower(load);
            let part = left.min(self.left() / slower);
            self.pass(part * slower, [(load, part)]);
            took += part * slower;
            left = if part < left { left - part } else { 0.0 };
        }
        took
    }

    /// Nothing is done for so long.
    pub fn idle(&mut self, seconds: f64) {
        let mut left = seconds;
        while left > 0.0 {
            let part = left.min(self.left());
            self.pass(part, []);
            left -= part;
        }
    }

    /// The clocks at which the window's work would have drawn the limit, no kernel having been there for `rest` seconds.
    fn balanced(&self, rest: f64) -> f64 {
        let (clocks, memory) = (self.by_clocks, self.by_memory);
        let mean = |c: f64| {
            let seconds = rest + memory.seconds + clocks.seconds * c;
            self.idle_w + (clocks.joules * c + memory.joules) / c.powf(EXPONENT) / seconds
        };
        let (mut full, mut low) = (1.0, 3.0);
        if mean(full) <= self.limit_w {
            return 1.0;
        }
        for _ in 0..40 {
            let c = (full + low) / 2.0;
            *(if mean(c) > self.limit_w { &mut full } else { &mut low }) = c;
        }
        low
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Products that are 1.2 times as long in the long run, and what does less.
    fn power() -> Power {
        let pressed = |what: &str, watts: f64, slower: f64| Pressed {
            what: what.into(),
            kernel: what.into(),
            watts,
            rate: Some(8e14),
            ramp: vec![[0.02, 1e-3], [0.03, 1e-3], [0.05, 1e-3 * slower], [2.0, 1e-3 * slower]],
            says: None,
        };
        let pressed = vec![
            pressed("matmul", 700.0, 1.2),
            pressed("attention", 700.0, 1.1),
            pressed("attention_bwd", 700.0, 1.05),
            pressed("memory", 600.0, 1.0),
        ];
        Power { limit_w: Some(700.0), idle_w: 150.0, pressed }
    }

    fn near(got: f64, want: f64) {
        assert!((got - want).abs() < 1e-6 * want, "{got} for {want}");
    }

    /// A kernel like the one that was measured, but for the part of its rate.
    fn like(clocks: &Clocks, kind: usize, part: f64) -> Load {
        Load { watts: clocks.kinds[kind].0 * part, by_clocks: kind < 3 }
    }

    /// What was measured of each kernel alone comes out of it again: full clocks for the first window, then its own.
    #[test]
    fn a_kernel_alone_is_as_slow_as_it_was_seen_to_be() {
        for (kind, slower) in [1.2, 1.1, 1.05, 1.0].into_iter().enumerate() {
            let mut clocks = Clocks::new(&power()).unwrap();
            let load = like(&clocks, kind, 1.0);
            near(clocks.alone(load, 0.03), 0.03);
            near(clocks.alone(load, 1.0), slower);
            near(clocks.slower(load), slower);
        }
    }

    /// A product at a third of the rate draws a third of what is drawn beside idling, and is not held down.
    #[test]
    fn what_does_little_draws_little() {
        let mut clocks = Clocks::new(&power()).unwrap();
        let class =
            WorkClass::Gemm { m: 8, n: 8, k: 8, cast: 0, result: 2, groups: 1, unaligned: false, of_weights: false };
        let product = Work { flops: 8e11 as u64, bytes: 0, class };
        let [fast, slow] = [1e-3, 3e-3].map(|seconds| clocks.load(&product, seconds));
        assert_eq!(fast, like(&clocks, 0, 1.0));
        near(slow.watts, fast.watts / 3.0);
        near(clocks.alone(slow, 1.0), 1.0);
        assert!(clocks.alone(fast, 1.0) > 1.15);
    }

    /// Passes over memory slow nothing by themselves, but leave less than products want; rests give it back.
    #[test]
    fn a_mixture_is_between_its_parts_and_a_rest_lets_clocks_rise() {
        let mut clocks = Clocks::new(&power()).unwrap();
        let (product, memory) = (like(&clocks, 0, 1.0), like(&clocks, 3, 1.0));
        let mixture = |clocks: &mut Clocks, rest: f64| {
            (0..200).for_each(|_| {
                clocks.alone(product, 1e-3);
                clocks.alone(memory, 1e-3);
                clocks.idle(rest);
            });
            clocks.slower(product)
        };
        let busy = mixture(&mut clocks, 0.0);
        assert!(busy > 1.05 && busy < 1.2, "{busy}");
        let often = mixture(&mut clocks, 0.1e-3);
        assert!(often > 1.0 && often < busy, "{often}");
        near(mixture(&mut clocks, 2e-3), 1.0);
        // As much work in any order and pieces draws as much.
        let (mut one, mut other) = (Clocks::new(&power()).unwrap(), Clocks::new(&power()).unwrap());
        one.pass(0.03, [(product, 0.02), (memory, 0.01)]);
        other.pass(0.02, [(memory, 0.01), (product, 0.01)]);
        other.pass(0.01, [(product, 0.01)]);
        assert!(one.slower(product) > 1.0);
        near(one.slower(product), other.slower(product));
    }

    #[test]
    fn what_was_not_measured_is_not_known() {
        assert!(Clocks::new(&Power { limit_w: None, ..power() }).is_none());
        let mut few = power();
        few.pressed.pop();
        assert!(Clocks::new(&few).is_none());
    }
}
