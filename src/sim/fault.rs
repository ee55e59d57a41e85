//! What can be wrong with a machine: slow GPUs, slow, down or flapping links, dead ranks, jitter.
//!
//! A file of faults is JSON (`traces/failures`); words of the command line say the same.

use super::pace::{Pace, Spell};
use crate::act::picoseconds;
use crate::error::{Error, Result};
use crate::units::Seconds;
use serde::{Deserialize, Serialize};
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

/// Something that is wrong from the beginning of the step on, or from a time on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// Kernels take `factor` times as long: below its clock, hot, or beside a noisy neighbour.
    SlowGpu { rank: u32, factor: f64 },
    /// What crosses the port has `factor` of its speed; 0 is a link that is down.
    SlowLink {
        rank: u32,
        port: Port,
        factor: f64,
        #[serde(default)]
        from_s: f64,
        /// None: for good.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        to_s: Option<f64>,
    },
    /// Up for `up_s`, then down for `down_s`, and again.
    Flapping { rank: u32, port: Port, up_s: f64, down_s: f64 },
    /// Does nothing any more from `at_s` on.
    Dead { rank: u32, at_s: f64 },
    /// Every kernel of every rank takes 1 + `sd` times a normal number as long, each by itself.
    Jitter { sd: f64 },
}

/// A file of `traces/failures`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Faults {
    /// Where such a thing was seen.
    #[serde(default)]
    pub source: String,
    /// How long a collective may wait before the library ends the job.
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
    pub fn load(path: &Path) -> Result<Faults> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(Error::io(path))?;
        let faults: Faults = serde_json::from_str(&text).map_err(Error::json(&name))?;
        if let Some(why) = faults.watchdog_s.and_then(|s| not(s > 0.0 && s.is_finite(), || format!("{s}"))) {
            return Err(Error::spec(&name, "watchdog_s", format!("{why} is not a time above 0 s")));
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
    pub fn rank(&self) -> Option<u32> {
        match *self {
            Fault::SlowGpu { rank, .. }
            | Fault::SlowLink { rank, .. }
            | Fault::Flapping { rank, .. }
            | Fault::Dead { rank, .. } => Some(rank),
            Fault::Jitter { .. } => None,
        }
    }

    /// Why it cannot be, with so many ranks if they are known.
    pub fn check(&self, ranks: Option<u32>) -> std::result::Result<(), String> {
        let (time, share) = (|s: f64| (0.0..1e5).contains(&s), |x: f64| (0.0..=1.0).contains(&x));
        let wrong = match *self {
            Fault::SlowGpu { factor, .. } => not((1.0..=1e6).contains(&factor), || {
                format!("a factor of {factor}; kernels of a slow GPU take 1 to 1,000,000 times as long")
            }),
            Fault::SlowLink { factor, from_s, to_s, .. } => not(share(factor), || {
                format!("a factor of {factor}; a slow link has a share of its speed, between 0 (down) and 1")
            })
            .or(not(time(from_s) && to_s.is_none_or(|to| time(to) && to > from_s), || {
                format!("from_s {from_s} to_s {to_s:?}; times are between 0 and 100,000 s, and to_s after from_s")
            })),
            // Below a microsecond a link that flaps is a link that is slow.
            Fault::Flapping { up_s, down_s, .. } => not([up_s, down_s].iter().all(|&s| time(s) && s >= 1e-6), || {
                format!("up_s {up_s} down_s {down_s}; each is between 1 us and 100,000 s")
            }),
            Fault::Dead { at_s, .. } => not(time(at_s), || format!("at_s {at_s}; it is between 0 and 100,000 s")),
            Fault::Jitter { sd } => {
                not((0.0..=0.5).contains(&sd), || format!("sd {sd}; a standard deviation is between 0 and 0.5"))
            }
        };
        let beyond = match (self.rank(), ranks) {
            (Some(rank), Some(n)) if rank >= n => Some(format!("rank {rank}; there are ranks 0 to {}", n - 1)),
            _ => None,
        };
        wrong.or(beyond).map_or(Ok(()), Err)
    }

    /// `RANK:FACTOR`
    pub fn slow_gpu(word: &str) -> std::result::Result<Fault, String> {
        let how = "write RANK:FACTOR, as in 5:1.1";
        let (rank, factor) = word.split_once(':').ok_or(how)?;
        let fault = Fault::SlowGpu { rank: number(rank, how)?, factor: number(factor, how)? };
        fault.check(None).map(|()| fault)
    }

    /// `RANK[:nic|:nvlink]:FACTOR`
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

    /// `RANK:UP:DOWN`, in seconds
    pub fn flapping(word: &str) -> std::result::Result<Fault, String> {
        let how = "write RANK:UP:DOWN in seconds, as in 5:10:3";
        let parts: Vec<&str> = word.split(':').collect();
        let [rank, up, down] = parts[..] else { return Err(how.into()) };
        let (up_s, down_s) = (number(up, how)?, number(down, how)?);
        let fault = Fault::Flapping { rank: number(rank, how)?, port: Port::Nic, up_s, down_s };
        fault.check(None).map(|()| fault)
    }

    /// `RANK@TIME`, in seconds
    pub fn dead(word: &str) -> std::result::Result<Fault, String> {
        let how = "write RANK@SECONDS, as in 5@0.3";
        let (rank, at) = word.split_once('@').ok_or(how)?;
        let fault = Fault::Dead { rank: number(rank, how)?, at_s: number(at, how)? };
        fault.check(None).map(|()| fault)
    }

    /// `normal:SD`
    pub fn jitter(word: &str) -> std::result::Result<Fault, String> {
        let how = "write normal:SD, as in normal:0.02";
        let sd = word.strip_prefix("normal:").ok_or(how)?;
        let fault = Fault::Jitter { sd: number(sd, how)? };
        fault.check(None).map(|()| fault)
    }
}

