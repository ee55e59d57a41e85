//! Every call of NCCL that plans make, between the processes that are there: one is enough.

use super::super::calls::Call;
use super::super::device::{Device, StreamId};
use crate::error::Result;
use crate::exec::arena::Data;
use crate::plan::Dtype;
use serde::Serialize;

/// How a call did on this rank.
#[derive(Debug, Clone, Serialize)]
pub struct Joined {
    pub call: &'static str,
    pub ranks: u32,
    /// Bytes that the rank puts in.
    pub bytes: u64,
    /// Median seconds of five; of one rank those of a copy inside its memory, and no link's.
    pub seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrong: Option<String>,
}

const TIMES: usize = 5;

/// Small whole numbers: sums of them are exact in f32, in whatever order.
fn value(rank: u32, i: u64) -> f64 {
    f64::from(rank % 3) + (i % 5) as f64
}

/// The whole number up to which bf16 has every one.
const WHOLE: u32 = 256;

/// Zeros and ones, of which so few are ones that sums over the ranks are exact in bf16, too.
fn bit(rank: u32, world: u32, i: u64) -> f64 {
    let stride = u64::from(world.div_ceil(WHOLE));
    let (rank, turn) = (u64::from(rank), i % stride);
    f64::from(u8::from(rank % stride == turn && (rank / stride * (i + 1) + i) % 5 < 3))
}

fn numbers(elems: u64, dtype: Dtype, of: impl Fn(u64) -> f64) -> Data {
    Data::from_f64(&(0..elems).map(of).collect::<Vec<_>>(), dtype)
}

/// The numbers of elements that a rank sends to each rank, as exchanges of experts' rows do; they lie one behind the
/// other.
fn parts(rank: u32, world: u32, elems: u64) -> Vec<u64> {
    (0..world).map(|to| (1 + u64::from(rank + 2 * to) % 3) * (elems / 4)).collect()
}

/// What comes to a rank from all, one behind the other.
fn arriving(rank: u32, world: u32, elems: u64) -> Vec<f64> {
    let of = |source: u32| {
        let parts = parts(source, world, elems);
        let first: u64 = parts[..rank as usize].iter().sum();
        (first..first + parts[rank as usize]).map(move |i| value(source, i))
    };
    (0..world).flat_map(of).collect()
}

fn messages(rank: u32, world: u32, elems: u64, [mut from, mut to]: [u64; 2]) -> Vec<Call> {
    let mut calls = vec![];
    for (other, elems_to) in (0..world).zip(parts(rank, world, elems)) {
        let elems_from = parts(other, world, elems)[rank as usize];
        let [sent, received] = [elems_to, elems_from].map(|elems| 4 * elems);
        calls.push(Call::Send { to: other, at: from, bytes: sent });
        calls.push(Call::Receive { from: other, at: to, bytes: received });
        (from, to) = (from + sent, to + received);
    }
    calls
}

/// Checks every call as `rank` of `world`, with `elems` numbers each; every process calls this at once. `all` waits
/// until all processes have the memory for it: NCCL would wait for one that has not.
pub fn check<D: Device>(
    device: &mut D,
    [rank, world]: [u32; 2],
    elems: u64,
    all: &dyn Fn() -> Result<()>,
) -> Result<Vec<Joined>> {
    let (n, stream) = (u64::from(world), device.stream(0)?);
    let [from, to] = [device.allocate(0, n * elems * 4)?, device.allocate(0, n * elems * 4)?];
    all()?;
    device.communicator(0, rank, &(0..world).collect::<Vec<_>>())?;
    let sum = |i: u64| (0..world).map(|r| value(r, i)).sum::<f64>();
    let bits = |i: u64| (0..world).map(|r| bit(r, world, i)).sum::<f64>();
    let (before, next) = ((rank + world - 1) % world, (rank + 1) % world);
    let bytes = 4 * elems;
    let f32 = Dtype::F32;
    let cases = [
        ("all_reduce f32", f32, elems, numbers(elems, f32, sum), vec![Call::AllReduce { from, to, elems, dtype: f32 }]),
        (
            "all_reduce bf16",
            Dtype::Bf16,
            elems,
            numbers(elems, Dtype::Bf16, bits),
            vec![Call::AllReduce { from, to, elems, dtype: Dtype::Bf16 }],
        ),
        (
            "all_gather",
            f32,
            elems,
            numbers(n * elems, f32, |i| value((i / elems) as u32, i % elems)),
            vec![Call::AllGather { from, to, bytes }],
        ),
        (
            "reduce_scatter",
            f32,
            n * elems,
            numbers(elems, f32, |i| sum(u64::from(rank) * elems + i)),
            vec![Call::ReduceScatter { from, to, elems, dtype: f32 }],
        ),
        (
            "send and receive around",
            f32,
            elems,
            numbers(elems, f32, |i| value(before, i)),
            vec![Call::Send { to: next, at: from, bytes }, Call::Receive { from: before, at: to, bytes }],
        ),
        (
            "all to all of several sizes",
            f32,
            parts(rank, world, elems).iter().sum(),
            Data::from_f64(&arriving(rank, world, elems), f32),
            messages(rank, world, elems, [from, to]),
        ),
    ];
    let mut found = vec![];
    for (call, dtype, given, want, calls) in cases {
        let mine = match dtype {
            Dtype::Bf16 => numbers(given, dtype, |i| bit(rank, world, i)),
            _ => numbers(given, dtype, |i| value(rank, i)),
        };
        device.write(0, from, mine.to_bytes())?;
        device.write(0, to, &vec![0xff; want.bytes() as usize])?;
        device.call(stream, 0, &calls)?;
        device.synchronize()?;
        let got = Data::from_bytes(&device.read(0, to, want.bytes())?, dtype);
        let off = got.to_f64().iter().zip(want.to_f64()).position(|(g, w)| *g != w);
        let wrong = off.map(|i| format!("element {i}: {} is not {}", got.to_f64()[i], want.to_f64()[i]));
        let seconds = median_seconds(device, stream, &calls)?;
        found.push(Joined { call, ranks: world, bytes: mine.bytes(), seconds, wrong });
    }
    Ok(found)
}

fn median_seconds<D: Device>(device: &mut D, stream: StreamId, calls: &[Call]) -> Result<f64> {
    let mut seconds = vec![];
    for _ in 0..TIMES {
        let around = [device.event(0)?, device.event(0)?];
        device.record(stream, around[0])?;
        device.call(stream, 0, calls)?;
        device.record(stream, around[1])?;
        device.synchronize()?;
        seconds.push(device.seconds(around[0], around[1])?);
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[TIMES / 2])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a ring adds them up, rounding at every rank.
    #[test]
    fn sums_in_bf16_are_exact_in_large_worlds() {
        let rounded = |x: f64| Data::from_f64(&[x], Dtype::Bf16).to_f64()[0];
        for world in [1, 2, 56, 256, 257, 1024, 16_384] {
            let sums: Vec<f64> = (0..40)
                .map(|i| {
                    let around = (0..world).map(|r| bit(r, world, i));
                    let sum = around.clone().fold(0.0, |sum, x| rounded(sum + x));
                    assert_eq!(sum, around.sum::<f64>(), "element {i} of {world} ranks");
                    sum
                })
                .collect();
            assert!(sums.iter().any(|sum| *sum != sums[0]), "{world} ranks: {sums:?}");
        }
    }
}
