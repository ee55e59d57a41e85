//! Which training steps are run to time their kernels, and fresh ones that no calibration has seen.

use super::Effort;
use crate::error::Result;
use crate::plan::{Dtype, Engine, Plan};
use crate::spec::{Dispatch, LlmSpec, MlaSpec, Mlp, MoeSpec, Norm, Options, Parallelism, Positions, Workload};
use crate::strategy::expert::Routing;
use crate::strategy::{Engines, build_routed};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A training step of a small model.
#[derive(Debug, Clone)]
pub struct Shape {
    pub model: LlmSpec,
    pub seq_len: u64,
    /// Sequences of a step and replica.
    pub batch: u64,
    pub par: Parallelism,
    /// Of weights and activations.
    pub dtype: Dtype,
}

/// hidden, heads, kv_heads, head_dim, ffn, vocab
type Sizes = [u64; 6];

fn llama([hidden, heads, kv_heads, head_dim, ffn, vocab]: Sizes, layers: u64) -> LlmSpec {
    let name = format!("h{hidden}-a{heads}-k{kv_heads}-d{head_dim}-f{ffn}-v{vocab}-l{layers}");
    LlmSpec {
        name,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn,
        vocab,
        rms_eps: 1e-5,
        rope_theta: 1e4,
        ..LlmSpec::default()
    }
}

/// LayerNorm, GELU, biases, learned positions.
fn gpt2(sizes: Sizes, max: u64) -> LlmSpec {
    let positions = Positions::Learned { max };
    LlmSpec { norm: Norm::Layer, mlp: Mlp::Gelu, bias: true, positions, ..llama(sizes, 1) }
}

/// Experts of that width, of which every token visits two.
fn mixture(model: LlmSpec, experts: u64, ffn: u64) -> LlmSpec {
    let moe = MoeSpec { experts, top_k: 2, ffn, ..MoeSpec::default() };
    LlmSpec { name: format!("{}-e{experts}", model.name), moe: Some(moe), ..model }
}

/// Norms of heads, as Qwen3 has them.
fn qwen3(model: LlmSpec) -> LlmSpec {
    LlmSpec { qk_norm: true, ..model }
}

/// Latent attention, as DeepSeek has it: keys of twice the width of the part that is turned, and half of it again.
fn latent(model: LlmSpec) -> LlmSpec {
    let [half, d] = [model.head_dim / 2, model.head_dim];
    let mla =
        MlaSpec { q_lora: Some(model.hidden / 2), kv_lora: model.hidden / 4, rope_dim: half, nope_dim: d, v_dim: d };
    LlmSpec { mla: Some(mla), head_dim: half + d, kv_heads: model.heads, ..model }
}

/// Ranks that share fast links: of threads, all.
const NODE: u32 = 8;

impl Shape {
    fn new(model: LlmSpec, seq_len: u64, par: Parallelism) -> Shape {
        Shape { model, seq_len, batch: 1, par, dtype: Dtype::F32 }
    }

    pub fn plan(&self) -> Result<Plan> {
        let work = Workload {
            seq_len: self.seq_len,
            global_batch: self.batch * u64::from(self.par.dp),
            micro_batch: 1,
            dtype: self.dtype,
            documents: Default::default(),
        };
        let engine = Engine::Sm { ctas: 1 };
        let engines = Engines { p2p: engine, collective: engine };
        // Rows are listed: they are run.
        let route = Routing::Uniform { seed: 1 }.route(&self.model, &work, &self.par, NODE)?;
        build_routed(&self.model, &work, &self.par, engines, route)
    }

    /// Floating-point operations of a step, all ranks together.
    pub fn flops(&self) -> f64 {
        let tokens = self.batch * u64::from(self.par.dp) * self.seq_len;
        self.model.flops_per_token(self.seq_len) * tokens as f64
    }
}

fn alone() -> Parallelism {
    Parallelism::default()
}

/// Each way to split over two ranks: they bring kernels of their own.
fn ways() -> [Parallelism; 6] {
    [
        Parallelism { ring: 2, ..alone() },
        Parallelism { ulysses: 2, ..alone() },
        Parallelism { tp: 2, ..alone() },
        Parallelism { dp: 2, zero: 1, ..alone() },
        Parallelism { dp: 2, zero: 3, ..alone() },
        Parallelism { ring: 4, ..alone() },
    ]
}

