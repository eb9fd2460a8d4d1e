#include "core/status.h"

#include "core/dtype.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

Result<int> half(int value) {
  if (value % 2 != 0) return invalid_argument("value: expected even, got " + std::to_string(value));
  return value / 2;
}

Status quarter(int value, int* out) {
  NVFP4_MOE_ASSIGN(const int h, half(value));
  NVFP4_MOE_ASSIGN(*out, half(h));
  return {};
}

TEST(Status, PropagatesAndKeepsItsFinding) {
  int out = 0;
  EXPECT_OK(quarter(8, &out));
  EXPECT_EQ(out, 2);
  EXPECT_THAT(quarter(6, &out).in("layer 3"),
              Refused(Code::kInvalidArgument, "layer 3: value: expected even, got 3"));
  const Status found = bad_input("scale: got NaN").of_finding("tensor_scale_nan").in("layer 3");
  EXPECT_THAT(found, Refused(Code::kBadInput, "layer 3: scale: got NaN [tensor_scale_nan]"));
  EXPECT_EQ(found.finding(), "tensor_scale_nan");
  EXPECT_EQ(bad_input("scale").in("layer 3").finding(), "");
  EXPECT_TRUE(Status().in("layer 3").ok());
}

TEST(DType, NamesGoBothWays) {
  for (int value = 0; value <= static_cast<int>(DType::kF4); ++value) {
    const auto dtype = static_cast<DType>(value);
    EXPECT_EQ(dtype_from_string(to_string(dtype)), dtype);
    EXPECT_GT(bits(dtype), 0);
  }
  EXPECT_FALSE(dtype_from_string("F8").has_value());
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
