//! Choices of an implementation: what changes bytes, overlap or memory while every degree stays the same.
//!
//! A choice is written as a word, and a set of them as words joined by `+`, in files, flags and columns
//! alike: `stripe+dkv-model`. What is not named is as the default has it, whose name is `default`.

mod choices;
mod numbered;
mod stages;
mod words;

pub use choices::{Capacity, Dispatch, Fold, KvPath, RingBackward, RingLayout, RingMerge, WideLoss};
pub use numbered::{NUMBERED, Numbered};
pub use stages::Stages;
pub use words::{WORDS, Word};

use super::meant;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Everything that [`WORDS`] can set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Options {
    pub layout: RingLayout,
    /// Ranks of the context axis share each packed document, not the sequence as a whole.
    pub per_document: bool,
    pub kv: KvPath,
    /// Tensor-parallel ranks keep whole activations between their products, instead of the sequence
    /// parallelism of Korthikanti et al. (arXiv:2205.05198).
    pub whole_activations: bool,
    pub merge: RingMerge,
    pub ring_backward: RingBackward,
    /// A ring sends K and V as two messages.
    pub kv_in_two: bool,
    /// A ring's gradients take turns with KV on one communicator.
    pub one_comm: bool,
    /// Ranks of an inner ring, in a ring of such rings (LoongTrain); 0: one ring.
    pub double_ring: u32,
    /// In the hybrid of both, neighbouring ranks make a ring and Ulysses exchanges across rings; by default
    /// neighbouring ranks exchange, as TransformerEngine's `a2a+p2p` and USP's `use_ulysses_low` have it.
    pub ring_inside: bool,
    /// The stages of a pipeline are neighbouring ranks and replicas of data parallelism far apart: ranks in the order tp,
    /// cp, pp, dp in place of tp, cp, dp, pp.
    pub pp_inside: bool,
    /// The products of a layer take operands rounded to FP8; everything else stays as it is.
    pub fp8: bool,
    /// Ulysses exchanges q, k and v one after the other, in place of one message.
    pub a2a_separate: bool,
    /// A KV head that several Ulysses ranks need travels once, and they gather it.
    pub replicate_after: bool,
    /// Heads of zeros make up what Ulysses cannot divide.
    pub pad_heads: bool,
    /// The first and the last stage of a pipeline have one layer less, beside embedding and head, as Llama-3 has.
    pub short_ends: bool,
    /// Stages have as many layers as any other, or one fewer, where layers do not come out even.
    pub uneven: bool,
    /// Layers of the first and of the last stage, where not as many as the others have.
    pub first_stage: Option<u16>,
    pub last_stage: Option<u16>,
    /// Layers of every stage.
    pub stages: Stages,
    /// Tensor-parallel ranks gather and sum the residual stream in chunks of rows, beside the products.
    pub tp_overlap: bool,
    /// Attention writes its scores to memory, as before FlashAttention.
    pub unfused: bool,
    /// ZeRO 2 and 3 have room for one layer's whole weights and gradient, not for the next one's beside it.
    pub no_prefetch: bool,
    /// ZeRO shares out among so many neighbouring ranks, and other groups of as many have copies; 0: among all.
    pub shard: u32,
    /// ZeRO 3: gradients add up whole, and are scattered behind the last microbatch.
    pub no_sync: bool,
    /// ZeRO 2 and 3: what is gathered is copied out of the buffer that it comes in, and gradients into the one that they
    /// leave from.
    pub copy_shards: bool,
    /// Weights of products in FP8 are gathered as such.
    pub gather_fp8: bool,
    /// Gradients are added up, kept and sent in the dtype of the weights, and not in that of the optimizer.
    pub bf16_grads: bool,
    /// Matrices of layers move by their orthogonal momentum, all else by Adam.
    pub muon: bool,
    /// Adam goes through all weights operation by operation, and not in one kernel.
    pub foreach: bool,
    /// Adam's moments are kept in the dtype of the weights, and not in fp32.
    pub bf16_moments: bool,
    /// The optimizer updates the weights themselves, and keeps no copy of them in fp32.
    pub no_master: bool,
    /// ZeRO 1: gradients are summed whole on every rank, which takes its share of them for the optimizer.
    pub all_reduce_grads: bool,
    /// ZeRO 1: new weights are gathered beside the first passes of the next step.
    pub overlap_gather: bool,
    /// Gradients are summed over the replicas when all of the backward pass is over, and not layer by layer behind it.
    pub no_overlap_grad: bool,
    /// CPU and GPU wait for what passes between stages of a pipeline.
    pub no_overlap_p2p: bool,
    /// Without sequence parallelism, a tensor-parallel rank passes its own rows alone to the next stage of a pipeline,
    /// whose ranks gather them.
    pub scatter_p2p: bool,
    /// The CPU waits for the GPU behind every forward and every backward pass of a microbatch.
    pub wait_passes: bool,
    /// The gradient of a weight is a product of its own, which another kernel adds to the sum over microbatches.
    pub add_grads: bool,
    pub wide_loss: WideLoss,
    pub dispatch: Dispatch,
    /// Of what norms and activations leave for products in FP8, codes are kept.
    pub keep_fp8: bool,
    /// Rows travel to their experts in FP8, with a scale every 128 elements; back they travel as they are.
    pub dispatch_fp8: bool,
    /// Of rows that travelled in FP8 the codes are kept, and expanded again for the backward pass.
    pub keep_fp8_rows: bool,
    /// What goes into the activation of experts is kept rounded to FP8.
    pub keep_fp8_gate_up: bool,
    /// Experts that every token visits compute while rows travel.
    pub overlap_shared: bool,
    /// Rows of one microbatch travel beside the compute of another.
    pub overlap_exchange: bool,
    /// Stages of a pipeline make gradients of weights apart from those of inputs, and later (ZB-H1).
    pub zb_h1: bool,
    /// Each stage of a pipeline has two chunks, of a row of them that is folded in the middle.
    pub fold: Fold,
    /// What latent attention projects up is not kept: norms and products behind what is compressed run again in the
    /// backward pass.
    pub recompute_mla_up: bool,
    /// The output of a feed-forward network's activation is not kept, but made again for the gradient of the product behind it.
    pub recompute_act: bool,
    /// The outputs of norms are not kept, but made again for the products behind them.
    pub recompute_norm: bool,
    /// Where layers are computed again, attention is not: its output and log-sum-exps are kept.
    pub keep_attention: bool,
    /// The head and the loss go through a microbatch in so many pieces, logits being made of one at a time; 0: at once.
    pub loss_chunks: u32,
    /// A network goes through a microbatch in so many pieces, and again in the backward pass; 0: at once.
    pub mlp_chunks: u32,
    /// Experts keep their inputs alone, and run again in the backward pass: the second halves of layers, or a hybrid's layers of
    /// experts.
    pub recompute_moe: bool,
    /// Dense networks keep their inputs alone, and run again in the backward pass up to their activations' outputs.
    pub recompute_mlp: bool,
    /// Rows are picked for experts, and added up for tokens, by products with masks over the tokens of a sequence.
    pub mask_rows: bool,
    /// Low-latency kernels send, return, and receive when asked.
    pub deepep_hook: bool,
    /// Inputs of layers that are kept to compute them again are kept in the host's memory.
    pub offload_activations: bool,
    /// Optimizer state is in the host's memory, and the CPU runs Adam.
    pub offload_optimizer: bool,
    /// Layers go through the sequence in so many chunks, keys and values waiting in the host's memory (FPDT); 0: at once.
    pub chunks: u32,
    /// Slots of experts beyond one for each, placed and given out by EPLB.
    pub replicas: u32,
    pub capacity: Capacity,
    /// The hottest so many experts are computed by every rank for its own tokens, weights being broadcast and gradients
    /// reduced in every layer and microbatch (FasterMoE's shadowing).
    pub shadow: u32,
}

