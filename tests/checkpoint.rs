//! Checkpoints: what one layout saves every other loads to the bit, training goes on as if nothing had been, and what
//! is damaged is found.

mod checkpoint_states;

use checkpoint_states::{from_to, states};
use foretrain::checkpoint::extent::State;
use foretrain::checkpoint::index::sealed;
use foretrain::checkpoint::{Index, newest};
use foretrain::exec::{Options, Run, train};
use foretrain::plan::{Adam, Dtype, Engine, Plan};
use foretrain::spec::{LlmSpec, Parallelism, Recompute, Workload};
use foretrain::strategy::expert::Routing;
use foretrain::strategy::{Engines, build, build_routed};
use std::collections::BTreeMap;
use std::path::Path;

/// Grouped queries, and sizes that tensor-parallel ranks do not share evenly: a vocabulary of 29 over two.
fn dense() -> LlmSpec {
    let json = serde_json::json!({
        "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
        "intermediate_size": 12, "vocab_size": 29, "rms_norm_eps": 1e-5, "rope_theta": 100.0,
        "torch_dtype": "float32", "hidden_act": "silu",
    });
    LlmSpec::parse("test", "small", &json.to_string()).expect("a sound model")
}

fn plan(par: Parallelism, dtype: Dtype) -> Plan {
    let work = Workload { seq_len: 24, global_batch: 4, micro_batch: 1, dtype, documents: Default::default() };
    let engine = Engine::Sm { ctas: 1 };
    let engines = Engines { p2p: engine, collective: engine };
    let plan = build(&dense(), &work, &par, engines).unwrap_or_else(|e| panic!("{par:?}: {e}"));
    plan.with_optimizer(Adam { lr: 0.01, weight_decay: 0.1, ..Adam::default() })
}

fn layouts() -> Vec<Parallelism> {
    let one = Parallelism::default();
    let words = |text: &str| text.parse().expect("words");
    vec![
        one,
        Parallelism { dp: 2, ..one },
        Parallelism { dp: 4, zero: 1, ..one },
        Parallelism { ring: 3, zero: 2, ..one },
        Parallelism { dp: 2, zero: 3, recompute: Recompute::Full, ..one },
        Parallelism { dp: 2, zero: 1, options: words("offload-optimizer"), ..one },
        Parallelism { dp: 2, tp: 2, zero: 1, options: words("overlap-gather"), ..one },
        Parallelism { tp: 2, ring: 2, options: words("foreach"), ..one },
        Parallelism { pp: 2, vp: 2, ..one },
        Parallelism { pp: 2, tp: 2, dp: 2, zero: 1, ..one },
        Parallelism { dp: 2, ulysses: 2, tp: 2, zero: 3, ..one },
        Parallelism { pp: 2, dp: 4, zero: 3, options: words("shard-2"), ..one },
        Parallelism { tp: 4, zero: 1, ..one },
    ]
}

/// Runs steps from where a checkpoint was, and saves after step `save`.
fn runs(plan: &Plan, steps: u64, load: Option<&Path>, save: Option<(&Path, u64)>) -> Vec<Run> {
    let options = Options::new(5, (0..plan.ranks()).map(|rank| rank % 2).collect(), false);
    let mut all = vec![];
    from_to((5, steps), load, save, |job| {
        train(plan, &options, job, &mut |_, run| {
            all.push(run);
            Ok(())
        })
    });
    all
}

#[test]
fn what_one_layout_saves_every_other_loads_to_the_bit() {
    let dir = tempfile::tempdir().expect("a folder");
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let from = dir.path().join(dtype.name());
        let hybrid = Parallelism { dp: 2, ulysses: 2, tp: 2, zero: 3, ..Parallelism::default() };
        runs(&plan(hybrid, dtype), 2, None, Some((&from, 2)));
        let want = states(&from);
        assert!(want.values().all(|bytes| bytes.iter().any(|b| *b != 0)), "two steps move every state");
        for (i, par) in layouts().into_iter().enumerate() {
            let to = dir.path().join(format!("{}-{i}", dtype.name()));
            runs(&plan(par, dtype), 1, Some(&from), Some((&to, 2)));
            assert!(states(&to) == want, "{par:?} in {}", dtype.name());
        }
    }
}

