//! Queries, keys and values of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), not absorbed,
//! as it is trained.
//!
//! ```text
//! x -> q down -> norm -> q up      -> [nope | rope] of every head
//! x -> kv down -> [norm -> kv up   -> [nope | value] of every head
//!                 | the turned part of all keys ]
//! ```
//! Every tensor-parallel rank has the matrices that compress, and uses them on its share of the tokens; compressed
//! rows are gathered, and the matrices behind them are cut by heads (Megatron-LM's `MLASelfAttention`).
//!
//! Legend: as in the layer; ql and kl the compressed widths, dn, dr and dv a head's elements that are not turned, that
//! are, and of its value.

use super::super::sparse::{INDEX_Q, Index};
use super::super::tensor::TensorParallel;
use super::super::weights::{Rows, Weights};
use super::indexer::{self, Indexer};
use super::{Flats, linear, linear_dw, linear_dx, with};
use crate::plan::sparse::{Half, HeadProduct, Product, SparseKernel, Turn};
use crate::plan::{Buf, Builder, Dtype, Kernel, Segs, TensorKind};
use crate::spec::{Documents, LlmSpec, MlaSpec, Parallelism, RopeScaling, Workload};

/// The places of the weights among the rows of the flat weight tensor.
pub struct WeightRows {
    /// The matrix down and the norm behind it; `None` where queries are projected at once.
    q: Option<[Rows; 2]>,
    kv: [Rows; 2],
    q_up: Rows,
    kv_up: Rows,
    indexer: Option<indexer::WeightRows>,
}

/// The places of those weights that every rank has, which stand before those that are cut.
pub struct Whole {
    q: Option<[Rows; 2]>,
    kv: [Rows; 2],
    indexer: Option<indexer::WeightRows>,
}

impl Whole {
    pub fn weights(w: &mut Weights, model: &LlmSpec, mla: &MlaSpec) -> Whole {
        let h = model.hidden;
        let q = mla.q_lora.map(|ql| {
            let down = w.whole("self_attn.q_a_proj.weight", &[ql, h]);
            [down, w.whole("self_attn.q_a_layernorm.weight", &[ql])]
        });
        let down = w.whole("self_attn.kv_a_proj_with_mqa.weight", &[mla.kv_lora + mla.rope_dim, h]);
        let kv = [down, w.whole("self_attn.kv_a_layernorm.weight", &[mla.kv_lora])];
        let indexer = model.indexer.zip(mla.q_lora).map(|(of, ql)| indexer::WeightRows::new(w, model, &of, ql));
        Whole { q, kv, indexer }
    }

    pub fn and_cut(self, w: &mut Weights, model: &LlmSpec, mla: &MlaSpec) -> WeightRows {
        let (a, Whole { q, kv, indexer }) = (model.heads, self);
        let (name, from) = match mla.q_lora {
            Some(ql) => ("self_attn.q_b_proj.weight", ql),
            None => ("self_attn.q_proj.weight", model.hidden),
        };
        let cols = a * (mla.nope_dim + mla.rope_dim);
        let q_up = w.cut(name, &[cols, from], 0, &[cols]);
        let cols = a * (mla.nope_dim + mla.v_dim);
        let kv_up = w.cut("self_attn.kv_b_proj.weight", &[cols, mla.kv_lora], 0, &[cols]);
        WeightRows { q, kv, q_up, kv_up, indexer }
    }
}

pub struct Latent {
    pub mla: MlaSpec,
    pub rows: WeightRows,
    /// Heads of this rank.
    pub heads: u64,
    pub hidden: u64,
    pub theta: f64,
    pub scaling: Option<RopeScaling>,
    pub batch: u64,
    /// Tokens of a microbatch on this rank, and those of them between the products.
    pub tokens: u64,
    pub share: u64,
    pub segs: Segs,
    pub documents: Documents,
    pub dtype: Dtype,
    pub tp: TensorParallel,
    pub fp8: bool,
    /// Whether q, k and v are made again from the compressed rows for the backward pass.
    pub again: bool,
    /// The indexer that chooses keys: heads are absorbed then, and all share one key, which is the compressed row;
    /// `None`: all keys are seen.
    pub indexer: Option<Indexer>,
}

