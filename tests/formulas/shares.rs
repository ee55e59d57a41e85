//! Weights, gradients and optimizer states in shares (ZeRO), and what is sent for it.

use crate::notation::{A, D, F, H, Steps, V, kind_bytes};
use crate::plans::{self, Host, SM, close, model, way, work};
use foretrain::collective::count::sent_by;
use foretrain::cost::{Effort, cost};
use foretrain::plan::expert::{ExpertOp, Pass};
use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::memory::{ALIGN, Layout};
use foretrain::plan::*;
use foretrain::spec::*;

#[test]
fn zero_shares_twelve_bytes_a_weight_and_sends_each_gradient_and_weight_once() {
    // Every slot divides by the ranks, so that nothing is padded.
    let m = model(3, 4, false);
    let weights = 3 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H) + H + 2 * V * H;
    for (w, zero) in [(1, 0), (1, 1), (4, 0), (4, 1), (8, 1)] {
        let par = Parallelism { zero, ..way(w, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, 3), SM);
        let share = if zero == 1 { u64::from(w) } else { 1 };
        assert_eq!(kind_bytes(&plan, TensorKind::Param), 2 * weights);
        assert_eq!(kind_bytes(&plan, TensorKind::Grad), 4 * weights + 4, "and the loss");
        // fp32 weight, first and second moment.
        assert_eq!(kind_bytes(&plan, TensorKind::OptState), 12 * weights / share, "W {w} ZeRO {zero}");
        let usage = cost(&plan, Host::of(&plan, 1.0).machine(), Effort::SUMS).unwrap().mean();
        // Reduce-scatter of 4 bytes and all-gather of 2, or all-reduce of 4; all-reduce of the loss.
        let once = (f64::from(w) - 1.0) / f64::from(w);
        let each = if zero == 1 { 4 + 2 } else { 2 * 4 };
        assert!(close(usage.bytes_scale_up, once * (each * weights + 2 * 4) as f64), "W {w} ZeRO {zero}");
    }
}

/// arXiv:1910.02054, section 5 and 7: stage 2 keeps 1/W of the gradients, stage 3 of the weights too; what a
/// rank sends a microbatch is each gradient once, and with stage 3 each layer's weights twice.
#[test]
fn zero_two_and_three_share_gradients_and_weights() {
    let m = model(3, 4, false);
    let layers = 3 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H);
    let ends = H + 2 * V * H;
    for (w, zero, batches) in [(4, 2, 1), (4, 2, 3), (8, 3, 1), (8, 3, 3)] {
        let par = Parallelism { zero, ..way(w, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, batches), SM);
        let (all, share) = (layers + ends, u64::from(w));
        assert_eq!(kind_bytes(&plan, TensorKind::Param), 2 * all / if zero == 3 { share } else { 1 });
        assert_eq!(kind_bytes(&plan, TensorKind::Grad), 4 * all / share + 4, "and the loss");
        assert_eq!(kind_bytes(&plan, TensorKind::OptState), 12 * all / share);
        let usage = cost(&plan, Host::of(&plan, 1.0).machine(), Effort::SUMS).unwrap().mean();
        let once = (f64::from(w) - 1.0) / f64::from(w);
        // Weights of 2 bytes: once a step, or in every microbatch twice a layer, once embedding and head.
        let weights = if zero == 3 { batches * (2 * 2 * layers + 2 * ends) } else { 2 * all };
        assert!(close(usage.bytes_scale_up, once * (batches * 4 * all + weights + 2 * 4) as f64), "W {w} ZeRO {zero}");
    }
}

/// Of every microbatch each gradient is copied once and, with stage 3, the weights of layers twice, those of the ends once.
/// In memory one layer is in use, and two are on their way in and out; without copies two are in use.
#[test]
fn what_comes_and_goes_is_copied_once() {
    let m = model(3, 4, false);
    let layer = H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H;
    let (layers, ends) = (3 * layer, H + 2 * V * H);
    for (w, zero, batches) in [(4, 2, 1), (4, 2, 3), (8, 3, 1), (8, 3, 3)] {
        let [plain, copied] = ["default", "copy-shards"].map(|words| {
            let par = Parallelism { zero, options: words.parse().unwrap(), ..way(w, 1, 1) };
            plans::plan(&m, &par, &work(&par, 64, 1, batches), SM)
        });
        let line = Line::program(&copied, &AtomTable::new(&copied).unwrap(), 0).unwrap();
        let elems = line.nodes.iter().filter_map(|node| match node.op.kind {
            OpKind::Compute { kernel: Kernel::Cast { elems }, .. } => Some(elems),
            _ => None,
        });
        let weights = if zero == 3 { 2 * layers + ends } else { 0 };
        assert_eq!(elems.sum::<u64>(), batches * (layers + ends + weights), "W {w} ZeRO {zero}");
        assert!(plain.kernels().all(|kernel| !matches!(kernel, Kernel::Cast { .. })));
        let held = |plan: &Plan| {
            let shared = plan.tensors.iter().filter(|t| t.name.starts_with("w") || t.name.starts_with("g"));
            shared.map(|t| t.bytes() * u64::from(t.slots)).sum::<u64>()
        };
        let of_each = if zero == 3 { 2 + 4 } else { 4 };
        assert_eq!(held(&copied) - held(&plain), of_each * (layer + ends), "W {w} ZeRO {zero}");
        let sent = |plan: &Plan| cost(plan, Host::of(plan, 1.0).machine(), Effort::SUMS).unwrap().mean().bytes_scale_up;
        assert_eq!(sent(&copied), sent(&plain));
    }
}

