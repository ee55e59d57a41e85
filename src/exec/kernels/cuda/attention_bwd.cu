// Gradients of one block of attention from the final log-sum-exp and delta, after Dao, arXiv:2307.08691: a block of
// threads keeps 128 keys of one KV head and walks over the query heads of its group and their tiles of 64 queries.
// With p = exp(s - lse): dV = pT dO, dP = dO VT, dS = p (dP - delta), dQ = dS K, dK = dST Q, the last two scaled.
//
// A warp has 16 keys and computes the transposes of S and dP, which then stand in registers as the left operands of
// dV and dK. Only dS goes through shared memory, for dQ, of which each block of threads has a part: dq is a float
// buffer and is added to atomically, so its last digits depend on the order. dK and dV do not.
//
// Shapes as in attention_fwd.cu; dq [batch*sq, heads*d] float, the rows that see a key zeroed before; dkv like kv.
// Grid: (key tiles, kv_heads, batch). Rows of dkv that no query sees are left as they are; with `onto` the others are
// added to.
#include "attention.cuh"

#ifndef W1
#define W1 float
#endif

// Fewer keys where a GPU's shared memory does not hold so many wide rows.
#ifndef BLOCK_KEYS
#define BLOCK_KEYS 128
#endif

// Two where there is room: a tile of queries is on its way while the one before is worked on.
#ifndef STAGES
#define STAGES 2
#endif

// Where there is room for two tiles of dS, dQ of a tile is added while the next one is worked on: one barrier a tile.
#ifndef LATER
#define LATER 1
#endif

constexpr int KEYS = BLOCK_KEYS, QUERIES = 64, THREADS = 2 * KEYS, D = HEAD_DIM, DV = VALUE_DIM;
static_assert(STAGES > 1 || !LATER, "what is added later wants the barrier that one stage has no use for");

struct AttentionBwd {
    const bf16* q;
    const bf16* kv;
    const bf16* d_o;
    const float* lse;
    const float* delta;
    float* dq;
    W1* dkv;
    const int* lo;        // [sq]
    const int* hi;        // [sq]
    const int* positions; // [sk]
    const int* q_bounds;  // [query tiles, 4]
    const int* kv_bounds; // [key tiles, 2]
    const u8* kv_live;    // [sk], whether any query sees it
    LEANING_FIELDS
    i64 sq, sk, heads, kv_heads, onto;
    f64 scale;
};

// What a query brings, in shared memory beside its rows.
struct Limits {
    float lse[QUERIES], delta[QUERIES];
    int lo[QUERIES], hi[QUERIES];
#ifdef ALIBI
    int at[QUERIES];
#endif
};

// [16 keys of the warp, QUERIES] = left rows times the rows of the tile.
template <int DIM> DEVICE void products(float (&s)[QUERIES / 8][4], Tile<DIM> left, Tile<DIM> queries, int first, int lane) {
    UNROLL for (int n = 0; n < QUERIES / 8; n++)
        UNROLL for (int i = 0; i < 4; i++) s[n][i] = 0;
    constexpr int PARTS = QUERIES / 16;
    u32 a[2][4], b[2][4];
    in_turn<DIM / 16 * PARTS>(
        [&](int i, int slot) {
            int d = i / PARTS * 16;
            if (i % PARTS == 0) left.left(a[i / PARTS % 2], first, d, lane);
            queries.right_of_transpose(b[slot], i % PARTS * 16, d, lane);
        },
        [&](int i, int slot) {
            int n = i % PARTS;
            mma(s[2 * n], a[i / PARTS % 2], b[slot][0], b[slot][1]);
            mma(s[2 * n + 1], a[i / PARTS % 2], b[slot][2], b[slot][3]);
        });
}

