//! A line of rows.csv. Others script against the names and the order of the columns.

use super::human;
use crate::cluster::Cluster;
use crate::collective::exchange::Aside;
use crate::error::{Cause, Error, Reason, Result};
use crate::plan::kernel::Family;
use crate::plan::memory::Footprint;
use crate::plan::{About, Axis, TensorKind};
use crate::spec::{Parallelism, Recompute, StackSpec};
use crate::timeline::{Timeline, Usage};
use serde::{Deserialize, Serialize};

/// What memory of a row is told by, beside its layout: where it runs.
pub struct Place<'a> {
    /// What a library that carries rows sets aside, or why it does not.
    pub aside: &'a Result<Aside>,
    pub cluster: &'a Cluster,
    pub stack: &'a StackSpec,
    /// Memory of a GPU that is to be left free, bytes.
    pub headroom: f64,
}

/// One configuration. What is not known of an infeasible one is empty in CSV and null in JSON.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub model: String,
    pub cluster: String,
    pub stack: String,
    pub gpus: u32,
    pub seq_len: u64,
    /// Sequences of one step.
    pub global_batch: u64,
    pub micro_batch: u64,
    pub tp: u32,
    pub pp: u32,
    pub vp: u32,
    pub dp: u32,
    pub ulysses: u32,
    pub ring: u32,
    pub ep: u32,
    pub zero: u32,
    pub recompute: String,
    /// Choices of the implementation other than the default ones, joined by `+`.
    pub options: String,
    pub strategy: String,
    pub feasible: bool,
    /// Why it is not; of one that is and has no times, why it has none.
    pub why: Reason,
    pub step_time_s: Option<f64>,
    pub tokens_per_s_per_gpu: Option<f64>,
    pub mfu: Option<f64>,
    pub hfu: Option<f64>,
    /// `compute_s + exposed_comm_s + bubble_s + host_s` is the step; a mean over the ranks.
    pub compute_s: Option<f64>,
    /// The sum of the six columns that follow and `exposed_offload_s`.
    pub exposed_comm_s: Option<f64>,
    /// Of the pipeline, while bytes are under way; to wait for a stage that has not sent yet is `bubble_s`.
    pub exposed_pp_s: Option<f64>,
    pub exposed_dp_s: Option<f64>,
    pub exposed_cp_s: Option<f64>,
    pub exposed_up_s: Option<f64>,
    pub exposed_tp_s: Option<f64>,
    pub exposed_ep_s: Option<f64>,
    /// Waiting for other ranks: along the pipeline, of those that have more to do, or that end the step later.
    pub bubble_s: Option<f64>,
    /// Waiting for the CPU to issue the next op.
    pub host_s: Option<f64>,
    /// What the plan needs on one rank, without what the stack reserves and a library that carries rows sets aside.
    pub peak_mem_bytes: Option<u64>,
    /// The seven columns that follow add up to the peak: what is alive at its fullest moment, by kind, and
    /// gaps that placement leaves.
    pub mem_params_bytes: Option<u64>,
    pub mem_grads_bytes: Option<u64>,
    pub mem_optimizer_bytes: Option<u64>,
    pub mem_activations_bytes: Option<u64>,
    pub mem_workspace_bytes: Option<u64>,
    pub mem_comm_bytes: Option<u64>,
    pub mem_gaps_bytes: Option<u64>,
    /// What a plan may need: the GPU's memory less what the stack reserves and a library that carries rows sets aside.
    pub mem_room_bytes: Option<u64>,
    /// Sent by one rank in a step, a mean over the ranks.
    pub bytes_scale_up: Option<f64>,
    pub bytes_scale_out: Option<f64>,
    /// Share of kernel and link time that rests on measurements.
    pub measured_share: Option<f64>,
    /// In words, what most of the step goes to; and what share of the experts' rows is dropped, where any is.
    pub limit: String,
    /// Waiting for copies to or from the host's memory, or for the CPU's kernels; a part of `exposed_comm_s`.
    #[serde(default)]
    pub exposed_offload_s: Option<f64>,
    /// What the plan needs of the host's memory for one rank.
    #[serde(default)]
    pub host_mem_bytes: Option<u64>,
    /// Copied to and from the host's memory by one rank in a step, a mean over the ranks.
    #[serde(default)]
    pub bytes_host: Option<f64>,
}