/// Compressed rows, before their norm and behind it.
#[derive(Clone, Copy)]
pub struct Squeezed {
    down: Buf,
    normed: Buf,
}

#[derive(Clone, Copy)]
pub struct Saved {
    q: Option<Squeezed>,
    kv: Squeezed,
    /// Queries of heads, turned, before they are absorbed; and the buffers that the indexer keeps.
    heads: Option<Buf>,
    index: Option<indexer::Saved>,
    /// Whether buffers behind the norms, and queries, keys and values, are not kept but made again.
    pub(super) again: bool,
}

impl Saved {
    pub fn bufs_mut(&mut self) -> Vec<(&'static str, &mut Buf)> {
        let again = self.again;
        let mut all = vec![("kv_down", &mut self.kv.down), ("kv_latent", &mut self.kv.normed)];
        if let Some(q) = &mut self.q {
            all.extend([("q_down", &mut q.down), ("q_latent", &mut q.normed)]);
        }
        all.extend(self.heads.as_mut().map(|heads| ("q_heads", heads)));
        all.extend(self.index.as_mut().map(|index| index.buf_mut()));
        all.retain(|(name, _)| !(again && MADE_AGAIN.contains(name)));
        all
    }
}

/// Names of the tensors that are made again from the compressed rows.
pub(super) const MADE_AGAIN: [&str; 6] = ["q", "kv", "q_latent", "kv_latent", "q_heads", INDEX_Q];

/// The three things that are projected up: compressed queries, compressed keys and values, and the turned part of the
/// keys; or gradients of theirs.
struct Three<T> {
    q: Option<T>,
    kv: T,
    k: T,
}

pub struct Scratch {
    q: Buf,
    kv: Buf,
    /// The turned part of the keys, for my share of the tokens.
    k: Buf,
    d_q: Buf,
    d_kv: Buf,
    /// Gradients behind the norms, for my share of the tokens, and before the norms.
    d_normed: Three<Buf>,
    d_down: [Option<Buf>; 2],
    /// Rooms for all tokens' rows, and for sums of their gradients.
    rooms: Three<Option<Buf>>,
    sums: Three<Option<Buf>>,
    /// The gradient of attention's output, compressed; and the buffers that the indexer works in.
    d_values: Option<Buf>,
    index: Option<indexer::Scratch>,
}

/// Room for the input of the layer, or for sums of its gradient; `None` where a rank has all rows anyway.
pub type Room = Option<Buf>;

impl Latent {
    /// Latent attention of a layer. `seq`: tokens of one sequence on this rank; `share`: those of a microbatch between
    /// the products.
    pub fn new(
        (mla, rows): (MlaSpec, WeightRows),
        model: &LlmSpec,
        work: &Workload,
        par: &Parallelism,
        tp: TensorParallel,
        [seq, share]: [u64; 2],
        segs: &Segs,
    ) -> Latent {
        let tokens = work.micro_batch * seq;
        let turn = Turn {
            segs: segs.clone(),
            documents: work.documents.clone(),
            batch: work.micro_batch,
            heads: 1,
            before: 0,
            rope: mla.rope_dim,
            behind: 0,
            theta: model.rope_theta,
            scaling: model.rope_scaling.clone(),
            interleaved: true,
        };
        let indexer = model.indexer.zip(rows.indexer).zip(mla.q_lora).map(|((spec, rows), q_lora)| {
            let turn = Turn { behind: spec.head_dim - mla.rope_dim, interleaved: spec.interleaved, ..turn };
            let (hidden, dtype, fp8) = (model.hidden, work.dtype, par.options.fp8);
            Indexer { spec, rows, q_lora, hidden, tokens, turn, dtype, fp8 }
        });
        Latent {
            mla,
            rows,
            heads: model.heads / tp.ranks,
            hidden: model.hidden,
            theta: model.rope_theta,
            scaling: model.rope_scaling.clone(),
            batch: work.micro_batch,
            tokens,
            share,
            segs: segs.clone(),
            documents: work.documents.clone(),
            dtype: work.dtype,
            tp,
            fp8: par.options.fp8,
            again: par.options.recompute_mla_up,
            indexer,
        }
    }

