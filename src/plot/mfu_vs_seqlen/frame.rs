//! Where the axes and the table lie on the page.

use super::super::style::HEIGHT;
use super::{Group, mfu};
use std::cmp::Reverse;
use std::collections::BTreeSet;

pub(super) const LEFT: f64 = 148.0;
pub(super) const RIGHT: f64 = 1296.0;
pub(super) const TOP: f64 = 122.0;
pub(super) const LEGEND: f64 = 1326.0;
pub(super) const RADIUS: f64 = 6.5;
/// Half of the stroke that a point without neighbours is.
pub(super) const TICK: f64 = 11.0;
/// Of a line of the table.
pub(super) const LINE: f64 = 47.0;
/// Between columns of the table, at least.
const APART: f64 = 100.0;
/// What a label of the axis takes.
const LABEL: f64 = 60.0;

/// The part of the page inside the axes, and the table below it.
pub(super) struct Frame {
    pub lengths: BTreeSet<u64>,
    /// Of log2 of the length.
    x_range: (f64, f64),
    pub y_max: f64,
    pub bottom: f64,
    /// Lengths of the table.
    pub columns: Vec<u64>,
}

impl Frame {
    pub(super) fn new(groups: &[Group]) -> Frame {
        let points = || groups.iter().flat_map(|g| &g.ways).flat_map(|(_, points)| points);
        let lengths: BTreeSet<u64> = points().map(|(length, _)| *length).collect();
        let log = |length: Option<&u64>| length.map_or(0.0, |&l| (l as f64).log2());
        let x_range = (log(lengths.first()) - 0.5, log(lengths.last()) + 0.5);
        let bottom = f64::from(HEIGHT) - 96.0 - groups.len() as f64 * LINE;
        let highest = points().filter_map(|(_, point)| mfu(point)).fold(0.0, f64::max);
        // Seven tenths is what a very good run reaches; every picture has it, so that pictures compare.
        let y_max = ((highest + 0.02) * 10.0).ceil().clamp(7.0, 10.0) / 10.0;
        let mut frame = Frame { lengths, x_range, y_max, bottom, columns: vec![] };
        frame.columns = frame.columns_of(groups);
        frame
    }

    pub(super) fn x(&self, length: u64) -> f64 {
        let (low, high) = self.x_range;
        LEFT + (RIGHT - LEFT) * ((length as f64).log2() - low) / (high - low)
    }

    pub(super) fn y(&self, mfu: f64) -> f64 {
        self.bottom - (self.bottom - TOP) * mfu / self.y_max
    }

    /// The top of a line of the table.
    pub(super) fn line(&self, place: usize) -> f64 {
        self.bottom + 44.0 + place as f64 * LINE
    }

    /// Lengths whose cells have room beside each other: of those that are too near one at which anything runs, then a power of
    /// two, then the one at which most families run.
    fn columns_of(&self, groups: &[Group]) -> Vec<u64> {
        let running = |length: &u64| groups.iter().filter(|group| group.top(*length).is_some()).count();
        let mut order: Vec<u64> = self.lengths.iter().copied().collect();
        order.sort_by_key(|length| {
            let running = running(length);
            (running == 0, !length.is_power_of_two(), Reverse(running), *length)
        });
        let mut columns: BTreeSet<u64> = BTreeSet::new();
        for length in order {
            if columns.iter().all(|&other| (self.x(length) - self.x(other)).abs() > APART) {
                columns.insert(length);
            }
        }
        columns.into_iter().collect()
    }

    /// Lengths that the axis is labelled with: powers of two, and those of the table.
    pub(super) fn ticks(&self) -> BTreeSet<u64> {
        let odd = || self.columns.iter().copied().filter(|length| !length.is_power_of_two());
        let near = |power: &u64| odd().any(|length| (self.x(length) - self.x(*power)).abs() < LABEL);
        self.powers().filter(|power| !near(power)).chain(odd()).collect()
    }

    pub(super) fn powers(&self) -> impl Iterator<Item = u64> {
        (self.x_range.0.ceil() as u32..=self.x_range.1.floor() as u32).map(|power| 1 << power)
    }

    /// Of a cell: neither into the next column nor over the names of the lines.
    pub(super) fn cell(&self) -> f64 {
        let columns = &self.columns;
        let between = columns.windows(2).map(|w| self.x(w[1]) - self.x(w[0]));
        let beside = columns.iter().map(|&length| 2.0 * (self.x(length) - LEFT).min(RIGHT - self.x(length)));
        between.chain(beside).fold(RIGHT - LEFT, f64::min)
    }
}
