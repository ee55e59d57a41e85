//! The two ends of the model: embeddings and cross-entropy.

use super::super::source;
use super::{Arg, Lowering, Where, ints, table};
use crate::error::Result;
use crate::plan::{Axis, Dtype, Kernel, dropout};

/// Shared bytes of a sum over a block of threads, in floats and in doubles.
const FLOATS: u32 = 128;
const DOUBLES: u32 = 8 * super::THREADS;

impl Lowering<'_> {
    pub(super) fn ends(&mut self, kernel: &Kernel, on: Where) -> Result<()> {
        match kernel {
            &Kernel::Embed { rows, cols, vocab, shard } => {
                self.must_be("ids", self.reads[0], Dtype::U32)?;
                let args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)];
                self.table("embed", args, (&[1], &[0]), [rows, cols, first(shard, vocab, on), vocab])
            }
            &Kernel::EmbedBwd { rows, cols, vocab, shard } => {
                self.must_be("ids", self.reads[0], Dtype::U32)?;
                self.must_be("dtable", self.writes[0], Dtype::F32)?;
                let args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)];
                self.table("embed_bwd", args, (&[1], &[]), [rows, cols, first(shard, vocab, on), vocab])
            }
            Kernel::Positions { .. } => self.positions(kernel, on),
            &Kernel::LogSoftmax { rows, vocab } => {
                let mut args = vec![Arg::Read(0), Arg::Write(0)];
                args.extend(ints(&[rows, vocab]));
                let defines = self.typed(&[0], &[0])?;
                self.launch((source::loss, "log_softmax"), defines, rows_of(rows), FLOATS, args);
                Ok(())
            }
            &Kernel::LogSoftmaxBwd { rows, vocab } => {
                let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)];
                args.extend(ints(&[rows, vocab]));
                let defines = self.typed(&[0, 1], &[0])?;
                self.launch((source::loss, "log_softmax_bwd"), defines, rows_of(rows), FLOATS, args);
                Ok(())
            }
            _ => self.loss(kernel, on),
        }
    }

    fn table(
        &mut self,
        name: &'static str,
        mut args: Vec<Arg>,
        (r, w): (&[usize], &[usize]),
        sizes: [u64; 4],
    ) -> Result<()> {
        args.extend(ints(&sizes));
        let defines = self.typed(r, w)?;
        self.spread((source::loss, name), defines, sizes[0] * sizes[1], args);
        Ok(())
    }

    fn positions(&mut self, kernel: &Kernel, on: Where) -> Result<()> {
        let Kernel::Positions { segs, rows, cols, share, backward, .. } = kernel else {
            return Err(self.refuse("has no positions"));
        };
        let at = dropout::positions(segs, *share, on.views, on.rank, *rows);
        let (name, operands, defines) = if *backward {
            self.must_be("dtable", self.writes[0], Dtype::F32)?;
            ("positions_bwd", [Arg::Read(0), Arg::Write(0)], self.typed(&[0], &[])?)
        } else {
            ("positions", [Arg::Write(0), Arg::Read(1)], self.typed(&[1], &[0])?)
        };
        let mut args = operands.to_vec();
        args.push(table(&at));
        args.extend(ints(&[*rows, *cols]));
        self.spread((source::loss, name), defines, rows * cols, args);
        Ok(())
    }

    fn loss(&mut self, kernel: &Kernel, on: Where) -> Result<()> {
        self.must_be("targets", self.reads[1], Dtype::U32)?;
        match kernel {
            &Kernel::CrossEntropy { rows, vocab, scale } => {
                let losses = self.scratch(4 * rows);
                let mut args = vec![Arg::Write(0), Arg::Read(1), losses.clone()];
                args.extend(ints(&[rows, vocab, vocab]));
                args.push(Arg::Real(scale));
                let defines = self.typed(&[], &[0])?;
                self.launch((source::loss, "cross_entropy"), defines, rows_of(rows), FLOATS, args);
                self.add_loss(losses, rows)
            }
            &Kernel::Nll { rows, vocab, scale } => {
                let losses = self.scratch(4 * rows);
                let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0), losses.clone()];
                args.extend(ints(&[rows, vocab]));
                args.push(Arg::Real(scale));
                let defines = self.typed(&[0], &[0])?;
                self.launch((source::loss, "nll"), defines, rows_of(rows), 0, args);
                self.add_loss(losses, rows)
            }
            Kernel::VocabStats(part) => {
                self.must_be("stats", self.writes[0], Dtype::F32)?;
                let ids = part.ids(on.views, on.rank);
                let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)];
                args.extend(ints(&[part.rows, part.cols, ids.start, ids.end - ids.start]));
                let defines = self.typed(&[0], &[])?;
                self.launch((source::loss, "vocab_stats"), defines, rows_of(part.rows), FLOATS, args);
                Ok(())
            }
            Kernel::VocabCrossEntropy { part, ranks, scale } => {
                self.must_be("stats", self.reads[2], Dtype::F32)?;
                let (ids, losses) = (part.ids(on.views, on.rank), self.scratch(4 * part.rows));
                let mut args = vec![Arg::Write(0), Arg::Read(1), Arg::Read(2), losses.clone()];
                args.extend(ints(&[part.rows, part.cols, ids.start, ids.end - ids.start, *ranks]));
                args.push(Arg::Real(*scale));
                let defines = self.typed(&[], &[0])?;
                self.launch((source::loss, "vocab_cross_entropy"), defines, rows_of(part.rows), 0, args);
                self.add_loss(losses, part.rows)
            }
            _ => Err(self.refuse("it is not lowered yet")),
        }
    }

    fn add_loss(&mut self, losses: Arg, rows: u64) -> Result<()> {
        self.must_be("loss", self.writes[1], Dtype::F32)?;
        let args = vec![losses, Arg::Write(1), Arg::Int(rows as i64)];
        self.launch((source::loss, "add_loss"), vec![], [1, 1, 1], DOUBLES, args);
        Ok(())
    }
}

/// The grid of a kernel that has a block of threads for a row.
fn rows_of(rows: u64) -> [u32; 3] {
    [rows.clamp(1, super::MOST_BLOCKS) as u32, 1, 1]
}

/// The first of `own` rows that a rank has of what is shared along an axis.
fn first(shard: Option<Axis>, own: u64, on: Where) -> u64 {
    shard.map_or(0, |axis| u64::from(on.views[0].coord(on.rank, axis)) * own)
}
