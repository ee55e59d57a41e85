//! The graphs of attention that cuDNN knows: softmax(scale q kT) v with its log-sum-exp, and the gradients of q, k and v
//! (NVIDIA cuDNN documentation, "Attention": scaled dot product attention forward and backward, in single operations).

use super::super::fused::{Pass, Sdpa};
use super::api::{Api, Failed};
use super::graph::{Graph, Shape, Tensor, Whole};
use super::names::{data, pointwise, reduce};
use std::rc::Rc;

type Called<T> = std::result::Result<T, Failed>;

/// The graph of a pass. Operands are bound in the order of [`Pass`].
pub fn graph(api: &Rc<Api>, sdpa: &Sdpa) -> Called<Whole> {
    let mut on = Writer { graph: Graph::new(api), of: sdpa, hidden: hidden(api) };
    match sdpa.pass {
        Pass::Forward => on.forward()?,
        Pass::Backward => on.backward()?,
    }
    on.graph.finish()
}

/// The number that a hidden score becomes: until 9.10 the masks of the library are looked for with the least float
/// there is.
fn hidden(api: &Api) -> f32 {
    if api.version() < 91_000 { f32::MIN } else { f32::NEG_INFINITY }
}

struct Writer<'a> {
    graph: Graph,
    of: &'a Sdpa,
    hidden: f32,
}

