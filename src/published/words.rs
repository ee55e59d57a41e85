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
        assert_eq!(number_behind("ffn=4h, vocab 50257", "vocab"), Some(50257.0));
    }
}
