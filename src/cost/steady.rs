//! The steady state of programs side by side, taken in one stride.
//!
//! Once a pipeline is filled, its stages do the same over and over, a microbatch further on. The crews know where the
//! ops repeat ([`Moves`]: which slot takes the place of which); here it is found whether the times repeat, too. Every
//! start is a maximum of found times plus constants, so if all that matters is found a period later, everything is done
//! a period later; and times before the *floor*, the earliest moment that was asked about since, decided nothing and
//! need not agree, see [`repeat`](super::repeat). The periods left are taken at once: every time is as many periods
//! later, and each slot's times go to where its place is by then. That is exact in picoseconds, and sums of seconds are
//! added up as often as they would have been.

use super::across::Posted;
use super::ranks::{Held, Ranks, Stamp, Stamps};
use super::walk::Walker;
use crate::act::charges::{Owed, Spell};
use crate::act::{PORTS, PROVENANCES};
use crate::plan::crew::{Again, Moves, PostId};
use crate::plan::link::AtomTable;
use crate::plan::{Axis, Plan, TensorId};
use crate::timeline::Usage;
use rustc_hash::FxHashMap;

/// A sum of a usage that a crossing adds to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sum {
    Comm(Axis),
    Provenance(usize),
    ScaleUp,
    ScaleOut,
}

impl Sum {
    pub fn of(self, usage: &mut Usage) -> &mut f64 {
        match self {
            Sum::Comm(axis) => usage.comm.entry(axis).or_default(),
            Sum::Provenance(known) => usage.by_provenance.entry(PROVENANCES[known]).or_default(),
            Sum::ScaleUp => &mut usage.bytes_scale_up,
            Sum::ScaleOut => &mut usage.bytes_scale_out,
        }
    }
}

/// The state of a crew's ranks at a mark.
struct Stood {
    stamps: Stamps,
    /// What holds each port, by class and port.
    ports: Vec<HeldPort>,
    owed: Vec<Owed>,
    sms: Vec<Vec<Held>>,
    compute_end: Vec<u64>,
    waited: Vec<Vec<u64>>,
    host: Vec<u64>,
    runs: Vec<u64>,
}

/// The state of all crews at a mark.
struct Mark {
    crews: Vec<Stood>,
    posts: FxHashMap<PostId, (Vec<Stamp>, Vec<u64>)>,
    /// What crossings have added since the mark: class, sum and amount.
    sums: Vec<(usize, Sum, f64)>,
}

/// Looks for a period that repeats, and takes it in one stride.
#[derive(Default)]
pub struct Steady {
    /// Until when each crew has computed, ps, round after round and crew after crew.
    ends: Vec<u64>,
    mark: Option<Mark>,
}

/// Rounds of a period, at most: an interleaved pipeline goes through its chunks by turns.
const MOST: usize = 256;

/// The ends, then and now, of a crossing that has not started.
const NOT_STARTED: [u64; 2] = [0; 2];

impl Steady {
    /// How many rounds ago every crew had computed until earlier by the same amount; `None` if there was no such round.
    pub fn round(&mut self, walkers: &[Walker]) -> Option<usize> {
        let crews = walkers.len();
        self.ends.extend(walkers.iter().map(computed));
        let mut rounds = self.ends.rchunks_exact(crews);
        let now = rounds.next()?;
        let later = |then: &[u64]| {
            let d = now[0] - then[0];
            d > 0 && now.iter().zip(then).all(|(now, then)| now - then == d)
        };
        rounds.take(MOST).position(later).map(|before| before + 1)
    }

    pub fn mark(&mut self, walkers: &mut [Walker], posts: &[(PostId, &Posted)]) {
        let crews = walkers.iter_mut().map(|walker| {
            (walker.ranks.floor, walker.ranks.host_led) = (u64::MAX, false);
            Stood::of(walker)
        });
        let posts = posts.iter().map(|(id, post)| (*id, (post.starts.clone(), post.ends.clone())));
        self.mark = Some(Mark { crews: crews.collect(), posts: posts.collect(), sums: vec![] });
    }

    /// Notes what a crossing adds to a sum of a class.
    pub fn add(&mut self, class: usize, sum: Sum, by: f64) {
        if let Some(mark) = &mut self.mark {
            mark.sums.push((class, sum, by));
        }
    }

