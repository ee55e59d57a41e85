//! `foretrain dispatch`: one exchange of a mixture-of-experts layer alone, there and back.

use super::flags::value::count;
use super::flags::{JsonFile, Output, Platform};
use super::{Answer, list_of};
use crate::cluster::Cluster;
use crate::collective::exchange::{self, Buffers, Estimate, Flow, Setting, Traffic};
use crate::error::{Cause, Error, Result};
use crate::plan::Wire;
use crate::plan::route::{ExchangeAlgo, Phase, Route};
use crate::plot;
use crate::report::human::{Table, bytes, decimal, notes, percent, seconds};
use crate::routing::{Request, Routing, imbalance};
use crate::spec::{ClusterSpec, GpuSpec, StackSpec};
use crate::strategy::expert::{DEEPEP_SMS, HYBRID_EP_SMS};
use crate::sweep::exchange as exchanges;
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};

#[derive(Args)]
#[command(after_help = "Example: foretrain dispatch --ep 32 --cluster h800-8x400\n         \
                  foretrain dispatch --ep 64 --dispatch deepep-v1-ll --tokens 128 --routing zipf:1.0 --replicas 64 --json\n\n\
                  Routings: balanced, spread, round-robin, uniform, khot:N:SHARE, zipf:S, dirichlet:A, lognormal:RATIO,\n\
                  ratio:RATIO, hot-rank:SHARE, spread-hot:SHARE, ragged, zero-rank, rotating:SHARE, burst:SHARE, w0 to w7,\n\
                  or a file (traces/routing). Bytes are those of the rank that sends or receives most, which has more than a\n\
                  mean one. Logical ones are all rows, real ones those that cross, with headers, as tables of libraries mix them up.")]
pub struct Flags {
    #[command(flatten)]
    platform: Platform,
    /// Expert parallelism: ranks that share the experts
    #[arg(long, value_name = "N", default_value_t = 32)]
    ep: u32,
    /// Tokens of a rank, e.g. 4096 or 4K [default: 4096, or what the file has]
    #[arg(long, value_name = "N", value_parser = count)]
    tokens: Option<u64>,
    /// Width of a token
    #[arg(long, value_name = "N", value_parser = count, default_value = "7168")]
    hidden: u64,
    /// Experts that a token goes to [default: 8, or what the file has]
    #[arg(long, value_name = "N")]
    topk: Option<u32>,
    /// Experts of the layer
    #[arg(long, value_name = "N", default_value_t = 256)]
    experts: u32,
    /// nccl, allgather, deepep-v1-normal, deepep-v1-ll, deepep-v2, deepep-v2-direct, hybrid-ep or hierarchical
    #[arg(long, value_name = "ALGO", default_value = "deepep-v1-normal")]
    dispatch: String,
    /// Of dispatched rows: fp8 with a scale for each 128 elements, or bf16; combined rows are bf16
    #[arg(long, value_name = "DTYPE", default_value = "fp8", value_parser = wire)]
    dispatch_dtype: Wire,
    /// SMs of the kernels [default: as plans take them, 20 for DeepEP V1 and 32 for Hybrid-EP, for V2 by its formula]
    #[arg(long, value_name = "N")]
    sms: Option<u16>,
    /// Low latency between nodes: no SM is held between send and receive
    #[arg(long)]
    hook: bool,
    /// Where tokens go: words below, or a file
    #[arg(long, value_name = "WORDS", default_value = "balanced", value_parser = routing)]
    routing: Routing,
    /// Replicas of experts, given out by EPLB
    #[arg(long, value_name = "N", default_value_t = 0)]
    replicas: u32,
    /// Nodes that a token reaches at most
    #[arg(long, value_name = "N")]
    node_limit: Option<u32>,
    /// Of what is drawn
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Step, for routings that change
    #[arg(long, value_name = "N", default_value_t = 0)]
    step: u64,
    #[command(flatten)]
    output: Output,
    /// Costs a study in place of one exchange, into this folder: by ranks, imbalance, choices, and the load of ranks
    #[arg(long, value_name = "DIR")]
    #[arg(conflicts_with_all = ["ep", "routing", "dispatch", "sms", "hook", "replicas", "node_limit", "step"])]
    study: Option<PathBuf>,
    #[command(flatten)]
    file: JsonFile,
}

