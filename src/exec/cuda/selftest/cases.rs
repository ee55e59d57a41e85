//! The kernels that are tested, on which numbers, and how far off each may be.
//!
//! Odd shapes on purpose: rows that are no multiple of a tile, columns that no wide load takes, ranks that see little.

mod experts;

use crate::plan::dropout::Dropout;
use crate::plan::foreach::ForeachKernel;
use crate::plan::kernel::{HeadRanks, SsmKernel, SsmOp};
use crate::plan::muon::{self, Matrices, MuonKernel};
use crate::plan::*;
use crate::spec::{Documents, Factor, MambaSpec, Mask, RopeScaling};
use experts::experts;
use std::ops::Range;

/// A kernel with its operands.
#[derive(Debug, Clone)]
pub struct Case {
    pub group: &'static str,
    pub kernel: Kernel,
    pub views: Vec<Mesh>,
    pub route: Option<Route>,
    /// The dtype of each operand that is read, and between which numbers its values lie.
    pub reads: Vec<(Dtype, Range<f64>)>,
    pub writes: Vec<Dtype>,
    /// The largest error that is right, as a part of the largest number of each result.
    pub tolerance: f64,
}

#[derive(Default)]
struct Cases {
    group: &'static str,
    all: Vec<Case>,
}

impl Cases {
    fn hold(&mut self, kernel: &Kernel, views: &[Mesh], reads: &[Shape], writes: &[Dtype], tolerance: f64) {
        self.routed(kernel, views, None, reads, writes, tolerance);
    }

    fn routed(
        &mut self,
        kernel: &Kernel,
        views: &[Mesh],
        route: Option<&Route>,
        reads: &[Shape],
        writes: &[Dtype],
        tolerance: f64,
    ) {
        let (kernel, views, route) = (kernel.clone(), views.to_vec(), route.cloned());
        let (reads, writes) = (reads.to_vec(), writes.to_vec());
        self.all.push(Case { group: self.group, kernel, views, route, reads, writes, tolerance });
    }
}

/// Writes the cases of a group.
type Group = (&'static str, fn(&mut Cases));

const GROUPS: &[Group] = &[
    ("attention_forward", attention_forward),
    ("attention_onto", attention_onto),
    ("attention_head_dims", attention_head_dims),
    ("attention_narrow_values", attention_narrow_values),
    ("attention_backward", attention_backward),
    ("attention_backward_onto", attention_backward_onto),
    ("attention_alibi", attention_alibi),
    ("attention_merge", attention_merge),
    ("norms", norms),
    ("head_norms", head_norms),
    ("latent", latent),
    ("pointwise", pointwise),
    ("state_space", state_space),
    ("masked_sums", masked_sums),
    ("residuals", residuals),
    ("rotary", rotary),
    ("ends", ends),
    ("moves", moves),
    ("products", products),
    ("muon", muon),
    ("experts", experts),
];

/// The groups by name.
pub fn groups() -> impl Iterator<Item = &'static str> {
    GROUPS.iter().map(|group| group.0)
}

/// The cases of a group; empty for an unknown group.
pub fn of_group(name: &str) -> Vec<Case> {
    let mut cases = Cases::default();
    for (group, write) in GROUPS.iter().filter(|group| group.0 == name) {
        cases.group = group;
        write(&mut cases);
    }
    cases.all
}

/// How an operand is made: its dtype, and where its values lie.
type Shape = (Dtype, Range<f64>);

const BF16: Shape = (Dtype::Bf16, -1.0..1.0);
const F32: Shape = (Dtype::F32, -1.0..1.0);

fn ids(below: u64) -> Shape {
    (Dtype::U32, 0.0..below as f64)
}

fn one() -> Vec<Mesh> {
    vec![Mesh::new(&[(Axis::Cp, 1)])]
}

fn ring(ranks: u32) -> Vec<Mesh> {
    vec![Mesh::new(&[(Axis::Cp, ranks)])]
}

/// Tolerances of bf16, which keeps 8 bits. Numbers that are rounded once more inside (probabilities, dS) err twice, in
/// sums that mostly cancel.
const ROUNDED: f64 = 1.0 / 256.0;
const TWICE: f64 = 4.0 * ROUNDED;
const SINGLE: f64 = 1e-5;