// sum[16 keys, DIM] += s[16 keys, QUERIES] rows[QUERIES, DIM].
template <int DIM> DEVICE void gather(float (&sum)[DIM / 8][4], const float (&s)[QUERIES / 8][4], Tile<DIM> rows, int lane) {
    constexpr int PARTS = DIM / 16;
    u32 a[4], b[2][4];
    in_turn<QUERIES / 16 * PARTS>(
        [&](int i, int slot) { rows.right(b[slot], i / PARTS * 16, i % PARTS * 16, lane); },
        [&](int i, int slot) {
            int k = i / PARTS, n = i % PARTS;
            if (n == 0)
                UNROLL for (int j = 0; j < 4; j++) a[j] = pack_bf16(s[2 * k + j / 2][2 * (j % 2)], s[2 * k + j / 2][2 * (j % 2) + 1]);
            mma(sum[2 * n], a, b[slot][0], b[slot][1]);
            mma(sum[2 * n + 1], a, b[slot][2], b[slot][3]);
        });
}

// s becomes p and dp becomes dS, zero where the mask hides a key; with ALL it hides none.
template <bool ALL> DEVICE void soften(float (&s)[QUERIES / 8][4], float (&dp)[QUERIES / 8][4], const Limits& l, const int (&at)[2], float scale, float slope, int lane) {
    UNROLL for (int n = 0; n < QUERIES / 8; n++)
        UNROLL for (int j = 0; j < 2; j++) {
            int query = 8 * n + 2 * (lane % 4) + j;
            float lse = l.lse[query] * LOG2_E, delta = l.delta[query];
            UNROLL for (int h = 0; h < 2; h++) {
                bool sees = ALL || (at[h] >= l.lo[query] && at[h] <= l.hi[query]);
                float x = s[n][2 * h + j] * scale - lse;
#ifdef ALIBI
                x -= slope * fabsf(float(l.at[query] - at[h]));
#endif
                float e = sees ? power_of_2(x) : 0.0f;
                s[n][2 * h + j] = e;
                dp[n][2 * h + j] = sees ? e * (dp[n][2 * h + j] - delta) : 0.0f;
            }
        }
}

// dS of the warp's keys into the tile [keys, queries].
DEVICE void put(Tile<QUERIES> to, const float (&ds)[QUERIES / 8][4], int first, int lane) {
    UNROLL for (int n = 0; n < QUERIES / 8; n++)
        UNROLL for (int h = 0; h < 2; h++)
            *reinterpret_cast<u32*>(to.row(first + 8 * h + lane / 4) + 8 * n + 2 * (lane % 4)) = pack_bf16(ds[n][2 * h], ds[n][2 * h + 1]);
}

// dq[QUERIES, D] += dS K: four warps have 16 queries each; where there are eight, four have half of the columns.
DEVICE void add_dq(float* dq, i64 stride, int left, Tile<QUERIES> ds, Tile<D> k, float scale, int warp, int lane) {
    constexpr int COLUMNS = D / (THREADS / 128);
    static_assert(COLUMNS % 16 == 0, "a warp takes whole 16-column blocks");
    int query = warp % 4 * 16, column = warp / 4 * COLUMNS;
    float sum[COLUMNS / 8][4];
    UNROLL for (int n = 0; n < COLUMNS / 8; n++)
        UNROLL for (int i = 0; i < 4; i++) sum[n][i] = 0;
    constexpr int PARTS = COLUMNS / 16;
    u32 a[2][4], b[2][4];
    in_turn<KEYS / 16 * PARTS>(
        [&](int i, int slot) {
            int key = i / PARTS * 16;
            if (i % PARTS == 0) ds.left_of_transpose(a[i / PARTS % 2], key, query, lane);
            k.right(b[slot], key, column + i % PARTS * 16, lane);
        },
        [&](int i, int slot) {
            int n = i % PARTS;
            mma(sum[2 * n], a[i / PARTS % 2], b[slot][0], b[slot][1]);
            mma(sum[2 * n + 1], a[i / PARTS % 2], b[slot][2], b[slot][3]);
        });
    UNROLL for (int h = 0; h < 2; h++) {
        int row = query + 8 * h + lane / 4;
        if (row >= left) continue;
        UNROLL for (int n = 0; n < COLUMNS / 8; n++)
            add_two(dq + row * stride + column + 8 * n + 2 * (lane % 4), sum[n][2 * h] * scale, sum[n][2 * h + 1] * scale);
    }
}

