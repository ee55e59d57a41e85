// What stands for libcudnn.so.9: graphs of operations over tensors, done on the host one operation after the other, as
// cuDNN's documentation says what each means. It knows no attention: that what a graph says is attention is for those to find
// who hold its results to another's. It shares nothing with what calls it but names and values of cudnn_graph.h.
#ifdef TRUE_HEADER
#include <cudnn_graph.h>
#else
#include "cudnn_names.h"
#endif
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) cudnnStatus_t
extern "C" int fake_lies(const void* at, size_t bytes);
extern "C" int fake_put(void* stream, void (*work)(void*), void* of);
extern "C" void fake_fault(const char* what);

namespace {

using Dims = std::array<int64_t, 4>;

struct Thing;
using Held = std::shared_ptr<Thing>;

// A descriptor: what it was told, by attribute; numbers and other descriptors.
struct Thing {
    int kind;
    bool done = false;
    std::map<int, std::vector<int64_t>> numbers;
    std::map<int, std::vector<Held>> things;

    int64_t number(int attribute, int64_t otherwise = 0) const {
        auto at = numbers.find(attribute);
        return at == numbers.end() ? otherwise : at->second[0];
    }
    // Of a tensor.
    Dims dims, strides;
    const Held& thing(int attribute) const { return things.at(attribute)[0]; }
    bool has(int attribute) const { return numbers.count(attribute) || things.count(attribute); }
};

struct Rule {
    int type, least, most;
    // Of a descriptor that is named: which kind it has to be.
    int of = -1;
    bool optional = false;
};

const int TENSOR = CUDNN_BACKEND_TENSOR_DESCRIPTOR, MANY = 1 << 20;
const Rule A_TENSOR{CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, TENSOR}, MAYBE_A_TENSOR{CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, TENSOR, true};
const Rule TYPE{CUDNN_TYPE_DATA_TYPE, 1, 1}, FOUR{CUDNN_TYPE_INT64, 4, 4}, ONE{CUDNN_TYPE_INT64, 1, 1}, FLAG{CUDNN_TYPE_BOOLEAN, 1, 1, -1, true};
Rule a(int kind) { return {CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, kind}; }

// What each kind has to be told.
const std::map<int, std::map<int, Rule>> RULES = {
    {TENSOR, {{CUDNN_ATTR_TENSOR_DATA_TYPE, TYPE}, {CUDNN_ATTR_TENSOR_DIMENSIONS, FOUR}, {CUDNN_ATTR_TENSOR_STRIDES, FOUR}, {CUDNN_ATTR_TENSOR_UNIQUE_ID, ONE}, {CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, ONE}, {CUDNN_ATTR_TENSOR_IS_VIRTUAL, FLAG}, {CUDNN_ATTR_TENSOR_IS_BY_VALUE, FLAG}}},
    {CUDNN_BACKEND_POINTWISE_DESCRIPTOR, {{CUDNN_ATTR_POINTWISE_MODE, {CUDNN_TYPE_POINTWISE_MODE, 1, 1}}, {CUDNN_ATTR_POINTWISE_MATH_PREC, TYPE}, {CUDNN_ATTR_POINTWISE_AXIS, {CUDNN_TYPE_INT64, 1, 1, -1, true}}}},
    {CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, {{CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, a(CUDNN_BACKEND_POINTWISE_DESCRIPTOR)}, {CUDNN_ATTR_OPERATION_POINTWISE_XDESC, A_TENSOR}, {CUDNN_ATTR_OPERATION_POINTWISE_BDESC, MAYBE_A_TENSOR}, {CUDNN_ATTR_OPERATION_POINTWISE_TDESC, MAYBE_A_TENSOR}, {CUDNN_ATTR_OPERATION_POINTWISE_YDESC, A_TENSOR}}},
    {CUDNN_BACKEND_MATMUL_DESCRIPTOR, {{CUDNN_ATTR_MATMUL_COMP_TYPE, TYPE}}},
    {CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, {{CUDNN_ATTR_OPERATION_MATMUL_DESC, a(CUDNN_BACKEND_MATMUL_DESCRIPTOR)}, {CUDNN_ATTR_OPERATION_MATMUL_ADESC, A_TENSOR}, {CUDNN_ATTR_OPERATION_MATMUL_BDESC, A_TENSOR}, {CUDNN_ATTR_OPERATION_MATMUL_CDESC, A_TENSOR}}},
    {CUDNN_BACKEND_REDUCTION_DESCRIPTOR, {{CUDNN_ATTR_REDUCTION_OPERATOR, {CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, 1}}, {CUDNN_ATTR_REDUCTION_COMP_TYPE, TYPE}}},
    {CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, {{CUDNN_ATTR_OPERATION_REDUCTION_DESC, a(CUDNN_BACKEND_REDUCTION_DESCRIPTOR)}, {CUDNN_ATTR_OPERATION_REDUCTION_XDESC, A_TENSOR}, {CUDNN_ATTR_OPERATION_REDUCTION_YDESC, A_TENSOR}}},
    {CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, {{CUDNN_ATTR_OPERATION_RESHAPE_XDESC, A_TENSOR}, {CUDNN_ATTR_OPERATION_RESHAPE_YDESC, A_TENSOR}}},
    {CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, {{CUDNN_ATTR_OPERATIONGRAPH_OPS, {CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, MANY}}}},
    {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, {{CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, a(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)}, {CUDNN_ATTR_ENGINEHEUR_MODE, {CUDNN_TYPE_HEUR_MODE, 1, 1}}, {CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, a(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)}}},
    {CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, {}},
    {CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, {{CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, {CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, 1, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR}}, {CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, a(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)}}},
    {CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, {{CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, {CUDNN_TYPE_INT64, 1, MANY}}, {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, {CUDNN_TYPE_VOID_PTR, 1, MANY}}, {CUDNN_ATTR_VARIANT_PACK_WORKSPACE, {CUDNN_TYPE_VOID_PTR, 1, 1}}}},
    {CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, {{CUDNN_ATTR_DEVICEPROP_HANDLE, {CUDNN_TYPE_HANDLE, 1, 1}}}},
};

std::string said;
cudnnStatus_t no(cudnnStatus_t status, const std::string& why) {
    said = why;
    if (status != CUDNN_STATUS_NOT_SUPPORTED) fake_fault(("cudnn: " + why).c_str());
    return status;
}

struct Handle {
    void* stream = nullptr;
};

// Whatever is left when the program ends is a fault.
struct Count {
    int handles = 0, descriptors = 0;
    ~Count() {
        if (handles || descriptors) fake_fault("cudnn: handles or descriptors are left");
    }
};
Count& open_things() {
    static Count count;
    return count;
}

Held& held(cudnnBackendDescriptor_t descriptor) { return *static_cast<Held*>(descriptor); }

// Of the graph that a config or a plan came from.
const int GRAPH = -1;

struct Op {
    const Thing* about;
    int kind;
    // Read, and written.
    std::vector<const Thing*> from;
    const Thing* to;
};

Op op_of(const Thing& t) {
    auto get = [&](int attribute) { return t.has(attribute) ? t.thing(attribute).get() : nullptr; };
    switch (t.kind) {
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
        return {get(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR), t.kind, {get(CUDNN_ATTR_OPERATION_POINTWISE_XDESC), get(CUDNN_ATTR_OPERATION_POINTWISE_BDESC), get(CUDNN_ATTR_OPERATION_POINTWISE_TDESC)}, get(CUDNN_ATTR_OPERATION_POINTWISE_YDESC)};
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
        return {get(CUDNN_ATTR_OPERATION_MATMUL_DESC), t.kind, {get(CUDNN_ATTR_OPERATION_MATMUL_ADESC), get(CUDNN_ATTR_OPERATION_MATMUL_BDESC)}, get(CUDNN_ATTR_OPERATION_MATMUL_CDESC)};
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
        return {get(CUDNN_ATTR_OPERATION_REDUCTION_DESC), t.kind, {get(CUDNN_ATTR_OPERATION_REDUCTION_XDESC)}, get(CUDNN_ATTR_OPERATION_REDUCTION_YDESC)};
    default:
        return {nullptr, t.kind, {get(CUDNN_ATTR_OPERATION_RESHAPE_XDESC)}, get(CUDNN_ATTR_OPERATION_RESHAPE_YDESC)};
    }
}

bool is_virtual(const Thing& t) { return t.number(CUDNN_ATTR_TENSOR_IS_VIRTUAL); }
bool by_value(const Thing& t) { return t.number(CUDNN_ATTR_TENSOR_IS_BY_VALUE); }
int64_t id(const Thing& t) { return t.number(CUDNN_ATTR_TENSOR_UNIQUE_ID); }
int64_t type(const Thing& t) { return t.number(CUDNN_ATTR_TENSOR_DATA_TYPE); }
int64_t size_of(const Thing& t) { return type(t) == CUDNN_DATA_BFLOAT16 ? 2 : type(t) == CUDNN_DATA_BOOLEAN ? 1 : 4; }
const Dims& dims(const Thing& t) { return t.dims; }
const Dims& strides(const Thing& t) { return t.strides; }

// One more than the offset of its last element.
int64_t extent(const Thing& t) {
    int64_t last = 0;
    for (int i = 0; i < 4; i++) last += (dims(t)[i] - 1) * strides(t)[i];
    return last + 1;
}

// Why a graph means nothing; empty if it does.
std::string meaningless(const Thing& graph) {
    std::set<int64_t> made;
    std::map<int64_t, const Thing*> known;
    for (const Held& each : graph.things.at(CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
        Op op = op_of(*each);
        std::vector<const Thing*> all = op.from;
        all.push_back(op.to);
        for (const Thing* t : all) {
            if (!t) continue;
            auto [at, fresh] = known.emplace(id(*t), t);
            if (!fresh && at->second != t) return "two tensors have one id";
        }
        for (const Thing* t : op.from)
            if (t && is_virtual(*t) && !made.count(id(*t))) return "an intermediate result is read before it is made";
        if (by_value(*op.to) || !made.insert(id(*op.to)).second) return "a tensor is made twice, or is a number of the host's";
        Dims to = dims(*op.to);
        if (op.kind == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
            Dims a = dims(*op.from[0]), b = dims(*op.from[1]);
            if (a[2] != to[2] || b[3] != to[3] || a[3] != b[2] || a[1] != to[1] || a[0] != to[0] || b[0] != to[0] || a[1] % b[1]) return "a product's sizes do not meet";
            if (type(*op.from[0]) != CUDNN_DATA_BFLOAT16 && !is_virtual(*op.from[0])) return "a product of floats in memory";
        } else if (op.kind == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) {
            for (const Thing* t : op.from)
                for (int i = 0; t && i < 4; i++)
                    if (dims(*t)[i] != to[i] && dims(*t)[i] != 1) return "sizes of a pointwise operation do not meet";
        } else {
            Dims x = dims(*op.from[0]);
            bool reduces = op.kind == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR;
            int64_t of_x = 1, of_to = 1;
            for (int i = 0; i < 4; i++) {
                if (reduces && x[i] % to[i]) return "a reduction's sizes do not meet";
                of_x *= x[i], of_to *= to[i];
            }
            if (!reduces && of_x != of_to) return "a reshape's sizes do not meet";
        }
    }
    return "";
}

float value(const void* at, int64_t type, int64_t i) {
    if (type == CUDNN_DATA_BFLOAT16) {
        uint32_t bits = uint32_t(static_cast<const uint16_t*>(at)[i]) << 16;
        float x;
        return std::memcpy(&x, &bits, 4), x;
    }
    return type == CUDNN_DATA_INT32 ? float(static_cast<const int32_t*>(at)[i]) : static_cast<const float*>(at)[i];
}

uint16_t bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return std::isnan(x) ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class F> void each(Dims d, F f) {
    for (int64_t i = 0; i < d[0]; i++)
        for (int64_t j = 0; j < d[1]; j++)
            for (int64_t k = 0; k < d[2]; k++)
                for (int64_t l = 0; l < d[3]; l++) f(Dims{i, j, k, l});
}

int64_t offset(const Dims& at, const Dims& by) { return at[0] * by[0] + at[1] * by[1] + at[2] * by[2] + at[3] * by[3]; }

// Numbers of a tensor at the offsets of its elements.
using Numbers = std::vector<float>;

struct Work {
    Held plan;
    std::map<int64_t, void*> at;
    std::map<int64_t, float> scalars;
    std::map<int64_t, Numbers> known;

    const Numbers& read(const Thing& t) {
        auto [found, fresh] = known.emplace(id(t), Numbers());
        if (!fresh) return found->second;
        Numbers& to = found->second;
        to.assign(extent(t), NAN);
        if (by_value(t)) return to[0] = scalars.at(id(t)), to;
        each(dims(t), [&](Dims i) { to[offset(i, strides(t))] = value(at.at(id(t)), type(t), offset(i, strides(t))); });
        return to;
    }
    // The element that an index means, where the tensor may have one for many.
    static float pick(const Thing& t, const Numbers& of, const Dims& i) {
        int64_t at = 0;
        for (int k = 0; k < 4; k++) at += dims(t)[k] == 1 ? 0 : i[k] * strides(t)[k];
        return of[at];
    }
    void write(const Thing& t, Numbers&& numbers) {
        if (type(t) == CUDNN_DATA_BFLOAT16)
            for (float& x : numbers) {
                uint32_t bits = uint32_t(bf16(x)) << 16;
                std::memcpy(&x, &bits, 4);
            }
        if (!is_virtual(t)) {
            each(dims(t), [&](Dims i) {
                int64_t to = offset(i, strides(t));
                if (type(t) == CUDNN_DATA_BFLOAT16) static_cast<uint16_t*>(at.at(id(t)))[to] = bf16(numbers[to]);
                else static_cast<float*>(at.at(id(t)))[to] = numbers[to];
            });
        }
        known[id(t)] = std::move(numbers);
    }
    static float pointwise(const Op& op, const Numbers* const (&of)[3], int64_t mode, int64_t axis, const Dims& i) {
        float v[3] = {0, 0, 0};
        for (int k = 0; k < 3; k++)
            if (of[k]) v[k] = pick(*op.from[k], *of[k], i);
        switch (mode) {
        case CUDNN_POINTWISE_ADD: return v[0] + v[1];
        case CUDNN_POINTWISE_MUL: return v[0] * v[1];
        case CUDNN_POINTWISE_DIV: return v[0] / v[1];
        case CUDNN_POINTWISE_SUB: return v[0] - v[1];
        case CUDNN_POINTWISE_EXP: return std::exp(v[0]);
        case CUDNN_POINTWISE_LOG: return std::log(v[0]);
        case CUDNN_POINTWISE_IDENTITY: return v[0];
        case CUDNN_POINTWISE_CMP_GE: return v[0] >= v[1];
        case CUDNN_POINTWISE_GEN_INDEX: return float(i[axis]);
        case CUDNN_POINTWISE_BINARY_SELECT: return v[2] != 0 ? v[0] : v[1];
        default: std::abort();
        }
    }
    static float product(const Op& op, const Numbers& a, const Numbers& b, const Dims& i) {
        const Thing &of_a = *op.from[0], &of_b = *op.from[1];
        int64_t head = i[1] / (dims(of_a)[1] / dims(of_b)[1]);
        const float* row = &a[offset({i[0], i[1], i[2], 0}, strides(of_a))];
        const float* column = &b[offset({i[0], head, 0, i[3]}, strides(of_b))];
        int64_t along = strides(of_a)[3], down = strides(of_b)[2];
        float sum = 0;
        for (int64_t k = 0; k < dims(of_a)[3]; k++) sum += row[k * along] * column[k * down];
        return sum;
    }
    // Operands of the tensor cores are bf16 whatever they were computed in.
    static Numbers rounded(const Numbers& of) {
        Numbers to = of;
        for (float& x : to) {
            uint32_t bits = uint32_t(bf16(x)) << 16;
            std::memcpy(&x, &bits, 4);
        }
        return to;
    }
    static float reduction(const Op& op, const Numbers& x, const Dims& i) {
        Dims of = dims(*op.from[0]), to = dims(*op.to), part;
        for (int k = 0; k < 4; k++) part[k] = of[k] / to[k];
        bool most = op.about->number(CUDNN_ATTR_REDUCTION_OPERATOR) == CUDNN_REDUCE_TENSOR_MAX;
        float out = most ? -INFINITY : 0;
        each(part, [&](Dims j) {
            Dims at;
            for (int k = 0; k < 4; k++) at[k] = i[k] * part[k] + j[k];
            float v = x[offset(at, strides(*op.from[0]))];
            out = most ? std::fmax(out, v) : out + v;
        });
        return out;
    }
    void run() {
        for (const Held& each_op : plan->thing(GRAPH)->things.at(CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
            Op op = op_of(*each_op);
            Numbers out(extent(*op.to), NAN);
            auto put = [&](const Dims& i, float x) { out[offset(i, strides(*op.to))] = x; };
            if (op.kind == CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR) {
                const Numbers* of[3];
                for (int k = 0; k < 3; k++) of[k] = op.from[k] ? &read(*op.from[k]) : nullptr;
                int64_t mode = op.about->number(CUDNN_ATTR_POINTWISE_MODE), axis = op.about->number(CUDNN_ATTR_POINTWISE_AXIS);
                each(dims(*op.to), [&](const Dims& i) { put(i, pointwise(op, of, mode, axis, i)); });
            } else if (op.kind == CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR) {
                Numbers a = rounded(read(*op.from[0])), b = rounded(read(*op.from[1]));
                each(dims(*op.to), [&](const Dims& i) { put(i, product(op, a, b, i)); });
            } else if (op.kind == CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR) {
                const Numbers& x = read(*op.from[0]);
                each(dims(*op.to), [&](Dims i) { put(i, reduction(op, x, i)); });
            } else {
                // The same memory, by other steps.
                const Numbers& x = read(*op.from[0]);
                each(dims(*op.to), [&](Dims i) { put(i, x.at(offset(i, strides(*op.to)))); });
            }
            write(*op.to, std::move(out));
        }
        known.clear();
    }
};

// Every tensor that a graph has in memory or gets from the host.
std::map<int64_t, const Thing*> to_bind(const Thing& graph) {
    std::map<int64_t, const Thing*> all;
    for (const Held& each : graph.things.at(CUDNN_ATTR_OPERATIONGRAPH_OPS)) {
        Op op = op_of(*each);
        op.from.push_back(op.to);
        for (const Thing* t : op.from)
            if (t && !is_virtual(*t)) all[id(*t)] = t;
    }
    return all;
}

// As if every operation wanted some.
int64_t workspace(const Thing& graph) { return 256 * int64_t(graph.things.at(CUDNN_ATTR_OPERATIONGRAPH_OPS).size()); }

} // namespace

extern "C" __attribute__((visibility("default"))) size_t cudnnGetVersion(void) {
    const char* other = std::getenv("FAKE_CUDNN_VERSION");
    return other ? std::atoi(other) : 91900;
}
extern "C" __attribute__((visibility("default"))) const char* cudnnGetErrorString(cudnnStatus_t status) {
    return status == CUDNN_STATUS_NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED" : status ? "CUDNN_STATUS_BAD_PARAM" : "CUDNN_STATUS_SUCCESS";
}
extern "C" __attribute__((visibility("default"))) void cudnnGetLastErrorString(char* to, size_t most) { std::snprintf(to, most, "%s", said.c_str()); }

API cudnnCreate(cudnnHandle_t* handle) { return *handle = reinterpret_cast<cudnnHandle_t>(new Handle), open_things().handles++, CUDNN_STATUS_SUCCESS; }
API cudnnDestroy(cudnnHandle_t handle) { return delete reinterpret_cast<Handle*>(handle), open_things().handles--, CUDNN_STATUS_SUCCESS; }
API cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) { return reinterpret_cast<Handle*>(handle)->stream = stream, CUDNN_STATUS_SUCCESS; }

API cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t kind, cudnnBackendDescriptor_t* made) {
    if (!RULES.count(kind)) return no(CUDNN_STATUS_BAD_PARAM, "a kind of descriptor that is not known");
    auto* thing = new Held(new Thing);
    (*thing)->kind = kind;
    return *made = thing, open_things().descriptors++, CUDNN_STATUS_SUCCESS;
}
API cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t d) { return delete static_cast<Held*>(d), open_things().descriptors--, CUDNN_STATUS_SUCCESS; }

