//! Which way of sharing a sequence a source means by the name of its algorithm: degrees, and words of options.

use crate::published::row::case::Attention;
use crate::published::row::words::squeezed;
use crate::published::software::sdpa::BENCHMARKED;

/// A way, before anybody has asked whether this program has it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Way {
    pub ulysses: u32,
    pub ring: u32,
    /// Words of `--options`.
    pub words: Vec<&'static str>,
    /// What is taken in place of an algorithm that this program does not have.
    pub instead: Option<&'static str>,
}

/// Names of algorithms and what they are here; the first line that fits decides.
///
/// Implementations differ in what they send (mechanisms in the sources of each): zhuzilin and USP return dKV in
/// fp32 over P hops, TransformerEngine in the model's dtype over P - 1.
const LINES: &[Line] = &[
    Line { names: &["singlegpu", "none"], shape: Shape::Alone, words: &[], instead: None },
    Line {
        names: &["llama3", "gatherkv"],
        shape: Shape::Ring,
        words: &["gather-kv-prefetch", "contiguous"],
        instead: None,
    },
    Line {
        names: &["magiattn", "magiattention"],
        shape: Shape::Ring,
        words: &["gather-kv-prefetch"],
        instead: Some(
            "all-gather of KV, the next part beside the kernel, in place of a group-cast of the rows that a rank needs",
        ),
    },
    Line { names: &[LOONGTRAIN, "2dattention"], shape: Shape::Hybrid, words: &[], instead: None },
    Line { names: &["hybriddcp", "hybridcp"], shape: Shape::Ring, words: &["dkv-model"], instead: None },
    // Names of what Transformer Engine's `cp_comm_type` may be come before its own, whose default is p2p.
    Line { names: &["a2a+p2p"], shape: Shape::Hybrid, words: &["dkv-model"], instead: None },
    Line { names: &["a2a", "alltoall"], shape: Shape::Ulysses, words: &[], instead: None },
    // PyTorch's context parallelism gathers unless it is told to rotate (`set_rotate_method`, all-gather by default).
    Line {
        names: &["ringallgather", "allgather", "pytorchcontextparallel", "torchcontextparallel"],
        shape: Shape::Ring,
        words: &["gather-kv"],
        instead: None,
    },
    Line {
        names: &["ringp2p", "te", "megatroncp", "megatronlmcp", "transformerengine", "contextparallel"],
        shape: Shape::Ring,
        words: &["dkv-model"],
        instead: None,
    },
    Line { names: &["burst"], shape: Shape::Ring, words: &["burst"], instead: None },
    Line { names: &["usp", "longctx"], shape: Shape::Hybrid, words: &[], instead: None },
    Line { names: &["ulysses", "fpdt", "alst"], shape: Shape::Ulysses, words: &[], instead: None },
    Line { names: &["ring"], shape: Shape::Ring, words: &[], instead: None },
    Line {
        names: &["distflash", "distattn", "lightseq"],
        shape: Shape::Ring,
        words: &[],
        instead: Some("a zigzag ring, whose ranks have equal work, in place of ranks that help each other out"),
    },
    Line { names: &["flash"], shape: Shape::Alone, words: &[], instead: None },
];

/// A layout that only rings have; one GPU, whatever it is called; and degrees that are stated of a name that is not known.
const RING: Line = Line { names: &[], shape: Shape::Ring, words: &[], instead: None };
const ALONE: Line = Line { names: &[], shape: Shape::Alone, words: &[], instead: None };
const HYBRID: Line = Line {
    names: &[],
    shape: Shape::Hybrid,
    words: &[],
    instead: Some("Ulysses and a zigzag ring of the stated degrees, the algorithm being none that is known"),
};

const LOONGTRAIN: &str = "loongtrain";

/// LoongTrain's ring of so many ranks is rings of rings, the inner ones at least as long as the outer
/// (github:SandAI-org/MagiAttention exps/dist_attn/run_benchmark.py, `window_num`); dKV goes behind KV, and home.
fn two_rings(ring: u32) -> Option<&'static str> {
    let outer = (1..=ring).rev().find(|n| ring.is_multiple_of(*n) && n * n <= ring)?;
    let words = [(2, "double-ring-2"), (4, "double-ring-4"), (8, "double-ring-8")];
    words.into_iter().find(|(inner, _)| outer > 1 && *inner == ring / outer).map(|(_, word)| word)
}

struct Line {
    names: &'static [&'static str],
    shape: Shape,
    words: &'static [&'static str],
    instead: Option<&'static str>,
}