// The warp's rows of dK or dV.
template <int DIM> DEVICE void write(W1* to, i64 stride, const float (&sum)[DIM / 8][4], const bool (&live)[2], bool onto, float scale, int lane) {
    UNROLL for (int h = 0; h < 2; h++) {
        if (!live[h]) continue;
        UNROLL for (int n = 0; n < DIM / 8; n++) {
            W1* at = to + (8 * h + lane / 4) * stride + 8 * n + 2 * (lane % 4);
            float a = sum[n][2 * h] * scale, b = sum[n][2 * h + 1] * scale;
            if (onto) {
                a += to_float(at[0]);
                b += to_float(at[1]);
            }
            store2(at, a, b);
        }
    }
}

KERNEL(attention_bwd, AttentionBwd, THREADS) {
    SHARED(memory);
    Tile<D> k{reinterpret_cast<bf16*>(memory)};
    Tile<DV> v{k.row(KEYS)};
    Tile<D> all_q{v.row(KEYS)};
    Tile<DV> all_d_o{all_q.row(STAGES * QUERIES)};
    Tile<QUERIES> all_ds{all_d_o.row(STAGES * QUERIES)};
    Limits* all_limits = reinterpret_cast<Limits*>(all_ds.row((1 + LATER) * KEYS));
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = 16 * warp;
    i64 tile = blockIdx.x, kv_head = blockIdx.y, batch = blockIdx.z;
    i64 key0 = tile * KEYS, q_stride = p.heads * D, o_stride = p.heads * DV, kv_stride = p.kv_heads * (D + DV);
    int left_keys = int(p.sk - key0 < KEYS ? p.sk - key0 : KEYS);
    const int* kv_bounds = p.kv_bounds + 2 * tile;
    int group = int(p.heads / p.kv_heads), q_tiles = int((p.sq + QUERIES - 1) / QUERIES), steps = group * q_tiles;
    int kv_least = kv_bounds[0], kv_most = kv_bounds[1];
    auto tile_at = [&](int step) { return step % q_tiles; };
    // The first step from there on whose queries see any of the keys.
    auto next = [&](int step) {
        while (step < steps && seen(p.q_bounds + 4 * tile_at(step), kv_least, kv_most) == NOTHING) step++;
        return step;
    };
    int step = next(0);
    if (step == steps) return;
    i64 k_at = (batch * p.sk + key0) * kv_stride + kv_head * D, v_at = (batch * p.sk + key0) * kv_stride + p.kv_heads * D + kv_head * DV;
    copy_rows<D, THREADS>(k, p.kv + k_at, kv_stride, KEYS, left_keys);
    copy_rows<DV, THREADS>(v, p.kv + v_at, kv_stride, KEYS, left_keys);

    int at[2];
    bool live[2];
    UNROLL for (int h = 0; h < 2; h++) {
        int key = first + 8 * h + lane / 4;
        at[h] = key < left_keys ? p.positions[key0 + key] : -1;
        live[h] = key < left_keys && p.kv_live[key0 + key];
    }
    float dk[D / 8][4], dv[DV / 8][4];
    UNROLL for (int n = 0; n < D / 8; n++)
        UNROLL for (int i = 0; i < 4; i++) dk[n][i] = 0;
    UNROLL for (int n = 0; n < DV / 8; n++)
        UNROLL for (int i = 0; i < 4; i++) dv[n][i] = 0;

    float scale = float(p.scale);
    auto rows_left = [&](int q_tile) {
        i64 left = p.sq - i64(q_tile) * QUERIES;
        return int(left < QUERIES ? left : QUERIES);
    };
    auto fetch = [&](int step, int stage) {
        int q_tile = step % q_tiles, left = rows_left(q_tile);
        i64 head = kv_head * group + step / q_tiles, row0 = batch * p.sq + i64(q_tile) * QUERIES;
        Tile<D> q{all_q.row(stage * QUERIES)};
        Tile<DV> d_o{all_d_o.row(stage * QUERIES)};
        copy_rows<D, THREADS>(q, p.q + row0 * q_stride + head * D, q_stride, QUERIES, left);
        copy_rows<DV, THREADS>(d_o, p.d_o + row0 * o_stride + head * DV, o_stride, QUERIES, left);
        // A query that is not there has zeros everywhere, and adds zeros to every sum whatever it sees.
        if (threadIdx.x < QUERIES) {
            Limits& limits = all_limits[stage];
            int i = threadIdx.x, row = q_tile * QUERIES + (i < left ? i : 0);
            i64 line = (row0 + (i < left ? i : 0)) * p.heads + head;
            copy4(&limits.lo[i], p.lo + row, i < left);
            copy4(&limits.hi[i], p.hi + row, i < left);
#ifdef ALIBI
            copy4(&limits.at[i], p.q_positions + row, i < left);
#endif
            copy4(&limits.lse[i], p.lse + line, i < left);
            copy4(&limits.delta[i], p.delta + line, i < left);
        }
        copies_commit();
    };
    auto add = [&](int step, Tile<QUERIES> ds) {
        int q_tile = step % q_tiles;
        i64 head = kv_head * group + step / q_tiles, row0 = batch * p.sq + i64(q_tile) * QUERIES;
        add_dq(p.dq + row0 * q_stride + head * D, q_stride, rows_left(q_tile), ds, k, scale, warp, lane);
    };
    fetch(step, 0);
    int before = steps, turn = 0, then = next(step + 1);
    for (int stage = 0; step < steps; stage = (stage + 1) % STAGES) {
        copies_wait<0>();
        // The tile is here, and nobody reads the one before any more, nor its dS where that is not added later.
        __syncthreads();
        if (STAGES > 1 && then < steps) fetch(then, (stage + 1) % STAGES);
        int q_tile = step % q_tiles, left = rows_left(q_tile);
        Tile<D> q{all_q.row(stage * QUERIES)};
        Tile<DV> d_o{all_d_o.row(stage * QUERIES)};
        Tile<QUERIES> ds{all_ds.row(turn * KEYS)};
        const Limits& limits = all_limits[stage];
        // Bounds come from far: they are asked for before the products, and wanted after them.
        Seen sees = seen(p.q_bounds + 4 * q_tile, kv_least, kv_most);
        int far = then + 1 < steps ? then + 1 : step;
        Seen sees_far = seen(p.q_bounds + 4 * tile_at(far), kv_least, kv_most);
        float s[QUERIES / 8][4], dp[QUERIES / 8][4];
        products<D>(s, k, q, first, lane);
        products<DV>(dp, v, d_o, first, lane);
        float slope = 0;
#ifdef ALIBI
        slope = p.slopes[kv_head * group + step / q_tiles] * LOG2_E;
#endif
        // A full tile may have queries and keys at its end that are not there.
        if (sees == ALL && left == QUERIES && left_keys == KEYS) soften<true>(s, dp, limits, at, scale * LOG2_E, slope, lane);
        else soften<false>(s, dp, limits, at, scale * LOG2_E, slope, lane);
        put(ds, dp, first, lane);
        gather<DV>(dv, s, d_o, lane);
        if (LATER && before < steps) add(before, Tile<QUERIES>{all_ds.row((1 - turn) * KEYS)});
        gather<D>(dk, dp, q, lane);
        if (LATER) {
            before = step;
            turn = 1 - turn;
        } else {
            __syncthreads();
            add(step, ds);
        }
        if (STAGES == 1) {
            __syncthreads();
            if (then < steps) fetch(then, 0);
        }
        step = then;
        if (then < steps) then = sees_far == NOTHING ? next(far) : far;
        if (then <= step) then = steps;
    }
    if (LATER) {
        __syncthreads();
        add(before, Tile<QUERIES>{all_ds.row((1 - turn) * KEYS)});
    }
    write<D>(p.dkv + k_at + first * kv_stride, kv_stride, dk, live, p.onto, scale, lane);
    write<DV>(p.dkv + v_at + first * kv_stride, kv_stride, dv, live, p.onto, 1.0f, lane);
}