/// What calibration runs: fixed shapes from thin to wide, then drawn ones.
pub fn ladder(effort: Effort) -> Vec<Shape> {
    let small: Sizes = [128, 4, 2, 32, 256, 512];
    let mut all = vec![Shape::new(llama(small, 1), 64, alone())];
    all.extend(ways().map(|par| Shape::new(llama(small, 1), 64, par)));
    all.push(Shape::new(gpt2(small, 256), 64, alone()));
    all.extend(mixtures([128, 4, 4, 32, 256, 512], [4, 64], &[64]));
    if effort.tiny {
        return all;
    }
    let fixed: [(Sizes, u64); 7] = [
        ([512, 8, 4, 64, 1024, 1024], 16),
        ([256, 4, 4, 64, 704, 1024], 256),
        ([512, 8, 2, 64, 1408, 2048], 512),
        ([256, 8, 8, 32, 512, 4096], 1024),
        ([1024, 8, 4, 128, 1024, 1024], 256),
        ([256, 4, 2, 64, 512, 512], 2048),
        ([1024, 16, 8, 64, 2816, 4096], 384),
    ];
    all.extend(fixed.map(|(sizes, seq_len)| Shape::new(llama(sizes, 1), seq_len, alone())));
    let (middle, wide): (Sizes, Sizes) = ([256, 8, 4, 64, 512, 1024], [512, 8, 8, 64, 1408, 2048]);
    all.extend(ways().map(|par| Shape::new(llama(middle, 1), 256, par)));
    all.extend(ways().map(|par| Shape::new(llama(wide, 1), 1024, par)));
    all.push(Shape::new(gpt2(wide, 1024), 512, alone()));
    all.extend(mixtures([256, 4, 4, 64, 512, 1024], [8, 256], &[128, 512]));
    if effort.drawn > 4 {
        all.extend(mixtures([512, 8, 8, 64, 1024, 2048], [4, 704], &[256, 1024]));
        all.extend(mixtures([384, 6, 6, 64, 512, 1024], [16, 192], &[384]));
    }
    let mut rng = ChaCha8Rng::seed_from_u64(CALIBRATION);
    // Every third has one rank.
    all.extend((0..effort.drawn).map(|i| draw(&mut rng, if i % 3 == 2 { 1 } else { 2 })));
    all
}

/// Models with experts, and what else comes with such models, alone and with the experts over two ranks: a row for each
/// choice of a token, and a row for each token.
fn mixtures(sizes: Sizes, [experts, ffn]: [u64; 2], seq_lens: &[u64]) -> Vec<Shape> {
    let model = || mixture(llama(sizes, 1), experts, ffn);
    let shared = |dispatch: Dispatch| Parallelism {
        dp: 2,
        ep: 2,
        options: Options { dispatch, ..Options::default() },
        ..alone()
    };
    let of = |&seq_len: &u64| {
        [
            Shape::new(qwen3(model()), seq_len, alone()),
            Shape::new(model(), seq_len, shared(Dispatch::Nccl)),
            Shape::new(latent(model()), seq_len, shared(Dispatch::DeepepNormal)),
        ]
    };
    seq_lens.iter().flat_map(of).collect()
}

/// What a GPU is calibrated with: layers of real models, short and long, and each way to split.
pub fn gpu_ladder(effort: Effort) -> Vec<Shape> {
    let (large, middle): (Sizes, Sizes) = ([4096, 32, 8, 128, 14336, 32768], [2048, 16, 8, 128, 5632, 16384]);
    let mut all: Vec<Shape> = [1024, 4096, 16384].map(|seq| Shape::new(llama(large, 1), seq, alone())).into();
    all.extend(ways().map(|par| Shape::new(llama(middle, 1), 8192, par)));
    if effort.drawn > 4 {
        let fixed: [(Sizes, u64); 7] = [
            (middle, 2048),
            (large, 32768),
            ([8192, 64, 8, 128, 28672, 8192], 4096),
            ([1024, 16, 16, 64, 2816, 8192], 512),
            ([1024, 16, 16, 64, 2816, 8192], 4096),
            ([4096, 32, 32, 128, 11008, 32768], 4096),
            ([1536, 16, 16, 96, 4096, 16384], 4096),
        ];
        all.extend(fixed.map(|(sizes, seq_len)| Shape::new(llama(sizes, 1), seq_len, alone())));
        all.extend(ways().map(|par| Shape::new(llama(middle, 1), 16384, par)));
        all.push(Shape::new(gpt2([2048, 32, 32, 64, 8192, 16384], 2048), 2048, alone()));
        all.extend(mixtures([2048, 16, 16, 128, 4096, 16384], [8, 1408], &[2048, 8192]));
        all.extend(mixtures([4096, 32, 32, 128, 8192, 16384], [4, 3072], &[4096]));
    }
    let mut rng = ChaCha8Rng::seed_from_u64(CALIBRATION);
    all.extend((0..effort.drawn.min(12)).map(|i| gpu_draw(&mut rng, 1 + i as u32 % 2)));
    all.into_iter().map(on_gpu).collect()
}