impl Row {
    /// The columns that say what was asked.
    pub fn asked(about: &About, cluster: &Cluster, stack: &StackSpec) -> Row {
        Row {
            model: about.model.clone(),
            cluster: cluster.spec.name.clone(),
            stack: stack.name.clone(),
            gpus: cluster.gpus(),
            seq_len: about.seq_len,
            global_batch: about.global_batch,
            micro_batch: about.micro_batch,
            ..Row::default()
        }
        .with_parallelism(&about.par, &about.strategy)
    }

    /// Notes how the step is cut; `strategy` is [`Parallelism::strategy`].
    pub fn with_parallelism(self, par: &Parallelism, strategy: &str) -> Row {
        Row {
            tp: par.tp,
            pp: par.pp,
            vp: par.vp,
            dp: par.dp,
            ulysses: par.ulysses,
            ring: par.ring,
            ep: par.ep,
            zero: par.zero,
            recompute: par.recompute.name().into(),
            options: par.options.to_string(),
            strategy: strategy.into(),
            ..self
        }
    }

    /// How the step is cut. Words that are not understood are as good as unsaid.
    pub fn parallelism(&self) -> Parallelism {
        Parallelism {
            dp: self.dp,
            pp: self.pp,
            vp: self.vp,
            ring: self.ring,
            ulysses: self.ulysses,
            tp: self.tp,
            ep: self.ep,
            zero: self.zero,
            recompute: Recompute::named(&self.recompute).unwrap_or(Recompute::None),
            options: self.options.parse().unwrap_or_default(),
        }
    }

    /// Notes the memory of a rank, its parts, and with it whether the plan can run.
    pub fn set_layout(&mut self, layout: &Footprint, at: &Place) {
        self.set_parts(layout);
        self.set_memory([layout.bytes, layout.persisting()], at);
        self.set_host(layout.host_bytes, at.cluster);
        if let Err(refused) = at.aside {
            self.feasible = false;
            self.why = match refused {
                Error::Infeasible(why) => why.clone(),
                other => other.to_string().into(),
            };
        }
    }

    fn set_parts(&mut self, layout: &Footprint) {
        let of = |wanted: TensorKind| {
            Some(layout.live_by_kind.iter().filter(|(kind, _)| *kind == wanted).map(|(_, bytes)| bytes).sum())
        };
        self.mem_params_bytes = of(TensorKind::Param);
        self.mem_grads_bytes = of(TensorKind::Grad);
        self.mem_optimizer_bytes = of(TensorKind::OptState);
        self.mem_activations_bytes = of(TensorKind::Activation);
        self.mem_workspace_bytes = of(TensorKind::Workspace);
        self.mem_comm_bytes = of(TensorKind::CommBuffer);
        self.mem_gaps_bytes = Some(layout.gaps);
    }

    /// Notes what all ranks of a node need of its CPUs' memory, where it is known how much there is.
    fn set_host(&mut self, bytes: u64, cluster: &Cluster) {
        self.host_mem_bytes = Some(bytes);
        let ranks = cluster.gpus().min(cluster.per_node());
        let needed = bytes as f64 * f64::from(ranks);
        let Some(memory) = cluster.spec.host.as_ref().and_then(|host| host.memory.as_ref()) else { return };
        if self.feasible && needed > memory.value.value() {
            self.feasible = false;
            let [needed, all] = [needed, memory.value.value()].map(human::bytes);
            let why =
                format!("{ranks} ranks of a node need {needed} of the CPUs' {all}; offload less, or use more nodes");
            self.why = Reason::new(Cause::HostMemory, why);
        }
    }

