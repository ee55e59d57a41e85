//! The operands of a kernel in a rank's memory: slices of it that are written, each apart from every other, and slices
//! that are only read. Memory is cut at their borders, so that the compiler sees that they are apart.

use super::arena::{Part, from_bf16, to_bf16};
use super::kernels::Scalar;
use crate::plan::Dtype;
use bytemuck::Pod;
use std::borrow::Cow;
use std::ops::Range;

pub struct Operands<'m> {
    /// What is written, in the order of the operands.
    pub written: Vec<(Part, &'m mut [u8])>,
    /// What is only read: where each slice begins, and its bytes; apart, in rising order.
    shared: Vec<(usize, &'m [u8])>,
}

impl<'m> Operands<'m> {
    /// # Panics
    /// Where a written operand overlaps another one without being the very same.
    pub fn new(memory: &'m mut [u64], reads: &[Part], writes: &[Part]) -> Operands<'m> {
        let only_read = reads.iter().filter(|r| !writes.iter().any(|w| w.bytes == r.bytes));
        let shared = union(only_read.map(|r| r.bytes.clone()).collect());
        // Every piece with its number among the written ones, by where it begins.
        let owned = writes.iter().enumerate().map(|(i, w)| (w.bytes.clone(), Some(i)));
        let mut pieces: Vec<(Range<usize>, Option<usize>)> =
            owned.chain(shared.into_iter().map(|at| (at, None))).filter(|(at, _)| !at.is_empty()).collect();
        pieces.sort_by_key(|(at, _)| at.start);
        let mut rest: &'m mut [u8] = bytemuck::cast_slice_mut(memory);
        let (mut cut, mut shared) = (0, vec![]);
        let mut written: Vec<(Part, &'m mut [u8])> = writes.iter().map(|w| (w.clone(), &mut [][..])).collect();
        for (at, owner) in pieces {
            assert!(at.start >= cut, "operands overlap at byte {} of the memory", at.start);
            let (piece, behind) = rest.split_at_mut(at.start - cut).1.split_at_mut(at.len());
            (rest, cut) = (behind, at.end);
            match owner {
                Some(i) => written[i].1 = piece,
                None => shared.push((at.start, &*piece)),
            }
        }
        Operands { written, shared }
    }

    /// An operand as the kernel reads it; `None` where it is one of those that are written.
    pub fn read<T: Scalar>(&self, part: &Part) -> Option<Cow<'m, [T]>> {
        if self.written.iter().any(|(w, _)| w.bytes == part.bytes) {
            return None;
        }
        if part.bytes.is_empty() {
            return Some(Cow::Borrowed(&[]));
        }
        let (start, bytes) = self.shared[self.shared.partition_point(|(start, _)| *start <= part.bytes.start) - 1];
        Some(decoded(&bytes[part.bytes.start - start..part.bytes.end - start], part.dtype))
    }
}

/// The bytes of some ranges, which may overlap, as ranges that are apart, in rising order.
fn union(mut all: Vec<Range<usize>>) -> Vec<Range<usize>> {
    all.sort_by_key(|at| at.start);
    let mut out: Vec<Range<usize>> = vec![];
    for at in all.into_iter().filter(|at| !at.is_empty()) {
        match out.last_mut().filter(|last| at.start < last.end) {
            Some(last) => last.end = last.end.max(at.end),
            None => out.push(at),
        }
    }
    out
}

/// Stored values in the arithmetic of a kernel: where they lie if they are of its type, else converted.
fn decoded<T: Scalar>(bytes: &[u8], dtype: Dtype) -> Cow<'_, [T]> {
    fn each<'b, E: Pod, T: Scalar>(bytes: &'b [u8], of: impl Fn(E) -> f64) -> Cow<'b, [T]> {
        Cow::Owned(bytemuck::cast_slice::<u8, E>(bytes).iter().map(|&x| T::from_f64(of(x))).collect())
    }
    match dtype {
        dtype if dtype == T::DTYPE => Cow::Borrowed(bytemuck::cast_slice(bytes)),
        Dtype::F64 => each(bytes, |x: f64| x),
        Dtype::F32 => each(bytes, |x: f32| x.into()),
        Dtype::Bf16 => each(bytes, |x: u16| from_bf16(x).into()),
        Dtype::U32 => each(bytes, |x: u32| x.into()),
        Dtype::U8 => each(bytes, |x: u8| x.into()),
    }
}

