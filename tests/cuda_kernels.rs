//! The CUDA kernels against the CPU's, without a GPU.
//!
//! What `exec::cuda::lower` launches is compiled with a C++ compiler and run by an emulator of CUDA's execution model
//! (`cuda_emulator/`): warps, barriers, matrix fragments, asynchronous copies, shared memory that begins as NaN. So the
//! numbers, the indices and the meetings of threads are tested; speed, registers and the driver are not. Skipped with a
//! word where there is no C++ compiler.

use foretrain::exec::cuda::lower::{Action, Arg, Launch, Lowered, Where, lower};
use foretrain::exec::cuda::source::{ALL, HEADERS};
use foretrain::exec::kernels::run;
use foretrain::plan::dropout::Dropout;
use foretrain::plan::kernel::Operands;
use foretrain::plan::*;
use foretrain::spec::{Documents, Mask};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{LazyLock, Mutex};

/// The compiler, if there is one.
static COMPILER: LazyLock<Option<String>> = LazyLock::new(|| {
    let names = ["c++", "g++", "clang++"].map(String::from);
    names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok_and(|o| o.status.success()))
});

/// Programs made so far, by source and macros. Tests that want one wait for each other.
static PROGRAMS: Mutex<Option<HashMap<String, PathBuf>>> = Mutex::new(None);

fn program(launch: &Launch) -> PathBuf {
    let macros: Vec<String> = launch.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
    let key = format!("{} {}", launch.source.name, macros.join(" "));
    let mut programs = PROGRAMS.lock().unwrap();
    let programs = programs.get_or_insert_default();
    let count = programs.len();
    programs.entry(key).or_insert_with(|| compile(launch.source.name, &macros, count)).clone()
}

fn compile(source: &str, macros: &[String], number: usize) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda_kernels");
    std::fs::create_dir_all(&dir).unwrap();
    for file in ALL.iter().chain(HEADERS) {
        std::fs::write(dir.join(file.name), file.text).unwrap();
    }
    let out = dir.join(format!("program{number}"));
    let emulator = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda_emulator");
    let done = Command::new(COMPILER.as_ref().unwrap())
        .args(["-std=c++17", "-O1", "-w"])
        .args(macros)
        .arg(format!("-DKERNEL_FILE=\"{source}\""))
        .args([format!("-I{}", emulator.display()), format!("-I{}", dir.display())])
        .arg(emulator.join("main.cpp"))
        .arg("-o")
        .arg(&out)
        .output()
        .unwrap();
    assert!(done.status.success(), "{source} {macros:?}\n{}", String::from_utf8_lossy(&done.stderr));
    out
}

/// An operand as a GPU has it.
#[derive(Clone)]
struct Stored {
    dtype: Dtype,
    bytes: Vec<u8>,
}

fn bf16(x: f64) -> u16 {
    let bits = (x as f32).to_bits();
    if x.is_nan() { 0x7fc0 } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
}

impl Stored {
    fn new(dtype: Dtype, values: &[f64]) -> Stored {
        let bytes = match dtype {
            Dtype::Bf16 => values.iter().flat_map(|&x| bf16(x).to_le_bytes()).collect(),
            Dtype::F32 => values.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
            Dtype::U32 => values.iter().flat_map(|&x| (x as u32).to_le_bytes()).collect(),
            other => panic!("no operand here is {other:?}"),
        };
        Stored { dtype, bytes }
    }

