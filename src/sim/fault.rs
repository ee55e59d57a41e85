//! The faults that a machine can have: slow GPUs, slow, down or flapping links, dead planes, dead ranks, jitter.
//!
//! A file of faults is JSON (`traces/failures`); words of the command line say the same.

use super::pace::{Pace, Spell};
use crate::act::picoseconds;
use crate::error::{Error, Result, json, text};
use crate::units::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;

/// The links of a rank that a fault is about, both directions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Port {
    /// To the GPUs of its node.
    Nvlink,
    /// To other nodes.
    Nic,
}

/// A fault, from the beginning of the step on or from a later time on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// A GPU below its clock, hot, or beside a noisy neighbour: its kernels take `factor` times as long.
    SlowGpu { rank: u32, factor: f64 },
    /// A port whose links have `factor` of their speed; 0 is a link that is down.
    SlowLink {
        rank: u32,
        port: Port,
        factor: f64,
        #[serde(default)]
        from_s: f64,
        /// When it ends, s; `None`: never.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to_s: Option<f64>,
    },
    /// A port that is up for `up_s`, then down for `down_s`, and again.
    Flapping {
        rank: u32,
        port: Port,
        up_s: f64,
        down_s: f64,
        /// How much of up and down is over as the step begins.
        #[serde(default, skip_serializing_if = "is_zero")]
        over_s: f64,
    },
    /// A rank that does nothing any more from `at_s` on.
    Dead { rank: u32, at_s: f64 },
    /// One of the networks beside each other that is down: its traffic goes over the others.
    DeadPlane {
        plane: u32,
        #[serde(default)]
        from_s: f64,
        /// When it ends, s; `None`: never.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to_s: Option<f64>,
    },
    /// Kernels that take another time each, by itself: those of one rank, or (`None`) of all ranks.
    Jitter {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rank: Option<u32>,
        #[serde(default)]
        shape: Shape,
        /// Standard deviation, as a part of the kernel's time.
        sd: f64,
    },
}

fn is_zero(s: &f64) -> bool {
    *s == 0.0
}

/// The distribution of a kernel's time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// Times spread around the time without jitter.
    #[default]
    Normal,
    /// Times spread around it, too, with a longer tail above.
    Lognormal,
    /// Times above it only: what the operating system takes.
    Exponential,
}

/// A file of `traces/failures`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Faults {
    /// Where such faults were seen.
    #[serde(default)]
    pub source: String,
    /// How long a collective may wait before the library ends the job, s; `None`: for ever.
    #[serde(default = "watchdog", skip_serializing_if = "Option::is_none")]
    pub watchdog_s: Option<f64>,
    #[serde(default)]
    pub faults: Vec<Fault>,
}

/// The timeout of PyTorch's ProcessGroupNCCL, ten minutes (torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp,
/// kProcessGroupNCCLDefaultTimeout).
pub const WATCHDOG_S: f64 = 600.0;

fn watchdog() -> Option<f64> {
    Some(WATCHDOG_S)
}

impl Faults {
    /// The faults of a JSON file. Errors: it cannot be read, or has a watchdog's time or a fault that cannot be.
    pub fn load(path: &Path) -> Result<Faults> {
        let name = path.display().to_string();
        let text = text::spec(path)?;
        let faults: Faults = json::parse(&name, &text)?;
        if let Some(why) = faults.watchdog_s.and_then(|s| not(s > 0.0 && s.is_finite(), || format!("{s}"))) {
            return Err(Error::spec(
                &name,
                "watchdog_s",
                format!("{why} is not a time above 0 s; PyTorch's is {WATCHDOG_S}"),
            ));
        }
        for (at, fault) in faults.faults.iter().enumerate() {
            fault.check(None).map_err(|why| Error::spec(&name, format!("faults[{at}]"), why))?;
        }
        Ok(faults)
    }
}

fn not(holds: bool, say: impl FnOnce() -> String) -> Option<String> {
    (!holds).then(say)
}

