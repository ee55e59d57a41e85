//! The effective training time ratio of a run without end, and the interval between checkpoints that is best.
//!
//! Failures come at random at a rate `l`, also while a run recovers. Training between two checkpoints takes `t`, a
//! checkpoint stops it for `w` and is safe `d` later; to recover takes `r`. After a recovery the run stays up for a time
//! that is exponentially distributed, and checkpoint k is safe after `k (t + w) + d`, so that the work kept of it is
//! `t` times the sum over k of `exp(-l (k (t + w) + d))`, a geometric series. A recovery that must not be interrupted for
//! `r` takes `(exp(l r) - 1) / l`. Together
//!
//! ```text
//! ETTR = l t exp(-l (r + d)) / (exp(l (t + w)) - 1)
//! ```
//!
//! With `d = 0` this is Daly's (2006, equation 20); to the first order in `l` it is
//! `(1 - l (r + d + (t + w) / 2)) t / (t + w)`, that of Meta (arXiv:2410.21680).
//!
//! Planned stops come at a rate `p` while the run is up, and take `s`: a save, a restart and a load. The run is then up for
//! `1 / a` in the mean, with `a = l + p`, and it is a failure that ends it `l / a` of the time. A stop saves before it all
//! that was trained, which is the share of an endless row of `t` and `w` that lies before a time of the rate `a`:
//!
//! ```text
//! ETTR = (l t exp(-a d) / (exp(a (t + w)) - 1) + p / a (1 - exp(-a t)) / (1 - exp(-a (t + w)))) / (exp(l r) + p s)
//! ```

use super::Run;

/// Share of the time that ends as training that is kept, 0 to 1. Nodes that fail are replaced at once.
pub fn ettr(run: &Run) -> f64 {
    let (l, p, t, w) = (run.failures(), run.planned, run.interval_s, run.checkpoint.stall_s);
    let a = l + p;
    let kept = if a * (t + w) < 1e-12 {
        t / (t + w)
    } else {
        let cycle = a * (t + w);
        let by_checkpoints = l * t * (-a * run.checkpoint.behind_s()).exp() / cycle.exp_m1();
        by_checkpoints + p / a * (-a * t).exp_m1() / (-cycle).exp_m1()
    };
    let stop = run.checkpoint.save_s + run.restart_s + run.checkpoint.load_s;
    kept / ((l * run.recover_s()).exp() + p * stop)
}

/// Seconds of training between checkpoints at which [`ettr`] is largest, never less than a save needs, and whole steps where
/// those are known. The ratio has one maximum, if any: where all stops are planned it grows with the interval.
pub fn best_interval(run: &Run) -> f64 {
    let best = best_at_any_time(run);
    if run.step_s <= 0.0 {
        return best;
    }
    let least = (run.checkpoint.shortest_interval_s() / run.step_s).ceil().max(1.0);
    let [below, above] =
        [best / run.step_s, best / run.step_s + 1.0].map(|steps| steps.floor().max(least) * run.step_s);
    let at = |interval_s: f64| ettr(&Run { interval_s, ..run.clone() });
    if at(above) > at(below) { above } else { below }
}

fn best_at_any_time(run: &Run) -> f64 {
    let at = |log: f64| ettr(&Run { interval_s: log.exp(), ..run.clone() });
    let shortest = run.checkpoint.shortest_interval_s();
    let (mut low, mut high) = (shortest.ln(), (shortest.max(1.0) * 1e9).ln());
    // Golden section: two thirds of the range are left each time, near enough.
    const KEEP: f64 = 0.618_033_988_749_894_9;
    while high - low > 1e-6 {
        let (a, b) = (high - KEEP * (high - low), low + KEEP * (high - low));
        if at(a) >= at(b) { high = b } else { low = a }
    }
    ((low + high) / 2.0).exp()
}

/// Young's interval (1974), to the first order: the root of twice the stall times the time between failures.
pub fn young(run: &Run) -> f64 {
    (2.0 * run.checkpoint.stall_s / run.failures()).sqrt()
}
