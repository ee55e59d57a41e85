//! `foretrain attention`: one attention operation over the ranks that share it, held against one GPU's kernel.

use super::Answer;
use super::flags::value::{count, degree, dtype};
use super::flags::{Implementation, JsonFile, Output, Platform, documents};
use crate::cluster::Cluster;
use crate::collective::exchange::Aside;
use crate::cost::{Effort, Machine, cost};
use crate::device::Roofline;
use crate::error::{Cause, Result};
use crate::plan::Plan;
use crate::plan::link::AtomTable;
use crate::plan::memory::Layout;
use crate::report::human::{Table, counted, decimal, percent, seconds};
use crate::report::{Costed, Report};
use crate::spec::{AttentionSpec, ClusterSpec, Documents, Dtype, GpuSpec, Mask, Options, Parallelism, Pass, StackSpec};
use crate::strategy::{Engines, attention_pass, guard};
use crate::sweep::case::default_dtype;
use crate::timeline::Timeline;
use crate::units::{FlopsPerSec, Seconds};
use clap::Args;
use serde::Serialize;

#[derive(Args)]
#[command(
    after_help = "Example: foretrain attention --heads 32 --kv-heads 8 --head-dim 128 --seq-len 64K --ring 8 --causal --pass fwd\n         \
                  foretrain attention --seq-len 1M --ring 4 --ulysses 8 --causal --pass bwd --cluster dgx-a100 --json"
)]
pub struct Flags {
    /// Query heads
    #[arg(long, value_name = "N", default_value_t = 32)]
    heads: u64,
    /// KV heads [default: as many as query heads]
    #[arg(long, value_name = "N")]
    kv_heads: Option<u64>,
    /// Width of a head
    #[arg(long, value_name = "N", default_value_t = 128)]
    head_dim: u64,
    /// Tokens of a whole sequence, e.g. 65536 or 64K
    #[arg(long, value_name = "N", value_parser = count, default_value = "64K")]
    seq_len: u64,
    /// Sequences at a time
    #[arg(long, value_name = "N", value_parser = count, default_value = "1")]
    batch: u64,
    /// Ring attention: ranks that share the sequence
    #[arg(long, visible_alias = "cp", value_name = "N", value_parser = degree, default_value = "1")]
    ring: u32,
    /// Ulysses: ranks that share the heads
    #[arg(long, value_name = "N", value_parser = degree, default_value = "1")]
    ulysses: u32,
    /// A query sees the keys up to its own; without, all of them
    #[arg(long)]
    causal: bool,
    /// A query sees only the last N of the keys up to its own
    #[arg(long, value_name = "N", value_parser = count, requires = "causal")]
    window: Option<u64>,
    /// Lengths of documents packed into each sequence, e.g. 16K,48K, or a file of them
    #[arg(long, value_name = "N,..", value_parser = documents)]
    documents: Option<Documents>,
    /// fwd, bwd or fwd+bwd; bwd alone finds what a forward pass would have kept
    #[arg(long, value_name = "PASS", value_parser = pass, default_value = "fwd")]
    pass: Pass,
    #[command(flatten)]
    implementation: Implementation,
    #[command(flatten)]
    platform: Platform,
    /// bf16, f32 or f64 [default: bf16 where the GPU has it]
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    dtype: Option<Dtype>,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    file: JsonFile,
}

fn pass(text: &str) -> std::result::Result<Pass, String> {
    Pass::named(text).ok_or_else(|| "write fwd, bwd or fwd+bwd".to_string())
}

pub fn run(flags: &Flags) -> Result<Answer> {
    let found = Bench::new(flags)?.found()?;
    let error = (!found.fits).then(|| Cause::Memory.infeasible("the operation alone does not fit; see its table"));
    Answer::with_error(found.render(), &found, error).also_to(flags.file.path())
}

/// What is asked for, and the machine for it.
struct Bench {
    spec: AttentionSpec,
    pass: Pass,
    par: Parallelism,
    cluster: ClusterSpec,
    gpu: GpuSpec,
    stack: StackSpec,
    kernels: Roofline,
    peak: FlopsPerSec,
}