    /// By how much everything is later than at the mark, ps; `None` if not all by the same. `posts`: all crossings as
    /// they are now.
    fn later(&self, at: &At, again: &Again, posts: &[Posted]) -> Option<u64> {
        let mark = self.mark.as_ref()?;
        let d = computed(at.walkers.first()?) - mark.crews.first()?.compute_end.first()?;
        let crews = at.walkers.iter().zip(&mark.crews).zip(&again.moves);
        let mut alike = crews.map(|((walker, then), moves)| then.is_before(walker, d, &At { ..*at }, moves));
        let posts_alike = again.posts.iter().all(|(then, now, _)| {
            let Some((starts, ends)) = mark.posts.get(then) else { return false };
            let now = &posts[*now];
            now.starts.iter().zip(starts).all(|(now, then)| *now == then.later(d))
                && now.ends.iter().zip(ends).all(|(now, then)| *now == then + d || [*now, *then] == NOT_STARTED)
        });
        (posts_alike && alike.all(|alike| alike)).then_some(d)
    }

    /// Takes the periods that crews can do again in one stride, if the times repeat, too; whether they did. `extra`:
    /// the sums of crossings, by class.
    pub fn again(
        &mut self,
        (plan, atoms): (&Plan, &AtomTable),
        again: &Again,
        walkers: &mut [Walker],
        posts: &mut [Posted],
        extra: &mut [Usage],
    ) -> bool {
        let later = self.later(&At { plan, atoms, walkers }, again, posts);
        let Some((mark, d)) = self.mark.take().zip(later) else { return false };
        for ((walker, then), moves) in walkers.iter_mut().zip(&mark.crews).zip(&again.moves) {
            then.take(walker, (plan, atoms), moves, [d, again.times]);
        }
        #[cfg(test)]
        TAKEN.set(TAKEN.get() + again.times);
        let by = d * again.times;
        for &(_, now, _) in &again.posts {
            posts[now].starts.iter_mut().for_each(|start| *start = start.later(by));
            posts[now].paths.iter_mut().for_each(|path| path.later(by, d));
            posts[now].readies.iter_mut().for_each(|ready| *ready = ready.later(by));
            posts[now].ends.iter_mut().filter(|end| **end > 0).for_each(|end| *end += by);
        }
        let mut sums = mark.sums;
        // Each sum by itself, in its order.
        sums.sort_by_key(|&(class, sum, _)| (class, sum));
        for same in sums.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            let sum = same[0].1.of(&mut extra[same[0].0]);
            (0..again.times).for_each(|_| same.iter().for_each(|&(.., by)| *sum += by));
        }
        true
    }
}

/// Until when the first class of a crew has computed, ps; 0 for a crew without ranks.
fn computed(walker: &Walker) -> u64 {
    walker.ranks.state.first().map_or(0, |state| state.compute_end)
}

/// What a state is compared with: the plan, its atoms, and the walkers as they are now.
struct At<'a, 'p> {
    plan: &'a Plan,
    atoms: &'a AtomTable,
    walkers: &'a [Walker<'p>],
}

/// The spells that are known to hold a port, how many it has had so far, and the time before which it may have
/// forgotten some.
struct HeldPort {
    held: Vec<Spell>,
    mark: usize,
    lost: u64,
}

impl Stood {
    fn of(walker: &Walker) -> Stood {
        let (ranks, runs) = (&walker.ranks, walker.runs.clone());
        let all = || ranks.state.iter();
        let ports = all().flat_map(|state| &state.ports).map(|port| {
            let mut held = vec![];
            port.since(0, &mut |spell| held.push(spell));
            HeldPort { held, mark: port.mark(), lost: port.lost() }
        });
        Stood {
            stamps: ranks.stamps.clone(),
            ports: ports.collect(),
            owed: all().flat_map(|state| state.owed.iter().flatten().copied()).collect(),
            sms: all().map(|state| state.sms.clone()).collect(),
            compute_end: all().map(|state| state.compute_end).collect(),
            waited: all().map(|state| state.waited.clone()).collect(),
            host: ranks.host.clone(),
            runs,
        }
    }

    /// Whether all that matters is `d` later now than here. `moves`: which slot takes the place of which.
    fn is_before(&self, walker: &Walker, d: u64, at: &At, moves: &Moves) -> bool {
        let (ranks, floor) = (&walker.ranks, walker.ranks.floor);
        let same = |now: &Stamp, then: &Stamp| *now == then.later(d) || (now.ps() < floor + d && then.ps() < floor);
        let led =
            |(now, then): (&u64, &u64)| *now == then + d || (now - then <= d && (*now < floor || !ranks.host_led));
        floor < u64::MAX
            && walker.runs.len() == self.runs.len()
            && ranks.state.iter().zip(&self.compute_end).all(|(now, then)| now.compute_end == then + d)
            && ranks.host.iter().zip(&self.host).all(led)
            && ranks.stamps.lanes.iter().zip(&self.stamps.lanes).all(|(now, then)| same(now, then))
            && self.holds_alike(ranks, floor, d)
            && (0..at.plan.tensors.len() as TensorId).all(|tensor| self.slots_alike(ranks, at, (tensor, moves), &same))
    }

