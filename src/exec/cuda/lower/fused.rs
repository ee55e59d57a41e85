//! Attention by a library: which blocks have a form that it knows, and what stands between a plan's operands and its own.
//!
//! A library knows a block by rows, not by positions: query i sees all keys, or keys 0 to i + d. So do whole sequences,
//! their shards under Ulysses, and the blocks of a ring in every split, zigzag's diagonal too, once rows that see nothing
//! are left out; what is in a few such parts is done part by part. Windows, many documents and ALiBi are the project's own
//! kernels'.
//!
//! A library writes bf16 and adds to nothing. What a plan keeps in floats or adds up comes by way of scratch memory, each
//! block rounded to bf16 once, as it is where blocks are brought together by cuDNN's or FlashAttention's kernels elsewhere.

use super::super::fused::{Pass, Sdpa};
use super::super::source;
use super::attention::Limits;
use super::{Action, Arg, Lowering, Part, Where, ints, table};
use crate::error::Result;
use crate::plan::{AttnBlock, Dtype, Side};
use crate::spec::Factor;
use std::ops::Range;

/// Rows of a sequence, and how the queries among them see the keys: query i the first i + 1 + `diagonal` of them;
/// `None`: all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Form {
    q: Range<usize>,
    kv: Range<usize>,
    diagonal: Option<u64>,
}

/// The most parts of a block that a library is given; a block of more is left to the project's own kernels, which take
/// it at once.
const MOST_FORMS: usize = 4;

impl Limits {
    /// The parts of a block, each of queries that follow each other; empty where there are too many. Zigzag's two
    /// chunks before all keys are two parts, and so are two documents.
    fn forms(&self) -> Vec<Form> {
        let at = &self.positions;
        if at.windows(2).any(|two| two[0] >= two[1]) {
            return vec![];
        }
        // The keys of each query are neighbours, since positions rise.
        let keys = |(lo, hi): (&i32, &i32)| at.partition_point(|p| p < lo)..at.partition_point(|p| p <= hi);
        let seen: Vec<Range<usize>> = self.lo.iter().zip(&self.hi).map(keys).collect();
        let mut forms = vec![];
        let mut row = 0;
        while row < seen.len() {
            if seen[row].is_empty() {
                row += 1;
                continue;
            }
            let form = part(&seen, row);
            row = form.q.end;
            forms.push(form);
            if forms.len() > MOST_FORMS {
                return vec![];
            }
        }
        // The longest first: gradients of keys that several parts see are added to those of the longest.
        forms.sort_by_key(|form| (form.kv.start, std::cmp::Reverse(form.kv.end)));
        forms
    }
}

/// The part that begins with row `first`. Each of its queries sees one key more than the one before, until that is all
/// keys; or all queries see equal keys.
fn part(seen: &[Range<usize>], first: usize) -> Form {
    let rises = |row: usize| seen[row].end == seen[row - 1].end + 1;
    let mut last = first;
    let follows = |row: usize| row < seen.len() && seen[row].start == seen[first].start && !seen[row].is_empty();
    while follows(last + 1) && rises(last + 1) {
        last += 1;
    }
    let rising = last > first;
    while follows(last + 1) && seen[last + 1].end == seen[last].end {
        last += 1;
    }
    let (begin, end) = (seen[first].start, seen[last].end);
    let diagonal = rising.then(|| (seen[first].end - begin - 1) as u64);
    Form { q: first..last + 1, kv: begin..end, diagonal }
}

/// Whether each part sees keys that an earlier one has seen; `None` where a part sees some of them and not all.
fn again(forms: &[Form]) -> Option<Vec<bool>> {
    let mut covered = 0..0;
    let mut all = vec![];
    for form in forms {
        let inside = form.kv.start >= covered.start && form.kv.end <= covered.end;
        if !inside && form.kv.start < covered.end {
            return None;
        }
        if !inside {
            covered = form.kv.clone();
        }
        all.push(inside);
    }
    Some(all)
}

/// An operand from its first row that takes part.
fn from(of: Arg, row: usize, elems: u64, size: u64) -> Part {
    Part { of, skip: row as u64 * elems * size }
}

const BF16: u64 = 2;
const FLOAT: u64 = 4;

