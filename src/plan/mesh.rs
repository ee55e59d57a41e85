//! A mesh: ranks arranged along named axes, and the groups that axes define.

use serde::{Deserialize, Serialize};

/// A mesh axis (a tensor has dims, a mesh has axes). `Cp` is the ring of context parallelism, `Up` the
/// Ulysses axis. `Shard` stands in views of their own, for groups of data-parallel ranks that share what other groups
/// have copies of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    Pp,
    Dp,
    Cp,
    Up,
    Tp,
    Ep,
    Edp,
    Shard,
}

impl Axis {
    pub const ALL: [Axis; 8] = [Axis::Pp, Axis::Dp, Axis::Cp, Axis::Up, Axis::Tp, Axis::Ep, Axis::Edp, Axis::Shard];

    pub fn name(self) -> &'static str {
        match self {
            Axis::Pp => "pp",
            Axis::Dp => "dp",
            Axis::Cp => "cp",
            Axis::Up => "up",
            Axis::Tp => "tp",
            Axis::Ep => "ep",
            Axis::Edp => "edp",
            Axis::Shard => "shard",
        }
    }
}

/// Ranks in row-major order over the axes, the last axis fastest: neighbours along the last axis are
/// neighbouring ranks, so the axis that needs the best links is written last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mesh {
    pub axes: Vec<(Axis, u32)>,
}

impl Mesh {
    pub fn new(axes: &[(Axis, u32)]) -> Mesh {
        Mesh { axes: axes.to_vec() }
    }

    pub fn size(&self) -> u32 {
        self.axes.iter().map(|a| a.1).product()
    }

    /// The number of ranks along `axis`; 1 for an axis the mesh does not have.
    pub fn degree(&self, axis: Axis) -> u32 {
        self.axes.iter().find(|a| a.0 == axis).map_or(1, |a| a.1)
    }

    fn stride(&self, axis: Axis) -> u32 {
        self.axes.iter().rev().take_while(|a| a.0 != axis).map(|a| a.1).product()
    }

    /// The coordinate of `rank` along `axis`.
    pub fn coord(&self, rank: u32, axis: Axis) -> u32 {
        match self.degree(axis) {
            1 => 0,
            degree => rank / self.stride(axis) % degree,
        }
    }

    /// The rank `by` further along `axis`, wrapping around.
    pub fn shift(&self, rank: u32, axis: Axis, by: i32) -> u32 {
        let degree = self.degree(axis);
        if degree == 1 {
            return rank;
        }
        let here = self.coord(rank, axis);
        let there = (i64::from(here) + i64::from(by)).rem_euclid(i64::from(degree)) as u32;
        rank + there * self.stride(axis) - here * self.stride(axis)
    }

    /// Whether neighbours on `axis` are nearer to each other than those on `outer`; false where the mesh lacks one of
    /// the two.
    pub fn is_inside(&self, axis: Axis, outer: Axis) -> bool {
        let at = |axis| self.axes.iter().position(|(other, _)| *other == axis);
        at(axis).zip(at(outer)).is_some_and(|(axis, outer)| axis > outer)
    }

    /// The rank that differs from `rank` only in its coordinate along `axis`.
    pub fn with_coord(&self, rank: u32, axis: Axis, coord: u32) -> u32 {
        match self.degree(axis) {
            1 => rank,
            _ => rank + coord * self.stride(axis) - self.coord(rank, axis) * self.stride(axis),
        }
    }

    /// The ranks that agree with `rank` on every axis but `axes`, in rank order. `rank` is among them.
    pub fn group(&self, rank: u32, axes: &[Axis]) -> Vec<u32> {
        let mut members = vec![rank];
        for &(axis, degree) in &self.axes {
            if axes.contains(&axis) {
                members = members
                    .iter()
                    .flat_map(|&r| (0..degree).map(move |c| (r, c)))
                    .map(|(r, c)| r + c * self.stride(axis) - self.coord(r, axis) * self.stride(axis))
                    .collect();
            }
        }
        members.sort_unstable();
        members
    }
}

