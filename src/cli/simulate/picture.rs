//! The picture of a simulated step, with all of what was asked for above it.

use super::super::chosen::Chosen;
use crate::error::{Error, Result};
use crate::plan::{Axis, Group, Lane, Plan};
use crate::plot::step_timeline::{Critical, Words, step_timeline};
use crate::report::Row;
use crate::report::human::{counted, packed, seconds};
use crate::sim::why::Stretch;
use crate::sim::{Fault, Simulated};
use std::path::{Path, PathBuf};

/// More faults than this are counted.
const MOST_FAULTS: usize = 3;

/// Writes it. Errors: a file that is no picture.
pub(super) fn draw(path: &Path, chosen: &Chosen, of: (&Plan, &[Fault]), found: &Simulated) -> Result<Vec<PathBuf>> {
    let picture = path.extension().is_some_and(|e| e == "svg" || e == "png");
    let Some(stem) = path.file_stem().filter(|_| picture) else {
        let why = format!("{} is no picture; let it end with .svg or .png", path.display());
        return Err(Error::spec("--timeline", "file", why));
    };
    let critical = |s: &Stretch| Critical { rank: s.rank, from: s.from_s, seconds: s.seconds };
    let chain: Vec<Critical> = found.why.iter().flat_map(|why| &why.critical_path).map(critical).collect();
    let words = Words { asked: asked(chosen, of.0), unusual: unusual(chosen, of, found)?, lanes: lanes(of.0) };
    let dir = path.parent().unwrap_or(Path::new("."));
    step_timeline(&found.timeline, &chain, &words, dir, &stem.to_string_lossy())
}

/// Whatever makes another step of it.
fn asked(chosen: &Chosen, plan: &Plan) -> Vec<String> {
    let (about, par) = (&plan.about, &plan.about.par);
    let degrees = [("pp", par.pp), ("vp", par.vp), ("dp", par.dp), ("ring", par.ring), ("ulysses", par.ulysses)];
    let degrees = degrees.into_iter().chain([("tp", par.tp), ("ep", par.ep)]).filter(|(_, n)| *n > 1);
    let split: Vec<String> = degrees.map(|(axis, n)| format!("{axis} {n}")).collect();
    let mut parts = vec![about.model.clone(), chosen.case.cluster.spec.name.clone()];
    parts.push(format!("stack {}, {}", chosen.case.stack.name, about.dtype));
    parts.extend((!split.is_empty()).then(|| split.join(" x ")));
    let sequences = counted(about.global_batch, "sequence");
    let mut work = format!("{sequences} of {} tokens", about.seq_len);
    if about.micro_batch > 1 {
        work.push_str(&format!(", {} at a time", about.micro_batch));
    }
    parts.push(work + &packed(&about.documents));
    parts.push(format!("zero {}, recompute {}", par.zero, par.recompute.name()));
    let options = par.options.to_string();
    parts.extend((options != "default").then_some(options));
    parts
}

/// That it is never over or does not fit, and what was wrong with the machine.
fn unusual(chosen: &Chosen, (plan, faults): (&Plan, &[Fault]), found: &Simulated) -> Result<Vec<String>> {
    let case = &chosen.case;
    let mut parts = vec![];
    parts.extend(found.hang.as_ref().map(|hang| format!("never over: nothing moves after {}", seconds(hang.at_s))));
    let mut row = Row::asked(&plan.about, &case.cluster, &case.stack);
    row.set_layout(&case.footprint(plan)?, &case.place(&case.aside(plan)));
    parts.extend((!row.feasible).then(|| format!("does not fit: {}", row.why)));
    parts.extend(faults.iter().take(MOST_FAULTS).map(Fault::said));
    let more = faults.len().saturating_sub(MOST_FAULTS);
    parts.extend((more > 0).then(|| format!("{} more", counted(more as u64, "fault"))));
    Ok(parts)
}

/// A lane is named after the axes that its group lies along, and not after those that have one rank.
fn lanes(plan: &Plan) -> Vec<String> {
    let name = |lane: &Lane| match lane {
        Lane::Comm(Group::Axes { view, axes }, i) => {
            let mesh = plan.views.get(*view as usize);
            let wide = |axis: &&Axis| mesh.is_some_and(|mesh| mesh.degree(**axis) > 1);
            let wide: Vec<&str> = axes.iter().filter(wide).map(|axis| axis.name()).collect();
            if wide.is_empty() { lane.label() } else { format!("comm.{}.{i}", wide.join("+")) }
        }
        _ => lane.label(),
    };
    plan.lanes.iter().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{LlmSpec, Parallelism, Recompute};
    use crate::sweep::{Case, Point, Said};

    fn chosen(par: Parallelism) -> (Chosen, Plan) {
        let case = Case::new(LlmSpec::find("llama-3-8b").unwrap(), "dgx-h100", "nccl-fa3", 8, None).unwrap();
        let point = Point { seq_len: 1024, global_batch: 16, micro_batch: 1, par };
        let plan = case.plan(&point).unwrap();
        (Chosen { case, point, loaded: None, taken: None, said: Said::default() }, plan)
    }

    #[test]
    fn the_heading_has_all_that_was_asked_and_lanes_the_axes_that_there_are() {
        let options = "fp8".parse().unwrap();
        let of = Parallelism { options, zero: 1, recompute: Recompute::Full, ..Parallelism::default() };
        let (chosen, plan) = chosen(Parallelism { dp: 4, pp: 2, vp: 2, ..of });
        let said = asked(&chosen, &plan).join(" | ");
        for words in ["stack nccl-fa3, bf16", "pp 2 x vp 2 x dp 4", "zero 1, recompute full", "16 sequences of 1024"] {
            assert!(said.contains(words), "{words}: {said}");
        }
        assert!(said.ends_with("fp8"), "{said}");
        let names = lanes(&plan);
        assert!(names.iter().any(|name| name.starts_with("comm.dp.")), "{names:?}");
        assert!(!names.iter().any(|name| name.contains("cp") || name.contains("up")), "{names:?}");
    }
}