/// arXiv:1910.02054, section 5: whoever has the sums whole has sent what all-reduces send, and the new weights on top.
#[test]
fn sums_that_are_whole_everywhere_are_sent_twice() {
    let m = model(3, 4, false);
    let all = 3 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H) + H + 2 * V * H;
    for (w, words, wire, batches) in [
        (4u64, "all-reduce-grads", 4, 3),
        (8, "all-reduce-grads+bf16-grads", 2, 1),
        (8, "all-reduce-grads+no-overlap-grad", 4, 2),
    ] {
        let par = Parallelism { zero: 1, options: words.parse().unwrap(), ..way(w as u32, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, batches), SM);
        assert_eq!(kind_bytes(&plan, TensorKind::Grad), wire * all + 4, "and the loss");
        assert_eq!(kind_bytes(&plan, TensorKind::OptState), 12 * all / w);
        let line = Line::program(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
        // The loss, a number that cannot be cut: the first rank passes it on twice.
        let once = (2 * wire + 2) * all * (w - 1) / w;
        assert_eq!(sent_by(&plan, &line, 0), once + 2 * 4, "{words} over {w}");
    }
}

/// arXiv:1910.02054, section 3.1: 16 bytes of a weight in mixed precision with gradients of 2 bytes; moments of 2 bytes
/// take 4 of them away, a copy in fp32 that is not there 4 more.
#[test]
fn an_optimizer_in_bf16_takes_eight_bytes_a_weight() {
    let m = model(3, 4, false);
    let all = 3 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H) + H + 2 * V * H;
    for (w, zero, words, weights, state) in [
        (1u64, 0, "bf16-grads", 2 * all, 12 * all),
        (1, 0, "bf16-grads+bf16-moments", 2 * all, 8 * all),
        (1, 0, "bf16-grads+bf16-moments+no-master", 2 * all, 4 * all),
        // A rank's share of the weights is kept where it is updated.
        (8, 1, "bf16-grads+bf16-moments+no-master", 2 * all + 2 * all / 8, 4 * all / 8),
        (8, 3, "bf16-grads+bf16-moments", 2 * all / 8, 8 * all / 8),
        (8, 3, "bf16-grads+bf16-moments+no-master", 2 * all / 8, 4 * all / 8),
    ] {
        let par = Parallelism { zero, options: words.parse().unwrap(), ..way(w as u32, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, 1), SM);
        assert_eq!(kind_bytes(&plan, TensorKind::Param), weights, "{words}, ZeRO {zero}");
        assert_eq!(kind_bytes(&plan, TensorKind::OptState), state, "{words}, ZeRO {zero}");
    }
}

/// PyTorch's `foreach`: behind the backward pass, what weights are divided by is there for all of them at once, in the dtype of the
/// moments.
#[test]
fn adam_operation_by_operation_has_one_more_buffer_as_large_as_its_moments() {
    let m = model(3, 4, false);
    let layer = H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H;
    let parts = [layer, layer, layer, V * H, H + V * H];
    for (words, width) in [("foreach", 4), ("foreach+bf16-grads+bf16-moments+no-master", 2)] {
        let par = Parallelism { zero: 0, options: words.parse().unwrap(), ..way(1, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 4, 1, 1), SM);
        let layout = Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
        let live = layout.live_by_kind.iter().filter(|(kind, _)| *kind == TensorKind::Workspace);
        let all = parts.map(|elems| (width * elems).next_multiple_of(ALIGN)).iter().sum::<u64>();
        assert_eq!(live.map(|(_, bytes)| bytes).sum::<u64>(), all, "{words}");
    }
}

