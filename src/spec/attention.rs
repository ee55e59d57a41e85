//! One attention operation, whatever model it stands in.

use super::{Dtype, Mask};
use serde::{Deserialize, Serialize};

/// Attention over whole sequences: what all the ranks that share them compute together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionSpec {
    /// Sequences at a time.
    pub batch: u64,
    /// Tokens of a whole sequence.
    pub seq_len: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub mask: Mask,
    /// Of queries, keys, values and their gradients; sums are at least F32.
    pub dtype: Dtype,
}

impl AttentionSpec {
    /// Dtype of running sums and of log-sum-exps.
    pub fn acc(&self) -> Dtype {
        if self.dtype == Dtype::F64 { Dtype::F64 } else { Dtype::F32 }
    }

    /// FLOPs as benchmarks of attention kernels count them: forward 4 b s^2 a d, half of it under a causal mask, and
    /// of a window or of documents what they leave; backward 2.5 times as many, five products for two (Dao,
    /// arXiv:2307.08691, section 4.1).
    pub fn flops(&self, pass: Pass) -> f64 {
        let [b, a, d] = [self.batch, self.heads, self.head_dim].map(|n| n as f64);
        let forward = 4.0 * b * self.mask.pairs(self.seq_len) * a * d;
        let times = f64::from(u8::from(pass.has_forward())) + 2.5 * f64::from(u8::from(pass.has_backward()));
        forward * times
    }
}

/// Which ops an attention-only plan has. The backward pass alone finds there what a forward pass would have kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    Forward,
    Backward,
    ForwardBackward,
}

impl Pass {
    pub const ALL: [Pass; 3] = [Pass::Forward, Pass::Backward, Pass::ForwardBackward];

    /// As flags and reports have it.
    pub fn name(self) -> &'static str {
        match self {
            Pass::Forward => "fwd",
            Pass::Backward => "bwd",
            Pass::ForwardBackward => "fwd+bwd",
        }
    }

    pub fn named(name: &str) -> Option<Pass> {
        Pass::ALL.into_iter().find(|p| p.name() == name)
    }

    pub fn has_forward(self) -> bool {
        self != Pass::Backward
    }

    pub fn has_backward(self) -> bool {
        self != Pass::Forward
    }
}