    /// Elements of a head's query and key.
    fn qk(&self) -> u64 {
        self.mla.nope_dim + self.mla.rope_dim
    }

    /// Columns of all queries of this rank, and of keys and values as they are projected up.
    fn ups(&self) -> [u64; 2] {
        [self.heads * self.qk(), self.heads * (self.mla.nope_dim + self.mla.v_dim)]
    }

    /// The product that compresses queries, and the norm behind it; `None` where queries are projected at once.
    fn q_down(&self) -> Option<(Projection, Rows)> {
        let ([at, norm], cols) = (self.rows.q?, self.mla.q_lora?);
        Some((Projection { name: "q_down", at, cols, width: self.hidden }, norm))
    }

    fn kv_down(&self) -> (Projection, Rows) {
        let ([at, norm], cols) = (self.rows.kv, self.mla.kv_lora + self.mla.rope_dim);
        (Projection { name: "kv_down", at, cols, width: self.hidden }, norm)
    }

    fn q_up(&self) -> Projection {
        let width = self.mla.q_lora.unwrap_or(self.hidden);
        Projection { name: "q_up", at: self.rows.q_up, cols: self.ups()[0], width }
    }

    fn kv_up(&self) -> Projection {
        Projection { name: "kv_up", at: self.rows.kv_up, cols: self.ups()[1], width: self.mla.kv_lora }
    }

    pub fn saved(&self, keep: &mut dyn FnMut(&str, u64, u64, Dtype) -> Buf) -> Saved {
        let (r, kl, dtype) = (self.share, self.mla.kv_lora, self.dtype);
        Saved {
            q: self
                .mla
                .q_lora
                .map(|ql| Squeezed { down: keep("q_down", r, ql, dtype), normed: keep("q_latent", r, ql, dtype) }),
            kv: Squeezed {
                down: keep("kv_down", r, kl + self.mla.rope_dim, dtype),
                normed: keep("kv_latent", r, kl, dtype),
            },
            heads: self.indexer.as_ref().map(|_| keep("q_heads", self.tokens, self.ups()[0], dtype)),
            index: self.indexer.as_ref().map(|indexer| indexer.saved(keep)),
            again: self.again,
        }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let (n, r, dtype) = (self.tokens, self.share, self.dtype);
        let (MlaSpec { q_lora, kv_lora: kl, rope_dim: dr, .. }, [q_up, kv_up]) = (self.mla, self.ups());
        let mut rooms = |name: &str| Three {
            q: q_lora.map(|ql| self.tp.room(b, &format!("{name}_q_latent"), n, ql)),
            kv: self.tp.room(b, &format!("{name}_kv_latent"), n, kl),
            k: self.tp.room(b, &format!("{name}_k_shared"), n, dr),
        };
        let (rooms, sums) = (rooms("tp"), rooms("tp_d"));
        let index = self.indexer.as_ref().map(|indexer| indexer.scratch(b));
        let mut work = |name, rows, row| b.tensor(name, &[rows, row], dtype, TensorKind::Workspace, 1);
        Scratch {
            q: work("q_up", n, q_up),
            kv: work("kv_up", n, kv_up),
            k: work("k_shared", r, dr),
            d_q: work("d_q_up", n, q_up),
            d_kv: work("d_kv_up", n, kv_up),
            d_normed: Three {
                q: q_lora.map(|ql| work("d_q_latent", r, ql)),
                kv: work("d_kv_latent", r, kl),
                k: work("d_k_shared", r, dr),
            },
            d_down: [q_lora.map(|ql| work("d_q_down", r, ql)), Some(work("d_kv_down", r, kl + dr))],
            d_values: index.is_some().then(|| work("d_attn_o", n, self.heads * kl)),
            index,
            rooms,
            sums,
        }
    }

