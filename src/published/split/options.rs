//! Words of options that a rule asks for, as far as this program has them.

use crate::spec::Options;

/// `options` with the words; those that are not known are returned.
pub fn with_words<'a>(options: Options, words: &[&'a str]) -> (Options, Vec<&'a str>) {
    let mut all = options;
    let mut unknown = Vec::new();
    for word in words {
        match format!("{all}+{word}").parse() {
            Ok(more) => all = more,
            Err(_) => unknown.push(*word),
        }
    }
    (all, unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_returned() {
        let (options, unknown) = with_words(Options::default(), &["contiguous", "time-travel"]);
        assert_eq!((options.to_string().as_str(), unknown), ("contiguous", vec!["time-travel"]));
    }
}
