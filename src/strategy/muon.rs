//! Muon over the ranks that share weights out (see [`crate::plan::muon`]). Each rank has a slice of every layer, and
//! orthogonal factors need whole matrices. So ranks exchange slices: of as many layers as there are ranks each rank
//! gets one whole, works on its matrices, and sends every rank its slice of the result, in the dtype of the weights (as
//! Microsoft's Dion does it for sharded weights; Megatron-LM's layer-wise optimizer keeps whole matrices where they are
//! made instead). Momenta and weights stay where Adam has them: a step moves two slices of every layer a rank more than
//! Adam's.
//!
//! Where there are more ranks than layers the others work on zeros, with which Dion fills up, too; where nothing is
//! shared out every rank works on all layers. Tensor parallelism leaves a rank a part of each matrix, and that part is
//! orthogonalised by itself (Megatron-LM's blockwise mode).

use super::data::{DataParallel, FlatWeights};
use super::weights::Weights;
use crate::plan::muon::{MOMENTUM, Matrices, MuonKernel, Part, STEPS};
use crate::plan::{Adam, BlockId, Buf, Builder, Dtype, Kernel, TensorKind};

/// Matrices of one size that go through the steps of Newton and Schulz together, at most.
const BATCH: u64 = 8;

/// Rounds of layers that have room at a time: one on its way while another is worked on.
const TURNS: u32 = 2;

/// The matrices of weights, in the parts that the ranks have of them.
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

/// The buffers that Muon works in.
#[derive(Clone, Copy)]
pub struct Room {
    /// Slices of layers, to be exchanged, a slot for each turn.
    slices: Buf,
    /// A whole layer, a slot for each turn.
    whole: Buf,
    /// The matrices of the next step, and Gram matrices.
    next: Buf,
    grams: [Buf; 2],
}

impl Room {
    /// Buffers large enough for each of `all`: flat weights, the ranks that hold the same, and where matrices stand in
    /// a rank's part.
    pub fn new(b: &mut Builder, all: &[(&DataParallel, &FlatWeights, &Part)], dtype: Dtype) -> Room {
        let most =
            |of: &dyn Fn(&(&DataParallel, &FlatWeights, &Part)) -> u64| all.iter().map(of).max().unwrap_or(0).max(1);
        let batches =
            |of: &dyn Fn(&Matrices) -> u64| most(&|(.., part)| batches(part).map(|m| of(&m)).max().unwrap_or(0));
        let turns = if all.iter().any(|(dp, ..)| dp.parts() > 1) { TURNS } else { 1 };
        let mut room = |name: &str, elems, turns| b.tensor(name, &[elems], dtype, TensorKind::Workspace, turns);
        Room {
            slices: room("muon_slices", most(&|(dp, w, _)| if dp.parts() > 1 { w.elems } else { 0 }), turns),
            whole: room("muon_whole", most(&|(_, w, _)| w.elems), turns),
            next: room("muon_next", batches(&Matrices::elems), 1),
            grams: ["muon_gram", "muon_square"].map(|name| room(name, batches(&Matrices::gram_elems), 1)),
        }
    }
}

/// The matrices of a part in batches that are worked on together.
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
        let mut run =
            |kernel: MuonKernel, reads: &[Buf], to: Buf| b.compute(kernel.name(), Kernel::Muon(kernel), reads, &[to]);
        run(MuonKernel::Normalise { of }, &[x[0]], x[1]);
        for _ in 0..STEPS {
            x.reverse();
            run(MuonKernel::Gram { of }, &[x[0]], gram);
            run(MuonKernel::Square { of }, &[gram], square);
            run(MuonKernel::Apply { of }, &[x[0], square], x[1]);
        }
        // With an odd number of steps behind the first move the result ends where the input began.
        const { assert!(STEPS % 2 == 1) };
    }
    b.close()
}

/// The layers of one kind, and what their update needs.
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
    /// Updates `layers` layers, the last first: the next slices are on their way while matrices are worked on.
    pub fn update(&self, b: &mut Builder, prefix: &str, layers: u32) {
        let slots: Vec<u32> = (0..layers).rev().collect();
        let rounds: Vec<&[u32]> = slots.chunks(self.dp.parts() as usize).collect();
        let ahead = self.dp.parts() > 1;
        for (at, round) in rounds.iter().enumerate() {
            if at == 0 || !ahead {
                self.gather(b, prefix, at, round);
            }
            if let Some(next) = rounds.get(at + 1).filter(|_| ahead) {
                self.gather(b, prefix, at + 1, next);
            }
            self.step(b, prefix, at, round);
        }
    }

    /// The buffers of a round: slices of its layers, and whole ones.
    fn places(&self, round: usize) -> [Buf; 2] {
        let turn = if self.dp.parts() > 1 { round as u32 % TURNS } else { 0 };
        [self.room.slices, self.room.whole].map(|buf| buf.slot(turn).rows(0, self.weights.elems))
    }

    /// The rank's slice of one of the layers of a round; a part of the whole layer where the rank has all of it.
    fn slice(&self, round: usize, at: usize) -> Buf {
        let [slices, whole] = self.places(round);
        let share = self.part.elems;
        let of = if self.dp.parts() > 1 { slices } else { whole };
        of.rows(at as u64 * share, (at as u64 + 1) * share)
    }

    /// Makes the momenta of the layers of a round, of which each rank has its slices, and gives each rank one of the
    /// layers whole.
    fn gather(&self, b: &mut Builder, prefix: &str, round: usize, layers: &[u32]) {
        let parts = self.dp.parts() as usize;
        for (at, &slot) in layers.iter().enumerate() {
            self.dp.own_gradient(b, &format!("own_grad.{prefix}{slot}"), self.weights, slot);
            let kernel = Kernel::Muon(MuonKernel::Momentum { part: self.part.clone(), momentum: MOMENTUM });
            let [g, m] = self.dp.momentum_of(self.weights, slot);
            b.compute(&format!("muon_momentum.{prefix}{slot}"), kernel, &[g, m], &[m, self.slice(round, at)]);
        }
        if parts == 1 {
            return;
        }
        let ([slices, whole], name) = (self.places(round), format!("{prefix}{}", layers[0]));
        let rest = self.part.elems * (parts - layers.len()) as u64;
        if rest > 0 {
            let none = slices.rows(self.weights.elems - rest, self.weights.elems);
            b.compute(&format!("muon_fill.{name}"), Kernel::Fill { elems: rest }, &[], &[none]);
        }
        self.dp.exchange(b, &format!("muon_gather.{name}"), slices, whole);
    }

    /// Sends the orthogonal factors of the layer that a rank has back to all, and updates their slices.
    fn step(&self, b: &mut Builder, prefix: &str, round: usize, layers: &[u32]) {
        let ([slices, whole], name) = (self.places(round), format!("{prefix}{}", layers[0]));
        let Room { next, grams: [gram, square], .. } = self.room;
        b.call(&format!("orthogonalise.{name}"), self.chain, 1, &[whole, next, gram, square].map(Into::into));
        if self.dp.parts() > 1 {
            self.dp.exchange(b, &format!("muon_scatter.{name}"), whole, slices);
        }
        for (at, &slot) in layers.iter().enumerate() {
            let kernel = Kernel::Muon(MuonKernel::Update { part: self.part.clone(), adam: self.adam });
            let by = self.slice(round, at);
            self.dp.move_by(b, &format!("muon_update.{prefix}{slot}"), self.weights, slot, kernel, by);
            self.dp.gather_new(b, &format!("all_gather.{prefix}{slot}"), self.weights, slot);
        }
    }
}
