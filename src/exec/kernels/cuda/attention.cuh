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

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

enum Seen { NOTHING, SOME, ALL };

// `q`: least lo, greatest lo, least hi, greatest hi of the queries; `kv`: least and greatest position.
DEVICE Seen seen(const int* q, const int* kv) {
    if (kv[1] < q[0] || kv[0] > q[3]) return NOTHING;
    return kv[0] >= q[1] && kv[1] <= q[2] ? ALL : SOME;
}
