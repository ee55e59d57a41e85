//! Checkpoints that are damaged, and what is taken in their place.

use crate::program::{folder, said, succeeds};
use foretrain::checkpoint::{Index, newest};
use std::fs;

const RUN: &str = "run --model tiny --seq-len 32 --global-batch 2";

/// Whatever is changed in an index is found, though what it says then is possible: another count of sequences, another file of the
/// same length. One without a checksum, as earlier versions wrote it, is refused.
#[test]
fn an_index_that_was_changed_is_refused() {
    let dir = folder();
    succeeds(dir.path(), &format!("{RUN} --dp 2 --save ckpt"));
    let step = newest(&dir.path().join("ckpt")).unwrap();
    let index = step.join("index.json");
    let whole = fs::read_to_string(&index).unwrap();
    let refused = |text: &str, words: &str| {
        fs::write(&index, text).unwrap();
        for line in ["checkpoint ckpt", &format!("{RUN} --load ckpt")] {
            let (code, _, err) = said(dir.path(), line);
            assert!(code == 2 && err.contains("index.json: crc32: ") && err.contains(words), "{err}");
        }
    };
    for (from, to) in
        [("\"sequences\":2", "\"sequences\":0"), ("\"file\":0", "\"file\":1"), ("\"step\":1", "\"step\": 1")]
    {
        assert!(whole.contains(from), "{from}: {whole}");
        refused(&whole.replacen(from, to, 1), "was written; the index is damaged: load another checkpoint");
    }
    let fields = whole.split_once(',').unwrap().1;
    refused(&format!("{{{fields}"), "missing: the index was damaged, or is of a version before 2");
    fs::write(&index, &whole).unwrap();
    Index::read(&step).unwrap();
    for at in 0..whole.len() {
        let mut bytes = whole.clone().into_bytes();
        bytes[at] ^= 1;
        fs::write(&index, bytes).unwrap();
        assert!(Index::read(&step).is_err(), "byte {at} of {}", whole.len());
    }
}

/// An older step is taken where the newest is not whole, and that is said.
#[test]
fn a_newer_step_that_is_not_whole_is_told_of() {
    let dir = folder();
    succeeds(dir.path(), &format!("{RUN} --steps 3 --save ckpt --save-every 1"));
    let told = |words: &[&str]| {
        for line in ["checkpoint ckpt", &format!("{RUN} --load ckpt")] {
            for line in [line.to_string(), format!("{line} --json")] {
                let text = succeeds(dir.path(), &line);
                let all = words.iter().all(|word| text.contains(word));
                assert!(all && text.contains("not whole") != words.is_empty(), "{line}: {text}");
            }
        }
    };
    told(&[]);
    let step = |name: &str| dir.path().join("ckpt").join(name);
    fs::remove_file(step("step-00000003").join("index.json")).unwrap();
    told(&["step-00000003: not whole", "step-00000002 is taken"]);
    let (code, _, err) = said(dir.path(), &format!("{RUN} --load ckpt --save ckpt"));
    assert!(code == 2 && err.contains("step-00000003") && err.contains("not whole; delete it"), "{err}");
    fs::rename(step("step-00000002"), step("step-00000002.unfinished")).unwrap();
    told(&["step-00000002.unfinished, ", "step-00000003: not whole", "step-00000001 is taken"]);
}
