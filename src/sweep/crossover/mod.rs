//! Ulysses or ring? The same attention, forward and backward, costed both ways over ranks, sequence lengths,
//! KV heads and links. What else a layer does is the same both ways and is left out.

mod links;
mod store;
pub mod verdict;

pub use links::Links;
pub use verdict::{Difference, Winner};

use crate::cluster::Cluster;
use crate::cost::{Effort, Machine, cost};
use crate::device::Roofline;
use crate::error::{Cause, Error, Result};
use crate::plan::Plan;
use crate::plan::kernel::Family;
use crate::plan::link::AtomTable;
use crate::plan::memory::Layout;
use crate::report::human;
use crate::spec::{
    AttentionSpec, ClusterSpec, Dtype, GpuSpec, LlmSpec, Mask, Mixer, Options, Parallelism, Pass, StackSpec,
};
use crate::strategy::feasible::that_apply;
use crate::strategy::{Engines, attention_pass, guard};
use crate::timeline::Timeline;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What is asked: the contents of study.json. Lists are crossed with each other.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Question {
    /// Heads and head dim are this model's.
    pub model: String,
    pub cluster: String,
    pub stack: String,
    pub dtype: Dtype,
    pub heads: u64,
    pub head_dim: u64,
    /// Keys that a token sees in layers that have a window; none: no layer has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// Layers that have it, and that have not: a time is the mean of theirs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub near_and_far: Option<[u64; 2]>,
    pub kv_heads: Vec<u64>,
    pub links: Vec<Links>,
    pub ranks: Vec<u32>,
    pub seq_len: Vec<u64>,
    /// A way is costed with each of them and takes its fastest.
    pub options: Vec<Options>,
}

/// One way, costed. The times after the first add up to it; means over the ranks.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Side {
    /// None where it cannot run.
    pub time_s: Option<f64>,
    pub attention_s: f64,
    /// Packing, merging, adding, casting.
    pub copies_s: f64,
    /// Kernels slowed by communication beside them, which takes SMs.
    pub slowed_s: f64,
    /// Communication that nothing hides.
    pub waits_s: f64,
    /// Waiting for other ranks.
    pub imbalance_s: f64,
    /// Waiting for the CPU to issue the next kernel.
    pub host_s: f64,
    /// By one rank.
    pub sent_bytes: f64,
    /// How long that travels, whether anything hides it or not.
    pub travels_s: f64,
    pub peak_mem_bytes: u64,
    pub options: String,
    pub why_not: String,
}

/// A point of the map, by the names of its columns: those of a side stand behind `ulysses_` or `ring_`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cell {
    pub links: Links,
    pub gb_per_s: Option<f64>,
    pub heads: u64,
    pub kv_heads: u64,
    pub seq_len: u64,
    pub ranks: u32,
    pub winner: Winner,
    pub cause: Difference,
    /// Above 1 the ring is faster.
    pub ulysses_over_ring: Option<f64>,
    pub reason: String,
    pub ulysses: Side,
    pub ring: Side,
}

/// Cells in the order of the lists, and the files that hold them.
pub struct Map {
    pub cells: Vec<Cell>,
    pub files: Vec<PathBuf>,
}

/// Costs every cell and writes study.json and rows.csv.
pub fn crossover(question: &Question, dir: &Path) -> Result<Map> {
    let rig = Rig::new(question)?;
    let places = question.places()?;
    question.check_ranks()?;
    store::is_free(dir)?;
    let cells = places.par_iter().map(|place| rig.cell(place)).collect::<Result<Vec<Cell>>>()?;
    let files = store::write(question, &cells, dir)?;
    Ok(Map { cells, files })
}

/// Where a cell is.
#[derive(Clone, Copy)]
struct Place {
    links: Links,
    kv_heads: u64,
    seq_len: u64,
    ranks: u32,
}

/// More cells than anyone would look at.
const MOST_CELLS: usize = 100_000;

