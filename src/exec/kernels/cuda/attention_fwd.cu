// Flash attention with log-sum-exp, forward (Dao, arXiv:2307.08691): a block of threads takes 128 queries of one head
// and walks over tiles of 64 keys. A warp has 32 queries, so that every fragment of K and V serves two products.
//
// Shapes: q [batch*sq, heads*d], kv [batch*sk, (kv_heads*d | kv_heads*dv)], o [batch*sq, heads*dv], lse [batch*sq,
// heads]. Grid: (query tiles, heads, batch). Rows that see no key are left as they are; with `onto` rows go on from
// what o and lse hold.
#include "attention.cuh"

#ifndef W0
#define W0 bf16
#endif

// Fewer queries where a GPU's shared memory does not hold so many wide rows.
#ifndef BLOCK_QUERIES
#define BLOCK_QUERIES 128
#endif

constexpr int QUERIES = BLOCK_QUERIES, KEYS = 64, THREADS = QUERIES, D = HEAD_DIM, DV = VALUE_DIM;

struct AttentionFwd {
    const bf16* q;
    const bf16* kv;
    W0* o;
    float* lse;
    const int* lo;        // [sq]
    const int* hi;        // [sq]
    const int* positions; // [sk]
    const int* q_bounds;  // [query tiles, 4]
    const int* kv_bounds; // [key tiles, 2]
    LEANING_FIELDS
    i64 sq, sk, heads, kv_heads, onto;
    f64 scale;
};

// The running softmax of a thread's four rows: two of each of the two 16-row parts of its warp.
struct Rows {
    float top[2][2], sum[2][2];
};

DEVICE int next_tile(const AttentionFwd& p, const int* q_bounds, int from, int tiles) {
    while (from < tiles && seen(q_bounds, p.kv_bounds + 2 * from) == NOTHING) from++;
    return from;
}

DEVICE void scores(float (&s)[2][KEYS / 8][4], Tile<D> q, Tile<D> k, int first, int lane) {
    UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int n = 0; n < KEYS / 8; n++)
            UNROLL for (int i = 0; i < 4; i++) s[m][n][i] = 0;
    constexpr int PARTS = KEYS / 16;
    u32 a[2][2][4], b[2][4];
    in_turn<D / 16 * PARTS>(
        [&](int i, int slot) {
            int d = i / PARTS * 16;
            if (i % PARTS == 0)
                UNROLL for (int m = 0; m < 2; m++) q.left(a[i / PARTS % 2][m], first + 16 * m, d, lane);
            k.right_of_transpose(b[slot], i % PARTS * 16, d, lane);
        },
        [&](int i, int slot) {
            int n = i % PARTS;
            UNROLL for (int m = 0; m < 2; m++) {
                mma(s[m][2 * n], a[i / PARTS % 2][m], b[slot][0], b[slot][1]);
                mma(s[m][2 * n + 1], a[i / PARTS % 2][m], b[slot][2], b[slot][3]);
            }
        });
}

// Limits are read where they are wanted, which is seldom: registers are dear.
DEVICE void hide(float (&s)[2][KEYS / 8][4], const int* positions, int left_keys, const int* lo, const int* hi, int first, int left, int lane) {
    int low[2][2], high[2][2];
    UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int h = 0; h < 2; h++) {
            int row = first + 16 * m + 8 * h + lane / 4;
            low[m][h] = row < left ? lo[row] : 1;
            high[m][h] = row < left ? hi[row] : 0;
        }
    UNROLL for (int n = 0; n < KEYS / 8; n++)
        UNROLL for (int j = 0; j < 2; j++) {
            int key = 8 * n + 2 * (lane % 4) + j;
            int at = key < left_keys ? positions[key] : -1;
            UNROLL for (int m = 0; m < 2; m++)
                UNROLL for (int h = 0; h < 2; h++)
                    if (at < low[m][h] || at > high[m][h]) s[m][n][2 * h + j] = -INFINITY_F;
        }
}

#ifdef ALIBI
// Scores in units of log 2, less what distance takes off them.
DEVICE void lean(float (&s)[2][KEYS / 8][4], const int* positions, int left, const int (&query)[2][2], float slope, float scale, int lane) {
    UNROLL for (int n = 0; n < KEYS / 8; n++)
        UNROLL for (int j = 0; j < 2; j++) {
            int key = 8 * n + 2 * (lane % 4) + j;
            int at = key < left ? positions[key] : 0;
            UNROLL for (int m = 0; m < 2; m++)
                UNROLL for (int h = 0; h < 2; h++) {
                    float& x = s[m][n][2 * h + j];
                    x = x * scale - slope * fabsf(float(query[m][h] - at));
                }
        }
}
#endif

