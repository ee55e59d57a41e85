//! What a system's loss makes of logits, by what it compiles, and since when.

use super::recipe::LIBRARY_OF_2026;
use super::release::{Release, release};
use super::system::System;
use crate::spec::WideLoss;

/// When torchtitan began to compile the loss (github pull pytorch/torchtitan#1033 of 2025-03-30): before, blocks alone.
const IN_TITAN: Release = (25, 4);

/// Of a system that compiles nothing else.
pub const ALONE: &str = "compileofthelossonly";

/// What becomes of the logits of a system, `name` in full, whose habit is `by_table`.
pub fn of(system: &System, name: &str, by_table: WideLoss) -> WideLoss {
    match () {
        // A compiled loss does not write logits in fp32.
        () if is_compiled(system, name) || is_jax(&system.text) => WideLoss::Never,
        // Megatron's own in a function that is compiled, which no longer works in place (`cross_entropy_fusion_impl` native).
        () if system.is_library() && release(name).is_some_and(|at| at < LIBRARY_OF_2026) => WideLoss::Copied,
        () => by_table,
    }
}

/// Whether a system that compiles its model does so with the loss: OLMo's is beside the model that it compiles, and so was
/// torchtitan's at first.
fn is_compiled(system: &System, name: &str) -> bool {
    let early = release(name).is_some_and(|release| release < IN_TITAN) || system.has("torchtitan0.0");
    let beside = system.has("torchtitan") && early || system.text.starts_with("olmo(");
    system.has(ALONE) || system.has("torch.compile") && !beside
}

/// Whether JAX compiles a whole step, its loss with it.
fn is_jax(text: &str) -> bool {
    ["maxtext", "jax", "levanter", "axlearn"].iter().any(|word| text.contains(word))
}

#[cfg(test)]
mod tests {
    use crate::published::software::habits::Habits;
    use crate::spec::WideLoss;

    #[test]
    fn what_compiles_a_loss_and_since_when() {
        let loss = |system| Habits::of(system).wide_loss;
        assert_eq!(loss("torchtitan (FSDP + torch.compile)"), WideLoss::Never);
        assert_eq!(loss("torchtitan (FSDP)"), WideLoss::Copied);
        assert_eq!(loss("torchtitan of December 2024 (FSDP + torch.compile)"), WideLoss::Copied);
        assert_eq!(loss("torchtitan of June 2025 (FSDP2 + torch.compile, bf16)"), WideLoss::Never);
        assert_eq!(loss("NeMo AutoModel (PyTorch FSDP2)"), WideLoss::Copied);
        let alone = "torchtitan of November 2025, compile of the loss only";
        assert_eq!(loss(alone), WideLoss::Never);
        assert_eq!(loss("Megatron-Bridge 0.1.0rc4 (NeMo 25.09)"), WideLoss::Copied);
        assert_eq!(loss("NeMo/Megatron-Bridge 25.09"), WideLoss::Never);
        assert_eq!(loss("Megatron-LM (Megatron-Core, TE)"), WideLoss::InPlace);
        assert_eq!(loss("Megatron-Core MoE, DeepEP"), WideLoss::Never);
    }
}
