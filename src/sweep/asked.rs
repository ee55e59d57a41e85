//! What sweeps and searches are asked alike: the model and its machine, and lists of values.

use super::Case;
use crate::cluster::Cluster;
use crate::error::{Error, Result};
use crate::spec::{Architecture, ClusterSpec, Documents, Dtype, GpuSpec, LlmSpec};

/// The model that is trained, which may be without its modules of multi-token prediction.
pub fn trained(model: &str, no_mtp: bool) -> Result<LlmSpec> {
    let model = LlmSpec::find(model)?;
    if no_mtp { model.without_mtp() } else { Ok(model) }
}

/// GPUs of a cluster where nothing is said of them: a few nodes, or what its only node has.
pub fn usual_gpus(cluster: &ClusterSpec, gpu: &GpuSpec) -> u32 {
    let usual = if gpu.architecture == Architecture::Cpu { 8 } else { 64 };
    let most = if cluster.scale_out.is_none() { usual.min(cluster.gpus_per_node) } else { usual };
    (1..=most).rev().find(|&gpus| Cluster::new(cluster, gpu, gpus).is_ok()).unwrap_or(most)
}

/// Sequences of a step where nothing is said of them: a microbatch on each replica.
pub fn usual_batch(dp: u32, micro_batch: u64) -> u64 {
    u64::from(dp).saturating_mul(micro_batch)
}

/// Ranks that share the experts of a layer where nothing is said of them: as many within a node as divide the experts, and the
/// ranks of a stage with each degree of `pp` that comes out even. 1 where there are no experts.
pub fn usual_ep(model: &LlmSpec, gpus: u32, pp: &[u32], per_node: u32) -> u32 {
    let Some(moe) = model.moe else { return 1 };
    let stages = || pp.iter().filter(|pp| **pp > 0 && gpus.is_multiple_of(**pp)).map(|pp| gpus / pp);
    let divides = |n: &u32| moe.experts.is_multiple_of(u64::from(*n)) && stages().all(|ranks| ranks.is_multiple_of(*n));
    (1..=per_node.min(gpus)).rev().find(divides).unwrap_or(1)
}

/// What all points of a study share, in the words of its study.json.
pub struct Asked<'a> {
    pub model: LlmSpec,
    pub cluster: &'a str,
    pub stack: &'a str,
    pub gpus: u32,
    pub dtype: Dtype,
    pub documents: &'a Documents,
    pub routing: Option<&'a str>,
}

impl Asked<'_> {
    pub fn case(self) -> Result<Case> {
        let mut case = Case::new(self.model, self.cluster, self.stack, self.gpus, Some(self.dtype))?;
        case.documents = self.documents.clone();
        if let Some(words) = self.routing {
            case.routing = words.parse()?;
        }
        Ok(case)
    }
}

/// Refuses lists without a value, and with a 0. `lists`: the name of each, and its smallest value, if it has any.
pub fn above_zero(command: &str, lists: &[(&str, Option<u64>)]) -> Result<()> {
    for (field, least) in lists {
        let why = match least {
            None => "the list is empty; give at least one value",
            Some(0) => "0 is in the list; the least is 1",
            Some(_) => continue,
        };
        return Err(Error::spec(command, field, why));
    }
    Ok(())
}

pub fn least<N: Copy + Ord + Into<u64>>(values: &[N]) -> Option<u64> {
    values.iter().min().map(|&n| n.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_that_say_nothing_are_refused_by_name() {
        let said = |lists: &[(&str, Option<u64>)]| above_zero("sweep", lists).err().map(|e| e.to_string());
        assert_eq!(said(&[("tp", least(&[2u32, 1])), ("seq_len", least(&[8u64]))]), None);
        let empty = said(&[("tp", Some(1)), ("pp", least::<u32>(&[]))]).unwrap();
        assert_eq!(empty, "sweep: pp: the list is empty; give at least one value");
        assert_eq!(said(&[("tp", least(&[4u32, 0]))]).unwrap(), "sweep: tp: 0 is in the list; the least is 1");
    }

    #[test]
    fn experts_are_shared_within_a_node_and_a_stage() {
        let of = |model: &str, gpus, pp: &[u32], node| usual_ep(&LlmSpec::find(model).unwrap(), gpus, pp, node);
        assert_eq!(of("llama-3-8b", 64, &[1], 8), 1);
        assert_eq!(of("qwen3-30b-a3b", 64, &[1], 8), 8);
        // Of 128 experts three ranks have no equal parts, and a node may have fewer GPUs.
        assert_eq!([of("qwen3-30b-a3b", 12, &[1], 8), of("qwen3-30b-a3b", 64, &[1], 6)], [4, 4]);
        // A stage of eight has two ranks; degrees that do not come out even have no stages.
        assert_eq!([of("qwen3-30b-a3b", 16, &[1, 8], 8), of("qwen3-30b-a3b", 16, &[1, 0, 5], 8)], [2, 8]);
        assert_eq!(of("qwen3-30b-a3b", 0, &[1], 8), 1);
    }

    #[test]
    fn documents_and_routing_are_the_cases() {
        let documents: Documents = vec![2048, 6144].into();
        let asked = |routing| Asked {
            model: trained("qwen3-30b-a3b", false).unwrap(),
            cluster: "dgx-h100",
            stack: "nccl-fa3",
            gpus: 8,
            dtype: Dtype::Bf16,
            documents: &documents,
            routing,
        };
        let case = asked(Some("zipf:1.0")).case().unwrap();
        assert!(case.documents == documents && case.routing == "zipf:1.0".parse().unwrap());
        assert!(asked(Some("zipf")).case().is_err());
    }
}
