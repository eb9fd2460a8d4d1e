// The argument checks of the format functions, shared by the host and a device. A table that only
// records its calls replaces a device and shows which calls would reach one.
#include "moe/formats.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "support/support.h"

namespace nvfp4_moe::internal::formats {
namespace {

using testing::HasSubstr;

struct Noted {
  int calls = 0;
  int device = -1;
  void* stream = nullptr;
  DeviceQuantize quantize;
  DeviceDequantize dequantize;
  DeviceSwigluQuantize swiglu;
};
Noted noted;

Status note(int device, void* stream) {
  ++noted.calls;
  noted.device = device;
  noted.stream = stream;
  return {};
}
Status note_swizzle(int device, const uint8_t*, int64_t, int64_t, int64_t, uint8_t*, void* stream) {
  return note(device, stream);
}
constexpr DeviceFormats kNoting = {
    [](int device, const DeviceQuantize& call, void* stream) {
      noted.quantize = call;
      return note(device, stream);
    },
    [](int device, const DeviceDequantize& call, void* stream) {
      noted.dequantize = call;
      return note(device, stream);
    },
    [](int device, const DeviceSwigluQuantize& call, void* stream) {
      noted.swiglu = call;
      return note(device, stream);
    },
    note_swizzle,
    note_swizzle,
};

constexpr int64_t kRows = 3, kCols = 32;

class Formats : public testing::Test {
 protected:
  Formats() {
    noted = {};
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 13) - 6;
    q.x = x.data();
    q.dtype = DType::kF32;
    q.rows = kRows;
    q.cols = kCols;
    q.codes = codes.data();
    q.block_scales = block_scales.data();
    q.scales = scales.data();
    d.codes = codes.data();
    d.block_scales = block_scales.data();
    d.rows = kRows;
    d.cols = kCols;
    d.out_dtype = DType::kF32;
    d.out = out.data();
    s.gate_up = x.data();
    s.dtype = DType::kF32;
    s.rows = kRows;
    s.inner = 16;
    s.out = {codes.data(), block_scales.data(), scales.data()};
    m = {block_scales.data(), 1, kRows, 2, swizzled.data()};
  }

