//! The kernels of a mixture-of-experts layer. Which rows go where is worked out here, as lists that the kernels read.

use super::super::source;
use super::{Action, Arg, Factors, Gemm, Launch, Lowered, Lowering, MOST_BLOCKS, Part, THREADS, Where, ints, table};
use crate::error::{Error, Result};
use crate::plan::expert::{ExpertKernel, ExpertOp, Pass, Values};
use crate::plan::kernel::FP8_BLOCK;
use crate::plan::rows::{Layout, RowId, WHOLE, place_of};
use crate::plan::{Dtype, Route};
use crate::spec::{Gate, Score};
use rustc_hash::FxHashMap;

/// A run of elements out of an operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Term {
    pub read: usize,
    /// The element that the run begins at.
    pub from: u64,
}

/// A run of elements that is the sum of others, or zeros; added up in f32, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sum {
    /// The element that the run begins at.
    pub to: u64,
    pub terms: Vec<Term>,
}

/// What a macro calls a dtype, where codes are numbers too.
fn word(dtype: Dtype) -> Result<String> {
    match dtype {
        Dtype::Bf16 => Ok("bf16".into()),
        Dtype::F32 => Ok("float".into()),
        Dtype::U8 => Ok("u8".into()),
        other => Err(Error::device("rows", format!("rows are {other:?}; no CUDA kernel takes that"))),
    }
}

/// Launches sums of runs of `len` elements into operand `write`.
pub fn sums(lowered: &mut Lowered, all: &[Sum], [len, write]: [u64; 2], [from, to]: [Dtype; 2]) -> Result<()> {
    if all.is_empty() {
        return Ok(());
    }
    // Operands by their places among those that are named: addresses are known only later.
    let reads: Vec<usize> = {
        let mut reads: Vec<usize> = all.iter().flat_map(|s| &s.terms).map(|t| t.read).collect();
        reads.sort_unstable();
        reads.dedup();
        reads
    };
    if reads.len() > MOST_OPERANDS {
        let why = format!("rows come from {} ranks; a launch takes those of {MOST_OPERANDS}", reads.len());
        return Err(Error::device("exchange", why));
    }
    let at = |read: usize| reads.iter().position(|r| *r == read).expect("listed above") as i64;
    let (mut first, mut terms, mut places) = (vec![0i64], vec![], vec![]);
    for sum in all {
        terms.extend(sum.terms.iter().flat_map(|t| [at(t.read), t.from as i64]));
        first.push(terms.len() as i64 / 2);
        places.push(sum.to as i64);
    }
    let mut args: Vec<Arg> = reads.iter().map(|&r| Arg::Read(r)).collect();
    args.resize(MOST_OPERANDS, Arg::Null);
    args.extend([Arg::Write(write as usize), table(&first), table(&terms), table(&places)]);
    args.extend(ints(&[all.len() as u64, len]));
    let defines = vec![("R0".into(), word(from)?), ("W0".into(), word(to)?)];
    let blocks = (all.len() as u64 * len).div_ceil(8 * u64::from(THREADS)).clamp(1, MOST_BLOCKS) as u32;
    let (source, grid) = (source::expert, [blocks, 1, 1]);
    let launch = Launch { source, kernel: "sum_rows", defines, grid, threads: THREADS, shared: 0, args };
    lowered.actions.push(Action::Launch(launch));
    Ok(())
}

/// The most members of a group whose memories one launch reads.
const MOST_OPERANDS: usize = 16;

/// A rank's part of a route.
struct Here<'a> {
    route: &'a Route,
    place: u32,
}

impl Here<'_> {
    fn count(&self, layout: Layout) -> u64 {
        layout.list(self.route, self.place).len() as u64
    }

    /// The rows of `from` that each row of `to` is made of, in the order of `from`, each with the choice that it is
    /// about.
    fn pairs(&self, from: Layout, to: Layout) -> Vec<Vec<(u64, RowId)>> {
        let [sources, targets] = [from, to].map(|layout| layout.list(self.route, self.place));
        let exact = from.by_choice() && to.by_choice();
        let name = |row: RowId| if exact { row } else { row.whole() };
        let mut known: FxHashMap<RowId, Vec<usize>> = FxHashMap::default();
        sources.iter().enumerate().for_each(|(i, &row)| known.entry(name(row)).or_default().push(i));
        let finer = |row: RowId, i: usize| if row.choice == WHOLE { sources[i] } else { row };
        let of = |row: RowId| {
            let found = known.get(&name(row)).into_iter().flatten();
            found.map(|&i| (i as u64, finer(row, i))).collect()
        };
        targets.iter().map(|&row| of(row)).collect()
    }
}