fn masks() -> [Mask; 4] {
    let documents: Documents = vec![90, 101, 109].into();
    [
        Mask::new(true),
        Mask::new(false),
        Mask { window: Some(70), ..Mask::new(true) },
        Mask { documents, ..Mask::new(true) },
    ]
}

/// Blocks of a ring: diagonal, below it, above it, with each mask; 150 rows a rank, which is no multiple of a tile.
fn blocks(head_dim: u64) -> Vec<AttnBlock> {
    let of = |split, shift: i32, mask: Mask| {
        let q = Segs::new(300, &[(Axis::Cp, split)]);
        let kv = q.shifted(Axis::Cp, shift);
        AttnBlock { q, kv, batch: 2, heads: 4, kv_heads: 2, head_dim, v_dim: None, mask, factor: Factor::ONE }
    };
    let shifts = [(Split::Zigzag, 0), (Split::Contiguous, 1), (Split::Stripe, 1)];
    masks().into_iter().flat_map(|mask| shifts.map(|(split, shift)| of(split, shift, mask.clone()))).collect()
}

/// The blocks of which every rank sees something: a block that nobody sees is not launched at all.
fn seen_everywhere(head_dim: u64) -> Vec<AttnBlock> {
    let views = ring(2);
    blocks(head_dim).into_iter().filter(|b| (0..2).all(|rank| b.shape(&views, rank).area > 0)).collect()
}

fn attention_forward(all: &mut Cases) {
    for block in seen_everywhere(64) {
        all.hold(&Kernel::Attention(block), &ring(2), &[BF16, BF16], &[Dtype::Bf16, Dtype::F32], TWICE);
    }
}

fn attention_onto(all: &mut Cases) {
    for block in seen_everywhere(32).into_iter().take(4) {
        all.hold(&Kernel::AttentionOnto(block), &ring(2), &[BF16, BF16, F32, F32], &[Dtype::F32, Dtype::F32], TWICE);
    }
}

fn attention_head_dims(all: &mut Cases) {
    for head_dim in [96, 128] {
        let block = seen_everywhere(head_dim).swap_remove(0);
        all.hold(&Kernel::Attention(block.clone()), &ring(2), &[BF16, BF16], &[Dtype::Bf16, Dtype::F32], TWICE);
        let reads = [BF16, BF16, BF16, (Dtype::F32, 4.0..5.0), F32];
        all.hold(&Kernel::AttentionBwd(block), &ring(2), &reads, &[Dtype::F32, Dtype::F32], TWICE);
    }
}

/// Values narrower than keys, as latent attention has them (DeepSeek-V3: 192 and 128, with YaRN's factor of scores; the
/// factor has not run on a GPU yet).
fn attention_narrow_values(all: &mut Cases) {
    for (head_dim, v_dim) in [(64, 32), (192, 128)] {
        for block in seen_everywhere(head_dim).into_iter().take(2) {
            let factor = Factor(if head_dim == 192 { 1.59 } else { 1.0 });
            let block = AttnBlock { v_dim: Some(v_dim), kv_heads: 4, factor, ..block };
            all.hold(&Kernel::Attention(block.clone()), &ring(2), &[BF16, BF16], &[Dtype::Bf16, Dtype::F32], TWICE);
            let reads = [BF16, BF16, BF16, (Dtype::F32, 4.0..5.0), F32];
            all.hold(&Kernel::AttentionBwd(block), &ring(2), &reads, &[Dtype::Bf16, Dtype::F32], TWICE);
        }
    }
}

fn attention_backward(all: &mut Cases) {
    // A log-sum-exp of about the right size: probabilities far above one would drown everything else.
    let reads = [BF16, BF16, BF16, (Dtype::F32, 4.0..5.0), F32];
    for (i, block) in seen_everywhere(64).into_iter().enumerate() {
        let dtypes = [[Dtype::F32, Dtype::F32], [Dtype::Bf16, Dtype::Bf16]][i % 2];
        all.hold(&Kernel::AttentionBwd(block), &ring(2), &reads, &dtypes, TWICE);
    }
}

