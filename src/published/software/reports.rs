//! How the makers of a model trained it, by their own report: what a run of it does of which no more is known than tokens
//! and GPU-hours, as model cards have them.

use crate::published::row::case::Training;
use crate::published::row::words::squeezed;

/// What a report says of the run that made a model.
struct Report {
    /// Names of the model begin with it.
    model: &'static str,
    gpu: &'static str,
    system: &'static str,
    precision: &'static str,
    recompute: &'static str,
    /// tp, pp, ep.
    degrees: [u32; 3],
    seq: u64,
    /// Sequences at a time, and of a step.
    batch: [u64; 2],
    /// Where a source does not say how many there were.
    gpus: u32,
    source: &'static str,
}

const fn report(model: &'static str, gpu: &'static str, system: &'static str, source: &'static str) -> Report {
    let (precision, recompute) = ("bf16", "");
    Report { model, gpu, system, precision, recompute, degrees: [1, 1, 1], seq: 2048, batch: [1, 1], gpus: 0, source }
}

/// All share the optimizer's states out over replicas (ZeRO 1).
const REPORTS: &[Report] = &[
    Report {
        precision: "FP8",
        degrees: [1, 16, 64],
        seq: 4096,
        batch: [1, 15360],
        gpus: 2048,
        ..report("deepseekv3", "h800", "HAI-LLM (DualPipe)", "arXiv:2412.19437, sections 3.2 and 4.2")
    },
    // It does not say of how many GPUs: one copy of every expert.
    Report {
        degrees: [1, 16, 8],
        seq: 4096,
        batch: [1, 9216],
        gpus: 128,
        ..report("deepseekv2", "h800", "HAI-LLM (zero bubble)", "arXiv:2405.04434, sections 3.1.2 and 3.1.3")
    },
    Report {
        recompute: "full",
        degrees: [4, 12, 1],
        batch: [2, 2048],
        gpus: 384,
        ..report("bloom176b", "a100", "Megatron-DeepSpeed (BigScience)", "arXiv:2211.05100, section 3.3")
    },
    Report {
        degrees: [4, 4, 1],
        seq: 8192,
        batch: [1, 512],
        gpus: 512,
        ..report("starcoderbase", "a100", "Megatron-LM", "arXiv:2305.06161, section 5.6")
    },
    pythia("pythia69b", 2, "github:EleutherAI/pythia@31654e5 models/6.9B/pythia-6.9b.yml"),
    pythia("pythia12b", 4, "github:EleutherAI/pythia@55e1182 models/12B/pythia-12b.yml"),
];

/// Two passes a step, each of eight sequences a rank.
const fn pythia(model: &'static str, tp: u32, source: &'static str) -> Report {
    Report {
        precision: "fp16",
        recompute: "full",
        degrees: [tp, 1, 1],
        batch: [8, 1024],
        gpus: 64 * tp,
        ..report(model, "a100", "GPT-NeoX (FlashAttention)", source)
    }
}

/// The run as its makers report it, and where; nothing, where more of it is stated than its size, or nobody is known to have
/// reported on it.
pub fn filled_in(run: &Training) -> Option<(Training, String)> {
    let degrees = [run.tp, run.pp, run.vp, run.cp, run.ulysses, run.ring, run.ep, run.dp];
    let steps = [run.seq, run.global_batch, run.micro_batch];
    let open = run.system.is_empty() && degrees.iter().all(Option::is_none) && steps.iter().all(Option::is_none);
    let (model, gpu) = (squeezed(&run.model), squeezed(&run.gpu));
    let fits = |of: &&Report| model.starts_with(of.model) && gpu.starts_with(of.gpu);
    let of = REPORTS.iter().find(fits).filter(|of| {
        let [tp, pp, ep] = of.degrees;
        let gpus = run.gpus.unwrap_or(of.gpus);
        let dp = gpus / (tp * pp);
        let shared = dp.is_multiple_of(ep) && of.batch[1].is_multiple_of(u64::from(dp) * of.batch[0]);
        open && dp > 0 && gpus.is_multiple_of(tp * pp) && shared
    })?;
    let [tp, pp, ep] = of.degrees;
    let or = |stated: &str, reported: &str| if stated.is_empty() { reported.into() } else { stated.into() };
    let filled = Training {
        system: of.system.into(),
        precision: or(&run.precision, of.precision),
        recompute: or(&run.recompute, of.recompute),
        zero: or(&run.zero, "ZeRO-1"),
        gpus: run.gpus.or(Some(of.gpus)),
        tp: Some(tp),
        pp: Some(pp),
        ep: Some(ep),
        seq: Some(of.seq),
        micro_batch: Some(of.batch[0]),
        global_batch: Some(of.batch[1]),
        ..run.clone()
    };
    Some((filled, format!("system, split and batch: not stated; those of its makers taken ({})", of.source)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_which_only_the_size_is_known_is_that_of_its_makers() {
        let card = Training {
            model: "DeepSeek-V3 (37B active)".into(),
            gpu: "H800-SXM-80GB".into(),
            gpus: Some(2048),
            ..Training::default()
        };
        let (filled, said) = filled_in(&card).unwrap();
        assert_eq!((filled.pp, filled.ep, filled.global_batch), (Some(16), Some(64), Some(15360)));
        assert!(said.contains("arXiv:2412.19437") && filled.zero == "ZeRO-1", "{said}");
        assert_eq!(filled_in(&Training { gpus: None, ..card.clone() }).unwrap().0, filled);
        for stated in [
            Training { system: "Megatron-LM".into(), ..card.clone() },
            Training { gpus: Some(2050), ..card.clone() },
            Training { seq: Some(8192), ..card.clone() },
            Training { tp: Some(2), ..card.clone() },
            Training { gpu: "H100-SXM-80GB".into(), ..card.clone() },
            Training { model: "GPT-175B".into(), ..card },
        ] {
            assert_eq!(filled_in(&stated), None);
        }
    }
}
