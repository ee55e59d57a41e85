//! How a user names a routing: `uniform`, `zipf:1.0`, `khot:32:0.9`, .. or the path of a trace.

use super::gate::{GroupLimit, GroupScore};
use super::{Placement, Trace, file, generate};
use crate::error::{Cause, Error, Result};
use crate::plan::route::{Counts, Route};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Where tokens go.
#[derive(Debug, Clone, PartialEq)]
pub enum Routing {
    /// As evenly as chance has it on average: expected values, of any scale, that cannot be executed.
    Balanced,
    /// As evenly, the choices of a token as far apart as they can be.
    Spread,
    /// As evenly, token after token the next experts in a row, as the gates of benchmarks do it: a token reaches as few ranks
    /// as it can.
    RoundRobin,
    /// Drawn with equal chance.
    Uniform,
    /// `hot` experts get the share of all.
    Khot { hot: u32, share: f64 },
    /// The n-th expert in proportion to n^-s.
    Zipf(f64),
    /// Weights from a symmetric Dirichlet distribution.
    Dirichlet(f64),
    /// Log-normal weights, as wide as it takes for the fullest rank to have so many times the mean.
    Lognormal(f64),
    /// The first rank gets exactly so many times the mean, all others the same.
    Ratio(f64),
    /// The experts of the first rank get the share.
    HotRank(f64),
    /// One expert of every rank gets its part of the share.
    SpreadHot(f64),
    /// Sources have from none to twice the tokens.
    Ragged,
    /// Nobody chooses an expert of the last rank.
    ZeroRank,
    /// As `HotRank`, of another rank each step.
    Rotating(f64),
    /// As `HotRank` every eighth step, else uniform.
    Burst(f64),
    /// A router's log, CSV or JSON lines.
    File(PathBuf),
}

/// The words, for help and error messages.
pub const GRAMMAR: &str = "balanced, spread, round-robin, uniform, khot:N:SHARE, zipf:S, dirichlet:A, lognormal:RATIO, \
     ratio:RATIO, hot-rank:SHARE, spread-hot:SHARE, ragged, zero-rank, rotating:SHARE, burst:SHARE, w0 to w7, or a \
     file of traces/routing (.csv, .jsonl)";

impl Routing {
    /// Whether a token may find fewer experts than it chooses: a log has what it has, and where the hot ones get all, they may be
    /// too few.
    pub fn may_leave_gaps(&self) -> bool {
        match self {
            Routing::File(_) => true,
            Routing::Khot { share, .. }
            | Routing::HotRank(share)
            | Routing::SpreadHot(share)
            | Routing::Rotating(share)
            | Routing::Burst(share) => *share >= 1.0,
            _ => false,
        }
    }

    /// Where every source has so many tokens, whose choices follow a rule: the closed form.
    pub fn by_rule(&self, tokens: u64) -> Option<Counts> {
        match self {
            Routing::Spread => Some(Counts::Spread { tokens }),
            Routing::RoundRobin => Some(Counts::RoundRobin { tokens }),
            _ => None,
        }
    }
}

/// The words that [`FromStr`] reads.
impl fmt::Display for Routing {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Routing::Balanced => write!(f, "balanced"),
            Routing::Spread => write!(f, "spread"),
            Routing::RoundRobin => write!(f, "round-robin"),
            Routing::Uniform => write!(f, "uniform"),
            Routing::Khot { hot, share } => write!(f, "khot:{hot}:{share}"),
            Routing::Zipf(s) => write!(f, "zipf:{s}"),
            Routing::Dirichlet(a) => write!(f, "dirichlet:{a}"),
            Routing::Lognormal(ratio) => write!(f, "lognormal:{ratio}"),
            Routing::Ratio(ratio) => write!(f, "ratio:{ratio}"),
            Routing::HotRank(share) => write!(f, "hot-rank:{share}"),
            Routing::SpreadHot(share) => write!(f, "spread-hot:{share}"),
            Routing::Ragged => write!(f, "ragged"),
            Routing::ZeroRank => write!(f, "zero-rank"),
            Routing::Rotating(share) => write!(f, "rotating:{share}"),
            Routing::Burst(share) => write!(f, "burst:{share}"),
            Routing::File(path) => write!(f, "{}", path.display()),
        }
    }
}

impl FromStr for Routing {
    type Err = Error;

