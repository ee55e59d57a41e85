//! The norms of the residual stream, of both kinds.

use super::weights::{Rows, Weights};
use crate::plan::{Buf, Builder, Kernel};
use crate::spec::{LlmSpec, Norm};

/// Everything that holds for all norms of a model.
#[derive(Debug, Clone, Copy)]
pub struct Norms {
    kind: Norm,
    bias: bool,
    pub rows: u64,
    cols: u64,
    pub eps: f64,
}

impl Norms {
    /// The norms of a model on `rows` tokens at a time.
    pub fn new(model: &LlmSpec, rows: u64) -> Norms {
        let bias = model.bias && model.norm == Norm::Layer;
        Norms { kind: model.norm, bias, rows, cols: model.hidden, eps: model.rms_eps }
    }

    /// Lays out a norm's weight, and its bias where it has one behind it.
    pub fn weights(&self, w: &mut Weights, weight: &'static str, bias: &'static str) -> Rows {
        let mut rows = w.whole(weight, &[self.cols]);
        if self.bias {
            rows[1] = w.whole(bias, &[self.cols])[1];
        }
        rows
    }

    pub fn forward(&self, b: &mut Builder, label: &str, x: Buf, w: Buf, y: Buf) {
        let Norms { rows, cols, eps, bias, .. } = *self;
        let kernel = match self.kind {
            Norm::Rms => Kernel::Norm { rows, cols, eps },
            Norm::Layer => Kernel::LayerNorm { rows, cols, eps, bias },
        };
        b.compute(label, kernel, &[x, w], &[y]);
    }

    /// dx = residual + the norm's gradient; the gradient of the norm's weight is added to `g`.
    pub fn backward(&self, b: &mut Builder, label: &str, x: Buf, [w, g]: [Buf; 2], [dy, residual]: [Buf; 2], dx: Buf) {
        let Norms { rows, cols, eps, bias, .. } = *self;
        let kernel = match self.kind {
            Norm::Rms => Kernel::NormBwd { rows, cols, eps },
            Norm::Layer => Kernel::LayerNormBwd { rows, cols, eps, bias },
        };
        b.compute(label, kernel, &[x, w, dy, residual, g], &[dx, g]);
    }
}
