// What stands for communication where only one rank is there: a wait of a given length, and a copy by a few blocks of
// threads, as NCCL's kernels make them.
#include "wide.cuh"

constexpr int THREADS = 512;

struct Wait {
    i64 ns;
};

// By the GPU's own clock, which ticks every microsecond or faster. Nothing waits where there is no such clock.
KERNEL(wait, Wait, THREADS) {
#ifdef __CUDACC_RTC__
    if (threadIdx.x > 0) return;
    u64 begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do {
        __nanosleep(100);
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begun < u64(p.ns));
#endif
}

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
