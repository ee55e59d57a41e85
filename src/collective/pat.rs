//! Parallel aggregated trees (PAT, NCCL 2.23): an all-gather or reduce-scatter in as many rounds as a power of two has to
//! be doubled to reach all members, each of whom has the same share of every round.
//!
//! The part of the member that is j behind has come over one hop for each bit of j, that of the highest bit first: so the
//! last of them, which brings it here, is as long as the lowest bit of j. Far hops carry few parts, near ones many.

/// The distances over which a member sends, the farthest first, and how many of the `n` parts go over each.
pub fn sends(n: usize) -> Vec<(usize, usize)> {
    let mut apart = n.next_power_of_two();
    let mut all = vec![];
    while apart > 1 {
        apart /= 2;
        // The parts that are an odd multiple of the distance behind, below n.
        let parts = ((n - 1) / apart).div_ceil(2);
        if parts > 0 {
            all.push((apart, parts));
        }
    }
    all
}

/// Parts that leave each group of `inside` members that stand side by side, over the `n` parts that each receives.
pub fn leaving(n: usize, inside: usize) -> f64 {
    let parts = sends(n).into_iter().map(|(apart, parts)| apart.min(n - apart).min(inside) * parts);
    parts.sum::<usize>() as f64 / n as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Everyone ends with all parts: played hop by hop, a part goes on only where it has come.
    #[test]
    fn all_parts_arrive() {
        for n in 1..70usize {
            let mut has: Vec<Vec<bool>> = (0..n).map(|m| (0..n).map(|part| part == m).collect()).collect();
            for (apart, parts) in sends(n) {
                let before = has.clone();
                for (from, held) in before.iter().enumerate() {
                    let to = (from + apart) % n;
                    // Those that are an odd multiple of the distance behind whom they go to.
                    let goes = (1..n).filter(|j| j % (2 * apart) == apart);
                    assert_eq!(goes.clone().count(), parts, "{n} {apart}");
                    for part in goes.map(|j| (to + n - j) % n) {
                        assert!(held[part] && !std::mem::replace(&mut has[to][part], true), "{n} {apart} {part}");
                    }
                }
            }
            assert!(has.iter().flatten().all(|&has| has), "{n}");
            assert_eq!(sends(n).iter().map(|sent| sent.1).sum::<usize>(), n - 1);
        }
    }

    /// Of 64 members in pods of 8: hops of 32, 16 and 8 leave with all eight, 1 + 2 + 4 times; those of 4, 2 and 1 with 4, 2
    /// and 1, and 8, 16 and 32 parts. A ring sends 63 of them out of each.
    #[test]
    fn what_leaves_a_pod_by_hand() {
        assert_eq!(leaving(64, 8), (8.0 * 7.0 + 3.0 * 32.0) / 64.0);
        assert_eq!(leaving(16, 2), (2.0 * 7.0 + 8.0) / 16.0);
    }
}
