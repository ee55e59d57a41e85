//! What flags have chosen, and what whoever reads a figure of it should know.

use super::progress::Clock;
use super::{Answer, WithNotes};
use crate::cluster::Cluster;
use crate::error::{Error, Reason, Result};
use crate::plan::route::dropped;
use crate::plan::{ALIGNMENT, Counts, Plan};
use crate::report::Row;
use crate::report::human::{packed, percent};
use crate::spec::{Dispatch, Parallelism};
use crate::strategy::expert::Routing;
use crate::sweep::{Case, Point, Said};

/// What to compute: a point, and its plan if that came from a file.
pub struct Chosen {
    pub case: Case,
    pub point: Point,
    pub(super) loaded: Option<Plan>,
    /// What was taken where nothing was said.
    pub(super) taken: Option<String>,
    /// What was.
    pub(super) said: Said,
}

/// That ranks which exchange most lie across two nodes, where others lie in one.
pub(super) fn split_by_nodes(cluster: &Cluster, par: &Parallelism) -> Option<String> {
    let groups = [
        ("tp", par.tp),
        ("tp x ulysses x ring", par.tp.saturating_mul(par.ulysses).saturating_mul(par.ring)),
        ("ep", par.ep),
    ];
    let (name, ranks) = groups.into_iter().find(|(_, ranks)| cluster.splits(*ranks))?;
    let used = cluster.per_node();
    let remedy = match cluster.unsplit(ranks) {
        Some(gpus) => format!("with --gpus {gpus}"),
        None => format!("with {name} a divisor of {used}"),
    };
    Some(format!(
        "{name}: of {used} GPUs used of each node some groups of {ranks} ranks lie across two, and all wait for the network between; \
         {remedy} none does"
    ))
}

impl Chosen {
    /// What whoever reads a figure should know: what was taken where nothing was said, what the model's file states
    /// that no plan has, and what could be had for nothing.
    pub fn notes(&self) -> Vec<String> {
        let of_model = self.taken.iter().chain(&self.case.model.notes).cloned();
        of_model
            .chain(self.indexed())
            .chain(self.odd_vocabulary())
            .chain(self.case.cluster.spec.beyond(self.case.cluster.gpus()))
            .chain(self.part_of_nodes())
            .chain(split_by_nodes(&self.case.cluster, &self.point.par))
            .chain(self.over_a_bridge())
            .chain(self.over_wires())
            .chain(self.dropped())
            .chain(self.copies())
            .chain(self.packed())
            .chain(self.routed())
            .chain(self.carried())
            .chain(self.repeated())
            .chain(self.under_load())
            .collect()
    }

    /// What of the model's FLOPs choose keys, and that the others are counted in the form that sees chosen ones.
    fn indexed(&self) -> Option<String> {
        let (model, seq_len) = (&self.case.model, self.point.seq_len);
        let indexer = model.indexer?;
        let share = model.indexer_flops_per_token(seq_len) / model.flops_per_token(seq_len);
        let mla = model.mla?;
        let absorbed = (2 * mla.kv_lora + mla.rope_dim) as f64 / (mla.nope_dim + mla.rope_dim + mla.v_dim) as f64;
        Some(format!(
            "sparse attention: {} of the FLOPs that MFU counts are the indexer's, which scores every visible key; attention's are \
             those of at most {} keys a query, absorbed (kv_lora_rank wide), {absorbed:.1} times as many a key as dense latent \
             attention has. FlashMLA's rates forward, assumed ones backward and of scores",
            percent(share),
            indexer.top_k
        ))
    }

    /// That a GPU's profile was taken as it is under load.
    fn under_load(&self) -> Option<String> {
        let sustained = self.case.profile.as_ref()?.gpu.as_ref()?.sustained?;
        Some(format!(
            "profile: of a GPU that trains without rest: products and attention take {sustained:.2} times as long as on one that rests"
        ))
    }

    /// The row of what was chosen with what would make it fit, where it does not.
    pub fn remedied(&self, row: Row) -> Result<Row> {
        // Of a large mixture in a long pipeline it takes half a minute.
        let _clock = row.over().filter(|over| *over > 0.0).map(|_| Clock::start("looking for what makes it fit"));
        self.case.with_remedies(&self.point, row, self.said)
    }

    /// That some GPUs of each node idle.
    fn part_of_nodes(&self) -> Option<String> {
        let cluster = &self.case.cluster;
        let [used, all] = [cluster.per_node(), cluster.spec.gpus_per_node];
        (cluster.nodes() > 1 && used < all).then(|| {
            format!(
                "gpus: {used} of the {all} of each node, on {} nodes, so that they share them evenly",
                cluster.nodes()
            )
        })
    }

    /// That what goes from socket to socket meets there.
    fn over_a_bridge(&self) -> Option<String> {
        let (par, cluster) = (&self.point.par, &self.case.cluster);
        let sockets = cluster.spec.scale_up.sockets.as_ref()?;
        let meet = cluster.per_node() > sockets.gpus && par.dp.saturating_mul(par.tp).saturating_mul(par.ring) > 1;
        meet.then(|| {
            format!(
                "sockets: {} GPUs are on two of them, and the bridge between carries {:.0} GB/s; what several communicators send over it \
                 at once meets where a step is simulated, and not in the walk of one rank",
                cluster.per_node(),
                sockets.bridge.value.value() / 1e9
            )
        })
    }

