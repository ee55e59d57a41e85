//! Checks of pipelines: how layers are spread over stages, and microbatches go through them.

use super::list;
use crate::error::{Cause, Error, Result};
use crate::spec::{Fold, LlmSpec, Parallelism, Workload};
use crate::strategy::kind::kinds_of;

/// Layers of each virtual stage, the first chunk of every stage before the second chunk of any. Errors: layers that
/// cannot be spread as the options ask.
pub fn layers_of_stages(model: &LlmSpec, par: &Parallelism) -> Result<Vec<u32>> {
    let (l, parts) = (model.layers, u64::from(par.pp) * u64::from(par.vp));
    let o = &par.options;
    let words = [(o.short_ends, "short-ends"), (o.uneven, "uneven")];
    let mut words: Vec<String> = words.iter().filter(|(set, _)| *set).map(|(_, word)| word.to_string()).collect();
    words.extend(o.first_stage.map(|n| format!("first-stage-{n}")));
    words.extend(o.last_stage.map(|n| format!("last-stage-{n}")));
    words.extend((!o.stages.is_empty()).then(|| format!("stages-{}", o.stages)));
    if par.pp == 1 && (par.vp > 1 || !words.is_empty()) {
        let (what, remedy) = match words.first() {
            Some(word) => (word.clone(), "leave it out, or use pp above 1"),
            None => (format!("vp {}", par.vp), "use vp 1 or pp above 1"),
        };
        return Err(Cause::Pp.infeasible(format!("{what} needs a pipeline; {remedy}")));
    }
    if !o.stages.is_empty() {
        return written_out(l, parts, par, &words);
    }
    if o.first_stage.or(o.last_stage).is_some() {
        return layers_by_ends(l, par);
    }
    let short = if o.short_ends { 2 } else { 0 };
    let mut all = match par.vp <= 64 && l > 0 {
        true if (l + short).is_multiple_of(parts) => vec![((l + short) / parts) as u32; parts as usize],
        // Layers of two kinds are unequal work, however they are dealt out.
        true if (o.uneven || short == 0 && kinds_of(model, false).len() > 1) && l >= parts => uneven(l + short, parts),
        _ => return Err(refused(l, short, par)),
    };
    if o.short_ends {
        all[0] -= 1;
        *all.last_mut().expect("a stage at least") -= 1;
    }
    Ok(all)
}

fn refused(l: u64, short: u64, par: &Parallelism) -> Error {
    let good = list((2..=(l + short).min(4096)).filter(|n| (l + short).is_multiple_of(*n)));
    let parts = u64::from(par.pp) * u64::from(par.vp);
    // A stage without a layer is refused, however uneven the others may be.
    let or = match (parts > l, short == 0 && parts > 1 && (l + 2).is_multiple_of(parts)) {
        (true, _) => "",
        (false, true) => ", or option short-ends or uneven",
        (false, false) => ", or option uneven",
    };
    Cause::Pp.infeasible(format!(
        "{l} layers{} do not split evenly over pp {} x vp {} = {parts} parts; use {good} parts{or}",
        if short > 0 { " and 2 for the short ends" } else { "" },
        par.pp,
        par.vp,
    ))
}

/// Layers of each part where they do not divide: as many as any other, or one fewer, fewer on the last and then on the
/// first parts, where head and embedding are.
fn uneven(layers: u64, parts: u64) -> Vec<u32> {
    let fewer = (parts - layers % parts) % parts;
    let least = (layers / parts) as u32;
    (0..parts).map(|part| if fewer == 0 || part + 1 < fewer || part + 1 == parts { least } else { least + 1 }).collect()
}

/// Layers of each part as the options list them, stage by stage.
fn written_out(l: u64, parts: u64, par: &Parallelism, words: &[String]) -> Result<Vec<u32>> {
    let stages = &par.options.stages;
    let why = if let [other, _, ..] = words {
        format!("stages-{stages} says how many layers every stage has, and so does {other}; use one")
    } else if stages.count() != parts {
        let (pp, vp, n) = (par.pp, par.vp, stages.count());
        format!("stages-{stages} are {n} stages, and pp {pp} x vp {vp} are {parts}; write out as many")
    } else if stages.sum() != l {
        format!("stages-{stages} have {} layers, and the model has {l}; write out as many", stages.sum())
    } else {
        return Ok(stages.layers().collect());
    };
    Err(Cause::Pp.infeasible(why))
}

