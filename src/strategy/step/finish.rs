//! The plan around the ops of a step: where every weight is, what is fed, what the plan was made for.

use super::super::data::{DataParallel, FlatWeights};
use super::super::weights::Weight;
use super::{Step, expert_mesh, flops_of, shard_meshes};
use crate::plan::print::Print;
use crate::plan::program::VERSION;
use crate::plan::route::dropped;
use crate::plan::*;

impl Step<'_> {
    /// Slots of the final hidden states: one, since the head follows the layers at once; but two where they come from
    /// another stage, so that the next can come meanwhile.
    pub(in crate::strategy) fn hidden_turns(&self) -> u32 {
        let last = self.pipe.range(self.pipe.last_stage(), self.pipe.chunks - 1);
        if last.is_empty() { 2 } else { 1 }
    }

    fn params(&self) -> Vec<Param> {
        let staged = self.pipe.stages > 1;
        let on = |stages: &[u32]| if staged { stages.to_vec() } else { vec![] };
        let last = self.pipe.last_stage();
        let ends: &[u32] = if self.has_table_at_both_ends() && last > 0 { &[0, last] } else { &[0] };
        let held = |by: &DataParallel, prefix: &str, weight: &Weight, flat: &FlatWeights, slot, stages: &[u32]| Param {
            name: format!("{prefix}{}", weight.name),
            weight: by.stored(flat).tensor(),
            grad: flat.grad.tensor(),
            slot,
            rows: weight.rows,
            shape: weight.shape.clone(),
            shard: weight.shard.clone(),
            stages: on(stages),
            matrices: vec![],
        };
        let by_muon = |of: &Weight| if self.par.options.muon { of.matrices.clone() } else { vec![] };
        let param = |prefix: &str, weight: &Weight, flat: &FlatWeights, slot, stages: &[u32]| {
            held(&self.dp, prefix, weight, flat, slot, stages)
        };
        let embed = self.embedding.weights().iter().map(|w| param("", w, &self.embed, 0, ends));
        let mut all: Vec<Param> =
            embed.chain(self.end.weights().iter().map(|w| param("", w, &self.head, 0, &[last]))).collect();
        for (kind, l) in self.kinds.iter().flat_map(|kind| kind.layers.iter().map(move |l| (kind, l))) {
            let prefix = format!("model.layers.{l}.");
            let (stage, slot) = self.pipe.home(l, &kind.layers);
            let of_layer = |w: &Weight| Param { matrices: by_muon(w), ..param(&prefix, w, &kind.flat, slot, &[stage]) };
            all.extend(kind.layer.weights().iter().map(of_layer));
            if let (Some(experts), Some(flat)) = (&kind.layer.experts, &kind.experts) {
                let of =
                    |w: &Weight| Param { matrices: by_muon(w), ..held(&self.edp, &prefix, w, flat, slot, &[stage]) };
                all.extend(experts.weights().iter().map(of));
            }
        }
        let on_last = |prefix: &str, w: &Weight, flat: &FlatWeights| param(prefix, w, flat, 0, &[last]);
        let modules = self.modules.iter().flat_map(|m| m.params(self.model.layers, &self.kinds, on_last));
        all.extend(modules);
        all
    }

    fn about(&self) -> About {
        let (work, par) = (self.work, self.par);
        About {
            model: self.model.name.clone(),
            strategy: par.strategy(self.model.moe.is_some()).into(),
            seq_len: work.seq_len,
            global_batch: work.global_batch,
            micro_batch: work.micro_batch,
            documents: work.documents.clone(),
            par: *par,
            dtype: format!("{:?}", work.dtype).to_lowercase(),
            model_flops: flops_of(self.model, work) - self.dropped_flops(),
            model_spec: self.b.keeps_names().then(|| self.model.clone()),
        }
    }

    /// FLOPs of rows that experts drop, having no room for them: these are none of the model's work.
    fn dropped_flops(&self) -> f64 {
        let tokens = (self.work.global_batch * self.work.seq_len) as f64;
        dropped(&self.routes) * self.model.chosen_flops_per_token() * tokens
    }

    pub(super) fn finish(mut self, programs: Vec<Program>) -> (Plan, Option<Print>) {
        let params = if self.b.keeps_names() { self.params() } else { vec![] };
        let flats: Vec<FlatWeights> = self.kinds.iter().map(|kind| kind.flat).chain([self.embed, self.head]).collect();
        let mut masters = self.dp.masters(&flats);
        let experts = self.kinds.iter().filter_map(|kind| kind.experts);
        masters.extend(experts.flat_map(|experts| self.edp.masters(&[experts])));
        let modules = self.modules.iter().flat_map(|m| m.flats([&self.dp, &self.edp]));
        masters.extend(modules.flat_map(|(dp, _, w)| dp.masters(&[*w])));
        let mut views = vec![self.mesh.clone()];
        if !self.routes.is_empty() {
            views.push(expert_mesh(self.par));
        }
        let with_experts = views.len();
        views.extend(shard_meshes(self.par).into_iter().take(with_experts));
        let about = self.about();
        let inputs = Inputs {
            tokens: self.tokens.tensor(),
            targets: self.targets.tensor(),
            ahead: self.all_targets().skip(1).map(|targets| targets.tensor()).collect(),
            segs: self.layer().segs.clone(),
            share: self.layer().tp.rows(),
            batch: self.work.micro_batch,
            vocab: self.model.vocab,
            microbatches: self.microbatches,
            loss: self.loss.tensor(),
            hidden: self.x.last().tensor(),
            hidden_slot: self.x.last().slot,
            hidden_turns: self.hidden_turns(),
        };
        let table = (0..self.pipe.stages).collect();
        let print = self.b.take_print();
        let plan = Plan {
            version: VERSION,
            about,
            views,
            lanes: self.b.lanes,
            tensors: self.b.tensors,
            blocks: self.b.blocks,
            programs,
            role_of: RoleMap { view: 0, axes: vec![Axis::Pp], table },
            params,
            masters,
            feed: Feed::Tokens(inputs),
            routes: self.routes,
            routes_by_replica: self.apart,
        };
        (plan, print)
    }
}
