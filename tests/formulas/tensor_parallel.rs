//! Tensor parallelism: rows that travel, and heads that several ranks have.

use crate::notation::{A, BACKWARD, D, E, F, FORWARD, H, S, Steps, V, kind_bytes};
use crate::plans::{self, SM, model, way, work};
use foretrain::plan::link::{AtomTable, Line};
use foretrain::plan::*;
use foretrain::spec::*;

/// Korthikanti et al. (arXiv:2205.05198), section 4.2.2: an all-gather and a reduce-scatter move what an
/// all-reduce did; the input of a product is gathered once more for its weights' gradient.
#[test]
fn tensor_parallelism_moves_rows_eight_times_or_ten() {
    for (t, words, forward, backward) in
        [(2, "default", 4, 6), (4, "default", 4, 6), (2, "no-sp", 4, 4), (8, "no-sp", 4, 4)]
    {
        let par = Parallelism { tp: t, options: words.parse().unwrap(), ..way(1, 1, 1) };
        let plan = plans::plan(&model(2, 8, false), &par, &work(&par, S, 1, 1), SM);
        let t = u64::from(t);
        let once = S * H * E / t * (t - 1);
        let steps = Steps::of(&plan);
        assert_eq!([steps.sent(FORWARD), steps.sent(BACKWARD)], [forward * once, backward * once], "tp {t} {words}");
    }
}

/// Section 4.1 of arXiv:2104.04473: without sequence parallelism every rank sends all rows to the next stage, or its own
/// alone, which that stage's ranks gather; with it they have no others.
#[test]
fn scattered_between_stages_rows_leave_a_node_once() {
    for (t, words, parts) in
        [(4, "no-sp", 1), (4, "no-sp+scatter-p2p", 4), (2, "no-sp+scatter-p2p", 2), (2, "default", 2)]
    {
        let par = Parallelism { tp: t, pp: 2, options: words.parse().unwrap(), ..way(1, 1, 1) };
        let plan = plans::plan(&model(2, 8, false), &par, &work(&par, S, 1, 3), SM);
        let (steps, all) = (Steps::of(&plan), S * H * E);
        assert_eq!(steps.sent("send_x."), 3 * all / parts, "{words}");
        let last = Steps { plan: &plan, line: Line::program(&plan, &AtomTable::new(&plan).unwrap(), 1).unwrap() };
        let joins = if words.contains("scatter") { 3 * all / u64::from(t) * u64::from(t - 1) } else { 0 };
        assert_eq!([last.sent("send_dx."), last.sent("join_x.")], [3 * all / parts, joins], "{words}");
    }
}

/// With k KV heads on T > k tensor-parallel ranks each has the weights of one, and T/k neighbours sum what they found for
/// it: 2 d h elements a layer.
#[test]
fn kv_heads_on_several_ranks_sum_their_gradients() {
    for (t, k) in [(8u64, 2u64), (4, 1), (8, 4)] {
        let m = model(3, k, false);
        let par = Parallelism { tp: t as u32, ..way(1, 1, 1) };
        let plan = plans::plan(&m, &par, &work(&par, 64, 1, 2), SM);
        let layer = H * (A / t * D + 2 * D) + A / t * D * H + 3 * H * F / t + 2 * H;
        assert_eq!(kind_bytes(&plan, TensorKind::Param), 2 * (3 * layer + H + 2 * V / t * H), "T {t} k {k}");
        let steps = Steps::of(&plan);
        let sums = (0..steps.line.nodes.len()).filter(|&i| steps.line.nodes[i].op.label == "kv_grad_sum");
        let bytes: Vec<u64> = sums.map(|i| steps.bytes(&steps.line.reads(i)[0])).collect();
        assert_eq!(bytes, [4 * 2 * D * H; 3], "once a step, T {t} k {k}");
        let groups: Vec<&Group> = plan
            .lanes
            .iter()
            .filter_map(|lane| match lane {
                Lane::Comm(group @ Group::Subset { axis: Axis::Tp, .. }, _) => Some(group),
                _ => None,
            })
            .collect();
        assert_eq!(groups.iter().map(|group| u64::from(group.size(&plan.views))).collect::<Vec<_>>(), [t / k]);
    }
}
