//! The sums of all classes on a line, by number rather than by name: time of kernels and links, FLOPs, bytes.

use super::host::Aside;
use super::kernels::Timed;
use crate::collective::LinkTime;
use crate::plan::*;
use crate::timeline::Usage;

pub const PROVENANCES: [&str; 4] = ["measured", "interpolated", "extrapolated", "assumed"];

/// The number of a kernel in a list of names.
///
/// Panics if the list does not have it.
pub(super) fn number_of(kernels: &[&'static str], name: &str) -> usize {
    kernels.iter().position(|known| *known == name).expect("names are noted before they are counted")
}

/// For each class the seconds of every kernel, then the seconds of every lane beside the compute lane, then the other
/// sums.
#[derive(Debug, Clone)]
pub struct Tallies {
    kernels: usize,
    width: usize,
    all: Vec<f64>,
}

/// Where the other sums stand: seconds by provenance, then these.
const PLAIN: usize = PROVENANCES.len();
const FLOPS: usize = PLAIN;
const BYTES: usize = PLAIN + 1;
const SD: usize = PLAIN + 3;
const COMM_SD: usize = PLAIN + 4;
const HOST_BYTES: usize = PLAIN + 5;
const REST: usize = PLAIN + 6;

impl Tallies {
    pub fn new(kernels: usize, lanes: usize, classes: usize) -> Tallies {
        let width = kernels + lanes + REST;
        Tallies { kernels, width, all: vec![0.0; width * classes] }
    }

    /// Adds `times` times the sums of another tally, whose kernels may be only the first of these.
    pub fn add(&mut self, other: &Tallies, times: f64) {
        let add = |sums: &mut [f64], of: &[f64]| sums.iter_mut().zip(of).for_each(|(sum, one)| *sum += one * times);
        for (sums, of) in self.all.chunks_mut(self.width).zip(other.all.chunks(other.width)) {
            add(sums, &of[..other.kernels]);
            add(&mut sums[self.kernels..], &of[other.kernels..]);
        }
    }

    fn rest(&mut self, class: usize) -> &mut [f64] {
        let end = (class + 1) * self.width;
        &mut self.all[end - REST..end]
    }

    /// Counts a kernel, by its number, that runs `times` times.
    pub(super) fn kernel(&mut self, class: usize, kernel: u16, flops: u64, timed: Timed, times: f64) {
        let s = timed.duration as f64 * 1e-12 * times;
        self.all[class * self.width + kernel as usize] += s;
        let rest = self.rest(class);
        rest[timed.provenance as usize] += s;
        rest[SD] += timed.rel_sd * s;
        rest[FLOPS] += flops as f64 * times;
    }

    /// Counts what a class sends, `times` times: `bytes` inside nodes and between them.
    pub(super) fn link(&mut self, class: usize, lane: u16, time: &LinkTime, bytes: [f64; 2], times: f64) {
        let s = time.total().value() * times;
        self.all[class * self.width + self.kernels + lane as usize] += s;
        let rest = self.rest(class);
        rest[time.provenance as usize] += s;
        rest[COMM_SD] += time.rel_sd * s;
        rest[BYTES] += bytes[0] * times;
        rest[BYTES + 1] += bytes[1] * times;
    }

    pub(super) fn aside(&mut self, class: usize, lane: u16, aside: Aside, times: f64) {
        let s = aside.duration as f64 * 1e-12 * times;
        self.all[class * self.width + self.kernels + lane as usize] += s;
        let rest = self.rest(class);
        rest[aside.provenance as usize] += s;
        rest[HOST_BYTES] += aside.bytes as f64 * times;
    }

    /// Takes the sums of `from`, a class of another tally of the same kernels and lanes.
    pub(super) fn take(&mut self, class: usize, other: &Tallies, from: usize) {
        let width = self.width;
        self.all[class * width..][..width].copy_from_slice(&other.all[from * width..][..width]);
    }

    /// The sums of a class as a usage, by name.
    pub fn usage(&self, class: usize, kernels: &[&'static str], lanes: &[Lane]) -> Usage {
        let (named, rest) = self.all[class * self.width..][..self.width].split_at(self.width - REST);
        let (kernel, comm) = named.split_at(self.kernels);
        let mut usage = Usage {
            flops: rest[FLOPS],
            bytes_scale_up: rest[BYTES],
            bytes_scale_out: rest[BYTES + 1],
            bytes_host: rest[HOST_BYTES],
            sd: rest[SD],
            comm_sd: rest[COMM_SD],
            ..Usage::default()
        };
        usage.by_kernel.extend(kernels.iter().zip(kernel).filter(|(_, s)| **s > 0.0));
        usage.by_provenance.extend(PROVENANCES.iter().zip(rest).filter(|(_, s)| **s > 0.0));
        for (lane, s) in lanes.iter().zip(comm).filter(|(_, s)| **s > 0.0) {
            usage.busy(lane, *s);
        }
        usage
    }
}
