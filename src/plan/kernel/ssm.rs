//! The kernels of a Mamba-2 mixer between its two projections (arXiv:2405.21060), as `mamba_ssm` has them and
//! Megatron-LM's `MambaMixer` calls them: what is kept for the backward pass is the first projection's output and the
//! scan's; the convolution and the states of chunks are computed again.
//!
//! Legend: n tokens (batch b times s), H heads of p elements, G groups, N elements of a state for each of a head's,
//! Q tokens of a chunk, K taps. `proj` is `[n, z | x | B | C | dt]`, `xbc` is `[n, x | B | C]` behind the convolution; z
//! and x have H*p columns, B and C have G*N each, dt has H.
//!
//! ```text
//! conv    xbc = silu(conv(proj's x | B | C) + bias), a token and the K - 1 before it
//! scan    dt = softplus(proj's dt + bias), a = exp(-exp(A) dt); h = a h + dt x B, y = C h + D x
//! norm    out = w * rms norm by group (y * silu(proj's z))
//! ```
//! Where ranks have exchanged tokens for heads (`MambaContextParallel`), they take their heads' part of the weights, and the
//! gate and the norm stand on either side of the way back, since a norm wants a whole group:
//!
//! ```text
//! own     conv's and the heads' weights of the heads here
//! gate    y * silu(proj's z)
//! group_norm    out = w * rms norm by group (gated)
//! ```

use super::{Operands, Work, WorkClass};
use crate::plan::mesh::{Axis, Mesh};
use crate::spec::MambaSpec;
use serde::{Deserialize, Serialize};

/// Bytes of a number that kernels of the scan hand to each other: fp32, whatever the dtype.
const WIDE: u64 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SsmOp {
    /// Reads proj, taps and bias `[(x | B | C), K]`, `[x | B | C]`; writes xbc.
    Conv,
    /// Reads d_proj, which may be its result, proj, d_xbc, weights, their gradient; writes d_proj, its x, B and C alone,
    /// and the weights' gradient, accumulated.
    ConvBwd,
    /// Reads xbc, proj, `[dt bias | A | D]` of the heads; writes y `[n, H*p]`.
    Scan,
    /// Reads d_proj, which may be its result, xbc, proj, the heads' parameters, dy, the parameters' gradient; writes
    /// d_proj, its dt alone, d_xbc, and the parameters' gradient, accumulated.
    ScanBwd,
    /// Reads y, proj, w `[H*p]`; writes out.
    Norm { eps: f64 },
    /// Reads y, proj, w, d_out, dw; writes dy, d_proj, of which its z alone, and dw, accumulated.
    NormBwd { eps: f64 },
    /// Reads y, proj; writes y * silu(z) `[n, H*p]`.
    Gate,
    /// Reads y, proj, d_gated; writes dy and d_proj, of which its z alone.
    GateBwd,
    /// Reads what the gate left, w; writes out.
    GroupNorm { eps: f64 },
    /// Reads what the gate left, w, d_out, dw; writes d_gated, and dw, accumulated.
    GroupNormBwd { eps: f64 },
    /// The part of the weights that goes with a rank's heads, of all heads here. Reads taps and bias, the heads'
    /// parameters; writes both of [`share`](MambaSpec::share).
    Own(HeadRanks),
    /// Reads the gradients of the part, and of all; writes these, accumulated.
    OwnBwd(HeadRanks),
}

/// The ranks among which the heads are shared out: those of all Ulysses groups of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadRanks {
    pub ring: u32,
    pub ulysses: u32,
}

impl HeadRanks {
    pub fn all(self) -> u64 {
        u64::from(self.ring) * u64::from(self.ulysses)
    }

    /// The place of `rank` among them, in the order in which they exchange, whichever of the two axes is inside the
    /// other.
    pub fn place(self, views: &[Mesh], rank: u32) -> u64 {
        let [ring, ulysses] = [Axis::Cp, Axis::Up].map(|axis| u64::from(views[0].coord(rank, axis)));
        match views[0].is_inside(Axis::Cp, Axis::Up) {
            true => ulysses * u64::from(self.ring) + ring,
            false => ring * u64::from(self.ulysses) + ulysses,
        }
    }
}

