//! A device: what it can do at best, and how much of that kernels reach.

use super::{Found, Sourced, check_positive, check_ratio, check_spread, find, read};
use crate::error::{Error, Result, text};
use crate::units::{Bytes, BytesPerSec, FlopsPerSec, Seconds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Which of NCCL's tables and kernels apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// V100, which has no bf16: what is said of bf16 is fp16's.
    Volta,
    /// T4 and its kin, of which the same holds.
    Turing,
    Ampere,
    Ada,
    Hopper,
    Blackwell,
    /// AMD's MI100.
    Cdna1,
    /// AMD's MI200.
    Cdna2,
    /// AMD's MI300.
    Cdna3,
    /// AMD's MI350.
    Cdna4,
    Tpu,
    /// Accelerators of other makers: Gaudi, Ascend.
    Npu,
    Cpu,
}

/// Who makes devices, and the libraries that run on no others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Maker {
    Nvidia,
    Amd,
    Google,
    /// Of accelerators that are none of these: Gaudi, Ascend.
    Npu,
    Cpu,
}

impl Maker {
    pub fn name(self) -> &'static str {
        match self {
            Maker::Nvidia => "nvidia",
            Maker::Amd => "amd",
            Maker::Google => "google",
            Maker::Npu => "npu",
            Maker::Cpu => "cpu",
        }
    }
}

impl Architecture {
    /// As files have it.
    pub fn name(self) -> String {
        serde_json::to_value(self).ok().and_then(|name| name.as_str().map(String::from)).unwrap_or_default()
    }

    pub fn maker(self) -> Maker {
        match self {
            Architecture::Volta
            | Architecture::Turing
            | Architecture::Ampere
            | Architecture::Ada
            | Architecture::Hopper
            | Architecture::Blackwell => Maker::Nvidia,
            Architecture::Cdna1 | Architecture::Cdna2 | Architecture::Cdna3 | Architecture::Cdna4 => Maker::Amd,
            Architecture::Tpu => Maker::Google,
            Architecture::Npu => Maker::Npu,
            Architecture::Cpu => Maker::Cpu,
        }
    }
}

/// Names of the dtypes a peak can be given for.
const DTYPES: &[&str] = &["f64", "f32", "bf16", "fp8", "fp4"];

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuSpec {
    pub name: String,
    pub architecture: Architecture,
    /// Dense peak of matrix products by dtype.
    pub peak: BTreeMap<String, Sourced<FlopsPerSec>>,
    pub memory: Sourced<Bytes>,
    pub memory_bandwidth: Sourced<BytesPerSec>,
    pub sms: Sourced<u32>,
    /// From one kernel to the next on a stream that is never empty.
    pub launch: Sourced<Seconds>,
    pub gemm: GemmCurve,
    /// By the name of the kernel, which a stack chooses.
    pub attention: BTreeMap<String, AttentionCurve>,
    pub memory_bound: MemoryCurve,
}

/// Matrix products; `device::gemm` says what the numbers mean.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GemmCurve {
    /// Rows and columns of the tiles of C that one SM computes at a time: those the library has kernels for.
    pub tiles: Vec<[u64; 2]>,
    /// Fraction of peak that SMs reach while their operands are there, one product after another; by dtype, and
    /// `other` for those that are not named.
    pub ceiling: BTreeMap<String, Sourced<f64>>,
    /// Part of that rate which products of real numbers keep for as long as a step takes, where the power limit lowers
    /// the clock below that of one product alone; by dtype, all of it where a dtype is not named.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sustained: BTreeMap<String, Sourced<f64>>,
    /// Part of its rate that a product keeps where rows of its matrices do not begin at multiples of 16 bytes: of a vocabulary
    /// of 50,257, say. All of it where none is given, as where a compiler fills matrices up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unaligned: Option<Sourced<f64>>,
    /// What the L2 cache, or what stands in its place, brings to all SMs together.
    pub operands: Sourced<BytesPerSec>,
    /// Fraction of the memory bandwidth at which a product reads its operands.
    pub stream: Sourced<f64>,
    /// Part of the time to store a tile that is not hidden behind products.
    pub store: Sourced<f64>,
    /// Relative standard deviation of prediction over measurement.
    pub rel_sd: Sourced<f64>,
}