    /// That groups of ranks do not lie along the axes of a torus, whose collectives no other group stands in the way of.
    fn over_wires(&self) -> Option<String> {
        let (par, cluster) = (&self.point.par, &self.case.cluster);
        // Where a graph joins nodes it is the networks of those that meet.
        cluster.spec.graph.as_ref().filter(|_| cluster.spec.scale_out.is_none())?;
        let sequence = par.ring * par.ulysses;
        let degrees = [("tp", par.tp), ("ulysses x ring", sequence), ("dp", par.dp)];
        let mut inner = 1;
        for (name, ranks) in degrees {
            let outer = inner * ranks;
            let firsts = (0..cluster.gpus()).filter(|rank| rank % outer < inner);
            let group = |first: u32| (0..ranks).map(|i| first + i * inner).collect::<Vec<_>>();
            if ranks > 1 && firsts.into_iter().any(|first| cluster.block(&group(first)).is_none()) {
                return Some(format!(
                    "wires: some groups of {name} {ranks} are no block of the torus or mesh of chips; they are taken for rings in the \
                     order of ranks, and what they send over the links of others waits for those in `simulate` alone"
                ));
            }
            inner = outer;
        }
        None
    }

    /// That a sequence is not one document.
    fn packed(&self) -> Option<String> {
        let said = packed(&self.case.documents);
        let said = said.strip_prefix(", ")?;
        Some(format!("packed: a sequence is {said}; attention is within each, in the model's FLOPs too"))
    }

    /// That tokens choose experts by another rule than each as often.
    fn routed(&self) -> Option<String> {
        let ruled = match &self.loaded {
            Some(plan) => plan.routes.iter().any(|route| !matches!(route.counts, Counts::Balanced { .. })),
            None => self.case.model.moe.is_some() && self.case.routing != Routing::Balanced,
        };
        ruled.then(|| {
            let alone = match self.point.par.ep {
                1 => ". With ep 1 no row travels: it changes nothing but how many rows each expert has",
                _ => "",
            };
            format!("routing: as --routing or the plan has it; without, every expert has as many rows{alone}")
        })
    }

    /// That nothing travels that could be carried in some way.
    fn carried(&self) -> Option<String> {
        let (ep, how) = (self.point.par.ep, self.point.par.options.dispatch);
        (ep == 1 && how != Dispatch::Nccl).then(|| {
            format!(
                "dispatch: {} has nothing to carry with ep 1, where every rank has all experts; raise --ep",
                how.name()
            )
        })
    }

    /// That a router's log is read more than once.
    pub(super) fn repeated(&self) -> Option<String> {
        let repeated = if self.loaded.is_none() { self.case.repeated(&self.point) } else { None };
        repeated.map(|said| format!("routing: {said}"))
    }

    /// That experts have no room for some of the rows, which are then none of the model's work.
    fn dropped(&self) -> Option<String> {
        let share = self.loaded.as_ref().map_or_else(|| self.case.dropped(&self.point), |plan| dropped(&plan.routes));
        (share > 0.0).then(|| {
            format!(
                "rows: {} of the experts' are dropped, beyond a capacity or for want of an expert; neither time nor the model's FLOPs, \
                 and so MFU, have them",
                percent(share)
            )
        })
    }

    /// That one rank sums up the gradients of an expert's copies.
    fn copies(&self) -> Option<String> {
        let replicas = self.point.par.options.replicas;
        (replicas > 0).then(|| {
            format!(
                "replicas: gradients of an expert's copies go to one rank, which sums them up and sends them back: of a hot expert with \
                 many copies that takes longest, is waited for as `ep`, and may be more than {replicas} replicas save"
            )
        })
    }

    /// That the output matrix is slow for the length of its vocabulary, and which one would do.
    fn odd_vocabulary(&self) -> Option<String> {
        let (model, tp) = (&self.case.model, u64::from(self.point.par.tp).max(1));
        let (part, own) = (self.case.cluster.gpu.gemm.unaligned.as_ref()?.value, model.vocab.div_ceil(tp));
        let per_row = ALIGNMENT / self.case.dtype.size();
        let filled = model.vocab.checked_next_multiple_of(128 * tp)?;
        let why = format!(
            "vocab: a rank's {own} of {} are no multiple of {per_row}, for which products of the output matrix run at {part} of \
             their rate; fill it up to {filled}",
            model.vocab
        );
        (!own.is_multiple_of(per_row)).then_some(why)
    }

    /// The plan of the file, or that of the flags.
    pub fn plan(&self) -> Result<Plan> {
        match &self.loaded {
            Some(plan) => Ok(plan.clone()),
            None => self.case.plan(&self.point),
        }
    }

    /// The answer where there is no plan: a row that says why, and the same as an error.
    pub fn refused(&self, why: Reason) -> Answer {
        let row = self.case.infeasible(&self.point, why.clone());
        let row = WithNotes { answer: &row, notes: &self.notes() };
        Answer::with_error(String::new(), &row, Some(Error::Infeasible(why)))
    }
}
