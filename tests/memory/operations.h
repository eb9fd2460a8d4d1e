// The library's operations for the sweeps: complete, over tiny checkpoints and layers. And the test
// of one of them, for both tiers.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "memory/sweep.h"
#include "support/attack.h"
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

inline std::string operation_name_of(const testing::TestParamInfo<size_t>& info) {
  return operation_name(info.param);
}

inline void expect_clean_sweeps(size_t number, const Sweep& how) {
  if (!kFailingMemory) GTEST_SKIP() << "a sanitizer owns malloc";
  static const OperationFiles files;
  static const std::vector<Operation> all = operations(files);
  const Operation& operation = all[number];
  for (const Failing failing : {Failing::kOne, Failing::kAllFrom}) {
    const SweepResult result = sweep(operation, failing, how);
    attacked(result.tried);
    std::printf(
        "%s, %s: %lld of %lld requests failed, %lld runs out of memory, %lld all the same\n",
        operation.name.c_str(), failing == Failing::kOne ? "one" : "all from one on",
        static_cast<long long>(result.tried), static_cast<long long>(result.requests),
        static_cast<long long>(result.out_of_memory), static_cast<long long>(result.survived));
    for (const std::string& fault : result.faults) ADD_FAILURE() << operation.name << ": " << fault;
    EXPECT_GT(result.tried, 0);
    EXPECT_GT(result.out_of_memory, 0);
  }
}

}  // namespace nvfp4_moe::internal::test
