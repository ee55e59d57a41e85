//! The name of a system, read once: which words are names of software, and which only look like it.

use crate::published::row::words::{squeezed, tokens};

/// NVIDIA's NeMo. Its models Nemotron, and Mistral NeMo, only begin or end like it.
pub const NEMO: &str = "nemo";
const BRIDGE: &str = "megatronbridge";
const MEGASCALE: &str = "megascale";

pub struct System {
    /// Without spaces and dashes, in lower case.
    pub text: String,
    words: Vec<String>,
}

/// A name without what it denies: "no torch.compile", "not interleaved", "torch.compile off". What is not resharded or
/// overlapped, and attention without FlashAttention, are no denials of another thing, but statements that are read as they stand.
pub fn undenied(name: &str) -> String {
    const ENDS: [char; 6] = [',', ';', '(', ')', '+', '/'];
    let kept = |clause: &str| {
        let (text, end) = clause.split_at(clause.trim_end_matches(ENDS).len());
        let words: Vec<&str> = text.split(' ').collect();
        let stands = ["flash", "reshard", "overlap"].iter().any(|word| text.to_lowercase().contains(word));
        let is = |word: &&str, of: &[&str]| of.contains(&word.to_lowercase().as_str());
        let denies = words.iter().position(|word| is(word, &["no", "not", "without", "never"]));
        let off = words.iter().any(|word| is(word, &["off", "disabled"]));
        match (stands, off, denies) {
            (true, ..) | (false, false, None) => clause.to_string(),
            (_, true, _) => end.to_string(),
            (_, _, Some(at)) => words[..at].join(" ") + end,
        }
    };
    let all: String = name.split_inclusive(ENDS).map(kept).collect();
    // Something is left to be named by: "torchtitan torch.compile off".
    if all.trim().is_empty() { name.split(' ').next().unwrap_or_default().into() } else { all }
}

impl System {
    pub fn of(name: &str) -> System {
        let name = undenied(name);
        System { text: squeezed(&name), words: tokens(&name) }
    }

    /// Whether one of these is in the name.
    pub fn says(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.has(name))
    }

    /// Whether it is a word of the name.
    pub fn has_word(&self, word: &str) -> bool {
        self.words.iter().any(|own| own == word)
    }

    /// Whether a name is in it, or all that `&` joins; behind `=`, whether it is nothing else.
    pub fn has(&self, name: &str) -> bool {
        name.split('&').all(|name| match name {
            NEMO => self.is_nemo(),
            MEGASCALE => self.is_megascale(),
            _ => name.strip_prefix('=').map_or_else(|| self.text.contains(name), |whole| self.text == whole),
        })
    }

    fn is_nemo(&self) -> bool {
        let named = |at: usize| {
            let word = &self.words[at];
            let is_model = word.starts_with("nemotron") || at > 0 && self.words[at - 1] == "mistral";
            word.starts_with(NEMO) && !is_model
        };
        (0..self.words.len()).any(named)
    }

    pub fn is_bridge(&self) -> bool {
        self.has(BRIDGE)
    }

    /// Whether a version of the library Megatron-Bridge is named, a commit or a day of it: not the recipes of performance
    /// that come with a release of NeMo's containers, whose numbers begin with 22 at least.
    pub fn is_library(&self) -> bool {
        let tail = self.text.find(BRIDGE).map_or("", |at| &self.text[at + BRIDGE.len()..]);
        let digits: String =
            tail.strip_prefix('v').unwrap_or(tail).chars().take_while(|c| c.is_ascii_digit()).collect();
        let versioned = digits.parse::<u32>().is_ok_and(|major| major < 22);
        tail.starts_with('@') || tail.starts_with("of") && !tail.starts_with("ofmlperf") || versioned
    }

    /// Whether FlashAttention is named, of whichever version; flash-linear-attention is none.
    pub fn has_flash(&self) -> bool {
        let alone = |at: usize| self.words[at] == "flash" && self.words.get(at + 1).is_none_or(|word| word != "linear");
        self.text.contains("flashatt") || (0..self.words.len()).any(alone)
    }

    /// Whether it is MegaScale itself (arXiv:2402.15627): not what has its name within another one (MegaScale-MoE,
    /// arXiv:2505.11432), nor another system with something of MegaScale's.
    fn is_megascale(&self) -> bool {
        let Some(at) = self.words.iter().position(|word| word == MEGASCALE) else { return false };
        let other = self.words.get(at + 1).is_some_and(|word| ["moe", "infer", "omni", "s"].contains(&word.as_str()));
        !other && !self.words[..at].iter().any(|word| word.starts_with("megatron"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_name_denies_is_not_in_it() {
        for (name, word) in [
            ("torchtitan (FSDP2, no torch.compile)", "compile"),
            ("torchtitan (FSDP2, not compiled)", "compile"),
            ("torchtitan (torch.compile off)", "compile"),
            ("torchtitan without torch.compile", "compile"),
            ("NeMo 24.07 (not interleaved)", "interleaved"),
            ("PyTorch, no Ulysses", "ulysses"),
            ("Megatron-Core 5D, no folding", "folding"),
        ] {
            assert!(!System::of(name).has(word), "{name}: {}", System::of(name).text);
        }
        let name = "torchtitan (FSDP2, reshard_after_forward=never, torch.compile)";
        assert!(System::of(name).has("compile") && System::of(name).has("reshardafterforward=never"));
        assert!(System::of("torchtitan torch.compile off").text == "torchtitan");
        assert!(System::of("a script, without FlashAttention (Megatron-LM)").has("withoutflash"));
        assert_eq!(undenied("no compile, FSDP2 + TP (tp 2)"), ", FSDP2 + TP (tp 2)");
    }

    #[test]
    fn what_only_looks_like_the_name_of_a_system() {
        let nemo = |name: &str| System::of(name).has(NEMO);
        for name in
            ["NeMo 24.07", "Megatron-LM / NeMo (2024-05)", "NeMo24.03", "NeMo_Framework", "Megatron-LM (NeMo 26.04)"]
        {
            assert!(nemo(name), "{name}");
        }
        for name in
            ["Megatron-LM (Nemotron-4)", "FSDP, Nemotron 3 Nano", "Megatron-LM (Mistral NeMo 12B)", "Megatron-LM"]
        {
            assert!(!nemo(name), "{name}");
        }
        let itself = |name: &str| System::of(name).is_megascale();
        assert!(
            itself("MegaScale") && itself("ByteDance MegaScale (A100)") && itself("MegaScale ablation +TP overlap")
        );
        assert!(!itself("MegaScale-MoE (on Megatron-LM)") && !itself("Megatron-LM@f1f03922 with MegaScale's overlap"));
    }

    #[test]
    fn flash_attention_in_many_spellings() {
        for name in ["(flash-attn)", "+ FlashAttention", "flash attention", "Flash_Attn", "FlashAttention-2", "(flash)"]
        {
            assert!(System::of(&format!("GPT-NeoX {name}")).has_flash(), "{name}");
        }
        assert!(!System::of("flash-linear-attention").has_flash() && !System::of("GPT-NeoX").has_flash());
    }

    #[test]
    fn the_library_and_its_recipes() {
        let library = |name: &str| System::of(name).is_library();
        for name in ["@79308d0 (NeMo 26.08)", " 0.1.0rc4 (NeMo 25.09)", " v0.3.0", " of July 2026"] {
            assert!(library(&format!("Megatron-Bridge{name}")), "{name}");
        }
        assert!(
            !library("NeMo/Megatron-Bridge 26.04")
                && !library("Megatron-Bridge (NeMo 26.04)")
                && !library("NeMo 25.09")
        );
    }
}