/// Two steps, a checkpoint and two more are four steps, to the bit: in bf16 the master copies matter, and the moments
/// and the number of the step in every dtype.
#[test]
fn the_same_layout_goes_on_as_if_it_had_never_stopped() {
    let dir = tempfile::tempdir().expect("a folder");
    for (i, par) in layouts().into_iter().enumerate() {
        let plan = plan(par, if i % 2 == 0 { Dtype::F32 } else { Dtype::Bf16 });
        let at = dir.path().join(i.to_string());
        let whole = runs(&plan, 4, None, Some((&at, 2)));
        let rest = runs(&plan, 2, Some(&at), None);
        for (whole, rest) in whole[2..].iter().zip(&rest) {
            assert_eq!(whole.loss.to_bits(), rest.loss.to_bits(), "{par:?}");
        }
        assert!(whole[3].weights == rest[1].weights, "{par:?}");
    }
}

/// So it is where the optimizer keeps less: its bf16 is kept as it is.
#[test]
fn an_optimizer_in_bf16_goes_on_as_if_it_had_never_stopped() {
    let dir = tempfile::tempdir().expect("a folder");
    for words in ["bf16-moments", "no-master", "bf16-grads+bf16-moments+no-master"] {
        for (dp, zero) in [(1, 0), (2, 0), (2, 1), (4, 2), (2, 3)] {
            let par = Parallelism { dp, zero, options: words.parse().expect("words"), ..Parallelism::default() };
            let (plan, at) = (plan(par, Dtype::Bf16), dir.path().join(format!("{words}-{dp}-{zero}")));
            let whole = runs(&plan, 4, None, Some((&at, 2)));
            let rest = runs(&plan, 2, Some(&at), None);
            for (whole, rest) in whole[2..].iter().zip(&rest) {
                assert_eq!(whole.loss.to_bits(), rest.loss.to_bits(), "{par:?}");
            }
            assert!(whole[3].weights == rest[1].weights, "{par:?}");
        }
    }
}

/// Weights of an indexer are saved and loaded as any.
#[test]
fn indexers_go_on_as_if_they_had_never_stopped() {
    let dir = tempfile::tempdir().expect("a folder");
    let json = serde_json::json!({
        "model_type": "deepseek_v32", "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8,
        "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 29, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 6,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "index_n_heads": 2, "index_head_dim": 6,
        "index_topk": 5, "hidden_act": "silu", "num_nextn_predict_layers": 0,
    });
    let model = LlmSpec::parse("test", "sparse", &json.to_string()).expect("a sound model");
    let plan = |par: Parallelism| {
        let work =
            Workload { seq_len: 24, global_batch: 4, micro_batch: 1, dtype: Dtype::F32, documents: Default::default() };
        let engine = Engine::Sm { ctas: 1 };
        let route = Routing::Uniform { seed: 5 }.route(&model, &work, &par, 8).expect("a route");
        build_routed(&model, &work, &par, Engines { p2p: engine, collective: engine }, route).expect("feasible")
    };
    let one = Parallelism::default();
    let from = dir.path().join("from");
    let whole = runs(&plan(one), 4, None, Some((&from, 2)));
    let rest = runs(&plan(one), 2, Some(&from), None);
    assert!(whole[3].weights == rest[1].weights && whole[3].loss == rest[1].loss);
    let want = states(&from);
    let of_indexer = |part: &str| want.keys().any(|name| name.contains(&format!("indexer.{part}.weight")));
    assert!(["wq_b", "wk", "k_norm", "weights_proj"].into_iter().all(of_indexer), "{:?}", want.keys());
    let gather = "gather-kv".parse().expect("a word");
    for (i, par) in
        [Parallelism { dp: 2, ep: 2, zero: 3, ..one }, Parallelism { ring: 2, zero: 1, options: gather, ..one }]
            .into_iter()
            .enumerate()
    {
        let to = dir.path().join(i.to_string());
        runs(&plan(par), 1, Some(&from), Some((&to, 2)));
        assert!(states(&to) == want, "{par:?}");
    }
}