fn wire(text: &str) -> std::result::Result<Wire, String> {
    [Wire::Fp8, Wire::BF16].into_iter().find(|w| w.name() == text).ok_or_else(|| "write fp8 or bf16".into())
}

fn routing(text: &str) -> std::result::Result<Routing, String> {
    text.parse().map_err(|e: Error| e.to_string())
}

/// The words of `--dispatch`.
pub const ALGORITHMS: [&str; 8] = [
    "nccl",
    "allgather",
    "deepep-v1-normal",
    "deepep-v1-ll",
    "deepep-v2",
    "deepep-v2-direct",
    "hybrid-ep",
    "hierarchical",
];

/// Tokens of a rank and choices of a token where nobody says.
const TOKENS: u64 = 4096;
const TOPK: u32 = 8;

/// Beyond these sizes of buffers are no numbers of 64 bits, and nothing is that large.
const MOST_HIDDEN: u64 = 1 << 20;
const MOST_TOKENS: u64 = u32::MAX as u64;
const MOST_BYTES: f64 = (1u64 << 48) as f64;

impl Flags {
    /// What one flag says and another leaves nothing of.
    fn check(&self) -> Result<()> {
        let wrong = |flag: &str, why: String| Err(Error::spec("dispatch", flag, why));
        let low_latency = self.dispatch == "deepep-v1-ll";
        if self.ep < 2 {
            let ranks = if self.ep == 0 { "0 ranks exchange" } else { "1 rank exchanges" };
            return wrong("--ep", format!("{ranks} nothing; use 2 or more"));
        }
        if self.hidden == 0 {
            return wrong("--hidden", "0: rows without columns; use 1 or more".into());
        }
        if self.hidden > MOST_HIDDEN {
            return wrong("--hidden", format!("{} is wider than any model; use {MOST_HIDDEN} or fewer", self.hidden));
        }
        if let Some(tokens) = self.tokens.filter(|tokens| !(1..=MOST_TOKENS).contains(tokens)) {
            return wrong("--tokens", format!("{tokens} a rank are not exchanged; use 1 to {MOST_TOKENS}"));
        }
        if self.hook && !low_latency {
            let why = format!("{} has no hook; use --dispatch deepep-v1-ll, or leave it out", self.dispatch);
            return wrong("--hook", why);
        }
        if self.sms.is_some() && (low_latency || ["nccl", "allgather", "hierarchical"].contains(&&*self.dispatch)) {
            let why = format!("{} takes no number of SMs; leave it out, or use another --dispatch", self.dispatch);
            return wrong("--sms", why);
        }
        if matches!(self.routing, Routing::File(_)) && self.tokens.is_some() {
            return wrong("--tokens", "a file of --routing has tokens of its own; leave it out".into());
        }
        Ok(())
    }

    /// Errors: a limit on nodes that are not there; rows that no memory has room for, before they are counted in 64 bits.
    fn check_route(&self, route: &Route) -> Result<()> {
        let wrong = |flag: &str, why: String| Err(Error::spec("dispatch", flag, why));
        let nodes = route.nodes();
        if let Some(limit) = self.node_limit.filter(|limit| *limit > nodes) {
            return wrong("--node-limit", format!("{limit} of {nodes} nodes; use 1 to {nodes}, or leave it out"));
        }
        let rooms = route.most_tokens() as f64 * (f64::from(route.ranks) + f64::from(route.experts));
        // A row as bf16 and more, the weights of its choices, and what is told of it.
        let room = rooms * (4.0 * self.hidden as f64 + 4.0 * f64::from(route.experts) + 4096.0);
        if room > MOST_BYTES {
            let why = format!("{} for a rank to make room for; use fewer tokens, experts or ranks", bytes(room));
            return wrong("--tokens", why);
        }
        Ok(())
    }

