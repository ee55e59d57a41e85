// What stands for NVIDIA's driver, libcuda.so.1, where there is none: so that the calls themselves run, by the names, types
// and values of cuda.h. Memory is the host's. Commands are put off until somebody waits, and are then done in any order
// that streams and events allow. Whatever CUDA leaves undefined, and whatever a caller has not given back at the end, is
// written to the file that FAKE_CUDA_FAULTS names.
//
// Modules are either what fake libnvrtc makes, whose kernels run in the emulator; or cubins of the true one, whose kernels
// are looked up, held to the bytes of their parameters, and not run.
//
// With -DTRUE_HEADER it is compiled against NVIDIA's cuda.h: the compiler then compares every declaration.
#ifdef TRUE_HEADER
#include <cuda.h>
#else
#include "cuda_names.h"
#endif
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <elf.h>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <sys/mman.h>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) CUresult

namespace {

std::recursive_mutex mutex;
#define LOCK std::lock_guard<std::recursive_mutex> lock(mutex)

// FAKE_CUDA_BREAKS: the kernel of that name, whose launch is the end of everything for the process.
bool broken = false;

void fault(const std::string& what) {
    if (broken) return;
    const char* path = std::getenv("FAKE_CUDA_FAULTS");
    FILE* file = path ? std::fopen(path, "a") : stderr;
    if (!file) file = stderr;
    std::fprintf(file, "%s\n", what.c_str());
    if (file != stderr) std::fclose(file);
}

size_t number(const char* name, size_t otherwise) {
    const char* text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

} // namespace

struct CUctx_st {
    int device = 0, retained = 0;
    size_t used = 0;
};
struct CUevent_st {
    CUcontext context;
    bool timed;
    uint64_t recorded = 0, passed = 0;
    double at = 0;
    // The graph that is being noted when it was recorded last, and where.
    CUstream noted_by = nullptr;
    bool noted = false;
};
struct Deed {
    std::function<void()> work;
    CUevent wait = nullptr, record = nullptr;
    uint64_t times = 0;
    // A number of the host's memory that is waited for.
    const volatile uint32_t* number = nullptr;
    uint32_t wanted = 0;

