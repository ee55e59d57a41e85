//! One attention operation alone, over whole sequences.

use super::math::{Mat, softmax, softmax_backward};
use crate::plan::Operand;
use crate::spec::AttentionSpec;
use ndarray::{Array2, s};
use std::collections::BTreeMap;

/// Attention alone, over whole sequences: o, lse and the gradients dq, dkv. q, o, d_o are `[batch, s, a*d]`, kv
/// `[batch, s, (K: k*d | V: k*d)]`, lse `[batch, s, a]`.
pub fn attention(spec: &AttentionSpec, q: &[f64], kv: &[f64], d_o: &[f64]) -> BTreeMap<Operand, Vec<f64>> {
    let [s, a, k, d] = [spec.seq_len, spec.heads, spec.kv_heads, spec.head_dim].map(|n| n as usize);
    let mut all: BTreeMap<Operand, Vec<f64>> = BTreeMap::new();
    for b in 0..spec.batch as usize {
        let rows = |x: &[f64], row: usize| {
            Array2::from_shape_vec((s, row), x[b * s * row..][..s * row].to_vec()).expect("a whole sequence")
        };
        let (q, kv, d_o) = (rows(q, a * d), rows(kv, 2 * k * d), rows(d_o, a * d));
        let (mut o, mut lse) = (Mat::zeros((s, a * d)), Mat::zeros((s, a)));
        let (mut dq, mut dkv) = (Mat::zeros((s, a * d)), Mat::zeros((s, 2 * k * d)));
        for head in 0..a {
            let at = [head * d, head * k / a * d, (k + head * k / a) * d];
            let (q, d_o) = (q.slice(s![.., at[0]..at[0] + d]), d_o.slice(s![.., at[0]..at[0] + d]));
            let [key, value] = [at[1], at[2]].map(|at| kv.slice(s![.., at..at + d]));
            let mut scores = q.dot(&key.t()) / (d as f64).sqrt();
            scores
                .indexed_iter_mut()
                .for_each(|((i, j), x)| *x = if visible(spec, i, j) { *x } else { f64::NEG_INFINITY });
            for (i, row) in scores.rows().into_iter().enumerate() {
                let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                lse[[i, head]] = top + row.iter().map(|x| (x - top).exp()).sum::<f64>().ln();
            }
            scores.rows_mut().into_iter().for_each(|mut row| softmax(row.as_slice_mut().expect("rows are contiguous")));
            let p = scores;
            let ds = softmax_backward(&p, d_o.dot(&value.t())) / (d as f64).sqrt();
            super::attention::head_of(&mut o, at[0], &p.dot(&value));
            super::attention::head_of(&mut dq, at[0], &ds.dot(&key));
            super::attention::head_of(&mut dkv, at[1], &ds.t().dot(&q));
            super::attention::head_of(&mut dkv, at[2], &p.t().dot(&d_o));
        }
        for (what, x) in [(Operand::O, o), (Operand::Lse, lse), (Operand::Dq, dq), (Operand::Dkv, dkv)] {
            all.entry(what).or_default().extend(x);
        }
    }
    all
}

/// Whether query `i` sees key `j`.
fn visible(spec: &AttentionSpec, i: usize, j: usize) -> bool {
    let document = |at: usize| {
        let mut end = 0;
        spec.mask.documents.lengths().iter().position(|length| {
            end += *length as usize;
            at < end
        })
    };
    let near = spec.mask.window.is_none_or(|w| i < j + w as usize);
    document(i) == document(j) && (!spec.mask.causal || j <= i) && near
}
