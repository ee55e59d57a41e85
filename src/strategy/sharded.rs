//! A microbatch where gradients (ZeRO 2) or weights too (ZeRO 3) are whole only while they are used.
//!
//! ```text
//! forward   gather layer i+1   | layer i
//! backward  gather layer i-1   | layer i, its gradient scattered behind it | the sum of layer i+1 added
//! ```
//! Models with two kinds of layers have experts, which have no such plans.

use super::residual::{come_back, leave};
use super::step::Step;
use crate::plan::*;

impl Step<'_> {
    /// Sums of several microbatches begin at zero; that of one is written.
    pub(super) fn zero_shares(&mut self, layers: u32) {
        if self.dp.accumulates() {
            self.b.open("zero_share");
            let share = self.b.formal("g_share");
            self.dp.clear_share(&mut self.b, "fill", &self.kinds[0].flat, share);
            let fill = self.b.close();
            let share = self.dp.share_of(&self.kinds[0].flat);
            self.b.call("zero_grad", fill, layers, &[each(share, 0, 1, layers)]);
            for (label, w) in [("embed", self.embed), ("head", self.head)] {
                let share = self.dp.share_of(&w);
                self.dp.clear_share(&mut self.b, &format!("zero_grad.{label}"), &w, share);
            }
        }
        self.b.compute("zero_loss", Kernel::Fill { elems: 1 }, &[], &[self.loss]);
    }

    pub(super) fn sharded_microbatch_block(&mut self, name: &str) -> BlockId {
        let (l, gathers) = (self.layer_count(), self.dp.shares_weights());
        let forward = gathers.then(|| self.next_fwd_block(name));
        let [first, next] = [true, false].map(|first| self.sharded_bwd_block(name, first, first || l > 1));
        let end = self.sharded_bwd_block(name, l == 1, false);
        self.b.open(name);
        let [tokens, targets] = ["tokens", "targets"].map(|name| self.b.formal(name));
        if gathers {
            self.dp.gather(&mut self.b, "gather.embed", self.dp.stored(&self.embed), self.embed.weight);
        }
        self.embed_forward(tokens, self.x.first());
        match forward {
            Some(block) => self.gathered_forward(block),
            None => self.call_forward(0),
        }
        for (label, w) in [("clear.embed", self.embed), ("clear.head", self.head)] {
            self.dp.clear(&mut self.b, label, &w, w.grad);
        }
        self.head(targets, self.x.last(), self.dx);
        self.scatter_head();
        self.sharded_backward(first, next, end);
        self.embed_backward(tokens, self.dx.slot(l % 2));
        self.embedding.sum_shared(&mut self.b, self.embed.grad);
        self.dp.sync(&mut self.b, "grad_sum.embed", self.embed.grad, self.dp.partial_of(&self.embed));
        self.add_rest();
        self.b.close()
    }

    /// How many layers ahead of compute weights are gathered.
    fn ahead(&self) -> i32 {
        i32::from(self.whole > 1)
    }

    fn scatter_head(&mut self) {
        self.end.sum_shared(&mut self.b, self.head.grad);
        self.dp.sync(&mut self.b, "grad_sum.head", self.head.grad, self.dp.partial_of(&self.head));
    }

    /// A layer's forward pass while the next one's weights are gathered.
    fn next_fwd_block(&mut self, name: &str) -> BlockId {
        self.b.open(&format!("layer_fwd_next.{name}"));
        let [w, x, x_out] = ["w", "x", "x_out"].map(|name| self.b.formal(name));
        let keep = self.kinds[0].saved.formals(&mut self.b).bufs();
        let [share, next] = ["next_share", "next_w"].map(|name| self.b.formal(name));
        self.dp.gather(&mut self.b, "gather_next", share, next);
        if self.x.leaves() {
            leave(&mut self.b, x);
        }
        let args: Vec<Arg> = [w, x, x_out].into_iter().chain(keep).map(Arg::from).collect();
        self.b.call("fwd", self.kinds[0].of(0).fwd, 1, &args);
        self.b.close()
    }

    fn gathered_forward(&mut self, block: BlockId) {
        let (l, whole) = (self.layer_count(), self.whole);
        let (share, w, x) = (self.dp.stored(&self.kinds[0].flat), self.kinds[0].flat.weight, self.x);
        let (top, ahead) = (l - 1, self.ahead());
        if ahead > 0 {
            self.dp.gather(&mut self.b, "gather.first", share, w);
        }
        if top > 0 {
            let mut args = vec![each(w, 0, 1, whole), x.walk(0, 1), x.walk(1, 1)];
            args.extend(self.kinds[0].saved_each(0, 1));
            args.extend([each(share, ahead, 1, l), each(w, ahead, 1, whole)]);
            args.extend(x.hosts(0, 1));
            self.b.call("fwd", block, top, &args);
        }
        self.dp.gather(&mut self.b, "gather.head", self.dp.stored(&self.head), self.head.weight);
        if self.model.tie_embeddings {
            self.dp.gather(&mut self.b, "gather.table", self.dp.stored(&self.embed), self.embed.weight);
        }
        if ahead == 0 {
            self.dp.gather(&mut self.b, "gather.last", share.slot(top), w);
        }
        let at = top as i32;
        let mut args =
            vec![each(w, at, 1, whole), x.walk(at, 1), if x.leaves() { x.last().into() } else { x.walk(at + 1, 1) }];
        args.extend(self.kinds[0].saved_each(at, 1));
        self.b.call("fwd_last", self.kinds[0].of(0).fwd, 1, &args);
    }

    /// A layer's backward pass: first the weights of the layer before it are asked for, last its gradient is
    /// scattered and what came of the layer behind it is added.
    fn sharded_bwd_block(&mut self, name: &str, first: bool, gathers_next: bool) -> BlockId {
        let kind = if first { "first" } else { "next" };
        let end = if gathers_next { "" } else { "_end" };
        self.b.open(&format!("layer_bwd_{kind}{end}.{name}"));
        let [w, g, x, dy, dx] = ["w", "g", "x", "dy", "dx"].map(|name| self.b.formal(name));
        let keep = self.kinds[0].saved.formals(&mut self.b).bufs();
        let partial = self.b.formal("g_part");
        if self.dp.shares_weights() && gathers_next {
            let [share, next] = ["next_share", "next_w"].map(|name| self.b.formal(name));
            self.dp.gather(&mut self.b, "gather_next", share, next);
        }
        if self.x.leaves() && gathers_next {
            come_back(&mut self.b);
        }
        self.dp.clear(&mut self.b, "clear", &self.kinds[0].flat, g);
        let args: Vec<Arg> = [w, g, x, dy, dx].into_iter().chain(keep).map(Arg::from).collect();
        self.b.call("bwd", self.kinds[0].of(0).bwd, 1, &args);
        self.kinds[0].layer.sum_shared(&mut self.b, g);
        self.dp.sync(&mut self.b, "grad_sum", g, partial);
        if self.dp.accumulates() && !first {
            let [behind, share] = ["behind_part", "behind_share"].map(|name| self.b.formal(name));
            self.dp.add(&mut self.b, "add_behind", &self.kinds[0].flat, behind, share);
        }
        self.b.close()
    }

    /// Backward through all layers: `first` the top one, `end` the lowest, which asks for none before it.
    fn sharded_backward(&mut self, first: BlockId, next: BlockId, end: BlockId) {
        let l = self.layer_count();
        let gathers = self.dp.shares_weights();
        let (share, w) = (self.dp.stored(&self.kinds[0].flat), self.kinds[0].flat.weight);
        if gathers && self.ahead() > 0 {
            let top = l - 1;
            self.dp.gather(&mut self.b, "gather.top", share.slot(top), w.slot(top % self.whole));
        }
        if l > 1 {
            self.sharded_bwd("bwd_first", first, 0, 1, true, true);
        }
        if l > 2 {
            self.sharded_bwd("bwd", next, 1, l - 2, false, true);
        }
        if gathers && self.ahead() == 0 {
            self.dp.gather(&mut self.b, "gather.lowest", share, w);
        }
        self.sharded_bwd("bwd_last", end, l - 1, 1, l == 1, false);
    }

    /// `count` layers backward, the first of them `from` below the top.
    fn sharded_bwd(&mut self, label: &str, block: BlockId, from: u32, count: u32, first: bool, gathers_next: bool) {
        let (l, whole) = (self.layer_count(), self.whole);
        let (at, turn) = ((l - 1 - from) as i32, from as i32);
        let (w, share, partial) =
            (self.kinds[0].flat.weight, self.dp.share_of(&self.kinds[0].flat), self.dp.partial_of(&self.kinds[0].flat));
        let (one, ahead) = (self.dp.accumulates(), self.ahead());
        let part = |at: i32| if one { each(partial, at, -1, l.min(2)) } else { each(partial, at, -1, l) };
        let weight = |at: i32| if self.dp.shares_weights() { each(w, at, -1, whole) } else { each(w, at, -1, l) };
        let mut args = vec![
            weight(at),
            each(self.kinds[0].flat.grad, at, -1, whole),
            self.x.walk(at, -1),
            each(self.dx, turn, 1, 2),
            each(self.dx, turn + 1, 1, 2),
        ];
        args.extend(self.kinds[0].saved_each(at, -1));
        args.push(part(at));
        if self.dp.shares_weights() && gathers_next {
            args.extend([each(self.dp.stored(&self.kinds[0].flat), at - ahead, -1, l), weight(at - ahead)]);
        }
        if let Some(hosts) = self.x.hosts(at - 1, -1).filter(|_| gathers_next) {
            args.extend([hosts, self.x.walk(at - 1, -1)]);
        }
        if self.dp.accumulates() && !first {
            args.extend([part(at + 1), each(share, at + 1, -1, l)]);
        }
        self.b.call(label, block, count, &args);
    }

    /// Adds the sums that nothing came behind.
    fn add_rest(&mut self) {
        if !self.dp.accumulates() {
            return;
        }
        for (label, w) in [("add.head", self.head), ("add.layer", self.kinds[0].flat), ("add.embed", self.embed)] {
            let (partial, share) = (self.dp.partial_of(&w), self.dp.share_of(&w));
            self.dp.add(&mut self.b, label, &w, partial, share);
        }
    }
}
