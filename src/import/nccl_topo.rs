//! The topology of a node as NCCL sees it: the XML that `NCCL_TOPO_DUMP_FILE` names.

use super::node::{Nic, Node, islands};
use super::peer_links::PeerLinks;
use crate::error::{Error, Result};
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};
use std::collections::BTreeMap;

/// What to do about a file that is not as NCCL writes it.
const AGAIN: &str = "let NCCL write the file again (NCCL_TOPO_DUMP_FILE)";

/// What to do about GPUs of several kinds.
const ONE_KIND: &str = "a cluster has GPUs of one kind, so let NCCL see those of one alone (CUDA_VISIBLE_DEVICES)";

/// Reads a dump; `file` is what errors call it.
pub fn parse(file: &str, text: &str) -> Result<Node> {
    let mut reader = Reader::from_str(text);
    let mut seen = Seen::default();
    loop {
        let at = line_at(text, reader.buffer_position());
        let wrong = |why: String| Error::spec(file, format!("line {at}"), format!("{why}; {AGAIN}"));
        match reader.read_event() {
            Ok(Event::Start(tag)) => {
                seen.tag(&tag).map_err(wrong)?;
                seen.open.push((tag.name().as_ref() as &str).to_string());
            }
            Ok(Event::Empty(tag)) => seen.tag(&tag).map_err(wrong)?,
            Ok(Event::End(_)) => drop(seen.open.pop()),
            Ok(Event::Eof) => match seen.open.last() {
                Some(tag) => return Err(wrong(format!("the file ends inside <{tag}>: it is cut off"))),
                None => break,
            },
            Ok(_) => {}
            Err(e) => {
                let at = line_at(text, reader.error_position());
                return Err(Error::spec(file, format!("line {at}"), format!("not valid XML ({e}); {AGAIN}")));
            }
        }
    }
    if seen.node.gpus == 0 {
        return Err(Error::spec(file, "contents", "no <gpu> at all; give the file that NCCL_TOPO_DUMP_FILE names"));
    }
    Ok(seen.node())
}

fn line_at(text: &str, byte: u64) -> usize {
    text.as_bytes().iter().take(byte as usize).filter(|b| **b == b'\n').count() + 1
}

#[derive(Default)]
struct Seen {
    node: Node,
    /// Tags that are not closed yet.
    open: Vec<String>,
    /// Compute capability of the GPUs, as the file has it.
    sm: Option<u32>,
    /// The <cpu> read last has a GPU.
    counted: bool,
    /// Maker and id of the <pci> read last.
    pci: Option<(u32, u32)>,
    /// Where the <pci> read last sits, that of each GPU, and where its links lead to, with how many.
    busid: String,
    gpus: Vec<String>,
    targets: Vec<(usize, String, u32)>,
    /// Links that the GPU read last has, and of all the fewest.
    links: u32,
    fewest: Option<u32>,
    nets: BTreeMap<String, f64>,
}

impl Seen {
    fn tag(&mut self, tag: &BytesStart) -> std::result::Result<(), String> {
        match tag.name().as_ref() as &str {
            "cpu" => self.counted = false,
            "pci" => {
                self.busid = attribute(tag, "busid")?.unwrap_or_default();
                self.pci = id(tag, "vendor")?.zip(id(tag, "device")?);
            }
            "gpu" => self.gpu(tag)?,
            "nvlink" | "xgmi" => {
                let links: u32 = number(tag, "count")?.unwrap_or(1);
                // To HIP gfx90a is 9.0, too, and no Hopper.
                self.node.sm = self.node.sm.filter(|sm| (*sm, tag.name().as_ref() as &str) != (90, "xgmi"));
                self.links = self.links.saturating_add(links);
                self.targets.extend(attribute(tag, "target")?.map(|to| (self.gpus.len().saturating_sub(1), to, links)));
                // 0x0680.. is the class of a bridge: NVSwitch.
                self.node.switched |= attribute(tag, "tclass")?.is_some_and(|class| class.starts_with("0x0680"));
            }
            "net" => {
                let name = attribute(tag, "name")?.or(attribute(tag, "dev")?).unwrap_or_default();
                let megabits: f64 = number(tag, "speed")?.ok_or("a <net> without its `speed` in Mb/s")?;
                if !(megabits > 0.0 && megabits.is_finite()) {
                    return Err(format!("speed: {megabits} Mb/s is not above zero"));
                }
                self.nets.insert(name, megabits * 1e6 / 8.0);
            }
            _ => {}
        }
        Ok(())
    }

