//! A link made slow on purpose, so that a network can be tried on a machine that has none.

use crate::units::{BytesPerSec, Seconds};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What every rank's link has, either way: a message takes latency + bytes / bandwidth, and holds the link for the
/// second part of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Throttle {
    pub bandwidth: BytesPerSec,
    pub latency: Seconds,
}

impl Throttle {
    /// Seconds that `bytes` hold the link.
    pub fn holds(&self, bytes: u64) -> f64 {
        bytes as f64 / self.bandwidth.value()
    }

    /// Seconds from the start of a message to its end, on a link that is free.
    pub fn takes(&self, bytes: u64) -> f64 {
        self.latency.value() + self.holds(bytes)
    }
}

/// Longer than this nobody waits for a first byte.
const LONGEST_S: f64 = 10.0;

impl FromStr for Throttle {
    type Err = String;

    /// Bandwidth and latency; where they have no units, GB/s and us.
    fn from_str(text: &str) -> Result<Throttle, String> {
        let wrong = || "write bandwidth,latency, as in 1,50 (GB/s and us) or 25 MB/s,2 ms".to_string();
        let (bandwidth, latency) = text.split_once(',').ok_or_else(wrong)?;
        let with_unit = |number: &str, unit: &str| match number.trim().parse::<f64>() {
            Ok(x) => format!("{x} {unit}"),
            Err(_) => number.to_string(),
        };
        let bandwidth: BytesPerSec = with_unit(bandwidth, "GB/s").parse()?;
        let latency: Seconds = with_unit(latency, "us").parse()?;
        if bandwidth.value() < 1.0 {
            return Err(format!("a bandwidth of {bandwidth} lets nothing through; {}", wrong()));
        }
        if latency.value() > LONGEST_S {
            return Err(format!("a latency of {latency} is longer than {LONGEST_S:.0} s; {}", wrong()));
        }
        Ok(Throttle { bandwidth, latency })
    }
}

impl fmt::Display for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} and {} a message", self.bandwidth, self.latency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_gigabytes_a_second_and_microseconds() {
        let plain: Throttle = "0.5,20".parse().unwrap();
        assert_eq!(plain, "500 MB/s,20 us".parse().unwrap());
        assert!((plain.takes(1_000_000) - 2.02e-3).abs() < 1e-12);
        for (text, why) in [("1", "bandwidth,latency"), ("0,5", "lets nothing"), ("1,99 s", "longer"), ("x,1", "x")] {
            let said = text.parse::<Throttle>().unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
    }
}
