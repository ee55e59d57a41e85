//! What would make a configuration fit that lacks memory: changes of one thing, of two, or of more, each laid out by a plan
//! of its own. What costs the GPUs least time is named first.

use super::asked::usual_batch;
use super::{Case, Point};
use crate::error::Result;
use crate::report::Row;
use crate::report::human::bytes;
use crate::spec::{Dispatch, Options, Parallelism, Recompute};
use rayon::prelude::*;

/// More are not read.
const MOST: usize = 4;
const MOST_PAIRS: usize = 3;
/// How many times a degree is tried.
const MULTIPLES: [u32; 6] = [2, 4, 8, 16, 32, 64];
/// Of the bytes that are too many, what a further step or change has to save to be worth taking.
const WORTH: f64 = 0.02;
/// Two changes save no more than each alone, but for what one takes of the room of the other.
const SUM: f64 = 0.8;
/// Pairs that are laid out at a time.
const AT_A_TIME: usize = 8;

/// One flag of the command.
struct Change {
    flag: &'static str,
    value: String,
    apply: Box<dyn Fn(&mut Point) + Send + Sync>,
}

impl Change {
    fn new(flag: &'static str, value: impl ToString, apply: impl Fn(&mut Point) + Send + Sync + 'static) -> Change {
        Change { flag, value: value.to_string(), apply: Box::new(apply) }
    }

    fn options(words: &str, set: impl Fn(&mut Options) + Send + Sync + 'static) -> Change {
        Change::new("options", words, move |point| set(&mut point.par.options))
    }
}

/// Steps of one kind of change, each saving more than the one before, up to the first that fits or the last that is worth
/// taking.
struct Kind {
    steps: Vec<Change>,
    /// Bytes that are too many with the last step; none where no step has a plan without another change.
    over: Option<f64>,
}

impl Kind {
    fn saves(&self, over: f64) -> f64 {
        self.over.map_or(f64::INFINITY, |left| over - left)
    }
}

/// What whoever asks has said himself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Said {
    /// How many sequences a step has: another number need not be told.
    pub batch: bool,
    /// Replicas: what takes ranks of them goes with another number.
    pub dp: bool,
}

impl Case {
    /// A row that lacks memory with what would make its point fit; any other row as it is.
    pub fn with_remedies(&self, point: &Point, row: Row, said: Said) -> Result<Row> {
        match row.over() {
            Some(over) if over > 0.0 => {
                let found = Search { case: self, point, over, said }.words()?;
                Ok(Row { why: row.why.and(found), ..row })
            }
            _ => Ok(row),
        }
    }

    /// Bytes of a point that are too many for a rank, below 0 where some are left; `None` where it has no plan, or lacks
    /// something else.
    fn over(&self, point: &Point) -> Result<Option<f64>> {
        let row = self.laid_out(point)?;
        Ok(row.over().filter(|over| row.feasible || *over > 0.0))
    }

    /// The same where it fits, without looking at stages behind one that does not.
    fn spare(&self, point: &Point) -> Result<Option<f64>> {
        let row = self.laid_out_within(point, self.room() as u64)?;
        Ok(row.over().filter(|_| row.feasible))
    }
}

/// What is tried on a point that needs `over` bytes more than there are.
struct Search<'a> {
    case: &'a Case,
    point: &'a Point,
    over: f64,
    said: Said,
}

