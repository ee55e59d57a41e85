//! A worker: the thread of a device, which looks after all ranks of that device. So never more kernels run at once than
//! there are devices, nothing has to be woken up to hand a device from rank to rank, and what a rank waits for keeps no
//! other rank waiting.

use super::arena::Arena;
use super::kernels::Scalar;
use super::rank::{Done, Rank};
use super::shared::Shared;
use crate::error::Result;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::time::Instant;

pub type Ended<'p> = (Done, Arena<'p>);

/// How a rank ended: with what it did, or waiting for something when everybody was stopped.
pub enum End<'p> {
    Done(Box<Ended<'p>>),
    Stopped(Option<String>),
}

/// A rank of a worker.
struct Member<'a, 'p> {
    rank: Rank<'a, 'p>,
    over: bool,
    panicked: bool,
}

/// Runs the ranks of device `number` from start to end, as soon as `all_here`; whatever goes wrong in one of them stops
/// all the others.
pub fn run<'p, T: Scalar>(
    shared: &Shared<'p>,
    number: u32,
    crew: Vec<(u32, Arena<'p>)>,
    all_here: &Barrier,
) -> Vec<(u32, End<'p>)> {
    let member = |(rank, arena)| Member { rank: Rank::new(shared, rank, arena), over: false, panicked: false };
    let mut crew: Vec<Member> = crew.into_iter().map(member).collect();
    let agreed = crew.iter().try_for_each(|m| m.rank.agree());
    all_here.wait();
    if let Some(others) = &shared.beside {
        others.wait();
    }
    shared.zero.get_or_init(Instant::now);
    if let Err(error) = agreed.and_then(|()| work::<T>(shared, number, &mut crew)) {
        shared.hub.stop(error.to_string());
    }
    crew.into_iter().map(|m| (m.rank.number(), end(m))).collect()
}

fn end<'p>(member: Member<'_, 'p>) -> End<'p> {
    let rank = &member.rank;
    // Of a rank that is dead, or has panicked, nobody hears what it waits for.
    match member {
        Member { over: true, .. } => End::Done(Box::new(member.rank.done())),
        Member { panicked: true, .. } => End::Stopped(None),
        _ if rank.is_dead() => End::Stopped(None),
        _ => End::Stopped(Some(format!("rank {} waits in {}", rank.number(), rank.blocked()))),
    }
}

/// Looks after the ranks of a worker until every rank's program has ended.
fn work<T: Scalar>(shared: &Shared, number: u32, crew: &mut [Member]) -> Result<()> {
    loop {
        let seen = shared.hub.news(number);
        let mut moved = false;
        // Messages first: what they bring may be needed, and they do not keep the thread for long.
        for member in crew.iter_mut().filter(|m| !m.over) {
            moved |= guarded(shared, member, |rank| rank.communicate())?;
        }
        for member in crew.iter_mut().filter(|m| !m.over && !m.rank.is_dead()) {
            if guarded(shared, member, |rank| Ok(rank.compute_one::<T>()))? {
                moved = true;
                break;
            }
        }
        for member in crew.iter_mut().filter(|m| !m.over && m.rank.is_over()) {
            member.over = true;
            shared.hub.finish(member.rank.number());
        }
        let mut left = crew.iter().filter(|m| !m.over).peekable();
        if left.peek().is_none() {
            return Ok(());
        }
        if left.all(|m| m.rank.is_dead()) {
            return shared.hub.fall_silent(number);
        }
        if !moved {
            let waiting = crew.iter().filter(|m| !m.over && !m.rank.is_dead());
            shared.hub.wait(number, seen, || waiting.map(|m| (m.rank.number(), m.rank.blocked())).collect())?;
        }
    }
}

/// Does something with a rank. If the rank panics, everybody is stopped, and it is named with its op.
fn guarded<'a, 'p>(
    shared: &Shared,
    member: &mut Member<'a, 'p>,
    act: impl FnOnce(&mut Rank<'a, 'p>) -> Result<bool>,
) -> Result<bool> {
    let rank = &mut member.rank;
    catch_unwind(AssertUnwindSafe(|| act(rank))).unwrap_or_else(|panic| {
        member.panicked = true;
        let said = panic.downcast_ref::<String>().cloned();
        let said = said.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_default();
        shared.hub.stop(format!("rank {} panicked in {}: {said}", member.rank.number(), member.rank.running()));
        shared.hub.halted().map(|()| false)
    })
}
