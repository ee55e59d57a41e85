//! The record: how long published runs took, of what is predicted for them today, by what they ran with, on and of.
//!
//! The interval of a calibration knows how far kernels and links scatter. It knows nothing of what a plan leaves out: of
//! software that waits where the plan does not, of a network that is shared, of a run that is not what its source says. How
//! much that is, only runs can tell that others have measured; `traces/published/record.csv` keeps how they came out.
//!
//! That is how they come out today, when the program has been changed with most of them in view. A run that nobody has
//! seen errs more, see [`UNSEEN`].

use super::human::{Table, seconds};
use crate::spec::{Architecture, LlmSpec};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// What trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Software {
    Megatron,
    Torch,
    Jax,
    Deepspeed,
    Trainers,
    Others,
}

impl Software {
    pub const ALL: [Software; 6] =
        [Software::Megatron, Software::Torch, Software::Jax, Software::Deepspeed, Software::Trainers, Software::Others];

    fn said(self) -> &'static str {
        match self {
            Software::Megatron => "Megatron-LM, NeMo and kin",
            Software::Torch => "PyTorch: torchtitan, FSDP",
            Software::Jax => "JAX: MaxText and kin",
            Software::Deepspeed => "DeepSpeed and kin",
            Software::Trainers => "Hugging Face's trainer and kin",
            Software::Others => "others",
        }
    }
}

/// Devices that came at about the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Generation {
    Volta,
    Ampere,
    Hopper,
    Blackwell,
    Amd,
    Tpu,
    Npu,
}

impl Generation {
    /// None of CPUs, on which nobody publishes runs.
    pub fn of(architecture: Architecture) -> Option<Generation> {
        Some(match architecture {
            Architecture::Volta | Architecture::Turing => Generation::Volta,
            Architecture::Ampere | Architecture::Ada => Generation::Ampere,
            Architecture::Hopper => Generation::Hopper,
            Architecture::Blackwell => Generation::Blackwell,
            Architecture::Cdna1 | Architecture::Cdna2 | Architecture::Cdna3 | Architecture::Cdna4 => Generation::Amd,
            Architecture::Tpu => Generation::Tpu,
            Architecture::Npu => Generation::Npu,
            Architecture::Cpu => return None,
        })
    }

    fn said(self) -> &'static str {
        match self {
            Generation::Volta => "Volta and Turing",
            Generation::Ampere => "Ampere and Ada",
            Generation::Hopper => "Hopper",
            Generation::Blackwell => "Blackwell",
            Generation::Amd => "AMD's GPUs",
            Generation::Tpu => "TPUs",
            Generation::Npu => "NPUs",
        }
    }
}

/// What is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    Dense,
    Mixture,
}

impl Kind {
    pub fn of(model: &LlmSpec) -> Kind {
        if model.moe.is_some() { Kind::Mixture } else { Kind::Dense }
    }

    fn said(self) -> &'static str {
        match self {
            Kind::Dense => "dense",
            Kind::Mixture => "mixtures",
        }
    }
}

/// What of a run is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Quantity {
    /// Time of a step, whether it was told as that or as a rate.
    Step,
    /// Peak memory of a GPU.
    Memory,
}

/// What two runs have in common, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Like {
    pub software: Software,
    pub generation: Generation,
    pub kind: Kind,
}

/// How one published run came out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Came {
    pub quantity: Quantity,
    pub software: Software,
    pub generation: Generation,
    pub kind: Kind,
    /// Runs of one source err alike.
    pub source: String,
    /// Measured over predicted: above 1 it took longer, or more.
    pub ratio: f64,
}

/// Every run of the record.
pub fn shipped() -> &'static [Came] {
    static ALL: LazyLock<Vec<Came>> = LazyLock::new(|| {
        read(include_str!("../../traces/published/record.csv")).expect("tests read the file that is shipped")
    });
    &ALL
}

pub fn read(text: &str) -> Result<Vec<Came>, csv::Error> {
    csv::Reader::from_reader(text.as_bytes()).deserialize().collect()
}

/// Of fewer runs, or of fewer sources, nothing is said.
const FEWEST_RUNS: usize = 15;
const FEWEST_SOURCES: usize = 4;

/// How many times as far off, in logarithms, runs are that the program has not been changed with in view: of 16 lots that were
/// written down before anyone saw a prediction of them (`blind_training*.json` up to 16), the first median error over
/// that of today is 0.9 to 2.6, and 1.6 in the median. Of the next lot, `blind_training_17.json`, 71 of 89 runs of 33
/// sources then lay within what that makes of eight in ten, and 56 within eight in ten as they come out today. Of peaks of
/// memory, of which there was one lot, the same is taken.
pub const UNSEEN: f64 = 1.6;

