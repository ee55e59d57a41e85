//! What an element is on the wire between ranks.

use super::kernel::fp8_bytes;
use super::op::{Tensor, TensorId};
use super::program::Plan;
use crate::spec::Dtype;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The format of an element on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// E4M3 with an fp32 scale for each [`FP8_BLOCK`](super::kernel::FP8_BLOCK) elements, the last of which may be fewer:
    /// of a row of an exchange; in a gather of a run of those elements alone that the tensor has [in FP8](Tensor::in_fp8).
    Fp8,
    /// The dtype as it is, unscaled.
    #[serde(untagged)]
    Plain(Dtype),
}

impl From<Dtype> for Wire {
    fn from(dtype: Dtype) -> Wire {
        Wire::Plain(dtype)
    }
}

impl Wire {
    pub const BF16: Wire = Wire::Plain(Dtype::Bf16);

    /// Bytes of a row of `hidden` elements.
    pub fn row_bytes(self, hidden: u64) -> u64 {
        match self {
            Wire::Fp8 => fp8_bytes(hidden),
            Wire::Plain(dtype) => dtype.size() * hidden,
        }
    }

    /// The format's name in flags and files.
    pub fn name(self) -> &'static str {
        match self {
            Wire::Fp8 => "fp8",
            Wire::Plain(dtype) => dtype.name(),
        }
    }

    /// Bytes that elements `part` of a slot of a tensor take in a collective.
    pub fn bytes(self, tensor: &Tensor, part: Range<u64>) -> u64 {
        match self {
            Wire::Fp8 => tensor.runs(part).map(|run| run.wire.row_bytes(run.elems.end - run.elems.start)).sum(),
            Wire::Plain(dtype) => dtype.size() * (part.end - part.start),
        }
    }

    /// Bytes of the full buffer of a collective, whose two ends are a tensor and elements of it each.
    pub fn full_bytes(self, plan: &Plan, ends: [(TensorId, u64); 2]) -> u64 {
        let (tensor, elems) = full(ends);
        self.bytes(&plan.tensors[tensor as usize], 0..elems)
    }
}

/// The full buffer of a collective among its two ends, each a tensor and elements of it: the result of a gather, the
/// source of a scatter.
pub fn full([src, dst]: [(TensorId, u64); 2]) -> (TensorId, u64) {
    if src.1 > dst.1 { src } else { dst }
}

/// Elements of a slot, one behind the other, that travel in one format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    pub elems: Range<u64>,
    pub wire: Wire,
}

impl Tensor {
    /// Elements `part` of a slot, cut where those in FP8 begin and end.
    pub fn runs(&self, part: Range<u64>) -> impl Iterator<Item = Run> {
        let plain = Wire::Plain(self.dtype);
        let cut = |elems: Range<u64>| elems.start.max(part.start)..elems.end.min(part.end);
        let mut all = vec![];
        let mut at = 0;
        for &[from, to] in &self.in_fp8 {
            all.extend([(cut(at..from), plain), (cut(from..to), Wire::Fp8)]);
            at = to;
        }
        all.push((cut(at..u64::MAX), plain));
        all.into_iter().filter(|(elems, _)| !elems.is_empty()).map(|(elems, wire)| Run { elems, wire })
    }
}

#[cfg(test)]
mod tests {
    use super::super::op::TensorKind;
    use super::*;

    #[test]
    fn fp8_rows_bring_their_scales() {
        assert_eq!([7168, 7169, 100].map(|h| Wire::Fp8.row_bytes(h)), [7392, 7397, 104]);
        assert_eq!(Wire::BF16.row_bytes(7168), 14336);
        assert_eq!(serde_json::to_string(&[Wire::Fp8, Wire::BF16]).unwrap(), r#"["fp8","bf16"]"#);
        assert_eq!(
            serde_json::from_str::<[Wire; 2]>(r#"["fp8","f64"]"#).unwrap(),
            [Wire::Fp8, Wire::Plain(Dtype::F64)]
        );
    }

    #[test]
    fn a_part_is_cut_where_matrices_begin_and_end() {
        let tensor = Tensor {
            name: "w".into(),
            shape: vec![1000],
            dtype: Dtype::Bf16,
            slots: 1,
            kind: TensorKind::Param,
            host: false,
            in_fp8: vec![[100, 400], [500, 900]],
        };
        let runs = |part| tensor.runs(part).map(|run| (run.elems, run.wire)).collect::<Vec<_>>();
        assert_eq!(
            runs(0..1000),
            [
                (0..100, Wire::BF16),
                (100..400, Wire::Fp8),
                (400..500, Wire::BF16),
                (500..900, Wire::Fp8),
                (900..1000, Wire::BF16)
            ]
        );
        assert_eq!(runs(150..450), [(150..400, Wire::Fp8), (400..450, Wire::BF16)]);
        assert_eq!(runs(600..700), [(600..700, Wire::Fp8)]);
        // Two scales for 250 elements, and what is no matrix in two bytes.
        assert_eq!(Wire::Fp8.bytes(&tensor, 150..450), 250 + 2 * 4 + 2 * 50);
        assert_eq!(Wire::BF16.bytes(&tensor, 150..450), 600);
        // What is cut into parts takes no less than the whole.
        let parts: u64 = (0..10).map(|i| Wire::Fp8.bytes(&tensor, 100 * i..100 * i + 100)).sum();
        assert!(parts >= Wire::Fp8.bytes(&tensor, 0..1000));
    }
}
