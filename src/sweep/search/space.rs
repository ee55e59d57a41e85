//! The ways among which a search looks: every combination of what its lists have that comes out even.

use crate::error::{Error, Reason, Result};
use crate::spec::{
    Architecture, Dispatch, Fold, KvPath, LlmSpec, Options, Parallelism, Recompute, RingBackward, Schedule,
};
use crate::sweep::grid::cross;
use crate::sweep::{Case, Point};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// What may be chosen. A list with one value leaves no choice.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Space {
    pub tp: Vec<u32>,
    pub pp: Vec<u32>,
    /// Chunks of a stage where a pipeline is interleaved; other schedules have a number of their own.
    pub vp: Vec<u32>,
    pub ulysses: Vec<u32>,
    pub ring: Vec<u32>,
    pub ep: Vec<u32>,
    pub zero: Vec<u32>,
    pub micro_batch: Vec<u64>,
    pub recompute: Vec<Recompute>,
    pub schedules: Vec<Schedule>,
    pub dispatch: Vec<Dispatch>,
    /// Words that every way has, besides those that the search chooses.
    pub options: Vec<Options>,
    /// The sequence is not split into fewer tokens a rank.
    pub least_tokens: u64,
}

/// Fewer tokens of a sequence leave a rank's kernels too little to do.
const LEAST_TOKENS: u64 = 2048;
/// A microbatch of several sequences has no more tokens a rank.
const MOST_TOKENS: u64 = 16 << 10;
const MOST_STAGES: u32 = 64;
const MOST_EXPERT_RANKS: u64 = 64;
/// Ranks that share a product or a sequence.
const MOST_TENSOR: u64 = 8;
const MOST_SPLIT: u64 = 64;
const MICRO_BATCHES: [u64; 3] = [1, 2, 4];

fn powers_of_two(most: u64) -> Vec<u32> {
    (0..31).map(|log| 1 << log).take_while(|n| u64::from(*n) <= most.max(1)).collect()
}

/// Divisors of `n` without prime factors above 3, and those of `also` among them: 3, 6, 12 stages for 96 layers.
fn stages(among: RangeInclusive<u32>, gpus: u32, layers: u64) -> Vec<u32> {
    let smooth = |mut n: u32| {
        [2, 3].iter().for_each(|p| {
            while n.is_multiple_of(*p) {
                n /= p;
            }
        });
        n == 1
    };
    let fits = |n: &u32| gpus.is_multiple_of(*n) && u64::from(*n) <= layers;
    among.filter(fits).filter(|n| smooth(*n) || layers.is_multiple_of(u64::from(*n))).collect()
}

/// Combinations that cannot be built: how many, and why the first of them, by the kind of reason.
#[derive(Debug, Default)]
pub struct Refused(pub BTreeMap<String, (usize, Reason)>);

impl Refused {
    fn note(&mut self, why: Reason) {
        let kind = why.parts().0.to_string();
        self.0.entry(kind).or_insert((0, why)).0 += 1;
    }
}

impl Space {
    /// All that is usual for a model on a cluster, at lengths up to `seq_len`.
    pub fn usual(case: &Case, seq_len: u64) -> Space {
        let (model, cluster) = (&case.model, &case.cluster);
        let node = u64::from(cluster.spec.gpus_per_node.min(cluster.gpus()));
        let split = powers_of_two((seq_len / LEAST_TOKENS).min(u64::from(cluster.gpus())).min(MOST_SPLIT));
        // Keys of all heads are chosen once: nothing shares heads out.
        let by_heads = model.indexer.is_none();
        Space {
            tp: if by_heads { powers_of_two(node.min(MOST_TENSOR)) } else { vec![1] },
            pp: stages(1..=MOST_STAGES, cluster.gpus(), model.layers),
            vp: vec![2, 3, 4, 5, 6, 8, 10, 12],
            ulysses: if by_heads { split.clone() } else { vec![1] },
            ring: split,
            ep: experts(model),
            zero: vec![1, 3],
            micro_batch: MICRO_BATCHES.to_vec(),
            recompute: vec![Recompute::None, Recompute::Full],
            schedules: vec![Schedule::OneF1B, Schedule::Interleaved, Schedule::DualpipeV],
            dispatch: carriers(model, cluster.gpu.architecture),
            options: vec![Options::default()],
            least_tokens: LEAST_TOKENS,
        }
    }