    fn turn(&self, backward: bool) -> Kernel {
        let MlaSpec { rope_dim: rope, nope_dim: nope, v_dim: v, .. } = self.mla;
        let (segs, documents, batch, heads) = (self.segs.clone(), self.documents.clone(), self.batch, self.heads);
        let (theta, scaling) = (self.theta, self.scaling.clone());
        Kernel::LatentRope { segs, documents, batch, heads, nope, rope, v, theta, backward, scaling }
    }

    fn norm(&self, cols: u64, rest: u64, backward: bool) -> Kernel {
        let (rows, eps) = (self.share, MlaSpec::NORM_EPS);
        match backward {
            false => Kernel::LatentNorm { rows, cols, rest, eps },
            true => Kernel::LatentNormBwd { rows, cols, rest, eps },
        }
    }

    fn product(&self, half: Half, product: Product) -> Kernel {
        let MlaSpec { kv_lora: lora, rope_dim: rope, nope_dim: nope, v_dim: v, .. } = self.mla;
        let (rows, heads) = (self.tokens, self.heads);
        Kernel::Sparse(SparseKernel::Product(HeadProduct { rows, heads, lora, nope, rope, v, half, product }))
    }

    /// The part of every head's query that turns, or of the one key of all heads.
    fn part_turn(&self, heads: u64, before: u64) -> Turn {
        Turn {
            segs: self.segs.clone(),
            documents: self.documents.clone(),
            batch: self.batch,
            heads,
            before,
            rope: self.mla.rope_dim,
            behind: 0,
            theta: self.theta,
            scaling: self.scaling.clone(),
            interleaved: true,
        }
    }

    fn turned_queries(&self, backward: bool) -> Kernel {
        Kernel::Sparse(SparseKernel::Turn { turn: self.part_turn(self.heads, self.mla.nope_dim), backward })
    }

    fn joined_keys(&self, backward: bool) -> Kernel {
        Kernel::Sparse(SparseKernel::Join { turn: self.part_turn(1, self.mla.kv_lora), backward })
    }
}

/// A product with a weight: `cols` columns from rows of `width`.
#[derive(Clone, Copy)]
struct Projection {
    name: &'static str,
    at: Rows,
    cols: u64,
    width: u64,
}

/// A layer's latent attention in a pass under way.
#[derive(Clone, Copy)]
pub struct Pass<'a> {
    pub latent: &'a Latent,
    pub s: &'a Scratch,
    pub w: Flats,
    pub keep: &'a Saved,
    /// My share of the layer's normed input, and room for all rows of it.
    pub input: (Buf, Room),
}

