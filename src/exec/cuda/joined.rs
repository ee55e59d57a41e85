//! A rank a process, and messages by NCCL: what `run` does under torchrun, SLURM or Open MPI.
//!
//! **Unverified on hardware** but for NCCL's calls in a world of one process (`selftest --group nccl`). The schedule is run on
//! doubles of the device that meet over loopback (`tests/cuda_joined.rs`), and processes as far as NCCL's first call with
//! libraries that stand for NVIDIA's (`tests/cuda_ffi.rs`).

use super::device::Device;
use super::driver::{self, Cuda};
use super::fused::{Attention, said};
use super::meeting::{Hello, Meeting, TIMEOUT, timeout};
use super::nccl::Nccl;
use super::prepare::Prepared;
use super::process::{Process, environment};
use super::run::{least_shared, takes};
use super::script::{Linked, script};
use super::session::{Keep, Session, connect, fits};
use super::wire;
use crate::error::{Error, Result};
use crate::exec::arena::Arena;
use crate::exec::transport::Hub;
use crate::exec::{Job, Options, Run, inputs, outputs};
use crate::plan::link::{AtomTable, Line};
use crate::plan::matching::Matching;
use crate::plan::memory::Layout;
use crate::plan::{Plan, check};
use std::sync::Arc;
use std::time::Duration;

/// This process's GPU, joined with those of all other processes of a plan. Errors: this process has no GPU or no NCCL, and
/// all others are told so; those of [`Meeting::join`]; NCCL's.
pub fn open(process: &Process, plan: &str) -> Result<(Cuda, Arc<Meeting>)> {
    let own = alone(process);
    let (nccl, gpu) = own.as_ref().map_or((0, String::new()), |(cuda, nccl)| (nccl.1, cuda.name(0)));
    let hello = Hello { trouble: own.as_ref().err().map(Error::to_string), ..Hello::new(process, plan, nccl, &gpu) };
    let id = || match &own {
        Ok((_, (nccl, _))) => nccl.id(),
        Err(why) => Err(Error::device("join", why)),
    };
    let met = meet(process, &hello, &id);
    // What is wrong here is told here first, and not that the others have heard of it.
    let (mut cuda, (mut nccl, _)) = own?;
    let (meeting, id) = met?;
    let meeting = Arc::new(meeting);
    // Somebody who does not come is told of by NCCL alone: it waits for as long as everyone is alive.
    let joined = cuda.here(0).and_then(|()| nccl.join(process.rank, process.world, &id));
    joined.inspect_err(|e| meeting.fail(&e.to_string()))?;
    cuda.join(nccl, meeting.clone());
    Ok((cuda, meeting))
}

/// What this process has by itself: its GPU, and NCCL with its version.
fn alone(process: &Process) -> Result<(Cuda, (Nccl, i32))> {
    let ordinal = process.gpu(driver::count()?)?;
    if ordinal != process.local && process.local == 1 {
        eprintln!(
            "processes see one GPU each and take that; where GPUs do not see each other NCCL may leave NVLink unused \
             (unverified): compare with --gpus-per-node in place of --gpus-per-task"
        );
    }
    let nccl = Nccl::load()?;
    let version = nccl.version()?;
    Ok((Cuda::open(&[ordinal], Attention::Own)?, (nccl, version)))
}

fn meet(process: &Process, hello: &Hello, shared: &dyn Fn() -> Result<Vec<u8>>) -> Result<(Meeting, Vec<u8>)> {
    let (address, mut wait) = (process.address(&environment)?, timeout(environment(TIMEOUT))?);
    if let Some(why) = hello.trouble.as_ref().filter(|_| process.world > 1) {
        eprintln!("rank {} tells the others: {why}", process.rank);
        // Rank 0 waits as ever: all the others come to it.
        wait = if process.rank > 0 { wait.min(EXCUSE) } else { wait };
    }
    Meeting::join(hello, &address, wait, shared)
}

/// How long a rank that can take no part looks for rank 0, to say so.
const EXCUSE: Duration = Duration::from_secs(30);

/// Tells the other processes why this one will not come, which they would wait for: before [`open`], where something goes
/// wrong that need not go wrong everywhere.
pub fn excuse(process: &Process, error: &Error) {
    let hello = Hello { trouble: Some(error.to_string()), ..Hello::new(process, "", 0, "") };
    // Nobody to be told is no reason to say something else than what is wrong.
    let _ = meet(process, &hello, &|| Err(Error::device("join", error)));
}

