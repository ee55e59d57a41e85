//! What memory this machine has left, so that a run that does not fit is refused before it asks for any.

use crate::error::{Cause, Result};
use crate::plan::Plan;
use crate::plan::memory::Layout;

/// Bytes that may still be taken: what the system has, or what is left of this process's own limit if that is less.
/// None where the system does not say.
fn available() -> Option<u128> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let system = line.trim().trim_end_matches(" kB").parse::<u128>().ok()? * 1024;
    let number = |file: &str| std::fs::read_to_string(file).ok()?.trim().parse::<u128>().ok();
    // Of a container's control group, version 2; "max" is no number and no limit.
    let limit = number("/sys/fs/cgroup/memory.max");
    let used = number("/sys/fs/cgroup/memory.current").unwrap_or(0);
    Some(limit.map_or(system, |limit| system.min(limit.saturating_sub(used))))
}

/// Errors: ranks need more than nine tenths of this machine's free memory, which is said before any is asked for.
/// `layouts`: of each program.
pub fn fits(plan: &Plan, layouts: &[Layout]) -> Result<()> {
    let bytes = |rank: u32| {
        let layout = &layouts[plan.program_of(rank) as usize];
        layout.bytes + layout.host_bytes
    };
    let need: u128 = (0..plan.ranks()).map(|r| u128::from(bytes(r))).sum();
    match available() {
        // A tenth stays for messages, scratch and everybody else.
        Some(free) if need > free * 9 / 10 => {
            let gib = |bytes: u128| bytes as f64 / (1u64 << 30) as f64;
            Err(Cause::Memory.infeasible(format!(
                "{} ranks need {:.1} GiB together, {:.1} GiB the largest of them; this machine has {:.1} GiB \
                 free, of which nine tenths may be taken; use a smaller model, seq_len or batch",
                plan.ranks(),
                gib(need),
                gib((0..plan.ranks()).map(|r| u128::from(bytes(r))).max().unwrap_or(0)),
                gib(free)
            )))
        }
        _ => Ok(()),
    }
}