    /// Notes the memory that a plan needs of a rank, `persisting` of it weights, gradients and optimizer state, and with it
    /// whether the plan can run.
    fn set_memory(&mut self, [plan, persisting]: [u64; 2], at: &Place) {
        let aside = at.aside.as_ref().copied().unwrap_or_default();
        let reserved = at.stack.reserved_memory.value.value();
        let beside = reserved + at.headroom + aside.buffers.total() as f64;
        let capacity = at.cluster.gpu.memory.value.value();
        let needed = plan as f64 + beside;
        self.peak_mem_bytes = Some(plan);
        self.mem_room_bytes = Some((capacity - beside).max(0.0) as u64);
        self.feasible = needed <= capacity;
        if self.feasible {
            self.why = Reason::default();
            return;
        }
        let buffers = match aside.buffers.total() {
            0 => String::new(),
            some => format!(" + {} buffers of {}", human::bytes(some as f64), aside.library),
        };
        let alone = match persisting as f64 > capacity - beside {
            true => format!("; weights, gradients and optimizer state alone are {}", human::bytes(persisting as f64)),
            false => String::new(),
        };
        let free = match at.headroom > 0.0 {
            true => format!(" + {} headroom", human::bytes(at.headroom)),
            false => String::new(),
        };
        let [needed, plan, reserved, capacity] = [needed, plan as f64, reserved, capacity].map(human::bytes);
        let why = format!("needs {needed} ({plan} plan{buffers} + {reserved} reserved{free}) of {capacity}{alone}");
        self.why = Reason::new(Cause::Memory, why);
    }

    /// Bytes of a rank's memory that its plan has too many, below 0 where some are left; none where nothing was laid out.
    pub fn over(&self) -> Option<f64> {
        Some(self.peak_mem_bytes? as f64 - self.mem_room_bytes? as f64)
    }

    /// Notes where the time goes.
    pub fn set_time(&mut self, timeline: &Timeline, model_flops: f64, peak: f64) {
        let usage = timeline.mean();
        let step = timeline.step.value();
        let gpus = f64::from(self.gpus);
        let exposed = |axes: &[Axis]| axes.iter().filter_map(|a| usage.exposed.get(a)).sum::<f64>();
        self.step_time_s = number(step);
        self.tokens_per_s_per_gpu = number(self.global_batch as f64 * self.seq_len as f64 / step / gpus);
        self.mfu = number(model_flops / gpus / step / peak);
        self.hfu = number(usage.flops / step / peak);
        self.compute_s = number(usage.compute);
        self.exposed_comm_s = number(usage.exposed_total() + usage.offload);
        self.exposed_pp_s = number(exposed(&[Axis::Pp]));
        self.exposed_dp_s = number(exposed(&[Axis::Dp, Axis::Edp, Axis::Shard]));
        self.exposed_cp_s = number(exposed(&[Axis::Cp]));
        self.exposed_up_s = number(exposed(&[Axis::Up]));
        self.exposed_tp_s = number(exposed(&[Axis::Tp]));
        self.exposed_ep_s = number(exposed(&[Axis::Ep]));
        self.bubble_s = number(usage.bubble);
        self.host_s = number(usage.host);
        self.bytes_scale_up = number(usage.bytes_scale_up);
        self.bytes_scale_out = number(usage.bytes_scale_out);
        self.measured_share = number(measured_share(&usage));
        self.limit = limit(&usage, step);
        self.exposed_offload_s = number(usage.offload);
        self.bytes_host = number(usage.bytes_host);
    }

    /// Says that rows are dropped, which a way without would not gain from.
    pub fn set_dropped(&mut self, share: f64) {
        if share > 0.0 {
            self.limit.push_str(&format!("; {} of experts' rows dropped", human::percent(share)));
        }
    }
}

