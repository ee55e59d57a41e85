//! Reads the weights of a plan from safetensors: one file, or several that an index lists.

use super::names::{Family, Piece, ROUTER_BIAS, bare, transpose};
use crate::error::{Error, Result, json, text};
use crate::plan::{Param, Plan};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The tensors of a checkpoint that are wanted, by name: for which weight, and which part of it.
type Wanted<'p> = BTreeMap<String, (&'p Param, Piece)>;

/// Every weight of `plan`, by its name there, from the checkpoint in `dir`; and what routers add to their scores, by its
/// name here. Errors: a model whose weights are not read, a file that cannot be; a weight that no file has, or that has
/// another shape.
pub fn load(dir: &Path, plan: &Plan) -> Result<BTreeMap<String, Vec<f32>>> {
    let model = plan.model()?;
    let family = Family::of(model)?;
    let pieces = plan.params.iter().flat_map(|p| family.pieces(model, p).into_iter().map(move |piece| (p, piece)));
    let mut wanted: Wanted = pieces.map(|(p, piece)| (bare(&piece.name).to_string(), (p, piece))).collect();
    let empty = |p: &Param| vec![f32::NAN; p.shape.iter().product::<u64>() as usize];
    let mut all: BTreeMap<String, Vec<f32>> = plan.params.iter().map(|p| (p.name.clone(), empty(p))).collect();
    for file in files(dir)? {
        read_file(&file, &mut wanted, &mut all)?;
    }
    match wanted.values().next() {
        None => Ok(all),
        Some((_, piece)) => Err(missing(dir, &piece.name)),
    }
}

fn missing(dir: &Path, name: &str) -> Error {
    let remedy = match name {
        "lm_head.weight" => {
            "; where the output projection is the embedding, set \"tie_word_embeddings\": true in config.json"
        }
        _ => "; does config.json belong to these weights?",
    };
    Error::spec(dir.display(), name, format!("no safetensors file here has it{remedy}"))
}

/// The files of a checkpoint.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let index = dir.join("model.safetensors.index.json");
    if index.exists() {
        return listed(dir, &index);
    }
    let entries = std::fs::read_dir(dir).map_err(Error::io(dir))?;
    let mut found: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    found.retain(|path| path.extension().is_some_and(|e| e == "safetensors"));
    found.sort();
    if found.is_empty() {
        let why = "no .safetensors file is here; weights as model.safetensors, or several files with \
                   model.safetensors.index.json, are read";
        return Err(Error::spec(dir.display(), "weights", why));
    }
    Ok(found)
}

/// The files that an index names, each once.
fn listed(dir: &Path, index: &Path) -> Result<Vec<PathBuf>> {
    let text = text::spec(index)?;
    let json: Value = json::parse(index.display(), &text)?;
    let map = json.get("weight_map").and_then(Value::as_object);
    let wrong = |field: &str, why: &str| Error::spec(index.display(), field, why);
    let map = map.ok_or_else(|| wrong("weight_map", "missing; it says which file has which weight"))?;
    let name = |(weight, file): (&String, &Value)| {
        file.as_str().map(String::from).ok_or_else(|| wrong(weight, "not the name of a file"))
    };
    let names: BTreeSet<String> = map.iter().map(name).collect::<Result<_>>()?;
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

/// Takes from a file the tensors that are still wanted. Others are left alone.
fn read_file(path: &Path, wanted: &mut Wanted, all: &mut BTreeMap<String, Vec<f32>>) -> Result<()> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| {
        Error::spec(path.display(), "header", format!("not a safetensors file ({e}); was it downloaded whole?"))
    })?;
    for (name, view) in file.iter() {
        // A dump may lie beside the weights, whose names have more before them.
        if name.ends_with(ROUTER_BIAS) && bare(name).starts_with("layers.") {
            all.insert(format!("model.{}", bare(name)), values(path, name, &view)?);
        }
        let Some((param, piece)) = wanted.remove(bare(name)) else { continue };
        let shape = piece.shape(param);
        if view.shape() != shape {
            let why =
                format!("{:?} elements, but config.json makes it {shape:?}; they do not belong together", view.shape());
            return Err(Error::spec(path.display(), name, why));
        }
        let values = values(path, name, &view)?;
        let row = Piece::row(param);
        let values = if piece.transposed { transpose(&values, piece.rows.len()) } else { values };
        let whole = all.get_mut(&param.name).expect("every weight has room");
        whole[piece.rows.start * row..piece.rows.end * row].copy_from_slice(&values);
    }
    Ok(())
}

fn values(path: &Path, name: &str, view: &TensorView) -> Result<Vec<f32>> {
    let bytes = view.data();
    match view.dtype() {
        Dtype::F32 => Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()),
        Dtype::BF16 => {
            Ok(bytes.chunks_exact(2).map(|b| f32::from_bits(u32::from_le_bytes([0, 0, b[0], b[1]]))).collect())
        }
        Dtype::F16 => Ok(bytes.chunks_exact(2).map(|b| half(u16::from_le_bytes([b[0], b[1]]))).collect()),
        other => {
            let why = format!("{other:?} values; F32, BF16 and F16 are read: save the weights in one of these");
            Err(Error::spec(path.display(), name, why))
        }
    }
}

/// A number of IEEE's binary16: five bits of exponent, ten of mantissa.
fn half(bits: u16) -> f32 {
    let (sign, exponent, mantissa) =
        (if bits >> 15 == 1 { -1.0 } else { 1.0 }, bits >> 10 & 31, f32::from(bits & 1023));
    sign * match (exponent, mantissa) {
        (0, _) => mantissa * 2f32.powi(-24),
        (31, 0.0) => f32::INFINITY,
        (31, _) => f32::NAN,
        _ => (1.0 + mantissa / 1024.0) * 2f32.powi(i32::from(exponent) - 15),
    }
}

#[cfg(test)]
mod tests {
    use super::half;

    /// The table of Wikipedia's article on binary16.
    #[test]
    fn halves_are_their_numbers() {
        for (bits, number) in [
            (0x0001, 2f32.powi(-24)),
            (0x03ff, 6.097_555e-5),
            (0x0400, 6.103_515_6e-5),
            (0x3555, 0.333_251_95),
            (0x3c01, 1.000_976_6),
            (0x7bff, 65504.0),
            (0x7c00, f32::INFINITY),
            (0xc000, -2.0),
        ] {
            assert_eq!(half(bits), number, "{bits:x}");
        }
        assert!(half(0x8000) == 0.0 && half(0x8000).is_sign_negative() && half(0x7e00).is_nan());
    }
}
