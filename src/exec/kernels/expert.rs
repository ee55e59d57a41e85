//! The kernels of a mixture-of-experts layer, on the rows that a listed route gives this rank. Rows of a buffer beyond
//! those are never touched.

use super::{Scalar, fp8, gemm, pointwise};
use crate::plan::expert::{ExpertKernel, ExpertOp, Pass, Values};
use crate::plan::rows::{Layout, RowId, place_of};
use crate::plan::{Mesh, Route};
use crate::spec::{Gate, Score};
use rustc_hash::FxHashMap;

/// # Panics
/// Where the route is balanced: then nobody knows which rows there are.
pub fn run<T: Scalar>(
    kernel: &ExpertKernel,
    route: &Route,
    views: &[Mesh],
    rank: u32,
    reads: &[Option<&[T]>],
    writes: &mut [&mut [T]],
) {
    assert!(route.is_listed(), "{}: a balanced route has no rows; list one", kernel.name());
    let here = Here { route, place: place_of(views, rank) };
    let read = |i: usize| reads[i].unwrap_or_else(|| panic!("{}: operand {i} is one of its results", kernel.name()));
    match kernel.op {
        ExpertOp::Router { experts, gate, .. } => here.router(experts as usize, gate, read(0), writes[0]),
        ExpertOp::RouterBwd { experts, gate, .. } => {
            here.router_bwd(experts as usize, gate, [read(0), read(1)], writes[0]);
        }
        ExpertOp::Rows { from, to, values, .. } => match values {
            Values::Row { cols } => here.move_rows(from, to, cols as usize, read(0), writes[0]),
            Values::Scaled { cols } => {
                let numbers = fp8::decoded(read(0), read(1), cols as usize);
                here.move_rows(from, to, cols as usize, &numbers, writes[0]);
            }
            Values::Choice { topk } => {
                let width = |layout: Layout| if layout.by_choice() { 1 } else { topk as usize };
                here.move_choices(from, to, [width(from), width(to)], read(0), writes[0]);
            }
        },
        // A product with a mask of ones and zeros has the values of what the mask picks.
        ExpertOp::Masked { from, to, cols, .. } => here.move_rows(from, to, cols as usize, read(0), writes[0]),
        ExpertOp::Quantise { layout, cols, .. } => {
            let rows = here.rows(layout).len();
            let [codes, scales] = writes else { panic!("quantise: codes and scales are written") };
            fp8::encode(&read(0)[..rows * cols as usize], cols as usize, codes, scales);
        }
        ExpertOp::MatMul { pass, slots, first, n, k, fp8, .. } => {
            here.matmul(pass, [first, slots], [n, k], fp8, reads, writes[0]);
        }
        ExpertOp::SwiGlu { cols, .. } => here.swiglu(cols as usize, [read(0), read(1)], writes[0]),
        ExpertOp::SwiGluBwd { cols, .. } => {
            let [d_gate_up, d_gates] = writes else { panic!("expert_swiglu_bwd has two results") };
            here.swiglu_bwd(cols as usize, [0, 1, 2].map(read), d_gate_up, d_gates);
        }
        ExpertOp::Relu2 { cols, .. } => here.relu2(cols as usize, [read(0), read(1)], writes[0]),
        ExpertOp::Relu2Bwd { cols, .. } => {
            let [d_up, d_gates] = writes else { panic!("expert_relu2_bwd has two results") };
            here.relu2_bwd(cols as usize, [0, 1, 2].map(read), d_up, d_gates);
        }
    }
}

/// A rank's part of a route.
struct Here<'a> {
    route: &'a Route,
    place: u32,
}

