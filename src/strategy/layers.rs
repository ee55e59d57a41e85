//! Which layers of a model are of one kind: of a hybrid's pattern every third one, say.

use std::ops::Range;

/// The layers of one kind, by their places in the model, ascending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers {
    all: Vec<u32>,
}

impl FromIterator<u32> for Layers {
    fn from_iter<I: IntoIterator<Item = u32>>(layers: I) -> Layers {
        let all: Vec<u32> = layers.into_iter().collect();
        assert!(all.is_sorted(), "layers {all:?} are not in order");
        Layers { all }
    }
}

impl Layers {
    pub fn count(&self) -> u32 {
        self.all.len() as u32
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.all.iter().copied()
    }

    /// Number of these layers that are in a part of the model.
    pub fn within(&self, part: &Range<u32>) -> u32 {
        let before = |end: u32| self.all.partition_point(|l| *l < end);
        before(part.end).saturating_sub(before(part.start)) as u32
    }

    /// The runs of these layers that stand one behind the other.
    pub fn stretches(&self) -> Vec<Range<u32>> {
        let behind = |a: &u32, b: &u32| a + 1 == *b;
        self.all.chunk_by(behind).map(|of| of[0]..of[of.len() - 1] + 1).collect()
    }
}

/// A run of layers of one kind that stand one behind the other.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stretch {
    /// Number of the kind.
    pub kind: usize,
    /// The layers' places in the model, or in a part of it: from `start` to before `end`.
    pub start: u32,
    pub end: u32,
    /// The place of the first layer among those of its kind in the model, or in that part.
    pub first: u32,
}

impl Stretch {
    /// The stretches of the layers in `part` of a model whose `kinds` are these; places count from the first layer of
    /// the part.
    pub fn all<'k>(kinds: impl Iterator<Item = &'k Layers>, part: &Range<u32>) -> Vec<Stretch> {
        let of_kind = |(kind, layers): (usize, &'k Layers)| {
            let cut = |l: Range<u32>| l.start.max(part.start)..l.end.min(part.end);
            let inside: Vec<Range<u32>> = layers.stretches().into_iter().map(cut).filter(|l| !l.is_empty()).collect();
            inside.into_iter().map(move |l| {
                let first = layers.within(&(part.start..l.start));
                Stretch { kind, start: l.start - part.start, end: l.end - part.start, first }
            })
        };
        let mut all: Vec<Stretch> = kinds.enumerate().flat_map(of_kind).collect();
        all.sort_by_key(|s| s.start);
        all
    }

    pub fn count(&self) -> u32 {
        self.end - self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_of_a_pattern_cover_every_part_once() {
        let pattern = "MEMM*E-MEE";
        let kinds: Vec<Layers> = "M*-E"
            .chars()
            .map(|c| pattern.chars().enumerate().filter(|(_, of)| *of == c).map(|(i, _)| i as u32).collect())
            .collect();
        for (from, to) in [(0, 10), (0, 5), (5, 10), (2, 4), (3, 9)] {
            let all = Stretch::all(kinds.iter(), &(from..to));
            let mut next = 0;
            for s in &all {
                assert_eq!(s.start, next);
                next = s.end;
                for l in s.start..s.end {
                    let place = s.first + l - s.start;
                    assert_eq!(kinds[s.kind].iter().filter(|of| *of >= from).nth(place as usize), Some(from + l));
                }
            }
            assert_eq!(next, to - from);
        }
        assert_eq!(kinds[0].stretches(), [0..1, 2..4, 7..8]);
        assert_eq!((kinds[0].within(&(1..8)), kinds[3].within(&(9..9))), (3, 0));
    }
}