#[derive(Clone, Copy)]
enum Shape {
    Alone,
    Ring,
    Ulysses,
    /// Both; Ulysses inside the node where no degrees are stated.
    Hybrid,
}

/// Where the tokens of a ring stand.
const LAYOUTS: &[(&str, &str)] =
    &[("naive", "contiguous"), ("basic", "contiguous"), ("strip", "stripe"), ("contiguous", "contiguous")];

/// The way of a row on `gpus` GPUs, `node` of which share a node.
pub fn way(row: &Attention, gpus: u32, node: u32) -> Result<Way, String> {
    // A variant that names an algorithm of its own says more than the family it was benchmarked with.
    let (variant, family) = (squeezed(&row.variant), squeezed(&row.family));
    // Of one GPU it does not matter, and where degrees are stated they say what it comes down to.
    let other = match (gpus, row.ulysses.or(row.ring)) {
        (1, _) => Some(&ALONE),
        (_, Some(_)) => Some(&HYBRID),
        _ => None,
    };
    let laid_out = ["zigzag", "stripe"].iter().any(|word| family.contains(word)).then_some(&RING);
    let Some(line) = line_of(&variant).or_else(|| line_of(&family)).or(laid_out).or(other) else {
        return Err(format!("algorithm: {:?} is none that is known", row.family));
    };
    let alone = matches!(line.shape, Shape::Alone) || gpus == 1;
    let (ulysses, ring) = if alone { (1, 1) } else { degrees(row, line.shape, gpus, node) };
    let mut words = line.words.to_vec();
    let said = LAYOUTS.iter().find(|(said, _)| variant.contains(said) || family.contains(said)).map(|(_, word)| *word);
    let layout = if one_layout(row, line.shape) { Some("contiguous") } else { said };
    // Nothing but the words naive, basic or stripe says that a ring is not zigzag, except the bare word.
    let bare = (variant == "ring").then_some("contiguous");
    if let Some(word) = layout.or(bare).filter(|w| ring > 1 && !words.contains(w)) {
        words.push(word);
    }
    let loongtrain = line.names.contains(&LOONGTRAIN);
    words.extend(two_rings(ring).filter(|_| loongtrain));
    if squeezed(&row.implementation).contains("sandai")
        && !loongtrain
        && !words.iter().any(|w| w.contains("gather") || *w == "dkv-model")
    {
        // MagiAttention's baselines are TransformerEngine's algorithms.
        words.push("dkv-model");
    }
    let gathers = words.iter().any(|word| word.contains("gather"));
    if !gathers && ["zhuzilin", "yunchang"].iter().any(|who| row.implementation.contains(who)) {
        // K and V are two messages, and dKV shares their communicator.
        words.extend(["kv-in-two", "one-comm"]);
    }
    if ring == 1 {
        words.clear();
    }
    if ulysses > 1 && squeezed(&row.packing).starts_with("no") {
        words.push("a2a-separate");
    }
    Ok(Way { ulysses, ring, words, instead: line.instead.filter(|_| ring > 1) })
}

/// YunChang's layer until April of 2024 had ring-flash-attention's basic ring only, and its benchmark then a flag for the layout
/// that it did not hand on (github:feifeibear/long-context-attention benchmark/benchmark_longctx_qkvpacked.py and
/// long_context_attn/attn_layer.py of March 2024): the rows of its tables differ by their noise. Rings without the
/// layer were the functions that they are named after.
fn one_layout(row: &Attention, shape: Shape) -> bool {
    let who = squeezed(&row.implementation);
    let early = who.contains("firstversion") || who.contains("mar2024");
    matches!(shape, Shape::Hybrid) && who.contains("yunchang") && early
}

fn line_of(text: &str) -> Option<&'static Line> {
    LINES.iter().find(|line| line.names.iter().any(|name| names(text, name)))
}

/// Short names stand for themselves only.
fn names(text: &str, name: &str) -> bool {
    if name.len() > 2 { text.contains(name) } else { text.starts_with(name) || text.contains(&format!("/{name}")) }
}