/// The numbered choice that a word names, and what stands behind its beginning.
fn numbered(word: &str) -> Option<(&'static Numbered, &str)> {
    NUMBERED.iter().find_map(|numbered| Some((numbered, word.strip_prefix(numbered.start)?)))
}

/// What is wrong with a word that is no option.
fn unknown(word: &str) -> String {
    let known: Vec<_> = WORDS.iter().map(|w| w.name).collect();
    let parts: Vec<&str> = word.split([',', ' ', ';', '|']).filter(|part| !part.is_empty()).collect();
    if parts.len() > 1 {
        return format!("{word:?} is no option: words are joined by +; write {}", parts.join("+"));
    }
    let meant = meant(word, &known);
    if !meant.is_empty() {
        return format!("{word:?} is no option{meant}; `foretrain options` lists all of them");
    }
    format!("{word:?} is no option; known are default and {}", known.join(", "))
}

impl Options {
    /// Takes a word. Errors: it is none, with the remedy.
    fn take(&mut self, word: &str) -> Result<(), String> {
        if let Some((numbered, n)) = numbered(word) {
            return (numbered.set)(self, n).map_err(|why| format!("{word:?}: {why}"));
        }
        let known = WORDS.iter().find(|w| w.name == word).ok_or_else(|| unknown(word))?;
        (known.set)(self);
        Ok(())
    }

    /// Ranks of an inner ring, where there are two rings.
    pub fn window(&self) -> Option<u32> {
        (self.double_ring > 0).then_some(self.double_ring)
    }

