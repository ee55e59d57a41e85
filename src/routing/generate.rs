//! Traces drawn from a seed: the same request gives the same trace, whatever was drawn before.

use super::gate::{GroupLimit, choose};
use super::sample::Sampler;
use super::words::{Request, Routing};
use super::{Trace, imbalance};
use crate::error::{Error, Result};
use crate::plan::route::{Counts, DROPPED, Route};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub fn trace(request: &Request) -> Result<Trace> {
    let mut rng = ChaCha8Rng::seed_from_u64(request.seed ^ request.step.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let tokens = tokens(request);
    let all = tokens.iter().sum::<u64>() as usize;
    let limit = request.group_limit()?;
    let mut trace = Trace {
        experts: request.experts,
        topk: request.topk,
        choices: vec![DROPPED; all * request.topk as usize],
        tokens,
        weights: vec![],
    };
    let (experts, topk) = (request.experts as usize, request.topk as usize);
    let by_rule = |of: fn(usize, usize, [usize; 2]) -> usize| {
        let choices = (0..all * topk).map(|at| (of(at / topk, at % topk, [experts, topk]) % experts) as u32);
        Ok(Trace { choices: choices.collect(), ..trace.clone() })
    };
    match request.routing {
        Routing::Spread => return by_rule(|token, choice, [experts, topk]| token + choice * experts / topk),
        Routing::RoundRobin => return by_rule(|token, choice, [_, topk]| token * topk + choice),
        _ => {}
    }
    if let Routing::Ratio(ratio) = request.routing {
        exact(request, ratio, &mut trace.choices, &mut rng)?;
        return Ok(trace);
    }
    // The weights belong to the seed alone, so that steps differ by their tokens.
    let sampler = sampler(request, &mut ChaCha8Rng::seed_from_u64(request.seed))?;
    fill(&sampler, limit, request.topk, &mut trace.choices, &mut rng);
    Ok(trace)
}

/// Tokens of each source.
fn tokens(request: &Request) -> Vec<u64> {
    let (ranks, mean) = (u64::from(request.ranks), request.tokens);
    match request.routing {
        Routing::Ragged if ranks > 1 => (0..ranks).map(|r| 2 * mean * r / (ranks - 1)).collect(),
        _ => vec![mean; ranks as usize],
    }
}

fn fill(sampler: &Sampler, limit: Option<GroupLimit>, topk: u32, choices: &mut [u32], rng: &mut ChaCha8Rng) {
    for row in choices.chunks_mut(topk as usize) {
        match limit {
            None => sampler.draw(rng, row),
            Some(_) => row.copy_from_slice(&choose(&sampler.keys(rng), &[], topk as usize, limit).0),
        }
    }
}

/// Draws experts by how much each is wanted. What differs by powers goes by logarithms: as such no weight is too small for a number.
fn sampler(request: &Request, rng: &mut ChaCha8Rng) -> Result<Sampler> {
    let n = request.experts as usize;
    let logs: Vec<f64> = match request.routing {
        Routing::Zipf(s) => shuffled((1..=n).map(|rank| -s * (rank as f64).ln()).collect(), rng),
        // Below that logarithms are beyond all numbers, and shares have long been those of the limit: one has all, then the next.
        Routing::Dirichlet(a) => (0..n).map(|_| ln_gamma(a.max(1e-300), rng)).collect(),
        _ => return Ok(Sampler::new(weights(request, rng)?)),
    };
    // A power that is beyond all numbers leaves the least one.
    Ok(Sampler::of_logs(logs.into_iter().map(|log| log.max(f64::MIN)).collect()))
}

/// How much each expert is wanted.
fn weights(request: &Request, rng: &mut ChaCha8Rng) -> Result<Vec<f64>> {
    let (experts, local) = (request.experts, request.experts / request.ranks.max(1));
    let n = experts as usize;
    let of_rank = |rank: u32| (rank * local..(rank + 1) * local).collect::<Vec<u32>>();
    Ok(match request.routing {
        Routing::Khot { hot, .. } if hot > experts => {
            let why = format!("{hot} hot experts of {experts}; use {experts} or fewer");
            return Err(Error::spec("--routing", "khot", why));
        }
        Routing::Khot { hot, share } => {
            let hot = rand::seq::index::sample(rng, n, hot as usize).iter().map(|e| e as u32).collect();
            hot_weights(experts, hot, share)
        }
        Routing::Lognormal(target) => lognormal(request, target, rng)?,
        Routing::HotRank(share) => hot_weights(experts, of_rank(0), share),
        Routing::SpreadHot(share) => hot_weights(experts, (0..request.ranks).map(|rank| rank * local).collect(), share),
        Routing::ZeroRank => {
            let mut weights = vec![1.0; n];
            if request.ranks > 1 {
                of_rank(request.ranks - 1).iter().for_each(|e| weights[*e as usize] = 0.0);
            }
            weights
        }
        Routing::Rotating(share) => {
            hot_weights(experts, of_rank((request.step % u64::from(request.ranks)) as u32), share)
        }
        Routing::Burst(share) if request.step.is_multiple_of(8) => hot_weights(experts, of_rank(0), share),
        _ => vec![1.0; n],
    })
}

/// `share` among the hot, the rest among the others.
fn hot_weights(experts: u32, hot: Vec<u32>, share: f64) -> Vec<f64> {
    let others = f64::from(experts) - hot.len() as f64;
    let cold = if others > 0.0 { (1.0 - share) / others } else { 0.0 };
    let mut weights = vec![cold; experts as usize];
    hot.iter().for_each(|e| weights[*e as usize] = share / hot.len() as f64);
    weights
}

fn shuffled(mut weights: Vec<f64>, rng: &mut ChaCha8Rng) -> Vec<f64> {
    weights.shuffle(rng);
    weights
}

/// A standard normal (Box and Muller).
fn normal(rng: &mut ChaCha8Rng) -> f64 {
    let (u, v): (f64, f64) = (rng.random(), rng.random());
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// The logarithm of a gamma variate of shape `a` (Marsaglia and Tsang).
fn ln_gamma(a: f64, rng: &mut ChaCha8Rng) -> f64 {
    if a < 1.0 {
        let u: f64 = rng.random();
        return ln_gamma(a + 1.0, rng) + u.ln() / a;
    }
    let d = a - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = normal(rng);
        let v = (1.0 + c * x).powi(3);
        let u: f64 = rng.random();
        if v > 0.0 && u.ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return (d * v).ln();
        }
    }
}

