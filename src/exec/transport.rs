//! How bytes pass between ranks that are threads: a message is handed over, never shared. Counts what is
//! delivered, and notices when every rank waits.

use super::arena::Data;
use crate::cluster::Ports;
use crate::error::Error;
use crate::spec::Throttle;
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Names a message: who sends, who receives, and which one it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    pub from: u32,
    pub to: u32,
    /// The number of the sender's op.
    pub node: u32,
    /// Leg of a transfer, or round of a collective.
    pub part: u32,
}

struct Message {
    data: Data,
    tag: u32,
    /// When the message arrives, in the hub's seconds; `None` while its receiver has not asked for it.
    due: Option<f64>,
}

#[derive(Default)]
struct Inner {
    mail: FxHashMap<Key, Message>,
    /// The links, where they are slowed down, and the messages that receivers have asked for and nobody has sent.
    ports: Option<Ports>,
    asked: FxHashSet<Key>,
    /// Messages that were taken and whose sender does not know it yet.
    taken: FxHashSet<Key>,
    /// Members of a collective that have started, by its first member and that member's op.
    started: FxHashMap<(u32, u32), Vec<u32>>,
    /// Turn that each shared device is at.
    turns: Vec<u32>,
    sent: Vec<u64>,
    /// What each rank waits for; `None` while it does not wait.
    waiting: Vec<Option<String>>,
    finished: u32,
    /// The first rank that came, and its plan.
    plan: Option<(u32, String)>,
    /// The rank whose next message gets lost.
    loses: Option<u32>,
    /// Why everybody has to stop; `None` while nobody has to.
    stop: Option<String>,
}

pub struct Hub {
    inner: Mutex<Inner>,
    zero: Instant,
    /// The worker of each rank: the thread that runs it.
    workers: Vec<u32>,
    /// Counts, by worker, everything that could let a rank of it go on.
    news: Vec<AtomicU64>,
    /// What each worker sleeps on: only the workers that the news concerns are woken.
    changed: Vec<Condvar>,
    /// When each worker was last heard of, see [`sign`](Hub::sign).
    signs: Vec<AtomicU64>,
    /// How long a worker that has nothing to do stays awake.
    awake: Duration,
    /// Whether links are slow.
    throttled: bool,
}

/// The sign of a worker that nobody expects to hear of: it runs a kernel, or has ended.
const BUSY: u64 = u64::MAX;

/// How long a worker looks for news before it sleeps, where each has a core: to wake a sleeping thread takes the system
/// some ten microseconds or more, and most waits are shorter than this. It yields its core to whoever else wants it.
pub const AWAKE: Duration = Duration::from_millis(2);

/// Looks for news at the start of [`AWAKE`] that a worker makes without a call of the system.
const KEEN: u32 = 200;

/// How long a worker that neither waits nor computes may be silent before it counts as dead.
const SILENT: Duration = Duration::from_secs(4);

/// How often waiting workers look for dead ones.
const ROUND: Duration = Duration::from_secs(1);

/// How long before its time a sleeping thread is woken.
const AWAKE_S: f64 = 80e-6;

impl Inner {
    /// When a message arrives whose sender and receiver are both ready `now`.
    fn arrival(&mut self, key: Key, bytes: u64, now: f64) -> f64 {
        self.ports.as_mut().map_or(now, |ports| ports.send(key.from, key.to, bytes, now))
    }

    /// When the next message under way arrives at one of these ranks; `None`: none is under way, or links are not
    /// slowed down.
    fn next_due(&self, of: impl Fn(u32) -> bool) -> Option<f64> {
        self.ports.as_ref()?;
        self.mail.iter().filter(|(key, _)| of(key.to)).filter_map(|(_, m)| m.due).reduce(f64::min)
    }
}