/// A kernel for the first `seq` tokens of each of `batch` sequences.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SsmKernel {
    pub batch: u64,
    pub seq: u64,
    /// The mixer with the heads and groups of this rank.
    pub mamba: MambaSpec,
    pub op: SsmOp,
}

impl SsmKernel {
    pub fn is_forward(&self) -> bool {
        match self.op {
            SsmOp::Conv | SsmOp::Scan | SsmOp::Norm { .. } | SsmOp::Gate | SsmOp::GroupNorm { .. } | SsmOp::Own(_) => {
                true
            }
            SsmOp::ConvBwd | SsmOp::ScanBwd | SsmOp::NormBwd { .. } | SsmOp::GateBwd => false,
            SsmOp::GroupNormBwd { .. } | SsmOp::OwnBwd(_) => false,
        }
    }

    pub fn name(&self) -> &'static str {
        match self.op {
            SsmOp::Conv => "causal_conv",
            SsmOp::ConvBwd => "causal_conv_bwd",
            SsmOp::Scan => "ssm_scan",
            SsmOp::ScanBwd => "ssm_scan_bwd",
            SsmOp::Norm { .. } => "gated_norm",
            SsmOp::NormBwd { .. } => "gated_norm_bwd",
            SsmOp::Gate => "gate",
            SsmOp::GateBwd => "gate_bwd",
            SsmOp::GroupNorm { .. } => "group_norm",
            SsmOp::GroupNormBwd { .. } => "group_norm_bwd",
            SsmOp::Own(_) => "own_heads",
            SsmOp::OwnBwd(_) => "own_heads_bwd",
        }
    }

    fn tokens(&self) -> u64 {
        self.batch * self.seq
    }

    pub(super) fn operands(&self) -> Operands {
        let (n, m) = (self.tokens(), &self.mamba);
        let [proj, xbc, y] = [m.proj_cols(), m.conv_cols(), m.inner()].map(|cols| n * cols);
        let (taps, heads, w) = (m.conv_cols() * (m.conv + 1), 3 * m.heads, m.inner());
        let (reads, writes) = match self.op {
            SsmOp::Conv => (vec![proj, taps], vec![xbc]),
            SsmOp::ConvBwd => (vec![proj, proj, xbc, taps, taps], vec![proj, taps]),
            SsmOp::Scan => (vec![xbc, proj, heads], vec![y]),
            SsmOp::ScanBwd => (vec![proj, xbc, proj, heads, y, heads], vec![proj, xbc, heads]),
            SsmOp::Norm { .. } => (vec![y, proj, w], vec![y]),
            SsmOp::NormBwd { .. } => (vec![y, proj, w, y, w], vec![y, proj, w]),
            SsmOp::Gate => (vec![y, proj], vec![y]),
            SsmOp::GateBwd => (vec![y, proj, y], vec![y, proj]),
            SsmOp::GroupNorm { .. } => (vec![y, w], vec![y]),
            SsmOp::GroupNormBwd { .. } => (vec![y, w, y, w], vec![y, w]),
            SsmOp::Own(ranks) => (vec![taps, heads], self.own(ranks).to_vec()),
            SsmOp::OwnBwd(ranks) => ([&self.own(ranks)[..], &[taps, heads]].concat(), vec![taps, heads]),
        };
        Operands { reads, writes }
    }

    /// Elements that one of `ranks` has of the convolution's weights, and of the heads' parameters.
    fn own(&self, ranks: HeadRanks) -> [u64; 2] {
        let m = self.mamba.share(ranks.all());
        [m.conv_cols() * (m.conv + 1), 3 * m.heads]
    }

    /// The work, given the bytes of each operand; of a row of `proj` only the kernel's own columns count.
    pub(super) fn work(&self, reads: &[u64], writes: &[u64]) -> Work {
        let m = &self.mamba;
        let of = |bytes: u64, cols: u64| bytes / m.proj_cols() * cols;
        let memory = |bytes| Work { flops: 0, bytes, class: WorkClass::Memory };
        let (conv, inner) = (m.conv_cols(), m.inner());
        match self.op {
            SsmOp::Conv => memory(of(reads[0], conv) + reads[1] + writes[0]),
            SsmOp::ConvBwd => {
                memory(of(reads[1], conv) + reads[2] + reads[3] + reads[4] + of(writes[0], conv) + writes[1])
            }
            SsmOp::Norm { .. } => memory(reads[0] + of(reads[1], inner) + reads[2] + writes[0]),
            SsmOp::NormBwd { .. } => {
                let read = reads[0] + of(reads[1], inner) + reads[2] + reads[3] + reads[4];
                memory(read + writes[0] + of(writes[1], inner) + writes[2])
            }
            SsmOp::Gate => memory(reads[0] + of(reads[1], inner) + writes[0]),
            SsmOp::GateBwd => memory(reads[0] + of(reads[1], inner) + reads[2] + writes[0] + of(writes[1], inner)),
            SsmOp::GroupNorm { .. } | SsmOp::GroupNormBwd { .. } => memory(reads.iter().chain(writes).sum()),
            SsmOp::Own(_) => memory(2 * writes.iter().sum::<u64>()),
            // The gradients that are added to are read and written.
            SsmOp::OwnBwd(_) => memory(3 * (reads[0] + reads[1])),
            SsmOp::Scan => self.scan(writes[0]),
            SsmOp::ScanBwd => self.scan_bwd(reads[4]),
        }
    }

    /// The bytes that pass through memory: x; B, or C; a number for each head of each token; scores; states in fp32,
    /// and states as they are kept for the scan of each chunk. `y`: bytes of the output, which is as large as x.
    fn passes(&self, y: u64) -> Passes {
        let (n, m) = (self.tokens(), &self.mamba);
        let element = y / (n * m.inner()).max(1);
        let states = self.batch * self.seq.div_ceil(m.chunk) * m.inner() * m.state;
        Passes {
            x: y,
            b: element * n * m.bc_cols(),
            b_sum: WIDE * n * m.bc_cols(),
            dt: element * n * m.heads,
            heads: WIDE * n * m.heads,
            scores: WIDE * n * m.groups * m.chunk,
            wide: WIDE * states,
            states: element * states,
        }
    }

    /// The forward scan: kernels of `mamba_ssm/ops/triton/ssd_combined.py`, `_mamba_chunk_scan_combined_fwd`, one after
    /// the other.
    fn scan(&self, y: u64) -> Work {
        let p = self.passes(y);
        let scan = p.scores + p.x + p.b + 2 * p.heads + p.states + y;
        let class = WorkClass::Scan { states: 2 * p.wide + 2 * p.states };
        Work { flops: self.tokens() * self.mamba.scan_flops(), bytes: p.up_to_scan() + scan, class }
    }

    /// The backward scan, `_mamba_chunk_scan_combined_bwd`: the first four kernels again, then gradients of the states,
    /// of x, B and C, of the scores, and of a.
    fn scan_bwd(&self, y: u64) -> Work {
        let (p, m) = (self.passes(y), &self.mamba);
        let d_states = p.b + y + p.heads + p.states;
        let passing = 4 * p.states;
        let d_x = p.x + p.scores + 2 * p.heads + y + p.b + p.states + p.x + p.heads;
        let d_b = p.x + p.b + 2 * p.heads + p.states + p.b_sum;
        let d_c = p.states + y + p.b + p.heads + p.b_sum;
        let d_scores = p.x + y + 2 * p.heads + p.scores;
        let of_scores = 2 * (p.scores + p.b + p.b_sum + p.b);
        let d_a = p.x + y + 2 * p.heads + p.scores + p.heads;
        let d_dt = 3 * p.heads + 2 * p.dt;
        let bytes = p.up_to_scan() + d_states + passing + d_x + d_b + d_c + d_scores + of_scores + d_a + d_dt;
        let (scores, values) = (m.groups * m.state * (m.chunk + 1), m.inner() * (m.chunk + 1));
        let flops = self.tokens() * (3 * scores + 3 * values + 10 * m.inner() * m.state);
        let class = WorkClass::Scan { states: 2 * p.wide + 5 * p.states + passing };
        Work { flops, bytes, class }
    }
}