fn attention_backward_onto(all: &mut Cases) {
    for (side, sum) in [(Side::Q, F32), (Side::Kv, F32), (Side::Q, BF16), (Side::Kv, BF16)] {
        let block = seen_everywhere(32).swap_remove(1);
        let reads = [BF16, BF16, BF16, (Dtype::F32, 4.0..5.0), F32, sum.clone()];
        let writes = if side == Side::Q { [sum.0, Dtype::F32] } else { [Dtype::F32, sum.0] };
        all.hold(&Kernel::AttentionBwdOnto(block, side), &ring(2), &reads, &writes, TWICE);
    }
}

/// Six heads, so that slopes of two series are among them; the second rank's are the same ones.
fn attention_alibi(all: &mut Cases) {
    let leaning = |block: AttnBlock| {
        let mask = Mask { alibi: Some(6), ..block.mask };
        AttnBlock { heads: 6, kv_heads: 3, mask, ..block }
    };
    let reads = [BF16, BF16, BF16, (Dtype::F32, 3.0..4.0), F32];
    for block in seen_everywhere(64).into_iter().step_by(2).map(leaning) {
        all.hold(&Kernel::Attention(block.clone()), &ring(2), &[BF16, BF16], &[Dtype::Bf16, Dtype::F32], TWICE);
        all.hold(&Kernel::AttentionBwd(block), &ring(2), &reads, &[Dtype::F32, Dtype::Bf16], TWICE);
    }
    let block = leaning(seen_everywhere(32).swap_remove(1));
    let onto = Kernel::AttentionOnto(block);
    all.hold(&onto, &ring(2), &[BF16, BF16, F32, F32], &[Dtype::F32, Dtype::F32], TWICE);
}

fn attention_merge(all: &mut Cases) {
    let block = || seen_everywhere(32).swap_remove(1);
    all.hold(&Kernel::MergeLse(block()), &ring(2), &[F32, F32, BF16, F32], &[Dtype::F32, Dtype::F32], SINGLE);
    all.hold(&Kernel::MergeLse(block()), &ring(2), &[BF16, F32, BF16, F32], &[Dtype::Bf16, Dtype::F32], ROUNDED);
    all.hold(&Kernel::AddLse(block()), &ring(2), &[F32, F32], &[Dtype::F32], SINGLE);
    all.hold(&Kernel::AddWeighted(block()), &ring(2), &[F32, BF16, F32, F32], &[Dtype::F32], SINGLE);
    let delta = Kernel::AttentionDelta { rows: 37, heads: 3, head_dim: 40 };
    all.hold(&delta, &one(), &[BF16, BF16], &[Dtype::F32], SINGLE);
}

fn norms(all: &mut Cases) {
    for cols in [37, 320] {
        let rows = 300;
        all.hold(&Kernel::Norm { rows, cols, eps: 1e-5 }, &one(), &[BF16, F32], &[Dtype::Bf16], ROUNDED);
        for bias in [false, true] {
            let forward = Kernel::LayerNorm { rows, cols, eps: 1e-5, bias };
            all.hold(&forward, &one(), &[BF16, BF16], &[Dtype::F32], SINGLE);
            let backward = Kernel::LayerNormBwd { rows, cols, eps: 1e-5, bias };
            all.hold(&backward, &one(), &[BF16, F32, BF16, F32, F32], &[Dtype::F32, Dtype::F32], SINGLE);
        }
        let backward = Kernel::NormBwd { rows, cols, eps: 1e-5 };
        all.hold(&backward, &one(), &[BF16, BF16, BF16, BF16, F32], &[Dtype::Bf16, Dtype::F32], ROUNDED);
        all.hold(&Kernel::BiasBwd { rows, cols }, &one(), &[BF16, F32], &[Dtype::F32], SINGLE);
    }
    // Rows that a block of threads keeps in registers, of one piece, two and four, which are too many of a LayerNorm's; and
    // several of two pieces, of which the next is loaded ahead.
    for (rows, cols) in [(3, 2048), (3, 2056), (3, 4104), (600, 2056)] {
        let backward = Kernel::NormBwd { rows, cols, eps: 1e-5 };
        all.hold(&backward, &one(), &[BF16, BF16, BF16, BF16, F32], &[Dtype::Bf16, Dtype::F32], ROUNDED);
        all.hold(&backward, &one(), &[BF16, F32, BF16, F32, F32], &[Dtype::F32, Dtype::F32], SINGLE);
        let centred = Kernel::LayerNormBwd { rows, cols, eps: 1e-5, bias: true };
        all.hold(&centred, &one(), &[BF16, BF16, BF16, BF16, F32], &[Dtype::Bf16, Dtype::F32], ROUNDED);
        all.hold(&Kernel::BiasBwd { rows, cols }, &one(), &[BF16, F32], &[Dtype::F32], SINGLE);
    }
}