impl Fault {
    /// The fault in words.
    pub fn said(&self) -> String {
        let port = |port: &Port| match port {
            Port::Nic => "network",
            Port::Nvlink => "links inside its node",
        };
        let until = |to_s: &Option<f64>| to_s.map_or(String::new(), |to| format!(" to {to} s"));
        let from = |from_s: f64| if from_s > 0.0 { format!(" from {from_s} s on") } else { String::new() };
        match self {
            Fault::SlowGpu { rank, factor } => format!("kernels of rank {rank} take {factor} times as long"),
            Fault::SlowLink { rank, port: of, factor: 0.0, from_s, to_s } => {
                format!("rank {rank}: {} down{}{}", port(of), from(*from_s), until(to_s))
            }
            Fault::SlowLink { rank, port: of, factor, from_s, to_s } => {
                format!("rank {rank}: {} at {factor} of the speed{}{}", port(of), from(*from_s), until(to_s))
            }
            Fault::Flapping { rank, port: of, up_s, down_s, over_s } => {
                let over = if *over_s > 0.0 { format!(", {over_s} s over at first") } else { String::new() };
                format!("rank {rank}: {} up for {up_s} s and down for {down_s} s, by turns{over}", port(of))
            }
            Fault::Dead { rank, at_s } => format!("rank {rank} does nothing any more from {at_s} s on"),
            Fault::DeadPlane { plane, from_s, to_s } => format!("network {plane} down{}{}", from(*from_s), until(to_s)),
            Fault::Jitter { rank, sd, .. } => {
                let of = rank.map_or("every rank".into(), |rank| format!("rank {rank}"));
                format!("times of kernels of {of} vary by {sd} of them")
            }
        }
    }

    /// When the fault is first felt, s.
    pub fn begins_s(&self) -> f64 {
        match *self {
            Fault::SlowLink { from_s, .. } | Fault::DeadPlane { from_s, .. } => from_s,
            Fault::Dead { at_s, .. } => at_s,
            Fault::Flapping { up_s, down_s, over_s, .. } => (up_s - over_s % (up_s + down_s)).max(0.0),
            Fault::SlowGpu { .. } | Fault::Jitter { .. } => 0.0,
        }
    }

    /// Whether it begins or ends within a step, or may: a step of a run has it, and the next has not.
    pub fn is_for_a_time(&self) -> bool {
        match *self {
            Fault::SlowLink { from_s, to_s, .. } | Fault::DeadPlane { from_s, to_s, .. } => {
                from_s > 0.0 || to_s.is_some()
            }
            Fault::Dead { .. } => true,
            Fault::Flapping { .. } | Fault::SlowGpu { .. } | Fault::Jitter { .. } => false,
        }
    }

    /// The fault as a step finds it that begins `s` later.
    pub fn later(&self, s: f64) -> Fault {
        let mut fault = self.clone();
        if let Fault::Flapping { over_s, up_s, down_s, .. } = &mut fault {
            *over_s = (*over_s + s) % (*up_s + *down_s);
        }
        fault
    }

    pub fn rank(&self) -> Option<u32> {
        match *self {
            Fault::SlowGpu { rank, .. }
            | Fault::SlowLink { rank, .. }
            | Fault::Flapping { rank, .. }
            | Fault::Dead { rank, .. } => Some(rank),
            Fault::Jitter { rank, .. } => rank,
            Fault::DeadPlane { .. } => None,
        }
    }

