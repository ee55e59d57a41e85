//! Every kernel of a device against the CPU's in f64, on fresh random numbers, what it writes poisoned before; and how
//! fast the kernels are that decide a step.

pub mod cases;
pub mod nccl;
pub mod speed;

use super::device::Device;
use super::lower::{Launch, Lowered, Where, lower};
use super::prepare::{Ready, Spans, Tables, resolve};
use crate::error::{Error, Result};
use crate::exec::arena::Data;
use crate::exec::kernels::{expert, in_place, run};
use crate::plan::kernel::Operands;
use crate::plan::memory::ALIGN;
use crate::plan::{Dtype, Kernel};
use cases::Case;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// How a kernel did on one rank.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Verdict {
    pub group: String,
    pub kernel: String,
    pub rank: u32,
    /// The largest difference of its results, as a part of their largest number; `None` where something was not
    /// computed, or is no number.
    pub error: Option<f64>,
    pub tolerance: f64,
    /// Seconds of one launch, as it stands, without warm-up.
    pub seconds: f64,
    /// What is wrong, in words; `None`: the kernel is right.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wrong: Option<String>,
}

/// Compiles what the kernels of some cases need, side by side. A kernel that is not lowered says so when it is checked.
pub fn compile<D: Device>(device: &mut D, cases: &[Case]) {
    let (fused, shared) = (device.fused(), device.shared(0));
    let lowered = |case: &Case| -> Vec<Lowered> {
        let dtypes: Vec<Dtype> = case.reads.iter().map(|r| r.0).collect();
        let on = |rank| Where { views: &case.views, route: case.route.as_ref(), rank, shared, fused: fused.as_deref() };
        let of = |rank| lower(&case.kernel, on(rank), &dtypes, &case.writes, STEP).ok();
        (0..case.views[0].size()).filter_map(of).collect()
    };
    let all: Vec<Lowered> = cases.iter().flat_map(lowered).collect();
    let launches: Vec<&Launch> = all.iter().flat_map(Lowered::launches).collect();
    device.compile(0, &launches);
}

/// Why this device has no such kernel, where that is no fault of it: products in FP8 are not every GPU's. `None`: it
/// has to have it.
pub fn lacks<D: Device>(device: &mut D, case: &Case) -> Option<String> {
    let (fused, shared) = (device.fused(), device.shared(0));
    let dtypes: Vec<Dtype> = case.reads.iter().map(|r| r.0).collect();
    let on = Where { views: &case.views, route: case.route.as_ref(), rank: 0, shared, fused: fused.as_deref() };
    let lowered = lower(&case.kernel, on, &dtypes, &case.writes, STEP).ok()?;
    // A library that is not there at all is a fault.
    if lowered.in_fp8() && device.multiplies(0).is_ok() {
        device.multiplies_fp8(0).err().map(|why| why.to_string())
    } else {
        None
    }
}

/// Checks a kernel on every rank of its mesh. Errors of the device are verdicts too.
pub fn check<D: Device>(device: &mut D, case: &Case, seed: u64) -> Vec<Verdict> {
    (0..case.views[0].size()).map(|rank| check_rank(device, case, rank, seed)).collect()
}

fn check_rank<D: Device>(device: &mut D, case: &Case, rank: u32, seed: u64) -> Verdict {
    let mut verdict = Verdict {
        group: case.group.into(),
        kernel: case.kernel.name().into(),
        rank,
        error: None,
        tolerance: case.tolerance,
        seconds: 0.0,
        wrong: None,
    };
    let numbers = Numbers::new(case, rank, seed);
    match launched(device, case, rank, &numbers) {
        Ok((results, seconds)) => {
            verdict.seconds = seconds;
            verdict.error = Some(0.0);
            for (i, (got, want)) in results.iter().zip(&numbers.results).enumerate() {
                match off(got, want, case.writes[i]) {
                    Ok(error) => verdict.error = verdict.error.map(|e| e.max(error)),
                    Err(why) => {
                        verdict.error = None;
                        verdict.wrong.get_or_insert(format!("result {i}, {why}"));
                    }
                }
            }
            if let Some(error) = verdict.error.filter(|e| *e > case.tolerance) {
                verdict.wrong = Some(format!("off by {error:.1e}, more than {:.1e}", case.tolerance));
            }
        }
        Err(error) => verdict.wrong = Some(error.to_string()),
    }
    verdict
}

/// Operands as they are stored, and the results that the CPU makes of them in f64; elements that it leaves alone are
/// NaN.
struct Numbers {
    reads: Vec<Data>,
    results: Vec<Vec<f64>>,
}

impl Numbers {
    fn new(case: &Case, rank: u32, seed: u64) -> Numbers {
        let Operands { reads, writes: mut lengths } = case.kernel.operands(&case.views);
        lengths.resize(case.writes.len(), lengths[0]);
        let mut rng = ChaCha8Rng::seed_from_u64(seed << 32 | u64::from(rank));
        let random = |((dtype, range), n): (&(Dtype, std::ops::Range<f64>), u64)| {
            let values: Vec<f64> = (0..n).map(|_| rng.random_range(range.clone())).collect();
            Data::from_f64(&values, *dtype)
        };
        let reads: Vec<Data> = case.reads.iter().zip(reads).map(random).collect();
        let values: Vec<Vec<f64>> = reads.iter().map(Data::to_f64).collect();
        let mut results: Vec<Vec<f64>> = lengths.iter().map(|&n| vec![f64::NAN; n as usize]).collect();
        let given: Vec<Option<&[f64]>> = values.iter().map(|v| Some(&v[..])).collect();
        let mut outs: Vec<&mut [f64]> = results.iter_mut().map(|w| &mut w[..]).collect();
        match &case.kernel {
            Kernel::Expert(kernel) => {
                for &(from, to) in in_place(&case.kernel) {
                    outs[to].copy_from_slice(&values[from]);
                }
                let route = case.route.as_ref().expect("experts have a route");
                expert::run(kernel, route, &case.views, rank, &given, &mut outs);
            }
            kernel => run(kernel, &case.views, rank, STEP, &given, &mut outs),
        }
        Numbers { reads, results }
    }
}

