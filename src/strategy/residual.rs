//! The place where the residual stream waits between a layer's forward and its backward pass.
//!
//! Where every layer is computed again, its input is all that is kept of it: a slot a layer on the device. Or in the
//! host's memory (as ALST does, arXiv:2506.13996):
//!
//! ```text
//! forward   layer l    | its input leaves for the host
//! backward  layer l    | the input of layer l-1 comes back
//! ```
//! Then the device has two slots that layers take in turns, and one for the output of all. The input of the top layer
//! stays in its slot: it is wanted first.

use crate::plan::{Arg, Buf, Builder, Dtype, TensorKind, Toward, each};

#[derive(Clone, Copy)]
pub struct Residual {
    x: Buf,
    /// Slots in the host's memory for the input of every layer but the top one; `None`: inputs stay on the device.
    host: Option<Buf>,
    layers: u32,
}

impl Residual {
    /// Declares the stream of `layers` layers.
    pub fn new(b: &mut Builder, shape: &[u64], dtype: Dtype, layers: u32, offload: bool) -> Residual {
        let slots = if offload { 3 } else { layers + 1 };
        let x = b.tensor("x", shape, dtype, TensorKind::Activation, slots);
        let host = offload.then(|| b.host_tensor("x_host", shape, dtype, TensorKind::Activation, layers - 1));
        Residual { x, host, layers }
    }

    /// The stream of a pipeline's last stage, where inputs are kept by microbatch: only the slot of the output of all
    /// layers.
    pub fn of_last_stage(x: Buf) -> Residual {
        Residual { x, host: None, layers: 0 }
    }

    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// The input of the lowest layer.
    pub fn first(&self) -> Buf {
        self.x
    }

    /// The output of all layers.
    pub fn last(&self) -> Buf {
        self.x.slot(if self.host.is_some() { 2 } else { self.layers })
    }

    /// Whether inputs leave the device.
    pub fn leaves(&self) -> bool {
        self.host.is_some()
    }

    /// The inputs of layers `first`, `first + step` and so on.
    pub fn walk(&self, first: i32, step: i32) -> Arg {
        each(self.x, first, step, if self.leaves() { 2 } else { self.layers + 1 })
    }

    /// The slots in the host's memory where those inputs wait; `None`: they stay on the device.
    pub fn hosts(&self, first: i32, step: i32) -> Option<Arg> {
        self.host.map(|host| each(host, first, step, self.layers - 1))
    }
}

/// Sends the input of a layer to the host, between formals of a block.
pub fn leave(b: &mut Builder, x: Buf) {
    let home = b.formal("x_host");
    b.copy("x_to_host", Toward::Host, x, home);
}

/// Brings back the input of the layer below.
pub fn come_back(b: &mut Builder) {
    let [home, x] = ["below_host", "below"].map(|name| b.formal(name));
    b.copy("x_from_host", Toward::Device, home, x);
}
