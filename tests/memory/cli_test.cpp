// See tool_sweep.h: the first requests of each verb, then a stride.
#ifdef NVFP4_MOE_TOOL
#include "memory/tool_sweep.h"

namespace nvfp4_moe::internal::test {
namespace {

ATTACK_TEST_P(kAllocations, ToolMemory, SaysThatMemoryRanOut) { sweep(251); }

INSTANTIATE_TEST_SUITE_P(Verbs, ToolMemory, testing::Range<size_t>(0, kVerbs), verb_name);

}  // namespace
}  // namespace nvfp4_moe::internal::test
#endif
