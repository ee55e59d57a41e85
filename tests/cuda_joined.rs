//! A rank a process, without GPUs: processes that find each other over loopback, and whole steps on doubles of the
//! device whose messages go over a board in place of NCCL. What is not tested here is NCCL.

mod cuda_double;
mod cuda_emulator;

use cuda_double::Double;
use cuda_double::board::{Board, Connection, Seat};
use foretrain::error::Result;
use foretrain::exec::cuda::joined::{ranks_are_processes, train_on};
use foretrain::exec::cuda::meeting::{Hello, Meeting};
use foretrain::exec::cuda::process::Process;
use foretrain::exec::cuda::run;
use foretrain::exec::cuda::selftest::nccl;
use foretrain::exec::source::Source;
use foretrain::exec::{Job, Options, Run};
use foretrain::plan::{Dtype, Engine, Lane, Plan};
use foretrain::spec::{LlmSpec, MoeSpec, Parallelism, Workload};
use foretrain::strategy::expert::Routing;
use foretrain::strategy::{Engines, build, build_routed};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::Duration;

/// A port that nobody listens on, another one each time, below those that the system gives to whoever asks for any.
fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Programs that run at once begin at different ones.
    let first = (std::process::id() % 100) as u16 * 100;
    let ports = || 20_000 + (first + NEXT.fetch_add(1, Relaxed)) % 10_000;
    std::iter::repeat_with(ports).take(10_000).find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok()).unwrap()
}

/// Takes a port. A process that another test starts has the sockets of this one until it runs a program of its own, so that
/// one that was closed may be open for a moment longer.
fn take(port: u16) -> TcpListener {
    let bind = |_| {
        let taken = TcpListener::bind(("0.0.0.0", port));
        taken.inspect_err(|_| std::thread::sleep(Duration::from_millis(20))).ok()
    };
    (0..250).find_map(bind).expect("nobody else takes it")
}

fn hello(rank: u32, world: u32) -> Hello {
    let process = Process { rank, world, local: rank, by: "a test" };
    Hello::new(&process, "plan", 22_703, "a double")
}

fn join(hello: &Hello, port: u16, seconds: f64) -> Result<(Meeting, Vec<u8>)> {
    let shared = || Ok(b"shared".to_vec());
    Meeting::join(hello, &("127.0.0.1".into(), port), Duration::from_secs_f64(seconds), &shared)
}

