// Packing experts from arrays on the layer's device.
#include <cuda_runtime.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "backend/backend.h"
#include "cases/cases.h"
#include "core/fp8.h"
#include "cuda/device_memory.h"
#include "moe/layer.h"
#include "support/backends.h"
#include "support/case_source.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

constexpr int64_t kExperts = 3, kHidden = 272, kIntermediate = 144;
constexpr int64_t kSlack = 5;  // bytes between rows on the device, so that no row is aligned

// The arrays of one expert on the device, with kSlack bytes between rows.
class DeviceExpert {
 public:
  explicit DeviceExpert(const ExpertSource& host) : source_(host) {
    source_.on_device = true;
    for (Nvfp4View* view : {&source_.gate, &source_.up, &source_.down}) {
      view->codes = copy(view->codes, view->rows, view->cols / 2, view->codes_stride);
      view->block_scales =
          copy(view->block_scales, view->rows, view->cols / 16, view->scales_stride);
    }
  }
  ~DeviceExpert() {
    for (void* bytes : copies_) cudaFree(bytes);
  }
  DeviceExpert(const DeviceExpert&) = delete;
  DeviceExpert& operator=(const DeviceExpert&) = delete;
  ExpertSource& source() { return source_; }

 private:
  // stride: of the host's rows, then of the copy's.
  const uint8_t* copy(const uint8_t* from, int64_t rows, int64_t row_bytes, int64_t& stride) {
    const auto width = static_cast<size_t>(row_bytes), pitch = width + kSlack;
    void* to = nullptr;
    EXPECT_EQ(cudaMalloc(&to, pitch * static_cast<size_t>(rows) + 1), cudaSuccess);
    copies_.push_back(to);
    auto* const first = static_cast<uint8_t*>(to) + 1;
    EXPECT_EQ(cudaMemcpy2D(first, pitch, from, static_cast<size_t>(stride), width,
                           static_cast<size_t>(rows), cudaMemcpyHostToDevice),
              cudaSuccess);
    stride = static_cast<int64_t>(pitch);
    return first;
  }
  ExpertSource source_;
  std::vector<void*> copies_;
};