  std::vector<float> x = std::vector<float>(kRows * kCols);
  std::vector<uint8_t> codes = std::vector<uint8_t>(kRows * kCols / 2);
  std::vector<uint8_t> block_scales = std::vector<uint8_t>(kRows * kCols / 16);
  std::vector<float> scales = std::vector<float>(kRows);
  std::vector<float> out = std::vector<float>(kRows * kCols);
  std::vector<uint8_t> swizzled = std::vector<uint8_t>(512);
  Quantize q;
  Dequantize d;
  SwigluQuantize s;
  ScaleMatrices m;
  QuantizeCounts counts;
  int queue = 0;
  Place device = Place::cuda(2, &queue, &kNoting);
};

// Each mistake has the same message on the host and on a device, and nothing is enqueued on the
// device.
TEST_F(Formats, TellOneMistakeInOneWay) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  using Mode = QuantizeMode;
  const auto of_q = [&](const Place& place) { return quantize(place, q, counts); };
  const auto of_d = [&](const Place& place) { return dequantize(place, d); };
  const auto of_s = [&](const Place& place) { return swiglu_quantize(place, s, counts); };
  const auto swizzle = [&](const Place& place) { return swizzle_scales(place, m); };
  const auto unswizzle = [&](const Place& place) { return unswizzle_scales(place, m); };
  const struct {
    const char* expected;
    std::function<Status(const Place&)> call;
    std::function<void()> mistake;
  } mistakes[] = {
      {"mode: expected one of weights, dynamic_token, static, vllm_order, got 9", of_q,
       [&] { q.mode = static_cast<QuantizeMode>(9); }},
      {"search: mse is for mode weights, got mode static", of_q,
       [&] { q.mode = Mode::kStatic, q.search = ScaleSearch::kMse; }},
      {"channel_weights: expected search mse or sweep, since max compares no errors, got max", of_q,
       [&] { q.channel_weights = x.data(); }},
      {"tensor_scale: mode vllm_order needs one, got none", of_q,
       [&] { q.mode = Mode::kVllmOrder; }},
      {"tensor_scale: expected a positive float32 within [2^-126, 2^126], got 0", of_q,
       [&] { q.mode = Mode::kVllmOrder, q.tensor_scale = 1e-40f; }},
      {"tensor_scale: expected none, since dynamic_token chooses one per row, got 1", of_q,
       [&] { q.mode = Mode::kDynamicToken, q.tensor_scale = 1.0f; }},
      {"tensor_scale: expected a positive finite float32, or none, got nan", of_q,
       [&] { q.tensor_scale = nan; }},
      {"tensor_scale: expected a positive finite float32, got -1", of_q,
       [&] { q.mode = Mode::kStatic, q.tensor_scale = -1.0f; }},
      {"x: expected K (cols) to be a multiple of 16, got 17", of_q, [&] { q.cols = 17; }},
      {"x dtype: expected BF16, F16 or F32, got I32", of_q, [&] { q.dtype = DType::kI32; }},
      {"x: expected a pointer, got null", of_q, [&] { q.x = nullptr; }},
      {"x: expected an address that is a multiple of 4", of_q,
       [&] { q.x = reinterpret_cast<const std::byte*>(x.data()) + 1; }},
      {"codes: expected K, two to a byte, to be a multiple of 16, got 8", of_d,
       [&] { d.cols = 8; }},
      {"out dtype: expected BF16, F16 or F32, got U8", of_d, [&] { d.out_dtype = DType::kU8; }},
      {"scales: expected a pointer, got null", of_d, [&] { d.scale_of_row = true; }},
      {"swiglu_limit: expected", of_s, [&] { s.activation = Activation::kSwigluStep; }},
      {"power_of_two: expected a normal power of two, got 3", of_s, [&] { s.power_of_two = 3.0f; }},
      {"gate_up: expected I, half a row, to be a multiple of 16, got 17", of_s,
       [&] { s.inner = 17; }},
      {"row_scales: expected a pointer, got null", of_s, [&] { s.out.row_scales = nullptr; }},
      {"(rows, scale_cols): expected 0 to 2^30 each, got (-1, 2)", swizzle, [&] { m.rows = -1; }},
      {"matrices: expected 0 to 2^30 of at most 2^40 scales together, got 1073741824 of (1048576, "
       "2)",
       unswizzle, [&] { m.matrices = 1 << 30, m.rows = 1 << 20; }},
      {"linear: expected a pointer, got null", swizzle, [&] { m.from = nullptr; }},
  };
  const auto right = std::tuple(q, d, s, m);
  for (const auto& mistake : mistakes) {
    const auto told = [&](const Place& place) {
      std::tie(q, d, s, m) = right;
      mistake.mistake();
      return mistake.call(place);
    };
    const Status on_host = told(Place::host());
    EXPECT_THAT(on_host, test::Refused(Code::kInvalidArgument, mistake.expected));
    EXPECT_EQ(told(device).message(), on_host.message());
  }
  EXPECT_EQ(noted.calls, 0);
  q = std::get<Quantize>(right);
  EXPECT_THAT(quantize(Place::cuda(-1, nullptr, &kNoting), q, counts).message(),
              HasSubstr("device: expected N of cuda:N, got -1"));
}

