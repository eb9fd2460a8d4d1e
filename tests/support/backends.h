// The backends that a test goes through, every CPU instruction set among them. One that this host cannot run is skipped
// by name.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backend/backend.h"

namespace nvfp4_moe::test {

// Empty where this host runs the backend, else why not.
std::string why_not_here(const Backend& backend);
// Whether it declines this layer, by name, on this host or its first device: cases of other backends.
bool declines(const Backend& backend, const MoeConfig& config);
// Those of the registry that this host runs in host memory, in its order.
std::vector<const Backend*> runnable_backends();

// A test of one backend.
class BackendTest : public ::testing::TestWithParam<const Backend*> {
 protected:
  void SetUp() override {
    const std::string reason = why_not_here(*GetParam());
    if (!reason.empty()) GTEST_SKIP() << GetParam()->name << ": " << reason;
  }
};
// "cpu:avx2" as the name of a test: cpu_avx2.
std::string backend_test_name(const ::testing::TestParamInfo<const Backend*>& info);

}  // namespace nvfp4_moe::test