/// Every process in a thread, and how it ended.
fn all<T: Send>(hellos: &[Hello], then: impl Fn(Result<Meeting>) -> T + Sync) -> Vec<T> {
    let (port, then) = (port(), &then);
    std::thread::scope(|scope| {
        let start = |hello: &Hello| {
            let hello = hello.clone();
            scope.spawn(move || {
                then(join(&hello, port, 20.0).map(|(meeting, shared)| {
                    assert_eq!(shared, b"shared");
                    meeting
                }))
            })
        };
        let threads: Vec<_> = hellos.iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn processes_find_each_other_and_rank_0_hears_them_all() {
    let hellos: Vec<Hello> = (0..4).map(|rank| hello(rank, 4)).collect();
    let heard = all(&hellos, |meeting| {
        let meeting = meeting.unwrap();
        let mut heard = vec![];
        for round in 0..3 {
            let all = meeting.gather(vec![meeting.rank as u8, round]).unwrap();
            meeting.together().unwrap();
            heard.push(all);
        }
        heard
    });
    for (rank, rounds) in heard.into_iter().enumerate() {
        for (round, all) in rounds.into_iter().enumerate() {
            let want = (rank == 0).then(|| (0..4).map(|r| vec![r, round as u8]).collect::<Vec<_>>());
            assert_eq!(all, want);
        }
    }
    // A world of one has nobody to wait for.
    let (one, _) = join(&hello(0, 1), port(), 1.0).unwrap();
    assert_eq!(one.gather(vec![7]).unwrap(), Some(vec![vec![7]]));
}

#[test]
fn what_processes_must_agree_on_is_named() {
    let with = |change: fn(&mut Hello)| {
        let mut odd = hello(1, 2);
        change(&mut odd);
        let ends = all(&[hello(0, 2), odd], |meeting| meeting.map(drop).unwrap_err().to_string());
        assert!(ends[1].contains("rank 0: "), "rank 0 tells it: {}", ends[1]);
        ends
    };
    for said in with(|h| h.world = 4) {
        assert!(said.contains("a world of 4") && said.contains("has 2"), "{said}");
    }
    for said in with(|h| h.foretrain = "0.0.9".into()) {
        assert!(said.contains("foretrain 0.0.9"), "{said}");
    }
    for said in with(|h| h.nccl = 23_007) {
        assert!(said.contains("NCCL 2.30.7") && said.contains("2.27.3"), "{said}");
    }
    for said in with(|h| h.plan = "another".into()) {
        assert!(said.contains("another plan") && said.contains("--plan"), "{said}");
    }
}

#[test]
fn two_processes_of_one_rank_and_a_missing_one_are_named() {
    let twice = all(&[hello(0, 3), hello(1, 3), hello(1, 3)], |meeting| meeting.map(drop).unwrap_err().to_string());
    for said in twice {
        assert!(said.contains("two processes say that they are rank 1"), "{said}");
    }
    let port = port();
    let waiting = std::thread::spawn(move || join(&hello(2, 3), port, 2.0).map(drop).unwrap_err().to_string());
    let said = [join(&hello(0, 3), port, 1.0).map(drop).unwrap_err().to_string(), waiting.join().unwrap()];
    for said in said {
        assert!(said.contains("of 3 processes those of ranks 1 have not come"), "{said}");
    }
    let said = join(&hello(1, 2), port, 0.3).map(drop).unwrap_err().to_string();
    assert!(said.contains("rank 0 is not at 127.0.0.1") && said.contains("MASTER_ADDR"), "{said}");
}

#[test]
fn a_port_that_is_taken_for_a_moment_is_waited_for() {
    let port = port();
    let taken = take(port);
    let waiting =
        std::thread::spawn(move || join(&hello(0, 2), port, 20.0).map(|(meeting, _)| meeting.gather(vec![0])));
    std::thread::sleep(Duration::from_millis(300));
    assert!(!waiting.is_finished(), "rank 0 has given up");
    drop(taken);
    let (other, _) = join(&hello(1, 2), port, 20.0).unwrap();
    other.gather(vec![1]).unwrap();
    assert_eq!(waiting.join().unwrap().unwrap().unwrap(), Some(vec![vec![0], vec![1]]));

    let _taken = take(port);
    let said = join(&hello(0, 2), port, 0.2).map(drop).unwrap_err().to_string();
    assert!(said.contains(&format!("port {port} cannot be listened on")) && said.contains("FORETRAIN_PORT"), "{said}");
}

/// Whoever waits for something hears why it will not come: of a rank that says so, and of one that is gone.
#[test]
fn a_failure_ends_everyone_with_its_reason() {
    let hellos: Vec<Hello> = (0..3).map(|rank| hello(rank, 3)).collect();
    let ends = all(&hellos, |meeting| {
        let meeting = meeting.unwrap();
        if meeting.rank == 2 {
            meeting.fail("out of memory");
            return meeting.failed().unwrap();
        }
        meeting.gather(vec![]).and_then(|_| meeting.together()).unwrap_err().to_string()
    });
    for said in ends {
        assert!(said.contains("rank 2: out of memory"), "{said}");
    }
    let ends = all(&hellos, |meeting| {
        let meeting = meeting.unwrap();
        if meeting.rank == 1 {
            // A process that is killed says nothing.
            meeting.vanish();
            return None;
        }
        Some(meeting.gather(vec![]).and_then(|_| meeting.together()).unwrap_err().to_string())
    });
    for said in ends.into_iter().flatten() {
        assert!(said.contains("rank 1 has ended without a word"), "{said}");
    }
}

/// A process that panics says so and says no good-bye: the others would wait in the middle of a step.
#[test]
fn a_panic_ends_everyone() {
    let hellos: Vec<Hello> = (0..3).map(|rank| hello(rank, 3)).collect();
    let ends = all(&hellos, |meeting| {
        let meeting = meeting.unwrap();
        if meeting.rank == 1 {
            let step = std::panic::AssertUnwindSafe(move || {
                let _meeting = meeting;
                std::panic::resume_unwind(Box::new("a bug"));
            });
            return std::panic::catch_unwind(step).map(|()| String::new()).unwrap_or_default();
        }
        meeting.gather(vec![]).and_then(|_| meeting.together()).unwrap_err().to_string()
    });
    for said in [&ends[0], &ends[2]] {
        assert!(said.contains("rank 1: it has panicked"), "{said}");
    }
}

/// Who leaves while others are in a step is missed there, though nothing has failed.
#[test]
fn who_ends_before_the_others_is_missed() {
    let hellos: Vec<Hello> = (0..2).map(|rank| hello(rank, 2)).collect();
    let ends = all(&hellos, |meeting| {
        let meeting = meeting.unwrap();
        if meeting.rank == 1 {
            return None;
        }
        let missed = (0..500).find_map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            meeting.gone()
        });
        assert!(meeting.failed().is_none());
        missed
    });
    assert_eq!(ends[0].as_deref(), Some("rank 1 has ended while others are in a step"));
}

/// A process that can take no part comes to say so; those that come after that are told, too.
#[test]
fn what_goes_wrong_before_is_told_to_all() {
    let port = port();
    let troubled = Hello { trouble: Some("no GPU here".into()), ..hello(2, 4) };
    let late = |rank: u32, after: u64| {
        let hello = if rank == 2 { troubled.clone() } else { hello(rank, 4) };
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(after));
            join(&hello, port, 20.0).map(drop).unwrap_err().to_string()
        })
    };
    let begun = std::time::Instant::now();
    let ends = [late(0, 0), late(1, 0), late(2, 200), late(3, 600)].map(|end| end.join().unwrap());
    for said in ends {
        assert!(said.contains("rank 2 (") && said.contains("can take no part: no GPU here"), "{said}");
    }
    assert!(begun.elapsed() < Duration::from_secs(8));
}