    /// Whether ports and SMs are held `d` later now, by whatever is not over before the floor.
    fn holds_alike(&self, ranks: &Ranks, floor: u64, d: u64) -> bool {
        let ports = ranks.state.iter().flat_map(|state| &state.ports).zip(&self.ports).all(|(port, then)| {
            let mut held = vec![];
            port.since(floor + d, &mut |spell| held.push(spell));
            let later = |spell: &Spell| Spell { from: spell.from + d, to: spell.to + d, ..*spell };
            // The ops since the mark asked the port for no earlier time, and those of the next period must not find
            // that it has forgotten more.
            port.lost() <= floor.max(then.lost) + d
                && held.into_iter().eq(then.held.iter().filter(|spell| spell.to > floor).map(later))
        });
        let same = |now: u64, then: u64| now == then + d || (now < floor + d && then < floor);
        let owed = ranks.state.iter().flat_map(|state| state.owed.iter().flatten()).zip(&self.owed);
        let mut owed = owed.map(|(now, then)| same(now.last, then.last) && same(now.until, then.until));
        let sms = ranks.state.iter().zip(&self.sms).all(|(state, then)| {
            let now = state.sms.iter().filter(|held| held.to > floor + d).copied();
            let then = then.iter().filter(|held| held.to > floor);
            now.eq(then.map(|held| Held { from: held.from + d, to: held.to + d, ..*held }))
        });
        debug_assert_eq!(self.ports.len(), ranks.classes * PORTS);
        ports && sms && owed.all(|alike| alike)
    }

    /// Whether every slot of a tensor has the times, `d` later, of the slot whose place it takes; and a slot that
    /// nobody touches those that it had.
    fn slots_alike(
        &self,
        ranks: &Ranks,
        at: &At,
        (tensor, moves): (TensorId, &Moves),
        same: &impl Fn(&Stamp, &Stamp) -> bool,
    ) -> bool {
        let cells = |slot: u32| cells(at.atoms, tensor, slot, ranks.classes);
        let (now, then) = (&ranks.stamps, &self.stamps);
        (0..at.plan.tensors[tensor as usize].slots).all(|slot| {
            if moves.is_given(tensor) {
                // A read of an input makes nobody wait as long as nobody writes it.
                return now.written[cells(slot)].iter().all(|stamp| *stamp == Stamp::default());
            }
            match moves.of(tensor, slot) {
                Some(place) => [(&now.written, &then.written), (&now.read, &then.read)].iter().all(|(now, then)| {
                    now[cells(place)].iter().zip(&then[cells(slot)]).all(|(now, then)| same(now, then))
                }),
                None => {
                    now.written[cells(slot)] == then.written[cells(slot)]
                        && now.read[cells(slot)] == then.read[cells(slot)]
                }
            }
        })
    }

    /// Moves the state on by `times` periods of what was done since the mark, each `d` later than the one before.
    fn take(&self, walker: &mut Walker, (plan, atoms): (&Plan, &AtomTable), moves: &Moves, [d, times]: [u64; 2]) {
        let (ranks, by) = (&mut walker.ranks, d * times);
        let (floor, classes) = (ranks.floor, ranks.classes);
        let on = |stamp: Stamp| if stamp.ps() >= floor { stamp.later(by) } else { stamp };
        ranks.stamps.lanes.iter_mut().for_each(|stamp| *stamp = on(*stamp));
        for tensor in (0..plan.tensors.len() as TensorId).filter(|&tensor| !moves.is_given(tensor)) {
            let cells = |slot: u32| cells(atoms, tensor, slot, classes);
            for circle in moves.circles(tensor) {
                for stamps in [&mut ranks.stamps.written, &mut ranks.stamps.read] {
                    let before: Vec<Vec<Stamp>> = circle.iter().map(|&slot| stamps[cells(slot)].to_vec()).collect();
                    for (n, before) in before.iter().enumerate() {
                        let place = circle[(n + times as usize) % circle.len()];
                        stamps[cells(place)].iter_mut().zip(before).for_each(|(now, before)| *now = on(*before));
                    }
                }
            }
        }
        for (state, ports) in ranks.state.iter_mut().zip(self.ports.chunks(PORTS)) {
            state.ports.iter_mut().zip(ports).for_each(|(port, then)| port.again(then.mark, d, times));
            for held in state.sms.iter_mut().filter(|held| held.to > floor) {
                (held.from, held.to) = (held.from + by, held.to + by);
            }
            state.compute_end += by;
            state.owed.iter_mut().flatten().for_each(|owed| owed.later(floor, by));
            state.past.later(floor, by, d);
        }
        let more = |now: &mut u64, then: &u64| *now += (*now - then) * times;
        for (state, then) in ranks.state.iter_mut().zip(&self.waited) {
            state.waited.iter_mut().zip(then).for_each(|(now, then)| more(now, then));
        }
        ranks.host.iter_mut().zip(&self.host).for_each(|(now, then)| more(now, then));
        walker.runs.iter_mut().zip(&self.runs).for_each(|(now, then)| more(now, then));
        if let Some(guess) = &mut ranks.guess {
            guess.later(by);
        }
    }
}