    fn values(&self) -> Vec<f64> {
        let wide = |b: &[u8]| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        match self.dtype {
            Dtype::Bf16 => self.bytes.chunks(2).map(|b| wide(&[0, 0, b[0], b[1]])).collect(),
            Dtype::U32 => {
                self.bytes.chunks(4).map(|b| f64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect()
            }
            _ => self.bytes.chunks(4).map(wide).collect(),
        }
    }
}

/// Does what was lowered, one action after the other.
fn emulate(lowered: &Lowered, reads: &[Stored], writes: &mut [Stored]) {
    let mut scratch: Vec<Vec<u8>> = lowered.scratch.iter().map(|&n| vec![0xff; n as usize]).collect();
    for action in &lowered.actions {
        match action {
            Action::Copy { read, write } => writes[*write].bytes.clone_from(&reads[*read].bytes),
            Action::Gemm(_) => panic!("products are cuBLASLt's"),
            Action::Launch(launch) => launch_one(launch, reads, writes, &mut scratch),
        }
    }
}

fn launch_one(launch: &Launch, reads: &[Stored], writes: &mut [Stored], scratch: &mut [Vec<u8>]) {
    let dir = tempfile::tempdir().unwrap();
    let [x, y, z] = launch.grid;
    let mut request = format!("{} {x} {y} {z} {}\n", launch.kernel, launch.shared);
    let file = |name: String| dir.path().join(name);
    let put = |name: String, bytes: &[u8]| {
        let path = file(name);
        if !path.exists() {
            std::fs::write(&path, bytes).unwrap();
        }
        format!("b {}\n", path.display())
    };
    for (i, arg) in launch.args.iter().enumerate() {
        request += &match arg {
            Arg::Read(r) => put(format!("read{r}"), &reads[*r].bytes),
            Arg::Write(w) => put(format!("write{w}"), &writes[*w].bytes),
            Arg::Scratch(s) => put(format!("scratch{s}"), &scratch[*s]),
            Arg::Table(bytes) => put(format!("table{i}"), bytes),
            Arg::Null => "i 0\n".into(),
            Arg::Int(n) => format!("i {n}\n"),
            Arg::Real(x) => format!("f {x:?}\n"),
        };
    }
    let mut child = Command::new(program(launch)).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(request.as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success(), "{}: {}", launch.kernel, String::from_utf8_lossy(&done.stderr));
    for (w, stored) in writes.iter_mut().enumerate().filter(|(w, _)| launch.args.contains(&Arg::Write(*w))) {
        stored.bytes = std::fs::read(file(format!("write{w}"))).unwrap();
    }
    for (s, bytes) in scratch.iter_mut().enumerate().filter(|(s, _)| launch.args.contains(&Arg::Scratch(*s))) {
        *bytes = std::fs::read(file(format!("scratch{s}"))).unwrap();
    }
}

/// How an operand is made: its dtype, and where its values lie.
type Shape = (Dtype, std::ops::Range<f64>);

const BF16: Shape = (Dtype::Bf16, -1.0..1.0);
const F32: Shape = (Dtype::F32, -1.0..1.0);

fn ids(below: u64) -> Shape {
    (Dtype::U32, 0.0..below as f64)
}

/// A kernel on every rank, on the emulator and in f64 on the CPU, from the same numbers; what it leaves alone is NaN.
/// `tolerance` is a part of the largest number of each result.
#[track_caller]
fn hold(kernel: &Kernel, views: &[Mesh], reads: &[Shape], writes: &[Dtype], tolerance: f64) {
    if COMPILER.is_none() {
        return eprintln!("skipped: no C++ compiler here, so CUDA kernels cannot be emulated");
    }
    for rank in 0..views[0].size() {
        let Operands { reads: read_len, writes: mut write_len } = kernel.operands(views);
        write_len.resize(writes.len(), write_len[0]);
        let mut rng = ChaCha8Rng::seed_from_u64(u64::from(rank));
        let stored: Vec<Stored> = reads
            .iter()
            .zip(read_len)
            .map(|((dtype, range), n)| {
                let values: Vec<f64> = (0..n).map(|_| rng.random_range(range.clone())).collect();
                Stored::new(*dtype, &values)
            })
            .collect();
        let values: Vec<Vec<f64>> = stored.iter().map(Stored::values).collect();
        let mut want: Vec<Vec<f64>> = write_len.iter().map(|&n| vec![f64::NAN; n as usize]).collect();
        let mut got: Vec<Stored> = want.iter().zip(writes).map(|(w, &dtype)| Stored::new(dtype, w)).collect();

        let given: Vec<Option<&[f64]>> = values.iter().map(|v| Some(&v[..])).collect();
        let mut outs: Vec<&mut [f64]> = want.iter_mut().map(|w| &mut w[..]).collect();
        run(kernel, views, rank, 3, &given, &mut outs);
        let dtypes: Vec<Dtype> = reads.iter().map(|r| r.0).collect();
        let lowered = lower(kernel, Where { views, rank }, &dtypes, writes, 3).unwrap();
        emulate(&lowered, &stored, &mut got);
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            close(&format!("{} on rank {rank}, result {i}", kernel.name()), &got.values(), want, tolerance);
        }
    }
}

