//! Writes a plan op by op. A strategy is ordinary code that calls a builder.

use super::kernel::Kernel;
use super::mesh::Group;
use super::op::*;
use super::print::Print;
use super::program::Block;
use super::wire::Wire;

/// Which communicator an op runs on, and what moves its bytes.
#[derive(Clone, Copy)]
pub struct Via<'a> {
    pub group: &'a Group,
    /// Tells communicators over the same ranks apart.
    pub index: u8,
    pub engine: Engine,
}

/// The tensors, lanes and blocks declared so far, and the op lists being written.
#[derive(Default)]
pub struct Builder {
    pub tensors: Vec<Tensor>,
    pub lanes: Vec<Lane>,
    pub blocks: Vec<Block>,
    /// The blocks being written, the innermost last; the first entry is the program.
    open: Vec<Block>,
    /// Text that stands behind the label of every op that is written.
    suffix: String,
    /// Notes of a builder that keeps only sizes, in place of names and the buffers of kernels; `None` for one that
    /// keeps all.
    print: Option<Print>,
}

/// Room for the ops and formals of a block: ops are large, and to move them as a list grows takes longer than to write
/// them.
const OPS: usize = 80;
const FORMALS: usize = 20;

impl Builder {
    pub fn new() -> Builder {
        let main = Block { name: "main".into(), formals: vec![], ops: Vec::with_capacity(OPS) };
        Builder { open: vec![main], lanes: vec![Lane::Compute(0)], ..Builder::default() }
    }

    /// A builder that keeps only sizes, and of names and buffers a [`Print`].
    pub fn of_sizes() -> Builder {
        Builder { print: Some(Print::default()), ..Builder::new() }
    }

    /// The notes that stand for names and buffers; `None` for a builder that kept these.
    pub fn take_print(&mut self) -> Option<Print> {
        self.print.take()
    }

    pub fn keeps_names(&self) -> bool {
        self.print.is_none()
    }

    fn name(&self, name: &str) -> String {
        if self.keeps_names() { name.into() } else { String::new() }
    }

    pub fn tensor(&mut self, name: &str, shape: &[u64], dtype: Dtype, kind: TensorKind, slots: u32) -> Buf {
        let name = self.name(name);
        self.tensors.push(Tensor { name, shape: shape.to_vec(), dtype, slots, kind, host: false, in_fp8: vec![] });
        Buf { of: TensorRef::Tensor(self.tensors.len() as u32 - 1), slot: 0, rows: None }
    }

    /// Declares activations of the shape of another tensor.
    pub fn tensor_like(&mut self, prefix: &str, other: Buf, slots: u32) -> Buf {
        let Tensor { name, shape, dtype, .. } = self.tensors[other.tensor() as usize].clone();
        self.tensor(&format!("{prefix}.{name}"), &shape, dtype, TensorKind::Activation, slots)
    }

    /// Declares a tensor in the host's memory.
    pub fn host_tensor(&mut self, name: &str, shape: &[u64], dtype: Dtype, kind: TensorKind, slots: u32) -> Buf {
        let buf = self.tensor(name, shape, dtype, kind, slots);
        self.tensors.last_mut().expect("just declared").host = true;
        buf
    }

    /// Says which elements of a tensor are weights of products in FP8.
    pub fn in_fp8(&mut self, buf: Buf, elems: &[[u64; 2]]) {
        self.tensors[buf.tensor() as usize].in_fp8 = elems.to_vec();
    }

    /// Writes ops with `suffix` behind their labels, which keeps apart ops that are written several times in one block.
    pub fn labelled(&mut self, suffix: String, write: impl FnOnce(&mut Builder)) {
        let outer = std::mem::replace(&mut self.suffix, suffix);
        write(self);
        self.suffix = outer;
    }

    /// Opens a block; ops go into it until [`close`](Builder::close).
    pub fn open(&mut self, name: &str) {
        let name = self.name(name);
        self.open.push(Block { name, formals: Vec::with_capacity(FORMALS), ops: Vec::with_capacity(OPS) });
    }

    pub fn formal(&mut self, name: &str) -> Buf {
        let name = self.name(name);
        let block = self.current();
        block.formals.push(name);
        Buf { of: TensorRef::Formal(block.formals.len() as u32 - 1), slot: 0, rows: None }
    }

