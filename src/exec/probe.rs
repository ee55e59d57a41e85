//! What a message costs on this machine, timed by the executor's own means: copied out of a rank's memory, handed
//! over, noticed by a thread that waits for it, and copied in or added.

use super::arena::{Data, sum};
use super::spares::Spares;
use super::transport::{AWAKE, Hub, Key};
use crate::plan::Dtype;
use std::time::Instant;

/// Seconds of one message.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    /// To copy it out and hand it over.
    pub post_s: f64,
    /// From then until the thread that waited for it goes on.
    pub wake_s: f64,
    /// To take it and copy it in, or to add it to what is there.
    pub take_s: f64,
}

/// Memory of a rank, larger than the caches close by: a message is not in them as a rule.
const MEMORY: usize = 16 << 20;

/// Two threads, a rank each.
struct Pair {
    hub: Hub,
    spares: Spares,
    zero: Instant,
    elems: usize,
}

impl Pair {
    fn new(bytes: u64) -> Pair {
        let elems = (bytes / 4).max(1) as usize;
        Pair { hub: Hub::new(&[0, 1], None), spares: Spares::default(), zero: Instant::now(), elems }
    }

    fn now(&self) -> f64 {
        self.zero.elapsed().as_secs_f64()
    }

    fn key(&self, from: u32, round: u32) -> Key {
        Key { from, to: 1 - from, node: round, part: 0 }
    }

    /// Sends a round's message. Returns when that began, and when the message was handed over.
    fn post(&self, rank: u32, round: u32, memory: &mut Memory) -> (f64, f64) {
        let begun = self.now();
        let place = memory.next();
        let data = match self.spares.take(Dtype::F32, self.elems as u64) {
            Some(Data::F32(mut spare)) => {
                spare.copy_from_slice(place);
                Data::F32(spare)
            }
            _ => Data::F32(place.to_vec()),
        };
        self.hub.send(self.key(rank, round), data, 0);
        (begun, self.now())
    }

    /// Takes a round's message. Returns when the thread was awake to take it, and when it was where it belongs.
    fn take(&self, rank: u32, round: u32, memory: &mut Memory) -> Option<(f64, f64)> {
        let (awake, data) = self.wait(rank, self.key(1 - rank, round))?;
        memory.take(&data, round % 2 == 1);
        self.spares.put(data);
        Some((awake, self.now()))
    }

    /// Waits for a message. Returns when the thread was awake to take it, and the message.
    fn wait(&self, rank: u32, key: Key) -> Option<(f64, Data)> {
        loop {
            let seen = self.hub.news(rank);
            let awake = self.now();
            if let Some((data, _)) = self.hub.receive(key, true) {
                return Some((awake, data));
            }
            self.hub.wait(rank, seen, || vec![(rank, "a probe".into())]).ok()?;
        }
    }

    /// Says that a round is over, without a message to speak of.
    fn answer(&self, rank: u32, round: u32) {
        self.hub.send(self.key(rank, round), Data::U8(vec![]), 0);
    }
}

/// Sends `rounds` messages of `bytes` from one thread to another; every second one is added to what is there.
/// Returns those that were copied, and those that were added.
pub fn messages(bytes: u64, rounds: u32) -> (Vec<Message>, Vec<Message>) {
    let pair = Pair::new(bytes);
    one_way(&pair, rounds, &|| ())
}

/// Seconds until a thread that has gone to sleep goes on: the messages are so far apart that it does.
pub fn asleep(rounds: u32) -> Vec<f64> {
    let (copied, added) = one_way(&Pair::new(64), rounds, &|| std::thread::sleep(2 * AWAKE));
    copied.iter().chain(&added).map(|m| m.wake_s).collect()
}

fn one_way(pair: &Pair, rounds: u32, before: &(dyn Fn() + Sync)) -> (Vec<Message>, Vec<Message>) {
    let all: Vec<Message> = std::thread::scope(|scope| {
        let receiver = scope.spawn(move || {
            let mut memory = Memory::new(pair.elems);
            let mut all = vec![];
            for round in 0..rounds {
                let Some(times) = pair.take(1, round, &mut memory) else { break };
                all.push(times);
                pair.answer(1, round);
            }
            pair.hub.finish(1);
            all
        });
        let (mut memory, mut posts) = (Memory::new(pair.elems), vec![]);
        for round in 0..rounds {
            before();
            posts.push(pair.post(0, round, &mut memory));
            if pair.wait(0, pair.key(1, round)).is_none() {
                break;
            }
        }
        pair.hub.finish(0);
        let taken = receiver.join().unwrap_or_default();
        posts.into_iter().zip(taken).map(|(posted, taken)| message(posted, taken)).collect()
    });
    every_second(&all)
}

fn message((begun, sent): (f64, f64), (awake, taken): (f64, f64)) -> Message {
    Message { post_s: sent - begun, wake_s: (awake - sent).max(0.0), take_s: taken - awake }
}

fn every_second(all: &[Message]) -> (Vec<Message>, Vec<Message>) {
    let every = |odd: usize| all.iter().skip(odd).step_by(2).copied().collect();
    (every(0), every(1))
}

/// Messages as of [`messages`] with both threads at it: each sends, and then takes what the other has sent, as in a
/// collective.
pub fn crossing(bytes: u64, rounds: u32) -> (Vec<Message>, Vec<Message>) {
    let pair = &Pair::new(bytes);
    let side = move |rank: u32| {
        let (mut memory, mut all) = (Memory::new(pair.elems), vec![]);
        for round in 0..rounds {
            let posted = pair.post(rank, round, &mut memory);
            let Some(taken) = pair.take(rank, round, &mut memory) else { break };
            all.push(message(posted, taken));
        }
        pair.hub.finish(rank);
        all
    };
    let sides = std::thread::scope(|scope| {
        let other = scope.spawn(move || side(1));
        [side(0), other.join().unwrap_or_default()]
    });
    let (mut copied, mut added) = (vec![], vec![]);
    for (c, a) in sides.iter().map(|all| every_second(all)) {
        copied.extend(c);
        added.extend(a);
    }
    (copied, added)
}

/// Places for messages, one after the other.
struct Memory {
    all: Vec<f32>,
    at: usize,
    elems: usize,
}

impl Memory {
    fn new(elems: usize) -> Memory {
        Memory { all: vec![0.5; (MEMORY / 4).max(2 * elems)], at: 0, elems }
    }

    fn next(&mut self) -> &mut [f32] {
        let from = if self.at + self.elems > self.all.len() { 0 } else { self.at };
        self.at = from + self.elems;
        &mut self.all[from..from + self.elems]
    }

    /// Takes a message into memory: copies it as a transfer does, or adds it as a collective does.
    fn take(&mut self, data: &Data, add: bool) {
        let Data::F32(values) = data else { unreachable!("a probe sends floats") };
        let place = self.next();
        if add { sum(place, values) } else { place.copy_from_slice(values) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_arrives_and_takes_some_time() {
        let (copied, added) = messages(4096, 10);
        assert_eq!((copied.len(), added.len()), (5, 5));
        assert!(copied.iter().chain(&added).all(|m| m.post_s > 0.0 && m.take_s > 0.0 && m.wake_s >= 0.0));
        let (copied, added) = crossing(4096, 10);
        assert_eq!((copied.len(), added.len()), (10, 10), "each thread takes as many as it sends");
        assert_eq!(asleep(3).len(), 3);
    }
}
