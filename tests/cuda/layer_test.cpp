// MoeLayer on "cuda:0" as a caller sees it.
#include "moe/layer.h"

#include <cuda_runtime.h>

#include <cstring>
#include <iterator>
#include <memory>
#include <vector>

#include "cases/cases.h"
#include "cuda/device_memory.h"
#include "judge/judge.h"
#include "moe/c_layer.h"
#include "support/backends.h"
#include "support/case_run.h"
#include "support/case_source.h"
#include "support/support.h"

namespace nvfp4_moe::internal::test {
namespace {

using DeviceBytes = OnDevice<uint8_t, 1>;

class CudaLayer : public testing::Test {
 protected:
  void SetUp() override {
    const auto device = device_facts("cuda:0");
    if (!device.ok()) GTEST_SKIP() << device.status().message();
  }
  // Runs the layer on the case's batch from device memory.
  static std::vector<uint8_t> run(const MoeLayer& layer, const CaseData& data, cudaStream_t stream,
                                  RunStatus* status) {
    const auto& weights = data.topk_weights;
    std::vector<uint8_t> weight_bytes(weights.size() * sizeof(float));
    std::memcpy(weight_bytes.data(), weights.data(), weight_bytes.size());
    const DeviceBytes hidden(data.hidden), ids(data.topk_ids), router(weight_bytes),
        out(data.out_bytes());
    const DeviceBytes workspace(layer.workspace_bytes());
    Batch batch = data.batch(out.data());
    batch.hidden = hidden.data();
    batch.topk_ids = ids.data();
    batch.topk_weights = reinterpret_cast<const float*>(router.data());
    EXPECT_OK(layer.run(batch, workspace.data(), layer.workspace_bytes(), stream));
    const auto noticed = must(layer.status(workspace.data(), layer.workspace_bytes(), stream));
    if (status != nullptr) *status = *noticed;
    return out.back();
  }
  static LayerOptions on_device(const CaseData& data) {
    LayerOptions options;
    options.device = "cuda:0";
    options.range = data.spec.range;
    options.limits.max_tokens = data.spec.tokens;
    return options;
  }
};

TEST_F(CudaLayer, RunsReplacesAndUnpacks) {
  const auto data = must(make_case(cases_named("w4a4_clamped/e16_k4_h256_i128/").front()));
  const auto layer = must(MoeLayer::open(data->config, source_of(*data), on_device(*data)));
  const OwnStream stream;
  RunStatus status;
  const std::vector<uint8_t> out = run(**layer, *data, stream, &status);

  CaseRun backend((*layer)->backend(), *data);
  ASSERT_TRUE(backend.ok());
  EXPECT_EQ(out, backend.run(*data));
  EXPECT_EQ(status.hidden_blocks, backend.buffers().status->hidden_blocks);
  EXPECT_GT(status.hidden_blocks, 0u);

  // Expert 0 takes expert 1's weights, in the layer and in a fresh one.
  CaseData changed = *data;
  changed.experts[0] = data->experts[1];
  changed.tensor_scales[0] = data->tensor_scales[1];
  ASSERT_OK((*layer)->replace_expert(0, changed.expert(0)));
  CaseRun fresh((*layer)->backend(), changed);
  EXPECT_EQ(run(**layer, *data, stream, nullptr), fresh.run(changed));
  ExpertBuffers unpacked;
  ASSERT_OK((*layer)->unpack_expert(0, unpacked));
  EXPECT_EQ(unpacked.up.codes, changed.experts[0].up.codes);
  EXPECT_EQ(unpacked.down.block_scales, changed.experts[0].down.block_scales);
}

TEST_F(CudaLayer, WarmsUp) {
  const auto data = must(make_case(cases_named("w4a16_shared/e16_k4_h256_i128/").front()));
  const auto layer = must(MoeLayer::open(data->config, source_of(*data), on_device(*data)));
  const DeviceBytes workspace((*layer)->workspace_bytes());
  ASSERT_OK((*layer)->warmup(workspace.data(), (*layer)->workspace_bytes()));
  const auto status = must((*layer)->status(workspace.data(), (*layer)->workspace_bytes()));
  EXPECT_EQ(status->nonfinite_rows, 0u);
}

// The same through the C interface, against the CPU.
TEST_F(CudaLayer, RunsThroughC) {
  CLayer c;
  TinyBatch batch(c.tiny.options, 9);
  const std::vector<float> expected = c.expected(batch);
  c.options.device = "cuda:0";
  const nvfp4_moe::Layer layer = c.open();
  const auto copy_of = [](const auto& values) {
    std::vector<uint8_t> bytes(values.size() * sizeof(values[0]));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
  };
  const DeviceBytes hidden(copy_of(batch.hidden)), ids(copy_of(batch.ids)),
      weights(copy_of(batch.weights));
  const DeviceBytes out(batch.out.size() * sizeof(float)), workspace(layer.workspace_bytes(9));
  nvfp4_moe_batch placed = c_batch(batch);
  placed.hidden = hidden.data();
  placed.topk_ids = ids.data();
  placed.topk_weights = reinterpret_cast<const float*>(weights.data());
  placed.out = out.data();
  ASSERT_EQ(nvfp4_moe_layer_run(layer.get(), &placed, workspace.data(), layer.workspace_bytes(9),
                                nullptr),
            NVFP4_MOE_STATUS_OK)
      << nvfp4_moe_last_error();
  auto status = nvfp4_moe::make<nvfp4_moe_run_status>();
  ASSERT_EQ(
      nvfp4_moe_layer_run_status(layer.get(), workspace.data(), layer.workspace_bytes(9), &status),
      NVFP4_MOE_STATUS_OK);
  EXPECT_GT(status.hidden_blocks, 0u);
  std::vector<float> actual(batch.out.size());
  ASSERT_EQ(
      cudaMemcpy(actual.data(), out.data(), actual.size() * sizeof(float), cudaMemcpyDeviceToHost),
      cudaSuccess);
  EXPECT_EQ(broken_limit(
                compare(expected.data(), actual.data(), batch.tokens, c.tiny.options.hidden_size),
                layer_limits(c.tiny.config(), batch.tokens)),
            "");
}

// Arrays on the layer's device, through C: the same bytes, and an expert replaced from there.
TEST_F(CudaLayer, OpensFromDeviceArraysThroughC) {
  CLayer c;
  c.options.device = "cuda:0";
  const nvfp4_moe::Layer expected = c.open();
  std::vector<std::unique_ptr<DeviceBytes>> copies;
  for (const auto& array : c.arrays) copies.push_back(std::make_unique<DeviceBytes>(array));
  const uint8_t** const fields[] = {&c.tensors.gate_codes, &c.tensors.gate_block_scales,
                                    &c.tensors.up_codes,   &c.tensors.up_block_scales,
                                    &c.tensors.down_codes, &c.tensors.down_block_scales};
  for (size_t i = 0; i < std::size(fields); ++i)
    *fields[i] = static_cast<const uint8_t*>(copies[i]->data());
  c.tensors.on_device = 1;
  nvfp4_moe::Layer layer = c.open();
  nvfp4_moe_expert replacement = CLayer::expert(c.tiny.experts[0]);
  replacement.gate_codes = c.tensors.gate_codes;
  replacement.gate_block_scales = c.tensors.gate_block_scales;
  replacement.up_codes = c.tensors.up_codes;
  replacement.up_block_scales = c.tensors.up_block_scales;
  replacement.down_codes = c.tensors.down_codes;
  replacement.down_block_scales = c.tensors.down_block_scales;
  replacement.on_device = 1;
  layer.replace_expert(1, replacement);
  layer.replace_expert_on_stream(2, replacement, nullptr);
  copies.clear();  // the arrays are the caller's again
  const auto same_expert = [&](const nvfp4_moe::Layer& actual, int64_t at, size_t from) {
    const Expert& e = c.tiny.experts[from];
    std::vector<uint8_t> codes(e.down.codes.size()), scales(e.down.block_scales.size());
    auto out = nvfp4_moe::make<nvfp4_moe_expert_out>();
    out.down_codes = codes.data();
    out.down_block_scales = scales.data();
    ASSERT_EQ(nvfp4_moe_layer_unpack_expert(actual.get(), at, &out), NVFP4_MOE_STATUS_OK)
        << nvfp4_moe_last_error();
    EXPECT_EQ(codes, e.down.codes);
    EXPECT_EQ(scales, e.down.block_scales);
    EXPECT_EQ(out.down_tensor_scale, e.down.tensor_scale);
  };
  for (const size_t e : {size_t{0}, c.tiny.experts.size() - 1}) {
    same_expert(expected, static_cast<int64_t>(e), e);
    same_expert(layer, static_cast<int64_t>(e), e);
  }
  same_expert(layer, 1, 0);
  same_expert(layer, 2, 0);
}

TEST_F(CudaLayer, RefusesFormatsOfHostsByName) {
  const auto data = must(make_case(cases_named("w4a8/").front()));
  const auto layer = MoeLayer::open(data->config, source_of(*data), on_device(*data));
  ASSERT_FALSE(layer.ok());
  EXPECT_EQ(layer.status().code(), Code::kUnsupported);
  EXPECT_NE(layer.status().message().find("int8_block"), std::string::npos)
      << layer.status().message();
}

// Every GPU multiplies fp8 with one of its backends and reports how many weights it rounded.
TEST_F(CudaLayer, RunsFp8) {
  const auto data = must(make_case(cases_named("fp8_shared_ep/").front()));
  const auto layer = must(MoeLayer::open(data->config, source_of(*data), on_device(*data)));
  const auto fp8 = (*layer)->fp8_weights();
  ASSERT_TRUE(fp8.has_value());
  EXPECT_GT(fp8->inexact, 0u);
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
