//! One machine, one model, and the points that are tried on them.

use super::frames::Frames;
use super::point::Point;
use crate::cluster::Cluster;
use crate::collective::exchange::{Aside, aside_of_plan};
use crate::cost::{Effort, Machine, cost};
use crate::device::{KernelTime, Profile, Roofline};
use crate::error::{Error, Reason, Result};
use crate::plan::link::AtomTable;
use crate::plan::memory::{Bounds, Conflicts, Footprint, Layout, with_kept};
use crate::plan::route::dropped;
use crate::plan::structure::structure;
use crate::plan::{Plan, Route};
use crate::report::{Costed, Place, Row};
use crate::spec::{
    Architecture, Capacity, ClusterSpec, Documents, Dtype, GpuSpec, LlmSpec, Mixer, Parallelism, StackSpec, Workload,
};
use crate::strategy::expert::Routing;
use crate::strategy::{Engines, build_by_layer, build_routed, guard};
use crate::timeline::Timeline;
use crate::units::FlopsPerSec;
use rustc_hash::FxHashMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

/// The structure of a plan, and one of its programs.
type Structure = ((u64, u64), u32);

/// What all points of a study share.
pub struct Case {
    pub model: LlmSpec,
    pub cluster: Cluster,
    pub stack: StackSpec,
    pub dtype: Dtype,
    /// Packed into every sequence, again and again until it is full.
    pub documents: Documents,
    /// Measured kernel times; none: those of the roofline.
    pub profile: Option<Profile>,
    /// How tokens choose experts, where the model has any.
    pub routing: Routing,
    /// Memory of a GPU that is to be left free, bytes.
    headroom: f64,
    roofline: Roofline,
    peak: FlopsPerSec,
    /// By structure and program: plans that differ in sizes only share it.
    conflicts: Mutex<Kept>,
}

/// Conflicts that are kept take no more bytes: a grid may have any number of ways, and those of a pipeline's stage may
/// take a hundred megabytes.
const MOST_BYTES: usize = 128 << 20;

#[derive(Default)]
struct Kept {
    of: FxHashMap<Structure, Arc<Conflicts>>,
    bytes: usize,
}

impl Kept {
    fn insert(&mut self, structure: Structure, found: &Arc<Conflicts>) {
        if self.bytes + found.bytes() > MOST_BYTES {
            *self = Kept::default();
        }
        if self.of.insert(structure, found.clone()).is_none() {
            self.bytes += found.bytes();
        }
    }
}

/// The dtype a GPU trains in where nothing is asked for: bf16 if it can.
pub fn default_dtype(gpu: &GpuSpec) -> Dtype {
    if gpu.peak.contains_key("bf16") { Dtype::Bf16 } else { Dtype::F32 }
}

/// The model without what no plan has, which a note says.
fn planned(model: LlmSpec) -> LlmSpec {
    if !model.lfa {
        return model;
    }
    let mut left = LlmSpec { lfa: false, ..model.clone() };
    let share = 1.0 - left.flops_per_token(1) / model.flops_per_token(1);
    left.notes.push(format!(
        "localized filtering before queries and keys is left out of times, memory and MFU ({:.0} % of the FLOPs of products)",
        100.0 * share
    ));
    left
}

impl Case {
    /// `cluster`, `stack` are names or paths, as [`spec::find`](crate::spec::find) takes them.
    pub fn new(model: LlmSpec, cluster: &str, stack: &str, gpus: u32, dtype: Option<Dtype>) -> Result<Case> {
        let model = planned(model);
        let spec = ClusterSpec::find(cluster)?;
        let gpu = GpuSpec::find(&spec.gpu)?;
        let cluster = Cluster::new(&spec, &gpu, gpus)?;
        // The CPU's kernels are this program's own, and fused.
        let own = gpu.architecture == Architecture::Cpu;
        let stack = StackSpec::find_for(stack, &gpu)?;
        let stack = if own { stack } else { stack.for_model(&model) };
        let roofline = Roofline::new(&gpu, &stack)?;
        let dtype = dtype.unwrap_or_else(|| default_dtype(&gpu));
        let peak = roofline.peak(dtype)?;
        // Gradients and sums are wider than bf16.
        if dtype == Dtype::Bf16 {
            roofline.peak(Dtype::F32)?;
        }
        Ok(Case {
            model,
            cluster,
            stack,
            dtype,
            documents: Documents::default(),
            profile: None,
            routing: Routing::default(),
            headroom: 0.0,
            roofline,
            peak,
            conflicts: Mutex::default(),
        })
    }

