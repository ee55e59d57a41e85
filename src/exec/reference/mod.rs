//! The oracle: one training step of a dense Llama or GPT, on one rank, in f64, with none of the machinery that
//! it judges. Nothing here is fast; every line is meant to be seen to be right.
//!
//! Legend: s tokens of one sequence, h hidden, a heads, k KV heads, d head dim, f feed-forward width,
//! v vocabulary. Weights are [out, in], as Hugging Face stores them.

mod alone;
mod attention;
mod config;
mod experts;
mod fp8;
mod indexer;
mod latent;
mod layer;
mod mamba;
mod math;
mod mixers;
mod mtp;
pub mod muon;
#[cfg(test)]
mod tests;

pub use alone::attention;
pub use config::{Blocks, DenseConfig, Experts, Mla, Mtp};

use crate::plan::Adam;
use layer::Model;
use math::Mat;
use ndarray::Array2;
use std::collections::BTreeMap;

pub struct StepResult {
    /// The loss, a mean over all tokens of the batch.
    pub loss: f64,
    /// What indexers learn by beside the loss: the divergence of their scores, a mean over tokens, of all layers together.
    pub divergence: f64,
    /// Per sequence, [s, h]: what the last layer hands to the final norm.
    pub hidden: Vec<Vec<f64>>,
    pub grads: BTreeMap<String, Vec<f64>>,
    /// The parameters after the step of the optimizer.
    pub new_params: BTreeMap<String, Vec<f64>>,
}

/// The sequences of a step: tokens, and the targets that belong to them.
pub type Batch = (Vec<Vec<u32>>, Vec<Vec<u32>>);

/// Steps of training one after the other, each on its own batch.
pub fn train(
    cfg: &DenseConfig,
    params: &BTreeMap<String, Vec<f64>>,
    batches: impl IntoIterator<Item = Batch>,
    adam: &Adam,
) -> Vec<StepResult> {
    train_anew(params, batches.into_iter().map(|batch| (cfg.clone(), batch)), adam)
}

/// Steps of training as of [`train`], where tokens choose other experts in each step.
pub fn train_anew(
    params: &BTreeMap<String, Vec<f64>>,
    steps: impl IntoIterator<Item = (DenseConfig, Batch)>,
    adam: &Adam,
) -> Vec<StepResult> {
    let mut moments = BTreeMap::new();
    let mut all: Vec<StepResult> = vec![];
    for (i, (cfg, (tokens, targets))) in (1..).zip(steps) {
        let params = all.last().map_or(params, |last| &last.new_params);
        let mut result = step(&cfg, params, &tokens, &targets, adam);
        for (name, new) in &mut result.new_params {
            let moments = moments.entry(name.clone()).or_default();
            *new = updated(&cfg, name, &params[name], &result.grads[name], moments, i, adam);
        }
        all.push(result);
    }
    all
}

/// The experts that routers choose, token by token, the highest scores first, of every layer that has experts. `params`
/// may have more than [`step`] takes: what routers add to scores to choose by. By layer and sequence, as [`Experts::choices`] has them.
///
/// # Panics
/// As [`step`] does.
pub fn route(cfg: &DenseConfig, params: &BTreeMap<String, Vec<f64>>, tokens: &[Vec<u32>]) -> Vec<Vec<Vec<u32>>> {
    let mut weights: Tensors = cfg.shapes().into_iter().map(|(name, shape)| load(params, name, shape)).collect();
    let bias = |name: &String| name.ends_with(config::ROUTER_BIAS);
    for (name, values) in params.iter().filter(|(name, _)| bias(name)) {
        let (name, bias) = load(params, name.clone(), (1, values.len()));
        weights.insert(name, bias);
    }
    let model = Model { cfg, weights: &weights, grads: Tensors::new(), loss: 0.0, divergence: 0.0, count: 1.0 };
    let mut layers = vec![vec![]; cfg.experts_before(cfg.layers)];
    for (number, tokens) in tokens.iter().enumerate() {
        for (layer, choices) in layers.iter_mut().zip(model.route(number, tokens)) {
            layer.push(choices);
        }
    }
    layers
}

