//! What machine this is: its class, not its name.

use crate::device::measured::MachineName;
use cpu_time::ProcessTime;
use serde::Serialize;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

pub fn name(cores: u32) -> MachineName {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split(':').nth(1));
    let cpu = model.map_or_else(|| std::env::consts::ARCH.to_string(), |m| m.trim().to_string());
    MachineName { cpu, cores, system: std::env::consts::OS.into() }
}

/// Year, month and day, UTC.
pub fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (year, month, day) = civil((seconds / 86_400) as i64);
    format!("{year:04}-{month:02}-{day:02}")
}

/// Days since 1970-01-01 to a date (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days).
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + i64::from(month <= 2), month, doy - (153 * mp + 2) / 5 + 1)
}

/// Who else had this machine's cores for a while, where the system says so.
pub struct Others {
    before: Option<Ticks>,
    begun: Instant,
    own: ProcessTime,
}

/// Shares of the cores' time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Shares {
    /// Other programs had them.
    pub programs: f64,
    /// They were not there: another machine of the same host had them.
    pub stolen: f64,
}

/// Of all cores together.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ticks {
    all: f64,
    busy: f64,
    stolen: f64,
}

impl Others {
    pub fn watch() -> Others {
        Others { before: ticks(), begun: Instant::now(), own: ProcessTime::now() }
    }

    /// Since they are watched, on so many cores.
    pub fn shares(&self, cores: u32) -> Option<Shares> {
        let (now, before) = (ticks()?, self.before?);
        let all = now.all - before.all;
        let own = self.own.elapsed().as_secs_f64() / (self.begun.elapsed().as_secs_f64() * f64::from(cores));
        let programs = ((now.busy - before.busy) / all - own).max(0.0);
        (all > 0.0).then(|| Shares { programs, stolen: (now.stolen - before.stolen) / all })
    }
}

fn ticks() -> Option<Ticks> {
    ticks_of(&std::fs::read_to_string("/proc/stat").ok()?)
}

/// user nice system idle iowait irq softirq steal; guests are in user already (proc(5)).
fn ticks_of(stat: &str) -> Option<Ticks> {
    let line = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let each: Vec<f64> = line.split_whitespace().take(8).filter_map(|n| n.parse().ok()).collect();
    let [_, _, _, idle, iowait, _, _, stolen] = each[..] else { return None };
    let all: f64 = each.iter().sum();
    Some(Ticks { all, busy: all - idle - iowait - stolen, stolen })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stolen_time_is_the_eighth_number() {
        let text = "cpu  10 20 30 40 50 60 70 20 5 5\ncpu0 1 2 3 4 5 6 7 8 9 10\n";
        assert_eq!(ticks_of(text), Some(Ticks { all: 300.0, busy: 190.0, stolen: 20.0 }));
        assert_eq!(ticks_of("cpu 1 2 3"), None);
    }

    #[test]
    fn days_become_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(19_782), (2024, 2, 29));
        assert_eq!(civil(20_454), (2026, 1, 1));
    }
}
