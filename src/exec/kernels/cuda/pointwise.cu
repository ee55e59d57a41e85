// Kernels that take one element, or one pair, at a time. Grids are free: threads stride over the elements.
#include "wide.cuh"

constexpr int THREADS = 256;

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct SwiGlu {
    const R0* x; // [rows, gate cols | up cols]
    W0* y;       // [rows, cols]
    i64 rows, cols;
};

KERNEL(swiglu, SwiGlu, THREADS) {
    WIDE(p.cols, aligned(p.x, p.y), each<N>(p.rows * p.cols, [&](i64 i) {
        i64 row = i / p.cols, col = i % p.cols;
        float gate[N], up[N];
        load(gate, p.x + row * 2 * p.cols + col);
        load(up, p.x + row * 2 * p.cols + p.cols + col);
        UNROLL for (int j = 0; j < N; j++) up[j] *= gate[j] * sigmoid(gate[j]);
        store(p.y + i, up);
    }));
}

struct SwiGluBwd {
    const R0* x;  // [rows, gate | up]
    const R1* dy; // [rows, cols]
    W0* dx;       // [rows, d_gate | d_up]
    i64 rows, cols;
};

KERNEL(swiglu_bwd, SwiGluBwd, THREADS) {
    WIDE(p.cols, aligned(p.x, p.dy, p.dx), each<N>(p.rows * p.cols, [&](i64 i) {
        i64 at = i / p.cols * 2 * p.cols + i % p.cols;
        float gate[N], up[N], dy[N];
        load(gate, p.x + at);
        load(up, p.x + at + p.cols);
        load(dy, p.dy + i);
        UNROLL for (int j = 0; j < N; j++) {
            float g = gate[j], s = sigmoid(g);
            gate[j] = dy[j] * up[j] * s * (1 + g * (1 - s));
            up[j] = dy[j] * g * s;
        }
        store(p.dx + at, gate);
        store(p.dx + at + p.cols, up);
    }));
}

// gelu(x) = x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3), by tanh(u) = 2 sigmoid(2u) - 1.
struct Curve {
    float value, slope;
};

DEVICE Curve gelu_of(float x) {
    constexpr float C = 0.7978845608028654f, K = 0.044715f;
    float s = sigmoid(2 * C * (x + K * x * x * x)), t = 2 * s - 1;
    return {x * s, 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * C * (1 + 3 * K * x * x)};
}

struct Gelu {
    const R0* x;
    W0* y;
    i64 elems;
};

KERNEL(gelu, Gelu, THREADS) {
    WIDE(p.elems, aligned(p.x, p.y), each<N>(p.elems, [&](i64 i) {
        float x[N];
        load(x, p.x + i);
        UNROLL for (int j = 0; j < N; j++) x[j] = gelu_of(x[j]).value;
        store(p.y + i, x);
    }));
}

struct GeluBwd {
    const R0* x;
    const R1* dy;
    W0* dx;
    i64 elems;
};

KERNEL(gelu_bwd, GeluBwd, THREADS) {
    WIDE(p.elems, aligned(p.x, p.dy, p.dx), each<N>(p.elems, [&](i64 i) {
        float x[N], dy[N];
        load(x, p.x + i);
        load(dy, p.dy + i);
        UNROLL for (int j = 0; j < N; j++) x[j] = dy[j] * gelu_of(x[j]).slope;
        store(p.dx + i, x);
    }));
}

struct Relu2 {
    const R0* x;
    W0* y;
    i64 elems;
};

// The square of what is above zero.
KERNEL(relu2, Relu2, THREADS) {
    WIDE(p.elems, aligned(p.x, p.y), each<N>(p.elems, [&](i64 i) {
        float x[N];
        load(x, p.x + i);
        UNROLL for (int j = 0; j < N; j++) x[j] = fmaxf(x[j], 0.0f) * fmaxf(x[j], 0.0f);
        store(p.y + i, x);
    }));
}

struct Relu2Bwd {
    const R0* x;
    const R1* dy;
    W0* dx;
    i64 elems;
};

KERNEL(relu2_bwd, Relu2Bwd, THREADS) {
    WIDE(p.elems, aligned(p.x, p.dy, p.dx), each<N>(p.elems, [&](i64 i) {
        float x[N], dy[N];
        load(x, p.x + i);
        load(dy, p.dy + i);
        UNROLL for (int j = 0; j < N; j++) x[j] = 2 * dy[j] * fmaxf(x[j], 0.0f);
        store(p.dx + i, x);
    }));
}