    fn from_str(text: &str) -> Result<Routing> {
        let mut parts = text.split(':');
        let word = parts.next().unwrap_or("");
        let numbers: Vec<&str> = parts.collect();
        let bad = |why: String| Error::spec("--routing", text, why);
        let number = |at: usize, default: Option<f64>| match (numbers.get(at), default) {
            (Some(n), _) => n
                .parse::<f64>()
                .ok()
                .filter(|x| x.is_finite() && *x >= 0.0)
                .ok_or_else(|| bad(format!("{n:?} is no number of 0 or more; known: {GRAMMAR}"))),
            (None, Some(default)) => Ok(default),
            (None, None) => Err(bad(format!("lacks a number; known: {GRAMMAR}"))),
        };
        let share = |at: usize, default: f64| {
            let x = number(at, Some(default))?;
            if x <= 1.0 { Ok(x) } else { Err(bad(format!("{x} is no share from 0 to 1"))) }
        };
        let ratio = |at: usize| {
            let x = number(at, None)?;
            if x >= 1.0 { Ok(x) } else { Err(bad(format!("{x} is below 1, where all are alike"))) }
        };
        let positive = |at: usize| {
            let x = number(at, None)?;
            if x > 0.0 { Ok(x) } else { Err(bad("0 has no such distribution; use more".into())) }
        };
        let whole = |at: usize| {
            let x = number(at, None)?;
            let fits = x >= 1.0 && x.fract() == 0.0 && x <= f64::from(u32::MAX);
            if fits { Ok(x as u32) } else { Err(bad(format!("{x} is no number of experts; use 1 or more"))) }
        };
        Ok(match word {
            "balanced" => Routing::Balanced,
            "spread" => Routing::Spread,
            "round-robin" => Routing::RoundRobin,
            "uniform" | "w0" => Routing::Uniform,
            "khot" => Routing::Khot { hot: whole(0)?, share: share(1, 0.9)? },
            "w1" => Routing::Khot { hot: 8, share: share(0, 0.5)? },
            "zipf" => Routing::Zipf(number(0, None)?),
            "dirichlet" => Routing::Dirichlet(positive(0)?),
            "lognormal" => Routing::Lognormal(ratio(0)?),
            "ratio" => Routing::Ratio(ratio(0)?),
            "hot-rank" | "w2" => Routing::HotRank(share(0, 0.5)?),
            "spread-hot" | "w3" => Routing::SpreadHot(share(0, 0.5)?),
            "ragged" | "w4" => Routing::Ragged,
            "zero-rank" | "w5" => Routing::ZeroRank,
            "rotating" | "w6" => Routing::Rotating(share(0, 0.5)?),
            "burst" | "w7" => Routing::Burst(share(0, 0.9)?),
            _ if text.contains('/') || text.ends_with(".csv") || text.ends_with(".jsonl") => Routing::File(text.into()),
            _ => return Err(bad(format!("is no routing; known: {GRAMMAR}"))),
        })
    }
}

/// Choices that are drawn at most: they are held twice, four bytes each, and drawn in ten seconds or so.
const MOST_CHOICES: u64 = 1 << 28;
/// Experts of all tokens: where few get nearly all, or groups limit the choice, every one is looked at for every token.
const MOST_SCORES: u64 = 1 << 33;
/// Slots that the rows of every rank are counted for.
const MOST_COUNTS: u64 = 1 << 28;

/// All that decides a route.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub routing: Routing,
    /// Of the expert-parallel group, and of a node.
    pub ranks: u32,
    pub node: u32,
    /// Logical.
    pub experts: u32,
    pub topk: u32,
    /// Of one source.
    pub tokens: u64,
    /// Slots beyond one an expert, which EPLB gives out by the loads of this very trace.
    pub replicas: u32,
    /// Nodes that a token reaches at most.
    pub node_limit: Option<u32>,
    /// Equal groups of experts that the router has, and how many of them a token's choices stand in.
    pub groups: Option<GroupLimit>,
    pub seed: u64,
    pub step: u64,
}

impl Request {
    fn nodes(&self) -> u32 {
        self.ranks.div_ceil(self.node.max(1))
    }

    /// The router's groups, or the limit on nodes as such, a group a node; none where it binds nothing.
    pub fn group_limit(&self) -> Result<Option<GroupLimit>> {
        if let Some(limit) = self.groups.filter(|limit| limit.limit < limit.groups) {
            limit.check(self.experts, self.topk)?;
            return Ok(Some(limit));
        }
        let Some(limit) = self.node_limit.filter(|limit| *limit < self.nodes()) else { return Ok(None) };
        let limit = GroupLimit { groups: self.nodes(), limit, score: GroupScore::Best };
        limit.check(self.experts, self.topk)?;
        Ok(Some(limit))
    }