TEST_F(Formats, ReachTheDeviceAsItsContractSays) {
  const struct {
    QuantizeMode mode;
    ScaleSearch search;
    std::optional<float> scale;
    DeviceQuantizer how;
    float passed;
  } ways[] = {
      {QuantizeMode::kWeights, ScaleSearch::kMax, {}, DeviceQuantizer::kWeights, 0.0f},
      {QuantizeMode::kWeights, ScaleSearch::kMse, 0.3f, DeviceQuantizer::kWeightsMse, 0.3f},
      {QuantizeMode::kDynamicToken, ScaleSearch::kMax, {}, DeviceQuantizer::kDynamicToken, 0.0f},
      {QuantizeMode::kStatic, ScaleSearch::kMax, 0.3f, DeviceQuantizer::kPowerOfTwo, 0.5f},
      {QuantizeMode::kVllmOrder, ScaleSearch::kMax, 0.3f, DeviceQuantizer::kVllmOrder, 0.3f},
  };
  for (const auto& way : ways) {
    q.mode = way.mode;
    q.search = way.search;
    q.tensor_scale = way.scale;
    ASSERT_OK(quantize(device, q, counts));
    EXPECT_EQ(noted.quantize.how, way.how) << way.mode;
    EXPECT_EQ(noted.quantize.tensor_scale, way.passed) << way.mode;
    EXPECT_EQ(noted.quantize.scales, scales.data());
    EXPECT_EQ(noted.device, 2);
    EXPECT_EQ(noted.stream, &queue);
  }
  EXPECT_EQ(counts.blocks, 0u) << "only a host counts";
  d.scales = scales.data();
  d.scale_of_row = true;
  ASSERT_OK(dequantize(device, d));
  EXPECT_TRUE(noted.dequantize.scale_of_row);
  s.interleaved = true;
  s.power_of_two = 0.25f;
  ASSERT_OK(swiglu_quantize(device, s, counts));
  EXPECT_TRUE(noted.swiglu.input.interleaved);
  EXPECT_EQ(noted.swiglu.power_of_two, 0.25f);
  m.matrices = 0;
  const int before = noted.calls;
  ASSERT_OK(swizzle_scales(device, m));
  q.mode = QuantizeMode::kDynamicToken;
  q.tensor_scale = {};
  q.rows = 0;
  ASSERT_OK(quantize(device, q, counts));
  EXPECT_EQ(noted.calls, before) << "nothing to do enqueues nothing";
  q.mode = QuantizeMode::kWeights;
  ASSERT_OK(quantize(device, q, counts));
  EXPECT_EQ(noted.calls, before + 1) << "but the one scale is written";
}

TEST_F(Formats, RowsThatAreNotFinite) {
  x[kCols + 3] = std::numeric_limits<float>::infinity();
  for (const QuantizeMode mode :
       {QuantizeMode::kWeights, QuantizeMode::kStatic, QuantizeMode::kVllmOrder}) {
    q.mode = mode;
    q.tensor_scale = 0.5f;
    const Status status = quantize(Place::host(), q, counts);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << mode;
    EXPECT_EQ(status.message(), "x: expected finite values, row 1 holds NaN or Inf");
  }
  counts = {};
  q.nonfinite_rows = NonfiniteRows::kZeroed;
  ASSERT_OK(quantize(Place::host(), q, counts));
  EXPECT_EQ(counts.nonfinite_rows, 1u);
  EXPECT_EQ(codes[kCols / 2 + 1], 0);
  q.mode = QuantizeMode::kDynamicToken;
  q.tensor_scale = {};
  ASSERT_OK(quantize(Place::host(), q, counts));
  EXPECT_TRUE(std::isfinite(scales[0]) && std::isnan(scales[1]) && std::isfinite(scales[2]));
  d.scales = scales.data();
  d.scale_of_row = true;
  ASSERT_OK(dequantize(Place::host(), d));
  for (int64_t i = 0; i < kRows * kCols; ++i)
    EXPECT_EQ(std::isnan(out[static_cast<size_t>(i)]), i / kCols == 1) << i;
}

// A feature that only hosts have is unsupported on a device rather than a mistake, and nothing is
// enqueued there.
TEST_F(Formats, SweepsAndChannelWeightsAreTheHosts) {
  const std::vector<float> weights(kCols, 1.0f);
  q.search = ScaleSearch::kSweep;
  ASSERT_OK(quantize(Place::host(), q, counts));
  EXPECT_THAT(quantize(device, q, counts),
              test::Refused(Code::kUnsupported, "search: sweep is for arrays of the host"));
  q.search = ScaleSearch::kMse;
  q.channel_weights = weights.data();
  ASSERT_OK(quantize(Place::host(), q, counts));
  EXPECT_THAT(quantize(device, q, counts),
              test::Refused(Code::kUnsupported, "channel_weights: expected arrays of the host"));
  EXPECT_EQ(noted.calls, 0);
}

}  // namespace
}  // namespace nvfp4_moe::internal::formats
