//! Matrix products by cuBLASLt.
//!
//! **Unverified: nothing here has run on a GPU yet.** Plans are row-major and cuBLAS is column-major, where a row-major
//! matrix is its own transpose: C = A B becomes Cᵀ = Bᵀ Aᵀ.

#![allow(unsafe_code)]

use super::device::Operands;
use super::lower::Gemm;
use crate::error::{Error, Result};
use crate::plan::Dtype;
use cudarc::cublaslt::{result, sys};
use rustc_hash::FxHashMap;
use std::ffi::c_void;

/// What Hopper's kernels ask for at most.
pub const WORKSPACE: u64 = 32 << 20;

/// The library, and the algorithm it chose for each shape.
pub struct Blas {
    handle: sys::cublasLtHandle_t,
    /// Address of [`WORKSPACE`] bytes.
    workspace: u64,
    chosen: FxHashMap<String, sys::cublasLtMatmulHeuristicResult_t>,
}

fn fail(gemm: &Gemm) -> impl Fn(result::CublasError) -> Error + '_ {
    move |e| Error::device("matmul", format!("cuBLASLt on {:?}: {e}", gemm.shape))
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
    /// In the context of this thread. Errors: cuBLASLt is not on this machine.
    pub fn new(workspace: u64) -> Result<Blas> {
        // SAFETY: looks the library up by its names and does nothing else.
        if !unsafe { sys::is_culib_present() } {
            let why =
                "cuBLASLt (libcublasLt.so) is not on this machine; install the CUDA toolkit or NVIDIA's cublas wheel";
            return Err(Error::device("matmul", why));
        }
        let handle = result::create_handle().map_err(|e| Error::device("matmul", format!("cuBLASLt: {e}")))?;
        Ok(Blas { handle, workspace, chosen: FxHashMap::default() })
    }

    pub fn workspace(&self) -> u64 {
        self.workspace
    }

    /// One product on a stream. Products on different streams must not run at once: they share the workspace.
    pub fn run(&mut self, gemm: &Gemm, at: Operands, stream: *mut c_void) -> Result<()> {
        let problem = Problem::new(gemm, at)?;
        let key = format!("{gemm:?}");
        if !self.chosen.contains_key(&key) {
            self.chosen.insert(key.clone(), self.choose(&problem, gemm)?);
        }
        let (alpha, beta) = (1.0f32, if gemm.accumulate { 1.0f32 } else { 0.0 });
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
                &self.chosen[&key].algo,
                self.workspace as *mut c_void,
                WORKSPACE as usize,
                stream.cast(),
            )
        }
        .map_err(fail(gemm))
    }

    fn choose(&self, problem: &Problem, gemm: &Gemm) -> Result<sys::cublasLtMatmulHeuristicResult_t> {
        let preference = result::create_matmul_pref().map_err(fail(gemm))?;
        let most = sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let bytes = WORKSPACE as usize;
        let [x, y, c] = problem.layouts;
        // SAFETY: everything named is live; the preference is destroyed once.
        unsafe {
            let set =
                result::set_matmul_pref_attribute(preference, most, (&raw const bytes).cast(), size_of_val(&bytes));
            let found =
                set.and_then(|()| result::get_matmul_algo_heuristic(self.handle, problem.desc, x, y, c, c, preference));
            let _ = result::destroy_matmul_pref(preference);
            found.map_err(fail(gemm))
        }
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: made here and destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// The descriptors of a product.
struct Problem {
    desc: sys::cublasLtMatmulDesc_t,
    /// Of Bᵀ, Aᵀ and Cᵀ, column-major.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Problem {
    fn new(gemm: &Gemm, at: Operands) -> Result<Problem> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let ([m, n, k], [a_t, b_t]) = (gemm.shape, gemm.transposed);
        let (compute, float) = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F);
        let desc = result::create_matmul_desc(compute, float).map_err(fail(gemm))?;
        // Rows and columns as they are stored, column-major: B [k, n] row-major is [n, k] there.
        let stored = |rows: u64, cols: u64, dtype| -> Result<_> {
            result::create_matrix_layout(of(dtype)?, rows, cols, rows as i64).map_err(fail(gemm))
        };
        let x = if b_t { stored(k, n, gemm.dtypes[1])? } else { stored(n, k, gemm.dtypes[1])? };
        let y = if a_t { stored(m, k, gemm.dtypes[0])? } else { stored(k, m, gemm.dtypes[0])? };
        let problem = Problem { desc, layouts: [x, y, stored(n, m, gemm.dtypes[2])?] };
        problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(b_t))?;
        problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(a_t))?;
        if let Some([of_a, of_b]) = at.scales {
            // A number for every 128 elements along k; ours is A where cuBLAS has B.
            let blocks = sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
            problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &blocks)?;
            problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &blocks)?;
            problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &of_b)?;
            problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &of_a)?;
        }
        if let Some(bias) = at.bias {
            let add = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &add)?;
            problem.set(gemm, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias)?;
        }
        Ok(problem)
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
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}
