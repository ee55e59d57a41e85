//! Which GPU words mean: by its own name, by what it is called for short, or by a machine that has it.

use crate::published::row::words::{squeezed, tokens};
use crate::spec::{Architecture, ClusterSpec, GpuSpec};
use crate::units::Bytes;

/// The generation of which a source says that the GPU is one, and no more; of several the one named first.
pub fn generation(words: &str) -> Option<Architecture> {
    let named = |word: &String| match word.as_str() {
        "volta" => Some(Architecture::Volta),
        "turing" => Some(Architecture::Turing),
        "ampere" => Some(Architecture::Ampere),
        "ada" => Some(Architecture::Ada),
        "hopper" => Some(Architecture::Hopper),
        "blackwell" => Some(Architecture::Blackwell),
        _ => None,
    };
    tokens(words).iter().find_map(named)
}

pub fn has_peak(gpu: &GpuSpec, tflops: f64) -> bool {
    gpu.peak.get("bf16").is_some_and(|peak| (peak.value.value() / (tflops * 1e12) - 1.0).abs() < 0.01)
}

/// What GPUs are called for short.
const SHORT: &[(&str, &str)] = &[
    ("mi300", "mi300x"),
    ("mi325", "mi325x"),
    ("mi350", "mi350x"),
    ("mi355", "mi355x"),
    ("a6000", "rtxa6000"),
    ("3090", "rtx3090"),
    ("4090", "rtx4090"),
    ("5090", "rtx5090"),
    ("rtx4090d", "rtx4090"),
    ("v5litepod", "v5e"),
    ("trillium", "v6e"),
    ("910b", "ascend910b"),
    ("910b1", "ascend910b"),
    ("910b2", "ascend910b"),
    ("910b3", "ascend910b"),
    ("ascend910b2", "ascend910b"),
    ("ascend910b3", "ascend910b"),
    ("hpu", "gaudi2"),
];

/// GPUs by names that are none of theirs: of a generation's kinds, and of the machines that clouds let
/// (docs.aws.amazon.com, instance types; cloud.google.com, accelerator-optimized machines).
const OTHER_NAMES: &[(&[&str], &str)] = &[
    (&["grace", "blackwell", "ultra"], "GB300"),
    (&["blackwell", "ultra"], "B300"),
    (&["grace", "blackwell"], "GB200"),
    (&["grace", "hopper"], "GH200"),
    (&["trillium"], "TPU v6e"),
    (&["v5p"], "TPU v5p"),
    (&["v5litepod"], "TPU v5e"),
    (&["v5", "lite"], "TPU v5e"),
    (&["ndm", "a100", "v4"], "A100-SXM-80GB"),
    (&["ndv4"], "A100-SXM-40GB"),
    (&["ndv5"], "H100-SXM-80GB"),
    (&["p4de"], "A100-SXM-80GB"),
    (&["p4d"], "A100-SXM-40GB"),
    (&["p5en"], "H200"),
    (&["p5e"], "H200"),
    (&["p5"], "H100-SXM-80GB"),
    (&["p6"], "B200"),
    (&["p3dn"], "V100-SXM2-32GB"),
    (&["p3"], "V100-SXM2-16GB"),
    (&["g4dn"], "T4"),
    (&["g5"], "A10G"),
    (&["g6"], "L4"),
    (&["g6e"], "L40S"),
    (&["a4x"], "GB200"),
    (&["a4", "highgpu"], "B200"),
    (&["gcp", "a4"], "B200"),
    (&["google", "a4"], "B200"),
    (&["a3", "ultragpu"], "H200"),
    (&["a3", "ultra"], "H200"),
    (&["a3", "megagpu"], "H100-SXM-80GB"),
    (&["a3", "mega"], "H100-SXM-80GB"),
    (&["a3", "highgpu"], "H100-SXM-80GB"),
    (&["a3", "high"], "H100-SXM-80GB"),
    (&["a3", "edgegpu"], "H100-SXM-80GB"),
    (&["gcp", "a3"], "H100-SXM-80GB"),
    (&["google", "a3"], "H100-SXM-80GB"),
    (&["a2", "ultragpu"], "A100-SXM-80GB"),
    (&["a2", "highgpu"], "A100-SXM-40GB"),
    (&["a2", "megagpu"], "A100-SXM-40GB"),
    (&["gcp", "a2"], "A100-SXM-40GB"),
    (&["google", "a2"], "A100-SXM-40GB"),
    // Huawei's boxes of the second generation; those of the third have the 910C.
    (&["atlas", "a2"], "Ascend 910B"),
    (&["dgx", "spark"], "GB10"),
    (&["dgx", "1"], "V100-SXM2-32GB"),
    (&["dgx1"], "V100-SXM2-32GB"),
    (&["dgx", "2"], "V100-SXM3-32GB"),
    (&["dgx2"], "V100-SXM3-32GB"),
    // Machines by their own names.
    (&["frontier"], "MI250X"),
    (&["lumi"], "MI250X"),
    (&["alps"], "GH200 96GB"),
    (&["isambard"], "GH200 96GB"),
    (&["selene"], "A100-SXM-80GB"),
    (&["perlmutter"], "A100-SXM-40GB"),
    (&["polaris"], "A100-SXM-40GB"),
    (&["juwels"], "A100-SXM-40GB"),
];

