//! A whole training step of a one-layer model, kernel by kernel, against the dense reference.

use super::testing::*;
use super::{Scalar, run};
use crate::exec::reference::{Blocks, DenseConfig, Mtp, StepResult, step};
use crate::plan::{Adam, AttnBlock, Kernel, Segs};
use crate::spec::{Documents, Factor, Mask};
use std::collections::BTreeMap;

const BATCH: u64 = 2;
const SEQ: u64 = 5;
const N: u64 = BATCH * SEQ;
const CFG: &DenseConfig = &DenseConfig {
    layers: 1,
    hidden: 6,
    heads: 4,
    kv_heads: 2,
    head_dim: 4,
    ffn: 5,
    vocab: 7,
    eps: 1e-5,
    theta: 100.0,
    scaling: None,
    score_factor: 1.0,
    tie: false,
    blocks: Blocks::LLAMA,
    window: None,
    documents: Vec::new(),
    mla: None,
    indexer: None,
    experts: None,
    dense_layers: 0,
    every: 0,
    dense_at: Vec::new(),
    windowed: Vec::new(),
    pattern: vec![],
    mamba: None,
    mtp: Mtp { depth: 0, layers: 0, part: 0.0 },
    muon: BTreeMap::new(),
};
const ADAM: Adam = Adam { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
const H: u64 = CFG.hidden as u64;
const F: u64 = CFG.ffn as u64;
const V: u64 = CFG.vocab as u64;
const A: u64 = CFG.heads as u64;
const K: u64 = CFG.kv_heads as u64;
const D: u64 = CFG.head_dim as u64;
/// Elements of a row of q, kv and qkv.
const Q: u64 = A * D;
const KV: u64 = 2 * K * D;
const QKV: u64 = Q + KV;

type Params = BTreeMap<String, Vec<f64>>;

fn params() -> Params {
    let shapes = CFG.shapes().into_iter().enumerate();
    shapes.map(|(i, (name, (rows, cols)))| (name, random(rows * cols, i as u64))).collect()
}

fn tokens() -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    (vec![vec![1, 5, 0, 5, 2], vec![6, 1, 3, 3, 0]], vec![vec![5, 0, 5, 2, 4], vec![1, 3, 3, 0, 6]])
}

/// The tape of one step: runs kernels into fresh buffers and keeps the gradients.
struct Tape<T> {
    weights: BTreeMap<String, Vec<T>>,
    grads: BTreeMap<String, Vec<T>>,
}

fn cast<T: Scalar>(x: &[f64]) -> Vec<T> {
    x.iter().map(|&x| T::from_f64(x)).collect()
}

fn ids<T: Scalar>(ids: &[Vec<u32>]) -> Vec<T> {
    ids.concat().iter().map(|&id| T::from_f64(f64::from(id))).collect()
}

/// One kernel into `sizes` buffers of NaN.
fn call<T: Scalar, const W: usize>(kernel: Kernel, reads: &[&[T]], sizes: [u64; W]) -> [Vec<T>; W] {
    let mut out = sizes.map(|n| vec![T::from_f64(f64::NAN); n as usize]);
    let reads: Vec<Option<&[T]>> = reads.iter().map(|x| Some(*x)).collect();
    launch(&kernel, &reads, &mut out.each_mut().map(|x| &mut x[..]));
    out
}

fn block() -> AttnBlock {
    let all = || Segs::new(SEQ, &[]);
    AttnBlock {
        q: all(),
        kv: all(),
        batch: BATCH,
        heads: A,
        kv_heads: K,
        head_dim: D,
        v_dim: None,
        mask: Mask::new(true),
        factor: Factor::ONE,
    }
}

fn rope(backward: bool) -> Kernel {
    let (segs, theta) = (Segs::new(SEQ, &[]), CFG.theta);
    Kernel::Rope {
        segs,
        documents: Documents::default(),
        batch: BATCH,
        heads: A,
        kv_heads: K,
        head_dim: D,
        theta,
        backward,
        rotary: None,
        scaling: None,
    }
}

