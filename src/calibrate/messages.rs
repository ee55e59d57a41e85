//! Copies and wake-ups by size of message, of one thread at a time and of two at once.

use super::Effort;
use super::samples::Samples;
use crate::compare::stats::{quantile, spread};
use crate::device::curve::{Curve, Point};
use crate::device::measured::Copies;
use crate::exec::copied::How;
use crate::exec::probe::{self, Message};

pub struct Messages {
    pub notice_s: f64,
    pub wake_s: f64,
    pub alone: Copies,
    pub beside: Copies,
}

/// Wake-ups of a thread that sleeps.
const ASLEEP: u32 = 40;

/// Every power of four from 64 bytes on, each as often as some megabytes make.
pub fn measure(effort: Effort) -> Messages {
    let sizes: Vec<u64> = (3..).map(|i| 4u64.pow(i)).take_while(|bytes| *bytes <= effort.longest_message).collect();
    // Once to warm up.
    probe::messages(sizes[sizes.len() / 2], 20);
    let all = |of: fn(u64, u32) -> Runs| -> Vec<(u64, Runs)> {
        sizes.iter().map(|&bytes| (bytes, of(bytes, rounds(bytes)))).collect()
    };
    let (alone, beside) = (all(probe::messages), all(probe::crossing));
    let small: Vec<f64> = alone.iter().take(3).flat_map(|(_, (copied, _))| copied.iter().map(|m| m.wake_s)).collect();
    Messages {
        notice_s: quantile(&small, 0.5).max(1e-8),
        wake_s: quantile(&probe::asleep(ASLEEP), 0.5).max(1e-8),
        alone: copies(&alone),
        beside: copies(&beside),
    }
}

impl Messages {
    /// The copies as steps have timed them, each beside whatever the other ranks did; of longer and shorter messages than
    /// theirs, as they were timed by themselves.
    pub fn in_steps(self, samples: &Samples) -> Messages {
        let merged = |all: &Copies| Copies {
            post: merge(samples.copies(How::Post), &all.post),
            take: merge(samples.copies(How::Take), &all.take),
            add: merge(samples.copies(How::Add), &all.add),
        };
        Messages { alone: merged(&self.alone), beside: merged(&self.beside), ..self }
    }
}

/// Sizes closer than this are no others.
const OTHER: f64 = 2.0;

fn merge(mut points: Vec<Point>, apart: &Curve) -> Curve {
    let sizes = || points.iter().map(|p| p.size[0]);
    let (least, most) = (sizes().fold(f64::INFINITY, f64::min), sizes().fold(0.0, f64::max));
    let beyond = |p: &&Point| p.size[0] * OTHER < least || p.size[0] > most * OTHER;
    let others: Vec<Point> = apart.points.iter().filter(beyond).cloned().collect();
    points.extend(others);
    points.sort_by(|a, b| a.size[0].total_cmp(&b.size[0]));
    Curve::new(points)
}

type Runs = (Vec<Message>, Vec<Message>);

fn copies(runs: &[(u64, Runs)]) -> Copies {
    let curve = |of: &dyn Fn(&Runs) -> Vec<f64>| {
        let point = |(bytes, runs): &(u64, Runs)| {
            let all = of(runs);
            let size = vec![*bytes as f64];
            Point { size, seconds: quantile(&all, 0.5).max(1e-9), spread: spread(&all), runs: all.len() as u32 }
        };
        Curve::new(runs.iter().map(point).collect())
    };
    Copies {
        post: curve(&|(copied, _)| copied.iter().map(|m| m.post_s).collect()),
        take: curve(&|(copied, _)| copied.iter().map(|m| m.take_s).collect()),
        add: curve(&|(_, added)| added.iter().map(|m| m.take_s).collect()),
    }
}

fn rounds(bytes: u64) -> u32 {
    ((64 << 20) / bytes).clamp(16, 200) as u32
}
