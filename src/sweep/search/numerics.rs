//! Words that change what is computed, or in how many bits: they are known to be faster or smaller, and are for whoever
//! trains to choose. No search does.

use super::{Search, step};
use crate::error::Result;
use crate::report::Row;
use crate::spec::Options;
use crate::sweep::Point;
use serde::Serialize;

/// The fastest way with one such word, or with two where one needs the other.
#[derive(Debug, Clone, Serialize)]
pub struct Numerics {
    pub words: &'static str,
    pub row: Row,
    /// How many times as long as without.
    pub over_fastest: f64,
}

const WORDS: [&str; 7] = [
    "fp8",
    "dispatch-fp8",
    "dispatch-fp8+keep-fp8-rows",
    "keep-fp8-gate-up",
    "bf16-grads",
    "bf16-moments",
    "no-master",
];

/// The fastest way with each that it can have and has not, in the order of [`WORDS`].
pub fn numerics(search: &mut Search, fastest: &Row) -> Result<Vec<Numerics>> {
    let point = Point::of_row(fastest);
    let with = |words: &&str| -> Option<Point> {
        let options: Options = format!("{}+{words}", point.par.options).parse().ok()?;
        let mut with = point;
        with.par.options = options;
        (with != point && search.case.workload(&with).is_ok()).then_some(with)
    };
    let (words, points): (Vec<&'static str>, Vec<Point>) =
        WORDS.into_iter().filter_map(|words| Some((words, with(&words)?))).unzip();
    let rows = search.cost(&points, f64::INFINITY, false)?;
    let found = words.into_iter().zip(rows).filter_map(|(words, row)| {
        let row = row.filter(|row| row.step_time_s.is_some())?;
        Some(Numerics { words, over_fastest: step(&row) / step(fastest), row })
    });
    Ok(found.collect())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{dense, found, mixture};
    use super::super::{Question, Space};
    use super::*;

    #[test]
    fn words_that_change_numerics_are_costed_and_not_chosen() {
        let space = Space { ep: vec![4], pp: vec![1], ..mixture().space };
        let question = Question { space, ..mixture() };
        let got = found(&question, None);
        let fastest = got.fastest().unwrap();
        let words: Vec<&str> = got.numerics.iter().map(|other| other.words).collect();
        assert!(["fp8", "dispatch-fp8", "bf16-grads"].iter().all(|word| words.contains(word)), "{words:?}");
        for Numerics { words, row, over_fastest } in &got.numerics {
            let again = question.case().unwrap().row(&Point::of_row(row)).unwrap();
            assert_eq!(again.step_time_s, row.step_time_s);
            assert_eq!(*over_fastest, step(row) / step(fastest));
            assert!(words.split('+').all(|word| row.options.split('+').any(|said| said == word)), "{}", row.options);
        }
        let of = |words: &str| got.numerics.iter().find(|other| other.words == words).unwrap().over_fastest;
        assert!(of("fp8") < 1.0 && of("dispatch-fp8") < 1.0);
        for row in got.best.iter().chain(&got.refined) {
            assert!(!row.options.contains("fp8") && !row.options.contains("bf16"), "{}", row.options);
        }
    }

    /// What is said already is no choice, and what cannot be is none.
    #[test]
    fn words_that_are_said_or_do_not_apply_are_left() {
        let words = |question: &Question| -> Vec<&'static str> {
            found(question, None).numerics.iter().map(|other| other.words).collect()
        };
        let space =
            |words: &str| Space { tp: vec![1], pp: vec![1], options: vec![words.parse().unwrap()], ..dense().space };
        let plain = words(&Question { space: space("default"), ..dense() });
        assert_eq!(plain, ["fp8", "bf16-grads", "bf16-moments", "no-master"]);
        let said = words(&Question { space: space("fp8+no-master"), ..dense() });
        assert_eq!(said, ["bf16-grads", "bf16-moments"]);
        // GPUs without products of FP8.
        let a100 =
            Question { cluster: "dgx-a100".into(), stack: "nccl-fa2".into(), space: space("default"), ..dense() };
        assert_eq!(words(&a100), ["bf16-grads", "bf16-moments", "no-master"]);
    }
}
