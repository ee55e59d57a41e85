//! Attention: what a mask means for a rank's rows, and the kernels over (row, head).

use super::super::source;
use super::{Action, Arg, Launch, Lowering, Where, ints, live, table};
use crate::error::Result;
use crate::plan::{AttnBlock, Dtype, Kernel, Side};
use crate::spec::Mask;

/// Rows of a tile in attention_fwd.cu and attention_bwd.cu: the first that a GPU's shared memory holds is taken.
const FWD: [Tiles; 2] = [
    Tiles { queries: 128, keys: 64, threads: 128, stages: 1, later: false },
    Tiles { queries: 64, keys: 64, threads: 64, stages: 1, later: false },
];
const BWD: [Tiles; 5] = [
    Tiles { queries: 64, keys: 128, threads: 256, stages: 2, later: true },
    Tiles { queries: 64, keys: 128, threads: 256, stages: 2, later: false },
    Tiles { queries: 64, keys: 128, threads: 256, stages: 1, later: false },
    Tiles { queries: 64, keys: 64, threads: 128, stages: 2, later: false },
    Tiles { queries: 64, keys: 64, threads: 128, stages: 1, later: false },
];
/// Elements between the rows of a tile beyond its width, against bank conflicts.
const PAD: u64 = 8;

#[derive(Clone, Copy)]
struct Tiles {
    queries: usize,
    keys: usize,
    threads: u32,
    /// Tiles of queries that the backward pass has shared memory for.
    stages: u64,
    /// Whether there is shared memory for two tiles of dS, so that the backward pass adds to dQ a tile later.
    later: bool,
}

impl Tiles {
    /// Bytes of shared memory of the forward pass: Q, K and V.
    fn forward(self, [d, dv]: [u64; 2]) -> u64 {
        let (q, kv) = (self.queries as u64, self.keys as u64);
        2 * ((q + kv) * (d + PAD) + kv * (dv + PAD))
    }

    /// Bytes of shared memory of the backward pass: K, V, one or two tiles of dS, and Q, dO and some words a query for
    /// each stage.
    fn backward(self, [d, dv]: [u64; 2], words: u64) -> u64 {
        let (q, kv) = (self.queries as u64, self.keys as u64);
        let ds = (1 + u64::from(self.later)) * kv * (q + PAD);
        2 * ((self.stages * q + kv) * (d + dv + 2 * PAD) + ds) + 4 * words * self.stages * q
    }
}

/// The mask of a block as the kernels are told it.
pub(super) struct Limits {
    /// The first and the last position that each query sees; the first above the last where it sees none.
    pub lo: Vec<i32>,
    pub hi: Vec<i32>,
    /// Positions of the keys.
    pub positions: Vec<i32>,
}

impl Limits {
    pub fn new(block: &AttnBlock, on: Where) -> Limits {
        let q = block.q.positions(on.views, on.rank);
        let kv = block.kv.positions(on.views, on.rank);
        let (lo, hi) = q.iter().map(|&at| limits(&block.mask, at)).unzip();
        Limits { lo, hi, positions: kv.iter().map(|&at| at as i32).collect() }
    }

    /// Bounds by tile of queries: least and greatest `lo`, least and greatest `hi`.
    fn q_bounds(&self, rows: usize) -> Vec<i32> {
        let tiles = self.lo.chunks(rows).zip(self.hi.chunks(rows));
        tiles.flat_map(|(lo, hi)| [least(lo), most(lo), least(hi), most(hi)]).collect()
    }

    /// Bounds by tile of keys: least and greatest position.
    fn kv_bounds(&self, rows: usize) -> Vec<i32> {
        self.positions.chunks(rows).flat_map(|at| [least(at), most(at)]).collect()
    }

    /// Whether a query sees it, by key of one sequence.
    fn live_keys(&self, live: &[i32]) -> Vec<u8> {
        let mut seen = vec![0; self.positions.len()];
        // Rows of the sequences behind the first repeat those of the first.
        for row in live.iter().map(|&row| row as usize).take_while(|&row| row < self.positions.len()) {
            seen[row] = 1;
        }
        seen
    }
}

fn least(of: &[i32]) -> i32 {
    of.iter().copied().min().unwrap_or(0)
}

fn most(of: &[i32]) -> i32 {
    of.iter().copied().max().unwrap_or(0)
}

/// The first and the last position that the query at `at` sees.
fn limits(mask: &Mask, at: u64) -> (i32, i32) {
    let document = mask.documents.around(at);
    let first = mask.window.map_or(document.start, |w| document.start.max((at + 1).saturating_sub(w)));
    let last = if mask.causal { at } else { document.end.saturating_sub(1) };
    (first as i32, last.min(i32::MAX as u64) as i32)
}