impl Hub {
    /// The hub of a run. `workers`: the device of each rank, whose thread runs it. `throttle`: how slow links are made;
    /// `None`: as fast as threads hand over.
    pub fn new(workers: &[u32], throttle: Option<Throttle>) -> Hub {
        let n = workers.len();
        let threads = workers.iter().max().map_or(0, |w| *w as usize + 1);
        let inner = Inner {
            ports: throttle.map(|throttle| Ports::new(n, throttle)),
            turns: vec![0; threads],
            sent: vec![0; n],
            waiting: vec![None; n],
            ..Inner::default()
        };
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let counts = || (0..threads).map(|_| AtomicU64::new(0)).collect();
        Hub {
            inner: Mutex::new(inner),
            zero: Instant::now(),
            workers: workers.to_vec(),
            news: counts(),
            changed: (0..threads).map(|_| Condvar::new()).collect(),
            signs: counts(),
            awake: if threads <= cores { AWAKE } else { Duration::ZERO },
            throttled: throttle.is_some(),
        }
    }

    fn worker(&self, rank: u32) -> usize {
        self.workers[rank as usize] as usize
    }

    fn now(&self) -> f64 {
        self.zero.elapsed().as_secs_f64()
    }

    /// A rank that panicked held no lock that matters: what it left is consistent.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Tells a rank's worker that the rank may be able to go on: the worker looks again, and none of its ranks counts
    /// as waiting until it has.
    fn tell(&self, inner: &mut Inner, rank: u32) {
        self.tell_worker(inner, self.worker(rank));
    }

    fn tell_worker(&self, inner: &mut Inner, worker: usize) {
        self.news[worker].fetch_add(1, Ordering::Release);
        let own = inner.waiting.iter_mut().zip(&self.workers).filter(|(_, w)| **w as usize == worker);
        if own.fold(false, |any, (waiting, _)| waiting.take().is_some() || any) {
            self.sign_worker(worker, false);
        }
        self.changed[worker].notify_all();
    }

    fn tell_all(&self, inner: &mut Inner) {
        (0..self.changed.len()).for_each(|worker| self.tell_worker(inner, worker));
    }

    pub fn send(&self, key: Key, data: Data, tag: u32) {
        let mut inner = self.lock();
        if inner.loses == Some(key.from) {
            inner.loses = None;
            return;
        }
        // A slow link takes a message when both its ends are there.
        let due = match inner.ports.is_none() || inner.asked.remove(&key) {
            true => Some(inner.arrival(key, data.bytes(), self.now())),
            false => None,
        };
        inner.mail.insert(key, Message { data, tag, due });
        self.tell(&mut inner, key.to);
    }

    /// Takes a message, if it is there; asks for it, if not. A sender that waits for delivery may go on from now.
    pub fn receive(&self, key: Key, sender_waits: bool) -> Option<(Data, u32)> {
        let mut inner = self.lock();
        if inner.ports.is_some() && !self.has_arrived(&mut inner, key) {
            return None;
        }
        let message = inner.mail.remove(&key)?;
        inner.sent[key.from as usize] += message.data.bytes();
        if sender_waits {
            inner.taken.insert(key);
            self.tell(&mut inner, key.from);
        }
        Some((message.data, message.tag))
    }

    /// Whether a slow link has brought a message that is asked for.
    fn has_arrived(&self, inner: &mut Inner, key: Key) -> bool {
        let now = self.now();
        let Some(message) = inner.mail.get(&key) else {
            inner.asked.insert(key);
            return false;
        };
        let (due, bytes) = (message.due, message.data.bytes());
        let due = due.unwrap_or_else(|| inner.arrival(key, bytes, now));
        inner.mail.get_mut(&key).expect("it was there").due = Some(due);
        due <= now
    }

    /// Whether a message that was sent has been taken. True only once for each message.
    pub fn delivered(&self, key: Key) -> bool {
        self.lock().taken.remove(&key)
    }

    /// Notes that a member of a collective has started; the last one lets all of them go on.
    pub fn start(&self, collective: (u32, u32), rank: u32, members: &[u32]) {
        let mut inner = self.lock();
        let started = inner.started.entry(collective).or_default();
        started.push(rank);
        if started.len() == members.len() {
            members.iter().for_each(|&m| self.tell(&mut inner, m));
        }
    }

