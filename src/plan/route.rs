//! Which rows of a mixture-of-experts layer go where: what both predictor and executor read.
//!
//! A group of `ranks` holds `experts` physical slots, the same number on each in rank order; a replica is a slot of
//! its own. Every source has tokens, and every token goes to `topk` slots. Three counts follow, and an exchange
//! moves one of them: *copies*, a row for each token and slot; *unique to a rank*, a row for each token and rank
//! that has one of its slots; *unique to a node*, the same by nodes.

mod counts;
mod expected;
mod grouped;
mod replicas;
mod shadow;

pub use counts::Tables;
pub use expected::{expected_unique, in_a_row};
pub use grouped::expected_unique_in_groups;

use crate::error::{Error, Result};
use crate::spec::{GroupScore, Groups};
use serde::{Deserialize, Serialize, Serializer};

/// In place of a slot: the token has no choice there, since it was dropped or masked.
pub const DROPPED: u32 = u32::MAX;

/// A number of rows: whole where the choices are listed, an expected value where they are balanced.
pub type Rows = f64;

/// Where the tokens of one layer and microbatch go.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Route {
    /// Ranks of the expert-parallel group.
    pub ranks: u32,
    /// Consecutive ranks of the group that share a node; divides `ranks`.
    pub node: u32,
    /// Physical slots of the group; a multiple of `ranks`.
    pub experts: u32,
    /// Slots that a token goes to.
    pub topk: u32,
    pub counts: Counts,
    /// Equal groups of slots, and how many of them a token's slots stand in at most, for choices that are not listed;
    /// `None`: any slots.
    #[serde(default, skip_serializing_if = "Option::is_none", serialize_with = "in_short")]
    pub groups: Option<Groups>,
    /// The expert that each slot holds, where some hold the same; empty where slot i holds expert i.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<u32>,
    /// Rows that every source sends to every slot, filled up with zeros; `None`: it sends the rows that chose the slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad: Option<u32>,
    /// Slots at the end of every rank that only borrow the weights of their experts, see [`Route::shadowing`].
    #[serde(default, skip_serializing_if = "is_zero")]
    pub shadows: u32,
    #[serde(skip_serializing)]
    tables: Option<Tables>,
    /// Ranks, and nodes, that a token is expected to reach, for choices that are not listed.
    #[serde(skip_serializing)]
    reached: [Rows; 2],
}

