//! Matrix products by cuBLASLt.
//!
//! Every layout and dtype of plans, FP8 among them, is right on an H100 and an H200 (CUDA 13's cuBLASLt); without a GPU it
//! runs against a library that stands for cuBLASLt by its documentation (`tests/cuda_ffi.rs`). Plans are row-major and
//! cuBLAS is column-major, where a row-major matrix is its own transpose: C = A B becomes Cᵀ = Bᵀ Aᵀ.

#![allow(unsafe_code)]

use super::device::Operands;
use super::libraries::{self, Wanted};
use super::lower::Gemm;
use crate::error::{Error, Result};
use crate::plan::Dtype;
use cudarc::cublaslt::{result, sys};
use rustc_hash::FxHashMap;
use std::ffi::c_void;

/// Bytes of workspace: the most that Hopper's kernels ask for.
pub const WORKSPACE: u64 = 32 << 20;

/// The library, and what it chose for each shape.
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    /// Address of [`WORKSPACE`] bytes.
    workspace: u64,
    chosen: FxHashMap<Shape, Chosen>,
}

/// What an algorithm is chosen by: the product, and to how many bytes each of A, B and C is aligned.
type Shape = (Gemm, [u32; 3]);

/// The key of a product.
pub fn shape(gemm: &Gemm, at: Operands) -> Shape {
    let [m, n, k] = gemm.shape;
    let operands = [(at.a, m * k), (at.b, k * n), (at.c, m * n)];
    // Of several products each begins where the one before ends.
    let next = |elems: u64, dtype: Dtype| if gemm.count > 1 { elems * dtype.size() } else { 0 };
    let aligned = [0, 1, 2].map(|i| alignment(operands[i].0 | next(operands[i].1, gemm.dtypes[i])));
    (gemm.clone(), aligned)
}

struct Chosen {
    problem: Problem,
    algo: sys::cublasLtMatmulAlgo_t,
}

fn fail(gemm: &Gemm) -> impl Fn(result::CublasError) -> Error + '_ {
    let Gemm { count, shape, transposed, dtypes, accumulate, bias } = gemm;
    move |e| {
        let what =
            format!("{count} of {shape:?} of {dtypes:?}, transposed {transposed:?}, onto {accumulate}, bias {bias}");
        Error::device("matmul", format!("cuBLASLt on {what}: {e}"))
    }
}

/// The largest power of two up to what cuBLASLt asks about that divides an address.
fn alignment(at: u64) -> u32 {
    1 << at.trailing_zeros().min(8)
}

fn of(dtype: Dtype) -> Result<sys::cudaDataType> {
    match dtype {
        Dtype::Bf16 => Ok(sys::cudaDataType_t::CUDA_R_16BF),
        Dtype::F32 => Ok(sys::cudaDataType_t::CUDA_R_32F),
        // Codes of E4M3.
        Dtype::U8 => Ok(sys::cudaDataType_t::CUDA_R_8F_E4M3),
        other => Err(Error::device("matmul", format!("no product of {other:?} on CUDA; use bf16"))),
    }
}

impl Blas {
    /// cuBLASLt in the context of this thread. Errors: it is not on this machine.
    pub fn new(workspace: u64) -> Result<Blas> {
        libraries::find(Wanted::CublasLt);
        // SAFETY: looks the library up by its names and does nothing else.
        if !unsafe { sys::is_culib_present() } {
            let why =
                "cuBLASLt (libcublasLt.so) is not on this machine; install the CUDA toolkit or NVIDIA's cublas wheel";
            return Err(Error::device("matmul", why));
        }
        let handle = result::create_handle().map_err(|e| Error::device("matmul", format!("cuBLASLt: {e}")))?;
        Ok(Blas { handle, workspace, chosen: FxHashMap::default() })
    }

