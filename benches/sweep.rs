//! How long the rows of a sweep take, one by one on one core: the default study, by strategy; then 100,000 rows, and
//! the default study once more with 110 batches each.
//!
//! `cargo bench --bench sweep`, or `-- rows`, `-- many` and `-- long` for one of the three; `-- each` prints every row of
//! the default study. A row is timed as the sweep computes it: with what is known of the structure of its plan from the
//! rows before it, if any had the same. The baseline, *alone*, is the same row where nothing is known before: its plan
//! is built whole.

use cpu_time::{ProcessTime, ThreadTime};
use foretrain::error::Cause;
use foretrain::report::Row;
use foretrain::spec::{Dtype, Options, Recompute};
use foretrain::sweep::frames::Frames;
use foretrain::sweep::{Batch, Grid, Point, sweep};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The program's own: see src/main.rs.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The default study of `foretrain sweep`.
fn study() -> Grid {
    Grid {
        title: None,
        model: "llama-3-8b".into(),
        cluster: "dgx-h100".into(),
        stack: "nccl-fa3".into(),
        gpus: 64,
        dtype: Dtype::Bf16,
        seq_len: Grid::default_seq_len(),
        batch: Batch::TokensPerStep(4 << 20),
        micro_batch: vec![1],
        ways: Grid::default_ways(64),
        tp: vec![1],
        pp: vec![1],
        vp: vec![1],
        ep: vec![1],
        zero: vec![1],
        recompute: vec![Recompute::None, Recompute::Full],
        options: vec![Options::default()],
        routing: None,
        documents: Default::default(),
        no_mtp: false,
        also: Grid::default_also(64),
    }
}

/// 100,000 rows: 50 lengths, 50 batches, 10 ways, 2 stages of ZeRO, with recomputation and without.
fn many() -> Grid {
    Grid {
        seq_len: (1..=50).map(|n| 4096 * n).collect(),
        batch: Batch::GlobalBatch((1..=50).map(|n| 64 * n).collect()),
        ways: [[1, 1], [2, 1], [4, 1], [8, 1], [16, 1], [1, 2], [1, 4], [2, 2], [4, 2], [8, 2]].to_vec(),
        zero: vec![1, 3],
        also: vec![],
        ..study()
    }
}

/// 98,560 rows: the default study with batches of 64 to 7,040 sequences. Not all of these steps settle.
fn long() -> Grid {
    Grid { batch: Batch::GlobalBatch((1..=110).map(|n| 64 * n).collect()), ..study() }
}

/// Rows of a grid with the CPU time that each took, those of a way together: the least of a few rounds.
fn timed(grid: &Grid, rounds: usize) -> Vec<(Row, Duration)> {
    let mut points = grid.points().expect("points");
    points.sort_by_key(|point: &Point| (point.par, point.micro_batch));
    let round = |_| {
        // What a round learns of structures, the next must not know.
        let case = grid.case().expect("a case");
        let ways = points.chunk_by(|a, b| a.par == b.par).map(|way| {
            let mut frames = Frames::new(&case);
            let row = |point: &Point| {
                let started = ThreadTime::now();
                let row = grid.row_among(&mut frames, &case, point).expect("a row");
                (row, started.elapsed())
            };
            way.iter().map(row).collect::<Vec<_>>()
        });
        ways.flatten().collect::<Vec<_>>()
    };
    let least = |mut a: Vec<(Row, Duration)>, b: Vec<(Row, Duration)>| {
        a.iter_mut().zip(b).for_each(|(a, b)| a.1 = a.1.min(b.1));
        a
    };
    (0..rounds).map(round).reduce(least).expect("at least a round")
}

fn rows() {
    let rows = timed(&study(), 5);
    let mut by_kind: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (row, took) in &rows {
        let kind = match (row.feasible, row.why.cause == Cause::Memory) {
            (true, _) => row.strategy.clone(),
            (false, true) => "infeasible: memory".into(),
            (false, false) => "infeasible: other".into(),
        };
        let us = took.as_secs_f64() * 1e6;
        [kind, "all".into()].into_iter().for_each(|kind| by_kind.entry(kind).or_default().push(us));
    }
    println!(
        "{:20} {:>5} {:>10} {:>10} {:>10} {:>10}",
        "rows of", "count", "least us", "median us", "90 % us", "most us"
    );
    for (kind, us) in &mut by_kind {
        us.sort_by(f64::total_cmp);
        let at = |part: f64| us[((us.len() - 1) as f64 * part).round() as usize];
        println!("{kind:20} {:5} {:10.1} {:10.1} {:10.1} {:10.1}", us.len(), at(0.0), at(0.5), at(0.9), at(1.0));
    }
}

/// Every row of the default study, the slowest last, as CSV.
fn each() {
    let mut rows = timed(&study(), 3);
    rows.sort_by_key(|(_, took)| *took);
    println!("us,strategy,recompute,options,ulysses,ring,tp,dp,seq_len,global_batch,feasible");
    for (row, took) in &rows {
        let (us, way) = (took.as_secs_f64() * 1e6, [row.ulysses, row.ring, row.tp, row.dp]);
        let [ulysses, ring, tp, dp] = way;
        println!(
            "{us:.1},{},{},{},{ulysses},{ring},{tp},{dp},{},{},{}",
            row.strategy, row.recompute, row.options, row.seq_len, row.global_batch, row.feasible
        );
    }
}

/// The most memory that the process has had so far, in MB; none where the system does not say.
fn most_memory() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM"))?;
    Some(line.split_whitespace().nth(1)?.parse::<f64>().ok()? * 1024.0 / 1e6)
}

fn many_rows(name: &str, grid: &Grid) {
    let dir = tempfile::tempdir().expect("a folder");
    let threads = rayon::current_num_threads();
    let (started, used) = (Instant::now(), ProcessTime::now());
    let study = sweep(grid, dir.path(), true, &|_, _| {}).expect("a study");
    let (took, used, count) = (started.elapsed().as_secs_f64(), used.elapsed().as_secs_f64(), study.rows.len());
    let feasible = study.rows.iter().filter(|row| row.feasible).count();
    println!("{name}: {count} rows, {feasible} of which run: {took:.2} s on {threads} threads");
    let each = used * 1e6 / count as f64;
    println!("{:.0} rows a second, {each:.1} us of a core for each", count as f64 / took);
    if let Some(mb) = most_memory() {
        println!("{mb:.0} MB at the most");
    }
    let alone = alone(grid);
    println!("{alone:.0} us a row alone: {:.1} times as long", alone / each);
}

/// Mean CPU time of a row of which nothing is known before, in microseconds: of some rows all over a grid.
fn alone(grid: &Grid) -> f64 {
    const ROWS: usize = 200;
    let points = grid.points().expect("points");
    // An odd step, lest all of them are of the same few kinds.
    let some = points.iter().step_by(points.len().div_ceil(ROWS) | 1);
    let took = some.map(|point| {
        let case = grid.case().expect("a case");
        let started = ThreadTime::now();
        grid.row(&case, point).expect("a row");
        started.elapsed().as_secs_f64()
    });
    let took: Vec<f64> = took.collect();
    took.iter().sum::<f64>() * 1e6 / took.len() as f64
}

fn main() {
    let asked: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let wants = |name: &str| asked.is_empty() || asked.iter().any(|arg| arg == name);
    if wants("rows") {
        rows();
    }
    if asked.iter().any(|arg| arg == "each") {
        each();
    }
    if wants("many") {
        many_rows("many", &many());
    }
    if wants("long") {
        many_rows("long", &long());
    }
}
