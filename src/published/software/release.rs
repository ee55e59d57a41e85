//! Which release a text names: the one place for how releases are written.

/// Year of this century, and month.
pub type Release = (u32, u32);

/// The release that the name of a system tells of: of NVIDIA's containers as they are numbered (26.04.01), else by month
/// (July 2026, 2026-07), else the middle of a year that stands alone. Versions of a library (0.4.2) and hashes tell of none.
pub fn release(text: &str) -> Option<Release> {
    numbered(text).or_else(|| dated(text)).or_else(|| year_alone(text))
}

/// The first number of a container, from 22.01 on; the month before one that a text says it is before.
pub fn numbered(text: &str) -> Option<Release> {
    let words = words(text);
    words.iter().enumerate().find_map(|(i, word)| {
        let found = as_number(word)?;
        Some(if i > 0 && words[i - 1] == "before" { month_before(found) } else { found })
    })
}

/// Letters, digits and dots of a text in lower case, cut wherever anything else stands.
fn words(text: &str) -> Vec<String> {
    let lower = text.to_lowercase();
    let cut = |c: char| !(c.is_ascii_alphanumeric() || c == '.');
    lower.split(cut).filter(|word| !word.is_empty()).map(String::from).collect()
}

/// Two digits, a dot and two digits, whatever is written in front (NeMo24.03) or behind (26.08.rc5).
fn as_number(word: &str) -> Option<Release> {
    let (front, behind) = word.split_once('.')?;
    let year = front.trim_start_matches(|c: char| c.is_ascii_alphabetic());
    let month = behind.split(|c: char| !c.is_ascii_digit()).next()?;
    let two = |digits: &str| (digits.len() == 2).then(|| digits.parse::<u32>().ok()).flatten();
    Some((two(year)?, two(month)?)).filter(|(year, month)| (22..=40).contains(year) && (1..=12).contains(month))
}

fn month_before((year, month): Release) -> Release {
    if month > 1 { (year, month - 1) } else { (year - 1, 12) }
}

const MONTHS: [&str; 12] = [
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
];

/// A month by its name, or by three or more letters of it, counted from 1.
fn month(word: &str) -> Option<u32> {
    let at = MONTHS.iter().position(|name| word.len() >= 3 && name.starts_with(word))?;
    u32::try_from(at + 1).ok()
}

/// A year of Megatron, whose first one was 2019, and later.
fn year(word: &str) -> Option<u32> {
    let year = word.strip_prefix("20").filter(|rest| rest.len() == 2)?.parse().ok()?;
    (19..=40).contains(&year).then_some(year)
}

fn dated(text: &str) -> Option<Release> {
    let words = words(text);
    let words: Vec<&str> = words.iter().map(|word| word.trim_matches('.')).filter(|word| *word != "of").collect();
    let by_name = words.windows(2).find_map(|two| Some((year(two[1])?, month(two[0])?)));
    by_name.or_else(|| text.split_whitespace().find_map(by_numbers))
}

/// A date as in 2024-09-09 or 2024-09.
fn by_numbers(word: &str) -> Option<Release> {
    let mut parts = word.trim_matches(|c: char| !c.is_ascii_digit()).split('-');
    let (year, month) = (year(parts.next()?)?, parts.next().filter(|month| month.len() == 2)?.parse().ok()?);
    (1..=12).contains(&month).then_some((year, month))
}

fn year_alone(text: &str) -> Option<Release> {
    words(text).iter().find_map(|word| Some((year(word.trim_matches('.'))?, 6)))
}

/// A name without its release, so that releases of a system have one name: without numbers with dots, dates (2024-09-09,
/// July 2026), commits, and what stands in brackets with a date.
pub fn without(system: &str) -> String {
    let numbers = |c: char| c.is_ascii_digit() || ".-()".contains(c);
    let is_release = |word: &str| word.contains(['.', '-']) && word.chars().all(numbers);
    let bare = |word: &str| word.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_lowercase();
    let words: Vec<&str> = system.split_whitespace().collect();
    let is_year = |at: usize| words.get(at).is_some_and(|word| year(&bare(word)).is_some());
    let is_month = |at: usize| words.get(at).is_some_and(|word| month(&bare(word)).is_some()) && is_year(at + 1);
    let (mut kept, mut in_brackets) = (Vec::new(), false);
    for (at, word) in words.iter().enumerate() {
        let plain = word.trim_end_matches(',');
        let dated = is_month(at) || at > 0 && is_month(at - 1);
        let dated = dated || bare(word) == "of" && (is_month(at + 1) || is_year(at + 1));
        let dated = dated || at > 0 && bare(words[at - 1]) == "of" && is_year(at);
        in_brackets |= plain.starts_with('(') && is_release(plain);
        if !in_brackets && !is_release(plain) && !dated {
            kept.push(without_commit(word));
        }
        in_brackets &= !plain.ends_with(')');
    }
    kept.join(" ")
}

