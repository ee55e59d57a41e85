// CUDA's execution model on one CPU thread, as far as the kernels use it: a block's threads are coroutines that run in
// a shuffled order up to the next barrier or warp operation. What a kernel may not rely on is made to fail: shared
// memory begins as NaN, an asynchronous copy is done only when it is waited for, and threads that do not meet end the
// program with an error.
#pragma once
// Its checks take a jump to another stack for an error.
#undef _FORTIFY_SOURCE
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>
#include <setjmp.h>
#include <ucontext.h>
#ifdef RACES
#include <sanitizer/tsan_interface.h>
#endif

#define DEVICE inline
struct Dim { unsigned x = 1, y = 1, z = 1; };

namespace emulator {

constexpr size_t STACK = 256 * 1024;

enum State { READY, AT_WARP, AT_BLOCK, DONE };

// With RACES and ThreadSanitizer every thread of a block is one of its own: what two of them do to one address without a
// barrier between them is an error, in whatever order they came. What the emulator itself does is not looked at.
#ifdef RACES
extern "C" {
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
inline void look_away() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
inline void look() { AnnotateIgnoreWritesEnd("", 0), AnnotateIgnoreReadsEnd("", 0); }
inline void leave(void* at) { __tsan_release(at); }
inline void come(void* at) { __tsan_acquire(at); }
#else
inline void look_away() {}
inline void look() {}
inline void leave(void*) {}
inline void come(void*) {}
#endif

// Looks away for as long as it is there.
struct Unseen {
    Unseen() { look_away(); }
    ~Unseen() { look(); }
};

struct Copy { void* to; const void* from; bool there; unsigned bytes; };

// Where a coroutine, or who runs them, goes on.
struct Context {
    ucontext_t first;
    jmp_buf at;
    bool begun = false;
};

// Leaves one for another. A change of contexts asks the system for the mask of signals, which took nine tenths of a
// kernel's time; a jump does not. ThreadSanitizer knows the stacks of contexts alone.
[[gnu::noinline]] inline void change(Context& from, Context& to) {
#ifdef RACES
    swapcontext(&from.first, &to.first);
#else
    from.begun = true;
    if (_setjmp(from.at)) return;
    if (to.begun) _longjmp(to.at, 1);
    setcontext(&to.first);
#endif
}

struct Fiber {
    Context context;
    // Left as it is: most of it is never touched.
    std::unique_ptr<char[]> stack;
    State state = READY;
    // What a warp operation of each lane is about.
    const void* in = nullptr;
    void* out = nullptr;
    int what = 0, arg = 0;
    std::vector<Copy> open;
    void* as_thread = nullptr;
    std::deque<std::vector<Copy>> groups;
};

enum { SYNC, SHUFFLE, MMA, MATRICES, MATRICES_T };

struct Mma { const uint32_t* a; uint32_t b0, b1; };

// As many as a block can have, since a context must not move.
inline std::vector<Fiber> fibers(1024);
inline Context scheduler;
inline int current = 0;
inline std::vector<unsigned char> shared;
inline std::function<void()> body;
inline std::mt19937 shuffle_with(1);

[[noreturn]] inline void fail(const char* why) {
    std::fprintf(stderr, "emulator: %s\n", why);
    std::exit(3);
}

// What comes before a barrier is before what comes behind it: by its number, since one thread may have come to the next
// before another has left.
struct Gate {
    unsigned passed = 0;
    char at[4];
};
inline Gate block_gate, warp_gates[64];
inline void* main_thread = nullptr;
inline char ended;

inline Fiber& me() { return fibers[current]; }

inline void yield(State state) {
    int self = current;
    fibers[self].state = state;
#ifdef RACES
    __tsan_switch_to_fiber(main_thread, __tsan_switch_to_fiber_no_sync);
#endif
    change(fibers[self].context, scheduler);
}

inline float from_bf16(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t half(uint32_t word, int which) { return uint16_t(word >> 16 * which); }

// All 32 lanes have come: does what they ask for.
inline void warp_operation(int first) {
    Fiber* lane = &fibers[first];
    int what = lane[0].what;
    for (int i = 0; i < 32; i++)
        if (lane[i].what != what) fail("lanes of a warp meet at different operations");
    if (what == SHUFFLE) {
        float x[32];
        for (int i = 0; i < 32; i++) x[i] = *static_cast<const float*>(lane[i].in);
        for (int i = 0; i < 32; i++) *static_cast<float*>(lane[i].out) = x[i ^ lane[i].arg];
    } else if (what == MMA) {
        float a[16][16], b[16][8];
        for (int i = 0; i < 32; i++) {
            const Mma& m = *static_cast<const Mma*>(lane[i].in);
            int g = i / 4, t = i % 4;
            for (int j = 0; j < 2; j++) {
                a[g][2 * t + j] = from_bf16(half(m.a[0], j));
                a[g + 8][2 * t + j] = from_bf16(half(m.a[1], j));
                a[g][2 * t + 8 + j] = from_bf16(half(m.a[2], j));
                a[g + 8][2 * t + 8 + j] = from_bf16(half(m.a[3], j));
                b[2 * t + j][g] = from_bf16(half(m.b0, j));
                b[2 * t + 8 + j][g] = from_bf16(half(m.b1, j));
            }
        }
        for (int i = 0; i < 32; i++) {
            float* c = static_cast<float*>(lane[i].out);
            for (int n = 0; n < 4; n++) {
                int row = i / 4 + n / 2 * 8, column = i % 4 * 2 + n % 2;
                float sum = 0;
                for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
                c[n] += sum;
            }
        }
    } else if (what == MATRICES || what == MATRICES_T) {
        for (int i = 0; i < 32; i++)
            for (int m = 0; m < 4; m++) {
                uint16_t pair[2];
                for (int j = 0; j < 2; j++) {
                    int r = i / 4, c = i % 4 * 2 + j;
                    if (what == MATRICES_T) std::swap(r, c);
                    auto* row = static_cast<const unsigned char*>(lane[8 * m + r].in);
                    if (reinterpret_cast<uintptr_t>(row) % 16) fail("a matrix row is not aligned to 16 bytes");
                    std::memcpy(&pair[j], row + 2 * c, 2);
                }
                static_cast<uint32_t*>(lane[i].out)[m] = uint32_t(pair[0]) | uint32_t(pair[1]) << 16;
            }
    }
    if (what == SYNC) warp_gates[first / 32].passed++;
    for (int i = 0; i < 32; i++) lane[i].state = READY;
}

inline void meet(int what, const void* in, void* out, int arg = 0) {
    Unseen unseen;
    Fiber& f = me();
    f.what = what, f.in = in, f.out = out, f.arg = arg;
    yield(AT_WARP);
}

inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Mma m{a, b0, b1};
    meet(MMA, &m, c);
}

inline void load_matrices(uint32_t (&r)[4], const void* row, bool transposed) {
    // Every lane's row is read, whoever gets it.
    for (int i = 0; i < 2; i++) (void)static_cast<const volatile uint64_t*>(row)[i];
    meet(transposed ? MATRICES_T : MATRICES, row, r);
}

inline void copy(void* to, const void* from, bool there, unsigned bytes) {
    if (reinterpret_cast<uintptr_t>(to) % bytes || (there && reinterpret_cast<uintptr_t>(from) % bytes)) fail("an asynchronous copy is not aligned");
    std::memset(to, 0xff, bytes);
    Unseen unseen;
    me().open.push_back({to, from, there, bytes});
}

inline void aligned(const void* at, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(at) % bytes) fail("a wide load or store is not aligned");
}

inline void copies_commit() {
    Unseen unseen;
    me().groups.push_back(std::move(me().open));
    me().open.clear();
}

inline void copies_wait(int left) {
    Unseen unseen;
    auto& groups = me().groups;
    for (; int(groups.size()) > left; groups.pop_front())
        for (Copy c : groups.front()) {
            look();
            if (c.there) std::memcpy(c.to, c.from, c.bytes);
            else std::memset(c.to, 0, c.bytes);
            look_away();
        }
}

// A thread of one block after the other.
inline void entry() {
    for (;;) {
        come(block_gate.at + block_gate.passed % 4);
        body();
        leave(&ended);
        Unseen unseen;
        if (!me().open.empty()) fail("a thread ends with copies that it never committed");
        for (auto& group : me().groups)
            if (!group.empty()) fail("a thread ends before its copies");
        yield(DONE);
    }
}

// Runs one block to its end.
inline void block(int threads) {
    Unseen unseen;
#ifdef RACES
    // Each has a memory of its own.
    std::vector<unsigned char>(shared.size()).swap(shared);
#endif
    std::memset(shared.data(), 0xff, shared.size());
    // What is before this launch is before this block.
    block_gate.passed++;
    leave(block_gate.at + block_gate.passed % 4);
#ifdef RACES
    if (!main_thread) main_thread = __tsan_get_current_fiber();
#endif
    for (int i = 0; i < threads; i++) {
        Fiber& f = fibers[i];
        f.state = READY;
        f.open.clear();
        f.groups.clear();
        // One that has been through a block goes on to this one.
        if (f.stack) continue;
        f.stack.reset(new char[STACK]);
        ucontext_t& first = f.context.first;
        getcontext(&first);
        first.uc_stack.ss_sp = f.stack.get();
        first.uc_stack.ss_size = STACK;
        first.uc_link = nullptr;
        makecontext(&first, entry, 0);
    }
    std::vector<int> order(threads);
    for (int i = 0; i < threads; i++) order[i] = i;
    for (;;) {
        std::shuffle(order.begin(), order.end(), shuffle_with);
        bool moved = false;
        for (int i : order)
            if (fibers[i].state == READY) {
                current = i;
                moved = true;
#ifdef RACES
                if (!fibers[i].as_thread) fibers[i].as_thread = __tsan_create_fiber(0);
                __tsan_switch_to_fiber(fibers[i].as_thread, __tsan_switch_to_fiber_no_sync);
#endif
                change(scheduler, fibers[i].context);
            }
        for (int w = 0; w < threads; w += 32) {
            int here = 0;
            for (int i = w; i < w + 32; i++) here += fibers[i].state == AT_WARP;
            if (here == 32) warp_operation(w), moved = true;
        }
        int done = 0, waiting = 0;
        for (int i = 0; i < threads; i++) done += fibers[i].state == DONE, waiting += fibers[i].state == AT_BLOCK;
        if (done == threads) return;
        if (waiting > 0 && waiting + done == threads) {
            if (done > 0) fail("some threads have ended and others wait at a barrier");
            for (int i = 0; i < threads; i++) fibers[i].state = READY;
            block_gate.passed++;
            moved = true;
        }
        if (!moved) fail("threads wait for each other at different places");
    }
}

} // namespace emulator

