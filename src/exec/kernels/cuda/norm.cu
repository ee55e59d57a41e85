// RMSNorm and LayerNorm, a block of threads a row. Shapes: x, y, dx, dy, residual [rows, cols]; w [cols], or of a
// LayerNorm with bias [weight | bias].
//
// dw is a sum over rows: a block takes every gridDim.x-th row and writes its part, and a second kernel adds the parts
// up in order, so that the sum does not depend on who was first.
#include "wide.cuh"

constexpr int THREADS = 256;

struct Norm {
    const R0* x;
    const R1* w;
    W0* y;
    i64 rows, cols, centred, bias; // centred: LayerNorm
    f64 eps;
};

// Mean (0 where it is not taken off) and 1 / root of the mean square, or of the variance.
struct Moments {
    float mean, inverse;
};

template <int N> DEVICE Moments moments(const R0* x, i64 cols, bool centred, float eps, float* scratch) {
    float sum = 0, squares = 0;
    if (centred) {
        for (i64 c = i64(threadIdx.x) * N; c < cols; c += THREADS * N) {
            float v[N];
            load(v, x + c);
            UNROLL for (int j = 0; j < N; j++) sum += v[j];
        }
        sum = block_sum(sum, scratch) / float(cols);
    }
    for (i64 c = i64(threadIdx.x) * N; c < cols; c += THREADS * N) {
        float v[N];
        load(v, x + c);
        UNROLL for (int j = 0; j < N; j++) squares += (v[j] - sum) * (v[j] - sum);
    }
    return {sum, 1.0f / sqrtf(block_sum(squares, scratch) / float(cols) + eps)};
}

KERNEL(row_norm, Norm, THREADS) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const R0* x = p.x + row * p.cols;
        WIDE(p.cols, aligned(p.x, p.w, p.y), {
            Moments m = moments<N>(x, p.cols, p.centred, float(p.eps), scratch);
            for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N) {
                float v[N];
                float w[N];
                float b[N] = {};
                load(v, x + c);
                load(w, p.w + c);
                if (p.bias) load(b, p.w + p.cols + c);
                UNROLL for (int j = 0; j < N; j++) v[j] = (v[j] - m.mean) * m.inverse * w[j] + b[j];
                store(p.y + row * p.cols + c, v);
            }
        });
    }
}

struct NormBwd {
    const R0* x;
    const R1* w;
    const R2* dy;
    const R3* residual;
    W0* dx;
    float* parts; // [gridDim.x, cols], with bias [gridDim.x, 2 cols]
    i64 rows, cols, centred, bias;
    f64 eps;
};

// dx = residual + r (dn - mean(dn) - n mean(n dn)), n the normalised row, dn = w dy, the mean of dn taken off by a
// LayerNorm alone.
//
// The usual case, RMSNorm of up to 8,192 columns: a row is read once and kept in registers, as is the block's part of dw.
template <int CHUNKS> DEVICE void rms_rows_bwd(const NormBwd& p, float* scratch) {
    constexpr int N = 8;
    float dw[CHUNKS][N] = {};
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        float v[CHUNKS][N] = {}, d[CHUNKS][N] = {}, r[CHUNKS][N];
        float squares = 0, along = 0;
        UNROLL for (int k = 0; k < CHUNKS; k++) {
            i64 c = (i64(k) * THREADS + threadIdx.x) * N;
            if (c >= p.cols) continue;
            load(v[k], p.x + row * p.cols + c);
            load(d[k], p.dy + row * p.cols + c);
            load(r[k], p.residual + row * p.cols + c);
        }
        UNROLL for (int k = 0; k < CHUNKS; k++) {
            i64 c = (i64(k) * THREADS + threadIdx.x) * N;
            if (c >= p.cols) continue;
            float w[N];
            load(w, p.w + c);
            UNROLL for (int j = 0; j < N; j++) {
                squares += v[k][j] * v[k][j];
                along += v[k][j] * (w[j] * d[k][j]);
            }
        }
        block_sums(squares, along, scratch);
        float inverse = 1.0f / sqrtf(squares / float(p.cols) + float(p.eps));
        along *= inverse / float(p.cols);
        UNROLL for (int k = 0; k < CHUNKS; k++) {
            i64 c = (i64(k) * THREADS + threadIdx.x) * N;
            if (c >= p.cols) continue;
            float w[N];
            load(w, p.w + c);
            UNROLL for (int j = 0; j < N; j++) {
                float n = v[k][j] * inverse;
                dw[k][j] += d[k][j] * n;
                r[k][j] += inverse * (w[j] * d[k][j] - n * along);
            }
            store(p.dx + row * p.cols + c, r[k]);
        }
    }
    UNROLL for (int k = 0; k < CHUNKS; k++) {
        i64 c = (i64(k) * THREADS + threadIdx.x) * N;
        if (c < p.cols) store(p.parts + blockIdx.x * p.cols + c, dw[k]);
    }
}

