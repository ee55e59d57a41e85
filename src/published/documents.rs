//! Lengths of documents packed into a sequence, where a source says that there are some and not how long they are.

/// Documents shorter than it hold few of the tokens.
const SHORTEST: u64 = 1 << 10;

/// A longer document is cut (`chunk_ratio` of github:SandAI-org/MagiAttention exps/dist_attn/benchmark_conf.py).
const CUT: u64 = 4;

/// Documents of a sequence of `seq` tokens: every octave of lengths from a thousand tokens up to a quarter of the
/// sequence holds as many tokens. The lengths of ChatQA's documents that MagiAttention's benchmark prints
/// (exps/dist_attn/benchmark/utils.py) do so within a factor of two from 1 K to 64 K.
pub fn usual(seq: u64) -> Vec<u64> {
    let longest = (seq / CUT).max(SHORTEST);
    let octaves = std::iter::successors(Some(longest), |n| Some(n / 2)).take_while(|n| *n / 2 >= SHORTEST);
    // The middle of an octave stands for it.
    let lengths: Vec<u64> = octaves.map(|n| n - n / 4).collect();
    let mut held = vec![0u64; lengths.len()];
    let (mut left, mut documents) = (seq, vec![]);
    while left > 0 {
        // Whichever octave has the fewest tokens so far is next, a short document first.
        let next = (0..lengths.len()).min_by_key(|&at| (held[at], lengths[at]));
        let length = next.map_or(SHORTEST, |at| lengths[at]).min(left);
        next.into_iter().for_each(|at| held[at] += length);
        documents.push(length);
        left -= length;
    }
    documents
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octaves_hold_alike_and_the_sequence_is_full() {
        let found = usual(512 << 10);
        assert_eq!(found.iter().sum::<u64>(), 512 << 10);
        assert!(found.iter().all(|n| *n <= 128 << 10), "{found:?}");
        let within = |low: u64| found.iter().filter(|n| (low..2 * low).contains(*n)).sum::<u64>();
        let octaves: Vec<u64> = (10..17).map(|k| within(1 << k)).collect();
        assert!(octaves[..5].iter().all(|n| n.abs_diff((512 << 10) / 7) < 40 << 10), "{octaves:?}");
        // A token sees a longer document than the mean of the documents is.
        let seen = found.iter().map(|n| n * n).sum::<u64>() / (512 << 10);
        assert!(seen > 16 << 10 && seen < 48 << 10, "{seen}");
    }

    #[test]
    fn short_sequences_have_short_documents() {
        assert_eq!(usual(1024), [1024]);
        assert_eq!(usual(3000).iter().sum::<u64>(), 3000);
        assert!(usual(16 << 10).iter().all(|n| *n <= 4 << 10));
    }
}
