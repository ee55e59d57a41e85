//! The profile of a machine: what `calibrate` measured there, and the kernel times that follow from it.

use super::curve::{Curve, size};
use super::speed::Speed;
use super::{Estimate, KernelTime, OnSms, grouped};
use crate::error::{Error, Result, json, text};
use crate::plan::{Dtype, Phase, Work, WorkClass};
use crate::spec::{Provenance, Throttle};
use crate::units::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The layout of the file; another number is another program's.
pub const FORMAT: u32 = 3;

/// Numbers that a measurement can be.
pub trait Known {
    fn known(&self) -> bool;
}

impl Known for f64 {
    fn known(&self) -> bool {
        self.is_finite() && *self > 0.0
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub foretrain_profile: u32,
    pub machine: MachineName,
    /// Year, month, day (UTC).
    pub date: String,
    pub command: String,
    pub provenance: String,
    /// Of a CPU, whose ranks are threads; a GPU has [`Profile::gpu`] instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<Threads>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuSide>,
    /// By [`curve`](crate::plan::Kernel::curve) and dtype, as `matmul_nt/f32`.
    pub kernels: BTreeMap<String, Curve>,
}

/// A GPU whose ranks, if there are several, take turns on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuSide {
    /// As the driver has it: `NVIDIA H200`.
    pub name: String,
    /// `sm_90a`
    pub arch: String,
    /// Copies inside its memory, by bytes: what a message between ranks on it takes. No link is in it.
    pub copy: Curve,
    /// From one of many empty kernels to the next.
    pub launch_s: f64,
    /// What the host takes to hand over a kernel with its events.
    pub host_launch_s: f64,
    /// From the end of a kernel of a stream to the start of the next, the host being ahead; profiles of before it was noted
    /// do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub op_gap_s: Option<f64>,
    /// How many times as long what clocks decide takes in steps without rest, when power and heat hold the clocks down, as on a
    /// GPU that rests between steps, which is what `kernels` are of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sustained: Option<f64>,
    /// What kernels draw without rest, and what becomes of them; profiles of before it was measured do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<Power>,
    /// Whose kernels did attention; profiles of before there was a choice do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention: Option<AttentionBy>,
    /// How much longer each takes while memory is copied beside it.
    pub beside_copies: Crowded,
    /// The same beside a copy by as many blocks of threads as NCCL takes for a message; no prediction reads it yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside_blocks: Option<BesideBlocks>,
    /// What NVML said meanwhile; empty where it is not there.
    pub conditions: Vec<Condition>,
}

impl GpuSide {
    /// Seconds from the end of a kernel to the start of the next, two events being recorded meanwhile.
    pub fn gap(&self) -> f64 {
        self.op_gap_s.unwrap_or(self.launch_s)
    }
}

/// A GPU's power.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Power {
    /// What it may draw in the long run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_w: Option<f64>,
    /// What it draws with nothing to do, its clocks up.
    pub idle_w: f64,
    pub pressed: Vec<Pressed>,
}

impl Power {
    /// All that must be above zero, by its field.
    fn numbers(&self) -> Vec<(String, f64)> {
        let mut all: Vec<(String, f64)> = vec![("gpu.power.idle_w".into(), self.idle_w)];
        all.extend(self.limit_w.map(|watts| ("gpu.power.limit_w".into(), watts)));
        for Pressed { what, watts, rate, ramp, .. } in &self.pressed {
            let at = format!("gpu.power.pressed.{what}");
            all.push((format!("{at}.watts"), *watts));
            all.extend(rate.map(|rate| (format!("{at}.rate"), rate)));
            all.extend(ramp.iter().flatten().map(|x| (format!("{at}.ramp"), *x)));
        }
        all
    }
}

/// A kernel that is launched again and again, behind a rest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pressed {
    /// `matmul`, `attention`, `attention_bwd` or `memory`
    pub what: String,
    pub kernel: String,
    /// In the long run.
    pub watts: f64,
    /// What it did in a second behind a rest: FLOPs, or bytes where memory decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// Seconds since the rest, and what a launch takes: the median from the entry before to that moment.
    pub ramp: Vec<[f64; 2]>,
    /// Clocks, temperature and power at the end, the GPU being at it, where NVML tells them: how much a kernel's length follows clocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub says: Option<String>,
}

