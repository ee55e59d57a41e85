//! The words of a plan: buffers, lanes, ops.
//!
//! A plan is data. A program is a straight line of ops for one *role*; peers are named relative to the
//! rank. [`Call`](OpKind::Call) is the only hierarchy and is spliced by [`link`](super::link).

use super::kernel::Kernel;
use super::mesh::{Axis, Group};
use super::route::{ExchangeAlgo, Phase};
use super::wire::Wire;
pub use crate::spec::Dtype;
use serde::{Deserialize, Serialize};

pub type TensorId = u32;
pub type BlockId = u32;

/// What a tensor is for: the rows of a memory report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorKind {
    Param,
    Grad,
    OptState,
    /// Saved by the forward pass for the backward pass.
    Activation,
    Workspace,
    CommBuffer,
}

impl TensorKind {
    pub const ALL: [TensorKind; 6] = [
        TensorKind::Param,
        TensorKind::Grad,
        TensorKind::OptState,
        TensorKind::Activation,
        TensorKind::Workspace,
        TensorKind::CommBuffer,
    ];

    pub fn name(self) -> &'static str {
        match self {
            TensorKind::Param => "param",
            TensorKind::Grad => "grad",
            TensorKind::OptState => "opt_state",
            TensorKind::Activation => "activation",
            TensorKind::Workspace => "workspace",
            TensorKind::CommBuffer => "comm_buffer",
        }
    }

    /// Lives from before the step to after it.
    pub fn persists(self) -> bool {
        matches!(self, TensorKind::Param | TensorKind::Grad | TensorKind::OptState)
    }
}

/// `slots` private copies of one shape on every rank: a layer each, a microbatch each, or a double buffer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    pub name: String,
    /// Sizes on each rank. The first dim is the one that the `rows` of a [`Buf`] index.
    pub shape: Vec<u64>,
    pub dtype: Dtype,
    pub slots: u32,
    pub kind: TensorKind,
    /// Whether it is in the memory of the node's CPUs rather than in the device's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub host: bool,
    /// Elements of a slot, from and to, one range behind the other, that are weights of products in FP8: as such they
    /// travel where a [`Collective`](OpKind::Collective) gathers in FP8.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub in_fp8: Vec<[u64; 2]>,
}

impl Tensor {
    pub fn rows(&self) -> u64 {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements of one row.
    pub fn row_len(&self) -> u64 {
        self.shape.iter().skip(1).product()
    }

    /// Elements of one slot.
    pub fn elems(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Bytes of one slot.
    pub fn bytes(&self) -> u64 {
        self.elems() * self.dtype.size()
    }

    /// Elements of rows `rows` of one slot; `None`: of all of it.
    pub fn elems_of(&self, rows: Option<[u64; 2]>) -> u64 {
        rows.map_or(self.rows(), |[from, to]| to - from) * self.row_len()
    }
}

/// A tensor of the plan, or a parameter of the block the op stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorRef {
    Tensor(TensorId),
    Formal(u32),
}

/// A slot of a tensor, or some rows of it. Overlapping ranges make a dependency; an op that accumulates
/// reads and writes the same Buf. The slot of a formal counts from the slot the caller bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Buf {
    pub of: TensorRef,
    pub slot: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<[u64; 2]>,
}

impl Buf {
    /// The tensor of a buffer that was declared on the plan.
    ///
    /// # Panics
    /// For a formal, which is another tensor in every call.
    pub fn tensor(self) -> TensorId {
        match self.of {
            TensorRef::Tensor(id) => id,
            TensorRef::Formal(i) => panic!("formal {i} is no tensor of the plan"),
        }
    }

    pub fn slot(self, slot: u32) -> Buf {
        Buf { slot, ..self }
    }

    pub fn rows(self, from: u64, to: u64) -> Buf {
        Buf { rows: Some([from, to]), ..self }
    }

    /// Some rows of the buffer, given as `[from, to]`.
    pub fn at(self, rows: [u64; 2]) -> Buf {
        self.rows(rows[0], rows[1])
    }
}

/// CUDA stream or communicator: first in, first out, in program order, in every interpreter.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    Compute(u8),
    Comm(Group, u8),
    /// A copy engine between the device's memory and the host's: one for each way, since they run beside each other.
    Copy(Toward),
    /// The CPU's own kernels, on the host's memory.
    Host,
}

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Toward {
    Host,
    Device,
}

impl Lane {
    pub fn label(&self) -> String {
        match self {
            Lane::Compute(i) => format!("compute.{i}"),
            Lane::Comm(group, i) => format!("comm.{}.{i}", group.label()),
            Lane::Copy(Toward::Host) => "copy.to_host".into(),
            Lane::Copy(Toward::Device) => "copy.to_device".into(),
            Lane::Host => "host".into(),
        }
    }