    /// What was chosen, or is to a number, leaves a limit on nodes nothing to choose.
    fn check_node_limit(&self) -> Result<()> {
        let chosen = &self.routing;
        if !matches!(chosen, Routing::File(_) | Routing::Spread | Routing::RoundRobin | Routing::Ratio(_)) {
            return Ok(());
        }
        match self.node_limit.filter(|limit| *limit < self.nodes()) {
            None => Ok(()),
            Some(limit) => {
                let why = format!(
                    "{limit} of {} nodes, which the choices of --routing {chosen} know nothing of; leave it out, or use \
                     --routing balanced, uniform, zipf:1.0 or another that is drawn",
                    self.nodes()
                );
                Err(Error::spec("routing", "node-limit", why))
            }
        }
    }

    /// Errors: a trace that is too long to be drawn, or too wide to be counted.
    fn check_size(&self) -> Result<()> {
        let (ranks, slots) = (u64::from(self.ranks), u64::from(self.experts) + u64::from(self.replicas));
        let too_many = |what: String, most: u64, remedy: &str| {
            let why = format!("{what} are more than the {most} that are followed; {remedy}");
            Err(Cause::Routing.infeasible(why))
        };
        let counts = slots.saturating_mul(ranks);
        if counts > MOST_COUNTS {
            let what = format!("{counts} counts of rows, {ranks} ranks by {slots} slots,");
            return too_many(what, MOST_COUNTS, "use fewer experts or ranks, or --routing balanced");
        }
        if matches!(self.routing, Routing::File(_)) {
            return Ok(());
        }
        let (tokens, remedy) = (self.tokens.saturating_mul(ranks), "use fewer tokens, or --routing balanced");
        let choices = tokens.saturating_mul(self.topk.into());
        if choices > MOST_CHOICES {
            return too_many(format!("{choices} choices of {tokens} tokens"), MOST_CHOICES, remedy);
        }
        let scores = tokens.saturating_mul(self.experts.into());
        if scores > MOST_SCORES {
            return too_many(format!("{scores} experts of {tokens} tokens"), MOST_SCORES, remedy);
        }
        Ok(())
    }

    /// What the router chose, by logical experts.
    pub fn trace(&self) -> Result<Trace> {
        if self.topk == 0 || self.topk > self.experts {
            let why = format!("{} of {} experts; choose 1 to {}", self.topk, self.experts, self.experts);
            return Err(Error::spec("routing", "topk", why));
        }
        if self.ranks == 0 {
            return Err(Error::spec("routing", "ranks", "0; at least 1 is needed"));
        }
        self.check_node_limit()?;
        self.check_size()?;
        match &self.routing {
            Routing::File(path) => {
                let trace = file::read(path, self.experts)?;
                let ranks = self.ranks;
                Ok(if trace.tokens.len() == ranks as usize { trace } else { trace.spread(ranks) })
            }
            _ => generate::trace(self),
        }
    }

    /// The slots that the choices go to.
    pub fn route(&self) -> Result<Route> {
        let Some(slots) = self.experts.checked_add(self.replicas) else {
            let why = format!("{} beside {} experts; use fewer", self.replicas, self.experts);
            return Err(Error::spec("routing", "replicas", why));
        };
        if self.routing == Routing::Balanced && self.group_limit()?.is_none() {
            return Route::new([self.ranks, self.node], slots, self.topk, Counts::Balanced { tokens: self.tokens });
        }
        if let Some(counts) =
            self.routing.by_rule(self.tokens).filter(|_| self.replicas == 0 && self.node_limit.is_none())
        {
            return Route::new([self.ranks, self.node], slots, self.topk, counts);
        }
        if self.replicas == 0 && !self.experts.is_multiple_of(self.ranks) {
            // Says so before anything is drawn.
            Placement::contiguous(self.experts, self.ranks)?;
        }
        let trace = self.trace()?;
        let placement = match self.replicas {
            0 => Placement::contiguous(self.experts, self.ranks)?,
            n => {
                // Experts of a node's group stay there where tokens are limited to groups.
                let groups = if self.node_limit.is_some() { self.nodes() } else { 1 };
                Placement::balanced(&trace.loads(), n, groups, groups, self.ranks)?
            }
        };
        trace.route(&placement, self.node)
    }
}
