//! How many layers each stage of a pipeline has, written out: Yuan 2.0's stages of unequal depth.

use std::fmt;
use std::str::FromStr;

/// Layers of each virtual stage in their order, the first of every stage before the second of any; of a pipeline in a V,
/// chunk after chunk of the row. As runs of equal ones, so that a set of options stays a few bytes; empty: not written out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Stages {
    /// Layers, and how many stages have as many; (0, 0) behind the last run.
    runs: [(u16, u16); Stages::MOST],
}

impl Stages {
    /// Runs, at most.
    const MOST: usize = 16;

    pub fn is_empty(&self) -> bool {
        self.runs[0].1 == 0
    }

    /// How many stages are written out.
    pub fn count(&self) -> u64 {
        self.runs.iter().map(|run| u64::from(run.1)).sum()
    }

    /// Layers of all of them.
    pub fn sum(&self) -> u64 {
        self.runs.iter().map(|&(layers, times)| u64::from(layers) * u64::from(times)).sum()
    }

    pub fn layers(&self) -> impl Iterator<Item = u32> {
        self.runs.into_iter().flat_map(|(layers, times)| std::iter::repeat_n(u32::from(layers), times.into()))
    }
}

impl fmt::Display for Stages {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let run = |&(layers, times): &(u16, u16)| match times {
            1 => layers.to_string(),
            _ => format!("{layers}x{times}"),
        };
        let runs: Vec<String> = self.runs.iter().filter(|run| run.1 > 0).map(run).collect();
        f.write_str(&runs.join("."))
    }
}

impl FromStr for Stages {
    type Err = String;

    /// Numbers of layers with dots between them; 3x20 are 20 stages of 3.
    fn from_str(text: &str) -> Result<Stages, String> {
        let wrong = |part: &str| {
            format!(
                "{part:?} of {text:?} is no number of layers; write stages-2.2.3.3.4.4.4.2, or stages-2x10.3x20.2x2 for 10 \
                 stages of 2 layers, 20 of 3 and 2 of 2"
            )
        };
        let mut runs: Vec<(u16, u16)> = vec![];
        for part in text.split('.') {
            let (layers, times) = part.split_once('x').unwrap_or((part, "1"));
            let number = |digits: &str| digits.parse::<u16>().map_err(|_| wrong(part));
            let run = (number(layers)?, number(times)?);
            match runs.last_mut() {
                _ if run.1 == 0 => return Err(wrong(part)),
                Some(last) if last.0 == run.0 => last.1 = last.1.checked_add(run.1).ok_or_else(|| wrong(part))?,
                _ => runs.push(run),
            }
        }
        let mut all = Stages::default();
        if runs.len() > Stages::MOST {
            return Err(format!(
                "{text:?} goes up and down in {} runs of equal stages; at most {} are taken",
                runs.len(),
                Stages::MOST
            ));
        }
        all.runs[..runs.len()].copy_from_slice(&runs);
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_go_there_and_back() {
        for (written, shown, layers) in [
            ("2.2.3.3.4.4.4.2", "2x2.3x2.4x3.2", vec![2, 2, 3, 3, 4, 4, 4, 2]),
            ("2x3.0.5", "2x3.0.5", vec![2, 2, 2, 0, 5]),
        ] {
            let stages: Stages = written.parse().unwrap();
            assert_eq!((stages.to_string().as_str(), stages.layers().collect::<Vec<_>>()), (shown, layers.clone()));
            assert_eq!(
                (stages.count(), stages.sum()),
                (layers.len() as u64, layers.iter().map(|&n| u64::from(n)).sum())
            );
            assert_eq!(shown.parse::<Stages>(), Ok(stages));
        }
        assert!(Stages::default().is_empty() && !"0".parse::<Stages>().unwrap().is_empty());
        for (text, why) in [
            ("", "no number of layers"),
            ("2..3", "stages-2.2.3.3"),
            ("2x0", "no number"),
            ("3x", "no number"),
            ("2.3.2.3.2.3.2.3.2.3.2.3.2.3.2.3.2", "17 runs"),
        ] {
            let said = text.parse::<Stages>().unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
    }
}
