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
    /// Op of the sender.
    pub node: u32,
    /// Leg of a transfer, or round of a collective.
    pub part: u32,
}

struct Message {
    data: Data,
    tag: u32,
    /// When it is there, in seconds of the hub; none while its receiver has not asked for it.
    due: Option<f64>,
}

#[derive(Default)]
struct Inner {
    mail: FxHashMap<Key, Message>,
    /// The links, where they are slowed down, and what receivers have asked for that nobody has sent.
    ports: Option<Ports>,
    asked: FxHashSet<Key>,
    /// Messages that were taken and whose sender does not know it yet.
    taken: FxHashSet<Key>,
    /// Members of a collective that have started, by its first member and that member's op.
    started: FxHashMap<(u32, u32), Vec<u32>>,
    /// Turn that each shared device is at.
    turns: Vec<u32>,
    sent: Vec<u64>,
    /// Counts, by rank, everything that could let it go on.
    news: Vec<u64>,
    /// What each rank waits for, while it does.
    waiting: Vec<Option<String>>,
    finished: u32,
    /// The first rank that came, and its plan.
    plan: Option<(u32, String)>,
    /// Whose next message gets lost.
    loses: Option<u32>,
    /// Why everybody has to stop.
    stop: Option<String>,
}

pub struct Hub {
    inner: Mutex<Inner>,
    zero: Instant,
    /// One a rank: only those are woken whom the news concerns.
    changed: Vec<Condvar>,
    /// When each rank was last heard of, see [`sign`](Hub::sign).
    signs: Vec<AtomicU64>,
}

/// Signs of a rank that need no hearing: it runs a kernel, or has ended.
const BUSY: u64 = u64::MAX;

/// A rank that neither waits nor computes and is not heard of for so long is dead.
const SILENT: Duration = Duration::from_secs(4);

/// How often those that wait look for the dead.
const ROUND: Duration = Duration::from_secs(1);

/// How long before its time a sleeping thread is woken.
const AWAKE_S: f64 = 80e-6;

impl Inner {
    /// When a message arrives of which both ends are there `now`.
    fn arrival(&mut self, key: Key, bytes: u64, now: f64) -> f64 {
        self.ports.as_mut().map_or(now, |ports| ports.send(key.from, key.to, bytes, now))
    }

    /// The first message that is under way to a rank.
    fn next_due(&self, rank: u32) -> Option<f64> {
        self.ports.as_ref()?;
        self.mail.iter().filter(|(key, _)| key.to == rank).filter_map(|(_, m)| m.due).reduce(f64::min)
    }
}

