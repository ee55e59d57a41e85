//! The kernels of a mixture-of-experts layer. How many rows they meet on a rank, the plan's route says; their
//! operands have room for the fullest rank's.
//!
//! Legend: t tokens of the rank, k choices of each, E slots of the group, p rows of a rank's slots, h hidden, f width
//! of one expert.

use super::kernel::{FP8_BLOCK, Operands, Work, WorkClass, fp8_bytes};
use super::mesh::Mesh;
use super::route::Route;
use super::rows::{Layout, place_of};
use crate::spec::Gate;
use serde::{Deserialize, Serialize};

/// An expert's rows are filled up to a multiple of this before a product (MegaBlocks; DeepGEMM's block of M).
pub const ROW_BLOCK: u64 = 128;

/// Which product of a layer of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// y `[p, n]` = x `[p, k]` Wᵀ. Reads x, W.
    Forward,
    /// dx `[p, k]` = dy `[p, n]` W. Reads dy, W.
    Dx,
    /// dW `[n, k]` of every slot += dyᵀ x of its rows. Reads dy, x, dW.
    Dw,
}

/// Values of a row: one vector for the token, or one number for each of its choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Values {
    Row {
        cols: u64,
    },
    /// FP8 codes `[.., cols]` and their scales: read as two operands, written as numbers.
    Scaled {
        cols: u64,
    },
    /// Numbers of choices: `topk` in a row of a token, one in a row of a choice.
    Choice {
        topk: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ExpertOp {
    /// Computes what the choices of the route weigh. Reads logits `[t, E]`; writes gates `[t, k]`, 0 where a choice was
    /// dropped.
    Router { rows: u64, experts: u64, topk: u64, gate: Gate },
    /// Reads logits, d_gates; writes d_logits.
    RouterBwd { rows: u64, experts: u64, topk: u64, gate: Gate },
    /// Puts rows of one order into another: copies where a row becomes several, sums in the order of `from` where
    /// several become one.
    Rows {
        from: Layout,
        to: Layout,
        rows: [u64; 2],
        values: Values,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        backward: bool,
    },
    /// The same for rows of `cols` numbers between tokens and their choices, by `products` products with masks of who goes
    /// where: a row of ones and zeros for each row of a choice, over the `span` tokens of its sequence (GShard,
    /// arXiv:2006.16668, algorithm 2).
    Masked {
        from: Layout,
        to: Layout,
        rows: [u64; 2],
        cols: u64,
        span: u64,
        products: u64,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        backward: bool,
    },
    /// Rounds rows to E4M3: reads x `[rows, cols]`; writes codes, and scales `[rows, cols / 128]`.
    Quantise {
        layout: Layout,
        rows: u64,
        cols: u64,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        backward: bool,
    },
    /// One product a slot, W being `[slots, n, k]`: those of the rank from `first` on. Where that is not its first slot,
    /// y and dx are operands too, whose rows of other slots stay as they are.
    MatMul {
        pass: Pass,
        rows: u64,
        slots: u64,
        #[serde(default, skip_serializing_if = "is_zero")]
        first: u64,
        n: u64,
        k: u64,
        fp8: bool,
    },
    /// Reads [gate | up] `[p, 2 f]` and what each row weighs `[p]`; writes weight * silu(gate) * up.
    SwiGlu { rows: u64, cols: u64 },
    /// Reads [gate | up], the weights, d_out; writes [d_gate | d_up] and the gradient of the weights.
    SwiGluBwd { rows: u64, cols: u64 },
    /// Reads up `[p, f]` and what each row weighs `[p]`; writes weight * relu(up)^2.
    Relu2 { rows: u64, cols: u64 },
    /// Reads up, the weights, d_out; writes d_up and the gradient of the weights.
    Relu2Bwd { rows: u64, cols: u64 },
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// A kernel whose number of rows a route says.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertKernel {
    /// Number of the route among those of the plan.
    pub route: u32,
    pub op: ExpertOp,
}

fn share(bytes: u64, rows: f64, of: u64) -> u64 {
    (bytes as f64 * rows / of.max(1) as f64).round() as u64
}

impl ExpertKernel {
    pub fn name(&self) -> &'static str {
        match self.op {
            ExpertOp::Router { .. } => "router",
            ExpertOp::RouterBwd { .. } => "router_bwd",
            ExpertOp::Rows { .. } => "route_rows",
            ExpertOp::Masked { .. } => "mask_rows",
            ExpertOp::Quantise { .. } => "quantise",
            ExpertOp::MatMul { .. } => "grouped_matmul",
            ExpertOp::SwiGlu { .. } => "expert_swiglu",
            ExpertOp::SwiGluBwd { .. } => "expert_swiglu_bwd",
            ExpertOp::Relu2 { .. } => "expert_relu2",
            ExpertOp::Relu2Bwd { .. } => "expert_relu2_bwd",
        }
    }

    /// The name of its curve, see [`Kernel::curve`](super::Kernel::curve): each pass reads its operands in another
    /// order.
    pub fn curve(&self) -> &'static str {
        match self.op {
            ExpertOp::MatMul { pass: Pass::Dx, .. } => "grouped_matmul_dx",
            ExpertOp::MatMul { pass: Pass::Dw, .. } => "grouped_matmul_dw",
            _ => self.name(),
        }
    }

    pub fn is_forward(&self) -> bool {
        match self.op {
            ExpertOp::MatMul { pass, .. } => pass == Pass::Forward,
            ExpertOp::Rows { backward, .. }
            | ExpertOp::Masked { backward, .. }
            | ExpertOp::Quantise { backward, .. } => !backward,
            ExpertOp::Router { .. } | ExpertOp::SwiGlu { .. } | ExpertOp::Relu2 { .. } => true,
            ExpertOp::RouterBwd { .. } | ExpertOp::SwiGluBwd { .. } | ExpertOp::Relu2Bwd { .. } => false,
        }
    }

    pub fn operands(&self) -> Operands {
        let of = |reads: &[u64], writes: &[u64]| Operands { reads: reads.to_vec(), writes: writes.to_vec() };
        match self.op {
            ExpertOp::Router { rows, experts, topk, .. } => of(&[rows * experts], &[rows * topk]),
            ExpertOp::RouterBwd { rows, experts, topk, .. } => of(&[rows * experts, rows * topk], &[rows * experts]),
            ExpertOp::Rows { from, to, rows: [a, b], values, .. } => match values {
                Values::Row { cols } => of(&[a * cols], &[b * cols]),
                Values::Scaled { cols } => of(&[a * cols, a * cols.div_ceil(FP8_BLOCK)], &[b * cols]),
                Values::Choice { topk } => {
                    let width = |layout: Layout| if layout.by_choice() { 1 } else { topk };
                    of(&[a * width(from)], &[b * width(to)])
                }
            },
            ExpertOp::Masked { rows: [a, b], cols, .. } => of(&[a * cols], &[b * cols]),
            ExpertOp::Quantise { rows, cols, .. } => {
                of(&[rows * cols], &[rows * cols, rows * cols.div_ceil(FP8_BLOCK)])
            }
            ExpertOp::MatMul { pass, rows, slots, first, n, k, .. } => match pass {
                Pass::Forward if first > 0 => of(&[rows * k, slots * n * k, rows * n], &[rows * n]),
                Pass::Dx if first > 0 => of(&[rows * n, slots * n * k, rows * k], &[rows * k]),
                Pass::Forward => of(&[rows * k, slots * n * k], &[rows * n]),
                Pass::Dx => of(&[rows * n, slots * n * k], &[rows * k]),
                Pass::Dw => of(&[rows * n, rows * k, slots * n * k], &[slots * n * k]),
            },
            ExpertOp::SwiGlu { rows, cols } => of(&[2 * rows * cols, rows], &[rows * cols]),
            ExpertOp::SwiGluBwd { rows, cols } => of(&[2 * rows * cols, rows, rows * cols], &[2 * rows * cols, rows]),
            ExpertOp::Relu2 { rows, cols } => of(&[rows * cols, rows], &[rows * cols]),
            ExpertOp::Relu2Bwd { rows, cols } => of(&[rows * cols, rows, rows * cols], &[rows * cols, rows]),
        }
    }

    /// The work on `rank`, given the bytes of each whole operand.
    pub fn work(&self, route: &Route, views: &[Mesh], rank: u32, reads: &[u64], writes: &[u64]) -> Work {
        let place = place_of(views, rank);
        let memory = |bytes| Work { flops: 0, bytes, class: WorkClass::Memory };
        let all = |bytes: &[u64]| bytes.iter().sum::<u64>();
        let count = |layout: Layout| layout.count(route, place);
        match self.op {
            ExpertOp::Router { .. } | ExpertOp::RouterBwd { .. } => memory(all(reads) + all(writes)),
            ExpertOp::Rows { from, to, rows, .. } => {
                memory(share(all(reads), count(from), rows[0]) + share(all(writes), count(to), rows[1]))
            }
            ExpertOp::Masked { from, to, rows, cols, span, products, .. } => {
                let ends = [(from, rows[0], all(reads)), (to, rows[1], all(writes))];
                let moved = ends.map(|(layout, rows, bytes)| share(bytes, count(layout), rows)).iter().sum::<u64>();
                let chosen = count(if from == Layout::Tokens { to } else { from }).round() as u64;
                let element = (all(writes) / (rows[1] * cols).max(1)).max(1);
                let times = chosen * span * products;
                // One product for each sequence, as if they stood one below the other.
                let class = WorkClass::Gemm {
                    m: chosen * products,
                    n: cols,
                    k: span,
                    cast: 0,
                    result: element,
                    groups: 1,
                    unaligned: false,
                    of_weights: false,
                };
                Work { flops: 2 * times * cols, bytes: moved * products + times * element, class }
            }
            ExpertOp::Quantise { layout, rows, .. } => memory(share(all(reads) + all(writes), count(layout), rows)),
            ExpertOp::SwiGlu { rows, .. }
            | ExpertOp::SwiGluBwd { rows, .. }
            | ExpertOp::Relu2 { rows, .. }
            | ExpertOp::Relu2Bwd { rows, .. } => memory(share(all(reads) + all(writes), count(Layout::Experts), rows)),
            ExpertOp::MatMul { pass, rows, slots, first, n, k, fp8 } => {
                let groups = Groups::of(route, place, first..first + slots);
                groups.work(pass, [rows, slots, n, k], fp8, reads, writes)
            }
        }
    }
}

