//! The shipped software stacks, and what becomes of one where a run's software does something otherwise.

use crate::error::Result;
use crate::report::human::seconds;
use crate::spec::{Architecture, GpuSpec, Origin, Sourced, StackSpec, shipped};
use crate::units::BytesPerSec;

/// Shipped stacks, read once for all cases.
pub struct Stacks {
    all: Vec<StackSpec>,
}

impl Stacks {
    /// The stack as it is where nothing fuses the operators of a block.
    pub fn eager(&self, stack: StackSpec) -> StackSpec {
        let eager = self.all.iter().find(|of| of.name == "torch-eager");
        let (unfused, kept) = eager.map_or((None, None), |of| (of.unfused.clone(), of.kept.clone()));
        StackSpec { unfused, kept, ..stack }
    }

    /// The stack as it is where PyTorch's operators of indices move the rows of experts, whatever it fuses besides.
    pub fn indexed(&self, stack: StackSpec) -> StackSpec {
        let rows = self.all.iter().find(|of| of.name == "torch-experts").and_then(|of| of.unfused.clone());
        let unfused = match (stack.unfused, rows) {
            (Some(mut others), Some(rows)) => {
                others.value.extend(rows.value);
                Some(others)
            }
            (others, rows) => rows.or(others),
        };
        StackSpec { unfused, ..stack }
    }

    /// The stack with the library's settings for sends that come with recipes.
    pub fn tuned(&self, stack: StackSpec) -> StackSpec {
        let tuned_sends = self.all.iter().find_map(|of| of.tuned_sends.clone());
        StackSpec { tuned_sends, ..stack }
    }

    /// The name of a stack as a run has it: that of a shipped one that is the same; else what it has otherwise than the
    /// shipped one of its name, in words, beside that.
    pub fn named(&self, stack: &StackSpec) -> (String, Option<String>) {
        let same = |of: &&StackSpec| StackSpec { name: stack.name.clone(), ..(*of).clone() } == *stack;
        if let Some(same) = self.all.iter().find(same) {
            return (same.name.clone(), None);
        }
        let Some(plain) = self.all.iter().find(|of| of.name == stack.name) else { return (stack.name.clone(), None) };
        let launch = |of: &StackSpec| (of.host_launch.value, of.forward_launches.clone());
        let operators = |of: &StackSpec| (of.unfused.clone(), of.kept.clone());
        // Whatever else is otherwise has no words of its own.
        let rest = StackSpec {
            tuned_sends: plain.tuned_sends.clone(),
            group_start: plain.group_start.clone(),
            host_launch: plain.host_launch.clone(),
            forward_launches: plain.forward_launches.clone(),
            unfused: plain.unfused.clone(),
            kept: plain.kept.clone(),
            slower: plain.slower.clone(),
            no_pat: plain.no_pat.clone(),
            tree_rate: plain.tree_rate.clone(),
            ..stack.clone()
        };
        let differs = [
            (stack.tuned_sends != plain.tuned_sends, "sends tuned as stack megatron-bridge has them".to_string()),
            (stack.group_start != plain.group_start, "experts of a rank in one kernel".into()),
            (launch(stack) != launch(plain), format!("{} of the CPU an op", seconds(stack.host_launch.value.value()))),
            (operators(stack) != operators(plain), "operators that are not fused".into()),
            (stack.slower != plain.slower, "slower kernels".into()),
            (stack.no_pat != plain.no_pat, "a library without parallel aggregated trees".into()),
            (stack.tree_rate != plain.tree_rate, "trees of another rate".into()),
            (rest != *plain, "other constants".into()),
        ];
        let said: Vec<String> = differs.into_iter().filter(|(differs, _)| *differs).map(|(_, said)| said).collect();
        let said = (!said.is_empty()).then(|| format!("stack {} with {}", stack.name, said.join(", ")));
        (stack.name.clone(), said)
    }

    /// The stack with a library whose trees were slower.
    pub fn with_slow_trees(&self, stack: &StackSpec) -> std::result::Result<StackSpec, String> {
        let older = self.all.iter().find_map(|of| of.tree_rate.clone());
        Ok(StackSpec { tree_rate: Some(older.ok_or("no shipped stack has an older library")?), ..stack.clone() })
    }

    /// The stack with a library that was told to take no trees: they would never end.
    pub fn without_trees(stack: &StackSpec) -> StackSpec {
        let (value, source) = (BytesPerSec::new(1.0), "NCCL_ALGO=Ring".into());
        StackSpec { tree_rate: Some(Sourced { value, source, provenance: Origin::Derived }), ..stack.clone() }
    }

    pub fn shipped() -> Result<Stacks> {
        Ok(Stacks { all: shipped("stack").map(StackSpec::find).collect::<Result<_>>()? })
    }

    /// The stack that a company has of its own, where the GPU has its attention kernel.
    pub fn own(&self, name: &str, gpu: &GpuSpec) -> Option<&StackSpec> {
        self.all.iter().find(|s| s.name == name && gpu.attention.contains_key(&s.attention_kernel.value))
    }

