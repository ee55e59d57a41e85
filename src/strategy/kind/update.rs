//! Layers of a kind whose weights Adam updates.

use super::Kind;
use crate::plan::{Adam, Arg, Buf, Builder, each};
use crate::strategy::data::{DataParallel, FlatWeights, Sweep};

impl Kind {
    /// Writes the blocks that run Adam on the weights of one layer.
    pub fn write_updates(&mut self, b: &mut Builder, ranks: [&DataParallel; 2], adam: Adam) {
        for &sweep in ranks[0].sweeps() {
            b.open(&self.update_named(sweep));
            for (label, dp, w) in self.updates(ranks) {
                let named = |name: &str| if label.is_empty() { name.into() } else { format!("{name}_{label}") };
                let formals: Vec<(Buf, Buf)> =
                    dp.updated(w, sweep).into_iter().map(|(name, buf)| (buf, b.formal(&named(name)))).collect();
                let of = |buf: Buf| formals.iter().find(|(whose, _)| *whose == buf).map_or(buf, |(_, formal)| *formal);
                dp.update(b, label, &DataParallel::renamed(w, of), 0, adam, sweep);
            }
            self.update.push(b.close());
        }
    }

    /// Does a sweep of Adam on the weights of `layers` layers, those of the last layer first: their gradients are there first.
    pub fn call_update(&self, b: &mut Builder, ranks: [&DataParallel; 2], layers: u32, sweep: Sweep) {
        let touched = self.updates(ranks).flat_map(|(_, dp, w)| dp.updated(w, sweep));
        let args: Vec<Arg> = touched.map(|(_, buf)| each(buf, layers as i32 - 1, -1, layers)).collect();
        let block = ranks[0].sweeps().iter().position(|own| *own == sweep).map(|at| self.update[at]);
        if let Some(block) = block.filter(|_| layers > 0) {
            b.call(&self.update_named(sweep), block, layers, &args);
        }
    }

    fn update_named(&self, sweep: Sweep) -> String {
        let part = match sweep {
            Sweep::Whole => "",
            Sweep::Moments => "_moments",
            Sweep::Move => "_weights",
        };
        format!("{}update{part}", self.prefix)
    }

    pub(super) fn updates<'k>(
        &'k self,
        [dp, edp]: [&'k DataParallel; 2],
    ) -> impl Iterator<Item = (&'static str, &'k DataParallel, &'k FlatWeights)> {
        [("", dp, Some(&self.flat)), ("experts", edp, self.experts.as_ref())]
            .into_iter()
            .filter_map(|(label, ranks, flat)| Some((label, ranks, flat?)))
    }
}