/// Weights that are gathered ahead of a step come in the order in which its first microbatch wants them, whatever kinds their layers
/// are of; and a rank keeps no share of them beside the whole: that is made of the copy in fp32, and gone by the backward pass.
#[test]
fn weights_are_gathered_ahead_layer_by_layer_out_of_shares_that_nobody_keeps() {
    let plain = model(5, 4, false);
    let all = 5 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H) + H + 2 * V * H;
    let windowed = vec![true, true, false, true, false];
    for m in [plain.clone(), LlmSpec { window: Some(32), windowed, ..plain }] {
        let [behind, plan] = ["default", "overlap-gather"].map(|words| {
            let par = Parallelism { options: words.parse().unwrap(), ..way(4, 1, 1) };
            plans::plan(&m, &par, &work(&par, 256, 1, 2), SM)
        });
        assert_eq!(kind_bytes(&plan, TensorKind::Param), 2 * all);
        assert_eq!(kind_bytes(&plan, TensorKind::OptState), 12 * all / 4);
        let live = |plan: &Plan| {
            let layout = Layout::new(plan, &AtomTable::new(plan).unwrap(), 0).unwrap();
            layout.live_by_kind.clone()
        };
        assert_eq!(live(&plan), live(&behind));
        let steps = Steps::of(&plan);
        let gathers = |node: &usize| steps.line.path(*node).contains("all_gather");
        let whole = (0..steps.line.nodes.len()).filter(gathers).map(|node| steps.line.writes(node)[0]);
        let named: Vec<(String, u32)> =
            whole.map(|at| (plan.tensors[at.tensor as usize].name.clone(), at.slot)).collect();
        let layer = |l: u64| match m.windowed.is_empty() {
            true => ("w.layers".to_string(), l as u32),
            false => {
                let alike = (0..l).filter(|before| m.window_of(*before) == m.window_of(l)).count();
                let local = if m.window_of(l).is_some() { "local_" } else { "" };
                (format!("w.{local}layers"), alike as u32)
            }
        };
        let ends = |name: &str| (format!("w.{name}"), 0);
        let want: Vec<(String, u32)> =
            [ends("embed")].into_iter().chain((0..5).map(layer)).chain([ends("head")]).collect();
        assert_eq!(named, want);
    }
}

/// The same in a pipeline, of what a rank's stage has: every microbatch scatters each gradient and, with stage 3, gathers
/// each layer's weights twice. Gradients that wait whole are scattered once a step.
#[test]
fn stages_scatter_and_gather_for_every_microbatch() {
    let (w, p, batches) = (4u64, 2u64, 6u64);
    let m = model(2 * p, 4, false);
    let layer = H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H;
    for (zero, words, scattered, gathered) in [
        (1, "default", 1, 1),
        (1, "bf16-grads", 1, 1),
        (3, "bf16-grads", batches, 2 * batches),
        (2, "default", batches, 1),
        (3, "default", batches, 2 * batches),
        (3, "no-sync", 1, 2 * batches),
    ] {
        let options = words.parse().unwrap();
        let par = Parallelism { pp: p as u32, zero, options, ..way(w as u32, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, batches), SM);
        // One microbatch of one stage, forward and backward: what a boundary carries.
        let boundary = 2 * 64 * H;
        for rank in [0, w as u32] {
            let line = Line::program(&plan, &AtomTable::new(&plan).unwrap(), plan.program_of(rank)).unwrap();
            let sent = sent_by(&plan, &line, rank);
            let ends = if rank == 0 { V * H } else { H + V * H };
            // Embedding and head are gathered once a microbatch.
            let weights = 2 * (gathered * 2 * layer + (gathered / 2).max(1) * ends);
            let wire = if words == "bf16-grads" { 2 } else { 4 };
            let once = (wire * scattered * (2 * layer + ends) + weights) * (w - 1) / w;
            // The last stage sums the loss, a number that cannot be cut: its first rank passes it on twice.
            let loss = if rank == 0 { 0 } else { 2 * 4 };
            assert_eq!(sent, once + batches * boundary + loss, "ZeRO {zero} {words}, rank {rank}");
        }
    }
}

/// MiCS, arXiv:2205.00119: in groups of N of W ranks weights and gradients travel within a group, and a share of
/// each gradient once a step over the W/N groups.
#[test]
fn groups_that_share_sum_over_each_other_once_a_step() {
    let m = model(3, 4, false);
    let layers = 3 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F + 2 * H);
    let (all, ends) = (layers + H + 2 * V * H, H + 2 * V * H);
    for (w, n, zero, batches) in [(8u64, 4u64, 1, 3), (8, 2, 2, 3), (8, 4, 3, 1), (4, 2, 3, 3)] {
        let options = format!("shard-{n}").parse().unwrap();
        let par = Parallelism { zero, options, ..way(w as u32, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, batches), SM);
        assert_eq!(kind_bytes(&plan, TensorKind::OptState), 12 * all / n, "W {w} N {n} ZeRO {zero}");
        let line = Line::program(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
        let scattered = if zero == 1 { 1 } else { batches };
        let gathered = if zero == 3 { batches * (2 * 2 * layers + 2 * ends) } else { 2 * all };
        let within = (4 * scattered * all + gathered) * (n - 1) / n;
        let groups = w / n;
        let across = 2 * 4 * (all / n) * (groups - 1) / groups;
        // The loss on top, a number that cannot be cut.
        assert_eq!(sent_by(&plan, &line, 0), within + across + 2 * 4, "W {w} N {n} ZeRO {zero}");
    }
}