impl Bench {
    fn new(flags: &Flags) -> Result<Bench> {
        let (cluster, gpu) = flags.platform.specs()?;
        let stack = StackSpec::find_for(flags.platform.stack.on(&gpu), &gpu)?;
        let kernels = Roofline::new(&gpu, &stack)?;
        let spec = AttentionSpec {
            batch: flags.batch,
            seq_len: flags.seq_len,
            heads: flags.heads,
            kv_heads: flags.kv_heads.unwrap_or(flags.heads),
            head_dim: flags.head_dim,
            mask: Mask {
                window: flags.window,
                documents: flags.documents.clone().unwrap_or_default().filling(flags.seq_len),
                ..Mask::new(flags.causal)
            },
            dtype: flags.dtype.unwrap_or_else(|| default_dtype(&gpu)),
        };
        let (ring, ulysses) = (flags.ring, flags.ulysses);
        let options = flags.implementation.options.unwrap_or_default();
        let par = Parallelism { ring, ulysses, options, ..Parallelism::default() };
        guard::attention(&spec, &par)?;
        kernels.runs(options, spec.dtype, spec.head_dim)?;
        let peak = kernels.peak(spec.dtype)?;
        kernels.peak(spec.acc())?;
        Ok(Bench { spec, pass: flags.pass, par, cluster, gpu, stack, kernels, peak })
    }

    fn cost(&self, plan: &Plan) -> Result<(Cluster, Timeline)> {
        let cluster = Cluster::new(&self.cluster, &self.gpu, plan.ranks())?;
        let machine = Machine { cluster: &cluster, stack: &self.stack, kernels: &self.kernels, devices: None };
        let timeline = cost(plan, machine, Effort::SUMS)?;
        Ok((cluster, timeline))
    }

    fn plan(&self, spec: &AttentionSpec, par: &Parallelism) -> Result<Plan> {
        attention_pass::build(spec, self.pass, par, Engines::of(&self.stack, &self.cluster))
    }

    /// Time of one GPU on `tokens` of every sequence.
    fn alone(&self, tokens: u64) -> Result<Seconds> {
        // Documents may be longer than a rank's share; one is as good a sequence as any.
        let whole = tokens == self.spec.seq_len;
        let documents = if whole { self.spec.mask.documents.clone() } else { Documents::default() };
        let mask = Mask { documents, ..self.spec.mask.clone() };
        let spec = AttentionSpec { seq_len: tokens, mask, ..self.spec.clone() };
        // A stack without a fused kernel has none on one GPU either.
        let options = Options { unfused: self.par.options.unfused, ..Options::default() };
        let one = Parallelism { options, ..Parallelism::default() };
        Ok(self.cost(&self.plan(&spec, &one)?)?.1.step)
    }

    fn found(&self) -> Result<Found> {
        let plan = self.plan(&self.spec, &self.par)?;
        let layout = Layout::new(&plan, &AtomTable::new(&plan)?, 0)?;
        let (cluster, timeline) = self.cost(&plan)?;
        let (stack, peak) = (&self.stack, self.peak);
        let aside = Ok(Aside::default());
        let report =
            Costed { plan: &plan, cluster: &cluster, stack, layout: &layout, aside, timeline: &timeline, peak }
                .report();
        let ranks = f64::from(plan.ranks());
        let whole = self.alone(self.spec.seq_len)?.value();
        let time = timeline.step.value();
        Ok(Found {
            attention: self.spec.clone(),
            pass: self.pass.name(),
            ring: self.par.ring,
            ulysses: self.par.ulysses,
            options: self.par.options,
            cluster: self.cluster.name.clone(),
            stack: self.stack.name.clone(),
            gpus: plan.ranks(),
            time_s: time,
            flops: self.spec.flops(self.pass),
            flops_per_s_per_gpu: self.spec.flops(self.pass) / ranks / time,
            one_gpu_s: whole,
            ideal_s: whole / ranks,
            efficiency: whole / ranks / time,
            own_tokens_s: self.alone(self.spec.seq_len / u64::from(plan.ranks()))?.value(),
            fits: report.memory.needed() <= report.memory.capacity,
            report,
        })
    }
}