/// The tokens and their choices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Counts {
    /// Every source alike, `topk` different slots out of all with equal chance. Any scale, in closed form; it can
    /// be predicted and not executed.
    Balanced {
        /// Tokens of one source.
        tokens: u64,
    },
    /// As `Balanced`, but the slots of a token stand as far apart as they can, so that it reaches as many ranks as it
    /// has choices, or all (the `balanced` of github:ai-dynamo/aiconfigurator's collectors).
    Spread {
        /// Tokens of one source.
        tokens: u64,
    },
    /// As `Balanced`, but token after token takes the next slots in a row, so that a token reaches as few ranks as hold
    /// that many slots (the gate of NeMo AutoModel's benchmarks, `FakeBalancedGate`).
    RoundRobin {
        /// Tokens of one source.
        tokens: u64,
    },
    Listed {
        /// Tokens of each source.
        tokens: Vec<u64>,
        /// Source after source, token after token, `topk` slots each, [`DROPPED`] where there is none.
        choices: Vec<u32>,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Unchecked {
    ranks: u32,
    node: u32,
    experts: u32,
    topk: u32,
    counts: Counts,
    #[serde(default)]
    groups: Option<Groups>,
    #[serde(default)]
    holds: Vec<u32>,
    #[serde(default)]
    pad: Option<u32>,
    #[serde(default)]
    shadows: u32,
}

/// Groups of experts as `[8, 4]`, their number and how many are kept, with what ranks them where that is not as usual.
fn in_short<S: Serializer>(groups: &Option<Groups>, to: S) -> std::result::Result<S::Ok, S::Error> {
    match groups {
        Some(Groups { count, kept, score }) if *score == GroupScore::default() => [count, kept].serialize(to),
        other => other.serialize(to),
    }
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

impl TryFrom<Unchecked> for Route {
    type Error = Error;

    fn try_from(raw: Unchecked) -> Result<Route> {
        let route = Route::new([raw.ranks, raw.node], raw.experts, raw.topk, raw.counts)?;
        let route = raw.groups.map_or(Ok(route.clone()), |groups| route.limited(groups))?;
        let route = if raw.holds.is_empty() { route } else { route.holding(raw.holds)? };
        let route = if raw.shadows > 0 { route.shadowing(raw.shadows)? } else { route };
        raw.pad.map_or(Ok(route.clone()), |pad| route.padded(pad))
    }
}

impl Route {
    /// A route of a group; `shape` is its ranks, and the ranks of a node. Errors: the field that does not fit the
    /// others.
    pub fn new(shape: [u32; 2], experts: u32, topk: u32, counts: Counts) -> Result<Route> {
        let [ranks, node] = shape;
        let mut route = Route {
            ranks,
            node,
            experts,
            topk,
            counts,
            groups: None,
            holds: vec![],
            pad: None,
            shadows: 0,
            tables: None,
            reached: [0.0; 2],
        };
        route.check_shape()?;
        if let Counts::Listed { tokens, choices } = &route.counts {
            route.tables = Some(Tables::new(&route, tokens, choices)?);
        }
        Ok(route.reaching())
    }

    /// The route where a token's slots stand in `kept` of `count` groups. Errors: groups that do not divide the
    /// slots, or that have too few slots for the choices.
    pub fn limited(self, groups: Groups) -> Result<Route> {
        let Groups { count, kept, .. } = groups;
        let (experts, topk) = (u64::from(self.experts), u64::from(self.topk));
        if count == 0 || !experts.is_multiple_of(count) || kept > count || topk > experts / count * kept {
            let why =
                format!("{kept} of {count} groups of {experts} slots do not hold {topk} choices; keep more of them");
            return Err(Error::spec("route", "groups", why));
        }
        Ok(Route { groups: (kept < count).then_some(groups), ..self }.reaching())
    }

    /// The route with how many ranks and nodes a token reaches, which takes long to find and is asked for by every hop.
    fn reaching(self) -> Route {
        let reached = match self.tables {
            Some(_) => [0.0; 2],
            None => [self.ranks, self.nodes()].map(|parts| self.expected(parts)),
        };
        Route { reached, ..self }
    }

    /// How many of `parts` equal parts of the group a token is expected to reach.
    fn expected(&self, parts: u32) -> Rows {
        match self.counts {
            Counts::Spread { .. } => f64::from(self.topk.min(parts)),
            Counts::RoundRobin { .. } => in_a_row(self.experts / parts, self.topk).min(f64::from(parts)),
            _ => match self.groups {
                None => expected_unique(self.experts, self.topk, parts),
                Some(groups) => expected_unique_in_groups(self.experts, self.topk, parts, groups),
            },
        }
    }

    /// The route where every source sends `rows` rows to every slot, zeros where fewer chose it. Errors: a slot that
    /// more rows of a source chose.
    pub fn padded(self, rows: u32) -> Result<Route> {
        let fullest = (0..self.ranks).flat_map(|src| (0..self.experts).map(move |slot| (src, slot)));
        if let Some((src, slot)) = fullest.into_iter().find(|&(src, slot)| self.copies(src, slot) > f64::from(rows)) {
            let why = format!("{rows} rows for slot {slot}, which source {src} has {} for", self.copies(src, slot));
            return Err(Error::spec("route", "pad", why + "; drop what is beyond, or make more room"));
        }
        let names = u64::from(rows) * u64::from(self.experts) + self.most_tokens();
        if names >= u64::from(u32::MAX) {
            return Err(Error::spec("route", "pad", format!("{rows} rows for each slot are beyond 2^32; use fewer")));
        }
        Ok(Route { pad: Some(rows), ..self })
    }

    fn check_shape(&self) -> Result<()> {
        let (ranks, node, experts, topk) = (self.ranks, self.node, self.experts, self.topk);
        let bad = |field: &str, why: String| Err(Error::spec("route", field, why));
        if ranks == 0 || node == 0 || !ranks.is_multiple_of(node) {
            return bad("node", format!("{node} ranks a node do not divide {ranks} ranks; use a divisor"));
        }
        if experts == 0 || !experts.is_multiple_of(ranks) {
            let above = (experts / ranks + 1) * ranks;
            let why =
                format!("{experts} slots do not divide over {ranks} ranks; make them {above} by copies of experts");
            return bad("experts", why);
        }
        if topk == 0 || topk > experts {
            return bad("topk", format!("{topk} of {experts} slots; choose 1 to {experts}"));
        }
        Ok(())
    }

    pub fn nodes(&self) -> u32 {
        self.ranks / self.node
    }

    /// Slots of each rank.
    pub fn local_experts(&self) -> u32 {
        self.experts / self.ranks
    }

    /// The rank that holds a slot.
    pub fn rank_of(&self, expert: u32) -> u32 {
        expert / self.local_experts()
    }

    pub fn node_of(&self, rank: u32) -> u32 {
        rank / self.node
    }

    /// Whether the rows themselves are known, which an executor needs.
    pub fn is_listed(&self) -> bool {
        self.tables.is_some()
    }

    /// Tokens that a source holds.
    pub fn tokens(&self, src: u32) -> u64 {
        match &self.counts {
            Counts::Balanced { tokens } | Counts::Spread { tokens } | Counts::RoundRobin { tokens } => *tokens,
            Counts::Listed { tokens, .. } => tokens[src as usize],
        }
    }

    /// Share of the choices that lead nowhere: beyond what an expert takes, or masked. 0 where choices are not listed.
    pub fn dropped(&self) -> f64 {
        let Counts::Listed { choices, .. } = &self.counts else { return 0.0 };
        let dropped = choices.iter().filter(|slot| **slot == DROPPED).count();
        if dropped == 0 { 0.0 } else { dropped as f64 / choices.len() as f64 }
    }

    /// Most tokens of any source: what a buffer of fixed slots is made for.
    pub fn most_tokens(&self) -> u64 {
        (0..self.ranks).map(|src| self.tokens(src)).max().unwrap_or(0)
    }

    /// The slots that a source's tokens chose, [tokens x topk]; `None` where choices are not listed.
    pub fn choices(&self, src: u32) -> Option<&[u32]> {
        let Counts::Listed { tokens, choices } = &self.counts else { return None };
        let before: u64 = tokens[..src as usize].iter().sum();
        let [from, len] = [before, tokens[src as usize]].map(|t| t as usize * self.topk as usize);
        Some(&choices[from..from + len])
    }

    /// Rows of `src` for one slot.
    pub fn copies(&self, src: u32, expert: u32) -> Rows {
        if let Some(pad) = self.pad {
            return f64::from(pad);
        }
        match &self.tables {
            Some(t) => f64::from(t.to_expert[(src * self.experts + expert) as usize]),
            None => self.tokens(src) as f64 * f64::from(self.topk) / f64::from(self.experts),
        }
    }

    /// Rows of `src` for the slots of `dst`: a token once for each of its slots there.
    pub fn copies_to_rank(&self, src: u32, dst: u32) -> Rows {
        let local = self.local_experts();
        match &self.tables {
            None if self.pad.is_some() => f64::from(local) * self.copies(src, dst * local),
            Some(_) => (dst * local..(dst + 1) * local).map(|e| self.copies(src, e)).sum(),
            None => self.tokens(src) as f64 * f64::from(self.topk) / f64::from(self.ranks),
        }
    }

    /// Tokens of `src` that have a slot on `dst`.
    pub fn unique_to_rank(&self, src: u32, dst: u32) -> Rows {
        match &self.tables {
            Some(t) => f64::from(t.to_rank[(src * self.ranks + dst) as usize]),
            None => self.tokens(src) as f64 * self.reached[0] / f64::from(self.ranks),
        }
    }

    /// Tokens of `src` that have a slot anywhere on `node`.
    pub fn unique_to_node(&self, src: u32, node: u32) -> Rows {
        match &self.tables {
            Some(t) => f64::from(t.to_node[(src * self.nodes() + node) as usize]),
            None => self.tokens(src) as f64 * self.reached[1] / f64::from(self.nodes()),
        }
    }

    /// Rows that `dst` computes, of all sources: one for each token and slot.
    pub fn expanded_rows(&self, dst: u32) -> Rows {
        (0..self.ranks).map(|src| self.copies_to_rank(src, dst)).sum()
    }

    /// Rows that arrive at `dst` where tokens go to a rank once, those of its own included.
    pub fn received_unique(&self, dst: u32) -> Rows {
        (0..self.ranks).map(|src| self.unique_to_rank(src, dst)).sum()
    }

    /// Rows of one slot, of all sources.
    pub fn rows_of_expert(&self, expert: u32) -> Rows {
        (0..self.ranks).map(|src| self.copies(src, expert)).sum()
    }

    /// Rows of all slots of `dst`, in slot order: the groups of its grouped matrix product.
    pub fn rows_by_local_expert(&self, dst: u32) -> Vec<Rows> {
        let local = self.local_experts();
        (dst * local..(dst + 1) * local).map(|e| self.rows_of_expert(e)).collect()
    }

    /// Tokens of `src` in ascending order that have a slot among `experts`, each once: the row list of a rank
    /// (`rank_slots`) or a node (`node_slots`). Empty where the route is balanced.
    pub fn row_list(&self, src: u32, experts: std::ops::Range<u32>) -> Vec<u32> {
        let Some(choices) = self.choices(src) else { return vec![] };
        let rows = choices.chunks(self.topk as usize).enumerate();
        rows.filter(|(_, row)| row.iter().any(|e| experts.contains(e))).map(|(t, _)| t as u32).collect()
    }

    pub fn rank_slots(&self, rank: u32) -> std::ops::Range<u32> {
        rank * self.local_experts()..(rank + 1) * self.local_experts()
    }

    pub fn node_slots(&self, node: u32) -> std::ops::Range<u32> {
        let slots = self.local_experts() * self.node;
        node * slots..(node + 1) * slots
    }
}

/// The routes of tokens among those of a plan. Behind that of slots with copies, or with shadows, stands one more, of
/// their gradients or weights.
pub fn of_tokens(routes: &[Route]) -> &[Route] {
    match routes {
        [tokens, _] if tokens.shadows > 0 || !tokens.holds.is_empty() => &routes[..1],
        all => all,
    }
}

/// Share of the choices of all tokens that lead nowhere, over these routes.
pub fn dropped(routes: &[Route]) -> f64 {
    let routes = of_tokens(routes);
    routes.iter().map(Route::dropped).sum::<f64>() / routes.len().max(1) as f64
}

/// The library that moves the rows, and the steps by which it does. `collective::exchange` has a file for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ExchangeAlgo {
    /// Sends and receives in one group: a copy for each token and slot, after the counts went round.
    Nccl,
    /// All rows to everyone, each takes what it needs; on combine a reduce-scatter of full-length sums.
    AllGather,
    /// As `AllGather` for few rows that are large: each goes round from its source, chunk by chunk, and its sum goes
    /// back (NCCL's broadcast and reduce).
    Broadcast,
    /// DeepEP V1, normal kernels: once to a node over the network, once to a rank over the scale-up links, summed
    /// within the node on the way back. Half of the `sms` send, half receive.
    DeepepNormal { sms: u16 },
    /// DeepEP V1, low latency: a message for each token and slot into buffers of `slots` tokens a source. With
    /// `hook` no SM is held between the send and the receive.
    DeepepLowLatency { hook: bool, slots: u32 },
    /// DeepEP V2: scale-out to the same place of a node, then scale-up. Without `sms` it takes as many as the library's
    /// own rule says for the GPU and the route: whoever knows the machine asks it.
    DeepepV2Hybrid {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sms: Option<u16>,
    },
    /// DeepEP V2 straight to every rank.
    DeepepV2Direct {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sms: Option<u16>,
    },
    /// NVIDIA's Hybrid-EP: as DeepEP V1, by TMA.
    HybridEp { sms: u16 },
    /// Two all-to-all: over the nodes to the same place, then within the node. No deduplication.
    Hierarchical,
}

/// How an exchange is ordered among the kernels that are issued before and behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It sets off when those before it are over.
    Behind,
    /// And those behind it begin when it is over: it leaves them next to no SM.
    Alone,
}

