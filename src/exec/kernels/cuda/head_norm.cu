// RMSNorm of every head of q and of k by itself (Qwen3), a warp a head of a row. Shapes: qkv, d_qkv [rows,
// (a+2k)*d], changed where they are; q and k as they were [rows, (a+k)*d]; w, dw [q's d | k's d].
#include "wide.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

struct HeadNorm {
    W0* qkv;
    const R1* w;
    W1* before;
    i64 rows, heads, kv_heads, d;
    f64 eps;
};

// Calls `f` with every (row, head of q or k), a warp each.
template <class F> DEVICE void each_head(i64 rows, i64 heads, F f) {
    i64 warps = i64(gridDim.x) * WARPS;
    for (i64 i = i64(blockIdx.x) * WARPS + threadIdx.x / 32; i < rows * heads; i += warps) f(i / heads, i % heads);
}

// 1 / root of the mean square.
template <class T> DEVICE float inverse_of(const T* x, i64 d, float eps) {
    float squares = 0;
    for (i64 c = threadIdx.x % 32; c < d; c += 32) squares += to_float(x[c]) * to_float(x[c]);
    return 1.0f / sqrtf(warp_sum(squares) / float(d) + eps);
}

KERNEL(head_norm, HeadNorm, THREADS) {
    i64 normed = p.heads + p.kv_heads, width = (p.heads + 2 * p.kv_heads) * p.d;
    each_head(p.rows, normed, [&](i64 row, i64 head) {
        W0* x = p.qkv + row * width + head * p.d;
        W1* before = p.before + (row * normed + head) * p.d;
        const R1* w = p.w + (head < p.heads ? 0 : p.d);
        float inverse = inverse_of(x, p.d, float(p.eps));
        for (i64 c = threadIdx.x % 32; c < p.d; c += 32) {
            float was = to_float(x[c]);
            before[c] = from_float<W1>(was);
            x[c] = from_float<W0>(was * inverse * to_float(w[c]));
        }
    });
}

struct HeadNormBwd {
    W0* d_qkv;
    const R1* before;
    const R2* w;
    float* parts; // [gridDim.x, 2 d]
    i64 rows, heads, kv_heads, d;
    f64 eps;
};

// dx = r (dn - n mean(n dn)), n the normalised head, dn = w dy. Every warp has a dw of its own in shared memory, in
// which every lane has columns of its own, so that their sum does not depend on who was first.
KERNEL(head_norm_bwd, HeadNormBwd, THREADS) {
    SHARED(memory);
    float* all = reinterpret_cast<float*>(memory);
    float* own = all + threadIdx.x / 32 * 2 * p.d;
    for (i64 c = threadIdx.x % 32; c < 2 * p.d; c += 32) own[c] = 0;
    __syncwarp();
    i64 normed = p.heads + p.kv_heads, width = (p.heads + 2 * p.kv_heads) * p.d;
    each_head(p.rows, normed, [&](i64 row, i64 head) {
        W0* dy = p.d_qkv + row * width + head * p.d;
        const R1* x = p.before + (row * normed + head) * p.d;
        i64 side = head < p.heads ? 0 : p.d;
        float inverse = inverse_of(x, p.d, float(p.eps)), along = 0;
        for (i64 c = threadIdx.x % 32; c < p.d; c += 32)
            along += to_float(x[c]) * inverse * to_float(p.w[side + c]) * to_float(dy[c]);
        along = warp_sum(along) / float(p.d);
        for (i64 c = threadIdx.x % 32; c < p.d; c += 32) {
            float n = to_float(x[c]) * inverse, d = to_float(dy[c]);
            own[side + c] += d * n;
            dy[c] = from_float<W0>(inverse * (to_float(p.w[side + c]) * d - n * along));
        }
        __syncwarp();
    });
    __syncthreads();
    for (i64 c = threadIdx.x; c < 2 * p.d; c += THREADS) {
        float sum = 0;
        for (int warp = 0; warp < WARPS; warp++) sum += all[warp * 2 * p.d + c];
        p.parts[blockIdx.x * 2 * p.d + c] = sum;
    }
}
