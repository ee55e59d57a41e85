// Runs one kernel of the file this program was compiled with, on buffers from a file.
//
// Standard input: kernel, grid (3), shared bytes, then a line a parameter: `i N`, `f X`, or `b PATH`, a buffer that is
// read before the run and written back after it.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <list>
#include KERNEL_FILE

int main() {
    std::string name, kind;
    Dim grid;
    size_t shared = 0;
    std::cin >> name >> grid.x >> grid.y >> grid.z >> shared;
    std::list<std::pair<std::string, std::vector<char>>> buffers;
    std::vector<uint64_t> words;
    while (std::cin >> kind) {
        uint64_t word = 0;
        if (kind == "i") {
            long long n;
            std::cin >> n;
            word = uint64_t(n);
        } else if (kind == "f") {
            double x;
            std::cin >> x;
            std::memcpy(&word, &x, 8);
        } else {
            std::string path;
            std::cin >> path;
            std::ifstream in(path, std::ios::binary);
            buffers.emplace_back(path, std::vector<char>(std::istreambuf_iterator<char>(in), {}));
            word = reinterpret_cast<uint64_t>(buffers.back().second.data());
        }
        words.push_back(word);
    }
    auto found = std::find_if(entries().begin(), entries().end(), [&](const Entry& e) { return name == e.name; });
    if (found == entries().end()) emulator::fail("no such kernel");
    if (found->words != words.size()) emulator::fail("another number of parameters");
    emulator::fibers.resize(found->threads);
    emulator::shared.resize(shared + 128);
    emulator::body = [&] { found->run(words.data()); };
    gridDim = grid;
    blockDim.x = unsigned(found->threads);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                emulator::block(found->threads);
            }
    for (auto& [path, bytes] : buffers) std::ofstream(path, std::ios::binary).write(bytes.data(), long(bytes.size()));
}
