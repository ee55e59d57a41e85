//! What a message costs on this machine, timed by the executor's own means: copied out of a rank's memory, handed
//! over, noticed by a thread that sleeps, and copied in or added.

use super::arena::Data;
use super::transport::{Hub, Key};
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

/// Sends `rounds` messages of `bytes` from one thread to another; every second one is added to what is there.
/// Returns those that were copied, and those that were added.
pub fn messages(bytes: u64, rounds: u32) -> (Vec<Message>, Vec<Message>) {
    let elems = (bytes / 4).max(1) as usize;
    let (hub, zero) = (Hub::new(2, 1, None), Instant::now());
    let now = || zero.elapsed().as_secs_f64();
    let there = |round| Key { from: 0, to: 1, node: round, part: 0 };
    let back = |round| Key { from: 1, to: 0, node: round, part: 0 };
    let all: Vec<Message> = std::thread::scope(|scope| {
        let (hub, now) = (&hub, &now);
        let receiver = scope.spawn(move || {
            let mut memory = Memory::new(elems);
            let mut all = vec![];
            for round in 0..rounds {
                let Some((awake, data)) = wait(hub, 1, there(round), now) else { break };
                memory.take(data, round % 2 == 1);
                all.push((awake, now()));
                hub.send(back(round), Data::F32(vec![]), 0);
            }
            hub.finish(1);
            all
        });
        let mut memory = Memory::new(elems);
        let mut posts = vec![];
        for round in 0..rounds {
            let begun = now();
            let data = Data::F32(memory.next().to_vec());
            hub.send(there(round), data, 0);
            posts.push((begun, now()));
            if wait(hub, 0, back(round), now).is_none() {
                break;
            }
        }
        hub.finish(0);
        let taken = receiver.join().unwrap_or_default();
        let whole = |((begun, sent), (awake, taken)): (&(f64, f64), (f64, f64))| Message {
            post_s: sent - begun,
            wake_s: (awake - sent).max(0.0),
            take_s: taken - awake,
        };
        posts.iter().zip(taken).map(whole).collect()
    });
    let every = |odd: usize| all.iter().skip(odd).step_by(2).copied().collect();
    (every(0), every(1))
}

/// Waits for a message: when the thread was awake to take it, and the message.
fn wait(hub: &Hub, rank: u32, key: Key, now: &dyn Fn() -> f64) -> Option<(f64, Data)> {
    loop {
        let seen = hub.news(rank);
        let awake = now();
        if let Some((data, _)) = hub.receive(key, true) {
            return Some((awake, data));
        }
        hub.wait(rank, seen, "a probe".into()).ok()?;
    }
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

    /// As a transfer writes what it brings, or as a collective adds it.
    fn take(&mut self, mut data: Data, add: bool) {
        let place = self.next();
        if add {
            data.add(&Data::F32(place.to_vec()));
        }
        let Data::F32(values) = data else { unreachable!("a probe sends floats") };
        place.copy_from_slice(&values);
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
    }
}
