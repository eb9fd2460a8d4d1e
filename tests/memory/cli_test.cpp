// See tool_sweep.h: the first requests of each verb, then a stride.
#ifdef NVFP4_MOE_TOOL
#include "memory/tool_sweep.h"

namespace nvfp4_moe::test {
namespace {

TEST_F(ToolMemory, SaysThatMemoryRanOut) { sweep(251); }

}  // namespace
}  // namespace nvfp4_moe::test
#endif
