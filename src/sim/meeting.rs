//! Those who meet: a send and its receive, or all members of a collective.

use super::jitter::Noise;
use super::links;
use super::share::Activity;
use crate::act::numbers;
use rustc_hash::FxHashMap;

pub type MeetingId = u32;

/// Names a meeting before it has begun: lane, distance (none for a collective), sender or first class, turn.
pub type Key = (u16, Option<u32>, u32, u32);

/// Which meeting of a script: what it puts on links follows from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum What {
    Hop {
        lane: u16,
        by: u32,
        class: u32,
    },
    /// The entry of the list of collectives of a program.
    Whole {
        program: u32,
        at: u32,
    },
}

impl Default for What {
    fn default() -> What {
        What::Whole { program: 0, at: 0 }
    }
}

/// A class that takes part, with which op and through which ports.
#[derive(Debug, Clone, Copy)]
pub struct Party {
    pub class: u32,
    pub op: u32,
    /// How many ranks of the class are in it.
    pub count: u32,
    pub noise: Noise,
    /// How long before the last it started; known once all have.
    pub ago: u64,
    /// What has made the last later than this one, a lane; known once all have started.
    pub made_late: u16,
    pub sends: bool,
    ports: u8,
}

impl Party {
    pub fn new(class: u32, op: u32, ports: u8, noise: Noise, start: u64) -> Party {
        Party { class, op, count: 1, noise, ago: start, made_late: 0, sends: false, ports }
    }

    pub fn ports(self) -> impl Iterator<Item = usize> {
        numbers(self.ports)
    }
}

#[derive(Debug, Clone, Default)]
pub struct Meeting {
    pub parties: Vec<Party>,
    pub latency: u64,
    /// How long the bytes take if nothing else is on their way.
    pub transfer: u64,
    /// Those posted before go first.
    pub order: u64,
    pub lane: u16,
    /// When all had started.
    pub all_here: u64,
    /// When the bytes set off: then, if nothing was owed on the lane.
    pub ready: u64,
    /// How long the bytes take, as far as is known.
    pub longest: u64,
    /// Bytes inside nodes and between them: of a message, of all members of a collective, of one of those who have bytes of
    /// their own.
    pub sent: [f64; 2],
    /// Of the links inside the node and out of it, what its bytes ask for while they take as long as `transfer`: 1 of those
    /// that keep them longest.
    pub parts: [f64; 2],
    pub noise: Noise,
    /// A message from one class to another.
    pub between_two: bool,
    /// Of those who met the bytes of one class alone, of one of its ranks.
    pub apart: bool,
    /// Bytes of one of those it stands for: what links carry is counted by it.
    pub bytes: u64,
    /// What it is in its script.
    pub what: What,
    /// What it is on links that ranks share; none if it crosses none that matters.
    pub kind: Option<links::Kind>,
    /// Its bytes on those links while they are on their way, and the most of their speed that its ports let them have.
    pub activity: Option<Activity>,
    pub cap: f64,
    /// Which of its events is the true one.
    pub version: u32,
}

impl Meeting {
    pub fn arrives(&self) -> u64 {
        self.ready.saturating_add(self.latency).saturating_add(self.longest)
    }
}

/// Order of posting: by number ([`Script::posted`](super::script::Script::posted)), then class.
pub fn order(posted: u64, class: u32) -> u64 {
    posted << 24 | u64::from(class & 0xff_ffff)
}

/// Meetings that wait for someone or are under way.
#[derive(Default)]
pub struct Meetings {
    all: Vec<Meeting>,
    free: Vec<MeetingId>,
    waiting: FxHashMap<Key, MeetingId>,
}

impl Meetings {
    pub fn get(&self, id: MeetingId) -> &Meeting {
        &self.all[id as usize]
    }

    pub fn get_mut(&mut self, id: MeetingId) -> &mut Meeting {
        &mut self.all[id as usize]
    }

    /// The meeting of this name.
    pub fn enter(&mut self, key: Key) -> MeetingId {
        if let Some(&known) = self.waiting.get(&key) {
            return known;
        }
        let id = self.fresh();
        self.waiting.insert(key, id);
        id
    }

    /// A meeting that nobody else has to find.
    pub fn fresh(&mut self) -> MeetingId {
        self.free.pop().unwrap_or_else(|| {
            self.all.push(Meeting::default());
            self.all.len() as u32 - 1
        })
    }

    /// Everyone is there: the name is not needed any more.
    pub fn full(&mut self, key: &Key) {
        self.waiting.remove(key);
    }

    /// Classes, and their ops, that wait in some meeting or whose bytes are under way.
    pub fn parties(&self) -> impl Iterator<Item = (u32, u32)> {
        self.all.iter().flat_map(|meeting| &meeting.parties).map(|party| (party.class, party.op))
    }

    pub fn over(&mut self, id: MeetingId) {
        let meeting = self.get_mut(id);
        meeting.parties.clear();
        (meeting.kind, meeting.activity) = (None, None);
        meeting.version += 1;
        self.free.push(id);
    }

    /// Classes that wait in it for others; none if everyone is there.
    pub fn present(&self, key: &Key) -> Option<Vec<u32>> {
        self.waiting.get(key).map(|&id| self.get(id).parties.iter().map(|p| p.class).collect())
    }
}
