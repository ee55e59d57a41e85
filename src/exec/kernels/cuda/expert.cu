// The kernels of a mixture-of-experts layer: gates, rows moved and summed, FP8 codes, the weighted SwiGLU. Which rows go
// where the host lists; grids are free.
#include "wide.cuh"

constexpr int THREADS = 256, MOST_OPERANDS = 16, BLOCK = 128;

DEVICE void load(float (&to)[1], const u8* x) { to[0] = float(x[0]); }
DEVICE void load(float (&to)[8], const u8* x) {
    UNROLL for (int i = 0; i < 8; i++) to[i] = float(x[i]);
}
DEVICE void store(u8* to, const float (&x)[1]) { to[0] = u8(x[0]); }
DEVICE void store(u8* to, const float (&x)[8]) {
    UNROLL for (int i = 0; i < 8; i++) to[i] = u8(x[i]);
}

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Calls `f` with every number below `n`, a warp to each.
template <class F> DEVICE void warps(i64 n, F f) {
    i64 step = i64(gridDim.x) * (blockDim.x / 32);
    for (i64 i = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; i < n; i += step) f(i, int(threadIdx.x % 32));
}

struct Term {
    i64 operand, from; // elements
};

// Runs of `len` elements at `places`, each the sum of terms `first[i] .. first[i + 1]`; zeros where there is none.
struct SumRows {
    const R0* operands[MOST_OPERANDS];
    W0* to;
    const i64* first;
    const Term* terms;
    const i64* places;
    i64 count, len;
};

KERNEL(sum_rows, SumRows, THREADS) {
    bool fits = aligned(p.to);
    UNROLL for (int i = 0; i < MOST_OPERANDS; i++) fits = fits && aligned(p.operands[i]);
    WIDE(p.len, fits, each<N>(p.count * p.len, [&](i64 i) {
        i64 run = i / p.len, at = i % p.len;
        float sum[N] = {};
        for (i64 t = p.first[run]; t < p.first[run + 1]; t++) {
            float x[N];
            load(x, p.operands[p.terms[t].operand] + p.terms[t].from + at);
            UNROLL for (int j = 0; j < N; j++) sum[j] += x[j];
        }
        store(p.to + p.places[run] + at, sum);
    }));
}

// E4M3 (Micikevicius et al., arXiv:2209.05433): four bits of exponent, three of mantissa, 448 the largest.
DEVICE float of_code(u8 code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float size = exponent ? __uint_as_float(u32(exponent + 120) << 23 | u32(mantissa) << 20) : float(mantissa) / 512.0f;
    return code & 128 ? -size : size;
}

// To the nearest, ties to an even mantissa; what is too large becomes the largest.
DEVICE u8 to_code(float x) {
    u8 sign = __float_as_uint(x) >> 31 ? 128 : 0;
    u32 bits = __float_as_uint(x) & 0x7fffffff;
    float size = __uint_as_float(bits);
    // Below the smallest normal number, 2^-6, codes are multiples of 2^-9, as the floats from 2^14 on are.
    if (size < 0.015625f) return sign | u8((size + 16384.0f - 16384.0f) * 512.0f);
    u32 rounded = bits + 0x7ffff + (bits >> 20 & 1);
    u32 code = (rounded >> 20) - (120 << 3);
    return sign | u8(code < 126 ? code : 126);
}

// Rows of codes as numbers, summed as `sum_rows` does.
struct SumScaledRows {
    const u8* codes;     // [.., cols]
    const float* scales; // [.., ceil(cols / 128)]
    W0* to;
    const i64* first;
    const i64* terms; // rows
    i64 count, cols;
};

KERNEL(sum_scaled_rows, SumScaledRows, THREADS) {
    i64 width = (p.cols + BLOCK - 1) / BLOCK;
    each<1>(p.count * p.cols, [&](i64 i) {
        i64 row = i / p.cols, col = i % p.cols;
        float sum[1] = {0};
        for (i64 t = p.first[row]; t < p.first[row + 1]; t++) {
            i64 from = p.terms[t];
            sum[0] += of_code(p.codes[from * p.cols + col]) * p.scales[from * width + col / BLOCK];
        }
        store(p.to + i, sum);
    });
}

// Rows to codes: every 128 elements divided by a scale that makes the largest of them 448.
struct Quantise {
    const R0* x; // [rows, cols]
    u8* codes;
    float* scales; // [rows, ceil(cols / 128)]
    i64 rows, cols;
};

KERNEL(quantise, Quantise, THREADS) {
    i64 width = (p.cols + BLOCK - 1) / BLOCK;
    warps(p.rows * width, [&](i64 i, int lane) {
        i64 row = i / width, from = i % width * BLOCK, at = row * p.cols + from;
        int left = int(p.cols - from < BLOCK ? p.cols - from : BLOCK);
        float x[4], top = 0;
        UNROLL for (int j = 0; j < 4; j++) {
            x[j] = lane + 32 * j < left ? to_float(p.x[at + lane + 32 * j]) : 0.0f;
            top = fmaxf(top, fabsf(x[j]));
        }
        float scale = warp_max(top) / 448.0f;
        if (lane == 0) p.scales[i] = scale;
        UNROLL for (int j = 0; j < 4; j++)
            if (lane + 32 * j < left) p.codes[at + lane + 32 * j] = to_code(scale > 0 ? x[j] / scale : 0.0f);
    });
}

