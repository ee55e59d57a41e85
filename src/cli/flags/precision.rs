//! The dtype of weights and activations.

use super::value::dtype;
use crate::spec::{Dtype, GpuSpec};
use crate::sweep::case::default_dtype;
use clap::Args;

#[derive(Args, Debug, Clone, Default, PartialEq)]
pub struct Precision {
    /// Of weights and activations: bf16, f32 or f64 [default: bf16 where the GPU has it]
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    pub dtype: Option<Dtype>,
}

impl Precision {
    /// As the flag says, or the usual one of the GPU.
    pub fn on(&self, gpu: &GpuSpec) -> Dtype {
        self.dtype.unwrap_or_else(|| default_dtype(gpu))
    }
}
