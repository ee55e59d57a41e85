//! Weights of layers that are gathered ahead of a step, beside its first passes.

use super::Kind;
use crate::plan::{Arg, Buf, Builder, each};
use crate::strategy::data::{DataParallel, FlatWeights};
use std::ops::Range;

impl Kind {
    /// Writes the block that gathers the weights of one layer, if ranks keep shares of them.
    pub fn write_ahead(&mut self, b: &mut Builder, ranks: [&DataParallel; 2]) {
        let parts: Vec<_> = self.gathered_ahead(ranks).map(|(label, dp, w, bufs)| (label, dp, *w, bufs)).collect();
        if parts.is_empty() {
            return;
        }
        b.open(&format!("{}gather", self.prefix));
        for (label, dp, w, [kept, share, _]) in parts {
            let mut formal = |name: &str| b.formal(&format!("{name}{label}"));
            let own = (kept != share).then(|| formal("master"));
            let [share, whole] = ["w_share", "w"].map(formal);
            dp.gather_ahead(b, label, &w, [own.unwrap_or(share), share, whole]);
        }
        self.ahead = b.close();
    }

    /// Gathers the weights of the layers in these slots, of `layers` that a rank has of the kind, those of the first one first.
    pub fn call_ahead(&self, b: &mut Builder, ranks: [&DataParallel; 2], slots: Range<u32>, layers: u32) {
        let touched = self.gathered_ahead(ranks).flat_map(|(_, _, _, [kept, share, whole])| {
            let own = (kept != share).then_some(kept);
            own.into_iter().chain([share, whole])
        });
        let args: Vec<Arg> = touched.map(|buf| each(buf, slots.start as i32, 1, layers)).collect();
        if !slots.is_empty() && !args.is_empty() {
            let at = if slots.len() < layers as usize { format!(".{}", slots.start) } else { String::new() };
            b.call(&format!("{}gather{at}", self.prefix), self.ahead, slots.len() as u32, &args);
        }
    }

    /// What is gathered of a layer: what the rank keeps, its share, and the whole.
    fn gathered_ahead<'k>(
        &'k self,
        [dp, edp]: [&'k DataParallel; 2],
    ) -> impl Iterator<Item = (&'static str, &'k DataParallel, &'k FlatWeights, [Buf; 3])> {
        [("", dp, Some(&self.flat)), ("_experts", edp, self.experts.as_ref())].into_iter().filter_map(
            |(label, ranks, flat)| {
                let [kept, share] = ranks.gathered_ahead(flat?)?;
                Some((label, ranks, flat?, [kept, share, flat?.weight]))
            },
        )
    }
}
