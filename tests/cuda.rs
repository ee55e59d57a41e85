//! Every CUDA kernel that a plan launches compiles for every architecture, without a GPU.
//!
//! Skipped with a word where NVRTC is not on the machine; with FORETRAIN_NVRTC set it has to be there. Registers and
//! spills are golden (tests/golden/cuda_resources.json, of NVRTC 13.0; UPDATE_GOLDEN=1 writes them).

use foretrain::error::Result;
use foretrain::exec::cuda::driver;
use foretrain::exec::cuda::fused::{Fused, Sdpa};
use foretrain::exec::cuda::lower::{Action, LEAST_SHARED, Launch, MOST_SHARED, Where, lower};
use foretrain::exec::cuda::nccl::Nccl;
use foretrain::exec::cuda::nvrtc::{self, Resources};
use foretrain::plan::link::{AtomTable, Line, Place};
use foretrain::plan::{Dtype, Engine, OpKind, Plan};
use foretrain::spec::{LlmSpec, Parallelism, Positions, Workload};
use foretrain::strategy::expert::Routing;
use foretrain::strategy::{Engines, build, build_routed};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Where no driver is, every command that wants one says so and what to do, with exit code 2. Elsewhere skipped.
#[test]
fn no_driver_is_a_sentence_and_exit_code_2() {
    if driver::count().is_ok() {
        return eprintln!("skipped: there is a GPU here");
    }
    for words in [
        "run --on cuda --ring 2",
        "run --on cuda --devices 0,0 --ring 2 --check --json",
        "compare --on cuda",
        "calibrate --on cuda",
        "validate --on cuda",
        "selftest --on cuda",
        "selftest --on cuda --group norms",
        "selftest --on cuda --group nccl",
    ] {
        let done = Command::new(env!("CARGO_BIN_EXE_foretrain")).args(words.split(' ')).output().unwrap();
        assert_eq!(done.status.code(), Some(2), "{words}");
        let said = [done.stdout, done.stderr].map(|out| String::from_utf8(out).unwrap()).concat();
        assert!(said.contains("no NVIDIA driver") && said.contains("run this where a GPU is"), "{words}: {said}");
        // A selftest on the CPU is refused, so that it is no remedy.
        assert_eq!(said.contains("--on cpu"), !words.starts_with("selftest"), "{words}: {said}");
    }
    let done = Command::new(env!("CARGO_BIN_EXE_foretrain")).args(["selftest", "--group", "norm"]).output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.code() == Some(2) && said.contains("known:") && said.contains("norms"), "{said}");
}

/// Each of several processes would do the whole of it: that is refused before anything else, but where they are joined.
#[test]
fn several_processes_are_joined_or_refused() {
    for (words, wanted) in [
        ("compare --on cuda", "process 1 of the 4"),
        ("run --on cuda --devices 0", "process 1 of the 4"),
        ("calibrate --on cuda --tiny", "process 1 of the 4"),
        ("selftest --on cuda", "process 1 of the 4"),
        ("run --on cuda --ring 4", if driver::count().is_ok() { "" } else { "no NVIDIA driver" }),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_foretrain"));
        let variables = [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("FORETRAIN_TIMEOUT", "1")];
        let done = command.args(words.split(' ')).envs(variables).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert!(done.status.code() == Some(2) && said.contains(wanted), "{words}: {said}");
    }
}

/// A machine without NCCL says what to install, and does not panic.
#[test]
fn no_nccl_is_a_sentence() {
    match Nccl::load() {
        Ok(nccl) => assert!(nccl.version().unwrap() >= 21_800),
        Err(error) => {
            let said = error.to_string();
            assert!(said.contains("libnccl.so.2") && said.contains("LD_LIBRARY_PATH"), "{said}");
        }
    }
}

/// Compiled once, then taken from the folder; what was torn is compiled again.
#[test]
fn kernels_are_kept_on_disk() {
    if !nvrtc::is_present() {
        return eprintln!("skipped: NVRTC is not on this machine");
    }
    let dir = tempfile::tempdir().unwrap();
    let source = foretrain::exec::cuda::source::layout;
    let first = nvrtc::cached_in(Some(dir.path().into()), source, &[], "80").unwrap();
    let file = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
    assert_eq!(std::fs::read(&file).unwrap(), first);
    std::fs::write(&file, b"torn").unwrap();
    assert_eq!(nvrtc::cached_in(Some(dir.path().into()), source, &[], "80").unwrap(), first);
    std::fs::write(&file, b"\x7fELF of another day").unwrap();
    assert_eq!(nvrtc::cached_in(Some(dir.path().into()), source, &[], "80").unwrap(), b"\x7fELF of another day");
    let unwritable = dir.path().join("file/below");
    std::fs::write(dir.path().join("file"), b"").unwrap();
    assert_eq!(nvrtc::cached_in(Some(unwritable), source, &[], "80").unwrap(), first);
}

const ARCHITECTURES: [&str; 3] = ["80", "89", "90a"];