/// localhost may have ::1 before 127.0.0.1, and a node's name an address that nobody listens at.
#[test]
fn ranks_meet_at_a_name() {
    let port = port();
    let at = |rank| {
        let shared = || Ok(vec![]);
        Meeting::join(&hello(rank, 2), &("localhost".into(), port), Duration::from_secs(5), &shared).map(drop)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(move || at(1));
        at(0).and(other.join().unwrap()).unwrap();
    });
}

const ENGINES: Engines = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 8 } };

fn plan(par: Parallelism, batches: u64) -> Plan {
    let (heads, layers) = (4, u64::from(par.pp));
    let sizes = LlmSpec {
        hidden: 64,
        layers,
        heads,
        kv_heads: 4,
        head_dim: 32,
        ffn: 96,
        vocab: 64,
        ..LlmSpec::find("tiny").unwrap()
    };
    let (global_batch, documents) = (u64::from(par.dp) * batches, Default::default());
    let work = Workload { seq_len: 128, global_batch, micro_batch: 1, dtype: Dtype::Bf16, documents };
    build(&sizes, &work, &par, ENGINES).unwrap()
}

fn none() -> Parallelism {
    Parallelism::default()
}

fn job(source: &Source, steps: u64) -> Job<'_> {
    Job { source, steps, keep_last: false, watch: None }
}

/// What rank 0 has of all steps, every rank on a double of its own; `broken` is a kernel of rank 1 that fails.
fn joined(plan: &Plan, steps: u64, broken: Option<&'static str>) -> Vec<Result<Vec<Run>>> {
    let change = |rank, double: &mut Double| double.broken = broken.filter(|_| rank == 1);
    joined_by(plan, steps, change).into_iter().map(|(runs, _)| runs).collect()
}

/// The same, each rank's double being changed before, and with what was connected.
fn joined_by(
    plan: &Plan,
    steps: u64,
    change: impl Fn(u32, &mut Double) + Sync,
) -> Vec<(Result<Vec<Run>>, Option<Seat>)> {
    let hellos: Vec<Hello> = (0..plan.ranks()).map(|rank| hello(rank, plan.ranks())).collect();
    let board = Arc::new(Board::default());
    all(&hellos, |meeting| {
        let meeting = Arc::new(meeting.unwrap());
        let mut double = Double::new(1, 8 << 30, u64::from(meeting.rank) + 1);
        double.seat = Some(Seat::new(&board, meeting.rank));
        double.early = true;
        change(meeting.rank, &mut double);
        let others = meeting.clone();
        double.failed = Box::new(move || others.gone());
        let mut runs = vec![];
        let options = Options::new(7, (0..plan.ranks()).collect(), true);
        let done = train_on(&mut double, plan, &meeting, &options, &job(&Source::seeded(7), steps), &mut |_, run| {
            runs.push(run);
            Ok(())
        });
        if let Err(error) = &done {
            meeting.fail(&error.to_string());
        }
        assert!(double.cold.is_empty(), "not warmed: {:?}", double.cold);
        (done.map(|()| runs), double.seat.take())
    })
}

