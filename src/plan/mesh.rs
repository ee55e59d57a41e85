//! A mesh: ranks arranged along named axes, and the groups that axes define.

use serde::{Deserialize, Serialize};

/// A mesh axis (a tensor has dims, a mesh has axes). `Cp` is the ring of context parallelism, `Up` the
/// Ulysses axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    Pp,
    Dp,
    Cp,
    Up,
    Tp,
    Ep,
    Etp,
    Edp,
}

impl Axis {
    pub const ALL: [Axis; 8] = [Axis::Pp, Axis::Dp, Axis::Cp, Axis::Up, Axis::Tp, Axis::Ep, Axis::Etp, Axis::Edp];

    pub fn name(self) -> &'static str {
        match self {
            Axis::Pp => "pp",
            Axis::Dp => "dp",
            Axis::Cp => "cp",
            Axis::Up => "up",
            Axis::Tp => "tp",
            Axis::Ep => "ep",
            Axis::Etp => "etp",
            Axis::Edp => "edp",
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
    /// The ranks that agree on all other axes of the view.
    Axes { view: u8, axes: Vec<Axis> },
}

impl Group {
    pub fn axes(axes: &[Axis]) -> Group {
        let mut axes = axes.to_vec();
        axes.sort_unstable();
        Group::Axes { view: 0, axes }
    }

    /// The first member of the group that `rank` is in: names the group.
    pub fn first(&self, views: &[Mesh], rank: u32) -> u32 {
        let Group::Axes { view, axes } = self;
        let mesh = &views[*view as usize];
        axes.iter().fold(rank, |r, &axis| r - mesh.coord(r, axis) * mesh.stride(axis))
    }

    /// How many ranks a group has.
    pub fn size(&self, views: &[Mesh]) -> u32 {
        let Group::Axes { view, axes } = self;
        axes.iter().map(|&axis| views[*view as usize].degree(axis)).product()
    }

    /// The members of the group that `rank` is in, in rank order.
    pub fn members(&self, views: &[Mesh], rank: u32) -> Vec<u32> {
        let Group::Axes { view, axes } = self;
        views[*view as usize].group(rank, axes)
    }

    /// The rank `by` further in the group's order, wrapping around.
    pub fn neighbour(&self, views: &[Mesh], rank: u32, by: i32) -> u32 {
        let Group::Axes { view, axes } = self;
        if let [axis] = axes[..] {
            return views[*view as usize].shift(rank, axis, by);
        }
        let members = self.members(views, rank);
        let here = members.iter().position(|&m| m == rank).expect("a rank is in its own group");
        members[(here as i64 + i64::from(by)).rem_euclid(members.len() as i64) as usize]
    }

    /// The axis that time spent in this group is charged to: the outermost one.
    pub fn charged_axis(&self) -> Axis {
        let Group::Axes { axes, .. } = self;
        axes[0]
    }

    pub fn label(&self) -> String {
        let Group::Axes { axes, .. } = self;
        axes.iter().map(|a| a.name()).collect::<Vec<_>>().join("+")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
