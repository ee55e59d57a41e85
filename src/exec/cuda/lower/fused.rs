//! Attention by a library: which blocks have a form that it knows, and what stands between a plan's operands and its own.
//!
//! A library knows a block by rows, not by positions: query i sees all keys, or keys 0 to i + d. So do whole sequences,
//! their shards under Ulysses, and the blocks of a ring in every split, zigzag's diagonal too, once rows that see nothing
//! are left out. Windows, packed documents and ALiBi are the project's own kernels'.
//!
//! A library writes bf16 and adds to nothing. What a plan keeps in floats or adds up comes by way of scratch memory, each
//! block rounded to bf16 once, as it is where blocks are brought together by cuDNN's or FlashAttention's kernels elsewhere.

use super::super::fused::{Pass, Sdpa};
use super::super::source;
use super::attention::Limits;
use super::{Action, Arg, Lowering, Part, Where, ints, table};
use crate::error::Result;
use crate::plan::{AttnBlock, Dtype, Side};
use std::ops::Range;

/// Rows of a sequence that take part, and how the queries among them see the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Form {
    q: Range<usize>,
    kv: Range<usize>,
    diagonal: Option<u64>,
}

impl Limits {
    /// None where the block has no such form.
    pub(super) fn form(&self) -> Option<Form> {
        let at = &self.positions;
        if at.windows(2).any(|two| two[0] >= two[1]) {
            return None;
        }
        // The keys of each query are neighbours, since positions rise.
        let keys = |(lo, hi): (&i32, &i32)| at.partition_point(|p| p < lo)..at.partition_point(|p| p <= hi);
        let seen: Vec<Range<usize>> = self.lo.iter().zip(&self.hi).map(keys).collect();
        let first = seen.iter().position(|keys| !keys.is_empty())?;
        let last = seen.iter().rposition(|keys| !keys.is_empty())?;
        let rows = &seen[first..=last];
        let (begin, end) = (rows[0].start, rows.iter().map(|keys| keys.end).max()?);
        let form = |diagonal| Some(Form { q: first..last + 1, kv: begin..end, diagonal });
        if rows.iter().any(|keys| keys.is_empty() || keys.start != begin) {
            return None;
        }
        if rows.iter().all(|keys| keys.end == end) {
            return form(None);
        }
        let ahead = rows[0].end - begin - 1;
        let on_diagonal = |(i, keys): (usize, &Range<usize>)| keys.end == end.min(begin + i + ahead + 1);
        rows.iter().enumerate().all(on_diagonal).then_some(())?;
        form(Some(ahead as u64))
    }
}

/// An operand from its first row that takes part.
fn from(of: Arg, row: usize, elems: u64, size: u64) -> Part {
    Part { of, skip: row as u64 * elems * size }
}

const BF16: u64 = 2;
const FLOAT: u64 = 4;

