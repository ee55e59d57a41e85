// The two ends of the model, where token ids are. Shapes: ids, targets [rows]; table, dtable [own, cols]; x, dx [rows,
// cols]; logits [rows, cols]. A part of a table, or of the logits, has the ids `first` .. `first + own`.
#include "wide.cuh"

constexpr int THREADS = 256;

struct Embed {
    const u32* ids;
    const R1* table;
    W0* x;
    i64 rows, cols, first, own;
};

KERNEL(embed, Embed, THREADS) {
    WIDE(p.cols, aligned(p.table, p.x), each<N>(p.rows * p.cols, [&](i64 i) {
        i64 at = i64(p.ids[i / p.cols]) - p.first;
        float x[N] = {};
        if (at >= 0 && at < p.own) load(x, p.table + at * p.cols + i % p.cols);
        store(p.x + i, x);
    }));
}

// Rows of one id meet at one row of the table: added atomically, so the last digits depend on the order.
struct EmbedBwd {
    const u32* ids;
    const R1* dx;
    float* dtable;
    i64 rows, cols, first, own;
};

KERNEL(embed_bwd, EmbedBwd, THREADS) {
    each<1>(p.rows * p.cols, [&](i64 i) {
        i64 at = i64(p.ids[i / p.cols]) - p.first;
        if (at >= 0 && at < p.own) atomicAdd(p.dtable + at * p.cols + i % p.cols, to_float(p.dx[i]));
    });
}

// Learned positions: x + the table's row of each row's position.
struct Positions {
    W0* x;
    const R1* table;
    const i64* positions; // [rows]
    i64 rows, cols;
};

KERNEL(positions, Positions, THREADS) {
    WIDE(p.cols, aligned(p.x, p.table), each<N>(p.rows * p.cols, [&](i64 i) {
        float x[N], row[N];
        load(x, p.x + i);
        load(row, p.table + p.positions[i / p.cols] * p.cols + i % p.cols);
        UNROLL for (int j = 0; j < N; j++) x[j] += row[j];
        store(p.x + i, x);
    }));
}

struct PositionsBwd {
    const R0* dx;
    float* dtable;
    const i64* positions; // [rows]
    i64 rows, cols;
};

KERNEL(positions_bwd, PositionsBwd, THREADS) {
    each<1>(p.rows * p.cols, [&](i64 i) {
        atomicAdd(p.dtable + p.positions[i / p.cols] * p.cols + i % p.cols, to_float(p.dx[i]));
    });
}

struct CrossEntropy {
    W0* logits;
    const u32* targets;
    float* losses; // [rows]: of each token, times scale
    i64 rows, cols, own;
    f64 scale;
};

// The greatest of a row's first `own` elements and the sum of exp(x - greatest), in one pass over memory.
struct Softmax {
    float top, sum;
};

template <int N, class T> DEVICE Softmax softmax(const T* row, i64 own, float* scratch) {
    float top = -INFINITY_F, sum = 0;
    for (i64 c = i64(threadIdx.x) * N; c < own; c += THREADS * N) {
        float x[N], most = top;
        load(x, row + c);
        UNROLL for (int j = 0; j < N; j++) most = fmaxf(most, x[j]);
        if (most == -INFINITY_F) continue;
        sum *= expf(top - most);
        UNROLL for (int j = 0; j < N; j++) sum += expf(x[j] - most);
        top = most;
    }
    float all = block_max(top, scratch);
    if (all == -INFINITY_F) return {all, 0};
    return {all, block_sum(top == -INFINITY_F ? 0.0f : sum * expf(top - all), scratch)};
}

// The logits become scale (softmax - onehot).
KERNEL(cross_entropy, CrossEntropy, THREADS) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    float scale = float(p.scale);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        W0* logits = p.logits + row * p.cols;
        i64 target = p.targets[row];
        float at_target = to_float(logits[target]);
        WIDE(p.cols | p.own, aligned(p.logits), {
            Softmax s = softmax<N>(logits, p.own, scratch);
            for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N) {
                float x[N];
                load(x, logits + c);
                UNROLL for (int j = 0; j < N; j++)
                    x[j] = c + j < p.own ? scale * (expf(x[j] - s.top) / s.sum - (c + j == target ? 1.0f : 0.0f)) : 0.0f;
                store(logits + c, x);
            }
            if (threadIdx.x == 0) p.losses[row] = scale * (logf(s.sum) + s.top - at_target);
        });
    }
}

// The loss in three kernels, as PyTorch has it without a compiler. They have not run on a GPU yet.
struct LogSoftmax {
    const R0* logits;
    W0* log_probs;
    i64 rows, cols;
};

KERNEL(log_softmax, LogSoftmax, THREADS) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const R0* logits = p.logits + row * p.cols;
        W0* log_probs = p.log_probs + row * p.cols;
        WIDE(p.cols, aligned(p.logits, p.log_probs), {
            Softmax s = softmax<N>(logits, p.cols, scratch);
            float log = logf(s.sum);
            for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N) {
                float x[N];
                load(x, logits + c);
                UNROLL for (int j = 0; j < N; j++) x[j] = x[j] - s.top - log;
                store(log_probs + c, x);
            }
        });
    }
}

