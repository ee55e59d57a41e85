//! The import rule of the house: imports go down only, and siblings do not see each other.
//!
//! The checker reads tokens, not types. It counts every path that leaves its top-level module: `crate::x`, `foretrain::x`,
//! `use crate::{x, y::z}`, `super::super::x`, in code as in attributes. Comments, strings and test modules do not count.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

/// A level sees the levels before it. Modules of one level do not see each other.
const LEVELS: &[&[&str]] = &[
    &["units", "error"],
    &["spec"],
    &["plan"],
    &["cluster", "timeline", "device"],
    &["collective", "routing"],
    &["fold"],
    &["act"],
    &["strategy", "cost", "sim", "exec"],
    &["report", "compare", "import", "export", "checkpoint"],
    &["calibrate"],
    &["sweep", "published", "goodput", "plot"],
    &["cli"],
    &["main"],
];

/// Modules that see less than their level allows.
const ONLY: &[(&str, &[&str])] = &[("strategy", &["plan", "routing", "spec", "units", "error"])];

/// Crates that only one folder may name. `main` may name what `cli` may.
const FOREIGN: &[(&str, &[&str])] = &[("cudarc", &["exec"]), ("plotters", &["plot"]), ("clap", &["cli", "main"])];

/// The only folder with unsafe code: calls of a driver that knows no types.
const UNSAFE: &str = "exec/cuda/";

/// Words that the files of a folder must not contain: the oracle shares no code with what it judges.
const UNSPOKEN: &[(&str, &[&str])] = &[("exec/reference/", &["kernels", "plan::kernel"])];

#[derive(Debug, PartialEq)]
struct Violation {
    file: String,
    line: usize,
    rule: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "src/{}:{}: {}", self.file, self.line, self.rule)
    }
}

fn level(module: &str) -> Option<usize> {
    LEVELS.iter().position(|modules| modules.contains(&module))
}

/// Why `from` may not import `to`, if so.
fn forbidden(from: &str, to: &str) -> Option<String> {
    let (Some(mine), Some(other)) = (level(from), level(to)) else {
        let unknown = if level(from).is_none() { from } else { to };
        return Some(format!("{unknown} is no module of the house; place it in LEVELS of tests/house.rs"));
    };
    if from == to {
        return None;
    }
    if let Some((_, only)) = ONLY.iter().find(|(module, _)| *module == from) {
        return (!only.contains(&to)).then(|| format!("{from} imports {to}; it may import only {}", only.join(", ")));
    }
    match mine.cmp(&other) {
        std::cmp::Ordering::Greater => None,
        std::cmp::Ordering::Equal => {
            Some(format!("{from} imports its sibling {to}; move what they share one level down"))
        }
        std::cmp::Ordering::Less => Some(format!("{from} imports {to} from above; imports go down only")),
    }
}

// ---- words of a source file

#[derive(Debug, Clone, PartialEq)]
struct Token {
    text: String,
    line: usize,
}