    /// The stack with the first of the kernels that the GPU has, or why there is none.
    pub fn with_kernel(&self, kernels: &[&str], gpu: &GpuSpec) -> std::result::Result<&StackSpec, String> {
        let there = |s: &&StackSpec| !s.fuses_attention() || gpu.attention.contains_key(&s.attention_kernel.value);
        let of_gpu = || self.all.iter().filter(there).filter(|s| of_maker(&s.name, gpu));
        // Of several with one kernel the plain one, whose name says no more than that.
        let with =
            |kernel: &&str| of_gpu().filter(|s| s.attention_kernel.value == **kernel).min_by_key(|s| s.name.len());
        let wanted = kernels.iter().find_map(with);
        // What fuses nothing runs everywhere: on a GPU from before FlashAttention 2, too.
        let any = || of_gpu().find(|s| s.fuses_attention()).or_else(|| of_gpu().next());
        wanted.or_else(any).ok_or_else(|| {
            let known: Vec<_> = gpu.attention.keys().map(String::as_str).collect();
            format!("stack: none runs an attention kernel that {} has a curve for ({})", gpu.name, known.join(", "))
        })
    }
}

/// The communication library is the maker's.
fn of_maker(stack: &str, gpu: &GpuSpec) -> bool {
    let library = match gpu.architecture {
        Architecture::Cpu => "cpu",
        Architecture::Npu => "hccl",
        _ if gpu.name.starts_with("mi") => "rccl",
        _ if gpu.name.starts_with("tpu") => "tpu",
        _ => "nccl",
    };
    stack.starts_with(library)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::software::habits::Habits;

    /// Rows of experts and norms are what the two ways of PyTorch's operators say, and each leaves the other alone.
    #[test]
    fn what_pytorch_does_not_fuse_adds_up() {
        let stacks = Stacks::shipped().unwrap();
        let of = |stack: StackSpec| stack.unfused.map_or_else(Default::default, |unfused| unfused.value);
        let plain = StackSpec::find("nccl-fa2").unwrap();
        let (eager, indexed) = (of(stacks.eager(plain.clone())), of(stacks.indexed(plain.clone())));
        assert!(eager["norm"] > 1.0 && !eager.contains_key("route_rows"));
        assert!(indexed["route_rows"] > 1.0 && !indexed.contains_key("norm"));
        let both = of(stacks.indexed(stacks.eager(plain)));
        assert_eq!((both["norm"], both["route_rows"]), (eager["norm"], indexed["route_rows"]));
    }

    /// What a user has to say to have the stack that a published run was given.
    #[test]
    fn stacks_are_called_what_they_are() {
        let stacks = Stacks::shipped().unwrap();
        let plain = StackSpec::find("nccl-cudnn").unwrap();
        assert_eq!(stacks.named(&plain), ("nccl-cudnn".into(), None));
        let tuned = stacks.tuned(plain.clone());
        let (name, said) = stacks.named(&tuned);
        assert_eq!(name, "nccl-cudnn");
        assert!(said.unwrap().contains("sends tuned"));
        assert_eq!(stacks.named(&StackSpec { group_start: None, ..tuned }), ("megatron-bridge".into(), None));
        let one = StackSpec { group_start: None, ..plain.clone() };
        assert_eq!(stacks.named(&one), ("nccl-cudnn-grouped".into(), None));
        let (source, provenance) = (String::new(), Origin::Derived);
        let older = StackSpec { no_pat: Some(Sourced { value: true, source, provenance }), ..plain.clone() };
        let said = |stack: &StackSpec| stacks.named(stack).1.unwrap_or_default();
        assert_eq!(said(&older), "stack nccl-cudnn with a library without parallel aggregated trees");
        assert_eq!(said(&Stacks::without_trees(&plain)), "stack nccl-cudnn with trees of another rate");
        let slower = StackSpec::find("hai-llm").unwrap().slower;
        let widest_head = Some(Sourced { value: 64, source: String::new(), provenance });
        let other = StackSpec { slower, widest_head, ..plain };
        assert_eq!(said(&other), "stack nccl-cudnn with slower kernels, other constants");
    }

    #[test]
    fn kernels_by_system_and_gpu() {
        let stacks = Stacks::shipped().unwrap();
        let kernel = |system: &str, gpu: &str| {
            let gpu = GpuSpec::find(gpu).unwrap();
            stacks.with_kernel(Habits::of(system).kernels, &gpu).unwrap().attention_kernel.value.clone()
        };
        assert_eq!(kernel("MosaicML llm-foundry (FSDP, FlashAttention)", "a100-sxm4-80gb"), "fa1");
        assert_eq!(kernel("a system of next year", "h100-sxm5"), "fa3");
        let gb200 = GpuSpec::find("gb200").unwrap();
        assert_eq!(stacks.with_kernel(&["cudnn"], &gb200).unwrap().name, "nccl-cudnn");
    }
}
