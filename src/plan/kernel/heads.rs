//! Heads that are exchanged for tokens, and how they are packed on the way.

use super::{Operands, is_false};
use crate::plan::mesh::Mesh;
use crate::plan::segs::Segs;
use serde::{Deserialize, Serialize};

/// One operand of a head exchange. A token's row is `lanes` x heads x `head_dim` (K and V are two lanes
/// of one tensor). With `ranks` above the heads that travel every head goes to ranks / heads ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadPart {
    pub lanes: u64,
    /// Heads of the operand before the exchange.
    pub heads: u64,
    pub head_dim: u64,
    /// Elements of a head of the last lane, a value's beside a key's; `None`: `head_dim` as in the other lanes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_dim: Option<u64>,
    /// Heads of zeros that travel, too; `None`: there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad: Option<HeadPad>,
}

/// Heads stand in groups of `group`; groups grow to `to_group`, and more groups come behind them until
/// there are `to_heads` heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadPad {
    pub group: u64,
    pub to_group: u64,
    pub to_heads: u64,
}

impl HeadPart {
    pub const fn new(lanes: u64, heads: u64, head_dim: u64) -> HeadPart {
        HeadPart { lanes, heads, head_dim, last_dim: None, pad: None }
    }

    /// Heads that travel, with those of zeros.
    pub fn all_heads(&self) -> u64 {
        self.pad.map_or(self.heads, |pad| pad.to_heads)
    }

    /// The operand's head that travels as head `travelling`; `None` for a head of zeros.
    pub fn held(&self, travelling: u64) -> Option<u64> {
        let Some(pad) = self.pad else { return Some(travelling) };
        let (group, at) = (travelling / pad.to_group, travelling % pad.to_group);
        let head = group * pad.group + at;
        (at < pad.group && head < self.heads).then_some(head)
    }

    /// Heads that each of `ranks` holds after the exchange.
    pub fn local_heads(&self, ranks: u64) -> u64 {
        (self.all_heads() / ranks).max(1)
    }

    /// A part of keys of `head_dim` elements and values of `v_dim`.
    pub const fn kv(heads: u64, head_dim: u64, v_dim: u64) -> HeadPart {
        let last_dim = if v_dim == head_dim { None } else { Some(v_dim) };
        HeadPart { lanes: 2, heads, head_dim, last_dim, pad: None }
    }

    /// Elements of a head of one lane.
    pub fn dim_of(&self, lane: u64) -> u64 {
        if lane + 1 == self.lanes { self.last_dim.unwrap_or(self.head_dim) } else { self.head_dim }
    }

    /// Elements of a head in all lanes before `lane`; with the number of lanes, those of a head's whole row.
    pub fn dims_before(&self, lane: u64) -> u64 {
        (0..lane).map(|before| self.dim_of(before)).sum()
    }

    /// Elements of one token's row where all heads are.
    pub fn row(&self) -> u64 {
        self.heads * self.dims_before(self.lanes)
    }

    /// Elements of one lane of one token in one rank's part.
    pub fn local_lane(&self, ranks: u64, lane: u64) -> u64 {
        self.local_heads(ranks) * self.dim_of(lane)
    }

    /// Elements of one token's row in one rank's part.
    pub fn local_row(&self, ranks: u64) -> u64 {
        self.local_heads(ranks) * self.dims_before(self.lanes)
    }
}

/// The four local halves of an all-to-all between heads and sequence. A send or receive buffer is laid
/// out `[ranks][batch][seq][concatenated parts of one token]`, `seq` the tokens of one sequence here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exchange {
    /// `[b*s, lanes*heads*d]` of each part -> send buffer, heads cut over ranks.
    PackHeads,
    /// Receive buffer -> `[b * ranks*s, lanes*local_heads*d]` of each part, tokens in rank order.
    UnpackSeq,
    /// `[b * ranks*s, lanes*local_heads*d]` of each part -> send buffer, tokens cut over ranks.
    PackSeq,
    /// Receive buffer -> `[b*s, lanes*heads*d]` of each part; copies of one head are summed.
    UnpackHeads,
}

/// How many buffers a packed side is kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Packing {
    /// In one buffer, for one all-to-all to send or receive.
    #[default]
    Together,
    /// In a buffer for each rank's part, for several collectives.
    ByRank,
    /// In a buffer for each lane of each part, for several all-to-alls.
    ByLane,
}

/// One of the four local halves of an exchange of heads, for `seq` tokens of each of `batch` sequences.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadPermute {
    pub exchange: Exchange,
    pub packing: Packing,
    pub ranks: u64,
    pub batch: u64,
    pub seq: u64,
    pub parts: Vec<HeadPart>,
    /// Whether the parts are columns of one operand, one behind the other, rather than an operand each.
    #[serde(default, skip_serializing_if = "is_false")]
    pub joined: bool,
    /// The positions of each rank, where tokens are put in the order of the sequence on the side that has all tokens;
    /// `None`: they stay in rank order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<Segs>,
    /// Whether what it moves is of a backward pass.
    #[serde(default, skip_serializing_if = "is_false")]
    pub backward: bool,
}

impl HeadPermute {
    /// A half whose parts are an operand each, tokens in rank order.
    pub fn new(
        exchange: Exchange,
        packing: Packing,
        [ranks, batch, seq]: [u64; 3],
        parts: Vec<HeadPart>,
    ) -> HeadPermute {
        HeadPermute { exchange, packing, ranks, batch, seq, parts, joined: false, order: None, backward: false }
    }

    pub(super) fn operands(&self) -> Operands {
        let (ranks, tokens, parts) = (self.ranks, self.batch * self.seq, &self.parts);
        let outside: Vec<u64> = parts.iter().map(|p| tokens * p.row()).collect();
        let inside: Vec<u64> = parts.iter().map(|p| tokens * ranks * p.local_row(ranks)).collect();
        let all: u64 = inside.iter().sum();
        let [outside, inside] = [outside, inside].map(|rows| if self.joined { vec![rows.iter().sum()] } else { rows });
        let packed = match self.packing {
            Packing::Together => vec![all],
            Packing::ByRank => vec![all / ranks; ranks as usize],
            Packing::ByLane => {
                let lane = |p: &HeadPart, lane| tokens * ranks * p.local_lane(ranks, lane);
                parts.iter().flat_map(|p| (0..p.lanes).map(move |at| lane(p, at))).collect()
            }
        };
        match self.exchange {
            Exchange::PackHeads => Operands { reads: outside, writes: packed },
            Exchange::UnpackSeq => Operands { reads: packed, writes: inside },
            Exchange::PackSeq => Operands { reads: inside, writes: packed },
            Exchange::UnpackHeads => Operands { reads: packed, writes: outside },
        }
    }

    /// The place in its sequence of each token that all ranks have of it, rank after rank, as `rank` and those it
    /// exchanges with have them; `None`: one behind the other.
    pub fn places(&self, views: &[Mesh], rank: u32) -> Option<Vec<u64>> {
        let segs = self.order.as_ref()?;
        let axes: Vec<_> = segs.order.iter().map(|(axis, _)| *axis).collect();
        let members = views[segs.view as usize].group(rank, &axes);
        Some(members.iter().flat_map(|&member| segs.positions(views, member)).collect())
    }
}