    fn gpu(&mut self, tag: &BytesStart) -> std::result::Result<(), String> {
        self.close_gpu();
        self.node.gpus += 1;
        self.gpus.push(self.busid.clone());
        if !std::mem::replace(&mut self.counted, true) {
            self.node.sockets += 1;
        }
        let sm: Option<u32> = number(tag, "sm")?;
        if let (Some(sm), Some(other)) = (sm, self.sm.filter(|other| Some(*other) != sm)) {
            return Err(format!("sm: {sm}, where another GPU has {other}; {ONE_KIND}"));
        }
        let pci = self.pci.or(self.node.pci);
        if let (Some((_, id)), Some((_, other))) = (pci, self.node.pci.filter(|other| Some(*other) != pci)) {
            return Err(format!("device: {id:#06x}, where another GPU has {other:#06x}; {ONE_KIND}"));
        }
        self.node.pci = pci;
        self.sm = sm.or(self.sm);
        self.node.sm = sm.or(self.node.sm);
        Ok(())
    }

    fn close_gpu(&mut self) {
        let links = std::mem::take(&mut self.links);
        if self.node.gpus > 0 {
            self.fewest = Some(self.fewest.map_or(links, |few| few.min(links)));
        }
    }

    fn node(mut self) -> Node {
        self.close_gpu();
        self.node.links = self.fewest.unwrap_or(0);
        if !self.node.switched && self.node.links > 0 {
            let at = |busid: &String| self.gpus.iter().position(|gpu| gpu == busid);
            let mut between: BTreeMap<(usize, usize), u32> = BTreeMap::new();
            for (gpu, target, links) in &self.targets {
                let Some(other) = at(target) else { continue };
                let all = between.entry((*gpu, other)).or_default();
                *all = all.saturating_add(*links);
            }
            self.node.islands = islands(self.gpus.len(), between.keys().copied());
            self.node.peer_links = PeerLinks::new(self.gpus.len(), |a, b| between.get(&(a, b)).copied().unwrap_or(0));
        }
        self.node.nics = self.nets.into_iter().map(|(name, rate)| Nic { name, rate: Some(rate) }).collect();
        self.node
    }
}

fn attribute(tag: &BytesStart, name: &str) -> std::result::Result<Option<String>, String> {
    let found = tag.try_get_attribute(name).map_err(|e| format!("{name}: {e}"))?;
    let value = found.map(|a| a.value.to_string());
    Ok(value)
}

/// A number as the PCI bus has it, 0x10de; none where it cannot be read.
fn id(tag: &BytesStart, name: &str) -> std::result::Result<Option<u32>, String> {
    let text = attribute(tag, name)?;
    Ok(text.and_then(|text| u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()))
}

