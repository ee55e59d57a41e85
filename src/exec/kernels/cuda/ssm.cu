// What a Mamba-2 mixer does beside products (arXiv:2405.21060): the causal convolution, dt and its sums, states handed
// from chunk to chunk, the ends of the scan's backward pass, and a norm of groups times a gate.
//
// Shapes as in kernels/ssm.rs: proj [rows, (z | x | B | C | dt: heads)], xbc its columns x, B and C; dt, sums and what is
// gathered for each head [rows, heads] in floats; states [batch, chunks, heads, state * head_dim] in floats. A sequence
// has `seq` rows, the last of its chunks may be short.
#include "wide.cuh"

constexpr int THREADS = 256;

// Tokens that the convolution sees.
#ifndef TAPS
#define TAPS 4
#endif

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// x sigmoid(x), and its slope.
struct Silu {
    float value, slope;
};

DEVICE Silu silu(float x) {
    float s = sigmoid(x);
    return {x * s, s * (1.0f + x * (1.0f - s))};
}

// --- the convolution -------------------------------------------------------------------------------------------

struct Conv {
    const R0* proj;
    const R1* w; // taps [cols, TAPS], biases [cols]
    W0* xbc;
    i64 rows, seq, cols, stride, first; // of proj: elements of a row, and where x begins
};

KERNEL(causal_conv, Conv, THREADS) {
    WIDE(p.cols | p.stride | p.first, aligned(p.proj, p.w, p.xbc), each<N>(p.rows * p.cols, [&](i64 i) {
        i64 row = i / p.cols, c = i % p.cols, t = row % p.seq;
        float sum[N];
        load(sum, p.w + p.cols * TAPS + c);
        UNROLL for (int back = 0; back < TAPS; back++) {
            if (back > t) break;
            float x[N];
            load(x, p.proj + (row - back) * p.stride + p.first + c);
            UNROLL for (int j = 0; j < N; j++) sum[j] += to_float(p.w[(c + j) * TAPS + TAPS - 1 - back]) * x[j];
        }
        UNROLL for (int j = 0; j < N; j++) sum[j] = silu(sum[j]).value;
        store(p.xbc + i, sum);
    }));
}

struct ConvBwd {
    const R0* proj;
    const R1* d_xbc;
    const R2* w;
    W0* d_proj;
    float* parts; // [batch * spans, cols * (TAPS + 1)], like w
    i64 batch, seq, cols, stride, first, span;
};

// A thread walks down a column over `span` rows, and on until the last of them has heard of all that it went into.
KERNEL(causal_conv_bwd, ConvBwd, THREADS) {
    i64 spans = (p.seq + p.span - 1) / p.span;
    each<1>(p.batch * spans * p.cols, [&](i64 i) {
        i64 c = i % p.cols, from = i / p.cols % spans * p.span, row0 = i / p.cols / spans * p.seq;
        i64 to = from + p.span < p.seq ? from + p.span : p.seq;
        // Of w, x and the gradient of a sum, number k is TAPS - 1 - k tokens back.
        float w[TAPS], x[TAPS], d[TAPS] = {}, dw[TAPS] = {}, bias = to_float(p.w[p.cols * TAPS + c]), d_bias = 0;
        auto proj = [&](i64 t) { return to_float(p.proj[(row0 + t) * p.stride + p.first + c]); };
        UNROLL for (int k = 0; k < TAPS; k++) {
            w[k] = to_float(p.w[c * TAPS + k]);
            i64 t = from - TAPS + k;
            x[k] = t >= 0 ? proj(t) : 0.0f;
        }
        for (i64 t = from; t < to + TAPS - 1; t++) {
            float sum = bias;
            UNROLL for (int k = 0; k < TAPS; k++) {
                x[k] = k + 1 < TAPS ? x[k + 1 < TAPS ? k + 1 : k] : t < p.seq ? proj(t) : 0.0f;
                d[k] = d[k + 1 < TAPS ? k + 1 : k];
                sum += w[k] * x[k];
            }
            float of = t < p.seq ? to_float(p.d_xbc[(row0 + t) * p.cols + c]) * silu(sum).slope : 0.0f, back = 0;
            d[TAPS - 1] = of;
            if (t < to) {
                d_bias += of;
                UNROLL for (int k = 0; k < TAPS; k++) dw[k] += of * x[k];
            }
            UNROLL for (int k = 0; k < TAPS; k++) back += d[k] * w[TAPS - 1 - k];
            i64 done = t - (TAPS - 1);
            if (done >= from) p.d_proj[(row0 + done) * p.stride + p.first + c] = from_float<W0>(back);
        }
        float* part = p.parts + i / p.cols * p.cols * (TAPS + 1);
        UNROLL for (int k = 0; k < TAPS; k++) part[c * TAPS + k] = dw[k];
        part[p.cols * TAPS + c] = d_bias;
    });
}