/// Names of which a part is another GPU's: of Iluvatar's cards, and of Turing's for workstations, none of which ships, and of
/// Blackwell's, which sources say in another order.
const WHOLE_NAMES: &[(&[&str], Option<&str>)] = &[
    (&["bi", "v100"], None),
    (&["quadro", "6000"], None),
    (&["rtx", "6000", "pro"], Some("RTX PRO 6000")),
    (&["rtx", "6000", "blackwell"], Some("RTX PRO 6000")),
];

/// What words mean of which a part alone would mean something else; `Some(None)`: a GPU that does not ship.
pub fn whole_name(words: &str) -> Option<Option<&'static str>> {
    let said = tokens(words);
    let all = |names: &[&str]| names.iter().all(|name| said.iter().any(|word| word == name));
    WHOLE_NAMES.iter().find(|(names, _)| all(names)).map(|(_, gpu)| *gpu)
}

pub fn other_name(words: &str) -> Option<&'static str> {
    let said = tokens(words);
    let all = |names: &[&str]| names.iter().all(|name| said.iter().any(|word| word == name));
    OTHER_NAMES.iter().find(|(names, _)| all(names)).map(|(_, gpu)| *gpu)
}

/// How well words fit the name of a GPU: its family must be there (a100, never a100x); memory, form factor and
/// the like count as they agree. Higher is better.
pub fn likeness(words: &str, gpu: &GpuSpec) -> Option<i32> {
    let (mut said, name) = (tokens(words), tokens(&gpu.name));
    said.iter_mut().for_each(|word| *word = of_one(without_count(word)).into());
    // "TPUv4" is one word where ours are two, "RTX 4090" are two where ours is one, and "MI300" leaves the X out.
    let joined = name.get(1).map(|second| format!("{}{second}", name[0]));
    let apart = (2..4).any(|n| said.windows(n).any(|run| run.concat() == name[0]));
    // Of chips that all have one name, that of the generation is the name.
    let family = name[0] == "tpu";
    let is = |word: &String| *word == name[0] && !family || Some(word) == joined.as_ref();
    let short = said.iter().any(|word| SHORT.contains(&(word, &name[0])));
    let both = family && said.contains(&name[0]) && name.get(1).is_some_and(|second| said.contains(second));
    if !(said.iter().any(is) || apart || short || both) {
        return None;
    }
    let mut score = 0;
    score += match (sized(&said), sized(&name)) {
        // What is free of a memory is told as often as all of it.
        (Some(a), Some(b)) if (a / b - 1.0).abs() < 0.05 => 1,
        (Some(a), Some(b)) if (a / b - 1.0).abs() < 0.3 => -1,
        (Some(_), Some(_)) => -2,
        // "A100" alone is the larger one, which came to stay, and "H100" the one that everybody has.
        (None, Some(b)) if b == 40.0 || b == 16.0 || name[0] == "h100" => -1,
        _ => 0,
    };
    // Of boards of one chip that are told apart so: those of DGX-2 are the third.
    let third = |tokens: &[String]| {
        tokens.iter().any(|t| t == "sxm3") || tokens.windows(2).any(|two| two[0] == "dgx" && two[1] == "2")
    };
    score -= i32::from(third(&said) != third(&name));
    // Of cards of one chip, those with bridges are another.
    let bridged = |tokens: &[String]| tokens.iter().any(|word| word == "nvl");
    score += i32::from(bridged(&said) == bridged(&name));
    // A card and a board are two machines; memory is but a size.
    score += if is_card(&said) == is_card(&name) { 6 } else { 0 };
    Some(score)
}

/// Whether words say that a GPU is a card in a slot: NVL is PCIe, too, with bridges.
pub fn is_card(tokens: &[String]) -> bool {
    let apart = |two: &[String]| two[0] == "pci" && two[1] == "e";
    tokens.iter().any(|word| word == "pcie" || word == "nvl") || tokens.windows(2).any(apart)
}

/// What a board is called that is no card, or the box around it.
const BOARDS: &[&str] = &["sxm", "hgx", "dgx", "oam", "gh200", "gb200", "gb300", "nvl72"];

/// The words for a GPU with the form that those for its links give it; and what is to be said, where a card of a chip does
/// not ship, but of another name: the A800's and the H800's have fewer links, and cards have none.
pub fn with_form(gpu: &str, interconnect: &str) -> (String, Option<String>) {
    let text = squeezed(gpu);
    let board = BOARDS.iter().any(|word| text.contains(word));
    let slot = !is_card(&tokens(gpu)) && !board && is_slot(interconnect);
    let mut words = if slot { format!("{gpu} PCIe") } else { gpu.to_string() };
    if !is_card(&tokens(&words)) {
        return (words, None);
    }
    for (name, same) in [("a800", "A100"), ("h800", "H100")] {
        if tokens(&words).iter().any(|word| word == name) {
            words = words.to_lowercase().replace(name, same);
            return (words, Some(format!("gpu: {gpu:?}: {same} with PCIe taken, which is the same without links")));
        }
    }
    (words, None)
}

