//! A rank's private memory: one arena, laid out by the plan's own placement, filled with NaN until
//! something is written and again after its last use.

use super::kernels::{self, Scalar};
use super::operands::{Operands, Out};
use crate::plan::link::Place;
use crate::plan::memory::{Layout, SlotId};
use crate::plan::{Dtype, Kernel, Plan};
use bytemuck::Pod;
use std::borrow::Cow;
use std::ops::Range;

/// Values on their way between ranks, in the dtype they are stored in.
#[derive(Debug, Clone, PartialEq)]
pub enum Data {
    F64(Vec<f64>),
    F32(Vec<f32>),
    /// The upper half of an f32.
    Bf16(Vec<u16>),
    U32(Vec<u32>),
    U8(Vec<u8>),
}

pub fn sum<T: Copy + std::ops::Add<Output = T>>(a: &mut [T], b: &[T]) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a = *a + *b);
}

fn sum_bf16(a: &mut [u16], b: &[u16]) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a = to_bf16(from_bf16(*a) + from_bf16(*b)));
}

impl Data {
    pub fn len(&self) -> u64 {
        let len = match self {
            Data::F64(v) => v.len(),
            Data::F32(v) => v.len(),
            Data::Bf16(v) => v.len(),
            Data::U32(v) => v.len(),
            Data::U8(v) => v.len(),
        };
        len as u64
    }

    pub fn bytes(&self) -> u64 {
        let size = match self {
            Data::F64(_) => Dtype::F64.size(),
            Data::F32(_) => Dtype::F32.size(),
            Data::Bf16(_) => Dtype::Bf16.size(),
            Data::U32(_) => Dtype::U32.size(),
            Data::U8(_) => Dtype::U8.size(),
        };
        self.len() * size
    }

    /// Adds data of equal dtype and length, element by element.
    pub fn add(&mut self, other: &Data) {
        match (self, other) {
            (Data::F64(a), Data::F64(b)) => sum(a, b),
            (Data::F32(a), Data::F32(b)) => sum(a, b),
            (Data::Bf16(a), Data::Bf16(b)) => sum_bf16(a, b),
            (a, b) => panic!("cannot add {} and {} bytes of unlike data", a.bytes(), b.bytes()),
        }
    }

    pub fn dtype(&self) -> Dtype {
        match self {
            Data::F64(_) => Dtype::F64,
            Data::F32(_) => Dtype::F32,
            Data::Bf16(_) => Dtype::Bf16,
            Data::U32(_) => Dtype::U32,
            Data::U8(_) => Dtype::U8,
        }
    }

    /// The data in the dtype that sums are kept in: two bytes an element become four.
    pub fn widened(self) -> Data {
        match self {
            Data::Bf16(v) => Data::F32(v.into_iter().map(from_bf16).collect()),
            other => other,
        }
    }

    /// The data in its own dtype `dtype` again, after [`widened`](Data::widened).
    pub fn narrowed(self, dtype: Dtype) -> Data {
        match (self, dtype) {
            (Data::F32(v), Dtype::Bf16) => Data::Bf16(v.into_iter().map(to_bf16).collect()),
            (other, _) => other,
        }
    }

    /// A copy of some of its elements.
    pub fn part(&self, elems: Range<u64>) -> Data {
        let at = elems.start as usize..elems.end as usize;
        match self {
            Data::F64(v) => Data::F64(v[at].to_vec()),
            Data::F32(v) => Data::F32(v[at].to_vec()),
            Data::Bf16(v) => Data::Bf16(v[at].to_vec()),
            Data::U32(v) => Data::U32(v[at].to_vec()),
            Data::U8(v) => Data::U8(v[at].to_vec()),
        }
    }

    /// Data of one dtype joined end to end; empty and f32 where there are no parts.
    pub fn concat(parts: impl Iterator<Item = Data>) -> Data {
        let join = |mut all: Data, next: Data| {
            match (&mut all, &next) {
                (Data::F64(a), Data::F64(b)) => a.extend(b),
                (Data::F32(a), Data::F32(b)) => a.extend(b),
                (Data::Bf16(a), Data::Bf16(b)) => a.extend(b),
                (Data::U32(a), Data::U32(b)) => a.extend(b),
                (Data::U8(a), Data::U8(b)) => a.extend(b),
                (a, b) => panic!("{} does not follow {}", b.dtype().name(), a.dtype().name()),
            }
            all
        };
        parts.reduce(join).unwrap_or(Data::F32(vec![]))
    }

