//! The arrival of messages over links that take one message at a time: every rank has a link, with a way out and a way
//! in.

use crate::spec::Throttle;

/// The time, in s, until which each way of each link is taken.
#[derive(Debug, Clone)]
pub struct Ports {
    throttle: Throttle,
    out: Vec<f64>,
    into: Vec<f64>,
}

impl Ports {
    pub fn new(ranks: usize, throttle: Throttle) -> Ports {
        Ports { throttle, out: vec![0.0; ranks], into: vec![0.0; ranks] }
    }

    /// A message of which both ends are there at `now`, in seconds: it starts when both ways are free, in the order
    /// of the calls. Returns when its last byte arrives. A message to oneself takes no link.
    pub fn send(&mut self, from: u32, to: u32, bytes: u64, now: f64) -> f64 {
        if from == to {
            return now;
        }
        let (out, into) = (&mut self.out[from as usize], &mut self.into[to as usize]);
        let start = now.max(*out).max(*into);
        let free = start + self.throttle.holds(bytes);
        (*out, *into) = (free, free);
        start + self.throttle.takes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At 1 KB/s and 0.5 s: 1000 bytes hold a link for 1 s and arrive after 1.5 s.
    #[test]
    fn one_message_at_a_time_each_way() {
        let mut ports = Ports::new(3, "1 KB/s,0.5 s".parse().unwrap());
        assert_eq!(ports.send(0, 1, 1000, 0.0), 1.5);
        assert_eq!(ports.send(1, 0, 1000, 0.0), 1.5, "the other way is free");
        assert_eq!(ports.send(0, 2, 1000, 0.0), 2.5, "its sender's way out is not");
        assert_eq!(ports.send(1, 2, 1000, 1.5), 3.5, "nor its receiver's way in");
        assert_eq!(ports.send(0, 1, 1000, 9.0), 10.5, "later it is");
        assert_eq!(ports.send(2, 2, 1000, 0.0), 0.0);
    }
}
