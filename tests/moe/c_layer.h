// The tiny layer as the C interface's structs.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "moe/tiny.h"
#include "nvfp4_moe/nvfp4_moe.hpp"

namespace nvfp4_moe::internal::test {

struct CLayer {
  TinyLayer tiny;
  std::vector<uint8_t> arrays[6];  // (E, ...) gate, up, down: codes, block scales
  std::vector<float> scales[3];    // (E)
  nvfp4_moe_expert shared = nvfp4_moe::make<nvfp4_moe_expert>();
  nvfp4_moe_config config = nvfp4_moe::make<nvfp4_moe_config>();
  nvfp4_moe_layer_tensors tensors = nvfp4_moe::make<nvfp4_moe_layer_tensors>();
  nvfp4_moe_layer_options options = nvfp4_moe::make<nvfp4_moe_layer_options>();

  static nvfp4_moe_expert expert(const Expert& e) {
    auto c = nvfp4_moe::make<nvfp4_moe_expert>();
    c.gate_codes = e.gate.codes.data();
    c.gate_block_scales = e.gate.block_scales.data();
    c.gate_tensor_scale = e.gate.tensor_scale;
    c.up_codes = e.up.codes.data();
    c.up_block_scales = e.up.block_scales.data();
    c.up_tensor_scale = e.up.tensor_scale;
    c.down_codes = e.down.codes.data();
    c.down_block_scales = e.down.block_scales.data();
    c.down_tensor_scale = e.down.tensor_scale;
    return c;
  }

  explicit CLayer(const MoeOptions& layer_options = tiny_options()) : tiny(layer_options) {
    for (const Expert& e : tiny.experts) {
      int i = 0;
      for (const Matrix* m : {&e.gate, &e.up, &e.down}) {
        arrays[2 * i].insert(arrays[2 * i].end(), m->codes.begin(), m->codes.end());
        arrays[2 * i + 1].insert(arrays[2 * i + 1].end(), m->block_scales.begin(), m->block_scales.end());
        scales[i++].push_back(m->tensor_scale);
      }
    }
    const MoeOptions& o = tiny.options;
    config.num_experts = o.num_experts;
    config.top_k = o.top_k;
    config.hidden_size = o.hidden_size;
    config.intermediate_size = o.intermediate_size;
    config.shared_intermediate_size = o.shared_intermediate_size;
    tensors.gate_codes = arrays[0].data();
    tensors.gate_block_scales = arrays[1].data();
    tensors.gate_tensor_scales = scales[0].data();
    tensors.up_codes = arrays[2].data();
    tensors.up_block_scales = arrays[3].data();
    tensors.up_tensor_scales = scales[1].data();
    tensors.down_codes = arrays[4].data();
    tensors.down_block_scales = arrays[5].data();
    tensors.down_tensor_scales = scales[2].data();
    if (!tiny.shared.empty()) {
      shared = expert(tiny.shared[0]);
      tensors.shared = &shared;
    }
    options.max_tokens = 16;
    options.threads = 1;
  }
  nvfp4_moe::Layer open() const { return nvfp4_moe::Layer(config, tensors, options); }
  nvfp4_moe_status try_open() const {
    nvfp4_moe_layer* layer = reinterpret_cast<nvfp4_moe_layer*>(1);
    const nvfp4_moe_status code = nvfp4_moe_layer_open_tensors(&config, &tensors, &options, &layer);
    EXPECT_EQ(layer == nullptr, code != NVFP4_MOE_STATUS_OK);
    nvfp4_moe_layer_close(layer);
    return code;
  }
  std::vector<float> expected(TinyBatch& batch) const {
    LayerOptions layer_options = tiny_layer_options();
    return run_tiny(*MoeLayer::open(tiny.config(), tiny.source(), layer_options).value(), batch);
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
