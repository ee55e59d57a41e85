//! The network between nodes as a source words it: "8x400Gb/s IB NDR", "RoCE 1600 Gb/s per node", "400Gb/s per GPU".

use crate::published::row::words::{number_before, number_behind};

/// What one node sends at most, over all its ports.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Network {
    pub nics: u32,
    /// Bytes per second of one NIC and direction.
    pub raw: f64,
}

/// Ports by what a network or its card is called, Gb/s; of several the one named first here. A number right behind the name is
/// the rate itself: HDR100, NDR200, HDR-100.
const NAMED: &[(&str, f64)] = &[
    ("edr", 100.0),
    ("hdr", 200.0),
    ("ndr", 400.0),
    ("xdr", 800.0),
    ("fdr", 56.0),
    ("slingshot-10", 100.0),
    ("slingshot", 200.0),
    ("omni-path", 100.0),
    ("omnipath", 100.0),
    ("quantum-x800", 800.0),
    ("quantum-2", 400.0),
    ("spectrum-x", 400.0),
    ("connectx-8", 800.0),
    ("connectx-7", 400.0),
    ("connectx-6", 200.0),
    ("connectx-5", 100.0),
    ("cx-8", 800.0),
    ("cx8", 800.0),
    ("cx-7", 400.0),
    ("cx7", 400.0),
    ("cx-6", 200.0),
    ("cx6", 200.0),
];

/// How sources spell a rate.
const SPELLINGS: &[(&str, &str)] = &[
    ("gbits/s", "gb/s "),
    ("gbit/s", "gb/s "),
    ("gbps", "gb/s "),
    ("gbe", "gb/s ethernet"),
    ("gb ethernet", "gb/s ethernet"),
    ("tbits/s", "tb/s "),
    ("tbit/s", "tb/s "),
    ("tbps", "tb/s "),
    ("gb/s", "gb/s "),
];

/// Rates of ports that are written with a G alone, as in "400G". 40 and 80 are memories.
const PORTS: &[&str] = &["25", "50", "100", "200", "400", "800"];

/// The fastest port there is, Gb/s: more is a node's total.
const FASTEST: f64 = 800.0;

/// What one port of a node has, Gb/s, if it is Ethernet, or of any kind: machines of less have one for all GPUs.
const ONE_ETHERNET: f64 = 100.0;
const ONE: f64 = 50.0;

impl Network {
    /// `None` where the words name no rate.
    pub fn of(words: &str, gpus_per_node: u32) -> Option<Network> {
        let text = spelled(words);
        let rated = (text.match_indices("gb/s").map(|(at, _)| (at, 1.0)))
            .chain(text.match_indices("tb/s").map(|(at, _)| (at, 1000.0)))
            // Bytes are of NVLink, bits of networks; sources write both with a small b.
            .filter(|(at, _)| !is_scale_up(&text[..*at]))
            .find_map(|(at, unit)| Some((at, number_before(&text, at)? * unit)));
        let (at, gbits) = rated.or_else(|| named(&text))?;
        let each_of = times(&text[..at]).filter(|_| gbits <= FASTEST);
        let counted = counted(&text).or_else(|| in_words(&text[..at]));
        let rest = &text[at..];
        let each = rest.contains("per gpu") || rest.contains("/gpu") || rest.contains("per nic");
        let of_node = ["per node", "/node", "a node", "per server", "per host"].iter().any(|of| rest.contains(of));
        let rate = gbits * 1e9 / 8.0;
        let alone = gbits <= if text.contains("ethernet") && !text.contains("roce") { ONE_ETHERNET } else { ONE };
        Some(match each_of {
            Some(nics) => Network { nics, raw: rate },
            // A total, over as many NICs as are told.
            None if of_node || gbits > FASTEST => match counted {
                Some(nics) => Network { nics, raw: rate / f64::from(nics) },
                None => shared(gbits, gpus_per_node),
            },
            None if counted.is_some() => Network { nics: counted.unwrap_or(1), raw: rate },
            None if alone && !each => Network { nics: 1, raw: rate },
            // Of one GPU, said or not: a NIC each.
            None => Network { nics: gpus_per_node, raw: rate },
        })
    }

    /// Bytes per second of a node.
    pub fn per_node(&self) -> f64 {
        f64::from(self.nics) * self.raw
    }
}

/// Bytes per second that a GPU's links carry inside a node, both directions together, as makers count them: the N of
/// "P2P N GB/s". `None` where the words name none.
pub fn links(words: &str) -> Option<f64> {
    let text = words.to_lowercase();
    let rate = number_behind(&text, "p2p").filter(|rate| *rate > 0.0)?;
    text.split_once("p2p")?.1.split_whitespace().nth(1)?.starts_with("gb/s").then_some(rate * 1e9)
}

/// The rate right after the word NVLink (with its generation) is not the network's.
fn is_scale_up(before: &str) -> bool {
    let clause = before.rsplit([';', '+', ',']).next().unwrap_or(before);
    clause.contains("nvlink")
        || clause.contains("nvswitch")
        || clause.contains("xgmi")
        || clause.contains("intra")
        || clause.contains("p2p")
}

