//! The optimizer Muon. Its kernels and products have not run on a GPU yet: the emulator holds them to the CPU's, and a library
//! that stands for cuBLASLt.

use super::super::source;
use super::rows::{SCRATCH, adam_args};
use super::{Action, Arg, Factors, Gemm, Lowering, MOST_BLOCKS, Part, THREADS, Where, ints, table};
use crate::error::Result;
use crate::plan::Adam;
use crate::plan::muon::{COEFFICIENTS, EPS, Matrices, MuonKernel, SCALE, Stretch};

/// Elements of a thread at a time.
const WIDE: u64 = 8;

impl Lowering<'_> {
    pub(super) fn muon(&mut self, kernel: &MuonKernel, on: Where, step: u64) -> Result<()> {
        match kernel {
            MuonKernel::Momentum { part, momentum } => self.momentum(&part.stretches(on.views, on.rank), *momentum),
            MuonKernel::Normalise { of } => self.normalise(of),
            MuonKernel::Gram { of } => {
                let (short, long) = (of.rows.min(of.cols), of.rows.max(of.cols));
                let is_wide = of.rows <= of.cols;
                self.products(of.count, [0, 0], [short, short, long], [!is_wide, is_wide], None);
                Ok(())
            }
            MuonKernel::Square { of } => {
                let [_, old, product] = COEFFICIENTS.map(|x| x as f32);
                let shape = [of.rows.min(of.cols); 3];
                self.products(of.count, [0, 0], shape, [false; 2], Some(Factors { product, old }));
                Ok(())
            }
            MuonKernel::Apply { of } => {
                let reads = if of.rows <= of.cols { [1, 0] } else { [0, 1] };
                let shape = [of.rows, of.cols, of.rows.min(of.cols)];
                let onto = Factors { old: COEFFICIENTS[0] as f32, ..Factors::ONE };
                self.products(of.count, reads, shape, [false; 2], Some(onto));
                Ok(())
            }
            MuonKernel::Update { part, adam } => {
                let stretches = part.stretches(on.views, on.rank);
                self.update(&stretches, part.others > 0, adam, step)
            }
        }
    }

    /// A product of two reads for each matrix; with `onto` C begins as a copy of the first operand of the kernel.
    fn products(
        &mut self,
        count: u64,
        [a, b]: [usize; 2],
        shape: [u64; 3],
        transposed: [bool; 2],
        onto: Option<Factors>,
    ) {
        if onto.is_some() {
            self.lowered.actions.push(Action::Copy { read: 0, write: 0 });
        }
        let dtypes = [self.reads[a], self.reads[b], self.writes[0]];
        let gemm = Gemm { count, shape, transposed, accumulate: onto.is_some(), bias: false, dtypes };
        let [a, b, c] = [Arg::Read(a), Arg::Read(b), Arg::Write(0)].map(Part::from);
        let factors = onto.unwrap_or(Factors::ONE);
        self.lowered.actions.push(Action::Gemm { gemm, factors, a, b, c, bias: None, scales: None });
    }

    fn normalise(&mut self, of: &Matrices) -> Result<()> {
        let elems = of.rows * of.cols;
        let blocks = elems.div_ceil(WIDE * u64::from(THREADS)).clamp(1, MOST_BLOCKS.div_ceil(of.count));
        let parts = self.scratch(4 * of.count * blocks);
        let grid = [blocks as u32, of.count as u32, 1];
        let defines = self.typed(&[0], &[])?;
        let args = vec![Arg::Read(0), parts.clone(), Arg::Int(elems as i64)];
        self.launch((source::muon, "squares"), defines, grid, SCRATCH, args);
        let mut args = vec![Arg::Read(0), Arg::Write(0), parts];
        args.extend(ints(&[elems, blocks]));
        args.push(Arg::Real(EPS));
        let defines = self.typed(&[0], &[0])?;
        self.launch((source::muon, "divide"), defines, grid, SCRATCH, args);
        Ok(())
    }

    fn momentum(&mut self, stretches: &[Stretch], keep: f64) -> Result<()> {
        let args = vec![Arg::Read(0), Arg::Write(0), Arg::Write(1), places(stretches), Arg::Real(keep)];
        let defines = self.typed(&[0], &[0, 1])?;
        self.launch((source::muon, "momentum"), defines, grid(stretches), 0, args);
        Ok(())
    }

    fn update(&mut self, stretches: &[Stretch], others: bool, adam: &Adam, step: u64) -> Result<()> {
        let cast = if others { 3 } else { 2 };
        let has_cast = self.writes.len() > cast;
        let second = if others { Arg::Write(2) } else { Arg::Null };
        let copy = if has_cast { Arg::Write(cast) } else { Arg::Null };
        let by: Vec<f64> =
            stretches.iter().map(|s| s.of.map_or(0.0, |of| adam.lr * SCALE * (of.longer as f64).sqrt())).collect();
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0), Arg::Write(1), second, copy];
        args.extend([places(stretches), table(&by)]);
        args.extend(adam_args(adam, step));
        let mut of = vec![("R", 0, self.reads[0]), ("R", 1, self.reads[1])];
        of.extend([("W", 0, self.writes[0]), ("W", 1, self.writes[1])]);
        if others {
            of.push(("W", 2, self.writes[2]));
        }
        if has_cast {
            of.push(("W", 3, self.writes[cast]));
        }
        let defines = self.types(&of)?;
        self.launch((source::muon, "update"), defines, grid(stretches), 0, args);
        Ok(())
    }
}

/// The table of stretches: where each begins, its elements, and where its second moments begin, or -1 of matrices.
fn places(stretches: &[Stretch]) -> Arg {
    let mut second = 0;
    let mut words = vec![];
    for Stretch { elems, of } in stretches {
        let begins = if of.is_some() { -1 } else { second };
        words.extend([elems.start as i64, elems.len() as i64, begins]);
        if of.is_none() {
            second += elems.len() as i64;
        }
    }
    table(&words)
}

/// A row of blocks for each stretch, as long as the longest of them needs.
fn grid(stretches: &[Stretch]) -> [u32; 3] {
    let most = stretches.iter().map(|s| s.elems.len() as u64).max().unwrap_or(0);
    let blocks = most.div_ceil(WIDE * u64::from(THREADS)).clamp(1, MOST_BLOCKS);
    [blocks as u32, stretches.len().max(1) as u32, 1]
}