/// Ranks that communicate with each other.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Group {
    /// The ranks that agree on all other axes of the view, in rank order.
    Axes { view: u8, axes: Vec<Axis> },
    /// Disjoint sets of coordinates on one axis, all of one size: the ranks of a set that agree on all other
    /// axes, in the order of the set. A rank whose coordinate is in no set is in no group. For links of a
    /// pipeline, its first and last stage, inner rings.
    Subset { view: u8, axis: Axis, sets: Vec<Vec<u32>> },
}

impl Group {
    pub fn axes(axes: &[Axis]) -> Group {
        let mut axes = axes.to_vec();
        axes.sort_unstable();
        Group::Axes { view: 0, axes }
    }

    pub fn subset(axis: Axis, sets: Vec<Vec<u32>>) -> Group {
        Group::Subset { view: 0, axis, sets }
    }

    pub fn view(&self) -> u8 {
        match self {
            Group::Axes { view, .. } | Group::Subset { view, .. } => *view,
        }
    }

    /// The axes along which members of a group differ.
    pub fn spans(&self) -> &[Axis] {
        match self {
            Group::Axes { axes, .. } => axes,
            Group::Subset { axis, .. } => std::slice::from_ref(axis),
        }
    }

    /// Whether `rank` is in a group: every rank is in one of [`Group::Axes`].
    pub fn contains(&self, views: &[Mesh], rank: u32) -> bool {
        match self {
            Group::Axes { .. } => true,
            Group::Subset { view, axis, sets } => set_of(sets, views[*view as usize].coord(rank, *axis)).is_some(),
        }
    }

    /// The first member of the group that `rank` is in, which names the group; `rank` itself if it is in none.
    pub fn first(&self, views: &[Mesh], rank: u32) -> u32 {
        let mesh = &views[self.view() as usize];
        match self {
            Group::Axes { axes, .. } => axes.iter().fold(rank, |r, &axis| mesh.with_coord(r, axis, 0)),
            Group::Subset { axis, sets, .. } => {
                let set = set_of(sets, mesh.coord(rank, *axis));
                set.map_or(rank, |(set, _)| mesh.with_coord(rank, *axis, set[0]))
            }
        }
    }

    /// How many ranks a group has.
    pub fn size(&self, views: &[Mesh]) -> u32 {
        match self {
            Group::Axes { view, axes } => axes.iter().map(|&axis| views[*view as usize].degree(axis)).product(),
            Group::Subset { sets, .. } => sets.first().map_or(1, |set| set.len() as u32),
        }
    }

    /// The members of the group that `rank` is in, in their order; `rank` alone if it is in none.
    pub fn members(&self, views: &[Mesh], rank: u32) -> Vec<u32> {
        let mesh = &views[self.view() as usize];
        match self {
            Group::Axes { axes, .. } => mesh.group(rank, axes),
            Group::Subset { axis, sets, .. } => match set_of(sets, mesh.coord(rank, *axis)) {
                Some((set, _)) => set.iter().map(|&c| mesh.with_coord(rank, *axis, c)).collect(),
                None => vec![rank],
            },
        }
    }

    /// The place of `rank` among the members of its group, in their order; 0 if it is in none.
    pub fn place(&self, views: &[Mesh], rank: u32) -> u32 {
        let mesh = &views[self.view() as usize];
        match self {
            Group::Axes { axes, .. } => {
                let own = mesh.axes.iter().filter(|(axis, _)| axes.contains(axis));
                own.fold(0, |place, &(axis, degree)| place * degree + mesh.coord(rank, axis))
            }
            Group::Subset { axis, sets, .. } => {
                set_of(sets, mesh.coord(rank, *axis)).map_or(0, |(_, here)| here as u32)
            }
        }
    }