/// Rates in GB/s that are of makers' links, both directions together (NVLink of V100, A100, H100 and Blackwell), and of no port.
const OF_LINKS: &[f64] = &[300.0, 600.0, 900.0, 1800.0];

/// GB/s of eight of the fastest ports, as many as a node has.
const MOST_BYTES: f64 = 800.0;

/// What has bytes a second inside a node, beside the links that bits are told of as well.
const INSIDE: &[&str] = &["nvl", "pcie", "infinity fabric", "hbm", "memory", "qpi", "upi"];

/// The words with rates of networks in bits where they are in bytes, with a capital B, and without those of links inside a
/// node, also where the rate stands before their name or alone behind it.
fn in_bits(words: &str) -> String {
    let mut said = String::with_capacity(words.len());
    let mut rest = words;
    while let Some(at) = rest.find("GB/s") {
        let (head, tail) = rest.split_at(at);
        let before = head.trim_end();
        let digits = before.chars().rev().take_while(|c| c.is_ascii_digit() || *c == '.').count();
        let (front, number) = before.split_at(before.len() - digits);
        let whole = format!("{said}{front}").to_lowercase();
        let behind = tail[4..].trim_start();
        // A rate with nothing else between two commas is of what is before them.
        let alone = behind.is_empty() || behind.starts_with([',', ';', '+']);
        let clause = if alone { whole.trim_end().trim_end_matches(',') } else { &whole };
        let inside = is_inside(clause) || is_inside(&first_word(behind));
        match number.parse::<f64>() {
            Ok(rate) if inside || OF_LINKS.contains(&rate) => said.push_str(&format!("{front}of links")),
            Ok(rate) if rate <= MOST_BYTES => said.push_str(&format!("{front}{} Gb/s", (rate * 8e3).round() / 1e3)),
            // Of so many, bits are meant.
            _ => said.push_str(&format!("{head}Gb/s")),
        }
        rest = &tail[4..];
    }
    said + rest
}

/// Whether a rate behind these words is one inside a node.
fn is_inside(before: &str) -> bool {
    let clause = before.rsplit([';', '+', ',']).next().unwrap_or(before);
    is_scale_up(before) || INSIDE.iter().any(|name| clause.contains(name))
}

fn first_word(text: &str) -> String {
    let word = text.trim_start().split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
    word.to_lowercase()
}

/// The words in lower case, every rate in Gb/s or Tb/s.
fn spelled(words: &str) -> String {
    let mut text = in_bits(words).to_lowercase();
    for (from, to) in SPELLINGS {
        text = text.replace(from, to);
    }
    let letter = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '/' || c == '.');
    let mut said = String::with_capacity(text.len());
    for (at, c) in text.char_indices() {
        said.push(c);
        let digits = text[..at].chars().rev().take_while(char::is_ascii_digit).count();
        let port = c == 'g' && PORTS.contains(&&text[at - digits..at]) && !letter(text[at + 1..].chars().next());
        if port {
            said.push_str("b/s ");
        }
    }
    said
}

/// The rate of what is named, and where.
fn named(text: &str) -> Option<(usize, f64)> {
    NAMED.iter().find_map(|(name, gbits)| {
        let at = text.find(name)?;
        let behind = &text[at + name.len()..];
        let digits: String =
            behind.strip_prefix(['-', ' ']).unwrap_or(behind).chars().take_while(char::is_ascii_digit).collect();
        Some((at, digits.parse().ok().filter(|rate| *rate >= 100.0).unwrap_or(*gbits)))
    })
}

/// The N of "N NICs of", and of what is dual or quad.
fn counted(text: &str) -> Option<u32> {
    let of = |what: &str| number_before(text, text.find(what)?).map(|n| n as u32);
    let rails = [("dual-rail", 2), ("dual rail", 2), ("quad-rail", 4), ("quad rail", 4)];
    let rails = rails.iter().find(|(rails, _)| text.contains(rails)).map(|(_, n)| *n);
    [" nics", " hcas", " ports"].iter().find_map(|what| of(what)).filter(|n| (1..=16).contains(n)).or(rails)
}

/// The N of "N x rate", if it is right there or before the name of what has the rate: "4x Slingshot-11 200Gb/s".
fn times(before: &str) -> Option<u32> {
    let head = before.trim_end().trim_end_matches(|c: char| c.is_ascii_digit() || c == '.').trim_end();
    let named = head.rfind(char::is_whitespace).filter(|at| head[*at..].contains(char::is_alphabetic));
    let count = |head: &str| {
        let head = head.trim_end().strip_suffix('x')?;
        number_before(head, head.len()).map(|n| n as u32).filter(|n| *n > 0)
    };
    count(head).or_else(|| count(&head[..named?]))
}

