//! What failures leave of a run: the closed form against runs that are played, and both against what was published.

use foretrain::goodput::Run;
use foretrain::goodput::checkpoint::{Checkpoint, state_bytes};
use foretrain::goodput::expected::{best_interval, ettr, young};
use foretrain::goodput::play::play;
use foretrain::spec::{Dtype, FleetSpec, LlmSpec, Options, StorageSpec};
use foretrain::units::Seconds;
use proptest::prelude::*;

const DAY: f64 = 86_400.0;

/// A run of numbers that no fleet has.
fn made_up(failures: f64, interval_s: f64, stall_s: f64, save_s: f64, recover: [f64; 3]) -> Run {
    Run {
        nodes: 100,
        interval_s,
        step_s: 0.0,
        checkpoint: Checkpoint {
            bytes: 1e12,
            bytes_per_gpu: 1e9,
            stall_s,
            save_s,
            load_s: recover[2],
            reshard_s: None,
        },
        failures_with_node: 0.6 * failures,
        failures_without: 0.4 * failures,
        planned: 0.0,
        detect_s: recover[0],
        restart_s: recover[1],
        repair_s: DAY,
        spares: None,
    }
}

fn llama(gpus: u32) -> Run {
    let (fleet, storage) = (FleetSpec::find("llama-3-405b").unwrap(), StorageSpec::find("tectonic").unwrap());
    let bytes = state_bytes(&LlmSpec::find("llama-3.1-405b").unwrap(), Dtype::Bf16, &Options::default());
    Run::new(&fleet, gpus, Checkpoint::new(bytes, gpus, &fleet, &storage)).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// The closed form is exact for a run without end, so a long one that is played comes near it. 4,000 failures leave
    /// 1.6 % of luck (one over the root of their number) in the time between them; five times that is allowed.
    #[test]
    fn a_long_run_has_the_expected_ratio(
        between in 2_000.0..50_000.0f64,
        interval_part in 0.02..1.5f64,
        stall in 0.0..60.0f64,
        behind in 0.0..200.0f64,
        recover in prop::array::uniform3(0.0..400.0f64),
        seed in 0u64..1000,
    ) {
        let interval = (between * interval_part).max(behind);
        let run = made_up(1.0 / between, interval, stall, stall + behind, recover);
        let expected = ettr(&run);
        let played = play(&run, 4_000.0 * between * expected, 1, seed);
        prop_assert!((played.ettr / expected - 1.0).abs() < 0.08, "{} played, {expected} expected", played.ettr);
    }

    /// Nothing is lost of the time: the parts are the whole, and training is the work that was asked for.
    #[test]
    fn the_parts_of_a_run_add_up(
        between in 2_000.0..50_000.0f64,
        spares in 0u32..4,
        planned in 0.0..1e-4f64,
        work in 1.0..1e6f64,
        seed in 0u64..1000,
    ) {
        // Sooner repaired than they fail, on average: with fewer spares than are in repair a run would come to no end.
        let (spares, repair_s) = (Some(spares), between);
        let run =
            Run { spares, repair_s, planned, ..made_up(1.0 / between, 600.0, 5.0, 30.0, [60.0, 30.0, 20.0]) };
        let played = play(&run, work, 3, seed);
        let spent = played.spent;
        prop_assert!(!played.hopeless);
        prop_assert!((spent.training / work - 1.0).abs() < 1e-9, "{spent:?}");
        prop_assert!([spent.stalled, spent.lost, spent.waiting, spent.detecting].iter().all(|s| *s >= 0.0), "{spent:?}");
        prop_assert!(played.ettr_p5 <= played.ettr_p95 && played.ettr_p95 <= 1.0);
    }

    /// No interval is better than the best, and more failures never help.
    #[test]
    fn the_best_interval_is_the_best(between in 2_000.0..1e6f64, stall in 0.01..60.0f64, factor in 0.2..5.0f64) {
        let run = made_up(1.0 / between, 1.0, stall, stall, [100.0, 100.0, 100.0]);
        let best = Run { interval_s: best_interval(&run), ..run.clone() };
        let other = Run { interval_s: factor * best.interval_s, ..best.clone() };
        prop_assert!(ettr(&other) <= ettr(&best) + 1e-9);
        let worse = Run { failures_without: 2.0 * best.failures_without, ..best.clone() };
        prop_assert!(ettr(&worse) < ettr(&best));
        // Young's rule is the first order of it.
        if stall < 1e-3 * between {
            prop_assert!((young(&run) / best.interval_s - 1.0).abs() < 0.05, "{} {}", young(&run), best.interval_s);
        }
    }
}