struct Cast {
    const R0* x;
    W0* y;
    i64 elems;
};

KERNEL(cast, Cast, THREADS) {
    WIDE(p.elems, aligned(p.x, p.y), each<N>(p.elems, [&](i64 i) {
        float x[N];
        load(x, p.x + i);
        store(p.y + i, x);
    }));
}

// Rows `rows[0 .. count)` alone.
struct CastRows {
    const R0* x;
    W0* y;
    const int* rows;
    i64 count, cols;
};

KERNEL(cast_rows, CastRows, THREADS) {
    WIDE(p.cols, aligned(p.x, p.y), each<N>(p.count * p.cols, [&](i64 i) {
        i64 at = i64(p.rows[i / p.cols]) * p.cols + i % p.cols;
        float x[N];
        load(x, p.x + at);
        store(p.y + at, x);
    }));
}

struct Fill {
    W0* x;
    i64 elems;
};

KERNEL(fill, Fill, THREADS) {
    WIDE_BY(16 / sizeof(W0), p.elems, aligned(p.x), each<N>(p.elems, [&](i64 i) {
        float zeros[N] = {};
        store(p.x + i, zeros);
    }));
}

// sum = a + b in rows `rows[0 .. count)` of `cols`; with no list in all of the `count` rows. `sum` may be `a` or `b`.
struct Add {
    const R0* a;
    const R1* b;
    W0* sum;
    const int* rows;
    i64 count, cols;
};

KERNEL(add, Add, THREADS) {
    WIDE(p.cols, aligned(p.a, p.b, p.sum), each<N>(p.count * p.cols, [&](i64 i) {
        i64 row = i / p.cols, at = (p.rows ? i64(p.rows[row]) : row) * p.cols + i % p.cols;
        float a[N], b[N];
        load(a, p.a + at);
        load(b, p.b + at);
        UNROLL for (int j = 0; j < N; j++) a[j] += b[j];
        store(p.sum + at, a);
    }));
}

// Rows of a list become zeros: what a pass that adds atomically starts from.
struct ClearRows {
    W0* x;
    const int* rows;
    i64 count, cols;
};

KERNEL(clear_rows, ClearRows, THREADS) {
    WIDE_BY(16 / sizeof(W0), p.cols, aligned(p.x), each<N>(p.count * p.cols, [&](i64 i) {
        float zeros[N] = {};
        store(p.x + i64(p.rows[i / p.cols]) * p.cols + i % p.cols, zeros);
    }));
}

// y = x + branch + bias0 + bias1; with `drop` the branch and the biases pass through dropout first.
struct Residual {
    const R0* x;
    const R1* branch;
    const R2* bias0; // [cols] or null
    const R3* bias1;
    W0* y;
    W1* stays;            // 1 where an element stayed; null without dropout
    const i64* positions; // [rows]
    i64 rows, cols, salt;
    f64 probability;
};

