//! The matrix that `nvidia-smi topo -m` prints: what lies between every two GPUs and NICs of a node.

use super::node::{Nic, Node, islands};
use super::peer_links::PeerLinks;
use crate::error::{Error, Result};

/// What to do about a matrix that is not whole.
const WHOLE: &str = "give all that `nvidia-smi topo -m` prints, as it prints it";

/// Reads the matrix; `file` is what errors call it.
pub fn parse(file: &str, text: &str) -> Result<Node> {
    let plain = without_colours(text);
    let mut lines = plain.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let header = lines.find(|(_, line)| line.split_whitespace().next().is_some_and(|w| w == "GPU0"));
    let Some((_, header)) = header else {
        let why = "no line that begins with GPU0 and names the columns; give what `nvidia-smi topo -m` prints";
        return Err(Error::spec(file, "contents", why));
    };
    let columns: Vec<&str> = header.split_whitespace().take_while(|w| is_device(w)).collect();
    let gpus = columns.iter().filter(|c| c.starts_with("GPU")).count();
    let mut matrix: Vec<Vec<String>> = Vec::new();
    for (at, line) in lines.filter(|(_, line)| line.trim_start().starts_with("GPU")).take(gpus) {
        let words: Vec<&str> = line.split_whitespace().skip(1).take(columns.len()).collect();
        if words.len() < columns.len() {
            let (has, all) = (words.len(), columns.len());
            let why = format!("{has} columns, where the header has {all}: the line is cut off; {WHOLE}");
            return Err(Error::spec(file, format!("line {}", at + 1), why));
        }
        if let Some(odd) = words.iter().find(|w| !is_relation(w)) {
            let why = format!("{odd:?} is none of X, NV#, PIX, PXB, PHB, NODE, SYS; {WHOLE}");
            return Err(Error::spec(file, format!("line {}", at + 1), why));
        }
        matrix.push(words.into_iter().map(str::to_string).collect());
    }
    if matrix.len() < gpus {
        let why = format!("{gpus} GPUs in the header, {} rows; {WHOLE}", matrix.len());
        return Err(Error::spec(file, "contents", why));
    }
    Ok(node_of(&matrix, gpus, &columns))
}

fn node_of(matrix: &[Vec<String>], gpus: usize, columns: &[&str]) -> Node {
    let pairs = || (0..gpus).flat_map(|a| (0..a).map(move |b| (a, b)));
    let links =
        |(a, b): (usize, usize)| matrix[a][b].strip_prefix("NV").and_then(|n| n.parse::<u32>().ok()).unwrap_or(0);
    let most = pairs().map(links).max().unwrap_or(0);
    let all_equal = gpus > 2 && pairs().all(|p| links(p) == most) && most > 0;
    // As many links to every GPU as there are at all: they lead to a switch. No GPU has more than 18.
    let switched = all_equal && most as usize * (gpus - 1) > 18;
    let of_one = if switched {
        most
    } else {
        (0..gpus).map(|a| (0..gpus).filter(|b| *b != a).map(|b| links((a, b))).sum()).min().unwrap_or(0)
    };
    let linked = pairs().filter(|&p| links(p) > 0);
    let islands = if most > 0 { islands(gpus, linked) } else { 0 };
    // GPUs that only SYS lies between are on different sockets.
    let sockets = self::islands(gpus, pairs().filter(|&(a, b)| matrix[a][b] != "SYS"));
    let nics = nics(matrix, gpus, columns);
    let peer_links =
        if switched || most == 0 { PeerLinks::default() } else { PeerLinks::new(gpus, |a, b| links((a, b))) };
    // Which GPUs they are, it does not say.
    Node { gpus: gpus as u32, sm: None, pci: None, links: of_one, switched, islands, peer_links, nics, sockets }
}

/// NICs of jobs: those behind a PCIe switch that a GPU is behind, too, if there are such; others are for storage and
/// logins.
fn nics(matrix: &[Vec<String>], gpus: usize, columns: &[&str]) -> Vec<Nic> {
    let near = |nic: usize| matrix.iter().any(|row| ["PIX", "PXB"].contains(&row[nic].as_str()));
    let any = (gpus..columns.len()).any(near);
    let kept = (gpus..columns.len()).filter(|&nic| near(nic) || !any);
    kept.map(|nic| Nic { name: columns[nic].to_string(), rate: None }).collect()
}

fn is_device(word: &str) -> bool {
    ["GPU", "NIC", "mlx", "bnxt", "irdma", "rdma", "efa", "ib"].iter().any(|p| word.starts_with(p)) && *word != *"GPU"
}

