//! Attention with its scores in memory, as before FlashAttention (Megatron-LM's `CoreAttention`): all keys are here.
//!
//! ```text
//! scores = q k^T / sqrt(d)  |  softmax under the mask  |  dropout  |  o = p v
//! ```
//! What the backward pass needs of it, 5 a s^2 b bytes a layer (Korthikanti et al., arXiv:2205.05198, section 4.1),
//! is kept, or with selective recomputation computed again from q, k and v (section 5).

use super::attention::{Saved, Shape};
use crate::plan::{Axis, Buf, Builder, Dtype, HeadDropout, Kernel, ScoreStep, TensorKind};

#[derive(Debug, Clone)]
pub struct Unfused {
    pub shape: Shape,
    /// Probability to drop an attention probability.
    pub dropout: f64,
    /// Whether the backward pass begins with the forward pass run again.
    pub again: bool,
}

/// The buffers that softmax and dropout write.
#[derive(Clone, Copy)]
pub struct Probs {
    pub probs: Buf,
    /// The probabilities that dropout left, and which of them stayed; `None` without dropout.
    pub dropped: Option<[Buf; 2]>,
}

impl Probs {
    /// The probabilities that the values are multiplied with.
    fn used(&self) -> Buf {
        self.dropped.map_or(self.probs, |[left, _]| left)
    }
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    scores: Buf,
    /// Room for the probabilities; `None` where they are kept.
    probs: Option<Probs>,
    d_probs: Buf,
    /// The gradient of the probabilities that dropout left; `None` without dropout.
    d_left: Option<Buf>,
    dq: Buf,
    dkv: Buf,
}

impl Unfused {
    /// Matrices of scores have a row for every query of every head.
    fn rows(&self) -> u64 {
        self.shape.rows() * self.shape.block.heads
    }

    /// Declares buffers for the probabilities; `declare` is told name, rows, elements of a row and dtype.
    pub fn probs(&self, mut declare: impl FnMut(&str, u64, u64, Dtype) -> Buf) -> Probs {
        let (rows, keys, dtype) = (self.rows(), self.shape.seq, self.shape.dtype);
        let probs = declare("probs", rows, keys, dtype);
        let mut room = |name, dtype| declare(name, rows, keys, dtype);
        let dropped = (self.dropout > 0.0).then(|| [room("probs_left", dtype), room("probs_stay", Dtype::U8)]);
        Probs { probs, dropped }
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let s = &self.shape;
        let mut work = |name: &str, rows, row, dtype| b.tensor(name, &[rows, row], dtype, TensorKind::Workspace, 1);
        Scratch {
            scores: work("scores", self.rows(), s.seq, s.dtype),
            probs: self.again.then(|| self.probs(&mut work)),
            d_probs: work("d_probs", self.rows(), s.seq, s.dtype),
            d_left: (self.dropout > 0.0).then(|| work("d_probs_left", self.rows(), s.seq, s.dtype)),
            dq: work("dq", s.rows(), s.q_row(), s.dtype),
            dkv: work("dkv", s.rows(), s.kv_row(), s.dtype),
        }
    }

    fn step(&self, b: &mut Builder, label: &str, step: ScoreStep, reads: &[Buf], writes: &[Buf]) {
        b.compute(label, Kernel::Unfused { block: self.shape.block.clone(), step }, reads, writes);
    }

    pub fn forward(&self, b: &mut Builder, s: &Scratch, io: Saved) {
        let p = s.probs.or(io.probs).expect("kept or computed again");
        self.step(b, "scores", ScoreStep::Scores, &[io.q, io.kv], &[s.scores]);
        self.step(b, "softmax", ScoreStep::Softmax, &[s.scores], &[p.probs]);
        if let Some(dropped) = p.dropped {
            let drop = HeadDropout { probability: self.dropout, heads_over: vec![Axis::Tp, Axis::Up] };
            self.step(b, "drop_probs", ScoreStep::Drop(drop), &[p.probs], &dropped);
        }
        self.step(b, "values", ScoreStep::Values, &[p.used(), io.kv], &[io.o]);
    }

    pub fn backward(&self, b: &mut Builder, s: &Scratch, io: Saved, d_o: Buf) -> (Buf, Buf) {
        if self.again {
            // The product with the values runs, too: a checkpoint runs again all that it wraps.
            self.forward(b, s, io);
        }
        let p = s.probs.or(io.probs).expect("kept or computed again");
        let d_used = s.d_left.unwrap_or(s.d_probs);
        self.step(b, "probs_bwd", ScoreStep::ProbsBwd, &[d_o, io.kv], &[d_used]);
        if let Some([_, stays]) = p.dropped {
            let kernel = Kernel::DropoutBwd { elems: self.rows() * self.shape.seq, probability: self.dropout };
            b.compute("drop_probs_bwd", kernel, &[d_used, stays], &[s.d_probs]);
        }
        self.step(b, "softmax_bwd", ScoreStep::SoftmaxBwd, &[p.probs, s.d_probs], &[s.d_probs]);
        self.step(b, "q_bwd", ScoreStep::QBwd, &[s.d_probs, io.kv], &[s.dq]);
        self.step(b, "kv_bwd", ScoreStep::KvBwd, &[s.d_probs, io.q, p.used(), d_o], &[s.dkv]);
        (s.dq, s.dkv)
    }
}
