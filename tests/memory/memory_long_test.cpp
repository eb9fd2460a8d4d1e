// Every request of every operation, and of every verb of the tool; see memory_test.cpp.
#include "memory/operations.h"
#include "memory/tool_sweep.h"

namespace nvfp4_moe::internal::test {
namespace {

class MemoryFullSweep : public testing::TestWithParam<size_t> {};

ATTACK_TEST_P(kAllocations, MemoryFullSweep, EndsWellWhateverFails) {
  expect_clean_sweeps(GetParam(), {.every_to = 1, .step = 1});
}

INSTANTIATE_TEST_SUITE_P(Operations, MemoryFullSweep, testing::Range<size_t>(0, operation_count()),
                         operation_name_of);

#ifdef NVFP4_MOE_TOOL
ATTACK_TEST_P(kAllocations, ToolMemory, SaysThatMemoryRanOut) { sweep(1); }

INSTANTIATE_TEST_SUITE_P(Verbs, ToolMemory, testing::Range<size_t>(0, std::size(kVerbs)),
                         verb_name);
#endif

}  // namespace
}  // namespace nvfp4_moe::internal::test