impl Pass<'_> {
    /// Makes q and kv in `to` as attention takes them, for my heads, and the indexer's input in `index`, if there is an
    /// indexer; with `again` from the compressed rows, for the backward pass.
    pub fn forward(&self, b: &mut Builder, to: [Buf; 2], index: Option<Index>, again: bool) {
        self.make(b, to, again);
        let (l, keep) = (self.latent, self.keep);
        if let (Some(indexer), Some(saved), Some(q), Some(to)) = (&l.indexer, &keep.index, keep.q, index) {
            indexer.forward(b, self.w, [self.input.0, q.normed], saved, to, again);
        }
    }

    fn make(&self, b: &mut Builder, to: [Buf; 2], again: bool) {
        let Pass { latent: l, s, w, keep, .. } = *self;
        let (queries, MlaSpec { kv_lora: kl, rope_dim: dr, .. }) = (keep.heads.unwrap_or(s.q), l.mla);
        match (l.q_down(), keep.q) {
            (Some((down, norm)), Some(q)) => {
                if !again {
                    self.down(b, down, q.down);
                }
                b.compute("q_norm", l.norm(down.cols, 0, false), &[q.down, w.at(norm)], &[q.normed]);
                self.up(b, l.q_up(), (q.normed, s.rooms.q.flatten()), queries);
            }
            _ => self.up(b, l.q_up(), self.input, queries),
        }
        let (down, norm) = l.kv_down();
        if !again {
            self.down(b, down, keep.kv.down);
        }
        b.compute("kv_norm", l.norm(kl, dr, false), &[keep.kv.down, w.at(norm)], &[keep.kv.normed, s.k]);
        if l.indexer.is_some() {
            b.compute("q_rope", l.turned_queries(false), &[queries], &[queries]);
            let absorb = l.product(Half::Key, Product::Forward);
            b.compute("q_absorb", absorb, &[queries, w.at(l.rows.kv_up)], &[to[0]]);
            b.compute("kv_join", l.joined_keys(false), &[keep.kv.normed, s.k], &[to[1]]);
            return;
        }
        self.up(b, l.kv_up(), (keep.kv.normed, s.rooms.kv), s.kv);
        let k = l.tp.gather(b, "k_gather", s.k, s.rooms.k);
        b.compute("rope", l.turn(false), &[s.q, s.kv, k], &to);
    }

    /// Goes to compressed rows of my share of the tokens.
    fn down(&self, b: &mut Builder, down: Projection, y: Buf) {
        let l = self.latent;
        let kernel = linear(l.share, down.cols, down.width, l.fp8);
        b.compute(down.name, kernel, &[self.input.0, self.w.at(down.at)], &[y]);
    }

    /// Goes to columns of my heads, of all tokens, from my share of the rows and room for all of them.
    fn up(&self, b: &mut Builder, up: Projection, (from, room): (Buf, Room), y: Buf) {
        let (l, weight) = (self.latent, self.w.at(up.at));
        l.tp.gathered(b, &format!("{}_gather", up.name), from, room, |b, input, rows| {
            let kernel = linear(rows.count(), up.cols, up.width, l.fp8);
            b.compute(&rows.label(up.name), kernel, &[rows.of(input), weight], &[rows.of(y)]);
        });
    }

    /// Makes values of heads from attention's output, where that is compressed.
    pub fn values(&self, b: &mut Builder, from: Buf, to: Buf) {
        let l = self.latent;
        if l.indexer.is_some() {
            b.compute("values", l.product(Half::Value, Product::Forward), &[from, self.w.at(l.rows.kv_up)], &[to]);
        }
    }
}

/// A layer's latent attention in a backward pass under way, which adds the gradients of weights to `g`.
pub struct Backward<'a> {
    pub pass: Pass<'a>,
    pub g: Flats,
}