    pub fn to_bytes(&self) -> &[u8] {
        match self {
            Data::F64(v) => bytemuck::cast_slice(v),
            Data::F32(v) => bytemuck::cast_slice(v),
            Data::Bf16(v) => bytemuck::cast_slice(v),
            Data::U32(v) => bytemuck::cast_slice(v),
            Data::U8(v) => v,
        }
    }

    /// Data of the bytes that [`to_bytes`](Data::to_bytes) has made.
    pub fn from_bytes(bytes: &[u8], dtype: Dtype) -> Data {
        match dtype {
            Dtype::F64 => Data::F64(bytemuck::pod_collect_to_vec(bytes)),
            Dtype::F32 => Data::F32(bytemuck::pod_collect_to_vec(bytes)),
            Dtype::Bf16 => Data::Bf16(bytemuck::pod_collect_to_vec(bytes)),
            Dtype::U32 => Data::U32(bytemuck::pod_collect_to_vec(bytes)),
            Dtype::U8 => Data::U8(bytes.to_vec()),
        }
    }

    pub fn to_f64(&self) -> Vec<f64> {
        match self {
            Data::F64(v) => v.clone(),
            Data::F32(v) => v.iter().map(|&x| f64::from(x)).collect(),
            Data::Bf16(v) => v.iter().map(|&x| f64::from(from_bf16(x))).collect(),
            Data::U32(v) => v.iter().map(|&x| f64::from(x)).collect(),
            Data::U8(v) => v.iter().map(|&x| f64::from(x)).collect(),
        }
    }

    pub fn from_f64(values: &[f64], dtype: Dtype) -> Data {
        match dtype {
            Dtype::F64 => Data::F64(values.to_vec()),
            Dtype::F32 => Data::F32(values.iter().map(|&x| x as f32).collect()),
            Dtype::Bf16 => Data::Bf16(values.iter().map(|&x| to_bf16(x as f32)).collect()),
            Dtype::U32 => Data::U32(values.iter().map(|&x| x as u32).collect()),
            Dtype::U8 => Data::U8(values.iter().map(|&x| x as u8).collect()),
        }
    }
}

pub fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Rounds to nearest, ties to even; NaN stays NaN.
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Bytes in the device's memory and in the host's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Peak {
    pub device: u64,
    pub host: u64,
}

/// The memory of one rank: the device's, and its part of the host's. `touched` is what their allocator has seen in use.
pub struct Arena<'p> {
    plan: &'p Plan,
    layout: &'p Layout,
    /// Eight bytes a word, so that every dtype is aligned.
    words: Vec<u64>,
    host_words: Vec<u64>,
    touched: Peak,
}

