//! The jobs of a thread, one at a time, and how much slower they are in company.

/// Something a thread is busy with.
#[derive(Debug, Clone)]
pub struct Job {
    /// Seconds that are left of it, if the thread were alone.
    pub left: f64,
    /// How many times longer it takes while all cores are busy.
    pub crowded: f64,
    pub then: Then,
}

/// What has come about when a job is done.
#[derive(Debug, Clone, Copy)]
pub enum Then {
    Kernel(u32),
    /// A part of one of the rank's communicating ops, by the op's number among those under way.
    Flight {
        flight: usize,
        what: What,
    },
}

#[derive(Debug, Clone, Copy)]
pub enum What {
    /// A leg of a transfer, or the round of a collective, is sent.
    Sent(usize),
    Taken(usize),
    /// A collective has put its own part in place.
    Begun,
    /// A reduce-scatter has put its sum, an exchange its rows, where they belong.
    Landed,
}

/// How many times longer a job takes beside `others` on `cores` cores; `own` and each of `others` say how many times
/// longer their jobs take while all cores do the same. A neighbour that needs less of the memory leaves more of it: of
/// what two of a kind lose to each other, half is the doing of either. Beyond all cores each thread has its share of
/// one.
pub fn slowdown(own: f64, others: &[f64], cores: u32) -> f64 {
    let (busy, cores) = (others.len() as f64 + 1.0, f64::from(cores));
    if others.is_empty() || cores < 2.0 {
        return (busy / cores).max(1.0);
    }
    let mean = others.iter().sum::<f64>() / others.len() as f64;
    let full = ((own + mean) / 2.0).clamp(own.min(1.0), own.max(1.0));
    let share = ((busy - 1.0) / (cores - 1.0)).min(1.0);
    (1.0 + (full - 1.0) * share) * (busy / cores).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_the_cores_there_are() {
        assert_eq!(slowdown(1.2, &[], 2), 1.0);
        assert_eq!(slowdown(1.2, &[1.2], 2), 1.2);
        assert_eq!(slowdown(1.2, &[1.2; 3], 2), 2.4);
        assert_eq!(slowdown(1.0, &[1.0; 2], 1), 3.0);
        assert!((slowdown(1.2, &[1.2], 3) - 1.1).abs() < 1e-12);
    }

    #[test]
    fn a_neighbour_that_leaves_the_memory_alone_costs_half() {
        assert!((slowdown(1.4, &[1.0], 2) - 1.2).abs() < 1e-12);
        assert_eq!(slowdown(1.0, &[1.4], 2), 1.0);
    }
}