    /// Whether products in FP8 have a scale for every 128 numbers of an operand here. Errors: another GPU than Hopper, an
    /// older cuBLASLt (its documentation, "Narrow Precision Data Types Usage": compute capability 9.0 alone, from CUDA 12.9
    /// on). That others are refused by it is unverified here.
    pub fn has_fp8(&self, name: &str, arch: &str) -> Result<()> {
        // SAFETY: it takes nothing, and the library is loaded.
        fp8_by(name, arch, unsafe { sys::cublasLtGetVersion() })
    }

    pub fn workspace(&self) -> u64 {
        self.workspace
    }

    /// One product on a stream. Products on different streams must not run at once: they share the workspace.
    pub fn run(&mut self, gemm: &Gemm, at: Operands, stream: *mut c_void) -> Result<()> {
        let key = shape(gemm, at);
        if !self.chosen.contains_key(&key) {
            let problem = Problem::new(gemm)?;
            problem.point(gemm, at)?;
            let algo = self.choose(&problem, gemm, key.1)?;
            self.chosen.insert(key.clone(), Chosen { problem, algo });
        }
        let Chosen { problem, algo } = &self.chosen[&key];
        problem.point(gemm, at)?;
        let (alpha, beta) = (at.factors.product, if gemm.accumulate { at.factors.old } else { 0.0 });
        let [a, b, c] = [at.a, at.b, at.c].map(|x| x as *mut c_void);
        // SAFETY: the operands lie in live allocations, of the sizes that `check` has held the plan to; descriptors live
        // until the call returns.
        unsafe {
            result::matmul(
                self.handle,
                problem.desc,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                b,
                problem.layouts[0],
                a,
                problem.layouts[1],
                c,
                problem.layouts[2],
                c,
                problem.layouts[2],
                algo,
                self.workspace as *mut c_void,
                WORKSPACE as usize,
                stream.cast(),
            )
        }
        .map_err(fail(gemm))
    }

    /// An algorithm for operands aligned so: without being told, cuBLASLt takes all of them to be aligned to 256 bytes.
    fn choose(&self, problem: &Problem, gemm: &Gemm, [a, b, c]: [u32; 3]) -> Result<sys::cublasLtMatmulAlgo_t> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let preference = result::create_matmul_pref().map_err(fail(gemm))?;
        let workspace = WORKSPACE as usize;
        // Our A is what cuBLAS calls B.
        let aligned = [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ];
        let [x, y, z] = problem.layouts;
        // SAFETY: everything named is live, and values have the types that attributes are documented to have; the
        // preference is destroyed once.
        unsafe {
            let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let mut set =
                result::set_matmul_pref_attribute(preference, most, (&raw const workspace).cast(), size_of::<usize>());
            for (which, bytes) in aligned {
                let at = (&raw const bytes).cast();
                set = set.and_then(|()| result::set_matmul_pref_attribute(preference, which, at, size_of::<u32>()));
            }
            let found =
                set.and_then(|()| result::get_matmul_algo_heuristic(self.handle, problem.desc, x, y, z, z, preference));
            let _ = result::destroy_matmul_pref(preference);
            found.map(|found| found.algo).map_err(fail(gemm))
        }
    }
}

