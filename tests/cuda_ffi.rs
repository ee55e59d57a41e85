//! The calls of NVIDIA's libraries themselves, without a GPU: the program as users start it, with libraries in place of
//! libcuda, libnvrtc and libcublasLt that do on the host what NVIDIA's documentation says and note whatever it leaves
//! undefined (tests/cuda_fake/). What is not tested here is NVIDIA's code, and time.

mod cuda_fake;

use cuda_fake::{Ended, foretrain};

#[track_caller]
fn well(words: &str, variables: &[(&str, &str)]) -> Ended {
    let ended = foretrain(words, variables);
    assert_eq!(ended.code, Some(0), "{words}: {}", ended.said);
    assert!(ended.faults.is_empty(), "{words}: {:?}", ended.faults);
    ended
}

/// Rows and columns, transposes, sums onto what is there, biases, FP8 with its scales, Muon's factors: as cuBLASLt's
/// column-major documentation has them.
#[test]
fn products_in_every_layout() {
    for group in ["products", "muon"] {
        let ended = well(&format!("selftest --on cuda --group {group} --json"), &[]);
        let found: serde_json::Value = serde_json::from_str(&ended.said).unwrap();
        assert_eq!(found["wrong"], 0, "{found:#}");
        assert!(found["verdicts"].as_array().unwrap().len() > 10, "{found:#}");
    }
}

/// Attention by a library that does what graphs of operations say, one operation after the other: that our graphs mean
/// attention, whatever stands between a plan's operands and the library's.
#[test]
fn attention_by_graphs_of_operations() {
    let groups = ["forward", "onto", "head_dims", "narrow_values", "backward_onto"].map(|of| format!("attention_{of}"));
    for group in groups {
        let ended = well(&format!("selftest --on cuda --attention cudnn --group {group} --json"), &[]);
        let found: serde_json::Value = serde_json::from_str(&ended.said).unwrap();
        assert_eq!((&found["wrong"], &found["attention"]), (&0.into(), &"cuDNN 9.19.0".into()), "{found:#}");
    }
}

const MODEL: &str = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96, "vocab_size": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": false}"#;

/// Two steps of a ring on two GPUs: contexts, peers, modules, streams, events and memory, in any order that they leave
/// open; the numbers are the dense reference's, and everything is given back.
#[test]
fn steps_of_a_ring_on_two_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("config.json");
    std::fs::write(&model, MODEL).unwrap();
    let model = model.display();
    let words = format!("run --on cuda --model {model} --devices 0,1 --ring 2 --seq-len 128 --steps 2 --check --json");
    for (seed, options) in [("1", ""), ("2", ""), ("1", " --zero 1 --options muon")] {
        well(&format!("{words}{options}"), &[("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_SEED", seed)]);
    }
}

/// Whole steps whose attention is a library's: one rank, a ring in every split, Ulysses, several sequences.
#[test]
fn steps_with_attention_by_a_library() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("config.json");
    std::fs::write(&model, MODEL).unwrap();
    let model = model.display();
    for how in
        ["", "--ring 2", "--ring 2 --options contiguous", "--ring 2 --options stripe", "--ulysses 2 --micro-batch 2"]
    {
        let words =
            format!("run --on cuda --model {model} --devices 0 {how} --seq-len 96 --check --json --attention cudnn");
        let ended = well(&words, &[]);
        assert!(ended.said.contains("\"attention\": \"cuDNN 9.19.0\""), "{}", ended.said);
    }
}

/// A rank alone: its messages are waits that the host ends, in whatever order the GPU comes to them.
#[test]
fn a_rank_alone_waits_by_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("config.json");
    std::fs::write(&model, MODEL).unwrap();
    let (model, profile) = (model.display(), "traces/measured/h200/gpu.json");
    let words = format!(
        "validate --on cuda --profile {profile} --model {model} --cluster dgx-h200 --gpus 8 --dp 2 --ring 4 --zero 3 \
         --global-batch 2 --seq-len 512 --solo 5 --repeat 2 --json"
    );
    for seed in ["1", "2"] {
        let ended = well(&words, &[("FAKE_CUDA_SEED", seed)]);
        let found: serde_json::Value = serde_json::from_str(&ended.said).unwrap();
        assert!(found["ops"].as_array().unwrap().len() > 20 && found["graph_step_s"].is_null(), "{found:#}");
    }
}

/// Where cuDNN is too old or does not take a shape, it is an error if it was asked for, and else the project's kernels do it.
#[test]
fn without_a_library_that_takes_it() {
    let group = "selftest --on cuda --group attention_head_dims --json --attention";
    for (variable, wanted) in [
        (("FAKE_CUDNN_VERSION", "90500"), "9.8 is wanted"),
        (("FAKE_CUDNN_WIDEST", "64"), "--attention own does without"),
    ] {
        let ended = foretrain(&format!("{group} cudnn"), &[variable]);
        assert_eq!(ended.code, Some(2), "{}", ended.said);
        assert!(ended.said.contains(wanted) && ended.faults.is_empty(), "{}: {:?}", ended.said, ended.faults);
        well(&format!("{group} best"), &[variable]);
    }
}

