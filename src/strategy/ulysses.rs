//! DeepSpeed-Ulysses (arXiv:2309.14509): an all-to-all turns "my tokens, all heads" into "all tokens,
//! my heads" before attention, and another turns it back. q, k and v travel packed in one message.
//! With fewer KV heads than ranks every KV head is sent to ranks / kv_heads ranks, and the gradients
//! of the copies are summed on the way back.
//!
//! What runs between the exchanges is a [`Core`](super::attention::Core): plain attention, or a ring over
//! another axis (the hybrid of Fang and Zhao, USP, arXiv:2405.07719).

use crate::plan::{
    Axis, Buf, Builder, CollectiveKind, Dtype, Engine, Exchange, Group, HeadPart, Kernel, Packing, TensorKind, Via,
};

pub struct Ulysses {
    pub ranks: u32,
    pub batch: u64,
    /// Tokens of one sequence on a rank outside the exchange.
    pub seq: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head_dim: u64,
    pub dtype: Dtype,
    pub engine: Engine,
}

/// Send and receive buffer of one exchange.
#[derive(Clone, Copy)]
struct Wire {
    send: Buf,
    recv: Buf,
}

/// Buffers that every layer of a rank reuses.
pub struct Scratch {
    qkv: Wire,
    o: Wire,
    /// The gradient of the output after its exchange: all tokens, my heads.
    pub do_full: Buf,
    dq: Buf,
    dkv: Buf,
}

impl Ulysses {
    fn q(&self) -> HeadPart {
        HeadPart { lanes: 1, heads: self.heads, head_dim: self.head_dim }
    }

    fn kv(&self) -> HeadPart {
        HeadPart { lanes: 2, heads: self.kv_heads, head_dim: self.head_dim }
    }

    /// Heads and KV heads a rank works on between the exchanges.
    pub fn local_heads(&self) -> (u64, u64) {
        let ranks = u64::from(self.ranks);
        (self.q().local_heads(ranks), self.kv().local_heads(ranks))
    }

    pub fn scratch(&self, b: &mut Builder) -> Scratch {
        let (ranks, n) = (u64::from(self.ranks), self.batch * self.seq);
        let (q, kv) = (self.q().local_row(ranks), self.kv().local_row(ranks));
        let mut wire = |name: &str, row| {
            let shape = [ranks, n * row];
            let mut end = |side| b.tensor(&format!("a2a_{name}_{side}"), &shape, self.dtype, TensorKind::CommBuffer, 1);
            Wire { send: end("send"), recv: end("recv") }
        };
        let (qkv, o) = (wire("qkv", q + kv), wire("o", q));
        let mut work = |name, shape: [u64; 2]| b.tensor(name, &shape, self.dtype, TensorKind::Workspace, 1);
        Scratch {
            qkv,
            o,
            do_full: work("do_full", [n * ranks, q]),
            dq: work("dq_local", [n, self.heads * self.head_dim]),
            dkv: work("dkv_local", [n, 2 * self.kv_heads * self.head_dim]),
        }
    }

    /// q and kv of my tokens -> q and kv of all tokens, for my heads.
    pub fn scatter_qkv(&self, b: &mut Builder, s: &Scratch, from: [Buf; 2], to: [Buf; 2]) {
        self.exchange(
            b,
            "qkv",
            s.qkv,
            &[self.q(), self.kv()],
            (Exchange::PackHeads, &from),
            (Exchange::UnpackSeq, &to),
        );
    }

    /// The output for my heads -> the output of my tokens.
    pub fn gather_o(&self, b: &mut Builder, s: &Scratch, from: Buf, to: Buf) {
        self.exchange(b, "o", s.o, &[self.q()], (Exchange::PackSeq, &[from]), (Exchange::UnpackHeads, &[to]));
    }

    /// The gradient of the output of my tokens -> that of all tokens, for my heads.
    pub fn scatter_do(&self, b: &mut Builder, s: &Scratch, from: Buf) -> Buf {
        let to = s.do_full;
        self.exchange(b, "do", s.o, &[self.q()], (Exchange::PackHeads, &[from]), (Exchange::UnpackSeq, &[to]));
        to
    }

    /// dq and dkv for my heads -> those of my tokens, copies of a KV head summed.
    pub fn gather_dqkv(&self, b: &mut Builder, s: &Scratch, from: (Buf, Buf)) -> (Buf, Buf) {
        let (from, to) = ([from.0, from.1], [s.dq, s.dkv]);
        self.exchange(
            b,
            "dqkv",
            s.qkv,
            &[self.q(), self.kv()],
            (Exchange::PackSeq, &from),
            (Exchange::UnpackHeads, &to),
        );
        (s.dq, s.dkv)
    }

    #[allow(clippy::too_many_arguments)]
    fn exchange(
        &self,
        b: &mut Builder,
        what: &str,
        wire: Wire,
        parts: &[HeadPart],
        pack: (Exchange, &[Buf]),
        unpack: (Exchange, &[Buf]),
    ) {
        let permute = |exchange| Kernel::Permute {
            exchange,
            packing: Packing::Together,
            ranks: u64::from(self.ranks),
            batch: self.batch,
            seq: self.seq,
            parts: parts.to_vec(),
        };
        let group = Group::axes(&[Axis::Up]);
        let via = Via { group: &group, index: 0, engine: self.engine };
        b.compute(&format!("{what}_pack"), permute(pack.0), pack.1, &[wire.send]);
        let (label, kind) = (format!("{what}_a2a"), CollectiveKind::AllToAll);
        b.collective(&label, via, kind, wire.send, wire.recv, self.dtype);
        b.compute(&format!("{what}_unpack"), permute(unpack.0), &[wire.recv], unpack.1);
    }
}