fn degrees(row: &Attention, shape: Shape, gpus: u32, node: u32) -> (u32, u32) {
    // Of two whose product is known one is enough.
    let rest = |of: u32| Some(gpus / of.max(1)).filter(|rest| gpus.is_multiple_of(of.max(1)) && *rest > 0);
    let stated = match (row.ulysses, row.ring) {
        (Some(u), Some(r)) => Some((u, r)),
        (Some(u), None) => rest(u).map(|r| (u, r)),
        (None, Some(r)) => rest(r).map(|u| (u, r)),
        (None, None) => None,
    };
    if let Some(stated) = stated {
        return stated;
    }
    // "2x4" in a name: ring first, as its source heads its table.
    if let Some((r, u)) = by_name(&row.variant).or_else(|| by_name(&row.family)) {
        return (u, r);
    }
    match shape {
        Shape::Alone => (1, 1),
        Shape::Ring => (1, gpus),
        Shape::Ulysses => (gpus, 1),
        Shape::Hybrid => {
            let heads = row.kv_heads.unwrap_or(u64::from(node));
            let ulysses =
                (1..=node.min(gpus)).rev().find(|u| gpus.is_multiple_of(*u) && heads.is_multiple_of(u64::from(*u)));
            let ulysses = ulysses.unwrap_or(1);
            (ulysses, gpus / ulysses)
        }
    }
}

fn by_name(variant: &str) -> Option<(u32, u32)> {
    variant.split_whitespace().find_map(|word| {
        let (a, b) = word.split_once('x')?;
        Some((a.parse().ok()?, b.parse().ok()?))
    })
}

/// Scores in memory.
const UNFUSED: &[&str] = &["unfused"];

/// What a benchmark that names none has, by generation: the newest FlashAttention of its own, or cuDNN's.
const UNNAMED: [&[&str]; 2] = [&["fa2", "fa3", "cudnn"], &["cudnn", "fa4"]];

/// Kernels of a curve by what a source calls them: one of its own, or one made of the same instructions.
const KERNELS: &[(&str, &[&str])] = &[
    // MagiAttention's kernel on it; where that has no curve of its own, the one that it is built on.
    ("ffafa4", &["ffa-fa4", "fa4"]),
    ("fa4", &["fa4"]),
    ("flashattention4", &["fa4"]),
    ("fa3", &["fa3"]),
    ("flashattention3", &["fa3"]),
    ("flashattention2", &["fa2"]),
    ("fa2", &["fa2"]),
    ("cudnn", &["cudnn"]),
    ("transformerengine", &["cudnn", "fa3", "fa2"]),
    ("flashattention1", &["fa1", "fa2"]),
    ("flashattnv1", &["fa1", "fa2"]),
    ("fa1", &["fa1", "fa2"]),
    // Tiles as FlashAttention's first version has them (arXiv:2307.08691, figures 4 to 6, has both beside each other).
    ("xformers", &["fa1", "fa2"]),
    ("standardattention", UNFUSED),
    ("unfused", UNFUSED),
    ("eager", UNFUSED),
    ("naiveattention", UNFUSED),
    ("sdpa", BENCHMARKED[0]),
    // Where its own curve is not there: MagiAttention's kernel is built on FlashAttention 3.
    ("ffa", &["ffa", "fa3"]),
    // Without the asynchronous products of Hopper and later.
    ("triton", &["triton", "fa2"]),
    ("flex", &["flex", "fa2"]),
    ("flashmask", &["flashmask", "fa2"]),
];

