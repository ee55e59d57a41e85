//! What masks leave of attention on each rank.

use crate::plan::visible::block_shape;
use crate::plan::*;
use rustc_hash::FxHashMap;
use std::rc::Rc;

/// Spans of positions, by rank that was asked for.
pub(super) type SpansOf = FxHashMap<u32, Rc<[Span]>>;

/// The shapes that the masks of a plan leave on each rank, positions being remembered rather than cut anew.
#[derive(Default)]
pub(super) struct Positions {
    /// Splits of whole sequences, each with the spans of the ranks that were asked for.
    splits: Vec<(Segs, SpansOf)>,
    /// The shapes of each block on every class: attention, the merge or sum behind it, and its backward pass have one
    /// block.
    known: FxHashMap<AttnBlock, Rc<[BlockShape]>>,
}

impl Positions {
    /// Shapes that are kept, at most: long rings have many blocks.
    const MOST: usize = 1 << 16;

    /// The shape that the mask leaves of `block` on each of `ranks`.
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
