//! What would lower the memory of a configuration that does not fit: only what its options allow, what costs the GPUs
//! least first. What each saves is a rough count of what the row has of every kind, and no other plan is built for it.

use super::Row;
use crate::plan::About;
use crate::spec::{Dispatch, Dtype, LlmSpec, Parallelism, Recompute, Workload};
use crate::strategy::guard;

/// More are not read.
const MOST: usize = 4;
/// Of activations, what inputs of layers and one layer that is computed again do not take; and where inputs wait in the
/// host's memory.
const RECOMPUTED: f64 = 0.8;
const OFFLOADED: f64 = 0.9;
/// Widths of the network and of the residual stream that the workspace of a layer's backward pass has of a token: what is
/// left as the most of it where logits are few (Llama 2 7B and 3 8B at 64K to a million tokens).
const LAYER: [u64; 2] = [4, 8];
/// And what norms and activations leave: two and the width of the network, of what a layer of Llama 3 keeps.
const LITTLE_AGAIN: f64 = 0.3;

/// How many times a degree is tried.
const MULTIPLES: [u32; 6] = [2, 4, 8, 16, 32, 64];

/// One change, and the bytes that it saves.
struct Remedy {
    words: String,
    par: Parallelism,
    micro_batch: u64,
    saves: f64,
}

/// What is asked, and what there is to change it on.
pub(super) struct Asked<'a> {
    pub row: &'a Row,
    pub about: &'a About,
    pub model: &'a LlmSpec,
    /// GPUs of a node.
    pub node: u32,
    /// Bytes that a library of exchanges sets aside.
    pub aside: f64,
    /// It is known what copies to the host's memory take.
    pub has_host: bool,
}

/// In words: what saves `excess` bytes by itself, or what saves most, and whether that is enough; none where nothing is left
/// to change.
pub(super) fn remedies(asked: &Asked, excess: f64) -> Option<(String, bool)> {
    let mut all: Vec<Remedy> = asked.all(excess).into_iter().filter(|remedy| asked.allows(remedy)).collect();
    let words = |all: &[Remedy], last| joined(&all.iter().take(MOST).map(|r| &r.words[..]).collect::<Vec<_>>(), last);
    if all.iter().any(|remedy| remedy.saves >= excess) {
        all.retain(|remedy| remedy.saves >= excess);
        return Some((format!("{} should make it fit", words(&all, "or")), true));
    }
    all.retain(|remedy| remedy.saves > 0.0);
    all.sort_by(|a, b| b.saves.total_cmp(&a.saves));
    let alone = if all.len() > 1 { "none of them by enough alone" } else { "not by enough" };
    (!all.is_empty()).then(|| (format!("{} would lower it, {alone}", words(&all, "and")), false))
}

/// `a, b or c`.
fn joined(words: &[&str], last: &str) -> String {
    match words.split_last() {
        Some((end, rest)) if !rest.is_empty() => format!("{} {last} {end}", rest.join(", ")),
        _ => words.concat(),
    }
}