impl Lowering<'_> {
    /// The passes of a library that do this pass, with the memory that each works in; empty if the library does not
    /// take them all.
    fn fusible(&mut self, pass: Pass, block: &AttnBlock, limits: &Limits, on: Where) -> Result<Vec<(Sdpa, Form, Arg)>> {
        let Some(fused) = on.fused.filter(|_| block.mask.alibi.is_none()) else { return Ok(vec![]) };
        let mut all = vec![];
        for form in limits.forms() {
            let sdpa = Sdpa {
                pass,
                batch: block.batch,
                heads: [block.heads, block.kv_heads],
                rows: [form.q.len() as u64, form.kv.len() as u64],
                pitch: [limits.lo.len() as u64, limits.positions.len() as u64],
                head_dim: block.head_dim,
                scale: Factor(block.scale()),
                v_dim: block.v_dim(),
                diagonal: form.diagonal,
            };
            let Some(workspace) = fused.workspace(&sdpa).map_err(|e| self.refuse_with(e))? else { return Ok(vec![]) };
            all.push((sdpa, form, workspace));
        }
        // Passes run one after the other, so they share one room.
        let Some(room) = all.iter().map(|(_, _, bytes)| *bytes).max() else { return Ok(vec![]) };
        let room = self.scratch(room);
        Ok(all.into_iter().map(|(sdpa, form, _)| (sdpa, form, room.clone())).collect())
    }

    /// Leaves the forward pass to a library. Returns whether one takes it.
    pub(super) fn fused_attention(
        &mut self,
        block: &AttnBlock,
        limits: &Limits,
        on: Where,
        onto: bool,
    ) -> Result<bool> {
        let passes = self.fusible(Pass::Forward, block, limits, on)?;
        if passes.is_empty() {
            return Ok(false);
        }
        let lines = block.batch * limits.lo.len() as u64;
        let aside = onto || self.writes[0] != Dtype::Bf16;
        let o = if aside { self.scratch(lines * block.o_row() * BF16) } else { Arg::Write(0) };
        let lse = if onto { self.scratch(lines * block.heads * FLOAT) } else { Arg::Write(1) };
        let mut rows = vec![];
        for (sdpa, form, workspace) in passes {
            let (first, key) = (form.q.start, form.kv.start);
            let at = vec![
                from(Arg::Read(0), first, block.q_row(), BF16),
                from(Arg::Read(1), key, block.kv_row(), BF16),
                values(block, Arg::Read(1), key),
                from(o.clone(), first, block.o_row(), BF16),
                from(lse.clone(), first, block.heads, FLOAT),
            ];
            self.lowered.actions.push(Action::Fused { sdpa, at, workspace });
            rows.extend(over(block.batch, limits.lo.len(), form.q));
        }
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

    /// Leaves the backward pass to a library. Returns whether one takes it. The library makes delta of outputs and
    /// their gradients itself, and a plan has given delta alone: so it is given outputs of which it makes that delta.
    pub(super) fn fused_attention_bwd(
        &mut self,
        block: &AttnBlock,
        limits: &Limits,
        on: Where,
        onto: Option<Side>,
    ) -> Result<bool> {
        let Some(again) = again(&limits.forms()) else { return Ok(false) };
        let passes = self.fusible(Pass::Backward, block, limits, on)?;
        if passes.is_empty() {
            return Ok(false);
        }
        let [queries, keys] = [limits.lo.len(), limits.positions.len()].map(|rows| block.batch * rows as u64);
        let q_rows: Vec<i32> =
            passes.iter().flat_map(|(_, form, _)| over(block.batch, limits.lo.len(), form.q.clone())).collect();
        let o = self.outputs_of_delta(block, queries, &q_rows);
        let dq_aside = self.writes[0] != Dtype::Bf16 || onto == Some(Side::Q);
        let dkv_aside = self.writes[1] != Dtype::Bf16 || onto == Some(Side::Kv);
        let dq = if dq_aside { self.scratch(queries * block.q_row() * BF16) } else { Arg::Write(0) };
        let aside = (dkv_aside || again.contains(&true)).then(|| self.scratch(keys * block.kv_row() * BF16));
        let most = passes.iter().map(|(sdpa, ..)| sdpa.rows[0]).max().unwrap_or(0);
        let sums = block.batch * block.heads * most * FLOAT;
        let (delta, dq_sum) = (self.scratch(sums), self.scratch(sums * block.head_dim));
        for ((sdpa, form, workspace), again) in passes.into_iter().zip(again) {
            let dkv = match &aside {
                Some(aside) if dkv_aside || again => aside.clone(),
                _ => Arg::Write(1),
            };
            let (first, key) = (form.q.start, form.kv.start);
            let at = vec![
                from(Arg::Read(0), first, block.q_row(), BF16),
                from(Arg::Read(1), key, block.kv_row(), BF16),
                values(block, Arg::Read(1), key),
                from(o.clone(), first, block.o_row(), BF16),
                from(Arg::Read(2), first, block.o_row(), BF16),
                from(Arg::Read(3), first, block.heads, FLOAT),
                from(dq.clone(), first, block.q_row(), BF16),
                from(dkv.clone(), key, block.kv_row(), BF16),
                values(block, dkv.clone(), key),
                delta.clone().into(),
                dq_sum.clone().into(),
            ];
            self.lowered.actions.push(Action::Fused { sdpa, at, workspace });
            if dkv != Arg::Write(1) {
                let rows = over(block.batch, limits.positions.len(), form.kv);
                let add = again || onto == Some(Side::Kv);
                self.put_aside((dkv, Dtype::Bf16), 1, &rows, block.kv_row(), add)?;
            }
        }
        if dq_aside {
            self.put_aside((dq, Dtype::Bf16), 0, &q_rows, block.q_row(), onto == Some(Side::Q))?;
        }
        Ok(true)
    }

    fn outputs_of_delta(&mut self, block: &AttnBlock, queries: u64, rows: &[i32]) -> Arg {
        let o = self.scratch(queries * block.o_row() * BF16);
        let mut args = vec![Arg::Read(2), Arg::Read(4), o.clone(), table(rows)];
        args.extend(ints(&[rows.len() as u64, block.heads, block.v_dim()]));
        self.spread((source::merge, "outputs_of_delta"), vec![], rows.len() as u64 * block.heads * 32, args);
        o
    }
}