/// Tokens that an imbalance is measured on while it is looked for.
const TRIAL: u64 = 4096;

/// exp(sigma z) with the sigma at which the fullest rank has `target` times the mean.
fn lognormal(request: &Request, target: f64, rng: &mut ChaCha8Rng) -> Result<Vec<f64>> {
    let z: Vec<f64> = (0..request.experts).map(|_| normal(rng)).collect();
    let weights = |sigma: f64| z.iter().map(|z| (sigma * z).exp()).collect::<Vec<f64>>();
    let reached = |sigma: f64| {
        let mut choices = vec![DROPPED; TRIAL as usize * request.topk as usize];
        let mut rng = ChaCha8Rng::seed_from_u64(request.seed.wrapping_add(1));
        fill(&Sampler::new(weights(sigma)), None, request.topk, &mut choices, &mut rng);
        let counts = Counts::Listed { tokens: [vec![TRIAL], vec![0; request.ranks as usize - 1]].concat(), choices };
        let route = Route::new([request.ranks, request.ranks], request.experts, request.topk, counts)?;
        let rows: Vec<f64> = (0..request.ranks).map(|r| route.expanded_rows(r)).collect();
        Ok::<f64, Error>(imbalance(&rows))
    };
    let (mut low, mut high) = (0.0, 8.0);
    if reached(high)? < target {
        let why = format!("the fullest of {} ranks never has {target} times the mean", request.ranks);
        return Err(Error::spec("--routing", "lognormal", why));
    }
    for _ in 0..20 {
        let middle = (low + high) / 2.0;
        *(if reached(middle)? < target { &mut low } else { &mut high }) = middle;
    }
    Ok(weights(high))
}

/// Every expert of the first rank exactly `ratio` times the mean, all others the same: quotas laid end to end over
/// the choices of all tokens, the j-th of token t at t + j n. No quota is longer than n, so that no token meets one
/// twice.
fn exact(request: &Request, ratio: f64, choices: &mut [u32], rng: &mut ChaCha8Rng) -> Result<()> {
    let (experts, local) = (request.experts as usize, (request.experts / request.ranks) as usize);
    let (all, topk) = (choices.len(), request.topk as usize);
    let n = all / topk;
    let hot = (all as f64 / experts as f64 * ratio * local as f64).round() as usize;
    if hot > n * local.min(topk) || hot > all || (request.ranks == 1 && ratio > 1.0) {
        let most = (n * local.min(topk)) as f64 * f64::from(request.ranks) / all.max(1) as f64;
        let why = format!("{ratio} times the mean is more than tokens have choices; at most {most:.2}");
        return Err(Error::spec("--routing", "ratio", why));
    }
    // Where the quota of an expert ends; by position, so that rounding never adds up.
    let end = |e: usize| match e < local {
        true => hot * (e + 1) / local,
        false => hot + (all - hot) * (e + 1 - local) / (experts - local),
    };
    let mut order: Vec<usize> = (0..n).collect();
    order.shuffle(rng);
    let mut expert = 0;
    for at in 0..all {
        while end(expert) <= at {
            expert += 1;
        }
        choices[order[at % n] * topk + at / n] = expert as u32;
    }
    Ok(())
}