/// Layers of each part where the options say those of the first or the last stage, each of its chunks having as many;
/// the stages between share the rest. In a row of chunks that is folded these are the first and the last chunk, both of
/// the first stage.
fn layers_by_ends(l: u64, par: &Parallelism) -> Result<Vec<u32>> {
    let o = &par.options;
    let [pp, vp] = match o.fold {
        Fold::None => [u64::from(par.pp), u64::from(par.vp)],
        _ => [u64::from(par.pp) * u64::from(par.vp), 1],
    };
    let fault = |why: String| Err(Cause::Pp.infeasible(why));
    if o.short_ends {
        return fault(
            "short-ends says how many layers the ends have, and so does first-stage or last-stage; use one".into(),
        );
    }
    let ends = [("first-stage", o.first_stage), ("last-stage", o.last_stage)];
    for (name, n) in ends.iter().filter_map(|(name, n)| n.map(|n| (name, u64::from(n)))) {
        if !n.is_multiple_of(vp) {
            return fault(format!("{name}-{n} is no multiple of vp {vp}, the chunks of a stage"));
        }
    }
    let [first, last] = ends.map(|(_, n)| n.map(u64::from));
    let given = first.unwrap_or(0) + last.unwrap_or(0);
    let between = (pp - first.iter().chain(&last).count() as u64) * vp;
    let rest = l.saturating_sub(given);
    if given > l || (between == 0 && rest > 0) {
        return fault(format!(
            "first-stage and last-stage have {given} layers of {l}, and pp {} leaves no stage for others",
            par.pp
        ));
    }
    let of_rest = match rest {
        0 => vec![0; between as usize],
        _ if rest.is_multiple_of(between) => vec![(rest / between) as u32; between as usize],
        _ if o.uneven && rest > between => uneven(rest, between),
        _ => {
            let why = format!("{rest} layers between the ends do not split evenly over {between} parts; add uneven");
            return fault(why);
        }
    };
    let mut of_rest = of_rest.into_iter();
    let part = |stage: u64| match (stage, first, last) {
        (0, Some(n), _) => (n / vp) as u32,
        (s, _, Some(n)) if s + 1 == pp => (n / vp) as u32,
        _ => of_rest.next().expect("a part for each stage between"),
    };
    Ok((0..vp).flat_map(|_| 0..pp).map(part).collect())
}

/// Checks a pipeline: interleaved microbatches go through a stage's chunks in groups of as many as there are stages.
pub(super) fn pipeline(model: &LlmSpec, work: &Workload, par: &Parallelism) -> Result<()> {
    layers_of_stages(model, par)?;
    let (m, pp) = (work.global_batch / (u64::from(par.dp) * work.micro_batch), u64::from(par.pp));
    if par.options.overlap_exchange && m < 2 {
        let why = format!(
            "puts the rows of one microbatch beside the compute of another, and there is {m}; use global_batch {} or \
             leave it out",
            2 * u64::from(par.dp) * work.micro_batch
        );
        return Err(Error::option("overlap-exchange", why));
    }
    if par.options.fold != Fold::None {
        return folded(model, par, m, u64::from(par.dp) * work.micro_batch);
    }
    if par.vp > 1 && !m.is_multiple_of(pp) {
        let why = format!(
            "{m} microbatches are not a multiple of pp {pp}, which vp {} needs; use global_batch {} or vp 1",
            par.vp,
            m.div_ceil(pp) * pp * u64::from(par.dp) * work.micro_batch
        );
        return Err(Cause::Vp.infeasible(why));
    }
    Ok(())
}

