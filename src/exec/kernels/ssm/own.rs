//! The part of weights that every rank has which goes with a rank's heads, where ranks share a sequence.

use crate::exec::kernels::exchange::Moved;
use crate::plan::Mesh;
use crate::plan::kernel::{HeadRanks, SsmKernel};
use crate::spec::MambaSpec;

/// Runs of the convolution's weights (operand 0) and of the heads' parameters (1) that go with the heads of `rank`: from
/// those of all heads here to a part of its own.
pub fn own(kernel: &SsmKernel, ranks: HeadRanks, views: &[Mesh], rank: u32) -> Vec<Moved> {
    let (all, here, place) = (&kernel.mamba, kernel.mamba.share(ranks.all()), ranks.place(views, rank));
    let group = place * all.groups / ranks.all();
    // The columns of x, of B and of C: where they begin among all, where in the part, and how many the part has.
    let columns = |m: &MambaSpec| [0, m.inner(), m.inner() + m.bc_cols()];
    let [x, bc] = [place * here.inner(), group * all.state];
    let cut: Vec<[u64; 3]> = (0..3)
        .map(|k| {
            let (first, count) = if k == 0 { (x, here.inner()) } else { (bc, here.bc_cols()) };
            [columns(all)[k] + first, columns(&here)[k], count]
        })
        .collect();
    let run = |operand: usize, [from, to, len]: [u64; 3]| {
        let [from, to, len] = [from, to, len].map(|n| n as usize);
        Moved { read: operand, from: Some(from), write: operand, to, len, turn: 0 }
    };
    let taps = cut.iter().map(|[from, to, len]| run(0, [from * all.conv, to * all.conv, len * all.conv]));
    let bias = [all, &here].map(|m| m.conv_cols() * m.conv);
    let biases = cut.iter().map(|[from, to, len]| run(0, [bias[0] + from, bias[1] + to, *len]));
    let heads = (0..3).map(|k| run(1, [k * all.heads + place * here.heads, k * here.heads, here.heads]));
    taps.chain(biases).chain(heads).collect()
}

/// The runs of [`own`] back to where they came from, to be added.
pub fn own_bwd(kernel: &SsmKernel, ranks: HeadRanks, views: &[Mesh], rank: u32) -> Vec<Moved> {
    let back = |moved: Moved| Moved { from: Some(moved.to), to: moved.from.unwrap_or(0), turn: 1, ..moved };
    own(kernel, ranks, views, rank).into_iter().map(back).collect()
}