/// Where values begin behind the keys of a row.
fn values(block: &AttnBlock, kv: Arg, row: usize) -> Part {
    let part = from(kv, row, block.kv_row(), BF16);
    Part { skip: part.skip + block.kv_heads * block.head_dim * BF16, ..part }
}

/// The numbers of some rows of every sequence.
fn over(batch: u64, pitch: usize, rows: Range<usize>) -> Vec<i32> {
    (0..batch as usize).flat_map(|b| rows.clone().map(move |row| (b * pitch + row) as i32)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::cuda::lower::LEAST_SHARED;
    use crate::plan::{Axis, Mesh, Segs, Split};
    use crate::spec::{Factor, Mask};

    fn on(views: &[Mesh], rank: u32) -> Where<'_> {
        Where { views, route: None, rank, shared: LEAST_SHARED, fused: None }
    }

    fn block(q: Segs, kv: Segs, mask: &Mask) -> AttnBlock {
        AttnBlock {
            q,
            kv,
            batch: 1,
            heads: 1,
            kv_heads: 1,
            head_dim: 64,
            v_dim: None,
            mask: mask.clone(),
            factor: Factor::ONE,
        }
    }

    /// The forms of a block on each of two ranks, `shift` ranks from where its keys began.
    fn forms(split: Split, shift: i32, mask: &Mask) -> [Vec<Form>; 2] {
        let q = Segs::new(16, &[(Axis::Cp, split)]);
        let block = block(q.clone(), q.shifted(Axis::Cp, shift), mask);
        let views = [Mesh::new(&[(Axis::Cp, 2)])];
        [0, 1].map(|rank| Limits::new(&block, on(&views, rank)).forms())
    }

    fn form(q: Range<usize>, kv: Range<usize>, diagonal: Option<u64>) -> Vec<Form> {
        vec![Form { q, kv, diagonal }]
    }

    /// Ranks have positions 0..8 and 8..16; 0..4 with 12..16 and 4..12; the even and the odd ones.
    #[test]
    fn blocks_of_rings_have_a_form() {
        let causal = Mask::new(true);
        for split in [Split::Contiguous, Split::Zigzag] {
            assert_eq!(forms(split, 0, &causal), [(); 2].map(|()| form(0..8, 0..8, Some(0))), "{split:?}");
        }
        assert_eq!(forms(Split::Contiguous, 1, &causal), [vec![], form(0..8, 0..8, None)]);
        // Of the other's two chunks the first is seen by the second own one, and both are; or the first by all.
        assert_eq!(forms(Split::Zigzag, 1, &causal), [form(4..8, 0..8, None), form(0..8, 0..4, None)]);
        // Even queries see odd keys before them, the first none; odd ones the even ones up to themselves.
        assert_eq!(forms(Split::Stripe, 1, &causal), [form(1..8, 0..7, Some(0)), form(0..8, 0..8, Some(0))]);
        assert_eq!(forms(Split::Stripe, 1, &Mask::new(false)), [(); 2].map(|()| form(0..8, 0..8, None)));
    }

    /// Two chunks of zigzag before all keys, which have been gathered, and documents: a part each.
    #[test]
    fn some_blocks_have_two() {
        let all = block(Segs::new(16, &[(Axis::Cp, Split::Zigzag)]), Segs::new(16, &[]), &Mask::new(true));
        let views = [Mesh::new(&[(Axis::Cp, 2)])];
        let found = Limits::new(&all, on(&views, 0)).forms();
        let late = Form { q: 4..8, kv: 0..16, diagonal: Some(12) };
        assert_eq!(found, [late, form(0..4, 0..4, Some(0)).remove(0)]);
        assert_eq!(again(&found), Some(vec![false, true]));
        let documents = Mask { documents: vec![3, 13].into(), ..Mask::new(true) };
        let [first, _] = forms(Split::Contiguous, 0, &documents);
        assert_eq!(first, [form(0..3, 0..3, Some(0)), form(3..8, 3..8, Some(0))].concat());
        assert_eq!(again(&first), Some(vec![false, false]));
    }

    #[test]
    fn windows_have_none() {
        let window = Mask { window: Some(3), ..Mask::new(true) };
        assert_eq!(forms(Split::Contiguous, 0, &window)[1], []);
        // A window that reaches over everything hides nothing.
        let wide = Mask { window: Some(16), ..Mask::new(true) };
        assert_eq!(forms(Split::Contiguous, 0, &wide)[1], form(0..8, 0..8, Some(0)));
    }

    /// By comparing every query with every key.
    #[test]
    fn forms_say_who_sees_whom() {
        let masks = [Mask::new(false), Mask::new(true), Mask { documents: vec![7, 9, 8].into(), ..Mask::new(true) }];
        let views = [Mesh::new(&[(Axis::Cp, 3)])];
        let mut told = 0;
        for split in [Split::Contiguous, Split::Zigzag, Split::Stripe] {
            let q = Segs::new(24, &[(Axis::Cp, split)]);
            for kv in [q.clone(), q.shifted(Axis::Cp, 1), Segs::new(24, &[])] {
                for (mask, rank) in masks.iter().flat_map(|mask| (0..3).map(move |rank| (mask, rank))) {
                    let block = block(q.clone(), kv.clone(), mask);
                    let limits = Limits::new(&block, on(&views, rank));
                    let forms = limits.forms();
                    told += usize::from(!forms.is_empty());
                    for i in 0..if forms.is_empty() { 0 } else { limits.lo.len() } {
                        for (j, key) in limits.positions.iter().enumerate() {
                            let inside = |f: &Form| f.q.contains(&i) && f.kv.contains(&j);
                            let below =
                                |f: &Form| f.diagonal.is_none_or(|d| j - f.kv.start <= i - f.q.start + d as usize);
                            let sees = limits.lo[i] <= *key && *key <= limits.hi[i];
                            let by_forms = forms.iter().filter(|f| inside(f) && below(f)).count();
                            assert_eq!(
                                by_forms,
                                usize::from(sees),
                                "{split:?} {mask:?} rank {rank}: {i} and {j} of {forms:?}"
                            );
                        }
                    }
                }
            }
        }
        assert!(told > 50, "{told} blocks have forms");
    }
}