/// Checks a folded pipeline: DualPipeV fills a row of chunks before it goes back through it (dualpipev.py: `num_chunks
/// >= num_ranks * 2`).
fn folded(model: &LlmSpec, par: &Parallelism, microbatches: u64, at_once: u64) -> Result<()> {
    let (least, fold) = (2 * u64::from(par.pp), par.options.fold);
    let word = match fold {
        Fold::DualPipe => "dualpipe-v",
        Fold::Half => "v-half",
        Fold::Min => "v-min",
        _ => "zb-v",
    };
    if fold == Fold::DualPipe && microbatches < least {
        let why = format!(
            "needs 2 x pp = {least} microbatches or more, and there are {microbatches}; use global_batch {} or leave it out",
            least * at_once
        );
        return Err(Error::option(word, why));
    }
    if layers_of_stages(model, par)?.contains(&0) {
        let why = "needs a layer in every chunk; use a smaller pp, or leave out what takes the ends theirs";
        return Err(Error::option(word, why));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(layers: u64, pp: u32, vp: u32, options: &str) -> std::result::Result<Vec<u32>, String> {
        let model = LlmSpec { layers, ..LlmSpec::find("llama-3-8b").unwrap() };
        let par = Parallelism { pp, vp, options: options.parse().unwrap(), ..Parallelism::default() };
        layers_of_stages(&model, &par).map_err(|e| e.to_string())
    }

    #[test]
    fn layers_come_as_they_are_asked_for() {
        for (all, pp, vp, options, want) in [
            (8, 2, 2, "default", vec![2, 2, 2, 2]),
            (6, 4, 1, "short-ends", vec![1, 2, 2, 1]),
            (2, 2, 2, "short-ends", vec![0, 1, 1, 0]),
            (6, 4, 1, "uneven", vec![1, 2, 2, 1]),
            (7, 4, 1, "uneven", vec![2, 2, 2, 1]),
            (7, 2, 2, "short-ends+uneven", vec![1, 2, 3, 1]),
            (61, 16, 1, "uneven", [vec![3; 2], vec![4; 13], vec![3]].concat()),
            (10, 4, 1, "first-stage-1+last-stage-3", vec![1, 3, 3, 3]),
            (10, 4, 1, "first-stage-2+uneven", vec![2, 3, 3, 2]),
            (10, 2, 2, "last-stage-4", vec![3, 2, 3, 2]),
            (4, 3, 1, "first-stage-0+last-stage-0", vec![0, 4, 0]),
            (4, 2, 1, "first-stage-3+last-stage-1", vec![3, 1]),
            (24, 8, 1, "stages-2.2.3.3.4.4.4.2", vec![2, 2, 3, 3, 4, 4, 4, 2]),
            (7, 2, 2, "stages-1x2.2.3", vec![1, 1, 2, 3]),
        ] {
            assert_eq!(layers(all, pp, vp, options), Ok(want), "{all} layers, pp {pp}, vp {vp}, {options}");
        }
    }

    /// Both ends of a folded row are of the first stage.
    #[test]
    fn ends_of_a_folded_row_are_chunks() {
        for (all, pp, options, want) in [
            (10, 2, "dualpipe-v+first-stage-1", vec![1, 3, 3, 3]),
            (9, 3, "v-half+first-stage-3+last-stage-2", vec![3, 1, 1, 1, 1, 2]),
            (61, 16, "zb-v+first-stage-1+last-stage-1+uneven", [vec![1], vec![2; 29], vec![1, 1]].concat()),
        ] {
            assert_eq!(layers(all, pp, 2, options), Ok(want), "{all} layers, pp {pp}, {options}");
        }
    }

    #[test]
    fn a_folded_pipeline_needs_microbatches_and_layers() {
        let refused = |layers: u64, global_batch: u64, options: &str| {
            let model = LlmSpec { layers, ..LlmSpec::find("llama-3-8b").unwrap() };
            let par = Parallelism { pp: 4, vp: 2, options: options.parse().unwrap(), ..Parallelism::default() };
            let dtype = crate::spec::Dtype::Bf16;
            let work = Workload { seq_len: 64, global_batch, micro_batch: 1, dtype, documents: Default::default() };
            pipeline(&model, &work, &par).err().map(|why| why.to_string()).unwrap_or_default()
        };
        assert_eq!(refused(8, 9, "dualpipe-v"), "");
        assert!(
            refused(8, 6, "dualpipe-v")
                .contains("needs 2 x pp = 8 microbatches or more, and there are 6; use global_batch 8")
        );
        assert!(refused(6, 8, "dualpipe-v+short-ends").contains("a layer in every chunk"));
        assert!(refused(8, 9, "default").contains("are not a multiple of pp 4"));
    }

    #[test]
    fn what_does_not_come_out_is_said() {
        for (all, pp, vp, options, want) in [
            (6, 4, 1, "default", "parts, or option short-ends or uneven"),
            (7, 4, 1, "default", "parts, or option uneven"),
            (3, 4, 1, "uneven", "do not split evenly"),
            (8, 1, 1, "first-stage-3", "first-stage-3 needs a pipeline"),
            (8, 4, 1, "short-ends+first-stage-1", "use one"),
            (8, 4, 2, "first-stage-3", "no multiple of vp 2"),
            (8, 4, 1, "first-stage-9", "have 9 layers of 8"),
            (8, 2, 1, "first-stage-3+last-stage-3", "no stage for others"),
            (8, 4, 1, "first-stage-3", "add uneven"),
            (8, 1, 1, "stages-8", "stages-8 needs a pipeline"),
            (8, 4, 1, "stages-2.3.3", "are 3 stages, and pp 4 x vp 1 are 4"),
            (8, 4, 1, "stages-2.3.3.3", "have 11 layers, and the model has 8"),
            (8, 4, 1, "stages-2x4+uneven", "so does uneven; use one"),
        ] {
            let found = layers(all, pp, vp, options);
            assert!(found.as_ref().is_err_and(|why| why.contains(want)), "{all} layers, pp {pp}, {options}: {found:?}");
        }
    }
}