impl Lowering<'_> {
    /// The pass by a library, if it has a form of the block and room to work in.
    fn fusible(
        &mut self,
        pass: Pass,
        block: &AttnBlock,
        limits: &Limits,
        on: Where,
    ) -> Result<Option<(Sdpa, Form, Arg)>> {
        let (Some(fused), Some(form)) = (on.fused, limits.form()) else { return Ok(None) };
        let sdpa = Sdpa {
            pass,
            batch: block.batch,
            heads: [block.heads, block.kv_heads],
            rows: [form.q.len() as u64, form.kv.len() as u64],
            pitch: [limits.lo.len() as u64, limits.positions.len() as u64],
            head_dim: block.head_dim,
            v_dim: block.v_dim(),
            diagonal: form.diagonal,
        };
        let workspace = fused.workspace(&sdpa).map_err(|e| self.refuse_with(e))?;
        Ok(workspace.map(|bytes| (sdpa, form, self.scratch(bytes))))
    }

    /// Whether the forward pass was left to a library.
    pub(super) fn fused_attention(
        &mut self,
        block: &AttnBlock,
        limits: &Limits,
        on: Where,
        onto: bool,
    ) -> Result<bool> {
        let Some((sdpa, form, workspace)) = self.fusible(Pass::Forward, block, limits, on)? else { return Ok(false) };
        let lines = block.batch * limits.lo.len() as u64;
        let aside = onto || self.writes[0] != Dtype::Bf16;
        let o = if aside { self.scratch(lines * block.o_row() * BF16) } else { Arg::Write(0) };
        let lse = if onto { self.scratch(lines * block.heads * FLOAT) } else { Arg::Write(1) };
        let (first, key) = (form.q.start, form.kv.start);
        let at = vec![
            from(Arg::Read(0), first, block.q_row(), BF16),
            from(Arg::Read(1), key, block.kv_row(), BF16),
            values(block, Arg::Read(1), key),
            from(o.clone(), first, block.o_row(), BF16),
            from(lse.clone(), first, block.heads, FLOAT),
        ];
        self.lowered.actions.push(Action::Fused { sdpa, at, workspace });
        let rows = over(block.batch, limits.lo.len(), form.q);
        if onto {
            let defines = self.types(&[("R", 2, Dtype::Bf16), ("W", 0, self.writes[0])])?;
            let mut args = vec![Arg::Write(0), Arg::Write(1), o, lse, table(&rows)];
            args.extend(ints(&[rows.len() as u64, block.heads, block.v_dim()]));
            let threads = rows.len() as u64 * block.heads * 32;
            self.spread((source::merge, "merge_lse"), defines, threads, args);
        } else if aside {
            self.put_aside((o, Dtype::Bf16), 0, &rows, block.o_row(), false)?;
        }
        Ok(true)
    }

    /// Whether the backward pass was left to a library. It makes delta of outputs and their gradients itself, and a plan has
    /// given delta alone: so it is given outputs of which it makes that delta.
    pub(super) fn fused_attention_bwd(
        &mut self,
        block: &AttnBlock,
        limits: &Limits,
        on: Where,
        onto: Option<Side>,
    ) -> Result<bool> {
        let Some((sdpa, form, workspace)) = self.fusible(Pass::Backward, block, limits, on)? else { return Ok(false) };
        let [queries, keys] = [limits.lo.len(), limits.positions.len()].map(|rows| block.batch * rows as u64);
        let q_rows = over(block.batch, limits.lo.len(), form.q.clone());
        let kv_rows = over(block.batch, limits.positions.len(), form.kv.clone());

        let o = self.scratch(queries * block.o_row() * BF16);
        let mut args = vec![Arg::Read(2), Arg::Read(4), o.clone(), table(&q_rows)];
        args.extend(ints(&[q_rows.len() as u64, block.heads, block.v_dim()]));
        let threads = q_rows.len() as u64 * block.heads * 32;
        self.spread((source::merge, "outputs_of_delta"), vec![], threads, args);

        let aside = |write: usize, side| self.writes[write] != Dtype::Bf16 || onto == Some(side);
        let [dq_aside, dkv_aside] = [aside(0, Side::Q), aside(1, Side::Kv)];
        let dq = if dq_aside { self.scratch(queries * block.q_row() * BF16) } else { Arg::Write(0) };
        let dkv = if dkv_aside { self.scratch(keys * block.kv_row() * BF16) } else { Arg::Write(1) };
        let sums = sdpa.batch * sdpa.heads[0] * sdpa.rows[0] * FLOAT;
        let (delta, dq_sum) = (self.scratch(sums), self.scratch(sums * block.head_dim));
        let (first, key) = (form.q.start, form.kv.start);
        let at = vec![
            from(Arg::Read(0), first, block.q_row(), BF16),
            from(Arg::Read(1), key, block.kv_row(), BF16),
            values(block, Arg::Read(1), key),
            from(o, first, block.o_row(), BF16),
            from(Arg::Read(2), first, block.o_row(), BF16),
            from(Arg::Read(3), first, block.heads, FLOAT),
            from(dq.clone(), first, block.q_row(), BF16),
            from(dkv.clone(), key, block.kv_row(), BF16),
            values(block, dkv.clone(), key),
            delta.into(),
            dq_sum.into(),
        ];
        self.lowered.actions.push(Action::Fused { sdpa, at, workspace });
        if dq_aside {
            self.put_aside((dq, Dtype::Bf16), 0, &q_rows, block.q_row(), onto == Some(Side::Q))?;
        }
        if dkv_aside {
            self.put_aside((dkv, Dtype::Bf16), 1, &kv_rows, block.kv_row(), onto == Some(Side::Kv))?;
        }
        Ok(true)
    }
}

/// Where values begin behind the keys of a row.
fn values(block: &AttnBlock, kv: Arg, row: usize) -> Part {
    let part = from(kv, row, block.kv_row(), BF16);
    Part { skip: part.skip + block.kv_heads * block.head_dim * BF16, ..part }
}

