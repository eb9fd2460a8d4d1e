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

// The same through the C interface: opened from arrays on the layer's device, with experts replaced
// from there, and run against the CPU's.
TEST_F(CudaLayer, RunsThroughC) {
  CLayer c;
  TinyBatch batch(c.tiny.options, 9);
  const std::vector<float> expected = c.expected(batch);
  c.options.device = "cuda:0";
  std::vector<std::unique_ptr<DeviceBytes>> copies;
  const auto copy_of = [&](const auto& values) {
    std::vector<uint8_t> bytes(values.size() * sizeof(values[0]));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    copies.push_back(std::make_unique<DeviceBytes>(bytes));
    return copies.back()->data();
  };
  const uint8_t** const fields[] = {&c.tensors.gate_codes, &c.tensors.gate_block_scales,
                                    &c.tensors.up_codes,   &c.tensors.up_block_scales,
                                    &c.tensors.down_codes, &c.tensors.down_block_scales};
  for (size_t i = 0; i < std::size(fields); ++i) *fields[i] = copy_of(c.arrays[i]);
  c.tensors.on_device = 1;
  nvfp4_moe::Layer layer = c.open();
  const auto replacement = [&](size_t expert) {
    nvfp4_moe_expert one = CLayer::expert(c.tiny.experts[expert]);
    const Expert& e = c.tiny.experts[expert];
    one.gate_codes = copy_of(e.gate.codes);
    one.gate_block_scales = copy_of(e.gate.block_scales);
    one.up_codes = copy_of(e.up.codes);
    one.up_block_scales = copy_of(e.up.block_scales);
    one.down_codes = copy_of(e.down.codes);
    one.down_block_scales = copy_of(e.down.block_scales);
    one.on_device = 1;
    return one;
  };
  // Each takes another expert's weights, and then its own again.
  layer.replace_expert(1, replacement(0));
  const Expert& first = c.tiny.experts[0];
  std::vector<uint8_t> codes(first.down.codes.size()), scales(first.down.block_scales.size());
  auto unpacked = nvfp4_moe::make<nvfp4_moe_expert_out>();
  unpacked.down_codes = codes.data();
  unpacked.down_block_scales = scales.data();
  ASSERT_EQ(nvfp4_moe_layer_unpack_expert(layer.get(), 1, &unpacked), NVFP4_MOE_STATUS_OK);
  EXPECT_EQ(codes, first.down.codes);
  EXPECT_EQ(scales, first.down.block_scales);
  EXPECT_EQ(unpacked.down_tensor_scale, first.down.tensor_scale);
  layer.replace_expert(1, replacement(1));
  layer.replace_expert_on_stream(2, replacement(0), nullptr);
  layer.replace_expert_on_stream(2, replacement(2), nullptr);
  copies.clear();  // the arrays are the caller's again

  nvfp4_moe_batch placed = c_batch(batch);
  const DeviceBytes out(batch.out.size() * sizeof(float)), workspace(layer.workspace_bytes(9));
  placed.hidden = copy_of(batch.hidden);
  placed.topk_ids = copy_of(batch.ids);
  placed.topk_weights = reinterpret_cast<const float*>(copy_of(batch.weights));
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
  const std::vector<float> actual = to_floats(out.back(), DType::kF32);
  EXPECT_EQ(broken_limit(
                compare(expected.data(), actual.data(), batch.tokens, c.tiny.options.hidden_size),
                layer_limits(c.tiny.config(), batch.tokens)),
            "");
}

}  // namespace
}  // namespace nvfp4_moe::internal::test
