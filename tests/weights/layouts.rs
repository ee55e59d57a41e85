//! One step in every layout: what it dumps is the dense reference's.

use crate::families::*;
use crate::folder::{ADAM, given, ids, read, run};
use foretrain::exec::reference::{self, DenseConfig, StepResult};
use foretrain::exec::source::Source;
use foretrain::plan::Plan;

fn reference(plan: &Plan, source: &Source) -> StepResult {
    let mut cfg = DenseConfig::from(plan.model().expect("a model"));
    let (tokens, targets) = source.batch(plan, 1);
    let mut params = source.weights(plan);
    params.extend(source.beside(plan));
    let choices = cfg.experts.is_some().then(|| reference::route(&cfg, &params, &tokens));
    if let (Some(experts), Some(choices)) = (&mut cfg.experts, choices) {
        // What routers choose is no constant of a layer, or there would be nothing to record.
        assert!(choices[0] != choices[1] && choices[0][0] != choices[0][1]);
        experts.choices = choices;
    }
    reference::step(&cfg, &source.weights(plan), &tokens, &targets, &ADAM)
}

/// Rounding to 24 bits, relative to the largest value. The gradient of a key's bias is nothing but rounding, since
/// softmax does not see it: Adam makes a step of either sign of it, which is left out.
fn assert_close(name: &str, got: &[f32], want: &[f32]) {
    let scale = want.iter().fold(1e-6f32, |m, x| m.max(x.abs()));
    let keys = if name == "new.transformer.h.0.attn.c_attn.bias" || name == "new.transformer.h.1.attn.c_attn.bias" {
        16..32
    } else {
        0..0
    };
    let off = |(i, (g, w)): (usize, (&f32, &f32))| if keys.contains(&i) { 0.0 } else { (g - w).abs() / scale };
    let off = got.iter().zip(want).enumerate().map(off).fold(0.0, f32::max);
    assert!(got.len() == want.len() && off < 2e-4, "{name}: {off}");
}

fn every_layout_dumps_the_reference(config: &str, theirs: Theirs) {
    let dir = tempfile::tempdir().expect("a folder");
    let (plan, source) = given(dir.path(), config, theirs, &ids(), 1);
    let want = reference(&plan, &source);
    let dense =
        ["", " --dp 4 --zero 3", " --tp 2 --ring 2 --zero 1", " --pp 2 --tp 2", " --ulysses 2 --dp 2 --recompute full"];
    let experts = [
        "",
        " --dp 4 --zero 1",
        " --dp 2 --ep 2 --micro-batch 2",
        " --tp 2 --ring 2 --ep 4 --dispatch deepep-v1-normal",
        " --pp 2 --dp 2 --ep 2",
        " --ulysses 2 --dp 2 --ep 2 --recompute full",
    ];
    for split in if plan.routes.is_empty() { &dense[..] } else { &experts } {
        let args = format!(
            "run --weights . --tokens ids.json --seq-len 16 --global-batch 4 --dump out.safetensors --json --lr 1e-3 \
             --beta2 0.999 --weight-decay 0.01{split}"
        );
        let json = run(dir.path(), &args);
        assert_eq!(json["error"].as_str(), None, "{split}");
        let got = read(&dir.path().join("out.safetensors"));
        assert_close("loss", &got["loss"].1, &[want.loss as f32]);
        let (shape, logits) = &got["logits"];
        assert_eq!(shape, &[4, 16, 29]);
        assert!(logits.iter().all(|x| x.is_finite()));
        assert_close("the loss of the logits", &[loss(logits, &source.batch(&plan, 1).1.concat())], &got["loss"].1);
        for (what, values) in [("grad", &want.grads), ("new", &want.new_params)] {
            for (name, (shape, values)) in theirs(values) {
                let name = format!("{what}.{name}");
                assert_eq!(got[&name].0, shape, "{name}");
                assert_close(&name, &got[&name].1, &values);
            }
        }
        for (name, values) in source.beside(&plan) {
            let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
            assert_eq!(got[&format!("new.{name}")], (vec![8], values));
        }
        let beside = source.beside(&plan).len();
        assert_eq!(got.len(), 2 + 2 * theirs(&want.grads).len() + beside, "{:?}", got.keys());
    }
    // Weights of one model are none of another's, whatever their shapes.
    let json = run(dir.path(), "run --weights . --tokens ids.json --seq-len 16 --model tiny --json");
    let why = json["error"].as_str().expect("it is refused");
    assert!(why.contains("tiny is another model than that of") && why.contains("leave it out"), "{why}");
}

/// Mean cross-entropy of logits `[tokens, 29]`.
fn loss(logits: &[f32], targets: &[u32]) -> f32 {
    let token = |(row, &target): (&[f32], &u32)| {
        row.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln() - f64::from(row[target as usize])
    };
    (logits.chunks(29).zip(targets).map(token).sum::<f64>() / targets.len() as f64) as f32
}

#[test]
fn llama_in_every_layout() {
    every_layout_dumps_the_reference(LLAMA, as_llama);
}

#[test]
fn gpt2_in_every_layout() {
    every_layout_dumps_the_reference(GPT2, as_gpt2);
}

#[test]
fn qwen3_in_every_layout() {
    every_layout_dumps_the_reference(QWEN3, as_qwen3);
}

#[test]
fn mixtures_in_every_layout() {
    every_layout_dumps_the_reference(MIXTRAL, as_mixtral);
    every_layout_dumps_the_reference(QWEN3_MOE, as_qwen3_moe);
    every_layout_dumps_the_reference(DEEPSEEK, as_deepseek);
}