    /// The ranks that talk on the lane; `None` where it is no communicator.
    pub fn group(&self) -> Option<&Group> {
        match self {
            Lane::Comm(group, _) => Some(group),
            Lane::Compute(_) | Lane::Copy(_) | Lane::Host => None,
        }
    }

    /// Whether stages of a pipeline talk on the lane: they wait for each other's work, whatever that is made of, which
    /// is the pipeline's bubble.
    pub fn joins_stages(&self) -> bool {
        self.group().is_some_and(|group| group.charged_axis() == Axis::Pp)
    }

    /// Whether the lane runs kernels of the device.
    pub fn computes(&self) -> bool {
        matches!(self, Lane::Compute(_))
    }
}

/// The part of the machine that moves bytes: it decides what else slows down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// A kernel on `ctas` thread blocks, which the compute lane has to do without. For an exchange, its algorithm knows
    /// their number best; 0: the plan leaves it to the exchange's library.
    Sm { ctas: u16 },
    /// DMA engines: no SM is taken.
    CopyEngine,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    Send,
    Recv,
}

impl Direction {
    pub fn other(self) -> Direction {
        match self {
            Direction::Send => Direction::Recv,
            Direction::Recv => Direction::Send,
        }
    }
}

/// One direction of a transfer. `by` counts along the lane's group and wraps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Leg {
    pub dir: Direction,
    pub by: i32,
    pub buf: Buf,
    pub tag: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    AllReduce,
    ReduceScatter,
    AllGather,
    AllToAll,
}

impl CollectiveKind {
    pub fn name(self) -> &'static str {
        match self {
            CollectiveKind::AllReduce => "all_reduce",
            CollectiveKind::ReduceScatter => "reduce_scatter",
            CollectiveKind::AllGather => "all_gather",
            CollectiveKind::AllToAll => "all_to_all",
        }
    }
}

/// The argument that a call binds to a formal of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arg {
    /// One slot, in every iteration.
    Buf { of: TensorRef, slot: u32 },
    /// Iteration i binds slot (first + i*step) mod `of`: step -1 walks backward, `of` 2 alternates.
    Each { tensor: TensorRef, first: i32, step: i32, of: u32 },
}

impl Arg {
    pub fn of(&self) -> TensorRef {
        match *self {
            Arg::Buf { of, .. } | Arg::Each { tensor: of, .. } => of,
        }
    }

    /// The slot bound in iteration `i`, counted from the slot that the caller has bound.
    pub fn slot(&self, i: u32) -> u32 {
        match *self {
            Arg::Buf { slot, .. } => slot,
            Arg::Each { first, step, of, .. } => {
                let at = i64::from(first) + i64::from(i) * i64::from(step);
                // A walk seldom wraps, and to divide takes longer than all the rest.
                let inside = (0..i64::from(of)).contains(&at);
                if inside { at as u32 } else { at.rem_euclid(i64::from(of.max(1))) as u32 }
            }
        }
    }