/// Muon keeps no squares of matrices, and those of the rest packed: what one layout saves others load to the bit, and the same one
/// goes on as if it had never stopped.
#[test]
fn momenta_of_muon_go_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let of = |dp, tp, pp, zero| {
        let options = "muon".parse().expect("a word");
        Parallelism { dp, tp, pp, zero, options, ..Parallelism::default() }
    };
    let all = [
        of(1, 1, 1, 0),
        of(2, 1, 1, 0),
        of(2, 1, 1, 1),
        of(4, 1, 1, 2),
        of(4, 1, 1, 3),
        of(2, 2, 1, 1),
        of(2, 1, 2, 1),
    ];
    let from = dir.path().join("from");
    runs(&plan(of(2, 2, 1, 3), Dtype::Bf16), 2, None, Some((&from, 2)));
    let want = states(&from);
    let squares = |name: &str| want.contains_key(&format!("{}.{name}", State::ExpAvgSq.name()));
    assert!(squares("model.layers.0.input_layernorm.weight") && squares("lm_head.weight"));
    assert!(!squares("model.layers.0.self_attn.qkv_proj.weight"));
    assert!(want.values().all(|bytes| bytes.iter().any(|b| *b != 0)), "two steps move every state");
    for (i, par) in all.iter().enumerate() {
        let to = dir.path().join(format!("to-{i}"));
        runs(&plan(*par, Dtype::Bf16), 1, Some(&from), Some((&to, 2)));
        assert!(states(&to) == want, "{par:?}");
        let (plan, at) = (plan(*par, Dtype::F32), dir.path().join(i.to_string()));
        let whole = runs(&plan, 4, None, Some((&at, 2)));
        let rest = runs(&plan, 2, Some(&at), None);
        for (whole, rest) in whole[2..].iter().zip(&rest) {
            assert_eq!(whole.loss.to_bits(), rest.loss.to_bits(), "{par:?}");
        }
        assert!(whole[3].weights == rest[1].weights, "{par:?}");
    }
}

/// Ranks of other layouts add in another order, and no more than that.
#[test]
fn another_layout_goes_on_with_the_same_training() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = dir.path().join("a");
    let whole =
        runs(&plan(Parallelism { dp: 2, zero: 1, ..Parallelism::default() }, Dtype::F64), 4, None, Some((&at, 2)));
    for par in layouts() {
        let rest = runs(&plan(par, Dtype::F64), 2, Some(&at), None);
        for (whole, rest) in whole[2..].iter().zip(&rest) {
            assert!((whole.loss - rest.loss).abs() < 1e-11, "{par:?}: {} for {}", rest.loss, whole.loss);
        }
    }
}

/// Ranks that hold the same weights share the work: of eight, four by four alike, none has twice its part.
#[test]
fn replicas_save_about_as_much_each() {
    let dir = tempfile::tempdir().expect("a folder");
    let par = Parallelism { dp: 4, tp: 2, ..Parallelism::default() };
    runs(&plan(par, Dtype::F32), 1, None, Some((dir.path(), 1)));
    let index = Index::read(&newest(dir.path()).expect("a checkpoint")).expect("a sound index");
    assert_eq!(index.files.len(), 8);
    let most = index.files.iter().map(|file| file.bytes).max().expect("eight files");
    assert!(most < 2 * index.bytes() / 8, "{most} of {}", index.bytes());
}

fn foretrain(args: &[&str]) -> (Option<i32>, String) {
    let out = std::process::Command::new(env!("CARGO_BIN_EXE_foretrain")).args(args).output().expect("it starts");
    let text = [out.stdout, out.stderr].concat();
    (out.status.code(), String::from_utf8(text).expect("text"))
}

const TINY: [&str; 7] = ["run", "--model", "tiny", "--seq-len", "32", "--global-batch", "2"];

#[test]
fn the_command_line_saves_and_goes_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = dir.path().join("ckpt");
    let at = at.to_str().expect("a name");
    let json = |args: &[&str]| -> serde_json::Value {
        let (code, text) = foretrain(&[&TINY, args, &["--json"]].concat());
        assert_eq!(code, Some(0), "{text}");
        serde_json::from_str(&text).expect("JSON")
    };
    let whole = json(&["--steps", "4", "--dp", "2", "--zero", "3", "--save", at, "--save-every", "2"]);
    assert_eq!(whole["saved"].as_array().map(Vec::len), Some(2));
    let rest = json(&["--steps", "2", "--dp", "2", "--zero", "3", "--load", &format!("{at}/step-00000002")]);
    assert_eq!((&rest["loaded"]["step"], &rest["steps"][0]["step"]), (&2.into(), &3.into()));
    assert_eq!(rest["steps"][1]["loss"], whole["steps"][3]["loss"]);
    let (code, text) = foretrain(&["checkpoint", at]);
    assert!(code == Some(0) && text.contains("after step 4") && text.contains("as it was written"), "{text}");
    let (code, text) = foretrain(&[&TINY[..], &["--steps", "2", "--save", at]].concat());
    assert!(code == Some(2) && text.contains("step-00000002") && text.contains("--load"), "{text}");
}

