//! Norms, rotary embedding, and kernels that take one element at a time.

use super::super::source;
use super::{Arg, Lowering, Where, ints, live, table};
use crate::error::Result;
use crate::plan::foreach::ForeachKernel;
use crate::plan::{Adam, Dtype, Kernel};
use crate::spec::Turning;

/// Shared bytes of a sum over a block of threads.
pub(super) const SCRATCH: u32 = 128;
/// The number of blocks that each sum some rows; their sums are added up after.
pub(super) const PARTS: u64 = 264;

impl Lowering<'_> {
    pub(super) fn norm(&mut self, [rows, cols]: [u64; 2], centred: bool, bias: bool, eps: f64) -> Result<()> {
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)];
        args.extend(ints(&[rows, cols, u64::from(centred), u64::from(bias)]));
        args.push(Arg::Real(eps));
        let (defines, blocks) = (self.typed(&[0, 1], &[0])?, rows.clamp(1, super::MOST_BLOCKS) as u32);
        self.launch((source::norm, "row_norm"), defines, [blocks, 1, 1], SCRATCH, args);
        Ok(())
    }

    pub(super) fn norm_bwd(&mut self, [rows, cols]: [u64; 2], centred: bool, bias: bool, eps: f64) -> Result<()> {
        let width = if bias { 2 * cols } else { cols };
        let blocks = rows.clamp(1, PARTS);
        let parts = self.scratch(blocks * width * 4);
        // The residual's gradient has been copied to dx where it stood elsewhere.
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Read(2), Arg::Write(0), Arg::Write(0), parts.clone()];
        args.extend(ints(&[rows, cols, u64::from(centred), u64::from(bias)]));
        args.push(Arg::Real(eps));
        let mut defines = self.typed(&[0, 1, 2], &[0])?;
        defines.extend(self.types(&[("R", 3, self.writes[0])])?);
        self.launch((source::norm, "row_norm_bwd"), defines, [blocks as u32, 1, 1], SCRATCH, args);
        self.add_columns(parts, Dtype::F32, Arg::Write(1), self.writes[1], [blocks, width])
    }

    pub(super) fn add_columns(
        &mut self,
        x: Arg,
        from: Dtype,
        sum: Arg,
        to: Dtype,
        [rows, cols]: [u64; 2],
    ) -> Result<()> {
        let defines = self.types(&[("R", 0, from), ("W", 0, to)])?;
        let mut args = vec![x, sum];
        args.extend(ints(&[rows, cols]));
        // A block has 32 columns.
        let blocks = cols.div_ceil(32).clamp(1, super::MOST_BLOCKS) as u32;
        self.launch((source::norm, "add_columns"), defines, [blocks, 1, 1], 4 * super::THREADS, args);
        Ok(())
    }

    pub(super) fn bias_bwd(&mut self, rows: u64, cols: u64) -> Result<()> {
        let blocks = rows.clamp(1, PARTS);
        let parts = self.scratch(blocks * cols * 4);
        let mut args = vec![Arg::Read(0), parts.clone()];
        args.extend(ints(&[rows, cols]));
        let defines = self.typed(&[0], &[])?;
        self.launch((source::norm, "column_parts"), defines, [blocks as u32, 1, 1], 0, args);
        self.add_columns(parts, Dtype::F32, Arg::Write(0), self.writes[0], [blocks, cols])
    }

    pub(super) fn rope(&mut self, kernel: &Kernel, on: Where) -> Result<()> {
        let Kernel::Rope { segs, documents, batch, heads, kv_heads, head_dim, theta, backward, rotary, scaling } =
            kernel
        else {
            return Err(self.refuse("is no rotary embedding"));
        };
        let rotary = rotary.unwrap_or(*head_dim);
        let turning = Turning::new(*theta, scaling.as_ref(), rotary, documents.longest(segs.seq));
        let (turns, len) = super::heads::turns((segs, documents), on, &turning);
        let rows = batch * len;
        let (name, operands, defines) = if *backward {
            ("rope_bwd", vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)], self.typed(&[0, 1], &[0])?)
        } else {
            ("rope", vec![Arg::Read(0), Arg::Write(0), Arg::Write(1)], self.typed(&[0], &[0, 1])?)
        };
        let mut args = operands;
        args.push(turns);
        args.extend(ints(&[rows, len, *heads, *kv_heads, *head_dim, rotary]));
        // Most shapes take fewer threads, each of which has eight pairs of eight heads; threads stride over what there is.
        self.spread((source::rope, name), defines, rows * (heads + 2 * kv_heads) * (head_dim - rotary / 2) / 32, args);
        Ok(())
    }

    /// Launches a kernel that goes element by element: operands in order, then sizes.
    pub(super) fn pointwise(&mut self, kernel: &Kernel, on: Where, step: u64) -> Result<()> {
        let all_reads: Vec<usize> = (0..self.reads.len()).collect();
        let simple = |name, reads: usize, sizes: &[u64]| {
            let mut args: Vec<Arg> = (0..reads).map(Arg::Read).collect();
            args.push(Arg::Write(0));
            args.extend(ints(sizes));
            (name, args, sizes.iter().product::<u64>())
        };
        let (name, args, elems) = match kernel {
            Kernel::SwiGlu { rows, cols } => simple("swiglu", 1, &[*rows, *cols]),
            Kernel::SwiGluBwd { rows, cols } => simple("swiglu_bwd", 2, &[*rows, *cols]),
            Kernel::Gelu { elems } => simple("gelu", 1, &[*elems]),
            Kernel::GeluBwd { elems } => simple("gelu_bwd", 2, &[*elems]),
            Kernel::Relu2 { elems } => simple("relu2", 1, &[*elems]),
            Kernel::Relu2Bwd { elems } => simple("relu2_bwd", 2, &[*elems]),
            Kernel::Cast { elems } => simple("cast", 1, &[*elems]),
            Kernel::Fill { elems } => simple("fill", 0, &[*elems]),
            Kernel::DropoutBwd { elems, probability } => {
                let (name, mut args, elems) = simple("dropout_bwd", 2, &[*elems]);
                args.push(Arg::Real(*probability));
                (name, args, elems)
            }
            Kernel::Add { elems, trim } => self.add(*elems, trim.as_ref(), on),
            // Streams have the edges of the plan; the CPU is not held up.
            Kernel::Wait { .. } => return Ok(()),
            Kernel::Residual { rows, cols, .. } => return self.residual(kernel, on, *rows, *cols),
            Kernel::Adam { .. } => return self.adam(kernel, step),
            Kernel::Foreach(kernel) => return self.foreach(kernel, step),
            _ => return Err(self.refuse("it is not lowered yet")),
        };
        let defines = self.typed(&all_reads, &[0])?;
        self.spread((source::pointwise, name), defines, elems.div_ceil(8), args);
        Ok(())
    }

    fn add(
        &self,
        elems: u64,
        trim: Option<&(crate::plan::AttnBlock, crate::plan::Side)>,
        on: Where,
    ) -> (&'static str, Vec<Arg>, u64) {
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)];
        let (list, count, cols) = match trim {
            None => (Arg::Null, 1, elems),
            Some((block, side)) => {
                let segs = if *side == crate::plan::Side::Q { &block.q } else { &block.kv };
                let rows = live(block, *side, on);
                (table(&rows), rows.len() as u64, elems / (block.batch * segs.len(on.views)))
            }
        };
        args.push(list);
        args.extend(ints(&[count, cols]));
        ("add", args, count * cols)
    }

    fn residual(&mut self, kernel: &Kernel, on: Where, rows: u64, cols: u64) -> Result<()> {
        let Kernel::Residual { biases, dropout, .. } = kernel else {
            return Err(self.refuse("is no residual"));
        };
        if *biases > 2 {
            return Err(self.refuse(&format!("it adds {biases} biases, more than 2")));
        }
        let bias = |i: u64| if i < *biases { Arg::Read(2 + i as usize) } else { Arg::Null };
        let mut args = vec![Arg::Read(0), Arg::Read(1), bias(0), bias(1), Arg::Write(0)];
        let (salt, probability) = dropout.as_ref().map_or((0, 0.0), |d| (d.salt, d.probability));
        match dropout {
            Some(d) => args.extend([Arg::Write(1), table(&d.positions(on.views, on.rank, rows))]),
            None => args.extend([Arg::Null, Arg::Null]),
        }
        args.extend(ints(&[rows, cols, salt]));
        args.push(Arg::Real(probability));
        let (reads, writes): (Vec<usize>, Vec<usize>) =
            ((0..self.reads.len()).collect(), (0..self.writes.len()).collect());
        let defines = self.typed(&reads, &writes)?;
        self.spread((source::pointwise, "residual"), defines, (rows * cols).div_ceil(8), args);
        Ok(())
    }

    fn adam(&mut self, kernel: &Kernel, step: u64) -> Result<()> {
        let &Kernel::Adam { elems, lr, beta1, beta2, eps, weight_decay } = kernel else {
            return Err(self.refuse("is no optimizer"));
        };
        let cast = if self.writes.len() == 4 { Arg::Write(3) } else { Arg::Null };
        let mut args = vec![Arg::Read(0), Arg::Write(0), Arg::Write(1), Arg::Write(2), cast, Arg::Int(elems as i64)];
        args.extend(adam_args(&Adam { lr, beta1, beta2, eps, weight_decay }, step));
        let writes: Vec<usize> = (0..self.writes.len()).collect();
        let defines = self.typed(&[0], &writes)?;
        self.spread((source::pointwise, "adam"), defines, elems.div_ceil(8), args);
        Ok(())
    }

    fn foreach(&mut self, kernel: &ForeachKernel, step: u64) -> Result<()> {
        let [lr, beta1, beta2, eps, unbias, stays] = adam_args(kernel.adam(), step);
        let writes: Vec<usize> = (0..self.writes.len()).collect();
        let (elems, args, reads): (u64, Vec<Arg>, &[usize]) = match *kernel {
            ForeachKernel::Moments { elems, .. } => {
                let operands = vec![Arg::Read(0), Arg::Write(0), Arg::Write(1), Arg::Write(2), Arg::Int(elems as i64)];
                (elems, [operands, vec![beta1, beta2, eps, unbias]].concat(), &[0])
            }
            ForeachKernel::Move { elems, .. } => {
                let cast = if writes.len() == 2 { Arg::Write(1) } else { Arg::Null };
                let operands = vec![Arg::Write(0), Arg::Read(1), Arg::Read(2), cast, Arg::Int(elems as i64)];
                (elems, [operands, vec![lr, stays]].concat(), &[1, 2])
            }
        };
        let defines = self.typed(reads, &writes)?;
        self.spread((source::pointwise, kernel.name()), defines, elems.div_ceil(8), args);
        Ok(())
    }
}

/// What kernels with AdamW in them take of a step: lr and the second moment's factor are corrected for having started at
/// zero; the last is what weight decay leaves of a weight.
pub(super) fn adam_args(adam: &Adam, step: u64) -> [Arg; 6] {
    let &Adam { lr, beta1, beta2, eps, weight_decay } = adam;
    let [mean, square] = [beta1, beta2].map(|beta| 1.0 - beta.powf(step as f64));
    [lr / mean, beta1, beta2, eps, 1.0 / square, 1.0 - lr * weight_decay].map(Arg::Real)
}
