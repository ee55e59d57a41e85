//! What a Mamba-2 mixer does between its projections.

use super::super::source::{self, Source};
use super::rows::{PARTS, SCRATCH};
use super::{Action, Arg, Launch, Lowering, MOST_BLOCKS, THREADS, Where, ints};
use crate::error::Result;
use crate::exec::kernels::ssm::{own, own_bwd};
use crate::plan::kernel::{SsmKernel, SsmOp};
use crate::plan::{Dtype, Side};

/// Tokens of a block of threads in ssm_scan.cu, and the number of its threads.
const ROWS: u64 = 64;
const SCAN_THREADS: u32 = 128;
/// Elements between the rows of a tile beyond its width.
const PAD: u64 = 8;
/// Rows that a thread of the convolution's backward pass walks down.
const SPAN: u64 = 64;
/// Heads of a block of threads of `chunk_scan_bwd_pairs`.
const HEADS: u64 = 8;
/// The widest state and head that the registers of a block of threads hold.
const MOST: [u64; 2] = [256, 128];

/// The numbers of each token and head that passes of the scan hand to each other, as scratch memory.
struct Sums {
    dt: Arg,
    sums: Arg,
}

impl Lowering<'_> {
    pub(super) fn ssm(&mut self, kernel: &SsmKernel, on: Where) -> Result<()> {
        match kernel.op {
            SsmOp::Conv => self.conv(kernel),
            SsmOp::ConvBwd => self.conv_bwd(kernel),
            SsmOp::Scan => self.scan(kernel, on),
            SsmOp::ScanBwd => self.scan_bwd(kernel, on),
            SsmOp::Norm { eps } => self.gated_norm(kernel, eps),
            SsmOp::NormBwd { eps } => self.gated_norm_bwd(kernel, eps),
            SsmOp::Gate => self.gate(kernel),
            SsmOp::GateBwd => self.gate_bwd(kernel),
            SsmOp::GroupNorm { eps } => self.group_norm(kernel, eps),
            SsmOp::GroupNormBwd { eps } => self.group_norm_bwd(kernel, eps),
            SsmOp::Own(ranks) => self.by_list(own(kernel, ranks, on.views, on.rank)),
            SsmOp::OwnBwd(ranks) => self.by_list(own_bwd(kernel, ranks, on.views, on.rank)),
        }
    }

    fn taps(&mut self, kernel: &SsmKernel, reads: &[usize]) -> Result<Vec<(String, String)>> {
        let operands = reads.iter().enumerate().map(|(i, &read)| ("R", i, self.reads[read]));
        let mut defines = self.types(&operands.chain([("W", 0, self.writes[0])]).collect::<Vec<_>>())?;
        let taps = kernel.mamba.conv;
        if taps == 0 || taps > 16 {
            return Err(self.refuse(&format!("a convolution over {taps} tokens is not one over 1 to 16")));
        }
        defines.push(("TAPS".into(), taps.to_string()));
        Ok(defines)
    }

    fn conv(&mut self, kernel: &SsmKernel) -> Result<()> {
        let (m, rows) = (&kernel.mamba, kernel.batch * kernel.seq);
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)];
        args.extend(ints(&[rows, kernel.seq, m.conv_cols(), m.proj_cols(), m.inner()]));
        let defines = self.taps(kernel, &[0, 1])?;
        self.spread((source::ssm, "causal_conv"), defines, (rows * m.conv_cols()).div_ceil(8), args);
        Ok(())
    }

    fn conv_bwd(&mut self, kernel: &SsmKernel) -> Result<()> {
        let m = &kernel.mamba;
        let (spans, width) = (kernel.batch * kernel.seq.div_ceil(SPAN), m.conv_cols() * (m.conv + 1));
        let parts = self.scratch(spans * width * 4);
        let mut args = vec![Arg::Read(1), Arg::Read(2), Arg::Read(3), Arg::Write(0), parts.clone()];
        args.extend(ints(&[kernel.batch, kernel.seq, m.conv_cols(), m.proj_cols(), m.inner(), SPAN]));
        let defines = self.taps(kernel, &[1, 2, 3])?;
        self.spread((source::ssm, "causal_conv_bwd"), defines, spans * m.conv_cols(), args);
        self.add_columns(parts, Dtype::F32, Arg::Write(1), self.writes[1], [spans, width])
    }

    fn gated_norm(&mut self, kernel: &SsmKernel, eps: f64) -> Result<()> {
        let defines = self.typed(&[0, 1, 2], &[0])?;
        self.norm_of(kernel, eps, defines, [Arg::Read(0), Arg::Read(1), Arg::Read(2)])
    }

    /// The norm of groups where there is no gate beside what it norms.
    fn group_norm(&mut self, kernel: &SsmKernel, eps: f64) -> Result<()> {
        let operands = [("R", 0, self.reads[0]), ("R", 1, self.reads[0]), ("R", 2, self.reads[1])];
        let defines = self.types(&[&operands[..], &[("W", 0, self.writes[0])]].concat())?;
        self.norm_of(kernel, eps, defines, [Arg::Read(0), Arg::Null, Arg::Read(1)])
    }

    fn norm_of(&mut self, kernel: &SsmKernel, eps: f64, defines: Vec<(String, String)>, reads: [Arg; 3]) -> Result<()> {
        let (m, rows) = (&kernel.mamba, kernel.batch * kernel.seq);
        let mut args = reads.to_vec();
        args.push(Arg::Write(0));
        args.extend(ints(&[rows, m.groups, m.inner() / m.groups, m.proj_cols()]));
        args.push(Arg::Real(eps));
        let blocks = (rows * m.groups).clamp(1, MOST_BLOCKS) as u32;
        self.launch((source::ssm, "gated_norm"), defines, [blocks, 1, 1], SCRATCH, args);
        Ok(())
    }

    fn gated_norm_bwd(&mut self, kernel: &SsmKernel, eps: f64) -> Result<()> {
        let defines = self.typed(&[0, 1, 2, 3], &[0, 1])?;
        let args = [(0..4).map(Arg::Read).collect::<Vec<Arg>>(), vec![Arg::Write(0), Arg::Write(1)]].concat();
        self.norm_bwd_of(kernel, eps, defines, args, 2)
    }

    fn group_norm_bwd(&mut self, kernel: &SsmKernel, eps: f64) -> Result<()> {
        let [gated, w, d_out] = [0, 1, 2].map(|i| self.reads[i]);
        let operands = [("R", 0, gated), ("R", 1, gated), ("R", 2, w), ("R", 3, d_out)];
        let results = [("W", 0, self.writes[0]), ("W", 1, self.writes[0])];
        let defines = self.types(&[&operands[..], &results].concat())?;
        let args = vec![Arg::Read(0), Arg::Null, Arg::Read(1), Arg::Read(2), Arg::Write(0), Arg::Null];
        self.norm_bwd_of(kernel, eps, defines, args, 1)
    }

    /// `dw`: the operand that the gradient of the weight is added to.
    fn norm_bwd_of(
        &mut self,
        kernel: &SsmKernel,
        eps: f64,
        defines: Vec<(String, String)>,
        mut args: Vec<Arg>,
        dw: usize,
    ) -> Result<()> {
        let (m, rows) = (&kernel.mamba, kernel.batch * kernel.seq);
        let blocks = rows.clamp(1, PARTS);
        let parts = self.scratch(blocks * m.inner() * 4);
        args.push(parts.clone());
        args.extend(ints(&[rows, m.groups, m.inner() / m.groups, m.proj_cols()]));
        args.push(Arg::Real(eps));
        self.launch((source::ssm, "gated_norm_bwd"), defines, [blocks as u32, 1, 1], SCRATCH, args);
        self.add_columns(parts, Dtype::F32, Arg::Write(dw), self.writes[dw], [blocks, m.inner()])
    }

    fn gate(&mut self, kernel: &SsmKernel) -> Result<()> {
        let (m, rows) = (&kernel.mamba, kernel.batch * kernel.seq);
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)];
        args.extend(ints(&[rows, m.inner(), m.proj_cols()]));
        let defines = self.typed(&[0, 1], &[0])?;
        self.spread((source::ssm, "gate"), defines, (rows * m.inner()).div_ceil(8), args);
        Ok(())
    }

    fn gate_bwd(&mut self, kernel: &SsmKernel) -> Result<()> {
        let (m, rows) = (&kernel.mamba, kernel.batch * kernel.seq);
        let mut args: Vec<Arg> = (0..3).map(Arg::Read).collect();
        args.extend([Arg::Write(0), Arg::Write(1)]);
        args.extend(ints(&[rows, m.inner(), m.proj_cols()]));
        let defines = self.typed(&[0, 1, 2], &[0, 1])?;
        self.spread((source::ssm, "gate_bwd"), defines, (rows * m.inner()).div_ceil(8), args);
        Ok(())
    }
}