/// Whose kernels did attention, and how fast each was that could have: [forward, backward] FLOP/s of a causal layer of 16,384
/// tokens, 32 heads and 8 of keys, 128 wide.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionBy {
    /// `"cuDNN 9.19.0"` or `"own kernels"`.
    pub by: String,
    /// None where it was not timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_flops_per_s: Option<[f64; 2]>,
    /// None where there is no library, or where it was not tried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub library_flops_per_s: Option<[f64; 2]>,
    /// Why it is not the library's, where it could have been.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// How much longer kernels take beside one that has some of the multiprocessors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BesideBlocks {
    pub blocks: u32,
    pub factors: Crowded,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Condition {
    pub when: String,
    /// Clocks, temperature, power, and what held the clocks down.
    pub says: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineName {
    pub cpu: String,
    pub cores: u32,
    pub system: String,
}

/// Ranks that are threads of one machine: each runs its kernels, copies its messages and sees to its own
/// communication, one after the other, and all share the cores.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Threads {
    pub cores: u32,
    /// From the end of an op of a rank to the start of the next.
    pub op_s: f64,
    /// From the moment a message is there to that when a thread that looks for it has seen it.
    pub notice_s: f64,
    /// The same of a thread that has given up looking, and sleeps.
    pub wake_s: f64,
    /// How long a thread looks before it sleeps.
    pub awake_s: f64,
    /// Messages while no other thread does anything.
    pub alone: Copies,
    /// What a rank's part of an exchange of rows takes, by [`exchange_key`], and by the rows and bytes that the rank
    /// handles; empty in a profile that has timed none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub exchanges: BTreeMap<String, Curve>,
    /// The same things while all cores do them at once.
    pub beside: Beside,
    /// How fast the machine was meanwhile: what tells a later, slower hour from an error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<Speed>,
    /// How slow the links are made, where they are; none of the machine's own properties.
    #[serde(skip)]
    pub throttle: Option<Throttle>,
}

/// What becomes of a message, by its bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Copies {
    /// Copying it out of memory and handing it over.
    pub post: Curve,
    /// Taking it and copying it into memory.
    pub take: Curve,
    /// Taking it and adding it to what is there.
    pub add: Curve,
}

/// Times while every core of the machine does the same: they share its memory and the caches in front of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Beside {
    pub copies: Copies,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub exchanges: BTreeMap<String, Curve>,
    /// By curve and dtype, as [`Profile::kernels`].
    pub kernels: BTreeMap<String, Curve>,
}

/// How much longer each takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Crowded {
    pub gemm: f64,
    pub attention: f64,
    pub memory: f64,
}

impl Crowded {
    pub fn of(&self, class: &WorkClass) -> f64 {
        match class {
            WorkClass::Gemm { .. } => self.gemm,
            WorkClass::Attention { .. } => self.attention,
            WorkClass::Memory | WorkClass::Scan { .. } => self.memory,
        }
    }
}

impl Profile {
    pub fn load(path: &Path) -> Result<Profile> {
        let text = text::data(path)?;
        let profile: Profile = json::parse(path.display(), &text).map_err(|e| match e {
            Error::Spec { file, field, why } => Error::spec(file, field, format!("{why}; {AGAIN}")),
            other => other,
        })?;
        profile.check(path)?;
        Ok(profile)
    }