fn head_norms(all: &mut Cases) {
    // The last has too many columns for registers, the first an odd number.
    for (rows, head_dim) in [(21, 37), (21, 40), (300, 128), (30, 200), (11, 260)] {
        let (heads, kv_heads, eps) = (3, 2, 1e-5);
        let forward = Kernel::HeadNorm { rows, heads, kv_heads, head_dim, eps };
        all.hold(&forward, &one(), &[BF16, BF16], &[Dtype::Bf16, Dtype::Bf16], ROUNDED);
        let backward = Kernel::HeadNormBwd { rows, heads, kv_heads, head_dim, eps };
        all.hold(&backward, &one(), &[F32, BF16, BF16, F32], &[Dtype::F32, Dtype::F32], SINGLE);
        all.hold(&backward, &one(), &[BF16, BF16, F32, F32], &[Dtype::Bf16, Dtype::F32], ROUNDED);
    }
}

fn latent(all: &mut Cases) {
    let rows = 300;
    for (cols, rest) in [(37, 0), (37, 5), (320, 64), (320, 0), (2056, 64)] {
        let (forward, backward) =
            (Kernel::LatentNorm { rows, cols, rest, eps: 1e-5 }, Kernel::LatentNormBwd { rows, cols, rest, eps: 1e-5 });
        let behind = usize::from(rest > 0);
        all.hold(&forward, &one(), &[BF16, BF16], &vec![Dtype::F32; 1 + behind], SINGLE);
        let mut reads = vec![BF16, BF16, F32, BF16];
        reads.resize(4 + behind, BF16);
        all.hold(&backward, &one(), &reads, &[Dtype::F32, Dtype::F32], SINGLE);
    }
    let (batch, heads, nope, rope, v) = (2, 3, 6, 4, 8);
    for (documents, scaling) in [(Documents::default(), None), (vec![50, 70].into(), Some(yarn()))] {
        let segs = Segs::new(120, &[(Axis::Cp, Split::Zigzag)]);
        let of = |backward| {
            let (segs, documents, scaling) = (segs.clone(), documents.clone(), scaling.clone());
            Kernel::LatentRope { segs, documents, batch, heads, nope, rope, v, theta: 1e4, backward, scaling }
        };
        all.hold(&of(false), &ring(2), &[BF16, BF16, F32], &[Dtype::F32, Dtype::F32], SINGLE);
        all.hold(&of(true), &ring(2), &[BF16, F32], &[Dtype::F32, Dtype::F32, Dtype::F32], SINGLE);
        all.hold(&of(true), &ring(2), &[BF16, BF16], &[Dtype::Bf16, Dtype::Bf16, Dtype::F32], ROUNDED);
    }
}

