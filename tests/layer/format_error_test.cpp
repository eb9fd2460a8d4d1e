// The errors of fp8 and int8_block against unrounded activations, next to NVFP4's; the report of
// fp8's packing; and the sums of int8_block's reference, which hold for any spread of block scales.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "cases/cases.h"
#include "core/executor.h"
#include "judge/judge.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/sizes.h"
#include "support/spec_oracle.h"
#include "support/support.h"

namespace nvfp4_moe::internal {
namespace {

using Format = ActivationFormat;

// The same weights in every format. Rows and output in fp32, so that only the format's error shows
// and no rounding after it. 48 tokens of 512.
std::vector<float> same_weights_in(const Backend& backend, Format format, DataKind kind) {
  Case spec;
  spec.options = test::sizes_of(8, 2, 512, 256);
  spec.options.row_format = RowFormat::kFp32;
  spec.range = {0, 8};
  spec.tokens = 48;
  spec.data = kind;
  spec.out_dtype = DType::kF32;
  auto data = make_case(spec);
  EXPECT_OK(data);
  data->spec.options.activation_format = format;
  data->config = *MoeConfig::make(data->spec.options);
  test::CaseRun run(backend, *data);
  EXPECT_TRUE(run.ok());
  return test::to_floats(run.run(*data), DType::kF32);
}

class FormatError : public test::BackendTest {
 protected:
  // Against hidden unchanged: it is bf16, so the bf16 layer multiplies it without rounding.
  double error_of(Format format, DataKind kind) {
    const std::vector<float> truth = same_weights_in(kReferenceBackend, Format::kBf16, kind);
    const Comparison c =
        compare(truth.data(), same_weights_in(backend(), format, kind).data(), 48, 512);
    EXPECT_EQ(c.nonfinite_mismatches, 0);
    RecordProperty(std::string(to_string(format)) + "_relative_l2_" + to_string(kind),
                   std::to_string(c.relative_l2));
    return c.relative_l2;
  }
  bool declines(Format format) const {
    Case spec = case_table().front();
    spec.options.activation_format = format;
    return test::declines(backend(), *MoeConfig::make(spec.options));
  }
};

// E4M3 rounds every element by 2.6 % rms, independent of its neighbours. NVFP4 rounds a block's
// largest element less than that, so fp8's lead is smaller if few elements have most of the norm.
TEST_P(FormatError, Fp8ErrsLessThanHalfOfNvfp4) {
  if (declines(Format::kFp8)) GTEST_SKIP() << backend().name << " declines fp8";
  for (const auto& [kind, share] :
       {std::pair(DataKind::kNormal, 0.4), std::pair(DataKind::kOutliers, 0.5)}) {
    const double fp8 = error_of(Format::kFp8, kind);
    EXPECT_LE(fp8, share * error_of(Format::kNvfp4, kind)) << to_string(kind);
    EXPECT_GE(fp8, 0.02) << to_string(kind);  // if it were less, nothing would have been rounded
  }
}

TEST_P(FormatError, Int8BlockErrsATenthOfNvfp4) {
  if (declines(Format::kInt8Block)) GTEST_SKIP() << backend().name << " declines int8_block";
  const double int8 = error_of(Format::kInt8Block, DataKind::kNormal);
  EXPECT_LE(int8, 1e-2);
  EXPECT_GT(int8, std::sqrt(1e-5));  // if it were less, nothing would have been quantized
  EXPECT_GE(error_of(Format::kNvfp4, DataKind::kNormal), 10 * int8);
  // One channel in 32 is twenty times larger: it reduces the resolution of its own block only.
  EXPECT_LE(error_of(Format::kInt8Block, DataKind::kOutliers), std::sqrt(2.5e-4));
}

// Each backend's own code finds shifts and counts, and both must be the contract's.
TEST_P(FormatError, Fp8PacksWhatTheContractSays) {
  if (declines(Format::kFp8)) GTEST_SKIP() << backend().name << " declines fp8";
  for (const Case& spec : cases_named("fp8_shared_ep/")) {
    const auto data = make_case(spec);
    ASSERT_OK(data);
    test::CaseRun run(backend(), *data);
    ASSERT_TRUE(run.ok());
    std::vector<int> shifts;
    for (int64_t e = kSharedExpert; e < spec.range.count; ++e) {
      const ExpertSource source = data->expert(e);
      const Fp8ExpertWeights packed = run.weights().fp8_weights_of(e);
      const std::pair<const Nvfp4View&, const Fp8Weights&> matrices[] = {
          {source.gate, packed.gate}, {source.up, packed.up}, {source.down, packed.down}};
      for (const auto& [view, fp8] : matrices) {
        const test::OracleFp8Weights expected = test::oracle_fp8_weights(view);
        EXPECT_EQ(fp8, (Fp8Weights{expected.shift, expected.inexact}))
            << spec.name << " expert " << e;
        shifts.push_back(fp8.shift);
      }
    }
    EXPECT_LT(*std::min_element(shifts.begin(), shifts.end()), 0);
    EXPECT_GT(*std::max_element(shifts.begin(), shifts.end()), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, FormatError, ::testing::ValuesIn(test::step_backends()),
                         test::hardware_test_name<Backend>);

// y = W x with weights of one, on the reference: the blocks' sums are 16 * 127 times their scales.
float ones_times(const std::vector<float>& x) {
  const Backend& backend = kReferenceBackend;
  const auto cols = static_cast<int64_t>(x.size());
  const std::vector<uint8_t> codes(static_cast<size_t>(cols / 2), 0x22),
      scales(static_cast<size_t>(cols / 16), 0x38);
  LinearWeights weights;
  weights.rows = 1;
  weights.cols = cols;
  weights.activation_format = Format::kInt8Block;
  weights.bytes = std::move(*backend.allocate(backend.linear_bytes(1, cols), 0, "packed weights"));
  EXPECT_OK(backend.linear_pack(weights,
                                Nvfp4View::contiguous(codes.data(), scales.data(), 1.0f, 1, cols)));
  const Buffer workspace = std::move(*allocate_pages(backend.linear_workspace_bytes(weights, 1)));
  float out = 0;
  RunContext context;
  context.executor = &serial_executor();
  EXPECT_OK(backend.linear_run(weights, {1, x.data(), DType::kF32, &out, DType::kF32},
                               workspace.data(), context));
  return out;
}

// 2^24 + 1 and a bit below: without the bit it is a tie that goes to 2^24, with it the next float.
// 127 * 16 = 2032 is not a power of two, so the block of 2^24 is made of one element of each kind.
TEST(Int8BlockReference, RoundsOnce) {
  for (const float sign : {1.0f, -1.0f}) {
    std::vector<float> x(64, 0.0f);
    x[0] = sign * 127 * 0x1p17f;   // s = 2^17, code 127
    x[1] = sign * 0x1p17f;         // code 1: 128 * 2^17 = 2^24 together
    x[16] = sign * 127 * 0x1p-7f;  // s = 2^-7
    x[17] = sign * 0x1p-7f;        // 128 * 2^-7 = 1
    EXPECT_EQ(ones_times(x), sign * 0x1p24f);
    x[32] = sign * 0x1p-100f;
    EXPECT_EQ(ones_times(x), sign * (0x1p24f + 2));
    x[32] = -x[32];
    EXPECT_EQ(ones_times(x), sign * 0x1p24f);
  }
}

}  // namespace
}  // namespace nvfp4_moe::internal
