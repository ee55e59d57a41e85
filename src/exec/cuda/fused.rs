//! Attention that a library has fused, behind the same kernel of a plan: what is asked of it, and by whom it is done.

use crate::error::Result;
use crate::spec::Factor;
use std::fmt::Debug;
use std::str::FromStr;

/// Whose kernels do attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Attention {
    /// The project's, everywhere.
    Own,
    /// cuDNN's wherever it has a form of the mask, the project's elsewhere. It is an error if there is no cuDNN, or if it does
    /// not take a shape.
    Cudnn,
    /// cuDNN's where it is on this machine and takes the shape.
    #[default]
    Best,
}

impl Attention {
    /// The word of the command line.
    pub fn word(self) -> &'static str {
        match self {
            Attention::Own => "own",
            Attention::Cudnn => "cudnn",
            Attention::Best => "best",
        }
    }
}

impl FromStr for Attention {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Attention, String> {
        match text {
            "own" => Ok(Attention::Own),
            "cudnn" => Ok(Attention::Cudnn),
            "best" => Ok(Attention::Best),
            _ => Err("give own, cudnn or best".into()),
        }
    }
}

/// The words for attention that no library does.
pub const OWN: &str = "own kernels";

/// Who does attention, in words.
pub fn said(fused: Option<&dyn Fused>) -> String {
    fused.map_or_else(|| OWN.into(), Fused::name)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Reads q, k, v; writes o and the natural log-sum-exp.
    Forward,
    /// Reads q, k, v, o, dO and the log-sum-exp; writes dq, dk, dv. Uses a float for every (query, head), which are the sums of
    /// dO o, and one for every element of dq.
    Backward,
}

/// One pass over one block. Rows stand as plans have them: of queries [sequences, rows, heads * head_dim], of keys and
/// values side by side [sequences, rows, (kv_heads * head_dim | kv_heads * v_dim)], of the log-sum-exp [sequences,
/// rows, heads]. Tensors are of bf16, but the log-sum-exp and what else is said to be of floats.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Sdpa {
    pub pass: Pass,
    /// Sequences.
    pub batch: u64,
    /// Heads of queries, and of keys and values.
    pub heads: [u64; 2],
    /// Rows of a sequence that take part: queries, keys. All of them see something, or are seen.
    pub rows: [u64; 2],
    /// Rows from one sequence to the next.
    pub pitch: [u64; 2],
    pub head_dim: u64,
    pub v_dim: u64,
    /// The factor that products of queries and keys are multiplied with.
    pub scale: Factor,
    /// Query i sees the keys from 0 to i + `diagonal`; `None`: every query sees every key.
    pub diagonal: Option<u64>,
}

impl Sdpa {
    /// Elements of a row of keys and values.
    pub fn kv_row(&self) -> u64 {
        self.heads[1] * (self.head_dim + self.v_dim)
    }
}

/// A library of fused attention.
pub trait Fused: Debug {
    /// The library's name and version, `"cuDNN 9.19.0"`.
    fn name(&self) -> String;

    /// Bytes of memory that a pass works in; `None` where the library does not take its shape. Errors: the library
    /// fails, or does not take the shape and [`Attention::Cudnn`] asks for it.
    fn workspace(&self, sdpa: &Sdpa) -> Result<Option<u64>>;
}
