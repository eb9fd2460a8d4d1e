// The translator of kernels, which is a Python program.
#pragma once

#include <filesystem>
#include <string>

namespace ptxemu {

// The emulator's sources: PTXEMU_SOURCE, or the folder that this library was compiled from.
std::filesystem::path source_folder();
// Translated kernels: PTXEMU_CACHE, or the folder that CMake was given.
std::filesystem::path cache_folder();

// Translates a kernel of the file `ptx` and compiles it to `library`. Returns whether it did; the
// translator's own messages reach stderr. One thread at a time.
bool translate(const std::filesystem::path& ptx, const std::string& kernel,
               const std::filesystem::path& library, bool checked);

}  // namespace ptxemu