    /// Every way of a length and batch that can be built, once, and how many cannot, by the kind of reason.
    pub fn points(&self, case: &Case, seq_len: u64, global_batch: u64) -> Result<(Vec<Point>, Refused)> {
        let (mut points, mut refused) = (vec![], Refused::default());
        let fewest = self.micro_batch.iter().copied().min().unwrap_or(1);
        for par in self.degrees(case, seq_len) {
            let tokens = seq_len / u64::from(par.ring) / u64::from(par.ulysses);
            for &micro_batch in self.micro_batch.iter().filter(|n| **n == fewest || **n * tokens <= MOST_TOKENS) {
                for par in self.choices(case, par) {
                    let point = Point { seq_len, global_batch, micro_batch, par };
                    match case.workload(&point) {
                        Ok(_) => points.push(point),
                        Err(Error::Infeasible(why)) => refused.note(why),
                        Err(other) => return Err(other),
                    }
                }
            }
        }
        points.sort_unstable();
        points.dedup();
        Ok((points, refused))
    }

    /// Degrees that come out even, with a schedule.
    fn degrees(&self, case: &Case, seq_len: u64) -> Vec<Parallelism> {
        let gpus = u64::from(case.cluster.gpus());
        let mut all = vec![];
        for (&ulysses, &ring) in cross(&self.ulysses, &self.ring) {
            let shared = u64::from(ulysses) * u64::from(ring);
            if shared > 1 && seq_len / shared < self.least_tokens {
                continue;
            }
            for ((&tp, &pp), &ep) in cross(&self.tp, &self.pp).flat_map(|way| self.ep.iter().map(move |ep| (way, ep))) {
                let split = shared * u64::from(tp) * u64::from(pp);
                if split == 0 || !gpus.is_multiple_of(split) {
                    continue;
                }
                let dp = (gpus / split) as u32;
                let par = Parallelism { dp, pp, ring, ulysses, tp, ep, ..Parallelism::default() };
                all.extend(self.scheduled(&case.model, par));
            }
        }
        all
    }

    /// Ways to go through a pipeline.
    fn scheduled(&self, model: &LlmSpec, par: Parallelism) -> Vec<Parallelism> {
        if par.pp == 1 {
            return vec![par];
        }
        // Where layers do not come out even over stages, they need not over chunks.
        let even = model.layers.is_multiple_of(u64::from(par.pp));
        let fits = |vp: u32| {
            let parts = u64::from(par.pp) * u64::from(vp);
            parts <= model.layers && (!even || model.layers.is_multiple_of(parts))
        };
        let mut all = vec![];
        // Whoever names a schedule among the words wants it, whatever the list has.
        let named = self.options.iter().filter_map(Schedule::named);
        let mut schedules: Vec<Schedule> = self.schedules.iter().copied().chain(named).collect();
        schedules.sort_unstable();
        schedules.dedup();
        for schedule in schedules {
            match schedule {
                Schedule::Interleaved => {
                    all.extend(self.vp.iter().filter(|vp| **vp > 1 && fits(**vp)).map(|vp| schedule.on(par, *vp)));
                }
                _ => all.push(schedule.on(par, 1)),
            }
        }
        all
    }