// Scores to probabilities, in units of log 2; what was gathered under an old maximum is scaled where a row of the warp
// has a new one, which after the first tiles is seldom.
DEVICE void soften(float (&s)[2][KEYS / 8][4], float (&o)[2][DV / 8][4], Rows& rows, float scale) {
    float keep[2][2];
    bool same = true;
    UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int h = 0; h < 2; h++) {
            float top = -INFINITY_F;
            UNROLL for (int n = 0; n < KEYS / 8; n++) top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            top = fmaxf(rows.top[m][h], top * scale);
            // Nothing seen so far: any finite number keeps infinity minus infinity away.
            float base = top == -INFINITY_F ? 0.0f : top, sum = 0;
            keep[m][h] = power_of_2(rows.top[m][h] - base);
            same = same && top == rows.top[m][h];
            UNROLL for (int n = 0; n < KEYS / 8; n++)
                UNROLL for (int j = 0; j < 2; j++) {
                    float e = power_of_2(s[m][n][2 * h + j] * scale - base);
                    s[m][n][2 * h + j] = e;
                    sum += e;
                }
            rows.top[m][h] = top;
            rows.sum[m][h] = rows.sum[m][h] * keep[m][h] + sum;
        }
    if (__all_sync(0xffffffffu, same)) return;
    UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int h = 0; h < 2; h++)
            UNROLL for (int n = 0; n < DV / 8; n++)
                UNROLL for (int j = 0; j < 2; j++) o[m][n][2 * h + j] *= keep[m][h];
}

DEVICE void gather(float (&o)[2][DV / 8][4], const float (&s)[2][KEYS / 8][4], Tile<DV> v, int lane) {
    constexpr int PARTS = DV / 16;
    u32 a[2][4], b[2][4];
    in_turn<KEYS / 16 * PARTS>(
        [&](int i, int slot) { v.right(b[slot], i / PARTS * 16, i % PARTS * 16, lane); },
        [&](int i, int slot) {
            int k = i / PARTS, n = i % PARTS;
            if (n == 0)
                UNROLL for (int m = 0; m < 2; m++)
                    UNROLL for (int j = 0; j < 4; j++)
                        a[m][j] = pack_bf16(s[m][2 * k + j / 2][2 * (j % 2)], s[m][2 * k + j / 2][2 * (j % 2) + 1]);
            UNROLL for (int m = 0; m < 2; m++) {
                mma(o[m][2 * n], a[m], b[slot][0], b[slot][1]);
                mma(o[m][2 * n + 1], a[m], b[slot][2], b[slot][3]);
            }
        });
}