// --- dt, and states from chunk to chunk ------------------------------------------------------------------------

struct Sums {
    const R0* proj;
    const R1* params; // biases of dt, A, D
    float* dt;
    float* sums; // of a dt from a chunk's first token on
    i64 batch, seq, heads, stride, chunk;
};

// Before the softplus; ln(1 + e^x) without e^x where x is large.
template <class T> DEVICE float raw_dt(const T* proj, i64 row, i64 stride, i64 heads, i64 head, float bias) {
    return to_float(proj[(row + 1) * stride - heads + head]) + bias;
}

KERNEL(ssm_sums, Sums, THREADS) {
    i64 chunks = (p.seq + p.chunk - 1) / p.chunk;
    each<1>(p.batch * chunks * p.heads, [&](i64 i) {
        i64 head = i % p.heads, from = i / p.heads % chunks * p.chunk, row0 = i / p.heads / chunks * p.seq;
        i64 to = from + p.chunk < p.seq ? from + p.chunk : p.seq;
        float bias = to_float(p.params[head]), a = -expf(to_float(p.params[p.heads + head])), sum = 0;
        for (i64 row = row0 + from; row < row0 + to; row++) {
            float raw = raw_dt(p.proj, row, p.stride, p.heads, head, bias);
            float dt = fmaxf(raw, 0.0f) + log1pf(expf(-fabsf(raw)));
            sum += a * dt;
            p.dt[row * p.heads + head] = dt;
            p.sums[row * p.heads + head] = sum;
        }
    });
}

struct Pass {
    float* states;
    const float* sums;
    i64 batch, seq, heads, chunk, size, back;
};

// What each chunk adds becomes what stood before it: the state, or with `back` the gradient of the state behind it.
KERNEL(ssm_pass, Pass, THREADS) {
    i64 chunks = (p.seq + p.chunk - 1) / p.chunk;
    each<1>(p.batch * p.heads * p.size, [&](i64 i) {
        i64 head = i / p.size % p.heads, batch = i / p.size / p.heads;
        float state = 0;
        for (i64 k = 0; k < chunks; k++) {
            i64 c = p.back ? chunks - 1 - k : k, end = (c + 1) * p.chunk < p.seq ? (c + 1) * p.chunk : p.seq;
            float* at = p.states + ((batch * chunks + c) * p.heads + head) * p.size + i % p.size;
            float own = *at, decay = expf(p.sums[(batch * p.seq + end - 1) * p.heads + head]);
            *at = state;
            state = state * decay + own;
        }
    });
}

struct Ends {
    const R0* proj;
    const R1* params;
    const float* dt;
    const float* pairs; // of sums, by pairs of a chunk's tokens
    const float* read;  // of sums, by what is read from the state before
    const float* kept;  // of sums, by what is left to the state behind
    const float* dots;  // of dt beside its sums
    const float* skips; // of D
    const float* sums;
    const float* before; // states
    const float* behind; // gradients
    W0* d_proj;
    float* parts; // [batch * chunks, 3 * heads], like params
    i64 seq, heads, stride, chunk, size;
};