// An operand of a product to codes: rows of k elements, beginning `row` apart and `step` between neighbours. Codes run
// along k, and scales along the rows: [k / 128, rows], as cuBLASLt wants them.
struct QuantiseOperand {
    const R0* x;
    u8* codes; // [rows, k]
    float* scales;
    i64 rows, k, row, step;
};

KERNEL(quantise_operand, QuantiseOperand, THREADS) {
    i64 width = (p.k + BLOCK - 1) / BLOCK;
    // Neighbouring warps have neighbouring rows: those of a transposed operand lie side by side.
    warps(p.rows * width, [&](i64 i, int lane) {
        i64 row = i % p.rows, block = i / p.rows, from = block * BLOCK;
        int left = int(p.k - from < BLOCK ? p.k - from : BLOCK);
        float x[4], top = 0;
        UNROLL for (int j = 0; j < 4; j++) {
            x[j] = lane + 32 * j < left ? to_float(p.x[row * p.row + (from + lane + 32 * j) * p.step]) : 0.0f;
            top = fmaxf(top, fabsf(x[j]));
        }
        float scale = warp_max(top) / 448.0f;
        if (lane == 0) p.scales[block * p.rows + row] = scale;
        UNROLL for (int j = 0; j < 4; j++)
            if (lane + 32 * j < left) p.codes[row * p.k + from + lane + 32 * j] = to_code(scale > 0 ? x[j] / scale : 0.0f);
    });
}

// What the choices of the route weigh: softmax or sigmoid of the logits, maybe divided by the sum of the chosen. Rows
// beyond the tokens are zeros.
struct Router {
    const R0* logits; // [tokens, experts]
    W0* gates;        // [tokens, topk]
    const u32* choices;
    i64 rows, tokens, experts, topk, sigmoid, normalise;
    f64 scale;
};

// The greatest logit of a row and the sum of the exponentials under it; unused where scores are sigmoids.
struct Soft {
    float top, sum;
};

template <class T> DEVICE Soft soft_of(const T* logits, i64 experts, bool sigmoid, int lane) {
    if (sigmoid) return {0, 1};
    float top = -INFINITY_F, sum = 0;
    for (i64 e = lane; e < experts; e += 32) top = fmaxf(top, to_float(logits[e]));
    top = warp_max(top);
    for (i64 e = lane; e < experts; e += 32) sum += expf(to_float(logits[e]) - top);
    return {top, warp_sum(sum)};
}

DEVICE float score(float logit, Soft soft, bool is_sigmoid) {
    return is_sigmoid ? sigmoid(logit) : expf(logit - soft.top) / soft.sum;
}

KERNEL(router, Router, THREADS) {
    warps(p.rows, [&](i64 token, int lane) {
        if (token >= p.tokens) {
            for (i64 c = lane; c < p.topk; c += 32) p.gates[token * p.topk + c] = from_float<W0>(0.0f);
            return;
        }
        const R0* logits = p.logits + token * p.experts;
        Soft soft = soft_of(logits, p.experts, p.sigmoid, lane);
        auto chosen = [&](i64 c) {
            u32 expert = p.choices[token * p.topk + c];
            return expert < p.experts ? score(to_float(logits[expert]), soft, p.sigmoid) : 0.0f;
        };
        float total = 0;
        for (i64 c = lane; c < p.topk; c += 32) total += chosen(c);
        total = warp_sum(total);
        float by = float(p.scale) / (p.normalise ? total : 1.0f);
        // A token that lost all its choices has nothing to divide by.
        for (i64 c = lane; c < p.topk; c += 32) {
            float x = chosen(c);
            p.gates[token * p.topk + c] = from_float<W0>(x > 0 ? x * by : 0.0f);
        }
    });
}

struct RouterBwd {
    const R0* logits;
    const R1* d_gates;
    W0* d_logits;
    const u32* choices;
    i64 rows, tokens, experts, topk, sigmoid, normalise;
    f64 scale;
};