impl Token {
    fn is_name(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

/// Names, `::` and single signs; without comments, strings, characters and lifetimes.
fn tokens(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let (mut i, mut line, mut all) = (0, 1, Vec::new());
    while i < chars.len() {
        let end = word_end(&chars, i);
        let text: String = chars[i..end].iter().collect();
        if !is_silent(&text) {
            // r#type is the name type.
            all.push(Token { text: text.trim_start_matches("r#").to_string(), line });
        }
        line += text.matches('\n').count();
        i = end;
    }
    all
}

/// Comments, strings and blanks say nothing about imports.
fn is_silent(word: &str) -> bool {
    let quoted = word.len() > 1 && (word.ends_with('"') || word.ends_with('\'') || word.ends_with("\"#"));
    word.starts_with("//")
        || word.starts_with("/*")
        || word.starts_with(['"', '\''])
        || quoted
        || word.trim().is_empty()
}

/// Where the word that begins at `i` ends.
fn word_end(chars: &[char], i: usize) -> usize {
    let at = |j: usize| chars.get(j).copied().unwrap_or('\0');
    let while_ =
        |from: usize, p: &dyn Fn(char) -> bool| (from..chars.len()).find(|&j| !p(chars[j])).unwrap_or(chars.len());
    match (at(i), at(i + 1)) {
        ('/', '/') => while_(i, &|c| c != '\n'),
        ('/', '*') => comment_end(chars, i),
        ('"', _) => string_end(chars, i + 1, 0),
        ('b' | 'c', '"') => string_end(chars, i + 2, 0),
        ('\'', _) => quote_end(chars, i),
        (':', ':') => i + 2,
        (c, _) if c.is_whitespace() => while_(i, &char::is_whitespace),
        (c, _) if c.is_alphabetic() || c == '_' => raw_string_end(chars, i).unwrap_or_else(|| {
            let start = if c == 'r' && at(i + 1) == '#' { i + 2 } else { i };
            while_(start, &|c| c.is_alphanumeric() || c == '_')
        }),
        (c, _) if c.is_ascii_digit() => while_(i, &|c| c.is_alphanumeric() || c == '_'),
        _ => i + 1,
    }
}

fn comment_end(chars: &[char], start: usize) -> usize {
    let (mut depth, mut i) = (0, start);
    while i + 1 < chars.len() {
        match (chars[i], chars[i + 1]) {
            ('/', '*') => (depth, i) = (depth + 1, i + 2),
            ('*', '/') => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
        if depth == 0 {
            return i;
        }
    }
    chars.len()
}

/// The end of a string whose text begins at `i`; with `hashes`, of a raw one.
fn string_end(chars: &[char], mut i: usize, hashes: usize) -> usize {
    while i < chars.len() {
        match chars[i] {
            '\\' if hashes == 0 => i += 2,
            '"' if chars[i + 1..].iter().take(hashes).filter(|&&c| c == '#').count() == hashes => {
                return i + 1 + hashes;
            }
            _ => i += 1,
        }
    }
    chars.len()
}

/// r"..", r#".."#, br"..": where it ends, if one begins here.
fn raw_string_end(chars: &[char], i: usize) -> Option<usize> {
    let prefix = chars[i..].iter().take_while(|c| matches!(c, 'r' | 'b' | 'c')).count();
    let hashes = chars[i + prefix..].iter().take_while(|&&c| c == '#').count();
    let raw = prefix <= 2 && chars[i..i + prefix].last() == Some(&'r');
    (raw && chars.get(i + prefix + hashes) == Some(&'"')).then(|| {
        // A raw string without hashes has no escapes either: the first quote ends it.
        let text = i + prefix + hashes + 1;
        let plain_end = || (text..chars.len()).find(|&j| chars[j] == '"').map_or(chars.len(), |j| j + 1);
        if hashes == 0 { plain_end() } else { string_end(chars, text, hashes) }
    })
}

/// 'x', '\n' or a lifetime.
fn quote_end(chars: &[char], i: usize) -> usize {
    let at = |j: usize| chars.get(j).copied().unwrap_or('\0');
    if at(i + 1) == '\\' {
        return (i + 3..chars.len()).find(|&j| chars[j] == '\'').map_or(chars.len(), |j| j + 1);
    }
    if at(i + 2) == '\'' {
        return i + 3;
    }
    (i + 1..chars.len()).find(|&j| !(chars[j].is_alphanumeric() || chars[j] == '_')).unwrap_or(chars.len())
}

// ---- test modules

/// The tokens without `#[cfg(test)] mod x { .. }`, and the names of modules of tests that are files of their own.
fn without_tests(tokens: Vec<Token>) -> (Vec<Token>, Vec<String>) {
    let (mut kept, mut files, mut i) = (Vec::new(), Vec::new(), 0);
    while i < tokens.len() {
        match test_module(&tokens[i..]) {
            Some((length, file)) => {
                i += length;
                files.extend(file);
            }
            None => {
                kept.push(tokens[i].clone());
                i += 1;
            }
        }
    }
    (kept, files)
}

/// How many tokens a module of tests takes that begins here, and its name if it is a file.
fn test_module(tokens: &[Token]) -> Option<(usize, Option<String>)> {
    let starts = |text: &str| tokens.iter().map(|t| t.text.as_str()).take(text.split(' ').count()).eq(text.split(' '));
    if !starts("# [ cfg ( test )") && !starts("# [ cfg ( all ( test") {
        return None;
    }
    let mut i = 0;
    while tokens.get(i).is_some_and(|t| t.text == "#") {
        i = group_end(tokens, i + 1, "[", "]");
    }
    // pub, pub(crate)
    if tokens.get(i)?.text == "pub" {
        i += 1;
        if tokens.get(i)?.text == "(" {
            i = group_end(tokens, i, "(", ")");
        }
    }
    let (word, name, open) = (tokens.get(i)?, tokens.get(i + 1)?, tokens.get(i + 2)?);
    match (word.text.as_str(), open.text.as_str()) {
        ("mod", "{") => Some((group_end(tokens, i + 2, "{", "}"), None)),
        ("mod", ";") => Some((i + 3, Some(name.text.clone()))),
        _ => None,
    }
}

/// Behind the group that opens at `i`.
fn group_end(tokens: &[Token], i: usize, open: &str, close: &str) -> usize {
    let mut depth = 0;
    for (j, token) in tokens.iter().enumerate().skip(i) {
        depth += i32::from(token.text == open) - i32::from(token.text == close);
        if depth == 0 {
            return j + 1;
        }
    }
    tokens.len()
}

// ---- paths

/// A path as written, e.g. ["crate", "plan", "mesh"]; a list in braces is one path for each leaf.
type Written = (Vec<String>, usize);

/// Every path that begins at `i`, and where the last of them ends.
fn paths_at(tokens: &[Token], mut i: usize, before: &[String], found: &mut Vec<Written>) -> usize {
    let mut path = before.to_vec();
    let line = tokens.get(i).map_or(0, |t| t.line);
    loop {
        match tokens.get(i).map(|t| t.text.as_str()) {
            Some("{") => {
                let end = group_end(tokens, i, "{", "}");
                i += 1;
                while i + 1 < end {
                    let next = paths_at(tokens, i, &path, found);
                    i = next.max(i + 1);
                }
                return end;
            }
            Some(_) if tokens[i].is_name() || tokens[i].text == "*" => path.push(tokens[i].text.clone()),
            _ => return i,
        }
        i += 1;
        if tokens.get(i).is_none_or(|t| t.text != "::") {
            if path.len() > before.len() {
                found.push((path, line));
            }
            return i;
        }
        i += 1;
        // Generics as in `Vec::<T>::new` end what is a path of modules.
        if !tokens.get(i).is_some_and(|t| t.is_name() || t.text == "{" || t.text == "*") {
            found.push((path, line));
            return i;
        }
    }
}

/// Absolute paths of a file: the segments behind the crate's root. `home` is the module that the file is.
fn absolute_paths(tokens: &[Token], home: &[String]) -> Vec<Written> {
    let mut inline: Vec<(String, i32)> = Vec::new();
    let (mut depth, mut i, mut all) = (0, 0, Vec::new());
    while i < tokens.len() {
        let text = tokens[i].text.as_str();
        depth += i32::from(text == "{") - i32::from(text == "}");
        inline.retain(|(_, opened)| *opened <= depth);
        let names_module = text == "mod" && tokens.get(i + 2).is_some_and(|t| t.text == "{");
        if names_module {
            inline.push((tokens[i + 1].text.clone(), depth + 1));
            // Its brace is counted here.
            depth += 1;
            i += 3;
            continue;
        }
        let goes_on = tokens.get(i + 1).is_some_and(|t| t.text == "::");
        let rooted = matches!(text, "crate" | "foretrain" | "super") && (goes_on || text == "super");
        let inside = i > 1 && tokens[i - 1].text == "::" && tokens[i - 2].is_name() && tokens[i - 2].text != "use";
        let renamed = text == "crate" && i > 0 && tokens[i - 1].text == "use";
        if (rooted || renamed) && !inside {
            let mut written = Vec::new();
            let end = paths_at(tokens, i, &[], &mut written);
            let here: Vec<String> = home.iter().cloned().chain(inline.iter().map(|(name, _)| name.clone())).collect();
            all.extend(written.into_iter().map(|(path, line)| (resolve(&path, &here), line)));
            i = end.max(i + 1);
        } else {
            i += 1;
        }
    }
    all
}

/// Follows `crate`, `super` and `self`. An empty result is the root itself.
fn resolve(path: &[String], here: &[String]) -> Vec<String> {
    let mut at: Vec<String> = here.to_vec();
    let mut rest = path;
    if let Some(("crate" | "foretrain", behind)) = rest.split_first().map(|(first, behind)| (first.as_str(), behind)) {
        (at, rest) = (Vec::new(), behind);
    }
    for segment in rest {
        match segment.as_str() {
            "super" => drop(at.pop()),
            "self" => {}
            _ => at.push(segment.clone()),
        }
    }
    at
}

// ---- the rules

/// src/plan/mod.rs is [plan], src/plan/op.rs is [plan, op], src/lib.rs is [].
fn home_of(file: &str) -> Vec<String> {
    let mut parts: Vec<String> = file.trim_end_matches(".rs").split('/').map(str::to_string).collect();
    if parts.last().is_some_and(|last| last == "mod") || parts == ["lib"] {
        parts.pop();
    }
    parts
}

/// Checks one file, `file` being its path below src. Returns names of files of tests, too.
fn check_file(file: &str, source: &str) -> (Vec<Violation>, Vec<String>) {
    let (tokens, test_files) = without_tests(tokens(source));
    let home = home_of(file);
    let mut found = Vec::new();
    let mut say = |line, rule| found.push(Violation { file: file.to_string(), line, rule });
    let top = home.first().map_or("lib", String::as_str);
    for (name, folders) in FOREIGN {
        for token in tokens.iter().filter(|t| t.text == *name && !folders.contains(&top)) {
            say(token.line, format!("{top} names {name}; only {} may", folders.join(" and ")));
        }
    }
    if !file.starts_with(UNSAFE) {
        for token in tokens.iter().filter(|t| t.text == "unsafe") {
            say(token.line, format!("unsafe code; only {UNSAFE} may have some, each with its reason"));
        }
    }
    let paths = absolute_paths(&tokens, &home);
    // lib.rs declares every module, and main.rs stands above all.
    if top != "lib" {
        for (path, line) in &paths {
            match path.first().map(String::as_str) {
                None | Some("*") => say(*line, format!("{top} imports the root of the crate; name the module")),
                Some(to) => forbidden(top, to).into_iter().for_each(|rule| say(*line, rule)),
            }
        }
    }
    unspoken(file, &tokens, &paths).into_iter().for_each(|(line, rule)| say(line, rule));
    let below = |name: &String| [home.as_slice(), std::slice::from_ref(name)].concat().join("/");
    let test_files = test_files.iter().map(below).collect();
    (found, test_files)
}

fn unspoken(file: &str, tokens: &[Token], paths: &[Written]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for word in UNSPOKEN.iter().filter(|(named, _)| file.starts_with(named)).flat_map(|(_, words)| *words) {
        let rule = format!("mentions {word}; the oracle shares nothing with what it judges");
        let hits: Vec<usize> = match word.contains("::") {
            true => paths
                .iter()
                .filter(|(p, _)| format!("{}::", p.join("::")).starts_with(&format!("{word}::")))
                .map(|p| p.1)
                .collect(),
            false => tokens.iter().filter(|t| t.text == *word).map(|t| t.line).collect(),
        };
        found.extend(hits.into_iter().map(|line| (line, rule.clone())));
    }
    found
}

fn sources(dir: &Path, all: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            sources(&path, all);
        } else if path.extension().is_some_and(|e| e == "rs") {
            all.push(path);
        }
    }
}

#[test]
fn imports_go_down_only() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let (mut violations, mut exempt, mut paths) = (Vec::new(), BTreeSet::new(), 0);
    for path in &files {
        let file = path.strip_prefix(&src).unwrap().to_str().unwrap().replace('\\', "/");
        let source = std::fs::read_to_string(path).unwrap();
        paths += absolute_paths(&tokens(&source), &home_of(&file)).len();
        let (found, tests) = check_file(&file, &source);
        violations.extend(found);
        exempt.extend(tests);
    }
    violations.retain(|v| !exempt.contains(&home_of(&v.file).join("/")));
    // A checker that has read nothing is content with everything.
    assert!(files.len() >= 10 && paths >= 10, "read only {} files with {paths} paths", files.len());
    let list: Vec<String> = violations.iter().map(Violation::to_string).collect();
    assert!(list.is_empty(), "the import rule is broken:\n{}", list.join("\n"));
}