// Gradients of dt and of the heads' parameters. Grid: (chunks, heads, batch).
KERNEL(ssm_ends, Ends, THREADS) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    float* d_sums = scratch + 32;
    i64 chunks = gridDim.x, head = blockIdx.y, of_chunk = blockIdx.z * chunks + blockIdx.x;
    i64 from = blockIdx.x * p.chunk, len = p.seq - from < p.chunk ? p.seq - from : p.chunk, row0 = blockIdx.z * p.seq + from;
    auto at = [&](i64 t) { return (row0 + t) * p.heads + head; };
    float a = -expf(to_float(p.params[p.heads + head])), bias = to_float(p.params[head]);
    const float* before = p.before + (of_chunk * p.heads + head) * p.size;
    const float* behind = p.behind + (of_chunk * p.heads + head) * p.size;
    float last = 0, kept = 0, skip = 0;
    for (i64 i = threadIdx.x; i < p.size; i += THREADS) last += before[i] * behind[i];
    for (i64 t = threadIdx.x; t < len; t += THREADS) {
        kept += p.kept[at(t)];
        skip += p.skips[at(t)];
        d_sums[t] = p.pairs[at(t)] + p.read[at(t)] - p.kept[at(t)];
    }
    last = block_sum(last, scratch) * expf(p.sums[at(len - 1)]) + block_sum(kept, scratch);
    skip = block_sum(skip, scratch);
    if (threadIdx.x == 0) {
        // A dt is in every sum from its own token on.
        for (i64 t = len - 1; t >= 0; t--) d_sums[t] = last += d_sums[t];
    }
    __syncthreads();
    float of_bias = 0, of_a = 0;
    for (i64 t = threadIdx.x; t < len; t += THREADS) {
        float d_dt = p.dots[at(t)] + a * d_sums[t];
        float d_raw = d_dt * sigmoid(raw_dt(p.proj, row0 + t, p.stride, p.heads, head, bias));
        p.d_proj[(row0 + t + 1) * p.stride - p.heads + head] = from_float<W0>(d_raw);
        of_bias += d_raw;
        of_a += p.dt[at(t)] * d_sums[t];
    }
    of_bias = block_sum(of_bias, scratch);
    of_a = block_sum(of_a, scratch);
    if (threadIdx.x == 0) {
        float* part = p.parts + of_chunk * 3 * p.heads + head;
        part[0] = of_bias;
        // a = -exp(A): its slope is itself.
        part[p.heads] = of_a * a;
        part[2 * p.heads] = skip;
    }
}

// --- the norm --------------------------------------------------------------------------------------------------

struct GatedNorm {
    const R0* y;
    const R1* proj; // its columns z; null: there is no gate
    const R2* w;    // [groups * width]
    W0* out;
    i64 rows, groups, width, stride;
    f64 eps;
};

// N neighbours times their gates, if they have any.
template <int N, class Y, class Z> DEVICE void gated(float (&v)[N], const Y* y, const Z* z) {
    float gate[N];
    load(v, y);
    if (!z) return;
    load(gate, z);
    UNROLL for (int j = 0; j < N; j++) v[j] *= silu(gate[j]).value;
}

template <int N, class Y, class Z> DEVICE float inverse_of(const Y* y, const Z* z, i64 width, float eps, float* scratch) {
    float squares = 0;
    for (i64 c = i64(threadIdx.x) * N; c < width; c += THREADS * N) {
        float v[N];
        gated(v, y + c, z ? z + c : z);
        UNROLL for (int j = 0; j < N; j++) squares += v[j] * v[j];
    }
    return 1.0f / sqrtf(block_sum(squares, scratch) / float(width) + eps);
}

// A block of threads a group of a row.
KERNEL(gated_norm, GatedNorm, THREADS) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    for (i64 i = blockIdx.x; i < p.rows * p.groups; i += gridDim.x) {
        i64 row = i / p.groups, first = i % p.groups * p.width;
        const R0* y = p.y + row * p.groups * p.width + first;
        const R1* z = p.proj ? p.proj + row * p.stride + first : nullptr;
        WIDE(p.width | p.stride, aligned(p.y, p.proj, p.w, p.out), {
            float inverse = inverse_of<N>(y, z, p.width, float(p.eps), scratch);
            for (i64 c = i64(threadIdx.x) * N; c < p.width; c += THREADS * N) {
                float v[N];
                float w[N];
                gated(v, y + c, z ? z + c : z);
                load(w, p.w + first + c);
                UNROLL for (int j = 0; j < N; j++) v[j] *= inverse * w[j];
                store(p.out + row * p.groups * p.width + first + c, v);
            }
        });
    }
}

