// Runs kernels of the file this program was compiled with, in the memory of a file that stands for a GPU's.
//
// Arguments: the memory file, the address that it is mapped at, its bytes. Standard input: a line a launch, of kernel,
// grid (3), shared bytes, and the words of its parameter. Each is answered with a line.
#include <algorithm>
#include <iostream>
#include <sstream>
#include <string>
#include <fcntl.h>
#include <sys/mman.h>
#include KERNEL_FILE

static void launch(std::istringstream line) {
    std::string name;
    Dim grid;
    size_t shared = 0;
    line >> name >> grid.x >> grid.y >> grid.z >> shared;
    std::vector<uint64_t> words;
    for (uint64_t word; line >> word;) words.push_back(word);
    auto found = std::find_if(entries().begin(), entries().end(), [&](const Entry& e) { return name == e.name; });
    if (found == entries().end()) emulator::fail("no such kernel");
    if (found->words != words.size()) emulator::fail("another number of parameters");
    if (int(emulator::fibers.size()) < found->threads) emulator::fail("more threads than a block can have");
    emulator::shared.resize(shared + 128);
    emulator::body = [&] { found->run(words.data()); };
    emulator::come(&emulator::ended);
    gridDim = grid;
    blockDim.x = unsigned(found->threads);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                emulator::block(found->threads);
            }
}

int main(int count, char** arguments) {
    // Asked whether it runs at all.
    if (count < 4) return 0;
    emulator::look_away();
    int file = open(arguments[1], O_RDWR);
    auto* at = reinterpret_cast<void*>(std::stoull(arguments[2]));
    if (file < 0 || mmap(at, std::stoull(arguments[3]), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0) != at)
        emulator::fail("the memory cannot be mapped");
    for (std::string line; std::getline(std::cin, line);) {
        launch(std::istringstream(line));
        std::cout << "done" << std::endl;
    }
}
