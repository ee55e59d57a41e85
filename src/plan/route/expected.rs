//! How many parts of a group a token reaches when its choices are balanced.

/// Expected number of parts that `topk` different slots fall into, chosen with equal chance out of `experts` in
/// `parts` equal parts: n (1 - C(E - E/n, k) / C(E, k)) (DeepEP's `get_expected_topk`).
pub fn expected_unique(experts: u32, topk: u32, parts: u32) -> f64 {
    let (all, others) = (f64::from(experts), f64::from(experts) - f64::from(experts) / f64::from(parts));
    // None of the choices falls into one given part.
    let missed: f64 = (0..topk).map(f64::from).map(|i| ((others - i) / (all - i)).max(0.0)).product();
    f64::from(parts) * (1.0 - missed)
}

/// The same where the slots of a token stand in `kept` of `count` equal groups, every choice of groups being as likely
/// as any other, and so is every choice of slots in them.
pub fn expected_unique_in_groups(experts: u32, topk: u32, parts: u32, groups: [u32; 2]) -> f64 {
    // Neighbours mostly have as much of as many groups.
    let mut known: Option<(Inside, f64)> = None;
    let reached = |part| {
        let inside = Inside::of(part, experts / parts, experts / groups[0], groups[0]);
        match &known {
            Some((same, reached)) if *same == inside => *reached,
            _ => known.insert((inside.clone(), inside.reached(experts, topk, groups))).1,
        }
    };
    (0..parts).map(reached).sum()
}

/// What a part has of the groups of slots.
#[derive(Debug, Clone, PartialEq)]
struct Inside {
    /// Groups that are in it as a whole.
    whole: u32,
    /// Of those that are not, slots that are: of one at either end at most.
    cut: Vec<u32>,
}

impl Inside {
    /// Of part number `number`, the parts having `part` slots and the `count` groups `group` slots each.
    fn of(number: u32, part: u32, group: u32, count: u32) -> Inside {
        let (from, to) = (number * part, (number + 1) * part);
        let inside = |g: u32| ((g + 1) * group).min(to).saturating_sub((g * group).max(from));
        let whole = (0..count).filter(|&g| inside(g) == group).count() as u32;
        Inside { whole, cut: (0..count).map(inside).filter(|&n| n > 0 && n < group).collect() }
    }

    /// How likely a token reaches the part.
    fn reached(&self, experts: u32, topk: u32, [count, kept]: [u32; 2]) -> f64 {
        let Inside { whole, cut } = self;
        let group = experts / count;
        // Of `of` things, `few` at a time.
        let ways = |of: u32, few: u32| -> f64 {
            if few > of { 0.0 } else { (0..few).map(|i| f64::from(of - i) / f64::from(few - i)).product() }
        };
        let slots = kept * group;
        // No slot falls into `here` of those that may be chosen.
        let missed = |here: u32| -> f64 {
            (0..topk).map(|i| f64::from(slots.saturating_sub(here + i)) / f64::from(slots - i)).product()
        };
        let others = count - whole - cut.len() as u32;
        let mut miss = 0.0;
        for chosen in 0..1u32 << cut.len() {
            let in_cut: u32 = cut.iter().enumerate().map(|(i, n)| if chosen >> i & 1 == 1 { *n } else { 0 }).sum();
            let left = kept.saturating_sub(chosen.count_ones());
            for here in 0..=left.min(*whole) {
                let share = ways(*whole, here) * ways(others, left - here) / ways(count, kept);
                let fits = chosen.count_ones() <= kept;
                miss += if fits { share * missed(in_cut + here * group) } else { 0.0 };
            }
        }
        1.0 - miss
    }
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

    /// Four nodes of eight at most: as many as 128 experts on four reach.
    #[test]
    fn node_limited_choices_reach_no_more_than_their_groups() {
        let nodes = expected_unique_in_groups(256, 8, 8, [8, 4]);
        assert!((nodes - expected_unique(128, 8, 4)).abs() < 1e-12 && nodes < 4.0, "{nodes}");
        assert!((expected_unique_in_groups(256, 8, 64, [8, 8]) - expected_unique(256, 8, 64)).abs() < 1e-9);
        assert_eq!(expected_unique_in_groups(256, 8, 1, [8, 4]), 1.0);
    }

    #[test]
    fn parts_alike_are_looked_at_once() {
        for (experts, topk, parts, count, kept) in
            [(256, 8, 256, 8, 4), (384, 8, 48, 12, 5), (24, 3, 4, 6, 2), (24, 2, 3, 4, 2), (360, 6, 24, 10, 3)]
        {
            let of =
                |part| Inside::of(part, experts / parts, experts / count, count).reached(experts, topk, [count, kept]);
            let each: f64 = (0..parts).map(of).sum();
            assert_eq!(expected_unique_in_groups(experts, topk, parts, [count, kept]), each, "{experts} {parts}");
        }
    }

    /// Parts inside groups, groups inside parts, and neither.
    #[test]
    fn it_is_what_random_choices_in_groups_do() {
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(9);
        for (experts, topk, parts, count, kept) in
            [(256, 8, 32, 8, 4), (64, 6, 4, 16, 5), (24, 3, 4, 6, 2), (24, 2, 3, 4, 2)]
        {
            let (draws, mut reached) = (20_000, 0);
            for _ in 0..draws {
                let groups: Vec<usize> = rand::seq::index::sample(&mut rng, count, kept).into_vec();
                let of = |i: usize| groups[i / (experts / count)] * (experts / count) + i % (experts / count);
                let chosen = rand::seq::index::sample(&mut rng, kept * experts / count, topk);
                reached += chosen.iter().map(|i| of(i) / (experts / parts)).collect::<BTreeSet<_>>().len();
            }
            let [e, k, p, c, m] = [experts, topk, parts, count, kept].map(|n| n as u32);
            let expected = expected_unique_in_groups(e, k, p, [c, m]);
            let mean = reached as f64 / draws as f64;
            assert!((mean / expected - 1.0).abs() < 0.01, "{experts} {parts} {count}: {mean} is not {expected}");
        }
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
