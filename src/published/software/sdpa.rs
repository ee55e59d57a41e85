//! PyTorch's `scaled_dot_product_attention`: which kernel it is, by the generation of the GPU.
//!
//! FlashAttention 2 until Hopper. On Blackwell cuDNN's, which torchtitan puts first there (`_init_backend` of
//! torchtitan/models/attention.py, "Add CuDNN on B200 w/ highest priority"), as PyTorch itself does with a cuDNN that is new enough
//! (`check_prefer_cudnn_attention` of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Wheels of 2026 do so on Hopper, too, whose runs
//! here are older. Where a GPU has a curve of a benchmark of it, rows of benchmarks are on that.

use super::system::System;
use super::table::Fact;
use crate::published::row::words::squeezed;

const ON_BLACKWELL: &[&str] = &["cudnn", "fa4", "fa3", "fa2"];

/// Kernels of a benchmark's rows, the likeliest first: until Hopper, and on Blackwell.
pub const BENCHMARKED: [&[&str]; 2] = [&["sdpa", "fa2", "fa3", "cudnn"], &["sdpa", "cudnn", "fa4", "fa2"]];

/// Kernels of a training run whose system has it, the likeliest first; none where the habits of the system stand.
pub fn of(system: &System, gpu: &str) -> Option<&'static [&'static str]> {
    let gpu = squeezed(gpu);
    let newest = ["b200", "b300"].iter().any(|name| gpu.contains(name));
    let has_it = system.has("sdpa") || system.is(Fact::Sdpa);
    (newest && has_it && !system.has_flash()).then_some(ON_BLACKWELL)
}

#[cfg(test)]
mod tests {
    use crate::published::row::case::Training;
    use crate::published::software::habits::Habits;

    #[test]
    fn the_attention_of_pytorch_is_that_of_the_gpu() {
        let of = |system: &str, gpu: &str| {
            let [system, gpu] = [system, gpu].map(String::from);
            Habits::of_run(&Training { system, gpu, ..Training::default() }).kernels[0]
        };
        let titan = "torchtitan (FSDP2, torch.compile)";
        assert_eq!([of(titan, "H100-SXM-80GB"), of(titan, "B200"), of(titan, "GB300")], ["fa2", "cudnn", "cudnn"]);
        assert_eq!([of("PyTorch FSDP, SDPA", "B200"), of("PyTorch FSDP, SDPA", "A100")], ["cudnn", "fa2"]);
        assert_eq!(of("torchtitan (FA4)", "B200"), "fa4");
        // Habits of what is named so stand: PyTorch's own was told to take FlashAttention.
        assert_eq!(
            of("PyTorch SDPA (flash attention)", "B200"),
            Habits::of("PyTorch SDPA (flash attention)").kernels[0]
        );
    }
}