#[track_caller]
fn close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    let most = want.iter().filter(|w| w.is_finite()).fold(0.0, |m: f64, w| m.max(w.abs()));
    assert!(want.is_empty() || want.iter().any(|w| !w.is_nan()), "{what}: nothing is computed");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * most;
        assert!(same, "{what}, element {i}: {g} is not {w} (largest {most})");
    }
}

fn one() -> Vec<Mesh> {
    vec![Mesh::new(&[(Axis::Cp, 1)])]
}

fn ring(ranks: u32) -> Vec<Mesh> {
    vec![Mesh::new(&[(Axis::Cp, ranks)])]
}

/// bf16 keeps 8 bits; what is rounded once more inside (probabilities, dS) errs twice, in sums that mostly cancel.
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
        AttnBlock { q, kv, batch: 2, heads: 4, kv_heads: 2, head_dim, v_dim: None, mask }
    };
    let shifts = [(Split::Zigzag, 0), (Split::Contiguous, 1), (Split::Stripe, 1)];
    masks().into_iter().flat_map(|mask| shifts.map(|(split, shift)| of(split, shift, mask.clone()))).collect()
}

/// The blocks of which every rank sees something: what nobody sees is not launched at all.
fn seen_everywhere(head_dim: u64) -> Vec<AttnBlock> {
    let views = ring(2);
    blocks(head_dim).into_iter().filter(|b| (0..2).all(|rank| b.shape(&views, rank).area > 0)).collect()
}

#[test]
fn attention_goes_forward() {
    for block in seen_everywhere(64) {
        hold(&Kernel::Attention(block), &ring(2), &[BF16, BF16], &[Dtype::Bf16, Dtype::F32], TWICE);
    }
}

#[test]
fn attention_goes_on_from_a_running_output() {
    for block in seen_everywhere(32).into_iter().take(4) {
        hold(&Kernel::AttentionOnto(block), &ring(2), &[BF16, BF16, F32, F32], &[Dtype::F32, Dtype::F32], TWICE);
    }
}

#[test]
fn heads_of_other_widths() {
    for head_dim in [96, 128] {
        let block = seen_everywhere(head_dim).swap_remove(0);
        hold(&Kernel::Attention(block.clone()), &ring(2), &[BF16, BF16], &[Dtype::Bf16, Dtype::F32], TWICE);
        let reads = [BF16, BF16, BF16, (Dtype::F32, 4.0..5.0), F32];
        hold(&Kernel::AttentionBwd(block), &ring(2), &reads, &[Dtype::F32, Dtype::F32], TWICE);
    }
}

#[test]
fn attention_goes_backward() {
    // A log-sum-exp of about the right size: probabilities far above one would drown everything else.
    let reads = [BF16, BF16, BF16, (Dtype::F32, 4.0..5.0), F32];
    for (i, block) in seen_everywhere(64).into_iter().enumerate() {
        let dtypes = [[Dtype::F32, Dtype::F32], [Dtype::Bf16, Dtype::Bf16]][i % 2];
        hold(&Kernel::AttentionBwd(block), &ring(2), &reads, &dtypes, TWICE);
    }
}

#[test]
fn gradients_are_added_to_one_side() {
    for (side, sum) in [(Side::Q, F32), (Side::Kv, F32), (Side::Q, BF16), (Side::Kv, BF16)] {
        let block = seen_everywhere(32).swap_remove(1);
        let reads = [BF16, BF16, BF16, (Dtype::F32, 4.0..5.0), F32, sum.clone()];
        let writes = if side == Side::Q { [sum.0, Dtype::F32] } else { [Dtype::F32, sum.0] };
        hold(&Kernel::AttentionBwdOnto(block, side), &ring(2), &reads, &writes, TWICE);
    }
}

