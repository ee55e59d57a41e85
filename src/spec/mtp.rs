//! Multi-token prediction: modules behind a model's last layer that predict tokens further ahead (DeepSeek-V3,
//! arXiv:2412.19437, section 2.2).

use super::{LlmSpec, Mixer, MoeSpec};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MtpSpec {
    /// Modules one behind the other, each of which predicts one token further.
    pub depth: u64,
    /// What the mean of their losses counts beside the model's own.
    pub weight: f64,
    /// The layers of a module where a layer is one mixer; none: one layer like the model's last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pattern: Vec<Mixer>,
}

impl MtpSpec {
    /// No more modules are taken: they are written out in a program, where layers are a loop.
    pub const MOST: u64 = 64;

    /// Megatron Core's `mtp_loss_scaling_factor` unless told otherwise, and DeepSeek's of the last third of its training.
    pub const WEIGHT: f64 = 0.1;

    /// How the note of a model begins that is trained without its modules because its user says so.
    pub const LEFT_OUT: &str =
        "modules of multi-token prediction are left out of times, memory and MFU, as --no-mtp says";

    /// How the note of a model begins that is trained with its modules.
    pub const TRAINED: &str = "multi-token prediction: ";

    /// Layers of a module.
    pub fn layers(&self) -> u64 {
        self.pattern.len().max(1) as u64
    }

    /// What each module's loss counts.
    pub fn part(&self) -> f64 {
        self.weight / self.depth as f64
    }
}

impl LlmSpec {
    /// The model trained without its modules, which a note says.
    pub fn without_mtp(&self) -> Result<LlmSpec> {
        if self.mtp.is_none() {
            let why = format!("{} has no modules of multi-token prediction; leave it out", self.name);
            return Err(Error::spec("the command line", "--no-mtp", why));
        }
        let mut left = LlmSpec { mtp: None, ..self.clone() };
        left.notes.retain(|note| !note.starts_with(MtpSpec::TRAINED));
        let share = format!("({:.0} % of the FLOPs of products)", 100.0 * self.mtp_share());
        left.notes.push(format!("{} {share}", MtpSpec::LEFT_OUT));
        Ok(left)
    }

    /// The model with a note that says what its modules are of it, if it has any.
    pub(super) fn with_mtp_told(mut self) -> LlmSpec {
        let Some(depth) = self.mtp.as_ref().map(|mtp| mtp.depth) else { return self };
        let (modules, them) = if depth == 1 { ("module is", "it") } else { ("modules are", "them") };
        let of_weights = self.mtp_params() as f64 / self.trained_params().0 as f64;
        let note = format!(
            "{}{depth} {modules} trained with the model, {:.0} % of the FLOPs of products and {:.1} % of the weights; \
             --no-mtp leaves {them} out",
            MtpSpec::TRAINED,
            100.0 * self.mtp_share(),
            100.0 * of_weights
        );
        self.notes.push(note);
        self
    }

    /// What part of the FLOPs of products is the modules'.
    fn mtp_share(&self) -> f64 {
        self.mtp_flops_per_token(1) / self.flops_per_token(1)
    }

    /// The layers of one module as a model of their own.
    pub fn mtp_module(&self) -> Option<LlmSpec> {
        let mtp = self.mtp.as_ref()?;
        // What stands behind dense layers are experts.
        let moe = self.moe.map(|moe| MoeSpec { dense_layers: 0, every: 0, ..moe });
        let has = |mixer| mtp.pattern.contains(&mixer);
        let whole = mtp.pattern.is_empty();
        Some(LlmSpec {
            layers: mtp.layers(),
            pattern: mtp.pattern.clone(),
            moe: moe.filter(|_| whole || has(Mixer::Experts)),
            mamba: self.mamba.filter(|_| has(Mixer::Mamba)),
            mtp: None,
            windowed: vec![],
            dense_at: vec![],
            // Where layers differ, a module has the last kind there is: it sees all.
            window: self.window.filter(|_| self.windowed.is_empty()),
            ..self.clone()
        })
    }