    /// The rank `by` further in the group's order, wrapping around.
    pub fn neighbour(&self, views: &[Mesh], rank: u32, by: i32) -> u32 {
        let mesh = &views[self.view() as usize];
        let along = |here: usize, n: usize| (here as i64 + i64::from(by)).rem_euclid(n as i64) as usize;
        match self {
            Group::Axes { axes, .. } => {
                if let [axis] = axes[..] {
                    return mesh.shift(rank, axis, by);
                }
                let members = self.members(views, rank);
                members[along(self.place(views, rank) as usize, members.len())]
            }
            Group::Subset { axis, sets, .. } => match set_of(sets, mesh.coord(rank, *axis)) {
                Some((set, here)) => mesh.with_coord(rank, *axis, set[along(here, set.len())]),
                None => rank,
            },
        }
    }

    /// [`neighbour`](Group::neighbour) at one distance, made ready to be asked by many ranks.
    pub fn step<'g>(&'g self, views: &'g [Mesh], by: i32) -> Step<'g> {
        let mesh = &views[self.view() as usize];
        let wide: Vec<Axis> = self.spans().iter().copied().filter(|&axis| mesh.degree(axis) > 1).collect();
        let axis = match wide[..] {
            [] => self.spans()[0],
            [axis] => axis,
            _ => return Step::Across { group: self, views, by },
        };
        let (stride, degree) = (mesh.stride(axis), mesh.degree(axis));
        // The coordinate along the axis decides alone, whatever the rank's other coordinates are.
        let there = |c: u32| mesh.coord(self.neighbour(views, c * stride, by), axis);
        Step::Along { stride, there: (0..degree).map(there).collect() }
    }

    /// The axis that time spent in this group is charged to: the outermost one.
    pub fn charged_axis(&self) -> Axis {
        self.spans()[0]
    }

    pub fn label(&self) -> String {
        match self {
            Group::Axes { axes, .. } => axes.iter().map(|a| a.name()).collect::<Vec<_>>().join("+"),
            Group::Subset { axis, sets, .. } => {
                let set = |set: &Vec<u32>| set.iter().map(u32::to_string).collect::<Vec<_>>().join("-");
                let more = if sets.len() > 1 { ".." } else { "" };
                format!("{}.{}{more}", axis.name(), sets.first().map(set).unwrap_or_default())
            }
        }
    }

    /// The reason why no rank can make sense of this group; `None` if all can.
    pub fn fault(&self, views: &[Mesh]) -> Option<String> {
        let Some(mesh) = views.get(self.view() as usize) else { return Some(format!("no view {}", self.view())) };
        match self {
            Group::Axes { axes, .. } => axes.is_empty().then(|| "no axes".into()),
            Group::Subset { axis, sets, .. } => {
                let mut all: Vec<u32> = sets.concat();
                all.sort_unstable();
                let distinct = all.windows(2).all(|w| w[0] < w[1]);
                let known = all.last().is_some_and(|&c| c < mesh.degree(*axis));
                let even = sets.iter().all(|set| set.len() == sets[0].len());
                let why =
                    || format!("sets {sets:?} that are not disjoint, of one size, and on the axis {}", axis.name());
                (!distinct || !known || !even).then(why)
            }
        }
    }
}

/// A way from every rank to the one at a fixed distance in its group.
pub enum Step<'g> {
    /// Along one axis: the coordinate that each coordinate leads to.
    Along {
        stride: u32,
        there: Vec<u32>,
    },
    Across {
        group: &'g Group,
        views: &'g [Mesh],
        by: i32,
    },
}

impl Step<'_> {
    pub fn of(&self, rank: u32) -> u32 {
        match self {
            Step::Along { stride, there } => {
                let here = rank / stride % there.len() as u32;
                rank - here * stride + there[here as usize] * stride
            }
            Step::Across { group, views, by } => group.neighbour(views, rank, *by),
        }
    }
}

