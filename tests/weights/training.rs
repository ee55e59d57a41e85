//! Several steps from a checkpoint.

use crate::families::*;
use crate::folder::{ADAM, checkpoint, given, plan, read, run};
use foretrain::exec::reference::{self, DenseConfig};
use foretrain::exec::source::Source;
use serde_json::json;

/// Three steps on new tokens, the routers choosing anew before each: as dense training does it, whose routers look at
/// their own weights. What the last step dumps, optimizer states and all that went from plan to plan, is the same.
fn trains_as_the_reference(config: &str, theirs: Theirs, splits: &[&str]) {
    const STEPS: u64 = 3;
    let dir = tempfile::tempdir().expect("a folder");
    let ids: Vec<u32> = (0..STEPS as u32 * 4 * 17).map(|i| (i * i * 5 + i / 3) % 29).collect();
    let (plan, source) = given(dir.path(), config, theirs, &ids, STEPS);
    let (mut params, mut steps, mut routes) = (source.weights(&plan), vec![], vec![]);
    for step in 1..=STEPS {
        let mut cfg = DenseConfig::from(plan.model().expect("a model"));
        let batch = source.batch(&plan, step);
        let mut all = params.clone();
        all.extend(source.beside(&plan));
        let choices = reference::route(&cfg, &all, &batch.0);
        routes.push(choices.clone());
        cfg.experts.as_mut().expect("a mixture").choices = choices;
        steps.push((cfg, batch));
        let done = reference::train_anew(&source.weights(&plan), steps.clone(), &ADAM);
        params = done.last().expect("a step").new_params.clone();
        if step == STEPS {
            assert!(routes[0] != routes[1] && routes[1] != routes[2], "every step has tokens and routes of its own");
            for split in splits {
                let args = format!(
                    "run --weights . --tokens ids.json --seq-len 16 --global-batch 4 --dump out.safetensors --json \
                     --lr 1e-3 --beta2 0.999 --weight-decay 0.01 --steps {STEPS} --check{split}"
                );
                let json = run(dir.path(), &args);
                assert_eq!(json["error"].as_str(), None, "{split}");
                let losses =
                    json["steps"].as_array().expect("steps").iter().map(|s| s["loss"].as_f64().expect("a loss"));
                for (got, want) in losses.zip(&done) {
                    assert!((got / want.loss - 1.0).abs() < 1e-5, "{split}: {got} for {}", want.loss);
                }
                let got = read(&dir.path().join("out.safetensors"));
                for (name, (_, values)) in theirs(&params) {
                    assert_near(&format!("new.{name}{split}"), &got[&format!("new.{name}")].1, &values);
                }
            }
        }
    }
}

/// After steps of Adam, which divides by the root of what may be next to nothing: rounding would move a weight whose gradient
/// is nothing but rounding by a whole step, lr = 1e-3. These models have no such gradient: what moves most is off by 4e-7.
fn assert_near(name: &str, got: &[f32], want: &[f32]) {
    let off = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
    assert!(got.len() == want.len() && off < 5e-6, "{name}: {off}");
}

#[test]
fn mixtures_train_on_routes_of_every_step() {
    trains_as_the_reference(MIXTRAL, as_mixtral, &["", " --dp 2 --ep 2", " --pp 2 --dp 2 --ep 2 --zero 1"]);
    trains_as_the_reference(QWEN3_MOE, as_qwen3_moe, &[" --tp 2 --ring 2 --ep 4 --dispatch deepep-v1-normal"]);
    trains_as_the_reference(DEEPSEEK, as_deepseek, &["", " --dp 4 --ep 2 --zero 1"]);
    trains_as_the_reference(&deepseek_32(), as_deepseek, &["", " --ring 2 --options gather-kv"]);
}

/// The config says what is dropped in training, and weights from elsewhere are trained without: a run that goes on from them, too.
#[test]
fn what_began_without_dropout_goes_on_without() {
    let dir = tempfile::tempdir().expect("a folder");
    checkpoint(dir.path(), GPT2, &as_gpt2(&Source::seeded(3).weights(&plan(GPT2))));
    let words = "run --seq-len 16 --global-batch 2 --json";
    let whole = run(dir.path(), &format!("{words} --weights . --steps 2"));
    run(dir.path(), &format!("{words} --weights . --save ckpt"));
    let rest = run(dir.path(), &format!("{words} --model ./config.json --load ckpt"));
    assert!(rest["loss"].is_number() && rest["loss"] == whole["loss"], "{} is not {}", rest["loss"], whole["loss"]);
    let note = "dropout: 0 as in the run that saved; the model's file has 0.1";
    assert_eq!(rest["notes"], json!([note]));
}