impl Question {
    /// As many as heads, a fourth, an eighth and a sixteenth of them, as far as these are whole, and as many as the model has;
    /// the most first.
    pub fn default_kv_heads(model: &LlmSpec) -> Vec<u64> {
        let heads = model.heads;
        let parts = [1, 4, 8, 16].into_iter().filter(|ratio| heads.is_multiple_of(*ratio)).map(|ratio| heads / ratio);
        let all: BTreeSet<u64> = parts.chain([model.kv_heads]).collect();
        all.into_iter().rev().collect()
    }

    /// The window of a model's layers, and how many have it and have not; none where none has.
    pub fn windows_of(model: &LlmSpec) -> (Option<u64>, Option<[u64; 2]>) {
        let attends = |l: &u64| model.pattern.get(*l as usize).is_none_or(|mixer| *mixer == Mixer::Attention);
        let (near, far): (Vec<u64>, Vec<u64>) =
            (0..model.layers).filter(attends).partition(|layer| model.window_of(*layer).is_some());
        let some = !near.is_empty();
        (model.window.filter(|_| some), some.then_some([near.len() as u64, far.len() as u64]))
    }

    /// What a token sees in layers of each kind, and the share of the layers that are of it.
    fn masks(&self) -> Vec<(Mask, f64)> {
        let causal = Mask::new(true);
        let [near, far] = self.near_and_far.unwrap_or([u64::from(self.window.is_some()), 0]);
        let Some(window) = self.window.filter(|_| near > 0) else { return vec![(causal, 1.0)] };
        let share = |layers: u64| layers as f64 / (near + far) as f64;
        let near = (Mask { window: Some(window), ..causal.clone() }, share(near));
        [near, (causal, share(far))].into_iter().filter(|(_, share)| *share > 0.0).collect()
    }

    fn places(&self) -> Result<Vec<Place>> {
        let wrong = |field: &str, why: String| Err(Error::spec("crossover", field, why));
        let lens = [self.kv_heads.len(), self.links.len(), self.ranks.len(), self.seq_len.len(), self.options.len()];
        if lens.contains(&0) {
            return wrong(
                "kv_heads, links, ranks, seq_len, options",
                "a list is empty; give at least one value".into(),
            );
        }
        if lens.iter().product::<usize>() > MOST_CELLS {
            return wrong("the map", format!("has more than {MOST_CELLS} points; shorten the lists"));
        }
        if let Some(bad) = self.kv_heads.iter().find(|k| **k == 0 || !self.heads.is_multiple_of(**k)) {
            return wrong("kv_heads", format!("{bad} does not divide the {} heads; use a divisor", self.heads));
        }
        if let Some(bad) = self.ranks.iter().find(|r| **r < 2) {
            return wrong("ranks", format!("{bad} has nothing to share; the least is 2"));
        }
        if self.seq_len.contains(&0) {
            return wrong("seq_len", "0 is no sequence; the least is 1".into());
        }
        for options in &self.options {
            let all = options.to_string();
            let of_either = both(2).map(|par| that_apply(&Parallelism { options: *options, ..par }).to_string());
            let lost = |word: &&str| !of_either.iter().any(|options| options.split('+').any(|one| one == *word));
            if let Some(word) = all.split('+').find(|word| *options != Options::default() && lost(word)) {
                let why = format!("{word} says nothing of Ulysses or a ring alone; leave it out");
                return wrong("options", why);
            }
        }
        let mut places = Vec::new();
        for &links in &self.links {
            for &kv_heads in &self.kv_heads {
                for &ranks in &self.ranks {
                    places.extend(self.seq_len.iter().map(|&seq_len| Place { links, kv_heads, seq_len, ranks }));
                }
            }
        }
        Ok(places)
    }