/// The arguments of scores that lean on distance: positions of the queries, slopes of the heads.
fn leaning(block: &AttnBlock, on: Where) -> Vec<Arg> {
    if block.mask.alibi.is_none() {
        return vec![];
    }
    let at: Vec<i32> = block.q.positions(on.views, on.rank).into_iter().map(|at| at as i32).collect();
    let slopes: Vec<f32> = block.slopes(on.views, on.rank).into_iter().map(|slope| slope as f32).collect();
    vec![table(&at), table(&slopes)]
}

impl Lowering<'_> {
    fn heads(block: &AttnBlock) -> Vec<(String, String)> {
        let mut defines = vec![("HEAD_DIM".into(), block.head_dim.to_string())];
        if block.mask.alibi.is_some() {
            defines.push(("ALIBI".into(), "1".into()));
        }
        if block.v_dim() != block.head_dim {
            defines.push(("VALUE_DIM".into(), block.v_dim().to_string()));
        }
        defines
    }

    /// The first of some tiles that a GPU has the shared memory for, and how many bytes of it.
    fn fitting<const N: usize>(&self, of: [Tiles; N], bytes: impl Fn(Tiles) -> u64, on: Where) -> Result<(Tiles, u64)> {
        let all = of.map(|tiles| (tiles, bytes(tiles)));
        all.into_iter().find(|(_, bytes)| *bytes <= on.shared).ok_or_else(|| {
            self.refuse(&format!(
                "its tiles take {} bytes of shared memory, of which the GPU has {}",
                all[N - 1].1,
                on.shared
            ))
        })
    }

    fn takes(&self, block: &AttnBlock) -> Result<()> {
        for (what, d) in [("head_dim", block.head_dim), ("v_head_dim", block.v_dim())] {
            if !d.is_multiple_of(32) || d > 256 {
                return Err(self.refuse(&format!("{what} {d} is not a multiple of 32 up to 256")));
            }
        }
        self.must_be("q", self.reads[0], Dtype::Bf16)?;
        self.must_be("kv", self.reads[1], Dtype::Bf16)
    }

    pub(super) fn attention(&mut self, block: &AttnBlock, on: Where, onto: bool) -> Result<()> {
        self.takes(block)?;
        self.must_be("lse", self.writes[1], Dtype::F32)?;
        let (limits, d) = (Limits::new(block, on), block.head_dim);
        if self.fused_attention(block, &limits, on, onto)? {
            return Ok(());
        }
        let (tiles, shared) = self.fitting(FWD, |tiles| tiles.forward([d, block.v_dim()]), on)?;
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0), Arg::Write(1)];
        args.extend([table(&limits.lo), table(&limits.hi), table(&limits.positions)]);
        args.extend([table(&limits.q_bounds(tiles.queries)), table(&limits.kv_bounds(tiles.keys))]);
        args.extend(leaning(block, on));
        let (sq, sk) = (limits.lo.len() as u64, limits.positions.len() as u64);
        args.extend(ints(&[sq, sk, block.heads, block.kv_heads, u64::from(onto)]));
        args.push(Arg::Real(block.scale()));
        let mut defines = Self::heads(block);
        defines.extend(self.typed(&[], &[0])?);
        if tiles.queries != FWD[0].queries {
            defines.push(("BLOCK_QUERIES".into(), tiles.queries.to_string()));
        }
        let grid = [sq.div_ceil(tiles.queries as u64) as u32, block.heads as u32, block.batch as u32];
        self.tiled((source::attention_fwd, "attention_fwd"), defines, grid, (tiles, shared), args);
        Ok(())
    }

    fn tiled(
        &mut self,
        (source, kernel): (source::Source, &'static str),
        defines: Vec<(String, String)>,
        grid: [u32; 3],
        (tiles, shared): (Tiles, u64),
        args: Vec<Arg>,
    ) {
        let (threads, shared) = (tiles.threads, shared as u32);
        self.lowered.actions.push(Action::Launch(Launch { source, kernel, defines, grid, threads, shared, args }));
    }

    /// The kernel adds to a float dq; one of another dtype is made in scratch memory first.
    pub(super) fn attention_bwd(&mut self, block: &AttnBlock, on: Where, onto: Option<Side>) -> Result<()> {
        self.takes(block)?;
        self.must_be("do", self.reads[2], Dtype::Bf16)?;
        self.must_be("lse", self.reads[3], Dtype::F32)?;
        self.must_be("delta", self.reads[4], Dtype::F32)?;
        let (limits, d) = (Limits::new(block, on), block.head_dim);
        if self.fused_attention_bwd(block, &limits, on, onto)? {
            return Ok(());
        }
        let words = if block.mask.alibi.is_some() { 5 } else { 4 };
        let (tiles, shared) = self.fitting(BWD, |tiles| tiles.backward([d, block.v_dim()], words), on)?;
        let (sq, sk, width) = (limits.lo.len() as u64, limits.positions.len() as u64, block.heads * d);
        let queries = live(block, Side::Q, on);
        let aside = self.writes[0] != Dtype::F32;
        let dq = if aside { self.scratch(block.batch * sq * width * 4) } else { Arg::Write(0) };
        if aside || onto != Some(Side::Q) {
            self.clear(dq.clone(), &queries, width)?;
        }
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Read(2), Arg::Read(3), Arg::Read(4)];
        args.extend([dq.clone(), Arg::Write(1), table(&limits.lo), table(&limits.hi), table(&limits.positions)]);
        args.extend([table(&limits.q_bounds(tiles.queries)), table(&limits.kv_bounds(tiles.keys))]);
        args.push(table(&limits.live_keys(&live(block, Side::Kv, on))));
        args.extend(leaning(block, on));
        args.extend(ints(&[sq, sk, block.heads, block.kv_heads, u64::from(onto == Some(Side::Kv))]));
        args.push(Arg::Real(block.scale()));
        let mut defines = Self::heads(block);
        defines.extend(self.typed(&[], &[1])?);
        if tiles.keys != BWD[0].keys {
            defines.push(("BLOCK_KEYS".into(), tiles.keys.to_string()));
        }
        if tiles.stages != BWD[0].stages {
            defines.push(("STAGES".into(), tiles.stages.to_string()));
        }
        if !tiles.later {
            defines.push(("LATER".into(), "0".into()));
        }
        let grid = [sk.div_ceil(tiles.keys as u64) as u32, block.kv_heads as u32, block.batch as u32];
        self.tiled((source::attention_bwd, "attention_bwd"), defines, grid, (tiles, shared), args);
        if aside {
            self.put_aside((dq, Dtype::F32), 0, &queries, width, onto == Some(Side::Q))?;
        }
        Ok(())
    }

    fn clear(&mut self, x: Arg, rows: &[i32], cols: u64) -> Result<()> {
        let defines = self.types(&[("W", 0, Dtype::F32)])?;
        let mut args = vec![x, table(rows)];
        args.extend(ints(&[rows.len() as u64, cols]));
        self.spread((source::pointwise, "clear_rows"), defines, rows.len() as u64 * cols / 8, args);
        Ok(())
    }

    /// Copies rows that were made in scratch memory to where operand `write` has them, or adds them to what is there.
    pub(super) fn put_aside(
        &mut self,
        (x, of): (Arg, Dtype),
        write: usize,
        rows: &[i32],
        cols: u64,
        onto: bool,
    ) -> Result<()> {
        let (count, to) = (rows.len() as u64, self.writes[write]);
        let (kernel, mut types) = (if onto { "add" } else { "cast_rows" }, vec![("R", 0, of), ("W", 0, to)]);
        let mut args = vec![x];
        if onto {
            types.push(("R", 1, to));
            args.push(Arg::Write(write));
        }
        args.extend([Arg::Write(write), table(rows)]);
        args.extend(ints(&[count, cols]));
        let defines = self.types(&types)?;
        self.spread((source::pointwise, kernel), defines, count * cols / 8, args);
        Ok(())
    }

    /// The kernels of delta, and those that bring blocks together: a warp for each head of a row.
    pub(super) fn merge(&mut self, kernel: &Kernel, on: Where) -> Result<()> {
        if let &Kernel::AttentionDelta { rows, heads, head_dim } = kernel {
            self.must_be("delta", self.writes[0], Dtype::F32)?;
            let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)];
            args.extend(ints(&[rows, heads, head_dim]));
            let defines = self.typed(&[0, 1], &[])?;
            self.spread((source::merge, "attention_delta"), defines, rows * heads * 32, args);
            return Ok(());
        }
        let block = kernel.mask().ok_or_else(|| self.refuse("it has no block"))?;
        let rows = live(block, Side::Q, on);
        let (name, mut args, sizes, operands, floats) = match kernel {
            Kernel::MergeLse(_) => (
                "merge_lse",
                vec![Arg::Write(0), Arg::Write(1), Arg::Read(2), Arg::Read(3)],
                3,
                (vec![2], vec![0]),
                vec![self.writes[1], self.reads[3]],
            ),
            Kernel::AddLse(_) => {
                ("add_lse", vec![Arg::Write(0), Arg::Read(1)], 2, (vec![], vec![]), vec![self.writes[0], self.reads[1]])
            }
            _ => (
                "add_weighted",
                vec![Arg::Write(0), Arg::Read(1), Arg::Read(2), Arg::Read(3)],
                3,
                (vec![1], vec![0]),
                vec![self.reads[2], self.reads[3]],
            ),
        };
        floats.into_iter().try_for_each(|dtype| self.must_be("lse", dtype, Dtype::F32))?;
        args.push(table(&rows));
        args.extend(ints(&[rows.len() as u64, block.heads, block.v_dim()][..sizes]));
        let defines = self.typed(&operands.0, &operands.1)?;
        self.spread((source::merge, name), defines, rows.len() as u64 * block.heads * 32, args);
        Ok(())
    }
}