    pub fn close(&mut self) -> BlockId {
        if let Some(print) = &mut self.print {
            print.close(self.open.len());
        }
        let block = self.open.pop().expect("close follows open");
        self.blocks.push(block);
        self.blocks.len() as u32 - 1
    }

    /// Writes a block that does what two others do, by turns: one goes on when the other has sent rows on their way.
    /// Its formals are those of the first and behind them those of the second. The two must not work in the same
    /// buffers.
    pub fn braid(&mut self, name: &str, [first, second]: [BlockId; 2]) -> BlockId {
        let [a, b] = [first, second].map(|block| &self.blocks[block as usize]);
        let (shift, name) = (a.formals.len() as u32, self.name(name));
        let formals = a.formals.iter().chain(&b.formals).cloned().collect();
        let mut turns = [a, b].map(|block| block.ops.split_inclusive(|op| matches!(op.kind, OpKind::Exchange { .. })));
        let mut ids = [a, b].map(|block| vec![0; block.ops.len()]);
        let mut ops: Vec<Op> = Vec::with_capacity(a.ops.len() + b.ops.len());
        let mut idle = 0;
        for side in [0, 1].into_iter().cycle() {
            let stretch = turns[side].next().unwrap_or_default();
            idle = if stretch.is_empty() { idle + 1 } else { 0 };
            if idle == 2 {
                break;
            }
            for op in stretch {
                let id = ops.len() as u32;
                ids[side][op.id as usize] = id;
                let after = op.after.iter().map(|&earlier| ids[side][earlier as usize]).collect();
                let kind = op.kind.clone().formals_moved(if side == 0 { 0 } else { shift });
                ops.push(Op { id, label: op.label.clone(), lane: op.lane, kind, after });
            }
        }
        if let Some(print) = &mut self.print {
            print.braid([first, second], shift as usize);
        }
        self.blocks.push(Block { name, formals, ops });
        self.blocks.len() as BlockId - 1
    }

    /// Ends the program and returns its ops; every block has to be closed.
    pub fn finish(&mut self) -> Vec<Op> {
        assert_eq!(self.open.len(), 1, "a block is still open");
        std::mem::take(&mut self.open[0].ops)
    }

    fn current(&mut self) -> &mut Block {
        self.open.last_mut().expect("the program is always open")
    }

    fn push(&mut self, label: &str, lane: Option<u16>, kind: OpKind) -> u32 {
        let label = if self.keeps_names() { format!("{label}{}", self.suffix) } else { String::new() };
        if let Some(print) = &mut self.print {
            print.op(self.open.len(), lane, &kind);
        }
        let ops = &mut self.current().ops;
        let id = ops.len() as u32;
        ops.push(Op { id, label, lane, kind, after: vec![] });
        id
    }

    pub fn compute(&mut self, label: &str, kernel: Kernel, reads: &[Buf], writes: &[Buf]) -> u32 {
        let kind = match &mut self.print {
            None => OpKind::Compute { kernel, reads: reads.to_vec(), writes: writes.to_vec() },
            Some(print) => {
                print.bufs(self.open.len(), reads, writes);
                OpKind::Compute { kernel, reads: vec![], writes: vec![] }
            }
        };
        self.push(label, Some(0), kind)
    }

    /// A kernel of the CPU, on the host's memory. Returns the op's id.
    pub fn host_compute(&mut self, label: &str, kernel: Kernel, reads: &[Buf], writes: &[Buf]) -> u32 {
        let id = self.compute(label, kernel, reads, writes);
        let lane = self.lane(Lane::Host);
        if let Some(print) = &mut self.print {
            print.after(self.open.len(), lane.into(), id);
        }
        self.current().ops[id as usize].lane = Some(lane);
        id
    }

    /// Copies `src` to `dst`, one of which is in the host's memory.
    pub fn copy(&mut self, label: &str, toward: Toward, src: Buf, dst: Buf) -> u32 {
        let lane = self.lane(Lane::Copy(toward));
        self.push(label, Some(lane), OpKind::Copy { src, dst })
    }

