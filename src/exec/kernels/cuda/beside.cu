// What stands for communication's kernels where only one rank is there: a copy by a few blocks of threads, as NCCL's make
// them.
#include "wide.cuh"

constexpr int THREADS = 512;

struct FewCopy {
    const float* from;
    float* to;
    i64 bytes; // a multiple of 128
};

// Eight loads of 16 bytes are under way before the first is stored.
KERNEL(few_copy, FewCopy, THREADS) {
    constexpr int AT_ONCE = 8;
    i64 threads = i64(gridDim.x) * THREADS, count = p.bytes / 16;
    for (i64 at = i64(blockIdx.x) * THREADS + threadIdx.x; at < count; at += threads * AT_ONCE) {
        Words4 w[AT_ONCE];
        UNROLL for (int i = 0; i < AT_ONCE; i++)
            if (at + i * threads < count) w[i] = words(p.from + 4 * (at + i * threads));
        UNROLL for (int i = 0; i < AT_ONCE; i++)
            if (at + i * threads < count) words(p.to + 4 * (at + i * threads)) = w[i];
    }
}
