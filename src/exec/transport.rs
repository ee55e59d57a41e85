//! How bytes pass between ranks that are threads: a message is handed over, never shared. Counts what is
//! delivered, and notices when every rank waits.

use super::arena::Data;
use crate::error::Error;
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::{Condvar, Mutex, MutexGuard};

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
}

#[derive(Default)]
struct Inner {
    mail: FxHashMap<Key, Message>,
    /// Messages that were taken and whose sender does not know it yet.
    taken: FxHashSet<Key>,
    /// Members of a collective that have started, by its first member and that member's op.
    started: FxHashMap<(u32, u32), u32>,
    /// Turn that each shared device is at.
    turns: Vec<u32>,
    sent: Vec<u64>,
    /// Counts everything that could let somebody go on.
    news: u64,
    /// What each rank waits for, while it does.
    waiting: Vec<Option<String>>,
    finished: u32,
    /// Why everybody has to stop.
    stop: Option<String>,
}

pub struct Hub {
    inner: Mutex<Inner>,
    changed: Condvar,
}

impl Hub {
    pub fn new(ranks: u32, devices: u32) -> Hub {
        let n = ranks as usize;
        let inner =
            Inner { turns: vec![0; devices as usize], sent: vec![0; n], waiting: vec![None; n], ..Inner::default() };
        Hub { inner: Mutex::new(inner), changed: Condvar::new() }
    }

    /// A rank that panicked held no lock that matters: what it left is consistent.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whoever waits may be able to go on, and does not count as waiting until it has looked again.
    fn tell(&self, inner: &mut Inner) {
        inner.news += 1;
        inner.waiting.iter_mut().for_each(|w| *w = None);
        self.changed.notify_all();
    }

    pub fn send(&self, key: Key, data: Data, tag: u32) {
        let mut inner = self.lock();
        inner.mail.insert(key, Message { data, tag });
        self.tell(&mut inner);
    }

    /// Takes a message, if it is there. A sender that waits for delivery may go on from now.
    pub fn receive(&self, key: Key, sender_waits: bool) -> Option<(Data, u32)> {
        let mut inner = self.lock();
        let message = inner.mail.remove(&key)?;
        inner.sent[key.from as usize] += message.data.bytes();
        if sender_waits {
            inner.taken.insert(key);
        }
        self.tell(&mut inner);
        Some((message.data, message.tag))
    }

    /// Whether a message that was sent has been taken. Says yes once.
    pub fn delivered(&self, key: Key) -> bool {
        self.lock().taken.remove(&key)
    }

    /// Notes that a member of a collective has started.
    pub fn start(&self, collective: (u32, u32)) {
        let mut inner = self.lock();
        *inner.started.entry(collective).or_default() += 1;
        self.tell(&mut inner);
    }

    pub fn started(&self, collective: (u32, u32)) -> u32 {
        self.lock().started.get(&collective).copied().unwrap_or(0)
    }

    pub fn turn(&self, device: u32) -> u32 {
        self.lock().turns[device as usize]
    }

    pub fn end_turn(&self, device: u32) {
        let mut inner = self.lock();
        inner.turns[device as usize] += 1;
        self.tell(&mut inner);
    }

    pub fn news(&self) -> u64 {
        self.lock().news
    }

    pub fn sent_bytes(&self) -> Vec<u64> {
        self.lock().sent.clone()
    }

    /// Waits until there is news since `seen`. If no rank is left that could bring any, stops everybody and
    /// says who waits for what.
    pub fn wait(&self, rank: u32, seen: u64, what: impl FnOnce() -> String) -> Result<(), Error> {
        let mut inner = self.lock();
        if inner.stop.is_none() && inner.news == seen {
            inner.waiting[rank as usize] = Some(what());
            let all = inner.waiting.iter().filter(|w| w.is_some()).count() + inner.finished as usize;
            if all == inner.waiting.len() {
                inner.stop = Some(deadlock(&inner.waiting));
                self.tell(&mut inner);
            }
        }
        while inner.stop.is_none() && inner.news == seen {
            inner = self.changed.wait(inner).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        inner.waiting[rank as usize] = None;
        self.check(&inner)
    }

    fn check(&self, inner: &Inner) -> Result<(), Error> {
        match &inner.stop {
            Some(why) => Err(Error::device("run", why)),
            None => Ok(()),
        }
    }

    pub fn finish(&self) {
        let mut inner = self.lock();
        inner.finished += 1;
        self.tell(&mut inner);
    }

    /// Stops everybody for a reason; the first reason stands.
    pub fn stop(&self, why: String) {
        let mut inner = self.lock();
        inner.stop.get_or_insert(why);
        self.tell(&mut inner);
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

/// The first of many, and how many more.
pub fn few(all: Vec<String>) -> String {
    let more = if all.len() > 8 { format!("; and {} more ranks", all.len() - 8) } else { String::new() };
    all.iter().take(8).cloned().collect::<Vec<_>>().join("; ") + &more
}