/// The step that is repeated without rest.
pub fn gpu_loaded() -> Shape {
    on_gpu(Shape::new(llama([4096, 32, 8, 128, 14336, 32768], 1), 16384, alone()))
}

/// The least that has every kind of kernel, for tests.
pub fn gpu_tiny() -> Shape {
    on_gpu(Shape::new(llama([64, 4, 4, 32, 96, 64], 1), 64, alone()))
}

fn on_gpu(shape: Shape) -> Shape {
    Shape { dtype: Dtype::Bf16, ..shape }
}

/// A step that some tenths of a second take on a GPU, all ranks on one.
pub fn gpu_fresh(seed: u64, ranks: u32) -> Shape {
    on_gpu(gpu_draw(&mut ChaCha8Rng::seed_from_u64(seed), ranks))
}

fn gpu_draw(rng: &mut ChaCha8Rng, ranks: u32) -> Shape {
    loop {
        let mut between = |low: f64, high: f64, unit: u64| {
            let x: f64 = rng.random_range(low.ln()..high.ln());
            ((x.exp() / unit as f64).round() as u64).max(1) * unit
        };
        let (hidden, seq_len) = (between(1024.0, 6144.0, 256), between(1024.0, 24576.0, 512));
        let (ffn, vocab) = (between(hidden as f64 * 1.5, hidden as f64 * 3.6, 256), between(4096.0, 40960.0, 256));
        let head_dim = [64, 128, 128][rng.random_range(0..3)];
        let kv_heads = [2, 4, 8][rng.random_range(0..3)] * u64::from(ranks);
        let heads = (hidden / head_dim).next_multiple_of(kv_heads).max(kv_heads);
        let mut way = [
            Parallelism { ring: ranks, ..alone() },
            Parallelism { ulysses: ranks, ..alone() },
            Parallelism { tp: ranks, ..alone() },
            Parallelism { dp: ranks, zero: 1, ..alone() },
        ][rng.random_range(0..4)];
        if ranks == 4 && rng.random_range(0..4) == 0 {
            way = Parallelism { ring: 2, ulysses: 2, ..alone() };
        }
        let mut model = llama([hidden, heads, kv_heads, head_dim, ffn, vocab], 1);
        if ranks > 1 && rng.random_range(0..4) == 0 {
            way = Parallelism { dp: ranks, ep: ranks, zero: 1, ..alone() };
            model = mixture(model, 2 * u64::from(ranks), (ffn / 4).next_multiple_of(128));
        }
        let shape = on_gpu(Shape::new(model, seq_len, way));
        if (5e12..1e14).contains(&shape.flops()) && shape.plan().is_ok() {
            return shape;
        }
    }
}

/// Seeds what calibration draws: no validation may have it.
pub const CALIBRATION: u64 = u64::MAX;

/// A step that some tenths of a second take.
pub fn fresh(seed: u64, ranks: u32) -> Shape {
    draw(&mut ChaCha8Rng::seed_from_u64(seed), ranks)
}

/// Draws until a shape is feasible and neither a trifle nor a long wait.
fn draw(rng: &mut ChaCha8Rng, ranks: u32) -> Shape {
    loop {
        let shape = candidate(rng, ranks);
        if (4e9..4e10).contains(&shape.flops()) && shape.plan().is_ok() {
            return shape;
        }
    }
}

fn candidate(rng: &mut ChaCha8Rng, ranks: u32) -> Shape {
    let mut between = |low: f64, high: f64, unit: u64| {
        let x: f64 = rng.random_range(low.ln()..high.ln());
        ((x.exp() / unit as f64).round() as u64).max(1) * unit
    };
    let (hidden, seq_len) = (between(192.0, 1024.0, 64), between(192.0, 2048.0, 64));
    let (ffn, vocab) = (between(hidden as f64 * 1.2, hidden as f64 * 3.5, 64), between(512.0, 4096.0, 64));
    let head_dim = [32, 64, 64, 128][rng.random_range(0..4)];
    let kv_heads = [1, 2, 4][rng.random_range(0..3)] * u64::from(ranks);
    let heads = kv_heads * [1, 2][rng.random_range(0..2)];
    let way = [
        Parallelism { ring: ranks, ..alone() },
        Parallelism { ulysses: ranks, ..alone() },
        Parallelism { tp: ranks, ..alone() },
        Parallelism { dp: ranks, zero: u32::from(ranks > 1), ..alone() },
    ][rng.random_range(0..4)];
    Shape::new(llama([hidden, heads, kv_heads, head_dim, ffn, vocab], 1), seq_len, way)
}