    /// Checks the fault's numbers, and its ranks if their number is known. Errors: why there cannot be such a fault.
    pub fn check(&self, ranks: Option<u32>) -> std::result::Result<(), String> {
        let (time, share) = (|s: f64| (0.0..1e5).contains(&s), |x: f64| (0.0..=1.0).contains(&x));
        let wrong = match *self {
            Fault::SlowGpu { factor, .. } => not((1.0..=1e6).contains(&factor), || {
                format!("a factor of {}; kernels of a slow GPU take 1 to 1,000,000 times as long", short(factor))
            }),
            Fault::SlowLink { factor, from_s, to_s, .. } => not(share(factor), || {
                format!("a factor of {}; a slow link has a share of its speed, between 0 (down) and 1", short(factor))
            })
            .or(not(time(from_s) && to_s.is_none_or(|to| time(to) && to > from_s), || {
                format!("from_s {from_s} to_s {to_s:?}; times are between 0 and 100,000 s, and to_s after from_s")
            })),
            // Below a microsecond a link that flaps is a link that is slow.
            Fault::Flapping { up_s, down_s, over_s, .. } => {
                not([up_s, down_s].iter().all(|&s| time(s) && s >= 1e-6), || {
                    format!("up_s {} down_s {}; each is between 1 us and 100,000 s", short(up_s), short(down_s))
                })
                .or(not(time(over_s), || format!("over_s {}; it is between 0 and 100,000 s", short(over_s))))
            }
            Fault::Dead { at_s, .. } => {
                not(time(at_s), || format!("at_s {}; it is between 0 and 100,000 s", short(at_s)))
            }
            Fault::DeadPlane { from_s, to_s, .. } => {
                not(time(from_s) && to_s.is_none_or(|to| time(to) && to > from_s), || {
                    format!("from_s {from_s} to_s {to_s:?}; times are between 0 and 100,000 s, and to_s after from_s")
                })
            }
            Fault::Jitter { sd, .. } => {
                not((0.0..=0.5).contains(&sd), || format!("sd {sd}; a standard deviation is between 0 and 0.5"))
            }
        };
        let beyond = match (self.rank(), ranks) {
            (Some(rank), Some(n)) if rank >= n => Some(format!("rank {rank}; there are ranks 0 to {}", n - 1)),
            _ => None,
        };
        wrong.or(beyond).map_or(Ok(()), Err)
    }

    /// Reads `RANK:FACTOR`. Errors: how to write it.
    pub fn slow_gpu(word: &str) -> std::result::Result<Fault, String> {
        let how = "write RANK:FACTOR, as in 5:1.1";
        let (rank, factor) = word.split_once(':').ok_or(how)?;
        let fault = Fault::SlowGpu { rank: number(rank, how)?, factor: number(factor, how)? };
        fault.check(None).map(|()| fault)
    }

    /// Reads `RANK[:nic|:nvlink]:FACTOR`. Errors: how to write it.
    pub fn slow_link(word: &str) -> std::result::Result<Fault, String> {
        let how = "write RANK:FACTOR or RANK:nvlink:FACTOR, as in 5:0.5; 0 is down";
        let (rank, rest) = word.split_once(':').ok_or(how)?;
        let (port, factor) = match rest.split_once(':') {
            Some(("nic", factor)) => (Port::Nic, factor),
            Some(("nvlink", factor)) => (Port::Nvlink, factor),
            Some(_) => return Err(how.into()),
            None => (Port::Nic, rest),
        };
        let (rank, factor) = (number(rank, how)?, number(factor, how)?);
        let fault = Fault::SlowLink { rank, port, factor, from_s: 0.0, to_s: None };
        fault.check(None).map(|()| fault)
    }

    /// Reads `RANK:UP:DOWN`, in seconds. Errors: how to write it.
    pub fn flapping(word: &str) -> std::result::Result<Fault, String> {
        let how = "write RANK:UP:DOWN in seconds, as in 5:10:3";
        let parts: Vec<&str> = word.split(':').collect();
        let [rank, up, down] = parts[..] else { return Err(how.into()) };
        let (up_s, down_s) = (number(up, how)?, number(down, how)?);
        let fault = Fault::Flapping { rank: number(rank, how)?, port: Port::Nic, up_s, down_s, over_s: 0.0 };
        fault.check(None).map(|()| fault)
    }

    /// Reads `RANK@TIME`, in seconds. Errors: how to write it.
    pub fn dead(word: &str) -> std::result::Result<Fault, String> {
        let how = "write RANK@SECONDS, as in 5@0.3";
        let (rank, at) = word.split_once('@').ok_or(how)?;
        let fault = Fault::Dead { rank: number(rank, how)?, at_s: number(at, how)? };
        fault.check(None).map(|()| fault)
    }

