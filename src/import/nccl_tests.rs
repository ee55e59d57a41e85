//! Logs of nccl-tests (and rccl-tests): text in its several layouts, with or without the columns `redop` and `root`, with
//! one or both of out of place and in place, behind whatever `mpirun` or `srun` writes before a line; and `-J` JSON.

use crate::error::{self, Error, Result};
use crate::spec::CollectiveOp;
use serde_json::Value;
use std::collections::BTreeSet;

/// What a log says of the run, and its rows.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Log {
    /// As the program is named: all_reduce, sendrecv. None where the log does not say.
    pub op: Option<String>,
    pub gpus: Option<u32>,
    pub nodes: Option<u32>,
    /// What the GPUs call themselves: NVIDIA H100 80GB HBM3. Empty where the log does not list them.
    pub devices: BTreeSet<String>,
    pub rows: Vec<Row>,
    /// Rows are of a JSON list.
    listed: bool,
}

/// Microseconds that a collective may take: the launch of a kernel alone is longer than the least, and nobody waits for more
/// than the most, three hours.
const TIMES_US: std::ops::RangeInclusive<f64> = 0.1..=1e10;

impl Log {
    /// Where a row stands.
    fn place(&self, row: &Row) -> String {
        if self.listed { format!("results[{}]", row.at) } else { format!("line {}", row.at) }
    }

    /// Errors: a row with a time that no collective has, or a bus bandwidth, `bus` times that of the full buffer, above `most`,
    /// bytes a second, of which `cluster` is the name.
    pub fn check(&self, file: &str, (bus, most): (f64, f64), cluster: &str) -> Result<()> {
        for row in &self.rows {
            let Row { bytes, time_us, .. } = *row;
            let rate = bus * bytes as f64 / (time_us * 1e-6);
            let why = match TIMES_US.contains(&time_us) {
                false => format!("{time_us:e} us is no time of a collective"),
                true if rate > most => format!(
                    "{bytes} B in {time_us} us, {:.0} GB/s of bus bandwidth, which links of {cluster} are not for, that reach {:.0} \
                     both ways together; name another --cluster",
                    rate / 1e9,
                    most / 1e9
                ),
                true => continue,
            };
            return Err(Error::spec(file, self.place(row), format!("{why}; measure again, or take the row out")));
        }
        Ok(())
    }
}

/// One size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// Of the full buffer.
    pub bytes: u64,
    /// Microseconds, out of place; in place where there is no other.
    pub time_us: f64,
    /// Line of the file, or place in the list.
    pub at: usize,
}

/// Programs of nccl-tests.
const OPS: &[&str] = &[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "alltoall",
    "sendrecv",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "hypercube",
];

/// The kind of a collective by the name of its program; none of those that no plan has.
pub fn kind_of(op: &str) -> Option<CollectiveOp> {
    match op {
        "all_reduce" => Some(CollectiveOp::AllReduce),
        "all_gather" => Some(CollectiveOp::AllGather),
        "reduce_scatter" => Some(CollectiveOp::ReduceScatter),
        "alltoall" | "all_to_all" => Some(CollectiveOp::AllToAll),
        _ => None,
    }
}

/// Reads a log; `file` is what errors call it.
pub fn parse(file: &str, text: &str) -> Result<Log> {
    let mut log = if text.trim_start().starts_with('{') { json(file, text)? } else { lines(file, text)? };
    if log.rows.is_empty() {
        let why =
            "no row of a table: none has bytes, count, type and times; give the output of a program of nccl-tests";
        return Err(Error::spec(file, "contents", why));
    }
    // A file is mostly named after what was run.
    log.op = log.op.or_else(|| named(&file.to_lowercase()));
    log.rows.sort_by_key(|row| row.bytes);
    Ok(log)
}

fn named(text: &str) -> Option<String> {
    let found = OPS.iter().filter_map(|op| Some((text.find(op)?, std::cmp::Reverse(op.len()), *op)));
    found.min().map(|(_, _, op)| op.to_string())
}

fn lines(file: &str, text: &str) -> Result<Log> {
    let mut log = Log::default();
    let (mut ranks, mut hosts) = (BTreeSet::new(), BTreeSet::new());
    for (at, line) in text.lines().enumerate() {
        if let Some((rank, host, device)) = rank_of(line) {
            ranks.insert(rank);
            hosts.insert(host);
            log.devices.extend(device);
        } else if let Some(row) = row_of(line) {
            log.rows.push(
                row.map(|(bytes, time_us)| Row { bytes, time_us, at: at + 1 })
                    .map_err(|why| Error::spec(file, format!("line {}", at + 1), why))?,
            );
        } else if line.contains("Out of bounds values") && line.contains("FAILED") {
            return Err(Error::spec(file, format!("line {}", at + 1), format!("the data check failed: {WRONG}")));
        } else if log.op.is_none() && line.contains("_perf") {
            log.op = named(line);
        }
    }
    log.gpus = Some(ranks.len() as u32).filter(|n| *n > 0);
    log.nodes = Some(hosts.len() as u32).filter(|n| *n > 0);
    Ok(log)
}