impl Hub {
    /// `throttle`: how slow links are; none: as fast as threads hand over.
    pub fn new(ranks: u32, devices: u32, throttle: Option<Throttle>) -> Hub {
        let n = ranks as usize;
        let inner = Inner {
            ports: throttle.map(|throttle| Ports::new(n, throttle)),
            turns: vec![0; devices as usize],
            sent: vec![0; n],
            news: vec![0; n],
            waiting: vec![None; n],
            ..Inner::default()
        };
        Hub {
            inner: Mutex::new(inner),
            zero: Instant::now(),
            changed: (0..n).map(|_| Condvar::new()).collect(),
            signs: (0..n).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn now(&self) -> f64 {
        self.zero.elapsed().as_secs_f64()
    }

    /// A rank that panicked held no lock that matters: what it left is consistent.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A rank that waits may be able to go on, and does not count as waiting until it has looked again.
    fn tell(&self, inner: &mut Inner, rank: u32) {
        inner.news[rank as usize] += 1;
        if inner.waiting[rank as usize].take().is_some() {
            self.sign(rank, false);
        }
        self.changed[rank as usize].notify_all();
    }

    fn tell_all(&self, inner: &mut Inner) {
        (0..self.changed.len() as u32).for_each(|rank| self.tell(inner, rank));
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

    /// Whether a message that was sent has been taken. Says yes once.
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

    pub fn news(&self, rank: u32) -> u64 {
        self.lock().news[rank as usize]
    }

    pub fn sent_bytes(&self) -> Vec<u64> {
        self.lock().sent.clone()
    }

    /// Waits until there is news for `rank` since `seen`, or a slow link brings something. If no rank is left that
    /// could bring any, stops everybody and says who waits for what.
    pub fn wait(&self, rank: u32, seen: u64, what: String) -> Result<(), Error> {
        self.sign(rank, false);
        let mut inner = self.lock();
        let r = rank as usize;
        if let Some(due) = inner.next_due(rank) {
            return self.wait_until(due, (rank, seen), inner);
        }
        if inner.stop.is_none() && inner.news[r] == seen {
            inner.waiting[r] = Some(what);
            let all = inner.waiting.iter().filter(|w| w.is_some()).count() + inner.finished as usize;
            if all == inner.waiting.len() {
                inner.stop = Some(deadlock(&inner.waiting));
                self.tell_all(&mut inner);
            }
        }
        while inner.stop.is_none() && inner.news[r] == seen {
            let woken = self.changed[r].wait_timeout(inner, ROUND).unwrap_or_else(|poisoned| poisoned.into_inner());
            inner = woken.0;
            if woken.1.timed_out() {
                self.find_the_dead(&mut inner);
            }
        }
        inner.waiting[r] = None;
        self.check(&inner)
    }

    /// Waits for a message that is under way: the system wakes a thread up to some ten microseconds late, so the last
    /// of the time is spent awake.
    fn wait_until<'a>(
        &'a self,
        due: f64,
        (rank, seen): (u32, u64),
        mut inner: MutexGuard<'a, Inner>,
    ) -> Result<(), Error> {
        self.sign(rank, true);
        while inner.stop.is_none() && inner.news[rank as usize] == seen {
            let left = due - self.now();
            if left <= 0.0 {
                break;
            }
            if left > AWAKE_S {
                let sleep = Duration::from_secs_f64(left - AWAKE_S);
                let woken = self.changed[rank as usize].wait_timeout(inner, sleep);
                inner = woken.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
            } else {
                drop(inner);
                std::thread::yield_now();
                inner = self.lock();
            }
        }
        self.sign(rank, false);
        self.check(&inner)
    }

    fn check(&self, inner: &Inner) -> Result<(), Error> {
        match &inner.stop {
            Some(why) => Err(Error::device("run", why)),
            None => Ok(()),
        }
    }

    pub fn finish(&self, rank: u32) {
        let mut inner = self.lock();
        self.sign(rank, true);
        inner.finished += 1;
        // Those left may now be waiting for nobody: let them look, and find out.
        self.tell_all(&mut inner);
    }

    /// A rank is alive. While it is `busy`, in a kernel or waiting for a slow link, and when it has ended, nobody
    /// expects to hear of it.
    pub fn sign(&self, rank: u32, busy: bool) {
        let now = if busy { BUSY } else { self.zero.elapsed().as_millis() as u64 };
        self.signs[rank as usize].store(now, Ordering::Relaxed);
    }

    /// Stops everybody if a rank has fallen silent.
    fn find_the_dead(&self, inner: &mut Inner) {
        let now = self.zero.elapsed().as_millis() as u64;
        let silent = |r: &usize| {
            let last = self.signs[*r].load(Ordering::Relaxed);
            last != BUSY && now.saturating_sub(last) > SILENT.as_millis() as u64
        };
        let Some(dead) = (0..self.signs.len()).filter(|&r| inner.waiting[r].is_none()).find(silent) else { return };
        let why = format!("rank {dead} is dead: it was not heard of for {} s", SILENT.as_secs());
        inner.stop.get_or_insert(why);
        self.tell_all(inner);
    }

    /// A rank that says nothing any more; for those that look for the dead. Returns when everybody is stopped.
    pub fn fall_silent(&self, rank: u32) -> Result<(), Error> {
        let mut inner = self.lock();
        while inner.stop.is_none() {
            let woken = self.changed[rank as usize].wait(inner);
            inner = woken.unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        self.check(&inner)
    }

    /// The next message that a rank sends gets lost.
    pub fn lose_one(&self, from: u32) {
        self.lock().loses = Some(from);
    }

    /// A rank comes with its plan, which has to be that of all others.
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

/// More than these nobody reads.
const NAMED: usize = 32;

/// The first of many, and how many more.
pub fn few(all: Vec<String>) -> String {
    let more = if all.len() > NAMED { format!("; and {} more ranks", all.len() - NAMED) } else { String::new() };
    all.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ") + &more
}
