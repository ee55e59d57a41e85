// Muon: momenta, matrices divided by their norms, and the update. The products between are cuBLASLt's.
#include "wide.cuh"

constexpr int THREADS = 256;

// A stretch of a rank's part of flat weights, of matrices or of what is none: three words of a table, a row of blocks for
// each stretch.
struct Stretch {
    i64 from, elems;
    // Where the second moments of what is no matrix begin; below zero for matrices.
    i64 second;
};

DEVICE Stretch stretch_of(const i64* table) {
    const i64* at = table + 3 * i64(blockIdx.y);
    return {at[0], at[1], at[2]};
}

// m = keep m + grad of matrices, u = grad + keep m; zeros where no matrix is.
struct Momentum {
    const R0* grad;
    W0* m;
    W1* u;
    const i64* stretches;
    f64 keep;
};

KERNEL(momentum, Momentum, THREADS) {
    Stretch s = stretch_of(p.stretches);
    float keep = float(p.keep);
    const R0* grad = p.grad + s.from;
    W0* m = p.m + s.from;
    W1* u = p.u + s.from;
    WIDE_BY(4, s.elems, aligned(grad, m, u), each<N>(s.elems, [&](i64 i) {
        float g[N] = {}, of_m[N];
        if (s.second < 0) {
            load(g, grad + i);
            load(of_m, m + i);
            UNROLL for (int j = 0; j < N; j++) {
                of_m[j] = keep * of_m[j] + g[j];
                g[j] += keep * of_m[j];
            }
            store(m + i, of_m);
        }
        store(u + i, g);
    }));
}

// Sums of squares of a matrix, a part for each block of a row of blocks: [matrices, blocks].
struct Squares {
    const R0* x;
    float* parts;
    i64 elems;
};

KERNEL(squares, Squares, THREADS) {
    SHARED(shared);
    float* scratch = reinterpret_cast<float*>(shared);
    const R0* x = p.x + i64(blockIdx.y) * p.elems;
    float sum = 0;
    WIDE(p.elems, aligned(x), each<N>(p.elems, [&](i64 i) {
        float of_x[N];
        load(of_x, x + i);
        UNROLL for (int j = 0; j < N; j++) sum += of_x[j] * of_x[j];
    }));
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) p.parts[i64(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
}

// y = x / (|x| + eps), the norm being the root of its parts. They are added in one order, so that every run has the same bits.
struct Divide {
    const R0* x;
    W0* y;
    const float* parts;
    i64 elems, count;
    f64 eps;
};

KERNEL(divide, Divide, THREADS) {
    SHARED(shared);
    float* scratch = reinterpret_cast<float*>(shared);
    float sum = 0;
    for (i64 i = threadIdx.x; i < p.count; i += blockDim.x) sum += p.parts[i64(blockIdx.y) * p.count + i];
    float by = 1.0f / (sqrtf(block_sum(sum, scratch)) + float(p.eps));
    const R0* x = p.x + i64(blockIdx.y) * p.elems;
    W0* y = p.y + i64(blockIdx.y) * p.elems;
    WIDE(p.elems, aligned(x, y), each<N>(p.elems, [&](i64 i) {
        float of_x[N];
        load(of_x, x + i);
        UNROLL for (int j = 0; j < N; j++) of_x[j] *= by;
        store(y + i, of_x);
    }));
}

// w = stays w - by[stretch] factor of matrices; what is none goes by AdamW, as in pointwise.cu.
struct Update {
    const R0* grad;
    const R1* factor;
    W0* w;
    W1* m;
    W2* v;    // of what is no matrix alone, one stretch behind the other
    W3* cast; // the new weight in another type; may be null
    const i64* stretches;
    const f64* by;
    f64 lr, beta1, beta2, eps, unbias, stays;
};

KERNEL(update, Update, THREADS) {
    Stretch s = stretch_of(p.stretches);
    float stays = float(p.stays);
    const R0* grad = p.grad + s.from;
    const R1* factor = p.factor + s.from;
    W0* w = p.w + s.from;
    W1* m = p.m + s.from;
    W3* cast = p.cast ? p.cast + s.from : p.cast;
    if (s.second < 0) {
        float by = float(p.by[blockIdx.y]);
        WIDE_BY(4, s.elems, aligned(factor, w, cast), each<N>(s.elems, [&](i64 i) {
            float o[N], of_w[N];
            load(o, factor + i);
            load(of_w, w + i);
            UNROLL for (int j = 0; j < N; j++) of_w[j] = stays * of_w[j] - by * o[j];
            store(w + i, of_w);
            if (cast) store(cast + i, of_w);
        }));
        return;
    }
    W2* v = p.v + s.second;
    float lr = float(p.lr), beta1 = float(p.beta1), beta2 = float(p.beta2), eps = float(p.eps), unbias = float(p.unbias);
    float take1 = float(1 - p.beta1), take2 = float(1 - p.beta2);
    WIDE_BY(4, s.elems, aligned(grad, w, m, v, cast), each<N>(s.elems, [&](i64 i) {
        float g[N], of_w[N], of_m[N], of_v[N];
        load(g, grad + i);
        load(of_w, w + i);
        load(of_m, m + i);
        load(of_v, v + i);
        UNROLL for (int j = 0; j < N; j++) {
            of_m[j] = beta1 * of_m[j] + take1 * g[j];
            of_v[j] = beta2 * of_v[j] + take2 * g[j] * g[j];
            of_w[j] = stays * of_w[j] - lr * of_m[j] / (sqrtf(of_v[j] * unbias) + eps);
        }
        store(w + i, of_w);
        store(m + i, of_m);
        store(v + i, of_v);
        if (cast) store(cast + i, of_w);
    }));
}
