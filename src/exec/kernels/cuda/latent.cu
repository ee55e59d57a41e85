// What latent attention needs beside products and attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): norms of the
// first columns of a row, and heads put together and turned.
//
// A head's query and key are `nope` elements that do not turn and `rope` that do, element 2i with 2i + 1, of the keys
// the same ones in every head. Shapes: q [n, a*(nope + rope)], kv [n, a*(nope + v)], k [n, rope]; together q as it was
// and [n, (K: a*(nope + rope) | V: a*v)]. A thread takes two neighbours: nope, rope and v are even.
#include "wide.cuh"

constexpr int THREADS = 256;

DEVICE void load2(float& a, float& b, const float* x) { a = x[0], b = x[1]; }
DEVICE void load2(float& a, float& b, const bf16* x) {
    u32 both = *reinterpret_cast<const u32*>(x);
    a = __uint_as_float(both << 16), b = __uint_as_float(both & 0xffff0000u);
}

// `t` is a cosine and a sine.
DEVICE void turn(float& x, float& y, const float* t, float direction) {
    float cos = t[0], sin = t[1] * direction, low = x * cos - y * sin;
    y = y * cos + x * sin;
    x = low;
}

struct LatentRope {
    const R0* q_in;
    const R1* kv_in;
    const R2* k_in;
    W0* q;
    W1* kv;
    const float* turns; // [len, rope/2, 2]
    i64 rows, len, heads, nope, rope, v;
};

KERNEL(latent_rope, LatentRope, THREADS) {
    i64 qk = p.nope + p.rope, of_qk = p.heads * qk / 2, of_v = p.heads * p.v / 2, of_row = 2 * of_qk + of_v;
    each<1>(p.rows * of_row, [&](i64 i) {
        i64 row = i / of_row, at = i % of_row;
        const R1* given = p.kv_in + row * p.heads * (p.nope + p.v);
        W1* kv = p.kv + row * p.heads * (qk + p.v);
        float x, y;
        if (at >= 2 * of_qk) {
            at = 2 * (at - 2 * of_qk);
            load2(x, y, given + at / p.v * (p.nope + p.v) + p.nope + at % p.v);
            return store2(kv + p.heads * qk + at, x, y);
        }
        bool query = at < of_qk;
        at = 2 * (query ? at : at - of_qk);
        i64 head = at / qk, c = at % qk;
        if (query) load2(x, y, p.q_in + row * p.heads * qk + at);
        else if (c < p.nope) load2(x, y, given + head * (p.nope + p.v) + c);
        else load2(x, y, p.k_in + row * p.rope + c - p.nope);
        if (c >= p.nope) turn(x, y, p.turns + row % p.len * p.rope + c - p.nope, 1);
        if (query) store2(p.q + row * p.heads * qk + at, x, y);
        else store2(kv + at, x, y);
    });
}

struct LatentRopeBwd {
    const R0* dq;
    const R1* dkv;
    W0* d_q_in;
    W1* d_kv_in;
    W2* d_k_in;
    const float* turns;
    i64 rows, len, heads, nope, rope, v;
};

// The transpose: the gradient of the keys that all heads share is a sum over the heads.
KERNEL(latent_rope_bwd, LatentRopeBwd, THREADS) {
    i64 qk = p.nope + p.rope, own = p.nope + p.v, of_q = p.heads * qk / 2, of_kv = p.heads * own / 2;
    i64 of_row = of_q + of_kv + p.rope / 2;
    each<1>(p.rows * of_row, [&](i64 i) {
        i64 row = i / of_row, at = i % of_row;
        const R1* dkv = p.dkv + row * p.heads * (qk + p.v);
        const float* turns = p.turns + row % p.len * p.rope;
        float x, y;
        if (at < of_q) {
            at *= 2;
            i64 c = at % qk;
            load2(x, y, p.dq + row * p.heads * qk + at);
            if (c >= p.nope) turn(x, y, turns + c - p.nope, -1);
            store2(p.d_q_in + row * p.heads * qk + at, x, y);
        } else if (at < of_q + of_kv) {
            at = 2 * (at - of_q);
            i64 head = at / own, c = at % own;
            load2(x, y, c < p.nope ? dkv + head * qk + c : dkv + p.heads * qk + head * p.v + c - p.nope);
            store2(p.d_kv_in + row * p.heads * own + at, x, y);
        } else {
            at = 2 * (at - of_q - of_kv);
            float a = 0, b = 0;
            for (i64 head = 0; head < p.heads; head++) {
                load2(x, y, dkv + head * qk + p.nope + at);
                a += x, b += y;
            }
            turn(a, b, turns + at, -1);
            store2(p.d_k_in + row * p.rope + at, a, b);
        }
    });
}

struct LatentNorm {
    const R0* x; // [rows, cols + rest]
    const R1* w; // [cols]
    W0* y;       // [rows, cols]
    W1* rest;    // [rows, others], or null
    i64 rows, cols, others;
    f64 eps;
};

template <int N> DEVICE float inverse_of(const R0* x, i64 cols, float eps, float* scratch) {
    float squares = 0;
    for (i64 c = i64(threadIdx.x) * N; c < cols; c += THREADS * N) {
        float v[N];
        load(v, x + c);
        UNROLL for (int j = 0; j < N; j++) squares += v[j] * v[j];
    }
    return 1.0f / sqrtf(block_sum(squares, scratch) / float(cols) + eps);
}