/// Trains for the steps of `job`, this process being one rank of the plan. `each` is given every step at rank 0. Errors:
/// those of [`super::run::train`] and of [`Meeting::join`]; another rank's failure, with its reason.
pub fn train(
    plan: &Plan,
    options: &Options,
    process: &Process,
    job: &Job,
    each: &mut dyn FnMut(u64, Run) -> Result<()>,
) -> Result<()> {
    ranks_are_processes(plan, process)?;
    check::check(plan)?;
    takes(plan)?;
    let (mut cuda, meeting) = open(process, &plan.hash())?;
    let ready = cuda.leave_attention(options.attention);
    let done = ready.and_then(|()| train_on(&mut cuda, plan, &meeting, options, job, each));
    if let Err(error) = &done {
        // First the others, since what waits for them here may never end.
        meeting.fail(&error.to_string());
        cuda.abort();
    }
    done
}

/// Errors: another number of processes than ranks.
pub fn ranks_are_processes(plan: &Plan, process: &Process) -> Result<()> {
    if process.world != plan.ranks() {
        let why = format!(
            "{} has started {} processes, and the plan has {} ranks; a process is a rank: start {} of them, or change the \
             plan's parallelism",
            process.by,
            process.world,
            plan.ranks(),
            plan.ranks()
        );
        return Err(Error::spec("environment", "world size", why));
    }
    Ok(())
}

/// Trains as [`train`] does, on any device that this process has to itself.
pub fn train_on<D: Device>(
    device: &mut D,
    plan: &Plan,
    meeting: &Meeting,
    options: &Options,
    job: &Job,
    each: &mut dyn FnMut(u64, Run) -> Result<()>,
) -> Result<()> {
    let rank = meeting.rank;
    let atoms = AtomTable::new(plan)?;
    let programs = 0..plan.programs.len() as u32;
    let lines = programs.clone().map(|p| Line::program(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    let layouts = programs.map(|p| Layout::new(plan, &atoms, p)).collect::<Result<Vec<_>>>()?;
    let matching = Matching::new(plan, &lines);
    let (shared, fused) = (least_shared(device, 1), device.fused());
    let (solo, fused_here) = (Some(rank), fused.as_deref());
    let all = Linked::new(plan, &lines, &matching, &layouts);
    let linked = Linked { solo, joined: true, shared, fused: fused_here, ..all };
    // Every process has GPU 0, its own.
    let gpus = vec![0; plan.ranks() as usize];
    let watched = if options.keep || job.keep_last { outputs::watched(plan) } else { vec![] };
    let script = script(linked, &gpus, &watched)?;
    let prepared = Prepared::new(linked, &gpus, 1)?;
    fits(device, linked, &gpus, &prepared)?;
    // Calls of NCCL that connect wait for everyone and hear of no failure: so nobody begins with them before everyone is
    // through with what may fail by itself.
    meeting.gather(vec![])?;
    meeting.together()?;
    connect(device, linked, &script, &prepared)?;
    let mut session = Session::of(device, linked, &script, &gpus, prepared)?;
    session.acquaint()?;
    let mut arena = Arena::new(plan, &layouts[plan.program_of(rank) as usize]);
    inputs::fill(plan, &atoms, rank, job.source, &mut arena);
    session.fill(rank, arena.bytes())?;
    drop(arena);
    let given = inputs::shared(plan, job.source.seed);
    for step in 1..=job.steps {
        session.one_by_one(step == 1 && job.steps > 1);
        for (at, values) in inputs::fed(plan, rank, (job.source, step), &given) {
            session.put(rank, at, &values)?;
        }
        let logits = job.keep_last && step == job.steps;
        // A step's times begin in each rank when all are there.
        meeting.gather(vec![])?;
        meeting.together()?;
        session.step(step, Keep { all: options.keep || logits, logits })?;
        let sent = session.sent()[rank as usize];
        let own = session.done()?.swap_remove(rank as usize);
        let Some(all) = meeting.gather(wire::pack(&own, sent))? else { continue };
        let unpacked = all.iter().map(|bytes| wire::unpack(bytes)).collect::<Option<Vec<_>>>();
        let cut = || Error::device("join", "what a rank has sent of its step cannot be read");
        let (done, sent): (Vec<_>, Vec<_>) = unpacked.ok_or_else(cut)?.into_iter().unzip();
        let mut run = outputs::gather(plan, &lines, &Hub::new(&vec![0; plan.ranks() as usize], None), done)?;
        run.sent_bytes = sent;
        run.attention = Some(said(linked.fused));
        each(step, run)?;
    }
    // Nobody leaves while others may still want something of them.
    meeting.gather(vec![])?;
    meeting.together()
}
