// Checkpoint directories that must be refused: one table for the reader's tests and for the command
// line's.
//
// Each case is a directory of files and the words that the one-line message must contain. Every
// case is wrong in its safetensors files or their index, and in nothing else.
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

// Writes the case's files into `dir` (made where it is missing); what to open is `dir` itself.
void write_hostile_case(const std::filesystem::path& dir, const HostileCase& hostile);

// Length, header and data of a safetensors file, as they are given.
std::string safetensors_bytes(const std::string& header, size_t data_bytes);

}  // namespace nvfp4_moe::internal::test