    pub fn started(&self, collective: (u32, u32)) -> u32 {
        self.lock().started.get(&collective).map_or(0, |ranks| ranks.len() as u32)
    }

    /// Members of a collective that have not started.
    pub fn missing(&self, collective: (u32, u32), members: &[u32]) -> String {
        let inner = self.lock();
        let here = inner.started.get(&collective);
        let missing: Vec<u32> = members.iter().copied().filter(|m| here.is_none_or(|here| !here.contains(m))).collect();
        format!("ranks {missing:?}")
    }

    pub fn turn(&self, device: u32) -> u32 {
        self.lock().turns[device as usize]
    }

    /// Ends a turn on a shared device; the next is `rank`'s.
    pub fn end_turn(&self, device: u32, next: Option<u32>) {
        let mut inner = self.lock();
        inner.turns[device as usize] += 1;
        if let Some(rank) = next {
            self.tell(&mut inner, rank);
        }
    }

    /// The count of news for a worker's ranks.
    pub fn news(&self, worker: u32) -> u64 {
        self.news[worker as usize].load(Ordering::Acquire)
    }

    pub fn sent_bytes(&self) -> Vec<u64> {
        self.lock().sent.clone()
    }

    /// Waits until there is news for a worker since `seen`, or a slow link brings something to a rank of it. If no rank
    /// is left that could bring any, stops everybody and says who waits for what: `what` names the waiting ranks of
    /// this worker, and what each waits for. Errors: everybody was stopped.
    pub fn wait(&self, worker: u32, seen: u64, what: impl FnOnce() -> Vec<(u32, String)>) -> Result<(), Error> {
        let w = worker as usize;
        self.sign_worker(w, false);
        let due = self.throttled.then(|| self.lock().next_due(|rank| self.worker(rank) == w)).flatten();
        if self.news_soon(worker, seen, due) {
            return self.check(&self.lock());
        }
        // Whoever says what he waits for looks here.
        let waiting = what();
        let mut inner = self.lock();
        if let Some(due) = due {
            return self.wait_until(due, (worker, seen), inner);
        }
        if inner.stop.is_none() && self.news(worker) == seen {
            waiting.into_iter().for_each(|(rank, what)| inner.waiting[rank as usize] = Some(what));
            let all = inner.waiting.iter().filter(|w| w.is_some()).count() + inner.finished as usize;
            if all == inner.waiting.len() {
                inner.stop = Some(deadlock(&inner.waiting));
                self.tell_all(&mut inner);
            }
        }
        while inner.stop.is_none() && self.news(worker) == seen {
            let woken = self.changed[w].wait_timeout(inner, ROUND).unwrap_or_else(|poisoned| poisoned.into_inner());
            inner = woken.0;
            if woken.1.timed_out() {
                self.find_the_dead(&mut inner);
            }
        }
        self.check(&inner)
    }