class CudaPack : public BackendTest {
 protected:
  // zero_every: the distance between blocks with a scale of 0 but nonzero codes, in blocks.
  static CaseData case_with_zero_scales(size_t zero_every,
                                        ActivationFormat format = ActivationFormat::kBf16,
                                        Activation activation = Activation::kSwiglu) {
    Case spec = cases_named("w4a16/").front();
    spec.options.activation_format = format;
    set_sizes(spec.options, kExperts, 2, kHidden, kIntermediate);
    spec.range = {0, kExperts};
    spec.tokens = 3;
    spec.routing = Routing::kUniform;
    spec.data = DataKind::kNormal;
    spec.options.activation = activation;
    spec.options.expert_biases = true;
    CaseData data = *make_case(spec);
    for (ExpertBuffers& expert : data.experts)
      for (Nvfp4Buffers* matrix : {&expert.gate, &expert.up, &expert.down})
        for (size_t block = 1; block < matrix->block_scales.size(); block += zero_every) {
          matrix->block_scales[block] = 0;
          for (size_t i = 0; i < 8; ++i)
            matrix->codes[block * 8 + i] = static_cast<uint8_t>(block + i);
        }
    return data;
  }
  static void expect_same(const ExpertBuffers& out, const ExpertBuffers& in) {
    EXPECT_EQ(out.gate.codes, in.gate.codes);
    EXPECT_EQ(out.up.codes, in.up.codes);
    EXPECT_EQ(out.down.codes, in.down.codes);
    EXPECT_EQ(out.down.block_scales, in.down.block_scales);
    EXPECT_EQ(out.gate_bias, in.gate_bias);
    EXPECT_EQ(out.up_bias, in.up_bias);
    EXPECT_EQ(out.down_bias, in.down_bias);
  }
  PackedWeights empty_weights(const CaseData& data) const {
    PackedWeights weights{
        data.config, data.spec.range, data.scales, std::vector<TensorScales>(kExperts), {}};
    auto bytes = backend().allocate(backend().packed_bytes(data.config, data.spec.range), 0,
                                    "packed weights");
    EXPECT_OK(bytes);
    weights.bytes = std::move(*bytes);
    EXPECT_EQ(cudaMemset(weights.bytes.data(), 0xA5, weights.bytes.size_bytes()), cudaSuccess);
    return weights;
  }
  static std::vector<uint8_t> bytes_of(const PackedWeights& weights) {
    std::vector<uint8_t> bytes(weights.bytes.size_bytes());
    EXPECT_EQ(cudaMemcpy(bytes.data(), weights.bytes.data(), bytes.size(), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return bytes;
  }
  static LayerOptions options() {
    LayerOptions options;
    options.device = "cuda:0";
    options.range = {0, kExperts};
    options.limits.max_tokens = 3;
    return options;
  }
};

// A few blocks of scale 0 with codes, and more than the report of one pass holds.
TEST_P(CudaPack, DeviceRowsGiveTheBytesOfHostRows) {
  using Entry = std::tuple<ActivationFormat, size_t, Activation>;
  for (const auto& [format, zero_every, activation] :
       {Entry{ActivationFormat::kBf16, 1000, Activation::kSwiglu},
        Entry{ActivationFormat::kBf16, 2, Activation::kRelu2},
        Entry{ActivationFormat::kNvfp4, 37, Activation::kSwiglu},
        Entry{ActivationFormat::kFp8, 37, Activation::kSwiglu},
        Entry{ActivationFormat::kFp8, 37, Activation::kRelu2}}) {
    SCOPED_TRACE(testing::Message()
                 << to_string(format) << " " << zero_every << " " << to_string(activation));
    const CaseData data = case_with_zero_scales(zero_every, format, activation);
    if (declines(backend(), data.config)) continue;
    PackedWeights host = empty_weights(data), device = empty_weights(data);
    for (int64_t e = 0; e < kExperts; ++e) {
      ASSERT_OK(backend().pack_expert(host, e, data.expert(e)));
      DeviceExpert lent(data.expert(e));
      ASSERT_OK(backend().pack_expert(device, e, lent.source()));
      ASSERT_EQ(device.tensor_scales[static_cast<size_t>(e)],
                host.tensor_scales[static_cast<size_t>(e)]);
      ASSERT_EQ(device.fp8_weights_of(e), host.fp8_weights_of(e));
      if (format == ActivationFormat::kFp8) {  // the device counts for both; here the host counts
        const ExpertSource source = data.expert(e);
        const Fp8ExpertWeights counted = {measure_fp8_weights(source.gate),
                                          measure_fp8_weights(source.up),
                                          measure_fp8_weights(source.down)};
        ASSERT_EQ(host.fp8_weights_of(e), counted);
      }
      const auto& expected = host.zero_scale_codes[static_cast<size_t>(e)];
      const auto& actual = device.zero_scale_codes[static_cast<size_t>(e)];
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < actual.size(); ++i) {
        ASSERT_EQ(actual[i].projection, expected[i].projection);
        ASSERT_EQ(actual[i].block, expected[i].block);
        ASSERT_EQ(actual[i].codes, expected[i].codes);
      }
      ExpertBuffers out;
      ASSERT_OK(backend().unpack_expert(device, e, {}, out));
      expect_same(out, data.experts[static_cast<size_t>(e)]);
    }
    EXPECT_EQ(bytes_of(device), bytes_of(host));
  }
}

TEST_P(CudaPack, RefusesInTheWordsOfTheHostAndWritesNothing) {
  const CaseData good = case_with_zero_scales(1000);
  PackedWeights weights = empty_weights(good);
  const std::vector<uint8_t> before = bytes_of(weights);
  for (const int value : {0x7F, 0x80}) {
    const auto byte = static_cast<uint8_t>(value);
    CaseData bad = good;
    // The message names the first one in the order of rows, in the first matrix that has any.
    bad.experts[1].up.block_scales[50 * (kHidden / 16) + 7] = byte;
    bad.experts[1].up.block_scales[50 * (kHidden / 16) + 8] = 0x90;
    bad.experts[1].up.block_scales.back() = 0x7F;
    bad.experts[1].down.block_scales.front() = 0x7F;
    const std::string expected =
        check_matrix("up", bad.expert(1).up, kIntermediate, kHidden).message();
    ASSERT_THAT(expected, HasSubstr("got byte " + std::to_string(value) + " at row 50 block 7"));
    DeviceExpert lent(bad.expert(1));
    EXPECT_THAT(backend().pack_expert(weights, 1, lent.source()),
                Refused(Code::kBadInput, expected));
  }
  ExpertSource host = good.expert(0);
  host.on_device = true;
  EXPECT_THAT(backend().pack_expert(weights, 0, host),
              Refused(Code::kInvalidArgument, "gate codes: expected memory of cuda:0, got host"));
  EXPECT_EQ(bytes_of(weights), before);
}

// alpha includes the shift's power of two, which must not round the tensor scale.
TEST_P(CudaPack, RefusesATensorScaleThatFp8WouldRound) {
  CaseData data = case_with_zero_scales(1000, ActivationFormat::kFp8);
  if (declines(backend(), data.config)) GTEST_SKIP() << backend().name << " declines fp8";
  for (uint8_t& scale : data.experts[1].up.block_scales) scale = 0x08;  // 2^-6: the shift is -12
  PackedWeights weights = empty_weights(data);
  for (const float tensor_scale : {0x1p-114f, 0x1p-115f}) {
    ExpertSource source = data.expert(1);
    source.up.tensor_scale = tensor_scale;
    const Status packed = backend().pack_expert(weights, 1, source);
    if (tensor_scale == 0x1p-114f) {
      ASSERT_OK(packed);
      EXPECT_EQ(weights.fp8_weights_of(1).up.shift, -12);
      continue;
    }
    EXPECT_THAT(packed,
                Refused(Code::kUnsupported, "up tensor scale: expected one that times 2^-12"));
  }
}

// Another stream writes the arrays after a while, and they are freed once open has returned.
TEST_P(CudaPack, WaitsForTheSourcesStream) {
  const CaseData data = case_with_zero_scales(1000);
  const OwnStream stream;
  LayerSource source;
  source.scales = data.scales;
  std::vector<std::unique_ptr<DeviceExpert>> lent, right;
  for (int64_t e = 0; e < kExperts; ++e) {
    lent.push_back(std::make_unique<DeviceExpert>(data.expert(e)));
    right.push_back(std::make_unique<DeviceExpert>(data.expert(e)));
    // These bytes would be refused. The stream replaces them before the expert is packed.
    auto* const scales = const_cast<uint8_t*>(lent.back()->source().down.block_scales);
    ASSERT_EQ(cudaMemset(scales, 0xFF, kIntermediate / 16), cudaSuccess);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(cudaLaunchHostFunc(
                stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(300)); },
                nullptr),
            cudaSuccess);
  for (int64_t e = 0; e < kExperts; ++e) {
    ExpertSource& one = lent[static_cast<size_t>(e)]->source();
    one.stream = stream;
    ASSERT_EQ(cudaMemcpyAsync(const_cast<uint8_t*>(one.down.block_scales),
                              right[static_cast<size_t>(e)]->source().down.block_scales,
                              kIntermediate / 16, cudaMemcpyDeviceToDevice, stream),
              cudaSuccess);
  }
  source.expert = [&](int64_t e) -> Result<LoadedExpert> {
    LoadedExpert loaded;
    loaded.source = lent[static_cast<size_t>(e)]->source();
    return loaded;
  };
  const auto layer = MoeLayer::open_on(backend(), data.config, source, options());
  lent.clear();
  ASSERT_OK(layer);
  EXPECT_EQ((*layer)->weights().staging.size_bytes(), 0u) << "a layer keeps no staging";
  for (int64_t e = 0; e < kExperts; ++e) {
    ExpertBuffers out;
    ASSERT_OK((*layer)->unpack_expert(e, out));
    expect_same(out, data.experts[static_cast<size_t>(e)]);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, CudaPack, testing::ValuesIn(device_backends()),
                         hardware_test_name<Backend>);

}  // namespace
}  // namespace nvfp4_moe::internal::test