    fn check(&self, path: &Path) -> Result<()> {
        let wrong = |field: &str, why: String| Err(Error::spec(path.display(), field, format!("{why}; {AGAIN}")));
        if self.foretrain_profile != FORMAT {
            let why = format!("{}; this version reads {FORMAT}", self.foretrain_profile);
            return wrong("foretrain_profile", why);
        }
        let mut numbers: Vec<(String, f64)> = vec![];
        let mut own: Vec<(String, &Curve)> = vec![];
        let crowds = |at: &str, c: &Crowded| {
            [("gemm", c.gemm), ("attention", c.attention), ("memory", c.memory)].map(|(x, f)| (format!("{at}.{x}"), f))
        };
        match (&self.threads, &self.gpu) {
            (Some(t), None) => {
                numbers.extend([
                    ("threads.cores".into(), f64::from(t.cores)),
                    ("threads.op_s".into(), t.op_s),
                    ("threads.notice_s".into(), t.notice_s),
                    ("threads.wake_s".into(), t.wake_s),
                    ("threads.awake_s".into(), t.awake_s),
                ]);
                let speed = t.speed.iter().flat_map(Speed::parts);
                numbers.extend(speed.map(|(name, x)| (format!("threads.speed.{name}.seconds"), x.seconds)));
                for (at, copies) in [("threads.alone", &t.alone), ("threads.beside.copies", &t.beside.copies)] {
                    let named = [("post", &copies.post), ("take", &copies.take), ("add", &copies.add)];
                    own.extend(named.map(|(name, curve)| (format!("{at}.{name}"), curve)));
                }
                for (at, curves) in [
                    ("exchanges", &t.exchanges),
                    ("beside.exchanges", &t.beside.exchanges),
                    ("beside.kernels", &t.beside.kernels),
                ] {
                    own.extend(curves.iter().map(|(name, curve)| (format!("threads.{at}.{name}"), curve)));
                }
            }
            (None, Some(g)) => {
                numbers.extend([("gpu.launch_s".into(), g.launch_s), ("gpu.host_launch_s".into(), g.host_launch_s)]);
                numbers.extend(g.op_gap_s.map(|s| ("gpu.op_gap_s".into(), s)));
                numbers.extend(g.sustained.map(|s| ("gpu.sustained".into(), s)));
                numbers.extend(crowds("gpu.beside_copies", &g.beside_copies));
                numbers.extend(g.power.iter().flat_map(Power::numbers));
                own.push(("gpu.copy".into(), &g.copy));
            }
            _ => return wrong("threads", "a profile has either `threads` or `gpu`".into()),
        }
        if let Some((field, x)) = numbers.iter().find(|(_, x)| !x.known()) {
            return wrong(field, format!("{x} is no positive number"));
        }
        let kernels = self.kernels.iter().map(|(name, curve)| (format!("kernels.{name}"), curve));
        for (name, curve) in own.into_iter().chain(kernels) {
            if let Some((field, why)) = curve.flaw() {
                return wrong(&format!("{name}.{field}"), why);
            }
        }
        Ok(())
    }

    /// How many times longer a kernel takes while all cores run the same; 1 for one that was never timed.
    pub fn crowded(&self, curve: &str, work: &Work, dtype: Dtype, cold: u64) -> f64 {
        let (name, size) = (key(curve, dtype), self.size(&one_of(curve, work).0, cold));
        let both = self.threads.as_ref().and_then(|t| Some((t.beside.kernels.get(&name)?, self.kernels.get(&name)?)));
        both.map_or(1.0, |(beside, alone)| slower(beside, alone, &size))
    }

    /// A part of a table is timed as the whole where a profile does not tell them apart, and so is a softmax whatever
    /// others fuse.
    fn curve(&self, curve: &str, dtype: Dtype) -> Option<&Curve> {
        let whole = || self.kernels.get(&key(curve.strip_suffix("_part").or(curve.strip_suffix("_apart"))?, dtype));
        self.kernels.get(&key(curve, dtype)).or_else(whole)
    }

    fn size(&self, work: &Work, cold: u64) -> Vec<f64> {
        let on_gpu = self.gpu.is_some();
        size(work, on_gpu, (!on_gpu).then_some(cold))
    }

