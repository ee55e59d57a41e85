//! Norms of heads, and what latent attention needs beside products and attention.

use super::super::source;
use super::rows::{PARTS, SCRATCH};
use super::{Arg, Lowering, MOST_BLOCKS, THREADS, Where, ints, table};
use crate::error::Result;
use crate::plan::{Dtype, Kernel, Segs};
use crate::spec::{Documents, Turning};

/// A table of cos and sin of every position and pair, [len, rotary/2, 2]: made in f64, since the angle of a far
/// position has no digits left in a float. Scaled angles have not run on a GPU yet; the kernels that read the table are
/// the ones that read it unscaled.
pub(super) fn turns((segs, documents): (&Segs, &Documents), on: Where, turning: &Turning) -> (Arg, u64) {
    let Turning { speeds, factor } = turning;
    let positions = segs.positions(on.views, on.rank);
    let angles = positions
        .iter()
        .map(|&at| (at - documents.around(at).start) as f64)
        .flat_map(|at| speeds.iter().map(move |speed| at * speed));
    let turns: Vec<f32> = angles.flat_map(|angle| [angle.cos(), angle.sin()].map(|x| (factor * x) as f32)).collect();
    (table(&turns), positions.len() as u64)
}

impl Lowering<'_> {
    /// The norm of heads. q and k are changed where they are: they have been copied there.
    pub(super) fn head_norm(&mut self, kernel: &Kernel) -> Result<()> {
        let &Kernel::HeadNorm { rows, heads, kv_heads, head_dim, eps } = kernel else {
            return Err(self.refuse("is no norm of heads"));
        };
        let mut args = vec![Arg::Write(0), Arg::Read(1), Arg::Write(1)];
        args.extend(ints(&[rows, heads, kv_heads, head_dim]));
        args.push(Arg::Real(eps));
        let defines = self.typed(&[1], &[0, 1])?;
        self.spread((source::head_norm, "head_norm"), defines, rows * (heads + kv_heads) * 32, args);
        Ok(())
    }

    pub(super) fn head_norm_bwd(&mut self, kernel: &Kernel) -> Result<()> {
        let &Kernel::HeadNormBwd { rows, heads, kv_heads, head_dim, eps } = kernel else {
            return Err(self.refuse("is no norm of heads"));
        };
        // Each of a block's warps has a dw of its own, in the 48 KB that every GPU has.
        let (shared, most) = (u64::from(THREADS / 32) * 2 * head_dim * 4, 48 << 10);
        if shared > most {
            return Err(self.refuse(&format!("head_dim {head_dim} is more than 768")));
        }
        let blocks = rows.clamp(1, PARTS);
        let parts = self.scratch(blocks * 2 * head_dim * 4);
        let mut args = vec![Arg::Write(0), Arg::Read(1), Arg::Read(2), parts.clone()];
        args.extend(ints(&[rows, heads, kv_heads, head_dim]));
        args.push(Arg::Real(eps));
        let defines = self.typed(&[1, 2], &[0])?;
        self.launch((source::head_norm, "head_norm_bwd"), defines, [blocks as u32, 1, 1], shared as u32, args);
        self.add_columns(parts, Dtype::F32, Arg::Write(1), self.writes[1], [blocks, 2 * head_dim])
    }

    pub(super) fn latent_norm(&mut self, kernel: &Kernel) -> Result<()> {
        let &Kernel::LatentNorm { rows, cols, rest, eps } = kernel else {
            return Err(self.refuse("is no norm of a part of a row"));
        };
        let behind = if rest > 0 { Arg::Write(1) } else { Arg::Null };
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0), behind];
        args.extend(ints(&[rows, cols, rest]));
        args.push(Arg::Real(eps));
        let writes: Vec<usize> = (0..self.writes.len()).collect();
        let (defines, blocks) = (self.typed(&[0, 1], &writes)?, rows.clamp(1, MOST_BLOCKS) as u32);
        self.launch((source::latent, "latent_norm"), defines, [blocks, 1, 1], SCRATCH, args);
        Ok(())
    }

    pub(super) fn latent_norm_bwd(&mut self, kernel: &Kernel) -> Result<()> {
        let &Kernel::LatentNormBwd { rows, cols, rest, eps } = kernel else {
            return Err(self.refuse("is no norm of a part of a row"));
        };
        let blocks = rows.clamp(1, PARTS);
        let parts = self.scratch(blocks * cols * 4);
        let behind = if rest > 0 { Arg::Read(4) } else { Arg::Null };
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Read(3), behind, Arg::Write(0), parts.clone()];
        args.extend(ints(&[rows, cols, rest]));
        args.push(Arg::Real(eps));
        let reads = if rest > 0 { vec![0, 1, 3, 4] } else { vec![0, 1, 3] };
        let defines = self.typed(&reads, &[0])?;
        self.launch((source::latent, "latent_norm_bwd"), defines, [blocks as u32, 1, 1], SCRATCH, args);
        self.add_columns(parts, Dtype::F32, Arg::Write(1), self.writes[1], [blocks, cols])
    }

    pub(super) fn latent_rope(&mut self, kernel: &Kernel, on: Where) -> Result<()> {
        let Kernel::LatentRope { segs, documents, batch, heads, nope, rope, v, theta, backward, scaling } = kernel
        else {
            return Err(self.refuse("is no latent attention"));
        };
        if [nope, rope, v].into_iter().any(|n| n % 2 != 0) {
            return Err(self.refuse(&format!("heads of {nope} + {rope} and values of {v} are not all even")));
        }
        let turning = Turning::new(*theta, scaling.as_ref(), *rope, documents.longest(segs.seq));
        let (turns, len) = turns((segs, documents), on, &turning);
        let reads: Vec<usize> = (0..self.reads.len()).collect();
        let writes: Vec<usize> = (0..self.writes.len()).collect();
        let defines = self.typed(&reads, &writes)?;
        let mut args: Vec<Arg> = reads.into_iter().map(Arg::Read).collect();
        args.extend(writes.into_iter().map(Arg::Write));
        args.push(turns);
        let rows = batch * len;
        args.extend(ints(&[rows, len, *heads, *nope, *rope, *v]));
        let name = if *backward { "latent_rope_bwd" } else { "latent_rope" };
        self.spread((source::latent, name), defines, rows * heads * (nope + rope + v), args);
        Ok(())
    }
}