impl GemmCurve {
    /// The ceiling of a dtype, by its name in the `peak` table.
    pub fn ceiling_of(&self, dtype: &str) -> &Sourced<f64> {
        self.ceiling.get(dtype).unwrap_or_else(|| &self.ceiling[OTHER])
    }

    /// What of the ceiling a dtype keeps under load.
    pub fn sustained_of(&self, dtype: &str) -> f64 {
        self.sustained.get(dtype).map_or(1.0, |part| part.value)
    }

    fn check(&self, file: &str) -> Result<()> {
        if self.tiles.is_empty() {
            return Err(Error::spec(file, "gemm.tiles", "empty; give the tiles of the library, as in [[128, 256]]"));
        }
        for tile in &self.tiles {
            check_positive(file, "gemm.tiles", tile[0].min(tile[1]) as f64)?;
        }
        if !self.ceiling.contains_key(OTHER) {
            return Err(Error::spec(file, "gemm.ceiling", format!("has no `{OTHER}`, which dtypes not named take")));
        }
        for (dtype, ceiling) in &self.ceiling {
            check_ratio(file, &format!("gemm.ceiling.{dtype}"), ceiling.value)?;
        }
        for (dtype, part) in &self.sustained {
            check_ratio(file, &format!("gemm.sustained.{dtype}"), part.value)?;
        }
        if let Some(part) = &self.unaligned {
            check_ratio(file, "gemm.unaligned", part.value)?;
        }
        check_positive(file, "gemm.operands", self.operands.value.value())?;
        check_ratio(file, "gemm.stream", self.stream.value)?;
        if self.store.value > 1.0 {
            let why = format!("{} is more than all of the time to store a tile; write at most 1", self.store.value);
            return Err(Error::spec(file, "gemm.store", why));
        }
        check_length(file, "gemm.store", self.store.value)
    }
}

/// Stands for all dtypes that a table does not name.
const OTHER: &str = "other";

/// One attention kernel, forward and backward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionCurve {
    /// Rows that one thread block owns.
    pub tile_rows: u64,
    /// Widths of heads that it is written for, ascending: what is narrower takes as long as the next of them. Absent
    /// where it is as wide as its heads, or that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dims: Option<Sourced<Vec<u64>>>,
    pub forward: PassCurve,
    pub backward: PassCurve,
    /// Relative standard deviation of prediction over measurement on the calibration set.
    pub rel_sd: Sourced<f64>,
}

impl AttentionCurve {
    /// The width that heads of `head_dim` are computed in.
    pub fn written_for(&self, head_dim: u64) -> u64 {
        let mut widths = self.head_dims.iter().flat_map(|dims| &dims.value).copied();
        widths.find(|&width| width >= head_dim).unwrap_or(head_dim)
    }
}

/// One pass: fraction of peak by head dim for long rows; a row visits `half` keys' worth of time besides
/// its own, and a diagonal crosses tiles of which `diagonal` keys a row are masked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PassCurve {
    /// (head dim, fraction of peak), ascending; between two of them by proportion.
    pub ceiling: Sourced<Vec<(u64, f64)>>,
    pub half: Sourced<f64>,
    pub diagonal: Sourced<f64>,
    /// Part of that rate which is left where a mask cuts a block, however long it is; absent where it is all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masked: Option<Sourced<f64>>,
    /// Thread blocks that an SM holds at a time, by the widest heads for which it does. Where they are given, tiles are
    /// handed out in the order of rows: those that start last have the most to do where a mask is causal, and on average
    /// SMs wait for half of the longest. Absent where a scheduler evens tiles out, or nothing is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident: Option<Sourced<Vec<(u64, u64)>>>,
    /// Part of that rate which is kept for as long as a step takes and while all GPUs of a node work, where the power
    /// limit lowers the clock below that of one kernel alone; absent where nothing is known of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sustained: Option<Sourced<f64>>,
}

/// Kernels that only move data: bytes / (bandwidth * fraction).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryCurve {
    pub fraction: Sourced<f64>,
    /// What kernels of a state-space scan reach of that rate here, in place of what a stack says of the GPU that it was
    /// measured on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scan: Option<Sourced<f64>>,
    /// Relative standard deviation of prediction over measurement.
    pub rel_sd: Sourced<f64>,
}

