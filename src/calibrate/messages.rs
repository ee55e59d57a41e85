//! Copies and wake-ups by size of message.

use super::Effort;
use crate::compare::stats::{quiet, spread};
use crate::device::curve::{Curve, Point};
use crate::exec::probe::{self, Message};

pub struct Messages {
    pub wake_s: f64,
    pub post: Curve,
    pub take: Curve,
    pub add: Curve,
}

/// Every power of four from 64 bytes on, each as often as some megabytes make.
pub fn measure(effort: Effort) -> Messages {
    let sizes: Vec<u64> = (3..).map(|i| 4u64.pow(i)).take_while(|bytes| *bytes <= effort.longest_message).collect();
    // Once to warm up.
    probe::messages(sizes[sizes.len() / 2], 20);
    let runs: Vec<(u64, Runs)> = sizes.iter().map(|&bytes| (bytes, probe::messages(bytes, rounds(bytes)))).collect();
    let curve = |of: &dyn Fn(&Runs) -> Vec<f64>| {
        let point = |(bytes, runs): &(u64, Runs)| {
            let all = of(runs);
            let size = vec![*bytes as f64];
            Point { size, seconds: quiet(&all).max(1e-9), spread: spread(&all), runs: all.len() as u32 }
        };
        Curve::new(runs.iter().map(point).collect())
    };
    let small = runs.iter().take(3).flat_map(|(_, (copied, _))| copied.iter().map(|m| m.wake_s));
    Messages {
        wake_s: quiet(&small.collect::<Vec<f64>>()).max(1e-8),
        post: curve(&|(copied, _)| copied.iter().map(|m| m.post_s).collect()),
        take: curve(&|(copied, _)| copied.iter().map(|m| m.take_s).collect()),
        add: curve(&|(_, added)| added.iter().map(|m| m.take_s).collect()),
    }
}

type Runs = (Vec<Message>, Vec<Message>);

fn rounds(bytes: u64) -> u32 {
    ((64 << 20) / bytes).clamp(8, 200) as u32
}
