//! One attention operation alone, forward, backward or both: no projections, no norms, no optimizer. What
//! benchmarks of context parallelism time (zhuzilin/ring-flash-attention, USP, TransformerEngine).
//!
//! The ops are those of a layer: whatever way a layer can share attention, a pass can.

use super::attention::{Saved, Way};
use super::feasible;
use super::step::{Engines, mesh};
use crate::error::Result;
use crate::plan::program::VERSION;
use crate::plan::*;
use crate::spec::{AttentionSpec, Parallelism, Pass};

/// Builds the plan of one attention operation over `par.ring * par.ulysses` ranks. Errors: what [`feasible::attention`]
/// refuses.
pub fn build(spec: &AttentionSpec, pass: Pass, par: &Parallelism, engines: Engines) -> Result<Plan> {
    feasible::attention(spec, par)?;
    feasible::pass(pass, par)?;
    let mut b = Builder::new();
    let way = Way::new(spec, None, 0.0, par, engines);
    let mut io = Io::new(&mut b, &way, spec);
    io.ops(&mut b, &way, pass);
    let feed = io.feed(&way, spec, pass);
    let ops = b.finish();
    Ok(Plan {
        version: VERSION,
        about: about(spec, pass, par),
        views: vec![mesh(par)],
        lanes: b.lanes,
        tensors: b.tensors,
        blocks: b.blocks,
        programs: vec![Program { name: "rank".into(), ops }],
        role_of: RoleMap { view: 0, axes: vec![], table: vec![0] },
        params: vec![],
        masters: vec![],
        feed: Feed::Attention(feed),
        routes: vec![],
        routes_by_replica: false,
    })
}

/// The inputs and outputs of the plan. Outside a Ulysses exchange a rank has its tokens and all heads; inside, all
/// tokens of its ring share and its heads.
struct Io {
    q: Buf,
    kv: Buf,
    o: Buf,
    d_o: Buf,
    /// The operands inside the exchange; without one, those outside.
    saved: Saved,
    /// dq and dkv outside the exchange; `None` without a backward pass.
    grads: Option<(Buf, Buf)>,
}

impl Io {
    fn new(b: &mut Builder, way: &Way, spec: &AttentionSpec) -> Io {
        let (n, shape) = (spec.batch * way.seq, way.core.shape());
        let (q_row, kv_row) = (spec.heads * spec.head_dim, 2 * spec.kv_heads * spec.head_dim);
        let mut keep = |name: &str, rows, row, dtype| b.tensor(name, &[rows, row], dtype, TensorKind::Activation, 1);
        let (q, kv) = (keep("q", n, q_row, spec.dtype), keep("kv", n, kv_row, spec.dtype));
        let (o, d_o) = (keep("o", n, q_row, spec.dtype), keep("do", n, q_row, spec.dtype));
        let (lse, probs) = way.core.keeps(&mut keep);
        let kv_last = way.core.keeps_last().then(|| keep("kv_last", shape.rows(), shape.kv_row(), spec.dtype));
        let exchanged = way.ulysses.is_some();
        let mut inside = |name, row, outside| {
            if exchanged { keep(name, shape.rows(), row, spec.dtype) } else { outside }
        };
        let saved = Saved {
            q: inside("attn_q", shape.q_row(), q),
            kv: inside("attn_kv", shape.kv_row(), kv),
            o: inside("attn_o", shape.q_row(), o),
            lse,
            kv_last,
            probs,
            index: None,
        };
        Io { q, kv, o, d_o, saved, grads: None }
    }

    fn ops(&mut self, b: &mut Builder, way: &Way, pass: Pass) {
        let scratch = way.core.scratch(b);
        let ulysses = way.ulysses.as_ref().map(|u| (u, u.scratch(b)));
        if pass.has_forward() {
            if let Some((u, s)) = &ulysses {
                u.scatter_qkv(b, s, [self.q, self.kv], [self.saved.q, self.saved.kv]);
            }
            way.core.forward(b, &scratch, self.saved, false);
            if let Some((u, s)) = &ulysses {
                u.gather_o(b, s, self.saved.o, self.o);
            }
        }
        if pass.has_backward() {
            let d_o = ulysses.as_ref().map_or(self.d_o, |(u, s)| u.scatter_do(b, s, self.d_o));
            let grads = way.core.backward(b, &scratch, self.saved, d_o);
            self.grads = Some(ulysses.as_ref().map_or(grads, |(u, s)| u.gather_dqkv(b, s, grads)));
        }
    }

    fn feed(&self, way: &Way, spec: &AttentionSpec, pass: Pass) -> AttentionFeed {
        let outside = |what, buf: Buf| Held {
            what,
            tensor: buf.tensor(),
            slot: buf.slot,
            segs: way.segs.clone(),
            heads_over: None,
        };
        let inside = |what, buf: Buf| Held {
            segs: way.core.shape().block.q.clone(),
            heads_over: way.ulysses.as_ref().map(|_| Axis::Up),
            ..outside(what, buf)
        };
        let (mut given, mut taken) = (vec![], vec![]);
        if pass.has_forward() {
            given.extend([outside(Operand::Q, self.q), outside(Operand::Kv, self.kv)]);
            taken.push(outside(Operand::O, self.o));
            taken.extend(self.saved.lse.map(|lse| inside(Operand::Lse, lse)));
        } else {
            let (Saved { q, kv, o, kv_last, .. }, lse) = (self.saved, self.saved.lse());
            let kept = [(Operand::Q, q), (Operand::O, o), (Operand::Lse, lse)];
            given.extend(kept.map(|(what, buf)| inside(what, buf)));
            given.push(match kv_last {
                None => inside(Operand::Kv, kv),
                Some(last) => {
                    let (came, from) = (inside(Operand::Kv, last), way.core.last_from());
                    Held { segs: came.segs.shifted(Axis::Cp, from), ..came }
                }
            });
        }
        if let Some((dq, dkv)) = self.grads {
            given.push(outside(Operand::DO, self.d_o));
            taken.extend([outside(Operand::Dq, dq), outside(Operand::Dkv, dkv)]);
        }
        AttentionFeed { spec: spec.clone(), pass, given, taken }
    }
}

fn about(spec: &AttentionSpec, pass: Pass, par: &Parallelism) -> About {
    let (a, k, d) = (spec.heads, spec.kv_heads, spec.head_dim);
    About {
        model: format!("attention {a}x{d}, {k} KV heads"),
        strategy: par.strategy(false).into(),
        seq_len: spec.seq_len,
        global_batch: spec.batch,
        micro_batch: spec.batch,
        documents: spec.mask.documents.clone(),
        par: *par,
        dtype: spec.dtype.name().into(),
        model_flops: spec.flops(pass),
        model_spec: None,
    }
}
