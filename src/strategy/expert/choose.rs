//! The ways of a step's tokens to experts: what a user asks for becomes the route of its layers.

use super::super::feasible;
use crate::error::{Cause, Error, Result};
use crate::plan::{Counts, Route};
use crate::routing;
use crate::routing::gate::{GroupLimit, choose};
use crate::routing::{Placement, Trace, capacity, file, shadow};
use crate::spec::{Capacity, LlmSpec, MoeSpec, Options, Parallelism, Workload};
use rand::seq::index::sample;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Tokens that one rank has between the products of a layer.
pub fn tokens(work: &Workload, par: &Parallelism) -> u64 {
    work.micro_batch * work.seq_len / (u64::from(par.ring) * u64::from(par.ulysses) * u64::from(par.tp))
}

/// The rule by which tokens choose their experts.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Routing {
    /// Every expert equally popular, in closed form.
    #[default]
    Balanced,
    /// Every expert equally popular, drawn by lot, token by token.
    Uniform { seed: u64 },
    /// Choices of a router's log, or of a generator of [`routing`].
    Traced { routing: routing::Routing, seed: u64 },
}

impl std::str::FromStr for Routing {
    type Err = Error;

    /// Reads the words of `--routing`; what is drawn is drawn from seed 1. Errors: words that [`routing`] does not
    /// know.
    fn from_str(text: &str) -> Result<Routing> {
        Ok(match text.parse()? {
            routing::Routing::Balanced => Routing::Balanced,
            routing::Routing::Uniform => Routing::Uniform { seed: 1 },
            routing => Routing::Traced { routing, seed: 1 },
        })
    }
}

impl Routing {
    /// The route of a step's layers; `None` for a model without experts. `node`: ranks of a group that share the fast links.
    /// Errors: options that do not fit the experts, a log that cannot be read.
    pub fn route(&self, model: &LlmSpec, work: &Workload, par: &Parallelism, node: u32) -> Result<Option<Route>> {
        let Some(moe) = model.moe else { return Ok(None) };
        feasible::check(model, work, par)?;
        let (tokens, ranks) = (tokens(work, par), par.ep);
        let node = node_of(ranks, node);
        let (groups, o) = (moe.groups, par.options);
        // A benchmark's rule for choices knows nothing of groups.
        if let Routing::Traced { routing, .. } = self
            && let Some(counts) = routing.by_rule(tokens)
            && (o.replicas, o.shadow, o.capacity) == (0, 0, Capacity::Unlimited)
            && (groups.is_none() || *routing == routing::Routing::RoundRobin)
        {
            return Route::new([ranks, node], moe.experts as u32, moe.top_k as u32, counts).map(Some);
        }
        let Some(mut trace) = self.trace([tokens, u64::from(ranks), u64::from(node)], &moe, &model.name)? else {
            if o.shadow > 0 {
                let why = "where rows are expected values no expert is hotter than another; use --routing zipf:1.0, \
                           or another that is drawn or read";
                return Err(Cause::Shadow.infeasible(why));
            }
            return even(tokens, [ranks, node], &moe, par).map(Some);
        };
        let room = capacity::limit(&mut trace, o.capacity);
        if o.shadow > 0 {
            return shadow::route(&trace, &shadow::hottest(&trace, o.shadow), [ranks, node]).map(Some);
        }
        let placement = match o.replicas {
            0 => Placement::contiguous(moe.experts as u32, ranks)?,
            // Groups stay whole on a node where they can, so that a token goes to no more nodes than before.
            n => {
                let count = groups.map_or(1, |groups| groups.count as u32);
                Placement::balanced(&trace.loads(), n, count, ranks.div_ceil(node), ranks)?.shared_first()
            }
        };
        let route = trace.route(&placement, node)?;
        let route = match (o.replicas, groups) {
            (0, None) => route,
            (0, Some(groups)) => route.limited(groups)?,
            _ => route.holding(placement.of_slot)?,
        };
        padded(route, room).map(Some)
    }

    /// A note that a log is shorter than the tokens of its ranks, and how it is repeated; `None` if it is long enough.
    pub fn repeats(&self, model: &LlmSpec, work: &Workload, par: &Parallelism) -> Option<String> {
        let Routing::Traced { routing: routing::Routing::File(path), .. } = self else { return None };
        file::read(path, model.moe?.experts as u32).ok()?.shorter_than(tokens(work, par), par.ep)
    }

