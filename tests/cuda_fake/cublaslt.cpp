// What stands for libcublasLt.so.13: products as its documentation says them, of column-major matrices that descriptors
// tell of, on the host. It shares nothing with what calls it but names and values of cublasLt.h.
#ifdef TRUE_HEADER
#include <cublasLt.h>
#else
#include "cublaslt_names.h"
#endif
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) cublasStatus_t
extern "C" int fake_lies(const void* at, size_t bytes);
extern "C" int fake_put(void* stream, void (*work)(void*), void* of);
extern "C" void fake_fault(const char* what);

namespace {

struct Layout {
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
    // Matrices, and the elements from one to the next.
    int32_t count = 1;
    int64_t apart = 0;
};
struct Desc {
    int32_t transposed[2] = {0, 0}, epilogue = 1, modes[2] = {0, 0};
    const float* scales[2] = {nullptr, nullptr};
    const void* bias = nullptr;
};
struct Preference {
    size_t workspace = 0;
    uint32_t aligned[4] = {256, 256, 256, 256};
};

// What an algorithm was chosen for.
struct Chosen {
    uint64_t mark, workspace;
    uint32_t aligned[4];
};
const uint64_t MARK = 0x6b6c7461736b6d61;

// Of all libraries together.
int handles = 0, open_things = 0;

size_t size_of(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : type == CUDA_R_8F_E4M3 ? 1 : 0; }

float value(const void* at, cudaDataType_t type, uint64_t i) {
    if (type == CUDA_R_32F) return static_cast<const float*>(at)[i];
    if (type == CUDA_R_16BF) {
        uint32_t bits = uint32_t(static_cast<const uint16_t*>(at)[i]) << 16;
        float x;
        return std::memcpy(&x, &bits, 4), x;
    }
    uint8_t code = static_cast<const uint8_t*>(at)[i];
    int exponent = code >> 3 & 15, mantissa = code & 7;
    float x = exponent ? std::ldexp(1 + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
    return code & 128 ? -x : x;
}

void store(void* at, cudaDataType_t type, uint64_t i, float x) {
    if (type == CUDA_R_32F) {
        static_cast<float*>(at)[i] = x;
        return;
    }
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    static_cast<uint16_t*>(at)[i] = std::isnan(x) ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

const Layout& layout(cublasLtMatrixLayout_t l) { return *reinterpret_cast<const Layout*>(l); }

// Why cuBLASLt would not take the product; nothing if it would.
const char* refused(const Desc& d, const Layout& a, const Layout& b, const Layout& c) {
    auto [ta, tb] = d.transposed;
    uint64_t m = ta ? a.cols : a.rows, k = ta ? a.rows : a.cols, kb = tb ? b.cols : b.rows, n = tb ? b.rows : b.cols;
    if (k != kb || m != c.rows || n != c.cols) return "shapes do not meet";
    for (const Layout* l : {&a, &b, &c})
        if (!size_of(l->type) || l->ld < int64_t(l->rows)) return "a type or a leading dimension";
    for (const Layout* l : {&a, &b})
        if (l->count != c.count || l->count < 1) return "operands of several numbers of products";
    bool codes = a.type == CUDA_R_8F_E4M3;
    if (c.count > 1 && (codes || d.epilogue == CUBLASLT_EPILOGUE_BIAS)) return "several products with codes or a bias, which is not told of here";
    if (a.type != b.type || c.type == CUDA_R_8F_E4M3 || (a.type == CUDA_R_32F && c.type != CUDA_R_32F)) return "a combination of types";
    if (codes) {
        if (!ta || tb) return "codes want A transposed and B not";
        for (const Layout* l : {&a, &b, &c})
            if (l->ld * size_of(l->type) % 16) return "codes want leading dimensions of 16 bytes";
        for (int s = 0; s < 2; s++)
            if (d.modes[s] != CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || !d.scales[s]) return "codes want scales";
    } else if (d.modes[0] || d.modes[1]) {
        return "scales without codes";
    }
    if (d.epilogue != CUBLASLT_EPILOGUE_DEFAULT && d.epilogue != CUBLASLT_EPILOGUE_BIAS) return "an epilogue";
    if (d.epilogue == CUBLASLT_EPILOGUE_BIAS && !d.bias) return "a bias without an address";
    return nullptr;
}

struct Product {
    Desc d;
    Layout a, b, c;
    const void *pa, *pb, *pc;
    void* out;
    float alpha, beta;
};

void multiply(const Product& p) {
    if (p.c.cols == 0) return;
    if (p.c.count > 1) {
        for (int64_t i = 0; i < p.c.count; i++) {
            Product one = p;
            auto at = [&](const void* first, Layout& l) {
                l.count = 1;
                return static_cast<const char*>(first) + i * l.apart * int64_t(size_of(l.type));
            };
            one.pa = at(p.pa, one.a), one.pb = at(p.pb, one.b), one.pc = at(p.pc, one.c);
            one.out = const_cast<void*>(one.pc);
            multiply(one);
        }
        return;
    }
    auto [ta, tb] = p.d.transposed;
    uint64_t m = p.c.rows, n = p.c.cols, k = ta ? p.a.rows : p.a.cols;
    bool codes = p.a.type == CUDA_R_8F_E4M3, biased = p.d.epilogue == CUBLASLT_EPILOGUE_BIAS;
    std::vector<float> a(m * k), b(n * k);
    for (uint64_t i = 0; i < m; i++)
        for (uint64_t l = 0; l < k; l++) {
            a[i * k + l] = value(p.pa, p.a.type, ta ? l + i * p.a.ld : i + l * p.a.ld);
            // One for every 128 along k; those of all rows of one block are neighbours.
            if (codes) a[i * k + l] *= p.d.scales[0][l / 128 * m + i];
        }
    for (uint64_t j = 0; j < n; j++)
        for (uint64_t l = 0; l < k; l++) {
            b[j * k + l] = value(p.pb, p.b.type, tb ? j + l * p.b.ld : l + j * p.b.ld);
            if (codes) b[j * k + l] *= p.d.scales[1][l / 128 * n + j];
        }
    for (uint64_t j = 0; j < n; j++)
        for (uint64_t i = 0; i < m; i++) {
            float sum = 0;
            for (uint64_t l = 0; l < k; l++) sum += a[i * k + l] * b[j * k + l];
            sum *= p.alpha;
            uint64_t at = i + j * p.c.ld;
            // What is not wanted is not read: it may be NaN.
            if (p.beta != 0) sum += p.beta * value(p.pc, p.c.type, at);
            if (biased) sum += value(p.d.bias, p.c.type, i);
            store(p.out, p.c.type, at, sum);
        }
}

template <class T> cublasStatus_t take(T& to, const void* from, size_t bytes) {
    if (bytes != sizeof(T)) return fake_fault("an attribute of another size"), CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&to, from, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace

extern "C" __attribute__((visibility("default"))) size_t cublasLtGetVersion() {
    const char* other = std::getenv("FAKE_CUBLASLT_VERSION");
    return other ? std::strtoull(other, nullptr, 10) : 130100;
}

API cublasLtCreate(cublasLtHandle_t* handle) { return *handle = reinterpret_cast<cublasLtHandle_t>(new int), handles++, CUBLAS_STATUS_SUCCESS; }

API cublasLtDestroy(cublasLtHandle_t handle) {
    delete reinterpret_cast<int*>(handle);
    if (--handles == 0 && open_things) fake_fault("descriptors of products are left when the last library is closed");
    return CUBLAS_STATUS_SUCCESS;
}

API cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) {
    open_things++;
    return *made = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, cols, ld}), CUBLAS_STATUS_SUCCESS;
}
API cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t which, const void* from, size_t bytes) {
    Layout& l = *reinterpret_cast<Layout*>(layout);
    switch (which) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return take(l.count, from, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return take(l.apart, from, bytes);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}
API cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { return delete reinterpret_cast<Layout*>(l), open_things--, CUBLAS_STATUS_SUCCESS; }

API cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute, cudaDataType_t scale) {
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_INVALID_VALUE;
    open_things++;
    return *made = reinterpret_cast<cublasLtMatmulDesc_t>(new Desc), CUBLAS_STATUS_SUCCESS;
}
API cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { return delete reinterpret_cast<Desc*>(d), open_things--, CUBLAS_STATUS_SUCCESS; }

API cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t which, const void* from, size_t bytes) {
    Desc& d = *reinterpret_cast<Desc*>(desc);
    switch (which) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return take(d.transposed[0], from, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return take(d.transposed[1], from, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return take(d.epilogue, from, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return take(d.bias, from, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return take(d.scales[0], from, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return take(d.scales[1], from, bytes);
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE: return take(d.modes[0], from, bytes);
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE: return take(d.modes[1], from, bytes);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

API cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
    open_things++;
    return *made = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference), CUBLAS_STATUS_SUCCESS;
}
API cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { return delete reinterpret_cast<Preference*>(p), open_things--, CUBLAS_STATUS_SUCCESS; }

API cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t which, const void* from, size_t bytes) {
    Preference& p = *reinterpret_cast<Preference*>(preference);
    switch (which) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return take(p.workspace, from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return take(p.aligned[0], from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return take(p.aligned[1], from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return take(p.aligned[2], from, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return take(p.aligned[3], from, bytes);
    default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
}

API cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t found[], int* count) {
    *count = 0;
    const Preference& p = *reinterpret_cast<const Preference*>(preference);
    if (const char* why = refused(*reinterpret_cast<const Desc*>(desc), layout(a), layout(b), layout(c))) return fake_fault(why), CUBLAS_STATUS_NOT_SUPPORTED;
    if (c != d || wanted < 1) return CUBLAS_STATUS_INVALID_VALUE;
    std::memset(&found[0], 0, sizeof found[0]);
    Chosen chosen{MARK, p.workspace, {p.aligned[0], p.aligned[1], p.aligned[2], p.aligned[3]}};
    static_assert(sizeof chosen <= sizeof found[0].algo, "an algorithm is smaller than that");
    std::memcpy(&found[0].algo, &chosen, sizeof chosen);
    found[0].state = CUBLAS_STATUS_SUCCESS;
    return *count = 1, CUBLAS_STATUS_SUCCESS;
}

API cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* pa, cublasLtMatrixLayout_t a, const void* pb, cublasLtMatrixLayout_t b, const void* beta, const void* pc, cublasLtMatrixLayout_t c, void* out, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t* algo, void* workspace, size_t bytes, cudaStream_t stream) {
    auto* p = new Product{*reinterpret_cast<const Desc*>(desc), layout(a), layout(b), layout(c), pa, pb, pc, out, *static_cast<const float*>(alpha), *static_cast<const float*>(beta)};
    auto wrong = [&](const char* why) { return fake_fault(why), delete p, CUBLAS_STATUS_INVALID_VALUE; };
    if (const char* why = refused(p->d, p->a, p->b, p->c)) return wrong(why);
    Chosen chosen;
    std::memcpy(&chosen, algo, sizeof chosen);
    if (chosen.mark != MARK || bytes < chosen.workspace || !fake_lies(workspace, bytes)) return wrong("an algorithm or a workspace");
    const void* at[] = {pa, pb, pc, out};
    for (int i = 0; i < 4; i++)
        if (uintptr_t(at[i]) % chosen.aligned[i]) return wrong("an operand is less aligned than was said");
    auto all = [](const Layout& l) { return ((l.count - 1) * l.apart + (l.cols - 1) * l.ld + l.rows) * size_of(l.type); };
    const Layout* layouts[] = {&p->a, &p->b, &p->c};
    for (int i = 0; i < 3; i++)
        if (layouts[i]->apart * size_of(layouts[i]->type) % chosen.aligned[i]) return wrong("a next operand is less aligned than was said");
    if (c != d || pc != out || !fake_lies(pa, all(p->a)) || !fake_lies(pb, all(p->b)) || !fake_lies(out, all(p->c))) return wrong("an operand outside of memory");
    if (p->d.epilogue == CUBLASLT_EPILOGUE_BIAS && !fake_lies(p->d.bias, p->c.rows * size_of(p->c.type))) return wrong("a bias outside of memory");
    uint64_t blocks = ((p->d.transposed[0] ? p->a.rows : p->a.cols) + 127) / 128;
    const uint64_t along[] = {p->c.rows, p->c.cols};
    for (int s = 0; s < 2; s++)
        if (p->d.modes[s] && !fake_lies(p->d.scales[s], 4 * blocks * along[s])) return wrong("scales outside of memory");
    // FAKE_CUDA_IDLE: only what is asked for is looked at.
    static const bool idle = std::getenv("FAKE_CUDA_IDLE") != nullptr;
    // And what only a GPU has the time for is left: the large product that an MFU is measured by.
    bool large = double(p->c.rows) * double(p->c.cols) * double(128 * blocks) > 1e9;
    if (idle || large) p->c.cols = 0;
    // It stays: a graph does it again.
    auto work = [](void* of) { multiply(*static_cast<Product*>(of)); };
    return fake_put(stream, work, p) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}