/// A learning rate that was saved is that of the run that goes on, unless a flag says another; and its rows go on in the table.
#[test]
fn a_run_goes_on_with_the_optimizer_and_the_table_of_the_one_that_saved() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name).to_str().expect("a name").to_string();
    let (ckpt, rows) = (at("ckpt"), at("rows.csv"));
    let losses = |args: &[&str], rows: &str| {
        let (code, text) = foretrain(&[&TINY, args, &["--out", rows]].concat());
        assert_eq!(code, Some(0), "{text}");
        let table = std::fs::read_to_string(rows).expect("rows");
        let first = |line: &str| line.split(',').take(2).map(str::to_string).collect::<Vec<_>>();
        (table.lines().skip(1).map(first).collect::<Vec<_>>(), text)
    };
    let (whole, _) = losses(&["--steps", "4", "--lr", "0.01", "--weight-decay", "0.1"], &at("whole.csv"));
    losses(&["--steps", "2", "--lr", "0.01", "--weight-decay", "0.1", "--save", &ckpt], &rows);
    let (both, text) = losses(&["--steps", "2", "--load", &ckpt], &rows);
    assert_eq!(both, whole);
    assert!(!text.contains("optimizer"), "{text}");
    let (_, text) = losses(&["--load", &ckpt, "--lr", "0.02"], &at("other.csv"));
    assert!(text.contains("the run that saved had lr 0.01, beta1 0.9") && text.contains("weight decay 0.1"), "{text}");
    let (_, text) = foretrain(&["checkpoint", &ckpt]);
    assert!(text.contains("lr 0.01, beta1 0.9"), "{text}");
    let (code, text) = foretrain(&[&TINY[..], &["--load", &ckpt, "--out", &rows]].concat());
    let words = ["rows.csv: step", "last row is of step 4", "goes on behind step 2", "another --out"];
    assert!(code == Some(2) && words.iter().all(|word| text.contains(word)), "{text}");
    std::fs::write(&rows, "a,b\n1,2\n").expect("written");
    let (code, text) = foretrain(&[&TINY[..], &["--load", &ckpt, "--out", &rows]].concat());
    assert!(code == Some(2) && text.contains("no whole table"), "{text}");
}

#[test]
fn a_run_that_diverges_stops_and_saves_no_more() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name).to_str().expect("a name").to_string();
    let (ckpt, rows) = (at("ckpt"), at("rows.csv"));
    let save = ["--save", &ckpt, "--save-every", "1", "--out", &rows];
    let (code, text) = foretrain(&[&TINY[..], &["--steps", "5", "--lr", "1e10"], &save].concat());
    assert!(code == Some(2) && text.contains("step 2: the loss is NaN"), "{text}");
    assert_eq!(std::fs::read_to_string(&rows).expect("rows").lines().count(), 3, "a header and two steps");
    let step = newest(Path::new(&ckpt)).expect("a checkpoint");
    assert!(step.ends_with("step-00000001"), "{step:?}");
    // Beyond f32: the loss before the step is a number, and the weights after it are none.
    let (code, text) = foretrain(&[&TINY[..], &["--lr", "1e39", "--save", &at("inf")]].concat());
    assert!(code == Some(2) && text.contains("values are no numbers after this step"), "{text}");
    assert!(newest(Path::new(&at("inf"))).is_err());
}