impl Writer<'_> {
    /// The shape of rows, the heads of a row side by side.
    fn rows(&self, side: usize, heads: u64, cols: u64, row: u64) -> Shape {
        let (batch, rows, pitch) = (self.of.batch, self.of.rows[side], self.of.pitch[side]);
        Shape { dims: [batch, heads, rows, cols], strides: [pitch * row, cols, row, 1] }
    }

    fn queries(&self, cols: u64) -> Shape {
        let heads = self.of.heads[0];
        self.rows(0, heads, cols, heads * cols)
    }

    fn keys(&self, cols: u64) -> Shape {
        self.rows(1, self.of.heads[1], cols, self.of.kv_row())
    }

    /// Shapes with a number for every query and key, and for every query.
    fn scores(&self) -> Shape {
        let [queries, keys] = self.of.rows;
        Shape::packed([self.of.batch, self.of.heads[0], queries, keys])
    }

    fn sums(&self) -> Shape {
        Shape::packed([self.of.batch, self.of.heads[0], self.of.rows[0], 1])
    }

    fn scale(&mut self) -> Called<Tensor> {
        self.graph.float(self.of.scale.0 as f32)
    }

    fn hide(&mut self, scores: Tensor) -> Called<Tensor> {
        match self.of.diagonal {
            Some(diagonal) => self.graph.hide(scores, self.scores(), diagonal, self.hidden),
            None => Ok(scores),
        }
    }

    fn float(&mut self, shape: Shape) -> Called<Tensor> {
        self.graph.between(shape, data::FLOAT)
    }

    fn bf16(&mut self, shape: Shape) -> Called<Tensor> {
        self.graph.between(shape, data::BF16)
    }

    /// `mode` of two tensors, in floats of that shape.
    fn zip(&mut self, mode: i32, x: Tensor, y: Tensor, shape: Shape) -> Called<Tensor> {
        let to = self.float(shape)?;
        self.graph.zip(mode, x, y, to)
    }

    fn map(&mut self, mode: i32, x: Tensor, shape: Shape) -> Called<Tensor> {
        let to = self.float(shape)?;
        self.graph.map(mode, x, to)
    }

    fn forward(&mut self) -> Called<()> {
        let (d, dv, scores, sums) = (self.of.head_dim, self.of.v_dim, self.scores(), self.sums());
        let q = self.graph.operand(self.queries(d), data::BF16)?;
        let k = self.graph.operand(self.keys(d).transposed(), data::BF16)?;
        let v = self.graph.operand(self.keys(dv), data::BF16)?;
        let o = self.graph.operand(self.queries(dv), data::BF16)?;
        let lse = self.graph.operand(self.queries(1), data::FLOAT)?;

        let s = self.float(scores)?;
        let s = self.graph.product(q, k, s)?;
        let scale = self.scale()?;
        let s = self.zip(pointwise::MUL, s, scale, scores)?;
        let s = self.hide(s)?;
        let top = self.float(sums)?;
        let top = self.graph.reduce(reduce::MAX, s, top)?;
        let below = self.zip(pointwise::SUB, s, top, scores)?;
        let powers = self.map(pointwise::EXP, below, scores)?;
        let sum = self.float(sums)?;
        let sum = self.graph.reduce(reduce::ADD, powers, sum)?;
        let log = self.map(pointwise::LOG, sum, sums)?;
        self.graph.zip(pointwise::ADD, top, log, lse)?;
        let p = self.bf16(scores)?;
        let p = self.graph.zip(pointwise::DIV, powers, sum, p)?;
        self.graph.product(p, v, o)?;
        Ok(())
    }

    fn backward(&mut self) -> Called<()> {
        let (d, dv, scores, sums) = (self.of.head_dim, self.of.v_dim, self.scores(), self.sums());
        let q = self.graph.operand(self.queries(d), data::BF16)?;
        let k = self.graph.operand(self.keys(d).transposed(), data::BF16)?;
        let v = self.graph.operand(self.keys(dv).transposed(), data::BF16)?;
        let o = self.graph.operand(self.queries(dv), data::BF16)?;
        let d_o = self.graph.operand(self.queries(dv), data::BF16)?;
        let lse = self.graph.operand(self.queries(1), data::FLOAT)?;
        let dq = self.graph.operand(self.queries(d), data::BF16)?;
        let dk = self.graph.operand(self.keys(d), data::BF16)?;
        let d_v = self.graph.operand(self.keys(dv), data::BF16)?;
        let delta = self.graph.operand(sums, data::FLOAT)?;
        let dq_sum = self.graph.operand(Shape::packed(self.queries(d).dims), data::FLOAT)?;

        // The sums of dO o.
        let both = self.zip(pointwise::MUL, d_o, o, Shape::packed(self.queries(dv).dims))?;
        let sum = self.float(sums)?;
        let sum = self.graph.reduce(reduce::ADD, both, sum)?;
        // One in place of dropout's factor.
        let one = self.graph.float(1.0)?;
        let delta = self.graph.zip(pointwise::MUL, sum, one, delta)?;

        let s = self.float(scores)?;
        let s = self.graph.product(q, k, s)?;
        let scale = self.scale()?;
        let s = self.zip(pointwise::MUL, s, scale, scores)?;
        let s = self.zip(pointwise::SUB, s, lse, scores)?;
        let s = self.hide(s)?;
        let p = self.map(pointwise::EXP, s, scores)?;
        self.of_keys(p, d_o, d_v, dv)?;

        let dp = self.float(scores)?;
        let dp = self.graph.product(d_o, v, dp)?;
        let dp = self.zip(pointwise::SUB, dp, delta, scores)?;
        let ds = self.zip(pointwise::MUL, dp, p, scores)?;
        let ds = self.zip(pointwise::MUL, ds, scale, scores)?;
        self.of_keys(ds, q, dk, d)?;

        let back = self.bf16(self.keys(d))?;
        let back = self.graph.reshape(k, back)?;
        self.graph.product(ds, back, dq_sum)?;
        self.graph.map(pointwise::IDENTITY, dq_sum, dq)?;
        Ok(())
    }

    /// `to` = xT y, summed over the query heads of each of its own.
    fn of_keys(&mut self, x: Tensor, y: Tensor, to: Tensor, cols: u64) -> Called<()> {
        let [heads, kv_heads] = self.of.heads;
        let turned = self.bf16(self.scores().transposed())?;
        let turned = self.graph.reshape(x, turned)?;
        if heads == kv_heads {
            self.graph.product(turned, y, to)?;
            return Ok(());
        }
        let all = self.bf16(Shape::packed([self.of.batch, heads, self.of.rows[1], cols]))?;
        let all = self.graph.product(turned, y, all)?;
        self.graph.reduce(reduce::ADD, all, to)?;
        Ok(())
    }
}
