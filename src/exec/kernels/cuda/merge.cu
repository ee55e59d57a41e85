// Attention's small kernels over (row, head): delta, and the ways to bring blocks together by their log-sum-exps.
// A warp a head of a row. Shapes: o, o_block, do [rows, heads*d]; lse, lse_block, delta [rows, heads]. `live` lists the
// rows that saw a key of the block; the others are not touched.
#include "wide.cuh"

constexpr int THREADS = 256;

// Calls `f` with every (row, head) of the list, a warp each.
template <class F> DEVICE void each_head(const int* live, i64 count, i64 heads, F f) {
    i64 warps = i64(gridDim.x) * (THREADS / 32);
    for (i64 i = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32; i < count * heads; i += warps)
        f((live ? i64(live[i / heads]) : i / heads) * heads + i % heads);
}

struct Delta {
    const R0* o;
    const R1* d_o;
    float* delta;
    i64 rows, heads, d;
};

KERNEL(attention_delta, Delta, THREADS) {
    each_head(nullptr, p.rows, p.heads, [&](i64 line) {
        float sum = 0;
        for (i64 c = threadIdx.x % 32; c < p.d; c += 32) sum += to_float(p.o[line * p.d + c]) * to_float(p.d_o[line * p.d + c]);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) p.delta[line] = sum;
    });
}

struct Merge {
    W0* o;
    float* lse;
    const R2* o_block;
    const float* lse_block;
    const int* live;
    i64 count, heads, d;
};

// What two log-sum-exps weigh, and theirs together. An empty side, at minus infinity, says nothing.
struct Weights {
    float keep, take, both;
};

DEVICE Weights weigh(float lse, float block) {
    if (block == -INFINITY_F) return {1, 0, lse};
    if (lse == -INFINITY_F) return {0, 1, block};
    float top = fmaxf(lse, block), both = top + logf(expf(lse - top) + expf(block - top));
    return {expf(lse - both), expf(block - both), both};
}

KERNEL(merge_lse, Merge, THREADS) {
    each_head(p.live, p.count, p.heads, [&](i64 line) {
        Weights w = weigh(p.lse[line], p.lse_block[line]);
        __syncwarp();
        if (threadIdx.x % 32 == 0) p.lse[line] = w.both;
        if (w.take == 0) return;
        for (i64 c = threadIdx.x % 32; c < p.d; c += 32) {
            i64 at = line * p.d + c;
            // The output of an empty side may be anything, and is not read.
            float sum = w.take * to_float(p.o_block[at]);
            if (w.keep != 0) sum += w.keep * to_float(p.o[at]);
            p.o[at] = from_float<W0>(sum);
        }
    });
}

struct AddLse {
    float* lse;
    const float* lse_block;
    const int* live;
    i64 count, heads;
};

KERNEL(add_lse, AddLse, THREADS) {
    each<1>(p.count * p.heads, [&](i64 i) {
        i64 line = i64(p.live[i / p.heads]) * p.heads + i % p.heads;
        p.lse[line] = weigh(p.lse[line], p.lse_block[line]).both;
    });
}

struct AddWeighted {
    W0* o;
    const R1* o_block;
    const float* lse_block;
    const float* lse;
    const int* live;
    i64 count, heads, d;
};

KERNEL(add_weighted, AddWeighted, THREADS) {
    each_head(p.live, p.count, p.heads, [&](i64 line) {
        float weight = expf(p.lse_block[line] - p.lse[line]);
        for (i64 c = threadIdx.x % 32; c < p.d; c += 32) {
            i64 at = line * p.d + c;
            p.o[at] = from_float<W0>(to_float(p.o[at]) + weight * to_float(p.o_block[at]));
        }
    });
}

struct OutputsOfDelta {
    const bf16* d_o;
    const float* delta;
    bf16* o;
    const int* live;
    i64 count, heads, d;
};

// Outputs whose products with dO add up to delta, for a library that takes outputs in place of delta: three numbers, at the
// largest of dO, each with what is left of delta by then, so that all bits of a float are told in bf16. Other outputs are
// zero. Where dO is zero so is delta.
KERNEL(outputs_of_delta, OutputsOfDelta, THREADS) {
    each_head(p.live, p.count, p.heads, [&](i64 line) {
        int lane = threadIdx.x % 32;
        float left = p.delta[line];
        i64 taken[3] = {-1, -1, -1};
        float told[3] = {0, 0, 0};
        UNROLL for (int turn = 0; turn < 3; turn++) {
            float most = 0;
            i64 at = -1;
            for (i64 c = lane; c < p.d; c += 32) {
                float size = fabsf(to_float(p.d_o[line * p.d + c]));
                if (size > most && c != taken[0] && c != taken[1]) most = size, at = c;
            }
            // The first of the largest, whichever lane has it.
            UNROLL for (int step = 16; step > 0; step /= 2) {
                float other = __shfl_xor_sync(0xffffffffu, most, step);
                i64 there = i64(__shfl_xor_sync(0xffffffffu, int(at), step));
                if (other > most || (other == most && there >= 0 && (at < 0 || there < at))) most = other, at = there;
            }
            if (at < 0) break;
            float by = to_float(p.d_o[line * p.d + at]);
            taken[turn] = at;
            told[turn] = to_float(from_float<bf16>(left / by));
            left -= by * told[turn];
        }
        for (i64 c = lane; c < p.d; c += 32) {
            float o = c == taken[0] ? told[0] : c == taken[1] ? told[1] : c == taken[2] ? told[2] : 0;
            p.o[line * p.d + c] = from_float<bf16>(o);
        }
    });
}