/// What was copied before a step failed is written to its end, and the error says where it is.
#[test]
fn a_run_that_fails_keeps_the_checkpoint_before() {
    let dir = tempfile::tempdir().expect("a folder");
    for fault in ["panic", "deadlock", "other-plan"] {
        let folder = dir.path().join(fault);
        let at = folder.to_str().expect("a name");
        let save = ["--dp", "2", "--steps", "2", "--save", at, "--save-every", "1", "--inject", fault];
        let (code, text) = foretrain(&[&["run", "--model", "small", "--seq-len", "64"], &save[..]].concat());
        assert!(code == Some(2) && text.contains("step 1 is saved, go on from it with --load"), "{text}");
        assert!(newest(&folder).expect("a checkpoint").ends_with("step-00000001"));
        assert_eq!(std::fs::read_dir(&folder).expect("a folder").count(), 1, "nothing is unfinished");
        let (code, text) = foretrain(&["checkpoint", at]);
        assert_eq!(code, Some(0), "{text}");
    }
}

/// The JSON of an index without its checksum.
fn fields(index: &Path) -> String {
    let text = std::fs::read_to_string(index).expect("an index");
    format!("{{{}", text.split_once(',').expect("a checksum before others").1)
}

/// A checkpoint of a run that had diverged, as it may have been saved elsewhere.
#[test]
fn what_is_no_number_is_reported_and_not_gone_on_from() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = dir.path().to_str().expect("a name");
    let (code, text) = foretrain(&[&TINY[..], &["--save", at]].concat());
    assert_eq!(code, Some(0), "{text}");
    let step = newest(dir.path()).expect("a checkpoint");
    let part = step.join("part-00000.safetensors");
    let mut bytes = std::fs::read(&part).expect("a part");
    let before = crc32fast::hash(&bytes);
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&part, &bytes).expect("written");
    let index = fields(&step.join("index.json"));
    let index = index.replacen(&before.to_string(), &crc32fast::hash(&bytes).to_string(), 1);
    std::fs::write(step.join("index.json"), sealed(&index)).expect("written");
    for args in [&["checkpoint", at][..], &[&TINY[..], &["--load", at]].concat()] {
        let (code, text) = foretrain(args);
        assert!(code == Some(2) && text.contains("1 of its values are no numbers"), "{text}");
        assert!(text.contains("earlier checkpoint"), "{text}");
    }
}

/// A small model, or a mixture, as a Hugging Face configuration.
fn config(dir: &Path, experts: u64) -> std::path::PathBuf {
    let mut json = serde_json::json!({
        "model_type": if experts > 0 { "mixtral" } else { "llama" }, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 100.0, "torch_dtype": "float32", "hidden_act": "silu",
        "tie_word_embeddings": false,
    });
    if experts > 0 {
        (json["num_local_experts"], json["num_experts_per_tok"]) = (experts.into(), 2.into());
    }
    let path = dir.join(format!("experts-{experts}.json"));
    std::fs::write(&path, json.to_string()).expect("written");
    path
}

/// Experts are cut over other ranks than what every layer has.
#[test]
fn experts_go_on_wherever_they_are_put() {
    let dir = tempfile::tempdir().expect("a folder");
    let (model, at) = (config(dir.path(), 4), dir.path().join("ckpt"));
    let (model, at) = (model.to_str().expect("a name"), at.to_str().expect("a name"));
    let losses = |args: &[&str]| -> (Vec<f64>, bool) {
        let all = ["run", "--json", "--model", model, "--seq-len", "32", "--global-batch", "4"];
        let (code, text) = foretrain(&[&all[..], args].concat());
        assert_eq!(code, Some(0), "{text}");
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let steps = json["steps"].as_array().expect("steps").iter();
        let other_routes = json["loaded"].get("other_routes") == Some(&true.into());
        (steps.map(|s| s["loss"].as_f64().expect("a loss")).collect(), other_routes)
    };
    let first = ["--dp", "2", "--ep", "2", "--zero", "1"];
    let (whole, _) = losses(&[&first[..], &["--steps", "4", "--save", at, "--save-every", "2"]].concat());
    let from = format!("{at}/step-00000002");
    let again = losses(&[&first[..], &["--steps", "2", "--load", &from]].concat());
    assert_eq!(again, (whole[2..].to_vec(), false));
    // Who visits which expert is drawn for a layout, so that others train on other routes; with a learning rate of
    // nothing their weights stay what they were when they were loaded.
    let weights = |dir: &str| {
        let all = states(Path::new(dir)).into_iter();
        all.filter(|(name, _)| name.starts_with(State::Weight.name())).collect::<BTreeMap<_, _>>()
    };
    for (i, layout) in ["--dp 4 --ep 4 --zero 1", "--dp 1 --ep 1", "--dp 2 --ep 2 --tp 2 --zero 1"].iter().enumerate() {
        let to = format!("{at}-{i}");
        let layout: Vec<&str> = layout.split(' ').collect();
        let (_, other_routes) = losses(&[&layout[..], &["--lr", "1e-35", "--load", &from, "--save", &to]].concat());
        assert!(other_routes, "{layout:?}");
        assert!(weights(&to) == weights(&from), "{layout:?}");
    }
}