/// The cells of a slot: where its stamps are.
fn cells(atoms: &AtomTable, tensor: TensorId, slot: u32, classes: usize) -> std::ops::Range<usize> {
    let atoms = atoms.slot(tensor, slot);
    atoms.first as usize * classes..(atoms.first + atoms.count) as usize * classes
}

#[cfg(test)]
thread_local! {
    /// Periods that were taken in one stride.
    static TAKEN: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::cost::{Effort, Machine, cost};
    use crate::device::Roofline;
    use crate::spec::{ClusterSpec, GpuSpec, LlmSpec, Parallelism, Recompute, StackSpec, Workload};
    use crate::strategy::{Engines, build};
    use rand::{Rng, SeedableRng};

    /// Whether a step is the same with strides and without, and how many periods were in one stride.
    fn taken(model: &LlmSpec, work: &Workload, par: &Parallelism, [cluster, gpu, stack]: [&str; 3]) -> Option<u64> {
        let ranks = par.dp * par.pp * par.tp * par.ring * par.ulysses;
        let (spec, gpu) = (ClusterSpec::find(cluster).unwrap(), GpuSpec::find(gpu).unwrap());
        let (cluster, stack) = (Cluster::new(&spec, &gpu, ranks).unwrap(), StackSpec::find(stack).unwrap());
        let roofline = Roofline::new(&gpu, &stack).unwrap();
        let machine = Machine { cluster: &cluster, stack: &stack, kernels: &roofline, devices: None };
        let plan = build(model, work, par, Engines::of(&stack, &spec)).ok()?;
        TAKEN.set(0);
        let some = cost(&plan, machine, Effort::SUMS).unwrap();
        let taken = TAKEN.get();
        let all = cost(&plan, machine, Effort { stride: false, ..Effort::SUMS }).unwrap();
        assert_eq!(TAKEN.get(), taken, "strides were not asked for");
        assert_eq!(some.step, all.step, "{par:?}");
        for (some, all) in some.classes.iter().zip(&all.classes) {
            assert_eq!((some.rank, &some.usage), (all.rank, &all.usage), "{par:?}");
        }
        Some(taken)
    }

    #[test]
    fn strides_of_a_pipeline_are_its_microbatches() {
        let words = [
            "default",
            "zb-h1",
            "dualpipe-v",
            "zb-v",
            "v-half",
            "v-min",
            "no-overlap-p2p",
            "uneven",
            "overlap-exchange",
        ];
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(11);
        let (mut strides, mut all) = (0, 0);
        for n in 0..90 {
            let words = words[n % words.len()];
            let in_v = ["dualpipe-v", "zb-v", "v-half", "v-min"].contains(&words);
            let (pp, vp) = ([2, 4, 8][rng.random_range(0..3)], if in_v { 2 } else { rng.random_range(1..=2) });
            let (name, ep) = [("llama-3-8b", 1), ("mixtral-8x7b", 2)][usize::from(n % 2 == 1)];
            let model = LlmSpec { layers: u64::from(pp * vp * rng.random_range(1..3)), ..LlmSpec::find(name).unwrap() };
            let par = Parallelism {
                pp,
                vp: if words == "zb-h1" || words == "uneven" { 1 } else { vp },
                tp: rng.random_range(1..=2),
                dp: 2,
                ep,
                zero: rng.random_range(0..=1),
                recompute: [Recompute::None, Recompute::Full][rng.random_range(0..2)],
                options: words.parse().unwrap(),
                ..Parallelism::default()
            };
            let microbatches = u64::from(pp) * rng.random_range(4..24);
            let (seq_len, global_batch) = (rng.random_range(1..9) * 512, 2 * microbatches);
            let (dtype, documents) = (crate::spec::Dtype::Bf16, Default::default());
            let work = Workload { seq_len, global_batch, micro_batch: 1, dtype, documents };
            let on = ["dgx-h100", "h100-sxm5", "nccl-fa3"];
            let Some(taken) = taken(&model, &work, &par, on) else { continue };
            (strides, all) = (strides + usize::from(taken > 0), all + 1);
        }
        assert!(all > 50 && strides > all / 2, "{strides} of {all}");
    }
}
