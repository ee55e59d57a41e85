//! The blocks of a chunk of a stage: its layers forward and backward, and embedding and head beside them.

use super::{Here, Key, Part, Staged, length, name_of};
use crate::plan::*;
use crate::strategy::data::DataParallel;
use crate::strategy::sharded::{Run, Sites};
use crate::strategy::step::Step;
use crate::strategy::transformer::Flats;

impl Staged<'_, '_> {
    /// The formals of a chunk for the buffers that a rank keeps of its layers.
    fn formals(&mut self, (chain, _): &Key, backward: bool) -> Vec<Option<Sites>> {
        let Step { b, kinds, dp, edp, .. } = &mut *self.step;
        let ranks = [&*dp, &*edp];
        let here: Vec<Here> = Here::of(kinds, chain);
        let weights: Vec<Flats> = here.iter().map(|h| h.kind.kept(ranks)[0].formals(b, "w")).collect();
        let gradients: Vec<Flats> = match backward {
            true => here.iter().map(|h| h.kind.kept(ranks)[1].formals(b, "g")).collect(),
            false => weights.clone(),
        };
        let mut sites: Vec<Option<Sites>> = kinds.iter().map(|_| None).collect();
        for (i, h) in here.iter().enumerate() {
            sites[h.number] = Some(Sites { weights: weights[i], gradients: gradients[i], sums: None });
        }
        sites
    }

    /// Writes the layers of a chunk forward: the first reads the chunk's input, the last writes its output.
    pub(super) fn chunk_fwd(&mut self, key: &Key) -> BlockId {
        let (chain, microbatch) = key;
        self.step.b.open(&format!("fwd_{}", name_of(self.step.kinds.len(), chain)));
        let sites = self.formals(key, false);
        let Step { b, kinds, .. } = &mut *self.step;
        let [x_in, x, x_out] = ["x_in", "x", "x_out"].map(|name| b.formal(name));
        let here: Vec<Here> = Here::of(kinds, chain);
        let saved: Vec<Vec<Buf>> = here.iter().map(|h| h.kind.saved.formals(b).bufs()).collect();
        let (l, mut runs) = (length(chain), vec![]);
        for of in chain {
            let (i, h) = Here::at(&here, of);
            let mut run = |label: &str, layer: u32, count: u32, xs: [Arg; 2]| {
                let at = of.first + layer - of.start;
                let keep = |buf: Buf| up(buf, at, count, h.count);
                let mut rest = Vec::from(xs);
                let saved = saved[i].iter().zip(h.kind.keeps_each());
                rest.extend(saved.map(|(&buf, keeps)| if keeps { keep(buf) } else { buf.into() }));
                runs.push(Run {
                    kind: of.kind,
                    label: h.label(label, of),
                    at,
                    count,
                    of: h.count,
                    rest,
                    hosts: vec![],
                });
            };
            // Layer j of the chunk reads x.slot(j - 1) and writes x.slot(j), but for the two ends.
            let (mut from, mut to) = (of.start, of.end);
            if from == 0 {
                let out = if l == 1 { x_out } else { x };
                run(if l == 1 { "layer" } else { "first" }, 0, 1, [x_in, out].map(Arg::from));
                from += 1;
            }
            let ends = to == l && to > from;
            to -= u32::from(ends);
            if to > from {
                let at = from as i32;
                run("layers", from, to - from, [each(x, at - 1, 1, l - 1), each(x, at, 1, l - 1)]);
            }
            if ends {
                run("last", l - 1, 1, [x.slot(l - 2), x_out].map(Arg::from));
            }
        }
        if self.step.sharers().any(DataParallel::shares_weights) {
            self.step.passing(sites, *microbatch, false).forward(&runs, |_| ());
        } else {
            let Step { b, kinds, .. } = &mut *self.step;
            for run in runs {
                let sites = sites[run.kind].expect("of a kind that is here");
                let keep = |buf: Buf| up(buf, run.at, run.count, run.of);
                let args: Vec<Arg> = sites.weights.args(keep).into_iter().chain(run.rest).collect();
                b.call(&run.label, kinds[run.kind].of(*microbatch).fwd, run.count, &args);
            }
        }
        self.step.b.close()
    }

