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

// Eight pairs of a head at a time, for a few heads that turn alike: where rows and halves are whole 16 bytes. An index is a
// row, a group of heads, and a chunk of a head: of its turning pairs first, then of what does not turn. `f` is given the
// row, the head, the places of the chunk's lower and upper part in it (-1 where there is no upper one), and the turns.
constexpr int HEADS = 8;

DEVICE bool by_chunks(i64 d, i64 rotary) { return rotary % 16 == 0 && d % 8 == 0; }

template <class F> DEVICE void each_chunk(i64 rows, i64 len, i64 heads, i64 d, i64 rotary, const float* turns, F f) {
    i64 half = rotary / 2, turning = half / 8, chunks = turning + (d - rotary) / 8;
    i64 groups = (heads + HEADS - 1) / HEADS, step = i64(gridDim.x) * blockDim.x;
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * groups * chunks; i += step) {
        int chunk = int(i % chunks), group = int(i / chunks % groups);
        i64 row = i / chunks / groups;
        bool turns_here = chunk < turning;
        i64 low = turns_here ? chunk * 8 : rotary + (chunk - turning) * 8, high = turns_here ? low + half : -1;
        float angle[16];
        if (turns_here) load(angle, turns + (row % len * half + low) * 2);
        UNROLL for (int h = 0; h < HEADS; h++) {
            i64 head = i64(group) * HEADS + h;
            if (head < heads) f(row, head, low, high, angle);
        }
    }
}

DEVICE void turn(float (&x)[8], float (&y)[8], const float (&angle)[16], float way) {
    UNROLL for (int j = 0; j < 8; j++) turn(x[j], y[j], angle[2 * j], way * angle[2 * j + 1]);
}

KERNEL(rope, RopeFwd, THREADS) {
    if (by_chunks(p.d, p.rotary) && aligned(p.qkv, p.q, p.kv, p.turns)) {
        i64 width = (p.heads + 2 * p.kv_heads) * p.d, q_width = p.heads * p.d;
        return each_chunk(p.rows, p.len, p.heads + 2 * p.kv_heads, p.d, p.rotary, p.turns,
                          [&](i64 row, i64 head, i64 low, i64 high, const float (&angle)[16]) {
            const R0* from = p.qkv + row * width + head * p.d;
            float x[8], y[8];
            load(x, from + low);
            if (high >= 0) {
                load(y, from + high);
                if (head < p.heads + p.kv_heads) turn(x, y, angle, 1.0f);
            }
            if (head < p.heads) {
                W0* to = p.q + row * q_width + head * p.d;
                store(to + low, x);
                if (high >= 0) store(to + high, y);
            } else {
                W1* to = p.kv + row * (width - q_width) + head * p.d - q_width;
                store(to + low, x);
                if (high >= 0) store(to + high, y);
            }
        });
    }
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
    if (by_chunks(p.d, p.rotary) && aligned(p.dq, p.dkv, p.dqkv, p.turns)) {
        i64 width = (p.heads + 2 * p.kv_heads) * p.d, q_width = p.heads * p.d;
        return each_chunk(p.rows, p.len, p.heads + 2 * p.kv_heads, p.d, p.rotary, p.turns,
                          [&](i64 row, i64 head, i64 low, i64 high, const float (&angle)[16]) {
            float x[8], y[8];
            if (head < p.heads) {
                const R0* from = p.dq + row * q_width + head * p.d;
                load(x, from + low);
                if (high >= 0) load(y, from + high);
            } else {
                const R1* from = p.dkv + row * (width - q_width) + head * p.d - q_width;
                load(x, from + low);
                if (high >= 0) load(y, from + high);
            }
            if (high >= 0 && head < p.heads + p.kv_heads) turn(x, y, angle, -1.0f);
            W0* to = p.dqkv + row * width + head * p.d;
            store(to + low, x);
            if (high >= 0) store(to + high, y);
        });
    }
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