    /// What degrees leave open.
    fn choices(&self, case: &Case, par: Parallelism) -> Vec<Parallelism> {
        let mut all = vec![];
        // Gathering weights for every microbatch of every stage is nobody's way, where there is another.
        let whole = self.zero.iter().any(|zero| *zero < 2);
        let zero = self.zero.iter().filter(|zero| !whole || par.pp == 1 || **zero < 2);
        for ((&zero, &recompute), &base) in zero
            .flat_map(|zero| self.recompute.iter().map(move |how| (zero, how)))
            .flat_map(|way| self.options.iter().map(move |o| (way, o)))
        {
            let schedule = Schedule::of(&par);
            let wanted = match Schedule::named(&base) {
                Some(named) => schedule == Some(named),
                None => schedule.is_none_or(|schedule| self.schedules.contains(&schedule)),
            };
            let carriers = match base.dispatch {
                _ if par.ep == 1 => &[Dispatch::Nccl][..],
                Dispatch::Nccl => &self.dispatch,
                ref named => std::slice::from_ref(named),
            };
            for &dispatch in carriers.iter().filter(|_| wanted) {
                let options = Options { dispatch, fold: par.options.fold, zb_h1: par.options.zb_h1, ..base };
                let par = Parallelism { zero, recompute, options, ..par };
                all.extend(variants(&case.model, par));
            }
        }
        all
    }
}

/// Words that a plain way may need, or that change what else is best: stages that do not come out even, rows of experts
/// beside another microbatch, latent attention that keeps less, norms and activations that are made again, and attention
/// that is not.
fn variants(model: &LlmSpec, par: Parallelism) -> Vec<Parallelism> {
    let parts = u64::from(par.pp) * u64::from(par.vp);
    let uneven =
        par.options.uneven || (par.pp > 1 && !says_stages(&par.options) && !model.layers.is_multiple_of(parts));
    // Keys that are chosen are gathered.
    let gathers = model.indexer.is_some() && par.ring > 1 && par.options.kv == KvPath::Ring;
    let kv = if gathers { KvPath::Gather } else { par.options.kv };
    let options = Options { uneven, kv, ..par.options };
    let overlaps = par.ep > 1 && par.recompute != Recompute::Full && !par.options.zb_h1 && !par.options.fold.halves();
    let latent = model.mla.is_some() && par.recompute != Recompute::Full && par.ulysses == 1;
    let mut all = vec![options];
    if overlaps {
        // Without the hook low latency leaves nothing any SM beside it.
        let deepep_hook = options.deepep_hook || options.dispatch == Dispatch::DeepepLowLatency;
        all.push(Options { overlap_exchange: true, deepep_hook, ..options });
    }
    if latent {
        all.extend(all.clone().into_iter().map(|options| Options { recompute_mla_up: true, ..options }));
    }
    if par.recompute == Recompute::None {
        let light = |options| Options { recompute_act: true, recompute_norm: true, ..options };
        all.extend(all.clone().into_iter().map(light));
    }
    if model.moe.is_some() && par.recompute == Recompute::None && !options.zb_h1 && !options.fold.halves() {
        all.push(Options { recompute_moe: true, ..options });
    }
    let whole = !options.zb_h1 && !options.fold.halves() && options.ring_backward != RingBackward::Reverse;
    let keeps = whole && options.chunks == 0 && !options.unfused && model.indexer.is_none();
    if par.recompute == Recompute::Full && keeps {
        all.push(Options { keep_attention: true, ..options });
    }
    all.into_iter().map(|options| Parallelism { options, ..par }).collect()
}

/// Whether words say how many layers stages have.
pub fn says_stages(options: &Options) -> bool {
    options.short_ends || options.first_stage.or(options.last_stage).is_some() || !options.stages.is_empty()
}

/// Degrees of expert parallelism: divisors of the experts.
fn experts(model: &LlmSpec) -> Vec<u32> {
    let Some(moe) = model.moe else { return vec![1] };
    (1..=moe.experts.min(MOST_EXPERT_RANKS)).filter(|n| moe.experts.is_multiple_of(*n)).map(|n| n as u32).collect()
}

