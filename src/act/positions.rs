//! What masks leave of attention on each rank.

use crate::plan::visible::block_shape;
use crate::plan::*;
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// The positions of each rank asked for.
pub(super) type SpansOf = FxHashMap<u32, Rc<[Span]>>;

/// What the masks of a plan leave on each rank, its positions looked up rather than cut anew.
#[derive(Default)]
pub(super) struct Positions {
    /// Whole splits, and what each rank asked for holds of them.
    splits: Vec<(Segs, SpansOf)>,
    /// Attention, the merge or sum behind it, and backward, have the same block.
    known: FxHashMap<AttnBlock, Rc<[BlockShape]>>,
}

impl Positions {
    /// More shapes than this are not kept: blocks of very long rings.
    const MOST: usize = 1 << 16;

    /// What `block` is on each of `ranks`.
    pub(super) fn shapes(&mut self, block: &AttnBlock, views: &[Mesh], ranks: &[u32]) -> Rc<[BlockShape]> {
        if let Some(shapes) = self.known.get(block) {
            return shapes.clone();
        }
        let (q, kv) = (self.split(&block.q), self.split(&block.kv));
        let shape = |&rank: &u32| {
            let q = self.held(q, views, block.q.holder(views, rank));
            let kv = self.held(kv, views, block.kv.holder(views, rank));
            block_shape(&q, &kv, &block.mask)
        };
        let shapes: Rc<[BlockShape]> = ranks.iter().map(shape).collect();
        if self.known.len() * ranks.len() > Self::MOST {
            self.known.clear();
        }
        self.known.insert(block.clone(), shapes.clone());
        shapes
    }

    pub(super) fn held(&mut self, split: usize, views: &[Mesh], rank: u32) -> Rc<[Span]> {
        let (whole, held) = &mut self.splits[split];
        held.entry(rank).or_insert_with(|| whole.spans(views, rank).into()).clone()
    }

    pub(super) fn split(&mut self, segs: &Segs) -> usize {
        let same = |known: &Segs| {
            let of = |segs: &Segs| (segs.seq, segs.view, segs.part);
            of(known) == of(segs) && known.order == segs.order && known.documents == segs.documents
        };
        self.splits.iter().position(|(known, _)| same(known)).unwrap_or_else(|| {
            self.splits.push((segs.shifted(segs.shift.0, 0), FxHashMap::default()));
            self.splits.len() - 1
        })
    }
}