// Narrow heads leave registers for a third block, and more warps hide more of what each waits for.
KERNEL_OF(attention_fwd, AttentionFwd, THREADS, D + DV > 128 ? 2 : 3) {
    SHARED(memory);
    Tile<D> q{reinterpret_cast<bf16*>(memory)};
    Tile<D> k{q.row(QUERIES)};
    Tile<DV> v{k.row(KEYS)};
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 32;
    // The last tiles have the most to do under a causal mask, so they begin.
    int tile = gridDim.x - 1 - blockIdx.x, head = blockIdx.y;
    i64 batch = blockIdx.z, kv_head = head / (p.heads / p.kv_heads);
    i64 row0 = i64(tile) * QUERIES, q_stride = p.heads * D, kv_stride = p.kv_heads * (D + DV);
    int left = int(p.sq - row0 < QUERIES ? p.sq - row0 : QUERIES);
    int tiles = int((p.sk + KEYS - 1) / KEYS);
    const bf16* keys = p.kv + batch * p.sk * kv_stride + kv_head * D;
    const bf16* values = p.kv + batch * p.sk * kv_stride + p.kv_heads * D + kv_head * DV;
    const int* q_bounds = p.q_bounds + 4 * tile;
    int at = next_tile(p, q_bounds, 0, tiles);
    if (at == tiles) return;

    copy_rows<D, THREADS>(q, p.q + (batch * p.sq + row0) * q_stride + i64(head) * D, q_stride, QUERIES, left);
    auto load_keys = [&](int i) {
        i64 from = i64(i) * KEYS, rest = p.sk - from;
        copy_rows<D, THREADS>(k, keys + from * kv_stride, kv_stride, KEYS, int(rest < KEYS ? rest : KEYS));
        copies_commit();
    };
    auto load_values = [&](int i) {
        i64 from = i64(i) * KEYS, rest = p.sk - from;
        copy_rows<DV, THREADS>(v, values + from * kv_stride, kv_stride, KEYS, int(rest < KEYS ? rest : KEYS));
        copies_commit();
    };
    load_keys(at);

    float scale = float(p.scale) * LOG2_E;
    float s[2][KEYS / 8][4], o[2][DV / 8][4];
    Rows rows;
#ifdef ALIBI
    int query[2][2];
    float slope = p.slopes[head] * LOG2_E;
#endif
    UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int h = 0; h < 2; h++) {
            int row = first + 16 * m + 8 * h + lane / 4;
#ifdef ALIBI
            query[m][h] = row < left ? p.q_positions[row0 + row] : 0;
#endif
            rows.top[m][h] = -INFINITY_F;
            rows.sum[m][h] = 0;
            UNROLL for (int n = 0; n < DV / 8; n++) o[m][n][2 * h] = o[m][n][2 * h + 1] = 0;
            if (!p.onto || row >= left) continue;
            i64 line = (batch * p.sq + row0 + row) * p.heads + head;
            float lse = p.lse[line];
            if (lse == -INFINITY_F) continue;
            // A normalised output is one key of that output and log-sum-exp. Its maximum counts once in the sum.
            rows.top[m][h] = lse * LOG2_E;
            rows.sum[m][h] = lane % 4 == 0 ? 1.0f : 0.0f;
            UNROLL for (int n = 0; n < DV / 8; n++)
                UNROLL for (int j = 0; j < 2; j++) o[m][n][2 * h + j] = to_float(p.o[line * DV + 8 * n + 2 * (lane % 4) + j]);
        }

    // A tile's values are on their way while its scores are made, the next tile's keys while the values are summed: two
    // barriers a tile, each of which says that one buffer has come and that the other may be overwritten. Room for two
    // tiles and one barrier was no faster (H100).
    int then = next_tile(p, q_bounds, at + 1, tiles);
    while (at < tiles) {
        copies_wait<0>();
        __syncthreads();
        load_values(at);
        // Bounds come from far: they are asked for before the products, and wanted after them.
        Seen sees = seen(q_bounds, p.kv_bounds + 2 * at);
        int far = then + 1 < tiles ? then + 1 : at;
        Seen sees_far = seen(q_bounds, p.kv_bounds + 2 * far);
        scores(s, q, k, first, lane);
        copies_wait<0>();
        __syncthreads();
        if (then < tiles) load_keys(then);
        i64 from = i64(at) * KEYS, rest = p.sk - from;
        // Keys beyond the end are zeros, which are seen by nobody.
        if (rest < KEYS || sees == SOME) {
            hide(s, p.positions + from, int(rest < KEYS ? rest : KEYS), p.lo + row0, p.hi + row0, first, left, lane);
        }
#ifdef ALIBI
        lean(s, p.positions + from, int(rest < KEYS ? rest : KEYS), query, slope, scale, lane);
        soften(s, o, rows, 1.0f);
#else
        soften(s, o, rows, scale);
#endif
        gather(o, s, v, lane);
        at = then;
        if (then < tiles) then = sees_far == NOTHING ? next_tile(p, q_bounds, far, tiles) : far;
        if (then <= at) then = tiles;
    }

    UNROLL for (int m = 0; m < 2; m++)
        UNROLL for (int h = 0; h < 2; h++) {
            float sum = rows.sum[m][h];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            int row = first + 16 * m + 8 * h + lane / 4;
            if (row >= left || sum == 0) continue;
            i64 line = (batch * p.sq + row0 + row) * p.heads + head;
            float part = 1.0f / sum;
            UNROLL for (int n = 0; n < DV / 8; n++)
                store2(p.o + line * DV + 8 * n + 2 * (lane % 4), o[m][n][2 * h] * part, o[m][n][2 * h + 1] * part);
            if (lane % 4 == 0) p.lse[line] = (rows.top[m][h] + log2f(sum)) * LN_2;
        }
}