/// What joins the GPUs of a node that is no box of cards; bridges join but some.
const SWITCHES: &[&str] = &["nvlink", "nvswitch", "xgmi", "infinityfabric", "sxm", "hgx", "dgx", "nvl72"];

/// What PCIe joins to a node, if it is said beside it, in place of its GPUs.
const BEYOND: &[&str] = &[
    "ib",
    "infiniband",
    "roce",
    "rocev2",
    "rdma",
    "nic",
    "nics",
    "hca",
    "hcas",
    "connectx",
    "cx6",
    "cx7",
    "hdr",
    "ndr",
    "edr",
    "efa",
    "ethernet",
    "gbe",
    "gbps",
    "slingshot",
    "host",
    "cpu",
];

/// Whether words say that GPUs of a node have PCIe between them, and nothing faster.
fn is_slot(interconnect: &str) -> bool {
    let clauses = || interconnect.split([';', '+', ',']);
    let faster = |clause: &str| {
        let text = squeezed(clause).replace("nonvlink", "").replace("withoutnvlink", "");
        SWITCHES.iter().any(|word| text.contains(word)) && !text.contains("bridge")
    };
    let of_gpus = |clause: &str| {
        let said = tokens(clause);
        is_card(&said) && !said.iter().any(|word| BEYOND.contains(&word.as_str()))
    };
    !clauses().any(faster) && clauses().any(of_gpus)
}

/// What is to be said where words name a card of a GPU that ships on a board alone.
pub fn other_form(words: &str, gpu: &GpuSpec, spec: &ClusterSpec) -> Option<String> {
    let ships = is_card(&tokens(&gpu.name)) || is_card(&tokens(&spec.name));
    (is_card(&tokens(words)) && !ships)
        .then(|| format!("gpu: no machine of {} with PCIe ships; {} taken", gpu.name, spec.name))
}

/// What is to be said of bridges between pairs of cards, which no plan goes over.
pub fn bridges(interconnect: &str, spec: &ClusterSpec) -> Option<String> {
    let text = squeezed(interconnect);
    let said = text.contains("bridge") && text.contains("nvl") || spec.gpu.ends_with("nvl");
    let has = said && is_card(&tokens(&spec.name));
    has.then(|| "interconnect: bridges join some GPUs and not others; all is taken to go over PCIe".into())
}

/// What a card of the same name may have, over what the shipped one has; more or less is of the node, or of the CPU.
const SIZES: std::ops::Range<f64> = 0.4..1.6;

/// Gigabytes of 1e9 and of 2^30 bytes, which sources do not tell apart, and what is kept for error correction.
const NEAR: f64 = 0.08;

/// Gives a GPU the memory that words say, where the shipped one has another: makers' gigabytes of it are of 2^30 bytes. Of
/// superchips the CPU's is told as often.
pub fn set_memory(gpu: &mut GpuSpec, words: &str) -> Option<String> {
    let size = sized(&tokens(words)).filter(|_| !gpu.name.starts_with('g') && !gpu.name.starts_with("mi2"))?;
    let part = size / (gpu.memory.value.value() * 1e-9);
    if !SIZES.contains(&part) || (part - 1.0).abs() < NEAR {
        return None;
    }
    gpu.memory.value = Bytes::new(size * f64::from(1 << 30));
    Some(format!("gpu: {} with {size} GB of memory", gpu.name))
}

/// Gigabytes of a GPU's memory, where words say them, of eight where that many are more than any has.
pub fn sized(tokens: &[String]) -> Option<f64> {
    let number = |word: &String| word.parse::<f64>().ok();
    let joined = |word: &String| word.strip_suffix("gb").or(word.strip_suffix('g'))?.parse::<f64>().ok();
    let apart = || tokens.windows(2).filter(|two| two[1] == "gb" || two[1] == "g").find_map(|two| number(&two[0]));
    let size = tokens.iter().find_map(joined).or_else(apart)?;
    Some(if size >= 320.0 { size / 8.0 } else { size })
}

/// The "h100" of "h100s", of "h100x8" and of "dgxh100".
fn of_one(word: &str) -> &str {
    let word = word.strip_suffix('s').filter(|one| one.ends_with("00")).unwrap_or(word);
    let named = ["dgx", "hgx"].iter().find_map(|box_| word.strip_prefix(box_)).filter(|rest| !rest.is_empty());
    let word = named.unwrap_or(word);
    let several = word.rsplit_once('x').filter(|(one, n)| one.ends_with("00") && n.parse::<u32>().is_ok());
    several.map_or(word, |(one, _)| one)
}

/// The "b200" of "8xb200".
fn without_count(word: &str) -> &str {
    let behind = word.trim_start_matches(|c: char| c.is_ascii_digit());
    if behind.len() == word.len() { word } else { behind.strip_prefix('x').filter(|w| !w.is_empty()).unwrap_or(word) }
}
