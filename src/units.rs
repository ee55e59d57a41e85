//! Quantities. A value is in SI units inside and a string with its unit outside: `"450 GB/s"`, `"1.3 us"`.
//!
//! K, M, G, T are powers of ten; Ki, Mi, Gi, Ti are powers of two; b is a bit, an eighth of B.

use serde::de::{Deserialize, Deserializer, Error as _, Unexpected, Visitor};
use serde::{Serialize, Serializer};
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};
use std::str::FromStr;

const KI: f64 = 1024.0;

/// Units that can be read, the first ones (in falling order, decimal) also printed.
type Table = &'static [(&'static str, f64)];

const BYTES: Table = &[
    ("PB", 1e15),
    ("TB", 1e12),
    ("GB", 1e9),
    ("MB", 1e6),
    ("KB", 1e3),
    ("B", 1.0),
    ("KiB", KI),
    ("MiB", KI * KI),
    ("GiB", KI * KI * KI),
    ("TiB", KI * KI * KI * KI),
];
const FLOPS: Table =
    &[("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("KFLOP", 1e3), ("FLOP", 1.0)];
const SECONDS: Table =
    &[("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9), ("min", 60.0), ("h", 3600.0), ("d", 86400.0)];
const BYTES_PER_SEC: Table = &[
    ("TB/s", 1e12),
    ("GB/s", 1e9),
    ("MB/s", 1e6),
    ("KB/s", 1e3),
    ("B/s", 1.0),
    ("KiB/s", KI),
    ("MiB/s", KI * KI),
    ("GiB/s", KI * KI * KI),
    ("TiB/s", KI * KI * KI * KI),
    ("Mb/s", 1e6 / 8.0),
    ("Gb/s", 1e9 / 8.0),
    ("Tb/s", 1e12 / 8.0),
];
const FLOPS_PER_SEC: Table = &[
    ("EFLOP/s", 1e18),
    ("PFLOP/s", 1e15),
    ("TFLOP/s", 1e12),
    ("GFLOP/s", 1e9),
    ("MFLOP/s", 1e6),
    ("KFLOP/s", 1e3),
    ("FLOP/s", 1.0),
];

fn parse(text: &str, table: Table, what: &str, example: &str) -> Result<f64, String> {
    let wrong = |why: &str| format!("{what} `{text}` {why}; write a number and a unit, as in \"{example}\"");
    let text_trimmed = text.trim();
    // The unit starts at the first letter that is not the exponent of the number.
    let at = text_trimmed
        .char_indices()
        .find(|&(i, c)| c.is_ascii_alphabetic() && !is_exponent(text_trimmed, i))
        .map_or(text_trimmed.len(), |(i, _)| i);
    let (number, unit) = (text_trimmed[..at].trim(), text_trimmed[at..].trim());
    if number.is_empty() {
        return Err(wrong("has no number"));
    }
    if unit.is_empty() {
        return Err(wrong("has no unit"));
    }
    let known = || table.iter().map(|(u, _)| *u).collect::<Vec<_>>().join(", ");
    let scale = table.iter().find(|(u, _)| *u == unit).map(|(_, s)| *s);
    let scale = scale.ok_or_else(|| wrong(&format!("has the unknown unit `{unit}` (known: {})", known())))?;
    let value: f64 = number.parse().map_err(|_| wrong(&format!("has `{number}` where a number belongs")))?;
    let value = value * scale;
    match value {
        v if !v.is_finite() => Err(wrong("is not finite")),
        v if v < 0.0 => Err(wrong("is negative")),
        v => Ok(v),
    }
}

/// Whether the letter at `i` is the e of `1e9`.
fn is_exponent(text: &str, i: usize) -> bool {
    let bytes = text.as_bytes();
    let digit_before = i > 0 && (bytes[i - 1].is_ascii_digit() || bytes[i - 1] == b'.');
    let after = bytes.get(i + 1).copied().unwrap_or(b' ');
    matches!(bytes[i], b'e' | b'E') && digit_before && (after.is_ascii_digit() || matches!(after, b'-' | b'+'))
}

/// The largest decimal unit of which there is at least one, or the next larger one where that is much shorter (0.85 us is
/// no whole number of ns), if its text reads back to the same value.
fn print(value: f64, table: Table, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let base = table.iter().find(|(_, s)| *s == 1.0).expect("every table has its SI unit");
    let decimal: Vec<_> = table
        .iter()
        .filter(|(u, _)| !u.contains('i') && !u.contains("b/") && !matches!(*u, "min" | "h" | "d"))
        .collect();
    let found = decimal.iter().position(|(_, s)| value.abs() >= *s).unwrap_or(decimal.len() - 1);
    let (unit, scale) = if value == 0.0 { base } else { decimal[found] };
    if let Some(p) = f.precision() {
        return write!(f, "{:.*} {unit}", p, value / scale);
    }
    let larger = found.checked_sub(1).filter(|_| value != 0.0).map(|at| decimal[at]);
    match (exact(value, *scale), larger.and_then(|&(unit, scale)| Some((exact(value, scale)?, unit)))) {
        (own, Some((text, unit))) if own.as_ref().is_none_or(|own| text.len() + 8 < own.len()) => {
            write!(f, "{text} {unit}")
        }
        (Some(text), _) => write!(f, "{text} {unit}"),
        (None, _) => write!(f, "{value} {}", base.0),
    }
}

/// The shortest number of so large a unit that is read as the same value, if there is one.
fn exact(value: f64, scale: f64) -> Option<String> {
    let number = value / scale;
    let rounded = format!("{number:.14e}").parse().unwrap_or(number);
    [rounded, number].into_iter().find(|number| number * scale == value).map(|number| number.to_string())
}

struct Text {
    what: &'static str,
    example: &'static str,
}

impl Visitor<'_> for Text {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} as a string with its unit, as in \"{}\"", self.what, self.example)
    }

    fn visit_str<E: serde::de::Error>(self, v: &str) -> Result<String, E> {
        Ok(v.to_string())
    }

    fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<String, E> {
        Err(E::invalid_type(Unexpected::Float(v), &self))
    }
}

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident, $what:literal, $table:ident, $example:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
        pub struct $name(f64);

        impl $name {
            pub const ZERO: $name = $name(0.0);

            /// From a value in SI units.
            pub const fn new(si: f64) -> $name {
                $name(si)
            }

            /// In SI units.
            pub const fn value(self) -> f64 {
                self.0
            }

            pub fn max(self, other: $name) -> $name {
                $name(self.0.max(other.0))
            }

            pub fn min(self, other: $name) -> $name {
                $name(self.0.min(other.0))
            }
        }

        impl Add for $name {
            type Output = $name;
            fn add(self, other: $name) -> $name {
                $name(self.0 + other.0)
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: $name) {
                self.0 += other.0;
            }
        }

        impl Sub for $name {
            type Output = $name;
            fn sub(self, other: $name) -> $name {
                $name(self.0 - other.0)
            }
        }

        impl Mul<f64> for $name {
            type Output = $name;
            fn mul(self, factor: f64) -> $name {
                $name(self.0 * factor)
            }
        }

        impl Div for $name {
            type Output = f64;
            fn div(self, other: $name) -> f64 {
                self.0 / other.0
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = $name>>(iter: I) -> $name {
                $name(iter.map(|q| q.0).sum())
            }
        }

        impl FromStr for $name {
            type Err = String;
            fn from_str(text: &str) -> Result<$name, String> {
                parse(text, $table, $what, $example).map($name)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                print(self.0, $table, f)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<$name, D::Error> {
                let text = d.deserialize_any(Text { what: $what, example: $example })?;
                text.parse().map_err(D::Error::custom)
            }
        }
    };
}

quantity!(
    /// An amount of data.
    Bytes, "a number of bytes", BYTES, "80 GiB"
);
quantity!(
    /// Floating-point operations.
    Flops, "a number of floating-point operations", FLOPS, "1.5 TFLOP"
);
quantity!(
    /// A duration.
    Seconds, "a duration", SECONDS, "1.3 us"
);
quantity!(
    /// A bandwidth, per direction.
    BytesPerSec, "a bandwidth", BYTES_PER_SEC, "450 GB/s"
);
quantity!(
    /// A rate of computation.
    FlopsPerSec, "a computing rate", FLOPS_PER_SEC, "989 TFLOP/s"
);

impl Div<BytesPerSec> for Bytes {
    type Output = Seconds;
    fn div(self, rate: BytesPerSec) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

impl Div<Seconds> for Bytes {
    type Output = BytesPerSec;
    fn div(self, time: Seconds) -> BytesPerSec {
        BytesPerSec(self.0 / time.0)
    }
}

impl Div<FlopsPerSec> for Flops {
    type Output = Seconds;
    fn div(self, rate: FlopsPerSec) -> Seconds {
        Seconds(self.0 / rate.0)
    }
}

impl Div<Seconds> for Flops {
    type Output = FlopsPerSec;
    fn div(self, time: Seconds) -> FlopsPerSec {
        FlopsPerSec(self.0 / time.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_with_units_are_read() {
        assert_eq!("450 GB/s".parse(), Ok(BytesPerSec::new(450e9)));
        assert_eq!("400 Gb/s".parse(), Ok(BytesPerSec::new(50e9)));
        assert_eq!("80 GiB".parse(), Ok(Bytes::new(80.0 * 1073741824.0)));
        assert_eq!("1.3us".parse(), Ok(Seconds::new(1.3 * 1e-6)));
        assert_eq!("989 TFLOP/s".parse(), Ok(FlopsPerSec::new(989e12)));
        assert_eq!("1e3 TFLOP".parse(), Ok(Flops::new(1e15)));
        assert_eq!("2e-6 s".parse(), Ok(Seconds::new(2e-6)));
    }

    #[test]
    fn what_is_printed_reads_back() {
        for v in [0.0, 1.0, 1.3e-6, 5e-10, 3e-12, 0.1, 999.0, 1.0 / 3.0, 123456.789, 86400.0] {
            let s = Seconds::new(v);
            assert_eq!(s.to_string().parse(), Ok(s), "{s}");
        }
        for v in [0.0, 1.0, 1e9, 80.0 * 1073741824.0, 3.35e12, 1.0 / 3.0] {
            let b = BytesPerSec::new(v);
            assert_eq!(b.to_string().parse(), Ok(b), "{b}");
        }
        assert_eq!(BytesPerSec::new(450e9).to_string(), "450 GB/s");
        assert_eq!(format!("{:.2}", Seconds::new(0.0123456)), "12.35 ms");
        assert_eq!(Bytes::ZERO.to_string(), "0 B");
        for text in
            ["0.85 us", "850 ns", "1.3 us", "48.5 GB/s", "355 GB/s", "4.9 us", "0.35 us", "36.6 us", "91.6 GB/s"]
        {
            let (time, rate) = (text.parse::<Seconds>(), text.parse::<BytesPerSec>());
            let printed = time.map(|t| t.to_string()).or(rate.map(|r| r.to_string())).unwrap();
            assert!(printed.len() <= text.len(), "{text} is printed as {printed}");
        }
    }

    #[test]
    fn what_is_not_a_quantity_is_refused_with_an_example() {
        for (text, part) in [
            ("450", "no unit"),
            ("GB/s", "no number"),
            ("-1 GB/s", "negative"),
            ("NaN GB/s", "no number"),
            ("1e400 GB/s", "not finite"),
            ("3 parsecs", "unknown unit `parsecs`"),
            ("4,5 GB/s", "where a number belongs"),
            ("", "no number"),
        ] {
            let err = text.parse::<BytesPerSec>().unwrap_err();
            assert!(err.contains(part) && err.contains("\"450 GB/s\""), "{text}: {err}");
        }
    }

    #[test]
    fn json_takes_strings_only() {
        assert_eq!(serde_json::from_str::<Bytes>("\"2 MiB\"").unwrap(), Bytes::new(2097152.0));
        assert_eq!(serde_json::to_string(&Bytes::new(2e6)).unwrap(), "\"2 MB\"");
        for bare in ["450", "4.5", "-1", "null", "true", "[1]"] {
            let err = serde_json::from_str::<Bytes>(bare).unwrap_err().to_string();
            assert!(err.contains("80 GiB"), "{bare}: {err}");
        }
    }

    #[test]
    fn dimensions_divide() {
        assert_eq!(Bytes::new(10.0) / BytesPerSec::new(5.0), Seconds::new(2.0));
        assert_eq!(Flops::new(10.0) / FlopsPerSec::new(5.0), Seconds::new(2.0));
        assert_eq!(Seconds::new(1.0) / Seconds::new(4.0), 0.25);
        assert_eq!([Seconds::new(1.0), Seconds::new(2.0)].into_iter().sum::<Seconds>(), Seconds::new(3.0));
    }
}