/// What is gathered in FP8 takes a byte, and four for the scale of 128, but for norms, embedding and head; memory and what
/// is sent of gradients stay as they are.
#[test]
fn matrices_gathered_in_fp8_take_half_of_what_they_took() {
    let m = model(3, 4, false);
    let matrices = 3 * (H * (2 * A * D + 2 * 4 * D) + 3 * H * F);
    for (w, zero, batches) in [(4u64, 1, 3), (8, 2, 1), (4, 3, 1), (8, 3, 3)] {
        let plan = |words: &str| {
            let par = Parallelism { zero, options: words.parse().unwrap(), ..way(w as u32, 1, 1) };
            plans::plan(&m, &par, &work(&par, 64, 1, batches), SM)
        };
        let [plain, narrow] = ["fp8", "fp8+gather-fp8"].map(plan);
        let sent = |plan: &Plan| cost(plan, Host::of(plan, 1.0).machine(), Effort::SUMS).unwrap().mean().bytes_scale_up;
        let times = if zero == 3 { 2 * batches } else { 1 };
        let less = (times * (matrices - matrices / 32)) as f64 * (w - 1) as f64 / w as f64;
        assert!(close(sent(&plain) - sent(&narrow), less), "W {w} ZeRO {zero}");
        for kind in [TensorKind::Param, TensorKind::Grad, TensorKind::OptState, TensorKind::CommBuffer] {
            assert_eq!(kind_bytes(&plain, kind), kind_bytes(&narrow, kind));
        }
        // Counted byte by byte, scales of cut blocks included.
        let counted = |plan: &Plan, rank| {
            let line = Line::program(plan, &AtomTable::new(plan).unwrap(), 0).unwrap();
            sent_by(plan, &line, rank)
        };
        let of_all: u64 = (0..w as u32).map(|rank| counted(&plain, rank) - counted(&narrow, rank)).sum();
        let whole = less * w as f64;
        assert!((of_all as f64 / whole - 1.0).abs() < 0.01, "{of_all} of {whole}");
    }
}

/// What a tensor says to be in FP8 is what products in FP8 read of it, and nothing else.
#[test]
fn what_is_gathered_in_fp8_is_what_products_in_fp8_read() {
    for name in ["llama-3-8b", "gpt3-175b", "qwen3-30b-a3b", "deepseek-v3", "deepseek-v3.2", "nemotron-3-nano-30b-a3b"]
    {
        let m = LlmSpec::find(name).unwrap();
        let ep = if m.moe.is_some() { 8 } else { 1 };
        let zero = if m.mtp.is_some() { 1 } else { 3 };
        let par = Parallelism { ep, zero, options: "fp8+gather-fp8".parse().unwrap(), ..way(16, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 2048, 1, 1), SM);
        let line = Line::program(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
        let mut read = 0;
        for (i, node) in line.nodes.iter().enumerate() {
            let OpKind::Compute { kernel, .. } = &node.op.kind else { continue };
            // A product with a weight, not one that makes its gradient.
            let fp8 = match kernel {
                Kernel::MatMul { fp8, a_t, .. } => *fp8 && !a_t,
                Kernel::Expert(expert) => {
                    matches!(expert.op, ExpertOp::MatMul { fp8: true, pass: Pass::Forward | Pass::Dx, .. })
                }
                _ => false,
            };
            let mut inside = 0;
            for place in line.reads(i) {
                let tensor = &plan.tensors[place.tensor as usize];
                let [from, to] = place.rows.map(|row| row * tensor.row_len());
                let meets = tensor.in_fp8.iter().any(|[start, end]| *start < to && from < *end);
                let within = tensor.in_fp8.iter().any(|[start, end]| *start <= from && to <= *end);
                // Whoever else reads a matrix reads the whole tensor: the optimizer, or a copy of it.
                let whole = to - from == tensor.elems();
                assert!(!meets || (fp8 && within) || (!fp8 && whole), "{name}: {} reads {from} to {to}", line.path(i));
                inside += u32::from(meets && within);
            }
            assert!(!fp8 || inside == 1, "{name}: {} reads {inside} matrices in FP8", line.path(i));
            read += u32::from(fp8);
        }
        assert!(read > 0, "{name}");
    }
}
