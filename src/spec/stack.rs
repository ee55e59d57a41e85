//! What software brings: which attention kernel, and what the communication library takes for itself.

use super::curves::CURVES;
use super::gpu::Maker;
use super::{Found, GpuSpec, LlmSpec, Origin, Sourced, check_ratio, find, meant, read};
use crate::error::{Error, Result, text};
use crate::units::{Bytes, BytesPerSec, Seconds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Constants, each one that a microbenchmark or a count could tell.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StackSpec {
    pub name: String,
    /// Whose devices it runs on; none: it is not said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maker: Option<Maker>,
    /// The curve of the GPU's `attention` table, or `unfused`: products and a softmax, with scores in memory.
    pub attention_kernel: Sourced<String>,
    /// The largest head dim that this kernel is written for, of queries and keys; none: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub widest_head: Option<Sourced<u64>>,
    /// CPU time to issue one op of a plan, however many calls of the framework that takes: a device whose
    /// kernels are shorter runs dry.
    pub host_launch: Sourced<Seconds>,
    /// How many times as long an op takes it whose calls are written in Python, forward kernels and communication; none: as
    /// long as one of the backward pass, which frameworks go through in C++.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forward_launches: Option<Sourced<u32>>,
    /// Kernels that the framework runs for one op of a plan, on average, each behind the GPU's gap between two; none: one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernels_per_op: Option<Sourced<f64>>,
    /// Device memory that no tensor gets: context, communicator buffers, fragmentation.
    pub reserved_memory: Sourced<Bytes>,
    /// Thread blocks of one collective, at most; 0: engines beside the SMs move the bytes, of sends, too, and kernels miss none.
    pub collective_ctas: Sourced<u32>,
    /// Thread blocks of one send and receive, at most.
    pub p2p_ctas: Sourced<u32>,
    /// What a send and receive take beyond the start and the latency of the links, both ends counted.
    pub p2p_latency: Sourced<Seconds>,
    /// What sends between nodes reach of a GPU's part of the wire, where the library's settings for them are tuned; none: what
    /// the cluster's file says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tuned_sends: Option<Sourced<f64>>,
    /// What the steps of a collective between nodes take of those that were fitted for NCCL: 1 where they are its own.
    pub collective_latency: Sourced<f64>,
    /// Bus bandwidth that trees over several nodes have for large messages, at most (by the Simple protocol); none: what links
    /// and NICs let through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree_rate: Option<Sourced<BytesPerSec>>,
    /// The library is from before NCCL 2.23, which brought parallel aggregated trees; none: it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_pat: Option<Sourced<bool>>,
    /// CPU time of one forward call of the attention kernel by its library's own function: called over and over by itself, it
    /// takes no less. None: not known to be longer than any kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_call: Option<Sourced<Seconds>>,
    /// What the kernels of a state-space scan reach of the rate of those that memory bounds, but for states, which reach all
    /// of it; none: all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan: Option<Sourced<f64>>,
    /// What each further expert of a rank adds to a product of experts, where a library has kernels of its own for each
    /// of them; none where one kernel takes all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_start: Option<Sourced<Seconds>>,
    /// What kernels of a framework without fusion move through memory, over what one fused kernel moves: by the name of
    /// a kernel's curve; none: all are fused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfused: Option<Sourced<BTreeMap<String, f64>>>,
    /// What the framework keeps of a kernel from the forward to the backward pass beside what it writes, over the bytes of
    /// that: by the name of a kernel; none: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Sourced<BTreeMap<String, f64>>>,
    /// SMs that products are kept off, whether a communication kernel is on them or not: those of persistent kernels
    /// whose grid leaves room for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_sms: Option<Sourced<u32>>,
    /// How many times longer kernels take than the GPU's curves say: `cast`, which rounds operands to FP8,
    /// `weight_grad_fp8`, products of two operands that both have scales along what is summed over, and products of experts
    /// that are not in FP8 and the backward pass of a state-space scan, by the names of their curves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slower: Option<Sourced<BTreeMap<String, f64>>>,
}

/// Kernels that a stack may know to be slower.
const SLOWER: [&str; 6] =
    ["cast", "weight_grad_fp8", "grouped_matmul", "grouped_matmul_dx", "grouped_matmul_dw", "ssm_scan_bwd"];

/// Kernels of which a framework may keep more than a plan does.
const KEPT: [&str; 4] = ["norm", "head_norm", "swiglu", "gelu"];

/// What GPT-OSS's experts move through memory in Megatron Core, over one fused kernel: its clamp and the bias of the second
/// product are operators of PyTorch around the fused gate (github:NVIDIA/Megatron-LM, megatron/core/fusions/
/// fused_bias_geglu.py `weighted_bias_quick_geglu_impl`, and `_apply_bias` of TEGroupedMLP in
/// megatron/core/transformer/moe/experts.py). Bytes of an element, in bf16; probabilities, and what they are multiplied
/// with, are fp32:
/// forward, the gate 6; both halves clamped 8, put together again 8; bias times probability 4, the sum of that and the rows
/// 10, put together 8, rounded 6: 50 of 6.
/// Backward, the gate 10; masks of both clamps and what they let through 21, put together 8; to fp32 6, and back 6; the
/// gradients of bias and probability, each a product and a sum, 24; put together 4: 79 of 10. All but the gate takes
/// `STRIDED` times as long.
pub const CLAMPED_EXPERTS: [(&str, f64); 2] =
    [("expert_swiglu", (6.0 + 44.0 * STRIDED) / 6.0), ("expert_swiglu_bwd", (10.0 + 69.0 * STRIDED) / 10.0)];

/// The same backward where the gate is made again: 6, and both halves clamped and put together 16.
pub const CLAMPED_EXPERTS_AGAIN: f64 = (10.0 + 69.0 * STRIDED + 6.0 + 16.0 * STRIDED) / 10.0;

/// How many times as long PyTorch's operators take over halves of rows and over numbers that stand for whole rows, which they do
/// not read many at a time. Fitted on GPT-OSS 120B in bf16 on 64 GB300 and H100 (Megatron-Bridge 25.11 to 26.04, some of which are in
/// traces/published/mixtures.json): what was missing of a layer took as long as these bytes, 3.3 ms for 16K tokens at 8 TB/s and
/// 2.1 for 4K at 3.35.
const STRIDED: f64 = 2.0;

impl StackSpec {
    /// Whether the library has parallel aggregated trees: NCCL has, others not, or not unless they are told to (RCCL).
    pub fn has_pat(&self) -> bool {
        self.maker == Some(Maker::Nvidia) && !self.no_pat.as_ref().is_some_and(|no| no.value)
    }

    /// A shipped stack by name, or a file by path.
    pub fn find(name: &str) -> Result<StackSpec> {
        StackSpec::from_found(&find("stack", name)?)
    }

    /// The same for a GPU.
    ///
    /// Errors: libraries of another maker; kernels of communication that take more thread blocks than the GPU has SMs, or none. Cores of NPUs, TPUs and CPUs are
    /// none, and are not counted; their DMA engines may move the bytes.
    pub fn find_for(name: &str, gpu: &GpuSpec) -> Result<StackSpec> {
        let found = find("stack", name)?;
        let spec = StackSpec::from_found(&found)?;
        spec.check_maker(&found.file, gpu)?;
        let all = gpu.sms.value;
        let counted = matches!(gpu.architecture.maker(), Maker::Nvidia | Maker::Amd);
        for (field, ctas) in [("collective_ctas", &spec.collective_ctas), ("p2p_ctas", &spec.p2p_ctas)] {
            if counted && !(1..=all).contains(&ctas.value) {
                let why = format!("{}: {} has {all} SMs; use 1 to {all}", ctas.value, gpu.name);
                return Err(Error::spec(&found.file, field, why));
            }
        }
        Ok(spec)
    }

    /// Errors: the stack, which stands in `file`, is for devices of another maker.
    pub fn check_maker(&self, file: &str, gpu: &GpuSpec) -> Result<()> {
        let own = gpu.architecture.maker();
        let Some(maker) = self.maker.filter(|maker| *maker != own) else { return Ok(()) };
        let why = format!(
            "{}: its libraries are not for {}, which is of maker {}; leave --stack out for what fits, or choose one",
            maker.name(),
            gpu.name,
            own.name()
        );
        Err(Error::spec(file, "maker", why))
    }

    pub fn load(path: impl AsRef<Path>) -> Result<StackSpec> {
        let path = path.as_ref();
        let text = text::spec(path)?;
        StackSpec::from_found(&Found { kind: "stack", file: path.display().to_string(), text })
    }

    /// The same stack with a CPU that takes so long for every op, forward or backward.
    pub fn issuing(self, host_launch: Sourced<Seconds>) -> StackSpec {
        StackSpec { host_launch, forward_launches: None, ..self }
    }

    /// How many kernels an op is, on average.
    pub fn kernels_of_op(&self) -> f64 {
        self.kernels_per_op.as_ref().map_or(1.0, |kernels| kernels.value)
    }

    /// Whether kernels of a curve are several here.
    pub fn is_unfused(&self, curve: &str) -> bool {
        self.unfused.as_ref().is_some_and(|unfused| unfused.value.contains_key(curve))
    }

    /// With what kernels of `model` move through memory beyond one fused kernel, whatever the stack fuses of others.
    pub fn for_model(mut self, model: &LlmSpec) -> StackSpec {
        if model.clamped_experts {
            let source =
                "experts with biases and a clamp, around the fused kernel of Megatron Core's GroupedMLP".into();
            let mut all = self.unfused.take().map_or_else(BTreeMap::new, |unfused| unfused.value);
            for (kernel, times) in CLAMPED_EXPERTS {
                all.entry(kernel.into()).or_insert(times);
            }
            self.unfused = Some(Sourced { value: all, source, provenance: Origin::Derived });
        }
        self
    }

    /// Attention is one kernel.
    pub fn fuses_attention(&self) -> bool {
        self.attention_kernel.value != "unfused"
    }

    fn from_found(found: &Found) -> Result<StackSpec> {
        let spec: StackSpec = read(found)?;
        let (collective, p2p) = (spec.collective_ctas.value, spec.p2p_ctas.value);
        for (field, ctas, least) in [("collective_ctas", collective, 0), ("p2p_ctas", p2p, 1)] {
            if !(least..=1024).contains(&ctas) {
                let why = format!("{ctas} is not a number of thread blocks ({least} to 1024)");
                return Err(Error::spec(&found.file, field, why));
            }
        }
        if let Some(scan) = spec.scan.as_ref().filter(|scan| !(scan.value > 0.0 && scan.value <= 1.0)) {
            let why =
                format!("{} is no share of the rate of kernels that memory bounds (above 0, at most 1)", scan.value);
            return Err(Error::spec(&found.file, "scan", why));
        }
        let times = spec.collective_latency.value;
        if !(0.01..=100.0).contains(&times) {
            let why = format!("{times} is no multiple of what steps of NCCL's collectives take (0.01 to 100)");
            return Err(Error::spec(&found.file, "collective_latency", why));
        }
        if let Some(times) = spec.forward_launches.as_ref().filter(|times| !(1..=100).contains(&times.value)) {
            let why = format!("{} is no number of times that an op takes longer (1 to 100)", times.value);
            return Err(Error::spec(&found.file, "forward_launches", why));
        }
        if let Some(part) = &spec.tuned_sends {
            check_ratio(&found.file, "tuned_sends", part.value)?;
        }
        if let Some(rate) = spec.tree_rate.as_ref().filter(|rate| !(1e8..=1e13).contains(&rate.value.value())) {
            let why =
                format!("{:.3e} bytes a second is no rate of trees over nodes (0.1 to 10000 GB/s)", rate.value.value());
            return Err(Error::spec(&found.file, "tree_rate", why));
        }
        if !(1.0..=100.0).contains(&spec.kernels_of_op()) {
            let why = format!("{} is no number of kernels that an op is (1 to 100)", spec.kernels_of_op());
            return Err(Error::spec(&found.file, "kernels_per_op", why));
        }
        for (kernel, passes) in spec.unfused.iter().flat_map(|unfused| &unfused.value) {
            let why = match CURVES.contains(&kernel.as_str()) {
                true if (1.0..=100.0).contains(passes) => continue,
                true => format!("{kernel}: {passes} is no multiple of what one fused kernel moves (1 to 100)"),
                false => match meant(kernel, CURVES).as_str() {
                    "" => format!("{kernel}: no kernel has a curve of this name; known are {}", CURVES.join(", ")),
                    meant => format!("{kernel}: no kernel has a curve of this name{meant}"),
                },
            };
            return Err(Error::spec(&found.file, "unfused", why));
        }
        let mut kept = spec.kept.iter().flat_map(|kept| &kept.value);
        let right = |kernel: &String, times: f64| KEPT.contains(&kernel.as_str()) && (0.0..=10.0).contains(&times);
        if let Some((kernel, times)) = kept.find(|(kernel, times)| !right(kernel, **times)) {
            let why =
                format!("{kernel}: {times}; give what is kept of {} over what they write (0 to 10)", KEPT.join(" or "));
            return Err(Error::spec(&found.file, "kept", why));
        }
        let right = |kernel: &String, times: f64| SLOWER.contains(&kernel.as_str()) && (1.0..=10.0).contains(&times);
        let mut slower = spec.slower.iter().flat_map(|slower| &slower.value);
        if let Some((kernel, times)) = slower.find(|(kernel, times)| !right(kernel, **times)) {
            let why = format!("{kernel}: {times}; give how many times longer {} take (1 to 10)", SLOWER.join(" or "));
            return Err(Error::spec(&found.file, "slower", why));
        }
        Ok(spec)
    }
}
