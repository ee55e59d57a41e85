//! What a timeline and a layout of memory say about a plan: a [`Row`] of a study, and a [`Report`] for a reader.

mod beside;
pub mod human;
pub mod record;
mod row;
mod text;

pub use beside::Beside;
pub use row::{Place, Row, limit, made_of};

use crate::cluster::Cluster;
use crate::collective::exchange::Aside;
use crate::error::Result;
use crate::plan::Plan;
use crate::plan::memory::Layout;
use crate::plan::route::dropped;
use crate::spec::{LlmSpec, StackSpec};
use crate::timeline::Timeline;
use crate::units::FlopsPerSec;
use record::Quantity;
use serde::Serialize;
use statrs::distribution::{ContinuousCDF, Normal};

/// A plan with everything that was found out about it.
pub struct Costed<'a> {
    pub plan: &'a Plan,
    pub cluster: &'a Cluster,
    pub stack: &'a StackSpec,
    pub layout: &'a Layout,
    /// What a library that carries rows sets aside beside it, or why it would not.
    pub aside: Result<Aside>,
    pub timeline: &'a Timeline,
    /// What MFU and HFU are shares of: the dense bf16 peak, or that of the plan's dtype if it is wider.
    pub peak: FlopsPerSec,
}

impl Costed<'_> {
    /// The row of this plan; where memory does not suffice it says so and has its numbers all the same.
    pub fn row(&self) -> Row {
        let mut row = Row::asked(&self.plan.about, self.cluster, self.stack);
        row.set_layout(
            self.layout,
            &Place { aside: &self.aside, cluster: self.cluster, stack: self.stack, headroom: 0.0 },
        );
        row.set_time(self.timeline, self.plan.about.model_flops, self.peak.value());
        row.set_dropped(dropped(&self.plan.routes));
        row
    }

    fn memory(&self) -> Memory {
        let (layout, aside) = (self.layout, self.aside.as_ref().copied().unwrap_or_default());
        Memory {
            at_the_fullest: layout.live_by_kind.iter().map(|(kind, bytes)| (kind.name(), *bytes)).collect(),
            gaps: layout.gaps,
            plan: layout.bytes,
            host: layout.host_bytes,
            buffers: aside.buffers.total(),
            buffers_of: aside.library,
            reserved: self.stack.reserved_memory.value.value() as u64,
            capacity: self.cluster.gpu.memory.value.value() as u64,
        }
    }

    /// How published runs like it came out; of none where nobody publishes any.
    fn record(&self, quantity: Quantity) -> Vec<record::Line> {
        let kind = self.plan.about.model_spec.as_ref().map(record::Kind::of);
        record::of(quantity, self.cluster.gpu.architecture, kind)
    }

    /// Everything `estimate` shows.
    pub fn report(&self) -> Report {
        let usage = self.timeline.mean();
        let step = self.timeline.step.value();
        let kernels: f64 = usage.by_kernel.values().sum();
        let axes = |map: &std::collections::BTreeMap<crate::plan::Axis, f64>| {
            shares(map.iter().map(|(axis, s)| (axis.name(), *s)), step)
        };
        let provenance: f64 = usage.by_provenance.values().sum();
        let trained = self.plan.about.model_spec.as_ref().map(LlmSpec::trained_params);
        Report {
            row: self.row(),
            weights: trained.map(|(all, _)| all),
            active_weights: trained.map(|(_, active)| active),
            gpu: self.cluster.gpu.name.clone(),
            dtype: self.plan.about.dtype.clone(),
            plan: self.plan.hash(),
            interval_95_s: interval(step, usage.spread()),
            interval_rests_on: INTERVAL_RESTS_ON,
            record: self.record(Quantity::Step),
            memory_record: self.record(Quantity::Memory),
            kernels: shares(usage.by_kernel.iter().map(|(k, s)| (*k, *s)), step),
            slowed_s: (usage.compute - kernels).max(0.0),
            others_s: usage.bubble,
            offload_s: usage.offload,
            offload_busy_s: usage.aside,
            exposed: axes(&usage.exposed),
            communication_busy: axes(&usage.comm),
            memory: self.memory(),
            provenance: shares(usage.by_provenance.iter().map(|(k, s)| (*k, *s)), provenance),
            model_flops_per_gpu: self.plan.about.model_flops / f64::from(self.cluster.gpus()),
            executed_flops_per_gpu: usage.flops,
            peak_flops_per_s: self.peak.value(),
            notes: self.plan.about.model_spec.as_ref().map_or(vec![], |model| model.notes.clone()),
            training: None,
        }
    }
}