/// The map that people read is the rule.
#[test]
fn the_map_shows_the_house() {
    let map = std::fs::read_to_string("CONTRIBUTING.md").unwrap();
    let house = map.split("## The house").nth(1).and_then(|text| text.split("```").nth(1)).unwrap();
    let drawn: Vec<Vec<&str>> = house.trim().lines().rev().map(|line| line.split(' ').collect()).collect();
    assert_eq!(drawn, LEVELS, "the house of CONTRIBUTING.md, from the ground up, is not LEVELS");
}

// ---- the checker itself

#[track_caller]
fn caught(file: &str, source: &str, line: usize, words: &str) {
    let found = check_file(file, source).0;
    let hit = found.iter().any(|v| v.line == line && v.rule.contains(words) && v.file == file);
    assert!(hit, "{words:?} not caught at line {line} of {source:?}: {found:?}");
}

#[track_caller]
fn allowed(file: &str, source: &str) {
    let found = check_file(file, source).0;
    assert!(found.is_empty(), "{source:?}: {found:?}");
}

/// Paths of this crate's files in a text.
fn named(text: &str) -> impl Iterator<Item = &str> {
    let is_of_path = |c: char| c.is_ascii_alphanumeric() || "/_-.".contains(c);
    text.split(move |c| !is_of_path(c)).filter(|word| word.starts_with("src/") && word.ends_with(".rs"))
}

