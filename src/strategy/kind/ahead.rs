//! Weights of layers that are gathered ahead of a step, beside its first passes.

use super::Kind;
use crate::plan::{Arg, Buf, Builder, each};
use crate::strategy::data::{DataParallel, FlatWeights};

impl Kind {
    /// Writes the block that gathers the weights of one layer, if ranks keep shares of them.
    pub fn write_ahead(&mut self, b: &mut Builder, ranks: [&DataParallel; 2]) {
        let parts: Vec<_> = self.gathered_ahead(ranks).map(|(label, dp, w, _)| (label, dp, *w)).collect();
        if parts.is_empty() {
            return;
        }
        b.open(&format!("{}gather", self.prefix));
        for (label, dp, w) in parts {
            let [share, whole] = ["w_share", "w"].map(|name| b.formal(&format!("{name}{label}")));
            dp.gather(b, &format!("all_gather{label}"), &w, [share, whole]);
        }
        self.ahead = b.close();
    }

    /// Gathers the weights of `layers` layers, those of the first one first.
    pub fn call_ahead(&self, b: &mut Builder, ranks: [&DataParallel; 2], layers: u32) {
        let touched = self.gathered_ahead(ranks).flat_map(|(_, _, w, share)| [share, w.weight]);
        let args: Vec<Arg> = touched.map(|buf| each(buf, 0, 1, layers)).collect();
        if layers > 0 && !args.is_empty() {
            b.call(&format!("{}gather", self.prefix), self.ahead, layers, &args);
        }
    }

    fn gathered_ahead<'k>(
        &'k self,
        [dp, edp]: [&'k DataParallel; 2],
    ) -> impl Iterator<Item = (&'static str, &'k DataParallel, &'k FlatWeights, Buf)> {
        [("", dp, Some(&self.flat)), ("_experts", edp, self.experts.as_ref())]
            .into_iter()
            .filter_map(|(label, ranks, flat)| Some((label, ranks, flat?, ranks.gathered_ahead(flat?)?)))
    }
}
