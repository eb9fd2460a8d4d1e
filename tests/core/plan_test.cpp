// Workspace layouts: placement, guards, and what check_workspace refuses.
#include "core/plan.h"

#include <limits>
#include <vector>

#include "core/buffer.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

// Takes arrays of these sizes in bytes from an arena.
WorkspaceLayout layout_of(const std::vector<int64_t>& sizes, size_t guard_bytes = 0) {
  const auto walk = [&](Arena& arena) {
    for (const int64_t size : sizes) arena.take<std::byte>("array", ".bytes", size);
  };
  return WorkspaceLayout::of(walk, guard_bytes);
}

TEST(Arena, ArraysAreAlignedDisjointAndInOrder) {
  for (const size_t guard : {0, 1, 64, 4096}) {
    const std::vector<int64_t> sizes = {1, 0, 256, 255, 257, 100000};
    const WorkspaceLayout layout = layout_of(sizes, guard);
    ASSERT_EQ(layout.spans.size(), sizes.size());
    size_t end = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const Span& span = layout.spans[i];
      EXPECT_EQ(span.name, "array.bytes");
      EXPECT_EQ(span.size_bytes, static_cast<size_t>(sizes[i]));
      EXPECT_EQ(span.offset_bytes % Arena::kAlignment, 0u);
      EXPECT_GE(span.offset_bytes, end + (i == 0 ? 0 : guard)) << i;
      end = span.offset_bytes + span.size_bytes;
    }
    EXPECT_EQ(layout.total_bytes, end + guard) << "a guard follows the last array too";
  }
}

TEST(Arena, PlacesWhereItMeasured) {
  auto buffer = must(allocate_pages(4096));
  Arena arena(buffer->data());
  EXPECT_EQ(reinterpret_cast<std::byte*>(arena.take<float>("a", "", 10)), buffer->data());
  EXPECT_EQ(reinterpret_cast<std::byte*>(arena.take<int64_t>("b", "", 2)), buffer->data() + 256);
  EXPECT_EQ(arena.size_bytes(), 256u + 16);
  Arena copy = arena;  // continues from the first one's position and does not move it
  EXPECT_EQ(copy.take<std::byte>("c", "", 1), buffer->data() + 512);
  EXPECT_EQ(arena.size_bytes(), 256u + 16);
  EXPECT_EQ(Arena().take<float>("a", "", 10), nullptr);
}

TEST(Arena, OverflowStaysTooLargeInsteadOfWrapping) {
  Arena arena;
  arena.take<float>("huge", "", std::numeric_limits<int64_t>::max());
  arena.take<float>("more", "", 1000);
  EXPECT_GE(arena.size_bytes(), std::numeric_limits<size_t>::max() - 1000);
  alignas(256) std::byte bytes[256];
  EXPECT_FALSE(check_workspace(bytes, sizeof bytes, arena.size_bytes()).ok());
}

TEST(Workspace, RefusesNullMisalignedAndSmall) {
  alignas(256) std::byte bytes[1024];
  const auto refused = [](void* base, size_t size_bytes) {
    return check_workspace(base, size_bytes, 300).message();
  };
  EXPECT_EQ(refused(nullptr, 1024), "workspace: expected 300 bytes, got null");
  EXPECT_EQ(refused(bytes + 16, 1000),
            "workspace: expected a base aligned to 256 bytes, got one 16 bytes past");
  EXPECT_EQ(refused(bytes, 299), "workspace: expected at least 300 bytes, got 299");
  EXPECT_OK(check_workspace(bytes, 300, 300));
  EXPECT_OK(check_workspace(nullptr, 0, 0));
}

TEST(Buffer, PagesAreZeroAndTooManyAreAnError) {
  auto buffer = must(allocate_pages(10000));
  for (size_t i = 0; i < 10000; ++i) ASSERT_EQ(buffer->data()[i], std::byte{0});
  const Status refused = allocate_pages(size_t{1} << 60, "weights").status();
  EXPECT_EQ(refused.code(), Code::kOutOfMemory);
  EXPECT_THAT(refused.message(),
              testing::MatchesRegex("weights: expected 1152921504606846976 bytes on cpu, "
                                    "[0-9]+ of [0-9]+ are free: out of memory"));
  EXPECT_OK(allocate_pages(0));
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