/// Planned stops save first: what a failure would have thrown away is kept, the more of it the longer the interval. With what
/// is found of 60 runs of a month's training luck is below 3 %, and a run so far from the best is longer than that.
#[test]
fn planned_stops_keep_what_was_trained_since_the_last_save() {
    for hours in [0.5, 2.0, 8.0, 17.0, 400.0 * 24.0] {
        let run = llama(16_384).every(Seconds::new(3600.0 * hours)).unwrap();
        let (expected, played) = (ettr(&run), play(&run, 30.0 * DAY, 60, 1).ettr);
        assert!((played / expected - 1.0).abs() < 0.03, "{hours} h: {played} played, {expected} expected");
    }
    // Of stops alone nothing is ever lost, and the fewer saves the better.
    let stops = Run { planned: 1e-4, ..made_up(0.0, 1_000.0, 10.0, 30.0, [60.0, 30.0, 20.0]) };
    let never = ettr(&Run { interval_s: 1e9, ..stops.clone() });
    assert!((never * (1.0 + 1e-4 * 80.0) - 1.0).abs() < 1e-6 && ettr(&stops) < never, "{never}");
    assert!((play(&stops, 4e7, 1, 3).ettr / ettr(&stops) - 1.0).abs() < 0.002);
}

#[test]
fn daly_and_meta_have_the_same_formula() {
    // Daly 2006, equation 20, without a checkpoint behind the stall.
    let run = made_up(1.0 / 10_800.0, 1_200.0, 30.0, 30.0, [200.0, 300.0, 100.0]);
    let (m, t, w, r) = (10_800.0f64, 1_200.0f64, 30.0f64, 600.0f64);
    let daly = t / (m * (r / m).exp() * (((t + w) / m).exp() - 1.0));
    assert!((ettr(&run) / daly - 1.0).abs() < 1e-12);
    // arXiv:2410.21680: 2,048 nodes, 3.8 failures in 1,000 node-days, 10 minutes to restart, 10 between checkpoints
    // that take 5 s: 0.911, to the first order in the rate of failures.
    let rate = 2048.0 * 3.8e-3 / DAY;
    let run = made_up(rate, 600.0, 5.0, 5.0, [300.0, 300.0, 0.0]);
    assert!((ettr(&run) - 0.911).abs() < 0.005, "{}", ettr(&run));
}

#[test]
fn llama_3_was_interrupted_every_three_hours_and_trained_nine_tenths_of_the_time() {
    // arXiv:2407.21783: 466 interruptions in 54 days, 419 of them unexpected; "higher than 90 % effective training time".
    let run = llama(16_384);
    let unexpected = run.failures() * 54.0 * DAY;
    assert!((unexpected - 419.0).abs() < 0.5, "{unexpected}");
    assert!((run.planned * 54.0 * DAY - 47.0).abs() < 0.5);
    assert!((1.0 / run.failures() / 3600.0 - 3.09).abs() < 0.01);
    let played = play(&run, 50.0 * DAY, 50, 1);
    assert!(played.ettr > 0.9 && played.ettr < 0.97, "{}", played.ettr);
}

