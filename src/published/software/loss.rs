//! What a system's loss makes of logits, by what it compiles, and since when.

use super::recipe::LIBRARY_OF_2026;
use super::release::release;
use super::system::System;
use super::table::{Fact, NEVER};
use crate::spec::WideLoss;

/// Of a system that compiles nothing else.
pub const ALONE: &str = "compileofthelossonly";

/// What becomes of the logits of a system, `name` in full, whose habit is `by_table`.
pub fn of(system: &System, name: &str, by_table: WideLoss) -> WideLoss {
    match () {
        // A compiled loss does not write logits in fp32.
        () if is_compiled(system, name) || system.is(Fact::Jit) => WideLoss::Never,
        // Megatron's own in a function that is compiled, which no longer works in place (`cross_entropy_fusion_impl` native).
        () if system.is_library() && release(name).is_some_and(|at| at < LIBRARY_OF_2026) => WideLoss::Copied,
        () => by_table,
    }
}

/// Whether a system that compiles its model does so with the loss.
fn is_compiled(system: &System, name: &str) -> bool {
    let since = system.first(|fact| if let Fact::CompilesLoss(since) = fact { Some(since) } else { None });
    let beside = since.is_some_and(|since| release(name).map_or(since == NEVER, |release| release < since));
    system.has(ALONE) || system.has("torch.compile") && !beside
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