/// A source that stands in a file of this crate goes where the file goes.
#[test]
fn what_data_and_guides_name_is_there() {
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![home.join("README.md"), home.join("CONTRIBUTING.md")];
    for folder in std::fs::read_dir(home.join("models")).unwrap() {
        let entries = std::fs::read_dir(folder.unwrap().path()).unwrap();
        files.extend(
            entries.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|e| e == "json")),
        );
    }
    let mut known = 0;
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap();
        for path in named(&text) {
            assert!(home.join(path).exists(), "{}: {path} is not there", file.display());
            known += 1;
        }
    }
    assert!(known > 20, "{known}");
}

#[test]
fn planted_imports_from_above_are_caught() {
    caught("plan/op.rs", "//! doc\n\nuse crate::cost::Timeline;\n", 3, "plan imports cost from above");
    caught("plan/op.rs", "use crate::{error::Error, spec::{Llm, Gpu},\n  sim::engine};", 2, "plan imports sim");
    caught("plan/op.rs", "fn f() -> crate::timeline::Span { todo!() }", 1, "plan imports timeline");
    caught("spec/workload.rs", "use crate::plan::Dtype;", 1, "spec imports plan from above");
    caught("units.rs", "use super::plan::Op;", 1, "units imports plan");
    caught("spec/mod.rs", "mod a { mod b { use super::super::super::cost::x; } }", 1, "spec imports cost");
    caught("exec/cpu/mod.rs", "use super::super::report;", 1, "exec imports report from above");
    caught("plot/mod.rs", "use foretrain::cli::Args;", 1, "plot imports cli");
    caught("plot/mod.rs", "use ::foretrain::cli::Args;", 1, "plot imports cli");
    caught(
        "plan/op.rs",
        "#[serde(with = \"x\")]\nmacro_rules! m { () => { $crate::sweep::run() } }",
        2,
        "plan imports sweep",
    );
}