#[test]
fn failures_come_with_the_nodes() {
    // arXiv:2410.21680: 6.5 failures in 1,000 node-days. A rate a node means that 16,384 GPUs fail 8 times as often as
    // 2,048, and that 131,072 are down more often than they train for an hour.
    let (fleet, storage) = (FleetSpec::find("meta-rsc-1").unwrap(), StorageSpec::find("tectonic").unwrap());
    let of = |gpus| Run::new(&fleet, gpus, Checkpoint::new(5.67e12, gpus, &fleet, &storage)).unwrap();
    assert!((of(16_384).failures() / of(2_048).failures() - 8.0).abs() < 1e-9);
    // The paper projects 1.8 h between failures of jobs of 16,384 GPUs.
    let hours = 1.0 / of(16_384).failures() / 3600.0;
    assert!((hours / 1.8 - 1.0).abs() < 0.05, "{hours}");
    assert!(ettr(&of(131_072)) < 0.6 && ettr(&of(131_072)) > 0.1);
}

#[test]
fn a_checkpoint_costs_what_was_published() {
    // arXiv:2407.20143, table 8, the two rows that the constants are from; 14 bytes a parameter.
    let (fleet, hdfs) = (FleetSpec::find("llama-3-405b").unwrap(), StorageSpec::find("bytecheckpoint-hdfs").unwrap());
    for (params, gpus, stall, save) in [(7e9, 1488, 0.34, 20.13), (405e9, 8960, 0.59, 51.06)] {
        let checkpoint = Checkpoint::new(14.0 * params, gpus, &fleet, &hdfs);
        assert!((checkpoint.stall_s / stall - 1.0).abs() < 0.05, "{checkpoint:?}");
        assert!((checkpoint.save_s / save - 1.0).abs() < 0.05, "{checkpoint:?}");
    }
    // How long they load no law explains: the smaller one on fewer ranks takes twice as long. Both are within 1.6 times.
    for (params, gpus, load, reshard) in [(7e9, 1488, 265.73, Some(401.21)), (405e9, 8960, 129.49, None)] {
        let checkpoint = Checkpoint::new(14.0 * params, gpus, &fleet, &hdfs);
        let off = |predicted: f64, stated: f64| (predicted / stated).max(stated / predicted);
        assert!(off(checkpoint.load_s, load) < 1.6, "{checkpoint:?}");
        let other = checkpoint.reshard_s.unwrap();
        assert!(reshard.is_none_or(|stated| off(other, stated) < 1.6), "{checkpoint:?}");
        assert!((other / checkpoint.load_s - 401.21 / 265.73).abs() < 0.01, "{checkpoint:?}");
    }
    // Twice the ranks write half as much each: three times as fast was measured from 75 to 150 replicas, where
    // the bytes decide; here it is what the bytes alone say.
    let [few, many] =
        [4480, 8960].map(|gpus| Checkpoint::new(5.67e12, gpus, &fleet, &hdfs).save_s - 1.61 * f64::from(gpus).log2());
    assert!((few / many - 2.0).abs() < 0.01);
    // BLOOM: 2.3 TB in 40 s by 384 GPUs every 100 steps of 105 s, 0.4 % of the time.
    let (fleet, gpfs) = (FleetSpec::find("bloom-176b").unwrap(), StorageSpec::find("gpfs-jean-zay").unwrap());
    let checkpoint = Checkpoint::new(2.3e12, 384, &fleet, &gpfs);
    assert!((checkpoint.stall_s - 40.0).abs() < 1.0, "{checkpoint:?}");
    let run = Run::new(&fleet, 384, checkpoint).unwrap().every(Seconds::new(10_500.0)).unwrap();
    let overhead = run.checkpoint.stall_s / run.interval_s;
    assert!((overhead - 0.0038).abs() < 0.0002, "{overhead}");
}

