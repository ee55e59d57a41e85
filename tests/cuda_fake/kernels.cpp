// The kernels of one file, compiled for the emulator, as a library that fake libcuda loads.
#include <algorithm>
#include <string>
#include KERNEL_FILE

#define API extern "C" __attribute__((visibility("default")))

static const Entry* entry(const char* name) {
    auto found = std::find_if(entries().begin(), entries().end(), [&](const Entry& e) { return std::string(name) == e.name; });
    return found == entries().end() ? nullptr : &*found;
}

// Threads of its blocks and bytes of its parameter.
API int kernel_look(const char* name, int* threads, size_t* bytes) {
    const Entry* found = entry(name);
    if (found) *threads = found->threads, *bytes = 8 * found->words;
    return found != nullptr;
}

API void kernel_run(const char* name, unsigned gx, unsigned gy, unsigned gz, size_t shared, const uint64_t* words) {
    const Entry* found = entry(name);
    if (int(emulator::fibers.size()) < found->threads) emulator::fibers.resize(found->threads);
    emulator::shared.resize(shared + 128);
    emulator::body = [&] { found->run(words); };
    gridDim = {gx, gy, gz};
    blockDim.x = unsigned(found->threads);
    for (unsigned z = 0; z < gz; z++)
        for (unsigned y = 0; y < gy; y++)
            for (unsigned x = 0; x < gx; x++) {
                blockIdx = {x, y, z};
                emulator::block(found->threads);
            }
}