    /// Weights of all modules, beside the embedding and the head that they share with the model.
    pub fn mtp_params(&self) -> u64 {
        self.mtp_params_with(|moe| moe.experts)
    }

    /// The same of a token that visits `visited` experts of a layer.
    fn mtp_params_with(&self, visited: impl Fn(&MoeSpec) -> u64) -> u64 {
        let Some((mtp, module)) = self.mtp.as_ref().zip(self.mtp_module()) else { return 0 };
        let layers = module.layers_matmul(visited) + module.layers_vectors();
        mtp.depth * (layers + 2 * self.hidden * self.hidden + 3 * self.norm_params())
    }

    /// All weights that are trained, those of modules too, and of these the ones that one token meets.
    pub fn trained_params(&self) -> (u64, u64) {
        let active = self.active_params() + self.mtp_params_with(|moe| moe.top_k);
        (self.params() + self.mtp_params(), active)
    }

    /// Model FLOPs of a token in all modules: their layers, the product that joins token and hidden states, and the
    /// head once more.
    pub(super) fn mtp_flops_per_token(&self, seq_len: u64) -> f64 {
        let Some((mtp, module)) = self.mtp.as_ref().zip(self.mtp_module()) else { return 0.0 };
        let joined = 6.0 * (2 * self.hidden * self.hidden) as f64;
        mtp.depth as f64 * (module.flops_per_token(seq_len) + joined)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Megatron-Bridge 26.08 on 256 GB300: 1635 TFLOP/s at 6288 tokens a second and GPU, with causal attention.
    #[test]
    fn deepseek_v3_does_the_work_that_megatron_counts() {
        let m = LlmSpec::find("deepseek-v3").unwrap();
        let published = 1635e12 / 6288.0;
        assert!((m.flops_per_token(4096) / published - 1.0).abs() < 5e-3, "{}", m.flops_per_token(4096));
        // DeepSeek counts no module: 385 TFLOP/s at 1541.7 tokens a second and GPU.
        let without = LlmSpec { mtp: None, ..m };
        let published = 385e12 / 1541.7;
        assert!((without.flops_per_token(4096) / published - 1.0).abs() < 5e-3);
    }

    /// A module of DeepSeek-V3 is a layer with experts, and what joins tokens to hidden states.
    #[test]
    fn modules_are_told_of_and_count_among_the_weights() {
        let m = LlmSpec::find("deepseek-v3").unwrap();
        let [note] = &m.notes[..] else { panic!("{:?}", m.notes) };
        assert!(note.starts_with("multi-token prediction: 1 module is trained with the model, "), "{note}");
        assert!(
            note.ends_with(" % of the FLOPs of products and 1.7 % of the weights; --no-mtp leaves it out"),
            "{note}"
        );
        // All but 8 of the 256 experts are not met.
        let (all, active) = m.trained_params();
        assert_eq!(all - m.params(), m.mtp_params());
        assert_eq!(all - active, 59 * 248 * 3 * 7168 * 2048);
        let left = m.without_mtp().unwrap();
        assert!(left.notes.len() == 1 && left.notes[0].starts_with(MtpSpec::LEFT_OUT), "{:?}", left.notes);
        assert_eq!(left.trained_params(), (m.params(), m.active_params()));
        let more = LlmSpec { mtp: Some(MtpSpec { depth: 3, ..m.mtp.clone().unwrap() }), notes: vec![], ..m };
        let told = more.with_mtp_told().notes[0].clone();
        assert!(told.contains(": 3 modules are trained") && told.ends_with("; --no-mtp leaves them out"), "{told}");
    }

    #[test]
    fn modules_of_a_hybrid_have_the_layers_of_their_own_pattern() {
        let m = LlmSpec::find("nemotron-3-super-120b-a12b").unwrap();
        let module = m.mtp_module().unwrap();
        assert_eq!(module.pattern, [Mixer::Attention, Mixer::Experts]);
        assert_eq!((module.layers, module.mamba, module.mtp), (2, None, None));
    }
}