/// The scan of a kernel: what all its passes are given.
struct Scan<'a> {
    kernel: &'a SsmKernel,
    /// The operands that are read, by number: xbc, proj, the heads' parameters.
    reads: [usize; 3],
    sums: Sums,
    shared: u64,
}

impl Scan<'_> {
    fn chunks(&self) -> u64 {
        self.kernel.seq.div_ceil(self.kernel.mamba.chunk)
    }

    fn tiles(&self) -> u64 {
        self.kernel.mamba.chunk.div_ceil(ROWS)
    }

    /// Elements of a state.
    fn size(&self) -> u64 {
        self.kernel.mamba.state * self.kernel.mamba.head_dim
    }

    /// Numbers of tokens and heads.
    fn numbers(&self) -> u64 {
        self.kernel.batch * self.kernel.seq * self.kernel.mamba.heads
    }

    fn states(&self) -> u64 {
        self.kernel.batch * self.chunks() * self.kernel.mamba.heads * self.size()
    }

    /// Elements of two tiles of as many rows and columns each.
    fn tile([rows, cols]: [u64; 2]) -> u64 {
        rows * (cols + PAD)
    }

    /// The words of the struct `Scan` of ssm_scan.cu.
    fn args(&self) -> Vec<Arg> {
        let m = &self.kernel.mamba;
        let mut args =
            vec![Arg::Read(self.reads[0]), self.sums.dt.clone(), self.sums.sums.clone(), Arg::Read(self.reads[2])];
        args.extend(ints(&[self.kernel.seq, m.heads, m.groups, m.chunk]));
        args
    }

    fn grid(&self, x: u64, y: u64) -> [u32; 3] {
        [x as u32, y as u32, self.kernel.batch as u32]
    }
}