KERNEL(router_bwd, RouterBwd, THREADS) {
    warps(p.rows, [&](i64 token, int lane) {
        if (token >= p.tokens) {
            for (i64 e = lane; e < p.experts; e += 32) p.d_logits[token * p.experts + e] = from_float<W0>(0.0f);
            return;
        }
        const R0* logits = p.logits + token * p.experts;
        const u32* choices = p.choices + token * p.topk;
        Soft soft = soft_of(logits, p.experts, p.sigmoid, lane);
        float total = 0, mean = 0;
        for (i64 c = lane; c < p.topk; c += 32)
            if (choices[c] < p.experts) {
                float s = score(to_float(logits[choices[c]]), soft, p.sigmoid);
                total += s;
                mean += s * to_float(p.d_gates[token * p.topk + c]);
            }
        total = warp_sum(total);
        mean = warp_sum(mean) / total;
        // By score: what its gate's gradient is to it; experts that were not chosen have none.
        auto d_score = [&](i64 c) {
            float d = to_float(p.d_gates[token * p.topk + c]);
            return float(p.scale) * (p.normalise ? (d - mean) / total : d);
        };
        float pull = 0;
        for (i64 c = lane; c < p.topk; c += 32)
            if (choices[c] < p.experts) pull += score(to_float(logits[choices[c]]), soft, p.sigmoid) * d_score(c);
        pull = warp_sum(pull);
        for (i64 e = lane; e < p.experts; e += 32) {
            float s = score(to_float(logits[e]), soft, p.sigmoid), d = 0;
            for (i64 c = 0; c < p.topk; c++)
                if (i64(choices[c]) == e) d = d_score(c);
            p.d_logits[token * p.experts + e] = from_float<W0>(p.sigmoid ? s * (1 - s) * d : s * (d - pull));
        }
    });
}

struct ExpertSwiGlu {
    const R0* x; // [rows, gate | up]
    const R1* weights;
    W0* y; // [rows, cols]
    i64 rows, cols;
};

KERNEL(expert_swiglu, ExpertSwiGlu, THREADS) {
    WIDE(p.cols, aligned(p.x, p.y), each<N>(p.rows * p.cols, [&](i64 i) {
        i64 row = i / p.cols, at = row * 2 * p.cols + i % p.cols;
        float gate[N], up[N], weight = to_float(p.weights[row]);
        load(gate, p.x + at);
        load(up, p.x + at + p.cols);
        UNROLL for (int j = 0; j < N; j++) up[j] *= gate[j] * sigmoid(gate[j]) * weight;
        store(p.y + i, up);
    }));
}

struct ExpertSwiGluBwd {
    const R0* x;
    const R1* weights;
    const R2* dy;
    W0* dx;        // [rows, d_gate | d_up]
    W1* d_weights; // [rows]
    i64 rows, cols;
};

KERNEL(expert_swiglu_bwd, ExpertSwiGluBwd, THREADS) {
    WIDE(p.cols, aligned(p.x, p.dy, p.dx), warps(p.rows, [&](i64 row, int lane) {
        float weight = to_float(p.weights[row]), sum = 0;
        for (i64 c = i64(lane) * N; c < p.cols; c += 32 * N) {
            i64 at = row * 2 * p.cols + c;
            float gate[N], up[N], dy[N];
            load(gate, p.x + at);
            load(up, p.x + at + p.cols);
            load(dy, p.dy + row * p.cols + c);
            UNROLL for (int j = 0; j < N; j++) {
                float g = gate[j], s = sigmoid(g);
                sum += up[j] * g * s * dy[j];
                gate[j] = dy[j] * weight * up[j] * s * (1 + g * (1 - s));
                up[j] = dy[j] * weight * g * s;
            }
            store(p.dx + at, gate);
            store(p.dx + at + p.cols, up);
        }
        sum = warp_sum(sum);
        if (lane == 0) p.d_weights[row] = from_float<W1>(sum);
    }));
}

struct ExpertRelu2 {
    const R0* x;
    const R1* weights; // [rows]
    W0* y;
    i64 rows, cols;
};

KERNEL(expert_relu2, ExpertRelu2, THREADS) {
    WIDE(p.cols, aligned(p.x, p.y), each<N>(p.rows * p.cols, [&](i64 i) {
        float x[N], weight = to_float(p.weights[i / p.cols]);
        load(x, p.x + i);
        UNROLL for (int j = 0; j < N; j++) x[j] = fmaxf(x[j], 0.0f) * fmaxf(x[j], 0.0f) * weight;
        store(p.y + i, x);
    }));
}

struct ExpertRelu2Bwd {
    const R0* x;
    const R1* weights;
    const R2* dy;
    W0* dx;
    W1* d_weights; // [rows]
    i64 rows, cols;
};

KERNEL(expert_relu2_bwd, ExpertRelu2Bwd, THREADS) {
    WIDE(p.cols, aligned(p.x, p.dy, p.dx), warps(p.rows, [&](i64 row, int lane) {
        float weight = to_float(p.weights[row]), sum = 0;
        for (i64 c = i64(lane) * N; c < p.cols; c += 32 * N) {
            i64 i = row * p.cols + c;
            float x[N], dy[N];
            load(x, p.x + i);
            load(dy, p.dy + i);
            UNROLL for (int j = 0; j < N; j++) {
                x[j] = fmaxf(x[j], 0.0f);
                sum += x[j] * x[j] * dy[j];
                x[j] *= 2 * dy[j] * weight;
            }
            store(p.dx + i, x);
        }
        sum = warp_sum(sum);
        if (lane == 0) p.d_weights[row] = from_float<W1>(sum);
    }));
}
