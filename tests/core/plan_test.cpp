// Workspace layouts: placement, guards, and the refusals of Workspace::make.
#include "core/plan.h"

#include <limits>

#include "core/buffer.h"
#include "support/support.h"

namespace nvfp4_moe {
namespace {

TEST(WorkspaceLayout, SpansAreAlignedDisjointAndInOrder) {
  for (const size_t guard : {0, 1, 64, 4096}) {
    WorkspaceLayout layout(guard);
    const size_t sizes[] = {1, 0, 256, 255, 257, 100000};
    for (size_t i = 0; i < 6; ++i) EXPECT_EQ(layout.add("span" + std::to_string(i), sizes[i]), static_cast<int>(i));
    size_t end = 0;
    for (size_t i = 0; i < 6; ++i) {
      const auto& span = layout.span(static_cast<int>(i));
      EXPECT_EQ(span.name, "span" + std::to_string(i));
      EXPECT_EQ(span.size_bytes, sizes[i]);
      EXPECT_EQ(span.offset_bytes % WorkspaceLayout::kAlignment, 0u);
      EXPECT_GE(span.offset_bytes, end + (i == 0 ? 0 : guard)) << i;
      end = span.offset_bytes + span.size_bytes;
    }
    EXPECT_EQ(layout.total_bytes(), end + guard) << "a guard follows the last span too";
  }
}

TEST(WorkspaceLayout, SameSpansAreEqual) {
  WorkspaceLayout a, b;
  a.add("x", 10);
  b.add("x", 10);
  EXPECT_EQ(a, b);
  b.add("y", 10);
  EXPECT_NE(a, b);
}

TEST(WorkspaceLayout, OverflowStaysTooLargeInsteadOfWrapping) {
  WorkspaceLayout layout;
  layout.add("huge", std::numeric_limits<size_t>::max() - 10);
  layout.add("more", 1000);
  EXPECT_GE(layout.total_bytes(), std::numeric_limits<size_t>::max() - 1000);
  alignas(256) std::byte bytes[256];
  EXPECT_FALSE(Workspace::make(bytes, sizeof bytes, layout).ok());
}

TEST(Workspace, GivesTheSpansOfItsLayout) {
  WorkspaceLayout layout;
  const int first = layout.add("first", 40);
  const int second = layout.add("second", 16);
  auto buffer = allocate_pages(layout.total_bytes());
  ASSERT_OK(buffer);
  const auto workspace = Workspace::make(buffer->data(), buffer->size_bytes(), layout);
  ASSERT_OK(workspace);
  EXPECT_EQ(reinterpret_cast<std::byte*>(workspace->at<float>(first)), buffer->data());
  EXPECT_EQ(reinterpret_cast<std::byte*>(workspace->at<int64_t>(second)), buffer->data() + 256);
  EXPECT_EQ(workspace->base(), buffer->data());
}

TEST(Workspace, RefusesNullMisalignedAndSmall) {
  WorkspaceLayout layout;
  layout.add("span", 300);
  alignas(256) std::byte bytes[1024];
  EXPECT_EQ(Workspace::make(nullptr, 1024, layout).status().message(), "workspace: expected 300 bytes, got null");
  EXPECT_EQ(Workspace::make(bytes + 16, 1000, layout).status().message(),
            "workspace: expected a base aligned to 256 bytes, got one 16 bytes past");
  EXPECT_EQ(Workspace::make(bytes, 299, layout).status().message(), "workspace: expected at least 300 bytes, got 299");
  EXPECT_OK(Workspace::make(bytes, 300, layout));
  EXPECT_OK(Workspace::make(nullptr, 0, WorkspaceLayout()));
}

TEST(Plan, PrintsItsSteps) {
  Plan plan{"reference", {128}, {{"route", "scalar"}, {"gemm1_swiglu", "exact"}}, WorkspaceLayout()};
  plan.workspace.add("routing", 48);
  EXPECT_EQ(to_string(plan),
            "backend reference, max_tokens 128\n"
            "  step route: scalar\n"
            "  step gemm1_swiglu: exact\n"
            "  workspace 48 bytes\n"
            "    routing: 48 bytes at 0\n");
}

TEST(Buffer, ReleasesOnceAndMoves) {
  int released = 0;
  std::byte bytes[4];
  {
    Buffer a(bytes, 4, [&](std::byte*, size_t) { ++released; });
    Buffer b(std::move(a));
    Buffer c;
    c = std::move(b);
    EXPECT_EQ(c.data(), bytes);
    EXPECT_EQ(released, 0);
  }
  EXPECT_EQ(released, 1);
}

TEST(Buffer, PagesAreZeroAndTooManyAreAnError) {
  auto buffer = allocate_pages(10000);
  ASSERT_OK(buffer);
  for (size_t i = 0; i < 10000; ++i) ASSERT_EQ(buffer->data()[i], std::byte{0});
  EXPECT_EQ(allocate_pages(size_t{1} << 60).status().code(), Code::kOutOfMemory);
  EXPECT_OK(allocate_pages(0));
}

}  // namespace
}  // namespace nvfp4_moe