/// Hot experts stand before a rank's own, and copies in any order: each is saved from where it is.
#[test]
fn experts_in_any_order_go_on() {
    let dir = tempfile::tempdir().expect("a folder");
    let model = config(dir.path(), 8);
    let losses = |args: &str, more: &[&str]| -> Vec<f64> {
        let all = ["run", "--json", "--model", model.to_str().expect("a name"), "--routing", "zipf:1.2"];
        let (code, text) = foretrain(&[&all[..], &args.split(' ').collect::<Vec<_>>(), more].concat());
        assert_eq!(code, Some(0), "{text}");
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        json["steps"].as_array().expect("steps").iter().map(|s| s["loss"].as_f64().expect("a loss")).collect()
    };
    for (i, words) in
        ["--shadow 1", "--shadow 3", "--replicas 2", "--replicas 8", "--replicas 6 --zero 0"].iter().enumerate()
    {
        let at = dir.path().join(i.to_string());
        let at = at.to_str().expect("a name");
        let args = format!("--seq-len 48 --dp 4 --ep 2 --global-batch 4 --lr 0.01 --dtype f64 {words}");
        let whole = losses(&args, &["--steps", "4", "--save", at, "--save-every", "2"]);
        let again = losses(&args, &["--steps", "2", "--load", &format!("{at}/step-00000002")]);
        assert_eq!(again, whole[2..], "{words}");
    }
}

/// What one optimizer kept is not the other's.
#[test]
fn an_optimizer_of_another_kind_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    for (words, other, remedy) in
        [("default", "muon", "leave --options muon out"), ("muon", "default", "give --options muon")]
    {
        let at = dir.path().join(words);
        let at = at.to_str().expect("a name");
        let run = |words: &str, more: &[&str]| foretrain(&[&TINY[..], &["--options", words], more].concat());
        assert_eq!(run(words, &["--save", at]).0, Some(0));
        let (code, text) = run(other, &["--load", at]);
        assert!(code == Some(2) && text.contains(remedy), "{text}");
        assert_eq!(run(words, &["--load", at]).0, Some(0));
    }
}

/// Names and shapes say nothing of heads and positions: the index does, and one that does not is told of.
#[test]
fn a_model_of_the_same_shapes_is_another() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = dir.path().join("ckpt");
    let at = at.to_str().expect("a name");
    let path = config(dir.path(), 0);
    let text = std::fs::read_to_string(&path).expect("a config");
    let run = |change: (&str, &str), more: &[&str]| {
        std::fs::write(&path, text.replace(change.0, change.1)).expect("written");
        let all = ["run", "--model", path.to_str().expect("a name"), "--seq-len", "32"];
        foretrain(&[&all[..], more].concat())
    };
    let same = ("", "");
    let (code, text) = run(same, &["--save", at]);
    assert_eq!(code, Some(0), "{text}");
    let heads = ("\"num_attention_heads\":4", "\"head_dim\":8,\"num_attention_heads\":4");
    assert_eq!(run(heads, &["--load", at]).0, Some(0), "the same by another spelling");
    for (change, words) in [
        (
            (
                "\"num_attention_heads\":4,\"num_hidden_layers\":2,\"num_key_value_heads\":2",
                "\"num_attention_heads\":2,\"num_hidden_layers\":2,\"num_key_value_heads\":1",
            ),
            "head_dim: 8 was saved, 16",
        ),
        (("\"rope_theta\":100.0", "\"rope_theta\":500.0"), "rope_theta: 100.0 was saved, 500.0 is wanted"),
    ] {
        let (code, text) = run(change, &["--load", at]);
        let words = [words, "index.json: model_spec.", "give the same model"];
        assert!(code == Some(2) && words.iter().all(|word| text.contains(word)), "{change:?}: {text}");
    }
    let index = Path::new(at).join("step-00000001/index.json");
    let mut json: serde_json::Value = serde_json::from_str(&fields(&index)).expect("JSON");
    json.as_object_mut().expect("fields").remove("model_spec").expect("a model");
    std::fs::write(&index, sealed(&json.to_string())).expect("written");
    let (code, text) = run(same, &["--load", at]);
    assert!(code == Some(0) && text.contains("does not say its model"), "{text}");
}

