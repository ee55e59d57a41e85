//! How many hot experts are worth their weights on every rank, by FasterMoE's rule on the rates of a case.

use super::{Case, Point};
use crate::collective::nccl;
use crate::error::{Cause, Result};
use crate::plan::CollectiveKind;
use crate::routing::shadow::{Costs, shadowed};
use crate::spec::{Mlp, Parallelism};
use crate::units::Bytes;

/// A buffer of an all-to-all that shows what links carry.
const LARGE: f64 = (1u64 << 30) as f64;

impl Case {
    /// Experts that the rule would shadow, of the route of a point: flops are the GPU's peak, bytes go as in a large all-to-all
    /// of the group.
    pub fn shadows(&self, point: &Point) -> Result<u32> {
        let Some(moe) = self.model.moe else {
            return Err(Cause::Shadow.infeasible(format!("of experts; {} has none, leave it out", self.model.name)));
        };
        let mut options = point.par.options;
        options.shadow = 0;
        let point = Point { par: Parallelism { options, ..point.par }, ..*point };
        let route = self.routing.route(
            &self.model,
            &self.workload(&point)?,
            &point.par,
            self.cluster.together(point.par.ep),
        )?;
        let Some(route) = route.filter(|route| route.is_listed()) else {
            let why = "where rows are expected values no expert is hotter than another; use --routing zipf:1.0, or \
                       another that is drawn or read";
            return Err(Cause::Shadow.infeasible(why));
        };
        if route.ranks == 1 {
            return Ok(0);
        }
        let members: Vec<u32> = (0..route.ranks).collect();
        let kind = CollectiveKind::AllToAll;
        let time = nccl::collective(&self.cluster, &self.stack, kind, &members, Bytes::new(LARGE)).total();
        let width = moe.width(self.model.hidden) as f64;
        // The rule has two products of an expert; gates are a third.
        let products = if self.model.mlp == Mlp::SwiGlu { 3.0 } else { 2.0 };
        let costs = Costs {
            width,
            widening: moe.ffn as f64 / width * products / 2.0,
            element: self.dtype.size() as f64,
            flops: self.peak().value(),
            bandwidth: LARGE * f64::from(route.ranks - 1) / f64::from(route.ranks) / time.value(),
        };
        Ok(shadowed(&route, &costs).len() as u32)
    }
}