const NORM: Kernel = Kernel::Norm { rows: N, cols: H, eps: CFG.eps };

impl<T: Scalar> Tape<T> {
    fn new(params: &Params) -> Tape<T> {
        let weights = params.iter().map(|(name, w)| (name.clone(), cast(w))).collect();
        let grads = params.iter().map(|(name, w)| (name.clone(), vec![T::zero(); w.len()])).collect();
        Tape { weights, grads }
    }

    fn key(&self, part: &str) -> String {
        self.weights.keys().find(|name| name.contains(part)).expect("a weight has this name").clone()
    }

    fn w(&self, part: &str) -> &[T] {
        &self.weights[&self.key(part)]
    }

    fn norm(&self, part: &str, x: &[T]) -> Vec<T> {
        let [y] = call(NORM, &[x, self.w(part)], [N * H]);
        y
    }

    fn norm_bwd(&mut self, part: &str, x: &[T], dy: &[T], residual: &[T]) -> Vec<T> {
        let key = self.key(part);
        let kernel = Kernel::NormBwd { rows: N, cols: H, eps: CFG.eps };
        let [dx, dw] = call(kernel, &[x, self.w(part), dy, residual, &self.grads[&key]], [N * H, H]);
        self.grads.insert(key, dw);
        dx
    }

    /// y = x Wᵀ, W stored [out, in].
    fn linear(&self, part: &str, x: &[T], out: u64) -> Vec<T> {
        let kernel = Kernel::MatMul {
            m: N,
            n: out,
            k: x.len() as u64 / N,
            a_t: false,
            b_t: true,
            accumulate: false,
            fp8: false,
            bias: false,
        };
        let [y] = call(kernel, &[x, self.w(part)], [N * out]);
        y
    }

    /// dW += dyᵀ x, dx = dy W.
    fn linear_bwd(&mut self, part: &str, x: &[T], dy: &[T]) -> Vec<T> {
        let (out, inner, key) = (dy.len() as u64 / N, x.len() as u64 / N, self.key(part));
        let by_weight =
            Kernel::MatMul { m: out, n: inner, k: N, a_t: true, b_t: false, accumulate: true, fp8: false, bias: false };
        let [dw] = call(by_weight, &[dy, x, &self.grads[&key]], [out * inner]);
        self.grads.insert(key, dw);
        let by_input = Kernel::MatMul {
            m: N,
            n: inner,
            k: out,
            a_t: false,
            b_t: false,
            accumulate: false,
            fp8: false,
            bias: false,
        };
        let [dx] = call(by_input, &[dy, self.w(part)], [N * inner]);
        dx
    }

    fn add(x: &[T], y: &[T]) -> Vec<T> {
        let [sum] = call(Kernel::Add { elems: N * H, trim: None }, &[x, y], [N * H]);
        sum
    }

