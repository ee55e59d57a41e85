//! A number in the words of a source: "about 40 %", "38-43%", ">400 TFLOP/s", "5000 ms", "8k tokens", "TP2", "8x8".

use super::loose::names;

/// What a field counts, of which its unit follows.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Of {
    Seconds,
    Milliseconds,
    Tflops,
    /// Of a peak.
    Share,
    /// So many a second: a K of it is 1000.
    Rate,
    Gib,
    Billions,
    Gpus,
    /// What there are so many of: a K of them is 1024, and about so many is as good as so many, but from so many to so many
    /// is no number.
    Count,
}

impl Of {
    fn field(field: &str) -> Of {
        match field {
            "iteration_s" | "pair_s" => Of::Seconds,
            "iteration_ms" => Of::Milliseconds,
            "tflops_per_gpu" => Of::Tflops,
            "mfu" | "hfu" => Of::Share,
            "tokens_per_s_per_gpu" | "tokens_per_s" | "samples_per_s" => Of::Rate,
            "mem_gib" => Of::Gib,
            "params_b" => Of::Billions,
            "gpus" => Of::Gpus,
            _ => Of::Count,
        }
    }

    fn is_measured(self) -> bool {
        !matches!(self, Of::Gpus | Of::Count)
    }
}

/// Words of about, and signs of it.
const ABOUT: &[&str] =
    &["about", "approximately", "approx.", "approx", "around", "circa", "ca.", "roughly", "nearly", "~", "\u{2248}"];

/// Words of more and of less than: what was measured is near.
const BEYOND: &[&str] = &["more than", "less than", "over", "almost", ">=", "<=", ">", "<", "\u{2265}", "\u{2264}"];

/// What a number may count, behind it.
const COUNTED: &[&str] = &[
    "tokens",
    "token",
    "gpus",
    "gpu",
    "layers",
    "heads",
    "s",
    "sec",
    "seconds",
    "sequences",
    "seqs",
    "samples",
    "experts",
];

/// The number of a field that a text states; `None`: it states none that can be told.
pub fn of_field(field: &str, text: &str) -> Option<f64> {
    let of = Of::field(field);
    let text = text.trim().to_lowercase().replace([',', '_'], "");
    let text = behind_name(field, without_about(&text, of));
    if let (Of::Gpus, Some(gpus)) = (of, gpus(text)) {
        return Some(gpus);
    }
    let (low, rest) = leading(text)?;
    let (high, unit) = upper(rest).filter(|_| of.is_measured()).unwrap_or((low, rest));
    let unit = unit.split('(').next().unwrap_or_default().trim_start();
    // By how much it may be off, "45 ± 0.3 %".
    let unit = unit_of(unit.strip_prefix('\u{b1}').map_or(Some(unit), |off| leading(off).map(|(_, unit)| unit))?);
    Some((low + high) / 2.0 * times(&unit, of)?)
}

fn without_about(text: &str, of: Of) -> &str {
    let signs = ABOUT.iter().chain(BEYOND.iter().filter(|_| of.is_measured()));
    signs.fold(text, |text, sign| text.strip_prefix(sign).unwrap_or(text).trim_start())
}

/// The "2" of "TP2", of "tp=2" and of "mbs: 2".
fn behind_name<'a>(field: &str, text: &'a str) -> &'a str {
    let plain = |name: &str| name.replace('_', "");
    let named =
        std::iter::once(field).chain(names(field).iter().copied()).find_map(|name| text.strip_prefix(&plain(name)));
    let rest = named.map(|rest| rest.trim_start().trim_start_matches(['=', ':']).trim_start());
    rest.filter(|rest| rest.starts_with(|c: char| c.is_ascii_digit())).unwrap_or(text)
}

/// The number that a text begins with, and what is behind it.
fn leading(text: &str) -> Option<(f64, &str)> {
    let text = text.trim_start();
    let digits = text.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
    let power = text[digits..].strip_prefix('e').map_or(0, |rest| rest.bytes().take_while(u8::is_ascii_digit).count());
    let end = if power > 0 { digits + 1 + power } else { digits };
    Some((text[..end].parse().ok()?, &text[end..]))
}

/// The 43 of "38-43%", and of "38 % to 43 %".
fn upper(rest: &str) -> Option<(f64, &str)> {
    let rest = rest.trim_start().trim_start_matches('%').trim_start();
    let dash = ["-", "\u{2013}", "\u{2014}", "to ", ".."].iter().find_map(|dash| rest.strip_prefix(dash))?;
    leading(dash)
}

fn unit_of(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace()).collect::<String>().trim_end_matches('.').into()
}