/// Connections take memory: of a ring those to both neighbours, and nothing of a lane that others have alone. That all are
/// there before memory is filled every double of these tests sees to.
#[test]
fn what_a_step_goes_over_is_connected_and_nothing_else() {
    for (rank, (runs, seat)) in (0..).zip(joined_by(&plan(Parallelism { ring: 4, ..none() }, 1), 1, |_, _| {})) {
        runs.unwrap();
        let seat = seat.unwrap();
        let peers = |lane| {
            let of = |c: &Connection| matches!(c, Connection::To(_) | Connection::From(_));
            seat.connected.iter().filter(|(of_lane, c)| *of_lane == lane && of(c)).map(|(_, c)| *c).collect::<Vec<_>>()
        };
        let lanes = seat.members().keys().filter(|lane| !peers(**lane).is_empty()).count();
        assert!(lanes > 0);
        for &lane in seat.members().keys() {
            let (before, next) = ((rank + 3) % 4, (rank + 1) % 4);
            let either =
                |to, from| peers(lane).iter().all(|c| [Connection::To(to), Connection::From(from)].contains(c));
            assert!(either(next, before) || either(before, next), "rank {rank}, lane {lane}: {:?}", peers(lane));
        }
    }
    let mut without = 0;
    let plan = plan(Parallelism { pp: 3, ..none() }, 3);
    let lanes = plan.lanes.iter().filter(|lane| matches!(lane, Lane::Comm(..))).count();
    for (runs, seat) in joined_by(&plan, 1, |_, _| {}) {
        runs.unwrap();
        let seat = seat.unwrap();
        assert!(seat.members().values().all(|all| all.len() > 1), "{:?}", seat.members());
        without += lanes - seat.members().len();
    }
    assert!(without > 0, "every stage is on every lane");
}

/// What NCCL takes for connections is gone before a rank's memory is asked for, and a rank that has too little then ends
/// all of them.
#[test]
fn memory_that_connections_take_is_not_free() {
    let change = |rank, double: &mut Double| double.connection = if rank == 1 { 4 << 30 } else { 1 };
    for (ended, _) in joined_by(&plan(Parallelism { ring: 2, ..none() }, 1), 1, change) {
        let said = ended.unwrap_err().to_string();
        assert!(said.contains("memory: 1 ranks need") && said.contains("0.0 GiB are free there"), "{said}");
    }
}

/// The same numbers as in one process, but for the order of sums: three ranks of a sum round as they come.
#[track_caller]
fn hold(par: Parallelism, batches: u64) {
    hold_plan(&plan(par, batches));
}

#[track_caller]
fn hold_plan(plan: &Plan) {
    let mut want = vec![];
    let options = Options::new(7, vec![0; plan.ranks() as usize], true);
    let mut double = Double::new(1, 8 << 30, 1);
    run::train_on(&mut double, plan, &options, &job(&Source::seeded(7), 2), &mut |_, run| {
        want.push(run);
        Ok(())
    })
    .unwrap();
    let mut all = joined(plan, 2, None);
    let got = all.swap_remove(0).unwrap();
    assert!(all.into_iter().all(|other| other.unwrap().is_empty()), "rank 0 alone reports");
    assert_eq!(got.len(), 2);
    for (got, want) in got.iter().zip(&want) {
        assert!((got.loss - want.loss).abs() < 1e-3 * want.loss, "loss {} is not {}", got.loss, want.loss);
        assert_eq!(got.peak_bytes, want.peak_bytes);
        // Where a sum has parts of two sizes, a call of NCCL is counted as if they were one.
        assert_eq!(got.sent_bytes.iter().sum::<u64>(), want.sent_bytes.iter().sum::<u64>());
        let close = |(a, b): (&u64, &u64)| a.abs_diff(*b) < 16;
        assert!(got.sent_bytes.iter().zip(&want.sent_bytes).all(close), "{:?} {:?}", got.sent_bytes, want.sent_bytes);
        assert_eq!(got.grads.keys().collect::<Vec<_>>(), want.grads.keys().collect::<Vec<_>>());
        for (name, want) in &want.grads {
            let scale = want.iter().fold(1e-6, |m: f64, x| m.max(x.abs()));
            let off = got.grads[name].iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / scale;
            assert!(off < 0.03, "gradient of {name} is off by {off}");
        }
        assert!(got.timeline.classes.iter().zip(&want.timeline.classes).all(|(a, b)| a.spans.len() == b.spans.len()));
    }
}