fn pointwise(all: &mut Cases) {
    let (rows, elems) = (21, 21 * 40);
    for cols in [40, 13] {
        all.hold(&Kernel::SwiGlu { rows, cols }, &one(), &[BF16], &[Dtype::F32], SINGLE);
        all.hold(&Kernel::SwiGluBwd { rows, cols }, &one(), &[BF16, BF16], &[Dtype::Bf16], ROUNDED);
    }
    all.hold(&Kernel::Gelu { elems }, &one(), &[BF16], &[Dtype::F32], SINGLE);
    all.hold(&Kernel::GeluBwd { elems }, &one(), &[BF16, BF16], &[Dtype::F32], SINGLE);
    all.hold(&Kernel::Relu2 { elems }, &one(), &[BF16], &[Dtype::F32], SINGLE);
    all.hold(&Kernel::Relu2Bwd { elems }, &one(), &[BF16, BF16], &[Dtype::F32], SINGLE);
    all.hold(&Kernel::Cast { elems }, &one(), &[F32], &[Dtype::Bf16], ROUNDED);
    all.hold(&Kernel::Cast { elems: 7 }, &one(), &[BF16], &[Dtype::F32], 0.0);
    all.hold(&Kernel::Fill { elems }, &one(), &[], &[Dtype::Bf16], 0.0);
    all.hold(&Kernel::Add { elems, trim: None }, &one(), &[BF16, F32], &[Dtype::F32], SINGLE);
    all.hold(&Kernel::DropoutBwd { elems, probability: 0.25 }, &one(), &[BF16, BF16], &[Dtype::F32], SINGLE);
    let adam = Kernel::Adam { elems, lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let state = [BF16, F32, F32, (Dtype::F32, 0.0..1.0)];
    all.hold(&adam, &one(), &state, &[Dtype::F32, Dtype::F32, Dtype::F32, Dtype::Bf16], ROUNDED);
    all.hold(&adam, &one(), &state, &[Dtype::F32, Dtype::F32, Dtype::F32], SINGLE);
    let narrow = [BF16, BF16, BF16, (Dtype::Bf16, 0.0..1.0)];
    all.hold(&adam, &one(), &narrow, &[Dtype::Bf16; 3], ROUNDED);
    let adam = Adam { weight_decay: 0.1, ..Adam::default() };
    let [moments, moves] = [ForeachKernel::Moments { elems, adam }, ForeachKernel::Move { elems, adam }];
    all.hold(&Kernel::Foreach(moments), &one(), &[BF16, F32, state[3].clone()], &[Dtype::F32; 3], SINGLE);
    all.hold(&Kernel::Foreach(moments), &one(), &narrow[1..], &[Dtype::Bf16; 3], ROUNDED);
    let divided = [F32, F32, (Dtype::F32, 0.5..1.0)];
    all.hold(&Kernel::Foreach(moves), &one(), &divided, &[Dtype::F32, Dtype::Bf16], ROUNDED);
    all.hold(&Kernel::Foreach(moves), &one(), &divided, &[Dtype::F32], SINGLE);
}

/// Chunks of several tiles and of less than one, the last one short; a group of one head, of some, of all.
fn state_space(all: &mut Cases) {
    let shapes = [
        (2, 150, MambaSpec { heads: 4, head_dim: 16, groups: 2, state: 32, conv: 4, chunk: 64 }),
        (1, 200, MambaSpec { heads: 10, head_dim: 32, groups: 1, state: 16, conv: 3, chunk: 150 }),
        (1, 70, MambaSpec { heads: 2, head_dim: 64, groups: 2, state: 128, conv: 4, chunk: 40 }),
    ];
    for (batch, seq, mamba) in shapes {
        let mut of = |op, reads: &[Shape], writes: &[Dtype], tolerance| {
            all.hold(&Kernel::Ssm(SsmKernel { batch, seq, mamba, op }), &one(), reads, writes, tolerance);
        };
        of(SsmOp::Conv, &[BF16, BF16], &[Dtype::Bf16], ROUNDED);
        of(SsmOp::ConvBwd, &[BF16, BF16, BF16, BF16, F32], &[Dtype::Bf16, Dtype::F32], ROUNDED);
        of(SsmOp::Scan, &[BF16, BF16, F32], &[Dtype::Bf16], TWICE);
        let reads = [BF16, BF16, BF16, F32, BF16, F32];
        of(SsmOp::ScanBwd, &reads, &[Dtype::Bf16, Dtype::Bf16, Dtype::F32], TWICE);
        of(SsmOp::Norm { eps: 1e-5 }, &[BF16, BF16, BF16], &[Dtype::Bf16], ROUNDED);
        let reads = [BF16, BF16, BF16, BF16, F32];
        of(SsmOp::NormBwd { eps: 1e-5 }, &reads, &[Dtype::Bf16, Dtype::Bf16, Dtype::F32], ROUNDED);
        of(SsmOp::Gate, &[BF16, BF16], &[Dtype::Bf16], ROUNDED);
        of(SsmOp::GateBwd, &[BF16, BF16, BF16], &[Dtype::Bf16, Dtype::Bf16], ROUNDED);
        of(SsmOp::GroupNorm { eps: 1e-5 }, &[BF16, BF16], &[Dtype::Bf16], ROUNDED);
        let reads = [BF16, BF16, BF16, F32];
        of(SsmOp::GroupNormBwd { eps: 1e-5 }, &reads, &[Dtype::Bf16, Dtype::F32], ROUNDED);
        let ranks = HeadRanks { ring: 2, ulysses: 1 };
        let mut own = |op, reads: &[Shape], writes: &[Dtype]| {
            all.hold(&Kernel::Ssm(SsmKernel { batch, seq, mamba, op }), &ring(2), reads, writes, ROUNDED);
        };
        own(SsmOp::Own(ranks), &[BF16, BF16], &[Dtype::Bf16, Dtype::Bf16]);
        own(SsmOp::OwnBwd(ranks), &[F32, F32, F32, F32], &[Dtype::F32, Dtype::F32]);
    }
}

fn masked_sums(all: &mut Cases) {
    for (block, side) in seen_everywhere(32).into_iter().zip([Side::Q, Side::Kv].into_iter().cycle()) {
        // Four heads of queries are as wide as K and V of two.
        let add = Kernel::Add { elems: 2 * 150 * 4 * 32, trim: Some((block, side)) };
        all.hold(&add, &ring(2), &[F32, BF16], &[Dtype::F32], SINGLE);
    }
}

fn residuals(all: &mut Cases) {
    let (rows, cols) = (2 * 30, 24);
    for biases in 0..=2 {
        let kernel = Kernel::Residual { rows, cols, biases, dropout: None };
        all.hold(&kernel, &one(), &vec![BF16; 2 + biases as usize], &[Dtype::F32], SINGLE);
    }
    let segs = Segs::new(120, &[(Axis::Cp, Split::Zigzag)]);
    let dropout = Some(Dropout { probability: 0.3, salt: 2, segs, share: None });
    let kernel = Kernel::Residual { rows: 120, cols, biases: 1, dropout };
    all.hold(&kernel, &ring(2), &[BF16, BF16, F32], &[Dtype::F32, Dtype::Bf16], SINGLE);
}

/// Scaled frequencies, which have not run on a GPU yet.
fn yarn() -> RopeScaling {
    RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 4.0,
        beta_slow: 0.5,
        original: 32,
        truncate: true,
        attention_factor: 1.14,
        mscale_all_dim: 0.0,
    }
}

