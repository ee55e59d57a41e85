//! A run, failure by failure: what a closed form leaves out are few spares, planned stops and the spread of luck.

use super::Run;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use std::collections::VecDeque;

/// Where the time of a run went, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Spent {
    /// Training that was kept.
    pub training: f64,
    /// Standing still for checkpoints that were kept.
    pub stalled: f64,
    /// Training, and checkpoints, that a failure threw away.
    pub lost: f64,
    pub detecting: f64,
    /// For a node, where none stood by.
    pub waiting: f64,
    pub restarting: f64,
    pub loading: f64,
    /// How many failures, and planned stops, there were.
    pub failures: f64,
    pub stops: f64,
}

impl Spent {
    pub fn wall(&self) -> f64 {
        self.training + self.stalled + self.lost + self.detecting + self.waiting + self.restarting + self.loading
    }

    pub fn ettr(&self) -> f64 {
        self.training / self.wall()
    }

    /// Time in which a planned stop could come: of training, and of saves other than those before such stops.
    pub fn up(&self, run: &Run) -> f64 {
        self.training + self.lost + self.stalled - self.stops * run.checkpoint.save_s
    }

    /// Both together.
    fn add(&mut self, other: &Spent) {
        let both = |mine: &mut f64, theirs: f64| *mine += theirs;
        both(&mut self.training, other.training);
        both(&mut self.stalled, other.stalled);
        both(&mut self.lost, other.lost);
        both(&mut self.detecting, other.detecting);
        both(&mut self.waiting, other.waiting);
        both(&mut self.restarting, other.restarting);
        both(&mut self.loading, other.loading);
        both(&mut self.failures, other.failures);
        both(&mut self.stops, other.stops);
    }

    fn scaled(self, by: f64) -> Spent {
        Spent {
            training: self.training * by,
            stalled: self.stalled * by,
            lost: self.lost * by,
            detecting: self.detecting * by,
            waiting: self.waiting * by,
            restarting: self.restarting * by,
            loading: self.loading * by,
            failures: self.failures * by,
            stops: self.stops * by,
        }
    }
}

/// Many runs of the same.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Played {
    pub runs: usize,
    /// The mean of the runs.
    pub spent: Spent,
    /// Of the mean time; and that which 5 and 95 % of the runs stay below.
    pub ettr: f64,
    pub ettr_p5: f64,
    pub ettr_p95: f64,
    /// One run was given up, and no other begun: no end was in sight.
    pub hopeless: bool,
}

/// A run is given up after so many times the time that it would take without failures, or that getting over one takes if that is
/// longer.
const HOPELESS: f64 = 50.0;

/// Or after so many failures: of those that come within a recovery, milliseconds apart, it would be long until the time is.
const MOST_FAILURES: f64 = 1e6;

/// Plays `runs` runs of `work` seconds of training each, the seeds in a row.
pub fn play(run: &Run, work: f64, runs: usize, seed: u64) -> Played {
    let mut each = vec![];
    let mut hopeless = false;
    while each.len() < runs && !hopeless {
        let (spent, given_up) = once(run, work, seed.wrapping_add(each.len() as u64));
        each.push(spent);
        hopeless = given_up;
    }
    let runs = each.len();
    let mut ratios: Vec<f64> = each.iter().map(Spent::ettr).collect();
    ratios.sort_by(f64::total_cmp);
    let quantile = |share: f64| ratios[((ratios.len() - 1) as f64 * share).round() as usize];
    let mut sum = Spent::default();
    each.iter().for_each(|spent| sum.add(spent));
    let spent = sum.scaled(1.0 / runs as f64);
    Played { runs, ettr: spent.ettr(), ettr_p5: quantile(0.05), ettr_p95: quantile(0.95), hopeless, spent }
}