/// The set that a coordinate is in, and its place there.
fn set_of(sets: &[Vec<u32>], coord: u32) -> Option<(&[u32], usize)> {
    sets.iter().find_map(|set| set.iter().position(|&c| c == coord).map(|at| (&set[..], at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_goes_where_the_neighbour_is() {
        let views = [Mesh::new(&[(Axis::Pp, 4), (Axis::Dp, 3), (Axis::Cp, 2), (Axis::Tp, 1)])];
        let groups = [
            Group::axes(&[Axis::Dp]),
            Group::axes(&[Axis::Dp, Axis::Cp]),
            Group::axes(&[Axis::Dp, Axis::Tp]),
            Group::axes(&[Axis::Tp]),
            Group::axes(&[Axis::Up]),
            Group::axes(&[Axis::Tp, Axis::Up]),
            Group::subset(Axis::Pp, vec![vec![3, 1]]),
            Group::subset(Axis::Pp, vec![vec![0, 2], vec![3, 1]]),
        ];
        for group in &groups {
            for by in -4..=4 {
                let step = group.step(&views, by);
                for rank in 0..views[0].size() {
                    assert_eq!(step.of(rank), group.neighbour(&views, rank, by), "{group:?} {by} {rank}");
                }
            }
            for rank in 0..views[0].size() {
                let members = group.members(&views, rank);
                assert_eq!(members[group.place(&views, rank) as usize], rank, "{group:?} {rank}");
            }
        }
    }

    #[test]
    fn the_last_axis_is_fastest_and_shifts_wrap() {
        let mesh = Mesh::new(&[(Axis::Dp, 2), (Axis::Cp, 3), (Axis::Up, 4)]);
        assert_eq!(mesh.size(), 24);
        assert_eq!((mesh.coord(17, Axis::Dp), mesh.coord(17, Axis::Cp), mesh.coord(17, Axis::Up)), (1, 1, 1));
        assert_eq!(mesh.shift(17, Axis::Cp, 2), 13, "1 + 2 wraps to 0 along cp");
        assert_eq!(mesh.shift(17, Axis::Tp, 5), 17, "an absent axis has one coordinate");
        assert_eq!(mesh.group(17, &[Axis::Cp]), [13, 17, 21]);
        assert_eq!(mesh.group(17, &[Axis::Up]), [16, 17, 18, 19]);
        assert_eq!(mesh.group(17, &[Axis::Dp, Axis::Up]).len(), 8);
        let (group, views) = (Group::axes(&[Axis::Dp, Axis::Up]), [mesh]);
        assert_eq!(group.first(&views, 17), group.members(&views, 17)[0]);
        assert_eq!(group.size(&views), 8);
    }

    #[test]
    fn subsets_keep_their_own_order_and_leave_ranks_out() {
        let views = [Mesh::new(&[(Axis::Pp, 5), (Axis::Tp, 2)])];
        let group = Group::subset(Axis::Pp, vec![vec![3, 0], vec![1, 2]]);
        assert_eq!(group.fault(&views), None);
        assert_eq!((group.members(&views, 1), group.first(&views, 1)), (vec![7, 1], 7));
        assert_eq!((group.neighbour(&views, 7, 1), group.neighbour(&views, 7, -3)), (1, 1));
        assert_eq!((group.neighbour(&views, 2, 1), group.size(&views)), (4, 2));
        assert!(!group.contains(&views, 8) && group.contains(&views, 5));
        assert_eq!((group.members(&views, 8), group.neighbour(&views, 8, 1)), (vec![8], 8));
        assert_eq!(group.label(), "pp.3-0..");
        for sets in [vec![], vec![vec![0, 0]], vec![vec![0], vec![1, 2]], vec![vec![5]], vec![vec![]]] {
            assert!(Group::subset(Axis::Pp, sets).fault(&views).is_some());
        }
    }
}
