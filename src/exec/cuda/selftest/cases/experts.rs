//! Kernels of experts: routers, rows on their way, products by expert.

use super::{BF16, Cases, F32, ROUNDED, SINGLE, Shape};
use crate::plan::expert::{ExpertKernel, ExpertOp, Pass, Values};
use crate::plan::rows::{Landing, Layout};
use crate::plan::*;
use crate::spec::{Gate, Score};

/// Two ranks of two experts; a token lost a choice, the second rank has one token.
fn route() -> Route {
    let own = |i: u32| [i % 4, (i * 7 + 1 + i / 3) % 4];
    let mut choices: Vec<u32> = (0..41).flat_map(own).collect();
    // No token goes to an expert twice.
    choices.chunks_mut(2).filter(|c| c[0] == c[1]).for_each(|c| c[1] = (c[0] + 1) % 4);
    (choices[3], choices[20], choices[21]) = (route::DROPPED, route::DROPPED, route::DROPPED);
    Route::new([2, 2], 4, 2, Counts::Listed { tokens: vec![40, 1], choices }).expect("a sound route")
}

pub(super) fn experts(all: &mut Cases) {
    let views = [Mesh::new(&[(Axis::Dp, 2)]), Mesh::new(&[(Axis::Ep, 2)])];
    let route = route();
    let rows = |layout: Layout| layout.capacity(&route);
    let mut add = |op, reads: &[Shape], writes: &[Dtype], tolerance| {
        all.routed(&Kernel::Expert(ExpertKernel { route: 0, op }), &views, Some(&route), reads, writes, tolerance);
    };
    let (tokens, experts, topk) = (rows(Layout::Tokens), 4, 2);
    for (score, normalise) in [(Score::Softmax, true), (Score::Softmax, false), (Score::Sigmoid, true)] {
        let gate = Gate { score, normalise, scale: 1.5 };
        add(ExpertOp::Router { rows: tokens, experts, topk, gate }, &[F32], &[Dtype::F32], SINGLE);
        add(ExpertOp::RouterBwd { rows: tokens, experts, topk, gate }, &[F32, F32], &[Dtype::Bf16], ROUNDED);
    }
    let unique = Layout::Landed(Landing::Unique);
    for (from, to) in [(Layout::Tokens, Layout::Copies), (Layout::Copies, Layout::Tokens), (unique, Layout::Experts)] {
        for cols in [24, 13] {
            let rows = [rows(from), rows(to)];
            let moved = ExpertOp::Rows { from, to, rows, values: Values::Row { cols }, backward: false };
            add(moved, &[BF16], &[Dtype::Bf16], ROUNDED);
        }
    }
    for (from, to) in [(Layout::Tokens, Layout::Copies), (Layout::Copies, Layout::Tokens)] {
        let rows = [rows(from), rows(to)];
        add(
            ExpertOp::Rows { from, to, rows, values: Values::Choice { topk }, backward: false },
            &[F32],
            &[Dtype::F32],
            SINGLE,
        );
    }
    let (cols, both) = (200, [rows(unique), rows(Layout::Experts)]);
    let values = Values::Scaled { cols };
    let scaled = ExpertOp::Rows { from: unique, to: Layout::Experts, rows: both, values, backward: false };
    add(scaled, &[(Dtype::U8, 0.0..127.0), (Dtype::F32, 0.1..1.0)], &[Dtype::Bf16], ROUNDED);
    // Codes are compared as numbers of 0 to 255: neighbours are one apart.
    let quantise = ExpertOp::Quantise { layout: Layout::Tokens, rows: tokens, cols, backward: false };
    add(quantise, &[BF16], &[Dtype::U8, Dtype::F32], 1.0 / 250.0);
    let (rows, slots, n, k) = (both[1], 2, 24, 40);
    for pass in [Pass::Forward, Pass::Dx, Pass::Dw] {
        let product = ExpertOp::MatMul { pass, rows, slots, first: 0, n, k, fp8: false };
        match pass {
            Pass::Dw => add(product, &[BF16, BF16, F32], &[Dtype::F32], 10.0 * SINGLE),
            _ => add(product, &[BF16, BF16], &[Dtype::Bf16], ROUNDED),
        }
    }
    for cols in [32, 13] {
        add(ExpertOp::SwiGlu { rows, cols }, &[BF16, F32], &[Dtype::Bf16], ROUNDED);
        let backward = ExpertOp::SwiGluBwd { rows, cols };
        add(backward, &[BF16, F32, BF16], &[Dtype::F32, Dtype::F32], 4.0 * SINGLE);
    }
    for cols in [24, 13] {
        add(ExpertOp::Relu2 { rows, cols }, &[BF16, F32], &[Dtype::Bf16], ROUNDED);
        add(ExpertOp::Relu2Bwd { rows, cols }, &[BF16, F32, BF16], &[Dtype::F32, Dtype::F32], 4.0 * SINGLE);
    }
}