/// `#  Rank  3 Group  0 Pid   123 on host-a device  3 [0x..] NVIDIA H100`: rank, host and GPU.
fn rank_of(line: &str) -> Option<(u32, &str, Option<String>)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|w| *w == "Rank")?;
    let rank = words.get(at + 1)?.trim_end_matches(':').parse().ok()?;
    let on = words.iter().position(|w| *w == "on")?;
    let name =
        words.iter().skip(on + 2).skip_while(|w| !w.ends_with(']')).skip(1).copied().collect::<Vec<_>>().join(" ");
    Some((rank, words.get(on + 1)?, Some(name).filter(|name| !name.is_empty())))
}

const TYPES: &[&str] = &[
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16", "float16", "float32",
    "fp8_e4m3", "fp8_e5m2", "f8e4m3", "f8e5m2", "char",
];

/// A row: bytes and us. None where the line is none, an error where it is one that cannot be read.
fn row_of(line: &str) -> Option<std::result::Result<(u64, f64), String>> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let kind = words.iter().position(|w| TYPES.contains(w))?;
    // Bytes and count stand right before the type; whatever is before them, a launcher wrote.
    let (bytes, count) = (words.get(kind.checked_sub(2)?)?, words[kind - 1]);
    if line.trim_start().starts_with('#') || count.parse::<u64>().is_err() {
        return None;
    }
    // Some launchers write no blank after their prefix.
    let digits = bytes.rsplit(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    if digits.is_empty() {
        return None;
    }
    let Ok(bytes) = digits.parse::<u64>() else { return Some(Err(format!("{bytes:?} is no number of bytes"))) };
    let mut rest = &words[kind + 1..];
    if rest.first().is_some_and(|w| w.starts_with(char::is_alphabetic) && *w != "N/A") {
        rest = &rest[1..];
    }
    // One or two of (time, algbw, busbw, wrong or not): an odd word before them is the root.
    if matches!(rest.len(), 5 | 7 | 9) {
        rest = &rest[1..];
    }
    Some(time_of(rest).map(|time| (bytes, time)))
}

/// What to do about a log whose data check failed.
const WRONG: &str = "what was timed did something else; mend the library or the network, and measure again";

/// Errors: values that the data check found wrong. What is no number was not checked.
fn right(wrong: Option<f64>) -> std::result::Result<(), String> {
    match wrong.filter(|n| *n != 0.0) {
        Some(n) => Err(format!("{n} values are wrong (#wrong): {WRONG}")),
        None => Ok(()),
    }
}

fn time_of(rest: &[&str]) -> std::result::Result<f64, String> {
    if !matches!(rest.len(), 3 | 4 | 6 | 8) {
        return Err(format!(
            "{} columns after the type, where 3, 4, 6 or 8 belong; the line may be cut off",
            rest.len()
        ));
    }
    // The last of the four of a place.
    if matches!(rest.len(), 4 | 8) {
        rest.chunks(4).try_for_each(|place| right(place[3].parse().ok()))?;
    }
    let time = |word: &str| word.parse::<f64>().ok().filter(|t| *t > 0.0 && t.is_finite());
    let in_place = (rest.len() >= 6).then(|| rest[rest.len() / 2]);
    let first = time(rest[0]).or_else(|| time(in_place?));
    first.ok_or_else(|| format!("{:?} is no time in us above 0; the line may be cut off", rest[0]))
}

