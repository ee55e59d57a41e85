//! What sweeps and searches are asked alike: the model and its machine, and lists of values.

use super::Case;
use crate::error::{Error, Result};
use crate::spec::{Documents, Dtype, LlmSpec};

/// The model that is trained, which may be without its modules of multi-token prediction.
pub fn trained(model: &str, no_mtp: bool) -> Result<LlmSpec> {
    let model = LlmSpec::find(model)?;
    if no_mtp { model.without_mtp() } else { Ok(model) }
}

/// Sequences of a step where nothing is said of them: a microbatch on each replica.
pub fn usual_batch(dp: u32, micro_batch: u64) -> u64 {
    u64::from(dp).saturating_mul(micro_batch)
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