/// What of a way is the last of a usual list that could go on: the name, and the next.
pub fn ends(case: &Case, way: &Point) -> Vec<(&'static str, u64)> {
    let (model, par) = (&case.model, &way.par);
    let (gpus, node) = (u64::from(case.cluster.gpus()), u64::from(case.cluster.spec.gpus_per_node));
    let tokens = way.seq_len / u64::from(par.ring) / u64::from(par.ulysses);
    let divides = |n: &u64| gpus.is_multiple_of(*n);
    let split = |degree: u32| {
        let long = tokens / 2 >= LEAST_TOKENS && u64::from(degree) == MOST_SPLIT;
        Some(2 * MOST_SPLIT).filter(|n| long && divides(n))
    };
    let of_experts = model.moe.filter(|_| experts(model).last() == Some(&par.ep)).and_then(|moe| {
        let mut more = u64::from(par.ep) + 1..=moe.experts;
        more.find(|n| moe.experts.is_multiple_of(*n) && divides(n))
    });
    let of_stages = |among| stages(among, case.cluster.gpus(), model.layers);
    let deepest = of_stages(1..=MOST_STAGES).last() == Some(&par.pp);
    let deeper = of_stages(MOST_STAGES + 1..=model.layers as u32).first().copied();
    let most = MICRO_BATCHES[MICRO_BATCHES.len() - 1];
    let all = [
        ("tp", Some(2 * MOST_TENSOR).filter(|n| u64::from(par.tp) == MOST_TENSOR && *n <= node && divides(n))),
        ("pp", deeper.filter(|_| deepest).map(u64::from)),
        ("ulysses", split(par.ulysses)),
        ("ring", split(par.ring)),
        ("ep", of_experts),
        ("micro-batch", Some(2 * most).filter(|n| way.micro_batch == most && n * tokens <= MOST_TOKENS)),
    ];
    all.into_iter().filter_map(|(name, next)| Some((name, next?))).collect()
}

/// Who may carry rows of experts: NCCL, and what is made for the GPU.
fn carriers(model: &LlmSpec, architecture: Architecture) -> Vec<Dispatch> {
    match (model.moe.is_some(), architecture) {
        (true, Architecture::Hopper) => vec![Dispatch::Nccl, Dispatch::DeepepNormal],
        (true, Architecture::Blackwell) => vec![Dispatch::Nccl, Dispatch::HybridEp],
        _ => vec![Dispatch::Nccl],
    }
}

/// Ways with the degrees of `point` that differ from it in one word or in what is sharded, each tried on the best ways once
/// these are known; words that save memory also with less that is computed again.
pub fn moves(point: &Point) -> Vec<Point> {
    let par = point.par;
    let with = |word: &str, par: Parallelism| -> Option<Point> {
        let options: Options = format!("{}+{word}", par.options).parse().ok()?;
        (options != par.options).then_some(Point { par: Parallelism { options, ..par }, ..*point })
    };
    let plain = words(&par).into_iter().filter_map(|word| with(word, par));
    let kept = Options { keep_attention: false, ..par.options };
    let light = Options { recompute_act: true, recompute_norm: true, ..kept };
    let less = [(Recompute::None, kept), (Recompute::None, light)].map(|(recompute, options)| {
        let recompute = if par.recompute == Recompute::Full { recompute } else { par.recompute };
        Parallelism { recompute, options, ..par }
    });
    let spared = less.into_iter().chain([par]).filter_map(|par| with(LOSS_IN_PIECES, par));
    let options = Options { overlap_gather: false, ..par.options };
    let sharded = (par.zero != 2 && par.pp == 1 && par.dp > 1)
        .then_some(Point { par: Parallelism { zero: 2, options, ..par }, ..*point });
    let mut all: Vec<Point> = plain.chain(spared).chain(sharded).collect();
    all.sort_unstable();
    all.dedup();
    all
}

