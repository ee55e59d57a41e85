//! How long documents packed into a sequence are, where a source says that there are some and not how long they are.

/// Tokens of a sequence, and of the document that one of its tokens is in, on average: of the 20 sequences that
/// MagiAttention's benchmark draws from the lengths of ChatQA's documents with its seed of 42, longer ones cut to a
/// quarter of the sequence (github:SandAI-org/MagiAttention exps/dist_attn/benchmark/utils.py, `DatasetSampler`, and
/// datasets/default/doc_length_distribution.csv there: octaves from 500 tokens to 200 thousand hold much the same).
const DRAWN: [(f64, f64); 4] = [(65536.0, 7209.0), (131072.0, 12758.0), (262144.0, 18060.0), (524288.0, 22771.0)];

/// Tokens of the document that a token of such a sequence is in, on average. Between and beyond what was drawn by powers.
pub fn seen(seq: u64) -> f64 {
    let seq = seq as f64;
    let above = DRAWN.iter().position(|(drawn, _)| *drawn >= seq).unwrap_or(DRAWN.len() - 1).max(1);
    let [(s0, n0), (s1, n1)] = [DRAWN[above - 1], DRAWN[above]];
    let power = (n1 / n0).ln() / (s1 / s0).ln();
    (n0 * (seq / s0).powf(power)).min(seq)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_drawn_is_found_and_the_rest_lies_between_or_beyond() {
        assert_eq!((seen(65536), seen(524288)), (7209.0, 22771.0));
        assert!((12758.0..18060.0).contains(&seen(200_000)));
        assert!(seen(1 << 20) > 22771.0 && seen(8192) < 2000.0);
        assert!(seen(64) <= 64.0);
    }
}
