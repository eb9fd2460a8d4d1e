// The sweeps of one operation, for both tiers.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "core/executor.h"
#include "io/files.h"
#include "memory/operations.h"
#include "support/attack.h"

namespace nvfp4_moe::internal::test {

inline const std::vector<Operation>& all_operations() {
  static const OperationFiles files;
  static const std::vector<Operation> all = operations(files);
  return all;
}

inline std::string operation_name_of(const testing::TestParamInfo<size_t>& info) {
  return operation_name(info.param);
}

inline void expect_clean_sweeps(size_t number, const Sweep& how) {
  if (!kFailingMemory) GTEST_SKIP() << "a sanitizer owns malloc";
  const Operation& operation = all_operations()[number];
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