/// Each names the file and what to do.
#[test]
fn what_is_damaged_or_of_another_model_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("ckpt");
    let at = folder.to_str().expect("a name");
    let (code, text) = foretrain(&[&TINY[..], &["--dp", "2", "--save", at]].concat());
    assert_eq!(code, Some(0), "{text}");
    let step = folder.join("step-00000001");
    let refused = |args: &[&str], words: &[&str]| {
        let (code, text) = foretrain(args);
        assert_eq!(code, Some(2), "{text}");
        words.iter().for_each(|word| assert!(text.contains(word), "{word}: {text}"));
    };
    let load = [&TINY[..], &["--load", at]].concat();
    let other = config(dir.path(), 0);
    let other = ["run", "--model", other.to_str().expect("a name"), "--seq-len", "32", "--load", at];
    refused(&other, &["index.json", "shape", "saved by tiny", "same model"]);

    let part = step.join("part-00001.safetensors");
    let whole = std::fs::read(&part).expect("a part");
    let mut flipped = whole.clone();
    *flipped.last_mut().expect("bytes") ^= 1;
    std::fs::write(&part, &flipped).expect("written");
    refused(&["checkpoint", at], &["part-00001.safetensors", "crc32", "damaged"]);
    refused(&load, &["part-00001.safetensors", "crc32", "damaged", "earlier checkpoint"]);
    std::fs::write(&part, &whole[..whole.len() - 5]).expect("written");
    refused(&load, &["part-00001.safetensors", "bytes", "load another checkpoint"]);
    std::fs::remove_file(&part).expect("removed");
    refused(&load, &["part-00001.safetensors"]);
    std::fs::write(&part, &whole).expect("written");

    let index = step.join("index.json");
    let (written, text) = (std::fs::read_to_string(&index).expect("an index"), fields(&index));
    for (from, to, words) in [
        ("\"foretrain_checkpoint\":2", "\"foretrain_checkpoint\":9", "version 2"),
        ("\"shape\":[64]", "\"shape\":[65]", "is missing"),
        ("[0,", "[7,", "pieces"),
        ("}", "", "index.json"),
    ] {
        std::fs::write(&index, sealed(&text.replacen(from, to, 1))).expect("written");
        refused(&load, &["index.json", words]);
    }
    // Constants and counts have the bounds that flags have.
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    for (at, value, words) in [
        ("/optimizer/lr", serde_json::json!(-7.0), "optimizer.lr: -7 is not above zero"),
        ("/optimizer/beta1", 3.0.into(), "optimizer.beta1: 3 is not from 0 to below 1"),
        ("/optimizer/beta2", 1.9.into(), "optimizer.beta2: 1.9 is not"),
        ("/optimizer/eps", (-1.0).into(), "optimizer.eps: -1 is not"),
        ("/optimizer/weight_decay", (-3.0).into(), "optimizer.weight_decay: -3 is not"),
        ("/step", u64::MAX.into(), "step: 18446744073709551615 is more than"),
        ("/sequences", (u64::MAX - 1).into(), "sequences: 18446744073709551614 is more than"),
    ] {
        let mut other = json.clone();
        *other.pointer_mut(at).expect("a field") = value;
        std::fs::write(&index, sealed(&other.to_string())).expect("written");
        refused(&load, &["index.json", words, "load another checkpoint"]);
        refused(&["checkpoint", folder.to_str().expect("a name")], &[words]);
    }
    std::fs::write(&index, &written).expect("written");
    refused(&[&load[..], &["--steps", "18446744073709551615"]].concat(), &["--steps", "use fewer"]);
    // What was cut off while it was written has no name yet.
    std::fs::rename(&step, folder.join("step-00000001.unfinished")).expect("renamed");
    refused(&load, &["ckpt", "foretrain run --save"]);
}