API cudnnBackendSetAttribute(cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count, const void* from) {
    Thing& t = *held(d);
    std::string of = "attribute " + std::to_string(name) + " of a descriptor of kind " + std::to_string(t.kind);
    const auto& rules = RULES.at(t.kind);
    auto rule = rules.find(name);
    if (t.done) return no(CUDNN_STATUS_BAD_PARAM, of + " is set after its end");
    if (rule == rules.end()) return no(CUDNN_STATUS_BAD_PARAM, of + " is not known");
    if (type != rule->second.type || count < rule->second.least || count > rule->second.most) return no(CUDNN_STATUS_BAD_PARAM, of + " is of another type or count");
    for (int64_t i = 0; i < count; i++) {
        if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
            const Held& other = held(static_cast<const cudnnBackendDescriptor_t*>(from)[i]);
            if (!other->done || (rule->second.of >= 0 && other->kind != rule->second.of)) return no(CUDNN_STATUS_BAD_PARAM, of + " is of an unfinished descriptor, or another kind");
            t.things[name].push_back(other);
        } else {
            int64_t x = type == CUDNN_TYPE_BOOLEAN                                   ? static_cast<const uint8_t*>(from)[i]
                        : type == CUDNN_TYPE_INT64                                   ? static_cast<const int64_t*>(from)[i]
                        : type == CUDNN_TYPE_VOID_PTR || type == CUDNN_TYPE_HANDLE ? reinterpret_cast<int64_t>(static_cast<void* const*>(from)[i])
                                                                                     : static_cast<const int32_t*>(from)[i];
            t.numbers[name].push_back(x);
        }
    }
    return CUDNN_STATUS_SUCCESS;
}