/// A part of a whole.
#[derive(Debug, Clone, Serialize)]
pub struct Share {
    pub name: String,
    pub seconds: f64,
    pub share: f64,
}

/// Parts of `whole`, the largest first; what takes no time is left out.
fn shares<'a>(parts: impl Iterator<Item = (&'a str, f64)>, whole: f64) -> Vec<Share> {
    let mut all: Vec<Share> = parts
        .filter(|(_, s)| *s > 0.0)
        .map(|(name, seconds)| Share { name: name.into(), seconds, share: seconds / whole })
        .collect();
    all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    all
}

/// Bytes of one rank.
#[derive(Debug, Clone, Serialize)]
pub struct Memory {
    /// By kind of tensor, at the moment at which most are alive.
    pub at_the_fullest: Vec<(&'static str, u64)>,
    /// What the placement could not squeeze out.
    pub gaps: u64,
    pub plan: u64,
    /// Of the host's memory, for one rank.
    pub host: u64,
    /// What a library that carries rows to experts sets aside, outside the plan, and which one that is.
    pub buffers: u64,
    pub buffers_of: &'static str,
    pub reserved: u64,
    pub capacity: u64,
}

impl Memory {
    pub fn needed(&self) -> u64 {
        self.plan + self.buffers + self.reserved
    }
}

/// One configuration, explained. All times are means over the ranks, in seconds.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub row: Row,
    /// All that are trained, those of modules of multi-token prediction too; none of an attention alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<u64>,
    /// Of these, those that one token meets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub active_weights: Option<u64>,
    pub gpu: String,
    pub dtype: String,
    /// Hash of the plan.
    pub plan: String,
    pub interval_95_s: [f64; 2],
    pub interval_rests_on: &'static str,
    /// How published runs on such GPUs and of such models came out, by software, in measured over predicted steps.
    pub record: Vec<record::Line>,
    /// The same of peaks of memory.
    pub memory_record: Vec<record::Line>,
    /// Time of the compute lane by kernel, as if alone on the device.
    pub kernels: Vec<Share>,
    /// Time that kernels lost to communication kernels on the same SMs.
    pub slowed_s: f64,
    /// Time the compute lane waited for kernels of other ranks.
    pub others_s: f64,
    /// Time the compute lane waited for copies to or from the host's memory, or for the CPU's kernels.
    pub offload_s: f64,
    /// Time these were busy, hidden or not.
    pub offload_busy_s: f64,
    /// Time the compute lane waited, by axis.
    pub exposed: Vec<Share>,
    /// Time the communication lanes were busy, hidden or not, by axis; lanes may overlap.
    pub communication_busy: Vec<Share>,
    pub memory: Memory,
    /// How the times of kernels and links are known.
    pub provenance: Vec<Share>,
    pub model_flops_per_gpu: f64,
    pub executed_flops_per_gpu: f64,
    pub peak_flops_per_s: f64,
    /// What was chosen where nothing was said, and what the model's file states that no plan has: a line each.
    pub notes: Vec<String>,
    /// Of a run of so many tokens, where one was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub training: Option<Training>,
}

/// A whole training run of one step after the other, if nothing ever fails.
#[derive(Debug, Clone, Serialize)]
pub struct Training {
    pub tokens: f64,
    /// The last one may be cut short.
    pub steps: f64,
    pub time_s: f64,
    pub gpu_hours: f64,
}

impl Training {
    /// None where the step has no time.
    pub fn of(tokens: f64, row: &Row) -> Option<Training> {
        let steps = (tokens / (row.global_batch as f64 * row.seq_len as f64)).ceil();
        let time_s = steps * row.step_time_s?;
        Some(Training { tokens, steps, time_s, gpu_hours: time_s / 3600.0 * f64::from(row.gpus) })
    }
}

/// As [`Usage::spread`](crate::timeline::Usage::spread) counts it.
const INTERVAL_RESTS_ON: &str =
    "the spread of the calibration, of kernels and of exposed communication, each erring together";

/// The 95 % interval of a normal distribution; times are not negative.
fn interval(mean: f64, sd: f64) -> [f64; 2] {
    let half = Normal::standard().inverse_cdf(0.975) * sd;
    [(mean - half).max(0.0), mean + half]
}