const LOSS_IN_PIECES: &str = "loss-chunks-8";

/// Words that change a way without changing its degrees.
fn words(par: &Parallelism) -> Vec<&'static str> {
    let o = par.options;
    let ring = par.ring > 1;
    let open_ends = par.pp > 1 && o.fold == Fold::None && o.stages.is_empty();
    let all = [
        ("tp-overlap", par.tp > 1 && !o.whole_activations),
        ("gather-kv", ring),
        ("gather-kv-prefetch", ring),
        ("dkv-model", ring),
        ("merge-at-end", ring),
        ("merge-in-kernel", ring),
        ("double-ring-8", par.ring > 8),
        ("ring-inside", ring && par.ulysses > 1),
        ("overlap-shared", par.ep > 1 && (o.dispatch != Dispatch::DeepepLowLatency || o.deepep_hook)),
        ("overlap-shared+deepep-hook", par.ep > 1 && o.dispatch == Dispatch::DeepepLowLatency && !o.deepep_hook),
        ("short-ends", open_ends),
        // Where what the ends have less leaves layers that do not come out even.
        ("short-ends+uneven", open_ends && !o.uneven),
        ("no-sync", par.zero == 3),
        ("overlap-gather", par.zero == 1 && par.dp * par.ring * par.ulysses > 1),
    ];
    all.into_iter().filter(|(_, applies)| *applies).map(|(word, _)| word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Low latency computes beside its rows by its hook alone, which a search finds by itself.
    #[test]
    fn low_latency_overlaps_by_its_hook() {
        let model = LlmSpec::find("deepseek-v2-lite").unwrap();
        let par = |dispatch| {
            let options = Options { dispatch, ..Options::default() };
            Parallelism { dp: 16, ep: 16, options, ..Parallelism::default() }
        };
        for (dispatch, hook) in [(Dispatch::DeepepLowLatency, true), (Dispatch::DeepepNormal, false)] {
            let all = variants(&model, par(dispatch));
            let overlap = all.iter().filter(|par| par.options.overlap_exchange);
            assert!(overlap.clone().count() > 0 && overlap.clone().all(|par| par.options.deepep_hook == hook));
            let alone = all.iter().filter(|par| !par.options.overlap_exchange);
            assert!(alone.clone().count() > 0 && alone.clone().all(|par| !par.options.deepep_hook));
            let point = Point { seq_len: 4096, global_batch: 64, micro_batch: 1, par: par(dispatch) };
            let shared: Vec<Point> = moves(&point).into_iter().filter(|p| p.par.options.overlap_shared).collect();
            assert!(shared.len() == 1 && shared[0].par.options.deepep_hook == hook, "{shared:?}");
        }
    }

    #[test]
    fn the_last_of_a_list_that_goes_on_is_told() {
        let of = |model: &str, gpus, par| {
            let case = Case::new(LlmSpec::find(model).unwrap(), "dgx-h100", "nccl-fa3", gpus, None).unwrap();
            ends(&case, &Point { seq_len: 4096, global_batch: 4096, micro_batch: 1, par })
        };
        let par = Parallelism { dp: 64, pp: 4, ep: 64, ..Parallelism::default() };
        assert_eq!(of("deepseek-v3", 256, par), [("ep", 128)]);
        assert!(of("deepseek-v3", 256, Parallelism { ep: 32, ..par }).is_empty());
        // All experts, or all ranks, are the end.
        assert!(of("mixtral-8x7b", 256, Parallelism { ep: 8, ..par }).is_empty());
        assert!(of("deepseek-v3", 64, Parallelism { dp: 16, ..par }).is_empty());
        let par = Parallelism { dp: 2, tp: 8, pp: 63, ..Parallelism::default() };
        assert_eq!(of("llama-3.1-405b", 8 * 63 * 2, par), [("pp", 72)]);
    }
}
