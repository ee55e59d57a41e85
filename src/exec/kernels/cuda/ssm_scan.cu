// The state-space scan by chunks (arXiv:2405.21060, section 6) on tensor cores, forward and backward, a block of threads
// 64 tokens of a chunk. Within a chunk the scan is products of rows masked by decay; states pass from chunk to chunk.
//
// Legend: xbc [rows, (x: heads * P | B: groups * N | C: groups * N)], y and dy [rows, heads * P]; dt and sums [rows,
// heads] in floats, sums of a dt within a chunk, which fall, so that no decay is above one; states [batch, chunks,
// heads, N, P] in floats. What goes into a product is rounded to bf16, what comes out is a float.
#include "wide.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef STATE
#define STATE 128
#endif

constexpr int P = HEAD_DIM, N = STATE, ROWS = 64, THREADS = 128;

struct Scan {
    const bf16* xbc;
    const float* dt;
    const float* sums;
    const R0* params; // biases of dt, A, D
    i64 seq, heads, groups, chunk;
};

// Where a block of threads works: `rows` rows of a chunk of `len` from its row `first` on.
struct Place {
    i64 chunks, of_chunk, start, len, batch;

    DEVICE Place(const Scan& p, i64 chunk, i64 of_batch) {
        chunks = (p.seq + p.chunk - 1) / p.chunk;
        batch = of_batch;
        of_chunk = of_batch * chunks + chunk;
        start = of_batch * p.seq + chunk * p.chunk;
        i64 rest = p.seq - chunk * p.chunk;
        len = rest < p.chunk ? rest : p.chunk;
    }
    DEVICE int rows(i64 first) const { return int(len - first < ROWS ? len - first : ROWS); }
    DEVICE i64 state(const Scan& p, i64 head) const { return (of_chunk * p.heads + head) * N * P; }
};

DEVICE i64 width(const Scan& p) { return p.heads * P + 2 * p.groups * N; }
DEVICE i64 tiles(const Scan& p) { return (p.chunk + ROWS - 1) / ROWS; }
DEVICE i64 group_of(const Scan& p, i64 head) { return head / (p.heads / p.groups); }
DEVICE const bf16* x_of(const Scan& p, i64 row, i64 head) { return p.xbc + row * width(p) + head * P; }
DEVICE const bf16* b_of(const Scan& p, i64 row, i64 group) { return p.xbc + row * width(p) + p.heads * P + group * N; }
DEVICE const bf16* c_of(const Scan& p, i64 row, i64 group) { return b_of(p, row, group) + p.groups * N; }

// Rows times a weight each into a tile; rows from `live` on are zeros.
template <int DIM, class T, class W> DEVICE void fill(Tile<DIM> to, const T* from, i64 stride, int rows, int live, W weight) {
    for (int i = threadIdx.x; i < rows * (DIM / 8); i += blockDim.x) {
        int r = i / (DIM / 8), c = i % (DIM / 8) * 8;
        float v[8] = {};
        if (r < live) {
            float by = weight(r);
            load(v, from + r * stride + c);
            UNROLL for (int j = 0; j < 8; j++) v[j] *= by;
        }
        store(to.row(r) + c, v);
    }
}

template <int DIM, class T> DEVICE void fill(Tile<DIM> to, const T* from, i64 stride, int rows, int live) {
    fill(to, from, stride, rows, live, [](int) { return 1.0f; });
}

template <int COLUMNS> DEVICE void clear(float (&s)[COLUMNS][4]) {
    UNROLL for (int n = 0; n < COLUMNS; n++)
        UNROLL for (int i = 0; i < 4; i++) s[n][i] = 0;
}