impl Search<'_> {
    fn words(&self) -> Result<String> {
        let kinds: Vec<Kind> = self.changes().into_par_iter().map(|steps| self.kind(steps)).collect::<Result<_>>()?;
        let kinds: Vec<Kind> = kinds.into_iter().filter(|kind| !kind.steps.is_empty()).collect();
        let alone = kinds.iter().filter_map(|kind| {
            let over = kind.over.filter(|over| *over <= 0.0)?;
            Some(format!("{}{}", self.words_of(&[kind.steps.last()?]), self.needs(over)))
        });
        let alone: Vec<String> = alone.take(MOST).collect();
        if !alone.is_empty() {
            return Ok(format!("fits with {}", joined(&alone, "or")));
        }
        let pairs = self.pairs(&kinds)?;
        if !pairs.is_empty() {
            return Ok(format!("nothing is enough alone; fits with {}", joined(&pairs, "or")));
        }
        self.together(&kinds)
    }

    /// ` (60.1 GiB)`: all that a rank needs.
    fn needs(&self, over: f64) -> String {
        format!(" ({})", bytes(self.case.cluster.gpu.memory.value.value() + over))
    }

    fn with(&self, changes: &[&Change]) -> Point {
        let mut point = *self.point;
        changes.iter().for_each(|change| (change.apply)(&mut point));
        point
    }

    fn over_with(&self, changes: &[&Change]) -> Result<Option<f64>> {
        self.case.over(&self.with(changes))
    }

    /// Flags that are typed for changes: the batch, too, where it was not said and would be another one after them, and dp
    /// where it was said and would be another one.
    fn words_of(&self, changes: &[&Change]) -> String {
        let changed = self.with(changes);
        let is_usual = |point: &Point| point.global_batch == usual_batch(point.par.dp, point.micro_batch);
        let follows = !self.said.batch && is_usual(self.point);
        let batch = (follows && !is_usual(&changed)).then_some(("global_batch", changed.global_batch));
        let dp = self.said.dp && changed.par.dp != self.point.par.dp;
        let dp = dp.then_some(("dp", u64::from(changed.par.dp)));
        words(changes, dp.into_iter().chain(batch))
    }

    fn kind(&self, all: Vec<Change>) -> Result<Kind> {
        let (mut steps, mut refused, mut over) = (vec![], vec![], self.over);
        for change in all {
            let Some(left) = self.over_with(&[&change])? else {
                refused.push(change);
                continue;
            };
            // What saves little of this much may save a lot of what another leaves.
            let least = if steps.is_empty() { 0.0 } else { WORTH * self.over };
            if over - left <= least {
                break;
            }
            steps.push(change);
            over = left;
            if over <= 0.0 {
                break;
            }
        }
        let known = over < self.over;
        Ok(Kind { steps: if known { steps } else { refused }, over: known.then_some(over) })
    }

    /// Two changes that are enough together, what costs least time first.
    fn pairs(&self, kinds: &[Kind]) -> Result<Vec<String>> {
        let pairs = (0..kinds.len()).flat_map(|i| (i + 1..kinds.len()).map(move |j| [&kinds[i], &kinds[j]]));
        let may = |pair: &[&Kind; 2]| pair.iter().map(|kind| kind.saves(self.over)).sum::<f64>() >= SUM * self.over;
        let pairs: Vec<[&Kind; 2]> = pairs.filter(may).collect();
        let mut found = vec![];
        for some in pairs.chunks(AT_A_TIME) {
            let tried = some.par_iter().map(|pair| self.pair(*pair)).collect::<Result<Vec<Option<String>>>>()?;
            found.extend(tried.into_iter().flatten());
            if found.len() >= MOST_PAIRS {
                break;
            }
        }
        found.truncate(MOST_PAIRS);
        Ok(found)
    }

    /// The least steps of two kinds that are enough together: of the second beside the last of the first, then of the first.
    fn pair(&self, [first, second]: [&Kind; 2]) -> Result<Option<String>> {
        let Some(most) = first.steps.last() else { return Ok(None) };
        let fits = |changes: [&Change; 2]| self.case.spare(&self.with(&changes));
        for other in &second.steps {
            let Some(with_most) = fits([most, other])? else { continue };
            let said = |least, over| Ok(Some(format!("{}{}", self.words_of(&[least, other]), self.needs(over))));
            for least in &first.steps[..first.steps.len() - 1] {
                if let Some(over) = fits([least, other])? {
                    return said(least, over);
                }
            }
            return said(most, with_most);
        }
        Ok(None)
    }

    /// As many changes as it takes, what saves most first; or what they leave.
    fn together(&self, kinds: &[Kind]) -> Result<String> {
        let mut order: Vec<&Kind> = kinds.iter().collect();
        order.sort_by(|a, b| b.saves(self.over).min(self.over).total_cmp(&a.saves(self.over).min(self.over)));
        let (mut taken, mut over): (Vec<&Change>, f64) = (vec![], self.over);
        // Twice: a change may be possible beside one that came behind it.
        for change in order.iter().chain(&order).filter_map(|kind| kind.steps.last()) {
            if over <= 0.0 || taken.iter().any(|other| std::ptr::eq(*other, change)) {
                continue;
            }
            taken.push(change);
            match self.over_with(&taken)? {
                Some(left) if over - left >= WORTH * over => over = left,
                _ => drop(taken.pop()),
            }
        }
        const ELSE: &str = "use another split, which `foretrain search` looks for, a shorter sequence, more GPUs or ones with more memory";
        if over > 0.0 {
            return Ok(match taken.is_empty() {
                true => ELSE.into(),
                false => format!("{}{} is not enough either; {ELSE}", self.words_of(&taken), self.needs(over)),
            });
        }
        // What came first may be needless by now.
        for change in taken.clone() {
            let rest: Vec<&Change> = taken.iter().copied().filter(|other| !std::ptr::eq(*other, change)).collect();
            if let Some(left) = self.over_with(&rest)?.filter(|left| *left <= 0.0) {
                (taken, over) = (rest, left);
            }
        }
        Ok(format!("no two changes are enough; fits with {}{}", self.words_of(&taken), self.needs(over)))
    }

    /// Every change that there is, by kind, what costs least time first. What is done already is none, and what cannot be has
    /// no plan.
    fn changes(&self) -> Vec<Vec<Change>> {
        let (point, par) = (self.point, self.point.par);
        let options = par.options;
        let node = self.case.cluster.gpus().min(self.case.cluster.per_node());
        let halves = (1..=point.micro_batch.ilog2()).map(|n| point.micro_batch >> n);
        let carried = par.ep > 1 && options.dispatch != Dispatch::Nccl;
        let pieces = [8, 32].into_iter().filter(|n| options.loss_chunks < *n);
        let tiles = [8, 32].into_iter().filter(|n| options.mlp_chunks < *n);
        let mut all = vec![
            (par.zero + 1..=3).map(|zero| Change::new("zero", zero, move |point| point.par.zero = zero)).collect(),
            vec![Change::options("bf16-grads", |o| o.bf16_grads = true)],
            halves.map(|n| Change::new("micro_batch", n, move |point| point.micro_batch = n)).collect(),
            carried
                .then(|| Change::new("dispatch", "nccl", |p| p.par.options.dispatch = Dispatch::Nccl))
                .into_iter()
                .collect(),
            pieces.map(|n| Change::options(&format!("loss-chunks-{n}"), move |o| o.loss_chunks = n)).collect(),
            tiles.map(|n| Change::options(&format!("mlp-chunks-{n}"), move |o| o.mlp_chunks = n)).collect(),
            // Experts are spread over the ranks that there are; every other degree takes ranks from dp.
            degree("ep", par.ep, u32::MAX, |par, n| par.ep *= n),
            degree("ulysses", par.ulysses, node, |par, n| (par.ulysses, par.dp) = (par.ulysses * n, par.dp / n)),
            degree("tp", par.tp, node, |par, n| (par.tp, par.dp) = (par.tp * n, par.dp / n)),
            degree("ring", par.ring, u32::MAX, |par, n| (par.ring, par.dp) = (par.ring * n, par.dp / n)),
            vec![Change::options("recompute-act+recompute-norm", |o| {
                (o.recompute_act, o.recompute_norm) = (true, true)
            })],
            vec![Change::options("recompute-moe", |o| o.recompute_moe = true)],
            self.again(),
            degree("pp", par.pp, u32::MAX, |par, n| (par.pp, par.dp) = (par.pp * n, par.dp / n)),
        ];
        // What copies to the host's memory take is not known of every cluster.
        if self.case.cluster.spec.host.is_some() {
            let parts = [2, 4, 8, 16].into_iter().filter(|n| options.chunks < *n);
            all.extend([
                vec![Change::options("offload-activations", |o| o.offload_activations = true)],
                vec![Change::options("offload-optimizer", |o| o.offload_optimizer = true)],
                parts.map(|n| Change::options(&format!("fpdt-{n}"), move |o| o.chunks = n)).collect(),
            ]);
        }
        all
    }

    /// Whole layers, in place of what is made again of them.
    fn again(&self) -> Vec<Change> {
        let options = self.point.par.options;
        if options.keep_attention {
            return vec![Change::new("recompute", "full without keep-attention", |point| {
                point.par.options.keep_attention = false;
            })];
        }
        let parts = [
            ("recompute-act", options.recompute_act),
            ("recompute-norm", options.recompute_norm),
            ("recompute-mla-up", options.recompute_mla_up),
            ("recompute-moe", options.recompute_moe),
            ("recompute-mlp", options.recompute_mlp),
            ("keep-fp8", options.keep_fp8),
        ];
        let said: Vec<&str> = parts.into_iter().filter(|(_, said)| *said).map(|(word, _)| word).collect();
        let instead = if said.is_empty() { String::new() } else { format!(" in place of {}", said.join("+")) };
        vec![Change::new("recompute", format!("full{instead}"), |point| {
            point.par.recompute = Recompute::Full;
            let o = &mut point.par.options;
            (o.recompute_act, o.recompute_norm, o.recompute_mla_up, o.recompute_moe) = (false, false, false, false);
            (o.recompute_mlp, o.keep_fp8) = (false, false);
        })]
    }
}

