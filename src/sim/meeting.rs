//! Meetings: a send and its receive, or all members of a collective.

use super::jitter::Noise;
use super::links;
use super::pace::Asks;
use super::share::Activity;
use crate::act::charges::Stream;
use crate::act::{Transit, numbers};
use rustc_hash::FxHashMap;

pub type MeetingId = u32;

/// Names a meeting before it has begun: lane, distance (`None` for a collective), sender or first class, turn.
pub type Key = (u16, Option<u32>, u32, u32);

/// Which meeting of a script it is: the links that it loads follow from that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum What {
    Hop {
        lane: u16,
        by: u32,
        class: u32,
    },
    /// A collective: an entry of a program's list of collectives.
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

/// A class that takes part in a meeting, with which op and through which ports.
#[derive(Debug, Clone, Copy)]
pub struct Party {
    pub class: u32,
    pub op: u32,
    /// How many ranks of the class are in the meeting.
    pub count: u32,
    pub noise: Noise,
    /// How long before the last one it started, ps, once all have started; until then its start.
    pub ago: u64,
    /// The lane that has made the last one later than this one, once all have started.
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
    pub transit: Transit,
    /// Order of posting: lower ones go first on a port.
    pub order: u64,
    pub lane: u16,
    /// When all had started, ps.
    pub all_here: u64,
    /// When the bytes set off, ps: when all had started, if nothing was owed on the lane.
    pub ready: u64,
    /// How long the bytes take as far as is known now, ps.
    pub longest: u64,
    /// Bytes inside nodes and between them: those of a message, of all members of a collective, or of one member where
    /// each has its own.
    pub sent: [f64; 2],
    /// What its bytes ask of the links inside the node, and of those out of it, while they take as long as `transit` says.
    pub asks: [Asks; 2],
    pub noise: Noise,
    /// Whether it is a message from one class to another.
    pub between_two: bool,
    /// Whether its bytes are those of one rank of one class alone.
    pub apart: bool,
    /// Bytes of one of the meetings it stands for, by which links count what they carry.
    pub bytes: u64,
    /// Which meeting of its script it is.
    pub what: What,
    /// Its kind on links that ranks share; `None` if it crosses none that matters.
    pub kind: Option<links::Kind>,
    /// Its activity on those links while the bytes are on their way, and the most of its speed that its ports let it
    /// have.
    pub activity: Option<Activity>,
    pub cap: f64,
    /// Number of its valid event: older ones in the queue are ignored.
    pub version: u32,
}

impl Meeting {
    /// Its bytes, as ports have them.
    pub fn stream(&self) -> Stream {
        Stream::new(self.lane, self.transit.fills)
    }

    pub fn arrives(&self) -> u64 {
        self.ready.saturating_add(self.transit.latency).saturating_add(self.longest)
    }
}

/// The order of posting as a number: by [`Script::posted`](super::script::Script::posted), then class.
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

    /// Finds the meeting of this name, or begins it.
    pub fn enter(&mut self, key: Key) -> MeetingId {
        if let Some(&known) = self.waiting.get(&key) {
            return known;
        }
        let id = self.fresh();
        self.waiting.insert(key, id);
        id
    }

    /// Begins a meeting that nobody else has to find.
    pub fn fresh(&mut self) -> MeetingId {
        self.free.pop().unwrap_or_else(|| {
            self.all.push(Meeting::default());
            self.all.len() as u32 - 1
        })
    }

    /// Forgets a meeting's name: everyone has come.
    pub fn full(&mut self, key: &Key) {
        self.waiting.remove(key);
    }

    /// The classes, with their ops, that wait in some meeting or whose bytes are under way.
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

    /// The classes that wait in a meeting for others; `None` if everyone has come.
    pub fn present(&self, key: &Key) -> Option<Vec<u32>> {
        self.waiting.get(key).map(|&id| self.get(id).parties.iter().map(|p| p.class).collect())
    }
}