    /// Stays awake for a while to see whether there is news, or a slow link brings what is due.
    fn news_soon(&self, worker: u32, seen: u64, due: Option<f64>) -> bool {
        let (begun, mut looks) = (Instant::now(), 0);
        while begun.elapsed() < self.awake {
            if self.news(worker) != seen || due.is_some_and(|due| due <= self.now()) {
                return true;
            }
            looks += 1;
            if looks < KEEN { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        false
    }

    /// Waits for a message that is under way: the system wakes a thread up to some ten microseconds late, so the last
    /// of the time is spent awake.
    fn wait_until<'a>(
        &'a self,
        due: f64,
        (worker, seen): (u32, u64),
        mut inner: MutexGuard<'a, Inner>,
    ) -> Result<(), Error> {
        let w = worker as usize;
        self.sign_worker(w, true);
        while inner.stop.is_none() && self.news(worker) == seen {
            let left = due - self.now();
            if left <= 0.0 {
                break;
            }
            if left > AWAKE_S {
                let sleep = Duration::from_secs_f64(left - AWAKE_S);
                let woken = self.changed[w].wait_timeout(inner, sleep);
                inner = woken.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
            } else {
                drop(inner);
                std::thread::yield_now();
                inner = self.lock();
            }
        }
        self.sign_worker(w, false);
        self.check(&inner)
    }

    fn check(&self, inner: &Inner) -> Result<(), Error> {
        match &inner.stop {
            Some(why) => Err(Error::device("run", why)),
            None => Ok(()),
        }
    }

    /// Notes that a rank has ended; its worker may have others.
    pub fn finish(&self, rank: u32) {
        let mut inner = self.lock();
        self.sign(rank, true);
        inner.finished += 1;
        // The ranks left may now be waiting for nobody: let them look, and find out.
        self.tell_all(&mut inner);
    }

    /// Notes that a rank's worker is alive. While it is `busy`, in a kernel or waiting for a slow link, and when its
    /// last rank has ended, nobody expects to hear of it.
    pub fn sign(&self, rank: u32, busy: bool) {
        self.sign_worker(self.worker(rank), busy);
    }

    fn sign_worker(&self, worker: usize, busy: bool) {
        let now = if busy { BUSY } else { self.zero.elapsed().as_millis() as u64 };
        self.signs[worker].store(now, Ordering::Relaxed);
    }

    /// Stops everybody if a rank has fallen silent.
    fn find_the_dead(&self, inner: &mut Inner) {
        let now = self.zero.elapsed().as_millis() as u64;
        let silent = |r: &usize| {
            let last = self.signs[self.worker(*r as u32)].load(Ordering::Relaxed);
            last != BUSY && now.saturating_sub(last) > SILENT.as_millis() as u64
        };
        let Some(dead) = (0..self.workers.len()).filter(|&r| inner.waiting[r].is_none()).find(silent) else { return };
        let why = format!("rank {dead} is dead: it was not heard of for {} s", SILENT.as_secs());
        inner.stop.get_or_insert(why);
        self.tell_all(inner);
    }

    /// Lets a worker fall silent, none of whose ranks says anything any more, so that others find it dead. Ends when
    /// everybody is stopped, with that error.
    pub fn fall_silent(&self, worker: u32) -> Result<(), Error> {
        self.sign_worker(worker as usize, false);
        let mut inner = self.lock();
        while inner.stop.is_none() {
            let woken = self.changed[worker as usize].wait(inner);
            inner = woken.unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        self.check(&inner)
    }

    /// Has the next message that a rank sends get lost.
    pub fn lose_one(&self, from: u32) {
        self.lock().loses = Some(from);
    }

    /// Notes the plan of a rank, which has to be that of all others. Errors: it is another one.
    pub fn agree(&self, rank: u32, plan: &str) -> Result<(), Error> {
        let mut inner = self.lock();
        let (first, first_plan) = inner.plan.get_or_insert_with(|| (rank, plan.to_string()));
        if first_plan == plan {
            return Ok(());
        }
        Err(Error::plan(format!(
            "rank {rank} has plan {plan}, rank {first} has {first_plan}; start all ranks with the same file"
        )))
    }

    /// Stops everybody for a reason; the first reason stands.
    pub fn stop(&self, why: String) {
        let mut inner = self.lock();
        inner.stop.get_or_insert(why);
        self.tell_all(&mut inner);
    }

    /// Errors: everybody was stopped.
    pub fn halted(&self) -> Result<(), Error> {
        self.check(&self.lock())
    }

    /// Why everybody stopped, if they did.
    pub fn stopped(&self) -> Option<String> {
        self.lock().stop.clone()
    }
}

/// Names each waiting rank, its op, and what that waits for.
fn deadlock(waiting: &[Option<String>]) -> String {
    let waits = waiting.iter().enumerate().filter_map(|(r, w)| w.as_ref().map(|w| format!("rank {r} waits in {w}")));
    format!("deadlock: {}", few(waits.collect()))
}

/// The most ranks that an error names: nobody reads more.
const NAMED: usize = 32;

/// The first of many, and how many more.
pub fn few(all: Vec<String>) -> String {
    let more = if all.len() > NAMED { format!("; and {} more ranks", all.len() - NAMED) } else { String::new() };
    all.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ") + &more
}
