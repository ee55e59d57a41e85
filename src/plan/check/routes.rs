//! Checks what routes ask of a plan: the ranks they count on are there, and buffers have room for the fullest of them.

use super::Size;
use crate::error::{Error, Result};
use crate::plan::expert::ExpertOp;
use crate::plan::rows::EXPERT_VIEW;
use crate::plan::*;

/// Errors: a route for other ranks than the expert view has; an op that names a route that there is not, or whose rows
/// or slots are too few for it.
pub fn check(plan: &Plan) -> Result<()> {
    let ep = plan.views.get(EXPERT_VIEW as usize).map_or(1, |view| view.degree(Axis::Ep));
    if let Some(route) = plan.routes.iter().find(|route| route.ranks != ep) {
        return Err(Error::plan(format!("a route is for {} ranks, the expert view has {ep}", route.ranks)));
    }
    for (body, op) in plan.ops() {
        let fail = |why: String| Err(Error::plan(format!("{body}/{}: {why}", op.label)));
        let route = match &op.kind {
            OpKind::Compute { kernel, .. } => kernel.routed().map(|k| k.route),
            OpKind::Exchange { route, .. } => Some(*route),
            _ => None,
        };
        let Some(route) = route else { continue };
        let last = route as usize + plan.routes_at_once() as usize;
        let Some(routes) = plan.routes.get(route as usize..last) else {
            return fail(format!("route {route} of {}", plan.routes.len()));
        };
        for route in routes {
            if let OpKind::Compute { kernel, .. } = &op.kind
                && let Some((rows, need)) = kernel.routed().and_then(|k| short(route, k.op))
            {
                return fail(format!("{rows} rows, of which the fullest rank has {need}"));
            }
            if let OpKind::Compute { kernel: Kernel::Expert(k), .. } = &op.kind
                && let ExpertOp::MatMul { first, slots, .. } = k.op
                && first.saturating_add(slots) > u64::from(route.local_experts())
            {
                return fail(format!("slots {first} to {} of {}", first.saturating_add(slots), route.local_experts()));
            }
        }
    }
    Ok(())
}

/// The rows that a kernel has room for and the rows that it needs, where it needs more; `None` where it has enough.
fn short(route: &Route, op: ExpertOp) -> Option<(u64, u64)> {
    let needs = match op {
        ExpertOp::Router { rows, .. } | ExpertOp::RouterBwd { rows, .. } => vec![(rows, Layout::Tokens)],
        ExpertOp::Rows { from, to, rows, .. } | ExpertOp::Masked { from, to, rows, .. } => {
            vec![(rows[0], from), (rows[1], to)]
        }
        ExpertOp::Quantise { layout, rows, .. } => vec![(rows, layout)],
        ExpertOp::MatMul { rows, .. }
        | ExpertOp::SwiGlu { rows, .. }
        | ExpertOp::SwiGluBwd { rows, .. }
        | ExpertOp::Relu2 { rows, .. }
        | ExpertOp::Relu2Bwd { rows, .. } => {
            vec![(rows, Layout::Experts)]
        }
    };
    let needs = needs.into_iter().map(|(rows, layout)| (rows, layout.capacity(route)));
    needs.into_iter().find(|(rows, need)| *need > (*rows).max(1))
}

/// Checks that both sides of an exchange have the same rows, of the same dtypes, and room for all of them. Errors: what
/// does not fit, in words.
pub fn exchange(plan: &Plan, op: &Op, size: &dyn Fn(&Buf) -> Size) -> std::result::Result<(), String> {
    let OpKind::Exchange { route, src, dst, algo, phase, .. } = &op.kind else { return Ok(()) };
    let (first, [from, to]) = (*route as usize, algo.ends(*phase));
    let routes = &plan.routes[first..first + plan.routes_at_once() as usize];
    let most = |layout: Layout| routes.iter().map(|route| layout.capacity(route)).max().unwrap_or(0);
    if src.len() != dst.len() || src.is_empty() {
        return Err(format!("{} buffers go, {} arrive", src.len(), dst.len()));
    }
    for (a, b) in src.iter().zip(dst) {
        let ((elems, dtype), (landed, other)) = (size(a), size(b));
        let (needs, needed) = (most(from), most(to));
        if dtype != other || elems < needs || landed < needed {
            return Err(format!(
                "{elems} elements of {dtype:?} for {needs} rows go, {landed} of {other:?} for {needed} arrive"
            ));
        }
    }
    Ok(())
}