struct Index { unsigned x, y, z; };
inline Dim gridDim, blockDim;
inline Index blockIdx;
struct ThreadIdx {
    struct X { operator unsigned() const { return unsigned(emulator::current); } } x;
};
inline ThreadIdx threadIdx;

inline void __syncthreads() {
    void* at = emulator::block_gate.at + (emulator::block_gate.passed + 1) % 4;
    emulator::leave(at);
    {
        emulator::Unseen unseen;
        emulator::yield(emulator::AT_BLOCK);
    }
    emulator::come(at);
}
inline void __syncwarp(unsigned = 0xffffffffu) {
    emulator::Gate& gate = emulator::warp_gates[emulator::current / 32];
    void* at = gate.at + (gate.passed + 1) % 4;
    emulator::leave(at);
    emulator::meet(emulator::SYNC, nullptr, nullptr);
    emulator::come(at);
}
inline float __shfl_xor_sync(unsigned, float x, int lanes) {
    float out;
    emulator::meet(emulator::SHUFFLE, &x, &out, lanes);
    return out;
}
inline int __all_sync(unsigned, int yes) {
    float all = yes ? 1.0f : 0.0f;
    for (int lanes = 16; lanes > 0; lanes /= 2) all = std::fmin(all, __shfl_xor_sync(0xffffffffu, all, lanes));
    return all != 0;
}
inline float __uint_as_float(unsigned x) { float f; std::memcpy(&f, &x, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned x; std::memcpy(&x, &f, 4); return x; }
inline float __int_as_float(int x) { return __uint_as_float(unsigned(x)); }
// One thread runs at a time: atomic for ThreadSanitizer alone.
template <class T> inline T atomic_add(T* at, T x) {
    T old, sum;
    __atomic_load(at, &old, __ATOMIC_RELAXED);
    sum = old + x;
    __atomic_store(at, &sum, __ATOMIC_RELAXED);
    return old;
}
inline float atomicAdd(float* at, float x) { return atomic_add(at, x); }
inline double atomicAdd(double* at, double x) { return atomic_add(at, x); }
using std::fmaxf;
using std::fminf;
using std::exp2f;
using std::log2f;
using std::log1pf;

// A kernel by name, for the program that runs it.
struct Entry { const char* name; int threads; size_t words; void (*run)(const void*); };
inline std::vector<Entry>& entries() { static std::vector<Entry> all; return all; }
struct Registered { explicit Registered(Entry e) { entries().push_back(e); } };

#define KERNEL(name, Params, threads)                                                               \
    static void name(const Params& p);                                                              \
    static Registered registered_##name({#name, threads, sizeof(Params) / 8, [](const void* words) { \
        name(*static_cast<const Params*>(words));                                                    \
    }});                                                                                            \
    static void name(const Params& p)
#define KERNEL_OF(name, Params, threads, blocks) KERNEL(name, Params, threads)
#define SHARED(name) unsigned char* name = emulator::shared.data()