    fn algorithm(&self, route: &Route, gpu: &GpuSpec) -> Result<ExchangeAlgo> {
        let all = gpu.sms.value;
        if let Some(sms) = self.sms.filter(|sms| *sms == 0 || u32::from(*sms) > all) {
            let why = format!("{} has {all} SMs; use 1 to {all}", gpu.name);
            return Err(Error::spec("the command line", "--sms", format!("{sms}: {why}")));
        }
        Ok(match self.dispatch.as_str() {
            "nccl" => ExchangeAlgo::Nccl,
            "allgather" => ExchangeAlgo::AllGather,
            "hierarchical" => ExchangeAlgo::Hierarchical,
            "deepep-v1-normal" => ExchangeAlgo::DeepepNormal { sms: self.sms.unwrap_or(DEEPEP_SMS) },
            "deepep-v1-ll" => {
                ExchangeAlgo::DeepepLowLatency { hook: self.hook, slots: route.most_tokens().max(1) as u32 }
            }
            "deepep-v2" => ExchangeAlgo::DeepepV2Hybrid { sms: self.sms },
            "deepep-v2-direct" => ExchangeAlgo::DeepepV2Direct { sms: self.sms },
            "hybrid-ep" => ExchangeAlgo::HybridEp { sms: self.sms.unwrap_or(HYBRID_EP_SMS) },
            other => {
                return Err(Error::spec(
                    "--dispatch",
                    other,
                    format!("no algorithm; known: {}", ALGORITHMS.join(", ")),
                ));
            }
        })
    }

    fn request(&self, cluster: &Cluster) -> Request {
        Request {
            routing: self.routing.clone(),
            ranks: self.ep,
            node: self.ep.min(cluster.per_node()),
            experts: self.experts,
            topk: self.topk.unwrap_or(TOPK),
            tokens: self.tokens.unwrap_or(TOKENS),
            replicas: self.replicas,
            node_limit: self.node_limit,
            groups: None,
            seed: self.seed,
            step: self.step,
        }
    }
}

pub fn run(flags: &Flags) -> Result<Answer> {
    flags.check()?;
    let (spec, gpu) = flags.platform.specs()?;
    let stack = StackSpec::find_for(flags.platform.stack.on(&gpu), &gpu)?;
    if let Some(dir) = &flags.study {
        return study(flags, dir, spec, gpu, stack);
    }
    let cluster = Cluster::new(&spec, &gpu, flags.ep)?;
    let route = flags.request(&cluster).route()?;
    flags.check_route(&route)?;
    if let Some(said) = flags.topk.filter(|said| *said != route.topk) {
        let why = format!("{said}, where the tokens of the file have {}; leave it out", route.topk);
        return Err(Error::spec("dispatch", "--topk", why));
    }
    let algo = flags.algorithm(&route, &gpu)?;
    let row = flags.dispatch_dtype.row_bytes(flags.hidden);
    let buffers = exchange::aside(&route, algo, flags.hidden, row, &cluster)?.buffers;
    let (needed, room) = (buffers.total() as f64, gpu.memory.value.value());
    if needed > room {
        let why = format!("{} on a GPU of {}; use fewer tokens, or another --dispatch", bytes(needed), bytes(room));
        return Err(Cause::Buffers.infeasible(why));
    }
    let members: Vec<u32> = (0..flags.ep).collect();
    let pass = |phase, row_bytes: u64| {
        let wire = exchange::message_row(algo, phase, route.topk, row_bytes, 0);
        let (route, members, cluster, stack) = (&route, &members, &cluster, &stack);
        let at = Setting { route, phase, row_bytes, members, cluster, stack, library: None };
        Ok::<_, Error>(Pass::new(route, algo, phase, [row_bytes, wire], &exchange::time(&at, algo)?))
    };
    let loads: Vec<f64> = (0..route.ranks).map(|r| route.expanded_rows(r)).collect();
    let found = Found {
        algorithm: flags.dispatch.clone(),
        cluster: spec.name.clone(),
        stack: stack.name.clone(),
        ranks: route.ranks,
        nodes: route.nodes(),
        tokens: flags.tokens.unwrap_or_else(|| route.most_tokens()),
        experts: flags.experts,
        slots: route.experts,
        replicas: flags.replicas,
        topk: route.topk,
        hidden: flags.hidden,
        dispatch_dtype: flags.dispatch_dtype.name(),
        hook: flags.hook,
        routing: flags.routing.to_string(),
        node_limit: flags.node_limit,
        seed: flags.seed,
        step: flags.step,
        notes: exchange::unmeant(algo).into_iter().collect(),
        imbalance: imbalance(&loads),
        buffers: Sizes::of(buffers),
        dispatch: pass(Phase::Dispatch, row)?,
        cached_dispatch: pass(Phase::CachedDispatch, row)?,
        combine: pass(Phase::Combine, Wire::BF16.row_bytes(flags.hidden))?,
    };
    Answer::new(found.render(), &found).also_to(flags.file.path())
}