#[test]
fn a_ring_and_all_to_alls() {
    hold(Parallelism { ring: 2, ..none() }, 1);
    hold(Parallelism { ulysses: 2, ..none() }, 1);
}

#[test]
fn tensor_parallel_replicas() {
    hold(Parallelism { tp: 2, dp: 2, zero: 1, ..none() }, 1);
}

#[test]
fn shared_weights() {
    hold(Parallelism { dp: 2, zero: 3, ..none() }, 1);
}

#[test]
fn pipelines() {
    hold(Parallelism { pp: 2, ..none() }, 2);
}

/// A mixture of experts, its tokens routed by lot: dropless, and with as many rows of each expert as it has room for.
fn experts(options: &str, par: Parallelism) -> Plan {
    let mixtral = LlmSpec::find("mixtral-8x7b").unwrap().moe.unwrap();
    let moe = MoeSpec { experts: 4, top_k: 2, ffn: 32, shared_ffn: 0, ..mixtral };
    let model = LlmSpec {
        hidden: 64,
        layers: 1,
        heads: 4,
        kv_heads: 4,
        head_dim: 32,
        ffn: 96,
        vocab: 64,
        moe: Some(moe),
        ..LlmSpec::find("tiny").unwrap()
    };
    let documents = Default::default();
    let global_batch = u64::from(par.dp);
    let work = Workload { seq_len: 64, global_batch, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let par = Parallelism { options: options.parse().unwrap(), ..par };
    let route = Routing::Uniform { seed: 5 }.route(&model, &work, &par, 2).unwrap();
    build_routed(&model, &work, &par, ENGINES, route).unwrap()
}

#[test]
fn experts_by_every_way() {
    let two = Parallelism { dp: 2, ep: 2, ..none() };
    for words in ["default", "dispatch-deepep-v1-normal", "dispatch-deepep-v1-ll", "dispatch-allgather"] {
        hold_plan(&experts(words, two));
    }
}

#[test]
fn experts_with_room_for_so_many_rows_on_some_of_the_ranks() {
    let two = Parallelism { dp: 2, ep: 2, ..none() };
    for words in ["capacity-1", "capacity-pad:1.25"] {
        hold_plan(&experts(words, two));
    }
    hold_plan(&experts("default", Parallelism { dp: 4, ep: 2, ..none() }));
}

#[test]
fn a_world_of_one() {
    hold(none(), 1);
}

#[test]
fn a_rank_that_fails_ends_all_of_them() {
    let ends = joined(&plan(Parallelism { tp: 2, ..none() }, 1), 2, Some("row_norm"));
    for end in ends {
        let said = end.unwrap_err().to_string();
        assert!(said.contains("illegal memory access") && said.contains("rank 1"), "{said}");
    }
}

/// What `selftest --group nccl` does, of one rank and of three.
#[test]
fn calls_between_ranks() {
    for world in [1, 3] {
        let board = Arc::new(Board::default());
        let hellos: Vec<Hello> = (0..world).map(|rank| hello(rank, world)).collect();
        let found = all(&hellos, |meeting| {
            let meeting = meeting.unwrap();
            let mut double = Double::new(1, 1 << 30, 1);
            double.seat = Some(Seat::new(&board, meeting.rank));
            let all = || meeting.gather(vec![]).and_then(|_| meeting.together());
            nccl::check(&mut double, [meeting.rank, world], 100, &all).unwrap()
        });
        for call in found.into_iter().flatten() {
            assert!(call.wrong.is_none() && call.ranks == world && call.seconds > 0.0, "{call:?}");
        }
    }
}

#[test]
fn a_process_is_a_rank() {
    let process = Process { rank: 0, world: 4, local: 0, by: "torchrun" };
    let said = ranks_are_processes(&plan(Parallelism { ring: 2, ..none() }, 1), &process).unwrap_err().to_string();
    assert!(said.contains("torchrun has started 4 processes") && said.contains("2 ranks"), "{said}");
}
