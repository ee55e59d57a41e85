//! Where a router sends tokens: traces from files, seeded generators, capacity, placement of experts and replicas.
//!
//! A [`Trace`] names logical experts, as a router does. A [`Placement`] says which physical slots of which ranks hold
//! them. The two make a [`Route`], which is all that plans, predictors and executors see.

pub mod bias;
pub mod capacity;
pub mod eplb;
pub mod file;
pub mod gate;
pub mod generate;
pub mod placement;
pub mod sample;
pub mod shadow;
mod words;

pub use placement::Placement;
pub use words::{Request, Routing};

use crate::error::{Error, Result};
use crate::plan::route::{Counts, DROPPED, Route};

/// What a router chose.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// Logical experts.
    pub experts: u32,
    pub topk: u32,
    /// By source.
    pub tokens: Vec<u64>,
    /// [tokens x topk] experts, source after source; [`DROPPED`] where there is none.
    pub choices: Vec<u32>,
    /// [tokens x topk] weights of the same; empty where all are 1 / topk.
    pub weights: Vec<f32>,
}

impl Trace {
    /// How often each expert was chosen, by all sources.
    pub fn loads(&self) -> Vec<u64> {
        let mut loads = vec![0; self.experts as usize];
        self.choices.iter().filter(|e| **e != DROPPED).for_each(|e| loads[*e as usize] += 1);
        loads
    }

    /// The same tokens, dealt to so many sources in near-equal runs.
    pub fn spread(mut self, sources: u32) -> Trace {
        let all: u64 = self.tokens.iter().sum();
        let at = |i: u64| all * i / u64::from(sources);
        self.tokens = (0..u64::from(sources)).map(|i| at(i + 1) - at(i)).collect();
        self
    }

    /// That ranks have more tokens than the trace, which [`Trace::repeated`] then repeats.
    pub fn shorter_than(&self, tokens: u64, ranks: u32) -> Option<String> {
        let (all, sources) = (self.tokens.iter().sum::<u64>(), self.tokens.len());
        if sources != ranks as usize {
            let said = format!("the log has {all} tokens of {sources} sources, {ranks} ranks {tokens} each");
            let short = all < tokens * u64::from(ranks);
            return short.then(|| said + ": it is dealt out to them in order, and repeated");
        }
        let fewest = self.tokens.iter().copied().min().filter(|fewest| *fewest < tokens)?;
        let tokens_of = if fewest == 1 { "token" } else { "tokens" };
        Some(format!("the log has {fewest} {tokens_of} of a source, a rank {tokens}: it is repeated"))
    }

    /// The same with so many tokens of each of `ranks` sources: those of its own again and again, or where there are other
    /// sources those of all of them, dealt out in order. Why not, where a source has none or too many.
    pub fn repeated(&self, tokens: u64, ranks: u32) -> std::result::Result<Trace, String> {
        let same = self.tokens.len() == ranks as usize;
        let (own, wanted) = match same {
            true => (self.tokens.clone(), vec![tokens; ranks as usize]),
            false => (vec![self.tokens.iter().sum()], vec![tokens * u64::from(ranks)]),
        };
        let (mut rest, mut rows) = (0u64, vec![]);
        for (source, (&has, &wants)) in own.iter().zip(&wanted).enumerate() {
            if has == 0 || has > wants {
                let whose = if same { format!("source {source}") } else { "all sources".into() };
                let remedy = match has {
                    0 => "log some of every source",
                    _ => "log fewer, or use a longer sequence or a larger microbatch",
                };
                return Err(format!("{has} tokens of {whose}, whose ranks have {wants}; {remedy}"));
            }
            rows.extend((0..wants).map(|token| (rest + token % has) as usize));
            rest += has;
        }
        let topk = self.topk as usize;
        let choices = rows.iter().flat_map(|row| &self.choices[row * topk..(row + 1) * topk]).copied().collect();
        let weights = match self.weights.is_empty() {
            true => vec![],
            false => rows.iter().flat_map(|row| &self.weights[row * topk..(row + 1) * topk]).copied().collect(),
        };
        Ok(Trace { tokens: vec![tokens; ranks as usize], choices, weights, ..*self })
    }

    /// The slots that the choices go to, `node` ranks a node. Replicas of an expert take turns, by source and
    /// choice, so that each gets the same share.
    pub fn route(&self, placement: &Placement, node: u32) -> Result<Route> {
        if self.tokens.len() != placement.ranks as usize {
            let why = format!("{} sources for {} ranks; spread the trace", self.tokens.len(), placement.ranks);
            return Err(Error::spec("routing", "tokens", why));
        }
        let slots = placement.slots_of(self.experts)?;
        let choices = if slots.iter().all(|own| own.len() == 1) {
            let only: Vec<u32> = slots.iter().map(|own| own[0]).collect();
            self.choices.iter().map(|e| only.get(*e as usize).copied().unwrap_or(DROPPED)).collect()
        } else {
            // Replicas take turns.
            let mut turn = vec![0usize; self.experts as usize];
            let mut slot = |e: &u32| {
                let Some(own) = slots.get(*e as usize) else { return DROPPED };
                let at = &mut turn[*e as usize];
                let slot = own[*at];
                *at = if *at + 1 == own.len() { 0 } else { *at + 1 };
                slot
            };
            self.choices.iter().map(&mut slot).collect()
        };
        let counts = Counts::Listed { tokens: self.tokens.clone(), choices };
        Route::new([placement.ranks, node], placement.experts(), self.topk, counts)
    }
}

/// Most over mean; 1 where nothing is anywhere.
pub fn imbalance(loads: &[f64]) -> f64 {
    let mean = loads.iter().sum::<f64>() / loads.len().max(1) as f64;
    if mean > 0.0 { loads.iter().copied().fold(0.0, f64::max) / mean } else { 1.0 }
}

#[cfg(test)]
mod tests;