/// How runs with one software came out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    pub software: &'static str,
    /// Which of its runs: those on such GPUs and of such models, or wider where there are too few.
    pub of: String,
    pub runs: usize,
    pub sources: usize,
    /// Measured over predicted: a tenth lies below the first, half below the second, a tenth above the third, if each
    /// source counts the same.
    pub ratio: [f64; 3],
    /// Where eight in ten of runs are to be expected that nobody has seen.
    pub unseen: [f64; 2],
}

/// How the published runs of the shipped record came out that are like a run on such a device: see [`lines`]. None on CPUs.
pub fn of(quantity: Quantity, architecture: Architecture, kind: Option<Kind>) -> Vec<Line> {
    let generation = Generation::of(architecture);
    generation.map_or(vec![], |generation| lines(shipped(), quantity, generation, kind))
}

/// What all of `steps` together say, in a line of text; nothing where there are none.
pub fn sentence(steps: &[Line]) -> String {
    let Some(Line { of, runs, sources, ratio, unseen, .. }) = steps.last() else { return String::new() };
    let ([low, median, high], [least, most]) = (ratio, unseen);
    format!(
        "published runs ({of}: {runs} of {sources} sources): eight in ten took {low:.2} to {high:.2} times what is predicted for \
         them, half of them over {median:.2}; expect {least:.2} to {most:.2} of one that nobody has seen (`estimate` has it by \
         software)\n"
    )
}

/// The same of peaks of memory; `and` ends it.
pub fn memory_sentence(peaks: &[Line], and: &str) -> String {
    let Some(Line { of, runs, sources, ratio, .. }) = peaks.last() else { return String::new() };
    let [low, median, high] = ratio;
    format!(
        "their peaks of memory ({of}: {runs} of {sources} sources): eight in ten had {low:.2} to {high:.2} times what is predicted \
         for them, half of them over {median:.2}{and}\n"
    )
}

/// How published runs on such GPUs and, if that is known, of such models came out: a line for each software of which there
/// are enough, and one for all of them.
pub fn lines(all: &[Came], quantity: Quantity, generation: Generation, kind: Option<Kind>) -> Vec<Line> {
    let of = |software: Option<Software>| {
        let own = all.iter().filter(|c| c.quantity == quantity && software.is_none_or(|s| s == c.software));
        line(&own.collect::<Vec<_>>(), software, generation, kind)
    };
    // Others have nothing in common: they count among all.
    let named = Software::ALL.into_iter().filter(|s| *s != Software::Others).map(Some);
    named.chain([None]).filter_map(of).collect()
}

fn line(own: &[&Came], software: Option<Software>, generation: Generation, kind: Option<Kind>) -> Option<Line> {
    let scopes = [(Some(generation), kind), (Some(generation), None), (None, None)];
    let within = |scope: &(Option<Generation>, Option<Kind>)| -> Vec<&Came> {
        let of = |c: &&Came| scope.0.is_none_or(|g| g == c.generation) && scope.1.is_none_or(|k| k == c.kind);
        own.iter().copied().filter(of).collect()
    };
    let found = scopes.iter().map(|scope| (scope, within(scope), sources(&within(scope)).len()));
    let (scope, runs, sources) =
        found.into_iter().find(|(_, runs, sources)| runs.len() >= FEWEST_RUNS && *sources >= FEWEST_SOURCES)?;
    let of = match scope {
        (Some(generation), Some(kind)) => format!("{}, on {}", kind.said(), generation.said()),
        (Some(generation), None) => format!("on {}", generation.said()),
        (None, _) => "on any GPU".into(),
    };
    let ratio = [0.1, 0.5, 0.9].map(|q| quantile(&runs, q));
    let unseen = [ratio[0].min(1.0), ratio[2].max(1.0)].map(|ratio| ratio.powf(UNSEEN));
    Some(Line {
        software: software.map_or("all of them", Software::said),
        of,
        runs: runs.len(),
        sources,
        ratio,
        unseen,
    })
}

/// Runs by source.
fn sources<'a>(runs: &[&'a Came]) -> BTreeMap<&'a str, usize> {
    let mut found = BTreeMap::new();
    runs.iter().for_each(|c| *found.entry(c.source.as_str()).or_default() += 1);
    found
}

/// The ratio that a part `q` of all sources lies below, each divided among its runs; 1 of none.
fn quantile(runs: &[&Came], q: f64) -> f64 {
    let sources = sources(runs);
    let mut sorted: Vec<(f64, f64)> = runs.iter().map(|c| (c.ratio, 1.0 / sources[c.source.as_str()] as f64)).collect();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let below = q * sources.len() as f64;
    let mut passed = 0.0;
    let at = sorted.iter().find(|(_, weight)| {
        passed += weight;
        passed >= below * (1.0 - 1e-12)
    });
    at.or(sorted.last()).map_or(1.0, |(ratio, _)| *ratio)
}

