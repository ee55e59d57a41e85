//! Puts every file of models/ into the binary, so that a model, a GPU, a cluster, a stack .. is one file.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

fn main() {
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let mut table = String::from("const SHIPPED: &[(&str, &str, &str)] = &[\n");
    for kind in ["cluster", "exchange", "fleet", "gpu", "known", "llm", "stack", "storage"] {
        let folder = Path::new(&root).join("models").join(kind);
        println!("cargo:rerun-if-changed={}", folder.display());
        let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let mut files: Vec<_> = entries.map(|e| e.expect("a readable folder").path()).collect();
        files.retain(|f| f.extension().is_some_and(|e| e == "json"));
        files.sort();
        for file in files {
            let name = file.file_stem().and_then(|s| s.to_str()).expect("a name in UTF-8");
            writeln!(table, "    ({kind:?}, {name:?}, include_str!({file:?})),").expect("a string takes all");
        }
    }
    table.push_str("];\n");
    let out = env::var("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&out).join("shipped.rs"), table).expect("the build folder can be written");
}