fn rotary(all: &mut Cases) {
    let plain = [(None, Documents::default()), (Some(16), vec![50, 70].into()), (Some(8), vec![50, 70].into())];
    let plain = plain.map(|(rotary, documents)| (rotary, documents, None));
    for (rotary, documents, scaling) in plain.into_iter().chain([(None, vec![50, 70].into(), Some(yarn()))]) {
        let segs = Segs::new(120, &[(Axis::Cp, Split::Zigzag)]);
        let of = |backward| {
            let (segs, documents, scaling) = (segs.clone(), documents.clone(), scaling.clone());
            Kernel::Rope {
                segs,
                documents,
                batch: 2,
                heads: 4,
                kv_heads: 2,
                head_dim: 32,
                theta: 1e4,
                backward,
                rotary,
                scaling,
            }
        };
        all.hold(&of(false), &ring(2), &[BF16], &[Dtype::F32, Dtype::F32], SINGLE);
        all.hold(&of(true), &ring(2), &[F32, BF16], &[Dtype::F32], SINGLE);
    }
}

fn ends(all: &mut Cases) {
    let (rows, cols, vocab) = (33, 24, 50);
    for shard in [None, Some(Axis::Cp)] {
        let reach = if shard.is_some() { 2 * vocab } else { vocab };
        let embed = Kernel::Embed { rows, cols, vocab, shard };
        all.hold(&embed, &ring(2), &[ids(reach), BF16], &[Dtype::Bf16], 0.0);
        let backward = Kernel::EmbedBwd { rows, cols, vocab, shard };
        all.hold(&backward, &ring(2), &[ids(reach), BF16, F32], &[Dtype::F32], SINGLE);
    }
    for (vocab, logits) in [(50, F32), (512, F32), (512, BF16)] {
        let kernel = Kernel::CrossEntropy { rows, vocab, scale: 0.125 };
        let tolerance = if logits.0 == Dtype::Bf16 { ROUNDED } else { SINGLE };
        all.hold(&kernel, &one(), &[logits.clone(), ids(vocab), F32], &[logits.0, Dtype::F32], tolerance);
    }
    // The loss in three kernels, which have not run on a GPU yet.
    for vocab in [50, 2056] {
        all.hold(&Kernel::LogSoftmax { rows, vocab }, &one(), &[F32], &[Dtype::F32], SINGLE);
        let nll = Kernel::Nll { rows, vocab, scale: 0.125 };
        all.hold(&nll, &one(), &[F32, ids(vocab), F32], &[Dtype::F32, Dtype::F32], SINGLE);
        all.hold(&Kernel::LogSoftmaxBwd { rows, vocab }, &one(), &[F32, F32], &[Dtype::F32], SINGLE);
    }
    for cols in [28, 32] {
        let part = VocabPart { rows, cols, vocab: 50, axis: Axis::Cp };
        all.hold(&Kernel::VocabStats(part), &ring(2), &[F32, ids(50)], &[Dtype::F32], SINGLE);
        let kernel = Kernel::VocabCrossEntropy { part, ranks: 2, scale: 0.5 };
        all.hold(&kernel, &ring(2), &[F32, ids(50), F32, F32], &[Dtype::F32, Dtype::F32], SINGLE);
    }
    let turns = Share { axis: Axis::Cp, parts: 4 };
    for (backward, share) in [(false, None), (true, None), (false, Some(turns)), (true, Some(turns))] {
        let segs = Segs::new(40, &[]);
        let kernel = Kernel::Positions { segs, rows: 40, cols, max: 64, share, backward };
        all.hold(&kernel, &ring(2), &[F32, F32], &[Dtype::F32], SINGLE);
    }
}

