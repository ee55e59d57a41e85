//! Where nothing fits: the way that lacks least, and what would make it fit.

use super::Search;
use super::candidates::TooLarge;
use crate::error::Result;
use crate::report::Row;
use crate::spec::Options;
use crate::sweep::{Point, longest};
use rayon::prelude::*;
use serde::Serialize;

/// Ways of each stage of ZeRO that are laid out: bounds of memory order them roughly, and those of different stages not at all.
const FEW: usize = 4;

/// The way that comes nearest to fitting, of those with the least bounds.
#[derive(Debug, Clone, Serialize)]
pub struct Nearest {
    pub row: Row,
    /// The same with words that it did not have and that make it fit, if any do.
    pub with: Option<Row>,
}

impl Nearest {
    /// Words of the options that it fits with, and did not have.
    pub fn words(&self) -> Option<String> {
        let had: Vec<&str> = self.row.options.split('+').collect();
        let with = self.with.as_ref()?;
        Some(with.options.split('+').filter(|word| !had.contains(word)).collect::<Vec<_>>().join("+"))
    }
}

/// `bounded`: ways whose memory is too much by their bound; `costed`: those that were costed.
pub(super) fn nearest(search: &Search, mut bounded: Vec<TooLarge>, costed: &[Row]) -> Result<Option<Nearest>> {
    bounded.sort_by(|a, b| a.bytes.total_cmp(&b.bytes).then(a.point.cmp(&b.point)));
    let mut laid: Vec<&Row> = costed.iter().filter(|row| row.over().is_some()).collect();
    laid.sort_by(|a, b| over(a).total_cmp(&over(b)));
    let laid = laid.into_iter().map(Point::of_row);
    let of_stage = |zero| bounded.iter().map(|way| way.point).filter(move |point| point.par.zero == zero).take(FEW);
    let points: Vec<Point> = laid.take(FEW).chain((0..=3).flat_map(of_stage)).collect();
    (search.progress)("ways laid out", 0, points.len());
    let rows = points.par_iter().map(|point| search.case.laid_out(point)).collect::<Result<Vec<Row>>>()?;
    let lacks = rows.into_iter().filter(|row| !row.feasible && row.over().is_some());
    let Some(row) = lacks.min_by(|a, b| over(a).total_cmp(&over(b))) else { return Ok(None) };
    let with = enough(search, &Point::of_row(&row))?;
    Ok(Some(Nearest { row, with }))
}

/// Bytes that are too many.
fn over(row: &Row) -> f64 {
    row.over().unwrap_or(f64::INFINITY)
}

/// The row of a point with the first of a few sets of words that it fits with: the optimizer's memory, then what makes
/// sequences longer.
fn enough(search: &Search, point: &Point) -> Result<Option<Row>> {
    let has_host = search.case.cluster.spec.host.is_some();
    let optimizer = Options { offload_optimizer: true, ..Options::default() };
    let measures = longest::Question::default_measures(&search.case.model, has_host);
    for more in has_host.then_some(optimizer).into_iter().chain(measures) {
        let options = both(point.par.options, more);
        if options == point.par.options {
            continue;
        }
        let mut point = *point;
        point.par.options = options;
        let row = search.case.laid_out(&point)?;
        if row.feasible {
            return Ok(Some(row));
        }
    }
    Ok(None)
}

/// What either saves; what else there is, is that of the first.
pub(super) fn both(options: Options, more: Options) -> Options {
    Options {
        loss_chunks: options.loss_chunks.max(more.loss_chunks),
        mlp_chunks: options.mlp_chunks.max(more.mlp_chunks),
        chunks: options.chunks.max(more.chunks),
        offload_activations: options.offload_activations || more.offload_activations,
        offload_optimizer: options.offload_optimizer || more.offload_optimizer,
        ..options
    }
}
