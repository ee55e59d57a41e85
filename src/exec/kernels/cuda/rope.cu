// Rotary embedding (Su et al., arXiv:2104.09864), with Hugging Face's pairs: element i of a head turns with element
// i + rotary/2. Forward reads qkv [n, (a+2k)*d], writes q [n, a*d] and kv [n, 2k*d]; backward reads dq, dkv, writes
// dqkv, and turns back.
//
// `turns` has cos and sin by position and pair, [len, rotary/2, 2]: made in f64 on the host, since the angle of a far
// position has no digits left in a float.
#include "wide.cuh"

constexpr int THREADS = 256;

struct RopeFwd {
    const R0* qkv;
    W0* q;
    W1* kv;
    const float* turns;
    i64 rows, len, heads, kv_heads, d, rotary;
};

DEVICE void turn(float& x, float& y, float cos, float sin) {
    float low = x * cos - y * sin;
    y = y * cos + x * sin;
    x = low;
}

KERNEL(rope, RopeFwd, THREADS) {
    i64 half = p.rotary / 2, width = (p.heads + 2 * p.kv_heads) * p.d, q_width = p.heads * p.d;
    // An index is a pair of a head that turns, or one element that does not.
    i64 of_head = p.d - half, of_row = (p.heads + 2 * p.kv_heads) * of_head;
    each<1>(p.rows * of_row, [&](i64 i) {
        i64 row = i / of_row, head = i % of_row / of_head, at = i % of_head;
        i64 low = at < half ? at : at + half, high = at + half;
        const R0* from = p.qkv + row * width + head * p.d;
        float x = to_float(from[low]), y = at < half ? to_float(from[high]) : 0.0f;
        if (at < half && head < p.heads + p.kv_heads) {
            const float* t = p.turns + (row % p.len * half + at) * 2;
            turn(x, y, t[0], t[1]);
        }
        i64 to = head * p.d;
        if (head < p.heads) {
            p.q[row * q_width + to + low] = from_float<W0>(x);
            if (at < half) p.q[row * q_width + to + high] = from_float<W0>(y);
        } else {
            to += row * (width - q_width) - q_width;
            p.kv[to + low] = from_float<W1>(x);
            if (at < half) p.kv[to + high] = from_float<W1>(y);
        }
    });
}

struct RopeBwd {
    const R0* dq;
    const R1* dkv;
    W0* dqkv;
    const float* turns;
    i64 rows, len, heads, kv_heads, d, rotary;
};

KERNEL(rope_bwd, RopeBwd, THREADS) {
    i64 half = p.rotary / 2, width = (p.heads + 2 * p.kv_heads) * p.d, q_width = p.heads * p.d;
    i64 of_head = p.d - half, of_row = (p.heads + 2 * p.kv_heads) * of_head;
    each<1>(p.rows * of_row, [&](i64 i) {
        i64 row = i / of_row, head = i % of_row / of_head, at = i % of_head;
        i64 low = at < half ? at : at + half, high = at + half;
        bool query = head < p.heads;
        i64 from = query ? row * q_width + head * p.d : row * (width - q_width) + head * p.d - q_width;
        float x = query ? to_float(p.dq[from + low]) : to_float(p.dkv[from + low]), y = 0;
        if (at < half) y = query ? to_float(p.dq[from + high]) : to_float(p.dkv[from + high]);
        if (at < half && head < p.heads + p.kv_heads) {
            const float* t = p.turns + (row % p.len * half + at) * 2;
            turn(x, y, t[0], -t[1]);
        }
        W0* to = p.dqkv + row * width + head * p.d;
        to[low] = from_float<W0>(x);
        if (at < half) to[high] = from_float<W0>(y);
    });
}