/// Bytes of each thing that passes through memory once.
struct Passes {
    x: u64,
    b: u64,
    b_sum: u64,
    dt: u64,
    heads: u64,
    scores: u64,
    wide: u64,
    states: u64,
}

impl Passes {
    /// Bytes of the kernels before the scan: sums of a in each chunk, the chunks' states, these with what came before,
    /// scores.
    fn up_to_scan(&self) -> u64 {
        let sums = self.dt + 2 * self.heads;
        let states = self.x + self.b + 2 * self.heads + self.wide;
        sums + states + self.wide + self.states + 2 * self.b + self.scores
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Kernel;

    const NANO: MambaSpec = MambaSpec { heads: 64, head_dim: 64, groups: 8, state: 128, conv: 4, chunk: 128 };

    fn work(op: SsmOp, seq: u64) -> Work {
        let kernel = Kernel::Ssm(SsmKernel { batch: 1, seq, mamba: NANO, op });
        let Operands { reads, writes } = kernel.operands(&[]);
        let bytes = |elems: Vec<u64>| elems.into_iter().map(|n| 2 * n).collect::<Vec<_>>();
        kernel.work(&[], 0, &bytes(reads), &bytes(writes)).unwrap()
    }

    /// Product by product, for every head or group of every chunk of 128 tokens, half of a square where it is causal.
    #[test]
    fn flops_of_the_products_of_a_chunk() {
        let (q, n, p, heads, groups) = (128.0, 128.0, 64.0, 64.0, 8.0);
        let half = q * (q + 1.0) / 2.0;
        let (scores, values, states) = (groups * 2.0 * half * n, heads * 2.0 * half * p, heads * 2.0 * q * n * p);
        let chunks = 4096.0 / q;
        assert_eq!(work(SsmOp::Scan, 4096).flops as f64, chunks * (scores + values + 2.0 * states));
        assert_eq!(work(SsmOp::ScanBwd, 4096).flops as f64, chunks * (3.0 * scores + 3.0 * values + 5.0 * states));
    }

    /// States, of which a chunk has as many as it has tokens times 32 here, are what moves most; they do not depend on the
    /// tokens of the last chunk.
    #[test]
    fn a_scan_moves_its_states() {
        let (one, two) = (work(SsmOp::Scan, 128).bytes, work(SsmOp::Scan, 129).bytes);
        let states = 64 * 64 * 128;
        assert!(two - one > (4 + 4 + 2 + 2) * states && two - one < (4 + 4 + 2 + 2) * states + 80_000);
        assert!((0.5..0.7).contains(&((12 * states) as f64 / one as f64)));
    }

    /// What a fused kernel that reads each operand once and writes each result once would move is less.
    #[test]
    fn no_kernel_moves_less_than_its_own_columns() {
        let n = 2 * 4096;
        let cols = [NANO.inner(), NANO.conv_cols(), NANO.proj_cols()];
        assert!(
            work(SsmOp::Conv, 4096).bytes >= n * 2 * cols[1] && work(SsmOp::Conv, 4096).bytes < n * (cols[1] + cols[2])
        );
        let [norm, gate, rest] =
            [SsmOp::Norm { eps: 1e-5 }, SsmOp::Gate, SsmOp::GroupNorm { eps: 1e-5 }].map(|op| work(op, 4096).bytes);
        assert!(norm < n * 4 * cols[0]);
        // Apart, what the gate leaves is written and read again.
        assert_eq!(gate + rest, norm + n * 2 * cols[0]);
        assert!(work(SsmOp::Scan, 4096).bytes > n * (cols[0] + cols[1]));
    }
}
