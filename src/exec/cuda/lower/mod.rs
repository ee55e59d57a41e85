//! What is launched for a kernel of a plan.
//!
//! A plan's kernel becomes a few [`Action`]s, in order, on one stream. A launch names its source, the macros that fix
//! operand types and widths, a grid, and its parameters: one struct of 8-byte words. What a mask or a layout means for
//! a rank is worked out here, once, as tables that the kernels read.

mod attention;
pub mod beside;
mod ends;
mod expert;
mod fused;
mod heads;
mod moves;
mod muon;
mod rows;
mod ssm;

pub use expert::{Sum, Term, sums};

use super::fused::{Fused, Sdpa};
use super::source::{self, Source};
use crate::error::{Error, Result};
use crate::plan::kernel::FP8_BLOCK;
use crate::plan::{Dtype, Kernel, Mesh, Route, Side};
use bytemuck::Pod;
use std::rc::Rc;

/// A word of a launch's parameters.
#[derive(Debug, Clone, PartialEq)]
pub enum Arg {
    /// Where operand i begins.
    Read(usize),
    Write(usize),
    /// The address of constant data.
    Table(Rc<[u8]>),
    /// The address of scratch memory, by index into [`Lowered::scratch`].
    Scratch(usize),
    Null,
    Int(i64),
    Real(f64),
}

/// One kernel launch.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    pub source: Source,
    pub kernel: &'static str,
    /// The macros of the source: `("R0", "bf16")`.
    pub defines: Vec<(String, String)>,
    pub grid: [u32; 3],
    pub threads: u32,
    /// Dynamic shared memory, bytes.
    pub shared: u32,
    pub args: Vec<Arg>,
}

/// `C[m,n] (+)= A B (+ bias)`, row-major, as [`Kernel::MatMul`] says: for cuBLASLt. In FP8, A `[m, k]` and B `[n, k]` are
/// codes, with a scale for every 128 of them along k: `[k / 128, m]` and `[k / 128, n]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Gemm {
    /// Products of this shape. Their operands stand one behind the other, without gaps.
    pub count: u64,
    pub shape: [u64; 3],
    pub transposed: [bool; 2],
    pub accumulate: bool,
    pub bias: bool,
    /// The dtypes of A, B and C.
    pub dtypes: [Dtype; 3],
}

/// What a product that goes onto its result, and what was there, are multiplied by: C = product A B + old C.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    pub product: f32,
    pub old: f32,
}

impl Factors {
    pub const ONE: Factors = Factors { product: 1.0, old: 1.0 };
}

/// An operand from a byte on.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    pub of: Arg,
    pub skip: u64,
}

impl From<Arg> for Part {
    fn from(of: Arg) -> Part {
        Part { of, skip: 0 }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    Launch(Launch),
    Gemm {
        gemm: Gemm,
        factors: Factors,
        a: Part,
        b: Part,
        c: Part,
        bias: Option<Arg>,
        /// The scales of A and of B; `None` where the product is not in FP8.
        scales: Option<[Arg; 2]>,
    },
    /// Attention by a library: where its operands begin, and what it works in.
    Fused {
        sdpa: Sdpa,
        at: Vec<Part>,
        workspace: Arg,
    },
    /// Operand `read` into operand `write`, unless they are one buffer: what an accumulating kernel starts from.
    Copy {
        read: usize,
        write: usize,
    },
}

/// The actions of one kernel.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Lowered {
    pub actions: Vec<Action>,
    /// Bytes of each piece of scratch memory, which nobody else uses meanwhile.
    pub scratch: Vec<u64>,
}

impl Lowered {
    /// Whether there is a product of FP8 codes, which not every GPU has.
    pub fn in_fp8(&self) -> bool {
        self.actions.iter().any(|action| matches!(action, Action::Gemm { gemm, .. } if gemm.dtypes[0] == Dtype::U8))
    }

    pub fn launches(&self) -> impl Iterator<Item = &Launch> {
        self.actions.iter().filter_map(|action| if let Action::Launch(launch) = action { Some(launch) } else { None })
    }
}

