//! A grid of configurations into a folder of rows.
//!
//! Every point becomes a row, also one that cannot run. Rows are written as they finish; a sweep that was
//! killed goes on where it stopped, and at the end rows are sorted, so that the same grid gives the same bytes.

mod asked;
pub mod block;
pub mod case;
pub mod crossover;
pub mod exchange;
pub mod frames;
pub mod grid;
pub mod longest;
pub mod played;
mod point;
mod remedy;
pub mod search;
mod shadow;
mod store;
pub mod summary;

pub use asked::{trained, usual_batch, usual_ep, usual_gpus};
pub use case::Case;
pub use grid::{Also, Batch, Grid};
pub use played::Played;
pub use point::Point;
pub use remedy::Said;

use crate::error::Result;
use crate::report::Row;
use frames::Frames;
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use store::Store;

/// What a sweep brought.
pub struct Study {
    /// Sorted as the grid has them.
    pub rows: Vec<Row>,
    /// study.json, rows.csv and, where ways can be compared, spans.csv.
    pub files: Vec<PathBuf>,
    /// Rows that were there before.
    pub kept: usize,
    /// Rows were there, but this program finds other numbers: all were computed again.
    pub outdated: bool,
    /// Time that half of the rows computed took no longer than, on one core.
    pub median: Option<Duration>,
}

/// Computes every point of `grid` that `dir` has no row of. `progress` hears (rows there, rows in all).
pub fn sweep(grid: &Grid, dir: &Path, fresh: bool, progress: &(dyn Fn(usize, usize) + Sync)) -> Result<Study> {
    let case = grid.case()?;
    let points = grid.points()?;
    let mut store = Store::open(grid, Some(points.len()), dir, fresh)?;
    let outdated = !still_right(grid, &case, &points, store.rows());
    if outdated {
        store.clear()?;
    }
    let known: BTreeSet<Point> = store.rows().iter().map(Point::of_row).collect();
    let kept = points.iter().filter(|p| known.contains(p)).count();
    let missing: Vec<&Point> = points.iter().filter(|p| !known.contains(p)).collect();
    progress(kept, points.len());
    store.expect(missing.len());
    let shared = Mutex::new((store, vec![]));
    by_way(&missing).par_iter().try_for_each(|points_of_way| {
        let mut frames = Frames::new(&case);
        for point in points_of_way {
            let started = Instant::now();
            let row = grid.row_among(&mut frames, &case, point)?;
            let took = started.elapsed();
            let written = store::written(&row);
            let mut guard = shared.lock().unwrap_or_else(|e| e.into_inner());
            guard.0.append(row, &written)?;
            guard.1.push(took);
            progress(kept + guard.1.len(), points.len());
        }
        Ok(())
    })?;
    let (store, mut took) = shared.into_inner().unwrap_or_else(|e| e.into_inner());
    let (rows, mut files) = store.finish(&points)?;
    files.extend(block::write(&case, &rows, dir)?);
    took.sort_unstable();
    Ok(Study { rows, files, kept, outdated, median: took.get(took.len() / 2).copied() })
}

/// Points of one way together, since they share the structure of their plans; not so many that a core would be left
/// without.
fn by_way<'p>(points: &[&'p Point]) -> Vec<Vec<&'p Point>> {
    const LEAST: usize = 64;
    let most = LEAST.max(points.len() / (8 * rayon::current_num_threads()));
    let mut points = points.to_vec();
    points.sort_by_key(|point| (point.par, point.micro_batch));
    let ways = points.chunk_by(|a, b| a.par == b.par);
    ways.flat_map(|way| way.chunks(most)).map(<[&Point]>::to_vec).collect()
}

