//! Every CUDA kernel that a plan launches compiles for every architecture, without a GPU.
//!
//! Skipped with a word where NVRTC is not on the machine; with FORETRAIN_NVRTC set it has to be there. Registers and
//! spills are golden (tests/golden/cuda_resources.json, of NVRTC 13.0; UPDATE_GOLDEN=1 writes them).

use foretrain::exec::cuda::lower::{Action, Launch, Where, lower};
use foretrain::exec::cuda::nvrtc::{self, Resources};
use foretrain::plan::link::{AtomTable, Line, Place};
use foretrain::plan::{Dtype, Engine, OpKind, Plan};
use foretrain::spec::{LlmSpec, Parallelism, Workload};
use foretrain::strategy::{Engines, build};
use std::collections::BTreeMap;
use std::path::Path;

const ARCHITECTURES: [&str; 3] = ["80", "89", "90a"];

fn plan(model: &str, options: &str, par: Parallelism) -> Plan {
    let model = LlmSpec::find(model).unwrap();
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
        plan("llama-2-7b", "", Parallelism { ulysses: 4, ..none() }),
        plan("llama-3-8b", "", Parallelism { tp: 4, ..none() }),
        plan("gpt3-175b", "", Parallelism { dp: 2, ..none() }),
    ]
}

/// Every launch of rank 0, by source and macros.
fn launches(plan: &Plan) -> Vec<Launch> {
    let atoms = AtomTable::new(plan).unwrap();
    let line = Line::program(plan, &atoms, plan.program_of(0)).unwrap();
    let on = Where { views: &plan.views, rank: 0 };
    let dtypes = |places: &[Place]| places.iter().map(|p| plan.tensors[p.tensor as usize].dtype).collect::<Vec<_>>();
    let of_node = |i: usize| {
        let OpKind::Compute { kernel, .. } = &line.nodes[i].op.kind else { return vec![] };
        let lowered = lower(kernel, on, &dtypes(line.reads(i)), &dtypes(line.writes(i)), 1);
        lowered.unwrap_or_else(|e| panic!("{}: {e}", line.path(i))).actions
    };
    let actions = (0..line.nodes.len()).flat_map(of_node);
    actions.filter_map(|a| if let Action::Launch(launch) = a { Some(launch) } else { None }).collect()
}

#[test]
fn every_kernel_of_a_plan_compiles_for_every_architecture() {
    if !nvrtc::is_present() {
        assert!(std::env::var_os("FORETRAIN_NVRTC").is_none(), "FORETRAIN_NVRTC is set and NVRTC is not here");
        return eprintln!("skipped: NVRTC is not on this machine");
    }
    let mut wanted = BTreeMap::new();
    for launch in plans().iter().flat_map(launches) {
        let macros: Vec<String> = launch.defines.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let (source, defines) = (launch.source, launch.defines);
        let kernels =
            wanted.entry(format!("{} {}", source.name, macros.join(" "))).or_insert((source, defines, vec![]));
        kernels.2.push(launch.kernel);
    }
    let mut table: BTreeMap<String, String> = BTreeMap::new();
    for (name, (source, defines, kernels)) in &wanted {
        for arch in ARCHITECTURES {
            let compiled = nvrtc::compile(*source, defines, arch).unwrap();
            assert!(compiled.code.starts_with(b"\x7fELF"), "{name}: no machine code");
            for Resources { kernel, registers, spilled } in compiled.kernels {
                if kernels.contains(&kernel.as_str()) {
                    let takes = format!("{registers} registers, {} + {} bytes spilled", spilled[0], spilled[1]);
                    table.insert(format!("sm_{arch} {kernel} {}", name.split_once(' ').map_or("", |n| n.1)), takes);
                }
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