impl Lowering<'_> {
    /// The scan of a kernel with dt and its sums by chunk, for operands at `reads`.
    fn scan_of<'a>(&mut self, kernel: &'a SsmKernel, reads: [usize; 3], on: Where) -> Result<Scan<'a>> {
        let m = &kernel.mamba;
        for (what, n, most) in [("states", m.state, MOST[0]), ("heads", m.head_dim, MOST[1])] {
            if n == 0 || !n.is_multiple_of(16) || n > most {
                return Err(self.refuse(&format!("{what} of {n} elements are no multiple of 16 up to {most}")));
            }
        }
        self.must_be("xbc", self.reads[reads[0]], Dtype::Bf16)?;
        let bytes = 4 * kernel.batch * kernel.seq * m.heads;
        let sums = Sums { dt: self.scratch(bytes), sums: self.scratch(bytes) };
        let scan = Scan { kernel, reads, sums, shared: on.shared };
        let mut args = vec![Arg::Read(reads[1]), Arg::Read(reads[2]), scan.sums.dt.clone(), scan.sums.sums.clone()];
        args.extend(ints(&[kernel.batch, kernel.seq, m.heads, m.proj_cols(), m.chunk]));
        let defines = self.types(&[("R", 0, self.reads[reads[1]]), ("R", 1, self.reads[reads[2]])])?;
        self.spread((source::ssm, "ssm_sums"), defines, kernel.batch * scan.chunks() * m.heads, args);
        Ok(scan)
    }

    /// A pass of ssm_scan.cu over the chunks.
    fn pass(
        &mut self,
        scan: &Scan,
        kernel: &'static str,
        grid: [u32; 3],
        (threads, shared): (u32, u64),
        (to, args): (Option<Dtype>, Vec<Arg>),
    ) -> Result<()> {
        if shared > scan.shared {
            let why = format!("its tiles take {shared} bytes of shared memory, of which the GPU has {}", scan.shared);
            return Err(self.refuse(&why));
        }
        let m = &scan.kernel.mamba;
        let mut types = vec![("R", 0, self.reads[scan.reads[2]])];
        types.extend(to.map(|to| ("W", 0, to)));
        let mut defines = self.types(&types)?;
        defines.extend([("HEAD_DIM", m.head_dim), ("STATE", m.state)].map(|(name, n)| (name.into(), n.to_string())));
        let (source, shared): (Source, u32) = (source::ssm_scan, shared as u32);
        let args = [scan.args(), args].concat();
        self.lowered.actions.push(Action::Launch(Launch { source, kernel, defines, grid, threads, shared, args }));
        Ok(())
    }

    /// The states before each chunk, or for the backward pass the gradients of those behind it, in scratch memory.
    fn states(&mut self, scan: &Scan, dy: Option<usize>) -> Result<Arg> {
        let (m, batch, seq) = (&scan.kernel.mamba, scan.kernel.batch, scan.kernel.seq);
        let states = self.scratch(4 * scan.states());
        let back = u64::from(dy.is_some());
        let args = vec![dy.map_or(Arg::Null, Arg::Read), states.clone(), Arg::Int(back as i64)];
        let shared = 2 * (Scan::tile([ROWS, m.state]) + Scan::tile([ROWS, m.head_dim]));
        self.pass(scan, "chunk_states", scan.grid(scan.chunks(), m.heads), (THREADS, shared), (None, args))?;
        let mut args = vec![states.clone(), scan.sums.sums.clone()];
        args.extend(ints(&[batch, seq, m.heads, m.chunk, scan.size(), back]));
        self.spread((source::ssm, "ssm_pass"), vec![], batch * m.heads * scan.size(), args);
        Ok(states)
    }

    /// Bytes of a tile of B or C, of a state or of what goes with tokens, and of some numbers of each.
    fn shared(scan: &Scan, numbers: u64) -> u64 {
        let (n, p) = (scan.kernel.mamba.state, scan.kernel.mamba.head_dim);
        let others = Scan::tile([n, p]).max(Scan::tile([ROWS, n]) + Scan::tile([ROWS, p]));
        2 * (Scan::tile([ROWS, n]) + others) + 4 * numbers * ROWS
    }

    fn scan(&mut self, kernel: &SsmKernel, on: Where) -> Result<()> {
        let scan = self.scan_of(kernel, [0, 1, 2], on)?;
        let before = self.states(&scan, None)?;
        let grid = scan.grid(scan.chunks() * scan.tiles(), kernel.mamba.heads);
        let to = (Some(self.writes[0]), vec![before, Arg::Write(0)]);
        self.pass(&scan, "chunk_scan", grid, (SCAN_THREADS, Self::shared(&scan, 3)), to)
    }

    fn zeros(&mut self, elems: u64) -> Result<Arg> {
        let to = self.scratch(4 * elems);
        let defines = self.types(&[("W", 0, Dtype::F32)])?;
        self.spread((source::pointwise, "fill"), defines, elems.div_ceil(8), vec![to.clone(), Arg::Int(elems as i64)]);
        Ok(to)
    }

    fn scan_bwd(&mut self, kernel: &SsmKernel, on: Where) -> Result<()> {
        self.must_be("dy", self.reads[4], Dtype::Bf16)?;
        let (m, dy) = (&kernel.mamba, Arg::Read(4));
        let scan = self.scan_of(kernel, [1, 2, 3], on)?;
        let before = self.states(&scan, None)?;
        let behind = self.states(&scan, Some(4))?;
        let [read, kept, dots, skips] = [(); 4].map(|()| self.scratch(4 * scan.numbers()));
        let (tiles, d_xbc) = (scan.chunks() * scan.tiles(), Some(self.writes[1]));
        let numbers = [read.clone(), kept.clone(), dots.clone(), skips.clone()];
        let args = [&[dy.clone(), before.clone(), behind.clone(), Arg::Write(1)][..], &numbers].concat();
        let room = (SCAN_THREADS, Self::shared(&scan, 2));
        self.pass(&scan, "chunk_scan_bwd_x", scan.grid(tiles, m.heads), room, (d_xbc, args))?;
        let pitch = scan.tiles() * ROWS;
        let d_scores = self.zeros(kernel.batch * kernel.seq * m.groups * pitch)?;
        let pairs = self.zeros(scan.numbers())?;
        let mut args = vec![dy.clone(), d_scores.clone(), pairs.clone()];
        args.extend(ints(&[pitch, HEADS]));
        let share = (m.heads / m.groups).div_ceil(HEADS);
        let grid = scan.grid(scan.chunks() * scan.tiles() * (scan.tiles() + 1) / 2, m.groups * share);
        let room = (SCAN_THREADS, 4 * Scan::tile([ROWS, m.state.max(m.head_dim)]) + 4 * 3 * ROWS);
        self.pass(&scan, "chunk_scan_bwd_pairs", grid, room, (None, args))?;
        let of_states = Scan::tile([ROWS, m.head_dim]) + Scan::tile([m.state, m.head_dim]);
        let of_scores = Scan::tile([ROWS, ROWS]) + Scan::tile([ROWS, m.state]);
        let room = (SCAN_THREADS, 2 * of_states.max(of_scores));
        for (side, states) in [(Side::Q, before.clone()), (Side::Kv, behind.clone())] {
            let mut args = vec![dy.clone(), d_scores.clone(), states, Arg::Write(1)];
            args.extend(ints(&[pitch, u64::from(side == Side::Kv)]));
            self.pass(&scan, "chunk_scan_bwd_bc", scan.grid(tiles, m.groups), room, (d_xbc, args))?;
        }
        let gathered = [pairs, read, kept, dots, skips, scan.sums.sums.clone(), before, behind];
        self.scan_ends(&scan, gathered)
    }

    /// Gradients of dt and of the heads' parameters.
    fn scan_ends(&mut self, scan: &Scan, gathered: [Arg; 8]) -> Result<()> {
        let (kernel, m) = (scan.kernel, &scan.kernel.mamba);
        let rows = kernel.batch * scan.chunks();
        let parts = self.scratch(4 * rows * 3 * m.heads);
        let mut args = vec![Arg::Read(2), Arg::Read(3), scan.sums.dt.clone()];
        args.extend(gathered);
        args.extend([Arg::Write(0), parts.clone()]);
        args.extend(ints(&[kernel.seq, m.heads, m.proj_cols(), m.chunk, scan.size()]));
        let defines = self.types(&[("R", 0, self.reads[2]), ("R", 1, self.reads[3]), ("W", 0, self.writes[0])])?;
        let shared = u64::from(SCRATCH) + 4 * m.chunk;
        // 48 KB is what every GPU gives without being asked for more.
        if shared > 48 << 10 {
            return Err(self.refuse(&format!("chunks of {} tokens are longer than 12256", m.chunk)));
        }
        let grid = scan.grid(scan.chunks(), m.heads);
        self.launch((source::ssm, "ssm_ends"), defines, grid, shared as u32, args);
        self.add_columns(parts, Dtype::F32, Arg::Write(2), self.writes[2], [rows, 3 * m.heads])
    }
}