/// Rows of another version of the program, or of model files that changed since, must not be mixed with
/// new ones. To compute one feasible row again, the cheapest to find, tells.
fn still_right(grid: &Grid, case: &Case, points: &[Point], rows: &[Row]) -> bool {
    let known = |row: &&Row| points.contains(&Point::of_row(row));
    let feasible = rows.iter().filter(known).find(|row| row.feasible);
    let samples = rows.iter().find(known).into_iter().chain(feasible);
    samples.into_iter().all(|row| grid.row(case, &Point::of_row(row)).is_ok_and(|again| again == *row))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Dtype, Options, Recompute};
    use std::fs;

    fn grid() -> Grid {
        Grid {
            model: "tiny".into(),
            cluster: "dgx-h100".into(),
            stack: "nccl-fa3".into(),
            gpus: 8,
            dtype: Dtype::Bf16,
            title: None,
            seq_len: vec![1024, 2048],
            batch: Batch::TokensPerStep(16384),
            micro_batch: vec![1],
            ways: vec![[1, 1], [2, 1], [1, 4], [16, 1]],
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
            also: vec![],
        }
    }

    fn run(dir: &Path) -> Study {
        sweep(&grid(), dir, false, &|_, _| {}).unwrap()
    }

    #[test]
    fn every_point_is_a_row_and_infeasible_ones_say_why() {
        let dir = tempfile::tempdir().unwrap();
        let study = run(dir.path());
        assert_eq!((study.rows.len(), study.kept), (16, 0));
        let whys: BTreeSet<String> = study.rows.iter().filter(|r| !r.feasible).map(|r| r.why.to_string()).collect();
        assert!(whys.len() == 1 && whys.first().unwrap().starts_with("degrees: gpus 8"), "{whys:?}");
        assert_eq!(study.rows.iter().filter(|r| r.feasible).count(), 12);
    }

    #[test]
    fn a_torn_file_ends_up_with_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        run(dir.path());
        let path = dir.path().join("rows.csv");
        let whole = fs::read(&path).unwrap();
        let lines = whole.iter().enumerate().filter(|(_, b)| **b == b'\n').map(|(i, _)| i + 1).collect::<Vec<_>>();
        for cut in [0, 10, lines[0], lines[0] + 1, lines[4] - 1, lines[4], lines[7] + 30, whole.len() - 1] {
            fs::write(&path, &whole[..cut]).unwrap();
            let study = run(dir.path());
            let full_lines = lines.iter().filter(|&&end| end <= cut).count().saturating_sub(1);
            assert_eq!(study.kept, full_lines, "cut at {cut}");
            assert!(fs::read(&path).unwrap() == whole, "cut at {cut}");
        }
    }

    #[test]
    fn rows_that_are_wrong_by_now_are_computed_again() {
        let dir = tempfile::tempdir().unwrap();
        run(dir.path());
        let path = dir.path().join("rows.csv");
        let text = fs::read_to_string(&path).unwrap();
        let mut csv = csv::Reader::from_reader(text.as_bytes());
        let mut rows: Vec<Row> = csv.deserialize().map(|r| r.unwrap()).collect();
        rows.iter_mut().for_each(|r| r.mfu = r.mfu.map(|m| m / 2.0));
        let mut out = csv::Writer::from_path(&path).unwrap();
        rows.iter().for_each(|r| out.serialize(r).unwrap());
        out.flush().unwrap();
        let study = run(dir.path());
        assert!(study.outdated && study.kept == 0);
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn a_degree_of_nothing_is_refused_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let none = || vec![1, 0];
        for (name, wrong) in [
            ("tp", Grid { tp: none(), ..grid() }),
            ("pp", Grid { pp: none(), ..grid() }),
            ("vp", Grid { vp: none(), ..grid() }),
            ("ep", Grid { ep: none(), ..grid() }),
        ] {
            let err = sweep(&wrong, dir.path(), false, &|_, _| {}).err().unwrap().to_string();
            assert_eq!(err, format!("sweep: {name}: 0 is in the list; the least is 1"));
        }
        let also = Also { ulysses: 1, ring: 1, tp: 0, pp: 1, options: Options::default() };
        let err = sweep(&Grid { also: vec![also], ..grid() }, dir.path(), false, &|_, _| {}).err().unwrap();
        assert!(err.to_string().contains("also") && fs::read_dir(dir.path()).unwrap().next().is_none(), "{err}");
    }

    #[test]
    fn a_folder_that_another_sweep_writes_into_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let first = Store::open(&grid(), Some(16), dir.path(), false).unwrap();
        let why = sweep(&grid(), dir.path(), true, &|_, _| {}).err().unwrap().to_string();
        assert!(why.contains("another sweep is writing") && why.contains("choose another --out"), "{why}");
        drop(first);
        assert_eq!(run(dir.path()).rows.len(), 16);
    }

    #[test]
    fn another_grid_in_the_same_folder_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        run(dir.path());
        let other = Grid { zero: vec![0, 1], ..grid() };
        let err = sweep(&other, dir.path(), false, &|_, _| {}).err().unwrap().to_string();
        assert!(
            err.contains("zero") && err.contains("[1]") && err.contains("[0,1]") && err.contains("--fresh"),
            "{err}"
        );
        assert_eq!(sweep(&other, dir.path(), true, &|_, _| {}).unwrap().rows.len(), 32);
    }
}