#[test]
fn blocks_are_brought_together() {
    let block = || seen_everywhere(32).swap_remove(1);
    hold(&Kernel::MergeLse(block()), &ring(2), &[F32, F32, BF16, F32], &[Dtype::F32, Dtype::F32], SINGLE);
    hold(&Kernel::MergeLse(block()), &ring(2), &[BF16, F32, BF16, F32], &[Dtype::Bf16, Dtype::F32], ROUNDED);
    hold(&Kernel::AddLse(block()), &ring(2), &[F32, F32], &[Dtype::F32], SINGLE);
    hold(&Kernel::AddWeighted(block()), &ring(2), &[F32, BF16, F32, F32], &[Dtype::F32], SINGLE);
    let delta = Kernel::AttentionDelta { rows: 37, heads: 3, head_dim: 40 };
    hold(&delta, &one(), &[BF16, BF16], &[Dtype::F32], SINGLE);
}

#[test]
fn norms() {
    for cols in [37, 320] {
        let rows = 300;
        hold(&Kernel::Norm { rows, cols, eps: 1e-5 }, &one(), &[BF16, F32], &[Dtype::Bf16], ROUNDED);
        for bias in [false, true] {
            let forward = Kernel::LayerNorm { rows, cols, eps: 1e-5, bias };
            hold(&forward, &one(), &[BF16, BF16], &[Dtype::F32], SINGLE);
            let backward = Kernel::LayerNormBwd { rows, cols, eps: 1e-5, bias };
            hold(&backward, &one(), &[BF16, F32, BF16, F32, F32], &[Dtype::F32, Dtype::F32], SINGLE);
        }
        let backward = Kernel::NormBwd { rows, cols, eps: 1e-5 };
        hold(&backward, &one(), &[BF16, BF16, BF16, BF16, F32], &[Dtype::Bf16, Dtype::F32], ROUNDED);
        hold(&Kernel::BiasBwd { rows, cols }, &one(), &[BF16, F32], &[Dtype::F32], SINGLE);
    }
}

#[test]
fn one_element_at_a_time() {
    let (rows, elems) = (21, 21 * 40);
    for cols in [40, 13] {
        hold(&Kernel::SwiGlu { rows, cols }, &one(), &[BF16], &[Dtype::F32], SINGLE);
        hold(&Kernel::SwiGluBwd { rows, cols }, &one(), &[BF16, BF16], &[Dtype::Bf16], ROUNDED);
    }
    hold(&Kernel::Gelu { elems }, &one(), &[BF16], &[Dtype::F32], SINGLE);
    hold(&Kernel::GeluBwd { elems }, &one(), &[BF16, BF16], &[Dtype::F32], SINGLE);
    hold(&Kernel::Cast { elems }, &one(), &[F32], &[Dtype::Bf16], ROUNDED);
    hold(&Kernel::Cast { elems: 7 }, &one(), &[BF16], &[Dtype::F32], 0.0);
    hold(&Kernel::Fill { elems }, &one(), &[], &[Dtype::Bf16], 0.0);
    hold(&Kernel::Add { elems, trim: None }, &one(), &[BF16, F32], &[Dtype::F32], SINGLE);
    hold(&Kernel::DropoutBwd { elems, probability: 0.25 }, &one(), &[BF16, BF16], &[Dtype::F32], SINGLE);
    let adam = Kernel::Adam { elems, lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let state = [BF16, F32, F32, (Dtype::F32, 0.0..1.0)];
    hold(&adam, &one(), &state, &[Dtype::F32, Dtype::F32, Dtype::F32, Dtype::Bf16], ROUNDED);
    hold(&adam, &one(), &state, &[Dtype::F32, Dtype::F32, Dtype::F32], SINGLE);
}

#[test]
fn sums_of_the_rows_that_a_mask_leaves() {
    for (block, side) in seen_everywhere(32).into_iter().zip([Side::Q, Side::Kv].into_iter().cycle()) {
        // Four heads of queries are as wide as K and V of two.
        let add = Kernel::Add { elems: 2 * 150 * 4 * 32, trim: Some((block, side)) };
        hold(&add, &ring(2), &[F32, BF16], &[Dtype::F32], SINGLE);
    }
}

#[test]
fn residuals_with_biases_and_dropout() {
    let (rows, cols) = (2 * 30, 24);
    for biases in 0..=2 {
        let kernel = Kernel::Residual { rows, cols, biases, dropout: None };
        hold(&kernel, &one(), &vec![BF16; 2 + biases as usize], &[Dtype::F32], SINGLE);
    }
    let segs = Segs::new(120, &[(Axis::Cp, Split::Zigzag)]);
    let dropout = Some(Dropout { probability: 0.3, salt: 2, segs, share: None });
    let kernel = Kernel::Residual { rows: 120, cols, biases: 1, dropout };
    hold(&kernel, &ring(2), &[BF16, BF16, F32], &[Dtype::F32, Dtype::Bf16], SINGLE);
}

#[test]
fn rotary_embedding_there_and_back() {
    for (rotary, documents) in [(None, Documents::default()), (Some(16), vec![50, 70].into())] {
        let segs = Segs::new(120, &[(Axis::Cp, Split::Zigzag)]);
        let of = |backward| {
            let (segs, documents) = (segs.clone(), documents.clone());
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
            }
        };
        hold(&of(false), &ring(2), &[BF16], &[Dtype::F32, Dtype::F32], SINGLE);
        hold(&of(true), &ring(2), &[F32, BF16], &[Dtype::F32], SINGLE);
    }
}

