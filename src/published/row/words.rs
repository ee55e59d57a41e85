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

/// What ends a remark that says of something that nobody knows it.
const UNSAID: [&str; 9] = [
    "not stated",
    "not said",
    "not told",
    "not given",
    "not known",
    "not quoted",
    "not in the text",
    "unstated",
    "unknown",
];

/// Remarks without those that say what is not stated ("CUDA graphs not stated"; "recomputation, degrees and batch not stated"),
/// in lower case.
pub fn told(text: &str) -> String {
    let lower = text.to_lowercase().replace(". ", "; ");
    let kept = lower.split(['\n', ';']).map(|sentence| {
        let mut clauses: Vec<&str> = sentence.split(',').collect();
        let is_unsaid = |clause: &str| UNSAID.iter().any(|word| clause.contains(word));
        while let Some(at) = clauses.iter().rposition(|clause| is_unsaid(clause)) {
            let ends_list = [" and ", " or "].iter().any(|word| clauses[at].contains(word));
            clauses.remove(at);
            // The members of a list that such a clause ends are names of things, and no statements.
            let is_name = |clause: &str| ends_list && clause.split_whitespace().count() <= 2;
            let names = clauses[..at].iter().rev().take_while(|clause| is_name(clause)).count();
            clauses.drain(at - names..at);
        }
        clauses.join(",")
    });
    kept.collect::<Vec<_>>().join(";")
}

/// What [`told`] leaves, without what it denies: "no CUDA graphs", "without overlap", "not forced to be even", "overlap off".
pub fn affirmed(text: &str) -> String {
    let told = told(text).replace(" but ", ", ");
    let clauses = told.split([',', ';', '(', ')']).map(|clause| {
        let words: Vec<&str> = clause.split_whitespace().collect();
        let bare = |word: &str| word.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_string();
        let is_off = |word: &&str| ["off", "disabled"].contains(&bare(word).as_str());
        let denies = |word: &&str| ["no", "not", "without", "never"].contains(&bare(word).as_str());
        let end = words.iter().position(denies).unwrap_or(words.len());
        let kept = if words.iter().any(is_off) { String::new() } else { words[..end].join(" ") };
        kept + " ;"
    });
    clauses.collect()
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
    fn what_is_not_stated_is_no_statement() {
        for (text, left) in [
            ("CUDA graphs not stated", ""),
            ("forced balance; CUDA graphs unknown", "forced balance;"),
            ("mock data, recomputation, A2A overlap and forced balance not stated; rounded", ";rounded"),
            ("routing forced to be even, batch and sequence not stated", "routing forced to be even"),
            ("container 26.04. CUDA graphs not said", "container 26.04;"),
        ] {
            assert_eq!(squeezed(&told(text)), squeezed(left), "{text}");
        }
        for (text, left) in [
            ("no CUDA graphs, forced balance", ";forcedbalance;"),
            ("experts not forced to be even", "experts;"),
            ("EP overlap off; +1f1b A2A overlap", ";+1f1ba2aoverlap;"),
            ("without CUDA graphs but with A2A overlap", ";witha2aoverlap;"),
            ("CPU offload (no tiled loss)", "cpuoffload;;;"),
        ] {
            assert_eq!(squeezed(&affirmed(text)), left, "{text}");
        }
    }

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