    /// Iterations after which the slots come again.
    pub fn period(&self) -> u32 {
        match *self {
            Arg::Buf { .. } => 1,
            Arg::Each { of, .. } => of,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
// Most ops of a plan are computes: to box their kernel would take room, not save it.
#[allow(clippy::large_enum_variant)]
pub enum OpKind {
    Compute {
        kernel: Kernel,
        reads: Vec<Buf>,
        writes: Vec<Buf>,
    },
    /// One ncclGroup on the lane's group. Starts when its local dependencies hold; each leg moves when
    /// both ends have started; ends when all its legs have.
    Transfer {
        legs: Vec<Leg>,
        engine: Engine,
    },
    /// Starts everywhere when its last member has started. Stays whole: hops come from
    /// [`collective`](crate::collective). `wire` is the format on the link, FP8 only where elements are gathered; `acc`
    /// is the dtype of the reduction.
    Collective {
        kind: CollectiveKind,
        src: Buf,
        dst: Buf,
        wire: Wire,
        acc: Dtype,
        engine: Engine,
    },
    /// Rows of a route to their experts, or back: what ranks send each other differs. Starts everywhere when its
    /// last member has started, and a member ends with its own last hop. Operands go side by side, row by row: rows
    /// (of codes and of scales, where the wire is FP8), and what the choices of a row weigh.
    Exchange {
        route: u32,
        src: Vec<Buf>,
        dst: Vec<Buf>,
        algo: ExchangeAlgo,
        phase: Phase,
        wire: Wire,
        acc: Dtype,
        engine: Engine,
    },
    /// Bytes between the device's memory and the host's, as they are, by a copy engine.
    Copy {
        src: Buf,
        dst: Buf,
    },
    /// A block with its formals bound, `repeat` times. Spliced into the caller's lanes: no barrier.
    Call {
        block: BlockId,
        args: Vec<Arg>,
        repeat: u32,
    },
}

impl TensorRef {
    fn moved(&mut self, by: u32) {
        if let TensorRef::Formal(i) = self {
            *i += by;
        }
    }
}

impl OpKind {
    /// The name of the op in timelines: that of its kernel or collective, the phase of an exchange, or its kind.
    pub fn name(&self) -> &'static str {
        match self {
            OpKind::Compute { kernel, .. } => kernel.name(),
            OpKind::Collective { kind, .. } => kind.name(),
            OpKind::Exchange { phase, .. } => phase.name(),
            OpKind::Copy { .. } => "copy",
            OpKind::Transfer { .. } => "transfer",
            OpKind::Call { .. } => "call",
        }
    }

    /// The buffers that are read (`Send`), or those that are written (`Recv`).
    fn operands(&self, dir: Direction) -> impl Iterator<Item = Buf> {
        use std::slice::from_ref;
        let (sent, received, legs): (&[Buf], &[Buf], &[Leg]) = match self {
            OpKind::Compute { reads, writes, .. } => (reads, writes, &[]),
            OpKind::Exchange { src, dst, .. } => (src, dst, &[]),
            OpKind::Collective { src, dst, .. } | OpKind::Copy { src, dst } => (from_ref(src), from_ref(dst), &[]),
            OpKind::Transfer { legs, .. } => (&[], &[], legs),
            OpKind::Call { .. } => (&[], &[], &[]),
        };
        let whole = if dir == Direction::Send { sent } else { received };
        whole.iter().copied().chain(legs.iter().filter(move |leg| leg.dir == dir).map(|leg| leg.buf))
    }

    /// The buffers that an op reads and writes, in the order of [`Op::bufs`], to be changed; none for a call.
    pub fn bufs_mut(&mut self) -> (Vec<&mut Buf>, Vec<&mut Buf>) {
        match self {
            OpKind::Compute { reads, writes, .. } => (reads.iter_mut().collect(), writes.iter_mut().collect()),
            OpKind::Transfer { legs, .. } => {
                let (mut sends, mut receives) = (vec![], vec![]);
                for Leg { dir, buf, .. } in legs {
                    if *dir == Direction::Send { sends.push(buf) } else { receives.push(buf) }
                }
                (sends, receives)
            }
            OpKind::Collective { src, dst, .. } | OpKind::Copy { src, dst } => (vec![src], vec![dst]),
            OpKind::Exchange { src, dst, .. } => (src.iter_mut().collect(), dst.iter_mut().collect()),
            OpKind::Call { .. } => (vec![], vec![]),
        }
    }

    /// The kind of the op in a block that has `by` other formals before these: every formal's number grows by `by`.
    pub fn formals_moved(mut self, by: u32) -> OpKind {
        match &mut self {
            OpKind::Compute { reads, writes, .. } => reads.iter_mut().chain(writes).for_each(|buf| buf.of.moved(by)),
            OpKind::Transfer { legs, .. } => legs.iter_mut().for_each(|leg| leg.buf.of.moved(by)),
            OpKind::Collective { src, dst, .. } | OpKind::Copy { src, dst } => {
                [src, dst].into_iter().for_each(|buf| buf.of.moved(by))
            }
            OpKind::Exchange { src, dst, .. } => src.iter_mut().chain(dst).for_each(|buf| buf.of.moved(by)),
            OpKind::Call { args, .. } => args.iter_mut().for_each(|arg| match arg {
                Arg::Buf { of, .. } | Arg::Each { tensor: of, .. } => of.moved(by),
            }),
        }
        self
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Op {
    /// Index in its program or block.
    pub id: u32,
    pub label: String,
    /// `None` for a call, whose ops name their own lanes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lane: Option<u16>,
    pub kind: OpKind,
    /// Extra edges, by op id in the same program or block. Buffers and lanes give all the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<u32>,
}

impl Op {
    /// The buffers that the op reads, and those that it writes: dependencies are derived from these.
    pub fn bufs(&self) -> (Vec<Buf>, Vec<Buf>) {
        (self.reads().collect(), self.writes().collect())
    }

    /// The buffers that the op reads, the first half of [`Op::bufs`].
    pub fn reads(&self) -> impl Iterator<Item = Buf> {
        self.kind.operands(Direction::Send)
    }

    /// The buffers that the op writes, the second half of [`Op::bufs`].
    pub fn writes(&self) -> impl Iterator<Item = Buf> {
        self.kind.operands(Direction::Recv)
    }
}
