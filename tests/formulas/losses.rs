//! Losses of logits in bf16: what their kernels move, and what is alive while they do. PyTorch's without a compiler is counted
//! from its sources (github:pytorch/pytorch aten/src/ATen/native: LossNLL.cpp, cuda/SoftMax.cu, cuda/Loss.cu).

use crate::notation::{S, Steps};
use crate::plans::{self, SM, model, way, work};
use foretrain::plan::link::AtomTable;
use foretrain::plan::memory::Layout;
use foretrain::plan::*;
use foretrain::spec::*;

/// So many columns that nothing else of a step takes as much as logits.
const LARGE: u64 = 1 << 15;

fn said(words: &str, tp: u32, vocab: u64) -> Plan {
    let par = Parallelism { tp, options: words.parse().unwrap(), ..way(1, 1, 1) };
    plans::plan(&LlmSpec { vocab, ..model(1, 8, false) }, &par, &work(&par, S, 1, 1), SM)
}

/// PyTorch has log-probabilities, their gradient and that of the logits at once, in fp32. One kernel has logits and their
/// gradient, or only that, beside the logits in bf16, which a copy to and one from fp32 keep from lying on either.
#[test]
fn a_loss_has_as_many_bytes_a_logit_as_its_buffers() {
    for (words, tp, rows, bytes) in [
        ("default", 1, S, 2),
        ("wide-loss-in-place", 1, S, 4 + 2),
        ("wide-loss", 2, S, 4 + 4 + 2),
        ("wide-loss", 1, S, 4 + 4 + 4),
        ("wide-loss+loss-chunks-7", 1, S.div_ceil(7), 4 + 4 + 4),
    ] {
        let peak = |vocab| {
            let plan = said(words, tp, vocab);
            let layout = Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap();
            let passing = |(kind, _): &&_| matches!(kind, TensorKind::Activation | TensorKind::Workspace);
            layout.gaps + layout.live_by_kind.iter().filter(passing).map(|(_, bytes)| bytes).sum::<u64>()
        };
        let logits = rows * LARGE / u64::from(tp);
        assert_eq!(peak(2 * LARGE) - peak(LARGE), bytes * logits, "{words}, tp {tp}");
    }
}

/// Of an element: casts read one width and write the other; log-softmax reads three times and writes; the gradient of the
/// negative log-likelihood is written; log-softmax backward reads that twice and the log-probabilities once, and writes.
#[test]
fn kernels_of_pytorchs_loss_pass_over_their_rows() {
    let plan = said("wide-loss", 1, LARGE);
    let steps = Steps::of(&plan);
    for (label, bytes) in [
        ("logits_widen", 2 + 4),
        ("log_softmax", 3 * 4 + 4),
        ("nll_loss", 4),
        ("log_softmax_bwd", 2 * 4 + 4 + 4),
        ("logits_narrow", 4 + 2),
    ] {
        let named = |&node: &usize| steps.line.path(node).rsplit('/').next() == Some(label);
        let node = (0..steps.line.nodes.len()).find(named).unwrap_or_else(|| panic!("no {label}"));
        let OpKind::Compute { kernel, .. } = &steps.line.nodes[node].op.kind else { panic!("{label}") };
        let [reads, writes] = [steps.line.reads(node), steps.line.writes(node)]
            .map(|places| places.iter().map(|place| steps.bytes(place)).collect::<Vec<u64>>());
        let moved = kernel.work(&plan.views, 0, &reads, &writes).unwrap().bytes as f64 / (S * LARGE) as f64;
        // Besides, a target and a log-probability a row, and the loss.
        assert!((moved - f64::from(bytes)).abs() < 9.0 / LARGE as f64, "{label}: {moved}, not {bytes}");
    }
}