/// Writes rows.csv and draws it.
fn study(flags: &Flags, dir: &Path, cluster: ClusterSpec, gpu: GpuSpec, stack: StackSpec) -> Result<Answer> {
    let Flags { hidden, experts, dispatch_dtype: dispatch, seed, .. } = *flags;
    let (tokens, topk) = (flags.tokens.unwrap_or(TOKENS), flags.topk.unwrap_or(TOPK));
    let rows = exchanges::study(
        &exchanges::Question { cluster, gpu, stack, tokens, hidden, topk, experts, dispatch, seed },
        dir,
    )?;
    let mut files = vec![rows.clone()];
    files.extend(plot::draw(&rows, dir)?);
    let text = files.iter().map(|f| format!("wrote {}\n", f.display())).collect();
    Ok(Answer::new(text, &serde_json::json!({"files": list_of(&files)})))
}

/// What `--json` prints. Times are those of the rank that ends last, bytes those of the rank that has most of them.
#[derive(Serialize)]
struct Found {
    algorithm: String,
    cluster: String,
    stack: String,
    ranks: u32,
    nodes: u32,
    tokens: u64,
    /// Experts of the layer, and slots that hold them and their replicas.
    experts: u32,
    slots: u32,
    replicas: u32,
    topk: u32,
    hidden: u64,
    dispatch_dtype: &'static str,
    hook: bool,
    routing: String,
    /// Nodes that a token reaches at most; `None` where all are open to it.
    node_limit: Option<u32>,
    seed: u64,
    step: u64,
    notes: Vec<String>,
    /// Rows of the fullest rank over the mean.
    imbalance: f64,
    buffers: Sizes,
    dispatch: Pass,
    cached_dispatch: Pass,
    combine: Pass,
}

#[derive(Serialize)]
struct Sizes {
    links_bytes: u64,
    network_bytes: u64,
}

impl Sizes {
    fn of(buffers: Buffers) -> Sizes {
        Sizes { links_bytes: buffers.links, network_bytes: buffers.network }
    }
}

/// Bytes of the busiest rank over one kind of link.
#[derive(Serialize)]
struct Over {
    logical_bytes: f64,
    real_bytes: f64,
    /// The same over the time of the pass.
    logical_bytes_per_s: f64,
    real_bytes_per_s: f64,
}

impl Over {
    /// Of the rank that has most to send or receive, in a pass of `total` seconds.
    /// `row`: bytes of its values, and on the wire.
    fn of(all: &[Traffic], flow: fn(&Traffic) -> Flow, row: [u64; 2], total: f64) -> Over {
        let most = |f: &dyn Fn(Flow) -> f64| all.iter().map(|t| f(flow(t))).fold(0.0, f64::max);
        let rows = [most(&|f| f.busier() + f.kept), most(&|f| f.busier())];
        let [logical_bytes, real_bytes] = [0, 1].map(|i| rows[i] * row[i] as f64);
        let [logical_bytes_per_s, real_bytes_per_s] = [logical_bytes, real_bytes].map(|bytes| bytes / total);
        Over { logical_bytes, real_bytes, logical_bytes_per_s, real_bytes_per_s }
    }
}

#[derive(Serialize)]
struct Pass {
    total_s: f64,
    start_s: f64,
    notify_s: f64,
    network_s: f64,
    links_s: f64,
    sms_s: f64,
    /// The rows cross network and links one after the other, and not in a stream.
    in_turn: bool,
    mean_s: f64,
    limiter: &'static str,
    sms: u32,
    rel_sd: f64,
    row_bytes: u64,
    /// The same with the header that the library sends along.
    wire_row_bytes: u64,
    network: Over,
    links: Over,
}

impl Pass {
    fn new(route: &Route, algo: ExchangeAlgo, phase: Phase, row: [u64; 2], estimate: &Estimate) -> Pass {
        let slowest = estimate.slowest();
        let all = exchange::traffic(route, algo, phase);
        let total_s = slowest.total().value();
        Pass {
            total_s,
            start_s: slowest.start.value(),
            notify_s: slowest.notify.value(),
            network_s: slowest.network.value(),
            links_s: slowest.links.value(),
            sms_s: slowest.sms.value(),
            in_turn: slowest.in_turn,
            mean_s: estimate.mean().value(),
            limiter: slowest.limiter().name(),
            sms: estimate.sms,
            rel_sd: estimate.rel_sd,
            row_bytes: row[0],
            wire_row_bytes: row[1],
            network: Over::of(&all, |t| t.network, row, total_s),
            links: Over::of(&all, |t| t.links, row, total_s),
        }
    }
}