/// How many of the field's own unit one of `unit` is.
fn times(unit: &str, of: Of) -> Option<f64> {
    let base = unit.split('/').next().unwrap_or_default();
    match of {
        _ if unit.is_empty() => Some(1.0),
        Of::Seconds => seconds(base),
        Of::Milliseconds => seconds(base).map(|s| s * 1e3),
        Of::Tflops => ["tflop", "pflop", "gflop"]
            .iter()
            .zip([1.0, 1e3, 1e-3])
            .find(|(name, _)| base.starts_with(*name))
            .map(|(_, n)| n),
        Of::Share => ["%", "percent"].iter().any(|sign| unit.starts_with(sign)).then_some(0.01),
        Of::Gib => [("gib", 1.0), ("gb", 1e9 / f64::from(1 << 30)), ("mib", 1.0 / 1024.0)]
            .iter()
            .find(|(name, _)| base == *name)
            .map(|(_, n)| *n),
        Of::Billions => match base.trim_end_matches("parameters").trim_end_matches("params") {
            "b" | "billion" => Some(1.0),
            "m" | "million" => Some(1e-3),
            "t" | "trillion" => Some(1e3),
            _ => None,
        },
        Of::Rate => scaled(base, 1e3, &["tokens", "token", "tok", "samples", "sequences", "seqs", "t"]),
        Of::Gpus | Of::Count if unit == "%" => Some(0.01),
        Of::Gpus | Of::Count => scaled(base, 1024.0, COUNTED),
    }
}

/// Of thousands, millions, or neither, of what is counted.
fn scaled(unit: &str, thousand: f64, counted: &[&str]) -> Option<f64> {
    let is = |word: &str| word.is_empty() || counted.contains(&word);
    if is(unit) {
        return Some(1.0);
    }
    let of = |letter: char, times: f64| unit.strip_prefix(letter).filter(|word| is(word)).map(|_| times);
    of('k', thousand).or_else(|| of('m', thousand * thousand))
}

fn seconds(base: &str) -> Option<f64> {
    match base {
        "s" | "sec" | "secs" | "second" | "seconds" | "sperstep" | "secondsperstep" => Some(1.0),
        "ms" | "msec" | "millisecond" | "milliseconds" | "msperstep" => Some(1e-3),
        "us" | "\u{b5}s" | "\u{3bc}s" | "microseconds" => Some(1e-6),
        "min" | "minute" | "minutes" => Some(60.0),
        _ => None,
    }
}

/// GPUs by the nodes and what each has, "8x8" or "8 nodes x 8 GPUs", or with what they are called behind them: "64x H100".
fn gpus(text: &str) -> Option<f64> {
    let (first, rest) = leading(text)?;
    let rest = rest.trim_start();
    let of_nodes = ["nodes", "node", "servers", "hosts"].iter().find_map(|word| rest.strip_prefix(word));
    let behind = of_nodes.unwrap_or(rest).trim_start();
    let each = ["x", "*", "\u{d7}", "of"].iter().find_map(|sign| behind.strip_prefix(sign)).unwrap_or(behind);
    match leading(each) {
        Some((second, _)) if each != behind => Some(first * second),
        // Nodes alone are no GPUs.
        _ if of_nodes.is_some() => None,
        _ => names_gpu(each).then_some(first),
    }
}

/// Whether a word is the name of a GPU: letters and digits.
fn names_gpu(words: &str) -> bool {
    let word = words.split_whitespace().next().unwrap_or_default();
    word.contains(char::is_alphabetic) && word.contains(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::of_field;

    #[test]
    fn units_are_those_of_the_field() {
        for (field, text, is) in [
            ("tflops_per_gpu", "400 TFLOP/s", Some(400.0)),
            ("tflops_per_gpu", ">400", Some(400.0)),
            ("tflops_per_gpu", "0.4 PFLOP/s per GPU", Some(400.0)),
            ("tflops_per_gpu", "400 (bf16)", Some(400.0)),
            ("mfu", "38-43%", Some(0.405)),
            ("mfu", "38% - 43%", Some(0.405)),
            ("mfu", "about 40%", Some(0.4)),
            ("mfu", "45.2 \u{b1} 0.3 %", Some(0.452)),
            ("iteration_s", "5000 ms", Some(5.0)),
            ("iteration_s", "12.3 s/step", Some(12.3)),
            ("iteration_s", "1.5 min", Some(90.0)),
            ("iteration_ms", "5 s", Some(5000.0)),
            ("seq", "8k tokens", Some(8192.0)),
            ("seq", "128 K", Some(131072.0)),
            ("tokens_per_s_per_gpu", "12k tok/s/GPU", Some(12000.0)),
            ("params_b", "671B", Some(671.0)),
            ("params_b", "350M", Some(0.35)),
            ("tp", "TP2", Some(2.0)),
            ("tp", "tp=4", Some(4.0)),
            ("gpus", "8x8", Some(64.0)),
            ("gpus", "8 nodes x 8 GPUs", Some(64.0)),
            ("gpus", "64x H100", Some(64.0)),
            ("gpus", "64 H100s", Some(64.0)),
            ("gpus", "8 nodes", None),
            ("gpus", "up to 64", None),
            ("gpus", "8 or 16", None),
            ("seq", "4096-8192", None),
            ("iteration_s", "5 apples", None),
            ("global_batch", "1e6", Some(1e6)),
        ] {
            let micro = |n: f64| (n * 1e6).round();
            assert_eq!(of_field(field, text).map(micro), is.map(micro), "{field}: {text}");
        }
    }
}