    /// What is made again for the backward pass beside what recomputation has, to stand behind its name: `, norm and act`,
    /// or ` but attention`.
    pub fn made_again(&self) -> String {
        if self.keep_attention {
            return " but attention".into();
        }
        let parts = [
            ("norm", self.recompute_norm),
            ("act", self.recompute_act),
            ("mla-up", self.recompute_mla_up),
            ("moe", self.recompute_moe),
            ("mlp", self.recompute_mlp),
        ];
        let said: Vec<&str> = parts.into_iter().filter(|(_, said)| *said).map(|(part, _)| part).collect();
        match said.split_last() {
            None => String::new(),
            Some((only, [])) => format!(", {only}"),
            Some((last, before)) => format!(", {} and {last}", before.join(", ")),
        }
    }

    /// Without what `search` chooses of them by other names: schedule, carrier, overlap of exchanges, parts made again, uneven
    /// stages.
    pub fn unchosen(&self) -> Options {
        let Options { fold, zb_h1, uneven, dispatch, overlap_exchange, keep_attention, .. } = Options::default();
        let plain = Options { fold, zb_h1, uneven, dispatch, overlap_exchange, keep_attention, ..*self };
        Options { recompute_norm: false, recompute_act: false, recompute_mla_up: false, recompute_moe: false, ..plain }
    }

    /// The words of what differs from the default, but for those with a number of the user's.
    pub fn words(&self) -> Vec<&'static str> {
        WORDS.iter().filter(|w| (w.is_set)(self)).map(|w| w.name).collect()
    }
}

impl fmt::Display for Options {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut words: Vec<String> = self.words().into_iter().map(String::from).collect();
        words.extend(NUMBERED.iter().filter_map(|w| Some(format!("{}{}", w.start, (w.said)(self)?))));
        f.write_str(&if words.is_empty() { "default".into() } else { words.join("+") })
    }
}

impl FromStr for Options {
    type Err = String;

    fn from_str(text: &str) -> Result<Options, String> {
        let mut options = Options::default();
        let words = || text.split('+').map(str::trim).filter(|word| !["", "default"].contains(word));
        words().try_for_each(|word| options.take(word))?;
        // A word that changes something when it is said again was undone by a later one.
        let undone = |word: &&str| {
            let mut again = options;
            again.take(word).is_ok() && again != options
        };
        match words().find(undone) {
            Some(undone) => Err(format!("{undone:?} contradicts another word of {text:?}; leave one of them out")),
            None => Ok(options),
        }
    }
}

impl Serialize for Options {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Options {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Options, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_go_there_and_back() {
        assert_eq!(Options::default().to_string(), "default");
        for word in WORDS {
            let options: Options = word.name.parse().unwrap();
            assert_ne!(options, Options::default(), "{} changes nothing", word.name);
            assert_eq!(options.to_string(), word.name);
        }
        for (words, why) in [
            ("zigzga", "known are default"),
            ("stripes", "did you mean stripe?"),
            ("stripe,dkv-model", "joined by +; write stripe+dkv-model"),
        ] {
            let said = words.parse::<Options>().unwrap_err();
            assert!(said.contains(why), "{words}: {said}");
        }
        for words in [
            "first-stage-3+last-stage-0",
            "stages-2x10.3x20.2x2",
            "replicas-32",
            "shadow-2",
            "stripe+replicas-8+shard-4+capacity-1.25",
            "loss-chunks-8+mlp-chunks-4",
            "capacity-pad:2",
            "capacity-tutel:-1.5",
        ] {
            assert_eq!(words.parse::<Options>().unwrap().to_string(), words);
        }
        assert_eq!("replicas-08+shard-4+shard-4".parse::<Options>().unwrap().to_string(), "replicas-8+shard-4");
        for words in ["loss-chunks-4+loss-chunks-8", "capacity-1+shadow-2+capacity-none", "stripe+contiguous"] {
            let said = words.parse::<Options>().unwrap_err();
            assert!(said.contains("contradicts another word"), "{words}: {said}");
        }
        for (words, why) in [
            ("replicas-0", "above 0"),
            ("replicas-x", "replicas-32"),
            ("shadow-0", "above 0"),
            ("shard-1", "above 1"),
            ("loss-chunks-1", "loss-chunks-8"),
            ("mlp-chunks-0", "mlp-chunks-8"),
            ("capacity-1.255", "\"capacity-1.255\": capacity \"1.255\" has more than two decimals"),
            ("capacity--1", "not above 0"),
            ("capacity-half:1", "no rule"),
            ("capacity-pad:", "no number"),
        ] {
            let said = words.parse::<Options>().unwrap_err();
            assert!(said.contains(why), "{words}: {said}");
        }
    }
}