/// Rows of every sequence.
fn over(batch: u64, pitch: usize, rows: Range<usize>) -> Vec<i32> {
    (0..batch as usize).flat_map(|b| rows.clone().map(move |row| (b * pitch + row) as i32)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::cuda::lower::LEAST_SHARED;
    use crate::plan::{Axis, Mesh, Segs, Split};
    use crate::spec::Mask;

    /// The forms of a block on each of two ranks, `shift` ranks from where its keys began.
    fn forms(split: Split, shift: i32, mask: &Mask) -> [Option<Form>; 2] {
        let q = Segs::new(16, &[(Axis::Cp, split)]);
        let kv = q.shifted(Axis::Cp, shift);
        let block = AttnBlock { q, kv, batch: 1, heads: 1, kv_heads: 1, head_dim: 64, v_dim: None, mask: mask.clone() };
        let views = [Mesh::new(&[(Axis::Cp, 2)])];
        let on = |rank| Where { views: &views, route: None, rank, shared: LEAST_SHARED, fused: None };
        [0, 1].map(|rank| Limits::new(&block, on(rank)).form())
    }

    fn form(q: Range<usize>, kv: Range<usize>, diagonal: Option<u64>) -> Option<Form> {
        Some(Form { q, kv, diagonal })
    }

    /// Ranks have positions 0..8 and 8..16; 0..4 with 12..16 and 4..12; the even and the odd ones.
    #[test]
    fn blocks_of_rings_have_a_form() {
        let causal = Mask::new(true);
        for split in [Split::Contiguous, Split::Zigzag] {
            assert_eq!(forms(split, 0, &causal), [(); 2].map(|()| form(0..8, 0..8, Some(0))), "{split:?}");
        }
        assert_eq!(forms(Split::Contiguous, 1, &causal), [None, form(0..8, 0..8, None)]);
        // Of the other's two chunks the first is seen by the second own one, and both are; or the first by all.
        assert_eq!(forms(Split::Zigzag, 1, &causal), [form(4..8, 0..8, None), form(0..8, 0..4, None)]);
        // Even queries see odd keys before them, the first none; odd ones the even ones up to themselves.
        assert_eq!(forms(Split::Stripe, 1, &causal), [form(1..8, 0..7, Some(0)), form(0..8, 0..8, Some(0))]);
        assert_eq!(forms(Split::Stripe, 1, &Mask::new(false)), [(); 2].map(|()| form(0..8, 0..8, None)));
    }

    #[test]
    fn windows_and_documents_have_none() {
        let window = Mask { window: Some(3), ..Mask::new(true) };
        let documents = Mask { documents: vec![5, 11].into(), ..Mask::new(true) };
        for mask in [window, documents] {
            assert_eq!(forms(Split::Zigzag, 0, &mask)[0], None, "{mask:?}");
        }
        // A window that reaches over everything hides nothing.
        let wide = Mask { window: Some(16), ..Mask::new(true) };
        assert_eq!(forms(Split::Contiguous, 0, &wide)[1], form(0..8, 0..8, Some(0)));
    }

    /// As many rows as there are, by comparing every query with every key.
    #[test]
    fn a_form_says_who_sees_whom() {
        for (split, shift) in
            [Split::Contiguous, Split::Zigzag, Split::Stripe].into_iter().flat_map(|s| [(s, 0), (s, 1)])
        {
            for causal in [false, true] {
                let q = Segs::new(24, &[(Axis::Cp, split)]);
                let kv = q.shifted(Axis::Cp, shift);
                let views = [Mesh::new(&[(Axis::Cp, 3)])];
                for rank in 0..3 {
                    let mask = Mask::new(causal);
                    let block = AttnBlock {
                        q: q.clone(),
                        kv: kv.clone(),
                        batch: 1,
                        heads: 1,
                        kv_heads: 1,
                        head_dim: 64,
                        v_dim: None,
                        mask,
                    };
                    let on = Where { views: &views, route: None, rank, shared: LEAST_SHARED, fused: None };
                    let form = Limits::new(&block, on).form();
                    let (own, others) = (block.q.positions(&views, rank), block.kv.positions(&views, rank));
                    for (i, at) in own.iter().enumerate() {
                        for (j, key) in others.iter().enumerate() {
                            let told = form.as_ref().is_some_and(|f| {
                                f.q.contains(&i)
                                    && f.kv.contains(&j)
                                    && f.diagonal.is_none_or(|d| j - f.kv.start <= i - f.q.start + d as usize)
                            });
                            assert_eq!(told, !causal || key <= at, "{split:?} {shift} rank {rank}: {at} and {key}");
                        }
                    }
                }
            }
        }
    }
}
