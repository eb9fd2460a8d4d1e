// Runs CUTLASS's kernels, which are correct on hardware, on the emulator, so that wrong results
// reveal faults of the emulator.
//
// Each kernel runs several sizes, including ragged ones and ones whose columns of scales are not a
// multiple of four, with data whose sums are exact and with arbitrary codes and scales, in every
// order of asynchronous work. New device memory is filled with poison.
#include <gtest/gtest.h>

#include <algorithm>

#include "check.h"

namespace cutlass_oracle {
namespace {

constexpr Order kOrders[] = {
    {"at-once", "1"}, {"late", "1"}, {"random", "1"}, {"random", "2"}, {"random", "3"}};

struct Case {
  const Kernel* kernel;
  Order order;
};
std::string name_of(const Case& one) {
  std::string name = std::string(one.kernel->name) + "_" + one.order.name;
  std::replace(name.begin(), name.end(), '-', '_');
  return one.order.name == std::string("random") ? name + "_" + one.order.seed : name;
}
void PrintTo(const Case& one, std::ostream* out) { *out << name_of(one); }

class Cutlass : public testing::TestWithParam<Case> {};

TEST_P(Cutlass, IsRight) {
  const auto& [kernel, order] = GetParam();
  if (!fits_device(*kernel))
    GTEST_SKIP() << kernel->name << " needs compute capability " << kernel->capability / 10 << ".x";
  set_order(order);
  std::mt19937 random(17);
  for (const std::vector<Size>& sizes : launches(*kernel))
    for (const Data data : {Data::kExact, Data::kAny})
      ASSERT_EQ(check(*kernel, sizes, data, random), "");
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Kernel* kernel : kernels())
    for (const Order& order : kOrders) all.push_back({kernel, order});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Kernels, Cutlass, testing::ValuesIn(cases()),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace cutlass_oracle