fn moves(all: &mut Cases) {
    let parts = vec![HeadPart::new(1, 4, 16), HeadPart::new(2, 2, 16)];
    let few = vec![HeadPart::new(1, 8, 8), HeadPart::new(2, 2, 8)];
    // Columns of one operand, behind which rows begin at odd places.
    let columns = vec![HeadPart::new(2, 8, 16), HeadPart::new(2, 2, 8), HeadPart::new(1, 8, 1)];
    for (ranks, parts, joined) in [(2, parts, false), (8, few, false), (2, columns.clone(), true), (4, columns, true)] {
        for exchange in [Exchange::PackHeads, Exchange::UnpackSeq, Exchange::PackSeq, Exchange::UnpackHeads] {
            for packing in [Packing::Together, Packing::ByRank, Packing::ByLane] {
                let permute = HeadPermute::new(exchange, packing, [ranks, 2, 6], parts.clone());
                let order = joined.then(|| Segs::new(6 * ranks, &[(Axis::Cp, Split::Zigzag)]));
                let kernel = Kernel::Permute(HeadPermute { joined, order, ..permute });
                let views = ring(ranks as u32);
                let operands = kernel.operands(&views);
                let writes = vec![Dtype::Bf16; operands.writes.len()];
                all.hold(&kernel, &views, &vec![BF16; operands.reads.len()], &writes, ROUNDED * ranks as f64 / 2.0);
            }
        }
    }
    all.hold(
        &Kernel::OwnRows { rows: 5, cols: 8, ranks: 3, group: crate::plan::Group::axes(&[Axis::Cp]) },
        &ring(3),
        &[BF16],
        &[Dtype::Bf16],
        ROUNDED,
    );
    // A share of a gradient begins anywhere.
    let (rows, group) = (77, crate::plan::Group::axes(&[Axis::Dp, Axis::Cp]));
    let own = Kernel::OwnRows { rows, cols: 1, ranks: 6, group };
    all.hold(&own, &[Mesh::new(&[(Axis::Dp, 2), (Axis::Cp, 3)])], &[F32], &[Dtype::F32], 0.0);
    for inverse in [false, true] {
        let segs = Segs::new(24, &[(Axis::Cp, Split::Zigzag)]);
        all.hold(&Kernel::Reorder { segs, batch: 2, cols: 8, inverse }, &ring(3), &[F32], &[Dtype::F32], 0.0);
    }
}