/// 120901 is 12.9.1.
fn fp8_by(name: &str, arch: &str, version: usize) -> Result<()> {
    let fail = |why: String| Err(Error::device("matmul", why));
    if !arch.starts_with("90") {
        return fail(format!(
            "{name} (sm_{arch}) has no products in FP8 with a scale for every 128 numbers, which cuBLASLt has on sm_90 alone; \
             leave fp8 out, or use H100s or H200s"
        ));
    }
    if version < 120_900 {
        let [major, minor] = [version / 10_000, version % 10_000 / 100];
        return fail(format!(
            "cuBLASLt {major}.{minor} has no products in FP8 with a scale for every 128 numbers; install CUDA 12.9 or newer, or \
             leave fp8 out"
        ));
    }
    Ok(())
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.chosen.clear();
        // SAFETY: made here and destroyed once, after everything that was made with it.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// The descriptors of a product.
struct Problem {
    desc: sys::cublasLtMatmulDesc_t,
    /// The layouts of Bᵀ, Aᵀ and Cᵀ, column-major.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Problem {
    fn new(gemm: &Gemm) -> Result<Problem> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let ([m, n, k], [a_t, b_t]) = (gemm.shape, gemm.transposed);
        let (compute, float) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F);
        // Rows and columns as they are stored, column-major: B [k, n] row-major is [n, k] there.
        let stored = |rows: u64, cols: u64, dtype| -> Result<_> {
            result::create_matrix_layout(of(dtype)?, rows, cols, rows as i64).map_err(fail(gemm))
        };
        // Made first, so that what there is of it is destroyed where the rest cannot be made.
        let desc = result::create_matmul_desc(compute, float).map_err(fail(gemm))?;
        let mut problem = Problem { desc, layouts: [std::ptr::null_mut(); 3] };
        problem.layouts[0] = if b_t { stored(k, n, gemm.dtypes[1])? } else { stored(n, k, gemm.dtypes[1])? };
        problem.layouts[1] = if a_t { stored(m, k, gemm.dtypes[0])? } else { stored(k, m, gemm.dtypes[0])? };
        problem.layouts[2] = stored(n, m, gemm.dtypes[2])?;
        if gemm.count > 1 {
            problem.repeat(gemm, [k * n, m * k, m * n])?;
        }
        problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(b_t))?;
        problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(a_t))?;
        if gemm.dtypes[0] == Dtype::U8 {
            // A scale for every 128 elements along k.
            let blocks = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
            problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &blocks)?;
            problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &blocks)?;
        }
        if gemm.bias {
            let add = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &add)?;
        }
        Ok(problem)
    }

    /// Has each layout stand for as many matrices as there are products, each so many elements behind the one before.
    fn repeat(&self, gemm: &Gemm, elems: [u64; 3]) -> Result<()> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        let count =
            i32::try_from(gemm.count).map_err(|_| Error::device("matmul", "more than 2^31 products at once"))?;
        for (layout, elems) in self.layouts.into_iter().zip(elems) {
            let stride = elems as i64;
            let (many, apart) =
                (Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
            // SAFETY: the values have the types that the attributes are documented to have, and are copied.
            unsafe {
                result::set_matrix_layout_attribute(layout, many, (&raw const count).cast(), size_of::<i32>()).and_then(
                    |()| {
                        result::set_matrix_layout_attribute(layout, apart, (&raw const stride).cast(), size_of::<i64>())
                    },
                )
            }
            .map_err(fail(gemm))?;
        }
        Ok(())
    }

    /// Where the scales and the bias of this call are.
    fn point(&self, gemm: &Gemm, at: Operands) -> Result<()> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        if let Some([of_a, of_b]) = at.scales {
            // Our A is what cuBLAS calls B.
            self.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &of_b)?;
            self.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &of_a)?;
        }
        if let Some(bias) = at.bias {
            self.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        Ok(())
    }

    fn set<T>(&self, gemm: &Gemm, which: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<()> {
        // SAFETY: the value has the type that the attribute is documented to have, and is copied.
        unsafe { result::set_matmul_desc_attribute(self.desc, which, (&raw const *value).cast(), size_of::<T>()) }
            .map_err(fail(gemm))
    }
}

impl Drop for Problem {
    fn drop(&mut self) {
        // SAFETY: made here and destroyed once. There is nobody to tell that they could not be.
        unsafe {
            let _ = result::destroy_matmul_desc(self.desc);
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_in_fp8_are_hoppers_of_a_library_that_has_them() {
        assert!(fp8_by("an H100", "90a", 120_900).is_ok() && fp8_by("an H100", "90a", 130_000).is_ok());
        for (arch, version, wanted) in
            [("100a", 130_000, "sm_90 alone"), ("89", 130_000, "sm_90"), ("90a", 120_804, "12.8")]
        {
            let error = fp8_by("a GPU", arch, version).unwrap_err().to_string();
            assert!(error.contains(wanted) && error.contains("leave fp8 out"), "{error}");
        }
    }
}