impl Lowering<'_> {
    pub(super) fn expert(&mut self, kernel: &ExpertKernel, on: Where) -> Result<()> {
        let route = on.route.ok_or_else(|| self.refuse("its route is not given"))?;
        if !route.is_listed() {
            return Err(self.refuse("its route is balanced and lists no rows; give --routing uniform"));
        }
        let here = Here { route, place: place_of(on.views, on.rank) };
        match kernel.op {
            ExpertOp::Router { rows, experts, topk, gate } => self.router(&here, [rows, experts, topk], gate, false),
            ExpertOp::RouterBwd { rows, experts, topk, gate } => self.router(&here, [rows, experts, topk], gate, true),
            ExpertOp::Rows { from, to, rows, values, .. } => self.rows(&here, [from, to], rows[1], values),
            ExpertOp::Masked { .. } => {
                Err(self.refuse("no kernel here multiplies rows by masks; leave the option mask-rows out"))
            }
            ExpertOp::Quantise { layout, cols, .. } => self.quantise(here.count(layout), cols),
            ExpertOp::MatMul { pass, slots, first, n, k, fp8, .. } => {
                self.grouped(&here, pass, [first, slots], [n, k], fp8)
            }
            ExpertOp::SwiGlu { cols, .. } => self.act(&here, "expert_swiglu", cols),
            ExpertOp::SwiGluBwd { cols, .. } => self.act_bwd(&here, "expert_swiglu_bwd", cols),
            ExpertOp::Relu2 { cols, .. } => self.act(&here, "expert_relu2", cols),
            ExpertOp::Relu2Bwd { cols, .. } => self.act_bwd(&here, "expert_relu2_bwd", cols),
        }
    }

    fn act(&mut self, here: &Here, name: &'static str, cols: u64) -> Result<()> {
        let rows = here.count(Layout::Experts);
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)];
        args.extend(ints(&[rows, cols]));
        let defines = self.typed(&[0, 1], &[0])?;
        self.spread((source::expert, name), defines, (rows * cols).div_ceil(8), args);
        Ok(())
    }

    /// The gradient of experts' activation: a warp for each row.
    fn act_bwd(&mut self, here: &Here, name: &'static str, cols: u64) -> Result<()> {
        let rows = here.count(Layout::Experts);
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Read(2), Arg::Write(0), Arg::Write(1)];
        args.extend(ints(&[rows, cols]));
        let defines = self.typed(&[0, 1, 2], &[0, 1])?;
        self.spread((source::expert, name), defines, rows * 32, args);
        Ok(())
    }

    /// A router's pass: a warp for each token, whose choices stand in the route.
    fn router(&mut self, here: &Here, [rows, experts, topk]: [u64; 3], gate: Gate, backward: bool) -> Result<()> {
        let slots = here.route.choices(here.place).unwrap_or_default();
        let choices: Vec<u32> = slots.iter().map(|slot| here.route.expert_in(*slot)).collect();
        let tokens = choices.len() as u64 / topk;
        let (name, mut args, defines) = if backward {
            ("router_bwd", vec![Arg::Read(0), Arg::Read(1), Arg::Write(0)], self.typed(&[0, 1], &[0])?)
        } else {
            ("router", vec![Arg::Read(0), Arg::Write(0)], self.typed(&[0], &[0])?)
        };
        args.push(table(&choices));
        let sigmoid = u64::from(gate.score == Score::Sigmoid);
        args.extend(ints(&[rows, tokens, experts, topk, sigmoid, u64::from(gate.normalise)]));
        args.push(Arg::Real(gate.scale));
        self.spread((source::expert, name), defines, rows * 32, args);
        Ok(())
    }

    fn rows(&mut self, here: &Here, [from, to]: [Layout; 2], capacity: u64, values: Values) -> Result<()> {
        let pairs = here.pairs(from, to);
        // A token that nobody computes anything for gets zeros.
        let count = if to == Layout::Tokens { capacity as usize } else { pairs.len() };
        let of = |i: usize| pairs.get(i).map_or(&[][..], |p| &p[..]);
        match values {
            Values::Row { cols } => {
                let term = |(row, _): &(u64, RowId)| Term { read: 0, from: row * cols };
                let all: Vec<Sum> =
                    (0..count).map(|i| Sum { to: i as u64 * cols, terms: of(i).iter().map(term).collect() }).collect();
                sums(&mut self.lowered, &all, [cols, 0], [self.reads[0], self.writes[0]])
            }
            Values::Choice { topk } => {
                let width = |layout: Layout| if layout.by_choice() { 1 } else { topk };
                let place = |width: u64, row: u64, id: &RowId| {
                    if width == 1 { row } else { row * width + u64::from(id.choice) }
                };
                let (a, z) = (width(from), width(to));
                let mut all: Vec<Sum> = (0..count as u64 * z).map(|to| Sum { to, terms: vec![] }).collect();
                for (i, terms) in pairs.iter().enumerate() {
                    for (row, id) in terms {
                        let term = Term { read: 0, from: place(a, *row, id) };
                        all[place(z, i as u64, id) as usize].terms.push(term);
                    }
                }
                sums(&mut self.lowered, &all, [1, 0], [self.reads[0], self.writes[0]])
            }
            Values::Scaled { cols } => {
                let (mut first, mut terms) = (vec![0i64], vec![]);
                for i in 0..count {
                    terms.extend(of(i).iter().map(|(row, _)| *row as i64));
                    first.push(terms.len() as i64);
                }
                self.scaled_rows([count as u64, cols], [table(&first), table(&terms)])
            }
        }
    }

    /// Sums of rows of codes: those of `terms`, from `first` of one row on to that of the next.
    fn scaled_rows(&mut self, [rows, cols]: [u64; 2], [first, terms]: [Arg; 2]) -> Result<()> {
        self.must_be("codes", self.reads[0], Dtype::U8)?;
        self.must_be("scales", self.reads[1], Dtype::F32)?;
        let mut args = vec![Arg::Read(0), Arg::Read(1), Arg::Write(0), first, terms];
        args.extend(ints(&[rows, cols]));
        let defines = vec![("W0".into(), word(self.writes[0])?)];
        self.spread((source::expert, "sum_scaled_rows"), defines, rows * cols, args);
        Ok(())
    }

    /// Rows of codes as the numbers that they stand for: sums of one row each.
    pub(super) fn dequantise(&mut self, rows: u64, cols: u64) -> Result<()> {
        let each: Vec<i64> = (0..=rows as i64).collect();
        self.scaled_rows([rows, cols], [table(&each), table(&each)])
    }

    /// Rounds rows to codes: a warp for each block of 128.
    pub(super) fn quantise(&mut self, rows: u64, cols: u64) -> Result<()> {
        self.must_be("codes", self.writes[0], Dtype::U8)?;
        self.must_be("scales", self.writes[1], Dtype::F32)?;
        let mut args = vec![Arg::Read(0), Arg::Write(0), Arg::Write(1)];
        args.extend(ints(&[rows, cols]));
        let defines = self.typed(&[0], &[])?;
        self.spread((source::expert, "quantise"), defines, rows * cols.div_ceil(FP8_BLOCK) * 32, args);
        Ok(())
    }

    /// A product for each expert that has rows, of `count` slots of the rank from the one at `from` on.
    fn grouped(&mut self, here: &Here, pass: Pass, [from, count]: [u64; 2], [n, k]: [u64; 2], fp8: bool) -> Result<()> {
        if fp8 {
            let why =
                "products of experts do not run in FP8 on CUDA: rows of an expert are no multiple of 16; leave fp8 out";
            return Err(self.refuse(why));
        }
        let size = |dtype: Dtype| dtype.size();
        let [x, w] = [self.reads[0], self.reads[1]];
        let all = here.route.rows_by_local_expert(here.place);
        let mut first = all[..from as usize].iter().sum::<f64>() as u64;
        for (slot, rows) in all[from as usize..(from + count) as usize].iter().enumerate() {
            let (m, weight) = (*rows as u64, slot as u64 * n * k);
            let part = |of: Arg, skip: u64| Part { of, skip };
            let y = self.writes[0];
            let (shape, transposed, a, b, c) = match pass {
                Pass::Forward => (
                    [m, n, k],
                    [false, true],
                    part(Arg::Read(0), first * k * size(x)),
                    part(Arg::Read(1), weight * size(w)),
                    part(Arg::Write(0), first * n * size(y)),
                ),
                Pass::Dx => (
                    [m, k, n],
                    [false, false],
                    part(Arg::Read(0), first * n * size(x)),
                    part(Arg::Read(1), weight * size(w)),
                    part(Arg::Write(0), first * k * size(y)),
                ),
                Pass::Dw => (
                    [n, k, m],
                    [true, false],
                    part(Arg::Read(0), first * n * size(x)),
                    part(Arg::Read(1), first * k * size(w)),
                    part(Arg::Write(0), weight * size(y)),
                ),
            };
            if m > 0 {
                let accumulate = pass == Pass::Dw;
                let gemm = Gemm { count: 1, shape, transposed, accumulate, bias: false, dtypes: [x, w, y] };
                self.lowered.actions.push(Action::Gemm {
                    gemm,
                    factors: Factors::ONE,
                    a,
                    b,
                    c,
                    bias: None,
                    scales: None,
                });
            }
            first += m;
        }
        Ok(())
    }
}