// A block of threads a row.
KERNEL(latent_norm, LatentNorm, THREADS) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const R0* x = p.x + row * (p.cols + p.others);
        WIDE(p.cols | p.others, aligned(p.x, p.w, p.y, p.rest), {
            float inverse = inverse_of<N>(x, p.cols, float(p.eps), scratch);
            for (i64 c = i64(threadIdx.x) * N; c < p.cols + p.others; c += THREADS * N) {
                float v[N];
                load(v, x + c);
                if (c < p.cols) {
                    float w[N];
                    load(w, p.w + c);
                    UNROLL for (int j = 0; j < N; j++) v[j] *= inverse * w[j];
                    store(p.y + row * p.cols + c, v);
                } else {
                    store(p.rest + row * p.others + c - p.cols, v);
                }
            }
        });
    }
}

struct LatentNormBwd {
    const R0* x;
    const R1* w;
    const R3* dy;
    const R4* d_rest; // or null
    W0* dx;
    float* parts; // [gridDim.x, cols]
    i64 rows, cols, others;
    f64 eps;
};

// dx = r (dn - n mean(n dn)), n the normalised row, dn = w dy; a block writes its part of dw.
//
// The usual case, rows of up to 2,048 columns: a row is read once and kept in registers, as is the block's part of dw, and the
// next one is on its way meanwhile.
DEVICE void latent_rows_bwd(const LatentNormBwd& p, float* scratch) {
    constexpr int N = 8;
    i64 c = i64(threadIdx.x) * N, all = p.cols + p.others;
    float dw[N] = {}, w[N] = {};
    Eight<R0> next_x;
    Eight<R3> next_dy;
    auto fetch = [&](i64 row) {
        if (row >= p.rows || c >= p.cols) return;
        next_x = eight(p.x + row * all + c);
        next_dy = eight(p.dy + row * p.cols + c);
    };
    if (c < p.cols) load(w, p.w + c);
    fetch(blockIdx.x);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        float v[N] = {}, d[N] = {}, sums[2] = {};
        if (c < p.cols) {
            unpack(v, next_x);
            unpack(d, next_dy);
        }
        fetch(row + gridDim.x);
        UNROLL for (int j = 0; j < N; j++) {
            sums[0] += v[j] * v[j];
            sums[1] += v[j] * (w[j] * d[j]);
        }
        block_sums(sums, scratch);
        float inverse = 1.0f / sqrtf(sums[0] / float(p.cols) + float(p.eps));
        float along = sums[1] * inverse / float(p.cols);
        UNROLL for (int j = 0; j < N; j++) {
            float n = v[j] * inverse;
            dw[j] += d[j] * n;
            v[j] = inverse * (w[j] * d[j] - n * along);
        }
        if (c < p.cols) store(p.dx + row * all + c, v);
        for (i64 at = c; at < p.others; at += THREADS * N) {
            float rest[N];
            load(rest, p.d_rest + row * p.others + at);
            store(p.dx + row * all + p.cols + at, rest);
        }
    }
    if (c < p.cols) store(p.parts + blockIdx.x * p.cols + c, dw);
}

KERNEL_OF(latent_norm_bwd, LatentNormBwd, THREADS, 2) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    bool usual = p.cols % 8 == 0 && p.others % 8 == 0 && p.cols <= 8 * THREADS;
    if (usual && aligned(p.x, p.w, p.dy, p.d_rest, p.dx, p.parts)) return latent_rows_bwd(p, scratch);
    float* part = p.parts + blockIdx.x * p.cols;
    WIDE(p.cols | p.others, aligned(p.x, p.w, p.dy, p.d_rest, p.dx), {
        // The very same thread has these columns in every row.
        for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N)
            UNROLL for (int j = 0; j < N; j++) part[c + j] = 0;
        for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
            const R0* x = p.x + row * (p.cols + p.others);
            const R3* dy = p.dy + row * p.cols;
            W0* dx = p.dx + row * (p.cols + p.others);
            float inverse = inverse_of<N>(x, p.cols, float(p.eps), scratch);
            float along = 0;
            for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N) {
                float v[N];
                float w[N];
                float d[N];
                load(v, x + c);
                load(w, p.w + c);
                load(d, dy + c);
                UNROLL for (int j = 0; j < N; j++) along += v[j] * inverse * w[j] * d[j];
            }
            along = block_sum(along, scratch) / float(p.cols);
            for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N) {
                float v[N];
                float w[N];
                float d[N];
                load(v, x + c);
                load(w, p.w + c);
                load(d, dy + c);
                UNROLL for (int j = 0; j < N; j++) {
                    float n = v[j] * inverse;
                    part[c + j] += d[j] * n;
                    v[j] = inverse * (w[j] * d[j] - n * along);
                }
                store(dx + c, v);
            }
            for (i64 c = i64(threadIdx.x) * N; c < p.others; c += THREADS * N) {
                float v[N];
                load(v, p.d_rest + row * p.others + c);
                store(dx + p.cols + c, v);
            }
        }
    });
}
