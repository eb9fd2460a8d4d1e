// The 128x4 layout against CUTLASS: Sm1xxBlockScaledConfig<16>::tile_atom_to_shape_SFA and _SFB,
// evaluated on the host. An executable of its own, since only this file pays for compiling CuTe.
// CUTLASS comes from tools/fetch_cutlass.sh.
#include "core/scale_layout.h"
#include "support/support.h"

#if __has_include(<cutlass/detail/sm100_blockscaled_layout.hpp>)
#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <cutlass/detail/sm100_blockscaled_layout.hpp>
#define NVFP4_MOE_HAS_CUTLASS 1
#else
#define NVFP4_MOE_HAS_CUTLASS 0
#endif

namespace nvfp4_moe::internal::test {
namespace {

#if NVFP4_MOE_HAS_CUTLASS
using BlockScaled = cutlass::detail::Sm1xxBlockScaledConfig<16>;

struct Shape {
  int rows, scale_cols;
};
constexpr Shape kShapes[] = {{1, 1},     {1, 4},    {128, 4},   {127, 3},  {129, 5},  {128, 1},
                             {256, 8},   {300, 7},  {2, 448},   {513, 12}, {31, 192}, {384, 48},
                             {1000, 13}, {768, 64}, {1025, 31}, {640, 2}};

// CuTe's offset of scale (m, k) of expert l equals ours plus whole experts.
template <class Layout>
void expect_same_offsets(const Layout& layout, const Shape& shape, int experts) {
  const int64_t expert_bytes = swizzled_scale_bytes(shape.rows, shape.scale_cols);
  ASSERT_EQ(static_cast<int64_t>(cute::cosize(layout)), expert_bytes * experts);
  for (int l = 0; l < experts; ++l)
    for (int m = 0; m < shape.rows; ++m)
      for (int k = 0; k < shape.scale_cols; ++k) {
        const int64_t ours = l * expert_bytes + swizzled_scale_offset(m, k, shape.scale_cols);
        // CuTe's coordinate runs over elements; all 16 of a block share the scale.
        ASSERT_EQ(static_cast<int64_t>(layout(m, k * 16, l)), ours)
            << shape.rows << " x " << shape.scale_cols << " at (" << m << ", " << k << ", " << l
            << ")";
        ASSERT_EQ(static_cast<int64_t>(layout(m, k * 16 + 15, l)), ours);
      }
}

TEST(CuteLayout, ScalesOfAAndBMatchCutlass) {
  for (const Shape& shape : kShapes)
    for (const int experts : {1, 3}) {
      const int k = shape.scale_cols * 16;
      expect_same_offsets(
          BlockScaled::tile_atom_to_shape_SFA(cute::make_shape(shape.rows, 64, k, experts)), shape,
          experts);
      expect_same_offsets(
          BlockScaled::tile_atom_to_shape_SFB(cute::make_shape(64, shape.rows, k, experts)), shape,
          experts);
    }
}

// Both ways through our loops: a matrix scattered by CuTe's layout is what swizzle_scales writes
// and unswizzle reads.
TEST(CuteLayout, SwizzledBytesMatchCutlass) {
  for (const Shape& shape : kShapes) {
    const auto layout = BlockScaled::tile_atom_to_shape_SFA(
        cute::make_shape(shape.rows, 64, shape.scale_cols * 16, 1));
    std::vector<uint8_t> linear(static_cast<size_t>(shape.rows) * shape.scale_cols);
    std::vector<uint8_t> theirs(static_cast<size_t>(cute::cosize(layout)), 0);
    for (int m = 0; m < shape.rows; ++m)
      for (int k = 0; k < shape.scale_cols; ++k) {
        const auto value = static_cast<uint8_t>((m * 31 + k * 7) % 126 + 1);
        linear[static_cast<size_t>(m) * shape.scale_cols + k] = value;
        theirs[static_cast<size_t>(layout(m, k * 16, 0))] = value;
      }
    std::vector<uint8_t> ours(theirs.size(), 0xEE), back(linear.size(), 0xEE);
    swizzle_scales(linear.data(), shape.scale_cols, shape.rows, shape.scale_cols, ours.data());
    EXPECT_EQ(ours, theirs) << shape.rows << " x " << shape.scale_cols;
    unswizzle_scales(theirs.data(), shape.rows, shape.scale_cols, back.data(), shape.scale_cols);
    EXPECT_EQ(back, linear) << shape.rows << " x " << shape.scale_cols;
  }
}
#else
TEST(CuteLayout, All) {
  GTEST_SKIP() << "CUTLASS not found: run tools/fetch_cutlass.sh and set NVFP4_MOE_CUTLASS_DIR";
}
#endif

}  // namespace
}  // namespace nvfp4_moe::internal::test