    fn spec(&self, place: &Place, mask: Mask) -> AttentionSpec {
        AttentionSpec {
            batch: 1,
            seq_len: place.seq_len,
            heads: self.heads,
            kv_heads: place.kv_heads,
            head_dim: self.head_dim,
            mask,
            dtype: self.dtype,
        }
    }

    /// Errors: ranks of which no ring is costed. All of a ring do different work in every step, so that a long one takes the square
    /// of its length, in time and in memory; a map that said that it cannot run would be wrong.
    fn check_ranks(&self) -> Result<()> {
        for &ranks in &self.ranks {
            // The shortest sequence that they share: it is their number that counts.
            let (seq_len, kv_heads) = (2 * u64::from(ranks), self.heads);
            let place = Place { links: Links::AsTheyStand, kv_heads, seq_len, ranks };
            let [_, ring] = both(ranks);
            match guard::attention(&self.spec(&place, Mask::new(true)), &ring) {
                Err(Error::Infeasible(why)) if why.cause == Cause::Size => {
                    return Err(Error::Infeasible(why).and("leave such --ranks out"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// The two ways.
fn both(ranks: u32) -> [Parallelism; 2] {
    let of = |ulysses, ring| Parallelism { ulysses, ring, ..Parallelism::default() };
    [of(ranks, 1), of(1, ranks)]
}

/// What all cells share.
struct Rig<'a> {
    question: &'a Question,
    cluster: ClusterSpec,
    gpu: GpuSpec,
    stack: StackSpec,
    roofline: Roofline,
}

impl<'a> Rig<'a> {
    fn new(question: &'a Question) -> Result<Rig<'a>> {
        let cluster = ClusterSpec::find(&question.cluster)?;
        let gpu = GpuSpec::find(&cluster.gpu)?;
        let stack = StackSpec::find_for(&question.stack, &gpu)?;
        let roofline = Roofline::new(&gpu, &stack)?;
        roofline.peak(question.dtype)?;
        roofline.peak(Dtype::F32)?;
        Ok(Rig { question, cluster, gpu, stack, roofline })
    }

    fn cell(&self, place: &Place) -> Result<Cell> {
        let spec = place.links.of(&self.cluster, place.ranks)?;
        let cluster = Cluster::new(&spec, &self.gpu, place.ranks)?;
        let [ulysses, ring] = both(place.ranks).map(|par| self.fastest(&cluster, place, par));
        let (ulysses, ring) = (ulysses?, ring?);
        let (winner, cause, reason) = verdict::verdict(&ulysses, &ring, || self.with_all_heads(place));
        Ok(Cell {
            links: place.links,
            gb_per_s: place.links.gb_per_s(),
            heads: self.question.heads,
            kv_heads: place.kv_heads,
            seq_len: place.seq_len,
            ranks: place.ranks,
            winner,
            cause,
            ulysses_over_ring: ulysses.time_s.zip(ring.time_s).map(|(u, r)| u / r),
            reason,
            ulysses,
            ring,
        })
    }

    /// A way with the options that make it fastest, of which words that say nothing of it are left out; of those that cannot
    /// run the first says why.
    fn fastest(&self, cluster: &Cluster, place: &Place, par: Parallelism) -> Result<Side> {
        let mut best: Option<Side> = None;
        for &options in &self.question.options {
            let options = that_apply(&Parallelism { options, ..par });
            let side = match self.side(cluster, place, &Parallelism { options, ..par }) {
                Err(Error::Infeasible(why)) => Side { why_not: why.in_a_line().to_string(), ..Side::default() },
                other => other?,
            };
            let time = |s: &Side| s.time_s.unwrap_or(f64::INFINITY);
            if best.as_ref().is_none_or(|old| time(&side) < time(old)) {
                best = Some(side);
            }
        }
        Ok(best.expect("at least one set of options"))
    }

    /// The mean of the layers, by how many see what.
    fn side(&self, cluster: &Cluster, place: &Place, par: &Parallelism) -> Result<Side> {
        self.roofline.runs(par.options, self.question.dtype, self.question.head_dim)?;
        let mut mean = Side { options: par.options.to_string(), ..Side::default() };
        for (mask, share) in self.question.masks() {
            mean.add(&self.attention(cluster, place, par, mask)?, share);
        }
        Ok(mean)
    }

    fn attention(&self, cluster: &Cluster, place: &Place, par: &Parallelism, mask: Mask) -> Result<Side> {
        let plan = self.plan(cluster, place, par, mask)?;
        let peak_mem_bytes = Layout::new(&plan, &AtomTable::new(&plan)?, 0)?.bytes;
        self.fits(peak_mem_bytes)?;
        Ok(Side { peak_mem_bytes, ..self.costed(cluster, &plan)? })
    }

    fn plan(&self, cluster: &Cluster, place: &Place, par: &Parallelism, mask: Mask) -> Result<Plan> {
        let spec = self.question.spec(place, mask);
        let engines = Engines::of(&self.stack, &cluster.spec);
        attention_pass::build(&spec, Pass::ForwardBackward, par, engines)
    }

    fn costed(&self, cluster: &Cluster, plan: &Plan) -> Result<Side> {
        let machine = Machine { cluster, stack: &self.stack, kernels: &self.roofline, devices: None };
        Ok(parts(&cost(plan, machine, Effort::SUMS)?))
    }

    /// What the attention kernels of a rank would take at the rate of one that has all heads, whatever memory that needs; `None`
    /// where there is no such plan.
    fn with_all_heads(&self, place: &Place) -> Option<f64> {
        let cluster = place.links.of(&self.cluster, 1).and_then(|spec| Cluster::new(&spec, &self.gpu, 1)).ok()?;
        let of = |(mask, share): (Mask, f64)| {
            guard::attention(&self.question.spec(place, mask.clone()), &Parallelism::default())?;
            let plan = self.plan(&cluster, place, &Parallelism::default(), mask)?;
            Ok(share * self.costed(&cluster, &plan)?.attention_s)
        };
        let whole: Result<Vec<f64>> = self.question.masks().into_iter().map(of).collect();
        Some(whole.ok()?.iter().sum::<f64>() / f64::from(place.ranks))
    }

    fn fits(&self, plan: u64) -> Result<()> {
        let needed = plan as f64 + self.stack.reserved_memory.value.value();
        let capacity = self.gpu.memory.value.value();
        if needed <= capacity {
            return Ok(());
        }
        let [needed, capacity] = [needed, capacity].map(human::bytes);
        Err(Cause::Memory.infeasible(format!("this one attention needs {needed} of {capacity}; use more ranks")))
    }
}

impl Side {
    /// Adds `share` of what another one takes and sends; of the memory the larger counts.
    fn add(&mut self, other: &Side, share: f64) {
        self.time_s = other.time_s.map(|time| self.time_s.unwrap_or(0.0) + share * time);
        let sums = [
            (&mut self.attention_s, other.attention_s),
            (&mut self.copies_s, other.copies_s),
            (&mut self.slowed_s, other.slowed_s),
            (&mut self.waits_s, other.waits_s),
            (&mut self.imbalance_s, other.imbalance_s),
            (&mut self.host_s, other.host_s),
            (&mut self.sent_bytes, other.sent_bytes),
            (&mut self.travels_s, other.travels_s),
        ];
        for (sum, more) in sums {
            *sum += share * more;
        }
        self.peak_mem_bytes = self.peak_mem_bytes.max(other.peak_mem_bytes);
    }
}

/// Where the time went.
fn parts(timeline: &Timeline) -> Side {
    let usage = timeline.mean();
    let sum = |attention: bool| {
        usage.by_kernel.iter().filter(|(k, _)| Family::of(k).is_attention() == attention).map(|(_, s)| s).sum::<f64>()
    };
    let (attention_s, copies_s) = (sum(true), sum(false));
    Side {
        time_s: Some(timeline.step.value()),
        attention_s,
        copies_s,
        slowed_s: (usage.compute - attention_s - copies_s).max(0.0),
        waits_s: usage.exposed_total(),
        imbalance_s: usage.bubble,
        host_s: usage.host,
        sent_bytes: usage.bytes_scale_up + usage.bytes_scale_out,
        travels_s: usage.comm.values().sum(),
        ..Side::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question() -> Question {
        Question {
            model: "llama-3-8b".into(),
            cluster: "dgx-h100".into(),
            stack: "nccl-fa3".into(),
            dtype: Dtype::Bf16,
            heads: 32,
            head_dim: 128,
            window: None,
            near_and_far: None,
            kv_heads: vec![32, 2],
            links: vec![Links::Node(365.0), Links::Network(20.0)],
            ranks: vec![2, 8, 64],
            seq_len: vec![8192, 131_072],
            options: vec![Options::default()],
        }
    }

    fn cells() -> Vec<Cell> {
        crossover(&question(), tempfile::tempdir().unwrap().path()).unwrap().cells
    }

    #[test]
    fn the_models_own_kv_heads_are_among_the_usual_ones() {
        let of = |name: &str| Question::default_kv_heads(&LlmSpec::find(name).unwrap());
        assert_eq!(of("qwen2.5-7b"), [28, 7, 4]);
        assert_eq!(of("llama-3-8b"), [32, 8, 4, 2]);
    }

    #[test]
    fn parts_of_a_side_add_up_to_its_time() {
        let cells = cells();
        assert_eq!(cells.len(), 24);
        for side in cells.iter().flat_map(|c| [&c.ulysses, &c.ring]).filter(|s| s.time_s.is_some()) {
            let parts = [side.attention_s, side.copies_s, side.slowed_s, side.waits_s, side.imbalance_s, side.host_s];
            let (sum, time) = (parts.iter().sum::<f64>(), side.time_s.unwrap());
            assert!((sum / time - 1.0).abs() < 1e-9, "{side:?}");
        }
    }

    #[test]
    fn layers_with_and_without_a_window_are_costed_by_their_number() {
        let few = Question { kv_heads: vec![8], ranks: vec![8], ..question() };
        let of = |layers: [u64; 2]| {
            let question = Question { window: Some(1024), near_and_far: Some(layers), ..few.clone() };
            crossover(&question, tempfile::tempdir().unwrap().path()).unwrap().cells
        };
        let (near, far, mixed) = (of([3, 0]), of([0, 7]), of([5, 1]));
        let without = crossover(&few, tempfile::tempdir().unwrap().path()).unwrap().cells;
        assert_eq!(
            far.iter().map(|c| &c.ring).collect::<Vec<_>>(),
            without.iter().map(|c| &c.ring).collect::<Vec<_>>()
        );
        for ((near, far), mixed) in near.iter().zip(&far).zip(&mixed) {
            for side in [|c: &Cell| c.ulysses.clone(), |c: &Cell| c.ring.clone()] {
                let [near, far, mixed] = [near, far, mixed].map(|c| side(c).time_s.unwrap());
                assert!(near < far, "a window is less work: {near} {far}");
                assert!((mixed / (5.0 * near + far) * 6.0 - 1.0).abs() < 1e-12, "{mixed}");
            }
        }
    }

    #[test]
    fn the_winner_changes_with_kv_heads_links_and_ranks() {
        let cells = cells();
        let winner = |links, kv_heads, ranks| {
            let here = |c: &&Cell| (c.links, c.kv_heads, c.ranks, c.seq_len) == (links, kv_heads, ranks, 8192);
            cells.iter().find(here).unwrap().winner
        };
        let slow = Links::Network(20.0);
        assert_eq!(winner(slow, 2, 2), Winner::Ring, "keys and values are a sixteenth of the queries");
        assert_eq!(winner(slow, 32, 8), Winner::Ulysses, "the ring sends more the more ranks there are");
        assert_eq!(winner(Links::Node(365.0), 2, 8), Winner::Ulysses, "short blocks, quick all-to-alls");
        assert_eq!(winner(slow, 32, 64), Winner::Ring, "Ulysses has fewer heads than ranks");
    }

    /// Blocks off the diagonal need no mask, and a GPU has kernels that are faster without: with all heads they would be slow, too.
    #[test]
    fn few_heads_are_blamed_for_no_more_than_they_cost() {
        let long =
            Question { kv_heads: vec![8], links: vec![Links::Node(365.0)], seq_len: vec![1 << 20], ..question() };
        let blackwell =
            Question { cluster: "dgx-b200".into(), stack: "nccl-cudnn".into(), ranks: vec![2, 4, 8], ..long };
        for cell in crossover(&blackwell, tempfile::tempdir().unwrap().path()).unwrap().cells {
            assert_eq!((cell.winner, cell.cause), (Winner::Ring, Difference::Attention));
            assert!(cell.reason.contains("as they would with all heads"), "{}", cell.reason);
            let place = Place { links: cell.links, kv_heads: 8, seq_len: 1 << 20, ranks: cell.ranks };
            let all = Rig::new(&blackwell).unwrap().with_all_heads(&place).unwrap();
            assert!((all / cell.ulysses.attention_s - 1.0).abs() < 0.02, "{all} {}", cell.ulysses.attention_s);
        }
    }

    #[test]
    fn words_of_one_way_leave_the_other_as_it_is() {
        let cells = |options: &str| {
            let question = Question { options: vec![options.parse().unwrap()], seq_len: vec![131_072], ..question() };
            crossover(&question, tempfile::tempdir().unwrap().path()).unwrap().cells
        };
        let (plain, burst) = (cells("default"), cells("burst+stripe"));
        for (plain, burst) in plain.iter().zip(&burst).filter(|(plain, _)| plain.ring.time_s.is_some()) {
            assert_eq!(plain.ulysses, burst.ulysses);
            assert_eq!((&*plain.ring.options, &*burst.ring.options), ("default", "stripe+burst"));
            assert_ne!(plain.ring.time_s, burst.ring.time_s);
        }
    }

    #[test]
    fn a_row_has_a_field_for_each_column() {
        let dir = tempfile::tempdir().unwrap();
        let map = crossover(&question(), dir.path()).unwrap();
        let mut csv = csv::Reader::from_path(&map.files[1]).unwrap();
        assert_eq!(csv.headers().unwrap().len(), store::columns().len());
        assert_eq!(csv.records().filter(|r| r.is_ok()).count(), map.cells.len());
    }

    #[test]
    fn what_makes_no_map_is_said() {
        let said = |q: Question| crossover(&q, Path::new("/nowhere")).err().unwrap().to_string();
        assert!(said(Question { kv_heads: vec![5], ..question() }).contains("5 does not divide the 32 heads"));
        assert!(said(Question { ranks: vec![1], ..question() }).contains("the least is 2"));
        assert!(said(Question { links: vec![], ..question() }).contains("a list is empty"));
        let overlap = vec!["burst+tp-overlap".parse().unwrap()];
        assert!(said(Question { options: overlap, ..question() }).contains("tp-overlap says nothing"));
        // Before any of it is costed: 4096 ranks took more than a minute, and the memory of as many squared.
        let long = Question { ranks: vec![2048], seq_len: vec![1 << 17], ..question() };
        let why = said(long);
        assert!(why.contains("size: ring 2048") && why.contains("leave such --ranks"), "{why}");
        let one_node = Question { cluster: "local-cpu".into(), stack: "cpu".into(), dtype: Dtype::F32, ..question() };
        assert!(said(one_node).contains("there is no network"));
    }
}
