//! Layers of several kinds in one model, each of one mixer alone behind one norm: y = x + mixer(norm x)
//! (Nemotron-H, arXiv:2504.03624, section 2.1), and the sizes of a Mamba-2 mixer (arXiv:2405.21060, section 8).

use serde::{Deserialize, Serialize};

/// What a layer is made of, by the letters of Nemotron-H's `hybrid_override_pattern`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Mixer {
    #[serde(rename = "M")]
    Mamba,
    #[serde(rename = "*")]
    Attention,
    /// A dense feed-forward network.
    #[serde(rename = "-")]
    Mlp,
    #[serde(rename = "E")]
    Experts,
}

impl Mixer {
    pub const ALL: [Mixer; 4] = [Mixer::Mamba, Mixer::Attention, Mixer::Mlp, Mixer::Experts];

    pub fn letter(self) -> char {
        match self {
            Mixer::Mamba => 'M',
            Mixer::Attention => '*',
            Mixer::Mlp => '-',
            Mixer::Experts => 'E',
        }
    }

    /// As newer configs list them in `layers_block_type`.
    pub fn word(self) -> &'static str {
        match self {
            Mixer::Mamba => "mamba",
            Mixer::Attention => "attention",
            Mixer::Mlp => "mlp",
            Mixer::Experts => "moe",
        }
    }
}

/// A Mamba-2 mixer: one projection to gate z, x, B, C and dt; a causal convolution over x, B and C; the state-space
/// scan; a norm of its output times silu(z), group by group; a projection back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MambaSpec {
    pub heads: u64,
    pub head_dim: u64,
    /// Heads of a group share B and C, and a norm.
    pub groups: u64,
    /// Elements of a state for each element of a head.
    pub state: u64,
    /// Tokens that the convolution sees, itself the last.
    pub conv: u64,
    /// Tokens of a chunk of the scan, which within it is products.
    pub chunk: u64,
}

impl MambaSpec {
    /// Columns of x, of the gate, and of the output of the scan.
    pub fn inner(&self) -> u64 {
        self.heads * self.head_dim
    }

    /// Columns of B, and of C.
    pub fn bc_cols(&self) -> u64 {
        self.groups * self.state
    }

    /// Columns of x, B and C.
    pub fn conv_cols(&self) -> u64 {
        self.inner() + 2 * self.bc_cols()
    }

    /// Columns of the first projection: z | x | B | C | dt.
    pub fn proj_cols(&self) -> u64 {
        self.inner() + self.conv_cols() + self.heads
    }

    /// One of `ranks` equal parts, heads and groups cut alike.
    pub fn part(&self, ranks: u64) -> MambaSpec {
        MambaSpec { heads: self.heads / ranks, groups: self.groups / ranks, ..*self }
    }

    /// What one of `ranks` has that exchange heads for tokens: equal parts of the heads, and of the groups, or where these
    /// are fewer the one that its heads read.
    pub fn share(&self, ranks: u64) -> MambaSpec {
        MambaSpec { heads: self.heads / ranks, groups: (self.groups / ranks).max(1), ..*self }
    }

    /// Whether `ranks` can so share them: as many heads each, of whole groups or of one.
    pub fn shares(&self, ranks: u64) -> bool {
        let groups = self.groups.is_multiple_of(ranks) || ranks.is_multiple_of(self.groups);
        self.heads.is_multiple_of(ranks) && groups
    }

    /// Weights of the two projections.
    pub fn matmul(&self, hidden: u64) -> u64 {
        hidden * self.proj_cols() + self.inner() * hidden
    }

    /// All others: the convolution's taps and bias, dt's bias, A and D of every head, the norm.
    pub fn vectors(&self) -> u64 {
        self.conv_cols() * (self.conv + 1) + 3 * self.heads + self.inner()
    }

    /// FLOPs of the scan of one token forward, by chunks (arXiv:2405.21060, section 6 and listing 1): scores C Bᵀ of
    /// the tokens before it in its chunk, of which it has (chunk + 1) / 2 on average, for every group; these times x, for every
    /// head; what it adds to a state, and what a state gives to it.
    pub fn scan_flops(&self) -> u64 {
        let MambaSpec { heads, head_dim, groups, state, chunk, .. } = *self;
        (groups * state + heads * head_dim) * (chunk + 1) + 4 * heads * head_dim * state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nemotron-H 8B: 128 heads of 64, 8 groups of states of 128 (arXiv:2504.03624, table 2). Columns as the checkpoint's
    /// in_proj has them: 18560.
    #[test]
    fn columns_are_those_of_the_checkpoint() {
        let m = MambaSpec { heads: 128, head_dim: 64, groups: 8, state: 128, conv: 4, chunk: 128 };
        assert_eq!([m.inner(), m.conv_cols(), m.proj_cols()], [8192, 10240, 18560]);
        assert_eq!(m.part(4).proj_cols() * 4, m.proj_cols());
    }

    /// Of 8 groups of 16 heads, 4 ranks have two each, 32 ranks a quarter of one.
    #[test]
    fn ranks_share_whole_groups_or_one() {
        let m = MambaSpec { heads: 128, head_dim: 64, groups: 8, state: 128, conv: 4, chunk: 128 };
        let of = |ranks| (m.share(ranks).heads, m.share(ranks).groups);
        assert_eq!([of(1), of(4), of(8), of(32)], [(128, 8), (32, 2), (16, 1), (4, 1)]);
        assert!([1, 2, 8, 16, 128].iter().all(|ranks| m.shares(*ranks)));
        assert!([3, 6, 12, 256].iter().all(|ranks| !m.shares(*ranks)));
    }

    /// By the recurrence a token does 3 operations on every element of a state to renew it and 2 to read it; by chunks of
    /// as many tokens as a state and a head have elements it is 4 and what the chunk adds, of the same order.
    #[test]
    fn a_scan_by_chunks_costs_about_what_the_recurrence_does() {
        let m = MambaSpec { heads: 64, head_dim: 64, groups: 8, state: 64, conv: 4, chunk: 64 };
        let elements = m.heads * m.head_dim * m.state;
        let times = m.scan_flops() as f64 / elements as f64;
        assert!((5.0..5.3).contains(&times), "{times}");
    }
}