/// A word without the commit that stands behind an at sign.
fn without_commit(word: &str) -> &str {
    let is_commit = |hash: &str| hash.len() >= 7 && hash.chars().all(|c| c.is_ascii_hexdigit());
    match word.split_once('@') {
        Some((name, hash)) if is_commit(hash.trim_end_matches(',')) => name,
        _ => word,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_in_many_spellings() {
        for (text, found) in [
            ("NeMo/Megatron-Bridge 26.04.01, HybridEP", Some((26, 4))),
            ("Megatron-Bridge (NeMo 26.08)", Some((26, 8))),
            ("Megatron-Bridge@79308d0 (NeMo 26.08.rc5)", Some((26, 8))),
            ("Megatron-Bridge@6799f09 (NeMo 26.06)", Some((26, 6))),
            ("Megatron-Bridge 0.4.2 (Core 0.17.1, NeMo 26.04.01)", Some((26, 4))),
            ("NeMo24.03.01", Some((24, 3))),
            ("MaxText, container jax:26.03-maxtext-py3", Some((26, 3))),
            ("NeMo 25.09 (container 26.02)", Some((25, 9))),
            ("NeMo before 24.05 (24.03 or earlier)", Some((24, 4))),
            ("NeMo before 24.01", Some((23, 12))),
            ("Megatron-Bridge (NeMo, July 2026), HybridEP", Some((26, 7))),
            ("NeMo/Megatron-Bridge of August 2026", Some((26, 8))),
            ("NeMo 2.0 of Mar. 2025", Some((25, 3))),
            ("Megatron-LM (2024-08, --overlap-grad-reduce)", Some((24, 8))),
            ("NeMo 24.07 (2024-09-09 update)", Some((24, 7))),
            ("NeMo Framework of 2023", Some((23, 6))),
            ("Megatron-Core (2025), Transformer Engine", Some((25, 6))),
        ] {
            assert_eq!(release(text), found, "{text}");
        }
        for none in [
            "Megatron-Bridge@79308d0",
            "Megatron-Bridge@6e1b478, HybridEP",
            "Megatron-Bridge@2604012",
            "Megatron-Bridge 0.4.2",
            "Megatron-LM core_v0.16.1",
            "DeepSpeed 0.19.2 (CUDA 12.06)",
            "Megatron-LM, 2048 sequences of 26 tokens",
            "NeMo",
            "",
        ] {
            assert_eq!(release(none), None, "{none}");
        }
        assert_eq!(numbered("container of July 2026"), None);
    }

    #[test]
    fn names_without_releases() {
        for (system, name) in [
            ("NeMo 24.07 (2024-08-14)", "NeMo"),
            ("NeMo 24.07 (2024-09-09 update)", "NeMo"),
            ("NeMo 2024-09-09 nightly", "NeMo nightly"),
            ("NeMo/Megatron-Bridge 26.06, HybridEP", "NeMo/Megatron-Bridge HybridEP"),
            ("NeMo/Megatron-Bridge of July 2026, HybridEP", "NeMo/Megatron-Bridge HybridEP"),
            ("Megatron-Bridge@6e1b478, HybridEP", "Megatron-Bridge HybridEP"),
            ("Megatron-LM of 2023, 1F1B", "Megatron-LM 1F1B"),
            ("Megatron-LM (DDP, r0.9) 1F1B", "Megatron-LM (DDP, r0.9) 1F1B"),
            ("ZeRO-3 (2 nodes)", "ZeRO-3 (2 nodes)"),
        ] {
            assert_eq!(without(system), name);
        }
    }
}