/// Lowers `kernel` as `rank` runs it in optimizer step `step`, counted from 1, its operands being stored so. Errors: a
/// dtype that the kernels do not take.
pub fn lower(kernel: &Kernel, on: Where, reads: &[Dtype], writes: &[Dtype], step: u64) -> Result<Lowered> {
    let mut out = Lowering { reads, writes, name: kernel.name(), lowered: Lowered::default() };
    if kernel.mask().is_some_and(|block| block.shape(on.views, on.rank).area == 0) {
        return Ok(out.lowered);
    }
    for &(read, write) in super::super::kernels::in_place(kernel) {
        out.lowered.actions.push(Action::Copy { read, write });
    }
    out.kernel(kernel, on, step)?;
    Ok(out.lowered)
}

/// The rank that a kernel is lowered for, in its meshes, and what its GPU has.
#[derive(Debug, Clone, Copy)]
pub struct Where<'a> {
    pub views: &'a [Mesh],
    /// The rows of experts, for a kernel that reads a route; `None` for others.
    pub route: Option<&'a Route>,
    pub rank: u32,
    /// Bytes of shared memory that a block of threads may have there.
    pub shared: u64,
    /// The library that does attention there; `None`: the project's own kernels do.
    pub fused: Option<&'a dyn Fused>,
}

/// Bytes of shared memory that a block of threads may have on the least of the GPUs that kernels are compiled for
/// (sm_86, 89, 120: 99 KB), and on the largest (sm_90, 100: 227 KB); CUDA C++ Programming Guide, table of compute
/// capabilities.
pub const LEAST_SHARED: u64 = 99 << 10;
pub const MOST_SHARED: u64 = 227 << 10;

/// A kernel that is being lowered.
struct Lowering<'a> {
    reads: &'a [Dtype],
    writes: &'a [Dtype],
    name: &'static str,
    lowered: Lowered,
}

/// The most blocks of a launch, which fill any GPU several times over; kernels stride over their elements.
const MOST_BLOCKS: u64 = 2048;
/// Threads of every kernel but attention's.
const THREADS: u32 = 256;

