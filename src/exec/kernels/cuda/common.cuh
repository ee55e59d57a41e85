// What every kernel here stands on: number types, warp sums, matrix fragments, asynchronous copies.
//
// Nothing is included, so that NVRTC needs no toolkit. A kernel takes one struct of 8-byte fields: pointers, `i64`,
// `f64`. Operand types are chosen where it is compiled: R0, R1 .. for what it reads, W0, W1 .. for what it writes.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
using f64 = double;

#ifdef __CUDACC_RTC__
#define DEVICE __device__ __forceinline__
#define KERNEL(name, Params, threads) extern "C" __global__ void __launch_bounds__(threads) name(const Params p)
// With room in a multiprocessor's registers for so many blocks of it.
#define KERNEL_OF(name, Params, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name(const Params p)
#define SHARED(name) extern __shared__ __align__(128) u8 name[]
#else
#include "emulator.h"
#endif

#define INFINITY_F __int_as_float(0x7f800000)
#define UNROLL _Pragma("unroll")

// --- bf16: the upper half of a float ---------------------------------------------------------------------------

struct bf16 {
    u16 bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

// To nearest, ties to even; NaN stays NaN.
DEVICE u16 round_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T> DEVICE T from_float(float x);
template <> DEVICE float from_float<float>(float x) { return x; }
template <> DEVICE bf16 from_float<bf16>(float x) { return bf16{round_bf16(x)}; }

// Two values as the halves of a word, `low` first in memory.
DEVICE u32 pack_bf16(float low, float high) {
#ifdef __CUDACC_RTC__
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return u32(round_bf16(low)) | u32(round_bf16(high)) << 16;
#endif
}

// Two neighbours, `x` aligned to both of them.
DEVICE void store2(float* x, float a, float b) {
    x[0] = a;
    x[1] = b;
}
DEVICE void store2(bf16* x, float a, float b) { *reinterpret_cast<u32*>(x) = pack_bf16(a, b); }

// Adds two neighbours, `to` aligned to both of them, in one request where there is such.
DEVICE void add_two(float* to, float a, float b) {
#if defined(__CUDACC_RTC__) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b) : "memory");
#else
    atomicAdd(to, a);
    atomicAdd(to + 1, b);
#endif
}

// --- sums over a warp and a block ------------------------------------------------------------------------------

DEVICE float warp_sum(float x) {
    UNROLL for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

DEVICE float warp_max(float x) {
    UNROLL for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

// Over all threads, to all of them. `scratch` has 32 floats; the block may use it again at once.
template <class Op> DEVICE float block_reduce(float x, float* scratch, float nothing, Op op) {
    UNROLL for (int lanes = 16; lanes > 0; lanes /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = lane < int(blockDim.x) / 32 ? scratch[lane] : nothing;
    UNROLL for (int lanes = 16; lanes > 0; lanes /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    __syncthreads();
    return x;
}

// Several sums at once; `scratch` has as many floats a warp.
template <int N> DEVICE void block_sums(float (&x)[N], float* scratch) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = int(blockDim.x) / 32;
    UNROLL for (int i = 0; i < N; i++) {
        x[i] = warp_sum(x[i]);
        if (lane == 0) scratch[N * warp + i] = x[i];
    }
    __syncthreads();
    UNROLL for (int i = 0; i < N; i++) x[i] = warp_sum(lane < warps ? scratch[N * lane + i] : 0.0f);
    __syncthreads();
}

struct Plus {
    DEVICE float operator()(float a, float b) const { return a + b; }
};
struct Larger {
    DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};

DEVICE float block_sum(float x, float* scratch) { return block_reduce(x, scratch, 0.0f, Plus()); }
DEVICE float block_max(float x, float* scratch) { return block_reduce(x, scratch, -INFINITY_F, Larger()); }

// --- matrix fragments (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type") ---------------------

// c[16,8] += a[16,16] b[16,8]. With g = lane / 4 and t = lane % 4: c holds rows g, g, g+8, g+8 at columns 2t, 2t+1.
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifdef __CUDACC_RTC__
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    emulator::mma(c, a, b0, b1);
#endif
}

// Four 8 x 8 matrices whose rows begin at the addresses of lanes 0-7, 8-15, 16-23 and 24-31: a lane's is `row` elements
// behind the tile's. What of it is known when the kernel is compiled goes into the instruction, if addresses are sums of
// 32-bit numbers.
template <bool TRANSPOSED> DEVICE void load_matrices(u32 (&r)[4], const bf16* tile, int row) {
#ifdef __CUDACC_RTC__
    u32 at = u32(__cvta_generic_to_shared(tile)) + 2 * u32(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
#else
    emulator::load_matrices(r, tile + row, TRANSPOSED);
#endif
}

// A tile in shared memory: rows of `DIM` elements, eight more between rows so that eight rows of a matrix lie in
// different banks.
template <int DIM> struct Tile {
    static constexpr int STRIDE = DIM + 8;
    bf16* at;

    DEVICE bf16* row(int r) const { return at + r * STRIDE; }

    // The 16 x 16 block at (r, c) as the left operand of a product.
    DEVICE void left(u32 (&a)[4], int r, int c, int lane) const {
        load_matrices<false>(a, at, (lane & 15) * STRIDE + (lane >> 4) * 8 + r * STRIDE + c);
    }
    // The transpose of the 16 x 16 block at (r, c) as the left operand.
    DEVICE void left_of_transpose(u32 (&a)[4], int r, int c, int lane) const {
        load_matrices<true>(a, at, ((lane & 7) + (lane >> 4) * 8) * STRIDE + (lane >> 3 & 1) * 8 + r * STRIDE + c);
    }
    // The transpose of the 16 x 16 block at (r, c) as two right operands: rows r .. r+8 are columns of the first.
    DEVICE void right_of_transpose(u32 (&b)[4], int r, int c, int lane) const {
        load_matrices<false>(b, at, ((lane & 7) + (lane >> 4) * 8) * STRIDE + (lane >> 3 & 1) * 8 + r * STRIDE + c);
    }
    // The 16 x 16 block at (r, c) as two right operands: columns c .. c+8 are those of the first.
    DEVICE void right(u32 (&b)[4], int r, int c, int lane) const {
        load_matrices<true>(b, at, (lane & 15) * STRIDE + (lane >> 4) * 8 + r * STRIDE + c);
    }
};

// N products one after the other, the operands of each being loaded while the one before is computed: nothing waits for
// shared memory. `load(i, slot)` fills slot 0 or 1, `use(i, slot)` computes with it.
template <int N, class Load, class Use> DEVICE void in_turn(Load load, Use use) {
    load(0, 0);
    UNROLL for (int i = 0; i < N; i++) {
        if (i + 1 < N) load(i + 1, (i + 1) % 2);
        use(i, i % 2);
    }
}

// --- asynchronous copies into shared memory --------------------------------------------------------------------

// 16 bytes; zeros where `there` is false.
DEVICE void copy16(void* to, const void* from, bool there) {
#ifdef __CUDACC_RTC__
    u32 at = u32(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(there ? 16 : 0));
#else
    emulator::copy(to, from, there, 16);
#endif
}

// The same of 4 bytes.
DEVICE void copy4(void* to, const void* from, bool there) {
#ifdef __CUDACC_RTC__
    u32 at = u32(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(there ? 4 : 0));
#else
    emulator::copy(to, from, there, 4);
#endif
}

DEVICE void copies_commit() {
#ifdef __CUDACC_RTC__
    asm volatile("cp.async.commit_group;");
#else
    emulator::copies_commit();
#endif
}

// Until at most `LEFT` committed groups of this thread are under way.
template <int LEFT> DEVICE void copies_wait() {
#ifdef __CUDACC_RTC__
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT));
#else
    emulator::copies_wait(LEFT);
#endif
}

// `rows` rows of DIM elements, `stride` elements apart, into a tile; rows from `live` on are zeros.
template <int DIM, int THREADS> DEVICE void copy_rows(Tile<DIM> to, const bf16* from, i64 stride, int rows, int live) {
    constexpr int CHUNKS = DIM / 8;
    for (int i = threadIdx.x; i < rows * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS * 8;
        // A row that is not there is not even pointed at.
        copy16(to.row(r) + c, from + (r < live ? r : 0) * stride + c, r < live);
    }
}