fn plan(model: &str, options: &str, par: Parallelism) -> Plan {
    plan_of(LlmSpec::find(model).unwrap(), options, par)
}

fn plan_of(model: LlmSpec, options: &str, par: Parallelism) -> Plan {
    let work =
        Workload { seq_len: 2048, global_batch: 8, micro_batch: 1, dtype: Dtype::Bf16, documents: Default::default() };
    let par = Parallelism { options: options.parse().unwrap(), ..par };
    let engine = Engine::Sm { ctas: 8 };
    build(&model, &work, &par, Engines { p2p: engine, collective: engine }).unwrap()
}

/// Ring, Ulysses, tensor-parallel and old-style layers in bf16.
fn plans() -> Vec<Plan> {
    let none = Parallelism::default;
    vec![
        plan("llama-3-8b", "", Parallelism { ring: 4, dp: 2, zero: 1, ..none() }),
        plan("llama-3-8b", "burst", Parallelism { ring: 4, ..none() }),
        plan("llama-3-8b", "gather-kv", Parallelism { ring: 4, ..none() }),
        plan("llama-3-8b", "fp8", none()),
        plan("llama-2-7b", "", Parallelism { ulysses: 4, ..none() }),
        plan("llama-3-8b", "", Parallelism { tp: 4, ..none() }),
        plan("gpt3-175b", "", Parallelism { dp: 2, ..none() }),
        plan("llama-3.2-1b", "bf16-moments+no-master", none()),
        plan("llama-3.2-1b", "muon", Parallelism { dp: 2, zero: 1, ..none() }),
        plan("llama-3.2-1b", "muon+no-master", none()),
        experts("qwen3-30b-a3b", "", 2),
        experts("deepseek-v3", "", 2),
        experts("mixtral-8x7b", "", 2),
        experts("mixtral-8x7b", "dispatch-deepep-v1-normal+dispatch-fp8", 2),
        plan("nemotron-h-8b", "", Parallelism { tp: 4, ..none() }),
        plan("nemotron-h-8b", "", Parallelism { ulysses: 2, ..none() }),
        experts("nemotron-3-nano-30b-a3b", "", 2),
    ]
}

/// Scores that lean on distance (ALiBi), which no library here has.
fn leaning() -> Plan {
    let model = LlmSpec { positions: Positions::Alibi, ..LlmSpec::find("llama-2-7b").unwrap() };
    plan_of(model, "", Parallelism { ring: 2, ..Parallelism::default() })
}

/// A mixture of experts, its tokens routed by a seed: two layers, since lists of rows are long.
fn experts(model: &str, options: &str, ep: u32) -> Plan {
    let whole = LlmSpec::find(model).unwrap();
    let model = if whole.mamba.is_some() { whole } else { LlmSpec { layers: 2, mtp: None, ..whole } };
    let documents = Default::default();
    let work = Workload { seq_len: 512, global_batch: 2, micro_batch: 1, dtype: Dtype::Bf16, documents };
    let par = Parallelism { dp: 2, ep, options: options.parse().unwrap(), ..Parallelism::default() };
    let route = Routing::Uniform { seed: 1 }.route(&model, &work, &par, 8).unwrap();
    let engine = Engine::Sm { ctas: 8 };
    build_routed(&model, &work, &par, Engines { p2p: engine, collective: engine }, route).unwrap()
}

/// A library that takes every pass of attention it is asked for.
#[derive(Debug)]
struct TakesAll;

impl Fused for TakesAll {
    fn name(&self) -> String {
        "a library".into()
    }

    fn workspace(&self, _: &Sdpa) -> Result<Option<u64>> {
        Ok(Some(256))
    }
}