    /// The worst kernel of its class stands in for one that was never timed.
    fn stand_in(&self, work: &Work, dtype: Dtype) -> Option<f64> {
        let suffix = format!("/{}", dtype.name());
        let backward = matches!(work.class, WorkClass::Attention { backward: true, .. });
        let like = |(name, curve): (&String, &Curve)| {
            let (one, times) = one_of(name, work);
            let like = self.size(&one, 0);
            let fits = name.ends_with(&suffix)
                && curve.fit.len() == terms_of(&like)
                && curve.points.iter().all(|point| point.size.len() == like.len())
                && (like.len() != 5 || name.contains("bwd") == backward);
            fits.then(|| curve.at(&like).0 * times as f64)
        };
        self.kernels.iter().filter_map(like).reduce(f64::max)
    }

    /// Dtypes that were timed.
    pub fn dtypes(&self) -> Vec<&str> {
        let mut all: Vec<&str> = self.kernels.keys().filter_map(|k| k.split('/').nth(1)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// One of several products, one behind the other, that are plain ones each, and how many they are; else all of the work.
fn one_of(curve: &str, work: &Work) -> (Work, u64) {
    match work.class {
        WorkClass::Gemm { m, n, k, cast, result, groups, unaligned, of_weights } if groups > 1 && is_plain(curve) => {
            let class = WorkClass::Gemm { m: m / groups, n, k, cast, result, groups: 1, unaligned, of_weights };
            (Work { flops: work.flops / groups, bytes: work.bytes / groups, class }, groups)
        }
        _ => (*work, 1),
    }
}

/// Whether a curve is of products of two matrices.
fn is_plain(curve: &str) -> bool {
    curve.starts_with("matmul")
}

/// How many times longer something takes beside others. It may be less than once: the two are of different plans, which
/// leave other things in the caches.
pub fn slower(beside: &Curve, alone: &Curve, size: &[f64]) -> f64 {
    (beside.at(size).0 / alone.at(size).0).clamp(0.5, 8.0)
}

fn terms_of(size: &[f64]) -> usize {
    match size.len() {
        1 => 2,
        2 => 3,
        _ => 5,
    }
}

const AGAIN: &str = "write a new profile with `foretrain calibrate --on cpu --out profile.json`";

/// The name of an exchange's curve in a profile.
pub fn exchange_key(phase: Phase, dtype: Dtype) -> String {
    key(phase.name(), dtype)
}

/// Whether a curve has such a name.
pub fn is_exchange(curve: &str) -> bool {
    let all = [Phase::Dispatch, Phase::CachedDispatch, Phase::Combine];
    curve.split_once('/').is_some_and(|(name, _)| all.iter().any(|phase| phase.name() == name))
}

/// The name of a curve in a profile.
pub fn key(curve: &str, dtype: Dtype) -> String {
    format!("{curve}/{}", dtype.name())
}

impl KernelTime for Profile {
    fn time(&self, work: &Work, dtype: Dtype) -> Estimate {
        let seconds = self.stand_in(work, dtype).unwrap_or(f64::NAN);
        Estimate { seconds: Seconds::new(seconds), on_sms: OnSms::NONE, provenance: Provenance::Assumed, rel_sd: 1.0 }
    }

    fn time_as(&self, curve: &str, work: &Work, dtype: Dtype) -> Estimate {
        self.time_cold(curve, work, dtype, 0)
    }

    fn time_cold(&self, curve: &str, work: &Work, dtype: Dtype, cold: u64) -> Estimate {
        let name = curve;
        let Some(curve) = self.curve(name, dtype) else { return self.time(work, dtype) };
        let experts = grouped::time(self, name, work, dtype);
        let (seconds, provenance) = experts.unwrap_or_else(|| {
            let (one, times) = one_of(name, work);
            let (seconds, provenance) = curve.at(&self.size(&one, cold));
            (seconds * times as f64, provenance)
        });
        Estimate { seconds: Seconds::new(seconds), on_sms: OnSms::NONE, provenance, rel_sd: curve.residual_sd }
    }

    fn threads(&self) -> Option<&Threads> {
        self.threads.as_ref()
    }

    fn beside(&self, curve: &str, work: &Work, dtype: Dtype, cold: u64) -> f64 {
        self.crowded(curve, work, dtype, cold)
    }
}