/// Twelve digits: enough for picoseconds, and free of the noise of the order in which things were added.
fn number(value: f64) -> Option<f64> {
    // An empty sum is -0.
    format!("{:.11e}", value + 0.0).parse().ok().filter(|v: &f64| v.is_finite())
}

fn measured_share(usage: &Usage) -> f64 {
    let all: f64 = usage.by_provenance.values().sum();
    let known: f64 = ["measured", "interpolated"].iter().filter_map(|p| usage.by_provenance.get(p)).sum();
    if all > 0.0 { known / all } else { 0.0 }
}

/// What a step is made of, in s: kernels by kind, what they lose and what they wait for.
fn parts(usage: &Usage) -> Vec<(String, f64)> {
    let mut gemm = 0.0;
    let mut attention = 0.0;
    let mut rest = 0.0;
    for (kernel, s) in &usage.by_kernel {
        *match Family::of(kernel) {
            Family::Product | Family::HeadProduct => &mut gemm,
            Family::Attention | Family::AttentionBwd => &mut attention,
            Family::Other => &mut rest,
        } += s;
    }
    let slowed = usage.compute - gemm - attention - rest;
    let mut parts = vec![
        ("compute: gemm".to_string(), gemm),
        ("compute: attention".into(), attention),
        ("compute: memory-bound kernels".into(), rest),
        ("communication: SMs taken from compute".into(), slowed),
    ];
    parts.push(("bubble: waiting for other ranks".into(), usage.bubble));
    parts.push(("offload: copies and the CPU's kernels".into(), usage.offload));
    parts.push(("host: CPU issues ops too slowly".into(), usage.host));
    parts.extend(usage.exposed.iter().map(|(axis, s)| (format!("communication: {} exposed", axis.name()), *s)));
    parts
}

/// What takes the largest part of the step, e.g. `compute: attention 58 %` or `communication: cp exposed 31 %`.
pub fn limit(usage: &Usage, step: f64) -> String {
    let most = parts(usage).into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
    most.map_or(String::new(), |(what, s)| format!("{what} {:.0} %", 100.0 * s / step))
}