#[test]
fn planted_imports_of_siblings_are_caught() {
    caught("cost.rs", "use crate::exec;", 1, "cost imports its sibling exec");
    caught("sim/engine.rs", "use crate::strategy::ring;", 1, "sim imports its sibling strategy");
    caught("strategy/ring.rs", "use crate::cost::cost;", 1, "strategy imports cost; it may import only plan, routing");
    caught("strategy/ring.rs", "use crate::collective::hops;", 1, "strategy imports collective");
    caught("units.rs", "use crate::error::Error;", 1, "units imports its sibling error");
    caught("plot/x.rs", "use crate::sweep::Row;", 1, "plot imports its sibling sweep");
}

#[test]
fn planted_escapes_to_the_root_are_caught() {
    caught("plan/op.rs", "use crate::*;", 1, "root of the crate");
    caught("plan/op.rs", "use crate as all;", 1, "root of the crate");
    caught("plan/op.rs", "use super::super::*;", 1, "root of the crate");
    caught("plan/op.rs", "use crate::Result;", 1, "Result is no module of the house");
    caught("new_module.rs", "use crate::plan::Op;", 1, "new_module is no module of the house");
}

#[test]
fn planted_foreign_crates_are_caught() {
    caught("cost.rs", "use clap::Parser;", 1, "cost names clap; only cli and main may");
    caught("report.rs", "\nuse plotters::prelude::*;", 2, "report names plotters");
    caught("lib.rs", "pub use cudarc;", 1, "lib names cudarc");
    allowed("exec/cuda/mod.rs", "use cudarc::driver;");
    allowed("plot/style.rs", "use plotters::prelude::*;");
    allowed("main.rs", "use clap::Parser; use foretrain::cli;");
}