/// The step of the optimizer.
const STEP: u64 = 3;

/// The results that a device makes of the operands, and the seconds that it takes.
fn launched<D: Device>(device: &mut D, case: &Case, rank: u32, numbers: &Numbers) -> Result<(Vec<Vec<f64>>, f64)> {
    let dtypes: Vec<Dtype> = case.reads.iter().map(|r| r.0).collect();
    let fused = device.fused();
    let (route, shared) = (case.route.as_ref(), device.shared(0));
    let on = Where { views: &case.views, route, rank, shared, fused: fused.as_deref() };
    let lowered = lower(&case.kernel, on, &dtypes, &case.writes, STEP)?;
    let mut reads = vec![];
    for data in &numbers.reads {
        let at = device.allocate(0, data.bytes())?;
        device.write(0, at, data.to_bytes())?;
        reads.push((at, data.bytes()));
    }
    let mut writes = vec![];
    for (want, dtype) in numbers.results.iter().zip(&case.writes) {
        let bytes = want.len() as u64 * dtype.size();
        writes.push((device.allocate(0, bytes)?, bytes));
    }
    let scratch = device.allocate(0, lowered.scratch.iter().map(|n| n.next_multiple_of(ALIGN)).sum())?;
    let room = 1 << 20;
    let mut tables = Tables::new(device.allocate(0, room)?, room);
    let ready = resolve(device, 0, &mut tables, &lowered, &Spans { reads, writes: writes.clone(), scratch })?;
    let (stream, around) = (device.stream(0)?, [device.event(0)?, device.event(0)?]);
    device.record(stream, around[0])?;
    for one in &ready {
        hand_over(device, stream, one)?;
    }
    device.record(stream, around[1])?;
    device.synchronize()?;
    let mut results = vec![];
    for ((at, bytes), dtype) in writes.into_iter().zip(&case.writes) {
        results.push(Data::from_bytes(&device.read(0, at, bytes)?, *dtype).to_f64());
    }
    Ok((results, device.seconds(around[0], around[1])?))
}

/// Hands over one deed to a stream.
pub fn hand_over<D: Device>(device: &mut D, stream: u32, one: &Ready) -> Result<()> {
    match one {
        Ready::Launch { function, size, words } => device.launch(stream, *function, *size, words),
        Ready::Gemm { gemm, at } => device.gemm(stream, gemm, *at),
        Ready::Copy { to, from, bytes } => device.copy(stream, *to, *from, *bytes),
        Ready::Fused { sdpa, at, workspace } => device.attend(stream, sdpa, at, *workspace),
    }
}

/// The largest difference, as a part of the largest number; an error where one has a number and the other has none.
fn off(got: &[f64], want: &[f64], dtype: Dtype) -> std::result::Result<f64, String> {
    let most = want.iter().filter(|w| w.is_finite()).fold(0.0, |m: f64, w| m.max(w.abs()));
    if !want.is_empty() && want.iter().all(|w| w.is_nan()) {
        return Err("nothing is computed".into());
    }
    let mut worst = 0.0f64;
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        // Poison is 255 where there are only whole numbers.
        let g = if dtype == Dtype::U8 && g == 255.0 { f64::NAN } else { g };
        if g.is_nan() != w.is_nan() || g.is_infinite() != w.is_infinite() {
            return Err(format!("element {i}: {g} is not {w}"));
        }
        if g != w && !g.is_nan() {
            worst = worst.max((g - w).abs() / most);
        }
    }
    Ok(worst)
}

/// The name of the group of calls between processes.
pub const NCCL: &str = "nccl";

/// The error for a group that there is not, with the groups that there are.
pub fn unknown(group: &str) -> Error {
    let known: Vec<&str> = cases::groups().chain([NCCL]).collect();
    Error::spec("selftest", "--group", format!("{group:?} is no group of kernels; known: {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::super::lower::MOST_SHARED;
    use super::*;

    /// A session lowers anew, step by step, what counts steps, and nothing else.
    #[test]
    fn kernels_count_steps_where_their_arguments_do() {
        let mut found = 0;
        for case in cases::groups().flat_map(cases::of_group) {
            let reads: Vec<Dtype> = case.reads.iter().map(|read| read.0).collect();
            let on =
                Where { views: &case.views, route: case.route.as_ref(), rank: 0, shared: MOST_SHARED, fused: None };
            let [first, next] = [1, 2].map(|step| lower(&case.kernel, on, &reads, &case.writes, step).ok());
            assert_eq!(first != next, case.kernel.counts_steps(), "{}", case.kernel.name());
            found += u32::from(case.kernel.counts_steps());
        }
        assert!(found > 5, "{found} kernels");
    }
}