impl Lowering<'_> {
    fn kernel(&mut self, kernel: &Kernel, on: Where, step: u64) -> Result<()> {
        match kernel {
            Kernel::MatMul { .. } => self.matmul(kernel),
            Kernel::Attention(block) => self.attention(block, on, false),
            Kernel::AttentionOnto(block) => self.attention(block, on, true),
            Kernel::AttentionBwd(block) => self.attention_bwd(block, on, None),
            Kernel::AttentionBwdOnto(block, side) => self.attention_bwd(block, on, Some(*side)),
            Kernel::AttentionDelta { .. } | Kernel::MergeLse(_) | Kernel::AddLse(_) | Kernel::AddWeighted(_) => {
                self.merge(kernel, on)
            }
            Kernel::Norm { rows, cols, eps } => self.norm([*rows, *cols], false, false, *eps),
            Kernel::LayerNorm { rows, cols, eps, bias } => self.norm([*rows, *cols], true, *bias, *eps),
            Kernel::NormBwd { rows, cols, eps } => self.norm_bwd([*rows, *cols], false, false, *eps),
            Kernel::LayerNormBwd { rows, cols, eps, bias } => self.norm_bwd([*rows, *cols], true, *bias, *eps),
            Kernel::HeadNorm { .. } => self.head_norm(kernel),
            Kernel::HeadNormBwd { .. } => self.head_norm_bwd(kernel),
            Kernel::LatentNorm { .. } => self.latent_norm(kernel),
            Kernel::LatentNormBwd { .. } => self.latent_norm_bwd(kernel),
            Kernel::LatentRope { .. } => self.latent_rope(kernel, on),
            Kernel::BiasBwd { rows, cols } => self.bias_bwd(*rows, *cols),
            Kernel::Expert(expert) => self.expert(expert, on),
            Kernel::Quantise { rows, cols } => self.quantise(*rows, *cols),
            Kernel::Dequantise { rows, cols } => self.dequantise(*rows, *cols),
            Kernel::Rope { .. } => self.rope(kernel, on),
            Kernel::Ssm(ssm) => self.ssm(ssm, on),
            Kernel::Muon(kernel) => self.muon(kernel, on, step),
            Kernel::Permute(_) | Kernel::Reorder { .. } | Kernel::OwnRows { .. } => self.moved(kernel, on),
            Kernel::Embed { .. }
            | Kernel::EmbedBwd { .. }
            | Kernel::Positions { .. }
            | Kernel::CrossEntropy { .. }
            | Kernel::LogSoftmax { .. }
            | Kernel::Nll { .. }
            | Kernel::LogSoftmaxBwd { .. }
            | Kernel::VocabStats(_)
            | Kernel::VocabCrossEntropy { .. } => self.ends(kernel, on),
            _ => self.pointwise(kernel, on, step),
        }
    }

    fn matmul(&mut self, kernel: &Kernel) -> Result<()> {
        let &Kernel::MatMul { m, n, k, a_t, b_t, accumulate, fp8, bias } = kernel else {
            return Err(self.refuse("is no product"));
        };
        if fp8 {
            return self.matmul_fp8([m, n, k], [a_t, b_t], accumulate, bias);
        }
        if self.reads[0] != self.reads[1] {
            return self.matmul_mixed([m, n, k], [a_t, b_t], accumulate, bias);
        }
        let dtypes = [self.reads[0], self.reads[1], self.writes[0]];
        let gemm = Gemm { count: 1, shape: [m, n, k], transposed: [a_t, b_t], accumulate, bias, dtypes };
        let bias = bias.then(|| Arg::Read(self.reads.len() - 1));
        let [a, b, c] = [Arg::Read(0), Arg::Read(1), Arg::Write(0)].map(Part::from);
        self.lowered.actions.push(Action::Gemm { gemm, factors: Factors::ONE, a, b, c, bias, scales: None });
        Ok(())
    }

    /// cuBLASLt multiplies no f32 by bf16 (a router's gradients): the other operand is made f32 first, in scratch memory,
    /// and so is a result that is not.
    fn matmul_mixed(&mut self, shape: [u64; 3], transposed: [bool; 2], accumulate: bool, bias: bool) -> Result<()> {
        let [m, n, k] = shape;
        let to = self.writes[0];
        if bias {
            return Err(self.refuse("operands of two dtypes with a bias"));
        }
        let mut wide = |read: usize, elems: u64| -> Result<Arg> {
            if self.reads[read] == Dtype::F32 {
                return Ok(Arg::Read(read));
            }
            let wide = self.scratch(4 * elems);
            self.cast((Arg::Read(read), self.reads[read]), (wide.clone(), Dtype::F32), elems)?;
            Ok(wide)
        };
        let (a, b) = (wide(0, m * k)?, wide(1, k * n)?);
        let c = if to == Dtype::F32 { Arg::Write(0) } else { self.scratch(4 * m * n) };
        let onto = accumulate && to == Dtype::F32;
        let gemm = Gemm { count: 1, shape, transposed, accumulate: onto, bias, dtypes: [Dtype::F32; 3] };
        let [a, b, of_c] = [a, b, c.clone()].map(Part::from);
        let factors = Factors::ONE;
        self.lowered.actions.push(Action::Gemm { gemm, factors, a, b, c: of_c, bias: None, scales: None });
        match to {
            Dtype::F32 => Ok(()),
            _ if accumulate => {
                let defines = self.types(&[("R", 0, Dtype::F32), ("R", 1, to), ("W", 0, to)])?;
                let mut args = vec![c, Arg::Write(0), Arg::Write(0), Arg::Null];
                args.extend(ints(&[1, m * n]));
                self.spread((source::pointwise, "add"), defines, (m * n).div_ceil(8), args);
                Ok(())
            }
            _ => self.cast((c, Dtype::F32), (Arg::Write(0), to), m * n),
        }
    }

    fn cast(&mut self, (x, from): (Arg, Dtype), (y, to): (Arg, Dtype), elems: u64) -> Result<()> {
        let defines = self.types(&[("R", 0, from), ("W", 0, to)])?;
        let args = vec![x, y, Arg::Int(elems as i64)];
        self.spread((source::pointwise, "cast"), defines, elems.div_ceil(8), args);
        Ok(())
    }

    /// A product in FP8. Both operands are rounded first, into scratch memory, k running fastest whichever way they are
    /// stored.
    fn matmul_fp8(&mut self, [m, n, k]: [u64; 3], [a_t, b_t]: [bool; 2], accumulate: bool, bias: bool) -> Result<()> {
        let mut rounded = |read: usize, rows: u64, walk: [u64; 2]| -> Result<[Arg; 2]> {
            let both = [self.scratch(rows * k), self.scratch(4 * rows * k.div_ceil(FP8_BLOCK))];
            let mut args = vec![Arg::Read(read), both[0].clone(), both[1].clone()];
            args.extend(ints(&[rows, k, walk[0], walk[1]]));
            let defines = self.types(&[("R", 0, self.reads[read])])?;
            let threads = rows * k.div_ceil(FP8_BLOCK) * 32;
            self.spread((source::expert, "quantise_operand"), defines, threads, args);
            Ok(both)
        };
        let a = rounded(0, m, if a_t { [1, m] } else { [k, 1] })?;
        let b = rounded(1, n, if b_t { [k, 1] } else { [1, n] })?;
        let (shape, dtypes) = ([m, n, k], [Dtype::U8, Dtype::U8, self.writes[0]]);
        let gemm = Gemm { count: 1, shape, transposed: [false, true], accumulate, bias, dtypes };
        let bias = bias.then(|| Arg::Read(self.reads.len() - 1));
        let ([a, of_a], [b, of_b]) = (a, b);
        let (a, b, c, scales) = (a.into(), b.into(), Arg::Write(0).into(), Some([of_a, of_b]));
        let factors = Factors::ONE;
        self.lowered.actions.push(Action::Gemm { gemm, factors, a, b, c, bias, scales });
        Ok(())
    }

    fn refuse(&self, why: &str) -> Error {
        Error::device(self.name, format!("{why}; no CUDA kernel takes that"))
    }

    fn refuse_with(&self, why: Error) -> Error {
        Error::device(self.name, why)
    }

    /// The word of a dtype in macros.
    fn word(&self, dtype: Dtype) -> Result<&'static str> {
        match dtype {
            Dtype::Bf16 => Ok("bf16"),
            Dtype::F32 => Ok("float"),
            other => Err(self.refuse(&format!("an operand is {other:?}"))),
        }
    }

    fn must_be(&self, what: &str, dtype: Dtype, wanted: Dtype) -> Result<()> {
        let why = || format!("{what} is {dtype:?}, not {wanted:?}");
        if dtype == wanted { Ok(()) } else { Err(self.refuse(&why())) }
    }

    /// The macros of operands, each given as `("R", 0, dtype of operand 0)`.
    fn types(&self, of: &[(&str, usize, Dtype)]) -> Result<Vec<(String, String)>> {
        of.iter().map(|&(side, i, dtype)| Ok((format!("{side}{i}"), self.word(dtype)?.into()))).collect()
    }

    /// The macros of reads `r` and writes `w`, by their places in the kernel.
    fn typed(&self, r: &[usize], w: &[usize]) -> Result<Vec<(String, String)>> {
        let reads = r.iter().map(|&i| ("R", i, self.reads[i]));
        let writes = w.iter().map(|&i| ("W", i, self.writes[i]));
        self.types(&reads.chain(writes).collect::<Vec<_>>())
    }

    /// Launches a kernel whose threads stride over `elems`.
    fn spread(&mut self, at: (Source, &'static str), defines: Vec<(String, String)>, elems: u64, args: Vec<Arg>) {
        let blocks = elems.div_ceil(u64::from(THREADS)).clamp(1, MOST_BLOCKS) as u32;
        self.launch(at, defines, [blocks, 1, 1], 0, args);
    }

    fn launch(
        &mut self,
        (source, kernel): (Source, &'static str),
        defines: Vec<(String, String)>,
        grid: [u32; 3],
        shared: u32,
        args: Vec<Arg>,
    ) {
        let threads = THREADS;
        self.lowered.actions.push(Action::Launch(Launch { source, kernel, defines, grid, threads, shared, args }));
    }

    fn scratch(&mut self, bytes: u64) -> Arg {
        self.lowered.scratch.push(bytes);
        Arg::Scratch(self.lowered.scratch.len() - 1)
    }
}

fn table<T: Pod>(values: &[T]) -> Arg {
    Arg::Table(bytemuck::cast_slice(values).into())
}

fn ints(values: &[u64]) -> Vec<Arg> {
    values.iter().map(|&v| Arg::Int(v as i64)).collect()
}

/// The rows of a block's side that take part on a rank, over the whole batch.
fn live(block: &crate::plan::AttnBlock, side: Side, on: Where) -> Vec<i32> {
    let ranges = crate::exec::kernels::mask::live_rows(block, side, on.views, on.rank);
    ranges.into_iter().flatten().map(|row| row as i32).collect()
}