/// A result of a kernel: in place, or converted to and from the dtype it is stored in.
pub enum Out<'m, T> {
    InPlace(&'m mut [T]),
    Converted { values: Vec<T>, dtype: Dtype, bytes: &'m mut [u8] },
}

impl<'m, T: Scalar> Out<'m, T> {
    pub fn new(part: Part, bytes: &'m mut [u8]) -> Out<'m, T> {
        match part.dtype == T::DTYPE {
            true => Out::InPlace(bytemuck::cast_slice_mut(bytes)),
            false => Out::Converted { values: decoded(bytes, part.dtype).into_owned(), dtype: part.dtype, bytes },
        }
    }

    pub fn values(&mut self) -> &mut [T] {
        match self {
            Out::InPlace(values) => values,
            Out::Converted { values, .. } => values,
        }
    }

    /// Stores the result: rounds it where it is kept in another dtype than it was computed in.
    pub fn store(self) {
        let Out::Converted { values, dtype, bytes } = self else { return };
        fn each<T: Scalar, E: Pod>(bytes: &mut [u8], values: &[T], to: impl Fn(f64) -> E) {
            let stored = bytemuck::cast_slice_mut::<u8, E>(bytes);
            stored.iter_mut().zip(values).for_each(|(stored, x)| *stored = to(x.to_f64()));
        }
        match dtype {
            Dtype::F64 => each(bytes, &values, |x| x),
            Dtype::F32 => each(bytes, &values, |x| x as f32),
            Dtype::Bf16 => each(bytes, &values, |x| to_bf16(x as f32)),
            Dtype::U32 => each(bytes, &values, |x| x as u32),
            Dtype::U8 => each(bytes, &values, |x| x as u8),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(bytes: Range<usize>, dtype: Dtype) -> Part {
        Part { bytes, dtype, host: false }
    }

    fn memory() -> Vec<u64> {
        bytemuck::pod_collect_to_vec(&(0..16).map(|i| i as f32).collect::<Vec<f32>>())
    }

    #[test]
    fn operands_are_where_they_lie_whatever_their_order() {
        let mut memory = memory();
        // Floats 4..8 and 6..10 are read, 12..16 and 0..2 written, the latter read too.
        let reads = [16..32, 24..40, 0..8].map(|at| part(at, Dtype::F32));
        let writes = [48..64, 0..8].map(|at| part(at, Dtype::F32));
        let operands = Operands::new(&mut memory, &reads, &writes);
        assert_eq!(operands.read::<f32>(&reads[0]).unwrap().to_vec(), [4.0, 5.0, 6.0, 7.0]);
        assert_eq!(operands.read::<f32>(&reads[1]).unwrap().to_vec(), [6.0, 7.0, 8.0, 9.0]);
        assert_eq!(operands.read::<f32>(&reads[2]), None);
        let mut outs: Vec<Out<f32>> = operands.written.into_iter().map(|(p, b)| Out::new(p, b)).collect();
        assert_eq!(outs[1].values(), [0.0, 1.0]);
        outs[0].values().fill(-1.0);
        assert_eq!(bytemuck::cast_slice::<u64, f32>(&memory)[11..], [11.0, -1.0, -1.0, -1.0, -1.0]);
    }

    #[test]
    fn other_dtypes_are_converted_and_rounded_on_the_way_back() {
        let mut memory = vec![0u64; 2];
        let at = [part(0..6, Dtype::Bf16)];
        let operands = Operands::new(&mut memory, &[], &at);
        let mut outs: Vec<Out<f32>> = operands.written.into_iter().map(|(p, b)| Out::new(p, b)).collect();
        outs[0].values().copy_from_slice(&[1.0, 1.0 + 1.0 / 512.0, -3.0]);
        outs.into_iter().for_each(Out::store);
        assert_eq!(*Operands::new(&mut memory, &at, &[]).read::<f32>(&at[0]).unwrap(), [1.0, 1.0, -3.0]);
        assert_eq!(*Operands::new(&mut memory, &at, &[]).read::<f64>(&at[0]).unwrap(), [1.0, 1.0, -3.0]);
    }

    #[test]
    #[should_panic(expected = "operands overlap")]
    fn what_is_written_overlaps_nothing_else() {
        Operands::new(&mut memory(), &[part(0..16, Dtype::F32)], &[part(8..24, Dtype::F32)]);
    }
}