impl Found {
    fn render(&self) -> String {
        let Found { algorithm, cluster, stack, ranks, nodes, tokens, experts, topk, hidden, .. } = self;
        let nodes = if *nodes == 1 { "one node".to_string() } else { format!("{nodes} nodes") };
        let mut text = notes(&self.notes);
        text.push_str(&format!(
            "{algorithm}{} of {tokens} tokens a rank, {topk} of {experts} experts, hidden {hidden}, over {ranks} ranks on \
             {nodes} of {cluster}, stack {stack}, {} SMs\n{}\nrows of the fullest rank: {:.2} times the mean\n\n",
            if self.hook { " with the hook" } else { "" },
            self.dispatch.sms,
            self.routed(),
            self.imbalance
        ));
        text.push_str(&self.bytes());
        text.push('\n');
        text.push_str(&self.times());
        let Sizes { links_bytes, network_bytes } = self.buffers;
        text.push_str(&match links_bytes + network_bytes {
            0 => "\nbuffers: what the framework allocates for rows that go out and come in\n".to_string(),
            all => format!(
                "\nbuffers of a rank: {} ({} that peers of the node write, {} beyond)\n",
                bytes(all as f64),
                bytes(links_bytes as f64),
                bytes(network_bytes as f64)
            ),
        });
        text
    }

    /// What decides where tokens go.
    fn routed(&self) -> String {
        let Found { routing, seed, step, replicas, slots, .. } = self;
        let copies = if *replicas > 0 { format!(", {replicas} replicas: {slots} slots") } else { String::new() };
        let limit = self.node_limit.map_or(String::new(), |limit| format!(", at most {limit} nodes a token"));
        format!("routing {routing}, seed {seed}, step {step}{copies}{limit}")
    }

    fn passes(&self) -> [(&'static str, &Pass); 3] {
        [("dispatch", &self.dispatch), ("cached dispatch", &self.cached_dispatch), ("combine", &self.combine)]
    }

    /// Bytes by pass and link, and the rates that they make.
    fn bytes(&self) -> String {
        let mut table = Table::new("<<>>>>>>");
        let head = ["", "over", "row", "with header", "most logical", "most real", "logical GB/s", "real GB/s"];
        table.row(head.map(String::from));
        // Tables of libraries time the rows, without the counts: that is a cached dispatch.
        for (name, pass) in self.passes() {
            for (over, flow) in [("network", &pass.network), ("links", &pass.links)] {
                if flow.logical_bytes == 0.0 {
                    continue;
                }
                let rate = |bytes_per_s: f64| format!("{:.1}", bytes_per_s / 1e9);
                table.row([
                    name.to_string(),
                    over.into(),
                    decimal(pass.row_bytes as f64, "B"),
                    decimal(pass.wire_row_bytes as f64, "B"),
                    decimal(flow.logical_bytes, "B"),
                    decimal(flow.real_bytes, "B"),
                    rate(flow.logical_bytes_per_s),
                    rate(flow.real_bytes_per_s),
                ]);
            }
        }
        table.render("")
    }

    fn times(&self) -> String {
        let mut table = Table::new("<>>>>>>><>");
        let head = ["", "time", "start", "notify", "network", "links", "SMs", "mean rank", "limited by", "SMs held"];
        table.row(head.map(String::from));
        for (name, pass) in self.passes() {
            let times =
                [pass.total_s, pass.start_s, pass.notify_s, pass.network_s, pass.links_s, pass.sms_s, pass.mean_s];
            let line = std::iter::once(name.to_string()).chain(times.map(seconds));
            table.row(line.chain([pass.limiter.to_string(), pass.sms.to_string()]));
        }
        let sd = percent(self.dispatch.rel_sd);
        let rows = match self.dispatch.in_turn {
            true => "network and links one after the other, two calls",
            false => "a maximum over network, links and SMs",
        };
        format!("{}{rows}, after start and notify; relative sd {sd}\n", table.render(""))
    }
}