fn is_relation(word: &str) -> bool {
    let links = word.strip_prefix("NV").is_some_and(|n| n.parse::<u32>().is_ok_and(|n| n <= 64));
    links || ["X", "PIX", "PXB", "PHB", "NODE", "SYS"].contains(&word)
}

/// The header is underlined on a terminal.
fn without_colours(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('\u{1b}') {
        out.push_str(&rest[..at]);
        rest = rest[at..].split_once('m').map_or("", |(_, after)| after);
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FOUR: &str = "\t\u{1b}[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\u{1b}[0m\n\
        GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-47\t0\nGPU1\tNV18\t X \tNV18\tNV18\tPXB\tSYS\t0-47\t0\n\
        GPU2\tNV18\tNV18\t X \tNV18\tSYS\tPIX\t48-95\t1\nGPU3\tNV18\tNV18\tNV18\t X \tSYS\tPXB\t48-95\t1\n\
        NIC0\tPIX\tPXB\tSYS\tSYS\t X \tSYS\n\nLegend:\n\n  X    = Self\n";

    #[test]
    fn a_switched_node() {
        let node = parse("t.txt", FOUR).unwrap();
        assert_eq!((node.gpus, node.links, node.switched, node.nics.len()), (4, 18, true, 2));
    }

    #[test]
    fn nics_far_from_every_gpu_are_not_for_jobs() {
        let text = "GPU0 GPU1 NIC0 NIC1 NIC2\nGPU0 X NV18 PIX SYS NODE\nGPU1 NV18 X SYS PXB SYS\n";
        let names = |text| parse("t.txt", text).unwrap().nics.into_iter().map(|n| n.name).collect::<Vec<_>>();
        assert_eq!(names(text), ["NIC0", "NIC1"]);
        assert_eq!(names("GPU0 GPU1 NIC0\nGPU0 X NV18 NODE\nGPU1 NV18 X SYS\n"), ["NIC0"]);
    }

    #[test]
    fn pairs_with_bridges_are_islands() {
        let text =
            "GPU0 GPU1 GPU2 GPU3\nGPU0 X NV12 SYS SYS\nGPU1 NV12 X SYS SYS\nGPU2 SYS SYS X NV12\nGPU3 SYS SYS NV12 X\n";
        let node = parse("t.txt", text).unwrap();
        assert_eq!((node.islands, node.sockets, node.switched), (2, 2, false));
        assert_eq!(parse("t.txt", FOUR).unwrap().islands, 1);
    }

    #[test]
    fn a_node_of_pcie() {
        let text =
            "GPU0 GPU1 GPU2 GPU3\nGPU0 X PIX SYS SYS\nGPU1 PIX X SYS SYS\nGPU2 SYS SYS X NODE\nGPU3 SYS SYS NODE X\n";
        let node = parse("t.txt", text).unwrap();
        assert_eq!((node.gpus, node.links, node.switched, node.sockets), (4, 0, false, 2));
        let text = "GPU0 GPU1 GPU2\nGPU0 X NV4 NV4\nGPU1 NV4 X NV4\nGPU2 NV4 NV4 X\n";
        let node = parse("t.txt", text).unwrap();
        assert_eq!((node.links, node.switched), (8, false));
        assert_eq!(node.peer_links, PeerLinks::new(3, |_, _| 4));
        assert_eq!(parse("t.txt", FOUR).unwrap().peer_links, PeerLinks::default());
    }

    #[test]
    fn errors_name_the_line() {
        let cut = parse("t.txt", "GPU0 GPU1\nGPU0 X NV4\nGPU1 NV4\n").unwrap_err().to_string();
        assert!(cut.contains("line 3") && cut.contains("cut off") && cut.contains("give all"), "{cut}");
        let odd = parse("t.txt", "GPU0 GPU1\nGPU0 X WHAT\nGPU1 NV4 X\n").unwrap_err().to_string();
        assert!(odd.contains("line 2") && odd.contains("WHAT") && odd.contains("give all"), "{odd}");
        let short = parse("t.txt", "GPU0 GPU1\nGPU0 X NV4\n").unwrap_err().to_string();
        assert!(short.contains("2 GPUs in the header, 1 rows; give all"), "{short}");
        assert!(parse("t.txt", "hello").unwrap_err().to_string().contains("GPU0"));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(?s).{0,200}",
            words in prop::collection::vec("(GPU[0-9]{1,2}|NIC0|X|NV[0-9]{1,12}|SYS|PIX|\n|\u{1b}\\[4m)", 0..40)) {
            let _ = parse("x", &text);
            let _ = parse("x", &words.join(" "));
        }
    }
}
