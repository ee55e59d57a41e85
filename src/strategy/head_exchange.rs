//! All-to-alls between "my tokens, all heads" and "all tokens, my heads": operands that are packed by one kernel travel
//! in one exchange, or lane by lane in several.

use crate::plan::{
    Axis, Buf, Builder, CollectiveKind, Dtype, Engine, Exchange, Group, HeadPart, HeadPermute, Kernel, Packing, Segs,
    TensorKind, Via,
};

/// The ranks that exchange heads, and what each has outside the exchange.
#[derive(Debug, Clone)]
pub struct HeadExchange {
    pub ranks: u64,
    /// The axes along which these ranks differ.
    pub axes: Vec<Axis>,
    pub batch: u64,
    /// Tokens of one sequence on a rank.
    pub seq: u64,
    /// The positions of each rank, where tokens are put in the order of the sequence on the side that has all tokens;
    /// `None`: they stay rank after rank.
    pub order: Option<Segs>,
    pub dtype: Dtype,
    pub engine: Engine,
}

/// The direction of an exchange. There: heads are cut over the ranks. Back: tokens are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    There,
    Back,
}

/// The send and the receive buffer of one all-to-all.
#[derive(Clone, Copy)]
struct Wire {
    send: Buf,
    recv: Buf,
}

/// Operands that are packed by one kernel, and the buffers that they travel in.
pub struct Parcel {
    /// Name of the kernels: `qkv`, `q`, `kv` or `o`.
    name: &'static str,
    parts: Vec<HeadPart>,
    packing: Packing,
    /// Whether the parts are columns of one operand.
    joined: bool,
    /// The buffers of each all-to-all, and its name.
    wires: Vec<(&'static str, Wire)>,
}

impl HeadExchange {
    /// Declares buffers for parts that are an operand each and travel in all-to-alls of these names: all parts in one,
    /// or a lane in each.
    pub fn parcel(&self, b: &mut Builder, name: &'static str, parts: &[HeadPart], wires: &[&'static str]) -> Parcel {
        let packing = if wires.len() > 1 { Packing::ByLane } else { Packing::Together };
        let lanes = || parts.iter().flat_map(|part| (0..part.lanes).map(move |lane| part.local_lane(self.ranks, lane)));
        let rows: Vec<u64> = if wires.len() > 1 { lanes().collect() } else { vec![lanes().sum()] };
        assert_eq!(rows.len(), wires.len(), "{name}: an all-to-all a lane");
        let mut end = |wire: &str, side, row: u64| {
            let shape = [self.ranks, self.batch * self.seq * row];
            b.tensor(&format!("a2a_{wire}_{side}"), &shape, self.dtype, TensorKind::CommBuffer, 1)
        };
        let mut both = |(wire, row): (&&'static str, &u64)| {
            (*wire, Wire { send: end(wire, "send", *row), recv: end(wire, "recv", *row) })
        };
        let wires = wires.iter().zip(&rows).map(&mut both).collect();
        Parcel { name, parts: parts.to_vec(), packing, joined: false, wires }
    }

    /// [`parcel`](HeadExchange::parcel) for parts that are columns of one operand, one behind the other.
    pub fn joined(&self, b: &mut Builder, name: &'static str, parts: &[HeadPart], wires: &[&'static str]) -> Parcel {
        Parcel { joined: true, ..self.parcel(b, name, parts, wires) }
    }

    /// Packs, exchanges and unpacks parcel by parcel: while one is under way the next is packed. Returns the last op.
    pub fn run(
        &self,
        b: &mut Builder,
        backward: bool,
        parcels: &[Parcel],
        way: Way,
        mut from: &[Buf],
        mut to: &[Buf],
    ) -> u32 {
        let (pack, unpack) = match way {
            Way::There => (Exchange::PackHeads, Exchange::UnpackSeq),
            Way::Back => (Exchange::PackSeq, Exchange::UnpackHeads),
        };
        let d = if backward { "d" } else { "" };
        let permute = |parcel, exchange| self.permute(parcel, exchange, backward);
        let group = Group::axes(&self.axes);
        let via = Via { group: &group, index: 0, engine: self.engine };
        for parcel in parcels {
            let sends: Vec<Buf> = parcel.wires.iter().map(|(_, w)| w.send).collect();
            let reads = from.split_off(..parcel.operands()).expect("as many operands as the parcels have");
            b.compute(&format!("{d}{}_pack", parcel.name), permute(parcel, pack), reads, &sends);
            for (name, wire) in &parcel.wires {
                let (label, kind) = (format!("{d}{name}_a2a"), CollectiveKind::AllToAll);
                b.collective(&label, via, kind, wire.send, wire.recv, self.dtype);
            }
        }
        let mut last = 0;
        for parcel in parcels {
            let recvs: Vec<Buf> = parcel.wires.iter().map(|(_, w)| w.recv).collect();
            let writes = to.split_off(..parcel.operands()).expect("as many operands as the parcels have");
            last = b.compute(&format!("{d}{}_unpack", parcel.name), permute(parcel, unpack), &recvs, writes);
        }
        last
    }

    fn permute(&self, parcel: &Parcel, exchange: Exchange, backward: bool) -> Kernel {
        let (shape, parts) = ([self.ranks, self.batch, self.seq], parcel.parts.clone());
        let permute = HeadPermute::new(exchange, parcel.packing, shape, parts);
        Kernel::Permute(HeadPermute { joined: parcel.joined, order: self.order.clone(), backward, ..permute })
    }
}

impl Parcel {
    fn operands(&self) -> usize {
        if self.joined { 1 } else { self.parts.len() }
    }
}
