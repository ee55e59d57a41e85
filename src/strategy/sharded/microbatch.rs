//! A microbatch through a whole model whose weights or gradients come and go.

use super::{Passing, Run, Sites};
use crate::plan::*;
use crate::strategy::data::{DataParallel, FlatWeights};
use crate::strategy::layers::Stretch;
use crate::strategy::step::Step;

impl<'a> Step<'a> {
    /// A pass through the layers of a body, of which a rank keeps what `sites` name.
    pub(in crate::strategy) fn passing(
        &mut self,
        sites: Vec<Option<Sites>>,
        microbatch: u32,
        sums: bool,
    ) -> Passing<'_> {
        let Step { b, kinds, dp, edp, shared_blocks, whole, .. } = self;
        let (room, ranks) = (*whole, [&*dp, &*edp]);
        Passing { b, kinds, ranks, blocks: shared_blocks, sites, room, microbatch, sums }
    }

    fn sites(&self) -> Vec<Option<Sites>> {
        let ranks = [&self.dp, &self.edp];
        let of = |kind: &super::Kind| {
            let [weights, gradients] = kind.kept(ranks);
            Some(Sites { weights, gradients, sums: Some(kind.shares(ranks)) })
        };
        self.kinds.iter().map(of).collect()
    }

    pub(in crate::strategy) fn sharded_microbatch_block(&mut self, name: &str, last: bool, m: u32) -> BlockId {
        let sums = last && self.sums_last();
        self.b.open(name);
        let [tokens, targets] = ["tokens", "targets"].map(|name| self.b.formal(name));
        let l = self.layer_count();
        self.gather_embed("gather.embed");
        self.copy_embed();
        self.embed_forward(tokens, self.x.first());
        if self.sharers().any(DataParallel::shares_weights) {
            self.gathered_forward(m);
        } else {
            self.call_forward(m);
        }
        self.copy_head();
        for (label, w) in [("clear.embed", self.embed), ("clear.head", self.head)] {
            self.clear(label, &w);
        }
        self.head(targets, self.x.last(), self.dx);
        self.scatter_head();
        if sums && !self.dp.shares_gradients() {
            self.sync_head();
        }
        let runs = self.runs_backward();
        let sites = self.sites();
        self.passing(sites, m, sums).backward(&runs);
        self.embed_backward(tokens, self.dx.slot(l % 2));
        self.scatter_embed();
        if sums && !self.dp.shares_gradients() {
            self.sync_embed();
        }
        if self.sharers().any(DataParallel::accumulates) {
            self.add("add.head", self.head);
            let sites = self.sites();
            self.passing(sites, m, sums).add_last(runs.last().expect("a model has layers"));
            self.add("add.embed", self.embed);
        }
        self.b.close()
    }

    /// Whether the gradients of some layers add up whole, and are summed behind the last microbatch.
    pub(in crate::strategy) fn sums_last(&self) -> bool {
        let has_experts = self.kinds.iter().any(|kind| kind.experts.is_some());
        !self.dp.shares_gradients() || (has_experts && !self.edp.shares_gradients())
    }

    /// Gathers the embedding's weights, which are whole only while they are used.
    pub(in crate::strategy) fn gather_embed(&mut self, label: &str) {
        if self.dp.shares_weights() {
            let landing = self.embed.landing.unwrap_or(self.embed.weight);
            self.dp.gather(&mut self.b, label, &self.embed, [self.dp.stored(&self.embed), landing]);
        }
    }

    pub(in crate::strategy) fn gather_head(&mut self) {
        for (label, w, ends) in self.gathers_of_head() {
            self.dp.gather(&mut self.b, label, &w, ends);
        }
    }

    /// The weights that are gathered for the head, by label: its own, and with them the table that it shares with the
    /// embedding.
    fn gathers_of_head(&self) -> Vec<(&'static str, FlatWeights, [Buf; 2])> {
        let tied = self.model.tie_embeddings.then_some(("gather.table", self.embed));
        [Some(("gather.head", self.head)), tied]
            .into_iter()
            .flatten()
            .filter(|_| self.dp.shares_weights())
            .map(|(label, w)| (label, w, [self.dp.stored(&w), w.landing.unwrap_or(w.weight)]))
            .collect()
    }

    /// Copies the weights gathered for the head to where kernels read them.
    pub(in crate::strategy) fn copy_head(&mut self) {
        self.copy_out("copy_out.head", self.head);
        if self.model.tie_embeddings {
            self.copy_out("copy_out.table", self.embed);
        }
    }

    /// Copies the weights gathered for the embedding to where kernels read them.
    pub(in crate::strategy) fn copy_embed(&mut self) {
        self.copy_out("copy_out.embed", self.embed);
    }

    fn copy_out(&mut self, label: &str, w: FlatWeights) {
        if let Some(landing) = w.landing {
            self.dp.copy_out(&mut self.b, label, &w, landing, w.weight);
        }
    }

    /// Sets a gradient to zero that is whole only for a while.
    pub(in crate::strategy) fn clear(&mut self, label: &str, w: &FlatWeights) {
        if self.dp.shares_gradients() {
            self.dp.clear(&mut self.b, label, w, w.grad);
        }
    }

    /// Shares out the head's gradient of one microbatch, where it is whole only for a while.
    pub(in crate::strategy) fn scatter_head(&mut self) {
        if self.dp.shares_gradients() {
            self.end.sum_shared(&mut self.b, self.head.grad);
            let w = self.head;
            self.dp.scatter(&mut self.b, "grad_sum.head", &w, [w.grad, self.dp.partial_of(&w)], w.leaving);
        }
    }

    /// Shares out the embedding's gradient of one microbatch, where it is whole only for a while.
    pub(in crate::strategy) fn scatter_embed(&mut self) {
        if self.dp.shares_gradients() {
            self.embedding.sum_shared(&mut self.b, self.embed.grad);
            let w = self.embed;
            self.dp.scatter(&mut self.b, "grad_sum.embed", &w, [w.grad, self.dp.partial_of(&w)], w.leaving);
        }
    }

    /// Adds the sum that has come of embedding or head to its share, where they are shared out in every microbatch.
    pub(in crate::strategy) fn add(&mut self, label: &str, w: FlatWeights) {
        if !self.dp.accumulates() {
            return;
        }
        self.dp.add(&mut self.b, label, &w, self.dp.partial_of(&w), self.dp.share_of(&w));
    }

    fn gathered_forward(&mut self, m: u32) {
        let (runs, sites) = (self.runs_forward(), self.sites());
        let gathers = self.gathers_of_head();
        let mut passing = self.passing(sites, m, false);
        let ranks = passing.ranks[0];
        passing.forward(&runs, |b| gathers.iter().for_each(|(label, w, ends)| ranks.gather(b, label, w, *ends)));
    }

    /// The stretches of the model, with the layer at their `end` by itself: its input stays on the device where others
    /// leave.
    fn stretches_but(&self, end: impl Fn(&Stretch) -> Option<u32>) -> Vec<Stretch> {
        let all = self.stretches();
        let cut = |of: Stretch| match end(&of).filter(|at| self.x.leaves() && of.count() > 1 && of.start <= *at) {
            Some(at) if at == of.start => vec![
                Stretch { end: of.start + 1, ..of.clone() },
                Stretch { start: of.start + 1, first: of.first + 1, ..of },
            ],
            Some(at) => {
                vec![Stretch { end: at, ..of.clone() }, Stretch { start: at, first: of.first + at - of.start, ..of }]
            }
            None => vec![of],
        };
        all.into_iter().flat_map(cut).collect()
    }

    fn runs_forward(&self) -> Vec<Run> {
        let top = self.layer_count() - 1;
        let run = |of: Stretch| {
            let (kind, x) = (&self.kinds[of.kind], self.x);
            let (at, leaves) = (of.start as i32, x.leaves() && of.start < top);
            let out = if x.leaves() && !leaves { x.last().into() } else { x.walk(at + 1, 1) };
            let mut rest = vec![x.walk(at, 1), out];
            rest.extend(kind.saved_each(of.first as i32, 1));
            let hosts = x.hosts(at, 1).filter(|_| leaves).into_iter().collect();
            let label = kind.label("fwd", &of);
            Run { kind: of.kind, label, at: of.first, count: of.count(), of: kind.count(), rest, hosts }
        };
        self.stretches_but(|of| (of.end > top).then_some(top)).into_iter().map(run).collect()
    }

    fn runs_backward(&self) -> Vec<Run> {
        let l = self.layer_count();
        let run = |of: Stretch| {
            let (kind, x) = (&self.kinds[of.kind], self.x);
            let (at, last) = (of.end as i32 - 1, of.first + of.count() - 1);
            let turn = ((l - of.end) % 2) as i32;
            let mut rest = vec![x.walk(at, -1), each(self.dx, turn, 1, 2), each(self.dx, turn + 1, 1, 2)];
            rest.extend(kind.saved_each(last as i32, -1));
            let below = x.hosts(at - 1, -1).filter(|_| of.end > 1 && x.leaves());
            let hosts = below.into_iter().flat_map(|hosts| [hosts, x.walk(at - 1, -1)]).collect();
            let label = kind.label("bwd", &of);
            Run { kind: of.kind, label, at: last, count: of.count(), of: kind.count(), rest, hosts }
        };
        self.stretches_but(|of| (of.start == 0).then_some(0)).into_iter().rev().map(run).collect()
    }
}