/// All that takes at least half a percent of the step, the largest first, as [`limit`] says it.
pub fn made_of(usage: &Usage, step: f64) -> String {
    let mut parts = parts(usage);
    parts.retain(|(_, s)| *s >= 0.005 * step);
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let words = parts.iter().map(|(what, s)| format!("{what} {:.0} %", 100.0 * s / step));
    words.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::Class;
    use crate::units::Seconds;
    use std::collections::BTreeMap;

    fn usage() -> Usage {
        Usage {
            compute: 7.0,
            exposed: BTreeMap::from([(Axis::Cp, 2.0), (Axis::Dp, 0.5), (Axis::Pp, 0.5)]),
            by_kernel: BTreeMap::from([
                ("attention_onto", 2.0),
                ("attention_bwd", 1.5),
                ("matmul", 3.0),
                ("norm", 0.3),
            ]),
            by_provenance: BTreeMap::from([("measured", 1.0), ("interpolated", 2.0), ("assumed", 1.0)]),
            flops: 40.0,
            ..Usage::default()
        }
    }

    fn filled() -> Row {
        let class = |rank, multiplicity| Class { rank, multiplicity, usage: usage(), spans: vec![] };
        let timeline = Timeline { step: Seconds::new(10.0), classes: vec![class(0, 1), class(1, 3)], lanes: vec![] };
        let mut row = Row { gpus: 4, seq_len: 8, global_batch: 10, ..Row::default() };
        row.set_time(&timeline, 100.0, 5.0);
        row
    }

    #[test]
    fn columns_keep_their_order() {
        let mut csv = csv::Writer::from_writer(vec![]);
        csv.serialize(Row::default()).unwrap();
        let text = String::from_utf8(csv.into_inner().unwrap()).unwrap();
        let head = "model,cluster,stack,gpus,seq_len,global_batch,micro_batch,tp,pp,vp,dp,ulysses,ring,ep,zero,recompute,\
                    options,strategy,feasible,why,step_time_s,tokens_per_s_per_gpu,mfu,hfu,compute_s,exposed_comm_s,\
                    exposed_pp_s,exposed_dp_s,exposed_cp_s,exposed_up_s,exposed_tp_s,exposed_ep_s,bubble_s,host_s,\
                    peak_mem_bytes,mem_params_bytes,mem_grads_bytes,mem_optimizer_bytes,mem_activations_bytes,\
                    mem_workspace_bytes,mem_comm_bytes,mem_gaps_bytes,mem_room_bytes,bytes_scale_up,bytes_scale_out,measured_share,limit,\
                    exposed_offload_s,host_mem_bytes,bytes_host";
        assert_eq!(text.lines().next().unwrap(), head);
        assert_eq!(
            csv::Reader::from_reader(text.as_bytes()).deserialize::<Row>().next().unwrap().unwrap(),
            Row::default()
        );
    }

    #[test]
    fn parts_of_the_step_add_up() {
        let row = filled();
        let sum = row.compute_s.unwrap() + row.exposed_comm_s.unwrap() + row.bubble_s.unwrap() + row.host_s.unwrap();
        assert_eq!(sum, row.step_time_s.unwrap());
        let axes = [
            row.exposed_pp_s,
            row.exposed_dp_s,
            row.exposed_cp_s,
            row.exposed_up_s,
            row.exposed_tp_s,
            row.exposed_ep_s,
            row.exposed_offload_s,
        ];
        assert_eq!(axes.iter().flatten().sum::<f64>(), row.exposed_comm_s.unwrap());
        assert_eq!((row.mfu, row.hfu), (Some(0.5), Some(0.8)));
        assert_eq!((row.tokens_per_s_per_gpu, row.measured_share), (Some(2.0), Some(0.75)));
    }

    /// Whosever they are, gradients and weights are waited for in one column, and experts' rows in another.
    #[test]
    fn gradients_of_experts_are_gradients() {
        let exposed = BTreeMap::from([(Axis::Dp, 0.5), (Axis::Edp, 0.25), (Axis::Ep, 2.0)]);
        let class = Class { rank: 0, multiplicity: 1, usage: Usage { exposed, ..usage() }, spans: vec![] };
        let mut row = Row { gpus: 1, ..Row::default() };
        row.set_time(&Timeline { step: Seconds::new(10.0), classes: vec![class], lanes: vec![] }, 100.0, 5.0);
        assert_eq!((row.exposed_dp_s, row.exposed_ep_s), (Some(0.75), Some(2.0)));
    }

    #[test]
    fn the_largest_part_is_the_limit() {
        assert_eq!(filled().limit, "compute: attention 35 %");
        let mut usage = usage();
        usage.exposed.insert(Axis::Cp, 5.0);
        assert_eq!(limit(&usage, 13.0), "communication: cp exposed 38 %");
        assert!(made_of(&usage, 13.0).starts_with("communication: cp exposed 38 %; "), "{}", made_of(&usage, 13.0));
        // What is less than half a percent is left out.
        assert_eq!(made_of(&usage, 1e6), "");
    }

    #[test]
    fn products_of_heads_are_products() {
        let mut usage = usage();
        usage.by_kernel.extend(["scores", "values", "kv_bwd"].map(|kernel| (kernel, 1.5)));
        usage.compute += 4.5;
        assert_eq!(limit(&usage, 15.0), "compute: gemm 50 %");
    }

    #[test]
    fn rows_that_are_dropped_are_said() {
        let mut row = filled();
        row.set_dropped(0.0);
        assert_eq!(row, filled());
        row.set_dropped(0.25);
        assert_eq!(row.limit, "compute: attention 35 %; 25.0 % of experts' rows dropped");
    }
}
