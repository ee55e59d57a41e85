//! What a source counts as a FLOP when it prints TFLOP/s or MFU: the largest trap in comparing them.
//!
//! Two questions decide: does causal attention count whole or half, and does what is computed twice count twice?
//! Checked by recomputation where a source prints tokens/s, too: Megatron-Bridge since 25.09 counts half; Megatron
//! (arXiv:2104.04473, eq. 3), NeMo before, llm-foundry and PaLM count whole; the first of these counts recomputation.

use crate::published::row::case::Training;
use crate::published::row::words::squeezed;
use crate::published::software::system::System;
use crate::published::software::table::Fact;
use crate::spec::LlmSpec;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convention {
    /// Only the half of attention under the mask.
    pub causal: bool,
    /// The second forward pass of full recomputation, too.
    pub recompute: bool,
}

impl Convention {
    /// Read from the source's words. `recomputes`: the run computes every layer's forward pass twice.
    ///
    /// Nothing said means Megatron's and PaLM's formula for model FLOPs, which most systems print.
    pub fn of(words: &str, recomputes: bool) -> Convention {
        let text = squeezed(words);
        let whole = text.contains("noncausal");
        let twice = ["hardware", "recompute(", "inclrecompute", "incl.recompute", "withckpt"];
        let once = text.contains("factor3") || text.contains("norecompute");
        Convention {
            causal: text.contains("causal") && !whole,
            recompute: recomputes && !once && twice.iter().any(|word| text.contains(word)),
        }
    }

    /// The same of a run. Where the words do not say what of attention counts, Megatron-Bridge, and mixtures of Megatron Core
    /// and of Primus on top of it, count as Megatron-LM does since 2025 (`num_floating_point_operations`,
    /// megatron/training/training.py, "only half of the mask is non-zero"): half. A run that prints tokens/s, too, bears it
    /// out: 974 TFLOP/s at 6583 tokens/s are 1.48e11 of a token of Qwen3-235B, 1.51e11 with half and 1.70e11 with whole.
    pub fn of_run(run: &Training, recomputes: bool) -> Convention {
        let stated = Convention::of(&run.flops_convention, recomputes);
        let system = System::of(&run.system);
        let halves = system.is(Fact::CountsHalf) || run.experts.is_some() && system.is(Fact::CountsHalfOfMixtures);
        Convention { causal: stated.causal || halves && !is_settled(&run.flops_convention), ..stated }
    }

    /// FLOPs of one token, forward and backward.
    pub fn flops_per_token(self, model: &LlmSpec, seq: u64) -> f64 {
        let open = LlmSpec { window: None, ..model.clone() };
        // Of a model without window it is a line: weights, and keys that are seen on average.
        let slope = open.flops_per_token(2) - open.flops_per_token(1);
        let matmul = open.flops_per_token(1) - 2.0 * slope;
        let attention = slope * seq as f64 * if self.causal { 1.0 } else { 2.0 };
        let head = 6.0 * (model.vocab * model.hidden) as f64;
        let again = if self.recompute { (matmul - head + attention) / 3.0 } else { 0.0 };
        matmul + attention + again
    }
}

/// Whether words say what of attention counts, or name a formula that does, and not just whose number it is.
fn is_settled(words: &str) -> bool {
    let text = squeezed(words);
    ["causal", "half", "halved", "whole", "formula", "factor", "hardware", "sc21", "6n", "12l"]
        .iter()
        .any(|word| text.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::row::case::Experts;
    use crate::spec::Mlp;

    fn gpt(layers: u64, hidden: u64, vocab: u64) -> LlmSpec {
        let (heads, ffn) = (hidden / 128, 4 * hidden);
        LlmSpec {
            layers,
            hidden,
            heads,
            kv_heads: heads,
            head_dim: 128,
            ffn,
            vocab,
            mlp: Mlp::Gelu,
            ..LlmSpec::default()
        }
    }

    #[test]
    fn mixtures_of_megatron_core_count_half() {
        let run = |system: &str, flops_convention: &str| {
            let (system, flops_convention) = (system.into(), flops_convention.into());
            let experts = Some(Experts::default());
            Convention::of_run(&Training { system, flops_convention, experts, ..Training::default() }, false).causal
        };
        assert!(
            run("Megatron-Core MoE, dispatcher DeepEP", "") && run("Megatron-Core, DeepEP", "Megatron's model FLOPs")
        );
        assert!(run("Megatron-Bridge 26.04", "its own"));
        assert!(!run("Megatron-Core MoE", "NON-causal") && !run("Megatron-LM", ""));
        assert!(!run("Megatron-Core v0.8", "Megatron-LM's formula of its time: NON-causal attention (12LhS)"));
    }

    /// The words of real sources.
    #[test]
    fn words_say_what_is_counted() {
        for (words, recomputes, causal, twice) in [
            ("model FLOPs, CAUSAL attention (6*L*h*S per token), no recompute", true, true, false),
            ("model FLOPs, NON-causal attention (12*L*h*S per token)", true, false, false),
            ("hardware (96BsLh^2...)", true, false, true),
            ("hardware (96BsLh^2...)", false, false, false),
            ("HARDWARE FLOPs incl. recompute (factor 4), non-causal", true, false, true),
            ("Megatron SC21 formula (with ckpt: hardware FLOPs factor 4)", true, false, true),
            ("Megatron SC21 formula (factor 3)", true, false, false),
            ("PaLM-style 6N+attention, NON-causal", true, false, false),
            ("", true, false, false),
        ] {
            assert_eq!(Convention::of(words, recomputes), Convention { causal, recompute: twice }, "{words}");
        }
    }

    /// arXiv:2104.04473, equation 3: 96 B s L h^2 (1 + s/6h + V/16Lh), and 2205.05198's 72 without recomputation.
    #[test]
    fn formulas_are_those_of_the_papers() {
        let (l, h, v, s) = (96.0, 12288.0, 51200.0, 2048.0);
        let model = gpt(96, 12288, 51200);
        let hardware = 96.0 * l * h * h * (1.0 + s / (6.0 * h) + v / (16.0 * l * h));
        let of = |causal, recompute| Convention { causal, recompute }.flops_per_token(&model, 2048);
        assert!((of(false, true) / hardware - 1.0).abs() < 1e-12);
        let plain = 72.0 * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h));
        assert!((of(false, false) / plain - 1.0).abs() < 1e-12);
        assert!((of(false, false) - of(true, false) - 6.0 * l * h * s).abs() < 1.0);
    }
}
