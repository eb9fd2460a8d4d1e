// int8_block and its reference: a small error against unquantized activations, and sums that are
// robust against any spread of block scales.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "core/executor.h"
#include "layer/format_error.h"
#include "support/backends.h"

namespace nvfp4_moe::internal {
namespace {

class Int8BlockLayer : public test::BackendTest {};

TEST_P(Int8BlockLayer, ErrsAHundredTimesLessThanNvfp4) {
  const auto nmse = [&](ActivationFormat format, DataKind kind) {
    return std::pow(test::format_error(backend(), format, kind), 2);
  };
  const double int8 = nmse(ActivationFormat::kInt8Block, DataKind::kNormal);
  const double nvfp4 = nmse(ActivationFormat::kNvfp4, DataKind::kNormal);
  RecordProperty("int8_block_nmse", std::to_string(int8));
  RecordProperty("nvfp4_nmse", std::to_string(nvfp4));
  EXPECT_LE(int8, 1e-4);
  EXPECT_GT(int8, 1e-5);  // if it were less, nothing would have been quantized
  EXPECT_GE(nvfp4, 100 * int8);
  // One channel in 32 is twenty times larger: it reduces the resolution of its own block only.
  EXPECT_LE(nmse(ActivationFormat::kInt8Block, DataKind::kOutliers), 2.5e-4);
}

// y = W x with weights of one: the blocks' sums are 16 * 127 times their scales.
std::vector<float> ones_times(const Backend& backend, const std::vector<float>& x) {
  const auto cols = static_cast<int64_t>(x.size());
  const std::vector<uint8_t> codes(static_cast<size_t>(cols / 2), 0x22),
      scales(static_cast<size_t>(cols / 16), 0x38);
  LinearWeights weights;
  weights.rows = 1;
  weights.cols = cols;
  weights.activation_format = ActivationFormat::kInt8Block;
  weights.bytes = std::move(*backend.allocate(backend.linear_bytes(1, cols), 0, "packed weights"));
  EXPECT_OK(backend.linear_pack(weights,
                                Nvfp4View::contiguous(codes.data(), scales.data(), 1.0f, 1, cols)));
  const Buffer workspace = std::move(*allocate_pages(backend.linear_workspace_bytes(weights, 1)));
  std::vector<float> out(1);
  RunContext context;
  context.executor = &serial_executor();
  EXPECT_OK(backend.linear_run(weights, {1, x.data(), DType::kF32, out.data(), DType::kF32},
                               workspace.data(), context));
  return out;
}
std::vector<float> blocks(const std::vector<float>& values) {
  std::vector<float> x;
  for (const float value : values) x.insert(x.end(), 16, value);
  return x;
}

TEST(Int8BlockReference, CancelsExactlyOverEverySpread) {
  for (const int large : {127, 100, 40, 0, -90}) {
    for (const int small : {-109, -60, -3}) {
      if (small >= large) continue;
      const float big = std::ldexp(1.37f, large), rest = std::ldexp(-1.91f, small);
      // Summed in double, these blocks give 0, or lose rest's last bits, if they are 2^29 or more
      // apart.
      const double expected = 16.0 * -127 * static_cast<float>(std::fabs(rest) / 127.0f);
      EXPECT_EQ(ones_times(kReferenceBackend, blocks({big, rest, -big, 0})).front(),
                static_cast<float>(expected))
          << large << " " << small;
    }
  }
}

TEST(Int8BlockReference, RoundsOnce) {
  // 2^24 + 1 and a bit below: without the bit it is a tie that goes to 2^24, with it the next
  // float. 127 * 16 = 2032 is not a power of two, so the block of 2^24 is made of one element of
  // each kind.
  std::vector<float> x(64, 0.0f);
  x[0] = 127 * 0x1p17f;   // s = 2^17, code 127
  x[1] = 0x1p17f;         // code 1: 128 * 2^17 = 2^24 together
  x[16] = 127 * 0x1p-7f;  // s = 2^-7
  x[17] = 0x1p-7f;        // 128 * 2^-7 = 1
  EXPECT_EQ(ones_times(kReferenceBackend, x).front(), 0x1p24f);
  x[32] = 0x1p-100f;
  EXPECT_EQ(ones_times(kReferenceBackend, x).front(), 0x1p24f + 2);
  x[32] = -0x1p-100f;
  EXPECT_EQ(ones_times(kReferenceBackend, x).front(), 0x1p24f);
  for (float& value : x) value = -value;
  EXPECT_EQ(ones_times(kReferenceBackend, x).front(), -0x1p24f);
  x[32] = -x[32];
  EXPECT_EQ(ones_times(kReferenceBackend, x).front(), -(0x1p24f + 2));
}

INSTANTIATE_TEST_SUITE_P(Backends, Int8BlockLayer, ::testing::ValuesIn(test::host_backends()),
                         test::hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal
