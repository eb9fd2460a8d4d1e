// The library's operations for the sweeps: complete, over tiny checkpoints and layers.
#pragma once

#include <vector>

#include "memory/sweep.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {

// Files that the operations read and write, made once.
class OperationFiles {
 public:
  OperationFiles();
  std::string packed() const { return dir_.file("packed"); }  // ModelOpt, two shards with an index
  std::string floats() const { return dir_.file("floats"); }  // bf16, of the same sizes
  std::string gguf() const { return dir_.file("model.gguf"); }            // NVFP4
  std::string broken() const { return dir_.file("broken"); }              // a NaN block scale
  std::string states() const { return dir_.file("states.safetensors"); }  // two tokens
  std::string moments() const { return dir_.file("moments"); }  // of packed, on seeded states
  std::string new_moments() const { return dir_.file("new_moments"); }  // missing before each run
  std::string out() const { return dir_.file("out"); }  // empty or missing before each run
  std::string cache() const { return dir_.file("cache"); }
  std::string repro() const { return dir_.file("repro.safetensors"); }

 private:
  TempDir dir_;
};

// The number of operations, and their names, without making their files.
size_t operation_count();
const char* operation_name(size_t number);
std::vector<Operation> operations(const OperationFiles& files);

}  // namespace nvfp4_moe::internal::test