#[test]
fn few_spares_mean_waiting() {
    let mut run = made_up(1.0 / 20_000.0, 1_800.0, 5.0, 30.0, [60.0, 30.0, 30.0]);
    let waits = [0, 1, 4, 40].map(|spares| {
        run.spares = Some(spares);
        play(&run, 60.0 * DAY, 10, 3).spent.waiting
    });
    assert!(waits.windows(2).all(|w| w[1] <= w[0]), "{waits:?}");
    // With none, each failure that takes a node waits for its repair of a day.
    assert!(waits[0] > 10.0 * DAY && waits[3] == 0.0, "{waits:?}");
    // A failure finds 2.6 nodes in repair on average, and at most 7 of them 99 % of the time (Poisson's table).
    assert_eq!(run.spares_for(0.99), 8);
}

/// Failures that a wait is interrupted by do not end it: a run is up only while no more nodes are in repair than stand by, and
/// those in repair are a Poisson number (M/G/infinity), whatever else happens.
#[test]
fn a_run_is_up_while_no_more_nodes_are_in_repair_than_stand_by() {
    for (in_repair, spares) in [(0.75, 0), (0.75, 1), (12.0, 8), (12.0, 14)] {
        let run = made_up(1.0 / 20_000.0, 600.0, 0.0, 0.0, [0.0; 3]);
        let run = Run { spares: Some(spares), repair_s: in_repair / run.failures_with_node, ..run };
        let poisson = |k: u32| (1..=k).fold((-run.in_repair()).exp(), |p, i| p * run.in_repair() / f64::from(i));
        let up: f64 = (0..=spares).map(poisson).sum();
        // Of the time that the run is up, this is what failures throw away.
        let expected = up * ettr(&Run { spares: None, ..run.clone() });
        let played = play(&run, 400.0 * DAY, 20, 7).ettr;
        assert!(
            (played / expected - 1.0).abs() < 0.05,
            "{spares} for {in_repair}: {played} played, {expected} expected"
        );
    }
    // 12 in repair and 4 that stand by: up for 0.8 % of the time.
    let run = Run { spares: Some(4), ..made_up(1.0 / 20_000.0, 600.0, 5.0, 30.0, [60.0, 30.0, 30.0]) };
    assert!(play(&Run { repair_s: 12.0 / run.failures_with_node, ..run }, 30.0 * DAY, 5, 0).hopeless);
}

#[test]
fn a_run_that_never_fails_only_stands_still_to_save() {
    let run = made_up(0.0, 100.0, 1.0, 5.0, [60.0, 30.0, 30.0]);
    let played = play(&run, 10_000.0, 2, 0);
    // 99 checkpoints in 100 stretches: nobody waits for one after the end.
    assert_eq!(played.spent.stalled, 99.0);
    assert_eq!(played.spent.wall(), 10_099.0);
    assert!((ettr(&run) - 100.0 / 101.0).abs() < 1e-12);
}

#[test]
fn a_run_without_hope_ends() {
    let run = made_up(1.0 / 100.0, 600.0, 5.0, 30.0, [600.0, 300.0, 300.0]);
    let played = play(&run, 1e5, 5, 0);
    assert!(played.hopeless && played.runs == 1);
}

