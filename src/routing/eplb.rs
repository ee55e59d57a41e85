//! DeepSeek's expert-parallelism load balancer (eplb.py): which experts get replicas, and where all of them go.

use crate::error::{Error, Result};

/// The logical expert of each physical slot. Hierarchical where groups divide over the nodes (groups of experts to
/// nodes, replicas within the node, slots to ranks), global otherwise.
pub fn rebalance(loads: &[f64], slots: u32, groups: u32, nodes: u32, ranks: u32) -> Result<Vec<u32>> {
    let experts = loads.len() as u32;
    let bad = |field: &str, why: String| Err(Error::spec("placement", field, why));
    if ranks == 0 || !slots.is_multiple_of(ranks) {
        return bad("replicas", divides(experts, slots, ranks));
    }
    if slots < experts {
        return bad("replicas", format!("{slots} slots for {experts} experts; every expert needs one"));
    }
    let fits = |n: u32, of: u32| n > 0 && of.is_multiple_of(n);
    let whole = fits(nodes, groups) && fits(groups, experts) && fits(nodes, ranks) && fits(nodes, slots);
    let (groups, nodes) = if whole { (groups, nodes) } else { (1, 1) };
    Ok(hierarchical(loads, slots as usize, groups as usize, nodes as usize, ranks as usize))
}

/// What to do about slots that do not divide over the ranks: the numbers of replicas on both sides.
fn divides(experts: u32, slots: u32, ranks: u32) -> String {
    let why = format!("{slots} slots do not divide over {ranks} ranks");
    let Some(above) = slots.checked_next_multiple_of(ranks) else { return format!("{why}; give fewer replicas") };
    let below = (above - ranks).checked_sub(experts).map_or(String::new(), |fewer| format!("{fewer} or "));
    format!("{why}; use {below}{} replicas", above - experts)
}

fn hierarchical(loads: &[f64], slots: usize, groups: usize, nodes: usize, ranks: usize) -> Vec<u32> {
    let size = loads.len() / groups;
    let by_group: Vec<f64> = loads.chunks(size).map(|g| g.iter().sum()).collect();
    let packed = pack(&by_group, nodes);
    // Experts in the order of their nodes.
    let mut order = vec![0; loads.len()];
    for (group, (node, place)) in packed.iter().enumerate() {
        let first = (node * (groups / nodes) + place) * size;
        (0..size).for_each(|i| order[first + i] = group * size + i);
    }
    let of_node = |own: &[usize]| place_on_ranks(own, loads, slots / nodes, ranks / nodes);
    order.chunks(loads.len() / nodes).flat_map(of_node).collect()
}

/// The slots of one node, rank after rank.
fn place_on_ranks(experts: &[usize], loads: &[f64], slots: usize, ranks: usize) -> Vec<u32> {
    let own: Vec<f64> = experts.iter().map(|e| loads[*e]).collect();
    let (of, count) = replicate(&own, slots);
    let shares: Vec<f64> = of.iter().map(|e| own[*e] / count[*e] as f64).collect();
    let mut placed = vec![0; slots];
    for (slot, (rank, place)) in pack(&shares, ranks).into_iter().enumerate() {
        placed[rank * (slots / ranks) + place] = experts[of[slot]] as u32;
    }
    placed
}

/// Into `packs` of as many items each, heaviest first, always into the lightest that has room: (pack, place in it).
fn pack(weights: &[f64], packs: usize) -> Vec<(usize, usize)> {
    let room = weights.len() / packs;
    if room == 1 {
        return (0..packs).map(|i| (i, 0)).collect();
    }
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]));
    let (mut sum, mut items) = (vec![0.0; packs], vec![0; packs]);
    let mut packed = vec![(0, 0); weights.len()];
    for item in order {
        let open = (0..packs).filter(|p| items[*p] < room);
        let pack = open.min_by(|a, b| f64::total_cmp(&sum[*a], &sum[*b])).expect("there is room for all");
        packed[item] = (pack, items[pack]);
        items[pack] += 1;
        sum[pack] += weights[item];
    }
    packed
}

/// A slot for each expert, and one more for whichever has most for each of its slots, until all are given.
fn replicate(loads: &[f64], slots: usize) -> (Vec<usize>, Vec<usize>) {
    let mut of: Vec<usize> = (0..loads.len()).collect();
    let mut count = vec![1usize; loads.len()];
    while of.len() < slots {
        let share = |e: &usize| loads[*e] / count[*e] as f64;
        // The first of the largest.
        let most = (0..loads.len()).rev().max_by(|a, b| share(a).total_cmp(&share(b))).expect("there are experts");
        of.push(most);
        count[most] += 1;
    }
    (of, count)
}
