// Checkpoint directories that must be refused: one table for the reader's tests and for the command
// line's.
//
// Each case is a directory of files and the words that the one-line message must contain. Every
// case has a fault in its safetensors files or their index, and nowhere else.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace nvfp4_moe::internal::test {

struct HostileFile {
  std::string name;  // a name that ends with '/' is an empty directory
  std::string bytes;
};

struct HostileCase {
  std::string name;
  std::vector<HostileFile> files;
  std::vector<std::string> words;
};

const std::vector<HostileCase>& hostile_cases();

// Writes the case's files into `dir`, which is created if missing. `dir` itself is the path to
// open.
void write_hostile_case(const std::filesystem::path& dir, const HostileCase& hostile);

// Length, header and data of a safetensors file, unchecked.
std::string safetensors_bytes(const std::string& header, size_t data_bytes);

}  // namespace nvfp4_moe::internal::test
