// What the passes of attention share: how a mask is told to a kernel.
//
// A query sees the keys at positions `lo` to `hi`, both included: its document, up to itself if the mask is causal,
// and as far back as the window reaches. A tile of keys is left out, taken whole, or compared key by key, by the
// bounds of its positions and of its queries' limits.
#pragma once
#include "common.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif

// Where scores lean on distance (ALiBi, arXiv:2108.12409): what a head's lose for each position between query and key.
#ifdef ALIBI
#define LEANING_FIELDS        \
    const int* q_positions; /* [sq] */ \
    const float* slopes;    /* [heads] */
#else
#define LEANING_FIELDS
#endif

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// 2 to the x by the GPU's own approximation, within 2 units of the last place of a float; exp2f handles denormal numbers
// besides, which probabilities in bf16 never show.
DEVICE float power_of_2(float x) {
#ifdef __CUDACC_RTC__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

enum Seen { NOTHING, SOME, ALL };

// `q`: least lo, greatest lo, least hi, greatest hi of the queries; keys: their least and greatest position.
DEVICE Seen seen(const int* q, int least, int most) {
    if (most < q[0] || least > q[3]) return NOTHING;
    return least >= q[1] && most <= q[2] ? ALL : SOME;
}
DEVICE Seen seen(const int* q, const int* kv) { return seen(q, kv[0], kv[1]); }