impl Here<'_> {
    fn rows(&self, layout: Layout) -> Vec<RowId> {
        layout.list(self.route, self.place)
    }

    /// The choices of each token.
    fn choices(&self) -> impl Iterator<Item = &[u32]> {
        self.route.choices(self.place).expect("asserted to be listed").chunks(self.route.topk as usize)
    }

    fn router<T: Scalar>(&self, experts: usize, gate: Gate, logits: &[T], gates: &mut [T]) {
        gates.fill(T::zero());
        let topk = self.route.topk as usize;
        for ((choices, logits), gates) in self.choices().zip(logits.chunks(experts)).zip(gates.chunks_mut(topk)) {
            let scores = scores(gate.score, logits);
            let chosen = |e: &u32| scores.get(self.route.expert_in(*e) as usize).copied();
            let total: f64 = choices.iter().filter_map(chosen).sum();
            let by = gate.scale / if gate.normalise { total } else { 1.0 };
            for (gate, choice) in gates.iter_mut().zip(choices) {
                *gate = T::from_f64(chosen(choice).map_or(0.0, |score| score * by));
            }
        }
    }

    fn router_bwd<T: Scalar>(&self, experts: usize, gate: Gate, [logits, d_gates]: [&[T]; 2], d_logits: &mut [T]) {
        d_logits.fill(T::zero());
        let topk = self.route.topk as usize;
        let rows = self.choices().zip(logits.chunks(experts)).zip(d_gates.chunks(topk));
        for (((choices, logits), d_gates), d_logits) in rows.zip(d_logits.chunks_mut(experts)) {
            let scores = scores(gate.score, logits);
            let expert = |slot: &u32| self.route.expert_in(*slot) as usize;
            let real = || choices.iter().map(expert).zip(d_gates).filter(|(e, _)| *e < experts);
            let total: f64 = real().map(|(e, _)| scores[e]).sum();
            let mean = real().map(|(e, d)| d.to_f64() * scores[e]).sum::<f64>() / total;
            let mut d_scores = vec![0.0; experts];
            for (e, d) in real() {
                let d = d.to_f64();
                d_scores[e] = gate.scale * if gate.normalise { (d - mean) / total } else { d };
            }
            let pull: f64 = scores.iter().zip(&d_scores).map(|(s, d)| s * d).sum();
            for ((out, s), d) in d_logits.iter_mut().zip(&scores).zip(&d_scores) {
                *out = T::from_f64(match gate.score {
                    Score::Softmax => s * (d - pull),
                    Score::Sigmoid => s * (1.0 - s) * d,
                });
            }
        }
    }

    /// Where the rows of `to` come from in `from`: pairs of places, those of one row of `to` in the order of `from`.
    fn pairs(&self, from: Layout, to: Layout) -> Vec<(usize, usize, RowId)> {
        let (sources, targets) = (self.rows(from), self.rows(to));
        let exact = from.by_choice() && to.by_choice();
        let name = |row: RowId| if exact { row } else { row.whole() };
        let mut known: FxHashMap<RowId, Vec<usize>> = FxHashMap::default();
        sources.iter().enumerate().for_each(|(i, &row)| known.entry(name(row)).or_default().push(i));
        let of = |(j, &row): (usize, &RowId)| {
            let found = known.get(&name(row)).into_iter().flatten();
            let finer = |i: usize| if row.choice == crate::plan::rows::WHOLE { sources[i] } else { row };
            found.map(move |&i| (i, j, finer(i))).collect::<Vec<_>>()
        };
        targets.iter().enumerate().flat_map(of).collect()
    }

    fn move_rows<T: Scalar>(&self, from: Layout, to: Layout, cols: usize, x: &[T], y: &mut [T]) {
        self.clear(to, cols, y);
        for (i, j, _) in self.pairs(from, to) {
            y[j * cols..][..cols].iter_mut().zip(&x[i * cols..][..cols]).for_each(|(y, &x)| *y += x);
        }
    }

    /// One number for each choice: a row of a token has them all beside each other.
    fn move_choices<T: Scalar>(&self, from: Layout, to: Layout, width: [usize; 2], x: &[T], y: &mut [T]) {
        self.clear(to, width[1], y);
        let place = |width: usize, row: usize, id: RowId| row * width + if width > 1 { id.choice as usize } else { 0 };
        for (i, j, id) in self.pairs(from, to) {
            y[place(width[1], j, id)] += x[place(width[0], i, id)];
        }
    }

    /// Zeros where rows will be added up. A token that nobody computes anything for keeps them.
    fn clear<T: Scalar>(&self, layout: Layout, width: usize, y: &mut [T]) {
        let rows = if layout == Layout::Tokens { y.len() } else { self.rows(layout).len() * width };
        y[..rows].fill(T::zero());
    }

    /// The product of each expert of `count` slots of the rank, from slot `from` on.
    fn matmul<T: Scalar>(
        &self,
        pass: Pass,
        [from, count]: [u64; 2],
        [n, k]: [u64; 2],
        fp8: bool,
        reads: &[Option<&[T]>],
        out: &mut [T],
    ) {
        let product = if fp8 { gemm::matmul_fp8 } else { gemm::matmul };
        let (n, k, from) = (n as usize, k as usize, from as usize);
        let all = self.route.rows_by_local_expert(self.place);
        let mut first = all[..from].iter().sum::<f64>() as usize;
        for (slot, rows) in all[from..from + count as usize].iter().enumerate() {
            let (m, weight) = (*rows as usize, slot * n * k..(slot + 1) * n * k);
            let part =
                |i: usize, cols: usize| &reads[i].expect("rows are read alone")[first * cols..(first + m) * cols];
            let whole = |i: usize| &reads[i].expect("weights are read alone")[weight.clone()];
            match pass {
                _ if m == 0 => {}
                Pass::Forward => {
                    product(
                        [m, n, k],
                        [false, true],
                        false,
                        part(0, k),
                        whole(1),
                        &mut out[first * n..(first + m) * n],
                    );
                }
                Pass::Dx => {
                    product(
                        [m, k, n],
                        [false, false],
                        false,
                        part(0, n),
                        whole(1),
                        &mut out[first * k..(first + m) * k],
                    );
                }
                Pass::Dw => product([n, k, m], [true, false], true, part(0, n), part(1, k), &mut out[weight]),
            }
            first += m;
        }
    }

    fn swiglu<T: Scalar>(&self, cols: usize, [gate_up, gates]: [&[T]; 2], y: &mut [T]) {
        let rows = self.rows(Layout::Experts).len();
        let y = &mut y[..rows * cols];
        pointwise::swiglu(cols, &gate_up[..2 * rows * cols], y);
        for (y, &gate) in y.chunks_mut(cols.max(1)).zip(gates) {
            y.iter_mut().for_each(|y| *y *= gate);
        }
    }

    fn swiglu_bwd<T: Scalar>(
        &self,
        cols: usize,
        [gate_up, gates, dy]: [&[T]; 3],
        d_gate_up: &mut [T],
        d_gates: &mut [T],
    ) {
        let rows = self.rows(Layout::Experts).len();
        let mut act = vec![T::zero(); cols];
        let mut d_act = vec![T::zero(); cols];
        for row in 0..rows {
            let (x, dy) = (&gate_up[2 * row * cols..][..2 * cols], &dy[row * cols..][..cols]);
            pointwise::swiglu(cols, x, &mut act);
            d_gates[row] = act.iter().zip(dy).map(|(&a, &d)| a * d).sum();
            d_act.iter_mut().zip(dy).for_each(|(a, &d)| *a = d * gates[row]);
            pointwise::swiglu_bwd(cols, x, &d_act, &mut d_gate_up[2 * row * cols..][..2 * cols]);
        }
    }

    fn relu2<T: Scalar>(&self, cols: usize, [up, gates]: [&[T]; 2], y: &mut [T]) {
        let rows = self.rows(Layout::Experts).len();
        let y = &mut y[..rows * cols];
        pointwise::relu2(&up[..rows * cols], y);
        for (y, &gate) in y.chunks_mut(cols.max(1)).zip(gates) {
            y.iter_mut().for_each(|y| *y *= gate);
        }
    }

    fn relu2_bwd<T: Scalar>(&self, cols: usize, [up, gates, dy]: [&[T]; 3], d_up: &mut [T], d_gates: &mut [T]) {
        let rows = self.rows(Layout::Experts).len();
        let mut act = vec![T::zero(); cols];
        for row in 0..rows {
            let at = row * cols..(row + 1) * cols;
            pointwise::relu2(&up[at.clone()], &mut act);
            d_gates[row] = act.iter().zip(&dy[at.clone()]).map(|(&a, &d)| a * d).sum();
            act.iter_mut().zip(&dy[at.clone()]).for_each(|(a, &d)| *a = d * gates[row]);
            pointwise::relu2_bwd(&up[at.clone()], &act, &mut d_up[at]);
        }
    }
}

fn scores<T: Scalar>(score: Score, logits: &[T]) -> Vec<f64> {
    let logits: Vec<f64> = logits.iter().map(|x| x.to_f64()).collect();
    match score {
        Score::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        Score::Softmax => {
            let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let exps: Vec<f64> = logits.iter().map(|x| (x - top).exp()).collect();
            let sum: f64 = exps.iter().sum();
            exps.iter().map(|x| x / sum).collect()
        }
    }
}