API cudnnBackendFinalize(cudnnBackendDescriptor_t d) {
    Thing& t = *held(d);
    for (const auto& [name, rule] : RULES.at(t.kind))
        if (!rule.optional && !t.has(name)) return no(CUDNN_STATUS_BAD_PARAM, "attribute " + std::to_string(name) + " of a descriptor of kind " + std::to_string(t.kind) + " is missing");
    for (int i = 0; t.kind == TENSOR && i < 4; i++) {
        t.dims[i] = t.numbers[CUDNN_ATTR_TENSOR_DIMENSIONS][i];
        t.strides[i] = t.numbers[CUDNN_ATTR_TENSOR_STRIDES][i];
    }
    if (t.kind == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR) {
        std::string why = meaningless(t);
        if (!why.empty()) return no(CUDNN_STATUS_BAD_PARAM, why);
    }
    if (t.kind == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) t.things[GRAPH] = t.thing(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)->things.at(GRAPH);
    return t.done = true, CUDNN_STATUS_SUCCESS;
}

API cudnnBackendGetAttribute(const cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t room, int64_t* count, void* to) {
    const Thing& t = *held(const_cast<cudnnBackendDescriptor_t>(d));
    if (!t.done) return no(CUDNN_STATUS_BAD_PARAM, "an unfinished descriptor is asked");
    if (t.kind == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR && name == CUDNN_ATTR_ENGINEHEUR_RESULTS && type == CUDNN_TYPE_BACKEND_DESCRIPTOR && room > 0) {
        const Held& graph = t.thing(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
        // Heads of a multiple of eight, as the documentation has it; FAKE_CUDNN_WIDEST: up to so wide.
        static const int64_t widest = std::getenv("FAKE_CUDNN_WIDEST") ? std::atoi(std::getenv("FAKE_CUDNN_WIDEST")) : 256;
        *count = 1;
        for (auto& [_, bound] : to_bind(*graph)) {
            int64_t cols = dims(*bound)[3];
            bool rows = cols > 1 && strides(*bound)[3] == 1;
            if (rows && (cols % 8 || cols > widest)) *count = 0;
        }
        if (*count) {
            Thing& config = *held(static_cast<cudnnBackendDescriptor_t*>(to)[0]);
            if (config.kind != CUDNN_BACKEND_ENGINECFG_DESCRIPTOR) return no(CUDNN_STATUS_BAD_PARAM, "results want configs");
            config.things[GRAPH] = {graph};
            config.done = true;
        }
        return CUDNN_STATUS_SUCCESS;
    }
    if (t.kind == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR && name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE && type == CUDNN_TYPE_INT64 && room == 1)
        return *count = 1, *static_cast<int64_t*>(to) = workspace(*t.thing(GRAPH)), CUDNN_STATUS_SUCCESS;
    return no(CUDNN_STATUS_BAD_PARAM, "that is not to be asked of such a descriptor");
}

API cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t bound) {
    const Thing &p = *held(plan), &pack = *held(bound);
    if (!p.done || !pack.done || p.kind != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR || pack.kind != CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR) return no(CUDNN_STATUS_BAD_PARAM, "a plan or a pack is unfinished");
    const auto &ids = pack.numbers.at(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS), &pointers = pack.numbers.at(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    auto wanted = to_bind(*p.thing(GRAPH));
    if (ids.size() != pointers.size() || std::set<int64_t>(ids.begin(), ids.end()).size() != wanted.size()) return no(CUDNN_STATUS_BAD_PARAM, "not every tensor has one address");
    auto work = std::make_unique<Work>();
    work->plan = held(plan);
    for (size_t i = 0; i < ids.size(); i++) {
        auto t = wanted.find(ids[i]);
        if (t == wanted.end()) return no(CUDNN_STATUS_BAD_PARAM, "an address for a tensor that is not there");
        auto* at = reinterpret_cast<void*>(pointers[i]);
        if (by_value(*t->second)) {
            work->scalars[ids[i]] = value(at, type(*t->second), 0);
            continue;
        }
        if (pointers[i] % t->second->number(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT)) return no(CUDNN_STATUS_BAD_PARAM, "an operand is less aligned than was said");
        if (!fake_lies(at, extent(*t->second) * size_of(*t->second))) return no(CUDNN_STATUS_BAD_PARAM, "an operand outside of memory");
        work->at[ids[i]] = at;
    }
    auto* room = reinterpret_cast<void*>(pack.numbers.at(CUDNN_ATTR_VARIANT_PACK_WORKSPACE)[0]);
    if (!fake_lies(room, workspace(*p.thing(GRAPH)))) return no(CUDNN_STATUS_BAD_PARAM, "a workspace outside of memory");
    // FAKE_CUDA_IDLE: only what is asked for is looked at.
    static const bool idle = std::getenv("FAKE_CUDA_IDLE") != nullptr;
    if (idle) return CUDNN_STATUS_SUCCESS;
    // It stays: a graph does it again.
    auto run = [](void* of) { static_cast<Work*>(of)->run(); };
    return fake_put(reinterpret_cast<Handle*>(handle)->stream, run, work.release()) ? no(CUDNN_STATUS_EXECUTION_FAILED, "not a stream") : CUDNN_STATUS_SUCCESS;
}