#[derive(Serialize)]
struct Found {
    attention: AttentionSpec,
    pass: &'static str,
    ring: u32,
    ulysses: u32,
    options: Options,
    cluster: String,
    stack: String,
    gpus: u32,
    time_s: f64,
    /// Forward 4 b s^2 a d, half of it under a causal mask; backward 2.5 times as many.
    flops: f64,
    flops_per_s_per_gpu: f64,
    /// One GPU with the whole operation, and its equal share of that.
    one_gpu_s: f64,
    ideal_s: f64,
    efficiency: f64,
    /// One GPU with as many tokens as each has here: the comparison that misleads.
    own_tokens_s: f64,
    fits: bool,
    #[serde(serialize_with = "parts")]
    report: Report,
}

/// What a report says about one operation; the columns of a training step say nothing here.
fn parts<S: serde::Serializer>(r: &Report, s: S) -> std::result::Result<S::Ok, S::Error> {
    serde_json::json!({
        "interval_95_s": r.interval_95_s,
        "limit": r.row.limit,
        "kernels": r.kernels,
        "slowed_s": r.slowed_s,
        "others_s": r.others_s,
        "host_s": r.row.host_s,
        "exposed": r.exposed,
        "communication_busy": r.communication_busy,
        "bytes_scale_up": r.row.bytes_scale_up,
        "bytes_scale_out": r.row.bytes_scale_out,
        "memory": r.memory,
        "provenance": r.provenance,
    })
    .serialize(s)
}

/// The mask in words.
fn masked(mask: &Mask) -> String {
    let mut words = vec![if mask.causal { "causal" } else { "full" }.to_string()];
    words.extend(mask.window.map(|w| format!("window {w}")));
    let documents = mask.documents.lengths().len();
    words.extend((documents > 0).then(|| format!("{documents} documents")));
    words.join(", ")
}

impl Found {
    fn render(&self) -> String {
        let r = &self.report;
        [self.headline(), r.time(), r.communication(), r.memory_table(), r.rests_on()].join("\n")
    }

    fn headline(&self) -> String {
        let a = &self.attention;
        let mut text = format!(
            "{} of attention, {} heads x {}, {} KV heads, {} x {} tokens, {}, {}\n\
             ring {} x ulysses {} ({}) on {} of {} ({}), stack {}\n\n",
            self.pass,
            a.heads,
            a.head_dim,
            a.kv_heads,
            a.batch,
            a.seq_len,
            masked(&a.mask),
            a.dtype.name(),
            self.ring,
            self.ulysses,
            self.options,
            counted(self.gpus, "GPU"),
            self.cluster,
            self.report.gpu,
            self.stack
        );
        let mut table = Table::new("<<<");
        table.row(["time", &seconds(self.time_s), &self.report.interval()]);
        let flops = "on each GPU; visible pairs counted, a backward pass 2.5 times a forward pass";
        table.row(["rate", &decimal(self.flops_per_s_per_gpu, "FLOP/s"), flops]);
        let ideal =
            format!("of {}, an equal share of the {} of one GPU", seconds(self.ideal_s), seconds(self.one_gpu_s));
        table.row(["efficiency", &percent(self.efficiency), &ideal]);
        if self.gpus > 1 && a.mask.window.is_none() && a.mask.documents.is_empty() {
            let share =
                format!("one GPU, {} tokens: 1/{} of a rank's work here", a.seq_len / u64::from(self.gpus), self.gpus);
            table.row(["not to compare", &seconds(self.own_tokens_s), &share]);
        }
        table.row(["limit", &self.report.row.limit]);
        text.push_str(&table.render("  "));
        text
    }
}