    fn comm_lane(&mut self, via: Via) -> u16 {
        let same =
            |known: &Lane| matches!(known, Lane::Comm(group, index) if *index == via.index && group == via.group);
        match self.lanes.iter().position(same) {
            Some(at) => at as u16,
            None => self.lane(Lane::Comm(via.group.clone(), via.index)),
        }
    }

    fn lane(&mut self, lane: Lane) -> u16 {
        let at = self.lanes.iter().position(|known| *known == lane).unwrap_or_else(|| {
            self.lanes.push(lane);
            self.lanes.len() - 1
        });
        at as u16
    }

    /// Sends `src` `by` along the group and receives `dst` from the other side.
    pub fn hop(&mut self, label: &str, via: Via, by: i32, src: Buf, dst: Buf, tag: u32) -> u32 {
        self.hops(label, via, by, &[(src, dst)], tag)
    }

    /// Sends the first of each pair `by` along the group and receives the second from the other side, all in one
    /// group of messages.
    pub fn hops(&mut self, label: &str, via: Via, by: i32, pairs: &[(Buf, Buf)], tag: u32) -> u32 {
        let lane = self.comm_lane(via);
        let both = |&(src, dst): &(Buf, Buf)| {
            [Leg { dir: Direction::Send, by, buf: src, tag }, Leg { dir: Direction::Recv, by: -by, buf: dst, tag }]
        };
        let legs = pairs.iter().flat_map(both).collect();
        self.push(label, Some(lane), OpKind::Transfer { legs, engine: via.engine })
    }

    /// Sends `src` to the member `by` further along the group.
    pub fn send(&mut self, label: &str, via: Via, by: i32, src: Buf, tag: u32) -> u32 {
        self.leg(label, via, Leg { dir: Direction::Send, by, buf: src, tag })
    }

    /// Receives `dst` from the member `by` further along the group.
    pub fn recv(&mut self, label: &str, via: Via, by: i32, dst: Buf, tag: u32) -> u32 {
        self.leg(label, via, Leg { dir: Direction::Recv, by, buf: dst, tag })
    }

    fn leg(&mut self, label: &str, via: Via, leg: Leg) -> u32 {
        let lane = self.comm_lane(via);
        self.push(label, Some(lane), OpKind::Transfer { legs: vec![leg], engine: via.engine })
    }

    pub fn collective(&mut self, label: &str, via: Via, kind: CollectiveKind, src: Buf, dst: Buf, wire: Dtype) -> u32 {
        let lane = self.comm_lane(via);
        let (engine, acc, wire) = (via.engine, wire, wire.into());
        self.push(label, Some(lane), OpKind::Collective { kind, src, dst, wire, acc, engine })
    }

    /// Gathers elements of `dtype`, in whatever format they travel.
    pub fn gather(&mut self, label: &str, via: Via, src: Buf, dst: Buf, wire: Wire, dtype: Dtype) -> u32 {
        let (lane, kind) = (self.comm_lane(via), CollectiveKind::AllGather);
        let op = OpKind::Collective { kind, src, dst, wire, acc: dtype, engine: via.engine };
        self.push(label, Some(lane), op)
    }

    /// Sends rows of a route on their way; `kind` is a whole [`OpKind::Exchange`].
    pub fn exchange(&mut self, label: &str, group: &Group, index: u8, kind: OpKind) -> u32 {
        let lane = self.comm_lane(Via { group, index, engine: Engine::CopyEngine });
        self.push(label, Some(lane), kind)
    }

    pub fn call(&mut self, label: &str, block: BlockId, repeat: u32, args: &[Arg]) -> u32 {
        self.push(label, None, OpKind::Call { block, args: args.to_vec(), repeat })
    }

    /// Adds an edge that no buffer carries.
    pub fn after(&mut self, op: u32, earlier: u32) {
        if let Some(print) = &mut self.print {
            print.after(self.open.len(), op, earlier);
        }
        self.current().ops[op as usize].after.push(earlier);
    }
}

impl From<Buf> for Arg {
    fn from(buf: Buf) -> Arg {
        Arg::Buf { of: buf.of, slot: buf.slot }
    }
}

/// An argument of a call: iteration i binds slot (first + i*step) mod `of`.
pub fn each(buf: Buf, first: i32, step: i32, of: u32) -> Arg {
    Arg::Each { tensor: buf.of, first, step, of }
}