#[test]
fn planted_unsafe_code_is_caught() {
    caught("exec/arena.rs", "fn f(x: *const u8) -> u8 {\n    unsafe { *x }\n}", 2, "unsafe code; only exec/cuda/");
    caught("plan/op.rs", "unsafe impl Send for Op {}", 1, "unsafe code");
    allowed("exec/cuda/driver.rs", "fn f(x: *const u8) -> u8 { unsafe { *x } }");
    allowed("exec/arena.rs", "// unsafe\nconst A: &str = \"unsafe\";");
}

#[test]
fn a_reference_that_uses_the_kernels_is_caught() {
    caught("exec/reference/layer.rs", "use super::kernels::matmul;", 1, "mentions kernels");
    caught("exec/reference/layer.rs", "use crate::plan::{Op,\n kernel::Kernel};", 2, "mentions plan::kernel");
    allowed("exec/reference/layer.rs", "use crate::plan::Plan; // no kernels here");
    allowed("exec/cpu.rs", "use super::kernels; use crate::plan::kernel::Kernel;");
}

#[test]
fn what_is_not_an_import_is_allowed() {
    allowed(
        "plan/op.rs",
        "// crate::cost\n/* crate::sim /* crate::exec */ crate::cost */\n/// [x](crate::cost)\nfn f() {}",
    );
    allowed(
        "plan/op.rs",
        "const A: &str = \"use crate::cost\"; const B: &str = r#\"crate::\"cost\"#; const C: char = '\"';",
    );
    allowed("plan/op.rs", "fn f<'a>(x: &'a str) -> &'a str { x } pub(crate) fn g() {}");
    allowed("plan/op.rs", "use super::mesh::Mesh; use crate::spec; use crate::error::{Error, Result}; use self::a::b;");
    allowed("plan/op.rs", "#[cfg(test)]\nmod tests { use super::*; use crate::cost; mod a { use crate::sim; } }");
    allowed(
        "exec/mod.rs",
        "#[cfg(all(test, feature = \"cuda\"))]\n#[allow(unused)]\npub(crate) mod tests { use crate::report; }",
    );
    allowed("cost.rs", "use crate::{cluster, collective, device::KernelTime, fold, plan, timeline};");
    allowed("exec/mod.rs", "use crate::collective; use crate::timeline; use crate::plan; use crate::spec;");
    allowed("lib.rs", "pub mod cli; pub use crate::plan::Plan;");
}

#[test]
fn only_modules_of_tests_are_exempt() {
    caught("plan/op.rs", "#[cfg(test)]\nmod tests { }\nuse crate::cost;", 3, "plan imports cost");
    caught("plan/op.rs", "#[cfg(test)]\nuse crate::cost;", 2, "plan imports cost");
    caught("plan/op.rs", "#[cfg(not(test))]\nmod a { use crate::cost; }", 2, "plan imports cost");
    caught("plan/op.rs", "const A: &str = r\"\\\"; use crate::cost;", 1, "plan imports cost");
    caught("plan/op.rs", "const A: char = '\\''; use crate::cost; const B: char = '\\'';", 1, "plan imports cost");
    let (_, files) = check_file("plan/mod.rs", "#[cfg(test)]\nmod tests;");
    assert_eq!(files, ["plan/tests"]);
}