/// Multiples of a degree. Where they take ranks from dp and some are left over, the point has no plan.
fn degree(name: &'static str, now: u32, most: u32, raise: fn(&mut Parallelism, u32)) -> Vec<Change> {
    let multiples = MULTIPLES.into_iter().filter(|n| now.checked_mul(*n).is_some_and(|all| all <= most));
    multiples.map(|n| Change::new(name, now * n, move |point| raise(&mut point.par, n))).collect()
}

/// `recompute full, zero 3 and options offload-optimizer`: words of options are one flag's.
fn words(changes: &[&Change], beside: impl Iterator<Item = (&'static str, u64)>) -> String {
    let flags = changes.iter().filter(|change| change.flag != "options");
    let mut all: Vec<String> = flags.map(|change| format!("{} {}", change.flag, change.value)).collect();
    all.extend(beside.map(|(flag, value)| format!("{flag} {value}")));
    let options: Vec<&str> = changes.iter().filter(|c| c.flag == "options").map(|c| &c.value[..]).collect();
    if !options.is_empty() {
        all.push(format!("options {}", options.join("+")));
    }
    joined(&all, "and")
}

/// `a, b or c`.
fn joined(words: &[String], last: &str) -> String {
    match words.split_last() {
        Some((end, rest)) if !rest.is_empty() => format!("{} {last} {end}", rest.join(", ")),
        _ => words.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Cause;
    use crate::spec::LlmSpec;

    fn case(model: &str, gpus: u32) -> Case {
        Case::new(LlmSpec::find(model).unwrap(), "dgx-h100", "nccl-fa3", gpus, None).unwrap()
    }

    fn why(case: &Case, point: Point) -> String {
        let row = case.row(&point).unwrap();
        assert_eq!(row.why.cause, Cause::Memory, "{}", row.why);
        case.with_remedies(&point, row, Said::default()).unwrap().why.to_string()
    }

    /// The point with the flags of one remedy, as someone types them who reads it, and has said nothing of the batch where it is
    /// the usual one.
    fn followed(point: Point, remedy: &str) -> Point {
        let unsaid = point.global_batch == usual_batch(point.par.dp, point.micro_batch);
        let mut point = point;
        for flag in remedy.split(", ").flat_map(|part| part.split(" and ")) {
            let (name, value) = flag.split_once(' ').unwrap();
            let par = &mut point.par;
            let ranks = par.ranks();
            match name {
                "zero" => par.zero = value.parse().unwrap(),
                "micro_batch" => point.micro_batch = value.parse().unwrap(),
                "global_batch" => point.global_batch = value.parse().unwrap(),
                "ep" => par.ep = value.parse().unwrap(),
                "tp" => par.tp = value.parse().unwrap(),
                "pp" => par.pp = value.parse().unwrap(),
                "ulysses" => par.ulysses = value.parse().unwrap(),
                "ring" => par.ring = value.parse().unwrap(),
                "recompute" => {
                    assert_eq!(value, "full");
                    par.recompute = Recompute::Full;
                }
                "options" => {
                    let all = [par.options.to_string(), value.into()].join("+").replace("default+", "");
                    par.options = all.parse().unwrap();
                }
                other => panic!("{other}"),
            }
            point.par.dp = ranks / point.par.model_ranks();
        }
        if unsaid && !remedy.contains("global_batch") {
            point.global_batch = usual_batch(point.par.dp, point.micro_batch);
        }
        point
    }

    /// Remedies of a sentence: each makes the point fit, with as much memory as is said.
    fn hold(case: &Case, point: Point) -> Vec<String> {
        let why = why(case, point);
        let all = why.split_once("fits with ").unwrap_or_else(|| panic!("{why}")).1;
        let all = all.strip_suffix(')').unwrap().replace(") or ", "), ");
        let remedy = |one: &str| {
            let (words, needs) = one.rsplit_once(" (").unwrap();
            let row = case.row(&followed(point, words)).unwrap();
            assert!(row.feasible, "{words}: {}", row.why);
            let capacity = case.cluster.gpu.memory.value.value();
            assert_eq!(bytes(capacity + row.over().unwrap()), needs, "{words}");
            words.to_string()
        };
        all.split("), ").map(remedy).collect()
    }

    fn point(seq_len: u64, global_batch: u64, par: Parallelism) -> Point {
        Point { seq_len, global_batch, micro_batch: 1, par }
    }

    #[test]
    fn what_is_enough_alone_makes_it_fit() {
        let large = case("llama-3-70b", 64);
        let all = hold(&large, point(8192, 8, Parallelism { dp: 8, tp: 8, zero: 1, ..Parallelism::default() }));
        assert_eq!(all[..2], ["zero 2", "options bf16-grads"]);
        // A stage that makes a microbatch again has more of zb-h1's gradients of weights waiting.
        let options = "zb-h1".parse().unwrap();
        let par = Parallelism { dp: 4, tp: 4, pp: 4, zero: 1, options, ..Parallelism::default() };
        let all = hold(&large, point(8192, 256, par));
        assert!(!all.contains(&"recompute full".to_string()), "{all:?}");
        // Logits of all tokens are the most that there is where one rank has the sequence.
        let whole = case("llama-3-8b", 64);
        let full = Parallelism { dp: 64, zero: 1, recompute: Recompute::Full, ..Parallelism::default() };
        assert!(hold(&whole, point(64 << 10, 64, full)).contains(&"options loss-chunks-8".to_string()));
        let mut point = point(16 << 10, 64, Parallelism { recompute: Recompute::None, dp: 8, ring: 8, ..full });
        point.micro_batch = 8;
        assert_eq!(hold(&whole, point)[0], "micro_batch 2 and global_batch 64");
        // A batch that was said is not said again, be it the usual one or not.
        let row = whole.row(&point).unwrap();
        let why = whole.with_remedies(&point, row, Said { batch: true, dp: false }).unwrap().why.to_string();
        assert!(why.contains("fits with micro_batch 2 (") && !why.contains("global_batch"), "{why}");
        point.global_batch = 128;
        assert_eq!(hold(&whole, point)[0], "micro_batch 2");
        // Replicas that were said are said again, where others leave less for them.
        let why = |said: Said| {
            let point = Point { micro_batch: 1, seq_len: 128 << 10, global_batch: 64, ..point };
            whole.with_remedies(&point, whole.row(&point).unwrap(), said).unwrap().why.to_string()
        };
        let said = why(Said { batch: true, dp: true });
        assert!(said.contains("ring 32 and dp 2") && !why(Said::default()).contains("dp "), "{said}");
    }

    #[test]
    fn two_changes_are_named_where_none_is_enough() {
        let long = case("llama-3-8b", 8);
        let par = Parallelism { ulysses: 8, zero: 1, recompute: Recompute::Full, ..Parallelism::default() };
        let all = hold(&long, point(1 << 20, 1, par));
        assert!(all.iter().any(|words| words.contains("offload-activations")), "{all:?}");
        // Words of one flag are joined, and what needs another change beside it is tried with that.
        let none = Parallelism { recompute: Recompute::None, ..par };
        let all = hold(&long, point(1 << 20, 1, none));
        assert!(all.iter().all(|words| words.contains("recompute full") || words.contains("fpdt")), "{all:?}");
    }

    #[test]
    fn more_changes_are_added_up_and_what_they_leave_is_said() {
        let few = case("llama-3.1-405b", 64);
        let par = Parallelism { dp: 64, zero: 0, ..Parallelism::default() };
        hold(&few, point(8192, 64, par));
        let one = case("llama-3.1-405b", 8);
        let why = why(&one, point(8192, 8, Parallelism { dp: 8, ..par }));
        assert!(why.contains(" is not enough either; use another split, "), "{why}");
    }

    /// Pairs of microbatches cannot be computed again, and modules of multi-token prediction not be sharded.
    #[test]
    fn nothing_is_named_that_would_be_refused() {
        let options = "overlap-exchange".parse().unwrap();
        let par = Parallelism { dp: 64, ep: 32, zero: 1, options, ..Parallelism::default() };
        let why = why(&case("deepseek-v3", 64), point(4096, 128, par));
        assert!(!why.contains("recompute full") && !why.contains("zero"), "{why}");
    }

    #[test]
    fn a_row_that_fits_or_lacks_something_else_stays_as_it_is() {
        let small = case("llama-3-8b", 8);
        let fits = Parallelism { dp: 8, zero: 3, recompute: Recompute::Full, ..Parallelism::default() };
        for par in [fits, Parallelism { dp: 3, ..fits }] {
            let row = small.row(&point(8192, 8, par)).unwrap();
            assert_eq!(small.with_remedies(&point(8192, 8, par), row.clone(), Said::default()).unwrap(), row);
        }
    }
}
