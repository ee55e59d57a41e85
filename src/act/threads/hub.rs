//! What lies between the threads: messages, collectives that have begun, turns, and who has to look again.

use super::worker::{Cause, State, Worker};
use crate::cluster::Ports;
use crate::device::Threads;
use rustc_hash::{FxHashMap, FxHashSet};

/// Names a message: sender, receiver, the sender's op, and its leg or round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    pub from: u32,
    pub to: u32,
    pub node: u32,
    pub part: u32,
}

struct Message {
    bytes: u64,
    /// When the message is there, in s; `None` while its receiver has not asked for it.
    due: Option<f64>,
    sent_by: Option<Cause>,
}

/// The piece that told a rank to go on; `None` at the beginning.
type Told = Option<Cause>;

pub struct Hub {
    mail: FxHashMap<Key, Message>,
    /// The links, where they are slowed down; and messages that receivers have asked for and nobody has sent.
    ports: Option<Ports>,
    asked: FxHashSet<Key>,
    taken: FxHashSet<Key>,
    started: FxHashMap<(u32, u32), u32>,
    turns: Vec<u32>,
    /// Ranks that may be able to go on, and who told them last.
    told: Vec<Option<Told>>,
    /// The piece that ended last: what is sent, taken or told now is its doing.
    pub acts: Option<Cause>,
    notice_s: f64,
    wake_s: f64,
    /// How long a thread looks for news before it sleeps, in s: 0 where there are more threads than cores.
    awake_s: f64,
}

impl Hub {
    pub fn new(ranks: usize, devices: usize, threads: &Threads) -> Hub {
        Hub {
            mail: FxHashMap::default(),
            ports: threads.throttle.map(|throttle| Ports::new(ranks, throttle)),
            asked: FxHashSet::default(),
            taken: FxHashSet::default(),
            started: FxHashMap::default(),
            turns: vec![0; devices],
            told: vec![None; ranks],
            acts: None,
            notice_s: threads.notice_s,
            wake_s: threads.wake_s,
            awake_s: if devices <= threads.cores as usize { threads.awake_s } else { 0.0 },
        }
    }

    pub fn tell(&mut self, rank: u32) {
        self.told[rank as usize] = Some(self.acts);
    }

    /// Lets threads that wait, and one of whose ranks was told something, see it or wake up. Of a message on a slow
    /// link they know the arrival beforehand.
    pub fn wake(&mut self, workers: &mut [Worker], now: f64) {
        for worker in workers {
            let State::Waiting(since) = worker.state else { continue };
            let own = |rank: &u32| worker.ranks.contains(&(*rank as usize));
            let arrived = self.mail.iter().find(|(key, m)| own(&key.to) && m.due == Some(now));
            if let Some((_, message)) = arrived {
                worker.woken_by = message.sent_by;
                worker.state = State::Free(now + self.notice_s);
            } else if let Some(by) = worker.ranks.iter().find_map(|&rank| self.told[rank]) {
                worker.woken_by = by;
                let awake = now - since <= self.awake_s;
                worker.state = State::Free(now + if awake { self.notice_s } else { self.wake_s });
            }
        }
        self.told.fill(None);
    }

    /// A slow link takes a message when both its ends are there.
    pub fn send(&mut self, key: Key, bytes: u64, now: f64) {
        let both = self.ports.is_none() || self.asked.remove(&key);
        let due = both.then(|| self.arrival(key, bytes, now));
        self.mail.insert(key, Message { bytes, due, sent_by: self.acts });
        self.tell(key.to);
    }

    fn arrival(&mut self, key: Key, bytes: u64, now: f64) -> f64 {
        self.ports.as_mut().map_or(now, |ports| ports.send(key.from, key.to, bytes, now))
    }

    /// Whether a message is there; asks for it if not.
    pub fn has(&mut self, key: Key, now: f64) -> bool {
        let Some(&Message { bytes, due, sent_by }) = self.mail.get(&key) else {
            self.asked.insert(key);
            return false;
        };
        let due = due.unwrap_or_else(|| self.arrival(key, bytes, now));
        self.mail.insert(key, Message { bytes, due: Some(due), sent_by });
        due <= now
    }

    pub fn take(&mut self, key: Key, sender_waits: bool) {
        self.mail.remove(&key);
        if sender_waits {
            self.taken.insert(key);
            self.tell(key.from);
        }
    }

    pub fn was_taken(&mut self, key: Key) -> bool {
        self.taken.remove(&key)
    }

    /// The next message that is still under way.
    pub fn next_arrival(&self, now: f64) -> Option<f64> {
        self.mail.values().filter_map(|m| m.due).filter(|&at| at > now).reduce(f64::min)
    }

    pub fn start(&mut self, meeting: (u32, u32), members: &[u32]) {
        let started = self.started.entry(meeting).or_default();
        *started += 1;
        if *started == members.len() as u32 {
            members.iter().for_each(|&m| self.tell(m));
        }
    }

    pub fn started(&self, meeting: (u32, u32)) -> u32 {
        self.started.get(&meeting).copied().unwrap_or(0)
    }

    pub fn turn(&self, device: u32) -> u32 {
        self.turns[device as usize]
    }

    pub fn end_turn(&mut self, device: u32, next: Option<u32>) {
        self.turns[device as usize] += 1;
        next.into_iter().for_each(|rank| self.tell(rank));
    }
}
