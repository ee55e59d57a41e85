//! How many parts of a group a token reaches when its choices are balanced.

/// Expected number of parts that `topk` different slots fall into, chosen with equal chance out of `experts` in
/// `parts` equal parts: n (1 - C(E - E/n, k) / C(E, k)) (DeepEP's `get_expected_topk`).
pub fn expected_unique(experts: u32, topk: u32, parts: u32) -> f64 {
    let (all, others) = (f64::from(experts), f64::from(experts) - f64::from(experts) / f64::from(parts));
    // The probability that none of the choices falls into a given part.
    let missed: f64 = (0..topk).map(f64::from).map(|i| ((others - i) / (all - i)).max(0.0)).product();
    f64::from(parts) * (1.0 - missed)
}

/// Parts of `local` slots that `topk` slots in a row reach on average, the first of which is any multiple of `topk`: it stands
/// on any multiple of their greatest common divisor within a part.
pub fn in_a_row(local: u32, topk: u32) -> f64 {
    let (mut common, mut rest) = (topk, local);
    while rest > 0 {
        (common, rest) = (rest, common % rest);
    }
    f64::from(topk + local - common) / f64::from(local)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use std::collections::BTreeSet;

    #[test]
    fn the_published_figures() {
        let u = |parts| (expected_unique(256, 8, parts) * 1000.0).round() / 1000.0;
        assert_eq!([8, 16, 32, 64].map(u), [5.295, 6.523, 7.267, 7.676]);
        assert_eq!([2, 4].map(u), [1.993, 3.614]);
    }

    #[test]
    fn all_slots_reach_all_parts_and_one_slot_one() {
        assert_eq!(expected_unique(8, 8, 4), 4.0);
        assert!((expected_unique(8, 1, 4) - 1.0).abs() < 1e-12);
        assert!((expected_unique(256, 8, 256) - 8.0).abs() < 1e-12);
    }

    #[test]
    fn it_is_what_random_choices_do() {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(7);
        for (experts, topk, parts) in [(256, 8, 8), (64, 6, 16), (16, 2, 4)] {
            let draws = 20_000;
            let mut reached = 0;
            for _ in 0..draws {
                let chosen = rand::seq::index::sample(&mut rng, experts, topk);
                reached += chosen.iter().map(|e| e / (experts / parts)).collect::<BTreeSet<_>>().len();
            }
            let expected = expected_unique(experts as u32, topk as u32, parts as u32);
            let mean = reached as f64 / draws as f64;
            assert!((mean / expected - 1.0).abs() < 0.01, "{experts} {topk} {parts}: {mean} is not {expected}");
        }
    }
}