fn number<T: std::str::FromStr>(text: &str, how: &str) -> std::result::Result<T, String> {
    text.trim().parse().map_err(|_| format!("{text:?} is no number here; {how}"))
}

/// What is wrong with one rank, put together.
#[derive(Debug, Clone)]
pub struct Health {
    /// How many times as long kernels take.
    pub slow: f64,
    /// Inside the node, out of it.
    pub links: [Pace; 2],
    /// Time of death.
    pub dead: u64,
}

impl Default for Health {
    fn default() -> Health {
        Health { slow: 1.0, links: Default::default(), dead: u64::MAX }
    }
}

impl Health {
    pub fn of(faults: &[Fault], rank: u32) -> Health {
        let mut health = Health::default();
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
                let spell = Spell { from: ps(from_s), to: to_s.map_or(u64::MAX, ps), factor, turns: None };
                self.links[port as usize].add(spell);
            }
            Fault::Flapping { port, up_s, down_s, .. } => {
                let turns = Some([ps(up_s), ps(down_s)]);
                self.links[port as usize].add(Spell { from: 0, to: u64::MAX, factor: 0.0, turns });
            }
            Fault::Dead { at_s, .. } => self.dead = self.dead.min(ps(at_s)),
            Fault::Jitter { .. } => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_say_what_files_say() {
        let text = r#"[{"kind": "slow_gpu", "rank": 5, "factor": 1.1},
            {"kind": "slow_link", "rank": 3, "port": "nvlink", "factor": 0.5},
            {"kind": "flapping", "rank": 1, "port": "nic", "up_s": 10, "down_s": 3},
            {"kind": "dead", "rank": 2, "at_s": 0.25}, {"kind": "jitter", "sd": 0.02}]"#;
        let file: Vec<Fault> = serde_json::from_str(text).unwrap();
        let words = [
            Fault::slow_gpu("5:1.1"),
            Fault::slow_link("3:nvlink:0.5"),
            Fault::flapping("1:10:3"),
            Fault::dead("2@0.25"),
            Fault::jitter("normal:0.02"),
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
            (Fault::dead("1@-1"), "between 0 and 100,000 s"),
            (Fault::jitter("gamma:1"), "normal:SD"),
        ] {
            assert!(got.as_ref().is_err_and(|why| why.contains(part)), "{got:?}");
        }
        assert!(Fault::slow_gpu("8:2").unwrap().check(Some(8)).unwrap_err().contains("ranks 0 to 7"));
    }
}