// The bits of splitmix64 of where an element stands, below a bound (Steele et al., 2014).
DEVICE bool keeps(f64 probability, u64 salt, u64 position, u64 column) {
    u64 z = (position << 32 | column) + (salt + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return f64(z >> 11) / 9007199254740992.0 >= probability;
}

KERNEL(residual, Residual, THREADS) {
    float scale = float(1.0 / (1.0 - p.probability));
    WIDE(p.cols, aligned(p.x, p.branch, p.bias0, p.bias1, p.y, p.stays), each<N>(p.rows * p.cols, [&](i64 i) {
        i64 row = i / p.cols, col = i % p.cols;
        float x[N], y[N], bias[N], stays[N];
        load(y, p.branch + i);
        if (p.bias0) {
            load(bias, p.bias0 + col);
            UNROLL for (int j = 0; j < N; j++) y[j] += bias[j];
        }
        if (p.bias1) {
            load(bias, p.bias1 + col);
            UNROLL for (int j = 0; j < N; j++) y[j] += bias[j];
        }
        if (p.stays) {
            UNROLL for (int j = 0; j < N; j++) {
                stays[j] = keeps(p.probability, u64(p.salt), u64(p.positions[row]), u64(col + j)) ? 1.0f : 0.0f;
                y[j] *= stays[j] * scale;
            }
            store(p.stays + i, stays);
        }
        load(x, p.x + i);
        UNROLL for (int j = 0; j < N; j++) x[j] += y[j];
        store(p.y + i, x);
    }));
}

struct DropoutBwd {
    const R0* dy;
    const R1* stays;
    W0* dx;
    i64 elems;
    f64 probability;
};

KERNEL(dropout_bwd, DropoutBwd, THREADS) {
    float scale = float(1.0 / (1.0 - p.probability));
    WIDE(p.elems, aligned(p.dy, p.stays, p.dx), each<N>(p.elems, [&](i64 i) {
        float dy[N], stays[N];
        load(dy, p.dy + i);
        load(stays, p.stays + i);
        UNROLL for (int j = 0; j < N; j++) dy[j] *= stays[j] * scale;
        store(p.dx + i, dy);
    }));
}

// AdamW (Loshchilov and Hutter, arXiv:1711.05101), algorithm 2: lr and unbias hold the corrections of this step,
// stays what weight decay leaves of a weight.
struct Adam {
    const R0* grad;
    W0* w;
    W1* m;
    W2* v;
    W3* cast; // the new weight in another type; may be null
    i64 elems;
    f64 lr, beta1, beta2, eps, unbias, stays;
};

KERNEL(adam, Adam, THREADS) {
    float lr = float(p.lr), beta1 = float(p.beta1), beta2 = float(p.beta2), eps = float(p.eps), unbias = float(p.unbias);
    float take1 = float(1 - p.beta1), take2 = float(1 - p.beta2), stays = float(p.stays);
    WIDE_BY(4, p.elems, aligned(p.grad, p.w, p.m, p.v, p.cast), each<N>(p.elems, [&](i64 i) {
        float g[N], w[N], m[N], v[N];
        load(g, p.grad + i);
        load(w, p.w + i);
        load(m, p.m + i);
        load(v, p.v + i);
        UNROLL for (int j = 0; j < N; j++) {
            m[j] = beta1 * m[j] + take1 * g[j];
            v[j] = beta2 * v[j] + take2 * g[j] * g[j];
            w[j] = stays * w[j] - lr * m[j] / (sqrtf(v[j] * unbias) + eps);
        }
        store(p.w + i, w);
        store(p.m + i, m);
        store(p.v + i, v);
        if (p.cast) store(p.cast + i, w);
    }));
}

// The same in two kernels: the moments and what weights are divided by; the weights.
struct AdamMoments {
    const R0* grad;
    W0* m;
    W1* v;
    W2* d;
    i64 elems;
    f64 beta1, beta2, eps, unbias;
};

KERNEL(adam_moments, AdamMoments, THREADS) {
    float beta1 = float(p.beta1), beta2 = float(p.beta2), eps = float(p.eps), unbias = float(p.unbias);
    float take1 = float(1 - p.beta1), take2 = float(1 - p.beta2);
    WIDE_BY(4, p.elems, aligned(p.grad, p.m, p.v, p.d), each<N>(p.elems, [&](i64 i) {
        float g[N], m[N], v[N], d[N];
        load(g, p.grad + i);
        load(m, p.m + i);
        load(v, p.v + i);
        UNROLL for (int j = 0; j < N; j++) {
            m[j] = beta1 * m[j] + take1 * g[j];
            v[j] = beta2 * v[j] + take2 * g[j] * g[j];
            d[j] = sqrtf(v[j] * unbias) + eps;
        }
        store(p.m + i, m);
        store(p.v + i, v);
        store(p.d + i, d);
    }));
}

struct AdamMove {
    W0* w;
    const R1* m;
    const R2* d;
    W1* cast; // the new weight in another type; may be null
    i64 elems;
    f64 lr, stays;
};

KERNEL(adam_move, AdamMove, THREADS) {
    float lr = float(p.lr), stays = float(p.stays);
    WIDE_BY(4, p.elems, aligned(p.w, p.m, p.d, p.cast), each<N>(p.elems, [&](i64 i) {
        float w[N], m[N], d[N];
        load(w, p.w + i);
        load(m, p.m + i);
        load(d, p.d + i);
        UNROLL for (int j = 0; j < N; j++) w[j] = stays * w[j] - lr * m[j] / d[j];
        store(p.w + i, w);
        if (p.cast) store(p.cast + i, w);
    }));
}
