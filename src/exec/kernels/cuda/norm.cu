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
// The usual case, rows of up to 8,192 columns, of a LayerNorm 4,096: a row is read once and kept in registers, as is the
// block's part of dw, and the next one is on its way meanwhile where there is room for it.
template <int CHUNKS, bool CENTRED> DEVICE void rows_bwd(const NormBwd& p, float* scratch) {
    constexpr int N = 8;
    constexpr bool AHEAD = CHUNKS <= 2;
    float dw[CHUNKS][N] = {}, db[CENTRED ? CHUNKS : 1][N] = {};
    Eight<R0> next_x[CHUNKS];
    Eight<R2> next_dy[CHUNKS];
    Eight<R3> next_residual[CHUNKS];
    auto column = [&](int k) { return (i64(k) * THREADS + threadIdx.x) * N; };
    auto fetch = [&](i64 row) {
        UNROLL for (int k = 0; k < CHUNKS; k++) {
            i64 c = column(k);
            if (row >= p.rows || c >= p.cols) continue;
            next_x[k] = eight(p.x + row * p.cols + c);
            next_dy[k] = eight(p.dy + row * p.cols + c);
            next_residual[k] = eight(p.residual + row * p.cols + c);
        }
    };
    if (AHEAD) fetch(blockIdx.x);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        if (!AHEAD) fetch(row);
        // As they lie in memory: to make them floats again takes less than to keep twice as many registers.
        Eight<R0> x[CHUNKS];
        Eight<R2> dy[CHUNKS];
        Eight<R3> residual[CHUNKS];
        UNROLL for (int k = 0; k < CHUNKS; k++) {
            x[k] = next_x[k];
            dy[k] = next_dy[k];
            residual[k] = next_residual[k];
        }
        if (AHEAD) fetch(row + gridDim.x);
        float mean = 0;
        if constexpr (CENTRED) {
            UNROLL for (int k = 0; k < CHUNKS; k++) {
                if (column(k) >= p.cols) continue;
                float v[N];
                unpack(v, x[k]);
                UNROLL for (int j = 0; j < N; j++) mean += v[j];
            }
            mean = block_sum(mean, scratch) / float(p.cols);
        }
        // Of (v - mean)^2, of (v - mean) dn, and of dn.
        float sums[CENTRED ? 3 : 2] = {};
        UNROLL for (int k = 0; k < CHUNKS; k++) {
            i64 c = column(k);
            if (c >= p.cols) continue;
            float v[N], d[N], w[N];
            unpack(v, x[k]);
            unpack(d, dy[k]);
            load(w, p.w + c);
            UNROLL for (int j = 0; j < N; j++) {
                sums[0] += (v[j] - mean) * (v[j] - mean);
                sums[1] += (v[j] - mean) * (w[j] * d[j]);
                if constexpr (CENTRED) sums[2] += w[j] * d[j];
            }
        }
        block_sums(sums, scratch);
        float inverse = 1.0f / sqrtf(sums[0] / float(p.cols) + float(p.eps));
        float along = sums[1] * inverse / float(p.cols), off = 0;
        if constexpr (CENTRED) off = sums[2] / float(p.cols);
        UNROLL for (int k = 0; k < CHUNKS; k++) {
            i64 c = column(k);
            if (c >= p.cols) continue;
            float v[N], d[N], w[N], r[N];
            unpack(v, x[k]);
            unpack(d, dy[k]);
            unpack(r, residual[k]);
            load(w, p.w + c);
            UNROLL for (int j = 0; j < N; j++) {
                float n = (v[j] - mean) * inverse;
                dw[k][j] += d[j] * n;
                if constexpr (CENTRED) db[k][j] += d[j];
                r[j] += inverse * (w[j] * d[j] - off - n * along);
            }
            store(p.dx + row * p.cols + c, r);
        }
    }
    i64 wide = p.bias ? 2 * p.cols : p.cols;
    UNROLL for (int k = 0; k < CHUNKS; k++) {
        i64 c = column(k);
        if (c >= p.cols) continue;
        store(p.parts + blockIdx.x * wide + c, dw[k]);
        if constexpr (CENTRED) {
            if (p.bias) store(p.parts + blockIdx.x * wide + p.cols + c, db[k]);
        }
    }
}

KERNEL_OF(row_norm_bwd, NormBwd, THREADS, 2) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    constexpr i64 CHUNK = 8 * THREADS;
    bool usual = p.cols % 8 == 0 && p.cols <= (p.centred ? 2 : 4) * CHUNK && (p.centred || !p.bias);
    if (usual && aligned(p.x, p.w, p.dy, p.residual, p.dx, p.parts)) {
        if (p.centred) return p.cols <= CHUNK ? rows_bwd<1, true>(p, scratch) : rows_bwd<2, true>(p, scratch);
        if (p.cols <= CHUNK) return rows_bwd<1, false>(p, scratch);
        if (p.cols <= 2 * CHUNK) return rows_bwd<2, false>(p, scratch);
        return rows_bwd<4, false>(p, scratch);
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
    WIDE(p.cols, aligned(p.x, p.parts), {
        for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N) {
            float sum[N] = {};
            // Several rows are on their way at a time; they are added in their order. (Not run on a GPU since.)
            constexpr int ROWS = 4;
            for (i64 row = blockIdx.x; row < p.rows; row += i64(ROWS) * gridDim.x) {
                float x[ROWS][N] = {};
                UNROLL for (int i = 0; i < ROWS; i++) {
                    i64 at = row + i64(i) * gridDim.x;
                    if (at < p.rows) load(x[i], p.x + at * p.cols + c);
                }
                UNROLL for (int i = 0; i < ROWS; i++)
                    UNROLL for (int j = 0; j < N; j++) sum[j] += x[i][j];
            }
            store(p.parts + blockIdx.x * p.cols + c, sum);
        }
    });
}
