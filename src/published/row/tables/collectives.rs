//! Tables of collectives: nccl-tests logs and the tables of others, a case a row. A row counts bytes as nccl-tests does:
//! those of the full buffer.

use crate::error::{Error, Result};
use crate::published::row::case::{Case, Collective, Facts};
use crate::published::row::fields::Fields;
use serde_json::{Map, Value};

/// Elements that the tables of operators count are of this size: their largest bandwidths would be half of what a link
/// reaches, or twice of what it can, if they were not.
const ELEMENT: u64 = 2;

/// Whether an entry of a list is a table of nccl-tests.
pub fn is_table(entry: &Value) -> bool {
    entry.get("op").is_some() && entry.get("rows").is_some()
}

/// A list of tables of nccl-tests: `op`, `gpus`, `nodes`, `gpu`, `link` and `rows` of `bytes` and `time_us`.
pub fn nccl_tests(file: &str, tables: &[Value]) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for (at, table) in tables.iter().enumerate() {
        let place = format!("table-{}", at + 1);
        let Some(row) = table.as_object() else {
            let why = Error::spec(file, format!("table {}", at + 1), "no object; write the fields of a table");
            cases.push(Case::unread(place, why));
            continue;
        };
        let mut f = Fields::new(file, format!("{}", at + 1), row, None);
        f.id = f.text("id").ok().flatten().unwrap_or(place);
        match rows_of(&f, meant(tables, &f.id, row)) {
            Ok(rows) => cases.extend(rows),
            Err(why) => cases.push(Case::unread(f.id.clone(), why)),
        }
    }
    Ok(cases)
}

/// The earlier table of which one says that its link is the same as there ("as .., second run"): that whose id its own
/// continues.
fn meant<'a>(tables: &'a [Value], id: &str, row: &Map<String, Value>) -> Option<&'a Map<String, Value>> {
    row.get("link")?.as_str()?.strip_prefix("as ")?;
    let (first, _) = id.rsplit_once('_')?;
    tables.iter().find(|table| table.get("id").is_some_and(|id| id == first))?.as_object()
}

fn rows_of(f: &Fields, earlier: Option<&Map<String, Value>>) -> Result<Vec<Case>> {
    let base = head(f)?;
    f.all_clear()?;
    let text = |field, own: String| earlier.and_then(|table| table.get(field)?.as_str()).map_or(own, String::from);
    let base = Collective { link: text("link", base.link), note: text("note", base.note), ..base };
    // A list of one row is a list here.
    let rows = f.row.get("rows").and_then(Value::as_array);
    let rows = rows.ok_or_else(|| f.wrong("rows", "no list; write the rows of the table"))?;
    let one = |(n, row): (usize, &Value)| {
        let id = format!("{}#{n}", f.id);
        let Some(row) = row.as_object() else {
            let why = Error::spec(f.file, format!("case {id}"), "no object; write bytes and time_us");
            return Case::unread(id, why);
        };
        let fields = Fields::new(f.file, id.clone(), row, None);
        case(&base, &f.id, fields).unwrap_or_else(|why| Case::unread(id, why))
    };
    Ok(rows.iter().enumerate().map(one).collect())
}

fn head(f: &Fields) -> Result<Collective> {
    let text = |field| Ok::<_, Error>(f.text(field)?.unwrap_or_default());
    Ok(Collective {
        op: text("op")?,
        gpu: text("gpu")?,
        gpus: f.degree("gpus")?,
        nodes: f.degree("nodes")?,
        link: text("link")?,
        note: text("note")?,
        ..Collective::default()
    })
}

fn case(base: &Collective, group: &str, f: Fields) -> Result<Case> {
    let bytes = f.number("bytes")?;
    if bytes.is_some_and(|b| b.fract() != 0.0 || b > 1e15) {
        return Err(f.wrong("bytes", "no whole number of bytes, at most 1e15; correct it, or write null"));
    }
    let row = Collective { bytes: bytes.map(|b| b as u64), time_us: f.number("time_us")?, ..base.clone() };
    f.all_clear()?;
    Ok(Case { id: f.id, group: group.into(), facts: Facts::Collective(Box::new(row)) })
}

