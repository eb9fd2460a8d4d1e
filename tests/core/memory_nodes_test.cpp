// The list of memory nodes, and pages interleaved over all of them.
#include "core/memory_nodes.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

TEST(MemoryNodes, ListsAreLinuxs) {
  EXPECT_THAT(parse_node_list("0"), ElementsAre(0));
  EXPECT_THAT(parse_node_list("0-3"), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(parse_node_list("0-1,4,6-7"), ElementsAre(0, 1, 4, 6, 7));
  for (const char* wrong :
       {"", "x", "-1", "0-", "3-1", "0,", ",0", "0 1", "0-9999999", "99999999999999999999"})
    EXPECT_THAT(parse_node_list(wrong), IsEmpty()) << wrong;
}

// One node is enough for the test: the kernel accepts the policy and reports it.
TEST(MemoryNodes, PagesAreInterleavedOverTheNodesOfThisHost) {
  if (memory_nodes().empty()) GTEST_SKIP() << "this host does not list its memory nodes";
  constexpr size_t kBytes = size_t{1} << 20;
  void* data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(data, MAP_FAILED);
  if (!interleave_pages(data, kBytes, memory_nodes())) {
    munmap(data, kBytes);
    GTEST_SKIP() << "this host declines mbind";
  }
  static_cast<char*>(data)[kBytes - 1] = 1;
  int policy = -1;
  unsigned long mask[16] = {};
  constexpr long kOfAddress = 2;  // MPOL_F_ADDR
  ASSERT_EQ(syscall(SYS_get_mempolicy, &policy, mask, 1024, data, kOfAddress), 0);
  EXPECT_EQ(policy, 3);
  for (const int node : memory_nodes()) EXPECT_NE(mask[node / 64] >> (node % 64) & 1, 0u) << node;
  munmap(data, kBytes);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