    bool ready() const { return (!wait || wait->passed >= times) && (!number || *number == wanted); }
};
struct CUstream_st {
    CUcontext context;
    std::deque<Deed> deeds;
    // The stream whose graph this one is noted for.
    CUstream origin = nullptr;
    // Whether something was noted that `origin` has not waited for since.
    bool apart = false;
};
struct CUgraph_st {
    std::vector<std::function<void()>> work;
};
struct CUgraphExec_st {
    std::vector<std::function<void()>> work;
};
struct CUmod_st {
    CUcontext context;
    void* program = nullptr;
    std::string cubin;
};
struct CUfunc_st {
    CUmodule module;
    std::string name;
    int shared = 48 << 10, threads = 0;
    size_t bytes = 0;
};

namespace {

bool begun = false;
std::map<int, CUctx_st> contexts;
thread_local CUcontext current = nullptr;
std::map<CUdeviceptr, std::pair<size_t, CUcontext>> memories;
// Memory of the host that GPUs see.
std::map<CUdeviceptr, size_t> of_host;
std::set<CUstream> streams;
std::set<CUevent> events;
std::set<CUmodule> modules;
std::set<CUgraph> graphs;
std::set<CUgraphExec> executables;
std::vector<CUfunction> functions;
std::map<CUstream, std::vector<std::function<void()>>> notes;
std::mt19937 any(number("FAKE_CUDA_SEED", 1));
double microseconds = 0;
const int OPTIN = 227 << 10;

// FAKE_CUDA_IDLE: commands are looked at and not done, and memory is none: for plans of any size.
const bool idle = std::getenv("FAKE_CUDA_IDLE") != nullptr;

int devices() { return int(number("FAKE_CUDA_DEVICES", 1)); }
size_t room() { return number("FAKE_CUDA_BYTES", size_t(8) << 30); }

// Does what can be done, in any order, until nothing is left that can.
void drain() {
    for (;;) {
        std::vector<CUstream> ready;
        bool of_host = false;
        for (CUstream stream : streams) {
            if (stream->deeds.empty()) continue;
            if (stream->deeds.front().ready()) ready.push_back(stream);
            else of_host |= stream->deeds.front().number != nullptr;
        }
        if (ready.empty() && of_host) {
            std::this_thread::yield();
            continue;
        }
        if (ready.empty()) break;
        CUstream stream = ready[any() % ready.size()];
        Deed deed = std::move(stream->deeds.front());
        stream->deeds.pop_front();
        microseconds += 1;
        if (deed.work) deed.work();
        if (deed.record) deed.record->passed = deed.times, deed.record->at = microseconds;
    }
    for (CUstream stream : streams)
        if (!stream->deeds.empty()) fault("streams wait for each other"), stream->deeds.clear();
}

bool busy() {
    return std::any_of(streams.begin(), streams.end(), [](CUstream s) { return !s->deeds.empty(); });
}

// Whether all of it lies in one allocation.
bool lies(CUdeviceptr at, size_t bytes) {
    auto next = memories.upper_bound(at);
    if (next == memories.begin()) return false;
    auto [begin, size] = std::make_pair(std::prev(next)->first, std::prev(next)->second.first);
    return at >= begin && at + bytes <= begin + size;
}

bool lies_in_host(CUdeviceptr at) {
    auto next = of_host.upper_bound(at);
    return next != of_host.begin() && at % 4 == 0 && at + 4 <= std::prev(next)->first + std::prev(next)->second;
}

bool noting() {
    return std::any_of(streams.begin(), streams.end(), [](CUstream s) { return s->origin != nullptr; });
}

CUresult here() {
    if (broken) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (!begun) return CUDA_ERROR_NOT_INITIALIZED;
    return current ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult good(CUstream stream) {
    if (CUresult wrong = here()) return wrong;
    if (!streams.count(stream)) return fault("no such stream"), CUDA_ERROR_INVALID_HANDLE;
    return CUDA_SUCCESS;
}

// Puts off what a stream is to do, or notes it.
CUresult put(CUstream stream, std::function<void()> work) {
    if (stream->origin) {
        notes[stream->origin].push_back(std::move(work));
        stream->apart = stream != stream->origin;
    } else {
        stream->deeds.push_back({std::move(work)});
    }
    return CUDA_SUCCESS;
}

// Of a cubin: whether it has a kernel, and the bytes of its parameters (EIATTR_CBANK_PARAM_SIZE, or the last parameter's
// end in EIATTR_KPARAM_INFO).
bool kernel_of(const std::string& cubin, const std::string& name, size_t& bytes) {
    auto* head = reinterpret_cast<const Elf64_Ehdr*>(cubin.data());
    auto* sections = reinterpret_cast<const Elf64_Shdr*>(cubin.data() + head->e_shoff);
    const char* names = cubin.data() + sections[head->e_shstrndx].sh_offset;
    bool found = false;
    for (int i = 0; i < head->e_shnum; i++) {
        std::string section = names + sections[i].sh_name;
        found |= section == ".text." + name;
        if (section != ".nv.info." + name) continue;
        auto* at = reinterpret_cast<const unsigned char*>(cubin.data() + sections[i].sh_offset);
        auto* end = at + sections[i].sh_size;
        while (at + 4 <= end) {
            unsigned form = at[0], what = at[1], size = at[2] | at[3] << 8;
            if (form == 3 && what == 0x19) bytes = size;
            at += 4 + (form == 4 ? size : 0);
        }
    }
    return found;
}

struct Compiled {
    std::string path, file;
};

// A blob of fake libnvrtc: "\x7f" "ELF fake", the path of a program, a line.
bool of_fake(const char* image, std::string& path) {
    const char mark[] = "\x7f" "ELF fake ";
    if (std::strncmp(image, mark, sizeof mark - 1) != 0) return false;
    path = image + sizeof mark - 1;
    path = path.substr(0, path.find('\n'));
    return true;
}

// The whole of a cubin in memory, by its own headers.
std::string whole(const void* image) {
    auto* head = static_cast<const Elf64_Ehdr*>(image);
    auto* base = static_cast<const char*>(image);
    size_t end = head->e_shoff + size_t(head->e_shnum) * sizeof(Elf64_Shdr);
    auto* sections = reinterpret_cast<const Elf64_Shdr*>(base + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++)
        if (sections[i].sh_type != SHT_NOBITS) end = std::max<size_t>(end, sections[i].sh_offset + sections[i].sh_size);
    return std::string(base, end);
}

} // namespace

API cuInit(unsigned flags) {
    LOCK;
    begun = flags == 0;
    return begun ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuDriverGetVersion(int* version) { return *version = 13000, CUDA_SUCCESS; }

// NVRTC asks for tables that are not documented, and does without them.
API cuGetExportTable(const void** table, const CUuuid*) { return *table = nullptr, CUDA_ERROR_NOT_FOUND; }

API cuGetErrorName(CUresult error, const char** name) { return *name = error ? "CUDA_ERROR" : "CUDA_SUCCESS", CUDA_SUCCESS; }
API cuGetErrorString(CUresult, const char** text) { return *text = "of the fake driver", CUDA_SUCCESS; }

API cuDeviceGetCount(int* count) {
    if (!begun) return CUDA_ERROR_NOT_INITIALIZED;
    return *count = devices(), CUDA_SUCCESS;
}

API cuDeviceGet(CUdevice* device, int ordinal) {
    if (!begun) return CUDA_ERROR_NOT_INITIALIZED;
    if (ordinal < 0 || ordinal >= devices()) return CUDA_ERROR_INVALID_DEVICE;
    return *device = ordinal, CUDA_SUCCESS;
}

API cuDeviceGetName(char* name, int size, CUdevice) {
    std::snprintf(name, size_t(size), "NVIDIA Fake");
    return CUDA_SUCCESS;
}

API cuDeviceGetPCIBusId(char* id, int size, CUdevice device) {
    std::snprintf(id, size_t(size), "0000:%02x:00.0", device + 1);
    return CUDA_SUCCESS;
}

API cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = int(number("FAKE_CUDA_MAJOR", 9)); break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = OPTIN; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 1 << 20; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    default: return fault("attribute " + std::to_string(which)), CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    LOCK;
    if (!begun) return CUDA_ERROR_NOT_INITIALIZED;
    if (broken) return CUDA_ERROR_ILLEGAL_ADDRESS;
    CUctx_st& found = contexts[device];
    found.device = device;
    found.retained++;
    return *context = &found, CUDA_SUCCESS;
}

API cuDevicePrimaryCtxRelease(CUdevice device) {
    LOCK;
    CUctx_st& context = contexts[device];
    if (context.retained == 0) return fault("a context is released that nobody has"), CUDA_ERROR_INVALID_CONTEXT;
    if (--context.retained > 0 || broken) return CUDA_SUCCESS;
    auto left = [&](const char* what, size_t count) {
        if (count) fault(std::to_string(count) + " " + what + " are left when the context ends");
    };
    auto own = [&](auto& all) { return size_t(std::count_if(all.begin(), all.end(), [&](auto x) { return x->context == &context; })); };
    left("streams", own(streams));
    left("events", own(events));
    left("modules", own(modules));
    left("pieces of memory", size_t(std::count_if(memories.begin(), memories.end(), [&](auto& m) { return m.second.second == &context; })));
    bool last = std::all_of(contexts.begin(), contexts.end(), [](auto& c) { return c.second.retained == 0; });
    if (last) left("graphs", graphs.size() + executables.size());
    return CUDA_SUCCESS;
}

API cuCtxSetCurrent(CUcontext context) {
    if (context && context->retained == 0) return fault("a context that nobody holds is used"), CUDA_ERROR_INVALID_CONTEXT;
    return current = context, CUDA_SUCCESS;
}

API cuCtxSynchronize() {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    if (noting()) return fault("the context is waited for while a graph is noted"), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    drain();
    return CUDA_SUCCESS;
}

API cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) { return *can = 1, CUDA_SUCCESS; }

API cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    if (CUresult wrong = here()) return wrong;
    if (flags != 0 || peer == current) return fault("peer access with flags, or to itself"), CUDA_ERROR_INVALID_VALUE;
    static std::set<std::pair<CUcontext, CUcontext>> enabled;
    return enabled.insert({current, peer}).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

API cuMemGetInfo(size_t* free, size_t* total) {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    *total = room(), *free = room() - current->used;
    return CUDA_SUCCESS;
}

API cuMemAlloc(CUdeviceptr* at, size_t bytes) {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    if (noting()) return fault("memory is asked for while a graph is noted"), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (current->used + bytes > room()) return CUDA_ERROR_OUT_OF_MEMORY;
    void* memory = nullptr;
    if (idle) memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    else if (posix_memalign(&memory, 256, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    current->used += bytes;
    *at = reinterpret_cast<CUdeviceptr>(memory);
    memories[*at] = {bytes, current};
    return CUDA_SUCCESS;
}

API cuMemHostAlloc(void** at, size_t bytes, unsigned flags) {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    if (noting()) return fault("memory is asked for while a graph is noted"), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (posix_memalign(at, 4096, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memset(*at, 0xff, bytes);
    if (flags & CU_MEMHOSTALLOC_DEVICEMAP) of_host[reinterpret_cast<CUdeviceptr>(*at)] = bytes;
    return CUDA_SUCCESS;
}

API cuMemHostGetDevicePointer(CUdeviceptr* at, void* host, unsigned flags) {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    *at = reinterpret_cast<CUdeviceptr>(host);
    if (!of_host.count(*at) || flags != 0) return fault("memory of the host that no GPU sees"), CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

API cuMemFreeHost(void* at) {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    if (busy()) fault("memory of the host is freed while streams are busy");
    if (!of_host.erase(reinterpret_cast<CUdeviceptr>(at))) fault("memory of the host is freed that was not given");
    std::free(at);
    return CUDA_SUCCESS;
}

API cuMemFree(CUdeviceptr at) {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    auto found = memories.find(at);
    if (found == memories.end()) return fault("memory is freed that was not given"), CUDA_ERROR_INVALID_VALUE;
    if (noting()) return fault("memory is freed while a graph is noted"), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    drain();
    found->second.second->used -= found->second.first;
    if (idle) munmap(reinterpret_cast<void*>(at), found->second.first);
    else std::free(reinterpret_cast<void*>(at));
    memories.erase(found);
    return CUDA_SUCCESS;
}

namespace {
// The host's copies and fills are of the default stream, which our streams do not wait for.
CUresult from_host(const char* what, CUdeviceptr at, size_t bytes) {
    if (CUresult wrong = here()) return wrong;
    if (!lies(at, bytes)) return fault(std::string(what) + " outside of memory"), CUDA_ERROR_INVALID_VALUE;
    if (noting()) return fault(std::string(what) + " while a graph is noted"), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (busy()) fault(std::string(what) + " while streams are busy");
    return CUDA_SUCCESS;
}
} // namespace

API cuMemsetD8(CUdeviceptr at, unsigned char byte, size_t bytes) {
    LOCK;
    if (CUresult wrong = from_host("the host fills", at, bytes)) return wrong;
    if (!idle) std::memset(reinterpret_cast<void*>(at), byte, bytes);
    return CUDA_SUCCESS;
}

API cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
    LOCK;
    if (CUresult wrong = from_host("the host writes", to, bytes)) return wrong;
    if (!idle) std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return CUDA_SUCCESS;
}

API cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
    LOCK;
    if (CUresult wrong = from_host("the host reads", from, bytes)) return wrong;
    if (idle) std::memset(to, 0, bytes);
    else std::memcpy(to, reinterpret_cast<void*>(from), bytes);
    return CUDA_SUCCESS;
}

API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    LOCK;
    if (CUresult wrong = good(stream)) return wrong;
    if (!lies(to, bytes) || !lies(from, bytes)) return fault("a copy outside of memory"), CUDA_ERROR_INVALID_VALUE;
    if (bytes && to < from + bytes && from < to + bytes) fault("a copy onto itself");
    return put(stream, [=] { idle ? nullptr : std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes); });
}

API cuStreamCreate(CUstream* stream, unsigned flags) {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    if (flags != CU_STREAM_NON_BLOCKING) fault("a stream that waits for the default stream");
    *stream = new CUstream_st{current};
    streams.insert(*stream);
    return CUDA_SUCCESS;
}

API cuStreamDestroy(CUstream stream) {
    LOCK;
    if (CUresult wrong = good(stream)) return wrong;
    if (!stream->deeds.empty()) fault("a busy stream is destroyed");
    streams.erase(stream);
    delete stream;
    return CUDA_SUCCESS;
}

API cuStreamQuery(CUstream stream) {
    LOCK;
    if (CUresult wrong = good(stream)) return wrong;
    bool was = !stream->deeds.empty();
    drain();
    return was ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

API cuEventCreate(CUevent* event, unsigned flags) {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    *event = new CUevent_st{current, (flags & CU_EVENT_DISABLE_TIMING) == 0};
    events.insert(*event);
    return CUDA_SUCCESS;
}

API cuEventDestroy(CUevent event) {
    LOCK;
    if (!events.erase(event)) return fault("no such event is destroyed"), CUDA_ERROR_INVALID_HANDLE;
    for (CUstream stream : streams)
        for (Deed& deed : stream->deeds)
            if (deed.wait == event || deed.record == event) fault("an event is destroyed that is waited for");
    delete event;
    return CUDA_SUCCESS;
}

API cuEventRecord(CUevent event, CUstream stream) {
    LOCK;
    if (CUresult wrong = good(stream)) return wrong;
    if (!events.count(event)) return fault("no such event is recorded"), CUDA_ERROR_INVALID_HANDLE;
    if (event->context != stream->context) return fault("an event is recorded on a stream of another device"), CUDA_ERROR_INVALID_HANDLE;
    if (stream->origin) {
        event->noted = true;
        event->noted_by = stream;
        return CUDA_SUCCESS;
    }
    event->noted = false;
    Deed deed;
    deed.record = event, deed.times = ++event->recorded;
    stream->deeds.push_back(std::move(deed));
    return CUDA_SUCCESS;
}

API cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    LOCK;
    if (CUresult wrong = good(stream)) return wrong;
    if (!events.count(event) || flags != 0) return fault("no such event is waited for"), CUDA_ERROR_INVALID_HANDLE;
    if (event->noted) {
        CUstream origin = event->noted_by->origin;
        if (!origin) return fault("an event of a graph is waited for outside of it"), CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
        if (stream->origin && stream->origin != origin) return fault("two graphs meet"), CUDA_ERROR_STREAM_CAPTURE_MERGE;
        stream->origin = origin;
        if (stream != origin) stream->apart = true;
        else event->noted_by->apart = false;
        return CUDA_SUCCESS;
    }
    if (stream->origin) return fault("a graph waits for an event outside of it"), CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    if (event->recorded == 0) fault("an event is waited for that nobody has recorded");
    Deed deed;
    deed.wait = event, deed.times = event->recorded;
    stream->deeds.push_back(std::move(deed));
    return CUDA_SUCCESS;
}

API cuStreamWriteValue32(CUstream stream, CUdeviceptr at, uint32_t number, unsigned flags) {
    LOCK;
    if (CUresult wrong = good(stream)) return wrong;
    if (!lies_in_host(at) || flags != 0) return fault("a number is written outside of memory"), CUDA_ERROR_INVALID_VALUE;
    return put(stream, [=] { *reinterpret_cast<volatile uint32_t*>(at) = number; });
}

API cuStreamWaitValue32(CUstream stream, CUdeviceptr at, uint32_t wanted, unsigned flags) {
    LOCK;
    if (CUresult wrong = good(stream)) return wrong;
    if (stream->origin) return fault("a graph waits for the host"), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (!lies_in_host(at) || flags != CU_STREAM_WAIT_VALUE_EQ) return fault("no number is waited for"), CUDA_ERROR_INVALID_VALUE;
    Deed deed;
    deed.number = reinterpret_cast<const volatile uint32_t*>(at), deed.wanted = wanted;
    stream->deeds.push_back(std::move(deed));
    return CUDA_SUCCESS;
}

API cuEventElapsedTime(float* ms, CUevent from, CUevent to) {
    LOCK;
    if (!events.count(from) || !events.count(to)) return fault("a time between no events"), CUDA_ERROR_INVALID_HANDLE;
    if (!from->timed || !to->timed || from->context != to->context || from->noted || to->noted || !from->recorded || !to->recorded)
        return fault("a time between events that have none"), CUDA_ERROR_INVALID_HANDLE;
    if (from->passed < from->recorded || to->passed < to->recorded) return CUDA_ERROR_NOT_READY;
    *ms = float((to->at - from->at) * 1e-3);
    return CUDA_SUCCESS;
}

API cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    LOCK;
    if (CUresult wrong = good(stream)) return wrong;
    if (stream->origin || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_ILLEGAL_STATE;
    stream->origin = stream;
    notes[stream].clear();
    return CUDA_SUCCESS;
}

API cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    LOCK;
    if (CUresult wrong = good(stream)) return wrong;
    if (stream->origin != stream) return CUDA_ERROR_ILLEGAL_STATE;
    bool unjoined = false;
    for (CUstream other : streams)
        if (other->origin == stream) unjoined |= other->apart, other->origin = nullptr, other->apart = false;
    if (unjoined) return fault("a graph ends before its streams have been waited for"), CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    *graph = new CUgraph_st{std::move(notes[stream])};
    graphs.insert(*graph);
    return CUDA_SUCCESS;
}

API cuGraphInstantiateWithFlags(CUgraphExec* made, CUgraph graph, unsigned long long flags) {
    LOCK;
    if (!graphs.count(graph) || flags != 0) return CUDA_ERROR_INVALID_VALUE;
    *made = new CUgraphExec_st{graph->work};
    executables.insert(*made);
    return CUDA_SUCCESS;
}

API cuGraphDestroy(CUgraph graph) {
    LOCK;
    if (!graphs.erase(graph)) return fault("no such graph is destroyed"), CUDA_ERROR_INVALID_VALUE;
    delete graph;
    return CUDA_SUCCESS;
}

API cuGraphExecDestroy(CUgraphExec graph) {
    LOCK;
    if (!executables.erase(graph)) return fault("no such graph is destroyed"), CUDA_ERROR_INVALID_VALUE;
    delete graph;
    return CUDA_SUCCESS;
}

API cuGraphLaunch(CUgraphExec graph, CUstream stream) {
    LOCK;
    if (CUresult wrong = good(stream)) return wrong;
    if (!executables.count(graph)) return fault("no such graph is launched"), CUDA_ERROR_INVALID_VALUE;
    return put(stream, [graph] { for (auto& work : graph->work) work(); });
}

API cuModuleLoadData(CUmodule* module, const void* image) {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    if (noting()) return fault("a module is loaded while a graph is noted"), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    auto* made = new CUmod_st{current};
    std::string path;
    if (of_fake(static_cast<const char*>(image), path)) {
        made->program = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!made->program) return fault(dlerror()), delete made, CUDA_ERROR_INVALID_IMAGE;
    } else if (std::memcmp(image, ELFMAG, SELFMAG) == 0 && static_cast<const Elf64_Ehdr*>(image)->e_machine == 190) {
        made->cubin = whole(image);
    } else {
        return delete made, CUDA_ERROR_INVALID_IMAGE;
    }
    modules.insert(made);
    return *module = made, CUDA_SUCCESS;
}