    /// Reads `PLANE`, or `PLANE@TIME` in seconds. Errors: how to write it.
    pub fn dead_plane(word: &str) -> std::result::Result<Fault, String> {
        let how = "write PLANE or PLANE@SECONDS, as in 0@0.3";
        let (plane, from) = word.split_once('@').unwrap_or((word, "0"));
        let fault = Fault::DeadPlane { plane: number(plane, how)?, from_s: number(from, how)?, to_s: None };
        fault.check(None).map(|()| fault)
    }

    /// Reads `[RANK:]SHAPE:SD`. Errors: how to write it.
    pub fn jitter(word: &str) -> std::result::Result<Fault, String> {
        let how = "write SHAPE:SD or RANK:SHAPE:SD with normal, lognormal or exponential, as in normal:0.02";
        let parts: Vec<&str> = word.split(':').collect();
        let (rank, shape, sd) = match parts[..] {
            [shape, sd] => (None, shape, sd),
            [rank, shape, sd] => (Some(number(rank, how)?), shape, sd),
            _ => return Err(how.into()),
        };
        let shape = match shape {
            "normal" => Shape::Normal,
            "lognormal" => Shape::Lognormal,
            "exponential" => Shape::Exponential,
            _ => return Err(how.into()),
        };
        let fault = Fault::Jitter { rank, shape, sd: number(sd, how)? };
        fault.check(None).map(|()| fault)
    }
}

fn number<T: std::str::FromStr>(text: &str, how: &str) -> std::result::Result<T, String> {
    text.trim().parse().map_err(|_| format!("{text:?} is no number here; {how}"))
}

/// The state of one rank, with all its faults put together.
#[derive(Debug, Clone)]
pub struct Health {
    /// Factor by which kernels take longer.
    pub slow: f64,
    /// Speed of the links inside the node, and of those out of it.
    pub links: [Pace; 2],
    /// Time of death, ps.
    pub dead: u64,
}

impl Default for Health {
    fn default() -> Health {
        Health { slow: 1.0, links: Default::default(), dead: u64::MAX }
    }
}

impl Health {
    /// The health of a rank. `planes`: the speed of the network's planes, see [`of_planes`].
    pub fn of(faults: &[Fault], rank: u32, planes: &Pace) -> Health {
        let mut health = Health::default();
        health.links[Port::Nic as usize] = planes.clone();
        for fault in faults.iter().filter(|f| f.rank() == Some(rank)) {
            health.suffer(fault);
        }
        health
    }

    fn suffer(&mut self, fault: &Fault) {
        let ps = |s: f64| picoseconds(Seconds::new(s));
        match *fault {
            Fault::SlowGpu { factor, .. } => self.slow *= factor,
            Fault::SlowLink { port, factor, from_s, to_s, .. } => {
                let spell =
                    Spell { from: ps(from_s), to: to_s.map_or(u64::MAX, ps), factor, turns: None, behind: false };
                self.links[port as usize].add(spell);
            }
            Fault::Flapping { port, up_s, down_s, over_s, .. } => {
                let turns = Some([ps(up_s), ps(down_s), ps(over_s % (up_s + down_s))]);
                self.links[port as usize].add(Spell { from: 0, to: u64::MAX, factor: 0.0, turns, behind: false });
            }
            Fault::Dead { at_s, .. } => self.dead = self.dead.min(ps(at_s)),
            Fault::DeadPlane { .. } | Fault::Jitter { .. } => {}
        }
    }
}

/// The speed that is left of a network of `planes` beside each other: traffic is spread over those that are alive.
pub fn of_planes(faults: &[Fault], planes: u32) -> Pace {
    let ps = |s: f64| picoseconds(Seconds::new(s));
    let dead = |fault: &Fault| match *fault {
        Fault::DeadPlane { plane, from_s, to_s } => Some((plane, ps(from_s), to_s.map_or(u64::MAX, ps))),
        _ => None,
    };
    let dead: Vec<(u32, u64, u64)> = faults.iter().filter_map(dead).collect();
    let mut edges: Vec<u64> = dead.iter().flat_map(|&(_, from, to)| [from, to]).collect();
    edges.sort_unstable();
    edges.dedup();
    let mut pace = Pace::default();
    for edge in edges.windows(2) {
        let now = dead.iter().filter(|(_, from, to)| *from <= edge[0] && edge[0] < *to);
        let down: BTreeSet<u32> = now.map(|(plane, ..)| *plane).collect();
        let factor = 1.0 - down.len() as f64 / f64::from(planes);
        if !down.is_empty() {
            pace.add(Spell { from: edge[0], to: edge[1], factor, turns: None, behind: true });
        }
    }
    pace
}

