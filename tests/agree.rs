use foretrain::cluster::Cluster;
use foretrain::cost::{Effort, Machine, cost};
use foretrain::device::Roofline;
use foretrain::plan::*;
use foretrain::spec::*;
use foretrain::strategy::{Engines, build};

fn plan(dp: u32, ring: u32, ulysses: u32, seq: u64, gb: u64, zero: u32, recompute: Recompute) -> Plan {
    let model = LlmSpec::find("llama-3-8b").unwrap();
    let work = Workload { seq_len: seq, global_batch: gb, micro_batch: 1, dtype: Dtype::Bf16 };
    let par = Parallelism { dp, ring, ulysses, zero, recompute };
    let e = Engines { p2p: Engine::Sm { ctas: 8 }, collective: Engine::Sm { ctas: 24 } };
    build(&model, &work, &par, e).unwrap()
}

#[test]
fn first() {
    let gpu = GpuSpec::find("h100-sxm5").unwrap();
    let cluster = Cluster::new(&ClusterSpec::find("dgx-h100").unwrap(), &gpu, 64).unwrap();
    let stack = StackSpec::find("nccl-fa3").unwrap();
    let roof = Roofline::new(&gpu, &stack).unwrap();
    let m = Machine { cluster: &cluster, stack: &stack, kernels: &roof, devices: None };
    for (dp, ring, ulysses, seq, gb, rc) in [
        (8, 8, 1, 65536, 64, Recompute::None),
        (8, 1, 8, 65536, 64, Recompute::Full),
        (4, 2, 8, 65536, 64, Recompute::None),
        (1, 64, 1, 1048576, 4, Recompute::Full),
    ] {
        let t0 = std::time::Instant::now();
        let p = plan(dp, ring, ulysses, seq, gb, 1, rc);
        let t1 = std::time::Instant::now();
        check::check(&p).unwrap();
        let t2 = std::time::Instant::now();
        let fast = cost(&p, m, Effort::SUMS).unwrap();
        let t3 = std::time::Instant::now();
        let mem = memory::Layout::new(&p, &link::AtomTable::new(&p).unwrap(), 0).unwrap();
        let t4 = std::time::Instant::now();
        println!("build {:?} check {:?} cost {:?} mem {:?}", t1 - t0, t2 - t1, t3 - t2, t4 - t3);
        println!("step {:?} classes {} {:#?}", fast.step, fast.classes.len(), fast.mean());
        println!("mfu {}", p.about.model_flops / 64.0 / fast.step.value() / 989e12);
        println!("mem {:.2} GB gaps {} {:?}", mem.bytes as f64 / 1e9, mem.gaps, mem.live_by_kind);
        if ring <= 8 {
            let slow = cost(&p, m, Effort { fold: false, stride: false, spans: false }).unwrap();
            println!("slow {:?} in {:?}", slow.step, t4.elapsed());
            assert_eq!(slow.step, fast.step);
        }
    }
}