    /// The choices of the router, by experts; `None` where rows are expected values.
    fn trace(&self, [tokens, ranks, node]: [u64; 3], moe: &MoeSpec, model: &str) -> Result<Option<Trace>> {
        let (ranks, experts, topk) = (ranks as u32, moe.experts as u32, moe.top_k as u32);
        match self {
            Routing::Balanced => Ok(None),
            // Loads to a number leave no room for a router's own way to choose.
            Routing::Traced { routing: routing @ (routing::Routing::Spread | routing::Routing::Ratio(_)), .. }
                if moe.groups.is_some() =>
            {
                let why = format!(
                    "tokens of {model} choose among groups of experts, which {routing:?} knows nothing of; use \
                     balanced, uniform, zipf:1.0 or another that is drawn, or a file of what its router chose"
                );
                Err(Cause::Routing.infeasible(why))
            }
            Routing::Traced { routing: routing::Routing::File(path), .. } => {
                let refused = |why| Cause::Routing.infeasible(format!("{}: {why}", path.display()));
                file::read(path, experts)?.repeated(tokens, ranks).map_err(refused).map(Some)
            }
            Routing::Traced { routing, seed } => {
                let request = routing::Request {
                    routing: routing.clone(),
                    ranks,
                    node: node as u32,
                    experts,
                    topk,
                    tokens,
                    replicas: 0,
                    node_limit: None,
                    groups: moe.groups.map(GroupLimit::from),
                    seed: *seed,
                    step: 0,
                };
                request.trace().map(Some)
            }
            Routing::Uniform { seed } => {
                let mut rng = ChaCha8Rng::seed_from_u64(*seed);
                let mut choose = || one_by_lot(&mut rng, moe);
                let choices = (0..tokens * u64::from(ranks)).flat_map(|_| choose()).collect();
                Ok(Some(Trace { experts, topk, tokens: vec![tokens; ranks as usize], choices, weights: vec![] }))
            }
        }
    }
}

/// The route of expected values, for slots that are all chosen alike.
fn even(tokens: u64, [ranks, node]: [u32; 2], moe: &MoeSpec, par: &Parallelism) -> Result<Route> {
    let Options { replicas, capacity: most, .. } = par.options;
    let (experts, topk) = (moe.experts as u32, moe.top_k as u32);
    let share = tokens as f64 * f64::from(topk) / f64::from(experts);
    let hundredths = |n: u32| f64::from(n) / 100.0;
    let room = match most {
        Capacity::Unlimited => None,
        Capacity::Drop(n) => Some((capacity::capacity(tokens, topk, experts, hundredths(n)), false)),
        Capacity::Pad(n) => Some((capacity::capacity(tokens, topk, experts, hundredths(n)), true)),
        Capacity::Tutel(n) => Some((capacity::tutel(tokens, topk, experts, hundredths(n), 0), true)),
        Capacity::Dynamic(n) => {
            let fullest = share.ceil() as u64;
            Some((capacity::tutel(tokens, topk, experts, -n.map_or(0.0, hundredths), fullest), true))
        }
    };
    if let Some((room, _)) = room.filter(|(room, _)| (*room as f64) < share) {
        let why = format!("{room} tokens of {share:.1} for an expert of a rank, and balanced rows are no tokens");
        return Err(
            Cause::Capacity.infeasible(format!("{why} that could be dropped; use --routing uniform, or more room"))
        );
    }
    let route = Route::new([ranks, node], experts + replicas, topk, Counts::Balanced { tokens })?;
    let route = match (replicas, moe.groups) {
        (0, None) => route,
        (0, Some(groups)) => route.limited(groups)?,
        (n, None) => {
            let placement = Placement::balanced(&vec![1; experts as usize], n, 1, 1, ranks)?;
            route.holding(placement.shared_first().of_slot)?
        }
        (_, Some(_)) => {
            let why = "of experts in groups, where rows are expected values; use --routing uniform";
            return Err(Cause::Replicas.infeasible(why));
        }
    };
    padded(route, room.filter(|(_, pads)| *pads).map(|(room, _)| room))
}

/// The route with room for `room` rows in every slot, filled up with zeros; unchanged without `room`.
fn padded(route: Route, room: Option<u64>) -> Result<Route> {
    let Some(room) = room else { return Ok(route) };
    let rows = u32::try_from(room).map_err(|_| Cause::Capacity.infeasible(format!("{room} rows; use less")))?;
    route.padded(rows)
}

/// The experts of a token, drawn by lot: any, or those that a gate with groups finds best where scores are drawn.
fn one_by_lot(rng: &mut ChaCha8Rng, moe: &MoeSpec) -> Vec<u32> {
    let (experts, top_k) = (moe.experts as usize, moe.top_k as usize);
    let Some(groups) = moe.groups else { return sample(rng, experts, top_k).iter().map(|e| e as u32).collect() };
    let scores: Vec<f64> = (0..experts).map(|_| rng.random()).collect();
    choose(&scores, &[], top_k, Some(groups.into())).0
}

/// Ranks of a node among `ranks` consecutive ones: all, where they fit.
pub fn node_of(ranks: u32, node: u32) -> u32 {
    (1..=node.min(ranks).max(1)).rev().find(|n| ranks.is_multiple_of(*n)).unwrap_or(1)
}