API cuModuleUnload(CUmodule module) {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    if (!modules.erase(module)) return fault("no such module is unloaded"), CUDA_ERROR_INVALID_HANDLE;
    if (busy()) fault("a module is unloaded while streams are busy");
    if (module->program) dlclose(module->program);
    delete module;
    return CUDA_SUCCESS;
}

API cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    LOCK;
    if (!modules.count(module)) return CUDA_ERROR_INVALID_HANDLE;
    auto* made = new CUfunc_st{module, name};
    bool found;
    if (module->program) {
        auto look = reinterpret_cast<int (*)(const char*, int*, size_t*)>(dlsym(module->program, "kernel_look"));
        found = look(name, &made->threads, &made->bytes) != 0;
    } else {
        found = kernel_of(module->cubin, name, made->bytes);
    }
    if (!found) return fault(std::string("no kernel ") + name), delete made, CUDA_ERROR_NOT_FOUND;
    functions.push_back(made);
    return *function = made, CUDA_SUCCESS;
}

API cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
    LOCK;
    if (CUresult wrong = here()) return wrong;
    if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 || value > OPTIN) return CUDA_ERROR_INVALID_VALUE;
    return function->shared = value, CUDA_SUCCESS;
}

API cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared, CUstream stream, void** params, void** extra) {
    LOCK;
    if (CUresult wrong = good(stream)) return wrong;
    const std::string& name = function->name;
    if (!params || extra) return fault(name + ": parameters"), CUDA_ERROR_INVALID_VALUE;
    if (function->module->context != stream->context) return fault(name + " is of another device than the stream"), CUDA_ERROR_INVALID_HANDLE;
    if (!x || !y || !z || x > 0x7fffffffu || y > 65535 || z > 65535 || ty != 1 || tz != 1 || tx == 0 || tx > 1024) return fault(name + ": its grid"), CUDA_ERROR_INVALID_VALUE;
    if (function->threads && unsigned(function->threads) != tx) return fault(name + ": its threads"), CUDA_ERROR_INVALID_VALUE;
    if (int(shared) > function->shared) return fault(name + ": more shared memory than it may have"), CUDA_ERROR_INVALID_VALUE;
    if (const char* breaks = std::getenv("FAKE_CUDA_BREAKS"); breaks && name == breaks) return broken = true, CUDA_SUCCESS;
    std::vector<uint64_t> words(function->bytes / 8);
    std::memcpy(words.data(), params[0], function->bytes);
    if (!function->module->program || idle) return put(stream, [] {});
    auto run = reinterpret_cast<void (*)(const char*, unsigned, unsigned, unsigned, size_t, const uint64_t*)>(dlsym(function->module->program, "kernel_run"));
    return put(stream, [=] { run(name.c_str(), x, y, z, shared, words.data()); });
}

// For fake libcublasLt: whether an operand lies in memory, and a product in a stream's order.
extern "C" __attribute__((visibility("default"))) int fake_lies(const void* at, size_t bytes) {
    LOCK;
    return lies(reinterpret_cast<CUdeviceptr>(at), bytes);
}
extern "C" __attribute__((visibility("default"))) int fake_put(void* stream, void (*work)(void*), void* of) {
    LOCK;
    auto* to = static_cast<CUstream>(stream);
    if (good(to)) return 1;
    return put(to, [=] { work(of); }) != CUDA_SUCCESS;
}
extern "C" __attribute__((visibility("default"))) void fake_fault(const char* what) { fault(what); }