/// The count that stands in words right before a rate: "dual 400".
fn in_words(before: &str) -> Option<u32> {
    let head = before.trim_end().trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    let last = head.split(|c: char| !c.is_alphanumeric()).rfind(|word| !word.is_empty())?;
    [("one", 1), ("single", 1), ("dual", 2)].iter().find(|(word, _)| *word == last).map(|(_, n)| *n)
}

/// A node's total over as many NICs as leave each at least 100 Gb/s, at most one a GPU.
fn shared(gbits: f64, gpus_per_node: u32) -> Network {
    let nics = ((gbits / 100.0) as u32).clamp(1, gpus_per_node.max(1));
    Network { nics, raw: gbits * 1e9 / 8.0 / f64::from(nics) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The words of real sources: NICs, and Gb/s of each.
    #[test]
    fn words_of_sources() {
        for (words, nics, gbits) in [
            ("NVLink4 900GB/s + 8x400Gb/s IB NDR", 8, 400.0),
            ("Jean Zay: NVLink3 node (8 GPUs) + 4x100Gb/s Omni-Path per node", 4, 100.0),
            ("8xGPU NVLink node; RoCE 1600 Gb/s per node", 8, 200.0),
            ("NVLink3 node (vTrain cfg intra 150GB/s eff); 4xHDR IB, 800 Gb/s per node", 8, 100.0),
            ("NVLink 400GB/s; RDMA 1.6Tb/s per node", 8, 200.0),
            ("8x A100-class (Ampere) NVLink node; 8x200Gb/s NICs multi-rail, TH4 3-layer CLOS 1:1", 8, 200.0),
            ("NVL72 NVLink5 domain (72 GPUs) + 400Gb/s IB per GPU", 8, 400.0),
            ("Selene: NVLink3 + 8x200Gb/s HDR IB", 8, 200.0),
            ("P2P 100 GB/s intra (85% eff); 2x195 Gb/s inter per node", 2, 195.0),
            ("AWS p4d EFA 400Gb/s per node", 4, 100.0),
            ("NVLink4 150GB/s/pair dir; 4x Slingshot-11 200Gb/s per node, OFI plugin", 4, 200.0),
            ("HF cluster: NVLink4 + EFA (AWS p5, 3200Gb/s per node)", 8, 400.0),
            ("AWS EFA 3200 Gbps", 8, 400.0),
            ("3.2Tbps RDMA", 8, 400.0),
            ("1.6 Tb/s IB", 8, 200.0),
            ("RoCEv2 400G", 8, 400.0),
            ("8x400G NDR", 8, 400.0),
            ("A100 80G, 200G IB", 8, 200.0),
            ("4 NICs of 100 Gb/s", 4, 100.0),
            ("InfiniBand 4x HDR100", 4, 100.0),
            ("dual-rail EDR", 2, 100.0),
            ("10 GbE", 1, 10.0),
            ("100Gb Ethernet", 1, 100.0),
            ("25Gbit/s", 1, 25.0),
            ("8x400GbE RoCE", 8, 400.0),
            ("100 Gb/s RoCE per GPU", 8, 100.0),
            ("Slingshot 11", 8, 200.0),
            ("4x ConnectX-7", 4, 400.0),
            ("NVLink4; IB 50 GB/s per GPU", 8, 400.0),
            ("NVLink5 + 6.4 Tb/s a node of EFA (p6-b300, 16 NICs)", 16, 400.0),
            ("8x50GB/s", 8, 400.0),
            ("NVSwitch + 25 GB/s inter-node", 8, 200.0),
            ("single 200Gb/s", 1, 200.0),
            ("dual 400G", 2, 400.0),
            ("no network of one; 8x200Gb/s", 8, 200.0),
            ("NVSwitch 300GB/s; 8x100Gb/s InfiniBand per node", 8, 100.0),
            ("one 200 Gb/s NIC per node", 1, 200.0),
            ("Ethernet (2.35 GB/s all-reduce)", 1, 18.8),
            ("900 GB/s NVLink + 46 GB/s per GPU", 8, 368.0),
            ("NVLink 900GB/s intra, 50GB/s inter", 8, 400.0),
            ("NVLink + 4x HDR-100", 4, 100.0),
            ("PCIe Gen4 x16, 32 GB/s; 100 Gb/s Ethernet", 1, 100.0),
        ] {
            let found = Network::of(words, 8).unwrap_or_else(|| panic!("{words}"));
            assert_eq!((found.nics, found.raw * 8e-9), (nics, gbits), "{words}");
        }
        assert_eq!(links("P2P 100 GB/s intra (85% eff); 2x195 Gb/s inter per node"), Some(100e9));
        assert_eq!(links("NVLink4 900GB/s + 8x400Gb/s IB NDR"), None);
        assert_eq!(Network::of("NVLink node", 8), None);
        assert_eq!(Network::of("A100 80G, A100 40G", 8), None);
        for words in ["NVSwitch node + IB fat tree", "NVLink, 400 GB/s", "64 GB/s PCIe", "3 GB/s PCIe 3 x4"] {
            assert_eq!(Network::of(words, 8), None, "{words}");
        }
    }
}