/// Forward, backward and the first optimizer step. `params` are those that [`DenseConfig::shapes`] lists.
///
/// # Panics
/// Where a parameter is missing or has another size, or a token is outside the vocabulary.
pub fn step(
    cfg: &DenseConfig,
    params: &BTreeMap<String, Vec<f64>>,
    tokens: &[Vec<u32>],
    targets: &[Vec<u32>],
    adam: &Adam,
) -> StepResult {
    let weights: Tensors = cfg.shapes().into_iter().map(|(name, shape)| load(params, name, shape)).collect();
    let grads = weights.iter().map(|(name, w)| (name.clone(), Array2::zeros(w.raw_dim()))).collect();
    let count = tokens.iter().map(Vec::len).sum::<usize>() as f64;
    let mut model = Model { cfg, weights: &weights, grads, loss: 0.0, divergence: 0.0, count };
    let numbered = tokens.iter().zip(targets).enumerate();
    let hidden = numbered.map(|(i, (t, y))| model.sequence(i, t, y).into_raw_vec_and_offset().0).collect();
    let (loss, divergence) = (model.loss, model.divergence);
    let grads: BTreeMap<_, _> = model.grads.into_iter().map(|(n, g)| (n, g.into_raw_vec_and_offset().0)).collect();
    let first = |(name, g): (&String, &Vec<f64>)| {
        (name.clone(), updated(cfg, name, &params[name], g, &mut Moments::default(), 1, adam))
    };
    let new_params = grads.iter().map(first).collect();
    StepResult { loss, divergence, hidden, grads, new_params }
}

type Tensors = BTreeMap<String, Mat>;

fn load(params: &BTreeMap<String, Vec<f64>>, name: String, shape: (usize, usize)) -> (String, Mat) {
    let given = params.get(&name).unwrap_or_else(|| panic!("the parameter {name} is missing"));
    let weight = Array2::from_shape_vec(shape, given.clone());
    let weight = weight.unwrap_or_else(|_| panic!("{name} has {} elements, not {shape:?}", given.len()));
    (name, weight)
}

/// The running means of a gradient and of its square; empty before the first step.
#[derive(Default)]
struct Moments {
    m: Vec<f64>,
    v: Vec<f64>,
}

/// A parameter after step `t` of its optimizer, Adam or Muon.
fn updated(
    cfg: &DenseConfig,
    name: &str,
    param: &[f64],
    grad: &[f64],
    moments: &mut Moments,
    t: i32,
    adam: &Adam,
) -> Vec<f64> {
    match cfg.muon.get(name) {
        Some(pieces) => muon::step(param, grad, &mut moments.m, pieces, adam),
        None => adam_step(param, grad, moments, t, adam),
    }
}

/// Step `t`, counted from 1: m = beta1 m + (1 - beta1) g and v = beta2 v + (1 - beta2) g², each divided by its
/// bias 1 - beta^t; the weight first loses the share lr * decay of itself.
fn adam_step(param: &[f64], grad: &[f64], moments: &mut Moments, t: i32, adam: &Adam) -> Vec<f64> {
    moments.m.resize(grad.len(), 0.0);
    moments.v.resize(grad.len(), 0.0);
    let updated = (0..grad.len()).map(|i| {
        let (g, m, v) = (grad[i], &mut moments.m[i], &mut moments.v[i]);
        *m = adam.beta1 * *m + (1.0 - adam.beta1) * g;
        *v = adam.beta2 * *v + (1.0 - adam.beta2) * g * g;
        let (m_hat, v_hat) = (*m / (1.0 - adam.beta1.powi(t)), *v / (1.0 - adam.beta2.powi(t)));
        param[i] - adam.lr * adam.weight_decay * param[i] - adam.lr * m_hat / (v_hat.sqrt() + adam.eps)
    });
    updated.collect()
}
