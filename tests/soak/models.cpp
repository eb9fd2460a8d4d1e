#include "soak/models.h"

#include <limits>

namespace nvfp4_moe::internal::test {
namespace {

// An expert of the same sizes that differs in every code and scale.
Expert altered(const Expert& expert) {
  Expert other = expert;
  for (Matrix* matrix : {&other.gate, &other.up, &other.down}) {
    for (uint8_t& byte : matrix->codes) byte ^= 0x11;
    matrix->tensor_scale *= 2;
  }
  return other;
}

Expert expert_of_sizes(int64_t hidden, int64_t intermediate) {
  std::mt19937 random(1);
  return Expert::random(hidden, intermediate, random);
}

bool same_matrix(const Matrix& matrix, const uint8_t* codes, const uint8_t* block_scales,
                 float tensor_scale) {
  return std::memcmp(matrix.codes.data(), codes, matrix.codes.size()) == 0 &&
         std::memcmp(matrix.block_scales.data(), block_scales, matrix.block_scales.size()) == 0 &&
         matrix.tensor_scale == tensor_scale;
}

}  // namespace

SoakModel SoakModel::from_arrays(const std::string& name, const MoeOptions& options,
                                 const std::function<void(nvfp4_moe_config&)>& choose) {
  SoakModel model;
  model.name_ = name;
  const auto arrays = std::make_shared<CLayer>(options);
  if (choose) choose(arrays->config);
  model.open_ = [arrays](nvfp4_moe_layer_options layer_options, nvfp4_moe_layer** layer) {
    layer_options.cache_directory = nullptr;  // the cache is for layers that come from files
    return nvfp4_moe_layer_open_tensors(&arrays->config, &arrays->tensors, &layer_options, layer);
  };
  model.versions_ = {arrays->tiny.experts[0], altered(arrays->tiny.experts[0])};
  model.learn(options);
  return model;
}

SoakModel SoakModel::from_checkpoint(const std::string& name, const std::string& path) {
  SoakModel model;
  model.name_ = name;
  const auto checkpoint = std::make_shared<const nvfp4_moe::Checkpoint>(path);
  model.open_ = [checkpoint](const nvfp4_moe_layer_options& layer_options,
                             nvfp4_moe_layer** layer) {
    return nvfp4_moe_layer_open_checkpoint(checkpoint->get(), 0, nullptr, &layer_options, layer);
  };
  const nvfp4_moe_config config = checkpoint->config(0);
  MoeOptions options;
  options.num_experts = config.num_experts;
  options.top_k = config.top_k;
  options.hidden_size = config.hidden_size;
  options.intermediate_size = config.intermediate_size;
  auto layer_options = nvfp4_moe::make<nvfp4_moe_layer_options>();
  layer_options.max_tokens = 1;
  const nvfp4_moe::Layer layer(*checkpoint, 0, layer_options);
  Expert own = expert_of_sizes(options.hidden_size, options.intermediate_size);
  nvfp4_moe_expert_out out = buffers(own);
  layer.unpack_expert(0, out);
  own.gate.tensor_scale = out.gate_tensor_scale;
  own.up.tensor_scale = out.up_tensor_scale;
  own.down.tensor_scale = out.down_tensor_scale;
  model.versions_ = {own, altered(own)};
  model.learn(options);
  return model;
}

void SoakModel::learn(const MoeOptions& options) {
  uint32_t seed = 1;
  for (const int64_t tokens : {int64_t{0}, int64_t{1}, int64_t{5}, kSoakMaxTokens, int64_t{9}})
    batches_.emplace_back(options, tokens, seed++);
  batches_.back().ids[0] = 9999;
  batches_.back().hidden[static_cast<size_t>(options.hidden_size)] =
      bf16_from_float(std::numeric_limits<float>::quiet_NaN());
  for (const char* backend : kSoakBackends) {
    auto layer_options = nvfp4_moe::make<nvfp4_moe_layer_options>();
    layer_options.backend = backend;
    layer_options.max_tokens = kSoakMaxTokens;
    layer_options.threads = 1;
    nvfp4_moe_layer* layer = nullptr;
    nvfp4_moe::check(open_(layer_options, &layer));
    const std::unique_ptr<nvfp4_moe_layer, decltype(&nvfp4_moe_layer_close)> owned(
        layer, nvfp4_moe_layer_close);
    size_t bytes = 0;
    nvfp4_moe::check(nvfp4_moe_layer_workspace_bytes(layer, kSoakMaxTokens, &bytes));
    const nvfp4_moe::Workspace workspace(bytes);
    for (TinyBatch batch : batches_) {
      for (const Expert& version : versions_) {
        const nvfp4_moe_expert expert = CLayer::expert(version);
        nvfp4_moe::check(nvfp4_moe_layer_replace_expert(layer, 0, &expert));
        const nvfp4_moe_batch c = c_batch(batch);
        nvfp4_moe::check(
            nvfp4_moe_layer_run(layer, &c, workspace.data(), workspace.size_bytes(), nullptr));
        auto status = nvfp4_moe::make<nvfp4_moe_run_status>();
        nvfp4_moe::check(
            nvfp4_moe_layer_run_status(layer, workspace.data(), workspace.size_bytes(), &status));
        right_.push_back({batch.out, status.bad_expert_ids, status.nonfinite_tokens});
      }
    }
  }
}

size_t SoakModel::version_of(size_t backend, size_t batch, const std::vector<float>& out) const {
  size_t version = 0;
  while (version < kVersions && !same_bits(out, right(backend, batch, version).out)) ++version;
  return version;
}

size_t SoakModel::version_of(const nvfp4_moe_expert_out& out) const {
  size_t version = 0;
  for (; version < kVersions; ++version) {
    const Expert& expert = versions_[version];
    if (same_matrix(expert.gate, out.gate_codes, out.gate_block_scales, out.gate_tensor_scale) &&
        same_matrix(expert.up, out.up_codes, out.up_block_scales, out.up_tensor_scale) &&
        same_matrix(expert.down, out.down_codes, out.down_block_scales, out.down_tensor_scale))
      break;
  }
  return version;
}

nvfp4_moe_expert_out SoakModel::buffers(Expert& expert) {
  auto out = nvfp4_moe::make<nvfp4_moe_expert_out>();
  out.gate_codes = expert.gate.codes.data();
  out.gate_block_scales = expert.gate.block_scales.data();
  out.up_codes = expert.up.codes.data();
  out.up_block_scales = expert.up.block_scales.data();
  out.down_codes = expert.down.codes.data();
  out.down_block_scales = expert.down.block_scales.data();
  return out;
}

}  // namespace nvfp4_moe::internal::test