impl Backward<'_> {
    /// The gradient of attention's output, from that of the values of heads.
    pub fn values(&self, b: &mut Builder, o: Buf, d_o: Buf) -> Buf {
        let l = self.pass.latent;
        let Some(to) = self.pass.s.d_values else { return d_o };
        let [weight, grad] = self.both(l.rows.kv_up);
        b.compute("values_dx", l.product(Half::Value, Product::Dx), &[d_o, weight], &[to]);
        b.compute("values_dw", l.product(Half::Value, Product::Dw), &[d_o, o, grad], &[grad]);
        to
    }

    /// Adds the gradients of the indexer's weights, from those of its queries, keys and weights of heads.
    pub fn index(&self, b: &mut Builder, d_index: [Buf; 3]) {
        let Pass { latent, s, w, keep, input: (x, _) } = self.pass;
        if let (Some(indexer), Some(s), Some(saved), Some(q)) = (&latent.indexer, &s.index, &keep.index, keep.q) {
            indexer.backward(b, s, [w, self.g], [x, q.normed], saved, d_index);
        }
    }

    /// Makes the gradient of my share of the layer's normed input in `dx`; `sums` is for sums of the gradient of all
    /// rows.
    pub fn run(&self, b: &mut Builder, [dq, dkv]: [Buf; 2], [dx, sums]: [Buf; 2]) {
        let Pass { latent: l, s, keep, input, .. } = self.pass;
        let last = if let Some(queries) = keep.heads {
            let [weight, grad] = self.both(l.rows.kv_up);
            b.compute("q_absorb_dx", l.product(Half::Key, Product::Dx), &[dq, weight], &[s.d_q]);
            b.compute("q_absorb_dw", l.product(Half::Key, Product::Dw), &[queries, dq, grad], &[grad]);
            b.compute("kv_join_bwd", l.joined_keys(true), &[dkv], &[s.d_normed.kv, s.d_normed.k]);
            b.compute("q_rope_bwd", l.turned_queries(true), &[s.d_q], &[s.d_q])
        } else {
            let d_k = s.sums.k.unwrap_or(s.d_normed.k);
            let last = b.compute("rope_bwd", l.turn(true), &[dq, dkv], &[s.d_q, s.d_kv, d_k]);
            l.tp.reduce(b, "k_bwd_reduce", d_k, s.d_normed.k);
            let d_kv = [s.d_kv, s.sums.kv.unwrap_or(s.d_normed.kv), s.d_normed.kv];
            self.up(b, l.kv_up(), (keep.kv.normed, s.rooms.kv), d_kv, last);
            last
        };
        let (kv_down, kv_norm) = l.kv_down();
        let [w, g] = self.both(kv_norm);
        let d_kv_down = s.d_down[1].expect("keys and values are compressed");
        let kernel = l.norm(l.mla.kv_lora, l.mla.rope_dim, true);
        b.compute("kv_norm_bwd", kernel, &[keep.kv.down, w, g, s.d_normed.kv, s.d_normed.k], &[d_kv_down, g]);
        match (l.q_down(), keep.q, s.d_normed.q, s.d_down[0]) {
            (Some((down, norm)), Some(q), Some(d_normed), Some(d_down)) => {
                let d_q = [s.d_q, s.sums.q.flatten().unwrap_or(d_normed), d_normed];
                self.up(b, l.q_up(), (q.normed, s.rooms.q.flatten()), d_q, last);
                let [w, g] = self.both(norm);
                b.compute("q_norm_bwd", l.norm(down.cols, 0, true), &[q.down, w, g, d_normed], &[d_down, g]);
                self.down(b, down, [d_down, dx], false);
            }
            _ => self.up(b, l.q_up(), input, [s.d_q, sums, dx], last),
        }
        self.down(b, kv_down, [d_kv_down, dx], true);
    }

    fn both(&self, r: Rows) -> [Buf; 2] {
        [self.pass.w, self.g].map(|flat| flat.at(r))
    }

    /// Goes from the gradient of a product's columns to that of its input, summed over the ranks' heads; `d` are the
    /// former, room for sums of the latter, and my share of these.
    fn up(&self, b: &mut Builder, up: Projection, (input, room): (Buf, Room), d: [Buf; 3], last: u32) {
        let (l, Projection { name, cols, width, .. }) = (self.pass.latent, up);
        let ([w, g], [d, sums, share]) = (self.both(up.at), d);
        let input = l.tp.gather_beside(b, &format!("{name}_regather"), input, room, last);
        b.compute(&format!("{name}_dx"), linear_dx(l.tokens, width, cols, l.fp8), &[d, w], &[sums]);
        l.tp.reduce(b, &format!("{name}_bwd_reduce"), sums, share);
        b.compute(&format!("{name}_dw"), linear_dw(cols, width, l.tokens, l.fp8), &[d, input, g], &[g]);
    }

    /// Goes to the gradient of the layer's normed input, which it adds to or begins.
    fn down(&self, b: &mut Builder, down: Projection, [d, dx]: [Buf; 2], adds: bool) {
        let (l, Projection { name, at, cols, width }) = (self.pass.latent, down);
        let [w, g] = self.both(at);
        let kernel = with(linear_dx(l.share, width, cols, l.fp8), adds, false);
        let reads: Vec<Buf> = [d, w].into_iter().chain(adds.then_some(dx)).collect();
        b.compute(&format!("{name}_dx"), kernel, &reads, &[dx]);
        let product = linear_dw(cols, width, l.share, l.fp8);
        b.compute(&format!("{name}_dw"), product, &[d, self.pass.input.0, g], &[g]);
    }
}
