// Layers as the C interface's structs: the tiny layer, and a case of the case table.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "moe/tiny.h"
#include "nvfp4_moe/nvfp4_moe.hpp"

namespace nvfp4_moe::internal::test {

inline constexpr nvfp4_moe_status kOk = NVFP4_MOE_STATUS_OK,
                                  kInvalid = NVFP4_MOE_STATUS_INVALID_ARGUMENT;
inline constexpr nvfp4_moe_dtype kF32 = NVFP4_MOE_DTYPE_F32;

// The arrays of all experts, one after the other, and the structs that point to them.
struct CExperts {
  std::vector<uint8_t> arrays[6];  // (E, ...) gate, up, down: codes, block scales
  std::vector<float> scales[3];    // (E)
  nvfp4_moe_expert shared = nvfp4_moe::make<nvfp4_moe_expert>();
  nvfp4_moe_config config = nvfp4_moe::make<nvfp4_moe_config>();
  nvfp4_moe_layer_tensors tensors = nvfp4_moe::make<nvfp4_moe_layer_tensors>();
  nvfp4_moe_layer_options options = nvfp4_moe::make<nvfp4_moe_layer_options>();

  static nvfp4_moe_expert expert(const ExpertSource& e) {
    auto c = nvfp4_moe::make<nvfp4_moe_expert>();
    c.gate_codes = e.gate.codes;
    c.gate_block_scales = e.gate.block_scales;
    c.gate_tensor_scale = e.gate.tensor_scale;
    c.up_codes = e.up.codes;
    c.up_block_scales = e.up.block_scales;
    c.up_tensor_scale = e.up.tensor_scale;
    c.down_codes = e.down.codes;
    c.down_block_scales = e.down.block_scales;
    c.down_tensor_scale = e.down.tensor_scale;
    return c;
  }
  static nvfp4_moe_expert expert(const Expert& e) { return expert(e.source()); }

  explicit CExperts(const MoeOptions& o) {
    config.num_experts = o.num_experts;
    config.top_k = o.top_k;
    config.hidden_size = o.hidden_size;
    config.intermediate_size = o.intermediate_size;
    config.shared_intermediate_size = o.shared_intermediate_size;
    config.activation = static_cast<int32_t>(o.activation);
    config.swiglu_limit = o.swiglu_limit.value_or(0.0f);
    config.situ_gate_limit = o.situ_gate_limit.value_or(0.0f);
    config.situ_up_limit = o.situ_up_limit.value_or(0.0f);
    config.activation_format = static_cast<int32_t>(o.activation_format);
    config.expert_biases = o.expert_biases ? 1 : 0;
    options.max_tokens = 16;
    options.threads = 1;
  }
  void add(const ExpertSource& source) {
    const Nvfp4View* const matrices[] = {&source.gate, &source.up, &source.down};
    for (size_t i = 0; i < 3; ++i) {
      const Nvfp4View& m = *matrices[i];
      std::vector<uint8_t>&codes = arrays[2 * i], &block_scales = arrays[2 * i + 1];
      codes.insert(codes.end(), m.codes, m.codes + m.rows * m.cols / 2);
      block_scales.insert(block_scales.end(), m.block_scales,
                          m.block_scales + m.rows * m.cols / 16);
      if (m.rows > 0) scales[i].push_back(m.tensor_scale);
    }
    const auto start = [](const auto& array) { return array.empty() ? nullptr : array.data(); };
    tensors.gate_codes = start(arrays[0]);
    tensors.gate_block_scales = start(arrays[1]);
    tensors.gate_tensor_scales = start(scales[0]);
    tensors.up_codes = start(arrays[2]);
    tensors.up_block_scales = start(arrays[3]);
    tensors.up_tensor_scales = start(scales[1]);
    tensors.down_codes = start(arrays[4]);
    tensors.down_block_scales = start(arrays[5]);
    tensors.down_tensor_scales = start(scales[2]);
  }
  void set_shared(const ExpertSource& source) {
    shared = expert(source);
    tensors.shared = &shared;
  }
  nvfp4_moe::Layer open() const { return nvfp4_moe::Layer(config, tensors, options); }
  nvfp4_moe_status try_open() const {
    nvfp4_moe_layer* layer = reinterpret_cast<nvfp4_moe_layer*>(1);
    const nvfp4_moe_status code = nvfp4_moe_layer_open_tensors(&config, &tensors, &options, &layer);
    EXPECT_EQ(layer == nullptr, code != NVFP4_MOE_STATUS_OK);
    nvfp4_moe_layer_close(layer);
    return code;
  }
};

struct CLayer : CExperts {
  TinyLayer tiny;

  explicit CLayer(const MoeOptions& layer_options = tiny_options())
      : CExperts(layer_options), tiny(layer_options) {
    for (const Expert& e : tiny.experts) add(e.source());
    if (!tiny.shared.empty()) set_shared(tiny.shared[0].source());
  }
  std::vector<float> expected(TinyBatch& batch) const { return run_tiny(*open_tiny(tiny), batch); }
};

// gate's and up's biases as halves of one (E, 2I) array, as models store them. data must outlive
// it.
struct CCase : CExperts {
  std::vector<float> gate_up_biases, down_biases;

  explicit CCase(const CaseData& data) : CExperts(data.spec.options) {
    const ExpertRange& range = data.spec.range;
    for (int64_t e = 0; e < range.count; ++e) {
      add(data.expert(e));
      const ExpertBuffers& b = data.experts[static_cast<size_t>(e)];
      for (const std::vector<float>* biases : {&b.gate_bias, &b.up_bias})
        gate_up_biases.insert(gate_up_biases.end(), biases->begin(), biases->end());
      down_biases.insert(down_biases.end(), b.down_bias.begin(), b.down_bias.end());
    }
    if (data.spec.options.shared_intermediate_size > 0) set_shared(data.expert(kSharedExpert));
    if (data.spec.options.expert_biases) {
      const int64_t gates =
          gate_rows(data.spec.options.activation, data.spec.options.intermediate_size);
      tensors.gate_biases = gates > 0 ? gate_up_biases.data() : nullptr;
      tensors.up_biases = gate_up_biases.data() + gates;
      tensors.down_biases = down_biases.data();
      tensors.gate_up_biases_stride =
          (gates + data.spec.options.intermediate_size) * static_cast<int64_t>(sizeof(float));
    }
    options.max_tokens = std::max<int64_t>(data.spec.tokens, 1);
    options.backend = "cpu";
    options.first_expert = range.first;
    options.expert_count = range.count;
  }
};

inline nvfp4_moe_batch c_batch(TinyBatch& batch) {
  auto c = nvfp4_moe::make<nvfp4_moe_batch>();
  c.tokens = batch.tokens;
  c.hidden = batch.hidden.data();
  c.topk_ids = batch.ids.data();
  c.topk_weights = batch.weights.data();
  c.out = batch.out.data();
  c.out_dtype = NVFP4_MOE_DTYPE_F32;
  return c;
}

}  // namespace nvfp4_moe::internal::test