struct GatedNormBwd {
    const R0* y;
    const R1* proj;
    const R2* w;
    const R3* d_out;
    W0* dy;
    W1* d_proj;
    float* parts; // [gridDim.x, groups * width]
    i64 rows, groups, width, stride;
    f64 eps;
};

// d = r (dn - n mean(n dn)) of what the gate made, n the normalised group, dn = w d_out; a block writes its part of dw.
KERNEL(gated_norm_bwd, GatedNormBwd, THREADS) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    i64 inner = p.groups * p.width;
    float* part = p.parts + blockIdx.x * inner;
    WIDE(p.width | p.stride, aligned(p.y, p.proj, p.w, p.d_out, p.dy, p.d_proj), {
        // The very same thread has these columns in every row.
        for (i64 group = 0; group < p.groups; group++)
            for (i64 c = i64(threadIdx.x) * N; c < p.width; c += THREADS * N)
                UNROLL for (int j = 0; j < N; j++) part[group * p.width + c + j] = 0;
        for (i64 i = 0; i64(blockIdx.x) + i / p.groups * gridDim.x < p.rows; i++) {
            i64 row = blockIdx.x + i / p.groups * gridDim.x, first = i % p.groups * p.width, at = row * inner + first;
            const R1* z = p.proj ? p.proj + row * p.stride + first : nullptr;
            float inverse = inverse_of<N>(p.y + at, z, p.width, float(p.eps), scratch), along = 0;
            for (i64 c = i64(threadIdx.x) * N; c < p.width; c += THREADS * N) {
                float v[N];
                float w[N];
                float d[N];
                gated(v, p.y + at + c, z ? z + c : z);
                load(w, p.w + first + c);
                load(d, p.d_out + at + c);
                UNROLL for (int j = 0; j < N; j++) along += v[j] * inverse * w[j] * d[j];
            }
            along = block_sum(along, scratch) / float(p.width);
            for (i64 c = i64(threadIdx.x) * N; c < p.width; c += THREADS * N) {
                float y[N];
                float gate[N];
                float w[N];
                float d[N];
                load(y, p.y + at + c);
                if (z) load(gate, z + c);
                load(w, p.w + first + c);
                load(d, p.d_out + at + c);
                UNROLL for (int j = 0; j < N; j++) {
                    Silu g = z ? silu(gate[j]) : Silu{1.0f, 0.0f};
                    float n = y[j] * g.value * inverse;
                    part[first + c + j] += d[j] * n;
                    float of = inverse * (w[j] * d[j] - n * along);
                    gate[j] = of * y[j] * g.slope;
                    y[j] = of * g.value;
                }
                store(p.dy + at + c, y);
                if (z) store(p.d_proj + row * p.stride + first + c, gate);
            }
        }
    });
}

// --- a gate alone ----------------------------------------------------------------------------------------------

struct Gate {
    const R0* y;
    const R1* proj; // its columns z
    W0* out;
    i64 rows, cols, stride;
};

KERNEL(gate, Gate, THREADS) {
    WIDE(p.cols | p.stride, aligned(p.y, p.proj, p.out), each<N>(p.rows * p.cols, [&](i64 i) {
        float v[N];
        gated(v, p.y + i, p.proj + i / p.cols * p.stride + i % p.cols);
        store(p.out + i, v);
    }));
}

struct GateBwd {
    const R0* y;
    const R1* proj;
    const R2* d_out;
    W0* dy;
    W1* d_proj; // its columns z
    i64 rows, cols, stride;
};

KERNEL(gate_bwd, GateBwd, THREADS) {
    WIDE(p.cols | p.stride, aligned(p.y, p.proj, p.d_out, p.dy, p.d_proj), each<N>(p.rows * p.cols, [&](i64 i) {
        i64 at = i / p.cols * p.stride + i % p.cols;
        float y[N], z[N], d[N];
        load(y, p.y + i);
        load(z, p.proj + at);
        load(d, p.d_out + i);
        UNROLL for (int j = 0; j < N; j++) {
            Silu g = silu(z[j]);
            z[j] = d[j] * y[j] * g.slope;
            y[j] = d[j] * g.value;
        }
        store(p.dy + i, y);
        store(p.d_proj + at, z);
    }));
}