impl ExchangeAlgo {
    /// Its turn among kernels; `None` where it waits for its rows alone. DeepEP's low latency is launched on the stream of
    /// kernels with the hook, and without it on one that waits for all of theirs (csrc/deep_ep.cpp,
    /// `low_latency_dispatch`); its own has a block on nearly every SM, all of which have to be there at once (a cooperative
    /// launch, csrc/kernels/launch.cuh).
    pub fn turn(self) -> Option<Turn> {
        match self {
            ExchangeAlgo::DeepepLowLatency { hook: true, .. } => Some(Turn::Behind),
            ExchangeAlgo::DeepepLowLatency { hook: false, .. } => Some(Turn::Alone),
            _ => None,
        }
    }

    /// Whether a token that chose several slots of a rank goes there once.
    pub fn deduplicates(self) -> bool {
        !matches!(self, ExchangeAlgo::Nccl | ExchangeAlgo::DeepepLowLatency { .. } | ExchangeAlgo::Hierarchical)
    }
}

/// The direction of the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// To the experts; layout and counts come first.
    Dispatch,
    /// To the experts along a handle that an earlier dispatch left: neither layout nor counts. The backward of
    /// a combine.
    CachedDispatch,
    /// Back to the sources, summed there. The backward of a dispatch.
    Combine,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Phase::Dispatch => "dispatch",
            Phase::CachedDispatch => "cached_dispatch",
            Phase::Combine => "combine",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(topk: u32, tokens: Vec<u64>, choices: Vec<u32>) -> Result<Route> {
        Route::new([4, 2], 8, topk, Counts::Listed { tokens, choices })
    }

    /// Source 0 has two tokens, source 2 one; the others none.
    fn example() -> Route {
        listed(3, vec![2, 0, 1, 0], vec![0, 1, 7, 4, 2, DROPPED, 7, 6, 5]).unwrap()
    }

    #[test]
    fn sms_that_a_plan_leaves_open_are_not_written() {
        let open = ExchangeAlgo::DeepepV2Hybrid { sms: None };
        assert_eq!(serde_json::to_string(&open).unwrap(), r#"{"deepep_v2_hybrid":{}}"#);
        let said = r#"{"deepep_v2_hybrid":{"sms":12}}"#;
        assert_eq!(serde_json::from_str::<ExchangeAlgo>(said).unwrap(), ExchangeAlgo::DeepepV2Hybrid { sms: Some(12) });
    }

    #[test]
    fn the_three_counts() {
        let r = example();
        let to_rank = |f: &dyn Fn(u32) -> Rows| (0..4).map(f).collect::<Vec<_>>();
        assert_eq!(to_rank(&|d| r.copies_to_rank(0, d)), [2.0, 1.0, 1.0, 1.0]);
        assert_eq!(to_rank(&|d| r.unique_to_rank(0, d)), [1.0, 1.0, 1.0, 1.0]);
        assert_eq!([r.unique_to_node(0, 0), r.unique_to_node(0, 1)], [2.0, 2.0]);
        assert_eq!([r.unique_to_node(2, 0), r.unique_to_node(2, 1)], [0.0, 1.0]);
        assert_eq!(r.rows_by_local_expert(3), [1.0, 2.0]);
        assert_eq!((r.expanded_rows(3), r.received_unique(3)), (3.0, 2.0));
        assert_eq!((r.most_tokens(), r.dropped()), (2, 1.0 / 9.0));
        // Expected values are of no token in particular.
        assert_eq!(Route::new([4, 2], 8, 3, Counts::Balanced { tokens: 2 }).unwrap().dropped(), 0.0);
        assert_eq!(listed(1, vec![0; 4], vec![]).unwrap().dropped(), 0.0);
    }

    /// Choices that follow a rule, listed one by one, reach what the closed form says.
    fn reach_as_in_closed_form(topk: u32, of: impl Fn(u32, u32) -> u32, closed: impl Fn(u64) -> Counts) {
        let (experts, tokens) = (64, 64);
        for (ranks, node) in [(2, 1), (4, 2), (8, 4), (16, 4), (32, 8)] {
            let choices = (0..ranks).flat_map(|_| (0..tokens).flat_map(|t| (0..topk).map(move |j| (t, j))));
            let choices = choices.map(|(t, j)| of(t, j) % experts).collect();
            let listed = Counts::Listed { tokens: vec![u64::from(tokens); ranks as usize], choices };
            let listed = Route::new([ranks, node], experts, topk, listed).unwrap();
            let closed = Route::new([ranks, node], experts, topk, closed(u64::from(tokens))).unwrap();
            for dst in 0..ranks {
                assert_eq!(listed.unique_to_rank(1, dst), closed.unique_to_rank(1, dst), "{ranks} {dst}");
                assert_eq!(listed.copies_to_rank(1, dst), closed.copies_to_rank(1, dst), "{ranks} {dst}");
                assert_eq!(listed.unique_to_node(1, dst / node), closed.unique_to_node(1, dst / node), "{ranks} {dst}");
            }
        }
    }

    #[test]
    fn choices_that_are_spread_reach_as_many_ranks_as_there_are() {
        reach_as_in_closed_form(8, |t, j| t + j * 64 / 8, |tokens| Counts::Spread { tokens });
    }

    #[test]
    fn choices_in_a_row_reach_as_few_ranks_as_hold_them() {
        for topk in [1, 4, 6, 8, 22] {
            reach_as_in_closed_form(topk, |t, j| t * topk + j, |tokens| Counts::RoundRobin { tokens });
        }
    }

    #[test]
    fn row_lists_have_each_token_once() {
        let r = example();
        assert_eq!(r.row_list(0, r.rank_slots(0)), [0]);
        assert_eq!(r.row_list(0, r.node_slots(1)), [0, 1]);
        assert_eq!(r.choices(2).unwrap(), [7, 6, 5]);
        for (src, dst) in (0..4).flat_map(|s| (0..4).map(move |d| (s, d))) {
            let list = r.row_list(src, r.rank_slots(dst));
            assert_eq!(list.len() as f64, r.unique_to_rank(src, dst));
        }
    }

    #[test]
    fn a_route_is_a_file_and_its_tables_are_made_again() {
        let text = serde_json::to_string(&example()).unwrap();
        assert!(!text.contains("tables"), "{text}");
        assert_eq!(serde_json::from_str::<Route>(&text).unwrap(), example());
        let unknown = text.replacen("ranks", "rank", 1);
        assert!(serde_json::from_str::<Route>(&unknown).is_err());
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_place() {
        let why = |r: Result<Route>| r.unwrap_err().to_string();
        assert!(why(listed(2, vec![1, 0, 0, 0], vec![3, 3])).contains("source 0, token 0: slot 3 twice"));
        assert!(why(listed(1, vec![0, 1, 0, 0], vec![8])).contains("source 1, token 0: slot 8 of 8"));
        assert!(why(listed(1, vec![1, 1, 0, 0], vec![1])).contains("1 choices for 2 tokens"));
        assert!(why(listed(1, vec![1], vec![1])).contains("1 sources, 4 ranks"));
        assert!(why(listed(9, vec![0; 4], vec![])).contains("9 of 8 slots"));
        let balanced = |ranks, node, experts| Route::new([ranks, node], experts, 1, Counts::Balanced { tokens: 1 });
        assert!(why(balanced(4, 3, 8)).contains("do not divide 4 ranks"));
        assert!(why(balanced(4, 2, 6)).contains("make them 8 by copies"));
        assert!(why(balanced(0, 1, 6)).contains("divide"));
    }

    #[test]
    fn nothing_at_all_is_a_route() {
        let r = listed(8, vec![0; 4], vec![]).unwrap();
        assert_eq!((r.received_unique(1), r.expanded_rows(1), r.most_tokens()), (0.0, 0.0, 0));
        let all = listed(1, vec![3, 2, 1, 0], vec![5; 6]).unwrap();
        assert_eq!((all.rows_of_expert(5), all.received_unique(2), all.received_unique(0)), (6.0, 6.0, 0.0));
    }
}
