//! The CUDA kernels against the CPU's, without a GPU: what `foretrain selftest --on cuda` does there, done by a double of
//! the device.
//!
//! Kernels are compiled with a C++ compiler and run by an emulator of CUDA's execution model (`cuda_emulator/`). So the
//! numbers, the indices and the meetings of threads are tested; speed, registers and the driver are not.

mod cuda_double;
mod cuda_emulator;

use cuda_double::Double;
use foretrain::exec::cuda::lower::{LEAST_SHARED, MOST_SHARED};
use foretrain::exec::cuda::selftest::{cases, check};

fn hold(groups: &[&str]) {
    hold_on(groups, MOST_SHARED);
}

/// On a GPU whose blocks have so much shared memory.
fn hold_on(groups: &[&str], shared: u64) {
    let mut double = Double::new(1, 8 << 30, 1);
    double.shared = shared;
    for group in groups {
        let cases = cases::of_group(group);
        assert!(!cases.is_empty(), "{group} has no cases");
        for verdict in cases.iter().flat_map(|case| check(&mut double, case, 1)) {
            assert!(verdict.wrong.is_none(), "{verdict:?}");
            assert!(verdict.error.is_some_and(|e| e <= verdict.tolerance), "{verdict:?}");
        }
    }
}

#[test]
fn attention_forward() {
    hold(&["attention_forward", "attention_onto"]);
}

#[test]
fn attention_backward() {
    hold(&["attention_backward", "attention_backward_onto"]);
}

#[test]
fn attention_that_leans_on_distance() {
    hold(&["attention_alibi"]);
}

#[test]
fn state_spaces() {
    hold(&["state_space"]);
}

#[test]
fn attention_of_other_widths_and_what_brings_blocks_together() {
    hold(&["attention_head_dims", "attention_merge", "masked_sums"]);
}

#[test]
fn latent_attention() {
    hold(&["latent", "attention_narrow_values"]);
}

/// Tiles are smaller where there is less shared memory.
#[test]
fn attention_where_shared_memory_is_least() {
    hold_on(&["attention_head_dims"], LEAST_SHARED);
}

#[test]
fn rows_and_elements() {
    hold(&["norms", "head_norms", "pointwise", "residuals", "rotary", "ends", "moves"]);
}

#[test]
fn products_and_experts() {
    hold(&["products", "experts", "muon"]);
}

#[test]
fn every_group_is_held() {
    let text = include_str!("cuda_kernels.rs");
    for group in cases::groups() {
        assert!(text.contains(&format!("\"{group}\"")), "{group} is tested nowhere");
    }
}

/// A test that cannot fail shows nothing: a kernel whose operands are swapped is found.
#[test]
fn a_wrong_result_is_found() {
    let mut case = cases::of_group("pointwise").swap_remove(0);
    case.tolerance = -1.0;
    let verdict = check(&mut Double::new(1, 1 << 30, 1), &case, 1).remove(0);
    assert!(verdict.wrong.is_some());
    let mut double = Double::new(1, 1 << 10, 1);
    case.tolerance = 1.0;
    assert!(check(&mut double, &case, 1)[0].wrong.as_ref().unwrap().contains("memory"), "too little memory");
}