KERNEL_OF(row_norm_bwd, NormBwd, THREADS, 2) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    bool usual = !p.centred && !p.bias && p.cols % 8 == 0 && p.cols <= 4 * 8 * THREADS;
    if (usual && aligned(p.x, p.w, p.dy, p.residual, p.dx, p.parts)) {
        if (p.cols <= 8 * THREADS) return rms_rows_bwd<1>(p, scratch);
        if (p.cols <= 2 * 8 * THREADS) return rms_rows_bwd<2>(p, scratch);
        return rms_rows_bwd<4>(p, scratch);
    }
    i64 wide = p.bias ? 2 * p.cols : p.cols;
    float* part = p.parts + blockIdx.x * wide;
    for (i64 c = threadIdx.x; c < wide; c += THREADS) part[c] = 0;
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const R0* x = p.x + row * p.cols;
        const R2* dy = p.dy + row * p.cols;
        WIDE(p.cols, aligned(p.x, p.w, p.dy, p.residual, p.dx), {
            Moments m = moments<N>(x, p.cols, p.centred, float(p.eps), scratch);
            float along = 0;
            float mean = 0;
            for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N) {
                float v[N];
                float w[N];
                float d[N];
                load(v, x + c);
                load(w, p.w + c);
                load(d, dy + c);
                UNROLL for (int j = 0; j < N; j++) {
                    along += (v[j] - m.mean) * m.inverse * w[j] * d[j];
                    mean += w[j] * d[j];
                }
            }
            along = block_sum(along, scratch) / float(p.cols);
            mean = p.centred ? block_sum(mean, scratch) / float(p.cols) : 0.0f;
            for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N) {
                float v[N];
                float w[N];
                float d[N];
                float r[N];
                load(v, x + c);
                load(w, p.w + c);
                load(d, dy + c);
                load(r, p.residual + row * p.cols + c);
                UNROLL for (int j = 0; j < N; j++) {
                    float n = (v[j] - m.mean) * m.inverse;
                    r[j] += m.inverse * (w[j] * d[j] - mean - n * along);
                    // The very same thread has these columns in every row.
                    part[c + j] += d[j] * n;
                    if (p.bias) part[p.cols + c + j] += d[j];
                }
                store(p.dx + row * p.cols + c, r);
            }
        });
        __syncthreads();
    }
}

// sum[cols] += the sum of the rows of x.
struct AddColumns {
    const R0* x;
    W0* sum;
    i64 rows, cols;
};

// A block has 32 columns, its warps every eighth row each; their sums are added in order.
KERNEL(add_columns, AddColumns, THREADS) {
    SHARED(memory);
    float* sums = reinterpret_cast<float*>(memory); // [8, 32]
    constexpr int WARPS = THREADS / 32;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (i64 first = i64(blockIdx.x) * 32; first < p.cols; first += i64(gridDim.x) * 32) {
        i64 c = first + lane;
        float sum = 0;
        if (c < p.cols)
            for (i64 row = warp; row < p.rows; row += WARPS) sum += to_float(p.x[row * p.cols + c]);
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (warp == 0 && c < p.cols) {
            UNROLL for (int i = 1; i < WARPS; i++) sum += sums[i * 32 + lane];
            p.sum[c] = from_float<W0>(to_float(p.sum[c]) + sum);
        }
        __syncthreads();
    }
}

// Each block the sum of every gridDim.x-th row, into a row of `parts`.
struct ColumnParts {
    const R0* x;
    float* parts; // [gridDim.x, cols]
    i64 rows, cols;
};

KERNEL(column_parts, ColumnParts, THREADS) {
    for (i64 c = threadIdx.x; c < p.cols; c += THREADS) {
        float sum = 0;
        for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) sum += to_float(p.x[row * p.cols + c]);
        p.parts[blockIdx.x * p.cols + c] = sum;
    }
}
