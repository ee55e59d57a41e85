//! Muon over the ranks that share weights out (see [`crate::plan::muon`]). Each has a slice of every layer, and orthogonal
//! factors need whole matrices. So ranks exchange: of as many layers as there are ranks each gets one whole, works on its
//! matrices, and sends every rank its slice of what came of them, in the dtype of the weights (as Microsoft's Dion does it for
//! sharded weights; Megatron-LM's layer-wise optimizer keeps whole matrices where they are made instead). Momenta and weights
//! stay where Adam has them: a step moves two slices of every layer a rank more than Adam's.
//!
//! Where there are more ranks than layers the others wait, and where nothing is shared out every rank works on all layers. Tensor
//! parallelism leaves a rank a part of each matrix, and that part is orthogonalised by itself (Megatron-LM's blockwise mode).

use super::data::{DataParallel, FlatWeights};
use super::weights::Weights;
use crate::plan::muon::{MOMENTUM, Matrices, MuonKernel, Part, STEPS};
use crate::plan::{Adam, BlockId, Buf, Builder, Dtype, Kernel, TensorKind};

/// Matrices that go through the steps of Newton and Schulz together, where they are of one size.
const BATCH: u64 = 8;

/// The matrices of weights, as the ranks have them.
pub fn matrices(weights: &Weights) -> Vec<Matrices> {
    let mut all: Vec<Matrices> = vec![];
    for next in weights.all.iter().flat_map(|w| w.matrices(weights.ranks())) {
        match all.last_mut() {
            Some(last)
                if last.range()[1] == next.from
                    && (last.rows, last.cols, last.longer) == (next.rows, next.cols, next.longer) =>
            {
                last.count += next.count;
            }
            _ => all.push(next),
        }
    }
    all
}

/// What it works in.
#[derive(Clone, Copy)]
pub struct Room {
    /// Slices of layers, to be exchanged.
    slices: Buf,
    /// A layer.
    whole: Buf,
    /// Matrices on their way, and their Gram matrices.
    next: Buf,
    grams: [Buf; 2],
}

impl Room {
    /// Enough for each of `all`: flat weights, the ranks that hold the same, and what is what in a rank's part of them.
    pub fn new(b: &mut Builder, all: &[(&DataParallel, &FlatWeights, &Part)], dtype: Dtype) -> Room {
        let most =
            |of: &dyn Fn(&(&DataParallel, &FlatWeights, &Part)) -> u64| all.iter().map(of).max().unwrap_or(0).max(1);
        let batches =
            |of: &dyn Fn(&Matrices) -> u64| most(&|(.., part)| batches(part).map(|m| of(&m)).max().unwrap_or(0));
        let mut room = |name: &str, elems| b.tensor(name, &[elems], dtype, TensorKind::Workspace, 1);
        Room {
            slices: room("muon_slices", most(&|(dp, w, _)| if dp.parts() > 1 { w.elems } else { 0 })),
            whole: room("muon_whole", most(&|(_, w, _)| w.elems)),
            next: room("muon_next", batches(&Matrices::elems)),
            grams: ["muon_gram", "muon_square"].map(|name| room(name, batches(&Matrices::gram_elems))),
        }
    }
}

/// Matrices that are worked on together.
fn batches(part: &Part) -> impl Iterator<Item = Matrices> + '_ {
    part.matrices.iter().flat_map(|of| {
        (0..of.count).step_by(BATCH as usize).map(move |first| Matrices {
            from: of.from + first * of.rows * of.cols,
            count: BATCH.min(of.count - first),
            ..*of
        })
    })
}

/// Writes the block that makes all matrices of a layer orthogonal where they are.
pub fn write_chain(b: &mut Builder, label: &str, part: &Part) -> BlockId {
    b.open(label);
    let [whole, next, gram, square] = ["whole", "next", "gram", "square"].map(|name| b.formal(name));
    for of in batches(part) {
        let [from, to] = of.range();
        let mut x = [whole.rows(from, to), next.rows(0, of.elems())];
        let [gram, square] = [gram, square].map(|buf| buf.rows(0, of.gram_elems()));
        let mut run = |kernel, reads: &[Buf], to: Buf| b.compute("", Kernel::Muon(kernel), reads, &[to]);
        run(MuonKernel::Normalise { of }, &[x[0]], x[1]);
        for _ in 0..STEPS {
            x.reverse();
            run(MuonKernel::Gram { of }, &[x[0]], gram);
            run(MuonKernel::Square { of }, &[gram], square);
            run(MuonKernel::Apply { of }, &[x[0], square], x[1]);
        }
        // An odd number of steps behind the first move: it ends where it began.
        const { assert!(STEPS % 2 == 1) };
    }
    b.close()
}

/// What updates the layers of one kind.
pub struct Layers<'s> {
    pub dp: &'s DataParallel,
    pub weights: &'s FlatWeights,
    pub part: &'s Part,
    /// The block of [`write_chain`].
    pub chain: BlockId,
    pub room: Room,
    pub adam: Adam,
}

impl Layers<'_> {
    /// Updates so many of them, the last first.
    pub fn update(&self, b: &mut Builder, prefix: &str, layers: u32) {
        let parts = self.dp.parts() as usize;
        let slots: Vec<u32> = (0..layers).rev().collect();
        let named = |what: &str, slot: u32| format!("{what}.{prefix}{slot}");
        for round in slots.chunks(parts) {
            let Room { slices, whole, next, grams } = self.room;
            let (elems, share) = (self.weights.elems, self.part.elems);
            let (slices, whole) = (slices.rows(0, elems), whole.rows(0, elems));
            let to = if parts > 1 { slices } else { whole };
            let slice = |at: usize| to.rows(at as u64 * share, (at as u64 + 1) * share);
            for (at, &slot) in round.iter().enumerate() {
                self.dp.own_gradient(b, &named("own_grad", slot), self.weights, slot);
                let kernel = MuonKernel::Momentum { part: self.part.clone(), momentum: MOMENTUM };
                let [g, m] = self.dp.momentum_of(self.weights, slot);
                b.compute(&named("muon_momentum", slot), Kernel::Muon(kernel), &[g, m], &[m, slice(at)]);
            }
            let rest = share * (parts - round.len()) as u64;
            if rest > 0 {
                b.compute(
                    &named("muon_fill", round[0]),
                    Kernel::Fill { elems: rest },
                    &[],
                    &[to.rows(elems - rest, elems)],
                );
            }
            let exchange = |b: &mut Builder, label: &str, from, to| {
                if parts > 1 {
                    self.dp.exchange(b, &named(label, round[0]), from, to);
                }
            };
            exchange(b, "muon_gather", slices, whole);
            let [gram, square] = grams;
            b.call(&named("orthogonalise", round[0]), self.chain, 1, &[whole, next, gram, square].map(Into::into));
            exchange(b, "muon_scatter", whole, slices);
            for (at, &slot) in round.iter().enumerate() {
                let kernel = Kernel::Muon(MuonKernel::Update { part: self.part.clone(), adam: self.adam });
                let label = named("muon_update", slot);
                self.dp.move_by(b, &label, self.weights, slot, kernel, slice(at));
                self.dp.gather_new(b, &named("all_gather", slot), self.weights, slot);
            }
        }
    }
}