/// The record as tables: what runs took of what is predicted for them, what that makes of a step of `step` seconds, and the
/// same of peaks of memory. Empty where there is none.
pub fn tables(steps: &[Line], step: f64, memory: &[Line]) -> String {
    if steps.is_empty() {
        return String::new();
    }
    let mut table = Table::new("<<>>>>>");
    let heads = ["runs", "median", "eight in ten", "if not seen", "so this step"];
    table.row(["published runs, over what is predicted for them", ""].into_iter().chain(heads));
    for line in steps {
        let [low, high] = line.unseen.map(|ratio| seconds(ratio * step));
        table.row(line.cells().into_iter().chain([format!("{low} to {high}")]));
    }
    if !memory.is_empty() {
        table.row(["their peaks of memory, over what is predicted"]);
        memory.iter().for_each(|line| table.row(line.cells().into_iter().chain([String::new()])));
    }
    format!(
        "{}  each source counts the same; the program was changed with most of these in view, and runs that nobody had seen were \
         {UNSEEN} times as far off\n",
        table.render("")
    )
}

impl Line {
    fn cells(&self) -> [String; 6] {
        let ([low, median, high], [least, most]) = (self.ratio, self.unseen);
        [
            format!("  {}", self.software),
            self.of.clone(),
            format!("{} of {} sources", self.runs, self.sources),
            format!("x {median:.2}"),
            format!("x {low:.2} to {high:.2}"),
            format!("x {least:.2} to {most:.2}"),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn came(source: &str, ratio: f64) -> Came {
        Came {
            quantity: Quantity::Step,
            software: Software::Torch,
            generation: Generation::Hopper,
            kind: Kind::Dense,
            source: source.into(),
            ratio,
        }
    }

    #[test]
    fn each_source_counts_the_same() {
        let mut runs: Vec<Came> = (0..97).map(|_| came("many", 1.0)).collect();
        runs.extend([came("a", 2.0), came("b", 3.0), came("c", 4.0)]);
        let all: Vec<&Came> = runs.iter().collect();
        assert_eq!([0.1, 0.25, 0.5, 0.75, 0.9].map(|q| quantile(&all, q)), [1.0, 1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn runs_that_nobody_has_seen_are_further_off_either_way() {
        let of = |ratios: [f64; 20]| {
            let runs: Vec<Came> = (0..20).map(|i| came(&i.to_string(), ratios[i])).collect();
            lines(&runs, Quantity::Step, Generation::Hopper, None)[0].clone()
        };
        let slow = of(std::array::from_fn(|i| if i < 10 { 1.2 } else { 2.0 }));
        assert_eq!(slow.ratio, [1.2, 1.2, 2.0]);
        // That all were slower says nothing against one that is as predicted.
        assert_eq!(slow.unseen, [1.0, 2f64.powf(UNSEEN)]);
    }

    #[test]
    fn too_few_runs_are_widened_and_then_left_out() {
        let few: Vec<Came> = (0..14).map(|i| came(&format!("{}", i % 5), 1.0)).collect();
        assert_eq!(lines(&few, Quantity::Step, Generation::Hopper, Some(Kind::Dense)), []);
        let enough: Vec<Came> = (0..16).map(|i| came(&format!("{}", i % 5), 1.0)).collect();
        let of = |generation, kind| {
            let found = lines(&enough, Quantity::Step, generation, Some(kind));
            assert_eq!(found.len(), 2, "PyTorch, and all of them");
            (found[0].runs, found[0].sources, found[0].of.clone())
        };
        assert_eq!(of(Generation::Hopper, Kind::Dense), (16, 5, "dense, on Hopper".into()));
        assert_eq!(of(Generation::Hopper, Kind::Mixture), (16, 5, "on Hopper".into()));
        assert_eq!(of(Generation::Tpu, Kind::Dense), (16, 5, "on any GPU".into()));
        assert_eq!(lines(&enough, Quantity::Memory, Generation::Hopper, Some(Kind::Dense)), []);
    }

    /// What the record says of sources that it does not know: it is made without each in turn, and eight in ten runs of that
    /// source lie between what it says then.
    #[test]
    fn eight_in_ten_of_a_source_that_it_does_not_know() {
        let mut within = (0, 0);
        for source in sources(&shipped().iter().collect::<Vec<_>>()).keys() {
            let (own, others): (Vec<Came>, Vec<Came>) = shipped().iter().cloned().partition(|c| c.source == *source);
            for came in own.iter().filter(|c| c.quantity == Quantity::Step) {
                let said = lines(&others, Quantity::Step, came.generation, Some(came.kind));
                let of = said.iter().find(|l| l.software == came.software.said()).or(said.last());
                let [low, _, high] = of.expect("there is always one of all").ratio;
                within.0 += usize::from((low..=high).contains(&came.ratio));
                within.1 += 1;
            }
        }
        let share = within.0 as f64 / within.1 as f64;
        assert!(within.1 > 1000 && (0.75..0.85).contains(&share), "{share} of {}", within.1);
    }
}
