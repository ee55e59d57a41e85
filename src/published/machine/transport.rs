//! What carries messages between nodes, by what a source calls it: EFA, Google's transports, sockets of TCP.

use super::Stated;
use super::network::Network;
use crate::error::Result;
use crate::published::row::words::{squeezed, tokens};
use crate::spec::{Architecture, ClusterSpec, Transport};
use crate::units::{BytesPerSec, Seconds};

/// What a step between nodes takes over Google's transports, GPUDirect-TCPX and TCPXO, which go by way of the host in place
/// of verbs: between what an all-gather of 8 MiB and an all-reduce of 8 bytes over two A3 Mega say (20 and 47 us,
/// traces/published/collectives.json and blind_network.json).
const BY_HOST: f64 = 40e-6;

/// What TCPX, which is TCP, reaches of the wire: 50 of 100 GB/s over two A3 High (traces/published/collectives.json).
pub const OF_WIRE_TCPX: f64 = 0.5;

/// What one thread of the CPU moves through TCP sockets: of x86, NCCL's 4 to 6 GB/s over one port of 100 Gb/s, and of Grace,
/// all-reduces of 8 MiB and more over four of 200 Gb/s, each with a CPU of its own (github issue NVIDIA/nccl#450;
/// github:eth-cscs/cscs-docs@80abed1 docs/software/communication/nccl.md).
const TCP_THREAD: f64 = 5e9;
const TCP_THREAD_GRACE: f64 = 0.9e9;

/// Threads that NCCL gives a connection on Google's virtual NIC; it has one on others that are not Amazon's
/// (github:NVIDIA/nccl@5067397c src/transport/net_socket.cc).
const TCP_THREADS_GVNIC: f64 = 4.0;

/// What TCP leaves of an Ethernet port to its payload, with frames of 1,500 bytes.
const OF_WIRE_TCP: f64 = 0.949;

/// A step between nodes through the kernel's sockets, twice: all-reduces of up to 256 bytes between two nodes of GH200 take 51
/// us (the same table, 18 over their own transport).
const TCP_LATENCY: f64 = 16e-6;

/// Whether words say that messages go through sockets; those of a mainboard hold CPUs.
pub fn by_sockets(words: &str) -> bool {
    let said = tokens(words);
    let says = |word: &str| said.iter().any(|said| said == word);
    says("tcp") || says("sockets") && !says("pcie")
}

/// Sockets of TCP, where a source says that the library has no RDMA: through the host's memory, by threads of its CPU. A node
/// has one port for them unless the words give it more, nodes of Grace one for each superchip.
pub fn set_sockets(spec: &mut ClusterSpec, stated: &Stated, network: Option<Network>) -> &'static str {
    let said = tokens(stated.interconnect);
    let says = |word: &str| said.iter().any(|said| said == word);
    let grace = ["gh", "gb2", "gb3"].iter().any(|chip| spec.gpu.starts_with(chip));
    let (node, part) = (spec.gpus_per_node, stated.gpus_per_node.unwrap_or(spec.gpus_per_node));
    let Some(out) = spec.scale_out.as_mut().filter(|_| by_sockets(stated.interconnect)) else { return "" };
    if network.is_none() && !grace {
        (out.nics_per_node, out.raw.value) = (1, BytesPerSec::new(12.5e9));
    }
    let threads = if ["gvnic", "gcp", "google"].iter().any(|cloud| says(cloud)) { TCP_THREADS_GVNIC } else { 1.0 };
    let thread = if grace { TCP_THREAD_GRACE } else { TCP_THREAD };
    // Threads belong to the node's one connection, however many NICs its rate is counted in.
    let ports = if grace { 1.0 } else { f64::from((out.nics_per_node * part.min(node)).div_ceil(node)) };
    let rate = (out.raw.value * OF_WIRE_TCP).min(BytesPerSec::new(threads * thread / ports));
    (out.achieved.value, out.p2p.value, out.several) = (rate, rate, None);
    out.latency.value = Seconds::new(TCP_LATENCY);
    ", TCP sockets"
}

/// Networks and cards that are posted to by verbs, by how their names start; short ones are words of their own.
const VERBS: &[&str] =
    &["infiniband", "connectx", "cx6", "cx7", "cx8", "roce", "omnipath", "slingshot", "hdr", "ndr", "xdr", "edr"];

/// Whether words name a network that is not Amazon's.
pub fn names_verbs(words: &str) -> bool {
    let text = squeezed(words).replace("omni-path", "omnipath");
    let starts = |word: &String| VERBS.iter().any(|name| word.starts_with(name)) || word == "ib" || word == "opa";
    tokens(words).iter().any(starts) || text.contains("omnipath") || text.contains("infiniband")
}

/// The shipped cluster whose EFA is of the generation that Amazon has beside such GPUs.
fn with_efa(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Hopper => "h100-8x400-efa",
        Architecture::Blackwell => "b300-16x400-efa",
        _ => "a100-40gb-4x100-efa",
    }
}

/// Gives the network the transport that the words name; EFA where it was none has the latency of its generation. Errors: a
/// shipped file is wrong.
pub fn set_transport(spec: &mut ClusterSpec, architecture: Architecture, words: &str) -> Result<&'static str> {
    let text = squeezed(words).replace("notcpx", "").replace("withouttcpx", "");
    let efa = tokens(words).iter().any(|word| word.starts_with("efa"));
    let verbs = names_verbs(words);
    let mut said = "";
    if let (true, Some(out)) = (efa || verbs, &mut spec.scale_out) {
        // Where a table names several networks, columns of what needs InfiniBand are of that.
        let transport = if verbs { Transport::Verbs } else { Transport::Efa };
        if transport == Transport::Efa && out.transport != Transport::Efa {
            let shipped = ClusterSpec::find(with_efa(architecture))?;
            out.latency = shipped.scale_out.map_or(out.latency.clone(), |efa| efa.latency);
            said = ", EFA";
        }
        out.transport = transport;
    }
    let Some(out) = spec.scale_out.as_mut().filter(|_| text.contains("tcpx")) else { return Ok(said) };
    let part = if text.contains("tcpxo") { 1.0 } else { OF_WIRE_TCPX };
    out.latency.value = Seconds::new(BY_HOST);
    let most = out.raw.value * part;
    out.achieved.value = out.achieved.value.min(most);
    out.p2p.value = out.p2p.value.min(most);
    Ok(said)
}