/// Whether a table of operators is one of collectives: by the names of its first columns.
pub fn is_nccl(table: &Map<String, Value>) -> bool {
    let named = |at: usize, name: &str| table.get("columns").and_then(|c| c.get(at)).is_some_and(|c| c == name);
    named(0, "op") && named(1, "num_gpus")
}

/// A table of operators: rows of op, GPUs, elements of two bytes, ms. Its name begins with the system, all of whose
/// GPUs share a node.
pub fn operator_table(file: &str, name: &str, table: &Map<String, Value>) -> Result<Vec<Case>> {
    let wrong = |at: String, why: &str| Error::spec(file, format!("table {name}: {at}"), why);
    let rows = table.get("rows").and_then(Value::as_array);
    let rows = rows.ok_or_else(|| wrong("rows".into(), "no list; write the rows of the table"))?;
    let gpu = name.split('/').next().unwrap_or_default().replace('_', " ");
    let mut cases = Vec::with_capacity(rows.len());
    for (n, row) in rows.iter().enumerate() {
        let read = || {
            let (op, gpus, size) = (row.get(0)?.as_str()?, row.get(1)?.as_f64()?, row.get(2)?.as_f64()?);
            let ms = row.get(3)?.as_f64().filter(|ms| *ms > 0.0 && ms.is_finite())?;
            let counts = |v: f64| (1.0..1e15).contains(&v) && v.fract() == 0.0;
            (counts(gpus) && counts(size)).then_some((op, gpus as u32, size as u64, ms))
        };
        let Some((op, gpus, elements, ms)) = read() else {
            return Err(wrong(format!("row {n}"), "not an op, a number of GPUs, a number of elements and ms above 0"));
        };
        let facts = Collective {
            op: op.into(),
            gpu: gpu.clone(),
            gpus: Some(gpus),
            nodes: Some(1),
            bytes: Some(elements * ELEMENT),
            time_us: Some(ms * 1e3),
            ..Collective::default()
        };
        cases.push(Case { id: format!("{name}#{n}"), group: name.into(), facts: Facts::Collective(Box::new(facts)) });
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::Shipped;
    use crate::published::prediction::collectives::predict;
    use crate::published::row::read::parse;

    const TABLE: &str = r#"[{"id": "t", "op": "all_reduce", "gpus": 16, "nodes": 8, "gpu": "A800-SXM4-80GB",
        "link": "2 GPU/node over RoCE/IB", "rows": [{"bytes": 8589934592, "time_us": 7}, {"bytes": 8, "time_us": 9.5}]}]"#;

    #[test]
    fn a_second_run_has_the_link_of_the_first() {
        let table = TABLE.strip_prefix('[').and_then(|table| table.strip_suffix(']')).unwrap();
        let again = table.replace("\"t\"", "\"t_run2\"").replace("2 GPU/node over RoCE/IB", "as t; second run");
        let both = format!("[{table},{again}]");
        let cases = parse("c.json", &both).unwrap();
        let link = |n: usize| match &cases[n].facts {
            Facts::Collective(row) => row.link.clone(),
            _ => panic!("no collective"),
        };
        assert_eq!((cases[2].group.as_str(), link(2)), ("t_run2", link(0)));
        // Of no table that is there.
        let alone = parse("c.json", &TABLE.replace("2 GPU/node over RoCE/IB", "as x; second run")).unwrap();
        let Facts::Collective(row) = &alone[0].facts else { panic!("no collective") };
        assert_eq!(row.link, "as x; second run");
    }

    #[test]
    fn tables_of_operators_count_elements() {
        let text = r#"{"tables": {"h100_sxm/comm/x": {"columns": ["op", "num_gpus", "size", "ms"],
            "rows": [["all_gather", 8, 1024, 0.01]]}}}"#;
        let cases = parse("c.json", text).unwrap();
        let Facts::Collective(row) = &cases[0].facts else { panic!("no collective") };
        assert_eq!((row.bytes, row.time_us, row.gpu.as_str()), (Some(2048), Some(10.0), "h100 sxm"));
        assert!(predict(row, &Shipped::new().unwrap()).predicted.is_some());
        let why = parse("c.json", &text.replace("1024", "0")).unwrap_err().to_string();
        assert!(why.contains("row 0"), "{why}");
    }
}
