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
//
// The usual case, heads of up to 256 columns: a lane has four neighbours, or twice four, of each of several heads in
// registers, and its part of dw.
template <int CHUNKS> DEVICE void head_rows_bwd(const HeadNormBwd& p, float* own) {
    constexpr int N = 4, HEADS = 4;
    i64 normed = p.heads + p.kv_heads, width = (p.heads + 2 * p.kv_heads) * p.d, count = p.rows * normed;
    i64 warps = i64(gridDim.x) * WARPS, first = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    float dw[2][CHUNKS][N] = {};
    auto column = [&](int k) { return (i64(k) * 32 + threadIdx.x % 32) * N; };
    for (i64 head = first; head < count; head += HEADS * warps) {
        float v[HEADS][CHUNKS][N] = {}, d[HEADS][CHUNKS][N] = {};
        auto dy_of = [&](i64 of) { return p.d_qkv + of / normed * width + of % normed * p.d; };
        UNROLL for (int h = 0; h < HEADS; h++) {
            i64 of = head + h * warps;
            UNROLL for (int k = 0; k < CHUNKS; k++) {
                if (of >= count || column(k) >= p.d) continue;
                load(v[h][k], p.before + of * p.d + column(k));
                load(d[h][k], dy_of(of) + column(k));
            }
        }
        UNROLL for (int h = 0; h < HEADS; h++) {
            i64 of = head + h * warps;
            if (of >= count) continue;
            bool of_q = of % normed < p.heads;
            const R2* weights = p.w + (of_q ? 0 : p.d);
            float squares = 0, along = 0, w[CHUNKS][N] = {};
            UNROLL for (int k = 0; k < CHUNKS; k++) {
                if (column(k) < p.d) load(w[k], weights + column(k));
                UNROLL for (int j = 0; j < N; j++) {
                    squares += v[h][k][j] * v[h][k][j];
                    along += v[h][k][j] * w[k][j] * d[h][k][j];
                }
            }
            float inverse = 1.0f / sqrtf(warp_sum(squares) / float(p.d) + float(p.eps));
            along = warp_sum(along) * inverse / float(p.d);
            UNROLL for (int k = 0; k < CHUNKS; k++) {
                float dx[N];
                UNROLL for (int j = 0; j < N; j++) {
                    float n = v[h][k][j] * inverse, part = d[h][k][j] * n;
                    dw[0][k][j] += of_q ? part : 0.0f;
                    dw[1][k][j] += of_q ? 0.0f : part;
                    dx[j] = inverse * (w[k][j] * d[h][k][j] - n * along);
                }
                if (column(k) < p.d) store(dy_of(of) + column(k), dx);
            }
        }
    }
    UNROLL for (int side = 0; side < 2; side++)
        UNROLL for (int k = 0; k < CHUNKS; k++)
            UNROLL for (int j = 0; j < N; j++)
                if (column(k) < p.d) own[side * p.d + column(k) + j] = dw[side][k][j];
}

// The sums of all warps of a block.
DEVICE void add_warps(const HeadNormBwd& p, const float* all) {
    __syncthreads();
    for (i64 c = threadIdx.x; c < 2 * p.d; c += THREADS) {
        float sum = 0;
        for (int warp = 0; warp < WARPS; warp++) sum += all[warp * 2 * p.d + c];
        p.parts[blockIdx.x * 2 * p.d + c] = sum;
    }
}

KERNEL(head_norm_bwd, HeadNormBwd, THREADS) {
    SHARED(memory);
    float* all = reinterpret_cast<float*>(memory);
    float* own = all + threadIdx.x / 32 * 2 * p.d;
    if (p.d % 8 == 0 && p.d <= 256 && aligned(p.d_qkv, p.before, p.w)) {
        if (p.d <= 128) head_rows_bwd<1>(p, own);
        else head_rows_bwd<2>(p, own);
        return add_warps(p, all);
    }
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
    add_warps(p, all);
}