/// One run, and whether it was given up.
fn once(run: &Run, work: f64, seed: u64) -> (Spent, bool) {
    let longest_wait = if run.spares.is_some() { run.repair_s } else { 0.0 };
    let patience = HOPELESS * work.max(run.recover_s() + longest_wait);
    let mut luck = Luck(ChaCha8Rng::seed_from_u64(seed));
    let mut spares = Spares::new(run.spares);
    let mut spent = Spent::default();
    loop {
        let left = work - spent.training;
        let failure = luck.wait(run.failures());
        let stop = luck.wait(run.planned);
        let up = Up::until(run, left, failure.min(stop));
        spent.training += up.kept;
        spent.stalled += up.stalled;
        if up.done {
            return (spent, false);
        }
        if stop < failure {
            // What a failure would have thrown away is saved first.
            spent.stops += 1.0;
            spent.training += up.since;
            spent.stalled += up.lost - up.since + run.checkpoint.save_s;
            spent.restarting += run.restart_s;
            spent.loading += run.checkpoint.load_s;
        } else {
            spent.lost += up.lost;
            recover(run, &mut luck, &mut spares, &mut spent, patience);
        }
        if spent.wall() > patience || spent.failures > MOST_FAILURES {
            return (spent, true);
        }
    }
}

/// From a failure until training goes on. A failure on the way begins it anew, until all patience is gone; nodes that were
/// waited for before it are waited for still.
fn recover(run: &Run, luck: &mut Luck, spares: &mut Spares, spent: &mut Spent, patience: f64) {
    let mut all_ready: f64 = 0.0;
    loop {
        spent.failures += 1.0;
        if luck.chance(run.failures_with_node / run.failures()) {
            all_ready = all_ready.max(spares.take(spent.wall(), run.repair_s));
        }
        let wait = (all_ready - spent.wall() - run.detect_s).max(0.0);
        let mut next = luck.wait(run.failures());
        let phases = [
            (run.detect_s, &mut spent.detecting),
            (wait, &mut spent.waiting),
            (run.restart_s, &mut spent.restarting),
            (run.checkpoint.load_s, &mut spent.loading),
        ];
        let mut through = true;
        for (takes, account) in phases {
            *account += takes.min(next);
            through &= takes <= next;
            next -= takes.min(next);
            if !through {
                break;
            }
        }
        if through || spent.wall() > patience || spent.failures > MOST_FAILURES {
            return;
        }
    }
}

/// What a time of being up brings.
struct Up {
    /// Training that is safe, and the stalls for it.
    kept: f64,
    stalled: f64,
    /// Training and stalls that no safe checkpoint has.
    lost: f64,
    /// Of these, the training.
    since: f64,
    /// All of the work is done.
    done: bool,
}

impl Up {
    /// Training for `left` seconds of work, if nothing happens before `until`.
    fn until(run: &Run, left: f64, until: f64) -> Up {
        let (t, w, d) = (run.interval_s, run.checkpoint.stall_s, run.checkpoint.behind_s());
        let cycle = t + w;
        // The last stretch of work ends the run: nobody waits for a checkpoint behind it.
        let checkpoints = ((left / t).ceil() - 1.0).max(0.0);
        let stalls = checkpoints * w;
        if left + stalls <= until {
            return Up { kept: left, stalled: stalls, lost: 0.0, since: 0.0, done: true };
        }
        let safe = ((until - d) / cycle).floor().clamp(0.0, checkpoints);
        let begun = (until / cycle).floor().min(checkpoints);
        let trained = (begun * t + (until - begun * cycle).min(t)).min(left);
        Up { kept: safe * t, stalled: safe * w, lost: until - safe * cycle, since: trained - safe * t, done: false }
    }
}

/// Nodes that stand by, and when those in repair come back.
struct Spares {
    /// That never were in use; `None` for as many as it takes.
    unused: Option<u32>,
    /// When nodes that failed are ready, the first to fail first: every repair takes as long.
    repaired: VecDeque<f64>,
}

impl Spares {
    fn new(spares: Option<u32>) -> Spares {
        Spares { unused: spares, repaired: VecDeque::new() }
    }

    /// Takes a node at `now`, sends the failed one into repair, and says when the new one is ready.
    fn take(&mut self, now: f64, repair: f64) -> f64 {
        let Some(unused) = &mut self.unused else { return now };
        self.repaired.push_back(now + repair);
        if *unused > 0 {
            *unused -= 1;
            return now;
        }
        self.repaired.pop_front().expect("one was pushed").max(now)
    }
}

struct Luck(ChaCha8Rng);

impl Luck {
    /// Until something happens that does so `rate` times a second.
    fn wait(&mut self, rate: f64) -> f64 {
        let uniform: f64 = self.0.random();
        if rate > 0.0 { -(1.0 - uniform).ln() / rate } else { f64::INFINITY }
    }

    fn chance(&mut self, share: f64) -> bool {
        self.0.random::<f64>() < share
    }
}