#[test]
fn too_short_an_interval_is_refused_with_the_shortest() {
    let error = llama(16_384).every(Seconds::new(1.0)).unwrap_err().to_string();
    assert!(error.contains("--every") && error.contains("too short") && error.contains("give at least"), "{error}");
    // What is said to be enough is.
    let least = error.split("give at least ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    llama(16_384).every(Seconds::new(least.parse().unwrap())).unwrap();
}

#[test]
fn an_optimizer_that_keeps_less_has_less_to_save() {
    let model = LlmSpec::find("llama-3.1-405b").unwrap();
    let of = |words: &str| state_bytes(&model, Dtype::Bf16, &words.parse().unwrap()) / model.params() as f64;
    let all = ["default", "bf16-moments", "no-master", "bf16-grads+bf16-moments+no-master"].map(of);
    assert_eq!(all, [14.0, 10.0, 10.0, 6.0]);
    // But for the two tables, 1 % of the weights, Muon keeps a number less of each.
    let muon = of("muon");
    assert!((muon - 10.0 - 4.0 * 2.0 * 128_256.0 * 16_384.0 / model.params() as f64).abs() < 1e-3, "{muon}");
}

#[test]
fn what_nobody_measured_is_named() {
    // Llama 3's paper counts failures and says nothing of how long each took.
    assert_eq!(FleetSpec::find("llama-3-405b").unwrap().assumed(), ["detect", "restart", "repair"]);
    assert!(StorageSpec::find("tectonic").unwrap().assumed().contains(&"write_per_node"));
    assert!(!StorageSpec::find("tectonic").unwrap().assumed().contains(&"write"));
    let borrowed = ["save_doubling", "load_doubling", "reshard"];
    assert!(borrowed.iter().all(|field| StorageSpec::find("tectonic").unwrap().assumed().contains(field)));
    assert!(StorageSpec::find("bytecheckpoint-hdfs").unwrap().assumed().contains(&"load"));
}

/// The run that `foretrain goodput` prints as JSON.
fn asked(flags: &str) -> Result<serde_json::Value, String> {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_foretrain"));
    let out = command.args(["goodput", "--step-time", "5s", "--runs", "2", "--json"]).args(flags.split(' ')).output();
    let out = out.unwrap();
    if !out.status.success() {
        return Err(String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned());
    }
    Ok(serde_json::from_slice(&out.stdout).unwrap())
}

#[test]
fn what_the_user_knows_goes_before_the_files() {
    // arXiv:2410.21680: jobs of 1,024 GPUs ran 7.9 h between failures of any kind; nodes alone would fail every 28.8 h.
    let run =
        asked("--gpus 1024 --state 1TB --fleet meta-rsc-1 --mtbf 7.9h --recover 10min --store-rate 20GB/s").unwrap();
    let number = |path: &str| run.pointer(path).and_then(serde_json::Value::as_f64).unwrap();
    assert!((number("/mtbi_s") / 3600.0 - 7.9).abs() < 1e-9);
    assert_eq!(number("/run/detect_s") + number("/run/restart_s"), 600.0);
    assert!((number("/run/checkpoint/save_s") - 16.1 - 50.0).abs() < 1e-9);
    // Planned stops come as often as they did.
    let stops = |flags| asked(flags).unwrap().pointer("/run/planned").and_then(serde_json::Value::as_f64).unwrap();
    let [before, after] = ["--gpus 1024 --state 1TB", "--gpus 1024 --state 1TB --mtbf 1d"].map(stops);
    assert!(before > 0.0 && (after / before - 1.0).abs() < 1e-9);
    let error = asked("--gpus 8 --state 1TB --tp 8 --model llama-3-8b").unwrap_err();
    assert!(error.contains("only --gpus is used") && error.contains("--tp"), "{error}");
    let error = asked("--gpus 8 --state 1TB --spares 4000000000").unwrap_err();
    assert!(error.contains("--spares") && error.contains("as many as it takes"), "{error}");
    for flag in ["--mtbf 0s", "--recover 0s", "--store-rate 0GB/s"] {
        let error = asked(&format!("--gpus 8 --state 1TB {flag}")).unwrap_err();
        assert!(error.contains(flag.split(' ').next().unwrap()) && error.contains("not above zero"), "{error}");
    }
}

/// A run that waits for nodes most of the time is seldom there to be stopped.
#[test]
fn planned_stops_are_counted_while_a_run_is_up() {
    let run = asked("--gpus 16384 --state 5.67TB --spares 9").unwrap();
    let stops = run["played"]["spent"]["stops"].as_f64().unwrap();
    let causes = run["interruptions"].as_array().unwrap().iter();
    let planned: f64 =
        causes.filter(|c| c["cause"] == "planned maintenance").map(|c| c["count"].as_f64().unwrap()).sum();
    assert!(stops > 10.0 && (planned / stops - 1.0).abs() < 0.4, "{planned} of {stops}");
}

/// Nodes that stand by are paid for, too.
#[test]
fn gpu_hours_count_nodes_that_stand_by() {
    let line = "goodput --gpus 12288 --fleet meta-rsc-1 --step-time 6.34s --state 2.45TB --runs 2";
    let text = |spares: &str| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_foretrain"));
        String::from_utf8(command.args(format!("{line}{spares}").split(' ')).output().unwrap().stdout).unwrap()
    };
    let run = asked("--gpus 12288 --fleet meta-rsc-1 --state 2.45TB --spares 320").unwrap();
    let number = |path: &str| run.pointer(path).and_then(serde_json::Value::as_f64).unwrap();
    let hours = number("/wall_s") / 3600.0;
    assert!((number("/gpu_hours/training") / hours - 12_288.0).abs() < 1e-6);
    assert!((number("/gpu_hours/standing_by") / hours - 2_560.0).abs() < 1e-6);
    assert!(text(" --spares 320").contains("with the nodes that stand by"));
    assert!(text("").contains("GPU-hours, without nodes that stand by"));
    let any = asked("--gpus 12288 --fleet meta-rsc-1 --state 2.45TB").unwrap();
    assert!(any.pointer("/gpu_hours/standing_by").unwrap().is_null());
}