fn number<T: std::str::FromStr>(tag: &BytesStart, name: &str) -> std::result::Result<Option<T>, String> {
    let Some(text) = attribute(tag, name)? else { return Ok(None) };
    text.trim().parse().map(Some).map_err(|_| format!("{name}: {text:?} is no number"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const XML: &str = r#"<system version="1">
  <cpu numaid="0" arch="x86_64" vendor="GenuineIntel">
    <pci busid="0000:1b:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
      <gpu dev="0" sm="90" rank="0" gdr="1">
        <nvlink target="0000:c0:00.0" count="9" tclass="0x068000"/>
        <nvlink target="0000:c1:00.0" count="9" tclass="0x068000"/>
      </gpu>
    </pci>
    <pci busid="0000:1c:00.0" class="0x020700">
      <nic><net name="mlx5_0" dev="0" speed="400000" port="1" latency="0" guid="0x1" maxconn="131072" gdr="1"/></nic>
    </pci>
  </cpu>
  <cpu numaid="1"><pci busid="0000:9b:00.0"><gpu dev="1" sm="90" rank="1">
      <nvlink target="0000:c0:00.0" count="18" tclass="0x068000"/></gpu></pci></cpu>
</system>"#;

    #[test]
    fn a_dump_is_read() {
        let node = parse("x.xml", XML).unwrap();
        assert_eq!((node.gpus, node.sm, node.links, node.switched, node.sockets), (2, Some(90), 18, true, 2));
        assert_eq!(node.nics, [Nic { name: "mlx5_0".into(), rate: Some(50e9) }]);
    }

    /// A GPU's <pci> is around it, that of a NIC may come between.
    #[test]
    fn gpus_have_the_id_of_their_pci() {
        assert_eq!(parse("x.xml", XML).unwrap().pci, None);
        let with = |at: &str, id: &str| format!("{at} vendor=\"0x10de\" device=\"{id}\"");
        let first = |id: &str| XML.replace("class=\"0x030200\"", &with("class=\"0x030200\"", id));
        let node = parse("x.xml", &first("0x2329")).unwrap();
        assert_eq!((node.pci, node.like("x.xml").unwrap().0.gpu.as_str()), (Some((0x10de, 0x2329)), "h20-sxm5"));
        let nic = XML.replace("class=\"0x020700\"", "class=\"0x020700\" vendor=\"0x15b3\" device=\"0x1021\"");
        assert_eq!(parse("x.xml", &nic).unwrap().pci, None);
        assert_eq!(parse("x.xml", &first("what")).unwrap().pci, None);
        let second = |id: &str| first("0x2329").replace("busid=\"0000:9b:00.0\"", &with("busid=\"0000:9b:00.0\"", id));
        assert_eq!(parse("x.xml", &second("0x2329")).unwrap(), node);
        let mixed = parse("x.xml", &second("0x2330")).unwrap_err().to_string();
        assert!(mixed.contains("device: 0x2330, where another GPU has 0x2329; a cluster has GPUs"), "{mixed}");
    }

    #[test]
    fn errors_name_the_line() {
        let bad = parse("x.xml", &XML.replace("400000", "fast")).unwrap_err().to_string();
        assert!(bad.contains("x.xml: line 1") && bad.contains("speed") && bad.contains("fast"), "{bad}");
        assert!(bad.contains("write the file again"), "{bad}");
        let broken = parse("x.xml", "<system>\n<gpu dev=0></cpu>").unwrap_err().to_string();
        assert!(broken.contains("line 2") && broken.contains("write the file again"), "{broken}");
        let mixed = parse("x.xml", &XML.replacen("sm=\"90\"", "sm=\"80\"", 1)).unwrap_err().to_string();
        assert!(mixed.contains("sm: 90, where another GPU has 80") && mixed.contains("line 13"), "{mixed}");
        assert!(parse("x.xml", "<system/>").unwrap_err().to_string().contains("no <gpu>"));
        let cut = parse("x.xml", &XML[..XML.rfind("</gpu>").unwrap()]).unwrap_err().to_string();
        assert!(cut.contains("line 14") && cut.contains("<gpu>") && cut.contains("cut off"), "{cut}");
    }

    #[test]
    fn pairs_with_bridges_are_islands_and_sockets_have_gpus() {
        let gpu = |at: u32, to: u32| {
            format!(
                "<pci busid=\"0000:{at}:00.0\"><gpu dev=\"{at}\" sm=\"80\"><nvlink target=\"0000:{to}:00.0\" \
                 count=\"12\" tclass=\"0x030200\"/></gpu></pci>"
            )
        };
        let of = |pairs: [(u32, u32); 4]| {
            let gpus: String = pairs.iter().map(|&(at, to)| gpu(at, to)).collect();
            parse("x.xml", &format!("<system><cpu numaid=\"0\"></cpu><cpu numaid=\"1\">{gpus}</cpu></system>")).unwrap()
        };
        let pairs = of([(0, 1), (1, 0), (2, 3), (3, 2)]);
        assert_eq!((pairs.islands, pairs.sockets, pairs.links), (2, 1, 12));
        let around = of([(0, 1), (1, 2), (2, 3), (3, 0)]);
        assert_eq!(
            (around.islands, around.peer_links),
            (1, PeerLinks::new(4, |a, b| if b == (a + 1) % 4 { 12 } else { 0 }))
        );
    }

    #[test]
    fn a_machine_of_amd_is_known() {
        let xml = "<system><cpu><pci busid=\"a\"><gpu dev=\"0\" sm=\"94\" gcn=\"gfx942\"><xgmi target=\"b\" count=\"1\"/>\
                   </gpu></pci><pci busid=\"b\"><gpu dev=\"1\" sm=\"94\"><xgmi target=\"a\" count=\"1\"/></gpu></pci></cpu></system>";
        let node = parse("x.xml", xml).unwrap();
        assert_eq!((node.like("x.xml").unwrap().0.name.as_str(), node.islands), ("mi300x-8x400", 1));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(?s).{0,200}", tags in prop::collection::vec(
            "(<gpu dev=\"[0-9]{1,3}\" sm=\"[0-9a]{1,12}\">|<nvlink count=\"[-0-9]{1,12}\"/>|</gpu>|<net speed=\"[0-9e]{1,9}\"/>|&|<|\n)", 0..20)) {
            let _ = parse("x", &text);
            let _ = parse("x", &tags.join(""));
        }
    }
}
