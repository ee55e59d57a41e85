// Rows moved about: the local halves of an all-to-all, and the order of an all-gather. The host lists what moves, runs
// of `len` elements with where they come from and go to, and the kernel is a gather over that list.
#include "wide.cuh"

constexpr int THREADS = 256;

struct Move {
    i64 from, to; // elements; `from` -1: zeros
    i64 add;      // onto what is there
};

struct Moves {
    const R0* from;
    W0* to;
    const Move* moves;
    i64 count, len;
    i64 places; // the bits of all places, to see what all of them are multiples of
};

KERNEL(moves, Moves, THREADS) {
    WIDE(p.len | p.places, aligned(p.from, p.to), each<N>(p.count * p.len, [&](i64 i) {
        Move m = p.moves[i / p.len];
        float x[N] = {};
        if (m.from >= 0) load(x, p.from + m.from + i % p.len);
        W0* to = p.to + m.to + i % p.len;
        if (m.add) {
            float old[N];
            load(old, to);
            UNROLL for (int j = 0; j < N; j++) x[j] += old[j];
        }
        store(to, x);
    }));
}