impl GpuSpec {
    /// A shipped GPU by name, or a file by path.
    pub fn find(name: &str) -> Result<GpuSpec> {
        GpuSpec::from_found(&find("gpu", name)?)
    }

    pub fn load(path: impl AsRef<Path>) -> Result<GpuSpec> {
        let path = path.as_ref();
        let text = text::spec(path)?;
        GpuSpec::from_found(&Found { kind: "gpu", file: path.display().to_string(), text })
    }

    fn from_found(found: &Found) -> Result<GpuSpec> {
        let spec: GpuSpec = read(found)?;
        spec.check(&found.file)?;
        Ok(spec)
    }

    fn check(&self, file: &str) -> Result<()> {
        for (dtype, peak) in &self.peak {
            if !DTYPES.contains(&dtype.as_str()) {
                let why = format!("`{dtype}` is not a dtype; known: {}", DTYPES.join(", "));
                return Err(Error::spec(file, "peak", why));
            }
            check_positive(file, &format!("peak.{dtype}"), peak.value.value())?;
        }
        check_positive(file, "memory", self.memory.value.value())?;
        check_positive(file, "memory_bandwidth", self.memory_bandwidth.value.value())?;
        check_positive(file, "sms", f64::from(self.sms.value))?;
        self.gemm.check(file)?;
        check_ratio(file, "memory_bound.fraction", self.memory_bound.fraction.value)?;
        let spreads =
            [("gemm.rel_sd", self.gemm.rel_sd.value), ("memory_bound.rel_sd", self.memory_bound.rel_sd.value)];
        let of_attention =
            self.attention.iter().map(|(name, curve)| (format!("attention.{name}.rel_sd"), curve.rel_sd.value));
        for (field, rel_sd) in spreads.map(|(field, sd)| (field.to_string(), sd)).into_iter().chain(of_attention) {
            check_spread(file, &field, rel_sd)?;
        }
        if let Some(scan) = &self.memory_bound.scan {
            check_ratio(file, "memory_bound.scan", scan.value)?;
        }
        for (name, curve) in &self.attention {
            check_positive(file, &format!("attention.{name}.tile_rows"), curve.tile_rows as f64)?;
            let widths = curve.head_dims.as_ref().map_or(&[][..], |dims| &dims.value);
            if widths.first() == Some(&0) || widths.windows(2).any(|w| w[0] >= w[1]) {
                let why = "the widths must be positive and ascend, as in [64, 96, 128]";
                return Err(Error::spec(file, format!("attention.{name}.head_dims"), why));
            }
            curve.forward.check(file, &format!("attention.{name}.forward"))?;
            curve.backward.check(file, &format!("attention.{name}.backward"))?;
        }
        Ok(())
    }
}

impl PassCurve {
    fn check(&self, file: &str, field: &str) -> Result<()> {
        let points = &self.ceiling.value;
        if points.is_empty() || points.windows(2).any(|w| w[0].0 >= w[1].0) {
            let why = "the head dims must be there and ascend, as in [[64, 0.5], [128, 0.6]]";
            return Err(Error::spec(file, format!("{field}.ceiling"), why));
        }
        for (_, ratio) in points {
            check_ratio(file, &format!("{field}.ceiling"), *ratio)?;
        }
        if let Some(part) = &self.sustained {
            check_ratio(file, &format!("{field}.sustained"), part.value)?;
        }
        if let Some(part) = &self.masked {
            check_ratio(file, &format!("{field}.masked"), part.value)?;
        }
        for (_, blocks) in self.resident.iter().flat_map(|r| &r.value) {
            check_positive(file, &format!("{field}.resident"), *blocks as f64)?;
        }
        check_length(file, &format!("{field}.half"), self.half.value)?;
        check_length(file, &format!("{field}.diagonal"), self.diagonal.value)
    }
}

fn check_length(file: &str, field: &str, value: f64) -> Result<()> {
    if value >= 0.0 && value.is_finite() {
        return Ok(());
    }
    Err(Error::spec(file, field, format!("{value} is negative or not finite; write 0 for no such effect")))
}