fn products(all: &mut Cases) {
    let (m, n, k) = (136, 72, 200);
    for (a_t, b_t) in [(false, true), (false, false), (true, false), (true, true)] {
        let of = |accumulate, bias| Kernel::MatMul { m, n, k, a_t, b_t, accumulate, fp8: false, bias };
        all.hold(&of(false, false), &one(), &[BF16, BF16], &[Dtype::Bf16], ROUNDED);
        all.hold(&of(true, false), &one(), &[BF16, BF16, F32], &[Dtype::F32], 10.0 * SINGLE);
    }
    let (rows, cols) = (37, 200);
    all.hold(&Kernel::Quantise { rows, cols }, &one(), &[BF16], &[Dtype::U8, Dtype::F32], 1.0 / 250.0);
    let coded = [(Dtype::U8, 0.0..127.0), (Dtype::F32, 0.1..1.0)];
    all.hold(&Kernel::Dequantise { rows, cols }, &one(), &coded, &[Dtype::Bf16], ROUNDED);
    for (a_t, b_t) in [(false, true), (false, false), (true, false)] {
        let fp8 = Kernel::MatMul { m, n: 80, k: 208, a_t, b_t, accumulate: false, fp8: true, bias: false };
        all.hold(&fp8, &one(), &[BF16, BF16], &[Dtype::Bf16], 2.0 * ROUNDED);
    }
    // A router's gradients: of f32 and bf16.
    let mixed = |a_t, b_t, accumulate| Kernel::MatMul { m, n, k, a_t, b_t, accumulate, fp8: false, bias: false };
    all.hold(&mixed(true, false, true), &one(), &[F32, BF16, F32], &[Dtype::F32], 10.0 * SINGLE);
    all.hold(&mixed(false, false, false), &one(), &[F32, BF16], &[Dtype::Bf16], ROUNDED);
    all.hold(&mixed(false, false, true), &one(), &[F32, BF16, BF16], &[Dtype::Bf16], ROUNDED);
    let biased = Kernel::MatMul { m, n, k, a_t: false, b_t: true, accumulate: false, fp8: false, bias: true };
    all.hold(&biased, &one(), &[BF16, BF16, BF16], &[Dtype::Bf16], ROUNDED);
}

/// Parts of a tensor with matrices of two sizes, and what is none before, between and behind them; products of pairs.
fn muon(all: &mut Cases) {
    let of = |from, rows, cols| Matrices { from, count: 2, rows, cols, longer: 300 };
    let adam = Adam { weight_decay: 0.1, ..Adam::default() };
    let matrices = vec![of(20, 24, 40), of(1943, 5, 7)];
    let alone = muon::Part::new(2016, 1, None, matrices.clone());
    let group = Some(crate::plan::Group::axes(&[Axis::Dp]));
    let shared = muon::Part::new(672, 3, group, matrices);
    for (part, views) in [(alone, one()), (shared, vec![Mesh::new(&[(Axis::Dp, 3)])])] {
        let mut hold = |kernel, reads: &[Shape], writes: &[Dtype], tolerance| {
            all.hold(&Kernel::Muon(kernel), &views, reads, writes, tolerance);
        };
        let momentum = MuonKernel::Momentum { part: part.clone(), momentum: 0.95 };
        hold(momentum, &[F32, F32], &[Dtype::F32, Dtype::Bf16], ROUNDED);
        let second = (Dtype::F32, 0.0..1.0);
        let reads = [F32, BF16, F32, F32, second];
        let update = MuonKernel::Update { part, adam };
        hold(update.clone(), &reads, &[Dtype::F32; 3], 4.0 * SINGLE);
        hold(update, &reads, &[Dtype::F32, Dtype::F32, Dtype::F32, Dtype::Bf16], ROUNDED);
    }
    // Matrices alone have no second moments.
    let whole = muon::Part::new(48, 1, None, vec![of(0, 4, 6)]);
    let update = MuonKernel::Update { part: whole, adam };
    all.hold(&Kernel::Muon(update), &one(), &[F32, BF16, F32, F32], &[Dtype::F32, Dtype::F32, Dtype::Bf16], ROUNDED);
    for (rows, cols) in [(24, 40), (40, 24), (5, 7), (32, 32)] {
        let of = of(0, rows, cols);
        let mut hold = |kernel, reads: &[Shape], tolerance| {
            all.hold(&Kernel::Muon(kernel), &one(), reads, &[Dtype::Bf16], tolerance);
        };
        hold(MuonKernel::Normalise { of }, &[BF16], ROUNDED);
        hold(MuonKernel::Gram { of }, &[BF16], ROUNDED);
        hold(MuonKernel::Square { of }, &[BF16], ROUNDED);
        hold(MuonKernel::Apply { of }, &[BF16, BF16], ROUNDED);
    }
}