// The gradient is -scale at the targets and 0 elsewhere.
struct Nll {
    const R0* log_probs;
    const u32* targets;
    W0* d_log_probs;
    float* losses; // [rows]: of each token, times scale
    i64 rows, cols;
    f64 scale;
};

KERNEL(nll, Nll, THREADS) {
    float scale = float(p.scale);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        i64 target = p.targets[row];
        W0* d_log_probs = p.d_log_probs + row * p.cols;
        WIDE(p.cols, aligned(p.d_log_probs), {
            for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N) {
                float d[N];
                UNROLL for (int j = 0; j < N; j++) d[j] = c + j == target ? -scale : 0.0f;
                store(d_log_probs + c, d);
            }
        });
        if (threadIdx.x == 0) p.losses[row] = -scale * to_float(p.log_probs[row * p.cols + target]);
    }
}

struct LogSoftmaxBwd {
    const R0* log_probs;
    const R1* d_log_probs;
    W0* d_logits;
    i64 rows, cols;
};

KERNEL(log_softmax_bwd, LogSoftmaxBwd, THREADS) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const R0* log_probs = p.log_probs + row * p.cols;
        const R1* d_log_probs = p.d_log_probs + row * p.cols;
        W0* d_logits = p.d_logits + row * p.cols;
        WIDE(p.cols, aligned(p.log_probs, p.d_log_probs, p.d_logits), {
            float own = 0;
            for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N) {
                float d[N];
                load(d, d_log_probs + c);
                UNROLL for (int j = 0; j < N; j++) own += d[j];
            }
            float sum = block_sum(own, scratch);
            for (i64 c = i64(threadIdx.x) * N; c < p.cols; c += THREADS * N) {
                float x[N], d[N];
                load(x, log_probs + c);
                load(d, d_log_probs + c);
                UNROLL for (int j = 0; j < N; j++) d[j] -= expf(x[j]) * sum;
                store(d_logits + c, d);
            }
        });
    }
}

// Of a part of the logits: its log-sum-exp, and the target's logit, 0 where it is not among them.
struct VocabStats {
    const R0* logits;
    const u32* targets;
    float* stats; // [rows, 2]
    i64 rows, cols, first, own;
};

KERNEL(vocab_stats, VocabStats, THREADS) {
    SHARED(memory);
    float* scratch = reinterpret_cast<float*>(memory);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const R0* logits = p.logits + row * p.cols;
        WIDE(p.cols | p.own, aligned(p.logits), {
            Softmax s = softmax<N>(logits, p.own, scratch);
            if (threadIdx.x == 0) {
                i64 at = i64(p.targets[row]) - p.first;
                p.stats[2 * row] = s.sum == 0 ? -INFINITY_F : s.top + logf(s.sum);
                p.stats[2 * row + 1] = at >= 0 && at < p.own ? to_float(logits[at]) : 0.0f;
            }
        });
    }
}

struct VocabCrossEntropy {
    W0* logits;
    const u32* targets;
    const float* stats; // [parts, rows, 2]
    float* losses;      // [rows]
    i64 rows, cols, first, own, parts;
    f64 scale;
};

KERNEL(vocab_cross_entropy, VocabCrossEntropy, THREADS) {
    float scale = float(p.scale);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        float top = -INFINITY_F, sum = 0, at_target = 0;
        for (i64 part = 0; part < p.parts; part++) top = fmaxf(top, p.stats[2 * (part * p.rows + row)]);
        for (i64 part = 0; part < p.parts; part++) {
            sum += expf(p.stats[2 * (part * p.rows + row)] - top);
            at_target += p.stats[2 * (part * p.rows + row) + 1];
        }
        float lse = top + logf(sum);
        i64 target = i64(p.targets[row]) - p.first;
        for (i64 c = threadIdx.x; c < p.cols; c += THREADS) {
            W0& x = p.logits[row * p.cols + c];
            x = from_float<W0>(c < p.own ? scale * (expf(to_float(x) - lse) - (c == target ? 1.0f : 0.0f)) : 0.0f);
        }
        if (threadIdx.x == 0) p.losses[row] = scale * (lse - at_target);
    }
}

// loss[0] += the sum of x, in f64, by one block: a million small losses would drown in a float's last digits.
struct AddLoss {
    const float* x;
    float* loss;
    i64 elems;
};

KERNEL(add_loss, AddLoss, THREADS) {
    SHARED(memory);
    f64* sums = reinterpret_cast<f64*>(memory);
    f64 sum = 0;
    for (i64 i = threadIdx.x; i < p.elems; i += THREADS) sum += p.x[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (int(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) p.loss[0] = float(p.loss[0] + sums[0]);
}
