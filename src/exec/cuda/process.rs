//! Which process of how many this is, and where rank 0 is, by the variables of whatever started it.

use crate::error::{Error, Result};

/// One of the processes that were started together, a GPU each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    pub rank: u32,
    pub world: u32,
    /// The number of the process among those on its node, which is that of its GPU.
    pub local: u32,
    /// The name of the program that started it.
    pub by: &'static str,
}

/// What starts processes, and the variables that it says rank, number, and number on the node in. A SLURM job has
/// SLURM_NTASKS and SLURM_PROCID 0 in its batch script, too, which is one process; how many srun started says the step.
const STARTERS: [(&str, [&str; 3]); 4] = [
    ("torchrun", ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
    ("Open MPI", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]),
    ("SLURM", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"]),
    ("PMI", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"]),
];

/// Variables that say how many processes a node has: where it is all of them, rank 0 is here.
const ON_A_NODE: [&str; 3] = ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"];

/// The port where ranks meet if nobody says otherwise.
const PORT: u16 = 29_511;

type Get<'a> = &'a dyn Fn(&str) -> Option<String>;

fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T> {
    let why = || Error::spec("environment", name, format!("{text:?} is no number that fits there"));
    text.trim().parse().map_err(|_| why())
}

/// The variables of this process.
pub fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The process by the first starter whose rank and number are there; `None`: it was started by itself. Errors: a
/// variable that is no number or is missing, a rank that is not below the number of processes.
pub fn of(get: Get) -> Result<Option<Process>> {
    for (by, [rank, world, local]) in STARTERS {
        let (Some(own), Some(all)) = (get(rank), get(world)) else { continue };
        let (own, all) = (number(rank, &own)?, number(world, &all)?);
        if own >= all {
            let why = format!("{own} is not below {world} {all}; every process wants a rank of its own from 0 on");
            return Err(Error::spec("environment", rank, why));
        }
        let local = match get(local) {
            Some(text) => number(local, &text)?,
            None if all == 1 => 0,
            None => {
                let why = format!("is missing beside {rank} and {world}; give the number of this process on its node");
                return Err(Error::spec("environment", local, why));
            }
        };
        return Ok(Some(Process { rank: own, world: all, local, by }));
    }
    Ok(None)
}

impl Process {
    /// The number of this process's GPU among the `there` that it sees: that of the process on its node, or 0 where it is
    /// shown one alone (srun --gpus-per-task 1, a CUDA_VISIBLE_DEVICES of its own). Errors: it sees several, and fewer
    /// than its node has processes.
    pub fn gpu(&self, there: u32) -> Result<u32> {
        match there {
            _ if self.local < there => Ok(self.local),
            1 => Ok(0),
            0 => Err(Error::device("cuda", "the driver finds no GPU here; use --on cpu")),
            _ => {
                let why = format!(
                    "process {} of this node wants a GPU of its own, and {there} are to be seen here; start {there} \
                     processes a node, or show each of them one GPU (srun --gpus-per-task 1)",
                    self.local
                );
                Err(Error::device("cuda", why))
            }
        }
    }

    /// Where rank 0 waits for the others: MASTER_ADDR, or the first node of a SLURM job, or this one if all processes
    /// are here; FORETRAIN_PORT, or the port behind MASTER_PORT, which torchrun itself listens on. Errors: nobody says
    /// where rank 0 is.
    pub fn address(&self, get: Get) -> Result<(String, u16)> {
        let port = match (get("FORETRAIN_PORT"), get("MASTER_PORT")) {
            (Some(port), _) => number("FORETRAIN_PORT", &port)?,
            (None, Some(port)) => number::<u16>("MASTER_PORT", &port)?.checked_add(1).unwrap_or(PORT),
            (None, None) => PORT,
        };
        let nodes = || get("SLURM_STEP_NODELIST").or_else(|| get("SLURM_JOB_NODELIST"));
        let all_here = || ON_A_NODE.iter().filter_map(|name| get(name)).any(|n| n.trim() == self.world.to_string());
        let host = get("MASTER_ADDR").or_else(|| nodes().map(|list| first_node(&list)));
        match host.or_else(|| (all_here() || self.world == 1).then(|| "127.0.0.1".into())) {
            Some(host) => Ok((host, port)),
            None => {
                let why = "is missing; give the name or address of the node that rank 0 is on";
                Err(Error::spec("environment", "MASTER_ADDR", why))
            }
        }
    }
}

/// The first node of SLURM's list: `gpu[003-010,12],x` begins with gpu003.
fn first_node(list: &str) -> String {
    match list.split_once('[') {
        Some((name, rest)) if !name.contains(',') => {
            let first = rest.split([',', '-', ']']).next().unwrap_or_default();
            format!("{name}{first}")
        }
        _ => list.split(',').next().unwrap_or_default().into(),
    }
}

/// Errors: this process is one of several, each of which would do the whole work.
pub fn alone() -> Result<()> {
    match of(&environment)? {
        Some(Process { rank, world, by, .. }) if world > 1 => {
            let why = format!(
                "this is process {rank} of the {world} that {by} started, and this command is for one process; start it \
                 by itself, and name its GPUs (run and selftest --group nccl are joined over processes)"
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
        let torchrun =
            found(&[("RANK", "3"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("SLURM_PROCID", "0")]).unwrap();
        assert_eq!(torchrun, Some(Process { rank: 3, world: 8, local: 1, by: "torchrun" }));
        let slurm =
            found(&[("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_LOCALID", "0"), ("RANK", "1")])
                .unwrap();
        assert_eq!(slurm.map(|p| (p.by, p.world)), Some(("SLURM", 2)));
        assert_eq!(found(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]).unwrap().map(|p| p.world), Some(1));
        assert_eq!(found(&[]).unwrap(), None);
    }

    /// Of eight tasks that a job may start, a batch script is none; a step of it may have fewer.
    #[test]
    fn a_batch_script_is_one_process() {
        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_LOCALID", "0"), ("SLURM_JOB_NODELIST", "a")];
        assert_eq!(of(&|name| batch.iter().find(|v| v.0 == name).map(|v| v.1.into())).unwrap(), None);
        let step = found(&[
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_LOCALID", "1"),
        ]);
        assert_eq!(step.unwrap().map(|p| (p.rank, p.world)), Some((1, 2)));
    }

    #[test]
    fn a_process_has_the_gpu_of_its_number_or_the_one_it_sees() {
        let process = |local| Process { rank: 5, world: 8, local, by: "a test" };
        assert_eq!([0, 3].map(|local| process(local).gpu(4).unwrap()), [0, 3]);
        assert_eq!(process(3).gpu(1).unwrap(), 0);
        let error = process(3).gpu(2).unwrap_err().to_string();
        assert!(error.contains("process 3") && error.contains("start 2 processes a node"), "{error}");
        assert!(process(0).gpu(0).unwrap_err().to_string().contains("no GPU"));
    }

    #[test]
    fn wrong_variables_are_named() {
        let says = |variables| found(variables).unwrap_err().to_string();
        let error = says(&[("RANK", "2"), ("WORLD_SIZE", "2")]);
        assert!(error.contains("RANK") && error.contains("not below WORLD_SIZE 2"), "{error}");
        let error = says(&[("RANK", "one"), ("WORLD_SIZE", "2")]);
        assert!(error.contains("\"one\" is no number"), "{error}");
        let error = says(&[("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2")]);
        assert!(error.contains("SLURM_LOCALID") && error.contains("missing"), "{error}");
    }

    #[test]
    fn rank_0_is_found() {
        let at = |variables: &'static [(&str, &str)]| {
            let process = Process { rank: 1, world: 2, local: 1, by: "torchrun" };
            process.address(&|name| variables.iter().find(|v| v.0 == name).map(|v| v.1.into()))
        };
        assert_eq!(at(&[("MASTER_ADDR", "a"), ("MASTER_PORT", "29500")]).unwrap(), ("a".into(), 29501));
        assert_eq!(at(&[("LOCAL_WORLD_SIZE", "2"), ("FORETRAIN_PORT", "5")]).unwrap(), ("127.0.0.1".into(), 5));
        for (list, first) in [("gpu[003-010,12],x", "gpu003"), ("a,b[1-2]", "a"), ("n[7]", "n7"), ("one", "one")] {
            assert_eq!(first_node(list), first);
        }
        assert_eq!(at(&[("SLURM_JOB_NODELIST", "n[1-2]")]).unwrap(), ("n1".into(), PORT));
        let error = at(&[("LOCAL_WORLD_SIZE", "1")]).unwrap_err().to_string();
        assert!(error.contains("MASTER_ADDR") && error.contains("rank 0"), "{error}");
    }
}
