//! Matrix products: the best of the tilings that a library has kernels for.
//!
//! C is cut into tiles, one a SM at a time, and perhaps k into splits that are added up afterwards. A tile takes
//! as long as its products or as its operands, whichever is later:
//!
//! t(tile) = max(2 tm tn k / (R / S), (tm + tn) k b / (L / S)) + what of its store is not hidden
//!
//! with R the rate of all S SMs when they are fed, L the bandwidth of the L2 cache to all of them, b the bytes
//! of an element. Tiles come in waves of S; the last wave takes as long as a full one. Small tiles fill the last
//! wave and fit thin matrices, large ones need fewer operands for each product: hence the search.

use crate::spec::{GemmCurve, GpuSpec};
use crate::units::{Bytes, BytesPerSec, Flops, FlopsPerSec, Seconds};

/// Parts that k is cut into where the tiles alone do not fill the SMs.
const SPLITS: [u64; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

/// Bytes of a partial sum.
const PARTIAL: f64 = 4.0;

/// C (m x n) += A (m x k) B (k x n).
#[derive(Debug, Clone, Copy)]
pub struct Product {
    pub m: u64,
    pub n: u64,
    pub k: u64,
    /// Bytes of an element of A and B.
    pub element: u64,
    /// Bytes read and written for an element of C: twice its size where the product is added to it.
    pub result: u64,
}

/// One SM's share of what the device has.
struct Sm {
    rate: FlopsPerSec,
    operands: BytesPerSec,
    store: BytesPerSec,
    /// Part of a store that no product hides.
    exposed: f64,
}

impl Sm {
    fn of(gpu: &GpuSpec, rate: FlopsPerSec) -> Sm {
        let share = 1.0 / f64::from(gpu.sms.value);
        Sm {
            rate: rate * share,
            operands: gpu.gemm.operands.value * share,
            store: gpu.memory_bandwidth.value * (gpu.gemm.stream.value * share),
            exposed: gpu.gemm.store.value,
        }
    }

    fn tile(&self, [rows, cols]: [u64; 2], k: f64, [element, result]: [u64; 2]) -> Seconds {
        let (area, edges) = ((rows * cols) as f64, (rows + cols) as f64);
        let products = Flops::new(2.0 * area * k) / self.rate;
        let operands = Bytes::new(edges * k * element as f64) / self.operands;
        products.max(operands) + Bytes::new(area * result as f64 * self.exposed) / self.store
    }
}

/// Time of the best tiling with SMs that reach `rate` together.
pub fn time(gpu: &GpuSpec, product: Product, rate: FlopsPerSec) -> Seconds {
    let (sm, sms) = (Sm::of(gpu, rate), u64::from(gpu.sms.value));
    let mut best = Seconds::new(f64::INFINITY);
    for &tile in &gpu.gemm.tiles {
        let tiles = product.m.div_ceil(tile[0]) * product.n.div_ceil(tile[1]);
        for split in SPLITS {
            if split > 1 && tiles >= sms {
                break;
            }
            let waves = (tiles * split).div_ceil(sms) as f64;
            let one = sm.tile(tile, product.k as f64 / split as f64, [product.element, product.result]);
            best = best.min(one * waves + adding_up(&gpu.gemm, product, split));
        }
    }
    best
}

/// Every split writes its sums, which are read again; the L2 cache holds them.
fn adding_up(curve: &GemmCurve, product: Product, split: u64) -> Seconds {
    if split == 1 {
        return Seconds::ZERO;
    }
    let sums = product.m as f64 * product.n as f64 * split as f64 * PARTIAL;
    Bytes::new(2.0 * sums) / curve.operands.value
}