    pub fn machine(&self) -> Machine<'_> {
        let roofline: &dyn KernelTime = &self.roofline;
        let kernels = self.profile.as_ref().map_or(roofline, |profile| profile);
        Machine { cluster: &self.cluster, stack: &self.stack, kernels, devices: None }
    }

    pub fn plan(&self, point: &Point) -> Result<Plan> {
        let work = self.workload(point)?;
        let route = self.route(&work, &point.par)?;
        let plan = build_routed(&self.model, &work, &point.par, Engines::of(&self.stack, &self.cluster.spec), route)?;
        guard::after(&plan)?;
        self.aside(&plan)?;
        Ok(plan)
    }

    /// The plan of a point whose rows go ways of their own in every layer, see [`build_by_layer`].
    pub fn plan_by_layer(&self, point: &Point, routes: Vec<Route>) -> Result<Plan> {
        let work = self.workload(point)?;
        let plan =
            build_by_layer(&self.model, &work, &point.par, Engines::of(&self.stack, &self.cluster.spec), routes)?;
        guard::after(&plan)?;
        self.aside(&plan)?;
        Ok(plan)
    }

    /// Where rows of experts go; none where there are no experts.
    fn route(&self, work: &Workload, par: &Parallelism) -> Result<Option<Route>> {
        self.routing.route(&self.model, work, par, self.cluster.together(par.ep))
    }

    /// That a router's log is shorter than the tokens of a point's ranks, and what becomes of it.
    pub fn repeated(&self, point: &Point) -> Option<String> {
        self.routing.repeats(&self.model, &self.workload(point).ok()?, &point.par)
    }

    /// Share of the choices of experts that lead nowhere at a point.
    pub fn dropped(&self, point: &Point) -> f64 {
        let gaps = matches!(&self.routing, Routing::Traced { routing, .. } if routing.may_leave_gaps());
        if point.par.options.capacity == Capacity::Unlimited && !gaps {
            return 0.0;
        }
        let route = self.workload(point).and_then(|work| self.route(&work, &point.par));
        // What has no plan says why elsewhere.
        route.ok().flatten().map_or(0.0, |route| route.dropped())
    }

    /// Whether GPU and stack have what the options ask for.
    pub fn can_run(&self, par: &Parallelism) -> Result<()> {
        self.roofline.runs(par.options, self.dtype, self.model.qk_dim())
    }

    /// What a point is to train on, or why it has no plan as far as can be told before it is built.
    pub fn workload(&self, point: &Point) -> Result<Workload> {
        point.check(self.cluster.gpus())?;
        let Point { seq_len, global_batch, micro_batch, par } = *point;
        let work = Workload {
            seq_len,
            global_batch,
            micro_batch,
            dtype: self.dtype,
            documents: self.documents.filling(seq_len),
        };
        self.can_run(&par)?;
        guard::before(&self.model, &work, &par)?;
        Ok(work)
    }

    pub fn peak(&self) -> FlopsPerSec {
        self.peak
    }

    /// The same with a part of a GPU's memory left free.
    pub fn leaving(self, part: f64) -> Case {
        Case { headroom: self.cluster.gpu.memory.value.value() * part, ..self }
    }

    /// Memory of a GPU beside what the stack sets aside and what is left free, bytes.
    pub(super) fn room(&self) -> f64 {
        self.cluster.gpu.memory.value.value() - self.stack.reserved_memory.value.value() - self.headroom
    }

    /// The fullest rank's memory.
    pub fn layout(&self, plan: &Plan) -> Result<Layout> {
        self.fullest(plan, u64::MAX, Layout::of)
    }

    /// The same without saying where everything lies.
    pub fn footprint(&self, plan: &Plan) -> Result<Footprint> {
        self.footprint_within(plan, u64::MAX)
    }

    /// The same, but that of the first program that needs more than `room` bytes, if one does.
    pub fn footprint_within(&self, plan: &Plan, room: u64) -> Result<Footprint> {
        let of = |plan: &Plan, conflicts: &Conflicts| Footprint::of(plan, conflicts).map(Box::new);
        self.fullest(plan, room, of).map(|found| *found)
    }

    /// Of every program what `of` finds of its memory; the fullest of them, or the first that needs more than `room`.
    fn fullest<M: Deref<Target = Footprint>>(
        &self,
        plan: &Plan,
        room: u64,
        of: impl Fn(&Plan, &Conflicts) -> Result<M>,
    ) -> Result<M> {
        let atoms = AtomTable::new(plan)?;
        let structure = structure(plan, &atoms);
        let kept = self.stack.kept.as_ref().map(|kept| with_kept(plan, &kept.value)).transpose()?;
        let sizes = kept.as_ref().unwrap_or(plan);
        let layout = |program| of(sizes, &*self.conflicts(plan, &atoms, structure, program)?);
        let mut fullest = layout(0)?;
        if plan.programs.len() == 1 {
            return Ok(fullest);
        }
        let bounds = Bounds::new(sizes);
        for program in 1..plan.programs.len() as u32 {
            if fullest.bytes > room {
                break;
            }
            // Of a long pipeline few stages come near the fullest.
            if bounds.of(program) <= fullest.bytes {
                continue;
            }
            let other = layout(program)?;
            if other.bytes > fullest.bytes {
                fullest = other;
            }
        }
        Ok(fullest)
    }

    /// Which slots of the first program must not share their bytes.
    pub fn conflicts_of(&self, plan: &Plan, atoms: &AtomTable) -> Result<Arc<Conflicts>> {
        self.conflicts(plan, atoms, structure(plan, atoms), 0)
    }

    fn conflicts(&self, plan: &Plan, atoms: &AtomTable, structure: (u64, u64), program: u32) -> Result<Arc<Conflicts>> {
        let known = || self.conflicts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known().of.get(&(structure, program)) {
            return Ok(found.clone());
        }
        let found = Arc::new(Conflicts::of(plan, atoms, program)?);
        known().insert((structure, program), &found);
        Ok(found)
    }

    pub fn cost(&self, plan: &Plan) -> Result<Timeline> {
        cost(plan, self.machine(), Effort::SUMS)
    }

    /// The same machine and a model of the same layers, but only so many of them, all with the window or without it as
    /// most of the model's are; of a hybrid those with attention, or others where it has none.
    pub fn with_layers(&self, layers: u64) -> Case {
        let (all, near) = (&self.model.windowed, self.model.windowed.iter().filter(|near| **near).count());
        let window = self.model.window.filter(|_| all.is_empty() || 2 * near > all.len());
        let pattern = &self.model.pattern;
        let kind = pattern.iter().find(|mixer| **mixer == Mixer::Attention).or(pattern.first()).copied();
        let pattern = kind.map_or(vec![], |kind| vec![kind; layers as usize]);
        let has = |mixer| kind.is_none_or(|kind| kind == mixer);
        let (mamba, moe) =
            (self.model.mamba.filter(|_| has(Mixer::Mamba)), self.model.moe.filter(|_| has(Mixer::Experts)));
        let dense_at = self.model.dense_at.iter().copied().filter(|layer| *layer < layers).collect();
        let mtp = self.model.mtp.clone().filter(|_| kind.is_none());
        self.with_model(LlmSpec {
            layers,
            window,
            windowed: vec![],
            pattern,
            dense_at,
            mamba,
            moe,
            mtp,
            ..self.model.clone()
        })
    }

    /// The same machine, and another model.
    pub fn with_model(&self, model: LlmSpec) -> Case {
        Case {
            model,
            cluster: self.cluster.clone(),
            stack: self.stack.clone(),
            dtype: self.dtype,
            documents: self.documents.clone(),
            profile: self.profile.clone(),
            routing: self.routing.clone(),
            headroom: self.headroom,
            roofline: self.roofline.clone(),
            peak: self.peak,
            conflicts: Mutex::default(),
        }
    }

    /// The same machine with another stack.
    pub fn with_stack(&self, stack: StackSpec) -> Result<Case> {
        let roofline = Roofline::new(&self.cluster.gpu, &stack)?;
        Ok(Case { stack, roofline, ..self.with_model(self.model.clone()) })
    }

    /// What a library that carries rows sets aside on every rank, or why it would not.
    pub fn aside(&self, plan: &Plan) -> Result<Aside> {
        aside_of_plan(plan, &self.cluster)
    }

    /// Where a plan needs memory.
    pub fn place<'a>(&'a self, aside: &'a Result<Aside>) -> Place<'a> {
        Place { aside, cluster: &self.cluster, stack: &self.stack, headroom: self.headroom }
    }

    pub fn costed<'a>(&'a self, plan: &'a Plan, layout: &'a Layout, timeline: &'a Timeline) -> Costed<'a> {
        Costed {
            plan,
            cluster: &self.cluster,
            stack: &self.stack,
            layout,
            aside: self.aside(plan),
            timeline,
            peak: self.peak,
        }
    }

    /// The row of a point. Only what is wrong with the machine or the program is an error.
    pub fn row(&self, point: &Point) -> Result<Row> {
        Frames::new(self).row(point)
    }

    /// The row of a plan; no times where memory does not suffice.
    pub fn row_of(&self, plan: &Plan) -> Result<Row> {
        let mut row = self.memory_of(plan, u64::MAX)?;
        if row.feasible {
            row.set_time(&self.cost(plan)?, plan.about.model_flops, self.peak.value());
            row.set_dropped(dropped(&plan.routes));
        }
        Ok(row)
    }

    /// The same without times: whether it fits, and what fills its memory, as far as [`Case::footprint_within`] goes.
    fn memory_of(&self, plan: &Plan, room: u64) -> Result<Row> {
        let mut row = Row::asked(&plan.about, &self.cluster, &self.stack);
        row.set_layout(&self.footprint_within(plan, room)?, &self.place(&self.aside(plan)));
        Ok(row)
    }

    /// The row of a point without times.
    pub fn laid_out(&self, point: &Point) -> Result<Row> {
        self.laid_out_within(point, u64::MAX)
    }

    /// The same; of a point that does not fit what the first program that needs more than `room` bytes needs, if one does.
    pub(super) fn laid_out_within(&self, point: &Point, room: u64) -> Result<Row> {
        match self.plan(point).and_then(|plan| self.memory_of(&plan, room)) {
            Err(Error::Infeasible(why)) => Ok(self.infeasible(point, why)),
            other => other,
        }
    }

    /// The row of a point that has no plan.
    pub fn infeasible(&self, point: &Point, why: Reason) -> Row {
        Row {
            model: self.model.name.clone(),
            cluster: self.cluster.spec.name.clone(),
            stack: self.stack.name.clone(),
            gpus: self.cluster.gpus(),
            seq_len: point.seq_len,
            global_batch: point.global_batch,
            micro_batch: point.micro_batch,
            why: why.in_a_line(),
            ..Row::default()
        }
        .with_parallelism(&point.par, point.par.strategy(self.model.moe.is_some()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::exchange;
    use crate::error::Cause;
    use crate::plan::{Counts, ExchangeAlgo};
    use crate::spec::{Dispatch, Options, Recompute};

    fn point() -> Point {
        Point {
            seq_len: 8192,
            global_batch: 8,
            micro_batch: 1,
            par: Parallelism { ulysses: 2, ring: 2, dp: 2, zero: 1, ..Parallelism::default() },
        }
    }

    fn case() -> Case {
        Case::new(LlmSpec::find("llama-3-8b").unwrap(), "dgx-h100", "nccl-fa3", 8, None).unwrap()
    }

    /// Groups of 64 over racks of 72: most lie across two, and no library takes them for one node.
    #[test]
    fn experts_over_two_racks_cross_the_network() {
        let step = |gpus: u32, dispatch| {
            let case =
                Case::new(LlmSpec::find("qwen3-30b-a3b").unwrap(), "gb200-nvl72", "nccl-fa4", gpus, None).unwrap();
            let options = Options { dispatch, ..Options::default() };
            let par = Parallelism { dp: gpus, ep: 64, zero: 1, options, ..Parallelism::default() };
            let point = Point { seq_len: 4096, global_batch: u64::from(gpus), micro_batch: 1, par };
            let row = case.row(&point).unwrap();
            (row.step_time_s.unwrap(), row.bytes_scale_out.unwrap())
        };
        for dispatch in [Dispatch::Nccl, Dispatch::HybridEp] {
            let ((whole, inside), (cut, across)) = (step(512, dispatch), step(576, dispatch));
            assert!(cut > 1.3 * whole && across > 1.5 * inside, "{dispatch:?}: {whole} {cut}, {inside} {across}");
        }
    }

    #[test]
    fn parts_add_up_to_the_step_and_the_row_names_its_point() {
        let row = case().row(&point()).unwrap();
        assert!(row.feasible, "{}", row.why);
        let parts = row.compute_s.unwrap() + row.exposed_comm_s.unwrap() + row.bubble_s.unwrap() + row.host_s.unwrap();
        assert!((parts / row.step_time_s.unwrap() - 1.0).abs() < 1e-11, "{row:?}");
        let memory = [
            row.mem_params_bytes,
            row.mem_grads_bytes,
            row.mem_optimizer_bytes,
            row.mem_activations_bytes,
            row.mem_workspace_bytes,
            row.mem_comm_bytes,
            row.mem_gaps_bytes,
        ];
        assert!(memory.iter().all(Option::is_some) && row.mem_room_bytes > row.peak_mem_bytes);
        assert_eq!(memory.iter().flatten().sum::<u64>(), row.peak_mem_bytes.unwrap());
        assert_eq!(Point::of_row(&row), point());
        let blank = case().infeasible(&point(), Reason::default());
        let same = |r: &Row| (r.strategy.clone(), r.model.clone(), r.recompute.clone(), r.gpus, r.cluster.clone());
        assert_eq!(same(&blank), same(&row));
    }

    #[test]
    fn lengths_share_conflicts_and_nothing_else() {
        let case = case();
        for (seq_len, global_batch) in [(8192, 8), (4096, 16), (32768, 2), (65536, 64)] {
            for recompute in [Recompute::None, Recompute::Full] {
                let point = Point { seq_len, global_batch, par: Parallelism { recompute, ..point().par }, ..point() };
                let plan = case.plan(&point).unwrap();
                let (fresh, shared) =
                    (Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap(), case.layout(&plan).unwrap());
                assert_eq!((shared.bytes, shared.gaps), (fresh.bytes, fresh.gaps));
            }
        }
        // Once each: with one microbatch or more, with recomputation or without.
        assert_eq!(case.conflicts.lock().unwrap().of.len(), 4);
    }

    #[test]
    fn where_rows_are_cut_does_not_matter_to_conflicts() {
        let case = case();
        let plain = Parallelism { dp: 8, ..Parallelism::default() };
        // Weights are cut elsewhere, and keys and values of as many steps.
        for (tp, ring, options) in [(2, 1, "default"), (1, 4, "dkv-model")] {
            let before = case.conflicts.lock().unwrap().of.len();
            for n in [1, 2] {
                let tp = if tp > 1 { tp * n } else { tp };
                let par = Parallelism { dp: 8 / (tp * ring), tp, ring, options: options.parse().unwrap(), ..plain };
                let (seq_len, global_batch) = (4096 * u64::from(n), 4 * u64::from(par.dp));
                let plan = case.plan(&Point { seq_len, global_batch, par, ..point() }).unwrap();
                let (fresh, shared) =
                    (Layout::new(&plan, &AtomTable::new(&plan).unwrap(), 0).unwrap(), case.layout(&plan).unwrap());
                assert_eq!(fresh.footprint, shared.footprint, "{par:?}");
            }
            assert_eq!(case.conflicts.lock().unwrap().of.len(), before + 1, "{options}");
        }
    }

    #[test]
    fn conflicts_that_are_kept_have_a_bound() {
        let case = case();
        let plan = case.plan(&point()).unwrap();
        let found = case.conflicts_of(&plan, &AtomTable::new(&plan).unwrap()).unwrap();
        let mut kept = Kept::default();
        for n in 0..=(MOST_BYTES / found.bytes()) as u64 {
            kept.insert(((n, n), 0), &found);
            assert!(kept.bytes <= MOST_BYTES && kept.bytes == kept.of.len() * found.bytes());
        }
        // The last did not fit beside the others, which are forgotten.
        assert_eq!(kept.of.len(), 1);
    }

    /// A mixture whose experts stand on `ep` of `gpus`, its rows carried by `words`.
    fn mixture(model: &str, cluster: &str, gpus: u32, ep: u32, words: &str) -> (Case, Point) {
        let stack = if cluster == "dgx-a100" { "nccl-fa2" } else { "nccl-fa3" };
        let case = Case::new(LlmSpec::find(model).unwrap(), cluster, stack, gpus, None).unwrap();
        let options = words.parse().unwrap();
        let par = Parallelism { dp: gpus, ep, zero: 1, recompute: Recompute::Full, options, ..Parallelism::default() };
        (case, Point { seq_len: 32768, global_batch: u64::from(gpus), micro_batch: 1, par })
    }

    /// The same buffers that `dispatch` has, beside the plan's tensors.
    #[test]
    fn what_a_library_sets_aside_is_memory_of_a_rank() {
        let (case, point) = mixture("qwen3-30b-a3b", "dgx-h100", 64, 32, "dispatch-deepep-v1-ll");
        let row = case.row(&point).unwrap();
        let part = "plan + 65.0 GiB buffers of DeepEP low latency + 4.0 GiB reserved) of 79.6 GiB";
        assert!(!row.feasible && row.why.to_string().contains(part), "{}", row.why);
        let plan = case.plan(&point).unwrap();
        let aside = case.aside(&plan).unwrap().buffers.total();
        let route = Route::new([32, 8], 128, 8, Counts::Balanced { tokens: 32768 }).unwrap();
        let algo = ExchangeAlgo::DeepepLowLatency { hook: false, slots: 32768 };
        assert_eq!(aside, exchange::buffers(&route, algo, 2048, 4096).unwrap().total());
        let reserved = case.stack.reserved_memory.value.value() as u64;
        assert_eq!(row.mem_room_bytes.unwrap() + aside + reserved, case.cluster.gpu.memory.value.value() as u64);
        let short = case.row(&Point { seq_len: 1024, ..point }).unwrap();
        assert!(short.feasible && short.peak_mem_bytes < short.mem_room_bytes, "{}", short.why);
        // Tensors of the plan are all that NCCL has.
        let options = Options::default();
        let plain = case.row(&Point { par: Parallelism { options, ..point.par }, ..point }).unwrap();
        assert_eq!(plain.mem_room_bytes.unwrap() + reserved, case.cluster.gpu.memory.value.value() as u64);
    }

    /// Experts that have no room for a row do not work on it, and a model is not credited with what they do not do.
    #[test]
    fn what_experts_drop_is_none_of_the_models_work() {
        let (mut case, point) = mixture("qwen3-30b-a3b", "dgx-h100", 64, 32, "default");
        case.routing = "zipf:1.0".parse().unwrap();
        let of = |words: &str| {
            let par = Parallelism { recompute: Recompute::None, options: words.parse().unwrap(), ..point.par };
            let point = Point { seq_len: 512, par, ..point };
            (case.row(&point).unwrap(), case.dropped(&point))
        };
        let (whole, none) = of("default");
        let (cut, share) = of("capacity-0.1");
        assert!(none == 0.0 && share > 0.5, "{none} {share}");
        // Four experts of the hot rank are half as many as a token chooses.
        let hot = Case { routing: "hot-rank:1".parse().unwrap(), ..case.with_layers(2) };
        assert_eq!(hot.dropped(&Point { seq_len: 512, ..point }), 0.5);
        // Nothing is computed again: what is executed is all that counts.
        for row in [&whole, &cut] {
            assert!(row.feasible && row.mfu.unwrap() <= 1.001 * row.hfu.unwrap(), "{row:?}");
        }
        let flops = |row: &Row| row.mfu.unwrap() * row.step_time_s.unwrap();
        // A sequence of 512 tokens on each GPU.
        let gone = 512.0 * share * case.model.chosen_flops_per_token() / case.peak().value();
        assert!(((flops(&whole) - flops(&cut)) / gone - 1.0).abs() < 1e-9, "{} {}", flops(&whole), flops(&cut));
        let said = format!("; {} of experts' rows dropped", crate::report::human::percent(share));
        assert!(cut.limit.ends_with(&said) && !whole.limit.contains("dropped"), "{}", cut.limit);
    }

    #[test]
    fn where_a_library_stops_nothing_runs() {
        let why = |model, cluster, gpus, ep, words| {
            let (case, point) = mixture(model, cluster, gpus, ep, words);
            let row = case.row(&Point { seq_len: 4096, ..point }).unwrap();
            assert!(!row.feasible);
            row.why
        };
        let many = why("deepseek-v3", "dgx-h200", 256, 256, "dispatch-deepep-v1-normal");
        assert_eq!(many.cause, Cause::Dispatch);
        assert!(many.to_string().contains("not for 256 on 32 nodes of 8; use deepep-v2, hybrid-ep or nccl"), "{many}");
        let old = why("qwen3-30b-a3b", "dgx-a100", 64, 32, "dispatch-hybrid-ep");
        assert!(
            old.to_string().contains("Hybrid-EP runs on NVIDIA's GPUs from Hopper on, which a100-sxm4-80gb is not"),
            "{old}"
        );
    }

    #[test]
    fn what_this_version_has_not_is_a_row() {
        let par = point().par;
        let with = |par: Parallelism| Point { par, ..point() };
        for (point, part) in [
            (with(Parallelism { ep: 8, ..par }), "llama-3-8b has no experts; use ep 1"),
            (with(Parallelism { dp: 3, ..par }), "dp 3 x ulysses 2 x ring 2 x tp 1 x pp 1 is 12, not gpus 8; use dp 2"),
            (with(Parallelism { ring: 3, ..par }), "gpus 8 is not a multiple of ulysses 2 x ring 3 x tp 1 x pp 1 = 6"),
            (Point { seq_len: 8190, ..point() }, "sequence: "),
            (Point { global_batch: 1 << 32, ..point() }, "microbatches"),
        ] {
            let row = case().row(&point).unwrap();
            assert!(!row.feasible && row.why.to_string().contains(part), "{}", row.why);
        }
    }
}