/// The rows that a rank's slots have.
struct Groups {
    rows: f64,
    /// Rows, those of each slot filled up to whole blocks.
    padded: u64,
    /// Slots that have any rows.
    active: u64,
}

impl Groups {
    fn of(route: &Route, place: u32, slots: std::ops::Range<u64>) -> Groups {
        let all = route.rows_by_local_expert(place);
        let each = all.get(slots.start as usize..slots.end as usize).unwrap_or_default();
        let filled = |rows: &f64| (rows.ceil() as u64).next_multiple_of(ROW_BLOCK);
        Groups {
            rows: each.iter().sum(),
            padded: each.iter().map(filled).sum(),
            active: each.iter().filter(|rows| **rows > 0.0).count() as u64,
        }
    }

    /// The work of a pass; weights are read, or their gradients added to, only for slots that have rows.
    fn work(&self, pass: Pass, [rows, slots, n, k]: [u64; 4], fp8: bool, reads: &[u64], writes: &[u64]) -> Work {
        let of_rows = |bytes| share(bytes, self.rows, rows);
        let of_slots = |bytes| share(bytes, self.active as f64, slots);
        let flops = (2.0 * self.rows * (n * k) as f64).round() as u64;
        let (given, rest, [m, cols, depth]) = match pass {
            Pass::Forward => (of_rows(reads[0]) + of_slots(reads[1]), of_rows(writes[0]), [self.padded, n, k]),
            Pass::Dx => (of_rows(reads[0]) + of_slots(reads[1]), of_rows(writes[0]), [self.padded, k, n]),
            // One product for each slot, as if they stood one below the other.
            Pass::Dw => {
                let depth = self.padded / self.active.max(1);
                let sums = of_slots(reads[2]) + of_slots(writes[0]);
                (of_rows(reads[0] + reads[1]), sums, [self.active * n.next_multiple_of(ROW_BLOCK), k, depth])
            }
        };
        let operands = match pass {
            Pass::Dw => fp8_bytes(self.padded * n) + fp8_bytes(self.padded * k),
            _ => fp8_bytes(m * depth) + fp8_bytes(self.active * n * k),
        };
        let (fed, cast) = if fp8 { (operands, given + operands) } else { (given, 0) };
        if m == 0 {
            return Work { flops: 0, bytes: 0, class: WorkClass::Memory };
        }
        let result = (rest / (m * cols).max(1)).clamp(2, 8);
        let (groups, of_weights) = (self.active, matches!(pass, Pass::Dw));
        let class = WorkClass::Gemm { m, n: cols, k: depth, cast, result, groups, unaligned: false, of_weights };
        Work { flops, bytes: cast + fed + rest, class }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Counts;

    /// Two choices of each of 64 tokens and a half as many rows more, in sequences of 32.
    #[test]
    fn masks_cost_a_product_over_the_tokens_of_a_sequence() {
        let route = Route::new([1, 1], 4, 2, Counts::Balanced { tokens: 64 }).unwrap().padded(48).unwrap();
        let work = |products: u64| {
            let (from, to, rows) = (Layout::Tokens, Layout::Experts, [64, 4 * 48]);
            let op = ExpertOp::Masked { from, to, rows, cols: 10, span: 32, products, backward: false };
            ExpertKernel { route: 0, op }.work(&route, &[], 0, &[64 * 20], &[4 * 48 * 20])
        };
        assert_eq!((work(1).flops, work(2).flops), (2 * 4 * 48 * 32 * 10, 4 * 4 * 48 * 32 * 10));
        // Rows of both ends, and a mask of 32 tokens for each row.
        assert_eq!(work(1).bytes, 64 * 20 + 4 * 48 * 20 + 4 * 48 * 32 * 2);
        assert!(matches!(work(1).class, WorkClass::Gemm { m: 192, n: 10, k: 32, result: 2, .. }));
    }
}