    /// The loss and the last layer's output; the gradients stay in the tape.
    fn step(&mut self) -> (T, Vec<T>) {
        let (tokens, targets) = tokens();
        let (tokens, targets): (Vec<T>, Vec<T>) = (ids(&tokens), ids(&targets));
        let swiglu = Kernel::SwiGlu { rows: N, cols: F };

        let [x0] =
            call(Kernel::Embed { rows: N, cols: H, vocab: V, shard: None }, &[&tokens, self.w("embed")], [N * H]);
        let n1 = self.norm("input_layernorm", &x0);
        let [q, kv] = call(rope(false), &[&self.linear("qkv", &n1, QKV)], [N * Q, N * KV]);
        let [o, lse] = call(Kernel::Attention(block()), &[&q, &kv], [N * Q, N * A]);
        let x1 = Self::add(&x0, &self.linear("o_proj", &o, H));
        let n2 = self.norm("post_attention", &x1);
        let gate_up = self.linear("gate_up", &n2, 2 * F);
        let [act] = call(swiglu, &[&gate_up], [N * F]);
        let x2 = Self::add(&x1, &self.linear("down", &act, H));
        let n3 = self.norm("model.norm", &x2);
        let logits = self.linear("lm_head", &n3, V);
        let head = Kernel::CrossEntropy { rows: N, vocab: V, scale: 1.0 / N as f64 };
        let [d_logits, loss] = call(head, &[&logits, &targets, &[T::zero()]], [N * V, 1]);

        let dn3 = self.linear_bwd("lm_head", &n3, &d_logits);
        let dx2 = self.norm_bwd("model.norm", &x2, &dn3, &cast(&[0.0; (N * H) as usize]));
        let d_act = self.linear_bwd("down", &act, &dx2);
        let [d_gate_up] = call(Kernel::SwiGluBwd { rows: N, cols: F }, &[&gate_up, &d_act], [2 * N * F]);
        let dn2 = self.linear_bwd("gate_up", &n2, &d_gate_up);
        let dx1 = self.norm_bwd("post_attention", &x1, &dn2, &dx2);
        let d_o = self.linear_bwd("o_proj", &o, &dx1);
        let [delta] = call(Kernel::AttentionDelta { rows: N, heads: A, head_dim: D }, &[&o, &d_o], [N * A]);
        let attention_bwd = Kernel::AttentionBwd(block());
        let [dq, dkv] = call(attention_bwd, &[&q, &kv, &d_o, &lse, &delta], [N * Q, N * KV]);
        let [d_qkv] = call(rope(true), &[&dq, &dkv], [N * QKV]);
        let dn1 = self.linear_bwd("qkv", &n1, &d_qkv);
        let dx0 = self.norm_bwd("input_layernorm", &x0, &dn1, &dx1);
        let key = self.key("embed");
        let embed_bwd = Kernel::EmbedBwd { rows: N, cols: H, vocab: V, shard: None };
        let [d_table] = call(embed_bwd, &[&tokens, &dx0, &self.grads[&key]], [V * H]);
        self.grads.insert(key, d_table);
        (loss[0], x2)
    }

    fn adam(&mut self) {
        let Adam { lr, beta1, beta2, eps, weight_decay } = ADAM;
        for (name, w) in &mut self.weights {
            let kernel = Kernel::Adam { elems: w.len() as u64, lr, beta1, beta2, eps, weight_decay };
            let (mut m, mut v) = (vec![T::zero(); w.len()], vec![T::zero(); w.len()]);
            let reads = [Some(&self.grads[name][..]), None, None, None];
            run(&kernel, &ring(1), 0, 1, &reads, &mut [w, &mut m, &mut v]);
        }
    }
}

fn compare<T: Scalar>(tolerance: f64) {
    let (params, (tokens, targets)) = (params(), tokens());
    let want: StepResult = step(CFG, &params, &tokens, &targets, &ADAM);
    let mut tape = Tape::<T>::new(&params);
    let (loss, hidden) = tape.step();
    tape.adam();
    let wide = |x: &[T]| -> Vec<f64> { x.iter().map(|x| x.to_f64()).collect() };
    assert_close(&[loss.to_f64()], &[want.loss], tolerance);
    assert_close(&wide(&hidden), &want.hidden.concat(), tolerance);
    for name in params.keys() {
        assert_close(&wide(&tape.grads[name]), &want.grads[name], tolerance);
        // The first step of Adam divides a gradient by itself: rounding of a tiny one shows there.
        assert_close(&wide(&tape.weights[name]), &want.new_params[name], 10.0 * tolerance);
    }
}

#[test]
fn a_step_in_f64_is_the_reference() {
    compare::<f64>(1e-12);
}

#[test]
fn a_step_in_f32_is_the_reference_rounded() {
    compare::<f32>(1e-5);
}
