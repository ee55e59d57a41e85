//! The network between nodes as a source words it: "8x400Gb/s IB NDR", "RoCE 1600 Gb/s per node", "400Gb/s per GPU".

use super::words::{number_before, number_behind};

/// What one node sends at most, over all its ports.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Network {
    pub nics: u32,
    /// Bytes per second of one NIC and direction.
    pub raw: f64,
}

/// Ports of InfiniBand's generations, Gb/s.
const GENERATIONS: &[(&str, f64)] = &[("edr", 100.0), ("hdr", 200.0), ("ndr", 400.0), ("xdr", 800.0)];

impl Network {
    /// `None` where the words name no rate.
    pub fn of(words: &str, gpus_per_node: u32) -> Option<Network> {
        let text = words.to_lowercase().replace("gb/s", "gb/s ").replace("gbps", "gb/s ");
        let rated = (text.match_indices("gb/s").map(|(at, _)| (at, 1.0)))
            .chain(text.match_indices("tb/s").map(|(at, _)| (at, 1000.0)))
            // Bytes are of NVLink, bits of networks; sources write both with a small b.
            .filter(|(at, _)| !is_scale_up(&text[..*at]))
            .find_map(|(at, unit)| Some((at, number_before(&text, at)? * unit)));
        let (at, gbits) = rated.or_else(|| generation(&text))?;
        let nics = times(&text[..at]);
        let per_node = text[at..].contains("per node") && nics.is_none();
        let rate = gbits * 1e9 / 8.0;
        Some(match nics {
            Some(nics) => Network { nics, raw: rate },
            None if per_node => shared(gbits, gpus_per_node),
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
    clause.contains("nvlink") || clause.contains("xgmi") || clause.contains("intra") || clause.contains("p2p")
}

fn generation(text: &str) -> Option<(usize, f64)> {
    GENERATIONS.iter().find_map(|(name, gbits)| Some((text.find(name)?, *gbits)))
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
        ] {
            let found = Network::of(words, 8).unwrap_or_else(|| panic!("{words}"));
            assert_eq!((found.nics, found.raw * 8e-9), (nics, gbits), "{words}");
        }
        assert_eq!(links("P2P 100 GB/s intra (85% eff); 2x195 Gb/s inter per node"), Some(100e9));
        assert_eq!(links("NVLink4 900GB/s + 8x400Gb/s IB NDR"), None);
        assert_eq!(Network::of("NVLink node", 8), None);
        assert_eq!(Network::of("NVSwitch node + IB fat tree", 8), None);
    }
}