    /// Writes the layers backward, or a half of that: the top layer reads `dx` at 0, and the lowest one writes it last.
    pub(super) fn chunk_bwd(&mut self, key: &Key, part: Part, sums: bool) -> BlockId {
        let (chain, microbatch) = key;
        let name = name_of(self.step.kinds.len(), chain);
        let what = match part {
            Part::Weights => "weights",
            Part::Inputs if self.step.pipe.is_folded() => "inputs",
            _ => "bwd",
        };
        self.step.b.open(&format!("{what}_{name}{}", if sums { "_last" } else { "" }));
        let mut sites = self.formals(key, true);
        let Step { b, kinds, dp, edp, .. } = &mut *self.step;
        let here: Vec<Here> = Here::of(kinds, chain);
        let [x_in, x, dx] = ["x_in", "x", "dx"].map(|name| b.formal(name));
        let saved: Vec<Vec<Buf>> = here.iter().map(|h| h.kind.saved.formals(b).bufs()).collect();
        let left: Vec<Vec<Buf>> =
            here.iter().map(|h| if part == Part::Whole { vec![] } else { h.kind.formal_left(b) }).collect();
        for h in here.iter().filter(|_| sums) {
            let shares = h.kind.shares([dp, edp]).formals(b, "g_share");
            sites[h.number].as_mut().expect("it is here").sums = Some(shares);
        }
        let (l, mut runs) = (length(chain), vec![]);
        let turns = if part == Part::Whole { 2 } else { l + 1 };
        for of in chain.iter().rev() {
            let (i, h) = Here::at(&here, of);
            let mut run = |label: &str, layer: u32, count: u32, xs: [Arg; 3]| {
                let at = of.first + layer - of.start;
                let keep = |buf: Buf| down(buf, at, h.count);
                let mut rest = Vec::from(xs);
                let all = part != Part::Whole && h.kind.again.is_some();
                let saved = saved[i].iter().zip(h.kind.keeps_each());
                rest.extend(saved.map(|(&buf, keeps)| if keeps || all { keep(buf) } else { buf.into() }));
                rest.extend(left[i].iter().map(|&buf| keep(buf)));
                runs.push(Run {
                    kind: of.kind,
                    label: h.label(label, of),
                    at,
                    count,
                    of: h.count,
                    rest,
                    hosts: vec![],
                });
            };
            // The input of the first layer of the chunk is elsewhere than those of the others.
            let (from, to) = (of.start.max(1), of.end);
            if to > from {
                let turn = ((l - to) % turns) as i32;
                let walks = [each(x, to as i32 - 2, -1, l - 1), each(dx, turn, 1, turns), each(dx, turn + 1, 1, turns)];
                run("layers", to - 1, to - from, walks);
            }
            if of.start == 0 {
                run("first", 0, 1, [x_in, dx.slot((l - 1) % turns), dx.slot(l % turns)].map(Arg::from));
            }
        }
        if self.step.sharers().any(DataParallel::by_layers) {
            self.step.passing(sites, *microbatch, sums).backward(&runs);
        } else {
            let Step { b, kinds, .. } = &mut *self.step;
            for run in runs {
                let (sites, blocks) =
                    (sites[run.kind].expect("of a kind that is here"), kinds[run.kind].of(*microbatch));
                let keep = |buf: Buf| down(buf, run.at, run.of);
                let mut args: Vec<Arg> = sites.weights.args(keep);
                args.extend(sites.gradients.args(keep).into_iter().chain(run.rest));
                args.extend(sites.sums.into_iter().flat_map(|sums| sums.args(keep)));
                let block = match (part, blocks.halves) {
                    (Part::Weights, Some(halves)) if sums => halves.weights_last,
                    (Part::Weights, Some(halves)) => halves.weights,
                    (Part::Inputs, Some(halves)) => halves.inputs,
                    _ if sums => blocks.bwd_last,
                    _ => blocks.bwd,
                };
                b.call(&run.label, block, run.count, &args);
            }
        }
        self.step.b.close()
    }
}

/// An argument for the slots of `count` layers from `at` up, of `of` slots.
fn up(buf: Buf, at: u32, count: u32, of: u32) -> Arg {
    if count == 1 { buf.slot(at).into() } else { each(buf, at as i32, 1, of) }
}

/// An argument for the slots from `at` down, of `of` slots.
fn down(buf: Buf, at: u32, of: u32) -> Arg {
    if at == 0 { Arg::from(buf) } else { each(buf, at as i32, -1, of) }
}

pub(super) fn embed_block(step: &mut Step, forward: bool) -> BlockId {
    step.b.open(if forward { "embed" } else { "embed_bwd" });
    let [tokens, x] = ["tokens", "x"].map(|name| step.b.formal(name));
    if forward {
        step.gather_embed("gather.embed");
        step.copy_embed();
        step.embed_forward(tokens, x);
    } else {
        let embed = step.embed;
        step.clear("clear.embed", &embed);
        step.embed_backward(tokens, x);
        step.scatter_embed();
    }
    step.b.close()
}

/// Writes the block that `has_come` is. `parts`: ranks that each pass on a part of the rows.
pub(super) fn has_come(step: &mut Step, parts: u64) -> BlockId {
    step.b.open("has_come");
    let dx = step.b.formal("dx");
    let elems = step.layer().residual_rows() * step.model.hidden / parts;
    step.b.compute("has_come", Kernel::Wait { reads: vec![elems], writes: vec![], stream: true }, &[dx], &[]);
    step.b.close()
}

pub(super) fn head_block(step: &mut Step) -> BlockId {
    step.b.open("head");
    let targets = step.formal_targets();
    let [x, dx] = ["x", "dx"].map(|name| step.b.formal(name));
    step.gather_head();
    step.copy_head();
    let tied = step.model.tie_embeddings;
    for (label, w) in [("clear.head", Some(step.head)), ("clear.table", tied.then_some(step.embed))] {
        w.iter().for_each(|w| step.clear(label, w));
    }
    step.ends(&targets, x, dx, 0);
    step.scatter_head();
    if tied {
        step.scatter_embed();
    }
    step.b.close()
}
