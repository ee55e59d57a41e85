//! Numbers and words in the free text of a source.

/// Text in lower case, with every space and dash alike gone, so that "ZeRO 3", "ZeRO-3" and "zero3" are one word.
pub fn squeezed(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace() && *c != '-' && *c != '_').flat_map(char::to_lowercase).collect()
}

/// Letters and digits of a text in lower case, cut wherever anything else stands.
pub fn tokens(text: &str) -> Vec<String> {
    let lower = text.to_lowercase();
    lower.split(|c: char| !c.is_ascii_alphanumeric()).filter(|t| !t.is_empty()).map(String::from).collect()
}

/// Whether a precision is one of eight bits or fewer, as sources spell them.
pub fn is_narrow(precision: &str) -> bool {
    let text = without_denied(&squeezed(precision));
    ["fp8", "float8", "e4m3", "8bit"].iter().any(|word| text.contains(word)) || is_fp4(precision)
}

/// A precision without what it is said not to be: "BF16 (no FP8)".
fn without_denied(text: &str) -> String {
    ["nofp8", "notfp8", "withoutfp8", "nofloat8"].iter().fold(text.to_string(), |text, word| text.replace(word, ""))
}

/// Whether it is one of four bits.
pub fn is_fp4(precision: &str) -> bool {
    let text = squeezed(precision);
    ["fp4", "float4", "e2m1"].iter().any(|word| text.contains(word))
}

/// The number that ends right before byte `end`, spaces between them allowed.
pub fn number_before(text: &str, end: usize) -> Option<f64> {
    let head = text[..end].trim_end();
    let digits = head.chars().rev().take_while(|c| c.is_ascii_digit() || *c == '.').count();
    head[head.len() - digits..].trim_matches('.').parse().ok()
}

/// The number that starts right behind the first `word`.
pub fn number_behind(text: &str, word: &str) -> Option<f64> {
    let tail = text[text.find(word)? + word.len()..].trim_start();
    let digits: String = tail.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    digits.trim_matches('.').parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_beside_words() {
        assert_eq!(squeezed("ZeRO-3 (FSDP FULL_SHARD)"), "zero3(fsdpfullshard)");
        assert_eq!(tokens("A100-SXM-80GB (\"Ampere\")"), ["a100", "sxm", "80gb", "ampere"]);
        assert_eq!(number_before("2x195 Gb/s", 6), Some(195.0));
        assert_eq!(number_before("with F=0.554*312 TFLOP", 17), Some(312.0));
        assert_eq!(number_before("Gb/s", 0), None);
        assert!(["FP8-MX", "amp_fp8", "float8 tensorwise", "NVFP4"].iter().all(|p| is_narrow(p)));
        assert!(!is_narrow("bf16") && !is_narrow("BF16 (no FP8)") && is_fp4("NVFP4") && !is_fp4("MXFP8"));
        assert_eq!(number_behind("ffn=4h, vocab 50257", "vocab"), Some(50257.0));
    }
}