type Gpu = (u64, Option<&'static dyn Fused>);

/// Those that have the least shared memory and the most, and one with a library.
const GPUS: [Gpu; 3] = [(LEAST_SHARED, None), (MOST_SHARED, None), (MOST_SHARED, Some(&TakesAll))];

/// Every launch of rank 0, by source and macros.
fn launches((plan, gpu): (&Plan, Gpu)) -> Vec<Launch> {
    let atoms = AtomTable::new(plan).unwrap();
    let line = Line::program(plan, &atoms, plan.program_of(0)).unwrap();
    let actions = (0..line.nodes.len()).flat_map(|i| actions(plan, &line, i, gpu));
    actions.filter_map(|a| if let Action::Launch(launch) = a { Some(launch) } else { None }).collect()
}

/// What rank 0 launches for an op.
fn actions(plan: &Plan, line: &Line, i: usize, (shared, fused): Gpu) -> Vec<Action> {
    let OpKind::Compute { kernel, .. } = &line.nodes[i].op.kind else { return vec![] };
    let dtypes = |places: &[Place]| places.iter().map(|p| plan.tensors[p.tensor as usize].dtype).collect::<Vec<_>>();
    let route = kernel.routed().map(|routed| plan.route_of(routed.route, 0));
    let on = Where { views: &plan.views, route, rank: 0, shared, fused };
    let lowered = lower(kernel, on, &dtypes(line.reads(i)), &dtypes(line.writes(i)), 1);
    lowered.unwrap_or_else(|e| panic!("{}: {e}", line.path(i))).actions
}

/// Operand types that cuBLASLt multiplies, the sum in f32 (its documentation, "cublasLtMatmul", tables of types); a bias
/// is of the result's type, and dimensions of codes are multiples of 16.
#[test]
fn every_product_of_a_plan_is_one_that_cublas_has() {
    use Dtype::{Bf16, F32, U8};
    let known = [[Bf16, Bf16, Bf16], [Bf16, Bf16, F32], [F32, F32, F32], [U8, U8, Bf16], [U8, U8, F32]];
    let mut seen = 0;
    for plan in plans() {
        let atoms = AtomTable::new(&plan).unwrap();
        let line = Line::program(&plan, &atoms, plan.program_of(0)).unwrap();
        let dtype = |p: &Place| plan.tensors[p.tensor as usize].dtype;
        for (i, node) in line.nodes.iter().enumerate() {
            let OpKind::Compute { kernel, .. } = &node.op.kind else { continue };
            for action in actions(&plan, &line, i, GPUS[1]) {
                let Action::Gemm { gemm, bias, .. } = action else { continue };
                assert!(known.contains(&gemm.dtypes), "{}: {gemm:?}", line.path(i));
                let biased = bias.map(|_| dtype(line.reads(i).last().unwrap()));
                assert!(biased.is_none_or(|b| b == gemm.dtypes[2]), "{}: a bias of {biased:?}", line.path(i));
                let codes = gemm.dtypes[0] == U8;
                assert!(!codes || gemm.shape.iter().all(|n| n % 16 == 0), "{} {kernel:?}", line.path(i));
                seen += 1;
            }
        }
    }
    assert!(seen > 100, "{seen} products");
}

/// A library is left all attention of these plans: whole sequences, blocks of rings, both of latent attention's passes.
#[test]
fn attention_of_plans_without_windows_and_documents_is_a_librarys() {
    let mut seen = 0;
    for plan in plans() {
        let atoms = AtomTable::new(&plan).unwrap();
        let line = Line::program(&plan, &atoms, plan.program_of(0)).unwrap();
        for (i, node) in line.nodes.iter().enumerate() {
            let OpKind::Compute { kernel, .. } = &node.op.kind else { continue };
            let all = actions(&plan, &line, i, GPUS[2]);
            let own =
                |a: &Action| matches!(a, Action::Launch(l) if ["attention_fwd", "attention_bwd"].contains(&l.kernel));
            assert!(!all.iter().any(own), "{}: {kernel:?}", line.path(i));
            seen += all.iter().filter(|a| matches!(a, Action::Fused { .. })).count();
        }
    }
    assert!(seen > 50, "{seen} passes");
}

#[test]
fn every_kernel_of_a_plan_compiles_for_every_architecture() {
    if !nvrtc::is_present() {
        assert!(std::env::var_os("FORETRAIN_NVRTC").is_none(), "FORETRAIN_NVRTC is set and NVRTC is not here");
        return eprintln!("skipped: NVRTC is not on this machine");
    }
    let mut wanted = BTreeMap::new();
    let plans = [plans(), vec![leaning()]].concat();
    for launch in plans.iter().flat_map(|plan| GPUS.map(|gpu| (plan, gpu))).flat_map(launches) {
        let macros: Vec<String> = launch.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let (source, defines) = (launch.source, launch.defines);
        let kernels =
            wanted.entry(format!("{} {}", source.name, macros.join(" "))).or_insert((source, defines, vec![]));
        kernels.2.push(launch.kernel);
    }
    // Side by side, as the program does it.
    let all: Vec<_> = wanted.iter().flat_map(|one| ARCHITECTURES.map(|arch| (one, arch))).collect();
    let compiled: Vec<_> = all
        .par_iter()
        .map(|((_, (source, defines, _)), arch)| nvrtc::compile(*source, defines, arch).unwrap())
        .collect();
    let mut table: BTreeMap<String, String> = BTreeMap::new();
    for (((name, (_, _, kernels)), arch), compiled) in all.into_iter().zip(compiled) {
        assert!(compiled.code.starts_with(b"\x7fELF"), "{name}: no machine code");
        for Resources { kernel, registers, spilled } in compiled.kernels {
            if kernels.contains(&kernel.as_str()) {
                let takes = format!("{registers} registers, {} + {} bytes spilled", spilled[0], spilled[1]);
                table.insert(format!("sm_{arch} {kernel} {}", name.split_once(' ').map_or("", |n| n.1)), takes);
            }
        }
    }
    assert!(table.len() > 3 * 30, "{} kernels", table.len());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/cuda_resources.json");
    let text = serde_json::to_string_pretty(&table).unwrap() + "\n";
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        return std::fs::write(path, text).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap();
    assert_eq!(text, golden, "what kernels take has changed; UPDATE_GOLDEN=1 writes it anew");
}