#[test]
fn the_two_ends_of_the_model() {
    let (rows, cols, vocab) = (33, 24, 50);
    for shard in [None, Some(Axis::Cp)] {
        let reach = if shard.is_some() { 2 * vocab } else { vocab };
        let embed = Kernel::Embed { rows, cols, vocab, shard };
        hold(&embed, &ring(2), &[ids(reach), BF16], &[Dtype::Bf16], 0.0);
        let backward = Kernel::EmbedBwd { rows, cols, vocab, shard };
        hold(&backward, &ring(2), &[ids(reach), BF16, F32], &[Dtype::F32], SINGLE);
    }
    for (vocab, logits) in [(50, F32), (512, F32), (512, BF16)] {
        let kernel = Kernel::CrossEntropy { rows, vocab, scale: 0.125 };
        let tolerance = if logits.0 == Dtype::Bf16 { ROUNDED } else { SINGLE };
        hold(&kernel, &one(), &[logits.clone(), ids(vocab), F32], &[logits.0, Dtype::F32], tolerance);
    }
    for cols in [28, 32] {
        let part = VocabPart { rows, cols, vocab: 50, axis: Axis::Cp };
        hold(&Kernel::VocabStats(part), &ring(2), &[F32, ids(50)], &[Dtype::F32], SINGLE);
        let kernel = Kernel::VocabCrossEntropy { part, ranks: 2, scale: 0.5 };
        hold(&kernel, &ring(2), &[F32, ids(50), F32, F32], &[Dtype::F32, Dtype::F32], SINGLE);
    }
    let turns = Share { axis: Axis::Cp, parts: 4 };
    for (backward, share) in [(false, None), (true, None), (false, Some(turns)), (true, Some(turns))] {
        let segs = Segs::new(40, &[]);
        let kernel = Kernel::Positions { segs, rows: 40, cols, max: 64, share, backward };
        hold(&kernel, &ring(2), &[F32, F32], &[Dtype::F32], SINGLE);
    }
}

#[test]
fn rows_are_moved_for_an_exchange() {
    let parts = vec![HeadPart::new(1, 4, 16), HeadPart::new(2, 2, 16)];
    let few = vec![HeadPart::new(1, 8, 8), HeadPart::new(2, 2, 8)];
    for (ranks, parts) in [(2, parts), (8, few)] {
        for exchange in [Exchange::PackHeads, Exchange::UnpackSeq, Exchange::PackSeq, Exchange::UnpackHeads] {
            for packing in [Packing::Together, Packing::ByRank, Packing::ByLane] {
                let parts = parts.clone();
                let kernel = Kernel::Permute { exchange, packing, ranks, batch: 2, seq: 5, parts };
                let operands = kernel.operands(&one());
                let writes = vec![Dtype::Bf16; operands.writes.len()];
                hold(&kernel, &one(), &vec![BF16; operands.reads.len()], &writes, ROUNDED * ranks as f64 / 2.0);
            }
        }
    }
    for inverse in [false, true] {
        let segs = Segs::new(24, &[(Axis::Cp, Split::Zigzag)]);
        hold(&Kernel::Reorder { segs, batch: 2, cols: 8, inverse }, &ring(3), &[F32], &[Dtype::F32], 0.0);
    }
}
