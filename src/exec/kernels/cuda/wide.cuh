// Eight neighbours at a time where rows allow it, one otherwise: memory-bound kernels live on wide loads.
#pragma once
#include "common.cuh"

struct alignas(16) Words4 {
    u32 at[4];
};

// At an address that has to be aligned: a GPU faults where it is not, and so does the emulator.
template <class T> DEVICE const Words4& words(const T* at) {
#ifndef __CUDACC_RTC__
    emulator::aligned(at, 16);
#endif
    return *reinterpret_cast<const Words4*>(at);
}
template <class T> DEVICE Words4& words(T* at) { return const_cast<Words4&>(words(const_cast<const T*>(at))); }

struct alignas(8) Words2 {
    u32 at[2];
};

template <class T> DEVICE const Words2& half_of_words(const T* at) {
#ifndef __CUDACC_RTC__
    emulator::aligned(at, 8);
#endif
    return *reinterpret_cast<const Words2*>(at);
}

template <int N> DEVICE void load(float (&to)[N], const float* x) {
    if constexpr (N == 1) to[0] = x[0];
    else UNROLL for (int i = 0; i < N; i += 4) {
        Words4 w = words(x + i);
        UNROLL for (int j = 0; j < 4; j++) to[i + j] = __uint_as_float(w.at[j]);
    }
}

template <int N> DEVICE void load(float (&to)[N], const bf16* x) {
    if constexpr (N == 1) to[0] = to_float(x[0]);
    else if constexpr (N == 4) {
        Words2 w = half_of_words(x);
        UNROLL for (int j = 0; j < 2; j++) {
            to[2 * j] = __uint_as_float(w.at[j] << 16);
            to[2 * j + 1] = __uint_as_float(w.at[j] & 0xffff0000u);
        }
    } else {
        Words4 w = words(x);
        UNROLL for (int j = 0; j < 4; j++) {
            to[2 * j] = __uint_as_float(w.at[j] << 16);
            to[2 * j + 1] = __uint_as_float(w.at[j] & 0xffff0000u);
        }
    }
}

// Eight neighbours as they lie in memory: bf16 that is loaded ahead takes half of the registers that way.
template <class T> struct Eight {
    Words4 at[sizeof(T) / 2];
};

template <class T> DEVICE Eight<T> eight(const T* x) {
    Eight<T> r;
    UNROLL for (int i = 0; i < int(sizeof(T) / 2); i++) r.at[i] = words(x + i * 16 / int(sizeof(T)));
    return r;
}

DEVICE void unpack(float (&to)[8], const Eight<float>& x) {
    UNROLL for (int i = 0; i < 8; i++) to[i] = __uint_as_float(x.at[i / 4].at[i % 4]);
}

DEVICE void unpack(float (&to)[8], const Eight<bf16>& x) {
    UNROLL for (int i = 0; i < 4; i++) {
        to[2 * i] = __uint_as_float(x.at[0].at[i] << 16);
        to[2 * i + 1] = __uint_as_float(x.at[0].at[i] & 0xffff0000u);
    }
}

template <int N> DEVICE void store(float* to, const float (&x)[N]) {
    if constexpr (N == 1) to[0] = x[0];
    else UNROLL for (int i = 0; i < N; i += 4) {
        Words4 w;
        UNROLL for (int j = 0; j < 4; j++) w.at[j] = __float_as_uint(x[i + j]);
        words(to + i) = w;
    }
}

template <int N> DEVICE void store(bf16* to, const float (&x)[N]) {
    if constexpr (N == 1) to[0] = from_float<bf16>(x[0]);
    else if constexpr (N == 4) {
        Words2 w;
        UNROLL for (int j = 0; j < 2; j++) w.at[j] = pack_bf16(x[2 * j], x[2 * j + 1]);
        const_cast<Words2&>(half_of_words(to)) = w;
    } else {
        Words4 w;
        UNROLL for (int j = 0; j < 4; j++) w.at[j] = pack_bf16(x[2 * j], x[2 * j + 1]);
        words(to) = w;
    }
}

// Calls `f` with every N-th index below `n`, shared out over the grid.
template <int N, class F> DEVICE void each(i64 n, F f) {
    i64 step = i64(gridDim.x) * blockDim.x * N;
    for (i64 i = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * N; i < n; i += step) f(i);
}

// Whether all of these can be read 16 bytes at a time: parts of buffers begin anywhere. Null is nobody's.
template <class... Of> DEVICE bool aligned(const Of*... at) {
    u64 all = 0;
    ((all |= reinterpret_cast<u64>(at)), ...);
    return all % 16 == 0;
}

// The body of a kernel over rows of `cols`, for `wide` elements at a time or, where `fits` does not hold, one. Neighbouring
// threads should touch neighbouring 16 bytes: four floats, or eight bf16.
#define WIDE_BY(wide, cols, fits, ...)       \
    do {                                     \
        if ((cols) % (wide) == 0 && (fits)) { \
            constexpr int N = (wide);        \
            __VA_ARGS__;                     \
        } else {                             \
            constexpr int N = 1;             \
            __VA_ARGS__;                     \
        }                                    \
    } while (0)
#define WIDE(cols, fits, ...) WIDE_BY(8, cols, fits, __VA_ARGS__)

#ifndef R0
#define R0 bf16
#endif
#ifndef R1
#define R1 bf16
#endif
#ifndef R2
#define R2 bf16
#endif
#ifndef R3
#define R3 bf16
#endif
#ifndef R4
#define R4 bf16
#endif
#ifndef W0
#define W0 bf16
#endif
#ifndef W1
#define W1 bf16
#endif
#ifndef W2
#define W2 bf16
#endif
#ifndef W3
#define W3 bf16
#endif