/// `-J`: `results[]` of `size` and `out_of_place`, `in_place` with `time`.
fn json(file: &str, text: &str) -> Result<Log> {
    let top: Value = error::json::parse(file, text)?;
    let rows = top.get("results").and_then(Value::as_array);
    let rows =
        rows.ok_or_else(|| Error::spec(file, "results", "missing, or no list; write what -J of nccl-tests does"))?;
    let op = named(&top.get("config").unwrap_or(&top).to_string());
    let mut log = Log { op, listed: true, ..Log::default() };
    let number = |value: Option<&Value>| value.and_then(|v| v.as_f64().or_else(|| v.as_str()?.parse().ok()));
    let out_of_bounds = top.get("out_of_bounds").and_then(|all| number(all.get("count")));
    right(out_of_bounds).map_err(|why| Error::spec(file, "out_of_bounds", why))?;
    if let Some(devices) = top.get("devices").and_then(Value::as_array) {
        let host = |d: &Value| ["host", "hostname"].iter().find_map(|key| d.get(key).map(Value::to_string));
        log.gpus = Some(devices.len() as u32).filter(|n| *n > 0);
        log.devices = devices.iter().filter_map(|d| Some(d.get("device_info")?.as_str()?.trim().to_string())).collect();
        log.nodes = Some(devices.iter().filter_map(host).collect::<BTreeSet<_>>().len() as u32).filter(|n| *n > 0);
    }
    for (at, row) in rows.iter().enumerate() {
        let wrong = |place: &str| right(number(row.get(place).and_then(|place| place.get("nwrong"))));
        ["out_of_place", "in_place"]
            .into_iter()
            .try_for_each(wrong)
            .map_err(|why| Error::spec(file, format!("results[{at}]"), why))?;
        let time = |place: &str| number(row.get(place)?.get("time")).filter(|t| *t > 0.0 && t.is_finite());
        let bytes = number(row.get("size")).filter(|b| *b >= 0.0 && *b < 1e18);
        let (Some(bytes), Some(time_us)) = (bytes, time("out_of_place").or_else(|| time("in_place"))) else {
            let why = "has no `size`, or no time above 0 in `out_of_place` or `in_place`";
            return Err(Error::spec(file, format!("results[{at}]"), why));
        };
        log.rows.push(Row { bytes: bytes as u64, time_us, at });
    }
    Ok(log)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rows(text: &str) -> Vec<(u64, f64)> {
        parse("log.txt", text).unwrap().rows.iter().map(|r| (r.bytes, r.time_us)).collect()
    }

    #[test]
    fn layouts_of_many_years() {
        for (what, line) in [
            ("today", "  1048576  262144  float  sum  -1  59.5  17.62  30.84  0  58.9  17.80  31.15  0"),
            ("no root", "  1048576  262144  float  sum  59.5  17.62  30.84  0e+00  58.9  17.80  31.15  0e+00"),
            ("no redop", "  1048576  262144  float  59.5  17.62  30.84  0e+00  58.9  17.80  31.15  0e+00"),
            ("not checked", "  1048576  262144  float  none  -1  59.5  17.62  30.84  N/A  58.9  17.80  31.15  N/A"),
            ("no errors", " 1048576 262144 bfloat16 sum -1 59.5 17.62 30.84 58.9 17.80 31.15"),
            ("one place", " 1048576 262144 half sum -1 59.5 17.62 30.84 0"),
            ("mpirun", "[1,0]<stdout>:     1048576  262144  float  sum  -1  59.5  17.6  30.8  0  58.9  17.8  31.1  0"),
            ("tight", "[1,0]<stdout>:1048576  262144  float  sum  -1  59.5  17.6  30.8  0  58.9  17.8  31.1  0"),
            ("srun", "0:  1048576  262144  float  sum  -1  59.5  17.6  30.8  0  58.9  17.8  31.1  0"),
        ] {
            assert_eq!(rows(line), [(1048576, 59.5)], "{what}");
        }
    }

    #[test]
    fn a_whole_log() {
        let text = "# nccl-tests version 2.17.6 nccl-headers=22707\n# Collective test starting: all_gather_perf\n\
            #  Rank  0 Group  0 Pid  1 on node-a device  0 [0x1b] NVIDIA H100\n\
            #  Rank  1 Group  0 Pid  2 on node-b device  0 [0x1b] NVIDIA H100\n\
            #       size         count      type   redop    root     time   algbw   busbw #wrong\n\
            #        (B)    (elements)                               (us)  (GB/s)  (GB/s)\n\
            NCCL INFO noise 12 float\n\
               2048  256  float  none  -1  9.5  0.1  0.1  0  9.0  0.1  0.1  0\n\
               1024  128  float  none  -1  8.5  0.1  0.1  0  8.0  0.1  0.1  0\n\
            # Avg bus bandwidth    : 0.1\n";
        let log = parse("log.txt", text).unwrap();
        assert_eq!((log.op.as_deref(), log.gpus, log.nodes), (Some("all_gather"), Some(2), Some(2)));
        assert_eq!(log.devices, BTreeSet::from(["NVIDIA H100".to_string()]));
        assert_eq!(log.rows, [Row { bytes: 1024, time_us: 8.5, at: 9 }, Row { bytes: 2048, time_us: 9.5, at: 8 }]);
    }

    #[test]
    fn json_of_nccl_tests() {
        let text = r#"{"version": "2.17", "config": {"program": "alltoall_perf"},
            "devices": [{"rank": 0, "host": "a"}, {"rank": 1, "host": "a", "device_info": "Tesla T4"}],
            "results": [{"size": 8, "type": "float", "out_of_place": {"time": 7.5, "alg_bw": 0.1}, "in_place": {"time": 7}}]}"#;
        let log = parse("x.json", text).unwrap();
        assert_eq!((log.op.as_deref(), log.gpus, log.nodes), (Some("alltoall"), Some(2), Some(1)));
        assert_eq!((log.rows[0].bytes, log.rows[0].time_us), (8, 7.5));
        assert_eq!(log.devices, BTreeSet::from(["Tesla T4".to_string()]));
        let wrong = parse("x.json", &text.replace("\"size\"", "\"sise\"")).unwrap_err().to_string();
        assert!(wrong.contains("x.json: results[0]"), "{wrong}");
    }

    /// Times of a collective that does not do what it should say nothing of one that does.
    #[test]
    fn a_failed_data_check_is_an_error() {
        let said = |text: &str| parse("a.log", text).unwrap_err().to_string();
        for line in [
            "1024 128 float sum -1 9.5 0.1 0.1 5 9.0 0.1 0.1 0",
            "1024 128 float sum 9.5 0.1 0.1 0e+00 9.0 0.1 0.1 2e+00",
            "1024 128 float sum -1 9.5 0.1 0.1 7",
        ] {
            let why = said(&format!("noise\n{line}\n"));
            assert!(why.contains("a.log: line 2") && why.contains("#wrong") && why.contains("measure again"), "{why}");
        }
        let row = " 1024 128 float sum -1 9.5 0.1 0.1 9.0 0.1 0.1\n";
        let why = said(&format!("{row}[1,0]<stdout>:# Out of bounds values : 9 FAILED\n"));
        assert!(why.contains("a.log: line 2") && why.contains("data check failed"), "{why}");
        // So is a bandwidth below what was hoped for, and that is no wrong value.
        let slow = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 0.1 FAILED\n";
        assert_eq!(rows(&format!("{row}{slow}")), [(1024, 9.5)]);
        let json = |wrong: &str, all: u32| {
            format!(
                r#"{{"results": [{{"size": 8, "out_of_place": null, "in_place": {{"time": 7, "nwrong": {wrong}}}}}],
                "out_of_bounds": {{"count": {all}, "okay": "false"}}}}"#
            )
        };
        assert_eq!(rows(&json("null", 0)), [(8, 7.0)]);
        assert!(said(&json("3.000000", 0)).contains("results[0]: 3 values are wrong"), "{}", said(&json("3.0", 0)));
        assert!(said(&json("null", 9)).contains("out_of_bounds: 9 values are wrong"), "{}", said(&json("null", 9)));
    }

    #[test]
    fn rows_that_no_collective_has_are_named() {
        let log = |time: &str| parse("a.log", &format!("1048576 128 float sum -1 {time} 0.1 0.1 0\n")).unwrap();
        assert!(log("10.5").check("a.log", (1.0, 1e12), "x").is_ok());
        for (time, why) in [("0.001", "no time of a collective"), ("1e-300", "no time"), ("1e300", "no time")] {
            let said = log(time).check("a.log", (1.0, f64::INFINITY), "x").unwrap_err().to_string();
            assert!(said.contains("a.log: line 1") && said.contains(why), "{said}");
        }
        let said = log("1.0").check("a.log", (1.0, 1e12), "x").unwrap_err().to_string();
        assert!(said.contains("1048576 B in 1 us, 1049 GB/s") && said.contains("--cluster; measure again"), "{said}");
    }

    #[test]
    fn errors_name_the_line() {
        let cut = parse("a.log", "noise\n 1024 128 float sum -1 9.5 0.1\n").unwrap_err().to_string();
        assert!(cut.contains("a.log: line 2") && cut.contains("cut off"), "{cut}");
        let nan = parse("a.log", " 1024 128 float sum -1 NaN 0.1 0.1 0\n").unwrap_err().to_string();
        assert!(nan.contains("line 1") && nan.contains("NaN"), "{nan}");
        assert!(parse("a.log", "hello").unwrap_err().to_string().contains("no row"));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(?s).{0,300}", words in prop::collection::vec(
            "([0-9]{1,25}|float|sum|-1|N/A|NaN|1e999|#|Rank|on|results|\\{|\\}|\\[1,0\\]<stdout>:|\n)", 0..40)) {
            let _ = parse("x", &text);
            let _ = parse("x", &words.join(" "));
            let _ = parse("x", &format!("{{\"results\": [{text:?}]}}"));
        }
    }
}