/// The attention kernels that a row ran, the likeliest first. `newest`: on Blackwell, where nobody runs those of Ampere.
pub fn kernels(row: &Attention, newest: bool) -> &'static [&'static str] {
    let own = squeezed(&row.implementation);
    let inside = squeezed(row.kernel.split('/').next().unwrap_or_default());
    let of_magi =
        squeezed(&row.family).contains("magi").then(|| squeezed(row.kernel.split('/').nth(1).unwrap_or_default()));
    // A source that does not name its GPU may say what follows from the kernel.
    let texts = [of_magi.unwrap_or_default(), own, inside, squeezed(&row.gpu)];
    let said = texts.iter().find_map(|text| KERNELS.iter().find(|(name, _)| text.contains(name)));
    // By itself PyTorch in a figure of kernels is what they are held against (arXiv:2205.14135, 2307.08691).
    let plain = row.gpus == Some(1) && texts.iter().any(|text| text == "pytorch" || text == "torch");
    let unsaid = if plain { UNFUSED } else { UNNAMED[usize::from(newest)] };
    let found = said.map_or(unsaid, |(_, kernels)| *kernels);
    if newest && found == BENCHMARKED[0] { BENCHMARKED[1] } else { found }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(family: &str, variant: &str) -> Attention {
        Attention { family: family.into(), variant: variant.into(), kv_heads: Some(8), ..Attention::default() }
    }

    /// The names of real sources on 16 GPUs, 8 a node.
    #[test]
    fn names_of_sources() {
        for (family, variant, ulysses, ring, words) in [
            ("ring", "naive", 1, 16, vec!["contiguous"]),
            ("ring", "zigzag", 1, 16, vec![]),
            ("USP/ring", "stripe_ring", 1, 16, vec!["stripe"]),
            ("USP/ring", "longctx strip 2x4", 4, 2, vec!["stripe"]),
            ("ring_p2p", "", 1, 16, vec!["dkv-model"]),
            ("ring_allgather", "", 1, 16, vec!["gather-kv"]),
            ("ulysses", "", 16, 1, vec![]),
            ("usp", "", 8, 2, vec![]),
            ("loongtrain", "", 8, 2, vec![]),
            ("ring/all-gather varlen", "flash_attn varlen single GPU", 1, 1, vec![]),
            (
                "ring/all-gather varlen",
                "llama3 allgather-KV varlen (contiguous, unbalanced)",
                1,
                16,
                vec!["gather-kv-prefetch", "contiguous"],
            ),
            ("single-GPU kernel", "", 1, 1, vec![]),
            ("ring-flash-attention", "", 1, 16, vec![]),
            ("DistFlashAttn", "", 1, 16, vec![]),
            ("Striped Attention", "", 1, 16, vec!["stripe"]),
            ("Megatron/TE CP (a2a)", "", 16, 1, vec![]),
            ("Megatron/TE CP (all-gather)", "", 1, 16, vec!["gather-kv"]),
            ("Megatron/TE CP (p2p)", "", 1, 16, vec!["dkv-model"]),
            ("TransformerEngine CP", "", 1, 16, vec!["dkv-model"]),
            ("PyTorch context_parallel", "", 1, 16, vec!["gather-kv"]),
            ("MagiAttention", "", 1, 16, vec!["gather-kv-prefetch"]),
            ("USP 2x8", "", 8, 2, vec![]),
            ("FPDT", "", 16, 1, vec![]),
        ] {
            let found = way(&row(family, variant), 16, 8).unwrap();
            assert_eq!((found.ulysses, found.ring, found.words), (ulysses, ring, words), "{family} {variant}");
        }
        assert!(way(&row("Tree attention", ""), 8, 8).unwrap_err().contains("Tree"));
        assert_eq!(way(&row("xformers", ""), 1, 8).map(|way| way.ring), Ok(1));
        let own = Attention { ulysses: Some(2), ..row("somebody's", "") };
        assert_eq!(way(&own, 8, 8).map(|way| (way.ulysses, way.ring)), Ok((2, 4)));
    }

    #[test]
    fn inner_rings_are_as_long_as_outer_ones_or_longer() {
        let words = [2, 4, 8, 16, 64].map(two_rings);
        assert_eq!(
            words,
            [None, Some("double-ring-2"), Some("double-ring-4"), Some("double-ring-4"), Some("double-ring-8")]
        );
    }

    #[test]
    fn the_first_layer_of_yunchang_knew_one_ring() {
        let words = |variant: &str, who: &str| {
            let row = Attention { implementation: who.into(), ulysses: None, ..row("USP/ring", variant) };
            let found = way(&row, 8, 8).unwrap();
            found.words.contains(&"contiguous")
        };
        assert!(words("longctx strip 2x4", "yunchang / zhuzilin (Mar 2024)"));
        assert!(!words("zigzag_ring", "yunchang / zhuzilin (Mar 2024)"));
        assert!(!words("longctx strip 2x4", "yunchang"));
    }

    #[test]
    fn kernels_by_name() {
        let of = |implementation: &str| {
            kernels(&Attention { implementation: implementation.into(), ..row("x", "") }, false)[0]
        };
        assert_eq!([of("FlashAttention-2"), of("fa3"), of("ffa_fa4"), of("sdpa")], ["fa2", "fa3", "ffa-fa4", "sdpa"]);
        assert_eq!([of("FlashAttention-1"), of("xformers"), of("standard attention")], ["fa1", "fa1", "unfused"]);
        let torch =
            |gpus| kernels(&Attention { implementation: "PyTorch".into(), gpus: Some(gpus), ..row("x", "") }, false)[0];
        assert_eq!([torch(1), torch(8)], ["unfused", "fa2"]);
        let magi = Attention { kernel: "FA3 (baselines) / FFA (magi)".into(), ..row("ulysses", "") };
        assert_eq!(kernels(&magi, false)[0], "fa3");
    }
}
