//! Writes what a step brought, so that it can be held against the same model elsewhere.

use super::names::{Family, Piece, transpose};
use crate::error::{Error, Result};
use crate::exec::Run;
use crate::plan::{Adam, Plan};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The step that a file is about.
pub struct Dump<'a> {
    pub plan: &'a Plan,
    pub run: &'a Run,
    /// The tensors that the model's checkpoint has beside the plan's weights, and no step changes.
    pub beside: &'a BTreeMap<String, Vec<f64>>,
    pub step: u64,
}

/// A tensor as it is written: its shape, and its values as f32, little-endian.
type Written = (Vec<usize>, Vec<u8>);

/// `loss`, `logits` `[batch, seq, vocab]`, and for every tensor of the model's checkpoint `new.<name>`, and `grad.<name>` if
/// it is trained, f32, in the checkpoint's shapes. The metadata says what they mean. Errors: a plan that is no training
/// step, a model whose weights are not written, a file that cannot be.
pub fn dump(path: &Path, dump: &Dump) -> Result<()> {
    let Dump { plan, run, beside, step } = *dump;
    let model = plan.model()?;
    let family = Family::of(model)?;
    let vocab = plan.inputs()?.vocab as usize;
    let mut all: BTreeMap<String, Written> = BTreeMap::from([("loss".into(), (vec![], bytes(&[run.loss])))]);
    let shape = vec![run.logits.len(), plan.about.seq_len as usize, vocab];
    all.insert("logits".into(), (shape, bytes(&run.logits.concat())));
    for param in &plan.params {
        for (what, values) in [("grad", &run.grads), ("new", &run.weights)] {
            let Some(values) = values.get(&param.name) else { continue };
            for piece in family.pieces(model, param) {
                let row = Piece::row(param);
                let part = &values[piece.rows.start * row..piece.rows.end * row];
                let part = if piece.transposed { transpose(part, row) } else { part.to_vec() };
                all.insert(format!("{what}.{}", piece.name), (piece.shape(param), bytes(&part)));
            }
        }
    }
    for (name, values) in beside {
        all.insert(format!("new.{name}"), (vec![values.len()], bytes(values)));
    }
    let wrong = |e: safetensors::SafeTensorError| Error::spec(path.display(), "contents", e);
    let mut views = BTreeMap::new();
    for (name, (shape, bytes)) in &all {
        views.insert(name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).map_err(wrong)?);
    }
    // Its own writer would put another file in the place of a link or a device.
    let file = safetensors::serialize(views, Some(meaning(plan, step))).map_err(wrong)?;
    std::fs::write(path, file).map_err(Error::io(path))
}

fn bytes(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect()
}

/// The conventions, for whoever compares.
fn meaning(plan: &Plan, step: u64) -> HashMap<String, String> {
    let Adam { lr, beta1, beta2, eps, weight_decay } = plan.optimizer().unwrap_or_default();
    let about = &plan.about;
    let by_muon = plan.params.iter().any(|param| !param.matrices.is_empty());
    let but = if by_muon { " but matrices of layers, which move by Muon with a momentum of 0.95" } else { "" };
    [
        ("format", "pt".to_string()),
        ("model", about.model.clone()),
        ("plan", plan.hash()),
        ("step", step.to_string()),
        ("loss", "mean cross-entropy in nats over all tokens of the global batch; the target of token i is token i + 1 of its sequence of seq_len + 1 ids".into()),
        ("logits", "[global batch, seq_len, vocabulary], before the optimizer step".into()),
        ("grad", "of loss, summed over all ranks and microbatches, before the optimizer step; not clipped".into()),
        ("new", "weights after the optimizer step; what no gradient reaches, as it was".into()),
        ("optimizer", format!("AdamW as torch.optim.AdamW has it, on every weight{but}: lr {lr}, betas ({beta1}, {beta2}), eps {eps}, weight_decay {weight_decay}; moments corrected for their bias by the step number {step}")),
        ("seq_len", about.seq_len.to_string()),
        ("global_batch", about.global_batch.to_string()),
    ]
    .into_iter()
    .map(|(key, value)| (key.into(), value))
    .collect()
}