// sum[16 rows of `left` from `first` on, COLUMNS] += left[., K] right[K, COLUMNS].
template <int COLUMNS, int K> DEVICE void product(float (&sum)[COLUMNS / 8][4], Tile<K> left, Tile<COLUMNS> right, int first, int lane) {
    UNROLL for (int k = 0; k < K; k += 16) {
        u32 a[4];
        left.left(a, first, k, lane);
        UNROLL for (int n = 0; n < COLUMNS / 16; n++) {
            u32 b[4];
            right.right(b, k, 16 * n, lane);
            mma(sum[2 * n], a, b[0], b[1]);
            mma(sum[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// The same with the transpose of right[COLUMNS, K].
template <int COLUMNS, int K> DEVICE void product_t(float (&sum)[COLUMNS / 8][4], Tile<K> left, Tile<K> right, int first, int lane) {
    UNROLL for (int k = 0; k < K; k += 16) {
        u32 a[4];
        left.left(a, first, k, lane);
        UNROLL for (int n = 0; n < COLUMNS / 16; n++) {
            u32 b[4];
            right.right_of_transpose(b, 16 * n, k, lane);
            mma(sum[2 * n], a, b[0], b[1]);
            mma(sum[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// sum[16 rows, DIM] += s[16 rows, ROWS] right[ROWS, DIM].
template <int DIM> DEVICE void gather(float (&sum)[DIM / 8][4], const float (&s)[ROWS / 8][4], Tile<DIM> right, int lane) {
    UNROLL for (int k = 0; k < ROWS / 16; k++) {
        u32 a[4];
        UNROLL for (int i = 0; i < 4; i++) a[i] = pack_bf16(s[2 * k + i / 2][2 * (i % 2)], s[2 * k + i / 2][2 * (i % 2) + 1]);
        UNROLL for (int n = 0; n < DIM / 16; n++) {
            u32 b[4];
            right.right(b, 16 * k, 16 * n, lane);
            mma(sum[2 * n], a, b[0], b[1]);
            mma(sum[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Over the four lanes that have a row.
DEVICE float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Numbers of a head for the rows of a tile, in shared memory; zeros from `live` on.
DEVICE void numbers(float* to, const Scan& p, const float* from, i64 row, i64 head, int live) {
    if (threadIdx.x < ROWS) to[threadIdx.x] = int(threadIdx.x) < live ? from[(row + threadIdx.x) * p.heads + head] : 0.0f;
}

struct ChunkStates {
    Scan of;
    const bf16* dy;
    float* states;
    i64 back;
};

constexpr int STATE_THREADS = 256, STATE_BLOCKS = (N / 16 + STATE_THREADS / 32 - 1) / (STATE_THREADS / 32);

// What a chunk adds to its state: rows of B, times what is left of them at its end, by x. With `back` what it adds to the
// gradient of the state before it: rows of C, decayed to their token, by dy. Grid: (chunks, heads, batch).
KERNEL(chunk_states, ChunkStates, STATE_THREADS) {
    SHARED(memory);
    Tile<N> left{reinterpret_cast<bf16*>(memory)};
    Tile<P> right{left.row(ROWS)};
    const Scan& of = p.of;
    Place at(of, blockIdx.x, blockIdx.z);
    i64 head = blockIdx.y, group = group_of(of, head), last = (at.start + at.len - 1) * of.heads + head;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum[STATE_BLOCKS][P / 8][4];
    UNROLL for (int m = 0; m < STATE_BLOCKS; m++) clear(sum[m]);
    for (i64 first = 0; first < at.len; first += ROWS) {
        int live = at.rows(first);
        i64 row = at.start + first;
        auto weight = [&](int r) {
            i64 i = (row + r) * of.heads + head;
            return p.back ? expf(of.sums[i]) : expf(of.sums[last] - of.sums[i]) * of.dt[i];
        };
        __syncthreads();
        fill(left, p.back ? c_of(of, row, group) : b_of(of, row, group), width(of), ROWS, live);
        if (p.back) fill(right, p.dy + (row * of.heads + head) * P, of.heads * P, ROWS, live, weight);
        else fill(right, x_of(of, row, head), width(of), ROWS, live, weight);
        __syncthreads();
        UNROLL for (int m = 0; m < STATE_BLOCKS; m++) {
            int block = warp + m * (STATE_THREADS / 32);
            if (block >= N / 16) continue;
            UNROLL for (int k = 0; k < ROWS; k += 16) {
                u32 a[4];
                left.left_of_transpose(a, k, 16 * block, lane);
                UNROLL for (int n = 0; n < P / 16; n++) {
                    u32 b[4];
                    right.right(b, k, 16 * n, lane);
                    mma(sum[m][2 * n], a, b[0], b[1]);
                    mma(sum[m][2 * n + 1], a, b[2], b[3]);
                }
            }
        }
    }
    float* states = p.states + at.state(of, head);
    UNROLL for (int m = 0; m < STATE_BLOCKS; m++) {
        int block = warp + m * (STATE_THREADS / 32);
        if (block >= N / 16) continue;
        UNROLL for (int h = 0; h < 2; h++)
            UNROLL for (int n = 0; n < P / 8; n++)
                store2(states + (16 * block + 8 * h + lane / 4) * P + 8 * n + 2 * (lane % 4), sum[m][n][2 * h], sum[m][n][2 * h + 1]);
    }
}

struct ChunkScan {
    Scan of;
    const float* before;
    W0* y;
};

// y = what is read from the state before, what the chunk's own tokens bring, and D x. Grid: (chunks * tiles, heads, batch).
KERNEL(chunk_scan, ChunkScan, THREADS) {
    SHARED(memory);
    const Scan& of = p.of;
    Place at(of, blockIdx.x / tiles(of), blockIdx.z);
    i64 first = blockIdx.x % tiles(of) * ROWS, head = blockIdx.y, group = group_of(of, head), row0 = at.start + first;
    if (first >= at.len) return;
    Tile<N> c{reinterpret_cast<bf16*>(memory)};
    Tile<P> state{c.row(ROWS)};
    Tile<N> b{c.row(ROWS)};
    Tile<P> x{b.row(ROWS)};
    constexpr int OTHERS = N * (P + 8) > ROWS * (N + P + 16) ? N * (P + 8) : ROWS * (N + P + 16);
    float* own = reinterpret_cast<float*>(c.row(ROWS) + OTHERS);
    float* sums = own + ROWS;
    float* dts = sums + ROWS;
    int left = at.rows(first), mine = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    fill(c, c_of(of, row0, group), width(of), ROWS, left);
    fill(state, p.before + at.state(of, head), P, N, N);
    numbers(own, of, of.sums, row0, head, left);
    __syncthreads();
    float y[P / 8][4];
    clear(y);
    product(y, c, state, mine, lane);
    UNROLL for (int n = 0; n < P / 8; n++)
        UNROLL for (int i = 0; i < 4; i++) y[n][i] *= expf(own[mine + i / 2 * 8 + lane / 4]);
    for (i64 from = 0; from <= first; from += ROWS) {
        int live = at.rows(from);
        i64 row = at.start + from;
        __syncthreads();
        fill(b, b_of(of, row, group), width(of), ROWS, live);
        fill(x, x_of(of, row, head), width(of), ROWS, live);
        numbers(sums, of, of.sums, row, head, live);
        numbers(dts, of, of.dt, row, head, live);
        __syncthreads();
        float s[ROWS / 8][4];
        clear(s);
        product_t<ROWS>(s, c, b, mine, lane);
        UNROLL for (int n = 0; n < ROWS / 8; n++)
            UNROLL for (int i = 0; i < 4; i++) {
                int t = mine + i / 2 * 8 + lane / 4, k = 8 * n + 2 * (lane % 4) + i % 2;
                s[n][i] = from + k <= first + t && t < left ? s[n][i] * expf(own[t] - sums[k]) * dts[k] : 0.0f;
            }
        gather(y, s, x, lane);
    }
    float skip = to_float(of.params[2 * of.heads + head]);
    UNROLL for (int h = 0; h < 2; h++) {
        int t = mine + 8 * h + lane / 4;
        if (t >= left) continue;
        const bf16* from = x_of(of, row0 + t, head);
        W0* to = p.y + ((row0 + t) * of.heads + head) * P;
        UNROLL for (int n = 0; n < P / 8; n++) {
            int i = 8 * n + 2 * (lane % 4);
            store2(to + i, y[n][2 * h] + skip * to_float(from[i]), y[n][2 * h + 1] + skip * to_float(from[i + 1]));
        }
    }
}

struct ChunkScanBwdX {
    Scan of;
    const bf16* dy;
    const float* before;
    const float* behind; // gradients of the states
    W0* d_xbc;
    float* read; // [rows, heads], as ssm_ends in ssm.cu takes them
    float* kept;
    float* dots;
    float* skips;
};

// The gradient of x, and what there is by token and head. Grid: (chunks * tiles, heads, batch).
KERNEL(chunk_scan_bwd_x, ChunkScanBwdX, THREADS) {
    SHARED(memory);
    const Scan& of = p.of;
    Place at(of, blockIdx.x / tiles(of), blockIdx.z);
    i64 first = blockIdx.x % tiles(of) * ROWS, head = blockIdx.y, group = group_of(of, head), row0 = at.start + first;
    if (first >= at.len) return;
    Tile<N> b{reinterpret_cast<bf16*>(memory)};
    Tile<P> state{b.row(ROWS)};
    Tile<N> c{b.row(ROWS)};
    Tile<P> dy{c.row(ROWS)};
    constexpr int OTHERS = N * (P + 8) > ROWS * (N + P + 16) ? N * (P + 8) : ROWS * (N + P + 16);
    float* own = reinterpret_cast<float*>(b.row(ROWS) + OTHERS);
    float* sums = own + ROWS;
    int left = at.rows(first), mine = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    float last = of.sums[(at.start + at.len - 1) * of.heads + head], skip = to_float(of.params[2 * of.heads + head]);
    auto dy_of = [&](i64 row) { return p.dy + (row * of.heads + head) * P; };
    // A row of an accumulator by a row of x or of dy.
    auto dot = [&](const float (&s)[P / 8][4], int h, const bf16* by) {
        float sum = 0;
        UNROLL for (int n = 0; n < P / 8; n++)
            UNROLL for (int j = 0; j < 2; j++) sum += s[n][2 * h + j] * to_float(by[8 * n + 2 * (lane % 4) + j]);
        return row_sum(sum);
    };
    // Rows that are not there have the numbers of the first, and write nothing.
    auto row_of = [&](int h) {
        int t = mine + 8 * h + lane / 4;
        return row0 + (t < left ? t : 0);
    };
    auto put = [&](float* to, int h, float x) {
        if (mine + 8 * h + lane / 4 < left && lane % 4 == 0) to[row_of(h) * of.heads + head] = x;
    };
    fill(b, b_of(of, row0, group), width(of), ROWS, left);
    fill(state, p.behind + at.state(of, head), P, N, N);
    numbers(own, of, of.sums, row0, head, left);
    __syncthreads();
    // Of x times dt: first by what is left of it behind the chunk.
    float d[P / 8][4];
    clear(d);
    product(d, b, state, mine, lane);
    UNROLL for (int n = 0; n < P / 8; n++)
        UNROLL for (int i = 0; i < 4; i++) d[n][i] *= expf(last - own[mine + i / 2 * 8 + lane / 4]);
    UNROLL for (int h = 0; h < 2; h++)
        put(p.kept, h, dot(d, h, x_of(of, row_of(h), head)) * of.dt[row_of(h) * of.heads + head]);
    for (i64 from = first; from < at.len; from += ROWS) {
        int live = at.rows(from);
        i64 row = at.start + from;
        __syncthreads();
        fill(c, c_of(of, row, group), width(of), ROWS, live);
        fill(dy, dy_of(row), of.heads * P, ROWS, live);
        numbers(sums, of, of.sums, row, head, live);
        __syncthreads();
        float s[ROWS / 8][4];
        clear(s);
        product_t<ROWS>(s, b, c, mine, lane);
        UNROLL for (int n = 0; n < ROWS / 8; n++)
            UNROLL for (int i = 0; i < 4; i++) {
                int k = mine + i / 2 * 8 + lane / 4, t = 8 * n + 2 * (lane % 4) + i % 2;
                s[n][i] = first + k <= from + t && t < live ? s[n][i] * expf(sums[t] - own[k]) : 0.0f;
            }
        gather(d, s, dy, lane);
    }
    UNROLL for (int h = 0; h < 2; h++) {
        i64 row = row_of(h);
        const bf16* x = x_of(of, row, head);
        put(p.dots, h, dot(d, h, x));
        float by = of.dt[row * of.heads + head], beside = 0;
        bool there = mine + 8 * h + lane / 4 < left;
        W0* to = p.d_xbc + row * width(of) + head * P;
        UNROLL for (int n = 0; n < P / 8; n++) {
            int i = 8 * n + 2 * (lane % 4);
            float low = to_float(dy_of(row)[i]), high = to_float(dy_of(row)[i + 1]);
            beside += low * to_float(x[i]) + high * to_float(x[i + 1]);
            if (there) store2(to + i, by * d[n][2 * h] + skip * low, by * d[n][2 * h + 1] + skip * high);
        }
        put(p.skips, h, row_sum(beside));
    }
    // What these tokens read from the state before, by its gradient.
    __syncthreads();
    fill(b, c_of(of, row0, group), width(of), ROWS, left);
    fill(state, p.before + at.state(of, head), P, N, N);
    __syncthreads();
    clear(d);
    product(d, b, state, mine, lane);
    UNROLL for (int h = 0; h < 2; h++) put(p.read, h, dot(d, h, dy_of(row_of(h))) * expf(own[mine + 8 * h + lane / 4]));
}

struct ChunkScanBwdPairs {
    Scan of;
    const bf16* dy;
    float* d_scores; // [rows, groups, pitch], by a token of the same chunk
    float* pairs;    // [rows, heads]
    i64 pitch, some; // heads of a block of threads
};

// Gradients of the scores that the heads of a group share, and of sums by pairs of tokens. Both are added to atomically:
// their last digits depend on the order. Grid: (chunks * pairs of tiles, groups * parts of their heads, batch).
KERNEL(chunk_scan_bwd_pairs, ChunkScanBwdPairs, THREADS) {
    SHARED(memory);
    const Scan& of = p.of;
    i64 count = tiles(of), pair = blockIdx.x % (count * (count + 1) / 2), i = 0;
    for (; pair > i; i++) pair -= i + 1;
    Place at(of, blockIdx.x / (count * (count + 1) / 2), blockIdx.z);
    // Tokens t that read, and k that are read.
    i64 first_t = i * ROWS, first_k = pair * ROWS, row_t = at.start + first_t, row_k = at.start + first_k;
    if (first_t >= at.len) return;
    i64 share = of.heads / of.groups, parts = (share + p.some - 1) / p.some, group = blockIdx.y / parts;
    i64 head = group * share + blockIdx.y % parts * p.some, end = head + p.some < (group + 1) * share ? head + p.some : (group + 1) * share;
    int left_t = at.rows(first_t), left_k = at.rows(first_k), mine = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    Tile<N> c{reinterpret_cast<bf16*>(memory)};
    Tile<N> b{c.row(ROWS)};
    Tile<P> dy{c.at};
    Tile<P> x{dy.row(ROWS)};
    constexpr int WIDEST = N > P ? N : P;
    float* sums_t = reinterpret_cast<float*>(c.at + 2 * ROWS * (WIDEST + 8));
    float* sums_k = sums_t + ROWS;
    float* dts = sums_k + ROWS;
    fill(c, c_of(of, row_t, group), width(of), ROWS, left_t);
    fill(b, b_of(of, row_k, group), width(of), ROWS, left_k);
    __syncthreads();
    float scores[ROWS / 8][4], sum[ROWS / 8][4];
    clear(scores);
    clear(sum);
    product_t<ROWS>(scores, c, b, mine, lane);
    for (; head < end; head++) {
        __syncthreads();
        fill(dy, p.dy + (row_t * of.heads + head) * P, of.heads * P, ROWS, left_t);
        fill(x, x_of(of, row_k, head), width(of), ROWS, left_k);
        numbers(sums_t, of, of.sums, row_t, head, left_t);
        numbers(sums_k, of, of.sums, row_k, head, left_k);
        numbers(dts, of, of.dt, row_k, head, left_k);
        __syncthreads();
        float s[ROWS / 8][4], by_t[2] = {};
        clear(s);
        product_t<ROWS>(s, dy, x, mine, lane);
        UNROLL for (int n = 0; n < ROWS / 8; n++) {
            float by_k[2] = {};
            UNROLL for (int e = 0; e < 4; e++) {
                int t = mine + e / 2 * 8 + lane / 4, k = 8 * n + 2 * (lane % 4) + e % 2;
                bool sees = first_k + k <= first_t + t && t < left_t;
                float d = sees ? s[n][e] * expf(sums_t[t] - sums_k[k]) * dts[k] : 0.0f;
                sum[n][e] += d;
                by_t[e / 2] += d * scores[n][e];
                by_k[e % 2] += d * scores[n][e];
            }
            UNROLL for (int j = 0; j < 2; j++) {
                UNROLL for (int lanes = 4; lanes < 32; lanes *= 2) by_k[j] += __shfl_xor_sync(0xffffffffu, by_k[j], lanes);
                int k = 8 * n + 2 * (lane % 4) + j;
                if (lane < 4 && k < left_k) atomicAdd(p.pairs + (row_k + k) * of.heads + head, -by_k[j]);
            }
        }
        UNROLL for (int h = 0; h < 2; h++) {
            float all = row_sum(by_t[h]);
            int t = mine + 8 * h + lane / 4;
            if (lane % 4 == 0 && t < left_t) atomicAdd(p.pairs + (row_t + t) * of.heads + head, all);
        }
    }
    UNROLL for (int h = 0; h < 2; h++) {
        int t = mine + 8 * h + lane / 4;
        if (t >= left_t) continue;
        float* to = p.d_scores + ((row_t + t) * of.groups + group) * p.pitch + first_k + 2 * (lane % 4);
        UNROLL for (int n = 0; n < ROWS / 8; n++) add_two(to + 8 * n, sum[n][2 * h], sum[n][2 * h + 1]);
    }
}

struct ChunkScanBwdBc {
    Scan of;
    const bf16* dy;
    const float* d_scores;
    const float* states; // before for C, gradients behind for B
    W0* d_xbc;
    i64 pitch, of_b;
};

// The gradient of C, or of B, over all heads of a group. Grid: (chunks * tiles, groups, batch).
KERNEL(chunk_scan_bwd_bc, ChunkScanBwdBc, THREADS) {
    SHARED(memory);
    const Scan& of = p.of;
    Place at(of, blockIdx.x / tiles(of), blockIdx.z);
    i64 first = blockIdx.x % tiles(of) * ROWS, group = blockIdx.y, row0 = at.start + first;
    if (first >= at.len) return;
    Tile<ROWS> scores{reinterpret_cast<bf16*>(memory)};
    Tile<N> other{scores.row(ROWS)};
    Tile<P> rows{scores.at};
    Tile<P> state{rows.row(ROWS)};
    int left = at.rows(first), mine = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    float sum[N / 8][4];
    clear(sum);
    // By tokens of the chunk: before it for C, behind it for B.
    for (i64 from = p.of_b ? first : 0; p.of_b ? from < at.len : from <= first; from += ROWS) {
        i64 t = p.of_b ? from : first, k = p.of_b ? first : from, row = at.start + from;
        int live = at.rows(from);
        __syncthreads();
        fill(scores, p.d_scores + ((at.start + t) * of.groups + group) * p.pitch + k, of.groups * p.pitch, ROWS, at.rows(t));
        fill(other, p.of_b ? c_of(of, row, group) : b_of(of, row, group), width(of), ROWS, live);
        __syncthreads();
        UNROLL for (int k = 0; k < ROWS; k += 16) {
            u32 a[4];
            if (p.of_b) scores.left_of_transpose(a, k, mine, lane);
            else scores.left(a, mine, k, lane);
            UNROLL for (int n = 0; n < N / 16; n++) {
                u32 b[4];
                other.right(b, k, 16 * n, lane);
                mma(sum[2 * n], a, b[0], b[1]);
                mma(sum[2 * n + 1], a, b[2], b[3]);
            }
        }
    }
    i64 share = of.heads / of.groups;
    for (i64 head = group * share; head < (group + 1) * share; head++) {
        float last = of.sums[(at.start + at.len - 1) * of.heads + head];
        auto weight = [&](int r) {
            i64 i = (row0 + r) * of.heads + head;
            return p.of_b ? expf(last - of.sums[i]) * of.dt[i] : expf(of.sums[i]);
        };
        __syncthreads();
        if (p.of_b) fill(rows, x_of(of, row0, head), width(of), ROWS, left, weight);
        else fill(rows, p.dy + (row0 * of.heads + head) * P, of.heads * P, ROWS, left, weight);
        fill(state, p.states + at.state(of, head), P, N, N);
        __syncthreads();
        product_t<N>(sum, rows, state, mine, lane);
    }
    UNROLL for (int h = 0; h < 2; h++) {
        int t = mine + 8 * h + lane / 4;
        if (t >= left) continue;
        W0* to = p.d_xbc + (row0 + t) * width(of) + of.heads * P + (p.of_b ? 0 : of.groups * N) + group * N + 2 * (lane % 4);
        UNROLL for (int n = 0; n < N / 8; n++) store2(to + 8 * n, sum[n][2 * h], sum[n][2 * h + 1]);
    }
}
