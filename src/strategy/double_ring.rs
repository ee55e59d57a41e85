//! Two rings in place of one, as in LoongTrain (Gu et al., arXiv:2406.18485): an inner ring of the w ranks of a
//! window, an outer ring over windows.
//!
//! ```text
//! window o:  KV of window r/w-o-1 to the next window  |  w steps of an inner ring over the KV of window r/w-o
//! ```
//! A window's KV leaves it once in w steps, over the links of all its ranks at a time, and has all w steps to arrive.
//! Backward, dKV goes round the window one step behind its KV, beginning from zero, and home to the rank that it
//! entered at; there it is added to the sum that follows KV from window to window, in fp32: R hops inside and R/w
//! outside.

use super::attention::{Saved, delta};
use super::ring::Ring;
use super::{ring_follow, ring_merge};
use crate::plan::{AttnBlock, Axis, Buf, Builder, Group, Kernel, TensorKind};

pub struct Scratch {
    window: u32,
    inner: Group,
    outer: Group,
    /// KV of other windows, two slots in turns.
    kv: Buf,
    /// Sums of dKV that go from window to window.
    dkv: Buf,
    grads: ring_follow::Scratch,
}

/// The block of step `i`: the own queries against the KV of the rank so many ranks back in the window, so many windows
/// back.
pub fn block(ring: &Ring, window: u32, i: u32) -> AttnBlock {
    let own = &ring.shape.block;
    let (outer, inner) = ((i / window) as i32, (i % window) as i32);
    AttnBlock { kv: own.kv.turned(Axis::Cp, window, -inner, -outer * window as i32), ..own.clone() }
}

impl Scratch {
    pub fn new(ring: &Ring, b: &mut Builder) -> Scratch {
        let window = ring.options.window().expect("two rings have a window");
        let windows = ring.ranks / window;
        let kv = ring.kv_shape();
        Scratch {
            window,
            inner: Group::subset(Axis::Cp, (0..windows).map(|o| (o * window..(o + 1) * window).collect()).collect()),
            outer: Group::subset(
                Axis::Cp,
                (0..window).map(|i| (i..ring.ranks).step_by(window as usize).collect()).collect(),
            ),
            kv: b.tensor("kv_window", &kv, ring.shape.dtype, TensorKind::CommBuffer, 2),
            dkv: b.tensor("dkv_window", &kv, ring.shape.acc, TensorKind::CommBuffer, 2),
            grads: ring_follow::Scratch::new(ring, b),
        }
    }

    /// The buffer that has the KV of step `i`.
    fn held(&self, own: Buf, inner: Buf, i: u32) -> Buf {
        match (i / self.window, i % self.window) {
            (0, 0) => own,
            (outer, 0) => self.kv.slot(outer % 2),
            (_, step) => inner.slot(step % 2),
        }
    }

    /// Passes KV on in step `i`: round the window, and in a window's first step to the next window.
    fn pass_kv(&self, ring: &Ring, b: &mut Builder, own: Buf, inner: Buf, i: u32) {
        let held = |i| self.held(own, inner, i);
        let next_window = i + self.window;
        if i.is_multiple_of(self.window) && next_window < ring.ranks {
            let pairs = ring.messages(held(i), held(next_window));
            ring.hop_in(b, &format!("kv_window_hop.{i}"), (&self.outer, 0), 1, &pairs, i);
        }
        if !(i + 1).is_multiple_of(self.window) {
            ring.hop_in(b, &format!("kv_hop.{i}"), (&self.inner, 0), 1, &ring.messages(held(i), held(i + 1)), i);
        }
    }

    /// o and lse as `merge` keeps them, over all windows.
    pub fn forward(&self, ring: &Ring, b: &mut Builder, kv: Buf, merge: &ring_merge::Scratch, io: Saved) {
        for i in 0..ring.ranks {
            self.pass_kv(ring, b, io.kv, kv, i);
            merge.step(ring, b, io, self.held(io.kv, kv, i), i);
        }
    }

    /// The buffer of a window's dKV before step `i`, or at its end. Windows take turns, since one is settled while the
    /// next has begun.
    fn window_dkv(&self, window: u32, i: u32) -> Buf {
        self.grads.dkv.slot(2 * (window % 2) + i % 2)
    }

    /// dq, dkv in the dtype of sums.
    pub fn backward(&self, ring: &Ring, b: &mut Builder, kv: Buf, io: Saved, d_o: Buf) -> (Buf, Buf) {
        delta(b, &ring.shape, io.o, d_o, self.grads.delta);
        let [rows, row] = ring.kv_shape();
        for i in 0..ring.ranks {
            let (window, step) = (i / self.window, i % self.window);
            self.pass_kv(ring, b, io.kv, kv, i);
            let [here, next] = [step, step + 1].map(|step| self.window_dkv(window, step));
            if step == 0 && window > 0 {
                b.compute(&format!("dkv_zero.{i}"), Kernel::Fill { elems: rows * row }, &[], &[here]);
            }
            let reads = [io.q, self.held(io.kv, kv, i), d_o, io.lse(), self.grads.delta];
            self.grads.step(ring, b, i, here, &reads);
            ring.hop_in(b, &format!("dkv_hop.{i}"), (&self.inner, 1), 1, &ring.messages(here, next), i);
            // The settling comes behind the next window's first kernel, which hides the last hop of the window before
            // it.
            if step == 0 && window > 0 {
                self.settle(ring, b, window - 1);
            }
        }
        let windows = ring.ranks / self.window;
        self.settle(ring, b, windows - 1);
        (self.grads.dq, self.dkv.slot(windows % 2))
    }

    /// Adds a window's dKV to the sum, and sends it on; after the last window it is home.
    fn settle(&self, ring: &Ring, b: &mut Builder, window: u32) {
        let [rows, row] = ring.kv_shape();
        let (elems, sum, own) = (rows * row, self.dkv.slot(window % 2), self.window_dkv(window, self.window));
        match window {
            0 => b.compute("dkv_window_copy", Kernel::Cast { elems }, &[own], &[sum]),
            _ => b.compute(&format!("dkv_window_add.{window}"), Kernel::Add { elems, trim: None }, &[sum, own], &[sum]),
        };
        let pairs = ring.messages(sum, self.dkv.slot((window + 1) % 2));
        ring.hop_in(b, &format!("dkv_window_hop.{window}"), (&self.outer, 1), 1, &pairs, window);
    }
}
