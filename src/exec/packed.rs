//! What a gather in FP8 sends: of weights of products codes and scales, of all else the elements as they are.
//!
//! A member packs its part once, and every other passes the message on as it came: to make codes of numbers that were
//! rounded to the dtype of the buffer would round them again, and ranks would no longer have the same weights.

use super::arena::Data;
use super::kernels::fp8;
use crate::collective;
use crate::plan::kernel::FP8_BLOCK;
use crate::plan::{Dtype, Tensor, Wire};
use std::ops::Range;

/// The messages of a gather, part by part, as far as they are there.
pub struct Packed {
    of: Tensor,
    parts: Vec<Option<Data>>,
}

impl Packed {
    /// A gather of a slot of a tensor among `n` members.
    pub fn new(of: &Tensor, n: usize) -> Packed {
        Packed { of: of.clone(), parts: vec![None; n] }
    }

    fn range(&self, part: usize) -> Range<u64> {
        collective::part(self.of.elems(), part, self.parts.len())
    }

    /// The message for a part whose values are `data`.
    pub fn pack(&self, part: usize, data: &Data) -> Data {
        pack(&self.of, self.range(part), data)
    }

    /// The values of the message for a part, which is kept. Errors: it is of another length.
    pub fn take(&mut self, part: usize, message: Data) -> Result<Data, String> {
        let values = unpack(&self.of, self.range(part), &message);
        self.parts[part] = Some(message);
        values
    }

    /// A copy of the message for a part that is there.
    pub fn message(&self, part: usize) -> Data {
        self.parts[part].clone().expect("a part is passed on behind the round in which it came")
    }
}

/// The message for elements `part` of a slot of a tensor, whose values are `data`.
fn pack(tensor: &Tensor, part: Range<u64>, data: &Data) -> Data {
    let mut message = Vec::with_capacity(Wire::Fp8.bytes(tensor, part.clone()) as usize);
    for run in tensor.runs(part.clone()) {
        let values = data.part(run.elems.start - part.start..run.elems.end - part.start);
        match run.wire {
            Wire::Plain(_) => message.extend_from_slice(values.to_bytes()),
            Wire::Fp8 => {
                let values = values.to_f64();
                let mut codes = vec![0.0; values.len()];
                let mut scales = vec![0.0; values.len().div_ceil(FP8_BLOCK as usize)];
                fp8::encode(&values, values.len(), &mut codes, &mut scales);
                message.extend(codes.iter().map(|&code| code as u8));
                message.extend(scales.iter().flat_map(|&scale| (scale as f32).to_le_bytes()));
            }
        }
    }
    Data::U8(message)
}

/// The values of elements `part` of a slot of a tensor, out of a message for them. Errors: it is of another length.
fn unpack(tensor: &Tensor, part: Range<u64>, message: &Data) -> Result<Data, String> {
    let wanted = Wire::Fp8.bytes(tensor, part.clone());
    if (message.dtype(), message.len()) != (Dtype::U8, wanted) {
        return Err(format!("{} bytes arrive in place of {wanted} of FP8", message.bytes()));
    }
    let mut rest = message.to_bytes();
    let mut next = |bytes: u64| {
        let (taken, left) = rest.split_at(bytes as usize);
        rest = left;
        taken
    };
    let values = tensor.runs(part).map(|run| {
        let elems = run.elems.end - run.elems.start;
        match run.wire {
            Wire::Plain(dtype) => Data::from_bytes(next(elems * dtype.size()), dtype),
            Wire::Fp8 => {
                let codes: Vec<f64> = next(elems).iter().map(|&code| f64::from(code)).collect();
                let scales = Data::from_bytes(next(4 * elems.div_ceil(FP8_BLOCK)), Dtype::F32).to_f64();
                Data::from_f64(&fp8::decoded(&codes, &scales, codes.len()), tensor.dtype)
            }
        }
    });
    Ok(Data::concat(values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::TensorKind;

    fn tensor(dtype: Dtype) -> Tensor {
        let (kind, name) = (TensorKind::Param, "w".into());
        Tensor { name, shape: vec![1000], dtype, slots: 1, kind, host: false, in_fp8: vec![[100, 900]] }
    }

    #[test]
    fn matrices_are_rounded_and_all_else_comes_as_it_was() {
        for (dtype, least) in [(Dtype::F64, 0.0), (Dtype::F32, 1e-7), (Dtype::Bf16, 4e-3)] {
            let of = tensor(dtype);
            let values: Vec<f64> = (0..600).map(|i| 1.0 + f64::from(i).sin() * 0.9).collect();
            let data = Data::from_f64(&values, dtype);
            let message = pack(&of, 50..650, &data);
            // 50 elements as they are, then 550 codes with a scale for each 128.
            assert_eq!(message.bytes(), 50 * dtype.size() + 550 + 4 * 5);
            let back = unpack(&of, 50..650, &message).unwrap();
            let (was, is) = (data.to_f64(), back.to_f64());
            assert_eq!((back.dtype(), &is[..50]), (dtype, &was[..50]));
            // Three bits of mantissa: half of the last place is a sixteenth, of numbers that are not far below the
            // largest of their block.
            let off = was[50..].iter().zip(&is[50..]).map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f64::max);
            assert!(off > 0.02 && off < 1.0 / 16.0 + least, "{dtype:?} {off}");
            // What was rounded once stays as it is, but for the rounding of the buffer's dtype.
            let again = unpack(&of, 50..650, &pack(&of, 50..650, &back)).unwrap().to_f64();
            let moved = is.iter().zip(&again).map(|(a, b)| ((a - b) / a).abs()).fold(0.0, f64::max);
            assert!(moved <= 2.0 * least.max(1e-7), "{dtype:?} {moved}");
        }
    }

    #[test]
    fn a_message_of_another_length_is_refused() {
        let of = tensor(Dtype::F32);
        let why = unpack(&of, 0..200, &Data::U8(vec![0; 7])).unwrap_err();
        assert_eq!(why, "7 bytes arrive in place of 504 of FP8");
        assert!(unpack(&of, 0..200, &Data::F32(vec![0.0; 126])).is_err());
    }
}