/// A number in few digits: not the three hundred of one that was never meant.
fn short(x: f64) -> String {
    if x.is_finite() && x.abs() >= 1e9 { format!("{x:e}") } else { x.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_say_what_files_say() {
        let text = r#"[{"kind": "slow_gpu", "rank": 5, "factor": 1.1},
            {"kind": "slow_link", "rank": 3, "port": "nvlink", "factor": 0.5},
            {"kind": "flapping", "rank": 1, "port": "nic", "up_s": 10, "down_s": 3},
            {"kind": "dead", "rank": 2, "at_s": 0.25}, {"kind": "jitter", "sd": 0.02},
            {"kind": "jitter", "rank": 4, "shape": "exponential", "sd": 0.1},
            {"kind": "dead_plane", "plane": 1, "from_s": 0.5}]"#;
        let file: Vec<Fault> = serde_json::from_str(text).unwrap();
        let words = [
            Fault::slow_gpu("5:1.1"),
            Fault::slow_link("3:nvlink:0.5"),
            Fault::flapping("1:10:3"),
            Fault::dead("2@0.25"),
            Fault::jitter("normal:0.02"),
            Fault::jitter("4:exponential:0.1"),
            Fault::dead_plane("1@0.5"),
        ];
        assert_eq!(words.map(|w| w.unwrap()).to_vec(), file);
    }

    #[test]
    fn nonsense_is_refused_with_a_remedy() {
        for (got, part) in [
            (Fault::slow_gpu("5"), "write RANK:FACTOR"),
            (Fault::slow_gpu("5:NaN"), "a factor of NaN"),
            (Fault::slow_gpu("x:2"), "\"x\" is no number"),
            (Fault::slow_gpu("1:0.5"), "1 to 1,000,000 times"),
            (Fault::slow_link("1:pcie:0.5"), "RANK:nvlink:FACTOR"),
            (Fault::slow_link("1:1.5"), "between 0 (down) and 1"),
            (Fault::flapping("1:0:1"), "between 1 us"),
            (
                Fault::flapping("1:2:1").and_then(|f| f.later(-1.0).check(None)).map(|()| Fault::dead("1@0").unwrap()),
                "over_s -1",
            ),
            (Fault::dead("1@-1"), "between 0 and 100,000 s"),
            (Fault::jitter("gamma:1"), "SHAPE:SD"),
            (Fault::jitter("x:normal:0.1"), "\"x\" is no number"),
            (Fault::jitter("normal:0.9"), "between 0 and 0.5"),
            (Fault::dead_plane("-1"), "PLANE@SECONDS"),
        ] {
            assert!(got.as_ref().is_err_and(|why| why.contains(part)), "{got:?}");
        }
        assert!(Fault::jitter("8:normal:0.1").unwrap().check(Some(8)).unwrap_err().contains("ranks 0 to 7"));
        assert!(Fault::slow_gpu("8:2").unwrap().check(Some(8)).unwrap_err().contains("ranks 0 to 7"));
    }

    /// Two of four planes for a while, one of them twice: half is left, then three quarters, then all.
    #[test]
    fn dead_planes_leave_the_others() {
        let of = |plane, from_s, to_s| Fault::DeadPlane { plane, from_s, to_s: Some(to_s) };
        let pace = of_planes(&[of(1, 1.0, 3.0), of(2, 0.0, 4.0), of(1, 2.0, 3.0)], 4);
        let at = |s: f64| pace.speed(picoseconds(Seconds::new(s)));
        assert_eq!([at(0.5), at(1.5), at(2.5), at(3.5), at(4.5)], [0.75, 0.5, 0.5, 0.75, 1.0]);
        assert_eq!(pace.next(0), picoseconds(Seconds::new(1.0)));
    }
}
