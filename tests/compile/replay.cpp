// Runs the launches of captured_launches.py, which says how its files are made, by the kernels of shared objects:
//
//   replay KERNELS LAUNCHES RESULTS
//
// The kernels see memory of exactly the size that they were given, so that what checks a program finds one byte too far,
// and run as an engine's do: called by the tape, on the pool, which has three threads.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

using Kernel = void (*)(const int64_t* slots);
using Tape = void (*)(const int64_t* calls, int64_t num_calls);

static void* loaded(std::ifstream& kernels, int mode) {  // of the next two lines: library and function
    std::string library, function;
    if (!std::getline(kernels, library) || !std::getline(kernels, function)) return nullptr;
    void* handle = dlopen(library.c_str(), RTLD_NOW | mode);
    void* found = handle ? dlsym(handle, function.c_str()) : nullptr;
    if (!found) std::fprintf(stderr, "%s\n", dlerror()), std::exit(1);
    return found;
}

struct Buffer {
    uint8_t* memory;  // what is used begins `shift` bytes behind its beginning and reaches to its end
    int64_t size, shift;
};

int main(int, char** argv) {
    std::ifstream kernels(argv[1]), launches(argv[2], std::ios::binary);
    reinterpret_cast<int (*)(int)>(loaded(kernels, RTLD_GLOBAL))(3);
    const Tape tape = reinterpret_cast<Tape>(loaded(kernels, RTLD_LOCAL));
    std::vector<Kernel> functions;
    while (void* function = loaded(kernels, RTLD_LOCAL)) functions.push_back(reinterpret_cast<Kernel>(function));

    std::vector<Buffer> buffers;
    std::vector<std::vector<int64_t>> slots;
    std::vector<int64_t> calls;
    const auto next = [&] {
        int64_t word = 0;
        launches.read(reinterpret_cast<char*>(&word), sizeof word);
        return word;
    };
    for (int64_t left = next(); left > 0; --left) {
        const Kernel function = functions.at(next());
        const size_t first = buffers.size();
        for (int64_t i = next(); i > 0; --i) {
            const int64_t size = next(), shift = next();
            void* memory = nullptr;
            if (posix_memalign(&memory, 16, shift + size) != 0) return 1;
            launches.read(static_cast<char*>(memory) + shift, size);
            buffers.push_back({static_cast<uint8_t*>(memory), size, shift});
        }
        std::vector<int64_t> values(next());
        for (int64_t& value : values) {
            const int64_t buffer = next(), given = next();  // a number and -1, or a place in a buffer
            value = buffer < 0 ? given : given + int64_t(buffers.at(first + buffer).memory) + buffers.at(first + buffer).shift;
        }
        slots.push_back(std::move(values));
        calls.insert(calls.end(), {int64_t(function), int64_t(slots.back().data())});
    }
    calls.shrink_to_fit();
    tape(calls.data(), int64_t(slots.size()));

    std::ofstream results(argv[3], std::ios::binary);
    for (const Buffer& each : buffers) {
        results.write(reinterpret_cast<char*>(each.memory + each.shift), each.size);
        std::free(each.memory);
    }
}