impl Asked<'_> {
    /// Every change that there is, what costs least time first.
    fn all(&self, excess: f64) -> Vec<Remedy> {
        let node = self.node;
        let mut all: Vec<Remedy> = self.sharding(excess).into_iter().chain(self.narrower()).collect();
        all.extend(self.fewer_at_a_time());
        all.extend(self.carried_by_nccl());
        all.extend(self.logits_in_pieces());
        all.extend(self.degree(excess, "ep", u32::MAX, |par, n| par.ep *= n));
        all.extend(
            self.degree(excess, "ulysses", node, |par, n| (par.ulysses, par.dp) = (par.ulysses * n, par.dp / n)),
        );
        all.extend(self.degree(excess, "tp", node, |par, n| (par.tp, par.dp) = (par.tp * n, par.dp / n)));
        all.extend(self.degree(excess, "ring", u32::MAX, |par, n| (par.ring, par.dp) = (par.ring * n, par.dp / n)));
        all.extend(self.little_again());
        all.extend(self.again());
        all.extend(self.degree(excess, "pp", u32::MAX, |par, n| (par.pp, par.dp) = (par.pp * n, par.dp / n)));
        all.extend(self.away(excess));
        all
    }

    fn allows(&self, remedy: &Remedy) -> bool {
        let about = self.about;
        let Some(dtype) = [Dtype::Bf16, Dtype::F32, Dtype::F64].into_iter().find(|d| d.name() == about.dtype) else {
            return false;
        };
        let work = Workload {
            seq_len: about.seq_len,
            global_batch: about.global_batch,
            micro_batch: remedy.micro_batch,
            dtype,
            documents: about.documents.clone(),
        };
        guard::before(self.model, &work, &remedy.par).is_ok()
    }

    fn remedy(&self, words: String, saves: f64, change: impl FnOnce(&mut Parallelism)) -> Remedy {
        let mut par = self.about.par;
        change(&mut par);
        Remedy { words, par, micro_batch: self.about.micro_batch, saves }
    }

    /// Bytes of weights, gradients, optimizer state, and of all that grows with the tokens.
    fn parts(&self) -> [f64; 4] {
        let row = self.row;
        let of = |bytes: Option<u64>| bytes.unwrap_or(0) as f64;
        let tokens = of(row.mem_activations_bytes) + of(row.mem_workspace_bytes);
        [of(row.mem_params_bytes), of(row.mem_grads_bytes), of(row.mem_optimizer_bytes), tokens]
    }

    /// The least ZeRO stage that saves enough, or the last one.
    fn sharding(&self, excess: f64) -> Option<Remedy> {
        let par = &self.about.par;
        let same = par.dp * par.ring * par.ulysses;
        let among = if par.options.shard > 0 { par.options.shard } else { same };
        let others = 1.0 - 1.0 / f64::from(among.max(1));
        let [params, grads, state, _] = self.parts();
        // What each stage shares out beside the one before.
        let saved = |zero: u32| {
            let first = if par.zero == 0 { state } else { 0.0 };
            let second = if par.zero < 2 && zero > 1 { grads } else { 0.0 };
            others * (first + second + if zero > 2 { params } else { 0.0 })
        };
        let stage = |zero: u32| self.remedy(format!("zero {zero}"), saved(zero), |par| par.zero = zero);
        let allowed: Vec<Remedy> =
            (par.zero + 1..=3).filter(|_| same > 1).map(stage).filter(|r| self.allows(r)).collect();
        let last = allowed.len().checked_sub(1)?;
        let at = allowed.iter().position(|remedy| remedy.saves >= excess).unwrap_or(last);
        allowed.into_iter().nth(at)
    }

    fn narrower(&self) -> Option<Remedy> {
        let [_, grads, ..] = self.parts();
        let there = self.about.par.options.bf16_grads;
        (!there).then(|| self.remedy("options bf16-grads".into(), grads / 2.0, |par| par.options.bf16_grads = true))
    }

    fn fewer_at_a_time(&self) -> Option<Remedy> {
        let (half, [.., tokens]) = (self.about.micro_batch / 2, self.parts());
        let same = self.remedy(format!("micro_batch {half}"), tokens / 2.0, |_| ());
        (half > 0).then_some(Remedy { micro_batch: half, ..same })
    }

    fn carried_by_nccl(&self) -> Option<Remedy> {
        let change = |par: &mut Parallelism| par.options.dispatch = Dispatch::Nccl;
        (self.aside > 0.0).then(|| self.remedy("dispatch nccl".into(), self.aside, change))
    }

    /// The least multiple of a degree that saves enough, or the least that can be.
    fn degree(&self, excess: f64, name: &str, most: u32, raise: impl Fn(&mut Parallelism, u32)) -> Option<Remedy> {
        let (par, now, shared) = (&self.about.par, self.degree_of(name), self.shared_by(name));
        // Experts are spread over the ranks that there are; every other degree takes ranks from dp, with none left over.
        let whole = |n: &u32| name == "ep" || par.dp.is_multiple_of(*n);
        let multiples = MULTIPLES.into_iter().filter(|n| now.saturating_mul(*n) <= most).filter(whole);
        let with = |n: u32| {
            let part = 1.0 - 1.0 / f64::from(n);
            self.remedy(format!("{name} {}", now.saturating_mul(n)), part * shared, |par| raise(par, n))
        };
        let mut least = None;
        for remedy in multiples.filter(|_| shared > 0.0).map(with).filter(|remedy| self.allows(remedy)) {
            if remedy.saves >= excess {
                return Some(remedy);
            }
            least.get_or_insert(remedy);
        }
        least
    }

    fn degree_of(&self, name: &str) -> u32 {
        let par = &self.about.par;
        match name {
            "ep" => par.ep,
            "ulysses" => par.ulysses,
            "tp" => par.tp,
            "ring" => par.ring,
            _ => par.pp,
        }
    }

    /// Bytes that a degree cuts.
    fn shared_by(&self, name: &str) -> f64 {
        let [params, grads, state, tokens] = self.parts();
        // Shared out already: fewer ranks have as much more of less.
        let held = params + if self.about.par.zero < 2 { grads } else { 0.0 };
        let held = held + if self.about.par.zero == 0 { state } else { 0.0 };
        let held = if self.about.par.zero == 3 { 0.0 } else { held };
        match name {
            "ep" => held * self.experts(),
            // Experts are whole on every rank of tensor parallelism.
            "tp" => held * (1.0 - self.experts()) + tokens,
            "pp" => held,
            _ => tokens,
        }
    }

    /// Share of a rank's weights that are experts'.
    fn experts(&self) -> f64 {
        let Some(moe) = self.model.moe else { return 0.0 };
        let all = self.model.chosen_flops_per_token() / 6.0 * moe.experts as f64 / moe.top_k.max(1) as f64;
        let rest = (self.model.params() as f64 - all).max(0.0) / f64::from(self.about.par.tp.max(1));
        let own = all / f64::from(self.about.par.ep.max(1));
        own / (own + rest)
    }

    /// Logits of an eighth of a microbatch at a time, where there is a workspace of all of them.
    fn logits_in_pieces(&self) -> Option<Remedy> {
        const PIECES: u32 = 8;
        let (about, par) = (self.about, &self.about.par);
        let tokens = about.micro_batch * about.seq_len / u64::from(par.ring * par.ulysses);
        let bytes = if about.dtype == Dtype::F32.name() { 4 } else { 2 };
        let logits = (tokens * self.model.vocab / u64::from(par.tp) * bytes) as f64;
        let workspace = self.row.mem_workspace_bytes.unwrap_or(0) as f64;
        let width = self.model.moe.map_or(self.model.ffn, |moe| moe.shared_ffn + moe.top_k * moe.ffn);
        let layer = (LAYER[0] * width + LAYER[1] * self.model.hidden) as f64 / self.model.vocab as f64 * logits;
        let saves = (1.0 - 1.0 / f64::from(PIECES)) * (logits - layer).max(0.0);
        let there = par.options.loss_chunks > 0 || logits > workspace || saves == 0.0;
        (!there).then(|| {
            self.remedy(format!("options loss-chunks-{PIECES}"), saves, |par| par.options.loss_chunks = PIECES)
        })
    }

    /// Norms and activations, which take no products to make again.
    fn little_again(&self) -> Option<Remedy> {
        let kept = self.row.mem_activations_bytes.unwrap_or(0) as f64;
        let options = self.about.par.options;
        let there = options.recompute_act && options.recompute_norm;
        let words = "options recompute-act+recompute-norm";
        (!there).then(|| {
            self.remedy(words.into(), LITTLE_AGAIN * kept, |par| {
                (par.options.recompute_act, par.options.recompute_norm) = (true, true);
            })
        })
    }

    fn again(&self) -> Option<Remedy> {
        let kept = self.row.mem_activations_bytes.unwrap_or(0) as f64;
        let open = self.about.par.recompute != Recompute::Full;
        let options = self.about.par.options;
        let words = [
            ("recompute-act", options.recompute_act),
            ("recompute-norm", options.recompute_norm),
            ("recompute-mla-up", options.recompute_mla_up),
        ];
        let said: Vec<&str> = words.into_iter().filter(|(_, said)| *said).map(|(word, _)| word).collect();
        let instead = if said.is_empty() { String::new() } else { format!(" in place of {}", said.join("+")) };
        open.then(|| {
            self.remedy(format!("recompute full{instead}"), RECOMPUTED * kept, |par| {
                par.recompute = Recompute::Full;
                let o = &mut par.options;
                (o.recompute_act, o.recompute_norm, o.recompute_mla_up) = (false, false, false);
            })
        })
    }

    /// Inputs of layers, and then what the optimizer keeps, in the host's memory.
    fn away(&self, excess: f64) -> Vec<Remedy> {
        let (options, [_, _, state, _]) = (self.about.par.options, self.parts());
        let kept = self.row.mem_activations_bytes.unwrap_or(0) as f64;
        let full = self.about.par.recompute == Recompute::Full;
        let words =
            if full { "options offload-activations" } else { "recompute full with options offload-activations" };
        // Both at once only where one is too little.
        let helps = full || (RECOMPUTED * kept < excess && OFFLOADED * kept >= excess);
        let inputs = (helps && !options.offload_activations).then(|| {
            self.remedy(words.into(), OFFLOADED * kept, |par| {
                (par.recompute, par.options.offload_activations) = (Recompute::Full, true);
            })
        });
        let state = (!options.offload_optimizer).then(|| {
            self.remedy("options offload-optimizer".into(), state, |par| par.options.offload_optimizer = true)
        });
        let all = inputs.into_iter().chain(state);
        if self.has_host { all.collect() } else { vec![] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Engine;
    use crate::strategy::{Engines, build};

    /// Eight ranks of the tiny model, of which the row has so many GiB of weights, gradients, state and activations.
    fn said(par: Parallelism, micro_batch: u64, gib: [u64; 4], excess: u64) -> Option<(String, bool)> {
        let model = LlmSpec { layers: 4, ..LlmSpec::find("tiny").unwrap() };
        let work =
            Workload { seq_len: 1024, global_batch: 8, micro_batch, dtype: Dtype::Bf16, documents: Default::default() };
        let engine = Engine::Sm { ctas: 1 };
        let plan = build(&model, &work, &par, Engines { collective: engine, p2p: engine }).unwrap();
        let [params, grads, state, activations] = gib.map(|n| Some(n << 30));
        let row = Row {
            mem_params_bytes: params,
            mem_grads_bytes: grads,
            mem_optimizer_bytes: state,
            mem_activations_bytes: activations,
            ..Row::default()
        };
        let asked = Asked { row: &row, about: &plan.about, model: &model, node: 8, aside: 0.0, has_host: true };
        remedies(&asked, (excess << 30) as f64)
    }

    #[test]
    fn what_is_enough_by_itself_is_named_the_least_costly_first() {
        let par = Parallelism { dp: 8, zero: 1, ..Parallelism::default() };
        let (words, enough) = said(par, 1, [16, 32, 12, 4], 12).unwrap();
        assert!(enough && words.starts_with("zero 2, options bf16-grads, tp 2 or "), "{words}");
        // Activations alone are too much: nothing that holds weights helps.
        let (words, enough) = said(par, 1, [1, 2, 1, 80], 60).unwrap();
        assert!(enough && words.starts_with("ulysses 4, tp 4, ring 4 or recompute full should"), "{words}");
        let (words, enough) = said(par, 1, [60, 60, 60, 60], 500).unwrap();
        assert!(!enough && words.ends_with("none of them by enough alone"), "{words}");
    }

    #[test]
    fn nothing_is_named_that_is_there_or_would_be_refused() {
        let full = Parallelism { dp: 1, recompute: Recompute::Full, ..Parallelism::default() };
        let (words, _) = said(full, 1, [1, 2, 4, 80], 60).unwrap();
        assert_eq!(words, "options offload-activations should make it fit");
        let options = "bf16-grads+offload-activations+offload-optimizer".parse().unwrap();
        assert_eq!(said(Parallelism { options, ..full }, 1, [1, 2, 4, 80], 60), None);
        // Inputs of layers are on a rank of their own in a pipeline, and stay there.
        let staged = Parallelism { pp: 2, dp: 4, zero: 3, ..full };
        let (words, _) = said(staged, 2, [1, 2, 4, 80], 30).unwrap();
        assert!(
            words.starts_with("micro_batch 1, ") && !words.contains("zero") && !words.contains("offload"),
            "{words}"
        );
    }
}