/// A GPU that is too small, too old or not there is a sentence and exit code 2, and leaves nothing behind.
#[test]
fn what_a_gpu_cannot_do_is_said() {
    let run = "run --on cuda --devices 0 --ring 2";
    for (words, variables, wanted) in [
        (run, ("FAKE_CUDA_BYTES", "600000000"), "GiB are free there"),
        (run, ("FAKE_CUDA_MAJOR", "7"), "compute capability 7.0"),
        ("selftest --on cuda --device 3", ("FAKE_CUDA_DEVICES", "2"), "GPU 3 is not one of the 2 here"),
    ] {
        let ended = foretrain(words, &[variables]);
        assert_eq!(ended.code, Some(2), "{words}: {}", ended.said);
        assert!(ended.said.contains(wanted), "{words}: {}", ended.said);
        assert!(ended.faults.is_empty(), "{words}: {:?}", ended.faults);
    }
}

/// Products in FP8 are Hopper's, and of a library from CUDA 12.9 on: elsewhere a step is refused and a selftest goes without.
#[test]
fn fp8_where_there_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("config.json");
    std::fs::write(&model, MODEL).unwrap();
    let model = model.display();
    for (variable, wanted) in
        [(("FAKE_CUDA_MAJOR", "10"), "sm_90 alone"), (("FAKE_CUBLASLT_VERSION", "120804"), "12.9")]
    {
        let tested = well("selftest --on cuda --group products --json", &[variable]);
        let found: serde_json::Value = serde_json::from_str(&tested.said).unwrap();
        assert!(found["not_here"][0].as_str().unwrap().contains(wanted), "{found:#}");
        let words = format!("run --on cuda --model {model} --devices 0 --seq-len 128 --options fp8");
        let ended = foretrain(&words, &[variable]);
        assert!(
            ended.code == Some(2) && ended.said.contains(wanted) && ended.said.contains("leave fp8 out"),
            "{}",
            ended.said
        );
        assert!(ended.faults.is_empty(), "{:?}", ended.faults);
    }
}

/// Two processes of a step, each with variables of its own.
fn two(words: [&str; 2], variables: [&[(&str, &str)]; 2]) -> [Ended; 2] {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("config.json");
    std::fs::write(&model, MODEL).unwrap();
    let model = model.display();
    let start = |rank: usize| {
        let number = ["0", "1"][rank];
        let place = [("MASTER_ADDR", "localhost"), ("FORETRAIN_PORT", &port), ("FORETRAIN_TIMEOUT", "60")];
        let who = [("RANK", number), ("WORLD_SIZE", "2"), ("LOCAL_RANK", number), ("FAKE_CUDA_DEVICES", "2")];
        let words = format!("run --on cuda --model {model} --ring 2 --seq-len 128 {}", words[rank]);
        foretrain(&words, &[&place[..], &who, variables[rank]].concat())
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| start(1));
        [start(0), other.join().unwrap()]
    })
}

/// What goes wrong in one process, before it has met the others, they are told at once: of a GPU that is not for it, of a
/// file that only rank 0 writes.
#[test]
fn what_one_process_lacks_both_say() {
    let begun = std::time::Instant::now();
    for (words, variables, wanted) in [
        ([""; 2], [&[][..], &[("FAKE_CUDA_MAJOR", "7")]], "compute capability 7.0"),
        ([""; 2], [&[("FAKE_CUDA_MAJOR", "7")][..], &[]], "compute capability 7.0"),
        (["--out no/such/folder/rows.csv", ""], [&[][..], &[]], "no/such/folder/rows.csv"),
    ] {
        let ends = two(words, variables);
        for ended in ends {
            assert!(ended.code == Some(2) && ended.said.contains(wanted), "{}", ended.said);
            assert!(ended.faults.is_empty(), "{:?}", ended.faults);
        }
    }
    assert!(begun.elapsed().as_secs() < 50, "somebody has waited in vain");
}

/// Processes that see one GPU each take that: they come as far as NCCL, which does nothing here.
#[test]
fn processes_that_see_one_gpu_each() {
    let one: &[(&str, &str)] = &[("FAKE_CUDA_DEVICES", "1")];
    let ends = two([""; 2], [one, one]);
    assert!(ends[1].said.contains("processes see one GPU each"), "{}", ends[1].said);
    for ended in ends {
        assert!(ended.code == Some(2) && ended.said.contains("nothing goes between GPUs here"), "{}", ended.said);
        assert!(ended.faults.is_empty(), "{:?}", ended.faults);
    }
}

/// After a kernel that breaks the GPU's context a process is good for nothing more: others go on, and every case has its
/// verdict.
#[test]
fn a_kernel_that_breaks_the_context_is_alone_in_it() {
    let words = "selftest --on cuda --group norms --json";
    let whole = well(words, &[]);
    let count = |ended: &Ended, of: &dyn Fn(&serde_json::Value) -> bool| {
        let found: serde_json::Value = serde_json::from_str(&ended.said).unwrap();
        found["verdicts"].as_array().unwrap().iter().filter(|v| of(v)).count()
    };
    let broken = foretrain(words, &[("FAKE_CUDA_BREAKS", "column_parts")]);
    assert_eq!(broken.code, Some(2), "{}", broken.said);
    assert!(broken.faults.is_empty(), "{:?}", broken.faults);
    assert_eq!(count(&broken, &|_| true), count(&whole, &|_| true), "{}", broken.said);
    let said = |v: &serde_json::Value| v["wrong"].as_str().map(String::from);
    let wrong = count(&broken, &|v| said(v).is_some());
    assert!(wrong > 0 && wrong < count(&whole, &|_| true), "{}", broken.said);
    assert_eq!(wrong, count(&broken, &|v| said(v).is_some_and(|why| why.contains("CUDA"))), "{}", broken.said);
}
