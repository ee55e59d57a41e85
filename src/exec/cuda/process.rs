//! Which process of how many this is, by the variables of whatever started it.

use crate::error::{Error, Result};

/// One of several processes that were started together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    pub rank: u32,
    pub world: u32,
    /// What started it.
    pub by: &'static str,
}

/// What starts processes, and the variables that it says rank and number in.
const STARTERS: [(&str, &str, &str); 4] = [
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM", "SLURM_PROCID", "SLURM_NTASKS"),
    ("PMI", "PMI_RANK", "PMI_SIZE"),
];

/// By the first starter whose two variables are there. Errors: a variable that is no number, a rank that is not below
/// the number of processes.
pub fn of(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Process>> {
    for (by, rank, world) in STARTERS {
        let (Some(own), Some(all)) = (get(rank), get(world)) else { continue };
        let number = |name: &str, text: &str| {
            let why = || Error::spec("environment", name, format!("{text:?} is no number; {by} sets it"));
            text.trim().parse::<u32>().map_err(|_| why())
        };
        let process = Process { rank: number(rank, &own)?, world: number(world, &all)?, by };
        if process.rank >= process.world {
            let why = format!("{own} is not below {world} {all}; every process wants a rank of its own from 0 on");
            return Err(Error::spec("environment", rank, why));
        }
        return Ok(Some(process));
    }
    Ok(None)
}

/// Refuses to be one of several: each would run the whole plan.
pub fn alone() -> Result<()> {
    match of(&|name| std::env::var(name).ok())? {
        Some(Process { rank, world, by }) if world > 1 => {
            let why = format!(
                "this is process {rank} of the {world} that {by} started, and ranks of several processes are not joined yet \
                 (no NCCL mode); start one process on one node, and name its GPUs by --devices"
            );
            Err(Error::device("cuda", why))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &'static [(&str, &str)]) -> Result<Option<Process>> {
        of(&|name| variables.iter().find(|v| v.0 == name).map(|v| v.1.into()))
    }

    #[test]
    fn every_starter_is_known_by_its_variables() {
        let torchrun = found(&[("RANK", "3"), ("WORLD_SIZE", "8"), ("SLURM_PROCID", "0")]).unwrap();
        assert_eq!(torchrun, Some(Process { rank: 3, world: 8, by: "torchrun" }));
        let slurm = found(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("RANK", "1")]).unwrap();
        assert_eq!(slurm.map(|p| p.by), Some("SLURM"));
        assert_eq!(found(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]).unwrap().map(|p| p.world), Some(1));
        assert_eq!(found(&[]).unwrap(), None);
    }

    #[test]
    fn wrong_variables_are_named() {
        let error = found(&[("RANK", "2"), ("WORLD_SIZE", "2")]).unwrap_err().to_string();
        assert!(error.contains("RANK") && error.contains("not below WORLD_SIZE 2"), "{error}");
        let error = found(&[("RANK", "one"), ("WORLD_SIZE", "2")]).unwrap_err().to_string();
        assert!(error.contains("\"one\" is no number"), "{error}");
    }
}