impl<'p> Arena<'p> {
    pub fn new(plan: &'p Plan, layout: &'p Layout) -> Arena<'p> {
        let [words, host_words] = [layout.bytes, layout.host_bytes].map(|bytes| vec![u64::MAX; (bytes / 8) as usize]);
        Arena { plan, layout, words, host_words, touched: Peak::default() }
    }

    /// All of the device's memory, as it lies.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// Most bytes that were ever in use since [`forget_peak`](Arena::forget_peak).
    pub fn peak(&self) -> Peak {
        self.touched
    }

    pub fn forget_peak(&mut self) {
        self.touched = Peak::default();
    }

    fn dtype(&self, place: &Place) -> Dtype {
        place.dtype(self.plan)
    }

    /// First byte and elements of a place.
    fn range(&self, place: &Place) -> (u64, u64) {
        let tensor = &self.plan.tensors[place.tensor as usize];
        let at = SlotId { tensor: place.tensor, slot: place.slot };
        let base = self.layout.offset(at).unwrap_or_else(|| panic!("{:?} has no place in memory", tensor.name));
        (base + place.rows[0] * tensor.row_len() * tensor.dtype.size(), place.elems(self.plan))
    }

    /// Whether a slot has a place: one that no op touches has none.
    pub fn holds(&self, at: SlotId) -> bool {
        self.layout.offset(at).is_some()
    }

    /// Notes that a slot is in use.
    pub fn touch(&mut self, at: SlotId) {
        if let Some(offset) = self.layout.offset(at) {
            let bytes = self.plan.tensors[at.tensor as usize].bytes().next_multiple_of(crate::plan::memory::ALIGN);
            let tensor = &self.plan.tensors[at.tensor as usize];
            let touched = if tensor.host { &mut self.touched.host } else { &mut self.touched.device };
            *touched = (*touched).max(offset + bytes);
        }
    }

    /// Fills a slot with NaN (all bits set), so that whoever reads it again is found out.
    pub fn poison(&mut self, at: SlotId) {
        let Some(offset) = self.layout.offset(at) else { return };
        let bytes = self.plan.tensors[at.tensor as usize].bytes().next_multiple_of(crate::plan::memory::ALIGN);
        let host = self.plan.tensors[at.tensor as usize].host;
        self.memory_mut(host)[(offset / 8) as usize..((offset + bytes) / 8) as usize].fill(u64::MAX);
    }

    /// Elements `elems` of a place.
    pub fn part(&self, place: &Place, elems: Range<u64>) -> Part {
        let dtype = self.dtype(place);
        let at = self.range(place).0;
        let bytes = (at + elems.start * dtype.size()) as usize..(at + elems.end * dtype.size()) as usize;
        Part { bytes, dtype, host: self.plan.tensors[place.tensor as usize].host }
    }

    pub fn whole(&self, place: &Place) -> Part {
        self.part(place, 0..self.range(place).1)
    }

    fn memory_mut(&mut self, host: bool) -> &mut [u64] {
        if host { &mut self.host_words } else { &mut self.words }
    }

    fn view<E: Pod>(&self, part: &Part) -> &[E] {
        let words = if part.host { &self.host_words } else { &self.words };
        bytemuck::cast_slice(&bytemuck::cast_slice::<u64, u8>(words)[part.bytes.clone()])
    }

    fn view_mut<E: Pod>(&mut self, part: &Part) -> &mut [E] {
        bytemuck::cast_slice_mut(
            &mut bytemuck::cast_slice_mut::<u64, u8>(self.memory_mut(part.host))[part.bytes.clone()],
        )
    }

    pub fn read(&self, part: &Part) -> Data {
        match part.dtype {
            Dtype::F64 => Data::F64(self.view(part).to_vec()),
            Dtype::F32 => Data::F32(self.view(part).to_vec()),
            Dtype::Bf16 => Data::Bf16(self.view(part).to_vec()),
            Dtype::U32 => Data::U32(self.view(part).to_vec()),
            Dtype::U8 => Data::U8(self.view(part).to_vec()),
        }
    }

    /// Reads a part into memory that was used before, which is of the part's dtype and length; `None`: into fresh
    /// memory.
    pub fn read_into(&self, part: &Part, spare: Option<Data>) -> Data {
        let Some(mut data) = spare else { return self.read(part) };
        match &mut data {
            Data::F64(v) => v.copy_from_slice(self.view(part)),
            Data::F32(v) => v.copy_from_slice(self.view(part)),
            Data::Bf16(v) => v.copy_from_slice(self.view(part)),
            Data::U32(v) => v.copy_from_slice(self.view(part)),
            Data::U8(v) => v.copy_from_slice(self.view(part)),
        }
        data
    }

    /// Adds what lies in a part to data of its dtype and length.
    pub fn add_to(&self, data: &mut Data, part: &Part) {
        match data {
            Data::F64(v) => sum(v, self.view(part)),
            Data::F32(v) => sum(v, self.view(part)),
            Data::Bf16(v) => sum_bf16(v, self.view(part)),
            other => panic!("cannot add {} bytes of {}", other.bytes(), other.dtype().name()),
        }
    }

    /// Adds data of a part's dtype and length to what lies there.
    pub fn add(&mut self, part: &Part, data: &Data) {
        match data {
            Data::F64(v) => sum(self.view_mut(part), v),
            Data::F32(v) => sum(self.view_mut(part), v),
            Data::Bf16(v) => sum_bf16(self.view_mut(part), v),
            other => panic!("cannot add {} bytes of {}", other.bytes(), other.dtype().name()),
        }
    }

    /// Copies a part to another one of the same memory, dtype and length. Errors: it is of others.
    pub fn copy(&mut self, from: &Part, to: &Part) -> Result<(), String> {
        if (from.bytes.len(), from.dtype, from.host) != (to.bytes.len(), to.dtype, to.host) {
            return Err(format!("{} bytes are copied to {}", from.bytes.len(), to.bytes.len()));
        }
        let memory: &mut [u8] = bytemuck::cast_slice_mut(self.memory_mut(from.host));
        if from.bytes != to.bytes {
            memory.copy_within(from.bytes.clone(), to.bytes.start);
        }
        Ok(())
    }

    /// Stores data of the part's dtype and length. Errors: it is of others.
    pub fn write(&mut self, part: &Part, data: &Data) -> Result<(), String> {
        if data.bytes() != part.bytes.len() as u64 {
            return Err(format!("{} bytes arrive for {}", data.bytes(), part.bytes.len()));
        }
        match (part.dtype, data) {
            (Dtype::F64, Data::F64(v)) => self.view_mut(part).copy_from_slice(v),
            (Dtype::F32, Data::F32(v)) => self.view_mut(part).copy_from_slice(v),
            (Dtype::Bf16, Data::Bf16(v)) => self.view_mut(part).copy_from_slice(v),
            (Dtype::U32, Data::U32(v)) => self.view_mut(part).copy_from_slice(v),
            (Dtype::U8, Data::U8(v)) => self.view_mut(part).copy_from_slice(v),
            (dtype, _) => return Err(format!("data of another dtype arrives for {}", dtype.name())),
        }
        Ok(())
    }

    /// Rows of a place.
    pub fn rows(&self, place: &Place) -> u64 {
        place.rows[1] - place.rows[0]
    }

    fn row_part(&self, place: &Place, row: u64) -> Part {
        let len = self.plan.tensors[place.tensor as usize].row_len();
        self.part(place, row * len..(row + 1) * len)
    }

    pub fn row(&self, place: &Place, row: u64) -> Data {
        self.read(&self.row_part(place, row))
    }

    /// Stores a row; `None`: zeros. Errors: those of [`write`](Arena::write).
    pub fn put_row(&mut self, place: &Place, row: u64, data: Option<Data>) -> Result<(), String> {
        let part = self.row_part(place, row);
        let zeros = || Data::from_bytes(&vec![0; part.bytes.len()], part.dtype);
        self.write(&part, &data.unwrap_or_else(zeros))
    }

    /// Runs a kernel on the rank's own buffers, in `T` arithmetic, in a step of the optimizer.
    pub fn run<T: Scalar>(&mut self, kernel: &Kernel, at: (u32, u64), reads: &[Place], writes: &[Place]) {
        let [read, written] = [reads, writes].map(|places| places.iter().map(|p| self.whole(p)).collect::<Vec<Part>>());
        // `check` has all of them in one memory.
        let host = read.iter().chain(&written).next().is_some_and(|part| part.host);
        let words = if host { &mut self.host_words } else { &mut self.words };
        let operands = Operands::new(words, &read, &written);
        let ins: Vec<Option<Cow<[T]>>> = read.iter().map(|part| operands.read(part)).collect();
        let ins: Vec<Option<&[T]>> = ins.iter().map(Option::as_deref).collect();
        let mut outs: Vec<Out<T>> = operands.written.into_iter().map(|(part, bytes)| Out::new(part, bytes)).collect();
        kernels::run_routed(kernel, self.plan, at, &ins, &mut outs.iter_mut().map(Out::values).collect::<Vec<_>>());
        outs.into_iter().for_each(Out::store);
    }
}

/// Some bytes of a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    pub bytes: Range<usize>,
    pub dtype: Dtype,
    /// Whether the bytes are of the host's memory; else of the device's.
    pub host: bool,
}