/// A shipped cluster's file with something else in it, in a folder.
fn changed(cluster: &str, change: impl Fn(&mut serde_json::Value)) -> (tempfile::TempDir, String) {
    let (dir, text) = (tempfile::tempdir().unwrap(), std::fs::read_to_string(format!("models/cluster/{cluster}.json")));
    let mut spec = serde_json::from_str(&text.unwrap()).unwrap();
    change(&mut spec);
    let path = dir.path().join("cluster.json");
    std::fs::write(&path, spec.to_string()).unwrap();
    let path = path.display().to_string();
    (dir, path)
}

fn note(run: &serde_json::Value, of: &str) -> Option<String> {
    let notes = run["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap().to_string());
    notes.into_iter().find(|note| note.starts_with(of))
}

/// A full cluster had nodes to spare, and 99 % where 57 % are left without.
#[test]
fn a_full_cluster_has_no_nodes_to_spare() {
    let (_dir, path) = changed("dgx-h100", |spec| spec["nodes"] = 96.into());
    let of = |flags: &str| asked(&format!("--cluster {path} {flags}")).unwrap();
    let alone = of("--gpus 768 --spares 0");
    let ettr = format!("{:.1} %", 100.0 * alone["played"]["ettr"].as_f64().unwrap());
    let any = of("--gpus 768");
    let said = note(&any, "spares:").unwrap();
    let parts = ["96 nodes of 8 GPUs", "uses 96", "as many that stand by as it takes", "--spares 0", ettr.as_str()];
    assert!(parts.iter().all(|part| said.contains(part)), "{ettr}: {said}");
    assert!(any["played"]["ettr"].as_f64().unwrap() > 0.2 + alone["played"]["ettr"].as_f64().unwrap(), "{said}");
    let said = note(&of("--gpus 760 --spares 4"), "spares:").unwrap();
    assert!(["uses 95", "has 4 that", "with the 1 that"].iter().all(|part| said.contains(part)), "{said}");
    // There are enough; those asked for are there; a file of fewer nodes than the run's is no list of them.
    for flags in ["--gpus 384", "--gpus 760 --spares 1", "--gpus 768 --spares 0", "--gpus 1024"] {
        assert_eq!(note(&of(flags), "spares:"), None, "{flags}");
    }
}

/// A node wrote 6.25 GB/s through a NIC of 2.9.
#[test]
fn a_node_saves_no_faster_than_its_nics_carry() {
    let (_dir, path) = changed("dgx-h100", |spec| {
        let out = &mut spec["scale_out"];
        out["nics_per_node"] = 1.into();
        for (rate, value) in
            [("raw", "3.125 GB/s"), ("achieved", "2.9375 GB/s"), ("p2p", "2.8 GB/s"), ("several", "2.8 GB/s")]
        {
            out[rate]["value"] = value.into();
        }
    });
    let of = |cluster: &str, flags: &str| asked(&format!("--gpus 64 --cluster {cluster}{flags}")).unwrap();
    let time = |run: &serde_json::Value, field: &str| run["run"]["checkpoint"][field].as_f64().unwrap();
    let (slow, fast) = (of(&path, ""), of("dgx-h100", ""));
    let more = time(&fast, "bytes") / 8.0 * (1.0 / 2.9375e9 - 1.0 / 6.25e9);
    for field in ["save_s", "load_s"] {
        assert!((time(&slow, field) - time(&fast, field) - more).abs() < 1e-6, "{field}: {more}");
    }
    let said = note(&slow, "storage:").unwrap();
    assert!(
        ["write 6.25 GB/s", "read 6.25 GB/s", "2.94 GB/s", "--store-rate"].iter().all(|part| said.contains(part)),
        "{said}"
    );
    assert_eq!(note(&fast, "storage:"), None);
    // Whoever tells the rate knows it.
    let told = [path.as_str(), "dgx-h100"].map(|cluster| of(cluster, " --store-rate 80GB/s"));
    assert!(time(&told[0], "save_s") == time(&told[1], "save_s") && note(&told[0], "storage:").is_none());
}

/// The formula knows nothing of nodes that stand by, and says so where there are few.
#[test]
fn what_the_long_run_leaves_out_is_said() {
    let few = asked("--gpus 1024 --state 1TB --spares 0").unwrap();
    assert!(few["ettr_expected_leaves_out"].as_str().unwrap().starts_with("waiting for a node"), "{few}");
    assert!(asked("--gpus 1024 --state 1TB").unwrap().get("ettr_expected_leaves_out").is_none());
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_foretrain"));
    let words = "goodput --gpus 1024 --state 1TB --step-time 5s --spares 0 --runs 2";
    let text = String::from_utf8(command.args(words.split(' ')).output().unwrap().stdout).unwrap();
    assert!(text.contains("in the long run, leaving out waiting for a node"), "{text}");
}

/// Rows written down before they were predicted: stalls came out 2.5 times too long, saves 18 % and loads 74 % too slow. Since
/// then what a save and a load take besides their bytes grows with the ranks, and the copy to the host is fitted on these rows.
#[test]
fn blind_checkpoints_are_held_at_what_they_came_out() {
    let text = std::fs::read_to_string("traces/published/blind_reliability.json").unwrap();
    let rows: serde_json::Value = serde_json::from_str(&text).unwrap();
    let (mut stalls, mut saves, mut loads) = (vec![], vec![], vec![]);
    for row in rows["checkpoints"].as_array().unwrap() {
        let of = |field: &str| row[field].as_f64();
        let (gpus, bytes) = (of("gpus").unwrap(), of("state_bytes").unwrap());
        if let Some(parameters) = of("parameters") {
            assert!((14.0 * parameters / bytes - 1.0).abs() < 0.01, "{row}");
        }
        let rate = of("store_bytes_per_s").map_or(String::new(), |rate| format!(" --store-rate {rate}B/s"));
        let run = asked(&format!("--gpus {gpus} --state {bytes}B{rate}")).unwrap();
        let predicted = |field: &str| run["run"]["checkpoint"][field].as_f64().unwrap();
        stalls.push(predicted("stall_s") / of("stall_s").unwrap());
        if !rate.is_empty() {
            saves.push(predicted("save_s") / of("synchronous_s").unwrap());
            loads.push(predicted("load_s") / of("load_s").unwrap());
        }
    }
    let median = |mut ratios: Vec<f64>| {
        ratios.sort_by(f64::total_cmp);
        (ratios[(ratios.len() - 1) / 2] + ratios[ratios.len() / 2]) / 2.0
    };
    let medians = [median(stalls), median(saves), median(loads)];
    for (found, most) in medians.iter().zip([1.15, 1.15, 1.4]) {
        assert!(*found > 1.0 / most && *found < most, "{medians:?}");
    }
}

/// A second lot, held at what it came out, blind: bytes of six checkpoints 7 % above what is published in the median and 32 %
/// at most; a run whose stall of 0.78 s came out at 0.69 of it, at half since the copy's rate is that of the first lot; a
/// cluster of 1,600 H200 that fails twice as often as Llama 3's; OPT-175B, whose fleet is shipped.
#[test]
fn blind_checkpoints_and_failures_are_held_at_what_they_came_out() {
    let text = std::fs::read_to_string("traces/published/blind_reliability_2.json").unwrap();
    let rows: serde_json::Value = serde_json::from_str(&text).unwrap();
    let list = |kind: &str| rows[kind].as_array().unwrap().clone();
    let mut bytes = vec![];
    for row in list("checkpoints") {
        let (gpus, of) = (row["gpus"].as_u64().unwrap(), |field: &str| row[field].as_f64());
        let state = match row["model"].as_str() {
            Some(model) => state_bytes(&LlmSpec::find(model).unwrap(), Dtype::Bf16, &Options::default()),
            None => 14.0 * of("parameters").unwrap(),
        };
        bytes.extend(of("state_bytes").map(|stated| state / stated));
        let run = asked(&format!("--gpus {gpus} --state {state}B")).unwrap();
        let stall = run["run"]["checkpoint"]["stall_s"].as_f64().unwrap();
        assert!(of("stall_s").is_none_or(|stated| (0.45..0.6).contains(&(stall / stated))), "{row}: {stall} s");
    }
    bytes.sort_by(f64::total_cmp);
    assert!(bytes.iter().all(|ratio| (1.0..1.35).contains(ratio)) && bytes[bytes.len() / 2] < 1.09, "{bytes:?}");
    let failures = list("failures");
    let between = |gpus: u64, fleet: &str| {
        let run = asked(&format!("--gpus {gpus} --state 1TB --fleet {fleet}")).unwrap();
        run["mtbi_s"].as_f64().unwrap() / 3600.0
    };
    let crusoe = between(1600, "llama-3-405b") / failures[0]["mtbf_h"].as_f64().unwrap();
    assert!((1.7..2.4).contains(&crusoe), "{crusoe}");
    let opt = between(992, "opt-175b") / failures[3]["mtbf_h"].as_f64().unwrap();
    assert!((1.4..1.8).contains(&opt), "{opt}");
}

/// A third lot, held at what it came out, blind: bytes of three checkpoints are met within 9 %; four clusters, asked of a fleet
/// that is not theirs, Llama 3's, failed from a quarter as often to five times as often as that says.
#[test]
fn other_fleets_fail_from_a_quarter_to_five_times_as_often() {
    let text = std::fs::read_to_string("traces/published/blind_reliability_3.json").unwrap();
    let rows: serde_json::Value = serde_json::from_str(&text).unwrap();
    for row in rows["checkpoints"].as_array().unwrap() {
        let ratio = 14.0 * row["parameters"].as_f64().unwrap() / row["state_bytes"].as_f64().unwrap();
        assert!((0.99..1.09).contains(&ratio), "{row}: {ratio}");
    }
    let between = |row: &serde_json::Value| {
        let run = asked(&format!("--gpus {} --state 1TB --fleet llama-3-405b", row["gpus"])).unwrap();
        run["mtbi_s"].as_f64().unwrap() / 3600.0 / row["mtbf_h"].as_f64().unwrap()
    };
    let mut ratios: Vec<f64> = rows["failures"].as_array().unwrap().iter().map(between).collect();
    ratios.sort_by(f64::total_cmp);
    let held = [0.25..0.3, 0.45..0.55, 1.7..1.9, 4.9..5.3];
    assert!(ratios.len() == held.len() && ratios.iter().zip(&held).all(|(r, held)| held.contains(r)), "{ratios:?}");
}
