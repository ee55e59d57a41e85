// What stands for libnvrtc.so.13: sources are compiled for the emulator by the C++ compiler of this machine (FAKE_CUDA_CXX),
// once, into the folder FAKE_CUDA_CACHE; what it gives as machine code is the path of that.
#ifdef TRUE_HEADER
#include <nvrtc.h>
#else
typedef struct _nvrtcProgram* nvrtcProgram;
typedef enum { NVRTC_SUCCESS = 0, NVRTC_ERROR_INVALID_OPTION = 5, NVRTC_ERROR_COMPILATION = 6 } nvrtcResult;
#endif
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) nvrtcResult

struct _nvrtcProgram {
    std::string name, log, code;
    std::vector<std::pair<std::string, std::string>> files;
};

static std::string environment(const char* name) {
    const char* text = std::getenv(name);
    return text ? text : "";
}

API nvrtcCreateProgram(nvrtcProgram* made, const char* source, const char* name, int headers, const char* const* texts, const char* const* names) {
    auto* program = new _nvrtcProgram;
    program->name = name;
    program->files.push_back({name, source});
    for (int i = 0; i < headers; i++) program->files.push_back({names[i], texts[i]});
    return *made = program, NVRTC_SUCCESS;
}

API nvrtcDestroyProgram(nvrtcProgram* program) {
    delete *program;
    return *program = nullptr, NVRTC_SUCCESS;
}

API nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* options) {
    std::string macros, all = environment("FAKE_CUDA_HERE"), arch;
    for (int i = 0; i < count; i++) {
        std::string option = options[i];
        auto begins = [&](const char* with) { return option.rfind(with, 0) == 0; };
        if (begins("--gpu-architecture=sm_")) arch = option.substr(22);
        else if (begins("--define-macro=")) macros += " '-D" + option.substr(15) + "'";
        else if (option != "--std=c++17" && option != "--ptxas-options=-v" && option != "-default-device")
            return program->log = "no such option: " + option, NVRTC_ERROR_INVALID_OPTION;
    }
    if (arch.empty()) return program->log = "no machine code without an architecture", NVRTC_ERROR_INVALID_OPTION;
    all += program->name + macros;
    for (auto& file : program->files) all += file.second;
    for (const char* own : {"kernels.cpp", "../cuda_emulator/emulator.h"}) {
        std::ifstream in(environment("FAKE_CUDA_HERE") + "/" + own);
        all.append(std::istreambuf_iterator<char>(in), {});
    }
    std::string folder = environment("FAKE_CUDA_CACHE") + "/" + std::to_string(std::hash<std::string>()(all));
    std::string made = folder + "/kernels.so", part = folder + "/part" + std::to_string(getpid());
    if (access(made.c_str(), R_OK) != 0) {
        mkdir(folder.c_str(), 0777);
        for (auto& [name, text] : program->files) std::ofstream(folder + "/" + name) << text;
        std::string command = environment("FAKE_CUDA_CXX") + " -std=c++17 -O1 -w -shared -fPIC -fvisibility=hidden -fno-gnu-unique" + macros
            + " '-DKERNEL_FILE=\"" + program->name + "\"' -I'" + environment("FAKE_CUDA_HERE") + "/../cuda_emulator' -I'" + folder
            + "' '" + environment("FAKE_CUDA_HERE") + "/kernels.cpp' -o '" + part + "' 2>'" + part + ".log'";
        if (std::system(command.c_str()) != 0) {
            std::ifstream in(part + ".log");
            program->log.assign(std::istreambuf_iterator<char>(in), {});
            return NVRTC_ERROR_COMPILATION;
        }
        std::rename(part.c_str(), made.c_str());
    }
    program->code = "\x7f" "ELF fake " + made + "\n";
    return NVRTC_SUCCESS;
}

API nvrtcGetProgramLogSize(nvrtcProgram program, size_t* size) { return *size = program->log.size() + 1, NVRTC_SUCCESS; }
API nvrtcGetProgramLog(nvrtcProgram program, char* log) { return std::strcpy(log, program->log.c_str()), NVRTC_SUCCESS; }
API nvrtcGetCUBINSize(nvrtcProgram program, size_t* size) { return *size = program->code.size() + 1, NVRTC_SUCCESS; }
API nvrtcGetCUBIN(nvrtcProgram program, char* code) { return std::memcpy(code, program->code.c_str(), program->code.size() + 1), NVRTC_SUCCESS; }
