//! How long documents packed into a sequence are, where a source says that there are some and not how long they are.

use crate::published::row::case::Attention;
use crate::published::row::words::squeezed;

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

/// Of lengths that are as many in every octave up to the longest, the longest over that which a token sees on average:
/// the mean of n^2 over the mean of n is half of it.
pub const LONGEST: f64 = 2.0;

/// Whether the name of a mask says that a sequence is packed of documents.
pub fn are_packed(mask: &str) -> bool {
    let text = squeezed(mask);
    ["varlen", "document", "packed", "thd"].iter().any(|word| text.contains(word))
}

/// The longest document as the ranks see it that share it, where each document is over as many as its length asks for, a power
/// of two (Megatron Core's hybrid context parallelism): the others wait for them.
pub fn longest(row: &Attention) -> Option<Attention> {
    let hybrid = ["hybriddcp", "hybridcp"].iter().any(|name| squeezed(&row.family).contains(name));
    let is = hybrid && row.documents.is_empty() && are_packed(&row.mask);
    let (seq, gpus) = (row.seq.filter(|_| is)?, row.gpus.filter(|gpus| *gpus > 1)?);
    let each = seq / u64::from(gpus);
    let length = (LONGEST * seen(seq)).min(seq as f64);
    let ranks = ((length / each as f64).ceil() as u32).next_power_of_two().clamp(2, gpus);
    let unit = 2 * u64::from(ranks);
    let seq = (length as u64 / unit).max(1) * unit;
    Some(Attention {
        gpus: Some(ranks),
        nodes: Some(ranks.div_ceil(8)),
        seq: Some(seq),
        mask: String::new(),
        ..row.clone()
    })
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

    #[test]
    fn the_longest_document_has_the_ranks_that_its_length_asks_for() {
        let row = |gpus: u32| Attention {
            family: "hybrid_dcp".into(),
            mask: "varlen_full_mask".into(),
            gpus: Some(gpus),
            seq: Some(8192 * u64::from(gpus)),
            ..Attention::default()
        };
        for (gpus, ranks) in [(8, 2), (16, 4), (32, 8), (64, 8)] {
            let found = longest(&row(gpus)).unwrap();
            assert_eq!(found.gpus, Some(ranks), "{gpus}");
            let wanted = LONGEST * seen(8192 * u64::from(gpus));
            assert!((found.seq.unwrap() as f64 / wanted - 1.0).abs() < 0.01);
        }
        assert!(longest(&Attention { family: "ring_p2p".into(), ..row(8) }).is_none());
        assert!(longest(&Attention { mask: "full_mask".into(), ..row(8) }).is_none());
    }
}
